"""Assignments of the units of one network to those of another: slices, gain tables and signs.

Parameters are cut into slices along the axes that an axis group indexes. The gains are inner products of one network's
slices with the other's; there is one table of gains for each set of signs that acts on the slices.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy  # its parts are imported on first use
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, odd_entries, together
from lightning_sym.symmetry.elements import AxisGroup
from lightning_sym.symmetry.group.element import Part
from lightning_sym.symmetry.group.factor import Factor, Factors
from lightning_sym.symmetry.solving.structure import Slot, Structure

# Columns of a group's sign table (one generator per unit and column) that act on some slices.
Pattern: TypeAlias = tuple[int, ...]

# Sign generators that act on a common position are tried in all combinations, up to this number.
_MOST_JOINT_SIGNS = 3


@dataclass(frozen=True)
class Slices:
    """The axes and positions of a group's units in one parameter; positions None means all positions."""

    tensor: str
    axes: tuple[int, ...]
    positions: Tensor | None

    def of(self, tensor: Tensor, size: int) -> Tensor:
        """Return one row per unit, with all its entries. Shape (size, entries per unit)."""
        moved = together(tensor, self.axes) if tensor.ndim else tensor[None]
        if self.positions is not None:
            moved = moved.index_select(0, self.positions.to(tensor.device))
        return moved.reshape(size, -1)


def stacked(slices: Sequence[Slices], tensors: Mapping[str, Tensor], size: int) -> Tensor:
    """Concatenate each unit's slices of all tensors to one row. Shape (size, entries per unit)."""
    parts = [part.of(tensors[part.tensor], size) for part in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True)
class Joint:
    """Slices of a grouped convolution's weight along its second axis: rows, columns, and the units there."""

    tensor: str
    rows: Ints
    columns: Ints
    members: Ints
    pattern: Pattern

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slices, with columns in the order of the members. Shape (columns, rows * kernel)."""
        rows, columns = (torch.from_numpy(index).to(tensor.device) for index in (self.rows, self.columns))
        chosen = tensor[rows[:, None], columns]
        return chosen.transpose(0, 1).reshape(len(self.members), -1)


@dataclass(frozen=True)
class MatchingGroup:
    """The data of an axis group that matching needs.

    Attributes:
        index: Its index among the symmetry's groups.
        units: Indices of the units, ascending.
        cells: The units' places in the group, for each cell.
        movable: Whether units are permuted within their cells.
        mixers: Factors that act on the units by matrices, except late ones.
        assigned: Whether units are assigned one by one; False where a mixer also permutes them.
        signs: The sign table. Shape (units, signs of a unit).
        free: Columns of that table with generators that act on one unit only.
        shared: Columns of that table with generators that act on one whole cell only.
        slices: Slices of the units, by the free and shared signs that act there.
        joints: The same for columns of grouped convolutions.
        tensors: The parameters that the units index.
        quadratic: Whether the units index two axes of one parameter.
    """

    index: int
    units: Ints
    cells: tuple[Ints, ...]
    movable: bool
    mixers: tuple[Factor[Any], ...]
    assigned: bool
    signs: Ints
    free: tuple[int, ...]
    shared: tuple[int, ...]
    slices: dict[Pattern, tuple[Slices, ...]]
    joints: tuple[Joint, ...]
    tensors: frozenset[str]
    quadratic: bool

    @property
    def alone(self) -> bool:
        """Whether units are assigned and no factor mixes them."""
        return not self.mixers


class _Places:
    """The units and sign generators at each position of all slots."""

    def __init__(self, structure: Structure) -> None:
        self.flips = odd_entries(structure.signs)
        self.by_generator = self.flips.tocsc()
        self.joint_slots = [slot for slot in structure.slots if len(slot.axes) == 2 and not slot.of_stack]
        self.offset = {(slot.tensor, slot.axes): slot.offset for slot in structure.slots}
        self.unit_at = np.concatenate([np.zeros(0, np.int64), *(slot.unit.ravel() for slot in structure.slots)])
        self.type_of_unit = structure.orbit_of
        # The first and the last unit that each generator acts on.
        entries = self.flips.tocoo()
        self.first = np.full(self.flips.shape[1], structure.units)
        self.last = np.full(self.flips.shape[1], -1)
        np.minimum.at(self.first, entries.col, self.unit_at[entries.row])
        np.maximum.at(self.last, entries.col, self.unit_at[entries.row])
        # A depthwise weight has two labels on its rows: the label of the second axis contributes its signs.
        self.second_label: dict[int, int] = {}
        for slot in self.joint_slots:
            if slot.shape[1] == 1:
                rows = self.offset[slot.tensor, (0,)]
                self.second_label.update({rows + r: slot.offset + r for r in range(slot.shape[0])})

    def own(self, generators: Ints, units: Ints) -> bool:
        """Return whether each generator acts on its unit alone."""
        return bool(np.all(self.first[generators] == units) and np.all(self.last[generators] == units))

    def of_cell(self, generators: Ints, units: Ints) -> bool:
        """Return whether all units of a cell share one generator, which acts on them only."""
        if np.any(generators != generators[0]):
            return False
        lo, hi = self.by_generator.indptr[generators[0] : generators[0] + 2]
        return bool(np.isin(self.unit_at[self.by_generator.indices[lo:hi]], units).all())

    def pattern(self, position: int, generators: Ints, columns: tuple[int, ...]) -> Pattern:
        """Return the columns with generators that act on a position, given its unit's generators (one per column)."""
        acting: set[int] = set()
        for place in (position, self.second_label.get(position, -1)):
            if place >= 0:
                acting ^= set(self.flips.indices[self.flips.indptr[place] : self.flips.indptr[place + 1]].tolist())
        return tuple(k for k in columns if int(generators[k]) in acting)


