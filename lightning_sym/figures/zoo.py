"""Figures of a zoo."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_sym.figures import _panels as shared


@shared.readable
def validation_curves(
    accuracy: Sequence[Sequence[float]],
    numbers: Sequence[int],
    *,
    epochs: Sequence[float],
    kept: Mapping[int, float] | None = None,
    quantity: str = "accuracy",
) -> Figure:
    """Draw every member's validation accuracy, or loss, over epochs, and their mean.

    Args:
        accuracy: Per validation one value per member; NaN where there is none. Shape ``[validations, M]``.
        numbers: The members' numbers, for the legend. Length ``M``.
        epochs: How many epochs had been trained at each validation.
        kept: How many epochs had been trained when the weights were taken that were kept, by member number; marked by
            a dot.
        quantity: What the values are, ``"accuracy"`` or ``"loss"``.

    Returns:
        The figure.
    """
    figure, (axes,) = shared.panels(5.2, 3.8)
    values = np.asarray(accuracy, dtype=float).reshape(len(accuracy), len(numbers))
    places = np.asarray(epochs, dtype=float)
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, len(numbers)))
    few = len(numbers) <= 10
    width, alpha, dot = (1.4, 0.9, 5) if few else (0.7, 0.5, 3)
    for number, color, curve in zip(numbers, colors, values.T, strict=True):
        label = f"member {number}" if few else None
        axes.plot(places, curve, color=color, lw=width, alpha=alpha, label=label)
        taken = places == (kept or {}).get(number)
        axes.plot(places[taken], curve[taken], "o", color=color, ms=dot)
    if np.isfinite(values).any(axis=1).all():
        mean = np.nanmean(values, axis=1)
        axes.plot(places, mean, "--", color=shared.INK, lw=1.8, label=f"mean of {len(numbers)}", zorder=3)
    shared.over_epochs(axes, f"validation {quantity}")
    axes.set_title(f"Validation {quantity}" + (" (dot: weights kept)" if kept else ""))
    axes.legend(fontsize=8, loc="lower right" if quantity == "accuracy" else "upper right", framealpha=0.9)
    return figure


@shared.readable
def confusion_matrix(
    confusion: NDArray[np.float64],
    *,
    class_names: Sequence[str] | None = None,
    title: str = "Confusion, mean over members",
) -> Figure:
    """Draw a confusion matrix; mistakes stand out, the diagonal is given in numbers.

    Args:
        confusion: Fraction of images of class ``i`` taken for class ``j``; rows sum to 1. Shape ``[K, K]``.
        class_names: Labels of the ticks; default the class indices.
        title: Above the matrix.

    Returns:
        The figure.
    """
    classes = len(confusion)
    figure, (axes,) = shared.panels(max(4.6, 0.32 * classes), max(4.0, 0.3 * classes))
    percent = 100 * np.asarray(confusion, dtype=float)
    mistakes = np.where(np.eye(classes), np.nan, percent)
    texts = [[f"{value:.1f}" if value >= 0.05 else "" for value in row] for row in percent]
    for index, right in enumerate(percent.diagonal()):
        texts[index][index] = f"{right:.0f}"
    largest = float(np.nanmax(mistakes, initial=1.0))
    image = shared.numbered_cells(axes, mistakes, texts if classes <= 20 else [], "OrRd", (0, largest), 6.5)
    names = list(class_names) if class_names else [str(index) for index in range(classes)]
    step = 1 if classes <= 20 else 10
    axes.set_xticks(range(0, classes, step), names[::step], rotation=0 if classes <= 10 else 90, fontsize=8)
    axes.set_yticks(range(0, classes, step), names[::step], fontsize=8)
    axes.set(xlabel="predicted", ylabel="true", title=title)
    figure.colorbar(image, ax=axes, label="mistakes, % of the true class", fraction=0.046, pad=0.03)
    return figure
