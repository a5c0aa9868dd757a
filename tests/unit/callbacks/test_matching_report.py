"""MatchingReport: what it evaluates is what `barrier` says, and files and loggers hold the same."""

import functools
import json

import fits
import pytest
import torch
from fits import fit
from helpers import read_csv, write_zoo
from matplotlib.image import imread

from lightning_sym.callbacks import MatchingReport
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.connectivity import barrier
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import MatchingTask

digits = functools.partial(fits.digits, batch_size=100, max_samples=300)


@pytest.fixture(scope="module")
def run(matching_zoo, tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    task = MatchingTask(str(matching_zoo), methods=["weights", "activations"])
    fit(task, digits(), MatchingReport(points=5), folder=path, logger=MetricsCSV(path))
    return path, task


def test_files_and_loggers_of_a_run(run):
    path, task = run
    names = {file.name for file in (path / "results").iterdir()}
    tables = {f"{name}.{kind}" for name in ("summary", "barriers", "curves") for kind in ("csv", "json")}
    assert names == {*tables, "interpolation.png", "barriers.png", "symmetry.txt", "symmetry.json"}
    for name in ("interpolation", "barriers"):
        assert imread(path / "results" / f"{name}.png").std() > 0.01
    assert (path / "results" / "symmetry.txt").read_text().startswith("axis group")
    group = json.loads((path / "results" / "symmetry.json").read_text())
    assert group["dimension"] == 22
    assert [row["size"] for row in group["rows"]] == [12, 10]
    about = json.loads((path / "results" / "summary.json").read_text())
    assert about["pairs"] == [[0, 1], [0, 2], [1, 2]]
    assert about["images"] == {"train": 300, "test": 300}
    assert about["data"]["fingerprint"] == digits().identity()["fingerprint"]
    assert {"units", "versions", "seeds", "members", "architecture", "zoo"} <= set(about)
    (last,) = [row for row in read_csv(path / "metrics.csv") if row["barrier/test_loss/weights"]]
    for row in about["rows"]:
        tag = f"barrier/{row['split']}_loss/{row['method']}"
        assert float(last[tag]) == pytest.approx(row["loss_barrier"])
    assert all(not parameter.requires_grad for parameter in task.member(0).parameters())
    assert not torch.is_inference_mode_enabled()


def test_the_numbers_are_those_of_barrier(run):
    path, task = run
    table = read_csv(path / "results" / "barriers.csv")
    assert len(table) == 3 * 3 * 2
    data = digits()
    for row in [row for row in table if row["first"] == "0"]:
        loader = data.curvature_dataloader() if row["split"] == "train" else data.test_dataloader()
        found = barrier(task.member(0), task.matched((0, int(row["second"])), row["method"]), loader, points=5)
        for name in ("loss_barrier", "loss_barrier_mean", "accuracy_barrier", "accuracy_barrier_mean"):
            assert float(row[name]) == pytest.approx(getattr(found, name), abs=1e-9)
        assert row["batch_norm"] == "none"
    planted = {row["method"]: row for row in table if (row["second"], row["split"]) == ("1", "test")}
    for method in ("weights", "activations"):
        assert float(planted[method]["loss_barrier"]) < 1e-4 < float(planted["unmatched"]["loss_barrier"])
        assert float(planted[method]["distance"]) < 0.01 * float(planted["unmatched"]["distance"])


@pytest.mark.parametrize("recalibrate", ["both", "auto"])
def test_batch_norms_are_recalibrated(recalibrate, tmp_path, capsys):
    data = digits()
    zoo = write_zoo(tmp_path / "z", [MyrtleCNN(2, in_channels=1, image_size=8).fresh(n) for n in range(2)], data)
    report = MatchingReport(points=3, train_batches=1, recalibrate=recalibrate)
    fit(MatchingTask(str(zoo), methods=["weights"]), data, report, folder=tmp_path)
    kinds = ["as is", "recalibrated"] if recalibrate == "both" else ["recalibrated"]
    table = read_csv(tmp_path / "results" / "barriers.csv")
    assert list(dict.fromkeys(row["batch_norm"] for row in table)) == kinds
    out = capsys.readouterr().out
    for word in (*kinds, "picture", *(str(tmp_path / "results" / name) for name in ("summary.csv", "symmetry.txt"))):
        assert word in out
    ends = [
        (float(row["loss_first"]), float(row["loss_second"]))
        for method in ("weights", "unmatched")
        for row in table
        if (row["method"], row["split"], row["batch_norm"]) == (method, "test", "recalibrated")
    ]
    assert ends[0] == pytest.approx(ends[1], abs=1e-4)
