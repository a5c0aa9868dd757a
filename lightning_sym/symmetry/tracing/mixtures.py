"""What constants that depend on positions make of the elements of one value: sums of few of them, times numbers.

Rotary positions are products with tables of cosines and sines, sums, and movements. Whatever the convention (halves,
neighbours, complex numbers), each element that comes out is a sum of elements that went in, times constants. From these
numbers follows what may act on the coordinates that are mixed. See docs/theory/intertwiners.md, 2.15.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym.symmetry.arrays import as_array
from lightning_sym.symmetry.tracing.constraints import Ints, Label
from lightning_sym.symmetry.tracing.coordinates import coordinates

Step = Callable[[Tensor], Tensor]
_MANY = 8  # of so many summands no plane is made
_ROUNDING = 1e-12  # relative difference of two numbers of a table that count as one


class Labelled(Protocol):
    """A value of the graph, see :class:`lightning_sym.symmetry.tracing.values.Value`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def labels(self) -> tuple[Label, ...]:
        """Who acts on it."""
        ...


class Term(NamedTuple):
    """One summand of every element of a value.

    Attributes:
        element: Which element of the base it holds, counted in row-major order; -1 for none. Int64.
        factor: By what that is multiplied: float64 or complex128, of the same shape.
    """

    element: Tensor
    factor: Tensor


class Planes(NamedTuple):
    """The planes in which constants turn the coordinates of a base.

    Attributes:
        first: For each plane, the position of its first coordinate on the labelled axes of the base. Shape (planes,).
        second: The same for the second.
        source: For each position on the labelled axes of what comes out, the position on those of the base whose
            coordinate it continues. Shape (positions,).
        axes: The labelled axes of what comes out.
        several: Whether the planes are turned by several angles, and not by one.
    """

    first: Ints
    second: Ints
    source: Ints
    axes: tuple[int, ...]
    several: bool


@dataclass(frozen=True, eq=False)
class Mixture:
    """A value that is made of the elements of another one by constants and movements.

    Attributes:
        base: The other value.
        make: Computes the terms.
        opened: Whether anything but movements happened.
        by_position: Whether a constant took part that depends on the position.
        mixed: Whether coordinates were multiplied by different numbers, or added.
    """

    base: Labelled
    make: Callable[[], list[Term]]
    opened: bool = False
    by_position: bool = False
    mixed: bool = False

    @classmethod
    def of(cls, value: Labelled) -> "Mixture":
        """Return a value as it is."""

        def make() -> list[Term]:
            count = int(np.prod(value.shape))
            index = torch.arange(count).reshape(value.shape)
            return [Term(index, torch.ones((), dtype=torch.float64).expand(value.shape))]

        return cls(value, make)

    @cached_property
    def terms(self) -> list[Term]:
        """The summands."""
        return self.make()

    def _then(
        self, make: Callable[[], list[Term]], *, opened: bool = True, by_position: bool = False, mixed: bool = True
    ) -> "Mixture":
        return Mixture(self.base, make, self.opened or opened, self.by_position or by_position, self.mixed or mixed)

    def moved(self, step: Step | None) -> "Mixture":
        """Return what is left, and where, after a movement."""
        if step is None:
            return self

        def make() -> list[Term]:
            return [Term(step(i.double() + 1).long() - 1, step(f)) for i, f in self.terms]

        return self._then(make, opened=False, mixed=False)

    def times(self, constant: Tensor, *, by_position: bool = False, mixed: bool = False) -> "Mixture":
        """Return the product with a constant, with broadcasting; see :class:`Mixture`."""
        wide = constant.to(torch.complex128 if constant.is_complex() else torch.float64)

        def make() -> list[Term]:
            products = [(index, factor * wide) for index, factor in self.terms]
            return [Term(index.expand(factor.shape), factor) for index, factor in products]

        return self._then(make, by_position=by_position, mixed=mixed)


def added(mixtures: Sequence[Mixture], signs: Sequence[float]) -> Mixture:
    """Return the sum of mixtures of one base, each times a number, with broadcasting."""

    def make() -> list[Term]:
        terms = [Term(i, f * sign) for own, sign in zip(mixtures, signs, strict=True) for i, f in own.terms]
        shape = np.broadcast_shapes(*(term.element.shape for term in terms))
        return [Term(index.expand(shape), factor.expand(shape)) for index, factor in terms]

    return _together(mixtures, make, opened=True)


def joined(mixtures: Sequence[Mixture], join: Callable[[list[Tensor]], Tensor]) -> Mixture:
    """Return mixtures of one base one behind the other."""

    def make() -> list[Term]:
        result = []
        for number in range(max(len(own.terms) for own in mixtures)):
            parts = [own.terms[number] if number < len(own.terms) else _nothing(own.terms[0]) for own in mixtures]
            result.append(Term(join([part.element for part in parts]), join([part.factor for part in parts])))
        return result

    return _together(mixtures, make, opened=any(own.opened for own in mixtures))


def _nothing(term: Term) -> Term:
    """Return a summand of the same shape that is none."""
    return Term(torch.full_like(term.element, -1), torch.zeros_like(term.factor))


def _together(mixtures: Sequence[Mixture], make: Callable[[], list[Term]], *, opened: bool) -> Mixture:
    return Mixture(mixtures[0].base, make, opened, any(own.by_position for own in mixtures), opened)


