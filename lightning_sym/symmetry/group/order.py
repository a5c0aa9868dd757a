"""Signs and permutations that are the same at every point of an orbit."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, odd, on_axes
from lightning_sym.symmetry.group.norms import NOTHING, Plan, classes_of, joint_sums, module_of
from lightning_sym.symmetry.solving.structure import Slot, Structure

# Keys that differ by less, relative to the largest, are ties: rounding differs between points of an orbit.
_TIE = 1e-9
# Squared norms that are smaller, relative to the largest of a unit, are rounding.
_ROUNDING = 1e-24
# Larger numbers, of masks, do not count.
_MASKED = 1e30


class Gauged:
    """The weights under known scales and signs, one tensor at a time.

    Args:
        plan: The plan of the group.
        tensors: The network's parameters and buffers, by name.
        log_scale: Natural logarithms of the scales.
        shown: Mask of the positions that count; those without a determined scale do not.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor], log_scale: Floats, shown: Bools) -> None:
        self.tensors, self.shown = tensors, shown
        self.slots = plan.structure.slots_of
        self.scale = np.exp(plan.forms @ log_scale)
        self.sign = np.ones(plan.total)

    def weight(self, name: str) -> Floats:
        """Return a tensor under the scales and signs; positions that do not count are 0."""
        value: Floats = self.tensors[name].detach().to("cpu", torch.float64).numpy()
        if not max(value.max(initial=0.0), -value.min(initial=0.0)) < _MASKED:
            value = np.where(abs(value) < _MASKED, value, 0.0)
        for slot in self.slots[name]:
            scale, sign, shown = (_spread(own, slot, value.ndim) for own in (self.scale, self.sign, self.shown))
            if slot.kind == "variance":
                value = scale**2 * (value + slot.epsilon) - slot.epsilon
            elif not (scale == 1).all() or not (sign == 1).all():
                value = value * (scale * sign)
            if not shown.all():
                value = value * shown
        return value


def _spread(values: NDArray[Any], slot: Slot, ndim: int) -> NDArray[Any]:
    """Broadcast a slot's values to the axes of its tensor."""
    return on_axes(values[slot.rows], slot.shape, slot.axes, ndim)


def find_signs(plan: Plan, gauged: Gauged, cells: Collection[int] | None, known: Floats) -> Floats:
    """Choose all signs, class by class in the order of the forward pass, and store them in `gauged.sign`.

    Args:
        plan: The plan of the group.
        gauged: The weights under scales.
        cells: GL(d) blocks with matrices known up to signs. Entries of other GL(d) blocks decide a sign only if
            no other entry does. None if the group has no GL(d) blocks.
        known: Signs of the gains of rotated streams, which rotations leave unchanged; nan elsewhere. Shape (signs,).

    Returns:
        +1 or -1, including units in GL(d) blocks. Shape (signs,).
    """
    return _SignChoice(plan, gauged, cells, known).run()


