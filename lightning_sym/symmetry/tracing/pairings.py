"""Finds out whether a function adds to each coordinate another one, both times constants that depend on the position.

Rotary positions are such functions, however they are written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CLOSE = 1e-9  # relative difference of what computes the same
_DIGITS = 13  # to which constants are known


@dataclass(frozen=True)
class Pairing:
    """The function x -> own * x + other * x[partner], with a partner for each coordinate.

    Attributes:
        axis: That of the coordinates.
        partner: The partner of each. Shape (coordinates,).
        own: Broadcasts against x.
        other: Broadcasts against x.
    """

    axis: int
    partner: Tensor
    own: Tensor
    other: Tensor

    def __call__(self, value: Tensor) -> Tensor:
        """Return what the function makes of a value."""
        return self.own * value + self.other * value.index_select(self.axis, self.partner)


def find_pairing(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Pairing | None:
    """Find the coordinates that a function adds, and by what they are multiplied.

    Args:
        function: Takes and returns values of one shape.
        shape: The shape.

    Returns:
        The pairing; None if it does anything else, or the same at all positions.
    """
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    expected = function(value)
    room = _CLOSE * float(expected.abs().max())
    total = function(torch.ones(shape, dtype=torch.float64))
    for axis in reversed(range(len(shape))):
        found = _along(function, axis, total) if shape[axis] > 1 else None
        if found is not None and float((found(value) - expected).abs().max()) <= room:
            return found
    return None


def _along(function: Callable[[Tensor], Tensor], axis: int, total: Tensor) -> Pairing | None:
    """Find the partners along one axis: a own + b other is known for the numbers 1, c and c squared on coordinate c."""
    size = total.shape[axis]
    numbers = torch.arange(size, dtype=torch.float64) / size
    line = numbers.reshape(-1, *[1] * (total.ndim - axis - 1))
    first, second = (function(own.expand(total.shape).clone()) for own in (line, line.square()))
    by_difference = first - total * line  # other * (partner - own)
    place = (second - total * line.square()) / by_difference - line
    told = by_difference.abs() > 1e-6 * float(total.abs().max() + by_difference.abs().max())
    if not bool(told.any()):
        return None
    flat = place.where(told, 0.0).movedim(axis, 0).reshape(size, -1)
    seen = told.movedim(axis, 0).reshape(size, -1)
    best = seen.long().argmax(1, keepdim=True)
    partner = (flat.gather(1, best)[:, 0] * size).round()
    partner = partner.where(seen.any(1), torch.arange(size)).long()
    alone = partner == torch.arange(size)  # what only passes is no part of it
    if bool(((partner < 0) | (partner >= size) | alone).any()):
        return None
    distance = (numbers[partner] - numbers).reshape(line.shape)
    other = torch.where(distance == 0, 0.0, by_difference / distance.where(distance != 0, 1.0))
    own, other = (_narrowed(part) for part in (total - other, other))
    varies = any(part.numel() > part.shape[axis] for part in (own, other))
    return Pairing(axis, partner, own, other) if varies else None


def _narrowed(part: Tensor) -> Tensor:
    """Return one number for an axis along which all are the same, without the last digits."""
    part = part.round(decimals=_DIGITS)
    room = _CLOSE * float(part.abs().max())
    for axis, size in enumerate(part.shape):
        if size > 1 and float((part - part.narrow(axis, 0, 1)).abs().max()) <= room:
            part = part.narrow(axis, 0, 1)
    return part
