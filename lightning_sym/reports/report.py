"""Declare a report: its columns and its charts; one engine makes tables, figures and final numbers of them."""

import csv
import html
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from matplotlib.figure import Figure
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape, render
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_sym._files import write_atomically
from lightning_sym._notebook import Tabular, html_table, python_number
from lightning_sym._tags import details, tag
from lightning_sym._text import without_wrappers
from lightning_sym.figures import Chart

if TYPE_CHECKING:
    import pandas as pd
Row = Mapping[str, Any]
_BOLD = "[bold]"
# Default width of a terminal; the greatest length of words and lines of headings at this width.
_WIDTH = 80
_HEADING = 12
_LENGTHS = [*((_WIDTH, heading) for heading in (_WIDTH, 24, 16, _HEADING)), *((n, _HEADING) for n in range(76, 15, -4))]


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    whole: Collection[str] = (),
    *,
    names: int = 1,
    compact: bool = False,
) -> Table:
    """Return a table for the terminal, the first columns aligned left and the others right, 80 characters at most.

    If a table is wider, headings are wrapped, then long words are shortened in the middle, and then the last
    columns are printed below the others. ``module.`` of wrapped networks is omitted.

    Args:
        title: Above it.
        columns: Their headings.
        rows: The cells of each row, which may be fewer than the columns; None for a line between two rows. Cells are
            plain text, except those of :func:`bold` and :func:`spread_cell`.
        whole: Headings of columns with cells on one line.
        names: How many columns are aligned left.
        compact: Whether to draw no frame, for many columns.
    """
    lines = [None if cells is None else list(map(without_wrappers, cells)) for cells in rows]
    headings, whole = list(map(without_wrappers, columns)), set(map(without_wrappers, whole))

    def table(lengths: tuple[int, int], shown: Sequence[int]) -> Table:
        most, heading = lengths
        made = _Table(box=SIMPLE_HEAD if compact else HEAVY_HEAD, pad_edge=not compact, title_justify="left")
        for index in shown:
            justify: Literal["left", "right"] = "left" if index < names else "right"
            shown_heading = escape(broken_name(headings[index], heading))
            made.add_column(shown_heading, justify=justify, no_wrap=headings[index] in whole)
        for cells in lines:
            if cells is None:
                made.add_section()
            else:
                made.add_row(*(_escaped(_cut(cells[index], most)) for index in shown if index < len(cells)))
        return made

    everything = range(len(columns))
    found = next((one for lengths in _LENGTHS if _width(one := table(lengths, everything)) <= _WIDTH), None)
    if found is None:
        found = _Table.grid()
        for shown in _blocks(everything, names, lambda shown: _width(table(_LENGTHS[-1], shown)) <= _WIDTH):
            found.add_row(table(_LENGTHS[-1], shown))
    found.title, found.title_justify = escape(title), "left"
    return found


class _Table(Table):
    """A table with a title that may be wider than its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text.from_markup(str(self.title), style="table.title")
        with_title, self.title = self.title, None
        yield from super().__rich_console__(console, options)
        self.title = with_title


def _width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _blocks(columns: Sequence[int], names: int, fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """Return the columns of tables printed below one another; each begins with the names."""
    blocks = [list(columns[:names])]
    for column in columns[names:]:
        if len(blocks[-1]) > names and not fits([*blocks[-1], column]):
            blocks.append(list(columns[:names]))
        blocks[-1].append(column)
    return blocks


def broken_name(text: str, most: int) -> str:
    r"""Break a name after dots and hyphens into lines of at most so many characters, if possible.

    Example:
        >>> broken_name("module.functional-relu-2", 12)
        'module.\nfunctional-\nrelu-2'
    """
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for part in re.findall(r"[^.\-_]*[.\-_]|[^.\-_]+", line):
            if lines[-1] and len(lines[-1]) + len(part) > most:
                lines.append("")
            lines[-1] += part
    return "\n".join(cut_middle(line, max(most, 16)) for line in lines)


def _cut(cell: str, most: int) -> str:
    """Shorten the lines of a cell to at most so many characters; numbers and cells with markup stay whole."""
    return cell if "[" in cell else "\n".join(cut_middle(line, most) for line in cell.split("\n"))


def bold(text: str) -> str:
    """Return a bold cell."""
    return f"{_BOLD}{escape(text)}[/bold]"


def _escaped(cell: str) -> str:
    """Return a cell of the table: a name with brackets is no markup."""
    return cell if cell.startswith(_BOLD) or "\\[" in cell else escape(cell)


def cut_middle(text: str, most: int) -> str:
    """Return a text of at most so many characters: of a longer one the middle is left out.

    Example:
        >>> cut_middle("module.layer1.0.functional-relu", 16)
        'module.…nal-relu'
    """
    end = most // 2
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[-end:]}"


def spread_cell(
    text: Callable[[float], str],
    mean: float,
    std: float | None = None,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Return a cell such as ``1.2 ± 0.3``, with an interval in brackets on a second line.

    Args:
        text: Formats a number for printing.
        mean: The number.
        std: Its standard deviation; None if there is none.
        low: Lower end of an interval for the mean; None if there is none.
        high: Upper end.
    """
    cell = text(mean) + ("" if std is None else f" ± {text(std)}")
    return cell if low is None or high is None else f"{cell}\n\\[{text(low)}, {text(high)}]"


