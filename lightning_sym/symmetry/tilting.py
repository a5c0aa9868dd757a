r"""Tilts as a group: drawn, put one after the other, undone, and acting on arrays.

A vector t stands for the map :math:`I + t 1^T` between a layer norm's gains, with :math:`1 + 1^T t \neq 0`. See
docs/theory/intertwiners.md, 2.12.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sym.symmetry.action import Action
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.tracing.structure import Slot, Structure
from lightning_sym.symmetry.tracing.tilts import Tilt
from lightning_sym.symmetry.turning import turns_of

_NOTHING = 1e-12  # sums that are smaller than that, relative to their terms, are zero


def random_tilt(tilt: Tilt, generator: torch.Generator | None, *, scale: float, signs: bool) -> Tensor:
    """Draw a tilt that changes what a norm puts out about `scale` times as much as there is.

    Args:
        tilt: Which one.
        generator: Where randomness comes from.
        scale: Standard deviation of the logarithm of the map's determinant, and, times the square root of the size,
            of the entries.
        signs: Whether the determinant may be negative.

    Returns:
        Shape (size,), float64.
    """
    vector = torch.randn(tilt.size, dtype=torch.float64, generator=generator) * (scale / math.sqrt(tilt.size))
    factor = float(torch.exp(scale * torch.randn((), dtype=torch.float64, generator=generator)))
    if signs and bool(torch.randint(0, 2, (), generator=generator)):
        factor = -factor
    return vector + (factor - 1 - float(vector.sum())) / tilt.size


def no_tilts(structure: Structure) -> tuple[Tensor, ...]:
    """Return the tilts that change nothing."""
    return tuple(torch.zeros(tilt.size, dtype=torch.float64) for tilt in structure.tilts)


def tilts_of(structure: Structure, element: Element) -> tuple[Tensor, ...]:
    """Return an element's tilts, one per tilt of the structure; elements may be without any."""
    return element.tilt or no_tilts(structure)


def tilts_after(structure: Structure, second: Element, first: Element) -> tuple[Tensor, ...]:
    """Return the tilts of the element that acts as `first` and then `second`."""
    result = []
    places = _places(structure, first)
    for (slot, source), earlier, later in zip(
        places, tilts_of(structure, first), tilts_of(structure, second), strict=True
    ):
        # (I + s 1^T) Q (I + t 1^T) = (I + (Q t + (1 + 1^T t) s) 1^T) Q, where the second one stands.
        moved = _turned(structure, second, slot, earlier[source])
        pulled = torch.empty_like(moved)
        pulled[source] = moved + (1 + earlier.sum()) * later
        result.append(pulled)
    return tuple(result)


def tilts_back(structure: Structure, element: Element) -> tuple[Tensor, ...]:
    """Return the tilts of the element that undoes another one."""
    result = []
    for (slot, source), vector in zip(_places(structure, element), tilts_of(structure, element), strict=True):
        result.append(_turned(structure, element, slot, -vector / (1 + vector.sum()), back=True)[source])
    return tuple(result)


def to_gains(structure: Structure, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tilts after which each norm's bias equals its gain, of all that the norm's readers leave open.

    Args:
        structure: The group.
        tensors: The network's parameters, by name.

    Returns:
        The tilts, and a note for each that stays: the ratio of bias to gain sums to zero, which no tilt changes.
    """
    result, notes = [], []
    for tilt in structure.tilts:
        bias = tensors[tilt.offset].detach().to("cpu", torch.float64)
        gain = torch.ones_like(bias) if tilt.gain is None else tensors[tilt.gain].detach().to("cpu", torch.float64)
        ratio = bias / gain
        total = ratio.sum()
        if not bool(ratio.isfinite().all()) or float(total.abs()) <= _NOTHING * float(ratio.abs().sum()):
            notes.append(f"{tilt.offset} stays, as its ratio to the gain sums to zero, which no tilt changes")
            result.append(torch.zeros_like(bias))
        else:
            result.append((1 - ratio) / total)
    return tuple(result), notes


def _places(structure: Structure, element: Element) -> list[tuple[Slot, Tensor]]:
    """Return for each tilt where its norm's bias is, and what an element's permutation brings to each entry of it."""
    action = Action(structure, element)
    slots = (next(slot for slot in structure.slots_of[tilt.offset]) for tilt in structure.tilts)
    return [(slot, torch.from_numpy(action.source_in(slot))) for slot in slots]


def _turned(structure: Structure, element: Element, slot: Slot, vector: Tensor, *, back: bool = False) -> Tensor:
    """Return what an element's rotations, or their inverses, make of a vector."""
    turns = turns_of(structure, element)
    for index, at, _ in structure.rotated_places.get(slot.offset, ()):
        if len(turns[index]):
            where = torch.from_numpy(at)
            turn = turns[index].mT if back else turns[index]
            vector = vector.index_copy(0, where, turn @ vector[where])
    return vector
