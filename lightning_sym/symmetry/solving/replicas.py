"""Replicas: copies of units become positions of these units, and blocks of copies may be permuted.

See docs/theory/transformers.md, 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints, rising_pairs
from lightning_sym.symmetry.numbering import Hashes, components, marked, mix
from lightning_sym.symmetry.solving.copies import Copies, Sheets, sheets
from lightning_sym.symmetry.solving.nesting import Nesting, roles
from lightning_sym.symmetry.solving.refinement import Orbits
from lightning_sym.symmetry.solving.scales import Table
from lightning_sym.symmetry.solving.units import Positions, place_key

# Copies, the atoms that they copy, and the indices of the copies.
Copied = tuple[Ints, Ints, Ints]


@dataclass
class Folded:
    """Copies folded into positions of the units that they copy.

    Attributes:
        origin: The root of the copied unit for each root; the root itself if it is not a copy.
        mark: A hash that distinguishes each root's positions from others of that unit; 0 if it is not a copy.
        copy: Index of each root among the unit's copies, if these belong to slots; otherwise -1.
        slots_of: The slots of each unit's copies, in the order of their indices.
        atoms: For each slot, its parents and its members that are not copies. The order is common to slots that may be
            permuted; parents come first.
        systems: Sets of slots that may be permuted with one another.
    """

    origin: Ints
    mark: Ints
    copy: Ints
    slots_of: dict[int, Ints] = field(default_factory=dict)
    atoms: list[Ints] = field(default_factory=list)
    systems: list[Ints] = field(default_factory=list)

    @cached_property
    def all_atoms(self) -> Ints:
        """The atoms of all slots, concatenated."""
        return np.concatenate([np.zeros(0, np.int64), *self.atoms])

    @cached_property
    def heads(self) -> Ints:
        """The atom that represents each slot."""
        return np.array([atoms[0] for atoms in self.atoms], np.int64)


def fold_replicas(
    copies: Sequence[Copied], positions: Positions, nesting: Nesting, colour: Hashes
) -> tuple[Positions, Nesting, Folded | None]:
    """Fold copies into positions of the units that they copy.

    Args:
        copies: All copies.
        positions: The positions of units; copies count as separate units.
        nesting: Parents and members of blocks; copies count as separate units.
        colour: Hash of the positions of each root.

    Returns:
        The positions of units; parents and members of blocks; and the copies, None if there are none.
    """
    if not copies:
        return positions, nesting, None
    folded, fixed = _fold(copies, positions, nesting, colour)
    origin, atom, tag = folded.origin, positions.atom, positions.tag  # changed in place to save memory
    held_at = np.flatnonzero((folded.mark > 0)[atom])
    tag[held_at] = (place_key(folded.mark[atom[held_at]], tag[held_at]) >> np.uint64(1)).astype(np.int64)
    copy, of_planes = folded.copy.astype(np.int32)[atom], positions.of_planes
    if positions.finder.any:
        copied = place_key(folded.mark, folded.copy)[atom[positions.asked]]
        of_planes = of_planes._replace(key=mix(of_planes.key ^ copied))
    atom, root = origin.astype(np.int32)[atom], origin[positions.root]
    positions = replace(positions, atom=atom, tag=tag, copy=copy, root=root, fixed=fixed, of_planes=of_planes)
    nesting = Nesting(rising_pairs(*origin[nesting.pairs]), origin[nesting.shared])
    folded.origin = folded.mark = folded.copy = np.zeros(0, np.int64)  # included in positions from now on
    return positions, nesting, folded


def _fold(copies: Sequence[Copied], positions: Positions, nesting: Nesting, colour: Hashes) -> tuple[Folded, Bools]:
    """Decide for each copy whether it belongs to a slot.

    Copies outside blocks, or in less regular ones than those of repeated heads, keep their index: they move with their
    unit only.

    Returns:
        The copies; and a mask of fixed roots, including those with irregular copies.
    """
    root, fixed, number = positions.root, positions.fixed.copy(), len(positions.root)
    role, pairs = roles(nesting, colour)
    apart = positions.marked(*(label.atom for label in positions.grouped.values()))
    folded = Folded(np.arange(number), np.zeros(number, np.int64), np.full(number, -1))
    copy, original, count = (np.concatenate([part.ravel() for part in parts]) for parts in zip(*copies, strict=True))
    copy, original = root[copy], root[original]
    _, first = np.unique(copy * number + original, return_index=True)
    first = first[copy[first] != original[first]]
    copy, original, count = copy[first], original[first], count[first]
    again = np.bincount(copy, minlength=number)[copy] > 1
    fixed[copy[again]] = fixed[original[again]] = True
    copy, original, count = copy[~again], original[~again], count[~again]
    named = _named(copy, original, pairs, apart, number)
    folded.origin[copy] = original
    _find_slots(folded, copy, original, named, pairs, role, fixed)
    numbers = np.zeros(number, np.int64)
    numbers[copy] = count + 1
    # The remaining copies are distinguished by their index, and by the indices of the copies that they copy.
    left = copy[folded.copy[copy] < 0]
    while left.size:
        with np.errstate(over="ignore"):
            folded.mark[left] = (mix(folded.mark[left] * 3 + numbers[left]) >> np.uint64(1)).astype(np.int64)
        numbers[left] = numbers[folded.origin[left]]
        left = left[numbers[left] > 0]
    while not np.array_equal(folded.origin, folded.origin[folded.origin]):
        folded.origin = folded.origin[folded.origin]
    fixed[folded.origin[copy[fixed[copy]]]] = True
    return folded, fixed


def _named(copy: Ints, original: Ints, pairs: Ints, apart: Bools, number: int) -> Bools:
    """Return a mask of roots that are copies outside blocks, copies of copies, or blocks that are copied."""
    member, parent, chained = (np.zeros(number, bool) for _ in range(3))
    parent[pairs[0]] = member[pairs[1]] = True
    chained[original] = True
    named = np.zeros(number, bool)
    named[copy] = ~member[copy] | parent[copy] | chained[copy] | apart[copy]
    return named


def _split(values: Ints, kind: Ints) -> list[Ints]:
    """Split values into arrays of one kind."""
    order = np.argsort(kind, kind="stable")
    return np.split(values[order], np.flatnonzero(np.diff(kind[order])) + 1)


def _find_slots(
    folded: Folded, copy: Ints, original: Ints, named: Bools, pairs: Ints, role: Hashes, fixed: Bools
) -> None:
    """Find the slots of all copies that are not named, group by group (such as queries that share keys)."""
    if not copy.size:
        return
    number, nested = len(role), (pairs[0], pairs[1])
    slot_of, outer = components(number, [nested]), components(number, [nested, (copy, original)])
    is_copy = marked(number, copy)
    parents, involved = np.unique(pairs[0]), np.unique(pairs)
    atoms_of: dict[int, Ints] = {
        int(slot_of[atoms[0]]): atoms for atoms in _split(involved, slot_of[involved]) if atoms.size
    }
    for group in _split(np.arange(len(copy)), outer[copy]):
        own, of = copy[group], original[group]
        slots, units = np.unique(slot_of[own]), np.unique(of)
        regular = len(own) == len(slots) * len(units) == len(rising_pairs(slot_of[own], of).T)
        if named[own].any() or not regular or np.isin(slot_of[units], slots).any():
            continue
        with np.errstate(over="ignore"):
            kinds = [mix(role[atoms_of[slot]]).sum() for slot in slots.tolist()]
            tied = [
                mix(role[own[slot_of[own] == slot]] ^ mix(of[slot_of[own] == slot])).sum() for slot in slots.tolist()
            ]
        places = sorted(range(len(slots)), key=lambda i: (int(kinds[i]), int(atoms_of[int(slots[i])][0])))
        first = len(folded.atoms)
        systems: dict[tuple[int, int], list[int]] = {}
        for rank, place in enumerate(places):
            atoms = atoms_of[int(slots[place])]
            rest = atoms[~is_copy[atoms]]
            rest = rest[np.lexsort((rest, role[rest], ~np.isin(rest, parents)))]
            folded.atoms.append(rest)
            mine = own[slot_of[own] == slots[place]]
            folded.copy[mine] = rank
            folded.mark[mine] = (mix(role[mine]) >> np.uint64(1)).astype(np.int64)
            if not fixed[atoms].any():
                systems.setdefault((int(kinds[place]), int(tied[place])), []).append(first + rank)
        folded.slots_of.update(dict.fromkeys(units.tolist(), first + np.arange(len(slots))))
        folded.systems += [np.array(system) for system in systems.values() if len(system) > 1]


def copies_of(
    orbits: Orbits, number_of: Ints, folded: Folded | None, positions: Positions, generators: Sequence[Table]
) -> tuple[Copies | None, ...]:
    """Return the copies of each orbit's units; empty if no unit has copies.

    Args:
        orbits: The units.
        number_of: Index of each root as a unit or parent.
        folded: Copies folded into positions of units.
        positions: The positions of units.
        generators: Tables of scales and of signs.
    """
    slots_of = [_slots_of(orbits.roots[group], number_of, folded) for group in orbits.units]
    if not any(slots is not None for slots in slots_of):
        return ()
    result: list[Copies | None] = []
    for index, (slots, matrix) in enumerate(zip(slots_of, orbits.columns, strict=True)):
        if slots is None:
            result.append(None)
            continue
        columns = sheets_at(positions, matrix[0], slots.shape[1])
        scales, signs = (_sheets_of(own, index, matrix, columns) for own in generators)
        result.append(Copies(slots, columns, scales, signs))
    return tuple(result)


def sheets_at(positions: Positions, at: Ints, copies: int) -> Sheets:
    """Assign columns to copies, given their positions for one unit."""
    return sheets(place_key(positions.where[at], positions.tag[at]), positions.copy[at].astype(np.int64), copies)


def _slots_of(roots: Ints, number_of: Ints, folded: Folded | None) -> Ints | None:
    """Return the slots of each unit's copies; None if it has none."""
    if folded is None or int(roots[0]) not in folded.slots_of:
        return None
    return number_of[folded.heads[np.stack([folded.slots_of[int(root)] for root in roots])]]


def _sheets_of(generators: Table, orbit: int, columns: Ints, positions: Sheets) -> Sheets:
    """Assign an orbit's generators to copies, given the assignment of its columns."""
    forms, table, at = generators.forms, generators.of_units[orbit], generators.found_at[orbit]
    copy = positions.copy[at].copy()
    for index in np.flatnonzero(copy >= 0):  # a generator that acts equally on all copies belongs to the unit
        partners = positions.partner[at[index]]
        places = columns[0, partners[partners >= 0]]
        if all(int(table[0, index]) in forms[place].indices for place in places):
            copy[index] = -1
    return sheets(positions.partner[at].max(1), copy, positions.partner.shape[1])
