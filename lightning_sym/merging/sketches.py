r"""Sketches: decide cheaply, from one reading of the weights, whether two networks have their units in one order.

Let :math:`e = b - a`. Exchanging units i and j of ``a`` and ``b`` cannot bring the networks nearer to each other if
:math:`\|a_i - a_j\| \geq \|e_i\| + \|e_j\|`, by the triangle inequality: both :math:`\|a_i - b_j\|` and
:math:`\|a_j - b_i\|` then are at least :math:`\|e_i\|` and :math:`\|e_j\|`. If this holds for all pairs of a group,
the identity is the best assignment of its units. The norms of e are exact; distances of units of ``a`` are estimated
from random signed sums (Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams").
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import together
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.assignment import (
    Joint,
    MatchingGroup,
    Pattern,
    Slices,
    block_systems,
    matched_groups,
)

# Without a permutation, scales, matrices and rotations must reduce the squared distance below this fraction. Planted
# ones reduce it to 0.06 at most; differences from fine-tuning leave 0.43 at least and are not symmetries.
WORTH = 0.1
DIRECTIONS = 64  # signed sums per unit
# Units with at most so many numbers are compared without sums.
_EXACT = 128
# Divides estimated squared distances. A planted exchange needs an estimate eight times too large to pass.
_CAUTION = 2.0
_ROUNDING = 1e-5  # of squared distances in single precision, relative to the squared norms
_AT_ONCE = 2**17  # numbers read at once
_ROWS = 512  # rows of the table of distances computed at once
_SAMPLE = 2**20  # numbers of a tensor that represent it where changes by scales and rotations are estimated
_SAMPLED = 3  # rotated tensors that represent all
_LINES = 4  # lines of these, in multiples of the size of the rotation


@dataclass(frozen=True)
class Sketch:
    """Comparison of a network with a reference, without a search.

    Attributes:
        distance: Euclidean distance of the parameters.
        doubtful: Indices of the axis groups with units or signs for which the identity may not be best.
        explained: Estimated upper bound of the fraction of the squared distance that scales, matrices, rotations and
            shifts can remove while units keep their order.
    """

    distance: float
    doubtful: frozenset[int]
    explained: float

    @property
    def in_order(self) -> bool:
        """Whether the identity is the best assignment in every group."""
        return not self.doubtful


def sketched(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, seed: int = 0) -> Sketch:
    """Compare a network with a reference, tensor by tensor.

    Args:
        symmetry: The symmetry of both.
        a: The tensors of the reference by name, as :meth:`Symmetry.tensors` returns them.
        b: Those of the other network.
        seed: Seed of the random sums and samples.

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
    squares = []
    for name in a:
        if name not in symmetry.parameter_names:
            if a[name].is_floating_point() and not all(bool(own[name].isfinite().all()) for own in (a, b)):
                squares.append(math.nan)
            continue
        one, two = (own[name].detach() for own in (a, b))
        square = _squared_distance(one, two)
        squares.append(square)
        if not math.isfinite(square):
            break
        for sketch, pattern, part in parts.get(name, ()):
            sketch.add(pattern, part, one, two, generator)
        if square:
            freedom.add(name, one, two, square)
    total = math.fsum(squares)
    if not math.isfinite(total):
        return Sketch(math.nan, frozenset(), math.nan)
    doubtful = frozenset(own.group.index for own in sketches if own.is_doubtful())
    return Sketch(math.sqrt(total), doubtful, freedom.explained() / total if total else 0.0)


