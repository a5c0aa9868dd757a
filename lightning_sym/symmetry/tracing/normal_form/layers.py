"""Test whether a function, bilinear in a value and a weight, is a linear layer or a convolution.

The function is evaluated on tensors that number their elements. The results show which elements of the value and the
weight are multiplied for each element of the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.graph.running import UnlikeError, is_close

aten = torch.ops.aten
Bilinear = Callable[[Tensor, Tensor], Tensor]
Insert = Callable[..., Any]


class Part(NamedTuple):
    """A factor of an axis that runs along an axis of another tensor.

    Attributes:
        size: The number of positions.
        axis: The other axis.
        step: Positions on the other axis per step.
    """

    size: int
    axis: int
    step: int


@dataclass(frozen=True)
class Window:
    """A sliding window along an axis of a value.

    Attributes:
        axis: The axis.
        width: The number of positions in the window.
        stride: The step between windows.
        dilation: The distance between neighbouring positions in the window.
        start: The first position; negative if the value is padded.
        count: The number of windows.
        flipped: Whether the weight runs against the axis.
    """

    axis: int
    width: int
    stride: int
    dilation: int
    start: int
    count: int
    flipped: bool

    def padding(self, size: int) -> tuple[int, int]:
        """Return the padding before and after an axis of the given size; negative for unused positions."""
        last = self.start + self.stride * (self.count - 1) + self.dilation * (self.width - 1)
        behind = last + 1 - size
        return -self.start, 0 if -self.stride < behind < 0 and self.start <= 0 else behind


@dataclass(frozen=True)
class Layer:
    """A linear layer or convolution between permutations of axes.

    Attributes:
        shapes: The shapes of the value, the weight and the result.
        batch: The value's batch axes.
        channels: The value's summed axes, in the weight's order.
        windows: The sliding windows.
        split: The shape of the weight after splitting its axes into parts.
        order: These parts in a layer's order: outputs, channels, windows.
        outputs: The number of output parts.
        result: The parts of the result's axes in the layer's order, as (axis, position within the axis).
        sizes: The sizes of these parts.
        factor: A number that multiplies the layer.
        groups: The number of groups of channels.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    batch: tuple[int, ...]
    channels: tuple[int, ...]
    windows: tuple[Window, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    outputs: int
    result: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    factor: float
    groups: int = 1

    def adds(self, added: Tensor, bias: Tensor) -> bool:
        """Whether an offset of the result is a bias: one number per output unit.

        Args:
            added: The offset, in the shape of the result.
            bias: The numbers. Shape (units,).
        """
        value, weight = (torch.zeros(shape, dtype=torch.float64) for shape in self.shapes[:2])
        fits = self.factor == 1 and len(bias) == math.prod(self.split[axis] for axis in self.order[: self.outputs])
        return fits and torch.equal(self.put(run, value, weight, bias), added)

    def put(self, insert: Insert, value: Any, weight: Any, bias: Any = None) -> Any:
        """Insert the layer's operations.

        Args:
            insert: Inserts or runs an operation; takes an ATen operation and its arguments.
            value: The value.
            weight: The weight.
            bias: The bias of the output units, or None.

        Returns:
            The result.
        """
        shape, own, shown = self.shapes
        padding = []
        for window in self.windows:
            before, behind = window.padding(shape[window.axis])
            start, end = max(-before, 0), shape[window.axis] - max(-behind, 0)
            if (start, end) != (0, shape[window.axis]):
                value = insert(aten.slice.Tensor, value, window.axis, start, end)
            before, behind = max(before, 0), max(behind, 0)
            if before != behind:
                axis = window.axis - len(shape)
                pads = [0, 0] * (-1 - axis) + [before, behind]
                value = insert(aten.constant_pad_nd.default, value, pads, 0)
            padding.append(before if before == behind else 0)
            shape = (
                *shape[: window.axis],
                end - start + (before + behind) * (before != behind),
                *shape[window.axis + 1 :],
            )
        axes = [*self.batch, *self.channels, *(window.axis for window in self.windows)]
        kept = [*axes, *(axis for axis in range(len(shape)) if axis not in axes)]
        value = _permuted(insert, value, kept)
        batch = [shape[axis] for axis in self.batch]
        count = math.prod(shape[axis] for axis in self.channels)
        spread = [shape[window.axis] for window in self.windows] or [1] * (self.groups > 1)
        wide = [math.prod(batch), count, *spread] if spread else [*batch, count]
        value = _reshaped(insert, value, [shape[axis] for axis in kept], wide)
        weight = _reshaped(insert, weight, own, self.split)
        weight = _permuted(insert, weight, self.order)
        parts = [self.split[axis] for axis in self.order]
        outputs = math.prod(parts[: self.outputs])
        kernel = [outputs, count // self.groups, *([window.width for window in self.windows] or spread)]
        weight = _reshaped(insert, weight, parts, kernel)
        if flips := [at + 2 for at, window in enumerate(self.windows) if window.flipped]:
            weight = insert(aten.flip.default, weight, flips)
        if spread:
            convolution = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)[len(spread) - 1]
            moves = [[window.stride for window in self.windows], padding, [window.dilation for window in self.windows]]
            moves = moves if self.windows else [[1], [0], [1]]
            value = insert(convolution, value, weight, bias, *moves, *[self.groups] * (self.groups > 1))
            made = [wide[0], outputs, *([window.count for window in self.windows] or spread)]
        else:
            value = insert(aten.linear.default, value, weight, *([] if bias is None else [bias]))
            made = [*batch, outputs]
        value = _reshaped(insert, value, made, self.sizes)
        ordered = sorted(range(len(self.result)), key=lambda at: self.result[at])
        value = _permuted(insert, value, ordered)
        value = _reshaped(insert, value, [self.sizes[at] for at in ordered], shown)
        return value if self.factor == 1 else insert(aten.mul.Tensor, value, self.factor)


def _permuted(insert: Insert, value: Any, order: Sequence[int]) -> Any:
    return value if list(order) == list(range(len(order))) else insert(aten.permute.default, value, list(order))


def _reshaped(insert: Insert, value: Any, shape: Sequence[int], wanted: Sequence[int]) -> Any:
    return value if list(shape) == list(wanted) else insert(aten.reshape.default, value, list(wanted))


def run(target: Any, *args: Any) -> Any:
    """Run an operation immediately instead of inserting it."""
    return target(*args)


def find_layer(function: Bilinear, *shapes: tuple[int, ...]) -> Layer:
    """Find the linear layer or convolution that a function of a value and a weight computes.

    The search proposes a layer from few results. Random numbers then decide, so that the search needs no checks of its
    own: a wrong proposal gives other results, or its shapes do not fit.

    Args:
        function: Linear in both arguments.
        shapes: The shapes of the value, the weight and the result.

    Raises:
        Exception: One of :data:`NOT_ON_NUMBERS`, for other functions and for grouped layers.
    """
    found = _Search(function, shapes).layer()
    generator = torch.Generator().manual_seed(0)
    value, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes[:2])
    if not is_close(found.put(run, value, weight), function(value, weight)):
        raise UnlikeError
    return found


