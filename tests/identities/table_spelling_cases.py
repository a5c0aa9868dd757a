"""Functions of products of values, and of tables, whose groups were once too small; see ``spelling_cases.py``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import of, parameter
from spelling_cases import Function, each, steps
from torch import Tensor, nn
from torch.nn import functional as F
from tried_spelling_cases import two_inputs

L = nn.Linear
BELOW = torch.tril_indices(3, 3, -1)


def three_inputs(samples: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(samples, size, dtype=torch.float64) for size in (5, 6, 4))


def places(samples: int) -> tuple[Tensor, ...]:
    return (2 * torch.rand(samples, 2, dtype=torch.float64) - 1,)


def of_each_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b, c: torch.cat([function(a, b), function(a, c), function(b, c)], -1)


def scalar_product(one: Tensor, two: Tensor) -> Tensor:
    return (one * two).sum(-1, keepdim=True)


def below(products: Tensor) -> Tensor:
    return products[:, BELOW[0], BELOW[1]]


# The scalar products of each two of three layers: the rotations of a factorisation, and one factor for each layer.
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "sums": of_each_two(scalar_product),
    "einsum": of_each_two(lambda one, two: torch.einsum("bd,bd->b", one, two)[:, None]),
    "matmul": of_each_two(lambda one, two: (one[:, None] @ two[..., None])[..., 0]),
    "bmm": lambda a, b, c: below(torch.bmm(t := torch.stack([a, b, c], 1), t.mT)),
    "einsum of a stack": lambda a, b, c: below(torch.einsum("bid,bjd->bij", t := torch.stack([a, b, c], 1), t)),
    "cat": lambda a, b, c: below((t := torch.cat([a, b, c], 1).view(-1, 3, 3)) @ t.transpose(1, 2)),
}
# A table that is read by the directions of its rows, and as it is: its size goes to the layer behind it.
DIRECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normalize": lambda k, m: F.normalize(k, dim=-1) @ F.normalize(m, dim=-1).T,
    "linear": lambda k, m: F.linear(F.normalize(k, dim=-1), F.normalize(m, dim=-1)),
    "cosine_similarity": lambda k, m: F.cosine_similarity(k[:, None], m, dim=-1),
    "norm": lambda k, m: (k / k.norm(dim=-1, keepdim=True)) @ (m / m.norm(dim=-1, keepdim=True)).T,
}


# Scores of queries and learned relative keys, one for each distance that the keys of an example have (DeBERTa, T5).
DISTANCES = torch.arange(4)[:, None] - torch.arange(4) + 3
RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda q, t: (q @ t.mT).gather(-1, DISTANCES.expand(*q.shape[:2], -1, -1)),
    "take_along_dim": lambda q, t: torch.take_along_dim(q @ t.mT, DISTANCES[None, None], -1),
    "heads as samples": lambda q, t: (q.flatten(0, 1) @ t.repeat(len(q), 1, 1).mT).gather(-1,
        DISTANCES.expand(q.shape[0] * q.shape[1], -1, -1)).view(*q.shape[:2], 4, 4),
    "expanded": lambda q, t: torch.bmm(q.flatten(0, 1), t.expand(len(q), -1, -1, -1).flatten(0, 1).mT).gather(-1,
        DISTANCES.expand(q.shape[0] * q.shape[1], -1, -1)).unflatten(0, q.shape[:2]),
    "rows": lambda q, t: torch.einsum("bhid,hijd->bhij", q, t[:, DISTANCES]),
    "one hot": lambda q, t: torch.einsum("bhim,ijm->bhij", q @ t.mT, F.one_hot(DISTANCES, 7).to(q.dtype)),
    "index": lambda q, t: (q @ t.mT)[:, :, torch.arange(4)[:, None], DISTANCES],
}  # fmt: skip


def relative(score: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def attention(s: Any, x: Tensor) -> Tensor:
        q, k, v, t = (own.unflatten(-1, (2, 2)).transpose(-3, -2) for own in (s.q(x), s.k(x), s.v(x), s.r(s.t)))
        return s.o(((q @ k.mT + score(q, t)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    return attention


def latents(s: Any, x: Tensor, norm: Callable[[Tensor], Tensor], *, widened: bool) -> Tensor:
    """Let learned latents, behind a norm, attend to the input (Perceiver)."""
    table = s.t.expand(len(x), 5, 4) if widened else s.t
    weights = (s.q(norm(table)) @ s.k(x).mT).softmax(-1)
    return s.o(torch.tanh(s.t + weights @ s.v(x)))


NORMS: dict[str, Callable[..., Tensor]] = {
    "module": lambda s, t: s.n(t),
    "layer_norm": lambda s, t: F.layer_norm(t, (4,), s.n.weight, s.n.bias),
    "by hand": lambda s, t: (
        (t - t.mean(-1, keepdim=True)) * (t.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt() * s.n.weight + s.n.bias
    ),
}
OUTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flatten": lambda a, b: (a[:, :, None] * b[:, None]).flatten(1),
    "einsum": lambda a, b: torch.einsum("bi,bj->bij", a, b).reshape(len(a), 6),
    "bmm": lambda a, b: torch.bmm(a[:, :, None], b[:, None]).view(-1, 6),
}
WIDTHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "widths": lambda x, c, w: ((x[:, None] - c).norm(dim=-1) / w) ** 2,
    "squares": lambda x, c, w: (x.unsqueeze(1) - c.unsqueeze(0)).pow(2).sum(-1) / w**2,
}
CROSSED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda x, h, b: x * (h + b) + x,
    "one plus": lambda x, h, b: x * (h + b + 1),
}
KERNEL_GAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiple": lambda h, g: h * (2 * g + 3),
    "factor behind": lambda h, g: h * (g + 1.5) * 2,
}
ROW_KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "image": lambda h, w: F.conv2d(h[:, None], w).squeeze(3),
    "steps": lambda h, w: F.conv1d(h.mT, w[:, 0].mT),
}
SAMPLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grid": lambda p, x: F.grid_sample(p[None], x[None, None], align_corners=False)[0, :, 0].T,
    "rows": lambda p, x: F.grid_sample(p[None], x[None, :, None], align_corners=False)[0, :, :, 0].mT,
    "one each": lambda p, x: F.grid_sample(p.expand(len(x), -1, -1, -1), x[:, None, None], align_corners=False).flatten(
        1
    ),
}

# Without rotations: scales act on each pair of entries. Written as ``v @ w`` it has matrices, of which most do nothing.
NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda v, w: (v * w).sum(),
    "dot": torch.dot,
    "einsum": lambda v, w: torch.einsum("i,i->", v, w),
}

HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda h: h.unflatten(-1, (2, 3)).norm(dim=-2),
    "sum of squares": lambda h: h.unflatten(-1, (2, 3)).square().sum(-2).sqrt(),
    "einsum": lambda h: torch.einsum("btij,btij->btj", *[h.unflatten(-1, (2, 3))] * 2).sqrt(),
    "halves": lambda h: (h[..., :3] ** 2 + h[..., 3:] ** 2).sqrt(),
    "hypot": lambda h: torch.hypot(h[..., :3], h[..., 3:]),
    "complex": lambda h: torch.complex(h[..., :3], h[..., 3:]).abs(),
}
PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda h: h.unflatten(-1, (3, 2)).norm(dim=-1),
    "view_as_complex": lambda h: torch.view_as_complex(h.unflatten(-1, (3, 2)).contiguous()).abs(),
    "every other": lambda h: (h[..., ::2].square() + h[..., 1::2].square()).sqrt(),
    "unbind": lambda h: sum(own**2 for own in h.unflatten(-1, (3, 2)).unbind(-1)).sqrt(),  # type: ignore[union-attr]
}


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read a sum of outer products, step by step."""
    state, results = torch.zeros(len(q), 3, 2, dtype=q.dtype), []
    for step in range(q.shape[1]):
        state = state + k[:, step, :, None] * v[:, step, None]
        results.append((q[:, step, :, None] * state).sum(1))
    return torch.stack(results, 1)


