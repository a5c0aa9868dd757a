"""Symmetries of networks: the groups that commute through activations."""

from lightning_sym.symmetry.activations import ActivationMoments, activation_matching
from lightning_sym.symmetry.base import AxisGroup, Element, Occurrence, Symmetry, Tap
from lightning_sym.symmetry.canonical import Balance, CanonicalForm, balance, canonicalize
from lightning_sym.symmetry.dimension import LocalDimension, local_dimension
from lightning_sym.symmetry.distance import OrbitDistance, orbit_distance
from lightning_sym.symmetry.groups import (
    INTERTWINER_GROUPS,
    GroupElement,
    IntertwinerGroup,
    intertwiner_group,
    measure,
)
from lightning_sym.symmetry.interpolation import Barrier, average, barrier, interpolate
from lightning_sym.symmetry.matching import Match, parameter_distance, weight_matching
from lightning_sym.symmetry.merging import Merged, merge
from lightning_sym.symmetry.rules import register_rule
from lightning_sym.symmetry.tracing import trace_symmetry

__all__ = [
    "INTERTWINER_GROUPS",
    "ActivationMoments",
    "AxisGroup",
    "Balance",
    "Barrier",
    "CanonicalForm",
    "Element",
    "GroupElement",
    "IntertwinerGroup",
    "LocalDimension",
    "Match",
    "Merged",
    "Occurrence",
    "OrbitDistance",
    "Symmetry",
    "Tap",
    "activation_matching",
    "average",
    "balance",
    "barrier",
    "canonicalize",
    "interpolate",
    "intertwiner_group",
    "local_dimension",
    "measure",
    "merge",
    "orbit_distance",
    "parameter_distance",
    "register_rule",
    "trace_symmetry",
    "weight_matching",
]
