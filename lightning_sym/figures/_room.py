"""Names at axes and numbers in cells that have room."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullFormatter

CELL = "cell"  # mark of the numbers in the cells of a matrix
VALUE = "value"  # mark of the numbers next to bars
_CELL = 4.5  # points of the smallest number in a cell


def tick_names(axis: Axis) -> list[str]:
    """Return the names of the ticks of an axis; none if these are numbers at places that matplotlib chooses."""
    locator, formatter = axis.get_major_locator(), axis.get_major_formatter()
    if not isinstance(locator, FixedLocator) or not isinstance(formatter, FixedFormatter | FuncFormatter):
        return []
    return [formatter(place, index) for index, place in enumerate(locator())]


def separate(figure: Figure) -> None:
    """Rotate or leave out names of ticks that overlap, and give numbers room: next to bars, and in cells."""
    for _ in range(3):  # rotated names leave less room
        figure.draw_without_rendering()
        flat = [axes for axes in figure.axes if axes.get_visible() and axes.name != "3d"]
        if not sum(_separate_names(axes, axis) for axes in flat for axis in (axes.xaxis, axes.yaxis)):
            break
    for axes in flat:
        _shrink_numbers(axes)
        _extend(axes)


def _separate_names(axes: Axes, axis: Axis) -> bool:
    """Rotate the names at an axis if they overlap, or leave out some if they are rotated; return whether it did."""
    across = axis is axes.xaxis
    shown = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
    if len(shown) < 2:
        return False
    places = np.sort([label.get_transform().transform(label.get_position())[0 if across else 1] for label in shown])
    gap = float(np.diff(places).min())
    lines = max(label.get_text().count("\n") + 1 for label in shown)
    high = 1.2 * lines * float(shown[0].get_fontsize()) * axes.figure.dpi / 72  # type: ignore[union-attr]
    slant = math.radians(shown[0].get_rotation())
    if across and slant == 0:
        boxes = [label.get_window_extent() for label in shown]
        needed = max((one.width + two.width) / 2 for one, two in pairwise(boxes)) + 0.3 * high
    else:
        needed = high / (math.sin(slant) if across else 1)
    if needed <= 1.001 * gap:
        return False
    names = tick_names(axis)
    if across and slant == 0 and names:
        axis.set_tick_params(rotation=90)
    elif names:
        step = math.ceil(needed / gap)
        axis.set_major_locator(FixedLocator(list(axis.get_majorticklocs()[::step])))
        axis.set_major_formatter(FixedFormatter(names[::step]))
    elif across and axes.get_xscale() == "log":
        axis.set_minor_formatter(NullFormatter())
    elif across:
        axes.locator_params(axis="x", nbins=max(2, int(len(shown) * gap / needed)))
    return True


def _shrink_numbers(axes: Axes) -> None:
    """Shrink the numbers in the cells of a matrix to the cells, or hide all of them if they became too small."""
    numbers = [text for text in axes.texts if text.get_gid() == CELL]
    if not numbers:
        return
    corners = axes.transData.transform([(0, 0), (1, 1)])
    wide, high = np.abs(corners[1] - corners[0])
    boxes = [text.get_window_extent() for text in numbers]
    share = min(1.0, *(min(0.92 * wide / box.width, high / box.height) for box in boxes))
    for text in numbers:
        size = float(text.get_fontsize()) * share
        text.set(fontsize=size, visible=size >= _CELL)


def _extend(axes: Axes) -> None:
    """Extend the axes to the right and upwards until the numbers next to bars are inside, on any scale."""
    numbers = [text for text in axes.texts if text.get_gid() == VALUE]
    limits: list[Any] = [axes.set_xlim, axes.set_ylim] if numbers else []
    for place, limit in enumerate(limits):
        low, high = axes.get_window_extent().get_points()[:, place]
        gap, share = 0.02 * (high - low), 1.0
        for text in numbers:  # the anchor moves with the axes, the text keeps its size
            anchor = axes.transData.transform(text.xy)[place] - low  # type: ignore[attr-defined]
            end = text.get_window_extent().get_points()[1, place] + gap - low
            if anchor > 0 and end > high - low:
                share = min(share, max(0.2, (high - low - end + anchor) / anchor))
        if share < 1:
            corner = [low + (high - low) / share] * 2
            limit(None, float(axes.transData.inverted().transform(corner)[place]))
