"""Spellings of which random programs (``test_random_programs.py``) showed that their groups differed."""

import math
from collections.abc import Callable
from typing import Any

import torch
from helpers import of, parameter
from spelling_cases import Function, each, heads_of, steps
from table_spelling_cases import L
from torch import Tensor
from torch.nn import functional as F


def chunked(h: Tensor, w: Tensor) -> Tensor:
    return torch.cat([one @ own.T for one, own in zip(h.chunk(2, -1), w.chunk(2), strict=True)], -1)


IN_GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv1d": lambda h, w: F.conv1d(h.mT, w[..., None], groups=2).mT,
    "chunks": chunked,
    "einsum": lambda h, w: torch.einsum("...gi,goi->...go", h.unflatten(-1, (2, 3)), w.unflatten(0, (2, 3))).flatten(
        -2
    ),
}
# Two layers that read the same value, of which each may be a sum over parts of it.
SUMMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda h, w: h @ w.T,
    "parts": lambda h, w: h[..., :2] @ w[:, :2].T + h[..., 2:] @ w[:, 2:].T,
    "chunks": lambda h, w: sum(a @ b.T for a, b in zip(h.chunk(2, -1), w.chunk(2, 1), strict=True)),  # type: ignore[return-value]
}
QUERIES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear": lambda t, layer: layer(t),
    "convolution": lambda t, layer: F.conv1d(t.T[None], layer.weight[..., None], layer.bias)[0].T,
}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda h: torch.cat([h[..., 2:], h[..., :2]], -1),
    "roll": lambda h: h.roll(2, -1),
    "index": lambda h: h[..., [2, 3, 0, 1]],
}
AVERAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(1),
    "sum": lambda h: h.sum(1) / 3,
    "einsum": lambda h: torch.einsum("bti->bi", h) / 3,
}
HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "unflatten": lambda h: h.unflatten(-1, (2, 2)).transpose(1, 2),
    "stack": lambda h: torch.stack(h.split(2, -1), 1),
}
HALVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear": lambda h, layer: layer(h),
    "cat": lambda h, layer: torch.cat(
        [F.linear(h, *own) for own in zip(layer.weight.chunk(2), layer.bias.chunk(2), strict=True)], -1),
}  # fmt: skip
MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda h: torch.maximum(*h.unflatten(-1, (4, 2)).unbind(-1)),
    "amax": lambda h: h.unflatten(-1, (4, 2)).amax(-1),
    "pool": lambda h: F.max_pool1d(h, 2),
}
GROUP_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda h: F.group_norm(h.flatten(0, -2), 2).view(h.shape),
    "layer_norm": lambda h: F.layer_norm(h.unflatten(-1, (2, -1)), (h.shape[-1] // 2,)).flatten(-2),
}


# The product of a table and a matrix.
TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda t, w: t @ w.T,
    "sum": lambda t, w: (t[:, None] * w).sum(-1),
    "columns": lambda t, w: torch.stack([(t * row).sum(-1) for row in w], -1),
    "rows": lambda t, w: torch.stack([(w * row).sum(-1) for row in t]),
    "sum over the first axis": lambda t, w: (w.T.unsqueeze(1) * t.T.unsqueeze(-1)).sum(0),
}
# A sum of four terms, of which two are parts of one layer.
TERMS: dict[str, Callable[..., Tensor]] = {
    "neighbours": lambda h, one, two, product: one + two + h + product,
    "apart": lambda h, one, two, product: one + h + two + product,
    "at the ends": lambda h, one, two, product: one + (h + product) + two,
    "behind others": lambda h, one, two, product: h + product - (-one - two),
    "in pairs": lambda h, one, two, product: (h + one) + (product + two),
}
# Functions that differ by a constant, which a norm subtracts.
CENTRED: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": lambda h: 2 * torch.sigmoid(2 * h) - 1,
    "no constant": lambda h: 2 * torch.sigmoid(2 * h),
    "another constant": lambda h: 3 - torch.tanh(-h),
}


