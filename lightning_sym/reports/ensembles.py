"""Ensembles beside each other: accuracy, loss, calibration and diversity as their members are added."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym._tags import tag
from lightning_sym.ensembles import EnsembleScores
from lightning_sym.figures import EnsembleCurve, ensemble_curves
from lightning_sym.reports.cells import Row, finite, spread_cell, text_table, unique
from lightning_sym.reports.table import ResultTable, RunResults

UNITS = {
    "kind": "what the ensemble is made of",
    "members": "number of networks in the ensemble, the first ones",
    "accuracy": "fraction of samples, 0 to 1",
    "loss": "mean negative log probability of the right class, nats",
    "brier": "mean squared distance of the probabilities from the one-hot label, 0 to 2",
    "calibration_error": "expected calibration error, 0 to 1, in bins of equal width",
    "..._error": "standard error over samples, given the networks",
    "alone_...": "of the member that was added last, by itself",
    "mean_...": "mean over the members, each by itself",
    "ambiguity": "mean loss of the members less that of the ensemble, nats",
    "variance": "mean Brier score of the members less that of the ensemble",
    "disagreement": "mean over pairs of members: fraction of samples that they assign to different classes",
    "divergence": "mean over ordered pairs of members of the Kullback-Leibler divergence, nats",
}
SNAPSHOT_UNITS = {
    "network": "number of the network that was trained",
    "snapshot": "0 is where the first cycle began",
    "distance_from_start": "Euclidean distance of the weights from those of snapshot 0",
    "distance_from_previous": "Euclidean distance from the snapshot before",
    "norm": "Euclidean norm of the weights",
    "train_loss": "mean cross-entropy on training data, nats",
    "train_loss_barrier": "largest training loss on the straight line to the snapshot before, above the line between "
    "the losses of both, nats",
    "accuracy": UNITS["accuracy"],
    "loss": UNITS["loss"],
}


@dataclass(frozen=True, eq=False)
class MeasuredEnsemble:
    """What was measured of one ensemble.

    Attributes:
        name: Its name in tables.
        kind: What it is made of; the terminal and the figure show means over ensembles of a kind.
        scores: How good it is.
    """

    name: str
    kind: str
    scores: EnsembleScores


def ensemble_results(
    ensembles: Sequence[MeasuredEnsemble],
    *,
    title: str,
    split: str,
    about: Mapping[str, Any],
    snapshots: Sequence[Row] = (),
    notes: Sequence[str] = (),
) -> RunResults:
    """Say what ensembles are worth.

    Args:
        ensembles: At least one; all scored on the same samples.
        title: Title of tables and figures.
        split: What the samples are: ``"test"``.
        about: What is needed to make the tables again.
        snapshots: A row for each snapshot of fast geometric ensembles, if there are any.
        notes: Lines below the table on the terminal.
    """
    last = [ensemble_row(one, len(one.scores.ambiguity)) for one in ensembles]
    added = [ensemble_row(one, count + 1) for one in ensembles for count in range(len(one.scores.ambiguity))]
    scores = ensembles[0].scores
    about = {**about, "split": split, "samples": scores.samples, "bins": scores.bins}
    tables = [
        ResultTable("ensembles", "ensembles of networks", last, UNITS, about),
        ResultTable("added", "ensembles of networks, as their members are added", added, UNITS, about),
    ]
    if snapshots:
        tables.append(ResultTable("snapshots", "snapshots of cyclical training", snapshots, SNAPSHOT_UNITS, about))
    means = ensemble_means(last)
    several = [row for row in means if row["ensembles"] > 1]
    if several:
        kinds = ", ".join(row["kind"] for row in several)
        notes = [*notes, f"means over {max(row['ensembles'] for row in several)} ensembles each: {kinds}"]
    numbers = {_tag(name, row["kind"]): row[name] for row in means for name in ("accuracy", "loss")}
    return RunResults(
        tables,
        _figures(ensembles, f"{title}, {scores.samples} {split} samples"),
        numbers=numbers,
        headline=_tag("loss", min(means, key=lambda row: row["loss"])["kind"]),
        shown=_shown(means, title),
        notes=[
            f"on {scores.samples} {split} samples: accuracy, %, ± {100 * means[0]['accuracy_error']:.2f}; loss, nats, "
            f"± {means[0]['loss_error']:.4f} (standard errors); expected calibration error, %, in {scores.bins} bins",
            "gain: mean loss of the members less that of the ensemble; differ: how often two of them disagree, %",
            *notes,
        ],
        places={"picture": "ensembles.png", "table": "ensembles.csv", "added": "added.csv"},
    )


def ensemble_row(ensemble: MeasuredEnsemble, count: int) -> dict[str, Any]:
    """Return the numbers of the ensemble of the first so many members, as plain values."""
    scores, last = ensemble.scores, count - 1
    row: dict[str, Any] = {"ensemble": ensemble.name, "kind": ensemble.kind, "members": count}
    for name, values in vars(scores.together).items():
        row[name] = finite(float(values[last]))
    for name in ("accuracy", "loss", "calibration_error"):
        alone = getattr(scores.alone, name)
        row |= {f"alone_{name}": float(alone[last]), f"mean_{name}": float(alone[:count].mean())}
    for name in ("ambiguity", "ambiguity_error", "variance", "disagreement", "divergence"):
        row[name] = finite(float(getattr(scores, name)[last]))
    return row


def ensemble_means(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return means over the ensembles of each kind; those of standard errors too, as the samples are the same."""
    found = []
    for kind in unique(rows, "kind"):
        own = [row for row in rows if row["kind"] == kind]
        mean: dict[str, Any] = {"kind": kind, "ensembles": len(own)}
        for name in list(own[0])[2:]:
            values = [row[name] for row in own if row[name] is not None]
            mean[name] = math.fsum(values) / len(values) if values else None
        found.append(mean)
    return found


