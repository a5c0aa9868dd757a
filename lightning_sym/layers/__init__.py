"""Layers with relaxed equivariances; plain torch, without Lightning.

:func:`lightning_sym.curvature.factors` computes their Kronecker factors. laplace-torch does not cover them (it reports
``Found parameters in un-supported layers``); :func:`lightning_sym.curvature.to_laplace` passes ours to it.
"""

from lightning_sym._exports import exported
from lightning_sym.layers.circular_conv import CircularConv as CircularConv
from lightning_sym.layers.factored import FactoredFullyConnected as FactoredFullyConnected
from lightning_sym.layers.finite_groups import EquivariantLinear as EquivariantLinear
from lightning_sym.layers.finite_groups import grid_action as grid_action
from lightning_sym.layers.finite_groups import regular_action as regular_action
from lightning_sym.layers.fully_connected import FullyConnected as FullyConnected
from lightning_sym.layers.group_conv import GroupConv as GroupConv
from lightning_sym.layers.group_conv import GroupLift as GroupLift
from lightning_sym.layers.group_conv import GroupMax as GroupMax
from lightning_sym.layers.pathways import ResidualPathways as ResidualPathways
from lightning_sym.layers.pathways import parameter_paths as parameter_paths
from lightning_sym.layers.polyphase_pool import PolyphasePool as PolyphasePool
from lightning_sym.layers.sparse import SparseConv as SparseConv
from lightning_sym.layers.sparse import SparseFactoredFullyConnected as SparseFactoredFullyConnected

__all__ = exported(globals())
