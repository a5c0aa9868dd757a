"""A matching that was interrupted and goes on finds what the uninterrupted one finds, bit for bit."""

from pathlib import Path

import pytest
import torch
from interruption import Interrupt, assert_same
from pytorch_lightning import Trainer

from lightning_sym.callbacks import MatchingReport
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.tasks import MatchingTask

pytestmark = [
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),  # on more of them
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


def fit(folder: Path, zoo: Path, place: str = "", ckpt_path: Path | None = None, val_fraction: float = 0.1) -> None:
    checkpoint = RunCheckpoint(folder, filename="last", enable_version_counter=False, every_n_train_steps=2)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[Interrupt(place), MatchingReport(points=3), checkpoint],
    )
    data = DigitsDataModule(batch_size=16, max_samples=80, val_fraction=val_fraction)  # 5 steps
    trainer.fit(MatchingTask(str(zoo)), data, ckpt_path=ckpt_path, weights_only=True)


@pytest.fixture(scope="module", params=[0.1, 0.0], ids=["validated", "not validated"])
def whole(request, matching_zoo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fit(folder, matching_zoo, val_fraction=request.param)
    return folder, request.param


# In the first epoch moments have been added up to the checkpoint; in the second, losses.
@pytest.mark.parametrize("place", ["0 3", "1 4", "2 0", "end"])
def test_resumed_is_uninterrupted(place, whole, matching_zoo, tmp_path):
    expected, val_fraction = whole
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path / "first", matching_zoo, place, val_fraction=val_fraction)
    assert not (tmp_path / "first" / "results").exists()
    resumed = tmp_path / "second"
    fit(resumed, matching_zoo, ckpt_path=tmp_path / "first" / "last.ckpt", val_fraction=val_fraction)
    for name in ("barriers.csv", "summary.csv", "curves.csv"):
        assert (resumed / "results" / name).read_bytes() == (expected / "results" / name).read_bytes(), name
    if place != "end":  # then no training was left, nor a checkpoint to write
        one, two = (torch.load(path / "last.ckpt", weights_only=True) for path in (expected, resumed))
        assert_same(two["matching"], one["matching"])
        assert_same(two["state_dict"], one["state_dict"])
