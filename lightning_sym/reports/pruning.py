"""What pruning on the Rashomon set found: steps, widths, and pruning by magnitude at the same widths."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym._tags import details
from lightning_sym.figures import PruningCurve, pruning_curves
from lightning_sym.landscape import PruningStep
from lightning_sym.reports.cells import counted, numeric, text_table
from lightning_sym.reports.table import ResultTable, RunResults

UNITS = {
    "loss": "mean over all training data, without augmentation; of a cross-entropy in nats",
    "threshold": "as loss: that of the whole network plus epsilon",
    "test_loss": "as loss, on test data",
    "test_error": "fraction of test data, 0 to 1",
    "units": "units left in all axis groups that are pruned",
    "removed": "units that went in this step",
    "walks": "walks by then, those that failed included",
    "walked": "whether a walk went before; otherwise the units could go as they were",
    "steps": "optimizer steps of all walks",
    "parameters": "numbers that are trained",
    "magnitude": "the twin that is pruned by magnitude to the same widths, after as many optimizer steps",
    "widths": "units left in each axis group",
}


@dataclass(frozen=True)
class PrunedMember:
    """One network that was pruned.

    Attributes:
        member: Its number in the zoo.
        epsilon: By how much its loss may exceed that of the whole network.
        threshold: Largest loss that is allowed.
        history: Steps; first the whole network.
        sizes: Units of the whole network by axis group.
        widths: Units that are left.
        parameters: Numbers that are trained, of the whole network and of what is left.
        walks: All walks, those that failed included.
        steps: Their optimizer steps.
        finished: Whether it was pruned to the end.
        stopped: Why it was stopped; empty if it was not.
        twin: Rows of the twin that is pruned by magnitude; none without one.
    """

    member: int
    epsilon: float
    threshold: float
    history: Sequence[PruningStep]
    sizes: Mapping[str, int]
    widths: Mapping[str, int]
    parameters: tuple[int, int]
    walks: int
    steps: int
    finished: bool
    stopped: str
    twin: Sequence[Mapping[str, float]]

    @property
    def units(self) -> list[int]:
        """How many units were left after each step."""
        left = [sum(self.sizes.values())]
        for step in self.history[1:]:
            left.append(left[-1] - len(step.units))
        return left


def pruning_results(
    members: Sequence[PrunedMember], refused: Mapping[str, str], *, title: str, about: Mapping[str, Any]
) -> RunResults:
    """Say how small networks have become.

    Args:
        members: The networks.
        refused: Why units of an axis group were left alone, by its name.
        title: For tables and figures.
        about: What is needed to make the tables again.
    """
    summary = [summary_row(member) for member in members]
    about = {**about, "refused": dict(refused)}
    what = "networks pruned with a bound on the training loss: "
    several = len({member.epsilon for member in members}) > 1
    numbers = {"pruning/units": float(min(row["units"] for row in summary))}
    for member, row in zip(members, summary, strict=True):
        name = f"{member.member}" + (f"-epsilon-{member.epsilon:g}" if several else "")
        numbers |= details({f"pruning/units/member-{name}": float(row["units"])})
        if row["test_error"] is not None:
            numbers |= details({f"pruning/test_error/member-{name}": row["test_error"]})
    notes = [
        f"{_named(member)} was stopped: {member.stopped}"
        if member.stopped
        else f"{_named(member)} was not pruned to the end: raise max_epochs"
        for member in members
        if member.stopped or not member.finished
    ]
    notes += [f"the units of {name} were left alone: {reason}" for name, reason in list(refused.items())[:3]]
    if any(member.twin for member in members):
        notes.append("magnitude: pruned by magnitude to the same widths, trained for as many steps")
    notes += against_twins(summary)
    return RunResults(
        [
            ResultTable("summary", what + "what is left", summary, UNITS, about),
            ResultTable("steps", what + "all steps", step_rows(members), UNITS, about),
            ResultTable("magnitude", "their twins, pruned by magnitude", twin_rows(members), UNITS, about),
            ResultTable("widths", what + "units of each axis group", width_rows(members), UNITS, about),
        ],
        _figures(members, title),
        numbers=numbers,
        headline="pruning/units",
        shown=_shown(summary, title),
        notes=notes,
        places={"picture": "pruning.png", "table": "summary.csv", "steps": "steps.csv"},
    )


def against_twins(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how test errors differ from those of the twins, on average over members, where there are two or more.

    Args:
        summary: Rows of :func:`summary_row`.

    Returns:
        A sentence for each epsilon: mean over members of the differences, and its standard error.
    """
    sentences = []
    for epsilon in dict.fromkeys(row["epsilon"] for row in summary):
        rows = [row for row in summary if row["epsilon"] == epsilon]
        errors = [(row["test_error"], row["magnitude_test_error"]) for row in rows]
        differences = [100 * (own - twin) for own, twin in errors if own is not None and twin is not None]
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            sentences.append(
                f"epsilon {epsilon:g}: test error minus that of the twin {statistics.mean(differences):+.2f} ± "
                f"{error:.2f} points (mean and its standard error over {len(differences)} members)"
            )
    return sentences


