"""Relaxed alignment: matrices that replace a group's permutations and rotations, and leave the group.

See docs/theory/matching.md, 3.2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import apart, together
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.search import MatrixPlace


class SoftMaps:
    r"""Matrices that act on weights as elements of a group do, and change the function unless they are in it.

    - ``stream i``: any matrix instead of an orthogonal one, after gains D as :math:`D M D^{-1}`;
    - ``units i, j``: a doubly stochastic matrix instead of a permutation of the units of one cell;
    - ``matrix i``: an invertible matrix on a GL(d) block (a head), with its inverse transpose on outgoing weights;
      these are in the group.

    The first two act as permutations and orthogonal matrices do, in the same way along every axis of their units:
    incoming weights become :math:`M W`, outgoing weights :math:`R M^\top`. Blocks, rotary pairs, scales, signs, and
    units of grouped convolutions stay unchanged.

    Args:
        symmetry: The symmetry.

    Attributes:
        sizes: The sizes of the matrices, by name.

    Raises:
        ValueError: If the networks have batch norms, as no such matrix acts on running variances.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self.sizes: dict[str, int] = {}
        self._places: dict[str, list[MatrixPlace]] = {}
        for slot in symmetry.structure.slots:
            if slot.kind == "variance":
                raise ValueError(
                    f"Soft maps mix units, and no matrix acts on their running variances ({slot.tensor}); use networks "
                    "without batch norms, or a method that stays in the group."
                )
        for factor in symmetry.factors.inwards:
            for place in factor.matrix_places():
                self.sizes |= dict.fromkeys(place.maps, place.at.shape[1])
                self._places.setdefault(place.tensor, []).append(place)

    def act(self, maps: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the matrices to weights; differentiable with respect to both.

        Args:
            maps: The matrices, by name, of the dtype and on the device of the weights.
            weights: A network's parameters, by name, including gains.
        """
        return {name: self._acted(maps, name, weights) for name in weights}

    def _acted(self, maps: Mapping[str, Tensor], name: str, weights: Mapping[str, Tensor]) -> Tensor:
        tensor = weights[name]
        for place in self._places.get(name, ()):
            matrices = torch.stack([maps[own] for own in place.maps])
            if place.inverse:
                matrices = torch.linalg.inv(matrices).mT
            for gain, elements, power in place.gains:
                around = weights[gain].reshape(-1)[elements.to(tensor.device)] ** power
                matrices = around[:, None] * matrices / around
            lines, at = together(tensor, place.axes), place.at.to(tensor.device)
            old = lines[at]  # (matrices, size, places, other axes)
            new = (matrices @ old.flatten(2)).view_as(old)
            sizes = tuple(tensor.shape[axis] for axis in place.axes)
            tensor = apart(lines.index_copy(0, at.flatten(), new.flatten(0, 2)), place.axes, sizes)
        return tensor
