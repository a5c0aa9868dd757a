"""Networks at several points of their orbits: tables and figures."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.orbit import OrbitPoint, orbit_results
from lightning_sym.reports.report import counted, picked
from lightning_sym.tasks import OrbitTask


class OrbitReport(RunReport):
    """Measure the points of orbits of an :class:`lightning_sym.tasks.OrbitTask` and report them.

    Processes share out the arms. Rank 0 writes to ``results``:

    - ``summary.csv`` and ``.json``: each setting and arm, means over members with 95 % intervals, also of the change
      against the network as trained
    - ``points.csv`` and ``.json``: each member
    - ``accuracy.png`` and ``error.png`` over the first option of the grid, for networks that are rounded or pruned;
      ``objective.png`` otherwise (in TensorBoard under ``figures/OrbitReport``). Lines are means over members, shades
      reach from the lowest to the highest.

    Logged are the changes by the arm ``orbit``, means over settings, such as ``orbit/error_change``, and those of
    single settings and arms, such as ``orbit/error_change/orbit/4_tensor``, as details if there are many. A table is
    printed.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = (
        *("model_zoo", "measure_all", "numbers", "objective", "grid", "options", "arms", "some", "roundings"),
        *("images", "steps", "lr", "orbit_seed"),
    )
    example = "OrbitTask"

    def measure(self, trainer: Trainer, task: OrbitTask, data: InMemoryDataModule) -> list[OrbitPoint]:
        """Measure all arms of all members."""
        with self.progress(trainer, "moving") as progress:
            return task.measure_all(data, trainer.strategy.root_device, progress)

    def report(self, trainer: Trainer, task: OrbitTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the tables and the figures."""
        zoo, numbers = task.model_zoo, task.numbers
        about = {
            **zoo.source(numbers),
            "seeds": {"members": numbers, "orbit_seed": task.orbit_seed},
            "settings": {
                **picked(task, "objective", "grid", "options", "some", "images", "steps", "lr"),
                "roundings": list(task.roundings),
                "arms": list(task.arms),
            },
            **self.source(data),
        }
        title = f"{architecture_name(zoo.load(numbers[0]))}, {counted(len(numbers), 'member')}"
        return orbit_results(measured, task.objective, title=title, about=about)
