"""Starts from moments are optimal in their family: against batch solutions, brute force and planted maps."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from helpers import assert_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.stitching import (
    AssignmentMap,
    FeatureMoments,
    FullMap,
    GroupMap,
    LassoMap,
    LeastSquaresMap,
    LowRankMap,
    OrthogonalMap,
    Port,
    ProcrustesMap,
    SoftSortMap,
)
from lightning_sym.symmetry import INTERTWINER_GROUPS

LAW = settings(max_examples=20, deadline=None, derandomize=True)
PLANTED = 1e-10  # of solutions by normal equations, for features of condition number below 100
SAMPLES = 60


def features(channels, seed, rectified=True, samples=SAMPLES):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, channels, generator=generator, dtype=torch.float64)
    return x.relu() if rectified else x


def moments_of(x, y):
    moments = FeatureMoments(x.shape[1], y.shape[1])
    moments.update(x, y)
    return moments


def started(family, port, x, y, **options):
    """Return the map in float64, started from the moments."""
    stitch = family(port, **options).double()
    stitch.init_from_moments(moments_of(x, y))
    return stitch


def error(matrix, x, y):
    return float((y - x @ matrix.T).square().sum())


# ---- least squares


@pytest.mark.parametrize("family", [FullMap, LassoMap, LeastSquaresMap])
@LAW
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_least_squares_is_that_of_lapack(family, width_in, width_out, seed):
    x, y = features(width_in, seed), features(width_out, seed + 1)
    expected = torch.linalg.lstsq(x, y).solution.T
    with torch.no_grad():
        found = started(family, Port(width_in, width_out), x, y).matrix()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_dead_dependent_and_quiet_channels():
    x, y = features(5, 0), features(3, 1)
    x[:, 1] = 0
    x[:, 3] = 2 * x[:, 0]
    x[:, 4] *= 1e-9  # its square is below the rounding of the others'
    found = started(LeastSquaresMap, Port(5, 3), x, y).matrix()
    assert found.isfinite().all()
    assert (found[:, 1] == 0).all()
    best = torch.linalg.lstsq(x[:, [0, 2, 4]] * torch.tensor([1, 1, 1e9], dtype=torch.float64), y).solution
    reached = x[:, [0, 2, 4]] * torch.tensor([1, 1, 1e9], dtype=torch.float64) @ best
    torch.testing.assert_close(x @ found.T, reached, rtol=0, atol=1e-8)


# ---- low rank


@LAW
@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 2), st.integers(0, 10**6))
def test_low_rank_reaches_the_optimum(width_in, width_out, rank, seed):
    x, y = features(width_in, seed), features(width_out, seed + 1)
    stitch = started(LowRankMap, Port(width_in, width_out), x, y, rank=rank)
    fitted = x @ torch.linalg.lstsq(x, y).solution
    # Eckart and Young: what is lost of the fitted values is their smaller singular values.
    lost = torch.linalg.svdvals(fitted)[rank:].square().sum()
    optimum = (y - fitted).square().sum() + lost
    matrix = stitch.matrix().detach()
    assert abs(error(matrix, x, y) - float(optimum)) < 1e-8 * float(y.square().sum())
    assert torch.linalg.matrix_rank(matrix) <= rank


# ---- assignment

GROUPS = {
    "permutations": INTERTWINER_GROUPS["gelu"],
    "scales": INTERTWINER_GROUPS["relu"],
    "signs": INTERTWINER_GROUPS["tanh"],
    "scales and signs": INTERTWINER_GROUPS["dropout"],
}


def best_scale(group, x, y):
    """Return the scale by which one channel fits another best, by one-dimensional reasoning."""
    if group == "permutations":
        return 1.0
    if group == "signs":
        return min((1.0, -1.0), key=lambda s: float((y - s * x).square().sum()))
    slope = float(x @ y / (x @ x))
    return max(slope, 0.0) if group == "scales" else slope


def brute_force(group, x, y):
    """Return the least error among all permutations, each with its best scales."""
    channels = x.shape[1]
    single = [[0.0] * channels for _ in range(channels)]
    for i, j in itertools.product(range(channels), repeat=2):
        scale = best_scale(group, x[:, j], y[:, i])
        single[i][j] = float((y[:, i] - scale * x[:, j]).square().sum())
    return min(sum(single[i][j] for i, j in enumerate(p)) for p in itertools.permutations(range(channels)))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("family", [AssignmentMap, GroupMap])
@LAW
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_assignment_is_the_best_of_all_elements(family, group, channels, seed):
    rectified = "signs" not in group
    x, y = features(channels, seed, rectified, 9), features(channels, seed + 1, rectified, 9)
    stitch = started(family, Port(channels, channels, group=GROUPS[group]), x, y)
    stitch.mode = "hard"
    expected = brute_force(group, x, y)
    assert abs(error(stitch.matrix().detach(), x, y) - expected) < 1e-9 * max(1.0, expected)


def test_negative_products_are_never_matched_by_positive_scales():
    x, y = features(4, 0, rectified=False), -features(4, 0, rectified=False)
    stitch = started(AssignmentMap, Port(4, 4, group=INTERTWINER_GROUPS["relu"]), x, y)
    assert (stitch.scale >= 0).all()
    assert error(stitch.matrix(), x, y) <= float(y.square().sum())
    assert error(stitch.matrix(), x, y) == pytest.approx(brute_force("scales", x, y))


@pytest.mark.parametrize("group", ["scales", "signs", "scales and signs"])
def test_a_dead_input_gets_the_scale_one(group):
    x, y = features(4, 0), features(4, 1)
    x[:, 2] = 0
    stitch = started(AssignmentMap, Port(4, 4, group=GROUPS[group]), x, y)
    assert stitch.scale[2] == 1
    assert stitch.matrix().isfinite().all()


# ---- planted


def planted(group, channels, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randperm(channels, generator=generator)
    d = torch.ones(channels, dtype=torch.float64)
    if "scales" in group:
        d = d * (torch.randn(channels, generator=generator, dtype=torch.float64) * 0.5).exp()
    if "signs" in group:
        d = d * (2.0 * torch.randint(2, (channels,), generator=generator) - 1)
    return torch.eye(channels, dtype=torch.float64)[p] * d


PLANTED_IN = [
    *itertools.product([AssignmentMap, GroupMap, LeastSquaresMap, FullMap, LassoMap], GROUPS),
    *itertools.product([SoftSortMap], ["permutations", "scales"]),
]


@pytest.mark.parametrize(("family", "group"), PLANTED_IN)
@pytest.mark.parametrize("channels", [1, 2, 12])
def test_a_planted_element_is_recovered(family, group, channels):
    matrix = planted(group, channels, 5)
    x = features(channels, 1, rectified="signs" not in group, samples=400)
    stitch = started(family, Port(channels, channels, group=GROUPS[group]), x, x @ matrix.T)
    for mode in ("hard",) if family is SoftSortMap else ("soft", "hard"):
        stitch.mode = mode
        torch.testing.assert_close(stitch.matrix().detach(), matrix, rtol=0, atol=PLANTED)
        torch.testing.assert_close(stitch(x).detach(), x @ matrix.T, rtol=0, atol=PLANTED)
    if family is not FullMap and family is not LeastSquaresMap:
        assert stitch.sparsity() == pytest.approx(1 - 1 / channels)


def test_soft_sort_can_hold_a_scale_that_is_best_at_zero():
    x = features(3, 0, rectified=False)
    stitch = started(SoftSortMap, Port(3, 3, group=INTERTWINER_GROUPS["relu"]), x, -x.abs() - 1)
    assert stitch.log_scale.isfinite().all()


@pytest.mark.parametrize("family", [AssignmentMap, GroupMap])
def test_scales_in_place_where_nothing_may_be_permuted(family):
    x = features(4, 0, rectified=False)
    d = torch.tensor([2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
    port = Port(4, 4, group=replace(INTERTWINER_GROUPS["relu"], permutations=False))
    noisy = started(family, port, x, x.flip(1) * 0.1 + x * d).matrix()
    assert torch.equal(noisy, noisy.diag().diag())
    torch.testing.assert_close(started(family, port, x, x * d).matrix().diag().detach(), d, rtol=0, atol=PLANTED)


# ---- orthogonal


@pytest.mark.parametrize("family", [OrthogonalMap, ProcrustesMap])
@LAW
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_procrustes_is_best_and_orthogonal(family, channels, seed):
    x, y = features(channels, seed), features(channels, seed + 1)
    matrix = started(family, Port(channels, channels), x, y).matrix().detach()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(channels, dtype=torch.float64), rtol=0, atol=1e-12)
    # sum |y - Q x|^2 = |x|^2 + |y|^2 - 2 tr(Q' yx), at most with the nuclear norm
    optimum = x.square().sum() + y.square().sum() - 2 * torch.linalg.svdvals(y.T @ x).sum()
    assert abs(error(matrix, x, y) - float(optimum)) < 1e-9 * float(x.square().sum() + y.square().sum())


# ---- moments


@LAW
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 10**6))
def test_moments_do_not_depend_on_batches(chunks, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(chunks)
    x = torch.randn(total, 3, 2, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(total, 4, 2, 2, generator=generator, dtype=torch.float64)
    moments = FeatureMoments(3, 4)
    for a, b in zip(x.split(chunks), y.split(chunks), strict=True):
        moments.update(a, b)
    rows_x, rows_y = (t.movedim(1, -1).flatten(0, 2) for t in (x, y))
    expected = [rows_x.T @ rows_x, rows_y.T @ rows_x, (rows_y.T @ rows_y).diagonal()]
    torch.testing.assert_close([moments.xx, moments.yx, moments.yy], expected, rtol=0, atol=1e-10)
    assert moments.count == 4 * total
    tokens = FeatureMoments(3, 4)
    tokens.update(x.movedim(1, -1), y.movedim(1, -1), axis=-1)
    torch.testing.assert_close(tokens.xx, moments.xx, rtol=0, atol=1e-10)


def test_reduce_sums_over_ranks_once(monkeypatch):
    moments = moments_of(features(3, 0), features(2, 1))
    names = ("xx", "yx", "yy", "count")
    alone = {name: copy.deepcopy(getattr(moments, name)) for name in names}
    calls = []
    # A second rank with the same batch.
    monkeypatch.setattr("lightning_sym._distributed.ranks", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: calls.append(1) or flat.mul_(2))
    moments.reduce()
    moments.reduce()
    assert len(calls) == 1
    for name in names:
        assert torch.equal(torch.as_tensor(getattr(moments, name)), torch.as_tensor(2 * alone[name]))
    assert_refused(lambda: moments.update(features(3, 0), features(2, 1)), says="after reduce", error=RuntimeError)


def test_half_precision_features_are_summed_in_double_under_autocast():
    x = torch.full((300, 1), 300.0, dtype=torch.float16)
    moments = FeatureMoments(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        moments.update(x, x)
    assert moments.xx.item() == 300.0**3


def test_moments_refuse_what_does_not_fit():
    moments = FeatureMoments(3, 2)
    x, y = features(3, 0), features(2, 1)
    assert_refused(moments.update, y, y, says="x must have 3 channels along axis 1, got shape [60, 2]")
    assert_refused(moments.update, x[:5], y, says="equal shapes except for the channels")
    assert_refused(moments.update, x, y, axis=2)
    assert_refused(lambda: moments.update(x, y.long()), says="y must be a floating tensor, got", error=TypeError)
    y[3, 1] = float("inf")
    assert_refused(moments.update, x, y, says="y has values that are not finite in channel 1")
    assert moments.count == 0
    assert (moments.xx == 0).all()
    assert_refused(FeatureMoments, 3, 0, says="out_channels must be an integer >= 1, got 0")


def test_maps_refuse_moments_of_elsewhere():
    stitch = FullMap(Port(3, 2))
    assert_refused(lambda: stitch.init_from_moments(FeatureMoments(2, 3)), says="FullMap maps 3 to 2 channels, got")
    assert_refused(lambda: stitch.init_from_moments(FeatureMoments(3, 2)), says="moments are empty")
