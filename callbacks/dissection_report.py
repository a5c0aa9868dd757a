"""Concepts of single units in the members of zoos, in their own basis and in rotated ones: tables and figure."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.cells import counted, picked
from lightning_sym.reports.dissection import dissection_results
from lightning_sym.tasks import DissectionTask


class DissectionReport(RunReport):
    """Dissect the networks of a :class:`lightning_sym.tasks.DissectionTask` and report the results.

    Processes share the images. Rank 0 writes to ``results``:

    - ``changes.csv`` and ``.json``: each quantity in the networks' own basis, and its change to the end of the path,
      with an interval over members
    - ``summary``: means over members in each basis
    - ``bases``: the quantities of each network and basis
    - ``units``: the concept of each unit in the network's own basis
    - ``dissection.png`` (in TensorBoard under ``figures/DissectionReport``)

    The changes are logged as ``dissection/<zoo>/change_of_<quantity>``. A table is printed.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = ("zoos", "sites", "dissect_all", "numbers", "alphas", "top", "least", "basis_seed")
    example = "DissectionTask"
    data_type = InputDataModule

    def measure(self, trainer: Trainer, task: DissectionTask, data: Any) -> Any:
        """Dissect all networks in all bases."""
        with self.progress(trainer, "dissecting") as progress:
            return task.dissect_all(data, trainer.strategy.root_device, progress)

    def report(self, trainer: Trainer, task: DissectionTask, data: Any, measured: Any) -> RunResults:
        """Return the tables and the figure."""
        members = {name: task.numbers(name) for name in task.zoos}
        about = {
            "zoos": {
                name: {
                    "folder": str(zoo.path),
                    "architecture": zoo.architecture,
                    "site": task.sites[name],
                    "members": {str(number): zoo.member(number).sha256 for number in members[name]},
                }
                for name, zoo in task.zoos.items()
            },
            "concepts": [list(concept) for concept in data.concepts],
            "seeds": {"members": members, "basis_seed": task.basis_seed},
            "settings": {**picked(task, "top", "least"), "alphas": list(task.alphas)},
            **self.source(data),
        }
        title = f"{counted(len(members), 'zoo')}, {counted(max(map(len, members.values())), 'member')}"
        return dissection_results(measured, data.concepts, least=task.least, title=title, about=about)
