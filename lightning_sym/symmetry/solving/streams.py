"""Cells of units that matrices may mix: any invertible ones, or orthogonal ones, behind gains perhaps (streams).

See docs/theory/intertwiners.md, 2.11.
"""

import itertools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sym.symmetry.solving.refinement import Orbits
from lightning_sym.symmetry.solving.scales import Forms
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints
from lightning_sym.symmetry.tracing.rotations import Bools, Ints, Rotation, exponents, own_exponents
from lightning_sym.symmetry.tracing.structure import Structure


class Met(NamedTuple):
    """What operations met the units, each of shape (units,), bool.

    Attributes:
        normed: Whether they see a unit's norm together with others', at least.
        centred: Whether they see a unit's mean with others.
        restricted: Whether one of them passes no mixture of units but permutations, scales and signs.
    """

    normed: NDArray[np.bool_]
    centred: NDArray[np.bool_]
    restricted: NDArray[np.bool_]


def find_met(constraints: Constraints, positions: Positions, roots: Ints) -> Met:
    """Find out what operations met units.

    Args:
        constraints: All demands.
        positions: Where units are seen.
        roots: For each unit, its root.
    """
    restricted = [*constraints.restricted, *(label.atom for label in positions.grouped.values())]
    normed, centred, held = (
        positions.marked(*atoms)[roots] for atoms in (constraints.normed, constraints.centred, restricted)
    )
    return Met(normed, centred, held)


def find_dense(constraints: Constraints, positions: Positions, orbits: Orbits, forms: Forms) -> tuple[Ints, ...]:
    """Find cells of units that only linear operations touch: any invertible matrix mixes them.

    Args:
        constraints: All demands.
        positions: Where units are seen.
        orbits: The units.
        forms: Scales and signs by position.
    """
    seen = (constraints.restricted, constraints.normed, constraints.centred, constraints.gained)
    restricted = positions.marked(*itertools.chain(*seen), *(label.atom for label in positions.grouped.values()))
    result = []
    for group, cell, matrix, moves in zip(orbits.units, orbits.cells, orbits.columns, orbits.movable, strict=True):
        # Matrices of size 1 are scales with signs.
        if not moves or restricted[orbits.roots[group]].any() or np.bincount(cell).min() == 1:
            continue
        members = [np.flatnonzero(cell == number) for number in range(int(cell.max()) + 1)]
        acting = [own_exponents(forms.magnitudes, matrix[own]) for own in members]
        if all(own is not None and (np.abs(own) == 1).all() for own in acting):
            result += [group[own] for own in members]
    return tuple(result)


def find_rotations(structure: Structure, met: Met, gains: Collection[str]) -> tuple[list[Rotation], list[str]]:
    """Find the cells on which orthogonal matrices act.

    Args:
        structure: The group without them.
        met: What operations met the units.
        gains: Parameters that are only used to multiply units.

    Returns:
        The rotations, and notes on those that gains forbid.
    """
    found: list[Rotation] = []
    notes: list[str] = []
    for orbit, (units, cells) in enumerate(zip(structure.orbits, structure.cells, strict=True)):
        free = structure.movable[orbit] and structure.cell_of[units[0]] < 0 and not met.restricted[units].any()
        fixes_ones = bool(met.centred[units].any())
        if not (free and met.normed[units].all() and np.bincount(cells).min() > 1 + fixes_ones):
            continue
        slots = structure.slots_at(structure.columns[orbit][0])
        behind = np.array([structure.slots[slot].tensor in gains for slot in slots], bool)
        conjugation = _conjugation(structure, orbit, behind)
        first = structure.slots[slots[0]].tensor
        if conjugation is None:
            # A gain that no scale reaches is one of those that hold the others.
            none = np.diff(structure.magnitudes.indptr)[structure.columns[orbit][0]] == 0
            stuck = slots[behind & none] if (behind & none).any() else slots[behind]
            names = list(dict.fromkeys(structure.slots[slot].tensor for slot in stuck))
            shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
            notes.append(
                f"the stream of {first} is not rotated, as its gains ({shown}) cannot be taken into what reads them: "
                "embeddings are tied, or values before and behind a gain are added up"
            )
            continue
        powers, plain_sign = conjugation
        for number in range(int(cells.max()) + 1):
            place = np.flatnonzero(cells == number)
            columns = structure.columns[orbit][place][:, behind]
            at = [(structure.slots[slot], column) for slot, column in zip(slots[behind], columns.T, strict=True)]
            held = tuple((slot.tensor, column - slot.offset) for slot, column in at)
            found.append(Rotation(units[place], orbit, fixes_ones, held, powers, plain_sign))
    return found, notes


def _conjugation(structure: Structure, orbit: int, behind: Bools) -> tuple[Ints, Bools] | None:
    """Return powers of the gains by generators, and which signs act in front of all gains; None if gains are not free.

    They are if the orbit's scales can bring them all to 1, whatever they are. An orthogonal matrix can then act on the
    units with gains of 1, and the scales are undone.
    """
    columns = structure.columns[orbit]
    kinds = ((structure.magnitudes, structure.scale_table[orbit]), (structure.signs, structure.sign_table[orbit]))
    scales, signs = (exponents(forms, columns, table) for forms, table in kinds)
    if scales is None or signs is None:
        return None
    one_by_one, own_signs = (_not_common(structure.cells[orbit], table) for _, table in kinds)
    at_gains = scales[behind][:, one_by_one]
    if at_gains.shape[0] != at_gains.shape[1] or (at_gains.size and abs(round(np.linalg.det(at_gains))) != 1):
        return None
    powers = np.zeros((scales.shape[1], int(behind.sum())), np.int64)
    powers[one_by_one] = np.rint(np.linalg.inv(at_gains)).astype(np.int64)
    # Signs behind gains are those in front of them times the gains' own.
    plain = (signs - scales @ powers @ signs[behind])[~behind][:, own_signs] % 2
    if (plain != plain[:1]).any():
        return None
    plain_sign = np.zeros(signs.shape[1], bool)
    plain_sign[own_signs] = plain[0] == 1
    return powers, plain_sign


def _not_common(cells: Ints, table: Ints) -> Bools:
    """Return which generators of a table are not the same for all units of a cell."""
    _, first = np.unique(cells, return_index=True)
    return np.asarray((table != table[first[cells]]).any(0))
