"""Operations of torch that are others in a row: one function each, whose operations are followed in their place.

An operation that nothing knows yet is known everywhere after one entry here (docs/theory/tracing.md, 6).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.rules import register_rule
from lightning_sym.symmetry.tracing.vocabulary import Rule


def _difference(
    x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    parts = [part for part in (prepend, x, append) if part is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        x = x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1)
    return x


def _distance(x: Tensor, y: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x - y + eps, p, -1, keepdim)
    return result


def _distances(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)
    return result


def _beside(axis: int, rank: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return what joins tensors along an axis, those of fewer axes with further ones."""

    def function(tensors: Sequence[Tensor]) -> Tensor:
        wide = [tensor.reshape(1, -1) if rank > 1 and tensor.ndim < 2 else tensor for tensor in tensors]
        wide = [tensor.unsqueeze(-1) if tensor.ndim < rank else tensor for tensor in wide]
        return torch.cat(wide, axis if wide[0].ndim > axis else 0)

    return function


def _columns(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor for tensor in tensors], 1)


def _kronecker(x: Tensor, y: Tensor) -> Tensor:
    rank = max(x.ndim, y.ndim)
    x, y = (tensor.reshape(*[1] * (rank - tensor.ndim), *tensor.shape) for tensor in (x, y))
    sizes = [one * two for one, two in zip(x.shape, y.shape, strict=True)]
    for axis in range(rank):
        x, y = x.unsqueeze(2 * axis + 1), y.unsqueeze(2 * axis)
    return (x * y).reshape(sizes)


def _broadcast(tensors: Sequence[Tensor]) -> list[Tensor]:
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return [tensor.expand(shape) for tensor in tensors]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / _norm_except(v, 2, dim))


def _norm_except(v: Tensor, pow: float = 2, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.ndim) if axis != dim] if dim != -1 else None
    result: Tensor = torch.linalg.vector_norm(v, pow, axes, dim != -1)
    return result


FUNCTIONS: Mapping[str, Callable[..., Tensor | list[Tensor]]] = {
    "aten::lerp": lambda start, end, weight: start + weight * (end - start),
    "aten::outer": lambda x, y: x.unsqueeze(-1) * y,
    "aten::ger": lambda x, y: x.unsqueeze(-1) * y,
    "aten::hypot": lambda x, y: (x.square() + y.square()).sqrt(),
    "aten::linalg_vecdot": lambda x, y, *, dim=-1: (x * y).sum(dim),
    "aten::diff": _difference,
    "aten::pairwise_distance": _distance,
    "aten::cdist": _distances,
    "aten::logaddexp": lambda x, y: (x.exp() + y.exp()).log(),
    "aten::hstack": _beside(1, 1),
    "aten::vstack": _beside(0, 2),
    "aten::row_stack": _beside(0, 2),
    "aten::dstack": _beside(2, 3),
    "aten::column_stack": _columns,
    "aten::kron": _kronecker,
    "aten::broadcast_tensors": _broadcast,
    "aten::_weight_norm": _weight_norm,
    "aten::norm_except_dim": _norm_except,
}


def _computing(function: Callable[..., Any]) -> Rule:
    def rule(trace: Any, *args: Any, **kwargs: Any) -> Any:
        return trace.compute(function, *args, **kwargs)

    return rule


for _name, _function in FUNCTIONS.items():
    register_rule(_name)(_computing(_function))
