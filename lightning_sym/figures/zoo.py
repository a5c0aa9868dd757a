"""Figures of a zoo."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

_MEAN = "#1b1b1b"


def validation_curves(
    accuracy: Sequence[Sequence[float]],
    numbers: Sequence[int],
    *,
    epochs: Sequence[float] | None = None,
    kept: Mapping[int, float] | None = None,
    axes: Axes | None = None,
) -> Figure:
    """Draw every member's validation accuracy over epochs, and their mean.

    Args:
        accuracy: Per validation one fraction per member; NaN where there is none. Shape ``[validations, M]``.
        numbers: The members' numbers, for the legend. Length ``M``.
        epochs: How many epochs had been trained at each validation; default 1, 2, ...
        kept: How many epochs had been trained when the weights were taken that were kept, by member number; marked by
            a dot.
        axes: Where to draw; None makes a figure.

    Returns:
        The figure.
    """
    axes = axes if axes is not None else _figure(5.2, 3.8).add_subplot()
    values = np.asarray(accuracy, dtype=float).reshape(len(accuracy), len(numbers))
    places = np.arange(1.0, len(values) + 1) if epochs is None else np.asarray(epochs, dtype=float)
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, len(numbers)))
    few = len(numbers) <= 10
    for column, (number, color) in enumerate(zip(numbers, colors, strict=True)):
        label = f"member {number}" if few else None
        axes.plot(
            places,
            values[:, column],
            color=color,
            lw=1.4 if few else 0.7,
            alpha=0.9 if few else 0.5,
            label=label,
        )
        (rows,) = np.nonzero(places == (kept or {}).get(number))
        axes.plot(places[rows], values[rows, column], "o", color=color, ms=5 if few else 3)
    if np.isfinite(values).any(axis=1).all():
        mean = np.nanmean(values, axis=1)
        axes.plot(places, mean, "--", color=_MEAN, lw=1.8, label=f"mean of {len(numbers)}", zorder=3)
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation accuracy")
    axes.set_title("Validation accuracy (dot: weights kept)" if kept else "Validation accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right", framealpha=0.9)
    return _of(axes)


def confusion_matrix(
    confusion: NDArray[np.float64],
    *,
    class_names: Sequence[str] | None = None,
    title: str = "Confusion, mean over members",
    axes: Axes | None = None,
) -> Figure:
    """Draw a confusion matrix; mistakes stand out, the diagonal is given in numbers.

    Args:
        confusion: Fraction of images of class ``i`` taken for class ``j``; rows sum to 1. Shape ``[K, K]``.
        class_names: Labels of the ticks; default the class indices.
        title: Above the matrix.
        axes: Where to draw; None makes a figure.

    Returns:
        The figure.
    """
    classes = len(confusion)
    axes = axes if axes is not None else _figure(max(4.6, 0.32 * classes), max(4.0, 0.3 * classes)).add_subplot()
    percent = 100 * np.asarray(confusion, dtype=float)
    mistakes = percent.copy()
    np.fill_diagonal(mistakes, np.nan)
    largest = float(np.nanmax(mistakes)) if classes > 1 else 0.0
    image = axes.imshow(mistakes, cmap="OrRd", vmin=0, vmax=max(largest, 1.0))
    if classes <= 20:
        for row in range(classes):
            for column in range(classes):
                value = percent[row, column]
                if row == column or value >= 0.05:
                    dark = row != column and value > 0.6 * max(largest, 1.0)
                    axes.text(
                        column, row, f"{value:.1f}" if row != column else f"{value:.0f}",
                        ha="center", va="center", fontsize=6.5, color="white" if dark else "#444444",
                    )  # fmt: skip
    names = list(class_names) if class_names else [str(index) for index in range(classes)]
    shown = range(classes) if classes <= 20 else range(0, classes, 10)
    axes.set_xticks(list(shown), [names[index] for index in shown], rotation=0 if classes <= 10 else 90, fontsize=8)
    axes.set_yticks(list(shown), [names[index] for index in shown], fontsize=8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(title)
    figure = _of(axes)
    figure.colorbar(image, ax=axes, label="mistakes, % of the true class", fraction=0.046, pad=0.03)
    return figure


def zoo_overview(
    accuracy: Sequence[Sequence[float]],
    numbers: Sequence[int],
    confusion: NDArray[np.float64],
    *,
    epochs: Sequence[float] | None = None,
    kept: Mapping[int, float] | None = None,
    class_names: Sequence[str] | None = None,
    title: str,
    confusion_title: str = "Confusion, mean over members",
) -> Figure:
    """Draw the validation curves beside the confusion matrix; arguments as for those two.

    Returns:
        The figure.
    """
    figure = _figure(11, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    validation_curves(accuracy, numbers, epochs=epochs, kept=kept, axes=left)
    confusion_matrix(confusion, class_names=class_names, title=confusion_title, axes=right)
    figure.suptitle(title)
    return figure


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def _of(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure
