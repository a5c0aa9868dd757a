"""Laws of the evidence for any spectrum: the range of effective numbers, gradients, blocks taken apart."""

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.curvature import Evidence, Factors, KroneckerBlock, PriorGroups

LIKELIHOODS = st.sampled_from(["classification", "regression"])
LOGS = st.floats(-8, 8)
SEEDS = st.integers(0, 2**32 - 1)


def positive(*shape, generator):
    """Return random positive semidefinite matrices, of low rank at times, of any scale."""
    rank = int(torch.randint(1, shape[-1] + 1, (), generator=generator))
    root = torch.randn(*shape[:-1], rank, generator=generator, dtype=torch.float64)
    return root @ root.mT * 10 ** (4 * torch.rand((), generator=generator, dtype=torch.float64) - 2)


def made(seed, likelihood, temperature=1.0):
    """Return the evidence of three blocks: a matrix, a factored layer's and a bias."""
    generator = torch.Generator().manual_seed(seed)
    blocks = {
        "a.weight": KroneckerBlock(positive(3, 3, generator=generator), positive(4, 4, generator=generator)),
        "b.theta1": KroneckerBlock(positive(2, 2, generator=generator), positive(3, 5, 5, generator=generator)),
        "b.b1": KroneckerBlock(positive(2, 2, generator=generator)),
    }
    norms = {name: float(10 * torch.rand((), generator=generator)) for name in blocks}
    names = {"a.weight": "a", "b.theta1": "b", "b.b1": "b"}
    groups = PriorGroups(names, names, {"a": "layer", "b": "layer"})
    return Evidence(Factors(blocks, 7, 3, likelihood, 5.0), norms, groups, temperature=temperature)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, likelihood=LIKELIHOODS, a=LOGS, b=LOGS, temperature=st.floats(0.1, 10))
def test_effective_numbers_are_between_nothing_and_all(seed, likelihood, a, b, temperature):
    found = made(seed, likelihood, temperature).effective_parameters(torch.tensor([a, b]))
    for number, size in zip(found.values(), (12, 2 * 15 + 2), strict=True):
        assert number.size == size
        assert 0 <= number.raw <= size
        assert number.normalised == number.raw / size
        assert 0 <= number.relative <= 1
    assert math.isclose(sum(number.relative for number in found.values()), 1, rel_tol=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, likelihood=LIKELIHOODS, a=LOGS, b=LOGS, noise=st.floats(-2, 2), temperature=st.floats(0.3, 3))
def test_gradients_are_differences(seed, likelihood, a, b, noise, temperature):
    evidence = made(seed, likelihood, temperature)
    noise = noise if likelihood == "regression" else 0.0
    point, step = torch.tensor([a, b], dtype=torch.float64), 1e-4
    gradient, of_noise = evidence.gradients(point, noise)
    size = abs(evidence.log_marginal_likelihood(point, noise)) + 1
    for move, derivative in zip(step * torch.eye(2).double(), gradient, strict=True):
        up, down = (evidence.log_marginal_likelihood(p, noise) for p in (point + move, point - move))
        tolerance = 1e-6 * max(1, abs(float(derivative))) + 1e-11 * size / step
        assert math.isclose((up - down) / (2 * step), float(derivative), abs_tol=tolerance)
    if likelihood == "regression":
        up, down = (evidence.log_marginal_likelihood(point, n) for n in (noise + step, noise - step))
        tolerance = 1e-6 * max(1, abs(of_noise)) + 1e-11 * size / step
        assert math.isclose((up - down) / (2 * step), of_noise, abs_tol=tolerance)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, likelihood=LIKELIHOODS, a=LOGS, b=LOGS)
def test_the_log_determinant_is_that_of_the_dense_matrix(seed, likelihood, a, b):
    evidence = made(seed, likelihood)
    expected = 0.0
    for name, block in evidence._factors.blocks.items():
        delta = math.exp(a if name == "a.weight" else b)
        posterior = block.dense() / delta + torch.eye(block.size).double()
        expected += 0.5 * float(torch.linalg.slogdet(posterior).logabsdet)
    found = evidence.terms(torch.tensor([a, b], dtype=torch.float64)).log_determinant
    assert math.isclose(found, expected, rel_tol=1e-8, abs_tol=1e-8)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, likelihood=LIKELIHOODS, a=LOGS, b=LOGS)
def test_eigenvalues_a_few_at_a_time_are_all_of_them(seed, likelihood, a, b):
    found = made(seed, likelihood)
    point = torch.tensor([a, b])
    whole = found.terms(point).log_determinant
    with mock.patch("lightning_sym.curvature.evidence._CHUNK", 3):
        parts = found.terms(point).log_determinant
    assert math.isclose(parts, whole, rel_tol=1e-12)
