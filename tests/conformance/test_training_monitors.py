"""What every callback that follows a training must be: training stays as it is, and a resumed run goes on with it.

All of them watch the same fits; a test looks at what one of them left behind.
"""

import functools
import random
import warnings
from types import SimpleNamespace

import fits
import numpy as np
import pytest
import torch
from experiments import Validated
from fits import Interrupt, saving
from helpers import assert_refused, assert_same, read_rows, refused
from pytorch_lightning import Callback
from pytorch_lightning.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.callbacks import CurvatureMonitor, LearningCoefficient, SimilarityMonitor, SymmetryMonitor
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import ZooTask

MONITORS = {
    SimilarityMonitor: {"images": 20},
    SymmetryMonitor: {},
    CurvatureMonitor: {"probes": 2, "tolerance": 0.1},
    LearningCoefficient: {"every_n_epochs": 2, "chains": 3, "steps": 8},
}
TABLES = {
    SimilarityMonitor: ("similarity",),
    SymmetryMonitor: ("symmetry", "symmetry_distance"),
    CurvatureMonitor: ("curvature",),
    LearningCoefficient: ("learning_coefficient", "learning_coefficient_traces"),
}
every_monitor = pytest.mark.parametrize("kind", MONITORS, ids=lambda kind: kind.__name__)

pytestmark = pytest.mark.long


def monitor(kind, **changes):
    if kind is LearningCoefficient:
        changes.pop("every_n_steps", None)  # it has none
    return kind(**{**MONITORS[kind], **changes})


def plain(dropout: float = 0.0) -> Validated:
    torch.manual_seed(1)
    first = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout)
    return Validated(nn.Sequential(*first, nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10)), lr=0.1, momentum=0.9)


def zoo(network=None, **changes) -> ZooTask:
    network = MultiLayerPerceptron(widths=(8, 6), image_size=8) if network is None else network
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    return ZooTask(network, **{"members": 2, "optimizer": adam, "keep": "last", **changes})


def digits(**changes):
    return fits.digits(**{"max_samples": 48, "val_fraction": 0.3, **changes})  # three batches


def fit(path, task, *callbacks, data=None, **changes):
    torch.manual_seed(0)  # of dropout
    settings = {"max_epochs": 2, **changes}
    return fits.fit(task, digits() if data is None else data, *callbacks, folder=path, **settings)


# ---- training stays as it is


class Randomness(Callback):
    """Note the states of all generators at the end of every batch."""

    def __init__(self) -> None:
        self.states: list[object] = []

    def on_train_batch_end(self, *_):
        state = np.random.get_state()
        self.states += [torch.get_rng_state(), random.getstate(), (state[0], state[1].tolist(), *state[2:])]


@pytest.mark.parametrize("case", ["plain", "dataloader", "loop", "vmap"])
def test_training_is_bitwise_the_same(tmp_path, case):
    results = []
    for watched in (False, True):
        task = (
            plain(dropout=0.2)
            if case in ("plain", "dataloader")
            else zoo(MyrtleCNN(2, in_channels=1, image_size=8), execution=case)
        )
        data = digits(shift=1, max_samples=32)
        np.random.seed(3)
        random.seed(3)
        noted = Randomness()
        monitors = [monitor(kind, every_n_epochs=1, every_n_steps=1) for kind in MONITORS] if watched else []
        if case == "dataloader":
            images, labels = data.split_tensors("train")
            pairs = TensorDataset(data.normalize(images), labels)
            trainer = fits.quiet_trainer(*monitors, noted, folder=tmp_path / str(watched))
            torch.manual_seed(0)
            trainer.fit(task, DataLoader(pairs, 16, shuffle=True), DataLoader(pairs, 16))
        else:
            fit(tmp_path / str(watched), task, *monitors, noted, data=data)
        results.append([noted.states, task.state_dict(), [module.training for module in task.modules()]])
    assert_same(*results)


def test_fast_dev_run_leaves_no_files(tmp_path):
    fit(tmp_path, zoo(), *map(monitor, MONITORS), fast_dev_run=True)
    assert not (tmp_path / "results").exists()


# ---- resume