# Linear attention to earlier steps: matrices of queries and keys, of values, and one scale of all readers.
RECALLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "loop": recurrent,
    "matmul": lambda q, k, v: (q @ k.mT).tril() @ v,
    "cumsum": lambda q, k, v: torch.einsum("bti,btij->btj", q, torch.einsum("bti,btj->btij", k, v).cumsum(1)),
}
# Gaussians around learned places, with a width: their common scale, rotations and translations.
GAUSSIANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist": lambda h, c: torch.cdist(h, c) ** 2,
    "sum of squares": lambda h, c: (h[:, None] - c).square().sum(-1),
    "norm": lambda h, c: (h[:, None] - c).norm(dim=-1).square(),
    "einsum": lambda h, c: torch.einsum("bij,bij->bi", h[:, None] - c, h[:, None] - c),
    "by hand": lambda h, c: h.square().sum(-1, keepdim=True) - 2 * h @ c.T + c.square().sum(-1),
}
# Products of all pairs of inputs with learned vectors (factorisation machines).
MACHINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared table": lambda v, x: ((x @ v).square() - x.square() @ v.square()).sum(-1),
    "linear": lambda v, x: (F.linear(x, v.T) ** 2 - F.linear(x**2, (v**2).T)).sum(1),
    "rows": lambda v, x: 2 * sum((v[i] * v[j]).sum() * x[:, i] * x[:, j] for i in range(5) for j in range(i)),
    "dot": lambda v, x: 2 * sum(torch.dot(v[i], v[j]) * x[:, i] * x[:, j] for i in range(5) for j in range(i)),
    "pairs": lambda v, x: 2 * torch.einsum("bi,bj,ij->b", x, x, (v @ v.T).triu(1)),
}
MEDIANS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda h: h.sort(1)[0][:, (h.shape[1] - 1) // 2],
    "kthvalue": lambda h: h.kthvalue((h.shape[1] + 1) // 2, 1)[0],
    "kthvalue, keepdim": lambda h: h.kthvalue((h.shape[1] + 1) // 2, dim=1, keepdim=True)[0].squeeze(1),
    "median": lambda h: h.median(1)[0],
}
QUANTILES: dict[str, Callable[[Tensor], Tensor]] = {
    "quantile": lambda h: torch.quantile(h, 0.25, dim=1),
    "method, keepdim": lambda h: h.quantile(0.25, 1, keepdim=True)[:, 0],
    "negative": lambda h: -torch.quantile(-h, 0.75, dim=1),
}
RUNNING: dict[str, Callable[[Tensor], Tensor]] = {
    "cummax": lambda h: torch.cummax(h, 1)[0],
    "cummin": lambda h: -(-h).cummin(1)[0],
    "loop": lambda h: torch.stack([h[:, : own + 1].amax(1) for own in range(h.shape[1])], 1),
}
SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda h: F.normalize(h, p=1.0, dim=1),
    "sum": lambda h: h / h.abs().sum(1, keepdim=True),
    "clamp": lambda h: h / h.abs().sum(1, keepdim=True).clamp(min=1e-12),
    "norm": lambda h: h / torch.linalg.vector_norm(h, 1, dim=1, keepdim=True).clamp_min(1e-8).expand_as(h),
}
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda n: (n + 1) @ n.mT,
    "einsum": lambda n: torch.einsum("bti,bsi->bts", 1 + n, n),
    "sum": lambda n: n @ n.mT + n.sum(-1)[:, None],
}
TOTALS: dict[str, Callable[[Tensor], Tensor]] = {
    "logcumsumexp": lambda h: torch.logcumsumexp(h, 1),
    "loop": lambda h: torch.stack([h[:, : own + 1].logsumexp(1) for own in range(h.shape[1])], 1),
    "by hand": lambda h: torch.stack([h[:, : own + 1].exp().sum(1).log() for own in range(h.shape[1])], dim=1),
}
PLUS: dict[str, Callable[[Tensor], Tensor]] = {
    "pairwise_distance": lambda h: F.pairwise_distance(h, h.roll(1, 1))[..., None],
    "norm": lambda h: (h - h.roll(1, 1) + 1e-6).norm(dim=-1, keepdim=True),
    "by hand": lambda h: (1e-6 + (h - h.roll(1, 1))).square().sum(-1, keepdim=True).sqrt(),
}
# Two layers read one value, and of what they add up to only the sum counts; one counts half, or times gains.
HALF: dict[str, Callable[..., Tensor]] = {
    "number": lambda s, x: s.a(x) + 0.5 * s.f(x),
    "alpha": lambda s, x: torch.add(s.a(x), s.f(x), alpha=0.5),
    "quotient": lambda s, x: (2 * s.a(x) + s.f(x)) / 2,
    "minus": lambda s, x: s.f(x) * 0.5 - -s.a(x),
    "half the input": lambda s, x: s.a(x) + (x / 2) @ s.f.weight.T + 0.5 * s.f.bias,
    "convolution": lambda s, x: s.a(x) + 0.5 * F.conv1d(x.mT, s.f.weight[..., None], s.f.bias).mT,
    "in rows": lambda s, x: s.a(x) + 0.5 * s.f(x.flatten(0, 1)).unflatten(0, (-1, 3)),
}
GAINED: dict[str, Callable[..., Tensor]] = {
    "product": lambda s, x: s.a(x) + s.g * s.f(x),
    "addcmul": lambda s, x: torch.addcmul(s.a(x), s.g, s.f(x)),
    "minus": lambda s, x: s.a(x) - s.f(x) * -s.g,
}
# A learned threshold for each unit (filter response normalisation), which moves along with the bias.
THRESHOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "max": lambda h, t: torch.max(t, h),
    "stack": lambda h, t: torch.stack(torch.broadcast_tensors(h, t)).amax(0),
    "where": lambda h, t: torch.where(h > t, h, t),
    "where of a difference": lambda h, t: torch.where(h - t < 0, t, h),
    "relu": lambda h, t: F.relu(h - t) + t,
    "clamp": lambda h, t: h.clamp(min=t),
    "clamp_min": lambda h, t: h.clamp_min(t),
}
# Factors of pairs with a bias for each row and column (GloVe): vectors are added to all rows of either table.
FACTORS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda s, i, j: (s.w(i) * s.c(j)).sum(-1) + s.p(i)[..., 0] + s.q(j)[..., 0],
    "einsum": lambda s, i, j: torch.einsum("bd,bd->b", s.c(j), s.w(i)) + s.p(i).squeeze(-1) + s.q(j).squeeze(-1),
    "bmm": lambda s, i, j: (torch.bmm(s.w(i)[:, None], s.c(j)[..., None])[:, 0] + s.p(i) + s.q(j)).view(-1),
    "columns": lambda s, i, j: (lambda at: (s.w(at[:, 0]) * s.c(at[:, 1])).sum(-1)
        + (s.p(at[:, 0]) + s.q(at[:, 1]))[:, 0])(torch.stack([i, j], 1)),
    "index": lambda s, i, j: (s.w.weight[i] * s.c.weight[j]).sum(1) + s.p.weight[i, 0] + s.q.weight[:, 0][j],
    "rows": lambda s, i, j: (s.w(i) @ s.c.weight.T + s.p(i) + s.q.weight[:, 0]).gather(1, j[:, None])[:, 0],
    "all pairs": lambda s, i, j: (s.w.weight @ s.c.weight.T + s.p.weight + s.q.weight.T)[i, j],
}  # fmt: skip
TOWERS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda s, x, j: (s.f(x) * s.c(j)).sum(-1) + s.q(j)[..., 0],
    "einsum": lambda s, x, j: torch.einsum("bd,bd->b", s.f(x), s.c(j)) + s.q(j)[:, 0],
    "matmul": lambda s, x, j: (s.c(j)[:, None] @ s.f(x)[..., None])[:, 0, 0] + s.q.weight[j, 0],
    "bag": lambda s, x, j: (s.f(x) * F.embedding_bag(j[:, None], s.c.weight, mode="sum")).sum(1)
        + F.embedding_bag(j[:, None], s.q.weight, mode="sum")[:, 0],
}  # fmt: skip
# Gains and biases of each class.
CLASSES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "chunk": lambda h, t, j: (lambda gain, bias: gain * h + bias)(*t(j).chunk(2, -1)),
    "slices": lambda h, t, j: h * t(j)[:, :4] + t(j)[:, 4:],
    "two tables": lambda h, t, j: F.embedding(j, t.weight[:, :4]) * h + F.embedding(j, t.weight[:, 4:]),
    "unflatten": lambda h, t, j: (lambda own: h * own[:, 0] + own[:, 1])(t(j).unflatten(-1, (2, 4))),
}


