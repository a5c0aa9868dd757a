"""What several groups of runs found, beside each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_sym.figures import _panels as shared


@dataclass(frozen=True)
class Compared:
    """One number of a group of runs.

    Attributes:
        name: Of the group.
        values: Of each run; none if the group does not have the number.
        low: Lower end of an interval for their mean; None if there is none.
        high: Upper end.
        decided: Whether the group differs from the first one; None if that is not known.
    """

    name: str
    values: Sequence[float]
    low: float | None = None
    high: float | None = None
    decided: bool | None = None


@shared.readable
def comparison_dots(numbers: Mapping[str, Sequence[Compared]], *, title: str = "") -> Figure:
    """Draw a panel for each number with a line for each group: light dots for runs, a dark one with its interval.

    The first group is blue, vermilion are those that differ from it, and black those of which that is not known.

    Args:
        numbers: Groups by the number's name, the same ones in the same order for each.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there is nothing to draw.
    """
    shared.check_some(numbers=numbers)
    names = [one.name for one in next(iter(numbers.values()))]
    columns = min(2, len(numbers))
    height = (1.1 + 0.36 * len(names)) * -(-len(numbers) // columns)
    beside = 0.08 * max(map(len, names))
    figure, places = shared.panels(
        beside + 3.6 * columns, 0.6 + height, len(numbers), columns, title=title, sharey=True
    )
    for axes, (label, groups) in zip(places, numbers.items(), strict=True):
        for line, one in enumerate(groups):
            if not one.values:
                continue
            mean = float(np.mean(one.values))
            color = shared.BLUE if line == 0 else shared.VERMILION if one.decided else shared.INK
            if len(one.values) > 1:
                below = [line + 0.24] * len(one.values)
                axes.plot(one.values, below, "o", ms=5, color=color, alpha=0.4, mew=0)
            if one.low is not None and one.high is not None:
                axes.plot([one.low, one.high], [line, line], color=color, lw=2.5, solid_capstyle="butt")
            axes.plot(mean, line, "o", ms=8, color=color, mec="white", zorder=3)
        axes.set(xlabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.margins(x=0.12)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=10)
        axes.set_yticks(range(len(names)), names, fontsize=11)
        axes.set_ylim(len(names) - 0.5, -0.5)  # the first one on top; shared by all panels
    return figure
