"""Copies of units: a value that is repeated, such as the keys of grouped queries, whose copies may change places.

A copy is a unit of its own while the network is traced, which says of which unit it is a copy. Where it belongs to one
of several blocks (a query's head), whole blocks of copies may change places: each is a *slot*. In the end the positions
of copies are positions of the unit, and only slots tell them apart. See docs/theory/intertwiners.md, 2.6.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Bools = NDArray[np.bool_]
MEET = "positions that would have to move differently meet"


@dataclass(frozen=True)
class Sheets:
    """Which columns of a table belong to copies, and where the same column is for another copy.

    Attributes:
        copy: For each column the number of the copy, or -1. Shape (columns,).
        partner: For each column and copy, the column that says the same of that copy; -1 if none does, and the column
            itself if it belongs to no copy. Shape (columns, copies).
    """

    copy: Ints
    partner: Ints

    @property
    def complete(self) -> bool:
        """Whether each column has its like for all copies."""
        return bool((self.partner >= 0).all())


@dataclass(frozen=True)
class Copies:
    """The copies of an orbit's units.

    Attributes:
        slots: For each unit and each of its copies, the slot to which the copy belongs: a unit that stands for a block
            of copies. Shape (units, copies).
        columns: Which of the orbit's columns belong to copies.
        scales: The same of the columns of its table of scales.
        signs: The same of the columns of its table of signs.
    """

    slots: Ints
    columns: Sheets
    scales: Sheets
    signs: Sheets

    @property
    def count(self) -> int:
        """How many copies each unit has."""
        return int(self.slots.shape[1])


def arriving(table: Ints, sheets: Sheets | None, place: Ints, rank: Ints) -> Ints:
    """Return what a permutation brings to each entry of a table of units.

    Args:
        table: A row per unit.
        sheets: Which of its columns belong to copies.
        place: For each unit, the row of the one that comes in its place.
        rank: For each unit and copy, the number of the copy (among those of the unit that comes) that comes.
    """
    if sheets is None or not (sheets.copy >= 0).any():
        return table[place]
    column = np.broadcast_to(np.arange(table.shape[1]), table.shape).copy()
    of_copies = np.flatnonzero(sheets.copy >= 0)
    column[:, of_copies] = sheets.partner[of_copies[None, :], rank[:, sheets.copy[of_copies]]]
    result: Ints = table[place[:, None], column]
    return result


@dataclass
class Folded:
    """Copies that have become positions of the units of which they are copies.

    Attributes:
        origin: For each root, the one of whose positions its own are; itself, unless it is a copy.
        mark: For each root, what tells its positions from others of that unit; 0 unless it is a copy.
        copy: For each root, which of the unit's copies it is, if they belong to slots; otherwise -1.
        slots_of: By unit, the slots of its copies in the order of their numbers.
        atoms: For each slot, its parents and its members that are no copies, in an order that slots which may change
            places have in common, parents first.
        systems: Slots that may change places with one another.
    """

    origin: Ints
    mark: Ints
    copy: Ints
    slots_of: dict[int, Ints] = field(default_factory=dict)
    atoms: list[Ints] = field(default_factory=list)
    systems: list[Ints] = field(default_factory=list)

    @cached_property
    def all_atoms(self) -> Ints:
        """The atoms of all slots, slot by slot."""
        return np.concatenate([np.zeros(0, np.int64), *self.atoms])

    @cached_property
    def heads(self) -> Ints:
        """For each slot the atom that stands for it."""
        return np.array([atoms[0] for atoms in self.atoms], np.int64)


def fold(
    copies: list[tuple[Ints, Ints, Ints]], root: Ints, pairs: Ints, role: Hashes, fixed: Bools, apart: Bools, mix: Any
) -> Folded:
    """Decide for each copy whether it belongs to a slot.

    Copies that do not (they are in no block, or not as regularly as a repeated value of heads is) keep their number:
    they move with their unit only.

    Args:
        copies: Copies, of which atoms they are copies, and their numbers.
        root: For each atom, the one with which it was merged.
        pairs: Parents and members of blocks. Shape (2, pairs).
        role: For each root, what it is like.
        fixed: For each root whether it stays; those that are copied irregularly are added.
        apart: For each root, whether its copies keep their numbers in any case.
        mix: Scrambles integers.
    """
    number = len(root)
    folded = Folded(np.arange(number), np.zeros(number, np.int64), np.full(number, -1))
    copy, original, count = (np.concatenate([part.ravel() for part in parts]) for parts in zip(*copies, strict=True))
    copy, original = root[copy], root[original]
    _, first = np.unique(np.stack([copy, original]), axis=1, return_index=True)
    first = first[copy[first] != original[first]]
    copy, original, count = copy[first], original[first], count[first]
    again = np.bincount(copy, minlength=number)[copy] > 1
    fixed[copy[again]] = fixed[original[again]] = True
    copy, original, count = copy[~again], original[~again], count[~again]
    named = _named(copy, original, pairs, apart, number)
    slot_of = components(number, pairs)
    outer = components(number, np.concatenate([pairs, np.stack([copy, original])], axis=1))
    is_copy = np.zeros(number, bool)
    is_copy[copy] = True
    numbers = np.zeros(number, np.int64)
    folded.origin[copy] = original
    numbers[copy] = count + 1
    _find_slots(folded, copy, original, named, slot_of, outer, pairs, role, fixed, is_copy, mix)
    # What is left is told apart by its number, and by that of what it is a copy of.
    left = copy[folded.copy[copy] < 0]
    while left.size:
        with np.errstate(over="ignore"):
            folded.mark[left] = (mix(folded.mark[left] * 3 + numbers[left]) >> np.uint64(1)).astype(np.int64)
        numbers[left] = numbers[folded.origin[left]]
        left = left[numbers[left] > 0]
    while not np.array_equal(folded.origin, folded.origin[folded.origin]):
        folded.origin = folded.origin[folded.origin]
    fixed[folded.origin[copy[fixed[copy]]]] = True
    return folded


def components(number: int, pairs: Ints) -> Ints:
    """Return numbers of the connected parts of a graph of so many vertices. `pairs` are its edges, shape (2, edges)."""
    graph = sparse.coo_matrix((np.ones(pairs.shape[1], np.int8), (pairs[0], pairs[1])), shape=(number, number))
    labels: Ints = sparse.csgraph.connected_components(graph, directed=False)[1].astype(np.int64)
    return labels


def _named(copy: Ints, original: Ints, pairs: Ints, apart: Bools, number: int) -> Bools:
    """Return which roots are copies in no block, copies of copies, or blocks of which there are copies."""
    member, parent, chained = (np.zeros(number, bool) for _ in range(3))
    parent[pairs[0]] = member[pairs[1]] = True
    chained[original] = True
    named = np.zeros(number, bool)
    named[copy] = ~member[copy] | parent[copy] | chained[copy] | apart[copy]
    return named


def _split(values: Ints, kind: Ints) -> list[Ints]:
    """Split values by their kinds."""
    order = np.argsort(kind, kind="stable")
    return np.split(values[order], np.flatnonzero(np.diff(kind[order])) + 1)


def _find_slots(
    folded: Folded, copy: Ints, original: Ints, named: Bools, slot_of: Ints, outer: Ints, pairs: Ints,
    role: Hashes, fixed: Bools, is_copy: Bools, mix: Any,
) -> None:  # fmt: skip
    """Find the slots of all copies that are not named, group by group: of queries that share keys, say."""
    if not copy.size:
        return
    parents, involved = np.unique(pairs[0]), np.unique(pairs)
    atoms_of: dict[int, Ints] = {
        int(slot_of[atoms[0]]): atoms for atoms in _split(involved, slot_of[involved]) if atoms.size
    }
    for group in _split(np.arange(len(copy)), outer[copy]):
        own, of = copy[group], original[group]
        slots, units = np.unique(slot_of[own]), np.unique(of)
        regular = len(own) == len(slots) * len(units) == len(np.unique(np.stack([slot_of[own], of]), axis=1).T)
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


def sheets(kind: Ints | Hashes, copy: Ints, copies: int) -> Sheets:
    """Return which columns belong to copies, given what each says (equal for all copies), and of which copy."""
    partner = np.full((len(kind), copies), -1)
    for column in range(len(kind)):
        if copy[column] < 0:
            partner[column] = column
        else:
            like = np.flatnonzero((kind == kind[column]) & (copy >= 0))
            partner[column, copy[like]] = like
    return Sheets(copy, partner)
