"""Functions as others wrote them, each in a few spellings; see ``spelling_cases.py``."""

import math
from collections.abc import Callable
from typing import Any

import torch
from further_spelling_cases import images, unit
from helpers import of, parameter
from spelling_cases import Function, Spelled, each, steps
from torch import Tensor, nn
from torch.nn import functional as F

L, C = nn.Linear, nn.Conv2d


def between(middle: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(middle(s.a(x)))


# ---- extrema


MAXOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.unflatten(-1, (3, 2)).amax(-1),
    "max": lambda h: h.view(*h.shape[:2], 3, 2).max(-1).values,
    "maximum": lambda h: torch.maximum(h[..., ::2], h[..., 1::2]),
    "max of two": lambda h: torch.max(*h.unflatten(-1, (3, 2)).unbind(-1)),
    "where": lambda h: torch.where(h[..., ::2] > h[..., 1::2], h[..., ::2], h[..., 1::2]),
    "max_pool1d": lambda h: F.max_pool1d(h, 2),
    "stack": lambda h: torch.stack([h[..., ::2], h[..., 1::2]]).amax(0),
    "minus the least": lambda h: -torch.min(-h[..., ::2], -h[..., 1::2]),
}
LARGEST: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(1),
    "max": lambda h: h.max(dim=1)[0],
    "adaptive": lambda h: F.adaptive_max_pool1d(h.mT, 1)[..., 0],
    "max_pool1d": lambda h: F.max_pool1d(h.mT, h.shape[1])[..., 0],
    "maximum": lambda h: torch.maximum(torch.maximum(h[:, 0], h[:, 1]), h[:, 2]),
    "topk": lambda h: h.topk(1, 1).values[:, 0],
    "aminmax": lambda h: torch.aminmax(h, dim=1).max,
}
POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda h: F.max_pool2d(h, 2),
    "with places": lambda h: F.max_pool2d(h, 2, return_indices=True)[0],
    "adaptive": lambda h: F.adaptive_max_pool2d(h, 2),
    "amax": lambda h: h.unflatten(2, (2, 2)).unflatten(4, (2, 2)).amax((3, 5)),
    "windows": lambda h: h.unfold(2, 2, 2).unfold(3, 2, 2).max(-1).values.max(-1).values,
}
EXPONENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda h: h.logsumexp(1),
    "log of sum": lambda h: h.exp().sum(1).log(),
    "log of mean": lambda h: h.exp().mean(1).log() + math.log(3),
    "stable": lambda h: (h - h.amax(1, True)).exp().sum(1).log() + h.amax(1),
}


# ---- norms


def of_channels(norm: Callable[..., Tensor]) -> Spelled:
    return lambda s, x: s.b(norm(s.a(x), s.n.weight, s.n.bias, s.n.eps))


def first(t: Tensor) -> Tensor:
    return t[:, None, None]


def by_mean_of_squares(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    c = h - h.mean(1, keepdim=True)
    return first(g) * (c / torch.sqrt(c.pow(2).mean(1, keepdim=True) + e)) + first(b)


OF_CHANNELS: dict[str, Callable[..., Tensor]] = {
    "channels last": lambda h, g, b, e: F.layer_norm(h.permute(0, 2, 3, 1), (4,), g, b, e).permute(0, 3, 1, 2),
    "by hand": by_mean_of_squares,
    "places in a row": lambda h, g, b, e: F.layer_norm(h.flatten(2).mT, (4,), g, b, e).mT.view_as(h),
    "rows of all samples": lambda h, g, b, e: F.layer_norm(h.movedim(1, -1), (4,), g, b, e).movedim(-1, 1).reshape(-1,
        h.shape[-1]).reshape(h.shape),
    "rms of centred": lambda h, g, b, e: (F.rms_norm((h - h.mean(1, True)).movedim(1, -1), (4,), g, e).movedim(-1,
        1) + first(b)),
}  # fmt: skip


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda v, g: g * v / v.norm(dim=1, keepdim=True),
    "normalize": lambda v, g: g * F.normalize(v, dim=1),
    "_weight_norm": lambda v, g: torch._weight_norm(v, g, 0),
    "norm_except_dim": lambda v, g: v * (g / torch.norm_except_dim(v, 2, 0)),
    "linalg": lambda v, g: v * (g / torch.linalg.norm(v, dim=1, keepdim=True)),
}
UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg": lambda h: h / torch.linalg.norm(h, dim=-1, keepdim=True),
    "einsum": lambda h: h / torch.einsum("btd,btd->bt", h, h).sqrt()[..., None],
    "clamp": lambda h: h / h.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-12),
}


