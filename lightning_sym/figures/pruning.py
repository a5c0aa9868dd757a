"""Figure of pruning: loss and test error against the number of units."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter

from lightning_sym.figures import _panels as shared

_COLORS = (shared.BLUE, shared.VERMILION, shared.GREEN, shared.PINK, shared.SKY, shared.ORANGE)


@dataclass(frozen=True)
class PruningCurve:
    """One network while it was pruned.

    Attributes:
        label: In the legend; curves of one label have one color.
        units: Units that are left, step by step; those of the twin likewise. Shape ``[T]``.
        loss: Mean training loss there. Shape ``[T]``.
        error: Error on test data, fractions in ``[0, 1]``; NaN where there is none. Shape ``[T]``.
        threshold: Largest training loss that is allowed; None for a twin that is pruned by magnitude.
    """

    label: str
    units: Sequence[int]
    loss: Sequence[float]
    error: Sequence[float]
    threshold: float | None = None


@shared.readable
def pruning_curves(curves: Sequence[PruningCurve], *, title: str = "") -> Figure:
    """Draw training loss and test error against the number of units that are left, from the whole network leftwards.

    Solid: networks that stay below their threshold, which is the dotted line of the same color. Dashed: the twins.

    Args:
        curves: At least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no curves.
    """
    shared.check_some(curves=curves)
    figure, (left, right) = shared.panels(6.4, 7.4, 2, 1, title=title)
    labels = list(dict.fromkeys(curve.label for curve in curves))
    for curve in curves:
        color = _COLORS[labels.index(curve.label) % len(_COLORS)]
        twin = curve.threshold is None
        look: dict[str, Any] = {
            "color": color,
            "ls": "--" if twin else "-",
            "lw": 1.2 if twin else 1.8,
            "alpha": 0.8 if twin else 1.0,
        }
        loss, error = np.asarray(curve.loss, dtype=float), 100 * np.asarray(curve.error, dtype=float)
        left.plot(curve.units, np.maximum(loss, 1e-12), marker=None if twin else ".", **look)
        right.plot(curve.units, error, marker=None if twin else ".", **look)
        if curve.threshold is not None:
            left.axhline(curve.threshold, color=color, ls=":", lw=1.4)
    left.set(yscale="log", ylabel="training loss, nats", title="Loss on all training data")
    right.set(ylabel="test error, %", title="Test data")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="units left")
        for formatted in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            formatted(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
        axes.grid(alpha=0.25)
    kinds = [("stays below the threshold", "-"), ("threshold", ":")]
    kinds += [("magnitude, as wide, trained as long", "--")] if any(curve.threshold is None for curve in curves) else []
    handles = [Line2D([], [], color=_COLORS[i % len(_COLORS)], lw=2, label=label) for i, label in enumerate(labels)]
    handles += [Line2D([], [], color=shared.INK, ls=style, lw=1.5, label=label) for label, style in kinds]
    shared.legend_beside(figure, handles, "lower center", columns=2)
    return figure
