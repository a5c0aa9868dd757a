"""Concepts of single units in the members of zoos, in their own basis and in rotated ones: tables and figure."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym._checks import check_integers
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.dissection import dissection_results
from lightning_sym.reports.report import counted, picked
from lightning_sym.tasks import DissectionTask

_IMAGES = 4  # of each of the best units


class DissectionReport(RunReport):
    """Dissect the networks of a :class:`lightning_sym.tasks.DissectionTask` and report the results.

    Processes share the images. Rank 0 writes to ``results``:

    - ``changes.csv`` and ``.json``: each quantity in the networks' own basis, and its change to the end of the path,
      with an interval over members
    - ``summary``: means over members in each basis
    - ``bases``: the quantities of each network and basis
    - ``units``: the concept of each unit in the network's own basis
    - ``concepts``, ``categories``: how many units detect each concept, and a concept of each category
    - ``dissection.png``, ``categories.png``; for each zoo ``concepts-<zoo>.png`` and ``best-units-<zoo>.png``, the
      units with the largest overlaps in three bases of its first member, with images and active pixels (in
      TensorBoard under ``figures/DissectionReport``)

    The changes are logged as ``dissection/<zoo>/change_of_<quantity>``. A table is printed.

    Args:
        best_units: Units of each basis in ``best-units-<zoo>.png``, >= 0; 0 for no such figure.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If a number is out of its range.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, figures 3 and 18 to 25.
    """

    needs = ("zoos", "sites", "dissect_all", "best_units", "members_of", "alphas", "top", "least", "basis_seed")
    example = "DissectionTask"
    data_type = InputDataModule

    def __init__(self, best_units: int = 4, dirpath: str | None = None) -> None:
        super().__init__(dirpath)
        check_integers(0, best_units=best_units)
        self.best_units = best_units

    def measure(self, trainer: Trainer, task: DissectionTask, data: Any) -> Any:
        """Dissect all networks in all bases, and find the best units with their strongest images."""
        device = trainer.strategy.root_device
        with self.progress(trainer, "dissecting") as progress:
            found = task.dissect_all(data, device, progress)
        if not self.best_units:
            return found, []
        return found, task.best_units(data, device, units=self.best_units, images=_IMAGES)

    def report(self, trainer: Trainer, task: DissectionTask, data: Any, measured: Any) -> RunResults:
        """Return the tables and the figure."""
        members = {name: task.members_of(name) for name in task.zoos}
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
        return dissection_results(*measured, concepts=data.concepts, least=task.least, title=title, about=about)
