"""Precisions learned by two and three processes are those of one, and the same on all to the last bit."""

import csv
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ddp

TERMS = ("log_marginal_likelihood", "log_likelihood", "log_determinant", "scatter")


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("equivariance")
    run_scenarios("equivariance_scenarios.py", folder)
    return folder


def left(folder: Path, rank: int = 0) -> dict:
    return torch.load(folder / f"rank {rank}.pt", weights_only=True)


def test_only_what_must_fail_failed(runs):
    errors = json.loads((runs / "errors.json").read_text())
    assert set(errors) == {"broken 2"}, errors
    assert "3 updates of the precisions in a row failed" in errors["broken 2"]


def assert_same_records(mine: list[dict], theirs: list[dict], tolerance: float) -> None:
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
    tables = []
    for processes in (1, 3):
        with (runs / f"same weights {processes}" / "results" / "layers.csv").open(newline="") as opened:
            tables.append(list(csv.DictReader(opened)))
    assert len(tables[0]) == len(tables[1]) == 14
    for mine, theirs in zip(*tables, strict=True):
        assert (theirs["layer"], theirs["path"], theirs["type"]) == (mine["layer"], mine["path"], mine["type"])
        assert float(theirs["relative"]) == pytest.approx(float(mine["relative"]), rel=1e-5)
    tested = [
        json.loads((runs / f"same weights {processes}" / "results" / "layers.json").read_text())["test"]
        for processes in (1, 3)
    ]
    assert tested[1]["accuracy"] == tested[0]["accuracy"]
    assert tested[1]["loss"] == pytest.approx(tested[0]["loss"], rel=1e-6)


def of_member(records: list[dict], number: int) -> list[dict]:
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