# ---- attention with one matrix for queries, keys and values


AHEAD = torch.ones(3, 3, dtype=torch.bool).triu(1)


def queries(s: Any, x: Tensor) -> list[Tensor]:
    return [part.view(*x.shape[:2], 2, 2).transpose(1, 2) for part in s.w(x).split(4, dim=2)]


def attention(weigh: Callable[[Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = queries(s, x)
        y = weigh(q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))) @ v
        return s.o(y.transpose(1, 2).contiguous().view(*x.shape[:2], -1))

    return forward


def summed_over_heads(s: Any, x: Tensor) -> Tensor:
    q, k, v = queries(s, x)
    weights = (q @ k.mT / math.sqrt(2)).masked_fill(AHEAD, -math.inf).softmax(-1)
    return torch.einsum("bhtd,ohd->bto", weights @ v, s.o.weight.view(6, 2, 2)) + s.o.bias


def heads_in_weights(s: Any, x: Tensor) -> Tensor:
    q, k, v = torch.einsum("btc,zhdc->zbthd", x, s.w.weight.view(3, 2, 2, 6)) + s.w.bias.view(3, 1, 1, 2, 2)
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 2**-0.5).masked_fill(AHEAD, -math.inf).softmax(-1)
    return s.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1))


def step_by_step(s: Any, x: Tensor) -> Tensor:
    q, k, v = queries(s, x)
    read = [
        (q[:, :, t : t + 1] @ k[:, :, : t + 1].mT / math.sqrt(2)).softmax(-1) @ v[:, :, : t + 1]
        for t in range(x.shape[1])
    ]
    return s.o(torch.cat(read, 2).transpose(1, 2).flatten(2))


ATTENTION: dict[str, Spelled] = {
    "masked_fill": attention(lambda a: a.masked_fill(AHEAD, -math.inf).softmax(-1)),
    "gpt2": attention(lambda a: (a * (~AHEAD).double() + -1e10 * AHEAD).softmax(-1)),
    "zeros behind": attention(lambda a: a.masked_fill(AHEAD, -math.inf).softmax(-1).masked_fill(AHEAD, 0.0)),
    "nan_to_num": attention(lambda a: a.masked_fill(AHEAD, -math.inf).softmax(-1).nan_to_num(0.0)),
    "log": attention(lambda a: (a + (~AHEAD).double().log()).softmax(-1)),
    "normalize": attention(lambda a: F.normalize(a.masked_fill(AHEAD, -math.inf).exp(), p=1, dim=-1)),
    "summed over heads": summed_over_heads,
    "heads in weights": heads_in_weights,
    "step by step": step_by_step,
}


def with_a_mask_of_each_head(samples: int) -> tuple[Tensor, ...]:
    return (*steps(6)(samples), torch.randn(samples, 2, 3, 3, dtype=torch.float64))


