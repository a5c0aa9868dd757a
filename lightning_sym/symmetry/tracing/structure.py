"""From all constraints to the group that meets them all: who may change places, what may be scaled."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.tracing.constraints import Constraints, Label, Sighting
from lightning_sym.symmetry.tracing.copies import Copies, Folded, Sheets, arriving, fold, sheets
from lightning_sym.symmetry.tracing.equations import solve
from lightning_sym.symmetry.tracing.numbering import Numbers, components, flat, marked, mix, parts, sum_by
from lightning_sym.symmetry.tracing.planes import Places, PlaneFinder
from lightning_sym.symmetry.tracing.rotations import Rotation, exponents
from lightning_sym.symmetry.tracing.shifts import Fold, Shift
from lightning_sym.symmetry.tracing.tilts import Tilt

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]
VALUE = ("value", 0.0)  # how most parameters and buffers move, see Slot.kind


@dataclass(frozen=True)
class Slot:
    """The labelled positions of one parameter or buffer: an axis of it, or (grouped convolution) two at once.

    Attributes:
        tensor: Its name.
        axes: One axis, or two.
        offset: Where its positions start among those of all slots.
        shape: Sizes of the axes.
        unit: For each position, the unit that it belongs to, or -1.
        kind: "value", or "variance": v' = s^2 (v + epsilon) - epsilon.
        epsilon: See `kind`.
        of_stack: Whether the two axes are those of members and of their units (docs/theory/intertwiners.md, 2.14):
            positions are those of both axes together, row-major. No other slot has the first of them then.
    """

    tensor: str
    axes: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    unit: Ints
    kind: str
    epsilon: float
    of_stack: bool = False

    @property
    def size(self) -> int:
        """The number of positions."""
        return math.prod(self.shape)

    @property
    def rows(self) -> slice:
        """Its positions among those of all slots."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class Structure:
    """The group of one network, as arrays.

    Attributes:
        slots: Every labelled axis.
        units: How many units there are.
        orbits: Units that may ever change places with one another, or, where nothing may, that were made together.
        movable: For each orbit, whether its units may change places at all.
        columns: For each orbit (units, columns): at which position of all slots each unit stands; units of an orbit
            stand at the same places.
        cells: For each orbit, for each unit the number of its cell: units of one cell change places freely.
        blocks: Systems of blocks (blocks, members): whole blocks change places, member by member, one system after the
            other. Blocks that are parts of other blocks (queries that share keys) come before these.
        magnitudes: Generators of scales: sparse (positions of all slots, generators), the exponents.
        signs: The same for signs, modulo 2.
        scale_table: For each orbit (units, m), its units' generators of scales, in one order for all units.
        sign_table: The same for signs.
        dense: Cells (arrays of units, in order) on which any invertible matrix acts.
        shifts: What may be added to tensors (docs/theory/intertwiners.md, 3.6).
        absorbed: Biases that take up what changes of sign add: bias, weight, the weight's axis, and how much.
        copies: For each orbit, the copies of its units (keys that are repeated for queries), if copies may change
            places: with the slots to which they belong. Slots are units that stand nowhere and move in blocks.
        parents: For each system of blocks (blocks, parents): further units, which change places as the blocks do
            (heads, where attention weights are seen). In values inside the network only.
        rotations: Cells on which any orthogonal matrix acts, behind their permutations, scales and signs.
        tilts: What layer norms' biases and their readers may change together, behind rotations.
        planes: For each orbit whose units are planes, turned by any angle: which two of its columns are the first and
            the second coordinate at one place. Each of shape (pairs, 2), of no pairs for other orbits; or none at all.
        charts: Tensors that the network reads with a number added: the group acts on the sum.
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
    shifts: tuple[Shift, ...] = ()
    absorbed: tuple[tuple[str, str, int, float], ...] = ()
    copies: tuple[Copies | None, ...] = ()
    parents: tuple[Ints, ...] = ()
    rotations: tuple[Rotation, ...] = ()
    tilts: tuple[Tilt, ...] = ()
    planes: tuple[Ints, ...] = ()
    charts: Mapping[str, float] = field(default_factory=dict)

    def copies_of(self, orbit: int) -> Copies | None:
        """Return the copies of an orbit's units."""
        return self.copies[orbit] if orbit < len(self.copies) else None

    @cached_property
    def same(self) -> tuple[Tensor, ...]:
        """For each dense cell the matrix that changes nothing, one for all of a size. Each of shape (size, size)."""
        by_size = {size: torch.eye(size, dtype=torch.float64) for size in {len(cell) for cell in self.dense}}
        return tuple(by_size[len(cell)] for cell in self.dense)

    @cached_property
    def rank(self) -> Ints:
        """For each unit, which of a unit's copies it stands for, if it is a slot."""
        rank = np.zeros(self.units, np.int64)
        for copies in self.copies:
            if copies is not None:
                rank[copies.slots] = np.arange(copies.slots.shape[1])
        return rank

    def arriving(self, orbit: int, kind: Literal["columns", "scales", "signs"], permutation: Ints) -> Ints:
        """Return what a permutation brings to each position of an orbit's units, or to their generators.

        Args:
            orbit: The orbit's number.
            kind: Whether to return positions (as `columns`), or generators (as `scale_table` or `sign_table`).
            permutation: For each unit the one that comes in its place; as long as it gets.
        """
        tables = {"columns": self.columns, "scales": self.scale_table, "signs": self.sign_table}
        table, place = tables[kind][orbit], self.place_in_orbit[permutation[self.orbits[orbit]]]
        copies = self.copies_of(orbit)
        if copies is None:
            return table[place]
        return arriving(table, getattr(copies, kind), place, self.rank[permutation[copies.slots]])

    def comes(self, permutation: Ints) -> Ints:
        """Return for each unit, parents of blocks included, the one that comes in its place."""
        image: Ints = np.r_[permutation, np.arange(len(permutation), self.units)]
        for blocks, parents in zip(self.blocks, self.parents, strict=False):
            block_of = np.full(self.units, -1)
            block_of[blocks] = np.arange(len(blocks))[:, None]
            image[parents] = parents[block_of[permutation[blocks[:, 0]]]]
        return image

    @cached_property
    def phase_of(self) -> Ints:
        """For each unit, the number of its phase, if it is a plane; else -1."""
        phase_of = np.full(self.units, -1)
        turned = flat([units for units, pairs in zip(self.orbits, self.planes, strict=False) if len(pairs)])
        phase_of[turned] = np.arange(len(turned))
        return phase_of

    @cached_property
    def phases(self) -> int:
        """How many units are planes."""
        return int((self.phase_of >= 0).sum())

    @cached_property
    def turned_places(self) -> dict[int, tuple[Ints, Ints, Ints]]:
        """By slot: the phases of the planes that stand there, and where their first and second coordinates do."""
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
        """By tensor, its slots."""
        found: dict[str, list[Slot]] = {}
        for slot in self.slots:
            found.setdefault(slot.tensor, []).append(slot)
        return found

    @cached_property
    def cell_of(self) -> Ints:
        """For each unit, the number of its dense cell, or -1."""
        cell_of = np.full(self.units, -1)
        for index, cell in enumerate(self.dense):
            cell_of[cell] = index
        return cell_of

    def slots_at(self, positions: Ints) -> Ints:
        """Return in which slots positions are."""
        starts = np.array([slot.offset for slot in self.slots], np.int64)
        return np.searchsorted(starts, positions, side="right") - 1

    @cached_property
    def rotation_of(self) -> Ints:
        """For each unit, the number of the rotation that acts on it, or -1."""
        rotation_of = np.full(self.units, -1)
        for index, rotation in enumerate(self.rotations):
            rotation_of[rotation.units] = index
        return rotation_of

    @cached_property
    def place_in_cell(self) -> Ints:
        """For each unit on which a rotation acts, its place among those on which it does."""
        place = np.zeros(self.units, np.int64)
        for rotation in self.rotations:
            place[rotation.units] = np.arange(rotation.size)
        return place

    @cached_property
    def moves(self) -> NDArray[np.bool_]:
        """For each unit, whether it may change places."""
        moves = np.zeros(self.units, bool)
        for units, movable in zip(self.orbits, self.movable, strict=True):
            moves[units] = movable
        return moves

    @cached_property
    def place_in_orbit(self) -> Ints:
        """For each unit, its place in its orbit."""
        place = np.zeros(self.units, np.int64)
        for units in self.orbits:
            place[units] = np.arange(len(units))
        return place

    @cached_property
    def dense_places(self) -> dict[int, list[tuple[list[int], list[Ints], bool]]]:
        """By slot: which dense cells of one size stand there, where, and whether they are read (or put out)."""
        found: dict[tuple[int, bool, int, int], list[tuple[int, Ints]]] = {}
        starts = np.array([slot.offset for slot in self.slots], np.int64)
        orbit_of = {int(unit): index for index, units in enumerate(self.orbits) for unit in units}
        for cell_index, cell in enumerate(self.dense):
            orbit = orbit_of[int(cell[0])]
            columns = self.columns[orbit][self.place_in_orbit[cell]]
            slot_of = np.searchsorted(starts, columns[0], side="right") - 1
            exponent = own_exponents(self.magnitudes, columns)
            assert exponent is not None  # _dense looked
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
    def rotated_places(self) -> dict[int, list[tuple[int, Ints, tuple[int, ...]]]]:
        """By slot: which rotations act there, where, and with which powers of their gains around them."""
        places: dict[int, list[tuple[int, Ints, tuple[int, ...]]]] = {}
        for index, rotation in enumerate(self.rotations):
            columns = self.columns[rotation.orbit][self.place_in_orbit[rotation.units]]
            acting = exponents(
                self.magnitudes, columns, self.scale_table[rotation.orbit][self.place_in_orbit[rotation.units]]
            )
            if not columns.shape[1]:
                continue
            assert acting is not None  # find_rotations looked
            gains = {name for name, _ in rotation.gains}
            for at, slot_index, powers in zip(
                columns.T, self.slots_at(columns[0]), acting @ rotation.powers, strict=True
            ):
                slot = self.slots[slot_index]
                if slot.tensor not in gains:
                    places.setdefault(slot.offset, []).append((index, at - slot.offset, tuple(powers.tolist())))
        return places

    @cached_property
    def tilted_places(self) -> dict[int, tuple[int, bool]]:
        """By slot: which tilt acts there, and whether it does so from the readers' side."""
        places: dict[int, tuple[int, bool]] = {}
        for index, tilt in enumerate(self.tilts):
            held = {(tilt.offset, 0): False, **dict.fromkeys(tilt.seen, False), **dict.fromkeys(tilt.readers, True)}
            for (name, axis), reads in held.items():
                for slot in self.slots_of.get(name, ()):
                    if slot.axes == (axis,):
                        places[slot.offset] = index, reads
        return places


