"""Curves in weight space: coefficients, derivatives, planes, gradients, statistics of batch norms along them."""

import math

import pytest
import torch
from experiments import SmallCNN
from helpers import assert_refused, randomize_statistics, refused
from torch import Tensor, nn

from lightning_sym.connectivity import (
    Curve,
    CurveNetwork,
    CurveSummary,
    barrier,
    curve_barriers,
    curve_coefficients,
    load_curve,
)
from lightning_sym.landscape import weight_vector
from lightning_sym.networks import MultiLayerPerceptron

KINDS = ("bezier", "chain")
kinds = pytest.mark.parametrize("kind", KINDS)


def random_curve(kind: str, count: int = 3, size: int = 30, seed: int = 0) -> Curve:
    source = torch.Generator().manual_seed(seed)
    return Curve(torch.randn(count, size, generator=source, dtype=torch.float64), kind)


def perceptron(seed: int, **changes) -> MultiLayerPerceptron:
    return MultiLayerPerceptron(**{"widths": (5,), "image_size": 2, "num_classes": 3, **changes}).fresh(seed).double()


# ---- the curve


@kinds
def test_ends_are_bitwise_those_given(kind):
    ends = torch.tensor([[-0.0, 0.1, 1e30], [0.3, -0.0, -1e-30]])
    curve = Curve.straight(*ends, 3, kind)
    for place, end in ((0, ends[0]), (1, ends[1])):
        assert torch.equal(curve(place).view(torch.int32), end.view(torch.int32))
    torch.testing.assert_close(curve(torch.tensor([0.25])), torch.lerp(*ends, 0.25)[None])


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


def test_the_tangent_at_a_bend_is_that_of_the_next_segment():
    for last in range(2, 40):
        points = torch.randn(last + 1, 3, generator=torch.Generator().manual_seed(last), dtype=torch.float64)
        chain = Curve(points, "chain")
        steps = torch.arange(last, dtype=torch.float64)
        for spaced in (steps / last, torch.linspace(0, 1, last + 1, dtype=torch.float64)[:-1]):
            assert torch.equal(chain.tangent(spaced), last * points.diff(dim=0))
        before = 1 / last - 1e-12
        assert torch.equal(chain.tangent(before), last * (points[1] - points[0]))


def test_length_is_that_of_chords():
    chain = random_curve("chain", 5)
    assert chain.length() == pytest.approx(float(torch.linalg.vector_norm(chain.points.diff(dim=0), dim=1).sum()))
    arc = Curve(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]).double())  # x = 1 - t^2, y = 1 - (1 - t)^2
    speed = lambda t: 2 * math.hypot(t, 1 - t)  # noqa: E731
    expected = sum(speed((i + 0.5) / 1000) for i in range(1000)) / 1000
    assert arc.length(1000) == pytest.approx(expected, rel=1e-6)
    assert arc.length() == pytest.approx(expected, rel=1e-3)
    assert arc.length() < expected


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
        refused(curve_coefficients, "chain", 2, torch.arange(2), says="t must be a floating tensor"),
        refused(Curve(torch.zeros(2, 3)).save, "", says="path of the file is empty or a folder"),
        refused(Curve, torch.zeros(1, 3), says="at least two weight vectors"),
        refused(Curve, torch.zeros(2, 3), kind="loop", says="loop"),
        refused(Curve(torch.eye(2), about={"x": torch.ones(2)}).to_bytes, says="about must map names"),
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
