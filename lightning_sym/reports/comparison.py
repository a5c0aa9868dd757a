"""Compare finished runs: settings that differ, and the numbers of each group of seeds."""

import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from scipy.stats import t as student

from lightning_sym._notebook import html_table
from lightning_sym._runs import FinishedRun, is_seed
from lightning_sym._statistics import student_interval
from lightning_sym._tags import is_detail
from lightning_sym._text import ranges
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import ResultTable, broken_name, counted, text_table, unique

UNITS = {
    "runs": "runs with this number, which differ by seed only",
    "mean": "over these runs, in the unit of the number",
    "std": "standard deviation over these runs, sample form; empty for one run",
    "low, high": "95 % interval for the mean, Student's t; empty for one run",
    "difference": "mean less that of the first group",
    "difference_low, difference_high": "95 % interval for the difference, Welch's t; empty if a group has one run",
    "decided": "whether that interval leaves out 0",
}
_MOST_ROWS = 40  # on the terminal
_MOST_PANELS = 12
_LIST = 40  # characters of a list on one line
# The first group is blue; vermilion are those that differ from it.
_ROLES = {"first": {"color": "#0072b2"}, "differs": {"color": "#d55e00"}, "open": {"color": "#1b1b1b"}}
_DOTS = Chart(
    [
        Panel(
            [
                Marks("value", "group", ["role"], "dots", looks=_ROLES, look={"ms": 10, "alpha": 0.4}, table="runs"),
                Marks("mean", "group", ["role"], "error", error=[("low", "high")],
                      spans=["95 % interval over seeds"], looks=_ROLES, look={"ls": "", "ms": 8}),
            ],
            "{number}", by=["number"], flat=True,
        )
    ],
    "{title}",
    columns=2, size=(4.0, 2.0), legend="",
)  # fmt: skip
_MOST_UNITS = 8
# No results: these numbers depend on the machine and its load.
_OF_MACHINE = ("time/", "memory/")

Values = Mapping[str, Mapping[str, float]]  # by run, by name of the number


@dataclass(frozen=True)
class RunGroup:
    """Runs with settings that differ by seeds only.

    Attributes:
        name: Common beginning of the runs' names.
        runs: The runs.
    """

    name: str
    runs: Sequence[FinishedRun]


@dataclass(frozen=True)
class Comparison:
    """Comparison of several runs.

    Attributes:
        table: A row for each number and group of runs.
        settings: Settings that differ between groups, by option: one text for each group.
        groups: The groups, in the order of the runs.
        values: Numbers of each run, by its name and the name of the number.
        notes: Remarks for the reader.
    """

    table: ResultTable
    settings: Mapping[str, Sequence[str]]
    groups: Sequence[RunGroup]
    values: Values
    notes: Sequence[str]

    def _repr_html_(self) -> str:
        settings = [
            {"setting": name, **{group.name: text for group, text in zip(self.groups, texts, strict=True)}}
            for name, texts in self.settings.items()
        ]
        return (html_table("settings that differ", settings) if settings else "") + self.table._repr_html_()

    def show(self, console: Console) -> None:
        """Print the settings that differ, a row for each number and a column for each group, and the notes.

        Args:
            console: Console to print to.
        """
        names = [group.name for group in self.groups]
        counts = ["runs", *(str(len(group.runs)) for group in self.groups)]
        settings = [[broken_name(option, 20), *map(_lines, texts)] for option, texts in self.settings.items()]
        lines = [counts, None, *settings] if settings else [counts]
        # Titles by themselves: above a narrow table they would be broken into lines.
        console.print("Settings that differ" if settings else "Runs of one setting", style="italic")
        console.print(text_table("", ["setting", *names], lines))
        console.print(self.table.what, style="italic", highlight=False, markup=False)
        console.print(self._shown(names))
        for note in self.notes:
            console.print(Padding(note, (0, 0, 0, 2), expand=False), highlight=False, markup=False)

    def _shown(self, names: Sequence[str]) -> Table:
        lines = []
        ends = {row["number"].rpartition(": ")[2] for row in self.table.rows}
        same = f": {ends.pop()}" if len(ends) == 1 else ""  # the column of all rows, which the title names
        for number, of_number in itertools.groupby(self.table.rows, key=lambda row: row["number"]):
            rows = {row["group"]: row for row in of_number}
            lines.append([number.removesuffix(same), *(_cell(rows.get(name)) for name in names)])
        more = [[f"+{len(lines) - _MOST_ROWS} more"]] if len(lines) > _MOST_ROWS else []
        return text_table("", ["", *names], [*lines[:_MOST_ROWS], *more])

    def figure(self) -> Figure:
        """Draw a panel for each number, of many only the first: a dot for each run, means with intervals."""
        shown = unique(self.table.rows, "number")[:_MOST_PANELS]
        first = self.groups[0].name
        means = [
            {**row, "role": "first" if row["group"] == first else "differs" if row["decided"] else "open"}
            for row in self.table.rows
            if row["number"] in shown
        ]
        runs = [
            {**row, "value": found[row["number"]]}
            for row in means
            for group in self.groups
            for run in group.runs
            if group.name == row["group"] and row["number"] in (found := self.values.get(run.name, {}))
        ]
        return _DOTS.draw({"means": means, "runs": runs}, self.table.what)