GAINS_AND_BIASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda h, n: F.layer_norm(h, (6,), n[0], n[1]),
    "unbind": lambda h, n: F.layer_norm(h, (6,), *n.unbind()),
    "by hand": lambda h, n: F.layer_norm(h, (6,)) * n[0] + n[1],
}
# Kernels of width 1 that read channels beside channels made of shuffled pixels.
BESIDE_SHUFFLED: dict[str, Callable[..., Tensor]] = {
    "layers of each": lambda o, h, z: F.conv2d(h, o.weight[:, :3], o.bias) + F.conv2d(z, o.weight[:, 3:]),
    "cat": lambda o, h, z: o(torch.cat([h, z], 1)),
    "channels last": lambda o, h, z: o(torch.cat([h, z], 1).contiguous(memory_format=torch.channels_last)),
    "rows": lambda o, h, z: F.linear(torch.cat([h, z], 1).movedim(1, 3), o.weight[..., 0, 0], o.bias).movedim(3, 1),
}


def soft_experts(s: Any, x: Tensor) -> Tensor:
    """Let each expert process mixtures of the tokens, and each token read a mixture of the results (Soft MoE)."""
    scores = torch.einsum("bmd,dnp->bmnp", x, s.p)
    hidden = F.gelu(torch.einsum("bmd,bmnp,ndh->bnph", x, scores.softmax(1), s.u))
    return s.o(torch.einsum("bnph,nho,bmnp->bmo", hidden, s.v, scores.flatten(2).softmax(-1).view_as(scores)))


