"""FastGeometricEnsemble: when snapshots are taken, at which learning rate, what is left of them, and a resume."""

import functools
from pathlib import Path

import pytest
import torch
from experiments import Validated
from fits import Interrupt, digits, fit, quiet_trainer, saving
from helpers import assert_refused, assert_same, printed, read_csv, read_rows, refused, write_zoo
from pytorch_lightning import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sym.callbacks import FastGeometricEnsemble
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.connectivity import average
from lightning_sym.ensembles import cyclical_learning_rate, ensemble_scores, log_probabilities
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo

SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)


class Rates(Callback):
    """Notes the learning rate of every step, by what the optimizer is given."""

    def __init__(self) -> None:
        self.rates = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates += [group["lr"] for group in optimizer.param_groups]


class Scheduled(Validated):
    """Its learning rate falls to a tenth with each epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
        super().__init__(nn.Sequential(nn.Flatten(), *layers), lr=0.5)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.rand(1, 8, 8), 0


def loader(shuffle=False, size=20):
    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(80, 1, 8, 8, generator=draws), torch.randint(10, (80,), generator=draws))
    return DataLoader(data, size, shuffle=shuffle)


def fit_plain(folder: Path, *callbacks, loaders=None, **settings):
    task = Scheduled()
    trainer = quiet_trainer(*callbacks, folder=folder, **{"max_epochs": 12, **settings})
    trainer.fit(task, loader(shuffle=True), loader() if loaders is None else loaders)
    return task


def zoo_task(**settings) -> ZooTask:
    network = MyrtleCNN(2, in_channels=1, image_size=8)
    return ZooTask(network, **{"members": 2, "optimizer": SGD, "keep": "last", **settings})


# ---- when


def test_snapshots_after_the_epochs_of_the_paper_and_the_learning_rate_in_between(tmp_path):
    rates, ensemble = Rates(), FastGeometricEnsemble(0.2, 0.001, cycle_epochs=4, points=2)
    fit_plain(tmp_path, rates, ensemble)
    assert [one["epoch"] for one in ensemble.snapshots] == [0, 1, 5, 9]  # the first one is the start
    assert [one["step"] for one in ensemble.snapshots] == [0, 8, 24, 40]
    assert rates.rates == [cyclical_learning_rate(step, 16, 0.2, 0.001) for step in range(48)]
    assert ensemble.learning_rate(24) == pytest.approx(0.001, abs=1e-12)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [8, 11, 17, 23]), (2, [4, 7, 13])])
def test_cycles_in_steps_of_the_optimizer_after_a_usual_beginning(tmp_path, accumulate, steps):
    rates, ensemble = Rates(), FastGeometricEnsemble(0.2, 0.001, cycle_steps=6, start_epoch=2, points=2)
    fit_plain(tmp_path, rates, ensemble, max_epochs=6 if accumulate == 1 else 8, accumulate_grad_batches=accumulate)
    assert [one["step"] for one in ensemble.snapshots] == steps
    first = steps[0]
    usual = [0.5, 0.05]
    assert rates.rates[:first] == pytest.approx([rate for rate in usual for _ in range(first // 2)])
    assert rates.rates[first:] == [
        cyclical_learning_rate(step, 6, 0.2, 0.001) for step in range(len(rates.rates) - first)
    ]


# ---- what is left


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensemble")
    ensemble = FastGeometricEnsemble(0.1, 0.001, cycle_epochs=2, points=3)
    task, data = zoo_task(), digits()
    fit(task, data, ensemble, folder=folder, max_epochs=4, logger=MetricsCSV(folder))
    return folder, task, data, ensemble


def test_zoos_of_snapshots_and_of_their_means(run):
    folder, _, data, ensemble = run
    for number in (0, 1):
        zoo = ModelZoo.open(folder / "snapshots" / f"member-000{number}")
        assert zoo.numbers == [0, 1, 2]
        for place, snapshot in enumerate(ensemble.snapshots):
            for name, value in zoo.load(place).named_parameters():
                torch.testing.assert_close(value, snapshot["states"][number][name], rtol=0, atol=0)
        mean = average([zoo.load(1), zoo.load(2)])
        found = ModelZoo.open(folder / "averages").load(number)
        torch.testing.assert_close(dict(found.named_parameters()), dict(mean.named_parameters()), rtol=0, atol=1e-7)
        # Statistics are those of its own weights: measured again they are the same, and not the means.
        images = [data.normalize(data.split_tensors("train").images)]
        again, labels = log_probabilities([found], data.test_dataloader())
        fresh, _ = log_probabilities([found], data.test_dataloader(), recalibration_data=images)
        torch.testing.assert_close(again, fresh, rtol=1e-4, atol=1e-4)
        stale, _ = log_probabilities([mean], data.test_dataloader())
        assert (stale - again).abs().max() > 1e-4
        record = ModelZoo.open(folder / "averages").member(number)
        assert record.metric("test", "loss") == pytest.approx(
            float(ensemble_scores(again, labels).alone.loss), rel=1e-4
        )


def test_tables_say_what_the_networks_in_the_zoos_do(run):
    folder, _, data, ensemble = run
    zoos = [ModelZoo.open(folder / "snapshots" / f"member-000{number}") for number in (0, 1)]
    networks = [zoo.load(place) for zoo in zoos for place in (1, 2)]
    scores = ensemble_scores(*log_probabilities(networks, data.test_dataloader()))
    rows = {row["ensemble"]: row for row in read_rows(folder / "results" / "ensembles")}
    assert len(rows) == 9
    together = rows["all/snapshots"]
    assert together["members"] == 4
    for name in ("accuracy", "loss", "brier", "calibration_error"):
        assert together[name] == pytest.approx(float(getattr(scores.together, name)[-1]), rel=1e-5, abs=1e-7)
    assert together["ambiguity"] == pytest.approx(together["mean_loss"] - together["loss"], abs=1e-12)
    added = [row for row in read_rows(folder / "results" / "added") if row["ensemble"] == "member-0001/snapshots"]
    assert [row["members"] for row in added] == [1, 2]
    assert added[0]["loss"] == pytest.approx(added[0]["alone_loss"], abs=1e-12)
    lines = read_rows(folder / "results" / "snapshots")
    assert [(row["network"], row["snapshot"], row["epoch"]) for row in lines[3:]] == [(1, 0, 0), (1, 1, 0), (1, 2, 2)]
    start, first, second = (
        torch.cat([p.flatten() for p in zoos[1].load(place).parameters()]).detach() for place in range(3)
    )
    assert lines[5]["distance_from_previous"] == pytest.approx(float((second - first).norm()), rel=1e-4)
    assert lines[5]["distance_from_start"] == pytest.approx(float((second - start).norm()), rel=1e-4)
    logged = [row["ensemble/loss/all_snapshots"] for row in read_csv(folder / "metrics.csv")][-1]
    assert float(logged) == pytest.approx(together["loss"])
    assert (folder / "results" / "ensembles.png").stat().st_size > 10_000
    said = printed(lambda console: console.print(ensemble.results.shown))
    assert "…" not in said
    assert "all snapshots" in said


def test_snapshots_of_a_module_of_ones_own(tmp_path):
    ensemble = FastGeometricEnsemble(0.2, 0.001, cycle_epochs=4, points=2)
    task = fit_plain(tmp_path, ensemble)
    zoo = ModelZoo.open(tmp_path / "snapshots" / "member-0000")
    task.network.load_state_dict(zoo.state(3))
    scores = ensemble_scores(*log_probabilities([task.network], loader()))
    (row,) = [row for row in read_rows(tmp_path / "results" / "added")
              if row["ensemble"] == "member-0000/snapshots" and row["members"] == 3]  # fmt: skip
    assert row["alone_loss"] == pytest.approx(float(scores.alone.loss), rel=1e-5)


class Poison(Callback):
    """Makes weights not finite, late in the fit."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            with torch.no_grad():
                next(pl_module.network.parameters()).fill_(torch.nan)


