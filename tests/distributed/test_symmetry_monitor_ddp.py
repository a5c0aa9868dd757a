"""SymmetryMonitor gives the same curves from two processes, whether they share out the data or the members."""

import functools

import pytest
import torch
from fits import Interrupt, digits
from helpers import read_csv, read_rows

from lightning_sym.callbacks import SymmetryMonitor
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

pytestmark = pytest.mark.ddp


def scenarios(run):
    def fit(name, *callbacks, batch_size=16, monitor=None, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        task = ZooTask(MultiLayerPerceptron(widths=(8, 6), image_size=8), members=3, optimizer=sgd, keep="last")
        callbacks = [SymmetryMonitor(**monitor or {}), *callbacks]
        logger = MetricsCSV(run.folder / name)
        data = digits(batch_size=batch_size, max_samples=81)
        run.fit(name, task, data, *callbacks, max_epochs=3, logger=logger, **settings)

    shared = {"data": {"processes": 2}, "members": {"processes": 2, "strategy": "ddp_members_fork"}}
    fit("steps 2", monitor={"every_n_steps": 2, "members": [0, 2]}, **shared["members"])  # process 1 watches none
    for name, settings in shared.items():
        fit(f"{name} 2", **settings)
        fit(f"part {name}", Interrupt("2 0"), fails="RuntimeError: interrupted", **settings)
        fit(f"resumed {name}", ckpt_path=run.folder / f"part {name}" / "last.ckpt", **settings)
    # After a backward pass beside the tracer's tensors without data, torch refuses to fork.
    fit("data 1", batch_size=32)
    fit("members 1")


def rows(path, name="symmetry"):
    return read_rows(path / "results" / name)


def metrics(path):
    return read_csv(path / "metrics.csv")


def test_sharing_out_members_changes_nothing(runs):
    for name in ("symmetry", "symmetry_distance"):
        assert rows(runs / "members 2", name) == rows(runs / "members 1", name)
    for row, other in zip(metrics(runs / "members 2"), metrics(runs / "members 1"), strict=True):
        found = {tag for tag in row if tag.startswith("symmetry/")}
        assert "symmetry/drift/linear2/member-0001" in found
        assert {tag: row[tag] for tag in found} == {tag: other[tag] for tag in found}
    assert (runs / "members 2" / "results" / "symmetry.png").is_file()


def test_sharing_out_data_is_a_larger_batch(runs):
    one, two = rows(runs / "data 1"), rows(runs / "data 2")
    assert len(one) == len(two) == 4 * 3 * 2
    for row, other in zip(one, two, strict=True):
        for name, value in row.items():
            assert other[name] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-5)), name


def test_steps_and_a_process_that_watches_nothing(runs):
    found = rows(runs / "steps 2")
    assert {row["member"] for row in found} == {0, 2}
    steps = sorted({row["step"] for row in found})
    assert steps == sorted({*range(0, steps[-1] + 1, 2), steps[-1]})


@pytest.mark.parametrize("name", ["members", "data"])
def test_resumed_monitor_of_two_processes_is_uninterrupted(runs, name):
    assert not (runs / f"part {name}" / "results" / "symmetry.csv").exists()
    for table in ("symmetry", "symmetry_distance"):
        assert rows(runs / f"resumed {name}", table) == rows(runs / f"{name} 2", table)
