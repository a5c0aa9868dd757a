"""Small networks in which something may be added to weights at the example's length, and not at all others.

Or in which it seems so: outputs of other sizes, weights that more than contractions read, constants and indices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from helpers import Fixed, buffer, of, parameter
from torch import Tensor, nn
from torch.nn import functional as F

L = nn.Linear
Shapes = Sequence[tuple[int, ...]]


class Case(NamedTuple):
    """A network that is written as a function, and how much may be added to its weights."""

    function: Callable[[Any, Tensor], Any]  # of itself and its input
    dimension: int  # of all translations
    parts: dict[str, Any]  # what it is made of
    example: tuple[int, ...] = (2, 4, 5)  # the shape of the example
    others: Shapes = ((3, 4, 5), (2, 7, 5), (1, 2, 5))  # those of further inputs
    tokens: int = 0  # how many tokens there are; 0 for numbers


CASES: dict[str, Case] = {}
AB: dict[str, Any] = {"a": of(L, 5, 8), "b": of(L, 8, 3)}
HEAD: dict[str, Any] = {**{name: of(L, 5, 4) for name in "qkv"}, "o": of(L, 4, 2)}
DISTANCES = torch.arange(12)[:, None] - torch.arange(12) + 11
MASK = torch.arange(64).reshape(8, 8) % 3 > 0


def added(name: str, function: Callable[[Any, Tensor], Any], dimension: int, **parts: Any) -> None:
    """Add a network of two linear layers and what is given."""
    settings = {key: parts.pop(key) for key in ("example", "others", "tokens") if key in parts}
    CASES[name] = Case(function, dimension, {**AB, **parts}, **settings)


def before(x: Tensor, size: int = 9) -> Tensor:
    return (torch.arange(size) < x.shape[1])[:, None]


def attended(s: Any, x: Tensor, bias: Any = 0.0) -> Tensor:
    return s.o((s.q(x) @ s.k(x).mT / 2 + bias).softmax(-1) @ s.v(x))


def attended_parts(s: Any, x: Tensor) -> Tensor:
    q, k, v = (s.qkv(x)[..., 4 * part : 4 * part + 4] for part in range(3))
    return s.o((q @ k.mT).softmax(-1) @ v)


def layer_norm(x: Tensor, *affine: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *affine)


# Tables of which a longer input reads more.
TABLE = {"pos": parameter(9, 8)}
added("slice", lambda s, x: s.b(s.a(x) + s.pos[: x.shape[1]]), 16, **TABLE)
added("mean of a table that is read whole", lambda s, x: s.b((s.a(x) + s.pos[: x.shape[1]].mean(0)).relu()), 8,
    example=(2, 9, 5), others=[(2, 4, 5)], **TABLE)  # fmt: skip
added("mask times table", lambda s, x: s.b((s.a(x) + (s.pos * before(x)).sum(0)).relu()), 0, **TABLE)
added("table where a mask holds", lambda s, x: s.b((s.a(x) + torch.where(before(x), s.pos, 0.0).sum(0)).relu()), 0,
    **TABLE)  # fmt: skip
added("filled table", lambda s, x: s.b((s.a(x) + s.pos.masked_fill(~before(x), 0.0).sum(0)).relu()), 0, **TABLE)
added("triangle of a table", lambda s, x: s.b(s.a(x) + torch.ones(x.shape[1], 9, dtype=x.dtype).tril() @ s.pos), 8,
    **TABLE)  # fmt: skip
added("part and mean of the whole", lambda s, x: s.b((s.a(x) + s.pos[: x.shape[1]] - s.pos.mean(0)).relu()), 8, **TABLE)
added("rows in turn", lambda s, x: s.b((s.a(x) + s.pos[torch.arange(x.shape[1]) % 3]).relu()), 8, **TABLE)
added("row of the last step", lambda s, x: s.b((s.a(x) + s.pos[x.shape[1] - 1]).relu()), 8, **TABLE)
added("row of a sum of tables", lambda s, x: s.b((s.a(x) + (s.pos[:, None] + s.q)[: x.shape[1], 0]).relu()), 64,
    q=parameter(7, 8), **TABLE)  # fmt: skip
added("table times a gate", lambda s, x: s.b((s.a(x) + s.pos[: x.shape[1]] * s.gate).relu()), 8, gate=parameter(8),
    **TABLE)  # fmt: skip
added("table in an equation", lambda s, x: s.b(torch.einsum("bt,tg->btg", x.sum(-1), s.pos[: x.shape[1]]) + s.a(x)), 8,
    **TABLE)  # fmt: skip
added("rows by a buffer that is cut", lambda s, x: s.b(layer_norm(s.a(x) + s.pos[s.index[: x.shape[1]]])), 25,
    index=lambda: torch.tensor([0, 3, 3, 5, 7, 8, 1]), **TABLE)  # fmt: skip
added("class token", lambda s, x: s.b(layer_norm(torch.cat([s.cls.expand(len(x), 1, 8), s.a(x)],
    1) + s.pos[: x.shape[1] + 1])), 26, cls=parameter(1, 1, 8), **TABLE)  # fmt: skip
added("logits that are cut", lambda s, x: s.b((s.a(x) @ s.pos.t())[..., : x.shape[1]].softmax(-1) @ s.c(x)), 16,
    c=of(L, 5, 8), **TABLE)  # fmt: skip
added("diagonal that is cut", lambda s, x: s.b((s.a(x) + s.table.diagonal()[: x.shape[1], None]).relu()), 1,
    table=parameter(9, 9))  # fmt: skip

# Tokens in front of as many rows as the input is long: a longer input has more rows, but takes no more of them.
for cut_name, cut in {
    "slice": lambda h: h[:, 2:],
    "narrow": lambda h: h.narrow(1, 2, 4),
    "split": lambda h: h.split([2, 4], 1)[1],
    "behind a transposition": lambda h: h.mT[..., 2:].mT,
    "of a stack": lambda h: torch.stack([h, h], 1)[:, 0, 2:],
    "of what is flipped": lambda h: h.flip(1)[:, :4],
}.items():
    for pool_name, dimension, pool in (
        ("relu and mean", 40, lambda h: h.relu().mean(1)),
        ("mean and relu", 64, lambda h: h.mean(1).relu()),
    ):
        added(
            f"tokens, {cut_name}, {pool_name}",
            lambda s, x, cut=cut, pool=pool: s.b(
                pool(cut(torch.cat([s.cls.expand(len(x), 2, 8), s.a(x)], 1) + s.positions))
            ),
            dimension,
            others=[(3, 4, 5)],
            cls=parameter(1, 2, 8),
            positions=parameter(6, 8),
        )
# Rows of something else, of which a longer input takes more.
for cut_name, cut in {
    "slice": lambda h, size: h[:, :size],
    "narrow": lambda h, size: h.narrow(1, 0, size),
    "split": lambda h, size: h.split([size, 9 - size], 1)[0],
    "last": lambda h, size: h[:, -size:],
    "rest": lambda h, size: h[:, size:],
    "row": lambda h, size: h[:, size - 1 : size],
    "select": lambda h, size: h[:, size - 1][:, None],
    "unbind": lambda h, size: h.unbind(1)[size - 1][:, None],
}.items():
    added(
        f"rows of a sum, {cut_name}",
        lambda s, x, cut=cut: s.b(cut(s.a(x.mean(1, keepdim=True)) + s.pos, x.shape[1]).sum(1).relu()),
        8,
        others=[(3, 4, 5), (2, 7, 5), (1, 2, 5)],
        **TABLE,
    )

# Weights of which it reads more.
CUT = {"example": (2, 4, 5), "others": [(2, 7, 5), (2, 3, 5), (2, 9, 5)], "w": parameter(9, 5), "v": parameter(2, 9)}
added("width cut, norm", lambda s, x: layer_norm(x.mean(1) @ s.w[: x.shape[1]].T) @ s.v[:, : x.shape[1]].T, 5, **CUT)
added("width cut, relu", lambda s, x: (x.mean(1) @ s.w[: x.shape[1]].T).relu() @ s.v[:, : x.shape[1]].T, 0, **CUT)
added("width cut, bias", lambda s, x: F.linear(F.linear(x.mean(1), s.w[: x.shape[1]], s.h[: x.shape[1]]),
    s.v[:, : x.shape[1]], s.k), 0, h=parameter(9), k=parameter(2), **CUT)  # fmt: skip
added("weight by length", lambda s, x: layer_norm(F.linear(x, s.w[x.shape[1]])) + F.linear(x, s.w[0]), 0,
    w=parameter(9, 8, 5))  # fmt: skip

# Sums over what a longer input has more of.
added("sum", lambda s, x: s.b(s.a(x).sum(1)), 0)
added("sum over length", lambda s, x: s.b(s.a(x).sum(1) / x.shape[1]), 8)
added("sum over root of length", lambda s, x: s.b(s.a(x).sum(1) / math.sqrt(x.shape[1])), 0)
added("product with ones", lambda s, x: s.b(torch.ones(1, x.shape[1], dtype=x.dtype) @ s.a(x)), 0)
added("mean of what came before", lambda s, x: s.b(torch.ones(x.shape[1], x.shape[1],
    dtype=x.dtype).tril() / torch.arange(1, x.shape[1] + 1)[:, None] @ s.a(x)), 8)  # fmt: skip
added("running sum", lambda s, x: s.b(s.a(x).cumsum(1)), 0)

added("rows that are left", lambda s, x: s.b(s.a(x) + s.pos[x.shape[1] :].sum(0)), 8, others=[(3, 4, 5), (2, 7, 5)],
    **TABLE)  # fmt: skip
added("queries, keys and values, as wide as long", lambda s, x: attended_parts(s, x), 8, example=(2, 4, 5),
    qkv=of(L, 5, 12), o=of(L, 4, 2))  # fmt: skip
added("sum over an image", lambda s, x: s.d(s.c(x).sum((2, 3))), 0, example=(2, 3, 7, 7), others=[(1, 3, 9, 8)],
    c=of(nn.Conv2d, 3, 4, 3), d=of(L, 4, 3))  # fmt: skip
added("channels that are as many as inputs", lambda s, x: s.b(torch.cat([s.a(x)[..., :5], x[..., :3]], -1)), 23)

# Attention with tables.
CASES["relative table by a buffer"] = Case(
    lambda s, x: attended(s, x, s.table[s.index[: x.shape[1], : x.shape[1]].reshape(-1)].reshape(x.shape[1], -1)), 9,
    {"table": parameter(23), "index": DISTANCES.clone, **HEAD})  # fmt: skip
CASES["bias of keys"] = Case(lambda s, x: attended(s, x, s.table[: x.shape[1]]), 9, {"table": parameter(9), **HEAD})
CASES["keys that are weights"] = Case(lambda s, x: s.o((s.q(x) @ s.k[: x.shape[1]].T).softmax(-1) @ s.v[: x.shape[1]]),
    4, {"k": parameter(9, 4), "v": parameter(9, 4), "q": of(L, 5, 4), "o": of(L, 4, 2)})  # fmt: skip

# Outputs of other sizes.
added("tiny outputs", lambda s, x: 1e-30 * s.b(s.a(x).relu()), 0)
added("tiny output beside", lambda s, x: (s.c(x), 1e-12 * s.b(s.a(x).relu())), 0, c=of(L, 5, 3))
added("tiny stream", lambda s, x: s.b(s.c(x) + 1e-12 * s.a(x)), 56, c=of(L, 5, 8))
added("large and small output", lambda s, x: (1e8 * s.b(s.a(x)), 1e-8 * s.c(s.a(x))), 8, c=of(L, 8, 2))
added("tiny reader", lambda s, x: (s.b(layer_norm(s.a(x))), 1e-10 * s.a(x)), 3)
added("large and small channels", lambda s, x: s.b(layer_norm(s.a(x) * s.by)), 9,
    by=Fixed(lambda: torch.tensor([1e-12, 1, 1, 1, 1, 1, 1, 1e9])))  # fmt: skip

# Weights that more than contractions read.
added("weight and its sum", lambda s, x: s.b(layer_norm(s.a(x))) + s.a.weight.sum(), 4)
added("multiple of a weight", lambda s, x: s.b(layer_norm(s.a(x))) + (2 * s.a.weight)[:3, 0], 4)
added("weight that is added", lambda s, x: s.b(layer_norm(s.a(x))) + (x[:, :3, :3].sum() + s.a.weight)[:3, 0], 9,
    others=[(3, 4, 5), (2, 7, 5)])  # fmt: skip
added("padded weight", lambda s, x: layer_norm(F.linear(x, F.pad(s.w, (0, 1)))), 0, w=parameter(6, 4))
added("weight and its mask", lambda s, x: s.b(layer_norm(F.linear(s.a(x).relu(), s.w * s.mask, s.c))), 26,
    w=parameter(8, 8), c=parameter(8), mask=Fixed(lambda: MASK.double()))  # fmt: skip
added("weight by weight", lambda s, x: s.b(torch.where(s.a(x) > 0, s.a(x), s.c(x))), 0, c=of(L, 5, 8))


@lambda run: added("entries that are written", run, 0, c=of(L, 8, 8), table=MASK.clone)
def _(s: Any, x: Tensor) -> Tensor:
    weight = torch.zeros_like(s.c.weight)
    weight[s.table] = s.c.weight[s.table]
    return s.b(F.linear(s.a(x).relu(), weight, s.c.bias).relu())


@lambda run: added("value that is written into", run, 0)
def _(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h[:, 0] = 0
    return s.b(h)


# What nothing is known of.
added("choice of units", lambda s, x: s.b(s.a(x).topk(8, -1).values), 1)
added("scattered units", lambda s, x: s.b(torch.zeros_like(s.a(x)).scatter(2, torch.arange(8).flip(0).expand_as(s.a(x)),
    s.a(x))), 8)  # fmt: skip
added("step that the input chooses", lambda s, x: s.b(s.a(x)[torch.arange(len(x)), (x[:, :, 0] > 0).sum(1) - 1]), 0)
CASES["rows that the input chooses"] = Case(lambda s, i: s.b(s.e.gather(0, i[..., None].expand(*i.shape, 8)[0]).relu()),
    0, {"e": parameter(9, 8), "b": of(L, 8, 3)}, (1, 4), [(1, 6)], 9)  # fmt: skip
CASES["table that is looked up twice"] = Case(lambda s, i: s.b(s.e(i)) + s.c(layer_norm(s.e(i))), 7,
    {"e": of(nn.Embedding, 9, 8), "b": of(L, 8, 3), "c": of(L, 8, 3)}, (2, 4), [(2, 6)], 9)  # fmt: skip
CASES["tied table with positions"] = Case(
    lambda s, i: F.linear(layer_norm(s.e(i) + s.p(torch.arange(i.shape[1]))), s.e.weight), 18,
    {"e": of(nn.Embedding, 9, 8), "p": of(nn.Embedding, 9, 8)}, (2, 4), [(2, 6), (3, 9), (2, 2)], 9)  # fmt: skip
added("scores that are cut", lambda s, x: s.b((s.a(x) @ s.c(x).mT).softmax(-1)[..., 1:] @ s.c(x)[:, 1:]), 0,
    c=of(L, 5, 8))  # fmt: skip
added("means that are not", lambda s, x: s.b(((s.a(x) @ s.a(x).mT).softmax(-1) + 0.1) @ s.a(x)), 0)
added("noise", lambda s, x: s.b(s.a(x) + s.t), 16, t=buffer(8))
