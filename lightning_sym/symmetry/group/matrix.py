"""Invertible matrices on GL(d) blocks: units between linear layers."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym._linear_algebra import polar_factor, random_orthogonal
from lightning_sym.symmetry.arrays import Floats, Ints, as_array, together
from lightning_sym.symmetry.group.cells import (
    balance_cells,
    balanced_by_positive,
    cell_slices,
    singular_values,
    unbalanced,
)
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Draw, Factor, Gains, LinearAction
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung, Wanted
from lightning_sym.symmetry.group.search import MatrixPlace
from lightning_sym.symmetry.solving.structure import Slot, Structure

Matrices = tuple[Tensor, ...]


class Matrix(Factor[Matrices]):
    """One invertible matrix A per GL(d) block. A acts on incoming weights, its inverse transpose on outgoing ones."""

    name = "dense"

    def identity(self) -> Matrices:
        """Return identity matrices, one tensor for all blocks of a size."""
        return self.structure.same

    def is_identity(self, own: Matrices) -> bool:
        """Return whether a part is the identity."""
        return not changed(own, self.structure)

    def sample(self, draw: Draw) -> Matrices:
        """Draw matrices with uniform singular vectors and log-normal singular values."""
        if not draw.mixing:
            return self.identity()
        return tuple(random_matrix(len(cell), draw) for cell in self.structure.dense)

    def sample_at(self, seen: Slot, values: Factor[Matrices], draw: Draw) -> Matrices:
        """Draw the matrices of visible blocks; see :class:`Factor`."""
        pairs = zip(self.structure.dense, self.structure.same, strict=True)
        return tuple(random_matrix(len(cell), draw) if np.isin(cell, seen.unit).all() else same for cell, same in pairs)

    def compose(self, later: Matrices, earlier: Matrices) -> Matrices:
        """Return the product of two parts; `earlier` acts first."""
        return tuple(
            two if one is same else one if two is same else one @ two
            for one, two, same in zip(later, earlier, self.structure.same, strict=True)
        )

    def inverse(self, own: Matrices) -> Matrices:
        """Return the inverse of a part."""
        found = list(own)
        cells = sorted(changed(own, self.structure))
        for cell, matrix in zip(cells, inverted([own[cell] for cell in cells]), strict=True):
            found[cell] = matrix
        return tuple(found)

    def carried(self, own: Matrices, by: Element, back: Element) -> Matrices:
        """Permute the matrices along with their blocks; see :class:`Factor`."""
        first = torch.tensor([int(cell[0]) for cell in self.structure.dense], dtype=torch.int64)
        came = self.structure.cell_of[by.permutation[first].numpy()]
        return tuple(own[cell] for cell in came.tolist())

    @property
    def dimension(self) -> int:
        """The number of the matrices' entries."""
        return sum(len(cell) ** 2 for cell in self.structure.dense)

    def redundant(self, parameters: Collection[str]) -> int:
        """Return the number of scales that are also among the matrices, if they move parameters only."""
        return sum(len(cell) * own for cell, own in zip(self.structure.dense, self._alone(parameters), strict=True))

    def _alone(self, parameters: Collection[str]) -> list[bool]:
        """Return which cells' matrices move parameters only."""
        buffers = [slot.offset for slot in self.structure.slots if slot.tensor not in parameters]
        moving = {cell for at in buffers for own, *_ in self.structure.dense_places.get(at, ()) for cell in own}
        return [cell not in moving for cell in range(len(self.structure.dense))]

    def dimension_at(self, offsets: Collection[int]) -> int:
        """Return the dimension of the matrices that act at some slots, given by their offsets."""
        places = self.structure.dense_places
        cells = {cell for at in offsets for own, _, _ in places.get(at, ()) for cell in own}
        return sum(len(self.structure.dense[cell]) ** 2 for cell in cells)

    def linear_action(self, own: Matrices, gains: Gains) -> "MatrixAction | None":
        """Return the action of a part; None for the identity."""
        cells = changed(own, self.structure)
        return MatrixAction(self.structure, own, cells) if cells else None

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the tangents of all entries of matrices that move parameters only; see :class:`Factor`."""
        structure = self.structure
        starts = np.cumsum([0, *(own.size for own in parameters.values())]).tolist()
        entries = np.cumsum([0, *(len(cell) ** 2 for cell in structure.dense)]).tolist()
        result = sparse.csr_matrix((starts[-1], entries[-1]))
        for start, (name, weights) in zip(starts, parameters.items(), strict=False):
            for slot in structure.slots_of.get(name, ()):
                number = torch.arange(weights.size).view(weights.shape)
                for cells, positions, read in structure.dense_places.get(slot.offset, ()):
                    rows = together(number, slot.axes).numpy()
                    # Entry (i, j) adds row j to row i of incoming weights, and subtracts i from j in outgoing ones.
                    for cell, at in ((cell, at) for own in positions for cell, at in zip(cells, own, strict=True)):
                        into, of = np.indices((len(at), len(at))).reshape(2, -1)[:: -1 if read else 1]
                        to, rates = rows[at[into]], weights.ravel()[rows[at[of]]] * (-1 if read else 1)
                        column = np.repeat(entries[cell] + np.arange(len(into)), to[0].size)
                        moved = (rates.ravel(), (start + to.ravel(), column))
                        result = result + sparse.csr_matrix(moved, shape=result.shape)
        return result[:, np.repeat(np.array(self._alone(parameters), bool), np.diff(entries))]

    rung = Rung.FIRST

    def canonical(self, state: Gathered) -> Canonical:
        """Return the scales and matrices that make both Gram matrices of every block equal and diagonal."""
        return balance_cells(self.group, state)

    def left(self, wanted: Wanted, tensors: Mapping[str, Tensor]) -> Iterable[str]:
        """Yield a note on blocks that stay unchanged."""
        if self.structure.dense and wanted.scales is None:
            yield (
                f"{len(self.structure.dense)} cells under invertible matrices stay unchanged: the form is canonical "
                "up to these matrices only"
            )

    def best_match(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor], orbit: int) -> Matrices | None:
        """Return the orthogonal matrices that minimise the distance; see :class:`Factor`."""
        cells = self.structure.cell_of[self.structure.orbits[orbit]]
        products = {cell: torch.zeros(0) for cell in np.unique(cells[cells >= 0]).tolist()}
        for (_, own, _, ours), (_, _, _, theirs) in zip(
            *(cell_slices(self.structure, tensors, products.keys()) for tensors in (target, current)), strict=True
        ):
            for place, cell in enumerate(own):
                if cell in products:
                    product = ours[place] @ theirs[place].mT
                    products[cell] = product if not len(products[cell]) else products[cell] + product
        found = list(self.structure.same)
        for cell, product in products.items():
            found[cell] = polar_factor(product) if len(product) else found[cell]
        return tuple(found) if products else None

    freedom, permutes = "matrices", True

    def mixes(self, orbit: int) -> bool:
        """Return whether the units of an orbit belong to GL(d) blocks."""
        return bool(self.structure.cell_of[self.structure.orbits[orbit][0]] >= 0)

    def gains_of_blocks(self, table: Tensor, places: Ints, mixing: bool) -> Floats:
        """Return nuclear norms, the gains of the optimal rotations; see :class:`Factor`."""
        index, matrix = torch.from_numpy(places), table.double().cpu()
        pairs = matrix[index[:, None, :, None], index[None, :, None, :]]
        gained = torch.linalg.svdvals(pairs) if mixing else pairs.diagonal(dim1=-2, dim2=-1)
        return as_array(gained.sum(-1))

    def mixing_blocks(self, own: Matrices, table: Tensor, units: Ints, places: Ints, order: Ints) -> Matrices:
        """Return a part with the optimal rotations of assigned blocks; see :class:`Factor`."""
        found = list(own)
        for new, old in enumerate(order):
            cell = int(self.structure.cell_of[units[places[old][0]]])
            rows, columns = (torch.from_numpy(places[index]).to(table.device) for index in (new, old))
            found[cell] = polar_factor(table[rows[:, None], columns[None, :]])
        return tuple(found)

    def rigid(self, own: Matrices) -> Matrices:
        """Return the orthogonal polar factors."""
        return tuple(polar_factor(matrix) for matrix in own)

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return a note on blocks without a balanced representative; see :class:`Factor`."""
        free = {cell for own in networks if balanced for cell in unbalanced(self.structure, own)}
        note = (
            f"{len(free)} cells under invertible matrices have no balanced representative (their units are "
            "linearly dependent): the upper bound uses rotations of them only, and no lower bound is known"
        )
        return [note] * bool(free), bool(free)

    def invariants(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return singular values by kind of block, which rotations leave invariant; see :class:`Factor`."""
        found = singular_values(self.structure, tensors)
        for name in found:
            mixed = [slot for slot in self.structure.slots_of[name] if slot.offset in self.structure.dense_places]
            if len(mixed) > 1:  # on both axes: the singular values of the whole matrix
                found[name] = [torch.linalg.svdvals(together(tensors[name], mixed[0].axes).flatten(1))]
        return found

    def matrix_places(self) -> Iterable[MatrixPlace]:
        """Yield the places of the blocks; see :class:`Factor`."""
        for slot in self.structure.slots:
            for cells, positions, read in self.structure.dense_places.get(slot.offset, ()):
                names = tuple(f"matrix {cell}" for cell in cells)
                yield MatrixPlace(slot.tensor, names, slot.axes, MatrixPlace.indices(*positions), read)

    def balanced_heads(self, tensors: Mapping[str, Tensor]) -> Canonical | None:
        """Return the positive matrices that equalise the Gram matrices of heads; see :class:`Factor`."""
        return balanced_by_positive(self.group, tensors) if self.structure.dense else None

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the logarithms of the matrices."""
        return {f"matrix {index}": (len(cell), len(cell)) for index, cell in enumerate(self.structure.dense)}

    def of_orbit(self, orbit: int, name: str) -> Tensor:
        """Return a mask of matrices on an orbit's units; see :class:`Factor`."""
        cell = self.structure.dense[int(name.split()[1])]
        inside = bool(np.isin(cell, self.structure.orbits[orbit]).any())
        return super().of_orbit(orbit, name) | inside

    def at(self, coordinates: Mapping[str, Tensor]) -> Matrices:
        """Return the matrix exponentials of the coordinates."""
        given = [coordinates[name] for name in self.coordinates()]
        return tuple(_by_size(given, torch.linalg.matrix_exp))

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the coordinates; see :class:`Factor`."""
        found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.coordinates().items()}
        sums = dict[tuple[int, ...], Tensor]()
        for slot in self.structure.slots:
            if slot.tensor not in gradients:
                continue
            for cells, at, read in self.structure.dense_lines.get(slot.offset, ()):
                pair = (together(own[slot.tensor], slot.axes)[at] for own in (weights, gradients))
                own, gradient = (lines.reshape(len(cells), len(lines) // len(cells), -1) for lines in pair)
                product = -own @ gradient.mT if read else gradient @ own.mT
                sums[cells] = sums[cells].add_(product) if cells in sums else product
        for cells, products in sums.items():
            for cell, product in zip(cells, products, strict=True):
                found[f"matrix {cell}"] += product
        return found

    def dual(self, own: Matrices) -> Matrices:
        """Return the inverse transposes."""
        return tuple(inverse.mT for inverse in inverted(own))

    def within(self, own: Matrices, budget: float, condition: float) -> Matrices:
        """Return the matrices with singular values within bounds; see :class:`Factor`."""
        return bounded(own, budget, condition)

    def inwards(
        self, own: Matrices, slopes: Mapping[str, Tensor], budget: float, condition: float
    ) -> Mapping[str, Tensor]:
        """Return derivatives without the growth of singular values at their bounds; see :class:`Factor`."""
        found = {}
        for index in beyond(own, budget * (1 - 1e-9), condition * (1 - 1e-9)):
            if (name := f"matrix {index}") in slopes:
                found[name] = _inwards(own[index], slopes[name], budget * (1 - 1e-9), condition * (1 - 1e-9))
        return found


def beyond(matrices: Matrices, budget: float, condition: float) -> list[int]:
    """List the matrices with singular values out of bounds; empty matrices have none."""
    found = []
    for size in {len(matrix) for matrix in matrices} - {0}:
        alike = [index for index, matrix in enumerate(matrices) if len(matrix) == size]
        logs = torch.linalg.svdvals(torch.stack([matrices[index] for index in alike])).log()
        out = (logs[:, 0] - logs[:, -1] > condition) | (logs.abs().amax(1) > budget)
        found += [alike[place] for place in torch.nonzero(out).ravel().tolist()]
    return found


def bounded(matrices: Matrices, budget: float, condition: float) -> Matrices:
    """Return matrices with singular values within bounds; see :meth:`Factor.within`."""
    result = list(matrices)
    for index in beyond(matrices, budget, condition):
        left, values, right = torch.linalg.svd(matrices[index])
        low, high = _limits(values.log(), budget, condition)
        result[index] = (left * values.clamp(math.exp(low), math.exp(high))) @ right
    return tuple(result)


def _limits(logs: Tensor, budget: float, condition: float) -> tuple[float, float]:
    """Return the bounds of the logarithms of falling singular values: around their middle, and within the budget."""
    middle = float(logs[0] + logs[-1]) / 2
    low, high = (min(max(middle + side * condition / 2, -budget), budget) for side in (-1, 1))
    return low, high


def _inwards(matrix: Tensor, slope: Tensor, budget: float, condition: float) -> Tensor:
    """Return a derivative by X in exp(X) A, without what moves singular values of A out of their bounds.

    The logarithm of a singular value with left vector u grows by u^T X u.
    """
    left, values, _ = torch.linalg.svd(matrix)
    low, high = _limits(values.log(), budget, condition)
    for side, reached in ((1.0, values.log() >= high), (-1.0, values.log() <= low)):
        axes = left[:, reached]
        outwards, turn = torch.linalg.eigh(-side * axes.mT @ (slope + slope.mT) @ axes / 2)
        own = axes @ turn
        slope = slope + side * (own * outwards.clamp_min(0)) @ own.mT
    return slope


def random_matrix(size: int, draw: Draw) -> Tensor:
    """Draw a matrix with uniform singular vectors and log-normal singular values."""
    left, right = (random_orthogonal(size, draw.generator) for _ in range(2))
    sizes = draw.scale * torch.randn(size, dtype=torch.float64, generator=draw.generator)
    return (left * sizes.exp()) @ right


def changed(matrices: Matrices, structure: Structure) -> set[int]:
    """Return the indices of the blocks with matrices other than the identity."""
    pairs = enumerate(zip(matrices, structure.same, strict=True))
    return {cell for cell, (own, same) in pairs if not (own is same or torch.equal(own, same))}


class MatrixAction(LinearAction):
    """The action of invertible matrices on single axes.

    Args:
        structure: The group.
        matrices: One per GL(d) block.
        cells: Indices of the blocks with matrices other than the identity.
    """

    def __init__(self, structure: Structure, matrices: Matrices, cells: Collection[int]) -> None:
        self.structure, self.matrices, self.cells = structure, matrices, cells
        self._found: dict[tuple[tuple[int, ...], bool], Tensor] = {}

    def acts_at(self, slot: Slot) -> bool:
        """Return whether a matrix changes entries of a slot."""
        places = self.structure.dense_places.get(slot.offset, ())
        return any(cell in self.cells for cells, _, _ in places for cell in cells)

    def on_axis(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Multiply one axis by A for incoming weights, and by its inverse transpose for outgoing ones."""
        shape, acting = tensor.shape, self.structure.dense_lines.get(slot.offset, ())
        lines = tensor.reshape(math.prod(shape[:axis]), shape[axis], -1)
        result = torch.empty_like(lines)
        ranges = sorted((at.start, at.stop) for _, at, _ in acting if isinstance(at, slice))
        ends = [0, *(stop for _, stop in ranges)]
        if [*(start for start, _ in ranges), shape[axis]] != ends:
            result.copy_(lines)  # entries outside all blocks stay
        for cells, at, read in acting:
            matrices = self._stacked(cells, read).to(tensor)
            if isinstance(at, slice):
                _multiply(matrices, lines[:, at], result[:, at])
            else:
                old = lines.index_select(1, index := at.to(tensor.device))
                result.index_copy_(1, index, _multiply(matrices, old, torch.empty_like(old)))
        return result.reshape(shape)

    def _stacked(self, cells: tuple[int, ...], read: bool) -> Tensor:
        """Return the matrices of blocks that are written, or their inverse transposes. Shape (blocks, size, size)."""
        if (cells, read) not in self._found:
            own = torch.stack([self.matrices[cell] for cell in cells])
            self._found[cells, read] = torch.linalg.inv(own).mT if read else own
        return self._found[cells, read]


def inverted(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the inverses of square matrices, computed in batches of one size."""
    return _by_size(matrices, torch.linalg.inv)


def _by_size(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply a function to square matrices, in batches of one size."""
    found = list(matrices)
    for size in {len(matrix) for matrix in matrices}:
        alike = [index for index, matrix in enumerate(matrices) if len(matrix) == size]
        made = function(torch.stack([matrices[index] for index in alike]))
        for index, own in zip(alike, made.unbind(), strict=True):
            found[index] = own
    return found


def _multiply(matrices: Tensor, lines: Tensor, out: Tensor) -> Tensor:
    """Multiply the blocks of an axis by matrices.

    Args:
        matrices: Shape (blocks, size, size).
        lines: Shape (before, blocks x size, after).
        out: Tensor for the product, of the shape of `lines`.
    """
    blocks, size, _ = matrices.shape
    old, new = (each.view(len(lines), blocks, size, -1) for each in (lines, out))
    if lines.shape[2] == 1:
        new.copy_(torch.bmm(old[..., 0].movedim(1, 0), matrices.mT).movedim(0, 1)[..., None])
    else:
        for number in range(len(lines)):
            new[number] = torch.bmm(matrices, old[number])
    return out
