"""Datamodules as recipes name them."""

import pytest
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning import LightningModule
from pytorch_lightning.cli import LightningCLI

from lightning_sym.datamodules import DigitsDataModule, ImageDataModule, Quadrant

RECIPE = """
class_path: lightning_sym.datamodules.DigitsDataModule
init_args:
  batch_size: 16
  shift: 1
  shift_fill: {fill}
  transforms:
  - class_path: lightning_sym.datamodules.Resized
    init_args: {{size: 12}}
  - class_path: lightning_sym.datamodules.Quadrant
    init_args: {{target: digit}}
"""


@pytest.mark.parametrize("fill", ["mean", 3.5])
def test_a_recipe_names_transforms(fill):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=ImageDataModule)
    config = parser.parse_string("data:" + RECIPE.format(fill=fill).replace("\n", "\n  "))
    # The name depends on the version.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    data = instantiate(config).data
    assert isinstance(data, DigitsDataModule)
    assert data.input_shape == (1, 24, 24)
    assert data.hparams.shift_fill == fill
    assert [type(transform).__name__ for transform in data.transforms] == ["Resized", "Quadrant"]


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
    cli = LightningCLI(
        Nothing,
        ImageDataModule,
        subclass_mode_data=True,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={
            "max_steps": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        },
        args=[
            "fit",
            "--data=lightning_sym.datamodules.DigitsDataModule",
            "--data.max_samples=40",
            '--data.transforms=[{"class_path": "lightning_sym.datamodules.Quadrant"}]',
        ],
    )
    cli.trainer.save_checkpoint(tmp_path / "last.ckpt")
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert stored["transforms"] == [Quadrant().config()]
    back = DigitsDataModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert back.identity() == cli.datamodule.identity()
    assert back.identity() == DigitsDataModule(max_samples=40, transforms=[Quadrant()]).identity()
