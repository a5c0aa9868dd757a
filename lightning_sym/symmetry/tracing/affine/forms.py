"""Linear forms of unknowns in free ones, at some weights: independent of graphs, only for needed unknowns."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, rising
from lightning_sym.symmetry.tracing.affine.solution import Solution
from lightning_sym.symmetry.tracing.affine.values import Atom
from lightning_sym.symmetry.tracing.affine.weights import Weights, names_of_atom

# Smaller numbers are rounding; systems with longer chains of definitions are solved in dense columns.
_NOTHING, _LONGEST = 1e-12, 100


class _Terms(NamedTuple):
    """Entries of equations that are products of the same powers of the same atoms.

    Attributes:
        rows: The equation of each.
        columns: The unknown of each: free ones behind those that are defined.
        factor: A number for each.
        items: Atoms, powers, and for each entry which number of the atom.
    """

    rows: Ints
    columns: Ints
    factor: Floats
    items: tuple[tuple[Atom, int, Ints], ...]


class Forms:
    """Linear forms of unknowns in free ones.

    Args:
        solution: Which are free.
        wanted: The unknowns that are needed, rising.
        order: The free unknowns in their given order.

    Attributes:
        constant: The part that does not depend on weights. Shape (wanted, free).
        names: The tensors that the rest depends on.
        varying: Which wanted unknowns depend on them.
    """

    def __init__(self, solution: Solution, wanted: Ints, order: Ints) -> None:
        solved, system = solution.solved, solution.system
        column = np.full(system.unknowns.count, -1)
        column[solved.free] = np.arange(len(solved.free))
        self.constant = solved.forms[wanted][:, column[order]].tocsr()
        equations, varying = _equations(solution)
        bound = np.zeros(system.unknowns.count, bool)
        bound[solved.bound] = True
        apart = _components(equations, varying, system.unknowns.count, solved.rows)
        own = np.flatnonzero(apart & bound)  # the unknowns that depend on weights
        place = np.full(system.unknowns.count, -1)
        place[own] = np.arange(len(own))
        free = np.full(system.unknowns.count, -1)
        free[order] = np.arange(len(order))
        self.size = len(own)
        self.varying = np.flatnonzero(place[wanted] >= 0)
        self._own = place[wanted[self.varying]]
        self.terms: list[_Terms] = []
        if self.size:
            keep = np.ones(self.constant.shape[0])
            keep[self.varying] = 0
            self.constant = (sparse.diags(keep) @ self.constant).tocsr()
            self.constant.eliminate_zeros()
            self._keep(equations, apart, place, free, solved.rows)
        self.names = {name for terms in self.terms for atom, *_ in terms.items for name in names_of_atom(system, atom)}

    def _keep(self, equations: list[Any], apart: Any, place: Ints, free: Ints, rows: Ints) -> None:
        """Keep the equations of unknowns that depend on weights."""
        chosen = np.zeros(sum(len(unknowns) for unknowns, _ in equations), bool)
        chosen[rows] = True
        begin = 0
        for unknowns, _ in equations:
            chosen[begin : begin + len(unknowns)] &= apart[unknowns].any(1)
            begin += len(unknowns)
        number = np.cumsum(chosen) - 1
        begin = 0
        for unknowns, terms in equations:
            at = np.flatnonzero(chosen[begin : begin + len(unknowns)])
            for which, (factor, items) in enumerate(terms):
                own = unknowns[at, which]
                column = np.where(place[own] >= 0, place[own], np.where(free[own] >= 0, self.size + free[own], -1))
                used = (own != 0) & (column >= 0)
                here = at[used]
                powers = tuple((atom, power, places[here]) for atom, power, places in items)
                factors = np.full(len(here), float(factor))
                self.terms.append(_Terms(number[begin + here], column[used], factors, powers))
            begin += len(unknowns)
        self.terms = [own for own in self.terms if len(own.rows)]

    def matrix(self, weights: Weights) -> sparse.csc_matrix:
        """Return the equations at some weights. Shape (unknowns that depend on weights, these and the free ones)."""
        data = []
        for own in self.terms:
            values = own.factor
            for atom, power, at in own.items:
                values = values * weights.atom(atom).numpy()[at] ** power
            data.append(values)
        rows = np.concatenate([own.rows for own in self.terms])
        columns = np.concatenate([own.columns for own in self.terms])
        shape = (self.size, self.size + self.constant.shape[1])
        return sparse.csc_matrix((np.concatenate(data), (rows, columns)), shape=shape)

    def at(self, weights: Weights | None) -> "FormsAt":
        """Return the forms at some weights; without any, the dependent part is left out."""
        return FormsAt(self, weights)


class FormsAt:
    """Linear forms of unknowns in free ones, at some weights.

    Args:
        forms: The forms.
        weights: The weights.

    Raises:
        ValueError: If some of them cannot be made there.
    """

    def __init__(self, forms: Forms, weights: Weights | None) -> None:
        self.forms = forms
        self._solve: Any = None
        if forms.size and weights is not None:
            from scipy.sparse.linalg import splu  # slow to import

            matrix = forms.matrix(weights)
            self._given = matrix[:, forms.size :].tocsr()
            try:
                self._solve = splu(matrix[:, : forms.size])
            except RuntimeError as error:
                raise ValueError(
                    "the definitions of shifts are singular at these weights; expected gains that differ from one "
                    "another, or an element without shifts: sample(shifts=False)"
                ) from error

    def __call__(self, values: Floats, columns: Ints | None = None) -> Floats:
        """Return all wanted unknowns.

        Args:
            values: Values of free unknowns. Shape (free, ...).
            columns: Which free unknowns; None for all.
        """
        constant = self.forms.constant if columns is None else self._by_column[:, columns]
        made: Floats = constant @ values
        if self._solve is not None:
            given = self._given if columns is None else self._given[:, columns]
            right = given @ values
            if right.any():
                made[self.forms.varying] += self._solve.solve(-np.asarray(right))[self.forms._own]
        return made

    @cached_property
    def _by_column(self) -> sparse.csc_matrix:
        return self.forms.constant.tocsc()

    def matrix(self, columns: Ints) -> sparse.csr_matrix:
        """Return the forms of all wanted unknowns in some free ones. Shape (wanted, columns)."""
        made = self.forms.constant[:, columns].tocsr()
        if self._solve is None:
            return made
        solved = self._sparse(-self._given[:, columns])[self.forms._own].tocoo()
        kept = np.abs(solved.data) >= _NOTHING
        entries = (self.forms.varying[solved.row[kept]], solved.col[kept])
        return (made + sparse.csr_matrix((solved.data[kept], entries), made.shape)).tocsr()

    def _sparse(self, right: sparse.csr_matrix) -> sparse.csr_matrix:
        """Solve the definitions for many columns of few entries each, as long as their chains are short."""
        lower, upper, count = self._solve.L, self._solve.U, self.forms.size
        ones, order = np.ones(count), np.arange(count)
        rows = sparse.csr_matrix((ones, (self._solve.perm_r, order)), (count, count))
        columns = sparse.csr_matrix((ones, (order, self._solve.perm_c)), (count, count))
        middle = _substituted(lower, rows @ right)
        found = None if middle is None else _substituted(upper, middle)
        if found is not None:
            return columns @ found
        used = np.flatnonzero(np.diff(right.tocsc().indptr))
        parts = [sparse.csr_matrix(right.shape)]
        for some in np.array_split(used, len(used) // 256 + 1):
            row, at = np.nonzero(solved := self._solve.solve(right[:, some].toarray()))
            parts.append(sparse.csr_matrix((solved[row, at], (row, some[at])), right.shape))
        return sum(parts[1:], start=parts[0])


def _substituted(triangle: sparse.spmatrix, right: sparse.spmatrix) -> sparse.csr_matrix | None:
    """Solve a triangular system, sum by sum along its chains; None if these are longer than `_LONGEST`."""
    diagonal = triangle.diagonal()
    inverse = sparse.diags(1 / diagonal)
    step = (inverse @ (sparse.diags(diagonal) - triangle)).tocsr()
    step.eliminate_zeros()
    found = term = (inverse @ right).tocsr()
    for _ in range(_LONGEST):
        if not (term := step @ term).nnz:
            return found
        found = found + term
    return None


def _equations(solution: Solution) -> tuple[list[Any], Bools]:
    """Return all equations, without unknowns that are zero; and for each whether it depends on weights."""
    zero = solution.solved.zero
    found, varying = [], []
    for unknowns, terms in solution.system.unknowns.equations:
        unknowns = np.where(zero[unknowns], 0, unknowns)
        found.append((unknowns, terms))
        own = np.zeros(len(unknowns), bool)
        for which, (_, items) in enumerate(terms):
            if any(atom.kind != "length" for atom, *_ in items):
                own |= unknowns[:, which] != 0
        varying.append(own)
    return found, np.concatenate([np.zeros(0, bool), *varying])


def _components(equations: list[Any], varying: Bools, count: int, rows: Ints) -> Bools:
    """Return the unknowns of some equations that are connected by weight-dependent ones."""
    pairs = []
    starts = np.zeros(count, bool)
    begin, chosen = 0, np.zeros(len(varying), bool)
    chosen[rows] = True
    for unknowns, _ in equations:
        own = chosen[begin : begin + len(unknowns)]
        first = unknowns.max(1)
        for column in unknowns.T:
            used = own & (column != 0)
            pairs.append(np.stack([first[used], column[used]]))
        starts[unknowns[own & varying[begin : begin + len(unknowns)]].ravel()] = True
        begin += len(unknowns)
    starts[0] = False
    if not starts.any():
        return starts
    one, two = np.concatenate(pairs, 1)
    graph = sparse.csr_matrix((np.ones(len(one)), (one, two)), (count, count))
    _, label = sparse.csgraph.connected_components(graph, False)
    found: Bools = np.isin(label, rising(label[starts]))
    return found
