"""The table and the pictures at the end of training a zoo."""

from dataclasses import replace
from typing import Any

from pytorch_lightning import Trainer

from lightning_sym._checks import check_integers
from lightning_sym.callbacks.report import RunReport
from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.zoo import zoo_results
from lightning_sym.tasks import ZooTask


class ZooReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.ZooTask`.

    At the end of the fit, on rank 0: ``results/members.csv`` and ``.json`` (kept epoch, accuracy and loss on each
    split, per member), ``results/validation_curves.png`` and ``confusion.png`` (in TensorBoard under
    ``figures/ZooReport``). TensorBoard shows the mean test accuracy, ``test/accuracy``, with the hyperparameters. A
    table on the terminal lists the places of all files. Losses other than the cross-entropy are reported without
    accuracies and confusion.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        rows: Members listed on the terminal; the files hold all. >= 0.

    Raises:
        ValueError: If ``rows`` is negative.
    """

    needs = ("numbers", "network", "split_metrics", "classifies", "gathered", "history", "history_epochs")
    example = "ZooTask"

    def __init__(self, dirpath: str | None = None, rows: int = 12) -> None:
        check_integers(0, rows=rows)
        super().__init__(dirpath)
        self.rows = rows

    def measure(self, trainer: Trainer, task: ZooTask, data: InMemoryDataModule) -> Any:
        """Evaluate the kept weights of all members on each split."""
        return task.split_metrics(data), *task.gathered()

    def report(self, trainer: Trainer, task: ZooTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the members' table and the figures, and where the zoo is."""
        classifies = task.classifies
        results = zoo_results(
            task.numbers,
            *measured,
            network=architecture_name(task.network),
            about={"architecture": task.network.architecture, "seeds": task.numbers, **self.source(data)},
            curves=task.history.get("val/accuracy" if classifies else "val/loss", []),
            epochs=task.history_epochs.get("val", []),
            class_names=data.class_names,
            most=self.rows,
            loss=None if classifies else str(task.hparams.get("loss_name", "loss")),
        )
        exports = [("zoo", one.path) for one in trainer.callbacks if isinstance(one, ZooExport)]  # type: ignore[attr-defined]
        return replace(results, places={**results.places, **dict(exports[:1])})
