"""Figures of similarity: all layers with all, and each with its like over depth."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

# Name, color and style of each kind, in all figures the same.
_LOOKS = {
    "trained": ("trained", shared.BLUE, "-"),
    "untrained": ("untrained", shared.VERMILION, "--"),
    "shuffled": ("shuffled inputs", "#7f7f7f", ":"),
}
_MOST_NUMBERS = 10  # layers up to which cells have numbers in them


@dataclass(frozen=True)
class HeatMap:
    """A column of :func:`similarity_maps`.

    Attributes:
        title: Name of the measure.
        values: By kind of networks, what is shown: NaN where layers cannot be compared. Each of shape ``[A, B]``.
    """

    title: str
    values: Mapping[str, ArrayLike]


@shared.readable
def similarity_maps(
    columns: Sequence[HeatMap], labels: Mapping[str, tuple[Sequence[str], Sequence[str]]], *, title: str = ""
) -> Figure:
    """Draw the similarity of all layers with all: a column for each measure, a row for each kind of networks.

    Args:
        columns: The measures, at least one, all with the same kinds.
        labels: By kind, what stands beside the ``A`` layers of the first network, and under the ``B`` of the second.
        title: Above all.

    Returns:
        The figure. Colors are from 0 to 1, or from the lowest value if that is negative.

    Raises:
        ValueError: If there are no columns.
    """
    shared.check_some(columns=columns)
    kinds = list(columns[0].values)
    every = [np.asarray(column.values[kind], dtype=float) for column in columns for kind in kinds]
    layers = max(every[0].shape)
    side = 2.5 if layers <= _MOST_NUMBERS else min(0.3 * layers, 8.0)
    # Measure by measure, the kinds beside one another: two panels of a row, or as many as there are kinds.
    size = 1.7 + (side + 0.15) * len(kinds), 0.6 + (side + 1.0) * len(columns)
    figure, places = shared.panels(*size, len(every), len(kinds), title=title)
    flat = np.concatenate([values.ravel() for values in every])
    lowest = min([0.0, *flat[np.isfinite(flat)]])
    for index, (axes, values) in enumerate(zip(places, every, strict=True)):
        column, kind = columns[index // len(kinds)], kinds[index % len(kinds)]
        texts = [[f"{v:.2f}" if np.isfinite(v) else "" for v in row] for row in values]
        texts = texts if layers <= _MOST_NUMBERS else []
        image = shared.numbered_cells(axes, values, texts, "viridis", (lowest, 1.0), 8)
        axes.set_title(f"{column.title}, {_LOOKS[kind][0]}", fontsize=9)
        beside, under = labels[kind]
        axes.set_xticks(range(len(under)), under, rotation=90, fontsize=7)
        axes.set_yticks(range(len(beside)), beside, fontsize=7)
        axes.tick_params(labelleft=index % len(kinds) == 0)
    figure.colorbar(image, ax=places, shrink=0.6, pad=0.01)
    return figure


@dataclass(frozen=True)
class Depth:
    """A panel of :func:`similarity_depth`.

    Attributes:
        title: Name of the measure.
        values: By kind, the similarity of each layer with its like. Each of shape ``[layers, pairs]``.
    """

    title: str
    values: Mapping[str, ArrayLike]


@shared.readable
def similarity_depth(
    panels: Sequence[Depth], layers: Sequence[str], live: Mapping[str, Sequence[float]], *, title: str = ""
) -> Figure:
    """Draw similarity over depth, a panel for each measure, and the share of live channels in the last panel.

    Lines are means over pairs, shades reach from the lowest to the highest pair: of trained networks, and of the nulls.

    Args:
        panels: The measures; at least one.
        layers: Names of the layers, from the input on.
        live: By kind of networks, the fraction of channels that are live, in [0, 1], for each layer; may be empty.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no panels.
    """
    shared.check_some(panels=panels)
    count = len(panels) + bool(live)
    columns = min(2, count)
    figure, places = shared.panels(
        1.0 + 2.7 * columns, 1.2 + 2.7 * -(-count // columns), count, columns, title=title, sharex=True, sharey=True
    )
    depth = np.arange(len(layers), dtype=float)
    for axes, panel in zip(places, panels, strict=False):
        for kind, values in panel.values.items():
            name, color, style = _LOOKS[kind]
            shared.band(axes, depth, np.asarray(values, dtype=float), color=color, ls=style, lw=2.0, label=name)
        axes.set_title(panel.title, fontsize=10)
    for kind, shares in live.items():
        name, color, style = _LOOKS[kind]
        places[-1].plot(depth, shares, color=color, ls=style, lw=2.0, marker="o", ms=3, label=name)
        places[-1].set_title("live channels, fraction", fontsize=10)
    for axes in places:
        axes.grid(alpha=0.25)
        axes.set_xticks(depth, layers, rotation=90, fontsize=7)
    places[0].set_ylim(top=1.03)
    places[0].set_ylabel("similarity")
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


@dataclass(frozen=True)
class ZooPanel:
    """A panel of :func:`similarity_of_zoos`.

    Attributes:
        title: Name of the measure and layer.
        values: By kind, for each zoo the mean and both ends of an interval; NaN where there is none. Each of shape
            ``[zoos, 3]``.
    """

    title: str
    values: Mapping[str, ArrayLike]


@shared.readable
def similarity_of_zoos(zoos: Sequence[str], panels: Sequence[ZooPanel], *, title: str = "") -> Figure:
    """Draw the similarity of the members of each zoo, with intervals: of trained networks, and of the nulls.

    Args:
        zoos: Names of the zoos, from left to right. If all are numbers > 0, these are the axis, a logarithmic one with
            lines from zoo to zoo.
        panels: A panel for each layer and measure, at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no zoos or panels.
    """
    shared.check_some(zoos=zoos, panels=panels)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, places = shared.panels(
        1.0 + 2.9 * columns, 1.2 + 2.6 * rows, len(panels), columns, title=title, sharex=True, sharey=True
    )
    ordered = all(re.fullmatch(r"\d+(\.\d+)?", zoo) and float(zoo) > 0 for zoo in zoos)
    across = np.array([float(zoo) for zoo in zoos]) if ordered else np.arange(len(zoos), dtype=float)
    for axes, panel in zip(places, panels, strict=True):
        for kind, values in panel.values.items():
            name, color, style = _LOOKS[kind]
            means, low, high = np.asarray(values, dtype=float).T
            bars = np.nan_to_num(np.maximum(0.0, [means - low, high - means]))
            axes.errorbar(
                across, means, bars, color=color, ls=style if ordered else "", marker="o", ms=4, capsize=2, label=name
            )
        if ordered:
            axes.set_xscale("log", base=2)
        axes.set_xticks(across, zoos, rotation=0 if ordered else 90, fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.set_title(panel.title, fontsize=10)
    places[0].set_ylim(top=1.03)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure
