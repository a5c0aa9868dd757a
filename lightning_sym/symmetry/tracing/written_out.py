"""Operations of torch that are others in a row: one function each, whose operations are followed in their place.

An operation that nothing knows yet is known everywhere after one entry here (docs/theory/tracing.md, 6).
"""

from collections.abc import Callable, Mapping
from typing import Any

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


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "aten::lerp": lambda start, end, weight: start + weight * (end - start),
    "aten::outer": lambda x, y: x.unsqueeze(-1) * y,
    "aten::ger": lambda x, y: x.unsqueeze(-1) * y,
    "aten::hypot": lambda x, y: (x.square() + y.square()).sqrt(),
    "aten::linalg_vecdot": lambda x, y, *, dim=-1: (x * y).sum(dim),
    "aten::diff": _difference,
    "aten::pairwise_distance": _distance,
    "aten::cdist": _distances,
}


def _computing(function: Callable[..., Tensor]) -> Rule:
    def rule(trace: Any, *args: Any, **kwargs: Any) -> Any:
        return trace.compute(function, *args, **kwargs)

    return rule


for _name, _function in FUNCTIONS.items():
    register_rule(_name)(_computing(_function))
