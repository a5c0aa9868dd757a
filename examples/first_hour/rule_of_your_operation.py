# Teach the tracer an operation that it does not know.
# Have: a custom operation of torch
# Get: the number of sign changes, 0 without the rule and 8 with it
import torch
from torch import nn

from lightning_sym.symmetry import Trace, Value, register_rule, trace_symmetry


@torch.library.custom_op("mine::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


class Cube(nn.Module):
    def forward(self, x):
        return cube(x)


network = nn.Sequential(nn.Linear(5, 8), Cube(), nn.Linear(8, 3))
print(trace_symmetry(network, torch.randn(2, 5)).signs)


@register_rule(cube)
def rule(trace: Trace, x: Value) -> Value:
    return trace.elementwise(x, positive_scales=True, signs=True, exponent=3)


print(trace_symmetry(network, torch.randn(2, 5)).signs)
