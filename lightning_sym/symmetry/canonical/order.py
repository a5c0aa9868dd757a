"""Signs and an order of units that are the same for every member of an orbit."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.norms import NOTHING, Floats, Ints, Plan, joint_sums
from lightning_sym.symmetry.tracing.structure import Slot

# Keys of units that differ by less, relative to the largest, are ties: rounding differs between orbit members.
_TIE = 1e-9


class Gauged:
    """The weights under scales and signs that are found already, one tensor at a time."""

    def __init__(self, symmetry: Symmetry, plan: Plan, tensors: dict[str, Tensor], log_scale: Floats) -> None:
        self.symmetry, self.plan, self.tensors = symmetry, plan, tensors
        self.scale = np.exp(plan.forms @ log_scale)
        self.sign = np.ones(plan.total)
        self.shown = np.ones(plan.total, bool)  # at which positions weights are seen: what has no scale is not
        self.slots: dict[str, list[Slot]] = {}
        for slot in plan.slots:
            self.slots.setdefault(slot.tensor, []).append(slot)

    def spread(self, values: Floats, slot: Slot, ndim: int) -> Floats:
        """Return a slot's values in the shape of its tensor."""
        shape = [1] * ndim
        for axis, size in zip(slot.axes, slot.shape, strict=True):
            shape[axis] = size
        return values[self.plan.at(slot)].reshape(shape)

    def weight(self, name: str) -> Floats:
        """Return a tensor under the scales and signs."""
        value: Floats = self.tensors[name].detach().to("cpu", torch.float64).numpy()
        for slot in self.slots[name]:
            scale = self.spread(self.scale, slot, value.ndim)
            if slot.kind == "variance":
                value = scale**2 * (value + slot.epsilon) - slot.epsilon
            elif not (scale == 1).all() or not (self.sign[self.plan.at(slot)] == 1).all():
                value = value * (scale * self.spread(self.sign, slot, value.ndim))
            if not self.shown[self.plan.at(slot)].all():
                value = value * self.spread(self.shown, slot, value.ndim)
        return value


