"""The vector space of additions to a network's tensors: elements, their additions, and rates.

See docs/theory/translations.md.
"""

import functools
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, rising
from lightning_sym.symmetry.rearranging import Summand
from lightning_sym.symmetry.tracing.affine.forms import FormsAt
from lightning_sym.symmetry.tracing.affine.parts import Folds, Kind, Parts, Readers, Shown, Step, Writers
from lightning_sym.symmetry.tracing.affine.tilts import Leaning, Normed
from lightning_sym.symmetry.tracing.affine.weights import ByFunction, Generic, Made, Weights, names_of
from lightning_sym.symmetry.views import FixedTensors

_TINY, _LIMIT = 1e-60, 1e-6  # near zero; and how close two limits are, relative to their size
_DEEPEST = 16  # of the equations between gains
_NOTHING = 1e-12  # sums that are smaller than that, relative to their terms, are zero


class Translations:
    """All that may be added to a network's tensors, as a vector space.

    An element holds free unknowns only; these are added to values of the network. Its additions to tensors are computed
    from these and from the network's weights, in the order of the graph. Elements add: the action of one and then
    another is the action of their sum.

    Args:
        parts: Its parts.
        folds: The gains that entries are multiples of: a rotation between gains then acts on them in the same way for
            all networks (docs/theory/translations.md).

    Attributes:
        size: The number of entries of an element.
        entries: How many of these come before the multiples of changes of weights.
        dimension: The number of independent directions.
        kinds: Kinds of the entries.
        notes: Limits of the space.
        normed: The layer norms that only linear layers read, by gain and bias.
        leaning: The streams that only layer norms and linear layers read.
        idle: The tensors that only functions read that another weight absorbs.
    """

    def __init__(self, parts: Parts | None = None, folds: Sequence[Folds] = ()) -> None:
        self.parts, self.folds = parts, tuple(folds)
        self.size = 0 if parts is None else parts.size
        self.entries = 0 if parts is None else parts.entries
        self.dimension = 0 if parts is None else parts.size - parts.common
        self.kinds: list[Kind] = [] if parts is None else parts.kinds
        self.notes: list[str] = [] if parts is None else parts.notes
        self.normed: dict[tuple[str | None, str], Normed] = {}
        self.leaning: list[Leaning] = []
        self.idle: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.size > 0

    def __len__(self) -> int:
        return self.size

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("generic", "signature")}

    def __repr__(self) -> str:
        return f"<Translations {self.size} {self.signature}>"

    @cached_property
    def signature(self) -> str:
        """A short hash of all that elements are."""
        state = hashlib.sha256()
        if self.parts is not None:
            forms = self.parts.forms.constant
            arrays = [forms.indptr, forms.indices, forms.data]
            for part in self.parts.everywhere:
                state.update(part.name.encode())
                arrays.append(part.at)
            for own in self.parts.steps:
                state.update(repr(sorted(own.names)).encode())
                arrays += [own.source, own.columns]
            for taker in self.parts.takers:
                state.update(f"{taker.name} {taker.sign}".encode())
                arrays.append(taker.source)
            for fold in self.folds:
                state.update(f"{fold.gain} {fold.power}".encode())
                arrays += [fold.entries, fold.places]
            for array in arrays:
                state.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
        return state.hexdigest()[:16]

    def made(self, node: Any) -> Made:
        """Return the value of an atom's key."""
        assert self.parts is not None
        return node if isinstance(node, Made) else self.parts.made[node]

    def at(self, tensors: Mapping[str, Tensor]) -> "Located":
        """Return the action of elements at some weights.

        Args:
            tensors: Parameters and buffers, by name.
        """
        if isinstance(tensors, FixedTensors):
            return tensors.kept(f"shifts {self.signature}", lambda: Located(self, tensors))
        return Located(self, tensors)

    @cached_property
    def generic(self) -> "Located":
        """The action of elements at generic weights."""
        return self.at(self.generic_tensors())

    def generic_tensors(self, seed: int = 0) -> Generic:
        """Return generic weights."""
        parts = self.parts
        return Generic({}, {}) if parts is None else Generic(parts.shapes, parts.values, seed)

    @cached_property
    def names(self) -> set[str]:
        """The tensors with additions at any weights."""
        if self.parts is None:
            return set()
        found, moved = set(), np.diff(self.generic.matrix.indptr) > 0
        for part in self.parts.everywhere:
            if moved[part.at].any():
                found.add(part.name)
        return found | {part.name for part in self.parts.takers}

    def shows(self, element: Tensor, at: Ints) -> bool:
        """Return whether an element may add anything to wanted unknowns."""
        return bool(element[torch.from_numpy(self.reaching(at)[0])].any())

    def needed(self, at: Ints) -> set[str]:
        """Return the tensors that an element's additions to wanted unknowns depend on."""
        assert self.parts is not None
        entries, steps = self.reaching(at)
        found = {fold.gain for fold in self.folds if entries[fold.entries].any()}
        found = found.union(*(step.names for step in steps))
        return found | (self.parts.forms.names if np.isin(at, self.parts.forms.varying).any() else set())

    def reaching(self, at: Ints) -> tuple[Bools, list[Step]]:
        """Return the entries of elements that may change wanted unknowns, and the steps in between."""
        assert self.parts is not None
        parts, forms = self.parts, self.generic.matrix
        columns, steps = reached(parts.steps, forms, at.ravel())
        # A bias cancels W t except along the directions in which the outputs of W may change.
        sources = [
            step.source.ravel()
            for step in parts.steps
            if step.unseen is not None and columns[forms[step.unseen.ravel()].indices].any()
        ]
        if sources:
            columns, steps = reached(parts.steps, forms, np.concatenate([at.ravel(), *sources]))
        entries = np.zeros(self.size, bool)
        entries[: self.entries] = columns[: self.entries]
        for part in parts.writers:
            entries[part.places] = np.repeat(columns[part.columns], part.size)
        return entries, steps

    @property
    def factors(self) -> set[str]:
        """The tensors whose powers elements are multiples of, without those for steps only."""
        if self.parts is None:
            return set()
        found = set(self.parts.forms.names) | {fold.gain for fold in self.folds}
        return found.union(*(names_of(self, rows.coefficient) for rows in self.parts.readers))

    @property
    def divisors(self) -> set[str]:
        """The tensors that stay in functions of weights which others absorb; such a function may divide by them."""
        functions = [] if self.parts is None else [own.evaluate for own in self.parts.takers]
        return set().union(*(own.node.names() - {name for name, _ in own.given} for own in functions))

    @property
    def shown(self) -> dict[str, Shown]:
        """The action of elements on named values inside the network."""
        return {} if self.parts is None else self.parts.shown

    @property
    def adds_up(self) -> bool:
        """Whether the action of one element and then another is that of their sum, where they change two factors.

        It is so if the unknowns are differences of values before and after, at the places that tell the others.
        """
        if self.parts is None or all(step.share == 1 for step in self.parts.steps):
            return True
        one, two = torch.randn(2, self.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        first = self.generic.known(one)
        both = first + self.at(self.generic.after(one, first)).known(two)
        at = np.concatenate([part.at.ravel() for part in self.parts.placed])
        return np.allclose(both[at], self.generic.known(one + two)[at], rtol=0, atol=1e-9 * np.abs(both).max())

    @cached_property
    def may_move_one_by_one(self) -> set[str]:
        """The tensors with an entry that can change and that no other entry of the tensor depends on."""
        if self.parts is None:
            return set()
        moved = np.diff(self.generic.matrix.indptr) > 0
        found = {part.name for part in self.parts.free if moved[part.at].any()}
        singly = (part for part in self.parts.writers if (self.generic.patterns(part).getnnz(0) == 1).any())
        return found | {part.name for part in singly}

    def named(self, kind: str) -> set[str]:
        """Return the first tensors of all entries of a kind."""
        return {own.name for own in self.kinds if own.kind == kind}


def reached(steps: Sequence[Step], forms: sparse.csr_matrix, wanted: Ints) -> tuple[Bools, list[Step]]:
    """Return the free unknowns that wanted ones depend on, and the steps in between, in order."""
    needed = np.zeros(forms.shape[1], bool)
    needed[forms[wanted].indices] = True
    found = []
    for step in reversed(steps):
        if needed[step.columns[step.columns >= 0]].any():
            found.append(step)
            needed[forms[step.source.ravel()].indices] = True
    return needed, found[::-1]


def scales(matrix: sparse.csr_matrix) -> Floats:
    """Return factors of a matrix's rows that, with factors of its columns, turn all entries into 1 or -1.

    Rows that have none keep their size. Entries are products of gains: factors count additions in multiples of these.
    """
    found, entries = np.ones(matrix.shape[0]), matrix.tocoo()
    row, column, logs = entries.row, entries.col, np.log(np.abs(entries.data))
    graph = sparse.csr_matrix((np.ones(len(row)), (row, len(found) + column)), [sum(matrix.shape)] * 2)
    _, label = sparse.csgraph.connected_components(graph, False)
    of_rows, of_columns = np.full(matrix.shape[0], np.nan), np.full(matrix.shape[1], np.nan)
    of_columns[np.unique(label[len(found) :], return_index=True)[1]] = 0
    for _ in range(_DEEPEST):
        for one, two, at, there in ((of_rows, of_columns, row, column), (of_columns, of_rows, column, row)):
            new = np.isnan(one[at]) & ~np.isnan(two[there])
            one[at[new]] = -logs[new] - two[there[new]]
    uneven = np.abs(logs + of_rows[row] + of_columns[column])
    told = ~np.isin(label[: len(found)], label[row[~(uneven < _LIMIT)]]) & ~np.isnan(of_rows)
    found[told] = np.exp(of_rows[told])
    return found


def _bounded(numbers: Tensor) -> Tensor:
    """Replace results of division by zero by 0; their multiples are 0, and lower precisions overflow."""
    return torch.where(numbers.abs() > 1 / _TINY**0.5, 0.0, numbers)


def _add_at(total: Floats, at: Ints, values: Tensor) -> None:
    """Add values at indices, of which some may be equal."""
    np.add.at(total, at.ravel(), values.numpy().ravel())


def _same(one: Floats, two: Floats, least: float = 0.0) -> Bools:
    same: Bools = np.abs(one - two) <= _LIMIT * np.abs(one) + least
    return same


def _same_columns(one: sparse.csr_matrix, two: sparse.csr_matrix) -> Bools:
    apart, size = (abs(own).max(0).toarray().ravel() for own in (one - two, one))
    return _same(size, size + apart)


class Located:
    """The action of elements of a space of translations at some weights.

    Args:
        space: The space.
        tensors: Parameters and buffers, by name. Parts that depend on missing tensors are left out.
        tiny: Replacement for zeros.
    """

    def __init__(self, space: Translations, tensors: Mapping[str, Tensor], tiny: float = _TINY) -> None:
        assert space.parts is not None
        self.space, self.parts, self.tensors = space, space.parts, tensors
        self.weights = Weights(space, tensors, tiny)
        self._frames: dict[bytes, tuple[Tensor, Tensor] | None] = {}
        self._coefficients: dict[int, Tensor] = {}
        self._shared: Located = self  # whose forms are the same
        if not self.parts.forms.size and not isinstance(tensors, Generic):  # as they depend on no weights
            self._shared = space.generic
            self._frames = self._shared._frames

    @cached_property
    def forms(self) -> FormsAt:
        """The linear forms of all unknowns in free ones."""
        whole = self.parts.forms.names <= self.tensors.keys()
        return self.parts.forms.at(self.weights if whole else None)

    @cached_property
    def matrix(self) -> sparse.csr_matrix:
        """The same as a matrix. Shape (wanted, free)."""
        return (
            self._shared.matrix
            if self._shared is not self
            else self.forms.matrix(np.arange(self.parts.forms.constant.shape[1]))
        )

    @cached_property
    def multiples(self) -> Floats:
        """The factor of each entry of an element; 0 for those that do not pass. Shape (size,)."""
        return np.where(self.passing, self._multiples, 0.0)

    @cached_property
    def passing(self) -> Bools:
        """The entries of an element that act at these weights: those that need no division by zero. Shape (size,).

        Their additions need a limit as zeros are approached, the same for two kinds of tiny numbers.
        """
        found, entries = np.ones(self.space.size, bool), self.space.entries
        made = [(step.evaluate, step.source) for step in self.parts.steps if isinstance(step.evaluate, ByFunction)]
        made += [(taker.evaluate, taker.source) for taker in self.parts.takers]
        for function, source in made:  # some divide by gains
            there = function.node.names() <= self.tensors.keys()
            if there and not bool(self.weights.node(function.node).isfinite().all()):
                found[:entries] &= self.matrix[source, :entries].getnnz(0) == 0
        known = [own for own in self.parts.readers if names_of(self.space, own.coefficient) <= self.tensors.keys()]
        coefficients = [self.coefficient(rows).numpy() for rows in known]
        if not (bool(self.forms) and len(self._multiples) and self.weights.has_zeros):
            return found
        other = Located(self.space, self.tensors, _TINY**1.5)
        one, two = (own.matrix[:, :entries] @ sparse.diags(own._multiples[:entries]) for own in (self, other))
        found &= _same(self._multiples, other._multiples)
        found[:entries] &= _same_columns(one, two)
        for rows, own in zip(known, coefficients, strict=True):
            segments = np.unique(rows.segments[~_same(own, other.coefficient(rows).numpy(), _TINY**0.5)])
            found[:entries] &= self.matrix[rows.at[segments].ravel(), :entries].getnnz(0) == 0
        for part in self.parts.writers:
            same = _same_columns(self.patterns(part), other.patterns(part))
            found[part.places] &= np.repeat(same, part.size)
        return found

    @cached_property
    def _multiples(self) -> Floats:
        found = np.ones(self.space.size)
        for gain, entries, places, power, epsilon in self.space.folds:
            if gain not in self.tensors:
                found[entries] = 0
                continue
            numbers = self.weights.tensor(gain).reshape(-1)[torch.from_numpy(places)]
            numbers = numbers if epsilon is None else (numbers + epsilon).abs().sqrt()
            found[entries] *= self.weights.without_zeros(numbers).numpy() ** power
        return found

    def patterns(self, part: Writers) -> sparse.csr_matrix:
        """Return changes of a weight's outputs. Shape (outputs, changes)."""
        found = self._shared._parts_of_patterns
        key = part.name, part.axes
        if key not in found:
            first = self.parts.writers[0].columns[0]
            found[key] = self._patterns[part.at.ravel()][:, part.columns - first]
        return found[key]

    def spread_patterns(self, part: Writers) -> Tensor:
        """Return the changes of a weight's outputs, thin. Shape (changes, *thin)."""
        found = self._shared._spread_patterns
        key = part.name, part.axes
        if key not in found:
            whole = self.patterns(part).toarray().T.reshape(len(part.columns), *part.at.shape)
            found[key] = torch.from_numpy(np.ascontiguousarray(whole))
        return found[key]

    @cached_property
    def _spread_patterns(self) -> dict[Any, Tensor]:
        return {}

    @cached_property
    def _parts_of_patterns(self) -> dict[Any, sparse.csr_matrix]:
        return {}

    @cached_property
    def _patterns(self) -> sparse.csr_matrix:
        if self._shared is not self:
            return self._shared._patterns
        columns = [own[0].columns for own in self.parts.coupled]
        return self.forms.matrix(np.concatenate([np.zeros(0, np.int64), *columns]))

    def values(self, element: Tensor) -> Floats:
        """Return the free unknowns of an element, those of changes of weights left out. Shape (free,)."""
        values = np.zeros(self.parts.forms.constant.shape[1])
        entries = self.space.entries
        values[:entries] = element[:entries].numpy() * self.multiples[:entries]
        return values

    def of_writers(self, element: Tensor, part: Writers) -> Floats:
        """Return multiples of changes of a weight. Shape (changes, entries)."""
        own: Floats = element[part.places].numpy() * self.multiples[part.places]
        return own.reshape(len(part.columns), -1)

    def known(self, element: Tensor) -> Floats:
        """Return all wanted unknowns. Shape (wanted,)."""
        known, changed = self.forms(self.values(element)), dict[bytes, Weights]()
        for step in self._steps:
            if known[step.source].any():
                weights = self._changed(step, element, known, changed)
                made = self._made(step, torch.from_numpy(known[step.source])[None], weights)
                used, rows, forms, _ = self._forms_of(step)
                values = made.reshape(-1).numpy()[used]
                if self.parts.forms.size:
                    known += self.forms(values, step.columns[used])
                else:
                    known[rows] += forms @ values
        return known

    @cached_property
    def _steps(self) -> list[Step]:
        """The steps with all that they need."""
        return [step for step in self.parts.steps if all(name in self.tensors for name in step.names)]

    def _made(self, step: Step, source: Tensor, weights: Weights) -> Tensor:
        """Return the unknowns that a step computes with some weights. Shapes (batch, *thin)."""
        made: Tensor = step.evaluate(source, weights)
        return made if step.unseen is None else self._seen(made, step.unseen)

    def _seen(self, made: Tensor, unseen: Ints, *, transposed: bool = False) -> Tensor:
        """Subtract the invisible part of a translation after a weight: shifts could otherwise not be added.

        Lengths are counted in multiples of the invisible directions, as linear elements carry these along.

        Args:
            made: The translation.
            unseen: See :class:`Step`.
            transposed: Whether to apply the transposed map, to derivatives.
        """
        frame = self._frame(unseen)
        if frame is None:
            return made
        axes = [axis for axis, size in enumerate(unseen.shape) if size > 1]
        if not axes:
            return torch.zeros_like(made)
        lead = made.ndim - unseen.ndim
        moved = made.movedim([lead + axis for axis in axes], list(range(-len(axes), 0)))
        directions, by = frame
        by = 1 / by if transposed else by
        flat = moved.reshape(-1, len(by)) * by
        flat = (flat - flat @ directions @ directions.T) / by
        back: Tensor = flat.reshape(moved.shape).movedim(list(range(-len(axes), 0)), [lead + axis for axis in axes])
        return back

    def _frame(self, unseen: Ints) -> tuple[Tensor, Tensor] | None:
        """Return an orthonormal basis of the invisible directions, shape (places, rank), and the scales of the places.

        None if there are no such directions. It is kept: fits of shifts ask for it in each of their iterations.
        """
        key = unseen.tobytes()
        if key not in self._frames:
            basis = self._patterns[unseen.ravel()]
            basis = basis[:, np.diff(basis.tocsc().indptr) > 0]
            self._frames[key] = None
            if basis.shape[1]:
                scale = scales(basis)
                left, sizes, _ = np.linalg.svd((sparse.diags(scale) @ basis).toarray(), full_matrices=False)
                directions = torch.from_numpy(left[:, sizes > _NOTHING * sizes[0]])
                self._frames[key] = directions, torch.from_numpy(scale)
        return self._frames[key]

    def _changed(self, step: Step, element: Tensor, known: Floats, found: dict[bytes, Weights]) -> Weights:
        """Return the weights with their additions, as far as they count for a step; `found` holds those made."""
        if not step.changed:
            return self.weights
        places = [part.at for part in self.parts.placed if part.name in step.changed]
        key = repr((sorted(step.names), step.share)).encode() + b"".join(known[at].tobytes() for at in places)
        if key not in found:
            tensors = {name: self.tensors[name] for name in step.names}
            for name, added in self._added(element, known, step.changed).items():
                parts = [Summand(step.share * own.values, own.times) for own in added]
                tensors[name] = functools.reduce(lambda t, own: own.added_to(t), parts, self.weights.tensor(name))
            found[key] = Weights(self.space, tensors)
        return found[key]

    def summands(self, element: Tensor) -> dict[str, list[Summand]]:
        """Return the additions of an element to tensors, by name.

        Args:
            element: Shape (size,), float64.

        Returns:
            Summands that broadcast to the tensor, float64 on the CPU.
        """
        return self._added(element, self.known(element), self.tensors.keys()) if bool(element.any()) else {}

    def after(self, element: Tensor, known: Floats) -> dict[str, Tensor]:
        """Return the tensors of all steps after an element has acted; `known` are its unknowns."""
        names = {name for step in self._steps for name in step.names} | self.parts.forms.names
        added = self._added(element, known, names)
        return {name: functools.reduce(lambda t, own: own.added_to(t), added.get(name, ()), self.weights.tensor(name))
                for name in names}  # fmt: skip

    def _added(self, element: Tensor, known: Floats, names: Collection[str]) -> dict[str, list[Summand]]:
        """Return the additions to some tensors, given all wanted unknowns that these are made of."""
        found: dict[str, list[Summand]] = {}
        for part in self.parts.free:
            if part.name in names and known[part.at].any():
                found.setdefault(part.name, []).append(Summand(torch.from_numpy(known[part.at])))
        for rows in self.parts.readers:
            there = rows.name in names and names_of(self.space, rows.coefficient) <= self.tensors.keys()
            if there and known[rows.at].any():
                found.setdefault(rows.name, []).append(self._of_rows(rows, known))
        for writers in self.parts.writers:
            if writers.name in names and bool(element[writers.places].any()):
                found.setdefault(writers.name, []).append(self.of_one(writers, element))
        for taker in self.parts.takers:
            if taker.name in names and known[taker.source].any() and taker.evaluate.node.names() <= self.tensors.keys():
                found.setdefault(taker.name, []).append(Summand(taker.added(known, self.weights)))
        return found

    def _of_rows(self, rows: Readers, known: Floats) -> Summand:
        whole = self.parts.shapes[rows.name]
        thin = [size if axis in rows.axes else 1 for axis, size in enumerate(whole)]
        by = _bounded(self.coefficient(rows)).reshape(thin)
        if len(rows.at) == 1:
            return Summand(torch.from_numpy(known[rows.at[0]]), by)
        grid = np.meshgrid(*(np.arange(size) for size in rows.at.shape[1:]), indexing="ij", sparse=True)
        number = rows.at[(rows.segments.reshape(thin), *grid)]
        return Summand(torch.from_numpy(known[number]), by)

    def coefficient(self, rows: Readers) -> Tensor:
        """Return the coefficients that multiply rows. Shape (places,)."""
        if id(rows) not in self._coefficients:
            self._coefficients[id(rows)] = self.weights.coefficient(rows.coefficient).expand(len(rows.segments))
        return self._coefficients[id(rows)]

    def of_one(self, part: Writers, element: Tensor) -> Summand:
        """Return the addition of an element to a weight by changes of its outputs."""
        multiples = self.of_writers(element, part)
        if len(part.columns) == 1:
            return Summand(torch.from_numpy(multiples.reshape(part.shape)), _bounded(self.spread_patterns(part)[0]))
        return Summand(torch.from_numpy(np.ascontiguousarray(part.sum_of(self.patterns(part), multiples))))

    # How fast.

    def rates(self, names: Collection[str]) -> dict[str, sparse.csr_matrix]:
        """Return the rates of change of tensors by each entry of an element: one row per weight, one column per entry.

        Args:
            names: Names of the tensors.
        """
        parts, size = self.parts, self.space.size
        wanted = [part.at for part in parts.placed if part.name in names]
        takers = [own for own in parts.takers if own.name in names]
        wanted += [own.source for own in takers]
        total = self._total(rising(np.concatenate([np.zeros(0, np.int64), *(at.ravel() for at in wanted)])))
        found = {
            name: sparse.csr_matrix((math.prod(parts.shapes[name]), size)) for name in names if name in parts.shapes
        }
        for part in parts.free:
            if part.name in found:
                at = np.broadcast_to(part.at, parts.shapes[part.name]).ravel()
                found[part.name] = found[part.name] + total[at]
        for rows in parts.readers:
            if rows.name in found:
                found[rows.name] = found[rows.name] + self._rates_of_rows(rows, total)
        for writers in parts.writers:
            if writers.name in found:
                found[writers.name] = found[writers.name] + self._rates_of_writers(writers)
        for own in takers:
            source = total[own.source]
            columns = np.flatnonzero(source.getnnz(0))
            made = own.evaluate.rates(torch.from_numpy(source[:, columns].toarray().T.copy()), self.weights)
            moved = sparse.coo_matrix(own.sign * made.reshape(len(columns), -1).numpy().T)
            shape = found[own.name].shape
            found[own.name] += sparse.csr_matrix((moved.data, (moved.row, columns[moved.col])), shape)
        return found

    def pulled_back(self, gradients: Mapping[str, Tensor]) -> Floats:
        """Return the derivative of a loss by the entries of an element, at zero: the transpose of :meth:`rates`.

        Args:
            gradients: Derivatives of the loss by tensors, by name, float64, on the CPU.

        Returns:
            Shape (size,).
        """
        parts = self.parts
        total, result = np.zeros(self.matrix.shape[0]), np.zeros(self.space.size)
        flat = {name: own.reshape(parts.shapes[name]) for name, own in gradients.items() if name in parts.shapes}
        for part in parts.free:
            if part.name in flat:
                _add_at(total, part.at, flat[part.name].sum_to_size(part.at.shape))
        for rows in parts.readers:
            if rows.name in flat:
                _add_at(total, rows.at, self._along_rows(rows, flat[rows.name]))
        for taker in parts.takers:
            if taker.name in flat:
                given = taker.sign * flat[taker.name][None]
                _add_at(total, taker.source, taker.evaluate.pulled_back(given, taker.source.shape, self.weights)[0])
        for step in reversed(self._steps):
            used, at, _, transposed = self._forms_of(step)
            if not len(used) or not (slopes := transposed @ total[at]).any():
                continue
            made = torch.zeros(step.columns.shape, dtype=torch.float64)
            made[torch.from_numpy(used)] = torch.from_numpy(slopes)
            made = made.reshape(1, *step.shape)
            made = made if step.unseen is None else self._seen(made, step.unseen, transposed=True)
            _add_at(total, step.source, step.evaluate.pulled_back(made, step.source.shape, self.weights)[0])
        result[: self.space.entries] = self._direct_forms @ total
        for writers in parts.writers:
            if writers.name in flat:
                axes = [axis for axis in writers.kept() if writers.at.shape[axis] == 1]
                own = flat[writers.name].sum(axes, keepdim=True) if axes else flat[writers.name]
                own = own.permute([*writers.kept(), *writers.axes]).reshape(-1, writers.size)
                result[writers.places] += (self.patterns(writers).T @ own.numpy()).ravel()
        return result * self.multiples

    def _along_rows(self, rows: Readers, slopes: Tensor) -> Tensor:
        """Return the derivative by the multiples of rows, of a shape that broadcasts to that of `rows.at`."""
        axes, sizes = rows.axes, [1 if axis in rows.axes else size for axis, size in enumerate(slopes.shape)]
        others = [axis for axis in range(slopes.ndim) if axis not in axes]
        by, own = self.coefficient(rows), slopes.permute((*others, *axes)).reshape(-1, len(rows.segments))
        if len(rows.at) == 1:
            return (own @ by).reshape(1, *sizes).sum_to_size(rows.at.shape)
        summed = own.new_zeros(len(own), len(rows.at)).index_add(1, torch.from_numpy(rows.segments), own * by)
        return summed.T.reshape(len(rows.at), *sizes).sum_to_size(rows.at.shape)

    @cached_property
    def _by_column(self) -> sparse.csc_matrix:
        return self._shared._by_column if self._shared is not self else self.matrix.tocsc()

    def _forms_of(self, step: Step) -> tuple[Ints, Ints, sparse.csr_matrix, sparse.csr_matrix]:
        """Return which unknowns of a step count, the wanted ones that they change, these forms, and the transposed."""
        found = self._shared._parts_of_forms
        if id(step) not in found:
            used = np.flatnonzero(step.columns >= 0)
            whole = self._by_column[:, step.columns[used]]
            rows = rising(whole.indices)
            places = np.searchsorted(rows, whole.indices)
            forms = sparse.csc_matrix((whole.data, places, whole.indptr), (len(rows), len(used)))
            found[id(step)] = used, rows, forms.tocsr(), forms.T
        return found[id(step)]

    @cached_property
    def _parts_of_forms(self) -> dict[int, tuple[Ints, Ints, sparse.csr_matrix, sparse.csr_matrix]]:
        return {}

    @cached_property
    def _direct_forms(self) -> sparse.csr_matrix:
        """The forms of all wanted unknowns in the first entries of an element, transposed."""
        own = self._shared
        return self._by_column[:, : self.space.entries].T.tocsr() if own is self else own._direct_forms

    def direct(self, names: Collection[str]) -> dict[str, sparse.csr_matrix]:
        """Return the direct additions of each entry of an element to tensors, without those through weights.

        Args:
            names: Names of the tensors.

        Returns:
            By name, shape (entries of the tensor, size); without tensors that get no direct additions.
        """
        entries = self.space.entries
        forms = (self.matrix[:, :entries] @ sparse.diags(self.multiples[:entries])).tocsr()
        more = sparse.csr_matrix((forms.shape[0], self.space.size - entries))
        forms = sparse.hstack([forms, more]).tocsr()
        found = {}
        for part in self.parts.free:
            if part.name in names:
                found[part.name] = forms[np.broadcast_to(part.at, self.parts.shapes[part.name]).ravel()]
        return found

    def _total(self, wanted: Ints) -> sparse.csr_matrix:
        """Return the rates of change of wanted unknowns by entries of an element. Shape (all wanted, size)."""
        parts, entries = self.parts, self.space.entries
        forms = self.matrix
        shape = (entries, self.space.size)
        scaled = sparse.csr_matrix((self.multiples[:entries], (np.arange(entries), np.arange(entries))), shape)
        total = (forms[:, :entries] @ scaled).tocsr()
        for step in reached(parts.steps, forms, wanted)[1]:
            source = total[step.source.ravel()].tocsc()
            columns = np.flatnonzero(np.diff(source.indptr))
            if not len(columns) or not step.names <= self.tensors.keys():
                continue
            given = torch.from_numpy(source[:, columns].toarray().T.reshape(-1, *step.source.shape).copy())
            rates = getattr(step.evaluate, "rates", None)  # of those that are not linear
            made = self._made(step, given, self.weights) if rates is None else rates(given, self.weights)
            made = made.reshape(len(columns), -1).numpy()
            used = np.flatnonzero(step.columns >= 0)
            own = sparse.csc_matrix(made[:, used].T)
            moved = (forms[:, step.columns[used]] @ own).tocoo()
            total = total + sparse.csr_matrix((moved.data, (moved.row, columns[moved.col])), total.shape)
        return total

    def _rates_of_rows(self, rows: Readers, total: sparse.csr_matrix) -> sparse.csr_matrix:
        by, number = self._places_of_rows(rows)
        return sparse.diags(by.ravel()) @ total[number.ravel()]

    def _places_of_rows(self, rows: Readers) -> tuple[Floats, Ints]:
        """Return the coefficient and the wanted unknown at each entry of a weight. Both of its shape."""
        whole = self.parts.shapes[rows.name]
        thin = [size if axis in rows.axes else 1 for axis, size in enumerate(whole)]
        grid = np.meshgrid(*(np.arange(size) for size in rows.at.shape[1:]), indexing="ij", sparse=True)
        number = rows.at[(rows.segments.reshape(thin), *grid)]
        by = self.coefficient(rows).numpy().reshape(thin)
        return np.broadcast_to(by, whole), np.broadcast_to(number, whole)

    def _rates_of_writers(self, part: Writers) -> sparse.csr_matrix:
        patterns = self.patterns(part)[part.spread].tocoo()
        number = np.arange(math.prod(part.whole)).reshape(part.whole)
        number = number.transpose([*part.kept(), *part.axes]).reshape(-1, part.size)
        rows = number[patterns.row]
        columns = part.begin + patterns.col[:, None] * part.size + np.arange(part.size)
        data = patterns.data[:, None] * self.multiples[columns]
        shape = (math.prod(part.whole), self.space.size)
        return sparse.csr_matrix((data.ravel(), (rows.ravel(), columns.ravel())), shape)
