"""Figures of matching: loss and accuracy on the lines between networks, and the barriers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

# The same color for a method in all figures; from Okabe and Ito's palette, which color-blind readers can tell apart.
_COLORS = {
    "unmatched": "#7f7f7f",
    "weights": "#0072b2",
    "activations": "#d55e00",
    "straight_through": "#cc79a7",
}
_OTHERS = ("#009e73", "#56b4e9", "#e69f00", "#000000")
_STYLES = {"unmatched": "-", "weights": "-", "activations": "--", "straight_through": ":"}
_LABELS = {
    "unmatched": "unmatched",
    "weights": "weight matching",
    "activations": "activation matching",
    "straight_through": "straight-through",
}


@dataclass(frozen=True)
class Lines:
    """What one panel shows: a quantity on the lines between the networks of several pairs.

    Attributes:
        title: Above the panel, for example ``"test"``.
        loss: By method, mean losses in nats. Each of shape ``[pairs, T]``.
        accuracy: By method, fractions in [0, 1]. Each of shape ``[pairs, T]``.
    """

    title: str
    loss: Mapping[str, ArrayLike]
    accuracy: Mapping[str, ArrayLike]


def interpolation_curves(t: ArrayLike, columns: Sequence[Lines], *, title: str = "") -> Figure:
    """Draw loss (above) and accuracy (below) on the line between two networks, one column per kind of evaluation.

    Lines are means over pairs, shades reach from the lowest to the highest pair. All panels of a row share their
    vertical axis.

    Args:
        t: Points of the line, in [0, 1]. Shape ``[T]``.
        columns: What is drawn, from left to right; at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no columns.
    """
    if not columns:
        raise ValueError("columns must have at least one entry, got none.")
    places = np.asarray(t, dtype=float)
    figure = Figure(figsize=(1.2 + 3.3 * len(columns), 5.8), layout="constrained", dpi=120)
    rows = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    for place, column in enumerate(columns):
        for axes, named, factor in ((rows[0, place], column.loss, 1), (rows[1, place], column.accuracy, 100)):
            for method, values in named.items():
                _line(axes, places, factor * np.atleast_2d(np.asarray(values, dtype=float)), method)
            axes.grid(alpha=0.25)
            axes.margins(x=0.01)
        rows[0, place].set_title(column.title)
        rows[1, place].set_xlabel("place $t$ on the line from A ($0$) to B ($1$)", fontsize=9)
    rows[0, 0].set_ylim(bottom=0)
    rows[0, 0].set_ylabel("loss, nats")
    rows[1, 0].set_ylabel("accuracy, %")
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def _line(axes: Axes, t: NDArray[np.float64], values: NDArray[np.float64], method: str) -> None:
    color, style = _look(method)
    axes.plot(t, values.mean(0), style, color=color, lw=2.2, label=_LABELS.get(method, method), zorder=3)
    if len(values) > 1:
        axes.fill_between(t, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)


def _look(method: str) -> tuple[str, str]:
    if method in _COLORS:
        return _COLORS[method], _STYLES[method]
    return _OTHERS[sum(map(ord, method)) % len(_OTHERS)], "-."


@dataclass(frozen=True)
class Bars:
    """What one panel of :func:`barrier_bars` shows.

    Attributes:
        title: Above the panel, with the unit.
        values: By method, one barrier per pair. Each of shape ``[pairs]``.
        intervals: By method, the interval for the mean; NaN where there is none.
    """

    title: str
    values: Mapping[str, Sequence[float]]
    intervals: Mapping[str, tuple[float, float]]


def barrier_bars(panels: Sequence[Bars], *, title: str = "") -> Figure:
    """Draw the barriers of every method: bars for means, dots for pairs, lines for intervals.

    Args:
        panels: From left to right; at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no panels.
    """
    if not panels:
        raise ValueError("panels must have at least one entry, got none.")
    figure = Figure(figsize=(1.6 + 2.9 * len(panels), 2.9), layout="constrained", dpi=120)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for place, (method, values) in enumerate(panel.values.items()):
            color, _ = _look(method)
            mean = float(np.mean(values))
            axes.barh(place, mean, color=color, alpha=0.45, height=0.62)
            spread = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, place + spread, "o", color=color, ms=3.5, zorder=3)
            low, high = panel.intervals[method]
            if np.isfinite(low):
                axes.plot([low, high], [place, place], color="#1b1b1b", lw=1.4, zorder=4)
            axes.annotate(
                f"{mean:.3g}", (max(mean, *values), place), xytext=(6, 0), textcoords="offset points", va="center",
                fontsize=8,
            )  # fmt: skip
        axes.set_yticks(range(len(panel.values)), [_LABELS.get(method, method) for method in panel.values])
        axes.margins(x=0.2)
        axes.set_xlim(left=min(0.0, *(min(values) for values in panel.values.values())))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(panel.title, fontsize=10)
        axes.grid(axis="x", alpha=0.25)
    row[0].invert_yaxis()
    if title:
        figure.suptitle(title)
    return figure
