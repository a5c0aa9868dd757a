"""Declare a report: its columns and its charts; one engine makes tables, figures and final numbers of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym._tags import tag
from lightning_sym.figures import Chart
from lightning_sym.reports.cells import Row, text_table
from lightning_sym.reports.table import ResultTable, RunResults


@dataclass(frozen=True)
class Column:
    """A column of the tables of a report.

    Attributes:
        name: Its name; several names with commas between them share one unit.
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
        **layout: For :func:`lightning_sym.reports.cells.text_table`.
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
        title: Title of the table on the terminal; ``{title}`` is replaced by that of the report.
        shown: Name of the table that is printed and that has the final numbers; default the first one.
        layout: How the printed table is laid out, see :func:`lightning_sym.reports.cells.text_table`.
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
            yield from chart.named(name, rows, title)
        yield from others
