"""Results of merging or aligning checkpoints: losses, barriers, distances."""

from collections.abc import Iterator
from typing import Any

from lightning_sym.merging import MergedCheckpoints
from lightning_sym.reports.paths import path_chart
from lightning_sym.reports.report import ResultTable, RunResults

UNITS = {
    "loss": "mean over the test data; batch norms of merged networks are recomputed",
    "accuracy": "fraction of inputs, 0 to 1",
    "loss_barrier": "largest loss on the line from the reference above the straight line between its ends",
    "accuracy_barrier": "the same of the accuracy, positive where the line is worse",
    "alignment": "unmatched and aligned; unchanged if both are the same network",
    "distance": "Euclidean distance of the parameters to those of the reference",
    "equal": "whether outputs and all slices of tensors are those of the reference, to rounding; if aligned: "
    "up to symmetry; other trainings are not equal",
    "t": "place on the line, 0 (reference) to 1 (the other one)",
    "dropped": "fraction of the numbers of its difference from the base that are dropped, 0 to 1",
    "conflicts": "fraction of the numbers at which kept differences, times their weights, have both signs, 0 to 1; the "
    "same for all networks",
    "after": "the next network, for the cosine",
    "cosine": "between its difference from the base and that of the network in the column after, -1 to 1",
}
EXPLAINED = ("equal", "dropped", "conflicts", "after", "cosine")
"""Columns that need an explanation where they are printed."""


def merging_results(found: MergedCheckpoints, about: dict[str, Any], loss: str | None = None) -> RunResults:
    """Make the tables and the figure of merged checkpoints.

    Args:
        found: By :func:`lightning_sym.merging.merge_checkpoints`.
        about: Everything needed to make the result again.
        loss: Name of the loss; None for the cross-entropy.
    """
    about = {
        **about,
        "files": [str(file) for file in found.files],
        "out": str(found.out),
        "method": found.settings.method.name,
        "align": found.align,
        "align_only": found.align_only,
        "largest_change": found.largest_change,
        "symmetry": {"dimension": found.symmetry.dimension, "fingerprint": found.symmetry.fingerprint},
        "notes": list(found.notes),
    }
    tables = [ResultTable("lines", "from the reference to each other one", list(_lines(found)), UNITS, about)]
    if found.has_base:
        tables.append(ResultTable("differences", "from the base", list(_differences(found)), UNITS, about))
    if found.losses is not None:
        rows = [{"weights": name, "loss": own, "accuracy": acc} for name, (own, acc) in found.losses.items()]
        tables.insert(0, ResultTable("networks", "on the test data", rows, UNITS, about))
    points = list(_points(found))
    if points:
        tables.append(ResultTable("curves", "points on the lines", points, UNITS, about))
    chart = path_chart(points, "alignment", title="Between checkpoints", panel="test data", loss=loss)
    return RunResults(
        tables,
        chart.named("interpolation", points),
        files={"symmetry.txt": f"{found.symmetry}\n"},
        notes=[f"note: {note}" for note in found.notes],
    )


def _lines(found: MergedCheckpoints) -> Iterator[dict[str, Any]]:
    """Yield two rows for each network but the reference; one if both are the same, as it did not move."""
    for number, other in enumerate(found.names[1:]):
        before, after = (_line(found, number, place, name) for place, name in enumerate(("unmatched", "aligned")))
        names = {"unchanged": before} if before == after else {"unmatched": before, "aligned": after}
        for name, row in names.items():
            yield {"to": other, "alignment": name, **row}


def _line(found: MergedCheckpoints, number: int, place: int, name: str) -> dict[str, Any]:
    """Describe the path from the reference to another network, before (0) or after (1) alignment."""
    row: dict[str, Any] = {
        "distance": found.distances[number][place],
        "equal": found.equal[number][place].answer == "equal",
    }
    if found.barriers is not None:
        barrier = found.barriers[name][number]
        row |= {"loss_barrier": barrier.loss_barrier, "accuracy_barrier": barrier.accuracy_barrier}
    return row


def _differences(found: MergedCheckpoints) -> Iterator[dict[str, Any]]:
    names, tally = found.names[1:], found.tally
    if tally.cosines is None:
        return
    for number, name in enumerate(names):
        row = {"network": name, "dropped": tally.masked[number] if tally.masked else 0.0, "conflicts": tally.conflicts}
        if len(names) > 1:
            after = (number + 1) % len(names)
            row |= {"after": names[after], "cosine": float(tally.cosines[number, after])}
        yield row


def _points(found: MergedCheckpoints) -> Iterator[dict[str, Any]]:
    for name, own in (found.barriers or {}).items():
        for other, barrier in zip(found.names[1:], own, strict=True):
            accuracies = [None] * len(barrier.t) if barrier.accuracy is None else barrier.accuracy.tolist()
            for t, loss, accuracy in zip(barrier.t.tolist(), barrier.loss.tolist(), accuracies, strict=True):
                yield {"to": other, "alignment": name, "t": t, "loss": loss, "accuracy": accuracy}
