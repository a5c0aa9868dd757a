"""Experiments with populations that are no part of the package: what a user would write, for the conformance suite."""

import torch
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
