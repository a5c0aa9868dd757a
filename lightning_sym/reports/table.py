"""Results of a finished run: tables with units, figures, and the summary on the terminal."""

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import render
from rich.padding import Padding
from rich.table import Table

from lightning_sym._files import write_atomically
from lightning_sym._notebook import Tabular, html_table, python_number
from lightning_sym.reports.cells import Row, finite, text_table

if TYPE_CHECKING:
    import pandas as pd


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
        for what, place in {**places, "logs": run, "watch": f"tensorboard --logdir {run}"}.items():
            console.print(f"  {what:8}{place}", highlight=False, markup=False, soft_wrap=True)


def _unit(name: str, units: Mapping[str, str]) -> str:
    """Return the unit of a number such as ``barrier/test_loss/line``, which the column ``loss_barrier`` has."""
    of_columns = {column.lower(): unit for columns, unit in units.items() for column in columns.split(", ")}
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
