"""Curves in weight space: coefficients, derivatives, planes, gradients, statistics of batch norms along them."""

import math

import pytest
import torch
from experiments import SmallCNN
from helpers import assert_refused, randomize_statistics, refused
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_sym.connectivity import (
    Curve,
    CurveNetwork,
    CurveSummary,
    barrier,
    curve_barriers,
    curve_coefficients,
    load_curve,
)
from lightning_sym.landscape import weight_tensors, weight_vector
from lightning_sym.networks import MultiLayerPerceptron, recalibrate_batch_norm

KINDS = ("bezier", "chain")
kinds = pytest.mark.parametrize("kind", KINDS)


def random_curve(kind: str, count: int = 3, size: int = 30, seed: int = 0) -> Curve:
    source = torch.Generator().manual_seed(seed)
    return Curve(torch.randn(count, size, generator=source, dtype=torch.float64), kind)


def perceptron(seed: int, **changes) -> MultiLayerPerceptron:
    return MultiLayerPerceptron(**{"widths": (5,), "image_size": 2, "num_classes": 3, **changes}).fresh(seed).double()


# ---- the curve


@given(st.sampled_from(KINDS), st.integers(2, 6), st.floats(0, 1), st.integers(0, 100))
def test_a_curve_is_a_mean_of_its_control_points(kind, count, t, seed):
    coefficients = curve_coefficients(kind, count, torch.tensor(t, dtype=torch.float64))
    assert (coefficients >= 0).all()
    assert float(coefficients.sum()) == pytest.approx(1, abs=1e-12)
    curve = random_curve(kind, count, seed=seed)
    torch.testing.assert_close(curve(t), coefficients @ curve.points, atol=1e-12, rtol=1e-12)
    assert torch.equal(curve(0), curve.points[0])
    assert torch.equal(curve(1.0), curve.points[-1])


@kinds
def test_ends_are_bitwise_those_given(kind):
    ends = torch.tensor([[-0.0, 0.1, 1e30], [0.3, -0.0, -1e-30]])
    curve = Curve.straight(*ends, 3, kind)
    for place, end in ((0, ends[0]), (1, ends[1])):
        assert torch.equal(curve(place).view(torch.int32), end.view(torch.int32))
    torch.testing.assert_close(curve(torch.tensor([0.25])), torch.lerp(*ends, 0.25)[None])


def test_a_bezier_curve_passes_its_bend_by_and_a_chain_meets_it():
    bezier, chain = (random_curve(kind) for kind in KINDS)
    start, bend, end = bezier.points
    torch.testing.assert_close(bezier(0.5), (start + 2 * bend + end) / 4, atol=1e-14, rtol=0)
    torch.testing.assert_close(chain(0.5), bend, atol=0, rtol=0)
    t = torch.tensor([0.2, 0.7], dtype=torch.float64)
    lines = torch.stack([2 * (0.2 * bend + 0.3 * start), 2 * (0.2 * end + 0.3 * bend)])
    torch.testing.assert_close(chain(t), lines, atol=1e-14, rtol=0)


@kinds
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_derivatives_are_those_of_finite_differences(kind, count):
    curve = random_curve(kind, count)
    t = torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=torch.float64)
    step = 1e-4
    differences = (curve(t + step) - curve(t - step)) / (2 * step)
    exact = kind == "chain" or count <= 3  # of a polynomial of degree two the difference is the derivative
    torch.testing.assert_close(
        curve.tangent(t), differences, rtol=1e-10 if exact else 1e-6, atol=1e-9 if exact else 1e-6
    )
    if kind == "bezier" and exact:
        for half in (0.1, 0.01, 1e-3):  # whatever the step
            ends = curve(t + half) - curve(t - half)
            torch.testing.assert_close(ends, 2 * half * curve.tangent(t), rtol=1e-10, atol=1e-13)
    seconds = (curve(t + step) - 2 * curve(t) + curve(t - step)) / step**2
    torch.testing.assert_close(curve.second_derivative(t), seconds, rtol=1e-5, atol=1e-5)


def test_length_is_that_of_chords():
    chain = random_curve("chain", 5)
    assert chain.length() == pytest.approx(float(torch.linalg.vector_norm(chain.points.diff(dim=0), dim=1).sum()))
    arc = Curve(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]).double())  # x = 1 - t^2, y = 1 - (1 - t)^2
    speed = lambda t: 2 * math.hypot(t, 1 - t)  # noqa: E731
    expected = sum(speed((i + 0.5) / 1000) for i in range(1000)) / 1000
    assert arc.length(1000) == pytest.approx(expected, rel=1e-6)
    assert arc.length() == pytest.approx(expected, rel=1e-3)
    assert arc.length() < expected


