"""The numbers that are reported with a picture of the set J < epsilon on a grid."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from lightning_sym._checks import check_known
from lightning_sym.landscape.scale import FunctionScale, Resolution, VolumeExponent, resolution, volume_exponent


@dataclass(frozen=True, eq=False)
class SetNumbers:
    """Numbers that describe the set J < epsilon on a grid in one plane.

    All of it is about this set in this box: pieces may join outside the box or outside the plane.

    Attributes:
        epsilon: Unit of J.
        shape: Points of the grid per axis.
        scale: J0 and V.
        tolerance: rho = epsilon / J0.
        relative: epsilon / V, an upper bound for R in the set.
        fraction: Share of the grid points that are in the set, in [0, 1].
        smallest: The smallest J on the grid.
        betti: Pieces, loops, cavities, as `betti_numbers` counts them, with full connectivity.
        components_full: Pieces of cells that share at least a corner.
        components_face: Pieces of cells that share faces.
        border: Whether the set touches the border of the box.
        resolution: The spacing next to the width of the set.
        exponent: Exponent of the volume over a decade below epsilon; None if too few points are in the set.
        joining: From which epsilon on the found points are joined inside the grid, see `joining_levels`. Shape
            ``[k, k]``, float64; NaN for points outside the box.
        warnings: Limits of the numbers, one sentence each.
    """

    epsilon: float
    shape: tuple[int, ...]
    scale: FunctionScale
    tolerance: float
    relative: float
    fraction: float
    smallest: float
    betti: tuple[int, ...]
    components_full: int
    components_face: int
    border: bool
    resolution: Resolution
    exponent: VolumeExponent | None
    joining: NDArray[np.float64]
    warnings: tuple[str, ...]


def describe_set(
    values: NDArray[np.floating],
    spacing: float,
    epsilon: float,
    scale: FunctionScale,
    cells: Sequence[tuple[int, ...]] = (),
) -> SetNumbers:
    """Measure the set J < epsilon on a grid, with warnings about the limits of the result.

    Warnings report an epsilon that is large compared with the teacher, an empty set, a set that touches the border, and
    components that depend on corners. They also report a grid that is too coarse for the set's width, a volume exponent
    that cannot be measured, and found points outside the box or the set's cells.

    Args:
        values: J at the grid points. Shape ``[n1, ..., nm]``, m >= 1, floating (float64 near thresholds), not NaN.
        spacing: Between grid points, the same along all axes, > 0.
        epsilon: > 0, unit of J.
        scale: The teacher's J0 and V.
        cells: Nearest grid points of the found points, each of m integers; -1 where outside the box.

    Returns:
        All numbers and the warnings.

    Raises:
        ValueError: If an argument is out of range, or a value is NaN.

    Note:
        For 100^3 points about 0.1 s plus 0.3 s for each found point; most of it is `joining_levels`.

    Example:
        >>> x = np.linspace(-1, 1, 41)
        >>> numbers = describe_set((x**2 - 0.25) ** 2, 0.05, 0.01, FunctionScale(1.0, 1.0), [(10,), (30,)])
        >>> numbers.betti, float(numbers.joining[0, 1])
        ((2,), 0.0625)
    """
    if not values.size or np.isnan(values).any():
        raise ValueError("values must hold at least one J and no NaN; look for weights that are not finite.")
    thin = resolution(values, spacing, epsilon)
    inside = values < epsilon
    edges = [np.take(inside, end, axis).any() for axis in range(values.ndim) for end in (0, -1)]
    present = [k for k, cell in enumerate(cells) if min(cell) >= 0]
    joining = np.full((len(cells),) * 2, np.nan)
    joining[np.ix_(present, present)] = joining_levels(values, [cells[k] for k in present])
    try:
        exponent, unmeasured = volume_exponent(values, epsilon), ""
    except ValueError as error:  # too few points are in the set
        exponent, unmeasured = None, str(error)
    betti = betti_numbers(inside)
    numbers = SetNumbers(
        epsilon=epsilon,
        shape=values.shape,
        scale=scale,
        tolerance=scale.tolerance(epsilon),
        relative=scale.relative(epsilon),
        fraction=int(np.count_nonzero(inside)) / values.size,
        smallest=float(values.min()),
        betti=betti,
        components_full=betti[0],
        components_face=components(inside, "face")[0],
        border=any(edges),
        resolution=thin,
        exponent=exponent,
        joining=joining,
        warnings=(),
    )
    return replace(numbers, warnings=tuple(_limits(numbers, unmeasured)))


def _limits(numbers: SetNumbers, unmeasured: str) -> Iterator[str]:
    """Yield warnings about the limits of the numbers, with the given one about the exponent."""
    epsilon, thin = numbers.epsilon, numbers.resolution
    if warning := numbers.scale.warning(epsilon):
        yield warning
    if numbers.fraction == 0:
        yield (
            f"The set is empty: the smallest J on the grid is {numbers.smallest:.3g}; raise epsilon = {epsilon:.3g} "
            "above it, or refine the grid."
        )
    if math.isnan(thin.width):
        yield (
            "The width of the set could not be measured, since no cell of it has finite values all around; evaluate "
            "J also where it is large."
        )
    elif not thin.enough:
        yield (
            f"The spacing {thin.spacing:.3g} is more than half the width {thin.width:.3g} of the set where it is "
            f"thinnest: pieces and holes may be the grid's; {thin.points} points per axis would do, the grid has "
            f"{max(numbers.shape)}."
        )
    if numbers.components_face != numbers.components_full:
        yield (
            f"The grid is too coarse: the set has {numbers.components_face} pieces if cells are joined by faces, "
            f"{numbers.components_full} if corners join them too; take more points per axis."
        )
    if numbers.border:
        yield (
            "The set touches the border of the box: it may continue outside, and its pieces may join there; widen the "
            "bound to see."
        )
    if numbers.fraction > 0 and unmeasured:
        yield unmeasured
    own = numbers.joining.diagonal()
    if np.isnan(own).any():
        yield f"Outside the box: found points {_listed(np.isnan(own))}; widen the bound to include them."
    if (own >= epsilon).any():
        yield (
            f"The grid points nearest to the found points {_listed(own >= epsilon)} are not in the set; take more "
            "points per axis."
        )


def _listed(points: NDArray[np.bool_]) -> str:
    return ", ".join(map(str, np.flatnonzero(points)))


def components(
    inside: NDArray[np.bool_], connectivity: Literal["full", "face"] = "full"
) -> tuple[int, NDArray[np.integer]]:
    """Number the connected pieces of a set of grid cells.

    Args:
        inside: Which cells are in the set. Any shape of at least one axis, bool.
        connectivity: Whether cells that share a corner are joined ("full"), or only those that share a face ("face").

    Returns:
        The number of pieces, and the number of each cell's piece from 1 on, 0 outside the set; integer, shape of
        ``inside``.

    Raises:
        TypeError: If ``inside`` is not bool.
        ValueError: If it has no axis, or the connectivity is unknown.

    Example:
        >>> diagonal = np.eye(3, dtype=bool)
        >>> components(diagonal)[0], components(diagonal, "face")[0]
        (1, 3)
    """
    if inside.dtype != np.bool_:
        raise TypeError(f"inside must be bool, got {inside.dtype}; compare J with epsilon.")
    if inside.ndim == 0:
        raise ValueError("inside must have at least one axis, got a single number.")
    check_known("connectivity", connectivity, ("full", "face"))
    labels, count = ndimage.label(inside, np.ones((3,) * inside.ndim) if connectivity == "full" else None)
    return count, labels


def betti_numbers(inside: NDArray[np.bool_]) -> tuple[int, ...]:
    r"""Count the pieces, loops and cavities of the union of the closed cells of a set.

    Cells that share a corner are joined. :math:`b_0` counts pieces; the last number counts bounded pieces of the
    background, joined by faces only; in space, :math:`b_1 = b_0 + b_2 - \chi` with the Euler
    characteristic :math:`\chi` of the union, which is counted on vertices, edges, squares and cubes.

    Args:
        inside: Which cells are in the set. Shape ``[n1, ..., nm]``, m >= 1, bool. Everything outside the grid is
            background.

    Returns:
        ``(b0,)`` on a line, ``(b0, b1)`` in the plane, ``(b0, b1, b2)`` in space; of m >= 4 only ``(b0,)``.

    Raises:
        TypeError: If ``inside`` is not bool.
        ValueError: If it has no axis.

    Note:
        Linear in the number of cells: under a second for 200^3. About ten bytes a cell are held.

    Example:
        >>> ring = np.ones((3, 3), dtype=bool)
        >>> ring[1, 1] = False
        >>> betti_numbers(ring)
        (1, 1)
    """
    pieces = components(inside)[0]
    if inside.ndim not in (2, 3):
        return (pieces,)
    padded = np.pad(inside, 1)
    cavities = components(~padded, "face")[0] - 1
    return (pieces, cavities) if inside.ndim == 2 else (pieces, pieces + cavities - _euler(padded), cavities)


def joining_levels(values: NDArray[np.floating], cells: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    r"""Find the levels that join cells of a grid: the barriers between them.

    Cells i and j are in one component of ``values < epsilon`` for each epsilon above their level
    :math:`\min_{\text{paths}} \max_{\text{path}} J`, over paths of cells that share corners. Exact: the sorted values
    are bisected with `components`, for all pairs together.

    Args:
        values: J. Shape ``[n1, ..., nm]``, m >= 1, floating; infinite where it is only known to be large.
        cells: Indices of k cells, each of m integers >= 0. The same one may be given twice.

    Returns:
        Shape ``[k, k]``, float64, symmetric, an ultrametric; the value at the cell on the diagonal. Infinite where
        all paths have infinite values on them.

    Raises:
        ValueError: If a value is NaN or a cell lies outside the grid.

    Note:
        At most ``(k - 1) log2(values.size)`` labellings of the grid: for four cells 0.1 s on 50^3, 1 s on 100^3, and
        10 s on 200^3 or 41^4.

    Example:
        >>> joining_levels(np.array([0.0, 3.0, 1.0]), [(0,), (2,)])
        array([[0., 3.],
               [3., 1.]])
    """
    if np.isnan(values).any():
        raise ValueError("values must not be NaN; look for weights that are not finite.")
    for cell in cells:
        if len(cell) != values.ndim or not all(0 <= i < n for i, n in zip(cell, values.shape, strict=True)):
            raise ValueError(
                f"cell {tuple(cell)} is not a cell of the grid of shape {list(values.shape)}; leave it out or enlarge "
                "the grid."
            )
    own = np.array([values[tuple(cell)] for cell in cells], dtype=np.float64)
    result = np.diag(own)
    if len(cells) < 2:
        return result
    levels = np.sort(values, axis=None)
    places = tuple(np.array(cells).T)

    def resolve(members: list[int], low: int, high: int) -> None:
        """Fill in the levels of members; their pairs all join at positions in (low, high]."""
        if len(members) < 2:
            return
        if high - low == 1:
            for i in members:
                result[i, [j for j in members if j != i]] = levels[high]
            return
        middle = (low + high) // 2
        labels = components(values <= levels[middle])[1][places]
        # Cells above the level, with the label 0, are apart from all others, and from themselves if given twice.
        groups: dict[int, list[int]] = {}
        for i in members:
            groups.setdefault(int(labels[i]) or ~i, []).append(i)
        for group in groups.values():
            resolve(group, low, middle)
        first = [group[0] for group in groups.values()]
        resolve(first, middle, high)
        for a, one in zip(first, groups.values(), strict=True):
            for b, other in zip(first, groups.values(), strict=True):
                if a != b:
                    result[np.ix_(one, other)] = result[a, b]

    resolve(list(range(len(cells))), -1, levels.size - 1)
    return result


def _euler(cells: NDArray[np.bool_], axis: int = 0) -> int:
    """Return the Euler characteristic of the union of closed cells; there must be empty ones at both ends."""
    if axis == cells.ndim:
        return int(np.count_nonzero(cells))
    before, after = (cells[(slice(None),) * axis + (part,)] for part in (slice(None, -1), slice(1, None)))
    # Along each axis a cell is an interval, which changes the sign, or an end point, which two neighbours share.
    return _euler(before | after, axis + 1) - _euler(cells, axis + 1)
