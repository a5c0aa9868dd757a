"""Optimizers and schedulers of tasks, which keep the members of a population independent of each other."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

# Optimizers that treat every entry of a tensor by itself, so that members may share a stacked tensor.
_ENTRYWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip


def check_optimizer(optimizer: Optimizer, execution: str) -> None:
    """Check that an optimizer does not mix members.

    Args:
        optimizer: Optimizer of the population.
        execution: ``"loop"`` or ``"vmap"``.

    Raises:
        ValueError: If it would.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS searches along one direction for all members together; use another optimizer.")
    if execution == "vmap" and name not in _ENTRYWISE:
        raise ValueError(
            f'{name} may look at a tensor as a whole, which mixes members under execution="vmap"; use '
            'execution="loop", or one of ' + ", ".join(sorted(_ENTRYWISE)) + "."
        )


def make_optimizer(task: Any, parameters: Any) -> Optimizer:
    """Make the optimizer of a population, and check that it keeps members independent.

    Args:
        task: The task; its factory, or its default, makes the optimizer.
        parameters: Parameters, or groups of them.
    """
    make = task.default_optimizer if task.optimizer is None else task.optimizer
    optimizer: Optimizer = make(parameters)
    check_optimizer(optimizer, task.execution)
    if task.prior is not None:
        task.prior.check_optimizers([optimizer])
    return optimizer


def decay_groups(parameters: list[nn.Parameter], undecayed: Iterable[nn.Parameter]) -> list[Any]:
    """Return the parameters, in two groups if some of them have no weight decay."""
    spared = {id(parameter) for parameter in undecayed}
    if not spared:
        return parameters
    decayed, others = ([p for p in parameters if (id(p) in spared) == without] for without in (False, True))
    return [*([{"params": decayed}] if decayed else []), {"params": others, "weight_decay": 0.0}]


def describe_optimizer(task: Any) -> dict[str, Any]:
    """Make optimizer and scheduler for a tensor of no network, to refuse bad settings now and to name them."""
    optimizer = make_optimizer(task, [nn.Parameter(torch.zeros(2, 2))])
    settings = {name: optimizer.defaults.get(name) for name in ("lr", "weight_decay", "momentum")}
    scheduler = make_scheduler(task.lr_scheduler, optimizer, task, task.lr_scheduler_interval)
    return {
        **{name: value for name, value in settings.items() if isinstance(value, int | float)},
        "optimizer_name": type(optimizer).__name__,
        "lr_scheduler_name": type(scheduler).__name__ if scheduler else "none",
    }


def make_scheduler(
    make: Callable[..., LRScheduler] | None, optimizer: Optimizer, task: LightningModule, interval: str
) -> LRScheduler | None:
    """Make a scheduler; one that needs ``total_steps`` and was not told gets those of the whole run.

    Args:
        make: Makes it from the optimizer; None for a constant learning rate.
        optimizer: The optimizer.
        task: The task; without a trainer, as in its constructor, any number of steps will do.
        interval: Whether the scheduler steps once per ``"epoch"`` or per optimizer ``"step"``.

    Raises:
        ValueError: If the scheduler refuses its settings, or has to know the length of a run that has none.
    """
    if make is None:
        return None
    try:
        scheduler = make(optimizer)
    except ValueError as error:
        if "must define either total_steps" not in str(error):  # OneCycleLR
            raise
        steps = 100 if task._trainer is None else steps_of_run(task, interval)
        if steps is None:
            raise ValueError("The learning rate's cycle lasts for the run, which has no end; set max_epochs.") from None
        scheduler = make(optimizer, total_steps=steps)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau waits for one metric, and all members have one learning rate; use a scheduler that "
            "depends on the epoch or step only."
        )
    return scheduler


def steps_of_run(task: LightningModule, interval: str) -> int | None:
    """Return the number of steps of a scheduler until training ends; None if it never ends."""
    trainer = task.trainer
    steps = trainer.estimated_stepping_batches if interval == "step" else trainer.max_epochs
    return None if steps in (None, -1, float("inf")) else int(steps)


def scheduled(task: LightningModule, optimizer: Optimizer, scheduler: LRScheduler | None, interval: str) -> Any:
    """Make the result of ``configure_optimizers``; warn if the learning rate is lowest before or after the end.

    Args:
        task: The task, with a trainer if there is a scheduler.
        optimizer: The optimizer.
        scheduler: Its scheduler; None for a constant learning rate.
        interval: Whether the scheduler steps once per ``"epoch"`` or per optimizer ``"step"``.

    Raises:
        ValueError: If the scheduler ends before training does, which would stop the run there.
    """
    if scheduler is None:
        return optimizer
    if isinstance(scheduler, OneCycleLR):
        steps = steps_of_run(task, interval)
        if steps is None or steps > scheduler.total_steps:
            raise ValueError(
                f"The cycle of OneCycleLR ends after {scheduler.total_steps} steps (lr_scheduler.total_steps), where "
                f"the run would end with an error, and training takes {steps or 'any number of them'}; set "
                "model.lr_scheduler.total_steps to null for as many as the run has."
            )
    epochs, period = task.trainer.max_epochs, getattr(scheduler, "T_max", None)
    per_epoch = interval == "epoch" and not task.trainer.fast_dev_run  # type: ignore[attr-defined]
    if period is not None and per_epoch and epochs not in (None, -1, period):
        warnings.warn(
            f"The learning rate comes to its lowest after {period} epochs (T_max) and training ends after {epochs} "
            f"(max_epochs); to anneal over the whole run set lr_scheduler.T_max to {epochs}.",
            stacklevel=3,
        )
    return OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler={"scheduler": scheduler, "interval": interval})
