"""The members of a trained zoo: their accuracies, validation curves and confusion."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym.figures import confusion_matrix, validation_curves, zoo_overview
from lightning_sym.reports.cells import Row, text_table
from lightning_sym.reports.table import ResultTable, RunResults
from lightning_sym.zoo import statistics

UNITS = {
    "accuracy": "fraction of images, 0 to 1",
    "loss": "mean cross-entropy, nats",
    "epoch_kept": "epochs trained when the weights were taken",
}


def zoo_results(
    numbers: Sequence[int],
    splits: Mapping[str, Mapping[str, Any]],
    stopped: Mapping[int, Mapping[str, Any]],
    kept: Mapping[int, float],
    *,
    network: str,
    about: Mapping[str, Any],
    accuracy: Sequence[Sequence[float]] = (),
    epochs: Sequence[float] = (),
    class_names: Sequence[str] | None = None,
    most: int = 12,
) -> RunResults:
    """Say what a fit of a population of classifiers found.

    Args:
        numbers: The members' numbers.
        splits: By split, the last one the headline: ``accuracy`` and ``loss`` of each member, and ``confusion``, the
            mean over members. Shapes ``[M]``, ``[M]`` and ``[K, K]``.
        stopped: The ``reason`` of each member that was stopped, by number.
        kept: Epochs trained when the weights were taken that were kept, by number.
        network: Name of the architecture, for titles.
        about: What is needed to make the table again.
        accuracy: Per validation one fraction per member; empty if there was no validation. Shape ``[validations, M]``.
        epochs: How many epochs had been trained at each.
        class_names: Names of the ``K`` classes; default their indices.
        most: Members listed on the terminal; the files hold all.
    """
    rows = zoo_rows(numbers, splits, stopped, kept)
    tested = [row["test_accuracy"] for row in rows if not row["stopped"]]
    mean = statistics(tested)["mean"] if tested else None

    def figures() -> Iterator[tuple[str, Figure]]:
        confusion = splits["test"]["confusion"].numpy()
        if len(accuracy):
            when: Any = {"epochs": epochs, "kept": kept}
            yield "validation_curves", validation_curves(accuracy, numbers, **when)
            said = "all stopped" if mean is None else f"mean test accuracy {100 * mean:.2f} %"
            when["title"] = f"A zoo of {len(numbers)} {network}, {said}"
            heading = "Test confusion, mean over members"
            yield (
                "zoo",
                zoo_overview(accuracy, numbers, confusion, class_names=class_names, confusion_title=heading, **when),
            )
        title = f"{network}, {len(numbers)} members, test split"
        yield "confusion", confusion_matrix(confusion, class_names=class_names, title=title)

    return RunResults(
        [ResultTable("members", "members of a zoo: the kept weights on each split", rows, UNITS, about)],
        figures(),
        numbers={} if mean is None else {"test/accuracy": mean},
        headline=None if mean is None else "test/accuracy",
        shown=_shown(rows, most, network),
        notes=[f"member {row['member']} was stopped: {row['stopped']}" for row in rows if row["stopped"]],
        places={"picture": "zoo.png", "table": "members.csv"},
    )


def zoo_rows(
    numbers: Sequence[int],
    splits: Mapping[str, Mapping[str, Any]],
    stopped: Mapping[int, Mapping[str, Any]],
    kept: Mapping[int, float],
) -> list[dict[str, Any]]:
    """Return a row for each member, without numbers if it was stopped; arguments as for :func:`zoo_results`."""
    return [
        {
            "member": number,
            "epoch_kept": f"{kept.get(number, 0):g}",
            **{
                f"{split}_{name}": None if number in stopped else float(values[name][index])
                for split, values in splits.items()
                for name in ("accuracy", "loss")
            },
            "stopped": stopped[number]["reason"] if number in stopped else "",
        }
        for index, number in enumerate(numbers)
    ]


def _shown(rows: Sequence[Row], most: int, network: str) -> Table:
    splits = [name.removesuffix("_accuracy") for name in rows[0] if name.endswith("_accuracy")]
    columns = [*(f"{split}_accuracy" for split in splits), f"{splits[-1]}_loss"]

    def cells(row: Row) -> list[str]:
        return [*(f"{100 * row[name]:.2f} %" for name in columns[:-1]), f"{row[columns[-1]]:.4f}"]

    lines: list[list[str] | None] = [
        [str(row["member"]), "stopped"] if row["stopped"] else [str(row["member"]), str(row["epoch_kept"]), *cells(row)]
        for row in rows[:most]
    ]
    if len(rows) > most:
        lines.append([f"+{len(rows) - most} more"])
    if running := [row for row in rows if not row["stopped"]]:
        summary = {name: statistics([row[name] for row in running]) for name in columns}
        of = {how: {name: summary[name][how] for name in columns} for how in ("mean", "min", "max")}
        lines += [None, *([how, "", *cells(values)] for how, values in of.items())]
    title = f"Zoo of {len(rows)} {network}: accuracy of the weights kept"
    return text_table(title, ["member", "epoch kept", *splits, f"{splits[-1]} loss"], lines)
