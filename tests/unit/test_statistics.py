"""The bootstrap over models: against a loop, and its coverage."""

import itertools

import numpy as np
import pytest
from helpers import refused

from lightning_sym._statistics import bootstrap_over_models, student_interval


def all_pairs(models: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(models), 2))


def means_by_loops(pairs, values, models) -> np.ndarray:
    """The means of all resamples, drawing the models in every possible way and listing the pairs among them."""
    means = []
    for drawn in itertools.product(range(models), repeat=models):
        chosen = [
            value for i in drawn for j in drawn for pair, value in zip(pairs, values, strict=True) if pair == (i, j)
        ]
        if chosen:
            means.append(np.mean(chosen))
    return np.array(means)


def test_mean_and_standard_deviation_are_the_plain_ones():
    values = np.random.default_rng(0).normal(size=10)
    found = bootstrap_over_models(all_pairs(5), values)
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std(ddof=1))
    assert found.low < found.mean < found.high
    assert (found.pairs, found.models, found.note) == (10, 5, "")
    assert found.mean.shape == found.std.shape == found.low.shape == found.high.shape == ()
    assert f"{found.mean:.3f}" == f"{values.mean():.3f}"


@pytest.mark.parametrize("pairs", [all_pairs(4), [(0, 1), (0, 2), (0, 3)], [(1, 0), (0, 1), (2, 3), (2, 3)]], ids=str)
def test_interval_is_that_of_all_ways_to_draw_the_models(pairs):
    values = np.random.default_rng(1).normal(size=len(pairs))
    means = means_by_loops(pairs, values, 4)
    found = bootstrap_over_models(pairs, values, samples=20_000, level=0.8)
    # Quantiles jump, as there are few different means: compare probabilities, of 20,000 resamples.
    for bound, probability in ((found.low, 0.1), (found.high, 0.9)):
        assert (means < bound - 1e-9).mean() <= probability + 0.01
        assert (means <= bound + 1e-9).mean() >= probability - 0.01


def test_columns_are_as_alone():
    pairs, values = all_pairs(6), np.random.default_rng(2).normal(size=(15, 3))
    found = bootstrap_over_models(pairs, values, seed=4)
    for column in range(3):
        alone = bootstrap_over_models(pairs, values[:, column], seed=4)
        for name in ("mean", "std", "low", "high"):
            assert getattr(found, name).shape == (3,)
            assert getattr(found, name)[column] == pytest.approx(float(getattr(alone, name)))


def test_numbers_of_models_and_the_order_of_a_pair_do_not_matter():
    pairs, values = all_pairs(5), np.random.default_rng(3).normal(size=10)
    found = bootstrap_over_models(pairs, values)
    other = bootstrap_over_models(np.array([(10 * j + 7, 10 * i + 7) for i, j in pairs]), values)
    assert (found.low, found.high) == (other.low, other.high)


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2), (0, 3)], [(0, 1), (2, 3)]], ids=["star", "apart"])
def test_resamples_without_a_pair_are_drawn_again(pairs):
    """All pairs share model 0, which is missing, or alone; or a resample may have one pair, once."""
    found = bootstrap_over_models(pairs, [1.0, 2.0, 3.0][: len(pairs)], samples=20_000)
    share = 1 - len(means_by_loops(pairs, [0.0] * len(pairs), 4)) / 4**4
    assert found.redrawn / (found.redrawn + 20_000) == pytest.approx(share, abs=0.01)
    assert np.isfinite([found.low, found.high]).all()


def test_a_single_resample_is_an_interval_without_width():
    found = bootstrap_over_models(all_pairs(40), np.arange(780.0), samples=1)
    assert found.low == found.high
    assert found.redrawn == 0


def test_pairs_of_a_model_with_itself_are_not_used():
    pairs, values = all_pairs(5), np.random.default_rng(5).normal(size=10)
    expected = bootstrap_over_models(pairs, values)
    found = bootstrap_over_models([*pairs, (2, 2), (9, 9)], [*values, np.nan, 1e9])
    assert (found.mean, found.std, found.low, found.high) == (expected.mean, expected.std, expected.low, expected.high)
    assert (found.pairs, found.models) == (10, 5)


def test_two_models_have_no_interval():
    found = bootstrap_over_models([(3, 8), (8, 3)], [[1.0, 2.0], [3.0, 6.0]])
    assert found.mean.tolist() == [2, 4]
    assert found.std == pytest.approx([2**0.5, 8**0.5])
    assert np.isnan([found.low, found.high]).all(1).tolist() == [True, True]
    assert "two models" in found.note
    one = bootstrap_over_models([(0, 1)], [1.0])
    assert one.mean == 1
    assert np.isnan(one.std)


def test_coverage_where_pairs_share_models():
    """Each value is the sum of two models' effects: the interval holds the mean, one over pairs does not."""
    source = np.random.default_rng(0)
    models, pairs = 20, np.array(all_pairs(20))
    hits = naive = 0
    for trial in range(200):
        effects = source.normal(size=models)
        values = effects[pairs].sum(1)  # of mean 0
        found = bootstrap_over_models(pairs, values, samples=300, level=0.9, seed=trial)
        hits += bool(found.low <= 0 <= found.high)
        naive += bool(abs(found.mean) <= 1.645 * found.std / len(pairs) ** 0.5)
    # 180 of 200 if exact, with a standard deviation of 4; percentile intervals of 20 models are a little narrow.
    assert 160 <= hits <= 195
    assert naive < 110


@pytest.mark.parametrize(
    "refusal",
    [
        refused(bootstrap_over_models, [], [], says="at least one pair"),
        refused(bootstrap_over_models, [(0, 0)], [1.0], says="two different models"),
        refused(bootstrap_over_models, [(0, 1, 2)], [1.0], says="shape [P, 2]; got shape [1, 3]"),
        refused(bootstrap_over_models, [0, 1], [1.0, 2.0], says="shape [P, 2]; got shape [2]"),
        refused(bootstrap_over_models, [(0.5, 1.0)], [1.0], says="pairs of integers"),
        refused(bootstrap_over_models, [(0, 1)], [1.0, 2.0], says="P = 1 pairs; got [2]"),
        refused(bootstrap_over_models, [(0, 1)], [[[1.0]]], says="got [1, 1, 1]"),
        refused(bootstrap_over_models, [(0, 1), (4, 2)], [1.0, np.nan], says="that of pair (4, 2) is not"),
        refused(bootstrap_over_models, [(0, 1), (4, 2)], [[1.0, 1.0], [1.0, np.inf]], says="that of pair (4, 2) is"),
        refused(bootstrap_over_models, [(0, 1)], [1.0], level=1.0),
        refused(student_interval, [1.0], says="at least two finite numbers, got [1.]"),
        refused(student_interval, [1.0, np.nan], says="got [ 1. nan]"),
        refused(student_interval, [[1.0, 2.0]], says="at least two finite numbers"),
        refused(bootstrap_over_models, [(0, 1)], [1.0], samples=0),
    ],
)
def test_statistics_name_bad_arguments(refusal):
    refusal()
