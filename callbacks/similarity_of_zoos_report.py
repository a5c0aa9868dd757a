"""Similarity of networks within each of several zoos: the tables and the picture."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.callbacks.report import RunReport
from lightning_sym.callbacks.similarity_report import found_by, zoos_of
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import counted
from lightning_sym.reports.similarity import similarity_of_zoos_results
from lightning_sym.tasks import SimilarityOfZoosTask


class SimilarityOfZoosReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.SimilarityOfZoosTask`.

    On rank 0, in ``results``: ``summary.csv`` and ``.json``, ``pairs.csv`` and ``.json``, ``channels.csv`` and
    ``.json``, and ``zoos.png`` (in TensorBoard under ``figures/SimilarityOfZoosReport``), with the interval for the
    mean over pairs. A table is printed, with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = ("parts", "split", "seed")
    example = "SimilarityOfZoosTask"

    def report(
        self, trainer: Trainer, task: SimilarityOfZoosTask, data: InMemoryDataModule, measured: Any
    ) -> RunResults:
        """Return the similarities, with the figure."""
        about = {
            "zoos": {name: {**zoos_of(part), **part.identity()} for name, part in task.parts.items()},
            "images": max(part.images for part in task.parts.values()),
            "seeds": {"seed": task.seed},
            **self.source(data),
        }
        found = {name: found_by(part) for name, part in task.parts.items()}
        title = f"{counted(len(found), 'zoo')}, {about['images']} {task.split} inputs"
        return similarity_of_zoos_results(found, title=title, about=about)
