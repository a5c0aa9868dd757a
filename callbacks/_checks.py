"""Requirements of callbacks on task, data and trainer, with errors that name missing parts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_sym._distributed import together
from lightning_sym.datamodules import InMemoryDataModule, InputDataModule

Loss = Callable[[Any, Any], Tensor]
_MOST_NAMED = 3  # missing attributes that a message names
_LOSSES = ("loss", "loss_function", "criterion", "loss_fn")
# A task with all of these trains several networks.
OF_POPULATIONS = ("population", "numbers", "member_seeds", "member_parallel", "network", "evaluation_batch", "loss")


def lacking(task: LightningModule, needs: Sequence[str]) -> list[str]:
    """Return the needed names that a task neither has nor declares in its class."""
    declared = {name for kind in type(task).__mro__ for name in vars(kind).get("__annotations__", {})}
    return [name for name in needs if name not in declared.union(dir(task))]


def check_needs(callback: Callback, task: LightningModule, needs: Sequence[str], example: str) -> None:
    """Check that a task has the attributes and methods that a callback needs.

    Args:
        callback: The callback, named in the message.
        task: The task.
        needs: Names of attributes and methods.
        example: A class of ``lightning_sym.tasks`` that has them, for the message.

    Raises:
        TypeError: If an attribute or method is missing.
    """
    if missing := lacking(task, needs):
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise TypeError(
            f"{type(callback).__name__} works with lightning_sym.tasks.{example} and similar tasks, but "
            f"{type(task).__name__} has no {' and no '.join(missing[:_MOST_NAMED])}{more}; remove the callback, or "
            "add these to the task."
        )


def network_of(callback: Callback, task: LightningModule, name: str) -> nn.Module:
    """Return the network that a callback watches.

    Args:
        callback: The callback, named in the message; its argument ``network`` is ``name``.
        task: The task.
        name: The attribute, with dots for attributes of attributes; ``""`` is the task itself.

    Raises:
        ValueError: If there is no such network.
    """
    found: Any = task
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    if isinstance(found, nn.Module):
        compiled = getattr(found, "_orig_mod", None)
        return compiled if isinstance(compiled, nn.Module) else found
    children = [name for name, child in task.named_children() if next(child.parameters(), None) is not None]
    choices = [f'network="{name}"' for name in children] + ['network="" for the whole module']
    what = "no such attribute" if found is None else f"a {type(found).__name__} there, not an nn.Module"
    raise ValueError(
        f'{type(callback).__name__}(network="{name}") watches the network in that attribute of the LightningModule, '
        f"but {type(task).__name__} has {what}; set network to its path: {', '.join(choices)}."
    )


def loss_of(callback: Callback, task: LightningModule, given: Loss | None) -> Loss:
    """Return the loss of outputs and targets for a callback.

    Args:
        callback: The callback, named in the message; its argument ``loss`` is ``given``.
        task: The task.
        given: The loss; None for the task's ``loss``, ``loss_function``, ``criterion`` or ``loss_fn``.

    Raises:
        ValueError: If there is no loss.
    """
    named = (getattr(task, name, None) for name in _LOSSES)
    loss = given if given is not None else next((found for found in named if callable(found)), None)
    if loss is None:
        raise ValueError(
            f"{type(callback).__name__} needs the loss of outputs and targets, but {type(task).__name__} has no "
            f"{' and no '.join(_LOSSES)}; add such an attribute to the task, or pass loss=... to the callback."
        )
    return loss


def has_members(task: LightningModule) -> bool:
    """Test whether a task trains several networks, accessed by index."""
    return not lacking(task, OF_POPULATIONS)


def checked_datamodule(
    callback: Callback,
    trainer: Trainer,
    kind: type[InputDataModule] = InMemoryDataModule,  # type: ignore[type-abstract]
) -> Any:
    """Return the trainer's datamodule after checking its class.

    Raises:
        TypeError: If it is of another class.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, kind):
        raise TypeError(
            f"{type(callback).__name__} needs a datamodule of lightning_sym.datamodules (for the splits and their "
            f"identity), got {type(data).__name__}; pass one to trainer.fit(task, datamodule)."
        )
    return data


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of this run: the logger's, or ``default_root_dir`` without one. The same on all ranks."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def on_first_rank(trainer: Trainer, work: Callable[[], object]) -> None:
    """Run a function on rank 0; if it fails, raise the error on every rank, so that none waits for the others.

    Args:
        trainer: The trainer; call this on every one of its ranks.
        work: The function for rank 0.
    """
    together(lambda: work() if trainer.is_global_zero else None)