class _SignChoice:
    """Makes the largest entry positive, among those with a single pending generator."""

    def __init__(self, plan: Plan, gauged: Gauged, cells: Collection[int] | None, known: Floats) -> None:
        self.plan, self.gauged, structure = plan, gauged, plan.structure
        self.cell_of = np.r_[structure.cell_of, -1]  # the last entry is for positions without a unit
        self.forms = structure.signs.tocsr()
        self.by_generator = self.forms.tocsc()
        self.signs = np.ones(self.forms.shape[1])
        self.classes = classes_of(structure, structure.sign_table, self.forms, cells or ())
        self.pending = np.zeros(len(self.signs), bool)
        self.pending[[generator for members in self.classes for generator in members]] = True
        # Entries in unbalanced cells differ between points of the orbit.
        self.veiled = np.full(len(self.signs), cells is not None) & ~self.pending
        self.pending |= self.veiled
        self.signs[~np.isnan(known)] = known[~np.isnan(known)]
        self.pending &= np.isnan(known)
        orbits = {rotation.orbit for rotation in structure.rotations}
        self.of_streams = {int(g) for orbit in orbits for g in structure.sign_table[orbit].ravel()}
        self.gauged.sign = np.where(odd(self.forms @ (self.signs < 0).astype(np.float64)), -1.0, 1.0)
        self.bound = self._bound()
        self.tilted = {name for tilt in structure.tilts for name, _ in (*tilt.moved, *tilt.readers)}

    def _bound(self) -> Floats:
        """Return the size of the largest entry that each pending sign flips. Shape (signs,)."""
        bound = np.zeros(len(self.signs))
        for name, slots in self.plan.tensors.items() if self.pending.any() else ():
            for slot in slots:
                hits = self.forms[slot.rows].multiply(self.pending[None, :]).tocoo()
                if hits.nnz and (len(slot.axes) < 2 or slot.of_stack):
                    sizes = np.moveaxis(abs(self.gauged.weight(name)), slot.axes, range(len(slot.axes)))
                    np.maximum.at(bound, hits.col, sizes.reshape(slot.size, -1).max(1, initial=0)[hits.row])
        return bound

    def run(self) -> Floats:
        """Choose the signs: those of all gains at once, then class by class, and finally one by one."""
        gains = [(members, gain) for members in self.classes if (gain := self._gain(members)) is not None]
        if gains:
            self._decide(np.concatenate([members for members, _ in gains]), [gain for _, gain in gains])
        for members in self.classes:
            if self.pending[members].any():
                # The signs that its gain depends on are known by now.
                self._decide(members, [gain for own, gain in gains if own is members])
                names = [slot.tensor for _, slot in self._touched(members[0])]
                self._decide(members, [name for name in names if module_of(name) == module_of(names[0])])
        self._by_all_weights()
        if self.veiled.any():
            self.pending &= ~self.veiled
            self._by_all_weights()
        return self.signs

    def _by_all_weights(self) -> None:
        """Choose the remaining signs from all entries that they flip, until no more can be determined.

        Classes are visited in turn, as the order of generators within a class differs between points of the orbit.
        """
        self._by_single_entries()
        while (given := self._in_pairs()) is not None:
            self.pending[given] = False
            self._by_single_entries()

    def _in_pairs(self) -> int | None:
        """Return a sign that may be chosen freely, as all entries have an even number of pending signs; else None.

        It is the one that flips the largest entries: flipping all pending signs changes nothing.
        """
        unknown = self.forms @ self.pending.astype(np.float64)
        sizes = np.zeros(len(self.signs))
        read = (slot.tensor for slot in self.plan.slots if self.plan.parameter[slot.rows].any())
        for name in dict.fromkeys(read) if self.pending.any() else ():
            weight = abs(self.gauged.weight(name))
            slots = [slot for slot in self.plan.tensors[name] if len(slot.axes) < 2 or slot.of_stack]
            count = sum((_spread(unknown, slot, weight.ndim) for slot in slots), np.zeros(weight.shape))
            if (odd(count) & (weight > NOTHING)).any():
                return None
            for slot in slots:
                total = np.moveaxis(weight**2, slot.axes, range(len(slot.axes))).reshape(slot.size, -1).sum(1)
                sizes += total @ self.forms[slot.rows].multiply(self.pending[None, :])
        return int(sizes.argmax()) if sizes.any() else None

    def _by_single_entries(self) -> None:
        """Choose signs class by class from entries with one pending sign."""
        left = len(self.signs) + 1
        while 0 < self.pending.sum() < left:
            left = self.pending.sum()
            for members in self.classes:
                own = members[self.pending[members]].tolist()
                self._decide(members, [slot.tensor for generator in own for _, slot in self._touched(generator)])

    def _touched(self, generator: int) -> list[tuple[int, Slot]]:
        """Return the positions of parameters that a generator acts on, with their slots.

        Positions that matrices or rank-one maps mix are omitted if there are others.
        """
        touched = self.by_generator.indices[slice(*self.by_generator.indptr[generator : generator + 2])]
        positions = touched[self.plan.parameter[touched]].tolist()
        found = [(position, self.plan.slots[self.plan.slot_of[position]]) for position in positions]
        plain = [
            (at, slot)
            for at, slot in found
            if slot.tensor not in self.tilted and self.cell_of[slot.unit.ravel()[at - slot.offset]] < 0
        ]
        return plain or found

    def _gain(self, members: Ints) -> str | None:
        """Return the vector that the signs flip but the weights' scales do not act on: gamma of a batch norm.

        A bias that translations cancel is excluded: its value is 0, and its sign is rounding.
        """
        if int(members[0]) in self.of_streams:
            return None
        forms, touched = self.plan.forms, self._touched(members[0])
        rows = [slice(*forms.indptr[position : position + 2]) for position, _ in touched]
        powers = [(*forms.indices[row], *forms.data[row]) for row in rows]
        modules = [module_of(slot.tensor) for _, slot in touched]
        vectors = [self.gauged.tensors[slot.tensor].numel() == slot.size for _, slot in touched]
        held = list(zip(modules, powers, strict=True))
        matrices = {own for own, vector in zip(held, vectors, strict=True) if not vector}
        for own, vector, (_, slot) in zip(held, vectors, touched, strict=True):
            shifted = slot.tensor in self.plan.structure.shifts.names
            if vector and not shifted and own[1] != powers[0] and own not in matrices:  # not a bias
                return slot.tensor
        return None

    def _entries(self, names: Iterable[str]) -> Iterator[tuple[Ints, Floats]]:
        """Yield rows of tensors with a single pending generator, and these generators."""
        unknown = self.forms @ self.pending.astype(np.float64)
        for name in names:
            value = self.gauged.weight(name)
            for slot in self.plan.tensors[name]:
                single = np.flatnonzero(unknown[slot.rows] == 1)
                if not (len(slot.axes) < 2 or slot.of_stack) or not len(single):
                    continue
                hits = self.forms[slot.offset + single].multiply(self.pending[None, :]).tocsr()
                hits.eliminate_zeros()
                known = value
                for other in self.plan.tensors[name]:
                    if other is not slot:
                        known = known * (_spread(unknown, other, value.ndim) == 0)
                rows = np.moveaxis(known, slot.axes, range(len(slot.axes))).reshape(slot.size, -1)[single]
                yield hits.indices.astype(np.int64), rows

    def _decide(self, members: Ints, names: Sequence[str]) -> None:
        """Choose signs from the entries of some tensors, where these determine them; see `canonicalize`."""
        largest, votes, cubes, sums, sizes = np.zeros((5, len(self.signs)))
        entries = []
        for generators, rows in self._entries(dict.fromkeys(names)):
            among = np.isin(generators, members)
            entries.append((generators[among], rows[among]))
        for generators, rows in entries:
            np.maximum.at(largest, generators, abs(rows).max(1, initial=0))
        for generators, rows in entries:
            tied = abs(rows) >= largest[generators][:, None] * (1 - _TIE)
            unit = rows / np.maximum(largest[generators], NOTHING)[:, None]
            np.add.at(votes, generators, (np.sign(rows) * tied).sum(1))
            np.add.at(cubes, generators, (unit**3).sum(1))
            np.add.at(sums, generators, unit.sum(1))
            np.add.at(sizes, generators, abs(unit).sum(1))
        for score in (votes, *(np.where(abs(score) > _TIE * sizes, score, 0) for score in (cubes, sums))):
            # An entry that is tiny compared with others may be rounding, as of a bias that became 0.
            told = largest > _TIE * self.bound
            settled = members[self.pending[members] & (score[members] != 0) & told[members]]
            self.signs[settled] = np.sign(score[settled])
            self.pending[settled] = False
        self.gauged.sign = np.where(odd(self.forms @ (self.signs < 0).astype(np.float64)), -1.0, 1.0)


