"""Checks that a trainer, its data and each batch suit a population."""

import inspect
from typing import Any

from torch import Tensor

from lightning_sym.tasks.losses import is_cross_entropy
from lightning_sym.tasks.same_run import check_same_run


def check_suits(task: Any, *, overrides: bool) -> None:
    """Check that the trainer suits a population; to be called on every rank.

    Args:
        task: The task, with its trainer.
        overrides: Whether the task chooses its own inputs and targets.

    Raises:
        ValueError: If the trainer ties the members together or cannot place them, if targets are values and the loss is
            the cross-entropy, or if processes of the run have different settings.
    """
    check_same_run(task.trainer, task)
    if task.trainer.precision == "16-mixed":
        raise ValueError(
            "precision 16-mixed ties the members together (one gradient scale for all); use bf16-mixed, 32-true or "
            "64-true."
        )
    if task.execution == "vmap" and getattr(task.trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError('sync_batchnorm has no effect on execution="vmap"; use execution="loop".')
    if task.member_parallel and not task.places_members:
        raise ValueError(
            f"{type(task).__name__} shares out the data, not its members; use --trainer.strategy ddp instead of "
            "ddp_members."
        )
    data = getattr(task.trainer, "datamodule", None)
    if task.classifies and not overrides and not getattr(data, "regression", False):
        _check_class_numbers(task, data)
    # With a single output every cross-entropy is 0; with several outputs values may be probabilities.
    single = getattr(data, "num_classes", None) == 1 and is_cross_entropy(task.loss_function)
    if (task.classifies or single) and not overrides and getattr(data, "regression", False):
        takes_loss = "loss" in inspect.signature(type(task)).parameters
        todo = (
            "name the loss that networks are trained with (--model.loss lightning_sym.tasks.SquaredDistance)"
            if takes_loss
            else "compare such networks by MatchingTask or CurveTask with their loss, or in Python (docs/your-own.md)"
        )
        raise ValueError(
            f"{type(task).__name__} has the cross-entropy as its loss, which is of class numbers, and the targets "
            f"of {type(data).__name__} are values; {todo}."
        )


def _check_class_numbers(task: Any, data: Any) -> None:
    """Check that each input has one class number, if the data are in memory."""
    tensors = getattr(data, "split_tensors", None)
    shape = () if tensors is None else tensors("train")[1].shape
    if len(shape) > 1:
        raise ValueError(
            f"{type(task).__name__} takes one class number per input, and the targets of {type(data).__name__} are "
            f"of shape {list(shape)}; of one-hot targets give targets.argmax(1), or name a loss of your own that "
            "takes them."
        )


def check_own_batches(task: Any, inputs: Tensor, targets: Any) -> None:
    """Raise unless each member has its own batch."""
    own = inputs.dim() > 1 and len(inputs) == len(task.population)
    if not own or (isinstance(targets, Tensor) and targets.shape[:2] != inputs.shape[:2]):
        raise ValueError(
            f"Expected one batch per member, of shape [{len(task.population)}, B, ...], got {list(inputs.shape)}; "
            "the datamodule has to make one order per entry of task.member_seeds, as those of "
            "lightning_sym.datamodules do."
        )
