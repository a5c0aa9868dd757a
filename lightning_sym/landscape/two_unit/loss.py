r"""J of ReLU networks of one input and one output without biases, exactly.

Such a function is a line of slope p right of zero and one of slope -q left of it; with two units, input weights a, b
and output weights c, d,

.. math:: p = c a_+ + d b_+, \qquad q = c a_- + d b_-, \qquad r_+ = \max(r, 0),\ r_- = \max(-r, 0),

so two weight vectors compute the same function exactly if they agree in p and q. Weights are in the order of a
network's parameters: all input weights, then all output weights.

References:
    The network: Lengyel et al. (2020), arXiv:2011.07407, section 4. The theory is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_numbers
from lightning_sym.networks import MultiLayerPerceptron


@dataclass(frozen=True)
class Moments:
    """Second moments of a sample of inputs, all that the loss of a one-input network without biases depends on.

    Attributes:
        positive: Sum of x^2 over the inputs x > 0, divided by the number of all inputs. > 0; 1/2 for N(0, 1).
        negative: The same over x < 0.
    """

    positive: float = 0.5
    negative: float = 0.5

    def __post_init__(self) -> None:
        check_numbers("> 0", of="inputs of both signs", positive=self.positive, negative=self.negative)

    @classmethod
    def of(cls, inputs: Tensor) -> Self:
        """Return the moments of a sample.

        Args:
            inputs: One number per input, any shape, at least one of either sign.

        Returns:
            Its moments, summed in float64.

        Raises:
            ValueError: If no input is positive, or none negative, or one is not finite.
        """
        x = inputs.detach().double()
        count = max(x.numel(), 1)
        return cls(float(x.clamp_min(0).square().sum()) / count, float(x.clamp_max(0).square().sum()) / count)


def slopes(weights: Tensor) -> Tensor:
    """Return the slopes (p, q) of one-input networks.

    Args:
        weights: Input weights, then output weights, of H units. Shape ``[..., 2 H]``, floating.

    Returns:
        Shape ``[..., 2]``, dtype and device of ``weights``; differentiable, with slope 0 of the ReLU at 0.

    Raises:
        ValueError: If the last axis is not even.
    """
    return torch.stack(_both_slopes(weights), -1)


def distance(weights: Tensor, target: Tensor | Sequence[float], moments: Moments) -> Tensor:
    """Return J, the mean squared difference to the target's outputs, exactly.

    Args:
        weights: Shape ``[..., 2 H]``, floating.
        target: The target's slopes, shape ``[2]``, or its weights, shape ``[4]`` or longer.
        moments: Moments of the sample over which the mean is.

    Returns:
        ``M+ (p - p*)^2 + M- (q - q*)^2``. Shape ``[...]``, dtype and device of ``weights``; differentiable.

    Raises:
        ValueError: If a shape is wrong.
    """
    p, q = _both_slopes(weights)
    p_target, q_target = (float(slope) for slope in target_slopes(target))
    return moments.positive * (p - p_target).square() + moments.negative * (q - q_target).square()


def target_slopes(target: Tensor | Sequence[float]) -> Tensor:
    """Return the slopes of a target given as such or by weights.

    Args:
        target: Slopes (p, q), or the weights of a network of two units or more: shape ``[2 H]``, H > 1. Finite.

    Returns:
        Shape ``[2]``, float64, no graph.

    Raises:
        ValueError: If it is neither.
    """
    given = torch.as_tensor(target, dtype=torch.float64).detach()
    if given.ndim != 1 or len(given) < 2 or len(given) % 2 or not given.isfinite().all():
        raise ValueError(
            f"target must be finite slopes (p, q) or weights (a, b, ..., c, d, ...), got {given.tolist()}."
        )
    return given if len(given) == 2 else slopes(given)


def balanced_weights(slopes: Tensor) -> Tensor:
    r"""Return weights of the two-unit network that have given slopes.

    The first unit carries p, the second q, both balanced: :math:`a = |c| = \sqrt{|p|}`, :math:`-b = |d| = \sqrt{|q|}`.

    Args:
        slopes: (p, q), shape ``[..., 2]``, floating.

    Returns:
        Weights (a, b, c, d), shape ``[..., 4]``, float64.

    Example:
        >>> balanced_weights(torch.tensor([[1.0, 4.0], [1.0, 0.0]])).tolist()
        [[1.0, -2.0, 1.0, 2.0], [1.0, 0.0, 1.0, 0.0]]
    """
    roots = slopes.double().abs().sqrt()
    return torch.cat([roots * roots.new_tensor([1.0, -1.0]) + 0.0, roots * slopes.sign()], -1)


def is_relu_line(network: nn.Module) -> bool:
    """Return whether a network is ``sum_i c_i relu(a_i x)`` with weight vector ``(a_1, ..., a_H, c_1, ..., c_H)``."""
    if type(network) is not MultiLayerPerceptron:
        return False
    modules = list(network.children())
    return bool(
        [type(module) for module in modules] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
        and modules[1].in_features == modules[3].out_features == 1
        and modules[1].bias is modules[3].bias is None
        and all(parameter.requires_grad for parameter in network.parameters())
        and not any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())
    )


@dataclass(frozen=True)
class ReluLine:
    r"""The mean squared distance of piecewise linear functions of one input to given targets, for any targets.

    With the slopes p and q (docs/theory/equivalence.md, 5.1), ``J = M+ (p - p_fit)^2 + M- (q - q_fit)^2 + remainder``:
    the sum of squares completed around the best fit, so that nothing cancels where J is small.

    Attributes:
        positive: ``M+``, the mean of ``x^2`` over all inputs, counting those above 0.
        negative: ``M-``.
        p_fit: The slope above 0 that fits the targets best.
        q_fit: That of ``|x|`` below 0.
        remainder: J of the best fit; rounding if the targets are of the family.
    """

    positive: float
    negative: float
    p_fit: float
    q_fit: float
    remainder: float

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Self:
        """Return the moments of inputs and targets of N entries each, any shape."""
        x, y = inputs.detach().cpu().double().flatten(), targets.detach().cpu().double().flatten()
        above, below = x.clamp(min=0), (-x).clamp(min=0)
        positive, negative = (float(part.square().mean()) for part in (above, below))
        p_fit = float((above * y).mean()) / positive if positive else 0.0
        q_fit = float((below * y).mean()) / negative if negative else 0.0
        remainder = float((y - p_fit * above - q_fit * below).square().mean())
        return cls(positive, negative, p_fit, q_fit, remainder)

    def loss(self, weights: Tensor) -> Tensor:
        """Return J at the columns of ``weights``, shape [2H, G], float64: [G]."""
        a, c = weights.chunk(2)
        p = (a.clamp(min=0).mul_(c)).sum(0).sub_(self.p_fit)
        q = (a.clamp(max=0).mul_(c)).sum(0).neg_().sub_(self.q_fit)
        return p.square_().mul_(self.positive).add_(q.square_().mul_(self.negative)).add_(self.remainder)


def _both_slopes(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q, shape ``[...]`` each."""
    # Weights along the first axis and units added up one by one: kernels on rows are ten times as quick as on an
    # axis of two.
    inputs, outputs = (part.movedim(-1, 0).contiguous() for part in split_weights(weights))
    p, q = inputs[0].relu() * outputs[0], (-inputs[0]).relu() * outputs[0]
    for a, c in zip(inputs[1:], outputs[1:], strict=True):
        p, q = p + a.relu() * c, q + (-a).relu() * c
    return p, q


def split_weights(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return input weights and output weights, views."""
    if weights.ndim == 0 or weights.shape[-1] % 2 or not weights.shape[-1]:
        raise ValueError(
            f"weights must end with an axis of input weights, then as many output weights; got shape "
            f"{[*weights.shape]}."
        )
    half = weights.shape[-1] // 2
    return weights[..., :half], weights[..., half:]
