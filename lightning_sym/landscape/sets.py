"""The numbers that are reported with a picture of the set J < epsilon on a grid."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_sym.landscape.scale import FunctionScale, Resolution, VolumeExponent, resolution, volume_exponent
from lightning_sym.landscape.topology import betti_numbers, components, joining_levels


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
