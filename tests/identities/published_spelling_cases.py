"""Layers of published networks, each in several spellings; see ``spelling_cases.py``."""

import math
from collections.abc import Callable
from typing import Any

import torch
from found_spelling_cases import image_and_vector
from helpers import of, parameter
from spelling_cases import Function, Spelled, each, steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import leaky_relu as leaky

L, C = nn.Linear, nn.Conv2d


# ---- members of a BatchEnsemble: a matrix of gains before and after a shared layer


def vectors(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 6, dtype=torch.float64),)


MEMBERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "broadcast": lambda s, x: s.b(torch.relu(s.a(x)[:, None] * s.r) * s.t) * s.u,
    "matmul": lambda s, x: ((torch.relu(s.a(x)[:, None] * s.r) * s.t) @ s.b.weight.T + s.b.bias) * s.u,
}

# The same gains behind two layers.
TWICE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "broadcast": lambda s, x: s.o(leaky(s.b(leaky(s.a(x)[..., None, :] * s.r)) * s.r)).sum(-2),
    "matmul": lambda s, x: s.o(leaky((leaky(s.r * s.a(x)[..., None, :]) @ s.b.weight.T + s.b.bias) * s.r)).sum(-2),
}

# ---- a factorisation machine


SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "products": lambda v: 0.5 * (v.sum(1) * v.sum(1) - (v * v).sum(1)).sum(-1),
    "pairs": lambda v: 0.5 * (torch.einsum("bie,bje->b", v, v) - v.square().sum((1, 2))),
}


def machine(second: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.l(x)[:, 0] + second(x[..., None] * s.v)


# ---- two values in factorised bilinear pooling

POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view of the product": lambda a, b: (a * b).view(-1, 4, 3).sum(-1),
    "einsum": lambda a, b: torch.einsum("bgr,bgr->bg", a.view(-1, 4, 3), b.view(-1, 4, 3)),
}


def two_vectors(samples: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(samples, size, dtype=torch.float64) for size in (6, 5))


# ---- constants beside values: a column that reads a one is a bias


ONES: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (0, 1), value=1.0),
    "written": lambda x: x.new_ones(len(x), x.shape[1] + 1).index_copy(1, torch.arange(x.shape[1]), x),
}
TIMES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "ones": lambda h, t: torch.cat([h, t * torch.ones_like(h[:, :1])], -1),
    "new_full": lambda h, t: torch.cat([h, h.new_full((len(h), 1), t)], -1),
}
POSITIONS = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda x: torch.cat([x, POSITIONS.expand(len(x), -1, -1)], -1),
    "added": lambda x: torch.cat([x, x.new_zeros(*x.shape[:2], 2) + POSITIONS], 2),
}


def solved(joined: Callable[[Tensor, float], Tensor]) -> Spelled:
    """Return Euler's steps of a network that reads the time."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.i(x)
        for step in range(3):
            h = h + 0.1 * s.b(torch.tanh(s.a(joined(h, 0.1 + 0.1 * step))))
        return s.o(h)

    return forward


# ---- two values in the parts of one


FIRST, LAST = torch.arange(4), torch.arange(4, 7)


def put(join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a concatenation that writes two values into zeros."""
    return lambda a, b: join(join(a.new_zeros(len(a), 7), FIRST, a), LAST, b)


def set_parts(memory: Tensor, places: Tensor, value: Tensor) -> Tensor:
    memory[:, places] = value
    return memory


BOTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slice_scatter": put(lambda y, places, a: torch.slice_scatter(y, a, 1, int(places[0]), int(places[-1]) + 1)),
    "set": put(set_parts),
}

# ---- decoders whose cells read a mixture of states beside their own


def decoded(cell: Callable[[Any, Tensor, Tensor], Any]) -> Spelled:
    """Return a decoder with the gates of an LSTM and attention over its initial states."""

    def forward(s: Any, x: Tensor) -> Tensor:
        states = torch.tanh(s.e(x))
        hidden, memory, outputs = states[:, -1], torch.zeros_like(states[:, 0]), []
        for _ in range(2):
            shares = (states @ hidden[..., None]).softmax(1)
            i, f, g, o = cell(s, (shares * states).sum(1), hidden)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * memory.tanh()
            outputs.append(s.o(hidden))
        return torch.stack(outputs, 1)

    return forward


