"""Which optimizers and schedulers leave the members of a population independent of each other."""

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

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


def check_scheduler(scheduler: LRScheduler | None) -> None:
    """Check that a scheduler does not mix members.

    Raises:
        ValueError: If it would.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau would tie the members' learning rates together; use a scheduler that depends on the "
            "epoch or step only."
        )
