"""Figure of a symmetry over training: imbalance, conserved quantities, distance to the start."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

_DISTANCES = {
    "parameters": ("as trained", shared.INK, "-"),
    "balanced": ("balanced, units in place", shared.GREEN, "--"),
    "canonical": ("canonical, units sorted", shared.PINK, ":"),
}


@shared.readable
def symmetry_curves(
    epochs: Sequence[float],
    *,
    imbalance: Mapping[str, ArrayLike],
    drift: Mapping[str, ArrayLike],
    distance: Mapping[str, ArrayLike],
    dead: Mapping[str, ArrayLike] | None = None,
    title: str = "",
) -> Figure:
    """Draw how a network moves along and across its symmetry while it is trained; one panel per quantity given.

    Lines are means over members, shades reach from the lowest to the highest member; NaN is left out.

    Args:
        epochs: How many epochs had been trained at each point. Length ``T``.
        imbalance: By axis group, unitless, in [0, 1]. Each of shape ``[T]`` or ``[T, M]`` for ``M`` members.
        drift: By axis group, unitless, >= 0. Shapes as above.
        distance: By gauge (``"parameters"``, ``"balanced"``, ``"canonical"``), unitless, >= 0. Shapes as above.
        dead: By axis group, numbers of units; drawn only if there are any. Shapes as above.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If nothing is to be drawn.
    """
    groups = list(dict.fromkeys([*imbalance, *drift, *(dead or {})]))
    colors = dict(zip(groups, shared.line_colors(len(groups)), strict=True))
    dead = dead if dead and any(np.nanmax(np.asarray(each, float), initial=0) > 0 for each in dead.values()) else {}
    all_panels: list[tuple[str, str, Mapping[str, ArrayLike]]] = [
        ("Imbalance, 0 = balanced", "$|$in $-$ out$|$ / (in $+$ out),\nsquared norms", imbalance),
        ("Change of what gradient flow conserves", "change of (in $-$ out)\n/ (in $+$ out) at the start", drift),
        ("Distance to the start", "relative to the norm at the start", distance),
        ("Dead units", "number of units, mean over members", dead),
    ]
    shown = [panel for panel in all_panels if panel[-1]]
    if not shown:
        raise ValueError("Nothing to draw: imbalance, drift and distance are empty.")
    figure, places = shared.panels(6.4, 0.5 + 3.2 * len(shown), len(shown), 1, title=title)
    for axes, (heading, label, curves) in zip(places, shown, strict=True):
        for name, values in curves.items():
            short = name if len(name) <= 28 else "..." + name[-25:]
            known = _DISTANCES if curves is distance else {}
            text, color, style = known.get(name, (short, colors.get(name, shared.INK), "-"))
            by_member = np.asarray(values, dtype=float).reshape(len(epochs), -1)
            shared.band(axes, np.asarray(epochs, dtype=float), by_member, color=color, ls=style, lw=1.8, label=text)
        shared.over_epochs(axes, label)
        axes.set_title(heading, fontsize=11)
        axes.yaxis.label.set_fontsize(9)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        shared.legend_of_some(axes)
    return figure
