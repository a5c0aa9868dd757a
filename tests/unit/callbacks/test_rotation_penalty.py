"""RotationPenalty: the tables say what was found, and agree with each other and the task."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sym.callbacks import RotationPenalty
from lightning_sym.callbacks.rotation_penalty import _interval
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import RotationTask, ZooTask

KINDS = ["group", "orthogonal", "none", "undo"]
FILES = {"penalties.csv", "penalties.json", "summary.csv", "summary.json", "rotation_penalty.png"}


def fit(path: Path, task, *callbacks, **changes) -> Trainer:
    settings = {
        "default_root_dir": path,
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(**{**settings, **changes}, callbacks=list(callbacks))
    trainer.fit(task, DigitsDataModule(batch_size=100, max_samples=300))
    return trainer


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


@pytest.fixture(scope="module")
def run(matching_zoo, tmp_path_factory):
    path = tmp_path_factory.mktemp("rotation")
    task = RotationTask(str(matching_zoo), members=[0, 2], sites="all", kinds=KINDS, repeats=2)
    fit(path, task, RotationPenalty(), logger=[TensorBoardLogger(path.parent, path.name, ""), MetricsCSV(path)])
    return path, task


def test_files_of_a_run(run):
    path, _ = run
    assert {file.name for file in (path / "results").iterdir()} == FILES
    assert imread(path / "results" / "rotation_penalty.png").std() > 0.01


def test_there_is_a_row_for_every_network(run):
    path, task = run
    table = rows(path / "results" / "penalties.csv")
    assert [(int(r["member"]), r["site"], r["kind"], int(r["repeat"])) for r in table] == [
        (r.member, r.site, r.kind, r.repeat) for r in task.rotations
    ]
    for index, row in enumerate(table):
        for split in ("val", "test"):
            expected = float(row[f"member_{split}_accuracy"]) - float(row[f"{split}_accuracy"])
            assert float(row[f"{split}_penalty"]) == pytest.approx(expected, abs=1e-7)
        if row["kind"] == "undo":
            assert (row["epoch"], float(row["test_penalty"]), float(row["val_penalty"])) == ("", 0.0, 0.0)
        else:
            assert int(row["epoch"]) == task.kept[index]["epoch"]
            assert float(row["val_accuracy"]) == pytest.approx(task.kept[index]["metrics"]["accuracy"], abs=1e-7)
    assert len({row["member_test_accuracy"] for row in table}) <= 2


def test_the_summary_agrees_with_the_table(run):
    path, _ = run
    table, summary = (rows(path / "results" / f"{name}.csv") for name in ("penalties", "summary"))
    assert [(row["site"], row["kind"]) for row in summary] == [
        (site, kind) for site in ("activation1", "activation2") for kind in KINDS
    ]
    for row in summary:
        values = np.array(
            [
                [float(r["test_penalty"]) for r in table if (r["site"], r["kind"], r["member"]) == (*key, member)]
                for key in [(row["site"], row["kind"])]
                for member in ("0", "2")
            ]
        )
        assert float(row["penalty"]) == pytest.approx(values.mean(), abs=1e-12)
        assert (row["members"], row["networks"]) == ("2", str(values.size))
        if row["kind"] == "none":
            assert row["std"] == ""
        else:
            assert float(row["std"]) == pytest.approx(np.sqrt(values.var(1, ddof=1).mean()), abs=1e-12)
        assert row["interval_over"] == row["low"] == row["high"] == ""  # resamples of two members say nothing
        if row["kind"] == "group":
            group = values.mean(1)
            assert row["above_group"] == row["above_group_low"] == ""
        else:
            assert float(row["above_group"]) == pytest.approx((values.mean(1) - group).mean(), abs=1e-12)
            assert row["above_group_low"] == ""


def test_the_tables_say_how_to_make_them_again(run):
    path, task = run
    for name in ("penalties", "summary"):
        about = json.loads((path / "results" / f"{name}.json").read_text())
        assert {"what", "units", "kinds", "zoo", "architecture", "members", "versions", "rows", "epochs"} <= set(about)
        assert about["data"]["fingerprint"] == DigitsDataModule(max_samples=300).identity()["fingerprint"]
        assert (about["seed"], about["settings"]["repeats"], about["settings"]["scale"]) == (0, 2, 1.0)
        assert about["members"]["2"] == task.model_zoo.member(2).sha256


def test_tensorboard_and_metrics_hold_the_same(run):
    path, _ = run
    events = EventAccumulator(str(path), size_guidance={"images": 0, "scalars": 0}).Reload()
    assert events.Tags()["images"] == ["figures/RotationPenalty/rotation_penalty"]
    table, summary = (rows(path / "results" / f"{name}.csv") for name in ("penalties", "summary"))
    (last,) = [row for row in rows(path / "metrics.csv") if row.get("test_penalty/group")]
    for row in summary:
        name = f"test_penalty/{row['site']}/{row['kind']}"
        assert float(last[name]) == pytest.approx(float(row["penalty"]), abs=1e-9)
        assert events.Scalars(name)[-1].value == pytest.approx(float(row["penalty"]), abs=1e-6)
    group = np.mean([float(row["test_penalty"]) for row in table if row["kind"] == "group"])
    assert events.Scalars("hp_metric")[-1].value == pytest.approx(group, abs=1e-6)


def test_the_terminal_says_what_was_found_and_where(matching_zoo, tmp_path, capsys):
    task = RotationTask(str(matching_zoo), members=[0], kinds=KINDS, repeats=3)
    fit(tmp_path, task, RotationPenalty(dirpath=str(tmp_path / "there")))
    out = capsys.readouterr().out
    for word in (
        "Rotation penalty, points: MultiLayerPerceptron, 1 member",
        "0.0 ± 0.0",
        "over repeats",
        "orthogonal less",
    ):
        assert word in out
    assert "over members" not in out
    for name in ("rotation_penalty.png", "summary.csv", "penalties.csv"):
        assert str(tmp_path / "there" / name) in out
    (overs,) = {row["interval_over"] for row in rows(tmp_path / "there" / "summary.csv") if row["kind"] != "none"}
    assert overs == "repeats"


def test_one_network_has_no_interval(matching_zoo, tmp_path, capsys):
    fit(tmp_path, RotationTask(str(matching_zoo), members=[2], kinds=["none"]), RotationPenalty())
    (row,) = rows(tmp_path / "results" / "summary.csv")
    assert (row["std"], row["low"], row["high"], row["interval_over"]) == ("", "", "", "")
    assert "interval" not in capsys.readouterr().out


def test_the_interval_of_a_mean():
    assert _interval([]) == (None, None, "")
    assert _interval([[0.5]]) == _interval([[0.5, 0.1]]) == _interval([[0.5], [0.1]]) == (None, None, "")
    assert _interval([[0.5], [0.1], [0.3]])[2] == "members"
    low, high, over = _interval([list(np.random.default_rng(1).normal(size=400))])
    assert over == "repeats"
    # Of 400 standard normal numbers the mean is known to 1.96 / 20.
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)


def test_a_trial_leaves_nothing(matching_zoo, tmp_path):
    fit(tmp_path, RotationTask(str(matching_zoo), repeats=1), RotationPenalty(), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_other_tasks_are_refused(tmp_path):
    task = ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=1)
    with pytest.raises(TypeError, match=r"RotationPenalty works with lightning_sym.tasks.RotationTask, got ZooTask; "):
        fit(tmp_path, task, RotationPenalty())
