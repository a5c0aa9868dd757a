"""Functions whose group was smaller than the nullity, each in a few spellings; see ``spelling_cases.py``."""

import math
from collections.abc import Callable
from typing import Any

import torch
from helpers import of, parameter
from spelling_cases import HEADS, WIDE_HEADS, Function, Spelled, each, heads_of, joined, qkv, ratio, steps, tokens
from torch import Tensor, nn
from torch.nn import functional as F

L, C = nn.Linear, nn.Conv2d


def rms(h: Tensor) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], eps=1e-5)


def images(channels: int, size: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda samples: (torch.randn(samples, channels, size, size, dtype=torch.float64),)


# ---- gains of 1 + w


GAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ones": lambda h, w: rms(h) * (torch.ones_like(w) + w),
    "minus": lambda h, w: rms(h) * -(-1 - w),
}


STREAM = {
    "i": of(L, 7, 5, bias=False), "u": of(L, 5, 6, bias=False), "v": of(L, 6, 5, bias=False), "w1": parameter(5),
    "w3": parameter(5), "h": of(L, 5, 6, bias=False),
}  # fmt: skip


def conditioned(join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor, c: Tensor) -> Tensor:
        scale, shift = s.m(F.silu(c))[:, None].chunk(2, -1)
        return s.b(join(F.layer_norm(s.a(x), (6,)), scale, shift))

    return forward


