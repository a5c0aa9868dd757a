"""Files of figures: PNG, PDF and SVG, as drawn or with the width of a column or a page of a paper."""

import copy
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from lightning_sym._files import write_atomically
from lightning_sym._text import unknown
from lightning_sym.figures import _panels as shared
from lightning_sym.figures._room import separate, tick_names
from lightning_sym.figures.cards import name_each, panels_of

FigureFormat = Literal["png", "pdf", "svg"]
FigureSize = Literal["column", "page"]
FORMATS: tuple[FigureFormat, ...] = get_args(FigureFormat)
# Inches of a column and of the text of a page of two columns, as in the styles of ICML and IEEE.
WIDTHS: Mapping[str, float] = {"column": 3.25, "page": 6.75}

_DPI = 200
_LETTERS = (6.5, 8.0)  # points of the smallest and the largest letters of a figure for a paper
_PANEL, _ONE_OF_MANY = 2.0, 1.6  # inches of the narrowest panel with its labels; where there are more than four
_FULL = 0.85  # share of a line that words take at most: small letters are wider than their average
_BESIDE = 0.55  # inches of the labels on the left of a panel
_FLAT = 0.6  # height of a panel over its width, by default
_THIN = 0.75  # widths of lines in a paper, relative to those as drawn
# Text remains text: letters as TrueType in PDF, words in SVG. Files of equal figures are equal.
_RULES: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "lightning_sym"}
_METADATA: dict[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}


def check_figure_files(form: str, size: str | None) -> None:
    """Check the format and the size of figures.

    Args:
        form: One of ``"png"``, ``"pdf"`` and ``"svg"``.
        size: ``"column"``, ``"page"`` or None.

    Raises:
        ValueError: If one is unknown.
    """
    if form not in FORMATS:
        raise ValueError(unknown("format of figures", form, FORMATS))
    if size is not None and size not in WIDTHS:
        raise ValueError(unknown("size of figures", size, WIDTHS))


def write_figure(figure: Figure, file: Path, form: FigureFormat = "png", size: FigureSize | None = None) -> list[Path]:
    """Write a figure as PNG at 200 dpi and, if asked for, as PDF or SVG.

    Args:
        figure: The figure; it is not changed.
        file: The PNG. Another format has another ending.
        form: ``"pdf"`` and ``"svg"`` hold text as text and lines as lines; large sets of dots are pixels.
        size: See :func:`fitted_figure`.

    Returns:
        The files.

    Raises:
        ValueError: If the format or the size is unknown.
        OSError: If a file cannot be written; no partial file remains.
    """
    check_figure_files(form, size)
    fitted, files = fitted_figure(figure, size), []
    for kind in dict.fromkeys(("png", form)):
        files.append(file.with_name(f"{file.stem}.{kind}"))
        write_atomically(files[-1], figure_bytes(fitted, kind))
    return files


def figure_bytes(figure: Figure, form: FigureFormat = "png", dpi: float = _DPI) -> bytes:
    """Return the file of a figure.

    Args:
        figure: The figure.
        form: Format of the file.
        dpi: Pixels per inch.
    """
    buffer = io.BytesIO()
    with rc_context(_RULES):
        figure.savefig(buffer, format=form, dpi=dpi, metadata=_METADATA[form])
    return buffer.getvalue()


def fitted_figure(figure: Figure, size: FigureSize | None = None) -> Figure:
    """Return a copy of a figure without overlapping names of ticks, with the width of a column or a page.

    In a column, panels are below one another; letters have 6.5 to 8 points. Names of ticks are rotated where they
    would overlap, and some are left out where that is not enough. Numbers that do not fit into their cells are
    omitted.

    Args:
        figure: The figure; it is not changed.
        size: ``"column"``: 3.25 inches. ``"page"``: 6.75 inches. None: as drawn.

    Raises:
        ValueError: If the size is unknown.
    """
    check_figure_files("png", size)
    fitted = copy.deepcopy(figure)
    if size is not None:
        _fit(fitted, WIDTHS[size])
    separate(fitted)
    return fitted


