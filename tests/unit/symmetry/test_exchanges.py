"""Exchanges that keep all outputs and that a group lacks have a note; those of the group have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, of, parameter
from torch import Tensor, nn

from lightning_sym.symmetry import trace_symmetry

pytestmark = pytest.mark.measured

L, BN = nn.Linear, of(nn.BatchNorm1d, 4)
A, B = of(L, 6, 4), of(L, 4, 2)
PAIRS = torch.eye(4, dtype=torch.float64)[[1, 0, 3, 2]]


def noted(function: Callable[..., Any], example: Any, **parts: Any) -> str:
    torch.manual_seed(0)
    network = Program(function, parts).double().eval()
    return "".join(note for note in trace_symmetry(network, example).notes if "some exchange" in note)


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def products_of_pairs(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(s.a(x))
    return s.b(h) + (h * (h @ PAIRS)).sum(-1, keepdim=True)


# Both heads' units behind their norm have one gain, so that they change places together.
def heads_with_one_gain(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(rms(s.a(x).view(len(x), 2, 2)) * s.g).flatten(1))


@pytest.mark.parametrize(
    ("function", "parts", "names"),
    [
        (products_of_pairs, {}, "a.weight, a.bias, b.weight"),
        (lambda s, x: s.b(s.a(x).cumsum(-1) * s.c(x).cumsum(-1)), {"c": A}, "a.weight, a.bias, c.weight, c.bias"),
        (lambda s, x: s.b(torch.tanh(s.n(s.a(x)))) + s.c(torch.tanh(s.m(s.a(x)))), {"n": BN, "m": BN, "c": B},
            "n.weight, m.bias"),
    ],
    ids=["pairs", "factors", "norms behind one layer"],
)  # fmt: skip
def test_exchanges_that_the_group_lacks_are_noted(function: Any, parts: dict[str, Any], names: str) -> None:
    note = noted(function, vectors(3, 6), **{"a": A, "b": B} | parts)
    assert all(name in note for name in names.split(", "))


def bag(s: Any, tokens: Tensor) -> Tensor:
    return s.b(torch.relu(s.e(tokens).sum(1)))


@pytest.mark.parametrize(
    ("function", "parts", "example"),
    [
        (lambda s, x: s.b(torch.relu(s.a(x))), {}, vectors(3, 6)),
        (lambda s, x: s.b(torch.relu(s.n(s.a(x)))), {"n": BN}, vectors(3, 6)),
        (lambda s, x: s.b(s.a(x)), {}, vectors(3, 6)),
        (lambda s, x: s.b(torch.relu(s.a(x) + s.p)), {"p": parameter(4)}, vectors(3, 6)),
        (lambda s, x: s.b(s.g * rms(s.a(x))), {"g": parameter(4)}, vectors(3, 6)),
        (heads_with_one_gain, {"g": parameter(2)}, vectors(3, 6)),
        (lambda s, x: s.b(torch.relu(s.a(x))) @ torch.linalg.inv(s.w), {"w": parameter(2, 2)}, vectors(3, 6)),
        (bag, {"e": of(nn.Embedding, 7, 4), "b": B}, torch.tensor([[0, 6, 2], [1, 1, 5]])),
    ],
    ids=[
        "permutations",
        "statistics",
        "matrices",
        "translations",
        "rotations",
        "heads",
        "no inverse of ones",
        "tokens",
    ],
)
def test_exchanges_of_the_group_are_not_noted(function: Any, parts: dict[str, Any], example: Tensor) -> None:
    assert not noted(function, example, **parts if "e" in parts else {"a": A, "b": B} | parts)
