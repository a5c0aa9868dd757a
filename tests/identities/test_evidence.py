"""The evidence against exact results and other ways to it (docs/theory/curvature.md, 3)."""

import math

import pytest
import torch
from curvature_references import GRID, data, perturbed, relaxed_network
from torch import nn

from lightning_sym.curvature import Evidence, PrecisionOptimizer, factors, parameter_groups
from lightning_sym.layers import FactoredFullyConnected


def evidence_of(network, x, y, likelihood, granularity="per_tensor", **settings):
    groups = parameter_groups(network, granularity)
    found = factors(network, [(x, y)], likelihood, **settings)
    return Evidence.of(network, found, groups)


def exact_log_evidence(features, targets, prior_variance, sigma):
    """Return the log density of Gaussian targets ``[M]`` that are linear in weights, ``[M, P]``."""
    covariance = features @ (prior_variance[:, None] * features.T) + sigma**2 * torch.eye(len(targets)).double()
    zero = torch.zeros_like(targets)
    return torch.distributions.MultivariateNormal(zero, covariance).log_prob(targets).item()


def set_to_map(features, targets, delta, sigma):
    precision = features.T @ features / sigma**2 + torch.diag(delta)
    return torch.linalg.solve(precision, features.T @ targets / sigma**2)


@pytest.mark.parametrize("log_noise", [0.0, -0.7])
def test_linear_regression_has_its_exact_evidence(log_noise):
    x, y = data(9, (4,), 3, "regression")
    network = nn.Linear(4, 3, bias=False).double()
    sigma, delta = math.exp(log_noise), 0.37
    features = torch.einsum("ni,kl->nkli", x, torch.eye(3).double()).reshape(27, 12)
    weights = set_to_map(features, y.flatten(), torch.full((12,), delta).double(), sigma)
    network.weight.data = weights.view(3, 4)
    expected = exact_log_evidence(features, y.flatten(), torch.full((12,), 1 / delta).double(), sigma)
    found = evidence_of(network, x, y, "regression")
    assert found.log_marginal_likelihood(torch.tensor([math.log(delta)]), log_noise) == pytest.approx(
        expected, rel=1e-8
    )


@pytest.mark.parametrize("log_noise", [0.0, 0.4])
def test_a_factored_layer_that_is_linear_has_its_exact_evidence(log_noise):
    torch.manual_seed(0)
    layer = FactoredFullyConnected(1, 2, GRID, (1, 2)).double()
    for name in ("theta2", "b1", "b2"):
        getattr(layer, name).requires_grad_(False)
    network = nn.Sequential(layer, nn.Flatten())
    x, y = data(7, (1, *GRID), 4, "regression")
    sigma, delta = math.exp(log_noise), 1.9
    second = layer.theta2[:, 0].T  # [S', C']
    # Output (c', y) of theta1[c', x]: theta2[y, c'] x[x].
    features = torch.einsum("yo,op,ns->noyps", second, torch.eye(2).double(), x.flatten(1)).reshape(28, 48)
    weights = set_to_map(features, y.flatten(), torch.full((48,), delta).double(), sigma)
    layer.theta1.data = weights.view(2, 1, 24)
    expected = exact_log_evidence(features, y.flatten(), torch.full((48,), 1 / delta).double(), sigma)
    found = evidence_of(network, x, y, "regression", ffc="per_channel")
    assert found.groups.names == ("0.theta1",)
    value = found.log_marginal_likelihood(torch.tensor([math.log(delta)]), log_noise)
    # A block of B (x) A with C = 1: exact only if B does not depend on n, as here.
    assert value == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_terms_are_those_of_dense_matrices(likelihood):
    network = relaxed_network()
    x, y = data(6, (2, *GRID), 3, likelihood)
    blocks = factors(network, [(x, y)], likelihood).blocks
    found = evidence_of(network, x, y, likelihood)
    point = torch.linspace(-1, 1, len(blocks), dtype=torch.float64)
    noise = -0.2 if likelihood == "regression" else 0.0
    h = math.exp(-2 * noise)
    numbers = found.effective_parameters(point, noise, per_tensor=True)
    determinant = 0.0
    for (name, block), log_precision in zip(blocks.items(), point, strict=True):
        delta, eye = log_precision.exp(), torch.eye(block.size, dtype=torch.float64)
        posterior = h * block.dense() + delta * eye
        determinant += 0.5 * (torch.linalg.slogdet(posterior).logabsdet - block.size * log_precision)
        inverse = torch.linalg.inv(posterior)
        gamma = numbers[name].raw
        assert gamma == pytest.approx((block.size - delta * inverse.trace()).item(), abs=1e-8)
        assert gamma == pytest.approx((h * block.dense() @ inverse).trace().item(), abs=1e-8)
        assert numbers[name].precision == pytest.approx(delta.item(), rel=1e-12)
        assert numbers[name].normalised == pytest.approx(gamma / block.size, rel=1e-12)
    terms = found.terms(point, noise)
    assert terms.log_determinant == pytest.approx(determinant.item(), rel=1e-9)
    parameters = dict(network.named_parameters())
    squares = sum(0.5 * d.exp() * parameters[n].square().sum() for d, n in zip(point, blocks, strict=True))
    assert terms.scatter == pytest.approx(squares.item(), rel=1e-12)
    with torch.no_grad():
        outputs = network(x)
    if likelihood == "classification":
        expected = torch.distributions.Categorical(logits=outputs).log_prob(y).sum()
    else:
        expected = torch.distributions.Normal(outputs, math.exp(noise)).log_prob(y).sum()
    assert terms.log_likelihood == pytest.approx(expected.item(), rel=1e-10)
    assert terms.total == found.log_marginal_likelihood(point, noise)


