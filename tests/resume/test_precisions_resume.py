"""Learning precisions, interrupted and resumed, ends where the uninterrupted run ends, bit for bit."""

import functools
import json

import pytest
import torch
from experiments import SmallCNN
from fits import Interrupt, digits, fit
from helpers import assert_refused, assert_same, one_in
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.curvature import GaussianPrior
from lightning_sym.datamodules import Quadrant
from lightning_sym.networks import RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask, ZooTask

pytestmark = pytest.mark.long

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)


class Own(LightningModule):
    """A task that is none of ours; its prior acts by its gradient."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
        self.prior = GaussianPrior(self.network)

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.network.parameters(), lr=1e-3)

    def on_fit_start(self):
        self.prior.start(self.trainer.optimizers, self.trainer.datamodule)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def on_before_optimizer_step(self, optimizer):
        self.prior.add_gradients()

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/loss", F.cross_entropy(self.network(images), labels))


def relaxed(optimizer):
    return EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1), optimizer=optimizer, lr_scheduler=COSINE)


TASKS = {
    "adam": lambda: relaxed(ADAM),
    "own": Own,
    "loop": lambda: ZooTask(SmallCNN(norm=True), members=2, optimizer=ADAM, prior_precision=1.0),
    "vmap": lambda: ZooTask(SmallCNN(norm=True), members=2, optimizer=ADAM, prior_precision=1.0, execution="vmap"),
}


DATA = {"adam": {"transforms": [Quadrant("digit")]}}


class InterruptAfter(Interrupt):
    """Stops a run after the update of an epoch too, before the checkpoint of that epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        if self.place == f"after {trainer.current_epoch}":
            raise RuntimeError("interrupted")


def run(folder, name, place="", ckpt_path=None, seed=0):
    granularity = "per_path" if name in ("loop", "vmap") else "per_tensor"
    marginal = MarginalLikelihood(burn_in=2, every_n_epochs=2, steps=4, samples=2, granularity=granularity)
    torch.manual_seed(seed)  # a resumed run has other initial weights, which the checkpoint replaces
    task = TASKS[name]()
    data = digits(max_samples=64, **DATA.get(name, {}))  # 4 steps
    when = {"every_n_train_steps": 2, "save_on_train_epoch_end": True}
    save = RunCheckpoint(folder, filename="last", enable_version_counter=False, **when)
    trainer = fit(task, data, marginal, InterruptAfter(place), save, folder=folder, max_epochs=5, ckpt_path=ckpt_path)
    return task, marginal, trainer


def left(task, marginal, trainer):
    """Return all that must be the same."""
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in marginal.records]
    return {
        "weights": task.state_dict(),
        "priors": [own.state_dict() for own in task.prior.members.values()],
        "callback": {**marginal.state_dict(), "records": records},
        "table": (marginal.path / "layers.csv").read_bytes(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return uninterrupted runs, by task."""
    return functools.cache(lambda name: run(tmp_path_factory.mktemp("whole"), name))


PLACES = ["1 2", "2 3", "end"]  # before the first update, between two, before the report
LAST = {"after 3": "of an epoch whose update is lost", "4 1": "after the last"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("adam", place) for place in [*PLACES, *LAST]),
        *one_in(2, [(name, place) for name in ("own", "loop", "vmap") for place in PLACES]),
    ],
)
def test_resumed_is_uninterrupted(whole, tmp_path, name, place):
    assert_refused(run, tmp_path, name, place, says="interrupted", error=RuntimeError)
    resumed = run(tmp_path, name, ckpt_path=tmp_path / "last.ckpt", seed=1)
    assert_same(left(*resumed), left(*whole(name)))
    logged, again = (
        {n: float(v) for n, v in trainer.callback_metrics.items() if n != "evidence/seconds"}
        for _, _, trainer in (whole(name), resumed)
    )
    assert again.items() <= logged.items()


@pytest.mark.parametrize("name", TASKS)
def test_the_runs_differ_where_they_should(whole, name):
    """Otherwise the comparison above would say little."""
    task, marginal, _ = whole(name)
    numbers = list(task.prior.members)
    assert [(record["epoch"], record.get("member")) for record in marginal.records] == [
        (epoch, number) for epoch in (2, 4, 5) for number in numbers
    ]
    values = {record["log_marginal_likelihood"] for record in marginal.records}
    assert len(values) == len(marginal.records)
    for own in task.prior.members.values():
        assert len(set(own.log_precisions.values())) == {"own": 4, "loop": 3, "vmap": 3}.get(name, 40)
    types = json.loads((marginal.path / "layers.json").read_text())["types"]
    assert len(types) == {"own": 0}.get(name, 6 if name == "adam" else 2)


def test_a_checkpoint_of_another_task_is_refused(whole, tmp_path):
    run(tmp_path, "adam")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del checkpoint["prior"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    assert_refused(run, tmp_path, "adam", ckpt_path=tmp_path / "other.ckpt", says="holds no prior")


def test_precisions_of_other_members_are_refused(whole):
    _, marginal, trainer = whole("loop")
    other = MarginalLikelihood(burn_in=1, every_n_epochs=1)
    other.setup(trainer, ZooTask(SmallCNN(norm=True), members=3, prior_precision=1.0), "fit")
    with pytest.raises(ValueError, match="precisions of other networks than this run"):
        other.load_state_dict(marginal.state_dict())
