"""Helpers of figures of equivalence classes: found points, marks of the scale of J, warnings."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Annotation
from mpl_toolkits.mplot3d.axes3d import Axes3D
from numpy.typing import ArrayLike

from lightning_sym.figures._panels import INK, Values, panels, put_legend

WARNING = "#c00000"
NOWHERE = "#e6e6e6"  # where there is no value
COLORS = ("#d62728", "#8e44c9", "#f0e442", "#8c510a", "#56b4e9", "#e69f00", "#cc79a7", "#009e73")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
HALO = [Stroke(linewidth=3.2, foreground="black"), Normal()]


class Scale(Protocol):
    """Losses J of trivial functions, as reference levels."""

    @property
    def zero(self) -> float:
        """J0, the J of the zero function, >= 0."""

    @property
    def constant(self) -> float:
        """V, the J of the best constant function, >= 0."""


@dataclass(frozen=True)
class FoundPoint:
    r"""A weight vector that the search found, or a known one, as the figures mark it.

    Attributes:
        label: Text in the legend; may be mathtext, as ``r"$\theta_0$"``.
        coefficients: Where it is, in coordinates of the plane (of the embedding, in :func:`embedding`). Shape ``[m]``.
        loss: Its own J, >= 0; NaN leaves it out of the legend.
    """

    label: str
    coefficients: ArrayLike
    loss: float


def checked(name: str, values: ArrayLike, shape: Sequence[int | None]) -> Values:
    """Return values as float64 of the given shape, where None fits any length.

    Raises:
        ValueError: If the shape is another.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, array.shape, strict=True)
    ):
        expected = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} must have shape [{expected}], got {list(array.shape)}.")
    return array


def checked_grid(values: ArrayLike, axis: ArrayLike, dimension: int) -> tuple[Values, Values]:
    """Return the values on a cubic grid and its axis.

    Raises:
        ValueError: If the axis is not ascending with two entries or more, or the shape is not ``[n] * dimension``.
    """
    places = checked("axis", axis, [None])
    if len(places) < 2 or not (np.diff(places) > 0).all():
        raise ValueError(f"axis must ascend and have at least 2 entries, got {len(places)} that do not.")
    return checked("values", values, [len(places)] * dimension), places


def number(value: float) -> str:
    """Return three digits, as ``0.00123`` or ``1.23e-05``."""
    return f"{value:.3g}"


def roots(values: Values, level: float) -> Values:
    """Return sqrt(J / level); it is nearly linear around J = 0, so its level 1 is exactly J = level.

    J is the square of a distance: between grid points it is a parabola, which linear interpolation misplaces where
    the set is about as thin as a cell. Infinite entries, known only to be above, become 2; NaN stays.
    """
    scaled = np.sqrt(np.maximum(values, 0) / level)
    return np.where(np.isposinf(scaled), 2.0, np.minimum(scaled, 1e6))


def point_label(point: FoundPoint) -> str:
    """Return the entry of a found point in the legend."""
    return f"{point.label}, J = {number(point.loss)}" if np.isfinite(point.loss) else point.label


def draw_points(
    axes: Axes,
    points: Sequence[FoundPoint],
    dimension: int,
    ends: Sequence[tuple[float, float]] | None = None,
    colors: Sequence[str] = COLORS,
) -> list[Artist]:
    """Mark found points and return them for the legend, in order.

    Points with a coordinate that is not finite or out of range are not drawn; the legend says so.

    Raises:
        ValueError: If a point has not ``dimension`` coefficients.
    """
    handles: list[Artist] = []
    for place, point in enumerate(points):
        where = checked(f"coefficients of {point.label}", point.coefficients, [dimension])
        low, high = np.transpose(ends or [(-np.inf, np.inf)] * dimension)
        inside = np.isfinite(where).all() and (where >= low).all() and (where <= high).all()
        label = point_label(point) + ("" if inside else " (outside)")
        look: dict[str, Any] = {
            "marker": _MARKERS[place % len(_MARKERS)],
            "markersize": 9,
            "linestyle": "none",
            "markerfacecolor": colors[place % len(colors)],
            "markeredgecolor": "white",
            "markeredgewidth": 1.3,
            "path_effects": HALO,
        }
        handles += axes.plot(*([value if inside else np.nan] for value in where), label=label, zorder=10, **look)
    return handles


