"""The base of tasks that measure trained networks and train none."""

from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import nn

from lightning_sym._loading import LoadsTrusted


class UntrainedTask(LoadsTrusted, LightningModule):
    """A task without epochs of training: a report measures everything."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nothing = nn.Parameter(torch.zeros(1))  # DDP needs a parameter

    def configure_optimizers(self) -> list[Any]:
        """Return no optimizers."""
        return []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""
