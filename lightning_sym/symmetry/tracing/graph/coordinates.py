"""Trace elements through moves: run the operation on a tensor of coordinates, and read these off the result."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints, as_array

Axes = tuple[int, ...]
Move = Callable[[Tensor], Tensor]

_MANY = 2**22  # maximal numbers of a constant for exact comparison
_COLUMNS = 8  # compared one by one before sorting whole rows


def coordinates(shape: tuple[int, ...], axes: Sequence[int]) -> Tensor:
    """Return for every element 1 + its position on some axes, expanded along the others; 0 is reserved for padding."""
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    count = int(np.prod(sizes))
    return torch.arange(1, count + 1, dtype=torch.float64).reshape(sizes).expand(shape)


def core(moved: Tensor) -> Tensor:
    """Reduce axes with stride 0 to size 1, unless they are empty."""
    for axis, stride in enumerate(moved.stride()):
        if stride == 0 and moved.shape[axis]:
            moved = moved.narrow(axis, 0, 1)
    return moved


def varies(array: Tensor, axis: int) -> bool:
    """Return whether entries vary along an axis; the comparison ends at the first difference."""
    if array.shape[axis] < 2 or not array.stride(axis):
        return False
    return not torch.equal(array, array.narrow(axis, 0, 1).expand_as(array))


def thinned(array: Tensor, lead: int = 0) -> Tensor:
    """Reduce axes along which an array is constant to size 1."""
    for axis in range(lead, array.ndim):
        if array.shape[axis] > 1 and not varies(array, axis):
            array = array.narrow(axis, 0, 1)
    return array


def varying_axes(moved: Tensor) -> list[int]:
    """Return the axes along which moved coordinates vary, ignoring padding."""
    moved = thinned(moved)
    if not bool((moved == 0).any()):
        return [axis for axis, size in enumerate(moved.shape) if size > 1]
    least = torch.where(moved == 0, torch.inf, moved)
    return [
        axis for axis, size in enumerate(moved.shape) if size > 1 and bool((moved.amax(axis) > least.amin(axis)).any())
    ]


def moved_coordinates(shape: Axes, axes: Sequence[int], path: Iterable[Move]) -> Tensor:
    """Return where the coordinates of a tensor's elements on some axes get to by one function after the other."""
    moved = coordinates(shape, axes)
    for step in path:
        moved = step(moved)
    return moved


def left_after(shape: Axes, axes: Axes, path: Iterable[Move]) -> Ints:
    """Return the coordinates on some axes that are left after moves, perhaps repeatedly."""
    return thinned(moved_coordinates(shape, axes, path)).long().reshape(-1).numpy()


def reduced_to_axes(moved: Tensor, axes: Sequence[int]) -> Ints:
    """Reduce moved coordinates to some axes; they must be constant along the others."""
    moved = core(moved)
    others = tuple(axis for axis in range(moved.ndim) if axis not in axes)
    return (moved.amax(others) if others else moved).long().numpy()


def rank_within(keys: Ints) -> Ints:
    """Return for each entry the number of earlier equal entries."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    start = np.r_[0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1]
    rank = np.zeros(len(keys), np.int64)
    rank[order] = np.arange(len(keys)) - np.repeat(start, np.diff(np.r_[start, len(keys)]))
    return rank


def rows_of(constant: Tensor, axes: tuple[int, ...]) -> NDArray[Any]:
    """Return a row with the contents of a constant at each position of some axes; one row if all are equal."""
    others = [axis for axis in range(constant.ndim) if axis not in axes]
    for axis in others:  # expanded axes repeat the constant
        constant = constant if constant.stride(axis) else constant.narrow(axis, 0, 1)
    if not any(constant.stride(axis) and constant.shape[axis] > 1 for axis in axes):
        for axis in axes:
            constant = constant.narrow(axis, 0, 1)
        return as_array(constant.reshape(1, -1))
    count = int(np.prod([constant.shape[axis] for axis in axes]))
    rows = constant.permute((*axes, *others)).reshape(count, -1)
    rows = torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows
    if rows.numel() <= _MANY:
        return as_array(rows)
    # Different rows have different sums under random weights.
    weights = torch.rand(rows.shape[1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (rows.double().nan_to_num() @ weights).numpy()


def numbered_rows(rows: NDArray[Any]) -> Ints:
    """Number the rows of an array in lexicographic order; equal rows share a number. Shape (rows,)."""
    _, first, number = np.unique(rows[:, 0], return_index=True, return_inverse=True)
    for _ in range(_COLUMNS):  # a few columns mostly distinguish all rows, which avoids sorting
        if len(first) == len(rows) or np.array_equal(rows, like := rows[first[number]]):
            return number
        differs = (rows != like).any(0)
        order = np.unique(rows[:, differs.argmax()], return_inverse=True)[1]
        _, first, number = np.unique(number * len(rows) + order, return_index=True, return_inverse=True)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def moved_positions(move: Move, shape: Axes, own: Axes, *, part: Tensor) -> tuple[bool, Axes, Ints]:
    """Return whether a move adds elements, the axes along which moved units vary, and their positions there.

    Args:
        move: The move.
        shape: The shape before.
        own: The axes of the units.
        part: The moved coordinates on these.
    """
    thin = thinned(part)
    filled, axes = bool(thin.min() == 0), varying_axes(thin)
    if not axes and filled and part.ndim == len(shape):
        # A unit padded along its own axis: the new elements are other units.
        axes, thin = [axis for axis in own if part.shape[axis] > 1 and shape[axis] == 1], part
    return filled, tuple(axes), reduced_to_axes(thin, axes) - 1


def equal_positions(path: Iterable[Move], shape: Axes, axes: Axes) -> Ints:
    """Number the positions on some axes of a moved value; positions with always equal contents share a number."""
    part = moved_coordinates(shape, range(len(shape)), path)
    sizes = tuple(part.shape[axis] for axis in axes)
    rows = rows_of(part, axes)
    return np.zeros(sizes, np.int64) if len(rows) == 1 else numbered_rows(rows).reshape(sizes)


def copies_of(move: Move, shape: Axes, own: Axes, *, axes: Axes, position: Ints) -> Ints:
    """Distinguish copies of a position by their places on a value's axes without units.

    Args:
        move: The move.
        shape: The shape before.
        own: The axes of the units.
        axes: The axes along which moved units vary.
        position: Their positions there.
    """
    code = np.zeros_like(position)
    for axis, size in enumerate(shape):
        if axis in own or size == 1:
            continue
        place = move(coordinates(shape, (axis,)))
        along = set(varying_axes(thin := thinned(place)))
        if along <= set(axes):
            code = code * (size + 1) + reduced_to_axes(thin, axes) if along else code
        elif along & set(axes):  # each position shows some of the places (alternating, for example)
            _, shown = np.unique(rows_of(place, axes), axis=0, return_inverse=True)
            code = code * (size + 1) + shown.reshape(code.shape)
    code = np.unique(code, return_inverse=True)[1].reshape(code.shape)  # equal for inputs of other sizes
    # Remaining duplicates (a tensor joined to itself) are distinguished by their order.
    rank = rank_within((position * (int(code.max()) + 1) + code).ravel())
    return code * (int(rank.max()) + 1) + rank.reshape(position.shape)
