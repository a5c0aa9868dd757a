"""What callbacks ask of the task, the data and the trainer, with errors that name what is missing."""

from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer

from lightning_sym.datamodules import ImageDataModule
from lightning_sym.tasks import ZooTask


def zoo_task(callback: Callback, task: LightningModule) -> ZooTask:
    """Return the task if it is a ``ZooTask``.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(task, ZooTask):
        raise TypeError(
            f"{type(callback).__name__} works with lightning_sym.tasks.ZooTask, got {type(task).__name__}; remove the "
            "callback or use that task."
        )
    return task


def image_datamodule(callback: Callback, trainer: Trainer) -> ImageDataModule:
    """Return the trainer's datamodule if it is an ``ImageDataModule``.

    Raises:
        TypeError: If it is not.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, ImageDataModule):
        raise TypeError(
            f"{type(callback).__name__} needs a datamodule of lightning_sym.datamodules (for the splits and their "
            f"identity), got {type(data).__name__}; pass one to trainer.fit(task, datamodule)."
        )
    return data


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of this run: the logger's, or ``default_root_dir`` without one. The same on all ranks."""
    return Path(trainer.log_dir or trainer.default_root_dir)
