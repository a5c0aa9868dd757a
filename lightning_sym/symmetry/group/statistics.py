"""The action of a group on buffers: the number of dimensions that no parameters compensate."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, on_axes
from lightning_sym.symmetry.equations import idle_together, vanishing
from lightning_sym.symmetry.group.factor import Factors
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.affine.weights import Generic

_STATISTICS = ("running_mean", "running_var")
_ROUNDING = 1e-9  # relative
_DEPENDENT = 1e-10  # relative squares
_SMALL = 600  # the column space is computed for blocks of at most so many rows


def scaled_buffers(structure: Structure) -> set[str]:
    """Return the tensors that scales or signs multiply, without running means and variances.

    If they are buffers, such as the gains of frozen batch norms, they count as weights: networks can only be averaged
    where these agree as well.

    Args:
        structure: The group.
    """
    multiplied = np.diff(structure.magnitudes.indptr) + np.diff(structure.signs.indptr) > 0
    found: set[str] = set()
    for name, slots in structure.slots_of.items():
        if name.rpartition(".")[2] not in _STATISTICS and all(slot.kind == "value" for slot in slots):
            found |= {name for slot in slots if multiplied[slot.rows].any()}
    return found


def tangent_rows(slots: Sequence[Slot], weights: Floats, forms: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the rate of change of each weight under each scale. Shape (weights, scales)."""
    parts = []
    for slot in slots:
        places = on_axes(np.arange(slot.size, dtype=np.float64), slot.shape, slot.axes, weights.ndim)
        parts.append(forms[slot.offset + np.broadcast_to(places, weights.shape).ravel().astype(np.int64)])
    total = sum(parts[1:], start=parts[0]) if parts else sparse.csr_matrix((weights.size, forms.shape[1]))
    factors = np.repeat(weights.ravel(), np.diff(total.indptr))
    return sparse.csr_matrix((total.data * factors, total.indices, total.indptr), total.shape)


