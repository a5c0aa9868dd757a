"""Blocks inside blocks: pairs of maxout units, or heads, inside the groups of a norm."""

import math
from typing import Any

import pytest
import torch
from helpers import Program, of
from orbit_laws import (
    assert_a_group_acts,
    assert_matching_undoes,
    assert_members_have_one_form,
    assert_values_move,
    drawn,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.symmetry import trace_symmetry

ROWS = torch.randn(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def maxout(s: Any, x: Tensor) -> Tensor:
    return s.o(s.norm(s.largest(s.i(x))))


def heads(s: Any, x: Tensor) -> Tensor:
    q, k, v = (h.unflatten(-1, (4, 2)).transpose(-3, -2) for h in s.i(x).chunk(3, -1))
    return s.o(s.norm(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2).flatten(0, -2)))


def largest_of_lengths(s: Any, x: Tensor) -> Tensor:
    return s.o(s.norm(s.largest(F.normalize(s.i(x).unflatten(-1, (4, 2)), dim=-1).flatten(-2))))


MAXOUT = {"i": of(nn.Linear, 9, 8), "largest": of(nn.MaxPool1d, 2), "o": of(nn.Linear, 4, 5)}
NESTED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "maxout": (maxout, MAXOUT | {"norm": of(nn.GroupNorm, 2, 4)}, 128),
    "maxout without gains": (maxout, MAXOUT | {"norm": of(nn.GroupNorm, 2, 4, affine=False)}, 128),
    "maxout of lengths": (largest_of_lengths, MAXOUT | {"norm": of(nn.GroupNorm, 2, 4, affine=False)}, 128),
    "heads": (heads, {"i": of(nn.Linear, 9, 24), "norm": of(nn.GroupNorm, 2, 8), "o": of(nn.Linear, 8, 5)}, 128),
}


@pytest.mark.parametrize("name", NESTED)
def test_blocks_are_permuted_inside_blocks(name: str) -> None:
    torch.manual_seed(0)
    forward, parts, order = NESTED[name]
    network = Program(forward, parts).double().eval()
    x = ROWS[None] if name == "heads" else ROWS
    symmetry = trace_symmetry(network, x)
    assert symmetry.log10_permutations == pytest.approx(math.log10(order))
    assert not symmetry.notes
    assert_a_group_acts(symmetry, network, 1e-10, x)
    assert_members_have_one_form(symmetry, network, 1e-9, seeds=(1, 2, 3))
    for seed in range(4):
        unshifted = drawn(symmetry, seed, shifts=False)
        assert_values_move(symmetry, unshifted, network, x, [own for own in parts if own != "o"], 1e-9)
        assert_matching_undoes(symmetry, network, symmetry.act(drawn(symmetry, seed), network), 1e-6)
