"""Learning coefficients of landscapes with known values: the table and the pictures."""

from typing import Any

import torch
from pytorch_lightning import Trainer

from lightning_sym._distributed import gathered
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.learning_coefficients import coefficient_record, coefficient_results
from lightning_sym.reports.report import counted, finite
from lightning_sym.tasks import AnalyticLandscapesTask


class CalibrationReport(RunReport):
    """Run the chains of an :class:`lightning_sym.tasks.AnalyticLandscapesTask` and report them.

    On rank 0, in ``results``: ``calibration.csv`` and ``.json`` (each landscape: estimate, exact value, learning
    coefficient, verdict and all settings), ``calibration_traces.csv`` and ``.json`` (some of the chains),
    ``calibration.png`` and ``calibration_traces.png`` (in TensorBoard under ``figures/CalibrationReport``). Logged are
    ``calibration/refused``, how many landscapes have no estimate, and ``calibration/largest_error``, the largest
    difference to an exact value, in standard errors. A table is printed.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = ("calibrate", "seed", "changes")
    example = "AnalyticLandscapesTask"
    data_type = InputDataModule  # type: ignore[type-abstract]

    def measure(self, trainer: Trainer, task: AnalyticLandscapesTask, data: Any) -> Any:
        """Run the chains."""
        own = [(batch[0] if isinstance(batch, tuple | list) else batch).cpu() for batch in data.curvature_dataloader()]
        inputs = torch.cat([part for parts in gathered(own) for part in parts]).to(trainer.strategy.root_device)
        with self.progress(trainer, "running chains") as progress:
            return task.calibrate(inputs, progress)

    def report(self, trainer: Trainer, task: AnalyticLandscapesTask, data: Any, measured: Any) -> RunResults:
        """Return the tables and the figures."""
        entries = [
            (
                {
                    "network": one.landscape.name,
                    "exact": None if one.exact is None else finite(one.exact),
                    "theory": one.landscape.theory,
                },
                one.found,
            )
            for one in measured
        ]
        about = {"seeds": {"seed": task.seed}, "settings": task.changes, **self.source(data)}
        results = coefficient_results(
            [(head, coefficient_record(found)) for head, found in entries],
            title=counted(len(entries), "known landscape"),
            about=about,
            name="calibration",
        )
        errors = [
            abs(found.estimate - head["exact"]) / found.standard_error
            for head, found in entries
            if found.estimate is not None and found.standard_error and head["exact"] is not None
        ]
        results.numbers.update({"calibration/largest_error": max(errors)} if errors else {})  # type: ignore[attr-defined]
        return results
