"""Attention as torch's module spells it: masks on the axis of samples and heads, packed weights; and over edges.

Each function in many spellings; see ``spelling_cases``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from helpers import of, parameter
from spelling_cases import Function, Spelled, steps
from torch import Tensor, nn
from torch.nn import functional as F

L = nn.Linear
COUNT, SIZE, WIDTH, STEPS = 2, 3, 8, 4
Three = tuple[Tensor, Tensor, Tensor]


def inputs(samples: int) -> tuple[Tensor, ...]:
    """Make sequences, and what is added to the scores of their keys."""
    return tuple(torch.randn(samples, STEPS, width, dtype=torch.float64) for width in (WIDTH, STEPS))


def inputs_of_heads(samples: int) -> tuple[Tensor, ...]:
    """Make sequences, and what is added to the scores of each head."""
    added = torch.randn(COUNT, STEPS, STEPS, dtype=torch.float64)
    return torch.randn(samples, STEPS, WIDTH, dtype=torch.float64), added


def apart(x: Tensor) -> Tensor:
    """Return heads on an axis of their own. Shape (samples, heads, steps, units)."""
    return x.view(*x.shape[:2], COUNT, SIZE).transpose(1, 2)


def as_torch(x: Tensor) -> Tensor:
    """Return heads on the axis of the samples, as torch's module does. Shape (samples * heads, steps, units)."""
    return x.transpose(0, 1).contiguous().view(x.shape[1], len(x) * COUNT, SIZE).transpose(0, 1)


def flattened(x: Tensor) -> Tensor:
    """Return heads on the axis of the samples."""
    return apart(x).reshape(-1, x.shape[1], SIZE)


def read(w: Tensor, v: Tensor, samples: int) -> Tensor:
    """Return what heads on the axis of the samples read. Shape (samples, steps, heads * units)."""
    return (w @ v).view(samples, COUNT, STEPS, SIZE).transpose(1, 2).reshape(samples, STEPS, COUNT * SIZE)


def by_bmm(s: Any, x: Tensor, mask: Tensor, heads: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = (heads(layer(x)) for layer in (s.q, s.k, s.v))
    scores = torch.baddbmm(mask, q, k.mT, alpha=1 / math.sqrt(SIZE))
    return s.o(read(scores.softmax(-1), v, len(x)))


def merged(mask: Callable[[Tensor, int], Tensor], heads: Callable[[Tensor], Tensor] = flattened) -> Spelled:
    return lambda s, x, m: by_bmm(s, x, mask(m, len(x)), heads)


def added(s: Any, x: Tensor, m: Tensor) -> Tensor:
    q, k, v = (flattened(layer(x)) for layer in (s.q, s.k, s.v))
    scores = q @ k.mT / math.sqrt(SIZE) + m.repeat_interleave(COUNT, 0)
    return s.o(read(scores.softmax(-1), v, len(x)))


def fused(mask: Callable[[Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor, m: Tensor) -> Tensor:
        q, k, v = (apart(layer(x)) for layer in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(m))
        return s.o(y.transpose(1, 2).flatten(2))

    return forward


def between_views(s: Any, x: Tensor, m: Tensor) -> Tensor:
    q, k, v = (flattened(layer(x)) for layer in (s.q, s.k, s.v))
    scores = (q @ k.mT / math.sqrt(SIZE)).view(len(x), COUNT, STEPS, STEPS) + m[:, None]
    return s.o(read(scores.view(-1, STEPS, STEPS).softmax(-1), v, len(x)))


def expanded(m: Tensor, n: int) -> Tensor:
    return m.view(n, 1, STEPS, STEPS).expand(-1, COUNT, -1, -1).reshape(-1, STEPS, STEPS)


SAMPLES: dict[str, Spelled] = {
    "fused": fused(lambda m: m[:, None]),
    "added between views": between_views,
    "expanded": merged(expanded),
    "expanded, as torch": merged(expanded, as_torch),
    "added": added,
}
OF_HEADS: dict[str, Spelled] = {
    "fused": fused(lambda m: m[None]),
    "repeated": merged(lambda m, n: m.repeat(n, 1, 1)),
}

# ---- learned queries, of which one matrix holds the weights together with those of keys and values


def packed(cut: Callable[[Any], Any], expand: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        hidden, learned = torch.tanh(s.x(x)), expand(s.i, x)
        q, k, v = (
            F.linear(read, *own).unflatten(-1, (2, 2)).transpose(1, 2)
            for read, own in zip((learned, hidden, hidden), cut(s), strict=True)
        )
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return forward


CUTS: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda s: zip(s.w.chunk(3), s.b.chunk(3), strict=True),
    "slices": lambda s: [(s.w[:4], s.b[:4]), (s.w[4:8], s.b[4:8]), (s.w[8:], s.b[8:])],
}
EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expanded": lambda i, x: i.expand(len(x), -1, -1),
    "stacked": lambda i, x: torch.stack([i] * len(x)),
}
LEARNED: dict[str, Spelled] = {
    f"{cut}, {how}": packed(CUTS[cut], EXPANDED[how]) for cut in CUTS for how in EXPANDED
} | {}

# ---- attention over the edges of a graph

ENDS = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3, 4, 0, 0, 2], [1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 2, 0]])


