"""What gradient descent on J finds for the two-unit network: predicted from the start, and simulated exactly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sym.landscape.two_unit import Moments, distance, target_slopes


def draw_initial(restarts: int, generator: torch.Generator, units: int = 2) -> Tensor:
    """Draw weights as PyTorch initialises linear layers: uniform in +-1 / sqrt(number of inputs).

    Args:
        restarts: R, >= 0.
        generator: On the CPU.
        units: H, >= 1.

    Returns:
        Input weights in +-1, then output weights in +-1 / sqrt(H). Shape ``[R, 2 H]``, float64.
    """
    uniform = 2 * torch.rand(restarts, 2 * units, generator=generator, dtype=torch.float64) - 1
    uniform[:, units:] /= math.sqrt(units)
    return uniform


def batch_moments(inputs: Tensor, batch_size: int) -> Tensor:
    """Return the moments of consecutive batches of a sample, all that minibatch descent depends on.

    Args:
        inputs: Shape ``[N]`` or ``[N, 1]``.
        batch_size: >= 1. A smaller last batch is kept; its moments are means over itself.

    Returns:
        (M+, M-) per batch. Shape ``[B, 2]``, float64.

    Raises:
        ValueError: If ``batch_size`` < 1 or there are no inputs.
    """
    if batch_size < 1 or not inputs.numel():
        raise ValueError(f"batches of {batch_size} of {inputs.numel()} inputs: both numbers must be >= 1.")
    rows = [
        torch.stack([x.clamp_min(0).square().mean(), x.clamp_max(0).square().mean()])
        for x in torch.split(inputs.detach().double().flatten(), batch_size)
    ]
    return torch.stack(rows)


def predicts_success(initial: Tensor, target: Tensor | Sequence[float]) -> Tensor:
    """Return from which weights gradient descent reaches the target's class.

    Gradient flow conserves ``in^2 - out^2`` of every unit, so the input weight of a unit reaches 0 exactly if its
    output weight has the wrong sign and is the larger one. There the unit dies. Every slope of the target that is not 0
    needs a unit of its side that does not die.

    Args:
        initial: Input weights, then output weights. Shape ``[..., 4]``, floating.
        target: Slopes, shape ``[2]``, or weights.

    Returns:
        Shape ``[...]``, bool. For p* q* > 0 right for 99.8% of runs with steps of 0.015. Otherwise a lower bound: a
        unit that is carried over 0 by a step lives on the other side if its output weight is right there. That is
        so for p* q* < 0, where 44% of runs succeed instead of 34%, and now and then for same-sign targets.
    """
    half = initial.shape[-1] // 2
    inputs, outputs = initial[..., :half], initial[..., half:]
    success = torch.ones(initial.shape[:-1], dtype=torch.bool, device=initial.device)
    for sign, slope in zip((1, -1), target_slopes(target).tolist(), strict=True):
        if slope != 0:
            lives = (outputs * slope > 0) | (inputs.abs() > outputs.abs())
            success &= ((sign * inputs > 0) & lives).any(-1)
    return success


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """The end of a simulated search.

    Attributes:
        weights: Shape ``[R, 4]``, float64.
        distances: J on the whole sample. Shape ``[R]``, float64.
        thresholds: As given.
        steps: Number of optimiser steps after which J was below each threshold first, 0 if from the start, -1 if
            never or if the restart diverged. Shape ``[R, len(thresholds)]``, int64.
    """

    weights: Tensor
    distances: Tensor
    thresholds: tuple[float, ...]
    steps: Tensor

    def fraction(self, threshold: float, within: int | None = None) -> float:
        """Return the fraction of restarts that were below a threshold at some step.

        Args:
            threshold: One of :attr:`thresholds`.
            within: Number of steps; all by default.

        Returns:
            In [0, 1].
        """
        steps = self._steps(threshold)
        reached = steps >= 0 if within is None else (steps >= 0) & (steps <= within)
        return float(reached.double().mean())

    def quantiles(self, threshold: float, shares: Sequence[float] = (0.1, 0.5, 0.9, 0.99)) -> list[float]:
        """Return quantiles of the number of steps to a threshold over the restarts that got there.

        Args:
            threshold: One of :attr:`thresholds`.
            shares: In [0, 1].

        Returns:
            One number per share, linearly interpolated; NaN if no restart got there.
        """
        steps = self._steps(threshold)
        steps = steps[steps >= 0].double()
        if not len(steps):
            return [math.nan] * len(shares)
        return [float(value) for value in steps.quantile(steps.new_tensor(list(shares)))]

    def _steps(self, threshold: float) -> Tensor:
        if threshold not in self.thresholds:
            raise ValueError(f"steps were recorded to {self.thresholds}, not to {threshold}; simulate with it.")
        return self.steps[:, self.thresholds.index(threshold)]


def simulate_search(
    initial: Tensor,
    target: Tensor | Sequence[float],
    moments: Tensor,
    *,
    learning_rate: float,
    steps: int,
    optimizer: Literal["sgd", "adam"] = "sgd",
    thresholds: Sequence[float] = (1e-6, 1e-10),
    sample: Moments | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> SearchOutcome:
    """Run minibatch descent on J from many initial weights, exactly as on the network, from moments alone.

    Args:
        initial: Shape ``[R, 4]``, computed in float64 on its device.
        target: Slopes, shape ``[2]``, or weights.
        moments: Moments of the batches, which are used in order, again and again: :func:`batch_moments`. Shape
            ``[B, 2]``.
        learning_rate: > 0.
        steps: >= 0.
        optimizer: ``"sgd"``, without momentum, or ``"adam"``, both as in :mod:`torch.optim`.
        thresholds: Values of J on the whole sample, whose first crossings are recorded.
        sample: Moments of the whole sample; the mean over batches by default, right if all are of one size.
        betas: Betas of Adam.
        eps: Epsilon of Adam.

    Returns:
        The final weights, their J, and the steps to the thresholds.

    Raises:
        ValueError: If a shape or a setting is out of range.

    Note:
        4096 restarts take about 0.1 ms a step on one core.
    """
    if initial.ndim != 2 or initial.shape[1] != 4:
        raise ValueError(f"initial must have shape [R, 4], got {[*initial.shape]}.")
    if moments.ndim != 2 or moments.shape[1] != 2 or not len(moments):
        raise ValueError(f"moments must have shape [B, 2] with B >= 1, got {[*moments.shape]}.")
    if optimizer not in {"sgd", "adam"}:
        raise ValueError(f"optimizer must be 'sgd' or 'adam', got {optimizer!r}.")
    if not (math.isfinite(learning_rate) and learning_rate > 0 and steps >= 0):
        raise ValueError(f"learning_rate must be > 0 and steps >= 0, got {learning_rate} and {steps}.")
    p_target, q_target = target_slopes(target).tolist()
    whole = sample or Moments(*moments.double().mean(0).tolist())
    batches = moments.double().tolist()

    # One row per weight, units together: x are the inputs (a, b), y the outputs (c, d).
    state = initial.detach().double().T.contiguous()
    x, y = state[:2], state[2:]
    gradient, first, second = torch.empty_like(state), torch.zeros_like(state), torch.zeros_like(state)
    x_gradient, y_gradient = gradient[:2], gradient[2:]
    products, right, left, g = (torch.empty_like(x) for _ in range(4))
    p, q, current, best = (torch.full_like(x[0], math.inf) for _ in range(4))
    side_a, side_b = g
    levels = x.new_tensor(list(thresholds))[:, None]
    waited = x.new_zeros(len(levels), len(initial))
    waits = torch.empty_like(waited)

    for step in range(steps + 1):
        # The product of a unit is its slope if x > 0 and less its slope if x < 0, so with
        #   p <- p - p*,   q <- -(q - q*),   g <- M+ p where x > 0, M- q where x < 0, 0 where x = 0
        # the gradient of J is 2 y g in x and 2 x g in y. Masks are numbers, as kernels on booleans are slower.
        torch.sign(x, out=left)
        torch.clamp_min(left, 0, out=right)
        torch.sub(right, left, out=left)
        torch.mul(x, y, out=products)
        torch.mul(products, right, out=g)
        torch.add(side_a, side_b, out=p)
        torch.mul(products, left, out=g)
        torch.add(side_a, side_b, out=q)
        p.sub_(p_target)
        q.add_(q_target)
        torch.mul(p, p, out=current).mul_(whole.positive)
        current.addcmul_(q, q, value=whole.negative)
        torch.minimum(best, current, out=best)
        waited.add_(torch.ge(best, levels, out=waits))
        if step == steps:
            break
        plus, minus = batches[step % len(batches)]
        torch.mul(right, p.mul_(2 * plus), out=g)
        g.addcmul_(left, q.mul_(2 * minus))
        torch.mul(y, g, out=x_gradient)
        torch.mul(x, g, out=y_gradient)
        if optimizer == "sgd":
            state.add_(gradient, alpha=-learning_rate)
            continue
        first.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        torch.sqrt(second, out=gradient).div_(math.sqrt(1 - betas[1] ** (step + 1))).add_(eps)
        state.addcdiv_(first, gradient, value=-learning_rate / (1 - betas[0] ** (step + 1)))

    weights = state.T.contiguous()
    distances = distance(weights, [p_target, q_target], whole)
    # Where a threshold was never crossed the steps waited are one more than there are; NaN ends the waiting too.
    crossed = torch.where((waited <= steps) & distances.isfinite(), waited, -1).T.long()
    return SearchOutcome(weights, distances, tuple(thresholds), crossed)