def compare_runs(
    runs: Sequence[FinishedRun], *, metrics: Sequence[str] = (), table: str | None = None, ignore: Sequence[str] = ()
) -> Comparison:
    """Compare the final numbers of runs; runs that differ by seeds only form a group with a mean.

    Args:
        runs: At least two. Values do not depend on their order; the other groups are compared with the first one.
        metrics: Patterns such as ``"test/*"``: which numbers to compare, also of those that were logged, or which
            columns of the table. Default: the reports' final numbers without details, or for runs without reports
            the last logged values; for a table all columns with numbers.
        table: Name of a table of results, to compare its rows; None for the runs' own numbers.
        ignore: Patterns of options that make no difference, as seeds make none.

    Raises:
        ValueError: If there are fewer than two runs, a table is not there, or they have no number in common.
    """
    if len(runs) < 2:
        alone = f", got {runs[0].folder} alone" if runs else ""
        raise ValueError(f"Expected two or more runs that have ended{alone}; several seeds of one setting will do.")
    found, units = _numbers(runs, metrics) if table is None else _cells(runs, table, metrics)
    notes: list[str] = []
    groups = []
    for group in _groups(runs, ignore):
        groups.append(RunGroup(group.name, list(_different(group, found, notes))))
        notes += _shared_members(groups[-1])
    names = list(dict.fromkeys(name for run in runs for name in found[run.name]))
    shared = [name for name in names if sum(_in(group, name, found) for group in groups) >= min(2, len(groups))]
    if not shared:
        a, b = groups[0].runs[0], groups[-1].runs[-1]
        has = [", ".join(list(found[run.name])[:4]) or "none" for run in (a, b)]
        asked = f" like {', '.join(metrics)}" if metrics else ""
        raise ValueError(
            f"The runs have no number{asked} in common: {a.folder} has {has[0]}; {b.folder} has {has[1]}. Choose runs "
            "or numbers (--metrics PATTERN) that go together."
        )
    notes += _missing(groups, shared, found)
    if single := [name for name in names if name not in shared]:
        notes.append(f"in one group only, and left out: {', '.join(single[:6])}{' ...' * (len(single) > 6)}")
    rows = [row for name in shared for row in _rows(name, groups, found)]
    what = "Numbers at the end"
    if table is not None:
        columns = {name.rpartition(": ")[2] for name in shared}
        what = f"{columns.pop() if len(columns) == 1 else 'Numbers'} in the table {table}"
    kept = [run.name for group in groups for run in group.runs]
    what += f" of {counted(len(kept), 'run')} in {counted(len(groups), 'group')}"
    about = {
        "groups": {group.name: [str(run.folder) for run in group.runs] for group in groups},
        "settings": (settings := _settings(groups, ignore)),
        "units_of_numbers": {name: units[name] for name in shared if name in units},
        "values": {name: {number: found[name].get(number) for number in shared} for name in kept},
        "notes": (said := [*_explained(groups, rows), *notes, *_of_units(shared, units)]),
    }
    return Comparison(ResultTable("comparison", what, rows, UNITS, about), settings, groups, found, said)


def _groups(runs: Sequence[FinishedRun], ignore: Sequence[str]) -> list[RunGroup]:
    """Return the runs by their settings other than seeds; each group has a distinct name."""
    by_settings: dict[tuple[tuple[str, str], ...], list[FinishedRun]] = {}
    for run in runs:
        own = {option: text for option, text in run.settings.items() if not (is_seed(option) or _like(option, ignore))}
        by_settings.setdefault(tuple(sorted(own.items())), []).append(run)
    together = list(by_settings.values())
    stems = [_stem([run.name for run in group]) for group in together]
    return [
        RunGroup(stem if stem and stems.count(stem) == 1 else group[0].name, group)
        for stem, group in zip(stems, together, strict=True)
    ]


