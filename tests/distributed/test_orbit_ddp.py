"""Points of orbits measured by two processes are those of one: each does a part of the arms."""

import pytest
from helpers import read_rows, write_zoo

from lightning_sym.callbacks import OrbitReport
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import OrbitTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]


def scenarios(run):
    data = DigitsDataModule(max_samples=80, batch_size=16)
    networks = [MultiLayerPerceptron([6], image_size=8).fresh(number) for number in range(2)]
    zoo = write_zoo(run.folder / "zoo", networks, data)
    settings = {"grid": {"bits": [3, 4]}, "arms": ["trained", "random", "orbit"], "images": 16, "steps": 4}
    for processes in (2, 1):
        task = OrbitTask(str(zoo), **settings)
        run.fit(f"fit {processes}", task, data, OrbitReport(), processes=processes, max_epochs=0)


def test_report_of_two_processes_is_that_of_one(runs):
    one, two = (read_rows(runs / f"fit {processes}/results/points") for processes in (1, 2))
    assert len(one) == 2 * 3 * 2
    for first, second in zip(one, two, strict=True):
        assert {**first, "seconds": None} == {**second, "seconds": None}
