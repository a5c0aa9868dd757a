"""Decompose the derivatives of operations, for networks that differentiate functions inside."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

# Norms as well, as their derivatives read the statistics.
_KINDS = ("backward", "native_layer_norm", "native_group_norm")


def _of_input(
    gradient: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    beyond: Any,
    groups: int,
    asked: Sequence[bool],
) -> Any:
    """Return the derivative of a convolution by its input, a transposed convolution, if no other is asked for."""
    if transposed or any(asked[1:]):
        return NotImplemented
    left = [
        (size + 2 * around - apart * (width - 1) - 1) % step
        for size, width, step, around, apart in zip(
            value.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    found = torch.ops.aten.convolution(gradient, weight, None, stride, padding, dilation, True, left, groups)
    return found, None, None


@functools.cache
def of_derivatives() -> dict[Any, Callable[..., Any]]:
    """Return decompositions of the derivatives of operations, mostly those of torch."""
    found = {own: written for own, written in decomposition_table.items() if any(kind in str(own) for kind in _KINDS)}
    return found | {torch.ops.aten.convolution_backward.default: _of_input}
