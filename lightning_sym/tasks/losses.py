"""Losses of one member, which also take all members at once; see :meth:`lightning_sym.population.Population.step`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._text import name_of_callable


class CrossEntropy:
    """Mean cross-entropy of logits, in nats.

    Args:
        label_smoothing: In ``[0, 1)``; 0 is the plain cross-entropy.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one member's loss. Logits ``[B, K]``; classes ``[B]`` int64, or their probabilities ``[B, K]``."""
        _check_probabilities(outputs, targets)
        return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def stacked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return all members' losses ``[M]``, with a leading member axis on both arguments."""
        _check_probabilities(outputs, targets)
        smoothing = self.label_smoothing
        losses = F.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(0, 1), label_smoothing=smoothing, reduction="none"
        )
        return losses.view(outputs.shape[:2]).mean(1)


def _check_probabilities(outputs: Tensor, targets: Tensor) -> None:
    """Raise if probabilities are of other classes than the outputs."""
    if targets.is_floating_point() and targets.ndim == outputs.ndim and targets.shape != outputs.shape:
        raise ValueError(
            f"networks have outputs of shape {list(outputs.shape)}, and the probabilities of classes have shape "
            f"{list(targets.shape)}; give data and networks the same number of classes."
        )


class SquaredDistance:
    """Mean over inputs of the sum over outputs of squared differences."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one member's loss; both of shape ``[B, ...]``."""
        return (outputs - targets).square().sum() / len(targets)

    def stacked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return all members' losses ``[M]``; both of shape ``[M, B, ...]``."""
        return (outputs - targets).square().flatten(1).sum(1) / targets.shape[1]


def is_cross_entropy(loss: object) -> bool:
    """Return whether a loss is the cross-entropy, ours or torch's.

    Args:
        loss: A function, also with some arguments given (``functools.partial``), a module, or an object that is called.
    """
    if isinstance(loss, functools.partial):
        return is_cross_entropy(loss.func)
    return loss is F.cross_entropy or isinstance(loss, CrossEntropy | nn.CrossEntropyLoss)


def check_loss(loss: Callable[[Any, Any], Any]) -> None:
    """Check that a loss can be called with outputs and targets, as far as its signature tells.

    Raises:
        ValueError: If not.
    """
    if not callable(loss):
        raise ValueError(f"loss must be a function of outputs and targets, got {loss!r}; give the function itself.")
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:  # built-in functions have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise ValueError(
            f"loss must be a function of outputs and targets, and {name_of_callable(loss)} takes {signature}; give "
            "another one, as torch.nn.functional.mse_loss."
        ) from None
