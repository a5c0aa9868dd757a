"""Solve many short linear equations at once, for the free scales and signs."""

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats, Ints
from lightning_sym.symmetry.numbering import Numbers, components

_MOST = 2**20  # maximal entries of a parameter along axes that several of its slots share


def compress(root: Numbers, factor: Floats) -> None:
    """Let every variable point to the end of its chain."""
    while True:
        above = root[root]
        if np.array_equal(above, root):
            return
        factor *= factor[root]
        root[:] = above


def _tidied(rows: sparse.csr_matrix, modulo_two: bool) -> sparse.csr_matrix:
    """Return the nontrivial equations, with sorted variables and without zeros."""
    if modulo_two:
        rows.data = np.mod(rows.data, 2)
    rows.data[np.abs(rows.data) <= 1e-9] = 0
    rows.eliminate_zeros()
    rows.sort_indices()
    return rows[np.diff(rows.indptr) > 0]


def solve(
    number: int,
    equations: list[tuple[Ints, Floats]],
    zeros: Ints,
    *,
    modulo_two: bool = False,
    common: Sequence[Ints] = (),
) -> sparse.csr_matrix:
    """Solve sum_j coefficient[j] x[variable[k, j]] = 0 for all k, and x[zeros] = 0.

    Args:
        number: The number of variables.
        equations: Pairs of variables (k, m) and coefficients (m,).
        zeros: Variables that are zero.
        modulo_two: Solve over the field with two elements (signs) instead of the reals (log-scales).
        common: Variables that many units have in common. Others are expressed by these, so that equal units have equal
            forms.

    Returns:
        Every solution: variable i = sum over generators g of forms[i, g] x_g, with one generator per free dimension.
        Shape (variables, generators); modulo 2 for signs.
    """
    root, equations = _equal(number, equations, modulo_two=modulo_two)
    widths = [np.full(len(variables), variables.shape[1], np.int32) for variables, _ in equations]
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int32), *widths]), dtype=np.int32)
    nothing = np.zeros(0, np.int32)
    variable = np.concatenate([nothing, *(own.ravel() for own, _ in equations)], dtype=np.int32, casting="same_kind")
    coefficient = np.concatenate([np.zeros(0), *(np.tile(once, len(variables)) for variables, once in equations)])
    rows = sparse.csr_matrix((coefficient, variable, starts), shape=(len(starts) - 1, number))
    factor, (zero, late) = np.ones(number), np.zeros((2, number), bool)
    zero[root[zeros]] = True
    late[root[np.concatenate([np.zeros(0, np.int64), *map(np.ravel, common)])]] = True

    def substituted(rows: sparse.csr_matrix) -> sparse.csr_matrix:
        """Write every variable of some rows as factor x root, or as zero."""
        data, roots = rows.data * factor[rows.indices], root[rows.indices]
        data[zero[roots]] = 0
        return sparse.csr_matrix((data, roots, rows.indptr), rows.shape)

    definitions: list[tuple[Ints, sparse.csr_matrix]] = []
    while True:
        rows = substituted(rows)
        rows.sum_duplicates()
        rows = _tidied(rows, modulo_two)
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
            rows, defined, definition = _eliminated(_once(rows), late)
            definitions.append((defined, definition))
    bound = zero[root] | (root != np.arange(number))
    for defined, _ in definitions:
        bound[defined] = True
    place = np.cumsum(~bound, dtype=np.int32) - 1
    count = number - int(bound.sum())
    forms = sparse.identity(count if definitions else 0, format="csr")
    for defined, definition in reversed(definitions):
        made = substituted(definition)  # its variables may have been merged, or found to be zero, since
        made.eliminate_zeros()
        made = sparse.csr_matrix((made.data, place[made.indices], made.indptr), (len(defined), count))
        place[defined] = count + np.arange(len(defined))
        forms, count = sparse.vstack([forms, made @ forms], format="csr"), count + len(defined)
    some = ~zero[root]
    ends = np.r_[0, np.cumsum(some, dtype=np.int32)]
    chosen = sparse.csr_matrix((factor[some], place[root[some]], ends), (number, count))
    forms = (chosen @ forms).tocsr() if definitions else chosen
    if modulo_two:
        forms.data = np.mod(np.rint(forms.data), 2)
    forms.data[np.abs(forms.data) < 1e-9] = 0
    forms.eliminate_zeros()
    return forms


def _equal(
    number: int, equations: list[tuple[Ints, Floats]], *, modulo_two: bool
) -> tuple[Numbers, list[tuple[Ints, Floats]]]:
    """Return the smallest variable equal to each one, and the equations that do not say that two are equal."""
    pairs: list[tuple[Ints, Floats]] = []
    others: list[tuple[Ints, Floats]] = []
    for variables, once in equations:
        equal = len(once) == 2 and ((np.mod(once, 2) == 1).all() if modulo_two else once[0] == -once[1])
        (pairs if equal else others).append((variables, once))
    if not pairs:
        return np.arange(number, dtype=np.int32), others
    return components(number, [(own[:, 0], own[:, 1]) for own, _ in pairs]).astype(np.int32), others


