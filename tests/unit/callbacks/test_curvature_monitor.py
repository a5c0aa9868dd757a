"""CurvatureMonitor: what it measures, and when; test_training_monitors.py has what all monitors share."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experiments import Plain
from fits import digits
from fits import fit as fit_task
from helpers import dead_charts, read_csv, read_rows, refused
from matplotlib.container import ErrorbarContainer
from matplotlib.image import imread
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.callbacks import CurvatureMonitor, curvature_monitor
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.curvature import trace
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

pytestmark = pytest.mark.long


class Noted(Plain):
    """Keeps its weights before every step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3)
        super().__init__(nn.Sequential(*layers), momentum=0.9)
        self.path: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        self.path.append(torch.cat([p.detach().flatten() for p in self.parameters()]).double())
        return super().training_step(batch, batch_idx)


def samples() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    return torch.randn(24, 4, generator=draws), torch.randint(3, (24,), generator=draws)


def loader(**settings) -> DataLoader:
    return DataLoader(TensorDataset(*samples()), 8, shuffle=True, **settings)


def fit(path: Path, task: LightningModule, *callbacks, data=None, **changes) -> None:
    torch.manual_seed(1)  # of the order and of dropout
    settings = {"max_epochs": 3, "log_every_n_steps": 1, "logger": MetricsCSV(path), **changes}
    fit_task(task, loader() if data is None else data, *callbacks, folder=path, **settings)


def dense(network: nn.Module) -> Tensor:
    network = network.double().eval()
    x, y = samples()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = zip(parameters.items(), torch.split(vector, sizes), strict=True)
        weights = {name: part.view(p.shape) for (name, p), part in parts}
        return F.cross_entropy(functional_call(network, weights, (x.double(),)), y)

    return hessian(loss)(torch.cat([p.flatten() for p in parameters.values()]))


@pytest.mark.drawn
def test_numbers_are_those_of_the_dense_hessian_at_the_end(tmp_path) -> None:
    task, monitor = Noted(), CurvatureMonitor(probes=60, tolerance=1e-5)
    fit(tmp_path, task, monitor)
    last = monitor.points[-1]["members"][0]
    after = torch.cat([p.detach().flatten() for p in task.network.parameters()]).double()
    direction = (after - task.path[-1]) / (after - task.path[-1]).norm()
    matrix = dense(task.network)
    assert last["top_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4)
    assert last["along_step"] == pytest.approx(float(direction @ matrix @ direction), rel=1e-4)
    assert abs(last["trace"] - float(matrix.trace())) < 5 * last["trace_error"]
    assert [(point["step"], point["epoch"]) for point in monitor.points] == [(0, 0), (3, 1), (6, 2), (9, 3)]
    rows = read_rows(tmp_path / "results" / "curvature")
    steps = [row["along_step"] for row in rows]
    assert steps == [None, *(point["members"][0]["along_step"] for point in monitor.points[1:])]
    assert list(rows[0])[:3] == ["step", "epoch", "member"]
    logged = [row["curvature/along_step"] for row in read_csv(tmp_path / "metrics.csv")]
    assert [float(value) for value in logged if value] == pytest.approx(steps[1:])
    assert float(imread(tmp_path / "results" / "curvature.png")[..., :3].std()) > 0.05


def test_every_so_many_optimizer_steps_while_gradients_accumulate(tmp_path) -> None:
    monitor = CurvatureMonitor(every_n_steps=2, probes=2, train_batches=1)
    fit(tmp_path, Noted(), monitor, accumulate_grad_batches=2, max_epochs=2)
    assert [point["step"] for point in monitor.points] == [0, 2, 4]
    assert all("along_step" in point["members"][0] for point in monitor.points[1:])


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_members_of_a_population_are_those_trained_alone(tmp_path, execution: str) -> None:
    def run(name: str, members: int = 2) -> CurvatureMonitor:
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), members, optimizer=sgd, execution=execution)
        monitor = CurvatureMonitor(probes=2, train_batches=1)
        fit(tmp_path / name, task, monitor, data=digits(), max_epochs=2)
        return monitor

    whole = run("whole").points[-1]["members"]
    tags = read_csv(tmp_path / "whole" / "metrics.csv")[-1]
    assert dead_charts(CurvatureMonitor().charts, tags) == []
    mean = sum(values["top_eigenvalue"] for values in whole.values()) / 2
    assert float(tags["curvature/top_eigenvalue"]) == pytest.approx(mean, rel=1e-6)
    assert float(tags["details/curvature/trace/member-0001"]) == pytest.approx(whole[1]["trace"], rel=1e-6)
    alone = run("alone", members=1).points[-1]["members"][0]
    assert alone == {name: pytest.approx(value, rel=1e-3) for name, value in whole[0].items()}


def test_errors_of_members_are_independent_and_those_of_the_mean_are_combined(tmp_path, monkeypatch) -> None:
    signs = []

    def noted(operator, probes, *, generator):
        signs.append(generator.initial_seed())
        return trace(operator, probes, generator=generator)

    monkeypatch.setattr(curvature_monitor.curvature, "trace", noted)
    task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), members=3)
    monitor = CurvatureMonitor(probes=4, train_batches=1)
    fit(tmp_path, task, monitor, data=digits(), max_epochs=1)
    assert signs[:3] == signs[3:]
    assert len(set(signs)) == 3  # with the same signs, all errors of a trained population have one sign
    errors = [values["trace_error"] for values in monitor.points[-1]["members"].values()]
    logged = float(read_csv(tmp_path / "metrics.csv")[-1]["curvature/trace_error"])
    assert logged == pytest.approx(math.sqrt(sum(error**2 for error in errors)) / 3, rel=1e-6)
    figure = dict(monitor.results("a network", [0, 1, 2]).figures)["curvature"]
    (bars,) = [bar for axes in figure.axes for bar in axes.containers if isinstance(bar, ErrorbarContainer)]
    low, high = bars.lines[2][0].get_segments()[-1][:, 1]
    assert (high - low) / 2 == pytest.approx(logged, rel=1e-6)


def test_a_network_that_diverges_has_no_numbers(tmp_path) -> None:
    task, monitor = Noted(), CurvatureMonitor(probes=2)
    task.configure_optimizers = lambda: torch.optim.SGD(task.parameters(), lr=math.inf)
    fit(tmp_path, task, monitor, max_epochs=2)
    assert [set(point["members"][0]) == set() for point in monitor.points] == [False, True, True]
    row = read_rows(tmp_path / "results" / "curvature")[-1]
    assert (row["loss"], row["top_eigenvalue"]) == (None, None)


def test_what_is_not_found_is_left_out_with_a_warning(tmp_path, monkeypatch) -> None:
    search = functools.partial(curvature_monitor.curvature.top_eigenvalue, max_products=5)
    monkeypatch.setattr(curvature_monitor.curvature, "top_eigenvalue", search)
    monitor = CurvatureMonitor(probes=2, tolerance=1e-9)
    with pytest.warns(UserWarning, match="leaves out a measurement: the largest eigenvalue was found to"):
        fit(tmp_path, Noted(), monitor, max_epochs=1)
    assert set(monitor.points[0]["members"][0]) == {"loss", "trace", "trace_error"}


def without_loss() -> None:
    task = Noted()
    del task.criterion
    fit(Path(), task, CurvatureMonitor(), logger=False)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(CurvatureMonitor, probes=1),
        refused(CurvatureMonitor, tolerance=1.0),
        refused(without_loss, says=["loss=", "Noted"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(refusal: Callable[[], None]) -> None:
    refusal()