def find_signs(symmetry: Symmetry, plan: Plan, gauged: Gauged) -> Floats:
    """Choose all signs, class by class in the order of the forward pass; leaves them in `gauged.sign`.

    Returns:
        +1 or -1. Shape (signs,).
    """
    structure = symmetry.structure
    forms = structure.signs.tocsr()
    number = forms.shape[1]
    inside = {int(unit) for cell in structure.dense for unit in cell}
    result = np.ones(number)
    pending = np.ones(number, bool)
    classes = []
    taken = np.zeros(number, bool)
    for units, table in zip(structure.orbits, structure.sign_table, strict=True):
        for column in table.T:
            if int(units[0]) in inside:
                pending[column] = False
                continue
            members = np.unique(column[~taken[column]])
            if len(members):
                taken[members] = True
                classes.append(members)
    classes += [np.array([sign]) for sign in np.flatnonzero(pending & ~taken)]
    by_sign = forms.tocsc()
    by_sign.sort_indices()
    touched = [by_sign.indices[by_sign.indptr[s] : by_sign.indptr[s + 1]] for s in range(number)]
    classes.sort(key=lambda members: int(touched[members[0]][0]))

    def exponents(position: int) -> NDArray[np.int32]:
        own: NDArray[np.int32] = plan.forms.indices[plan.forms.indptr[position] : plan.forms.indptr[position + 1]]
        return own

    def decide(members: Ints, names: Sequence[str]) -> None:
        """Make the largest of the entries positive whose sign depends on one pending sign only."""
        if not names:
            return
        among = np.zeros(number, bool)
        among[members] = True
        unknown = forms @ pending.astype(np.float64)
        largest, votes, cubes, sums, sizes = (np.zeros(number) for _ in range(5))
        rows: list[tuple[Ints, Floats]] = []
        for name in names:
            value = gauged.weight(name)
            for slot in plan.tensors[name]:
                if len(slot.axes) != 1:
                    continue
                at = plan.at(slot)
                single = np.flatnonzero(unknown[at] == 1)
                if not len(single):
                    continue
                block = forms[slot.offset + single]
                hits = block.multiply(pending[None, :]).tocsr()
                hits.eliminate_zeros()
                owner = hits.indices.astype(np.int64)
                known = value
                for other in plan.tensors[name]:
                    if other is not slot:
                        known = known * (gauged.spread(unknown, other, value.ndim) == 0)
                matrix = np.moveaxis(known, slot.axes[0], 0).reshape(slot.size, -1)[single]
                keep = among[owner]
                rows.append((owner[keep], matrix[keep]))
        for owner, matrix in rows:
            np.maximum.at(largest, owner, abs(matrix).max(1, initial=0))
        for owner, matrix in rows:
            tied = abs(matrix) >= largest[owner][:, None] * (1 - _TIE)
            np.add.at(votes, owner, (np.sign(matrix) * tied).sum(1))
            unit = matrix / np.maximum(largest[owner], NOTHING)[:, None]
            np.add.at(cubes, owner, (unit**3).sum(1))
            np.add.at(sums, owner, unit.sum(1))
            np.add.at(sizes, owner, abs(unit).sum(1))
        for score in (
            votes,
            np.where(abs(cubes) > _TIE * sizes, cubes, 0),
            np.where(abs(sums) > _TIE * sizes, sums, 0),
        ):
            settled = members[pending[members] & (score[members] != 0) & (largest[members] > 0)]
            result[settled] = np.sign(score[settled])
            pending[settled] = False
        flips = forms @ (result < 0).astype(np.float64)
        gauged.sign = np.where(np.mod(np.rint(flips), 2) == 1, -1.0, 1.0)

    gains: list[tuple[Ints, str]] = []
    for members in classes:
        positions = [p for p in touched[members[0]] if plan.parameter[p]]
        # A gain is a vector that takes the sign, but not the scale of the weights that take it: gamma of a batch norm.
        for position in positions:
            name = plan.slots[plan.slot_of[position]].tensor
            vector = gauged.tensors[name].numel() == plan.slots[plan.slot_of[position]].size
            if vector and not np.array_equal(exponents(position), exponents(positions[0])):
                gains.append((members, name))
                break
    if gains:
        decide(np.concatenate([members for members, _ in gains]), list(dict.fromkeys(name for _, name in gains)))
    for members in classes:
        if not pending[members].any():
            continue
        # Signs that its gain was waiting for are known by now.
        decide(members, [name for own, name in gains if own is members])
        positions = [p for p in touched[members[0]] if plan.parameter[p]]
        names = list(dict.fromkeys(plan.slots[plan.slot_of[p]].tensor for p in positions))
        prefix = names[0].rpartition(".")[0] if names else ""
        decide(members, [name for name in names if name.rpartition(".")[0] == prefix])
    while pending.any():
        left = np.flatnonzero(pending)
        for sign in left:
            names = [plan.slots[plan.slot_of[p]].tensor for p in touched[sign] if plan.parameter[p]]
            if names and pending[sign]:
                decide(np.array([sign]), list(dict.fromkeys(names)))
        if int(pending.sum()) == len(left):
            break
    return result


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


def _colour(kind: int, number: NDArray[np.int64]) -> Floats:
    """Return reproducible numbers in [0.5, 1.5) for pairs of integers."""
    raw = np.sin(number * 12.9898 + kind * 78.233 + 0.5) * 43758.5453
    result: Floats = 0.5 + (raw - np.floor(raw))
    return result


