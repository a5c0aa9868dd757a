"""Which shifts there are, from all that the walks through a network found: unknowns and linear equations.

See docs/theory/intertwiners.md, 3.6.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.tracing.equations import solve
from lightning_sym.symmetry.tracing.invisible import Gains, Invisible
from lightning_sym.symmetry.tracing.shifts import (
    LINEAR,
    NORM,
    OPPOSED,
    READERS,
    UNSEEN,
    WRITERS,
    Added,
    Balanced,
    Ints,
    Shift,
    Shown,
    TakenOff,
)
from lightning_sym.symmetry.tracing.tilts import Normed


@dataclass
class Unknowns:
    """Numbers of what is added to one entry of a tensor or value; number 0 is nothing."""

    count: int = 1
    equations: list[tuple[Ints, NDArray[np.float64]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.zero = np.ones(1, bool)

    def fresh(self, shape: tuple[int, ...]) -> Tensor:
        """Return numbers that stand for nothing yet."""
        size = math.prod(shape)
        numbers = torch.arange(self.count, self.count + size).reshape(shape)
        self.count += size
        if self.count > len(self.zero):
            self.zero = np.r_[self.zero, np.zeros(max(self.count, 4096), bool)]
        return numbers

    def vanish(self, numbers: Tensor) -> None:
        """Demand that nothing is added there."""
        self.zero[numbers.reshape(-1).numpy()] = True

    def living(self, numbers: Tensor | None) -> Tensor | None:
        """Return the same numbers, 0 where nothing can be added any more; None if that is everywhere."""
        if numbers is None:
            return None
        gone = torch.from_numpy(np.asarray(self.zero[numbers.numpy()]))
        return None if bool(gone.all()) else numbers.masked_fill(gone, 0)

    def combined(self, *terms: tuple[Tensor, float]) -> Tensor:
        """Return the numbers of a sum of multiples."""
        shape = np.broadcast_shapes(*(numbers.shape for numbers, _ in terms))
        stacked = np.stack([numbers.expand(shape).reshape(-1).numpy() for numbers, _ in terms])
        pairs, inverse = np.unique(stacked, axis=1, return_inverse=True)
        result = self.fresh((pairs.shape[1],))
        self.equations.append((np.vstack([result.numpy(), pairs]).T, np.array([-1.0, *(by for _, by in terms)])))
        self.vanish(result[torch.from_numpy((pairs == 0).all(0))])
        return result[torch.from_numpy(inverse.reshape(-1))].reshape(shape)

    def equate(self, one: Tensor | None, two: Tensor | None) -> None:
        """Demand that the same is added in both places; None for nothing."""
        if one is None and two is None:
            return
        if one is None or two is None:
            self.vanish(one if two is None else two)  # type: ignore[arg-type]
            return
        shape = np.broadcast_shapes(one.shape, two.shape)
        pairs = torch.stack([numbers.expand(shape).reshape(-1) for numbers in (one, two)], 1).numpy()
        self.equations.append((pairs, np.array([1.0, -1.0])))


def plain(numbers: Tensor) -> Tensor | None:
    """Keep the axes along which numbers change, the others with one entry; None if there are none but zeros."""
    for axis, size in enumerate(numbers.shape):
        if size > 1 and bool((numbers == numbers.narrow(axis, 0, 1)).all()):
            numbers = numbers.narrow(axis, 0, 1)
    return numbers.contiguous() if bool(numbers.any()) else None


class Rows(NamedTuple):
    """What multiples of the inverse gain in the rows of a weight add to what its layer puts out.

    The layer has no bias and reads a layer norm.

    Attributes:
        numbers: What is added to each output, by number.
        norm: The norm's gain and bias.
        axis: The weight's axis over which the layer sums.
    """

    numbers: Tensor
    norm: tuple[str | None, str]
    axis: int


class Shifts:
    """Collects, over all walks through a network, what may be added to its tensors.

    Args:
        tensors: Parameters and buffers by name.
        constants: Those that are in no state dict: no tensors of the network, but part of its function.
        outputs: Whether a softmax reads the outputs along their last axis.
    """

    def __init__(self, tensors: Mapping[str, Tensor], constants: Collection[str], *, outputs: bool = False) -> None:
        self.tensors = {n: t for n, t in tensors.items() if n not in constants and t.is_floating_point()}
        self.outputs = outputs
        self.unknowns = Unknowns()
        self.sources: dict[str, Tensor] = {}
        self.reached: dict[str, Tensor] = {}  # which elements of tensors are read, on any example
        self.lost: set[str] = set()  # tensors that something sees as they are
        self.layers: dict[tuple[str | None, str, int, int], list[Tensor | None]] = {}  # what enters each linear layer
        self.others: set[str] = set()  # biases that are not only those of linear layers
        self.writers: dict[str, dict[frozenset[int], Gains]] = {}
        self.readers: dict[str, set[Any]] = {}
        self.read: set[str] = set()  # matrices whose rows are looked up, and that are read where that is seen
        self.embedded: dict[str, list[Invisible]] = {}  # what is invisible of matrices whose rows are looked up, too
        self.values: dict[str, tuple[Tensor | None, bool]] = {}
        self.uses: dict[str, set[tuple[str | None, str | None] | None]] = {}  # of which layer norms tensors are parts
        self.rows: dict[str, Rows] = {}  # by weight
        self.norms: dict[tuple[str | None, str], Normed] = {}  # layer norms, by gain and bias

    def source(self, name: str, *, axes: Collection[int] | None = None) -> Tensor | None:
        """Return the numbers of what is added to a tensor; along all but some axes the same."""
        if name not in self.tensors:
            return None
        shape = tuple(self.tensors[name].shape)
        wanted = tuple(size if axes is None or axis in axes else 1 for axis, size in enumerate(shape))
        if name not in self.sources:
            self.sources[name] = self.unknowns.fresh(wanted)
            if name in self.lost:
                self.unknowns.vanish(self.sources[name])
        found = self.sources[name]
        if any(a > b for a, b in zip(found.shape, wanted, strict=True)):  # used in another way before: what both allow
            narrow = self.unknowns.fresh(wanted)
            self.unknowns.equate(found, narrow)
            self.sources[name] = found = narrow
        return found

    def lose(self, name: str) -> None:
        """Say that nothing may be added to a tensor."""
        self.lost.add(name)
        if name in self.sources:
            self.unknowns.vanish(self.sources[name])

    # What has been found.

    def found(self) -> tuple[list[Shift], dict[str, Shown]]:
        """Return all shifts; and what they do to the values that have a name, unless a softmax reads the outputs."""
        for name, rows in self.rows.items():
            biased = any(weight == name and bias is not None for bias, weight, _, _ in self.layers)
            if biased or self.uses[name] != {rows.norm}:
                self.unknowns.vanish(rows.numbers)
        taken = self._taken_off()
        tied = {name: way for name in self.read if (way := self._tied(name)) is not None}
        for name in self.read - tied.keys():
            self.lose(name)
        forms = self._solved(tied)
        shifts, columns = self._constant(forms, taken)
        for name, ways in self.writers.items():
            for axes, gains in ways.items():
                shape = self.tensors[name].shape
                others = tuple(axis for axis in range(len(shape)) if axis not in axes)
                axis = min(axes) if gains else None
                sizes = tuple(shape[other] for other in others)
                shifts.append(Shift(WRITERS, math.prod(sizes), (Added(name, others, sizes, None, axis, gains),)))
        looked_up: list[int] = []
        for name, read in self.readers.items():
            if len(read) == 1 and None not in read and self._unseen_as_rows(name, *read):
                ((bias, gain, offset, axis),) = read
                out = 1 - axis
                size = self.tensors[name].shape[out]
                gains = ((gain, -1),) if gain is not None else ()
                balanced = (Balanced(bias, gain, offset),) if offset is not None else ()
                looked_up += [len(shifts)] * (name in self.embedded)
                shifts.append(Shift(READERS, size, (Added(name, (out,), (size,), None, axis, gains),), (), balanced))
        if self.outputs:
            return shifts, {}
        shift_of = np.full(forms.shape[1], -1)  # by the number of a free number
        for index, (column, _) in enumerate(columns):
            shift_of[column] = index
        shown = {name: self._shown(forms, columns, shift_of, shifts, *value) for name, value in self.values.items()}
        shown = {name: replace(own, unknown=(*own.unknown, *looked_up)) for name, own in shown.items()}
        for name, way in tied.items():
            found = self._common_row(name, way, self._solved([other for other in tied if other != name]), taken)
            if found is None:
                continue
            shift, acting = found
            for value, (numbers, _) in self.values.items():
                if numbers is not None and acting[numbers.reshape(-1).numpy()].nnz:
                    own = shown[value]
                    shown[value] = replace(own, unknown=(*own.unknown, len(shifts)))
            shifts.append(shift)
        return shifts, shown

    def _solved(self, tied: Collection[str]) -> sparse.csr_matrix:
        """Return all solutions in which nothing is added to the columns of some matrices."""
        zero = self.unknowns.zero[: self.unknowns.count].copy()
        for name in tied:
            zero[self.sources[name].reshape(-1).numpy()] = True
        return solve(self.unknowns.count, self.unknowns.equations, np.flatnonzero(zero))

    def _tied(self, name: str) -> tuple[str | None, str | None, str | None, int] | None:
        """Return how a matrix reads a layer norm (bias, gain, offset, axis) whose rows are looked up elsewhere.

        None if the rows that are looked up may be changed one by one, as if the matrix were a reader only, or not at
        all.
        """
        read = self.readers.get(name, set())
        if len(read) != 1 or None in read or name in self.lost or self._unseen_as_rows(name, *read):
            return None
        ((bias, gain, offset, axis),) = read
        return bias, gain, offset, axis

    def _unseen_as_rows(self, name: str, read: tuple[str | None, str | None, str | None, int]) -> bool:
        """Whether nobody sees multiples of a norm's inverse gain in the rows of a matrix where these are looked up."""
        _, gain, _, axis = read
        inverse: Gains = () if gain is None else ((gain, -1),)
        ways = self.embedded.get(name, [])
        return all(way is None or way.get(frozenset({axis})) == inverse for way in ways)

    def _common_row(
        self,
        name: str,
        read: tuple[str | None, str | None, str | None, int],
        forms: sparse.csr_matrix,
        taken: Sequence[tuple[str, str, int, int, Tensor]],
    ) -> tuple[Shift, sparse.csr_matrix] | None:
        """Return the shift of all rows of a tied embedding by a multiple of the inverse gain of the norm that it reads.

        As a reader it may have any multiples; as an embedding the same for all rows, which others take off.

        See docs/theory/intertwiners.md, 3.6.

        Args:
            name: The matrix.
            read: As :meth:`_tied` returns it.
            forms: All solutions.
            taken: What enters linear layers.

        Returns:
            The shift, and what it adds to the unknowns: (unknowns, entries of a row). None if nothing takes it off.
        """
        bias, gain, offset, _ = read
        rows = forms[self.sources[name].reshape(-1).numpy()].tocsc()
        entering = [numbers.reshape(-1).numpy() for *_, numbers in taken]
        entering += [own.numbers.numpy() for own in self.rows.values()]
        seen = np.zeros(forms.shape[1], bool)
        for numbers in entering:
            seen[forms[numbers].indices] = True
        single = np.flatnonzero((np.diff(rows.indptr) == 1) & ~seen)
        entry, first = np.unique(rows.indices[rows.indptr[single]], return_index=True)
        if len(entry) < rows.shape[0]:
            return None
        acting = (forms[:, single[first]] @ sparse.diags(1 / rows.data[rows.indptr[single[first]]])).tocsr()
        added = []
        for other, source in self.sources.items():
            if acting[source.reshape(-1).numpy()].nnz:
                part = self._along(other, acting, gain)
                if part is None:
                    return None
                added.append(part)
        added.sort(key=lambda part: part.tensor != name)
        balanced = (Balanced(bias, gain, offset),) if offset is not None and bias is not None else ()
        return Shift(OPPOSED, 1, tuple(added), (), balanced, np.zeros((1, 2), np.int64)), acting

    def _along(self, name: str, acting: sparse.csr_matrix, gain: str | None) -> Added | None:
        """Return what a vector adds to a tensor if it stands along one of its axes, times numbers along the others."""
        numbers = self.sources[name]
        for axis, size in enumerate(numbers.shape):
            if size != acting.shape[1]:
                continue
            at = np.arange(numbers.numel()).reshape(tuple(numbers.shape))
            lines = np.moveaxis(at, axis, -1).reshape(-1, size)
            own = acting[numbers.reshape(-1).numpy()].tocsr()
            factor = own[lines[:, 0]][:, [0]].toarray().ravel()
            entries = own.tocoo()
            line = np.zeros(numbers.numel(), np.int64)
            line[lines] = np.arange(len(lines))[:, None]
            entry = np.zeros(numbers.numel(), np.int64)
            entry[lines] = np.arange(size)
            whole = entries.nnz == size * np.count_nonzero(factor)
            if (
                not whole
                or (entries.col != entry[entries.row]).any()
                or (entries.data != factor[line[entries.row]]).any()
            ):
                continue
            others = [other for other in _axes(numbers) if other != axis]
            if (factor == factor[0]).all():
                others, factor = [], factor[:1]
            shape = tuple(numbers.shape[other] for other in others)
            gains: Gains = () if gain is None else ((gain, -1),)
            return Added(name, tuple(others), shape, sparse.csr_matrix(factor[:, None]), axis if gains else None, gains)
        return None

    def alone(self) -> dict[tuple[str | None, str], Normed]:
        """Return the layer norms that only linear layers read, whose weights read nothing else, by gain and bias."""
        return {
            pair: norm
            for pair, norm in self.norms.items()
            if norm.alone and all(self.uses[name] == {pair} for name in (pair[1], *(name for name, _ in norm.readers)))
        }

    def _taken_off(self) -> list[tuple[str, str, int, int, Tensor]]:
        """Demand that every layer of one bias takes off the same; return what is taken off."""
        by_bias: dict[str | None, list[tuple[str, int, int]]] = {}
        for bias, weight, axis, out in self.layers:
            by_bias.setdefault(bias, []).append((weight, axis, out))
        result = []
        for (bias, weight, axis, out), entering in self.layers.items():
            living = [self.unknowns.living(numbers) for numbers in entering]
            if bias is None or bias in self.others or bias in self.lost or len(by_bias[bias]) > 1:
                for numbers in living:
                    if numbers is not None:
                        self.unknowns.vanish(numbers)
                continue
            for numbers in living[1:]:
                self.unknowns.equate(living[0], numbers)
            if living[0] is not None:
                result.append((bias, weight, axis, out, living[0]))
        return result

    def _constant(
        self, forms: sparse.csr_matrix, taken: Sequence[tuple[str, str, int, int, Tensor]]
    ) -> tuple[list[Shift], list[Any]]:
        """Return the shifts by constants, and which of the free numbers each has as entries."""
        added, off = {}, []
        for name, numbers in self.sources.items():
            own = forms[numbers.reshape(-1).numpy()]
            if own.nnz:
                added[name] = own
        for bias, weight, axis, out, numbers in taken:
            own = forms[numbers.reshape(-1).numpy()]
            if own.nnz:
                size = self.tensors[weight].shape[axis]
                whole = own if own.shape[0] == size else sparse.vstack([own] * size).tocsr()
                off.append((bias, weight, axis, out, whole))
        read = {(name,): forms[rows.numbers.numpy()] for name, rows in self.rows.items()}  # one may be added to, too
        read = {key: own for key, own in read.items() if own.nnz}
        groups = alike_places([*read.items(), *added.items(), *enumerate(entry[-1] for entry in off)], forms.shape[1])
        # What is added to no tensor changes nothing.
        groups = {key: own for key, own in groups.items() if any(isinstance(index, (str, tuple)) for index in key)}
        order: dict[Any, int] = {name: place for place, name in enumerate(self.tensors)}
        order |= {(name,): place for name, place in order.items()}
        shifts, columns = [], []
        for kind, column in sorted(groups.items(), key=lambda item: min(order[n] for n in item[0] if n in order)):
            names = sorted((n for n in kind if isinstance(n, str)), key=order.__getitem__)
            parts = [(name, self.sources[name], added[name][:, column].tocsr()) for name in names]
            rows = [(key[0], self.rows[key[0]], read[key][:, column].tocsr()) for key in kind if isinstance(key, tuple)]
            basis, pivots = pivoted([matrix for _, _, matrix in rows or parts])
            norms = list(dict.fromkeys(own.norm for _, own, _ in rows))
            if len(norms) > 1 or (basis.shape[1] < len(column) and rows):
                continue  # the function of other weights is needed to say what goes with what
            shifts.append(
                Shift(
                    READERS if rows else kind_of(parts, [off[i] for i in kind if isinstance(i, int)], self.tensors),
                    basis.shape[1],
                    (
                        *(_reading(name, own, (matrix @ basis).tocsr()) for name, own, matrix in rows),
                        *(
                            Added(name, axes, tuple(numbers.shape[axis] for axis in axes), (matrix @ basis).tocsr())
                            for name, numbers, matrix in parts
                            for axes in [_axes(numbers)]
                        ),
                    ),
                    tuple(
                        TakenOff(*off[index][:-1], (off[index][-1][:, column] @ basis).tocsr())
                        for index in kind
                        if isinstance(index, int)
                    ),
                    pivots=pivots,
                    norm=norms[0] if norms else None,
                )
            )
            columns.append((column, basis))
        return shifts, columns

    def _shown(
        self,
        forms: sparse.csr_matrix,
        columns: Sequence[Any],
        shift_of: Ints,
        shifts: Sequence[Shift],
        numbers: Tensor | None,
        dim: bool,
    ) -> Shown:
        unknown = tuple(i for i, shift in enumerate(shifts) if shift.kind not in (READERS, LINEAR, NORM)) if dim else ()
        if numbers is None:
            return Shown(unknown=unknown)
        own = forms[numbers.reshape(-1).numpy()]
        acting = np.unique(shift_of[own.indices])
        parts = [(i, (own[:, columns[i][0]] @ columns[i][1]).tocsr()) for i in acting[acting >= 0].tolist()]
        shown = tuple((index, matrix) for index, matrix in parts if matrix.nnz)
        norms = tuple((index, norm) for index, _ in shown if (norm := shifts[index].norm) is not None)
        return Shown(_axes(numbers), shown, unknown, norms)


