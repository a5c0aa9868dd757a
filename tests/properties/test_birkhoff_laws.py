"""Ways into the Birkhoff polytope and out of it."""

import itertools
import math
import warnings

import pytest
import torch
from helpers import assert_refused, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.stitching import nearest_permutation, project_to_birkhoff, sinkhorn, soft_sort

LAW = settings(max_examples=30, deadline=None, derandomize=True)
EXACT = 1e-12  # rounding of sums of a few numbers in float64

sizes = st.integers(1, 7)
seeds = st.integers(0, 2**40)


def gaussian(size, seed, scale=1.0):
    return scale * torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def permutation_matrix(p):
    return torch.eye(len(p), dtype=torch.float64)[p]


def doubly_stochastic(size, seed):
    """A mixture of five random permutations."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(5, generator=generator, dtype=torch.float64)
    matrices = [permutation_matrix(torch.randperm(size, generator=generator)) for _ in shares]
    return sum(s * m for s, m in zip(shares / shares.sum(), matrices, strict=True))


def naive_sinkhorn(matrix, iterations):
    """As in the paper: whole matrices are divided, zero sums by 1."""
    matrix = matrix.relu()
    for _ in range(iterations):
        for axis in (1, 0):
            sums = matrix.sum(axis, keepdim=True)
            matrix = matrix / torch.where(sums == 0, 1.0, sums)
    return matrix


# ---- Sinkhorn


@LAW
@given(st.integers(2, 7), seeds, st.floats(1e-3, 10.0))
def test_a_step_along_the_regulariser_is_undone_by_sinkhorn_but_not_by_the_euclidean_projection(size, seed, step):
    start = doubly_stochastic(size, seed).requires_grad_()
    (-torch.linalg.matrix_norm(start)).backward()
    stepped = (start - step * start.grad).detach()
    torch.testing.assert_close(sinkhorn(stepped), start.detach(), rtol=0, atol=1e-9)
    before, after = (float(torch.linalg.matrix_norm(m)) for m in (start.detach(), project_to_birkhoff(stepped)))
    # Away from the barycentre, where the gradient is the same in all entries, it comes nearer to a permutation.
    centred = float(torch.linalg.matrix_norm(start.detach() - 1 / size))
    assert after > before or centred < 1e-6 or before > math.sqrt(size) - 1e-6


@LAW
@given(sizes, seeds)
def test_sinkhorn_gives_stochastic_columns_whatever_the_matrix(size, seed):
    result = sinkhorn(gaussian(size, seed))
    assert (result >= 0).all()
    torch.testing.assert_close(result.sum(0), torch.ones(size, dtype=torch.float64), rtol=0, atol=EXACT)


@LAW
@given(sizes, seeds)
def test_sinkhorn_is_that_of_the_paper_where_entries_are_positive(size, seed):
    matrix = gaussian(size, seed).abs() + 0.01
    torch.testing.assert_close(sinkhorn(matrix, 5), naive_sinkhorn(matrix, 5), rtol=1e-10, atol=1e-10)


@LAW
@given(sizes, seeds)
def test_sinkhorn_after_a_small_step_lands_in_the_polytope(size, seed):
    inside = sinkhorn(gaussian(size, seed).abs() + 0.1, 500)
    result = sinkhorn(inside + gaussian(size, seed + 1, 0.02 / size))
    ones = torch.ones(size, dtype=torch.float64)
    torch.testing.assert_close(result.sum(1), ones, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.sum(0), ones, rtol=0, atol=EXACT)
    assert 1 - 1e-6 <= result.norm() <= math.sqrt(size) + 1e-6


@LAW
@given(sizes, seeds)
def test_doubly_stochastic_matrices_stay(size, seed):
    matrix = doubly_stochastic(size, seed)
    torch.testing.assert_close(sinkhorn(matrix), matrix, rtol=0, atol=1e-10)
    torch.testing.assert_close(project_to_birkhoff(matrix), matrix, rtol=0, atol=1e-10)
    assert 1 - EXACT <= matrix.norm() <= math.sqrt(size) + EXACT
    is_permutation = bool((matrix.max(1).values > 1 - EXACT).all())
    assert (matrix.norm() > math.sqrt(size) - EXACT) == is_permutation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_zeroed_row_or_column_comes_back(dtype, axis):
    matrix = doubly_stochastic(5, 3) * 0.5 + 0.1
    matrix.select(axis, 2).fill_(-1)
    plain = naive_sinkhorn(matrix, 16)
    if axis == 0:
        torch.testing.assert_close(plain.sum(1), torch.tensor([1.25, 1.25, 0, 1.25, 1.25], dtype=torch.float64))
    result = sinkhorn(matrix.to(dtype))
    assert result.dtype == dtype
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for k in (0, 1):
        torch.testing.assert_close(result.sum(k), torch.ones(5, dtype=dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("function", [sinkhorn, project_to_birkhoff])
def test_all_zero_becomes_the_centre(function):
    torch.testing.assert_close(function(torch.zeros(4, 4)), torch.full((4, 4), 0.25))


def test_sinkhorn_is_differentiable_and_not_cast_by_autocast():
    matrix = (gaussian(3, 0).abs() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: sinkhorn(m, 4), [matrix])
    single = matrix.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = sinkhorn(single, 50)
    torch.testing.assert_close(inside, sinkhorn(single, 50), rtol=0, atol=0)


# ---- the Euclidean projection


@LAW
@given(sizes, seeds, st.sampled_from([0.1, 1.0, 10.0]))
def test_the_euclidean_projection_is_nearest(size, seed, scale):
    matrix = gaussian(size, seed, scale)
    point = project_to_birkhoff(matrix, 1e-9, 200_000)
    ones = torch.ones(size, dtype=torch.float64)
    assert (point >= 0).all()
    for k in (0, 1):
        torch.testing.assert_close(point.sum(k), ones, rtol=0, atol=1e-9)
    # The variational inequality <M - X, Y - X> <= 0 for all Y in the polytope; the worst Y is a permutation, and
    # linear assignment finds it.
    worst = permutation_matrix(nearest_permutation(matrix - point))
    assert ((matrix - point) * (worst - point)).sum() <= 1e-7 * max(1.0, scale) * size
    again = project_to_birkhoff(point, 1e-9)
    torch.testing.assert_close(again, point, rtol=0, atol=1e-8)
    assert 1 - 1e-8 <= point.norm() <= math.sqrt(size) + 1e-8


def test_it_warns_when_it_has_not_arrived():
    matrix = gaussian(6, 1)
    with pytest.warns(UserWarning, match="after 8 iterations with a residual of"):
        project_to_birkhoff(matrix, max_iterations=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = project_to_birkhoff(matrix.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), project_to_birkhoff(matrix, 1e-10, 200_000), rtol=0, atol=1e-6)


# ---- rounding


@LAW
@given(st.integers(1, 5), seeds)
def test_rounding_is_nearest_by_brute_force(size, seed):
    matrix = gaussian(size, seed)
    found = nearest_permutation(matrix)
    assert found.dtype == torch.int64
    distances = [(permutation_matrix(list(p)) - matrix).norm() for p in itertools.permutations(range(size))]
    assert abs((permutation_matrix(found) - matrix).norm() - min(distances)) < EXACT


# ---- SoftSort


@LAW
@given(sizes, seeds)
def test_soft_sort_rows_are_distributions_whose_modes_sort(size, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(size, generator=generator, dtype=torch.float64)
    soft = soft_sort(scores, 1 / size)
    torch.testing.assert_close(soft.sum(1), torch.ones(size, dtype=torch.float64), rtol=0, atol=EXACT)
    assert torch.equal(soft.argmax(1), scores.argsort(descending=True))
    shuffle = torch.randperm(size, generator=generator)
    torch.testing.assert_close(soft_sort(scores[shuffle], 1 / size), soft[:, shuffle], rtol=0, atol=EXACT)
    sharp = soft_sort(scores, 1e-9)
    torch.testing.assert_close(sharp @ scores, scores.sort(descending=True).values, rtol=0, atol=1e-7)


def test_soft_sort_has_gradients():
    scores = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q: soft_sort(q, 0.3), [scores])


# ---- errors


@pytest.mark.parametrize("function", [sinkhorn, project_to_birkhoff, nearest_permutation])
def test_what_is_no_square_floating_matrix_is_refused(function):
    assert_refused(function, torch.ones(2, 3), says="must be square, shape [C, C] with C >= 1, got shape [2, 3]")
    assert_refused(function, torch.ones(0, 0), says="must be square")
    assert_refused(function, torch.ones(2, 2, dtype=torch.int64), says="must be floating, got", error=TypeError)
    says = "not finite; look for a diverged"
    assert_refused(function, torch.tensor([[1.0, math.nan], [0.0, 1.0]]), says=says)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(sinkhorn, torch.eye(2), iterations=0),
        refused(project_to_birkhoff, torch.eye(2), tolerance=0),
        refused(project_to_birkhoff, torch.eye(2), max_iterations=0),
        refused(soft_sort, torch.ones(2), tau=0),
        refused(soft_sort, torch.eye(2), 1.0, says="vector of shape [C]"),
        refused(soft_sort, torch.tensor([1.0, math.inf]), 1.0, says="scores has entries that are not finite"),
        refused(soft_sort, torch.arange(2), 1.0, says="scores must be a floating tensor, got", error=TypeError),
    ],
)
def test_birkhoff_functions_name_bad_settings(refusal):
    refusal()
