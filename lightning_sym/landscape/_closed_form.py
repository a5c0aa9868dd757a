"""The exact loss of the ReLU networks of one input and one output without biases."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from lightning_sym.networks import MultiLayerPerceptron


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

    With the slopes p and q of section 5, ``J = M+ (p - p_fit)^2 + M- (q - q_fit)^2 + remainder``: the sum of squares
    completed around the best fit, so that nothing cancels where J is small.

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
