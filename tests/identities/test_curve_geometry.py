"""Hessian, gradient and Jacobians along curves: exact identities, dense references, functions that are the same."""

import copy
import functools
import math

import pytest
import torch
from experiments import SmallCNN
from helpers import assert_refused, randomize_statistics, refused
from sklearn.linear_model import RidgeClassifier
from torch import nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F

from lightning_sym.connectivity import Curve, curve_geometry
from lightning_sym.connectivity.geometry import TOLERANCE
from lightning_sym.curvature import CurvatureOperator, input_jacobians, jacobian_rank
from lightning_sym.landscape import weight_tensors, weight_vector
from lightning_sym.networks import MultiLayerPerceptron, batch_norms, recalibrate_batch_norm
from lightning_sym.symmetry import local_dimension, trace_symmetry


def perceptron(activation: str = "tanh", seed: int = 0) -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=[5], image_size=3, num_classes=3, activation=activation).fresh(seed).double()


def samples(count: int = 40, shape: tuple[int, ...] = (1, 3, 3), classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    x = torch.randn(count, *shape, generator=source, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=source)


def random_curve(network: nn.Module, kind: str = "bezier", count: int = 3, seed: int = 1) -> Curve:
    source = torch.Generator().manual_seed(seed)
    size = len(weight_vector(network))
    return Curve(torch.randn(count, size, generator=source, dtype=torch.float64) / 2, kind)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("kind", ["bezier", "chain"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.few(5, "relu-chain-2")
def test_both_identities_hold_all_along(activation, kind, count):
    network = perceptron(activation)
    shape = curve_geometry(random_curve(network, kind, count), network, samples(), points=5, max_parameters=0)
    for point in shape.points:
        assert point.gradient_identity.holds, point
        assert point.curvature_identity.holds, point
    assert shape.worst_deviation < TOLERANCE


class Wrong(Curve):
    """A curve whose second derivative is another one."""

    def second_derivative(self, t):
        return 2 * super().second_derivative(t)


def test_an_identity_that_does_not_hold_is_said(monkeypatch):
    network = perceptron()
    monkeypatch.setattr("lightning_sym.connectivity.geometry.Curve", Wrong)
    shape = curve_geometry(random_curve(network), network, samples(), points=2, max_parameters=0)
    assert all(point.gradient_identity.holds and not point.curvature_identity.holds for point in shape.points)
    assert shape.worst_deviation > 1e-2


def test_what_is_measured_is_that_of_the_dense_hessian():
    network, (x, y) = perceptron(), samples()
    curve = random_curve(network)
    shape = curve_geometry(curve, network, (x, y), points=3, eigenvalues=2)
    estimated = curve_geometry(
        curve, network, (x, y), points=3, eigenvalues=2, tolerance=1e-6, probes=200, density_steps=20, max_parameters=0
    )

    def loss_at(point):
        return F.cross_entropy(functional_call(network, weight_tensors(network, point), (x,)), y)

    chord = curve.points[-1] - curve.points[0]
    away = curve.points[1] - curve.points[0]
    detour = away - (away @ chord) / (chord @ chord) * chord
    for point, other in zip(shape.points, estimated.points, strict=True):
        at = curve(point.t)
        matrix, gradient = hessian(loss_at)(at), jacrev(loss_at)(at)
        assert point.loss == pytest.approx(float(loss_at(at)), rel=1e-12)
        assert point.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-10)
        values = torch.linalg.eigvalsh(matrix)
        assert point.spectrum.eigenvalues == pytest.approx(values.flip(0)[:2].tolist(), rel=1e-9)
        assert point.spectrum.trace == pytest.approx(float(matrix.trace()), rel=1e-9)
        assert point.spectrum.near_zero.size == len(at)
        assert other.spectrum.eigenvalues == pytest.approx(point.spectrum.eigenvalues, rel=1e-5)
        assert abs(other.spectrum.trace - point.spectrum.trace) < 4 * other.spectrum.trace_error
        assert other.spectrum.density.size == len(at)
        for name, direction in {"straight": chord, "detour": detour, "tangent": curve.tangent(point.t)}.items():
            unit = direction / direction.norm()
            expected = float((matrix @ unit).norm()), float(unit @ matrix @ unit)
            assert point.directions[name] == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert [point.t for point in shape.points] == [0, 0.5, 1]


def test_a_straight_line_has_no_detour():
    network = perceptron()
    line = Curve.straight(*random_curve(network, count=2).points, bends=1)
    shape = curve_geometry(line, network, samples(), points=2, max_parameters=0)
    assert all(set(point.directions) == {"straight", "tangent", "random"} for point in shape.points)


def test_batch_norms_are_measured_anew_at_every_point_and_the_identities_hold():
    network = randomize_statistics(SmallCNN(norm=True), 0).double()
    x, y = samples(30, (1, 8, 8), 10)
    curve = random_curve(network)
    before = copy.deepcopy(network.state_dict())
    shape = curve_geometry(curve, network, [(x[:20], y[:20]), (x[20:], y[20:])], points=3, max_parameters=0)
    assert shape.recalibrated
    assert shape.worst_deviation < TOLERANCE
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    for point in shape.points:
        curve.writer(network)(point.t)
        recalibrate_batch_norm(network, [x], exact=True)
        _, loss = CurvatureOperator(network, (x, y), F.cross_entropy).gradient_and_loss()
        assert point.loss == pytest.approx(loss, rel=1e-12)
    assert batch_norms(network)


# ---- Jacobians


@pytest.mark.parametrize(("activation", "nullity"), [("relu", 5), ("leaky_relu", 5), ("tanh", 0), ("gelu", 0)])
@pytest.mark.few(2)
def test_nullity_of_the_jacobian_is_that_of_the_symmetry(activation, nullity):
    network, (x, _) = perceptron(activation), samples(400)
    symmetry = trace_symmetry(network, x[:2])
    found = jacobian_rank(network, x)
    assert found.nullity == nullity == symmetry.dimension == local_dimension(symmetry, network, x).nullity
    assert found.above > 1e-4 > 1e-7 > found.below
    wide = jacobian_rank(network, x[:4])  # fewer equations than parameters: the other Gram matrix
    assert (wide.rank, wide.equations) == (local_dimension(symmetry, network, x[:4]).rank, 12)
    assert "grows with more" in wide.note


def test_a_jacobian_that_is_too_large_has_no_rank_and_says_why():
    found = jacobian_rank(perceptron(), samples(400)[0], max_bytes=1000)
    assert found.rank is None
    assert found.nullity is None
    assert "raise max_bytes" in found.note


@pytest.mark.parametrize("spoilt", ["weights", "inputs"])
def test_a_jacobian_that_is_not_finite_has_no_rank(spoilt):
    network, (x, _) = perceptron(), samples(20)
    with torch.no_grad():
        (next(network.parameters()) if spoilt == "weights" else x).view(-1)[0] = math.nan
    assert_refused(jacobian_rank, network, x, says="The Jacobian is not finite; check weights and inputs")


def test_a_rank_of_nothing_or_below_rounding_is_refused():
    network, (x, _) = perceptron(), samples(20)
    assert_refused(jacobian_rank, network, x[:0], says="inputs must be a batch of at least one sample")
    assert_refused(jacobian_rank, network, x, tolerance=1e-9, says="tolerance must be a number in [3e-8, 1), got 1e-09")


def test_cosines_are_at_most_one():
    network, data = perceptron("tanh"), samples(20)
    start = weight_vector(network)
    for seed in range(8):
        points = torch.randn(3, len(start), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        cosine = curve_geometry(Curve(points), network, data, points=2).cosine
        assert float(cosine.abs().max()) <= 1
        torch.testing.assert_close(cosine.diagonal(), torch.ones(2, dtype=torch.float64))


def test_frozen_parameters_are_no_columns():
    network, (x, _) = perceptron(), samples(400)
    first = next(network.parameters()).requires_grad_(False)
    found = jacobian_rank(network, x)
    assert found.parameters == sum(p.numel() for p in network.parameters()) - first.numel() == found.rank


def test_input_jacobians_are_those_of_autograd():
    network, (x, _) = SmallCNN(norm=True).double(), samples(3, (1, 8, 8), 10)
    randomize_statistics(network, 0)
    expected = torch.stack([jacrev(lambda one: network.eval()(one[None])[0])(one) for one in x]).flatten(2)
    torch.testing.assert_close(input_jacobians(network.train(), x), expected, atol=1e-12, rtol=1e-10)
    assert network.training


def with_labels(labels, **changes):
    network, (x, y) = perceptron(), samples()
    return curve_geometry(random_curve(network), network, (x, y), **{"inputs": x, "labels": labels, **changes})


def test_probes_are_ridge_regressions_that_are_tested_on_other_samples():
    network, (x, y) = perceptron(), samples(30)
    curve = random_curve(network)
    found = curve_geometry(curve, network, (x, y), inputs=x, labels=y, points=2, max_parameters=0).probe
    assert torch.equal(curve_geometry(curve, network, (x, y), points=2, max_parameters=0).probe, found)
    features = []
    for place in (0, 1):
        curve.writer(network)(place)
        features.append(input_jacobians(network, x).flatten(1).numpy())
    expected = torch.zeros(2, 2).double()
    for train, test in ((range(0, 30, 2), range(1, 30, 2)), (range(1, 30, 2), range(0, 30, 2))):
        for row, own in enumerate(features):
            centred = own[train] - own[train].mean(0)
            probe = RidgeClassifier(0.01 * float((centred**2).sum(1).mean())).fit(own[train], y[train].numpy())
            for column, other in enumerate(features):
                expected[row, column] += (probe.predict(other[test]) == y[test].numpy()).sum() / 30
    torch.testing.assert_close(found, expected)
    regression = curve_geometry(
        curve, network, (x, network(x).detach()), F.mse_loss, points=2, max_parameters=0, probes=2
    )
    assert regression.probe.isnan().all()
    few = curve_geometry(curve, network, (x, y), inputs=x[:3], labels=y[:3], points=2, max_parameters=0)
    assert few.probe.isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        refused(
            functools.partial(input_jacobians, nn.Linear(1, 1)), torch.zeros(2, 1, dtype=torch.int64), says="floating"
        ),
        refused(functools.partial(jacobian_rank, nn.Linear(1, 1), torch.zeros(2, 1)), tolerance=0.0),
        refused(functools.partial(jacobian_rank, nn.Linear(1, 1), torch.zeros(2, 1)), max_bytes=0),
        *(refused(functools.partial(curve_geometry, Curve(torch.zeros(3, 2)), nn.Linear(1, 1), []),
            **bad) for bad in ({"points": 1}, {"probes": 1}, {"eigenvalues": 0}, {"tolerance": 1.0},
            {"density_steps": -1})),
        refused(with_labels, torch.zeros(40),
            says="the classes of the 40 inputs, integers of shape [40], got torch.float32"),
        refused(with_labels, torch.zeros(3, dtype=torch.int64), says="got torch.int64 [3]"),
        refused(with_labels, torch.zeros(40, dtype=torch.int64), inputs=None, says="pass both, or neither"),
    ],
)  # fmt: skip
def test_refused_arguments(change):
    change()


@pytest.mark.parametrize("kind", ["rescaled", "permuted"])
def test_ends_that_are_the_same_function(kind):
    """Jacobians by the input and their rank by the weights agree; the Hessian's spectrum only if nothing is scaled."""
    network, (x, y) = perceptron("relu"), samples(400)
    symmetry = trace_symmetry(network, x[:2])
    element = symmetry.sample(torch.Generator().manual_seed(0), scale=0.5 if kind == "rescaled" else 0.0)
    twin = symmetry.act(element, network)
    torch.testing.assert_close(twin(x), network(x), atol=1e-10, rtol=1e-10)
    curve = Curve.straight(weight_vector(network), weight_vector(twin), 1)
    classes = network(x).argmax(1)
    shape = curve_geometry(curve, network, (x, y), inputs=x, labels=classes, points=3, eigenvalues=3, symmetry=symmetry)
    first, _, last = shape.points
    torch.testing.assert_close(input_jacobians(network, x), input_jacobians(twin, x), atol=1e-10, rtol=1e-10)
    assert float(shape.cosine[0, 2]) == pytest.approx(1, abs=1e-10)
    assert float(shape.cka[0, 2]) == pytest.approx(1, abs=1e-10)
    assert float(shape.cosine[0, 1]) < 0.999
    assert shape.probe[0, 0] == shape.probe[0, 2] == shape.probe[2, 0] == shape.probe[2, 2] > 0.6
    assert shape.probe[0, 1] != shape.probe[0, 0]
    assert first.jacobian.rank == last.jacobian.rank == first.jacobian.parameters - shape.orbit_dimension
    assert last.loss == pytest.approx(first.loss, rel=1e-10)
    same = last.spectrum.eigenvalues == pytest.approx(first.spectrum.eigenvalues, rel=1e-10)
    assert same == (kind == "permuted")
