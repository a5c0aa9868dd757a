"""Directions along a network's orbit: a gradient with respect to weights becomes one with respect to the group.

See docs/theory/matching.md, 3.1.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.cells import cell_slices
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.matching.balanced import along
from lightning_sym.symmetry.matching.streams import weight_products
from lightning_sym.symmetry.turning import NO_TURN


class OrbitDirections:
    """The continuous part of a symmetry group near the identity, in coordinates that are 0 there.

    Logarithms of scales, antisymmetric matrices for streams, any matrices for dense cells, angles of planes. Shifts and
    tilts are left out.

    Args:
        symmetry: The symmetry.

    Attributes:
        shapes: The shapes of the coordinates, by name.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        structure = symmetry.structure
        self.symmetry = symmetry
        inside = [t.ravel() for u, t in zip(structure.orbits, structure.scale_table, strict=True)
                  if structure.cell_of[u[0]] >= 0]  # fmt: skip
        self._of_matrices = np.concatenate([np.zeros(0, np.int64), *inside])
        found: dict[str, tuple[int, ...]] = {"scales": (symmetry.scales,), "phases": (structure.phases,)}
        found |= {f"rotation {i}": (own.size, own.size) for i, own in enumerate(structure.rotations)}
        found |= {f"matrix {i}": (len(cell), len(cell)) for i, cell in enumerate(structure.dense)}
        self.shapes = {name: shape for name, shape in found.items() if shape[0]}

    def element(self, coordinates: Mapping[str, Tensor]) -> Element:
        """Return the element of the group at these coordinates: the exponential of each kind by itself."""
        structure, given = self.symmetry.structure, {n: c.detach().double().cpu() for n, c in coordinates.items()}
        element = self.symmetry.identity()
        if "scales" in given:
            scales = given["scales"].clone()
            scales[torch.from_numpy(self._of_matrices)] = 0.0
            element = replace(element, log_scale=scales)
        if "phases" in given:
            element = replace(element, phase=given["phases"].clone())
        turns = []
        for index, rotation in enumerate(structure.rotations):
            matrix = _antisymmetric(given[f"rotation {index}"], rotation.fixes_ones)
            turns.append(torch.linalg.matrix_exp(matrix) if bool(matrix.any()) else NO_TURN)
        dense = tuple(torch.linalg.matrix_exp(given[f"matrix {index}"]) for index in range(len(structure.dense)))
        return replace(element, rotation=tuple(turns), dense=dense)

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative of a loss of the moved weights with respect to the coordinates, at 0.

        Args:
            weights: The network's parameters, by name.
            gradients: Those of the loss with respect to them; of the same names and shapes.

        Returns:
            By the names of the coordinates, of their shapes; float64, on the CPU.
        """
        structure = self.symmetry.structure
        weights = {name: weights[name].detach().double().cpu() for name in gradients}
        gradients = {name: gradient.detach().double().cpu() for name, gradient in gradients.items()}
        found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        for index, rotation in enumerate(structure.rotations):
            products = weight_products(structure, index, gradients, weights)
            found[f"rotation {index}"] = _antisymmetric(products, rotation.fixes_ones)
        slices = zip(cell_slices(structure, weights), cell_slices(structure, gradients), strict=True)
        for (_, cells, read, own), (_, _, _, gradient) in slices:
            # A where units are put out, its inverse transposed where they are read.
            products = -own @ gradient.mT if read else gradient @ own.mT
            for cell, product in zip(cells, products, strict=True):
                found[f"matrix {cell}"] += product
        for slot in structure.slots:
            if slot.tensor not in weights:
                continue
            if "scales" in found and structure.magnitudes[slot.rows].nnz:
                inner = along(weights[slot.tensor] * gradients[slot.tensor], slot.axes).reshape(-1)
                found["scales"] += torch.from_numpy(structure.magnitudes[slot.rows].T @ inner)
            if slot.offset in structure.turned_places:
                phase, *places = structure.turned_places[slot.offset]
                (x, y), (along_x, along_y) = (
                    [tensors[slot.tensor].movedim(slot.axes[0], 0).reshape(slot.size, -1)[torch.from_numpy(at)]
                     for at in places]
                    for tensors in (weights, gradients)
                )  # fmt: skip
                found["phases"].index_add_(0, torch.from_numpy(phase), (along_y * x - along_x * y).sum(1))
        if "scales" in found:
            found["scales"][torch.from_numpy(self._of_matrices)] = 0.0
        return found


def _antisymmetric(matrix: Tensor, fixes_ones: bool) -> Tensor:
    """Return the nearest antisymmetric matrix (that annihilates the vector of ones, if it must)."""
    if fixes_ones:
        matrix = matrix - matrix.mean(0, keepdim=True)
        matrix = matrix - matrix.mean(1, keepdim=True)
    return (matrix - matrix.mT) / 2
