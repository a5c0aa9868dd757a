"""The directions in which a network's parameters can move along its orbit."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from lightning_sym.symmetry.arrays import Floats, Ints, together
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.charts import charted
from lightning_sym.symmetry.statistics import tangent_rows
from lightning_sym.symmetry.tracing.capture import state_tensors
from lightning_sym.symmetry.tracing.structure import Slot

# Directions that are this close to a combination of the others, relative to their length, add nothing to them.
_DEPENDENT = 1e-10


@dataclass(frozen=True, eq=False)
class OrbitTangents:
    r"""The tangent space of a network's orbit, as far as it lies in the space of its parameters.

    Attributes:
        names: Names of the parameters, in the order of the vectors.
        vectors: One tangent of length 1 per column. Sparse, shape ``[P, d]``, float64.
        rank: Dimension of the space that they span; less than d where units are dead or copies.
        generators: Number of all one-parameter groups, those of `Symmetry.buffer_dimension` included.
        statistics: How many of them move running statistics of batch norms, and so are no directions of the parameters
            alone. They are not among the vectors.
    """

    names: tuple[str, ...]
    vectors: sparse.csr_matrix
    rank: int
    generators: int
    statistics: int
    _inverse: Floats

    def along(self, vectors: Tensor) -> Tensor:
        """Return the parts of vectors along the orbit, in the Euclidean metric.

        Args:
            vectors: Shape ``[P]`` or ``[P, K]``, floating, on any device.

        Returns:
            The same shape, dtype and device; computed in float64 on the CPU.
        """
        given = vectors.detach().double().cpu().numpy()
        found = self.vectors @ (self._inverse @ (self.vectors.T @ given))
        return torch.from_numpy(np.ascontiguousarray(found)).to(vectors)

    def across(self, vectors: Tensor) -> Tensor:
        """Return the parts of vectors orthogonal to the orbit; as `along`."""
        return vectors - self.along(vectors)

    def complement(self) -> Tensor:
        """Return an orthonormal basis of what is orthogonal to the orbit. Shape ``[P, P - rank]``, float64, dense."""
        left, _, _ = np.linalg.svd(self.vectors.toarray(), full_matrices=True)
        return torch.from_numpy(np.ascontiguousarray(left[:, self.rank :]))


def orbit_tangents(symmetry: Symmetry, network: nn.Module) -> OrbitTangents:
    r"""Return the tangents of a network's orbit at the network.

    A scale that multiplies weight k by :math:`\lambda^{a_k}` has the tangent :math:`a_k w_k`; a shift has
    what it adds; a rotation's generator S moves weights by :math:`D S D^{-1} W`, and a phase the coordinates of its
    plane by (-y, x). What moves running statistics too is
    left out: with these fixed it changes the network's function.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.

    Returns:
        The tangents.

    Raises:
        ValueError: If the network has another structure than the traced one, or invertible matrices act on some units.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = orbit_tangents(trace_symmetry(network, torch.randn(2, 5)), network)
        >>> found.vectors.shape, found.rank
        ((75, 8), 8)
    """
    symmetry.require(network)
    if symmetry.structure.dense:
        raise ValueError(
            f"any invertible matrix acts on {len(symmetry.structure.dense)} cells of units (linear layers in a row), "
            "for which there is no balanced member; put an activation between them, or merge them into one."
        )
    return tangents_at(symmetry, network)


def tangents_at(symmetry: Symmetry, network: nn.Module) -> OrbitTangents:
    """Return the tangents of a network's orbit, those of invertible matrices included; see `orbit_tangents`.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Of this architecture, which is not checked. Not changed.
    """
    structure = symmetry.structure
    own = charted(dict(network.named_parameters()), structure.charts)
    parameters = {name: p.detach().double().cpu().numpy() for name, p in own.items()}
    free = _free_of_statistics(symmetry, frozenset(parameters))
    blocks = [tangent_rows(structure.slots_of.get(name, ()), w, structure.magnitudes) for name, w in parameters.items()]
    scales = sparse.vstack(blocks).tocsr() @ free
    shifts = _shifts(symmetry, charted(state_tensors(network), structure.charts), parameters)
    twice = structure.shifts.size - structure.shifts.dimension + symmetry._counted_twice
    twice += sum(len(cell) for cell in structure.dense)  # scales, which the matrices contain
    kinds = (_turns, _tilts, _phases, _matrices)
    turns = sparse.hstack([kind(symmetry, parameters) for kind in kinds])
    vectors = sparse.hstack([scales, shifts, turns]).tocsc()
    lengths = np.sqrt(np.asarray(vectors.multiply(vectors).sum(0)).ravel())
    alive = lengths > _DEPENDENT * max(float(lengths.max(initial=0.0)), 1e-300)
    vectors = (vectors[:, alive] @ sparse.diags(1 / lengths[alive])).tocsr()
    values, rotation = np.linalg.eigh((vectors.T @ vectors).toarray())
    used = values > _DEPENDENT
    inverse = (rotation[:, used] / values[used]) @ rotation[:, used].T
    generators = symmetry.dimension + symmetry.buffer_dimension
    return OrbitTangents(
        names=tuple(parameters),
        vectors=vectors,
        rank=int(used.sum()),
        generators=generators,
        statistics=generators - free.shape[1] - shifts.shape[1] - turns.shape[1] + twice,
        _inverse=inverse,
    )


def _free_of_statistics(symmetry: Symmetry, parameters: frozenset[str]) -> sparse.csr_matrix:
    """Return combinations of scales that move no buffer, in columns. Shape (scales, combinations)."""
    structure = symmetry.structure
    rows = [
        np.arange(slot.offset, slot.offset + slot.size) for slot in structure.slots if slot.tensor not in parameters
    ]
    count = structure.magnitudes.shape[1]
    if not rows or not count:
        return sparse.identity(count, format="csr")
    return _kernel(structure.magnitudes[np.concatenate(rows)])


def _kernel(moved: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return combinations of columns that are zero, in columns. Shape (columns, combinations)."""
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


