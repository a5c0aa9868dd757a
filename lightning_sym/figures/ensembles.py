"""How good ensembles are, as their members are added."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lightning_sym.figures import _panels as shared


@dataclass(frozen=True, eq=False)
class EnsembleCurve:
    """One quantity of ensembles of one kind, of each of which members are added one by one.

    Attributes:
        kind: What they are, for the legend.
        together: Of the ensembles of the first 1, 2, ..., M members. Shape ``[M, E]``, for ``E`` ensembles.
        alone: Of each member by itself. Shape ``[M, E]``.
    """

    kind: str
    together: shared.Values
    alone: shared.Values


@shared.readable
def ensemble_curves(quantities: Mapping[str, Sequence[EnsembleCurve]], *, title: str = "") -> Figure:
    """Draw quantities of ensembles against the number of their members, a panel for each quantity.

    Lines are means over the ensembles of a kind, shades reach from the lowest to the highest. Dots are of members by
    themselves. A kind with one member only is a dashed line across.

    Args:
        quantities: What is drawn, by the label of the vertical axis; each with the same kinds.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there is nothing to draw.
    """
    shared.check_some(quantities=quantities)
    figure, places = shared.panels(6.4, 1.4 + 2.7 * len(quantities), len(quantities), 1, title=title)
    for axes, (label, curves) in zip(places, quantities.items(), strict=True):
        shared.check_some(curves=curves)
        for curve, color in zip(curves, shared.line_colors(len(curves)), strict=True):
            counts = np.arange(1, len(curve.together) + 1, dtype=float)
            if len(counts) == 1:
                axes.axhline(float(np.nanmean(curve.together)), color=color, ls="--", lw=1.5)
                continue
            shared.band(axes, counts, curve.together, color=color, lw=2)
            axes.plot(counts, curve.alone, ls="", marker=".", ms=4, color=color, alpha=0.5)
        axes.set(xlabel="networks in the ensemble", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.25)
    handles = []
    for curve, color in zip(first := next(iter(quantities.values())), shared.line_colors(len(first)), strict=True):
        style = "--" if len(curve.together) == 1 else "-"
        look: Any = {"color": color, "ls": style}
        handles.append(Line2D([], [], lw=2, label=curve.kind, **look))
    handles.append(Line2D([], [], color=shared.INK, ls="", marker=".", label="one network"))
    shared.legend_beside(figure, handles, "lower center", columns=3)
    return figure
