"""Figure of a symmetry over training: imbalance, conserved quantities, distance to the start."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

# From Okabe and Ito's palette, which color-blind readers can tell apart.
_FEW = ("#0072b2", "#d55e00", "#56b4e9", "#e69f00")
_DISTANCES = {
    "parameters": ("as trained", "#1b1b1b", "-"),
    "balanced": ("balanced, units in place", "#009e73", "--"),
    "canonical": ("canonical, units sorted", "#cc79a7", ":"),
}


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
    colors = dict(zip(groups, _group_colors(len(groups)), strict=True))
    panels: list[tuple[str, str, Mapping[str, ArrayLike]]] = []
    if imbalance:
        panels.append(("Imbalance, 0 = balanced", "$|$in $-$ out$|$ / (in $+$ out), squared norms", imbalance))
    if drift:
        panels.append(
            ("Change of what gradient flow conserves", "change of (in $-$ out) / (in $+$ out) at the start", drift)
        )
    if distance:
        panels.append(("Distance to the start", "relative to the norm at the start", distance))
    if dead and any(np.nanmax(np.asarray(values, float), initial=0) > 0 for values in dead.values()):
        panels.append(("Dead units", "number of units, mean over members", dead))
    if not panels:
        raise ValueError("Nothing to draw: imbalance, drift and distance are empty.")
    places = np.asarray(epochs, dtype=float)
    figure = Figure(figsize=(4.1 * len(panels), 4.1), layout="constrained", dpi=120)
    for axes, (heading, label, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, values in curves.items():
            if curves is distance:
                look: tuple[str, str | tuple[float, ...], str] = _DISTANCES.get(name, (name, "#1b1b1b", "-."))
            else:
                look = _short(name), colors[name], "-"
            _curve(axes, places, np.asarray(values, dtype=float), *look)
        axes.set_title(heading, fontsize=11)
        axes.set_ylabel(label, fontsize=9)
        axes.set_xlabel("epoch")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.25)
        _legend(axes)
    if title:
        figure.suptitle(title)
    return figure


def _group_colors(count: int) -> list[str | tuple[float, ...]]:
    if count <= len(_FEW):
        return list(_FEW[:count])
    return [tuple(map(float, color)) for color in colormaps["viridis"](np.linspace(0.0, 0.92, count))]


def _curve(
    axes: Axes,
    places: NDArray[np.float64],
    values: NDArray[np.float64],
    label: str,
    color: str | tuple[float, ...],
    style: str,
) -> None:
    values = values.reshape(len(places), -1)
    shown = np.isfinite(values).any(axis=1)
    if not shown.any():
        return
    places, values = places[shown], values[shown]
    marker = "o" if len(places) == 1 else None  # a line through one point cannot be seen
    axes.plot(places, np.nanmean(values, axis=1), style, color=color, lw=1.8, label=label, marker=marker, zorder=3)
    if values.shape[1] > 1:
        axes.fill_between(places, np.nanmin(values, axis=1), np.nanmax(values, axis=1), color=color, alpha=0.15, lw=0)


def _short(name: str) -> str:
    return name if len(name) <= 28 else "..." + name[-25:]


def _legend(axes: Axes) -> None:
    """Name the curves; of many only some, from the first to the last, as colors go from one to the other."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > len(_FEW):
        chosen = np.unique(np.linspace(0, len(handles) - 1, len(_FEW)).round().astype(int))
        handles, labels = [handles[index] for index in chosen], [labels[index] for index in chosen]
    if handles:
        axes.legend(handles, labels, fontsize=8, framealpha=0.9)
