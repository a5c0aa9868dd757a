"""Uniform orthogonal matrices, polar factors and best scales, in float64."""

import math

import pytest
import torch
from helpers import assert_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym._linear_algebra import best_scales, polar_factor, random_orthogonal, thin_svd

EXACT = 1e-12
DRAWS = 4000
# Five standard errors: at fixed seeds a right sampler never fails, and one without the signs of R is twenty away.
WIDTH = 5 / math.sqrt(DRAWS)
LAW = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_orthogonal_matrices_have_the_moments_of_haar_measure(size):
    """E tr Q = 0, E (tr Q)^2 = 1, every entry with mean 0 and variance 1 / size, det 1 and -1 equally often."""
    source = torch.Generator().manual_seed(size)
    drawn = torch.stack([random_orthogonal(size, source) for _ in range(DRAWS)])
    torch.testing.assert_close(drawn @ drawn.mT, torch.eye(size).double().expand_as(drawn), atol=EXACT, rtol=0)
    # Of tr Q the variance is 1 and, as of a normal number, that of (tr Q)^2 at most 2.
    traces = drawn.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(float(traces.mean())) < WIDTH
    assert abs(float(traces.square().mean()) - 1) < math.sqrt(2) * WIDTH
    assert float(drawn.mean(0).abs().max()) < WIDTH / math.sqrt(size)
    assert float((drawn.square().mean(0) - 1 / size).abs().max()) < math.sqrt(2) * WIDTH / size
    assert abs(float(torch.linalg.det(drawn).mean())) < WIDTH
    # Invariance: the trace after a fixed rotation has the same moments.
    moved = (drawn @ drawn[0]).diagonal(dim1=1, dim2=2).sum(1)[1:]
    assert abs(float(moved.mean())) < WIDTH
    assert abs(float(moved.square().mean()) - 1) < math.sqrt(2) * WIDTH


def test_orthogonal_matrices_come_in_the_dtype_asked_for():
    drawn = random_orthogonal(4, torch.Generator().manual_seed(0), dtype=torch.float32)
    assert drawn.dtype == torch.float32
    torch.testing.assert_close(drawn @ drawn.T, torch.eye(4), atol=1e-6, rtol=0)
    assert_refused(random_orthogonal, 0, says="size of an orthogonal matrix must be at least 1, got 0")


@given(size=st.integers(1, 6), seed=st.integers(0, 2**40))
@LAW
def test_the_polar_factor_is_orthogonal_and_the_best(size, seed):
    source = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=source)
    factor = polar_factor(matrix)
    torch.testing.assert_close(factor @ factor.T, torch.eye(size).double(), atol=EXACT, rtol=0)
    best = float((factor * matrix).sum())
    for _ in range(5):
        assert float((random_orthogonal(size, source) * matrix).sum()) <= best + EXACT
    stretch = factor.T @ matrix.double()  # symmetric and positive: what remains of the matrix
    torch.testing.assert_close(stretch, stretch.T, atol=1e-10, rtol=0)


number = st.floats(-3, 3)


@given(numbers=st.tuples(number, number), q=st.sampled_from([0.0, 0.01, 1.0, 5.0]), s=st.sampled_from([0.0, 0.3, 4.0]))
@LAW
def test_best_scales_are_below_a_grid_and_attain_their_value(numbers, q, s):
    p, r = numbers[0] * math.sqrt(q), numbers[1] * math.sqrt(s)

    def cost(a):
        return -2 * p * a + q * a**2 - 2 * r / a + s / a**2

    value, scale = best_scales(*(torch.tensor([x], dtype=torch.float64) for x in (p, q, r, s)))
    assert float(value) <= float(cost(torch.logspace(-4, 4, 4001, dtype=torch.float64)).min()) + 1e-9
    if 0 < float(scale) < math.inf:
        assert float(value) == pytest.approx(cost(float(scale)), abs=1e-9)
    else:  # the infimum is approached only
        assert float(value) == 0
        assert min(q, s) == 0


def test_singular_values_are_found_where_divide_and_conquer_fails(monkeypatch):
    matrix = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svdvals(matrix)

    def fails(*_, **__):
        raise torch.linalg.LinAlgError("linalg.svd: The algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    left, values, right = thin_svd(matrix)
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close((left * values) @ right, matrix, rtol=0, atol=1e-14)
