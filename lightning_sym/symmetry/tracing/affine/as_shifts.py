"""Writes the translations of a network as shifts, as far as shifts can express them.

See docs/theory/intertwiners.md, 3.6.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.tracing.affine.contractions import Sum, aligned
from lightning_sym.symmetry.tracing.affine.solution import Eliminated, Generic, eliminate, matrix_of
from lightning_sym.symmetry.tracing.affine.system import Derived, Rows, Weights
from lightning_sym.symmetry.tracing.affine.translations import Translations
from lightning_sym.symmetry.tracing.affine.values import Coefficient, Ints, Total, Value, varying
from lightning_sym.symmetry.tracing.invisible import Gains
from lightning_sym.symmetry.tracing.shift_equations import alike_places, kind_of, pivoted
from lightning_sym.symmetry.tracing.shifts import READERS, WRITERS, Added, Balanced, Shift, TakenOff

_SAME = 1e-7  # by how much definitions differ at most that are the same for all weights


class Written(NamedTuple):
    """What translations are as shifts.

    Attributes:
        shifts: Those that can be expressed, each a set of directions that linear elements keep.
        left: By the names of tensors, how many entries cannot be.
    """

    shifts: list[Shift]
    left: dict[tuple[str, ...], int]


class _Reader(NamedTuple):
    """Rows of a weight to which multiples of a relation's coefficients are added."""

    name: str
    axes: frozenset[int]
    rows: Rows


class _UnwrittenError(Exception):
    """A direction that no shift expresses."""


def as_shifts(translations: Translations) -> Written:
    """Write translations as shifts.

    Args:
        translations: Of a network.
    """
    return _Writer(translations).written()