def _refine(rank: Ints, key: Floats, size: Floats | None = None) -> Ints:
    """Split equal ranks by a key, largest first; keys that differ only by rounding stay equal.

    Args:
        rank: Shape (size,).
        key: Shape (size,).
        size: Magnitude of the terms summed in each key, which determines its rounding; by default that of the keys.
            Shape (size,).

    Returns:
        New ranks from 0. Shape (size,).
    """
    order = np.lexsort((-key, rank))
    ordered, ranks = key[order], rank[order]
    scale = float(abs(key).max(initial=0)) if size is None else float(size.max(initial=0))
    new = (np.diff(ranks) != 0) | (abs(np.diff(ordered)) > _TIE * max(scale, NOTHING))
    result = np.empty_like(rank)
    result[order] = np.r_[0, np.cumsum(new)]
    return result


def _above_rounding(squares: Floats) -> Floats:
    """Return squared norms with 0 in place of those that are rounding, as of biases that became 0.

    Args:
        squares: One row per unit. Shape (units, columns).
    """
    return np.where(squares > _ROUNDING * squares.sum(1).max(initial=0), squares, 0.0)


def _colour(kind: int, number: Ints) -> Floats:
    """Return reproducible pseudo-random numbers in [0.5, 1.5) for pairs of integers."""
    raw = np.sin(number * 12.9898 + kind * 78.233 + 0.5) * 43758.5453
    result: Floats = 0.5 + (raw - np.floor(raw))
    return result


