"""Networks whose modules keep tensors of a forward pass, as attention maps or pruned weights, work and are not changed.

Such tensors have a gradient history, which ``copy.deepcopy`` refuses.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sym.connectivity import average, barrier
from lightning_sym.curvature import CurvatureOperator, factors, jacobian_rank, parameter_groups, to_laplace
from lightning_sym.networks import Network
from lightning_sym.reports.symmetry import SymmetryMeter
from lightning_sym.stitching import CutNetwork

X, Y = torch.randn(6, 3), torch.arange(6) % 4
DATA = [(X, Y)]


class Keeping(nn.Module):
    """A network that keeps its hidden layer."""

    def __init__(self):
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x):
        self.hidden = self.first(x)
        return self.second(self.relu(self.hidden))


def keeping(kind):
    """Return a network after a forward pass in train mode."""
    torch.manual_seed(0)
    network = Keeping() if kind == "attribute" else nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    if kind == "pruned":
        nn.utils.prune.l1_unstructured(network[0], "weight", 3)
    elif kind == "normed":
        nn.utils.spectral_norm(network[0])
    network(X)
    return network


@pytest.mark.parametrize("kind", ["attribute", "pruned"])
@pytest.mark.parametrize(
    "use",
    [
        lambda network: CurvatureOperator(network, DATA, F.cross_entropy).matrix(),
        lambda network: jacobian_rank(network, X),
        lambda network: jacobian_rank(nn.Sequential(keeping("normed"), nn.Linear(4, 3), network), X),
        lambda network: SymmetryMeter(network, X),
        lambda network: [
            own.upper(site) for own in [CutNetwork(Network.wrap(network), example=X)] for site in own.sites
        ],
        lambda network: average([network, network]),
        lambda network: barrier(network, network, DATA, points=2),
    ],
)
def test_they_are_copied(kind, use):
    use(keeping(kind))


@pytest.mark.parametrize(
    "use",
    [
        lambda network: factors(network, DATA),
        lambda network: factors(network.bfloat16(), DATA),
        lambda network: to_laplace(network, DATA),
        lambda network: parameter_groups(network),
        lambda network: Network.wrap(network).sites(),
    ],
)
def test_tracing_leaves_nothing_in_their_attributes(use):
    network = keeping("attribute")
    use(network)
    assert type(network.hidden) is torch.Tensor