def buffer_rank(factors: Factors, buffers: Collection[str], shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the dimension of a group's action on buffers, at generic weights.

    Matrices that act on the buffers count with all of their dimensions; the rank is then an upper bound.

    Args:
        factors: Those of the group.
        buffers: Names of buffers.
        shapes: The shapes of all parameters and buffers, by name.
    """
    structure = factors.structure
    generic, names = Generic(shapes, {}), sorted(name for name in buffers if structure.slots_of.get(name))
    names = sorted({*names, *structure.shifts.names.intersection(buffers)})
    if not names:
        return 0
    slots = {name: structure.slots_of.get(name, ()) for name in names}
    blocks = [tangent_rows(slots[name], generic[name].numpy(), structure.magnitudes) for name in names]
    outside = np.ones(structure.magnitudes.shape[1], bool)  # a cell's matrix includes the scales of its units
    for units, table in zip(structure.orbits, structure.scale_table, strict=True):
        outside[table.ravel()] &= structure.cell_of[units[0]] < 0
    moved = [sparse.vstack(blocks).tocsc()[:, outside]]
    if structure.shifts:
        rates = structure.shifts.generic.rates(names)
        moved.append(sparse.vstack([rates[name] for name in names]))
    offsets = {slot.offset for own in slots.values() for slot in own}
    return rank_of(sparse.hstack(moved).tocsr()) + sum(factor.dimension_at(offsets) for factor in factors)


def free_positions(structure: Structure, shapes: Mapping[str, Sequence[int]], wanted: Collection[Ints] = ()) -> Bools:
    """Return a mask of the parameter positions where translations move each entry separately, as nothing reads it.

    Only two kinds of positions are checked: those of scales or matrices that move no others, and `wanted`.

    Args:
        structure: The group.
        shapes: The shapes of all parameters and buffers, by name.
        wanted: Further positions.
    """
    rows = structure.slots[-1].rows.stop if structure.slots else 0
    free, asked = np.zeros(rows, bool), np.zeros(rows, bool)
    some = structure.shifts.may_move_one_by_one - structure.idle
    may = np.zeros(rows, bool)
    for slot in structure.slots:
        may[slot.rows] = slot.tensor in some
    forms = structure.magnitudes[:rows]
    everywhere = forms.tocoo()
    asked[everywhere.row[vanishing(forms[~may].tocsr())[everywhere.col]]] = True
    for positions in wanted:
        asked[positions] = True
    for slot in structure.slots:
        free[slot.rows] = slot.tensor in structure.idle
    names = sorted({slot.tensor for slot in structure.slots if slot.tensor in some and asked[slot.rows].any()})
    if not names:
        return free
    rates = structure.shifts.generic.rates(names)
    alone = _alone(sparse.vstack([rates[name] for name in names]).tocsc())
    last = np.cumsum([rates[name].shape[0] for name in names])
    for name, own in zip(names, np.split(alone, last[:-1]), strict=True):
        own = own.reshape(shapes[name])
        for slot in structure.slots_of[name]:
            others = tuple(axis for axis in range(own.ndim) if axis not in slot.axes)
            free[slot.rows] = own.all(others).ravel()
    return free


def idle_generators(structure: Structure, forms: sparse.csr_matrix) -> Bools:
    """Return a mask of the scales or signs that act only on tensors of functions that other weights absorb.

    Translations take these parameters off, so that only running statistics tell such scales and signs.

    Args:
        structure: The group.
        forms: Exponents. Shape (positions of all slots, generators).
    """
    others = [slot.rows for slot in structure.slots if slot.tensor not in structure.idle]
    acting = [forms[rows].getnnz(0) for rows in others] if structure.idle else [np.ones(forms.shape[1])]
    alone: Bools = np.sum(acting, axis=0) == 0
    return alone


def idle_signs(structure: Structure, tensors: Mapping[str, Tensor]) -> Floats:
    """Return the signs that make running means positive; nan for signs that flip none. Shape (signs,)."""
    total = np.zeros(structure.signs.shape[1])
    for slot in structure.slots:
        if slot.tensor in structure.idle - structure.shifts.names and slot.kind == "value":
            values = tensors[slot.tensor].detach().double().cpu().numpy().ravel()
            total += structure.signs[slot.rows].T @ values if len(values) == slot.size else 0.0
    return np.where(total == 0, np.nan, np.sign(total))


def counted_twice(structure: Structure, shapes: Mapping[str, Sequence[int]], moving: Collection[str] = ()) -> int:
    """Return the number of dimensions that are counted twice, as scales along two axes of parameters coincide.

    Scales and matrices may be translations as well, on units that nothing reads.

    Args:
        structure: The group.
        shapes: The shapes of all parameters and buffers, by name.
        moving: Names of tensors that no translation moves, in comparisons with translations alone.
    """
    rows = structure.slots[-1].rows.stop if structure.slots else 0
    slots = [(slot.tensor, slot.axes, slot.shape, slot.rows.start) for slot in structure.slots]
    idle = len(idle_together(structure.magnitudes[:rows].tocsr(), slots)[1])
    free = free_positions(structure, shapes)
    for slot in structure.slots:
        free[slot.rows] &= slot.tensor not in moving
    if not free.any():
        return idle
    forms = structure.magnitudes[: len(free)]
    # Scales that coincide on freely moving weights are counted below.
    still = {slot.tensor for slot in structure.slots if not free[slot.rows].all()}
    held = np.concatenate([np.full(slot.size, float(slot.tensor in still)) for slot in structure.slots])
    columns, combinations = idle_together(kept := (sparse.diags(held) @ forms).tocsr(), slots)
    idle = int(np.linalg.matrix_rank(kept[:, columns] @ combinations.T)) if len(combinations) else 0
    shared = rank_of(forms.copy()) - rank_of(forms[~free].tocsr())
    for cell in (*structure.dense, *(own.units for own in structure.gained)):
        at = structure.columns[structure.orbit_of[cell[0]]][structure.place_in_orbit[cell]]
        shared += (len(cell) ** 2 - len(cell)) * bool(free[at[at < len(free)]].all())
    return shared + idle


def _alone(moving: sparse.csc_matrix) -> Bools:
    """Return a mask of the rows that some combination of columns moves alone; large blocks get a partial check."""
    moving.eliminate_zeros()
    alone, column = np.zeros(moving.shape[0], bool), np.repeat(np.arange(moving.shape[1]), np.diff(moving.indptr))
    while True:  # a column moves this row, and otherwise only rows that are already moved alone
        left = ~alone[moving.indices]
        single = left & (np.bincount(column[left], minlength=moving.shape[1])[column] == 1)
        if not single.any():
            break
        alone[moving.indices[single]] = True
    for rows, block in _blocks(moving.tocsr(), _SMALL):
        if not alone[rows].all():
            left, values, _ = np.linalg.svd(block, full_matrices=False)
            alone[rows] = np.square(left[:, values > _ROUNDING * values[0]]).sum(1) > 1 - _ROUNDING
    return alone


def rank_of(matrix: sparse.csr_matrix) -> int:
    """Return the rank of a matrix, the sum of the ranks of its blocks."""
    matrix.eliminate_zeros()
    columns = matrix.tocsc()
    others = np.diff(matrix.indptr)[columns.indices] > 1  # in rows with further columns
    alone = (np.diff(columns.indptr) > 0) & (np.bincount(_numbered(columns)[others], minlength=matrix.shape[1]) == 0)
    matrix = columns[:, ~alone].tocsr()
    return int(alone.sum()) + sum(
        int(np.linalg.matrix_rank(block, tol=_ROUNDING * float(np.abs(block).max()))) for _, block in _blocks(matrix)
    )


def _numbered(matrix: sparse.csc_matrix) -> Ints:
    """Return the column of each entry."""
    return np.repeat(np.arange(matrix.shape[1]), np.diff(matrix.indptr))


def _blocks(matrix: sparse.csr_matrix, most: float = math.inf) -> Iterator[tuple[Ints, Floats]]:
    """Yield the row indices and dense entries of each connected block of at most `most` rows; skip zero rows."""
    rows = matrix.shape[0]
    _, labels = sparse.csgraph.connected_components(sparse.block_array([[None, matrix], [matrix.T, None]]), False)
    order = np.argsort(labels[:rows], kind="stable")
    order = order[np.diff(matrix.indptr)[order] > 0]
    for block in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []:
        if len(block) > most:
            continue
        part = matrix[block]
        used, where = np.unique(part.indices, return_inverse=True)
        dense = np.zeros((len(block), len(used)))
        dense[np.repeat(np.arange(len(block)), np.diff(part.indptr)), where.ravel()] = part.data
        yield block, dense


def kernel(moved: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the combinations of columns that are zero, in columns. Shape (columns, combinations)."""
    count = moved.shape[1]
    gram = (moved.T @ moved).tocsr()
    touching = np.flatnonzero(np.diff(gram.indptr))
    apart = np.setdiff1d(np.arange(count), touching)
    values, rotation = np.linalg.eigh(gram[touching][:, touching].toarray())
    kernel = rotation[:, values <= _DEPENDENT * max(float(values.max(initial=0.0)), 1e-300)]
    ones = sparse.csr_matrix((np.ones(len(apart)), (apart, np.arange(len(apart)))), shape=(count, len(apart)))
    mixed = sparse.lil_matrix((count, kernel.shape[1]))
    mixed[touching] = kernel
    return sparse.hstack([ones, mixed]).tocsr()
