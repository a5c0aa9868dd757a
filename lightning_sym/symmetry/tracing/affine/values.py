"""Values of a captured graph with their possible changes: a translation, drifts, a relation.

Arrays that belong to a value are *thin*: they have its rank, and size 1 along axes on which they are constant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, fx

from lightning_sym.symmetry.arrays import Floats, Ints, rising
from lightning_sym.symmetry.numbering import Numbers

Shape = tuple[int, ...]

# Kinds of unknowns; equations define those of the last kind first.
DERIVED, ROWS, DIRECTIONS, SUMS, FREE = range(5)


_PLACES: WeakValueDictionary[Shape, Tensor] = WeakValueDictionary()
_MOST = 2**23  # maximal unknowns; larger networks would take minutes


class Atom(NamedTuple):
    """Numbers that depend only on the weights.

    Attributes:
        kind: "parameter", "node" (of the graph), or "length" (of an axis of the input).
        key: The parameter's name, the node's signature, or the length and the index of the walk.
    """

    kind: str
    key: Any


# An atom, its power, and the index of the atom's number at each entry of a value (thin).
Item = tuple[Atom, int, Tensor]


@dataclass(frozen=True)
class Coefficient:
    """A product of powers of numbers that depend only on the weights, for each entry of a value.

    Attributes:
        factor: A number.
        items: Atoms with powers and thin index arrays.
    """

    factor: float = 1.0
    items: tuple[Item, ...] = ()

    def times(self, other: "Coefficient") -> "Coefficient":
        """Return the product with another coefficient of the same value."""
        return Coefficient(self.factor * other.factor, self.items + other.items)

    def power(self, power: int) -> "Coefficient":
        """Return the coefficient to the power 1 or -1."""
        items = tuple((atom, power * own, places) for atom, own, places in self.items)
        return Coefficient(self.factor**power, items)

    def mapped(self, function: Any) -> "Coefficient":
        """Return the coefficient of a value with moved entries."""
        return Coefficient(self.factor, tuple((atom, own, function(places)) for atom, own, places in self.items))

    def key(self, shape: Shape) -> Any:
        """Return a key that distinguishes coefficients of values of one shape."""
        powers: dict[Any, int] = {}
        for atom, power, places in self.items:
            own = atom, places.expand(shape).numpy().tobytes()
            powers[own] = powers.get(own, 0) + power
        return self.factor, frozenset((own, power) for own, power in powers.items() if power)


ONE = Coefficient()


@dataclass
class Drift:
    """A change of a value: numbers times unspecified functions of the input.

    Attributes:
        function: The index of the function at each entry; thin.
        numbers: Unknowns, 0 for none. Shape (patterns, *thin): each pattern has separate functions.
    """

    function: Tensor
    numbers: Tensor


@dataclass(eq=False)
class Total:
    """The total of a relation's terms, for each segment.

    Attributes:
        segments: The number of segments.
        constant: A number common to all segments, or one for each, NaN where the input changes the sum.
        terms: Coefficients, the segment of each entry (thin), and the shape of the sum.
        before: An earlier total, and the index of the earlier segment for each segment; added to this total.
    """

    segments: int
    constant: float | tuple[float, ...] = 0.0
    terms: list[tuple[Coefficient, Tensor, Shape]] = field(default_factory=list)
    before: "tuple[Total, Tensor] | None" = None

    def key(self) -> Any:
        """Return a key that distinguishes totals."""
        before = None if self.before is None else (self.before[0].key(), self.before[1].numpy().tobytes())
        terms = tuple((own.key(shape), at.expand(shape).numpy().tobytes(), shape) for own, at, shape in self.terms)
        return self.segments, self.constant, terms, before

    @property
    def vanishes(self) -> bool:
        """Whether the total is zero for all weights."""
        return self.known == 0

    @property
    def known(self) -> float | None:
        """The total if it is one number for all weights and segments; else None."""
        before = 0.0 if self.before is None else self.before[0].known
        return None if self.terms or before is None or isinstance(self.constant, tuple) else before + self.constant

    @property
    def numbers(self) -> Floats | None:
        """The total of each segment, NaN if it has none; None if totals depend on weights."""
        own, before = np.broadcast_to(self.constant, self.segments), self.before and self.before[0].numbers
        if self.before is None or self.terms or before is None:
            return None if self.terms or self.before is not None else own
        return np.asarray(own + before[self.before[1].numpy()])

    @property
    def open(self) -> Tensor:
        """Whether each segment has no total. Shape (segments,)."""
        own = torch.tensor(np.broadcast_to(self.constant, self.segments)).isnan()
        return own if self.before is None else own | self.before[0].open[self.before[1]]


@dataclass
class Relation:
    """An identity for all inputs: in each segment, the sum of coefficients times entries equals a total.

    Attributes:
        axes: The axes of the sums.
        segments: The segment of each entry, in addition to its place on the other axes; thin, varies along `axes` only.
        coefficient: The coefficients, which vary along `axes` only.
        total: The totals.
    """

    axes: frozenset[int]
    segments: Tensor
    coefficient: Coefficient
    total: Total


@dataclass
class Lookup:
    """Rows of a table at indices that depend on the input, or sums of rows: a linear function of the table.

    Attributes:
        table: The table. None for the indicators of the rows themselves, the rows of an identity matrix.
        axis: Its axis of the rows.
        source: The drift source of the indicators of rows: which row, perhaps counted over several indices.
        functions: The index of the function at each entry, as of a drift; thin.
        at: The place on the table's other axes at each entry, flattened; thin.
        by: A factor.
        total: The sum of the indicators over all rows.
    """

    table: "Value | None"
    axis: int
    source: int
    functions: Tensor
    at: Tensor
    by: Coefficient = ONE
    total: Coefficient = ONE


@dataclass
class Value:
    """A value of the graph and its possible changes.

    Attributes:
        shape: Its shape.
        varies: Whether it depends on the input.
        node: The operation that produces it, if it depends only on the weights.
        translation: Unknowns added to it, 0 for none; thin. None if there are no unknowns.
        drifts: Changes proportional to functions of the input, by source.
        relation: A relation of its entries.
        origin: The parameter that it shows, moved, and the coordinate of each entry on each of the parameter's axes;
            thin.
        learned: Whether it depends on parameters.
        more: Further summands of the translation that vary along other axes; combined when needed.
        held: The numbers that entries hold for every input, NaN elsewhere; thin. None if there are none.
        base: See `root`.
        lookup: Its rows of a table; None for other values.
    """

    shape: Shape
    varies: bool
    node: fx.Node | None = None
    translation: Tensor | None = None
    drifts: dict[int, Drift] = field(default_factory=dict)
    relation: Relation | None = None
    origin: tuple[str, tuple[Tensor, ...]] | None = None
    learned: bool = False
    more: tuple[Tensor, ...] = ()
    held: Tensor | None = None
    lookup: Lookup | None = None
    base: "tuple[Value, tuple[tuple[Any, int], ...], float] | None" = None

    @property
    def root(self) -> "tuple[Value, tuple[tuple[Any, int], ...], float]":
        """The value that this one is a multiple of, the moves in between with the index of each result, the factor."""
        return self.base or (self, (), 1.0)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def moves(self) -> bool:
        """Whether it has a translation or a drift."""
        return self.translation is not None or bool(self.more) or bool(self.drifts)

    def with_(self, **changes: Any) -> "Value":
        """Return a value with other attributes; rows of a table are no such rows any more if what it shows changes."""
        lost = {"base": None} if changes.keys() <= {"node", "held"} else {"base": None, "lookup": None}
        return replace(self, **(lost | changes))


def wide(array: Tensor, rank: int, lead: int = 0) -> Tensor:
    """Insert axes of size 1 up to a rank, after the leading axes."""
    missing = rank + lead - array.ndim
    return array.reshape([*array.shape[:lead], *[1] * missing, *array.shape[lead:]])


def varying(array: Tensor) -> set[int]:
    """Return the axes along which a thin array varies."""
    return {axis for axis, size in enumerate(array.shape) if size > 1}


def places(shape: Sequence[int]) -> Tensor:
    """Number all entries. The result is shared between callers, as it may be large, and must not be changed."""
    if (found := _PLACES.get(tuple(shape))) is None:
        found = _PLACES[tuple(shape)] = torch.arange(math.prod(shape)).reshape(tuple(shape))
    return found


def distinct(entries: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Find the distinct entries of several arrays.

    Args:
        entries: Arrays with equally many entries, perhaps with one more axis after them.

    Returns:
        The first entry of each kind, rising, and the kind of each entry.
    """
    count = len(entries[0])
    if any(own.ndim == 1 and bool((own[1:] > own[:-1]).all()) for own in entries):
        return np.arange(count), np.arange(count)
    generator, key = np.random.default_rng(0), np.zeros(count, np.uint64)
    for own in entries:
        flat = own.reshape(count, -1).astype(np.uint64)
        key = (key ^ (key >> np.uint64(29))) + flat @ (
            generator.integers(2**62, size=flat.shape[1], dtype=np.uint64) * 2 + 1
        )
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, inverse = first[order], np.argsort(order)[inverse.reshape(-1)]
    if all(np.array_equal(own, own[first[inverse]]) for own in entries):
        return first, inverse
    return np.arange(count), np.arange(count)  # a hash collision: then all entries count as distinct


