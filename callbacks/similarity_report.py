"""Similarity of the layers of networks and its null values: the tables and the pictures."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import counted
from lightning_sym.reports.similarity import Similarities, similarity_results
from lightning_sym.tasks import SimilarityTask


class SimilarityReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.SimilarityTask`.

    Rank 0 writes to ``results``:

    - ``summary.csv`` and ``.json``: each layer with the same layer of the other network, or with the most similar one
      if the numbers of layers differ. Columns: mean and standard deviation over pairs, bootstrap interval over models;
      the same of untrained networks, of shuffled images, and of the difference to the untrained
    - ``matrices.csv`` and ``.json``: all layers with all
    - ``pairs.csv`` and ``.json``: each pair
    - ``channels.csv`` and ``.json``: live channels of each network
    - ``heat_maps.png`` and ``depth.png`` (in TensorBoard under ``figures/SimilarityReport``)

    The means over layers are logged as ``similarity_mean/<measure>``. A table is printed, with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = (
        "similarities",
        "live",
        "pairs",
        "layers",
        "zoos",
        "split",
        "images",
        "seed",
        "identity",
    )
    example = "SimilarityTask"

    def report(self, trainer: Trainer, task: SimilarityTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the similarities, with figures."""
        found = found_by(task)
        about = {
            "zoos": zoos_of(task),
            **task.identity(),
            "images": task.images,
            "seeds": {"seed": task.seed},
            **self.source(data),
        }
        kinds = [zoo.architecture["class_path"].rpartition(".")[2] for zoo, _ in task.zoos.values()]
        title = f"{' and '.join(kinds)}, {counted(len(task.pairs), 'pair')}, {task.images} {task.split} inputs"
        return similarity_results(found, title=title, about=about)


def found_by(task: SimilarityTask) -> Similarities:
    """Return the similarities of a task."""
    return Similarities(task.similarities, task.pairs, task.layers, task.live, one_zoo=len(task.zoos) == 1)


def zoos_of(task: SimilarityTask) -> dict[str, Any]:
    """Return the origin of the compared networks."""
    both = len(task.zoos) == 1  # zoos of the members of a pair
    return {
        name: {
            "path": str(zoo.path),
            "architecture": zoo.architecture,
            "members": {
                str(number): zoo.member(number).sha256
                for number in sorted({n for pair in task.pairs for n in (pair if both else pair[side : side + 1])})
            },
        }
        for side, (name, (zoo, _)) in enumerate(task.zoos.items())
    }