def finish(figure: Figure, handles: Sequence[Artist], title: str, warning: str | None = None) -> None:
    """Put a legend below all axes, the title above and the warning in red below it; the layout leaves room for all."""
    if handles:
        put_legend(figure, handles, [str(handle.get_label()) for handle in handles])
    figure.set_layout_engine("constrained", h_pad=0.08)
    width = figure.get_figwidth()
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, int(10.5 * width))]
    if not warning:
        if lines:
            figure.suptitle("\n".join(lines), fontsize=12)
        return
    wrapped = textwrap.wrap(warning, int(14 * width))
    # Empty lines of the title keep the place of the warning.
    kept = figure.suptitle("\n".join(lines + [" "] * len(wrapped)), fontsize=12)
    note = Annotation(
        "\n".join(wrapped), xy=(0.5, 0), xycoords=kept, ha="center", va="bottom", color=WARNING, fontsize=9.5
    )
    note.set_in_layout(False)
    figure.add_artist(note)


def line_handle(label: str, **look: object) -> Line2D:
    """Return a line for the legend."""
    return Line2D([], [], label=label, **look)  # type: ignore[arg-type]


def solids(width: float, height: float, count: int = 1) -> tuple[Figure, list[Axes3D]]:
    """Return a figure and its three-dimensional panels, side by side."""
    figure, axes = panels(width, height, count, subplot_kw={"projection": "3d", "computed_zorder": False})
    return figure, [one for one in axes if isinstance(one, Axes3D)]


def scale_bar(figure: Figure, colors: ScalarMappable, axes: Sequence[Axes], scale: Scale, **look: Any) -> None:
    """Add the bar of colors that are linear in J, with J0 and V marked on it."""
    bar = figure.colorbar(colors, ax=axes, **look)
    mark_scale(bar, [("$J_0$", scale.zero), ("V", scale.constant)], logarithmic=False)


def mark_scale(bar: Colorbar, marks: Sequence[tuple[str, float]], *, logarithmic: bool) -> None:
    """Label a colour bar and mark values of J on it: lines across, names on its left, arrows for those beyond its ends.

    Args:
        bar: Upright.
        marks: Names and values of J; those that are not finite, or 0 on a logarithmic bar, are left out.
        logarithmic: Whether the bar shows the natural logarithm.
    """
    bar.set_label("ln J" if logarithmic else "J")
    low, high = bar.ax.get_ylim()
    shown = []
    for name, value in marks:
        if not np.isfinite(value) or (logarithmic and value <= 0):
            continue
        place = ((np.log(value) if logarithmic else value) - low) / (high - low)
        arrow = "\u25b2 " if place > 1 else "\u25bc " if place < 0 else ""
        shown.append((place, f"{arrow}{name} = {number(value)}"))
    shown.sort()
    heights = _apart(np.clip([place for place, _ in shown], 0, 1), 0.055)
    for (place, text), height in zip(shown, heights, strict=True):
        inside = 0 <= place <= 1
        if inside:
            bar.ax.axhline(low + place * (high - low), color="white", lw=1.6, path_effects=HALO)
        bar.ax.annotate(
            text, xy=(0, place), xytext=(-0.9 if inside else -0.4, height), xycoords="axes fraction", fontsize=8.5,
            ha="right", va="center", color=INK, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.8, "shrinkA": 1, "shrinkB": 0} if inside else None,
        )  # fmt: skip


def _apart(places: Values, gap: float) -> Values:
    """Return ascending places in [0, 1] moved by as little as makes neighbours differ by the gap."""
    moved = places.copy()
    for _ in range(200):
        lacking = np.maximum(gap - np.diff(moved), 0) / 2
        moved[:-1] -= lacking
        moved[1:] += lacking
        moved = np.clip(moved, 0, 1)
    return moved


def say(axes: Axes, text: str) -> None:
    """Write a sentence in the middle of empty axes."""
    write = axes.text2D if isinstance(axes, Axes3D) else axes.text
    write(
        0.5, 0.5, "\n".join(textwrap.wrap(text, 34)), transform=axes.transAxes, ha="center", va="center", color=INK,
        fontsize=11, zorder=20, bbox={"facecolor": "white", "edgecolor": "#b5b5b5", "boxstyle": "round,pad=0.6"},
    )  # fmt: skip
