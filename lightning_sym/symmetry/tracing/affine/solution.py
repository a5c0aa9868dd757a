"""Solves the equations of an interpreted network: which unknowns are free, and what they make of all others."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.tracing.affine.system import Derived, System
from lightning_sym.symmetry.tracing.affine.values import DERIVED, DIRECTIONS, FREE, SUMS, Ints
from lightning_sym.symmetry.tracing.affine.weights import Generic, Weights, zero_in

Floats = NDArray[np.float64]
_NOTHING = 1e-9


def matrix_of(system: System, weights: Weights, begin: int = 0) -> sparse.csr_matrix:
    """Return the equations at some weights: one row each, one column for each unknown; from some on."""
    made: dict[Any, Floats] = {}
    rows, columns, data, count = [], [], [], 0
    for numbers, terms in system.unknowns.equations[begin:]:
        for column, (factor, items) in enumerate(terms):
            values = np.full(len(numbers), factor)
            for atom, power, at in items:
                if atom not in made:
                    made[atom] = weights.atom(atom).numpy()
                own = made[atom][at]
                if power < 0 and (own == 0).any():
                    raise zero_in(weights.describe(atom))
                values = values * own**power
            present = numbers[:, column] != 0
            rows.append(np.flatnonzero(present) + count)
            columns.append(numbers[present, column])
            data.append(values[present])
        count += len(numbers)
    empty = np.zeros(0, np.int64)
    shape = (count, system.unknowns.count)
    return sparse.csr_matrix(
        (np.concatenate([np.zeros(0), *data]), (np.concatenate([empty, *rows]), np.concatenate([empty, *columns]))),
        shape=shape,
    )


@dataclass
class Eliminated:
    """Which unknowns equations define.

    Attributes:
        free: The unknowns that stay free.
        bound: Those that the others define.
        rows: As many independent equations.
        zero: Which unknowns are zero.
        forms: All unknowns from the free ones. Shape (unknowns, free).
    """

    free: Ints
    bound: Ints
    rows: Ints
    zero: NDArray[np.bool_]
    forms: sparse.csr_matrix


def eliminate(equations: sparse.csr_matrix, zero: NDArray[np.bool_], priority: Ints) -> Eliminated:
    """Solve homogeneous equations for the unknowns of highest priority.

    Args:
        equations: One row each, one column for each unknown.
        zero: Unknowns that are zero.
        priority: Of equations' unknowns, those of highest priority are defined; those of priority 0 last.
    """
    count = equations.shape[1]
    order = np.lexsort((np.arange(count), priority))  # from here on, the last are defined first
    rows, ids = equations[:, order], np.arange(equations.shape[0])
    zero = zero[order].copy()
    root, factor = np.arange(count), np.ones(count)
    used: list[Ints] = []
    defined_by: list[Ints] = []
    definitions: list[tuple[Ints, sparse.csr_matrix]] = []

    def substitution() -> sparse.csr_matrix:
        data = np.where(zero[root], 0.0, factor)
        return sparse.csr_matrix((data, root, np.arange(count + 1)), shape=(count, count))

    while True:
        rows = _sum([(rows, substitution())], rows.shape)
        some = np.diff(rows.indptr) > 0
        rows, ids = rows[some], ids[some]
        if not rows.shape[0]:
            break
        start, length = rows.indptr[:-1], np.diff(rows.indptr)
        if (single := start[length == 1]).size:
            zero[rows.indices[single]] = True
        elif (length == 2).any():
            at = np.flatnonzero(length == 2)
            pair = start[at]
            high, first = np.unique(rows.indices[pair + 1], return_index=True)
            pair = pair[first]
            used.append(ids[at[first]])
            defined_by.append(high)
            root[high] = rows.indices[pair]
            factor[high] = -rows.data[pair] / rows.data[pair + 1]
            _compress(root, factor)
        else:
            rows, ids, own = _defined(rows, ids)
            definitions.append((own[0], own[1].tocsr()))
            used.append(own[2])
            defined_by.append(own[0])
    gone = zero[root]
    nothing = np.zeros(0, np.int64)
    bound, equation = np.concatenate([nothing, *defined_by]), np.concatenate([nothing, *used])
    bound, equation = bound[~gone[bound]], equation[~gone[bound]]
    free = ~gone
    free[bound] = False
    columns = np.flatnonzero(free)
    forms = _columns(columns, count)
    for defined, definition in reversed(definitions):
        made = _sum([(definition, _sum([(substitution(), forms)], forms.shape))], (len(defined), len(columns)))
        forms = forms + _columns(defined, count) @ made
    forms = _sum([(substitution(), forms)], forms.shape)
    back = np.argsort(order)
    return Eliminated(order[columns], order[bound], equation, gone[back], forms[back])


def _sum(
    products: Sequence[tuple[sparse.csr_matrix, sparse.csr_matrix | None]], shape: tuple[int, int]
) -> sparse.csr_matrix:
    """Return a sum of products of matrices (None for the identity), without what is left of terms that cancel.

    What is small is nothing only beside the terms that it is the sum of: an output may be a tiny multiple of a value.
    """
    made = [one.tocsr() if two is None else (one @ two).tocsr() for one, two in products]
    sizes = [abs(one) if two is None else abs(one) @ abs(two) for one, two in products]
    result, size = (sum(own[1:], start=own[0]).tocsr() for own in (made, sizes))
    kept = (abs(result) > _NOTHING * size).astype(np.float64)
    result = result.multiply(kept).tocsr()
    result.eliminate_zeros()
    result.sort_indices()
    return result


def _compress(root: Ints, factor: Floats) -> None:
    while True:
        above = root[root]
        if np.array_equal(above, root):
            return
        factor *= factor[root]
        root[:] = above


def _columns(variables: Ints, count: int) -> sparse.csr_matrix:
    ones = np.ones(len(variables))
    return sparse.csr_matrix((ones, (variables, np.arange(len(variables)))), shape=(count, len(variables)))


def _defined(rows: sparse.csr_matrix, ids: Ints) -> Any:
    """Take out equations that define an unknown each, and put the definitions into all others.

    An equation defines its last unknown; of several that define one, the shortest is taken, and none is taken that
    holds an unknown which another one defines.
    """
    length = np.diff(rows.indptr)
    pivot = rows.indices[rows.indptr[1:] - 1]
    by_length = np.argsort(length, kind="stable")
    _, first = np.unique(pivot[by_length], return_index=True)
    taken = by_length[first]
    chosen = np.zeros(rows.shape[1], bool)
    chosen[pivot[taken]] = True
    held = np.add.reduceat(chosen[rows.indices].astype(np.int64), rows.indptr[:-1])
    taken = np.sort(taken[held[taken] == 1])
    defined, by = pivot[taken], rows.data[rows.indptr[1:][taken] - 1]
    replacing = (sparse.diags(-1 / by) @ rows[taken]).tocsr()  # -1 at the unknown itself
    left = np.ones(rows.shape[0], bool)
    left[taken] = False
    rows, ids, gone = rows[left], ids[left], ids[taken]
    if rows.shape[0]:
        rows = _sum([(rows, None), (rows @ _columns(defined, rows.shape[1]), replacing)], rows.shape)
    return rows, ids, (defined, replacing + _columns(defined, rows.shape[1]).T, gone)


class Solution:
    """The free unknowns of a system, and what defines all others.

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
        while True:
            zero = unknowns.zero[: unknowns.count].copy()
            zero[0] = True
            if len(unknowns.equations) > counted:
                equations = sparse.vstack([equations, matrix_of(system, weights, counted)]).tocsr()
                counted = len(unknowns.equations)
            self.solved = eliminate(equations, zero, self._priority())
            if not self._constrained():
                break
        kinds = self.kinds[self.solved.free]
        free = self.solved.free
        self.shifts: Ints = free[(kinds != DERIVED) & (kinds != DIRECTIONS)]
        self.directions: Ints = free[kinds == DIRECTIONS]
        self.passing: Ints = free[kinds == DERIVED]

    def _priority(self) -> Ints:
        """Return in which order equations define unknowns, the last first.

        What equations demand to be alike within one array stays free: elements are then no multiples of gains there.
        Sums do, where a bias resets, but for multiples of gains, which would be divided by these.
        """
        unknowns = self.system.unknowns
        priority = np.array([0, 2, 3, 4, 5])[self.kinds]  # of values.DERIVED, ..., FREE
        pairs = [np.zeros((0, 2), np.int64)]
        for numbers, terms in unknowns.equations:
            if len(terms) == 2 and not terms[1][1] and terms[1][0] == -1:
                pairs.append(numbers)
            if any(atom.kind != "length" for _, items in terms for atom, *_ in items):
                priority[numbers[:, 0]] = np.where(self.kinds[numbers[:, 0]] == SUMS, 6, priority[numbers[:, 0]])
        one, two = np.concatenate(pairs).T
        graph = sparse.csr_matrix((np.ones(len(one)), (one, two)), (unknowns.count, unknowns.count))
        _, label = sparse.csgraph.connected_components(graph, False)
        starts = np.array([start for start, _ in unknowns.blocks])
        block = np.searchsorted(starts, np.arange(unknowns.count), side="right") - 1
        met = np.unique(np.concatenate(pairs))
        _, which, count = np.unique(label[met] * len(starts) + block[met], return_inverse=True, return_counts=True)
        alike = met[count[which] > 1]
        priority[alike] = np.where(np.isin(self.kinds[alike], (DIRECTIONS, SUMS, FREE)), 1, priority[alike])
        return priority

    def _constrained(self) -> bool:
        """Let derived unknowns vanish of which equations demand something, for these hold for all weights."""
        forms, free, zero = self.solved.forms, self.solved.free, self.system.unknowns.zero
        column = np.full(forms.shape[0], -1)
        column[free] = np.arange(len(free))
        lengths = np.diff(forms.indptr)
        before, equations = int(zero.sum()), len(self.system.unknowns.equations)
        if self._met_twins() or self._parted(column):
            return True
        alive = []
        for own in self.system.derived:
            # What an earlier one demands may make two of the same weights equal, which then demand less.
            if own.twin in self._twins and int(zero.sum()) > before:
                return True
            if self._is_alive(own, column, lengths):
                alive.append(own)
        if int(zero.sum()) > before or len(self.system.unknowns.equations) > equations:
            return True
        for own in self._circular(alive, column):
            zero[own.numbers.numpy().ravel()] = zero[own.source.numpy().ravel()] = True
        for pair in self.system.products:
            one, two = sorted((own.numpy().ravel() for own in pair), key=len)
            if (lengths[one] * ~zero[one]).any() and (lengths[two] * ~zero[two]).any():
                zero[one] = True
                self.system.note("of what is added to two factors of a product, one stays as it is")
        return int(zero.sum()) > before

    def _parted(self, column: Ints) -> bool:
        """Let what different weights make vanish by itself in equations of derived unknowns; say whether any had both.

        Only where these add up: other equations let all of it vanish.
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
        found = False
        for at in np.flatnonzero(mixed & ~other).tolist():
            begin, end = forms.indptr[at : at + 2]
            others, factors = free[forms.indices[begin:end]], forms.data[begin:end]
            everything, signs = np.r_[at, others], np.r_[1.0, -factors]
            for which in np.unique(maker[everything]):
                part = maker[everything] == which
                terms: list[Any] = [(sign, []) for sign in signs[part].tolist()]
                unknowns.equations.append((everything[part][None], terms))
            found = True
        return found

    def _met_twins(self) -> bool:
        """Let what the same weights make of the same be equal, and the other way round; say whether any were not."""
        forms, met = self.solved.forms, False
        for own in self._twins.values():
            for one, two in itertools.combinations(own, 2):
                numbers, source = ([each.numpy().ravel() for each in pair] for pair in (
                    (one.numbers, two.numbers), (one.source, two.source)))  # fmt: skip
                same = [not self._differ(forms, *pair) for pair in (source, numbers)]
                if all(same) or (not any(same)) or (same[1] and not forms[numbers[0]].nnz):
                    continue
                if same[0]:
                    self.system.unknowns.equate(one.numbers, two.numbers)
                else:  # for all weights, only what is equal makes what is equal
                    self.system.unknowns.equate(one.source, two.source)
                two.alike |= set(range(len(two.blocks[0])))
                met = True
        return met

    @staticmethod
    def _differ(forms: sparse.csr_matrix, one: Ints, two: Ints) -> bool:
        first, second = forms[one], forms[two]
        return bool((abs(first - second) > _NOTHING * (abs(first) + abs(second))).nnz)

    def _is_alive(self, own: Derived, column: Ints, lengths: Ints) -> bool:
        """Whether derived unknowns may be anything that the weights make of what defines them.

        Otherwise they vanish, block by block; where two blocks are equal, what defines them is.
        """
        forms, zero, unknowns = self.solved.forms, self.system.unknowns.zero, self.system.unknowns
        numbers, source = (
            array.numpy().ravel()[blocks.numpy()]
            for array, blocks in zip((own.numbers, own.source), own.blocks, strict=True)
        )
        free = (column[numbers] >= 0).all(1)
        free[list(own.alike)] = True
        moved = (lengths[source] > 0).any(1)
        if (moved & free).all():
            return True
        first, start = int(own.numbers.min()), forms.indptr[numbers]
        single = (lengths[numbers] == 1).all(1)
        start = np.minimum(start, max(len(forms.indices) - 1, 0))
        place = np.full(own.numbers.numel(), -1)
        place[own.blocks[0].numpy().ravel()] = np.arange(own.numbers.numel())
        like = np.full(len(numbers), -1)
        if len(forms.indices):
            target = self.solved.free[forms.indices[start]] - first
            inside = (target >= 0) & (target < own.numbers.numel())
            at = np.where(inside, place[np.where(inside, target, 0)], -1)
            same = (
                inside
                & (np.abs(forms.data[start] - 1) < _NOTHING)
                & (at % numbers.shape[1] == np.arange(numbers.shape[1]))
            )
            block = at // numbers.shape[1]
            alike = single & same.all(1) & (block == block[:, :1]).all(1)
            like[alike] = block[alike, 0]
        for index in np.flatnonzero(~free & moved):
            if like[index] >= 0 and like[index] != index:
                unknowns.equate(torch.from_numpy(source[index]), torch.from_numpy(source[like[index]]))
                own.alike.add(int(index))
            else:
                zero[numbers[index]] = zero[source[index]] = True
        zero[numbers[~moved]] = True
        return bool((moved & free).any())

    def _circular(self, alive: list[Derived], column: Ints) -> list[Derived]:
        """Return the derived unknowns that define themselves; keep the others in an order in which they can be made."""
        forms = self.solved.forms
        maker = np.full(forms.shape[1], -1)
        for index, own in enumerate(alive):
            made = column[own.numbers.numpy().ravel()]
            maker[made[made >= 0]] = index
        needs = []
        for own in alive:
            used = maker[np.unique(forms[own.source.numpy().ravel()].indices)]
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
