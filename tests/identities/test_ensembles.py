"""Ensembles: the cyclical learning rate, exact decompositions of scores, and laws that hold for any members."""

import math

import pytest
import torch
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_sym.ensembles import cyclical_learning_rate, ensemble_scores, log_probabilities
from lightning_sym.networks import MyrtleCNN


def predicted(members=4, samples=300, classes=5, seed=0):
    draws = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(members, samples, classes, generator=draws, dtype=torch.float64)
    return logits.log_softmax(2), torch.randint(classes, (samples,), generator=draws)


# ---- the learning rate


@given(st.floats(0, 40), st.integers(2, 20), st.floats(1e-6, 1), st.floats(0, 1))
def test_learning_rate_is_that_of_the_paper_and_continuous(steps, cycle, highest, share):
    lowest = share * highest
    t = (steps % cycle) / cycle
    theirs = highest * (1 - 2 * t) + lowest * 2 * t if t < 0.5 else highest * (2 * t - 1) + lowest * (2 - 2 * t)
    rate = cyclical_learning_rate(steps, cycle, highest, lowest)
    assert rate == pytest.approx(theirs, abs=1e-12)
    near = cyclical_learning_rate(steps + 1e-7, cycle, highest, lowest)
    assert abs(near - rate) <= 2.1e-7 * highest / cycle + 1e-12


# ---- scores


def test_scores_are_those_of_the_definitions():
    logs, labels = predicted()
    scores = ensemble_scores(logs, labels, bins=10)
    rows = torch.arange(len(labels))
    every = torch.cat([logs.exp(), torch.stack([logs[: j + 1].exp().mean(0) for j in range(len(logs))])])
    for found, own in ((scores.alone, every[: len(logs)]), (scores.together, every[len(logs) :])):
        for j, p in enumerate(own):
            loss, right = -p[rows, labels].log(), (p.argmax(1) == labels).double()
            one_hot = torch.eye(p.shape[1], dtype=p.dtype)[labels]
            expected = {
                "accuracy": right.mean(),
                "accuracy_error": right.std() / math.sqrt(len(labels)),
                "loss": loss.mean(),
                "loss_error": loss.std() / math.sqrt(len(labels)),
                "brier": (p - one_hot).square().sum(1).mean(),
                "calibration_error": multiclass_calibration_error(p, labels, p.shape[1], n_bins=10).double(),
            }
            for name, value in expected.items():
                tolerance = 1e-6 if name == "calibration_error" else 1e-12  # torchmetrics works in float32
                torch.testing.assert_close(getattr(found, name)[j], value, atol=tolerance, rtol=0, msg=name)
    divergences = torch.stack([(p.exp() * (p - logs)).sum(2).mean(1) for p in logs])
    torch.testing.assert_close(scores.divergences, divergences, atol=1e-12, rtol=0)
    classes = logs.argmax(2)
    assert scores.disagreements[0, 1] == (classes[0] != classes[1]).double().mean()
    off = ~torch.eye(len(logs), dtype=torch.bool)
    for name in ("disagreement", "divergence"):
        assert getattr(scores, name)[0].isnan()
        torch.testing.assert_close(getattr(scores, name)[-1], getattr(scores, f"{name}s")[off].mean())


def test_what_an_ensemble_gains_is_how_different_its_members_are():
    """The mean loss less that of the ensemble, and the same of Brier scores, where the rest is exact."""
    logs, labels = predicted()
    scores = ensemble_scores(logs, labels)
    mean = logs.exp().mean(0)
    rows = torch.arange(len(labels))
    ambiguity = mean[rows, labels].log() - logs[:, rows, labels].mean(0)
    assert (ambiguity > 0).all()
    torch.testing.assert_close(scores.ambiguity[-1], ambiguity.mean(), atol=1e-12, rtol=0)
    torch.testing.assert_close(scores.ambiguity_error[-1], ambiguity.std() / math.sqrt(len(labels)))
    torch.testing.assert_close(scores.ambiguity[-1], scores.alone.loss.mean() - scores.together.loss[-1])
    variance = (logs.exp() - mean).square().sum(2).mean()
    torch.testing.assert_close(scores.variance[-1], variance, atol=1e-12, rtol=0)


