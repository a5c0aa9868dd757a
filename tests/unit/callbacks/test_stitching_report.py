"""The report of a stitching fit: what it evaluates, when, and what it leaves behind."""

import functools
import json
import math

import fits
import pytest
import torch
from fits import fit
from helpers import read_csv, write_zoo

from lightning_sym.callbacks import BatchNormRecalibration, StitchingReport
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import StitchingTask

pytestmark = [
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),
    pytest.mark.filterwarnings("ignore:.*was stopped in epoch"),
]


digits = functools.partial(fits.digits, batch_size=20, max_samples=100)


@pytest.fixture(scope="module")
def cnn_zoo(tmp_path_factory):
    """Two small CNNs with batch norm, untrained but for their running statistics."""
    data, members = digits(), [MyrtleCNN(width=2, in_channels=1, image_size=8).fresh(number) for number in range(2)]
    for member in members:
        member.train()(data.normalize(data.split_tensors("train").images))
    return write_zoo(tmp_path_factory.mktemp("cnn") / "zoo", members, data)


@pytest.mark.drawn
def test_both_kinds_of_statistics_are_evaluated_and_all_is_left_as_training_left_it(cnn_zoo, tmp_path):
    class Compare(StitchingReport):
        def on_train_end(self, trainer, pl_module):
            def buffers():
                return [value.clone() for branch in pl_module.branches for value in branch.buffers()]

            before, statistics = {name: value.clone() for name, value in pl_module.state_dict().items()}, buffers()
            super().on_train_end(trainer, pl_module)
            assert all(torch.equal(one, two) for one, two in zip(statistics, buffers(), strict=True))
            assert all(torch.equal(value, before[name]) for name, value in pl_module.state_dict().items())

    maps = ["full", "group", "identity"]
    task = StitchingTask(str(cnn_zoo), pairs=[[0, 1]], maps=maps)
    fit(task, digits(), BatchNormRecalibration(), Compare(), folder=tmp_path)
    rows = read_csv(tmp_path / "results" / "penalties.csv")
    assert len(rows) == len(maps) * (3 * 2 + 1)  # above the last site there is no batch norm
    for row in rows:
        assert (row["batch_norm"] == "none") == (row["site"] == "activation4")
        assert row["trained"] == str(row["family"] != "identity")
    about = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert about["recalibration"] == {"images": None, "batch_size": None, "exact": False}
    assert about["members"]["upper"] == {"1": task.zoos["upper"][0].member(1).sha256}
    assert about["data"]["fingerprint"] == digits().identity()["fingerprint"]
    assert (tmp_path / "results" / "penalties.png").stat().st_size > 10_000


def test_the_penalty_is_the_mean_accuracy_of_both_less_that_of_the_stitched(matching_zoo, tmp_path):
    # Member 1 is member 0 in another order and scale: what is assigned from features loses nothing.
    task = StitchingTask(str(matching_zoo), pairs=[[0, 1]], maps=["assignment", "identity"])
    fit(task, digits(), StitchingReport(), folder=tmp_path)
    rows = {(row["site"], row["family"]): row for row in read_csv(tmp_path / "results" / "penalties.csv")}
    data = digits()
    images, labels = data.split_tensors("test")
    with torch.no_grad():
        guesses = [task.members[key](data.normalize(images)).argmax(1) for key in "01"]
    accuracies = [float((guess == labels).double().mean()) for guess in guesses]
    for (_, family), row in rows.items():
        expected = sum(accuracies) / 2 - float(row["accuracy"])
        assert float(row["penalty"]) == pytest.approx(expected, abs=1e-12)
        assert (float(row["penalty"]) == 0) == (family == "assignment")
    assert float(rows["activation1", "assignment"]["sparsity"]) == pytest.approx(1 - 1 / 12)


def test_a_stitch_that_diverged_is_named_and_has_no_penalty(cnn_zoo, tmp_path, capsys):
    class Diverging(StitchingTask):
        def on_train_batch_start(self, batch, batch_idx):
            with torch.no_grad():
                for parameter in self.parameters_of(0):
                    parameter.fill_(math.nan)

    task = Diverging(str(cnn_zoo), pairs=[[0, 1]], sites=["activation1"], maps=["group", "full"])
    fit(task, digits(), BatchNormRecalibration(), StitchingReport(), folder=tmp_path)
    rows = {(r["family"], r["batch_norm"]): r for r in read_csv(tmp_path / "results" / "penalties.csv")}
    assert rows["group", "recalibrated"]["penalty"] == ""
    assert rows["group", "recalibrated"]["stopped"] == "its training loss is not finite"
    assert math.isfinite(float(rows["full", "recalibrated"]["penalty"]))
    assert "pair-0-1/activation1/group was stopped" in " ".join(capsys.readouterr().out.split())


def test_choosing_is_checked_before_training(cnn_zoo, tmp_path):
    task = StitchingTask(str(cnn_zoo), pairs=[[0, 1]], maps=["full", "group(0.1)", "group"])
    with pytest.raises(ValueError, match="choose names 'group', which needs two or more maps"):
        fit(task, digits(), StitchingReport(choose=["group"]), folder=tmp_path)
    task = StitchingTask(str(cnn_zoo), pairs=[[0, 1]], maps=["group(1)", "group(0.1)"])
    with pytest.raises(ValueError, match="choose needs validation data"):
        fit(task, digits(val_fraction=0.0), StitchingReport(choose=["group"]), folder=tmp_path)
    with pytest.raises(ValueError, match="choose must be a list of different names"):
        StitchingReport(choose=["group", "group"])
    fit(task, digits(), BatchNormRecalibration(), StitchingReport(choose=["group"]), folder=tmp_path)
    rows = read_csv(tmp_path / "results" / "choices.csv")
    assert sum(int(row["pairs"]) for row in rows) == 4  # one pair at four sites
