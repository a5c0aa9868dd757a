"""Solve many short linear equations at once: which scales, and which signs, stay free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """Every solution of a homogeneous system: variable i = sum over free variables g of forms[i, g] x_g.

    Attributes:
        forms: Sparse matrix (variables, generators). Modulo 2 for signs.
        generators: For each generator, the variable that it is.
    """

    forms: sparse.csr_matrix
    generators: Ints


class _Rows:
    """The equations left, as triples (row, variable, coefficient), sorted by row."""

    def __init__(self, row: Ints, variable: Ints, coefficient: Floats, modulo_two: bool) -> None:
        self.row, self.variable, self.coefficient, self.modulo_two = row, variable, coefficient, modulo_two

    def substitute(self, root: Ints, factor: Floats, zero: NDArray[np.bool_]) -> None:
        """Write every variable as factor x root, drop zeros, and add what now belongs together."""
        variable = root[self.variable]
        coefficient = self.coefficient if self.modulo_two else self.coefficient * factor[self.variable]
        keep = ~zero[variable]
        row, variable, coefficient = self.row[keep], variable[keep], coefficient[keep]
        order = np.argsort(row * len(root) + variable, kind="stable")  # nearly sorted: fast
        row, variable, coefficient = row[order], variable[order], coefficient[order]
        if len(row):
            first = np.flatnonzero(np.r_[True, (row[1:] != row[:-1]) | (variable[1:] != variable[:-1])])
            coefficient = np.add.reduceat(coefficient, first)
            row, variable = row[first], variable[first]
        if self.modulo_two:
            coefficient = np.mod(coefficient, 2)
        keep = np.abs(coefficient) > 1e-9
        self.row, self.variable, self.coefficient = row[keep], variable[keep], coefficient[keep]

    def starts(self) -> tuple[Ints, Ints]:
        """Return where each row starts, and how long it is."""
        start = np.flatnonzero(np.r_[True, self.row[1:] != self.row[:-1]]) if len(self.row) else np.zeros(0, np.int64)
        return start, np.diff(np.r_[start, len(self.row)])

    def drop(self, rows: Ints) -> None:
        keep = ~np.isin(self.row, rows)
        self.row, self.variable, self.coefficient = self.row[keep], self.variable[keep], self.coefficient[keep]


def _compress(root: Ints, factor: Floats) -> None:
    """Let every variable point to the end of its chain."""
    while True:
        above = root[root]
        if np.array_equal(above, root):
            return
        factor *= factor[root]
        root[:] = above


def solve(number: int, equations: list[tuple[Ints, Floats]], zeros: Ints, *, modulo_two: bool = False) -> Solution:
    """Solve sum_j coefficient[j] x[variable[k, j]] = 0 for all k, and x[zeros] = 0.

    Args:
        number: How many variables there are.
        equations: Pairs of variables (k, m) and coefficients (m,).
        zeros: Variables that are zero.
        modulo_two: Over the field with two elements (signs) instead of the reals (logarithms of scales).

    Returns:
        The solution, with as many generators as the system leaves free.
    """
    row, variable, coefficient, used = [], [], [], 0
    for variables, coefficients in equations:
        count, width = variables.shape
        row.append(np.repeat(np.arange(used, used + count), width))
        variable.append(variables.ravel())
        coefficient.append(np.tile(coefficients, count))
        used += count
    rows = _Rows(
        np.concatenate([*row, np.zeros(0, np.int64)]),
        np.concatenate([*variable, np.zeros(0, np.int64)]),
        np.concatenate([*coefficient, np.zeros(0)]),
        modulo_two,
    )
    root, factor = np.arange(number), np.ones(number)
    zero = np.zeros(number, bool)
    zero[zeros] = True
    pivots: list[tuple[Ints, sparse.csr_matrix]] = []
    while True:
        rows.substitute(root, factor, zero)
        start, length = rows.starts()
        if not len(start):
            break
        if (single := start[length == 1]).size:
            zero[rows.variable[single]] = True
        elif (pair := start[length == 2]).size:
            low, high = rows.variable[pair], rows.variable[pair + 1]  # sorted within a row
            high, first = np.unique(high, return_index=True)
            low, pair = low[first], pair[first]
            root[high] = low
            if not modulo_two:
                factor[high] = -rows.coefficient[pair] / rows.coefficient[pair + 1]
            _compress(root, factor)
        else:
            pivots.append(_pivot(rows, start, length, number))
    zero |= zero[root]
    defined = np.zeros(number, bool)
    for variables, _ in pivots:
        defined[variables] = True
    generators = np.flatnonzero((root == np.arange(number)) & ~zero & ~defined)
    forms = sparse.csr_matrix(
        (np.ones(len(generators)), (generators, np.arange(len(generators)))), shape=(number, len(generators))
    )
    for variables, definition in reversed(pivots):
        # What a pivot is defined by may have been merged or found to be zero since.
        alive = sparse.csr_matrix((np.where(zero, 0.0, factor), (np.arange(number), root)), shape=(number, number))
        place = sparse.csr_matrix(
            (np.ones(len(variables)), (variables, np.arange(len(variables)))), shape=(number, len(variables))
        )
        forms = forms + place @ (definition @ alive @ forms)
    alive = sparse.csr_matrix((np.where(zero, 0.0, factor), (np.arange(number), root)), shape=(number, number))
    forms = (alive @ forms).tocsr()
    if modulo_two:
        forms.data = np.mod(np.rint(forms.data), 2)
    forms.data[np.abs(forms.data) < 1e-9] = 0
    forms.eliminate_zeros()
    return Solution(forms, generators)


def _pivot(rows: _Rows, start: Ints, length: Ints, number: int) -> tuple[Ints, sparse.csr_matrix]:
    """Take out equations, each of which defines a variable that no other equation holds (or one, after elimination)."""
    uses = np.bincount(rows.variable, minlength=number)
    lonely = np.flatnonzero(uses[rows.variable] == 1)
    if len(lonely):
        _, first = np.unique(rows.row[lonely], return_index=True)
        at = lonely[first]
        taken = rows.row[at]
    else:
        # Entangled: eliminate the rarest variable of the first row from the others that hold it.
        window = np.arange(start[0], start[0] + length[0])
        at = window[[np.argmin(uses[rows.variable[window]])]]
        taken = rows.row[at]
        one = rows.row == taken[0]
        pivot, own_variable, own = rows.variable[at[0]], rows.variable[one], rows.coefficient[one]
        others = np.flatnonzero((rows.variable == pivot) & ~one)
        ratio = rows.coefficient[others] / rows.coefficient[at[0]]
        rows.row = np.r_[rows.row, np.repeat(rows.row[others], len(own))]
        rows.variable = np.r_[rows.variable, np.tile(own_variable, len(others))]
        rows.coefficient = np.r_[rows.coefficient, -np.outer(ratio, own).ravel()]
    which = np.searchsorted(taken, rows.row)
    which[which == len(taken)] = 0
    held = taken[which] == rows.row
    place = np.zeros(len(taken), np.int64)
    place[np.searchsorted(taken, rows.row[at])] = at
    pivot_variable, pivot_coefficient = rows.variable[place], rows.coefficient[place]
    held &= rows.variable != pivot_variable[which]
    at_held = np.flatnonzero(held)
    definition = sparse.csr_matrix(
        (-rows.coefficient[at_held] / pivot_coefficient[which[at_held]], (which[at_held], rows.variable[at_held])),
        shape=(len(taken), number),
    )
    rows.drop(taken)
    return pivot_variable, definition
