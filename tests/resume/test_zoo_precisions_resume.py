"""Learning the precisions of a zoo, interrupted and resumed, ends where the uninterrupted run ends, bit for bit."""

import functools
from pathlib import Path

import pytest
import torch
from interruption import Interrupt, assert_same
from pytorch_lightning import Trainer
from torch import nn

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import Network
from lightning_sym.tasks import ZooTask

pytestmark = pytest.mark.filterwarnings("ignore:(The dirpath has changed from|Checkpoint directory .* is not empty)")


class NormedCNN(Network):
    """A convolution, a batch norm and a linear map."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU()
        self.last = nn.Linear(48, num_classes)

    def forward(self, x):
        return self.last(self.act(self.norm(self.first(x))).flatten(1))


def fit(folder: Path, execution: str, place: str = "", ckpt_path: Path | None = None, members: int = 2):
    checkpoint = RunCheckpoint(
        folder, filename="last", enable_version_counter=False, every_n_train_steps=2, save_on_train_epoch_end=True
    )
    marginal = MarginalLikelihood(burn_in=2, every_n_epochs=2, steps=4, samples=2, dirpath=str(folder / "results"))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[marginal, Interrupt(place), checkpoint],
    )
    optimizer = functools.partial(torch.optim.Adam, lr=0.01)
    task = ZooTask(NormedCNN(), members=members, execution=execution, optimizer=optimizer, prior_precision=1.0)
    trainer.fit(task, DigitsDataModule(batch_size=16, max_samples=64), ckpt_path=ckpt_path, weights_only=True)
    return task, marginal


def precisions(task: ZooTask) -> dict:
    return {number: own.log_precisions for number, own in task.prior.members.items()}


def without_time(state: dict) -> dict:
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in state["records"]]
    return {**state, "records": records}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return uninterrupted runs, by execution."""

    @functools.cache
    def run(execution: str):
        folder = tmp_path_factory.mktemp("whole")
        return folder, *fit(folder, execution)

    return run


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("place", ["1 2", "2 3", "end"])  # before the first update, between two, before the report
def test_resumed_is_uninterrupted(whole, tmp_path, execution, place):
    folder, task, marginal = whole(execution)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, execution, place)
    again, other = fit(tmp_path, execution, ckpt_path=tmp_path / "last.ckpt")
    assert_same(again.state_dict(), task.state_dict())
    assert_same(without_time(other.state_dict()), without_time(marginal.state_dict()))
    assert precisions(again) == precisions(task)
    taken = [(record["epoch"], record["member"]) for record in other.records]
    assert taken == [(2, 0), (2, 1), (4, 0), (4, 1), (5, 0), (5, 1)]
    assert (tmp_path / "results" / "layers.csv").read_bytes() == (folder / "results" / "layers.csv").read_bytes()
    assert len(set(precisions(again)[1].values())) == 3


def test_precisions_of_other_members_are_refused(whole, tmp_path):
    _, task, marginal = whole("loop")
    other = MarginalLikelihood()
    other.setup(task.trainer, ZooTask(NormedCNN(), members=3, prior_precision=1.0), "fit")
    with pytest.raises(ValueError, match="precisions of other networks than this run"):
        other.load_state_dict(marginal.state_dict())