def _fit(figure: Figure, width: float) -> None:
    """Give a figure a width in inches: columns of panels, letters, lines, legend and height follow."""
    panels, _ = panels_of(figure)
    drawn = shared.columns_of(panels)
    most = max(1, min(drawn, int(width // (_PANEL if len(panels) <= 4 else _ONE_OF_MANY))))
    # A divisor of the number of columns: panels of a column belong together.
    columns = next((count for count in range(most, 1, -1) if drawn % count == 0), most)
    if columns != drawn:
        name_each(figure, panels)
        grid = figure.add_gridspec(-(-len(panels) // columns), columns)
        for axes in [axes for axes in figure.axes if axes.get_subplotspec() and axes not in panels]:
            if not hasattr(axes, "_colorbar_info"):
                axes.remove()  # an empty place
        for place, axes in enumerate(panels):
            axes.set_subplotspec(grid[place // columns, place % columns])
        shared.drop_repeated(panels, columns)
    for axes in panels:
        if axes.name == "3d":  # names of its axes are outside
            axes.set_box_aspect(axes._box_aspect, zoom=0.84)  # type: ignore[attr-defined, call-arg]
    for text in figure.findobj(Text):
        text.set_fontsize(_letters(text.get_fontsize()))
    for axes in figure.axes:
        for axis in _axes_of(axes):
            labels = axis.get_ticklabels()
            axis.set_tick_params(labelsize=_letters(labels[0].get_fontsize()) if labels else _LETTERS[0])
    for line in figure.findobj(Line2D):
        line.set(linewidth=_THIN * line.get_linewidth(), markersize=_THIN * line.get_markersize())
    room = width / columns - _BESIDE
    figure.set_size_inches(width, sum(_wanted(axes, room) + 0.4 for axes in panels[::columns]) + 0.5)
    _wrap(figure, panels, room)
    shared.put_legend_again(figure, 7.0)
    for _ in range(3):  # the size of labels depends on the height
        figure.draw_without_rendering()
        places = [axes.get_position(original=True) for axes in panels]
        high, wide = figure.get_figheight(), figure.get_figwidth()
        lacking = [
            max(_wanted(axes, wide * place.width) - high * place.height
                for axes, place in zip(panels[start : start + columns], places[start : start + columns], strict=True))
            for start in range(0, len(panels), columns)
        ]  # fmt: skip
        figure.set_figheight(max(1.2, high + sum(lacking)))


def _letters(size: float | str) -> float:
    return float(np.clip(0.75 * float(size), *_LETTERS))


def _axes_of(axes: Axes) -> list[Axis]:
    return [axes.xaxis, axes.yaxis, *([axes.zaxis] if hasattr(axes, "zaxis") else [])]


def _wanted(axes: Axes, width: float) -> float:
    """Return the height of a panel of a width, in inches."""
    if axes.name == "3d":
        return 0.85 * width
    if axes.get_aspect() != "auto":
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        return float(axes.get_aspect()) * width * abs(top - bottom) / abs(right - left)  # type: ignore[arg-type]
    return max(_FLAT * width, 1.1, 0.16 * len(tick_names(axes.yaxis)))


def _wrap(figure: Figure, panels: Sequence[Axes], room: float) -> None:
    """Wrap titles and names of axes that are wider than their place."""
    for text in (figure._suptitle, figure._supxlabel):  # type: ignore[attr-defined]
        if text is not None:
            shared.wrap(text, _FULL * figure.get_figwidth())
    for axes in panels:
        shared.wrap(axes.title, _FULL * room)
        shared.wrap(axes.xaxis.label, _FULL * room)
        shared.wrap(axes.yaxis.label, _FULL * _wanted(axes, room))
