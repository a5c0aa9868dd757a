"""Sums of squares of a network's weights, unit by unit, under any scales."""

import math
from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.tracing.structure import Slot

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

# Sums of squares below are zero: their logarithms mean nothing.
NOTHING = 1e-280


class Plan:
    """What of a structure does not depend on weights, laid out for sums over slices.

    Attributes:
        tensors: Per parameter with labelled axes: its name and its slots, those with two axes last.
        row_of: For each position the number of its row: positions, those of one module's tensors counted as the same.
        forms: Exponents (positions, scales); `up` and `down`: their positive and negative parts, transposed.
        classes: Scales that play the same role for the units of one type, in the order of the forward pass.
        class_of: For each scale its class; -1 for scales within dense cells, which nothing here touches.
        touching: For each class, the tensors on which it acts.
        first: For each type, for each column, whether it belongs to the first module that touches the units.
        parameter: For each position, whether it belongs to a parameter (and to no bias that a shift sets to zero).
    """

    def __init__(self, symmetry: Symmetry) -> None:
        structure = symmetry.structure
        self.slots = structure.slots
        self.forms = structure.magnitudes
        total, scales = self.forms.shape
        self.total = total
        self.slot_of = np.zeros(total, np.int64)
        self.unit_at = np.full(total, -1)
        for index, slot in enumerate(structure.slots):
            self.slot_of[slot.offset : slot.offset + slot.size] = index
            self.unit_at[slot.offset : slot.offset + slot.size] = slot.unit.ravel()
        shifted = {structure.slots[place].tensor for places, _ in structure.shifts for place in places}
        self.parameter = np.zeros(total, bool)
        by_name: dict[str, list[Slot]] = {}
        for slot in structure.slots:
            acts = self.forms.indptr[slot.offset] < self.forms.indptr[slot.offset + slot.size]
            if slot.tensor in symmetry.parameter_names and slot.axes and (acts or (slot.unit >= 0).any()):
                by_name.setdefault(slot.tensor, []).append(slot)
                self.parameter[slot.offset : slot.offset + slot.size] = slot.tensor not in shifted
        self.tensors = {name: sorted(slots, key=lambda slot: len(slot.axes)) for name, slots in by_name.items()}
        positive = self.forms.maximum(0)
        negative = (-self.forms).maximum(0)
        self.up, self.down = positive.T.tocsr(), negative.T.tocsr()
        self.up_used, self.down_used = (self.up > 0).astype(np.float64), (self.down > 0).astype(np.float64)
        self.used = (abs(self.forms) > 0).astype(np.float64)
        self.used_at = np.repeat(np.arange(total), np.diff(self.forms.indptr))
        # Rows: positions, those of one module's tensors (weight, bias) counted as the same.
        longest: dict[str, int] = {}
        for slot in structure.slots:
            prefix = slot.tensor.rpartition(".")[0]
            longest[prefix] = max(longest.get(prefix, 0), slot.size)
        begin = dict(zip(longest, np.cumsum([0, *longest.values()]).tolist(), strict=False))
        self.rows = sum(longest.values())
        self.row_of = np.zeros(total, np.int64)
        for slot in structure.slots:
            self.row_of[slot.offset : slot.offset + slot.size] = begin[slot.tensor.rpartition(".")[0]] + np.arange(
                slot.size
            )
        self.largest = np.zeros(scales)
        np.maximum.at(self.largest, self.forms.indices, abs(self.forms.data))

        dense = {int(unit) for cell in structure.dense for unit in cell}
        self.class_of = np.full(scales, -2)
        classes = []
        for units, table in zip(structure.orbits, structure.scale_table, strict=True):
            for column in table.T:
                if int(units[0]) in dense:
                    self.class_of[column] = -1
                    continue
                members = np.unique(column[self.class_of[column] == -2])
                if len(members):
                    self.class_of[members] = -3
                    classes.append(members)
        classes += [np.array([scale]) for scale in np.flatnonzero(self.class_of == -2)]
        columns = self.forms.tocsc()
        columns.sort_indices()
        classes.sort(key=lambda members: int(columns.indices[columns.indptr[members[0]]]))
        self.classes = classes
        for index, members in enumerate(classes):
            self.class_of[members] = index
        self.touching: list[list[str]] = [[] for _ in classes]
        for name, slots in self.tensors.items():
            own = np.unique(
                np.concatenate([self.class_of[self.forms[s.offset : s.offset + s.size].indices] for s in slots])
            )
            for index in own[own >= 0]:
                self.touching[index].append(name)
        self.first = []
        for matrix in structure.columns:
            names = [structure.slots[i].tensor for i in self.slot_of[matrix[0]]]
            prefix = names[0].rpartition(".")[0] if names else ""
            own_module = [
                name.rpartition(".")[0] == prefix and self.parameter[p]
                for name, p in zip(names, matrix[0], strict=True)
            ]
            self.first.append(np.array(own_module, bool))

    @staticmethod
    def at(slot: Slot) -> slice:
        """Return where a slot's positions are."""
        return slice(slot.offset, slot.offset + slot.size)


