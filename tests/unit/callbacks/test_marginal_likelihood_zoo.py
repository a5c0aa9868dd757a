"""Precisions of the members of a zoo of ordinary networks, each by its own evidence."""

import csv
import functools
import json
import math

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch import nn

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.curvature import CurvatureError, Evidence, factors, parameter_groups
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron, Network
from lightning_sym.tasks import EquivarianceTask, ZooTask

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Total length of `(list|DataLoader)` across ranks is zero"),
]


class SmallCNN(Network):
    """Two convolutions and a linear map, with batch norms if wanted."""

    def __init__(self, norm: bool = False, num_classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.second = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.last = nn.Linear(64, num_classes)
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        return self.last(self.act(self.second(x)).flatten(1))


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.002),  # by the gradient of the prior
}


def digits(**settings):
    return DigitsDataModule(**{"batch_size": 20, "max_samples": 80, "val_fraction": 0.0, **settings})


def fit(folder, task, callback=None, epochs=4, data=None, before=(), **settings):
    callback = callback or MarginalLikelihood(burn_in=2, every_n_epochs=1, steps=10)
    trainer = Trainer(
        **{
            "accelerator": "cpu", "max_epochs": epochs, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
            "callbacks": [*before, callback], **settings,
        }
    )  # fmt: skip
    trainer.fit(task, data or digits())
    return callback, trainer


def zoo(optimizer="adam", *, norm=False, **settings):
    settings = {"members": 2, "keep": "last", "prior_precision": 1.0, **settings}
    return ZooTask(SmallCNN(norm=norm), optimizer=OPTIMIZERS[optimizer], **settings)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loop_and_vmap_learn_the_same_precisions(tmp_path, norm, optimizer):
    found = []
    for execution in ("loop", "vmap"):
        task = zoo(optimizer, norm=norm, execution=execution)
        callback, _ = fit(tmp_path, task)
        found.append((callback, task))
    (one, first), (other, second) = found
    assert [(record["epoch"], record["member"]) for record in one.records] == [
        (e, m) for e in (2, 3, 4) for m in (0, 1)
    ]
    for mine, theirs in zip(one.records, other.records, strict=True):
        assert theirs["log_marginal_likelihood"] == pytest.approx(mine["log_marginal_likelihood"], rel=1e-4)
        for path, values in mine["paths"].items():
            for name in ("precision", "effective", "mean_square"):
                assert theirs["paths"][path][name] == pytest.approx(values[name], rel=1e-3), (path, name)
    for number in (0, 1):
        for name, value in first.population.member_state(number).items():
            torch.testing.assert_close(second.population.member_state(number)[name], value, rtol=1e-3, atol=1e-4)
    assert ("norm" in one.records[0]["paths"]) == norm
    precisions = [[values["precision"] for values in record["paths"].values()] for record in one.records[-2:]]
    assert precisions[0] != precisions[1]  # members have their own
    assert len(set(precisions[0])) == len(precisions[0])


@pytest.mark.parametrize("norm", [False, True])
def test_the_evidence_of_a_member_is_that_of_its_network(tmp_path, norm):
    task, data = zoo(norm=norm), digits()
    callback, _ = fit(tmp_path, task, data=data)
    for record in callback.records[-2:]:
        network = SmallCNN(norm=norm)
        network.load_state_dict(task.population.member_state(record["member"]))
        groups = parameter_groups(network)
        evidence = Evidence.of(network, factors(network, data.curvature_dataloader()), groups)
        log_precisions = task.prior.members[record["member"]].log_precisions
        chosen = torch.tensor([log_precisions[f"{name}.weight"] for name in groups.names], dtype=torch.float64)
        assert record["log_marginal_likelihood"] == pytest.approx(
            evidence.log_marginal_likelihood(chosen) / 80, rel=1e-9
        )
        assert record["samples"] == 80
        if norm:  # scale and shift are linear in eval mode: one dense block each
            assert factors(network, data.curvature_dataloader()).blocks["norm.weight"].in_factor is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_member_is_trained_as_an_equivariance_task_trains_it(tmp_path, optimizer, execution):
    """With all data in a batch, so that their order does not matter; the prior is strong enough to be seen."""
    settings = {"data": digits(batch_size=80), "epochs": 12}
    task = zoo(optimizer, execution=execution, seed=3, prior_precision=5.0)
    fit(tmp_path, task, MarginalLikelihood(burn_in=4, every_n_epochs=4), **settings)
    alone = EquivarianceTask(SmallCNN().fresh(4), precision=5.0, optimizer=OPTIMIZERS[optimizer])
    fit(tmp_path, alone, MarginalLikelihood(burn_in=4, every_n_epochs=4), **settings)
    assert task.prior.implicit == alone.prior.implicit == (optimizer != "rmsprop")
    for name, value in alone.network.state_dict().items():
        torch.testing.assert_close(task.population.member_state(4)[name], value, rtol=1e-3, atol=1e-4)
    for name, value in alone.prior.log_precisions.items():
        assert task.prior.members[4].log_precisions[name] == pytest.approx(value, abs=1e-3)
    free = zoo(optimizer, execution=execution, seed=3, prior_precision=1e-9)
    fit(tmp_path, free, MarginalLikelihood(burn_in=None), **settings)
    changed = task.population.member_state(4)["last.weight"] - free.population.member_state(4)["last.weight"]
    assert changed.abs().max() > 0.01


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
    task = zoo(optimizer, execution=execution)
    with pytest.warns(UserWarning, match="Member 1 was stopped"):
        callback, _ = fit(tmp_path, task, before=[Diverge()])
    assert [(record["epoch"], record["member"]) for record in callback.records] == [(2, 0), (2, 1), (3, 0), (4, 0)]
    whole, _ = fit(tmp_path, zoo(optimizer, execution=execution))
    expected = next(r for r in whole.records if r["epoch"] == 4 and r["member"] == 0)
    found = callback.records[-1]["log_marginal_likelihood"]
    assert found == pytest.approx(expected["log_marginal_likelihood"], rel=1e-6)
    with (tmp_path / "results" / "layers.csv").open(newline="") as file:
        assert {row["member"] for row in csv.DictReader(file)} == {"0", "1"}  # of the second run