def test_divergences_of_probabilities_that_are_zero_are_those_of_the_definition():
    rows = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]]]).double()
    expected = torch.special.xlogy(rows[:, None], rows[:, None]) - rows[:, None] * rows[None].log()
    expected = torch.where(rows[:, None] == 0, 0.0, expected).sum(3).mean(2)
    found = ensemble_scores(rows.log(), torch.tensor([0, 1], dtype=torch.int32)).divergences
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert found[1, 0] == math.inf
    assert found[0, 1].isfinite()


def test_chunks_of_samples_make_no_difference(monkeypatch):
    logs, labels = predicted()
    whole = ensemble_scores(logs, labels)
    monkeypatch.setattr("lightning_sym.ensembles._CHUNK", 7)
    parts = ensemble_scores(logs, labels)
    torch.testing.assert_close(parts.together.calibration_error, whole.together.calibration_error)
    torch.testing.assert_close(parts.divergences, whole.divergences)


# ---- networks


def test_predictions_with_statistics_measured_anew():
    network = MyrtleCNN(2, in_channels=1, image_size=8)
    draws = torch.Generator().manual_seed(0)
    batches = [(torch.rand(8, 1, 8, 8, generator=draws), torch.arange(8)) for _ in range(2)]
    found, labels = log_probabilities([network, network], batches, recalibration_data=batches)
    assert found.shape == (2, 16, 10)
    assert labels.tolist() == [*range(8), *range(8)]
    with torch.no_grad():
        again = network.eval()(batches[1][0]).double().log_softmax(1)
    torch.testing.assert_close(found[1, 8:], again)


def test_predictions_of_shuffled_data_are_refused():
    data = iter([[(torch.rand(2, 3), torch.tensor([0, 1]))], [(torch.rand(2, 3), torch.tensor([1, 0]))]])

    class Shuffled:
        def __iter__(self):
            return iter(next(data))

    refused(log_probabilities, [nn.Linear(3, 2)] * 2, Shuffled(), says="change between passes").values[0]()


GOOD = predicted(2, 3)
PAIRS = [(torch.rand(2, 3), torch.tensor([0, 1]))]


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(cyclical_learning_rate, 1, 4, high, low, says="lowest") for high, low in ((0.1, 0.2), (0.1, -1))),
        refused(cyclical_learning_rate, -1, 4, 0.2, 0.1, says="steps"),
        refused(ensemble_scores, GOOD[0][0], GOOD[1], says="[M, N, C]"),
        refused(ensemble_scores, GOOD[0], GOOD[1][:2], says="labels"),
        refused(ensemble_scores, 3 * GOOD[0], GOOD[1], says="log_softmax"),
        refused(ensemble_scores, GOOD[0] * math.nan, GOOD[1], says="log_softmax"),
        refused(ensemble_scores, GOOD[0][:, :0], GOOD[1][:0], says="no samples"),
        refused(ensemble_scores, *GOOD, bins=0),
        *(
            refused(ensemble_scores, GOOD[0], torch.full((3,), bad), says="labels must be integers from 0 to 4")
            for bad in (5, -1, 0.5)
        ),
        refused(log_probabilities, [], [], says="at least one network"),
        refused(log_probabilities, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), PAIRS, says="got one Sequential"),
        refused(log_probabilities, [nn.Linear(3, 2)], [PAIRS[0][0]], says="inputs and labels, got Tensor"),
        refused(log_probabilities, [nn.Linear(3, 2), nn.Linear(3, 4)], PAIRS, says="the same classes, got 2 and 4"),
        refused(log_probabilities, [nn.Linear(3, 2)], [(PAIRS[0][0] * math.nan, PAIRS[0][1])], says="not finite"),
        refused(log_probabilities, [nn.Flatten(0)], [(torch.rand(2, 3), torch.tensor([0, 1]))], says="logits [B, C]"),
        refused(log_probabilities, [nn.Linear(3, 2)], [(torch.rand(2, 3), torch.rand(2))], says="integer labels"),
    ],
)
def test_bad_input_is_refused(refusal):
    refusal()