def _identity(member: PrunedMember) -> dict[str, Any]:
    return {"member": member.member, "epsilon": member.epsilon}


def _named(member: PrunedMember) -> str:
    return f"member {member.member} (epsilon {member.epsilon:g})"


def summary_row(member: PrunedMember) -> dict[str, Any]:
    """Return what is left of a network, beside its twin."""
    first, last = member.history[0], member.history[-1]
    twin = member.twin[-1] if member.twin and member.twin[-1]["units"] == member.units[-1] else {}
    return {
        **_identity(member),
        "units_before": member.units[0],
        "units": member.units[-1],
        "parameters_before": member.parameters[0],
        "parameters": member.parameters[1],
        "loss_before": first.loss,
        "threshold": member.threshold,
        "loss": last.loss,
        "test_loss_before": first.numbers.get("test_loss"),
        "test_loss": last.numbers.get("test_loss"),
        "test_error_before": first.numbers.get("test_error"),
        "test_error": last.numbers.get("test_error"),
        **{f"magnitude_{name}": twin.get(name) for name in ("loss", "test_loss", "test_error")},
        "walks": member.walks,
        "steps": member.steps,
        "finished": member.finished,
    }


def step_rows(members: Sequence[PrunedMember]) -> list[dict[str, Any]]:
    """Return a row for each step of each network."""
    rows = []
    for member in members:
        for number, (step, units) in enumerate(zip(member.history, member.units, strict=True)):
            removed = [f"{group}[{index}]" for group, index in step.units]
            rows.append(
                {
                    **_identity(member),
                    "step": number,
                    "removed": len(removed),
                    "units": units,
                    "loss": step.loss,
                    "threshold": member.threshold,
                    **{name: step.numbers.get(name) for name in ("test_loss", "test_error")},
                    "walks": step.walks,
                    "walked": step.walked,
                    "which": " ".join(removed),
                }
            )
    return rows


def twin_rows(members: Sequence[PrunedMember]) -> list[dict[str, Any]]:
    """Return a row for each number of units of each twin."""
    names = ("units", "walks", "loss", "test_loss", "test_error")
    return [
        {**_identity(member), **{name: row.get(name) for name in names}} for member in members for row in member.twin
    ]


def width_rows(members: Sequence[PrunedMember]) -> list[dict[str, Any]]:
    """Return a row for each axis group of each network."""
    return [
        {**_identity(member), "group": group, "units_before": size, "units": member.widths[group]}
        for member in members
        for group, size in member.sizes.items()
    ]


def _figures(members: Sequence[PrunedMember], title: str) -> Iterator[tuple[str, Figure]]:
    several = len({member.member for member in members}) > 1
    curves = []
    for member in members:
        label = (f"member {member.member}, " if several else "") + rf"$\varepsilon$ = {member.epsilon:g}"
        error = [numeric(step.numbers.get("test_error")) for step in member.history]
        losses = [step.loss for step in member.history]
        curves.append(PruningCurve(label, member.units, losses, error, member.threshold))
        if member.twin:
            losses, error = ([numeric(row.get(name)) for row in member.twin] for name in ("loss", "test_error"))
            curves.append(PruningCurve(label, [int(row["units"]) for row in member.twin], losses, error))
    yield "pruning", pruning_curves(curves, title=f"Fewer units below a bound on the loss: {title}")


def _shown(summary: Sequence[Mapping[str, Any]], title: str) -> Table:
    columns = ["member", "epsilon", "units", "loss", "bound", "test error", "magnitude"]
    lines = []
    for row in summary:
        errors = [_percent(row[name]) for name in ("test_error_before", "test_error", "magnitude_test_error")]
        lines.append(
            [
                str(row["member"]),
                f"{row['epsilon']:g}",
                f"{row['units_before']} → {row['units']}",
                f"{row['loss']:.4f}",
                f"{row['threshold']:.4f}",
                f"{errors[0]} → {errors[1]}",
                errors[2],
            ]
        )
    return text_table(f"Pruned {counted(len(summary), 'network')}: {title}", columns, lines, whole=columns)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"
