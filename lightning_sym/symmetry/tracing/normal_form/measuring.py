"""Test on random numbers whether a function is a norm or a softmax.

See docs/theory/tracing.md, 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.graph.running import CLOSE, is_close

_SMALL, _LARGE = 1e-4, 1e3  # factors that determine eps and the norm's own factor

Kind = Literal["layer", "rms", "softmax", "log_softmax"]


@dataclass(frozen=True)
class Measured:
    """The measured function of a region.

    Attributes:
        kind: A layer norm subtracts the mean, an RMS norm does not.
        axes: The axes that are reduced entirely.
        split: An axis that is reduced in blocks, and the block size; None if there is none.
        factor: A number that multiplies the result.
        eps: The number added to the variance or mean square.
        masked: Whether a constant multiplies some exponentials of a softmax by zero.
        exact: Whether the function is this norm. Otherwise it is the value times another function of its size, which
            rotations preserve as well.
    """

    kind: Kind
    axes: tuple[int, ...]
    split: tuple[int, int] | None = None
    factor: float = 1.0
    eps: float = 0.0
    masked: bool = False
    exact: bool = True


def measured(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Measured | None:
    """Measure whether a function is a norm or a softmax.

    Args:
        function: Maps a float64 tensor to one of the same shape.
        shape: This shape.

    Returns:
        The measured function; None if it is neither.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    result = function(numbers)
    if not bool(result.isfinite().all()):
        return None
    hidden = result == 0
    if bool(hidden.any()):
        low = numbers.masked_fill(hidden, -math.inf)
        axis = next((axis for axis in range(len(shape)) if is_close(result, low.softmax(axis))), None)
        return None if axis is None else Measured("softmax", (axis,), masked=True)
    found = _seen_by_one(function, numbers, result)
    if found is None:
        return None
    axes, split = found
    if len(axes) == 1 and split is None:
        for kind in ("softmax", "log_softmax"):
            expected = getattr(torch, kind)(numbers, axes[0])
            factor = float(result.flatten()[0] / expected.flatten()[0])
            if kind == "log_softmax" and abs(factor - 1) > CLOSE:
                continue
            if is_close(result, factor * expected):
                return Measured(kind, axes, factor=_rounded(factor))  # type: ignore[arg-type]
    return _norm(function, numbers, result, axes, split, generator)


def _seen_by_one(
    function: Callable[[Tensor], Tensor], numbers: Tensor, result: Tensor
) -> tuple[tuple[int, ...], tuple[int, int] | None] | None:
    """Return the axes, entire or in blocks, along which the first element affects the result; None if irregular."""
    other = numbers.clone()
    other[(0,) * numbers.ndim] += 1.0
    changed = (function(other) - result).abs() > CLOSE * float(result.abs().max())
    axes: list[int] = []
    splits: list[tuple[int, int]] = []
    for axis, size in enumerate(numbers.shape):
        others = [other for other in range(numbers.ndim) if other != axis]
        own = changed.any(dim=others) if others else changed
        count = int(own.sum())
        if count == size > 1:
            axes.append(axis)
        elif count > 1:
            if size % count or not bool(own[:count].all()):
                return None
            splits.append((axis, count))
    if len(splits) > 1 or not (axes or splits):
        return None
    block = math.prod(numbers.shape[axis] for axis in axes) * (splits[0][1] if splits else 1)
    return (tuple(axes), splits[0] if splits else None) if int(changed.sum()) == block else None


def _norm(
    function: Callable[[Tensor], Tensor],
    numbers: Tensor,
    result: Tensor,
    axes: tuple[int, ...],
    split: tuple[int, int] | None,
    generator: torch.Generator,
) -> Measured | None:
    """Measure whether a function multiplies its argument, centred or not, by a function of its size."""
    shape = numbers.shape

    def grouped(tensor: Tensor) -> Tensor:
        wide, gone = tensor, list(axes)
        if split is not None:
            axis, size = split
            wide = tensor.reshape(*shape[:axis], -1, size, *shape[axis + 1 :])
            gone = [other + (other > axis) for other in axes] + [axis + 1]
        kept = [axis for axis in range(wide.ndim) if axis not in gone]
        return wide.permute((*kept, *gone)).flatten(len(kept)).flatten(0, -2)

    def ratio(numbers: Tensor, result: Tensor, centred: bool) -> tuple[Tensor, Tensor] | None:
        """Return the mean square and the factor of each group; None if groups are not multiplied by one factor."""
        value, own = grouped(numbers), grouped(result)
        value = value - value.mean(-1, keepdim=True) if centred else value
        square = value.square().mean(-1)
        factor = (own * value).mean(-1) / square
        return (square, factor) if is_close(own, factor[:, None] * value) else None

    for centred in (True, False):
        if (found := ratio(numbers, result, centred)) is None:
            continue
        samples = [found]
        for scale in (_SMALL, _LARGE):
            if (further := ratio(numbers * scale, function(numbers * scale), centred)) is None:
                return None
            samples.append(further)
        kind: Kind = "layer" if centred else "rms"
        (square, factor), (small, steep), (large, flat) = samples
        eps = 0.0
        for _ in range(3):
            eps = float((flat.square() * (large + eps) / steep.square() - small)[0])
        for own in (0.0, float(f"{eps:.3g}"), eps):
            times = float((factor * (square + own).sqrt())[0])
            if own >= 0 and all(is_close(each, times * (squares + own).rsqrt()) for squares, each in samples):
                return Measured(kind, axes, split, _rounded(times), own)
        # Other functions of the size: equal for other values of this size, and no power of it.
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
        further = ratio(other, function(other), centred)
        if further is None:
            return None
        powers = (factor / steep).abs().log() / math.log(1 / _SMALL), (flat / factor).abs().log() / math.log(_LARGE)
        if bool((powers[0] - powers[1]).abs().max() < 1e-6):
            return None
        # Rescale one group of the other numbers at a time to the size of the first group.
        for place in range(min(len(further[0]), 3)):
            scale = float((square[0] / further[0][place]).sqrt())
            again = ratio(other * scale, function(other * scale), centred)
            if again is None or abs(float(again[1][place] / factor[0]) - 1) > CLOSE:
                return None
        return Measured(kind, axes, split, 1.0, 1e-5, exact=False)
    return None


def _rounded(factor: float) -> float:
    return 1.0 if abs(factor - 1) < CLOSE else factor
