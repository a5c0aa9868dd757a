"""Orthogonal matrices that act on streams: drawn, put one after the other, undone.

See docs/theory/intertwiners.md, 2.11.
"""

import torch
from torch import Tensor

from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.tracing.rotations import Rotation
from lightning_sym.symmetry.tracing.structure import Structure

NO_TURN = torch.zeros(0, 0, dtype=torch.float64)  # stands for the identity, of any size


def random_turn(rotation: Rotation, generator: torch.Generator | None, *, most: int | None = None) -> Tensor:
    """Draw an orthogonal matrix, all being equally likely (of those that leave the vector of ones alone, if it must).

    Args:
        rotation: Of which cell.
        generator: Where randomness comes from.
        most: How many units it changes at most; any of them are equally likely. By default all.

    Returns:
        Shape (size, size), float64.
    """
    size = rotation.size if most is None else min(most, rotation.size)
    matrix = random_orthogonal(size - rotation.fixes_ones, generator)
    if rotation.fixes_ones:
        reflection = ones_reflection(size)
        around_first = torch.eye(size, dtype=torch.float64)
        around_first[1:, 1:] = matrix
        matrix = reflection @ around_first @ reflection
    if size == rotation.size:
        return matrix
    chosen = torch.randperm(rotation.size, generator=generator)[:size]
    whole = torch.eye(rotation.size, dtype=torch.float64)
    whole[chosen[:, None], chosen] = matrix
    return whole


def ones_reflection(size: int) -> Tensor:
    """Return the reflection that exchanges the first axis and the vector of ones. Shape (size, size), float64."""
    normal = torch.full((size,), size**-0.5, dtype=torch.float64)
    normal[0] -= 1
    return torch.eye(size, dtype=torch.float64) - 2 * torch.outer(normal, normal) / normal.dot(normal)


def turns_of(structure: Structure, element: Element) -> tuple[Tensor, ...]:
    """Return an element's orthogonal matrices, one per rotation of the structure; elements may be without any."""
    return element.rotation or (NO_TURN,) * len(structure.rotations)


def turns_after(structure: Structure, second: Element, first: Element) -> tuple[Tensor, ...]:
    """Return the orthogonal matrices of the element that acts as `first` and then `second`.

    What the second one does is pulled back over the permutation and the signs of the first.
    """
    later, result = turns_of(structure, second), []
    for index, earlier in enumerate(turns_of(structure, first)):
        other, order, sign = _carried(structure, index, first)
        turn = later[other]
        if len(turn):
            pulled = torch.empty_like(turn)
            pulled[order[:, None], order] = sign[:, None] * turn * sign
            turn = pulled @ earlier if len(earlier) else pulled
        result.append(turn if len(turn) else earlier)
    return tuple(result)


def turns_back(structure: Structure, element: Element) -> tuple[Tensor, ...]:
    """Return the orthogonal matrices of the element that undoes another one."""
    result = [NO_TURN] * len(structure.rotations)
    for index, turn in enumerate(turns_of(structure, element)):
        other, order, sign = _carried(structure, index, element)
        if len(turn):
            result[other] = sign[:, None] * turn.mT[order[:, None], order] * sign
    return tuple(result)


def _carried(structure: Structure, index: int, element: Element) -> tuple[int, Tensor, Tensor]:
    """Return where an element carries a rotation's units, in front of all gains: x_a = sign_a x_order[a].

    Returns:
        The rotation in whose place they stand afterwards; for each of its units its place among these, shape (size,);
        and its sign. Shape (size,).
    """
    units = structure.rotations[index].units
    place: Ints = structure.place_in_cell
    other = int(structure.rotation_of[int(torch.argsort(element.permutation)[int(units[0])])])
    came = element.permutation.numpy()[structure.rotations[other].units]
    rotation = structure.rotations[index]
    generators = structure.sign_table[rotation.orbit][structure.place_in_orbit[came]][:, rotation.plain_sign]
    sign = element.sign[torch.from_numpy(generators)].prod(1)
    return other, torch.from_numpy(place[came]), sign
