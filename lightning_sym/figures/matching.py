"""Figures of ways between networks: loss and accuracy on lines and curves, and the barriers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

# Name, color and style of the line of a method, in all figures the same.
_LOOKS = {
    "unmatched": ("unmatched", "#7f7f7f", "-"),
    "weights": ("weight matching", shared.BLUE, "-"),
    "activations": ("activation matching", shared.VERMILION, "--"),
    "straight_through": ("straight-through", shared.PINK, ":"),
    "permutations": ("permutations", shared.BLACK, "-"),
    "blocks": ("with heads as blocks", shared.SKY, "-"),
    "matrices": ("with matrices in heads", shared.GREEN, "-"),
    "activations_weights": ("activations, then weights", shared.ORANGE, "-"),
    "orbit_descent": ("descent on the orbit", shared.PINK, "-"),
    "soft_maps": ("soft maps (other function)", "#8c564b", ":"),
    "line": ("straight line", "#7f7f7f", "-"),
    "matched": ("line after matching", shared.GREEN, "--"),
    "bezier": ("Bezier curve", shared.BLUE, "-"),
    "chain": ("chain", shared.VERMILION, "-"),
}
_OTHERS = (shared.GREEN, shared.SKY, shared.ORANGE, shared.BLACK)


@dataclass(frozen=True)
class Lines:
    """What one panel shows: a quantity on the lines between the networks of several pairs.

    Attributes:
        title: Above the panel, for example ``"test"``.
        loss: By method, mean losses. Each of shape ``[pairs, T]``.
        accuracy: By method, fractions in [0, 1]. Each of shape ``[pairs, T]``; none if there are no classes.
    """

    title: str
    loss: Mapping[str, ArrayLike]
    accuracy: Mapping[str, ArrayLike]


@shared.readable
def interpolation_curves(t: ArrayLike, columns: Sequence[Lines], *, title: str = "", loss: str = "nats") -> Figure:
    """Draw loss (above) and accuracy (below) on ways between two networks, one column per kind of evaluation.

    Without any accuracy there is one row.

    Lines are means over pairs, shades reach from the lowest to the highest pair. All panels of a row share their
    vertical axis.

    Args:
        t: Points of the line, in [0, 1]. Shape ``[T]``.
        columns: What is drawn, from left to right; at least one.
        title: Above all.
        loss: Unit of the loss, or the name of what it is.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no columns.
    """
    shared.check_some(columns=columns)
    places, count = np.asarray(t, dtype=float), len(columns)
    drawn = [("loss", 1, f"loss, {loss}")]
    drawn += [("accuracy", 100, "accuracy, %")] if any(column.accuracy for column in columns) else []
    beside = min(2, count)  # of more the next two below
    blocks = [columns[first : first + beside] for first in range(0, count, beside)]
    size = (0.8 + 2.8 * beside, 1.2 + 2.3 * len(drawn) * len(blocks))
    places_of_all = len(blocks) * len(drawn) * beside
    figure, panels = shared.panels(*size, places_of_all, beside, title=title, sharex=True, sharey="row")
    rows = [panels[first : first + beside] for first in range(0, places_of_all, beside)]
    for row, (block, (quantity, factor, label)) in zip(rows, product(blocks, drawn), strict=True):
        for axes, column in zip(row, block, strict=False):
            for method, values in getattr(column, quantity).items():
                name, color, style = _look(method)
                pairs = np.atleast_2d(np.asarray(values, dtype=float))
                shared.band(axes, places, factor * pairs.T, color=color, ls=style, lw=2.2, label=name)
            axes.grid(alpha=0.25)
            axes.margins(x=0.01)
            if quantity == "loss":
                axes.set_title(column.title)
        for axes in row[len(block) :]:
            axes.set_axis_off()
        row[0].set_ylabel(label)
        if quantity == "loss":
            row[0].set_ylim(bottom=0)
    for axes in rows[-1]:
        axes.set_xlabel("$t$, from A ($0$) to B ($1$)")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _look(method: str) -> tuple[str, str, str]:
    return _LOOKS.get(method, (method, _OTHERS[sum(map(ord, method)) % len(_OTHERS)], "-."))


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


@shared.readable
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
    shared.check_some(panels=panels)
    figure, row = shared.panels(6.4, 0.6 + 2 * len(panels), len(panels), 1, title=title)
    for axes, panel in zip(row, panels, strict=True):
        for place, (method, values) in enumerate(panel.values.items()):
            _, color, _ = _look(method)
            mean = float(np.mean(values))
            axes.barh(place, mean, color=color, alpha=0.45, height=0.62)
            spread = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, place + spread, "o", color=color, ms=3.5, zorder=3)
            low, high = panel.intervals[method]
            if np.isfinite(low):
                axes.plot([low, high], [place, place], color=shared.INK, lw=1.4, zorder=4)
            axes.annotate(
                f"{mean:.3g}", (max(mean, *values), place), xytext=(6, 0), textcoords="offset points", va="center",
                fontsize=8,
            )  # fmt: skip
        axes.set_yticks(range(len(panel.values)), [_look(method)[0] for method in panel.values])
        axes.margins(x=0.2)
        axes.set_xlim(left=min(0.0, *(min(values) for values in panel.values.values())))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(panel.title, fontsize=10)
        axes.grid(axis="x", alpha=0.25)
        axes.invert_yaxis()
    return figure