def test_a_fit_that_diverges_ends_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="leaves out network 0 with weights that are not finite"):
        fit_plain(tmp_path, FastGeometricEnsemble(0.2, 0.001, cycle_epochs=2, points=2), Poison(), max_epochs=4)
    assert not (tmp_path / "results" / "ensembles.csv").exists()


# ---- going on


def once(folder, *callbacks, resumed=None, **settings):
    settings = {"lowest": 0.001, **settings}
    ensemble = FastGeometricEnsemble(0.1, cycle_steps=4, start_epoch=1, points=2, **settings)
    last = saving(folder, every_n_train_steps=1)
    fit(zoo_task(), digits(), *callbacks, ensemble, last, folder=folder, max_epochs=3, ckpt_path=resumed)
    return ensemble


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, once(folder)


@pytest.mark.parametrize("place", ["1 3", "end"])
def test_resumed_run_leaves_what_an_uninterrupted_one_leaves(tmp_path, whole, place):
    folder, expected = whole
    assert_refused(lambda: once(tmp_path / "first", Interrupt(place)), says="interrupted", error=RuntimeError)
    second = once(tmp_path / "second", resumed=tmp_path / "first" / "last.ckpt")
    assert len(expected.snapshots) == 4
    assert_same(expected.snapshots, second.snapshots)
    for table in ("ensembles", "added", "snapshots"):
        rows, others = (read_rows(path / "results" / table) for path in (folder, tmp_path / "second"))
        assert_same(rows, others)


