"""Found points up to symmetry (docs/theory/equivalence.md, 6)."""

import itertools
import math

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.landscape.outputs import NetworkOutputs
from lightning_sym.landscape.planes import weight_vector
from lightning_sym.landscape.quotient import OrbitDistances, canonical_vectors, orbit_distances
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.symmetry import trace_symmetry

EXAMPLE = torch.randn(3, 5, 1, 1, generator=torch.Generator().manual_seed(0))
TWO = MultiLayerPerceptron(widths=[2], in_channels=1, image_size=1, num_classes=1, bias=False)
LINE = torch.linspace(-2, 2, 21)[:, None, None, None]
MIXED, SAME_SIGN = (0.8, -0.6, 0.7, 0.5), (0.8, 0.6, 0.7, 0.5)


def perceptron(*widths: int, activation: str = "relu", bias: bool = True) -> nn.Module:
    network = MultiLayerPerceptron(widths, in_channels=5, image_size=1, num_classes=3, activation=activation, bias=bias)
    return network.fresh(1).double()


def members(network: nn.Module, count: int, example: Tensor = EXAMPLE) -> Tensor:
    symmetry = trace_symmetry(network, example.double())
    source = torch.Generator().manual_seed(5)
    return torch.stack([weight_vector(symmetry.act(symmetry.sample(source), network)) for _ in range(count)])


def noise(like: Tensor, norm: float) -> Tensor:
    drawn = torch.randn(like.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    return norm * drawn / drawn.norm(dim=-1, keepdim=True)


def two(vectors: Tensor, target: Tensor) -> OrbitDistances:
    return orbit_distances(TWO, vectors, target, LINE[:2])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "gelu"])
@pytest.mark.few(5)
def test_members_of_the_orbit_of_one_hidden_layer_are_at_distance_0(activation: str, bias: bool) -> None:
    network = perceptron(16, activation=activation, bias=bias)
    target, vectors = weight_vector(network), members(network, 5)
    found = orbit_distances(network, vectors, target, EXAMPLE)
    assert found.kind == "exact"
    assert float(found.plain.min()) > 1
    assert float(found.distances.max()) < 1e-13
    # Noise is seen, but for what of it is along the orbit.
    moved = orbit_distances(network, vectors + noise(vectors, 0.124), target, EXAMPLE).distances
    assert bool(((moved > 0.1) & (moved <= 0.124 + 1e-12)).all())


def least_by_grid(vector: Tensor, target: Tensor, signed: bool) -> float:
    """Return the distance of a (5, 3, 3) network without biases, over all permutations and a fine grid of scales."""
    (w, v), (other_w, other_v) = ((t[:15].reshape(3, 5), t[15:].reshape(3, 3).T) for t in (vector, target))
    factors = torch.tensor([1.0, -1.0]) if signed else torch.linspace(-6, 6, 60_001).double().exp()
    cost = torch.zeros(3, 3, dtype=torch.float64)
    for i, j in itertools.product(range(3), range(3)):
        scaled = (w[i] - factors[:, None] * other_w[j]).square().sum(1)
        cost[i, j] = (scaled + (v[i] - other_v[j] / factors[:, None]).square().sum(1)).min()
    return math.sqrt(min(sum(float(cost[i, p[i]]) for i in range(3)) for p in itertools.permutations(range(3))))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_distance_is_the_least_over_permutations_and_scales_or_signs(activation: str) -> None:
    network = perceptron(3, activation=activation, bias=False)
    source = torch.Generator().manual_seed(2)
    vectors = torch.randn(8, 24, dtype=torch.float64, generator=source)
    # Near 5 theta*, a^4 - 5 a^3 + 5 a - 1 = (a^2 - 1)(a^2 - 5 a + 1) has three positive roots; elsewhere there is one.
    vectors[1:4] = 5 * vectors[0] + 0.1 * vectors[1:4]
    found = orbit_distances(network, vectors[1:], vectors[0], EXAMPLE).distances
    for vector, distance in zip(vectors[1:], found.tolist(), strict=True):
        assert distance == pytest.approx(least_by_grid(vector, vectors[0], activation == "tanh"), rel=1e-6)


