"""Datamodules that a command line has made."""

import pytest
import torch
from fits import fit
from pytorch_lightning import LightningModule
from pytorch_lightning.cli import LightningCLI

from lightning_sym.datamodules import DigitsDataModule, ImageDataModule, Quadrant


class Nothing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0].mean().view(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning calls jsonargparse by older names
def test_checkpoints_of_a_cli_run_load_with_weights_only(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightning-sym"])
    made = LightningCLI(
        Nothing,
        ImageDataModule,
        subclass_mode_data=True,
        seed_everything_default=False,
        run=False,
        args=[
            "--data=lightning_sym.datamodules.DigitsDataModule",
            "--data.max_samples=40",
            '--data.transforms=[{"class_path": "lightning_sym.datamodules.Quadrant"}]',
        ],
    )
    fit(made.model, made.datamodule, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert stored["transforms"] == [Quadrant().config()]
    back = DigitsDataModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert back.identity() == made.datamodule.identity()
    assert back.identity() == DigitsDataModule(max_samples=40, transforms=[Quadrant()]).identity()