def _wide(tensor: Tensor) -> Tensor:
    """Convert 16-bit numbers to single precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _squared_distance(one: Tensor, two: Tensor) -> float:
    pairs = zip(*(own.reshape(-1).split(_AT_ONCE) for own in (one, two)), strict=True)
    return math.fsum(float(torch.linalg.vector_norm(_wide(x) - _wide(y).to(x.device))) ** 2 for x, y in pairs)


def _pieces(part: Slices | Joint, size: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield the numbers of all units of a part in tensors of one shape, a few columns at a time.

    Each piece has one row per unit (per member of a joint).
    """
    if isinstance(part, Joint):
        yield [_wide(part.of(tensor)) for tensor in tensors]
        return
    moved = [together(tensor, part.axes) if tensor.ndim else tensor[None] for tensor in tensors]
    shape, at = moved[0].shape, part.positions
    if len(shape) == 1:
        yield [_wide(own if at is None else own[at.to(own.device)]).reshape(size, -1) for own in moved]
        return
    axis = max(range(1, len(shape)), key=lambda other: shape[other])
    step = max(1, _AT_ONCE * shape[axis] // max(math.prod(shape), 1))
    for start in range(0, shape[axis], step):
        some = [own.narrow(axis, start, min(step, shape[axis] - start)) for own in moved]
        yield [_wide(own if at is None else own.index_select(0, at.to(own.device))).reshape(size, -1) for own in some]


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
        size = len(group.units)
        counts = [
            math.prod(symmetry.shapes[own.tensor]) // size if isinstance(own, Slices) else math.inf for _, own in parts
        ]
        return cls(group, in_blocks, moving, loose, parts, sum(counts) <= _EXACT)

    def add(self, pattern: Pattern, part: Slices | Joint, one: Tensor, two: Tensor, generator: torch.Generator) -> None:
        """Add the slices of one tensor of both networks."""
        size = len(self.group.units)
        rows = torch.from_numpy(part.members) if isinstance(part, Joint) else slice(None)
        count = len(part.members) if isinstance(part, Joint) else size
        norms = torch.zeros(2, count, dtype=torch.float64)
        if isinstance(part, Joint):  # the same signs for all members of one tensor
            generator = torch.Generator().manual_seed(generator.initial_seed() + zlib.crc32(part.tensor.encode()))
        for ours, theirs in _pieces(part, count, one, two):
            ours, theirs = ours.cpu(), theirs.cpu()
            norms[0] += torch.linalg.vector_norm(ours, dim=1).double().square()
            norms[1] += torch.linalg.vector_norm(ours - theirs, dim=1).double().square()
            if self.moving:
                self._sum(pattern, rows, ours, generator)
        total = self.norms.setdefault(pattern, torch.zeros(2, size, dtype=torch.float64))
        total[:, rows] += norms
        if self.loose and one.ndim > 1:
            self.doubted |= bool((norms[1] > norms[0]).any())

    def _sum(self, pattern: Pattern, rows: slice | Tensor, piece: Tensor, generator: torch.Generator) -> None:
        size, columns = len(self.group.units), piece.shape[1]
        if self.exact:
            held = self.sums.get(pattern)
            self.sums[pattern] = piece.clone() if held is None else torch.cat([held, piece], 1)
            return
        if pattern not in self.sums:
            self.sums[pattern] = torch.zeros(size, DIRECTIONS, dtype=piece.dtype)
        signs = torch.randint(0, 2, (columns,), generator=generator).to(piece.dtype).mul_(2).sub_(1)
        signed, whole = piece * signs, columns - columns % DIRECTIONS
        found = signed[:, :whole].view(len(piece), -1, DIRECTIONS).sum(1)
        if whole < columns:
            begin = int(torch.randint(DIRECTIONS, (), generator=generator))
            places = (torch.arange(columns - whole) + begin) % DIRECTIONS
            found.index_add_(1, places, signed[:, whole:])
        self.sums[pattern][rows] += found

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

    def _has_close_pair(self, cell: Tensor, apart: Tensor) -> bool:
        caution, apart = 1.0 if self.exact else _CAUTION, apart[cell]
        sums = [(pattern, own[cell]) for pattern, own in self.sums.items()]
        squares = [own.square().sum(1) for _, own in sums]
        for start in range(0, len(cell), _ROWS):
            some, total = slice(start, start + _ROWS), torch.zeros(())
            size: Tensor = torch.zeros(())
            for (pattern, own), square in zip(sums, squares, strict=True):
                products = own[some] @ own.T
                both = square[some, None] + square
                total = total + (both - 2 * (products.abs() if pattern else products))
                size = size + both
            least = (total - _ROUNDING * size).clamp_min(0).double() / caution
            close = least < (apart[some, None] + apart).square()
            close.diagonal(start).fill_(False)
            if bool(close.any()):
                return True
        return False


class _Freedom:
    """The part of the squared distance that continuous changes may remove, each tensor on its own.

    Tensors that matrices act on, and vectors, count as a whole. For the others, on a sample: scales of rows and of
    columns are fitted, any linear map in place of a rotation, and a map of rank two in place of shifts. Few tensors,
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
        self.removed: list[float] = []
        # Rotated tensors: squared distance, the part of it that all else removes, name, and rotated axis.
        self.rotated: list[tuple[float, float, str, int]] = []
        self.shifted = bool(self.structure.shifts) or bool(self.structure.tilts)

    def add(self, name: str, one: Tensor, two: Tensor, square: float) -> None:
        """Add a tensor of both networks, with their squared distance."""
        structure, slots = self.structure, self.structure.slots_of.get(name, [])
        if not slots and not self.shifted:
            return
        matrices = structure.dense_places.keys() | structure.turned_places.keys() | structure.gained_places.keys()
        if one.ndim < 2 or any(own.offset in matrices or len(own.axes) > 1 for own in slots):
            self.removed.append(square)
            return
        x, y = _sampled(one, two, self.generator)
        size = float((x - y).square().sum())
        if not size:
            return
        axes = sorted({own.axes[0] for own in slots if structure.magnitudes[own.rows].nnz})
        fraction = _removed_by_scales(x, y, axes) / size
        if self.shifted:
            fraction += 2 * _largest_square(x - y, {own.axes[0] for own in slots} or {0}, self.generator) / size
        removed = min(fraction, 1.0) * square
        turned = [own.axes[0] for own in slots if own.offset in structure.rotated_places]
        if turned:
            self.rotated.append((square, removed, name, turned[0]))
        else:
            self.removed.append(removed)

    def explained(self) -> float:
        """Return the part of the squared distance."""
        whole = math.fsum(square for square, *_ in self.rotated)
        if not whole:
            return math.fsum(self.removed)
        weights = torch.tensor([square for square, *_ in self.rotated], dtype=torch.float64)
        chosen = torch.multinomial(weights, _SAMPLED, replacement=True, generator=self.generator).tolist()
        fractions = {index: self._removed_by_maps(*self.rotated[index][2:]) for index in set(chosen)}
        mean = math.fsum(fractions[index] for index in chosen) / len(chosen)
        return math.fsum([*self.removed, *(min(own + mean * square, square) for square, own, *_ in self.rotated)])

    def _removed_by_maps(self, name: str, axis: int) -> float:
        """Return the fraction of a tensor's squared distance that a linear map along an axis can remove."""
        one, two = (own[name].detach() for own in (self.a, self.b))
        other = max((own for own in range(one.ndim) if own != axis), key=lambda own: one.shape[own])
        count = _LINES * one.shape[axis] ** 2 * one.shape[other] // one.numel() + 1
        if count < one.shape[other]:
            some = torch.randperm(one.shape[other], generator=self.generator)[:count].sort().values.to(one.device)
            one, two = one.index_select(other, some), two.index_select(other, some)
        one, two = _wide(one).cpu(), _wide(two).cpu()
        size = float((one - two).square().sum())
        return min(_removed_by_maps(one, two, axis, self.generator) / size, 1.0) if size else 0.0


def _sampled(one: Tensor, two: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return both tensors, or some places of their longest axis if they are large, in double precision."""
    if one.numel() > _SAMPLE:
        axis = max(range(one.ndim), key=lambda other: one.shape[other])
        count = max(_SAMPLE * one.shape[axis] // one.numel(), 1)
        some = torch.randint(one.shape[axis], (count,), generator=generator).unique()
        one, two = (own.index_select(axis, some.to(own.device)) for own in (one, two))
    return _wide(one).cpu(), _wide(two).cpu()


def _removed_by_scales(one: Tensor, two: Tensor, axes: Sequence[int]) -> float:
    """Return by how much factors along some axes of the second tensor can reduce the squared distance."""
    if not axes:
        return 0.0
    others = [axis for axis in range(one.ndim) if axis not in axes]
    products, squares = ((own.sum(others) if others else own).double() for own in (one * two, two * two))
    letters = "abcdefgh"[: len(axes)]
    factors = [torch.ones(size, dtype=torch.float64) for size in products.shape]
    for _ in range(1 if len(axes) == 1 else 4):
        for at, letter in enumerate(letters):
            rest = [own for other, own in enumerate(factors) if other != at]
            words = ",".join([letters, *(own for own in letters if own != letter)]) + "->" + letter
            upper, lower = torch.einsum(words, products, *rest), torch.einsum(words, squares, *(own**2 for own in rest))
            factors[at] = torch.where(lower > 0, upper / lower.clamp_min(1e-300), 1.0)
    words = ",".join([letters, *letters]) + "->"
    moved = torch.einsum(words, squares, *(own**2 for own in factors)) - 2 * torch.einsum(words, products, *factors)
    return max(float((squares.sum() - 2 * products.sum()) - moved), 0.0)


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
    """Return by how much a linear map along an axis of the second tensor can reduce the squared distance, nearly."""
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
