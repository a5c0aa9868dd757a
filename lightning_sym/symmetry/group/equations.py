"""Sparse linear equations of which some may have no solution: solved as far as they have one, part by part."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats, Ints
from lightning_sym.symmetry.tracing.structure import Structure

_EXACT = 1e-9


def solved(
    matrix: sparse.csr_matrix, wanted: Ints, target: Floats, *, modulo_two: bool = False
) -> tuple[Floats, Bools]:
    """Solve the wanted equations as far as they can be solved, and keep as much else as it is as one can.

    The system falls into parts that share no unknown. A part without a solution is left alone. Where there are several
    solutions, all other rows of the matrix are to be zero: first those that occur most often.

    Args:
        matrix: What the unknowns do at all places. Shape (places, unknowns).
        wanted: The places at which something is wanted. Shape (equations,).
        target: What is wanted there. Shape (equations,).
        modulo_two: Over the field with two elements.

    Returns:
        The unknowns, 0 where nothing is asked of them; and which equations hold. Shapes (unknowns,), (equations,).
    """
    matrix = matrix.tocsr()
    if modulo_two:
        matrix = sparse.csr_matrix((np.mod(matrix.data, 2), matrix.indices, matrix.indptr), matrix.shape)
    matrix.eliminate_zeros()
    unknowns = np.zeros(matrix.shape[1])
    holds = np.abs(target) <= _EXACT  # those without an unknown: only if nothing is asked
    known: dict[Any, Any] = {}  # units that are alike have the same equations
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
    """Yield the parts in which something is wanted.

    Yields:
        The numbers of the equations; those of the unknowns; the equations; and all other rows, most frequent first.
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
            if len(own) >= len(columns):  # nothing is left free, as a rule
                yield own, columns, here, here[:0]
                continue
            others = _dense(matrix, rows[~is_wanted[rows]], number, len(columns))
            patterns, first, count = np.unique(others, axis=0, return_index=True, return_counts=True)
            yield own, columns, here, patterns[np.lexsort((first, -count))]


def _dense(matrix: sparse.csr_matrix, rows: Ints, number: Ints, width: int) -> Floats:
    """Return some rows of a matrix, with columns of new numbers."""
    counts = matrix.indptr[rows + 1] - matrix.indptr[rows]
    row = np.repeat(np.arange(len(rows)), counts)
    at = np.arange(len(row)) + np.repeat(matrix.indptr[rows] - np.cumsum(counts) + counts, counts)
    result = np.zeros((len(rows), width))
    result[row, number[matrix.indices[at]]] = matrix.data[at]
    return result


def _by_label(labels: Ints) -> dict[int, Ints]:
    """Return by label where it stands."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    return dict(zip(labels[order[starts]].tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}


def _prepared(own: Floats, others: Floats, modulo_two: bool) -> Floats:
    """Return the matrix that makes the solution of what is wanted: with as many other rows 0 as can be."""
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
    """Return a matrix that makes a solution of equations that have one."""
    height, width = matrix.shape
    rows, pivots = _eliminated(np.hstack([matrix, np.eye(height)]))
    inverse = np.zeros((width, height))
    for row, pivot in enumerate(pivots):
        if pivot < width:
            inverse[pivot] = rows[row, width:]
    return inverse


def of_single_units(structure: Structure, forms: sparse.csr_matrix, wanted: Ints) -> sparse.csr_matrix:
    """Leave out the generators that several units have in common, unless nothing else acts at a wanted place.

    With them all units would be one system of equations; and no gain needs a change of sign of the whole stream.
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
