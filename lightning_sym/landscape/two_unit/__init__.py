"""Exact theory of ReLU networks with one input, one output and no biases, mainly with two units."""

from lightning_sym._exports import exported
from lightning_sym.landscape.two_unit.equivalence_class import PlaneQuadric as PlaneQuadric
from lightning_sym.landscape.two_unit.equivalence_class import TwoUnitClass as TwoUnitClass
from lightning_sym.landscape.two_unit.loss import Moments as Moments
from lightning_sym.landscape.two_unit.loss import balanced_weights as balanced_weights
from lightning_sym.landscape.two_unit.loss import distance as distance
from lightning_sym.landscape.two_unit.loss import is_relu_line as is_relu_line
from lightning_sym.landscape.two_unit.loss import slopes as slopes
from lightning_sym.landscape.two_unit.loss import target_slopes as target_slopes

__all__ = exported(globals())
