"""Attention as torch's module spells it: masks on the axis of samples and heads, packed weights.

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


def fused_over_both(mask: Callable[[Tensor, int], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor, m: Tensor) -> Tensor:
        q, k, v = (flattened(layer(x)) for layer in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(m, len(x)))
        return s.o(y.view(len(x), COUNT, STEPS, SIZE).transpose(1, 2).flatten(2))

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
    "repeated": merged(lambda m, n: m[:, None].repeat(1, COUNT, 1, 1).flatten(0, 1)),
    "repeated one by one": merged(lambda m, n: m.repeat_interleave(COUNT, 0)),
    "stacked": merged(lambda m, n: torch.stack([m] * COUNT, 1).flatten(0, 1)),
    "joined": merged(lambda m, n: torch.cat([m[:, None]] * COUNT, 1).reshape(-1, STEPS, STEPS)),
    "added": added,
    "fused over both": fused_over_both(lambda m, n: m.repeat_interleave(COUNT, 0)),
    "indexed": merged(lambda m, n: m[torch.arange(n).repeat_interleave(COUNT)]),
}
OF_HEADS: dict[str, Spelled] = {
    "fused": fused(lambda m: m[None]),
    "repeated": merged(lambda m, n: m.repeat(n, 1, 1)),
    "expanded": merged(lambda m, n: m.expand(n, -1, -1, -1).reshape(-1, STEPS, STEPS)),
    "expanded, as torch": merged(lambda m, n: m.expand(n, -1, -1, -1).flatten(0, 1), as_torch),
    "fused over both": fused_over_both(lambda m, n: m.repeat(n, 1, 1)),
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


def by_torch(s: Any, x: Tensor) -> Tensor:
    hidden, learned = torch.tanh(s.x(x)).transpose(0, 1), s.i[:, None].expand(-1, len(x), -1)
    given = learned, hidden, hidden, 4, 2, s.w, s.b, None, None, False, 0.0, s.o.weight, s.o.bias
    return F.multi_head_attention_forward(*given)[0].transpose(0, 1)


CUTS: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda s: zip(s.w.chunk(3), s.b.chunk(3), strict=True),
    "slices": lambda s: [(s.w[:4], s.b[:4]), (s.w[4:8], s.b[4:8]), (s.w[8:], s.b[8:])],
    "unflatten": lambda s: zip(s.w.view(3, 4, 4), s.b.view(3, 4), strict=True),
}
EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expanded": lambda i, x: i.expand(len(x), -1, -1),
    "repeated": lambda i, x: i[None].repeat(len(x), 1, 1),
    "stacked": lambda i, x: torch.stack([i] * len(x)),
}
LEARNED: dict[str, Spelled] = {
    f"{cut}, {how}": packed(CUTS[cut], EXPANDED[how]) for cut in CUTS for how in EXPANDED
} | {"by torch": by_torch}

FLAT = {name: of(L, WIDTH, COUNT * SIZE) for name in ("q", "k", "v")} | {"o": of(L, COUNT * SIZE, WIDTH)}
MASKED: dict[str, Function] = {
    "a mask for all heads": Function(FLAT, inputs, 48, SAMPLES),
    "numbers for each head": Function(FLAT, inputs_of_heads, 48, OF_HEADS),
    "learned queries": Function(
        {"i": parameter(9, 4), "w": parameter(12, 4), "b": parameter(12), "x": of(L, 6, 4), "o": of(L, 4, 4)},
        steps(6, 5),
        44,
        LEARNED,
    ),
}
