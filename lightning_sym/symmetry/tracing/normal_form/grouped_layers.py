"""Test whether a function, bilinear in a value and a kernel, is a convolution in groups."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.graph.running import UnlikeError, is_close
from lightning_sym.symmetry.tracing.normal_form.layers import Bilinear, Layer, Window, find_meeting, indices, run


class _Meeting(NamedTuple):
    """The row of the kernel that is summed for one element of the result.

    Attributes:
        row: The row.
        first: The index of the value's element that meets the first entry of the row.
        steps: The steps of this index along the other axes of the kernel. Shape (axes, value's axes).
        factor: A number that multiplies the sum.
    """

    row: int
    first: Tensor
    steps: Tensor
    factor: float


def find_grouped_layer(function: Bilinear, *shapes: tuple[int, ...]) -> Layer:
    """Find the grouped convolution that a function of a value and a kernel computes.

    The axes of the kernel are those of a convolution, and the value has one axis of channels.

    Args:
        function: Linear in both arguments.
        shapes: The shapes of the value, the kernel and the result.

    Raises:
        Exception: One of :data:`NOT_ON_NUMBERS`, for other functions.
    """
    value, kernel, shown = shapes
    if len(kernel) < 2:
        raise UnlikeError
    centre = tuple(size // 2 for size in shown)
    met = _met(function, value, kernel, centre)
    wide = [at for at, width in enumerate(kernel[2:], 1) if width > 1]  # axes along which kernels have a width
    spatial = [_only(met.steps[at]) for at in wide]
    batch: list[tuple[int, int]] = []  # axes of the value and of the result
    outputs: list[tuple[int, int]] = []  # the rows from one place to the next, and the axis
    moves = [met.steps[0]] if kernel[1] > 1 else []  # along the channels
    seen: dict[int, tuple[int, int]] = {}  # by the value's axis: the stride, and the axis
    for axis in [axis for axis, size in enumerate(shown) if size > 1]:
        beside = _met(function, value, kernel, tuple(place - (at == axis) for at, place in enumerate(centre)))
        move = met.first - beside.first
        if met.row != beside.row:
            outputs.append((met.row - beside.row, axis))
            first, last = (
                _met(function, value, kernel, (*centre[:axis], at, *centre[axis + 1 :])) for at in (0, shown[axis] - 1)
            )
            moves.append(last.first - first.first)
        elif (own := _only(move)) in spatial:
            seen[own] = int(move[own]), axis
        else:
            batch.append((own, axis))
    moves = [move for move in moves if move.any()]
    if not moves:
        raise UnlikeError
    channel = _only(moves[0])
    if (groups := value[channel] // kernel[1]) < 2:
        raise UnlikeError
    windows = []
    for own, at in zip(spatial, wide, strict=True):
        step, width = met.steps[at], kernel[at + 1]
        stride, axis = seen.get(own, (1, -1))
        start = int(met.first[own]) - stride * (centre[axis] if axis >= 0 else 0)
        windows.append(Window(own, width, stride, int(step[own]), start, shown[axis] if axis >= 0 else 1, False))
    made = [axis for _, axis in (*batch, *sorted(outputs, reverse=True))]
    made += [seen[own][1] for own in spatial if own in seen]
    found = Layer(
        (value, kernel, shown), tuple(own for own, _ in batch), (channel,), tuple(windows),
        kernel, tuple(range(len(kernel))), 1,
        tuple((axis, 0) for axis in made), tuple(shown[axis] for axis in made), met.factor, groups,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (value, kernel)]
    if not is_close(found.put(run, *numbers), function(*numbers)):
        raise UnlikeError
    return found


def _met(function: Bilinear, value: tuple[int, ...], kernel: tuple[int, ...], place: tuple[int, ...]) -> _Meeting:
    found = find_meeting(function, value, kernel, place)
    rows = found.met.reshape(kernel[0], -1).any(1).nonzero().ravel().tolist()
    if len(rows) != 1 or not bool(found.met[rows[0]].all()):
        raise UnlikeError
    own = found.met[rows[0]] - 1
    first, *ends = indices(torch.stack([own.reshape(-1)[0], *_seconds(own)]), value)
    return _Meeting(rows[0], first, torch.stack(ends) - first, found.factor)


def _seconds(numbers: Tensor) -> list[Tensor]:
    """Return the second number along each axis; the first along axes of size 1."""
    places = ([int(at == axis and size > 1) for at in range(numbers.ndim)] for axis, size in enumerate(numbers.shape))
    return [numbers[tuple(place)] for place in places]


def _only(step: Tensor) -> int:
    """Return the only axis along which an index moves."""
    (axis,) = step.nonzero().ravel().tolist()
    return int(axis)
