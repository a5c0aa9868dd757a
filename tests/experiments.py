"""Experiments that are no part of the package: what a user would write."""

from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.networks import Network
from lightning_sym.tasks import PopulationTask


class HalfBlind(nn.Module):
    """A linear classifier of digits that sees a random half of the pixels."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.register_buffer("seen", (torch.rand(64, generator=generator) < 0.5).float())
        self.linear = nn.Linear(64, 10)
        nn.init.normal_(self.linear.weight, std=0.1, generator=generator)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1) * self.seen)


class HalfBlindTask(PopulationTask):
    """Many half-blind classifiers; they are shown noisy digits, and their loss is the mean squared error."""

    def make_member(self, number: int) -> nn.Module:
        return HalfBlind(number)

    def training_batch(self, batch, batch_idx):
        images, labels = batch
        noise = [
            torch.randn(one.shape, generator=self.step_generator("noise", number, batch_idx))
            for number, one in zip(self.member_seeds, images, strict=True)
        ]
        return images + 0.1 * torch.stack(noise).to(images), labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, F.one_hot(targets, 10).to(outputs))


class Plain(LightningModule):
    """A classifier around any network, trained by SGD."""

    def __init__(self, network: nn.Module, lr: float = 0.05, **optimizer: Any) -> None:
        super().__init__()
        self.network, self.criterion = network, nn.CrossEntropyLoss()
        self.lr, self.optimizer = lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, **self.optimizer)


class Validated(Plain):
    """The same, with its loss on validation data."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


class SmallCNN(Network):
    """A convolution, a batch norm if wanted, and a linear map."""

    def __init__(self, norm: bool = False, num_classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.act = nn.ReLU()
        self.last = nn.Linear(48, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.first(x))).flatten(1))
