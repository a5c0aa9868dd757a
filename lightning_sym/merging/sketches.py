r"""Sketches: decide cheaply, from one reading of the weights, whether two networks have their units in one order.

Let :math:`e = b - a`. Exchanging units i and j of ``a`` and ``b`` cannot bring the networks nearer to each other if
:math:`\|a_i - a_j\| \geq \|e_i\| + \|e_j\|`, by the triangle inequality: both :math:`\|a_i - b_j\|` and
:math:`\|a_j - b_i\|` then are at least :math:`\|e_i\|` and :math:`\|e_j\|`. If this holds for all pairs of a group,
the identity is the best assignment of its units. The norms of e are exact; distances of units of ``a`` are estimated
from random signed sums (Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams").
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sym._checks import finite_or_mask
from lightning_sym.symmetry.arrays import together
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.assignment import (
    Joint,
    MatchingGroup,
    Pattern,
    Slices,
    best_assignment,
    block_systems,
    copied_blocks,
    matched_groups,
)
from lightning_sym.symmetry.solving.structure import Slot

# Without a permutation, scales, matrices and rotations must reduce the squared distance below this fraction. Planted
# ones reduce it to 0.06 at most; differences from fine-tuning leave 0.43 at least and are not symmetries.
WORTH = 0.1
# Scales, matrices and rotations are searched only if they may remove at least this fraction of the squared distance.
# Planted ones remove 0.94 or more.
EXPLAINED = 0.8
DIRECTIONS = 64  # signed sums per unit
_FIRST = 16  # of them, which tell most units apart
# Units with at most so many numbers are compared without sums.
_EXACT = 128
# Divides estimated squared distances. A planted exchange needs an estimate eight times too large to pass.
_CAUTION = 2.0
_ROUNDING = 1e-5  # of squared distances in single precision, relative to the squared norms
_AT_ONCE = 2**17  # numbers read at once
_ROWS = 512  # rows of the table of distances computed at once
_SAMPLE = 2**16  # numbers of a tensor that represent it where changes by scales and rotations are estimated
_SAMPLED = 3  # rotated tensors that represent all
_LINES = 4  # lines of these, in multiples of the size of the rotation


@dataclass(frozen=True)
class Sketch:
    """Comparison of a network with a reference, without a search.

    Attributes:
        distance: Euclidean distance of the parameters.
        doubtful: Indices of the axis groups with units or signs for which the identity may not be best.
        explained: Estimated upper bound of the fraction of the squared distance that scales, matrices, rotations and
            shifts can remove while units keep their order. Tensors are left out, as if all of their distance could be
            removed, once the bound is below :data:`EXPLAINED`.
    """

    distance: float
    doubtful: frozenset[int]
    explained: float

    @property
    def in_order(self) -> bool:
        """Whether the identity is the best assignment in every group."""
        return not self.doubtful


def sketched(
    symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, seed: int = 0, translated: bool = False
) -> Sketch:
    """Compare a network with a reference, tensor by tensor.

    Args:
        symmetry: The symmetry of both.
        a: The tensors of the reference by name, as :meth:`Symmetry.tensors` returns them.
        b: Those of the other network.
        seed: Seed of the random sums and samples.
        translated: Whether there may be translations that the symmetry does not include.

    Returns:
        The comparison; its distance is not finite if a parameter or a floating buffer is not.
    """
    groups = matched_groups(symmetry.factors, symmetry.groups, symmetry.shapes)
    blocks = {index for system in block_systems(symmetry.structure, groups) for index in system.groups}
    generator = torch.Generator().manual_seed(seed)
    sketches = [own for group in groups if (own := _GroupSketch.of(group, group.index in blocks, symmetry)) is not None]
    parts: dict[str, list[tuple[_GroupSketch, Pattern, Slices | Joint]]] = {}
    for own in sketches:
        for pattern, part in own.parts:
            parts.setdefault(part.tensor, []).append((own, pattern, part))
    freedom = _Freedom(symmetry, a, b, generator)
    freedom.shifted |= translated
    squares = []
    for name in a:
        if name not in symmetry.weight_names:
            if a[name].is_floating_point() and not all(finite_or_mask(own[name]) for own in (a, b)):
                squares.append(math.nan)
            continue
        one, two = (own[name].detach() for own in (a, b))
        made: dict[tuple[int, ...], _Sums] = {}

        def along(
            axes: tuple[int, ...], one: Tensor = one, two: Tensor = two, made: dict[tuple[int, ...], _Sums] = made
        ) -> _Sums:
            if axes not in made:
                made[axes] = _Sums.of(one, two, axes, generator)
            return made[axes]

        for sketch, pattern, part in parts.get(name, ()):
            sketch.add(pattern, part, one, two, along, generator)
        known = next(iter(made.values()), None)
        square = _squared_distance(one, two) if known is None else float(known.norms[1].sum())
        squares.append(square)
        if not math.isfinite(square):
            break
        if square:
            freedom.squares[name] = square
    total = math.fsum(squares)
    if not math.isfinite(total):
        return Sketch(math.nan, frozenset(), math.nan)
    doubtful = frozenset(own.group.index for own in sketches if own.is_doubtful())
    for copied in copied_blocks(symmetry.structure):
        gains, _ = copied.gains(symmetry.structure, a, b)
        if not np.array_equal(best_assignment(gains), np.arange(len(gains))):
            doubtful |= copied.orbits
    return Sketch(math.sqrt(total), doubtful, freedom.explained(total) / total if total else 0.0)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU in at least single precision."""
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).cpu()


