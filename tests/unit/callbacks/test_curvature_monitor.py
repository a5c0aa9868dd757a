"""CurvatureMonitor: what it measures and when, that it leaves training alone, and that it goes on after a resume."""

import functools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fits import Interrupt, digits, saving
from fits import fit as fit_task
from helpers import assert_refused, read_csv, refused
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sym.callbacks import CurvatureMonitor
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask


class Plain(LightningModule):
    """What a user may write."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.path: list[Tensor] = []  # the weights after every step

    def training_step(self, batch, batch_idx):
        self.path.append(torch.cat([p.detach().flatten() for p in self.parameters()]).double())
        return self.criterion(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


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


def test_numbers_are_those_of_the_dense_hessian_at_the_end(tmp_path) -> None:
    task, monitor = Plain(), CurvatureMonitor(probes=60, tolerance=1e-5)
    fit(tmp_path, task, monitor)
    last = monitor.points[-1]["members"][0]
    after = torch.cat([p.detach().flatten() for p in task.network.parameters()]).double()
    direction = (after - task.path[-1]) / (after - task.path[-1]).norm()
    matrix = dense(task.network)
    assert last["top_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4)
    assert last["step"] == pytest.approx(float(direction @ matrix @ direction), rel=1e-4)
    assert abs(last["trace"] - float(matrix.trace())) < 5 * last["trace_error"]
    assert [(point["step"], point["epoch"]) for point in monitor.points] == [(3, 1), (6, 2), (9, 3)]
    logged = [float(row["curvature/step"]) for row in read_csv(tmp_path / "metrics.csv") if row["curvature/step"]]
    assert logged == [pytest.approx(point["members"][0]["step"]) for point in monitor.points]


def test_every_so_many_optimizer_steps_while_gradients_accumulate(tmp_path) -> None:
    monitor = CurvatureMonitor(every_n_steps=2, probes=2, train_batches=1)
    fit(tmp_path, Plain(), monitor, accumulate_grad_batches=2, max_epochs=2)
    assert [point["step"] for point in monitor.points] == [2, 4]
    assert all("step" in point["members"][0] for point in monitor.points)


def test_training_stays_as_it_is_without_the_monitor(tmp_path) -> None:
    found = []
    for callbacks in ([], [CurvatureMonitor(every_n_steps=1, probes=2)]):
        random.seed(0), np.random.seed(0)
        task = Plain()
        fit(tmp_path, task, *callbacks, max_epochs=2)
        state = [torch.get_rng_state(), torch.tensor([random.random(), np.random.rand()])]
        found.append([*task.network.state_dict().values(), *state])
        assert task.network.training
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_members_of_a_population_are_measured_apart_and_resume_goes_on(tmp_path, execution: str) -> None:
    def run(name: str, *callbacks, members: int = 2, **settings) -> CurvatureMonitor:
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), members, optimizer=sgd, execution=execution)
        monitor = CurvatureMonitor(probes=2, train_batches=1)
        fit(tmp_path / name, task, *callbacks, monitor, data=digits(), **settings)
        return monitor

    whole = run("whole", saving(tmp_path))
    assert list(whole.points[-1]["members"]) == [0, 1]
    tags = read_csv(tmp_path / "whole" / "metrics.csv")[-1]
    mean = sum(values["top_eigenvalue"] for values in whole.points[-1]["members"].values()) / 2
    assert float(tags["curvature/top_eigenvalue"]) == pytest.approx(mean, rel=1e-6)
    assert "curvature/trace/member-0001" in tags
    with pytest.raises(RuntimeError, match="interrupted"):
        run("part", Interrupt("2 0"), saving(tmp_path / "saved"))  # a folder that resuming finds again
    resumed = run("resumed", saving(tmp_path / "saved"), ckpt_path=tmp_path / "saved" / "last.ckpt")
    assert resumed.points == whole.points
    alone = run("alone", members=1).points[-1]["members"][0]
    assert alone == {name: pytest.approx(value, rel=1e-3) for name, value in whole.points[-1]["members"][0].items()}


class Noisy(Dataset):
    """A data set with random augmentation."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = samples()
        return x[index] + torch.randn(4), y[index]


def test_data_that_change_are_refused(tmp_path) -> None:
    assert_refused(fit, tmp_path, Plain(), CurvatureMonitor(), data=DataLoader(Noisy(), 8), says="augmentation")


def test_a_network_that_diverges_is_left_out_with_a_warning(tmp_path) -> None:
    task, monitor = Plain(), CurvatureMonitor(probes=2)
    task.configure_optimizers = lambda: torch.optim.SGD(task.parameters(), lr=1e38)
    with pytest.warns(UserWarning, match="leaves out"):
        fit(tmp_path, task, monitor, max_epochs=2)
    assert "top_eigenvalue" not in monitor.points[-1]["members"][0]


def with_strategy() -> None:
    from types import SimpleNamespace

    CurvatureMonitor().setup(SimpleNamespace(strategy=FSDPStrategy()), Plain(), "fit")


def without_loss() -> None:
    task = Plain()
    del task.criterion
    fit(Path(), task, CurvatureMonitor(), logger=False)


def elsewhere() -> None:
    fit(Path(), Plain(), CurvatureMonitor(network="net"), logger=False)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(CurvatureMonitor, every_n_epochs=0),
        refused(CurvatureMonitor, every_n_steps=0),
        refused(CurvatureMonitor, probes=1),
        refused(CurvatureMonitor, tolerance=1.0),
        refused(CurvatureMonitor, prefix="a b"),
        refused(with_strategy, says="FSDPStrategy"),
        refused(without_loss, says=["loss=", "Plain"]),
        refused(elsewhere, says=['CurvatureMonitor(network="net")', "no such attribute"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(refusal: Callable[[], None]) -> None:
    refusal()
