"""RotationReport: the tables say what was found, and agree with the task, the loggers and the terminal."""

import json

import numpy as np
import pytest
from fits import fit
from helpers import read_csv
from matplotlib.image import imread
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sym.callbacks import RotationReport
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.tasks import RotationTask

KINDS = ["group", "orthogonal", "none", "undo"]


def digits():
    return DigitsDataModule(batch_size=100, max_samples=300)


def test_a_run_leaves_tables_a_figure_and_numbers_and_says_where(matching_zoo, tmp_path, capsys):
    task = RotationTask(str(matching_zoo), members=[0, 2], sites="all", kinds=KINDS, repeats=2)
    loggers = [TensorBoardLogger(tmp_path.parent, tmp_path.name, ""), MetricsCSV(tmp_path)]
    fit(task, digits(), RotationReport(), folder=tmp_path, logger=loggers, max_epochs=2)
    results = tmp_path / "results"
    tables = ("penalties", "summary")
    assert {file.name for file in results.iterdir()} == {
        "rotation_penalty.png", *(f"{name}.{kind}" for name in tables for kind in ("csv", "json")),
    }  # fmt: skip
    assert imread(results / "rotation_penalty.png").std() > 0.01
    rows, summary = (read_csv(results / f"{name}.csv") for name in tables)
    assert [(int(r["member"]), r["site"], r["kind"], int(r["repeat"])) for r in rows] == [
        (r.member, r.site, r.kind, r.repeat) for r in task.rotations
    ]
    for index, row in enumerate(rows):
        for split in ("val", "test"):
            expected = float(row[f"member_{split}_accuracy"]) - float(row[f"{split}_accuracy"])
            assert float(row[f"{split}_penalty"]) == pytest.approx(expected, abs=1e-7)
        if row["kind"] == "undo":
            assert (row["epoch"], float(row["test_penalty"]), float(row["val_penalty"])) == ("", 0.0, 0.0)
        else:
            assert int(row["epoch"]) == task.kept[index]["epoch"]
            assert float(row["val_accuracy"]) == pytest.approx(task.kept[index]["metrics"]["accuracy"], abs=1e-7)
    for name in tables:
        about = json.loads((results / f"{name}.json").read_text())
        assert {"what", "units", "kinds", "zoo", "architecture", "versions", "rows", "epochs"} <= set(about)
        assert about["data"]["fingerprint"] == digits().identity()["fingerprint"]
        assert (about["seed"], about["settings"]["repeats"], about["settings"]["scale"]) == (0, 2, 1.0)
        assert about["members"]["2"] == task.model_zoo.member(2).sha256

    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0}).Reload()
    assert events.Tags()["images"] == ["figures/RotationReport/rotation_penalty"]
    (last,) = [row for row in read_csv(tmp_path / "metrics.csv") if row.get("test_penalty/group")]
    for row in summary:
        name = f"test_penalty/{row['site']}/{row['kind']}"
        assert float(last[name]) == pytest.approx(float(row["penalty"]), abs=1e-9)
        assert events.Scalars(name)[-1].value == pytest.approx(float(row["penalty"]), abs=1e-6)
    group = np.mean([float(row["test_penalty"]) for row in rows if row["kind"] == "group"])
    assert events.Scalars("hp_metric")[-1].value == pytest.approx(group, abs=1e-6)

    out = capsys.readouterr().out
    for word in ("Rotation penalty, points: MultiLayerPerceptron, 2 members", "0.0 ± 0.0", "orthogonal less"):
        assert word in out
    for name in ("rotation_penalty.png", "summary.csv", "penalties.csv"):
        assert str(results / name) in out
