"""Figure of stitching any site of one network to any site of another."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared


@shared.readable
def penalty_heat_map(values: ArrayLike, sites_a: Sequence[str], sites_b: Sequence[str], title: str = "") -> Figure:
    """Draw the penalty of stitching any site of one network to any site of another.

    Cells have their numbers, in points of accuracy. NaN, where the sites do not fit or the map was stopped, is
    grey, hatched and named below.

    Args:
        values: Penalties as fractions. Shape ``[A, B]``: rows are cuts of the first network (its bottom layers are
            used), columns of the second.
        sites_a: Names of the rows. Length ``A``.
        sites_b: Names of the columns. Length ``B``.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no cell, or the shape is not ``[A, B]``.
    """
    points = 100 * np.asarray(values, dtype=float)
    if points.size == 0 or points.shape != (len(sites_a), len(sites_b)):
        raise ValueError(
            f"values must have one row per name in sites_a ({len(sites_a)}) and one column per name in sites_b "
            f"({len(sites_b)}), at least one each, got shape {list(points.shape)}."
        )
    rows, columns = points.shape
    long = max(map(len, [*sites_a, *sites_b])) * 0.065
    cell, fontsize = (0.62, 8) if max(rows, columns) <= 8 else (0.42, 6.5)
    size = max(4.2, 2.0 + long + cell * columns), max(3.2, 1.4 + long + cell * rows)
    figure, (axes,) = shared.panels(*size, title=title)
    texts = [[_number(value) if abs(value) < 9.95 or cell > 0.5 else f"{value:.0f}" for value in row] for row in points]
    for row, column in np.argwhere(~np.isfinite(points)):
        texts[row][column] = ""
    finite = points[np.isfinite(points)]
    limits = float(finite.min(initial=0.0)), float(finite.max(initial=1.0))
    image = shared.numbered_cells(axes, points, texts, "cividis_r", limits, fontsize)
    shared.hatch_missing(figure, {axes: points}, "the sites do not fit, or the map was stopped")
    longest = max(map(len, sites_b))
    flat = longest <= 4 or (longest <= 7 and cell > 0.5)
    axes.set_xticks(range(columns), list(sites_b), rotation=0 if flat else 90, fontsize=8)
    axes.set_yticks(range(rows), list(sites_a), fontsize=8)
    axes.set(xlabel="cut of B, which provides the top layers", ylabel="cut of A, which provides the bottom layers")
    figure.colorbar(image, ax=axes, label="stitching penalty, points of accuracy", shrink=0.9, pad=0.02)
    return figure


def _number(value: float) -> str:
    """Return a number with one digit after the point, and no "-0.0"."""
    return f"{round(value, 1) + 0.0:.1f}"
