"""Training losses with and without symmetry teleportation, at several learning rates."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning_sym._statistics import student_interval
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import Column, Report, Row, RunResults, grouped, spread_cell


def _loss(row: Row) -> str:
    return spread_cell(lambda value: f"{value:.2g}", row["loss"], row["loss_std"])


def _change(name: str, row: Row) -> str:
    """Return a change in percent or in points, with its interval."""
    value, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    return "-" if value is None else spread_cell(lambda each: f"{100 * each:+.1f}", value, None, low, high)


REPORT = Report(
    {
        "summary": "each arm at its best learning rate: means over seeds",
        "rates": "each arm and learning rate: means over seeds",
        "runs": "each trained network",
        "curves": "training losses of all epochs",
    },
    [
        Column("arm", "how the networks of this arm moved", "arm"),
        Column("rate", "learning rate at the start", "best rate", "g"),
        Column("loss", "training loss of the last epoch, in nats; mean over seeds", "training loss", _loss,
               number="teleportation/loss/{arm}"),
        Column("loss_std", "standard deviation over seeds, sample form"),
        Column("loss_change", "quotient by the loss of the first arm with the same seed, each at its best rate, less "
               "1; geometric mean over seeds", "change, %", partial(_change, "loss_change")),
        Column("accuracy", "test accuracy, 0 to 1; mean over seeds", "test accuracy, %", ".1f", factor=100),
        Column("accuracy_change", "difference to that of the first arm with the same seed; mean over seeds",
               "change, points", partial(_change, "accuracy_change")),
        *(Column(f"{name}_low, {name}_high", f"95 % interval (Student's t over seeds) of {name}")
          for name in ("loss_change", "accuracy_change")),
        Column("seed", "seed of the initial weights and of the order of the data"),
        Column("epoch", "epochs trained"),
    ],
    {
        "teleportation": Chart(
            [
                Panel(
                    [Marks("loss", "rate", ["arm"], table="runs", look={"marker": "."})],
                    "After the last epoch",
                    "learning rate",
                    "training loss, nats",
                    log="xy",
                ),
                Panel(
                    [Marks("loss", "epoch", ["arm"], table="best_curves")],
                    "Each arm at its best learning rate",
                    "epoch",
                    "training loss, nats",
                    log="y",
                ),
            ],
            "Symmetry teleportation: {title}",
            columns=2,
        )
    },
    title="Training with symmetry teleportation: {title}",
    places={"picture": "teleportation.png", "table": "summary.csv", "rates": "rates.csv"},
)  # fmt: skip


def teleportation_results(
    runs: Sequence[Row], curves: Sequence[Row], *, title: str, about: Mapping[str, Any]
) -> RunResults:
    """Report the losses of all arms and learning rates.

    Args:
        runs: Rows with ``arm``, ``rate``, ``seed``, ``loss`` (training loss of the last epoch; None if it diverged) and
            ``accuracy`` (None without).
        curves: Rows with ``arm``, ``rate``, ``seed``, ``epoch`` and ``loss``.
        title: For table and figure.
        about: Everything needed to make the tables again.
    """
    rates = rate_rows(runs)
    best = with_changes(best_rows(rates), runs)
    chosen = {(row["arm"], row["rate"]) for row in best}
    rows = {
        "summary": best,
        "rates": rates,
        "runs": runs,
        "curves": curves,
        "best_curves": [row for row in curves if (row["arm"], row["rate"]) in chosen],
    }
    diverged = sum(row["loss"] is None for row in runs)
    against = f"changes are against {best[0]['arm']} with the same seeds, in brackets 95 % intervals"
    notes = ["mean ± standard deviation over seeds", *([against] if len(best) > 1 else [])] + (
        [f"{diverged} of {len(runs)} runs diverged"] if diverged else []
    )
    return REPORT.results(rows, title=title, about=about, notes=notes)


def rate_rows(runs: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each arm and learning rate; without a loss where a seed diverged.

    Args:
        runs: See :func:`teleportation_results`.
    """
    rows = []
    for key, own in grouped(runs, "arm", "rate"):
        row: dict[str, Any] = {**key, "loss": None, "loss_std": None, "accuracy": None}
        if all(one["loss"] is not None for one in own):
            for name in ("loss", "accuracy"):
                values = [one[name] for one in own if one[name] is not None]
                row[name] = statistics.fmean(values) if values else None
            losses = [one["loss"] for one in own]
            row["loss_std"] = statistics.stdev(losses) if len(losses) > 1 else None
        rows.append(row)
    return rows


def best_rows(rates: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the row of lowest loss for each arm; the first one if all diverged.

    Args:
        rates: Result of :func:`rate_rows`.
    """
    return [
        dict(min(own, key=lambda row: math.inf if row["loss"] is None else row["loss"]))
        for _, own in grouped(rates, "arm")
    ]


def with_changes(best: Sequence[Row], runs: Sequence[Row]) -> list[dict[str, Any]]:
    """Add to each arm but the first its change against the first, with an interval over seeds.

    Members with the same seed share initial weights and the order of the data, so that changes are taken seed by seed.

    Args:
        best: Result of :func:`best_rows`.
        runs: See :func:`teleportation_results`.
    """
    own = [{one["seed"]: one for one in runs if (one["arm"], one["rate"]) == (row["arm"], row["rate"])} for row in best]
    names = [f"{name}{end}" for name in ("loss_change", "accuracy_change") for end in ("", "_low", "_high")]
    found: list[dict[str, Any]] = [{**row, **dict.fromkeys(names)} for row in best]
    for row, mine in zip(found[1:], own[1:], strict=True):
        pairs = [(mine[seed], first) for seed, first in own[0].items()]
        logs = [math.log(one["loss"] / other["loss"]) for one, other in pairs if one["loss"] and other["loss"]]
        points = [a["accuracy"] - b["accuracy"] for a, b in pairs if None not in (a["accuracy"], b["accuracy"])]
        for name, values, back in (("loss_change", logs, math.expm1), ("accuracy_change", points, float)):
            known = len(values) == len(pairs)
            ends = student_interval(values) if known and len(values) > 1 else (None, None)
            for end, value in zip(
                ("", "_low", "_high"), (statistics.fmean(values) if known else None, *ends), strict=True
            ):
                row[f"{name}{end}"] = None if value is None else back(value)
    return found
