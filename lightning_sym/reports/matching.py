"""Barriers between the members of a zoo, before and after matching."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym._statistics import bootstrap_over_models
from lightning_sym._tags import tag
from lightning_sym.connectivity import Barrier, CurveLosses
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports import ResultTable, RunResults
from lightning_sym.reports.paths import LOOKS, path_chart
from lightning_sym.reports.report import Row, bold, finite, numeric, picked, spread_cell, text_table, unique
from lightning_sym.reports.stitching import AS_IS, NO_NORM, RECALIBRATED
from lightning_sym.symmetry import Symmetry

Pair = tuple[int, int]
SPLITS = ("train", "test")
UNMATCHED = "unmatched"
MERGED = "merged"  # folder of the zoo of means
UNITS = {
    "loss_barrier": "nats: largest loss on the line above the straight line between the losses of its ends",
    "loss_barrier_mean": "nats: largest loss on the line above the mean of the losses of its ends",
    "accuracy_barrier": "fraction of inputs, 0 to 1: as loss_barrier, positive where the line is worse",
    "accuracy_barrier_mean": "fraction of inputs, 0 to 1: as loss_barrier_mean, positive where the line is worse",
    "loss": "mean cross-entropy, nats",
    "accuracy": "fraction of inputs, 0 to 1",
    "distance": "Euclidean distance between the parameters of both networks",
    "output_change": "relative change of the second network's outputs by matching, on test inputs, unitless: root mean "
    "square of the change over that of the outputs; 0 up to rounding where the method keeps the function",
    "t": "place on the line, 0 (first network) to 1 (second network)",
    "batch_norm": f"running statistics on the line: interpolated ({AS_IS!r}), recomputed at every point "
    f"({RECALIBRATED!r}), or no batch norm in the network ({NO_NORM!r})",
    "low, high": "95 % percentile interval for the mean over pairs, from 2000 bootstrap samples of the models",
    "std": "standard deviation over pairs, sample form",
}
_BARRIERS = ("loss_barrier", "loss_barrier_mean", "accuracy_barrier", "accuracy_barrier_mean")
_NAMES = {method: look["label"] for method, look in LOOKS.items()}
_SUFFIXES = {NO_NORM: "", AS_IS: ", statistics as they are", RECALIBRATED: ", statistics recalibrated"}
# A larger relative change of outputs is noted with the method's name; rounding errors are far smaller.
_CHANGED = 1e-3
# Columns of the terminal's table and the bars: split, quantity, factor, heading, unit.
_SHOWN = (
    ("train", "loss_barrier", 1.0, "train loss", "nats"),
    ("test", "loss_barrier", 1.0, "test loss", "nats"),
    ("test", "accuracy_barrier", 100.0, "test accuracy", "points"),
)


class Line(NamedTuple):
    """Evaluation of the line between the two networks of each pair.

    Attributes:
        method: How they were matched.
        batch_norm: Which statistics batch norms have on the line: ``"as is"``, ``"recalibrated"``, or ``"none"``.
        split: Split of the images.
    """

    method: str
    batch_norm: str
    split: str


@dataclass(frozen=True, eq=False)
class MergedPair:
    """The mean of two networks, the second one matched to the first.

    Attributes:
        pair: Their numbers in the zoo.
        method: How they were matched.
        losses: By split, loss and accuracy of the first, of the second, and of the mean.
        output_change: Change of the second network's function by matching, see ``UNITS``.
    """

    pair: Pair
    method: str
    losses: Mapping[str, CurveLosses]
    output_change: float = 0.0

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return loss and accuracy of the mean, by split and name."""
        return {
            split: {
                name: float(values[-1])
                for name, values in (("loss", found.loss), ("accuracy", found.accuracy))
                if values is not None
            }
            for split, found in self.losses.items()
        }


Curves = Mapping[Line, Mapping[Pair, Barrier]]