def adapted(apply: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    """Return a norm whose scale and shift are both made of one layer's outputs."""
    return lambda s, x, c: s.b(apply(F.layer_norm(s.a(x), (6,)), s.m(F.silu(c))))


ADAPTED: dict[str, Spelled] = {
    "einsum": adapted(lambda h, e: torch.einsum("btd,bd->btd", h, 1 + e[:, :6]) + e[:, None, 6:]),
}


def with_conditions(samples: int) -> tuple[Tensor, ...]:
    return (*steps(8)(samples), torch.randn(samples, 4, dtype=torch.float64))


# ---- batch norms of convolutions


def channel(t: Tensor) -> Tensor:
    return t[:, None, None]


def normed(norm: Callable[..., Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        n = s.n
        gain = n.weight * torch.rsqrt(n.running_var + n.eps)
        return s.b(torch.relu(norm(s, x, gain, n.bias - n.running_mean * gain)))

    return forward


NORMED: dict[str, Spelled] = {
    "gain and bias": normed(lambda s, x, g, b: s.a(x) * g.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)),
    "channels last": normed(lambda s, x, g, b: (s.a(x).permute(0, 2, 3, 1) * g + b).permute(0, 3, 1, 2)),
}  # fmt: skip


# ---- heads


def by_heads(norm: Callable[[Any, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(norm(s, s.a(x).unflatten(-1, (2, 3))).flatten(-2))


def standard(h: Tensor) -> Tensor:
    c = h - h.mean(-1, keepdim=True)
    return c / torch.sqrt(c.square().mean(-1, keepdim=True) + 1e-5)


def norm_of_chunks(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.cat([F.rms_norm(h, (3,), s.g, 1e-5) for h in s.a(x).chunk(2, -1)], -1))


def scores(score: Callable[[Any, Tensor, Tensor], Tensor]) -> Spelled:
    """Return attention whose logits are computed in some way from queries and keys."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = qkv(s, x)
        return s.o(joined(score(s, q, k).softmax(-1) @ v))

    return forward


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


COSINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normalize": lambda q, k: F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT,
    "divided later": lambda q, k: q @ k.mT / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]),
}


def shared_queries(s: Any, x: Tensor) -> Tensor:
    q, v = heads_of(s.q(x)), heads_of(s.v(x))
    return s.o(joined((q @ q.mT).softmax(-1) @ v))


def beit(s: Any, x: Tensor) -> Tensor:
    bias = torch.cat([s.bq, torch.zeros_like(s.bq), s.bv])
    q, k, v = F.linear(x, s.w.weight, bias).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return s.o(joined((q @ k.mT).softmax(-1) @ v))


def two_sequences(samples: int) -> tuple[Tensor, ...]:
    return (*steps(6)(samples), *steps(6, 4)(samples))


def attention_without_biases(s: Any, x: Tensor) -> Tensor:
    x = s.n(x)
    return s.o((s.q(x) @ s.k(x).mT).softmax(-1) @ s.v(x))


# ---- other masks of attention: slopes within a window, a mask as input, queries that share keys, learned biases


PLACES = torch.arange(3)[:, None] - torch.arange(3)
WINDOW = (PLACES >= 0) & (PLACES < 2)
SLOPES = -PLACES.double() * torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None]
SLOPED = SLOPES.masked_fill(~WINDOW, -math.inf)


def logits(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def with_a_mask(samples: int) -> tuple[Tensor, ...]:
    return (*steps(6)(samples), torch.randn(samples, 1, 3, 3, dtype=torch.float64))


def biased(weigh: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    """Return attention that adds an input to the logits."""

    def forward(s: Any, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = qkv(s, x)
        return s.o(joined(weigh(logits(q, k), mask) @ v))

    return forward


def relative(s: Any) -> Tensor:
    return s.t[:, PLACES + 2]


def grouped(repeat: Callable[[Tensor], Tensor]) -> Spelled:
    """Return attention of 4 heads of queries that share 2 of keys and values."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.q(x).unflatten(-1, (4, -1)).transpose(1, 2), heads_of(s.k(x)), heads_of(s.v(x))
        return s.o(joined(logits(q, repeat(k)).softmax(-1) @ repeat(v)))

    return forward


def grouped_head_by_head(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x).chunk(4, -1), s.k(x).chunk(2, -1), s.v(x).chunk(2, -1)
    return s.o(torch.cat([logits(q[h], k[h // 2]).softmax(-1) @ v[h // 2] for h in range(4)], -1))


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "stack": lambda k: torch.stack([k, k], 2).flatten(1, 2),
    "gather": lambda k: k.gather(1, (torch.arange(4) // 2)[None, :, None, None].expand(len(k), -1, *k.shape[2:])),
}


# ---- one axis of units that becomes channels times space


def shuffled(h: Tensor) -> Tensor:
    b, c, y, x = h.shape
    return h.view(b, c // 4, 2, 2, y, x).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * y, 2 * x)


SHUFFLES: dict[str, Callable[[Tensor], Tensor]] = {"pixel_shuffle": lambda h: F.pixel_shuffle(h, 2), "view": shuffled}
UNSHUFFLES: dict[str, Callable[[Tensor], Tensor]] = {
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h, 2),
    "unfold": lambda h: F.unfold(h, 2, stride=2).unflatten(-1, (h.shape[2] // 2, -1)),
}


def between(move: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(move(s.a(x)))


def decoder(middle: Callable[[Tensor], Tensor]) -> dict[str, Spelled]:
    return {
        "view": lambda s, x: s.b(middle(s.a(x).view(-1, 2, 3, 3))),
        "transposed": lambda s, x: s.b(middle((s.a.weight @ x.T + s.a.bias[:, None]).T.view(-1, 2, 3, 3))),
    }


def vectors(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 7, dtype=torch.float64),)


DECODER = {"a": of(L, 7, 18), "b": of(nn.ConvTranspose2d, 2, 3, 2)}


# ---- graphs: vectors of nodes, and edges as inputs


def edges(samples: int) -> tuple[Tensor, ...]:
    nodes = torch.arange(samples)
    random = torch.randint(samples, (2, 2 * samples))
    return torch.randn(samples, 8, dtype=torch.float64), torch.cat([torch.stack([nodes, nodes]), random], 1)


def zeros(h: Tensor) -> Tensor:
    return torch.zeros_like(h)


GATHERED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add in place": lambda h, i, j: zeros(h).index_add_(0, j, h.index_select(0, i)),
    "scatter_add": lambda h, i, j: zeros(h).scatter_add(0, j[:, None].expand(-1, 4), h[i]),
    "scatter_reduce": lambda h, i, j: zeros(h).scatter_reduce(0, j[:, None].expand(-1, 4), h[i], "sum"),
    "index_put": lambda h, i, j: zeros(h).index_put((j,), h[i], accumulate=True),
    "one hot": lambda h, i, j: F.one_hot(j, len(h)).to(h).T @ h[i],
}


def neighbours(gather: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x, ends: s.b(gather(s.a(x), ends[0], ends[1]))


def mean_of_neighbours(gather: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor, ends: Tensor) -> Tensor:
        count = torch.zeros_like(x[:, 0]).index_add(0, ends[1], torch.ones_like(ends[1], dtype=x.dtype))
        return s.b(gather(s.a(x), ends[0], ends[1]) / count[:, None])

    return forward


# ---- weighted means, flat parameters, products of three


def read(mean: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.o(mean(s.q(x)[..., 0].softmax(-1), s.v(x)))


MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda w, v: (w[..., None] * v).sum(1),
    "steps": lambda w, v: sum(w[:, t, None] * v[:, t] for t in range(3)),
}


def masked(mean: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x, keep: s.b(mean(keep.to(x), s.a(x)))


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights": lambda m, h: (ratio(m)[..., None] * h).sum(1),
    "where": lambda m, h: torch.where(m[..., None] > 0, h, 0.0).sum(1) / m.sum(1)[:, None],
    "masked_fill": lambda m, h: h.masked_fill(m[..., None] == 0, 0.0).sum(1) / m.sum(1)[:, None],
}


def kept(samples: int) -> tuple[Tensor, ...]:
    keep = torch.rand(samples, 3) < 0.6
    keep[:, 0] = True
    return (*steps(8)(samples), keep)


SIZES = ((4, 8), (4,), (6, 4), (6,), (3, 6), (3,))


def sliced(flat: Tensor) -> list[Tensor]:
    parts, start = [], 0
    for size in SIZES:
        parts.append(flat[start : start + math.prod(size)].view(size))
        start += math.prod(size)
    return parts


CUTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "slices": sliced,
}  # fmt: skip


LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda z: z.log_softmax(-1),
    "stable": lambda z: z - z.amax(-1, True) - (z - z.amax(-1, True)).exp().sum(-1, True).log(),
}


BAGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding_bag": lambda i, e: F.embedding_bag(i, e, mode="mean"),
    "mean of indicators": lambda i, e: F.one_hot(i, 9).to(e).mean(1) @ e,
    "steps": lambda i, e: (e[i[:, 0]] + e[i[:, 1]] + e[i[:, 2]]) / 3,
}


BILINEAR: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "bilinear": F.bilinear,
    "matmul": lambda x, y, w, b: ((x[..., None, None, :] @ w)[..., 0, :] @ y[..., None])[..., 0] + b,
    "outer by einsum": lambda x, y, w, b: torch.einsum("bti,btj->btij", x, y).flatten(-2) @ w.flatten(1).T + b,
    "outer": lambda x, y, w, b: (x[..., :, None] * y[..., None, :]).flatten(-2) @ w.flatten(1).T + b,
}


def two_equal_sequences(samples: int) -> tuple[Tensor, ...]:
    return (*steps(8)(samples), *steps(8)(samples))


THREE: dict[str, Spelled] = {
    "einsum": lambda s, x: torch.einsum("bti,ir,ro->bto", x, s.u, s.v),
    "chain": lambda s, x: torch.linalg.multi_dot([x.flatten(0, 1), s.u, s.v]).unflatten(0, x.shape[:2]),
}


# ---- functions


AROUND = {"a": of(L, 8, 6), "b": of(L, 6, 7)}
POSITIONS = {"e": of(nn.Embedding, 9, 5), "p": parameter(3, 5)}
RECURRENT = {"e": of(nn.Embedding, 9, 4), "h": of(L, 3, 5)}
FURTHER: dict[str, Function] = {
    "gains of 1 + w": Function(AROUND | {"w": parameter(6)}, steps(8), 21,
        each(GAIN, lambda how: lambda s, x: s.b(how(s.a(x), s.w)))),
    "conditioned norm": Function(AROUND | {"m": of(L, 4, 12)}, with_conditions, 21,
        {"one plus": conditioned(lambda h, scale, shift: h * (1 + scale) + shift),
        } | ADAPTED, samples=60),
    # The scale is read without the 1, too, or with another number.
    "conditioned norm, scale read twice": Function(AROUND | {"m": of(L, 4, 12)}, with_conditions, 9,
        {"product": conditioned(lambda h, scale, shift: h * (1 + scale) + shift * scale),
        "two numbers": conditioned(lambda h, scale, shift: h * (1 + scale) + shift * (2 + scale) - 2 * shift)},
        samples=60),
    "convolution and batch norm": Function({"a": of(C, 2, 4, 3), "n": of(nn.BatchNorm2d, 4), "b": of(C, 4, 3, 3)},
        images(2, 6), 12, NORMED, samples=20),
    "gain per head": Function(AROUND | {"g": parameter(2, 1)}, steps(8), 8,
        {"product": by_heads(lambda s, h: rms(h) * s.g),
        "einsum": by_heads(lambda s, h: torch.einsum("bthd,hx->bthd", rms(h), s.g))}),
    "gains per head": Function(AROUND | {"g": parameter(2, 3)}, steps(8), 12,
        {"product": by_heads(lambda s, h: rms(h) * s.g)}),
    "gains that heads share": Function(AROUND | {"g": parameter(3)}, steps(8), 9,
        {"product": by_heads(lambda s, h: rms(h) * s.g), "chunks": norm_of_chunks,
        }),
    "positions and tied head": Function(POSITIONS | {"n": of(nn.LayerNorm, 5)}, tokens, 3,
        {"matmul": lambda s, i: s.n(s.e(i) + s.p[: i.shape[1]]) @ s.e.weight.T,
        "linear": lambda s, i: F.linear(s.n(s.e(i) + s.p[: i.shape[1]]), s.e.weight)}, samples=200),
    "queries of another sequence": Function({"m": of(nn.MultiheadAttention, 6, 2, batch_first=True)}, two_sequences, 48,
        {"fused": lambda s, x, y: s.m(x, y, y, need_weights=False)[0], "weights": lambda s, x, y: s.m(x, y, y)[0]}),
    "attention, slopes in a window": Function(
        HEADS, steps(6), 24,
        {
            "added": scores(lambda s, q, k: logits(q, k) + SLOPED),
            "least number": scores(
                lambda s, q, k: logits(q, k) + SLOPES + (~WINDOW).double() * torch.finfo(torch.float64).min
            ),
        },
    ),
    "attention, mask as input": Function(HEADS, with_a_mask, 24,
        {"added": biased(lambda z, mask: (z + mask).softmax(-1)),
        "products": biased(lambda z, mask: ratio(z.softmax(-1) * mask.exp())),
        }),
    "attention, learned biases": Function(
        HEADS | {"t": parameter(2, 5)}, steps(6), 26,
        {"added": scores(lambda s, q, k: logits(q, k) + relative(s)), "index_select": scores(lambda s, q, k: logits(q,
            k) + s.t.index_select(1, (PLACES + 2).flatten()).view(2, 3, 3)),
            },
    ),
    "attention, grouped queries": Function({"q": of(L, 6, 8), "k": of(L, 6, 4), "v": of(L, 6, 4), "o": of(L, 8, 6)},
        steps(6), 24, each(REPEATED, grouped) | {
        "head by head": grouped_head_by_head,
        }),
    "keys without biases behind a norm": Function({"n": of(nn.LayerNorm, 6),
        "o": of(L, 3, 7)} | {name: of(L, 6, 3, bias=False) for name in "qkv"}, steps(6), 36,
        {"softmax": attention_without_biases}),
    "embedding into a GRU": Function(RECURRENT | {"r": of(nn.GRU, 4, 3, batch_first=True)}, tokens, 26,
        {"gru": lambda s, i: s.h(s.r(s.e(i))[0])}),
    "pixel shuffle": Function({"a": of(C, 3, 8, 1), "b": of(C, 2, 3, 1)}, images(3, 4), 6, each(SHUFFLES, between),
        samples=10),
    "pixel unshuffle": Function({"a": of(C, 3, 2, 1), "b": of(C, 8, 3, 1)}, images(3, 4), 6, each(UNSHUFFLES, between),
        samples=20),
    "decoder": Function(DECODER, vectors, 4, decoder(lambda h: h), samples=30),
    "neighbours": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, edges, 16, each(GATHERED, neighbours), samples=40),
    "mean of neighbours": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, edges, 20, each(GATHERED, mean_of_neighbours),
        samples=40),
    "bottleneck with a batch norm": Function({"a": of(L, 8, 4, bias=False), "n": of(nn.BatchNorm1d, 4),
        "b": of(L, 4, 6)}, steps(8), 24, {"batch_norm": lambda s, x: s.b(s.n(s.a(x).mT).mT),
        "flat": lambda s, x: s.b(s.n(s.a(x).flatten(0, 1)).unflatten(0, x.shape[:2]))}),
    "cosine attention": Function(WIDE_HEADS | {"t": parameter(2, 1, 1)}, steps(10), 56,
        each(COSINES, lambda how: scores(lambda s, q, k: how(q, k) * s.t)), samples=60),
    "temperature per head": Function(HEADS | {"t": parameter(2, 1, 1)}, steps(6), 26,
        {"behind": scores(lambda s, q, k: q @ k.mT * s.t),
        }),
    "shared queries and keys": Function({name: HEADS[name] for name in "qvo"}, steps(6), 14,
        {"softmax": shared_queries, }),
    "weighted mean": Function({"q": of(L, 8, 1), "v": of(L, 8, 4), "o": of(L, 4, 6)}, steps(8), 21, each(MEANS, read)),
    "masked mean": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, kept, 20, each(MASKED, masked)),
    "logits to a constant": Function({"a": of(L, 8, 4), "b": of(L, 4, 5)}, steps(8), 5,
        each(LOGITS, lambda how: lambda s, x: how(s.b(torch.tanh(s.a(x)))))),
    "bag of embeddings": Function({"e": of(nn.Embedding, 9, 4), "b": of(L, 4, 6)}, tokens, 20,
        each(BAGS, lambda how: lambda s, i: s.b(how(i, s.e.weight))), samples=100),
    "bilinear": Function({"a": of(L, 8, 4), "c": of(L, 8, 4), "m": of(nn.Bilinear, 4, 4, 5)}, two_equal_sequences, 32,
        each(BILINEAR, lambda how: lambda s, x, y: how(s.a(x), s.c(y), s.m.weight, s.m.bias)), samples=60),
    "bilinear, rectified": Function(
        {"a": of(L, 8, 4), "c": of(L, 8, 4), "m": of(nn.Bilinear, 4, 4, 6), "b": of(L, 6, 5)}, two_equal_sequences, 38,
        each(BILINEAR, lambda how: lambda s, x, y: s.b(how(s.a(x), s.c(y), s.m.weight, s.m.bias).relu())), samples=80),
    "product of three": Function({"u": parameter(8, 4), "v": parameter(4, 6)}, steps(8), 16, THREE),
    "layer norm into a layer without bias": Function({"a": of(L, 8, 6), "n": of(nn.LayerNorm, 6),
        "b": of(L, 6, 7, bias=False)}, steps(8), 31,
        {"linear": lambda s, x: s.b(s.n(s.a(x))), "matmul": lambda s, x: s.n(s.a(x)) @ s.b.weight.T}),
}  # fmt: skip
