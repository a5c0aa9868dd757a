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


def attention_by_einsum(s: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(s, x)
    weights = hidden(torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    return s.o(torch.einsum("bhqk,bhke->bqhe", weights, v).flatten(2))


def attention_head_by_head(s: Any, x: Tensor) -> Tensor:
    read = []
    for q, k, v in zip(*(layer(x).chunk(2, -1) for layer in (s.q, s.k, s.v)), strict=True):
        read.append(hidden(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)
    return s.o(torch.cat(read, -1))


def attention_over_the_sum(s: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(s, x)
    e = hidden(q @ k.mT / math.sqrt(q.shape[-1])).exp()
    return s.o(joined((e @ v) / e.sum(-1, keepdim=True)))


def attention_over_a_sum_of_less_rank(s: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(s, x)
    e = torch.einsum("bhqe,bhke->bhqk", q, k / math.sqrt(q.shape[-1])).exp() * CAUSAL
    return s.o(joined((e @ v) / torch.einsum("bhqk->bhq", e)[..., None]))


def written(z: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    z = z.clone()
    z[:, :, *places] = -math.inf
    return z


def attention_of_a_stack_of_heads(s: Any, x: Tensor) -> Tensor:
    parts = [layer(x).unflatten(-1, (2, 2)).unbind(-2) for layer in (s.q, s.k, s.v)]
    read = [F.scaled_dot_product_attention(*head, is_causal=True) for head in zip(*parts, strict=True)]
    return s.o(torch.stack(read, -2).flatten(-2))


def attention_of_packed_weights(s: Any, x: Tensor) -> Tensor:
    layers = (s.q, s.k, s.v)
    mixed = F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers]))
    q, k, v = mixed.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return s.o(joined(hidden(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v))


def attention_by_batches(s: Any, x: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in qkv(s, x))
    start = torch.zeros(3, 3, dtype=x.dtype).masked_fill(~CAUSAL, -math.inf)
    weights = torch.baddbmm(start, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
    return s.o(joined(torch.bmm(weights, v).unflatten(0, (-1, 2))))


ATTENTION: dict[str, Spelled] = {
    "masked_fill": attention(lambda z: hidden(z).softmax(-1)),
    "where": attention(lambda z: torch.where(CAUSAL, z, -math.inf).softmax(-1)),
    "where a number": attention(lambda z: defined(hidden(z).softmax(-1))),
    "filled if not a number": attention(lambda z: (p := hidden(z).softmax(-1)).masked_fill(p.isnan(), 0.0)),
    "added mask": attention(lambda z: added(z).softmax(-1)),
    "least number": attention(lambda z: added(z, torch.finfo(z.dtype).min).softmax(-1)),
    "exp over sum": attention(lambda z: ratio(hidden(z).exp())),
    "exp over sum, stable": attention(lambda z: ratio((hidden(z) - hidden(z).amax(-1, keepdim=True)).exp())),
    "exp times mask": attention(lambda z: ratio(z.exp() * CAUSAL)),
    "log_softmax": attention(lambda z: hidden(z).log_softmax(-1).exp()),
    "logsumexp": attention(lambda z: (hidden(z) - hidden(z).logsumexp(-1, keepdim=True)).exp()),
    "einsum": attention_by_einsum,
    "exp of a triangle": attention(lambda z: ratio(z.exp().tril())),
    "head by head": attention_head_by_head,
    "stack of heads": attention_of_a_stack_of_heads,
    "product over sum": attention_over_the_sum,
    "product over sum of less rank": attention_over_a_sum_of_less_rank,
    "gpt1": attention(lambda z: (z * CAUSAL.to(z) - 1e10 * (1 - CAUSAL.to(z))).softmax(-1)),
    "written entries": attention(lambda z: written(z, (~CAUSAL).nonzero(as_tuple=True)).softmax(-1)),
    "written by a mask": attention(lambda z: written(z, (~CAUSAL,)).softmax(-1)),
    "defined product": lambda s, x: s.o(
        torch.nan_to_num(joined(F.scaled_dot_product_attention(*qkv(s, x), attn_mask=CAUSAL)))
    ),
    "packed weights": attention_of_packed_weights,
    "batches": attention_by_batches,
    "fused": fused(is_causal=True),
    "math": lambda s, x: s.o(
        joined(
            torch.ops.aten._scaled_dot_product_attention_math(*qkv(s, x), hidden(torch.zeros(3, 3, dtype=x.dtype)))[0]
        )
    ),
    "flash": lambda s, x: s.o(
        joined(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv(s, x), 0.0, True)[0])
    ),
    "fused, mask": fused(attn_mask=CAUSAL),
    "fused, added mask": fused(attn_mask=torch.zeros(3, 3, dtype=torch.float64).masked_fill(~CAUSAL, -math.inf)),
}


def padded(weigh: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    """Return attention of keys of which an input says whether they count."""

    def forward(s: Any, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = qkv(s, x)
        return s.o(joined(weigh(q @ k.mT / math.sqrt(q.shape[-1]), keep[:, None, None]) @ v))

    return forward


def padded_fused(s: Any, x: Tensor, keep: Tensor) -> Tensor:
    return s.o(joined(F.scaled_dot_product_attention(*qkv(s, x), attn_mask=keep[:, None, None])))


PADDED: dict[str, Spelled] = {
    "masked_fill": padded(lambda z, keep: z.masked_fill(~keep, -math.inf).softmax(-1)),
    "where": padded(lambda z, keep: torch.where(keep, z, -math.inf).softmax(-1)),
    "least number": padded(lambda z, keep: z.masked_fill(~keep, torch.finfo(z.dtype).min).softmax(-1)),
    "added product": padded(lambda z, keep: (z + (1 - keep.to(z)) * torch.finfo(z.dtype).min).softmax(-1)),
    "added mask": padded(lambda z, keep: (z + torch.zeros_like(z).masked_fill(~keep, -math.inf)).softmax(-1)),
    "exp over sum": padded(lambda z, keep: ratio(z.masked_fill(~keep, -math.inf).exp())),
    "exp times mask": padded(lambda z, keep: ratio(z.exp() * keep)),
    "exp where": padded(lambda z, keep: ratio(torch.where(keep, z.exp(), 0.0))),
    "stable exp times mask": padded(lambda z, keep: ratio((z - z.amax(-1, keepdim=True)).exp() * keep)),
    "softmax, filled": padded(lambda z, keep: ratio(z.softmax(-1).masked_fill(~keep, 0.0))),
    "softmax times mask": padded(lambda z, keep: ratio(z.softmax(-1) * keep)),
    "log of mask": padded(lambda z, keep: (z + keep.to(z).log()).softmax(-1)),
    "mask of each head": padded(lambda z, keep: z.masked_fill(~keep.expand_as(z), -math.inf).softmax(-1)),
    "fused": padded_fused,
    "fused, mask of each head": lambda s, x, keep: s.o(
        joined(F.scaled_dot_product_attention(*qkv(s, x), attn_mask=keep[:, None, None].expand(-1, 2, 3, -1)))
    ),
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
    "silu": lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)),
    "sigmoid": lambda s, x: s.down(s.gate(x) * torch.sigmoid(s.gate(x)) * s.up(x)),
    "order": lambda s, x: s.down(s.up(x) * s.gate(x) * torch.sigmoid(s.gate(x))),
    "glu": lambda s, x: s.down(F.glu(torch.cat([s.up(x), s.gate(x)], -1)) * s.gate(x)),
    "unbind": unbound,
    "split": split,
    "einsum": lambda s, x: torch.einsum("btu,btu,ou->bto", F.silu(s.gate(x)), s.up(x), s.down.weight) + s.down.bias,
    "quotient": lambda s, x: s.down(s.gate(x) * s.up(x) / (1 + torch.exp(-s.gate(x)))),
    "stack": lambda s, x: s.down(torch.stack([F.silu(s.gate(x)), s.up(x)]).prod(0)),
    "joined": lambda s, x: s.down(torch.cat([F.silu(s.gate(x))[None], s.up(x)[None]]).prod(0)),
    "addcmul": lambda s, x: s.down(torch.addcmul(torch.zeros_like(s.up(x)), F.silu(s.gate(x)), s.up(x))),
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
    "add": residual(lambda x, y, s: torch.add(s.v(y) * s.g, x)),
    "minus": residual(lambda x, y, s: x - (-s.g) * s.v(y)),
    "addcmul": residual(lambda x, y, s: torch.addcmul(x, s.g, s.v(y))),
    "alpha": residual(lambda x, y, s: torch.add(x, s.v(y) * s.g / 2, alpha=2)),
    "stack": residual(lambda x, y, s: torch.stack([x, s.g * s.v(y)]).sum(0)),
    "sum": residual(lambda x, y, s: sum([x, s.g * s.v.bias, s.g * F.linear(y, s.v.weight)])),
    "in place": residual(in_place),
    "folded gain": residual(lambda x, y, s: x + F.linear(y, s.g[:, None] * s.v.weight, s.g * s.v.bias)),
    "baddbmm": residual(lambda x, y, s: torch.baddbmm(x, y,
        (s.g[:, None] * s.v.weight).T.expand(len(x), -1, -1)) + s.g * s.v.bias),
    "einsum": residual(lambda x, y, s: x + torch.einsum("btd,d->btd", s.v(y), s.g)),
    "einsum of three": residual(lambda x, y, s: x + torch.einsum("bti,oi,o->bto", y, s.v.weight, s.g) + s.g * s.v.bias),
    "diagonal": residual(lambda x, y, s: x + F.linear(y, torch.diag(s.g) @ s.v.weight, s.g * s.v.bias)),
    "negative bias": residual(lambda x, y, s: x - (-s.g * s.v.bias) + s.g * F.linear(y, s.v.weight)),
    "folded conv1d": residual(lambda x, y, s: x + F.conv1d(y.mT, (s.g[:, None] * s.v.weight)[..., None],
        s.g * s.v.bias).mT),
    "view": residual(lambda x, y, s: x.view_as(x) + (s.g * s.v(y)).reshape(x.shape)),
}  # fmt: skip


def embedded(read: Callable[[Any, Tensor], Tensor]) -> Spelled:
    """Return a norm and a linear layer of tokens and positions."""
    return lambda s, i: s.b(s.n(read(s, i)))


EMBEDDED: dict[str, Spelled] = {
    "slice": embedded(lambda s, i: s.e(i) + s.p[: i.shape[1]]),
    "lookup": embedded(lambda s, i: s.e(i) + F.embedding(torch.arange(i.shape[1]), s.p)),
    "lookup of an axis more": embedded(lambda s, i: s.e(i) + F.embedding(torch.arange(i.shape[1])[None], s.p)),
    "index": embedded(lambda s, i: s.e.weight[i] + s.p[torch.arange(i.shape[1])]),
    "index_select": embedded(lambda s, i: s.e.weight.index_select(0, i.flatten()).view(*i.shape,
        -1) + s.p[: i.shape[1]]),
    "narrow": embedded(lambda s, i: s.p.narrow(0, 0, i.shape[1]) + s.e(i)),
    "expanded": embedded(lambda s, i: s.e(i).add(s.p[None, : i.shape[1]].expand(len(i), -1, -1))),
    "one hot": embedded(lambda s, i: F.one_hot(i, 9).to(s.p) @ s.e.weight + s.p[: i.shape[1]]),
    "gather": embedded(lambda s, i: s.e.weight.expand(len(i), -1, -1).gather(1,
        i[..., None].expand(-1, -1, 5)) + s.p[: i.shape[1]]),
    "rows of a unit matrix": embedded(lambda s, i: torch.eye(9, dtype=s.p.dtype)[i] @ s.e.weight + s.p[: i.shape[1]]),
    "comparisons": embedded(lambda s, i: (i[..., None] == torch.arange(9)).to(s.p) @ s.e.weight + s.p[: i.shape[1]]),
    "scattered": embedded(lambda s, i: torch.zeros(*i.shape, 9, dtype=s.p.dtype).scatter_(2, i[..., None], 1.0)
        @ s.e.weight + s.p[: i.shape[1]]),
    "taken": embedded(lambda s, i: torch.take_along_dim(s.e.weight[None], i[..., None], 1) + s.p[: i.shape[1]]),
    "steps first": embedded(lambda s, i: (s.e(i.T) + s.p[: i.shape[1], None]).transpose(0, 1)),
    "stack": embedded(lambda s, i: torch.stack([s.e(i[:, t]) + s.p[t] for t in range(i.shape[1])], 1)),
}  # fmt: skip


def pooled(pool: Callable[[Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.b(pool(s.n(s.a(x))))


POOLED: dict[str, Spelled] = {
    "mean": pooled(lambda h: h.mean(1)),
    "sum": pooled(lambda h: h.sum(1) / h.shape[1]),
    "adaptive": pooled(lambda h: F.adaptive_avg_pool1d(h.mT, 1)[..., 0]),
    "avg_pool1d": pooled(lambda h: F.avg_pool1d(h.mT, h.shape[1]).flatten(1)),
    "image": pooled(lambda h: F.adaptive_avg_pool2d(h.mT[..., None], 1).flatten(1)),
    "einsum": pooled(lambda h: torch.einsum("btd,t->bd", h, torch.full((3,), 1 / 3, dtype=h.dtype))),
    "matmul": pooled(lambda h: (torch.full((1, 3), 1 / 3, dtype=h.dtype) @ h)[:, 0]),
    "stack": pooled(lambda h: sum(h.unbind(1)) / 3),
    "products": pooled(lambda h: (h * torch.full((3, 1), 1 / 3, dtype=h.dtype)).sum(1)),
    "loop": pooled(lambda h: (h[:, 0] + (h[:, 1] + h[:, 2])) * (1 / 3)),
    "mean of chunks": pooled(lambda h: torch.stack([part.mean(1) for part in h.split(1, 1)]).mean(0)),
}


def cosine(compare: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.t * compare(s.a(x), s.w)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


COSINE: dict[str, Spelled] = {
    "normalize": cosine(lambda h, w: F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).T),
    "linear": cosine(lambda h, w: F.linear(F.normalize(h, dim=-1), F.normalize(w))),
    "cosine_similarity": cosine(lambda h, w: F.cosine_similarity(h[..., None, :], w, -1, 1e-12)),
    "norm": cosine(lambda h, w: unit(h) @ unit(w).T),
    "squares": cosine(lambda h, w: (h * torch.rsqrt(h.square().sum(-1, keepdim=True))) @ (w / w.pow(2).sum(1,
        True).sqrt()).T),
    "divided later": cosine(lambda h, w: h @ w.T / torch.linalg.vector_norm(h, dim=-1, keepdim=True) / w.norm(dim=1)),
    "einsum": cosine(lambda h, w: torch.einsum("btd,od->bto", unit(h), unit(w))),
    "rms_norm": cosine(lambda h, w: F.rms_norm(h, (4,), eps=0.0) @ F.rms_norm(w, (4,), eps=0.0).T / 4),
    "outer norms": cosine(lambda h, w: (h @ w.T) / (h.norm(dim=-1)[..., None] * w.norm(dim=-1))),
}  # fmt: skip


# ---- functions


def statistics(s: Any) -> tuple[Tensor, ...]:
    n = s.n
    return n.running_mean, n.running_var, n.weight, n.bias


def folded_batch_norm(s: Any, x: Tensor) -> Tensor:
    m, v, g, b = statistics(s)
    gain = g / torch.sqrt(v + s.n.eps)
    return s.b(torch.tanh(F.linear(x, s.a.weight * gain[:, None], (s.a.bias - m) * gain + b)))


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
        *statistics(s))))) | {"folded into the layer": folded_batch_norm}),
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
