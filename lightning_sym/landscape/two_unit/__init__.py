"""Exact theory of ReLU networks with one input, one output and no biases, mainly with two units."""

from lightning_sym.landscape.two_unit.equivalence_class import TwoUnitClass
from lightning_sym.landscape.two_unit.loss import (
    Moments,
    balanced_weights,
    distance,
    is_relu_line,
    slopes,
    target_slopes,
)
from lightning_sym.landscape.two_unit.plane_quadric import PlaneQuadric

__all__ = [
    "Moments",
    "PlaneQuadric",
    "TwoUnitClass",
    "balanced_weights",
    "distance",
    "is_relu_line",
    "slopes",
    "target_slopes",
]
