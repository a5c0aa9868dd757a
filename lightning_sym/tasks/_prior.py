"""What training under a Gaussian prior needs: its implicit step, and the number of data."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_sym._distributed import gathered, together
from lightning_sym.curvature import EmptyLoaderError

# Precisions beyond these are not used: exp(40) is more than any float32 weight can feel.
_LOG_BOUNDS = (-40.0, 40.0)


def has_implicit_step(optimizer: Optimizer) -> bool:
    """Return whether :func:`shrink` knows the metric of an optimizer's steps: of SGD, Adam and AdamW themselves."""
    return type(optimizer) in (SGD, Adam, AdamW)


def prior_strength(log_precision: float, samples: int) -> float:
    """Return the precision over the number of data, with precisions that float32 can hold: exp of -40 to 40."""
    low, high = _LOG_BOUNDS
    return math.exp(min(max(log_precision, low), high)) / samples


def decays_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has weight decay, which would be a second prior."""
    return any(bool(group.get("weight_decay")) for group in optimizer.param_groups)


@torch.no_grad()
def shrink(optimizer: Optimizer, strengths: Mapping[int, float | Tensor]) -> None:
    r"""Divide weights by :math:`1 + \eta c / d`, as after a step of size :math:`\eta g / d` along gradients g.

    That is the proximal step of :math:`c \theta^2 / 2` in the optimizer's own metric d, so that weights come to rest
    where :math:`c \theta` is minus the mean gradient, and are stable for every c. For SGD d is :math:`1 - \beta`, as
    momentum magnifies gradients (over one minus the dampening), for Adam :math:`\sqrt{\hat v} + \epsilon`, elementwise.

    Args:
        optimizer: One that :func:`has_implicit_step`, right after its step.
        strengths: ``c`` >= 0 by the id of the parameter: numbers, or tensors that broadcast to it. Parameters that are
            not in it, or have no gradient, stay as they are, and so do all if a gradient scaler made the step do
            nothing.
    """
    # Fused steps are called by a gradient scaler in any case, and look there themselves whether to do something.
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        return
    for group in optimizer.param_groups:
        rate = group["lr"]
        if group.get("momentum"):
            rate = rate * (1 - group["dampening"]) / (1 - group["momentum"])
        for parameter in group["params"]:
            strength = strengths.get(id(parameter))
            if strength is None or parameter.grad is None:
                continue
            step = rate * strength
            if "betas" in group:
                step = step / _adam_metric(group, optimizer.state[parameter])
            parameter.div_(1 + step)


def _adam_metric(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Return by what Adam divided its averaged gradients in the step it just took; in the shape of the parameter."""
    beta = float(group["betas"][1])
    # On the device of the step count, which fused and capturable steps keep beside the weights: nothing waits for it.
    correction = -torch.expm1(torch.as_tensor(state["step"]) * (math.log(beta) if beta else -math.inf))
    moment: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return moment.sqrt().div_(correction.sqrt()).add_(group["eps"])


def count_data(loader: Iterable[Sequence[Tensor]], *, shared: bool = True) -> tuple[int, Tensor]:
    """Return how many data there are, and how many of each class; to be called on every rank.

    Args:
        loader: Batches ``(inputs, labels or targets, ...)``; this rank's share.
        shared: Whether every rank has data of its own, which are added up; otherwise all have the same.

    Returns:
        N, and a count for each class up to the largest that occurs, int64, on the CPU; empty if the labels are no
        class indices.

    Raises:
        EmptyLoaderError: If there are none.
        ValueError: If a class index is negative.
    """
    labels: list[Tensor] = []
    together(lambda: labels.extend(_labels(loader)))
    samples = sum(len(part) for part in labels)
    classes = [part for part in labels if part.ndim == 1 and not part.is_floating_point()]
    counts = torch.bincount(torch.cat(classes)) if classes else torch.zeros(0, dtype=torch.int64)
    parts = gathered((samples, counts)) if shared else [(samples, counts)]
    if (total := sum(samples for samples, _ in parts)) == 0:
        raise EmptyLoaderError("There are no training data: curvature_dataloader() gives nothing; look at the data.")
    width = max(len(counts) for _, counts in parts)
    return total, torch.stack([F.pad(counts, (0, width - len(counts))) for _, counts in parts]).sum(0)


def _labels(loader: Iterable[Sequence[Tensor]]) -> Iterator[Tensor]:
    for batch in loader:
        part = batch[1].cpu()
        if part.ndim == 1 and len(part) and part.min() < 0 and not part.is_floating_point():
            raise ValueError(f"Labels must be class indices >= 0, got {int(part.min())}; look at the training data.")
        yield part


def warn_of_missing_classes(counts: Tensor, classes: int) -> None:
    """Warn of classes that never occur.

    Args:
        counts: As :func:`count_data` returns; nothing is said if it is empty.
        classes: Number of classes that the data say they have.
    """
    missing = [number for number in range(classes) if number >= len(counts) or counts[number] == 0]
    if missing and len(counts):
        named = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {classes} classes never occur in the training data ({named}); what is learned of them "
            "comes from the prior alone.",
            stacklevel=2,
        )