def pairs(samples: int) -> tuple[Tensor, ...]:
    return torch.arange(samples) % 6, torch.arange(samples) // 6 % 5


def vectors_and_rows(samples: int) -> tuple[Tensor, ...]:
    return torch.randn(samples, 4, dtype=torch.float64), torch.arange(samples) % 5


# A layer plus a product of two smaller ones, all trained, and the same with rows of length m: the small ones are free.
LOW_RANK: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weights": lambda s, x: F.linear(x, s.w + s.b @ s.a),
    "twice a half subtracted": lambda s, x: F.linear(x, s.w - 2 * torch.einsum("or,ri->oi", -s.b, s.a / 2)),
    "turned": lambda s, x: x @ (s.w.T + s.a.T @ s.b.T),
    "layers": lambda s, x: F.linear(x, s.w) + F.linear(F.linear(x, s.a), s.b),
    "products": lambda s, x: x @ s.w.T - (x @ s.a.T) @ -s.b.T,
    "numbers": lambda s, x: F.linear(x, s.w) + 2 * F.linear(F.linear(x, s.a) / 2, s.b),
    "turned kernels": lambda s, x: (F.conv1d(x.mT, s.w[..., None]) + F.conv1d(F.conv1d(x.mT, s.a[..., None] / 3),
        s.b[..., None]) * 3).mT,
}  # fmt: skip
# Kernels whose window is a part of another one's, in images of 5 x 5 of which the edges are cut off.
WINDOWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cut": lambda s, x: F.conv2d(x, s.w) + F.conv2d(x, s.v)[..., 1:-1, 1:-1],
    "cut before": lambda s, x: F.conv2d(x, s.w) + F.conv2d(x[..., 1:-1, 1:-1], s.v),
    "padded": lambda s, x: F.conv2d(x, s.w + F.pad(s.v, (1, 1, 1, 1))),
    "channels last": lambda s, x: F.conv2d(x, s.w) + F.linear(x.permute(0, 2, 3, 1), s.v[..., 0, 0]).permute(0, 3, 1,
        2)[..., 1:-1, 1:-1],
}  # fmt: skip
# A linear branch beside its input: the identity plus its weight is any matrix.
BESIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda s, h: h + F.linear(h, s.w),
    "numbers": lambda s, h: h / 4 - F.linear(-h / 2, s.w) * 2 + h * 0.75,
    "identity": lambda s, h: F.linear(h, s.w + torch.eye(4, dtype=h.dtype)),
    "product": lambda s, h: h + h @ s.w.T,
}
# Weights that are sums of a few bases, and of a few Kronecker products.
BASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flattened": lambda c, w: (c @ w.flatten(1)).view(4, 3, 5),
    "einsum": lambda c, w: torch.einsum("rk,kio->rio", c, w),
    "tensordot": lambda c, w: torch.tensordot(c, w, 1),
}
KRONECKER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "kron": lambda s, x: F.linear(x, sum(torch.kron(s.a[at], s.b[at]) for at in range(2))),
    "einsum": lambda s, x: torch.einsum("nij,nkl,bjl->bik", s.a, s.b, x.view(-1, 2, 4)).flatten(1),
}
DIRECTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "norm": lambda s, x: F.linear(x, s.m[:, None] * (v := s.w + s.b @ s.a) / v.norm(dim=1, keepdim=True)),
    "normalize": lambda s, x: s.m * F.linear(x, F.normalize(s.w + s.b @ s.a)),
}
# Channels that are read in two groups, by kernels of width 2.
GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "groups": lambda h, w: F.conv1d(h, w, stride=2, groups=2),
    "chunks": lambda h, w: torch.cat([F.conv1d(h[:, 2 * i : 2 * i + 2], w[2 * i : 2 * i + 2], stride=2)
        for i in range(2)], 1),
    "image": lambda h, w: F.conv2d(h[..., None], w[..., None], stride=(2, 1), groups=2)[..., 0],
    "windows": lambda h, w: torch.einsum("ngclk,gock->ngol", h.unfold(2, 2, 2).unflatten(1, (2, 2)),
        w.view(2, 2, 2, 2)).flatten(1, 2),
    "patches": lambda h, w: torch.einsum("ngclk,gock->ngol", h.unflatten(1, (2, 2)).unflatten(-1, (-1, 2)),
        w.view(2, 2, 2, 2)).flatten(1, 2),
    "unfold": lambda h, w: (w.view(2, 2, 4) @ F.unfold(h[:, :, None], (1, 2), stride=(1, 2)).unflatten(1, (2, 4)))
        .flatten(1, 2),
}  # fmt: skip
# Two kernels for each channel.
MULTIPLIED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "groups": lambda h, w: F.conv1d(h, w, groups=2),
    "loop": lambda h, w: torch.cat([F.conv1d(h[:, i : i + 1], w[2 * i : 2 * i + 2]) for i in range(2)], 1),
    "windows": lambda h, w: torch.einsum("nclk,cmk->ncml", h.unfold(2, 2, 1), w.view(2, 2, 2)).flatten(1, 2),
    "products": lambda h, w: (h.unfold(2, 2, 1)[:, :, None] * w.view(2, 2, 1, 2)).sum(-1).flatten(1, 2),
    "image": lambda h, w: F.conv2d(h[:, :, None], w[:, :, None], groups=2)[:, :, 0],
}
# Six heads of queries that read three of keys and values.
SCALE = 2**-0.5


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-1) @ v


