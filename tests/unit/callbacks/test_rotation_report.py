"""RotationReport: the tables and the headline say what was found, and agree with the task."""

import functools
import json

import fits
import numpy as np
import pytest
from fits import fit
from helpers import read_csv
from matplotlib.image import imread

from lightning_sym.callbacks import RotationReport
from lightning_sym.tasks import RotationTask

KINDS = ["group", "orthogonal", "none", "undo"]


digits = functools.partial(fits.digits, batch_size=100, max_samples=300)


@pytest.mark.drawn
def test_a_run_leaves_tables_a_figure_and_a_headline(matching_zoo, tmp_path):
    task = RotationTask(str(matching_zoo), members=[0, 2], sites="all", kinds=KINDS, repeats=2)
    report = RotationReport()
    fit(task, digits(), report, folder=tmp_path, max_epochs=2)
    results = tmp_path / "results"
    tables = ("penalties", "summary")
    assert {file.name for file in results.iterdir()} == {
        "rotation_penalty.png", *(f"{name}.{kind}" for name in (*tables, "numbers") for kind in ("csv", "json")),
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

    numbers = {
        f"{'details/' if row['kind'] == 'undo' else ''}test_penalty/{row['site']}/{row['kind']}": float(row["penalty"])
        for row in summary
    }
    assert {name: report.results.numbers[name] for name in numbers} == pytest.approx(numbers, abs=1e-9)
    group = np.mean([float(row["test_penalty"]) for row in rows if row["kind"] == "group"])
    assert report.results.numbers[report.results.headline] == pytest.approx(group, abs=1e-6)