def matched_groups(
    factors: Factors, groups: Iterable[AxisGroup], shapes: Mapping[str, Sequence[int]]
) -> list[MatchingGroup]:
    """Collect the matching data of each axis group, in order.

    Args:
        factors: The factors of the symmetry group.
        groups: The axis groups.
        shapes: The shapes of all parameters, by name.
    """
    places = _Places(factors.structure)
    return [_matched_group(factors, places, index, group, shapes) for index, group in enumerate(groups)]


def _matched_group(
    factors: Factors, places: _Places, index: int, group: AxisGroup, shapes: Mapping[str, Sequence[int]]
) -> MatchingGroup:
    units, table = factors.structure.orbits[index], factors.structure.sign_table[index]
    mixers = tuple(factor for factor in factors if factor.mixes(index) and not factor.late)
    assigned = not any(factor.permutes for factor in mixers)
    numbers = group.cells.numpy()
    cells = tuple(np.flatnonzero(numbers == cell) for cell in np.unique(numbers))
    columns = range(table.shape[1])
    free = tuple(k for k in columns if places.own(table[:, k], units))
    shared = tuple(
        k for k in columns if k not in free and all(places.of_cell(table[cell, k], units[cell]) for cell in cells)
    )
    known = free + shared if assigned else ()
    axes_of: dict[str, set[int]] = {}
    slices: dict[Pattern, list[Slices]] = {}
    for occurrence in group.occurrences:
        if occurrence.tensor not in factors.parameters:
            continue
        axes_of.setdefault(occurrence.tensor, set()).update(occurrence.axes)
        start = places.offset.get((occurrence.tensor, occurrence.axes))
        by_pattern: dict[Pattern, list[int]] = {}
        for column, position in enumerate(occurrence.positions[0].tolist()):
            pattern = () if start is None else places.pattern(start + position, table[0], known)
            by_pattern.setdefault(pattern, []).append(column)
        # A parameter without axes (that of PReLU) has one position.
        shape = shapes[occurrence.tensor]
        length = 1 if start is None else math.prod(shape[axis] for axis in occurrence.axes)
        for pattern, chosen in by_pattern.items():
            flat = occurrence.positions[:, chosen].reshape(-1)
            whole = flat.numel() == length and torch.equal(flat, torch.arange(length))
            slices.setdefault(pattern, []).append(Slices(occurrence.tensor, occurrence.axes, None if whole else flat))
    joints: list[Joint] = []
    for slot in places.joint_slots:
        held = slot.unit[slot.unit >= 0]
        if slot.shape[1] > 1 and np.any(places.type_of_unit[held] == index):
            axes_of.setdefault(slot.tensor, set()).add(1)
            joints += _joints(places, slot, index, units, table, known)
    return MatchingGroup(
        index=index,
        units=units,
        cells=cells,
        movable=group.movable,
        mixers=mixers,
        assigned=assigned,
        signs=table,
        free=free,
        shared=shared,
        slices={pattern: tuple(parts) for pattern, parts in slices.items()},
        joints=tuple(joints),
        tensors=frozenset(axes_of),
        quadratic=any(len(axes) > 1 for axes in axes_of.values()),
    )


