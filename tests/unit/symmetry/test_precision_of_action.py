"""Numbers of 16 bits are moved in single precision, rounded once, and must stay in their range."""

import copy

import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.symmetry import trace_symmetry


def test_numbers_of_16_bits_are_rounded_once() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).half()
    symmetry = trace_symmetry(network, torch.randn(2, 6).half())
    element = symmetry.sample(torch.Generator().manual_seed(0))
    exact = symmetry.act(element, copy.deepcopy(network).float()).half()
    torch.testing.assert_close(
        dict(symmetry.act(element, network).state_dict()), dict(exact.state_dict()), rtol=0, atol=0
    )
    far = symmetry.sample(torch.Generator().manual_seed(0), scale=30.0)
    assert_refused(symmetry.act, far, network, says="would hold numbers that torch.float16 does not")
