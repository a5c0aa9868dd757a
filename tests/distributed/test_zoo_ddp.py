"""One zoo from two processes: the data shared out, or the members; see ``conformance`` for what all tasks do."""

import functools
import json

import pytest
import torch
from fits import Interrupt, Poison, digits, quiet_trainer
from helpers import assert_same, read_csv, read_rows
from pytorch_lightning import Callback
from torch import nn

from lightning_sym.callbacks import MarginalLikelihood, ZooExport, ZooReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.datamodules import TensorDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import SquaredDistance, ZooTask
from lightning_sym.zoo import ModelZoo

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# Float32 gradients, added up in another order.
ROUNDING = {"atol": 1e-5, "rtol": 1e-5}
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SGD_SMALL = functools.partial(torch.optim.SGD, lr=0.005)


def myrtle():
    return MyrtleCNN(width=2, in_channels=1, image_size=8)


def images(batch_size=16):
    # 81 images in validation and test: not divisible by 2.
    return digits(batch_size=batch_size, max_samples=81, shift=1)


def values(batch_size):
    # 25 in the test, which 2 does not divide.
    inputs = torch.randn(125, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataModule((inputs, inputs.square().sum(1)), batch_size=batch_size, standardize=True)


def regressor():
    return MultiLayerPerceptron(widths=(6,), in_channels=5, image_size=1, num_classes=1)


class Gather(Callback):
    """Writes down, on every rank, what all ranks have of their members."""

    def on_train_end(self, trainer, task):
        own = {number: (number, task.population.member_state(number)) for number in task.population.numbers[::-1]}
        torch.save(task.gathered_by_member(own), f"{trainer.default_root_dir}/gathered-{trainer.global_rank}.pt")


def scenarios(run):
    def fit(name, *callbacks, network=None, data=None, task=None, folder=None, **settings):
        network = network or MultiLayerPerceptron(widths=(8,), image_size=8)
        task = ZooTask(network, **{"members": 3, "optimizer": SGD, "keep": "last", **(task or {})})
        export = ZooExport(str(run.folder / (folder or name) / "zoo"))
        settings = {"max_epochs": 2, "logger": MetricsCSV(run.folder / name), **settings}
        run.fit(name, task, data or images(), export, ZooReport(), *callbacks, **settings)

    by_data = {"processes": 2}
    by_members = {"processes": 2, "strategy": "ddp_members_fork"}
    fit("data 2", **by_data)
    fit("data 2 norm", network=myrtle(), **by_data)
    fit("data 2 diverging", Poison(1, 0), **by_data)
    for name, size, placement in (
        ("values 1", 32, {}),
        ("values 2", 16, by_data),
        ("values 2 members", 32, by_members),
    ):
        regression = {"loss": SquaredDistance(), "prior_precision": 1.0, "optimizer": SGD_SMALL}
        given = {"network": regressor(), "data": values(size), "task": regression}
        fit(name, MarginalLikelihood(burn_in=1, every_n_epochs=1), **given, **placement)
    for execution in ("loop", "vmap"):
        task = {"keep": "best", "execution": execution}
        fit(f"members 1 {execution}", network=myrtle(), task=task)
        fit(f"members 2 {execution}", Gather(), network=myrtle(), task=task, **by_members)
    fit("members 2 diverging", Poison(1, 0), **by_members)
    common = {"max_epochs": 3, "task": {"execution": "vmap"}, **by_members}  # a loop: see the tests of SymmetryMonitor
    fit("whole", **common)
    fit("part", Interrupt("2 0"), fails="RuntimeError: interrupted", **common)
    fit("part resumed", ckpt_path=run.folder / "part" / "last.ckpt", **common)

    # What is wrong on one process ends them all.
    message = "1 member(s) cannot be placed on 2 processes with strategy ddp_members; raise members"
    fit("too few members", task={"members": 1}, fails=message, **by_members)
    # The process without images would not validate, and the other would wait for it.
    message = "There are fewer validation samples than processes; raise val_fraction"
    fit("one image", data=digits(max_samples=None, val_fraction=0.0007), fails=message, **by_data)
    message = "but this run trains lightning_sym.networks.MyrtleCNN"
    fit("other architecture", network=myrtle(), folder="data 2", fails=message, **by_data)
    for written, now, placement in ((2, 1, {}), (1, 2, by_members)):
        message = (
            f"The members of the checkpoint were placed on {written} process(es) and those of this run on {now}; "
            "resume with the same strategy and number of processes."
        )
        settings = {"network": myrtle(), "task": {"keep": "best"}, "max_epochs": 3, **placement}
        checkpoint = run.folder / f"members {written} loop" / "last.ckpt"
        fit(f"placed on {now}", ckpt_path=checkpoint, fails=message, **settings)

    def test(path, devices=1, strategy="auto"):
        task = ZooTask(myrtle(), members=3, keep="best")
        checkpoint = run.folder / "members 2 loop" / "last.ckpt"
        trainer = quiet_trainer(folder=path, devices=devices, strategy=strategy)
        found = trainer.test(task, images(), ckpt_path=checkpoint, verbose=False, weights_only=True)
        (run.folder / f"{path.name}.json").write_text(json.dumps(found[0]))

    run("test 1", test)
    run("test 2", test, devices=2, strategy="ddp_members_fork")
    run("test 2 data", test, devices=2, strategy="ddp_fork")


def test_values_are_learned_with_their_evidence_as_by_one_process(runs):
    expected = states(runs / "values 1")
    rows = read_rows(runs / "values 1" / "results" / "evidence")
    for name in ("values 2", "values 2 members"):
        for number, state in states(runs / name).items():
            for key, weight in state.items():
                torch.testing.assert_close(weight, expected[number][key], **ROUNDING)
        for row, same in zip(read_rows(runs / name / "results" / "evidence"), rows, strict=True):
            assert row["samples"] == 90
            assert row["log_marginal_likelihood"] == pytest.approx(same["log_marginal_likelihood"], rel=1e-4)


def states(path):
    zoo = ModelZoo.open(path / "zoo")
    assert zoo.verify() == {}
    return {number: zoo.state(number) for number in zoo.numbers}


def checkpoint(path):
    return torch.load(path / "last.ckpt", weights_only=True)


# ---- the data shared out


def test_running_statistics_are_the_mean_over_processes(runs):
    """Each process normalises its own 16 images; at the end of an epoch the running statistics are averaged."""
    data = images(32)
    data.setup()
    found = states(runs / "data 2 norm")
    for number in range(3):
        ranks = [myrtle().fresh(number) for _ in range(2)]
        optimizers = [SGD(rank.parameters()) for rank in ranks]
        loader = data._loader("train", batch_size=32, seeds=number, shift=1, drop_last=True)
        for epoch in range(2):
            loader.set_epoch(epoch)
            for x, y in loader:
                for index, rank in enumerate(ranks):
                    share = slice(16 * index, 16 * (index + 1))
                    rank.zero_grad()
                    nn.functional.cross_entropy(rank(x[share]), y[share]).backward()
                for a, b in zip(*(rank.parameters() for rank in ranks), strict=True):
                    a.grad = (a.grad + b.grad) / 2
                    b.grad = a.grad.clone()
                for optimizer in optimizers:
                    optimizer.step()
            for a, b in zip(*(rank.buffers() for rank in ranks), strict=True):
                if a.is_floating_point():
                    mean = (a + b) / 2
                    assert not torch.equal(a, b), "the ranks must have seen different images"
                    a.copy_(mean)
                    b.copy_(mean)
        for name, value in ranks[0].state_dict().items():
            torch.testing.assert_close(found[number][name], value, **ROUNDING)


def test_stopped_member_leaves_the_others_alone(runs):
    expected = states(runs / "data 2")
    del expected[1]
    assert_same(states(runs / "data 2 diverging"), expected)


# ---- the members shared out


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_members_are_those_of_one_process(runs, execution):
    """Three members on two processes."""
    one, two = runs / f"members 1 {execution}", runs / f"members 2 {execution}"
    if execution == "loop":
        assert_same(states(two), states(one))
    else:  # a call with other members besides differs by rounding
        torch.testing.assert_close(states(two), states(one), **ROUNDING)
    for row, other in zip(read_csv(one / "metrics.csv"), read_csv(two / "metrics.csv"), strict=True):
        mine, theirs = ({name: float(v) for name, v in one.items() if v} for one in (row, other))
        assert theirs == pytest.approx(mine, abs=1e-5)


def test_every_rank_can_have_what_all_ranks_know_of_their_members(runs):
    path = runs / "members 2 loop"
    weights = checkpoint(path)["state_dict"]
    for rank in (0, 1):
        found = torch.load(path / f"gathered-{rank}.pt", weights_only=True)
        assert list(found) == [0, 1, 2]
        for number, (said, state) in found.items():
            assert said == number
            prefix = f"population.members.{number:04d}."
            assert_same(state, {name: weights[prefix + name] for name in state})


def test_one_zoo_with_one_manifest(runs):
    folder = runs / "members 2 loop" / "zoo"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [entry["number"] for entry in manifest["members"]] == [0, 1, 2]
    assert manifest["members"][1]["training"]["world_size"] == 2
    assert manifest["members"][1]["training"]["strategy"] == "MemberParallelStrategy"
    assert sorted(path.name for path in folder.glob("*.json")) == ["manifest.json"]


def test_table_has_all_members(runs):
    one, two = (read_csv(runs / f"members {processes} loop" / "results" / "members.csv") for processes in (1, 2))
    assert one == two


def test_member_stopped_on_another_process_is_reported(runs):
    """Member 1 lives on process 1; the report is written by process 0."""
    rows = read_rows(runs / "members 2 diverging" / "results" / "members")
    assert [row["stopped"] for row in rows] == ["", "its training loss is not finite", ""]
    assert ModelZoo.open(runs / "members 2 diverging" / "zoo").numbers == [0, 2]
    assert list(checkpoint(runs / "members 2 diverging")["population"]["stopped"]) == [1]


def test_resumed_zoo_of_two_processes_is_uninterrupted(runs):
    whole, resumed = runs / "whole", runs / "part resumed"
    assert not (runs / "part" / "zoo" / "manifest.json").exists()
    assert_same(states(resumed), states(whole))
    assert read_csv(resumed / "metrics.csv") == read_csv(whole / "metrics.csv")[2:]


def test_testing_gives_the_same_numbers_on_any_placement(runs):
    one, two, data = (json.loads((runs / f"test {name}.json").read_text()) for name in ("1", "2", "2 data"))
    assert 0 < one["test/accuracy"] < 1
    zoo = ModelZoo.open(runs / "members 2 loop" / "zoo")
    assert one["test/accuracy"] == pytest.approx(zoo.summary()["metrics"]["test"]["accuracy"]["mean"])
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=1e-6)
        assert data[name] == pytest.approx(value, abs=1e-6)
