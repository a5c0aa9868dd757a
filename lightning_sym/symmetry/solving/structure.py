"""The symmetry group of a network as arrays."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints
from lightning_sym.symmetry.charts import Charts
from lightning_sym.symmetry.numbering import flat
from lightning_sym.symmetry.solving.copies import Copies, arriving
from lightning_sym.symmetry.solving.rotations import Rotation, exponents, own_exponents
from lightning_sym.symmetry.tracing.affine.space import Translations
from lightning_sym.symmetry.tracing.affine.tilts import Tilt
from lightning_sym.symmetry.tracing.labelling.gained import GainedCell, GainedPlace

VALUE = ("value", 0.0)  # how most parameters and buffers transform, see Slot.kind


@dataclass(frozen=True)
class Slot:
    """The labelled positions of a parameter or buffer: one axis of it, or two axes together (grouped convolution).

    Attributes:
        tensor: Its name.
        axes: One axis, or two.
        offset: The index of its first position among those of all slots.
        shape: Sizes of the axes.
        unit: For each position, its unit, or -1.
        kind: "value", or "variance": v' = s^2 (v + epsilon) - epsilon.
        epsilon: See `kind`.
        of_stack: Whether the two axes index members and their units (docs/theory/intertwiners.md, 2.14). Positions are
            row-major, and no other slot has the first axis.
    """

    tensor: str
    axes: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    unit: Ints
    kind: str
    epsilon: float
    of_stack: bool = False

    @cached_property
    def size(self) -> int:
        """The number of positions."""
        return math.prod(self.shape)

    @cached_property
    def rows(self) -> slice:
        """Its positions among those of all slots."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, eq=False)
class HalfTurns:
    """Half periods that biases before sines and cosines absorb; integer multiples may be added.

    Attributes:
        biases: The names of the biases.
        counts: The number of entries of each bias.
        place: For each half turn the bias's position among those of all slots. Shape (half turns,).
        size: Half a period. Shape (half turns,), float64.
        odd: Whether odd multiples are allowed, rather than even ones only. Shape (half turns,), bool.
        flips: The positions of all slots that odd multiples flip. Shape (positions, half turns).
    """

    biases: tuple[str, ...]
    counts: tuple[int, ...]
    place: Ints
    size: Floats
    odd: Bools
    flips: sparse.csr_matrix


NO_HALF_TURNS = HalfTurns((), (), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool), sparse.csr_matrix((0, 0)))


