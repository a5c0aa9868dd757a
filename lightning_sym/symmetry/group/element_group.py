"""Group operations on the elements of a symmetry, without a network."""

import math
from pathlib import Path

import numpy as np
import torch

from lightning_sym._exports import explained
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Draw
from lightning_sym.symmetry.group.kinds import factors_of
from lightning_sym.symmetry.group.saved import read_element, write_element
from lightning_sym.symmetry.solving.structure import Structure


@explained
class ElementGroup:
    """A symmetry group with the operations on its elements.

    Args:
        structure: The group.
        parameters: The names of the parameters among the tensors.

    Attributes:
        factors: The factors of the group.
    """

    def __init__(self, structure: Structure, parameters: frozenset[str] = frozenset()) -> None:
        self.structure = structure
        self.factors = factors_of(structure, parameters)

    @property
    def fingerprint(self) -> str:
        """Identifies the group; elements of other groups are rejected."""
        raise NotImplementedError

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
        return self.factors.identity(self.fingerprint)

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
            ValueError: If `scale` is negative or not finite.
        """
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"scale must be a finite number >= 0, got {scale}")
        return self.drawn(Draw(generator, scale, permutations, signs, mixing, shifts))

    def drawn(self, draw: Draw) -> Element:
        """Draw a random element with the options of a `Draw`; see :meth:`sample`."""
        return self.factors.sample(self.fingerprint, draw)

    def _exchanging(self, generator: torch.Generator, *, cycles: bool) -> Element:
        """Draw a permutation that also moves units within matrices; `cycles` lets it move all that it can.

        It may be no element of the group: matrices that act alike on several blocks are permuted one by one.
        """
        order = self.factors["permutation"].sample(Draw(generator, cycles=cycles))
        for mixed in (self.structure.cell_of, self.structure.rotation_of):
            for cell in np.unique(mixed[mixed >= 0]):
                units = torch.from_numpy(np.flatnonzero(mixed == cell))
                order[units] = order[units[torch.randperm(len(units), generator=generator)]]
        return self.identity().replaced(permutation=order)

    def compose(self, second: Element, first: Element) -> Element:
        """Return the composition that applies `first`, then `second`.

        Raises:
            ValueError: If an element belongs to another network's symmetry.
        """
        self._own(second, first)
        return self.factors.compose(second, first)

    def inverse(self, element: Element) -> Element:
        """Return the inverse of an element."""
        self._own(element)
        return self.factors.inverse(element)

    def save(self, element: Element, path: str | Path) -> Path:
        """Write an element to a file of safetensors, with the fingerprint of the group.

        Args:
            element: From this symmetry.
            path: The file, with the suffix ``.safetensors``. An existing file is replaced.

        Returns:
            The path.

        Raises:
            ValueError: If the element belongs to another network's symmetry, or the path has another suffix.
        """
        self._own(element)
        return write_element(element, path)

    def load(self, path: str | Path) -> Element:
        """Read an element that :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it holds no element, one of another symmetry, or invalid numbers.
        """
        return self.factors.of(self.fingerprint, read_element(path, self.fingerprint))

    def _own(self, *elements: Element) -> None:
        for element in elements:
            if element.group != self.fingerprint:
                raise ValueError(
                    "the element belongs to the symmetry of another network; expected one made by this symmetry's "
                    "identity() or sample()"
                )
