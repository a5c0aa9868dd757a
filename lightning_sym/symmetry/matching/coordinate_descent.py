"""Coordinate descent: align a network to a reference within its orbit."""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym._distributed import rank
from lightning_sym.symmetry.arrays import Floats, Ints, along
from lightning_sym.symmetry.distances import inner, squared_difference
from lightning_sym.symmetry.group.assignment import (
    Blocks,
    Chosen,
    CopiedBlocks,
    Gain,
    MatchingGroup,
    Pattern,
    Tables,
    best_assignment,
    best_blocks,
    block_systems,
    copied_blocks,
    matched_groups,
    parts_of,
    within_cells,
)
from lightning_sym.symmetry.group.element import Element, Part
from lightning_sym.symmetry.group.factor import Factor
from lightning_sym.symmetry.matching.balanced import Comparison
from lightning_sym.symmetry.proof import compute_the_same

# The kinds of moves: docs/theory/matching.md, 1.7.
FREEDOM = ("permutations", "blocks", "matrices", "rotations")

# Smaller decreases, relative to the squared distance, are no improvement.
_NEGLIGIBLE = {torch.float64: 1e-12, torch.float32: 1e-7}
# Least decrease, relative to the squared distance, that justifies another rotation of streams: all else is revisited.
_WORTH = 5e-3
_MOST_SWEEPS = 100  # over all groups, in a descent
_MOST_TURNS = 10  # rotations of streams and cells, before all else is assigned again
_ROUNDING = 10.0  # rounding between equal networks, in units of machine epsilon relative to their norm
# If the squared distance exceeds the bound from tensor norms by this factor, networks of one orbit may be unmatched.
_SUSPICIOUS = 1e4
_ALIKE = 1e-4  # on one orbit, norms of tensors agree to rounding; with other seeds they differ by more than this


class Directions:
    """Random directions that represent long rows (Johnson and Lindenstrauss 1984).

    Inner products along them differ from the exact ones by about the norms over the root of their number.

    Args:
        count: The number of directions.
        seed: Their seed.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self._generator = count, torch.Generator().manual_seed(seed)

    def along(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of two matrices along the directions; as they are if they are short.

        Args:
            ours: Shape (rows, entries).
            theirs: Shape (rows, entries).
        """
        entries = ours.shape[1]
        if entries <= 2 * self.count:
            return ours, theirs
        drawn = torch.randn(entries, self.count, generator=self._generator).div_(math.sqrt(self.count)).to(ours)
        return ours @ drawn, theirs @ drawn


