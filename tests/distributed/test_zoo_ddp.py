"""One zoo from two processes: the data shared out, or the members."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MyrtleCNN
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_scenarios("zoo_scenarios.py", folder)
    return folder


@pytest.fixture(scope="module")
def errors(runs) -> dict[str, str]:
    return json.loads((runs / "errors.json").read_text())


def states(path: Path) -> dict[int, dict[str, Tensor]]:
    zoo = ModelZoo.open(path / "zoo")
    assert zoo.verify() == {}
    return {number: zoo.state(number) for number in zoo.numbers}


def metrics(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(path: Path) -> dict:
    return torch.load(path / "last.ckpt", weights_only=True)


def assert_same(a: dict[int, dict[str, Tensor]], b: dict[int, dict[str, Tensor]]) -> None:
    assert a.keys() == b.keys()
    for number in a:
        assert a[number].keys() == b[number].keys()
        for name in a[number]:
            assert torch.equal(a[number][name], b[number][name]), (number, name)


def test_only_what_must_fail_failed(errors):
    expected = {"too few members", "part loop", "part vmap", "other world", "other placement"}
    assert set(errors) == {*expected, "one image", "data 2, other architecture"}, errors


# ---- the data shared out


def test_two_processes_are_one_with_twice_the_batch(runs):
    one, two = states(runs / "data 1"), states(runs / "data 2")
    for number in range(3):
        for name, value in one[number].items():
            torch.testing.assert_close(two[number][name], value, atol=1e-5, rtol=1e-5)


def test_metrics_count_every_image_once(runs):
    """81 validation images on two processes: no padding, nothing twice."""
    one, two = metrics(runs / "data 1"), metrics(runs / "data 2")
    assert len(one) == len(two) == 2
    for row, other in zip(one, two, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if name.startswith("val/accuracy/member"):
                assert float(value) * 81 == pytest.approx(round(float(value) * 81), abs=1e-6)
            assert float(other[name]) == pytest.approx(float(value), abs=1e-5), name


def test_running_statistics_are_the_mean_over_processes(runs):
    """Each process normalises its own 16 images; at the end of an epoch the running statistics are averaged."""
    data = DigitsDataModule(batch_size=32, max_samples=81, shift=1)
    data.setup()
    found = states(runs / "data 2 norm")
    for number in range(3):
        ranks = [MyrtleCNN(width=2, in_channels=1, image_size=8).fresh(number) for _ in range(2)]
        optimizers = [torch.optim.SGD(rank.parameters(), lr=0.05, momentum=0.9) for rank in ranks]
        loader = data._loader("train", batch_size=32, seeds=number, shift=1, drop_last=True)
        for epoch in range(2):
            loader.set_epoch(epoch)
            for images, labels in loader:
                for index, rank in enumerate(ranks):
                    share = slice(16 * index, 16 * (index + 1))
                    rank.zero_grad()
                    nn.functional.cross_entropy(rank(images[share]), labels[share]).backward()
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
            torch.testing.assert_close(found[number][name], value, atol=1e-5, rtol=1e-5)


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
        a, b = states(one), states(two)
        for number in range(3):
            for name, value in a[number].items():
                torch.testing.assert_close(b[number][name], value, atol=1e-5, rtol=1e-5)
    for row, other in zip(metrics(one), metrics(two), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert float(other[name]) == pytest.approx(float(value), abs=1e-5), name


def test_one_zoo_with_one_manifest(runs):
    folder = runs / "members 2 loop" / "zoo"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [entry["number"] for entry in manifest["members"]] == [0, 1, 2]
    assert manifest["members"][1]["training"]["world_size"] == 2
    assert manifest["members"][1]["training"]["strategy"] == "MemberParallelStrategy"
    assert sorted(path.name for path in folder.glob("*.json")) == ["manifest.json"]


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_checkpoint_holds_all_members(runs, execution):
    one, two = checkpoint(runs / f"members 1 {execution}"), checkpoint(runs / f"members 2 {execution}")
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, atol=1e-5, rtol=1e-5)
    assert sorted(two["population"]["kept"]) == [0, 1, 2]
    assert len(two["optimizer_states"][0]["ranks"]) == 2


def test_table_has_all_members(runs):
    with (runs / "members 2 loop" / "results" / "members.csv").open(newline="") as file:
        two = list(csv.DictReader(file))
    with (runs / "members 1 loop" / "results" / "members.csv").open(newline="") as file:
        assert two == list(csv.DictReader(file))


def test_member_stopped_on_another_process_is_reported(runs):
    """Member 1 lives on process 1; the report is written by process 0."""
    rows = json.loads((runs / "members 2 diverging" / "results" / "members.json").read_text())["rows"]
    assert [row["stopped"] for row in rows] == ["", "its training loss is not finite", ""]
    assert ModelZoo.open(runs / "members 2 diverging" / "zoo").numbers == [0, 2]
    assert list(checkpoint(runs / "members 2 diverging")["population"]["stopped"]) == [1]


def test_more_processes_than_members(errors):
    assert (
        "1 member(s) cannot be placed on 2 processes with strategy ddp_members; raise members"
        in errors["too few members"]
    )


def test_fewer_validation_images_than_processes(errors):
    """The process without images would not validate, and the other would wait for it."""
    assert "There are fewer validation images than processes; raise val_fraction" in errors["one image"]


def test_zoo_of_another_architecture_is_refused_on_all_processes(errors):
    assert "and this run trains lightning_sym.networks.MyrtleCNN" in errors["data 2, other architecture"]


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_resumed_is_uninterrupted(runs, execution):
    whole, resumed = runs / f"whole {execution}", runs / f"part {execution} resumed"
    assert not (runs / f"part {execution}" / "zoo" / "manifest.json").exists()
    assert_same(states(resumed), states(whole))
    assert metrics(resumed) == metrics(whole)[2:]


@pytest.mark.parametrize("name", ["other world", "other placement"])
def test_resuming_with_another_placement_is_refused(errors, name):
    written, now = (2, 1) if name == "other world" else (1, 2)
    assert (
        f"The members of the checkpoint were placed on {written} process(es) and those of this run on {now}; "
        "resume with the same strategy and number of processes." in errors[name]
    )


def test_testing_gives_the_same_numbers_on_any_placement(runs):
    one, two, data = (json.loads((runs / f"test {name}.json").read_text()) for name in ("1", "2", "2 data"))
    assert 0 < one["test/accuracy"] < 1
    zoo = ModelZoo.open(runs / "members 2 loop" / "zoo")
    assert one["test/accuracy"] == pytest.approx(zoo.summary()["metrics"]["test"]["accuracy"]["mean"])
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=1e-6)
        assert data[name] == pytest.approx(value, abs=1e-6)