def in_points(fraction: float) -> str:
    """Return a fraction in points, with one digit after the point and no "-0.0"."""
    return f"{round(100 * fraction, 1) + 0.0:.1f}"


def stopped_notes(networks: Sequence[Row], stopped: Mapping[int, str], file: str, most: int = 4) -> list[str]:
    """Return the reasons for stopping networks; of further ones, only their number.

    Args:
        networks: With the ``name`` of each.
        stopped: Why, by their place in the list.
        file: File with all of them.
        most: Notes of single ones.
    """
    notes = [f"{networks[index]['name']} was stopped: {reason}" for index, reason in stopped.items()]
    more = [f"{len(notes) - most} more were stopped; see {file}"] if len(notes) > most else []
    return notes[:most] + more


def finite(value: float) -> float | None:
    """Return a number for CSV and JSON, which know no NaN: None if it is not finite."""
    return value if math.isfinite(value) else None


def numeric(value: float | None) -> float:
    """Return a number for figures: NaN for None."""
    return math.nan if value is None else float(value)


def unique(rows: Iterable[Row], column: str) -> list[Any]:
    """Return the different values of a column, in the order of the rows."""
    return list(dict.fromkeys(row[column] for row in rows))


def grouped(rows: Iterable[Row], *columns: str) -> list[tuple[dict[str, Any], list[Row]]]:
    """Group rows by the values of some columns, in the order of the rows.

    Args:
        rows: The rows.
        *columns: Names of the columns.

    Returns:
        For each combination its values by column, and its rows.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns), []).append(row)
    return [(dict(zip(columns, key, strict=True)), own) for key, own in found.items()]


def averages(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float | None]:
    """Return means over rows by column; None where no row has a value.

    Args:
        rows: The rows.
        names: The columns.
    """
    known = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {name: math.fsum(values) / len(values) if values else None for name, values in known.items()}


def counted(number: int, noun: str) -> str:
    """Return ``1 pair`` or ``3 pairs``."""
    return f"{number} {noun}{'s' * (number > 1)}"


def over_members(values: Mapping[str, Mapping[int, float]], *, named: bool) -> dict[str, float]:
    """Return the logged numbers of members: means over finite values, and each member's value.

    Args:
        values: By tag and number of the member.
        named: Whether each member also has its own tag, ``details/<tag>/member-0003``.
    """
    scalars: dict[str, float] = {}
    for quantity, of_all in values.items():
        known = {number: value for number, value in of_all.items() if math.isfinite(value)}
        if known:
            scalars[quantity] = math.fsum(known.values()) / len(known)
        if named:
            scalars |= details({f"{quantity}/member-{number:04d}": value for number, value in known.items()})
    return scalars


def picked(holder: object, *names: str) -> dict[str, Any]:
    """Return attributes by name, for the facts about a table."""
    return {name: getattr(holder, name) for name in names}


@dataclass(frozen=True)
class ResultTable(Tabular):
    """Rows, the units of their columns, and everything needed to make them again.

    Attributes:
        name: The files are named for it: ``name.csv`` and ``name.json``.
        what: Short description of the rows.
        rows: One mapping for each row, all with the same keys in the same order; None and numbers, also of numpy or
            torch, text and booleans.
        units: Units of the columns, by name.
        about: Seeds, settings, versions, fingerprints and other values that JSON can hold.

    Example:
        >>> ResultTable("steps", "cost of each step", [{"step": 1, "time": 0.25}], {"time": "s"}).columns
        ['step', 'time']

    :meth:`to_pandas` returns a table of pandas; a notebook shows the rows.
    """

    name: str
    what: str
    rows: Sequence[Row]
    units: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The names of the columns; none without rows."""
        return list(self.rows[0]) if self.rows else []

    def titled_rows(self) -> tuple[str, Sequence[Row]]:
        """Return the description and the rows."""
        return self.what, self.rows

    def to_pandas(self) -> "pd.DataFrame":
        """Return the rows as a table of pandas; its ``attrs`` have the title, the units and what ``about`` has.

        Raises:
            ImportError: If pandas is not installed.
        """
        frame = super().to_pandas()
        frame.attrs |= {**self.about, "units": dict(self.units)}
        return frame

    def _repr_html_(self) -> str:
        return html_table(*self.titled_rows(), units=self.units)

    def write(self, folder: str | Path) -> None:
        """Write ``<name>.csv`` and, with units and all that is known about the table, ``<name>.json``.

        JSON has no NaN and no infinity: they are null there. Other objects are written as text.

        Args:
            folder: Made if it is not there.

        Raises:
            OSError: If the folder cannot be written to; no partial file remains.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: python_number(value) for name, value in row.items()} for row in self.rows)
        whole = {"what": self.what, "units": self.units, **self.about, "rows": self.rows}
        content = json.dumps(_plain(whole), indent=1)
        write_atomically(Path(folder) / f"{self.name}.csv", text.getvalue())
        write_atomically(Path(folder) / f"{self.name}.json", content + "\n")

    def show(self, console: Console) -> None:
        """Print all rows, numbers with four digits.

        Args:
            console: Console to print to.
        """
        console.print(text_table(self.what, self.columns, [list(map(_text, row.values())) for row in self.rows]))


@dataclass(frozen=True)
class RunResults:
    """Everything a report writes, draws, logs and prints.

    Attributes:
        tables: Written to the folder of results.
        figures: Names and figures, which become ``<name>.png``; an iterator may draw each when it is asked for.
        files: Further files by name.
        texts: Preformatted text for TensorBoard, by tag.
        numbers: Final numbers for the loggers, by tag.
        headline: Name of the run's main number, one of ``numbers``: it is shown with the hyperparameters in
            TensorBoard. None if there is none.
        shown: Printed on the terminal; the first of the tables if None.
        notes: Lines below it, with markup of rich.
        places: The most important files, by a label of at most seven letters: names in the folder of results, or
            paths of others.
    """

    tables: Sequence[ResultTable]
    figures: Iterable[tuple[str, Figure]] = ()
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    headline: str | None = None
    shown: Table | None = None
    notes: Sequence[str] = ()
    places: Mapping[str, str | Path] = field(default_factory=dict)

    @property
    def ending(self) -> ResultTable:
        """The final numbers as a table, each with the unit that the tables say it has; other programs read it."""
        units = {name: unit for table in self.tables for name, unit in table.units.items()}
        rows = [{"number": name, "value": finite(value)} for name, value in self.numbers.items()]
        of_numbers = {name: unit for name in self.numbers if (unit := _unit(name, units))}
        return ResultTable("numbers", "final numbers of the run", rows, of_numbers, {"headline": self.headline})

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(render(note.lstrip()).plain)}</p>" for note in self.notes)
        return "".join(table._repr_html_() for table in self.tables[:1]) + notes

    def show(self, console: Console, folder: Path, run: Path) -> None:
        """Print the summary: a table, the notes, and where the files are.

        Args:
            console: Console to print to.
            folder: Folder of the results.
            run: Folder of the run.
        """
        if self.shown is not None:
            console.print(self.shown)
        elif self.tables:
            self.tables[0].show(console)
        for note in self.notes:
            indent = 2 + len(note) - len(note.lstrip())  # also of the lines that follow
            console.print(Padding(note.lstrip(), (0, 0, 0, indent), expand=False), highlight=False)
        places = {what: folder / place if isinstance(place, str) else place for what, place in self.places.items()}
        for what, place in {**places, "logs": run, "watch": f"tensorboard --logdir {shlex.quote(str(run))}"}.items():
            console.print(f"  {what:8}{place}", highlight=False, markup=False, soft_wrap=True)


def _unit(name: str, units: Mapping[str, str]) -> str:
    """Return the unit of a number such as ``barrier/test_loss/line``, which the column ``loss_barrier`` has."""
    of_columns = {column.lower(): unit for columns, unit in units.items() for column in re.split(r",\s*", columns)}
    parts = [re.sub("^(train|val|test)_", "", part) for part in name.lower().split("/")]
    together = [f"{part}_{other}" for part in parts for other in parts]
    return next((of_columns[column] for column in (*together, *parts) if column in of_columns), "")


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it."""
    value = python_number(value)
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, int | str) else str(value)


