"""Dissection by two processes is that of one with all the images: metrics, and the task with its report."""

import pytest
import torch
from helpers import read_rows, write_zoo
from scenarios import load, outcome
from torch import nn

from lightning_sym.callbacks import DissectionReport
from lightning_sym.datamodules import ConceptsDataModule
from lightning_sym.dissection import ConceptOverlap, TopQuantile, UnitStatistics, strongest_images
from lightning_sym.networks import ResidualCNN
from lightning_sym.tasks import DissectionTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]

SHARES = {"even": [slice(0, 10), slice(10, 20)], "uneven": [slice(0, 3), slice(3, 20)]}


def dissected(images, announced):
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(20, 3, 4, 4, generator=generator)[images]
    masks = (torch.rand(20, 2, 8, 8, generator=generator) < 0.3)[images]
    annotated = (torch.rand(20, 2, generator=generator) < 0.7)[images]
    labels = torch.randint(3, (20,), generator=generator)[images]
    quantile, statistics = TopQuantile(3, announced, top=0.1), UnitStatistics(3, classes=3)
    for part, own in zip(maps.split(2), labels.split(2), strict=True):
        quantile.update(part)
        statistics.update(part, own)
    thresholds = quantile.compute()
    overlap = ConceptOverlap(thresholds, concepts=2)
    overlap.update(maps, masks, annotated)
    strongest = strongest_images(nn.Identity(), "", torch.eye(3), thresholds, maps.split(2), count=4)
    shown = {f"exact/images {unit}": one.images for unit, one in enumerate(strongest)}
    exact = {"exact/thresholds": thresholds, "exact/overlaps": overlap.compute(), **shown}
    return {**exact, **statistics.compute()._asdict()}


def work(rank, world, folder):
    found = {
        name: outcome(dissected, shares[rank] if world == 2 else slice(0, 20), 320) for name, shares in SHARES.items()
    }
    # Each process has no more than was announced, but both together have.
    return found | {"too many": outcome(dissected, SHARES["even"][rank] if world == 2 else slice(0, 20), 319)}


def scenarios(run):
    data = ConceptsDataModule(max_samples=41, batch_size=16, eval_batch_size=8)
    zoo = write_zoo(run.folder / "zoo", [ResidualCNN((3, 4), (1, 1), num_classes=40).fresh(0)], data)
    for processes in (2, 1):
        task = DissectionTask({"small": str(zoo)}, top=0.05, alphas=[0.0, 1.0])
        run.fit(f"fit {processes}", task, data, DissectionReport(), processes=processes, max_epochs=0)
    run.processes(2, work)
    run.processes(1, work)


@pytest.fixture(scope="module")
def results(runs):
    return load(runs, 1) + load(runs, 2)


@pytest.mark.parametrize("sharing", SHARES)
def test_dissection_by_two_processes_is_that_of_one(results, sharing):
    one, *others = (result[sharing] for result in results)
    for other in others:
        assert other.keys() == one.keys()
        for name, value in one.items():
            rounding = 0 if name.startswith("exact/") else 1e-12
            torch.testing.assert_close(other[name], value, rtol=rounding, atol=rounding)


def test_quantile_of_more_values_than_announced_is_refused_on_every_process(results):
    for result in results:
        assert "320 values of each unit were given but 319 were announced" in result["too many"]


def test_report_of_two_processes_is_that_of_one(runs):
    one, two = (read_rows(runs / f"fit {processes}/results/bases.json") for processes in (1, 2))
    assert len(one) == 7
    for first, second in zip(one, two, strict=True):
        words = {name for name, value in first.items() if isinstance(value, str)}
        assert {name: second[name] for name in words} == {name: first[name] for name in words}
        for name in first.keys() - words:  # in float32, in batches of other sizes
            assert second[name] == pytest.approx(first[name], rel=1e-5), name
