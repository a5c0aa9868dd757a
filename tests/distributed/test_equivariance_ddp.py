"""Precisions learned by two and three processes are those of one, and the same on all to the last bit."""

import functools
import json
import math

import pytest
import torch
from fits import digits
from helpers import read_csv
from pytorch_lightning import Callback
from torch import nn

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.datamodules import Quadrant
from lightning_sym.networks import Network, RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask, ZooTask

pytestmark = pytest.mark.ddp

TERMS = ("log_marginal_likelihood", "log_likelihood", "log_determinant", "scatter")
SAMPLES = 83  # not divisible by 2 or 3


class Leave(Callback):
    """Writes down what every rank holds when training has ended."""

    def on_train_end(self, trainer, task):
        marginal = next(callback for callback in trainer.callbacks if isinstance(callback, MarginalLikelihood))
        state = {"records": [{k: v for k, v in record.items() if k != "seconds"} for record in marginal.records]}
        if isinstance(task, ZooTask):
            state["weights"] = {number: task.population.member_state(number) for number in task.population.numbers}
            state["log_precisions"] = {number: marginal.networks.prior(number)[0] for number in task.numbers}
            state["samples"] = marginal.networks.samples
        else:
            state["weights"] = {name: tensor.clone() for name, tensor in task.network.state_dict().items()}
            state["log_precisions"] = dict(task.log_precisions)
            state["samples"] = task.samples
            state["optimizer"] = marginal.state_dict()["optimizers"][""]
        torch.save(state, f"{trainer.default_root_dir}/rank {trainer.global_rank}.pt")


class Broken(MarginalLikelihood):
    """The last rank has a weight that is not a number in each pass."""

    def on_train_epoch_end(self, trainer, pl_module):
        weight = next(pl_module.network.parameters())
        if trainer.global_rank == trainer.world_size - 1:
            weight.data.view(-1)[0] = math.nan
        super().on_train_epoch_end(trainer, pl_module)


class SmallCNN(Network):
    """A convolution, a batch norm if wanted, and a linear map."""

    def __init__(self, norm=False, num_classes=10):
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.act = nn.ReLU()
        self.last = nn.Linear(48, num_classes)

    def forward(self, x):
        return self.last(self.act(self.norm(self.first(x))).flatten(1))