def masked(s: Any, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = queries(s, x)
    return s.o((((q @ k.mT / math.sqrt(2)) + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


def masked_fused(s: Any, x: Tensor, mask: Tensor) -> Tensor:
    return s.o(F.scaled_dot_product_attention(*queries(s, x), attn_mask=mask).transpose(1, 2).flatten(2))


# ---- experts, prototypes, recurrent layers by hand


def experts(mix: Callable[[Any, Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: mix(s, x, s.g(x).softmax(-1))


def expert(s: Any, x: Tensor, e: int) -> Tensor:
    return torch.tanh(x @ s.w[e] + s.c[e]) @ s.v[e]


EXPERTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "einsum": lambda s, x, g: torch.einsum("bte,bteo->bto", g,
        torch.einsum("bteu,euo->bteo", torch.tanh(torch.einsum("bti,eiu->bteu", x, s.w) + s.c), s.v)),
    "loop": lambda s, x, g: sum(g[..., e, None] * expert(s, x, e) for e in range(3)),
    "stack": lambda s, x, g: (torch.stack([expert(s, x, e) for e in range(3)], -2) * g[..., None]).sum(-2),
    "stack, last axis": lambda s, x, g: (torch.stack([expert(s, x, e) for e in range(3)], -1) @ g[..., None])[..., 0],
    "matmul": lambda s, x, g: (torch.matmul(torch.tanh(torch.matmul(x[..., None, None, :], s.w) + s.c[:, None]),
        s.v)[..., 0, :] * g[..., None]).sum(2),
}  # fmt: skip
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda h, p: (h[..., None, :] - p).square().sum(-1),
    "norm": lambda h, p: (h.unsqueeze(-2) - p).norm(dim=-1) ** 2,
    "cdist": lambda h, p: torch.cdist(h, p.expand(len(h), -1, -1)) ** 2,
    "broadcast": lambda h, p: torch.sub(*torch.broadcast_tensors(h[..., None, :], p)).pow(2).sum(-1),
    "expanded": lambda h, p: h.pow(2).sum(-1, keepdim=True) - 2 * h @ p.T + p.pow(2).sum(-1),
    "expanded, products": lambda h, p: (h * h).sum(2)[..., None] + (p * p).sum(1) - 2 * (h @ p.T),
    "expanded, einsum": lambda h, p: (
        h.square().sum(-1).unsqueeze(-1) + p.square().sum(1)[None] - torch.einsum("btd,md->btm", h, 2 * p)
    ),
    "expanded, transposed": lambda h, p: torch.baddbmm(h.pow(2).sum(-1, True) + p.T.pow(2).sum(0, True), h,
        p.T.expand(len(h), -1, -1), alpha=-2),
}  # fmt: skip


def recurrent(step: Callable[[Any, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        h, found = x.new_zeros(len(x), 4), []
        for t in range(x.shape[1]):
            h = step(s.r, x[:, t], h)
            found.append(h)
        return s.o(torch.stack(found, 1))

    return forward


STEPS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "two layers": lambda r, x, h: torch.tanh(F.linear(x, r.weight_ih_l0, r.bias_ih_l0) + F.linear(h, r.weight_hh_l0,
        r.bias_hh_l0)),
    "one layer": lambda r, x, h: torch.tanh(F.linear(torch.cat([x, h], -1),
        torch.cat([r.weight_ih_l0, r.weight_hh_l0], 1), r.bias_ih_l0 + r.bias_hh_l0)),
    "cell": lambda r, x, h: torch.rnn_tanh_cell(x, h, r.weight_ih_l0, r.weight_hh_l0, r.bias_ih_l0, r.bias_hh_l0),
}  # fmt: skip


def gated(s: Any, x: Tensor) -> Tensor:
    """An LSTM whose gates are layers of their own."""
    r, h, c, found = s.r, x.new_zeros(len(x), 3), x.new_zeros(len(x), 3), []
    for t in range(x.shape[1]):
        weights = r.weight_ih_l0, r.weight_hh_l0, r.bias_ih_l0, r.bias_hh_l0
        own = zip(*(part.chunk(4) for part in weights), strict=True)
        i, f, g, o = (
            F.linear(torch.cat([x[:, t], h], 1), torch.cat([of_x, of_h], 1), one + two) for of_x, of_h, one, two in own
        )
        c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
        h = o.sigmoid() * c.tanh()
        found.append(h)
    return s.o(torch.stack(found, 1))


# ---- sums of keys and values, sums against inputs, and what is sorted


def linear_attention(read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = queries(s, x)
        return s.o(read(F.elu(q) + 1, F.elu(k) + 1, v).transpose(1, 2).flatten(2))

    return forward


SUMMED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weights": lambda q, k, v: (q @ k.mT) @ v,
    "keys and values": lambda q, k, v: q @ (k.mT @ v),
    "einsum": lambda q, k, v: torch.einsum("bhed,bhie->bhid", torch.einsum("bhje,bhjd->bhed", k, v), q),
    "values first": lambda q, k, v: ((v.mT @ k) @ q.mT).mT,
}
SHARES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weights": lambda q, k, v: (lambda w: (w / w.sum(-1, keepdim=True)) @ v)(q @ k.mT),
    "behind": lambda q, k, v: (lambda w: (w @ v) / w.sum(-1, keepdim=True))(q @ k.mT),
    "sum of keys": lambda q, k, v: (q @ (k.mT @ v)) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True),
    "product with a sum": lambda q, k, v: (q @ (k.mT @ v)) / (q @ k.sum(2, keepdim=True).mT),
    "einsum": lambda q, k, v: torch.einsum("bhed,bhie,bhi->bhid", torch.einsum("bhje,bhjd->bhed", k, v), q,
        1 / torch.einsum("bhie,bhe->bhi", q, k.sum(2))),
}  # fmt: skip


def two_inputs(*widths: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda samples: tuple(torch.randn(samples, width, dtype=torch.float64) for width in widths)


MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda w, x: (w.unflatten(-1, (3, 5)) @ x[..., None])[..., 0],
    "einsum": lambda w, x: torch.einsum("boi,bi->bo", w.view(-1, 3, 5), x),
    "bmm": lambda w, x: torch.bmm(x[:, None], w.view(-1, 3, 5).mT)[:, 0],
}
SORTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda h: h.sort(1).values[:, 1:],
    "topk": lambda h: h.topk(2, 1).values.flip(1),
    "descending": lambda h: torch.sort(h, dim=1, descending=True)[0][:, :2].flip(1),
}
GROUPED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "groups": lambda s, x: F.conv2d(x, s.a.weight, s.a.bias, groups=2),
    "module": lambda s, x: s.a(x),
}


def short_filter(s: Any, x: Tensor) -> Tensor:
    u, v = s.i(x).chunk(2, -1)
    return s.o(u * sum(s.w[:, j] * F.pad(v, (0, 0, j, 0))[:, : x.shape[1]] for j in range(3)))


def of_difference(s: Any, x: Tensor) -> Tensor:
    one, two = ((s.q(x)[..., at] @ s.k(x)[..., at].mT).softmax(-1) for at in (slice(2), slice(2, 4)))
    return s.o((one - s.w * two) @ s.v(x))


# ---- cross-attention


CROSS = {"i": of(L, 5, 4), "j": of(L, 6, 4), "m": of(nn.MultiheadAttention, 4, 2, batch_first=True), "o": of(L, 4, 6)}


def two_sequences(samples: int) -> tuple[Tensor, ...]:
    return torch.randn(samples, 3, 5, dtype=torch.float64), torch.randn(samples, 4, 6, dtype=torch.float64)


def in_two_products(s: Any, x: Tensor, y: Tensor) -> Tensor:
    (w, u), (c, d) = (own.split([4, 8]) for own in (s.m.in_proj_weight, s.m.in_proj_bias))
    return crossed(s, s.i(x) @ w.T + c, *F.linear(s.j(y), u, d).chunk(2, -1))


def in_three_products(s: Any, x: Tensor, y: Tensor) -> Tensor:
    weights, biases = s.m.in_proj_weight.chunk(3), s.m.in_proj_bias.chunk(3)
    return crossed(s, *(F.linear(*own) for own in zip((s.i(x), s.j(y), s.j(y)), weights, biases, strict=True)))


def crossed(s: Any, *packed: Tensor) -> Tensor:
    q, k, v = (own.unflatten(-1, (2, 2)).transpose(1, 2) for own in packed)
    return s.o(s.m.out_proj(((q @ k.mT) / math.sqrt(2)).softmax(-1).matmul(v).transpose(1, 2).flatten(2)))


def by_module(s: Any, x: Tensor, y: Tensor) -> Tensor:
    memory = s.j(y)
    return s.o(s.m(s.i(x), memory, memory, need_weights=False)[0])


# ---- activations


RATIOS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "powers": lambda s, h: (s.p[0] + s.p[1] * h + s.p[2] * h**2) / (1 + (s.q[0] * h + s.q[1] * h**2).abs()),
    "Horner": lambda s, h: (
        torch.addcmul(s.p[0], torch.addcmul(s.p[1], s.p[2], h), h) / (((s.q[1] * h + s.q[0]) * h).abs() + 1)
    ),
}


# ---- scores of pairs


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda u, v: (u * v).sum(-1),
    "sum over axis 1": lambda u, v: (v * u).sum(dim=1, keepdim=True).squeeze(1),
    "mean": lambda u, v: 3 * (u * v).mean(-1),
    "einsum": lambda u, v: torch.einsum("bi,bi->b", u, v),
    "vecdot": lambda u, v: torch.linalg.vecdot(u, v),
    "bmm": lambda u, v: torch.bmm(u[:, None], v[:, :, None]).flatten(),
    "diagonal": lambda u, v: (u @ v.T).diagonal(),
}


HEAD_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda u, v: (u * v).sum(-1),
    "mean": lambda u, v: (v * u).mean(dim=2) * 3,
    "einsum": lambda u, v: torch.einsum("bhd,bhd->bh", u, v),
    "matmul": lambda u, v: (u[:, :, None] @ v[..., None]).flatten(1),
}
PLACE_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda u, v: (u * v).sum(1),
    "moved": lambda u, v: (u.movedim(1, -1) * v.movedim(1, -1)).sum(-1),
    "mean": lambda u, v: 4 * (u * v).mean(1),
    "einsum": lambda u, v: torch.einsum("bchw,bchw->bhw", u, v),
    "matmul": lambda u, v: (u.movedim(1, -1)[..., None, :] @ v.movedim(1, -1)[..., None])[..., 0, 0],
}


