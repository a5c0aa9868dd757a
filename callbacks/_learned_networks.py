"""The networks whose prior precisions are learned: that of an EquivarianceTask, or the members of a ZooTask."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_sym.curvature import parameter_groups
from lightning_sym.datamodules import InputDataModule
from lightning_sym.networks import Network
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.tasks import EquivarianceTask, ZooTask
from lightning_sym.tasks._prior import (
    count_data,
    decays_weights,
    has_implicit_step,
    prior_strength,
    shrink,
    warn_of_missing_classes,
)

Number = int | None  # of a member; None for the network of an EquivarianceTask


class LearnedNetworks(ABC):
    """What :class:`lightning_sym.callbacks.MarginalLikelihood` asks of a task.

    Attributes:
        numbers: Numbers of all networks, the same on every rank.
        likelihood: ``"classification"`` or ``"regression"``.
        temperature: Temperature of the posterior.
    """

    numbers: list[Number]
    likelihood: Literal["classification", "regression"]
    temperature: float

    @property
    @abstractmethod
    def architecture(self) -> Network:
        """A network with the parameters that all of them have."""

    @property
    @abstractmethod
    def implicit(self) -> bool:
        """Whether the prior acts after the steps of the optimizer; known when a fit has started."""

    @abstractmethod
    def prior(self, number: Number) -> tuple[dict[str, float], float]:
        """Return the present log precisions of a network by parameter, and its log noise."""

    @abstractmethod
    def set_prior(self, number: Number, log_precisions: Mapping[str, float], log_noise: float) -> None:
        """Change the prior that a network is trained with."""

    @abstractmethod
    def running(self) -> list[Number]:
        """Return the networks that were not stopped; to be called on every rank."""

    @abstractmethod
    def network(self, number: Number) -> nn.Module:
        """Return a network at its present weights, the same on every rank; to be called on every rank."""

    @abstractmethod
    def batches(self, data: InputDataModule) -> Iterable[Any]:
        """Return this rank's share of the training data, not augmented."""

    @abstractmethod
    def test(self, data: InputDataModule) -> dict[Number, dict[str, float]]:
        """Return ``loss`` and, for a classification, ``accuracy`` on the test split; to be called on every rank."""


class OneNetwork(LearnedNetworks):
    """That of an :class:`lightning_sym.tasks.EquivarianceTask`, which trains under its prior by itself."""

    def __init__(self, task: EquivarianceTask) -> None:
        self.task = task
        self.numbers = [None]
        self.likelihood, self.temperature = task.likelihood, task.temperature

    @property
    def architecture(self) -> Network:
        return self.task.network

    @property
    def implicit(self) -> bool:
        return self.task.implicit

    def prior(self, number: Number) -> tuple[dict[str, float], float]:
        return self.task.log_precisions, self.task.log_noise

    def set_prior(self, number: Number, log_precisions: Mapping[str, float], log_noise: float) -> None:
        self.task.set_prior(log_precisions, log_noise)

    def running(self) -> list[Number]:
        return self.numbers

    def network(self, number: Number) -> nn.Module:
        trainer = self.task.trainer
        self.task.to(trainer.strategy.root_device)  # after a fit Lightning has moved the module to the CPU
        if trainer.world_size > 1:
            # Those of rank 0, as in DDP's next forward pass and in a checkpoint.
            for buffer in _statistics(self.task.network):
                torch.distributed.broadcast(buffer, 0)
        return self.task.network

    def batches(self, data: InputDataModule) -> Iterable[Any]:
        return data.curvature_dataloader()

    def test(self, data: InputDataModule) -> dict[Number, dict[str, float]]:
        loader: Any = data.test_dataloader() if is_overridden("test_dataloader", data) else None
        return {} if loader in (None, []) else {None: self.task.evaluate(loader)}


