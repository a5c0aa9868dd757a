"""Permute, scale and add to tensors in cache-sized pieces.

Weights are large, and each number needs little computation: memory traffic dominates. Every number is written to main
memory once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints

_AT_ONCE = 2**16  # numbers per piece
_MOST = 2**20  # maximum number of columns with a stored permutation

Step = Callable[[Tensor, int, Tensor], Tensor]  # of a piece, its number, and the place for the result


class Summand(NamedTuple):
    """A summand of a tensor: the product of two factors, which is formed only where necessary.

    Attributes:
        values: First factor, of a shape that broadcasts to the tensor's.
        times: Second factor, also broadcastable; None for 1.
    """

    values: Tensor
    times: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """The product."""
        return self.values if self.times is None else self.values * self.times

    def like(self, tensor: Tensor) -> "Summand":
        """Convert the summand to a tensor's dtype and device."""
        return Summand(self.values.to(tensor), None if self.times is None else self.times.to(tensor))

    def along(self, axis: int, size: int, rank: int) -> "Summand":
        """Return the same summand with an axis of the tensor, of some size, in the first factor alone.

        Args:
            axis: The axis.
            size: Its size.
            rank: Number of axes of the tensor, and then of the first factor.
        """

        def full(own: Tensor) -> Tensor:
            return own.reshape((1,) * (rank - own.ndim) + own.shape)

        values, times = full(self.values), None if self.times is None else full(self.times)
        if times is not None and times.shape[axis] > 1:
            values, times = (times, values) if values.shape[axis] == 1 else (values * times, None)
        return Summand(values.expand(*values.shape[:axis], size, *values.shape[axis + 1 :]), times)

    def added_to(self, tensor: Tensor) -> Tensor:
        """Return the sum as a new tensor."""
        return tensor + self.values if self.times is None else torch.addcmul(tensor, self.values, self.times)


def rearranged(
    tensor: Tensor, sources: Mapping[int, Ints], scales: Mapping[int, Floats], added: Sequence[Summand] = ()
) -> Tensor:
    """Add summands to a tensor, permute it along its axes, then scale it.

    Args:
        tensor: Not changed.
        sources: By axis: the source of the content of each place.
        scales: By axis: factors of the permuted entries, float64.
        added: Summands.

    Returns:
        A new tensor of the same shape, dtype and device, contiguous.
    """
    if tensor.ndim < 2 or tensor.numel() <= _AT_ONCE or tensor.numel() > _MOST * tensor.shape[0]:
        return _axis_by_axis(tensor, sources, scales, added)
    rows, shape = tensor.shape[0], tensor.shape[1:]
    flat = tensor.reshape(rows, -1)
    width = flat.shape[1]
    height = max(_AT_ONCE // width, 1)
    result = torch.empty_like(flat, memory_format=torch.contiguous_format)
    steps: list[Step] = []
    row = None
    if 0 in sources:
        row = _index(sources[0], tensor)
        chosen = torch.split(row, height)
        steps.append(lambda piece, number, out: torch.index_select(flat, 0, chosen[number], out=out))
    steps += [
        _addition(
            [torch.split(_as_rows(factor, shape, row).expand(rows, -1), height) for factor in own if factor is not None]
        )
        for own in added
    ]
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
        steps.append(lambda piece, number, out: torch.mul(piece, column_scale, out=out))
    if 0 in scales:
        row_scale = torch.split(torch.from_numpy(scales[0]).to(tensor)[:, None], height)
        steps.append(lambda piece, number, out: torch.mul(piece, row_scale[number], out=out))
    if not steps:
        return tensor.clone(memory_format=torch.contiguous_format)
    between = [torch.empty_like(result[:height]) for _ in steps[1:3]]
    for number, (piece, out) in enumerate(zip(torch.split(flat, height), torch.split(result, height), strict=True)):
        if number == (rows - 1) // height:  # the last one may be shorter
            between = [own[: len(out)] for own in between]
        for place, step in enumerate(steps):
            piece = step(piece, number, out if place == len(steps) - 1 else between[place % 2])
    return result.reshape(tensor.shape)


def _index(source: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(source).to(like.device)


def _on_axis(vector: Floats, axis: int, rank: int) -> Tensor:
    return torch.from_numpy(vector).reshape([-1 if at == axis else 1 for at in range(rank)])


def _as_rows(factor: Tensor, shape: Sequence[int], row: Tensor | None) -> Tensor:
    """Reshape a factor to one axis for rows and one for columns of a tensor, of size 1 where it is constant.

    Args:
        factor: Broadcasts to the tensor's shape.
        shape: Sizes of the tensor's axes except the first.
        row: The row of each place; None if none moves.
    """
    factor = factor.reshape((1,) * (len(shape) + 1 - factor.ndim) + factor.shape)
    if row is not None and len(factor) > 1:
        factor = factor.index_select(0, row)
    if math.prod(factor.shape[1:]) == 1:
        return factor.reshape(-1, 1)
    return factor.expand(len(factor), *shape).reshape(len(factor), -1)


def _addition(factors: Sequence[Sequence[Tensor]]) -> Step:
    """Return the step that adds a product of one or two factors, each in pieces."""
    if len(factors) == 2:
        first, second = factors
        return lambda piece, number, out: torch.addcmul(piece, first[number], second[number], out=out)
    return lambda piece, number, out: torch.add(piece, factors[0][number], out=out)


def _columns(order: Tensor, like: Tensor) -> Step:
    """Return the step that permutes columns."""
    if like.dtype == torch.float32:
        short = order.int()  # read in a third less time
        return lambda piece, number, out: torch.index_select(piece, 1, short, out=out)
    # Several times faster for numbers of other sizes.
    return lambda piece, number, out: torch.gather(piece, 1, order.expand(len(piece), -1), out=out)


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
