"""Pruned networks: the table of steps, the picture, and the networks themselves."""

from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.pruning import PrunedMember, pruning_results
from lightning_sym.reports.report import counted
from lightning_sym.tasks import RashomonPruning
from lightning_sym.zoo import rebuild_manifest, write_member


class PruningReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.RashomonPruning` and write the smaller networks.

    At the end of the fit every network is measured once more on all training data: one above its threshold is an error.

    Rank 0 writes to ``results``:

    - ``summary.csv`` and ``.json``: units, loss, threshold and test error of each pruned network, and the same of its
      twin pruned by magnitude
    - ``steps.csv`` and ``.json``: the units removed in each step
    - ``magnitude.csv`` and ``.json``: the twins, by width
    - ``widths.csv`` and ``.json``: units of every axis group
    - ``pruning.png`` (in TensorBoard under ``figures/PruningReport``)

    The folder ``pruned`` next to ``results`` has every network as a zoo of one member with its index, for example
    ``pruned/member-0000/epsilon-0.01``. The numbers of units and the test errors are logged as
    ``details/pruning/units/member-0`` and ``details/pruning/test_error/member-0``, the lowest number of units as
    ``pruning/units``. A table is printed.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = (
        *("prunings", "jobs", "twins", "units", "pruned", "check", "model_zoo", "stopped", "name"),
        *("settings", "describe"),
    )
    example = "RashomonPruning"

    def measure(self, trainer: Trainer, task: RashomonPruning, data: InMemoryDataModule) -> None:
        """Check that all networks are below their thresholds."""
        for job in range(len(task.jobs)):
            task.check(job)

    def report(self, trainer: Trainer, task: RashomonPruning, data: InMemoryDataModule, measured: None) -> RunResults:
        """Return the tables and the figure."""
        members = []
        for job, (number, epsilon) in enumerate(task.jobs):
            pruning = task.prunings[job]
            whole, small = task.model_zoo.load(number), task.pruned(job)
            members.append(
                PrunedMember(
                    member=number,
                    epsilon=epsilon,
                    threshold=pruning.threshold,
                    history=pruning.history,
                    sizes=task.units.sizes,
                    widths=pruning.widths,
                    parameters=(_parameters(whole), _parameters(small)),
                    walks=pruning.walks,
                    steps=pruning.walks * pruning.settings.steps,
                    finished=pruning.finished,
                    stopped=task.stopped.get(job, {}).get("reason", ""),
                    twin=task.twins.get(job, []),
                )
            )
        zoo = task.model_zoo
        about = {
            **zoo.source(number for number, _ in task.jobs),
            "settings": [vars(settings) for settings in task.settings.values()],
            "optimizer": task.describe(),
            **self.source(data),
        }
        kind = zoo.architecture["class_path"].rpartition(".")[2]
        title = f"{kind}, {counted(len({number for number, _ in task.jobs}), 'member')}"
        results = pruning_results(members, task.units.refused, title=title, about=about)
        self._write(task, data)
        return results

    def _write(self, task: RashomonPruning, data: InMemoryDataModule) -> None:
        """Write every network as a separate zoo, as architectures differ."""
        for job, (number, _) in enumerate(task.jobs):
            small, pruning, last = task.pruned(job), task.prunings[job], task.prunings[job].history[-1]
            metrics: dict[str, dict[str, float]] = {"train": {"loss": last.loss}}
            if "test_error" in last.numbers:
                metrics["test"] = {"accuracy": 1 - last.numbers["test_error"], "loss": last.numbers["test_loss"]}
            training: dict[str, Any] = {
                **task.model_zoo.member(number).training,
                "pruned": {"threshold": pruning.threshold, "widths": pruning.widths, **vars(pruning.settings)},
            }
            folder = self.zoo_of(task.name(job))
            write_member(
                folder,
                number,
                small.state_dict(),
                architecture=small.architecture,
                metrics=metrics,
                data=data.identity(),
                training=training,
            )
            rebuild_manifest(folder)

    def zoo_of(self, name: str) -> Path:
        """Return the folder of the zoo of a network, given the task's name for it."""
        return self.path.parent / "pruned" / name


def _parameters(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
