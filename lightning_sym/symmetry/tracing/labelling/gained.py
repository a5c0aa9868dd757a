"""Cells of units that any invertible matrix may mix, between gains: linear layers around a batch norm or a gain.

See docs/theory/intertwiners.md, 2.18.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints


class BatchNorm(NamedTuple):
    """The names of the tensors of a batch norm that uses saved statistics; None for those that are no tensors."""

    gain: str | None
    bias: str | None
    mean: str | None
    variance: str | None


class Statistics(NamedTuple):
    """The positions of a cell's units in a batch norm: names of tensors, and indices of their elements.

    Attributes:
        bias: The bias.
        mean: The running mean.
        variance: The running variance.
        epsilon: The epsilon of the variance.
    """

    bias: tuple[str, Ints]
    mean: tuple[str, Ints]
    variance: tuple[str, Ints]
    epsilon: float


@dataclass(frozen=True, eq=False)
class Gain:
    """The multiplier of each unit of a cell: a gain, divided by the root of a variance in a batch norm.

    Attributes:
        name: The name of the gain.
        at: The index of its element for each unit. Shape (size,).
        norm: The rest of the batch norm; None for a gain alone.
    """

    name: str
    at: Ints
    norm: Statistics | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that make it."""
        return (self.name,) if self.norm is None else (self.name, self.norm.variance[0])

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the multipliers of units. Shape (size,), float64, on the CPU.

        Args:
            tensors: Parameters and buffers, by name.
        """
        gain = _elements(tensors[self.name], self.at)
        if self.norm is not None:
            variance = _elements(tensors[self.norm.variance[0]], self.norm.variance[1])
            gain = gain / (variance + self.norm.epsilon).abs().sqrt()
        return gain

    def within(self, place: Ints) -> "Gain":
        """Return the gain of some of the units, given their places among these."""
        norm = self.norm
        if norm is not None:
            bias, mean, variance = ((name, at[place]) for name, at in norm[:3])
            norm = Statistics(bias, mean, variance, norm.epsilon)
        return Gain(self.name, self.at[place], norm)


def _elements(tensor: Tensor, at: Ints) -> Tensor:
    """Return some elements of a vector, in double precision on the CPU."""
    return tensor.detach().reshape(-1)[torch.from_numpy(at).to(tensor.device)].to("cpu", torch.float64)


@dataclass(frozen=True, eq=False)
class GainedCell:
    r"""A cell of units with any invertible matrix A at one place, and :math:`D A D^{-1}` at the others.

    Let a unit's scales act with exponents e at a place, and :math:`(k, c) = e\,E`. Then k are the powers of the gains
    in :math:`D = \prod_l g_l^{k_l}`. A acts there if c = 1, and its inverse transpose if c = -1.

    Attributes:
        units: The units, in order. Shape (size,).
        orbit: The number of their orbit.
        gains: The fixed gains.
        solve: E. Shape (generators of a unit's scales, gains + 1).
        frame: With which exponents a unit's scales act where A does, in front of and behind all gains as it may be.
            Shape (generators,).
        sign: The same for its signs, modulo 2. Shape (generators of signs,).
        at_gains: (k, c) of the gains' own places. Shape (gains, gains + 1).
    """

    units: Ints
    orbit: int
    gains: tuple[Gain, ...]
    solve: Ints
    frame: Ints
    sign: Ints
    at_gains: Ints

    @property
    def size(self) -> int:
        """The number of units."""
        return len(self.units)

    @property
    def dimension(self) -> int:
        """The number of a matrix's entries, without those on the diagonal: these are among the scales."""
        return self.size**2 - self.size

    @property
    def moves_statistics(self) -> bool:
        """Whether the scales of the units move running statistics."""
        return any(gain.norm is not None for gain in self.gains)


class GainedPlace(NamedTuple):
    """The position of a gained cell in a slot.

    Attributes:
        cell: Its number.
        at: Positions of its units in the slot. Shape (size,).
        powers: The powers of the gains around the matrix.
        read: Whether the inverse transpose acts.
    """

    cell: int
    at: Ints
    powers: tuple[int, ...]
    read: bool
