"""SymmetryMonitor: what it measures, and when; test_training_monitors.py has what all monitors share."""

import json
from pathlib import Path

import pytest
import torch
from experiments import Plain
from fits import digits
from fits import fit as fit_task
from helpers import Program, assert_refused, of, read_csv, read_rows
from matplotlib.image import imread
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.callbacks import SymmetryMonitor
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks import ZooTask

pytestmark = pytest.mark.long


def sequential(seed: int = 0, activation: type[nn.Module] = nn.ReLU, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    norms = [nn.BatchNorm1d(7)] if norm else []
    return nn.Sequential(nn.Linear(4, 7), *norms, activation(), nn.Linear(7, 5), activation(), nn.Linear(5, 3))


def loader(batch_size: int = 8, count: int = 24, **settings) -> DataLoader:
    draws = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=draws)
    return DataLoader(TensorDataset(inputs, torch.randint(3, (count,), generator=draws)), batch_size, **settings)


def fit(path: Path, task: LightningModule, *callbacks: Callback, data=None, **changes) -> None:
    settings = {"max_epochs": 2, "log_every_n_steps": 1, **changes}
    fit_task(task, data if data is not None else loader(), *callbacks, folder=path, **settings)


def rows(path: Path, name: str = "symmetry") -> list[dict[str, float | str | None]]:
    found = read_rows(path / "results" / name)
    assert [list(row) for row in read_csv(path / "results" / f"{name}.csv")] == [list(row) for row in found]
    return found


def curve(path: Path, group: str, quantity: str, member: int = 0) -> list[float]:
    return [row[quantity] for row in rows(path) if row["group"] == group and row["member"] == member]


# ---- what is measured


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_gradient_descent_conserves_to_first_order(tmp_path, norm):
    """The identity <w_in, g_in> = <w_out, g_out>: one step changes the quantity by O(lr^2), a time of 1 by O(lr)."""
    drifts = {}
    for steps in (20, 40):
        path = tmp_path / str(steps)
        task = Plain(sequential(norm=norm), lr=1 / steps)
        fit(path, task, SymmetryMonitor(), data=loader(24), max_epochs=steps, precision="64-true")
        drifts[steps] = [curve(path, group, "drift")[-1] for group in ("0", "3" if norm else "2")]
        assert rows(path, "symmetry_distance")[-1]["parameters"] > 20 * max(drifts[steps])
    for index in range(2):
        assert 1e-8 < drifts[40][index] < 0.01
        # Halving the step halves the drift, up to terms of higher order.
        assert drifts[40][index] / drifts[20][index] == pytest.approx(0.5, rel=0.15)


# ---- when


def test_every_so_many_optimizer_steps(tmp_path):
    """Gradients accumulate over two of an epoch's six batches: a step is not a batch."""
    monitor = SymmetryMonitor(every_n_steps=2)
    fit(tmp_path, Plain(sequential()), monitor, data=loader(4), accumulate_grad_batches=2, max_epochs=2)
    found = [(row["step"], row["epoch"]) for row in rows(tmp_path) if row["group"] == "0"]
    assert found == [(0, 0), (2, pytest.approx(4 / 6)), (4, pytest.approx(1 + 2 / 6)), (6, 2)]


# ---- where the network is, and what it is called with


class Other(Plain):
    """The network is elsewhere, and the batch is a dictionary."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.parts = nn.ModuleDict({"body": sequential()})
        self.lr, self.optimizer = 0.05, {}

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["body"](x)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch if isinstance(batch, list) else (batch["x"], batch["y"]), batch_idx)


class Late(Plain):
    """The network is made when the fit begins."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        del self.network

    def configure_model(self) -> None:
        if not hasattr(self, "network"):
            self.network = sequential()


@pytest.mark.parametrize("network", ["parts.body", ""])
def test_network_may_be_anywhere(tmp_path, network):
    task = Other()
    fit(tmp_path, task, SymmetryMonitor(network=network))
    prefix = "" if network else "parts.body."
    assert [row["group"] for row in rows(tmp_path)][:2] == [f"{prefix}0", f"{prefix}2"]


def test_network_may_be_made_late(tmp_path):
    fit(tmp_path, Late(), SymmetryMonitor())
    assert len(rows(tmp_path)) == 6


def dictionaries() -> DataLoader:
    inputs, labels = loader().dataset.tensors
    return DataLoader([{"x": x, "y": y} for x, y in zip(inputs, labels, strict=True)], 8)


def test_example_input_array_is_used(tmp_path):
    fit(tmp_path, with_example(torch.zeros(1, 4)), SymmetryMonitor(network="parts.body"), data=dictionaries())
    assert len(rows(tmp_path)) == 6


