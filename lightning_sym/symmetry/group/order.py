"""Signs and an order of units that are the same for every member of an orbit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, odd, on_axes
from lightning_sym.symmetry.group.norms import NOTHING, Plan, classes_of, joint_sums, module_of
from lightning_sym.symmetry.tracing.structure import Slot, Structure

# Keys of units that differ by less, relative to the largest, are ties: rounding differs between orbit members.
_TIE = 1e-9


class Gauged:
    """The weights under scales and signs that are found already, one tensor at a time.

    Args:
        plan: The group's.
        tensors: The network's parameters and buffers, by name.
        log_scale: The scales.
        shown: At which positions weights are seen; what has no scale of its own is not.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor], log_scale: Floats, shown: Bools) -> None:
        self.tensors, self.shown = tensors, shown
        self.slots = plan.structure.slots_of
        self.scale = np.exp(plan.forms @ log_scale)
        self.sign = np.ones(plan.total)

    def weight(self, name: str) -> Floats:
        """Return a tensor under the scales and signs, without what is not shown."""
        value: Floats = self.tensors[name].detach().to("cpu", torch.float64).numpy()
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
    """Return a slot's values in the shape of its tensor."""
    return on_axes(values[slot.rows], slot.shape, slot.axes, ndim)


def find_signs(plan: Plan, gauged: Gauged, cells: Collection[int] | None, known: Floats) -> Floats:
    """Choose all signs, class by class in the order of the forward pass; leaves them in `gauged.sign`.

    Args:
        plan: The group's.
        gauged: The weights under scales.
        cells: The dense cells whose matrices are known up to signs. Entries of other dense cells decide a sign only if
            no other entry does. None if the group has no dense cells.
        known: Signs of gains between which streams rotate, which rotations do not change; nan for all others. Shape
            (signs,).

    Returns:
        +1 or -1, those of units in dense cells included. Shape (signs,).
    """
    return _SignChoice(plan, gauged, cells, known).run()


class _SignChoice:
    """Makes the largest of the entries positive whose sign depends on one pending generator only."""

    def __init__(self, plan: Plan, gauged: Gauged, cells: Collection[int] | None, known: Floats) -> None:
        self.plan, self.gauged, structure = plan, gauged, plan.structure
        self.cell_of = np.r_[structure.cell_of, -1]  # the last one for positions of no unit
        self.forms = structure.signs.tocsr()
        self.by_generator = self.forms.tocsc()
        self.signs = np.ones(self.forms.shape[1])
        self.classes = classes_of(structure, structure.sign_table, self.forms, cells or ())
        self.pending = np.zeros(len(self.signs), bool)
        self.pending[[generator for members in self.classes for generator in members]] = True
        # What stands in cells that stay as they are differs between members of the orbit.
        self.veiled = np.full(len(self.signs), cells is not None) & ~self.pending
        self.pending |= self.veiled
        self.signs[~np.isnan(known)] = known[~np.isnan(known)]
        self.pending &= np.isnan(known)
        orbits = {rotation.orbit for rotation in structure.rotations}
        self.of_streams = {int(g) for orbit in orbits for g in structure.sign_table[orbit].ravel()}
        self.gauged.sign = np.where(odd(self.forms @ (self.signs < 0).astype(np.float64)), -1.0, 1.0)

    def run(self) -> Floats:
        """Choose the signs: those of all gains at once, then class by class, and one by one what is left."""
        gains = [(members, gain) for members in self.classes if (gain := self._gain(members)) is not None]
        if gains:
            self._decide(np.concatenate([members for members, _ in gains]), [gain for _, gain in gains])
        for members in self.classes:
            if self.pending[members].any():
                # Signs that its gain was waiting for are known by now.
                self._decide(members, [gain for own, gain in gains if own is members])
                names = [slot.tensor for _, slot in self._touched(members[0])]
                self._decide(members, [name for name in names if module_of(name) == module_of(names[0])])
        self._by_all_weights()
        if self.veiled.any():
            self.pending &= ~self.veiled
            self._by_all_weights()
        return self.signs

    def _by_all_weights(self) -> None:
        """Choose the signs that are left by all that they flip, until no more can be told.

        Class by class, as generators of one class stand in an order that differs between members of the orbit.
        """
        left = len(self.signs) + 1
        while 0 < self.pending.sum() < left:
            left = self.pending.sum()
            for members in self.classes:
                own = members[self.pending[members]].tolist()
                self._decide(members, [slot.tensor for generator in own for _, slot in self._touched(generator)])

    def _touched(self, generator: int) -> list[tuple[int, Slot]]:
        """Return the positions of parameters on which a generator acts, and their slots.

        Positions that matrices mix are left out if there are others.
        """
        touched = self.by_generator.indices[slice(*self.by_generator.indptr[generator : generator + 2])]
        positions = touched[self.plan.parameter[touched]].tolist()
        found = [(position, self.plan.slots[self.plan.slot_of[position]]) for position in positions]
        plain = [(at, slot) for at, slot in found if self.cell_of[slot.unit.ravel()[at - slot.offset]] < 0]
        return plain or found

    def _gain(self, members: Ints) -> str | None:
        """Return the vector that takes the signs but not the scales of the weights: gamma of a batch norm.

        A bias that shifts take off is 0, and its sign rounding.
        """
        if int(members[0]) in self.of_streams:
            return None
        forms, touched = self.plan.forms, self._touched(members[0])
        rows = [slice(*forms.indptr[position : position + 2]) for position, _ in touched]
        scales = [forms.indices[row] for row in rows]
        powers = [
            (module_of(slot.tensor), *forms.indices[row], *forms.data[row])
            for (_, slot), row in zip(touched, rows, strict=True)
        ]
        vectors = [self.gauged.tensors[slot.tensor].numel() == slot.size for _, slot in touched]
        matrices = {power for power, vector in zip(powers, vectors, strict=True) if not vector}
        for (_, slot), own, power, vector in zip(touched, scales, powers, vectors, strict=True):
            shifted = slot.tensor in self.plan.structure.shifts.names
            if vector and not (shifted or np.array_equal(own, scales[0])) and power not in matrices:  # it is no bias
                return slot.tensor
        return None

    def _entries(self, names: Sequence[str]) -> Iterator[tuple[Ints, Floats]]:
        """Yield the pending generators on which alone some rows of tensors depend, and the rows."""
        unknown = self.forms @ self.pending.astype(np.float64)
        for name in names:
            value = self.gauged.weight(name)
            for slot in self.plan.tensors[name]:
                single = np.flatnonzero(unknown[slot.rows] == 1)
                if not (len(slot.axes) == 1 or slot.of_stack) or not len(single):
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
        """Choose signs by some tensors' entries, where these tell; see `canonicalize`."""
        largest, bound, votes, cubes, sums, sizes = np.zeros((6, len(self.signs)))
        entries = []
        names = list(dict.fromkeys(names))
        for name in names:
            for slot in self.plan.tensors[name]:
                hits = self.forms[slot.rows].multiply(self.pending[None, :]).tocoo()
                if hits.nnz and (len(slot.axes) == 1 or slot.of_stack):
                    sizes_of = np.moveaxis(abs(self.gauged.weight(name)), slot.axes, range(len(slot.axes)))
                    np.maximum.at(bound, hits.col, sizes_of.reshape(slot.size, -1).max(1, initial=0)[hits.row])
        for generators, rows in self._entries(names):
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
            # What is that small beside entries that are not known yet may be rounding, as of a bias that became 0.
            told = largest > _TIE * bound
            settled = members[self.pending[members] & (score[members] != 0) & told[members]]
            self.signs[settled] = np.sign(score[settled])
            self.pending[settled] = False
        self.gauged.sign = np.where(odd(self.forms @ (self.signs < 0).astype(np.float64)), -1.0, 1.0)