@pytest.fixture(
    scope="module",
    params=[
        (plain, 2, {"every_n_steps": 2}),
        (zoo, None, {"every_n_epochs": 3, "members": [1]}),  # four epochs: the last point is that of the end
        pytest.param((plain, None, {}), marks=pytest.mark.slow),
        pytest.param((zoo, 2, {"every_n_steps": 3}), marks=pytest.mark.slow),
    ],
    ids=["plain, saved in steps", "zoo", "plain", "zoo, saved in steps"],
)
def resumed(request, tmp_path_factory, unproven):
    """Return folders of a run that was interrupted and of one that was not."""
    task, saved_every, settings = request.param
    whole, part = (tmp_path_factory.mktemp(name) for name in ("whole", "part"))

    def run(path, *callbacks, **changes):
        keep = saving(path) if saved_every is None else saving(path, every_n_train_steps=saved_every)
        monitors = [monitor(kind, **settings) for kind in MONITORS]
        fit(path, task(), *monitors, keep, *callbacks, max_epochs=4, **changes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(whole)
        assert_refused(lambda: run(part, Interrupt("2 1")), says="interrupted", error=RuntimeError)
        assert not list(part.rglob("*.csv"))
        run(part, ckpt_path=part / "last.ckpt")
        again = tmp_path_factory.mktemp("again")
        if saved_every is None:  # nothing is left to train, and the files are made all the same
            run(again, ckpt_path=whole / "last.ckpt")
    return whole, [part, again] if saved_every is None else [part]


@every_monitor
def test_resumed_is_uninterrupted(resumed, kind):
    whole, others = resumed
    for name in TABLES[kind]:
        rows = read_rows(whole / "results" / name)
        assert len({row["epoch"] for row in rows}) >= 2
        for folder in others:
            assert read_rows(folder / "results" / name) == rows
            assert (folder / "results" / f"{name}.csv").read_bytes() == (whole / "results" / f"{name}.csv").read_bytes()


def test_a_run_that_is_given_more_epochs_has_the_points_of_a_longer_one(tmp_path):
    def run(name, epochs, **changes):
        fit(tmp_path / name, zoo(), monitor(SymmetryMonitor, every_n_epochs=2), saving(tmp_path / name),
            max_epochs=epochs, **changes)  # fmt: skip
        return read_rows(tmp_path / name / "results" / TABLES[SymmetryMonitor][0])

    assert max(row["epoch"] for row in run("first", 3)) == 3
    assert run("first", 4, ckpt_path=tmp_path / "first" / "last.ckpt") == run("whole", 4)


@pytest.fixture(scope="module")
def first_member(tmp_path_factory):
    """Return the checkpoint of a run in which only member 0 was watched."""
    folder = tmp_path_factory.mktemp("first member")
    fit(folder, zoo(), *(monitor(kind, members=[0]) for kind in MONITORS), saving(folder), max_epochs=1)
    return folder / "last.ckpt"


@every_monitor
def test_resuming_with_other_settings_is_refused(first_member, tmp_path, kind):
    says = f"The checkpoint's {kind.__name__} had other settings: members [0] there, [0, 1] here"
    assert_refused(lambda: fit(tmp_path, zoo(), monitor(kind), ckpt_path=first_member), says=says)


def test_a_second_fit_begins_anew(tmp_path):
    monitors = [monitor(kind) for kind in MONITORS]
    for _ in range(2):
        fit(tmp_path, plain(), *monitors, max_epochs=1)
    for kind in MONITORS:
        epochs = [row["epoch"] for row in read_rows(tmp_path / "results" / TABLES[kind][0])]
        assert sorted(set(epochs)) == ([1] if kind is LearningCoefficient else [0, 1])
        assert epochs == sorted(epochs)


# ---- what does not fit


def sharded(kind) -> None:
    trainer = SimpleNamespace(strategy=FSDPStrategy(), fast_dev_run=True)  # a Trainer would ask for GPUs
    monitor(kind).setup(trainer, plain(), "fit")


@every_monitor
def test_what_does_not_fit_is_refused_before_training(tmp_path, kind):
    name = kind.__name__
    for settings, task, says in (
        ({"network": "net"}, plain, f'{name}(network="net") watches the network in'),
        ({"members": [0]}, plain, f"{name}(members=[0]) is for a task with several networks"),
        ({"members": [1, 4, 5]}, zoo, f"{name}(members=...) names member(s) 4-5, but the task has 0-1"),
    ):
        watching = monitor(kind, **settings), Interrupt("0 0")  # where what is not refused ends
        assert_refused(fit, tmp_path, task(), *watching, says=says)
    assert_refused(sharded, kind, says=f"{name} needs whole weights, which FSDPStrategy shards")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "refusal",
    [
        refused(kind, **settings)
        for kind in MONITORS
        for settings in (
            {"every_n_epochs": 0},
            {"members": []},
            {"members": [1, 1]},
            {"members": "best"},
            {"prefix": "a/b"},
            *([] if kind is LearningCoefficient else [{"every_n_steps": 0}]),
        )
    ],
)
def test_arguments_out_of_range_are_refused(refusal):
    refusal()
