"""Sparse linear equations, solved component by component where a solution exists."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats, Ints
from lightning_sym.symmetry.solving.structure import Structure

_EXACT = 1e-9


def solved(
    matrix: sparse.csr_matrix, wanted: Ints, target: Floats, *, modulo_two: bool = False
) -> tuple[Floats, Bools]:
    """Solve the wanted equations where possible, and change as few other places as possible.

    The system decomposes into components without common unknowns. A component without a solution is skipped. Among
    several solutions, the one chosen keeps other rows of the matrix zero, the most frequent rows first.

    Args:
        matrix: Coefficients of the unknowns at all places. Shape (places, unknowns).
        wanted: Places of the wanted equations. Shape (equations,).
        target: Right-hand sides. Shape (equations,).
        modulo_two: Whether to solve over the field with two elements.

    Returns:
        The unknowns, 0 where they are unconstrained, shape (unknowns,); and a mask of the equations that hold, shape
        (equations,).
    """
    matrix = matrix.tocsr()
    if modulo_two:
        matrix = sparse.csr_matrix((np.mod(matrix.data, 2), matrix.indices, matrix.indptr), matrix.shape)
    matrix.eliminate_zeros()
    unknowns = np.zeros(matrix.shape[1])
    holds = np.abs(target) <= _EXACT  # equations without unknowns hold only if the target is 0
    known: dict[Any, Any] = {}  # units with the same equations share one inverse
    for equations, columns, own, others in _parts(matrix, wanted):
        key = (own.tobytes(), others.tobytes(), len(columns))
        if key not in known:
            known[key] = _prepared(own, others, modulo_two)
        solution = known[key] @ target[equations]
        solution = np.mod(solution, 2) if modulo_two else solution
        away = own @ solution - target[equations]
        away = np.abs(np.mod(away, 2) if modulo_two else away)
        holds[equations] = bool((away <= _EXACT * max(1.0, np.abs(target[equations]).max())).all())
        if holds[equations[0]]:
            unknowns[columns] = solution
    return unknowns, holds


def _parts(matrix: sparse.csr_matrix, wanted: Ints) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
    """Yield the components with wanted equations.

    Yields:
        Indices of the equations; indices of the unknowns; coefficients of the equations; and all other rows, most
        frequent first.
    """
    graph = sparse.bmat([[None, matrix], [matrix.T, None]], format="csr")
    _, labels = sparse.csgraph.connected_components(graph, directed=False)
    of_places, of_unknowns = labels[: matrix.shape[0]], labels[matrix.shape[0] :]
    is_wanted = np.zeros(matrix.shape[0], bool)
    is_wanted[wanted] = True
    places, unknowns, equations = (_by_label(own) for own in (of_places, of_unknowns, of_places[wanted]))
    number = np.zeros(matrix.shape[1], np.int64)  # of an unknown within its part
    for columns in unknowns.values():
        number[columns] = np.arange(len(columns))
    for label, own in equations.items():
        if label in unknowns:
            columns, rows = unknowns[label], places[label]
            here = _dense(matrix, wanted[own], number, len(columns))
            if len(own) >= len(columns):  # usually no freedom remains
                yield own, columns, here, here[:0]
                continue
            others = _dense(matrix, rows[~is_wanted[rows]], number, len(columns))
            patterns, first, count = np.unique(others, axis=0, return_index=True, return_counts=True)
            yield own, columns, here, patterns[np.lexsort((first, -count))]


def _dense(matrix: sparse.csr_matrix, rows: Ints, number: Ints, width: int) -> Floats:
    """Return a dense block of rows, with columns renumbered by `number`."""
    counts = matrix.indptr[rows + 1] - matrix.indptr[rows]
    row = np.repeat(np.arange(len(rows)), counts)
    at = np.arange(len(row)) + np.repeat(matrix.indptr[rows] - np.cumsum(counts) + counts, counts)
    result = np.zeros((len(rows), width))
    result[row, number[matrix.indices[at]]] = matrix.data[at]
    return result


def _by_label(labels: Ints) -> dict[int, Ints]:
    """Return the indices of each label."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    return dict(zip(labels[order[starts]].tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}


def _prepared(own: Floats, others: Floats, modulo_two: bool) -> Floats:
    """Return the matrix that maps targets to the solution that keeps as many other rows 0 as possible."""
    rows = own
    rank = _rank(rows, modulo_two)
    for row in others:
        more = np.vstack([rows, row])
        if rank < own.shape[1] and _rank(more, modulo_two) > rank:
            rows, rank = more, rank + 1
    inverse = _inverse_modulo_two(rows) if modulo_two else np.linalg.pinv(rows)
    return np.asarray(inverse[:, : len(own)], float)


def _rank(matrix: Floats, modulo_two: bool) -> int:
    return len(_eliminated(matrix)[1]) if modulo_two else int(np.linalg.matrix_rank(matrix))


def _eliminated(matrix: Floats) -> tuple[Bools, list[int]]:
    """Eliminate over the field with two elements; return the reduced matrix, and the columns of its pivots."""
    rows, pivots = matrix.astype(bool), list[int]()
    for column in range(rows.shape[1]):
        at = len(pivots) + np.flatnonzero(rows[len(pivots) :, column])
        if len(at):
            rows[[len(pivots), at[0]]] = rows[[at[0], len(pivots)]]
            others = np.flatnonzero(rows[:, column])
            rows[others[others != len(pivots)]] ^= rows[len(pivots)]
            pivots.append(column)
    return rows, pivots


def _inverse_modulo_two(matrix: Floats) -> Floats:
    """Return a matrix that maps right-hand sides to a solution of solvable equations."""
    height, width = matrix.shape
    rows, pivots = _eliminated(np.hstack([matrix, np.eye(height)]))
    inverse = np.zeros((width, height))
    for row, pivot in enumerate(pivots):
        if pivot < width:
            inverse[pivot] = rows[row, width:]
    return inverse


def of_single_units(structure: Structure, forms: sparse.csr_matrix, wanted: Ints) -> sparse.csr_matrix:
    """Drop generators that several units share, except where only they act at a wanted place.

    Shared generators would connect all units to one system, and no gain needs a sign change of a whole stream.
    """
    unit = np.concatenate([np.zeros(0, np.int64), *(slot.unit.ravel() for slot in structure.slots)])
    places = forms.tocoo()
    here = unit[places.row]
    least, most = np.full(forms.shape[1], structure.units), np.full(forms.shape[1], -1)
    np.minimum.at(least, places.col[here >= 0], here[here >= 0])
    np.maximum.at(most, places.col[here >= 0], here[here >= 0])
    keep = least >= most
    own = forms[wanted]
    alone = abs(own) @ keep.astype(float) == 0
    keep[own[alone].indices] = True
    return forms @ sparse.diags(keep.astype(float))