def graphs(samples: int) -> tuple[Tensor, ...]:
    """Make graphs of 5 nodes: values of nodes, and both ends of edges."""
    edges = torch.cat([ENDS + 5 * number for number in range(samples)], 1)
    return torch.randn(5 * samples, WIDTH, dtype=torch.float64), edges


def by_index_add(p: Tensor, ends: Tensor, count: int) -> Tensor:
    return p.new_zeros(count, *p.shape[1:]).index_add(0, ends, p)


def by_scatter(p: Tensor, ends: Tensor, count: int) -> Tensor:
    wide = ends.view(-1, *[1] * (p.ndim - 1)).expand_as(p)
    return torch.zeros(count, *p.shape[1:], dtype=p.dtype).scatter_add_(0, wide, p)


Added = Callable[[Tensor, Tensor, int], Tensor]


def shares(z: Tensor, ends: Tensor, count: int, add: Added, least: bool = False) -> Tensor:
    """Return the softmax over the edges that end in one node, as PyTorch Geometric computes it or more plainly."""
    if least:
        most = torch.zeros(count, z.shape[1], dtype=z.dtype).scatter_reduce(
            0, ends[:, None].expand_as(z), z.detach(), "amax", include_self=False
        )
        p = (z - most.index_select(0, ends)).exp()
        return p / (add(p, ends, count) + 1e-16).index_select(0, ends)
    return z.exp() / add(z.exp(), ends, count)[ends]


def both_ends(add: Added, least: bool = False) -> Spelled:
    def forward(s: Any, x: Tensor, edges: Tensor) -> Tensor:
        begins, ends = edges
        one, two = (layer(x).view(-1, COUNT, SIZE) for layer in (s.k, s.q))
        z = (F.silu(one[begins] + two[ends]) * s.a).sum(-1)
        read = one[begins] * shares(z, ends, len(x), add, least)[..., None]
        return s.o(F.elu(add(read, ends, len(x)).flatten(1) + s.b))

    return forward


