"""Two processes evaluate the same grid as one, bit for bit, and go on from what either left."""

import pytest
import torch

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def found(run_scenarios, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grids")
    run_scenarios("grid_scenarios.py", folder)

    def load(name: str, processes: int = 2) -> list:
        return [torch.load(folder / f"{name} {processes} {rank}.pt") for rank in range(processes)]

    load.folder = folder
    return load


@pytest.mark.parametrize("name", ["mlp", "loop", "lenet"])
def test_two_processes_find_the_same_bits_as_one(found, name):
    (alone,) = found(name, 1)
    for one in found(name):
        assert torch.equal(one["values"], alone["values"])
        assert torch.equal(one["below"], alone["below"])
        assert one["method"] == alone["method"]
    assert alone["points"] == 81
    assert [one["points"] for one in found(name)] == [41, 40]


def test_an_error_of_one_process_is_one_of_both(found):
    assert found("error two") == ["stopped on one rank"] * 2


def test_work_goes_on_with_as_many_processes_or_fewer(found):
    (alone,) = found("mlp", 1)
    # The first rank had its 41 points, the second two blocks of eight.
    for processes, left in ((2, [16, 8]), (1, [24])):
        resumed = found("resumed", processes)
        assert all(torch.equal(one["values"], alone["values"]) for one in resumed)
        assert [one["points"] for one in resumed] == left
    assert not list(found.folder.glob("*.npz*"))


def test_a_limit_is_an_error_on_all(found):
    first, second = found("limit")
    assert "above limit_seconds" in first
    assert "above limit_seconds" in second
