"""Arrays of numbers by position, unit or generator."""

import contextlib
import ctypes
import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc would otherwise keep."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other systems have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def on_axes(vector: Floats, shape: tuple[int, ...], axes: tuple[int, ...], ndim: int) -> Floats:
    """Reshape numbers to the given shape on some axes, with size 1 on all others.

    Args:
        vector: The numbers. Shape (size,).
        shape: Sizes of the axes.
        axes: The axes, ascending.
        ndim: The number of axes of the result.
    """
    return np.expand_dims(vector.reshape(shape), tuple(axis for axis in range(ndim) if axis not in axes))


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Convert a tensor to an exact array; bfloat16, which NumPy lacks, becomes float32."""
    return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy())


def odd(numbers: Floats) -> Bools:
    """Return a mask of odd numbers, up to rounding: an odd number of flips changes a sign."""
    return np.asarray(np.mod(np.rint(numbers), 2) == 1)


def odd_entries(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the indicator of a matrix's odd entries."""
    result = matrix.tocsr(copy=True)
    result.data = odd(result.data).astype(np.float64)
    result.eliminate_zeros()
    return result


def together(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Merge some axes of a tensor to one, in row-major order, before all others."""
    return tensor.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1)


def apart(tensor: Tensor, axes: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Undo :func:`together`; `shape` holds the sizes of the merged axes."""
    return tensor.reshape((*shape, *tensor.shape[1:])).movedim(tuple(range(len(axes))), axes)


def multiplied(matrix: Tensor, tensor: Tensor, axis: int) -> Tensor:
    """Multiply one axis of a tensor by a square matrix; contiguous."""
    shape = tensor.shape
    lines = tensor.reshape(math.prod(shape[:axis]), shape[axis], -1)
    if len(lines) == 1:
        return (matrix @ lines[0]).reshape(shape)
    made = lines[..., 0] @ matrix.mT if lines.shape[2] == 1 else torch.matmul(matrix, lines)
    return made.reshape(shape)


def along(tensor: Tensor, axes: tuple[int, ...]) -> Floats:
    """Sum over all other axes. Shape (sizes of the axes), float64."""
    others = [axis for axis in range(tensor.ndim) if axis not in axes]
    total = tensor.sum(others) if others else tensor
    return np.asarray(total.double().cpu().numpy())


def rising(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct numbers of an array, ascending: much faster than np.unique's hash table.

    Integers of a narrow range are marked in a mask, other numbers are sorted.
    """
    if numbers.size and numbers.dtype.kind == "i":
        least, most = int(numbers.min()), int(numbers.max())
        if most - least < 16 * numbers.size:
            mask = np.zeros(most - least + 1, bool)
            mask[numbers.ravel() - least] = True
            return (np.flatnonzero(mask) + least).astype(numbers.dtype, copy=False)
    ordered = np.sort(numbers, axis=None)
    return ordered[np.r_[True, ordered[1:] != ordered[:-1]]] if ordered.size else ordered


def distinct_columns(*rows: Ints) -> tuple[Ints, Ints]:
    """Return the distinct columns of rows of integers, in order, and the index of each column among these.

    Equivalent to ``np.unique(np.stack(rows), axis=1, return_inverse=True)``, and ten times faster: columns are encoded
    as integers.
    """
    key, most = np.zeros(rows[0].size, np.int64), 1
    for row in rows:
        least, span = (int(row.min()), int(row.max()) - int(row.min()) + 1) if row.size else (0, 1)
        key, most = key * span + (row.ravel() - least), most * span
    if most >= 2**62:
        unique, inverse = np.unique(np.stack([row.ravel() for row in rows]), axis=1, return_inverse=True)
        return unique, inverse.ravel()
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return np.stack([row.ravel()[first] for row in rows]), inverse


def rising_pairs(one: Ints, two: Ints) -> Ints:
    """Return the distinct pairs of integers of two arrays, in order. Shape (2, pairs)."""
    least, most = (int(two.min()), int(two.max())) if two.size else (0, 0)
    span = most - least + 1
    first, second = np.divmod(rising(one.astype(np.int64).ravel() * span + (two.ravel() - least)), span)
    return np.stack([first, second + least])