class Meeting(NamedTuple):
    """The products that a bilinear function sums for one element of its result.

    Attributes:
        one: The middle index of the second argument among the summed ones.
        summed: The summed axes of the second argument.
        met: By element of the second argument, the number of the first argument's element that multiplies it, from 1.
        factor: The common factor of all products.
    """

    one: tuple[int, ...]
    summed: set[int]
    met: Tensor
    factor: float


def find_meeting(
    function: Bilinear, first: tuple[int, ...], second: tuple[int, ...], place: tuple[int, ...]
) -> Meeting:
    """Find the products summed in one element of the result, if the sum covers whole axes.

    Args:
        function: Bilinear.
        first: The shape of its first argument.
        second: The shape of its second argument.
        place: The index in the result.
    """
    with torch.enable_grad():
        weight = torch.zeros(second, dtype=torch.float64, requires_grad=True)
        ones, found = (
            torch.autograd.grad(function(value, weight)[place], weight)[0]
            for value in (torch.ones(first, dtype=torch.float64), numbers(first))
        )
    seen = ones.nonzero()
    factor = float(ones[tuple(seen[0])])
    places = [column.unique() for column in seen.T]
    summed = {axis for axis, size in enumerate(second) if 1 < size == len(places[axis])}
    met = (found / factor).round().long()
    return Meeting(tuple(int(own[len(own) // 2]) for own in places), summed, met, factor)


class _Search:
    """Search for the layer; tables of element indices have shape (elements, axes)."""

    def __init__(self, function: Bilinear, shapes: Sequence[tuple[int, ...]]) -> None:
        self.function = function
        self.value, self.weight, self.shown = shapes
        self.centre = tuple(size // 2 for size in self.shown)

    def layer(self) -> Layer:
        """Return the layer that the axes suggest."""
        met = find_meeting(self.function, self.value, self.weight, self.centre)
        one, self.of_weight, met_at, self.factor = met
        kernel: list[list[Part]] = []
        for axis, size in enumerate(self.weight):
            line = met_at[tuple(slice(None) if axis == at else place for at, place in enumerate(one))]
            kernel.append(_parts(indices(line - 1, self.value)) if axis in self.of_weight else [Part(size, -1, 0)])
        first = tuple(int(place) for place in indices(met_at[one][None] - 1, self.value)[0])
        return self._assembled(one, first, kernel, self._result_parts(one, first))

    def _result_parts(self, one: tuple[int, ...], first: tuple[int, ...]) -> list[tuple[bool, list[Part]]]:
        """Return for each axis of the result whether it runs along the weight, and its parts."""
        with torch.no_grad():
            of_value = self.function(numbers(self.value), _single(self.weight, one)) / self.factor
            of_weight = self.function(_single(self.value, first), numbers(self.weight)) / self.factor
        results: list[tuple[bool, list[Part]]] = []
        for axis, size in enumerate(self.shown):
            line = tuple(slice(None) if axis == at else place for at, place in enumerate(self.centre))
            seen = of_value[line].round().long()
            valid = (seen != 0).nonzero().ravel()
            along = len(valid) == 1 < size
            if size == 1:
                parts: list[Part] = []
            elif along:
                parts = _parts(indices(of_weight[line].round().long() - 1, self.weight))
            elif len(valid) == size:
                parts = _parts(indices(seen - 1, self.value))
            else:  # positions beyond the ends are padding
                (part,) = _parts(indices(seen[valid] - 1, self.value))
                parts = [part._replace(size=size)]
            results.append((along, parts))
        return results

    def _assembled(
        self,
        one: tuple[int, ...],
        first: tuple[int, ...],
        kernel: list[list[Part]],
        results: list[tuple[bool, list[Part]]],
    ) -> Layer:
        split: list[int] = []
        out: list[int] = []
        summed: dict[int, list[tuple[int, Part, int]]] = {}  # by the value's axis: part index, part, position
        for axis, parts in enumerate(kernel):
            places = _split(one[axis], parts)
            for part, place in zip(parts, places, strict=True):
                if part.axis < 0:
                    out.append(len(split))
                else:
                    summed.setdefault(part.axis, []).append((len(split), part, place))
                split.append(part.size)
        moved: dict[int, list[tuple[int, int, Part, int]]] = {}  # by the value's axis: axis and part
        units: dict[int, list[tuple[int, int, Part]]] = {}
        for axis, (along, parts) in enumerate(results):
            for at, (part, place) in enumerate(zip(parts, _split(self.centre[axis], parts), strict=True)):
                if along:
                    units.setdefault(part.axis, []).append((axis, at, part))
                else:
                    moved.setdefault(part.axis, []).append((axis, at, part, place))
        batch, batches, found = [], [], []
        whole = sorted((own[0][0], axis) for axis, own in summed.items() if axis not in moved)
        channels = whole[:1]
        for axis, size in enumerate(self.value):
            if axis in moved:
                row, at, part, place = moved[axis][0]
                number, own, where = summed[axis][0] if axis in summed else (-1, Part(1, axis, 1), 0)
                where = where if own.step > 0 else own.size - 1 - where
                start = first[axis] - part.step * place - abs(own.step) * where
                if number < 0 and (part.step, start, part.size) == (1, 0, size):
                    batch.append(axis)
                    batches.append((row, at, part.size))
                    continue
                window = Window(axis, own.size, part.step, abs(own.step), start, part.size, own.step < 0)
                found.append((number, window, [(row, at, part.size)]))
            elif axis in summed and (summed[axis][0][0], axis) in whole[1:]:  # a window over the whole axis
                found.append((summed[axis][0][0], Window(axis, size, 1, 1, 0, 1, False), []))
        outs = []
        for axis in range(len(self.weight)):
            for row, at, unit in sorted(units.get(axis, []), key=lambda unit: -unit[2].step):
                outs.append((row, at, unit.size))
        found.sort(key=lambda each: each[0])  # in the order of the weight, which then needs no permutation
        windows = tuple(window for _, window, _ in found)
        kernels = [number for number, _, _ in found if number >= 0]
        seen = [part for _, _, parts in found for part in parts]
        cut = any(sum(part.size > 1 for part in parts) > 1 for parts in kernel)
        if cut or sum(split[at] > 1 for at in out) > 1:  # parameters keep their axes
            raise UnlikeError
        made = [*batches, *outs, *seen]
        return Layer(
            (self.value, self.weight, self.shown), tuple(batch), tuple(axis for _, axis in sorted(channels)),
            windows, tuple(split), (*out, *(number for number, _ in sorted(channels)), *kernels), len(out),
            tuple((row, at) for row, at, _ in made), tuple(size for _, _, size in made), self.factor,
        )  # fmt: skip


def numbers(shape: Sequence[int]) -> Tensor:
    """Return the numbers of all elements, from 1, in float64."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


def _single(shape: Sequence[int], place: tuple[int, ...]) -> Tensor:
    tensor = torch.zeros(shape, dtype=torch.float64)
    tensor[place] = 1
    return tensor


def indices(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the indices of elements from their numbers in row-major order. Shape (elements, axes)."""
    return torch.stack(torch.unravel_index(numbers, shape), -1) if shape else torch.zeros(len(numbers), 0).long()


def _parts(places: Tensor) -> list[Part]:
    """Factor an axis into parts in row-major order, each along one other axis.

    Args:
        places: The element index at each position. Shape (positions, axes).

    Raises:
        UnlikeError: If this is impossible.
    """
    if len(places) == 1:
        return []
    steps = places.diff(dim=0)
    moving = steps[0].nonzero().ravel()
    size = 1 + int((steps == steps[0]).all(1).long().cumprod(0).sum())
    if len(moving) != 1:
        raise UnlikeError
    own = Part(size, int(moving[0]), int(steps[0, moving[0]]))
    return [*_parts(places[::size]), own]


def _split(place: int, parts: Sequence[Part]) -> list[int]:
    """Return the positions on the parts of an axis for a position on the axis."""
    result = []
    for part in reversed(parts):
        place, own = divmod(place, part.size)
        result.append(own)
    return result[::-1]
