"""Orbit directions: pull gradients back from weights to the group.

See docs/theory/matching.md, 3.1.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sym._text import unknown
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Factor

ALL = "all"
# The kinds of coordinates, by the first word of their names.
KINDS = {
    "scales": "scales",
    "matrix": "cells",
    "rotation": "rotations",
    "phases": "phases",
    "shifts": "shifts",
    "tilt": "tilts",
}


def kinds_of(factor: Factor[Any]) -> set[str]:
    """Return the kinds of a factor's coordinates."""
    return {KINDS[name.split()[0]] for name in factor.coordinates()}


class OrbitDirections:
    """Coordinates of the continuous part of a symmetry group near the identity, where they are 0.

    They are those of all factors with coordinates: logarithms of scales, antisymmetric matrices for streams, arbitrary
    matrices for GL(d) blocks, angles of rotary pairs, vectors for shifts and tilts.

    Args:
        symmetry: The symmetry.
        factors: The kinds of coordinates: "all", or some of ``scales``, ``cells``, ``rotations``, ``phases``,
            ``shifts`` and ``tilts``.
        fixed: Coordinates that remain 0: masks by name.

    Attributes:
        shapes: The shapes of the coordinates, by name.

    Raises:
        ValueError: If there is no such kind of coordinates.
    """

    def __init__(
        self, symmetry: Symmetry, factors: str | Iterable[str] = ALL, fixed: Mapping[str, Tensor] | None = None
    ) -> None:
        self.symmetry, self.fixed = symmetry, dict(fixed or {})
        found = {name: own for factor in symmetry.factors for name, own in factor.coordinates().items() if own[0]}
        kinds = {name: KINDS[name.split()[0]] for name in found}
        asked = [factors] if isinstance(factors, str) else list(factors)
        for kind in asked:
            if kind != ALL and kind not in kinds.values():
                present = [ALL, *dict.fromkeys(kinds.values())]
                raise ValueError(unknown("kind of coordinates of this network's group", kind, present))
        self.shapes = {name: shape for name, shape in found.items() if ALL in asked or kinds[name] in asked}

    def zeros(self) -> dict[str, Tensor]:
        """Return the coordinates of the identity, by name; float64, on the CPU."""
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}

    def element(self, coordinates: Mapping[str, Tensor]) -> Element:
        """Return the element at these coordinates: the exponential of each kind separately."""
        given = {name: own.detach().double().cpu() for name, own in coordinates.items()}
        parts = {}
        for factor in self.symmetry.factors:
            own = factor.coordinates()
            if own.keys() & given.keys():
                zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in own.items()}
                parts[factor.name] = factor.at({name: given.get(name, zero) for name, zero in zeros.items()})
        return self.symmetry.identity().replaced(**parts)

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative of a loss of the transformed weights with respect to the coordinates, at 0.

        Args:
            weights: The network's parameters and buffers, by name, as :meth:`Symmetry.tensors` gives them.
            gradients: Gradients of the loss with respect to them; of the same shapes. Those of tensors without
                gradients may be missing.

        Returns:
            The derivatives, by coordinate name, of the coordinates' shapes; float64, on the CPU.
        """
        moving = self.symmetry.structure.slots_of
        gradients = {name: own.detach().double().cpu() for name, own in gradients.items() if name in moving}
        weights = {name: weights[name].detach().double().cpu() for name in gradients}
        for name in gradients:
            for slot in moving[name]:
                if slot.kind == "variance":  # v' = s^2 (v + epsilon) - epsilon
                    weights[name] = 2 * (weights[name] + slot.epsilon)
        found = [factor.pulled_back(weights, gradients) for factor in self.symmetry.factors]
        result = {name: own for each in found for name, own in each.items() if name in self.shapes}
        for name, mask in self.fixed.items():
            if name in result:
                result[name] = result[name].masked_fill(mask, 0.0)
        return result
