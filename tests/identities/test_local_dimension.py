"""The rank of the Jacobian against the dimension of the orbit: the table of docs/theory/equivalence.md, 10."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, of
from torch import Tensor, nn

from lightning_sym.networks import Gaussian
from lightning_sym.symmetry import LocalDimension, local_dimension, trace_symmetry


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**2


def residual(activation: Callable[[], nn.Module]) -> nn.Module:
    """A residual stream of 4 units with 5 units inside the branch."""

    def function(s: Any, x: Tensor) -> Tensor:
        x = s.first(s.into(x))
        return s.out(s.third(x + s.back(s.second(s.inner(x)))))

    parts = {"into": of(nn.Linear, 3, 4), "inner": of(nn.Linear, 4, 5), "back": of(nn.Linear, 5, 4)}
    parts |= {"out": of(nn.Linear, 4, 2), "first": activation, "second": activation, "third": activation}
    return Program(function, parts)


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.1)


def deep(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 2))


def shallow(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2))


def measured(
    make: Callable[[], nn.Module],
    edit: Callable[[nn.Module], None] | None = None,
    *,
    seed: int = 4,
    samples: int = 600,
    log_softmax: bool = False,
    training: bool = False,
) -> LocalDimension:
    torch.manual_seed(seed)
    network = make().double()
    inputs = 2 * torch.randn(samples, 3, dtype=torch.float64)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(0.5, 2.0)
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
        if edit is not None:
            edit(network)
    symmetry = trace_symmetry(network, inputs[:4], check=False)
    return local_dimension(symmetry, network, inputs, log_softmax=log_softmax, training=training)


def unexplained(found: LocalDimension) -> bool:
    return not (found.dead or found.always_on or found.duplicated or found.constant)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.GELU, Gaussian])
def test_identifiable(activation: Callable[[], nn.Module]) -> None:
    found = measured(lambda: deep(activation))
    assert (found.parameters, found.nullity, found.orbit_dimension, found.excess) == (46, 0, 0, 0)
    assert found.gap == math.inf


@pytest.mark.parametrize("activation", [leaky, Square])
def test_scalings_are_all_there_is(activation: Callable[[], nn.Module]) -> None:
    found = measured(lambda: deep(activation), seed=0)
    assert (found.nullity, found.orbit_dimension) == (8, 8)
    assert found.gap > 1e8


def test_relu_has_at_least_the_scalings() -> None:
    nullities = [measured(lambda: deep(nn.ReLU), seed=seed) for seed in range(10)]
    assert all(found.excess >= 0 and found.orbit_dimension == 8 for found in nullities)
    assert min(found.nullity for found in nullities) == 8
    # A hidden symmetry with no dead and no always-on unit.
    assert any(found.excess > 0 and unexplained(found) for found in nullities)


def test_residual_stream_has_one_scale_per_channel() -> None:
    found = measured(lambda: residual(leaky), seed=5)
    assert (found.nullity, found.orbit_dimension) == (9, 9)


def test_linear_network() -> None:
    found = measured(lambda: deep(nn.Identity))
    # The product map, 2 x 3 weights and 2 biases, is all that the function shows.
    assert (found.rank, found.nullity, found.orbit_dimension) == (8, 38, 32)


def test_shallow_relu() -> None:
    found = measured(shallow)
    assert (found.nullity, found.orbit_dimension) == (4, 4)
    assert unexplained(found)


def test_dead_unit() -> None:
    found = measured(shallow, lambda net: net[0].bias[0].fill_(-100))
    assert (found.nullity, found.orbit_dimension, found.dead) == (9, 4, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_always_on_units(count: int) -> None:
    found = measured(shallow, lambda net: net[0].bias[:count].fill_(100))
    assert (found.nullity, found.orbit_dimension) == (4 - count + count**2 + count, 4)
    assert found.always_on == count
    assert found.groups == {"0": {"dead": 0, "always_on": count, "constant": 0, "duplicated": 0}}


def copy_first(net: nn.Module) -> None:
    net[0].weight[1] = net[0].weight[0]
    net[0].bias[1] = net[0].bias[0]


def test_equal_incoming_weights() -> None:
    # A pair with n inputs, and k outgoing weights each, independent: of its 2 (n + 1) + 2 k directions those are seen
    # that change the common slope for either of two outgoing vectors, 2 (n + 1), or the value for any of the other
    # k - 2 vectors. So k + 2 are hidden, where two different units hide 2.
    found = measured(lambda: deep(leaky), copy_first, seed=0)
    assert (found.nullity, found.orbit_dimension, found.duplicated) == (12, 8, 1)
    found = measured(shallow, copy_first)
    assert (found.nullity, found.orbit_dimension, found.duplicated) == (6, 4, 1)


@pytest.mark.parametrize(
    ("edit", "nullity", "counts"),
    [
        (lambda net: net[2].weight[:, 0].zero_(), 4, (0, 0)),
        (lambda net: net[0].weight[0].zero_(), 3, (1, 0)),
        (copy_first, 2, (0, 1)),
    ],
    ids=["no outgoing weight", "constant unit", "duplicated unit"],
)
def test_reducible_tanh(edit: Callable[[nn.Module], None], nullity: int, counts: tuple[int, int]) -> None:
    found = measured(lambda: shallow(nn.Tanh), edit)
    assert (found.nullity, found.orbit_dimension) == (nullity, 0)
    assert (found.constant, found.duplicated) == counts


def test_log_softmax() -> None:
    found = measured(shallow, log_softmax=True)
    assert (found.nullity, found.orbit_dimension) == (9, 4)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(training: bool) -> None:
    layers = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))  # noqa: E731
    found = measured(layers, seed=0, samples=100 if training else 600, training=training)
    assert (found.nullity, found.orbit_dimension) == (12, 12)


def test_batch_norm_after_the_activation() -> None:
    layers = lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))  # noqa: E731
    found = measured(layers, seed=0)
    assert found.nullity == 12
    assert found.orbit_dimension <= 12


def test_rank_saturates_with_the_inputs() -> None:
    found = [measured(lambda: deep(nn.ReLU), samples=samples) for samples in (5, 20, 50, 200, 600)]
    nullities = [one.nullity for one in found]
    assert nullities == sorted(nullities, reverse=True)
    assert nullities[0] == 46 - 10
    assert nullities[-2:] == [9, 9]
    assert "the rank has not saturated: 10 equations for 46 parameters" in str(found[0])
    assert found[-1].notes == ()


def test_folding_keeps_the_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(lambda: deep(leaky))
    monkeypatch.setattr("lightning_sym.symmetry.dimension._CHUNK", 8 * 46 * 2 * 7)
    parts = measured(lambda: deep(leaky))
    assert torch.allclose(whole.singular_values, parts.singular_values, rtol=0, atol=1e-12 * whole.singular_values[0])


def test_batch_and_samples_agree() -> None:
    # Without batch norm, training mode changes nothing but the way the Jacobian is made.
    apart = measured(lambda: deep(leaky), samples=60)
    together = measured(lambda: deep(leaky), samples=60, training=True)
    assert torch.allclose(
        apart.singular_values, together.singular_values, rtol=0, atol=1e-12 * apart.singular_values[0]
    )


def test_network_stays_as_it_is() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    inputs = torch.randn(80, 3)
    found = local_dimension(trace_symmetry(network, inputs), network, inputs, training=True)
    assert found.orbit_dimension == 12
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert network.training
    assert found.singular_values.dtype == torch.float64


def test_convolutions() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    inputs = torch.randn(200, 1, 5, 5)
    found = local_dimension(trace_symmetry(network, inputs[:2]), network, inputs)
    assert (found.nullity, found.orbit_dimension) == (3, 3)
    assert "nullity                    3" in str(found)


def test_local_dimension_names_bad_arguments() -> None:
    network, inputs = shallow(), torch.randn(8, 3)
    symmetry = trace_symmetry(network, inputs)
    assert_refused(local_dimension, symmetry, network, inputs, tolerance=0)
    assert_refused(local_dimension, symmetry, network, inputs, max_parameters=0)
    assert_refused(local_dimension, symmetry, network, inputs, max_parameters=20)
    assert_refused(local_dimension, symmetry, network, inputs[:0], says="a batch of at least one sample")
    assert_refused(lambda: local_dimension(symmetry, deep(nn.ReLU), inputs), says="expected shape")
