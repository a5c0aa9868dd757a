"""A prior on inverse length scales: curvature, evidence and what it does (docs/theory/curvature.md, 2.4)."""

import math

import pytest
import torch
from curvature_references import GRID, data, dense_blocks, perturbed, relative_error
from helpers import assert_refused
from torch import nn

from lightning_sym.curvature import Evidence, GaussianPrior, PrecisionOptimizer, factors, parameter_groups
from lightning_sym.layers import PolyphasePool, ResidualPathways, SparseConv, SparseFactoredFullyConnected
from lightning_sym.layers.sparse import interpolation, interpolation_slope


def network(scales=True):
    """Return a network of both sparse layers on parallel paths and in a row, in float64, away from its start."""
    torch.manual_seed(0)
    conv = nn.Sequential(SparseConv(2, 3, learn_lengthscale=scales), PolyphasePool())
    dense = SparseFactoredFullyConnected(2, 3, GRID, (2, 3), learn_lengthscale=scales, learn_positions=scales)
    rest = SparseConv(3, 2, learn_lengthscale=scales, learn_positions=scales)
    both = ResidualPathways({"fc": dense, "conv": conv})
    return perturbed(nn.Sequential(both, nn.Tanh(), rest, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)))


SCALES = {"0.fc.omega1", "0.fc.omega2", "0.conv.0.omega", "2.omega"}


@pytest.mark.parametrize("omega", [0.0, 0.4, -1.3])
def test_the_slope_of_the_interpolation_is_its_derivative(omega):
    positions = torch.tensor([[0.3, -0.2], [-0.9, 0.5], [1.1, 1.0]], dtype=torch.float64)
    at = torch.tensor([omega], dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda w: interpolation(positions, (3, 4), w), at)[..., 0]
    torch.testing.assert_close(interpolation_slope(positions, (3, 4), at), expected, rtol=1e-11, atol=1e-11)
    assert bool((expected == 0).all()) == (omega == 0)


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_blocks_of_length_scales_are_exact_and_the_others_stay(likelihood, engine):
    net, (x, y) = network(), data(6, (2, *GRID), 3, likelihood)
    batches = list(zip(x.split(2), y.split(2), strict=True))
    found = factors(net, batches, likelihood, engine=engine, lengthscales=True)
    plain = factors(net, batches, likelihood, engine=engine)
    expected = dense_blocks(net, x, likelihood)
    assert set(found.blocks) - set(plain.blocks) == SCALES
    assert found.left_out == ("0.fc.positions1", "0.fc.positions2", "2.positions")
    for name in SCALES:
        assert relative_error(found.blocks[name].dense(), expected[name]) < 1e-10
    for name, block in plain.blocks.items():
        assert torch.equal(block.dense(), found.blocks[name].dense())


def test_length_scales_have_groups_of_their_own():
    groups = parameter_groups(network(), lengthscales=True)
    assert {groups.precisions[name] for name in SCALES} == {"0.omega.fc", "0.omega.conv", "2.omega"}
    assert groups.layers["0.omega.fc"] == groups.layers["0.omega.conv"] == "0.omega"
    plain = parameter_groups(network()).precisions
    assert {name: group for name, group in groups.precisions.items() if name not in SCALES} == plain
    assert set(parameter_groups(network(), "per_tensor", lengthscales=True).names) == SCALES | set(plain)
    assert_refused(parameter_groups, network(scales=False), lengthscales=True, says="learn_lengthscale=True")
    assert_refused(GaussianPrior, network(), on="anchors", says="prior_on")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_gradient_of_the_evidence_is_that_of_differences(likelihood):
    net, (x, y) = network(), data(6, (2, *GRID), 3, likelihood)
    groups = parameter_groups(net, lengthscales=True)
    evidence = Evidence.of(net, factors(net, [(x, y)], likelihood, lengthscales=True), groups)
    point, step = torch.linspace(-1, 1, len(groups.names), dtype=torch.float64), 1e-4
    gradient, _ = evidence.gradients(point)
    for at, unit in enumerate(torch.eye(len(point), dtype=torch.float64)):
        up, down = (evidence.log_marginal_likelihood(point + sign * step * unit) for sign in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(float(gradient[at]), rel=1e-6, abs=1e-8)


# ---- a toy: one anchor in the middle of a filter, whose value is constant, seen through an impulse


def filter_of(omega, value=1.7):
    """Return the network that gives the filter at its outputs, an impulse, and the squared distances of its points."""
    layer = SparseConv(1, 1, anchors=1, learn_lengthscale=True).double()
    layer.positions.zero_()
    layer.u.data.fill_(value)
    layer.omega.data.fill_(omega)
    layer.u.requires_grad_(False), layer.bias.requires_grad_(False)
    impulse = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    impulse[..., 1, 1] = 1
    return nn.Sequential(layer, nn.Flatten()), impulse, torch.tensor([2, 1, 2, 1, 0, 1, 2, 1, 2]).double()


@pytest.mark.parametrize("omega", [1.0, 0.3, 1e-4])
@pytest.mark.few(3)
def test_the_best_precision_of_a_vanishing_length_scale_is_finite(omega):
    net, impulse, square = filter_of(omega)
    height = 1.7 * (1 + 1e-6) / (1 + 1e-6 + 1e-4)
    curvature = float((height * omega * square * torch.exp(-(omega**2) * square / 2)).square().sum())
    found = factors(net, [(impulse, torch.zeros(1, 9).double())], "regression", lengthscales=True)
    assert found.blocks["0.omega"].dense().item() == pytest.approx(curvature, rel=1e-10)
    best = (-curvature + math.sqrt(curvature**2 + 4 * curvature / omega**2)) / 2
    evidence = Evidence.of(net, found, parameter_groups(net, lengthscales=True))
    optimizer = PrecisionOptimizer(["0.omega"])
    for lr in (0.1, 0.01, 1e-3, 1e-4):
        optimizer.update(evidence, 400, lr)
    assert math.exp(optimizer.log_precisions.item()) == pytest.approx(best, rel=1e-4)
    assert best <= math.sqrt(20) * height  # the norm of |t|^2 height
    assert omega > 1e-3 or best == pytest.approx(math.sqrt(20) * height, rel=1e-6)


@pytest.mark.parametrize("pull", [0.9, 1.1])
def test_a_length_scale_leaves_zero_where_the_data_pull_by_more_than_a_standard_deviation(pull):
    net, impulse, square = filter_of(0.0)
    direction = square * net(impulse).detach()[0]
    delta = float(direction.norm())  # the evidence's precision as omega goes to 0, above
    targets = net(impulse).detach() - pull * direction / delta  # off by so much, along it; unit noise

    def loss(omega):
        outputs = torch.func.functional_call(net, {"0.omega": omega}, (impulse,))
        return (outputs - targets).square().sum() / 2 + delta * omega.square().sum() / 2

    at = torch.zeros(1, dtype=torch.float64)
    assert torch.autograd.functional.jacobian(loss, at).item() == 0  # a point of rest
    second = torch.autograd.functional.hessian(loss, at).item()
    assert second == pytest.approx(delta * (1 - pull), rel=1e-8)
