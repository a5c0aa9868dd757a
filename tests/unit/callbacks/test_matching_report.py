"""MatchingReport: tables and pictures say what was evaluated, and agree with each other."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sym.callbacks import MatchingReport
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.connectivity import barrier
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import MatchingTask, ZooTask
from lightning_sym.zoo import rebuild_manifest, write_member

METHODS = ["unmatched", "weights", "activations"]


def digits(**changes) -> DigitsDataModule:
    return DigitsDataModule(**{"batch_size": 100, "max_samples": 300, **changes})


def fit(path: Path, task, *callbacks, data=None, **changes) -> Trainer:
    settings = {
        "default_root_dir": path,
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(**{**settings, **changes}, callbacks=list(callbacks))
    trainer.fit(task, data or digits())
    return trainer


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


@pytest.fixture(scope="module")
def run(matching_zoo, tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    task = MatchingTask(str(matching_zoo), methods=["weights", "activations"])
    loggers = [TensorBoardLogger(path.parent, path.name, ""), MetricsCSV(path)]
    fit(path, task, MatchingReport(points=5), logger=loggers)
    return path, task


def test_files_of_a_run(run):
    path, _ = run
    names = {file.name for file in (path / "results").iterdir()}
    tables = {f"{name}.{kind}" for name in ("summary", "barriers", "curves") for kind in ("csv", "json")}
    assert names == {*tables, "interpolation.png", "barriers.png", "symmetry.txt", "symmetry.json"}
    for name in ("interpolation", "barriers"):
        assert imread(path / "results" / f"{name}.png").std() > 0.01
    assert (path / "results" / "symmetry.txt").read_text().startswith("axis group")
    group = json.loads((path / "results" / "symmetry.json").read_text())
    assert group["dimension"] == 22
    assert [row["size"] for row in group["rows"]] == [12, 10]


def test_the_numbers_are_those_of_barrier(run):
    path, task = run
    table = rows(path / "results" / "barriers.csv")
    assert len(table) == 3 * 3 * 2
    data = digits()
    for row in table:
        if row["first"] != "0":
            continue
        pair = int(row["first"]), int(row["second"])
        loader = data.curvature_dataloader() if row["split"] == "train" else data.test_dataloader()
        found = barrier(task.member(pair[0]), task.matched(pair, row["method"]), loader, points=5)
        for name in ("loss_barrier", "loss_barrier_mean", "accuracy_barrier", "accuracy_barrier_mean"):
            assert float(row[name]) == pytest.approx(getattr(found, name), abs=1e-9)
        assert float(row["loss_middle"]) == pytest.approx(float(found.loss[2]), abs=1e-9)
        assert row["batch_norm"] == "none"
    planted = {row["method"]: row for row in table if (row["second"], row["split"]) == ("1", "test")}
    for method in ("weights", "activations"):
        assert float(planted[method]["loss_barrier"]) < 1e-4 < float(planted["unmatched"]["loss_barrier"])
        assert float(planted[method]["distance"]) < 0.01 * float(planted["unmatched"]["distance"])


def test_the_summary_is_the_mean_over_pairs(run):
    path, _ = run
    pairs, summary = rows(path / "results" / "barriers.csv"), rows(path / "results" / "summary.csv")
    assert [row["method"] for row in summary] == METHODS * 2
    for row in summary:
        values = [
            float(pair["loss_barrier"])
            for pair in pairs
            if (pair["method"], pair["split"]) == (row["method"], row["split"])
        ]
        assert float(row["loss_barrier"]) == pytest.approx(math.fsum(values) / 3)
        assert float(row["loss_barrier_low"]) <= float(row["loss_barrier"]) <= float(row["loss_barrier_high"])
    about = json.loads((path / "results" / "summary.json").read_text())
    assert about["pairs"] == [[0, 1], [0, 2], [1, 2]]
    assert about["data"]["fingerprint"] == digits().identity()["fingerprint"]
    assert {"units", "versions", "seeds", "members", "architecture", "zoo"} <= set(about)
    curves = rows(path / "results" / "curves.csv")
    assert len(curves) == 5 * len(pairs)


def test_tensorboard_and_metrics_hold_the_same(run):
    path, _ = run
    events = EventAccumulator(str(path), size_guidance={"images": 0, "scalars": 0, "tensors": 0}).Reload()
    assert set(events.Tags()["images"]) == {"figures/MatchingReport/interpolation", "figures/MatchingReport/barriers"}
    assert "symmetry/text_summary" in events.Tags()["tensors"]
    summary = {(row["method"], row["split"]): row for row in rows(path / "results" / "summary.csv")}
    (last,) = [row for row in rows(path / "metrics.csv") if row["barrier/test_loss/weights"]]
    for method in METHODS:
        expected = float(summary[method, "test"]["loss_barrier"])
        assert events.Scalars(f"barrier/test_loss/{method}")[-1].value == pytest.approx(expected, rel=1e-5)
        assert float(last[f"barrier/test_loss/{method}"]) == pytest.approx(expected)


@pytest.mark.parametrize("recalibrate", ["both", "auto"])
def test_batch_norms_are_recalibrated(recalibrate, tmp_path, capsys):
    data = digits()
    for number in range(2):
        network = MyrtleCNN(2, in_channels=1, image_size=8).fresh(number)
        write_member(tmp_path / "z", number, network.state_dict(), architecture=network.architecture)
    rebuild_manifest(tmp_path / "z")
    task = MatchingTask(str(tmp_path / "z"), methods=["weights"])
    report = MatchingReport(points=3, train_batches=1, recalibrate=recalibrate)
    fit(tmp_path, task, report, data=data)
    kinds = ["as is", "recalibrated"] if recalibrate == "both" else ["recalibrated"]
    table = rows(tmp_path / "results" / "barriers.csv")
    assert list(dict.fromkeys(row["batch_norm"] for row in table)) == kinds
    out = capsys.readouterr().out
    assert "recalibrated" in out
    assert ("as is" in out) == (recalibrate == "both")
    assert "bracket" not in out  # two models: no interval
    about = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert about["images"] == {"train": min(500, 300), "test": 300}
    assert about["rows"][0]["loss_barrier_low"] is None
    (ends,) = [
        (float(row["loss_first"]), float(row["loss_second"]))
        for row in table
        if (row["method"], row["split"], row["batch_norm"]) == ("weights", "test", "recalibrated")
    ]
    unmatched = next(row for row in table if row["method"] == "unmatched" and row["batch_norm"] == "recalibrated"
                     and row["split"] == "test")  # fmt: skip
    assert ends == pytest.approx((float(unmatched["loss_first"]), float(unmatched["loss_second"])), abs=1e-4)


def test_the_terminal_says_what_was_found_and_where(matching_zoo, tmp_path, capsys):
    task = MatchingTask(str(matching_zoo), methods=["straight_through"])
    fit(tmp_path, task, MatchingReport(points=3))
    out = capsys.readouterr().out
    for word in ("MultiLayerPerceptron, 3 pairs", "unmatched", "straight-through", "±", "95 % interval"):
        assert word in out
    for name in ("interpolation.png", "summary.csv", "barriers.csv", "symmetry.txt"):
        assert str(tmp_path / "results" / name) in out


def test_a_trial_leaves_nothing(matching_zoo, tmp_path):
    fit(tmp_path, MatchingTask(str(matching_zoo)), MatchingReport(), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_other_tasks_are_refused(tmp_path):
    task = ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=1)
    with pytest.raises(TypeError, match=r"MatchingReport works with lightning_sym.tasks.MatchingTask, got ZooTask"):
        fit(tmp_path, task, MatchingReport())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"points": 1}, "points must be at least 2, got 1"),
        ({"train_batches": 0}, "train_batches must be at least 1"),
        ({"recalibrate": "never"}, 'recalibrate must be "both" or "auto"'),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MatchingReport(**settings)


def test_networks_stay_as_they_are(run):
    _, task = run
    assert all(not parameter.requires_grad for parameter in task.member(0).parameters())
    assert not torch.is_inference_mode_enabled()