def find_order(
    plan: Plan,
    slices: Floats,
    gauged: Gauged,
    last: Mapping[int, Bools],
    names: Sequence[str],
    notes: list[str],
    placed: Collection[int] = (),
) -> Ints:
    """Sort units within cells, and blocks, by keys that are invariant under all other permutations.

    Args:
        plan: The plan of the group.
        slices: Squared norms at each position, under the scales.
        gauged: The weights under scales and signs.
        last: For some orbits, a mask of the units to sort last.
        names: Names of the orbits.
        notes: A list; notes on unresolved ties are appended.
        placed: Orbits that are sorted already, except for blocks.

    Returns:
        The permutation. Shape (units,).
    """
    structure = plan.structure
    ranks = [np.zeros(len(units), np.int64) for units in structure.orbits]
    mixed = {index for index, units in enumerate(structure.orbits) if structure.cell_of[units[0]] >= 0}.union(placed)
    sortable = [
        index
        for index, units in enumerate(structure.orbits)
        if structure.movable[index] and len(units) > 1 and index not in mixed
    ]
    joint = joint_sums(plan, slices)
    for index in sorted(mixed):  # sorts blocks only: the order of mixed units is determined already
        own = _above_rounding(slices[structure.columns[index]] * plan.parameter[structure.columns[index]])
        # Copies of units may change places, and their columns with them.
        for column in (*[own.sum(1)] * (structure.copies_of(index) is not None), *own.T):
            ranks[index] = _refine(ranks[index], column)
    for index in sortable:
        columns, first = structure.columns[index], plan.first[index]
        own = _above_rounding(slices[columns] * plan.parameter[columns])
        others = own[:, ~first].sum(1) + joint[structure.orbits[index]]
        after = last.get(index, np.zeros(len(columns), bool))
        for key in (-after.astype(np.float64), own[:, first].sum(1), others):
            ranks[index] = _refine(ranks[index], key)
        for column in own.T:
            if _tied(structure, ranks, index):
                ranks[index] = _refine(ranks[index], column)
    left = [index for index in sortable if _tied(structure, ranks, index)]
    for power, coloured in ((3, False), (1, False), (1, True), (1, True), (1, True)):
        if coloured:
            left = [index for index in left if _tied(structure, ranks, index)]
        for index in left:
            _by_entries(plan, gauged, ranks, index, power, coloured=coloured)
    alike = [blocks for blocks in structure.blocks if not _differ(structure, ranks, blocks)]
    for index in left:
        if _tied(structure, ranks, index, alike):
            notes.append(f"units of {names[index]} that no key distinguishes keep their order")
    return _sorted(structure, ranks, sortable, _slot_ranks(plan, slices))


