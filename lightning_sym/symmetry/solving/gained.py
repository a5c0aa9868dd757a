"""Cells of units that linear layers, batch norms and gains alone touch: docs/theory/intertwiners.md, 2.18."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.solving.rotations import exponents
from lightning_sym.symmetry.solving.streams import not_common
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.labelling.gained import BatchNorm, Gain, GainedCell, Statistics


class Known(NamedTuple):
    """Facts about a network's tensors.

    Attributes:
        parameters: The names of the parameters.
        absorbed: The running statistics that batch norms' own parameters make up for.
    """

    parameters: Collection[str]
    absorbed: Collection[str]


class _Placed(NamedTuple):
    """A gain, and the columns of it and of its variance, if it has one."""

    gain: Gain
    column: int
    variance: int | None


_Frame = tuple[Ints, Ints, Ints, Ints]  # `solve`, `frame`, `sign` and `at_gains` of a :class:`GainedCell`


def find_gained(
    structure: Structure,
    orbits: Iterable[int],
    gains: Collection[str],
    norms: Collection[BatchNorm],
    known: Known,
) -> tuple[list[GainedCell], list[str]]:
    """Find the cells of units that invertible matrices mix between gains.

    Args:
        structure: The group without them.
        orbits: The numbers of the orbits that only linear operations, batch norms and gains touch.
        gains: Tensors that are only used to multiply units.
        norms: The batch norms.
        known: Which tensors are buffers.

    Returns:
        The cells, and a note on units that only linear layers and batch norms use, but without a cell.
    """
    found: list[GainedCell] = []
    names: list[str] = []
    more = 0
    for orbit in orbits:
        cells, columns = structure.cells[orbit], structure.columns[orbit]
        if not structure.movable[orbit] or not columns.shape[1]:
            continue
        slots = [structure.slots[slot] for slot in structure.slots_at(columns[0])]
        own = _gains_in(slots, columns, gains, norms, known) if structure.copies_of(orbit) is None else None
        frame = None if own is None else _frame(structure, orbit, own)
        members = [np.flatnonzero(cells == number) for number in range(int(cells.max()) + 1)]
        if own is None or frame is None:
            if any(slot.kind == "variance" for slot in slots):
                names.append(slots[0].tensor)
                more += sum(len(place) ** 2 - len(place) for place in members)
            continue
        for place in members:
            held = tuple(one.gain.within(place) for one in own)
            found.append(GainedCell(structure.orbits[orbit][place], orbit, held, *frame))
    note = (
        f"only linear layers and batch norms use the units of {listed(names)}: invertible matrices also mix "
        f"these, {more} dimensions more, but only permutations, signs and scales count"
    )
    return found, [note] if more else []


def _gains_in(
    slots: Sequence[Slot],
    columns: Ints,
    gains: Collection[str],
    norms: Collection[BatchNorm],
    known: Known,
) -> "list[_Placed] | None":
    """Return the gains of an orbit; None if a tensor of it is no gain and moves with no matrix.

    Args:
        slots: Slots of the units, by column.
        columns: The units' positions. Shape (units, columns).
        gains: As for :func:`find_gained`.
        norms: Likewise.
        known: Likewise.
    """
    if any(len(slot.axes) != 1 for slot in slots):
        return None
    at: dict[str, list[tuple[int, Ints]]] = {}
    for column, (slot, positions) in enumerate(zip(slots, columns.T, strict=True)):
        at.setdefault(slot.tensor, []).append((column, positions - slot.offset))
    found, left = [], at.keys() - {*known.parameters}
    for name in (name for name in at if name in gains):
        own = [norm for norm in norms if norm.gain == name]
        if len(own) > 1:
            return None
        for column, place in at[name]:
            if not own:
                found.append(_Placed(Gain(name, place), column, None))
                continue
            _, bias, mean, variance = own[0]
            if bias is None or mean is None or variance is None or not {mean, variance} <= {*known.absorbed}:
                return None
            same = [[c for c, own in at.get(one, ()) if np.array_equal(own, place)] for one in (bias, mean, variance)]
            if any(len(columns) != 1 for columns in same) or len(at[variance]) != len(at[name]):
                return None
            norm = Statistics((bias, place), (mean, place), (variance, place), slots[same[2][0]].epsilon)
            found.append(_Placed(Gain(name, place, norm), column, same[2][0]))
            left -= {mean, variance}
        left -= {name}
    return found if found and not left else None


def _frame(structure: Structure, orbit: int, gains: Sequence[_Placed]) -> _Frame | None:
    """Return the place of matrices on an orbit, and the maps to all other places; None if there is no such place.

    Scales tell how many gains are between two places, if the scales of one place and those of all gains are free.

    Args:
        structure: The group.
        orbit: The number of the orbit.
        gains: The gains among the places of its units.
    """
    columns = structure.columns[orbit]
    kinds = ((structure.magnitudes, structure.scale_table[orbit]), (structure.signs, structure.sign_table[orbit]))
    scales, signs = (exponents(forms, columns, table) for forms, table in kinds)
    if scales is None or signs is None:
        return None
    multiplying, dividing = np.zeros((2, len(gains), columns.shape[1]), np.int64)
    for number, (_, column, variance) in enumerate(gains):
        multiplying[number, column] = 1
        if variance is not None:
            dividing[number, variance] = 1
    plain = ~(multiplying + dividing).any(0)
    own = not_common(structure.cells[orbit], structure.scale_table[orbit])
    of_gains = (multiplying - dividing) @ scales[:, own]
    if of_gains.shape[0] + 1 != of_gains.shape[1] or not plain.any():
        return None
    best: tuple[tuple[int, int], Ints, Ints] | None = None
    for frame in _candidates(scales[plain][:, own]):
        basis = np.concatenate([of_gains, frame[None]])
        if abs(round(np.linalg.det(basis))) != 1:
            continue
        inverse = np.rint(np.linalg.inv(basis)).astype(np.int64)
        solved = scales[plain][:, own] @ inverse
        if not (np.abs(solved[:, -1]) == 1).all() or len({*solved[:, -1].tolist()}) != 2:
            return None  # nothing writes, or nothing reads
        here, reads = (solved[:, :-1] == 0).all(1), solved[:, -1] != solved[0, -1]
        score = int((here & reads).sum()), int(here.sum())  # shifts also add up at readers
        if best is None or score > best[0]:
            best = score, inverse, frame
    if best is None:
        return None
    solve = np.zeros((scales.shape[1], len(gains) + 1), np.int64)
    solve[own] = best[1]
    whole = np.zeros(scales.shape[1], np.int64)
    whole[own] = best[2]
    own_signs = not_common(structure.cells[orbit], structure.sign_table[orbit])
    around = (signs - (scales @ solve)[:, :-1] @ multiplying @ signs)[plain] % 2
    around[:, ~own_signs] = 0
    at_gains = multiplying @ scales @ solve
    common = at_gains[[gain.variance is not None for gain in gains], -1]
    if not common.all() or not (around == around[:1]).all():
        return None
    return solve, whole, around[0], at_gains


def _candidates(scales: Ints) -> Iterator[Ints]:
    """Yield the exponents of scales at places, once each, and never the negative of others."""
    seen: set[tuple[int, ...]] = set()
    for row in scales:
        key = tuple(row.tolist())
        if key not in seen and tuple((-row).tolist()) not in seen:
            seen.add(key)
            yield row