def _refine(rank: Ints, key: Floats, size: Floats | None = None) -> Ints:
    """Split equal ranks by a key, largest first; keys that differ by rounding only stay equal.

    Args:
        rank: Shape (size,).
        key: Shape (size,).
        size: Magnitude of the terms that the keys are sums of, as these are rounded; by default that of the keys. Shape
            (size,).

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


def _colour(kind: int, number: Ints) -> Floats:
    """Return reproducible numbers in [0.5, 1.5) for pairs of integers."""
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
    """Sort units within cells, and blocks, by keys that no other permutation changes.

    Args:
        plan: The group's.
        slices: Sums of squares at each position, under the scales.
        gauged: The weights under scales and signs.
        last: By orbit, which units come after all others.
        names: What each orbit is called.
        notes: What could not be sorted is added.
        placed: Orbits whose units are in order, but for blocks.

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
    for index in sorted(mixed):  # in blocks: mixed, they stand in an order that is their own
        for column in (slices[structure.columns[index]] * plan.parameter[structure.columns[index]]).T:
            ranks[index] = _refine(ranks[index], column)
    for index in sortable:
        columns, first = structure.columns[index], plan.first[index]
        own = slices[columns] * plan.parameter[columns]
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
    for index in left:
        if _tied(structure, ranks, index):
            notes.append(f"units of {names[index]} that no key tells apart keep their order")
    return _sorted(structure, ranks, sortable, _slot_ranks(plan, slices))


def _slot_ranks(plan: Plan, slices: Floats) -> Ints:
    """Return for each slot its rank by the norm of what stands in its copies; 0 for all other units."""
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


def _tied(structure: Structure, ranks: Sequence[Ints], index: int) -> bool:
    """Return whether two units of an orbit have one rank: in one cell, or in one block that may be any."""
    alone = not any(np.isin(structure.orbits[index], blocks).any() for blocks in structure.blocks)
    cells = structure.cells[index] * len(ranks[index]) if alone else 0
    return len(np.unique(ranks[index] + cells)) < len(ranks[index])


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

    Coloured, an entry's weight in the sum depends on where it stands on the other axes: on the position if its unit is
    fixed, and on the rank of its unit otherwise.
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
