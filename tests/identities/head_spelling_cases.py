"""Attention heads as others write them, each function in many spellings; see ``spelling_cases.py``."""

import math
from collections.abc import Callable
from typing import Any

import torch
from helpers import of, parameter
from spelling_cases import Function, Spelled, each, steps
from torch import Tensor, nn
from torch.nn import functional as F

L = nn.Linear
COUNT, SIZE, WIDTH = 2, 3, 8
AHEAD = torch.ones(4, 4, dtype=torch.bool).triu(1)
APART = torch.arange(4)[:, None] - torch.arange(4) + 3
Three = tuple[Tensor, Tensor, Tensor]


def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what heads read. Shapes (..., steps, units)."""
    return (q @ k.mT / math.sqrt(SIZE)).masked_fill(AHEAD, -math.inf).softmax(-1) @ v


def read_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what heads read. Shapes (samples, steps, heads, units)."""
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(SIZE)
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(AHEAD, -math.inf).softmax(-1), v)


# ---- weights with an axis of heads


def arrays(s: Any) -> list[tuple[Tensor, Tensor]]:
    return [(s.wq, s.bq), (s.wk, s.bk), (s.wv, s.bv)]


def by_einsum(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.einsum("bpd,hde->bphe", x, w) + b for w, b in arrays(s))
    return q, k, v


def by_matmul(s: Any, x: Tensor) -> Three:
    q, k, v = ((x[:, None] @ w + b[:, None]).transpose(1, 2) for w, b in arrays(s))
    return q, k, v


