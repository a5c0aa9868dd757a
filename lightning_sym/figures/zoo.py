"""Figure of the confusion of the members of a zoo."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_sym.figures import _panels as shared


@shared.readable
def confusion_matrix(
    confusion: NDArray[np.float64],
    *,
    class_names: Sequence[str] | None = None,
    title: str = "Confusion, mean over members",
) -> Figure:
    """Draw a confusion matrix; mistakes are emphasised, the diagonal is printed as numbers.

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
