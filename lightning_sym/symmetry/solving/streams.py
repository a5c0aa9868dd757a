"""Cells of units that GL(d) or orthogonal matrices act on, possibly between gains (streams).

See docs/theory/transformers.md, 3.
"""

import itertools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints
from lightning_sym.symmetry.numbering import Hashes
from lightning_sym.symmetry.solving.nesting import Nesting
from lightning_sym.symmetry.solving.refinement import Orbits, cell_keys
from lightning_sym.symmetry.solving.rotations import Rotation, exponents, own_exponents
from lightning_sym.symmetry.solving.scales import Forms
from lightning_sym.symmetry.solving.structure import Structure
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints


class Met(NamedTuple):
    """The operations that act on units.

    Attributes:
        normed: Whether operations see at least the joint norm of a unit and others. Shape (units,), bool.
        paired: Whether scalar products of values sum over a unit. Shape (units,), bool.
        centred: Whether operations see the mean of a unit and others. Shape (units,), bool.
        restricted: Whether an operation allows only permutations, scales and signs of a unit. Shape (units,), bool.
        cells: The cells of each orbit, if shared gains do not distinguish units.
        spread: Gains shared by several units, and the units that they multiply. Shape (2, pairs).
    """

    normed: Bools
    paired: Bools
    centred: Bools
    restricted: Bools
    cells: list[Ints]
    spread: Ints


def find_met(constraints: Constraints, positions: Positions, orbits: Orbits, colour: Hashes, nesting: Nesting) -> Met:
    """Find the operations that act on units.

    Args:
        constraints: The constraints of operations.
        positions: The positions of units.
        orbits: The units.
        colour: Hash of the places of each root.
        nesting: Parents and members of blocks.
    """
    roots = orbits.roots
    restricted = [*constraints.restricted, *constraints.divided, *(label.atom for label in positions.grouped.values())]
    normed, paired, centred, held = (
        positions.marked(*atoms)[roots]
        for atoms in (constraints.normed, constraints.paired, constraints.centred, restricted)
    )
    cells = orbits.cells
    if nesting.gains.size:
        key = cell_keys(colour, nesting.others, nesting.pairs[0])
        cells = [
            np.unique(key[roots[units]], return_inverse=True)[1] if moves else own
            for units, own, moves in zip(orbits.units, cells, orbits.movable, strict=True)
        ]
    return Met(normed, paired, centred, held, cells, orbits.unit_of[nesting.gains])


def find_dense(
    constraints: Constraints, positions: Positions, orbits: Orbits, forms: Forms
) -> tuple[tuple[Ints, ...], list[int]]:
    """Find cells of units that only linear operations act on: GL(d) acts on these.

    Args:
        constraints: The constraints of operations.
        positions: The positions of units.
        orbits: The units.
        forms: Scales and signs by position.

    Returns:
        The cells, and the indices of orbits that batch norms or gains also act on.
    """
    seen = (constraints.restricted, constraints.normed, constraints.centred)
    restricted = positions.marked(*itertools.chain(*seen), *(label.atom for label in positions.grouped.values()))
    gained = positions.marked(*constraints.gained, *constraints.divided)
    result: list[Ints] = []
    between: list[int] = []
    for index, (group, cell, matrix, moves) in enumerate(
        zip(orbits.units, orbits.cells, orbits.columns, orbits.movable, strict=True)
    ):
        # Matrices of size 1 are scales with signs.
        if not moves or restricted[orbits.roots[group]].any() or np.bincount(cell).min() == 1:
            continue
        if gained[orbits.roots[group]].any():
            between.append(index)
            continue
        members = [np.flatnonzero(cell == number) for number in range(int(cell.max()) + 1)]
        acting = [own_exponents(forms.magnitudes, matrix[own]) for own in members]
        if all(own is not None and (np.abs(own) == 1).all() for own in acting):
            result += [group[own] for own in members]
    return tuple(result), between


