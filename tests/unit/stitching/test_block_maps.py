"""Maps where a symmetry mixes blocks of channels: heads and streams, and what is put together of them."""

import itertools

import pytest
import torch
from helpers import assert_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.stitching import BlockMap, FeatureMoments, HeadMap, OnesFixingMap, Port, stitching_map
from lightning_sym.symmetry import ChannelGroup


def moments_of(x, y):
    moments = FeatureMoments(x.shape[1], y.shape[1])
    moments.update(x, y)
    return moments


@given(size=st.integers(2, 7), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_maps_of_streams_are_orthogonal_and_fix_ones(size, seed):
    torch.manual_seed(seed)
    stitch = OnesFixingMap(Port(size, size)).double()
    torch.testing.assert_close(stitch.matrix(), torch.eye(size).double(), rtol=0, atol=1e-14)
    torch.nn.init.normal_(stitch.inner.skew)
    matrix = stitch.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix.sum(1), torch.ones(size).double(), rtol=0, atol=1e-12)
    assert stitch.dimension() == (size - 1) * (size - 2) // 2


@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_heads_are_fitted_best_of_all_orders(seed):
    """The objective of the fitted map, beside that of every order with the least squares matrices of its pairs."""
    torch.manual_seed(seed)
    x, y = torch.randn(2, 40, 6, dtype=torch.float64)
    stitch = HeadMap(Port(6, 6), 3).double()
    stitch.init_from_moments(moments_of(x, y))
    stitch.mode = "hard"
    objectives = []
    for order in itertools.permutations(range(3)):
        parts = [x[:, 2 * j : 2 * j + 2] for j in order]
        fits = [part @ torch.linalg.lstsq(part, y[:, 2 * i : 2 * i + 2]).solution for i, part in enumerate(parts)]
        objectives.append(float((y - torch.cat(fits, 1)).square().sum()))
    with torch.no_grad():
        assert float((y - stitch(x)).square().sum()) == pytest.approx(min(objectives), rel=1e-9)


def test_heads_are_soft_in_training_and_an_order_afterwards():
    torch.manual_seed(0)
    stitch = HeadMap(Port(6, 6), 3, "euclidean")
    blocks = stitch.matrix().unflatten(0, (3, 2)).unflatten(2, (3, 2))
    torch.testing.assert_close(blocks[:, 0, :, 0], stitch.weights)
    stitch.weights.data += torch.randn(3, 3)
    stitch.project()
    torch.testing.assert_close(stitch.weights.sum(0), torch.ones(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(stitch.weights.sum(1), torch.ones(3), rtol=0, atol=1e-4)
    stitch(torch.randn(2, 6)).square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in stitch.parameters())
    stitch.mode = "hard"
    assert sorted(stitch.matrix().abs().sum(1).tolist()) == [1.0] * 6
    assert stitch.dimension() == 3 * 4
    assert stitch.undecayed_parameters() == [stitch.weights]


def mixed(*, fixes_ones=False):
    """Two heads of two channels, a stream of three, two units that change places, and a channel that does not."""
    blocks = ([0, 1], [2, 3], [4, 5, 6], [7], [8], [9])
    return ChannelGroup(
        blocks=tuple(torch.tensor(block)[:, None] for block in blocks),
        kinds=torch.tensor([0, 0, 1, 2, 2, 3]),
        inside=("invertible", "orthogonal", "fixed", "fixed"),
        scales=torch.full((10,), -1),
        signs=torch.full((10,), -1),
        fixes_ones=fixes_ones,
    )


@pytest.mark.parametrize("fixes_ones", [False, True])
def test_a_block_map_is_put_together_of_its_parts(fixes_ones):
    torch.manual_seed(0)
    stitch = stitching_map("group(euclidean)")(Port(10, 10, axis=-1, blocks=mixed(fixes_ones=fixes_ones))).double()
    assert type(stitch) is BlockMap
    assert stitch.dimension() == sum(part.dimension() for part in stitch.parts) == 8 + (1 if fixes_ones else 3)
    assert len(stitch.undecayed_parameters()) == 2
    planted = torch.eye(10, dtype=torch.float64)
    planted[:4, :4] = torch.randn(4, 4)
    planted[:2, :2] = planted[2:4, 2:4] = 0  # the heads in the other order
    turn = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])  # orthogonal, and fixes ones
    planted[4:7, 4:7] = turn
    planted[[7, 8]] = planted[[8, 7]]
    x = torch.randn(30, 4, 10, dtype=torch.float64)
    moments = FeatureMoments(10, 10)
    moments.update(x, x @ planted.T, axis=-1)
    stitch.init_from_moments(moments)
    for mode in ("soft", "hard"):
        stitch.mode = mode
        assert {part.mode for part in stitch.parts} == {mode}
        torch.testing.assert_close(stitch.matrix(), planted, rtol=0, atol=1e-9)
        torch.testing.assert_close(stitch(x), x @ planted.T, rtol=0, atol=1e-9)
    # Permutations of two heads and of two units, with the square root of 2 as norm each.
    assert stitch.regularization().item() == pytest.approx(-0.2 * 2**0.5)
    assert all(
        part.alpha == 3 for part in BlockMap(Port(10, 10, blocks=mixed()), alpha=3).parts if hasattr(part, "alpha")
    )


def test_block_maps_need_blocks():
    assert_refused(lambda: BlockMap(Port(4, 4)), says="needs a port with blocks of channels")
    assert_refused(lambda: HeadMap(Port(6, 6), 4), says="blocks that divide 6 channels and a projection of")
    assert_refused(lambda: HeadMap(Port(6, 6), 3, "nearest"), says="got blocks=3 and projection='nearest'")
    assert_refused(lambda: BlockMap(Port(10, 9, blocks=mixed())), says="needs equal widths, got 10 channels")
