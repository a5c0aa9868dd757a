"""Functions in many spellings: the group depends on the function, not on how it is written.

All spellings of a function have the same parts, so that they compute the same; its nullity is that of its Jacobian at
generic weights, at sizes where no layer is degenerate (inputs are wider than layers).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import Program, of, parameter
from spelled_layers import BATCH_NORM, CONVOLUTION, GROUP_NORM, HALVES, LAYER_NORM, LINEAR, PAIRS, RMS_NORM
from torch import Tensor, nn
from torch.nn import functional as F

L = nn.Linear
Spelled = Callable[..., Tensor]


@dataclass(frozen=True)
class Function:
    """A function of weights and inputs, and how it may be written."""

    parts: dict[str, Any]  # what all spellings are made of, by name
    inputs: Callable[[int], tuple[Tensor, ...]]  # makes inputs, from the number of samples
    nullity: int  # the nullity of the Jacobian
    # by name, what computes the function from the parts (a network that holds them) and inputs
    spellings: dict[str, Spelled]
    samples: int = 40  # the number of samples that determine the Jacobian's rank

    def network(self, spelling: str) -> nn.Module:
        """Make the network in a spelling, always with the same generic weights, in float64."""
        torch.manual_seed(1)
        network = Program(self.spellings[spelling], self.parts).double().eval()
        torch.manual_seed(2)
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(0.5 * torch.randn_like(weight))
            for name, buffer in network.named_buffers():
                if name.endswith(("mean", "var")):
                    buffer.uniform_(0.5, 1.5)
        return network


def steps(width: int, length: int = 3) -> Callable[[int], tuple[Tensor, ...]]:
    """Return what makes random sequences of vectors."""
    return lambda samples: (torch.randn(samples, length, width, dtype=torch.float64),)


def tokens(samples: int) -> tuple[Tensor, ...]:
    """Make random sequences of 3 tokens of 9."""
    return (torch.randint(9, (samples, 3)),)


# ---- attention


CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def qkv(s: Any, x: Tensor) -> list[Tensor]:
    return [heads_of(layer(x)) for layer in (s.q, s.k, s.v)]


def attention(weigh: Callable[[Tensor], Tensor]) -> Spelled:
    """Return attention whose weights are computed in some way from the scaled products of queries and keys."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = qkv(s, x)
        return s.o(joined(weigh(q @ k.mT / math.sqrt(q.shape[-1])) @ v))

    return forward


def hidden(z: Tensor) -> Tensor:
    return z.masked_fill(~CAUSAL, -math.inf)