class Descent:
    """Coordinate descent. Holds the parameters of A and those of the current point of B's orbit.

    Args:
        compared: Both networks: A, the reference, and B, which is aligned.
        signs: Whether signs may change.
        device: Device for the gains, in A's dtypes.
        freedom: A subset of :data:`FREEDOM`: the allowed moves.

    Attributes:
        symmetry: Symmetry of both networks.
        target: A's parameters, by name.
        current: Parameters of the current point of B's orbit, by name.
        element: Maps B to that point.
        groups: The groups to assign.
        systems: The blocks to permute.
        copies: The blocks of copies to permute inside blocks.
        directions: Random directions that represent long slices in gains; None for exact gains.
        signs: Whether signs may change.
        signs_help: Whether some assignment would have been another one with signs, where these must not change.
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
        self.groups = matched_groups(symmetry.factors, symmetry.groups, symmetry.shapes)
        self.systems = block_systems(symmetry.structure, self.groups) if "blocks" in self.freedom else []
        self.copies = copied_blocks(symmetry.structure) if "blocks" in self.freedom else []
        self.signs_help = bool(self.systems) and any(own.signs.size for own in self.groups)  # blocks: not looked at
        self._held: set[int] = set()  # groups that keep their assignment
        self._kept_signs: dict[int, set[int]] = {}  # by group, columns of signs that must not be flipped separately
        # By weight, the biases that absorb flips of its columns.
        self._absorbing: dict[str, list[str]] = {}
        for bias, weight, _, _ in symmetry.structure.absorbed:
            self._absorbing.setdefault(weight, []).append(bias)
        self.target = compared.target(device)
        self.current: dict[str, Tensor] = {}
        self._squares: dict[str, float] = {}
        self.element = self.identity = symmetry.identity()
        self.restart(self.identity)
        # By group, factors that mix its units once all else has settled.
        self.late: dict[int, list[Factor[Any]]] = {}
        self._settled: dict[int, frozenset[int]] = {}  # by group, columns of signs that are not searched
        self.open_signs: list[Ints] = []
        self.directions: Directions | None = None
        for factor in symmetry.factors:
            for index in [group.index for group in self.groups] if factor.late and factor.freedom in freedom else ():
                if factor.able(index, self.current):
                    self.late.setdefault(index, []).append(factor)
                    if (settled := factor.settled_signs(index, self.target, self.current)) is not None:
                        self._settled[index] = settled
        both = [math.fsum(inner(t, t) for t in tensors.values()) for tensors in (self.target, self.current)]
        self._half: float = sum(both) / 2
        dtypes = {tensor.dtype for tensor in self.current.values()}
        self._negligible = max((_NEGLIGIBLE[dtype] for dtype in dtypes), default=0.0)
        self._rounding = max((_ROUNDING * torch.finfo(dtype).eps for dtype in dtypes), default=0.0) * math.sqrt(both[0])
        # By group, those with gains that depend on its permutation; includes the group itself if it indexes two axes.
        self._neighbours = {
            g.index: {h.index for h in self.groups if h.tensors & g.tensors and (h is not g or g.quadratic)}
            for g in self.groups
        }

    def _square(self, name: str, tensor: Tensor) -> float:
        # Differences are exact where both are nearly equal; inner products would lose half of the digits.
        return squared_difference(self.target[name], tensor)

    @property
    def squared_distance(self) -> float:
        """The squared distance between A's parameters and the current ones."""
        return math.fsum(self._squares.values())

    def squared_distance_outside(self, names: Collection[str]) -> float:
        """Return the part of the squared distance in all other parameters than the named ones."""
        return math.fsum(square for name, square in self._squares.items() if name not in names)

    @property
    def settled(self) -> bool:
        """Whether only rounding is left of the distance, so that no move counts as an improvement."""
        return self.squared_distance <= self._rounding**2

    @property
    def objective(self) -> float:
        """Inner product of A's parameters with the current ones, minus half the growth of their squared norm."""
        return self._half - self.squared_distance / 2

    def _no_improvement(self, square: float) -> float:
        """Return the largest decrease of a squared distance that may be rounding."""
        return self._negligible * square + self._rounding * math.sqrt(square) + self._rounding**2

    def suspicious(self, element: Element) -> bool:
        """Return whether a point of B's orbit may be far from A although both networks are (nearly) of one orbit.

        This requires a distance far above rounding. In addition, norms of tensors, which hardly any move changes, must
        suggest a much smaller one, or both networks must compute the same function. A point near A is never suspicious.
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
        # Overall and one by one: before batch norms, most balanced norms are the same for all networks.
        alike = all(abs(one - two) <= _ALIKE * (1 + 30 / math.sqrt(n)) * (one + two) for one, two, n in norms if n)
        if alike and least <= _ALIKE**2 * 2 * self._half:
            return self.squared_distance > _SUSPICIOUS * (least + self._rounding**2)
        return compute_the_same(self.compared.symmetry.examples, self.compared.a, self.compared.b)

    def restart(self, element: Element) -> None:
        """Continue from another point of B's orbit."""
        if self.current and element is self.element:
            return
        self.element = element
        start = self.compared.start(self.device, None if element is self.identity else element)
        for name in start:
            self.current[name] = tensor = start[name]
            self._squares[name] = self._square(name, tensor)

    def restart_nearer(self, element: Element) -> None:
        """Continue from another point of B's orbit, if that is nearer to A than the current one."""
        here, square = self.element, self.squared_distance
        self.restart(element)
        if square < self.squared_distance:
            self.restart(here)

    def allow_signs(self) -> bool:
        """Let signs change from now on; return whether that can bring the networks nearer to each other."""
        self.signs = True
        return self.signs_help or self.improve_alone(every=False)

    def hold(self, cells: Mapping[int, tuple[Ints, ...]], signs: Mapping[int, set[int]]) -> None:
        """Keep some groups fixed.

        Args:
            cells: By group index, the units that may still be permuted with one another.
            signs: By group index, the columns of its sign table that must not be flipped.
        """
        self._held = {index for index, free in cells.items() if not free}
        for index, free in cells.items():
            self.groups[index] = replace(self.groups[index], cells=free)
        self.systems = [s for s in self.systems if not cells.keys() & s.groups.keys()]
        self.copies = [own for own in self.copies if own.alone or not cells.keys() & own.orbits]
        self._kept_signs = dict(signs)

    def _moved(self, element: Element, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        # Factors that act between gains need these, which may belong to other groups (heads share them).
        acting = [own for own in self.symmetry.factors if own.gains and not own.is_identity(element.parts[own.name])]
        gains = {name for own in acting for name in own.gains}
        wanted = dict.fromkeys(names)
        moved = self.symmetry.acted(
            element, {name: tensors[name] for name in {**wanted, **dict.fromkeys(gains)}}, shifts=False
        )
        return {name: moved[name] for name in wanted}

    # Gains.

    def gain(
        self, group: MatchingGroup, current: Mapping[str, Tensor] | None = None, names: Collection[str] | None = None
    ) -> Gain:
        """Return the gain of each pair of units of a group, with all other groups fixed.

        Args:
            group: The group.
            current: Parameters of B; by default the current ones.
            names: Parameters that count; by default all.
        """
        return self._gain_of(group, self._products(group, self.current if current is None else current, names))

    def _gain_of(self, group: MatchingGroup, parts: Mapping[Pattern, Tensor]) -> Gain:
        return Gain(parts, self.signs and group.index not in self._settled, group.shared)

    def _products(
        self, group: MatchingGroup, current: Mapping[str, Tensor], names: Collection[str] | None
    ) -> dict[Pattern, Tensor]:
        """Return the inner products of units, by the signs that act on their entries; see :meth:`gain`."""
        size = len(group.units)
        parts: dict[Pattern, Tensor] = {}
        for pattern, slices in group.slices.items():
            for part in slices if names is None else [own for own in slices if own.tensor in names]:
                ours, theirs = (part.of(tensors[part.tensor], size) for tensors in (self.target, current))
                if self.directions is not None:
                    ours, theirs = self.directions.along(ours, theirs)
                if pattern not in parts:
                    parts[pattern] = ours @ theirs.T
                elif parts[pattern].dtype == ours.dtype:
                    parts[pattern].addmm_(ours, theirs.T)
                else:  # functions of weights are in double precision
                    parts[pattern] = parts[pattern] + ours @ theirs.T
        for joint in group.joints if names is None else ():
            own = joint.of(self.target[joint.tensor]) @ joint.of(current[joint.tensor]).T
            index = torch.from_numpy(joint.members).to(own.device)
            total = parts.setdefault(joint.pattern, torch.zeros(size, size, dtype=own.dtype, device=own.device))
            total.index_put_((index[:, None], index[None, :]), own.to(total), accumulate=True)
        return parts

    def pair_gains(self, group: MatchingGroup, gain: Gain) -> dict[tuple[int, str], Tensor]:
        """Return the mixers' gains for pairs of units of a group, with all other groups fixed."""

        def gained(mixer: Factor[Any], part: Part | None) -> Tensor:
            if part is None:
                return gain.plain()
            moved = self._moved(self._element({mixer.name: part}), self.current, group.tensors)
            return self.gain(group, {**self.current, **moved}).plain()

        return {
            (group.index, mixer.name): mixer.pair_gains(group.index, functools.partial(gained, mixer))
            for mixer in group.mixers
        }

    # Moves.

    def _element(self, parts: Mapping[str, Part]) -> Element:
        return self.symmetry.identity().replaced(**parts)

    def attempt(self, parts: Mapping[str, Part], tensors: Iterable[str]) -> bool:
        """Apply parts that change the named tensors, if this reduces the distance; return whether it did."""
        element = self._element(parts)
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

    def parts_of(self, chosen: Mapping[int, Chosen], *moved: Ints) -> dict[str, Part]:
        """Return the parts that apply assignments; `moved` holds the places of further units, and these units."""
        return parts_of(self.symmetry.factors, self.groups, chosen, *moved)

    def _improve_group(self, group: MatchingGroup) -> bool:
        """Assign a group's units, or rotate them."""
        if self.settled:
            return False
        if self._mix(group, [mixer for mixer in group.mixers if mixer.freedom in self.freedom]):
            return True
        return group.assigned and "permutations" in self.freedom and self._assign(group)

    def _assign(self, group: MatchingGroup, names: Collection[str] | None = None) -> bool:
        """Assign a group's units by the gains of all parameters, or of the named ones."""
        parts = self._products(group, self.current, names)
        if not parts:
            return False
        tables = Tables(self._gain_of(group, parts))
        chosen = within_cells(group, tables)
        if not (self.signs or self.signs_help) and any(parts):
            signed = Tables(Gain(parts, signs=True, shared=group.shared))
            alike = all(torch.equal(own, tables.totals[0]) for own in signed.totals)
            other = chosen if alike else within_cells(group, signed)
            flips = any(bool((own < 0).any()) for own in other.signs.values())
            self.signs_help = flips or not np.array_equal(other.source, chosen.source)
        del parts, tables
        return chosen.moves and self.attempt(self.parts_of({group.index: chosen}), group.tensors)

    def pass_forward(self) -> None:
        """Assign groups in the order of the layers, each by parameters with all other axes aligned.

        Unaligned axes add only noise to a group's gains: with them, descents end later and farther away. Units that are
        mixed, and blocks, are assigned in sweeps only.
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
        waiting = [g for g in self.groups if g.alone and g.tensors and g.index not in within | self._held]
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

    def permute_blocks(self) -> None:
        """Permute the blocks of each system, with optimal assignments of their members."""
        for system in self.systems:
            self._improve_blocks(system)

    def _mix_late(self, indices: Sequence[int]) -> set[int]:
        """Mix some groups' units, and the cells that read and write them, in turn while the gain is large enough.

        Returns:
            The groups that changed.
        """
        moved: set[int] = set()
        for _ in range(_MOST_TURNS):
            before = self.squared_distance
            turned = {index for index in indices if self._mix(self.groups[index], self.late[index])}
            near = set().union(*(self._neighbours[index] for index in turned))
            others = (self.groups[index] for index in sorted(near - self._held))
            moved |= turned | {g.index for g in others if not g.assigned and self._improve_group(g)}
            if not self.squared_distance <= (1 - _WORTH) * before or before == 0:
                break
        return moved

    def mix_cells(self) -> None:
        """Mix all units that are not assigned, without permuting others."""
        for group in self.groups:
            if not group.assigned:
                self._improve_group(group)

    def _mix(self, group: MatchingGroup, mixers: Iterable[Factor[Any]]) -> bool:
        """Apply the optimal parts of some factors to a group's units."""
        improved = False
        for mixer in mixers:
            part = mixer.best_match(self.target, self.current, group.index)
            if part is not None:
                improved |= self.attempt({mixer.name: part}, group.tensors)
        return improved

    def _improve_blocks(self, system: Blocks) -> bool:
        """Permute blocks, with optimal assignments of their members."""
        if self.settled:
            return False
        groups = system.groups
        gains = {index: self.gain(group) for index, group in groups.items()}
        if not all(gain.parts for gain in gains.values()):
            return False
        tables = {index: Tables(gain) for index, gain in gains.items() if groups[index].alone}
        raw = {key: own for i, group in groups.items() for key, own in self.pair_gains(group, gains[i]).items()}
        mixing = "matrices" in self.freedom
        order, chosen = best_blocks(system, tables, raw, mixing=mixing)
        if np.array_equal(order, np.arange(system.count)):
            return False
        parts = {**self.symmetry.identity().parts, **self.parts_of(chosen, system.slots, system.slots[order])}
        for group, places in system.kinds if mixing else ():
            for mixer in group.mixers:
                table = raw[group.index, mixer.name]
                parts[mixer.name] = mixer.mixing_blocks(parts[mixer.name], table, group.units, places, order)
        return self.attempt(parts, frozenset().union(*(group.tensors for group in groups.values())))

    def _improve_copies(self, own: CopiedBlocks) -> bool:
        """Permute blocks of copies inside their block."""
        if self.settled:
            return False
        gains, tensors = own.gains(self.symmetry.structure, self.target, self.current)
        order = best_assignment(gains)
        if np.array_equal(order, np.arange(len(order))):
            return False
        parts = {**self.symmetry.identity().parts, **self.parts_of({}, own.table, own.table[order])}
        return self.attempt(parts, tensors)

    def improve_alone(self, *, every: bool = True) -> bool:
        """Let factors try additional steps; signs only where assignments miss some, or with `every`."""
        if self.settled:
            return False
        columns = [
            (group, k, column) for group in self.groups if group.assigned for k, column in enumerate(group.signs.T)
        ]
        loose = every or any(k not in group.free + group.shared for group, k, _ in columns)
        self.open_signs = [
            column
            for group, k, column in columns
            if self.signs and loose
            if k not in self._settled.get(group.index, ()) and k not in self._kept_signs.get(group.index, ())
        ]
        improved = [factor.improve(self) for factor in self.symmetry.factors]  # no short-circuit
        return any(improved)

    def slopes(self, acting: sparse.csc_matrix) -> tuple[list[str], Floats]:
        """Return the tensors flipped by generators (columns of `acting`), and the inner products there by generator."""
        entries = acting.tocoo()
        order = np.argsort(entries.row, kind="stable")
        rows, columns, values = entries.row[order], entries.col[order], entries.data[order]
        slopes = np.zeros(acting.shape[1])
        names = []
        for slot in self.symmetry.structure.slots:
            lo, hi = np.searchsorted(rows, (slot.offset, slot.offset + slot.size))
            if lo == hi or slot.tensor not in self.current:
                continue
            names.append(slot.tensor)
            products = along(self.target[slot.tensor] * self.current[slot.tensor], slot.axes).reshape(-1)
            products = values[lo:hi] * products[rows[lo:hi] - slot.offset]
            slopes += np.bincount(columns[lo:hi], products, acting.shape[1])
        return list(dict.fromkeys(names)), slopes

    # Sweeps.

    def sweeps(self, generator: torch.Generator, most: int = _MOST_SWEEPS) -> Iterator[float]:
        """Sweep over all groups until nothing improves.

        Args:
            generator: Generator for the order of groups.
            most: Maximum number of sweeps.

        Yields:
            The objective after each sweep.
        """
        able = {g.index for g in self.groups if g.movable or g.free or g.shared or g.mixers} - self._held
        dirty = set(able)
        dirty_systems = set(range(len(self.systems)))
        turning = set(self.late) & able

        def touch(indices: set[int]) -> None:
            near = set().union(*(self._neighbours[index] for index in indices))
            dirty.update(near & able)
            turning.update((near | indices) & able & set(self.late))
            dirty_systems.update(n for n, system in enumerate(self.systems) if (near | indices) & set(system.groups))

        last = math.inf  # squared distance at the last rotation of streams
        for _ in range(most):
            if not (dirty or dirty_systems):
                now = self.squared_distance
                if not turning or not now <= (1 - _WORTH) * last:
                    return
                # Late factors come last: before they act, assignments can still recognise units.
                touch(self._mix_late(sorted(turning)))
                turning -= set(self.late)
                last = now
                yield self.objective
                continue
            for number in sorted(dirty_systems):
                dirty_systems.discard(number)
                if self._improve_blocks(self.systems[number]):
                    touch(set(self.systems[number].groups))
                    dirty.update(able & set(self.systems[number].groups))
            improved = [self._improve_copies(own) for own in self.copies]
            if any(improved):
                dirty.update(able)
                dirty_systems.update(range(len(self.systems)))
            order = torch.randperm(len(self.groups), generator=generator).tolist()
            # Mixed groups come last: before, assignments can still recognise units.
            for index in sorted(order, key=lambda index: not self.groups[index].assigned):
                if index in dirty:
                    dirty.discard(index)
                    if self._improve_group(self.groups[index]):
                        touch({index})
            if self.improve_alone(every=False):
                dirty.update(able)
            yield self.objective


@dataclass(frozen=True, eq=False)
class Descended:
    """The best of several descents.

    Attributes:
        element: Maps B to the best point of its orbit that was found.
        objective: The objective before and after every sweep of the best descent.
        sweeps: Number of sweeps of the best descent.
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
    initial: Element | None = None,
    known: Element | None = None,
    turned: bool = True,
    max_sweeps: int = _MOST_SWEEPS,
    progress: bool = False,
) -> Descended:
    """Descend several times; for the arguments see :func:`lightning_sym.symmetry.weight_matching`.

    With ``turned=False`` cells are rotated before anything else, for a start that is aligned except inside them. The
    first descent continues from `known` where this is nearer to A than the result of its first pass.
    """
    from rich.progress import Progress  # slow to import

    symmetry = descent.symmetry
    histories: list[tuple[Element, list[float]]] = []
    with Progress(disable=not progress or rank() > 0) as bar:
        task = bar.add_task("matching", total=restarts * max_sweeps)
        for number in range(restarts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            start = descent.identity
            if initial is not None:
                start = start.replaced(**{own.name: own.rigid(initial.parts[own.name]) for own in symmetry.factors})
            elif number:
                start = symmetry.sample(generator, scale=0.0, signs=False, mixing=False, shifts=False)
            descent.restart(start)
            history = [descent.objective]
            if not turned:
                descent.mix_cells()
            if initial is None and not number:
                descent.pass_forward()
                if known is not None:
                    descent.restart_nearer(known)
            for objective in descent.sweeps(generator, max_sweeps):
                history.append(objective)
                sweep = len(history) - 1
                text = f"matching: restart {number + 1}, sweep {sweep}, objective {objective:.6g}"
                bar.update(task, completed=number * max_sweeps + sweep, description=text)
            histories.append((descent.element, history))
        bar.update(task, completed=restarts * max_sweeps)
    element, history = max(histories, key=lambda found: found[1][-1])
    return Descended(element, tuple(history), len(history) - 1, tuple(history[-1] for _, history in histories))
