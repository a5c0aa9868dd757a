"""Helpers of all figures: panels, curves with a band, tables of numbers, legends."""

import functools
import io
import math
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter
from numpy.typing import NDArray

from lightning_sym._text import without_wrappers
from lightning_sym.figures._room import CELL, separate, tick_names

Values = NDArray[np.float64]
P = ParamSpec("P")

INK = "#1b1b1b"
# Okabe and Ito's palette, which color-blind readers can tell apart.
BLUE, VERMILION, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, ORANGE, BLACK = "#56b4e9", "#e69f00", "#000000"
MISSING = "#e6e6e6"
_FEW = (BLUE, VERMILION, SKY, ORANGE)
_LEAST = 9  # pixels of a letter
# How wide TensorBoard's page of images shows a picture, in pixels, however high it is.
_SHOWN = (420.0, math.inf)
_LETTER = 0.5  # the width of a letter, as a share of its height
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MEASURES = {"group": "Procrustes, group", "orthogonal": "Procrustes, orthogonal"}
_WORDS = {"least_squares": "least squares", "procrustes": "Procrustes", "softsort": "SoftSort"}
_GROUPS = {"euclidean": "Euclidean"}
_KERNELS = {"linear": "linear", "max": "max", "laplace": "Laplace"}


class NotebookFigure(Figure):
    """A figure that shows itself as the last value of a cell of a notebook, without ``pyplot``."""

    def _repr_png_(self) -> bytes:
        separate(self)
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def panels(
    width: float, height: float, count: int = 1, columns: int = 0, *, title: str = "", **layout: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row; the places behind the last one stay empty.

    Args:
        width: In inches.
        height: In inches.
        count: Number of panels.
        columns: Panels of a row; 0 for all of them.
        title: Above all.
        **layout: For ``Figure.subplots``.
    """
    columns = columns or count
    figure = NotebookFigure(figsize=(width, height), layout="constrained", dpi=120)
    places: list[Axes] = list(figure.subplots(-(-count // columns), columns, squeeze=False, **layout).flat)
    for axes in places[count:]:
        axes.set_axis_off()
    for axes in places[max(0, count - columns) : count]:  # the lowest of each column, if they share their axes
        axes.tick_params(labelbottom=True)
    if title:
        figure.suptitle(title)
    return figure, places[:count]


def readable(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Give the figure that a function returns labels for people, and titles that can be read on small pictures of it.

    TensorBoard shows such a preview. Titles and labels that are too long are wrapped.
    """

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        figure = draw(*args, **kwargs)
        label_for_people(figure)
        enlarge_words(figure, _SHOWN)
        return figure

    return drawn


def label_for_people(figure: Figure) -> None:
    """Replace names of measures and modules in titles, ticks and legends by labels for people."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            names = tick_names(axis)
            if names:
                axis.set_major_formatter(FixedFormatter(without_common_prefix(list(map(readable_names, names)))))
        series: list[Any] = [*axes.lines, *axes.collections, *axes.patches, *axes.containers]
        for drawn in series:
            drawn.set_label(readable_names(str(drawn.get_label())))
    ticks = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()}
    for text in figure.findobj(lambda one: isinstance(one, Text) and one not in ticks):
        text.set_text(readable_names(text.get_text()))  # type: ignore[attr-defined]


def least_size(figure: Figure, pixels: tuple[float, float]) -> float:
    """Return the size in points of letters that are 9 pixels high in a picture that fits into so many pixels."""
    width, height = figure.get_size_inches()
    return float(1.01 * _LEAST * 72 / min(pixels[0] / width, pixels[1] / height))


def enlarge_words(figure: Figure, pixels: tuple[float, float]) -> None:
    """Make titles and names of axes at least 9 pixels high in a picture that fits into so many pixels.

    Args:
        figure: Its texts are changed, and wrapped where they are too long.
        pixels: Width and height.
    """
    width, height = figure.get_size_inches()
    least = least_size(figure, pixels)
    for text, room in ((figure._suptitle, width), (figure._supxlabel, width), (figure._supylabel, height)):  # type: ignore[attr-defined]
        if text is not None:
            _enlarge(text, least, room)
    for axes in filter(Axes.get_visible, figure.axes):
        place = axes.get_position()
        across, up = width * place.width, height * place.height
        texts = [(axes.title, across), (axes.xaxis.label, across), (axes.yaxis.label, up)]
        texts += [(axes.zaxis.label, up)] if hasattr(axes, "zaxis") else []
        for text, room in texts:
            _enlarge(text, least, room)


def _enlarge(text: Text, least: float, room: float) -> None:
    """Give a text a size of at least so many points, and lines that fit into so many inches."""
    text.set_fontsize(max(float(text.get_fontsize()), least))
    wrap(text, room)


def wrap(text: Text, room: float) -> None:
    """Break the lines of a text, other than formulas, to fit into so many inches."""
    letters = max(12, int(1.1 * room * 72 / (_LETTER * float(text.get_fontsize()))))
    shown, whole = getattr(text, "wrapped", ("", ""))
    whole = whole if shown == text.get_text() else text.get_text()  # wrapped again for another width
    lines = whole.splitlines()
    if "$" not in whole and max(map(len, lines), default=0) > letters:
        text.set_text("\n".join(part for line in lines for part in textwrap.wrap(line, letters) or [line]))
        text.wrapped = text.get_text(), whole  # type: ignore[attr-defined]


def check_some(**entries: Collection[object]) -> None:
    """Check that there is something to draw.

    Raises:
        ValueError: If an argument is empty; the message names it.
    """
    for name, given in entries.items():
        if not given:
            raise ValueError(f"{name} must have at least one entry, got none.")


def band(axes: Axes, places: Values, values: Values, **look: Any) -> None:
    """Draw the mean of several as a line, and a shade from the lowest to the highest; NaN is left out.

    Args:
        axes: Where to draw.
        places: Along the horizontal axis. Shape ``[T]``.
        values: Shape ``[T, M]``, for ``M`` of them.
        **look: Properties of the line; the shade has the same ``color``.
    """
    shown = np.isfinite(values).any(axis=1)
    if not shown.any():
        return
    places, values = places[shown], values[shown]
    look = {"marker": "o" if len(places) == 1 else None, **look}  # a line through one point cannot be seen
    axes.plot(places, np.nanmean(values, axis=1), zorder=3, **look)
    if values.shape[1] > 1:
        ends = np.nanmin(values, axis=1), np.nanmax(values, axis=1)
        axes.fill_between(places, *ends, color=look["color"], alpha=0.15, lw=0)


def numbered_cells(
    axes: Axes,
    values: Values,
    texts: Sequence[Sequence[str]],
    colors: str | Colormap,
    limits: tuple[float, float],
    fontsize: float,
) -> AxesImage:
    """Draw a matrix in colors, with text in its cells that can be read on them.

    Args:
        axes: Where to draw.
        values: Values of the colors; NaN for none. Shape ``[A, B]``.
        texts: ``A`` rows of ``B``, or no rows; an empty text is none.
        colors: Name of a map of colors, or the map.
        limits: The values at its ends.
        fontsize: Size of the text.
    """
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=colors, vmin=limits[0], vmax=limits[1])
    shades = np.asarray(image.to_rgba(masked))
    dark = (shades[..., :3] @ [0.299, 0.587, 0.114] < 0.5) & (shades[..., 3] > 0)
    for row, words in enumerate(texts):
        for column, text in enumerate(words):
            if text:
                color = "white" if dark[row, column] else INK
                axes.text(column, row, text, ha="center", va="center", fontsize=fontsize, color=color, gid=CELL)
    return image


def hatch_missing(figure: Figure, panels: Mapping[Axes, Values], name: str) -> None:
    """Hatch the cells of matrices without a value, and name them below the figure.

    Args:
        figure: Gets a legend if a value is missing.
        panels: The matrices by their axes, drawn by :func:`numbered_cells`; NaN for none. Shape ``[A, B]`` each.
        name: Reason for missing values.
    """
    look: Any = {"facecolor": MISSING, "hatch": "////", "edgecolor": "#a0a0a0", "lw": 0}
    places = [(axes, place) for axes, values in panels.items() for place in np.argwhere(~np.isfinite(values))]
    for axes, (row, column) in places:
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **look))
    if places:
        put_legend(figure, [Patch(**look)], [name])


def columns_of(panels: Sequence[Axes]) -> int:
    """Return the number of columns of panels."""
    return len({place.colspan.start for axes in panels if (place := axes.get_subplotspec()) is not None})


def drop_repeated(places: Sequence[Axes], columns: int) -> None:
    """Remove axis labels that the panel to the left or below repeats."""
    for index, axes in enumerate(places):
        row, below = places[index - index % columns], places[index + columns : index + columns + 1]
        if axes is not row and axes.get_ylabel() == row.get_ylabel():
            axes.set_ylabel("")
        if below and axes.get_xlabel() == below[0].get_xlabel():
            axes.set_xlabel("")


def put_legend(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], *, beside: bool = False, size: float = 9.0
) -> None:
    """Add a legend below all panels, or on their right.

    Args:
        figure: The layout leaves room for the legend.
        handles: Artists.
        labels: Their names.
        beside: Whether to add it on the right, with one name per row.
        size: Points of the letters.
    """
    labels = [readable_names(label) for label in labels]
    longest = max(len(re.sub(r"\\[a-z]+|[$^_{}]", "", label)) for label in labels)
    columns = int(np.clip(112 / size * figure.get_figwidth() // (longest + 8), 1, len(handles)))
    columns = 1 if beside else -(-len(handles) // -(-len(handles) // columns))
    place: Any = f"outside {'right center' if beside else 'lower center'}"
    look: Any = {"frameon": False, "fontsize": size, "handletextpad": 0.6, "handlelength": 2.8}
    figure.legend(handles, labels, loc=place, ncols=columns, **look)
    figure.entries = handles, labels  # type: ignore[attr-defined]


def put_legend_again(figure: Figure, size: float) -> None:
    """Put the legend of :func:`put_legend` below a narrower figure, with letters of a size in points."""
    if hasattr(figure, "entries"):
        figure.legends.clear()  # a copy of a figure cannot remove its legend otherwise
        put_legend(figure, *figure.entries, size=size)


def legend_above(axes: Axes) -> None:
    """Add a legend above the data; the axis is extended, so the legend hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    handles, labels = _once(handles, labels)
    columns = 2 if max(map(len, labels)) < 16 else 1
    share = 0.05 + 0.065 * -(-len(handles) // columns)
    scale = axes.yaxis.get_transform()  # a logarithmic axis grows in decades
    low, high = scale.transform(np.array(axes.get_ylim()))
    axes.set_ylim(top=float(scale.inverted().transform(low + (high - low) / (1 - share))))
    axes.legend(handles, labels, loc="upper right", ncols=columns, fontsize=8, framealpha=0.9)


def _once(handles: Sequence[Artist], labels: Sequence[str]) -> tuple[list[Artist], list[str]]:
    """Return the first handle of each label: a line and its error bars share one."""
    first: dict[str, Artist] = {}
    for handle, label in zip(handles, labels, strict=True):
        first.setdefault(label, handle)
    return list(first.values()), list(first)


def line_colors(count: int) -> list[str | tuple[float, ...]]:
    """Return colors of so many lines in one panel; of many they go from dark to bright in the order of the lines."""
    if count <= len(_FEW):
        return list(_FEW[:count])
    return [tuple(map(float, color)) for color in colormaps["viridis"](np.linspace(0.0, 0.92, count))]


def legend_of_some(axes: Axes) -> None:
    """Name the curves; of many only some, from the first to the last, as colors go from one to the other."""
    handles, labels = _once(*axes.get_legend_handles_labels())
    if len(handles) > len(_FEW):
        chosen = np.unique(np.linspace(0, len(handles) - 1, len(_FEW)).round().astype(int))
        handles, labels = [handles[index] for index in chosen], [labels[index] for index in chosen]
    if handles:
        axes.legend(handles, labels, fontsize=8, framealpha=0.9)


def measure_label(name: str) -> str:
    """Return the label of a measure of similarity.

    Args:
        name: As in :data:`lightning_sym.similarity.MEASURES`, or any other name, which is returned unchanged.

    Example:
        >>> measure_label("cka_linear"), measure_label("orthogonal")
        ('CKA, linear', 'Procrustes, orthogonal')
    """
    return _MEASURES.get(name, readable_names(name))


def readable_names(text: str) -> str:
    """Replace names of measures and maps in a text by labels for people.

    Modules keep the names that tables and options use; ``module.`` of wrapped and compiled networks is omitted there,
    too. Other words are unchanged.

    Args:
        text: Title, name of a tick or entry of a legend. Formulas, with ``$``, are unchanged.

    Example:
        >>> readable_names("cka_max, module.activation1"), readable_names("rank(4)")
        ('CKA, max, activation1', 'rank 4')
    """
    if "$" in text:
        return text
    text = without_wrappers(text)
    text = re.sub(rf"\bcka_({'|'.join(_KERNELS)})\b", lambda kernel: f"CKA, {_KERNELS[kernel[1]]}", text)
    text = re.sub(r"\b(rank|lasso)\(([\d.e-]+)\)", r"\1 \2", text)
    text = re.sub(
        r"\bgroup\(([\w.,+-]+)\)", lambda group: ", ".join(["group", *map(_option, group[1].split(","))]), text
    )
    return re.sub(rf"(?<![\w./-])({'|'.join(_WORDS)})(?![\w./-])", lambda word: _WORDS[word[1]], text)


def _option(word: str) -> str:
    return _GROUPS.get(word, word)


def without_common_prefix(names: Sequence[str]) -> list[str]:
    """Remove the modules that all names begin with.

    Args:
        names: Names with dots between modules.

    Example:
        >>> without_common_prefix(["model.encoder.0.fc1", "model.encoder.1.fc1"])
        ['0.fc1', '1.fc1']
    """
    if len(set(names)) < 2:
        return list(names)
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == parts[0][shared] for path in parts):
        shared += 1
    # Numbers alone are ambiguous: the module before them stays.
    if shared and any(path[shared:][0].isdigit() and len(path) == shared + 1 for path in parts):
        shared -= 1
    return [".".join(path[shared:]) for path in parts]
