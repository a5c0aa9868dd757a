"""MatchingReport: what it evaluates is what `barrier` says, and files and loggers hold the same."""

import functools
import json

import fits
import pytest
import torch
from fits import fit
from helpers import assert_refused, read_csv, read_rows, write_zoo
from matplotlib.image import imread

from lightning_sym.callbacks import CurveReport, MatchingReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.connectivity import average, barrier, curve_losses
from lightning_sym.datamodules import DiabetesDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import CurveTask, MatchingTask, SquaredDistance
from lightning_sym.zoo import ModelZoo

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
    written = ("summary", "barriers", "curves", "merged", "numbers")
    tables = {f"{name}.{kind}" for name in written for kind in ("csv", "json")}
    assert names == {*tables, "interpolation.png", "barriers.png", "symmetry.txt", "symmetry.json", "merged"}
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


def test_means_of_matched_networks_are_a_zoo(run):
    path, task = run
    merged = ModelZoo.open(path / "results" / "merged")
    assert merged.numbers == [0, 1, 2]
    rows = read_rows(path / "results" / "merged")
    barriers = read_rows(path / "results" / "barriers")
    for number, pair in enumerate(task.pairs):
        record = merged.member(number)
        method = record.training["merged"]["method"]
        mean = average([task.member(pair[0]), task.matched(pair, method)])
        torch.testing.assert_close(merged.state(number), mean.state_dict())
        losses = {m: evaluated(average([task.member(pair[0]), task.matched(pair, m)]), "val") for m in task.methods}
        assert min(losses, key=losses.get) == method
        assert record.metric("val", "loss") == pytest.approx(losses[method], abs=1e-6)
        (row,) = [row for row in rows if (row["member"], row["split"]) == (number, "test")]
        wanted = (*pair, method, "test")
        (line,) = [r for r in barriers if (r["first"], r["second"], r["method"], r["split"]) == wanted]
        assert row["loss"] == record.metric("test", "loss") == pytest.approx(line["loss_middle"], abs=1e-6)
        assert row["accuracy_second"] == pytest.approx(line["accuracy_second"])


def evaluated(network, split):
    loader = getattr(digits(), f"{split}_dataloader")()
    return float(curve_losses(network, lambda _: None, [0.0], loader, recalibrate=False).loss)


def test_an_earlier_runs_means_are_replaced(matching_zoo, tmp_path):
    for pairs, left in (([[0, 1], [0, 2]], [0, 1]), ([[0, 1]], [0])):
        fit(MatchingTask(str(matching_zoo), pairs=pairs, methods=["weights"]), digits(), MatchingReport(points=2),
            folder=tmp_path)  # fmt: skip
        assert ModelZoo.open(tmp_path / "results" / "merged").numbers == left
    for place, task in (("none", {}), ("unmerged", {"merge": False})):
        fit(MatchingTask(str(matching_zoo), methods=["weights"]), digits(), MatchingReport(points=2, **task),
            folder=tmp_path / place)  # fmt: skip
        assert (tmp_path / place / "results" / "merged").exists() == (not task)


@pytest.mark.parametrize(
    ("task", "report"),
    [(MatchingTask, MatchingReport), (CurveTask, functools.partial(CurveReport, plane_points=2))],
    ids=["matching", "curves"],
)
def test_regressors_have_barriers_of_their_own_loss(task, report, tmp_path, capsys):
    data = DiabetesDataModule(standardize=True)
    network = MultiLayerPerceptron([4], in_channels=10, image_size=1, num_classes=1)
    zoo = write_zoo(tmp_path / "zoo", [network.fresh(n) for n in range(2)], data)
    assert_refused(fit, task(str(zoo)), data, says="name the loss that networks are trained with (--model.loss")
    fitted = task(str(zoo), loss=SquaredDistance())
    fit(fitted, data, report(points=3), folder=tmp_path)
    text = capsys.readouterr().out
    assert "SquaredDistance()" in text
    for word in ("nats", "accuracy"):
        assert word not in text
        assert not any(word in row for row in read_rows(tmp_path / "results" / "summary"))
    first, second = map(fitted.member, (0, 1))
    line = barrier(first, second, data.test_dataloader(), points=3, loss=SquaredDistance())
    found = [row for row in read_rows(tmp_path / "results" / "summary") if row["split"] == "test"]
    (row,) = [row for row in found if row.get("method", row.get("path")) in ("unmatched", "line")]
    assert row["loss_barrier"] == pytest.approx(line.loss_barrier, abs=1e-6)


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
    merged = ModelZoo.open(tmp_path / "results" / "merged")
    (middle,) = [
        float(row["loss_middle"])
        for row in table
        if (row["method"], row["split"], row["batch_norm"]) == ("weights", "test", "recalibrated")
    ]
    assert merged.member(0).metric("test", "loss") == pytest.approx(middle, abs=1e-5)
    assert evaluated(merged.load(0), "test") == pytest.approx(middle, abs=1e-5)  # the statistics are in the file
