"""Coordinate descent on the inner product of one network's parameters with those of a member of another's orbit."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from rich.progress import Progress
from scipy import sparse
from torch import Tensor

from lightning_sym._distributed import rank
from lightning_sym._linear_algebra import polar_factor
from lightning_sym.symmetry.arrays import Floats, Ints, along
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.streams import rotatable
from lightning_sym.symmetry.matching.assignment_costs import (
    Chosen,
    Gain,
    MatchingGroup,
    Pattern,
    Tables,
    best_assignment,
    flips,
    matched_groups,
    within_cells,
)
from lightning_sym.symmetry.matching.balanced import Comparison, inner, squared_difference
from lightning_sym.symmetry.matching.half_turns import gains_of_half_turns, reflected
from lightning_sym.symmetry.proof import compute_the_same

# Which moves there are: docs/theory/matching.md, 1.7.
FREEDOM = ("permutations", "blocks", "matrices", "rotations")

# Relative to the squared distance: what is smaller is no improvement.
_NEGLIGIBLE = {torch.float64: 1e-12, torch.float32: 1e-7}
# Of the squared distance: what turning streams again has to win, as everything else has to be looked at again then.
_WORTH = 5e-3
_MOST_TURNS = 10  # of streams and cells, before all else is assigned again
_ROUNDING = 10.0  # so many units of rounding may be between equal networks, relative to their norm
# Squared distances this many times larger than norms of tensors call for: two networks of one orbit may not be matched.
_SUSPICIOUS = 1e4
_ALIKE = 1e-4  # norms of tensors on one orbit agree to rounding; those of networks from two seeds differ more than that


@dataclass
class Blocks:
    """Blocks that change places as wholes.

    Attributes:
        kinds: For each kind of member (units of one cell of a group in each block): the group, and the members' places
            in it. Each of shape (blocks, members).
        count: The number of blocks.
        slots: The members that stand for copies of units. Shape (blocks, slots).
    """

    kinds: list[tuple[MatchingGroup, Ints]]
    count: int
    slots: Ints

    @property
    def groups(self) -> dict[int, MatchingGroup]:
        """The groups by their numbers."""
        return {group.index: group for group, _ in self.kinds}


def block_systems(symmetry: Symmetry, groups: list[MatchingGroup]) -> list[Blocks]:
    """Return the symmetry's systems of blocks."""
    structure = symmetry.structure
    orbit_and_cell = np.full((structure.units, 2), -1)
    for group in groups:
        orbit_and_cell[group.units, 0] = group.index
        orbit_and_cell[group.units, 1] = structure.cells[group.index]
    systems = []
    for table in structure.blocks:
        slots = table[:, orbit_and_cell[table[0], 0] < 0]
        if slots.shape == table.shape:  # blocks of copies inside of blocks
            continue
        keys = [tuple(pair) for pair in orbit_and_cell[table[0]].tolist()]
        kinds = []
        for key in dict.fromkeys(key for key in keys if key[0] >= 0):
            group = groups[key[0]]
            members = table[:, [other == key for other in keys]]
            kinds.append((group, np.searchsorted(group.units, members)))
        systems.append(Blocks(kinds, len(table), slots))
    return systems