def _stem(names: Sequence[str]) -> str:
    """Return the common beginning of names, ``wide`` of ``wide-seed0`` and ``wide-seed1``."""
    if len(names) == 1:
        return names[0]
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    stem = "".join(letters[0] for letters in alike)
    if all(name[len(stem) :][:1].isdigit() for name in names):  # the first digits of 100 and 101
        stem = stem.rstrip("0123456789")
    return re.sub(r"[-_./= ]+(?:s|seed)?[-_./= ]*$", "", stem)


def _like(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _numbers(runs: Sequence[FinishedRun], metrics: Sequence[str]) -> tuple[Values, dict[str, str]]:
    """Return the numbers of each run that are compared, and units."""
    units = {name: unit for run in runs for name, unit in run.units.items()}
    if metrics:
        every = {run.name: {**run.numbers, **run.logged, **run.numbers} for run in runs}
        return {name: _finite(own, lambda key: _like(key, metrics)) for name, own in every.items()}, units
    if all(any(not is_detail(key) for key in run.numbers) for run in runs):
        return {run.name: _finite(run.numbers, lambda key: not is_detail(key)) for run in runs}, units
    return {run.name: _finite(run.logged, _is_result) for run in runs}, units


def _finite(numbers: Mapping[str, float], chosen: Callable[[str], bool]) -> dict[str, float]:
    """Return the finite numbers with a chosen name."""
    return {name: value for name, value in numbers.items() if math.isfinite(value) and chosen(name)}


def _is_result(name: str) -> bool:
    return not is_detail(name) and not name.startswith(_OF_MACHINE)


def _cells(runs: Sequence[FinishedRun], table: str, metrics: Sequence[str]) -> tuple[Values, dict[str, str]]:
    """Return the numbers in a table of each run, by distinguishing values of the row and by column."""
    tables = {run.name: run.table(table) for run in runs}
    every = [found["rows"] for found in tables.values()]
    if bare := next((run for run in runs if not tables[run.name]["rows"]), None):
        raise ValueError(f"The table {table} of {bare.folder} has no rows; choose another one, or leave the run out.")
    columns = [name for name in (every[0][0] if every[0] else {}) if all(name in row for rows in every for row in rows)]
    count = next((n for n in range(len(columns)) if all(_unique(rows, columns[:n]) for rows in every)), None)
    if count is None:
        raise ValueError(f"The rows of the table {table} cannot be told apart in all runs; choose another one.")
    keys = columns[:count]
    for key in columns[:count][::-1]:  # without names that say the same as others
        fewer = [column for column in keys if column != key]
        keys = fewer if all(_unique(rows, fewer) for rows in every) else keys
    found: dict[str, dict[str, float]] = {}
    units: dict[str, str] = {}
    for run, content in tables.items():
        found[run] = {}
        for row in content["rows"]:
            place = " ".join(str(row[key]) for key in keys)
            for column in columns[count:]:
                value = row[column]
                if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                    continue
                name = f"{place}: {column}" if place else column
                if not metrics or _like(column, metrics) or _like(name, metrics):
                    found[run][name] = float(value)
                    units |= {name: content["units"][column]} if column in content.get("units", {}) else {}
    return found, units


def _unique(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    return len({tuple(str(row[column]) for column in columns) for row in rows}) == len(rows)


def _different(group: RunGroup, found: Values, notes: list[str]) -> Iterator[FinishedRun]:
    """Yield the runs of a group without those that repeat another one to the last digit: they are one observation."""
    seen: dict[tuple[Any, ...], str] = {}
    for run in sorted(group.runs, key=lambda run: run.name):
        every = {name: value for name, value in {**run.logged, **found[run.name]}.items() if _is_result(name)}
        first = seen.setdefault(tuple(sorted(every.items())), run.name) if every else run.name
        if first != run.name:
            notes.append(f"{run.name} repeats {first} to the last digit (its task uses another seed) and is left out")
        else:
            yield run


def _shared_members(group: RunGroup) -> list[str]:
    for a, b in itertools.combinations(group.runs, 2):
        if both := sorted(a.members & b.members):
            return [
                f"{a.name} and {b.name} have members {ranges(both)} in common: their interval is too narrow; give "
                f"seeds that are {len(a.members)} apart"
            ]
    return []


def _missing(groups: Sequence[RunGroup], names: Sequence[str], found: Values) -> list[str]:
    """Return a sentence about each run that means leave out although its group has them: they may have diverged."""
    notes = []
    for group in groups:
        known = [name for name in names if _in(group, name, found)]
        for run in group.runs:
            if lacking := [name for name in known if name not in found[run.name]]:
                shown = f"{', '.join(lacking[:4])}{' ...' * (len(lacking) > 4)}"
                notes.append(f"{run.name} has no finite {shown}: means of {group.name} leave this run out there")
    return notes


def _in(group: RunGroup, name: str, found: Values) -> bool:
    return any(name in found[run.name] for run in group.runs)


def _rows(number: str, groups: Sequence[RunGroup], found: Values) -> Iterator[dict[str, Any]]:
    first: list[float] | None = None
    for group in groups:
        # In one order, so that sums do not depend on that of the arguments.
        values = sorted(found[run.name][number] for run in group.runs if number in found[run.name])
        if not values:
            continue
        several = len(values) > 1
        low, high = student_interval(values) if several else (None, None)
        mean = float(np.mean(values))
        ends = difference_interval(values, first) if several and first is not None and len(first) > 1 else None
        yield {
            "number": number,
            "group": group.name,
            "runs": len(values),
            "mean": mean,
            "std": float(np.std(values, ddof=1)) if several else None,
            "low": low,
            "high": high,
            "difference": None if first is None else mean - float(np.mean(first)),
            "difference_low": ends and ends[0],
            "difference_high": ends and ends[1],
            "decided": None if ends is None else not ends[0] <= 0 <= ends[1],
        }
        first = values if first is None else first


def difference_interval(values: Sequence[float], others: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return Welch's interval for the difference of the means of two groups of independent values.

    Args:
        values: At least two.
        others: At least two; their mean is subtracted.
        level: Coverage, in (0, 1).

    Returns:
        Lower and upper end. Values that are all the same have an interval of no length.
    """
    if len(set(values)) == len(set(others)) == 1:  # no degrees of freedom
        return values[0] - others[0], values[0] - others[0]
    parts = [float(np.var(own, ddof=1)) / len(own) for own in (values, others)]
    freedom = sum(parts) ** 2 / sum(p**2 / (len(o) - 1) for p, o in zip(parts, (values, others), strict=True))
    difference = float(np.mean(values)) - float(np.mean(others))
    reach = float(student.ppf((1 + level) / 2, freedom)) * math.sqrt(sum(parts))
    return difference - reach, difference + reach


def _settings(groups: Sequence[RunGroup], ignore: Sequence[str]) -> dict[str, list[str]]:
    """Return the common settings that differ between groups, and the seeds that vary."""
    every = list(dict.fromkeys(option for group in groups for run in group.runs for option in run.settings))
    differ = {}
    for option in every:
        of_groups = [list(dict.fromkeys(run.settings.get(option, "") for run in group.runs)) for group in groups]
        varies = len({text for texts in of_groups for text in texts}) > 1
        everywhere = all(option in run.settings for group in groups for run in group.runs)
        if everywhere and varies and not (_like(option, ignore) and not is_seed(option)):
            differ[option] = [_together(texts) for texts in of_groups]
    return differ


def _together(texts: Sequence[str]) -> str:
    whole = all(text.isdigit() for text in texts)
    return ranges(sorted(map(int, texts))) if whole and len(texts) > 1 else ", ".join(texts)


def _explained(groups: Sequence[RunGroup], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    if any(row["low"] is not None for row in rows):
        notes.append("in brackets: 95 % interval for the mean over runs that differ by seed only, Student's t")
    if any(row["difference_low"] is not None for row in rows):
        notes.append(f"*: differs from {groups[0].name}, by the 95 % interval for the difference, Welch's t")
    elif len(groups) > 1:
        notes.append(f"no difference from {groups[0].name} can be decided: that takes two seeds or more on both sides")
    return notes


def _of_units(names: Sequence[str], units: Mapping[str, str]) -> list[str]:
    """Return the units of numbers, each unit once."""
    same: dict[str, list[str]] = {}
    for name in names:
        if name in units:
            column = name.rpartition(": ")[2]
            same.setdefault(units[name], []).append(column)
    said = [f"{', '.join(list(dict.fromkeys(own))[:4])}: {unit}" for unit, own in same.items()]
    return said[:_MOST_UNITS]


def _lines(text: str) -> str:
    return text.replace(", ", ",\n") if len(text) > (_LIST if text.startswith("[") else 16) else text


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = _precise(row["high"] - row["low"] if row["low"] is not None else 0.0, row["mean"])
    mark = " *" if row["decided"] else ""
    interval = "" if row["low"] is None else f"\n\\[{text(row['low'])}, {text(row['high'])}]"
    return f"{text(row['mean'])}{mark}{interval}"


def _precise(length: float, value: float) -> Callable[[float], str]:
    """Return a formatter with as many digits as an interval of this length resolves, at least four."""
    if not length or not 1e-4 <= abs(value) < 1e6:
        return "{:.4g}".format
    digits = max(2 - math.floor(math.log10(length)), 0)
    return f"{{:.{min(digits, 8)}f}}".format