def ratio(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def added(z: Tensor, least: float = -math.inf) -> Tensor:
    return z + torch.zeros(3, 3, dtype=z.dtype).masked_fill(~CAUSAL, least)


def defined(p: Tensor) -> Tensor:
    return torch.where(p.isnan(), torch.zeros_like(p), p)


def fused(**mask: Any) -> Spelled:
    return lambda s, x: s.o(joined(F.scaled_dot_product_attention(*qkv(s, x), **mask)))


def attention_of_packed_weights(s: Any, x: Tensor) -> Tensor:
    layers = (s.q, s.k, s.v)
    mixed = F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers]))
    q, k, v = mixed.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return s.o(joined(hidden(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v))


ATTENTION: dict[str, Spelled] = {
    "filled if not a number": attention(lambda z: (p := hidden(z).softmax(-1)).masked_fill(p.isnan(), 0.0)),
    "exp over sum": attention(lambda z: ratio(hidden(z).exp())),
    "exp over sum, stable": attention(lambda z: ratio((hidden(z) - hidden(z).amax(-1, keepdim=True)).exp())),
    "exp of a triangle": attention(lambda z: ratio(z.exp().tril())),
    "packed weights": attention_of_packed_weights,
    "fused, mask": fused(attn_mask=CAUSAL),
}


def padded(weigh: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    """Return attention of keys of which an input says whether they count."""

    def forward(s: Any, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = qkv(s, x)
        return s.o(joined(weigh(q @ k.mT / math.sqrt(q.shape[-1]), keep[:, None, None]) @ v))

    return forward


PADDED: dict[str, Spelled] = {
    "added mask": padded(lambda z, keep: (z + torch.zeros_like(z).masked_fill(~keep, -math.inf)).softmax(-1)),
    "exp where": padded(lambda z, keep: ratio(torch.where(keep, z.exp(), 0.0))),
    "softmax, filled": padded(lambda z, keep: ratio(z.softmax(-1).masked_fill(~keep, 0.0))),
}


def with_padding(samples: int) -> tuple[Tensor, ...]:
    keep = torch.rand(samples, 3) < 0.6
    keep[:, 0] = True
    return (*steps(6)(samples), keep)


def rotary(turn: Callable[[Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = qkv(s, x)
        return s.o(joined(F.scaled_dot_product_attention(turn(q), turn(k), v)))

    return forward


# ---- gated layers, residual streams, embeddings, pooling, cosines


def of_parts(s: Any) -> tuple[Tensor, Tensor]:
    return torch.cat([s.gate.weight, s.up.weight]), torch.cat([s.gate.bias, s.up.bias])


def unbound(s: Any, x: Tensor) -> Tensor:
    gate, up = F.linear(x, *of_parts(s)).unflatten(-1, (2, -1)).unbind(-2)
    return s.down(F.silu(gate) * up)


def split(s: Any, x: Tensor) -> Tensor:
    gate, up = F.linear(x, *of_parts(s)).split(6, -1)
    return s.down(F.silu(gate).mul(up))


GATED: dict[str, Spelled] = {
    "glu": lambda s, x: s.down(F.glu(torch.cat([s.up(x), s.gate(x)], -1)) * s.gate(x)),
    "quotient": lambda s, x: s.down(s.gate(x) * s.up(x) / (1 + torch.exp(-s.gate(x)))),
    "joined": lambda s, x: s.down(torch.cat([F.silu(s.gate(x))[None], s.up(x)[None]]).prod(0)),
}


def residual(join: Callable[[Tensor, Tensor, Any], Tensor]) -> Spelled:
    """Return a stream to which a layer's outputs are added behind a gain."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.i(x)
        x = join(x, torch.tanh(s.u(s.n1(x))), s)
        return s.h(s.n2(x))

    return forward


def in_place(x: Tensor, y: Tensor, s: Any) -> Tensor:
    x = x.clone()
    x += s.g * s.v(y)
    return x


RESIDUAL: dict[str, Spelled] = {
    "plus": residual(lambda x, y, s: x + s.g * s.v(y)),
    "minus": residual(lambda x, y, s: x - (-s.g) * s.v(y)),
    "alpha": residual(lambda x, y, s: torch.add(x, s.v(y) * s.g / 2, alpha=2)),
    "in place": residual(in_place),
    "folded gain": residual(lambda x, y, s: x + F.linear(y, s.g[:, None] * s.v.weight, s.g * s.v.bias)),
    "diagonal": residual(lambda x, y, s: x + F.linear(y, torch.diag(s.g) @ s.v.weight, s.g * s.v.bias)),
    "negative bias": residual(lambda x, y, s: x - (-s.g * s.v.bias) + s.g * F.linear(y, s.v.weight)),
}  # fmt: skip


def embedded(read: Callable[[Any, Tensor], Tensor]) -> Spelled:
    """Return a norm and a linear layer of tokens and positions."""
    return lambda s, i: s.b(s.n(read(s, i)))


EMBEDDED: dict[str, Spelled] = {
    "index": embedded(lambda s, i: s.e.weight[i] + s.p[torch.arange(i.shape[1])]),
    "index_select": embedded(lambda s, i: s.e.weight.index_select(0, i.flatten()).view(*i.shape,
        -1) + s.p[: i.shape[1]]),
    "gather": embedded(lambda s, i: s.e.weight.expand(len(i), -1, -1).gather(1,
        i[..., None].expand(-1, -1, 5)) + s.p[: i.shape[1]]),
    "stack": embedded(lambda s, i: torch.stack([s.e(i[:, t]) + s.p[t] for t in range(i.shape[1])], 1)),
}  # fmt: skip


def pooled(pool: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(pool(s.n(s.a(x))))


POOLED: dict[str, Spelled] = {
    "adaptive": pooled(lambda h: F.adaptive_avg_pool1d(h.mT, 1)[..., 0]),
    "avg_pool1d": pooled(lambda h: F.avg_pool1d(h.mT, h.shape[1]).flatten(1)),
    "image": pooled(lambda h: F.adaptive_avg_pool2d(h.mT[..., None], 1).flatten(1)),
    "matmul": pooled(lambda h: (torch.full((1, 3), 1 / 3, dtype=h.dtype) @ h)[:, 0]),
    "products": pooled(lambda h: (h * torch.full((3, 1), 1 / 3, dtype=h.dtype)).sum(1)),
    "mean of chunks": pooled(lambda h: torch.stack([part.mean(1) for part in h.split(1, 1)]).mean(0)),
}


def cosine(compare: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.t * compare(s.a(x), s.w)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


COSINE: dict[str, Spelled] = {
    "cosine_similarity": cosine(lambda h, w: F.cosine_similarity(h[..., None, :], w, -1, 1e-12)),
    "divided later": cosine(lambda h, w: h @ w.T / torch.linalg.vector_norm(h, dim=-1, keepdim=True) / w.norm(dim=1)),
}  # fmt: skip


# ---- functions


def statistics(s: Any) -> tuple[Tensor, ...]:
    n = s.n
    return n.running_mean, n.running_var, n.weight, n.bias


def each(table: dict[str, Any], spell: Callable[[Any], Spelled]) -> dict[str, Spelled]:
    return {name: spell(entry) for name, entry in table.items()}


def layers(how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    """Return two linear layers in a row, tanh and a third one, all written in one way."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = how(how(x, s.a.weight, s.a.bias), s.m.weight, s.m.bias)
        return how(torch.tanh(h), s.b.weight, s.b.bias)

    return forward


def around_a_norm(how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: how(s.n(how(x, s.a.weight, s.a.bias)), s.b.weight, s.b.bias)


def convolutions(how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: how(s.n(how(x, s.a.weight, s.a.bias)), s.b.weight, s.b.bias)


HEADS = {"q": of(L, 6, 4), "k": of(L, 6, 4), "v": of(L, 6, 4), "o": of(L, 4, 6)}
WIDE_HEADS = {"q": of(L, 10, 8), "k": of(L, 10, 8), "v": of(L, 10, 8), "o": of(L, 8, 6)}
MIDDLE = {"a": of(L, 8, 6), "n": of(nn.LayerNorm, 6), "b": of(L, 6, 7)}
FUNCTIONS: dict[str, Function] = {
    "linear": Function({"a": of(L, 8, 4), "m": of(L, 4, 6), "b": of(L, 6, 3)}, steps(8), 20, each(LINEAR, layers)),
    "linear around a layer norm": Function(MIDDLE, steps(8), 38, each(LINEAR, around_a_norm)),
    "layer norm": Function(MIDDLE, steps(8), 38,
        each(LAYER_NORM, lambda how: lambda s, x: s.b(how(s.a(x), s.n.weight, s.n.bias, s.n.eps)))),
    "rms norm": Function({"a": of(L, 8, 6), "g": parameter(6), "b": of(L, 6, 7)}, steps(8), 21,
        each(RMS_NORM, lambda how: lambda s, x: s.b(how(s.a(x), s.g, 1e-5)))),
    "group norm": Function({"a": of(L, 8, 6), "n": of(nn.GroupNorm, 2, 6), "b": of(L, 6, 8)}, steps(8), 48,
        each(GROUP_NORM, lambda how: lambda s, x: s.b(how(s.a(x), s.n.weight, s.n.bias, s.n.eps)))),
    "batch norm": Function({"a": of(L, 8, 6), "n": of(nn.BatchNorm1d, 6), "b": of(L, 6, 4)}, steps(8), 12,
        each(BATCH_NORM, lambda how: lambda s, x: s.b(torch.tanh(how(s.a(x),
        *statistics(s))))) | {}),
    "convolution": Function({"a": of(nn.Conv2d, 2, 4, 3), "n": of(nn.GroupNorm, 1, 4), "b": of(nn.Conv2d, 4, 2, 3)},
        lambda samples: (torch.randn(samples, 2, 6, 6, dtype=torch.float64),), 12, each(CONVOLUTION, convolutions)),
    "attention, causal": Function(HEADS, steps(6), 24, ATTENTION),
    "attention, padded": Function(HEADS, with_padding, 24, PADDED),
    "rotary, halves": Function(WIDE_HEADS, steps(10), 48, each(HALVES, rotary), samples=60),
    "rotary, pairs": Function(WIDE_HEADS, steps(10), 48, each(PAIRS, rotary), samples=60),
    "gated": Function({"gate": of(L, 8, 6), "up": of(L, 8, 6), "down": of(L, 6, 4)}, steps(8), 6, GATED),
    "residual": Function({"i": of(L, 7, 5), "n1": of(nn.LayerNorm, 5), "u": of(L, 5, 4), "v": of(L, 4, 5),
        "g": parameter(5), "n2": of(nn.LayerNorm, 5), "h": of(L, 5, 6)}, steps(7), 54, RESIDUAL),
    "embedding and positions": Function({"e": of(nn.Embedding, 9, 5), "p": parameter(3, 5), "n": of(nn.LayerNorm, 5),
        "b": of(L, 5, 6)}, tokens, 38, EMBEDDED, samples=200),
    "pooling": Function(MIDDLE, steps(8), 38, POOLED, samples=60),
    "cosine": Function({"a": of(L, 8, 4), "w": parameter(6, 4), "t": parameter()}, steps(8), 13, COSINE),
}  # fmt: skip