def branching() -> nn.Module:
    return Program(lambda net, x: net.linear(x if x.sum() > 0 else -x), {"linear": of(nn.Linear, 4, 3)})


def with_example(example) -> Other:
    task = Other()
    task.example_input_array = example
    return task


@pytest.mark.parametrize(
    ("task", "settings", "data", "says"),
    [
        (Other, {}, loader, ['network="network")', 'attribute; set network to its path: network="parts", network="" ']),
        (lambda: Plain(sequential()), {"network": "lr"}, loader, "Plain has a float there, not an nn.Module"),
        (Other, {"network": "parts.body"}, dictionaries, "a batch is a dict; set example_input_array in Other.__"),
        (lambda: with_example({"x": torch.zeros(1, 4)}), {"network": "parts.body"}, loader,
         "example_input_array of Other is a dict; make it a tensor or a tuple"),
        (lambda: Plain(branching()), {}, loader, "the network cannot be traced"),
    ],
)  # fmt: skip
def test_errors_before_training(tmp_path, task, settings, data, says):
    assert_refused(lambda: fit(tmp_path, task(), SymmetryMonitor(**settings), data=data()), says=says)


# ---- populations


def zoo(**changes) -> ZooTask:
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    network = MultiLayerPerceptron(widths=(8, 6), image_size=8)
    return ZooTask(**{"network": network, "members": 2, "optimizer": adam, **changes})


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_members_are_those_trained_alone(tmp_path, execution):
    fit(tmp_path / "all", zoo(members=3, execution=execution), SymmetryMonitor(), data=digits(max_samples=48))
    for number in range(3):
        path = tmp_path / str(number)
        fit(path, zoo(members=1, seed=number, execution=execution), SymmetryMonitor(), data=digits(max_samples=48))
        for quantity in ("imbalance", "conserved", "drift", "dead"):
            expected = curve(path, "linear2", quantity, number)
            assert curve(tmp_path / "all", "linear2", quantity, number) == pytest.approx(expected, rel=1e-4)


def test_members_that_are_not_finite_are_left_out(tmp_path):
    class Broken(ZooTask):
        def on_train_batch_start(self, batch, batch_idx):
            if self.current_epoch == 1:
                with torch.no_grad():
                    next(iter(self.population.member_parameters(1))).fill_(torch.nan)

    task = Broken(MultiLayerPerceptron(widths=(8, 6), image_size=8), members=2)
    logger = MetricsCSV(tmp_path)
    with pytest.warns(UserWarning, match="Member 1 was stopped"):
        fit(tmp_path, task, SymmetryMonitor(), data=digits(max_samples=48), logger=logger)
    assert curve(tmp_path, "linear1", "imbalance", 1)[-1] is None
    assert curve(tmp_path, "linear1", "imbalance", 0)[-1] > 0
    last = read_csv(tmp_path / "metrics.csv")[-1]
    assert last["symmetry/imbalance/linear1"] == last["details/symmetry/imbalance/linear1/member-0000"]
    assert last["details/symmetry/imbalance/linear1/member-0001"] == ""


# ---- what is left behind


@pytest.mark.drawn
def test_tensorboard_and_files(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit(tmp_path, zoo(), SymmetryMonitor(), data=digits(max_samples=48), logger=logger)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    for name in ("imbalance/linear1", "conserved/linear2", "drift/linear2", "dead/linear1", "distance/balanced"):
        assert f"symmetry/{name}" in tags["scalars"]
        assert f"details/symmetry/{name}/member-0001" in tags["scalars"]
    assert [event.step for event in events.Scalars("symmetry/drift/linear1")] == [0, 2, 5]
    panels = [f"figures/SymmetryMonitor/symmetry/{number}" for number in range(1, len(tags["images"]) + 1)]
    assert tags["images"] == panels
    assert len(panels) >= 3
    assert tags["tensors"] == ["symmetry/text_summary"]
    text = (tmp_path / "results" / "symmetry.txt").read_text()
    network = MultiLayerPerceptron(widths=(8, 6), image_size=8)
    assert text.splitlines()[0] == str(trace_symmetry(network, torch.zeros(2, 1, 8, 8))).splitlines()[0]
    picture = imread(tmp_path / "results" / "symmetry.png")
    assert picture.shape[1] > 700
    assert float(picture[..., :3].std()) > 0.05
    about = json.loads((tmp_path / "results" / "symmetry.json").read_text())
    assert about["units"]["drift"].startswith("sum over units")
    assert [row["group"] for row in about["symmetry"]] == ["linear1", "linear2"]
