"""The schedule of the precisions, what the evidence decides, and what is left behind."""

import copy
import functools
import json
import math
import re
from collections import OrderedDict
from contextlib import nullcontext

import fits
import pytest
import torch
from fits import Given, digits
from helpers import Program, assert_refused, dead_charts, one_in, read_csv, read_rows
from pytorch_lightning import Callback, LightningModule
from torch import nn

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.curvature import (
    Evidence,
    GaussianPrior,
    factors,
    parameter_groups,
)
from lightning_sym.layers import ResidualPathways
from lightning_sym.networks import MultiLayerPerceptron, Network, RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask


def part(first: int, last: int, outputs: int) -> nn.Module:
    """Return a linear map of some of the inputs."""
    linear = nn.Linear(last - first, outputs, bias=False)
    return nn.Sequential(OrderedDict(columns=Program(lambda net, x: x[:, first:last], {}), linear=linear))


class TwoPaths(Network):
    """The sum of a linear map of the first three inputs and one of the last three."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        paths = {"signal": part(0, 3, num_classes), "noise": part(3, 6, num_classes)}
        self.layer = ResidualPathways(paths, scale=1)

    def forward(self, x):
        return self.layer(x)


def planted(likelihood="classification", samples=100):
    """Return data whose labels depend on the first three inputs alone; eight steps an epoch, each with all of them.

    Each comes twice, with the last three inputs negated, so that these do not fit the labels by chance either: about
    half of all draws would, and the evidence would rightly keep some of the path.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator)
    clean = x[:, :3] @ torch.tensor([[1.0, -2.0], [0.5, 1.0], [-1.0, 0.3]])
    noise = torch.randn(samples, 2, generator=generator)
    both = torch.cat([x, torch.cat([x[:, :3], -x[:, 3:]], dim=1)])
    if likelihood == "classification":
        return Given(both, (clean + noise).argmax(1).repeat(2), 2, repeats=8)
    return Given(both, (clean + 0.3 * noise).repeat(2, 1), 2, repeats=8)


SGD = functools.partial(torch.optim.SGD, lr=0.2)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def fit(folder, callback=None, data=None, task=None, before=(), **settings):
    """Fit a task, on planted data unless there are others, and return it and the trainer."""
    torch.manual_seed(0)
    task = task or EquivarianceTask(TwoPaths(), optimizer=SGD)
    settings = {"max_epochs": 40, "logger": MetricsCSV(folder), **settings}
    return task, fits.fit(task, data or planted(), *before, callback, folder=folder, **settings)


def learner(kind=MarginalLikelihood, **settings):
    return kind(**{"burn_in": 1, "every_n_epochs": 1, **settings})


def evidence_of(task, likelihood="classification"):
    """Return the evidence at a task's present weights, without its callback."""
    groups = parameter_groups(task.network)
    return Evidence.of(
        task.network, factors(task.network, planted(likelihood).curvature_dataloader(), likelihood), groups
    )


