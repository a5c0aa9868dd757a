"""The members' rows, headline and figures, from plain numbers."""

import pytest
import torch
from helpers import printed

from lightning_sym.reports.zoo import zoo_results

SPLITS = {
    split: {
        "accuracy": torch.tensor([0.9, float("nan"), 0.7]) - loss,
        "loss": torch.tensor([0.1, float("nan"), 0.3]) + loss,
        "confusion": torch.eye(3),
    }
    for split, loss in (("val", 0.0), ("test", 0.1))
}


def results(stopped=(5,), **settings):
    reasons = {number: {"reason": "not finite"} for number in stopped}
    return zoo_results(
        [4, 5, 6], SPLITS, reasons, {4: 1.5, 6: 2.0}, network="Net", about={"seeds": [4, 5, 6]}, **settings
    )


def test_stopped_members_have_no_numbers_and_no_part_in_the_headline():
    found = results(curves=[[0.5, 0.5, 0.5]], epochs=[1.0])
    rows = found.tables[0].rows
    assert [row["epoch_kept"] for row in rows] == ["1.5", "0", "2"]
    assert rows[1]["test_accuracy"] is rows[1]["val_loss"] is None
    assert [row["stopped"] for row in rows] == ["", "not finite", ""]
    assert found.numbers[found.headline] == pytest.approx(0.7)
    assert found.notes == ["member 5 was stopped: not finite"]
    assert [name for name, _ in found.figures] == ["validation_curves", "confusion"]
    assert results([4, 5, 6]).headline is None


def test_some_members_are_listed_and_all_summed_up():
    found = results(most=1)
    assert [name for name, _ in found.figures] == ["confusion"]  # there was no validation
    text = printed(lambda console: console.print(found.shown))
    listed = ("4 1.5 90.00 % 80.00 % 0.2000", "+2 more", "mean 80.00 % 70.00 %", "max 90.00 % 80.00 %")
    for word in ("Zoo of 3 Net", *listed):
        assert word in text


def test_networks_that_are_no_classifiers_have_losses_only():
    splits = {split: {"loss": values["loss"]} for split, values in SPLITS.items()}
    found = zoo_results(
        [4, 5, 6],
        splits,
        {5: {"reason": "nan"}},
        {},
        network="Net",
        about={},
        loss="mse_loss",
        curves=[[0.1] * 3],
        epochs=[1.0],
    )
    assert [name for name, _ in found.figures] == ["validation_curves"]
    assert (found.headline, found.numbers) == ("test/loss", {"test/loss": pytest.approx(0.3)})
    assert set(found.tables[0].rows[0]) == {"member", "epoch_kept", "val_loss", "test_loss", "stopped"}
    assert found.tables[0].units["loss"] == "mean mse_loss"
    text = printed(lambda console: console.print(found.shown))
    assert "mse_loss of the weights kept" in text
    assert "mean 0.2000 0.3000" in text