def _joints(places: _Places, slot: Slot, index: int, units: Ints, table: Ints, columns: tuple[int, ...]) -> list[Joint]:
    """Return the slices of one group's units along the second axis of a grouped convolution's weight."""
    result = []
    order = np.argsort(slot.unit, axis=1, kind="stable")
    held = np.take_along_axis(slot.unit, order, axis=1)
    for members in np.unique(held, axis=0):
        if np.any(members < 0) or not np.all(places.type_of_unit[members] == index):
            continue
        reading = np.flatnonzero((held == members).all(1))
        local = np.searchsorted(units, members)
        corner = slot.offset + int(reading[0]) * slot.shape[1] + int(order[reading[0], 0])
        pattern = places.pattern(corner, table[local[0]], columns)
        result.append(Joint(slot.tensor, reading, order[reading], local, pattern))
    return result


class Gain:
    r"""Gains of assigning units of B to units of A, with optimal signs.

    Let :math:`M_p` be the gains over positions where exactly the generators p act. Signs s gain
    :math:`\sum_p (\prod_{k \in p} s_k) M_p`. A generator that shares no position with another adds :math:`|M_k|`.
    Those that share positions are tried in all combinations. The same holds for generators that act on a whole cell:
    each of the `cases` fixes their signs and holds the gain given these.

    Args:
        parts: M_p by p. Each of shape (size of A's group, size of B's), of one dtype and device.
        signs: Whether signs are free; otherwise the parts are added up.
        shared: Columns of signs that a whole cell shares.

    Attributes:
        parts: As above, with signs that count as 1 summed out.
        shared: The shared columns that occur in the parts; empty if there are too many, which then all count as 1.
        met: Columns that share positions with others; empty if there are too many.
        exact: Whether these are few enough; otherwise signs count as 1 on shared positions.
        signed: Whether any sign is free.
    """

    def __init__(self, parts: Mapping[Pattern, Tensor], signs: bool, shared: tuple[int, ...] = ()) -> None:
        if not signs:
            parts = _folded(parts, dict.fromkeys({k for pattern in parts for k in pattern}, 1.0))
        self.shared = tuple(k for k in shared if any(k in pattern for pattern in parts))
        if len(self.shared) > _MOST_JOINT_SIGNS:
            parts = _folded(parts, dict.fromkeys(self.shared, 1.0))
            self.shared = ()
        self.met = sorted({k for pattern in parts if len(pattern) > 1 for k in pattern})
        self.exact = len(self.met) <= _MOST_JOINT_SIGNS
        if not self.exact:
            self.met = []
            if not self.shared:
                alone = {pattern: part for pattern, part in parts.items() if len(pattern) == 1}
                rest = {pattern: part for pattern, part in parts.items() if len(pattern) != 1}
                parts = alone | _folded(rest, dict.fromkeys({k for pattern in rest for k in pattern}, 1.0))
        self.parts = parts
        self.signed = signs and any(parts)  # any pattern that is not empty

    def cases(self) -> list[tuple[dict[int, float], "Gain"]]:
        """Return all choices of the shared signs, each with the gain given these."""
        # Not an attribute: the gain itself is one of the cases, and a cycle would hold its memory.
        if not self.shared:
            return [({}, self)]
        choices = itertools.product((1.0, -1.0), repeat=len(self.shared))
        given = [dict(zip(self.shared, values, strict=True)) for values in choices]
        return [(signs, Gain(_folded(self.parts, signs), True)) for signs in given]

    def plain(self) -> Tensor:
        """Return the gain of each pair with all signs 1. Shape (size, size)."""
        return functools.reduce(torch.add, self.parts.values())

    def _split(self, parts: Mapping[Pattern, Tensor]) -> tuple[dict[Pattern, Tensor], dict[int, Tensor]]:
        """Split the parts into those with several signs that interact (or none), and the part of each other sign."""
        alone = [pattern for pattern in parts if len(pattern) == 1 and pattern[0] not in self.met]
        joint = {pattern: part for pattern, part in parts.items() if pattern not in alone}
        return joint, {pattern[0]: parts[pattern] for pattern in alone}

    def total(self) -> Tensor:
        """Return the gain of each pair. Shape (size, size), dtype and device of the parts."""
        joint, single = self._split(self.parts)
        best = [functools.reduce(torch.maximum, (_folded(joint, own)[()] for own in self._options()))] if joint else []
        terms = [*best, *(part.abs() for part in single.values())]
        return terms[0] if len(terms) == 1 else functools.reduce(torch.add, terms)

    def _options(self) -> list[dict[int, float]]:
        """Return all choices of the signs that share positions with others."""
        choices = itertools.product((1.0, -1.0), repeat=len(self.met))
        return [dict(zip(self.met, signs, strict=True)) for signs in choices]

    def signs_at(self, rows: Ints, columns: Ints) -> dict[int, Floats]:
        """Return the optimal signs of pairs, by generator. Each of shape (pairs,)."""
        at = torch.from_numpy(rows), torch.from_numpy(columns)
        joint, single = self._split({pattern: part.cpu()[at].double() for pattern, part in self.parts.items()})
        result = {k: np.where(part.numpy() < 0, -1.0, 1.0) for k, part in single.items()}
        if self.met:
            options = self._options()
            best = torch.stack([_folded(joint, option)[()] for option in options]).numpy().argmax(0)
            result |= {k: np.array([option[k] for option in options])[best] for k in self.met}
        return result

    def of(self, chosen: "Chosen") -> float:
        """Return the gain of an assignment."""
        rows, columns = torch.arange(len(chosen.source)), torch.from_numpy(chosen.source)
        return sum(
            float(chosen.sign(pattern) @ part.cpu()[rows, columns].double().numpy())
            for pattern, part in self.parts.items()
        )


