"""What holds for relaxed layers on every grid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sym.layers import (
    FactoredFullyConnected,
    FullyConnected,
    GroupConv,
    PolyphasePool,
    SparseFactoredFullyConnected,
)

LAW = settings(max_examples=30, deadline=None, derandomize=True)
EXACT = {"rtol": 1e-10, "atol": 1e-10}

sides = st.integers(1, 9)
even_sides = st.integers(1, 5).map(lambda half: 2 * half)
shifts = st.tuples(st.integers(-9, 9), st.integers(-9, 9))
seeds = st.integers(0, 2**32)
counts = st.integers(1, 4)


def features(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_bias(layer):
    for name, parameter in layer.named_parameters():
        if name.startswith(("b", "rotation_b", "spatial_b")):
            nn.init.normal_(parameter)
    return layer.double()


@LAW
@given(sides, sides, counts, counts, shifts, seeds)
@pytest.mark.parametrize("kind", ["lifting", "full", "pointwise", "separable", "depthwise_separable"])
def test_group_convolutions_commute_with_shifts_and_rotations(kind, height, width, ins, outs, shift, seed):
    torch.manual_seed(seed)
    layer = random_bias(GroupConv(ins, outs, kind))
    x = features(seed, 2, 4 * ins, height, width)
    x = x[:, :ins] if kind == "lifting" else x

    def turn(y, group):
        y = torch.rot90(y, 1, (-2, -1))
        return y.unflatten(1, (4, -1)).roll(1, 1).flatten(1, 2) if group else y

    torch.testing.assert_close(layer(x.roll(shift, (2, 3))), layer(x).roll(shift, (2, 3)), **EXACT)
    torch.testing.assert_close(layer(turn(x, kind != "lifting")), turn(layer(x), True), **EXACT)


@LAW
@given(even_sides, even_sides, counts, shifts, st.sampled_from(["max", "l2"]), seeds)
def test_pool_moves_by_half_a_shift_rounded_either_way(height, width, channels, shift, norm, seed):
    pool = PolyphasePool(norm)
    x = features(seed, 3, channels, height, width)
    before, after = pool(x), pool(x.roll(shift, (2, 3)))
    for one, other in zip(before, after, strict=True):
        candidates = [
            one.roll((a, b), (1, 2))
            for a in {shift[0] // 2, -(-shift[0] // 2)}
            for b in {shift[1] // 2, -(-shift[1] // 2)}
        ]
        assert any(torch.equal(other, candidate) for candidate in candidates)


@LAW
@given(sides, sides, sides, sides, counts, counts, st.integers(1, 6), seeds)
def test_fully_connected_layers_are_affine_and_have_their_shapes(height, width, tall, wide, ins, outs, batch, seed):
    torch.manual_seed(seed)
    x, y = features(seed, batch, ins, height, width), features(seed + 1, batch, ins, height, width)
    for kind in (FullyConnected, FactoredFullyConnected, SparseFactoredFullyConnected):
        layer = random_bias(kind(ins, outs, (height, width), (tall, wide)))
        assert layer(x).shape == (batch, outs, tall, wide)
        assert (layer(x) if kind is FullyConnected else layer(x).transpose(0, 1)).is_contiguous()
        torch.testing.assert_close(layer(0.3 * x + 0.7 * y), 0.3 * layer(x) + 0.7 * layer(y), rtol=1e-8, atol=1e-8)
        positions, out_positions = height * width, tall * wide
        parameters = {
            FullyConnected: ins * outs * positions * out_positions + outs * out_positions,
            FactoredFullyConnected: ins * outs * (positions + out_positions) + outs + out_positions,
            SparseFactoredFullyConnected: ins * outs * ((positions + 1) // 2 + (out_positions + 1) // 2) + outs,
        }[kind]
        assert sum(parameter.numel() for parameter in layer.parameters()) == parameters
