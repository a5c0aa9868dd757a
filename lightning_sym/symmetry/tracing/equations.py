"""Solve many short linear equations at once: which scales, and which signs, stay free."""

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def _columns(variables: Ints, number: int) -> sparse.csr_matrix:
    """Return a matrix (number, variables) with a one in each column, where its variable is."""
    ones = np.ones(len(variables))
    return sparse.csr_matrix((ones, (variables, np.arange(len(variables)))), shape=(number, len(variables)))


def compress(root: Ints, factor: Floats) -> None:
    """Let every variable point to the end of its chain."""
    while True:
        above = root[root]
        if np.array_equal(above, root):
            return
        factor *= factor[root]
        root[:] = above


def _tidied(rows: sparse.csr_matrix, modulo_two: bool) -> sparse.csr_matrix:
    """Return the equations that say anything, with their variables in order and without zeros."""
    if modulo_two:
        rows.data = np.mod(rows.data, 2)
    rows.data[np.abs(rows.data) <= 1e-9] = 0
    rows.eliminate_zeros()
    rows.sort_indices()
    return rows[np.diff(rows.indptr) > 0]


def solve(
    number: int, equations: list[tuple[Ints, Floats]], zeros: Ints, *, modulo_two: bool = False
) -> sparse.csr_matrix:
    """Solve sum_j coefficient[j] x[variable[k, j]] = 0 for all k, and x[zeros] = 0.

    Args:
        number: How many variables there are.
        equations: Pairs of variables (k, m) and coefficients (m,).
        zeros: Variables that are zero.
        modulo_two: Over the field with two elements (signs) instead of the reals (logarithms of scales).

    Returns:
        Every solution: variable i = sum over generators g of forms[i, g] x_g, with as many generators as the system
        leaves free. Shape (variables, generators); modulo 2 for signs.
    """
    widths = [np.full(len(variables), variables.shape[1]) for variables, _ in equations]
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *widths]))
    variable = np.concatenate([np.zeros(0, np.int64), *(variables.ravel() for variables, _ in equations)])
    coefficient = np.concatenate([np.zeros(0), *(np.tile(once, len(variables)) for variables, once in equations)])
    rows = sparse.csr_matrix((coefficient, variable, starts), shape=(len(starts) - 1, number))
    root, factor = np.arange(number), np.ones(number)
    zero = np.zeros(number, bool)
    zero[zeros] = True

    def substitution() -> sparse.csr_matrix:
        """Write every variable as factor x root, or as nothing if that is zero."""
        return sparse.csr_matrix(
            (np.where(zero[root], 0.0, factor), root, np.arange(number + 1)), shape=(number, number)
        )

    definitions: list[tuple[Ints, sparse.csr_matrix]] = []
    while True:
        rows = _tidied(rows @ substitution(), modulo_two)
        if not rows.shape[0]:
            break
        start, length = rows.indptr[:-1], np.diff(rows.indptr)
        if (single := start[length == 1]).size:
            zero[rows.indices[single]] = True
        elif (pair := start[length == 2]).size:
            high, first = np.unique(rows.indices[pair + 1], return_index=True)  # sorted within a row
            pair = pair[first]
            root[high] = rows.indices[pair]
            if not modulo_two:
                factor[high] = -rows.data[pair] / rows.data[pair + 1]
            compress(root, factor)
        else:
            rows, defined, definition = _eliminated(_once(rows))
            definitions.append((defined, definition))
    bound = zero[root] | (root != np.arange(number))
    for defined, _ in definitions:
        bound[defined] = True
    forms = _columns(np.flatnonzero(~bound), number)
    for defined, definition in reversed(definitions):
        # What a variable is defined by may have been merged or found to be zero since.
        forms = forms + _columns(defined, number) @ (definition @ substitution() @ forms)
    forms = (substitution() @ forms).tocsr()
    if modulo_two:
        forms.data = np.mod(np.rint(forms.data), 2)
    forms.data[np.abs(forms.data) < 1e-9] = 0
    forms.eliminate_zeros()
    return forms


def _once(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the equations without those that are multiples of others, as captures of other lengths repeat them."""
    start, length = rows.indptr[:-1], np.diff(rows.indptr)
    number = np.repeat(np.arange(len(length)), length)
    scaled = np.round(rows.data / rows.data[start[number]], 9)
    key = (rows.indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(29)) ^ scaled.view(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    _, first, which = np.unique(
        np.add.reduceat(key ^ (key >> np.uint64(32)), start), return_index=True, return_inverse=True
    )
    like = first[which]
    alike = length == length[like]
    there = np.where(alike[number], start[like[number]] - start[number], 0) + np.arange(len(scaled))
    entries = (rows.indices[there] == rows.indices) & (scaled[there] == scaled)
    alike &= np.logical_and.reduceat(entries, start)
    return rows[~alike | (like == np.arange(len(like)))]


def _eliminated(rows: sparse.csr_matrix) -> tuple[sparse.csr_matrix, Ints, sparse.csr_matrix]:
    """Take out equations, each of which defines a variable that no other equation holds (or one, after elimination).

    Returns:
        The equations left; the variables that are defined, and what by: (defined, variables).
    """
    uses = np.bincount(rows.indices, minlength=rows.shape[1])
    row = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    lonely = np.flatnonzero(uses[rows.indices] == 1)
    if len(lonely):
        taken, first = np.unique(row[lonely], return_index=True)
        at = lonely[first]
    else:
        # Entangled: eliminate the rarest variable of the first row from the others that hold it.
        at = np.argmin(uses[rows.indices[: rows.indptr[1]]], keepdims=True)
        taken = np.zeros(1, np.int64)
    defined, pivot = rows.indices[at], rows.data[at]
    definition = sparse.diags(-1 / pivot) @ rows[taken]
    if not len(lonely):
        rows = rows + rows[:, defined] @ definition
    definition = definition + sparse.csr_matrix((np.ones(len(at)), (np.arange(len(at)), defined)), definition.shape)
    return rows[np.setdiff1d(np.arange(rows.shape[0]), taken)], defined, definition
