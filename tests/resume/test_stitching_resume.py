"""Stitching that was interrupted and goes on ends where the uninterrupted one ends, bit for bit."""

import functools
from pathlib import Path

import pytest
import torch
from interruption import Interrupt, assert_same
from pytorch_lightning import Trainer

from lightning_sym.callbacks import BatchNormRecalibration
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import StitchingTask
from lightning_sym.zoo import rebuild_manifest, write_member

pytestmark = [
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


class Watch(Interrupt):
    """Checks on the way what dropout in upper parts that are trained is seeded with."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        assert trainer.fit_loop.total_batch_idx == 5 * trainer.current_epoch + batch_idx
        super().on_train_batch_start(trainer, task, batch, batch_idx)


def fit(folder: Path, zoo: Path, place: str = "", ckpt_path: Path | None = None, val_fraction: float = 0.1):
    checkpoint = RunCheckpoint(folder, filename="last", enable_version_counter=False, every_n_train_steps=2)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=4,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[Watch(place), BatchNormRecalibration(images=40), checkpoint],
    )
    task = StitchingTask(
        str(zoo),
        pairs=[[0, 1], [1, 0]],
        sites=["activation2"],
        maps=["full", "group", "assignment", "lasso"],
        head_start=0.5,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    )
    data = DigitsDataModule(batch_size=16, max_samples=80, val_fraction=val_fraction)  # 5 steps
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)
    return task, trainer


@pytest.fixture(scope="module")
def norm_zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("norms")
    data = DigitsDataModule(max_samples=80)
    for number in range(2):
        network = MyrtleCNN(2, in_channels=1, image_size=8).fresh(number)
        write_member(path, number, network.state_dict(), architecture=network.architecture, data=data.identity())
    rebuild_manifest(path)
    return path


@pytest.fixture(scope="module")
def whole(norm_zoo, tmp_path_factory):
    """Return uninterrupted runs, by the fraction of validation images."""

    @functools.cache
    def run(val_fraction: float):
        folder = tmp_path_factory.mktemp("whole")
        task, trainer = fit(folder, norm_zoo, val_fraction=val_fraction)
        return folder, task, dict(trainer.callback_metrics)

    return run


# The head start ends with the second epoch.
@pytest.mark.parametrize(
    ("place", "val_fraction"), [("0 3", 0.1), ("1 0", 0.0), ("2 0", 0.1), ("2 3", 0.0), ("3 4", 0.1), ("end", 0.1)]
)
def test_resumed_is_uninterrupted(place, val_fraction, whole, norm_zoo, tmp_path):
    folder, expected, metrics = whole(val_fraction)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path / "first", norm_zoo, place, val_fraction=val_fraction)
    ckpt_path = tmp_path / "first" / "last.ckpt"
    task, trainer = fit(tmp_path / "second", norm_zoo, ckpt_path=ckpt_path, val_fraction=val_fraction)
    for a, b in zip(expected.branches, task.branches, strict=True):
        assert_same(dict(a.state_dict()), dict(b.state_dict()))
    assert_same(expected.kept, task.kept)
    assert_same(expected.stopped, task.stopped)
    if place != "end":  # then no training was left, nor a checkpoint to write
        assert_same(metrics, dict(trainer.callback_metrics))
        one, two = (torch.load(path / "last.ckpt", weights_only=True) for path in (folder, tmp_path / "second"))
        assert_same(one["population"], two["population"])
        assert_same(one["state_dict"], two["state_dict"])
        assert_same(one["optimizer_states"], two["optimizer_states"])
