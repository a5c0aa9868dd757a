"""Figures declared by the columns of a table: rows in, matplotlib figure out."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogFormatter, MaxNLocator, NullLocator

from lightning_sym.figures import _panels as shared
from lightning_sym.figures._panels import Values
from lightning_sym.figures._room import VALUE

Row = Mapping[str, Any]
Text = str | Callable[[Row], str]
Kind = Literal["line", "lines", "dots", "error", "bars", "steps", "area"]
_COLORS = (shared.BLUE, shared.VERMILION, shared.SKY, shared.ORANGE, shared.GREEN, shared.PINK, shared.BLACK)
# Beyond this many points the axis of penalties is logarithmic, if there are larger ones.
_LINEAR = 10.0
_LINES = ("line", "lines", "steps", "error")
_MOST = 12  # names in a legend
_MARKED = 60  # points of a line with markers
_TICKED = 8  # whole numbers on a logarithmic axis that all have ticks, such as widths


@dataclass(frozen=True)
class Marks:
    """Marks of a panel: one series for each group of rows.

    Rows of one group with the same ``x`` are observations, for example of several members. A ``line`` is their mean,
    with a band from the lowest to the highest, or the given interval. The legend names bands and error bars.

    Attributes:
        y: Column of the heights; None, NaN, and rows without the column are left out.
        x: Column of the places. Text gives one tick per name.
        group: Columns with one series per combination of values.
        kind: ``line``, ``lines`` (one for each observation), ``dots``, ``error`` (bars of the interval), ``bars``,
            ``steps``, or ``area`` (stacked).
        label: Name of a series in the legend: text with columns in braces, or a function of a row. Series with the
            same label have the same color. Default: the values of ``group``.
        error: Columns of the ends of the interval, or one column of standard errors, which are combined over
            observations. Further ones are used where those before are None.
        spans: Names of these intervals in the legend, as many as in ``error``; default: their columns.
        where: Which rows are drawn: values by column (a tuple lists several), or a function of a row.
        factor: Multiplies heights and intervals.
        values: Format of the mean printed next to each of the ``bars``; empty for none.
        looks: Properties of the lines by the label, for example ``label``, ``color`` and ``ls``.
        look: Properties of all lines.
        table: Name of the table; default the first one.
        color: Series with the same text have the same color: text with columns in braces. Default: the label.
    """

    y: str
    x: str
    group: Sequence[str] = ()
    kind: Kind = "line"
    label: Text | None = None
    error: Sequence[str | tuple[str, str]] = ()
    spans: Sequence[str] = ()
    where: Mapping[str, Any] | Callable[[Row], bool] = field(default_factory=dict)
    factor: float = 1.0
    values: str = ""
    looks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    look: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""
    color: str = ""

    def __post_init__(self) -> None:
        if self.spans and len(self.spans) != len(self.error):
            raise ValueError(
                f"spans must name the {len(self.error)} intervals in error, one name for each, got {len(self.spans)}."
            )

    def span(self, place: int) -> str:
        """Return the name of an interval.

        Args:
            place: Its place in ``error``.
        """
        if self.spans:
            return self.spans[place]
        error = self.error[place]
        return f"± {error}" if isinstance(error, str) else " to ".join(error)

    def rows(self, tables: Mapping[str, Sequence[Row]]) -> list[Row]:
        """Return the rows that are drawn.

        Args:
            tables: Rows by the name of the table.
        """
        rows = tables[self.table] if self.table else next(iter(tables.values()))
        order = {place: index for index, place in enumerate(dict.fromkeys(row.get(self.x) for row in rows))}
        rows = [row for row in rows if self.y in row]
        if any(isinstance(row[self.x], str) for row in rows):
            rows.sort(key=lambda row: order[row[self.x]])
        if callable(self.where):
            return list(filter(self.where, rows))
        wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in self.where.items()}
        return [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]


@dataclass(frozen=True)
class Panel:
    """One panel, or one for each value of some columns.

    Attributes:
        marks: Drawn on top of one another.
        title: Above the panel: text with columns in braces, or a function of a row.
        xlabel: Name of the horizontal axis.
        ylabel: Name of the vertical axis.
        by: Columns: one panel for each combination of their values, in the order of the rows.
        log: Logarithmic axes: ``"x"``, ``"y"`` or ``"xy"``. Heights that are not positive are left out.
        bottom: Lower end of the vertical axis; None for that of the data.
        top: Upper end; a function makes it of a row.
        levels: Horizontal lines by their label; a function makes them of a row.
        whole: Whether places are whole numbers, such as epochs.
        flat: Whether to swap the axes, for long names of places.
        names: Printed names of places.
        points: Whether heights are points of accuracy: linear up to 10, logarithmic above if there are larger ones.
    """

    marks: Sequence[Marks]
    title: Text = ""
    xlabel: str = ""
    ylabel: str = ""
    by: Sequence[str] = ()
    log: str = ""
    bottom: float | None = None
    top: float | Callable[[Row], float | None] | None = None
    levels: Mapping[str, float] | Callable[[Row], Mapping[str, float]] = field(default_factory=dict)
    whole: bool = False
    flat: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    points: bool = False

    def split(self, tables: Mapping[str, Sequence[Row]]) -> Iterator[tuple[Row, dict[int, list[Row]]]]:
        """Yield for each panel its first row, and the rows of each of its marks.

        Args:
            tables: Rows by the name of the table.
        """
        rows = {index: marks.rows(tables) for index, marks in enumerate(self.marks)}
        keys = dict.fromkeys(_key(row, self.by) for own in rows.values() for row in own)
        for key in keys:
            own = {index: [row for row in found if _key(row, self.by) == key] for index, found in rows.items()}
            yield next(row for found in own.values() for row in found), own


def epoch_panel(title: str, ylabel: str, *marks: Marks, **look: Any) -> Panel:
    """Return a panel over the epochs of training.

    Args:
        title: Above the panel.
        ylabel: Name of the vertical axis.
        *marks: Drawn on top of one another.
        **look: Further fields of :class:`Panel`.
    """
    return Panel(marks, title, "epoch", ylabel, whole=True, **look)


@dataclass(frozen=True, eq=False)
class _Series:
    """The numbers of a series: places ``[T]``, heights ``[T, M]`` and the interval ``[T]``, NaN where there is none.

    ``spans`` names the intervals that are there.
    """

    label: str
    shade: str
    places: list[Any]
    heights: Values
    low: Values
    high: Values
    spans: list[str]
    look: dict[str, Any]

    @property
    def mean(self) -> Values:
        """Mean over observations. Shape ``[T]``."""
        known = np.isfinite(self.heights)
        total = np.where(known, self.heights, 0).sum(1)
        return np.asarray(np.divide(total, known.sum(1), out=np.full(len(total), np.nan), where=known.any(1)))

    @property
    def lengths(self) -> Values:
        """Lengths of the error bars below and above the mean, at least 0. Shape ``[2, T]``."""
        return np.nan_to_num([self.mean - self.low, self.high - self.mean], nan=0, posinf=0, neginf=0).clip(min=0)


@dataclass(frozen=True)
class Chart:
    """A figure: panels of the columns of tables.

    Attributes:
        panels: Panels, row by row; a panel without rows is left out.
        title: Title of the figure; ``{title}`` is replaced by the subject of the report. Default: that of its table.
        columns: Panels in a row; 0 chooses one or two.
        size: Width and height of a panel in inches; None chooses them.
        legend: One ``below`` or ``beside`` all panels, one in ``each``, one ``above`` the data of each, or none.
        share: Axes that panels share: ``"x"``, ``"y"``, both, or ``"r"`` for vertical axes of a row.
    """

    panels: Sequence[Panel]
    title: str | None = None
    columns: int = 0
    size: tuple[float, float] | None = None
    legend: Literal["below", "beside", "each", "above", ""] = "below"
    share: str = ""

    def draw(self, tables: Mapping[str, Sequence[Row]] | Sequence[Row], title: str = "") -> Figure:
        """Draw the figure.

        Args:
            tables: Rows by the name of the table, or the rows of the only one.
            title: Subject of the report.

        Raises:
            ValueError: If there is nothing to draw.
        """
        named = tables if isinstance(tables, Mapping) else {"": tables}
        return _drawn(self, named, ("{title}" if self.title is None else self.title).format(title=title))

    def named(
        self, name: str, tables: Mapping[str, Sequence[Row]] | Sequence[Row], title: str = ""
    ) -> Iterator[tuple[str, Figure]]:
        """Yield the name and the figure, if there is something to draw, when it is asked for.

        Args:
            name: Name of the figure.
            tables: As for :meth:`draw`.
            title: Subject of the report.
        """
        named = tables if isinstance(tables, Mapping) else {"": tables}
        if any(True for panel in self.panels for _ in panel.split(named)):
            yield name, self.draw(named, title)


@shared.readable
def _drawn(chart: Chart, tables: Mapping[str, Sequence[Row]], title: str) -> Figure:
    split = [(panel, row, rows) for panel in chart.panels for row, rows in panel.split(tables)]
    shared.check_some(panels=split)
    columns = min(chart.columns or (1 if len(split) <= 3 else 2), len(split))
    width, height = chart.size or (6.4 if columns == 1 else 3.5, 2.8)
    size = max(6.4, width * columns), 1.0 + height * -(-len(split) // columns)
    sharing: Any = {"sharex": "x" in chart.share, "sharey": "row" if "r" in chart.share else "y" in chart.share}
    figure, places = shared.panels(*size, len(split), columns, title=title, **sharing)
    series = [
        [(marks, list(_series(marks, rows[index]))) for index, marks in enumerate(panel.marks)]
        for panel, _, rows in split
    ]
    for together in [[one] for one in series] if chart.legend in ("each", "above") else [series]:
        _tell_apart(together)
    for axes, (panel, row, rows), found in zip(places, split, series, strict=True):
        ticks = dict.fromkeys(one[marks.x] for index, marks in enumerate(panel.marks) for one in rows[index])
        _draw(axes, panel, row, found, list(ticks) if any(isinstance(tick, str) for tick in ticks) else [])
    for axes, (panel, row, _) in zip(places, split, strict=True):
        _end(axes, panel, row)
    shared.drop_repeated(places, columns)
    pointed = [(axes, found) for axes, (panel, *_), found in zip(places, split, series, strict=True) if panel.points]
    if pointed:
        _penalties([axes for axes, _ in pointed], [one for _, found in pointed for _, own in found for one in own])
    _legend(figure, places, chart.legend, _spans(split, series))
    return figure


def _key(row: Row, columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in columns)


def _text(text: Text, row: Row) -> str:
    return text(row) if callable(text) else text.format_map(row)


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def _series(marks: Marks, rows: Sequence[Row]) -> Iterator[_Series]:
    """Yield the series of marks, one for each group and label."""

    def label(row: Row) -> str:
        return ", ".join(map(str, _key(row, marks.group))) if marks.label is None else _text(marks.label, row)

    def interval(found: Sequence[Row]) -> tuple[float, float, str]:
        for place, one in enumerate(marks.error):
            if isinstance(one, tuple):
                low, high = (_number(found[0].get(end)) for end in one)
            else:  # standard errors of independent observations
                known = [row for row in found if np.isfinite([_number(row.get(one)), _number(row[marks.y])]).all()]
                mean = np.mean([row[marks.y] for row in known]) if known else np.nan
                half = np.sqrt(sum(row[one] ** 2 for row in known)) / max(1, len(known))
                low, high = float(mean - half), float(mean + half)
            if np.isfinite([low, high]).all():
                return marks.factor * low, marks.factor * high, marks.span(place)
        return np.nan, np.nan, ""

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*_key(row, marks.group), label(row)), []).append(row)
    for key, own in groups.items():
        by_place: dict[Any, list[Row]] = {}
        for row in own:
            by_place.setdefault(row[marks.x], []).append(row)
        heights = np.full((len(by_place), max(map(len, by_place.values()))), np.nan)
        for place, found in enumerate(by_place.values()):
            heights[place, : len(found)] = [marks.factor * _number(row[marks.y]) for row in found]
        lows, highs, names = zip(*map(interval, by_place.values()), strict=True)
        spans = list(dict.fromkeys(filter(None, names)))
        look = {"label": key[-1], **marks.look, **marks.looks.get(key[-1], {})}
        shade = marks.color.format_map(own[0]) if marks.color else key[-1]
        yield _Series(look.pop("label"), shade, list(by_place), heights, np.array(lows), np.array(highs), spans, look)


def _tell_apart(series: Sequence[Sequence[tuple[Marks, Sequence[_Series]]]]) -> None:
    """Give each series the color, the marker and the dashes of its label, the same in all panels.

    Properties that are declared stay. Where some dashes are, they have a meaning, and no others are added.
    """
    every = [(marks.kind, one) for panel in series for marks, found in panel for one in found]
    fixed = {one.shade: one.look["color"] for _, one in every if "color" in one.look}
    shades = list(dict.fromkeys(one.shade for _, one in every))
    free = [shade for shade in shades if shade not in fixed]
    chosen = _COLORS if len(free) <= len(_COLORS) else shared.line_colors(len(free))
    colors = {**dict(zip(free, chosen, strict=False)), **fixed}
    dashed = any(one.look.get("ls", "-") != "-" for kind, one in every if kind in _LINES)
    of_lines = [shade for shade in shades if any(kind in _LINES and one.shade == shade for kind, one in every)]
    for kind, one in every:
        one.look.setdefault("color", colors[one.shade])
        if kind not in _LINES or len(of_lines) < 2:
            continue
        place = of_lines.index(one.shade)
        if not dashed:
            one.look["ls"] = one.look.get("ls") or shared.DASHES[place % len(shared.DASHES)]
        few = len(one.places) <= _MARKED and len(of_lines) <= len(shared.MARKERS)
        if kind in ("line", "error") and few and "marker" not in one.look:
            one.look.update(marker=shared.MARKERS[place], ms=one.look.get("ms", 4.5))


def _draw(
    axes: Axes, panel: Panel, row: Row, found: Sequence[tuple[Marks, Sequence[_Series]]], names: Sequence[str]
) -> None:
    every = [one for _, own in found for one in own]
    for marks, own in found:
        stack: Any = 0.0
        for index, one in enumerate(own):
            if not np.isfinite(one.heights).any():
                continue
            x = np.array([names.index(place) if names else place for place in one.places], dtype=float)
            beside = bool(names) and any(set(one.places) & set(other.places) for other in own if other is not one)
            if beside and marks.kind in ("bars", "error"):
                x += (index - (len(own) - 1) / 2) * (0.82 / len(own) if marks.kind == "bars" else 0.07)
            if marks.kind == "area":
                wide = x if len(x) > 1 else x[0] + np.array([-0.5, 0.5])
                ends = np.broadcast_to(stack, wide.shape), np.broadcast_to(stack := stack + one.mean, wide.shape)
                axes.fill_between(wide, *ends, color=one.look["color"], alpha=0.9, lw=0, label=one.label)
            else:
                _add(axes, marks, one, x, panel, 0.74 / len(own) if beside else 0.62)
            if marks.kind == "bars" and marks.values:
                _write(axes, marks, one, x, [other for other in every if other.label == one.label], flat=panel.flat)
    levels = panel.levels(row) if callable(panel.levels) else panel.levels
    for style, (label, level) in zip(itertools.cycle(("--", ":")), levels.items()):
        line = axes.axvline if panel.flat else axes.axhline
        line(level, color=shared.INK, lw=1, ls=style, label=label)
    axes.set_title(_text(panel.title, row), fontsize=10)
    labels = panel.xlabel, panel.ylabel
    axes.set(**dict(zip(("ylabel", "xlabel") if panel.flat else ("xlabel", "ylabel"), labels, strict=True)))
    if names:
        _name(axes, [panel.names.get(name, name) for name in names], flat=panel.flat)
    elif panel.whole:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _scale(axes, panel, every)
    axes.grid(alpha=0.25)


def _add(axes: Axes, marks: Marks, one: _Series, x: Values, panel: Panel, width: float) -> None:
    """Add a series to a panel."""
    heights = np.where(one.heights > 0, one.heights, np.nan) if "y" in panel.log else one.heights
    kind, mean, label = marks.kind, one.mean, one.label
    look = {"lw": 1.8, "label": label, **one.look}
    plain = {name: value for name, value in look.items() if name not in ("ls", "lw", "marker", "ms", "markevery")}
    if kind == "line" and np.isfinite(one.low).any():
        axes.plot(x, mean, **look)
        axes.fill_between(x, one.low, one.high, color=look["color"], alpha=0.15, lw=0)
    elif kind == "line":
        shared.band(axes, x, heights, **look)
    elif kind == "steps":
        axes.step(x, mean, where="mid", **look)
    elif kind == "bars":
        (axes.barh if panel.flat else axes.bar)(x, np.nan_to_num(mean), width, **{"alpha": 0.75, **plain})
        _errors(axes, one, x, panel, {"fmt": "none", "ecolor": shared.INK, "capsize": 2.5})
    elif kind == "error":
        _errors(axes, one, x, panel, {"marker": "o", "ms": 5, "capsize": 2, **look})
    else:  # lines and dots, of each observation
        look = {"ls": "", "marker": ".", "ms": 4, **look} if kind == "dots" else look
        for index, column in enumerate(heights.T):
            axes.plot(*((column, x) if panel.flat else (x, column)), **{**look, "label": None if index else label})


def _write(axes: Axes, marks: Marks, one: _Series, x: Values, every: Sequence[_Series], *, flat: bool) -> None:
    """Write the means of bars beyond all that is drawn under their label, which the numbers would hide."""
    for name, place, mean in zip(one.places, x, one.mean, strict=True):
        if np.isfinite(mean):
            beside = [(other, other.places.index(name)) for other in every if name in other.places]
            top = np.nanmax([0.0, *(y for other, row in beside for y in (*other.heights[row], other.high[row]))])
            look: dict[str, Any] = {"va": "center"} if flat else {"ha": "center"}
            at = (top, place) if flat else (place, top)
            away = (6, 0) if flat else (0, 3)
            axes.annotate(
                format(mean, marks.values),
                at,
                away,
                textcoords="offset points",
                fontsize=8,
                zorder=5,
                gid=VALUE,
                **look,
            )


def _errors(axes: Axes, one: _Series, x: Values, panel: Panel, look: Mapping[str, Any]) -> None:
    shown = np.isfinite(one.mean) if look.get("fmt") != "none" else np.isfinite(one.low)
    lengths = one.lengths[:, shown]
    if panel.flat:
        axes.errorbar(one.mean[shown], x[shown], xerr=lengths, zorder=4, **look)
    else:
        axes.errorbar(x[shown], one.mean[shown], yerr=lengths, zorder=4, **look)


def _scale(axes: Axes, panel: Panel, every: Sequence[_Series]) -> None:
    """Scale the axes of a panel."""
    drawn = np.concatenate([one.heights.ravel() for one in every])
    if "y" in panel.log and (drawn[np.isfinite(drawn)] > 0).any():
        axes.set_yscale("log")
    if "x" in panel.log:
        axes.set_xscale("log")
        places = sorted({float(place) for one in every for place in one.places})
        if len(places) <= _TICKED and all(place.is_integer() for place in places):
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticks(places, [f"{place:.0f}" for place in places])
        else:
            for formatted in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
                formatted(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    if not np.isfinite(drawn).any():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#7f7f7f")


def _end(axes: Axes, panel: Panel, row: Row) -> None:
    """Set the ends of the axis of heights, when everything is drawn: panels may share it."""
    top = panel.top(row) if callable(panel.top) else panel.top
    if panel.bottom is not None or top is not None:
        low, high = axes.get_xlim() if panel.flat else axes.get_ylim()
        low = low if panel.bottom is None else panel.bottom
        ends = low, high + 0.03 * (high - low) if top is None else top
        (axes.set_xlim if panel.flat else axes.set_ylim)(ends)


def _name(axes: Axes, names: Sequence[str], *, flat: bool) -> None:
    """Name the places of an axis; slanted, if the names are long."""
    if flat:
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        return
    upright = max(map(len, names)) > 14 * float(np.clip(9 / len(names), 0.34, 0.85))  # an inch has room for 14 letters
    axes.set_xticks(
        range(len(names)), names, fontsize=8, rotation=50 if upright else 0, ha="right" if upright else "center",
        rotation_mode="anchor" if upright else "default",
    )  # fmt: skip
    axes.set_xlim(-0.6, len(names) - 0.4)


def _penalties(panels: Sequence[Axes], every: Sequence[_Series]) -> None:
    """Scale an axis of penalties that panels share; small penalties stay visible with very large ones."""
    drawn = np.concatenate([(one.mean + one.lengths * [[-1], [1]]).ravel() for one in every])
    finite = drawn[np.isfinite(drawn)]
    lowest, highest = float(finite.min(initial=0.0)), float(finite.max(initial=1.0))
    label, first = "penalty, points of accuracy", panels[0]  # the title names the quantity
    for axes in panels:
        axes.axhline(0, color=shared.INK, lw=0.9, zorder=1)
        axes.set_ylabel(label)
    if highest <= 2.5 * _LINEAR:
        margin = 0.05 * (highest - lowest)
        for axes in panels:
            axes.set_ylim(lowest - margin, highest + margin)
        return
    bottom, top = min(lowest * 1.1, -0.5), highest * 1.15
    ticks = [tick for tick in (-40, -20, -10, -5, 0, 2, 4, 6, 8, 10, 20, 40, 60, 100) if bottom <= tick <= top]
    for axes in panels:  # the linear part takes as much room as the decade above it
        axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.0, subs=[])
        axes.axhspan(_LINEAR, 1e4, color="#f2f2f2", lw=0, zorder=0)
        axes.set_ylabel(f"{label}\n(logarithmic above {_LINEAR:.0f})")
        axes.set_ylim(bottom, top)
    first.yaxis.set_major_locator(FixedLocator(ticks))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _spans(
    split: Sequence[tuple[Panel, Row, Any]], series: Sequence[Sequence[tuple[Marks, Sequence[_Series]]]]
) -> dict[str, Artist]:
    """Return the legend's entries for bands and error bars, by name."""
    found: dict[str, Artist] = {}
    for (panel, *_), drawn in zip(split, series, strict=True):
        for marks, one in ((marks, one) for marks, own in drawn for one in own):
            if marks.kind == "line":
                several = bool((np.isfinite(one.heights).sum(1) > 1).any())
                for name in one.spans or ["lowest to highest"] * several:
                    found.setdefault(name, Patch(color=shared.INK, alpha=0.15, lw=0))
            elif marks.kind in ("error", "bars"):
                for name in one.spans:
                    marker = "_" if panel.flat else "|"
                    found.setdefault(name, Line2D([], [], color=shared.INK, ls="", marker=marker, ms=11))
    return found


def _legend(figure: Figure, places: Sequence[Axes], legend: str, spans: Mapping[str, Artist]) -> None:
    """Name the series, where there are several, and always the bands and error bars."""
    known: dict[str, Artist] = {}
    if legend in ("each", "above"):
        for axes in places:
            (shared.legend_above if legend == "above" else shared.legend_of_some)(axes)
    elif legend:
        for axes in places:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                known.setdefault(label, handle)
        names = list(known)
        if len(names) > _MOST:  # colors go from dark to bright, some are enough
            names = [names[index] for index in np.linspace(0, len(names) - 1, _MOST).round().astype(int)]
        known = {name: known[name] for name in names} if len(names) > 1 else {}
    known |= {name: handle for name, handle in spans.items() if name not in known}
    if known:
        shared.put_legend(figure, list(known.values()), list(known), beside=legend == "beside")
