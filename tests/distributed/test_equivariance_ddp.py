"""Precisions learned by two and three processes are those of one, and the same on all to the last bit."""

import functools
import json
import math

import pytest
import torch
from experiments import SmallCNN
from fits import digits
from helpers import assert_same, read_csv
from pytorch_lightning import Callback

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.datamodules import Quadrant
from lightning_sym.networks import RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask, ZooTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# How many processes do what one does too.
PROCESSES = {"same weights": 3, "trained": 2, "zoo ddp": 2, "zoo members": 2}
TERMS = ("log_marginal_likelihood", "log_likelihood", "log_determinant", "scatter")
SAMPLES = 83  # not divisible by 2 or 3


class Leave(Callback):
    """Writes down what every rank holds when training has ended."""

    def on_train_end(self, trainer, task):
        marginal = next(callback for callback in trainer.callbacks if isinstance(callback, MarginalLikelihood))
        several = isinstance(task, ZooTask)
        numbers = task.population.numbers if several else [None]
        state = {
            "records": [{k: v for k, v in record.items() if k != "seconds"} for record in marginal.records],
            "weights": {n: task.population.member_state(n) if several else task.network.state_dict() for n in numbers},
            "log_precisions": {number: own.log_precisions for number, own in task.prior.members.items()},
            "optimizers": marginal.state_dict()["optimizers"],
            "samples": task.prior.samples,
        }
        torch.save(state, f"{trainer.default_root_dir}/rank {trainer.global_rank}.pt")


class Broken(MarginalLikelihood):
    """The last rank has a weight that is not a number in each pass."""

    def on_train_epoch_end(self, trainer, pl_module):
        weight = next(pl_module.network.parameters())
        if trainer.global_rank == trainer.world_size - 1:
            weight.data.view(-1)[0] = math.nan
        super().on_train_epoch_end(trainer, pl_module)


def scenarios(run):
    def fit(name, task, data, kind=MarginalLikelihood, samples=None, **settings):
        folder = run.folder / name
        callback = kind(burn_in=1, every_n_epochs=1, steps=8, samples=samples, dirpath=str(folder / "results"))
        settings = {"max_epochs": 2, "logger": MetricsCSV(folder), **settings}
        run.fit(name, task, data, callback, Leave(), **settings)

    # Without steps of the weights (and without their prior, which acts with the learning rate) they stay the same.
    def one(name, processes, lr=0.0, batch_size=10, **settings):
        torch.manual_seed(0)
        sgd = functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
        task = EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1), optimizer=sgd)
        data = digits(batch_size=batch_size, max_samples=SAMPLES, transforms=[Quadrant("digit")])
        fit(f"{name} {processes}", task, data, processes=processes, **settings)

    def zoo(name, processes, lr=0.0, norm=False, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
        task = ZooTask(SmallCNN(norm), members=3, keep="last", optimizer=sgd, prior_precision=1.0)
        fit(f"{name} {processes}", task, digits(batch_size=10, max_samples=SAMPLES), processes=processes, **settings)

    zoo("zoo norm ddp", 2, lr=0.02, norm=True)
    one("monte carlo", 2, samples=2)
    one("broken", 2, kind=Broken, max_epochs=3, fails="3 updates of the precisions in a row failed")
    # One process comes last: a process that has taken gradients cannot fork.
    for alone in (False, True):
        count = {name: 1 if alone else processes for name, processes in PROCESSES.items()}
        one("same weights", count["same weights"])
        one("trained", count["trained"], lr=0.02, batch_size=24 // count["trained"])
        zoo("zoo ddp", count["zoo ddp"])
        zoo("zoo members", count["zoo members"], strategy="ddp_members_fork", lr=0.02, norm=True)


def left(folder, rank=0):
    return torch.load(folder / f"rank {rank}.pt", weights_only=True)


def assert_same_records(mine, theirs, tolerance):
    """Compare evidence, precisions and effective parameters of two runs, after every update."""
    assert [record["epoch"] for record in mine] == [record["epoch"] for record in theirs]
    assert {record["epoch"] for record in mine} == {1, 2}
    for one, other in zip(mine, theirs, strict=True):
        assert one["samples"] == other["samples"] == SAMPLES
        assert one.get("member") == other.get("member")
        for name in TERMS:
            assert other[name] == pytest.approx(one[name], rel=tolerance), name
        for path, values in one["paths"].items():
            numbers = {name: value for name, value in values.items() if name != "layer"}
            found = {name: other["paths"][path][name] for name in numbers}
            assert found == pytest.approx(numbers, rel=tolerance, abs=0), path


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("same weights", 1e-6),  # not trained, as gradients are summed in another order
        ("trained", 1e-4),
        ("zoo ddp", 1e-6),  # not trained
        ("zoo members", 1e-5),  # with batch norms; batches of a member are the same for any number of processes
    ],
)
def test_several_processes_learn_what_one_does(runs, name, tolerance):
    processes = PROCESSES[name]
    one, several = left(runs / f"{name} 1"), left(runs / f"{name} {processes}")
    assert one["samples"] == several["samples"] == SAMPLES
    assert_same_records(one["records"], several["records"], tolerance)
    for number, state in one["weights"].items():
        theirs = (
            left(runs / f"{name} {processes}", number % processes)["weights"]
            if "members" in name
            else several["weights"]
        )
        for key, value in state.items():
            close = {"rtol": 0, "atol": 0} if tolerance == 1e-6 else {"rtol": tolerance, "atol": 1e-6}
            torch.testing.assert_close(theirs[number][key], value, **close)
    for number, found in one["log_precisions"].items():
        for key, value in found.items():  # absolutely: relative, of the precisions
            assert several["log_precisions"][number][key] == pytest.approx(value, abs=tolerance)
            assert value != 0
    values = [record["log_marginal_likelihood"] for record in one["records"]]
    assert len(set(values)) == len(values) == 2 * len(one["log_precisions"])


def test_training_changes_weights(runs):
    """Otherwise the comparison above would say little."""
    same, trained = (left(runs / f"{name} 1")["weights"][None] for name in ("same weights", "trained"))
    assert any(not torch.equal(value, same[name]) for name, value in trained.items())


ONE = ["same weights 3", "trained 2", "monte carlo 2"]
ZOO = ["zoo ddp 2", "zoo members 2", "zoo norm ddp 2"]


@pytest.mark.parametrize("name", ONE + ZOO)
def test_ranks_learn_the_same_precisions_to_the_last_bit(runs, name):
    first, *others = (left(runs / name, rank) for rank in range(int(name[-1])))
    assert list(first["log_precisions"]) == ([0, 1, 2] if name in ZOO else [None])
    same = ["records", "log_precisions", "optimizers", *(["weights"] if "members" not in name else [])]
    for other in others:
        assert_same({key: other[key] for key in same}, {key: first[key] for key in same})


def test_reports_are_those_of_one_process(runs):
    results = [runs / f"same weights {processes}" / "results" for processes in (1, 3)]
    tables = [read_csv(folder / "layers.csv") for folder in results]
    assert len(tables[0]) == len(tables[1]) == 14
    for mine, theirs in zip(*tables, strict=True):
        assert (theirs["layer"], theirs["path"], theirs["type"]) == (mine["layer"], mine["path"], mine["type"])
        assert float(theirs["relative"]) == pytest.approx(float(mine["relative"]), rel=1e-5)
    tested = [json.loads((folder / "layers.json").read_text())["test"] for folder in results]
    assert tested[1]["accuracy"] == tested[0]["accuracy"]
    assert tested[1]["loss"] == pytest.approx(tested[0]["loss"], rel=1e-6)