def _slot_ranks(plan: Plan, slices: Floats) -> Ints:
    """Return the rank of each slot by the norm of its copies; 0 for all other units."""
    structure = plan.structure
    norms, rank = np.zeros(structure.units), np.zeros(structure.units, np.int64)
    for index in range(len(structure.orbits)):
        copies = structure.copies_of(index)
        if copies is None:
            continue
        rank[copies.slots] = 1
        for column in np.flatnonzero(copies.columns.copy >= 0):
            positions = structure.columns[index][:, column]
            own = slices[positions] * plan.parameter[positions]
            np.add.at(norms, copies.slots[:, copies.columns.copy[column]], own)
    slots = np.flatnonzero(rank)
    if len(slots):
        rank[slots] = _refine(np.zeros(len(slots), np.int64), norms[slots])
    return rank


def _tied(structure: Structure, ranks: Sequence[Ints], index: int, alike: Sequence[Ints] | None = None) -> bool:
    """Return whether two units of an orbit have the same rank: in one cell, or anywhere if blocks are permuted.

    Args:
        structure: The group.
        ranks: Of the units of each orbit.
        index: The orbit.
        alike: The blocks that ranks do not distinguish; by default all.
    """
    alike = structure.blocks if alike is None else alike
    alone = not any(np.isin(structure.orbits[index], blocks).any() for blocks in alike)
    cells = structure.cells[index] * len(ranks[index]) if alone else 0
    return len(np.unique(ranks[index] + cells)) < len(ranks[index])


def _differ(structure: Structure, ranks: Sequence[Ints], blocks: Ints) -> bool:
    """Return whether the ranks of units distinguish all blocks. Shape of `blocks`: (blocks, units)."""
    number = np.zeros(structure.units, np.int64)
    for index, units in enumerate(structure.orbits):
        number[units] = index * structure.units + ranks[index]
    return len(np.unique(np.sort(number[blocks], axis=1), axis=0)) == len(blocks)


def _sorted(structure: Structure, ranks: Sequence[Ints], sortable: Sequence[int], rank_of: Ints) -> Ints:
    """Return the permutation that sorts units within cells, and then blocks, by rank."""
    permutation = np.arange(structure.units)
    for units, own in zip(structure.orbits, ranks, strict=True):
        rank_of[units] = own
    for index in sortable:
        units, cells = structure.orbits[index], structure.cells[index]
        permutation[units[np.argsort(cells, kind="stable")]] = units[np.lexsort((ranks[index], cells))]
    for blocks in structure.blocks:
        order = np.lexsort(rank_of[permutation[blocks]].T[::-1])
        permutation[blocks] = permutation[blocks[order]]
    return permutation


def _by_entries(plan: Plan, gauged: Gauged, ranks: list[Ints], index: int, power: int, *, coloured: bool) -> None:
    """Refine the ranks of one orbit by sums over the entries of each unit's slices.

    With `coloured`, the weight of an entry depends on its place on the other axes: on the position if its unit is
    fixed, otherwise on the rank of its unit.
    """
    structure = plan.structure
    columns = structure.columns[index]
    colour = np.ones(plan.total)
    if coloured:
        for number, slot in enumerate(plan.slots):
            colour[slot.rows] = _colour(number, np.arange(slot.size))
        for kind in np.flatnonzero(structure.movable).tolist():
            for place, positions in enumerate(structure.columns[kind].T):
                colour[positions] = _colour(1000 + 37 * kind + place, ranks[kind])
    for name in dict.fromkeys(plan.slots[number].tensor for number in plan.slot_of[columns[0]]):
        value = gauged.weight(name) ** power
        for slot in gauged.slots[name]:
            mine = [column for column in columns.T if plan.slots[plan.slot_of[column[0]]] is slot]
            if not mine:
                continue
            weight = value
            for other in gauged.slots[name]:
                if other is not slot and (len(other.axes) == 1 or other.of_stack):
                    weight = weight * _spread(colour, other, value.ndim)
            sums = np.moveaxis(weight, slot.axes, range(len(slot.axes))).reshape(slot.size, -1)
            total, size = sums.sum(1), abs(sums).sum(1)
            for column in mine:
                ranks[index] = _refine(ranks[index], total[column - slot.offset], size[column - slot.offset])
