"""Random programs of blocks that networks use: the group depends on the function, not on how each block is written.

A program draws its blocks from one generator, and how it writes them from another one.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.symmetry import trace_symmetry

WIDTH, LENGTH, INPUTS = 4, 4, 9
RUN, SLOW = range(12), range(12, 150)
ACTIVATIONS: dict[str, Sequence[Callable[[Tensor], Tensor]]] = {
    "relu": (F.relu, lambda x: x.clamp(min=0), lambda x: (x + x.abs()) / 2, lambda x: x * (x > 0)),
    "tanh": (torch.tanh, lambda x: 2 * torch.sigmoid(2 * x) - 1, lambda x: 1 - 2 / (1 + torch.exp(2 * x))),
    "silu": (F.silu, lambda x: x * x.sigmoid(), lambda x: x / (1 + torch.exp(-x))),
    "square": (torch.square, lambda x: x * x, lambda x: x**2),
    "softplus": (F.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x)), lambda x: -F.logsigmoid(-x)),
}


class Random(nn.Module):
    """A program on sequences.

    Args:
        seed: Determines the function and its weights.
        spelling: Determines how the function is written.
    """

    def __init__(self, seed: int, spelling: int) -> None:
        super().__init__()
        self.seed, self.spelling = seed, spelling
        self.example = torch.randn(2, LENGTH, INPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.weights = nn.ParameterList()
        self.complete = False
        self(self.example)
        self.complete = True

    def forward(self, x: Tensor) -> Tensor:
        self.chosen, self.spelled, self.read = random.Random(self.seed), random.Random(f"{self.spelling}"), 0
        h = self.layer(x, WIDTH)
        for block in self.chosen.choices(BLOCKS, k=self.chosen.choice([1, 2, 2, 3])):
            h = block(self, h)
        return self.layer(h.mean(1) if self.chosen.random() < 0.5 else h, 6)

    def weight(self, *shape: int) -> Tensor:
        if not self.complete:
            generator = torch.Generator().manual_seed(1000 * self.seed + self.read)
            self.weights.append(nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        self.read += 1
        return self.weights[self.read - 1]

    def one_of(self, *spellings: Callable[[], Any]) -> Any:
        return self.spelled.choice(spellings)()

    def layer(self, x: Tensor, size: int) -> Tensor:
        w, b = self.weight(size, x.shape[-1]), self.weight(size)
        half, rows = x.shape[-1] // 2, size // 2
        return self.one_of(
            lambda: F.linear(x, w, b),
            lambda: x @ w.T + b,
            lambda: torch.einsum("...i,ji->...j", x, w) + b,
            lambda: x[..., :half] @ w[:, :half].T + (x[..., half:] @ w[:, half:].T + b),
            lambda: torch.cat([F.linear(x, w[:rows], b[:rows]), F.linear(x, w[rows:], b[rows:])], -1),
            lambda: (x.unsqueeze(-2) * w).sum(-1) + b,
            lambda: F.linear(x.reshape(-1, x.shape[-1]), w, b).view(*x.shape[:-1], size),
            lambda: torch.stack([(x * row).sum(-1) for row in w.unbind(0)], -1) + b,
            lambda: torch.tensordot(x, w, dims=([-1], [1])) + b,
        )

    def activated(self, x: Tensor) -> Tensor:
        return self.one_of(*(lambda own=own: own(x) for own in ACTIVATIONS[self.chosen.choice([*ACTIVATIONS])]))

    def heads(self, x: Tensor) -> Tensor:
        return self.one_of(
            lambda: x.unflatten(-1, (2, -1)).transpose(1, 2),
            lambda: x.view(*x.shape[:2], 2, -1).permute(0, 2, 1, 3),
            lambda: torch.stack(x.split(x.shape[-1] // 2, -1), 1),
        )


def dense(s: Random, x: Tensor) -> Tensor:
    return s.activated(s.layer(x, WIDTH))


def residual(s: Random, x: Tensor) -> Tensor:
    h = s.layer(dense(s, normed(s, x)), WIDTH)
    return s.one_of(lambda: x + h, lambda: torch.add(h, x), lambda: torch.stack([x, h]).sum(0))


def normed(s: Random, x: Tensor) -> Tensor:
    g, b = s.weight(WIDTH), s.weight(WIDTH)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return s.one_of(
        lambda: F.layer_norm(x, (WIDTH,), g, b),
        lambda: torch.addcmul(b, (x - mean) * (variance + 1e-5).rsqrt(), g),
        lambda: (x - mean) / (variance + 1e-5).sqrt() * g + b,
    )


def gated(s: Random, x: Tensor) -> Tensor:
    h = s.layer(x, 2 * WIDTH)
    a, b = s.one_of(lambda: h.chunk(2, -1), lambda: h.unflatten(-1, (2, -1)).unbind(-2), lambda: h.split(WIDTH, -1))
    return s.layer(s.one_of(lambda: a * torch.sigmoid(b), lambda: F.glu(torch.cat([a, b], -1))), WIDTH)


def attention(s: Random, x: Tensor) -> Tensor:
    q, k, v = (s.heads(part) for part in s.layer(x, 3 * WIDTH).chunk(3, -1))
    scores = s.one_of(lambda: q @ k.mT, lambda: torch.einsum("bhid,bhjd->bhij", q, k))
    h = s.one_of(lambda: scores.softmax(-1) @ v, lambda: F.scaled_dot_product_attention(q, k, v, scale=1.0))
    return x + s.layer(s.one_of(lambda: h.transpose(1, 2).flatten(2), lambda: torch.cat(h.unbind(1), -1)), WIDTH)


def in_groups(s: Random, x: Tensor) -> Tensor:
    w, h = s.weight(WIDTH, WIDTH // 2), s.activated(x)
    pairs = [*zip(h.chunk(2, -1), w.chunk(2), strict=True)]
    return s.activated(s.one_of(
        lambda: F.conv1d(h.mT, w[..., None], groups=2).mT,
        lambda: torch.cat([part @ own.T for part, own in pairs], -1),
        lambda: torch.einsum("btgi,goi->btgo", h.unflatten(-1, (2, -1)), w.unflatten(0, (2, -1))).flatten(2),
    ))  # fmt: skip


def modulated(s: Random, x: Tensor) -> Tensor:
    g = s.layer(x, WIDTH)
    return s.layer(s.one_of(lambda: x * (1 + g), lambda: x + x * g, lambda: torch.addcmul(x, x, g)), WIDTH)


def rearranged(s: Random, x: Tensor) -> Tensor:
    return s.activated(s.one_of(lambda: torch.cat([x[..., 2:], x[..., :2]], -1), lambda: x.roll(2, -1)))


BLOCKS = (dense, residual, normed, gated, attention, in_groups, modulated, rearranged)


@pytest.mark.parametrize("seed", [*RUN, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_group_of_a_random_program_depends_on_its_function_alone(seed: int) -> None:
    one, two = (Random(seed, spelling) for spelling in (0, 1))
    torch.testing.assert_close(one(one.example), two(two.example), rtol=1e-9, atol=1e-9)
    found = [trace_symmetry(own, own.example, nullity=False) for own in (one, two)]
    assert found[0].dimension == found[1].dimension
    assert found[0].log10_permutations == pytest.approx(found[1].log10_permutations)
    assert found[0].signs == found[1].signs