class Members(LearnedNetworks):
    """Those of a :class:`lightning_sym.tasks.ZooTask`, which knows nothing of a prior: it is added here.

    Args:
        task: The task.
        precision: Prior precision of all weights at the start, > 0.

    Raises:
        ValueError: If the loss is not a log likelihood, or a layer has no curvature rule.
    """

    def __init__(self, task: ZooTask, precision: float) -> None:
        if task.label_smoothing:
            raise ValueError(
                f"With label_smoothing {task.label_smoothing} the loss is no log likelihood, which MarginalLikelihood "
                "needs; set it to 0."
            )
        self.task = task
        self.numbers = list(task.numbers)
        self.likelihood, self.temperature = "classification", 1.0
        names = parameter_groups(self.architecture).precisions
        self.log_precisions = {n: dict.fromkeys(names, math.log(precision)) for n in task.numbers}
        self.samples = 0
        self._implicit = False
        self._strengths: tuple[frozenset[int], dict[int, float | Tensor]] | None = None

    @property
    def architecture(self) -> Network:
        return self.task.network.fresh(self.task.seed)  # as the members are made: the task's own may be frozen

    @property
    def implicit(self) -> bool:
        return self._implicit

    def begin(self, trainer: Trainer, data: InputDataModule) -> None:
        """Count the data, and let the prior act with each step; to be called when a fit starts.

        Raises:
            ValueError: If the optimizer decays weights.
        """
        for optimizer in trainer.optimizers:
            if decays_weights(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} decays weights, which the prior of MarginalLikelihood does by itself; "
                    "set weight_decay to 0."
                )
        self.samples, counts = count_data(data.curvature_dataloader(), shared=not self.task.member_parallel)
        if trainer.is_global_zero:
            warn_of_missing_classes(counts, getattr(data, "num_classes", len(counts)))
        self._implicit = all(has_implicit_step(optimizer) for optimizer in trainer.optimizers)
        if self._implicit:
            for optimizer in trainer.optimizers:
                optimizer.register_step_post_hook(lambda stepped, *_: shrink(stepped, self.strengths()))

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the prior's part to the members' gradients, where it does not act after the step."""
        if self._implicit:
            return
        strengths = self.strengths()
        for parameter in self.task.population.trainable():
            if id(parameter) in strengths and parameter.grad is not None:
                parameter.grad += strengths[id(parameter)] * parameter

    def strengths(self) -> dict[int, float | Tensor]:
        """Return ``c`` in the prior's part ``c |theta|^2 / 2`` of a member's loss, by the id of the parameter.

        Returns:
            Numbers, or for stacked tensors, of shape ``[M, 1, ...]``; 0 for members that were stopped.
        """
        population, stopped = self.task.population, self.task.skipped
        if self._strengths is None or self._strengths[0] != stopped:
            found: dict[int, float | Tensor] = {}
            for (name, parameter), owner in zip(population.named_trainable(), population.owners(), strict=True):
                numbers = population.numbers if owner is None else (owner,)
                if name not in self.log_precisions[numbers[0]]:
                    continue
                values = [
                    0.0 if n in stopped else prior_strength(self.log_precisions[n][name], self.samples) for n in numbers
                ]
                kind = torch.promote_types(parameter.dtype, torch.float32)
                stacked = torch.tensor(values, dtype=kind, device=parameter.device)
                found[id(parameter)] = (
                    values[0] if owner is not None else stacked.view(-1, *[1] * (parameter.dim() - 1))
                )
            self._strengths = stopped, found
        return self._strengths[1]

    def prior(self, number: Number) -> tuple[dict[str, float], float]:
        assert number is not None
        return self.log_precisions[number], 0.0

    def set_prior(self, number: Number, log_precisions: Mapping[str, float], log_noise: float) -> None:
        assert number is not None
        self.log_precisions[number] = dict(log_precisions)
        self._strengths = None

    def running(self) -> list[Number]:
        stopped, _ = self.task.gathered()
        return [number for number in self.numbers if number not in stopped]

    def network(self, number: Number) -> nn.Module:
        """Return a copy of a member; with ``ddp_members`` every rank gets it, to work on a share of the data."""
        assert number is not None
        task, trainer = self.task, self.task.trainer
        strategy = trainer.strategy
        owner = task.numbers.index(number) % trainer.world_size if task.member_parallel else trainer.global_rank
        state = None
        if owner == trainer.global_rank:
            state = {name: value.cpu() for name, value in task.population.member_state(number).items()}
        if task.member_parallel and trainer.world_size > 1:
            state = strategy.broadcast(state, src=owner)
        assert state is not None
        network = task.network.fresh(number)
        dtype = next(value.dtype for value in state.values() if value.is_floating_point())
        network.to(strategy.root_device, dtype).load_state_dict(state)
        if trainer.world_size > 1 and not task.member_parallel:
            # Their mean, as the task will have it at the end of the epoch.
            for buffer in _statistics(network):
                buffer.copy_(strategy.reduce(buffer, reduce_op="mean"))
        return network

    def batches(self, data: InputDataModule) -> Iterator[Any]:
        """Return this rank's share; with ``ddp_members``, where every rank has all the data, a part of each batch."""
        trainer = self.task.trainer
        rank, size = (trainer.global_rank, trainer.world_size) if self.task.member_parallel else (0, 1)
        return ([tensor[rank::size] for tensor in batch] for batch in data.curvature_dataloader())

    def test(self, data: InputDataModule) -> dict[Number, dict[str, float]]:
        """Evaluate the weights that the task keeps."""
        values = self.task.split_metrics(data).get("test")  # type: ignore[arg-type]
        if values is None:
            return {}
        rows = {number: self.task.numbers.index(number) for number in self.numbers if number is not None}
        found = {n: {name: float(values[name][row]) for name in ("accuracy", "loss")} for n, row in rows.items()}
        return {n: numbers for n, numbers in found.items() if not math.isnan(numbers["accuracy"])}


def _statistics(network: nn.Module) -> list[Tensor]:
    """Return the running means and variances of all batch norms."""
    norms = batch_norms(network).values()
    return [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
