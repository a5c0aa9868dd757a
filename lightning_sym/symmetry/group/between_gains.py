"""Base classes of orthogonal and invertible matrices between gains: docs/theory/intertwiners.md, 2.18."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.group.factor import Draw, Factor
from lightning_sym.symmetry.solving.rotations import Rotation
from lightning_sym.symmetry.tracing.labelling.gained import GainedCell

NO_MATRIX = torch.zeros(0, 0, dtype=torch.float64)  # an empty matrix means the identity, of any size

Matrices = tuple[Tensor, ...]


class BetweenGains(Factor[Matrices]):
    """A matrix for each cell of units between gains."""

    @property
    @abstractmethod
    def cells(self) -> Sequence[Rotation | GainedCell]:
        """The cells."""

    @property
    @abstractmethod
    def places(self) -> Mapping[int, Sequence[tuple[Any, ...]]]:
        """By slot offset: places of cells, which begin with the number of the cell."""

    @abstractmethod
    def usable(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return the numbers of the cells between gains other than zero."""

    @abstractmethod
    def drawn(self, number: int, draw: Draw) -> Tensor:
        """Draw the matrix of a cell."""

    def identity(self) -> Matrices:
        """Return the part that changes nothing."""
        return (NO_MATRIX,) * len(self.cells)

    def is_identity(self, own: Matrices) -> bool:
        """Return whether a part changes nothing."""
        return not any(len(matrix) for matrix in own)

    def sample(self, draw: Draw) -> Matrices:
        """Draw random matrices; cells that the options close keep the identity."""
        if not draw.mixing:
            return self.identity()
        closed = draw.keeps(self.name)
        return tuple(NO_MATRIX if own in closed else self.drawn(own, draw) for own in range(len(self.cells)))

    def closed(self, tensors: Mapping[str, Tensor]) -> frozenset[int]:
        """Return the numbers of the cells with a gain of zero; see :class:`Factor`."""
        return frozenset(range(len(self.cells))) - {*self.usable(tensors)}

    def compose(self, later: Matrices, earlier: Matrices) -> Matrices:
        """Return the product of two parts; `earlier` acts first."""
        pairs = zip(later, earlier, strict=True)
        return tuple(one @ two if len(one) and len(two) else one if len(one) else two for one, two in pairs)

    @property
    def dimension(self) -> int:
        """The dimension of all matrices together, without what is among the scales."""
        return sum(cell.dimension for cell in self.cells)

    def dimension_at(self, offsets: Collection[int]) -> int:
        """Return the dimension of the matrices that act at some slots, given by their offsets."""
        acting = {number for at in offsets for number, *_ in self.places.get(at, ())}
        return sum(self.cells[number].dimension for number in acting)

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the matrices' logarithms."""
        return {f"{self.name} {index}": (cell.size, cell.size) for index, cell in enumerate(self.cells)}

    def of_orbit(self, orbit: int, name: str) -> Tensor:
        """Return a mask of matrices on an orbit's units; see :class:`Factor`."""
        return super().of_orbit(orbit, name) | (self.cells[int(name.split()[1])].orbit == orbit)

    def _fits(self, member: Tensor) -> bool:
        return member.ndim == 2 and member.shape in {*self.coordinates().values()}


def moved_units(matrix: Tensor) -> tuple[Ints, Tensor]:
    """Return the units that a matrix moves at all, and the matrix among these."""
    change = matrix - torch.eye(len(matrix), dtype=matrix.dtype)
    moved = torch.nonzero(change.any(0) | change.any(1)).ravel() if len(matrix) else torch.zeros(0).long()
    return moved.numpy(), matrix[moved][:, moved]
