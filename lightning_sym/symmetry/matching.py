"""From one network to the member of its orbit that is nearest to another network; means of networks that are alike.

Everything here is generic over :class:`lightning_sym.symmetry.Symmetry`: which units may change places, and which
parameters move with them, was found by tracing.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lightning_sym.networks.batch_norm import Batches, device_of, ranks, summed, together, wide
from lightning_sym.symmetry._capture import evaluating, state_tensors
from lightning_sym.symmetry.base import Element, Symmetry
from lightning_sym.symmetry.interpolation import average

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Pattern: TypeAlias = tuple[int, ...]

# Relative to |A| |B|: what is smaller is rounding of inner products, and no improvement.
_NEGLIGIBLE = {torch.float64: 1e-12, torch.float32: 1e-7}
# Sign generators that meet on one position are tried in all combinations up to this number.
_MOST_JOINT_SIGNS = 3


@dataclass(frozen=True, eq=False)
class Match:
    """An element that brings one network near to another.

    Attributes:
        element: Maps ``b`` to ``network``.
        network: ``act(element, b)``: the function of ``b``, in the order, with the signs and in the scales of ``a``.
        objective: Inner product of the parameters of both networks (in the balanced gauge, if they were balanced)
            before the first sweep and after every sweep of the best restart. Non-decreasing. For activation matching
            the sum of the matched correlations (or products) at the identity and at the end.
        distance_before: Euclidean distance of the parameters of ``a`` and ``b``, buffers left out.
        distance_after: The same of ``a`` and ``network``.
        sweeps: Number of sweeps of the best restart, the last without an improvement included.
        restarts: The final objective of every restart.
        method: "weights" or "activations".
    """

    element: Element
    network: nn.Module
    objective: tuple[float, ...]
    distance_before: float
    distance_after: float
    sweeps: int
    restarts: tuple[float, ...]
    method: str


@dataclass(frozen=True, eq=False)
class OrbitDistance:
    """Bounds for the distance of two networks up to symmetry, both in the balanced gauge.

    Attributes:
        upper: Distance to a member of the orbit that was found.
        lower: No member of the orbit is nearer than this, up to rounding. 0 where no bound is known.
    """

    upper: float
    lower: float

    @property
    def exact(self) -> bool:
        """Whether both bounds agree to a relative 1e-6."""
        return self.upper - self.lower <= 1e-6 * max(self.upper, 1e-300)


@dataclass(frozen=True, eq=False)
class Merged:
    """The mean of aligned networks.

    Attributes:
        network: The mean. Statistics of its batch norms are means, too, and belong to no network: measure them anew
            by :func:`lightning_sym.networks.recalibrate_batch_norm`.
        elements: One for each network: brings it to where it was averaged.
        rounds: How many rounds were made, the last without a change included.
        distances: Root of the mean squared distance to the mean (parameters only), in the gauge of the alignment,
            before the first round and after every round. Non-increasing.
    """

    network: nn.Module
    elements: tuple[Element, ...]
    rounds: int
    distances: tuple[float, ...]


# ---- gains and assignments


@dataclass(frozen=True)
class _Slices:
    """Where the units of a group stand in one parameter: on an axis, at these positions (None: at all, in order)."""

    tensor: str
    axis: int
    positions: Tensor | None

    def of(self, tensor: Tensor, size: int) -> Tensor:
        """Return one row per unit: everything that stands at its positions."""
        moved = tensor.movedim(self.axis, 0)
        if self.positions is not None:
            moved = moved.index_select(0, self.positions.to(tensor.device))
        return moved.reshape(size, -1)


@dataclass(frozen=True)
class _Joint:
    """Where the units of a group stand in a grouped convolution's weight: rows, their columns, and the units there."""

    tensor: str
    rows: Ints
    columns: Ints
    members: Ints
    pattern: Pattern

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slices, columns in the order of the members. Shape (columns, rows * kernel)."""
        rows, columns = (torch.from_numpy(index).to(tensor.device) for index in (self.rows, self.columns))
        chosen = tensor[rows[:, None], columns]
        return chosen.transpose(0, 1).reshape(len(self.members), -1)


@dataclass(frozen=True)
class _Group:
    """What the descent needs to know about an axis group.

    `free` are the columns of the sign table whose generators belong to one unit alone, `shared` those whose generators
    belong to a whole cell; `slices` and `joints` are sorted by the pattern of those generators that act on them.
    """

    index: int
    units: Ints
    cells: tuple[Ints, ...]
    movable: bool
    dense: bool
    free: tuple[int, ...]
    shared: tuple[int, ...]
    slices: dict[Pattern, tuple[_Slices, ...]]
    joints: tuple[_Joint, ...]
    tensors: frozenset[str]
    quadratic: bool


def _groups(symmetry: Symmetry) -> list[_Group]:
    structure = symmetry.structure
    matrix = structure.signs.tocsr()
    generators = matrix.shape[1]
    unit_at = np.full(matrix.shape[0], -1)
    joint_sites = [site for site in structure.sites if len(site.axes) == 2]
    for site in structure.sites:
        unit_at[site.offset : site.offset + site.size] = site.unit.ravel()
    type_of_unit = np.full(structure.units, -1)
    for index, units in enumerate(structure.types):
        type_of_unit[units] = index
    type_at = np.where(unit_at >= 0, type_of_unit[np.maximum(unit_at, 0)] if structure.units else -1, -1)
    # A generator is a unit's own if no unit but that one stands where it acts.
    entries = matrix.tocoo()
    odd = np.mod(np.rint(entries.data), 2) == 1
    first = np.full(generators, structure.units)
    last = np.full(generators, -1)
    np.minimum.at(first, entries.col[odd], unit_at[entries.row[odd]])
    np.maximum.at(last, entries.col[odd], unit_at[entries.row[odd]])
    # A depthwise weight has two labels on its rows: the one of the second axis adds its signs.
    extra: dict[int, int] = {}
    for site in joint_sites:
        if site.shape[1] == 1:
            rows = next(s for s in structure.sites if s.tensor == site.tensor and s.axes == (0,))
            extra.update({rows.offset + r: site.offset + r for r in range(site.shape[0])})

    acting_at = matrix.tocsc()

    def belongs(generators: Ints, units: Ints) -> bool:
        """Whether all units of a cell have one generator, which acts on nothing else."""
        if np.any(generators != generators[0]):
            return False
        lo, hi = acting_at.indptr[generators[0] : generators[0] + 2]
        return bool(np.isin(unit_at[acting_at.indices[lo:hi]], units).all())

    def own_pattern(position: int, table: Ints, local: int, columns: tuple[int, ...]) -> Pattern:
        acting: dict[int, int] = {}
        for place in (position, extra.get(position, -1)):
            if place >= 0:
                for j in range(matrix.indptr[place], matrix.indptr[place + 1]):
                    if round(float(matrix.data[j])) % 2:
                        acting[int(matrix.indices[j])] = acting.get(int(matrix.indices[j]), 0) ^ 1
        return tuple(k for k in columns if acting.get(int(table[local, k]), 0))

    result = []
    for index, group in enumerate(symmetry.groups):
        units = structure.types[index]
        table = structure.sign_table[index]
        free = tuple(
            k
            for k in range(table.shape[1])
            if np.all(first[table[:, k]] == units) and np.all(last[table[:, k]] == units)
        )
        numbers = group.cells.numpy()
        cells = tuple(np.flatnonzero(numbers == cell) for cell in np.unique(numbers))
        shared = tuple(
            k
            for k in range(table.shape[1])
            if k not in free and all(belongs(table[cell, k], units[cell]) for cell in cells)
        )
        known = free + shared
        slices: dict[Pattern, list[_Slices]] = {}
        axes_of: dict[str, set[int]] = {}
        offset = {(site.tensor, site.axes): site.offset for site in structure.sites}
        for occurrence in group.occurrences:
            if not occurrence.is_parameter:
                continue
            axes_of.setdefault(occurrence.tensor, set()).add(occurrence.axis)
            start = offset.get((occurrence.tensor, (occurrence.axis,)))
            positions = occurrence.positions
            by_pattern: dict[Pattern, list[int]] = {}
            for column in range(positions.shape[1]):
                place = -1 if start is None else start + int(positions[0, column])
                pattern = () if place < 0 or group.dense else own_pattern(place, table, 0, known)
                by_pattern.setdefault(pattern, []).append(column)
            length = symmetry.layout[occurrence.tensor][0][occurrence.axis] if start is not None else 1
            for pattern, columns in by_pattern.items():
                flat = positions[:, columns].reshape(-1)
                whole = flat.numel() == length and torch.equal(flat, torch.arange(length))
                slices.setdefault(pattern, []).append(
                    _Slices(occurrence.tensor, occurrence.axis, None if whole else flat)
                )
        joints = []
        for site in joint_sites:
            axes = axes_of.setdefault(site.tensor, set())
            if site.shape[1] == 1 or not np.any(type_at[site.offset : site.offset + site.size] == index):
                if not axes:
                    del axes_of[site.tensor]
                continue
            axes.add(1)
            order = np.argsort(site.unit, axis=1, kind="stable")
            held = np.take_along_axis(site.unit, order, axis=1)
            for members in np.unique(held, axis=0):
                if not np.all(type_of_unit[members] == index):
                    continue
                reading = np.flatnonzero((held == members).all(1))
                local = np.searchsorted(units, members)
                corner = site.offset + int(reading[0]) * site.shape[1] + int(order[reading[0], 0])
                acting = () if group.dense else own_pattern(corner, table, int(local[0]), known)
                joints.append(_Joint(site.tensor, reading, order[reading], local, acting))
        result.append(
            _Group(
                index=index,
                units=units,
                cells=cells,
                movable=group.movable,
                dense=group.dense,
                free=free,
                shared=shared,
                slices={pattern: tuple(parts) for pattern, parts in slices.items()},
                joints=tuple(joints),
                tensors=frozenset(axes_of),
                quadratic=any(len(axes) > 1 for axes in axes_of.values()),
            )
        )
    return result


class _Gain:
    """How much is won where a unit of B takes the place of a unit of A; the best signs are taken.

    With the gains M_p over the positions on which the generators p act, the signs s win
    sum_p (prod_{k in p} s_k) M_p. A generator that never meets another adds |M_k|; those that meet are tried in all
    combinations, the others given them. Generators that a whole cell shares are tried in all combinations, too: each of
    the `cases` holds signs of these, and the gain given them.
    """

    def __init__(self, parts: dict[Pattern, Tensor], signs: bool, shared: tuple[int, ...] = ()) -> None:
        if not signs:
            parts = _folded(parts, dict.fromkeys({k for pattern in parts for k in pattern}, 1.0))
        self.shared = tuple(k for k in shared if any(k in pattern for pattern in parts))
        if len(self.shared) > _MOST_JOINT_SIGNS:
            parts = _folded(parts, dict.fromkeys(self.shared, 1.0))
            self.shared = ()
        self.cases: list[tuple[dict[int, float], _Gain]] = []
        if self.shared:
            for values in itertools.product((1.0, -1.0), repeat=len(self.shared)):
                given = dict(zip(self.shared, values, strict=True))
                self.cases.append((given, _Gain(_folded(parts, given), signs)))
        else:
            self.cases.append(({}, self))
        met = sorted({k for pattern in parts if len(pattern) > 1 for k in pattern})
        self.exact = len(met) <= _MOST_JOINT_SIGNS
        if not self.exact:
            met = []
        self.parts = parts
        self.met = met
        self.signed = signs and any(parts)  # any pattern that is not empty

    def _split(self) -> tuple[list[tuple[Pattern, Tensor]], dict[int, Tensor]]:
        joint, single = [], {}
        for pattern, part in self.parts.items():
            if len(pattern) == 1 and pattern[0] not in self.met:
                single[pattern[0]] = part
            else:
                joint.append((pattern if self.exact else (), part))
        return joint, single

    def total(self) -> Tensor:
        """Return the gain of each pair. Shape (size, size)."""
        joint, single = self._split()
        best: Tensor | None = None
        value: Tensor | None
        for signs in itertools.product((1.0, -1.0), repeat=len(self.met)) if joint else ():
            of = dict(zip(self.met, signs, strict=True))
            value = None
            for pattern, part in joint:
                term = -part if math.prod(of[k] for k in pattern) < 0 else part
                value = term if value is None else value + term
            assert value is not None
            best = value if best is None else torch.maximum(best, value)
        for part in single.values():
            best = part.abs() if best is None else best + part.abs()
        assert best is not None
        return best

    def signs_at(self, rows: Ints, columns: Ints) -> dict[int, Floats]:
        """Return the best signs of pairs, by generator."""
        joint, single = self._split()
        at = torch.from_numpy(rows), torch.from_numpy(columns)

        def values(part: Tensor) -> Floats:
            return np.asarray(part.cpu()[at].double().numpy())

        result = {k: np.where(values(part) < 0, -1.0, 1.0) for k, part in single.items()}
        if self.met:
            options = list(itertools.product((1.0, -1.0), repeat=len(self.met)))
            held = [(pattern, values(part)) for pattern, part in joint]
            table = np.zeros((len(options), len(rows)))
            for number, option in enumerate(options):
                of = dict(zip(self.met, option, strict=True))
                for pattern, value in held:
                    table[number] += math.prod(of[k] for k in pattern) * value
            chosen = np.array(options)[table.argmax(0)]
            result |= {k: chosen[:, i] for i, k in enumerate(self.met)}
        return result


def _folded(parts: Mapping[Pattern, Tensor], given: Mapping[int, float]) -> dict[Pattern, Tensor]:
    """Put the given signs into gains."""
    result: dict[Pattern, Tensor] = {}
    for pattern, part in parts.items():
        left = tuple(k for k in pattern if k not in given)
        value = -part if math.prod(given[k] for k in pattern if k in given) < 0 else part
        result[left] = result[left] + value if left in result else value
    return result


@dataclass
class _Chosen:
    """Which unit of a group comes to each place, and with which signs, by the column of the table of signs."""

    source: Ints
    signs: dict[int, Floats]

    @property
    def moves(self) -> bool:
        return not np.array_equal(self.source, np.arange(len(self.source))) or any(
            bool((sign < 0).any()) for sign in self.signs.values()
        )


class _Tables:
    """The gains of a group on the CPU, in float64, one table for each case of shared signs."""

    def __init__(self, gain: _Gain) -> None:
        self.gain = gain
        self.tables = [case.total().double().cpu().numpy() for _, case in gain.cases]

    def best(self, rows: Ints, columns: Ints) -> tuple[float, int, Ints]:
        """Return the best assignment's gain, its case of shared signs, and each row's place among the columns."""
        best = (-math.inf, 0, np.arange(len(rows)))
        for number, table in enumerate(self.tables):
            part = table[np.ix_(rows, columns)]
            chosen = _best_assignment(part)
            value = float(part[np.arange(len(rows)), chosen].sum())
            if value > best[0]:
                best = value, number, chosen
        return best

    def put(self, chosen: _Chosen, rows: Ints, columns: Ints) -> None:
        """Assign some columns to some rows in the best way."""
        _, number, own = self.best(rows, columns)
        chosen.source[rows] = columns[own]
        self.set_signs(chosen, rows, number)

    def set_signs(self, chosen: _Chosen, rows: Ints, number: int) -> None:
        if not self.gain.signed:
            return
        given, case = self.gain.cases[number]
        signs = {k: np.full(len(rows), sign) for k, sign in given.items()}
        signs |= case.signs_at(rows, chosen.source[rows])
        for k, sign in signs.items():
            chosen.signs.setdefault(k, np.ones(len(chosen.source)))[rows] = sign


def _best_assignment(gain: Floats) -> Ints:
    """Return for each row its column; rows keep their own where that is as good."""
    rows, columns = linear_sum_assignment(gain, maximize=True)
    own = np.arange(len(gain))
    if gain[rows, columns].sum() <= gain[own, own].sum():
        return own
    return np.asarray(columns, dtype=np.int64)


def _within_cells(group: _Group, tables: _Tables) -> _Chosen:
    chosen = _Chosen(np.arange(len(group.units)), {})
    for cell in group.cells:
        if group.movable:
            tables.put(chosen, cell, cell)
        else:
            diagonal = [float(table[cell, cell].sum()) for table in tables.tables]
            tables.set_signs(chosen, cell, int(np.argmax(diagonal)))
    return chosen


@dataclass
class _Blocks:
    """Blocks that change places as wholes: for each kind of member, the group and its places in it, block by block."""

    kinds: list[tuple[_Group, Ints]]
    count: int


def _block_systems(symmetry: Symmetry, groups: list[_Group]) -> list[_Blocks]:
    structure = symmetry.structure
    type_of, cell_of = np.zeros(structure.units, np.int64), np.zeros(structure.units, np.int64)
    for group in groups:
        type_of[group.units] = group.index
        cell_of[group.units] = structure.fine[group.index]
    systems = []
    for table in structure.coarse:
        keys = [(int(type_of[u]), int(cell_of[u])) for u in table[0]]
        kinds = []
        for key in dict.fromkeys(keys):
            members = table[:, [i for i, other in enumerate(keys) if other == key]]
            group = groups[key[0]]
            kinds.append((group, np.searchsorted(group.units, members)))
        systems.append(_Blocks(kinds, len(table)))
    return systems


def _polar(matrix: Tensor) -> Tensor:
    """Return the orthogonal O that maximises tr(O^T M)."""
    u, _, v = torch.linalg.svd(matrix.double().cpu())
    result: Tensor = u @ v
    return result


def _best_blocks(
    system: _Blocks, tables: Mapping[int, _Tables], raw: Mapping[int, Tensor]
) -> tuple[Ints, dict[int, _Chosen]]:
    """Return which block comes to which place, and for each group which of its units come to the places.

    The gain of a block at a place is that of the best assignment of its members; dense members count with the nuclear
    norm, what the best rotation gives.
    """
    count = system.count
    total = np.zeros((count, count))
    for group, places in system.kinds:
        if group.dense:
            matrix = raw[group.index].double().cpu()
            index = torch.from_numpy(places)
            pairs = matrix[index[:, None, :, None], index[None, :, None, :]]
            total += torch.linalg.svdvals(pairs).sum(-1).numpy()
            continue
        for new, old in itertools.product(range(count), repeat=2):
            total[new, old] += tables[group.index].best(places[new], places[old])[0]
    order = _best_assignment(total)
    chosen: dict[int, _Chosen] = {}
    for group, places in system.kinds:
        own = chosen.setdefault(group.index, _Chosen(np.arange(len(group.units)), {}))
        for new, old in enumerate(order):
            if group.dense:
                own.source[places[new]] = places[old]
            else:
                tables[group.index].put(own, places[new], places[old])
    return order, chosen


# ---- weight matching


class _Descent:
    """Coordinate descent. Holds the parameters of A and those of the current member of B's orbit."""

    def __init__(self, symmetry: Symmetry, a: nn.Module, b: nn.Module, *, signs: bool, device: torch.device) -> None:
        self.symmetry = symmetry
        self.signs = signs
        self.groups = _groups(symmetry)
        self.systems = _block_systems(symmetry, self.groups)
        self.only = set(range(len(self.groups)))  # the groups that may be assigned
        self.kept_signs: dict[int, set[int]] = {}  # by group, the columns of signs that are not to be flipped alone
        self.target = _working(a, symmetry, device)
        self.start = _working(b, symmetry, device)
        self.current = dict(self.start)
        self.element = symmetry.identity()
        used = {name for group in self.groups for name in group.tensors}
        self.moving = [name for name in self.target if name in used]
        norm = math.prod(
            math.sqrt(sum(_inner(t, t) for t in tensors.values())) for tensors in (self.target, self.start)
        )
        dtypes = {tensor.dtype for tensor in self.target.values()}
        self.tolerance = max((_NEGLIGIBLE[dtype] for dtype in dtypes), default=0.0) * max(norm, 1e-300)
        self.products = {name: self._product(name, self.current[name]) for name in self.target}
        self._rows: dict[tuple[int, Pattern], Tensor] = {}
        self._dense_cells: dict[int, list[int]] = {}
        for cell_index, cell in enumerate(symmetry.structure.dense):
            owner = next(g.index for g in self.groups if g.dense and int(cell[0]) in set(g.units.tolist()))
            self._dense_cells.setdefault(owner, []).append(cell_index)
        self.neighbours = {
            g.index: {h.index for h in self.groups if h.index != g.index and h.tensors & g.tensors} for g in self.groups
        }

    def _product(self, name: str, tensor: Tensor) -> float:
        return _inner(self.target[name], tensor)

    @property
    def objective(self) -> float:
        return math.fsum(self.products.values())

    def restart(self, element: Element) -> None:
        """Begin again at a member of B's orbit."""
        self.element = element
        self.current.update(self._moved(element, self.start, self.moving))
        for name in self.moving:
            self.products[name] = self._product(name, self.current[name])

    def _moved(self, element: Element, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        return self.symmetry.act_on(element, {name: tensors[name] for name in names}, shifts=False)

    # Gains.

    def gain(self, group: _Group) -> _Gain:
        size = len(group.units)
        parts: dict[Pattern, Tensor] = {}
        for pattern, slices in group.slices.items():
            key = (group.index, pattern)
            if key not in self._rows:
                self._rows[key] = self._matrix(slices, self.target, size)
            parts[pattern] = self._rows[key] @ self._matrix(slices, self.current, size).T
        for joint in group.joints:
            part = joint.of(self.target[joint.tensor]) @ joint.of(self.current[joint.tensor]).T
            index = torch.from_numpy(joint.members).to(part.device)
            total = parts.setdefault(joint.pattern, torch.zeros(size, size, dtype=part.dtype, device=part.device))
            total.index_put_((index[:, None], index[None, :]), part, accumulate=True)
        return _Gain(parts, self.signs, group.shared)

    @staticmethod
    def _matrix(slices: Sequence[_Slices], tensors: Mapping[str, Tensor], size: int) -> Tensor:
        parts = [part.of(tensors[part.tensor], size) for part in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    # Moves.

    def _try(self, element: Element, tensors: Iterable[str]) -> bool:
        """Make a move if it is an improvement."""
        moved = self._moved(element, self.current, [name for name in tensors if name in self.current])
        products = {name: self._product(name, tensor) for name, tensor in moved.items()}
        change = math.fsum(products[name] - self.products[name] for name in products)
        if not change > self.tolerance:
            return False
        self.current.update(moved)
        self.products.update(products)
        self.element = self.symmetry.compose(element, self.element)
        return True

    def _with(self, chosen: Mapping[int, _Chosen]) -> Element:
        """Return the element that brings the chosen units to their places."""
        element = self.symmetry.identity()
        for index, own in chosen.items():
            units = self.groups[index].units
            element.permutation[torch.from_numpy(units)] = torch.from_numpy(units[own.source])
            table = self.symmetry.structure.sign_table[index]
            for k, sign in own.signs.items():
                element.sign[torch.from_numpy(table[own.source, k])] = torch.from_numpy(sign)
        return element

    def improve_group(self, group: _Group) -> bool:
        if group.dense:
            return self._rotate(group)
        gain = self.gain(group)
        if not gain.parts:
            return False
        chosen = _within_cells(group, _Tables(gain))
        return chosen.moves and self._try(self._with({group.index: chosen}), group.tensors)

    def _rotate(self, group: _Group) -> bool:
        """Turn dense cells by the best rotation (orthogonal Procrustes)."""
        gain = self.gain(group)
        if not gain.parts:
            return False
        matrix = gain.parts[()]
        dense = list(self.symmetry.identity().dense)
        local = {int(u): i for i, u in enumerate(group.units)}
        for cell_index in self._dense_cells.get(group.index, []):
            at = torch.tensor([local[int(u)] for u in self.symmetry.structure.dense[cell_index]], device=matrix.device)
            dense[cell_index] = _polar(matrix[at[:, None], at[None, :]])
        return self._try(replace(self.symmetry.identity(), dense=tuple(dense)), group.tensors)

    def improve_blocks(self, system: _Blocks) -> bool:
        involved = {group.index: group for group, _ in system.kinds}
        gains = {index: self.gain(group) for index, group in involved.items()}
        if not all(gain.parts for gain in gains.values()):
            return False
        tables = {i: _Tables(gain) for i, gain in gains.items() if not involved[i].dense}
        raw = {i: g.parts[()] for i, g in gains.items() if involved[i].dense}
        order, chosen = _best_blocks(system, tables, raw)
        if np.array_equal(order, np.arange(system.count)):
            return False
        element = self._with(chosen)
        dense = list(element.dense)
        for group, places in system.kinds:
            if group.dense:
                for new, old in enumerate(order):
                    units = group.units[places[old]]
                    cell = self.symmetry._dense_cells[tuple(units.tolist())]
                    rows, columns = (torch.from_numpy(places[i]).to(raw[group.index].device) for i in (new, old))
                    dense[cell] = _polar(raw[group.index][rows[:, None], columns[None, :]])
        tensors = frozenset().union(*(group.tensors for group in involved.values()))
        return self._try(replace(element, dense=tuple(dense)), tensors)

    def improve_signs(self) -> bool:
        """Flip generators of signs, one column of a group's table at a time, where that is an improvement."""
        structure = self.symmetry.structure
        improved = False
        for group in self.groups:
            table = structure.sign_table[group.index]
            for k in range(table.shape[1]):
                if group.dense or k in self.kept_signs.get(group.index, ()):
                    continue
                names, slopes = self._slopes(table[:, k])
                flipped = np.unique(table[slopes < 0, k])
                if not len(flipped):
                    continue
                element = self.symmetry.identity()
                element.sign[torch.from_numpy(flipped)] = -1.0
                if self._try(element, names):
                    improved = True
                    continue
                # Those that act on common entries: one by one.
                for generator in flipped:
                    element = self.symmetry.identity()
                    element.sign[int(generator)] = -1.0
                    improved |= self._try(element, names)
        return improved

    @cached_property
    def _sign_columns(self) -> Any:
        matrix = self.symmetry.structure.signs.copy().tocsc()
        matrix.data = np.mod(np.rint(matrix.data), 2)
        matrix.eliminate_zeros()
        return matrix

    def _slopes(self, generators: Ints) -> tuple[list[str], Floats]:
        """Return the tensors on which generators act, and the inner products there, by generator."""
        acting = self._sign_columns[:, generators]
        rows = np.unique(acting.indices)
        slopes = np.zeros(len(generators))
        names = []
        for site in self.symmetry.structure.sites:
            lo, hi = np.searchsorted(rows, (site.offset, site.offset + site.size))
            if lo == hi or site.tensor not in self.current:
                continue
            names.append(site.tensor)
            products = _along(self.target[site.tensor] * self.current[site.tensor], site.axes)
            slopes += acting[site.offset : site.offset + site.size].T @ products.reshape(-1)
        return list(dict.fromkeys(names)), slopes

    # Sweeps.

    def run(
        self, generator: torch.Generator, max_sweeps: int, report: Callable[[int, float], None]
    ) -> tuple[list[float], int]:
        history = [self.objective]
        able = {g.index for g in self.groups if g.movable or g.free or g.shared} & self.only
        dirty = set(able)
        block_dirty = set(range(len(self.systems)))
        loose = self.signs and any(
            len(g.free) + len(g.shared) < self.symmetry.structure.sign_table[g.index].shape[1]
            for g in self.groups
            if not g.dense
        )
        sweeps = 0

        def touched(indices: Iterable[int]) -> None:
            for index in indices:
                dirty.update(self.neighbours[index] & able)
                if self.groups[index].quadratic and index in able:
                    dirty.add(index)
            for number, system in enumerate(self.systems):
                kinds = {group.index for group, _ in system.kinds}
                if any(i in kinds or self.neighbours[i] & kinds for i in indices):
                    block_dirty.add(number)

        while sweeps < max_sweeps and (dirty or block_dirty):
            sweeps += 1
            improved = False
            for number in sorted(block_dirty):
                block_dirty.discard(number)
                if self.improve_blocks(self.systems[number]):
                    improved = True
                    kinds = {group.index for group, _ in self.systems[number].kinds}
                    touched(kinds)
                    dirty.update(kinds & able)
            order = torch.randperm(len(self.groups), generator=generator).tolist()
            # Rotations last: they would spoil what assignments can still recognise.
            for index in sorted(order, key=lambda index: self.groups[index].dense):
                if index not in dirty:
                    continue
                dirty.discard(index)
                if self.improve_group(self.groups[index]):
                    improved = True
                    touched([index])
            if loose and self.improve_signs():
                improved = True
                dirty.update(able)
            history.append(self.objective)
            report(sweeps, history[-1])
            if not improved:
                break
        return history, sweeps


def _inner(one: Tensor, two: Tensor) -> float:
    return float(torch.dot(one.reshape(-1), two.reshape(-1)))


def _along(tensor: Tensor, axes: tuple[int, ...]) -> Floats:
    """Sum over all other axes."""
    others = [axis for axis in range(tensor.ndim) if axis not in axes]
    total = tensor.sum(others) if others else tensor
    return np.asarray(total.double().cpu().numpy())


def _working(network: nn.Module, symmetry: Symmetry, device: torch.device) -> dict[str, Tensor]:
    """Return the parameters, in at least single precision."""
    tensors = {}
    for name, tensor in state_tensors(network).items():
        if name in symmetry.parameter_names:
            value = tensor.detach().to(device)
            tensors[name] = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return tensors


def _check(symmetry: Symmetry, **networks: nn.Module) -> None:
    for which, network in networks.items():
        try:
            symmetry.require(network)
        except ValueError as error:
            raise ValueError(f"{which} is not of the traced architecture: {error}.") from error
        for name, tensor in state_tensors(network).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of {which} holds values that are not finite; networks must be finite.")


def _check_count(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")


def _balanced(symmetry: Symmetry, network: nn.Module) -> tuple[nn.Module, Element]:
    """Return the network in the balanced gauge, and the element that brings it there."""
    from lightning_sym.symmetry.canonical import canonicalize

    form = canonicalize(symmetry, network, scales="balanced", signs=False, order=False)
    return form.network, form.element


def parameter_distance(a: nn.Module, b: nn.Module) -> float:
    """Return the Euclidean distance of the parameters of two networks, each counted once, buffers left out."""
    others = dict(b.named_parameters())
    squares = 0.0
    with torch.no_grad():
        for name, tensor in a.named_parameters():
            other = others[name].to(tensor)
            squares += float((tensor - other).square().sum(dtype=wide(tensor.device)))
    return math.sqrt(squares)


def weight_matching(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    *,
    scales: bool = True,
    signs: bool = True,
    restarts: int = 1,
    seed: int = 0,
    initial: Element | None = None,
    max_sweeps: int = 100,
    balance: bool = True,
    refine: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Match:
    r"""Find the member of a network's orbit that is near to another network, by weights alone.

    Coordinate descent on :math:`\langle\theta_a, g\,\theta_b\rangle` over the axis groups in random order. With all
    other groups fixed, the best assignment of one group's units is a linear assignment problem with the gain

    .. math:: M_{ij} = \sum_{\text{parameters, axes, tags}} \langle a_{i}, (g_{-} b)_{j} \rangle,

    solved exactly; where signs are free, with the best signs of each pair, e.g. :math:`|M_{ij}|`. Groups whose
    neighbours have not changed since their last assignment are skipped. Networks are balanced before (inner products
    are not invariant under scales), and ``b`` is brought from there to the scales of ``a``.

    - Units change places within their cell; blocks of cells (heads, convolution groups) are permuted as wholes by a
      second move, with the gains of their members' best assignments. A grouped convolution's weight counts for its
      rows, and within a block for its columns; between blocks, columns are compared in the order that they have, so
      that several restarts are worth while.
    - A group on two axes of one parameter makes the problem quadratic: it is linearised, and only improvements are
      taken. The same holds for blocks, and for more than three free signs that meet on one parameter.
    - Cells on which any invertible matrix acts are rotated (orthogonal Procrustes); other matrices are not searched.
    - Buffers are left out of the gain, and move along.

    Args:
        symmetry: The symmetry of the architecture.
        a: The reference. Not changed.
        b: The network that is moved. Not changed.
        scales: Whether magnitudes (and shifts of biases in front of batch norms) may change.
        signs: Whether signs may change.
        restarts: Number of descents, >= 1; the best is taken. The first begins at ``initial``, the others at random
            permutations (if ``initial`` is given, all there, and only the order of the groups differs).
        seed: Of the order of groups and the restarts; no other generator is used or changed.
        initial: Where to begin, an element for ``b``; only its permutation, signs and matrices are used.
        max_sweeps: Most sweeps over all groups in a descent, >= 1.
        balance: Whether both networks are brought to the balanced gauge first; ignored without ``scales``.
        refine: Whether, at the end, every scale is adjusted to the least distance to ``a`` (and shifts, exactly), in
            closed form, one after another; ignored without ``scales``. For distances, not for interpolation: of
            networks that are not alike it makes the incoming weights of unmatched units small, and the loss between
            the networks grows.
        device: Where gains are computed, in the networks' dtype (half precision in float32); by default, where ``a``
            is. Assignments are solved on the CPU in float64.
        progress: Whether to show a progress bar.

    Returns:
        The match; its network is on ``b``'s device.

    Raises:
        ValueError: If a network is not of the traced architecture, holds a value that is not finite, or an argument is
            out of its range.

    Note:
        ``O(H^3)`` for a group of ``H`` units and sweep. A local optimum, except with a single axis group, where one
        sweep is exact. Deterministic given ``seed``, on one machine and thread number.

    References:
        Ainsworth et al. (2022), "Git Re-Basin: Merging Models modulo Permutation Symmetries", Algorithm 1,
        arXiv:2209.04836. Scales, signs, blocks, rotations and the skipping of unchanged groups are added.
    """
    _check_count(restarts=restarts, max_sweeps=max_sweeps)
    _check(symmetry, a=a, b=b)
    if initial is not None:
        symmetry._own(initial)
    where = torch.device(device) if device is not None else device_of(a)
    with torch.no_grad():
        left, right = symmetry.identity(), symmetry.identity()
        target, source = a, b
        if scales and balance:
            target, left = _balanced(symmetry, a)
            source, right = _balanced(symmetry, b)
        descent = _Descent(symmetry, target, source, signs=signs, device=where)
        best, objectives = _best_of_restarts(symmetry, descent, restarts, seed, initial, max_sweeps, progress)
        objective, sweeps, found = best
        element = symmetry.compose(symmetry.inverse(left), symmetry.compose(found, right))
        return _finish(symmetry, a, b, element, objective, sweeps, objectives, "weights", scales and refine, where)


def _best_of_restarts(
    symmetry: Symmetry,
    descent: _Descent,
    restarts: int,
    seed: int,
    initial: Element | None,
    max_sweeps: int,
    progress: bool,
) -> tuple[tuple[list[float], int, Element], tuple[float, ...]]:
    best: tuple[list[float], int, Element] | None = None
    objectives = []
    with _bar(progress, restarts, max_sweeps) as report:
        for number in range(restarts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            start = symmetry.identity()
            if initial is not None:
                dense = tuple(_polar(matrix) for matrix in initial.dense)
                start = replace(start, permutation=initial.permutation, sign=initial.sign, dense=dense)
            elif number:
                start = symmetry.sample(generator, scale=0.0, signs=False, mixing=False, shifts=False)
            descent.restart(start)
            history, sweeps = descent.run(generator, max_sweeps, report(number))
            objectives.append(history[-1])
            if best is None or history[-1] > best[0][-1]:
                best = history, sweeps, descent.element
    assert best is not None
    return best, tuple(objectives)


@contextmanager
def _bar(progress: bool, restarts: int, max_sweeps: int) -> Iterator[Callable[[int], Callable[[int, float], None]]]:
    if not progress or (ranks() > 1 and torch.distributed.get_rank() != 0):
        yield lambda number: lambda sweep, objective: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("matching", total=restarts * max_sweeps)

        def report(number: int) -> Callable[[int, float], None]:
            def show(sweep: int, objective: float) -> None:
                text = f"matching: restart {number + 1}, sweep {sweep}, objective {objective:.6g}"
                bar.update(task, completed=number * max_sweeps + sweep, description=text)

            return show

        yield report
        bar.update(task, completed=restarts * max_sweeps)


def _finish(
    symmetry: Symmetry, a: nn.Module, b: nn.Module, element: Element, objective: Sequence[float], sweeps: int,
    objectives: tuple[float, ...], method: str, refine: bool, device: torch.device,
) -> Match:  # fmt: skip
    if refine:
        element = _refined(symmetry, a, b, element, device)
    network = symmetry.act(element, b)
    return Match(
        element=element,
        network=network,
        objective=tuple(objective),
        distance_before=parameter_distance(a, b),
        distance_after=parameter_distance(a, network),
        sweeps=sweeps,
        restarts=objectives,
        method=method,
    )


# ---- scales


def _refined(
    symmetry: Symmetry, a: nn.Module, b: nn.Module, element: Element, device: torch.device, sweeps: int = 20
) -> Element:
    r"""Adjust magnitudes to a reference: cyclic descent on |a - g b|^2 over the generators.

    As a function of one factor f, with exponents +1 and -1 only, the square is
    -2 P f + Q f^2 - 2 R / f + S / f^2 + constant, whose stationary points solve Q f^4 - P f^3 + R f - S = 0.
    All generators of a column of a group's table are changed at once, if that is an improvement (it is, unless they
    act on common entries: then with half and a quarter of the steps' logarithms, or not at all).
    """
    element = _shifted(symmetry, a, b, element)
    structure = symmetry.structure
    dense = {int(unit) for cell in structure.dense for unit in cell}
    columns = [
        np.unique(table[:, k])
        for units, table in zip(structure.types, structure.scale_table, strict=True)
        for k in range(table.shape[1])
        if int(units[0]) not in dense
    ]
    if not columns:
        return element
    target = _working(a, symmetry, device)
    begin = symmetry.act_on(element, _working(b, symmetry, device))
    current = dict(begin)
    plans = _scale_plans(symmetry, columns, current)
    cross: dict[int, Floats] = {}
    own: dict[int, Floats] = {}
    sites = {number for _, parts, _ in plans for number, _, _ in parts}
    by_tensor: dict[str, list[int]] = {}
    for number in sorted(sites):
        by_tensor.setdefault(structure.sites[number].tensor, []).append(number)

    def measure(names: Iterable[str]) -> None:
        for name in names:
            products, squares = target[name] * current[name], current[name].square()
            for number in by_tensor[name]:
                axes = structure.sites[number].axes
                cross[number], own[number] = (_along(t, axes).reshape(-1) for t in (products, squares))

    def distance(tensors: Mapping[str, Tensor]) -> float:
        return math.fsum(float((target[n] - t).square().sum(dtype=wide(t.device))) for n, t in tensors.items())

    measure(by_tensor)
    total = np.zeros(symmetry.scales)
    whole = distance({name: current[name] for name in by_tensor})
    for _ in range(sweeps):
        won = 0.0
        for column, parts, coupled in plans:
            p, q, r, s = np.zeros((4, len(column)))
            for number, plus, minus in parts:
                p += plus @ cross[number]
                q += plus @ own[number]
                r += minus @ cross[number]
                s += minus @ own[number]
            step = _best_factors(p, q, r, s)
            names = list(dict.fromkeys(structure.sites[number].tensor for number, _, _ in parts))
            for damping in (1.0, 0.5, 0.25) if coupled else (1.0,):
                if not np.any(np.abs(step) > 1e-15):
                    break
                f = np.exp(step * damping)
                gain = float(np.sum(-2 * p * (1 - f) + q * (1 - f**2) - 2 * r * (1 - 1 / f) + s * (1 - f**-2.0)))
                if not coupled and gain <= 0:
                    break
                move = symmetry.identity()
                move.log_scale[torch.from_numpy(column)] = torch.from_numpy(step * damping)
                moved = symmetry.act_on(move, {name: current[name] for name in names})
                if coupled:
                    gain = distance({name: current[name] for name in names}) - distance(moved)
                if gain > 0:
                    current.update(moved)
                    measure(names)
                    total[column] += step * damping
                    won += gain
                    break
        whole -= won
        if won <= 1e-4 * whole:
            break
    # Rounding of single precision could have made it worse.
    if not distance(current) < distance(begin):
        return element
    return symmetry.compose(replace(symmetry.identity(), log_scale=torch.from_numpy(total)), element)


_Plan: TypeAlias = tuple[Ints, list[tuple[int, Any, Any]], bool]


def _scale_plans(symmetry: Symmetry, columns: list[Ints], tensors: Mapping[str, Tensor]) -> list[_Plan]:
    """Return for each column of generators the sites where they act, how, and whether some act on common entries."""
    structure = symmetry.structure
    forms = structure.magnitudes.tocsc()
    offsets = np.array([site.offset for site in structure.sites], np.int64)
    plans: list[_Plan] = []
    for column in columns:
        acting = forms[:, column]
        if not np.all(np.isin(np.rint(acting.data * 1e9) / 1e9, (-1.0, 1.0))):
            continue
        parts = []
        numbers = np.unique(np.searchsorted(offsets, acting.indices, side="right") - 1)
        acting = acting.tocsr()
        for number in numbers.tolist():
            site = structure.sites[number]
            if site.tensor in tensors:
                part = acting[site.offset : site.offset + site.size]
                parts.append((number, (part > 0).T.astype(np.float64).tocsr(), (part < 0).T.astype(np.float64).tocsr()))
        if parts:
            held = [structure.sites[number].tensor for number, _, _ in parts]
            # Two generators of one column on one position would also be common; they are rare, and count as such.
            rows_alone = acting.getnnz(axis=1).max(initial=0) <= 1
            plans.append((column, parts, len(set(held)) < len(held) or not rows_alone))
    return plans


def _shifted(symmetry: Symmetry, a: nn.Module, b: nn.Module, element: Element) -> Element:
    """Shift the biases in front of batch norms to those of the reference: they are free."""
    if not symmetry.structure.shifts:
        return element
    ours = state_tensors(symmetry.act(element, b))
    theirs = state_tensors(a)
    shift = []
    for bias, mean, size in symmetry.structure.shifts:
        name = symmetry.structure.sites[bias].tensor
        if symmetry.layout[name][0] != (size,) or len(symmetry.layout[symmetry.structure.sites[mean].tensor][0]) != 1:
            shift.append(torch.zeros(size, dtype=torch.float64))
            continue
        shift.append(theirs[name].detach().double().cpu() - ours[name].detach().double().cpu())
    return symmetry.compose(replace(symmetry.identity(), shift=tuple(shift)), element)


def _best_factors(p: Floats, q: Floats, r: Floats, s: Floats) -> Floats:
    """Return the logarithms of the factors that minimise -2 p f + q f^2 - 2 r / f + s / f^2; 0 where none does."""
    result = np.zeros(len(p))
    tiny = 1e-300
    both = (q > tiny) & (s > tiny)
    only = (q > tiny) & ~both & (p > 0)
    result[only] = np.log(p[only] / q[only])
    inverse = (s > tiny) & ~both & (r > 0)
    result[inverse] = -np.log(r[inverse] / s[inverse])
    if both.any():
        at = np.flatnonzero(both)
        # In units of f0 = (s/q)^(1/4) the polynomial is g^4 - u g^3 + v g - 1.
        f0 = (s[at] / q[at]) ** 0.25
        norm = np.sqrt(q[at] * s[at])
        u, v = p[at] * f0 / norm, r[at] / f0 / norm
        companion = np.zeros((len(at), 4, 4))
        companion[:, 0, 0], companion[:, 0, 2], companion[:, 0, 3] = u, -v, 1.0
        companion[:, (1, 2, 3), (0, 1, 2)] = 1.0
        roots = np.linalg.eigvals(companion)
        real = np.where((np.abs(roots.imag) < 1e-6 * np.abs(roots)) & (roots.real > 0), roots.real, np.nan)
        candidates = np.concatenate([real, (1 / f0)[:, None]], axis=1)
        with np.errstate(all="ignore"):
            value = -2 * u[:, None] * candidates + candidates**2 - 2 * v[:, None] / candidates + candidates**-2.0
        best = candidates[np.arange(len(at)), np.nanargmin(value, axis=1)]
        # Newton in the logarithm: roots of a companion matrix have half the digits where they nearly meet.
        for _ in range(3):
            slope = -u * best + best**2 + v / best - best**-2.0
            bend = -u * best + 2 * best**2 - v / best + 2 * best**-2.0
            step = np.where(bend > 0, -slope / np.where(bend > 0, bend, 1.0), 0.0)
            best *= np.exp(np.clip(step, -0.1, 0.1))
        result[at] = np.log(best * f0)
    return np.clip(result, -20.0, 20.0)


# ---- activation matching


class ActivationMoments:
    """Streaming moments of the units' activations of two networks, per axis group, for :func:`activation_matching`.

    Sums of x, y, x^2, y^2 (per unit) and of x y^T (per pair of units) in float64; all positions of an image, or tokens,
    count as samples. Where a group can be watched at several places (an axis group of a residual stream runs through
    many blocks), the last one that is no pooling, flattening, dropout or identity is used, as given by `places`.

    Args:
        symmetry: The symmetry of the architecture.
        a: The first network (x). Run in evaluation mode; not changed.
        b: The second network (y).

    Attributes:
        places: The module that is watched, by the name of the axis group. Groups of which no module's output shows all
            units are missing.
        samples: Number of samples so far, by the name of the group.

    Raises:
        ValueError: If a network is not of the traced architecture, or holds a value that is not finite.
    """

    def __init__(self, symmetry: Symmetry, a: nn.Module, b: nn.Module) -> None:
        _check(symmetry, a=a, b=b)
        self.symmetry = symmetry
        self._a, self._b = a, b
        modules = dict(a.named_modules())
        self._taps = {}
        for group in symmetry.groups:
            if not group.taps or not (group.movable or group.signs):
                continue
            real = [tap for tap in group.taps if not _passes_through(modules[tap.module])]
            self._taps[group.name] = (real or list(group.taps))[-1]
        self.places = {name: tap.module for name, tap in self._taps.items()}
        device = device_of(a)
        self._sums: dict[str, dict[str, Tensor]] = {}
        for group in symmetry.groups:
            if group.name in self._taps:
                zeros = {
                    key: torch.zeros(group.size, dtype=wide(device), device=device) for key in ("x", "y", "xx", "yy")
                }
                self._sums[group.name] = {
                    "n": torch.zeros((), dtype=wide(device), device=device),
                    **zeros,
                    "xy": torch.zeros(group.size, group.size, dtype=wide(device), device=device),
                }
        # By group, the columns of its sign table that show at its place; found at the first update.
        self.visible_signs: dict[str, tuple[int, ...]] = {}

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples so far, by the name of the group."""
        return {name: int(sums["n"].item()) for name, sums in self._sums.items()}

    def update(self, inputs: Tensor | Sequence[Any]) -> None:
        """Run both networks on a batch and add it to the sums.

        Args:
            inputs: A batch, moved to each network's device; of a tuple or list the first entry.
        """
        images = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
        if not isinstance(images, Tensor):
            kind = type(inputs).__name__
            raise ValueError(f"inputs must be a tensor, or a tuple or list that starts with one, got {kind}.")
        if len(images) == 0:
            return
        if not self.visible_signs:
            self._find_visible_signs(images[:2])
        ours, theirs = (self._watch(network, images) for network in (self._a, self._b))
        for name, sums in self._sums.items():
            x, y = (watched[name].to(sums["xy"]) for watched in (ours, theirs))
            if not bool(x.isfinite().all() and y.isfinite().all()):
                place = self.places[name]
                raise ValueError(f"The activations of {place} are not finite; look for such weights or inputs.")
            sums["n"] += len(x)
            sums["x"] += x.sum(0)
            sums["y"] += y.sum(0)
            sums["xx"] += x.square().sum(0)
            sums["yy"] += y.square().sum(0)
            sums["xy"] += x.T @ y

    def _watch(self, network: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Return the activations of each group. Each of shape (samples, size)."""
        found: dict[str, list[Tensor]] = {name: [] for name in self._taps}
        modules = dict(network.named_modules())
        handles = []
        for name, tap in self._taps.items():

            def keep(module: nn.Module, args: Any, output: Any, *, name: str = name, tap: Any = tap) -> None:
                values = output.detach().movedim(tap.axis, -1)
                found[name].append(values.reshape(-1, values.shape[-1])[:, tap.positions.to(values.device)].clone())

            handles.append(modules[tap.module].register_forward_hook(keep))
        try:
            with torch.no_grad(), evaluating(network):
                network(images.to(device_of(network)))
        finally:
            for handle in handles:
                handle.remove()
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _find_visible_signs(self, images: Tensor) -> None:
        """Flip signs, one column of all groups' tables at a time, and see where activations flip."""
        structure = self.symmetry.structure
        visible: dict[str, list[int]] = {name: [] for name in self._taps}
        most = max((table.shape[1] for table in structure.sign_table), default=0)
        # Zero tells nothing: random numbers of the inputs' size, and both networks' signs behave alike.
        before = self._watch(self._a, images) if most else {}
        for k in range(most):
            element = self.symmetry.identity()
            for group, table in zip(self.symmetry.groups, structure.sign_table, strict=True):
                if table.shape[1] > k and not group.dense:
                    element.sign[torch.from_numpy(table[:, k])] = -1.0
            after = self._watch(self.symmetry.act(element, self._a), images)
            for group, table in zip(self.symmetry.groups, structure.sign_table, strict=True):
                if group.name in self._taps and table.shape[1] > k and not group.dense:
                    old, new = before[group.name].double(), after[group.name].double()
                    if float((new + old).square().sum()) < float((new - old).square().sum()):
                        visible[group.name].append(k)
        self.visible_signs = {name: tuple(columns) for name, columns in visible.items()}

    def reduce(self) -> None:
        """Replace the sums by those over all ranks (`torch.distributed`); to be called once, on every rank."""
        if ranks() == 1:
            return
        for name in sorted(self._sums):
            self._sums[name] = {key: summed(value) for key, value in sorted(self._sums[name].items())}
        # A rank without batches has not seen which signs show.
        known: list[Any] = [None] * ranks()
        torch.distributed.all_gather_object(known, self.visible_signs)
        self.visible_signs = next((signs for signs in known if signs), {})

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as nested dictionaries of tensors."""
        return {
            "sums": {name: {key: value.clone() for key, value in sums.items()} for name, sums in self._sums.items()},
            "visible_signs": {name: list(columns) for name, columns in self.visible_signs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over sums.

        Raises:
            ValueError: If they are of other groups.
        """
        if {n: v["xy"].shape for n, v in state["sums"].items()} != {n: v["xy"].shape for n, v in self._sums.items()}:
            raise ValueError("the state holds other axis groups; expected one of the same architecture")
        for name, sums in state["sums"].items():
            self._sums[name] = {key: value.to(self._sums[name][key]).clone() for key, value in sums.items()}
        self.visible_signs = {name: tuple(columns) for name, columns in state["visible_signs"].items()}

    def product(self, name: str) -> Tensor:
        """Return the mean product of the units' activations. Shape (size, size), float64."""
        return self._sums[name]["xy"] / self._sums[name]["n"]

    def correlation(self, name: str) -> Tensor:
        """Return the correlation of the units of ``a`` (rows) and ``b``. Shape (size, size), float64.

        Zero where one of the units is constant (up to rounding): it tells nothing.
        """
        sums = self._sums[name]
        n = sums["n"]
        mean_x, mean_y = sums["x"] / n, sums["y"] / n
        centred = sums["xy"] / n - mean_x[:, None] * mean_y[None, :]
        scale = []
        for square, mean in ((sums["xx"], mean_x), (sums["yy"], mean_y)):
            variance = square / n - mean.square()
            alive = variance > 1e-12 * (square / n)
            scale.append(torch.where(alive, torch.where(alive, variance, 1.0).rsqrt(), 0.0))
        return centred * scale[0][:, None] * scale[1][None, :]


def _passes_through(module: nn.Module) -> bool:
    name = type(module).__name__
    return any(word in name for word in ("Pool", "Flatten", "Dropout", "Identity"))


def activation_matching(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    data: Batches | ActivationMoments,
    *,
    measure: Literal["correlation", "product"] = "correlation",
    scales: bool = True,
    signs: bool = True,
    balance: bool = True,
    refine: bool = False,
    seed: int = 0,
) -> Match:
    r"""Find the member of a network's orbit whose units are active when those of another network are.

    For each axis group the assignment that maximises :math:`\sum_i C_{i p(i)}` with the correlations (or mean
    products) :math:`C` of activations, exactly and in one pass; :math:`|C|` where the activations' sign is free. Cells
    and blocks are respected. What activations do not show follows from the weights, given the assignments: other
    signs, magnitudes, and groups that no module's output shows.

    Under `torch.distributed` each rank passes its own batches, and all get the same match.

    Args:
        symmetry: The symmetry of the architecture.
        a: The reference. Not changed.
        b: The network that is moved. Not changed.
        data: Batches (of a tuple or list the first entry is used), or moments of ``a`` and ``b``, reduced by the
            caller.
        measure: "correlation", or "product": uncentred, depends on the units' scales.
        scales: Whether magnitudes (and shifts of biases in front of batch norms) may change.
        signs: Whether signs may change.
        balance: Whether both networks are brought to the balanced gauge before signs and other groups are matched by
            weights; ignored without ``scales``.
        refine: As for :func:`weight_matching`.
        seed: Of the order in which groups without activations are matched.

    Returns:
        The match.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite, there are no data, or `measure` is
            unknown.

    References:
        Li et al. (2016), "Convergent Learning", arXiv:1511.07543; Ainsworth et al. (2022), section 3.1,
        arXiv:2209.04836, with products.
    """
    if measure not in ("correlation", "product"):
        raise ValueError(f"measure must be 'correlation' or 'product', got {measure!r}.")
    if isinstance(data, ActivationMoments):
        _check(symmetry, a=a, b=b)
        moments = data
    else:
        moments = ActivationMoments(symmetry, a, b)

        def run() -> None:
            for batch in data:
                moments.update(batch)  # type: ignore[arg-type]

        together(run)
        moments.reduce()
    if not moments._sums or min(moments.samples.values()) == 0:
        raise ValueError(
            "there are no activations; pass at least one batch, and a network whose modules show its units."
        )
    where = device_of(a)
    with torch.no_grad():
        groups = _groups(symmetry)
        gains: dict[int, _Gain] = {}
        for group, axis_group in zip(groups, symmetry.groups, strict=True):
            if axis_group.name in moments._sums and not group.dense:
                name = axis_group.name
                table = moments.correlation(name) if measure == "correlation" else moments.product(name)
                visible = [k for k in moments.visible_signs.get(name, ()) if k in group.free][:1] if signs else []
                gains[group.index] = _Gain({tuple(visible): table}, signs)
        tables = {index: _Tables(gain) for index, gain in gains.items()}
        chosen: dict[int, _Chosen] = {}
        for system in _block_systems(symmetry, groups):
            if all(group.index in tables for group, _ in system.kinds):
                chosen.update(_best_blocks(system, tables, {})[1])
        inside = set(chosen)
        for index, table_of in tables.items():
            if index not in inside:
                chosen[index] = _within_cells(groups[index], table_of)
        left, right = symmetry.identity(), symmetry.identity()
        target, source = a, b
        if scales and balance:
            target, left = _balanced(symmetry, a)
            source, right = _balanced(symmetry, b)
        descent = _Descent(symmetry, target, source, signs=signs, device=where)
        descent.restart(descent._with(chosen))
        descent.only = {group.index for group in groups} - set(chosen)
        descent.systems = [s for s in descent.systems if all(group.index in descent.only for group, _ in s.kinds)]
        for index, own in chosen.items():
            # What was never active in either network is undecided: by weights, among itself.
            part = gains[index].cases[0][1].total().cpu()
            silent = (part == 0).all(1).numpy() & (part == 0).all(0).numpy()[own.source]
            cells = tuple(kept for cell in groups[index].cells if len(kept := cell[silent[cell]]))
            if cells:
                descent.only.add(index)
                descent.groups[index] = replace(groups[index], cells=cells)
        descent.kept_signs = {i: {k for pattern in gain.parts for k in pattern} for i, gain in gains.items()}
        if signs:
            descent.improve_signs()
        descent.run(torch.Generator().manual_seed(seed), 100, lambda sweep, objective: None)
        element = symmetry.compose(symmetry.inverse(left), symmetry.compose(descent.element, right))
        before = sum(float(part.trace()) for gain in gains.values() for part in gain.parts.values())
        after = sum(
            float(tables[i].tables[0][np.arange(len(found.source)), found.source].sum()) for i, found in chosen.items()
        )
        return _finish(symmetry, a, b, element, (before, after), 1, (after,), "activations", scales and refine, where)


# ---- distances and means


def orbit_distance(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    *,
    balance: bool = True,
    signs: bool = True,
    restarts: int = 1,
    seed: int = 0,
    max_sweeps: int = 100,
    device: torch.device | str | None = None,
) -> OrbitDistance:
    r"""Bound the distance of two networks up to symmetry: :math:`\min_g |\theta_a - g\,\theta_b|`, both balanced.

    The upper bound is that of :func:`weight_matching`. The lower bound is a relaxation: parameters on which one axis
    group stands, on one axis, are matched exactly for that group alone; all others are compared as sorted lists of
    numbers, which no permutation of their entries can beat (of absolute values, where signs are free). With one axis
    group both bounds agree.

    Args:
        symmetry: The symmetry of the architecture.
        a: The first network.
        b: The second network.
        balance: Whether both are balanced first. Without it, magnitudes are compared as they are.
        signs: Whether signs are free.
        restarts: As for :func:`weight_matching`.
        seed: As for :func:`weight_matching`.
        max_sweeps: As for :func:`weight_matching`.
        device: As for :func:`weight_matching`.

    Returns:
        Both bounds. The lower one is 0 if matrices act on some units, for which none is known.

    Raises:
        ValueError: As for :func:`weight_matching`.

    Note:
        The bounds are for permutations and signs of the balanced networks. A dead unit has no balanced form; it is
        left as it is.
    """
    _check_count(restarts=restarts, max_sweeps=max_sweeps)
    _check(symmetry, a=a, b=b)
    where = torch.device(device) if device is not None else device_of(a)
    with torch.no_grad():
        if balance:
            a, b = (_balanced(symmetry, network)[0] for network in (a, b))
        descent = _Descent(symmetry, a, b, signs=signs, device=where)
        best, _ = _best_of_restarts(symmetry, descent, restarts, seed, None, max_sweeps, False)
        descent.restart(best[2])
        # Subtracted, not computed from inner products: near 0 these cancel.
        upper = math.sqrt(
            sum(
                float((t - descent.current[name]).square().sum(dtype=wide(where))) for name, t in descent.target.items()
            )
        )
        return OrbitDistance(upper, min(_lower_bound(descent), upper))


def _lower_bound(descent: _Descent) -> float:
    if descent.symmetry.structure.dense:
        return 0.0
    owners: dict[str, list[_Group]] = {}
    for group in descent.groups:
        for name in group.tensors:
            owners.setdefault(name, []).append(group)
    signed = {
        site.tensor
        for site in descent.symmetry.structure.sites
        if descent._sign_columns[:, :].shape[1]
        and descent._sign_columns.tocsr()[site.offset : site.offset + site.size].nnz
    }
    joint = {site.tensor for site in descent.symmetry.structure.sites if len(site.axes) == 2}
    double = {name: tensor.double().cpu() for name, tensor in descent.target.items()}
    other = {name: tensor.double().cpu() for name, tensor in descent.start.items()}
    total = 0.0
    alone: dict[int, list[str]] = {}
    for name, tensor in double.items():
        mine = [group for group in owners.get(name, []) if group.movable or group.free]
        fixed = not mine and name not in signed
        if fixed:
            total += float((tensor - other[name]).square().sum())
        elif len(owners[name]) == 1 and not mine[0].quadratic and name not in joint:
            alone.setdefault(mine[0].index, []).append(name)
        else:
            flip = descent.signs and name in signed
            lists = [(t.abs() if flip else t).flatten().sort().values for t in (tensor, other[name])]
            total += float((lists[0] - lists[1]).square().sum())
    for index, names in alone.items():
        group = descent.groups[index]
        slices = {
            pattern: kept
            for pattern, parts in group.slices.items()
            if (kept := tuple(part for part in parts if part.tensor in names))
        }
        size = len(group.units)
        parts = {
            pattern: descent._matrix(kept, double, size) @ descent._matrix(kept, other, size).T
            for pattern, kept in slices.items()
        }
        gain = _Gain(parts, descent.signs)
        if not gain.exact or (
            descent.signs and len(group.free) < descent.symmetry.structure.sign_table[index].shape[1]
        ):
            # Shared signs, or too many: the bound by absolute values.
            for name in names:
                lists = [t.abs().flatten().sort().values for t in (double[name], other[name])]
                total += float((lists[0] - lists[1]).square().sum())
            continue
        # Blocks may change places: relaxed to all permutations.
        whole = replace(group, cells=(np.arange(size),)) if descent.systems else group
        chosen = _within_cells(whole, _Tables(gain))
        for pattern, kept in slices.items():
            sign = math.prod((chosen.signs[k] for k in pattern if k in chosen.signs), start=np.ones(size))
            moved = (
                descent._matrix(kept, other, size)[torch.from_numpy(chosen.source)] * torch.from_numpy(sign)[:, None]
            )
            total += float((descent._matrix(kept, double, size) - moved).square().sum())
        # Entries of these parameters at which no unit of the group stands are fixed.
        for name in names:
            axis = next(part.axis for parts_ in slices.values() for part in parts_ if part.tensor == name)
            stands = torch.zeros(double[name].shape[axis] if double[name].ndim else 1, dtype=torch.bool)
            for part in itertools.chain(*slices.values()):
                if part.tensor == name:
                    stands[slice(None) if part.positions is None else part.positions] = True
            if not bool(stands.all()):
                rest = (~stands).nonzero().flatten()
                total += float((double[name] - other[name]).index_select(axis, rest).square().sum())
    return math.sqrt(total)


def merge(
    symmetry: Symmetry,
    networks: Sequence[nn.Module],
    *,
    method: Literal["weights", "activations"] = "weights",
    batches: Batches | None = None,
    reference: int = 0,
    max_rounds: int = 20,
    scales: bool = True,
    signs: bool = True,
    balance: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Merged:
    """Align networks to one another, and return their mean.

    All are balanced, and aligned to the reference. Then, in rounds and random order, each is aligned anew to the mean
    of the others, begun where it is and taken only if it comes nearer to them, until a round changes nothing. The mean
    is taken in the balanced gauge, and brought to the scales of the reference.

    Batch norms of the mean need statistics of their own, which need data: call
    :func:`lightning_sym.networks.recalibrate_batch_norm` on the result.

    Args:
        symmetry: The symmetry of the architecture.
        networks: At least one. Not changed.
        method: "weights", or "activations": one alignment to the reference by activations, without rounds, as the mean
            has no meaningful activations before its batch norms are recalibrated.
        batches: Inputs for "activations"; read once for each network.
        reference: The number of the network whose scales the result has, and to which all are aligned first.
        max_rounds: Most rounds, >= 1.
        scales: Whether magnitudes may change.
        signs: Whether signs may change.
        balance: Whether to balance; ignored without ``scales``.
        seed: Of the order of networks and of groups.
        device: As for :func:`weight_matching`.

    Returns:
        The mean, and how it came about.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite, or an argument is out of its range.

    References:
        Ainsworth et al. (2022), "Git Re-Basin", Algorithm 3 (MergeMany), arXiv:2209.04836. The first alignment to a
        reference and the gauge are added.
    """
    networks = list(networks)
    if not networks:
        raise ValueError("networks must have at least one network, got none.")
    if not 0 <= reference < len(networks):
        raise ValueError(f"reference must be the number of one of {len(networks)} networks, got {reference}.")
    if method not in ("weights", "activations"):
        raise ValueError(f"method must be 'weights' or 'activations', got {method!r}.")
    if method == "activations" and batches is None:
        raise ValueError("method='activations' needs batches of inputs; pass batches=...")
    _check_count(max_rounds=max_rounds)
    _check(symmetry, **{f"network {number}": network for number, network in enumerate(networks)})
    with torch.no_grad():
        gauges = [symmetry.identity() for _ in networks]
        balanced = networks
        if scales and balance:
            forms = [_balanced(symmetry, network) for network in networks]
            balanced, gauges = [form[0] for form in forms], [form[1] for form in forms]
        elements = [symmetry.identity() for _ in networks]
        current = list(balanced)

        def align(number: int, target: nn.Module, begin: Element | None, salt: int) -> None:
            if method == "activations":
                assert batches is not None
                match = activation_matching(symmetry, target, balanced[number], batches, scales=False, signs=signs)
            else:
                match = weight_matching(
                    symmetry,
                    target,
                    balanced[number],
                    scales=False,
                    signs=signs,
                    seed=seed + salt,
                    initial=begin,
                    device=device,
                )
            if begin is None or match.distance_after < parameter_distance(target, current[number]) * (1 - 1e-12):
                elements[number], current[number] = match.element, match.network

        distances = [_spread(current)]
        for number in range(len(networks)):
            if number != reference:
                align(number, balanced[reference], None, 0)
        if _spread(current) > distances[0]:
            # Networks that were aligned better before.
            elements, current = [symmetry.identity() for _ in networks], list(balanced)
        distances.append(_spread(current))
        rounds = 1
        generator = torch.Generator().manual_seed(seed)
        while method == "weights" and len(networks) > 2 and rounds < max_rounds:
            rounds += 1
            for number in torch.randperm(len(networks), generator=generator).tolist():
                if number != reference:
                    mean = average([network for i, network in enumerate(current) if i != number])
                    align(number, mean, elements[number], rounds)
            distances.append(min(_spread(current), distances[-1]))
            if not distances[-1] < distances[-2] * (1 - 1e-9):
                break
        back = symmetry.inverse(gauges[reference])
        merged = symmetry.act(back, average(current), inplace=True)
        totals = [
            symmetry.compose(back, symmetry.compose(element, gauge))
            for element, gauge in zip(elements, gauges, strict=True)
        ]
        return Merged(merged, tuple(totals), rounds, tuple(distances))


def _spread(networks: Sequence[nn.Module]) -> float:
    mean = average(networks)
    return math.sqrt(sum(parameter_distance(network, mean) ** 2 for network in networks) / len(networks))