def test_a_prior_on_length_scales_is_learned(tmp_path):
    torch.manual_seed(0)
    network = RelaxedNetwork(["sfc", "sconv"], 2, 8, in_channels=1, learn_lengthscale=True)
    task = EquivarianceTask(network, precision=0.5, prior_on="lengthscales", optimizer=SGD)
    callback = learner(steps=3, samples=1)
    fit(tmp_path, callback, digits(), task, max_epochs=1)
    assert task.prior.log_precisions.keys() == dict(network.named_parameters()).keys()  # positions are buffers
    assert all(value != math.log(0.5) for value in task.prior.log_precisions.values())
    paths = callback.records[-1]["paths"]
    assert paths["block0.omega.conv"]["relative"] + paths["block0.omega.fc"]["relative"] == pytest.approx(1)
    assert (paths["block0.omega.conv"]["parameters"], paths["block0.omega.fc"]["parameters"]) == (1, 2)
    assert paths["block0.omega.fc"]["layer"] == "block0.omega"
    about = json.loads((tmp_path / "results" / "layers.json").read_text())
    assert about["settings"]["prior_on"] == "lengthscales"
    assert {row["path"] for row in read_csv(tmp_path / "results" / "layers.csv") if row["layer"] == "block0.omega"} == {
        "fc", "conv",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("likelihood", "granularity", "optimizer"),
    one_in(
        3,
        [
            ("classification", "per_path", ADAM),
            ("classification", "per_path", SGD),
            ("classification", "per_tensor", SGD),
            ("regression", "per_tensor", SGD),
            ("regression", "per_path", SGD),
        ],
    ),
)
def test_evidence_switches_a_useless_path_off(tmp_path, likelihood, granularity, optimizer):
    callback = MarginalLikelihood(burn_in=5, every_n_epochs=5, steps=50, lr=0.2, granularity=granularity)
    torch.manual_seed(0)
    task = EquivarianceTask(TwoPaths(), likelihood, optimizer=optimizer)
    fit(tmp_path, callback, planted(likelihood), task)
    paths = callback.records[-1]["paths"]
    assert callback.layer_types() == {"layer": "signal"}
    assert paths["layer.noise"]["relative"] < 0.05
    assert paths["layer.noise"]["precision"] > 100 * paths["layer.signal"]["precision"]
    assert paths["layer.noise"]["mean_square"] < 1e-2 * paths["layer.signal"]["mean_square"]
    if likelihood == "regression":
        assert callback.records[-1]["noise"] == pytest.approx(0.3, rel=0.15)
        assert task.prior.log_noise == pytest.approx(math.log(callback.records[-1]["noise"]))
    first, last = callback.records[0], callback.records[-1]
    assert last["log_marginal_likelihood"] > first["log_marginal_likelihood"]
    # What the callback says is what the evidence at the final weights is.
    evidence = evidence_of(task, likelihood)
    precisions = [task.prior.log_precisions[f"{name}.linear.weight"] for name in evidence.groups.names]
    total = evidence.log_marginal_likelihood(torch.tensor(precisions).double(), task.prior.log_noise) / 200
    assert last["log_marginal_likelihood"] == pytest.approx(total, rel=1e-6)
    parts = last["log_likelihood"] - last["log_determinant"] - last["scatter"]
    assert last["log_marginal_likelihood"] == pytest.approx(parts)


@pytest.mark.parametrize(
    ("burn_in", "every", "expected"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7]), (3, 2, [4, 6]), (4, 2, [4, 6]), (10, 5, []), (5, 8, []), (None, 1, [])],
)
@pytest.mark.few(3)
def test_schedule(tmp_path, capsys, burn_in, every, expected):
    seen = []

    class Spy(MarginalLikelihood):
        def on_train_epoch_end(self, trainer, pl_module):
            before = dict(pl_module.prior.log_precisions)
            super().on_train_epoch_end(trainer, pl_module)
            if pl_module.prior.log_precisions != before:
                seen.append(trainer.current_epoch + 1)

    callback = Spy(burn_in=burn_in, every_n_epochs=every, steps=3)
    never = burn_in is not None and not expected
    with pytest.warns(UserWarning, match="they will never be updated") if never else nullcontext():
        task, _ = fit(tmp_path, callback, max_epochs=7)
    assert ("not updated" in " ".join(capsys.readouterr().out.split())) == (not expected)
    assert seen == expected
    assert [record["epoch"] for record in callback.records] == [*expected, *([] if 7 in expected else [7])]
    assert (set(task.prior.log_precisions.values()) == {0.0}) == (not expected)


def test_a_cosine_brings_the_precisions_to_rest(tmp_path):
    class Watch(MarginalLikelihood):
        moved = ()

        def _update(self, trainer, number, epoch):
            before = self._optimizers[number].log_precisions.clone()
            found = super()._update(trainer, number, epoch)
            self.moved += (float((self._optimizers[number].log_precisions - before).abs().max()),)
            return found

    constant, cosine = (learner(Watch, steps=1, lr_schedule=schedule) for schedule in ("constant", "cosine"))
    for callback in (constant, cosine):
        fit(tmp_path, callback, max_epochs=4)
    ratios = [b / a for a, b in zip(constant.moved, cosine.moved, strict=True)]
    assert ratios[0] == pytest.approx((1 + math.cos(math.pi / 4)) / 2, rel=1e-6)  # the first step of Adam: of size lr
    assert ratios[3] == 0
    fit(tmp_path / "short", learner(Watch, steps=1, lr_schedule="cosine"), max_epochs=1)  # one epoch has an end, too
    with pytest.raises(ValueError, match="max_epochs, which is not set"):
        fit(tmp_path, MarginalLikelihood(lr_schedule="cosine"), max_epochs=-1)


class Break(MarginalLikelihood):
    """Has a weight that is not a number in some curvature passes."""

    def __init__(self, *epochs):
        super().__init__(burn_in=1, every_n_epochs=1)
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        weight = next(pl_module.network.parameters())
        kept = weight.detach().clone()
        if trainer.current_epoch + 1 in self.epochs:
            weight.data.fill_(math.nan)
        super().on_train_epoch_end(trainer, pl_module)
        weight.data.copy_(kept)


