"""Calibration of learning coefficients says the same from two processes; the callback is among the monitors."""

import pytest
from helpers import read_rows

from lightning_sym.callbacks import CalibrationReport
from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.tasks import AnalyticLandscapesTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]


def scenarios(run):
    for processes in (2, 1):
        task = AnalyticLandscapesTask(["3x²+5y²", "x^2 y^2", "3x²+5y², SGLD, unstable"], chains=5, steps=300)
        data = GaussianInputsDataModule([3, 1, 1], samples=9, batch_size=4)
        run.fit(f"calibration {processes}", task, data, CalibrationReport(), max_epochs=0, processes=processes)


def test_two_processes_find_what_one_finds(runs):
    one, two = (read_rows(runs / f"calibration {processes}" / "results" / "calibration") for processes in (1, 2))
    assert len(one) == len(two) == 3
    for row, other in zip(one, two, strict=True):
        for column, value in row.items():
            if column in ("refusal", "cautions"):
                assert other[column].partition(":")[0] == value.partition(":")[0]
            else:
                assert other[column] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), column