def folded(structure: Structure) -> tuple[Shift, ...]:
    """Return a structure's shifts, counted in multiples of the gains between which rotations and tilts act."""

    def folds(tensor: str, axes: Collection[int], sign: int = 1) -> tuple[Fold, ...]:
        found = []
        for slot in structure.slots_of.get(tensor, ()):
            for index, at, powers in structure.rotated_places.get(slot.offset, ()):
                known = zip(structure.rotations[index].gains, powers, strict=True)
                gains = tuple((name, place, sign * power) for (name, place), power in known if power)
                if gains and slot.axes[0] in axes:
                    found.append(Fold(slot.axes[0], at, gains))
            if slot.offset in structure.tilted_places and slot.offset not in structure.rotated_places:
                index, reads = structure.tilted_places[slot.offset]
                gain, every = structure.tilts[index].gain, np.arange(slot.size)
                if gain is not None and slot.axes[0] in axes:
                    found.append(Fold(slot.axes[0], every, ((gain, every, sign * (-1 if reads else 1)),)))
        return tuple(found)

    return tuple(
        replace(
            shift,
            added=tuple(replace(part, folds=folds(part.tensor, part.axes)) for part in shift.added),
            # What goes into a weight moves by the inverse of what its columns do.
            taken_off=tuple(replace(off, folds=folds(off.weight, (off.axis,), -1)) for off in shift.taken_off),
        )
        for shift in structure.shifts
    )


