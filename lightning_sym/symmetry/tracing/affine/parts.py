"""The parts of a vector space of additions to a network's tensors: places, steps, kinds.

See docs/theory/translations.md.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints
from lightning_sym.symmetry.tracing.affine.forms import Forms
from lightning_sym.symmetry.tracing.affine.values import Coefficient, Shape
from lightning_sym.symmetry.tracing.affine.weights import ByFunction, Made, Weights


class Free(NamedTuple):
    """An addition to a tensor entry by entry, the same along some axes.

    Attributes:
        name: The tensor.
        at: The wanted unknown of each entry; thin.
    """

    name: str
    at: Ints


class Readers(NamedTuple):
    """Multiples, for each output, of a relation's coefficients, which are added to the rows of a weight.

    Attributes:
        name: The weight.
        axes: Over which it sums, rising.
        at: Wanted unknowns. Shape (segments, *the weight's), with size 1 along these axes.
        coefficient: Along these axes, flattened.
        segments: The segment of each place on them.
        constants: Whether some segments have no multiples, as those of entries that the input changes.
    """

    name: str
    axes: tuple[int, ...]
    at: Ints
    coefficient: Coefficient
    segments: Ints
    constants: bool = False


class Writers(NamedTuple):
    """Changes of a weight's outputs, with an independent multiple for each place on other axes.

    Weights whose outputs are added after they read one value share changes and their multiples.

    Attributes:
        name: The weight.
        axes: The other axes, rising.
        at: The wanted unknown that gives the change of each output. Thin: size 1 along these axes.
        columns: The free unknowns, one for each change of this weight or of those that it shares changes with.
        begin: Where the multiples begin in an element; those of each change together.
        shape: Shape of the multiples of one change: thin, with the sizes of these axes.
        whole: The weight's shape.
    """

    name: str
    axes: tuple[int, ...]
    at: Ints
    columns: Ints
    begin: int
    shape: Shape
    whole: Shape

    @property
    def size(self) -> int:
        """The number of multiples of each change."""
        return math.prod(self.shape)

    @property
    def places(self) -> slice:
        """The positions of all multiples in an element."""
        return slice(self.begin, self.begin + len(self.columns) * self.size)

    def kept(self, lead: int = 0) -> list[int]:
        """Return the axes of the outputs."""
        return [lead + axis for axis in range(len(self.whole)) if axis not in self.axes]

    @property
    def spread(self) -> Ints:
        """For each output of the weight, its index among the outputs that are told apart."""
        sizes = [1 if axis in self.axes else size for axis, size in enumerate(self.whole)]
        return np.broadcast_to(np.arange(self.at.size).reshape(self.at.shape), sizes).ravel()

    def sum_of(self, patterns: sparse.csr_matrix, multiples: Floats) -> Floats:
        """Return the sum of changes times multiples; thin.

        Args:
            patterns: Shape (outputs, changes).
            multiples: Shape (changes, entries).
        """
        made, order = np.asarray(patterns @ multiples), [*self.kept(), *self.axes]
        sizes = [self.whole[axis] if axis in self.axes else self.at.shape[axis] for axis in order]
        result: Floats = made.reshape(sizes).transpose(np.argsort(order))
        return result


class Step(NamedTuple):
    """Unknowns that weights make of others.

    Attributes:
        source: Wanted unknowns that they are made of; thin.
        columns: The free unknowns that they are, -1 for none; flat.
        evaluate: Makes them.
        unseen: For each, the wanted unknown that says how changes of the weight's output change it; thin.
        names: The tensors that are needed.
        changed: Those of the tensors that count with what is added to them: those in a relation's sum, and tables.
        shape: Shape of the unknowns.
        share: Which part of the additions counts.
    """

    source: Ints
    columns: Ints
    evaluate: Any
    unseen: Ints | None
    names: frozenset[str]
    changed: frozenset[str]
    shape: Shape
    share: float = 1.0


class Shown(NamedTuple):
    """The action of shifts on a value inside the network.

    Attributes:
        at: Wanted unknowns that are added to it; thin. None for nothing.
        unknown: Wanted unknowns that are added times functions of the input.
    """

    at: Ints | None = None
    unknown: Ints = np.zeros(0, np.int64)

    @property
    def adds(self) -> bool:
        """Whether anything is added to it."""
        return self.at is not None or len(self.unknown) > 0


class Kind(NamedTuple):
    """Some entries of an element: the name of their kind, the first tensor that they move, and their number."""

    kind: str
    name: str
    entries: Ints


class Taker(NamedTuple):
    """A weight that absorbs the changes of a function of others, which is added to it.

    Attributes:
        name: The weight.
        sign: The sign of its change.
        source: Wanted unknowns that are added to the function's weights; flat.
        evaluate: Computes the change of the function.
    """

    name: str
    sign: float
    source: Ints
    evaluate: ByFunction

    def added(self, known: Floats, weights: Weights) -> Tensor:
        """Return its change, given all wanted unknowns."""
        return self.sign * self.evaluate(torch.from_numpy(known[self.source])[None], weights)[0]


class Folds(NamedTuple):
    """Entries of an element that are multiples of powers of a gain; with an epsilon, of the root of gain + epsilon."""

    gain: str
    entries: Ints
    places: Ints
    power: int
    epsilon: float | None = None


@dataclass
class Parts:
    """The parts of a space of translations, see :class:`Translations`."""

    forms: Forms
    free: list[Free]
    readers: list[Readers]
    writers: list[Writers]
    steps: list[Step]
    shown: dict[str, Shown]
    made: dict[str, Made]
    shapes: dict[str, Shape]
    values: dict[str, Tensor]
    entries: int
    size: int
    common: int
    kinds: list[Kind]
    notes: list[str] = field(default_factory=list)
    takers: list[Taker] = field(default_factory=list)

    @property
    def placed(self) -> list[Free | Readers]:
        """The places with direct additions of unknowns."""
        return [*self.free, *self.readers]

    @property
    def coupled(self) -> list[list[Writers]]:
        """The writers, together with those that share their changes."""
        return [[*own] for _, own in itertools.groupby(self.writers, lambda own: own.begin)]

    @property
    def everywhere(self) -> list[Free | Readers | Writers]:
        """All that is added to tensors."""
        return [*self.free, *self.readers, *self.writers]
