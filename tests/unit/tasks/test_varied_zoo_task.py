"""VariedZooTask: learning rates, numbers of epochs and label noise of each member."""

import functools
import math

import pytest
import torch
from fits import digits, fit
from helpers import assert_refused, assert_same

from lightning_sym.callbacks import ZooExport
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import VariedZooTask, ZooTask
from lightning_sym.zoo import ModelZoo

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ALL_ALIKE = {"rate_factors": [1.0, 1.0], "epochs": [9, 9], "label_noise": [0.0, 0.0]}
executions = pytest.mark.parametrize("execution", ["loop", "vmap"])


def varied(members=3, **settings):
    network = MultiLayerPerceptron(widths=(6,), image_size=8)
    return VariedZooTask(network, members, **{"optimizer": SGD, **ALL_ALIKE, **settings})


@executions
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_factor_is_a_learning_rate(execution, momentum):
    optimizer = functools.partial(SGD, momentum=momentum)
    task = varied(rate_factors=[0.1, 1.0], execution=execution, optimizer=optimizer)
    fit(task, max_epochs=2)
    factors = [task.member_settings(number)["rate_factor"] for number in range(3)]
    assert len(set(factors)) == 3
    for number, factor in enumerate(factors):
        assert 0.1 <= factor <= 1.0
        slower = functools.partial(torch.optim.SGD, lr=0.1 * factor, momentum=momentum)
        alone = ZooTask(task.network, 1, number, execution=execution, optimizer=slower, keep="last")
        fit(alone, max_epochs=2)
        torch.testing.assert_close(task.kept[number]["state"], alone.kept[number]["state"], rtol=1e-4, atol=1e-6)


@executions
def test_members_keep_the_weights_after_their_epochs(execution):
    task = varied(epochs=[1, 8], members=6, execution=execution)
    fit(task, max_epochs=3)
    counts = {number: task.member_settings(number)["epochs"] for number in task.numbers}
    assert min(counts.values()) < 3 < max(counts.values())
    for number, count in counts.items():
        assert task.kept[number]["epochs"] == min(count, 3)
        shorter = varied(members=1, seed=number, epochs=[9, 9], execution=execution)
        fit(shorter, max_epochs=min(count, 3))
        expected = shorter.kept[number]["state"]
        torch.testing.assert_close(task.kept[number]["state"], expected, rtol=1e-5, atol=1e-6)


def test_labels_are_replaced_at_the_rate_of_each_member():
    task, seen = varied(label_noise=[0.0, 1.0], members=4), []

    class Watching(VariedZooTask):
        def training_batch(self, batch, batch_idx):
            inputs, targets = super().training_batch(batch, batch_idx)
            assert torch.equal(inputs, batch[0])
            seen.append((targets != batch[1]).double().mean(1))
            return inputs, targets

    settings = {**ALL_ALIKE, "label_noise": [0.0, 1.0]}
    task = Watching(task.network, 4, optimizer=SGD, **settings)
    fit(task, digits(max_samples=1200, batch_size=200), max_epochs=3)
    rates = torch.stack(seen).mean(0)
    for number, rate in enumerate(rates.tolist()):
        # A random class is the right one in a tenth of all cases. Standard errors are at most 0.01.
        assert rate == pytest.approx(0.9 * task.member_settings(number)["label_noise"], abs=0.04)


def test_a_member_is_the_one_that_is_trained_alone():
    settings = {"rate_factors": [0.1, 1.0], "epochs": [1, 3], "label_noise": [0.0, 0.5]}
    together, alone = varied(**settings), varied(members=1, seed=2, optimizer=None, **settings)
    for task in (together, alone):
        fit(task, max_epochs=3)
    assert_same(together.kept[2], alone.kept[2])


def test_the_zoo_records_the_settings(tmp_path):
    task = varied(label_noise=[0.2, 0.4])
    fit(task, None, ZooExport(), folder=tmp_path)
    for member in ModelZoo.open(tmp_path / "zoo"):
        assert member.training["settings"] == task.member_settings(member.number)
        assert 0.2 < member.training["settings"]["label_noise"] < 0.4
    fit(ZooTask(task.network, 1), None, ZooExport(), folder=tmp_path / "plain")
    assert "settings" not in ModelZoo.open(tmp_path / "plain" / "zoo").member(0).training


def test_settings_out_of_range_are_refused():
    assert_refused(varied, rate_factors=[0.0, 1.0], says="rate_factors must be")
    assert_refused(varied, rate_factors=[2.0, 1.0], says="smallest and the largest")
    assert_refused(varied, epochs=[0, 3], says=">= 1")
    assert_refused(varied, epochs=[1, math.inf], says=">= 1")
    assert_refused(varied, label_noise=[0.5, 1.1], says="in [0, 1]")
    assert_refused(varied, label_noise=[-0.1, 0.5], says="in [0, 1]")
    assert_refused(varied, label_noise=[0.5], says="smallest and the largest")
    assert_refused(varied, optimizer=torch.optim.Adam, says="another effect with Adam; use torch.optim.SGD")
    decaying = functools.partial(SGD, weight_decay=0.1)
    assert_refused(varied, optimizer=decaying, says="SGD with weight decay; use torch.optim.SGD without")