def _text(value: object) -> str:
    if value is None:
        return "-"
    value = python_number(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Column:
    """A column of the tables of a report.

    Attributes:
        name: Its name; ``low, high`` are two columns that share a unit.
        unit: The unit, or the meaning of the numbers.
        heading: Heading on the terminal; empty for columns that are only in the files.
        text: How a cell is printed: a format, or a function of the row.
        factor: Factor of the printed numbers, for example 100 for percent.
        number: Name of a final number: text with columns in braces, such as ``barrier/{split}_loss/{path}``. Rows with
            the same name are averaged. Empty for none.
    """

    name: str
    unit: str = ""
    heading: str = ""
    text: str | Callable[[Row], str] = ".4g"
    factor: float = 1
    number: str = ""

    def cell(self, row: Row) -> str:
        """Return the printed cell of a row; ``-`` where there is no value.

        Args:
            row: The row.
        """
        if callable(self.text):
            return self.text(row)
        value = row.get(self.name)
        if value is None or isinstance(value, str):
            return value or "-"
        return format(value if self.factor == 1 else self.factor * value, "" if isinstance(value, bool) else self.text)


def shown_table(title: str, columns: Sequence[Column], rows: Sequence[Row], **layout: Any) -> Table:
    """Return the table of the columns that have a heading, for a terminal of 80 columns.

    Args:
        title: Above it.
        columns: The columns.
        rows: The rows.
        **layout: For :func:`lightning_sym.reports.report.text_table`.
    """
    shown = [column for column in columns if column.heading]
    cells = [[column.cell(row) for column in shown] for row in rows]
    headings = [column.heading for column in shown]
    return text_table(title, headings, cells, **{"whole": headings, **layout})


def final_numbers(columns: Sequence[Column], rows: Sequence[Row]) -> dict[str, float]:
    """Return the final numbers that columns declare: means over the rows with the same name.

    Args:
        columns: The columns.
        rows: The rows; those without a value are left out.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        for column in columns:
            if column.number and row.get(column.name) is not None:
                words = {name: str(value).replace(" ", "_") for name, value in row.items()}
                try:
                    name = tag(column.number.format_map(words))
                except KeyError as error:
                    raise ValueError(
                        f"The number {column.number!r} of the column {column.name} names {error}, which is no column "
                        f"of its rows; they have {', '.join(row)}."
                    ) from None
                found.setdefault(name, []).append(float(row[column.name]))
    return {name: values[0] if len(values) == 1 else sum(values) / len(values) for name, values in found.items()}


@dataclass(frozen=True)
class Report:
    """Declaration of a report: its tables, columns and charts.

    Attributes:
        tables: Short description of the rows of each table, by the name of its files.
        columns: Columns of all tables.
        charts: Charts by the name of the file.
        title: Title of the table on the terminal; ``{title}`` is replaced by the subject of the report.
        shown: Name of the table that is printed and that has the final numbers; default the first one.
        layout: How the printed table is laid out, see :func:`lightning_sym.reports.report.text_table`.
        headline: Name of the main one of the final numbers; default the first one.
        places: The most important files, by a word of at most seven letters.
    """

    tables: Mapping[str, str]
    columns: Sequence[Column] = ()
    charts: Mapping[str, Chart] = field(default_factory=dict)
    title: str = "{title}"
    shown: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    headline: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> dict[str, str]:
        """Units by the names of columns."""
        return {column.name: column.unit for column in self.columns if column.unit}

    def results(
        self, rows: Mapping[str, Sequence[Row]], *, title: str, about: Mapping[str, Any], **further: Any
    ) -> RunResults:
        """Return the tables, figures, final numbers and the printed table of a run.

        Args:
            rows: Rows by the name of the table; a table that is missing is left out. Rows of other names are for
                charts only.
            title: Subject of the report.
            about: Everything needed to make the tables again.
            **further: Fields of :class:`RunResults`, which replace those made here; ``figures`` are appended to
                those of the charts.
        """
        there = {name: own for name, own in rows.items() if own}
        tables = [ResultTable(name, what, rows[name], self.units, about) for name, what in self.tables.items()
                  if name in rows]  # fmt: skip
        own = rows.get(self.shown) or next(iter(there.values()), [])
        numbers = final_numbers(self.columns, own)
        made: dict[str, Any] = {
            "numbers": numbers,
            "headline": self.headline or next(iter(numbers), None),
            "places": self.places,
        }
        if "shown" not in further and any(column.heading for column in self.columns):
            made["shown"] = shown_table(self.title.format(title=title), self.columns, own, **self.layout)
        return RunResults(tables, self._figures(there, title, further.pop("figures", ())), **{**made, **further})

    def _figures(self, rows: Mapping[str, Sequence[Row]], title: str, others: Any) -> Iterator[tuple[str, Figure]]:
        for name, chart in self.charts.items():
            chart = replace(chart, title=self.title) if chart.title is None else chart
            yield from chart.named(name, rows, title)
        yield from others
