"""Two processes stitch what one stitches."""

import json
from pathlib import Path

import pytest
import torch

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MyrtleCNN
from lightning_sym.zoo import rebuild_manifest, write_member

pytestmark = pytest.mark.ddp

# Of assignment, least squares and identity, of two pairs.
UNTRAINED = [str(5 * pair + offset) for pair in range(2) for offset in (2, 3, 4)]
# Float32 gradients, added up in another order.
ROUNDING = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory) -> Path:
    zoo, folder = tmp_path_factory.mktemp("norms"), tmp_path_factory.mktemp("ddp")
    data = DigitsDataModule(max_samples=81)
    for number in range(2):
        network = MyrtleCNN(2, in_channels=1, image_size=8).fresh(number)
        write_member(zoo, number, network.state_dict(), architecture=network.architecture, data=data.identity())
    rebuild_manifest(zoo)
    run_scenarios("stitching_scenarios.py", folder, zoo)
    return folder


def checkpoint(path: Path) -> dict:
    return torch.load(path / "last.ckpt", weights_only=True)


def results(path: Path, rank: int = 0) -> dict:
    return json.loads((path / f"metrics-{rank}.json").read_text())


def test_only_what_must_fail_failed(runs):
    errors = json.loads((runs / "errors.json").read_text())
    assert set(errors) == {"part", "unlucky"}, errors
    assert "x has values that are not finite" in errors["unlucky"]
    assert "interrupted" in errors["part"]


def test_maps_are_the_same(runs):
    one, two = (checkpoint(runs / name)["state_dict"] for name in ("1", "2"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        if value.is_floating_point():
            torch.testing.assert_close(two[name], value, **ROUNDING)
        else:
            assert torch.equal(two[name], value), name


def test_maps_that_are_fitted_are_the_same(runs):
    one, two = (checkpoint(runs / name)["state_dict"] for name in ("1", "2"))
    found = [name for name in one if name.split(".")[1] in UNTRAINED]
    assert any(name.endswith("assignment") for name in found)
    for name in found:
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-6)  # from sums in float64


def test_every_image_counts_once_and_recalibration_is_exact(runs):
    one, two = results(runs / "1"), results(runs / "2")
    assert one["metrics"].keys() == two["metrics"].keys()
    for name, value in one["metrics"].items():
        # Maps that differ by rounding may tell one image of 81 otherwise, in one stitch.
        assert two["metrics"][name] == pytest.approx(value, abs=1e-3 if "loss" in name else 1.5 / 81), name
        if name.endswith(("assignment", "least_squares", "identity")):  # exact but for rounding of logits
            assert two["metrics"][name] == pytest.approx(value, abs=1e-6), name
    for name, values in one["test"].items():
        for index in map(int, UNTRAINED):
            assert two["test"][name][index] == pytest.approx(values[index], abs=1e-6), (name, index)


@pytest.mark.parametrize("name", ["2", "2 batch", "2 untrained"])
def test_all_ranks_find_the_same(runs, name):
    assert results(runs / name, 0) == results(runs / name, 1)


def test_statistics_of_batches_are_the_mean_over_ranks(runs):
    found = checkpoint(runs / "2 batch")["branches"]
    frozen = checkpoint(runs / "2")["branches"]
    start = MyrtleCNN(2, in_channels=1, image_size=8).fresh(1).state_dict()
    name = next(name for name in frozen["statistics"][0] if name.endswith("running_mean"))
    assert torch.equal(frozen["statistics"][0][name], start[name.removeprefix("upper.")])
    assert not torch.equal(found["statistics"][0][name], start[name.removeprefix("upper.")])


def test_resumed_in_the_first_epoch_is_uninterrupted(runs):
    whole, resumed = checkpoint(runs / "2 batch"), checkpoint(runs / "resumed")
    for key, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][key], value), key
    for index, statistics in whole["branches"]["statistics"].items():
        for key, value in statistics.items():
            torch.testing.assert_close(resumed["branches"]["statistics"][index][key], value, rtol=1e-6, atol=1e-7)
    for index, kept in whole["branches"]["kept"].items():
        assert resumed["branches"]["kept"][index]["epoch"] == kept["epoch"]
        assert resumed["branches"]["kept"][index]["metrics"]["accuracy"] == kept["metrics"]["accuracy"]
    torch.testing.assert_close(resumed["branches"]["losses"], whole["branches"]["losses"])


def test_what_one_rank_cannot_use_stops_on_all(runs):
    found = [results(runs / "explodes", rank) for rank in (0, 1)]
    assert found[0]["stopped"] == found[1]["stopped"]
    assert set(found[0]["stopped"]) == {"1", "3"}
    # The others go on as if these were not there.
    one = checkpoint(runs / "1")["state_dict"]
    two = checkpoint(runs / "explodes")["state_dict"]
    for index in range(2):
        torch.testing.assert_close(
            two[f"trained.{2 * index}.0.weight"], one[f"trained.{5 * index}.0.weight"], **ROUNDING
        )
