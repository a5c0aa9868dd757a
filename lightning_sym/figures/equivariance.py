"""Figures of layer-wise equivariance learning."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_sym.figures import _panels as shared

# By family of paths, as everywhere; further ones follow.
_COLORS = {"fc": "#c8553d", "conv": "#2f6690", "gconv": "#588b5a"}
_OTHERS = ("#8d6a9f", "#d9a441", "#5c5c5c", "#3aa6a6")


@shared.readable
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
    shared.check_some(relative=relative, epochs=epochs)
    for layer, paths in relative.items():
        for path, values in paths.items():
            if len(values) != len(epochs):
                raise ValueError(f"{layer} {path} has {len(values)} values for {len(epochs)} epochs.")
    names = list(dict.fromkeys(path for paths in relative.values() for path in paths))
    colors = _colors(names)
    columns = min(2, len(relative))
    rows = math.ceil(len(relative) / columns)
    size = 2.5 * columns + 1.2, 2.0 * rows + 1.0
    figure, places = shared.panels(*size, len(relative), columns, title=title, sharex=True, sharey=True)
    times = np.asarray(epochs, dtype=float)
    if len(times) == 1:  # a stretch of its own
        times = times[0] + np.array([-0.5, 0.5])
    for panel, (layer, paths) in zip(places, relative.items(), strict=True):
        parts = np.array(list(paths.values()), dtype=float)
        parts = np.broadcast_to(parts, (len(parts), len(times)))
        panel.stackplot(times, parts, colors=[colors[path] for path in paths], alpha=0.9, lw=0)
        largest = int(parts[:, -1].argmax())
        middle = parts[:largest, -1].sum() + parts[largest, -1] / 2
        panel.text(
            0.97, middle, f"{list(paths)[largest].upper()} {100 * parts[largest, -1]:.0f} %",
            transform=panel.get_yaxis_transform(), ha="right", va="center", color="white", fontsize=9, weight="bold",
        )  # fmt: skip
        panel.set_title(layer, fontsize=10)
        panel.set(xlim=times[[0, -1]], ylim=(0, 1))
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.tick_params(labelbottom=True)
    handles = [figure.axes[0].fill_between([], [], color=colors[name], label=name.upper()) for name in names]
    shared.legend_beside(figure, handles, "right upper")
    figure.supxlabel("epoch", fontsize=10)
    figure.supylabel("relative effective parameters", fontsize=10)
    return figure


@shared.readable
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
    figure, (axes,) = shared.panels(5.6, 3.8)
    parts = [
        (-np.asarray(terms["log_likelihood"]), "fit: -log likelihood", "#2f6690", 1.4),
        (np.asarray(terms["log_determinant"]), "½ log determinant ratio", "#c8553d", 1.4),
        (np.asarray(terms["scatter"]), "scatter: ½ Σ δ‖θ‖²", "#d9a441", 1.4),
        (-np.asarray(terms["log_marginal_likelihood"]), "sum: -L / N", shared.INK, 2.0),
    ]
    for values, label, color, width in parts:
        axes.plot(epochs, values, color=color, lw=width, marker="o" if len(epochs) < 3 else None, label=label)
    shared.over_epochs(axes, "nats per training datum")
    axes.set_title(title or "Laplace marginal likelihood", fontsize=10)
    if min(float(values.min()) for values, *_ in parts) > 0:  # not of every regression
        axes.set_yscale("log")
    axes.legend(fontsize=8)
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
