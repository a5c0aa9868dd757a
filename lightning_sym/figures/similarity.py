"""Figures of similarity: all layers with all, and each with its like over depth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

_MOST_NUMBERS = 10  # layers up to this number have numbers in their cells


@dataclass(frozen=True)
class HeatMap:
    """A column of :func:`similarity_maps`.

    Attributes:
        title: Name of the measure.
        values: By kind of networks, the values shown: NaN where layers cannot be compared. Each of shape ``[A, B]``.
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
        labels: By kind, the names of the ``A`` layers of the first network and of the ``B`` of the second.
        title: Above all.

    Returns:
        The figure. Colors are from 0 to 1, or from the lowest value if that is negative. NaN is grey, hatched and
        named below.

    Raises:
        ValueError: If there are no columns.
    """
    shared.check_some(columns=columns)
    kinds = list(columns[0].values)
    every = [np.asarray(column.values[kind], dtype=float) for column in columns for kind in kinds]
    layers = max(every[0].shape)
    side = 2.5 if layers <= _MOST_NUMBERS else min(0.3 * layers, 8.0)
    # One measure after another, with its kinds in a row: two panels of a row, or as many as there are kinds.
    size = 1.7 + (side + 0.15) * len(kinds), 0.6 + (side + 1.0) * len(columns)
    figure, places = shared.panels(*size, len(every), len(kinds), title=title)
    flat = np.concatenate([values.ravel() for values in every])
    lowest = min([0.0, *flat[np.isfinite(flat)]])
    for index, (axes, values) in enumerate(zip(places, every, strict=True)):
        column, kind = columns[index // len(kinds)], kinds[index % len(kinds)]
        texts = [[f"{v:.2f}" if np.isfinite(v) else "" for v in row] for row in values]
        texts = texts if layers <= _MOST_NUMBERS else []
        image = shared.numbered_cells(axes, values, texts, "viridis", (lowest, 1.0), 8)
        axes.set_title(f"{column.title}, {kind}", fontsize=9)
        beside, under = labels[kind]
        axes.set_xticks(range(len(under)), under, rotation=90, fontsize=7)
        axes.set_yticks(range(len(beside)), beside, fontsize=7)
        axes.tick_params(labelleft=index % len(kinds) == 0)
        axes.set(ylabel="first network", xlabel="second network")
    shared.drop_repeated(places, len(kinds))
    figure.colorbar(image, ax=places, shrink=0.6, pad=0.01, label="similarity, 1 for equal")
    shared.hatch_missing(figure, dict(zip(places, every, strict=True)), "not comparable by this measure, or undefined")
    return figure