class Met(NamedTuple):
    """What operations met the units, each of shape (units,), bool.

    Attributes:
        normed: Whether they see a unit's norm together with others', at least.
        centred: Whether they see a unit's mean with others.
        restricted: Whether one of them passes no mixture of units but permutations, scales and signs.
    """

    normed: NDArray[np.bool_]
    centred: NDArray[np.bool_]
    restricted: NDArray[np.bool_]


def _sorted_groups(keys: Ints | Hashes) -> list[Ints]:
    """Return the positions of equal keys, as one array per key, in the order of their first appearance."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    groups = np.split(order, starts[1:])
    return sorted(groups, key=lambda group: int(group[0]))


def _key(where: Numbers, tag: Ints) -> Hashes:
    """Identify a place and a tag."""
    return mix(mix(where) ^ tag.astype(np.uint64))


def _told_apart(
    raw: Numbers, root: Ints, where: Numbers, tag: Ints, offset: Ints, merges: list[tuple[Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Tell the positions of a unit apart that stands twice at one place (queries and keys stacked in one weight).

    They differ by where else each of the two was seen before they were found to be one unit.

    Args:
        raw: For each position, the atom that stood there.
        root: For each atom, the one with which it was merged.
        where: For each position, the number of its place.
        tag: For each position, its tag.
        offset: Where the positions of each place begin, and where the last ones end.
        merges: What was merged.

    Returns:
        New tags; and the atoms of which nobody knows which is which.
    """
    atom, number = root[raw], len(root)

    def twice(tag: Ints) -> NDArray[np.bool_]:
        result = np.zeros(len(tag), bool)
        for part in parts(offset):
            key = mix(_key(where[part], tag[part]) ^ atom[part].astype(np.uint64))
            order = np.argsort(key)
            same = np.flatnonzero(key[order[1:]] == key[order[:-1]])
            result[part][order[same]] = result[part][order[same + 1]] = True
        return result

    again = twice(tag)
    if again.any():
        seen = sum_by(raw, lambda part: _key(where[part], tag[part]), number)
        one, two = (flat([pair[side] for pair in merges]) for side in (0, 1))
        for _ in range(3):  # what it was merged with counts, too: colour refinement
            seen = mix(seen) + sum_by(one, mix(seen)[two], number) + sum_by(two, mix(seen)[one] * np.uint64(3), number)
        tag = tag.copy()
        told = np.where(tag[again] == 0, np.uint64(0), mix(tag[again]))
        tag[again] = (mix(seen[raw[again]] ^ told) >> np.uint64(1)).astype(np.int64)
        again = twice(tag)
    return tag, atom[again]


