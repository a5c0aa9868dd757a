"""Two processes find what one finds, and evaluate the same grids."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_scenarios("equivalence_scenarios.py", folder)
    return folder


@pytest.fixture(scope="module")
def errors(runs):
    return json.loads((runs / "errors.json").read_text())


def search(path: Path, rank: int = 0) -> dict:
    return torch.load(path / f"rank-{rank}.pt", weights_only=True)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "results").iterdir()}


def same(one: object, two: object) -> bool:
    """Compare nested values bit for bit; NaN is NaN."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(nan=1e300), two.nan_to_num(nan=1e300))
    return one == two or (isinstance(one, float) and math.isnan(one) and math.isnan(two))


def searched(path: Path, rank: int = 0) -> dict:
    return {name: value for name, value in search(path, rank).items() if name != "slots"}


def test_only_what_must_fail_failed(runs, errors):
    assert set(errors) == {"2 part", "2 other number", "2 broken", "plain ddp", "too few"}, errors
    assert "interrupted" in errors["2 part"]
    assert "grid interrupted" in errors["2 broken"]
    left = sorted(file.name for file in (runs / "2 broken" / "results").iterdir())
    assert len(left) == 2
    assert left[0].startswith(".grid-search-3d-")
    assert left[1] == f"{left[0]}.1"


def test_what_is_refused(errors):
    assert "shares out its candidates, not the data; use --trainer.strategy ddp_members" in errors["plain ddp"]
    assert "1 candidate(s) cannot be placed on 2 processes" in errors["too few"]
    assert "were placed on 2 process(es) and those of this run on 1" in errors["2 other number"]


def test_candidates_are_shared_out(runs):
    assert search(runs / "1 loop")["slots"] == (0, 1, 2, 3, 4)
    assert [search(runs / "2 loop", rank)["slots"] for rank in (0, 1)] == [(0, 2, 4), (1, 3)]
    assert search(runs / "1 loop")["round"] >= 2
    assert len(search(runs / "1 loop")["found"]) >= 4


def test_a_loop_finds_bitwise_the_same(runs):
    """Candidates, tables and grids; also those of the second rank."""
    for rank in (0, 1):
        assert same(searched(runs / "1 loop"), searched(runs / "2 loop", rank))
    one, two = files(runs / "1 loop"), files(runs / "2 loop")
    assert one.keys() == two.keys()
    assert len(one) == 3 * 2 + 1 + 3  # no partial file
    for name, content in one.items():
        assert content == two[name], name


def test_vmap_finds_the_same_up_to_rounding(runs):
    one, two = searched(runs / "1 vmap"), searched(runs / "2 vmap")
    assert same(two, searched(runs / "2 vmap", 1))
    assert list(one["found"]) == list(two["found"])
    assert one["step"] == two["step"]
    for number, entry in one["found"].items():
        torch.testing.assert_close(two["found"][number]["weights"], entry["weights"], rtol=1e-9, atol=1e-9)
        assert two["found"][number]["steps"] == entry["steps"]
        assert two["found"][number]["loss"] == pytest.approx(entry["loss"], rel=1e-6)
    for grid in ("search-2d", "search-3d"):
        values = [load_file(runs / name / "results" / f"grid-{grid}.safetensors")["J"] for name in ("1 vmap", "2 vmap")]
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-10)


def test_loop_and_vmap_find_the_same(runs):
    one, two = search(runs / "1 loop")["found"], search(runs / "1 vmap")["found"]
    assert list(one) == list(two)
    for number, entry in one.items():
        torch.testing.assert_close(two[number]["weights"], entry["weights"], rtol=1e-8, atol=1e-8)


def test_a_candidate_that_stops_stops_on_all_ranks(runs):
    one, two = searched(runs / "1 poisoned"), searched(runs / "2 poisoned")
    assert one["outcomes"][1]["stopped"] == "its loss is not finite"
    assert same(one, two)
    assert same(two, searched(runs / "2 poisoned", 1))
    whole = searched(runs / "1 loop")["outcomes"]
    for number in (0, 2, 3, 4):
        assert same(one["outcomes"][number], whole[number])


@pytest.mark.parametrize("name", ["2 resumed", "2 mended"])
def test_an_interrupted_search_or_grid_of_two_processes_goes_on(runs, name):
    assert same(searched(runs / "2 loop"), searched(runs / name))
    one, two = files(runs / "2 loop"), files(runs / name)
    assert one.keys() == two.keys()
    for file, content in one.items():
        assert content == two[file], file
