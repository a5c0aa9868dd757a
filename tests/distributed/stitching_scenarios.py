"""Fits of a StitchingTask in one and two processes; run by test_stitching_ddp.py in a process of its own, as it forks.

Usage: ``python stitching_scenarios.py FOLDER ZOO``; every scenario leaves its checkpoint and metrics in a subfolder,
and ``FOLDER/errors.json`` says what those that must fail said.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from scenarios import Scenarios, parallel, paths

from lightning_sym.callbacks import BatchNormRecalibration
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.stitching import FullMap
from lightning_sym.tasks import StitchingTask


class Stop(Callback):
    """Interrupts a run in its second epoch."""

    def on_train_epoch_start(self, trainer, task) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("interrupted")


class Write(Callback):
    """Writes what validation found, on every rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, task) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        with task.evaluating():
            found = task.evaluate(trainer.datamodule.test_dataloader())
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"metrics-{trainer.global_rank}.json"
        path.write_text(json.dumps({"metrics": metrics, "test": found, "stopped": task.stopped}))


class Unlucky(StitchingTask):
    """Features of the second process are not finite."""

    def values(self, images):
        return super().values(images * float("nan") if self.trainer.global_rank == 1 else images)


class Explodes(FullMap):
    """Its loss is not a number on the second process, from the third step on."""

    def __init__(self, port) -> None:
        super().__init__(port)
        self.calls = 0

    def regularization(self):
        self.calls += 1
        one = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return self.weight.sum() * (float("nan") if one and self.calls > 2 else 0.0)


def fit(
    folder: Path,
    zoo: Path,
    processes: int = 1,
    batch_size: int = 16,
    kind: type[StitchingTask] = StitchingTask,
    ckpt_path: Path | None = None,
    recalibrate: bool = True,
    interrupt: bool = False,
    batch_norm: str = "frozen",
    max_epochs: int = 2,
    maps: tuple = ("full", "group", "assignment", "least_squares", "identity"),
    **settings,
) -> None:
    common = {"dirpath": folder, "enable_version_counter": False}
    checkpoint = ModelCheckpoint(**common, filename="last", save_on_train_epoch_end=True)
    middle = ModelCheckpoint(**common, filename="middle", every_n_train_steps=3)
    callbacks = [Write(folder), checkpoint, middle]
    if recalibrate:  # two full batches of each of two processes are four of one
        callbacks.insert(0, BatchNormRecalibration(images=64, batch_size=16))
    trainer = Trainer(
        **parallel(processes),
        accelerator="cpu",
        max_epochs=max_epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[*callbacks, *([Stop()] if interrupt else [])],
    )
    task = kind(
        str(zoo),
        pairs=[[0, 1], [1, 0]],
        sites=["activation2"],
        maps=list(maps),
        batch_norm=batch_norm,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        **settings,
    )
    # 81 validation and test images: not divisible by 2.
    data = DigitsDataModule(batch_size=batch_size, max_samples=81)
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)


def main(folder: Path, zoo: Path) -> None:
    scenarios = Scenarios(folder)

    def run(name: str, action: Callable[..., None] = fit, **settings) -> None:
        scenarios.run(name, action, zoo, **settings)

    two = {"processes": 2, "batch_size": 8}
    run("2", **two)
    run("2 batch", batch_norm="batch", **two)
    run("2 untrained", maps=("assignment", "identity"), max_epochs=1, **two)
    run("part", interrupt=True, batch_norm="batch", **two)
    run("resumed", ckpt_path=folder / "part" / "middle.ckpt", batch_norm="batch", **two)
    run("unlucky", kind=Unlucky, **two)
    run("explodes", maps=("full", Explodes), **two)
    # Last: a process that has taken gradients cannot fork. 1 x 16 images see what 2 x 8 see.
    run("1", batch_size=16)
    scenarios.finish()


if __name__ == "__main__":
    main(*paths())
