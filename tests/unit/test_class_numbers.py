"""Class numbers of any integer type, such as those of numpy, are taken wherever losses are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sym.connectivity import barrier
from lightning_sym.curvature import CurvatureOperator
from lightning_sym.landscape.pruning import mean_loss
from lightning_sym.orbit import gradient_norm, minimize_on_orbit
from lightning_sym.symmetry import trace_symmetry

X, Y = torch.randn(8, 3), torch.arange(8) % 4


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize(
    "measured",
    [
        lambda network, data: barrier(network, network, data, points=2).loss,
        lambda network, data: CurvatureOperator(network, data, F.cross_entropy).matrix(),
        lambda network, data: mean_loss(network, data, F.cross_entropy),
        lambda network, data: (
            minimize_on_orbit(trace_symmetry(network, X), network, gradient_norm(), data=data, max_steps=2).after
        ),
    ],
)
def test_integers_of_any_type(measured, dtype):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    found, expected = (measured(network, [(X, labels)]) for labels in (Y.to(dtype), Y))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