def matching_results(
    curves: Curves,
    distances: Mapping[tuple[Pair, str], float],
    symmetry: Symmetry,
    *,
    title: str,
    about: Mapping[str, Any],
    loss: str | None = None,
    merged: Sequence[MergedPair] = (),
    changes: Mapping[tuple[Pair, str], float] | None = None,
) -> RunResults:
    """Report barriers between networks before and after matching, and changes of functions.

    Args:
        curves: Loss and accuracy on the line, with their barriers, by evaluation and pair.
        distances: Euclidean distance between the parameters of both networks, by pair and method.
        symmetry: The symmetry group of the networks.
        title: For tables and figures.
        about: Everything needed to make the tables again.
        loss: Name of the loss; None for the cross-entropy.
        merged: Means of matched networks, which are the members 0, 1, ... of the zoo ``merged``.
        changes: Change of the second network's function by matching, by pair and method; None if it
            was not measured.
    """
    summary, points = matching_summary(curves, changes), curve_rows(curves)
    barriers = barrier_rows(curves, distances, changes)
    units = UNITS if loss is None else _units_of(loss)
    what = "the lines between networks of a zoo, before and after matching: "
    last = summary[-1]["batch_norm"]
    numbers = {
        tag("barrier", f"{row['split']}_{name}", row["method"]): row[f"{name}_barrier"]
        for row in summary
        for name in ("loss", "accuracy")
        if row["batch_norm"] == last and f"{name}_barrier" in row
    }
    least = "barrier/test_loss/least"  # one name for the main figure of all runs, for any methods
    numbers[least] = min(value for name, value in numbers.items() if name.startswith("barrier/test_loss/"))
    facts = {
        **picked(symmetry, "dimension", "log10_permutations", "signs"),
        "worst_error": finite(symmetry.worst_error),
        "notes": list(symmetry.notes),
        "rows": symmetry.table(),
    }
    intervals = any(row["note"] == "" for row in summary)
    several = any(row["loss_barrier_std"] is not None for row in summary)
    means = [ResultTable("merged", "means of matched networks", merged_rows(merged), units, about)] if merged else []
    return RunResults(
        [
            ResultTable("summary", what + "barriers over pairs", summary, units, about),
            ResultTable("barriers", what + "barriers of each pair", barriers, units, about),
            ResultTable("curves", what + "all points", points, units, about),
            *means,
        ],
        _figures(points, barriers, summary, title, loss),
        files={"symmetry.txt": f"{symmetry}\n", "symmetry.json": json.dumps(facts, indent=1) + "\n"},
        texts={"symmetry": str(symmetry)},
        numbers=numbers,
        headline=least,
        shown=_shown(summary, title, loss),
        notes=[
            ("mean ± standard deviation over pairs" if several else "mean over pairs")
            + ("; in brackets: 95 % interval for the mean, over models" if intervals else ""),
            *([] if loss is None else [f"losses are means of {loss}"]),
            *_change_notes(curves, summary),
            *merged_notes(merged),
        ],
        places={
            "picture": "interpolation.png",
            "table": "summary.csv",
            "pairs": "barriers.csv",
            "group": "symmetry.txt",
            **({"merged": MERGED} if merged else {}),
        },
    )


def _units_of(loss: str) -> dict[str, str]:
    """Return the units where the loss is no cross-entropy."""
    units = {name: text.replace("nats: ", "units of the loss: ") for name, text in UNITS.items()}
    return {**units, "loss": f"mean of {loss}"}


def merged_rows(merged: Sequence[MergedPair]) -> list[dict[str, Any]]:
    """Return loss and accuracy of the weight average and of both networks of each pair, by split."""
    rows = []
    for number, found in enumerate(merged):
        for split, losses in found.losses.items():
            row: dict[str, Any] = {"member": number, "first": found.pair[0], "second": found.pair[1]}
            row |= {"method": found.method, "output_change": found.output_change, "split": split}
            for name, values in (("loss", losses.loss), ("accuracy", losses.accuracy)):
                if values is not None:
                    row |= dict(zip((f"{name}_first", f"{name}_second", name), values.tolist(), strict=True))
            rows.append(row)
    return rows