@dataclass(frozen=True)
class Structure:
    """The symmetry group of a network as arrays.

    Attributes:
        slots: Every labelled axis.
        units: The number of units.
        orbits: Units that some permutation exchanges; immovable units are grouped by origin.
        movable: For each orbit, whether its units can be permuted.
        columns: For each orbit (units, columns), the positions of its units among all slots. All units of an orbit
            occur at corresponding places.
        cells: For each orbit, the cell index of each unit. Units of one cell are permuted freely.
        blocks: Systems of blocks (blocks, members). Blocks are permuted member by member, one system after another.
            Blocks inside other blocks (queries that share keys) come first.
        magnitudes: Exponents of scale generators, sparse (positions of all slots, generators).
        signs: Exponents of sign generators, modulo 2.
        scale_table: For each orbit (units, m), the scale generators of its units, in a common order.
        sign_table: The same for signs.
        dense: GL(d) blocks: arrays of units, in order, on which any invertible matrix acts.
        shifts: Translations of tensors (docs/theory/translations.md).
        absorbed: Biases that absorb the constants added by sign changes: bias, weight, the weight's axis, and the
            constant.
        copies: For each orbit, the copies of its units (keys repeated for queries) and their slots, if copies can be
            permuted. These slots are units without positions that move in blocks.
        parents: For each system of blocks (blocks, parents), further units that move with the blocks: heads, where
            attention weights are read. They occur in values inside the network only.
        rotations: Cells on which any orthogonal matrix acts, before permutations, scales and signs.
        gained: Cells on which any invertible matrix acts between gains, before permutations, scales and signs.
        tilts: Rank-one maps of layer norm biases and their readers, before rotations.
        planes: For each orbit of rotary pairs, the columns of the first and second coordinate at each place, shape
            (pairs, 2). Other orbits have zero pairs; empty if no orbit has pairs.
        half_turns: Offsets of biases before sines and cosines.
        told: Pairs (factor name, parameter name) that users' rules passed to factors.
        charts: Tensors that the network reads with numbers added, or in pieces, and stacks of tensors.
    """

    slots: tuple[Slot, ...]
    units: int
    orbits: tuple[Ints, ...]
    movable: tuple[bool, ...]
    columns: tuple[Ints, ...]
    cells: tuple[Ints, ...]
    blocks: tuple[Ints, ...]
    magnitudes: sparse.csr_matrix
    signs: sparse.csr_matrix
    scale_table: tuple[Ints, ...]
    sign_table: tuple[Ints, ...]
    dense: tuple[Ints, ...]
    shifts: Translations = field(default_factory=Translations)
    absorbed: tuple[tuple[str, str, int, float], ...] = ()
    copies: tuple[Copies | None, ...] = ()
    parents: tuple[Ints, ...] = ()
    rotations: tuple[Rotation, ...] = ()
    gained: tuple[GainedCell, ...] = ()
    tilts: tuple[Tilt, ...] = ()
    planes: tuple[Ints, ...] = ()
    half_turns: HalfTurns = NO_HALF_TURNS
    charts: Charts = field(default_factory=Charts)
    told: tuple[tuple[str, str], ...] = ()

    def log_order_in(self, orbit: int) -> float:
        """Return the natural logarithm of the number of permutations of an orbit's units within their cells."""
        first = self.orbits[orbit][0]
        if not self.movable[orbit] or self.cell_of[first] >= 0 or self.rotation_of[first] >= 0:
            return 0.0  # these permutations are among the matrices
        return sum(math.lgamma(count + 1) for count in np.bincount(self.cells[orbit]))

    @property
    def log_order(self) -> float:
        """Natural logarithm of the number of permutations that are not among matrices."""
        inside = sum(self.log_order_in(orbit) for orbit in range(len(self.orbits)))
        return inside + sum(math.lgamma(len(blocks) + 1) for blocks in self.blocks)

    def copies_of(self, orbit: int) -> Copies | None:
        """Return the copies of an orbit's units, or None."""
        return self.copies[orbit] if orbit < len(self.copies) else None

    @cached_property
    def flips(self) -> sparse.csr_matrix:
        """All sign changes, from signs and half turns: shape (positions of all slots, generators), modulo 2."""
        turns = self.half_turns
        return sparse.hstack([self.signs, turns.flips]).tocsr() if len(turns.place) else self.signs

    @cached_property
    def same(self) -> tuple[Tensor, ...]:
        """The identity matrix of each GL(d) block, shared by size. Each of shape (size, size)."""
        by_size = {size: torch.eye(size, dtype=torch.float64) for size in {len(cell) for cell in self.dense}}
        return tuple(by_size[len(cell)] for cell in self.dense)

    @cached_property
    def rank(self) -> Ints:
        """For each unit that represents a slot of copies, the index of the copy."""
        rank = np.zeros(self.units, np.int64)
        for copies in self.copies:
            if copies is not None:
                rank[copies.slots] = np.arange(copies.slots.shape[1])
        return rank

    def arriving(self, orbit: int, kind: Literal["columns", "scales", "signs"], permutation: Ints) -> Ints:
        """Return the source of each position of an orbit's units, or of their generators, under a permutation.

        Args:
            orbit: The orbit's index.
            kind: Whether to return positions (as `columns`), or generators (as `scale_table` or `sign_table`).
            permutation: For each unit, its source; parents of blocks may be missing.
        """
        tables = {"columns": self.columns, "scales": self.scale_table, "signs": self.sign_table}
        table, place = tables[kind][orbit], self.place_in_orbit[permutation[self.orbits[orbit]]]
        copies = self.copies_of(orbit)
        if copies is None:
            return table[place]
        return arriving(table, getattr(copies, kind), place, self.rank[permutation[copies.slots]])

    def comes(self, permutation: Ints) -> Ints:
        """Return the source of each unit, including parents of blocks, under a permutation."""
        image: Ints = np.r_[permutation, np.arange(len(permutation), self.units)]
        alike: dict[tuple[int, int], list[tuple[Ints, Ints]]] = {}  # blocks inside others move from one to another
        for blocks, parents in zip(self.blocks, self.parents, strict=False):
            alike.setdefault((blocks.shape[1], parents.shape[1]), []).append((blocks, parents))
        for systems in alike.values():
            blocks, parents = (np.concatenate(own) for own in zip(*systems, strict=True))
            block_of = np.full(self.units, -1)
            block_of[blocks] = np.arange(len(blocks))[:, None]
            image[parents] = parents[block_of[permutation[blocks[:, 0]]]]
        return image

    @cached_property
    def phase_of(self) -> Ints:
        """For each unit, the index of its phase if it is a rotary pair, else -1."""
        turned = flat([units for units, pairs in zip(self.orbits, self.planes, strict=False) if len(pairs)])
        return self._numbered(turned[:, None])

    @cached_property
    def phases(self) -> int:
        """The number of rotary pairs."""
        return int((self.phase_of >= 0).sum())

    @cached_property
    def turned_places(self) -> dict[int, tuple[Ints, Ints, Ints]]:
        """By slot offset: phases of its rotary pairs, and positions of their first and second coordinates."""
        found: dict[int, list[Ints]] = {}
        for units, pairs, columns in zip(self.orbits, self.planes, self.columns, strict=False):
            for pair in pairs:
                slot = self.slots[int(self.slots_at(columns[:1, pair[0]])[0])]
                rows = np.stack([self.phase_of[units], *(columns[:, column] - slot.offset for column in pair)])
                found.setdefault(slot.offset, []).append(rows)
        joined = {offset: np.concatenate(rows, axis=1) for offset, rows in found.items()}
        return {offset: (rows[0], rows[1], rows[2]) for offset, rows in joined.items()}

    @cached_property
    def slots_of(self) -> dict[str, list[Slot]]:
        """The slots of each tensor."""
        found: dict[str, list[Slot]] = {}
        for slot in self.slots:
            found.setdefault(slot.tensor, []).append(slot)
        return found

    @cached_property
    def on_single_axes(self) -> frozenset[str]:
        """The tensors that are multiplied along single axes only."""
        single = {slot.tensor for slot in self.slots}
        return frozenset(single - {own.tensor for own in self.slots if len(own.axes) > 1 or own.kind != "value"})

    @cached_property
    def moving(self) -> tuple[str, ...]:
        """The network's names of tensors that the group changes."""
        return tuple(dict.fromkeys(own for name in self.slots_of for own in self.charts.held_in(name)))

    @cached_property
    def cell_of(self) -> Ints:
        """For each unit, the index of its GL(d) block, or -1."""
        return self._numbered(self.dense)

    @cached_property
    def orbit_of(self) -> Ints:
        """For each unit, the index of its orbit, or -1 for slots of copies and parents of blocks."""
        return self._numbered(self.orbits)

    def _numbered(self, sets: Iterable[Ints]) -> Ints:
        numbers = np.full(self.units, -1)
        for index, units in enumerate(sets):
            numbers[units] = index
        return numbers

    def _ranked(self, sets: Iterable[Ints]) -> Ints:
        place = np.zeros(self.units, np.int64)
        for units in sets:
            place[units] = np.arange(len(units))
        return place

    def slots_at(self, positions: Ints) -> Ints:
        """Return the slot index of each position."""
        starts = np.array([slot.offset for slot in self.slots], np.int64)
        return np.searchsorted(starts, positions, side="right") - 1

    @cached_property
    def rotation_of(self) -> Ints:
        """For each unit, the index of the rotation that acts on it, or -1."""
        return self._numbered(rotation.units for rotation in self.rotations)

    @cached_property
    def place_in_cell(self) -> Ints:
        """For each rotated unit, its index in its cell."""
        return self._ranked(rotation.units for rotation in self.rotations)

    @cached_property
    def moves(self) -> Bools:
        """For each unit, whether it can be permuted."""
        moves = np.zeros(self.units, bool)
        for units, movable in zip(self.orbits, self.movable, strict=True):
            moves[units] = movable
        return moves

    @cached_property
    def place_in_orbit(self) -> Ints:
        """For each unit, its index in its orbit."""
        return self._ranked(self.orbits)

    @cached_property
    def dense_places(self) -> dict[int, list[tuple[list[int], list[Ints], bool]]]:
        """By slot offset: GL(d) blocks of one size, their positions, and whether the slot reads (or writes) them."""
        found: dict[tuple[int, bool, int, int], list[tuple[int, Ints]]] = {}
        starts = np.array([slot.offset for slot in self.slots], np.int64)
        for cell_index, cell in enumerate(self.dense):
            orbit = int(self.orbit_of[cell[0]])
            columns = self.columns[orbit][self.place_in_orbit[cell]]
            slot_of = np.searchsorted(starts, columns[0], side="right") - 1
            exponent = own_exponents(self.magnitudes, columns)
            assert exponent is not None  # find_dense looked
            for slot_index, read in dict.fromkeys(zip(slot_of.tolist(), (exponent < 0).tolist(), strict=True)):
                offset = self.slots[slot_index].offset
                at = columns[:, (slot_of == slot_index) & ((exponent < 0) == read)] - offset
                found.setdefault((offset, read, orbit, len(cell)), []).append((cell_index, at))
        places: dict[int, list[tuple[list[int], list[Ints], bool]]] = {}
        for (offset, read, _, _), members in found.items():
            positions = np.stack([at for _, at in members])  # (cells, size, columns)
            cells = [cell for cell, _ in members]
            places.setdefault(offset, []).append((cells, list(np.moveaxis(positions, 2, 0)), read))
        return places

    @cached_property
    def dense_lines(self) -> dict[int, list[tuple[tuple[int, ...], Tensor | slice, bool]]]:
        """By slot offset: GL(d) blocks, the positions of all of their units in turn, and whether the slot reads them.

        Blocks are in the order of their positions, so that these often are a slice.
        """
        lines: dict[int, list[tuple[tuple[int, ...], Tensor | slice, bool]]] = {}
        for offset, places in self.dense_places.items():
            for cells, positions, read in places:
                for at in positions:
                    order = np.argsort(at[:, 0])
                    own, first = at[order].ravel(), int(at[order[0], 0])
                    together = np.array_equal(own, np.arange(first, first + own.size))
                    index = slice(first, first + own.size) if together else torch.from_numpy(own)
                    lines.setdefault(offset, []).append((tuple(cells[place] for place in order), index, read))
        return lines

    def kinds_at(self, slot: Slot) -> frozenset[str]:
        """Return the kinds of continuous maps that act on a slot: "scales", "rotations", "matrices"."""
        first_entry = self.magnitudes.indptr  # of each row; to slice the matrix takes 50 times as long
        places = {
            "scales": bool(first_entry[slot.rows.start] < first_entry[slot.rows.stop]),
            "rotations": slot.offset in self.rotated_places,
            "matrices": any(slot.offset in own for own in (self.dense_places, self.turned_places, self.gained_places)),
        }
        return frozenset(kind for kind, acts in places.items() if acts)

    def scales_differ(self, name: str, axis: int) -> bool:
        """Whether scales or signs act differently on the positions along an axis of a tensor."""
        for slot in self.slots_of.get(name, []):
            for forms in (self.magnitudes, self.signs) if axis in slot.axes else ():
                own = forms[slot.rows]
                counts = np.diff(own.indptr)
                if (counts != counts[0]).any() or len(np.unique(own.indices)) > counts[0]:
                    return True
        return False

    @property
    def idle(self) -> frozenset[str]:
        """The tensors that only functions read that other weights absorb."""
        return self.shifts.idle

    @cached_property
    def idle_cells(self) -> set[int]:
        """The GL(d) blocks that act on such tensors only."""
        names = {slot.offset: slot.tensor for slot in self.slots}
        others = (own for offset, own in self.dense_places.items() if names[offset] not in self.idle)
        return {*range(len(self.dense))}.difference(*(cells for own in others for cells, _, _ in own))

    @property
    def translates(self) -> bool:
        """Whether translations or rank-one maps act anywhere."""
        return bool(self.shifts) or bool(self.tilts)

    @cached_property
    def rotated_places(self) -> dict[int, list[tuple[int, Ints, tuple[int, ...]]]]:
        """By slot offset: rotations, their positions, and the powers of the gains around them."""
        places: dict[int, list[tuple[int, Ints, tuple[int, ...]]]] = {}
        for index, rotation in enumerate(self.rotations):
            gains = {name for name, _ in rotation.gains}
            for offset, at, powers in self._places_between(rotation, rotation.powers, gains):
                places.setdefault(offset, []).append((index, at, tuple(powers)))
        return places

    def _places_between(
        self, cell: Rotation | GainedCell, powers: Ints, gains: Collection[str]
    ) -> Iterator[tuple[int, Ints, list[int]]]:
        """Yield slot offset, positions and powers of each place of a cell between gains, other than the gains' own."""
        own = self.place_in_orbit[cell.units]
        columns = self.columns[cell.orbit][own]
        acting = exponents(self.magnitudes, columns, self.scale_table[cell.orbit][own])
        assert acting is not None  # its detection looked
        where = self.slots_at(columns[0]) if columns.shape[1] else ()
        for at, slot_index, found in zip(columns.T, where, (acting @ powers).tolist(), strict=True):
            slot = self.slots[slot_index]
            if slot.tensor not in gains:
                yield slot.offset, at - slot.offset, found

    @cached_property
    def rotated_whole(self) -> frozenset[int]:
        """The offsets of slots with one rotation, on all positions in their order."""
        sizes = {slot.offset: slot.size for slot in self.slots}
        places = ((offset, own[0][1]) for offset, own in self.rotated_places.items() if len(own) == 1)
        return frozenset(offset for offset, at in places if np.array_equal(at, np.arange(sizes[offset])))

    @cached_property
    def gained_of(self) -> Ints:
        """For each unit, the index of its gained cell, or -1."""
        return self._numbered(cell.units for cell in self.gained)

    @cached_property
    def gained_places(self) -> dict[int, list[GainedPlace]]:
        """By slot offset: the occurrences of gained cells."""
        places: dict[int, list[GainedPlace]] = {}
        for index, cell in enumerate(self.gained):
            fixed = {name for gain in cell.gains for name in gain.names}
            for offset, at, powers in self._places_between(cell, cell.solve, fixed):
                places.setdefault(offset, []).append(GainedPlace(index, at, tuple(powers[:-1]), powers[-1] < 0))
        return places

    @cached_property
    def tilted_places(self) -> dict[int, tuple[int, bool]]:
        """By slot offset: the index of the rank-one map that acts there, and whether the inverse acts."""
        places: dict[int, tuple[int, bool]] = {}
        for index, tilt in enumerate(self.tilts):
            held = dict.fromkeys(tilt.moved + tilt.seen, False) | dict.fromkeys(tilt.readers + tilt.written, True)
            for (name, axis), reads in held.items():
                for slot in self.slots_of.get(name, ()):
                    if slot.axes == (axis,):
                        places[slot.offset] = index, reads
        return places
