"""Figures of curves in weight space: the plane of a curve, with the loss as contours."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared
from lightning_sym.figures._panels import Values

_RIM = [Stroke(linewidth=2.8, foreground=shared.INK), Normal()]  # white is seen on white in the legend
_LEVELS, _FINEST, _CLIP = 7, -5.0, 5.0


@dataclass(frozen=True)
class CurvePlane:
    """Content of one panel of :func:`curve_planes`.

    Attributes:
        title: Above the panel.
        x: Coordinates of the grid along the straight line, rising. Shape ``[A]``.
        y: Coordinates of the grid towards the bend, rising. Shape ``[B]``.
        loss: On the grid, nats; values that are not finite count as large. Shape ``[A, B]``.
        ends: Both ends of the curve. Shape ``[2, 2]``.
        bends: Projections of its bends. Shape ``[bends, 2]``.
        path: Projections of places of the curve, in their order. Shape ``[T, 2]``.
        residual: The largest distance of the curve from the plane.
    """

    title: str
    x: ArrayLike
    y: ArrayLike
    loss: ArrayLike
    ends: ArrayLike
    bends: ArrayLike
    path: ArrayLike
    residual: float = 0.0


def contour_levels(losses: ArrayLike) -> Values:
    """Return levels that are dense near the lowest loss (docs/theory/curves.md, 1.4).

    Args:
        losses: Any shape; values above 5 or not finite count as 5.

    Returns:
        Eight rising numbers, the last one the highest loss; or two around it if all losses are equal.
    """
    values = np.nan_to_num(np.asarray(losses, dtype=float), nan=_CLIP, posinf=_CLIP)
    low, high = float(values.min()), float(np.minimum(values, _CLIP).max())
    span = high - low
    if span <= np.exp(_FINEST):  # flat, or nothing below the cut
        return np.array([low, low + max(span, 1e-6)])
    steps = np.arange(_LEVELS + 1) / _LEVELS
    return np.asarray(low + np.exp(_FINEST + steps * (np.log(span) - _FINEST)))


@shared.readable
def curve_planes(planes: Sequence[CurvePlane], *, title: str = "") -> Figure:
    """Draw the planes of curves: the loss as contours, the curve, its control points, and the straight line.

    All panels share their levels and colors. Distances are those of weight space.

    Args:
        planes: From left to right; at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no planes.
    """
    shared.check_some(planes=planes)
    cut = [np.minimum(np.nan_to_num(np.asarray(p.loss, dtype=float), nan=_CLIP, posinf=_CLIP), _CLIP) for p in planes]
    levels = contour_levels(np.concatenate([values.ravel() for values in cut]))
    filled = np.concatenate([[min(levels[0], *(values.min() for values in cut)) - 1e-9], levels])
    colors = colormaps["viridis_r"].resampled(256)
    norm = BoundaryNorm(filled, 256)
    figure, row = shared.panels(6.4, 0.6 + 4.4 * len(planes), len(planes), 1, title=title)
    for axes, plane, values in zip(row, planes, cut, strict=True):
        x, y = np.asarray(plane.x, dtype=float), np.asarray(plane.y, dtype=float)
        axes.contourf(x, y, values.T, levels=filled, cmap=colors, norm=norm)
        axes.contour(x, y, values.T, levels=levels[:-1], colors=shared.INK, linewidths=0.4, alpha=0.6)
        ends, bends, path = (np.asarray(points, dtype=float) for points in (plane.ends, plane.bends, plane.path))
        axes.plot(*ends.T, "--", color="white", lw=1.6, label="straight line", path_effects=_RIM)
        axes.plot(*path.T, color=shared.VERMILION, lw=2.4, label="curve")
        axes.plot(*bends.T, "s", color="white", mec=shared.INK, ms=7, label="bend" if len(bends) == 1 else "bends")
        axes.plot(*ends.T, "o", color=shared.VERMILION, mec=shared.INK, ms=9, label="ends")
        axes.set(xlim=x[[0, -1]], ylim=y[[0, -1]], xlabel="along the straight line", title=plane.title)
        if plane.residual > 1e-3 * (x[-1] - x[0]):
            axes.set_xlabel(f"along the straight line\nthe curve is up to {plane.residual:.3g} away from this plane")
    for axes in row:
        axes.set_ylabel("towards the bend")
    shared.put_legend(figure, *row[0].get_legend_handles_labels())
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=row, ticks=levels, format="%.3g", spacing="uniform")
    bar.set_label(f"train loss, nats{', cut off at 5' if levels[-1] >= _CLIP else ''}")
    return figure
