"""The table and the pictures at the end of training a zoo."""

from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from rich.table import Table

from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.figures import confusion_matrix, validation_curves, zoo_overview
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import statistics, versions

_UNITS = {
    "accuracy": "fraction of images, 0 to 1",
    "loss": "mean cross-entropy, nats",
    "epoch_kept": "epochs trained when the weights were taken",
}


class ZooReport(RunReport[ZooTask]):
    """Say what a fit of a :class:`lightning_sym.tasks.ZooTask` found.

    At the end of the fit, on rank 0: ``results/members.csv`` and ``.json`` (kept epoch, accuracy and loss on each
    split, per member), ``results/zoo.png``, ``validation_curves.png`` and ``confusion.png`` (the last two in
    TensorBoard too, under ``figures/ZooReport``, and the mean test accuracy as ``hp_metric`` beside the
    hyperparameters), and a table on the terminal with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        rows: Members listed on the terminal; the files hold all. >= 0.
    """

    task_type = ZooTask

    def __init__(self, dirpath: str | None = None, rows: int = 12) -> None:
        if rows < 0:
            raise ValueError(f"rows must be at least 0, got {rows}.")
        super().__init__(dirpath)
        self.rows = rows
        self._table: list[dict[str, Any]] = []
        self._architecture = ""

    def report(self, trainer: Trainer, task: ZooTask, data: ImageDataModule) -> None:
        """Write the table and the figures."""
        task.split_metrics(data)
        stopped, kept = task.gathered()
        self._architecture = type(task.network).__name__
        if not trainer.is_global_zero:
            return
        self._table = _rows(task, data, stopped, kept)
        about = {
            "what": "members of a zoo: the kept weights on each split",
            "units": _UNITS,
            "architecture": task.network.architecture,
            "seeds": task.numbers,
            "data": data.identity(),
            "versions": versions(),
        }
        publish_table(self._table, about, self.path / "members")
        if tested := [row["test_accuracy"] for row in self._table if not row["stopped"]]:
            log_summary(trainer, {}, statistics(tested)["mean"])
        self._figures(trainer, task, data, kept)

    def _figures(self, trainer: Trainer, task: ZooTask, data: ImageDataModule, kept: dict[int, float]) -> None:
        confusion = task.split_metrics(data)["test"]["confusion"].numpy()
        names = data.class_names
        title = f"{type(task.network).__name__}, {task.members} members, test split"
        accuracy, epochs = task.history.get("val/accuracy", []), task.history_epochs.get("val", [])
        if accuracy:
            publish_figure(
                trainer,
                validation_curves(accuracy, task.numbers, epochs=epochs, kept=kept),
                "figures/ZooReport/validation_curves",
                self.path / "validation_curves.png",
            )
            tested = [row["test_accuracy"] for row in self._table if not row["stopped"]]
            mean = f"mean test accuracy {100 * statistics(tested)['mean']:.2f} %" if tested else "all stopped"
            overview = zoo_overview(
                accuracy,
                task.numbers,
                confusion,
                epochs=epochs,
                kept=kept,
                class_names=names,
                title=f"A zoo of {task.members} {type(task.network).__name__}, {mean}",
                confusion_title="Test confusion, mean over members",
            )
            publish_figure(trainer, overview, "figures/ZooReport/zoo", self.path / "zoo.png")
        publish_figure(
            trainer,
            confusion_matrix(confusion, class_names=names, title=title),
            "figures/ZooReport/confusion",
            self.path / "confusion.png",
        )

    def table(self) -> Table:
        """Return the members' accuracies."""
        return _terminal_table(self._table, self.rows, self._architecture)

    def notes(self) -> list[str]:
        """Say which members were stopped."""
        return [f"member {row['member']} was stopped: {row['stopped']}" for row in self._table if row["stopped"]]

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture, table and zoo."""
        places = {"picture": self.path / "zoo.png", "table": self.path / "members.csv"}
        exports = [callback for callback in trainer.callbacks if isinstance(callback, ZooExport)]  # type: ignore[attr-defined]
        if exports and exports[0].path is not None:
            places["zoo"] = exports[0].path
        return places


def _rows(
    task: ZooTask, data: ImageDataModule, stopped: dict[int, dict[str, Any]], kept: dict[int, float]
) -> list[dict[str, Any]]:
    splits = task.split_metrics(data)
    table = []
    for index, number in enumerate(task.numbers):
        row: dict[str, Any] = {"member": number, "epoch_kept": f"{kept.get(number, 0):g}"}
        for split, values in splits.items():
            for name in ("accuracy", "loss"):
                row[f"{split}_{name}"] = float(values[name][index])
        if number in stopped:
            row.update(dict.fromkeys([name for name in row if name.endswith(("_accuracy", "_loss"))]))
        row["stopped"] = stopped[number]["reason"] if number in stopped else ""
        table.append(row)
    return table


def _terminal_table(rows: list[dict[str, Any]], shown: int, architecture: str) -> Table:
    table = Table(title=f"Zoo of {len(rows)} {architecture}: accuracy of the weights kept", title_justify="left")
    splits = [name.removesuffix("_accuracy") for name in rows[0] if name.endswith("_accuracy")]
    for column in ("member", "epoch kept", *splits, f"{splits[-1]} loss"):
        table.add_column(column, justify="left" if column == "member" else "right")
    for row in rows[:shown]:
        if row["stopped"]:
            table.add_row(str(row["member"]), "stopped")
            continue
        cells = [f"{100 * row[f'{split}_accuracy']:.2f} %" for split in splits]
        table.add_row(str(row["member"]), str(row["epoch_kept"]), *cells, f"{row[f'{splits[-1]}_loss']:.4f}")
    if len(rows) > shown:
        table.add_row(f"+{len(rows) - shown} more")
    running = [row for row in rows if not row["stopped"]]
    if running:
        table.add_section()
        for name in ("mean", "min", "max"):
            cells = [f"{100 * statistics([r[f'{s}_accuracy'] for r in running])[name]:.2f} %" for s in splits]
            loss = statistics([row[f"{splits[-1]}_loss"] for row in running])[name]
            table.add_row(name, "", *cells, f"{loss:.4f}")
    return table