def find_planes(mixture: Mixture, shape: tuple[int, ...]) -> Planes | None:
    r"""Find the planes of coordinates that constants turn, if that is all they do.

    For a plane with the matrices :math:`M_p` at the positions p, what may act on it is the commutant: the A with
    :math:`A M_p = M_p A` for all p, or :math:`A' M_p = M_p A` if the coordinates come out in another order or with
    another sign. For :math:`M_p` that are multiples of rotations it is the complex numbers
    :math:`a + b J`, whatever the angles.

    Args:
        mixture: What comes out, made of the base.
        shape: Its shape.

    Returns:
        The planes; None if anything else happens to some coordinate.
    """
    base, terms = mixture.base, mixture.terms
    if len(base.labels) != 1 or len(terms) > _MANY or any(term.factor.is_complex() for term in terms):
        return None
    axes = _labelled_axes(terms, base)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    size = int(np.prod([shape[axis] for axis in axes]))

    def rows(part: Tensor) -> NDArray:  # type: ignore[type-arg]
        return as_array(part.expand(shape).permute(*axes, *others).reshape(size, -1))

    index, factor = (np.stack([rows(term[part]) for term in terms]) for part in (0, 1))  # (terms, size, places)
    place, position = _split(index, base)
    if (place != place[..., :1]).any():  # another coordinate at another position
        return None
    numbers = _by_coordinate(place[..., 0], factor)
    if numbers is None:
        return None
    coordinate, factor = numbers
    return _turned(coordinate, factor, np.where(index >= 0, position, -1), axes)


def _labelled_axes(terms: Sequence[Term], base: Labelled) -> tuple[int, ...]:
    """Return the axes of what comes out along which the position in the base stays the same."""
    positions = [torch.from_numpy(_split(term.element.numpy(), base)[1]) for term in terms]
    held = torch.stack(positions).amax(0)
    sizes = enumerate(held.shape)
    return tuple(axis for axis, size in sizes if size > 1 and bool((held == held.narrow(axis, 0, 1)).all()))


def _split(index: Ints, base: Labelled) -> tuple[Ints, Ints]:
    """Return at which place on its labelled axes an element of the base is, and at which on the others."""
    labelled = base.labels[0].axes
    others = [axis for axis in range(len(base.shape)) if axis not in labelled]
    found = []
    for axes in (labelled, others):
        table = coordinates(base.shape, axes).reshape(-1).long().numpy() - 1
        found.append(np.where(index >= 0, table[index], -1))
    return found[0], found[1]


def _by_coordinate(place: Ints, factor: NDArray[np.float64]) -> tuple[Ints, NDArray[np.float64]] | None:
    """Add the terms of one coordinate; of more than two coordinates nothing is made.

    Args:
        place: The coordinate that each term holds, or -1. Shape (terms, size).
        factor: Shape (terms, size, positions).

    Returns:
        The two coordinates, the smaller one first, or -1 twice or once. Shape (2, size); and their factors. Shape
        (2, size, positions).
    """
    low = np.where(place < 0, np.iinfo(np.int64).max, place).min(0)
    high = place.max(0)
    if (high < 0).any() or ((place >= 0) & (place != low) & (place != high)).any():
        return None
    two = low != high
    parts = [np.where((place == own)[..., None], factor, 0.0).sum(0) for own in (low, high)]
    coordinate = np.stack([low, np.where(two, high, -1)])
    return coordinate, np.stack([parts[0], np.where(two[:, None], parts[1], 0.0)])


def _turned(coordinate: Ints, factor: NDArray[np.float64], position: Ints, axes: tuple[int, ...]) -> Planes | None:
    (first, second), size = coordinate, coordinate.shape[1]
    source = first.copy()
    single, paired = np.flatnonzero(second < 0), np.flatnonzero(second >= 0)
    if len(np.unique(first[single])) < len(single) or (factor[0, single] != 1).any() or not len(paired):
        return None
    # Each plane comes out at two places, in their order.
    order = paired[np.lexsort((paired, second[paired], first[paired]))]
    if len(order) % 2:
        return None
    one, two = order[::2], order[1::2]
    pair = np.stack([first[one], second[one]])
    same = (first[one] == first[two]) & (second[one] == second[two])
    if not same.all() or len(np.unique(np.r_[pair.ravel(), first[single]])) < size:
        return None
    # All terms at a position are of one position of the base.
    held = np.concatenate([position[:, one], position[:, two]])
    if ((held >= 0) & (held != held.max(0))).any():
        return None
    (a, b), (c, d) = (factor[:, own] for own in (one, two))  # the matrices [[a, b], [c, d]], by plane and position
    room = _ROUNDING * np.abs(factor).max(initial=1e-300)
    turns = ((abs(a - d) <= room) & (abs(b + c) <= room)).all(1)
    mirrors = ((abs(a + d) <= room) & (abs(b - c) <= room)).all(1)
    if not (turns | mirrors).all() or (turns & mirrors).any():
        return None
    source[one] = np.where(turns, pair[0], pair[1])
    source[two] = np.where(turns, pair[1], pair[0])
    several = bool(((abs(a - a[:, :1]) > room) | (abs(b - b[:, :1]) > room)).any())
    return Planes(pair[0], pair[1], source, axes, several)
