"""Orbit directions: pull gradients back from weights to the group.

See docs/theory/matching.md, 3.1.
"""

from collections.abc import Mapping

from torch import Tensor

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element


class OrbitDirections:
    """Coordinates of the continuous part of a symmetry group near the identity, where they are 0.

    They are those of all factors with coordinates: logarithms of scales, antisymmetric matrices for streams, arbitrary
    matrices for GL(d) blocks, and angles of rotary pairs. Translations and rank-one maps have none.

    Args:
        symmetry: The symmetry.

    Attributes:
        shapes: The shapes of the coordinates, by name.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self.symmetry = symmetry
        found = {name: own for factor in symmetry.factors for name, own in factor.coordinates().items()}
        self.shapes = {name: shape for name, shape in found.items() if shape[0]}

    def element(self, coordinates: Mapping[str, Tensor]) -> Element:
        """Return the element at these coordinates: the exponential of each kind separately."""
        given = {name: own.detach().double().cpu() for name, own in coordinates.items()}
        parts = {own.name: own.at(given) for own in self.symmetry.factors if own.coordinates().keys() & given.keys()}
        return self.symmetry.identity().replaced(**parts)

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative of a loss of the transformed weights with respect to the coordinates, at 0.

        Args:
            weights: The network's parameters, by name.
            gradients: Gradients of the loss with respect to them; of the same names and shapes.

        Returns:
            The derivatives, by coordinate name, of the coordinates' shapes; float64, on the CPU.
        """
        weights = {name: weights[name].detach().double().cpu() for name in gradients}
        gradients = {name: gradient.detach().double().cpu() for name, gradient in gradients.items()}
        found = [factor.pulled_back(weights, gradients) for factor in self.symmetry.factors]
        return {name: own for each in found for name, own in each.items() if name in self.shapes}
