"""Learning coefficients along training: which networks and data, what is logged; see test_training_monitors.py, too."""

import functools

import pytest
import torch
from fits import Given, digits, fit
from helpers import assert_refused, dead_charts, read_csv, read_rows, refused
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sym.callbacks import CalibrationReport, LearningCoefficient
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.landscape import learning_coefficient
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import AnalyticLandscapesTask, ZooTask

SHORT = {"chains": 3, "steps": 8}


class Regression(LightningModule):
    """Somebody else's module: one linear layer, squared errors, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 2))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.body(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs(count: int = 20) -> TensorDataset:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=source)
    return TensorDataset(x, x[:, :2] + 0.1 * torch.randn(count, 2, generator=source))


def small_zoo(members: int = 2) -> ZooTask:
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    return ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=members, optimizer=sgd, keep="last")


def test_any_module_with_any_loader_is_measured(tmp_path) -> None:
    module, callback = Regression(), LearningCoefficient(network="body", loss=F.mse_loss, every_n_epochs=1, **SHORT)
    fit(module, DataLoader(pairs(), batch_size=7, shuffle=True), callback, folder=tmp_path, max_epochs=3)
    rows = read_rows(tmp_path / "results" / "learning_coefficient")
    assert [row["epoch"] for row in rows] == [1.0, 2.0, 3.0]
    found = learning_coefficient(module.body, DataLoader(pairs(), 20), F.mse_loss, **SHORT)
    assert rows[-1]["reference"] == pytest.approx(found.reference, rel=1e-5)
    assert rows[-1]["refusal"].partition(":")[0] == found.refusal.partition(":")[0]
    assert (rows[-1]["samples"], rows[-1]["parameters"], rows[-1]["chains"]) == (20, 8, 3)


@pytest.mark.drawn
@pytest.mark.long
def test_members_have_estimates_of_their_own_and_are_logged(tmp_path) -> None:
    task, data = small_zoo(), digits()
    callback = LearningCoefficient(localisation=200.0, chains=20, steps=200)
    fit(task, data, callback, folder=tmp_path, max_epochs=2, logger=MetricsCSV(tmp_path))
    rows = read_rows(tmp_path / "results" / "learning_coefficient")
    assert [(row["epoch"], row["network"]) for row in rows] == [(2.0, "member-0000"), (2.0, "member-0001")]
    for number, row in enumerate(rows):
        network = task.network.fresh(number)
        network.load_state_dict(task.population.member_state(number))
        found = learning_coefficient(network, data.curvature_dataloader(), localisation=200.0, chains=20, steps=200)
        assert row["estimate"] == (
            found.estimate if found.estimate is None else pytest.approx(found.estimate, rel=1e-4)
        )
        assert row["refusal"] == found.refusal
    logged = [row for row in read_csv(tmp_path / "metrics.csv") if row.get("learning_coefficient/refused")]
    assert dead_charts(callback.charts, logged[0]) == []
    assert float(logged[0]["learning_coefficient/refused"]) == sum(bool(row["refusal"]) for row in rows)
    for number, row in enumerate(rows):
        value = logged[0].get(f"details/learning_coefficient/estimate/member-{number:04}")
        assert (row["estimate"] is None and not value) or float(value) == pytest.approx(row["estimate"])
    for name in ("learning_coefficient.png", "learning_coefficient_traces.png", "learning_coefficient_traces.csv"):
        assert (tmp_path / "results" / name).is_file()


def test_a_network_that_diverged_has_a_reason_and_the_other_one_a_row(tmp_path) -> None:
    task = small_zoo()

    class Break(LearningCoefficient):
        def measure(self, trainer, pl_module):
            if trainer.global_step == 0:
                return super().measure(trainer, pl_module)
            state = pl_module.population.member_state(0)
            pl_module.population.set_member_state(0, {name: value * torch.nan for name, value in state.items()})
            return super().measure(trainer, pl_module)

    fit(task, None, Break(**SHORT), folder=tmp_path)
    first, second = read_rows(tmp_path / "results" / "learning_coefficient")
    assert (first["refusal"], first["estimate"], first["ratio"]) == ("its weights are not finite.", None, None)
    assert second["reference"] > 0


class Endless(IterableDataset):
    def __iter__(self):
        return iter(pairs())


@pytest.mark.parametrize(
    ("data", "changes", "says"),
    [
        (Given(*pairs().tensors), {"loss": None}, "needs the loss of outputs and targets, but Regression has no loss"),
        (Given(*pairs().tensors), {"loss": F.cross_entropy}, "the cross-entropy needs class indices"),
        (DataLoader(Endless(), 4), {}, "in a fixed order"),
        (Given(*pairs().tensors), {"network": "head"}, 'set network to its path: network="body"'),
    ],
    ids=["loss", "cross-entropy", "endless", "network"],
)
def test_what_does_not_fit_is_refused_in_one_sentence(data, changes, says, tmp_path) -> None:
    callback = LearningCoefficient(**{"network": "body", "loss": F.mse_loss, **SHORT, **changes})
    error = TypeError if "order" in says else ValueError
    assert_refused(fit, Regression(), data, callback, folder=tmp_path, says=says, error=error)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "refusal",
    [
        refused(LearningCoefficient, chains=2),
        refused(LearningCoefficient, steps=7),
        refused(LearningCoefficient, steps=100, burn_in=40, says="burn_in must be at least half of steps=100"),
        refused(LearningCoefficient, localisation=-1.0),
        refused(LearningCoefficient, inverse_temperature=0.0),
        refused(LearningCoefficient, step=0.0),
        refused(LearningCoefficient, method="rmsprop"),
        refused(LearningCoefficient, execution="map"),
        refused(LearningCoefficient, batch_size=0),
        refused(LearningCoefficient, seed=-1),
        refused(AnalyticLandscapesTask, landscapes=["x^3"], says="Unknown landscape 'x^3'"),
        refused(AnalyticLandscapesTask, landscapes=[], says="list of different names"),
        refused(AnalyticLandscapesTask, chains=2),
        refused(AnalyticLandscapesTask, steps=7),
    ],
)
def test_wrong_settings_are_refused_at_once(refusal) -> None:
    refusal()


@pytest.mark.drawn
@pytest.mark.long
def test_calibration_stands_beside_theory(tmp_path, capsys) -> None:
    names = ["3x²+5y²", "x^2 y^2", "3x²+5y², SGLD, unstable"]
    task, report = AnalyticLandscapesTask(names, chains=300, steps=1500), CalibrationReport()
    data = GaussianInputsDataModule([3, 1, 1], samples=8, batch_size=8)
    fit(task, data, report, folder=tmp_path, max_epochs=0)
    rows = {row["network"]: row for row in read_rows(tmp_path / "results" / "calibration")}
    assert list(rows) == names
    assert rows["x^2 y^2"]["exact"] == pytest.approx(0.39027, abs=1e-5)
    assert rows["x^2 y^2"]["theory"] == 0.5
    unstable = rows["3x²+5y², SGLD, unstable"]
    assert (unstable["estimate"], unstable["exact"], unstable["escaped"]) == (None, None, 300)
    assert {name for name, _ in report.results.figures} <= {"calibration", "calibration_traces"}
    assert (tmp_path / "results" / "calibration_traces.png").is_file()
    printed = capsys.readouterr().out
    assert "left to infinity" in printed
    assert all(len(line) <= 80 for line in printed.split("± standard error")[0].splitlines())


def test_inputs_of_too_few_numbers_are_refused() -> None:
    task = AnalyticLandscapesTask(["x^2"], chains=3, steps=8)
    assert_refused(task.calibrate, torch.zeros(4, 2), print, says="at least 3 numbers, got shape [4, 2]")