DECODERS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "cat": lambda s, c, h: s.w(torch.cat([c, h], -1)).chunk(4, -1),
    "two products": lambda s, c, h: (c @ s.w.weight[:, :4].T + F.linear(h, s.w.weight[:, 4:], s.w.bias)).split(4, -1),
}


def gated(cell: Callable[[Any, Tensor, Tensor], Tensor]) -> Spelled:
    """Return a recurrent network that begins with zeros."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for own in x.unbind(1):
            h = cell(s, own, h)
        return s.o(h)

    return forward


def by_cat(s: Any, x: Tensor, h: Tensor) -> Tensor:
    gate = torch.sigmoid(s.z(torch.cat([x, h], -1)))
    return (1 - gate) * h + gate * torch.tanh(s.n(torch.cat([x, gate * h], -1)))


MINIMAL: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "cat": by_cat,
    "lerp": lambda s, x, h: torch.lerp(h, s.n(torch.hstack([x, h * s.z(torch.hstack([x, h])).sigmoid()])).tanh(),
        s.z(torch.hstack([x, h])).sigmoid()),
}  # fmt: skip

# ---- heads that are cut from layers and joined along another axis (AutoInt, early TensorFlow transformers)

CUT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "views": (lambda y: y.unflatten(-1, (2, 3)).transpose(1, 2), lambda a: a.transpose(1, 2).flatten(2)),
    "stacked first": (lambda y: torch.stack(y.split(3, -1)), lambda a: torch.cat([*a], -1)),
    "stacked behind samples": (lambda y: torch.stack(y.chunk(2, -1), 1), lambda a: torch.cat(a.unbind(1), -1)),
    "split twice": (lambda y: torch.stack(y.split(3, -1)), lambda a: torch.cat(a.split(1), -1)[0]),
    "heads among samples": (lambda y: torch.cat(y.chunk(2, -1)), lambda a: torch.cat(a.chunk(2), -1)),
    "slices": (
        lambda y: torch.stack([y[..., :3], y[..., 3:]], -3),
        lambda a: torch.cat([a[:, 0], a[:, 1]], -1),
    ),
    "views, heads first": (
        lambda y: y.view(*y.shape[:2], 2, 3).permute(2, 0, 1, 3),
        lambda a: a.permute(1, 2, 0, 3).flatten(2),
    ),
}


def heads(
    cut: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], act: Callable[[Tensor], Tensor]
) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (cut[0](own(x)) for own in (s.q, s.k, s.v))
        read = cut[1]((q @ k.mT / 3**0.5).softmax(-1) @ v)
        return s.o(act(read + s.r(x)))  # type: ignore[no-any-return]

    return forward


# ---- recurrent cells whose norms read a state of zeros

STATES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "new_zeros": lambda s, x: x.new_zeros(len(x), 5),
    "product": lambda s, x: 0 * s.x(x[:, 0]),
}


def normed_cell(start: Callable[[Any, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = start(s, x)
        for step in range(x.shape[1]):
            h = torch.tanh(s.a(s.x(x[:, step])) + s.b(s.h(h)))
        return s.o(h)  # type: ignore[no-any-return]

    return forward


# ---- networks whose weights are outputs of layers: hypernetworks, edge networks, relation matrices


def target(z: Tensor, x: Tensor) -> Tensor:
    a, b, c, d = z.split([24, 4, 12, 3], -1)
    h = torch.relu(torch.einsum("boi,bi->bo", a.view(-1, 4, 6), x) + b)
    return torch.einsum("boi,bi->bo", c.view(-1, 3, 4), h) + d


def target_of_slices(z: Tensor, x: Tensor) -> Tensor:
    h = torch.relu(torch.bmm(z[:, :24].reshape(-1, 4, 6), x[..., None])[..., 0] + z[:, 24:28])
    return torch.bmm(z[:, 28:40].reshape(-1, 3, 4), h[..., None])[..., 0] + z[:, 40:]


def target_of_sums(z: Tensor, x: Tensor) -> Tensor:
    h = torch.relu((z[:, :24].unflatten(1, (4, 6)) * x[:, None]).sum(-1) + z[:, 24:28])
    return (z[:, 28:40].unflatten(1, (3, 4)) * h[:, None]).sum(-1) + z[:, 40:]


TARGETS = {"split": target, "slices": target_of_slices, "sums": target_of_sums}

MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda w, h: torch.einsum("boi,bi->bo", w.tanh().view(-1, 7, 3), h),
    "bmm": lambda w, h: torch.bmm(torch.tanh(w).view(-1, 7, 3), h[..., None])[..., 0],
    "matmul": lambda w, h: (w.view(-1, 7, 3).tanh() @ h[..., None]).flatten(1),
    "from the left": lambda w, h: (h[:, None] @ w.unflatten(1, (7, 3)).tanh().mT)[:, 0],
    "sum": lambda w, h: (w.tanh().unflatten(-1, (7, 3)) * h[:, None]).sum(2),
}

RELATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum": lambda a, r, b: torch.einsum("bi,bij,bj->b", a, r.view(-1, 3, 3), b),
    "sum": lambda a, r, b: (a * (r.unflatten(-1, (3, 3)) @ b[..., None])[..., 0]).sum(-1),
}


def triples(samples: int) -> tuple[Tensor, ...]:
    return (torch.randint(5, (samples, 3)),)


def edges(samples: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(samples, *shape, dtype=torch.float64) for shape in ((4, 8), (4, 4, 5)))


MESSAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda w, h: torch.einsum("bijuv,bjv->biu", w.unflatten(-1, (4, 3)), h),
    "sum": lambda w, h: (w.view(*w.shape[:3], 4, 3) * h[:, None, :, None]).sum((2, 4)),
}


# The weights of two layers, made by one.
GENERATED: dict[str, Callable[[Any, Tensor], Any]] = {
    "twice": lambda s, z: [s.g(own).view(-1, 4, 4) for own in (z, z.tanh())],
    "stacked": lambda s, z: s.g(torch.stack([z, z.tanh()], 1)).view(-1, 2, 4, 4).unbind(1),
}


def two_layers(makes: Callable[[Any, Tensor], Any]) -> Spelled:
    def forward(s: Any, x: Tensor, z: Tensor) -> Tensor:
        h = leaky(s.p(x))
        for w in makes(s, z):
            h = torch.tanh(torch.einsum("boi,bi->bo", w, h))
        return s.o(h)  # type: ignore[no-any-return]

    return forward


FAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda w, made: w + w * made,
    "addcmul": lambda w, made: torch.addcmul(w, w, made),
}

# Rows of weights that a layer makes of learned vectors.
LEARNED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "einsum": lambda s, x: torch.einsum("bi,koi->bko", x, s.g(s.e).view(5, 4, 6)),
    "loop": lambda s, x: torch.stack([F.linear(x, s.g(own).view(4, 6)) for own in s.e], 1),
}

# Kernels that a layer makes for each image.
FILTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "windows": lambda w, x: torch.einsum("bchwij,bocij->bohw", x.unfold(2, 2, 1).unfold(3, 2, 1), w),
    "loop": lambda w, x: torch.cat([F.conv2d(x[i : i + 1], w[i]) for i in range(len(w))]),
}

# Two layers make a matrix: one of them its rows, the other its columns.
STAGES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "einsum": lambda s, a, h: torch.einsum("bi,bio->bo", h, s.c(a.view(-1, 3, 4))),
    "sum": lambda s, a, h: (h[..., None] * (a.view(-1, 3, 4) @ s.c.weight.t() + s.c.bias)).sum(1),
}

# Shares of experts, of which the two best are chosen.
BEST: dict[str, Callable[[Tensor], Tensor]] = {
    "low numbers": lambda g: torch.full_like(g, -math.inf).scatter(-1, g.topk(2)[1], g.topk(2)[0]).softmax(-1),
    "least": lambda g: g.masked_fill(g < g.topk(2).values[..., -1:], -math.inf).softmax(-1),
    "not less": lambda g: torch.where(g >= g.topk(2, -1)[0][..., 1, None], g, -math.inf).softmax(-1),
    "one hot": lambda g: (F.one_hot(g.topk(2).indices, 3) * g.topk(2).values.softmax(-1)[..., None]).sum(-2),
}


def chosen(shares: Callable[[Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.relu(torch.einsum("bi,kji->bkj", x, s.u))
        return torch.einsum("bk,bkj,koj->bo", shares(s.g(x)), h, s.v)

    return forward


# Linear attention to earlier steps: q, k, v of shape (samples, heads, steps, units).
EARLIER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sums of columns": lambda q, k, v: ((v[..., None] * k[..., None, :]).cumsum(2) @ q[..., None])[..., 0],
    "mask": lambda q, k, v: (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), 0) @ v,
}


def linear_attention(read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (own.unflatten(-1, (2, 3)).transpose(1, 2) for own in (F.elu(s.q(x)), F.elu(s.k(x)), s.v(x)))
        return s.o(read(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return forward


# A rectifier of each unit and of its negative.
BOTH_SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda h: torch.cat([h.clamp(min=0), -h.clamp(max=0)], -1),
    "least": lambda h: torch.cat([h.clamp_min(0), h.neg().clamp_min(0)], -1),
    "sizes": lambda h: torch.cat([h.abs() + h, h.abs() - h], -1) / 2,
}

# Squared distances of values and codes.
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "differences": lambda h, c: (h[:, None] - c).square().sum(-1),
    "cdist": lambda h, c: torch.cdist(h, c) ** 2,
    "negative": lambda h, c: -(2 * h @ c.mT - c.pow(2).sum(1) - h.pow(2).sum(1, keepdim=True)),
    "einsum": lambda h, c: h.pow(2).sum(1, keepdim=True) + c.pow(2).sum(1) - 2 * torch.einsum("bi,ki->bk", h, c),
}


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one hot": lambda s, kind: s.e(F.one_hot(kind, 3).double()),
    "index": lambda s, kind: s.e.weight.mT[kind] + s.e.bias,
    "embedding": lambda s, kind: F.embedding(kind, s.e.weight.mT + s.e.bias),
}


PUBLISHED: dict[str, Function] = {
    "rectifiers of both signs": Function({"a": of(L, 6, 4), "b": of(L, 8, 5)}, vectors, 4,
        each(BOTH_SIGNS, lambda both: lambda s, x: s.b(both(s.a(x)))), samples=100),
    "the best of experts": Function({"g": of(L, 6, 3), "u": parameter(3, 4, 6), "v": parameter(3, 5, 4)}, vectors, 19,
        each(BEST, chosen), samples=200),
    "linear attention to earlier steps": Function({name: of(L, 8, 6) for name in "qkv"} | {"o": of(L, 6, 5)},
        steps(8, 6), 18, each(EARLIER, linear_attention), samples=60),
    "two layers from one": Function({"p": of(L, 6, 4), "g": of(L, 5, 16), "o": of(L, 4, 3)}, two_vectors, 0,
        each(GENERATED, two_layers), samples=80),
    "fast weights": Function({"w": parameter(4, 6), "g": of(L, 5, 24), "o": of(L, 4, 3)}, two_vectors, 24, each(FAST,
        lambda made: lambda s, x, z: s.o(torch.tanh(torch.einsum("boi,bi->bo", made(s.w, s.g(z).view(-1, 4, 6)), x)))),
        samples=100),
    "weights of learned vectors": Function({"e": parameter(5, 3), "g": of(L, 3, 24), "o": of(L, 4, 3)}, vectors, 12,
        each(LEARNED, lambda made: lambda s, x: s.o(torch.tanh(made(s, x)))), samples=80),
    "kernels that a layer makes": Function({"p": of(C, 2, 3, 1), "g": of(L, 5, 48), "o": of(C, 4, 2, 1)},
        image_and_vector, 0, each(FILTERS, lambda made: lambda s, x, z: s.o(torch.tanh(made(s.g(z).view(-1, 4, 3, 2, 2),
        torch.tanh(s.p(x)))))), samples=80),
    "matrices that two layers make": Function({"p": of(L, 6, 3), "a": of(L, 5, 12), "c": of(L, 4, 4),
        "o": of(L, 4, 3)}, two_vectors, 0, each(STAGES,
        lambda made: lambda s, x, z: s.o(torch.tanh(made(s, torch.tanh(s.a(z)), torch.tanh(s.p(x)))))), samples=80),
    "ones beside inputs": Function({"a": of(L, 7, 5, bias=False), "n": of(nn.LayerNorm, 5), "o": of(L, 5, 6)}, vectors,
        29, each(ONES, lambda join: lambda s, x: s.o(s.n(s.a(join(x)))))),
    "times of a solver": Function({"i": of(L, 6, 4), "a": of(L, 5, 5), "b": of(L, 5, 4), "o": of(L, 4, 6)}, vectors,
        24, each(TIMES, solved)),
    "positions beside units": Function({"i": of(L, 6, 5), "a": of(L, 7, 5), "b": of(L, 5, 6)}, steps(6), 30, each(
        PLACED, lambda join: lambda s, x: s.b(torch.tanh(s.a(join(s.i(x))))))),
    "two values in one": Function({"a": of(L, 6, 4), "c": of(L, 5, 3), "b": of(L, 7, 8)}, two_vectors, 32, each(BOTH,
        lambda join: lambda s, x, y: s.b(join(s.a(x), s.c(y))))),
    "decoder of states": Function({"e": of(L, 6, 4), "w": of(L, 8, 16), "o": of(L, 4, 6)}, steps(6), 0, each(DECODERS,
        decoded), samples=60),
    "minimal gated unit": Function({"z": of(L, 10, 4), "n": of(L, 10, 4), "o": of(L, 4, 6)}, steps(6), 0, each(MINIMAL,
        gated), samples=60),
    "bilinear pooling": Function({"a": of(L, 6, 12), "b": of(L, 5, 12), "o": of(L, 4, 5)}, two_vectors, 40,
        each(POOLED, lambda pool: lambda s, x, y: s.o(pool(s.a(x), s.b(y)))), samples=80),
    "members with gains": Function({"a": of(L, 6, 5), "r": parameter(3, 5), "t": parameter(3, 5), "b": of(L, 5, 4),
        "u": parameter(3, 4)}, vectors, 29, each(MEMBERS, lambda layer: layer)),
    "a layer between gains of members": Function({"a": of(L, 6, 5), "r": parameter(3, 5), "b": of(L, 5, 5),
        "o": of(L, 5, 4)}, steps(6), 15, each(TWICE, lambda layer: layer)),
    "factorisation machine": Function({"v": parameter(6, 3), "l": of(L, 6, 1)}, vectors, 3, each(SECOND, machine)),
    "relation matrices": Function({"e": of(nn.Embedding, 5, 3), "r": of(nn.Embedding, 5, 9)}, triples, 9,
        each(RELATIONS, lambda score: lambda s, t: score(s.e(t[:, 0]), s.r(t[:, 1]), s.e(t[:, 2]))), samples=400),
    "edge network": Function({"e": of(L, 5, 12), "p": of(L, 8, 3), "o": of(L, 4, 6)}, edges, 7,
        each(MESSAGES, lambda sent: lambda s, x, a: s.o(torch.relu(sent(s.e(a), leaky(s.p(x))))))),
    "norms of a state of zeros": Function({"x": of(L, 6, 5, bias=False), "h": of(L, 5, 5, bias=False),
        "a": of(nn.LayerNorm, 5), "b": of(nn.LayerNorm, 5), "o": of(L, 5, 4)}, steps(6), 16,
        each(STATES, normed_cell)),
}  # fmt: skip
