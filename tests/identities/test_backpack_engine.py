"""Engine backpack gives the numbers of engine autograd, which has tests of its own against dense matrices."""

import pytest
import torch
from curvature_references import GRID, LAYERS, data, perturbed, relative_error, relaxed_network, with_head
from torch import nn

from lightning_sym.curvature import factors
from lightning_sym.layers import CircularConv, FactoredFullyConnected, PolyphasePool, ResidualPathways
from lightning_sym.networks import LeNet5, MultiLayerPerceptron, MyrtleCNN, RelaxedNetwork

LIKELIHOODS = ["classification", "regression"]
TOLERANCE = 1e-12


def compare(network, x, y, likelihood, **settings):
    """Return the largest relative difference of a factor, after a check that everything else is the same."""
    loader = [(x[:2], y[:2]), (x[2:], y[2:])]
    expected, found = (
        factors(
            network, loader, likelihood, engine=engine, generator=torch.Generator().manual_seed(1), **settings
        )
        for engine in ("autograd", "backpack")
    )  # fmt: skip
    assert list(found.blocks) == list(expected.blocks)
    assert (found.samples, found.outputs, found.left_out) == (expected.samples, expected.outputs, expected.left_out)
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-13)
    errors = [0.0]
    for name, block in expected.blocks.items():
        other = found.blocks[name]
        assert other.blocks_first == block.blocks_first
        errors.append(relative_error(other.out_factor, block.out_factor))
        assert (other.in_factor is None) == (block.in_factor is None)
        if block.in_factor is not None:
            errors.append(relative_error(other.in_factor, block.in_factor))
    assert len(errors) > 2
    return max(errors)


@pytest.mark.parametrize("samples", [None, 3], ids=["exact", "monte carlo"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few(4)
def test_every_layer(layer, likelihood, samples):
    network, shape = with_head(layer)
    for ffc in ("shared", "per_channel") if "factored" in layer else ("shared",):
        assert compare(network, *data(5, shape, 3, likelihood), likelihood, samples=samples, ffc=ffc) < TOLERANCE


@pytest.mark.parametrize("samples", [None, 3], ids=["exact", "monte carlo"])
@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("scale", [None, 1, 0.3])
@pytest.mark.few(6)
def test_residual_networks(scale, likelihood, ffc, samples):
    x, y = data(5, (2, *GRID), 3, likelihood)
    assert compare(relaxed_network(scale), x, y, likelihood, ffc=ffc, samples=samples) < TOLERANCE


NETWORKS = {
    "ffc conv": lambda: RelaxedNetwork(["ffc", "conv"], 2, (8, 16), 1, 3, activation="gelu"),
    "all": lambda: RelaxedNetwork(["fc", "sfc", "sconv", "gconv_separable"], 1, 8, 1, 3, learn_positions=True),
    "p4": lambda: RelaxedNetwork(["ffc", "conv", "gconv"], 1, 8, 1, 3, pool_norm="l2"),
    "p4 alone": lambda: RelaxedNetwork(["gconv_full"], 1, 8, 1, 3),
    "perceptron": lambda: MultiLayerPerceptron((5, 4), 1, 8, 3, activation="tanh"),
    "myrtle": lambda: MyrtleCNN(2, batch_norm=False, in_channels=1, image_size=8, num_classes=3),
    "myrtle, batch norm": lambda: MyrtleCNN(2, in_channels=1, image_size=8, num_classes=3),
    "lenet": lambda: LeNet5(1, 28, 3),
}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.few(6, "ffc conv-regression", "myrtle-regression")
def test_networks_that_call_their_children_in_turn(name, likelihood):
    torch.manual_seed(0)
    network = perturbed(NETWORKS[name]())
    shape = {"lenet": (1, 28, 28), "ffc conv": (1, 8, 16)}.get(name, (1, 8, 8))
    assert compare(network, *data(5, shape, 3, likelihood), likelihood) < TOLERANCE


class Subsample(nn.Module):
    """Returns a strided view that begins where its input begins, as an equivariant pool might."""

    def forward(self, x):
        return x[..., ::2, ::2]


ADDRESSES = {
    # What BackPACK would confuse: it tells tensors apart by their address.
    "a view beside another path": lambda: ResidualPathways(Subsample(), nn.Conv2d(2, 2, 2, stride=2)),
    "a view behind another path": lambda: ResidualPathways(nn.Conv2d(2, 2, 2, stride=2), Subsample()),
    "without parameters": lambda: ResidualPathways(Subsample(), nn.Sequential(nn.AvgPool2d(2), nn.Dropout(0.5))),
    "the input itself beside another path": lambda: ResidualPathways(nn.Identity(), CircularConv(2, 2), scale=0.7),
    "the input itself, twice": lambda: ResidualPathways(nn.Identity(), nn.Identity(), nn.Sequential(nn.Identity())),
    "paths within paths": lambda: ResidualPathways(ResidualPathways(CircularConv(2, 2), nn.Tanh()),
        nn.Sequential(nn.ReLU(), ResidualPathways(nn.Sigmoid(), FactoredFullyConnected(2, 2, GRID), scale=1))),
    "one path": lambda: nn.Sequential(ResidualPathways(CircularConv(2, 2)), PolyphasePool()),
    "activations in place": lambda: nn.Sequential(CircularConv(2, 2), nn.ReLU(inplace=True), CircularConv(2, 2),
        nn.ELU(inplace=True)),
    "dilated patches of a circular convolution": lambda: nn.Conv2d(2, 2, 3, padding=2, dilation=2,
        padding_mode="circular"),
}  # fmt: skip


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses(name, likelihood):
    torch.manual_seed(0)
    parts = [nn.Conv2d(2, 2, 1), nn.Tanh(), ADDRESSES[name](), nn.Tanh(), nn.Flatten()]
    size = nn.Sequential(*parts).eval()(torch.zeros(1, 2, *GRID)).numel()
    network = perturbed(nn.Sequential(*parts, nn.Linear(size, 3)))
    assert compare(network, *data(5, (2, *GRID), 3, likelihood), likelihood) < TOLERANCE