def standardised(h: Tensor) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) * (h.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def beside_a_function(s: Any, x: Tensor) -> Tensor:
    h = F.group_norm(s.a(x).flatten(0, 1), 2, s.g, s.b).view(len(x), -1, 6)
    return torch.tanh(s.d(torch.cat([h, torch.tanh(s.c(h))], -1)))


def parts_in_a_sum(own: Callable[..., Tensor], s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    z = torch.tanh(s.e(h))
    return s.o(torch.tanh(own(h, z[..., :2] @ s.w[:, :2].T, z[..., 2:] @ s.w[:, 2:].T, h * s.g(x))))


# Units and gains that are powers of a number, and functions of multiples of a parameter.
POWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp2": torch.exp2,
    "power": lambda h: 2**h,
    "tensor": lambda h: torch.full_like(h, 2.0) ** h,
    "exp": lambda h: torch.exp(h * math.log(2)),
    "reciprocal": lambda h: 1 / 0.5**h,
    "ldexp": lambda h: torch.ldexp(torch.ones_like(h), h),
}
EXPONENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda w: torch.exp(1.5 * w - 1),
    "parts": lambda w: torch.exp((w - 2 / 3).view(2, 2) * 1.5).flatten(),
    "power": lambda w: torch.exp(w) ** 1.5 / math.e,
    "reciprocal": lambda w: 1 / torch.exp(1 - w / (2 / 3)),
}
SOFT: dict[str, Callable[[Tensor], Tensor]] = {
    "beta": lambda w: F.softplus(w + 1, beta=2),
    "product": lambda w: F.softplus(2 * w + 2) / 2,
    "multiples": lambda w: 0.5 * F.softplus((w + 1) * 2),
}


# The diagonal of a matrix of products, and its sum.
DIAGONALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda h, g: (h * g).sum(-1),
    "diagonal": lambda h, g: (h @ g.mT).diagonal(dim1=-2, dim2=-1),
    "einsum": lambda h, g: torch.einsum("bii->bi", h @ g.mT),
    "index": lambda h, g: (h @ g.mT)[:, torch.arange(3), torch.arange(3)],
    "outer": lambda h, g: torch.einsum("btdd->btd", h[..., None] * g[:, :, None]).sum(-1),
}
ON_DIAGONALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda h, g: h * g,
    "einsum": lambda h, g: torch.einsum("btii->bti", h[..., None] * g[:, :, None]),
    "outer": lambda h, g: torch.einsum("btii->bti", torch.einsum("bti,btj->btij", h, g)),
    "diagonal": lambda h, g: (h[..., None] * g[:, :, None]).diagonal(dim1=2, dim2=3),
    "index": lambda h, g: (h[..., None] * g[..., None, :])[:, :, range(4), range(4)],
}
TRACES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda h, g: (h * g).sum((-2, -1)),
    "einsum": lambda h, g: torch.einsum("btd,btd->b", h, g),
    "repeated": lambda h, g: torch.einsum("bii->b", h @ g.mT),
}
# A vector or a number of weights in place of masked units (BEiT).
TOKENS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "where": lambda h, w, mask: torch.where(mask, w, h),
    "opposite": lambda h, w, mask: torch.where(~mask, h, w.expand_as(h)),
    "products": lambda h, w, mask: mask * w + ~mask * h,
    "numbers": lambda h, w, mask: h * (1 - mask.to(h)) + w * mask.to(h),
    "lerp": lambda h, w, mask: torch.lerp(h, w.expand_as(h), mask.to(h)),
}
FILLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda h, w, mask: h.masked_fill(mask, w[0]),
    "where": lambda h, w, mask: torch.where(mask, w, h),
}


def masked(samples: int) -> tuple[Tensor, ...]:
    return (*steps(9)(samples), torch.rand(samples, 3) > 0.5)


# Biases of scores, one for each head and each distance between places.
OF_HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w[STEPS].permute(2, 0, 1),
    "two indices": lambda w: w[STEPS[None], torch.arange(2)[:, None, None]],
    "last": lambda w: w[STEPS[..., None], torch.arange(2)].permute(2, 0, 1),
    "columns": lambda w: w.T[torch.arange(2)[:, None, None], STEPS],
}
STEPS = torch.arange(3)[:, None] - torch.arange(3) + 2
RUNNING: dict[str, Callable[[Tensor], Tensor]] = {
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "cumsum": lambda h: h.exp().cumsum(1).log(),
    "steps": lambda h: torch.stack([h[:, : step + 1].logsumexp(1) for step in range(3)], 1),
}
# A layer that reads a table, in two halves.
HALF_TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole": lambda t, w: t @ w.T,
    "halves": lambda t, w: F.linear(t[:, :2], w[:, :2]) + F.linear(t[:, 2:], w[:, 2:]),
    "rows": lambda t, w: t[:, :2] @ w.T[:2] + t[:, 2:] @ w.T[2:],
    "chunks": lambda t, w: sum(one @ two.T for one, two in zip(t.chunk(2, -1), w.chunk(2, -1), strict=True)),
}


