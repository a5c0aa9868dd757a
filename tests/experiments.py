"""Experiments with populations that are no part of the package: what a user would write, for the conformance suite."""

from math import comb

import torch
from torch import Tensor, nn
from torch.func import functional_call
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


class Curve(nn.Module):
    r"""A Bezier curve in weight space between two networks, :math:`\sum_i \binom{n}{i} (1-t)^{n-i} t^i \theta_i`.

    In training it is a network at a random point of the curve, in evaluation that at ``place``.

    Args:
        start: The network at t = 0; fixed.
        end: The network at t = 1; fixed.
        points: Control points between them, which are trained; they begin on the straight line.
    """

    def __init__(self, start: Network, end: Network, points: int = 1) -> None:
        super().__init__()
        self.template = (start,)  # in a tuple: only the control points are parameters of the curve
        self.place = 0.5
        self.shapes = {name: parameter.shape for name, parameter in start.named_parameters()}
        ends = [torch.cat([p.detach().flatten() for p in network.parameters()]) for network in (start, end)]
        self.register_buffer("ends", torch.stack(ends))
        share = torch.linspace(0, 1, points + 2)[1:-1, None]
        self.control = nn.Parameter(torch.lerp(ends[0], ends[1], share.to(ends[0])))

    def weights(self, t: Tensor) -> dict[str, Tensor]:
        """Return the weights at a point of the curve, ``t`` in [0, 1]."""
        points = torch.cat([self.ends[:1], self.control, self.ends[1:]])
        n = len(points) - 1
        basis = torch.stack([comb(n, i) * (1 - t) ** (n - i) * t**i for i in range(n + 1)])
        parts = (basis @ points).split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def forward(self, inputs: Tensor) -> Tensor:
        t = torch.rand((), device=inputs.device) if self.training else torch.tensor(self.place, device=inputs.device)
        return functional_call(self.template[0], self.weights(t), (inputs,))


class CurveTask(PopulationTask):
    """Train curves between pairs of networks, such that the loss is low all along each curve; member n is of pair n."""

    def __init__(self, pairs: list[tuple[Network, Network]], members: int = 1, points: int = 1, **settings) -> None:
        super().__init__(members, **settings)
        self.pairs, self.points = pairs, points

    def make_member(self, number: int) -> nn.Module:
        return Curve(*self.pairs[number], points=self.points)


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
