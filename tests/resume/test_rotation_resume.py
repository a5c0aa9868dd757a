"""Rotations that were interrupted and go on find what uninterrupted ones find, bit for bit."""

from pathlib import Path

import pytest
import torch
from interruption import Interrupt, assert_same
from pytorch_lightning import Trainer

from lightning_sym.callbacks import RotationReport
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import RotationTask
from lightning_sym.zoo import rebuild_manifest, write_member

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


def digits(val_fraction: float) -> DigitsDataModule:
    return DigitsDataModule(batch_size=16, max_samples=80, val_fraction=val_fraction)  # 5 steps


def fit(folder: Path, zoo: Path, val_fraction: float, place: str = "", ckpt_path: Path | None = None) -> None:
    checkpoint = RunCheckpoint(folder, filename="last", enable_version_counter=False, every_n_train_steps=2)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[Interrupt(place), RotationReport(), checkpoint],
    )
    kinds = ["group", "orthogonal", "none", "undo"]
    task = RotationTask(str(zoo), sites=["activation2"], kinds=kinds, repeats=1)
    trainer.fit(task, digits(val_fraction), ckpt_path=ckpt_path, weights_only=True)


@pytest.fixture(scope="module", params=[0.1, 0.0], ids=["validated", "not validated"])
def whole(request, tmp_path_factory):
    """A run that was not interrupted, of networks with batch norm."""
    folder = tmp_path_factory.mktemp("whole")
    network = MyrtleCNN(2, in_channels=1, image_size=8).fresh(0)
    data = digits(request.param).identity()
    write_member(folder / "zoo", 0, network.state_dict(), architecture=network.architecture, data=data)
    rebuild_manifest(folder / "zoo")
    fit(folder / "run", folder / "zoo", request.param)
    return folder / "run", folder / "zoo", request.param


@pytest.mark.parametrize("place", ["0 3", "1 4", "2 0", "end"])
def test_resumed_is_uninterrupted(place, whole, tmp_path):
    expected, zoo, val_fraction = whole
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path / "first", zoo, val_fraction, place)
    assert not (tmp_path / "first" / "results").exists()
    resumed = tmp_path / "second"
    fit(resumed, zoo, val_fraction, ckpt_path=tmp_path / "first" / "last.ckpt")
    for name in ("penalties.csv", "summary.csv"):
        assert (resumed / "results" / name).read_bytes() == (expected / "results" / name).read_bytes(), name
    if place != "end":  # then no training was left, nor a checkpoint to write
        one, two = (torch.load(path / "last.ckpt", weights_only=True) for path in (expected, resumed))
        assert_same(two["population"], one["population"])
        assert_same(two["state_dict"], one["state_dict"])
