"""What is known exactly about ReLU networks of one input and one output without biases, of two units above all."""

from lightning_sym.landscape.two_unit.equivalence_class import (
    Stratum,
    TwoUnitClass,
    class_dimension,
    straight_legs,
)
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
    "Stratum",
    "TwoUnitClass",
    "balanced_weights",
    "class_dimension",
    "distance",
    "is_relu_line",
    "slopes",
    "straight_legs",
    "target_slopes",
]