def _folded(parts: Mapping[Pattern, Tensor], given: Mapping[int, float]) -> dict[Pattern, Tensor]:
    """Substitute the given signs into gains."""
    result: dict[Pattern, Tensor] = {}
    for pattern, part in parts.items():
        left = tuple(k for k in pattern if k not in given)
        value = -part if math.prod(given[k] for k in pattern if k in given) < 0 else part
        result[left] = result[left] + value if left in result else value
    return result


@dataclass
class Chosen:
    """An assignment within one group, with signs.

    Attributes:
        source: The unit assigned to each place, by its place in the group. Shape (size,).
        signs: +1 or -1 at each place, by the column of the sign table; a missing column means +1. Each of shape
            (size,).
    """

    source: Ints
    signs: dict[int, Floats]

    def sign(self, pattern: Pattern) -> Floats:
        """Return the product of the signs of some columns. Shape (size,)."""
        own = (self.signs[k] for k in pattern if k in self.signs)
        return math.prod(own, start=np.ones(len(self.source)))

    @property
    def moves(self) -> bool:
        """Whether any unit moves or changes sign."""
        return not np.array_equal(self.source, np.arange(len(self.source))) or any(
            bool((sign < 0).any()) for sign in self.signs.values()
        )


class Tables:
    """Gain tables of a group, one for each case of shared signs, on the CPU."""

    def __init__(self, gain: Gain) -> None:
        self.signed = gain.signed
        self.cases = gain.cases()
        self.totals = [case.total().cpu() for _, case in self.cases]

    @functools.cached_property
    def tables(self) -> list[Floats]:
        """The tables as float64 arrays."""
        return [total.double().numpy() for total in self.totals]

    def best(self, rows: Ints, columns: Ints) -> tuple[float, int, Ints]:
        """Return the optimal gain, its case of shared signs, and the column position assigned to each row."""
        best = (-math.inf, 0, np.arange(len(rows)))
        for number, total in enumerate(self.totals):
            whole = len(rows) == len(columns) == len(total) and bool((rows[1:] > rows[:-1]).all())
            if whole and np.array_equal(rows, columns):
                chosen = _clear_assignment(total)
                chosen = best_assignment(self.tables[number]) if chosen is None else chosen
                value = float(total[torch.arange(len(rows)), torch.from_numpy(chosen)].double().sum())
            else:
                part = self.tables[number][np.ix_(rows, columns)]
                chosen = best_assignment(part)
                value = float(part[np.arange(len(rows)), chosen].sum())
            if value > best[0]:
                best = value, number, chosen
        return best

    def put(self, chosen: Chosen, rows: Ints, columns: Ints) -> None:
        """Assign columns to rows optimally."""
        _, number, own = self.best(rows, columns)
        chosen.source[rows] = columns[own]
        self.set_signs(chosen, rows, number)

    def set_signs(self, chosen: Chosen, rows: Ints, number: int) -> None:
        """Choose the optimal signs for assigned rows, given a case of shared signs."""
        if not self.signed:
            return
        given, case = self.cases[number]
        signs = {k: np.full(len(rows), sign) for k, sign in given.items()}
        signs |= case.signs_at(rows, chosen.source[rows])
        for k, sign in signs.items():
            chosen.signs.setdefault(k, np.ones(len(chosen.source)))[rows] = sign


