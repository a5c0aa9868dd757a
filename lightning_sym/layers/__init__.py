"""Layers: maps between the features of two networks, plain torch modules without Lightning."""

from lightning_sym.layers.birkhoff import nearest_permutation, project_to_birkhoff, sinkhorn, soft_sort
from lightning_sym.layers.moments import FeatureMoments
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
    "FeatureMoments",
    "FittedMap",
    "FixedMap",
    "FullMap",
    "GroupMap",
    "IdentityMap",
    "LassoMap",
    "LeastSquaresMap",
    "LowRankMap",
    "OrthogonalMap",
    "Port",
    "ProcrustesMap",
    "SoftSortMap",
    "StitchingMap",
    "nearest_permutation",
    "project_to_birkhoff",
    "sinkhorn",
    "soft_sort",
    "stitching_map",
]
