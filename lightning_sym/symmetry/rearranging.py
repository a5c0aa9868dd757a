"""Rows and columns of a tensor in another order, multiplied and added to: piece by piece, each of which fits a cache.

Weights are large, and little is done with each number: what costs time is to read and write them. Every number is
written to main memory once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints

_AT_ONCE = 2**16  # numbers of a piece
_MOST = 2**20  # columns whose order is written down

Step = Callable[[Tensor, slice, Tensor], Tensor]


class Summand(NamedTuple):
    """What is added to a tensor: the product of two factors, which is not written out where it need not be.

    Attributes:
        values: Of a shape that broadcasts to the tensor's.
        times: Another factor, in the same way; None for 1.
    """

    values: Tensor
    times: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """The product."""
        return self.values if self.times is None else self.values * self.times

    def like(self, tensor: Tensor) -> "Summand":
        """Return the same in a tensor's type, on its device."""
        return Summand(self.values.to(tensor), None if self.times is None else self.times.to(tensor))

    def added_to(self, tensor: Tensor) -> Tensor:
        """Return a new tensor that is the sum."""
        return tensor + self.values if self.times is None else torch.addcmul(tensor, self.values, self.times)


def rearranged(
    tensor: Tensor, sources: Mapping[int, Ints], scales: Mapping[int, Floats], added: Sequence[Summand] = ()
) -> Tensor:
    """Return a tensor to which something is added, then put in another order along its axes, then multiplied.

    Args:
        tensor: Not changed.
        sources: By axis: for each place on it, the place whose content it gets.
        scales: By axis: factors of what stands there in the end, float64.
        added: Summands.

    Returns:
        A new tensor of the same shape, dtype and device, contiguous.
    """
    if tensor.ndim < 2 or not tensor.numel() or tensor.numel() > _MOST * tensor.shape[0]:
        return _axis_by_axis(tensor, sources, scales, added)
    rows, shape = tensor.shape[0], tensor.shape[1:]
    flat = tensor.reshape(rows, -1)
    width = flat.shape[1]
    result = torch.empty_like(flat, memory_format=torch.contiguous_format)
    steps: list[Step] = []
    row = None
    if 0 in sources:
        row = _index(sources[0], tensor)
        steps.append(lambda piece, at, out: torch.index_select(flat, 0, row[at], out=out))
    steps += [_addition([_as_rows(factor, shape) for factor in own if factor is not None], row) for own in added]
    if any(axis for axis in sources):
        order = torch.arange(width).reshape(shape)
        for axis, source in sources.items():
            order = order.index_select(axis - 1, torch.from_numpy(source)) if axis else order
        steps.append(_columns(order.reshape(-1).to(tensor.device), tensor))
    if any(axis for axis in scales):
        factor = torch.ones((1,) * len(shape), dtype=torch.float64)
        for axis, scale in scales.items():
            factor = factor * _on_axis(scale, axis - 1, len(shape)) if axis else factor
        column_scale = factor.expand(shape).reshape(1, -1).to(tensor)
        steps.append(lambda piece, at, out: torch.mul(piece, column_scale, out=out))
    if 0 in scales:
        row_scale = torch.from_numpy(scales[0]).to(tensor)[:, None]
        steps.append(lambda piece, at, out: torch.mul(piece, row_scale[at], out=out))
    if not steps:
        return tensor.clone(memory_format=torch.contiguous_format)
    height = max(_AT_ONCE // width, 1)
    between = [torch.empty_like(result[:height]) for _ in steps[1:3]]
    for begin in range(0, rows, height):
        at = slice(begin, begin + height)
        piece = flat[at]
        count = len(piece)
        for number, step in enumerate(steps):
            out = result[at] if number == len(steps) - 1 else between[number % 2][:count]
            piece = step(piece, at, out)
    return result.reshape(tensor.shape)


def _index(source: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(source).to(like.device)


def _on_axis(vector: Floats, axis: int, rank: int) -> Tensor:
    return torch.from_numpy(vector).reshape([-1 if at == axis else 1 for at in range(rank)])


def _as_rows(factor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a factor with one axis for the rows and one for the columns of a tensor, of sizes 1 where it is constant.

    Args:
        factor: Broadcasts to the tensor's shape.
        shape: Sizes of the tensor's axes but the first.
    """
    factor = factor.reshape((1,) * (len(shape) + 1 - factor.ndim) + factor.shape)
    if math.prod(factor.shape[1:]) == 1:
        return factor.reshape(-1, 1)
    return factor.expand(len(factor), *shape).reshape(len(factor), -1)


def _addition(factors: Sequence[Tensor], row: Tensor | None) -> Step:
    """Return the step that adds a product of one or two factors."""

    def add(piece: Tensor, at: slice, out: Tensor) -> Tensor:
        own = [factor if len(factor) == 1 else factor[at if row is None else row[at]] for factor in factors]
        return torch.addcmul(piece, *own, out=out) if len(own) == 2 else torch.add(piece, *own, out=out)

    return add


def _columns(order: Tensor, like: Tensor) -> Step:
    """Return the step that puts columns in another order."""
    if like.dtype == torch.float32:
        return lambda piece, at, out: torch.index_select(piece, 1, order, out=out)
    # Several times as fast for numbers of other sizes.
    return lambda piece, at, out: torch.gather(piece, 1, order.expand(len(piece), -1), out=out)


def _axis_by_axis(
    tensor: Tensor, sources: Mapping[int, Ints], scales: Mapping[int, Floats], added: Sequence[Summand]
) -> Tensor:
    result = tensor
    for summand in added:
        result = summand.added_to(result)
    for axis, source in sources.items():
        result = result.index_select(axis, _index(source, tensor))
    result = result.clone(memory_format=torch.contiguous_format) if result is tensor else result.contiguous()
    for axis, scale in scales.items():
        result.mul_(_on_axis(scale, axis, tensor.ndim).to(tensor))
    return result
