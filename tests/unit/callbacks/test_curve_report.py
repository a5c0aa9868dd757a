"""CurveReport: what it evaluates is what `curve_barriers` says, and its files hold the same."""

import functools
import json

import fits
import pytest
import torch
from fits import fit
from helpers import read_rows, write_zoo
from matplotlib.image import imread

from lightning_sym.callbacks import CurveReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.connectivity import barrier, curve_barriers, curve_losses, load_curve
from lightning_sym.landscape import weight_tensors
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import CurveTask

digits = functools.partial(fits.digits, batch_size=50, eval_batch_size=100, max_samples=300)


@pytest.fixture(scope="module")
def run(matching_zoo, tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    task = CurveTask(str(matching_zoo), pairs=[[0, 2], [0, 1]])
    report = CurveReport(points=5, plane_points=4, plane_images=100)
    fit(task, digits(), report, folder=path, logger=MetricsCSV(path), max_epochs=2)
    return path, task


def test_files_of_a_run(run):
    path, task = run
    names = {file.name for file in (path / "results").iterdir()}
    written = ("summary", "curves", "points", "planes", "numbers")
    tables = {f"{name}.{kind}" for name in written for kind in ("csv", "json")}
    curves = {f"curve-0-{n}-{kind}.safetensors" for n in (1, 2) for kind in ("bezier", "chain")}
    assert names == {*tables, *curves, "along.png", "planes.png"}
    for name in ("along", "planes"):
        assert imread(path / "results" / f"{name}.png").std() > 0.01
    about = json.loads((path / "results" / "summary.json").read_text())
    assert about["pairs"] == [[0, 2], [0, 1]]
    assert about["images"] == {"train": 300, "test": 300}
    assert {"units", "versions", "seeds", "members", "architecture", "zoo", "settings", "data"} <= set(about)
    for name, curve in task.curves.items():
        saved = load_curve(path / "results" / f"curve-{name.first}-{name.second}-{name.kind}.safetensors")
        assert torch.equal(saved.points, curve.points)
        assert saved.about["pair"] == list(name.pair)


def test_the_numbers_are_those_of_curve_barriers(run):
    path, task = run
    rows = read_rows(path / "results" / "curves")
    assert {row["path"] for row in rows} == {"line", "matched", "bezier", "chain"}
    data = digits()
    loaders = {"train": data.curvature_dataloader(), "test": data.test_dataloader()}
    for name, curve in task.curves.items():
        found = curve_barriers(curve, task.member(0), loaders, points=5)
        own = [row for row in rows if (row["first"], row["second"], row["path"]) == name]
        for row in own:
            assert row["loss_barrier"] == pytest.approx(found[row["split"]].loss_barrier, abs=1e-9)
            assert row["length"] == pytest.approx(curve.length(4))
    line = barrier(task.member(0), task.member(2), loaders["test"], points=5)
    test = {row["path"]: row for row in rows if (row["second"], row["split"]) == (2, "test")}
    assert test["line"]["loss_barrier"] == pytest.approx(line.loss_barrier, abs=1e-6)
    planted = {row["path"]: row for row in rows if (row["second"], row["split"]) == (1, "test")}
    assert planted["matched"]["loss_barrier"] < 1e-4 < planted["line"]["loss_barrier"]


def test_planes_are_those_of_the_first_pair(run):
    path, _ = run
    rows = read_rows(path / "results" / "planes")
    assert list(dict.fromkeys(row["curve"] for row in rows)) == ["0-2, bezier", "0-2, chain"]
    assert len(rows) == 2 * 16


def test_batch_norms_are_measured_anew_in_planes_too(tmp_path):
    data = digits(max_samples=100)
    zoo = write_zoo(tmp_path / "z", [MyrtleCNN(2, in_channels=1, image_size=8).fresh(n) for n in range(2)], data)
    report = CurveReport(points=3, plane_points=3, plane_images=100, matching=None)
    task = CurveTask(str(zoo), kinds=["chain"])
    fit(task, data, report, folder=tmp_path)
    assert {row["path"] for row in read_rows(tmp_path / "results" / "curves")} == {"line", "chain"}
    plane = next(iter(task.curves.values())).plane()
    row = read_rows(tmp_path / "results" / "planes")[4]
    network = task.member(0)

    def place(_):
        vector = plane.weights(torch.tensor([row["x"], row["y"]]))
        network.load_state_dict(weight_tensors(network, vector), strict=False)

    batch = data.normalize(data.split_tensors("train").images), data.split_tensors("train").labels
    assert row["loss"] == pytest.approx(float(curve_losses(network, place, [0], [batch]).loss), abs=1e-6)


def test_a_curve_that_is_still_straight_has_no_plane(matching_zoo, tmp_path):
    task = CurveTask(str(matching_zoo), optimizer=functools.partial(torch.optim.SGD, lr=0.0), matched="weights")
    fit(task, digits(), CurveReport(points=3, matching=None), folder=tmp_path, limit_train_batches=1)
    assert not (tmp_path / "results" / "planes.png").exists()
    rows = read_rows(tmp_path / "results" / "curves")
    assert {row["path"] for row in rows} == {"line", "matched", "bezier", "chain"}
    found = {(row["path"], row["second"], row["split"]): row["loss_highest"] for row in rows if row["first"] == 0}
    assert found["bezier", 2, "test"] == pytest.approx(found["matched", 2, "test"], abs=1e-5)
