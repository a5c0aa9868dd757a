"""Groups of precisions, their optimizer, and the words of the errors."""

import math

import pytest
import torch
from helpers import refused
from torch import nn

from lightning_sym.curvature import Evidence, NonFiniteError, PrecisionOptimizer, factors, parameter_groups
from lightning_sym.layers import CircularConv, FactoredFullyConnected, PolyphasePool, ResidualPathways, parameter_paths
from lightning_sym.networks import RelaxedNetwork


def relaxed():
    torch.manual_seed(0)
    paths = {"fc": FactoredFullyConnected(1, 2, 4, 2), "conv": nn.Sequential(CircularConv(1, 2), PolyphasePool())}
    return nn.Sequential(ResidualPathways(paths), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(9, 1, 4, 4, generator=generator), torch.arange(9) % 3)]


def evidence(network=None, granularity="per_path"):
    network = network or relaxed()
    return Evidence.of(network, factors(network, batches()), parameter_groups(network, granularity))


def test_paths_are_the_children_of_residual_pathways():
    groups = parameter_groups(relaxed())
    assert groups.names == ("0.fc", "0.conv", "3")
    assert groups.precisions == groups.paths
    assert groups.paths["0.conv.0.weight"] == groups.paths["0.conv.0.bias"] == "0.conv"
    assert {groups.paths[f"0.fc.{name}"] for name in ("theta1", "theta2", "b1", "b2")} == {"0.fc"}
    assert groups.layers == {"0.fc": "0", "0.conv": "0", "3": "3"}


def test_any_network_has_groups():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2), nn.GELU()), nn.Flatten())
    assert parameter_groups(network).names == ("0", "1.0")
    alone = parameter_groups(relaxed()[0])
    assert alone.layers == {"fc": "", "conv": ""}
    assert alone.names == ("fc", "conv")


@pytest.mark.parametrize(
    "paths", [["conv"], ["ffc", "conv"], ["ffc", "conv", "gconv"], ["sfc", "sconv", "conv"], ["conv", "gconv"]]
)
def test_every_path_of_every_block_has_a_precision_of_its_own(paths):
    """Also where a pool follows the sum of several convolutional paths."""
    network = RelaxedNetwork(paths=paths, width=2, grid=8, in_channels=1)
    groups = parameter_groups(network)
    blocks = 4
    expected = {f"{block}.{path}" for block, path in parameter_paths(network).values()}
    assert len(expected) == blocks * len(paths)
    assert set(groups.names) == expected | {"hidden", "classifier"}
    for name, (block, path) in parameter_paths(network).items():
        if name in groups.paths:  # anchor positions have no curvature
            assert groups.paths[name] == groups.precisions[name] == f"{block}.{path}"
            assert groups.layers[groups.paths[name]] == block
    tensors = parameter_groups(network, "per_tensor")
    assert tensors.paths == groups.paths
    assert all(name == precision for name, precision in tensors.precisions.items())


@pytest.mark.parametrize("granularity", ["per_path", "per_tensor"])
def test_relative_numbers_compare_paths_of_a_layer(granularity):
    found = evidence(granularity=granularity)
    numbers = found.effective_parameters(torch.zeros(len(found.groups.names)))
    assert list(numbers) == ["0.fc", "0.conv", "3"]
    fc, conv, last = numbers.values()
    assert fc.size == 2 * (16 + 4) + 2 + 4
    assert conv.size == 9 * 2 + 2
    assert fc.relative + conv.relative == pytest.approx(1)
    assert fc.relative == pytest.approx((fc.raw / 46) / (fc.raw / 46 + conv.raw / 20))
    assert last.relative == 1
    assert fc.layer == conv.layer == "0"
    assert fc.precision == pytest.approx(1)
    network = relaxed()
    squares = sum(p.square().sum().item() for p in network[0].fc.parameters())
    assert fc.mean_square == pytest.approx(squares / 46, rel=1e-6)


def test_paths_that_see_nothing_share():
    network = relaxed()
    with torch.no_grad():
        for parameter in network[3].parameters():
            parameter.zero_()
    numbers = evidence(network).effective_parameters(torch.zeros(3))
    assert numbers["0.fc"].raw == 0
    assert numbers["0.fc"].relative == numbers["0.conv"].relative == 0.5


def test_steps_of_adam_are_those_of_torch():
    found = evidence()
    optimizer = PrecisionOptimizer(found.groups.names, lr=0.1)
    optimizer.update(found, 7)
    plain = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([plain], lr=0.1)
    for _ in range(7):
        plain.grad = -found.gradients(plain)[0] / 9
        adam.step()
    torch.testing.assert_close(optimizer.log_precisions, plain.detach())
    assert optimizer.log_noise == 0
    assert not optimizer.log_precisions.requires_grad


def test_log_precisions_are_clamped():
    network = relaxed()
    with torch.no_grad():
        for parameter in network[0].fc.parameters():
            parameter.zero_()
    found = evidence(network)
    optimizer = PrecisionOptimizer(found.groups.names, lr=1.0, bounds=(-2, 3))
    optimizer.update(found, 60)
    assert optimizer.log_precisions.max() == 3
    assert optimizer.log_precisions.min() >= -2


found, groups = factors(relaxed(), batches()), parameter_groups(relaxed())
optimizer, made = PrecisionOptimizer(["a"]), Evidence.of(relaxed(), found, groups)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(parameter_groups, relaxed(), "per_paths", says="Did you mean 'per_path'"),
        refused(PrecisionOptimizer, ["a"], lr=0),
        refused(PrecisionOptimizer, ["a"], bounds=(2, 1), says="ascending"),
        refused(PrecisionOptimizer, ["a"], bounds=(-800, 1), says="within 700"),
        refused(PrecisionOptimizer, [], says="no groups"),
        refused(optimizer.load_state_dict, PrecisionOptimizer(["b"]).state_dict(), says="other groups"),
        refused(optimizer.update, made, says="other groups"),
        refused(PrecisionOptimizer(groups.names).update, made, steps=0),
        refused(Evidence.of, relaxed(), found, groups, temperature=0),
        refused(Evidence, found, {}, groups, says="'0.fc.theta1' has a curvature block but no"),
        refused(Evidence, found, dict.fromkeys(found.blocks, math.nan), groups, says="norm", error=NonFiniteError),
        refused(made.gradients, torch.zeros(2), says="There are 3 groups"),
        refused(made.gradients, torch.full((3,), math.nan), says="finite and between"),
        refused(made.terms, torch.zeros(3), 0.1, says="has no noise"),
    ],
)
def test_what_does_not_fit_is_named(refusal):
    refusal()
