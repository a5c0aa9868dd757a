"""What factors know of a search for the member of an orbit that is nearest to another network."""

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
    """A search, as far as it has come.

    Attributes:
        target: Parameters of the reference, by name.
        current: Those of the current member of the orbit.
        signs: Whether signs may change.
        open_signs: Generators of signs that are to be tried by themselves, those of a column of a table together.
    """

    target: Mapping[str, Tensor]
    current: dict[str, Tensor]
    signs: bool
    open_signs: list[Ints]

    def attempt(self, parts: Mapping[str, Part], tensors: Iterable[str]) -> bool:
        """Let parts act, which change these tensors, if that is an improvement; return whether it was."""

    def slopes(self, acting: sparse.csc_matrix) -> tuple[list[str], Floats]:
        """Return the tensors that generators flip, in columns, and the inner products there, by generator."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Where units that one member of a part mixes are seen, all of them: in front of all gains, or behind some.

    Attributes:
        member: The number of the member.
        orbit: The number of the units' orbit.
        name: What the place is called.
        tap: The value.
        axis: The value's axis.
        positions: Where each of the units stands there. Shape (size,), int64.
        gains: By which tensors the units are multiplied: their names, entries of shape (size,), and powers.
    """

    member: int
    orbit: int
    name: str
    tap: Tap
    axis: int
    positions: Tensor
    gains: tuple[tuple[str, Ints, int], ...]

    def gain(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return by what the units are multiplied, given a network's tensors. Shape (size,), float64."""
        total = torch.ones(len(self.positions), dtype=torch.float64)
        for name, at, power in self.gains:
            total *= tensors[name].detach().double().cpu().reshape(-1)[torch.from_numpy(at)] ** power
        return total


@dataclass(frozen=True, eq=False)
class MatrixPlace:
    """Where matrices act on one axis of a tensor: those of a factor, or any in their place.

    Attributes:
        tensor: The tensor's name.
        maps: The names of the matrices, all of one size.
        axis: The axis.
        at: At which of its positions. Shape (matrices, size, places), int64.
        inverse: Whether their inverses, transposed, act.
        gains: Between which gains: names, elements of shape (size,), and powers.
    """

    tensor: str
    maps: tuple[str, ...]
    axis: int
    at: Tensor
    inverse: bool = False
    gains: tuple[tuple[str, Tensor, int], ...] = ()

    @staticmethod
    def indices(*positions: Ints) -> Tensor:
        """Return the positions of cells at several places, each of shape (cells, size), as (cells, size, places)."""
        return torch.from_numpy(np.stack(positions, -1))
