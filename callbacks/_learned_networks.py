"""The networks with learned prior precisions: the single network of a task, or the members of a population."""

import inspect
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_sym.callbacks._checks import lacking
from lightning_sym.curvature import GaussianPrior
from lightning_sym.datamodules import InputDataModule
from lightning_sym.networks.batch_norm import batch_norms

Number = int | None  # index of a member; None for the only network of a task


class LearnedNetworks:
    """Interface of :class:`lightning_sym.callbacks.MarginalLikelihood` to a task, here one with a single network.

    Attributes:
        prior: The task's prior.
        numbers: Indices of all networks, the same on every rank.
        needs: Names of further attributes that the task must have.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: Any) -> None:
        self.task = task
        self.prior: GaussianPrior = task.prior
        self.numbers: list[Number] = list(self.prior.members)

    def running(self) -> list[Number]:
        """Return the networks that were not stopped; call it on every rank."""
        return self.numbers

    def network(self, number: Number) -> nn.Module:
        """Return a network with its current weights, the same on every rank; call it on every rank."""
        trainer = self.task.trainer
        self.task.to(trainer.strategy.root_device)  # after a fit Lightning has moved the module to the CPU
        if trainer.world_size > 1:
            # Statistics of rank 0, as in DDP's next forward pass and in a checkpoint.
            for buffer in _statistics(self.prior.network):
                torch.distributed.broadcast(buffer, 0)
        return self.prior.network

    def batches(self, data: InputDataModule) -> Iterable[Any]:
        """Return this rank's share of the training data, without augmentation."""
        return data.curvature_dataloader()

    def test(self, data: InputDataModule) -> dict[Number, dict[str, float]]:
        """Return ``loss`` and, for a classification, ``accuracy`` on the test split; call it on every rank.

        Empty without test images, or if the task has no method ``evaluate``.
        """
        loader: Any = data.test_dataloader() if is_overridden("test_dataloader", data) else None
        evaluate = getattr(self.task, "evaluate", None)
        return {} if loader in (None, []) or evaluate is None else {None: evaluate(loader)}


class Members(LearnedNetworks):
    """The members of a task over a population."""

    needs = ("network", "member_parallel", "gathered", "split_metrics")

    def running(self) -> list[Number]:
        stopped, _ = self.task.gathered()
        return [number for number in self.numbers if number not in stopped]

    def network(self, number: Number) -> nn.Module:
        """Return a copy of a member; with ``ddp_members`` every rank gets it and works on a share of the data."""
        task, trainer = self.task, self.task.trainer
        strategy = trainer.strategy
        owner = self.numbers.index(number) % trainer.world_size if task.member_parallel else trainer.global_rank
        state: Any = None
        if owner == trainer.global_rank:
            state = {name: value.cpu() for name, value in task.population.member_state(number).items()}
        if task.member_parallel and trainer.world_size > 1:
            state = strategy.broadcast(state, src=owner)
        network: nn.Module = task.network.fresh(number)
        dtype = next(value.dtype for value in state.values() if value.is_floating_point())
        network.to(strategy.root_device, dtype).load_state_dict(state)
        if trainer.world_size > 1 and not task.member_parallel:
            # Averaged over ranks, as the task does at the end of the epoch.
            for buffer in _statistics(network):
                buffer.copy_(strategy.reduce(buffer, reduce_op="mean"))
        return network

    def batches(self, data: InputDataModule) -> Iterable[Any]:
        """Return this rank's share; with ``ddp_members``, with all data on every rank, a part of each batch."""
        trainer = self.task.trainer
        rank, size = (trainer.global_rank, trainer.world_size) if self.task.member_parallel else (0, 1)
        return ([tensor[rank::size] for tensor in batch] for batch in data.curvature_dataloader())

    def test(self, data: InputDataModule) -> dict[Number, dict[str, float]]:
        """Evaluate the kept weights of the task."""
        values = self.task.split_metrics(data).get("test")
        if values is None:
            return {}
        found = {
            number: {name: float(values[name][row]) for name in ("accuracy", "loss") if name in values}
            for row, number in enumerate(self.numbers)
        }
        return {number: numbers for number, numbers in found.items() if not math.isnan(numbers["loss"])}


def learned_networks(task: LightningModule) -> LearnedNetworks:
    """Return the networks of a task for :class:`lightning_sym.callbacks.MarginalLikelihood`.

    Raises:
        TypeError: If the task lacks an attribute or method; the message names it.
    """
    prior = getattr(task, "prior", None)
    if not isinstance(prior, GaussianPrior):
        todo = (
            "set prior_precision, for example to 1.0 (--model.prior_precision 1.0)"
            if "prior_precision" in inspect.signature(type(task)).parameters
            else "set self.prior to a lightning_sym.curvature.GaussianPrior in its constructor, or use ZooTask with "
            "prior_precision"
        )
        raise TypeError(
            f"MarginalLikelihood learns the precisions of a task's prior, but {type(task).__name__} has none; {todo}."
        )
    kind = LearnedNetworks if None in prior.members else Members
    if missing := lacking(task, kind.needs):
        raise TypeError(
            f"MarginalLikelihood works with populations such as lightning_sym.tasks.ZooTask, but {type(task).__name__} "
            f"has no {' and no '.join(missing)}; add these, or use a prior without members."
        )
    return kind(task)


def _statistics(network: nn.Module) -> list[Tensor]:
    """Return the running means and variances of all batch norms."""
    norms = batch_norms(network).values()
    return [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