_PLANS: WeakKeyDictionary[Symmetry, Plan] = WeakKeyDictionary()


def plan_of(symmetry: Symmetry) -> Plan:
    """Return a symmetry's plan, made at the first call."""
    if symmetry not in _PLANS:
        _PLANS[symmetry] = Plan(symmetry)
    return _PLANS[symmetry]


class Squares:
    """Sums of squares of a network's weights by position, under any scales.

    A term is a square q, summed over the axes without units; scales l turn it into q exp(2 a.l), where a adds the
    exponents at its positions on all axes. The sum of all terms is the squared norm of the network.
    """

    def __init__(self, plan: Plan, tensors: dict[str, Tensor]) -> None:
        self.plan = plan
        self.squares: dict[str, Floats] = {}
        self.axes: dict[str, list[tuple[int, ...]]] = {}
        for name, slots in plan.tensors.items():
            tensor = tensors[name].detach()
            axes = sorted({axis for slot in slots for axis in slot.axes})
            rest = [axis for axis in range(tensor.ndim) if axis not in axes]
            if math.prod(tensor.shape[axis] for axis in rest) == 1:
                square = tensor.double().square_() if tensor.dtype != torch.float64 else tensor.square()
                square = square.reshape([tensor.shape[axis] for axis in axes])
            else:
                square = torch.linalg.vector_norm(tensor, dim=rest, dtype=torch.float64).square_()
            place = {axis: index for index, axis in enumerate(axes)}
            self.squares[name] = square.cpu().numpy()
            self.axes[name] = [tuple(place[axis] for axis in slot.axes) for slot in slots]

    def slices(self, factor: Floats, names: Sequence[str] | None = None, wanted: Bools | None = None) -> Floats:
        """Return the sum of the terms at each position; factor: what each position multiplies its terms by.

        Only for the slots of the named tensors that hold a wanted position; 0 elsewhere, or more than asked for.
        """
        total = np.zeros(self.plan.total)
        for name in self.squares if names is None else names:
            square, slots, axes = self.squares[name], self.plan.tensors[name], self.axes[name]
            own = [factor[Plan.at(slot)] for slot in slots]
            if len(slots) == 1 and len(axes[0]) == square.ndim:
                total[Plan.at(slots[0])] = square.ravel() * own[0]
            elif len(slots) == 2 and square.ndim == 2 and len(axes[1]) == 1:
                for slot, here, there, matrix in zip(slots, own, own[::-1], (square, square.T), strict=True):
                    if wanted is None or wanted[Plan.at(slot)].any():
                        total[Plan.at(slot)] = here * (matrix @ there)
            else:
                self._add(total, name, self._scaled(name, factor))
        return total

    def energy(self, factor: Floats, names: Sequence[str]) -> float:
        """Return the sum of all terms of the named tensors."""
        return math.fsum(self._energy_of(name, factor) for name in names)

    def _energy_of(self, name: str, factor: Floats) -> float:
        square, slots, axes = self.squares[name], self.plan.tensors[name], self.axes[name]
        if len(slots) == 2 and square.ndim == 2 and len(axes[1]) == 1:
            return float(factor[Plan.at(slots[0])] @ (square @ factor[Plan.at(slots[1])]))
        return float(self._scaled(name, factor).sum())

    def _spread(self, name: str, values: Floats, index: int) -> Floats:
        """Return one value per position of a tensor's slot, in the shape of its squares."""
        slot, axes = self.plan.tensors[name][index], self.axes[name][index]
        shape = [1] * self.squares[name].ndim
        for axis, size in zip(axes, slot.shape, strict=True):
            shape[axis] = size
        return values[Plan.at(slot)].reshape(shape)

    def _scaled(self, name: str, factor: Floats) -> Floats:
        """Return a tensor's terms."""
        result = self.squares[name]
        for index in range(len(self.plan.tensors[name])):
            result = result * self._spread(name, factor, index)
        return result

    def _add(self, total: Floats, name: str, terms: Floats) -> None:
        """Put the sums of a tensor's terms into the total at its positions."""
        for slot, axes in zip(self.plan.tensors[name], self.axes[name], strict=True):
            others = tuple(axis for axis in range(terms.ndim) if axis not in axes)
            total[Plan.at(slot)] = terms.sum(others).ravel()

    def change(self, factor: Floats, slices: Floats, speed: Floats, names: Sequence[str]) -> Floats:
        """Return how the slices change when the logarithm of each position's factor changes by `speed`.

        Args:
            factor: What each position multiplies its terms by. Shape (positions,).
            slices: The slices at that factor. Shape (positions,).
            speed: Shape (positions,).
            names: The tensors that count.
        """
        total = slices * speed
        moving = factor * speed
        for name in names:
            square, slots, axes = self.squares[name], self.plan.tensors[name], self.axes[name]
            if len(slots) == 1 and len(axes[0]) == square.ndim:
                continue
            if len(slots) == 2 and square.ndim == 2 and len(axes[1]) == 1:
                one, two = Plan.at(slots[0]), Plan.at(slots[1])
                total[one] += factor[one] * (square @ moving[two])
                total[two] += factor[two] * (moving[one] @ square)
            else:
                rate = sum(self._spread(name, speed, index) for index in range(len(slots)))
                self._add(total, name, self._scaled(name, factor) * rate)
        return total

    def present(self, mask: Floats) -> Bools:
        """Return for each position whether it has a term (whatever its value) all of whose positions are allowed."""
        result = np.zeros(self.plan.total, bool)
        for name, square in self.squares.items():
            slots = self.plan.tensors[name]
            if any(len(slot.axes) > 1 for slot in slots):
                allowed = np.ones(square.shape)
                for index in range(len(slots)):
                    allowed = allowed * self._spread(name, mask, index)
                total = np.zeros(self.plan.total)
                self._add(total, name, allowed)
                result |= total > 0
            elif all(mask[Plan.at(slot)].any() for slot in slots):
                for slot in slots:
                    result[Plan.at(slot)] = mask[Plan.at(slot)] > 0
        return result

    def allowed(self, mask: Floats) -> list[str]:
        """Return the tensors that have terms all of whose positions are allowed."""
        return [name for name in self.squares if all(mask[Plan.at(slot)].any() for slot in self.plan.tensors[name])]


def joint_sums(symmetry: Symmetry, plan: Plan, slices: Floats) -> Floats:
    """Return for each unit the sum over positions of grouped convolutions' inputs. Shape (units,)."""
    total = np.zeros(symmetry.units)
    for slot in plan.slots:
        if len(slot.axes) == 2:
            unit = slot.unit.ravel()
            np.add.at(total, unit[unit >= 0], slices[plan.at(slot)][unit >= 0])
    return total