def best_assignment(gain: Floats) -> Ints:
    """Return the column assigned to each row; the identity is preferred among optima. Negates the gain temporarily."""
    own = np.arange(len(gain))
    np.negative(gain, out=gain)  # the solver would copy it to maximise it
    rows, columns = scipy.optimize.linear_sum_assignment(gain)
    np.negative(gain, out=gain)
    if gain[rows, columns].sum() <= gain[own, own].sum():
        return own
    return np.asarray(columns, dtype=np.int64)


def _clear_assignment(gain: Tensor) -> Ints | None:
    """Return the column of the largest gain in each row if all are different: no assignment gains more, then."""
    if not len(gain):
        return None
    largest, columns = gain.max(1)
    own: Tensor = torch.arange(len(gain))
    if int(columns.bincount().max()) > 1:
        return None
    return (own if torch.equal(gain.diagonal(), largest) else columns).numpy()


def within_cells(group: MatchingGroup, tables: Tables) -> Chosen:
    """Return the optimal assignment within cells, with signs; units that cannot be permuted only get signs."""
    chosen = Chosen(np.arange(len(group.units)), {})
    for cell in group.cells:
        if group.movable:
            tables.put(chosen, cell, cell)
        else:
            diagonal = [float(table[cell, cell].sum()) for table in tables.tables]
            tables.set_signs(chosen, cell, int(np.argmax(diagonal)))
    return chosen


_NONE = np.zeros(0, np.int64)


def parts_of(
    factors: Factors,
    groups: Sequence[MatchingGroup],
    chosen: Mapping[int, Chosen],
    places: Ints = _NONE,
    slots: Ints = _NONE,
) -> dict[str, Part]:
    """Return the parts that apply the chosen assignments, by group index, and the permutation of slots."""
    same = factors.identity("")
    permutation, signs = same.permutation, same.sign
    permutation[torch.from_numpy(places)] = torch.from_numpy(slots)
    for index, own in chosen.items():
        units, table = groups[index].units, groups[index].signs
        permutation[torch.from_numpy(units)] = torch.from_numpy(units[own.source])
        for k, sign in own.signs.items():
            signs[torch.from_numpy(table[own.source, k])] = torch.from_numpy(sign)
    return {"permutation": permutation, "sign": signs}


@dataclass
class Blocks:
    """Blocks of units that are permuted.

    Attributes:
        kinds: For each kind of member (the units of one cell of a group, in each block): the group, and the members'
            places in it. Each of shape (blocks, members).
        count: The number of blocks.
        slots: Members that represent copies of units. Shape (blocks, slots).
    """

    kinds: list[tuple[MatchingGroup, Ints]]
    count: int
    slots: Ints

    @property
    def groups(self) -> dict[int, MatchingGroup]:
        """The groups, by index."""
        return {group.index: group for group, _ in self.kinds}


def block_systems(structure: Structure, groups: list[MatchingGroup]) -> list[Blocks]:
    """Return the block systems of a group."""
    orbit_and_cell = np.full((structure.units, 2), -1)
    for group in groups:
        orbit_and_cell[group.units, 0] = group.index
        orbit_and_cell[group.units, 1] = structure.cells[group.index]
    systems = []
    for table in structure.blocks:
        slots = table[:, orbit_and_cell[table[0], 0] < 0]
        if slots.shape == table.shape:  # blocks of copies inside blocks
            continue
        keys = [tuple(pair) for pair in orbit_and_cell[table[0]].tolist()]
        kinds = []
        for key in dict.fromkeys(key for key in keys if key[0] >= 0):
            group = groups[key[0]]
            members = table[:, [other == key for other in keys]]
            kinds.append((group, np.searchsorted(group.units, members)))
        systems.append(Blocks(kinds, len(table), slots))
    return systems


