"""Monitors and SpectrumReport find the same with two processes, whether they share out the data or the members."""

import functools
import re

import pytest
import torch
from fits import Interrupt, digits
from helpers import read_csv, read_rows

from lightning_sym.callbacks import (
    CurvatureMonitor,
    LearningCoefficient,
    SimilarityMonitor,
    SpectrumReport,
    SymmetryMonitor,
)
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# Tables, how many rows they have, and how far one and two processes may be apart: rounding in float32.
TABLES = {
    "similarity": (3 * 2 * 2 * 9, 1e-4),  # distances are roots of differences
    "symmetry": (3 * 3 * 2, 1e-5),
    "symmetry_distance": (3 * 3, 1e-5),
    "curvature": (3 * 3, 2e-3),
    "learning_coefficient": (3, 2e-3),
    "sharpness": (3 * 3, 2e-3),
}


def network():
    return MultiLayerPerceptron(widths=(8, 6), image_size=8)


def monitors(**settings):
    return [
        SimilarityMonitor(["group", "cka_linear"], reference=network().fresh(9), images=21, **settings),
        SymmetryMonitor(**settings),
        CurvatureMonitor(probes=2, **settings),
    ]


def scenarios(run):
    def fit(name, *callbacks, batch_size=16, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        task = ZooTask(network(), members=3, optimizer=sgd, keep="last")
        data = digits(batch_size=batch_size, max_samples=81, val_fraction=0.3)
        settings = {"max_epochs": 2, "logger": MetricsCSV(run.folder / name), **settings}
        run.fit(name, task, data, *callbacks, **settings)

    def all_of_them():
        return [*monitors(), LearningCoefficient(chains=5, steps=24), SpectrumReport(steps=4, probes=1, trace_probes=2)]

    shared = {"data": {"processes": 2}, "members": {"processes": 2, "strategy": "ddp_members_fork"}}
    # Process 1 watches none.
    fit("steps 2", *monitors(every_n_steps=2, members=[0, 2]), max_epochs=1, **shared["members"])
    for name, settings in shared.items():
        fit(f"{name} 2", *all_of_them(), **settings)
    fit("part", *all_of_them(), Interrupt("1 0"), fails="RuntimeError: interrupted", **shared["members"])
    fit("resumed", *all_of_them(), ckpt_path=run.folder / "part" / "last.ckpt", **shared["members"])
    # After a backward pass beside the tracer's tensors without data, torch refuses to fork.
    fit("data 1", *all_of_them(), batch_size=32)
    fit("members 1", *all_of_them())


def rows(path, name):
    return read_rows(path / "results" / name)


def near(value, tolerance):
    return pytest.approx(value, rel=tolerance, abs=tolerance) if isinstance(value, float) else value


@pytest.mark.parametrize("what", ["members", "data"])
@pytest.mark.parametrize("name", TABLES)
def test_two_processes_find_what_one_finds(runs, name, what):
    count, tolerance = TABLES[name]
    one, two = (rows(runs / f"{what} {processes}", name) for processes in (1, 2))
    assert len(one) == len(two) == count
    for row, other in zip(one, two, strict=True):
        for column, value in row.items():
            if column in ("refusal", "cautions"):  # with numbers in them
                words, others = (re.sub(r"[\d.]+", "", text.partition(":")[0]) for text in (value, other[column]))
                assert words == others
            else:
                assert other[column] == near(value, tolerance), column


@pytest.mark.parametrize("what", ["members", "data"])
def test_two_processes_log_what_one_logs(runs, what):
    kinds = ("similarity/", "symmetry/", "curvature/", "learning_coefficient/")
    one, two = (read_csv(runs / f"{what} {processes}" / "metrics.csv") for processes in (1, 2))
    assert len(one) == len(two)
    for row, other in zip(one, two, strict=True):
        found = {tag: float(value) for tag, value in row.items() if tag.startswith(kinds) and value}
        assert {tag for tag, value in other.items() if tag.startswith(kinds) and value} == set(found)
        assert {tag: float(other[tag]) for tag in found} == {tag: near(v, 2e-3) for tag, v in found.items()}
    assert {"details/symmetry/drift/linear2/member-0001", "details/curvature/along_step/member-0002"} <= set(one[-1])
    assert all((runs / f"{what} 2" / "results" / f"{name}.png").is_file() for name in ("symmetry", "curvature"))


def test_sharing_out_members_does_not_change_how_they_move(runs):
    for name in ("symmetry", "symmetry_distance"):
        assert rows(runs / "members 2", name) == rows(runs / "members 1", name)


@pytest.mark.parametrize("name", ["similarity", "symmetry", "curvature"])
def test_steps_and_a_process_that_watches_nothing(runs, name):
    found = rows(runs / "steps 2", name)
    assert {row["first" if name == "similarity" else "member"] for row in found} == {0, 2}
    steps = sorted({row["step"] for row in found})
    assert steps == sorted({*range(0, steps[-1] + 1, 2), steps[-1]})


@pytest.mark.parametrize("name", TABLES)
def test_resumed_run_of_two_processes_is_uninterrupted(runs, name):
    """With members shared out each process has something else to go on with; otherwise all have the same."""
    assert not (runs / "part" / "results" / f"{name}.csv").exists()
    assert rows(runs / "resumed", name) == rows(runs / "members 2", name)