def _once(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    """Remove equations that are multiples of others; captures of other lengths repeat them."""
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


def _eliminated(rows: sparse.csr_matrix, late: Bools) -> tuple[sparse.csr_matrix, Ints, sparse.csr_matrix]:
    """Remove equations with a variable that no other equation contains; if there are none, eliminate one variable.

    Args:
        rows: The equations.
        late: Mask of the variables to eliminate last.

    Returns:
        The remaining equations; the defined variables; and their definitions (defined, variables).
    """
    uses = np.bincount(rows.indices, minlength=rows.shape[1])
    row = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    lonely = np.flatnonzero(uses[rows.indices] == 1)
    if len(lonely):
        taken, first = np.unique(row[lonely], return_index=True)
        at = lonely[first]
    else:
        # No such variable: eliminate the rarest variable of the first row from the others.
        first_row = rows.indices[: rows.indptr[1]]
        at = np.argmin(uses[first_row] + late[first_row] * (rows.nnz + 1), keepdims=True)
        taken = np.zeros(1, np.int64)
    defined, pivot = rows.indices[at], rows.data[at]
    definition = sparse.diags(-1 / pivot) @ rows[taken]
    if not len(lonely):
        rows = rows + rows[:, defined] @ definition
    definition = definition + sparse.csr_matrix((np.ones(len(at)), (np.arange(len(at)), defined)), definition.shape)
    return rows[np.delete(np.arange(rows.shape[0]), taken)], defined, definition


def vanishing(matrix: sparse.csr_matrix) -> Bools:
    """Return a mask that includes all columns of linear combinations equal to zero, and possibly more."""
    left, row = np.ones(matrix.shape[1], bool), np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    while True:  # the only remaining column of a row is in none
        held = left[matrix.indices]
        single = held & (np.bincount(row[held], minlength=matrix.shape[0])[row] == 1)
        if not single.any():
            return left
        left[matrix.indices[single]] = False


def kernel_of(matrix: sparse.csr_matrix, *, modulo_two: bool = False) -> Floats:
    """Return a basis of the combinations of columns that are zero. Shape (combinations, columns)."""
    equations: dict[bytes, tuple[list[Ints], Floats]] = {}
    for begin, end in itertools.pairwise(matrix.indptr):
        if end > begin:
            own: Floats = matrix.data[begin:end]
            equations.setdefault(own.tobytes(), ([], own))[0].append(matrix.indices[begin:end].astype(np.int64))
    listed = [(np.stack(rows), own) for rows, own in equations.values()]
    found: Floats = solve(matrix.shape[1], listed, np.zeros(0, np.int64), modulo_two=modulo_two).toarray().T
    return found


def idle_together(
    forms: sparse.csr_matrix,
    slots: Sequence[tuple[str | None, tuple[int, ...], tuple[int, ...], int]],
    alone: Collection[str | None] = (),
    *,
    modulo_two: bool = False,
) -> tuple[Ints, Floats]:
    """Find combinations of generators that change no entry of a parameter: their effects along its axes cancel.

    Args:
        forms: Exponents by position. Shape (positions, generators).
        slots: For each slot its tensor, its axes, its shape, and the index of its first position.
        alone: Tensors with separately counted positions.
        modulo_two: Whether the exponents are those of signs.

    Returns:
        Generators, and a basis of combinations of these. Shapes (generators,) and (combinations, generators).
    """
    acting = (_together(slots, forms.shape[0], alone) @ forms).tocsr()
    acting.data = np.mod(np.rint(acting.data), 2) if modulo_two else acting.data
    acting.data[np.abs(acting.data) <= 1e-9] = 0
    acting.eliminate_zeros()
    maybe = vanishing(acting)
    maybe[np.bincount(forms.indices, minlength=len(maybe)) == 0] = False
    columns = np.flatnonzero(maybe)
    if not len(columns):
        return columns, np.zeros((0, 0))
    return columns, kernel_of(acting[:, columns], modulo_two=modulo_two)


def _together(
    slots: Sequence[tuple[str | None, tuple[int, ...], tuple[int, ...], int]], end: int, alone: Collection[str | None]
) -> sparse.csr_matrix:
    """Return a matrix that annihilates exponents by position if these change no entry of a parameter.

    Along each of several axes all positions then act equally, and the axes together cancel. Shape (rows, positions).
    """
    by_tensor: dict[str | None, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for name, axes, shape, begin in slots:
        if math.prod(shape) and name not in alone:
            by_tensor.setdefault(name, []).append((axes, shape, begin))
    first, single = np.arange(end, dtype=np.int32), np.ones(end, bool)
    whole: list[Ints] = []  # positions that act together. Shapes (rows, positions)
    for own in by_tensor.values():
        every = [axis for axes, _, _ in own for axis in axes]
        lengths = {axis: size for axes, shape, _ in own for axis, size in zip(axes, shape, strict=True)}
        if len(own) < 2 or (len(every) > len(lengths) and math.prod(lengths.values()) > _MOST):
            continue
        parts = []
        for axes, shape, begin in own:
            places = np.arange(begin, begin + math.prod(shape))
            first[places] = begin
            single[places if len(every) > len(lengths) else places[:1]] = False
            sizes = dict(zip(axes, shape, strict=True))
            parts.append(places.reshape([sizes.get(axis, 1) for axis in range(1 + max(every, default=0))]))
        if len(every) == len(lengths):
            parts = [part.ravel()[:1] for part in parts]
        whole.append(np.stack([part.ravel() for part in np.broadcast_arrays(*parts)], 1))
    # Row by row, as there are millions: for each single position its effect minus that of the first on its axis.
    apart = single & (first != np.arange(end, dtype=np.int32))
    counts = np.concatenate([single.astype(np.int32) + apart, *(np.full(len(own), own.shape[1]) for own in whole)])
    starts = np.r_[np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)]
    columns, data = np.empty(starts[-1], np.int32), np.ones(starts[-1])
    columns[starts[:end][apart]], data[starts[:end][apart]] = first[apart], -1
    columns[starts[1 : end + 1][single] - 1] = np.flatnonzero(single)
    columns[starts[end] :] = np.concatenate([np.zeros(0, np.int32), *(own.ravel() for own in whole)])
    return sparse.csr_matrix((data, columns, starts), shape=(len(counts), end))