QUERIES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "repeated": lambda q, k, v: attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)),
    "chunks": lambda *own: torch.cat([*map(attend, *(part.chunk(3, 1) for part in own))], 1),
    "slices": lambda q, k, v: torch.cat([F.scaled_dot_product_attention(q[:, 2 * i : 2 * i + 2],
        *(part[:, i : i + 1].expand(-1, 2, -1, -1) for part in (k, v))) for i in range(3)], 1),
    "loops": lambda q, k, v: torch.cat([torch.stack([attend(q[:, 2 * i + j], k[:, i], v[:, i]) for j in range(2)], 1)
        for i in range(3)], 1),
}  # fmt: skip
# Layers that read the same values, with a batch norm each: one of them takes off all changes of the others.
ADDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sums": lambda s, x: s.n(s.c(x)) + s.p(s.d(x)) + s.q(x),
    "a list": lambda s, x: sum((s.q(x), s.p(s.d(x)), s.n(s.c(x)))),  # type: ignore[arg-type]
    "stack": lambda s, x: torch.stack([s.n(s.c(x)), s.p(s.d(x)), s.q(x)]).sum(0),
}
# Queries of learned latents, which all samples share.
LATENTS: dict[str, Callable[[nn.Linear, Tensor, int], Tensor]] = {
    "layer": lambda q, t, n: q(t.expand(n, -1, -1)),
    "sum of products": lambda q, t, n: (t.expand(n, -1, -1).unsqueeze(-2) * q.weight).sum(-1) + q.bias,
    "rows": lambda q, t, n: torch.stack([(t.repeat(n, 1, 1) * r).sum(-1) for r in q.weight], -1) + q.bias,
    "one sample": lambda q, t, n: (t[None, :, None] * q.weight).sum(-1) + q.bias,
}
# A layer and one of low rank, of which later layers read one place.
OF_ONE_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "before": lambda s, x: torch.tanh((h := s.i(x)[:, 0]) @ s.w.T + h @ s.a.T @ s.b.T),
    "behind": lambda s, x: torch.tanh((h := s.i(x)) @ s.w.T + h @ s.a.T @ s.b.T)[:, 0],
    "between": lambda s, x: torch.tanh(((h := s.i(x)) @ s.w.T + h @ s.a.T @ s.b.T).select(1, 0)),
    "slice": lambda s, x: torch.tanh(s.i(x) @ (s.w + s.b @ s.a).T)[:, :1].squeeze(1),
}
# Scores over the length of the value that is scored; units of several matrices, added; and two layers, added.
OVER_LENGTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda h, w: (h @ w.T) / h.norm(dim=-1, keepdim=True),
    "linear": lambda h, w: F.linear(h, w) / (h * h).sum(-1, keepdim=True).sqrt(),
    "einsum": lambda h, w: (
        torch.einsum("bth,oh->bto", h, w) / torch.linalg.vector_norm(h, dim=-1, keepdim=True).clamp(min=1e-9)
    ),
    "normalize": lambda h, w: F.normalize(h, dim=-1) @ w.T,
}
SEVERAL: dict[str, Callable[[Tensor, Sequence[Tensor]], Tensor]] = {
    "einsum": lambda h, own: sum(torch.einsum("btd,de->bte", h, w).relu() for w in own),  # type: ignore[misc]
    "bmm": lambda h, own: sum(torch.bmm(h, w.expand(len(h), -1, -1)).relu() for w in own),  # type: ignore[misc]
    "einsum of a stack": lambda h, own: torch.einsum("btd,ode->bteo", h, torch.stack([*own])).relu().sum(-1),
}
SUMS_OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "stack": lambda a, c: torch.stack([a, c]).sum(0),
    "cat": lambda a, c: torch.cat([a.unsqueeze(0), c.unsqueeze(0)]).sum(0),
    "mean of a cat": lambda a, c: 2 * torch.cat([a[..., None], c[..., None]], -1).mean(-1),
}
TABLES: dict[str, Function] = {
    "scores over lengths": Function({"a": of(L, 9, 4), "w": parameter(3, 4)}, steps(9), 7,
        each(OVER_LENGTHS, lambda own: lambda s, x: own(s.a(x), s.w)), samples=60),
    "units of several matrices": Function({"a": of(L, 9, 4), "o": of(L, 4, 3)} | {
        name: parameter(4, 4) for name in "uvw"}, steps(9), 20,
        each(SEVERAL, lambda own: lambda s, x: s.o(own(s.a(x), [s.u, s.v, s.w]))), samples=60),
    "two layers, added": Function({"a": of(L, 9, 4), "c": of(L, 9, 4), "o": of(L, 4, 3)}, steps(9), 44,
        each(SUMS_OF_TWO, lambda own: lambda s, x: s.o(torch.relu(own(s.a(x), s.c(x))))), samples=60),
    "latents as queries": Function({"t": parameter(5, 4), "q": of(L, 4, 4), "k": of(L, 6, 4), "o": of(L, 6, 7)},
        steps(6), 40, each(LATENTS, lambda own: lambda s, x: s.o(torch.tanh(
            (own(s.q, s.t, len(x)) @ s.k(x).mT).softmax(-1) @ x))), samples=60),
    "place of added layers": Function({"i": of(L, 9, 4), "w": parameter(4, 4), "a": parameter(2, 4),
        "b": parameter(4, 2), "o": of(L, 4, 6)}, steps(9), 32,
        each(OF_ONE_PLACE, lambda own: lambda s, x: s.o(own(s, x))), samples=60),
    "products of each two": Function({"a": of(L, 5, 3), "b": of(L, 6, 3), "c": of(L, 4, 3), "o": of(L, 3, 4)},
        three_inputs, 6, each(PRODUCTS, lambda own: lambda s, *x: s.o(own(s.a(x[0]), s.b(x[1]), s.c(x[2])))),
        samples=60),
    "number of two weights": Function({"a": of(L, 6, 8), "v": parameter(4), "w": parameter(4), "b": of(L, 8, 3)},
        two_inputs(6), 16, each(NUMBERS, lambda own: lambda s, x: s.b(F.leaky_relu(s.a(x)) * own(s.v, s.w))),
        samples=60),
    "directions and rows": Function({"k": of(L, 4, 3), "m": parameter(5, 3), "o": of(L, 3, 5)}, two_inputs(4), 5,
        each(DIRECTIONS, lambda own: lambda s, x: s.o(torch.tanh(own(s.k(x), s.m)) @ s.m)), samples=60),
    "latents behind a norm": Function({"t": parameter(5, 4), "n": of(nn.LayerNorm, 4), "q": of(L, 4, 3),
        "k": of(L, 5, 3), "v": of(L, 5, 4), "o": of(L, 4, 6)}, steps(5), 24,
        {f"{name}{', widened' * widened}": lambda s, x, own=own, widened=widened: latents(
            s, x, functools.partial(own, s), widened=widened) for name, own in NORMS.items() for widened in (0, 1)},
        samples=60),
    "outer product": Function({"a": of(L, 4, 3), "b": of(L, 4, 2), "o": of(L, 6, 7)}, two_inputs(4), 5,
        each(OUTER, lambda own: lambda s, x: s.o(own(F.leaky_relu(s.a(x)), F.leaky_relu(s.b(x))))), samples=90),
    "outer product of linear units": Function({"a": of(L, 4, 3), "b": of(L, 4, 2), "o": of(L, 6, 7)}, two_inputs(4), 13,
        each(OUTER, lambda own: lambda s, x: s.o(own(s.a(x), s.b(x)))), samples=90),
    "tanh of an outer product": Function({"a": of(L, 4, 3), "b": of(L, 4, 2), "o": of(L, 6, 7)}, two_inputs(4), 1,
        each(OUTER, lambda own: lambda s, x: s.o(own(s.a(x), s.b(x)).tanh())), samples=90),
    "linear attention, recurrent": Function({name: of(L, 4, size, bias=False) for name, size in zip("qkv", (3, 3, 2),
        strict=True)} | {"o": of(L, 2, 9)}, steps(4), 14,
        each(RECALLED, lambda own: lambda s, x: s.o(own(s.q(x), s.k(x), s.v(x)))), samples=40),
    "places with a width": Function({"a": of(L, 4, 3), "c": parameter(9, 3), "w": parameter(9), "o": of(L, 9, 7)},
        two_inputs(4), 7, each(GAUSSIANS, lambda own: lambda s, x: s.o((s.w * own(s.a(x), s.c)).tanh())), samples=90),
    "products of rows of a table": Function({"v": parameter(5, 2)}, two_inputs(5), 1,
        each(MACHINES, lambda own: lambda s, x: own(s.v, x)[:, None]), samples=60),
    "lengths of halves": Function({"a": of(L, 7, 6), "o": of(L, 3, 9)}, steps(7), 6,
        each(HALVES, lambda own: lambda s, x: s.o(own(s.a(x)))), samples=40),
    "lengths of pairs": Function({"a": of(L, 7, 6), "o": of(L, 3, 9)}, steps(7), 6,
        each(PAIRS, lambda own: lambda s, x: s.o(own(s.a(x)))), samples=40),
    **{name: Function({"a": of(L, 7, 6), "o": of(L, 6, 9)}, steps(7), 12,
        each(spellings, lambda own: lambda s, x: s.o(own(s.a(x)))), samples=40)
       for name, spellings in (("median", MEDIANS), ("quantile", QUANTILES), ("largest so far", RUNNING))},
    "shares": Function({"a": of(L, 7, 6), "o": of(L, 6, 9)}, steps(7), 6,
        each(SHARES, lambda own: lambda s, x: s.o(own(s.a(x)))), samples=40),
    "running sums of exponentials": Function({"a": of(L, 7, 6), "o": of(L, 6, 9)}, steps(7), 6,
        each(TOTALS, lambda own: lambda s, x: s.o(own(s.a(x)))), samples=40),
    "scores plus a number": Function({"a": of(L, 7, 6), "o": of(L, 6, 9)}, steps(7), 11,
        each(SCORES, lambda own: lambda s, x: (lambda h: s.o(own(F.normalize(h, dim=-1)).softmax(-1) @ h))(s.a(x))),
        samples=40),
    "distances plus a number": Function({"a": of(L, 7, 6), "o": of(L, 1, 9)}, steps(7), 16,
        each(PLUS, lambda own: lambda s, x: s.o(own(s.a(x)))), samples=40),
    "half of a layer added": Function({"a": of(L, 5, 6), "f": of(L, 5, 6), "o": of(L, 6, 3)}, steps(5), 36,
        each(HALF, lambda own: lambda s, x: s.o(torch.tanh(own(s, x)))), samples=40),
    "a layer and gains added": Function({"a": of(L, 5, 6), "f": of(L, 5, 6), "g": parameter(6), "o": of(L, 6, 3)},
        steps(5), 42, each(GAINED, lambda own: lambda s, x: s.o(torch.tanh(own(s, x)))), samples=40),
    "thresholds": Function({"a": of(L, 7, 6), "t": lambda: nn.Parameter(torch.randn(6) / 4), "o": of(L, 6, 9)},
        steps(7), 12,
        each(THRESHOLDS, lambda own: lambda s, x: s.o(own(s.a(x), s.t))), samples=40),
    "factors with biases": Function({name: of(nn.Embedding, *size) for name, size in (
        ("w", (6, 3)), ("c", (5, 3)), ("p", (6, 1)), ("q", (5, 1)))}, pairs, 16, FACTORS, samples=60),
    "tower and rows with biases": Function({"f": of(L, 4, 3), "c": of(nn.Embedding, 5, 3), "q": of(nn.Embedding, 5, 1)},
        vectors_and_rows, 12, TOWERS, samples=60),
    "gains and biases of classes": Function({"f": of(L, 4, 4), "t": of(nn.Embedding, 5, 8), "o": of(L, 4, 3)},
        vectors_and_rows, 8, each(CLASSES, lambda own: lambda s, x, j: s.o(torch.tanh(own(s.f(x), s.t, j)))),
        samples=80),
    "layer of low rank added": Function({"w": parameter(4, 6), "a": parameter(2, 6), "b": parameter(4, 2),
        "o": of(L, 4, 5)}, steps(6), 20,
        each(LOW_RANK, lambda own: lambda s, x: s.o(torch.tanh(own(s, x)))), samples=40),
    "lengths of rows of low rank": Function({"w": parameter(4, 6), "a": parameter(2, 6), "b": parameter(4, 2),
        "m": parameter(4), "o": of(L, 4, 5)}, steps(6), 24,
        each(DIRECTED, lambda own: lambda s, x: s.o(torch.tanh(own(s, x)))), samples=40),
    "kernels and batch norms added": Function({"i": of(nn.Conv1d, 4, 3, 1), "c": of(nn.Conv1d, 3, 3, 3, padding=1,
        bias=False), "d": of(nn.Conv1d, 3, 3, 1, bias=False), "o": of(nn.Conv1d, 3, 5, 1)} | {
        name: of(nn.BatchNorm1d, 3) for name in "npq"}, steps(6, 4), 24,
        each(ADDED, lambda own: lambda s, x: s.o(torch.tanh(own(s, torch.tanh(s.i(x)))))), samples=60),
    "windows inside windows": Function({"w": parameter(4, 3, 3, 3), "v": parameter(4, 3, 1, 1), "o": of(L, 4, 9)},
        lambda samples: (torch.randn(samples, 3, 5, 5, dtype=torch.float64),), 12,
        each(WINDOWS, lambda own: lambda s, x: s.o(torch.tanh(own(s, x)).mean((2, 3)))), samples=60),
    "linear branch": Function({"i": of(L, 6, 4), "w": parameter(4, 4), "o": of(L, 4, 9)}, steps(6), 20,
        each(BESIDE, lambda own: lambda s, x: s.o(torch.relu(own(s, s.i(x))))), samples=40),
    "bases of weights": Function({"i": of(L, 6, 3), "c": parameter(4, 2), "w": parameter(2, 3, 5), "o": of(L, 5, 9)},
        steps(6, 4), 7, each(BASES, lambda own: lambda s, x: s.o(torch.tanh(torch.einsum("bri,rio->bo",
        torch.relu(s.i(x)), own(s.c, s.w))))), samples=90),
    "sum of Kronecker products": Function({"a": parameter(2, 2, 2), "b": parameter(2, 3, 4), "o": of(L, 6, 9)},
        two_inputs(8), 4, each(KRONECKER, lambda own: lambda s, x: s.o(torch.tanh(own(s, x)))), samples=60),
    "difference of inputs": Function({"e": of(L, 6, 4), "a": of(L, 16, 5), "o": of(L, 5, 7)}, steps(6, 2), 25, {
        "cat": lambda s, x: (lambda u, v: s.o(torch.relu(s.a(torch.cat([u, v, u - v, u * v], -1)))))(
            *torch.tanh(s.e(x)).unbind(1))}, samples=90),
    "identity plus a generated matrix": Function({"e": of(L, 6, 3), "t": of(L, 6, 9), "f": of(L, 3, 5),
        "o": of(L, 5, 7)}, steps(6), 23, {"eye": lambda s, x: s.o(torch.relu(s.f(s.e(x) @ (
            s.t(x.mean(1)).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)))))}, samples=90),
    "gains of channels behind a mixture of places": Function({"l": parameter(6), "t": of(L, 3, 3)}, steps(6), 1,
        {"turned": lambda s, x: x + s.l * s.t(x.mT).mT}, samples=40),
    "mixtures in and out of experts": Function({"p": parameter(6, 3, 2), "u": parameter(3, 6, 4),
        "v": parameter(3, 4, 5), "o": of(L, 5, 9)}, steps(6, 4), 25, {"einsum": soft_experts}, samples=90),
    "gain and bias in an array": Function({"a": of(L, 8, 6), "n": parameter(2, 6), "b": of(L, 6, 7)}, steps(8), 38,
        each(GAINS_AND_BIASES, lambda own: lambda s, x: s.b(own(s.a(x), s.n))), samples=40),
    "shuffled pixels beside others": Function({"e": of(nn.Conv2d, 4, 3, 1), "u": of(nn.Conv2d, 3, 8, 2, 2),
        "o": of(nn.Conv2d, 5, 2, 1)}, lambda samples: (torch.randn(samples, 4, 4, 4, dtype=torch.float64),), 3,
        each(BESIDE_SHUFFLED, lambda own: lambda s, x: (lambda h: own(s.o, h, torch.tanh(F.pixel_shuffle(s.u(h), 2))))(
            torch.relu(s.e(x)))), samples=20),
    "channels in groups": Function({"a": of(nn.Conv1d, 5, 4, 1, bias=False), "w": parameter(4, 2, 2),
        "o": of(nn.Conv1d, 4, 5, 1)}, steps(6, 5), 4,
        each(GROUPS, lambda own: lambda s, x: s.o(F.leaky_relu(own(torch.tanh(s.a(x)), s.w)))), samples=40),
    "kernels for each channel": Function({"a": of(nn.Conv1d, 5, 2, 1, bias=False), "w": parameter(4, 1, 2),
        "o": of(nn.Conv1d, 4, 5, 1)}, steps(6, 5), 4,
        each(MULTIPLIED, lambda own: lambda s, x: s.o(F.leaky_relu(own(torch.tanh(s.a(x)), s.w)))), samples=40),
    "queries in groups": Function({name: of(L, 9, size, bias=False) for name, size in zip("qkv", (12, 6, 6),
        strict=True)} | {"o": of(L, 12, 7)}, steps(9, 4), 24, each(QUERIES, lambda own: lambda s, x: s.o(own(
        *(layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (s.q, s.k, s.v))).transpose(1, 2).flatten(2))),
        samples=60),
    "relative keys at distances": Function({"q": of(L, 7, 4), "k": of(L, 7, 4), "v": of(L, 7, 4), "o": of(L, 4, 5),
        "r": of(L, 3, 4), "t": parameter(7, 3)}, steps(7, 4), 40, each(RELATIVE, relative), samples=60),
    "radial functions with widths": Function({"c": parameter(5, 4), "w": parameter(5), "o": of(L, 5, 7)},
        two_inputs(4), 0, each(WIDTHS, lambda own: lambda s, x: s.o(torch.exp(-own(x, s.c, s.w)))), samples=60),
    "cross layer of inputs": Function({"w": of(L, 4, 4, bias=False), "b": parameter(4), "o": of(L, 4, 5)},
        two_inputs(4), 4, each(CROSSED, lambda own: lambda s, x: torch.tanh(s.o(own(x, s.w(x), s.b)))), samples=60),
    "gains that kernels make": Function({"i": of(nn.Conv1d, 3, 4, 1, bias=False), "g": of(nn.Conv1d, 3, 4, 3,
        padding=1), "o": of(nn.Conv1d, 4, 5, 1)}, steps(6, 3), 4,
        each(KERNEL_GAINS, lambda own: lambda s, x: s.o(torch.tanh(own(s.i(x), s.g(x))))), samples=40),
    "kernels as long as a row": Function({"e": of(L, 5, 3), "w": parameter(4, 1, 2, 3), "o": of(L, 4, 5)},
        steps(5, 4), 13, each(ROW_KERNELS, lambda own: lambda s, x: s.o(F.leaky_relu(own(s.e(x), s.w)).mean(2))),
        samples=60),
    "sampled table": Function({"p": parameter(2, 3, 3), "o": of(L, 2, 3)}, places, 4,
        each(SAMPLED, lambda own: lambda s, x: s.o(own(s.p, x))), samples=40),
}  # fmt: skip
