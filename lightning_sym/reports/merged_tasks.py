"""Accuracies of merged fine-tunes, by method, with and without alignment."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sym._tags import details
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import Column, Report, Row, RunResults, grouped, in_points, spread_cell

ONE_PARENT, ONE_MOVED = "one parent", "one moved"
TWO_SEEDS, OTHER_SEED = "two seeds", "vector of other seed"
ALONE, PLAIN, ALIGNED = "alone", "as they are", "aligned"
PARENT_TASK = "parents' task"
PARENT, PARENT_OWN, TUNED, TUNED_OWN = "parent", "parent on its task", "fine-tune", "fine-tune on its task"


@dataclass(frozen=True)
class MergedAccuracy:
    """Accuracies of a merged network.

    Attributes:
        setting: The networks that were merged.
        method: How.
        align: ``PLAIN`` or ``ALIGNED``; ``ALONE`` for networks that were not merged.
        parent: Index of the parent.
        accuracy: By task, in [0, 1].
        tasks: The tasks of the merged networks: their mean is the score.
    """

    setting: str
    method: str
    align: str
    parent: int
    accuracy: Mapping[str, float]
    tasks: Sequence[str]

    @property
    def score(self) -> float:
        """Mean accuracy on the tasks of the merged networks."""
        return statistics.fmean(self.accuracy[task] for task in self.tasks)


def _percent(name: str, heading: str, what: str) -> Column:
    def text(row: Row) -> str:
        return "-" if row[name] is None else spread_cell(in_points, row[name], row[f"{name}_std"])

    number = f"merging/{{setting}}/{{method}}/{name}"
    (number,) = details({number: 0.0}) if name == "plain" else (number,)  # a page of TensorBoard holds 30 curves
    return Column(name, f"{what}: mean over parents, 0 to 1", heading, text, number=number)


def _bars(marks: Marks, name: str, title: str, **more: Any) -> Chart:
    look: dict[str, Any] = {"ylabel": "test accuracy, %", "by": ["setting"], "bottom": 0, "top": 108}
    return Chart([Panel([marks], name, **look, **more)], title, columns=2)


REPORT = Report(
    {
        "summary": "accuracies of merged networks: means over parents",
        "accuracies": "accuracies of merged networks: each parent and task",
    },
    [
        Column("setting", "the networks that were merged", "networks"),
        Column("method", "", "method"),
        _percent("plain", "as they are, %", "test accuracy on the tasks of the merged networks"),
        _percent("aligned", "aligned, %", "the same, with networks aligned to the first"),
        Column("plain_std, aligned_std", "standard deviation over parents, sample form"),
        Column("plain_parents_task, aligned_parents_task", "test accuracy on the parents' task, mean over parents"),
        Column("accuracy", "test accuracy, 0 to 1"),
        Column("low, high", "lowest and highest score over parents"),
        Column("score", "mean test accuracy on the tasks of the merged networks, 0 to 1"),
        Column("parent", "index of the parent in its zoo"),
    ],
    {
        "merging": _bars(
            Marks("score", "method", ["align"], kind="bars", factor=100, error=[("low", "high")],
                  spans=["lowest to highest of the parents"], where={"align": (PLAIN, ALIGNED)}, table="scores"),
            "{setting}", "Merging {title}", levels=lambda row: row["levels"],
        ),
        "tasks": _bars(
            Marks("accuracy", "method", ["task"], kind="bars", factor=100, table="accuracies",
                  where=lambda row: row["setting"] in (ONE_PARENT, ONE_MOVED) and row["align"] == PLAIN),
            "{setting}, as they are", "Accuracy by task: {title}",
        ),
    },
    title="Test accuracy of merged networks: {title}",
    layout={"names": 2},
    places={"picture": "merging.png", "table": "summary.csv", "tasks": "accuracies.csv"},
)  # fmt: skip

_KEY = ("setting", "method", "align", "parent")
# What single networks are compared with, by setting: name in the figure and row of single networks.
_LEVELS = {
    ONE_PARENT: {"parent": PARENT, "fine-tune": TUNED},
    ONE_MOVED: {"parent": PARENT, "fine-tune": TUNED},
    TWO_SEEDS: {"parent": PARENT_OWN},
    OTHER_SEED: {"parent": PARENT, "fine-tune": TUNED_OWN},
}


def merged_task_results(measured: Sequence[MergedAccuracy], *, title: str, about: Mapping[str, Any]) -> RunResults:
    """Report the accuracies of merged fine-tunes.

    Args:
        measured: All accuracies; several of one setting, method, alignment and parent are averaged.
        title: For tables and figures.
        about: Everything needed to make the tables again.
    """
    scores = score_rows(measured)
    rows = {"summary": summary_rows(scores), "accuracies": accuracy_rows(measured), "scores": scores}
    return REPORT.results(rows, title=title, about=about, notes=["mean ± standard deviation over parents"])


def accuracy_rows(measured: Sequence[MergedAccuracy]) -> list[dict[str, Any]]:
    """Return a row for each merged network and task."""
    return [
        {
            "setting": one.setting,
            "align": one.align,
            "method": one.method,
            "parent": one.parent,
            "tasks": ", ".join(one.tasks),
            "task": task,
            "accuracy": accuracy,
        }
        for one in measured
        for task, accuracy in one.accuracy.items()
    ]


def score_rows(measured: Sequence[MergedAccuracy]) -> list[dict[str, Any]]:
    """Return a row for each setting, method, alignment and parent, with the range over parents for the figure."""
    rows = [
        {**key, "score": statistics.fmean(one["network"].score for one in own),
         "parents_task": statistics.fmean(one["network"].accuracy[PARENT_TASK] for one in own)}
        for key, own in grouped(
            ({**{name: getattr(one, name) for name in _KEY}, "network": one} for one in measured), *_KEY
        )
    ]  # fmt: skip
    alone = {
        key["method"]: statistics.fmean(row["score"] for row in own)
        for key, own in grouped((row for row in rows if row["align"] == ALONE), "method")
    }
    ends = {
        tuple(key.values()): {"low": min(scores), "high": max(scores)}
        for key, own in grouped(rows, "setting", "method", "align")
        if (scores := [row["score"] for row in own])
    }
    return [
        {
            **row,
            **ends[row["setting"], row["method"], row["align"]],
            "levels": {name: 100 * alone[one] for name, one in _LEVELS.get(row["setting"], {}).items()},
        }
        for row in rows
    ]


def summary_rows(scores: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each setting and method, with means over parents.

    Args:
        scores: Result of :func:`score_rows`.
    """
    rows = []
    for key, own in grouped(scores, "setting", "method"):
        row = dict(key)
        for column, aligns in (("plain", (PLAIN, ALONE)), ("aligned", (ALIGNED,))):
            found = [one for one in own if one["align"] in aligns]
            values = [one["score"] for one in found]
            row[column] = statistics.fmean(values) if values else None
            row[f"{column}_std"] = statistics.stdev(values) if len(values) > 1 else None
            row[f"{column}_parents_task"] = statistics.fmean(one["parents_task"] for one in found) if found else None
        rows.append(row)
    return rows
