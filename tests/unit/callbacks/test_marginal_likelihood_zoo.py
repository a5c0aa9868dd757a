"""Precisions of the members of a zoo of ordinary networks, each by its own evidence."""

import functools
import json
import math

import fits
import pytest
import torch
from experiments import SmallCNN
from fits import digits
from helpers import read_csv, refused
from pytorch_lightning import Callback

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.curvature import CurvatureError, Evidence, factors, parameter_groups
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import EquivarianceTask, ZooTask

pytestmark = pytest.mark.long


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.002),  # by the gradient of the prior
}

DATA = {"batch_size": 20, "val_fraction": 0.0}  # 80 images


def fit(folder, task, callback=None, data=None, before=(), **settings):
    callback = callback or MarginalLikelihood(burn_in=2, every_n_epochs=1, steps=10)
    settings = {"max_epochs": 4, **settings}
    return callback, fits.fit(task, data or digits(**DATA), *before, callback, folder=folder, **settings)


def zoo(optimizer="adam", *, norm=False, **settings):
    settings = {"members": 2, "keep": "last", "prior_precision": 1.0, **settings}
    return ZooTask(SmallCNN(norm=norm), optimizer=OPTIMIZERS[optimizer], **settings)


def taken(callback):
    return [(record["epoch"], record["member"]) for record in callback.records]


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("norm", [False, True])
def test_the_evidence_of_a_member_is_that_of_its_network(tmp_path, norm, execution):
    task, data = zoo(norm=norm, execution=execution), digits(**DATA)
    callback, _ = fit(tmp_path, task, data=data)
    assert taken(callback) == [(epoch, member) for epoch in (2, 3, 4) for member in (0, 1)]
    precisions = [[values["precision"] for values in record["paths"].values()] for record in callback.records[-2:]]
    assert precisions[0] != precisions[1], "members have their own"
    assert len(set(precisions[0])) == len(precisions[0])
    for record in callback.records[-2:]:
        network = SmallCNN(norm=norm)
        network.load_state_dict(task.population.member_state(record["member"]))
        groups = parameter_groups(network)
        found = factors(network, data.curvature_dataloader())
        log_precisions = task.prior.members[record["member"]].log_precisions
        chosen = torch.tensor([log_precisions[f"{name}.weight"] for name in groups.names], dtype=torch.float64)
        evidence = Evidence.of(network, found, groups).log_marginal_likelihood(chosen)
        assert record["log_marginal_likelihood"] == pytest.approx(evidence / 80, rel=1e-9)
        assert record["samples"] == 80
        if norm:  # scale and shift are linear in eval mode: one dense block each
            assert found.blocks["norm.weight"].in_factor is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_member_is_trained_as_an_equivariance_task_trains_it(tmp_path, optimizer, execution):
    """With all data in a batch, so that their order does not matter; the prior is strong enough to be seen."""
    task, free = (zoo(optimizer, execution=execution, seed=3, prior_precision=precision) for precision in (5.0, 1e-9))
    alone = EquivarianceTask(SmallCNN().fresh(4), precision=5.0, optimizer=OPTIMIZERS[optimizer])
    for trained, burn_in in ((task, 4), (alone, 4), (free, None)):
        learner = MarginalLikelihood(burn_in=burn_in, every_n_epochs=4)
        fit(tmp_path, trained, learner, digits(**{**DATA, "batch_size": 80}), max_epochs=12)
    assert task.prior.implicit == alone.prior.implicit == (optimizer != "rmsprop")
    found = task.population.member_state(4)
    torch.testing.assert_close(found, dict(alone.network.state_dict()), rtol=1e-3, atol=1e-4)
    assert task.prior.members[4].log_precisions == pytest.approx(alone.prior.log_precisions, abs=1e-3)
    assert (found["last.weight"] - free.population.member_state(4)["last.weight"]).abs().max() > 0.01


