"""Soft maps: matrices in place of a symmetry group's permutations and rotations, which leave the group.

See docs/theory/matching.md, 3.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.base import Symmetry


@dataclass(frozen=True, eq=False)
class _Place:
    """Where matrices act on one axis of a tensor.

    Attributes:
        maps: The names of the matrices, all of one size.
        axis: The axis.
        at: At which of its positions. Shape (matrices, size, places), int64.
        inverse: Whether their inverses, transposed, act.
        gains: Between which gains: names, elements of shape (size,), and powers.
    """

    maps: tuple[str, ...]
    axis: int
    at: Tensor
    inverse: bool = False
    gains: tuple[tuple[str, Tensor, int], ...] = ()


class SoftMaps:
    r"""Matrices that act on weights as elements of a group do, and change the function where they are not in it.

    - ``stream i``: any matrix in place of an orthogonal one, behind gains D as :math:`D M D^{-1}`;
    - ``units i, j``: a doubly stochastic one in place of the permutation of the units of one cell;
    - ``matrix i``: an invertible one in a dense cell (a head), its inverse transposed where units are read; these are
      in the group.

    The first two act alike along every axis on which their units stand, as permutations and orthogonal matrices do:
    what is put out becomes :math:`M W`, what reads it :math:`R M^\top`. Whole blocks, planes, scales, signs, and units
    of grouped convolutions stay as they are.

    Args:
        symmetry: The symmetry.

    Attributes:
        sizes: The sizes of the matrices, by name.

    Raises:
        ValueError: If the networks have batch norms, on whose running variances no such matrix acts.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        structure = symmetry.structure
        self.sizes: dict[str, int] = {}
        self._places: dict[str, list[_Place]] = {}
        for slot in structure.slots:
            if slot.kind == "variance":
                raise ValueError(
                    f"Soft maps mix units, and no matrix acts on their running variances ({slot.tensor}); use networks "
                    "without batch norms, or a method that stays in the group."
                )
            for index, at, powers in structure.rotated_places.get(slot.offset, ()):
                known = zip(structure.rotations[index].gains, powers, strict=True)
                gains = tuple((name, torch.from_numpy(where), power) for (name, where), power in known if power)
                self._add(slot.tensor, _Place((f"stream {index}",), slot.axes[0], _indices(at[None]), gains=gains))
            for cells, positions, read in structure.dense_places.get(slot.offset, ()):
                names = tuple(f"matrix {cell}" for cell in cells)
                self._add(slot.tensor, _Place(names, slot.axes[0], _indices(*positions), read))
        mixed = (structure.cell_of >= 0) | (structure.rotation_of >= 0)
        for orbit, units in enumerate(structure.orbits):
            columns, cell_of = structure.columns[orbit], structure.cells[orbit]
            slot_of = structure.slots_at(columns[0])
            slots = {int(index): structure.slots[index] for index in slot_of}
            together = any(len(slot.axes) > 1 for slot in slots.values()) or structure.copies_of(orbit) is not None
            if together or not structure.movable[orbit] or mixed[units].any():
                continue
            for cell in np.unique(cell_of):
                own = columns[cell_of == cell]
                for index, slot in slots.items() if len(own) > 1 else ():
                    at = own[:, slot_of == index].T - slot.offset
                    place = _Place((f"units {orbit}, {cell}",), slot.axes[0], _indices(*at[:, None]))
                    self._add(slot.tensor, place)

    def _add(self, tensor: str, place: _Place) -> None:
        self.sizes |= dict.fromkeys(place.maps, place.at.shape[1])
        self._places.setdefault(tensor, []).append(place)

    def act(self, maps: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the matrices make of weights; differentiable with respect to both.

        Args:
            maps: The matrices, by name, of the dtype and on the device of the weights.
            weights: A network's parameters, by name, gains included.
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
            lines, at = tensor.movedim(place.axis, 0), place.at.to(tensor.device)
            old = lines[at]  # (matrices, size, places, other axes)
            new = (matrices @ old.flatten(2)).view_as(old)
            tensor = lines.index_copy(0, at.flatten(), new.flatten(0, 2)).movedim(0, place.axis)
        return tensor


def _indices(*positions: Ints) -> Tensor:
    """Return the positions of cells at several places, each of shape (cells, size), as (cells, size, places)."""
    return torch.from_numpy(np.stack(positions, -1))
