"""Samples of sets without a grid, neighbour graphs, and J around given weights."""

import math

import pytest
import torch
from helpers import assert_refused
from sampled_sets import neighbour_graph, sample_set
from torch import Tensor

from lightning_sym.landscape.outputs import surfaces
from lightning_sym.landscape.two_unit import balanced_weights
from lightning_sym.networks import MultiLayerPerceptron

TWO = MultiLayerPerceptron(widths=[2], in_channels=1, image_size=1, num_classes=1, bias=False)
LINE = torch.linspace(-2, 2, 21, dtype=torch.float64)[:, None, None, None]


def ring(coefficients: Tensor) -> Tensor:
    """Return J of a circle of radius 1 in the first two coordinates."""
    return (coefficients[:, :2].norm(dim=1) - 1).square() + coefficients[:, 2:].square().sum(1)


def two_balls(coefficients: Tensor) -> Tensor:
    centre = torch.zeros(coefficients.shape[1], dtype=torch.float64)
    centre[0] = 1.0
    return torch.minimum((coefficients - centre).square().sum(1), (coefficients + centre).square().sum(1))


@pytest.mark.parametrize("dimension", [1, 2, 3, 5])
def test_sobol_fractions_are_volumes(dimension: int) -> None:
    found = sample_set(lambda c: c.square().sum(1), dimension=dimension, bound=2.0, epsilon=1.0, samples=2**15, seed=1)
    ball = math.pi ** (dimension / 2) / math.gamma(dimension / 2 + 1)
    assert found.fraction == pytest.approx(ball / 4**dimension, rel=0.03)
    assert found.coefficients.shape == (round(found.fraction * 2**15), dimension)
    assert torch.equal(found.values, found.coefficients.square().sum(1))
    assert float(found.values.max()) < 1.0


def test_points_outside_of_the_set_are_refused() -> None:
    options = {"dimension": 2, "bound": 1.0, "epsilon": 0.1, "samples": 10}
    assert_refused(sample_set, ring, **options, method="walk", says="1 of 1 starts are outside")
    assert_refused(sample_set, ring, **options, method="sobel", says="method must be")
    far = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    assert_refused(neighbour_graph, ring, far, 0.1, says="1 of 2 points have J >= epsilon")


def test_sobol_samples_come_back_and_leave_generators_alone() -> None:
    state = torch.get_rng_state()
    options = {"dimension": 2, "bound": 2.0, "epsilon": 0.1, "samples": 1000}
    one, two, other = (sample_set(ring, seed=seed, **options).coefficients for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_walks_find_what_fills_no_visible_part_of_the_box() -> None:
    start = torch.tensor([[1.0, 0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0, 0]], dtype=torch.float64).repeat(20, 1)
    options = {"dimension": 6, "bound": 2.0, "epsilon": 0.01}
    assert sample_set(ring, samples=4096, **options).fraction < 1e-3
    found = sample_set(ring, samples=40_000, method="walk", start=start, step=0.05, **options)
    assert found.coefficients.shape == (40_000, 6)
    assert torch.equal(found.values, ring(found.coefficients))
    assert float(found.values.max()) < 0.01
    assert 0.1 < found.fraction < 0.9
    # All around the circle.
    angle = torch.atan2(found.coefficients[:, 1], found.coefficients[:, 0])
    assert int((torch.histc(angle, 8, -math.pi, math.pi) > 0).sum()) == 8


def test_the_law_of_a_walk_is_uniform() -> None:
    def half(coefficients: Tensor) -> Tensor:
        return torch.where(coefficients[:, 0] > -0.5, 0.0, 1.0)

    start = torch.rand(500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = sample_set(
        half, dimension=1, bound=1.0, epsilon=0.5, samples=100_000, method="walk", start=start, step=0.4, seed=2
    )
    late = found.coefficients[50_000:]
    assert float(late.mean()) == pytest.approx(0.25, abs=0.02)
    assert float(late.std()) == pytest.approx(1.5 / 12**0.5, rel=0.03)


def test_a_graph_joins_along_the_set_only() -> None:
    balls = sample_set(two_balls, dimension=3, bound=2.0, epsilon=0.25, samples=4096)
    graph = neighbour_graph(two_balls, balls.coefficients, 0.25)
    assert graph.components == 2
    assert torch.equal(
        graph.labels == graph.labels[0], balls.coefficients[:, 0].sign() == balls.coefficients[0, 0].sign()
    )
    # Balls that touch widely are one piece, and a ring is.
    wide = sample_set(two_balls, dimension=3, bound=2.0, epsilon=1.5, samples=1024)
    assert neighbour_graph(two_balls, wide.coefficients, 1.5).components == 1
    circle = sample_set(ring, dimension=2, bound=2.0, epsilon=0.01, samples=4096)
    assert neighbour_graph(ring, circle.coefficients, 0.01).components == 1


def test_edges_that_leave_the_set_are_refused() -> None:
    def wall(coefficients: Tensor) -> Tensor:
        return (coefficients[:, 0].abs() < 0.05).double()

    points = torch.tensor([[-0.1, 0.0], [0.1, 0.0], [0.2, 0.0], [-0.3, 0.0]], dtype=torch.float64)
    graph = neighbour_graph(wall, points, 0.5, neighbours=3)
    assert graph.edges.tolist() == [[0, 3], [1, 2]]
    assert torch.allclose(graph.lengths, torch.tensor([0.2, 0.1]).double())
    assert graph.labels.tolist() == [0, 1, 1, 0]
    assert (graph.components, graph.tested) == (2, 6)
    # One check in the middle does not see a wall beside it.
    aside = torch.tensor([[-0.1, 0.0], [0.5, 0.0]], dtype=torch.float64)
    assert neighbour_graph(wall, aside, 0.5, checks=1).components == 1
    assert neighbour_graph(wall, aside, 0.5, checks=5).components == 2


@pytest.mark.parametrize("count", [1, 2])
def test_graphs_of_few_points(count: int) -> None:
    points = torch.zeros(count, 2, dtype=torch.float64)  # equal points are neighbours
    graph = neighbour_graph(lambda c: c.square().sum(1), points, 1.0)
    assert graph.components == 1
    assert graph.edges.tolist() == [[0, 1]] * (count - 1)


def test_a_surface_is_around_the_weights_that_are_given() -> None:
    # The slopes are 0.2 apart: J = M- (q - q*)^2.
    weights, others = balanced_weights(torch.tensor([[0.5, 0.3], [0.5, 0.1]]))
    found = surfaces(TWO, LINE)(others).at(weights[None])
    torch.testing.assert_close(found, LINE.clamp(max=0).square().mean()[None] * 0.04, rtol=1e-6, atol=0)