class Diverge(Callback):
    """Makes a weight of member 1 infinite at the start of an epoch."""

    def on_train_epoch_start(self, trainer, task):
        if trainer.current_epoch == 2:
            for name, parameter in task.population.named_parameters():
                if name == "first/weight":
                    parameter.data[1] = math.nan
                elif name == "members.0001.first.weight":
                    parameter.data.fill_(math.nan)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_members_that_are_stopped_are_passed_over(tmp_path, execution, optimizer):
    whole, _ = fit(tmp_path, zoo(optimizer, execution=execution))
    assert {row["member"] for row in read_csv(tmp_path / "results" / "layers.csv")} == {"0", "1"}
    with pytest.warns(UserWarning, match="Member 1 was stopped"):
        callback, _ = fit(tmp_path, zoo(optimizer, execution=execution), before=[Diverge()])
    assert taken(callback) == [(2, 0), (2, 1), (3, 0), (4, 0)]
    expected = next(record for record in whole.records if (record["epoch"], record["member"]) == (4, 0))
    found = callback.records[-1]["log_marginal_likelihood"]
    assert found == pytest.approx(expected["log_marginal_likelihood"], rel=1e-6)
    assert {row["member"] for row in read_csv(tmp_path / "results" / "layers.csv")} == {"0"}


class Blind(DigitsDataModule):
    """Has an input that is not a number, in curvature passes after the data were counted."""

    def curvature_dataloader(self):
        batches = [[images.clone(), labels] for images, labels in super().curvature_dataloader()]
        batches[0][0][0] = math.nan
        return batches


def test_passes_that_are_not_finite_are_skipped_and_three_in_a_row_stop_the_run(tmp_path):
    with (
        pytest.warns(UserWarning, match="of member 0 after epoch 2 was skipped, and training continues: .*not finite"),
        pytest.raises(CurvatureError, match="3 updates of the precisions of member 0 in a row failed, the last after"),
    ):
        fit(tmp_path, zoo(), data=Blind(max_samples=80, **DATA))


prior = functools.partial(ZooTask, SmallCNN(), prior_precision=1.0)
decaying = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=1e-4)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(prior, optimizer=decaying, says="SGD decays weights, which the Gaussian prior"),
        refused(prior, label_smoothing=0.1, says="With label_smoothing 0.1 the loss is no log likelihood"),
        refused(prior, prior_precision=0.0, says=["precision", "0.0"]),
    ],
)
def test_what_a_zoo_with_a_prior_must_not_have(refusal):
    refusal()


class Mixing(ZooTask):
    def training_batch(self, batch, batch_idx):
        inputs, targets = super().training_batch(batch, batch_idx)
        return (inputs + inputs.flip(0)) / 2, targets


def test_a_zoo_that_changes_its_training_batches_warns_of_its_evidence():
    network = MultiLayerPerceptron([4], image_size=8)
    with pytest.warns(UserWarning, match="Mixing changes training batches"):
        Mixing(network, prior_precision=1.0)
    Mixing(network)  # without a prior there is nothing to warn of


@pytest.mark.drawn
def test_what_is_left_behind(tmp_path, capsys):
    callback, task = MarginalLikelihood(burn_in=2, every_n_epochs=2, steps=5), zoo(norm=True)
    data = digits(**{**DATA, "val_fraction": 0.2})
    _, trainer = fit(tmp_path, task, callback, data, logger=MetricsCSV(tmp_path))
    rows = read_csv(tmp_path / "results" / "layers.csv")
    layers = ["first", "norm", "last"]
    assert [(row["member"], row["layer"], row["type"]) for row in rows] == [(m, n, "") for m in "01" for n in layers]
    last = {record["member"]: record for record in callback.records}
    for row in rows:
        expected = last[int(row["member"])]["paths"][row["layer"]]["precision"]
        assert float(row["precision"]) == pytest.approx(expected)
    about = json.loads((tmp_path / "results" / "layers.json").read_text())
    assert about["log_precisions"]["member-0001"] == task.prior.members[1].log_precisions
    assert about["test"].keys() == about["evidence"].keys() == {"member-0000", "member-0001"}
    evidence = "details/evidence/log_marginal_likelihood/member-0001"
    logged = [row for row in read_csv(tmp_path / "metrics.csv") if row[evidence]]
    assert len(logged) == 2
    values = [last[number]["log_marginal_likelihood"] for number in (0, 1)]
    assert float(trainer.callback_metrics["evidence/log_marginal_likelihood"]) == pytest.approx(sum(values) / 2)
    assert float(logged[1][evidence]) == pytest.approx(values[1])
    learned = float(logged[1]["details/precision/norm/member-0000"])
    assert learned == pytest.approx(last[0]["paths"]["norm"]["precision"])
    printed = capsys.readouterr().out
    mean = sum(values["accuracy"] for values in about["test"].values()) / 2
    assert f"mean over members: test accuracy {100 * mean:.2f} %" in printed
    assert "member" in printed