def build_structure(
    constraints: Constraints,
    axis_labels: dict[str, tuple[Label, ...]],
    grouped: dict[str, Label],
    kinds: dict[str, tuple[str, float]],
    absorbed: list[tuple[str, str, int, float]],
    shifts: list[Shift],
) -> tuple[Structure, Structure, Met]:
    """Solve all constraints.

    Args:
        constraints: All demands, and what was seen. Equations and pairs are let go of once they are solved.
        axis_labels: By parameter or buffer, its labels.
        grouped: By weight of a grouped convolution, the label over its two first axes.
        kinds: By buffer, see :class:`Slot`.
        absorbed: See :class:`Structure`.
        shifts: What may be added to tensors.

    Returns:
        The group on parameters and buffers; the same group on the values inside the network that have a name; and what
        operations met the units.
    """
    number = constraints.atoms
    merges = [*constraints.merges, *constraints.contracted, *constraints.turned]
    root = components(number, merges)
    finder = PlaneFinder(constraints, root, list(grouped.values()))
    magnitudes = solve(constraints.scales, constraints.magnitude_equations, flat(constraints.fixed_magnitudes))
    signs = solve(constraints.scales, constraints.sign_equations, flat(constraints.fixed_signs), modulo_two=True)
    for equations in (constraints.magnitude_equations, constraints.sign_equations):
        equations.clear()  # of large networks they fill as much memory as anything that follows
    # Every place at which units are seen: first the parameters' axes, then the values of the graph.
    places = [Sighting(constraints.pending(label), name) for name, labels in axis_labels.items() for label in labels]
    parameters = len(places)
    places += constraints.occurrences
    size = np.array([place.label.size for place in places], np.int64)
    offset = np.r_[0, np.cumsum(size)]
    own = int(offset[parameters])
    where = np.repeat(np.arange(len(places), dtype=np.int32), size)  # there are millions of positions
    raw = np.concatenate(
        [np.zeros(0, np.int32), *(place.label.atom.ravel() for place in places)], dtype=np.int32, casting="same_kind"
    )
    tag = flat([place.label.tag for place in places])
    # What two coordinates of a plane have in common is asked of parameters and of named values only.
    named = [index for index in range(parameters, len(places)) if places[index].tensor is not None]
    at = flat([np.arange(offset[index], offset[index + 1]) for index in named])
    of_planes = np.r_[np.arange(own), at] if finder.any else np.zeros(0, np.int64)
    standing_raw = raw[of_planes]
    same_place = _key(where[of_planes], tag[of_planes])
    if finder.any:
        same_place ^= mix(finder.family[standing_raw])
    tag, unknown = _told_apart(raw, root, where, tag, offset, merges)
    atom = root.astype(np.int32)[raw]
    del raw, merges
    for met_pairs in (constraints.merges, constraints.contracted, constraints.turned):
        met_pairs.clear()
    fixed = marked(number, root[flat(constraints.fixed_atoms)], unknown)

    # Scales at all positions: of parameters, of grouped weights, and of values inside the network that have a name.
    of_positions = [*(place.label for place in places[:parameters]), *grouped.values()]
    end = sum(label.size for label in of_positions)
    scale = flat([label.scale for label in [*of_positions, *(places[index].label for index in named)]])
    position_magnitudes, position_signs = (
        _that_act(forms[scale].tocsr(), places[:parameters], offset, grouped, modulo_two=modulo_two)
        for forms, modulo_two in ((magnitudes, False), (signs, True))
    )
    del scale, magnitudes, signs

    free_magnitudes, free_signs = (
        np.diff(forms.indptr[: own + 1]).astype(np.int64) for forms in (position_magnitudes, position_signs)
    )

    def signatures(atom: Numbers, tag: Ints) -> Hashes:
        """Identify for each root the places where it stands; that it is fixed counts only for naming."""

        def keys(part: slice) -> Hashes:
            place_key = _key(where[part], tag[part])
            acting = slice(part.start, max(min(part.stop, own), part.start))  # how many scales act there
            place_key[: acting.stop - acting.start] ^= mix(free_magnitudes[acting] * 64 + free_signs[acting])
            return mix(place_key)

        return mix(sum_by(atom, keys, number) ^ fixed.astype(np.uint64))

    # Blocks: members know their parents; parents that share members move together.
    parent = root[flat([p for p, _ in constraints.blocks])]
    member = root[flat([m for _, m in constraints.blocks])]
    pairs = np.unique(np.stack([parent, member]), axis=1) if len(parent) else np.zeros((2, 0), np.int64)
    folded, copy_at = None, np.full(len(atom), -1, np.int32)
    total = signatures(atom, tag)
    shared = _shared(pairs, total, marked(number, atom[:own])) if pairs.size else np.zeros(0, np.int64)
    if constraints.copies:
        role, pairs_apart = _roles(pairs, total, shared)
        grouped_atoms = marked(number, root[flat([label.atom for label in grouped.values()])])
        folded = fold(constraints.copies, root, pairs_apart, role, fixed, grouped_atoms, mix)
        held_at = np.flatnonzero((folded.mark > 0)[atom])
        tag[held_at] = (_key(folded.mark[atom[held_at]], tag[held_at]) >> np.uint64(1)).astype(np.int64)
        copy_at = folded.copy.astype(np.int32)[atom]
        if finder.any:
            copied = _key(folded.mark[atom[of_planes]], copy_at[of_planes].astype(np.int64))
            same_place = mix(same_place ^ copied)
        root, atom = folded.origin[root], folded.origin.astype(np.int32)[atom]
        pairs, shared = np.unique(folded.origin[pairs], axis=1), folded.origin[shared]
        total = signatures(atom, tag)
    parent, member = pairs

    # Which of the roots are units: those that stand in a parameter and may move or be scaled.
    standing = atom[:own]
    carries = marked(number, standing[(free_magnitudes > 0) | (free_signs > 0)])
    roots = np.flatnonzero(marked(number, standing) & (~fixed | carries))
    unit_of = np.full(number, -1)
    unit_of[roots] = np.arange(len(roots))

    cell_key = mix(total ^ sum_by(member, mix(parent.astype(np.uint64)), number))
    # A parent (a head) moves with its members only: it is a cell of its own.
    cell_key[parent] = mix(parent)

    orbits = [np.asarray(group) for group in _sorted_groups(total[roots])]
    columns = _columns(orbits, unit_of[atom[:own]], where[:own], tag[:own], copy_at[:own])
    movable = [not fixed[roots[group[0]]] for group in orbits]
    cells = [
        np.unique(cell_key[roots[group]], return_inverse=True)[1] if moves else np.arange(len(group))
        for group, moves in zip(orbits, movable, strict=True)
    ]
    forms = (position_magnitudes, position_signs)
    orbits, cells, movable, columns = _together(orbits, cells, movable, columns, where, copy_at, forms)
    del forms
    blocks, parents, number_of = _blocks(pairs, shared, total, fixed, unit_of, folded)
    slots_of = [_slots_of(roots[group], number_of, folded) for group in orbits]
    units = len(roots) if folded is None else max(len(roots), number_of[folded.all_atoms].max(initial=-1) + 1)
    dense = _dense(orbits, cells, columns, movable, position_magnitudes, constraints, root, roots, grouped)

    def slot(index: int, units: Ints, first: int) -> Slot:
        place, shape = places[index], places[index].label.atom.shape
        unit = units[atom[offset[index] : offset[index + 1]]].reshape(shape)
        kind = kinds.get(place.tensor or "", VALUE)
        of_stack = index < parameters and len(place.label.axes) > 1
        return Slot(place.tensor or "", place.label.axes, first, shape, unit, *kind, of_stack)

    slots = [slot(index, unit_of, int(offset[index])) for index in range(parameters)]
    for name, label in grouped.items():
        # Positions of a label over two axes: within a row, units stand in the order of their columns.
        first, shape = slots[-1].rows.stop, label.atom.shape
        slots.append(Slot(name, (0, 1), first, shape, unit_of[root[label.atom]], *VALUE))
    position_magnitudes, scale_table, scales_at, scales_out = _tabled(columns, _used(position_magnitudes, end))
    position_signs, sign_table, signs_at, signs_out = _tabled(columns, _used(position_signs, end))
    if scales_out or signs_out:
        constraints.notes[
            f"{scales_out} scales and {signs_out} signs that only act together with others are left out"
        ] = None

    def sheets_at(positions: Ints, copies: int) -> Sheets:
        """Return which columns belong to copies, given where they are for one unit."""
        return sheets(_key(where[positions], tag[positions]), copy_at[positions].astype(np.int64), copies)

    generators = [(position_magnitudes, scale_table, scales_at), (position_signs, sign_table, signs_at)]
    copies = _copies(slots_of, columns, sheets_at, generators)
    irregular = [c.slots for c in copies if c is not None and not (c.scales.complete and c.signs.complete)]
    if irregular:  # nothing says how their scales go with them
        held = [np.isin(table[:, 0], flat(irregular)).any() for table in blocks]
        blocks, parents = (tuple(itertools.compress(part, np.logical_not(held))) for part in (blocks, parents))
    known = Places(standing_raw[:own], same_place[:own])
    planes = finder.of_parameters(columns, known, (position_magnitudes, position_signs))
    structure = Structure(
        slots=tuple(slots),
        units=units,
        orbits=tuple(orbits),
        movable=tuple(movable),
        columns=tuple(columns),
        cells=tuple(cells),
        blocks=blocks,
        magnitudes=position_magnitudes[:end],
        signs=position_signs[:end],
        scale_table=scale_table,
        sign_table=sign_table,
        dense=dense,
        shifts=tuple(shifts),
        absorbed=tuple(absorbed),
        copies=copies,
        planes=planes,
    )
    restricted = [*constraints.restricted, *(label.atom for label in grouped.values())]
    met = (marked(number, root[flat(a)])[roots] for a in (constraints.normed, constraints.centred, restricted))
    firsts = np.cumsum([0, *size[named]]).tolist()
    if folded is not None:  # what slots are made of is seen inside the network only
        inside = folded.all_atoms[number_of[folded.all_atoms] >= len(roots)]
        orbits += [number_of[inside[group]] for group in _sorted_groups(total[inside])]
    orbits += [part for numbers in parents for part in numbers.T]
    value_columns = _columns(orbits, number_of[atom[at]], where[at], tag[at], copy_at[at])
    values = replace(
        structure,
        slots=tuple(slot(index, number_of, first) for index, first in zip(named, firsts, strict=False)),
        units=structure.units + sum(numbers.size for numbers in parents),
        orbits=tuple(orbits),
        movable=(*movable, *[True] * (len(orbits) - len(movable))),
        columns=tuple(value_columns),
        magnitudes=position_magnitudes[end:],
        signs=position_signs[end:],
        shifts=(),
        copies=tuple(
            None if own is None else replace(own, columns=sheets_at(at[matrix[0]], own.count))
            for own, matrix in zip(copies, value_columns, strict=False)
        ),
        parents=parents,
        planes=finder.of_values(planes, value_columns, Places(standing_raw[own:], same_place[own:])) if planes else (),
    )
    return structure, values, Met(*met)


