"""The numbers that are reported with a picture of the set J < epsilon on a grid."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sym.landscape.scale import FunctionScale, Resolution, VolumeExponent, resolution, volume_exponent
from lightning_sym.landscape.topology import betti_numbers, components, joining_levels


@dataclass(frozen=True, eq=False)
class SetNumbers:
    """What is known of the set J < epsilon on a grid in one plane.

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
        shares: Share of the set in each given region, in [0, 1]; NaN if the set is empty.
        warnings: What limits the numbers, one sentence each.
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
    shares: dict[str, float]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as numbers, strings, lists and dictionaries for JSON; numbers not finite become None."""
        found = _plain(asdict(self))
        assert isinstance(found, dict)
        return found


def describe_set(
    values: NDArray[np.floating],
    spacing: float,
    epsilon: float,
    scale: FunctionScale,
    cells: Sequence[tuple[int, ...]] = (),
    *,
    regions: Mapping[str, NDArray[np.bool_]] | None = None,
) -> SetNumbers:
    """Measure the set J < epsilon on a grid, and say in plain sentences what limits the result.

    There is a warning if epsilon is large next to the teacher, the set is empty, it touches the border, corners decide
    on its pieces, the grid is too coarse for its width, the volume exponent cannot be measured, or a found point is
    outside the box or in a cell outside the set.

    Args:
        values: J at the grid points. Shape ``[n1, ..., nm]``, m >= 1, floating (float64 near thresholds), not NaN.
        spacing: Between grid points, the same along all axes, > 0.
        epsilon: > 0, unit of J.
        scale: The teacher's J0 and V.
        cells: Nearest grid points of the found points, each of m integers; -1 where outside the box.
        regions: Parts of the grid by name, such as patterns of signs of the weights, of whose share in the set is
            asked. Shape of ``values``, bool.

    Returns:
        All numbers and the warnings.

    Raises:
        ValueError: If an argument is out of range, a value is NaN, or a region has another shape.

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
    for name, region in (regions or {}).items():
        if region.shape != values.shape or region.dtype != np.bool_:
            raise ValueError(
                f"region {name!r} must be bool of shape {list(values.shape)}, got {region.dtype} of shape "
                f"{list(region.shape)}."
            )
    inside = values < epsilon
    size = int(np.count_nonzero(inside))
    smallest = float(values.min())
    betti, face = betti_numbers(inside), components(inside, "face")[0]
    edges = [np.take(inside, end, axis).any() for axis in range(values.ndim) for end in (0, -1)]
    present = [k for k, cell in enumerate(cells) if min(cell) >= 0]
    joining = np.full((len(cells),) * 2, np.nan)
    joining[np.ix_(present, present)] = joining_levels(values, [cells[k] for k in present])
    try:
        exponent, unmeasured = volume_exponent(values, epsilon), None
    except ValueError as error:  # too few points are in the set
        exponent, unmeasured = None, str(error)

    warnings = [scale.warning(epsilon)]
    if size == 0:
        warnings.append(
            f"The set is empty: the smallest J on the grid is {smallest:.3g}; raise epsilon = {epsilon:.3g} above it, "
            "or refine the grid."
        )
    if math.isnan(thin.width):
        warnings.append(
            "The width of the set could not be measured, since no cell of it has finite values all around; evaluate "
            "J also where it is large."
        )
    elif not thin.enough:
        warnings.append(
            f"The spacing {spacing:.3g} is more than half the width {thin.width:.3g} of the set where it is thinnest: "
            f"pieces and holes may be the grid's; {thin.points} points per axis would do, the grid has "
            f"{max(values.shape)}."
        )
    if face != betti[0]:
        warnings.append(
            f"The grid is too coarse: the set has {face} pieces if cells are joined by faces, {betti[0]} if corners "
            "join them too; take more points per axis."
        )
    if any(edges):
        warnings.append(
            "The set touches the border of the box: it may go on outside, and its pieces may join there; widen the "
            "bound to see."
        )
    if size and unmeasured:
        warnings.append(unmeasured)
    if outside := [k for k in range(len(cells)) if k not in present]:
        warnings.append(f"Outside the box: found points {_listed(outside)}; widen the bound to include them.")
    if missed := [k for k in present if joining[k, k] >= epsilon]:
        warnings.append(
            f"The grid points nearest to the found points {_listed(missed)} are not in the set; take more points per "
            "axis."
        )
    return SetNumbers(
        epsilon=epsilon,
        shape=values.shape,
        scale=scale,
        tolerance=scale.tolerance(epsilon),
        relative=scale.relative(epsilon),
        fraction=size / values.size,
        smallest=smallest,
        betti=betti,
        components_full=betti[0],
        components_face=face,
        border=any(edges),
        resolution=thin,
        exponent=exponent,
        joining=joining,
        shares={
            name: np.count_nonzero(inside & region) / size if size else math.nan
            for name, region in (regions or {}).items()
        },
        warnings=tuple(warning for warning in warnings if warning),
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
