"""Group operations on the elements of a symmetry: sampling, composition and inverse, without a network."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym.symmetry.action import Action, inverted
from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.phases import phases_after, phases_back, random_phases
from lightning_sym.symmetry.tilting import no_tilts, random_tilt, tilts_after, tilts_back
from lightning_sym.symmetry.tracing.structure import Structure
from lightning_sym.symmetry.translations import carried
from lightning_sym.symmetry.turning import NO_TURN, random_turn, turns_after, turns_back


class ElementGroup:
    """A symmetry group with the operations on its elements.

    Args:
        structure: The group.
        fingerprint: Identifies the group; elements of other groups are rejected.
    """

    def __init__(self, structure: Structure, fingerprint: str) -> None:
        self.structure, self.fingerprint = structure, fingerprint

    @property
    def units(self) -> int:
        """The number of units, and the length of a permutation."""
        return self.structure.units

    @property
    def scales(self) -> int:
        """The number of independent scales, including those inside GL(d) blocks."""
        return int(self.structure.magnitudes.shape[1])

    @property
    def signs(self) -> int:
        """The number of independent signs, including those inside GL(d) blocks."""
        return int(self.structure.signs.shape[1])

    def identity(self) -> Element:
        """Return the identity element."""
        return Element(
            self.fingerprint,
            torch.arange(self.units),
            torch.zeros(self.scales, dtype=torch.float64),
            torch.ones(self.signs, dtype=torch.float64),
            self.structure.same,
            torch.zeros(self.structure.shifts.size, dtype=torch.float64),
            (NO_TURN,) * len(self.structure.rotations),
            no_tilts(self.structure),
            torch.zeros(self.structure.phases, dtype=torch.float64),
        )

    def sample(
        self,
        generator: torch.Generator | None = None,
        *,
        scale: float = 0.5,
        permutations: bool = True,
        signs: bool = True,
        mixing: bool = True,
        shifts: bool = True,
    ) -> Element:
        """Draw a random element.

        Args:
            generator: Generator of the random numbers; by default the global one.
            scale: Standard deviation of the natural logarithms of scales and of the singular values of GL(d) matrices,
                and of the translations. 0 leaves all magnitudes unchanged.
            permutations: Whether units are permuted, uniformly over all permutations of each cell and of the blocks.
            signs: Whether signs are drawn.
            mixing: Whether GL(d) blocks and streams get random matrices (uniform if orthogonal), layer norms
                rank-one maps, and rotary pairs phases (uniform).
            shifts: Whether translations are drawn.

        Raises:
            TypeError: If `generator` is neither a generator nor None.
            ValueError: If `scale` is negative or not finite.
        """
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"scale must be a finite number >= 0, got {scale}")
        permutation = self._random_permutation(generator) if permutations else np.arange(self.units)
        return self._drawn(generator, permutation, scale=scale, signs=signs, mixing=mixing, shifts=shifts)

    def _drawn(
        self,
        generator: torch.Generator | None,
        permutation: Ints,
        *,
        scale: float,
        signs: bool = True,
        mixing: bool = True,
        shifts: bool = True,
        most: int | None = None,
    ) -> Element:
        """Draw an element with a given permutation; each orthogonal matrix changes at most `most` units."""
        structure = self.structure
        log_scale = torch.randn(self.scales, dtype=torch.float64, generator=generator) * scale
        sign = torch.ones(self.signs, dtype=torch.float64)
        if signs:
            sign = torch.randint(0, 2, (self.signs,), generator=generator).double() * 2 - 1
        dense = []
        for cell in structure.dense:
            size = len(cell)
            matrix = torch.eye(size, dtype=torch.float64)
            if mixing:
                left, right = (random_orthogonal(size, generator) for _ in range(2))
                matrix = (left * (scale * torch.randn(size, dtype=torch.float64, generator=generator)).exp()) @ right
            dense.append(matrix)
        # Inside GL(d) blocks, the matrices include scales and signs.
        for table, numbers, neutral in ((structure.scale_table, log_scale, 0.0), (structure.sign_table, sign, 1.0)):
            for units, own in zip(structure.orbits, table, strict=True):
                if structure.cell_of[units[0]] >= 0:
                    numbers[torch.from_numpy(own.ravel())] = neutral
        shift = torch.randn(structure.shifts.size, dtype=torch.float64, generator=generator)
        shift *= scale if shifts else 0.0
        turns = tuple(random_turn(r, generator, most=most) if mixing else NO_TURN for r in structure.rotations)
        tilts = no_tilts(structure)
        if mixing:
            tilts = tuple(random_tilt(tilt, generator, scale=scale, signs=signs) for tilt in structure.tilts)
        phase = random_phases(structure, generator) if mixing else torch.zeros(structure.phases, dtype=torch.float64)
        order = torch.from_numpy(permutation)
        return Element(self.fingerprint, order, log_scale, sign, tuple(dense), shift, turns, tilts, phase)

    def _random_permutation(self, generator: torch.Generator | None, *, cycles: bool = False) -> Ints:
        """Draw a uniform permutation; with `cycles`, one that moves all movable units, in a cycle for each cell."""
        structure = self.structure
        permutation = np.arange(self.units)
        for units, cells, movable in zip(structure.orbits, structure.cells, structure.movable, strict=True):
            if not movable or structure.cell_of[units[0]] >= 0:
                continue
            draw = torch.rand(len(units), dtype=torch.float64, generator=generator).numpy()
            # Sorting by (cell, random) permutes within cells.
            shuffled = units[np.lexsort((draw, cells))]
            if cycles:
                begins = np.flatnonzero(np.diff(np.sort(cells))) + 1
                permutation[shuffled] = np.concatenate([np.roll(own, -1) for own in np.split(shuffled, begins)])
            else:
                permutation[units[np.argsort(cells, kind="stable")]] = shuffled
        for blocks in structure.blocks:
            order = torch.randperm(len(blocks), generator=generator).numpy()
            new, old = (order, np.roll(order, 1)) if cycles else (np.arange(len(blocks)), order)
            permutation[blocks[new]] = permutation[blocks[old]]
        return permutation

    def _own(self, *elements: Element) -> None:
        for element in elements:
            if not isinstance(element, Element):
                raise TypeError(f"expected an element of this symmetry, got {type(element).__name__}")
            if element.group != self.fingerprint:
                raise ValueError(
                    "the element belongs to the symmetry of another network; expected one made by this symmetry's "
                    "identity() or sample()"
                )

    def _pulled(self, numbers: Tensor, kind: Literal["scales", "signs"], permutation: Ints) -> Tensor:
        """Reindex generators of the permuted network by those of the original one: unit p[j] gets the number of j."""
        result, structure = numbers.clone(), self.structure
        for orbit, table in enumerate(structure.scale_table if kind == "scales" else structure.sign_table):
            if table.shape[1]:
                old = structure.arriving(orbit, kind, permutation)
                result[torch.from_numpy(old)] = numbers[torch.from_numpy(table)]
        return result

    def compose(self, second: Element, first: Element) -> Element:
        """Return the composition that applies `first`, then `second`.

        Raises:
            ValueError: If an element belongs to another network's symmetry.
        """
        self._own(second, first)
        permutation = first.permutation.numpy()
        after = (second.dense[place] for place in self._cells_after(permutation)) if second.dense else ()
        dense = tuple(
            earlier if later is same else later if earlier is same else later @ earlier
            for later, earlier, same in zip(after, first.dense, self.structure.same, strict=True)
        )
        # g2 n2 g1 n1 = g2 g1 (g1^-1 n2 g1) n1
        pulled = self._carried(second.shift, self._inverse_without_shifts(first), first)
        return Element(
            self.fingerprint,
            first.permutation[second.permutation],
            first.log_scale + self._pulled(second.log_scale, "scales", permutation),
            first.sign * self._pulled(second.sign, "signs", permutation),
            dense,
            first.shift + pulled,
            turns_after(self.structure, second, first),
            tilts_after(self.structure, second, first),
            phases_after(self.structure, second, first),
        )

    def _cells_after(self, permutation: Ints) -> list[int]:
        """Return for each GL(d) block its index after a permutation."""
        first = np.array([cell[0] for cell in self.structure.dense], np.int64)
        after: list[int] = self.structure.cell_of[np.argsort(permutation)[first]].tolist()
        return after

    def inverse(self, element: Element) -> Element:
        """Return the inverse of an element."""
        self._own(element)
        # (g n)^-1 = g^-1 (g n^-1 g^-1)
        inverse = self._inverse_without_shifts(element)
        return replace(inverse, shift=self._carried(-element.shift, element, inverse))

    def _carried(self, shift: Tensor, by: Element, back: Element) -> Tensor:
        """Return the translation g n g^-1 for the linear part g of an element, given its inverse."""
        if not bool(shift.any()):
            return shift
        action, inverse = Action(self.structure, by), Action(self.structure, back)
        return carried(self.structure.shifts, shift, action, inverse, self.structure.slots_of)

    def _inverse_without_shifts(self, element: Element) -> Element:
        inverse = torch.argsort(element.permutation)
        back = inverse.numpy()
        dense: list[Tensor] = [torch.empty(0)] * len(element.dense)
        places = self._cells_after(element.permutation.numpy())
        for place, matrix in zip(places, inverted(element.dense), strict=True):
            dense[place] = matrix
        return Element(
            self.fingerprint,
            inverse,
            -self._pulled(element.log_scale, "scales", back),
            self._pulled(element.sign, "signs", back),
            tuple(dense),
            torch.zeros_like(element.shift),
            turns_back(self.structure, element),
            tilts_back(self.structure, element),
            phases_back(self.structure, element),
        )