ROWS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "layer": lambda s, u, v: s.o(u * v),
    "gain": lambda s, u, v: (u * s.o.weight[0] * v).sum(-1, keepdim=True) + s.o.bias,
    "gain of the other": lambda s, u, v: (v * (s.o.weight * u)).sum(-1, True) + s.o.bias,
    "einsum": lambda s, u, v: torch.einsum("bi,bi,i->b", u, v, s.o.weight[0])[:, None] + s.o.bias,
    "matmul": lambda s, u, v: (u * v) @ s.o.weight.T + s.o.bias,
    "vector": lambda s, u, v: ((v * u) @ s.o.weight[0] + s.o.bias).unsqueeze(1),
    "convolution": lambda s, u, v: F.conv1d((u * v)[..., None], s.o.weight[..., None], s.o.bias)[..., 0],
}
PLACE_ROWS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "convolution": lambda s, u, v: s.o(u * v),
    "sum": lambda s, u, v: (u * v * s.o.weight[0]).sum(1, keepdim=True) + s.o.bias,
    "layer": lambda s, u, v: F.linear((v * u).movedim(1, -1), s.o.weight[..., 0, 0], s.o.bias).movedim(-1, 1),
}


MIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "transposed": lambda s, v: s.m(v.mT).mT,
    "matmul": lambda s, v: s.m.weight @ v + s.m.bias[:, None],
    "einsum": lambda s, v: torch.einsum("st,btd->bsd", s.m.weight, v) + s.m.bias[None, :, None],
    "convolution": lambda s, v: F.conv1d(v, s.m.weight[..., None], s.m.bias),
}


KERNELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "convolution": lambda s, v: s.m(v[..., None])[..., 0],
    "matmul": lambda s, v: s.m.weight[..., 0, 0] @ v + s.m.bias[:, None],
}
CROSSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "parts": lambda u, v: torch.stack([u[:, i - 2] * v[:, i - 1] - u[:, i - 1] * v[:, i - 2] for i in range(3)], 1),
    "linalg": lambda u, v: torch.linalg.cross(u, v, dim=1),
    "dim": lambda u, v: torch.cross(u, v, dim=-2),
}


def spatial_gate(mix: Callable[[Any, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        u, v = F.gelu(s.a(x)).chunk(2, -1)
        return s.o(u * mix(s, s.n(v)))

    return forward


def mixer(mix: Callable[[Any, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.o(torch.tanh(mix(s, s.n(s.a(x)))))


# ---- attention with relative positions


APART = torch.arange(3)[:, None] - torch.arange(3) + 2
OF_KEYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda q, e: torch.einsum("bhid,ijd->bhij", q, e),
    "matmul": lambda q, e: (q[..., None, :] @ e.mT)[..., 0, :],
    "batches of positions": lambda q, e: (q.permute(2, 0, 1, 3).flatten(1, 2) @ e.mT).unflatten(1, (-1, 2)).permute(
        1, 2, 0, 3),
    "sum": lambda q, e: (q[..., None, :] * e).sum(-1),
}  # fmt: skip
OF_VECTORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda q, u, k: (q + u[:, None]) @ k.mT,
    "einsum": lambda q, u, k: q @ k.mT + torch.einsum("hd,bhjd->bhj", u, k)[:, :, None],
    "matmul": lambda q, u, k: q @ k.mT + (k @ u[..., None]).mT,
    "sum": lambda q, u, k: q @ k.mT + (u[:, None] * k).sum(-1)[..., None, :],
}


def of_heads(weigh: Callable[[Any, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = queries(s, x)
        return s.o((weigh(s, q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))

    return forward


PAIR_ROWS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "layer": lambda s, u, v: s.o(u[:, :, None] * v[:, None])[..., 0],
    "gain": lambda s, u, v: (u * s.o.weight[0]) @ v.mT + s.o.bias,
    "einsum": lambda s, u, v: torch.einsum("bid,bjd,d->bij", u, v, s.o.weight[0]) + s.o.bias,
}


def two_images(samples: int) -> tuple[Tensor, ...]:
    return images(2, 5)(samples)[0], images(2, 5)(samples)[0]


def towers(score: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x, y: score(s.a(x), s.b(y))


# ---- slices added in place: reversible layers


def one(s: Any, x: Tensor) -> Tensor:
    return s.f2(torch.tanh(s.f(x)))


def other(s: Any, x: Tensor) -> Tensor:
    return s.g2(torch.tanh(s.g(x)))


def in_place(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    h[:, :4] += one(s, h[:, 4:])
    h[:, 4:] += other(s, h[:, :4])
    return s.o(h)


def chunks_in_place(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    a, b = h.chunk(2, 1)
    a += one(s, b)
    b += other(s, a)
    return s.o(torch.cat([a, b], 1))


def views_in_place(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    a, b = h[:, :4], h[:, 4:]
    a += one(s, b)
    b += other(s, a)
    return s.o(h)


def overwritten(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    h[:, :4] = h[:, :4] + one(s, h[:, 4:])
    h[:, 4:] = h[:, 4:] + other(s, h[:, :4])
    return s.o(h)


def chunks(s: Any, x: Tensor) -> Tensor:
    a, b = s.i(x).chunk(2, 1)
    a = a + one(s, b)
    return s.o(torch.cat([a, b + other(s, a)], 1))


def concatenated(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    h = torch.cat([h[:, :4] + one(s, h[:, 4:]), h[:, 4:]], 1)
    return s.o(torch.cat([h[:, :4], h[:, 4:] + other(s, h[:, :4])], 1))


def channels_in_place(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    h[:, :2] += s.f(torch.relu(x))
    return s.o(torch.relu(h)).mean((2, 3))


def channels_beside_others(s: Any, x: Tensor) -> Tensor:
    h = s.i(x)
    return s.o(torch.relu(torch.cat([h[:, :2] + s.f(torch.relu(x)), h[:, 2:]], 1))).mean((2, 3))


REVERSIBLE: dict[str, Spelled] = {
    own.__name__: own for own in (chunks, concatenated, in_place, chunks_in_place, views_in_place, overwritten)
}


# ---- functions


HEADS = {"w": of(L, 6, 12), "o": of(L, 4, 6)}
SQUEEZED = {"a": of(C, 2, 4, 3), "r": of(L, 4, 3), "e": of(L, 3, 4), "b": of(C, 4, 3, 3)}
MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean((2, 3)),
    "einsum": lambda h: torch.einsum("bchw->bc", h) / 16,
    "adaptive": lambda h: F.adaptive_avg_pool2d(h, 1).flatten(1),
}


def squeezed(mean: Callable[[Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return s.b(h * s.e(torch.tanh(s.r(mean(h)))).sigmoid()[..., None, None])

    return forward


TRIED: dict[str, Function] = {
    "maxout": Function({"a": of(L, 8, 6), "b": of(L, 3, 4)}, steps(8), 6, each(MAXOUT, between)),
    "largest step": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, steps(8), 8, each(LARGEST, between)),
    "largest places": Function({"a": of(C, 2, 3, 3), "b": of(C, 3, 4, 2)}, images(2, 6), 6, each(POOLED, between)),
    "logsumexp of steps": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, steps(8), 4, each(EXPONENTIALS, between)),
    "norm of channels into a convolution": Function({"a": of(C, 2, 4, 3), "n": of(nn.LayerNorm, 4),
        "b": of(C, 4, 3, 3)}, images(2, 6), 57, each(OF_CHANNELS, of_channels), samples=20),
    "weight norm": Function({"v": parameter(4, 8), "g": parameter(4, 1), "c": parameter(4), "b": of(L, 4, 5)}, steps(8),
        4, each(WEIGHTS, lambda made: lambda s, x: s.b(torch.tanh(F.linear(x, made(s.v, s.g), s.c))))),
    "unit vectors": Function({"a": of(L, 8, 6), "b": of(L, 6, 7)}, steps(8), 16, each(UNITS, between)),
    "attention, one matrix": Function(HEADS, steps(6), 24, ATTENTION),
    "attention, a mask of each head": Function(HEADS, with_a_mask_of_each_head, 24,
        {"added": masked, "fused": masked_fused}),
    "experts": Function({"g": of(L, 8, 3), "w": parameter(3, 8, 4), "c": parameter(3, 4), "v": parameter(3, 4, 5)},
        steps(8), 9, each(EXPERTS, experts)),
    "prototypes": Function({"a": of(L, 8, 4), "p": parameter(6, 4)}, steps(8), 10,
        each(DISTANCES, lambda far: lambda s, x: far(s.a(x), s.p))),
    "recurrent layer": Function({"r": of(nn.RNN, 6, 4, batch_first=True), "o": of(L, 4, 5)}, steps(6), 4,
        {"rnn": lambda s, x: s.o(s.r(x)[0])} | each(STEPS, recurrent), samples=60),
    "LSTM": Function({"r": of(nn.LSTM, 6, 3, batch_first=True), "o": of(L, 3, 5)}, steps(6), 12,
        {"lstm": lambda s, x: s.o(s.r(x)[0]), "gate by gate": gated}, samples=60),
    "linear attention": Function(HEADS, steps(6), 8, each(SUMMED, linear_attention)),
    "linear attention, shares": Function(HEADS, steps(6), 12, each(SHARES, linear_attention)),
    "one linear head": Function({"q": of(L, 9, 4), "k": of(L, 9, 4), "v": of(L, 9, 4), "o": of(L, 4, 5)}, steps(9), 33,
        {"weights": lambda s, x: s.o((s.q(x) @ s.k(x).mT) @ s.v(x)),
        "keys and values": lambda s, x: s.o(s.q(x) @ (s.k(x).mT @ s.v(x)))}),
    "difference of weights": Function({"q": of(L, 9, 4), "k": of(L, 9, 4), "v": of(L, 9, 4), "o": of(L, 4, 5),
        "w": parameter(1)}, steps(9), 32, {"slices": of_difference}, samples=80),
    "weights that a layer makes": Function({"g": of(L, 6, 15), "b": of(L, 3, 5)}, two_inputs(6, 5), 3,
        each(MADE, lambda made: lambda s, c, x: s.b(F.leaky_relu(made(s.g(c), x)))), samples=80),
    "sorted places": Function({"a": of(L, 8, 4), "b": of(L, 4, 6)}, steps(8), 8, each(SORTED, between)),
    "groups of an input": Function({"a": of(C, 4, 4, 3, groups=2), "b": of(C, 4, 3, 2)}, images(4, 5), 4,
        each(GROUPED, lambda first: lambda s, x: s.b(torch.relu(first(s, x))))),
    "short filter": Function({"i": of(L, 9, 6), "w": parameter(3, 3), "o": of(L, 3, 5)}, steps(9), 9,
        {"shifted copies": short_filter}),
    "cross-attention": Function(CROSS, two_sequences, 84,
        {"module": by_module, "two products": in_two_products, "three products": in_three_products}, samples=60),
    "rational activation": Function({"a": of(L, 6, 4), "p": parameter(3), "q": parameter(2), "b": of(L, 4, 7)},
        steps(6), 2, each(RATIOS, lambda ratio: lambda s, x: s.b(ratio(s, s.a(x)))), samples=80),
    "scores of two towers": Function({"a": of(L, 5, 3), "b": of(L, 4, 3)}, two_inputs(5, 4), 9, each(SCORES, towers)),
    "scores of heads": Function({"a": of(L, 7, 6), "b": of(L, 8, 6)}, two_inputs(7, 8), 18,
        each(HEAD_SCORES, lambda score: towers(lambda u, v: score(u.unflatten(-1, (2, 3)), v.unflatten(-1, (2, 3))))),
        samples=80),
    "row that reads a product": Function({"a": of(L, 5, 3), "b": of(L, 4, 3), "o": of(L, 3, 1)}, two_inputs(5, 4), 12,
        each(ROWS, lambda row: lambda s, x, y: row(s, s.a(x), s.b(y))), samples=80),
    "row that reads a product of places": Function({"a": of(C, 2, 3, 3), "b": of(C, 2, 3, 3), "o": of(C, 3, 1, 1)},
        two_images, 12, each(PLACE_ROWS, lambda row: lambda s, x, y: row(s, s.a(x), s.b(y)))),
    "row that reads the products of pairs": Function({"a": of(L, 5, 3), "b": of(L, 6, 3), "o": of(L, 3, 1)},
        two_sequences, 12, each(PAIR_ROWS, lambda row: lambda s, x, y: row(s, s.a(x), s.b(y)))),
    "spatial gate": Function({"a": of(L, 5, 8), "n": of(nn.LayerNorm, 4), "m": of(L, 3, 3), "o": of(L, 4, 5)}, steps(5),
        3, each(MIXED, spatial_gate), samples=60),
    "spatial gate of a kernel": Function({"a": of(L, 5, 8), "n": of(nn.LayerNorm, 4), "m": of(C, 3, 3, (1, 1)),
        "o": of(L, 4, 5)}, steps(5), 3, each(KERNELS, spatial_gate), samples=60),
    "cross products": Function({"a": of(L, 5, 4), "b": of(L, 5, 4), "o": of(L, 4, 6)}, steps(5), 4,
        each(CROSSED, lambda own: lambda s, x: s.o(torch.tanh(own(F.relu(s.a(x)), s.b(x))))), samples=60),
    "mixed tokens of a norm": Function({"a": of(L, 5, 4), "n": of(nn.LayerNorm, 4), "m": of(L, 3, 3), "o": of(L, 4, 5)},
        steps(5), 8, each(MIXED, mixer), samples=60),
    "relative keys": Function({"w": of(L, 6, 12), "e": of(nn.Embedding, 5, 2), "o": of(L, 4, 6)}, steps(6),
        22, each(OF_KEYS, lambda read: of_heads(lambda s, q, k: q @ k.mT + read(q, s.e(APART)))), samples=60),
    "bias of queries": Function({"w": of(L, 6, 12, bias=False), "u": parameter(2, 2), "o": of(L, 4, 6)}, steps(6), 16,
        each(OF_VECTORS, lambda score: of_heads(lambda s, q, k: score(q, s.u, k)))),
    "scores of places": Function({"a": of(C, 2, 4, 3), "b": of(C, 2, 4, 3)}, images(2, 5), 28,
        each(PLACE_SCORES, lambda score: lambda s, x: score(s.a(x), s.b(x)))),
    "scores of pairs of tokens": Function({"a": of(nn.Embedding, 7, 3), "b": of(nn.Embedding, 6, 3)},
        lambda samples: (torch.randint(7, (samples,)), torch.randint(6, (samples,))), 9, each(SCORES, towers),
        samples=300),
    "cosines of two towers": Function({"a": of(L, 5, 3), "b": of(L, 4, 3)}, two_inputs(5, 4), 5,
        each(SCORES, lambda score: lambda s, x, y: score(unit(s.a(x)), unit(s.b(y))))
        | {"cosine_similarity": lambda s, x, y: F.cosine_similarity(s.a(x), s.b(y), eps=1e-12)}),
    "reversible layers": Function({"i": of(L, 9, 8), "f": of(L, 4, 6), "f2": of(L, 6, 4), "g": of(L, 4, 6),
        "g2": of(L, 6, 4), "o": of(L, 8, 5)}, lambda samples: (torch.randn(samples, 9, dtype=torch.float64),), 48,
        REVERSIBLE, samples=80),
    "channels added in place": Function({"i": of(C, 3, 4, 3, padding=1), "f": of(C, 3, 2, 3, padding=1),
        "o": of(C, 4, 3, 1)}, images(3, 5), 6,
        {"beside": channels_beside_others, "in place": channels_in_place}, samples=120),
    "squeeze and excite": Function(SQUEEZED, images(2, 6), 0, each(MEANS, squeezed), samples=60),
}  # fmt: skip