def to_graphs(add: Added, least: bool = False) -> Spelled:
    def forward(s: Any, x: Tensor, edges: Tensor) -> Tensor:
        graph = torch.arange(len(x) // 5).repeat_interleave(5) + 0 * edges[0, 0]
        return s.o(add(shares(s.g(x), graph, len(x) // 5, add, least) * s.v(x), graph, len(x) // 5))

    return forward


EDGES: dict[str, tuple[Added, bool]] = {
    "scatter_add, with maxima": (by_scatter, True),
    "index_add": (by_index_add, False),
    "scatter_add": (by_scatter, False),
}

# ---- units of a head on two axes of one layer's outputs


def two_axes(cut: Callable[[Tensor], Any]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = cut(s.w(x))
        weights = torch.einsum("bqhde,bkhde->bhqk", q, k).softmax(-1)
        return s.o(torch.einsum("bhqk,bkhde->bqhde", weights, v).flatten(2))

    return forward


def one_axis(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.w(x).view(*x.shape[:2], 3, COUNT, 4).transpose(1, 3).unbind(2)
    return s.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


TWO_AXES: dict[str, Spelled] = {
    "one axis": one_axis,
    "unbind": two_axes(lambda y: y.view(*y.shape[:2], 3, COUNT, 2, 2).unbind(2)),
}

# ---- differences of two softmaxes


def scores_of_pairs(s: Any, x: Tensor) -> Tensor:
    q, k = (layer(x).unflatten(-1, (2 * COUNT, 2)).transpose(1, 2) for layer in (s.q, s.k))
    return (q @ k.mT).softmax(-1)


def pairs_strided(s: Any, x: Tensor) -> Tensor:
    weights = scores_of_pairs(s, x)
    return s.o(((weights[:, ::2] - weights[:, 1::2] * s.t) @ apart(s.v(x))).transpose(1, 2).flatten(2))


def pairs_chunked(s: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (COUNT, -1)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    one, two = ((a @ b.mT).softmax(-1) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
    return s.o(((one - s.t * two) @ v).transpose(1, 2).flatten(2))


PAIRS: dict[str, Spelled] = {
    "chunk": pairs_chunked, "strides": pairs_strided,
}  # fmt: skip

# ---- gains that a function keeps positive


def gained(gain: Callable[[Any, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(torch.relu(gain(s, x)) + s.c)


LOG_GAINS: dict[str, Spelled] = {
    "quotient": gained(lambda s, x: s.a(x) / torch.exp(-s.w)),
    "rows of the weight": gained(lambda s, x: F.linear(x, s.a.weight * s.w[:, None].exp(), s.a.bias * s.w.exp())),
}
SOFT_GAINS: dict[str, Spelled] = {
    "product": lambda s, x: s.b(torch.tanh(s.a(x)) * F.softplus(s.w)),
    "columns of the weight": lambda s, x: F.linear(torch.tanh(s.a(x)), s.b.weight * F.softplus(s.w), s.b.bias),
}


def log_temperature(scores: Callable[[Any, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (apart(layer(x)) for layer in (s.q, s.k, s.v))
        return s.o((scores(s, q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))

    return forward


TEMPERATURES: dict[str, Spelled] = {
    "scores": log_temperature(lambda s, q, k: q @ k.mT * s.t.exp()),
    "quotient": log_temperature(lambda s, q, k: q @ k.mT / (-s.t).exp()),
}

# ---- learned keys and values beside those of each head


def remembered(expand: Callable[[Tensor, int], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (apart(layer(x)) for layer in (s.q, s.k, s.v))
        k, v = (torch.cat([expand(own, len(x)), other], -2) for own, other in ((s.mk, k), (s.mv, v)))
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return forward


MEMORY: dict[str, Spelled] = {
    "expanded": remembered(lambda own, n: own.expand(n, -1, -1, -1)),
    "stacked": remembered(lambda own, n: torch.stack([own] * n)),
}

FLAT = {name: of(L, WIDTH, COUNT * SIZE) for name in ("q", "k", "v")} | {"o": of(L, COUNT * SIZE, WIDTH)}
MASKED: dict[str, Function] = {
    "numbers for each head": Function(FLAT, inputs_of_heads, 48, OF_HEADS),
    "learned queries": Function(
        {"i": parameter(9, 4), "w": parameter(12, 4), "b": parameter(12), "x": of(L, 6, 4), "o": of(L, 4, 4)},
        steps(6, 5),
        44,
        LEARNED,
    ),
    "gains as exponentials": Function(
        {"a": of(L, WIDTH, 4), "w": parameter(4), "c": parameter(4), "b": of(L, 4, 5)}, steps(WIDTH, 4), 12, LOG_GAINS),
    "gains as softplus": Function({"a": of(L, WIDTH, 4), "w": parameter(4), "b": of(L, 4, 5)}, steps(WIDTH, 4), 4,
        SOFT_GAINS),
    "temperatures as exponentials": Function(FLAT | {"t": parameter(COUNT, 1, 1)}, steps(WIDTH, 4), 50, TEMPERATURES),
    "learned keys and values": Function(FLAT | {name: parameter(COUNT, 5, SIZE) for name in ("mk", "mv")},
        steps(WIDTH, 4), 48, MEMORY),
    "attention by both ends of edges": Function(
        {name: FLAT[name] for name in "qko"} | {"a": parameter(1, COUNT, SIZE), "b": parameter(COUNT * SIZE)}, graphs,
        6, {name: both_ends(*how) for name, how in EDGES.items()}),
    "pooling of graphs by attention": Function({"g": of(L, WIDTH, 1), "v": of(L, WIDTH, 5), "o": of(L, 5, 6)}, graphs,
        31, {name: to_graphs(*how) for name, how in EDGES.items()}, samples=60),
    "units on two axes": Function({"w": of(L, 10, 24), "o": of(L, 8, 9)}, steps(10, 4), 80, TWO_AXES),
    "differences of softmaxes": Function(
        {name: of(L, WIDTH, 4 * COUNT) for name in "qk"} | {"v": FLAT["v"], "o": FLAT["o"], "t": parameter(1)},
        steps(WIDTH, 4), 48, PAIRS),
}  # fmt: skip
