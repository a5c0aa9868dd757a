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
    "one plus": lambda h, w: rms(h) * (1 + w),
    "plus one": lambda h, w: (w + 1.0) * rms(h),
    "sum": lambda h, w: rms(h) + rms(h) * w,
    "argument": lambda h, w: F.rms_norm(h, (6,), 1 + w, 1e-5),
    "addcmul": lambda h, w: torch.addcmul(rms(h), rms(h), w),
    "ones": lambda h, w: rms(h) * (torch.ones_like(w) + w),
    "minus": lambda h, w: rms(h) * -(-1 - w),
    "by hand": lambda h, w: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * (1.0 + w.to(h.dtype)),
}


def block_of_gains(after: bool) -> Spelled:
    """Return a stream with gains of 1 + w in front of layers, and behind them, too."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.i(x)
        y = s.v(torch.tanh(s.u(rms(x) * (1 + s.w1))))
        x = x + (rms(y) * (1 + s.w2) if after else y)
        return s.h(rms(x) * (1 + s.w3))

    return forward


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
    "slices": adapted(lambda h, e: h * (1.0 + e[:, None, :6]) + e[:, None, 6:]),
    "unflatten": adapted(lambda h, e: (h * (e.unflatten(-1, (2, 6))[:, None, 0] + 1)) + e[:, None, 6:]),
    "minus": adapted(lambda h, e: e[:, None, 6:] - h * -(torch.ones_like(e[:, None, :6]) + e[:, None, :6])),
    "einsum": adapted(lambda h, e: torch.einsum("btd,bd->btd", h, 1 + e[:, :6]) + e[:, None, 6:]),
    "shift first": adapted(lambda h, e: torch.addcmul(h + e[:, None, 6:], h, e[:, None, :6])),
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
    "batch_norm": lambda s, x: s.b(torch.relu(s.n(s.a(x)))),
    "gain and bias": normed(lambda s, x, g, b: s.a(x) * g.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)),
    "channels last": normed(lambda s, x, g, b: (s.a(x).permute(0, 2, 3, 1) * g + b).permute(0, 3, 1, 2)),
    "folded": normed(lambda s, x, g, b: F.conv2d(x, s.a.weight * g[:, None, None, None], s.a.bias * g + b)),
    "depthwise": lambda s, x: s.b(torch.relu(F.conv2d(
        (s.a(x) - channel(s.n.running_mean)) * channel((s.n.running_var + s.n.eps).rsqrt()),
        s.n.weight[:, None, None, None], s.n.bias, groups=4,
    ))),
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
    "norm": lambda q, k: unit(q) @ unit(k).mT,
    "squares": lambda q, k: (q * q.square().sum(-1, True).rsqrt()) @ (k * k.square().sum(-1, True).rsqrt()).mT,
    "divided later": lambda q, k: q @ k.mT / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]),
    "cosine_similarity": lambda q, k: F.cosine_similarity(q[..., None, :], k[..., None, :, :], -1, 1e-12),
}


def shared_queries(s: Any, x: Tensor) -> Tensor:
    q, v = heads_of(s.q(x)), heads_of(s.v(x))
    return s.o(joined((q @ q.mT).softmax(-1) @ v))


def shared_queries_fused(s: Any, x: Tensor) -> Tensor:
    q, v = heads_of(s.q(x)), heads_of(s.v(x))
    return s.o(joined(F.scaled_dot_product_attention(q, q, v, scale=1.0)))


def beit(s: Any, x: Tensor) -> Tensor:
    bias = torch.cat([s.bq, torch.zeros_like(s.bq), s.bv])
    q, k, v = F.linear(x, s.w.weight, bias).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return s.o(joined((q @ k.mT).softmax(-1) @ v))


def pool_of_clip(s: Any, x: Tensor) -> Tensor:
    x = torch.cat([x.mean(1, keepdim=True), x], 1) + s.p
    x = x.transpose(0, 1)
    read, _ = F.multi_head_attention_forward(
        x[:1], x, x, 6, 2, None, torch.cat([s.q.bias, s.k.bias, s.v.bias]), None, None, False, 0.0, s.o.weight,
        s.o.bias, use_separate_proj_weight=True, q_proj_weight=s.q.weight, k_proj_weight=s.k.weight,
        v_proj_weight=s.v.weight, need_weights=False,
    )  # fmt: skip
    return read[0]


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


def fused_with(mask: Callable[..., Tensor]) -> Spelled:
    return lambda s, x, *more: s.o(joined(F.scaled_dot_product_attention(*qkv(s, x), attn_mask=mask(s, *more))))


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


def grouped_fused(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x).unflatten(-1, (4, -1)).transpose(1, 2), heads_of(s.k(x)), heads_of(s.v(x))
    return s.o(joined(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))


def grouped_head_by_head(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x).chunk(4, -1), s.k(x).chunk(2, -1), s.v(x).chunk(2, -1)
    return s.o(torch.cat([logits(q[h], k[h // 2]).softmax(-1) @ v[h // 2] for h in range(4)], -1))


def grouped_behind_positions(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x).unflatten(-1, (2, 2, -1)), s.k(x).unflatten(-1, (2, -1)), s.v(x).unflatten(-1, (2, -1))
    weights = (torch.einsum("bqghe,bkge->bgqhk", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    return s.o(torch.einsum("bgqhk,bkge->bqghe", weights, v).flatten(2))


def heads_of_two_kinds(s: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x).chunk(2, -1) for layer in (s.q, s.k, s.v))
    return s.o(torch.cat([(q[0] @ k[0].mT).softmax(-1) @ v[0], (q[1] @ k[1].mT).sigmoid() @ v[1]], -1))


def grouped_by_einsum(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x).unflatten(-1, (2, 2, -1)), s.k(x).unflatten(-1, (2, -1)), s.v(x).unflatten(-1, (2, -1))
    weights = (torch.einsum("bqghe,bkge->bghqk", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    return s.o(torch.einsum("bghqk,bkge->bqghe", weights, v).flatten(2))


def grouped_view(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.q(x).unflatten(-1, (2, 2, -1)).permute(0, 2, 3, 1, 4), heads_of(s.k(x)), heads_of(s.v(x))
    y = logits(q, k[:, :, None]).softmax(-1) @ v[:, :, None]
    return s.o(y.permute(0, 3, 1, 2, 4).flatten(2))


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_interleave": lambda k: k.repeat_interleave(2, 1),
    "expand": lambda k: k[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "stack": lambda k: torch.stack([k, k], 2).flatten(1, 2),
    "index": lambda k: k[:, [0, 0, 1, 1]],
    "index of halves": lambda k: k[:, torch.arange(4) // 2],
    "gather": lambda k: k.gather(1, (torch.arange(4) // 2)[None, :, None, None].expand(len(k), -1, *k.shape[2:])),
}


# ---- one axis of units that becomes channels times space


def shuffled(h: Tensor) -> Tensor:
    b, c, y, x = h.shape
    return h.view(b, c // 4, 2, 2, y, x).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * y, 2 * x)


def unshuffled(h: Tensor) -> Tensor:
    b, c, y, x = h.shape
    return h.view(b, c, y // 2, 2, x // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, y // 2, x // 2)


SHUFFLES: dict[str, Callable[[Tensor], Tensor]] = {"pixel_shuffle": lambda h: F.pixel_shuffle(h, 2), "view": shuffled}
UNSHUFFLES: dict[str, Callable[[Tensor], Tensor]] = {
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h, 2),
    "view": unshuffled,
    "unfold": lambda h: F.unfold(h, 2, stride=2).unflatten(-1, (h.shape[2] // 2, -1)),
    "slices": lambda h: torch.stack([h[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 2).flatten(1, 2),
}


def between(move: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(move(s.a(x)))


def decoder(middle: Callable[[Tensor], Tensor]) -> dict[str, Spelled]:
    return {
        "view": lambda s, x: s.b(middle(s.a(x).view(-1, 2, 3, 3))),
        "unflatten": lambda s, x: s.b(middle(s.a(x)).unflatten(1, (2, 3, 3))),
        "reshape": lambda s, x: s.b(middle(s.a(x).reshape(len(x), 2, -1)).unflatten(-1, (3, 3))),
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
    "index_add": lambda h, i, j: zeros(h).index_add(0, j, h[i]),
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
    "einsum": lambda w, v: torch.einsum("bt,btd->bd", w, v),
    "matmul": lambda w, v: (w[:, None] @ v)[:, 0],
    "bmm": lambda w, v: torch.bmm(v.mT, w[..., None])[..., 0],
    "halves": lambda w, v: (w[:, :1, None] * v[:, :1]).sum(1) + torch.einsum("bt,btd->bd", w[:, 1:], v[:, 1:]),
    "steps": lambda w, v: sum(w[:, t, None] * v[:, t] for t in range(3)),
}


def masked(mean: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x, keep: s.b(mean(keep.to(x), s.a(x)))


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum over count": lambda m, h: (m[..., None] * h).sum(1) / m.sum(1, keepdim=True),
    "weights": lambda m, h: (ratio(m)[..., None] * h).sum(1),
    "einsum": lambda m, h: torch.einsum("bt,btd->bd", m, h) / m.sum(1)[:, None],
    "where": lambda m, h: torch.where(m[..., None] > 0, h, 0.0).sum(1) / m.sum(1)[:, None],
    "columns": lambda m, h: (h.mT @ m[..., None])[..., 0] * m.sum(1, keepdim=True).reciprocal(),
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
    "split": lambda flat: [part.unflatten(0, size) for part,
        size in zip(flat.split([math.prod(size) for size in SIZES]), SIZES, strict=True)],
    "narrow": lambda flat: [flat.narrow(0, sum(math.prod(size) for size in SIZES[:i]),
        math.prod(SIZES[i])).reshape(SIZES[i]) for i in range(len(SIZES))],
}  # fmt: skip


def of_one_parameter(cut: Callable[[Tensor], list[Tensor]]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        a, a_bias, m, m_bias, b, b_bias = cut(s.flat)
        return F.linear(torch.tanh(F.linear(F.linear(x, a, a_bias), m, m_bias)), b, b_bias)

    return forward


LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda z: z.log_softmax(-1),
    "logsumexp": lambda z: z - z.logsumexp(-1, keepdim=True),
    "log of softmax": lambda z: z.softmax(-1).log(),
    "by hand": lambda z: z - z.exp().sum(-1, keepdim=True).log(),
    "stable": lambda z: z - z.amax(-1, True) - (z - z.amax(-1, True)).exp().sum(-1, True).log(),
}


BAGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding_bag": lambda i, e: F.embedding_bag(i, e, mode="mean"),
    "embedding": lambda i, e: F.embedding(i, e).mean(1),
    "sum": lambda i, e: F.embedding_bag(i, e, mode="sum") / 3,
    "counts": lambda i, e: F.one_hot(i, 9).sum(1).to(e) @ e / 3,
    "mean of indicators": lambda i, e: F.one_hot(i, 9).to(e).mean(1) @ e,
    "steps": lambda i, e: (e[i[:, 0]] + e[i[:, 1]] + e[i[:, 2]]) / 3,
}


BILINEAR: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "bilinear": F.bilinear,
    "einsum": lambda x, y, w, b: torch.einsum("bti,oij,btj->bto", x, w, y) + b,
    "matmul": lambda x, y, w, b: ((x[..., None, None, :] @ w)[..., 0, :] @ y[..., None])[..., 0] + b,
    "outer by einsum": lambda x, y, w, b: torch.einsum("bti,btj->btij", x, y).flatten(-2) @ w.flatten(1).T + b,
    "outer": lambda x, y, w, b: (x[..., :, None] * y[..., None, :]).flatten(-2) @ w.flatten(1).T + b,
}


def two_equal_sequences(samples: int) -> tuple[Tensor, ...]:
    return (*steps(8)(samples), *steps(8)(samples))


THREE: dict[str, Spelled] = {
    "einsum": lambda s, x: torch.einsum("bti,ir,ro->bto", x, s.u, s.v),
    "two einsums": lambda s, x: torch.einsum("btr,ro->bto", torch.einsum("bti,ir->btr", x, s.u), s.v),
    "matmul": lambda s, x: x @ s.u @ s.v,
    "product of weights": lambda s, x: x @ (s.u @ s.v),
    "chain": lambda s, x: torch.linalg.multi_dot([x.flatten(0, 1), s.u, s.v]).unflatten(0, x.shape[:2]),
}


# ---- functions


AROUND = {"a": of(L, 8, 6), "b": of(L, 6, 7)}
POSITIONS = {"e": of(nn.Embedding, 9, 5), "p": parameter(3, 5)}
RECURRENT = {"e": of(nn.Embedding, 9, 4), "h": of(L, 3, 5)}
FURTHER: dict[str, Function] = {
    "gains of 1 + w": Function(AROUND | {"w": parameter(6)}, steps(8), 21,
        each(GAIN, lambda how: lambda s, x: s.b(how(s.a(x), s.w)))),
    "gains of 1 + w of a layer norm": Function(AROUND | {"w": parameter(6), "c": parameter(6)}, steps(8), 38,
        {"one plus": lambda s, x: s.b(F.layer_norm(s.a(x), (6,)) * (1 + s.w) + s.c),
        "argument": lambda s, x: s.b(F.layer_norm(s.a(x), (6,), s.w + 1, s.c))}),
    "gains of 1 + w in front of layers": Function(STREAM, steps(7), 20, {"before": block_of_gains(False)}),
    "gains of 1 + w around layers": Function(STREAM | {"w2": parameter(5)}, steps(7), 10,
        {"around": block_of_gains(True)}),
    "conditioned norm": Function(AROUND | {"m": of(L, 4, 12)}, with_conditions, 21,
        {"one plus": conditioned(lambda h, scale, shift: h * (1 + scale) + shift),
        "sum": conditioned(lambda h, scale, shift: h + h * scale + shift),
        "addcmul": conditioned(lambda h, scale, shift: torch.addcmul(shift, h, 1 + scale))} | ADAPTED, samples=60),
    # The scale is read without the 1, too, or with another number.
    "conditioned norm, scale read twice": Function(AROUND | {"m": of(L, 4, 12)}, with_conditions, 9,
        {"product": conditioned(lambda h, scale, shift: h * (1 + scale) + shift * scale),
        "two numbers": conditioned(lambda h, scale, shift: h * (1 + scale) + shift * (2 + scale) - 2 * shift)},
        samples=60),
    "convolution and batch norm": Function({"a": of(C, 2, 4, 3), "n": of(nn.BatchNorm2d, 4), "b": of(C, 4, 3, 3)},
        images(2, 6), 12, NORMED, samples=20),
    "norm per head": Function(AROUND | {"n": of(nn.LayerNorm, 3)}, steps(8), 40,
        {"layer_norm": by_heads(lambda s, h: s.n(h)),
        "by hand": by_heads(lambda s, h: standard(h) * s.n.weight + s.n.bias)}),
    "gain per head": Function(AROUND | {"g": parameter(2, 1)}, steps(8), 8,
        {"product": by_heads(lambda s, h: rms(h) * s.g),
        "einsum": by_heads(lambda s, h: torch.einsum("bthd,hx->bthd", rms(h), s.g))}),
    "gains per head": Function(AROUND | {"g": parameter(2, 3)}, steps(8), 12,
        {"product": by_heads(lambda s, h: rms(h) * s.g)}),
    "gains that heads share": Function(AROUND | {"g": parameter(3)}, steps(8), 9,
        {"product": by_heads(lambda s, h: rms(h) * s.g), "chunks": norm_of_chunks,
        "by hand": by_heads(lambda s, h: s.g * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)),
        "heads last": lambda s, x: s.b(F.rms_norm(s.a(x).unflatten(-1, (2, 3)).transpose(1, 2), (3,), s.g,
        1e-5).transpose(1, 2).flatten(-2))}),
    "gains that heads share, in front of tanh": Function(AROUND | {"g": parameter(3)}, steps(8), 0,
        {"product": by_heads(lambda s, h: torch.tanh(rms(h) * s.g))}),
    "heads of two kinds": Function(HEADS, steps(6), 20, {"by hand": heads_of_two_kinds}),
    "positions": Function(POSITIONS | {"b": of(L, 5, 6)}, tokens, 35,
        {"slice": lambda s, i: s.b(s.e(i) + s.p[: i.shape[1]]),
        "lookup": lambda s, i: s.b(s.e(i) + F.embedding(torch.arange(i.shape[1]), s.p))}, samples=200),
    "positions and tied head": Function(POSITIONS | {"n": of(nn.LayerNorm, 5)}, tokens, 3,
        {"matmul": lambda s, i: s.n(s.e(i) + s.p[: i.shape[1]]) @ s.e.weight.T,
        "linear": lambda s, i: F.linear(s.n(s.e(i) + s.p[: i.shape[1]]), s.e.weight)}, samples=200),
    "biases joined by cat": Function({"w": of(L, 6, 12, bias=False), "bq": parameter(4), "bv": parameter(4),
        "o": of(L, 4, 6)}, steps(6), 20, {"beit": beit}),
    "pool of CLIP": Function({"q": of(L, 6, 6), "k": of(L, 6, 6), "v": of(L, 6, 6), "o": of(L, 6, 5),
        "p": parameter(4, 6)}, steps(6), 54, {"multi_head_attention_forward": pool_of_clip}, samples=100),
    "queries of another sequence": Function({"m": of(nn.MultiheadAttention, 6, 2, batch_first=True)}, two_sequences, 48,
        {"fused": lambda s, x, y: s.m(x, y, y, need_weights=False)[0], "weights": lambda s, x, y: s.m(x, y, y)[0]}),
    "attention, slopes in a window": Function(
        HEADS, steps(6), 24,
        {
            "added": scores(lambda s, q, k: logits(q, k) + SLOPED),
            "slopes, then window": scores(lambda s, q, k: (logits(q, k) + SLOPES).masked_fill(~WINDOW, -math.inf)),
            "where": scores(lambda s, q, k: torch.where(WINDOW, logits(q, k) + SLOPES, -math.inf)),
            "least number": scores(
                lambda s, q, k: logits(q, k) + SLOPES + (~WINDOW).double() * torch.finfo(torch.float64).min
            ),
            "einsum": scores(lambda s, q, k: torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(2) + SLOPED),
            "fused": fused_with(lambda s: SLOPED),
        },
    ),
    "attention, mask as input": Function(HEADS, with_a_mask, 24,
        {"added": biased(lambda z, mask: (z + mask).softmax(-1)),
        "products": biased(lambda z, mask: ratio(z.softmax(-1) * mask.exp())),
        "exp over sum": biased(lambda z, mask: ratio((z + mask).exp())),
        "exp times exp": biased(lambda z, mask: ratio(z.exp() * mask.exp())),
        "log_softmax": biased(lambda z, mask: (mask + z).log_softmax(-1).exp()),
        "fused": fused_with(lambda s, mask: mask)}),
    "attention, learned biases": Function(
        HEADS | {"t": parameter(2, 5)}, steps(6), 26,
        {"added": scores(lambda s, q, k: logits(q, k) + relative(s)), "index_select": scores(lambda s, q, k: logits(q,
            k) + s.t.index_select(1, (PLACES + 2).flatten()).view(2, 3, 3)),
            "embedding": scores(lambda s, q, k: F.embedding(PLACES + 2, s.t.T).permute(2, 0, 1) + logits(q, k)),
            "unfold": scores(lambda s, q, k: logits(q, k) + s.t.flip(1).unfold(1, 3, 1).flip(1)),
            "fused": fused_with(relative)},
    ),
    "attention, grouped queries": Function({"q": of(L, 6, 8), "k": of(L, 6, 4), "v": of(L, 6, 4), "o": of(L, 8, 6)},
        steps(6), 24, each(REPEATED, grouped) | {"einsum": grouped_by_einsum, "view": grouped_view,
        "fused": grouped_fused, "head by head": grouped_head_by_head,
        "einsum, positions first": grouped_behind_positions}),
    "keys without biases behind a norm": Function({"n": of(nn.LayerNorm, 6),
        "o": of(L, 3, 7)} | {name: of(L, 6, 3, bias=False) for name in "qkv"}, steps(6), 36,
        {"softmax": attention_without_biases}),
    "embedding into an LSTM": Function(RECURRENT | {"r": of(nn.LSTM, 4, 3, batch_first=True)}, tokens, 32,
        {"lstm": lambda s, i: s.h(s.r(s.e(i))[0])}),
    "embedding into a GRU": Function(RECURRENT | {"r": of(nn.GRU, 4, 3, batch_first=True)}, tokens, 26,
        {"gru": lambda s, i: s.h(s.r(s.e(i))[0])}),
    "pixel shuffle": Function({"a": of(C, 3, 8, 1), "b": of(C, 2, 3, 1)}, images(3, 4), 6, each(SHUFFLES, between),
        samples=10),
    "pixel unshuffle": Function({"a": of(C, 3, 2, 1), "b": of(C, 8, 3, 1)}, images(3, 4), 6, each(UNSHUFFLES, between),
        samples=20),
    "decoder": Function(DECODER, vectors, 4, decoder(lambda h: h), samples=30),
    "decoder with leaky relu": Function(DECODER, vectors, 2, decoder(F.leaky_relu), samples=100),
    "neighbours": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, edges, 16, each(GATHERED, neighbours), samples=40),
    "mean of neighbours": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, edges, 20, each(GATHERED, mean_of_neighbours),
        samples=40),
    "bottleneck with a batch norm": Function({"a": of(L, 8, 4, bias=False), "n": of(nn.BatchNorm1d, 4),
        "b": of(L, 4, 6)}, steps(8), 24, {"batch_norm": lambda s, x: s.b(s.n(s.a(x).mT).mT),
        "flat": lambda s, x: s.b(s.n(s.a(x).flatten(0, 1)).unflatten(0, x.shape[:2]))}),
    "cosine attention": Function(WIDE_HEADS | {"t": parameter(2, 1, 1)}, steps(10), 56,
        each(COSINES, lambda how: scores(lambda s, q, k: how(q, k) * s.t)), samples=60),
    "temperature per head": Function(HEADS | {"t": parameter(2, 1, 1)}, steps(6), 26,
        {"behind": scores(lambda s, q, k: q @ k.mT * s.t), "queries": scores(lambda s, q, k: (q * s.t) @ k.mT),
        "quotient": scores(lambda s, q, k: q @ (s.t * k).mT)}),
    "shared queries and keys": Function({name: HEADS[name] for name in "qvo"}, steps(6), 14,
        {"softmax": shared_queries, "fused": shared_queries_fused}),
    "weighted mean": Function({"q": of(L, 8, 1), "v": of(L, 8, 4), "o": of(L, 4, 6)}, steps(8), 21, each(MEANS, read)),
    "masked mean": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, kept, 20, each(MASKED, masked)),
    "one flat parameter": Function({"flat": parameter(sum(math.prod(size) for size in SIZES))}, steps(8), 20,
        each(CUTS, of_one_parameter)),
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
    "three linear layers": Function({"a": of(L, 8, 5), "m": of(L, 5, 5, bias=False), "b": of(L, 5, 7)}, steps(8), 55,
        {"linear": lambda s, x: s.b(s.m(s.a(x))), "matmul": lambda s, x: s.b(s.a(x) @ s.m.weight.T)}),
    "layer norm into a layer without bias": Function({"a": of(L, 8, 6), "n": of(nn.LayerNorm, 6),
        "b": of(L, 6, 7, bias=False)}, steps(8), 31,
        {"linear": lambda s, x: s.b(s.n(s.a(x))), "matmul": lambda s, x: s.n(s.a(x)) @ s.b.weight.T}),
}  # fmt: skip