def find_order(
    symmetry: Symmetry,
    plan: Plan,
    slices: Floats,
    gauged: Gauged,
    last: Sequence[NDArray[np.bool_]],
    notes: list[str],
) -> Ints:
    """Sort units within cells, and blocks, by keys that no other permutation changes.

    Args:
        symmetry: Symmetry of the network.
        plan: The symmetry's.
        slices: Sums of squares at each position, under the scales.
        gauged: The weights under scales and signs.
        last: For each type, which units come after all others.
        notes: What could not be sorted is added.

    Returns:
        The permutation. Shape (units,).
    """
    structure = symmetry.structure
    inside = {int(unit) for cell in structure.dense for unit in cell}
    joint = joint_sums(symmetry, plan, slices)
    ranks = [np.zeros(len(units), np.int64) for units in structure.orbits]
    sortable = [
        index
        for index, units in enumerate(structure.orbits)
        if structure.movable[index] and len(units) > 1 and int(units[0]) not in inside
    ]

    def tied(index: int) -> bool:
        alone = not any(np.isin(structure.orbits[index], blocks).any() for blocks in structure.blocks)
        cells = structure.cells[index] * len(ranks[index]) if alone else 0
        return len(np.unique(ranks[index] + cells)) < len(ranks[index])

    for index in sortable:
        columns, units = structure.columns[index], structure.orbits[index]
        own = slices[columns] * plan.parameter[columns]
        first = plan.first[index]
        ranks[index] = _refine(ranks[index], -last[index].astype(np.float64))
        ranks[index] = _refine(ranks[index], own[:, first].sum(1))
        ranks[index] = _refine(ranks[index], own[:, ~first].sum(1) + joint[units])
        for column in range(columns.shape[1]):
            if not tied(index):
                break
            ranks[index] = _refine(ranks[index], own[:, column])
    left = [index for index in sortable if tied(index)]
    for powers in (3, 1):
        for index in left:
            _by_entries(symmetry, plan, gauged, ranks, index, powers, coloured=False)
    for _ in range(3):
        left = [index for index in left if tied(index)]
        for index in left:
            _by_entries(symmetry, plan, gauged, ranks, index, 1, coloured=True)
    for index in left:
        if tied(index):
            notes.append(f"units of {symmetry.groups[index].name} that no key tells apart keep their order")

    permutation = np.arange(symmetry.units)
    for index in sortable:
        units, cells = structure.orbits[index], structure.cells[index]
        start = np.lexsort((np.arange(len(units)), cells))
        permutation[units[start]] = units[np.lexsort((np.arange(len(units)), ranks[index], cells))]
    rank_of = np.zeros(symmetry.units, np.int64)
    for index, units in enumerate(structure.orbits):
        rank_of[units] = ranks[index]
    for blocks in structure.blocks:
        keys = rank_of[permutation[blocks]]
        order = np.lexsort(keys.T[::-1])
        within = permutation.copy()
        permutation[blocks] = within[blocks[order]]
    return permutation


def _by_entries(
    symmetry: Symmetry, plan: Plan, gauged: Gauged, ranks: list[Ints], index: int, power: int, *, coloured: bool
) -> None:
    """Refine the ranks of one type by sums over the entries of each unit's slices.

    Coloured, an entry's weight in the sum depends on where it stands on the other axes: on the position if its unit is
    fixed, and on the rank of its unit otherwise.
    """
    structure = symmetry.structure
    columns = structure.columns[index]
    colour = np.ones(plan.total)
    if coloured:
        for number, slot in enumerate(plan.slots):
            colour[plan.at(slot)] = _colour(number, np.arange(slot.size))
        for kind in range(len(structure.orbits)):
            if structure.movable[kind]:
                for place, positions in enumerate(structure.columns[kind].T):
                    colour[positions] = _colour(1000 + 37 * kind + place, ranks[kind])
    names = dict.fromkeys(plan.slots[plan.slot_of[p]].tensor for p in columns[0])
    for name in names:
        value = gauged.weight(name) ** power
        for slot in gauged.slots[name]:
            mine = [c for c in range(columns.shape[1]) if plan.slots[plan.slot_of[columns[0, c]]] is slot]
            if not mine:
                continue
            weight = value
            for other in gauged.slots[name]:
                if other is not slot and len(other.axes) == 1:
                    weight = weight * gauged.spread(colour, other, value.ndim)
            sums = np.moveaxis(weight, slot.axes[0], 0).reshape(slot.size, -1)
            total, size = sums.sum(1), abs(sums).sum(1)
            for column in mine:
                at = columns[:, column] - slot.offset
                ranks[index] = _refine(ranks[index], total[at], size[at])