def merged_notes(merged: Sequence[MergedPair]) -> list[str]:
    """Summarise the scores of weight averages over pairs."""
    if not merged:
        return []
    found = [own.losses["test"] for own in merged]
    if any(losses.accuracy is None for losses in found):
        rows, name, text = [losses.loss for losses in found], "loss", "{:.3g}"
    else:
        rows, name, text = [losses.accuracy for losses in found if losses.accuracy is not None], "accuracy", "{:.1%}"
    first, second, mean = (text.format(value) for value in torch.stack(rows).mean(0).tolist())
    of = "the mean of A and the matched B" if len(merged) == 1 else "means of A and the matched B, on average"
    changed = sum(one.output_change > _CHANGED for one in merged)
    what = f"; in {changed} of {len(merged)} B has changed its function" if changed else ""
    return [f"{of}: test {name} {mean} (A {first}, B {second}){what}"]


def _change_notes(curves: Curves, summary: Sequence[Row]) -> list[str]:
    """Report losses of the second networks where matching has changed their function."""
    found = []
    for row in summary:
        line = _line(row)
        if line.split != "test" or not _changes(row):
            continue
        ends = [curves[one] for one in (line._replace(method=UNMATCHED), line)]
        losses = " to ".join(f"{fmean(curve.loss_ends[1] for curve in own.values()):.3g}" for own in ends)
        name = str(row["method"]).replace("_", "-")
        text = f"{name} changes the function of B by {numeric(row['output_change']):.1%}: test loss {losses}"
        accuracies = [[c.accuracy_ends[1] for c in own.values() if c.accuracy_ends is not None] for own in ends]
        if all(accuracies):
            text += ", accuracy " + " to ".join(f"{fmean(own):.1%}" for own in accuracies)
        found.append(text)
    return found


def _changes(row: Row) -> bool:
    """Whether the method of a row changes the function of the second network."""
    change = row.get("output_change")
    return change is not None and numeric(change) > _CHANGED


def _named(row: Row) -> str:
    """Return the name of a method, with the change of the function if there is one."""
    name = str(row["method"]).replace("_", "-")
    return f"{name}\nchanges B by {numeric(row['output_change']):.1%}" if _changes(row) else name


def matching_summary(curves: Curves, changes: Mapping[tuple[Pair, str], float] | None = None) -> list[dict[str, Any]]:
    """Return the barriers of each line: mean and standard deviation over pairs, bootstrap interval over models."""
    kinds, quantities = _kinds(curves), _quantities(curves)
    rows = []
    for line in sorted(curves, key=lambda line: (kinds.index(line.batch_norm), SPLITS.index(line.split))):
        found = curves[line]
        values = [[numeric(getattr(curve, name)) for name in quantities] for curve in found.values()]
        interval = bootstrap_over_models(list(found), values)
        row: dict[str, Any] = {**line._asdict(), "pairs": interval.pairs, "models": interval.models}
        for index, quantity in enumerate(quantities):
            row[quantity] = float(interval.mean[index])
            ends = {end: float(getattr(interval, end)[index]) for end in ("std", "low", "high")}
            row |= {f"{quantity}_{end}": finite(value) for end, value in ends.items()}
        if changes is not None:
            row["output_change"] = fmean(changes[pair, line.method] for pair in found)
        rows.append({**row, "note": interval.note})
    return rows


def barrier_rows(
    curves: Curves,
    distances: Mapping[tuple[Pair, str], float],
    changes: Mapping[tuple[Pair, str], float] | None = None,
) -> list[dict[str, Any]]:
    """Return the barriers of each line and pair, with its ends and its middle."""
    rows, quantities = [], _quantities(curves)
    for line, found in curves.items():
        for pair, curve in found.items():
            middle = len(curve.t) // 2
            measured = {"t": curve.t, "loss": curve.loss, "accuracy": curve.accuracy}
            rows.append(
                {
                    **_identity(line, pair),
                    **{quantity: numeric(getattr(curve, quantity)) for quantity in quantities},
                    **dict(zip(("loss_first", "loss_second"), curve.loss_ends, strict=True)),
                    **dict(zip(("accuracy_first", "accuracy_second"), curve.accuracy_ends or (), strict=False)),
                    **{f"{name}_middle": own[middle].item() for name, own in measured.items() if own is not None},
                    "distance": distances[pair, line.method],
                    **({} if changes is None else {"output_change": changes[pair, line.method]}),
                }
            )
    return rows