@dataclass(frozen=True)
class CopiedBlocks:
    """Blocks of copies that are permuted inside a block, such as the query heads of a group.

    Attributes:
        table: The slots of each block. Shape (blocks, slots).
        orbits: Indices of the orbits with these copies.
        pairs: Pairs of positions with one role: blocks at the first and at the second one, and the positions. Each of
            shape (pairs,).
        alone: Whether the units themselves stay where copies are permuted.
    """

    table: Ints
    orbits: frozenset[int]
    pairs: tuple[Ints, Ints, Ints, Ints]
    alone: bool

    def gains(
        self, structure: Structure, target: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Floats, frozenset[str]]:
        """Return the gain of each block at each place, shape (blocks, blocks), and the tensors that hold copies.

        Args:
            structure: The structure of the group.
            target: Tensors to move to, by name.
            current: Tensors to move, by name.
        """
        gains = np.zeros((len(self.table), len(self.table)))
        names: set[str] = set()
        first, second, ours, theirs = self.pairs
        where = structure.slots_at(ours)
        for index in np.unique(where):
            slot, held = structure.slots[index], where == index
            if slot.tensor not in current or len(slot.axes) > 1:
                continue
            names.add(slot.tensor)
            one, two = (own[slot.tensor].detach().movedim(slot.axes[0], 0) for own in (target, current))
            at, of = (torch.from_numpy(own[held] - slot.offset).to(one.device) for own in (ours, theirs))
            products = (one[at] * two[of]).reshape(len(at), -1).sum(1).double().cpu().numpy()
            np.add.at(gains, (first[held], second[held]), products)
        return gains, frozenset(names)


def copied_blocks(structure: Structure) -> list[CopiedBlocks]:
    """Return the blocks of copies inside blocks."""
    found = []
    of_orbits = np.concatenate([np.zeros(0, np.int64), *structure.orbits])
    for table in structure.blocks:
        row_of = {int(slot): row for row, slots in enumerate(table) for slot in slots}
        orbits: set[int] = set()
        rows: list[Ints] = []
        for index in range(len(structure.orbits)):
            copies = structure.copies_of(index)
            if copies is None:
                continue
            units = np.flatnonzero(np.isin(copies.slots, list(row_of)).all(1))
            for column in np.flatnonzero(copies.columns.copy >= 0) if len(units) else ():
                orbits.add(index)
                at = structure.columns[index][units, column]
                mine = [row_of[int(slot)] for slot in copies.slots[units, copies.columns.copy[column]]]
                for copy in range(copies.count):
                    partner = copies.columns.partner[column, copy]
                    if partner >= 0:
                        theirs = [row_of[int(slot)] for slot in copies.slots[units, copy]]
                        rows.append(np.stack([mine, theirs, at, structure.columns[index][units, partner]]))
        if rows:
            first, second, ours, theirs = np.concatenate(rows, 1)
            alone = not np.isin(table, of_orbits).any()
            found.append(CopiedBlocks(table, frozenset(orbits), (first, second, ours, theirs), alone))
    return found


def best_blocks(
    system: Blocks, tables: Mapping[int, Tables], raw: Mapping[tuple[int, str], Tensor], *, mixing: bool = True
) -> tuple[Ints, dict[int, Chosen]]:
    """Assign blocks to places, and the units of each group within them.

    A block's gain at a place is that of the optimal assignment of its members. Members that are mixed count with the
    gain of the optimal mixing, or unmixed without `mixing`. Groups without gains are moved along.

    Args:
        system: The blocks.
        tables: Gains of assigned units, by group index.
        raw: Pair gains of mixed units, by group index and mixer name; see :meth:`Factor.pair_gains`.
        mixing: Whether members may be mixed.

    Returns:
        The block assigned to each place, shape (blocks,); and the assignments within groups, by group index.
    """
    count = system.count
    total = np.zeros((count, count))
    for group, places in system.kinds:
        for mixer in group.mixers:
            if (group.index, mixer.name) in raw:
                total += mixer.gains_of_blocks(raw[group.index, mixer.name], places, mixing)
        for new, old in itertools.product(range(count), repeat=2) if group.index in tables else ():
            total[new, old] += tables[group.index].best(places[new], places[old])[0]
    order = best_assignment(total)
    chosen: dict[int, Chosen] = {}
    for group, places in system.kinds:
        own = chosen.setdefault(group.index, Chosen(np.arange(len(group.units)), {}))
        for new, old in enumerate(order):
            if group.index in tables:
                tables[group.index].put(own, places[new], places[old])
            else:
                own.source[places[new]] = places[old]
    return order, chosen
