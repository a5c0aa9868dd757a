"""Layers with relaxed equivariances; plain torch, without Lightning.

:func:`lightning_sym.curvature.factors` computes their Kronecker factors. laplace-torch does not cover them (it reports
``Found parameters in un-supported layers``); :func:`lightning_sym.curvature.to_laplace` passes ours to it.
"""

from lightning_sym.layers.circular_conv import CircularConv
from lightning_sym.layers.factored import FactoredFullyConnected
from lightning_sym.layers.finite_groups import EquivariantLinear, grid_action, regular_action
from lightning_sym.layers.fully_connected import FullyConnected
from lightning_sym.layers.group_conv import GroupConv, GroupLift, GroupMax
from lightning_sym.layers.pathways import ResidualPathways, parameter_paths
from lightning_sym.layers.polyphase_pool import PolyphasePool
from lightning_sym.layers.sparse import SparseConv, SparseFactoredFullyConnected

__all__ = [
    "CircularConv",
    "EquivariantLinear",
    "FactoredFullyConnected",
    "FullyConnected",
    "GroupConv",
    "GroupLift",
    "GroupMax",
    "PolyphasePool",
    "ResidualPathways",
    "SparseConv",
    "SparseFactoredFullyConnected",
    "grid_action",
    "parameter_paths",
    "regular_action",
]