def _that_act(
    forms: sparse.csr_matrix, places: list[Sighting], offset: Ints, grouped: dict[str, Label], *, modulo_two: bool
) -> sparse.csr_matrix:
    """Drop generators that act on one parameter only, and there undo on one axis what they do on another of size 1."""
    by_tensor: dict[str | None, list[int]] = {}
    for index, place in enumerate(places):
        by_tensor.setdefault(place.tensor, []).append(index)
    columns, idle = forms.tocsc(), []
    for name, slots in by_tensor.items():
        sizes = [places[index].label.size for index in slots]
        if len(slots) < 2 or 1 not in sizes or name in grouped:
            continue
        rows = [range(offset[index], offset[index + 1]) for index in slots]
        for generator in np.unique(forms[[own[0] for own, size in zip(rows, sizes, strict=True) if size == 1]].indices):
            begin, end = columns.indptr[generator : generator + 2]
            exponent = dict(zip(columns.indices[begin:end].tolist(), columns.data[begin:end].tolist(), strict=True))
            held = [{exponent.get(row, 0.0) for row in own} for own in rows]
            inside = sum(row in own for row in exponent for own in rows) == len(exponent)
            total = sum(next(iter(numbers)) for numbers in held)
            total = total % 2 if modulo_two else total
            if inside and all(len(numbers) == 1 for numbers in held) and total == 0:
                idle.append(generator)
    return forms[:, np.setdiff1d(np.arange(forms.shape[1]), idle)] if idle else forms


