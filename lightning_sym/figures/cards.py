"""A figure for TensorBoard: one picture per panel, with words that can be read on a small card."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import FixedLocator

from lightning_sym.figures import _panels as shared

# Pixels that TensorBoard's page of time series leaves to a picture.
CARD = (374, 215)
# Inches of a panel that is taken out of its figure.
_WIDE, _SQUARE = (6.4, 4.0), (5.4, 4.4)
# So many names of so many letters at an axis can be as large as titles.
_FEW, _SHORT = 8, 14


def cards(figure: Figure) -> Iterator[tuple[str, Figure]]:
    """Yield a picture for each panel of a figure, with the title, the colors and the legend of all.

    TensorBoard previews pictures on cards of 374 x 215 pixels. Several panels on one card cannot be read.

    Args:
        figure: Panels in rows and columns, with the layout ``"constrained"``. It is used up: each picture is the
            figure itself with one of its panels, to be drawn before the next one is asked for.

    Yields:
        The number of a panel, from ``"1"`` at the upper left on, and the figure with that panel; of a single panel an
        empty text. Titles and names of axes have letters of at least 9 pixels on a card.
    """
    panels, bars = panels_of(figure)
    if len(panels) < 2:
        shared.enlarge_words(figure, CARD)
        if panels:
            _enlarge_names(figure, panels[0])
        yield "", figure
        return
    name_each(figure, panels)
    for number, panel in enumerate(panels, 1):
        for axes in figure.axes:
            shown = axes is panel or panel in bars.get(axes, ())
            axes.set_visible(shown)
            axes.set_in_layout(shown)
            if shown and axes in bars:
                axes._colorbar_info["parents"] = [panel]  # type: ignore[attr-defined]
        panel.set_subplotspec(figure.add_gridspec(1, 1)[0])
        figure.set_size_inches(*(_WIDE if panel.get_aspect() == "auto" else _SQUARE))
        shared.enlarge_words(figure, CARD)
        _enlarge_names(figure, panel)
        yield f"{number:0{len(str(len(panels)))}}", figure


def panels_of(figure: Figure) -> tuple[list[Axes], dict[Axes, list[Axes]]]:
    """Return the panels of a figure, row by row, and the bars of colors with the panels that they are for."""
    bars = {axes: list(axes._colorbar_info["parents"]) for axes in figure.axes if hasattr(axes, "_colorbar_info")}
    used = [axes for axes in figure.axes if axes.axison or axes.name == "3d"]  # no empty places
    return [axes for axes in used if axes.get_subplotspec() and axes not in bars], bars


def name_each(figure: Figure, panels: Sequence[Axes]) -> None:
    """Copy titles, axis labels, ticks and legends of the outer panels to all panels."""
    titles = {axes: axes.get_title() for axes in panels}
    below = {axes: axes.get_xlabel() for axes in panels}
    beside = {axes: axes.get_ylabel() for axes in panels}
    legends = figure.legends or not any(axes.get_legend() for axes in panels)
    for axes in panels:
        column = [other for other in panels if _place(other).colspan == _place(axes).colspan]
        row = [other for other in panels if _place(other).rowspan == _place(axes).rowspan]
        above = [other for other in column if _place(other).rowspan.start <= _place(axes).rowspan.start]
        across = [axes, *column, *axes.get_shared_x_axes().get_siblings(axes)]  # type: ignore[attr-defined]
        up = [axes, *row, *axes.get_shared_y_axes().get_siblings(axes)]  # type: ignore[attr-defined]
        axes.title.set_text(_first(titles, above[::-1]))
        axes.xaxis.label.set_text(_first(below, across))
        axes.yaxis.label.set_text(_first(beside, up))
        axes.tick_params(labelbottom=True, labelleft=True)
        if not legends and axes.get_legend() is None:
            shared.legend_of_some(axes)


def _enlarge_names(figure: Figure, panel: Axes) -> None:
    """Make a few names at the horizontal axis (of sites) as high as titles, slanted if they would collide."""
    if panel.name == "3d" or not isinstance(panel.xaxis.get_major_locator(), FixedLocator):
        return
    names = panel.get_xticklabels()
    longest = max((len(name.get_text()) for name in names), default=0)
    if not 0 < len(names) <= _FEW or not 2 < longest <= _SHORT:
        return
    size = max(shared.least_size(figure, CARD), *(float(name.get_fontsize()) for name in names))
    room = 72 * figure.get_figwidth() / 2 / len(names)  # a legend may take the other half
    slanted = longest * 0.6 * size > room
    for name in names:
        name.set_fontsize(size)
        if slanted and name.get_rotation() == 0:
            name.set(rotation=30, ha="right", rotation_mode="anchor")


def _place(axes: Axes) -> SubplotSpec:
    place = axes.get_subplotspec()
    assert place is not None
    return place


def _first(texts: Mapping[Axes, str], order: Iterable[Axes]) -> str:
    return next((texts[axes] for axes in order if texts.get(axes)), "")
