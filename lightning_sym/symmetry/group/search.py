"""The interface between factors and searches for the nearest point of an orbit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.element import Part


class Search(Protocol):
    """The state of a search.

    Attributes:
        target: Parameters of the reference, by name.
        current: Parameters of the current point of the orbit, by name.
        signs: Whether signs may change.
        open_signs: Sign generators to try one by one, in arrays; an array holds the generators of one table column.
    """

    target: Mapping[str, Tensor]
    current: dict[str, Tensor]
    signs: bool
    open_signs: list[Ints]

    def attempt(self, parts: Mapping[str, Part], tensors: Iterable[str]) -> bool:
        """Apply parts that change the named tensors, if this reduces the distance; return whether it did."""

    def slopes(self, acting: sparse.csc_matrix) -> tuple[list[str], Floats]:
        """Return the tensors flipped by generators (columns of `acting`), and the inner products there by generator."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A value that shows all units mixed by one member of a part, before or after gains.

    Attributes:
        member: Index of the member.
        orbit: Index of the units' orbit.
        name: Name of the place.
        tap: The value.
        axis: The value's axis.
        positions: Position of each unit on that axis. Shape (size,), int64.
        gains: Tensors that multiply the units: names, entries of shape (size,), and powers.
    """

    member: int
    orbit: int
    name: str
    tap: Tap
    axis: int
    positions: Tensor
    gains: tuple[tuple[str, Ints, int], ...]

    def gain(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the factor of each unit, given a network's tensors by name. Shape (size,), float64."""
        total = torch.ones(len(self.positions), dtype=torch.float64)
        for name, at, power in self.gains:
            total *= tensors[name].detach().double().cpu().reshape(-1)[torch.from_numpy(at)] ** power
        return total


@dataclass(frozen=True, eq=False)
class MatrixPlace:
    """Positions on an axis of a tensor, or on the members and units of a stack, that matrices act on.

    The matrices are those of a factor, or relaxed ones instead of them.

    Attributes:
        tensor: Name of the tensor.
        maps: Names of the matrices, all of one size.
        axes: The axis, or those of a stack.
        at: The positions. Shape (matrices, size, places), int64.
        inverse: Whether the inverse transposes act.
        gains: Gains that conjugate the matrices: names, elements of shape (size,), and powers.
    """

    tensor: str
    maps: tuple[str, ...]
    axes: tuple[int, ...]
    at: Tensor
    inverse: bool = False
    gains: tuple[tuple[str, Tensor, int], ...] = ()

    @staticmethod
    def indices(*positions: Ints) -> Tensor:
        """Stack the positions of cells at several places, each of shape (cells, size), to (cells, size, places)."""
        return torch.from_numpy(np.stack(positions, -1))
