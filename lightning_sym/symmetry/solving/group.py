"""The solution of all constraints: the group of permutations, scales, signs and matrices."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints, give_back_memory
from lightning_sym.symmetry.numbering import Hashes, flat, marked
from lightning_sym.symmetry.solving.blocks import Blocks, find_blocks
from lightning_sym.symmetry.solving.copies import Copies
from lightning_sym.symmetry.solving.gained import Known, find_gained
from lightning_sym.symmetry.solving.half_turns import Turned, reflected, solve_half_turns, with_half_turns
from lightning_sym.symmetry.solving.nesting import Nesting, find_nesting, heads_with_one_gain, merged
from lightning_sym.symmetry.solving.refinement import Orbits, colours, columns_of, refine, sorted_groups
from lightning_sym.symmetry.solving.replicas import Copied, Folded, copies_of, fold_replicas, sheets_at
from lightning_sym.symmetry.solving.scales import (
    Forms,
    Table,
    needlessly_fixed,
    scales_at,
    solve_scales,
    tabulate,
)
from lightning_sym.symmetry.solving.streams import find_dense, find_met, find_rotations
from lightning_sym.symmetry.solving.structure import VALUE, Slot, Structure
from lightning_sym.symmetry.solving.units import Positions, merge_units
from lightning_sym.symmetry.solving.unread import unread_units
from lightning_sym.symmetry.tracing.labels import Labels

_NOTHING = np.zeros(0, np.int64)
_MANY = 1_000_000  # number of atoms above which memory is returned to the system
# Bias, weight, the weight's axis, and the amount: see Structure.absorbed.
Absorbed = tuple[str, str, int, float]


class Group(NamedTuple):
    """A network's group without translations and rank-one maps.

    Attributes:
        structure: The group on parameters and buffers.
        values: The same group on named values inside the network.
        notes: Notes on limits of the group.
        unread: Notes on units that nothing reads, with their positions: translations may move all of their weights.
    """

    structure: Structure
    values: Structure
    notes: list[str]
    unread: dict[str, Ints]


class _Solved(NamedTuple):
    """Parts of the solution, to be assembled into structures.

    Attributes:
        positions: The positions of units.
        colour: Hash of the places of each root.
        folded: Copies folded into positions of units.
        orbits: The units and their permutations.
        blocks: Systems of blocks.
        scales: Generators of scales.
        signs: Generators of signs.
        copies: The copies of each orbit's units.
        end: Number of positions of parameters, including grouped weights.
    """

    positions: Positions
    colour: Hashes
    folded: Folded | None
    orbits: Orbits
    blocks: Blocks
    scales: Table
    signs: Table
    copies: tuple[Copies | None, ...]
    end: int


class _Unsolved(NamedTuple):
    """Units, before it is known which of them permutations and matrices move.

    Attributes:
        positions: The positions of units.
        forms: Scales and signs by position.
        colour: Hash of the places of each root.
        nesting: Parents and members of blocks.
        held: Notes on scales that are fixed.
        turned: Half turns.
    """

    positions: Positions
    forms: Forms
    colour: Hashes
    nesting: Nesting
    held: list[str]
    turned: Turned | None


def find_group(labels: Labels, known: Known) -> Group:
    """Solve the constraints of a network's operations.

    Args:
        labels: The labels and constraints. Equations and pairs are released once they are solved.
        known: Names of buffers.
    """
    walk, constraints = labels.walk, labels.walk.constraints
    _give_back(constraints.atoms)
    by_variable = solve_scales(constraints)
    labels = reflected(labels)
    held, turned = needlessly_fixed(constraints, walk.axis_labels), solve_half_turns(constraints)
    for equations in (constraints.magnitude_equations, constraints.sign_equations):
        equations.clear()  # for large networks these dominate memory
    _give_back(constraints.atoms)
    positions = merge_units(constraints, walk.axis_labels, walk.grouped)
    for seen in (constraints.merges, constraints.contracted, constraints.turned, constraints.occurrences):
        seen.clear()
    _give_back(constraints.atoms)
    forms = scales_at(positions, by_variable)
    del by_variable
    colour = colours(positions, forms)
    nesting = find_nesting(constraints, positions, colour)
    shared = heads_with_one_gain(nesting, colour, positions.fixed)
    kept = replace(positions, atom=positions.atom.copy(), tag=positions.tag.copy()) if shared else positions
    unsolved = _Unsolved(positions, forms, colour, nesting, held, turned)
    found = _found(labels, known, unsolved, constraints.copies)
    assert found is not None
    group, mixed = found
    shared = [own for own in shared if not mixed[own.members].any()]
    if shared:  # units of heads that no matrices mix
        positions = replace(kept, **merged(shared, kept.root, kept.atom))
        nesting = nesting.without(own.gains for own in shared)
        unsolved = _Unsolved(positions, forms, colours(positions, forms), nesting, held, turned)
        copies = [*constraints.copies, *(own.copies for own in shared)]
        more = _found(labels, known, unsolved, copies, np.array([own.gains[0] for own in shared]))
        if more is not None and _freedom(more[0].structure) > _freedom(group.structure):
            group = more[0]
    return group


def _found(
    labels: Labels, known: Known, unsolved: _Unsolved, copied: Sequence[Copied], repeated: Ints = _NOTHING
) -> tuple[Group, Bools] | None:
    """Find the group, given the units and which of them move together.

    Args:
        labels: See :func:`find_group`.
        known: See there.
        unsolved: The units. Their positions change.
        copied: All copies.
        repeated: Roots of which all copies must move in blocks.

    Returns:
        The group, and a mask of the roots that matrices mix; None if those copies do not.
    """
    positions, forms, colour, nesting, held, turned = unsolved
    walk, constraints = labels.walk, labels.walk.constraints
    positions, nesting, folded = fold_replicas(copied, positions, nesting, colour)
    if folded is not None:
        if not folded.slots_of.keys() >= {*repeated.tolist()}:
            return None
        colour = colours(positions, forms)
    _give_back(constraints.atoms)
    orbits = refine(positions, forms, colour, nesting)
    blocks = find_blocks(nesting, colour, positions, orbits.unit_of, folded)
    end = positions.own + sum(label.size for label in walk.grouped.values())
    scales = tabulate(orbits.columns, forms.magnitudes, end, modulo_two=False)
    forms = forms._replace(magnitudes=scales.forms)  # replaces the large original
    dense, between = find_dense(constraints, positions, orbits, forms)
    signs = tabulate(orbits.columns, forms.signs, end, modulo_two=True)
    del forms
    copies = copies_of(orbits, blocks.number_of, folded, positions, (scales, signs))
    irregular = [own.slots for own in copies if own is not None and not (own.scales.complete and own.signs.complete)]
    if irregular:  # the action of block permutations on their scales is unknown
        if len(repeated):
            return None
        blocks = blocks.without(flat(irregular))
    in_blocks = marked(int(blocks.number_of.max(initial=-1)) + 1, *blocks.members)
    movable = [  # units in cells of size 1 move with blocks only
        moves and (len(units) == 1 or bool(np.bincount(cells).max() > 1) or bool(in_blocks[units].any()))
        for moves, units, cells in zip(orbits.movable, orbits.units, orbits.cells, strict=True)
    ]
    orbits = orbits._replace(movable=movable)
    solved = _Solved(positions, colour, folded, orbits, blocks, scales, signs, copies, end)
    structure = _on_parameters(solved, walk.kinds, dense, walk.absorbed)
    structure, values = with_half_turns(turned, structure, _on_values(solved, structure), positions)
    del solved
    positions = replace(positions, where=_NOTHING, tag=_NOTHING, copy=_NOTHING)  # releases memory
    rotations, why_not = find_rotations(
        structure, find_met(constraints, positions, orbits, colour, nesting), walk.gains
    )
    gained, without = find_gained(structure, between, walk.gains, walk.batch_norms, known)
    structure, values = (
        replace(each, rotations=tuple(rotations), gained=tuple(gained)) for each in (structure, values)
    )
    counts = {"scales": scales.left_out, "signs": signs.left_out}
    apart = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    left_out = [f"{apart} that only act together with others are left out"] * bool(apart)
    group = Group(
        replace(structure, charts=labels.charts),
        values,
        [*constraints.notes, *held, *left_out, *why_not, *without],
        unread_units(structure, positions, orbits, constraints, walk.tensors),
    )
    units = [*structure.dense, *(own.units for own in rotations), *(own.units for own in gained)]
    return group, marked(len(positions.root), orbits.roots[flat(units)])


def _freedom(structure: Structure) -> tuple[float, int]:
    return structure.log_order, len(structure.rotations)


def _give_back(atoms: int) -> None:
    """Return freed memory to the system if there are many atoms: glibc keeps it between large arrays."""
    if atoms > _MANY:
        give_back_memory()


def _on_parameters(
    solved: _Solved, kinds: Mapping[str, tuple[str, float]], dense: tuple[Ints, ...], absorbed: Sequence[Absorbed]
) -> Structure:
    """Return the group on parameters and buffers.

    Args:
        solved: Parts of the solution.
        kinds: The kind of each buffer, see :class:`Slot`.
        dense: See :class:`Structure`.
        absorbed: See :class:`Structure`.
    """
    positions, orbits, unit_of, folded = solved.positions, solved.orbits, solved.orbits.unit_of, solved.folded
    slots = [
        _slot(positions, index, unit_of, int(positions.offset[index]), kinds) for index in range(positions.parameters)
    ]
    for name, label in positions.grouped.items():
        # Positions of a label over two axes: within a row, units follow the order of their columns.
        first, shape = slots[-1].rows.stop, label.atom.shape
        slots.append(Slot(name, (0, 1), first, shape, unit_of[positions.root[label.atom]], *VALUE))
    units = len(orbits.roots)
    if folded is not None:
        units = max(units, int(solved.blocks.number_of[folded.all_atoms].max(initial=-1)) + 1)
    known = positions.of_planes.within(slice(positions.own))
    return Structure(
        slots=tuple(slots),
        units=units,
        orbits=tuple(orbits.units),
        movable=tuple(orbits.movable),
        columns=tuple(orbits.columns),
        cells=tuple(orbits.cells),
        blocks=solved.blocks.members,
        magnitudes=solved.scales.forms[: solved.end],
        signs=solved.signs.forms[: solved.end],
        scale_table=solved.scales.of_units,
        sign_table=solved.signs.of_units,
        dense=dense,
        absorbed=tuple(absorbed),
        copies=solved.copies,
        planes=positions.finder.of_parameters(orbits.columns, known, (solved.scales.forms, solved.signs.forms)),
    )


def _on_values(solved: _Solved, structure: Structure) -> Structure:
    """Return the group on named values inside the network.

    Args:
        solved: Parts of the solution.
        structure: The group on parameters and buffers.
    """
    positions, blocks, at = solved.positions, solved.blocks, solved.positions.of_values
    orbits = list(solved.orbits.units)
    if solved.folded is not None:  # the atoms of slots occur inside the network only
        atoms = solved.folded.all_atoms
        inside = atoms[blocks.number_of[atoms] >= len(solved.orbits.roots)]
        orbits += [blocks.number_of[inside[group]] for group in sorted_groups(solved.colour[inside])]
    orbits += [part for numbers in blocks.parents for part in numbers.T]
    columns = columns_of(
        orbits, blocks.number_of[positions.atom[at]], positions, at, solved.colour[solved.orbits.roots]
    )
    firsts = itertools.accumulate((positions.places[index].label.size for index in positions.named), initial=0)
    known = positions.of_planes.within(slice(positions.own, None))
    return replace(
        structure,
        slots=tuple(
            _slot(positions, index, blocks.number_of, first)
            for index, first in zip(positions.named, firsts, strict=False)
        ),
        units=structure.units + sum(numbers.size for numbers in blocks.parents),
        orbits=tuple(orbits),
        movable=(*structure.movable, *[True] * (len(orbits) - len(structure.movable))),
        columns=tuple(columns),
        magnitudes=solved.scales.forms[solved.end :],
        signs=solved.signs.forms[solved.end :],
        copies=tuple(
            None if own is None else replace(own, columns=sheets_at(positions, at[matrix[0]], own.count))
            for own, matrix in zip(solved.copies, columns, strict=False)
        ),
        parents=blocks.parents,
        planes=positions.finder.of_values(structure.planes, columns, known) if structure.planes else (),
    )


def _slot(
    positions: Positions, index: int, units: Ints, first: int, kinds: Mapping[str, tuple[str, float]] | None = None
) -> Slot:
    """Return the slot of a place.

    Args:
        positions: The positions of units.
        index: Index of the place.
        units: Index of each root as a unit, or -1.
        first: First position of the slot.
        kinds: The kind of each buffer, see :class:`Slot`.
    """
    place, rows = positions.places[index], slice(*positions.offset[index : index + 2])
    kind = (kinds or {}).get(place.tensor or "", VALUE)
    of_stack = index < positions.parameters and len(place.label.axes) > 1
    unit = units[positions.atom[rows]].reshape(place.label.atom.shape)
    return Slot(place.tensor or "", place.label.axes, first, place.label.atom.shape, unit, *kind, of_stack)
