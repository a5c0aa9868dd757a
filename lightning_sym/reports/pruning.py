"""Results of pruning on the Rashomon set: steps, widths, and pruning by magnitude at the same widths."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_sym._tags import details
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.landscape import PruningStep
from lightning_sym.reports.report import Column, Report, Row, RunResults, counted


def _panel(quantity: str, title: str, ylabel: str, factor: float = 1, log: str = "x") -> Panel:
    of: Any = {"x": "units", "group": ["member", "epsilon"], "label": "member {member}, ε = {epsilon:g}"}
    marks = [
        Marks(quantity, **of, factor=factor, look={"marker": "."}, table="steps"),
        Marks(quantity, **of, factor=factor, look={"ls": "--", "lw": 1.2, "marker": "."}, table="magnitude"),
    ]
    if quantity == "loss":
        marks.append(Marks("threshold", **of, look={"ls": ":", "lw": 1.4, "marker": ""}, table="steps"))
    return Panel(marks, title, "units left", ylabel, log=log)


def _arrow(before: str, after: str, text: Callable[[Any], str] = str) -> Callable[[Row], str]:
    return lambda row: f"{text(row[before])} → {text(row[after])}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


_WHAT = "networks pruned with a bound on the training loss: "
REPORT = Report(
    {
        "summary": _WHAT + "what is left",
        "steps": _WHAT + "all steps",
        "magnitude": "their twins, pruned by magnitude",
        "widths": _WHAT + "units of each axis group",
    },
    [
        Column("member", "", "member", "d"),
        Column("epsilon", "", "epsilon", "g"),
        Column("units_shown", "", "units", _arrow("units_before", "units")),
        Column("loss", "mean over all training data, without augmentation; of a cross-entropy in nats", "loss", ".4f"),
        Column("threshold", "as loss: that of the whole network plus epsilon", "bound", ".4f"),
        Column("test_loss", "as loss, on test data"),
        Column("test_error", "fraction of test data, 0 to 1", "test error",
               _arrow("test_error_before", "test_error", _percent)),
        Column("units", "units left in all axis groups that are pruned"),
        Column("removed", "units that went in this step"),
        Column("walks", "walks by then, those that failed included"),
        Column("walked", "whether a walk went before; otherwise the units could go as they were"),
        Column("steps", "optimizer steps of all walks"),
        Column("parameters", "numbers that are trained"),
        Column("magnitude", "the twin that is pruned by magnitude to the same widths, after as many optimizer steps",
               "magnitude", lambda row: _percent(row["magnitude_test_error"])),
        Column("widths", "units left in each axis group"),
    ],
    {
        "pruning": Chart(
            [
                _panel("loss", "Loss on all training data", "training loss, nats (dotted: threshold)", log="xy"),
                _panel("test_error", "Test data (dashed: magnitude, as wide, trained as long)", "test error, %", 100),
            ],
            "Fewer units below a bound on the loss: {title}",
        )
    },
    places={"picture": "pruning.png", "table": "summary.csv", "steps": "steps.csv"},
)  # fmt: skip


@dataclass(frozen=True)
class PrunedMember:
    """One network that was pruned.

    Attributes:
        member: Its number in the zoo.
        epsilon: Largest increase of the loss over that of the whole network.
        threshold: Largest loss that is allowed.
        history: Steps; first the whole network.
        sizes: Units of the whole network by axis group.
        widths: Remaining units.
        parameters: Trainable parameters of the whole and of the pruned network.
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
        """Number of units after each step."""
        left = [sum(self.sizes.values())]
        for step in self.history[1:]:
            left.append(left[-1] - len(step.units))
        return left


def pruning_results(
    members: Sequence[PrunedMember], refused: Mapping[str, str], *, title: str, about: Mapping[str, Any]
) -> RunResults:
    """Report the sizes of pruned networks.

    Args:
        members: The networks.
        refused: Reason for keeping the units of an axis group, by its name.
        title: For tables and figures.
        about: Everything needed to make the tables again.
    """
    summary = [summary_row(member) for member in members]
    about = {**about, "refused": dict(refused)}
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
    return replace(REPORT, title=f"Pruned {counted(len(summary), 'network')}: {{title}}").results(
        {
            "summary": summary,
            "steps": step_rows(members),
            "magnitude": twin_rows(members),
            "widths": width_rows(members),
        },
        title=title,
        about=about,
        numbers=numbers,
        headline="pruning/units",
        notes=notes,
    )


def against_twins(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare test errors with those of the twins: means over two or more members.

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
    """Return the numbers of a pruned network and of its twin."""
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