def scenarios(run):
    def fit(name, task, data, kind=MarginalLikelihood, samples=None, **settings):
        folder = run.folder / name
        callback = kind(burn_in=1, every_n_epochs=1, steps=20, samples=samples, dirpath=str(folder / "results"))
        run.fit(name, task, data, callback, Leave(), max_epochs=3, logger=MetricsCSV(folder), **settings)

    # Without steps of the weights (and without their prior, which acts with the learning rate) they stay the same.
    def one(name, processes, lr=0.0, batch_size=10, **settings):
        torch.manual_seed(0)
        sgd = functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
        task = EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1), optimizer=sgd)
        data = digits(batch_size=batch_size, max_samples=SAMPLES, transforms=[Quadrant("digit")])
        fit(f"{name} {processes}", task, data, processes=processes, **settings)

    def zoo(name, processes, lr=0.0, norm=False, **settings):
        sgd = functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
        task = ZooTask(SmallCNN(norm), members=3, keep="last", optimizer=sgd)
        fit(f"{name} {processes}", task, digits(batch_size=10, max_samples=SAMPLES), processes=processes, **settings)

    for processes in (3, 2, 1):
        one("same weights", processes)
        one("trained", processes, lr=0.02, batch_size=24 // processes)
    for processes in (3, 2, 1):
        zoo("zoo ddp", processes)
        zoo("zoo members", processes, strategy="ddp_members_fork", lr=0.02, norm=True)
    zoo("zoo norm ddp", 2, lr=0.02, norm=True)
    one("monte carlo", 2, samples=2)
    one("broken", 2, kind=Broken, fails="3 updates of the precisions in a row failed")


def left(folder, rank=0):
    return torch.load(folder / f"rank {rank}.pt", weights_only=True)


def assert_same_records(mine, theirs, tolerance):
    """Compare evidence, precisions and effective parameters of two runs, after every update."""
    assert [record["epoch"] for record in mine] == [record["epoch"] for record in theirs] == [1, 2, 3]
    for one, other in zip(mine, theirs, strict=True):
        assert one["samples"] == other["samples"] == 83
        for name in TERMS:
            assert other[name] == pytest.approx(one[name], rel=tolerance), name
        for path, values in one["paths"].items():
            numbers = {name: value for name, value in values.items() if name != "layer"}
            found = {name: other["paths"][path][name] for name in numbers}
            assert found == pytest.approx(numbers, rel=tolerance, abs=0), path


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_have_the_evidence_of_one(runs, processes):
    """At the same weights: these are not trained, as gradients are summed in another order."""
    one, several = left(runs / "same weights 1"), left(runs / f"same weights {processes}")
    assert one["samples"] == several["samples"] == 83
    for name, value in one["weights"].items():
        assert torch.equal(several["weights"][name], value)
    assert_same_records(one["records"], several["records"], 1e-6)
    for name, value in one["log_precisions"].items():
        assert several["log_precisions"][name] == pytest.approx(value, abs=1e-6)  # relative, of the precisions
        assert value != 0


@pytest.mark.parametrize("processes", [2, 3])
def test_trained_by_several_processes_is_trained_by_one_with_as_large_batches(runs, processes):
    one, several = left(runs / "trained 1"), left(runs / f"trained {processes}")
    for name, value in one["weights"].items():
        torch.testing.assert_close(several["weights"][name], value, rtol=1e-4, atol=1e-6)
    assert_same_records(one["records"], several["records"], 1e-4)
    initial = left(runs / "same weights 1")["weights"]
    assert any(not torch.equal(value, initial[name]) for name, value in one["weights"].items())


@pytest.mark.parametrize("name", ["same weights 2", "same weights 3", "trained 2", "trained 3", "monte carlo 2"])
def test_ranks_agree_to_the_last_bit(runs, name):
    first, *others = (left(runs / name, rank) for rank in range(int(name[-1])))
    for other in others:
        assert other["records"] == first["records"]
        assert other["log_precisions"] == first["log_precisions"]
        for key, value in first["weights"].items():
            assert torch.equal(other["weights"][key], value)
        adam = [state["optimizer"]["adam"]["state"][0] for state in (first, other)]
        assert all(torch.equal(adam[1][key], value) for key, value in adam[0].items())


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


def of_member(records, number):
    return [record for record in records if record["member"] == number]


@pytest.mark.parametrize("processes", [2, 3])
def test_data_of_a_zoo_are_shared_out(runs, processes):
    """Plain ddp, at the same weights."""
    one, several = left(runs / "zoo ddp 1"), left(runs / f"zoo ddp {processes}")
    assert one["samples"] == several["samples"] == 83
    for number in range(3):
        assert_same_records(of_member(one["records"], number), of_member(several["records"], number), 1e-6)
    assert len({record["log_marginal_likelihood"] for record in one["records"]}) == 9


@pytest.mark.parametrize("processes", [2, 3])
def test_members_are_shared_out(runs, processes):
    """With ddp_members, trained, with batch norms; batches of a member are the same for any number of processes."""
    one, several = left(runs / "zoo members 1"), left(runs / f"zoo members {processes}")
    assert one["samples"] == several["samples"] == 83
    for number in range(3):
        assert_same_records(of_member(one["records"], number), of_member(several["records"], number), 1e-5)
        weights = left(runs / f"zoo members {processes}", number % processes)["weights"][number]
        for name, value in one["weights"][number].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["zoo ddp 2", "zoo ddp 3", "zoo members 2", "zoo members 3", "zoo norm ddp 2"])
def test_ranks_have_the_same_precisions_of_all_members(runs, name):
    first, *others = (left(runs / name, rank) for rank in range(int(name[-1])))
    for other in others:
        assert other["records"] == first["records"]
        assert other["log_precisions"] == first["log_precisions"]
        assert first["log_precisions"].keys() == {0, 1, 2}
