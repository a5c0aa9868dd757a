"""Short, quiet runs of a trainer, for the tests of several folders and for the scripts of ``distributed/``."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_sym.datamodules import DigitsDataModule, InputDataModule, TensorLoader

N = TypeVar("N", bound=nn.Module)


def digits(**changes: Any) -> DigitsDataModule:
    """Return 80 digits in batches of 16."""
    return DigitsDataModule(**{"batch_size": 16, "max_samples": 80, **changes})


def descended(network: N, data: DigitsDataModule, steps: int, lr: float) -> N:
    """Return a network after some steps of Adam on all images, so that not everything can go for nothing."""
    images, labels = (torch.cat(parts) for parts in zip(*data.curvature_dataloader(), strict=True))
    optimizer = torch.optim.Adam(network.train().parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return network.eval()


def epoch(loader: TensorLoader, number: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of one epoch."""
    loader.set_epoch(number)
    batches = list(loader)
    assert len(batches) == len(loader)
    return batches


def saving(folder: Path, filename: str = "last", **changes: Any) -> ModelCheckpoint:
    """Return a callback that writes ``folder/filename.ckpt`` at the end of each epoch or when ``changes`` say so."""
    settings = changes or {"save_on_train_epoch_end": True}
    return ModelCheckpoint(folder, filename=filename, enable_version_counter=False, **settings)


def quiet_trainer(*callbacks: Callback, folder: Path | None = None, **changes: Any) -> Trainer:
    """Return a trainer on the CPU that prints nothing and writes only what its callbacks write, for one epoch."""
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**settings, **changes})


def fit(
    task: LightningModule,
    data: Any = None,
    *callbacks: Callback,
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    **changes: Any,
) -> Trainer:
    """Fit a task, on :func:`digits` unless there is other data, and return the :func:`quiet_trainer`."""
    trainer = quiet_trainer(*callbacks, folder=folder, **changes)
    trainer.fit(task, digits() if data is None else data, ckpt_path=ckpt_path, weights_only=True)
    return trainer


class Interrupt(Callback):
    """Raises ``RuntimeError("interrupted")`` before a step, ``"<epoch> <step within it>"``, or at the ``"end"``.

    At the end means before the reports that follow in the list of callbacks.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.place == f"{trainer.current_epoch} {batch_idx}":
            raise RuntimeError("interrupted")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.place == "end":
            raise RuntimeError("interrupted")


class Poison(Callback):
    """Makes a member's weights NaN before a step, by default the third of the second epoch of :func:`digits`."""

    def __init__(self, number: int = 1, step: int = 7) -> None:
        self.number, self.step = number, step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        population = pl_module.population
        if trainer.global_step == self.step and self.number in population.numbers:
            state = population.member_state(self.number)
            nothing = {k: v * torch.nan if v.is_floating_point() else v for k, v in state.items()}
            population.set_member_state(self.number, nothing)


class Theirs(LightningDataModule):
    """Eight images as somebody else's data, which know neither members nor what they are."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)), batch_size=4)

    val_dataloader = train_dataloader


class Given(InputDataModule):
    """Tensors as data: for training in batches of ``size`` (default: all in one), ``repeats`` times in an epoch."""

    def __init__(self, x: Tensor, y: Tensor, classes: int | None = None, repeats: int = 1, size: int = 0) -> None:
        super().__init__()
        self.pairs = TensorDataset(x, y)
        self.repeats, self.size = repeats, size or len(x)
        self.input_shape = tuple(x.shape[1:])
        self.num_classes = classes or y.shape[-1]

    def identity(self) -> dict[str, Any]:
        return {"class_path": "fits.Given"}

    def train_dataloader(self) -> Any:
        return DataLoader(ConcatDataset([self.pairs] * self.repeats), self.size)

    def curvature_dataloader(self) -> Any:
        return DataLoader(self.pairs, 64)

    def test_dataloader(self) -> Any:
        return DataLoader(self.pairs, 50)