def alike_places(found: Sequence[tuple[Any, sparse.csr_matrix]], number: int) -> dict[tuple[Any, ...], Ints]:
    """Group free numbers by the places where they are added.

    Args:
        found: Places, and what is added there: (positions, free numbers).
        number: How many free numbers there are.

    Returns:
        The free numbers, rising, by all their places; in the order of the first place, then of the numbers.
    """
    group, keys = np.zeros(number, np.int64), [tuple[Any, ...]()]
    begin = np.zeros(number, np.int64)
    for place, (index, matrix) in enumerate(found):
        members = np.unique(matrix.indices)
        old, which = np.unique(group[members], return_inverse=True)
        begin[members] = np.where(group[members] == 0, place * number + members, begin[members])
        group[members] = len(keys) + which
        keys += [(*keys[before], index) for before in old.tolist()]
    order = np.lexsort((np.arange(number), group))
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if number else []
    return {keys[group[own[0]]]: own for own in sorted(parts, key=lambda own: int(begin[own].min(initial=0)))}


def _reading(name: str, rows: Rows, matrix: sparse.csr_matrix) -> Added:
    gain, _ = rows.norm
    return Added(name, (1 - rows.axis,), (matrix.shape[0],), matrix, rows.axis, () if gain is None else ((gain, -1),))