def test_a_stopped_member_is_not_in_the_tables(tmp_path):
    with pytest.warns(UserWarning, match="Member 1 was stopped"):
        fit(tmp_path, zoo(), before=[Diverge()])
    with (tmp_path / "results" / "layers.csv").open(newline="") as file:
        assert {row["member"] for row in csv.DictReader(file)} == {"0"}


class Blind(DigitsDataModule):
    """Has an input that is not a number, in curvature passes after the data were counted."""

    def curvature_dataloader(self):
        batches = [[images.clone(), labels] for images, labels in super().curvature_dataloader()]
        batches[0][0][0] = math.nan
        return batches


def test_passes_that_are_not_finite_are_skipped_and_three_in_a_row_stop_the_run(tmp_path):
    data = Blind(batch_size=20, max_samples=80, val_fraction=0.0)
    with (
        pytest.warns(UserWarning, match="of member 0 after epoch 2 was skipped, and training goes on: .*not finite"),
        pytest.raises(CurvatureError, match="3 updates of the precisions of member 0 in a row failed, the last after"),
    ):
        fit(tmp_path, zoo(), data=data)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=1e-4)}, "SGD decays weights, which"),
        ({"optimizer": torch.optim.AdamW}, "AdamW decays weights, which the Gaussian prior"),
        ({"label_smoothing": 0.1}, "With label_smoothing 0.1 the loss is no log likelihood"),
        ({"prior_precision": 0.0}, "precision must be a finite number > 0"),
    ],
)
def test_what_a_zoo_with_a_prior_must_not_have(settings, words):
    with pytest.raises(ValueError, match=words):
        ZooTask(SmallCNN(), **{"prior_precision": 1.0, **settings})


def test_a_zoo_without_a_prior_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"ZooTask has none; .*prior_precision of ZooTask"):
        fit(tmp_path, ZooTask(SmallCNN(), members=2, keep="last"))


def test_what_is_left_behind(tmp_path, capsys):
    callback = MarginalLikelihood(burn_in=2, every_n_epochs=2, steps=5)
    task = zoo(norm=True)
    _, trainer = fit(tmp_path, task, callback, logger=MetricsCSV(tmp_path), data=digits(val_fraction=0.2))
    with (tmp_path / "results" / "layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    layers = ["first", "norm", "second", "last"]
    assert [(row["member"], row["layer"], row["type"]) for row in rows] == [(m, n, "") for m in "01" for n in layers]
    for row in rows:
        last = next(r for r in reversed(callback.records) if r["member"] == int(row["member"]))
        assert float(row["precision"]) == pytest.approx(last["paths"][row["layer"]]["precision"])
    about = json.loads((tmp_path / "results" / "layers.json").read_text())
    assert about["log_precisions"]["member-0001"]["norm.bias"] == task.prior.members[1].log_precisions["norm.bias"]
    assert about["test"].keys() == about["evidence"].keys() == {"member-0000", "member-0001"}
    mean = sum(values["accuracy"] for values in about["test"].values()) / 2
    with (tmp_path / "metrics.csv").open(newline="") as file:
        logged = [row for row in csv.DictReader(file) if row["evidence/log_marginal_likelihood/member-0001"]]
    assert len(logged) == 2
    values = [r["log_marginal_likelihood"] for r in callback.records if r["epoch"] == 4]
    assert float(trainer.callback_metrics["evidence/log_marginal_likelihood"]) == pytest.approx(sum(values) / 2)
    assert float(logged[1]["evidence/log_marginal_likelihood/member-0001"]) == pytest.approx(values[1])
    assert float(logged[1]["precision/norm/member-0000"]) == pytest.approx(
        next(r for r in callback.records if r["epoch"] == 4)["paths"]["norm"]["precision"]
    )
    assert (tmp_path / "results" / "evidence.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert f"mean over members: test accuracy {100 * mean:.2f} %" in printed
    assert "member" in printed


def test_a_large_zoo_is_not_printed_whole(tmp_path, capsys):
    network = MultiLayerPerceptron(widths=(4,), image_size=8)
    task = ZooTask(network, members=23, execution="vmap", keep="last", prior_precision=1.0)
    fit(tmp_path, task, MarginalLikelihood(burn_in=None), epochs=1)
    assert "and 6 more in layers.csv" in capsys.readouterr().out
    assert len((tmp_path / "results" / "layers.csv").read_text().splitlines()) == 47


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_other_precisions_of_training(tmp_path, precision, execution):
    task = zoo(execution=execution)
    callback, _ = fit(tmp_path, task, precision=precision, epochs=2)
    network = SmallCNN()
    state = task.population.member_state(1)
    if precision == "64-true":
        network = network.double()
        assert callback.records[-1]["log_likelihood"] != torch.tensor(callback.records[-1]["log_likelihood"]).item()
    network.load_state_dict(state)
    found = factors(network, digits().curvature_dataloader())
    assert callback.records[-1]["log_likelihood"] == pytest.approx(-found.loss_sum / 80, rel=1e-6)
