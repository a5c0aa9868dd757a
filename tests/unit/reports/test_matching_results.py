"""Barriers over pairs, their rows, headline and figures, from lines that were made up."""

from statistics import mean, stdev

import pytest
import torch
from helpers import printed

from lightning_sym.connectivity import Barrier
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.matching import Line, matching_results, matching_summary
from lightning_sym.symmetry import trace_symmetry

PAIRS = [(0, 1), (0, 2), (1, 2)]
HEIGHTS = {
    ("unmatched", "as is"): 2.0,
    ("weights", "as is"): 0.5,
    ("unmatched", "recalibrated"): 1.0,
    ("weights", "recalibrated"): 0.1,
}


def line(height, first=0.1, second=0.3):
    """A line whose middle is so much above that between its ends; accuracy falls as loss rises."""
    loss = torch.tensor([first, (first + second) / 2 + height, second], dtype=torch.float64)
    return Barrier(
        loss=loss, accuracy=1 - loss / 10, samples=300, recalibrated=False, t=torch.linspace(0, 1, 3).double()
    )


@pytest.fixture(scope="module")
def curves():
    return {
        Line(method, kind, split): {pair: line(height * (1 + index)) for index, pair in enumerate(PAIRS)}
        for (method, kind), height in HEIGHTS.items()
        for split in ("train", "test")
    }


def test_the_summary_is_the_mean_over_pairs(curves):
    summary = matching_summary(curves)
    assert [(row["batch_norm"], row["split"], row["method"]) for row in summary] == [
        (kind, split, method) for kind in ("as is", "recalibrated") for split in ("train", "test")
        for method in ("unmatched", "weights")
    ]  # fmt: skip
    for row in summary:
        values = [HEIGHTS[row["method"], row["batch_norm"]] * (1 + index) for index in range(3)]
        assert row["loss_barrier"] == pytest.approx(mean(values))
        assert row["loss_barrier_std"] == pytest.approx(stdev(values))
        assert row["loss_barrier_low"] <= row["loss_barrier"] <= row["loss_barrier_high"]
        assert row["accuracy_barrier"] == pytest.approx(mean(values) / 10)
        assert (row["pairs"], row["models"], row["note"]) == (3, 3, "")
    two = matching_summary({one: {(0, 1): found[0, 1]} for one, found in curves.items()})
    assert two[0]["loss_barrier_low"] is None  # two models: no interval
    assert two[0]["note"].startswith("no interval")


def test_logged_and_printed_are_barriers_with_recalibrated_statistics(curves):
    network = MultiLayerPerceptron(widths=(4,), image_size=8)
    symmetry = trace_symmetry(network, torch.zeros(2, 1, 8, 8))
    distances = {(pair, method): 1.0 for pair in PAIRS for method in ("unmatched", "weights")}
    found = matching_results(curves, distances, symmetry, title="Net, 3 pairs", about={"seed": 0})
    assert found.numbers["barrier/test_loss/weights"] == pytest.approx(0.2)
    # One name in all runs, whatever methods they compare.
    assert found.headline == "barrier/test_loss/least"
    assert found.numbers[found.headline] == found.numbers["barrier/test_loss/weights"]
    assert set(found.files) == {"symmetry.txt", "symmetry.json"}
    assert found.files["symmetry.txt"] == f"{symmetry}\n" == f"{found.texts['symmetry']}\n"
    assert [name for name, _ in found.figures] == ["interpolation", "barriers"]
    assert "95 % interval" in found.notes[0]
    text = printed(lambda console: console.print(found.shown))
    for word in ("batch norm as is", "batch norm recalibrated", "0.200 ± 0.100", "unmatched"):
        assert word in text
    assert "function" not in text + " ".join(found.notes)
    changes = {(pair, method): 0.031 if method == "weights" else 1e-6 for pair, method in distances}
    changed = matching_results(curves, distances, symmetry, title="", about={}, changes=changes)
    assert "changes B by 3.1%" in printed(lambda console: console.print(changed.shown))
    assert changed.notes[1] == (
        "weights changes the function of B by 3.1%: test loss 0.3 to 0.3, accuracy 97.0% to 97.0%"
    )
    assert [row["output_change"] for row in changed.tables[0].rows][:2] == pytest.approx([1e-6, 0.031])
    two = {one: {(0, 1): lines[0, 1]} for one, lines in curves.items()}
    assert "interval" not in matching_results(two, distances, symmetry, title="", about={}).notes[0]
