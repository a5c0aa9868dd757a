"""Placing the members of a population on processes."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, Strategy, StrategyRegistry
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

T = TypeVar("T")


class MemberParallelStrategy(DDPStrategy):
    """Every process trains its own members, with no gradient traffic; ``--trainer.strategy ddp_members``.

    Processes are launched as for DDP (by Lightning, ``torchrun`` or SLURM), on one or many nodes, but the
    module is not wrapped: each rank holds different members, sees all the training data and communicates
    only for metrics and checkpoints. The checkpoint, written by rank 0, holds the whole population.

    Args:
        kwargs: As for :class:`pytorch_lightning.strategies.DDPStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank sees all the data: 1 replica, rank 0."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device and set up optimizers; nothing is broadcast or wrapped."""
        Strategy.setup(self, trainer)

    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        return model  # DDP would give every rank the members of rank 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks' members on rank 0, the own state elsewhere."""
        states = gather(super().lightning_module_state_dict())
        merged: dict[str, Any] = {}
        for state in states:
            merged.update(state)
        return merged

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the own members' part of a checkpoint of the whole population."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict().keys()
        state = {name: value for name, value in checkpoint["state_dict"].items() if name in own}
        self.lightning_module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return ``{"ranks": [...]}`` with every rank's optimizer state on rank 0."""
        return {"ranks": gather(super().optimizer_state(optimizer))}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the own rank's optimizer state; the task has checked that the number of ranks is the same."""
        states = [state["ranks"][self.global_rank] for state in checkpoint["optimizer_states"]]
        super().load_optimizer_state_dict({"optimizer_states": states})


def gather(value: T) -> list[T]:
    """Return every rank's value on rank 0, in order of rank, and ``[value]`` on the other ranks.

    Args:
        value: Anything that can be pickled. Without process group the result is ``[value]``.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    # On the CPU: tensors of an accelerator would come back on the sender's device.
    value = apply_to_collection(value, torch.Tensor, lambda tensor: tensor.cpu())
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    values: list[Any] | None = [None] * size if rank == 0 else None
    torch.distributed.gather_object(value, values, dst=0)
    return [value] if values is None else values


def share_of_members(trainer: Trainer, numbers: list[int]) -> list[int]:
    """Return the numbers of the members that this rank trains.

    Raises:
        ValueError: If there are more processes than members.
    """
    if trainer.world_size > len(numbers):
        raise ValueError(
            f"{len(numbers)} member(s) cannot be placed on {trainer.world_size} processes with strategy ddp_members; "
            "raise members, or start fewer processes."
        )
    return numbers[trainer.global_rank :: trainer.world_size]


def average_over_ranks(strategy: Strategy, buffers: list[Tensor]) -> None:
    """Replace the values of buffers by their means over all ranks; to be called on every rank."""
    if not buffers:
        return
    device = strategy.root_device  # that of the process group, also after a fit
    flat = torch.cat([buffer.to(device, torch.float64).flatten() for buffer in buffers])
    mean = strategy.reduce(flat, reduce_op="mean")
    assert isinstance(mean, Tensor)
    for buffer, values in zip(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def most_validation_batches(task: LightningModule) -> int:
    """Return the largest number of validation batches that a rank has; to be called on every rank, in a fit.

    Raises:
        ValueError: If some ranks have none and others have: Lightning would skip validation on the first, and the
            others would wait for them.
    """
    strategy = task.trainer.strategy
    batches = torch.tensor(sum(task.trainer.num_val_batches), device=task.device)
    fewest, most = (int(strategy.reduce(batches.clone(), reduce_op=how)) for how in ("min", "max"))
    if fewest < most and fewest == 0:
        raise ValueError(
            "There are fewer validation samples than processes; raise val_fraction, or start fewer processes."
        )
    return most


for _name, _method in (("ddp_members", "popen"), ("ddp_members_fork", "fork")):
    StrategyRegistry.register(
        _name,
        MemberParallelStrategy,
        description="Every process trains its own members of a population.",
        start_method=_method,
    )