def in_place(s: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[..., :5] += s.b(torch.tanh(s.a(x[..., 5:])))
    x[..., 5:] += s.d(torch.tanh(s.c(x[..., :5])))
    return x


def by_parts(s: Any, x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    one = one + s.b(torch.tanh(s.a(two)))
    return torch.cat([one, two + s.d(torch.tanh(s.c(one)))], -1)


GENERATED: dict[str, Function] = {
    "coupling of two halves": Function({"a": of(L, 5, 4), "b": of(L, 4, 5), "c": of(L, 5, 4), "d": of(L, 4, 5),
        "o": of(L, 10, 12)}, steps(10), 10, each({"parts": by_parts, "in place": in_place}, lambda own: lambda s, x: (
            s.o(own(s, x))))),
    "table in halves": Function({"t": parameter(5, 4), "w": parameter(6, 4), "a": of(L, 9, 6), "o": of(L, 6, 7)},
        steps(9, 5), 22, each(HALF_TABLES, lambda own: lambda s, x: s.o(torch.tanh(s.a(x)) * own(s.t, s.w)))),
    "biases of heads by distance": Function({"q": of(L, 9, 4), "k": of(L, 8, 4), "w": parameter(5, 2),
        "o": of(L, 3, 6)}, lambda samples: (*steps(9)(samples), *steps(8)(samples)), 8, each(OF_HEADS, lambda own: (
            lambda s, x, y: s.o((heads_of(s.q(x)) @ heads_of(s.k(y)).mT + own(s.w)).tanh().sum(1)))), samples=60),
    "running sums of exponentials": Function({"a": of(L, 9, 4), "o": of(L, 4, 6)}, steps(9), 4, each(RUNNING,
        lambda own: lambda s, x: s.o(own(s.a(x))))),
    "token in place of units": Function({"a": of(L, 9, 4), "w": parameter(4), "o": of(L, 4, 6)}, masked, 20,
        each(TOKENS, lambda own: lambda s, x, mask: s.o(own(s.a(x), s.w, mask[..., None])))),
    "number in place of scores": Function({"q": of(L, 9, 4), "k": of(L, 8, 4), "w": parameter(1), "o": of(L, 3, 6)},
        lambda samples: (*masked(samples), *steps(8)(samples)), 22, each(FILLED, lambda own: lambda s, x, mask, y: s.o(
            own(s.q(x) @ s.k(y).mT, s.w, mask[:, None]).softmax(-1))), samples=60),
    **{name: Function({"a": of(L, 9, 4), "c": of(L, 8, 4), "o": of(L, size, 6)}, lambda samples: (
        *steps(9)(samples), *steps(8)(samples)), 17, each(spellings, lambda own, size=size: lambda s, x, y: s.o(
            own(s.a(x), s.c(y)).view(-1, size))), samples=99)
       for name, size, spellings in [("diagonal of products", 3, DIAGONALS), ("trace of products", 1, TRACES)]},
    "units on a diagonal": Function({"a": of(L, 9, 4), "c": of(L, 9, 4), "o": of(L, 4, 6)}, steps(9), 4,
        each(ON_DIAGONALS, lambda own: lambda s, x: s.o(own(torch.tanh(s.a(x)), s.c(x))))),
    "units as powers of a number": Function({"a": of(L, 9, 4), "o": of(L, 4, 6)}, steps(9), 4,
        each(POWERS, lambda own: lambda s, x: s.o(own(s.a(x))))),
    **{f"gains as {name}": Function({"a": of(L, 9, 4), "w": parameter(4), "o": of(L, 4, 6)}, steps(9), 4,
        each(gains, lambda own: lambda s, x: s.o(torch.tanh(s.a(x)) * own(s.w))))
       for name, gains in [("powers of a number", POWERS), ("exponentials of multiples", EXPONENTIALS),
        ("softplus of multiples", SOFT)]},
    "layer in groups": Function({"a": of(L, 9, 6), "w": parameter(6, 3), "b": parameter(6), "o": of(L, 6, 7)},
        steps(9), 6, each(IN_GROUPS, lambda own: lambda s, x: s.o(torch.tanh(own(F.relu(s.a(x)), s.w) + s.b)))),
    "kernel of width 1 in groups": Function({"a": of(L, 9, 6), "w": parameter(6, 3, 1), "b": parameter(6),
        "o": of(L, 6, 7)}, steps(9), 6,
        each(IN_GROUPS, lambda own: lambda s, x: s.o(torch.tanh(own(F.relu(s.a(x)), s.w[..., 0]) + s.b)))),
    "two sums over parts": Function({"a": of(L, 9, 4), "c": parameter(6, 4), "d": parameter(5, 4)}, steps(9), 16,
        each(SUMMED, lambda own: lambda s, x: (lambda h: torch.cat([torch.tanh(own(h, s.c)), own(h, s.d)], -1))(
            s.a(x)))),
    "queries of a table": Function({"t": parameter(7, 4), "q": of(L, 4, 4), "a": of(L, 9, 4), "o": of(L, 4, 6)},
        steps(9), 36, each(QUERIES, lambda own: lambda s, x: (lambda h: s.o((torch.tanh(own(s.t, s.q) @ h.mT) @ h)
            .mean(1)))(s.a(x))), samples=60),
    "units in another order": Function({"a": of(L, 9, 4), "o": of(L, 4, 6)}, steps(9), 4,
        each(ORDERS, lambda own: lambda s, x: s.o(own(torch.abs(s.a(x)))))),
    "mean of norms": Function({"a": of(L, 9, 4), "o": of(L, 4, 6)}, steps(9), 6,
        each(AVERAGES, lambda own: lambda s, x: s.o(own(standardised(F.elu(s.a(x))))))),
    "heads of one layer": Function({"a": of(L, 9, 4), "i": of(L, 4, 12), "o": of(L, 4, 6)}, steps(9), 24,
        each(HEADS, lambda own: lambda s, x: s.o(attended(*map(own, s.i(F.silu(s.a(x))).chunk(3, -1))))), samples=60),
    "gain of two halves": Function({"a": of(L, 9, 4), "c": of(L, 4, 4), "o": of(L, 4, 6)}, steps(9), 8,
        each(HALVES, lambda own: lambda s, x: (lambda h: s.o(h * (1 + own(h, s.c))))(s.a(x)))),
    "table times matrix": Function({"t": parameter(3, 4), "w": parameter(4, 4), "a": of(L, 9, 4), "o": of(L, 4, 5)},
        steps(9), 20, each(TABLES, lambda own: lambda s, x: s.o(torch.tanh(own(s.t, s.w) + s.a(x)))), samples=60),
    "parts apart in a sum": Function({"a": of(L, 9, 4), "g": of(L, 9, 4), "e": of(L, 4, 6), "w": parameter(4, 6),
        "o": of(L, 4, 5)}, steps(9), 4, each(TERMS, lambda own: lambda s, x: parts_in_a_sum(own, s, x))),
    "constants before a norm": Function({"a": of(L, 9, 4), "o": of(L, 4, 6)}, steps(9), 6,
        each(CENTRED, lambda own: lambda s, x: s.o(standardised(own(s.a(x)))))),
    "norm in groups beside its function": Function({"a": of(L, 9, 6), "g": parameter(6), "b": parameter(6),
        "c": of(L, 6, 3), "d": of(L, 9, 4)}, steps(9), 48, {"group_norm": beside_a_function}, samples=60),
    "maxout units in the groups of a norm": Function({"a": of(L, 9, 8), "o": of(L, 4, 6)}, steps(9), 32,
        {f"{one}, {two}": lambda s, x, one=one, two=two: s.o(GROUP_NORMS[two](MAXIMA[one](s.a(x))))
         for one in MAXIMA for two in GROUP_NORMS}),
    "heads in the groups of a norm": Function({"i": of(L, 9, 24), "o": of(L, 8, 6)}, steps(9), 38,
        each(GROUP_NORMS, lambda own: lambda s, x: s.o(own(attended(
            *(h.unflatten(-1, (4, 2)).transpose(1, 2) for h in s.i(x).chunk(3, -1)))))), samples=60),
}  # fmt: skip
