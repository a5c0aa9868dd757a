"""Orbit directions: pull gradients back from weights to the group.

See docs/theory/orbit.md, 1.
"""

import fnmatch
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sym._text import unknown
from lightning_sym.symmetry import Element, Symmetry
from lightning_sym.symmetry.views import ConvertedTensors, doubled

ALL = "all"
# The kinds of coordinates, by the first word of their names.
KINDS = {
    "scales": "scales",
    "matrix": "cells",
    "gained": "gained",
    "rotation": "rotations",
    "phases": "phases",
    "shifts": "shifts",
    "tilt": "tilts",
}


def kinds_of(symmetry: Symmetry) -> list[str]:
    """List the kinds of coordinates that a network's group has."""
    return list(dict.fromkeys(KINDS[name.split()[0]] for name in _shapes(symmetry)))


def _shapes(symmetry: Symmetry) -> dict[str, tuple[int, ...]]:
    return {name: own for factor in symmetry.factors for name, own in factor.coordinates().items() if own[0]}


def _matches(group: str, pattern: str) -> bool:
    return group == pattern or fnmatch.fnmatchcase(group, pattern)  # names may hold brackets


class OrbitDirections:
    """Coordinates of the continuous part of a symmetry group near the identity, where they are 0.

    They are those of all factors with coordinates: logarithms of scales, antisymmetric matrices for streams, arbitrary
    matrices for GL(d) blocks and between gains, angles of rotary pairs, vectors for shifts and rank-one maps.

    Args:
        symmetry: The symmetry.
        factors: "all", or a list of kinds of coordinates (``scales``, ``cells``, ``gained``, ``rotations``, ``phases``,
            ``shifts`` and ``tilts``) and of patterns of names of axis groups (``"blocks.*.mlp*"``). A pattern selects
            the coordinates of its units; no shift belongs to one axis group.
        fixed: Coordinates that remain 0: masks by name.

    Attributes:
        shapes: The shapes of the coordinates that move, by name.
        fixed: Masks of the entries among these that remain 0, by name.
        whole: Whether all kinds of coordinates were asked for.

    Raises:
        ValueError: If there is no such kind of coordinates, and no axis group of such a name.
    """

    def __init__(
        self, symmetry: Symmetry, factors: str | Iterable[str] = ALL, fixed: Mapping[str, Tensor] | None = None
    ) -> None:
        self.symmetry = symmetry
        found, kinds = _shapes(symmetry), kinds_of(symmetry)
        asked = [factors] if isinstance(factors, str) else list(factors)
        self.whole = ALL in asked
        patterns = [own for own in asked if own != ALL and own not in kinds]
        groups = [group.name for group in symmetry.groups]
        for pattern in patterns:
            if not any(_matches(group, pattern) for group in groups):
                options = [ALL, *kinds, *groups]
                raise ValueError(unknown("factor or axis group", pattern, options))
        orbits = [n for n, group in enumerate(groups) if any(_matches(group, own) for own in patterns)]
        masks, owners = {}, {name: own for own in symmetry.factors for name in own.coordinates()}
        for name, shape in found.items():
            moves = self.whole or KINDS[name.split()[0]] in asked
            masks[name] = torch.full(shape, not moves)
            for orbit in orbits:
                masks[name] &= ~owners[name].of_orbit(orbit, name)
            if fixed and name in fixed:
                masks[name] = masks[name] | fixed[name]
        self.shapes = {name: shape for name, shape in found.items() if not bool(masks[name].all())}
        self.fixed = {name: masks[name] for name in self.shapes if bool(masks[name].any())}

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
                zeros = {name: torch.zeros(own[name], dtype=torch.float64) for name in own.keys() - given.keys()}
                parts[factor.name] = factor.at({**given, **zeros})
        return self.symmetry.identity().replaced(**parts)

    def restricted(self, element: Element) -> Element:
        """Return an element without its parts along coordinates that do not move, and without signs and orders.

        Args:
            element: From this symmetry; its parts are independent of one another, as those of random elements.
        """
        parts = {}
        for factor in self.symmetry.factors:
            own, same = element.parts[factor.name], factor.identity()
            names = list(factor.coordinates())
            if not isinstance(own, tuple):
                moves = bool(names) and names[0] in self.shapes
                mask = self.fixed.get(names[0]) if moves else None
                parts[factor.name] = same if not moves else own if mask is None else torch.where(mask, same, own)
            elif names:
                pairs = zip(names, own, same, strict=True)
                parts[factor.name] = tuple(one if name in self.shapes else two for name, one, two in pairs)
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
        gradients = {name: doubled(own) for name, own in gradients.items() if name in moving}
        exact = ConvertedTensors(weights, doubled)
        factors = (own for own in self.symmetry.factors if not self.shapes.keys().isdisjoint(own.coordinates()))
        found = [factor.pulled_back(exact, gradients) for factor in factors]
        result = {name: own for each in found for name, own in each.items() if name in self.shapes}
        for name, mask in self.fixed.items():
            if name in result:
                result[name] = result[name].masked_fill(mask, 0.0)
        return result
