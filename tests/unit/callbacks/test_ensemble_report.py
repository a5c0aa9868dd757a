"""EnsembleReport: members of a zoo, and points of curves, are scored as the networks that they are."""

import pytest
import torch
from experiments import HalfBlindTask
from fits import digits, fit
from helpers import assert_refused, read_rows, write_zoo

from lightning_sym.callbacks import EnsembleReport
from lightning_sym.connectivity import curve_barriers
from lightning_sym.ensembles import ensemble_scores, log_probabilities
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import CurveTask, ZooTask


def last_rows(folder):
    return {row["ensemble"]: row for row in read_rows(folder / "results" / "ensembles")}


@pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")
def test_points_of_a_curve_its_ends_and_all_members(tmp_path):
    networks = [MyrtleCNN(2, in_channels=1, image_size=8).fresh(number) for number in range(3)]
    zoo, data = write_zoo(tmp_path / "zoo", networks, digits()), digits()
    task = CurveTask(str(zoo), pairs=[[0, 2], [0, 1]])
    report = EnsembleReport(points=3, zoos={"others": str(zoo)})
    fit(task, data, report, folder=tmp_path)
    rows = last_rows(tmp_path)
    assert rows.keys() == {f"{pair}/{what}" for pair in ("0-2", "0-1") for what in ("ends", "bezier", "chain")} | {
        "members",
        "others",
    }
    for (name, curve), kind in zip(list(task.curves.items())[:2], ("bezier", "chain"), strict=True):
        # The losses of the points are those that are measured on curves, with statistics measured anew as there.
        found = curve_barriers(
            curve,
            networks[0],
            {"test": data.test_dataloader()},
            points=3,
            recalibration_data=data.curvature_dataloader(),
        )
        row = rows[f"0-2/{kind}"]
        assert name.kind == kind
        assert row["mean_loss"] == pytest.approx(float(found["test"].loss.mean()), rel=1e-4)
        assert row["loss"] == pytest.approx(row["mean_loss"] - row["ambiguity"], abs=1e-12)
    images = [data.normalize(data.split_tensors("train").images)]
    predicted, labels = log_probabilities([networks[0], networks[2]], data.test_dataloader(), recalibration_data=images)
    assert rows["0-2/ends"]["loss"] == pytest.approx(
        float(ensemble_scores(predicted, labels).together.loss[-1]), rel=1e-3
    )
    assert rows["members"] == {**rows["others"], "ensemble": "members", "kind": "members"}
    assert rows["members"]["members"] == 3


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_members_of_a_zoo_that_was_trained(tmp_path, precision):
    task, data = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), members=3), digits()
    fit(task, data, EnsembleReport(), folder=tmp_path, precision=precision)
    networks = [task.network.fresh(0).to(torch.float64 if "64" in precision else torch.float32) for _ in range(3)]
    for number, network in enumerate(networks):
        network.load_state_dict(task.kept[number]["state"])
    batches = [(images.to(next(networks[0].parameters()).dtype), labels) for images, labels in data.test_dataloader()]
    scores = ensemble_scores(*log_probabilities(networks, batches))
    row = last_rows(tmp_path)["members"]
    assert row["loss"] == pytest.approx(float(scores.together.loss[-1]), rel=1e-5)
    assert row["disagreement"] == pytest.approx(float(scores.disagreement[-1]), abs=1e-9)


def test_tasks_and_zoos_that_cannot_be_scored_are_refused(tmp_path):
    assert_refused(fit, HalfBlindTask(), digits(), EnsembleReport(), folder=tmp_path, says="trains neither")
    zoo = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8))
    missing = EnsembleReport(zoos={"nowhere": str(tmp_path / "nowhere")})
    assert_refused(fit, zoo, digits(), missing, folder=tmp_path, says="No zoo at", error=FileNotFoundError)
