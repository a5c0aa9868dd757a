"""Two processes train rotated networks as one does."""

import csv
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ddp

# Float32 gradients, added up in another order, through some steps of Adam.
ROUNDING = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory, matching_zoo) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_scenarios("rotation_scenarios.py", folder, matching_zoo)
    return folder


def checkpoint(path: Path) -> dict:
    return torch.load(path / "last.ckpt", weights_only=True)


def table(path: Path) -> list[dict[str, str]]:
    with (path / "results" / "penalties.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_only_what_must_fail_failed(runs):
    errors = json.loads((runs / "errors.json").read_text())
    assert set(errors) == {"part"}, errors
    assert "interrupted" in errors["part"]


def test_matrices_and_weights_are_the_same(runs):
    one, two = (checkpoint(runs / name)["state_dict"] for name in ("1", "2"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        if name.endswith("fixed"):
            assert torch.equal(two[name], value)
        else:
            torch.testing.assert_close(two[name], value, **ROUNDING)
    assert sum(name.endswith("fixed") for name in one) == 2 * 3 * 2


def test_every_image_counts_once_in_the_table(runs):
    one, two = table(runs / "1"), table(runs / "2")
    assert len(one) == 2 * (2 + 2 + 1 + 2)
    for a, b in zip(one, two, strict=True):
        assert [a[name] for name in ("member", "site", "kind", "repeat")] == [
            b[name] for name in ("member", "site", "kind", "repeat")
        ]
        for name in ("val_loss", "test_loss"):
            assert float(b[name]) == pytest.approx(float(a[name]), abs=1e-3)
        for name in ("member_val_accuracy", "member_test_accuracy"):
            assert float(b[name]) == pytest.approx(float(a[name]), abs=1e-7)
        # A digit on the border between two classes may fall on the other side.
        assert abs(float(b["test_penalty"]) - float(a["test_penalty"])) < 1.5 / 81


def test_resumed_is_uninterrupted(runs):
    whole, resumed = (checkpoint(runs / name)["state_dict"] for name in ("2", "resumed"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert table(runs / "2") == table(runs / "resumed")
