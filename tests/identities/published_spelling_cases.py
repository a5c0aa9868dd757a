"""Layers of published networks, each in several spellings; see ``spelling_cases.py``."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import of, parameter
from spelling_cases import Function, Spelled, each, steps
from torch import Tensor, nn
from torch.nn.functional import leaky_relu as leaky

L = nn.Linear


# ---- members of a BatchEnsemble: a matrix of gains before and after a shared layer


def vectors(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 6, dtype=torch.float64),)


MEMBERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "broadcast": lambda s, x: s.b(torch.relu(s.a(x)[:, None] * s.r) * s.t) * s.u,
    "expanded": lambda s, x: s.b(torch.relu(s.a(x)[:, None].expand(-1, 3, -1) * s.r[None]) * s.t[None]) * s.u,
    "matmul": lambda s, x: ((torch.relu(s.a(x)[:, None] * s.r) * s.t) @ s.b.weight.T + s.b.bias) * s.u,
    "einsum": lambda s, x: s.b(torch.einsum("bmi,mi->bmi", torch.relu(s.a(x)[:, None] * s.r), s.t)) * s.u,
}

# The same gains behind two layers.
TWICE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "broadcast": lambda s, x: s.o(leaky(s.b(leaky(s.a(x)[..., None, :] * s.r)) * s.r)).sum(-2),
    "matmul": lambda s, x: s.o(leaky((leaky(s.r * s.a(x)[..., None, :]) @ s.b.weight.T + s.b.bias) * s.r)).sum(-2),
}

# ---- a factorisation machine


SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda v: 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1),
    "pow": lambda v: (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1) / 2,
    "summed apart": lambda v: 0.5 * (v.sum(1).square().sum(-1) - v.square().sum((1, 2))),
    "products": lambda v: 0.5 * (v.sum(1) * v.sum(1) - (v * v).sum(1)).sum(-1),
    "negative": lambda v: -0.5 * ((v * v).sum(1) - v.sum(1).square()).sum(1),
    "pairs": lambda v: 0.5 * (torch.einsum("bie,bje->b", v, v) - v.square().sum((1, 2))),
    "kept": lambda v: (0.5 * (v.sum(1, keepdim=True) ** 2 - (v**2).sum(1, keepdim=True))).sum(-1)[:, 0],
}


def machine(second: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.l(x)[:, 0] + second(x[..., None] * s.v)


# ---- two values in factorised bilinear pooling

POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view of the product": lambda a, b: (a * b).view(-1, 4, 3).sum(-1),
    "unflattened product": lambda a, b: (a * b).unflatten(1, (4, 3)).sum(2),
    "product of views": lambda a, b: (a.view(-1, 4, 3) * b.view(-1, 4, 3)).sum(-1),
    "einsum": lambda a, b: torch.einsum("bgr,bgr->bg", a.view(-1, 4, 3), b.view(-1, 4, 3)),
    "matmul": lambda a, b: (a.view(-1, 4, 1, 3) @ b.view(-1, 4, 3, 1)).flatten(1),
}


def two_vectors(samples: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(samples, size, dtype=torch.float64) for size in (6, 5))


PUBLISHED: dict[str, Function] = {
    "bilinear pooling": Function({"a": of(L, 6, 12), "b": of(L, 5, 12), "o": of(L, 4, 5)}, two_vectors, 40,
        each(POOLED, lambda pool: lambda s, x, y: s.o(pool(s.a(x), s.b(y)))), samples=80),
    "members with gains": Function({"a": of(L, 6, 5), "r": parameter(3, 5), "t": parameter(3, 5), "b": of(L, 5, 4),
        "u": parameter(3, 4)}, vectors, 29, each(MEMBERS, lambda layer: layer)),
    "a layer between gains of members": Function({"a": of(L, 6, 5), "r": parameter(3, 5), "b": of(L, 5, 5),
        "o": of(L, 5, 4)}, steps(6), 15, each(TWICE, lambda layer: layer)),
    "factorisation machine": Function({"v": parameter(6, 3), "l": of(L, 6, 1)}, vectors, 3, each(SECOND, machine)),
}  # fmt: skip
