"""Streams in canonical forms: gains of 1, and principal axes of all that stands on the stream.

See docs/theory/intertwiners.md, 5.7.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.rotation import NO_TURN, ones_reflection, rotatable, stream_rows
from lightning_sym.symmetry.tracing.rotations import Rotation, exponents
from lightning_sym.symmetry.tracing.structure import Slot, Structure

# Relative to the largest eigenvalue: axes nearer to one another are not unique, and where less stands there is nothing.
_CLOSE, _NOTHING = 1e-9, 1e-24


def folding(symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> Floats:
    """Return the logarithms of the scales that bring gains between which streams rotate to 1 or -1.

    Behind gains that differ, a rotation of the stream is no rotation of what reads it, so that norms, and all that is
    found from them, would depend on which rotation was taken. Streams behind a gain that holds a zero, through which no
    rotation passes, stay as they are.

    Args:
        symmetry: The network's.
        tensors: Its parameters, by name.

    Returns:
        Shape (generators of scales,); nan for those that do not act on such gains.
    """
    structure = symmetry.structure
    found: Floats = np.full(symmetry.scales, np.nan)
    for index in rotatable(structure, tensors):
        rotation = structure.rotations[index]
        table = structure.scale_table[rotation.orbit][structure.place_in_orbit[rotation.units]]
        acting = rotation.powers.any(1)
        steps = np.zeros(table.shape)
        for (name, at), powers in zip(rotation.gains, rotation.powers.T, strict=True):
            gain = tensors[name].detach().double().cpu().reshape(-1).numpy()[at]
            steps -= np.log(np.abs(gain))[:, None] * powers
        found[table[:, acting]] = steps[:, acting]
    return found


def gain_signs(symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> Floats:
    """Return the signs that make gains between which streams rotate positive, one by one, where signs are free.

    Args:
        symmetry: The network's.
        tensors: Its parameters, by name.

    Returns:
        Shape (generators of signs,); nan for those that flip no such gain.
    """
    structure = symmetry.structure
    found: Floats = np.full(symmetry.signs, np.nan)
    for index in rotatable(structure, tensors):
        rotation = structure.rotations[index]
        place = structure.place_in_orbit[rotation.units]
        table = structure.sign_table[rotation.orbit][place]
        # Gains that several units share stand where none of these does.
        held = {name: structure.slots_of[name][0].offset + at for name, at in rotation.gains}
        acting = exponents(structure.signs, np.stack(list(held.values()), 1), table) if held else None
        if acting is None:
            continue
        by_gain = {name: own % 2 for name, own in zip(held, acting, strict=True)}
        for name, at in rotation.gains:
            alone = by_gain[name] > sum(by_gain[other] for other, _ in rotation.gains if other != name)
            for own in np.flatnonzero(alone & ~rotation.plain_sign)[:1]:
                gain = tensors[name].detach().double().cpu().reshape(-1).numpy()[at]
                found[table[:, own]] = np.sign(gain)
    return found


def positive(symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> Element:
    """Return the element that flips negative gains between which streams rotate; see :func:`gain_signs`."""
    sign = torch.from_numpy(np.where(gain_signs(symmetry, tensors) < 0, -1.0, 1.0))
    return symmetry.identity().replaced(sign=sign)


def principal_turns(symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> tuple[Element, list[str]]:
    """Return the element that turns streams to their principal axes, and notes on what is not unique.

    The axes are those of the Gram matrix of everything that writes to a stream or reads it, in front of gains: largest
    first, each in the direction in which the cubes of the entries that no other unit shares have a positive sum.

    Args:
        symmetry: The network's.
        tensors: Its parameters, by name, in the balanced gauge.
    """
    structure, notes = symmetry.structure, []
    turns = [NO_TURN] * len(structure.rotations)
    for index in rotatable(structure, tensors):
        rotation = structure.rotations[index]
        rows = [(slot, part.double().cpu()) for slot, part in stream_rows(structure, index, tensors, tensors)]
        outside = [part for slot, part in rows if _is_alone(structure, slot)]
        basis = _basis(rotation)
        gram = torch.stack([basis.mT @ (part @ part.mT) @ basis for _, part in rows]).sum(0)
        values, axes = torch.linalg.eigh(gram)
        values, axes = values.flip(0), axes.flip(1)
        lean = torch.zeros_like(values)
        for part in outside:
            lean += (axes.mT @ basis.mT @ part).pow(3).sum(1)
        axes = axes * torch.where(lean < 0, -1.0, 1.0)
        seen = values > _NOTHING * values[0]
        close = (values[:-1] - values[1:] <= _CLOSE * values[0]) & seen[:-1]
        if bool(close.any()) or bool((seen & (lean == 0)).any()):
            notes.append(
                "a stream has principal axes that are not unique (equal sizes, or no direction): the form is canonical "
                "up to rotations among them"
            )
        turns[index] = basis @ axes.mT @ basis.mT + _ones(rotation)
    return symmetry.identity().replaced(rotation=tuple(turns)), notes


def _is_alone(structure: Structure, slot: Slot) -> bool:
    """Whether no other units stand in a slot's tensor."""
    return all(other is slot or bool((other.unit < 0).all()) for other in structure.slots_of[slot.tensor])


def _ones(rotation: Rotation) -> Tensor:
    """Return the projection on what a rotation leaves alone. Shape (size, size), float64."""
    size = rotation.size
    return torch.full((size, size), rotation.fixes_ones / size, dtype=torch.float64)


def _basis(rotation: Rotation) -> Tensor:
    """Return an orthonormal basis of what a rotation turns. Shape (size, free), float64."""
    if rotation.fixes_ones:
        return ones_reflection(rotation.size)[:, 1:]
    return torch.eye(rotation.size, dtype=torch.float64)
