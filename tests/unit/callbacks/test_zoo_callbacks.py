"""ZooExport and ZooReport: what a fit leaves behind, and what they refuse before it starts."""

import functools
import json
import math

import fits
import pytest
import torch
from helpers import assert_refused, read_csv
from matplotlib.image import imread
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_sym.callbacks import ZooExport, ZooReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo, member_file


class Frail(Network):
    """A perceptron of which the member with seed 2 is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(64, 10)
        if torch.initial_seed() == 2:
            nn.init.constant_(self.classifier.bias, math.nan)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(x))


def perceptron(width=8) -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(width,), image_size=8)


digits = functools.partial(fits.digits, max_samples=48)


def fit(path, *callbacks, task=None, data=None, **changes) -> ZooTask:
    task = task or ZooTask(perceptron(), members=2)
    fits.fit(task, data or digits(), *callbacks, folder=path, **{"max_epochs": 2, **changes})
    return task


# ---- ZooExport


def test_exported_members_are_the_kept_ones(tmp_path):
    data = digits()
    task = fit(tmp_path, ZooExport(), task=ZooTask(MyrtleCNN(2, in_channels=1, image_size=8), members=3), data=data)
    zoo = ModelZoo.open(tmp_path / "zoo")
    assert zoo.numbers == [0, 1, 2]
    assert zoo.verify() == {}
    assert not list((tmp_path / "zoo").glob(".*writable*"))
    for number in zoo.numbers:
        member = zoo.member(number)
        state = zoo.load(number).state_dict()
        assert all(torch.equal(state[name], value) for name, value in task.kept[number]["state"].items())
        for split in ("train", "val", "test"):
            images, labels = data.split_tensors(split)
            guesses = zoo.load(number)(data.normalize(images)).argmax(1)
            assert member.metric(split, "accuracy") == float((guesses == labels).double().mean())
        assert member.metric("val", "accuracy") == task.kept[number]["metrics"]["accuracy"]
        assert member.data == json.loads(json.dumps(data.identity()))
        assert member.training["epoch_kept"] == task.kept[number]["epoch"] + 1
        assert member.training["epochs"] == 2
        assert member.training["optimizer"] == "Adam"
        assert member.training["loss"] == "CrossEntropy(label_smoothing=0.0)"


def test_further_seeds_add_members_and_taken_numbers_are_refused_unless_overwritten(tmp_path):
    fit(tmp_path, ZooExport())
    before = (tmp_path / "zoo" / member_file(0)).read_bytes()
    again = ZooTask(perceptron(), members=2, seed=1)
    says = "already has member(s) 1; train others (seed 2 of ZooTask, --model.seed), replace them"
    assert_refused(lambda: fit(tmp_path, ZooExport(), task=again), says=says)
    fit(tmp_path, ZooExport(overwrite=True), task=ZooTask(perceptron(), members=2, seed=1), max_epochs=1)
    zoo = ModelZoo.open(tmp_path / "zoo")
    assert [member.training["epochs"] for member in zoo] == [2, 1, 1]
    assert (tmp_path / "zoo" / member_file(0)).read_bytes() == before
    assert [e["number"] for e in json.loads((tmp_path / "zoo" / "manifest.json").read_text())["members"]] == [0, 1, 2]


@pytest.mark.parametrize("manifest", [True, False])
def test_other_architectures_and_data_are_refused(tmp_path, manifest):
    fit(tmp_path, ZooExport())
    if not manifest:
        (tmp_path / "zoo" / "manifest.json").unlink()

    def export(width=8, **changes):
        task = ZooTask(perceptron(width), members=1, seed=5)
        fit(tmp_path, ZooExport(), task=task, data=digits(**changes))

    assert_refused(
        lambda: export(9),
        says="holds MultiLayerPerceptron(widths=[8]) but this run trains MultiLayerPerceptron(widths=[9]); choose",
    )
    assert_refused(lambda: export(data_seed=1), says=["Member 0 of the zoo at", "--data.data_seed is 1, and was 0; "])
    assert_refused(lambda: export(mean=[0.5], std=[0.5]), says="other data: --data.mean is [0.5], and was null; ")
    export(batch_size=8)  # settings of the training only are no other data


def test_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "zoo").touch()
    task = ZooTask(perceptron(), members=1)
    with pytest.raises(OSError, match=r"The zoo's folder .*zoo cannot be written to .*; choose another"):
        fit(tmp_path, ZooExport(), task=task)
    assert not hasattr(task, "population") or not task.history


def test_training_that_ends_before_the_first_validation_says_what_is_missing(tmp_path):
    with pytest.warns(UserWarning, match="Members 0-1 could not be written: training ended before the first"):
        fit(tmp_path, ZooExport(), max_epochs=None, max_steps=1)
    assert not list((tmp_path / "zoo").glob("member-*"))


# ---- ZooReport


def test_stopped_member_is_reported_and_not_exported(tmp_path, capsys):
    with pytest.warns(UserWarning, match="Member 2 was stopped"):
        fit(tmp_path, ZooExport(), ZooReport(), task=ZooTask(Frail(), members=3, seed=1))
    assert ModelZoo.open(tmp_path / "zoo").numbers == [1, 3]
    rows = read_csv(tmp_path / "results" / "members.csv")
    assert [row["member"] for row in rows] == ["1", "2", "3"]
    assert [row["stopped"] for row in rows] == ["", "its training loss is not finite", ""]
    assert [row["test_accuracy"] == "" for row in rows] == [False, True, False]
    text = (tmp_path / "results" / "members.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["rows"][1]["test_accuracy"] is None
    assert "stopped: its training" in capsys.readouterr().out


@pytest.mark.drawn
def test_report_says_what_was_found(tmp_path, capsys):
    data, logger = digits(), TensorBoardLogger(tmp_path, name="run", version="")
    task = ZooTask(perceptron(), members=3, seed=4)
    fit(tmp_path, ZooReport(rows=1), ZooExport(), task=task, data=data, logger=logger)
    results = tmp_path / "run" / "results"
    rows, found = read_csv(results / "members.csv"), json.loads((results / "members.json").read_text())
    assert [int(row["member"]) for row in rows] == [row["member"] for row in found["rows"]] == [4, 5, 6]
    splits = task.split_metrics(data)
    for index, (row, same) in enumerate(zip(rows, found["rows"], strict=True)):
        assert float(row["epoch_kept"]) == task.kept[4 + index]["epoch"] + 1
        for split in ("train", "val", "test"):
            for name in ("accuracy", "loss"):
                value = float(splits[split][name][index])
                assert float(row[f"{split}_{name}"]) == same[f"{split}_{name}"] == value
    assert found["seeds"] == [4, 5, 6]
    assert found["architecture"] == perceptron().architecture
    assert found["data"]["fingerprint"] == data.identity()["fingerprint"]
    tags = EventAccumulator(str(tmp_path / "run")).Reload().Tags()
    for name in ("validation_curves", "confusion"):
        image = imread(results / f"{name}.png")
        assert image.ndim == 3
        assert image.std() > 0
        assert f"figures/ZooReport/{name}" in tags["images"]
    assert "2 more" in " ".join(capsys.readouterr().out.split())  # of three members one is listed


def test_report_works_with_loggers_that_take_no_figures(tmp_path):
    fit(tmp_path, ZooReport(), logger=[MetricsCSV(tmp_path / "run"), CSVLogger(tmp_path / "bare")])
    assert (tmp_path / "run" / "results" / "confusion.png").is_file()


# ---- metrics.csv


def test_metrics_csv_has_one_row_per_step(tmp_path):
    logger = MetricsCSV(tmp_path)
    for metrics, step in (({"a": 1.0}, 3), ({"b": 0.5}, 3), ({"a": 0.1 + 0.2}, 7)):
        logger.log_metrics(metrics, step)
    logger.save()
    assert read_csv(tmp_path / "metrics.csv") == [
        {"step": "3", "a": "1.0", "b": "0.5"},
        {"step": "7", "a": "0.30000000000000004", "b": ""},
    ]
    MetricsCSV(tmp_path / "nothing logged").finalize("success")
    assert not (tmp_path / "nothing logged").exists()


def test_metrics_csv_goes_on_where_the_run_is_resumed(tmp_path):
    def log(logger, *steps):
        for step in steps:
            logger.log_metrics({"a": step / 3, **({"late": 1.0} if step > 4 else {})}, step)
            logger.save()

    log(MetricsCSV(tmp_path / "whole"), 1, 3, 5, 7, 9)
    log(MetricsCSV(tmp_path / "resumed"), 1, 3, 5, 7)
    log(MetricsCSV(tmp_path / "resumed"), 5, 7, 9)
    assert (tmp_path / "resumed" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_what_a_resumed_run_ends_with_does_not_replace_the_last_row(tmp_path):
    for metrics in ({"a": 1.0}, {"final": 2.0}):
        logger = MetricsCSV(tmp_path)
        logger.log_metrics(metrics, 3)
        logger.save()
    assert read_csv(tmp_path / "metrics.csv") == [{"step": "3", "a": "1.0", "final": "2.0"}]


def test_metrics_csv_that_was_damaged_is_no_obstacle(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,step\n1,2\n3\nx,y,z\n")
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"a": 5.0}, 9)
    logger.save()
    assert [row["step"] for row in read_csv(tmp_path / "metrics.csv")] == ["2", "9"]


def test_metrics_of_a_fit_are_in_one_row_per_epoch(tmp_path):
    task = fit(tmp_path, logger=MetricsCSV(tmp_path))
    rows = read_csv(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["2", "5"]
    for epoch, row in enumerate(rows):
        for number in range(2):
            for name in ("train/accuracy", "val/loss"):
                logged = float(row[f"details/{name}/member-000{number}"])
                assert logged == pytest.approx(task.history[name][epoch][number])
