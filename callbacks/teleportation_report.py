"""The report of training with symmetry teleportation."""

import math
from collections.abc import Iterator
from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import counted
from lightning_sym.reports.teleportation import teleportation_results
from lightning_sym.tasks import TeleportationTask


class TeleportationReport(RunReport):
    """Compare the arms of a :class:`lightning_sym.tasks.TeleportationTask`, each at its best learning rate.

    On rank 0, in ``results``: ``summary.csv`` and ``.json`` (each arm at the learning rate with the lowest training
    loss), ``rates.csv``, ``runs.csv``, ``curves.csv`` and ``teleportation.png`` (in TensorBoard under
    ``figures/TeleportationReport``). Logged is ``teleportation/loss/<arm>``; a table is printed.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = (
        *("arms", "rates", "seeds", "arm_of", "rate_of", "seed_of", "numbers", "network", "split_metrics"),
        *("history", "history_epochs", "describe"),
    )
    example = "TeleportationTask"

    def measure(self, trainer: Trainer, task: TeleportationTask, data: InMemoryDataModule) -> Any:
        """Evaluate the kept weights on test data."""
        return task.split_metrics(data).get("test", {})

    def report(self, trainer: Trainer, task: TeleportationTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the tables and the figure."""
        curves = list(_curves(task))
        last = {tuple(row[name] for name in ("arm", "rate", "seed")): row["loss"] for row in curves}
        accuracies = measured.get("accuracy")
        runs = [
            {**about, "loss": last[tuple(about.values())], "accuracy": None if accuracies is None else float(value)}
            for number, value in zip(task.numbers, accuracies if accuracies is not None else task.numbers, strict=True)
            for about in [_about(task, number)]
        ]
        about = {
            "architecture": task.network.architecture,
            "arms": task.arms,
            "rates": task.rates,
            "seeds": task.seeds,
            "optimizer": task.describe(),
            **self.source(data),
        }
        title = f"{architecture_name(task.network)}, {counted(task.seeds, 'seed')}"
        return teleportation_results(runs, curves, title=title, about=about)


def _about(task: TeleportationTask, number: int) -> dict[str, Any]:
    return {"arm": task.arm_of(number), "rate": task.rate_of(number), "seed": task.seed_of(number)}


def _curves(task: TeleportationTask) -> Iterator[dict[str, Any]]:
    """Yield the training loss of each network and epoch."""
    for epoch, losses in zip(task.history_epochs["train"], task.history["train/loss"], strict=True):
        for number, loss in zip(task.numbers, losses, strict=True):
            yield {**_about(task, number), "epoch": epoch, "loss": loss if math.isfinite(loss) else None}