def _shown(means: Sequence[Row], title: str) -> Table:
    columns = ["ensemble", "size", "accuracy", "loss", "ECE", "gain", "differ"]
    lines = []
    for row in means:
        line = [row["kind"], f"{row['members']:g}", f"{100 * row['accuracy']:.2f}", f"{row['loss']:.4f}"]
        line.append(f"{100 * row['calibration_error']:.2f}")
        if row["disagreement"] is None:
            line += ["-", "-"]
        else:
            gain = spread_cell(lambda value: f"{value:.4f}", row["ambiguity"], row["ambiguity_error"])
            line += [gain, f"{100 * row['disagreement']:.2f}"]
        lines.append(line)
    return text_table(f"Ensembles: {title}", columns, lines, whole=columns, compact=True)


def _figures(ensembles: Sequence[MeasuredEnsemble], title: str) -> Iterator[tuple[str, Figure]]:
    labels = {"loss": "loss, nats", "accuracy": "accuracy, %", "calibration_error": "calibration error, %"}
    quantities = {}
    for quantity, label in labels.items():
        factor = 1 if quantity == "loss" else 100
        curves = []
        for kind in dict.fromkeys(one.kind for one in ensembles):
            own = [one.scores for one in ensembles if one.kind == kind]
            together, alone = (
                factor * _columns([getattr(getattr(scores, part), quantity).numpy() for scores in own])
                for part in ("together", "alone")
            )
            curves.append(EnsembleCurve(kind, together, alone))
        quantities[label] = curves
    yield "ensembles", ensemble_curves(quantities, title=title)


def _columns(rows: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return a column for each ensemble, with NaN below those that have fewer members."""
    table = np.full((max(map(len, rows)), len(rows)), np.nan)
    for column, row in enumerate(rows):
        table[: len(row), column] = row
    return table


def _tag(quantity: str, kind: str) -> str:
    return tag("ensemble", quantity, kind.replace(" ", "_"))  # "two ends", "all snapshots"
