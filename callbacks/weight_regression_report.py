"""Metrics predicted from weights: the tables and the pictures."""

from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer

from lightning_sym._random import generator
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import ZooWeightsDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.weights import Predictions, weight_regression_results
from lightning_sym.tasks import WeightRegressionTask


class WeightRegressionReport(RunReport):
    """Report how well a :class:`lightning_sym.tasks.WeightRegressionTask` predicts the metric of unseen networks.

    The kept predictors are evaluated on the test split, and once more after every network was moved to a random point
    of its orbit, which changes no function. The baseline ``constant`` predicts the mean of the training split. R²,
    Kendall's tau and differences from raw weights are means over repeats, with 95 % intervals of a bootstrap over test
    networks and repeats. Predictors that were stopped are left out.

    On rank 0, in ``results``: ``summary``, ``repeats`` and ``predictions`` as ``.csv`` and ``.json``, ``predicted.png``
    and ``r2.png`` (in TensorBoard under ``figures/WeightRegressionReport``). Logged are ``r2/<arm>``,
    ``r2_moved/<arm>`` and, as details, ``tau/<arm>``; a table is printed.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
    """

    needs = (
        *("arms", "arm_of", "space", "moved", "numbers", "population", "stopped", "zoo", "evaluating"),
        *("gathered_by_member", "evaluation_batch"),
    )
    example = "WeightRegressionTask"
    data_type = ZooWeightsDataModule

    def measure(self, trainer: Trainer, task: WeightRegressionTask, data: ZooWeightsDataModule) -> Any:
        """Predict the metric of all networks of the test split."""
        inputs, _ = task.evaluation_batch(data.split_tensors("test"))
        moved = task.moved(inputs, generator("moved", 0), canonical=True)
        convert, device = trainer.strategy.precision_plugin.convert_input, trainer.strategy.root_device
        own = {}
        with task.evaluating(), torch.no_grad():
            found = [task.population(convert(one.to(device))).double().cpu()[..., 0] for one in (inputs, moved)]
            for index, number in enumerate(task.population.numbers):
                if number not in task.stopped:
                    own[number] = torch.stack([one[index] for one in found])
        return task.gathered_by_member(own)

    def report(
        self, trainer: Trainer, task: WeightRegressionTask, data: ZooWeightsDataModule, measured: Any
    ) -> RunResults:
        """Return the tables and the figures."""
        found = []
        for arm in task.arms:
            if own := [values.numpy() for number, values in measured.items() if task.arm_of(number) == arm]:
                found.append(Predictions(arm, *np.stack(own, 1)))
        about = {
            "architecture": task.space.zoo.architecture,
            "zoo": task.zoo,
            "seeds": {"members": task.numbers},
            **self.source(data),
        }
        targets = {split: data.split_tensors(split)[1].double().numpy()[:, 0] for split in ("train", "test")}  # type: ignore[arg-type]
        count = len(task.space.zoo)
        return weight_regression_results(
            found,
            targets["test"],
            float(targets["train"].mean()),
            title=f"{data.target} of {count} x {architecture_name(task.space.network)}",
            about=about,
        )
