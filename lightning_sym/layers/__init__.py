"""Layers: relaxed layers that networks are made of, and maps between two networks; plain torch, without Lightning."""

from lightning_sym.layers.birkhoff import nearest_permutation, project_to_birkhoff, sinkhorn, soft_sort
from lightning_sym.layers.circular_conv import CircularConv
from lightning_sym.layers.factored import FactoredFullyConnected
from lightning_sym.layers.fully_connected import FullyConnected
from lightning_sym.layers.group_conv import GroupConv, GroupLift, GroupMax
from lightning_sym.layers.moments import FeatureMoments
from lightning_sym.layers.pathways import ResidualPathways, parameter_paths
from lightning_sym.layers.polyphase_pool import PolyphasePool
from lightning_sym.layers.sparse import SparseConv, SparseFactoredFullyConnected
from lightning_sym.layers.stitching import (
    STITCHING_MAPS,
    AssignmentMap,
    FittedMap,
    FixedMap,
    FullMap,
    GroupMap,
    IdentityMap,
    LassoMap,
    LeastSquaresMap,
    LowRankMap,
    OrthogonalMap,
    Port,
    ProcrustesMap,
    SoftSortMap,
    StitchingMap,
    stitching_map,
)

__all__ = [
    "STITCHING_MAPS",
    "AssignmentMap",
    "CircularConv",
    "FactoredFullyConnected",
    "FeatureMoments",
    "FittedMap",
    "FixedMap",
    "FullMap",
    "FullyConnected",
    "GroupConv",
    "GroupLift",
    "GroupMap",
    "GroupMax",
    "IdentityMap",
    "LassoMap",
    "LeastSquaresMap",
    "LowRankMap",
    "OrthogonalMap",
    "PolyphasePool",
    "Port",
    "ProcrustesMap",
    "ResidualPathways",
    "SoftSortMap",
    "SparseConv",
    "SparseFactoredFullyConnected",
    "StitchingMap",
    "nearest_permutation",
    "parameter_paths",
    "project_to_birkhoff",
    "sinkhorn",
    "soft_sort",
    "stitching_map",
]