def _joined(pairs: Ints) -> Ints:
    """Reduce pairs of equal numbers to a minimal set: each number with the smallest one equal to it."""
    numbers = rising(pairs)
    if len(numbers) > len(pairs):
        return pairs
    one, two = np.searchsorted(numbers, pairs).T
    graph = sparse.csr_matrix((np.ones(len(pairs)), (one, two)), (len(numbers), len(numbers)))
    _, label = sparse.csgraph.connected_components(graph, False)
    _, first = np.unique(label, return_index=True)
    least = numbers[first[label]]
    apart: Ints = np.stack([numbers, least], 1)[numbers != least]
    return apart


class Unknowns:
    """Numbered unknowns, and linear equations between them; number 0 represents zero."""

    def __init__(self) -> None:
        self.count = 1
        self.blocks: list[tuple[int, int]] = [(0, DERIVED)]  # start and kind of each block
        self.zero = np.ones(1, bool)
        self.equations: list[tuple[Ints, list[tuple[float, list[tuple[Atom, int, Ints]]]]]] = []
        self._sums: dict[Any, Ints] = {}

    def fresh(self, shape: Sequence[int], kind: int) -> Tensor:
        """Return new unknowns.

        Raises:
            RuntimeError: If there are too many.
        """
        size = math.prod(shape)
        if self.count + size > _MOST:
            raise RuntimeError(f"more than {_MOST} unknowns")
        self.blocks.append((self.count, kind))
        numbers = torch.arange(self.count, self.count + size).reshape(tuple(shape))
        self.count += size
        if self.count > len(self.zero):
            self.zero = np.r_[self.zero, np.zeros(max(self.count, 4096), bool)]
        return numbers

    def kinds(self) -> Numbers:
        """Return the kind of each unknown."""
        starts = [start for start, _ in self.blocks] + [self.count]
        return np.repeat(np.array([kind for _, kind in self.blocks], np.int8), np.diff(starts))

    def vanish(self, numbers: Tensor | None) -> None:
        """Require that unknowns are zero."""
        if numbers is not None:
            self.zero[numbers.reshape(-1).numpy()] = True

    def living(self, numbers: Tensor | None) -> Tensor | None:
        """Return the same unknowns with 0 for those known to be zero; None if all are zero."""
        if numbers is None:
            return None
        own = numbers.numpy()
        gone = np.asarray(self.zero[own])
        if not gone.any():
            return numbers
        return None if gone.all() else torch.from_numpy(np.asarray(own * ~gone))  # faster than masking

    def combined(self, terms: Sequence[tuple[Tensor, Coefficient]], lead: int = 0) -> Tensor | None:
        """Return unknowns for a sum of unknowns times coefficients.

        Args:
            terms: Thin arrays of unknowns, with leading axes, and coefficients without these.
            lead: The number of leading axes.
        """
        terms = [(own, by) for numbers, by in terms if (own := self.living(numbers)) is not None and by.factor]
        if not terms or (len(terms) == 1 and terms[0][1] == ONE):
            return terms[0][0] if terms else None
        shape = np.broadcast_shapes(
            *(numbers.shape for numbers, _ in terms), *(own.shape for _, by in terms for *_, own in by.items)
        )
        stacked = [numbers.expand(shape).reshape(-1).numpy() for numbers, _ in terms]
        present = np.stack([own != 0 for own in stacked])
        alone = present.sum(0) == 1
        plain = np.zeros_like(alone)
        result = np.zeros(len(alone), np.int64)
        for entries, here, (_, by) in zip(stacked, present, terms, strict=True):
            if by.factor == 1 and not by.items:
                plain |= alone & here
                result = np.where(alone & here, entries, result)
        at = np.flatnonzero(present.any(0) & ~plain)
        if len(at):
            found = [[own[at] for own in stacked]]
            found += [[own * here[at] for *_, own in self._at(by, shape, at)]
                      for here, (_, by) in zip(present, terms, strict=True)]  # fmt: skip
            first, like = distinct([own for each in found for own in each])
            coefficients = [(-by.factor, self._at(by, shape, at[first])) for _, by in terms]
            result[at] = self._sum(np.stack([own[at[first]] for own in stacked], 1), coefficients)[like]
        return torch.from_numpy(result).reshape(shape)

    def _sum(self, numbers: Ints, terms: list[tuple[float, list[tuple[Atom, int, Ints]]]]) -> Ints:
        """Return unknowns that sum to zero with multiples of others; equal sums share them."""
        by = tuple((factor, *((atom, power, at.tobytes()) for atom, power, at in items)) for factor, items in terms)
        key = numbers.tobytes(), by
        if key not in self._sums:
            new = self._sums[key] = self.fresh((len(numbers),), SUMS).numpy()
            self.equations.append((np.c_[new, numbers], [(1.0, []), *terms]))
        return self._sums[key]

    @staticmethod
    def _at(coefficient: Coefficient, shape: Shape, at: Ints) -> list[tuple[Atom, int, Ints]]:
        return [(atom, power, own.expand(shape).reshape(-1).numpy()[at]) for atom, power, own in coefficient.items]

    def summed(self, numbers: Tensor, axes: Sequence[int]) -> Tensor | None:
        """Return unknowns for sums over some axes of an array, which are kept with size 1."""
        own = self.living(numbers)
        if own is None:
            return None
        axes = [axis for axis in axes if own.shape[axis] > 1]
        if not axes:
            return own
        kept = [axis for axis in range(own.ndim) if axis not in axes]
        rows = own.permute((*kept, *axes)).reshape(math.prod(own.shape[axis] for axis in kept), -1).numpy()
        result = np.zeros(len(rows), np.int64)
        at = np.flatnonzero(rows.any(1))
        first, like = distinct([rows[at]])
        result[at] = self._sum(rows[at[first]], [(-1.0, [])] * rows.shape[1])[like]
        return torch.from_numpy(result).reshape([1 if axis in axes else size for axis, size in enumerate(own.shape)])

    def equate(self, one: Tensor, two: Tensor) -> None:
        """Require that unknowns are equal, entry by entry, with broadcasting."""
        shape = np.broadcast_shapes(one.shape, two.shape)
        pairs = torch.stack([numbers.expand(shape).reshape(-1) for numbers in (one, two)], 1).numpy()
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        gone = self.zero[pairs]
        self.zero[pairs[gone.any(1)]] = True
        pairs = pairs[~gone.any(1)]
        if len(pairs):
            pairs = _joined(pairs)
            self.equations.append((pairs, [(1.0, []), (-1.0, [])]))
