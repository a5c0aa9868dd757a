"""Squared norms of a network's weights per unit, under any scales."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym._checks import must_be_finite
from lightning_sym.symmetry.arrays import Bools, Floats, Ints, on_axes, rising
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.affine.translations import NORM

# Smaller sums of squares count as zero: their logarithms are meaningless.
NOTHING = 1e-280
_AT_ONCE = 2**17  # number of squares computed at once
_MOST_KEPT = 2**24  # number of squares cached: 128 MiB


def module_of(tensor: str) -> str:
    """Return the name of the module that holds a tensor."""
    return tensor.rpartition(".")[0]


def classes_of(
    structure: Structure, tables: Sequence[Ints], forms: sparse.csr_matrix, cells: Collection[int] = ()
) -> list[Ints]:
    """Group generators that play the same role for the units of one orbit, in the order of the forward pass.

    Generators within GL(d) blocks are omitted, except those of `cells`.

    Args:
        structure: The group.
        tables: The generators (scales or signs) of each orbit's units. Each of shape (units, generators of a unit).
        forms: Exponents of the generators. Shape (positions, generators).
        cells: Indices of GL(d) blocks.
    """
    left = np.ones(forms.shape[1], bool)
    classes = []
    for units, table in zip(structure.orbits, tables, strict=True):
        free = np.isin(structure.cell_of[units], [-1, *cells])
        for column in table.T:
            members = np.unique(column[left[column] & free])
            left[column] = False
            if len(members):
                classes.append(members)
    classes += [np.array([generator]) for generator in np.flatnonzero(left)]
    by_generator = forms.tocsc()
    return sorted(classes, key=lambda members: int(by_generator.indices[by_generator.indptr[members[0]]]))


class Part(NamedTuple):
    """The data for squared norms of one class of generators, independent of all other tensors.

    Attributes:
        at: Positions of the tensors that the class acts on.
        forms: The exponents there. Shape (positions, generators).
        up, down: The class's rows of the plan's `up` and `down`.
        slots: Offsets of the slots that the class acts on.
    """

    at: Ints
    forms: sparse.csr_matrix
    up: sparse.csr_matrix
    down: sparse.csr_matrix
    slots: frozenset[int]


class Plan:
    """The parts of a structure that do not depend on weights, arranged for sums over slices.

    Args:
        structure: The group.
        parameters: The names of the parameters.

    Attributes:
        structure: The group.
        total: The number of positions of all slots.
        slots: All labelled axes.
        slot_of: Index of each position's slot.
        tensors: For each parameter with labelled axes: its name and its slots; those with two axes come last.
        spans: For each of these parameters, the positions of its slots.
        rows: An upper bound on row indices.
        row_of: Index of each position's row; equal positions in tensors of one module form one row.
        forms: Exponents of the scales. Shape (positions, generators).
        up, down: Their positive and negative parts, transposed; `up_used` and `down_used` indicate nonzero entries.
        used: Indicator of nonzero exponents; `used_at` holds the position of each entry.
        largest: Largest exponent of each generator.
        classes: Generators that play the same role for the units of one orbit, in the order of the forward pass.
        class_of: Class of each generator; -1 inside GL(d) blocks, which are not treated here.
        touching: The tensors that each class acts on.
        parts: Further data for the sums of each class.
        first: For each orbit, a mask of the columns that belong to the first module with its units.
        parameter: Mask of positions that belong to a parameter, except biases that a translation sets to zero.
    """

    def __init__(self, structure: Structure, parameters: Collection[str]) -> None:
        self.structure = structure
        self.slots = structure.slots
        self.forms = structure.magnitudes
        self.total, generators = self.forms.shape
        self.slot_of = np.repeat(np.arange(len(self.slots)), [slot.size for slot in self.slots])
        self.up, self.down = (part.maximum(0).T.tocsr() for part in (self.forms, -self.forms))
        self.up_used, self.down_used = ((part > 0).astype(np.float64) for part in (self.up, self.down))
        self.used = (abs(self.forms) > 0).astype(np.float64)
        self.used_at = np.repeat(np.arange(self.total), np.diff(self.forms.indptr))
        self.largest = np.zeros(generators)
        np.maximum.at(self.largest, self.forms.indices, abs(self.forms.data))
        self._find_parameters(structure, parameters)
        self._number_rows()
        self.classes = classes_of(structure, structure.scale_table, self.forms)
        self.class_of = np.full(generators, -1)
        for index, members in enumerate(self.classes):
            self.class_of[members] = index
        self.touching: list[list[str]] = [[] for _ in self.classes]
        acting: list[set[int]] = [set() for _ in self.classes]
        for name, slots in self.tensors.items():
            classes = [rising(self.class_of[self.forms[slot.rows].indices]) for slot in slots]
            for index in rising(np.concatenate(classes)):
                if index >= 0:
                    self.touching[index].append(name)
                    acting[index] |= {slot.offset for slot, own in zip(slots, classes, strict=True) if index in own}
        self.parts = [self._part(index, acting[index]) for index in range(len(self.classes))]
        self.first = [self._of_first_module(columns[0]) for columns in structure.columns]

    def _part(self, index: int, slots: set[int]) -> Part:
        spans = [span for name in self.touching[index] for span in self.spans[name]]
        at = np.concatenate([np.zeros(0, np.int64), *(np.arange(span.start, span.stop) for span in spans)])
        members = self.classes[index]
        return Part(at, self.forms[at], self.up[members], self.down[members], frozenset(slots))

    def _find_parameters(self, structure: Structure, parameters: Collection[str]) -> None:
        biases = structure.shifts.named(NORM)
        shifted = {
            name for name in biases if len(structure.slots_of.get(name, ())) == 1
        } | structure.idle  # not weights: translations shift a part of these, or take them off
        self.parameter = np.zeros(self.total, bool)
        by_name: dict[str, list[Slot]] = {}
        for slot in structure.slots:
            acts = self.forms[slot.rows].nnz > 0 or (slot.unit >= 0).any()
            if slot.tensor in parameters and acts:
                by_name.setdefault(slot.tensor, []).append(slot)
                self.parameter[slot.rows] = slot.tensor not in shifted
        self.tensors = {name: sorted(slots, key=lambda slot: len(slot.axes)) for name, slots in by_name.items()}
        self.spans = {name: [slot.rows for slot in slots] for name, slots in self.tensors.items()}

    def _number_rows(self) -> None:
        longest = max((slot.size for slot in self.slots), default=0)
        modules = list(dict.fromkeys(module_of(slot.tensor) for slot in self.slots))
        self.rows = len(modules) * longest
        self.row_of = np.zeros(self.total, np.int64)
        for slot in self.slots:
            self.row_of[slot.rows] = modules.index(module_of(slot.tensor)) * longest + np.arange(slot.size)

    def _of_first_module(self, positions: Ints) -> Bools:
        modules = [module_of(self.slots[index].tensor) for index in self.slot_of[positions]]
        return np.array([module == modules[0] for module in modules], bool) & self.parameter[positions]


class Squares:
    """Squared norms of a network's weights per position, under any scales.

    A term is a square q, summed over the axes without units. Scales l transform it to q exp(2 a.l), where a is the sum
    of the exponents at its positions on all axes. The sum of all terms is the squared norm of the network.

    Args:
        plan: The parts of the structure that do not depend on weights.
        tensors: Parameters, by name; missing ones are provided later by :meth:`renew`.
        dtype: Dtype of stored matrices; None keeps theirs, without a copy.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self.plan = plan
        self.axes: dict[str, list[tuple[int, ...]]] = {}
        self._terms: dict[str, Floats] = {}
        self._roots: dict[str, Tensor] = {}  # matrices of weights, instead of their squares
        self._kept: dict[str, Tensor] = {}  # cached squares of some of these
        self._free = _MOST_KEPT
        self._base: Floats | None = None
        self.renew(tensors, dtype)

    def __contains__(self, name: str) -> bool:
        return name in self.axes

    def renew(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Replace the squares of some tensors, given by name."""
        for name in self.plan.tensors.keys() & tensors.keys():
            tensor, slots = tensors[name].detach(), self.plan.tensors[name]
            axes = sorted({axis for slot in slots for axis in slot.axes})
            rest = [axis for axis in range(tensor.ndim) if axis not in axes]
            shape = [tensor.shape[axis] for axis in axes]
            self.axes[name] = [tuple(axes.index(axis) for axis in slot.axes) for slot in slots]
            if math.prod(tensor.shape[axis] for axis in rest) > 1:
                self._terms[name] = _summed_squares(tensor, rest).cpu().numpy()
            elif self.axes[name] in ([(0,), (1,)], [(1,), (0,)]):
                self._roots[name] = tensor.reshape(shape).to("cpu", dtype)
                self._free += self._kept.pop(name).numel() if name in self._kept else 0
            else:
                square = tensor.to(torch.float64, copy=True).square_()
                self._terms[name] = square.reshape(shape).cpu().numpy()

    def scale(self, log_scale: Floats) -> None:
        """Apply scales to all weights from now on."""
        factor = np.exp(2 * (self.plan.forms @ log_scale))
        self._base = factor if self._base is None else self._base * factor

    def total(self, name: str) -> float:
        """Return the sum of all squares of a tensor, without scales."""
        if name in self._roots:
            return float(torch.linalg.vector_norm(self._roots[name], dtype=torch.float64)) ** 2
        return float(self._terms[name].sum())

    def require_finite(self, tensors: Mapping[str, Tensor], weights: Collection[str]) -> None:
        """Check that all values are finite, except those of masks.

        Raises:
            ValueError: If a value is not finite.
        """
        for name in tensors:
            if not must_be_finite(name, weights):
                continue
            # Summing the squares is cheaper for large tensors than looking at every entry again.
            finite = math.isfinite(self.total(name)) if name in self else bool(torch.isfinite(tensors[name]).all())
            if not finite:
                raise ValueError(f"{name} holds values that are not finite; expected a network with finite weights.")

    def _sums(self, name: str, vectors: Sequence[Floats], index: int, terms: Floats | None = None) -> Floats:
        """Sum a tensor's terms at the positions of one of its slots, without that slot's own factor.

        Args:
            name: Name of the tensor.
            vectors: For each slot, the factors of its positions in the terms.
            index: Index of the slot.
            terms: The terms; by default the squares.
        """
        slots, axes = self.plan.tensors[name], self.axes[name]
        if terms is None and name in self._roots:
            return self._products(name, vectors[1 - index], rows=axes[index] == (0,))
        terms = self._terms[name] if terms is None else terms
        for other, slot in enumerate(slots):
            if other != index:
                terms = terms * on_axes(vectors[other], slot.shape, axes[other], terms.ndim)
        sums: Floats = terms.sum(tuple(axis for axis in range(terms.ndim) if axis not in axes[index]))
        return sums.ravel()

    def _products(self, name: str, vector: Floats, *, rows: bool) -> Floats:
        """Multiply a matrix of squares by a vector, summing over columns or `rows`; cache small matrices."""
        roots = self._roots[name]
        if name not in self._kept:
            if self._free < roots.numel():
                return _products_of_squares(roots, vector, rows)
            self._free -= roots.numel()
            self._kept[name] = roots.to(torch.float64, copy=True).square_()
        squares = self._kept[name]
        return torch.mv(squares if rows else squares.mT, torch.from_numpy(vector)).numpy()

    def _vectors(self, name: str, values: Floats) -> list[Floats]:
        if self._base is None:
            return [values[span] for span in self.plan.spans[name]]
        return [values[span] * self._base[span] for span in self.plan.spans[name]]

    def slices(
        self, factor: Floats, names: Iterable[str] | None = None, wanted: Collection[int] | None = None
    ) -> Floats:
        """Return the sum of the terms at each position, 0 at positions that were not requested.

        Args:
            factor: The factor of each position in its terms. Shape (positions,).
            names: Tensors to sum; all by default.
            wanted: Offsets of the slots to sum; all by default.
        """
        total = np.zeros(self.plan.total)
        for name in self.axes if names is None else names:
            vectors = self._vectors(name, factor)
            for index, span in enumerate(self.plan.spans[name]):
                if wanted is None or span.start in wanted:
                    total[span] = vectors[index] * self._sums(name, vectors, index)
        return total

    def energy(self, factor: Floats, names: Iterable[str]) -> float:
        """Return the sum of all terms of the named tensors."""
        vectors = ((name, self._vectors(name, factor)) for name in names)
        return math.fsum(float(own[0] @ self._sums(name, own, 0)) for name, own in vectors)

    def change(self, factor: Floats, slices: Floats, speed: Floats, names: Iterable[str]) -> Floats:
        """Return the derivative of the slices along a change of the logarithms of the factors.

        Args:
            factor: The factor of each position in its terms. Shape (positions,).
            slices: The slices at that factor. Shape (positions,).
            speed: The rate of change of each logarithm. Shape (positions,).
            names: Tensors to sum.
        """
        total = np.zeros(self.plan.total)
        for name in names:
            spans, vectors = self.plan.spans[name], self._vectors(name, factor)
            for span in spans:
                total[span] = slices[span] * speed[span]
            for index, other in itertools.permutations(range(len(spans)), 2):
                moving = [*vectors]
                moving[other] = vectors[other] * speed[spans[other]]
                total[spans[index]] += vectors[index] * self._sums(name, moving, index)
        return total

    def present(self, mask: Floats) -> Bools:
        """Return a mask of the positions with a term, zero or not, that has allowed positions only."""
        result = np.zeros(self.plan.total, bool)
        for name in self.allowed(mask):
            vectors, slots = self._vectors(name, mask), self.plan.tensors[name]
            joint = any(len(slot.axes) > 1 for slot in slots)
            for index, slot in enumerate(slots):
                terms = self._sums(name, vectors, index, np.ones(self._terms[name].shape)) if joint else 1.0
                result[slot.rows] = vectors[index] * terms > 0
        return result

    def allowed(self, mask: Floats) -> dict[str, None]:
        """Return the tensors that have terms at allowed positions only, in order."""
        return {name: None for name in self.axes if all(own.any() for own in self._vectors(name, mask))}


def _summed_squares(tensor: Tensor, axes: list[int]) -> Tensor:
    """Sum the squares of a tensor over some axes in float64, a part at a time."""
    parts = torch.split(tensor, max(_AT_ONCE // max(tensor[:1].numel(), 1), 1))
    sums = [part.to(torch.float64, copy=True).square_().sum(axes) for part in parts]
    return torch.stack(sums).sum(0) if 0 in axes else torch.cat(sums)


def _products_of_squares(tensor: Tensor, vector: Floats, rows: bool) -> Floats:
    """Multiply a matrix of squares by a vector without forming the matrix.

    Args:
        tensor: The roots of the squares. Shape (rows, columns), on the CPU.
        vector: Shape (columns,) or (rows,).
        rows: Whether the result has one entry per row, or per column.

    Returns:
        Shape (rows,) or (columns,).
    """
    factor, height = torch.from_numpy(vector), max(_AT_ONCE // max(tensor.shape[1], 1), 1)
    total = torch.zeros(tensor.shape[0 if rows else 1], dtype=torch.float64)
    for begin in range(0, len(tensor), height):
        at = slice(begin, begin + height)
        squares = tensor[at].to(torch.float64, copy=True).square_()
        if rows:
            torch.mv(squares, factor, out=total[at])
        else:
            total.addmv_(squares.mT, factor[at])
    return total.numpy()


class Sides(NamedTuple):
    """Squared norms of the incoming and outgoing weights of an orbit's units.

    Attributes:
        incoming: For the weights that a unit's scale multiplies, times the exponent. Shape (units,).
        outgoing: For the weights that it divides. Shape (units,).
        dead: Mask of units with zero weights on a side that the orbit has. Shape (units,).
    """

    incoming: Floats
    outgoing: Floats
    dead: Bools


def sides_of_units(plan: Plan, slices: Floats) -> Iterator[Sides]:
    """Yield the squared norms of the units of each orbit."""
    structure, up, down = plan.structure, plan.up @ slices, plan.down @ slices
    has_up, has_down = (np.diff(forms.indptr) > 0 for forms in (plan.up, plan.down))
    joint = joint_sums(plan, slices)
    for units, table, columns, first in zip(
        structure.orbits, structure.scale_table, structure.columns, plan.first, strict=True
    ):
        both = np.flatnonzero(has_up[table[0]] & has_down[table[0]])
        if table.shape[1] and structure.cell_of[units[0]] < 0:
            chosen = table[:, both[0] if len(both) else 0]
            incoming, outgoing = up[chosen], down[chosen]
            one_sided = not len(both)
        else:
            incoming = slices[columns[:, first]].sum(1)
            later = ~first & plan.parameter[columns[0]]
            outgoing = slices[columns[:, later]].sum(1) + joint[units]
            one_sided = not later.any() and not outgoing.any()
        dead = incoming <= NOTHING if one_sided else (incoming <= NOTHING) | (outgoing <= NOTHING)
        yield Sides(incoming, outgoing, dead)


def joint_sums(plan: Plan, slices: Floats) -> Floats:
    """Return each unit's squared norm among the input channels of grouped convolutions. Shape (units,)."""
    total = np.zeros(plan.structure.units)
    for slot in plan.slots:
        if len(slot.axes) == 2 and not slot.of_stack:
            unit = slot.unit.ravel()
            np.add.at(total, unit[unit >= 0], slices[slot.rows][unit >= 0])
    return total
