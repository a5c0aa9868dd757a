"""Learning precisions, interrupted and resumed, ends where the uninterrupted run ends, bit for bit."""

import functools
import json
from pathlib import Path

import pytest
import torch
from interruption import Interrupt, assert_same
from pytorch_lightning import Trainer

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import DigitsDataModule, Quadrant
from lightning_sym.networks import RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask

pytestmark = pytest.mark.filterwarnings("ignore:(The dirpath has changed from|Checkpoint directory .* is not empty)")

OPTIMIZERS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


class InterruptAfter(Interrupt):
    """Stops a run after the update of an epoch too, before the checkpoint of that epoch."""

    def on_train_epoch_end(self, trainer, task):
        if self.place == f"after {trainer.current_epoch}":
            raise RuntimeError("interrupted")


def fit(folder: Path, optimizer: str, place: str = "", ckpt_path: Path | None = None, seed: int = 0):
    checkpoint = RunCheckpoint(
        folder, filename="last", enable_version_counter=False, every_n_train_steps=2, save_on_train_epoch_end=True
    )
    marginal = MarginalLikelihood(
        burn_in=2, every_n_epochs=2, steps=4, samples=2, granularity="per_tensor", dirpath=str(folder / "results")
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[marginal, InterruptAfter(place), checkpoint],
    )
    torch.manual_seed(seed)  # a resumed run has other initial weights, which the checkpoint replaces
    task = EquivarianceTask(
        RelaxedNetwork(width=1, grid=16, in_channels=1),
        optimizer=OPTIMIZERS[optimizer],
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5),
    )
    data = DigitsDataModule(batch_size=16, max_samples=64, transforms=[Quadrant("digit")])  # 4 steps
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)
    return task, marginal, trainer


def without_time(state: dict) -> dict:
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in state["records"]]
    return {**state, "records": records}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return uninterrupted runs, by optimizer."""

    @functools.cache
    def run(optimizer: str):
        folder = tmp_path_factory.mktemp("whole")
        return folder, *fit(folder, optimizer)

    return run


@pytest.mark.parametrize(
    ("optimizer", "place"),
    [
        ("adam", "1 2"),  # before the first update
        ("adam", "2 3"),  # between two
        ("adam", "after 3"),  # of an epoch whose update is lost
        ("adam", "4 1"),  # after the last
        ("adam", "end"),
        ("sgd", "3 3"),
    ],
)
def test_resumed_is_uninterrupted(whole, tmp_path, optimizer, place):
    folder, task, marginal, trainer = whole(optimizer)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, optimizer, place)
    again, other, resumed = fit(tmp_path, optimizer, ckpt_path=tmp_path / "last.ckpt", seed=1)
    assert_same(again.state_dict(), task.state_dict())
    assert again.prior.log_precisions == task.prior.log_precisions
    assert_same(without_time(other.state_dict()), without_time(marginal.state_dict()))
    assert {n: float(v) for n, v in resumed.callback_metrics.items() if n != "evidence/seconds"}.items() <= {
        n: float(v) for n, v in trainer.callback_metrics.items()
    }.items()
    assert [record["epoch"] for record in other.records] == [2, 4, 5]
    assert (tmp_path / "results" / "layers.csv").read_bytes() == (folder / "results" / "layers.csv").read_bytes()


def test_the_runs_differ_where_they_should(whole):
    """Otherwise the comparison above would say little."""
    folder, task, marginal, _ = whole("adam")
    assert len(set(task.prior.log_precisions.values())) > 10
    values = [record["log_marginal_likelihood"] for record in marginal.records]
    assert len(set(values)) == 3
    assert json.loads((folder / "results" / "layers.json").read_text())["types"].keys() == {
        f"block{index}" for index in range(6)
    }


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    fit(tmp_path, "adam")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del checkpoint["prior"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="holds no prior"):
        fit(tmp_path, "adam", ckpt_path=tmp_path / "other.ckpt")