def _columns(orbits: list[Ints], unit: Ints, where: Numbers, tag: Ints, copy: Numbers) -> list[Ints]:
    """Return for each orbit (units, columns): the positions at which each unit stands, in one order for all units."""
    order = np.lexsort((copy, tag, where, unit))
    ordered, columns = unit[order], []
    for units in orbits:
        starts, ends = (np.searchsorted(ordered, units, side=side) for side in ("left", "right"))
        matrix = order[starts[:, None] + np.arange((ends - starts).min())]
        columns.append(matrix[:, np.argsort(matrix[0])])  # tags are in no order
    return columns


def _together(
    orbits: list[Ints], cells: list[Ints], movable: list[bool], columns: list[Ints], where: Numbers, copy: Numbers,
    forms: Sequence[sparse.csr_matrix],
) -> tuple[list[Ints], list[Ints], list[bool], list[Ints]]:  # fmt: skip
    """Join orbits of which nothing changes places inside a cell, if they stand at the same places with the same scales.

    The coordinates of a head, which a rotation by the position tells apart, are one axis group and not many.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, (own, moves, matrix) in enumerate(zip(cells, movable, columns, strict=True)):
        first = matrix[0]
        key: tuple[Any, ...] = (index,)
        if len(np.unique(own)) == len(own):
            patterns = (_pattern(own[first]) for own in forms)
            key = (moves, where[first].tobytes(), copy[first].tobytes(), *patterns)
        kinds.setdefault(key, []).append(index)
    joined: list[tuple[Ints, Ints, bool, Ints]] = []
    for members in kinds.values():
        units = np.concatenate([orbits[index] for index in members])
        order = np.argsort(units, kind="stable")
        own = cells[members[0]] if len(members) == 1 else np.arange(len(units))
        rows = np.concatenate([columns[index] for index in members])
        joined.append((units[order], own, movable[members[0]], rows[order]))
    units_of, cells, movable, columns = (list(part) for part in zip(*joined, strict=True)) if joined else [[]] * 4
    return units_of, cells, movable, columns


def _pattern(forms: sparse.csr_matrix) -> tuple[bytes, ...]:
    """Identify rows of exponents up to the names of the generators."""
    names = {generator: number for number, generator in enumerate(dict.fromkeys(forms.indices.tolist()))}
    renamed = np.array([names[generator] for generator in forms.indices.tolist()], np.int64)
    return forms.indptr.tobytes(), renamed.tobytes(), forms.data.tobytes()


def _slots_of(roots: Ints, number_of: Ints, folded: Folded | None) -> Ints | None:
    """Return for each unit the slots of its copies, or nothing if it has none."""
    if folded is None or int(roots[0]) not in folded.slots_of:
        return None
    return number_of[folded.heads[np.stack([folded.slots_of[int(root)] for root in roots])]]


def _copies(
    slots_of: list[Ints | None], columns: list[Ints], sheets_at: Callable[[Ints, int], Sheets],
    generators: list[tuple[sparse.csr_matrix, tuple[Ints, ...], tuple[Ints, ...]]],
) -> tuple[Copies | None, ...]:  # fmt: skip
    """Return the copies of each orbit's units; nothing if there are none at all.

    Args:
        slots_of: For each orbit, the slots of its units' copies.
        columns: Its columns.
        sheets_at: Which columns belong to copies, given where they are for one unit, and how many copies there are.
        generators: Forms of scales and of signs; each orbit's table, and at which of its columns each was found.
    """
    if not any(slots is not None for slots in slots_of):
        return ()
    result: list[Copies | None] = []
    for index, (slots, matrix) in enumerate(zip(slots_of, columns, strict=True)):
        if slots is None:
            result.append(None)
            continue
        positions = sheets_at(matrix[0], slots.shape[1])
        own = [_sheets_of(forms, matrix, tables[index], at[index], positions) for forms, tables, at in generators]
        result.append(Copies(slots, positions, *own))
    return tuple(result)


def _sheets_of(forms: sparse.csr_matrix, columns: Ints, table: Ints, at: Ints, positions: Sheets) -> Sheets:
    """Return which generators of a table belong to copies, given at which of the columns each was found."""
    copy = positions.copy[at].copy()
    for index in np.flatnonzero(copy >= 0):  # what acts on all copies alike belongs to the unit
        partners = positions.partner[at[index]]
        places = columns[0, partners[partners >= 0]]
        if all(int(table[0, index]) in forms[place].indices for place in places):
            copy[index] = -1
    return sheets(positions.partner[at].max(1), copy, positions.partner.shape[1])


def _used(forms: sparse.csr_matrix, rows: int) -> sparse.csr_matrix:
    """Drop generators that touch no parameter: none of the first rows."""
    forms = forms.tocsr()
    used = np.unique(forms.indices[: forms.indptr[rows]])
    result = forms[:, used].tocsr()
    result.sort_indices()
    return result


def _tabled(
    columns: list[Ints], forms: sparse.csr_matrix
) -> tuple[sparse.csr_matrix, tuple[Ints, ...], tuple[Ints, ...], int]:
    """Return forms, each unit's generators in one order for all units of an orbit, and how many had to be left out.

    Before the number that is left out: at which of an orbit's columns each of the generators was found.

    A generator belongs to a unit if, at some place of the unit, it is the only one that is not known from other places.
    Those that only ever act together are left out, since nothing says how permutations carry them along.
    """
    left_out = 0
    while True:
        tables, found = zip(*(_table(matrix, forms) for matrix in columns), strict=True) if columns else ((), ())
        known = np.zeros(forms.shape[1], bool)
        for table in tables:
            known[table] = True
        if known.all():
            return forms, tables, found, left_out
        left_out += int((~known).sum())
        forms = forms[:, np.flatnonzero(known)].tocsr()
        forms.sort_indices()


def _table(matrix: Ints, forms: sparse.csr_matrix) -> tuple[Ints, Ints]:
    count = np.diff(forms.indptr)[matrix]
    chosen: list[Ints] = []
    found: list[int] = []
    seen: set[int] = set()
    later = []
    for at, (number, column) in enumerate(zip(count.T, matrix.T, strict=True)):
        if (number == 1).all():
            generators = forms.indices[forms.indptr[column]].astype(np.int64)
            if int(generators[0]) not in seen:
                seen.add(int(generators[0]))
                chosen.append(generators)
                found.append(at)
        elif number.size and number.min() > 1:
            later.append((at, column))
    grew = bool(later)
    while grew:
        grew = False
        for at, column in later:
            acting = forms[column]
            unit = np.repeat(np.arange(len(matrix)), np.diff(acting.indptr))
            new = np.ones(len(unit), bool)
            for held in chosen:
                new &= acting.indices != held[unit]
            if np.array_equal(unit[new], np.arange(len(matrix))):  # one more for each unit
                chosen.append(acting.indices[new].astype(np.int64))
                found.append(at)
                grew = True
    table = np.stack(chosen, 1) if chosen else np.zeros((len(matrix), 0), np.int64)
    return table, np.array(found, np.int64)


def _shared(pairs: Ints, total: Hashes, standing: NDArray[np.bool_]) -> Ints:
    """Return which parents stay where they are while blocks change places: gains that all heads share.

    Such a gain is the parent of one unit in each head. Of all that hangs together through it, several parents are
    alike, where a block has one of each kind.

    Args:
        pairs: Parents and members. Shape (2, pairs).
        total: For each root, what it is like.
        standing: For each root, whether it stands in a parameter.
    """
    component = components(len(total), [(pairs[0], pairs[1])])
    own = np.unique(pairs[0])
    _, kind, count = np.unique(
        np.stack([component[own].astype(np.uint64), total[own]]), axis=1, return_inverse=True, return_counts=True
    )
    several = marked(len(total), component[own[count[kind.ravel()] > 1]])
    found: Ints = own[several[component[own]] & standing[own]]
    return found


def _roles(pairs: Ints, total: Hashes, shared: Ints) -> tuple[Hashes, Ints]:
    """Return what each root is in its block: its orbit, those of its parents, and the shared parents themselves.

    With the pairs of parents and members, but for shared parents.
    """
    parent, member = pairs
    role = mix(total ^ sum_by(member, mix(total[parent]), len(total)))
    among = np.isin(parent, shared)
    if among.any():
        role = mix(role ^ sum_by(member[among], mix(parent[among].astype(np.uint64)), len(total)))
    return role, pairs[:, ~among]


def _blocks(
    pairs: Ints, shared: Ints, total: Hashes, fixed: NDArray[np.bool_], unit_of: Ints, folded: Folded | None
) -> tuple[tuple[Ints, ...], tuple[Ints, ...], Ints]:
    """Find blocks that may change places as wholes; number their parents behind the units, and tell both by atom.

    What slots are made of is numbered first, right behind the units.
    """
    number, number_of = len(unit_of), unit_of.copy()
    if not pairs.size:
        return (), (), number_of
    slot_of = np.full(number, -1)
    result, carried = [], []
    if folded is not None and folded.atoms:
        new = folded.all_atoms[unit_of[folded.all_atoms] < 0]
        number_of[new] = unit_of.max() + 1 + np.arange(len(new))
        for index, atoms in enumerate(folded.atoms):
            slot_of[atoms] = index
        result = [number_of[np.stack([folded.atoms[slot] for slot in system])] for system in folded.systems]
        carried = [np.zeros((len(system), 0), np.int64) for system in folded.systems]
    role, (parent, member) = _roles(pairs, total, shared)
    # Parents that share members form one block, together with all their members.
    component = components(number, [(parent, member)])
    involved = np.unique(np.r_[parent, member])
    blocks: dict[int, list[int]] = {}
    for index in involved:
        blocks.setdefault(int(component[index]), []).append(int(index))
    parents = set(parent.tolist())
    signatures: dict[int, list[Ints]] = {}
    for together in blocks.values():
        array: Ints = np.array(together)
        own = [index for index in together if index in parents and slot_of[index] < 0]
        if fixed[array].any() or len({int(total[index]) for index in own}) < len(own):
            continue
        slots = np.unique(slot_of[array[slot_of[array] >= 0]])
        parts = [folded.atoms[slot] for slot in slots] if folded is not None else []
        array = array[slot_of[array] < 0]
        array = array[np.lexsort((array, role[array]))]
        with np.errstate(over="ignore"):
            key = int(mix(role[array]).sum())
            for rank, part in enumerate(parts):
                key ^= int(mix(mix(role[part]) + np.uint64(rank)).sum())
        signatures.setdefault(key, []).append(np.concatenate([array, *parts]))
    for group in signatures.values():
        if len(group) < 2:
            continue
        members = np.stack(group)
        table = np.where(slot_of[members] >= 0, number_of[members], unit_of[members])
        units = (table >= 0).all(0)
        if units.any():
            result.append(table[:, units])
            others = members[:, (table < 0).all(0)]
            carried.append(number_of.max() + 1 + np.arange(others.size).reshape(others.shape))
            number_of[others] = carried[-1]
    return tuple(result), tuple(carried), number_of


def _dense(
    orbits: list[Ints], cells: list[Ints], columns: list[Ints], movable: list[bool], forms: sparse.csr_matrix,
    constraints: Constraints, root: Ints, roots: Ints, grouped: dict[str, Label],
) -> tuple[Ints, ...]:  # fmt: skip
    """Find cells of units that only linear operations touch: any invertible matrix mixes them."""
    seen = (constraints.restricted, constraints.normed, constraints.centred, constraints.gained)
    met = [*itertools.chain(*seen), *(label.atom for label in grouped.values())]
    restricted = marked(constraints.atoms, root[flat(met)])
    result = []
    for group, cell, matrix, moves in zip(orbits, cells, columns, movable, strict=True):
        # Matrices of size 1 are scales with signs.
        if not moves or restricted[roots[group]].any() or np.bincount(cell).min() == 1:
            continue
        members = [np.flatnonzero(cell == number) for number in range(int(cell.max()) + 1)]
        acting = [own_exponents(forms, matrix[own]) for own in members]
        if all(own is not None and (np.abs(own) == 1).all() for own in acting):
            result += [group[own] for own in members]
    return tuple(result)


def own_exponents(forms: sparse.csr_matrix, columns: Ints) -> Floats | None:
    """Return with which exponent a generator of its own acts on each of several units, at each of their places.

    Args:
        forms: Generators by position.
        columns: At which positions the units stand. Shape (units, columns), two units at least.

    Returns:
        Shape (columns,); None if units have no generator of their own, or several, or other generators act on some of
        the units only.
    """
    units, width = columns.shape
    if not width:
        return np.zeros(0)
    start = forms.indptr[columns]
    if (forms.indptr[columns + 1] == start + 1).all():  # nothing else acts
        exponents = forms.data[start]
        return exponents[0] if (exponents * exponents[:, :1] == exponents[0] * exponents[0, 0]).all() else None
    rows = forms[columns.ravel()]
    place = np.repeat(np.arange(units * width), np.diff(rows.indptr))
    unit, column = np.divmod(place, width)
    kinds, generator = np.unique(rows.indices, return_inverse=True)
    table = np.zeros((len(kinds), units), bool)
    table[generator, unit] = True
    own = table.sum(1) == 1
    common = ~own[generator]
    alike = np.unique(np.stack([column[common], generator[common], rows.data[common]]), axis=1, return_counts=True)[1]
    if (alike != units).any() or own.sum() != units or (table[own].sum(0) != 1).any():
        return None
    if (np.bincount(place[~common], minlength=units * width) != 1).any():
        return None
    exponents = np.zeros((units, width))
    exponents[unit[~common], column[~common]] = rows.data[~common]
    return exponents[0] if (exponents * exponents[:, :1] == exponents[0] * exponents[0, 0]).all() else None