def test_checkpoint_of_another_schedule_is_refused(tmp_path, whole):
    assert_refused(once, tmp_path, resumed=whole[0] / "last.ckpt", lowest=0.01, says=["'lowest': 0.001", "0.01"])


def test_training_goes_on_with_the_members_of_a_zoo(tmp_path):
    networks = [MyrtleCNN(2, in_channels=1, image_size=8).fresh(number + 7) for number in range(2)]
    zoo = write_zoo(tmp_path / "zoo", networks, digits())
    ensemble = FastGeometricEnsemble(0.1, 0.001, cycle_steps=4, points=2)
    task = zoo_task(initial=str(zoo))
    fit(task, digits(), ensemble, folder=tmp_path)
    assert all(part.training for part in task.population.modules())  # a zoo's networks are in evaluation mode
    for number, network in enumerate(networks):
        assert_same(dict(network.state_dict()), ensemble.snapshots[0]["states"][number])
    assert_refused(
        fit,
        ZooTask(MultiLayerPerceptron(widths=(3,), image_size=8), initial=str(zoo)),
        digits(),
        says="give the architecture of the zoo",
    )


# ---- refusals


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(FastGeometricEnsemble, **bad) for bad in ({"highest": 0.0}, {"lowest": -0.1}, {"cycle_epochs": 3})),
        *(refused(FastGeometricEnsemble, **bad) for bad in ({"cycle_steps": 5}, {"cycle_steps": 0}, {"bins": 0})),
        *(refused(FastGeometricEnsemble, **bad) for bad in ({"start_epoch": -1}, {"points": 1}, {"train_batches": 0})),
        refused(FastGeometricEnsemble, 0.1, 0.2, says="lowest"),
    ],
)
def test_arguments_out_of_range_are_refused(refusal):
    refusal()


def test_fits_that_cannot_be_an_ensemble_are_refused(tmp_path):
    short = FastGeometricEnsemble(cycle_epochs=40)
    assert_refused(fit_plain, tmp_path, short, says=["80 steps", "raise max_epochs"])
    late = FastGeometricEnsemble(cycle_epochs=2, start_epoch=12)
    assert_refused(fit_plain, tmp_path, late, says="raise max_epochs")
    elsewhere = FastGeometricEnsemble(network="model")
    assert_refused(fit_plain, tmp_path, elsewhere, says='network="network"')
    assert_refused(
        fit_plain, tmp_path, FastGeometricEnsemble(), loaders=DataLoader(Endless(), 4), says="data to score on"
    )
    values, rates = DataLoader(TensorDataset(torch.rand(8, 1, 8, 8), torch.rand(8))), Rates()
    says = "needs classifiers with logits"
    settings = {"loaders": values, "num_sanity_val_steps": 0}
    assert_refused(fit_plain, tmp_path, FastGeometricEnsemble(), rates, **settings, says=says)
    assert not rates.rates  # before training
    squares = ZooTask(MultiLayerPerceptron(image_size=8), loss=F.mse_loss)
    assert_refused(fit, squares, digits(), FastGeometricEnsemble(), says="scores classifiers")
