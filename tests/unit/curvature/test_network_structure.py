"""Tests of the structure of a network: when every place of every layer counts without a search."""

import pytest
import torch
from torch import nn

from lightning_sym.curvature import factors, sums
from lightning_sym.curvature.rules import circular_gram, circular_patches, gram
from lightning_sym.curvature.structure import every_place_counts
from lightning_sym.layers import CircularConv, PolyphasePool
from lightning_sym.networks import RelaxedNetwork

KINDS = [["ffc", "conv"], ["fc", "sconv"], ["sfc"]]


def relaxed(kinds):
    torch.manual_seed(0)
    return RelaxedNetwork(kinds, 2, 8, 1, 3)


@pytest.mark.parametrize("kinds", KINDS)
def test_every_place_counts_in_relaxed_networks_until_a_weight_is_zero(kinds):
    network = relaxed(kinds)
    assert every_place_counts(network)
    with torch.no_grad():
        next(network.parameters()).view(-1)[0] = 0
    assert not every_place_counts(network)


def masked(network):
    network[0].register_forward_hook(lambda module, args, output: output * 0)
    return network


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv2d(1, 2, 1, stride=2), nn.Flatten(), nn.Linear(32, 3)),
        nn.Sequential(CircularConv(1, 2), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 3)),
        masked(nn.Sequential(CircularConv(1, 2), nn.Flatten(), nn.Linear(128, 3))),
        nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)),
    ],
    ids=["stride", "pool that cuts off", "hook", "unknown layer"],
)
def test_other_networks_are_searched(network):
    assert not every_place_counts(network)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("engine", ["autograd", "backpack"])
def test_factors_are_those_of_the_search(monkeypatch, kinds, engine):
    network = relaxed(kinds)
    batches = [(torch.randn(4, 1, 8, 8), torch.arange(4) % 3) for _ in range(2)]
    found = factors(network, batches, engine=engine).blocks
    searched = []
    monkeypatch.setattr(sums, "every_place_counts", lambda network: searched.append(network) or False)
    expected = factors(network, batches, engine=engine).blocks
    assert searched  # pools and inactive units leave rows without gradients
    for name, block in expected.items():
        assert found[name].places == block.places
        assert torch.equal(found[name].out_factor, block.out_factor)
        if block.in_factor is not None:
            torch.testing.assert_close(found[name].in_factor, block.in_factor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("grid", "kernel"), [((8, 8), 3), ((4, 6), 5), ((3, 5), 3), ((1, 2), 3), ((2, 2), 5)])
@pytest.mark.parametrize("offset", [0, 1e4])
def test_the_self_convolution_is_the_gram_matrix_of_the_patches(grid, kernel, offset):
    x = torch.randn(5, 3, *grid, generator=torch.Generator().manual_seed(0)) + offset
    patches = circular_patches(x.double(), kernel)  # [N, C, k k, T]
    expected = torch.einsum("ncit,ndjt->cidj", patches, patches)
    found = circular_gram(x, kernel)
    assert (found - expected).norm() < 1e-14 * expected.norm()
    assert torch.equal(found, found.permute(2, 3, 0, 1))
    channelwise = circular_gram(x, kernel, depthwise=True)
    assert (channelwise - torch.einsum("cicj->cij", expected)).norm() < 1e-14 * expected.norm()


@pytest.mark.parametrize("shape", [(6, 4, 300), (2, 6, 1, 520), (6, 700, 256)])
def test_wide_products_are_symmetric_and_those_of_all_columns(shape):
    vectors = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for v in (vectors, vectors.mT.contiguous().mT):
        found, rows = gram(v, v.ndim - 3), v.double().flatten(-3, -2)
        expected = rows.mT @ rows
        assert (found - expected).norm() < 1e-14 * expected.norm()
        assert (found - found.mT).norm() < 1e-14 * expected.norm()


def test_pools_of_the_paper_count_every_place():
    network = nn.Sequential(CircularConv(1, 2), PolyphasePool(), nn.Flatten(), nn.Linear(32, 3))
    block = factors(network, [(torch.randn(4, 1, 8, 8), torch.arange(4) % 3)]).blocks["0.weight"]
    assert block.places == 64