class _Writer:
    """Writes translations as shifts."""

    def __init__(self, translations: Translations) -> None:
        self.translations, self.system = translations, translations.system
        solution = translations.solution
        self.solved = solution.solved
        self.forms = self.solved.forms.tocsr()
        self.other = self._elsewhere()
        kinds = np.isin(self.solved.free, solution.shifts)
        self.is_shift: NDArray[np.bool_] = kinds
        self.is_direction: NDArray[np.bool_] = np.isin(self.solved.free, solution.directions)
        self.column = np.full(self.forms.shape[0], -1)
        self.column[self.solved.free] = np.arange(len(self.solved.free))
        self.order = {name: place for place, name in enumerate(self.system.tensors)}

    def _elsewhere(self) -> sparse.csr_matrix | None:
        """Return what free unknowns make of all at other weights; None if others are free there."""
        system = self.system
        zero = system.unknowns.zero[: system.unknowns.count].copy()
        zero[0] = True
        equations = matrix_of(system, Weights(system, Generic(system, 1)))
        other: Eliminated = eliminate(equations, zero, self.translations.solution.kinds)
        return other.forms.tocsr() if np.array_equal(other.free, self.solved.free) else None

    def _own(self, numbers: Tensor, columns: Any = slice(None)) -> sparse.csr_matrix:
        """Return what free unknowns make of some unknowns, if that is the same for all weights."""
        at = numbers.reshape(-1).numpy()
        own = self.forms[at][:, columns].tocsr()
        if self.other is None or (abs(own - self.other[at][:, columns]) > _SAME).nnz:
            raise _UnwrittenError
        return own

    def _gains_along(self, numbers: Tensor, column: int) -> Gains:
        """Return a gain, and its power, of which one free unknown makes multiples."""
        at = numbers.reshape(-1).numpy()
        if self.other is None:
            raise _UnwrittenError
        both = [forms[at][:, [column]].toarray().ravel() for forms in (self.forms, self.other)]
        weights = [Generic(self.system, seed) for seed in range(2)]
        for name, tensor in self.system.tensors.items():
            if tuple(tensor.shape) != (len(at),) or name in self.system.constants or not tensor.is_floating_point():
                continue
            for power in (1, -1):
                known = [own[name].numpy() ** power for own in weights]
                if all(np.allclose(own * by[0], own[0] * by, atol=_SAME) for own, by in zip(both, known, strict=True)):
                    return ((name, power),)
        raise _UnwrittenError

    def written(self) -> Written:
        """Return all shifts, and what is left."""
        shifts: list[Shift] = []
        left: dict[tuple[str, ...], int] = {}
        for name, families in self.system.families.items():
            for axes, family in families.items():
                shifts += self._writers(name, axes, family.directions, left)
        found = self._places()
        groups = alike_places([(place, self.forms[own.reshape(-1).numpy()]) for place, own in found.items()],
                              self.forms.shape[1])  # fmt: skip
        for key, columns in groups.items():
            own = columns[self.is_shift[columns]]
            if not len(own):
                continue
            try:
                shifts.append(self._shift([(place, found[place]) for place in key], own))
            except _UnwrittenError:
                names = tuple(dict.fromkeys(self._name(place) for place in key))
                left[names] = left.get(names, 0) + len(own)
        return Written(shifts, left)

    def _places(self) -> dict[Any, Tensor]:
        """Return the unknowns of all places where free unknowns may be seen."""
        found: dict[Any, Tensor] = {("free", name): numbers for name, numbers in self.system.free.items()}
        for name, families in self.system.families.items():
            for axes, family in families.items():
                for key, rows in family.rows.items():
                    found["rows", name, axes, key] = rows.numbers
                found["directions", name, axes] = family.directions
        for index, own in enumerate(self.translations.solution.order):
            found["made", index] = own.source
        return found

    def _name(self, place: Any) -> str:
        if place[0] != "made":
            return str(place[1])
        own: Derived = self.translations.solution.order[place[1]]
        weights = own.weights[0].origin if own.weights is not None else None
        return weights[0] if weights is not None else "a layer behind"

    # Weights whose outputs lose their mean.

    def _writers(
        self, name: str, axes: frozenset[int], directions: Tensor, left: dict[tuple[str, ...], int]
    ) -> list[Shift]:
        """Return what may be added to all columns of a weight alike."""
        at = directions.reshape(-1).numpy()
        columns = np.unique(self.forms[at].indices)
        columns = columns[self.is_direction[columns]]
        if not len(columns):
            return []
        shape = self.system.shape(name)
        size = math.prod(shape[axis] for axis in axes)
        others = tuple(sorted(axes))
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        try:
            patterns = self._own(directions, columns)
        except _UnwrittenError:
            try:
                if len(columns) > 1 or len(kept) > 1:
                    raise
                gains = self._gains_along(directions, int(columns[0]))
            except _UnwrittenError:
                left[name,] = left.get((name,), 0) + len(columns) * size
                return []
            sizes = tuple(shape[axis] for axis in others)
            return [Shift(WRITERS, size, (Added(name, others, sizes, None, kept[0], gains),))]
        if len(columns) == 1 and patterns.nnz == len(at) and (patterns.data == patterns.data[0]).all():
            return [Shift(WRITERS, size, (Added(name, others, tuple(shape[axis] for axis in others)),))]
        whole = np.arange(math.prod(shape)).reshape(shape)
        rows = np.moveaxis(whole, [*kept, *others], range(len(shape))).reshape(len(at), size)
        own = patterns.tocoo()
        entries = (rows[own.row], own.col[:, None] * size + np.arange(size))
        data = np.repeat(own.data, size)
        matrix = sparse.csr_matrix((data, tuple(e.ravel() for e in entries)), (whole.size, len(columns) * size))
        basis, pivots = pivoted([matrix])
        every = tuple(range(len(shape)))
        return [Shift(WRITERS, basis.shape[1], (Added(name, every, shape, (matrix @ basis).tocsr()),), pivots=pivots)]

    # What is added to biases, and to rows.

    def _shift(self, places: Sequence[tuple[Any, Tensor]], columns: Ints) -> Shift:
        """Return the shift of some free unknowns, which are added in the same places."""
        if any(place[0] == "directions" for place, _ in places):
            raise _UnwrittenError
        names = sorted((place[1] for place, _ in places if place[0] == "free"), key=self.order.__getitem__)
        made = [self.translations.solution.order[place[1]] for place, _ in places if place[0] == "made"]
        read = [self._reader(place, columns) for place, _ in places if place[0] == "rows"]
        if not read and not made and len(names) == len(columns) == 1:
            mean = self._mean(names[0], int(columns[0]))
            if mean is not None:
                return mean
        parts = []
        for name in names:
            numbers = self.system.free[name]
            along = tuple(axis for axis, size in enumerate(numbers.shape) if size > 1)
            parts.append((name, along, tuple(numbers.shape[axis] for axis in along), self._own(numbers, columns)))
        through = bool(made) and all(own.weights is not None for own in made)
        if read and not ((parts or through) and all(self._is_table(reader) for reader, _ in read)):
            return self._rows(read, parts, made, columns)
        for (name, axes, _), own in read:
            shape = self.system.shape(name)
            along = tuple(axis for axis in range(len(shape)) if axis not in axes)
            parts.append((name, along, tuple(shape[axis] for axis in along), own))
        if not parts:
            raise _UnwrittenError
        basis, pivots = pivoted([own for *_, own in parts])
        if basis.shape[1] < len(columns):
            raise _UnwrittenError
        off = [part for own in made for part in self._taken_off(own, columns, basis)]
        added = tuple(Added(name, along, sizes, (own @ basis).tocsr()) for name, along, sizes, own in parts)
        kind = kind_of([(name, None, own) for name, *_, own in parts], off, self.system.tensors)
        return Shift(kind, basis.shape[1], added, tuple(off), pivots=pivots)

    def _mean(self, name: str, column: int) -> Shift | None:
        """Return the shift of all of a tensor by one number, or by multiples of gains; None if it is no such."""
        numbers = self.system.free[name]
        own = self.forms[numbers.reshape(-1).numpy()][:, [column]].toarray().ravel()
        try:
            self._own(numbers, [column])
        except _UnwrittenError:
            gains = self._gains_along(numbers, column)
            return Shift(WRITERS, 1, (Added(name, (), (), None, 0, gains),))
        return Shift(WRITERS, 1, (Added(name, (), ()),)) if numbers.numel() > 1 and len(set(own)) == 1 else None

    @staticmethod
    def _is_table(reader: "_Reader") -> bool:
        """Whether rows are those of a table that is looked up, in all of which the same is added."""
        return not reader.rows.coefficient.items and not bool(reader.rows.segments.any())

    def _reader(self, place: Any, columns: Ints) -> tuple[_Reader, sparse.csr_matrix]:
        _, name, axes, key = place
        rows = self.system.families[name][axes].rows[key]
        return _Reader(name, axes, rows), self._own(rows.numbers, columns)

    def _rows(self, read: Any, parts: Any, made: Sequence[Derived], columns: Ints) -> Shift:
        """Return the shift of rows that read a norm."""
        if len(read) > 1 or parts:
            raise _UnwrittenError
        ((name, axes, rows), own) = read[0]
        shape = self.system.shape(name)
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        if len(axes) != 1 or len(kept) != 1:
            raise _UnwrittenError
        (axis,), (out,) = axes, kept
        gains = self._gains(rows.coefficient, shape[axis])
        segments = int(rows.segments.max()) + 1
        if segments == 1 and own.shape[0] == len(columns) and (own != sparse.identity(len(columns))).nnz == 0:
            balanced = tuple(self._balanced(each, columns) for each in made)
            added = Added(name, (out,), (shape[out],), None, axis if gains else None, gains)
            return Shift(READERS, len(columns), (added,), (), balanced)
        if made or gains:
            raise _UnwrittenError
        whole = np.arange(math.prod(shape)).reshape(shape)
        lines = np.moveaxis(whole, [out, axis], [0, 1])  # (outputs, inputs)
        number = rows.segments.numpy()[None] * shape[out] + np.arange(shape[out])[:, None]
        matrix = sparse.csr_matrix((np.ones(whole.size), (lines.ravel(), number.ravel())), (whole.size, own.shape[0]))
        basis, pivots = pivoted([(matrix @ own).tocsr()])
        added = Added(name, tuple(range(len(shape))), shape, (matrix @ own @ basis).tocsr())
        return Shift(READERS, basis.shape[1], (added,), pivots=pivots)

    def _gains(self, coefficient: Coefficient, size: int) -> Gains:
        """Return a coefficient as powers of gains, one for each place that a weight sums over."""
        if coefficient.factor != 1:
            raise _UnwrittenError
        found = []
        for atom, power, at in coefficient.items:
            whole = at.expand(size) if at.ndim == 1 else at.reshape(-1)
            if atom.kind != "parameter" or not torch.equal(whole, torch.arange(size)):
                raise _UnwrittenError
            found.append((str(atom.key), power))
        return tuple(found)

    def _target(self, numbers: Tensor) -> list[tuple[str, Ints, Ints]]:
        """Return the biases that take off all that is made: which of their entries, and which of what is made."""
        passing = self.column[numbers.reshape(-1).numpy()]
        alive = np.flatnonzero(passing >= 0)
        columns = passing[alive]
        found = []
        taken = np.zeros(len(alive), np.int64)
        for place, own in self._places().items():
            part = self.forms[own.reshape(-1).numpy()][:, columns]
            if not part.nnz:
                continue
            if place[0] != "free" or own.ndim != 1:
                raise _UnwrittenError
            entries = self._own(own, columns).tocoo()
            if (entries.data != -1).any() or len(set(entries.row.tolist())) < entries.nnz:
                raise _UnwrittenError
            taken[entries.col] += 1
            found.append((place[1], entries.row.astype(np.int64), alive[entries.col]))
        if not found or (taken != 1).any():
            raise _UnwrittenError
        return found

    def _one_place(self, made: Derived, by: Sum) -> tuple[Tensor, Tensor]:
        """Return what enters a contraction, and what leaves it, at one of the places where all is the same."""
        entering, leaving = made.source, made.numbers
        for at, letter in enumerate(by.one):
            if letter in by.two or entering.shape[at] == 1 or letter not in by.out:
                continue
            first = entering.narrow(at, 0, 1)
            every = self.forms[entering.reshape(-1).numpy()]
            if (abs(every - self.forms[first.expand(entering.shape).reshape(-1).numpy()]) > _SAME).nnz:
                raise _UnwrittenError
            entering, leaving = first, leaving.narrow(by.out.index(letter), 0, 1)
        passing = self.column[made.numbers.reshape(-1).numpy()]
        if set(passing[passing >= 0]) - set(self.column[leaving.reshape(-1).numpy()].tolist()):
            raise _UnwrittenError
        return entering, leaving

    def _taken_off(self, made: Derived, columns: Ints, basis: sparse.csr_matrix) -> list[TakenOff]:
        """Return the parts of a weight's output that biases take off again."""
        own, leaving, outer = self._contracted(made, lambda entering: self._own(entering, columns) @ basis)
        return self._ends(own, leaving, outer, made)

    def _contracted(self, made: Derived, formed: Callable[[Tensor], Any]) -> tuple[TakenOff, Tensor, Ints | None]:
        """Return what a weight makes of what enters it, for no bias yet; where it stands, on which of its outputs."""
        if made.weights is None or made.total is not None:
            raise _UnwrittenError
        weights, by = made.weights
        if weights.origin is None:
            raise _UnwrittenError
        name, _ = weights.origin
        shape = self.system.shape(name)
        entering, leaving = self._one_place(made, by)
        source = formed(entering)
        outer: Ints | None
        if made.source.ndim == len(by.one) and by.one[0] == "a" and by.two[:2] in ("zy", "yz") and len(by.two) > 2:
            axis, out = self._of_kernel(weights, shape)
            inner, outer = np.arange(shape[axis]), None
        else:
            axis, out, inner, outer = self._of_sum(weights, by, made)
        if source.shape[0] == 1 and len(inner) > 1:
            source = sparse.vstack([source] * len(inner))
        if source.shape[0] != len(inner):
            raise _UnwrittenError
        place = sparse.csr_matrix((np.ones(len(inner)), (inner, np.arange(len(inner)))), (shape[axis], len(inner)))
        unseen, _ = self._unseen(made)
        whole = np.arange(shape[out])
        if unseen is not None and outer is not None and not np.array_equal(outer, whole):
            raise _UnwrittenError
        return TakenOff("", name, axis, out, (place @ source).tocsr(), unseen=unseen), leaving, outer

    def _ends(self, own: TakenOff, leaving: Tensor, outer: Ints | None, made: Derived) -> list[TakenOff]:
        """Return the biases that take off what a weight makes, or what further weights make of that."""
        whole = np.arange(self.system.shape(own.weight)[own.out])
        further = self._behind(leaving)
        if further is not None:
            outputs = whole if outer is None else outer
            place = sparse.identity(len(whole), format="csr")[outputs]
            at = self.column[leaving.reshape(-1).numpy()]
            if self._unseen(made)[1] or (at < 0).any():
                raise _UnwrittenError
            second, after, ends = self._contracted(further, lambda entering: self._own(entering, at) @ place)
            return self._ends(replace(second, before=own), after, ends, further)
        result = []
        blind = self._unseen(made)[1]
        for bias, entries, given in self._target(leaving):
            rows = given if outer is None else outer[given]
            alike = self.system.shape(bias) == (len(whole),) and len(rows) == len(whole)
            alike = alike and np.array_equal(entries[np.argsort(rows)], whole)
            if not alike and blind:
                raise _UnwrittenError
            result.append(replace(own, bias=bias, at=None if alike else (entries, rows)))
        return result

    def _behind(self, leaving: Tensor) -> Derived | None:
        """Return the one weight that reads what another one makes, if no bias takes that off."""
        passing = self.column[leaving.reshape(-1).numpy()]
        columns = passing[passing >= 0]
        reading = [
            place for place, own in self._places().items() if self.forms[own.reshape(-1).numpy()][:, columns].nnz
        ]
        if len(reading) == 1 and reading[0][0] == "made":
            made: Derived = self.translations.solution.order[reading[0][1]]
            return made
        return None

    @staticmethod
    def _of_kernel(weights: Value, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the axes of inputs and outputs of a whole kernel, however its other axes are grouped."""
        _, coordinates = weights.origin  # type: ignore[misc]
        if weights.shape[:2] != shape[:2] or math.prod(weights.shape) != math.prod(shape):
            raise _UnwrittenError
        for axis, own in enumerate(coordinates):
            if axis > 1 and varying(own) & {0, 1}:
                raise _UnwrittenError
            if axis < 2 and not torch.equal(own.reshape(-1), torch.arange(shape[axis])):
                raise _UnwrittenError
        return 1, 0

    def _of_sum(self, weights: Value, by: Sum, made: Derived) -> tuple[int, int, Ints, Ints]:
        """Return the axes of a weight, and where on these what is summed over and what comes out stand."""
        assert weights.origin is not None
        name, coordinates = weights.origin
        gone = {by.two.index(letter) for letter in by.gone}
        inner = [axis for axis, own in enumerate(coordinates) if varying(own) & gone]
        outer = [axis for axis, own in enumerate(coordinates) if varying(own) - gone]
        if len(inner) != 1 or len(outer) != 1 or inner == outer:
            raise _UnwrittenError
        if any(letter in by.one and letter in by.two and letter in by.out for letter in by.one):
            raise _UnwrittenError  # what differs from block to block
        shape = self.system.shape(name)
        if any(size > 1 for axis, size in enumerate(shape) if axis not in (inner[0], outer[0])):
            raise _UnwrittenError  # a part of a kernel
        thin = dict(zip(by.one, made.source.shape, strict=True))
        sizes = dict(zip(by.two, weights.shape, strict=True))
        if any(thin[letter] not in (1, sizes[letter]) for letter in by.gone):
            raise _UnwrittenError
        if len({thin[letter] == 1 for letter in by.gone if sizes[letter] > 1}) > 1:
            raise _UnwrittenError

        def line(axis: int, letters: str, order: str) -> Ints:
            own = coordinates[axis]
            for at, letter in enumerate(by.two):
                own = own.narrow(at, 0, 1) if letter not in letters else own
            own = aligned(own, by.two, "".join(letter for letter in order if letter in letters))
            whole = [sizes[letter] for letter in order if letter in letters]
            return own.expand(whole).reshape(-1).numpy()

        kept = "".join(letter for letter in by.two if letter in by.out)
        return inner[0], outer[0], line(inner[0], by.gone, by.one), line(outer[0], kept, by.out)

    def _unseen(self, made: Derived) -> tuple[NDArray[np.float64] | None, bool]:
        """Return what nobody sees of what comes out of a weight, but for what all share; and if there is any."""
        if made.unseen is None:
            return None, False
        columns = np.flatnonzero(self.is_direction)
        own = self._own(made.unseen, columns)
        own = own[:, own.getnnz(0) > 0]
        if not own.shape[1] or own.shape[0] == 1:
            return None, bool(own.shape[1])
        dense = own.toarray()
        if dense.shape[1] == 1 and (dense == dense[0]).all():
            return None, True
        return np.asarray(np.linalg.qr(dense)[0]), True

    def _balanced(self, made: Derived, columns: Ints) -> Balanced:
        """Return the bias that takes off what rows make of a norm's bias."""
        total: Total | None = made.total
        if total is None or total.segments != 1 or total.constant or len(total.terms) != 1:
            raise _UnwrittenError
        if total.before is not None and not (total.before[0].vanishes and total.before[0].segments == 1):
            raise _UnwrittenError
        coefficient, _, shape = total.terms[0]
        gains = dict(self._gains(coefficient, math.prod(shape)))
        offsets = [name for name, power in gains.items() if power == 1]
        divided = [name for name, power in gains.items() if power == -1]
        source = self._own(made.source, columns)
        if len(offsets) != 1 or len(divided) > 1 or len(gains) > 2:
            raise _UnwrittenError
        if source.shape[0] != len(columns) or (source != sparse.identity(len(columns))).nnz:
            raise _UnwrittenError
        found = self._target(made.numbers)
        if len(found) > 1 or not np.array_equal(found[0][1], found[0][2]) or len(found[0][1]) != len(columns):
            raise _UnwrittenError
        return Balanced(found[0][0], divided[0] if divided else None, offsets[0])