def layer_of(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return a linear layer of heads. Shape (samples, steps, heads, units)."""
    return F.linear(x, w.transpose(1, 2).reshape(-1, WIDTH), b.flatten()).unflatten(-1, (COUNT, SIZE))


def by_bmm(s: Any, x: Tensor) -> Three:
    rows = x.flatten(0, 1).expand(COUNT, -1, -1)
    q, k, v = (torch.baddbmm(b[:, None], rows, w).unflatten(1, x.shape[:2]).movedim(0, 2) for w, b in arrays(s))
    return q, k, v


def added(s: Any, z: Tensor) -> Tensor:
    return torch.einsum("bqhe,hed->bqd", z, s.wo) + s.bo


def added_last(s: Any, z: Tensor) -> Tensor:
    return torch.einsum("bqhe,hed->bqhd", z, s.wo).sum(2) + s.bo


def added_by_matmul(s: Any, z: Tensor) -> Tensor:
    return (z.transpose(1, 2) @ s.wo).sum(1) + s.bo


def added_by_layer(s: Any, z: Tensor) -> Tensor:
    return F.linear(z.flatten(2), s.wo.permute(2, 0, 1).reshape(WIDTH, -1), s.bo)


def fused(s: Any, x: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in by_einsum(s, x))
    return added(s, F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))


def through(first: Callable[..., Three], last: Callable[..., Tensor]) -> Spelled:
    return lambda s, x: last(s, read_by_einsum(*first(s, x)))


ARRAYS: dict[str, Spelled] = {
    "einsum": through(by_einsum, added),
    "baddbmm": through(by_bmm, added_last),
}


# ---- queries, keys and values in one array, of shape (3, heads, ...) or others


def members(s: Any, axis: int = 0) -> list[tuple[Tensor, Tensor]]:
    return list(zip(s.w.unbind(axis), s.b.unbind(axis), strict=True))


def by_index(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.einsum("bpd,hde->bphe", x, s.w[at]) + s.b[at] for at in range(3))
    return q, k, v


def by_part(s: Any, x: Tensor) -> Three:
    q, k, v = ((x[:, None] @ w + b[:, None]).transpose(1, 2) for w, b in members(s))
    return q, k, v


def by_chunk(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.einsum("bpd,khde->bphe", x, w) + b[0] for w, b in zip(s.w.chunk(3), s.b.chunk(3), strict=True))
    return q, k, v


def by_rows(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.einsum("bpd,ade->bpae", x, s.w.flatten(0, 1)) + s.b.flatten(0, 1)).split(COUNT, 2)
    return q, k, v


def at_once(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.einsum("bpd,khde->kbphe", x, s.w) + s.b[:, None, None]).unbind(0)
    return q, k, v


def at_once_by_matmul(s: Any, x: Tensor) -> Three:
    q, k, v = (part.transpose(1, 2) for part in x[None, :, None] @ s.w[:, None] + s.b[:, None, :, None])
    return q, k, v


def head_in_part(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.stack([x @ w[head] + b[head] for head in range(COUNT)], 2) for w, b in members(s))
    return q, k, v


def layer_of_part(s: Any, x: Tensor) -> Three:
    q, k, v = (layer_of(x, w, b) for w, b in members(s))
    return q, k, v


def columns(s: Any, x: Tensor) -> Three:
    q, k, v = (torch.einsum("bpd,hde->bphe", x, s.w) + s.b).chunk(3, -1)
    return q, k, v


TOGETHER = {
    **{first.__name__: through(first, added)
       for first in (by_index, by_part, by_chunk, by_rows, at_once, at_once_by_matmul, head_in_part, layer_of_part)},
    "all at once, layer last": through(at_once, added_by_layer),
}  # fmt: skip
COLUMNS = {"array last": through(columns, added), "layer last": through(columns, added_by_layer)}


AXES_OF_SIZE_ONE: dict[str, Spelled] = {
    "einsum": lambda s, x: added(s, read_by_einsum(*(torch.einsum("bpd,khde->bphe", x, w) + b for w, b in arrays(s)))),
    "matmul": lambda s, x: added(s, read_by_einsum(*((x[:, None] @ w).transpose(1, 2) + b for w, b in arrays(s)))),
}


# ---- layers and weights with an axis of heads


def apart(s: Any, x: Tensor) -> Three:
    q, k, v = (layer(x).unflatten(-1, (COUNT, SIZE)) for layer in (s.q, s.k, s.v))
    return q, k, v


def flat(s: Any, z: Tensor) -> Tensor:
    return s.o(z.flatten(2))


# ---- talking heads: matrices over heads before and after the softmax

MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda z, m: torch.einsum("bhqk,gh->bgqk", z, m),
}


def talking(
    mix: Callable[[Tensor, Tensor], Tensor], first: Callable[..., Three], last: Callable[..., Tensor]
) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = first(s, x)
        weights = mix(torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(SIZE), s.before).softmax(-1)
        return last(s, torch.einsum("bhqk,bkhe->bqhe", mix(weights, s.after), v))

    return forward


TALKING_ARRAYS = {name: talking(mix, by_einsum, added) for name, mix in MIXED.items()} | {
    "products": talking(MIXED["einsum"], by_matmul, added_by_matmul),
}


# ---- several heads of queries for each head of keys and values


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[2] // k.shape[2]
    return read_by_einsum(q, k.repeat_interleave(times, 2), v.repeat_interleave(times, 2))


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[2] // k.shape[2]
    k, v = (part[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3) for part in (k, v))
    return read_by_einsum(q, k, v)


def in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqgre,bkge->bgrqk", q.unflatten(2, (k.shape[2], -1)), k) / math.sqrt(SIZE)
    return torch.einsum("bgrqk,bkge->bqgre", scores.masked_fill(AHEAD, -math.inf).softmax(-1), v).flatten(2, 3)


def fused_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def grouped(
    read_groups: Callable[[Tensor, Tensor, Tensor], Tensor], first: Callable[..., Three], last: Callable[..., Tensor]
) -> Spelled:
    return lambda s, x: last(s, read_groups(*first(s, x)))


def by_layers(s: Any, x: Tensor) -> Three:
    q, k, v = (
        F.linear(x, w.transpose(1, 2).reshape(-1, WIDTH), b.flatten()).unflatten(-1, (-1, SIZE)) for w, b in arrays(s)
    )
    return q, k, v


GROUPED = {
    f"{ways.__name__}, {first.__name__}": grouped(ways, first, added)
    for ways in (repeated, expanded, in_groups, fused_groups)
    for first in (by_einsum, by_matmul, by_layers)
} | {}
# ---- a module for each head


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (L(WIDTH, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return read(self.query(x), self.key(x), self.value(x))


def each_head(s: Any, x: Tensor) -> list[Tensor]:
    return [head(x) for head in s.heads]


def stacked_parts(s: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.stack([getattr(head, name)(x) for head in s.heads], 1) for name in ("query", "key", "value"))
    return s.o(read(q, k, v).transpose(1, 2).flatten(2))


def joined_weights(s: Any, x: Tensor) -> Tensor:
    q, k, v = (
        F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers]))
        .unflatten(-1, (COUNT, SIZE))
        .transpose(1, 2)
        for layers in ([getattr(head, name) for head in s.heads] for name in ("query", "key", "value"))
    )
    return s.o(read(q, k, v).transpose(1, 2).flatten(2))


MODULES: dict[str, Spelled] = {
    "sum": lambda s, x: sum(
        (F.linear(z, w) for z, w in zip(each_head(s, x), s.o.weight.chunk(COUNT, 1), strict=True)), start=s.o.bias
    ),
    "stacked parts": stacked_parts,
    "joined weights": joined_weights,
}


# ---- relative positions


def relative(scores: Callable[[Any, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in apart(s, x))
        weights = ((q @ k.mT + scores(s, q)) / math.sqrt(SIZE)).softmax(-1)
        return s.o((weights @ v).transpose(1, 2).flatten(2))

    return forward


RELATIVE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "einsum": lambda s, q: torch.einsum("bhie,ije->bhij", q, s.e[APART]),
    "sum": lambda s, q: (q[..., None, :] * s.e[APART]).sum(-1),
}


# ---- experts


def experts(mix: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("btd,edm->btem", x, s.w) + s.c)
        y = torch.einsum("btem,emo->bteo", hidden, s.v) + s.d
        return s.o(s.n(mix(y, s.g(x).softmax(-1))))

    return forward


def expert_by_expert(s: Any, x: Tensor) -> Tensor:
    shares = s.g(x).softmax(-1)
    return s.o(
        s.n(sum(shares[..., e, None] * (torch.tanh(x @ s.w[e] + s.c[e]) @ s.v[e] + s.d[e]) for e in range(3)))
    )  # fmt: skip


MIXTURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda y, shares: torch.einsum("bteo,bte->bto", y, shares),
}


# ---- functions


def both(weight: tuple[int, ...], bias: tuple[int, ...]) -> dict[str, Any]:
    return {"w": parameter(*weight), "b": parameter(*bias)}


def three(weight: tuple[int, ...], bias: tuple[int, ...]) -> dict[str, Any]:
    return {"w" + part: parameter(*weight) for part in "qkv"} | {"b" + part: parameter(*bias) for part in "qkv"}


FIRST = three((COUNT, WIDTH, SIZE), (COUNT, SIZE))
LAST = {"wo": parameter(COUNT, SIZE, WIDTH), "bo": parameter(WIDTH)}
FLAT = {name: of(L, WIDTH, COUNT * SIZE) for name in ("q", "k", "v")}
OUT = {"o": of(L, COUNT * SIZE, WIDTH)}
GROUPS = FIRST | {"wq": parameter(4, WIDTH, SIZE), "bq": parameter(4, SIZE)}
ONE_KEY = {"wq": parameter(COUNT, WIDTH, SIZE), "bq": parameter(COUNT, SIZE)} | {
    name + part: parameter(*shape) for part in "kv" for name, shape in (("w", (WIDTH, SIZE)), ("b", (SIZE,)))
}
BETWEEN = {name: parameter(COUNT, COUNT) for name in ("before", "after")}
EXPERTS = {"g": of(L, WIDTH, 3), "w": parameter(3, WIDTH, 5), "c": parameter(3, 5), "v": parameter(3, 5, 6),
    "d": parameter(3, 6), "n": of(nn.LayerNorm, 6), "o": of(L, 6, 5)}  # fmt: skip

HEAD_CASES: dict[str, Function] = {
    "heads in arrays": Function(FIRST | LAST, steps(WIDTH, 4), 48, ARRAYS),
    "queries, keys, values in an array": Function(LAST | both((3, COUNT, WIDTH, SIZE), (3, COUNT, SIZE)),
        steps(WIDTH, 4), 48, TOGETHER),
    "an array, parts behind inputs": Function(LAST | both((COUNT, WIDTH, 3 * SIZE), (COUNT, 3 * SIZE)),
        steps(WIDTH, 4), 48, COLUMNS),
    "arrays, axes of size 1": Function(LAST | three((1, COUNT, WIDTH, SIZE), (1, 1, COUNT, SIZE)), steps(WIDTH, 4), 48,
        AXES_OF_SIZE_ONE),
    "grouped queries in arrays": Function(LAST | {"wo": parameter(4, SIZE, WIDTH)} | GROUPS, steps(WIDTH, 4), 48,
        GROUPED),
    "talking heads in arrays": Function(FIRST | LAST | BETWEEN, steps(WIDTH, 4), 52, TALKING_ARRAYS),
    "a module for each head": Function({"heads": lambda: nn.ModuleList(Head() for _ in range(COUNT))} | OUT,
        steps(WIDTH, 4), 48, MODULES),
    "relative positions of heads": Function(FLAT | OUT | {"e": parameter(7, SIZE)}, steps(WIDTH, 4), 42,
        each(RELATIVE, relative), samples=60),
    "experts before a norm": Function(EXPERTS, steps(WIDTH, 4), 54,
        each(MIXTURES, experts) | {"expert by expert": expert_by_expert}, samples=60),
}  # fmt: skip
