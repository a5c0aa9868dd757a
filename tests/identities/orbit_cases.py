"""Networks on whose orbits the tests of canonical forms and of matching walk, each traced once."""

import functools
from typing import Any, NamedTuple

import torch
from helpers import Program, of
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

from lightning_sym.networks import CIFARResNet, CIFARResNet18, LeNet5, MultiLayerPerceptron, MyrtleCNN, Polynomial
from lightning_sym.symmetry import Symmetry, trace_symmetry

# Sums of up to 1e4 products in float64, through up to 20 layers; after gauges that are found by iteration.
EXACT = 1e-10
LARGE = "torchvision_resnet18"


def residual(activation: type[nn.Module]) -> nn.Module:
    """A residual stream of 4 units without normalisation."""

    def function(s: Any, x: Tensor) -> Tensor:
        x = s.activation(s.into(x))
        return s.out(s.activation(x + s.back(s.activation(s.inner(x)))))

    parts = {
        "into": of(nn.Linear, 3, 4),
        "inner": of(nn.Linear, 4, 5),
        "back": of(nn.Linear, 5, 4),
        "out": of(nn.Linear, 4, 2),
    }
    return Program(function, {**parts, "activation": activation})


def recurrent() -> nn.Module:
    """One hidden layer used twice: its units stand on both axes of one weight."""
    return Program(
        lambda s, x: s.out(F.relu(s.hidden(F.relu(s.hidden(F.relu(s.into(x))))))),
        {"into": of(nn.Linear, 4, 6), "hidden": of(nn.Linear, 6, 6), "out": of(nn.Linear, 6, 3)},
    )


def inverted_residuals() -> nn.Module:
    """As in mobilenet_v2: expand, depthwise, project, without an activation on the stream."""

    def block() -> nn.Sequential:
        depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        return nn.Sequential(
            *(nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(), depthwise, nn.BatchNorm2d(12)),
            *(nn.ReLU6(), nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6)),
        )

    def function(s: Any, x: Tensor) -> Tensor:
        x = s.stem(x)
        x = x + s.one(x)
        x = x + s.two(x)
        return s.head(x.mean((2, 3)))

    stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    return Program(function, {"stem": stem, "one": block, "two": block, "head": of(nn.Linear, 6, 4)})


def added_convolutions() -> nn.Module:
    """As in RepVGG: two convolutions and the identity, each with a batch norm, are added."""

    def function(s: Any, x: Tensor) -> Tensor:
        x = F.relu(s.stem(x))
        return s.head(F.relu(s.three(x) + s.one(x) + s.same(x)).mean((2, 3)))

    def convolution(size: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 4, size, padding=size // 2, bias=False), nn.BatchNorm2d(4))

    parts = {"stem": of(nn.Conv2d, 3, 4, 1), "three": lambda: convolution(3), "one": lambda: convolution(1)}
    return Program(function, {**parts, "same": of(nn.BatchNorm2d, 4), "head": of(nn.Linear, 4, 5)})


def added_low_rank() -> nn.Module:
    """A layer and two smaller ones in a row, as for low-rank adapters."""
    return Program(
        lambda s, x: s.out(torch.tanh(s.whole(x) + s.back(s.into(x)))),
        {"whole": of(nn.Linear, 6, 5), "into": of(nn.Linear, 6, 2, False), "back": of(nn.Linear, 2, 5, False)}
        | {"out": of(nn.Linear, 5, 4)},
    )


def mlp(*activations: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    widths = [5, 8, 7, 6][: len(activations) + 1]
    for first, second, activation in zip(widths, widths[1:], activations, strict=False):
        layers += [nn.Linear(first, second), activation]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 3))