def test_summary_weighs_by_places_or_by_length():
    t = torch.tensor([0.0, 0.5, 1.0])
    curve = Curve(torch.tensor([[0.0], [1.0], [4.0]]), "chain")  # the second half is three times as long
    summary = CurveSummary.of(torch.tensor([1.0, 3.0, 5.0]), curve.steps(t))
    assert summary == CurveSummary(start=1.0, end=5.0, lowest=1.0, highest=5.0, mean=3.0, integral=(2 + 3 * 4) / 4)


# ---- the plane


@pytest.mark.parametrize("count", [3, 4, 5])
@kinds
def test_plane_through_the_ends_and_the_bend(kind, count):
    curve = random_curve(kind, count)
    plane = curve.plane()
    torch.testing.assert_close(plane.basis.T @ plane.basis, torch.eye(2).double(), atol=1e-10, rtol=0)
    start, end, bend = plane.coordinates(plane.points)
    torch.testing.assert_close(plane.points[[0, 1]], curve.points[[0, -1]])
    dx = torch.linalg.vector_norm(curve.points[-1] - curve.points[0])
    torch.testing.assert_close(torch.stack([start, end]), torch.stack([torch.zeros(2).double(), dx * torch.eye(2)[0]]))
    assert bend[1] > 0
    t = torch.linspace(0, 1, 9).double()
    if count > 3:
        assert plane.residual(curve(t)).max() > 1
        return
    assert plane.residual(curve(t)).max() < 1e-10
    if kind == "bezier":
        expected = (2 * t * (1 - t))[:, None] * bend + (t**2)[:, None] * end
        torch.testing.assert_close(plane.coordinates(curve(t)), expected, atol=1e-10, rtol=0)


# ---- gradients


def loss_of(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.tensor([0, 1, 2, 0]))