def _axes(numbers: Tensor) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(numbers.shape) if size > 1)


def pivoted(matrices: Sequence[sparse.csr_matrix]) -> tuple[sparse.csr_matrix, Ints]:
    """Return a basis in which each entry stands alone somewhere, and where.

    Args:
        matrices: (positions, entries) each.

    Returns:
        Combinations of the entries, in columns; and for each, in which matrix and row it stands alone, with factor 1.
    """
    whole = sparse.vstack(matrices).tocsr()
    starts = np.cumsum([0, *(matrix.shape[0] for matrix in matrices)])
    alone = np.flatnonzero(np.diff(whole.indptr) == 1)
    columns, first = np.unique(whole.indices[whole.indptr[alone]], return_index=True)
    rows = alone[first]
    if len(columns) == whole.shape[1]:
        basis = sparse.diags(1 / whole.data[whole.indptr[rows]]).tocsr()
    else:  # entangled: as many independent rows as there are
        dense, rows_found = whole.toarray().T.copy(), list[int]()
        for _ in range(len(dense)):
            at = np.unravel_index(np.abs(dense[len(rows_found) :]).argmax(), dense[len(rows_found) :].shape)
            here = len(rows_found)
            if abs(dense[here + at[0], at[1]]) < 1e-9:
                break
            dense[[here, here + at[0]]] = dense[[here + at[0], here]]
            dense[here] /= dense[here, at[1]]
            for other in range(len(dense)):
                if other != here:
                    dense[other] -= dense[other, at[1]] * dense[here]
            rows_found.append(int(at[1]))
        rows = np.array(rows_found)
        basis = sparse.csr_matrix(np.linalg.inv(whole[rows].toarray()))
    matrix = np.searchsorted(starts, rows, side="right") - 1
    return basis, np.stack([matrix, rows - starts[matrix]], 1)


def kind_of(parts: Sequence[Any], off: Sequence[Any], tensors: Mapping[str, Tensor]) -> str:
    """Return what a shift of biases is called, from what is added to which tensor, and what is taken off."""
    if any(not isinstance(tensors[name], torch.nn.Parameter) for name, _, _ in parts):
        whole = all(
            matrix.shape[0] == matrix.shape[1] and (matrix != sparse.identity(matrix.shape[0])).nnz == 0
            for _, _, matrix in parts
        )
        return NORM if whole and not off and isinstance(tensors[parts[0][0]], torch.nn.Parameter) else OPPOSED
    return OPPOSED if len(parts) > 1 else LINEAR if off else UNSEEN