def best_blocks(
    system: Blocks, tables: Mapping[int, Tables], raw: Mapping[int, Tensor], *, mixing: bool = True
) -> tuple[Ints, dict[int, Chosen]]:
    """Return which block comes to which place, and for each group which of its units come to the places.

    The gain of a block at a place is that of the best assignment of its members; dense members count with the nuclear
    norm, what the best rotation gives, and planes with the modulus of the complex gain, what the best phase gives; both
    as they are without `mixing`.
    """
    count = system.count
    total = np.zeros((count, count))
    for group, places in system.kinds:
        index = torch.from_numpy(places)
        if group.dense:
            matrix = raw[group.index].double().cpu()
            pairs = matrix[index[:, None, :, None], index[None, :, None, :]]
            gained = torch.linalg.svdvals(pairs) if mixing else pairs.diagonal(dim1=-2, dim2=-1)
            total += gained.sum(-1).numpy()
            continue
        if group.phase:
            planes = raw[group.index].cpu()[index[:, None], index[None]]
            total += (planes.abs() if mixing else planes.real).sum(-1).numpy()
            continue
        for new, old in itertools.product(range(count), repeat=2):
            total[new, old] += tables[group.index].best(places[new], places[old])[0]
    order = best_assignment(total)
    chosen: dict[int, Chosen] = {}
    for group, places in system.kinds:
        own = chosen.setdefault(group.index, Chosen(np.arange(len(group.units)), {}))
        for new, old in enumerate(order):
            if group.dense or group.phase:
                own.source[places[new]] = places[old]
            else:
                tables[group.index].put(own, places[new], places[old])
    return order, chosen


