"""Figures of sets of nearly equivalent weights: points, surfaces, embeddings, numbers, and the search for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from mpl_toolkits.mplot3d.axes3d import Axes3D
from numpy.typing import ArrayLike, NDArray
from skimage.measure import marching_cubes

from lightning_sym._checks import check_numbers
from lightning_sym.figures import _equivalence as shared
from lightning_sym.figures._equivalence import FoundPoint, Scale
from lightning_sym.figures._panels import BLUE, GREEN, INK, PINK, SKY, VERMILION, Values, check_some, panels, readable

Faces = NDArray[np.int64]
Mesh = tuple[ArrayLike, ArrayLike]  # vertices [v, 3] and the rows of its triangles [f, 3]

_VIEWS = ((22.0, -60.0), (22.0, 30.0))  # elevation and azimuth
_TUBE, _EXACT = SKY, VERMILION
_MOST_POINTS = 20_000
_MOST_CURVES = 150  # of either kind
_EMBEDDED = ("#0072b2", "#d62728", "#8e44c9", "#f0e442", "#8c510a")  # the paper's, for the first five points
_LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
_CURVES = (BLUE, VERMILION, GREEN, PINK)


@readable
def point_set(
    coefficients: ArrayLike,
    values: ArrayLike,
    epsilon: float,
    bound: float,
    points: Sequence[FoundPoint],
    scale: Scale,
    *,
    title: str = "",
    warning: str | None = None,
) -> Figure:
    """Draw the points of a 3-dimensional grid with J < epsilon, coloured by J, from two sides.

    Beyond 20,000 points, a fixed random choice is drawn; the title has both numbers.

    Args:
        coefficients: Coordinates in the plane. Shape ``[k, 3]``.
        values: J; points with J >= epsilon or not finite are left out. Shape ``[k]``.
        epsilon: Bound of the set and end of the colours, > 0.
        bound: Axes go from minus to plus this.
        points: Found points with three coefficients.
        scale: J0 and V, marked on the colour bar (with an arrow where they are beyond epsilon).
        title: Above the figure.
        warning: Below the title in red.

    Returns:
        The figure; a sentence in it if the set is empty.

    Raises:
        ValueError: If shapes do not fit, or epsilon is not positive.

    References:
        Lengyel et al. (2020), GENNI, figure 2.
    """
    where = shared.checked("coefficients", coefficients, [None, 3])
    level = shared.checked("values", values, [len(where)])
    check_numbers("> 0", epsilon=epsilon)
    inside = (level < epsilon) & np.isfinite(where).all(axis=1)
    smallest = level[np.isfinite(level)].min(initial=np.inf)
    where, level = where[inside], level[inside]
    chosen = _thinned(len(where), _MOST_POINTS)
    ends = (-bound, bound)
    figure, views = _two_views(6, ends)
    handles: list[Artist] = []
    for axes in views:
        handles = shared.draw_points(axes, points, 3, [ends] * 3)
        if not len(where):
            known = f"; the smallest is {shared.number(smallest)}" if np.isfinite(smallest) else ""
            shared.say(axes, f"No point of the grid has J < {shared.number(epsilon)}{known}.")
    dots = {"s": 5, "alpha": 0.7, "depthshade": False, "zorder": 2}
    _scatter(figure, views, where[chosen], level[chosen], epsilon, scale, dots, shrink=0.75, aspect=26)
    counted = f"J < {shared.number(epsilon)}: {len(where):,} grid points"
    counted += f", {len(chosen):,} of them drawn" if len(chosen) < len(where) else ""
    shared.finish(figure, handles, "\n".join(filter(None, [title, counted])), warning)
    return figure


@readable
def isosurface(
    values: ArrayLike,
    axis: ArrayLike,
    level: float,
    points: Sequence[FoundPoint],
    scale: Scale,
    *,
    overlay_field: ArrayLike | None = None,
    title: str = "",
    warning: str | None = None,
) -> Figure:
    """Draw the surface J = level of a 3-dimensional grid, shaded, from two sides.

    Args:
        values: J on the grid, axis k along basis vector k. Shape ``[n, n, n]``; see :func:`isosurface_mesh`.
        axis: Coordinates of all axes, ascending. Shape ``[n]``.
        level: Level of J, > 0.
        points: Found points with three coefficients.
        scale: J0 and V, for the legend.
        overlay_field: A field; its zero level is drawn as the exact class. NaN outside its domain. Shape
            ``[n, n, n]``.
        title: Above the figure.
        warning: Below the title in red.

    Returns:
        The figure; a sentence in it if the surface is empty.

    Raises:
        ValueError: If shapes do not fit, the axis does not ascend, or level is not positive.
    """
    grid, places = shared.checked_grid(values, axis, 3)
    tube = isosurface_mesh(grid, places, level)
    alone = overlay_field is None
    layers: list[tuple[Mesh, str, float]] = [(tube, _TUBE, 1.0 if alone else 0.3)]
    baselines = f"$J_0$ = {shared.number(scale.zero)}, V = {shared.number(scale.constant)}"
    handles: list[Artist] = [Patch(color=_TUBE, label=f"J = {shared.number(level)}  ({baselines})")]
    if overlay_field is not None:
        exact = _marched(shared.checked("overlay_field", overlay_field, grid.shape), places, 0.0)
        layers.append((exact, _EXACT, 1.0))
        handles.append(Patch(color=_EXACT, label="exact class" + ("" if len(exact[1]) else " (not on this grid)")))
    found: list[Artist] = []
    ends = float(places[0]), float(places[-1])
    figure, views = _two_views(6.4, ends)
    for axes in views:
        _surfaces(axes, layers)
        found = shared.draw_points(axes, points, 3, [ends] * 3)
        if not len(tube[1]):
            finite = grid[np.isfinite(grid)]
            span = (
                ": J goes from {} to {}".format(*map(shared.number, (finite.min(), finite.max())))
                if finite.size
                else ""
            )
            shared.say(axes, f"J = {shared.number(level)} nowhere on the grid{span}.")
    shared.finish(figure, found + handles, title, warning)
    return figure


def isosurface_mesh(values: ArrayLike, axis: ArrayLike, level: float) -> tuple[Values, Faces]:
    """Return the surface J = level of a 3-dimensional grid as triangles, by marching cubes.

    The function distance sqrt(J) is interpolated: near a class J is a parabola and sqrt(J) nearly linear.
    Where the set leaves the grid the surface is open. Triangles are counterclockwise seen from larger J.

    Args:
        values: J, >= 0. Shape ``[n, n, n]``. NaN is outside the domain: cubes with such a corner are left out; inf is
            known only to be above the level (taken as four times it).
        axis: Coordinates of all axes, ascending and evenly spaced. Shape ``[n]``.
        level: Level of J, > 0.

    Returns:
        The vertices in the units of the axis, float64 of shape ``[v, 3]``, and the rows of each triangle's corners
        among them, int64 of shape ``[f, 3]``. Both have length 0 where J is the level nowhere.

    Raises:
        ValueError: If shapes do not fit, the axis does not ascend, or level is not positive.
    """
    grid, places = shared.checked_grid(values, axis, 3)
    check_numbers("> 0", level=level)
    return _marched(shared.roots(grid, level), places, 1.0)


@readable
def embedding(
    coordinates: ArrayLike,
    values: ArrayLike,
    epsilon: float,
    points: Sequence[FoundPoint],
    scale: Scale,
    *,
    title: str = "",
    warning: str | None = None,
) -> Figure:
    """Draw a set of weights after an embedding in two dimensions, coloured by J.

    Args:
        coordinates: As ``lightning_sym.landscape.embedding`` returns. Shape ``[k, 2]``.
        values: J of each. Shape ``[k]``.
        epsilon: Bound of the set and end of the colours, > 0.
        points: Found points with their two embedded coordinates; coloured blue, red, purple, yellow, brown.
        scale: J0 and V, marked on the colour bar.
        title: Above the figure.
        warning: Below the title in red.

    Returns:
        The figure; a sentence in it if there is nothing to draw.

    Raises:
        ValueError: If shapes do not fit, or epsilon is not positive.

    References:
        Lengyel et al. (2020), GENNI, figure 3.
    """
    where = shared.checked("coordinates", coordinates, [None, 2])
    level = shared.checked("values", values, [len(where)])
    check_numbers("> 0", epsilon=epsilon)
    figure, (axes,) = panels(6.6, 5.6)
    shown = np.isfinite(level) & np.isfinite(where).all(axis=1)
    _scatter(figure, [axes], where[shown], level[shown], epsilon, scale, {"s": 9, "alpha": 0.8}, aspect=28)
    handles = shared.draw_points(axes, points, 2, colors=_EMBEDDED + shared.COLORS[4:])
    if not shown.any():
        shared.say(axes, f"No point has J < {shared.number(epsilon)}.")
    axes.set(xlabel="first coordinate of the embedding", ylabel="second coordinate", xticks=[], yticks=[])
    axes.set_aspect("equal", adjustable="datalim")
    counted = f"{int(shown.sum()):,} weights with J < {shared.number(epsilon)}"
    shared.finish(figure, handles, "\n".join(filter(None, [title, counted])), warning)
    return figure


@readable
def betti_curve(
    epsilons: ArrayLike,
    numbers: Mapping[str, Sequence[int]],
    marks: Mapping[str, float],
    *,
    title: str = "",
) -> Figure:
    """Draw numbers of connected components and holes of the set J < epsilon against epsilon, with exact thresholds.

    Args:
        epsilons: Where they were counted, > 0, in any order. Shape ``[E]``.
        numbers: Counts by name, for example ``"pieces"``; each of length ``E``.
        marks: Names and values of epsilon where theory predicts a change; vertical lines.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no counts, lengths differ, or an epsilon is not positive.
    """
    places = shared.checked("epsilons", epsilons, [None])
    if not len(places) or not (places > 0).all():
        raise ValueError("epsilons must be positive, and at least one.")
    check_some(numbers=numbers)
    order = np.argsort(places)
    figure, (axes,) = panels(6.4, 4.6)
    highest = 1.0
    for place, (name, counts) in enumerate(numbers.items()):
        count = shared.checked(f"numbers[{name!r}]", counts, [len(places)])[order]
        axes.plot(
            places[order], count, color=_CURVES[place % 4], linestyle=_LINES[place % 4], lw=2, marker="osD^"[place % 4],
            ms=4.5, label=name, zorder=3 + place,
        )  # fmt: skip
        highest = max(highest, count[np.isfinite(count)].max(initial=1))
    _vertical_marks(axes, marks)
    axes.set(xscale="log", xlabel=r"$\epsilon$", ylabel="number in the set J < $\\epsilon$")
    if highest > 20:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(-0.2, 1.6 * highest)
        ticks = [0, *(digit * 10**power for power in range(10) for digit in (1, 2, 5))]
        axes.set_yticks([tick for tick in ticks if tick <= 1.6 * highest])
        axes.yaxis.set_major_formatter("{x:.0f}")
    else:
        axes.set_ylim(-0.15, highest + 0.6)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    shared.finish(figure, axes.get_legend_handles_labels()[0], title)
    return figure


@readable
def search_curves(
    steps: ArrayLike,
    losses: ArrayLike,
    found: ArrayLike,
    threshold: float,
    scale: Scale,
    *,
    levels: Mapping[str, float],
    title: str = "",
) -> Figure:
    """Draw J of all candidates of a search over its steps, and where they ended.

    Left: J on a logarithmic scale, cut off four decades below the threshold; lower values are drawn at its end. Beyond
    150 curves of a kind, a fixed random choice of them is drawn. Right: a histogram of final J in multiples of J0, with
    values beyond the right end in the last bar.

    Args:
        steps: Where J was measured, ascending. Shape ``[T]``.
        losses: J of every candidate; NaN where there is none, and at the end for one that failed so. Shape ``[T, R]``.
        found: Which candidates were found, bool of shape ``[R]``.
        threshold: Largest J of a found point, > 0; drawn as a line.
        scale: J0 and V, drawn as lines.
        levels: Names and values of J of the bad minima, drawn as lines on the right.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If shapes do not fit, or there is no step or no candidate.
    """
    times = shared.checked("steps", steps, [None])
    curves = shared.checked("losses", losses, [len(times), None])
    if not curves.size:
        raise ValueError(f"losses must have at least one step and one candidate, got shape {list(curves.shape)}.")
    last = curves[-1]
    kept = np.asarray(found, dtype=bool)
    shared.checked("found", kept, [curves.shape[1]])
    positive = curves[np.isfinite(curves) & (curves > 0)]
    highest = max(float(positive.max(initial=0)), scale.zero, scale.constant) or 1.0
    lowest = max(min(float(positive.min(initial=highest)), threshold), 1e-4 * min(threshold, 1e-8 * highest))
    figure, (left, right) = panels(6.6, 8, 2, 1, height_ratios=(1.4, 1))
    kinds = [("not found", ~kept, VERMILION, (0, (4, 1.5))), ("found", kept, BLUE, "-")]
    handles: list[Artist] = []
    for name, which, color, dashes in kinds:
        of_kind = np.flatnonzero(which)
        chosen = of_kind[_thinned(len(of_kind), _MOST_CURVES)]
        clipped = np.clip(curves[:, chosen], lowest / 2, None).T
        lines = [np.stack([times, curve], axis=-1) for curve in clipped]
        alpha = float(np.clip(12 / max(1, len(chosen)), 0.25, 0.9))
        look: dict[str, Any] = {"colors": color, "linestyles": [dashes], "alpha": alpha}
        left.add_collection(LineCollection(lines, linewidths=1.1, rasterized=True, **look))
        some = f", {len(chosen)} drawn" if len(chosen) < len(of_kind) else ""
        handles.append(shared.line_handle(f"{name}: {len(of_kind)}{some}", color=color, linestyle=dashes, lw=1.8))
    for name, value, dashes in (("$J_0$", scale.zero, _LINES[1]), ("V", scale.constant, _LINES[2])):
        if np.isfinite(value) and value > 0:
            handles.append(left.axhline(value, color=INK, lw=1.5, linestyle=dashes, zorder=4))
            handles[-1].set_label(f"{name} = {shared.number(value)}")
    handles.append(left.axhline(threshold, color="#7a7a7a", lw=1.1, zorder=1))
    handles[-1].set_label(f"threshold: {shared.number(threshold)}")
    left.set(xlabel="step", ylabel="J", yscale="log", ylim=(lowest / 2, 2 * highest))
    left.set_xlim(times[0], times[-1] if times[-1] > times[0] else times[0] + 1)
    left.grid(alpha=0.25)
    _outcomes(right, last, kept, scale, levels)
    shared.finish(figure, handles, title)
    return figure


# ---- parts


def _outcomes(axes: Axes, last: Values, kept: NDArray[np.bool_], scale: Scale, levels: Mapping[str, float]) -> None:
    """Draw a histogram of the last J over J0 and the bad minima."""
    unit, name = (scale.zero, "$J_0$") if scale.zero > 0 else (1.0, "1")
    finite = np.isfinite(last)
    ratios = last[finite] / unit
    reference = [value / unit for value in levels.values() if np.isfinite(value)]
    end = 1.1 * max([1.0, *reference, float(np.quantile(ratios, 0.95)) if ratios.size else 0.0])
    edges = np.linspace(0, end, 61)
    inside = np.minimum(ratios, end * (1 - 1e-9))
    kinds = [inside[~kept[finite]], inside[kept[finite]]]
    axes.hist(kinds, bins=list(edges), stacked=True, color=[VERMILION, BLUE], zorder=2)
    _vertical_marks(axes, levels, unit)
    missing = int((~finite).sum())
    axes.set_title("Where the candidates ended" + (f" ({missing} not finite)" if missing else ""), fontsize=11)
    axes.set(xlabel=f"last J / {name}", ylabel="candidates", xlim=(-0.01 * end, end))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.25)
    if levels:
        axes.legend(fontsize=9, framealpha=0.9)


def _vertical_marks(axes: Axes, marks: Mapping[str, float], unit: float = 1.0) -> None:
    for place, (name, value) in enumerate(marks.items()):
        if np.isfinite(value):
            axes.axvline(
                value / unit, color=INK, lw=1.3, linestyle=_LINES[1:][place % 3], zorder=1.5,
                label=f"{name} = {shared.number(value)}",
            )  # fmt: skip


def _thinned(count: int, most: int) -> NDArray[np.int64]:
    """Return the places of at most ``most`` of ``count`` things: always the same, with no pattern of the grid."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _scatter(
    figure: Figure,
    views: Sequence[Axes],
    where: Values,
    values: Values,
    epsilon: float,
    scale: Scale,
    dots: Mapping[str, Any],
    **bar: float,
) -> None:
    """Draw dots in the colors of J, from 0 to epsilon, and the bar of these colors."""
    look: dict[str, Any] = {"c": values, "cmap": "viridis", "norm": Normalize(0, epsilon), "lw": 0, **dots}
    for axes in views:
        axes.scatter(*where.T, rasterized=True, **look)
    shared.scale_bar(figure, ScalarMappable(look["norm"], "viridis"), views, scale, pad=0.02, **bar)


