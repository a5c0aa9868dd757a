"""Learning coefficients are the same from two processes, whether they share out the data or the members."""

import functools

import pytest
import torch
from fits import digits
from helpers import read_rows

from lightning_sym.callbacks import CalibrationReport, LearningCoefficient
from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import AnalyticLandscapesTask, ZooTask

pytestmark = pytest.mark.ddp


def scenarios(run):
    def zoo(name, batch_size=16, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=0.05)
        task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), members=3, optimizer=sgd, keep="last")
        callback = LearningCoefficient(chains=5, steps=24)
        run.fit(name, task, digits(batch_size=batch_size, max_samples=81), callback, max_epochs=1, **settings)

    def calibration(name, **settings):
        task = AnalyticLandscapesTask(["3x²+5y²", "x^2 y^2", "3x²+5y², SGLD, unstable"], chains=5, steps=1000)
        data = GaussianInputsDataModule([3, 1, 1], samples=9, batch_size=4)
        run.fit(name, task, data, CalibrationReport(), max_epochs=0, **settings)

    zoo("data 2", processes=2)
    zoo("members 2", processes=2, strategy="ddp_members_fork")
    calibration("calibration 2", processes=2)
    zoo("data 1", batch_size=32)
    zoo("members 1")
    calibration("calibration 1")


@pytest.mark.parametrize(
    ("name", "tolerance"), [("data", 1e-3), ("members", 1e-5), ("calibration", 1e-7)], ids=lambda value: str(value)
)
def test_two_processes_find_what_one_finds(runs, name, tolerance):
    table = "calibration" if name == "calibration" else "learning_coefficient"
    one, two = (read_rows(runs / f"{name} {processes}" / "results" / table) for processes in (1, 2))
    assert len(one) == len(two) == 3
    for row, other in zip(one, two, strict=True):
        for column, value in row.items():
            if column in ("refusal", "cautions"):
                assert other[column].partition(":")[0] == value.partition(":")[0]
            else:
                close = isinstance(value, float)
                assert other[column] == (pytest.approx(value, rel=tolerance) if close else value), column
