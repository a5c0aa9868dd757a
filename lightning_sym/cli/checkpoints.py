"""Write checkpoints that a run resumes from as if it had never stopped."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.utilities.apply_func import convert_tensors_to_scalars
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sym._files import write_atomically
from lightning_sym.cli.loggers import MetricsCSV


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are whole or absent, also when the process is killed or the disk is full."""

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, without running code that it may hold unless that is asked for.

        Raises:
            ValueError: If it is damaged, or holds more than tensors and plain values.
        """
        try:
            return super().load_checkpoint(Path(path), map_location, weights_only)
        except pickle.UnpicklingError:
            raise ValueError(
                f"{path} is damaged, or holds code, which is not run: give a checkpoint that lightning-sym wrote."
            ) from None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write under a temporary name in the same folder, then rename."""
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))


class RunCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that does not save between an epoch's last step and its validation.

    Lightning would skip the validation when it resumes from there. A checkpoint that is due at that step is written
    at the epoch's end. The rows of ``metrics.csv`` up to a checkpoint are written before it. Arguments as for
    ``pytorch_lightning.callbacks.ModelCheckpoint``.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if due, but not after the last step of an epoch."""
        if not trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if due, now or at the last step."""
        super().on_train_epoch_end(trainer, pl_module)
        every = self._every_n_train_steps
        if every and trainer.global_step % every == 0 and not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Write the rows of metrics first: a run that is killed after the checkpoint does not log them again."""
        _write_metrics(trainer)
        super()._save_checkpoint(trainer, filepath)


def _write_metrics(trainer: Trainer) -> None:
    """Write all rows of metrics, and those that Lightning logs after the saving hooks; call it on every rank."""
    connector = trainer._logger_connector
    at_end = connector._first_loop_iter is None  # of an epoch, or of a validation
    due = trainer._results is not None and (at_end or connector.should_update_logs)
    logged = convert_tensors_to_scalars(connector.metrics["log"]) if due and not trainer.sanity_checking else {}
    # The step of an epoch's means is that of its last batch, already counted here.
    step = trainer.fit_loop.epoch_loop._batches_that_stepped - (trainer.training and at_end)
    step = int(logged.pop("step", step))
    for logger in trainer.loggers:
        if isinstance(logger, MetricsCSV):
            if logged:
                logger.log_metrics({**logged, "epoch": logged.get("epoch", trainer.current_epoch)}, step)
            logger.save()