def test_updates_that_are_not_finite_are_skipped_and_said_once(tmp_path):
    callback = Break(2, 3, 5)
    with pytest.warns(UserWarning, match="after epoch 2 was skipped, and training continues: .*not finite") as seen:
        fit(tmp_path, callback, max_epochs=6)
    assert len([warning for warning in seen if "skipped" in str(warning.message)]) == 1
    assert [record["epoch"] for record in callback.records] == [1, 4, 6]


@pytest.mark.drawn
def test_final_weights_that_are_not_finite_leave_a_report(tmp_path):
    class Last(MarginalLikelihood):
        def on_train_end(self, trainer, pl_module):
            next(pl_module.network.parameters()).data.fill_(math.nan)
            super().on_train_end(trainer, pl_module)

    with pytest.warns(UserWarning, match="no evidence of the final weights"):
        fit(tmp_path, Last(burn_in=None, dirpath=str(tmp_path)), max_epochs=1)
    assert json.loads((tmp_path / "layers.json").read_text())["evidence"] is None


@pytest.mark.drawn
def test_what_is_left_behind(tmp_path, capsys):
    callback = MarginalLikelihood(burn_in=2, every_n_epochs=2, samples=2)
    task, trainer = fit(tmp_path, callback, max_epochs=5)
    results = tmp_path / "results"
    for name in ("relative_effective_parameters.png", "evidence.png"):
        assert (results / name).stat().st_size > 5000
    rows = read_csv(results / "layers.csv")
    assert [(row["layer"], row["path"], row["type"]) for row in rows] == [
        ("layer", "signal", "signal"), ("layer", "noise", "signal"),
    ]  # fmt: skip
    for row in rows:
        values = callback.records[-1]["paths"][f"{row['layer']}.{row['path']}"]
        assert float(row["normalised"]) == pytest.approx(values["effective"] / 6)
        log_precision = task.prior.log_precisions[f"layer.{row['path']}.linear.weight"]
        assert float(row["precision"]) == pytest.approx(math.exp(log_precision))
        weight = task.network.get_submodule(f"layer.{row['path']}.linear").weight
        assert float(row["mean_square"]) == pytest.approx(float(weight.detach().double().square().mean()))
    assert sum(float(row["relative"]) for row in rows) == pytest.approx(1)
    about = json.loads((results / "layers.json").read_text())
    assert about["types"] == {"layer": "signal"}
    assert about["settings"]["samples"] == 2
    tested = task.evaluate(planted().test_dataloader())
    assert about["test"]["accuracy"] == pytest.approx(tested["accuracy"])
    assert [row["epoch"] for row in read_rows(results / "evidence")] == [2, 4, 5]
    logged = [row for row in read_csv(tmp_path / "metrics.csv") if row["evidence/log_marginal_likelihood"]]
    assert len(logged) == 2
    assert dead_charts(callback.charts, logged[0]) == []
    for name in ("precision", "effective", "normalised", "relative", "mean_square"):
        found = float(logged[1][f"details/{name}/layer.noise"])
        assert found == pytest.approx(callback.records[1]["paths"]["layer.noise"][name])
    assert float(logged[0]["evidence/seconds"]) > 0
    assert "evidence/scatter" in trainer.callback_metrics
    printed = capsys.readouterr().out
    assert "signal" in printed
    assert "test accuracy" in printed


def test_an_ordinary_network_has_layers_without_types(tmp_path, capsys):
    callback = learner(dirpath=str(tmp_path))
    task = EquivarianceTask(MultiLayerPerceptron(widths=(4,), image_size=8), optimizer=SGD)
    fit(tmp_path, callback, digits(), task, max_epochs=2)
    assert callback.layer_types() == {}
    assert not (tmp_path / "relative_effective_parameters.png").exists()
    assert len((tmp_path / "layers.csv").read_text().splitlines()) == 3
    assert "normalised" in capsys.readouterr().out


def test_a_trained_task_goes_on_from_its_precisions(tmp_path):
    first = learner()
    task, _ = fit(tmp_path / "1", first, max_epochs=2)
    before = dict(task.prior.log_precisions)
    again = MarginalLikelihood(burn_in=None)
    fit(tmp_path / "2", again, max_epochs=1, task=task)
    assert task.prior.log_precisions == before
    shown = {path: values["precision"] for path, values in again.records[-1]["paths"].items()}
    assert shown["layer.noise"] == pytest.approx(math.exp(before["layer.noise.linear.weight"]))


