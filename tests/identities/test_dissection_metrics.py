"""Bases on geodesics, exact quantiles, overlaps with concepts, statistics of units: against their formulas."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_refused, refused
from scipy.linalg import expm, logm
from scipy.stats import kurtosis
from sklearn.metrics import jaccard_score

from lightning_sym.dissection import (
    ConceptOverlap,
    Geodesic,
    TopQuantile,
    UnitStatistics,
    detectors,
    in_bases,
    random_permutation_matrix,
    random_rotation,
)

ROUNDING = {"rtol": 0, "atol": 1e-13}
ALPHAS = (0.1, 0.5, 0.9, -0.3, 1.7)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rotation(kind, size):
    """A rotation, plain or with what real Schur forms have to be careful about."""
    if kind == "random":
        return random_rotation(size, generator(size))
    if kind == "permutation":
        return random_permutation_matrix(size, generator(size))
    if kind == "identity":
        return torch.eye(size, dtype=torch.float64)
    # Eigenvalues -1, in number even, seen in a random basis
    basis = random_rotation(size, generator(size))
    values = torch.ones(size, dtype=torch.float64)
    values[: 2 * (size // 2)] = -1
    return basis @ values.diag() @ basis.T


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64, 257])
@pytest.mark.parametrize("kind", ["random", "permutation", "identity", "half turns"])
def test_geodesic_is_a_path_of_rotations_from_the_identity_to_its_end(kind, size):
    end = rotation(kind, size)
    path, identity = Geodesic(end), torch.eye(size, dtype=torch.float64)
    assert torch.equal(path.at(0), identity)
    assert torch.equal(path.at(1), end)
    for alpha in ALPHAS:
        point = path.at(alpha)
        torch.testing.assert_close(point @ point.T, identity, **ROUNDING)
        assert torch.linalg.det(point) > 0
    # A path of half turns is one of several, but its half is still a square root.
    torch.testing.assert_close(path.at(0.5) @ path.at(0.5), end, **ROUNDING)
    torch.testing.assert_close(path.at(0.25) @ path.at(0.75), end, **ROUNDING)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_geodesic_is_the_exponential_of_a_part_of_the_principal_logarithm(size):
    end = random_rotation(size, generator(size))
    logarithm = logm(end.numpy())
    for alpha in ALPHAS[:3]:
        point = Geodesic(end).at(alpha)
        np.testing.assert_allclose(point.numpy(), expm(alpha * logarithm), rtol=0, atol=1e-12)
        # How far it is, on the way to which it is in proportion
        length = np.linalg.norm(logm(point.numpy()))
        assert math.isclose(length, alpha * Geodesic(end).length, rel_tol=1e-10)
        assert math.isclose(length, alpha * np.linalg.norm(logarithm), rel_tol=1e-10)


def test_half_turns_are_paired():
    path = Geodesic(-torch.eye(4))
    assert path.angles.tolist() == [math.pi, math.pi]
    assert Geodesic(torch.diag(torch.tensor([-1.0, 1.0, -1.0]))).angles.tolist() == [math.pi]


@pytest.mark.parametrize(
    "refusal",
    [
        refused(Geodesic, torch.diag(torch.tensor([1.0, -1.0])), says=["determinant 1", "-1", "flip"]),
        refused(Geodesic, 2 * torch.eye(2), says="orthogonal"),
        refused(Geodesic, torch.full((2, 2), math.nan), says="orthogonal"),
        refused(Geodesic, torch.ones(2, 3), says="square"),
        refused(Geodesic(torch.eye(2)).at, math.inf, says=["alpha", "inf"]),
        refused(random_rotation, 0, says="at least 1"),
        refused(random_permutation_matrix, 0, says="channels"),
        refused(in_bases, torch.ones(2, 3), torch.ones(1, 2, 2), says="[B, 3, 3]"),
    ],
)
def test_geodesic_refuses_what_is_no_rotation(refusal):
    refusal()


def test_random_rotations_are_uniform_and_permutations_even():
    rotations = torch.stack([random_rotation(3, generator(seed)) for seed in range(4000)])
    assert (torch.linalg.det(rotations) > 0).all()
    # Of the Haar measure: mean 0, mean square 1 / C, trace with mean square 1; 6 standard errors at most
    assert rotations.mean(0).abs().max() < 6 / math.sqrt(3 * 4000)
    assert (rotations.square().mean(0) - 1 / 3).abs().max() < 6 * 0.3 / math.sqrt(4000)
    traces = rotations.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(traces.square().mean() - 1) < 0.15
    found = {tuple(random_permutation_matrix(3, generator(seed)).argmax(1).tolist()) for seed in range(60)}
    assert found == {(0, 1, 2), (1, 2, 0), (2, 0, 1)}
    assert torch.equal(random_permutation_matrix(1), torch.ones(1, 1, dtype=torch.float64))


def test_features_in_bases_are_matrix_times_channels():
    features = torch.randn(4, 3, 2, 5, generator=generator(), dtype=torch.float64)
    bases = torch.stack([random_rotation(3, generator(seed)) for seed in range(2)])
    expected = torch.einsum("bij,njhw->nbihw", bases, features).flatten(1, 2)
    torch.testing.assert_close(in_bases(features, bases), expected, **ROUNDING)


def chunks(count, seed):
    """Yield slices of random sizes, empty ones among them, that cover ``count`` images."""
    sizes = torch.randint(0, 9, (count,), generator=generator(seed)).tolist()
    begin = 0
    while begin < count:
        size = sizes.pop()
        yield slice(begin, min(begin + size, count))
        begin += size


@pytest.mark.parametrize("top", [0.005, 0.05, 0.29, 0.75])
@pytest.mark.parametrize("ties", [False, True])
def test_top_quantile_is_the_sorted_one_whatever_the_batches(top, ties):
    maps = torch.randn(67, 3, 3, 5, generator=generator(1)).float()
    if ties:
        maps = maps.relu().mul(2).round()
    values = maps.movedim(1, 0).flatten(1).double()
    count = values.shape[1]
    expected = values.sort(1, descending=True).values[:, math.floor(top * count)]
    for seed, announced in ((0, count), (1, 3 * count)):
        metric = TopQuantile(3, positions=announced, top=top)
        for part in chunks(67, seed):
            metric.update(maps[part])
        assert torch.equal(metric.compute(), expected)
    assert torch.equal(torch.quantile(values, 1 - top, dim=1, interpolation="higher"), expected)
    assert ((values > expected[:, None]).double().mean(1) <= top).all()


def test_top_quantile_keeps_to_its_bounds():
    assert_refused(TopQuantile, units=0, positions=1, says="units")
    assert_refused(TopQuantile, units=1, positions=1, top=1.0, says=["top", "1.0"])
    metric = TopQuantile(2, positions=4)
    with pytest.warns(UserWarning, match="before the ``update``"):  # of torchmetrics
        assert_refused(metric.compute, says="call update first")
    assert_refused(metric.update, torch.ones(1, 3), says=["[N, 2, ...]", "[1, 3]"])
    assert_refused(metric.update, torch.full((1, 2), math.nan), says="finite")
    assert_refused(metric.update, torch.ones(5, 2), says=["5 values", "4 were announced"])
    exact = TopQuantile(1, positions=100, top=0.29)  # 0.29 * 100 is 28.999999999999996
    exact.update(torch.arange(100.0)[:, None])
    assert exact.compute() == 70


def concept_case(count=23, units=4, concepts=3):
    maps = torch.randn(count, units, 3, 4, generator=generator(2))
    masks = torch.rand(count, concepts, 7, 8, generator=generator(3)) < 0.3
    annotated = torch.rand(count, concepts, generator=generator(4)) < 0.7
    return maps, masks, annotated, torch.tensor([0.0, 0.5, 1.0, 9.0])


@pytest.mark.parametrize("everywhere", [True, False])
def test_concept_overlap_is_the_jaccard_score_of_annotated_images(everywhere):
    maps, masks, annotated, thresholds = concept_case()
    metric = ConceptOverlap(thresholds, concepts=3)
    for part in chunks(len(maps), 5):
        metric.update(maps[part], masks[part], None if everywhere else annotated[part])
    overlaps = metric.compute()
    large = torch.nn.functional.interpolate(maps, size=(7, 8), mode="bilinear", align_corners=False)
    active = large > thresholds[:, None, None]
    for unit in range(4):
        for concept in range(3):
            images = torch.ones(len(maps), dtype=torch.bool) if everywhere else annotated[:, concept]
            pair = masks[images, concept].flatten().numpy(), active[images, unit].flatten().numpy()
            assert math.isclose(overlaps[unit, concept], jaccard_score(*pair, zero_division=0), rel_tol=1e-14)


def test_concept_overlap_of_blocks_is_that_of_all(monkeypatch):
    maps, masks, annotated, thresholds = concept_case()
    whole, blocks = (ConceptOverlap(thresholds, concepts=3) for _ in range(2))
    whole.update(maps, masks, annotated)
    monkeypatch.setattr("lightning_sym.dissection.overlaps._BLOCK", 500)
    blocks.update(maps, masks, annotated)
    assert torch.equal(whole.compute(), blocks.compute())


def test_concept_overlap_counts_only_what_is_above_the_threshold():
    maps = torch.zeros(1, 1, 2, 2)
    maps[0, 0, 0, 0] = 1.0
    masks = torch.zeros(1, 2, 2, 2, dtype=torch.bool)
    masks[0, 0, 0, 0] = True
    metric = ConceptOverlap(torch.zeros(1), concepts=2)  # a unit so sparse that its threshold is 0
    metric.update(maps, masks)
    assert metric.compute().tolist() == [[1.0, 0.0]]
    nothing = ConceptOverlap(torch.ones(1), concepts=2)  # and a concept that is nowhere
    nothing.update(maps, torch.zeros_like(masks))
    assert nothing.compute().tolist() == [[0.0, 0.0]]


def test_concept_overlap_refuses_what_does_not_fit():
    maps, masks, annotated, thresholds = concept_case()
    metric = ConceptOverlap(thresholds, concepts=3)
    assert_refused(ConceptOverlap, torch.tensor([math.nan]), 1, says="finite")
    assert_refused(ConceptOverlap, thresholds, concepts=0, says="concepts")
    assert_refused(metric.update, maps[:, :2], masks, says="[N, 4, h, w]")
    assert_refused(metric.update, maps, masks.float(), says="bool")
    assert_refused(metric.update, maps, masks, annotated[:2], says="annotated")


def test_what_is_not_finite_has_no_overlap():
    metric, masks = ConceptOverlap(torch.zeros(2), 1), torch.ones(1, 1, 2, 2, dtype=torch.bool)
    maps = torch.tensor([1.0, math.nan]).view(1, 2, 1, 1)
    assert_refused(metric.update, maps, masks, says="maps must be finite")
    for bad in (math.nan, -0.1, 1.1):
        assert_refused(detectors, torch.tensor([[bad, 0.2]]), says="overlaps must be in [0, 1]")


def test_detectors_need_more_than_the_least_overlap():
    found = detectors(torch.tensor([[0.04, 0.0], [0.1, 0.3], [0.05, 0.05], [0.0, 0.5]]))
    assert found.detects.tolist() == [False, True, True, True]
    assert (found.units, found.distinct) == (3, 2)
    assert found.concept.tolist()[1:] == [1, 0, 1]
    assert_refused(detectors, torch.ones(2, 2), least=1.0, says="least")
    assert_refused(detectors, torch.ones(2), says="[units, concepts]")


def test_unit_statistics_are_their_formulas_whatever_the_batches():
    maps = (torch.randn(61, 4, 3, 3, generator=generator(6), dtype=torch.float64).exp() + 100) * 7
    maps[:, 3] = 5.0  # dead
    labels = torch.randint(0, 4, (61,), generator=generator(7))
    metric = UnitStatistics(4, classes=5)  # of which one is never seen
    for part in chunks(61, 8):
        metric.update(maps[part], labels[part])
    found = metric.compute()
    values = maps[:, :3].movedim(1, 0).flatten(1).numpy()
    exact = {"rtol": 1e-9}
    np.testing.assert_allclose(found.kurtosis[:3], kurtosis(values, axis=1, fisher=False), **exact)
    participation = (values**2).sum(1) ** 2 / (values.shape[1] * (values**4).sum(1))
    np.testing.assert_allclose(found.participation[:3], participation, **exact)
    responses = maps[:, :3].mean((2, 3)).numpy()
    means = np.sort([responses[labels.numpy() == c].mean(0) for c in range(4)], axis=0)
    selectivity = (means[-1] - means[:-1].mean(0)) / (means[-1] + means[:-1].mean(0))
    np.testing.assert_allclose(found.selectivity[:3], selectivity, **exact)
    own = np.stack([responses[labels.numpy() == c].mean(0) for c in range(4)])[labels.numpy()]
    np.testing.assert_allclose(found.class_variance[:3], own.var(0) / responses.var(0), **exact)
    assert found.live.tolist() == [True, True, True, False]
    assert all(math.isnan(value[3]) for value in found[:4])


def test_without_classes_there_is_no_selectivity():
    metric = UnitStatistics(2)
    metric.update(torch.randn(9, 2, generator=generator(9)))
    assert metric.compute().selectivity.isnan().all()


def test_unit_statistics_refuse_what_does_not_fit():
    metric = UnitStatistics(2, classes=3)
    assert_refused(UnitStatistics, units=1, classes=1, says="classes")
    with pytest.warns(UserWarning, match="before the ``update``"):  # of torchmetrics
        assert_refused(metric.compute, says="call update first")
    assert_refused(metric.update, torch.ones(2, 2), says="labels")
    assert_refused(metric.update, torch.ones(2, 2), torch.tensor([0, 3]), says="[0, 3)")
