"""Mixtures of two images and of their labels: mixup and CutMix."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sym._checks import check_integers, check_numbers

# Below, both gamma variates of a draw may be 0 in float64, and their share is then 1/2 instead of 0 or 1.
_LEAST = 0.01


def check_mixing(mixup: float, cutmix: float, epochs: int | None) -> None:
    """Check the settings of mixtures.

    Raises:
        ValueError: If one is out of range, or there are epochs and no mixtures.
    """
    for name, value in (("mixup", mixup), ("cutmix", cutmix)):
        check_numbers(">= 0", **{name: value})
        if 0 < value < _LEAST:
            raise ValueError(
                f"{name} must be 0 or at least {_LEAST}, below which nearly nothing is mixed, got {value!r}."
            )
    if epochs is not None:
        check_integers(mixing_epochs=epochs)
        if not (mixup or cutmix):
            raise ValueError("mixing_epochs is the end of mixup or cutmix; set one of them above 0, or drop it.")


def own_shares(mixup: float, cutmix: float, shape: Sequence[int], random: torch.Generator) -> Tensor:
    """Draw the share of the first of two inputs in a mixture, at every position.

    With both parameters above 0, mixup and CutMix are equally probable.

    Args:
        mixup: Parameter of the symmetric beta distribution of the share in mixup, >= 0; 0 for none.
        cutmix: Parameter of that in CutMix, before the rectangle is cut off at the borders, >= 0; 0 for none.
        shape: Shape of an input; height and width are last.
        random: Generator on the CPU.

    Returns:
        0 in a rectangle and 1 elsewhere, ``[H, W]``, or a constant of shape ``[]``; float32 on the CPU. The mean is the
        share of the first label.

    Raises:
        ValueError: If CutMix has no height and width to cut.
    """
    cut = cutmix > 0 and (not mixup or bool(torch.rand((), generator=random) < 0.5))
    beta = torch.full((2,), cutmix if cut else mixup, dtype=torch.float64)
    # torch.distributions.Beta takes no generator.
    share = float(torch._sample_dirichlet(beta, generator=random)[0])
    if not cut:
        return torch.tensor(share, dtype=torch.float32)
    if len(shape) < 2:
        raise ValueError(f"cutmix cuts rectangles from images, got inputs of shape {list(shape)}; use mixup.")
    shares = torch.ones(*shape[-2:])
    sides = []
    for side in shape[-2:]:
        centre = int(torch.randint(side, (), generator=random))
        half = int(0.5 * math.sqrt(1 - share) * side)
        sides.append(slice(max(0, centre - half), centre + half))
    shares[sides[0], sides[1]] = 0
    return shares


def mixed(inputs: Tensor, labels: Tensor, shares: Sequence[Tensor], classes: int) -> tuple[Tensor, Tensor]:
    """Mix each input and its label with the one before it in the batch.

    Args:
        inputs: Shape ``[M, B, ...]``, floating; a row for each member.
        labels: Shape ``[M, B]``, int64.
        shares: Result of :func:`own_shares` for each member.
        classes: Number of classes, ``K``.

    Returns:
        Inputs like the given ones, and probabilities of classes, ``[M, B, K]``, in the type of the inputs.

    Raises:
        ValueError: If inputs are integers.
    """
    if not inputs.is_floating_point():
        raise ValueError(f"mixup and cutmix mix floating inputs, got {inputs.dtype}, as of tokens; set both to 0.")
    size = next((share.shape for share in shares if share.ndim), ())
    at = torch.stack([share.expand(size) for share in shares])
    of_labels = torch.stack([share.mean() for share in shares])
    at, of_labels = (value.to(inputs.device, inputs.dtype, non_blocking=True) for value in (at, of_labels))
    at = at.view(len(shares), *[1] * (inputs.ndim - 1 - len(size)), *size)
    targets = F.one_hot(labels, classes).to(inputs.dtype)
    return (
        torch.lerp(inputs.roll(1, dims=1), inputs, at),
        torch.lerp(targets.roll(1, dims=1), targets, of_labels[:, None, None]),
    )
