"""Networks at several points of their orbits: rounded, pruned, or measured by an objective."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table

from lightning_sym._statistics import student_interval
from lightning_sym._tags import overview, tag
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import Column, Report, Row, RunResults, finite, grouped, in_points, text_table, unique

ARMS = {
    "trained": "as trained",
    "random": "random point",
    "balanced": "balanced",
    "hadamard": "Hadamard",
    "equalized": "equalised",
    "smooth_quant": "SmoothQuant",
    "awq": "AWQ",
    "wanda": "Wanda",
    "range": "least range",
    "l1": "least L1 norm",
    "orbit": "descent",
    "random_orbit": "descent from random",
    **{
        kind: f"descent, {kind} only"
        for kind in ("scales", "cells", "gained", "rotations", "phases", "shifts", "tilts")
    },
}
# Arms that all figures compare; others are in the tables, or would hide these.
_COMPARED = ("trained", "balanced", "hadamard", "equalized", "smooth_quant", "awq", "wanda", "l1", "orbit")
_LOOKS: Mapping[str, Mapping[str, Any]] = {ARMS["trained"]: {"color": "black"}, ARMS["orbit"]: {"lw": 2.5}}
# Quantities that are compared, and whether by quotients.
_QUOTIENTS = {"objective": True, "objective_test": True, "error": True, "accuracy": False}
_QUANTITIES = (*_QUOTIENTS, "seconds")
_TITLES = {
    "tensor": "one range per tensor",
    "channel": "one range per channel",
    "nearest": "to nearest",
    "gptq": "GPTQ",
}
_NAMES = {
    "quantization_error": ("bits", "rounded"),
    "sparsity": ("fraction of weights pruned", "pruned by magnitude"),
}

REPORT = Report(
    {
        "summary": "points of orbits: means over members",
        "points": "points of orbits: each member",
    },
    [
        Column("arm", "how the point of the orbit was chosen"),
        Column("level, variant", "values of the objective's options that differ: of the first one, and of the others"),
        Column("member", "index of the member in its zoo"),
        Column("members", "number of members"),
        Column("objective", "value of the objective on the calibration data"),
        Column("objective_test", "the same on the test data"),
        Column("error", "squared difference of the outputs to those of the unchanged network on test data, relative"),
        Column("accuracy", "fraction of test inputs, 0 to 1"),
        Column("whole_accuracy", "accuracy of the unchanged network"),
        Column("seconds", "time of the descent"),
        Column("change", "largest relative change of the outputs by moving on the orbit, in float64"),
        Column("objective_change, objective_test_change, error_change", "quotient by that as trained, of the same "
               "member, less 1; geometric mean over members"),
        Column("accuracy_change", "difference to that as trained, of the same member"),
        *(Column(f"{name}_low, {name}_high", f"95 % interval (Student's t over members) of {name}")
          for quantity in ("objective", "objective_test", "error", "accuracy")
          for name in (quantity, f"{quantity}_change")),
    ],
    places={"table": "summary.csv", "points": "points.csv"},
)  # fmt: skip


@dataclass(frozen=True)
class OrbitPoint:
    """One point of the orbit of one member.

    Attributes:
        member: The member's index.
        arm: How the point was chosen, one of ``ARMS``.
        setting: The objective's options that differ, by name.
        values: Measured numbers by name.
    """

    member: int
    arm: str
    setting: Mapping[str, Any]
    values: Mapping[str, float]


def orbit_results(points: Sequence[OrbitPoint], objective: str, *, title: str, about: Mapping[str, Any]) -> RunResults:
    """Report networks at several points of their orbits.

    Args:
        points: In each setting and for each member one with the arm ``"trained"``, before the others.
        objective: Name of the objective.
        title: For the table and the figures.
        about: Everything needed to make the tables again.
    """
    rows = point_rows(points)
    summary = summary_rows(rows)
    numbers = _numbers(summary)
    charts = dict(_charts(rows, objective))
    bars = [
        {**row, "name": ARMS[row["arm"]], "low": row["objective_low"], "high": row["objective_high"]} for row in summary
    ]
    return dataclasses.replace(REPORT, charts=charts).results(
        {"summary": summary, "points": rows, "bars": bars},
        title=title,
        about=about,
        numbers=numbers,
        headline=next(iter(numbers), None),
        shown=_shown(summary, title),
        notes=_notes(rows),
        places={"picture": f"{next(iter(charts))}.png", **REPORT.places},
    )


def point_rows(points: Iterable[OrbitPoint]) -> list[dict[str, Any]]:
    """Return a row for each point, with the changes against the same member as trained.

    Args:
        points: As for :func:`orbit_results`.
    """
    points = list(points)
    known = [name for name in _QUANTITIES if any(name in point.values for point in points)]
    trained = {_place(point): point.values for point in points if point.arm == "trained"}
    rows = []
    for point in points:
        level, *others = point.setting.values() or ("",)
        row: dict[str, Any] = {"member": point.member, "arm": point.arm, "level": level}
        row["variant"] = ", ".join(map(str, others))
        for name in known:
            row[name] = finite(point.values.get(name, math.nan))
            if name in _QUOTIENTS:
                row[f"{name}_change"] = _change(name, row[name], finite(trained[_place(point)].get(name, math.nan)))
        row |= {name: point.values[name] for name in ("whole_accuracy", "change") if name in point.values}
        rows.append(row)
    return rows


def _place(point: OrbitPoint) -> tuple[Any, ...]:
    return point.member, *point.setting.items()


def _change(name: str, value: float | None, trained: float | None) -> float | None:
    """Return the difference or the quotient, less 1, to a value as trained."""
    if value is None or trained is None:
        return None
    if not _QUOTIENTS[name]:
        return value - trained
    return value / trained - 1 if trained > 0 else None


def summary_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each setting and arm: means over members with intervals.

    Args:
        rows: Result of :func:`point_rows`.
    """
    summary = []
    for key, own in grouped(rows, "variant", "level", "arm"):
        row: dict[str, Any] = {**key, "members": len(own)}
        for name in _QUOTIENTS:
            if name in own[0]:
                row |= _mean(name, [one[name] for one in own])
                row |= _mean(f"{name}_change", [one[f"{name}_change"] for one in own], quotient=_QUOTIENTS[name])
        if "seconds" in own[0]:
            row["seconds"] = _mean("seconds", [one["seconds"] for one in own])["seconds"]
        summary.append(row)
    return summary