def _squared_distance(one: Tensor, two: Tensor) -> float:
    pairs = zip(*(torch.split(own.reshape(-1), _AT_ONCE) for own in (one, two)), strict=True)
    return math.fsum(float((_wide(x) - _wide(y)).square().sum(dtype=torch.float64)) for x, y in pairs)


class _Sums(NamedTuple):
    """Sums over all places of one axis (or of several axes together) of two tensors.

    Attributes:
        norms: Squared norms of the slices of the first tensor, and of the difference. Shape (2, places), float64.
        sums: Signed sums of the slices of the first tensor. Shape (places, directions).
    """

    norms: Tensor
    sums: Tensor

    @classmethod
    def of(cls, one: Tensor, two: Tensor, axes: tuple[int, ...], generator: torch.Generator) -> "_Sums":
        """Return the sums over slices of two tensors along some axes, read a piece at a time."""
        ours, theirs = (together(own, axes) if own.ndim else own[None] for own in (one, two))
        if len(axes) == 1 and math.prod(one.shape[: axes[0]]) >= 2 * DIRECTIONS:
            before, size, after = math.prod(one.shape[: axes[0]]), one.shape[axes[0]], -1
            ours, theirs = (own.reshape(before, size, after) for own in (one, two))
            return cls._of_columns(ours, theirs, generator)
        ours, theirs = (own.reshape(len(own), -1) for own in (ours, theirs))
        return cls._of_rows(ours, theirs, generator)

    @classmethod
    def _of_rows(cls, one: Tensor, two: Tensor, generator: torch.Generator) -> "_Sums":
        size, columns = one.shape
        signs, whole = _signs(columns, generator), columns - columns % DIRECTIONS
        places = torch.randperm(DIRECTIONS, generator=generator)[: columns - whole]
        norms, sums = torch.zeros(2, size, dtype=torch.float64), torch.zeros(size, DIRECTIONS)
        step = max(_AT_ONCE // max(columns, 1), 1)
        for start in range(0, size, step):
            at = slice(start, start + step)
            ours, theirs = _wide(one[at]), _wide(two[at])
            norms[0, at], norms[1, at] = (ours * ours).sum(1), (ours - theirs).square_().sum(1)
            signed = ours * signs.to(ours.dtype)
            found = signed[:, :whole].reshape(len(ours), -1, DIRECTIONS).sum(1)
            sums[at] = found.index_add_(1, places, signed[:, whole:])
        return cls(norms, sums)

    @classmethod
    def _of_columns(cls, one: Tensor, two: Tensor, generator: torch.Generator) -> "_Sums":
        before, size, after = one.shape
        norms, sums = torch.zeros(2, size, dtype=torch.float64), torch.zeros(DIRECTIONS, size)
        step = max(_AT_ONCE // max(size * after, 1) // DIRECTIONS, 1) * DIRECTIONS
        for start in range(0, before, step):
            ours, theirs = (_wide(own[start : start + step]) for own in (one, two))
            norms[0] += (ours * ours).sum((0, 2))
            norms[1] += (ours - theirs).square_().sum((0, 2))
            signed = ours * _signs(len(ours) * after, generator).to(ours.dtype).view(-1, 1, after)
            whole = len(ours) - len(ours) % DIRECTIONS
            sums += signed[:whole].view(-1, DIRECTIONS, size, after).sum((0, 3))
            places = torch.randperm(DIRECTIONS, generator=generator)[: len(ours) - whole]
            sums.index_add_(0, places, signed[whole:].sum(2).to(sums.dtype))
        return cls(norms, sums.T.contiguous())

    def at(self, positions: Tensor | None, size: int, generator: torch.Generator) -> "_Sums":
        """Return the sums of units at several places each; None for places in order."""
        norms, sums = (self.norms, self.sums) if positions is None else (self.norms[:, positions], self.sums[positions])
        if norms.shape[1] == size:
            return _Sums(norms, sums)
        signed = sums.view(size, -1, DIRECTIONS) * _signs(len(sums) // size, generator).to(sums.dtype)[:, None]
        return _Sums(norms.view(2, size, -1).sum(2), signed.sum(1))


def _signs(count: int, generator: torch.Generator) -> Tensor:
    """Return random signs. Shape (count,)."""
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)


@dataclass
class _GroupSketch:
    """Sums over the slices of the units of one group.

    Attributes:
        group: The group.
        crossing: Whether units of different cells are compared as well, as they move with their blocks.
        moving: Whether units can move at all.
        loose: Whether signs act on parts of the slices that patterns do not tell apart.
        parts: The slices, with the pattern of the signs that act there.
        exact: Whether units hold so few numbers that these are compared themselves.
        sums: By pattern: signed sums of the slices of the reference, or their numbers. Shape (units, sums).
        norms: By pattern: squared norms of the slices of the reference and of the difference. Shape (2, units).
        doubted: Whether a sign may have to flip.
    """

    group: MatchingGroup
    crossing: bool
    moving: bool
    loose: bool
    parts: list[tuple[Pattern, Slices | Joint]]
    exact: bool
    sums: dict[Pattern, Tensor] = field(default_factory=dict)
    norms: dict[Pattern, Tensor] = field(default_factory=dict)
    doubted: bool = False

    @classmethod
    def of(cls, group: MatchingGroup, in_blocks: bool, symmetry: Symmetry) -> "_GroupSketch | None":
        """Return an empty sketch; None if the group's units neither move nor change sign."""
        moving = in_blocks or (group.assigned and group.movable and any(len(cell) > 1 for cell in group.cells))
        known = set(group.free + group.shared) if group.assigned else set()
        loose = any(k not in known for k in range(group.signs.shape[1]))
        if not (moving or group.signs.shape[1]):
            return None
        parts: list[tuple[Pattern, Slices | Joint]] = [(p, own) for p, some in group.slices.items() for own in some]
        parts += [(own.pattern, own) for own in group.joints]
        numbers = sum(math.prod(symmetry.shapes[own.tensor]) for _, own in parts)
        return cls(group, in_blocks, moving, loose, parts, numbers <= _EXACT * len(group.units))

    def add(
        self,
        pattern: Pattern,
        part: Slices | Joint,
        one: Tensor,
        two: Tensor,
        along: Callable[[tuple[int, ...]], _Sums],
        generator: torch.Generator,
    ) -> None:
        """Add the slices of one tensor.

        Args:
            pattern: The signs that act there.
            part: The slices.
            one: The tensor of the reference.
            two: That of the other network.
            along: Returns the sums along axes of both.
            generator: Generator for signs.
        """
        size = len(self.group.units)
        if isinstance(part, Joint):
            rows = torch.from_numpy(part.members)
            # The same signs for all members of one tensor.
            own = torch.Generator().manual_seed(generator.initial_seed() + zlib.crc32(part.tensor.encode()))
            ours, theirs = (_wide(part.of(tensor)) for tensor in (one, two))
            found = _Sums.of(ours, theirs, (0,), own)
        else:
            rows = torch.arange(size)
            if self.exact:
                ours, theirs = (_wide(part.of(tensor, size)) for tensor in (one, two))
                squares = [(x * x).sum(1).double() for x in (ours, ours - theirs)]
                found = _Sums(torch.stack(squares), ours)
            else:
                found = along(part.axes).at(part.positions, size, generator)
        total = self.norms.setdefault(pattern, torch.zeros(2, size, dtype=torch.float64))
        total[:, rows] += found.norms
        if self.loose and one.ndim > 1:
            self.doubted |= bool((found.norms[1] > found.norms[0]).any())
        if not self.moving:
            return
        sums = self.sums.get(pattern)
        if self.exact:
            spread = torch.zeros(size, found.sums.shape[1], dtype=found.sums.dtype)
            spread[rows] = found.sums
            self.sums[pattern] = spread if sums is None else torch.cat([sums, spread], 1)
        else:
            sums = self.sums.setdefault(pattern, torch.zeros(size, DIRECTIONS))
            sums[rows] += found.sums

    def is_doubtful(self) -> bool:
        """Return whether exchanging two units, or flipping a sign, may bring the networks nearer."""
        if self.doubted or any(bool((own[1] > own[0]).any()) for pattern, own in self.norms.items() if pattern):
            return True
        if not self.moving or not self.norms:
            return False
        whole = torch.stack(list(self.norms.values())).sum(0)
        if bool((whole[1] > whole[0]).any()):  # in small groups the identity may be best by chance, one group at a time
            return True
        apart = whole[1].sqrt()
        cells = [np.arange(len(apart))] if self.crossing else self.group.cells
        return any(self._has_close_pair(torch.from_numpy(cell), apart) for cell in cells if len(cell) > 1)

    def _has_close_pair(self, cell: Tensor, apart: Tensor, first: int = _FIRST) -> bool:
        """Return whether two units of a cell may be nearer to each other than their differences allow.

        Args:
            cell: The units.
            apart: Distance of each unit between the networks.
            first: Number of sums of each unit to compare at first; distances by part of the sums are never larger.
        """
        caution = 1.0 if self.exact else _CAUTION
        sums = {pattern: own[cell, :first] for pattern, own in self.sums.items()}
        kind = next(iter(sums.values())).dtype
        square = sum((own.square().sum(1) for own in sums.values()), torch.zeros(len(cell), dtype=kind))
        e = (apart[cell] * math.sqrt(caution)).to(kind)
        # |x - y|^2 - (e + f)^2 = (|x|^2 - e^2) + (|y|^2 - f^2) - 2 (x y + e f); rows and columns hold its negative.
        rest, one = ((1 - _ROUNDING) * square - e * e)[:, None], torch.ones(len(cell), 1, dtype=kind)
        plain = torch.cat([*(own for pattern, own in sums.items() if not pattern), e[:, None]], 1)
        left, right = torch.cat([2 * plain, -rest, -one], 1), torch.cat([plain, one, rest], 1)
        for start in range(0, len(cell), _ROWS):
            some = slice(start, start + _ROWS)
            close = left[some] @ right[start:].T
            for own in (own for pattern, own in sums.items() if pattern):
                close.add_((own[some] @ own[start:].T).abs_(), alpha=2)
            close.diagonal().fill_(-1.0)
            if float(close.max()) > 0:
                whole = max(own.shape[1] for own in self.sums.values())
                return first >= whole or self._has_close_pair(cell, apart, whole)
        return False


class _Freedom:
    """The part of the squared distance that continuous changes may remove, each tensor on its own.

    Tensors that matrices act on, and vectors, count as a whole. For the others, on a sample: scales of rows and of
    columns are fitted, any linear map for a rotation, and a map of rank two for shifts. Few tensors,
    drawn with probabilities proportional to their squared distances, represent all that are rotated.

    Args:
        symmetry: The symmetry.
        a: Tensors of the reference, by name.
        b: Those of the other network.
        generator: Generator for the samples.
    """

    def __init__(
        self, symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], generator: torch.Generator
    ) -> None:
        self.structure, self.a, self.b, self.generator = symmetry.structure, a, b, generator
        self.shifted = self.structure.translates
        self.squares: dict[str, float] = {}  # the squared distance of each tensor

    def explained(self, total: float) -> float:
        """Return the part of the total squared distance, or a larger one that is small enough.

        Args:
            total: The squared distance of all tensors.
        """
        turned = {
            name: axes[0] for name in self.squares if self._is_open(name) and (axes := self._axes(name, "rotations"))
        }
        mean = self._removed_by_rotations(turned)
        kept = 0.0
        for name, square in sorted(self.squares.items(), key=lambda own: -own[1]):
            if kept > (1 - EXPLAINED) * total:
                break
            kept += square * (1 - min(self._fraction(name) + mean * (name in turned), 1.0))
        return max(total - kept, 0.0)

    def _axes(self, name: str, kind: str) -> list[int]:
        """Return the axes of a tensor on which changes of one kind act."""
        slots = self.structure.slots_of.get(name, [])
        return sorted({own.axes[0] for own in slots if kind in self.structure.kinds_at(own)})

    def _is_open(self, name: str) -> bool:
        """Return whether a part of a tensor's distance may remain under any change."""
        slots = self.structure.slots_of.get(name, [])
        matrices = any("matrices" in self.structure.kinds_at(own) or len(own.axes) > 1 for own in slots)
        return not slots or (self.a[name].ndim > 1 and not matrices)

    def _fraction(self, name: str) -> float:
        """Return the fraction of a tensor's squared distance that all but rotations can remove."""
        slots = self.structure.slots_of.get(name, [])
        if not self._is_open(name) or (self.shifted and self.a[name].ndim < 2):
            return 1.0
        if not slots and not self.shifted:
            return 0.0
        x, y = _sampled(self.a[name].detach(), self.b[name].detach(), self.generator)
        size = float((x - y).square().sum())
        if not size:
            return 1.0
        removed = _removed_by_scales(x, y, self._axes(name, "scales"))
        if self.shifted:
            removed += 2 * _largest_square(x - y, _shifted_axes(slots), self.generator)
        return removed / size

    def _removed_by_rotations(self, turned: Mapping[str, int]) -> float:
        """Return the estimated fraction of the squared distance of rotated tensors that rotations can remove.

        Args:
            turned: The rotated axis of each tensor.
        """
        if not turned:
            return 0.0
        names = list(turned)
        weights = torch.tensor([self.squares[name] for name in names], dtype=torch.float64)
        chosen = torch.multinomial(weights, _SAMPLED, replacement=True, generator=self.generator).tolist()
        fractions = {index: self._removed_by_maps(names[index], turned[names[index]]) for index in set(chosen)}
        return math.fsum(fractions[index] for index in chosen) / len(chosen)

    def _removed_by_maps(self, name: str, axis: int) -> float:
        """Return the fraction of a tensor's squared distance that a linear map along an axis can remove."""
        one, two = (own[name].detach() for own in (self.a, self.b))
        other = max((own for own in range(one.ndim) if own != axis), key=lambda own: one.shape[own])
        count = _LINES * one.shape[axis] ** 2 * one.shape[other] // one.numel() + 1
        if count < one.shape[other]:
            some = torch.randperm(one.shape[other], generator=self.generator)[:count].sort().values.to(one.device)
            one, two = one.index_select(other, some), two.index_select(other, some)
        one, two = _wide(one), _wide(two)
        size = float((one - two).square().sum())
        return min(_removed_by_maps(one, two, axis, self.generator) / size, 1.0) if size else 0.0


def _shifted_axes(slots: Sequence[Slot]) -> set[int]:
    """Return the axes along which translations and rank-one maps may change a tensor by one direction.

    These are axes of units. Axes of kernels are left out, as a matrix with so few rows is always near one of rank two.
    """
    axes = {(own.axes[0], own.size) for own in slots if own.axes[0] < 2 or bool((own.unit >= 0).any())}
    return {axis for axis, size in axes if size > 1} or {0}


def _sampled(one: Tensor, two: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return both tensors, or some places of their longest axis if they are large, in double precision."""
    if one.numel() > _SAMPLE:
        axis = max(range(one.ndim), key=lambda other: one.shape[other])
        count = max(_SAMPLE * one.shape[axis] // one.numel(), 1)
        some = torch.randperm(one.shape[axis], generator=generator)[:count]
        one, two = (own.index_select(axis, some.to(own.device)) for own in (one, two))
    return _wide(one), _wide(two)


def _removed_by_scales(one: Tensor, two: Tensor, axes: Sequence[int]) -> float:
    """Return the largest reduction of the squared distance by factors along axes of the second tensor."""
    if not axes:
        return 0.0
    others = [axis for axis in range(one.ndim) if axis not in axes]
    products, squares = ((own.sum(others) if others else own).double() for own in (one * two, two * two))
    factors = [torch.ones(size, dtype=torch.float64) for size in products.shape]
    gain = torch.zeros((), dtype=torch.float64)
    for _ in range(1 if len(axes) == 1 else 4):
        for at in range(len(axes)):
            upper = _summed(products, factors, at)
            lower = _summed(squares, [own.square() for own in factors], at)
            gain = torch.where(lower > 0, upper.square() / lower.clamp_min(1e-300), 0.0).sum()
            factors[at] = torch.where(lower > 0, upper / lower.clamp_min(1e-300), 1.0)
    return max(float(squares.sum() - 2 * products.sum() + gain), 0.0)


def _summed(table: Tensor, factors: Sequence[Tensor], at: int) -> Tensor:
    """Return the sums of a table times factors over all axes but one. Shape (size of the axis,)."""
    table = table.movedim(at, 0)
    for factor in reversed([*factors[:at], *factors[at + 1 :]]):
        table = table @ factor
    return table


def _largest_square(change: Tensor, axes: Iterable[int], generator: torch.Generator) -> float:
    """Return the square of the largest singular value, nearly, of the matrices with one of some axes as rows."""
    found = 0.0
    for axis in axes:
        matrix = change.movedim(axis, 0).reshape(change.shape[axis], -1)
        vector = torch.randn(matrix.shape[1], dtype=matrix.dtype, generator=generator)
        for _ in range(8):
            vector = matrix.T @ (matrix @ (vector / vector.norm().clamp_min(1e-30)))
        found = max(found, float(vector.norm()))
    return found


def _removed_by_maps(one: Tensor, two: Tensor, axis: int, generator: torch.Generator) -> float:
    """Estimate the largest reduction of the squared distance by a linear map along an axis of the second tensor."""
    x, y = (own.movedim(axis, -1).reshape(-1, own.shape[axis]) for own in (one, two))
    count, size = x.shape
    change = x - y
    if count < 2 * size:  # the map has as many numbers as the tensor
        return float(change.square().sum())
    some = torch.randperm(size, generator=generator)[:DIRECTIONS]  # every output of the map is fitted on its own
    gram, read = y.T @ y, (y.T @ change[:, some]).double()
    ridge = 1e-6 * float(gram.diagonal().max()) + 1e-300
    factor = torch.linalg.cholesky(gram.double() + ridge * torch.eye(size, dtype=torch.float64))
    return float((read * torch.cholesky_solve(read, factor)).sum()) * size / len(some)
