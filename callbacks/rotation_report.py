"""The rotation penalty of every member, site, kind and repeat: the table and the picture."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym._tags import tag
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import counted, picked
from lightning_sym.reports.rotation import KINDS, rotation_results
from lightning_sym.tasks import RotationTask


class RotationReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.RotationTask`.

    At the end of the fit, and only then, the kept weights of members and rotated networks are evaluated on the test
    split. Processes share the images.

    Rank 0 writes to ``results``:

    - ``penalties.csv`` and ``.json``: accuracies and penalties on validation and test images, for every member, site,
      kind and repeat
    - ``summary.csv`` and ``.json``, per site and kind: mean, standard deviation over repeats, bootstrap interval over
      members (or repeats of a single member), and excess of the penalty over that of the group, by member
    - ``rotation_penalty.png`` (in TensorBoard under ``figures/RotationReport``)

    Mean penalties are logged as ``test_penalty/<site>/<kind>`` and ``test_penalty/<kind>``. The penalty of ``group``
    (of the first kind without it) is shown with the hyperparameters. A table is printed, with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3.
    """

    needs = (
        *("rotations", "branches", "names", "members", "lower_of", "kinds", "model_zoo", "seed", "kept", "stopped"),
        *("repeats", "scale", "weight_decay_on"),
        *("evaluating", "evaluate", "penalties", "quantities", "parameters_of"),
    )
    example = "RotationTask"

    def measure(
        self, trainer: Trainer, task: RotationTask, data: InMemoryDataModule
    ) -> dict[str, dict[str, list[float]]]:
        """Evaluate the kept weights and the members on the test split, and on the validation split if there is one."""
        validation = data.val_dataloader()
        with task.evaluating():
            found = {"test": task.evaluate(data.test_dataloader())}
            if not isinstance(validation, list):  # there are validation images
                found["val"] = task.evaluate(validation)
        return found

    def report(self, trainer: Trainer, task: RotationTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return penalties and their means over members and repeats, with the figure."""
        networks = [
            {
                "name": task.names[index],
                **picked(rotation, "member", "site", "kind", "repeat"),
                "epoch": task.kept[index]["epoch"]
                if index in task.kept and index not in task.stopped and task.parameters_of(index)
                else None,
            }
            for index, rotation in enumerate(task.rotations)
        ]
        place = {key: len(task.branches) + offset for offset, key in enumerate(task.members)}
        evaluations = {
            split: {
                **found,
                "penalty": task.penalties(found["accuracy"]),
                "member_accuracy": [found["accuracy"][place[key]] for key in task.lower_of],
            }
            for split, found in measured.items()
        }
        zoo, members = task.model_zoo, list(task.members)
        about = {
            "kinds": {kind: KINDS.get(kind, kind) for kind in task.kinds},
            "zoo": str(zoo.path),
            "architecture": zoo.architecture,
            "members": {key: zoo.member(int(key)).sha256 for key in members},
            "seed": task.seed,
            "settings": picked(task, "repeats", "scale", "weight_decay_on"),
            "epochs": trainer.current_epoch,
            **self.source(data),
        }
        numbers = task.quantities(measured["test"], "test")
        main = tag("test_penalty", "group" if "group" in task.kinds else task.kinds[0])
        return rotation_results(
            networks,
            evaluations,
            {index: record["reason"] for index, record in task.stopped.items()},
            title=f"{architecture_name(task.members[members[0]])}, {counted(len(members), 'member')}",
            about=about,
            numbers=numbers,
            headline=main if main in numbers else None,
        )
