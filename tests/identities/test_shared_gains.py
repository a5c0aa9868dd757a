"""Heads change places though one gain of queries, and one of keys, is there for all of them (intertwiners.md, 2.6)."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from helpers import Program, of, parameter
from torch import Tensor, nn

from lightning_sym.symmetry import canonicalize, parameter_distance, trace_symmetry, weight_matching

WIDTH, HEADS, SIZE = 6, 4, 4


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * gain


def network(keys: int, *, rotary: bool = True) -> nn.Module:
    def attend(s: Program, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (s.query, s.key, s.value))
        q, k = normed(q, s.query_gain), normed(k, s.key_gain)
        angles = torch.arange(x.shape[1])[:, None] / 7.0 ** torch.arange(SIZE // 2)
        cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
        q, k = (
            (q, k)
            if not rotary
            else (y * cos + torch.cat([-y[..., SIZE // 2 :], y[..., : SIZE // 2]], -1) * sin for y in (q, k))
        )
        k, v = (y.repeat_interleave(HEADS // keys, 1) for y in (k, v))
        return s.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    parts = {
        "query": of(nn.Linear, WIDTH, HEADS * SIZE), "key": of(nn.Linear, WIDTH, keys * SIZE),
        "value": of(nn.Linear, WIDTH, keys * SIZE), "out": of(nn.Linear, HEADS * SIZE, WIDTH),
        "query_gain": parameter(SIZE), "key_gain": parameter(SIZE),
    }  # fmt: skip
    return drawn(Program(attend, parts))


def between_norm_and_tanh() -> nn.Module:
    def forward(s: Program, x: Tensor) -> Tensor:
        return s.b(torch.tanh(s.norm(s.a(x).unflatten(-1, (HEADS, SIZE)))).flatten(-2))

    layer = nn.Linear
    return drawn(
        Program(
            forward,
            {"a": of(layer, WIDTH, HEADS * SIZE), "norm": of(nn.LayerNorm, SIZE), "b": of(layer, HEADS * SIZE, 2)},
        )
    )


def drawn(network: Program) -> nn.Module:
    torch.manual_seed(0)
    made = network.double()
    with torch.no_grad():
        for own in made.parameters():
            own.copy_(torch.randn_like(own) / 2 + (own.ndim == 1))
    return made


QUERIES = {keys: math.factorial(HEADS // keys) ** keys * math.factorial(keys) for keys in (4, 2, 1)}
# Without rotary positions, units of one head also change places, together with those of all others.
INSIDE = math.factorial(SIZE)


@pytest.mark.parametrize(
    ("make", "order"),
    [
        *[(functools.partial(network, keys), order) for keys, order in QUERIES.items()],
        (functools.partial(network, 4, rotary=False), QUERIES[4] * INSIDE),
        (between_norm_and_tanh, QUERIES[4] * INSIDE),
    ],
    ids=["as many keys", "half as many keys", "one key", "without positions", "layer norm and tanh"],
)
def test_heads_permute_by_the_wreath_product(make: Callable[[], nn.Module], order: int) -> None:
    program, x = make(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    symmetry = trace_symmetry(program, x)
    assert symmetry.log10_permutations == pytest.approx(math.log10(order))
    assert symmetry.worst_error < 1e-12
    for seed in range(3):
        element = symmetry.sample(torch.Generator().manual_seed(seed))
        other = symmetry.act(element, program)
        torch.testing.assert_close(other(x), program(x), rtol=1e-11, atol=1e-11)
        forms = (canonicalize(symmetry, one).network for one in (program, other))
        size = parameter_distance(program, other)
        assert parameter_distance(*forms) < 1e-11 * size
        assert weight_matching(symmetry, program, other).distance_after < 1e-11 * size
