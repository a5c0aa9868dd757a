"""Descent over orbits: the function stays, derivatives are right, known minima are found."""

import torch
from torch import nn

from lightning_sym.orbit import minimize_on_orbit
from lightning_sym.symmetry import canonicalize, trace_symmetry


def squares(weights):
    return sum(own.square().sum() for own in weights.values())


def test_least_norm_of_a_relu_network_is_its_balanced_form_from_all_members():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    symmetry = trace_symmetry(network, torch.randn(3, 8).double())
    least = float(squares(dict(canonicalize(symmetry, network).network.named_parameters())))
    for member in (network, symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), network)):
        found = minimize_on_orbit(symmetry, member, squares)
        assert found.converged
        assert found.change < 1e-12
        assert abs(found.after - least) < 1e-9 * least