@kinds
@pytest.mark.parametrize("bends", [1, 2, 3])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_gradient_of_a_bend_is_its_coefficient_times_that_of_the_point(kind, bends, decay):
    images = torch.randn(4, 1, 2, 2, dtype=torch.float64)
    network = CurveNetwork(perceptron(0), perceptron(1), bends, decay)
    with torch.no_grad():
        network.bends.add_(torch.randn_like(network.bends))
    coefficients = curve_coefficients(kind, bends + 2, torch.tensor(0.3).double())
    network.coefficients.copy_(coefficients)
    (found,) = torch.autograd.grad(loss_of(network(images)), network.bends)

    control = torch.cat([network.ends[:1], network.bends.detach(), network.ends[1:]]).requires_grad_()
    plain = perceptron(2)

    def value(points: Tensor) -> Tensor:
        tensors = weight_tensors(plain, points)
        return loss_of(functional_call(plain, tensors, (images,))) + decay / 2 * points.square().sum()

    (through,) = torch.autograd.grad(value(coefficients @ control), control)
    point = (coefficients @ control).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(value(point), point)
    torch.testing.assert_close(found, through[1:-1], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found, coefficients[1:-1, None] * gradient, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_a_curve_network_is_the_network_at_the_point(training):
    """Of one with batch norm, which uses the batch, and of tied weights."""
    ends = [randomize_statistics(SmallCNN(norm=True), seed).double() for seed in (0, 1)]
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    network = CurveNetwork(ends[0].eval(), ends[1].eval())
    assert all(module.training for module in network.modules())
    network.train(training)
    network.coefficients.copy_(torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(network(images), ends[1].train()(images), atol=1e-12, rtol=1e-12)
    network.coefficients.copy_(torch.tensor([0.3, 0.6, 0.1]))
    point = Curve(torch.cat([network.ends[:1], network.bends, network.ends[1:]]).detach()).points
    Curve(torch.stack([network.coefficients @ point] * 2)).writer(ends[0])(0)
    torch.testing.assert_close(network(images), ends[0].train()(images), atol=1e-12, rtol=1e-12)
    assert {name for name, parameter in network.named_parameters() if parameter.requires_grad} == {"bends"}
    assert sum(parameter.numel() for parameter in network.parameters()) == network.bends.numel()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_tied_weights_stay_tied_along_a_curve():
    ends, x = [Tied() for _ in range(2)], torch.randn(4, 3)
    network = CurveNetwork(*ends)
    network.coefficients.copy_(torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(network(x), ends[1](x))
    assert network.bends.shape == (1, 9 + 3 + 3)


# ---- evaluation


def batches(count: int = 3, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 1, 8, 8, generator=source).double(), torch.randint(10, (size,), generator=source))
        for _ in range(count)
    ]


def test_a_straight_curve_has_the_barriers_of_the_line():
    a, b = (randomize_statistics(SmallCNN(norm=True), seed).double() for seed in (0, 1))
    data = batches()
    curve = Curve.straight(weight_vector(a), weight_vector(b), 2)
    found = curve_barriers(curve, a, {"train": data, "test": data[:1]}, points=5)
    for split, own in (("train", data), ("test", data[:1])):
        expected = barrier(a, b, own, points=5, recalibration_data=data)
        torch.testing.assert_close(found[split].loss, expected.loss, atol=1e-12, rtol=1e-12)
        assert found[split].loss_barrier == pytest.approx(expected.loss_barrier, abs=1e-12)
        assert found[split].recalibrated


def test_statistics_of_one_batch_and_of_other_splits():
    """With one full batch the batch's mean and unbiased variance; split otherwise the same means."""
    images = torch.randn(24, 3, 4, 4, dtype=torch.float64) * 2 + 1
    norm = nn.BatchNorm2d(3).double()
    recalibrate_batch_norm(norm, [images])
    values = images.transpose(0, 1).flatten(1)
    torch.testing.assert_close(norm.running_mean, values.mean(1), atol=1e-10, rtol=0)
    torch.testing.assert_close(norm.running_var, values.var(1), atol=1e-10, rtol=0)
    for split in (list(images.split(6)), [images[1::2], images[::2]]):
        recalibrate_batch_norm(norm, split)
        torch.testing.assert_close(norm.running_mean, values.mean(1), atol=1e-10, rtol=0)


# ---- files, and what is refused


@kinds
def test_a_saved_curve_comes_back(kind, tmp_path):
    curve = Curve(random_curve(kind, 4).points, kind, {"pair": [0, 1]})
    curve.save(tmp_path / "folder" / "a.safetensors")
    again = load_curve(tmp_path / "folder" / "a.safetensors")
    assert torch.equal(again.points, curve.points)
    assert (again.kind, again.about) == (kind, {"pair": [0, 1]})
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "folder" / "a.safetensors").read_bytes()[:-9])
    assert_refused(load_curve, tmp_path / "b.safetensors", says="holds no curve, or is damaged")
    assert_refused(load_curve, tmp_path / "c.safetensors", says="There is no curve at", error=FileNotFoundError)


class Masked(nn.Module):
    def __init__(self, mask: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((2,), mask))


def half_frozen() -> Masked:
    network = Masked(0)
    network.linear.bias.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    "refusal",
    [
        refused(curve_coefficients, kind="spline", count=3, t=torch.zeros(()), says="spline"),
        refused(curve_coefficients, "chain", count=1, t=torch.zeros(()), says="count must be an integer >= 2"),
        refused(Curve, torch.zeros(1, 3), says="at least two weight vectors"),
        refused(Curve, torch.zeros(2, 3), kind="loop", says="loop"),
        refused(lambda: random_curve("chain")(1.5), says="t must be in [0, 1], got 1.5"),
        refused(lambda: random_curve("chain", 2).plane(), says="no inner control point"),
        refused(lambda: Curve.straight(torch.zeros(3), torch.ones(3), 1).plane(), says="on the linear path"),
        refused(lambda: Curve(torch.tensor([[1.0], [2.0], [1.0]])).plane(), says="have identical weights and span no"),
        refused(lambda: random_curve("chain").writer(nn.Linear(2, 2)), says="one entry for each trainable parameter"),
        refused(lambda: CurveNetwork(perceptron(0), perceptron(0, widths=(6,))), says="The networks differ"),
        refused(lambda: CurveNetwork(Masked(0), Masked(1)), says="differ in 'mask', which is not trained"),
        refused(lambda: CurveNetwork(Masked(0), half_frozen()), says="different trainable parameters"),
        refused(lambda: CurveSummary.of(torch.zeros(3), torch.zeros(3)), says="steps [T - 1]"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(refusal):
    refusal()