# By name: how to make the network, and the shape of an input.
NETWORKS = {
    "relu": (lambda: mlp(nn.ReLU(), nn.ReLU(), nn.ReLU()), (5,)),
    "tanh": (lambda: mlp(nn.Tanh(), nn.Tanh()), (5,)),
    "gelu": (lambda: mlp(nn.GELU(), nn.GELU()), (5,)),
    "wide": (lambda: MultiLayerPerceptron((12, 9), image_size=4, num_classes=3), (1, 4, 4)),
    "wide_tanh": (lambda: MultiLayerPerceptron((12, 9), image_size=4, num_classes=3, activation="tanh"), (1, 4, 4)),
    "prelu": (lambda: mlp(nn.PReLU(8), nn.PReLU(7)), (5,)),
    "square": (lambda: mlp(Polynomial(2), Polynomial(2)), (5,)),
    "gaussian": (lambda: MultiLayerPerceptron((6, 5), 1, 3, 3, "gaussian"), (1, 3, 3)),
    "batch_norm_after": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)), (5,)),
    "biased_before_batch_norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        (5,)),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 2)),
        (5,)),
    "grouped": (lambda: nn.Sequential(*(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4),
        nn.BatchNorm2d(12), nn.ReLU()), *(nn.Conv2d(12, 6, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))),
        (3, 6, 6)),
    "residual": (lambda: residual(nn.ReLU), (3,)),
    "residual_tanh": (lambda: residual(nn.Tanh), (3,)),
    "recurrent": (recurrent, (4,)),
    "lenet5": (LeNet5, (1, 28, 28)),
    "myrtle": (lambda: MyrtleCNN(width=4), (3, 32, 32)),
    "myrtle_tanh": (lambda: MyrtleCNN(width=4, activation="tanh"), (3, 32, 32)),
    "myrtle_without_norm": (lambda: MyrtleCNN(width=4, batch_norm=False), (3, 32, 32)),
    "resnet20_a": (lambda: CIFARResNet(width=4, shortcut="A"), (3, 16, 16)),
    "resnet20_b": (lambda: CIFARResNet(width=4, shortcut="B"), (3, 16, 16)),
    "resnet18": (lambda: CIFARResNet18(width=3), (3, 16, 16)),
    "depthwise": (lambda: nn.Sequential(*(nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Tanh(),
        nn.Conv2d(8, 6, 3), nn.ReLU()), *(nn.Flatten(), nn.Linear(96, 5))), (3, 8, 8)),
    "two_groups": (lambda: nn.Sequential(*(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(),
        nn.Conv2d(12, 6, 1), nn.ReLU()), *(nn.Flatten(), nn.Linear(216, 5))), (3, 8, 8)),
    "group_norm": (lambda: nn.Sequential(*(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 5), nn.ReLU()), nn.Linear(5, 4)), (3, 8, 8)),
    LARGE: (lambda: resnet18(num_classes=4), (3, 32, 32)),
    "inverted_residuals": (inverted_residuals, (3, 8, 8)),
    "added_convolutions": (added_convolutions, (3, 6, 6)),
    "added_low_rank": (added_low_rank, (6,)),
}  # fmt: skip


class Case(NamedTuple):
    """A network in evaluation mode, inputs for it, and its symmetry."""

    network: nn.Module
    inputs: Tensor
    symmetry: Symmetry

    def moved(self, network: nn.Module, scale: float, seed: int = 1) -> nn.Module:
        element = self.symmetry.sample(torch.Generator().manual_seed(seed), scale=scale, mixing=False, shifts=scale > 0)
        return self.symmetry.act(element, network)


def member(name: str, seed: int) -> nn.Module:
    """Return a network in float64 whose norm layers have weights and statistics as after training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = NETWORKS[name][0]().double().eval()
        with torch.no_grad():
            for module in network.modules():
                if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)):
                    module.weight.normal_()
                    module.bias.normal_()
                if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                    module.running_mean.normal_()
                    module.running_var.uniform_(0.5, 2.0)
    return network


@functools.cache
def made(name: str) -> Case:
    network, generator = member(name, 0), torch.Generator().manual_seed(5)
    inputs = torch.randn(8, *NETWORKS[name][1], dtype=torch.float64, generator=generator)
    return Case(network, inputs, trace_symmetry(network, inputs, check=False))


def difference(one: nn.Module, two: nn.Module) -> float:
    """Return the largest difference of a parameter or buffer, relative to the tensor's largest magnitude."""
    pairs = [
        (a.double(), b.double()) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    ]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in pairs)


def function_change(case: Case, one: nn.Module, two: nn.Module) -> float:
    with torch.no_grad():
        before, after = one(case.inputs), two(case.inputs)
    return float((before - after).abs().max() / before.abs().max())