def _shifts(symmetry: Symmetry, tensors: Mapping[str, Tensor], parameters: Collection[str]) -> sparse.csr_matrix:
    """Return the shifts that move parameters alone, in columns. Shape (weights, shifts)."""
    space = symmetry.structure.shifts
    total = sum(tensors[name].numel() for name in parameters)
    if not space:
        return sparse.csr_matrix((total, 0))
    found = space.at(tensors).rates(tensors.keys())
    moved = sparse.vstack([found[name] for name in parameters]).tocsr()
    buffers = [matrix for name, matrix in found.items() if name not in parameters]
    return moved @ _kernel(sparse.vstack(buffers).tocsr()) if buffers else moved


def _turns(symmetry: Symmetry, parameters: dict[str, Floats]) -> sparse.csr_matrix:
    """Return the rotations of streams that move parameters alone. Shape (parameters, generators of rotations)."""
    structure, found = symmetry.structure, []
    moved: dict[int, list[tuple[Slot, Ints, tuple[int, ...]]]] = {}
    for slot in structure.slots:
        for index, at, powers in structure.rotated_places.get(slot.offset, ()):
            moved.setdefault(index, []).append((slot, at, powers))
    for index, places in moved.items():
        rotation = structure.rotations[index]
        if not all(slot.tensor in parameters for slot, *_ in places):
            continue
        basis = _antisymmetric(rotation.size, fixes_ones=rotation.fixes_ones)
        change = {name: np.zeros((len(basis), *w.shape)) for name, w in parameters.items()}
        gains = [parameters[name].ravel()[at] for name, at in rotation.gains]
        for slot, at, powers in places:
            around = math.prod(
                (gain ** float(k) for gain, k in zip(gains, powers, strict=True)), start=np.ones(len(at))
            )
            rows = np.moveaxis(parameters[slot.tensor], slot.axes[0], 0)[at]
            turned = np.tensordot(around[:, None] * basis / around, rows, 1)
            np.moveaxis(change[slot.tensor], slot.axes[0] + 1, 1)[:, at] += turned
        found.append(sparse.csr_matrix(np.concatenate([c.reshape(len(basis), -1) for c in change.values()], 1).T))
    size = sum(w.size for w in parameters.values())
    return sparse.hstack([sparse.csr_matrix((size, 0)), *found]).tocsr()