def test_infima_that_are_not_attained_are_approached() -> None:
    # v* = 0: w may become small at no cost, so that a unit turned away costs both norms.
    target = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    vectors = torch.tensor([[-2.0, 0.0, 0.5, 0.0], [3.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([4.25, 0.25, 0.0], dtype=torch.float64).sqrt()
    assert torch.allclose(two(vectors, target).distances, expected)
    # w* = 0, in the same way.
    target = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.allclose(two(vectors[:, [2, 3, 0, 1]], target).distances, expected)
    # Both 0: the orbit is a point.
    zero = torch.zeros(4, dtype=torch.float64)
    assert torch.allclose(two(vectors, zero).distances, vectors.norm(dim=1))
    # Scales that become small come as near as one likes, and no nearer.
    factor = torch.logspace(-12, 3, 4000, dtype=torch.float64)
    reached = ((-2 - factor).square() + 0.5**2).min().sqrt()
    assert float(reached) == pytest.approx(4.25**0.5, rel=1e-9)
    assert float(reached) > 4.25**0.5


def test_parameters_outside_of_the_units_count_as_they_are() -> None:
    network = perceptron(4)
    vectors = members(network, 2)
    vectors[1, -1] += 0.5  # the bias of an output
    found = orbit_distances(network, vectors, weight_vector(network), EXAMPLE).distances
    assert torch.allclose(found, torch.tensor([0.0, 0.5]).double(), atol=1e-12)


def test_a_hidden_convolution_is_exact_and_deeper_networks_are_bounded() -> None:
    images = torch.randn(2, 1, 6, 6)
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)).double()
    found = orbit_distances(convolution, members(convolution, 3, images), weight_vector(convolution), images)
    assert found.kind == "exact"
    assert float(found.distances.max()) < 1e-13
    deep = perceptron(8, 6)
    vectors = members(deep, 3)
    found = orbit_distances(deep, vectors, weight_vector(deep), EXAMPLE)
    assert found.kind == "upper bound"
    assert float(found.distances.max()) < 1e-6
    moved = orbit_distances(deep, vectors + noise(vectors, 0.124), weight_vector(deep), EXAMPLE)
    assert bool((moved.distances <= 0.124 + 1e-6).all())
    assert bool((moved.distances <= moved.plain).all())


@pytest.mark.parametrize("widths", [(16,), (8, 6)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.few(4)
def test_representatives_are_those_of_orbits(widths: tuple[int, ...], activation: str) -> None:
    network = perceptron(*widths, activation=activation)
    vectors = members(network, 5)
    canonical = canonical_vectors(network, vectors, EXAMPLE)
    assert float((vectors - vectors[0]).norm(dim=1)[1:].min()) > 1
    assert float((canonical - canonical[0]).abs().max()) < 1e-10
    assert float((canonical_vectors(network, canonical, EXAMPLE) - canonical).abs().max()) < 1e-10
    function = NetworkOutputs(network, EXAMPLE)
    outputs = torch.stack([function(vector) for vector in (*vectors, *canonical)])
    assert float((outputs - outputs[0]).abs().max()) < 1e-12


def test_the_two_unit_representative_is_that_of_the_class() -> None:
    source = torch.Generator().manual_seed(3)
    p = 0.86
    a, b, d = torch.rand(3, 6, generator=source, dtype=torch.float64) + 0.2
    shared = torch.stack([a, b, (p - d * b) / a, d], 1)
    flange = torch.stack([a, -b, p / a, 0 * d], 1)
    swapped = torch.stack([b - 1.5, a, 0 * d, p / a], 1)
    vectors = torch.cat([shared, flange, swapped])
    canonical = canonical_vectors(TWO, vectors, LINE[:2])
    expected = torch.tensor([p**0.5, 0, p**0.5, 0], dtype=torch.float64)
    assert torch.allclose(canonical, expected.expand_as(canonical), rtol=0, atol=1e-12)
    # Without merging only the orbit is left.
    apart = canonical_vectors(TWO, shared, LINE[:2], merge=False)
    assert float((apart - apart[0]).abs().max()) > 0.1
    # Weights of the zero function become 0, whatever they are.
    cancelled = torch.stack([a, b, -d * b / a, d], 1)
    assert float(canonical_vectors(TWO, cancelled, LINE[:2]).abs().max()) == 0.0


class Gated(nn.Module):
    """The units' outgoing weights stand inside of another ReLU, so that units do not add up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 2, bias=False)
        self.gate = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.gate * torch.relu(self.first(x))).sum(1, keepdim=True)


def test_merging_is_refused_where_units_do_not_add_up() -> None:
    vectors = torch.tensor([[1.0, 2.0, 1.0, -1.0]], dtype=torch.float64)
    assert_refused(canonical_vectors, Gated(), vectors, torch.ones(3, 1), says="pass merge=False")