def _two_views(height: float, ends: tuple[float, float]) -> tuple[Figure, list[Axes3D]]:
    figure, views = shared.solids(12, height, 2)
    for axes, (elevation, azimuth) in zip(views, _VIEWS, strict=True):
        axes.set(xlim=ends, ylim=ends, zlim=ends, xlabel="$c_1$", ylabel="$c_2$", zlabel="$c_3$")
        axes.view_init(elev=elevation, azim=azimuth)
        axes.set_box_aspect((1, 1, 1), zoom=0.98)
        for one in (axes.xaxis, axes.yaxis, axes.zaxis):
            one.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    return figure, views


def _marched(field: Values, places: Values, level: float) -> tuple[Values, Faces]:
    """Return the level of a field as triangles; cubes with a corner that is not finite have none."""
    finite = np.isfinite(field)
    known = field[finite]
    nothing = np.zeros((0, 3)), np.zeros((0, 3), dtype=np.int64)
    if not (known.size and known.min() < level < known.max()):
        return nothing
    # Corners without a value get one that makes no triangles degenerate; then the cubes that they belong to go.
    filled = np.where(finite, field, level + 1)
    vertices, faces, *_ = marching_cubes(  # type: ignore[no-untyped-call]
        filled, level, allow_degenerate=False
    )
    whole = np.ones(np.array(field.shape) - 1, dtype=bool)
    for corner in np.ndindex(2, 2, 2):
        whole &= finite[tuple(slice(start, start + length) for start, length in zip(corner, whole.shape, strict=True))]
    cubes = np.minimum(vertices[faces].mean(axis=1).astype(np.int64), np.array(whole.shape) - 1)
    faces = faces[whole[tuple(cubes.T)]]
    used, numbered = np.unique(faces, return_inverse=True)
    corners = np.interp(vertices[used].astype(np.float64), np.arange(len(places)), places)
    return corners, numbered.reshape(-1, 3).astype(np.int64)


def _surfaces(axes: Axes3D, layers: Sequence[tuple[Mesh, str, float]]) -> None:
    """Draw shaded triangles of all layers as one collection, so that those nearer to the viewer hide others."""
    corners, colors = [], []
    for (vertices, faces), color, alpha in layers:
        rows = np.asarray(faces, dtype=np.int64).reshape(-1, 3)
        corners.append(shared.checked("vertices", vertices, [None, 3])[rows])
        colors.append(np.tile(to_rgba(color, alpha), (len(rows), 1)))
    triangles, shades = np.concatenate(corners), np.concatenate(colors)
    if not len(triangles):
        return
    # Light from above the viewer's left shoulder, on both sides of a triangle.
    height, turn = np.radians([40, axes.azim - 35])
    light = np.array([np.cos(height) * np.cos(turn), np.cos(height) * np.sin(turn), np.sin(height)])
    normals = np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])
    lengths = np.maximum(np.linalg.norm(normals, axis=1), 1e-300)
    shades[:, :3] *= (0.45 + 0.55 * np.abs(normals @ light) / lengths)[:, None]
    axes.add_collection3d(
        Poly3DCollection(triangles, facecolors=shades, edgecolors="none", lw=0, rasterized=True, zorder=1)
    )
