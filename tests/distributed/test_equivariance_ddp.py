"""Precisions learned by two processes are those of one, and the same on both to the last bit."""

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


def test_two_processes_have_the_evidence_of_one(runs):
    one, two = left(runs / "same weights 1"), left(runs / "same weights 2")
    assert one["samples"] == two["samples"] == 81
    for name, value in one["weights"].items():
        assert torch.equal(two["weights"][name], value)
    assert [record["epoch"] for record in one["records"]] == [1, 2, 3]
    for mine, theirs in zip(one["records"], two["records"], strict=True):
        assert mine["samples"] == theirs["samples"] == 81
        for name in TERMS:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-6), name
        for path, values in mine["paths"].items():
            numbers = {name: value for name, value in values.items() if name != "layer"}
            found = {name: theirs["paths"][path][name] for name in numbers}
            assert found == pytest.approx(numbers, rel=1e-6, abs=1e-6), path
    for name, value in one["log_precisions"].items():
        # Three updates; the first steps of Adam have the size of the learning rate, however small a gradient is.
        assert two["log_precisions"][name] == pytest.approx(value, abs=1e-5)
        assert value != 0


def test_trained_by_two_processes_is_trained_by_one_with_twice_the_batch(runs):
    one, two = left(runs / "trained 1"), left(runs / "trained 2")
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(one["records"], two["records"], strict=True):
        assert theirs["log_marginal_likelihood"] == pytest.approx(mine["log_marginal_likelihood"], rel=1e-4)
    initial = left(runs / "same weights 1")["weights"]
    assert any(not torch.equal(value, initial[name]) for name, value in one["weights"].items())


@pytest.mark.parametrize("name", ["same weights 2", "trained 2", "monte carlo 2"])
def test_ranks_agree_to_the_last_bit(runs, name):
    first, second = (left(runs / name, rank) for rank in (0, 1))
    assert second["records"] == first["records"]
    assert second["log_precisions"] == first["log_precisions"]
    for key, value in first["weights"].items():
        assert torch.equal(second["weights"][key], value)
    adam = [state["optimizer"]["adam"]["state"][0] for state in (first, second)]
    assert all(torch.equal(adam[1][key], value) for key, value in adam[0].items())


def test_reports_are_those_of_one_process(runs):
    tables = []
    for processes in (1, 2):
        with (runs / f"same weights {processes}" / "results" / "layers.csv").open(newline="") as opened:
            tables.append(list(csv.DictReader(opened)))
    assert len(tables[0]) == len(tables[1]) == 14
    for mine, theirs in zip(*tables, strict=True):
        assert (theirs["layer"], theirs["path"], theirs["type"]) == (mine["layer"], mine["path"], mine["type"])
        assert float(theirs["relative"]) == pytest.approx(float(mine["relative"]), rel=1e-5)
    tested = [
        json.loads((runs / f"same weights {processes}" / "results" / "layers.json").read_text())["test"]
        for processes in (1, 2)
    ]
    assert tested[1]["accuracy"] == tested[0]["accuracy"]
    assert tested[1]["loss"] == pytest.approx(tested[0]["loss"], rel=1e-6)