def _tilts(symmetry: Symmetry, parameters: dict[str, Floats]) -> sparse.csr_matrix:
    """Return the tilts, one column per entry. Shape (parameters, entries)."""
    found = []
    for tilt in symmetry.structure.tilts:
        gain = np.ones(tilt.size) if tilt.gain is None else parameters[tilt.gain]
        change = {name: np.zeros((tilt.size, *w.shape)) for name, w in parameters.items()}
        change[tilt.offset] += np.diag(gain * (parameters[tilt.offset] / gain).sum())
        for name, axis in tilt.readers:
            columns = np.moveaxis(parameters[name], axis, 0) * gain[:, None]
            change[name] -= np.moveaxis(columns[:, None] / gain[:, None], 1, axis + 1)
        found.append(sparse.csr_matrix(np.concatenate([c.reshape(tilt.size, -1) for c in change.values()], 1).T))
    size = sum(w.size for w in parameters.values())
    return sparse.hstack([sparse.csr_matrix((size, 0)), *found]).tocsr()


def _matrices(symmetry: Symmetry, parameters: dict[str, Floats]) -> sparse.csr_matrix:
    """Return the generators of invertible matrices. Shape (parameters, entries of matrices)."""
    structure = symmetry.structure
    starts = np.cumsum([0, *(w.size for w in parameters.values())])
    entries = np.cumsum([0, *(len(cell) ** 2 for cell in structure.dense)])
    result = sparse.csr_matrix((int(starts[-1]), int(entries[-1])))
    for start, (name, weights) in zip(starts.tolist(), parameters.items(), strict=False):
        for slot in structure.slots_of.get(name, ()):
            places = structure.dense_places.get(slot.offset, ())
            if not places:
                continue
            number = together(torch.arange(weights.size).view(weights.shape), slot.axes).numpy()
            for cells, positions, read in places:
                # Entry (i, j) adds row j to row i where units are put out, and takes i off j where they are read.
                for cell, at in ((cell, at) for own in positions for cell, at in zip(cells, own, strict=True)):
                    into, of = np.indices((len(at), len(at))).reshape(2, -1)[:: -1 if read else 1]
                    rows = number[at[into]].reshape(len(into), -1)
                    rates = weights.ravel()[number[at[of]]].ravel() * (-1 if read else 1)
                    column = np.repeat(entries[cell] + np.arange(len(into)), rows.shape[1])
                    result = result + sparse.csr_matrix((rates, (start + rows.ravel(), column)), shape=result.shape)
    return result


def _phases(symmetry: Symmetry, parameters: dict[str, Floats]) -> sparse.csr_matrix:
    """Return the phases of planes, one column each. Shape (weights, phases)."""
    structure, count = symmetry.structure, symmetry.structure.phases
    blocks = [sparse.csr_matrix((0, count))]
    for name, weights in parameters.items():
        total = sparse.csr_matrix((weights.size, count))
        number = np.arange(weights.size).reshape(weights.shape)
        for slot in structure.slots_of.get(name, ()):
            if slot.offset not in structure.turned_places:
                continue
            phase, first, second = structure.turned_places[slot.offset]
            for at, other, sign in ((first, second, -1.0), (second, first, 1.0)):
                rows = np.moveaxis(number, slot.axes[0], 0)[at].reshape(len(at), -1)
                rates = sign * np.moveaxis(weights, slot.axes[0], 0)[other].ravel()
                column = np.repeat(phase, rows.shape[1])
                total = total + sparse.csr_matrix((rates, (rows.ravel(), column)), shape=total.shape)
        blocks.append(total)
    return sparse.vstack(blocks).tocsr()


def _antisymmetric(size: int, *, fixes_ones: bool) -> Floats:
    """Return a basis of antisymmetric matrices (that send the vector of ones to 0). Shape (matrices, size, size)."""
    frame = np.linalg.qr(np.c_[np.ones(size), np.eye(size)[:, 1:]])[0][:, 1:] if fixes_ones else np.eye(size)
    first, second = np.triu_indices(frame.shape[1], 1)
    outer = np.einsum("ik,jk->kij", frame[:, first], frame[:, second])
    return np.asarray(outer - outer.transpose(0, 2, 1))
