"""Figures of layer-wise equivariance learning."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# By family of paths, as everywhere; further ones follow.
_COLORS = {"fc": "#c8553d", "conv": "#2f6690", "gconv": "#588b5a"}
_OTHERS = ("#8d6a9f", "#d9a441", "#5c5c5c", "#3aa6a6")


def relative_effective_parameters(
    epochs: Sequence[float], relative: Mapping[str, Mapping[str, Sequence[float]]], *, title: str = ""
) -> Figure:
    """Draw for each layer which part of its effective parameters every path has, over training.

    Args:
        epochs: When the numbers were taken; ascending, at least one. Length ``T``.
        relative: By layer, then path: fractions that add up to 1 over the paths. Each of length ``T``.
        title: Above all.

    Returns:
        A panel for each layer, with stacked areas; the last fraction of the largest path is written in it.

    Raises:
        ValueError: If there is no layer, or a length differs.
    """
    if not relative or not epochs:
        raise ValueError("There is nothing to draw: give at least one layer and one epoch.")
    for layer, paths in relative.items():
        for path, values in paths.items():
            if len(values) != len(epochs):
                raise ValueError(f"{layer} {path} has {len(values)} values for {len(epochs)} epochs.")
    names = list(dict.fromkeys(path for paths in relative.values() for path in paths))
    colors = _colors(names)
    columns = 3 if len(relative) in (5, 6, 9) else min(4, len(relative))  # few places stay empty
    rows = math.ceil(len(relative) / columns)
    figure = Figure(figsize=(2.5 * columns + 1.2, 2.0 * rows + 1.0), layout="constrained", dpi=120)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    places = np.asarray(epochs, dtype=float)
    if len(places) == 1:  # a stretch of its own
        places = np.array([places[0] - 0.5, places[0] + 0.5])
    for panel, (layer, paths) in zip(panels, relative.items(), strict=False):
        parts = np.array([paths[path] for path in paths], dtype=float)
        if parts.shape[1] != len(places):
            parts = np.repeat(parts, 2, axis=1)
        panel.stackplot(places, parts, colors=[colors[path] for path in paths], alpha=0.9, lw=0)
        largest = int(parts[:, -1].argmax())
        middle = parts[:largest, -1].sum() + parts[largest, -1] / 2
        panel.text(
            0.97, middle, f"{list(paths)[largest].upper()} {100 * parts[largest, -1]:.0f} %",
            transform=panel.get_yaxis_transform(), ha="right", va="center", color="white", fontsize=9, weight="bold",
        )  # fmt: skip
        panel.set_title(layer, fontsize=10)
        panel.set_ylim(0, 1)
        panel.set_xlim(places[0], places[-1])
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.tick_params(labelbottom=True)
    for panel in panels[len(relative) :]:
        panel.set_axis_off()
    handles = [figure.axes[0].fill_between([], [], color=colors[name], label=name.upper()) for name in names]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, frameon=False)
    figure.supxlabel("epoch", fontsize=10)
    figure.supylabel("relative effective parameters", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def evidence_curves(epochs: Sequence[float], terms: Mapping[str, Sequence[float]], *, title: str = "") -> Figure:
    """Draw the negative log marginal likelihood per datum over training, and what it is made of.

    Args:
        epochs: When the numbers were taken. Length ``T``.
        terms: ``log_marginal_likelihood``, ``log_likelihood``, ``log_determinant`` and ``scatter`` in nats per datum,
            the last two to be subtracted. Each of length ``T``.
        title: Above the figure.

    Returns:
        The figure; lower is better.
    """
    figure = Figure(figsize=(5.6, 3.8), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    places = np.asarray(epochs, dtype=float)
    parts = [-np.asarray(terms["log_likelihood"]), np.asarray(terms["log_determinant"]), np.asarray(terms["scatter"])]
    labels = ["fit: -log likelihood", "½ log determinant ratio", "scatter: ½ Σ δ‖θ‖²"]
    for part, label, color in zip(parts, labels, ("#2f6690", "#c8553d", "#d9a441"), strict=True):
        axes.plot(places, part, color=color, lw=1.4, marker="o" if len(places) < 3 else None, label=label)
    total = -np.asarray(terms["log_marginal_likelihood"])
    axes.plot(places, total, color="#1b1b1b", lw=2, marker="o" if len(places) < 3 else None, label="sum: -L / N")
    axes.set_xlabel("epoch")
    axes.set_ylabel("nats per training datum")
    if min(float(values.min()) for values in (total, *parts)) > 0:  # not of every regression
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    axes.set_title(title or "Laplace marginal likelihood", fontsize=10)
    return figure


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each path: that of its family where there is one of it."""
    colors: dict[str, str] = {}
    for name in names:
        family = name.partition(".")[0]
        wanted = _COLORS.get(family)
        free = [color for color in _OTHERS if color not in colors.values()]
        colors[name] = wanted if wanted and wanted not in colors.values() else (free or list(_OTHERS))[0]
    return colors
