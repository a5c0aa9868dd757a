"""Invertible matrices between gains: units between linear layers, behind batch norms or gains.

See docs/theory/intertwiners.md, 2.18.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, together
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.group.between_gains import NO_MATRIX, BetweenGains, Matrices, moved_units
from lightning_sym.symmetry.group.cells import balance_cells
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Draw, Factor, Gains, LinearAction, require_passing
from lightning_sym.symmetry.group.gained_forms import around, usable, wants_matrices
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung, Wanted
from lightning_sym.symmetry.group.matrix import bounded, random_matrix
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.labelling.gained import GainedCell, GainedPlace


class GainedMatrix(BetweenGains):
    """An invertible matrix A per gained cell; behind gains with diagonal D, :math:`D A D^{-1}` acts."""

    name = "gained"

    @property
    def cells(self) -> tuple[GainedCell, ...]:
        """The cells."""
        return self.structure.gained

    @property
    def places(self) -> Mapping[int, Sequence[GainedPlace]]:
        """By slot offset: the places of cells."""
        return self.structure.gained_places

    def usable(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return the numbers of the cells between gains other than zero."""
        return usable(self.structure, tensors)

    def drawn(self, number: int, draw: Draw) -> Tensor:
        """Draw a matrix with uniform singular vectors and log-normal singular values."""
        return _drawn(self.cells[number].size, draw)

    def sample_at(self, seen: Slot, values: Factor[Matrices], draw: Draw) -> Matrices:
        """Draw the matrices of cells that are seen; see :class:`Factor`."""
        return tuple(
            random_matrix(cell.size, draw) if np.isin(cell.units, seen.unit).all() else NO_MATRIX
            for cell in self.structure.gained
        )

    def inverse(self, own: Matrices) -> Matrices:
        """Return the inverse of a part."""
        return tuple(torch.linalg.inv(matrix) if len(matrix) else matrix for matrix in own)

    def carried(self, own: Matrices, by: Element, back: Element) -> Matrices:
        """Return the matrices between permutations, and the scales and signs of the place where they act."""
        structure, result = self.structure, list(self.identity())
        comes = torch.argsort(by.permutation).numpy()
        for index, matrix in enumerate(own):
            if not len(matrix):
                continue
            cell = structure.gained[index]
            other = int(structure.gained_of[comes[cell.units[0]]])
            came = by.permutation.numpy()[structure.gained[other].units]
            place = structure.place_in_orbit[came]
            scales, signs = (table[cell.orbit][place] for table in (structure.scale_table, structure.sign_table))
            factor = (by.log_scale[torch.from_numpy(scales)] * torch.from_numpy(cell.frame)).sum(1).exp()
            factor = factor * by.sign[torch.from_numpy(signs[:, cell.sign > 0])].prod(1)
            order = torch.from_numpy(np.argsort(cell.units)[np.searchsorted(np.sort(cell.units), came)])
            result[other] = factor[:, None] * matrix[order[:, None], order] / factor
        return tuple(result)

    def redundant(self, parameters: Collection[str]) -> int:
        """Return the number of scales that are also among the matrices, if they move parameters only."""
        return sum(cell.size for cell in self.structure.gained if not cell.moves_statistics)

    def linear_action(self, own: Matrices, gains: Gains) -> "GainedAction | None":
        """Return the action of a part by matrices; None for the identity."""
        return None if self.is_identity(own) else GainedAction(self.structure, own)

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the directions of all entries; see :class:`Factor`.

        Means stay: biases make up for that. Entries that pass a gain of zero have no direction.
        """
        structure, starts, total = self.structure, dict[str, int](), 0
        for name, weights in parameters.items():
            starts[name], total = total, total + weights.size
        first = np.cumsum([0, *(cell.size**2 for cell in structure.gained)])
        found: list[tuple[Floats, Ints, Ints]] = []
        passes = np.ones(int(first[-1]), dtype=bool)
        for slot in structure.slots:
            for place in structure.gained_places.get(slot.offset, ()):
                cell = structure.gained[place.cell]
                outside = around(place, [gain.of(tensors) for gain in cell.gains]).numpy()
                # Entry (i, j) adds row j to row i where units are written, and subtracts i from j where they are read.
                into, of = np.indices((cell.size, cell.size)).reshape(2, -1)[:: -1 if place.read else 1]
                with np.errstate(divide="ignore", invalid="ignore"):
                    factor = np.where(into == of, 1.0, outside[into] / outside[of])
                finite = np.isfinite(factor)
                passes[first[place.cell] : first[place.cell + 1]] &= finite
                factor = np.where(finite, factor, 0.0)[:, None] * (-1 if place.read else 1)
                moved = _moved(slot, place, cell, parameters, tensors)
                if moved is not None:
                    name, to, rows, by = moved
                    rates = (factor * by[into][:, None] * rows[of]).ravel()
                    entry = np.repeat(first[place.cell] + np.arange(len(into)), rows.shape[1])
                    found.append((rates, (starts[name] + to[into]).ravel(), entry))
        if not found:
            return sparse.csr_matrix((total, 0))
        rates, rows, columns = (np.concatenate(own) for own in zip(*found, strict=True))
        return sparse.csr_matrix((rates * passes[columns], (rows, columns)), shape=(total, int(first[-1])))

    rung = Rung.FIRST

    def concerned(self, wanted: Wanted) -> bool:
        """Return whether matrices are sought: for forms up to nothing at all; see :class:`Factor`."""
        return bool(self.structure.gained) and wants_matrices(wanted)

    def canonical(self, state: Gathered) -> Canonical:
        """Return the part that makes both Gram matrices of every cell equal and diagonal, without gains."""
        if self.structure.dense:  # these were found together
            return Canonical({})
        return balance_cells(self.group, state)

    def left(self, wanted: Wanted, tensors: Mapping[str, Tensor]) -> Iterable[str]:
        """Yield a note on cells that stay."""
        stay = len(self.structure.gained)
        if self.concerned(wanted):
            stay -= len(usable(self.structure, tensors))
        if stay and wanted.scales is not None:
            yield (
                f"{stay} cells between gains are not mixed (with scales='balanced', signs and order only, and between "
                "gains other than zero): the form is canonical up to invertible matrices there only"
            )

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return a note on cells that are not mixed; see :class:`Factor`."""
        note = (
            f"{len(self.structure.gained)} cells with invertible matrices between gains are mixed only if both "
            "networks compute the same function: no lower bound is known"
        )
        return [note] * bool(self.structure.gained), bool(self.structure.gained)

    @property
    def gains(self) -> frozenset[str]:
        """The gains around the matrices."""
        return frozenset(name for cell in self.structure.gained for gain in cell.gains for name in gain.names)

    def at(self, coordinates: Mapping[str, Tensor]) -> Matrices:
        """Return the matrix exponentials of the coordinates."""
        given = (coordinates[name] for name in self.coordinates())
        return tuple(torch.linalg.matrix_exp(own) if bool(own.any()) else NO_MATRIX for own in given)

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the coordinates; see :class:`Factor`."""
        found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.coordinates().items()}
        gains = [[gain.of(weights) for gain in cell.gains] for cell in self.structure.gained]
        for slot in self.structure.slots:
            for place in self.structure.gained_places.get(slot.offset, ()) if slot.tensor in gradients else ():
                at, outside = torch.from_numpy(place.at), around(place, gains[place.cell])
                own, slopes = (
                    together(each[slot.tensor], slot.axes)[at].reshape(len(at), -1) for each in (weights, gradients)
                )
                products = (slopes * outside[:, None]) @ (own / outside[:, None]).mT
                found[f"gained {place.cell}"] += -products.mT if place.read else products
        return found

    def dual(self, own: Matrices) -> Matrices:
        """Return the inverse transposes."""
        return tuple(inverse.mT for inverse in self.inverse(own))

    def within(self, own: Matrices, budget: float, condition: float) -> Matrices:
        """Return the matrices with singular values within bounds; see :class:`Factor`."""
        return bounded(own, budget, condition)

    def check(self, own: Matrices) -> None:
        """Check that a part is one of this factor.

        Raises:
            ValueError: If a matrix has another size than its cell.
        """
        super().check(own)
        for matrix, cell in zip(own, self.structure.gained, strict=True):
            if len(matrix) not in (0, cell.size):
                raise ValueError(f"gained holds a matrix of {len(matrix)} units; expected one of {cell.size}")


class GainedAction(LinearAction):
    """The action of invertible matrices on single axes, between gains.

    Args:
        structure: The group.
        matrices: One per gained cell.
    """

    def __init__(self, structure: Structure, matrices: Matrices) -> None:
        self.structure = structure
        self.moved: list[Ints] = []  # which units are mixed at all
        self.matrices: list[tuple[Tensor, Tensor]] = []  # those units' matrices, and the matrices for readers
        for moved, inside in map(moved_units, matrices):
            self.moved.append(moved)
            self.matrices.append((inside, torch.linalg.inv(inside).mT))
        self.gains: dict[int, list[Tensor]] = {}

    def learn(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gains around the matrices.

        Raises:
            ValueError: If a gain is zero, or not finite.
        """
        for index, (cell, moved) in enumerate(zip(self.structure.gained, self.moved, strict=True)):
            if index in self.gains or not len(moved) or any(name not in tensors for name in _names(cell)):
                continue
            self.gains[index] = [gain.within(moved).of(tensors) for gain in cell.gains]
            for gain, values in zip(cell.gains, self.gains[index], strict=True):
                require_passing(values, gain.name, "matrix")

    def acts_at(self, slot: Slot) -> bool:
        """Return whether a matrix changes the units of a slot."""
        return any(len(self.moved[place.cell]) for place in self.structure.gained_places.get(slot.offset, ()))

    def on_axis(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let the matrices act on one axis, between gains.

        Raises:
            ValueError: If the gains are not known.
        """
        for place in self.structure.gained_places.get(slot.offset, ()):
            matrix, moved = self.matrices[place.cell][place.read], self.moved[place.cell]
            if not len(moved):
                continue
            if any(place.powers):
                if place.cell not in self.gains:
                    names = listed(_names(self.structure.gained[place.cell]))
                    raise ValueError(
                        f"a matrix acts after the gains {names}, which are missing; expected the network itself "
                        "along with its tensors, or an element without matrices: sample(mixing=False)"
                    )
                outside = around(place, self.gains[place.cell])
                matrix = outside[:, None] * matrix / outside
            where = torch.from_numpy(place.at[moved]).to(tensor.device)
            whole = np.array_equal(place.at[moved], np.arange(tensor.shape[axis]))
            old = (tensor if whole else tensor.index_select(axis, where)).movedim(axis, 0)
            new = torch.tensordot(matrix.to(tensor), old, 1).movedim(0, axis)
            tensor = new.contiguous() if whole else tensor.index_copy(axis, where, new)
        return tensor


def _drawn(size: int, draw: Draw) -> Tensor:
    """Draw a matrix that mixes all units, or at most so many as are wanted."""
    if draw.most is None or draw.most >= size:
        return random_matrix(size, draw)
    chosen = torch.randperm(size, generator=draw.generator)[: draw.most]
    whole = torch.eye(size, dtype=torch.float64)
    whole[chosen[:, None], chosen] = random_matrix(draw.most, draw)
    return whole


def _names(cell: GainedCell) -> list[str]:
    """Return the names of the tensors that make a cell's gains."""
    return [name for gain in cell.gains for name in gain.names]


def _moved(
    slot: Slot,
    place: GainedPlace,
    cell: GainedCell,
    parameters: Mapping[str, Floats],
    tensors: Mapping[str, Tensor],
) -> tuple[str, Ints, Floats, Floats] | None:
    """Return the parameter that moves with a place, the positions of its rows, the added rows, and their factors.

    It is the parameter at the place, or the bias of a batch norm that makes up for the mean.
    """
    if slot.tensor in parameters:
        weights = parameters[slot.tensor]
        number = together(torch.arange(weights.size).view(weights.shape), slot.axes).numpy().reshape(slot.size, -1)
        at = number[place.at]
        return slot.tensor, at, weights.ravel()[at], np.ones(cell.size)
    for gain in cell.gains:
        if gain.norm is not None and gain.norm.mean[0] == slot.tensor and np.array_equal(gain.norm.mean[1], place.at):
            mean = tensors[slot.tensor].detach().double().cpu().numpy()[place.at]
            name, at = gain.norm.bias
            return name, at[:, None], -mean[:, None], gain.of(tensors).numpy()
    return None