def _mean(name: str, values: Sequence[float | None], *, quotient: bool = False) -> dict[str, float | None]:
    """Return the mean, of quotients less 1 the geometric one, and its interval."""
    known = [value for value in values if value is not None]
    if quotient:
        known = [math.log1p(value) for value in known if value > -1]
    low, high = student_interval(known) if len(known) > 1 else (math.nan, math.nan)
    found = (math.fsum(known) / len(known) if known else math.nan, low, high)
    ends = (math.expm1(value) if quotient else value for value in found)
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(finite, ends), strict=True))


def _numbers(summary: Sequence[Row]) -> dict[str, float]:
    """Return the final numbers: for descents, the changes against the network as trained."""
    changes, all_changes = dict[str, list[float]](), dict[str, float]()
    for row in summary:
        for name in ("error_change", "accuracy_change", "objective_change"):
            if row.get(name) is not None and row["arm"] != "trained":
                setting = "_".join(str(row[key]) for key in ("level", "variant") if row[key] != "")
                all_changes[tag("orbit", name, row["arm"], setting or "all")] = row[name]
                if row["arm"] == "orbit":
                    changes.setdefault(tag("orbit", name), []).append(row[name])
    means = {name: math.fsum(values) / len(values) for name, values in changes.items()}
    return overview(all_changes, means)


def _charts(rows: Sequence[Row], objective: str) -> Iterator[tuple[str, Chart]]:
    """Yield the charts: accuracy and error over numbers of the first option, or bars of the objective."""
    columns = min(2, len(unique(rows, "variant")))

    def label(row: Row) -> str:
        return ARMS[row["arm"]]

    if all("error" in row and not isinstance(row["level"], str) for row in rows):
        option, changed = _NAMES[objective]
        whole = all(isinstance(row["level"], int) for row in rows)
        for name, ylabel, factor in (("accuracy", "test accuracy, %", 100.0), ("error", "relative error", 1.0)):
            if name in rows[0]:
                marks = Marks(
                    name, "level", label=label, factor=factor, where={"arm": _COMPARED}, looks=_LOOKS, table="points"
                )
                levels: Any = partial(_whole, rows) if name == "accuracy" else {}
                panel = Panel(
                    [marks],
                    _panel_title,
                    option,
                    ylabel,
                    by=["variant"],
                    log="y" * (name == "error"),
                    levels=levels,
                    whole=whole,
                )
                size = (4.2, 3.4) if columns > 1 else (6.4, 3.8)
                yield name, Chart([panel], f"Weights {changed}: {{title}}", columns, size)
    else:
        named = Marks("objective", "name", kind="bars", label="{name}", table="bars",
                      error=[("low", "high")], spans=["95 % interval over members"], color="{arm}")  # fmt: skip
        title = f"{objective.replace('_', ' ').capitalize()} on the orbit: {{title}}"
        panel = Panel([named], "{level}", by=["level", "variant"], flat=True, bottom=0)
        yield "objective", Chart([panel], title, columns=1, legend="")


def _panel_title(row: Row) -> str:
    """Return the title of a panel of rounded networks; without a word for options that have none."""
    return ", ".join(_TITLES[word] for word in str(row["variant"]).split(", ") if word in _TITLES)


def _whole(rows: Sequence[Row], row: Row) -> dict[str, float]:
    """Return the mean accuracy of the unchanged networks, in percent, as a level of a panel."""
    values = [one["whole_accuracy"] for one in rows if one["arm"] == "trained" and one["variant"] == row["variant"]]
    return {"unchanged": 100 * math.fsum(values) / len(values)}


def _shown(summary: Sequence[Row], title: str) -> Table:
    """Return the printed table: arms by levels."""
    levels, changed = unique(summary, "level"), "error" in summary[0]
    cells = {(row["variant"], row["arm"], row["level"]): _cell(row) for row in summary}
    rows: list[list[str] | None] = []
    for key, own in grouped(summary, "variant"):
        rows += [None] if rows else []
        for arm in unique(own, "arm"):
            rows.append(
                [key["variant"], ARMS[arm], *(cells.get((key["variant"], arm, level), "-") for level in levels)]
            )
    what = "error and test accuracy, %" if changed else "objective and its change"
    return text_table(f"{title}: {what}", ["", "", *map(str, levels)], rows, names=2, compact=True)


def _cell(row: Row) -> str:
    """Return the cell of an arm in a setting."""
    if row.get("error") is None:
        change = row["objective_change"]
        return f"{row['objective']:.4g}" + ("" if change is None else f"\n{100 * change:+.1f} %")
    return f"{row['error']:.2g}" + ("" if row.get("accuracy") is None else f"\n{in_points(row['accuracy'])}")


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return notes on the table."""
    notes = ["means over members; intervals are in summary.csv"]
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    if seconds:
        notes.append(f"{len(seconds)} descents of {math.fsum(seconds) / len(seconds):.1f} s on average")
    return notes
