"""Permutations of units within cells, and of blocks."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.group.factor import Draw, Factor
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung
from lightning_sym.symmetry.group.order import find_order
from lightning_sym.symmetry.group.search import MatrixPlace
from lightning_sym.symmetry.solving.structure import Slot

_FEW = 5  # units; of more, 24 cycles and more move all


class Permutation(Factor[Tensor]):
    """Permutations of the units within each cell, and of blocks, member by member."""

    name = "permutation"

    def identity(self) -> Tensor:
        """Return the identity permutation."""
        return torch.arange(self.structure.units)

    def is_identity(self, own: Tensor) -> bool:
        """Return whether a part is the identity."""
        return torch.equal(own, self.identity())

    def sample(self, draw: Draw) -> Tensor:
        """Draw a uniform permutation; with `draw.cycles`, one without fixed units where one exists."""
        structure = self.structure
        permutation = np.arange(structure.units)
        if not draw.permutations:
            return torch.from_numpy(permutation)
        for units, cells, movable in zip(structure.orbits, structure.cells, structure.movable, strict=True):
            if not movable or structure.cell_of[units[0]] >= 0:
                continue
            random = torch.rand(len(units), dtype=torch.float64, generator=draw.generator).numpy()
            shuffled = units[np.lexsort((random, cells))]  # by cell, in random order within each
            if draw.cycles:
                begins = np.flatnonzero(np.diff(np.sort(cells))) + 1
                permutation[shuffled] = np.concatenate([np.roll(own, -1) for own in np.split(shuffled, begins)])
            else:
                permutation[units[np.argsort(cells, kind="stable")]] = shuffled
        for blocks in structure.blocks:
            order = torch.randperm(len(blocks), generator=draw.generator).numpy()
            new, old = (order, np.roll(order, 1)) if draw.cycles else (np.arange(len(blocks)), order)
            permutation[blocks[new]] = permutation[blocks[old]]
        return torch.from_numpy(permutation)

    @property
    def chances(self) -> int:
        """The number of cells and blocks with several permutations that leave no unit fixed, but only a few."""
        structure = self.structure
        moved = zip(structure.orbits, structure.cells, structure.movable, strict=True)
        counts = [np.bincount(cells) for units, cells, moves in moved if moves and structure.cell_of[units[0]] < 0]
        counts.append(np.array([len(blocks) for blocks in structure.blocks], np.int64))
        return int(sum(((count > 2) & (count < _FEW)).sum() for count in counts))

    rung, bounded, keeps_norms = Rung.ORDER, True, True

    def canonical(self, state: Gathered) -> Canonical:
        """Sort units within cells, and blocks; dead units come last."""
        notes: list[str] = []
        order = find_order(state.plan, state.slices, state.gauged, state.dead, state.names, notes, state.placed)
        return Canonical({self.name: torch.from_numpy(order)}, notes)

    def sample_at(self, seen: Slot, values: Factor[Tensor], draw: Draw) -> Tensor:
        """Draw a permutation within cells; see :class:`Factor`."""
        structure, permutation = self.structure, np.arange(self.structure.units)
        for units, cells, movable in zip(structure.orbits, structure.cells, structure.movable, strict=True):
            if movable and structure.cell_of[units[0]] < 0 and np.isin(units, seen.unit).any():
                random = torch.rand(len(units), dtype=torch.float64, generator=draw.generator).numpy()
                permutation[units[np.argsort(cells, kind="stable")]] = units[np.lexsort((random, cells))]
        return torch.from_numpy(permutation)

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return the product of two parts; `earlier` acts first."""
        return earlier[later]

    def inverse(self, own: Tensor) -> Tensor:
        """Return the inverse of a part."""
        return torch.argsort(own)

    @property
    def log_order(self) -> float:
        """Natural logarithm of the number of permutations that are not matrices of another factor."""
        return self.structure.log_order

    def matrix_places(self) -> Iterable[MatrixPlace]:
        """Yield the places where units of a cell are permuted, but not mixed by matrices; see :class:`Factor`."""
        structure = self.structure
        for orbit, (columns, cell_of) in enumerate(zip(structure.columns, structure.cells, strict=True)):
            slot_of = structure.slots_at(columns[0])
            slots = {int(index): structure.slots[index] for index in slot_of}
            together = any(len(slot.axes) > 1 for slot in slots.values()) or structure.copies_of(orbit) is not None
            mixed = any(own.mixes(orbit) and (own.permutes or own.late) for own in self.group)
            for cell in np.unique(cell_of) if structure.movable[orbit] and not (together or mixed) else ():
                own = columns[cell_of == cell]
                for index, slot in slots.items() if len(own) > 1 else ():
                    at = own[:, slot_of == index].T - slot.offset
                    at = MatrixPlace.indices(*at[:, None])
                    yield MatrixPlace(slot.tensor, (f"units {orbit}, {cell}",), slot.axes, at)

    def check(self, own: Tensor) -> None:
        """Check that a tensor is a part of this factor.

        Raises:
            ValueError: If it is no permutation, or moves units out of their cells.
        """
        super().check(own)
        structure, image = self.structure, own.numpy()
        if not np.array_equal(np.sort(image), np.arange(structure.units)):
            raise ValueError("permutation holds a number twice; expected each unit once")
        for units, cells, movable in zip(structure.orbits, structure.cells, structure.movable, strict=True):
            came = image[units]
            inside = np.isin(came, units).all() and (movable or np.array_equal(came, units))
            if inside:  # whole cells are permuted
                pairs = np.unique(np.stack([cells, cells[structure.place_in_orbit[came]]]), axis=1)
                inside = pairs.shape[1] == len(np.unique(cells))
            if not inside:
                raise ValueError("permutation moves units out of their axis or cell; expected an element of this group")
