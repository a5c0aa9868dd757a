"""Features of two networks on the same inputs, brought into one form."""

import math
import warnings

import torch
from torch import Tensor


def channel_rows(name: str, features: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return features with samples first and channels last.

    Args:
        name: Of the argument, for messages.
        features: Real, with samples on the first axis.
        axes: Where the channels are, not the first axis; of several they are read in row-major order.

    Returns:
        Shape ``[N, positions, C]``: pixels or tokens lie in between, in order. A view where that is possible.

    Raises:
        TypeError: If the dtype is not floating.
        ValueError: If there is no such axis, or a value is not finite.
    """
    if not features.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating tensor, got {features.dtype}.")
    if features.ndim < 2 or not all(-features.ndim < axis < features.ndim and axis for axis in axes):
        raise ValueError(
            f"{name} must have samples on its first axis and channels on {list(axes)}, got {list(features.shape)}."
        )
    finite = features.isfinite()
    if not bool(finite.all()):
        raise ValueError(
            f"{name} has {int((~finite).sum())} values that are not finite, the first at "
            f"{(~finite).nonzero()[0].tolist()}; look for overflow or diverged members, above all in half precision."
        )
    moved = features.detach().movedim(axes, tuple(range(-len(axes), 0)))
    return moved.reshape(len(features), -1, math.prod(features.shape[axis] for axis in axes))


def on_one_grid(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return images on the finer one of two grids, each pixel repeated as the published code does; others unchanged.

    Args:
        x: Shape ``[N, C1, H1, W1]``.
        y: Shape ``[N, C2, H2, W2]``; the sides of one grid are multiples of the other's.

    Raises:
        ValueError: If they are not.
    """
    if x.ndim != 4 or y.ndim != 4:
        return x, y
    fine = tuple(max(sides) for sides in zip(x.shape[2:], y.shape[2:], strict=True))
    made = []
    for features in (x, y):
        if any(long % short for long, short in zip(fine, features.shape[2:], strict=True)):
            raise ValueError(
                f"the grids of x and y are {list(x.shape[2:])} and {list(y.shape[2:])}; expected sides that are "
                "multiples of the other's: pool first, or use CKA, which needs no common grid."
            )
        for axis in (2, 3):
            times = fine[axis - 2] // features.shape[axis]
            features = features if times == 1 else features.repeat_interleave(times, axis)
        made.append(features)
    return made[0], made[1]


def check_pair(x: Tensor, y: Tensor) -> None:
    """Check that two batches belong together.

    Raises:
        ValueError: If they have different numbers of samples.
    """
    if len(x) != len(y):
        raise ValueError(
            f"x has {len(x)} samples and y {len(y)}; expected features of the same inputs, in the same order."
        )


def undefined(reason: str) -> Tensor:
    """Return NaN, with a warning that says why there is no value: a 0-dimensional tensor, float64."""
    warnings.warn(f"no similarity: {reason}", UserWarning, stacklevel=3)
    return torch.tensor(math.nan, dtype=torch.float64)
