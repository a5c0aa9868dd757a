"""Fits of an EquivarianceTask and a ZooTask in one to three processes; run by test_equivariance_ddp.py, as it forks.

Usage: ``python equivariance_scenarios.py FOLDER``; every scenario leaves results, a checkpoint and what each rank held.
"""

import functools
import math
from pathlib import Path

import torch
from pytorch_lightning import Callback, Trainer
from scenarios import Scenarios, paths
from torch import nn

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.datamodules import DigitsDataModule, Quadrant
from lightning_sym.networks import Network, RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask, ZooTask

SAMPLES = 83  # not divisible by 2 or 3


class Leave(Callback):
    """Writes down what every rank holds when training has ended."""

    def on_train_end(self, trainer: Trainer, task: EquivarianceTask) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        marginal = next(c for c in trainer.callbacks if isinstance(c, MarginalLikelihood))
        records = [{k: v for k, v in record.items() if k != "seconds"} for record in marginal.records]
        state = {
            "weights": {name: tensor.clone() for name, tensor in task.network.state_dict().items()},
            "log_precisions": dict(task.prior.log_precisions),
            "records": records,
            "optimizer": marginal.state_dict()["optimizers"][""],
            "samples": task.prior.samples,
        }
        torch.save(state, folder / f"rank {trainer.global_rank}.pt")


class Broken(MarginalLikelihood):
    """The last rank has a weight that is not a number in each pass."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: EquivarianceTask) -> None:
        weight = next(pl_module.network.parameters())
        if trainer.global_rank == trainer.world_size - 1:
            weight.data.view(-1)[0] = math.nan
        super().on_train_epoch_end(trainer, pl_module)


def fit(
    folder: Path,
    processes: int,
    *,
    lr: float = 0.0,
    batch_size: int = 10,
    samples: int | None = None,
    kind: type[MarginalLikelihood] = MarginalLikelihood,
    momentum: float = 0.9,
) -> None:
    torch.manual_seed(0)
    callback = kind(burn_in=1, every_n_epochs=1, steps=20, samples=samples, dirpath=str(folder / "results"))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        callbacks=[callback, Leave()],
        devices=processes,
        strategy="ddp_fork" if processes > 1 else "auto",
    )
    network = RelaxedNetwork(width=1, grid=16, in_channels=1)
    # Without steps of the weights (and without their prior, which acts with the learning rate) they stay the same.
    task = EquivarianceTask(network, optimizer=functools.partial(torch.optim.SGD, lr=lr, momentum=momentum))
    trainer.fit(task, DigitsDataModule(batch_size=batch_size, max_samples=SAMPLES, transforms=[Quadrant("digit")]))


class SmallCNN(Network):
    """A convolution, a batch norm if wanted, and a linear map."""

    def __init__(self, norm: bool = False, num_classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.act = nn.ReLU()
        self.last = nn.Linear(48, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.norm(self.first(x))).flatten(1))


class LeaveZoo(Callback):
    """Writes down what every rank holds when training has ended."""

    def on_train_end(self, trainer: Trainer, task: ZooTask) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        marginal = next(c for c in trainer.callbacks if isinstance(c, MarginalLikelihood))
        state = {
            "weights": {number: task.population.member_state(number) for number in task.population.numbers},
            "log_precisions": {number: own.log_precisions for number, own in task.prior.members.items()},
            "records": [{k: v for k, v in record.items() if k != "seconds"} for record in marginal.records],
            "samples": task.prior.samples,
        }
        torch.save(state, folder / f"rank {trainer.global_rank}.pt")


def fit_zoo(folder: Path, processes: int, strategy: str, *, lr: float = 0.0, norm: bool = False) -> None:
    callback = MarginalLikelihood(burn_in=1, every_n_epochs=1, steps=20, dirpath=str(folder / "results"))
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy if processes > 1 else "auto",
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        callbacks=[callback, LeaveZoo()],
    )
    optimizer = functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
    task = ZooTask(SmallCNN(norm), members=3, keep="last", optimizer=optimizer, prior_precision=1.0)
    trainer.fit(task, DigitsDataModule(batch_size=10, max_samples=SAMPLES))


def main(folder: Path) -> None:
    scenarios = Scenarios(folder)
    for processes in (3, 2, 1):
        scenarios.run(f"same weights {processes}", fit, processes)
        scenarios.run(f"trained {processes}", fit, processes, lr=0.02, batch_size=24 // processes)
    for processes in (3, 2, 1):
        scenarios.run(f"zoo ddp {processes}", fit_zoo, processes, "ddp_fork")
        scenarios.run(f"zoo members {processes}", fit_zoo, processes, "ddp_members_fork", lr=0.02, norm=True)
    scenarios.run("zoo norm ddp 2", fit_zoo, 2, "ddp_fork", lr=0.02, norm=True)
    scenarios.run("monte carlo 2", fit, 2, samples=2)
    scenarios.run("broken 2", fit, 2, kind=Broken)
    scenarios.finish()


if __name__ == "__main__":
    main(*paths())
