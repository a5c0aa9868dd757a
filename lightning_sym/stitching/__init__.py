"""Stitching: cut networks, joined by trainable stitching layers, and families of these layers."""

from lightning_sym.stitching.maps.base import FittedMap, Port, StitchingMap
from lightning_sym.stitching.maps.birkhoff import nearest_permutation, project_to_birkhoff, sinkhorn, soft_sort
from lightning_sym.stitching.maps.block_maps import BlockMap, HeadMap, OnesFixingMap
from lightning_sym.stitching.maps.families import STITCHING_MAPS, stitching_map
from lightning_sym.stitching.maps.group_maps import AssignmentMap, GroupMap, SoftSortMap
from lightning_sym.stitching.maps.linear_maps import (
    FixedMap,
    FullMap,
    IdentityMap,
    LassoMap,
    LeastSquaresMap,
    LowRankMap,
    OrthogonalMap,
    ProcrustesMap,
)
from lightning_sym.stitching.maps.moments import FeatureMoments
from lightning_sym.stitching.networks import (
    BatchNormMode,
    Crossing,
    CutNetwork,
    PlantedStitches,
    Ports,
    StitchedNetwork,
    stitch_ports,
)

__all__ = [
    "STITCHING_MAPS",
    "AssignmentMap",
    "BatchNormMode",
    "BlockMap",
    "Crossing",
    "CutNetwork",
    "FeatureMoments",
    "FittedMap",
    "FixedMap",
    "FullMap",
    "GroupMap",
    "HeadMap",
    "IdentityMap",
    "LassoMap",
    "LeastSquaresMap",
    "LowRankMap",
    "OnesFixingMap",
    "OrthogonalMap",
    "PlantedStitches",
    "Port",
    "Ports",
    "ProcrustesMap",
    "SoftSortMap",
    "StitchedNetwork",
    "StitchingMap",
    "nearest_permutation",
    "project_to_birkhoff",
    "sinkhorn",
    "soft_sort",
    "stitch_ports",
    "stitching_map",
]
