"""Rows, means and files of curves, from numbers that were made up."""

import pytest
import torch
from helpers import printed

from lightning_sym.connectivity import Barrier, Curve, load_curve
from lightning_sym.reports.curve import MeasuredPath, MeasuredPlane, curve_results, curve_summary, path_rows, point_rows

PAIRS = [(0, 1), (0, 2)]
HEIGHTS = {"line": 2.0, "matched": 0.5, "bezier": 0.2, "chain": 0.1}


def measured(height: float, bends: int) -> MeasuredPath:
    """A path whose middle is so much above that between its ends; accuracy falls as loss rises."""
    t = torch.linspace(0, 1, 3).double()
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 0.0]]).double()
    loss = torch.tensor([0.1, 0.2 + height, 0.3]).double()
    along = {split: Barrier(loss + own, 1 - loss / 10, 30, False, t) for split, own in (("train", 0.0), ("test", 0.05))}
    return MeasuredPath(Curve(points if bends else points[[0, -1]], "chain"), along)


@pytest.fixture
def paths():
    return {
        name: {pair: measured(height * (1 + index), name in ("bezier", "chain")) for index, pair in enumerate(PAIRS)}
        for name, height in HEIGHTS.items()
    }


def test_rows_of_pairs_and_their_means(paths):
    rows = path_rows(paths)
    assert len(rows) == 4 * 2 * 2
    chain = next(row for row in rows if (row["path"], row["second"], row["split"]) == ("chain", 1, "test"))
    assert chain["length"] == pytest.approx(10.0)
    assert chain["distance"] == pytest.approx(6.0)
    assert chain["loss_barrier"] == pytest.approx(0.1)
    assert chain["accuracy_barrier"] == pytest.approx(0.01)
    assert (chain["loss_start"], chain["loss_end"]) == pytest.approx((0.15, 0.35))
    assert chain["loss_highest"] == pytest.approx(0.35)
    assert chain["accuracy_lowest"] == pytest.approx(0.97)
    assert chain["loss_integral"] == pytest.approx((0.15 + 2 * 0.35 + 0.35) / 4)
    summary = curve_summary(rows)
    assert [(row["path"], row["split"]) for row in summary] == [(n, s) for n in HEIGHTS for s in ("train", "test")]
    for row in summary:
        assert row["loss_barrier"] == pytest.approx(1.5 * HEIGHTS[row["path"]])
        assert row["loss_barrier_std"] == pytest.approx(0.5**0.5 * HEIGHTS[row["path"]])
    assert curve_summary([row for row in rows if row["second"] == 1])[0]["loss_barrier_std"] is None
    points = point_rows(paths)
    assert [(row["first"], row["second"]) for row in points] == [pair for pair in PAIRS for _ in range(6)] * 4
    assert [row["t"] for row in points[:3]] == [0.0, 0.5, 1.0]


def test_results_of_a_run(paths, tmp_path):
    curve = paths["chain"][0, 1].curve
    axis = torch.linspace(-1, 7, 4).double()
    plane = MeasuredPlane("0-1, chain", curve, curve.plane(), axis, axis, torch.rand(4, 4).double())
    results = curve_results(paths, [plane], title="Net, 2 pairs", about={"zoo": "there"}, notes=["one was stopped"])
    assert results.numbers[results.headline] == pytest.approx(1.5 * 0.1)
    assert results.numbers["barrier/train_loss/line"] == pytest.approx(3.0)
    assert results.numbers["details/highest/test_loss/bezier"] == pytest.approx(0.25 + 0.3, abs=0.01)
    assert set(results.files) == {f"curve-0-{n}-{kind}.safetensors" for n in (1, 2) for kind in ("bezier", "chain")}
    file = tmp_path / "a.safetensors"
    file.write_bytes(results.files["curve-0-1-chain.safetensors"])
    assert torch.equal(load_curve(file).points, curve.points)
    assert [name for name, _ in results.figures] == ["along", "planes"]
    text = printed(lambda console: results.show(console, tmp_path, tmp_path))
    assert "matched 0.9500 0.7500" in text
    assert "one was stopped" in text
    assert len(results.tables[-1].rows) == 16