def find_rotations(structure: Structure, met: Met, gains: Collection[str]) -> tuple[list[Rotation], list[str]]:
    """Find the cells that orthogonal matrices act on.

    Args:
        structure: The group without them.
        met: The operations on units.
        gains: Parameters that are only used to multiply units.

    Returns:
        The rotations, and notes on those that gains prevent.
    """
    found: list[Rotation] = []
    notes: list[str] = []
    for orbit, (units, cells) in enumerate(zip(structure.orbits, met.cells, strict=True)):
        free = structure.movable[orbit] and structure.cell_of[units[0]] < 0 and not met.restricted[units].any()
        fixes_ones, normed = (bool(own[units].any()) for own in (met.centred, met.normed))
        if not free or (normed and not met.normed[units].all()) or np.bincount(cells).min() <= 1 + fixes_ones:
            continue
        # Without norms, scalar products of each two of three values (a.b, b.c, a.c) allow rotations: they leave signs
        # free, but no scales.
        signed = not_common(cells, structure.sign_table[orbit]).any()
        if not normed and not (met.paired[units].all() and signed):
            continue
        shared = _shared_gains(structure, units, cells, met.spread, gains)
        if shared is None:
            continue
        all_columns = np.concatenate([structure.columns[orbit], shared], 1)
        slots = structure.slots_at(all_columns[0])
        behind = np.array([structure.slots[slot].tensor in gains for slot in slots], bool)
        conjugation = _conjugation(structure, orbit, cells, all_columns, behind)
        first = structure.slots[slots[0]].tensor
        if not normed and (conjugation is None or behind.any()):
            continue
        if conjugation is None:
            # A gain without scales is one of those that prevent rotations.
            none = np.diff(structure.magnitudes.indptr)[all_columns[0]] == 0
            stuck = slots[behind & none] if (behind & none).any() else slots[behind]
            names = list(dict.fromkeys(structure.slots[slot].tensor for slot in stuck))
            shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
            notes.append(
                f"the stream of {first} is not rotated, as its gains ({shown}) cannot be folded into the weights after "
                "them: embeddings are tied, or values before and behind a gain are added up"
            )
            continue
        powers, plain_sign = conjugation
        for number in range(int(cells.max()) + 1):
            place = np.flatnonzero(cells == number)
            columns = all_columns[place][:, behind]
            at = [(structure.slots[slot], column) for slot, column in zip(slots[behind], columns.T, strict=True)]
            held = tuple((slot.tensor, column - slot.offset) for slot, column in at)
            found.append(Rotation(units[place], orbit, fixes_ones, held, powers, plain_sign))
    return found, notes


def _shared_gains(structure: Structure, units: Ints, cells: Ints, spread: Ints, gains: Collection[str]) -> Ints | None:
    """Return the positions of gains that units share with those of other cells (heads).

    Args:
        structure: The group.
        units: The units.
        cells: The cell of each of them.
        spread: Shared gains, and the units that they multiply. Shape (2, pairs).
        gains: Parameters that are only used to multiply units.

    Returns:
        Positions of all slots, one column for each parameter. Shape (units, parameters). None if the units share
        something else, or a gain multiplies only some of them.
    """
    own = spread[:, np.isin(spread[1], units)]
    columns, seen = [], np.zeros(own.shape[1], bool)
    for slot in structure.slots:
        held = np.isin(own[0], slot.unit) if slot.tensor in gains and len(slot.axes) == 1 else np.zeros(0, bool)
        if not held.any():
            continue
        at = np.full(structure.units, -1)
        at[slot.unit[slot.unit >= 0]] = slot.offset + np.flatnonzero(slot.unit >= 0)
        pairs = own[:, held][:, np.argsort(own[1, held], kind="stable")]
        if not np.array_equal(pairs[1], np.sort(units)):
            return None
        seen |= held
        column = at[pairs[0]][np.argsort(np.argsort(units))]
        _, first = np.unique(cells, return_index=True)
        if (column != column[first[cells]]).any():  # otherwise it is a common factor of a whole cell
            columns.append(column)
    if not seen.all():
        return None
    return np.stack(columns, 1) if columns else np.zeros((len(units), 0), np.int64)


def _conjugation(
    structure: Structure, orbit: int, cells: Ints, columns: Ints, behind: Bools
) -> tuple[Ints, Bools] | None:
    """Return the powers of gains by generators, and a mask of signs before all gains; None if gains are not free.

    Gains are free if the orbit's scales can bring them all to 1, for any values. An orthogonal matrix can then
    act on the units with gains of 1, before the scales are undone.

    Args:
        structure: The group.
        orbit: Index of the orbit.
        cells: The cell of each of its units.
        columns: Positions of the units, and of the gains that they share. Shape (units, columns).
        behind: Mask of the columns of gains.
    """
    kinds = ((structure.magnitudes, structure.scale_table[orbit]), (structure.signs, structure.sign_table[orbit]))
    scales, signs = (exponents(forms, columns, table) for forms, table in kinds)
    if scales is None or signs is None:
        return None
    one_by_one, own_signs = (not_common(cells, table) for _, table in kinds)
    at_gains = scales[behind][:, one_by_one]
    if at_gains.shape[0] != at_gains.shape[1] or (at_gains.size and abs(round(np.linalg.det(at_gains))) != 1):
        return None
    powers = np.zeros((scales.shape[1], int(behind.sum())), np.int64)
    powers[one_by_one] = np.rint(np.linalg.inv(at_gains)).astype(np.int64)
    # Signs after gains are those before them times the gains' own.
    plain = (signs - scales @ powers @ signs[behind])[~behind][:, own_signs] % 2
    if (plain != plain[:1]).any():
        return None
    plain_sign = np.zeros(signs.shape[1], bool)
    plain_sign[own_signs] = plain[0] == 1
    return powers, plain_sign


def not_common(cells: Ints, table: Ints) -> Bools:
    """Return a mask of the generators of a table that differ within a cell."""
    _, first = np.unique(cells, return_index=True)
    return np.asarray((table != table[first[cells]]).any(0))
