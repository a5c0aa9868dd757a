"""WeightRegressionReport: scores, intervals and files."""

import functools

import numpy as np
import pytest
import torch
from fits import digits, fit
from helpers import assert_refused, read_csv, write_zoo
from scipy.stats import kendalltau

from lightning_sym.callbacks import WeightRegressionReport
from lightning_sym.datamodules import ZooWeightsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.weights import (
    CONSTANT,
    Predictions,
    summary_rows,
    weight_regression_results,
    weighted_r2,
    weighted_tau,
)
from lightning_sym.tasks import WeightRegressionTask

FAST = functools.partial(torch.optim.Adam, lr=0.01)


def test_scores_are_those_of_repeated_networks():
    source = np.random.default_rng(0)
    targets = source.random(12).round(1)  # with ties
    predictions = targets + 0.3 * source.normal(size=(3, 12))
    predictions[0, :4] = 0.5
    counts = source.multinomial(12, np.full(12, 1 / 12), size=4)
    r2, tau = (score(predictions, targets, counts.astype(float)) for score in (weighted_r2, weighted_tau))
    for i, count in enumerate(counts):
        drawn = np.repeat(np.arange(12), count)
        for j, own in enumerate(predictions):
            errors, spread = own[drawn] - targets[drawn], targets[drawn] - targets[drawn].mean()
            assert r2[i, j] == pytest.approx(1 - (errors**2).sum() / (spread**2).sum(), abs=1e-12)
            assert tau[i, j] == pytest.approx(kendalltau(own[drawn], targets[drawn]).statistic, abs=1e-12)


def test_intervals_cover_and_gains_are_of_pairs():
    """The same predictions have no gain, however uncertain both are; a shift of all errors has a certain one."""
    source = np.random.default_rng(0)
    targets = source.random(40)
    raw = targets + 0.2 * source.normal(size=(1, 40))
    better = targets + 0.5 * (raw - targets)
    arms = [Predictions("raw", raw, raw), Predictions("same", raw, raw), Predictions("better", better, raw)]
    first, same, other = summary_rows(arms, targets)
    assert first["gain"] is None
    assert same["gain"] == same["gain_low"] == same["gain_high"] == 0
    assert other["gain"] == pytest.approx(0.75 * (1 - first["r2"]))
    assert 0 < other["gain_low"] < other["gain"] < other["gain_high"]
    assert first["r2_low"] < first["r2"] < first["r2_high"]
    assert (other["moved"], other["moved_low"]) == (first["r2"], first["r2_low"])


def test_resamples_of_one_network_have_no_r2():
    few, counts = np.array([[0.5, 0.25]]), np.array([[1.0, 1.0], [2.0, 0.0]])
    found = weighted_r2(few, np.array([0.0, 1.0]), counts)
    assert found[0, 0] == pytest.approx(1 - (0.25 + 0.5625) / 0.5)
    assert np.isnan(found[1, 0])
    (row,) = summary_rows([Predictions("raw", few, few)], np.array([0.0, 1.0]))
    assert row["r2_low"] == row["r2_high"] == row["r2"]
    settings = {"title": "", "about": {}}
    alike = np.ones(2)
    assert_refused(weight_regression_results, [], alike, 1.0, says="all 2 of the test split have 1", **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    networks = [MultiLayerPerceptron(widths=(3,), image_size=8).fresh(number) for number in range(30)]
    for number, one in enumerate(networks):  # a metric that weights tell in any order of the units
        with torch.no_grad():
            one.linear1.weight.mul_(1 + number / 30)
    zoo = str(write_zoo(folder / "zoo", networks, digits(), [number / 30 for number in range(30)]))
    task, data = (
        WeightRegressionTask(zoo, members=10, hidden=8, optimizer=FAST),
        ZooWeightsDataModule(zoo, batch_size=5),
    )
    fit(task, data, report := WeightRegressionReport(), folder=folder, max_epochs=40)
    return folder / "results", task, data, report.results


@pytest.mark.drawn
def test_files_hold_the_predictions_of_the_kept_weights(run):
    results, task, data, _ = run
    inputs, targets = data.split_tensors("test")
    rows = read_csv(results / "predictions.csv")
    assert len(rows) == 6 * len(inputs)
    with task.evaluating(), torch.no_grad():
        outputs = task.population(inputs)[..., 0].double()
    summary = {row["arm"]: row for row in read_csv(results / "summary.csv")}
    assert list(summary) == [*task.arms, CONSTANT]
    for index, arm in enumerate(task.arms):
        own = outputs[index::5]
        for network, row in enumerate(row for row in rows if row["arm"] == arm):
            assert float(row["target"]) == float(targets[network, 0])
            assert float(row["predicted"]) == pytest.approx(float(own[:, network].mean()), abs=1e-6)
        spread = (targets[:, 0].double() - targets.double().mean()).square().sum()
        scores = 1 - (own - targets[:, 0].double()).square().sum(1) / spread
        assert float(summary[arm]["r2"]) == pytest.approx(float(scores.mean()), abs=1e-6)
    for name in ("predicted", "r2"):
        assert (results / f"{name}.png").is_file()


@pytest.mark.drawn
def test_moved_networks_change_only_what_is_not_invariant(run):
    results, *_, found = run
    summary = {row["arm"]: {k: float(v) for k, v in row.items() if k in ("r2", "moved")}
               for row in read_csv(results / "summary.csv")}  # fmt: skip
    for arm in ("canonical", "invariants", CONSTANT):
        assert summary[arm]["moved"] == pytest.approx(summary[arm]["r2"], abs=1e-3)
    assert summary["statistics"]["moved"] < summary["statistics"]["r2"] - 0.05
    assert summary[CONSTANT]["r2"] <= 0
    assert found.numbers["r2/invariants"] == summary["invariants"]["r2"] > 0.3
