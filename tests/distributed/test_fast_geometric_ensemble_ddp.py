"""Two processes make and score the ensembles that one does, with data or members shared out."""

import functools

import pytest
import torch
from fits import digits
from helpers import read_rows

from lightning_sym.callbacks import EnsembleReport, FastGeometricEnsemble
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo

pytestmark = [pytest.mark.ddp, pytest.mark.long]

NAMES = {"data": "ddp_fork", "members": "ddp_members_fork"}


def scenarios(run):
    for name, strategy in NAMES.items():
        for processes in (2, 1):
            # 81 images for scoring: not divisible by 2. 80 for training: the same steps.
            share = processes if name == "data" else 1
            data = digits(batch_size=16 // share, eval_batch_size=40 // share, max_samples=80)
            network = MultiLayerPerceptron(widths=(6,), image_size=8)
            sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
            task = ZooTask(network, members=3, optimizer=sgd, keep="last")
            ensemble = FastGeometricEnsemble(0.1, 0.01, cycle_steps=4, points=3)
            report = EnsembleReport(dirpath=str(run.folder / f"{name} {processes}" / "members"))
            run.fit(
                f"{name} {processes}",
                task,
                data,
                ensemble,
                report,
                processes=processes,
                strategy=strategy,
                max_epochs=2,
            )


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_leave_what_one_does(name, runs):
    one, two = (runs / f"{name} {processes}" for processes in (1, 2))
    for table in ("results/ensembles", "results/added", "results/snapshots", "members/added"):
        rows, others = (read_rows(folder / table) for folder in (one, two))
        assert len(rows) == len(others) > 0
        for row, other in zip(rows, others, strict=True):
            for column, value in row.items():
                near = pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value
                assert other[column] == near, (table, column)
    for number in range(3):
        zoos = [ModelZoo.open(folder / "snapshots" / f"member-000{number}") for folder in (one, two)]
        assert zoos[0].numbers == zoos[1].numbers == [0, 1, 2, 3]
        for place in zoos[0].numbers:
            states = [zoo.state(place) for zoo in zoos]
            torch.testing.assert_close(*states, atol=2e-5, rtol=1e-4)
