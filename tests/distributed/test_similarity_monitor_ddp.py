"""SimilarityMonitor finds the same with two processes, whether they share out the data or the members."""

import functools

import pytest
import torch
from fits import Interrupt, digits
from helpers import read_csv, read_rows

from lightning_sym.callbacks import SimilarityMonitor
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

pytestmark = pytest.mark.ddp


def scenarios(run):
    def fit(name, *callbacks, batch_size=16, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        task = ZooTask(MultiLayerPerceptron(widths=(8, 6), image_size=8), members=3, optimizer=sgd, keep="last")
        reference = MultiLayerPerceptron(widths=(8, 6), image_size=8).fresh(9)
        callbacks = [SimilarityMonitor(["group", "cka_linear"], reference=reference, images=21), *callbacks]
        data = digits(batch_size=batch_size, max_samples=81, val_fraction=0.3)
        run.fit(name, task, data, *callbacks, max_epochs=2, logger=MetricsCSV(run.folder / name), **settings)

    shared = {"data": {"processes": 2}, "members": {"processes": 2, "strategy": "ddp_members_fork"}}
    for name, settings in shared.items():
        fit(f"{name} 2", **settings)
        fit(f"part {name}", Interrupt("1 0"), fails="RuntimeError: interrupted", **settings)
        fit(f"resumed {name}", ckpt_path=run.folder / f"part {name}" / "last.ckpt", **settings)
    # After a backward pass beside the tracer's tensors without data, torch refuses to fork.
    fit("data 1", batch_size=32)
    fit("members 1")


def rows(path):
    return read_rows(path / "results" / "similarity")


@pytest.mark.parametrize("name", ["members", "data"])
def test_two_processes_find_the_similarities_of_one(runs, name):
    one, two = rows(runs / f"{name} 1"), rows(runs / f"{name} 2")
    assert len(one) == 3 * 2 * 2 * 9
    for row, other in zip(one, two, strict=True):
        tolerance = 1e-4  # distances are roots of differences of float32
        assert other == {**row, "similarity": pytest.approx(row["similarity"], abs=tolerance)}
    found = [read_csv(runs / f"{name} {count}" / "metrics.csv")[-1] for count in (1, 2)]
    tags = [{tag for tag in last if tag.startswith("similarity/")} for last in found]
    assert tags[0] == tags[1]
    assert len(tags[0]) == 3 * 2 * 2


@pytest.mark.parametrize("name", ["members", "data"])
def test_resumed_similarities_of_two_processes_are_uninterrupted(runs, name):
    assert not (runs / f"part {name}" / "results" / "similarity.csv").exists()
    assert rows(runs / f"resumed {name}") == rows(runs / f"{name} 2")
