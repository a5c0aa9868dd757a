"""What a group does to buffers: how many of its dimensions no parameters make up for."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.arrays import Floats, on_axes
from lightning_sym.symmetry.tracing.affine.weights import Generic
from lightning_sym.symmetry.tracing.structure import Slot, Structure


def tangent_rows(slots: Sequence[Slot], weights: Floats, forms: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return for each weight its rate of change under each scale. Shape (weights, scales)."""
    total = sparse.csr_matrix((weights.size, forms.shape[1]))
    for slot in slots:
        places = on_axes(np.arange(slot.size, dtype=np.float64), slot.shape, slot.axes, weights.ndim)
        places = np.broadcast_to(places, weights.shape).ravel().astype(np.int64)
        total = total + forms[slot.rows][places]
    return sparse.diags(weights.ravel()) @ total


def buffer_rank(structure: Structure, buffers: Collection[str], shapes: Mapping[str, Sequence[int]]) -> int:
    """Return in how many dimensions a group moves some buffers, at generic weights.

    Matrices that act on them count with all of their dimensions: then the rank is an upper bound.

    Args:
        structure: The group.
        buffers: Names of buffers.
        shapes: The shapes of all parameters and buffers, by name.
    """
    generic, names = Generic(shapes, {}), sorted(name for name in buffers if structure.slots_of.get(name))
    names = sorted({*names, *structure.shifts.names.intersection(buffers)})
    if not names:
        return 0
    slots = {name: structure.slots_of.get(name, ()) for name in names}
    blocks = [tangent_rows(slots[name], generic[name].numpy(), structure.magnitudes) for name in names]
    outside = np.ones(structure.magnitudes.shape[1], bool)  # scales of units that a cell's matrix mixes are its own
    for units, table in zip(structure.orbits, structure.scale_table, strict=True):
        outside[table.ravel()] &= structure.cell_of[units[0]] < 0
    moved = [sparse.vstack(blocks).tocsc()[:, outside]]
    if structure.shifts:
        rates = structure.shifts.generic.rates(names)
        moved.append(sparse.vstack([rates[name] for name in names]))
    return rank_of(sparse.hstack(moved).tocsr()) + _mixing(
        structure, {slot.offset for own in slots.values() for slot in own}
    )


def free_positions(structure: Structure, shapes: Mapping[str, Sequence[int]]) -> NDArray[np.bool_]:
    """Return the positions of parameters of which shifts move all entries, each by itself: nothing reads these.

    Args:
        structure: The group.
        shapes: The shapes of all parameters and buffers, by name.
    """
    rows = structure.slots[-1].rows.stop if structure.slots else 0
    free = np.zeros(rows, bool)
    if not structure.shifts.moves_one_by_one:
        return free
    names = sorted(name for name in structure.shifts.names if structure.slots_of.get(name))
    rates = structure.shifts.generic.rates(names)
    moving = sparse.vstack([rates[name] for name in names]).tocsc()
    moving.eliminate_zeros()
    alone, column = np.zeros(moving.shape[0], bool), np.repeat(np.arange(moving.shape[1]), np.diff(moving.indptr))
    while True:  # an entry of the shift moves it, and besides only what others move alone
        left = ~alone[moving.indices]
        single = left & (np.bincount(column[left], minlength=moving.shape[1])[column] == 1)
        if not single.any():
            break
        alone[moving.indices[single]] = True
    last = np.cumsum([rates[name].shape[0] for name in names])
    for name, own in zip(names, np.split(alone, last[:-1]), strict=True):
        own = own.reshape(shapes[name])
        for slot in structure.slots_of[name]:
            others = tuple(axis for axis in range(own.ndim) if axis not in slot.axes)
            free[slot.rows] = own.all(others).ravel()
    return free


def counted_twice(structure: Structure, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the dimension of the scales and matrices that are shifts as well: of units that nothing reads.

    Args:
        structure: The group.
        shapes: The shapes of all parameters and buffers, by name.
    """
    free = free_positions(structure, shapes)
    if not free.any():
        return 0
    forms = structure.magnitudes[: len(free)]
    shared = rank_of(forms.copy()) - rank_of(forms[~free].tocsr())
    orbit_of = {int(unit): index for index, units in enumerate(structure.orbits) for unit in units}
    for cell in structure.dense:
        at = structure.columns[orbit_of[int(cell[0])]][structure.place_in_orbit[cell]]
        shared += (len(cell) ** 2 - len(cell)) * bool(free[at[at < len(free)]].all())
    return shared


def _mixing(structure: Structure, offsets: Collection[int]) -> int:
    """Return the dimension of all matrices that act at some slots."""
    cells = {cell for at in offsets for own, _, _ in structure.dense_places.get(at, ()) for cell in own}
    rotations = {index for at in offsets for index, _, _ in structure.rotated_places.get(at, ())}
    tilts = {structure.tilted_places[at][0] for at in offsets if at in structure.tilted_places}
    phases = {phase for at in offsets for phase in structure.turned_places.get(at, ([],))[0]}
    dimension = sum(len(structure.dense[cell]) ** 2 for cell in cells)
    dimension += sum(structure.rotations[index].dimension for index in rotations)
    return dimension + sum(structure.tilts[index].size for index in tilts) + len(phases)


def rank_of(matrix: sparse.csr_matrix) -> int:
    """Return the rank of a matrix, the sum of those of its blocks."""
    matrix.eliminate_zeros()
    rows = matrix.shape[0]
    _, labels = sparse.csgraph.connected_components(sparse.block_array([[None, matrix], [matrix.T, None]]), False)
    order = np.argsort(labels[:rows], kind="stable")
    order = order[np.diff(matrix.indptr)[order] > 0]
    own = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []
    total = 0
    for block in own:
        part = matrix[block]
        used, where = np.unique(part.indices, return_inverse=True)
        dense = np.zeros((len(block), len(used)))
        dense[np.repeat(np.arange(len(block)), np.diff(part.indptr)), where.ravel()] = part.data
        total += int(np.linalg.matrix_rank(dense, tol=1e-9 * float(np.abs(dense).max())))
    return total
