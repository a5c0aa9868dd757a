"""Quantiles, overlaps and statistics of units from two processes are those of one with all the images."""

import pytest
import torch
from scenarios import load, outcome

from lightning_sym.dissection import ConceptOverlap, TopQuantile, UnitStatistics

pytestmark = pytest.mark.ddp

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
    return {"exact/thresholds": thresholds, "exact/overlaps": overlap.compute(), **statistics.compute()._asdict()}


def work(rank, world, folder):
    found = {
        name: outcome(dissected, shares[rank] if world == 2 else slice(0, 20), 320) for name, shares in SHARES.items()
    }
    # Each process has no more than was announced, but both together have.
    return found | {"too many": outcome(dissected, SHARES["even"][rank] if world == 2 else slice(0, 20), 319)}


def scenarios(run):
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
        assert "320 values of each unit were given and 319 were announced" in result["too many"]
