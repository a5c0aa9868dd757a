"""Comparison of ensembles: accuracy, loss, calibration and diversity as members are added."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_sym.ensembles import EnsembleScores
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports import Column, Report, ResultTable, RunResults
from lightning_sym.reports.report import Row, averages, finite, grouped, spread_cell

_LOSS = "ensemble/loss/"


def _gain(row: Row) -> str:
    alone = row["disagreement"] is None
    return "-" if alone else spread_cell("{:.4f}".format, row["ambiguity"], row["ambiguity_error"])


def _panel(quantity: str, label: str, factor: float = 1) -> Panel:
    of: Any = {"x": "members", "group": ["kind"], "factor": factor, "table": "added"}
    dots = Marks(f"alone_{quantity}", kind="dots", label="one network", color="{kind}", look={"alpha": 0.5}, **of)
    return Panel([Marks(quantity, **of), dots], xlabel="networks in the ensemble", ylabel=label, whole=True)


REPORT = Report(
    {"ensembles": "ensembles of networks", "added": "ensembles of networks, as their members are added"},
    [
        Column("kind", "source of the ensemble", "ensemble"),
        Column("members", "number of networks in the ensemble, the first ones", "size", "g"),
        Column("accuracy", "fraction of samples, 0 to 1", "accuracy", ".2f", 100, "ensemble/accuracy/{kind}"),
        Column("loss", "mean negative log probability of the right class, nats", "loss", ".4f", 1, _LOSS + "{kind}"),
        Column("brier", "mean squared distance of the probabilities from the one-hot label, 0 to 2"),
        Column("calibration_error", "expected calibration error, 0 to 1, in bins of equal width", "ECE", ".2f", 100),
        Column("..._error", "standard error over samples, given the networks"),
        Column("alone_...", "of the member that was added last, by itself"),
        Column("mean_...", "mean over the members, each by itself"),
        Column("ambiguity", "mean loss of the members less that of the ensemble, nats", "gain", _gain),
        Column("variance", "mean Brier score of the members less that of the ensemble"),
        Column("disagreement", "mean over pairs of members: fraction of samples that they assign to different classes",
               "differ", ".2f", 100),
        Column("divergence", "mean over ordered pairs of members of the Kullback-Leibler divergence, nats"),
    ],
    {
        "ensembles": Chart(
            [_panel("loss", "loss, nats"), _panel("accuracy", "accuracy, %", 100),
             _panel("calibration_error", "calibration error, %", 100)], "{title}"
        )
    },
    title="Ensembles: {title}",
    shown="means",
    layout={"compact": True},
    places={"picture": "ensembles.png", "table": "ensembles.csv", "added": "added.csv"},
)  # fmt: skip
SNAPSHOT_UNITS = {
    "network": "number of the network that was trained",
    "snapshot": "0 is where the first cycle began",
    "distance_from_start": "Euclidean distance of the weights from those of snapshot 0",
    "distance_from_previous": "Euclidean distance from the snapshot before",
    "norm": "Euclidean norm of the weights",
    "train_loss": "mean cross-entropy on training data, nats",
    "train_loss_barrier": "largest training loss on the straight line to the snapshot before, above the line between "
    "the losses of both, nats",
    "accuracy": REPORT.units["accuracy"],
    "loss": REPORT.units["loss"],
}


@dataclass(frozen=True, eq=False)
class MeasuredEnsemble:
    """Scores of one ensemble.

    Attributes:
        name: Its name in tables.
        kind: Its members; the terminal and the figure show means over ensembles of a kind.
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
    """Report the scores of ensembles.

    Args:
        ensembles: At least one; all scored on the same samples.
        title: Title of tables and figures.
        split: Split of the samples: ``"test"``.
        about: Everything needed to make the tables again.
        snapshots: A row for each snapshot of fast geometric ensembles, if there are any.
        notes: Lines below the table on the terminal.
    """
    last = [ensemble_row(one, len(one.scores.ambiguity)) for one in ensembles]
    added = [ensemble_row(one, count + 1) for one in ensembles for count in range(len(one.scores.ambiguity))]
    scores = ensembles[0].scores
    about = {**about, "split": split, "samples": scores.samples, "bins": scores.bins}
    # Standard errors are averaged too, as the samples are the same.
    means = [{**key, "ensembles": len(own), **averages(own, list(own[0])[2:])} for key, own in grouped(last, "kind")]
    several = [row for row in means if row["ensembles"] > 1]
    if several:
        kinds = ", ".join(row["kind"] for row in several)
        notes = [*notes, f"means over {max(row['ensembles'] for row in several)} ensembles each: {kinds}"]
    results = REPORT.results(
        {"ensembles": last, "added": added, "means": means},
        title=title,
        about=about,
        notes=[
            f"on {scores.samples} {split} samples: accuracy, %, ± {100 * means[0]['accuracy_error']:.2f}; loss, nats, "
            f"± {means[0]['loss_error']:.4f} (standard errors); expected calibration error, %, in {scores.bins} bins",
            "gain: mean loss of the members less that of the ensemble; differ: how often two of them disagree, %",
            *notes,
        ],
    )
    losses = [name for name in results.numbers if name.startswith(_LOSS)]
    extra = [ResultTable("snapshots", "snapshots of cyclical training", snapshots, SNAPSHOT_UNITS, about)]
    return replace(
        results,
        tables=[*results.tables, *(extra if snapshots else [])],
        headline=min(losses, key=results.numbers.__getitem__),
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
