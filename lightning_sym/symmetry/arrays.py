"""Arrays of numbers by position, unit or generator."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


def on_axes(vector: Floats, shape: tuple[int, ...], axes: tuple[int, ...], ndim: int) -> Floats:
    """Return numbers in the given shape on some axes, and with size 1 on all others.

    Args:
        vector: The numbers. Shape (size,).
        shape: Sizes of the axes.
        axes: The axes, rising.
        ndim: The number of axes of the result.
    """
    return np.expand_dims(vector.reshape(shape), tuple(axis for axis in range(ndim) if axis not in axes))


def odd(numbers: Floats) -> Bools:
    """Return whether numbers are odd, up to rounding: as many flips change a sign."""
    return np.asarray(np.mod(np.rint(numbers), 2) == 1)