class Descent:
    """Coordinate descent. Holds the parameters of A and those of the current member of B's orbit.

    Args:
        compared: Both networks as they are compared: A, the reference, and B, which is moved.
        signs: Whether signs may change.
        device: Where gains are computed, in A's dtypes.
        freedom: Some of :data:`FREEDOM`: which moves there are.

    Attributes:
        symmetry: Symmetry of both.
        target: A's parameters, by name.
        current: Those of the current member of B's orbit.
        element: Brings B there.
        groups: What there is to be assigned.
        systems: What blocks change places.
    """

    def __init__(
        self,
        compared: Comparison,
        *,
        signs: bool,
        device: torch.device,
        freedom: Collection[str] = FREEDOM,
    ) -> None:
        self.compared, self.device = compared, device
        self.symmetry = symmetry = compared.symmetry
        self.signs = signs
        self.freedom = frozenset(freedom)
        self.groups = matched_groups(symmetry)
        self.systems = block_systems(symmetry, self.groups) if "blocks" in self.freedom else []
        self._held: set[int] = set()  # the groups that keep their assignment
        self._kept_signs: dict[int, set[int]] = {}  # by group, the columns of signs that are not to be flipped alone
        # By weight, the biases that take up what flips of its columns add.
        self._absorbing: dict[str, list[str]] = {}
        for bias, weight, _, _ in symmetry.structure.absorbed:
            self._absorbing.setdefault(weight, []).append(bias)
        self.target = compared.target(device)
        self.current: dict[str, Tensor] = {}
        self._squares: dict[str, float] = {}
        self.element = self.identity = symmetry.identity()
        self.restart(self.identity)
        # By group, the numbers of the rotations that may be chosen; emptied where they are given.
        self.rotations: dict[int, list[int]] = {}
        for index in rotatable(symmetry.structure, self.current) if "rotations" in self.freedom else ():
            self.rotations.setdefault(symmetry.structure.rotations[index].orbit, []).append(index)
        self._settled_signs = self._positive_gains()
        both = [math.fsum(inner(t, t) for t in tensors.values()) for tensors in (self.target, self.current)]
        self._half: float = sum(both) / 2
        dtypes = {tensor.dtype for tensor in self.current.values()}
        self._negligible = max((_NEGLIGIBLE[dtype] for dtype in dtypes), default=0.0)
        self._rounding = max((_ROUNDING * torch.finfo(dtype).eps for dtype in dtypes), default=0.0) * math.sqrt(both[0])
        # By group, those whose gains change with its units' places: its own, too, if it stands on two axes at once.
        self._neighbours = {
            g.index: {h.index for h in self.groups if h.tensors & g.tensors and (h is not g or g.quadratic)}
            for g in self.groups
        }

    def _positive_gains(self) -> set[int]:
        """Return the groups whose gains are positive in both networks, so that no sign in front of a gain is sought."""
        structure = self.symmetry.structure
        return {
            group
            for group, indices in self.rotations.items()
            if all(
                bool((tensors[name].reshape(-1)[torch.from_numpy(at).to(tensors[name].device)] > 0).all())
                for tensors in (self.target, self.current)
                for index in indices
                for name, at in structure.rotations[index].gains
            )
        }

    def _square(self, name: str, tensor: Tensor) -> float:
        # Of the difference, which is exact where both are nearly equal; in inner products half of the digits are lost.
        return squared_difference(self.target[name], tensor)

    @property
    def squared_distance(self) -> float:
        """The square of the distance of A's parameters and the current ones."""
        return math.fsum(self._squares.values())

    @property
    def objective(self) -> float:
        """The inner product of A's parameters with the current ones, less half of what their square has grown."""
        return self._half - self.squared_distance / 2

    def _no_improvement(self, square: float) -> float:
        """Return by how much a squared distance has to fall, that it is not rounding."""
        return self._negligible * square + self._rounding * math.sqrt(square) + self._rounding**2

    def suspicious(self, element: Element) -> bool:
        """Whether a member of B's orbit may be far from A although both networks are of one orbit, or nearly so.

        It is much farther than rounding, and norms of tensors, which hardly any move changes, ask for much less;
        or both networks compute the same. A member that is near says by itself that nothing is missed.
        """
        if not self.signs or self.freedom != set(FREEDOM):
            return False
        self.restart(element)
        if self.squared_distance <= _SUSPICIOUS * self._rounding**2:
            return False
        norms = [
            (float(self.target[name].norm()), float(own.norm()), own.numel()) for name, own in self.current.items()
        ]
        least = math.fsum((one - two) ** 2 for one, two, _ in norms)
        # In all, and one by one: where batch norms follow, most of the norms are the same for all networks, balanced.
        alike = all(abs(one - two) <= _ALIKE * (1 + 30 / math.sqrt(n)) * (one + two) for one, two, n in norms if n)
        if alike and least <= _ALIKE**2 * 2 * self._half:
            return self.squared_distance > _SUSPICIOUS * (least + self._rounding**2)
        return compute_the_same(self.compared.symmetry.examples, self.compared.a, self.compared.b)

    def restart(self, element: Element) -> None:
        """Begin again at a member of B's orbit."""
        if self.current and element is self.element:
            return
        self.element = element
        start = self.compared.start(self.device, None if element is self.identity else element)
        for name in start:
            self.current[name] = tensor = start[name]
            self._squares[name] = self._square(name, tensor)

    def hold(self, cells: Mapping[int, tuple[Ints, ...]], signs: Mapping[int, set[int]]) -> None:
        """Keep some groups as they are.

        Args:
            cells: By the group's number, the units of it that may yet change places with one another.
            signs: By the group's number, the columns of its table of signs that are not to be flipped.
        """
        self._held = {index for index, free in cells.items() if not free}
        for index, free in cells.items():
            self.groups[index] = replace(self.groups[index], cells=free)
        self.systems = [s for s in self.systems if not cells.keys() & s.groups.keys()]
        self._kept_signs = dict(signs)

    def _moved(self, element: Element, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        # Rotations act between gains, which may belong to other groups (heads share them).
        turned = any(len(turn) for turn in element.rotation)
        gains = {name for own in self.symmetry.structure.rotations for name, _ in own.gains if turned}
        wanted = dict.fromkeys(names)
        moved = self.symmetry.acted(
            element, {name: tensors[name] for name in {**wanted, **dict.fromkeys(gains)}}, shifts=False
        )
        return {name: moved[name] for name in wanted}

    # Gains.

    def gain(
        self, group: MatchingGroup, current: Mapping[str, Tensor] | None = None, names: Collection[str] | None = None
    ) -> Gain:
        """Return the gain of each permutation of a group's units, with all other groups fixed.

        Args:
            group: The group.
            current: The parameters of B; by default the current ones.
            names: The parameters that count; by default all.
        """
        current = self.current if current is None else current
        size = len(group.units)
        parts: dict[Pattern, Tensor] = {}
        for pattern, slices in group.slices.items():
            for part in slices if names is None else [own for own in slices if own.tensor in names]:
                ours, theirs = (part.of(tensors[part.tensor], size) for tensors in (self.target, current))
                if pattern in parts:
                    parts[pattern].addmm_(ours, theirs.T)
                else:
                    parts[pattern] = ours @ theirs.T
        for joint in group.joints if names is None else ():
            own = joint.of(self.target[joint.tensor]) @ joint.of(current[joint.tensor]).T
            index = torch.from_numpy(joint.members).to(own.device)
            total = parts.setdefault(joint.pattern, torch.zeros(size, size, dtype=own.dtype, device=own.device))
            total.index_put_((index[:, None], index[None, :]), own, accumulate=True)
        return Gain(parts, self.signs and group.index not in self._settled_signs, group.shared)

    def plane_gain(self, group: MatchingGroup) -> Tensor:
        """Return the gain of each permutation of rotary pairs, with all other groups fixed.

        Returns:
            Complex numbers z; a rotation by an angle has the gain Re(z exp(-i angle)). Shape (planes, planes),
            complex128.
        """
        structure = self.symmetry.structure
        phase = torch.zeros(structure.phases, dtype=torch.float64)
        phase[torch.from_numpy(structure.phase_of[group.units])] = math.pi / 2
        turned = self._moved(self.symmetry.identity().replaced(phase=phase), self.current, group.tensors)
        real, imaginary = (self.gain(group, {**self.current, **tensors}).plain() for tensors in ({}, turned))
        return torch.complex(real.double(), imaginary.double())

    # Moves.

    def _try(self, element: Element, tensors: Iterable[str]) -> bool:
        """Make a move, which changes these tensors, if it is an improvement."""
        names = dict.fromkeys(name for name in tensors if name in self.current)
        names |= dict.fromkeys(bias for name in names for bias in self._absorbing.get(name, ()))
        moved = self._moved(element, self.current, names)
        squares = {name: self._square(name, tensor) for name, tensor in moved.items()}
        won = math.fsum(self._squares[name] - square for name, square in squares.items())
        if not won > self._no_improvement(math.fsum(self._squares[name] for name in squares)):
            return False
        self.current.update(moved)
        self._squares.update(squares)
        self.element = self.symmetry.compose(element, self.element)
        return True

    def element_of(self, chosen: Mapping[int, Chosen]) -> Element:
        """Return the element that brings the chosen units to their places."""
        element = self.symmetry.identity()
        for index, own in chosen.items():
            units = self.groups[index].units
            element.permutation[torch.from_numpy(units)] = torch.from_numpy(units[own.source])
            table = self.symmetry.structure.sign_table[index]
            for k, sign in own.signs.items():
                element.sign[torch.from_numpy(table[own.source, k])] = torch.from_numpy(sign)
        return element

    def _improve_group(self, group: MatchingGroup) -> bool:
        """Assign a group's units, or turn them."""
        if (group.dense or group.phase) and "matrices" in self.freedom and self._mix(group, ("dense", "phase")):
            return True
        if group.dense:
            return False
        if "permutations" not in self.freedom:
            return False
        return self._assign(group)

    def _assign(self, group: MatchingGroup, names: Collection[str] | None = None) -> bool:
        """Assign a group's units by the gains of all parameters, or of some."""
        gain = self.gain(group, names=names)
        if not gain.parts:
            return False
        chosen = within_cells(group, Tables(gain))
        del gain
        return chosen.moves and self._try(self.element_of({group.index: chosen}), group.tensors)

    def pass_forward(self) -> None:
        """Assign groups in the order of the layers, each by the parameters on which all others are assigned already.

        What stands on other axes in another order tells nothing of a group: with it, descents end farther away, and
        later. Cells that matrices mix, planes and blocks are assigned in sweeps only.
        """
        if "permutations" not in self.freedom:
            return
        standing: dict[str, dict[int, set[tuple[int, ...]]]] = {name: {} for name in self.current}
        for group in self.groups:
            for part in itertools.chain(*group.slices.values()):
                standing[part.tensor].setdefault(group.index, set()).add(part.axes)
            for joint in group.joints:
                standing[joint.tensor].setdefault(group.index, set()).add((0, 1))
        layer = {name: number for number, name in enumerate(self.current)}
        within = {index for system in self.systems for index in system.groups}
        waiting = [
            g for g in self.groups if not (g.dense or g.phase or g.index in within | self._held or not g.tensors)
        ]
        waiting.sort(key=lambda group: min(layer[name] for name in group.tensors))
        unknown = {group.index for group in self.groups} - self._held
        while waiting:
            for group in waiting:
                names = [n for n in group.tensors if standing[n].keys() & unknown == {group.index}]
                names = [n for n in names if len(standing[n][group.index]) == 1]
                if names:
                    break
            else:
                return
            waiting.remove(group)
            unknown.discard(group.index)
            self._assign(group, names)

    def _turn_streams(self, indices: Sequence[int]) -> set[int]:
        """Rotate some groups' streams, and the cells that read and write them, in turn while that is worth while.

        Returns:
            The groups that have moved.
        """
        moved: set[int] = set()
        for _ in range(_MOST_TURNS):
            before = self.squared_distance
            turned = {index for index in indices if self._mix(self.groups[index], ("rotation",))}
            near = set().union(*(self._neighbours[index] for index in turned))
            cells = {
                i for i in sorted(near - self._held) if self.groups[i].dense and self._improve_group(self.groups[i])
            }
            moved |= turned | cells
            if not self.squared_distance <= (1 - _WORTH) * before or before == 0:
                break
        return moved

    def turn_cells(self) -> None:
        """Turn dense cells, all units where they are."""
        for group in self.groups:
            if group.dense:
                self._improve_group(group)

    def _mix(self, group: MatchingGroup, names: Iterable[str]) -> bool:
        """Let some factors act on a group's units, where they are, as brings the networks nearest."""
        improved = False
        for name in names:
            part = self.symmetry.factors[name].best_match(self.target, self.current, group.index)
            if part is not None:
                improved |= self._try(self.symmetry.identity().replaced(**{name: part}), group.tensors)
        return improved

    def _improve_blocks(self, system: Blocks) -> bool:
        """Let blocks change places, their members in the best order."""
        groups = system.groups
        gains = {index: self.gain(group) for index, group in groups.items()}
        if not all(gain.parts for gain in gains.values()):
            return False
        tables = {i: Tables(gain) for i, gain in gains.items() if not (groups[i].dense or groups[i].phase)}
        raw = {i: g.parts[()] for i, g in gains.items() if groups[i].dense}
        raw |= {i: self.plane_gain(group) for i, group in groups.items() if group.phase}
        mixing = "matrices" in self.freedom
        order, chosen = best_blocks(system, tables, raw, mixing=mixing)
        if np.array_equal(order, np.arange(system.count)):
            return False
        element = self.element_of(chosen)
        element.permutation[torch.from_numpy(system.slots)] = torch.from_numpy(system.slots[order])
        dense, structure = list(element.dense), self.symmetry.structure
        for group, places in system.kinds if mixing else ():
            if group.phase:
                for new, old in enumerate(order):
                    pairs = raw[group.index].cpu()[torch.from_numpy(places[new]), torch.from_numpy(places[old])]
                    element.phase[torch.from_numpy(structure.phase_of[group.units[places[old]]])] = pairs.angle()
            if group.dense:
                for new, old in enumerate(order):
                    units = group.units[places[old]]
                    cell = int(structure.cell_of[units[0]])
                    rows, columns = (torch.from_numpy(places[i]).to(raw[group.index].device) for i in (new, old))
                    dense[cell] = polar_factor(raw[group.index][rows[:, None], columns[None, :]])
        tensors = frozenset().union(*(group.tensors for group in groups.values()))
        return self._try(element.replaced(dense=tuple(dense)), tensors)

    def improve_signs(self) -> bool:
        """Flip generators of signs, one column of a group's table at a time, where that is an improvement."""
        structure = self.symmetry.structure
        improved = False
        for group in self.groups:
            table = structure.sign_table[group.index]
            for k in range(table.shape[1]):
                if group.dense or k in self._kept_signs.get(group.index, ()) or self._is_settled(group, k):
                    continue
                names, slopes = self._slopes(self.flips[:, table[:, k]])
                flipped = np.unique(table[slopes < 0, k])
                if self._flip(flipped, names):
                    improved = True
                    continue
                # Those that act on common entries: one by one.
                for generator in flipped[:, None]:
                    improved |= self._flip(generator, names)
        return improved

    def improve_half_turns(self) -> bool:
        """Take half turns, alone or with a change of the unit's sign, where that brings networks nearer."""
        turns = self.symmetry.structure.half_turns
        if not (self.signs and len(turns.place)):
            return False
        improved = False
        for with_sign in (False, True):
            acting, sign = self._reflected if with_sign else (turns.flips.tocsc(), None)
            names, slopes = self._slopes(acting)
            gained, step = gains_of_half_turns(turns, self.target, self.current, -1.0 if with_sign else 1.0)
            gained -= 4 * slopes
            if sign is not None:
                gained[sign < 0] = 0.0
            better = np.flatnonzero(gained > 0)
            rest = [better[[at]] for at in np.argsort(-gained[better])] if len(better) > 1 else []
            for chosen in (better, *rest):
                if not len(chosen):
                    break
                element = self.symmetry.identity()
                element.half_turn[torch.from_numpy(chosen)] = torch.from_numpy(step[chosen])
                if sign is not None:
                    element.sign[torch.from_numpy(sign[chosen])] = -1.0
                if self._try(element, [*turns.biases, *names]):
                    improved = True
                    if chosen is better:
                        break
        return improved

    @cached_property
    def _reflected(self) -> tuple[sparse.csc_matrix, Ints]:
        return reflected(self.symmetry.structure, self.flips)

    def _is_settled(self, group: MatchingGroup, column: int) -> bool:
        """Whether the signs in a column of a group's table are those of gains that are positive in both networks."""
        rotations = (self.symmetry.structure.rotations[index] for index in self.rotations.get(group.index, ()))
        return group.index in self._settled_signs and not any(rotation.plain_sign[column] for rotation in rotations)

    def _flip(self, generators: Ints, tensors: Iterable[str]) -> bool:
        element = self.symmetry.identity()
        element.sign[torch.from_numpy(generators)] = -1.0
        return self._try(element, tensors)

    @cached_property
    def flips(self) -> sparse.csc_matrix:
        """Where each generator of signs flips what stands there, by columns; see :func:`flips`."""
        return flips(self.symmetry.structure).tocsc()

    def _slopes(self, acting: sparse.csc_matrix) -> tuple[list[str], Floats]:
        """Return the tensors that generators flip, in columns, and the inner products there, by generator."""
        rows = np.unique(acting.indices)
        slopes = np.zeros(acting.shape[1])
        names = []
        for slot in self.symmetry.structure.slots:
            lo, hi = np.searchsorted(rows, (slot.offset, slot.offset + slot.size))
            if lo == hi or slot.tensor not in self.current:
                continue
            names.append(slot.tensor)
            products = along(self.target[slot.tensor] * self.current[slot.tensor], slot.axes)
            slopes += acting[slot.rows].T @ products.reshape(-1)
        return list(dict.fromkeys(names)), slopes

    # Sweeps.

    def sweeps(self, generator: torch.Generator, most: int) -> Iterator[float]:
        """Sweep over all groups until nothing improves.

        Args:
            generator: Generator for the order of groups.
            most: Most sweeps.

        Yields:
            The objective after each sweep.
        """
        able = {g.index for g in self.groups if g.movable or g.free or g.shared or g.phase} - self._held
        dirty = set(able)
        dirty_systems = set(range(len(self.systems)))
        turning = set(self.rotations) & able
        loose = self.signs and any(
            len(g.free) + len(g.shared) < self.symmetry.structure.sign_table[g.index].shape[1]
            for g in self.groups
            if not g.dense
        )

        def touch(indices: set[int]) -> None:
            near = set().union(*(self._neighbours[index] for index in indices))
            dirty.update(near & able)
            turning.update((near | indices) & able & set(self.rotations))
            dirty_systems.update(n for n, system in enumerate(self.systems) if (near | indices) & set(system.groups))

        last = math.inf  # the squared distance when streams were turned last
        for _ in range(most):
            if not (dirty or dirty_systems):
                now = self.squared_distance
                if not turning or not now <= (1 - _WORTH) * last:
                    return
                # Streams last of all: while they are as they were, assignments can still recognise units.
                touch(self._turn_streams(sorted(turning)))
                turning -= set(self.rotations)
                last = now
                yield self.objective
                continue
            for number in sorted(dirty_systems):
                dirty_systems.discard(number)
                if self._improve_blocks(self.systems[number]):
                    touch(set(self.systems[number].groups))
                    dirty.update(able & set(self.systems[number].groups))
            order = torch.randperm(len(self.groups), generator=generator).tolist()
            # Rotations last: they would spoil what assignments can still recognise.
            for index in sorted(order, key=lambda index: self.groups[index].dense):
                if index in dirty:
                    dirty.discard(index)
                    if self._improve_group(self.groups[index]):
                        touch({index})
            if (loose and self.improve_signs()) | self.improve_half_turns():
                dirty.update(able)
            yield self.objective


@dataclass(frozen=True, eq=False)
class Descended:
    """The best of several descents.

    Attributes:
        element: Brings B to the best member of its orbit that was found.
        objective: Before and after every sweep of the best descent.
        sweeps: Their number.
        restarts: The final objective of every descent.
    """

    element: Element
    objective: tuple[float, ...]
    sweeps: int
    restarts: tuple[float, ...]


def descend(
    descent: Descent,
    *,
    restarts: int,
    seed: int,
    max_sweeps: int,
    initial: Element | None = None,
    turned: bool = True,
    progress: bool = False,
) -> Descended:
    """Descend several times; the arguments are those of :func:`lightning_sym.symmetry.weight_matching`.

    With ``turned=False`` cells are turned before anything else, which has its place where the start has it.
    """
    symmetry = descent.symmetry
    histories: list[tuple[Element, list[float]]] = []
    with Progress(disable=not progress or rank() > 0) as bar:
        task = bar.add_task("matching", total=restarts * max_sweeps)
        for number in range(restarts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            start = descent.identity
            if initial is not None:
                dense = tuple(polar_factor(matrix) for matrix in initial.dense)
                start = start.replaced(permutation=initial.permutation, sign=initial.sign)
                start = start.replaced(dense=dense, rotation=initial.rotation)
                start = start.replaced(phase=initial.phase)
            elif number:
                start = symmetry.sample(generator, scale=0.0, signs=False, mixing=False, shifts=False)
            descent.restart(start)
            history = [descent.objective]
            if not turned:
                descent.turn_cells()
            if initial is None and not number:
                descent.pass_forward()
            for objective in descent.sweeps(generator, max_sweeps):
                history.append(objective)
                sweep = len(history) - 1
                text = f"matching: restart {number + 1}, sweep {sweep}, objective {objective:.6g}"
                bar.update(task, completed=number * max_sweeps + sweep, description=text)
            histories.append((descent.element, history))
        bar.update(task, completed=restarts * max_sweeps)
    element, history = max(histories, key=lambda found: found[1][-1])
    return Descended(element, tuple(history), len(history) - 1, tuple(history[-1] for _, history in histories))
