"""Tracing where a parameter that is one number is spread over units: it acts on none of them in particular."""

import pytest
import torch
from helpers import Program
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import trace_symmetry

SPREADS = {"expand": lambda number: number.expand(6), "repeat": lambda number: number.repeat(6)}
USES = {
    "bias of a linear map": lambda net, x, spread: F.linear(x, net.first.weight, spread(net.number)).relu(),
    "bias of a convolution": lambda net, x, spread: F.conv1d(
        x[..., None], net.first.weight[..., None], spread(net.number)
    )[..., 0].relu(),
    "bias of addmm": lambda net, x, spread: torch.addmm(spread(net.number), x, net.first.weight.T).relu(),
    "slopes": lambda net, x, spread: F.prelu(net.first(x), spread(net.number)),
}


def one_number(use, spread, shape):
    parts = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3), "number": nn.Parameter(torch.full(shape, 0.7))}
    return Program(lambda s, x: s.last(use(s, x, spread)), parts)


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("use", USES)
def test_a_number_that_is_spread_over_units(use, spread, shape):
    torch.manual_seed(0)
    network = one_number(USES[use], SPREADS[spread], shape).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    for seed in range(3):
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network)
        torch.testing.assert_close(moved(x), network(x))
        torch.testing.assert_close(moved.number, network.number)
    sizes = {group.name: group.size for group in symmetry.groups}
    assert sizes["number"] == 1
    if use == "slopes":
        assert sizes["first"] == 6


def test_a_number_for_all_units_leaves_their_order_free():
    torch.manual_seed(0)
    network = one_number(lambda net, x, spread: (net.first(x) + spread(net.number)).relu(), lambda number: number, (1,))
    symmetry = trace_symmetry(network, torch.randn(5, 4))
    assert {group.name: group.size for group in symmetry.groups} == {"number": 1, "first": 6}
