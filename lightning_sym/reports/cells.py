"""Cells of tables: numbers for files and figures, text for the terminal."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from lightning_sym._tags import details
from lightning_sym._text import without_wrappers

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
        made = Table(box=SIMPLE_HEAD if compact else HEAVY_HEAD, pad_edge=not compact, title_justify="left")
        for index in shown:
            justify: Literal["left", "right"] = "left" if index < names else "right"
            shown_heading = escape(broken_name(headings[index], heading))
            made.add_column(shown_heading, justify=justify, no_wrap=headings[index] in whole)
        for cells in lines:
            if cells is None:
                made.add_section()
            else:
                made.add_row(*(_plain(_cut(cells[index], most)) for index in shown if index < len(cells)))
        return made

    everything = range(len(columns))
    found = next((one for lengths in _LENGTHS if _width(one := table(lengths, everything)) <= _WIDTH), None)
    if found is None:
        found = Table.grid()
        for shown in _blocks(everything, names, lambda shown: _width(table(_LENGTHS[-1], shown)) <= _WIDTH):
            found.add_row(table(_LENGTHS[-1], shown))
    found.title, found.title_justify = escape(title), "left"
    return found


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


def _plain(cell: str) -> str:
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
    for tag, of_all in values.items():
        known = {number: value for number, value in of_all.items() if math.isfinite(value)}
        if known:
            scalars[tag] = math.fsum(known.values()) / len(known)
        if named:
            scalars |= details({f"{tag}/member-{number:04d}": value for number, value in known.items()})
    return scalars


def picked(holder: object, *names: str) -> dict[str, Any]:
    """Return attributes by name, for the facts about a table."""
    return {name: getattr(holder, name) for name in names}
