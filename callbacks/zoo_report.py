"""The table and the pictures at the end of training a zoo."""

from dataclasses import replace
from typing import Any

from pytorch_lightning import LightningModule, Trainer

from lightning_sym._checks import check_integers
from lightning_sym.callbacks.report import RunReport
from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.zoo import zoo_results
from lightning_sym.tasks import ZooTask


class ZooReport(RunReport):
    """Say what a fit of a :class:`lightning_sym.tasks.ZooTask` found.

    At the end of the fit, on rank 0: ``results/members.csv`` and ``.json`` (kept epoch, accuracy and loss on each
    split, per member), ``results/zoo.png``, ``validation_curves.png`` and ``confusion.png`` (all in TensorBoard too,
    under ``figures/ZooReport``, and the mean test accuracy, ``test/accuracy``, beside the hyperparameters), and a table
    on the terminal with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        rows: Members listed on the terminal; the files hold all. >= 0.

    Raises:
        ValueError: If ``rows`` is negative.
    """

    needs = ("numbers", "network", "split_metrics", "gathered", "history", "history_epochs")
    example = "ZooTask"

    def __init__(self, dirpath: str | None = None, rows: int = 12) -> None:
        check_integers(0, rows=rows)
        super().__init__(dirpath)
        self.rows = rows

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the task has what is reported.

        Raises:
            ValueError: If it has no accuracies.
        """
        super().setup(trainer, pl_module, stage)
        if not getattr(pl_module, "classifies", True):
            raise ValueError(
                "ZooReport shows accuracies, and this task has a loss of its own and none; leave the callback out "
                "(metrics.csv has the losses of all members)."
            )

    def measure(self, trainer: Trainer, task: ZooTask, data: InMemoryDataModule) -> Any:
        """Evaluate the kept weights of all members on each split."""
        return task.split_metrics(data), *task.gathered()

    def report(self, trainer: Trainer, task: ZooTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the members' table and the figures, and where the zoo is."""
        results = zoo_results(
            task.numbers,
            *measured,
            network=architecture_name(task.network),
            about={"architecture": task.network.architecture, "seeds": task.numbers, **self.source(data)},
            accuracy=task.history.get("val/accuracy", []),
            epochs=task.history_epochs.get("val", []),
            class_names=data.class_names,
            most=self.rows,
        )
        exports = [("zoo", one.path) for one in trainer.callbacks if isinstance(one, ZooExport)]  # type: ignore[attr-defined]
        return replace(results, places={**results.places, **dict(exports[:1])})
