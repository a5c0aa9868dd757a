"""Figures of J on a plane of weight vectors: surface, contours, two planes side by side, stacks of classes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from mpl_toolkits.mplot3d.axes3d import Axes3D
from numpy.typing import ArrayLike
from scipy.ndimage import minimum_filter

from lightning_sym._checks import check_numbers
from lightning_sym.figures import _equivalence as shared
from lightning_sym.figures._equivalence import FoundPoint, Scale
from lightning_sym.figures._panels import INK, Values, panels, readable

_FIRST, _SECOND = "$c_1$", "$c_2$"
_MAP = colormaps["viridis"].with_extremes(bad=shared.NOWHERE)
_FINE = 160  # cells per axis of the surface as drawn
_TALL = 0.62  # height of the surface's box over its width
_ABSENT = " (not on this grid)"
_EXACT = ("#ff7f0e", "#00d5ff", "#ffffff", "#ff5fd2")


@readable
def loss_surface(
    values: ArrayLike,
    axis: ArrayLike,
    points: Sequence[FoundPoint],
    scale: Scale,
    *,
    title: str = "",
    warning: str | None = None,
) -> Figure:
    """Draw J over a plane as a surface, linear in J, with the found points at the height of their J.

    The surface is seen from where it hides the fewest of them. J grows without bound away from the class, so it is
    cut off at the largest of: twice the larger of J0 and V, 1.2 times the largest J of a found point, and the lower
    quartile of the plane. The vertical label says where; the rim is drawn. Between grid points sqrt(J) is interpolated
    linearly.

    Args:
        values: J on the grid, rows along the first basis vector; NaN and inf leave holes. Shape ``[n, n]``.
        axis: Coordinates of both axes, ascending. Shape ``[n]``.
        points: Found points with two coefficients; the first is the centre.
        scale: J0 and V, marked on the colour bar.
        title: Above the figure.
        warning: Below the title in red.

    Returns:
        The figure.

    Raises:
        ValueError: If shapes do not fit, or the axis does not ascend.

    References:
        Lengyel et al. (2020), GENNI, figure 1 (left).
    """
    grid, places = shared.checked_grid(values, axis, 2)
    finite = grid[np.isfinite(grid)]
    clip = _height(finite, points, scale)
    top = min(clip, float(finite.max(initial=0))) or clip
    figure, (axes,) = shared.solids(8.2, 6.2)
    cells = np.linspace(places[0], places[-1], _FINE + 1)
    fine = _interpolated(grid, places, cells)
    # Cells that reach below the cut are whole, with corners beyond it put on it.
    cut = np.where(minimum_filter(fine, 3) <= clip, np.minimum(fine, clip), np.nan)
    colors = ScalarMappable(Normalize(0, top), _MAP)
    if not _draw_surface(axes, cells, cut, colors):
        shared.say(axes, f"J is finite and below {shared.number(clip)} nowhere on the grid.")
    if finite.size and clip < finite.max() and (fine < clip).any() and (fine > clip).any():
        rim = np.where(np.isnan(fine), np.nan, np.minimum(fine, 2 * clip))
        axes.contour(cells, cells, rim.T, levels=[clip], offset=clip, colors=INK, linewidths=0.9)
    raised = [replace(point, coefficients=[*np.ravel(point.coefficients), point.loss]) for point in points]
    handles = shared.draw_points(axes, raised, 3, [*_ends(places), (-np.inf, clip)])
    axes.set(xlabel=_FIRST, ylabel=_SECOND, xlim=places[[0, -1]], ylim=places[[0, -1]], zlim=(0, top))
    axes.zaxis.set_major_locator(MaxNLocator(4))
    cut_off = bool(finite.size and finite.max() > clip)
    axes.set_zlabel(f"J, cut off at {shared.number(clip)}" if cut_off else "J")
    unit = np.array([np.ptp(places), np.ptp(places), top / _TALL])
    starts = [(np.ravel(point.coefficients) - [places[0], places[0], 0]) / unit for point in raised]
    elevation, azimuth = _view(cut / unit[2], [start for start in starts if np.isfinite(start).all()])
    axes.view_init(elev=elevation, azim=azimuth)
    axes.set_box_aspect((1, 1, _TALL), zoom=0.98)
    shared.scale_bar(figure, colors, [axes], scale, shrink=0.72, pad=0.09, extend="max" if cut_off else "neither")
    shared.finish(figure, handles, title, warning)
    return figure


def _height(finite: Values, points: Sequence[FoundPoint], scale: Scale) -> float:
    """Return the height of the cut: above both baselines, the found points and a quarter of the plane."""
    baselines = [2 * level for level in (scale.zero, scale.constant) if np.isfinite(level)]
    losses = [1.2 * point.loss for point in points if np.isfinite(point.loss)]
    quartile = float(np.quantile(finite, 0.25)) if finite.size else 0.0
    return max([*baselines, *losses, quartile]) or 1.0


def _draw_surface(axes: Axes3D, cells: Values, heights: Values, colors: ScalarMappable) -> bool:
    """Draw the cells with a height at all corners, and return whether there are any."""
    corners = np.stack([*np.meshgrid(cells, cells, indexing="ij"), heights], axis=-1)
    quads = np.stack([corners[:-1, :-1], corners[1:, :-1], corners[1:, 1:], corners[:-1, 1:]], axis=2).reshape(-1, 4, 3)
    quads = quads[np.isfinite(quads).all(axis=(1, 2))]
    if not len(quads):
        return False
    middles = quads[..., 2].mean(axis=1)
    # Edges of the color of the faces leave no seams.
    look = {"cmap": _MAP, "norm": colors.norm, "edgecolors": colors.to_rgba(middles), "lw": 0.2, "rasterized": True}
    axes.add_collection3d(Poly3DCollection(quads, array=middles, **look))
    return True


@readable
def log_contour(
    values: ArrayLike,
    axis: ArrayLike,
    points: Sequence[FoundPoint],
    scale: Scale,
    *,
    epsilon: float | None = None,
    overlay: Sequence[tuple[str, ArrayLike]] = (),
    title: str = "",
    warning: str | None = None,
) -> Figure:
    """Draw filled contours of the natural logarithm of J over a plane.

    Colours go from about the first percentile of the plane (but not further than 12 below J0, V and epsilon) to its
    upper half percent.

    Args:
        values: J on the grid, rows along the first basis vector; inf (known only to be large) has the top colour, NaN
            is grey. Shape ``[n, n]``.
        axis: Coordinates of both axes, ascending. Shape ``[n]``.
        points: Found points with two coefficients.
        scale: J0 and V, marked on the colour bar.
        epsilon: Where J is this, a line is drawn; > 0.
        overlay: Names and fields, NaN outside their domain; their zero levels are drawn as exact classes. Each of
            shape ``[n, n]``.
        title: Above the figure.
        warning: Below the title in red.

    Returns:
        The figure.

    Raises:
        ValueError: If shapes do not fit, the axis does not ascend, or epsilon is not positive.

    References:
        Lengyel et al. (2020), GENNI, figure 1 (right).
    """
    grid, places = shared.checked_grid(values, axis, 2)
    figure, (axes,) = panels(6.4, 5.6)
    lines = _draw_levels(figure, [axes], [(grid, places)], scale, epsilon)
    handles = shared.draw_points(axes, points, 2, _ends(places)) + lines
    axes.set(xlabel=_FIRST, ylabel=_SECOND)
    shared.finish(figure, handles + _exact_lines(axes, places, overlay), title, warning)
    return figure


@readable
def planes_beside(
    values: tuple[ArrayLike, ArrayLike],
    axes: tuple[ArrayLike, ArrayLike],
    points: tuple[Sequence[FoundPoint], Sequence[FoundPoint]],
    scale: Scale,
    *,
    names: tuple[str, str],
    epsilon: float | None = None,
    title: str = "",
    warning: str | None = None,
) -> Figure:
    """Draw J over two planes side by side as in :func:`log_contour`, with one scale of colours.

    Args:
        values: J on either grid, for example of the plane that was searched and of one through the group's orbit.
            Shapes ``[n, n]`` and ``[k, k]``.
        axes: Coordinates of the axes of either grid. Shapes ``[n]`` and ``[k]``.
        points: Found points of either plane, two coefficients each.
        scale: J0 and V, marked on the colour bar.
        names: Above either plane.
        epsilon: Where J is this, a line is drawn; > 0.
        title: Above the figure.
        warning: Below the title in red.

    Returns:
        The figure.

    Raises:
        ValueError: If shapes do not fit, an axis does not ascend, or epsilon is not positive.
    """
    grids = [shared.checked_grid(*pair, 2) for pair in zip(values, axes, strict=True)]
    figure, both = panels(6.6, 10.6, 2, 1)
    lines = _draw_levels(figure, both, grids, scale, epsilon)
    handles: list[Artist] = []
    for panel, (_, places), found, name in zip(both, grids, points, names, strict=True):
        shown = shared.draw_points(panel, found, 2, _ends(places))
        panel.set(title=name, xlabel=_FIRST, ylabel=_SECOND)
        for handle in shown:  # the two planes may have points of the same name with another J
            handle.set_label(f"{name}: {handle.get_label()}")
        handles += shown
    shared.finish(figure, handles + lines, title, warning)
    return figure


@readable
def class_stack_figure(
    slices: ArrayLike,
    labels: Sequence[str],
    axis: ArrayLike,
    *,
    epsilon: float | None = None,
    title: str = "",
) -> Figure:
    """Draw J of neighbouring classes over the same plane as small multiples, with one scale of colours.

    Args:
        slices: J to one target per slice; NaN and inf as in :func:`log_contour`. Shape ``[S, n, n]``.
        labels: Above each slice. Length ``S``.
        axis: Coordinates of both axes, ascending. Shape ``[n]``.
        epsilon: Where J is this, a line is drawn; > 0.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no slice, lengths or shapes do not fit, or epsilon is not positive.
    """
    stack = shared.checked("slices", slices, [None, None, None])
    if not 0 < len(stack) == len(labels):
        raise ValueError(f"slices must have one slice per label, at least one, got {len(stack)} and {len(labels)}.")
    grids = [shared.checked_grid(values, axis, 2) for values in stack]
    columns = min(2, len(stack))
    rows = -(-len(stack) // columns)
    size = 2.6 + 2.7 * columns, 1.3 + 2.8 * rows
    figure, small = panels(*size, len(stack), columns, sharex=True, sharey=True)
    lines = _draw_levels(figure, small, grids, None, epsilon)
    for panel, label in zip(small, labels, strict=True):
        panel.set_title(label, fontsize=10)
    for panel in small[max(0, len(small) - columns) :]:
        panel.set_xlabel(_FIRST)
    for panel in small[::columns]:
        panel.set_ylabel(_SECOND)
    shared.finish(figure, lines, title)
    return figure


def _interpolated(grid: Values, places: Values, cells: Values) -> Values:
    """Return J at other places of both axes: sqrt(J) is linear between grid points."""
    right = np.clip(np.searchsorted(places, cells), 1, len(places) - 1)
    share = (cells - places[right - 1]) / np.diff(places)[right - 1]
    roots = np.sqrt(np.maximum(np.where(np.isfinite(grid), grid, np.nan), 0))
    rows = roots[right - 1] * (1 - share)[:, None] + roots[right] * share[:, None]
    fine: Values = rows[:, right - 1] * (1 - share) + rows[:, right] * share
    return fine**2


def _view(heights: Values, starts: Sequence[Values]) -> tuple[float, float]:
    """Return the elevation and azimuth that hide the fewest points behind the surface.

    Heights over the unit square and points have the units of the box as drawn.
    """
    away = np.linspace(0.02, 1.5, 120)[:, None]
    last = len(heights) - 1
    best, fewest = (38.0, -60.0), len(starts) + 1
    for elevation, azimuth in product((38.0, 52.0, 66.0), (-60.0, -30.0, -120.0, 30.0, 60.0, 120.0, 150.0, -150.0)):
        up, turn = np.radians([elevation, azimuth])
        towards = np.array([np.cos(up) * np.cos(turn), np.cos(up) * np.sin(turn), np.sin(up)])
        hidden = 0
        for start in starts:
            ray = start + away * towards
            ray = ray[((ray[:, :2] >= 0) & (ray[:, :2] <= 1)).all(axis=1)]
            x, y = np.rint(last * ray[:, :2]).astype(int).T
            hidden += bool((heights[x, y] > ray[:, 2] + 0.01).any())  # NaN, where nothing is drawn, hides nothing
        if hidden < fewest:
            best, fewest = (elevation, azimuth), hidden
    return best


def _log_levels(grids: Sequence[Values], references: Sequence[float]) -> Values:
    """Return the levels of ln J where colours change: robust to J = 0, to poles and to missing values."""
    logs = np.concatenate([np.log(np.maximum(grid[np.isfinite(grid)], 1e-300)) for grid in grids])
    known = [float(np.log(value)) for value in references if np.isfinite(value) and value > 0]
    if not logs.size:
        logs = np.array(known or [0.0])
    high = max([float(np.quantile(logs, 0.995)), *known])
    low = min([float(np.quantile(logs, 0.01)), *(level - 2 for level in known)])
    low = max(low, min([*known, high]) - 12)
    return np.asarray(MaxNLocator(18).tick_values(min(low, high - 1), high), dtype=np.float64)


def _fill(axes: Axes, grid: Values, places: Values, levels: Values) -> QuadContourSet:
    step = levels[1] - levels[0]
    logs = np.log(np.maximum(np.where(np.isposinf(grid), 1e300, grid), 1e-300))
    # A single J = 0 would pull the contours around it to its neighbours.
    logs = np.clip(logs, levels[0] - step, levels[-1] + step)
    axes.set_facecolor(shared.NOWHERE)
    axes.set_aspect("equal")
    return axes.contourf(places, places, np.ma.masked_invalid(logs).T, levels=levels, cmap=_MAP, extend="both")


def _ends(places: Values) -> list[tuple[float, float]]:
    return [(float(places[0]), float(places[-1]))] * 2


def _draw_levels(
    figure: Figure,
    small: list[Axes],
    grids: Sequence[tuple[Values, Values]],
    scale: Scale | None,
    epsilon: float | None,
) -> list[Artist]:
    """Fill panels with ln J, in one scale of colours, and draw the line of epsilon; return it for the legend."""
    if epsilon is not None:
        check_numbers("> 0", epsilon=epsilon)
    marks = [] if scale is None else [("$J_0$", scale.zero), ("V", scale.constant)]
    marks += [] if epsilon is None else [(r"$\epsilon$", epsilon)]
    levels = _log_levels([grid for grid, _ in grids], [value for _, value in marks])
    there = False
    for panel, (grid, places) in zip(small, grids, strict=True):
        filled = _fill(panel, grid, places, levels)
        if epsilon is not None:
            there |= _level(panel, shared.roots(grid, epsilon), places, 1, color="white", linewidth=1.5)
    bar = figure.colorbar(filled, ax=small, pad=0.02, aspect=28)
    low, high = bar.ax.get_ylim()
    bar.set_ticks([tick for tick in MaxNLocator(9, integer=True).tick_values(low, high) if low <= tick <= high])
    shared.mark_scale(bar, marks, logarithmic=True)
    if epsilon is None:
        return []
    name = rf"J = $\epsilon$ = {shared.number(epsilon)}" + ("" if there else _ABSENT)
    return [shared.line_handle(name, color="white", lw=1.5, path_effects=shared.HALO)]


def _exact_lines(axes: Axes, places: Values, overlay: Sequence[tuple[str, ArrayLike]]) -> list[Artist]:
    """Draw the zero levels of fields; return their entries for the legend."""
    handles: list[Artist] = []
    for (name, field), color in zip(overlay, cycle(_EXACT), strict=False):
        values = shared.checked(name, field, [len(places)] * 2)
        there = _level(axes, values, places, 0, color=color, linewidth=2.0, linestyle="--")
        label = name if there else name + _ABSENT
        handles.append(shared.line_handle(label, color=color, lw=2, linestyle="--", path_effects=shared.HALO))
    return handles


def _level(
    axes: Axes, field: Values, places: Values, level: float, *, color: str, linewidth: float, linestyle: str = "-"
) -> bool:
    """Draw one level of a field with a dark rim and return whether there is any."""
    shown = np.ma.masked_invalid(field)
    if not (shown.count() and shown.min() < level < shown.max()):
        return False
    lines = axes.contour(
        places, places, shown.T, levels=[level], colors=color, linewidths=linewidth, linestyles=linestyle
    )
    lines.set_path_effects(shared.HALO)
    return True
