"""Figures of dissection: what units mean, on the path from the network's own basis to a random one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lightning_sym.figures import _panels as shared

_COLORS = (shared.BLUE, shared.VERMILION, shared.GREEN, shared.PINK, shared.ORANGE, shared.SKY, shared.BLACK)
_PANELS = {
    "interpretable": "interpretable units",
    "distinct": "distinct concepts",
    "overlap": "largest overlap, mean",
    "kurtosis": "kurtosis, median",
    "participation": "participation ratio, median",
    "class_variance": "variance explained by class, mean",
}


@dataclass(frozen=True, eq=False)
class Paths:
    """What one line of :func:`dissection_curves` shows.

    Attributes:
        zoo: What the networks are called; one color for each.
        network: ``"trained"``, or ``"untrained"``: broken lines.
        basis: ``"rotation"``: a line; ``"permutation"``: crosses.
        alpha: Places on the path. Shape ``[T]``.
        values: By quantity: mean and interval. Each of shape ``[T, 3]``; NaN where there is none.
    """

    zoo: str
    network: str
    basis: str
    alpha: shared.Values
    values: Mapping[str, shared.Values]


@shared.readable
def dissection_curves(paths: Sequence[Paths], *, title: str = "") -> Figure:
    """Draw units, concepts and companions against the place on the path; shades are intervals for means over members.

    Args:
        paths: What is drawn; at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there is nothing to draw.
    """
    shared.check_some(paths=paths)
    figure, panels = shared.panels(7, 8.6, len(_PANELS), 2, title=title, sharex=True)
    zoos = list(dict.fromkeys(path.zoo for path in paths))
    for axes, (quantity, heading) in zip(panels, _PANELS.items(), strict=True):
        for path in paths:
            color = _COLORS[zoos.index(path.zoo) % len(_COLORS)]
            mean, low, high = path.values[quantity].T
            if path.basis == "permutation":
                axes.plot(path.alpha, mean, "x", color=color, ms=7, mew=1.8, label=f"{path.zoo}, permutation")
                continue
            trained = path.network == "trained"
            label = path.zoo if trained else f"{path.zoo}, {path.network}"
            look: dict[str, Any] = {"color": color, "lw": 2.2 if trained else 1.2, "ls": "-" if trained else "--"}
            axes.plot(path.alpha, mean, label=label, marker="o", ms=3, **look)
            if trained and np.isfinite(low).any():
                axes.fill_between(path.alpha, low, high, color=color, alpha=0.15, lw=0)
        axes.set_title(heading, fontsize=10)
        axes.grid(alpha=0.25)
        if quantity in ("interpretable", "distinct", "overlap", "participation", "class_variance"):
            axes.set_ylim(bottom=0)
    for axes in panels[-2:]:
        axes.set_xlabel(r"$\alpha$: own basis ($0$) to a random one ($1$)", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure
