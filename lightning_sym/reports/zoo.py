"""The members of a trained zoo: their accuracies, validation curves and confusion."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym.figures import Chart, Marks, Panel, confusion_matrix
from lightning_sym.reports.report import ResultTable, Row, RunResults, text_table
from lightning_sym.zoo import statistics

UNITS = {
    "accuracy": "fraction of inputs, 0 to 1",
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
    curves: Sequence[Sequence[float]] = (),
    epochs: Sequence[float] = (),
    class_names: Sequence[str] | None = None,
    most: int = 12,
    loss: str | None = None,
) -> RunResults:
    """Report the members of a population.

    Args:
        numbers: The members' numbers.
        splits: By split, the last one the headline: ``loss`` of each member, and of classifiers ``accuracy``, and
            ``confusion``, the mean over members, if classes are few. Shapes ``[M]``, ``[M]`` and ``[K, K]``.
        stopped: The ``reason`` of each member that was stopped, by number.
        kept: Epochs trained when the weights were taken that were kept, by number.
        network: Name of the architecture, for titles.
        about: Everything needed to make the table again.
        curves: Per validation each member's accuracy, or its loss if there is none; empty if there was no validation.
            Shape ``[validations, M]``.
        epochs: How many epochs had been trained at each.
        class_names: Names of the ``K`` classes; default their indices.
        most: Members listed on the terminal; the files hold all.
        loss: Name of the loss of networks that are no classifiers; None for the cross-entropy.
    """
    rows = zoo_rows(numbers, splits, stopped, kept)
    quantity = "accuracy" if loss is None else "loss"
    tested = [row[f"test_{quantity}"] for row in rows if not row["stopped"]]
    mean = statistics(tested)["mean"] if tested else None

    confusion = splits["test"].get("confusion") if loss is None else None
    said = "all stopped" if mean is None else f"mean test accuracy {100 * mean:.2f} %"

    picture = "validation_curves.png" if len(curves) else "confusion.png" if confusion is not None else ""

    def figures() -> Iterator[tuple[str, Figure]]:
        if len(curves):
            drawn = [
                {"member": number, "epoch": epoch, quantity: value, "kept": kept.get(number) == epoch}
                for epoch, values in zip(epochs, curves, strict=True)
                for number, value in zip(numbers, values, strict=True)
            ]
            yield from _chart(quantity, len(numbers), kept=bool(kept)).named("validation_curves", drawn)
        if confusion is not None:
            title = f"{len(numbers)} {network}, {said}"
            yield "confusion", confusion_matrix(confusion.numpy(), class_names=class_names, title=title)

    return RunResults(
        [ResultTable("members", "members of a zoo: the kept weights on each split", rows, units(loss), about)],
        figures(),
        numbers={} if mean is None else {f"test/{quantity}": mean},
        headline=None if mean is None else f"test/{quantity}",
        shown=_shown(rows, most, network, loss),
        notes=[f"member {row['member']} was stopped: {row['stopped']}" for row in rows if row["stopped"]],
        places={**({"picture": picture} if picture else {}), "table": "members.csv"},
    )


def _chart(quantity: str, members: int, *, kept: bool) -> Chart:
    """Return the chart of validation curves; of many members it names none."""
    few: Any = {"group": ["member"], "label": "member {member}"} if members <= 10 else {"label": "members"}
    marks = [
        Marks(quantity, "epoch", kind="lines", look={"lw": 1.2 if members <= 10 else 0.7, "alpha": 0.7}, **few),
        Marks(quantity, "epoch", kind="dots", where={"kept": True}, look={"ms": 9}, **few),
        Marks(
            quantity, "epoch", label=f"mean of {members}", look={"color": "#1b1b1b", "ls": "-", "lw": 2.4, "marker": ""}
        ),
    ]
    heading = f"Validation {quantity}{' (dot: weights kept)' if kept else ''}"
    return Chart([Panel(marks, heading, "epoch", f"validation {quantity}", whole=True)])


def units(loss: str | None) -> dict[str, str]:
    """Return the units of the table; arguments as for :func:`zoo_results`."""
    if loss is None:
        return UNITS
    return {"loss": f"mean {loss}", "epoch_kept": UNITS["epoch_kept"]}


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
                if name in values
            },
            "stopped": stopped[number]["reason"] if number in stopped else "",
        }
        for index, number in enumerate(numbers)
    ]


def _shown(rows: Sequence[Row], most: int, network: str, loss: str | None) -> Table:
    splits = [name.removesuffix("_loss") for name in rows[0] if name.endswith("_loss")]
    shares = [f"{split}_accuracy" for split in splits] if loss is None else []
    columns = [*shares, *(f"{split}_loss" for split in (splits if loss is not None else splits[-1:]))]

    def cells(row: Row) -> list[str]:
        return [f"{100 * row[name]:.2f} %" if name in shares else f"{row[name]:.4f}" for name in columns]

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
    title = f"Zoo of {len(rows)} {network}: {'accuracy' if loss is None else loss} of the weights kept"
    names = [*splits, f"{splits[-1]} loss"] if loss is None else splits
    return text_table(title, ["member", "epoch kept", *names], lines)
