"""Agreement of all processes of a fit on task, data and trainer, also without the command line."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelSummary, ProgressBar

from lightning_sym._agreement import check_agreement
from lightning_sym.datamodules import InputDataModule
from lightning_sym.zoo import versions

_OF_TRAINER = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "precision", "num_nodes", "world_size"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "fast_dev_run"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "overfit_batches"),
    *("num_sanity_val_steps", "reload_dataloaders_every_n_epochs"),
)


def check_same_run(trainer: Trainer, task: LightningModule) -> None:
    """Check that all processes fit the same task on the same data in the same way; to be called on every rank.

    Args:
        trainer: Its settings, and those of its datamodule and callbacks, are compared.
        task: Its hyperparameters are compared.

    Raises:
        ValueError: If one differs; the sentence names it, a rank, and both values.
    """
    if trainer.world_size == 1:
        return
    data: Any = getattr(trainer, "datamodule", None)
    shown = (ProgressBar, ModelSummary)
    callbacks = [one for one in trainer.callbacks if not isinstance(one, shown)]  # type: ignore[attr-defined]
    check_agreement(
        {
            "task": type(task).__qualname__,
            "hyperparameter": dict(task.hparams),
            "datamodule": type(data).__qualname__,
            # The data themselves, wherever each process found them.
            "data": data.identity()
            if isinstance(data, InputDataModule)
            else dict(getattr(data, "hparams", None) or {}),
            "trainer": {name: getattr(trainer, name, None) for name in _OF_TRAINER},
            "strategy": type(trainer.strategy).__qualname__,
            "callbacks": [type(callback).__qualname__ for callback in callbacks],
            "resumed": trainer.ckpt_path is not None,
            "version of": versions(),
        }
    )
