"""Two processes match what one matches."""

import csv
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ddp

# Float32 gradients, added up in another order; moments in float64.
ROUNDING = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory, matching_zoo) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_scenarios("matching_scenarios.py", folder, matching_zoo)
    return folder


def matching(path: Path) -> dict:
    return torch.load(path / "last.ckpt", weights_only=True)["matching"]


def table(path: Path) -> list[dict[str, str]]:
    with (path / "results" / "barriers.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_only_what_must_fail_failed(runs):
    errors = json.loads((runs / "errors.json").read_text())
    assert set(errors) == {"part", "unlucky"}, errors
    assert "ValueError: unlucky" in errors["unlucky"]
    assert "interrupted" in errors["part"]


def test_elements_are_the_same(runs):
    one, two = matching(runs / "1"), matching(runs / "2")
    assert one["pairs"] == two["pairs"] == [[0, 1], [0, 2], [1, 2]]
    for pair, methods in one["elements"].items():
        assert set(methods) == {"weights", "activations", "straight_through"}
        for method in ("weights", "activations"):
            found, expected = two["elements"][pair][method], methods[method]
            assert torch.equal(found["permutation"], expected["permutation"]), (pair, method)
            torch.testing.assert_close(found["log_scale"], expected["log_scale"], **ROUNDING)
        assert torch.equal(two["step"][pair]["permutation"], one["step"][pair]["permutation"])
        torch.testing.assert_close(
            torch.tensor(two["best"][pair]["loss"]), torch.tensor(one["best"][pair]["loss"]), **ROUNDING
        )


def test_latent_networks_are_the_same(runs):
    one, two = (torch.load(runs / name / "last.ckpt", weights_only=True)["state_dict"] for name in ("1", "2"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, **ROUNDING)


def test_every_image_counts_once_in_the_report(runs):
    one, two = table(runs / "1"), table(runs / "2")
    assert len(one) == 3 * 4 * 2
    for a, b in zip(one, two, strict=True):
        assert (a["method"], a["split"]) == (b["method"], b["split"])
        assert float(b["loss_barrier"]) == pytest.approx(float(a["loss_barrier"]), abs=1e-3)
        assert float(b["loss_first"]) == pytest.approx(float(a["loss_first"]), abs=1e-6)
    assert json.loads((runs / "2" / "results" / "summary.json").read_text())["images"] == {"train": 81, "test": 81}


def test_methods_without_training_run_in_two_processes(runs):
    found = matching(runs / "2 without training")
    assert set(found["elements"]["0-1"]) == {"weights", "activations"}


@pytest.mark.parametrize("name", ["resumed", "resumed in the first epoch"])
def test_resumed_is_uninterrupted(runs, name):
    whole, resumed = matching(runs / "2"), matching(runs / name)
    for pair, methods in whole["elements"].items():
        for method, expected in methods.items():
            found = resumed["elements"][pair][method]
            assert torch.equal(found["permutation"], expected["permutation"]), (pair, method)
            torch.testing.assert_close(found["log_scale"], expected["log_scale"], atol=1e-9, rtol=1e-9)
    one, two = (torch.load(runs / n / "last.ckpt", weights_only=True)["state_dict"] for n in ("2", name))
    assert all(torch.equal(two[key], value) for key, value in one.items())