def curve_rows(curves: Curves) -> list[dict[str, Any]]:
    """Return loss and accuracy at each point of each line and pair."""
    rows = []
    for line, found in curves.items():
        for pair, curve in found.items():
            measured = {"t": curve.t, "loss": curve.loss, "accuracy": curve.accuracy}
            columns = {name: values.tolist() for name, values in measured.items() if values is not None}
            points = zip(*columns.values(), strict=True)
            rows += [{**_identity(line, pair), **dict(zip(columns, point, strict=True))} for point in points]
    return rows


def _identity(line: Line, pair: Pair) -> dict[str, Any]:
    return {"first": pair[0], "second": pair[1], **line._asdict()}


def _kinds(curves: Curves) -> list[str]:
    return list(dict.fromkeys(line.batch_norm for line in curves))


def _quantities(curves: Curves) -> tuple[str, ...]:
    """Return the barriers that there are; those of accuracies only where there are classes."""
    classified = all(curve.accuracy is not None for found in curves.values() for curve in found.values())
    return tuple(name for name in _BARRIERS if classified or name.startswith("loss"))


def _shown_columns(summary: Sequence[Row], loss: str | None = None) -> list[tuple[str, str, float, str, str]]:
    """Return those of ``_SHOWN`` that were measured, with the unit of the loss."""
    found = [column for column in _SHOWN if column[1] in summary[0]]
    return found if loss is None else [(*column[:4], "") if column[4] == "nats" else column for column in found]


def _figures(
    points: Sequence[Row], barriers: Sequence[Row], summary: Sequence[Row], title: str, loss: str | None
) -> Iterator[tuple[str, Figure]]:
    lines = path_chart(
        points,
        "method",
        ["batch_norm", "split"],
        title="Between two networks: {title}",
        panel=lambda row: f"{row['split']} data{_SUFFIXES[row['batch_norm']].replace(', ', chr(10))}",
        loss=loss,
    )
    yield from lines.named("interpolation", points, title)
    last = summary[-1]["batch_norm"]
    panels = []
    for split, name, factor, heading, unit in _shown_columns(summary, loss):
        of: Any = {"x": "method", "group": ["method"], "where": {"batch_norm": last, "split": split}, "looks": LOOKS}
        error = [(f"{name}_low", f"{name}_high")]
        bars = Marks(
            name, kind="bars", error=error, spans=["95 % interval over models"], factor=factor, values=".3g", **of
        )
        dots = Marks(name, kind="dots", factor=factor, table="barriers", **of)
        panels.append(Panel([bars, dots], ", ".join(filter(None, (heading, unit))), flat=True, names=_NAMES))
    chart = Chart(panels, f"Barriers: {{title}}{_SUFFIXES[last]}", columns=1, legend="")
    yield from chart.named("barriers", {"summary": summary, "barriers": barriers}, title)


def _line(row: Row) -> Line:
    return Line(row["method"], row["batch_norm"], row["split"])


def _shown(summary: Sequence[Row], title: str, loss: str | None) -> Table:
    by_line = {_line(row): row for row in summary}
    shown = _shown_columns(summary, loss)
    # Together below 80 characters.
    columns = ["method", *(",\n".join(filter(None, (heading, unit))) for *_, heading, unit in shown)]
    lines: list[list[str] | None] = []
    for kind in unique(summary, "batch_norm"):
        lines += [] if kind == NO_NORM else [[bold(f"batch norm {kind}")]]
        for method in unique(summary, "method"):
            cells = [_cell(by_line[Line(method, kind, split)], name, factor) for split, name, factor, _, _ in shown]
            lines.append([_named(by_line[Line(method, kind, "test")]), *cells])
        lines.append(None)
    return text_table(f"Barriers between networks: {title}", columns, lines, whole=columns[1:])


def _cell(row: Row, quantity: str, factor: float) -> str:
    digits = 1 if factor > 1 else 3
    numbers = (row[name] for name in (quantity, *(f"{quantity}_{end}" for end in ("std", "low", "high"))))
    return spread_cell(lambda value: f"{factor * value:.{digits}f}", *numbers)