class Own(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = TwoPaths()

    def configure_optimizers(self):
        return SGD(self.network.parameters())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])


def test_tasks_that_have_no_prior_or_do_not_start_it_are_refused(tmp_path):
    task = Own()
    assert_refused(lambda: fit(tmp_path, learner(), task=task), says="learns the precisions of", error=TypeError)
    task.prior = GaussianPrior(task.network)
    assert_refused(lambda: fit(tmp_path, learner(), task=task), says="Own does not train under its prior; call")
    task.prior = GaussianPrior(task.network, members=[0, 1])
    assert_refused(lambda: fit(tmp_path, learner(), task=task), says="Own has no member_parallel and", error=TypeError)


def test_a_task_of_ones_own_learns_what_ours_does(tmp_path):
    class Started(Own):
        def __init__(self):
            super().__init__()
            self.prior = GaussianPrior(self.network)

        def on_fit_start(self):
            self.prior.start(self.trainer.optimizers, self.trainer.datamodule)

    torch.manual_seed(0)
    own, callback, ours = Started(), learner(), learner()
    fit(tmp_path, callback, task=own, max_epochs=5)
    task, _ = fit(tmp_path, ours, max_epochs=5)
    assert own.prior.log_precisions == task.prior.log_precisions
    assert len(set(own.prior.log_precisions.values())) == 2
    assert callback.records[-1]["paths"] == ours.records[-1]["paths"]
    assert read_rows(tmp_path / "results" / "evidence")[-1]["epoch"] == 5


def test_a_state_is_taken_over_by_what_it_is_of_and_refused_by_others(tmp_path):
    callback = learner()
    task, trainer = fit(tmp_path, callback, max_epochs=1)
    state = callback.state_dict()
    same, other = learner(), MarginalLikelihood(burn_in=1, every_n_epochs=1, granularity="per_tensor")
    for one in (same, other):
        one.setup(trainer, task, "fit")
    same.load_state_dict(state)
    assert same.records == callback.records
    assert_refused(other.load_state_dict, state, says="The checkpoint has precisions per_path but this run has them")
    of_a_zoo = {**state, "optimizers": {"member-0001": state["optimizers"][""]}}
    assert_refused(same.load_state_dict, of_a_zoo, says="The checkpoint has precisions of other networks than this run")


@pytest.mark.parametrize(("classes", "named"), [(11, "9, 10);"), (12, "9, 10, ...);")])
def test_the_first_ten_classes_that_never_occur_are_named(classes, named):
    data = Given(torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64), classes)
    with pytest.warns(UserWarning, match=rf"{classes - 1} of {classes} classes never occur .*{re.escape(named)}"):
        GaussianPrior(TwoPaths()).start([], data)


def test_a_test_of_a_checkpoint_leaves_what_the_fit_found(tmp_path):
    callback = learner(dirpath=str(tmp_path))
    data = planted()

    class Save(Callback):
        def on_train_epoch_end(self, trainer, task):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    task, trainer = fit(tmp_path, callback, data, max_epochs=3, before=[Save()])
    precisions = callback.state_dict()["optimizers"][""]["log_precisions"]
    trainer.test(task, data, ckpt_path=tmp_path / "early.ckpt", verbose=False, weights_only=True)
    assert [record["epoch"] for record in callback.records] == [1, 2, 3]
    assert torch.equal(callback.state_dict()["optimizers"][""]["log_precisions"], precisions)


def test_a_run_that_ends_in_an_epoch_ends_with_its_update(tmp_path):
    callback = learner()
    fit(tmp_path, callback, max_epochs=5, max_steps=11)  # of 8 in an epoch
    assert [record["epoch"] for record in callback.records] == [1, 2]


def test_the_engine_is_backpack_where_it_handles_the_network_with_the_same_numbers(tmp_path):
    class Skips(TwoPaths):
        def forward(self, x):
            return self.layer(x) + 0.0

    for network, expected in ((TwoPaths(), "backpack"), (Skips(), "autograd")):
        found = {}
        for engine in ("auto", "autograd"):
            folder = tmp_path / expected / engine
            callback, task = learner(engine=engine, steps=2), EquivarianceTask(copy.deepcopy(network), optimizer=SGD)
            fit(folder, callback, task=task, max_epochs=1)
            about = json.loads((folder / "results" / "layers.json").read_text())
            assert about["settings"]["engine"] == (expected if engine == "auto" else engine)
            found[engine] = callback.records[-1]["log_marginal_likelihood"]
        assert found["auto"] == pytest.approx(found["autograd"], rel=1e-6)
