"""Find the invertible matrices between gains that map shifts to shifts, for all weights."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.group.factor import Draw
from lightning_sym.symmetry.group.kinds import factors_of
from lightning_sym.symmetry.group.statistics import free_positions
from lightning_sym.symmetry.group.translations import folded
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.solving.structure import Structure

_ROUNDING = 1e-6  # relative: a wrong result is off by order 1


def with_carried_shifts(
    structure: Structure, values: Structure, shapes: Mapping[str, Sequence[int]]
) -> tuple[Structure, Structure, list[str]]:
    """Leave out the gained cells with matrices that map shifts in a weight-dependent way, or that shifts move.

    Args:
        structure: The group, with its shifts.
        values: The same group on named values.
        shapes: The shapes of all parameters and buffers, by name.

    Returns:
        Both with the remaining cells, and shifts in multiples of gains; and a note on the cells left out.
    """
    several = _unmoved(structure, shapes)
    whole = _folded(structure, several)
    if not _carries(whole):
        left = [cell for cell in several if _carries(_folded(structure, [cell]))]
        whole = _folded(structure, left)
        whole = whole if _carries(whole) else _folded(structure, [])
    count = len(several) - len(whole.gained)
    note = (
        f"{count} cells of units between gains are not mixed by matrices, as these would change additions to "
        "weights there in a way that depends on the gains"
    )
    return whole, replace(values, shifts=whole.shifts, gained=whole.gained), [note] * bool(count)


def _folded(structure: Structure, cells: Collection[int]) -> Structure:
    """Return the group with some of its gained cells, and shifts in multiples of the gains."""
    kept = replace(structure, gained=tuple(structure.gained[cell] for cell in cells))
    return replace(kept, shifts=folded(kept))


def _unmoved(structure: Structure, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the numbers of the gained cells with weight matrices that shifts do not move entry by entry."""
    at: list[list[Ints]] = [[] for _ in structure.gained]
    for slot in structure.slots:
        for place in structure.gained_places.get(slot.offset, ()) if len(shapes[slot.tensor]) > 1 else ():
            at[place.cell].append(slot.offset + place.at)
    free = free_positions(structure, shapes, [own for cell in at for own in cell]) if at else np.zeros(0, bool)
    return [cell for cell, places in enumerate(at) if not any(free[own].any() for own in places)]


def _carries(structure: Structure) -> bool:
    """Return whether matrices map a shift as composition requires, at unknown weights."""
    factors, space = factors_of(structure), structure.shifts
    shifted = [slot.offset for slot in structure.slots if slot.tensor in space.names]
    if not any(any(place.powers) for at in shifted for place in structure.gained_places.get(at, ())):
        return True  # where shifts act, there are no gains around matrices
    generator = torch.Generator().manual_seed(0)
    drawn = factors.sample("", Draw(generator))
    matrix, shift = (factors.identity("").replaced(**{name: drawn.parts[name]}) for name in ("gained", "shift"))
    back = factors.inverse(matrix)
    carried = factors.compose(factors.compose(matrix, shift), back)
    tensors = space.generic_tensors(1)
    names = sorted(space.names)
    one = MovedTensors(factors, carried, tensors)
    two = MovedTensors(factors, matrix, MovedTensors(factors, shift, MovedTensors(factors, back, tensors)))
    return all(
        float((one[name] - two[name]).abs().max()) <= _ROUNDING * float(one[name].abs().max().clamp(min=1.0))
        for name in names
    )
