"""Samples of sets without a grid, neighbour graphs, stacks of classes and the dimension of cuts."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_sym.landscape.grids import Grid
from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.landscape.sampling import neighbour_graph, sample_set
from lightning_sym.landscape.stacks import class_stack, cut_dimension, surfaces, two_unit_targets
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


def test_wrong_arguments_say_so() -> None:
    options = {"dimension": 2, "bound": 1.0, "epsilon": 0.1, "samples": 10}
    for wrong in ({"dimension": 0}, {"bound": 0.0}, {"epsilon": 0.0}, {"samples": 0}):
        with pytest.raises(ValueError, match="dimension and samples must be >= 1"):
            sample_set(ring, **{**options, **wrong})
    with pytest.raises(ValueError, match="Unknown method 'sobel'"):
        sample_set(ring, method="sobel", **options)
    with pytest.raises(ValueError, match="at most 21201"):
        sample_set(ring, **{**options, "dimension": 30_000})
    with pytest.raises(ValueError, match="1 of 1 starts are outside"):
        sample_set(ring, method="walk", **options)
    with pytest.raises(ValueError, match="start must have shape"):
        sample_set(ring, method="walk", start=torch.zeros(3), **options)
    points = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    with pytest.raises(ValueError, match="1 of 2 points have J >= epsilon"):
        neighbour_graph(ring, points, 0.1)
    with pytest.raises(ValueError, match="coefficients must have shape"):
        neighbour_graph(ring, points[0], 0.1)
    with pytest.raises(ValueError, match="neighbours and checks"):
        neighbour_graph(ring, points, 0.1, checks=0)


def test_cut_dimensions() -> None:
    # docs/theory/equivalence.md, 5.6: two-unit net, mixed and same sign, planes of dimension 2, 3, 4.
    assert [cut_dimension(4, 2, m) for m in (2, 3, 4)] == [0, 1, 2]
    assert [cut_dimension(4, 3, m) for m in (2, 3, 4)] == [1, 2, 3]
    assert cut_dimension(1000, 100, 3) == -897
    for wrong in ((4, 5, 2), (4, 2, 5), (4, -1, 2)):
        with pytest.raises(ValueError, match=r"must be in 0 \.\. 4"):
            cut_dimension(*wrong)


def test_targets_have_their_slopes() -> None:
    targets = two_unit_targets((0.5, -0.2), (-0.5, 0.3), 11)
    a, b, c, d = targets.T
    p, q = c * a.relu() + d * b.relu(), c * (-a).relu() + d * (-b).relu()
    assert torch.allclose(p, torch.linspace(0.5, -0.5, 11).double(), atol=1e-7)
    assert torch.allclose(q, torch.linspace(-0.2, 0.3, 11).double(), atol=1e-7)
    assert torch.allclose(
        two_unit_targets((0.3, 0.1), (1.0, 1.0), 1)[0, :2].abs(), torch.tensor([0.3, 0.1]).double().sqrt()
    )
    with pytest.raises(ValueError, match="count"):
        two_unit_targets((0.0, 0.0), (1.0, 1.0), 0)


def test_a_stack_has_a_slice_for_each_target(tmp_path: Path) -> None:
    targets = two_unit_targets((0.5, 0.3), (0.5, 0.0), 3)
    points = torch.stack([targets[0], *(targets[0] + 0.1 * torch.eye(4, dtype=torch.float64)[:2])])
    plane, grid = WeightPlane.through(points), Grid(dimension=2, points=9, bound=0.5)
    make, seen = surfaces(TWO, LINE), []
    stack = class_stack(
        make, targets, plane, grid, partial=tmp_path / "stack", progress=lambda *counts: seen.append(counts)
    )
    assert stack.shape == (3, 9, 9)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    # The origin of the plane is the first target, from which the others are q apart: J = M- (q - q*)^2.
    moment = float(LINE[LINE < 0].square().sum()) / 21
    assert torch.allclose(stack[:, 4, 4], moment * torch.tensor([0.0, 0.15, 0.3]).double().square(), atol=1e-14)
    coefficients = grid.coefficients(0, 81)
    assert torch.allclose(stack[1].flatten(), make(targets[1]).at(plane.weights(coefficients)), rtol=1e-9, atol=1e-14)
    with pytest.raises(ValueError, match="targets must have shape"):
        class_stack(make, targets[0], plane, grid)


def test_samples_of_a_plane_of_a_network() -> None:
    targets = two_unit_targets((0.5, 0.3), (0.5, 0.3), 1)
    points = torch.stack([targets[0], *(targets[0] + torch.eye(4, dtype=torch.float64)[:3])])
    evaluate = partial(surfaces(TWO, LINE)(targets[0]).on, WeightPlane.through(points))
    found = sample_set(evaluate, dimension=3, bound=0.5, epsilon=1e-3, samples=2**13)
    graph = neighbour_graph(evaluate, found.coefficients, 1e-3)
    assert len(found.coefficients) > 30
    assert int(torch.bincount(graph.labels).max()) > 0.8 * len(found.coefficients)
