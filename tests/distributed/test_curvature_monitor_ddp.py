"""CurvatureMonitor and SpectrumReport find the same with two processes, which share out the data or the members."""

import functools

import pytest
import torch
from fits import digits
from helpers import read_csv, read_rows

from lightning_sym.callbacks import CurvatureMonitor, SpectrumReport
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

pytestmark = pytest.mark.ddp


def scenarios(run):
    def fit(name, batch_size=16, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), members=3, optimizer=sgd, keep="last")
        logger = MetricsCSV(run.folder / name)
        data = digits(batch_size=batch_size, max_samples=81)
        callbacks = [CurvatureMonitor(probes=4), SpectrumReport(steps=8, probes=1, trace_probes=4)]
        run.fit(name, task, data, *callbacks, max_epochs=2, logger=logger, **settings)

    fit("data 2", processes=2)
    fit("members 2", processes=2, strategy="ddp_members_fork")
    fit("data 1", batch_size=32)
    fit("members 1")


def curves(path):
    rows = [row for row in read_csv(path / "metrics.csv") if row["curvature/trace"]]
    return [{tag: float(value) for tag, value in row.items() if tag.startswith("curvature/")} for row in rows]


@pytest.mark.parametrize("what", ["data", "members"])
def test_two_processes_measure_what_one_does(runs, what):
    one, two = (curves(runs / f"{what} {processes}") for processes in (1, 2))
    assert len(one) == len(two) == 2
    for expected, found in zip(one, two, strict=True):
        assert "curvature/step/member-0002" in found
        assert found == {tag: pytest.approx(value, rel=2e-3, abs=1e-5) for tag, value in expected.items()}


@pytest.mark.parametrize("what", ["data", "members"])
def test_two_processes_report_what_one_does(runs, what):
    one, two = (read_rows(runs / f"{what} {processes}" / "results" / "sharpness") for processes in (1, 2))
    assert len(one) == 3 * 3
    for row, other in zip(one, two, strict=True):
        for name in ("raw", "balanced", "modulo_symmetry"):
            assert other[name] == pytest.approx(row[name], rel=2e-3)
