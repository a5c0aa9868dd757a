"""Symmetries of networks: the groups that commute through activations."""

from lightning_sym.symmetry.base import AxisGroup, Element, Occurrence, Symmetry, Tap
from lightning_sym.symmetry.groups import (
    INTERTWINER_GROUPS,
    GroupElement,
    IntertwinerGroup,
    intertwiner_group,
    measure,
)
from lightning_sym.symmetry.interpolation import Barrier, average, barrier, interpolate
from lightning_sym.symmetry.rules import register_rule
from lightning_sym.symmetry.tracing import trace_symmetry

__all__ = [
    "INTERTWINER_GROUPS",
    "AxisGroup",
    "Barrier",
    "Element",
    "GroupElement",
    "IntertwinerGroup",
    "Occurrence",
    "Symmetry",
    "Tap",
    "average",
    "barrier",
    "interpolate",
    "intertwiner_group",
    "measure",
    "register_rule",
    "trace_symmetry",
]