def test_effective_parameters_go_from_the_rank_to_nothing():
    network = relaxed_network()
    x, y = data(3, (2, *GRID), 3, "classification")
    found = evidence_of(network, x, y, "classification")
    curvature = factors(network, [(x, y)])
    count = len(curvature.blocks)
    small = found.effective_parameters(torch.full((count,), -60.0), per_tensor=True)
    large = found.effective_parameters(torch.full((count,), 60.0), per_tensor=True)
    for name, spectrum in curvature.eigenvalues().items():
        e = spectrum.products()
        e = e[e > 1e-13 * e.max()]
        # Eigenvalues that are rounding are far above such a small precision; they are left out.
        assert small[name].raw >= len(e) - 1e-8
        assert large[name].raw < 1e-8
    rank = torch.linalg.matrix_rank(curvature.blocks["5.weight"].dense(), rtol=1e-12).item()
    medium = found.effective_parameters(torch.full((count,), -25.0), per_tensor=True)["5.weight"].raw
    assert medium == pytest.approx(rank, abs=1e-3)


def test_the_maximum_is_a_fixed_point_and_what_adam_finds():
    network = relaxed_network()
    found = evidence_of(network, *data(30, (2, *GRID), 3, "regression"), "regression", "per_path")
    point = torch.zeros(5, dtype=torch.float64)
    for _ in range(200):
        point = found.fixed_point(point)
    gradient, _ = found.gradients(point)
    assert gradient.abs().max() < 1e-6
    optimizer = PrecisionOptimizer(found.groups.names, lr=0.1)
    optimizer.update(found, 400)
    torch.testing.assert_close(optimizer.log_precisions, point, atol=1e-3, rtol=0)


def test_the_noise_is_learned():
    network = perturbed(nn.Linear(4, 3))
    x, _ = data(200, (4,), 3, "regression")
    with torch.no_grad():
        y = network(x) + 0.05 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = evidence_of(network, x, y, "regression", "per_path")
    optimizer = PrecisionOptimizer(found.groups.names, learn_noise=True)
    before = found.log_marginal_likelihood(optimizer.log_precisions)
    optimizer.update(found, 400)
    assert found.log_marginal_likelihood(optimizer.log_precisions, float(optimizer.log_noise)) > before
    assert optimizer.log_noise.exp().item() == pytest.approx(0.05, rel=0.05)
