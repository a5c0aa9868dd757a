"""Solve the equations of an interpreted network: find free unknowns and express all others by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, rising
from lightning_sym.symmetry.equations import compress
from lightning_sym.symmetry.numbering import Numbers
from lightning_sym.symmetry.tracing.affine.system import Derived, System
from lightning_sym.symmetry.tracing.affine.values import DERIVED, DIRECTIONS, FREE, SUMS
from lightning_sym.symmetry.tracing.affine.weights import Generic, Weights

_NOTHING = 1e-9


def matrix_of(system: System, weights: Weights, begin: int = 0) -> sparse.csr_matrix:
    """Return the matrix of the equations at given weights, from block `begin` on: one column for each unknown."""
    made: dict[Any, Floats] = {}
    data, columns, lengths = [np.zeros(0)], [np.zeros(0, np.int32)], [np.zeros(1, np.int32)]
    for numbers, terms in system.unknowns.equations[begin:]:
        values = np.empty(numbers.shape)
        for column, (factor, items) in enumerate(terms):
            values[:, column] = factor
            for atom, power, at in items:
                if atom not in made:
                    made[atom] = weights.atom(atom).numpy()
                own = made[atom][at]
                if power < 0 and (own == 0).any():
                    raise ValueError("shifts would be divided by a constant of zero")
                values[:, column] *= own**power
        present = numbers != 0
        data.append(values[present])
        columns.append(numbers[present].astype(np.int32))
        lengths.append(present.sum(1, dtype=np.int32))
    starts = np.cumsum(np.concatenate(lengths), dtype=np.int32)
    shape = (len(starts) - 1, system.unknowns.count)
    return sparse.csr_matrix((np.concatenate(data), np.concatenate(columns), starts), shape)


@dataclass
class Eliminated:
    """The result of an elimination.

    Attributes:
        free: The unknowns that stay free.
        bound: The unknowns that equations express by others.
        rows: The independent equations that define `bound`, one for each.
        zero: Mask of the unknowns that are zero.
        forms: Matrix that expresses all unknowns by the free ones. Shape (unknowns, free).
        whole: Whether all fields come from all equations; otherwise `bound` and `rows` come from the first ones.
    """

    free: Ints
    bound: Ints
    rows: Ints
    zero: Bools
    forms: sparse.csr_matrix
    whole: bool = True

    def narrowed(self, equations: sparse.csr_matrix, zero: Bools, priority: Numbers) -> "Eliminated":
        """Solve further equations for the free unknowns; see :func:`eliminate`."""
        forms, more = self.forms, np.flatnonzero(zero & ~self.zero)
        rows = sparse.vstack([_sum([(equations, forms)], (equations.shape[0], forms.shape[1])), forms[more]]).tocsr()
        inner = eliminate(rows, np.zeros(len(self.free), bool), priority[self.free])
        forms = _sum([(forms, inner.forms)], (forms.shape[0], len(inner.free)))
        return Eliminated(self.free[inner.free], self.bound, self.rows, zero | self.zero, forms, whole=False)


class _Elimination:
    """Elimination of sorted unknowns: each equation defines its last unknown.

    Args:
        zero: Mask of the unknowns that are zero.
        count: The number of unknowns.
    """

    def __init__(self, zero: Bools, count: int) -> None:
        self.zero, self.count = zero, count
        self.root, self.factor = np.arange(count, dtype=np.int32), np.ones(count)  # unknowns as multiples of others
        self.gone = zero.copy()  # those that are zero, or multiples of others
        self.used: list[Ints] = []
        self.defined_by: list[Ints] = []
        self.definitions: list[tuple[Ints, sparse.csr_matrix]] = []

    def put_in(self, rows: sparse.csr_matrix) -> sparse.csr_matrix:
        """Substitute unknowns that are zero or multiples of others."""
        if not self.gone[rows.indices].any():
            return rows
        root, data = self.root[rows.indices], rows.data * self.factor[rows.indices]
        data[self.zero[root]] = 0
        return _without_cancelled(sparse.csr_matrix((data, root, rows.indptr.copy()), rows.shape))

    def solve_short(self, rows: sparse.csr_matrix, ids: Ints) -> None:
        """Solve equations with at most two unknowns."""
        start, two = rows.indptr[:-1], np.diff(rows.indptr) == 2
        end = np.where(two, start + 1, start)
        (a, b), (p, q) = ((own[start], own[end]) for own in (rows.indices, rows.data))  # equations p a + q b = 0
        q[~two] = 0
        while len(a):
            p, q, a, b = p * self.factor[a], q * self.factor[b], self.root[a], self.root[b]
            p[self.zero[a]] = q[self.zero[b]] = 0
            same = np.flatnonzero((a == b) & (p != 0) & (q != 0))
            total = p[same] + q[same]
            total[np.abs(total) <= _NOTHING * (np.abs(p[same]) + np.abs(q[same]))] = 0
            p[same], q[same] = total, 0
            both = (p != 0) & (q != 0)
            single = ((p != 0) | (q != 0)) & ~both
            self.zero[np.where(p != 0, a, b)[single]] = True
            if not both.all():
                a, b, p, q, ids = (own[both] for own in (a, b, p, q, ids))
            if single.any():
                continue
            turned = a > b
            (a, b), (p, q) = ((np.where(turned, v, u), np.where(turned, u, v)) for u, v in ((a, b), (p, q)))
            high, first = np.unique(b, return_index=True)
            self.used.append(ids[first])
            self.defined_by.append(high)
            self.root[high] = a[first]
            self.factor[high] = -p[first] / q[first]
            compress(self.root, self.factor)
            left = np.ones(len(ids), bool)
            left[first] = False
            a, b, p, q, ids = (own[left] for own in (a, b, p, q, ids))
        self.gone = self.zero | (self.root != np.arange(self.count))

    def solve(self, rows: sparse.csr_matrix, ids: Ints) -> None:
        """Solve equations; equations with one or two unknowns always go first."""
        rows, place = self.put_in(rows), np.zeros(self.count, np.int64)
        while True:
            length = np.diff(rows.indptr)
            short = (length == 1) | (length == 2)
            if short.any():
                self.solve_short(rows[short], ids[short])
                rows, ids = self.put_in(rows[length > 2]), ids[length > 2]
                continue
            if not length.all():
                rows, ids = rows[length > 0], ids[length > 0]
            if not rows.shape[0]:
                return
            # Sparse sums and products cost as much as there are columns: keep the few unknowns that occur.
            met = rising(rows.indices)
            place[met] = np.arange(len(met))
            narrow = sparse.csr_matrix((rows.data, place[rows.indices], rows.indptr), (rows.shape[0], len(met)))
            narrow, ids, (defined, definition, used) = _defined(narrow, ids)
            rows, definition = (_widened(own, met, self.count) for own in (narrow, definition))
            self.definitions.append((met[defined], definition))
            self.used.append(used)
            self.defined_by.append(met[defined])

    def forms(self, free: Ints, order: Ints) -> sparse.csr_matrix:
        """Return the matrix that expresses all unknowns, in some order, by the free ones. Shape (unknowns, free)."""
        place, count = np.full(self.count, -1, np.int32), len(free)
        place[free] = np.arange(count)
        made = sparse.csr_matrix((0, count))  # the forms of the unknowns that others define
        for defined, definition in reversed(self.definitions):
            definition = self.put_in(definition)
            columns = place[definition.indices]
            beside = columns >= count
            rest = _those(definition, ~beside, columns, count)
            more = _those(definition, beside, columns - count, made.shape[0])
            place[defined] = count + made.shape[0] + np.arange(len(defined))
            made = sparse.vstack([made, _sum([(rest, None), (more, made)], rest.shape)], format="csr")
        # Unknowns that are zero get the empty row at the end.
        forms = sparse.vstack([sparse.identity(count, format="csr"), made, sparse.csr_matrix((1, count))], format="csr")
        root = self.root[order]
        result = forms[np.where(self.zero[root], -1, place[root])]
        result.data *= np.repeat(self.factor[order], np.diff(result.indptr))
        return result


def eliminate(equations: sparse.csr_matrix, zero: Bools, priority: Numbers) -> Eliminated:
    """Solve homogeneous equations for the unknowns of highest priority.

    Args:
        equations: Matrix with one row for each equation and one column for each unknown.
        zero: Mask of the unknowns that are zero.
        priority: An equation defines its unknown of highest priority; unknowns of priority 0 are defined last.
    """
    count = equations.shape[1]
    order = np.argsort(priority, kind="stable")  # from here on, the last unknowns are defined first
    back = np.empty(count, np.int32)
    back[order] = np.arange(count)
    data = equations.data * ~zero[equations.indices]
    rows = sparse.csr_matrix((data, back[equations.indices], equations.indptr.copy()), equations.shape)
    found = _Elimination(zero[order].copy(), count)
    found.solve(_without_cancelled(rows), np.arange(equations.shape[0]))
    gone = found.zero[found.root]
    nothing = np.zeros(0, np.int64)
    bound, equation = np.concatenate([nothing, *found.defined_by]), np.concatenate([nothing, *found.used])
    bound, equation = bound[~gone[bound]], equation[~gone[bound]]
    free = ~gone
    free[bound] = False
    columns = np.flatnonzero(free)
    return Eliminated(order[columns], order[bound], equation, gone[back], found.forms(columns, back))


def _without_cancelled(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    """Sum the duplicate entries of a matrix in place and drop the rounding errors of terms that cancel."""
    rows.has_canonical_format = rows.has_sorted_indices = False
    rows.sort_indices()
    again = rows.indices[1:] == rows.indices[:-1]
    again[rows.indptr[(rows.indptr > 0) & (rows.indptr < rows.nnz)] - 1] = False  # the next row begins there
    if again.any():
        size = sparse.csr_matrix((np.abs(rows.data), rows.indices.copy(), rows.indptr.copy()), rows.shape)
        for own in (rows, size):
            own.sum_duplicates()
        rows.data[np.abs(rows.data) <= _NOTHING * size.data] = 0
    rows.eliminate_zeros()
    return rows


def _sum(
    products: Sequence[tuple[sparse.csr_matrix, sparse.csr_matrix | None]], shape: tuple[int, int]
) -> sparse.csr_matrix:
    """Return a sum of products of matrices (None for the identity) without the rounding errors of terms that cancel.

    An entry counts as zero only relative to the terms of its sum: an output may be a tiny multiple of a value.
    """
    made = [one.tocsr() if two is None else (one @ two).tocsr() for one, two in products]
    result = sum(made[1:], start=made[0]).tocsr()
    terms = sum(one.nnz if two is None else int(np.diff(two.indptr)[one.indices].sum()) for one, two in products)
    if result.nnz < terms:  # else each entry is one term, and nothing cancels
        sizes = [abs(one) if two is None else abs(one) @ abs(two) for one, two in products]
        size = sum(sizes[1:], start=sizes[0])
        result = result.multiply((abs(result) > _NOTHING * size).astype(np.float64)).tocsr()
    result.eliminate_zeros()
    result.sort_indices()
    return result


def _those(rows: sparse.csr_matrix, inside: Bools, columns: Ints, count: int) -> sparse.csr_matrix:
    """Return some entries of a matrix, in other columns.

    Args:
        rows: The matrix.
        inside: Mask of its entries.
        columns: New column of each entry.
        count: Number of columns.
    """
    starts = np.r_[0, np.cumsum(inside)][rows.indptr]
    return sparse.csr_matrix((rows.data[inside], columns[inside], starts), (rows.shape[0], count))


def _widened(rows: sparse.csr_matrix, columns: Ints, count: int) -> sparse.csr_matrix:
    """Return a matrix with its columns among `count` others."""
    return sparse.csr_matrix((rows.data, columns[rows.indices], rows.indptr), (rows.shape[0], count))


def _defined(rows: sparse.csr_matrix, ids: Ints) -> Any:
    """Remove equations that define one unknown each, and substitute the definitions in all other equations.

    An equation defines its last unknown. The shortest of several equations for one unknown is a candidate; candidates
    that contain an unknown of another candidate are not removed.
    """
    length = np.diff(rows.indptr)
    pivot = rows.indices[rows.indptr[1:] - 1]
    by_length = np.argsort(length, kind="stable")
    _, first = np.unique(pivot[by_length], return_index=True)
    taken = by_length[first]
    chosen = np.zeros(rows.shape[1], bool)
    chosen[pivot[taken]] = True
    held = np.add.reduceat(chosen[rows.indices], rows.indptr[:-1], dtype=np.int32)
    taken = np.sort(taken[held[taken] == 1])
    defined, by = pivot[taken], rows.data[rows.indptr[1:][taken] - 1]
    own = rows[taken]
    others = np.ones(own.nnz, bool)
    others[own.indptr[1:] - 1] = False
    data, ends = -own.data / np.repeat(by, np.diff(own.indptr)), own.indptr - np.arange(len(taken) + 1)
    definition = sparse.csr_matrix((data[others], own.indices[others], ends), (len(taken), rows.shape[1]))
    left = np.ones(rows.shape[0], bool)
    left[taken] = False
    rows, ids, gone = rows[left], ids[left], ids[taken]
    place, chosen = np.zeros(rows.shape[1], np.int64), np.zeros(rows.shape[1], bool)
    place[defined], chosen[defined] = np.arange(len(defined)), True
    inside = chosen[rows.indices]
    holds = np.logical_or.reduceat(inside, rows.indptr[:-1]) if rows.nnz else np.zeros(0, bool)
    if holds.any():
        some, inside = rows[holds], inside[np.repeat(holds, np.diff(rows.indptr))]
        factors = _those(some, inside, place[some.indices], len(defined))
        rest = _those(some, ~inside, some.indices, some.shape[1])
        rows = sparse.vstack([rows[~holds], _sum([(rest, None), (factors, definition)], some.shape)], format="csr")
        ids = np.concatenate([ids[~holds], ids[holds]])
    return rows, ids, (defined, definition, gone)


def _combination(given: Floats, wanted: Floats) -> Floats | None:
    """Return the factors with which independent vectors sum to another one; None if none do."""
    if not len(given) or not wanted.any():
        return None
    factors = np.asarray(np.linalg.lstsq(given.T, wanted, rcond=None)[0], np.float64)
    return factors if np.allclose(factors @ given, wanted, rtol=_NOTHING, atol=_NOTHING) else None


class Solution:
    """The free unknowns of a system, and the forms that express all others by them.

    Args:
        system: Interpreted captures.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        unknowns = system.unknowns
        for name in system.fixed:
            for family in system.families.get(name, {}).values():
                unknowns.vanish(family.directions)
                for rows in family.rows.values():
                    unknowns.vanish(rows.numbers)
        self.kinds = unknowns.kinds()
        by_weights: dict[Any, list[Derived]] = {}
        for own in system.derived:
            by_weights.setdefault(own.twin, []).append(own)
        self._twins = {key: own for key, own in by_weights.items() if len(own) > 1}
        names = system.constants | {name for name, own in system.tensors.items() if not own.is_floating_point()}
        generic = Generic(
            {name: own.shape for name, own in system.tensors.items()}, {name: system.tensors[name] for name in names}
        )
        weights = Weights(system, generic)
        equations, counted = matrix_of(system, weights), len(unknowns.equations)
        priority = self._priority()
        self.solved = eliminate(equations, self._zero(), priority)
        while True:
            if self._constrained():
                more = matrix_of(system, weights, counted)
                equations, counted = sparse.vstack([equations, more]).tocsr(), len(unknowns.equations)
                self.solved = self.solved.narrowed(more, self._zero(), priority)
            elif self.solved.whole:
                break
            else:
                priority = self._priority()
                self.solved = eliminate(equations, self._zero(), priority)
        kinds = self.kinds[self.solved.free]
        free = self.solved.free
        self.shifts: Ints = free[(kinds != DERIVED) & (kinds != DIRECTIONS)]
        self.directions: Ints = free[kinds == DIRECTIONS]
        self.passing: Ints = free[kinds == DERIVED]

    def _zero(self) -> Bools:
        unknowns = self.system.unknowns
        zero: Bools = unknowns.zero[: unknowns.count].copy()
        zero[0] = True
        return zero

    def _priority(self) -> Numbers:
        """Return the priority of each unknown: equations define their unknowns of highest priority first.

        Unknowns that equations constrain to be equal within one array stay free: elements are then no multiples of
        gains there. Sums that a bias resets also stay free, except multiples of gains: free ones would be divided by
        the gains.
        """
        unknowns = self.system.unknowns
        priority = np.array([0, 2, 3, 4, 5], np.int8)[self.kinds]  # for values.DERIVED, ..., FREE
        pairs = [np.zeros((0, 2), np.int64)]
        for numbers, terms in unknowns.equations:
            if len(terms) == 2 and not terms[1][1] and terms[1][0] == -1:
                pairs.append(numbers)
            gained = any(atom.kind != "length" for _, items in terms for atom, *_ in items)
            if gained or (len(terms) == 2 and (priority[numbers[:, 1]] == 6).any()):  # also multiples of such sums
                of_gains = (self.kinds[numbers[:, 0]] == SUMS) & (gained | (priority[numbers[:, -1]] == 6))
                priority[numbers[of_gains, 0]] = 6
        one, two = np.concatenate(pairs).T
        graph = sparse.csr_matrix((np.ones(len(one)), (one, two)), (unknowns.count, unknowns.count))
        _, label = sparse.csgraph.connected_components(graph, False)
        starts = np.array([start for start, _ in unknowns.blocks])
        met = rising(np.concatenate(pairs))
        block = np.searchsorted(starts, met, side="right") - 1
        _, which, count = np.unique(label[met] * len(starts) + block, return_inverse=True, return_counts=True)
        alike = met[count[which] > 1]
        priority[alike] = np.where(np.isin(self.kinds[alike], (DIRECTIONS, SUMS, FREE)), 1, priority[alike])
        return priority

    def _constrained(self) -> bool:
        """Set constrained derived unknowns to zero, as the equations must hold for all weights.

        Returns:
            Whether there are any. Constraints that depend on the choice of free unknowns are looked for in whole
            solutions only.
        """
        forms, free, zero = self.solved.forms, self.solved.free, self.system.unknowns.zero
        column = np.full(forms.shape[0], -1)
        column[free] = np.arange(len(free))
        lengths = np.diff(forms.indptr)
        before, equations = int(zero.sum()), len(self.system.unknowns.equations)
        if self._met_twins() or self._parted(column):
            return True
        alive = []
        for own in self.system.derived:
            # Constraints of an earlier one may make two of the same weights equal; these then need fewer constraints.
            if own.twin in self._twins and int(zero.sum()) > before:
                return True
            if self._is_alive(own, column, lengths):
                alive.append(own)
        if int(zero.sum()) > before or len(self.system.unknowns.equations) > equations:
            return True
        if not self.solved.whole:
            return False
        for own in self._circular(alive, column):
            zero[own.numbers.numpy().ravel()] = zero[own.source.numpy().ravel()] = True
        for pair in self.system.exclusions:
            one, two = (own.numpy().ravel() for own in pair)
            if (lengths[one] * ~zero[one]).any() and (lengths[two] * ~zero[two]).any():
                zero[one] = True
                self.system.note("of additions to two factors of a product, one is left out")
        return int(zero.sum()) > before

    def _parted(self, column: Ints) -> bool:
        """Split equations of derived unknowns by their weights: the parts of different weights vanish separately.

        Only equations with coefficients 1 and -1 are split; in other equations, all unknowns vanish.

        Returns:
            Whether any equation was split.
        """
        forms, free, unknowns = self.solved.forms, self.solved.free, self.system.unknowns
        makers: dict[Any, int] = {}
        maker = np.full(forms.shape[0], -1)
        for own in self.system.derived:
            maker[own.numbers.numpy().ravel()] = makers.setdefault(own.twin, len(makers))
        number = np.repeat(np.arange(forms.shape[0]), np.diff(forms.indptr))
        given = maker[free[forms.indices]]
        mixed, other = np.zeros(len(maker), bool), (maker < 0) | (column >= 0)
        mixed[number[given != maker[number]]] = True
        other[number[(given < 0) | (np.abs(np.abs(forms.data) - 1) > _NOTHING)]] = True
        rows = np.flatnonzero(mixed & ~other)
        if not len(rows):
            return False
        made = forms[rows]
        row = np.r_[np.arange(len(rows)), np.repeat(np.arange(len(rows)), np.diff(made.indptr))]
        everything, signs = np.r_[rows, free[made.indices]], np.r_[np.ones(len(rows)), -made.data]
        order = np.lexsort((maker[everything], row))
        row, everything, signs = (own[order] for own in (row, everything, signs))
        new = np.r_[True, (np.diff(row) != 0) | (np.diff(maker[everything]) != 0)]
        starts = np.flatnonzero(new)
        lengths = np.diff(np.r_[starts, len(row)])
        # Thousands of rows have the same factors, as those of a table of tokens: one block holds them all.
        for length in rising(lengths):
            at = starts[lengths == length][:, None] + np.arange(length)
            patterns, which = np.unique(signs[at], axis=0, return_inverse=True)
            for like, factors in enumerate(patterns.tolist()):
                terms: list[Any] = [(factor, []) for factor in factors]
                unknowns.equations.append((everything[at[which.ravel() == like]], terms))
        return True

    def _met_twins(self) -> bool:
        """Let results of the same weights depend on each other as their sources do, and the other way round.

        For all weights, only equal sources have equal results, and only sums of sources the sums of their results.
        Example: a layer that reads the state after each step of a solver.

        Returns:
            Whether any did not before.
        """
        unknowns, met = self.system.unknowns, False
        for twins in self._twins.values():
            sides = [[getattr(own, side).numpy().ravel() for own in twins] for side in ("source", "numbers")]
            if any(len(own) != len(side[0]) for side in sides for own in side):
                continue
            (source, numbers), apart = (self._shown(side) for side in sides), list[int]()
            for at, own in enumerate(twins):
                given = _combination(source[apart], source[at])
                found = _combination(numbers[apart], numbers[at]) if given is None else given
                if found is None or np.abs(2520 * found - np.round(2520 * found)).max() > 1e-6:  # by weights
                    apart += [at] * bool(source[at].any() and numbers[at].any())
                    continue
                own.alike |= set(range(len(own.blocks[0])))
                if given is None or not np.allclose(given @ numbers[apart], numbers[at]):
                    side = sides[given is not None]
                    terms: list[Any] = [(1.0, []), *((-factor, []) for factor in found.tolist())]
                    unknowns.equations.append((np.stack([side[index] for index in (at, *apart)], 1), terms))
                    met = True
        return met

    def _shown(self, rows: Sequence[Ints]) -> Floats:
        """Return random sums over the forms of unknowns: these depend on each other as the forms do."""
        forms, count, generator = self.solved.forms, 2 * len(rows) + 8, np.random.default_rng(0)
        columns = generator.uniform(0.5, 1.5, (forms.shape[1], count))
        by = generator.uniform(0.5, 1.5, (len(rows[0]), count))
        return np.stack([((forms[own] @ columns) * by).sum(0) for own in rows])

    def _is_alive(self, own: Derived, column: Ints, lengths: Ints) -> bool:
        """Whether derived unknowns are unconstrained functions of their weights and sources.

        Constrained unknowns vanish, block by block; blocks that equal another one, up to other unknowns, are equated.
        """
        zero, unknowns = self.system.unknowns.zero, self.system.unknowns
        numbers, source = (
            array.numpy().ravel()[blocks.numpy()]
            for array, blocks in zip((own.numbers, own.source), own.blocks, strict=True)
        )
        free = (column[numbers] >= 0).all(1)
        free[list(own.alike)] = True
        moved = (lengths[source] > 0).any(1)
        if (moved & free).all():
            return True
        bound = np.flatnonzero(~free & moved)
        for index, like in zip(bound, self._like(own, numbers[bound], column), strict=True):
            if like >= 0 and like != index:
                for part in (source, numbers):
                    unknowns.equate(torch.from_numpy(part[index]), torch.from_numpy(part[like]))
                own.alike.add(int(index))
            else:
                zero[numbers[index]] = zero[source[index]] = True
        zero[numbers[~moved]] = True
        return bool((moved & free).any())

    def _like(self, own: Derived, numbers: Ints, column: Ints) -> Ints:
        """Return for some blocks of derived unknowns the one other block that occurs in all of their forms, or -1.

        Args:
            own: The derived unknowns.
            numbers: Blocks of them. Shape (blocks, places).
            column: The column of each free unknown, -1 for others.
        """
        made, count, size = self.solved.forms[numbers.ravel()], numbers.shape[1], own.numbers.numel()
        place = np.full(size, -1)
        place[own.blocks[0].numpy().ravel()] = np.arange(size)
        row = np.repeat(np.arange(numbers.size), np.diff(made.indptr))
        target = self.solved.free[made.indices] - int(own.numbers.min())
        inside = np.flatnonzero((target >= 0) & (target < size) & (np.abs(made.data - 1) < _NOTHING))
        row, at = row[inside], place[target[inside]]
        same = at % count == row % count
        block = np.full(numbers.size, -1)
        block[row[same]] = at[same] // count
        blocks, free = block.reshape(numbers.shape), column[numbers] >= 0
        most = np.where(free, -1, blocks).max(1)
        return np.where((free | (blocks == most[:, None])).all(1), most, -1)

    def _circular(self, alive: list[Derived], column: Ints) -> list[Derived]:
        """Return the derived unknowns with circular definitions; save the others in `order`, each after its sources."""
        forms = self.solved.forms
        maker = np.full(forms.shape[1], -1)
        for index, own in enumerate(alive):
            made = column[own.numbers.numpy().ravel()]
            maker[made[made >= 0]] = index
        needs = []
        for own in alive:
            given = [own.source, *(own.halfway or ())]
            used = maker[rising(forms[torch.cat([one.reshape(-1) for one in given]).numpy()].indices)]
            needs.append(set(used[used >= 0].tolist()))
        done: set[int] = set()
        self.order: list[Derived] = []
        waiting = list(range(len(alive)))
        while waiting:
            ready = [index for index in waiting if needs[index] <= done]
            if not ready:
                break
            done |= set(ready)
            self.order += [alive[index] for index in ready]
            waiting = [index for index in waiting if index not in done]
        return [alive[index] for index in waiting]
