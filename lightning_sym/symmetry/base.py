"""The symmetry of a network: its group, its elements, and how they act on weights."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_sym._distributed import on_device_of
from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym.symmetry.architecture import ADVICE, Architecture, digest
from lightning_sym.symmetry.elements import AxisGroup, Element, Occurrence, Tap
from lightning_sym.symmetry.proof import batches_of, double, double_copy, largest_change, tolerance_of
from lightning_sym.symmetry.tracing.capture import copied, evaluating, state_tensors
from lightning_sym.symmetry.tracing.structure import Slot, Structure

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Action:
    """What an element does to each slot."""

    source: Ints
    scale: Floats
    moved: NDArray[np.bool_]


# By which power of a weight's scale an optimiser's state moves.
_POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "prev"), -1.0),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), -2.0),
    "acc_delta": 2.0,
}


def _powered(scale: Floats, power: float) -> Floats:
    """Raise magnitudes to a power; odd and zeroth powers keep the sign."""
    powered: Floats = np.abs(scale) ** power
    return powered if power in (2.0, -2.0) else np.sign(scale) * powered


class _Scratch:
    """Memory for what is needed only for a moment: fresh memory costs more than the work done in it."""

    def __init__(self) -> None:
        self.memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def select(self, tensor: Tensor, axis: int, source: Ints) -> Tensor:
        """Return `tensor.index_select(axis, source)`, valid until the next call."""
        key = (tensor.dtype, tensor.device)
        held = self.memory.get(key)
        if held is None or held.numel() < tensor.numel() or held.data_ptr() == tensor.data_ptr():
            held = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            self.memory[key] = held
        index = torch.from_numpy(source).to(tensor.device)
        return torch.index_select(tensor, axis, index, out=held[: tensor.numel()].view(tensor.shape))


class Symmetry:
    """The group of changes of weights and buffers that leave a network's function alone, in evaluation mode.

    Made by `trace_symmetry`. Elements are made by `identity` and `sample`, put together by `compose` and `inverse`, and
    change networks by `act`. Every network of the traced architecture may be acted on, whatever its weights.

    Attributes:
        groups: The axis groups, in the order of the forward pass.
        notes: What limits the group: unknown operations, parameters never used, and the like.
        worst_error: Largest relative change of an output that the self-test saw; NaN without a test.
        tolerance: The change that was accepted: 1e-10, or more for networks that round to a lower precision inside.
        precision: The lowest precision to which the network rounds when it is run in float64.
        elements_tried: How many random elements the self-test tried.
        examples: The inputs that were traced, as tuples of positional arguments.
    """

    def __init__(
        self,
        structure: Structure,
        network: nn.Module,
        notes: Sequence[str],
        modules: dict[str, str],
        *,
        constants: Collection[str] = (),
        examples: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        self.structure = structure
        self.notes: tuple[str, ...] = tuple(notes)
        self.worst_error = math.nan
        self.precision = torch.float64
        self.tolerance = tolerance_of(torch.float64)
        self.elements_tried = 0
        self.examples = tuple(examples)
        self.architecture = Architecture(network, constants)
        self.layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = self.architecture.layout
        self.parameter_names: frozenset[str] = frozenset(name for name, _ in network.named_parameters())
        self.fingerprint = digest(self.architecture.text, structure)
        self._proven: dict[str, float] = {}
        self._slots_of: dict[str, list[int]] = {}
        for index, slot in enumerate(structure.slots):
            self._slots_of.setdefault(slot.tensor, []).append(index)
        self._dense_cells = {tuple(cell.tolist()): index for index, cell in enumerate(structure.dense)}
        self.groups: tuple[AxisGroup, ...] = tuple(self._axis_groups(modules))

    # What there is.

    def _axis_groups(self, modules: dict[str, str]) -> Iterator[AxisGroup]:
        structure = self.structure
        starts = np.array([slot.offset for slot in structure.slots], np.int64)
        forms = structure.magnitudes
        dense = {int(unit) for cell in structure.dense for unit in cell}
        names: set[str] = set()
        for index, units in enumerate(structure.orbits):
            columns = structure.columns[index]
            slot_of = np.searchsorted(starts, columns[0], side="right") - 1 if columns.shape[1] else np.zeros(0, int)
            occurrences = []
            table = structure.scale_table[index]
            first = (
                np.asarray(forms[columns[0], table[0, 0]].todense()).ravel()
                if table.shape[1] and columns.shape[1]
                else np.zeros(columns.shape[1])
            )
            for slot_index, exponent in dict.fromkeys(zip(slot_of.tolist(), first.tolist(), strict=True)):
                slot = structure.slots[slot_index]
                at = columns[:, (slot_of == slot_index) & (first == exponent)]
                occurrences.append(
                    Occurrence(
                        slot.tensor,
                        slot.axes[0] if slot.axes else 0,
                        torch.from_numpy(np.ascontiguousarray(at - slot.offset)),
                        exponent,
                        slot.tensor in self.parameter_names,
                    )
                )
            taps = [
                Tap(modules[node], axis, torch.from_numpy(positions))
                for node, axis, positions in structure.taps[index]
                if node in modules
            ]
            # Buffers and biases are named after the same module as the weight, which comes first.
            name = occurrences[0].tensor.rpartition(".")[0] or occurrences[0].tensor
            number = 2
            base = name
            while name in names:
                name, number = f"{base} ({number})", number + 1
            names.add(name)
            yield AxisGroup(
                name=name,
                units=torch.from_numpy(units),
                cells=torch.from_numpy(structure.cells[index]),
                movable=structure.movable[index],
                dense=int(units[0]) in dense,
                scales=structure.scale_table[index].shape[1],
                signs=structure.sign_table[index].shape[1],
                occurrences=tuple(occurrences),
                taps=tuple(taps),
            )

    @property
    def units(self) -> int:
        """The number of units: what a permutation moves."""
        return self.structure.units

    @property
    def scales(self) -> int:
        """The number of free magnitudes, those inside dense cells included."""
        return int(self.structure.magnitudes.shape[1])

    @property
    def signs(self) -> int:
        """The number of free signs, those inside dense cells included."""
        return int(self.structure.signs.shape[1])

    @cached_property
    def shifts(self) -> int:
        """The number of free shifts: biases before batch norms (docs/theory/intertwiners.md, 2.3: c)."""
        return sum(size for _, size in self.structure.shifts)

    @cached_property
    def dimension(self) -> int:
        """The dimension of the group's continuous part, and of the orbit of a generic network."""
        inside = sum(len(cell) for cell in self.structure.dense)
        return self.scales - inside + sum(len(cell) ** 2 for cell in self.structure.dense) + self.shifts

    @cached_property
    def log10_permutations(self) -> float:
        """Decimal logarithm of the number of permutations (inside dense cells they are matrices, and not counted)."""
        dense = {int(unit) for cell in self.structure.dense for unit in cell}
        total = 0.0
        for units, cells, movable in zip(
            self.structure.orbits, self.structure.cells, self.structure.movable, strict=True
        ):
            if movable and int(units[0]) not in dense:
                total += sum(math.lgamma(count + 1) for count in np.bincount(cells))
        total += sum(math.lgamma(len(blocks) + 1) for blocks in self.structure.blocks)
        return total / math.log(10)

    @property
    def log_order(self) -> float:
        """Natural logarithm of the order of the group's discrete part: permutations and signs."""
        inside = sum(len(cell) for cell in self.structure.dense)
        return self.log10_permutations * math.log(10) + (self.signs - inside) * math.log(2)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per axis group: what `print(symmetry)` shows, as data."""
        rows = []
        for index, group in enumerate(self.groups):
            cells = np.bincount(self.structure.cells[index])
            count = 0.0 if group.dense or not group.movable else sum(math.lgamma(n + 1) for n in cells) / math.log(10)
            shared = np.unique(self.structure.scale_table[index])
            rows.append(
                {
                    "group": group.name,
                    "size": group.size,
                    "cells": len(cells) if group.movable else group.size,
                    "type": group.kind,
                    "parameters": [f"{o.tensor}[{o.axis}]" for o in group.occurrences],
                    "dimension": int((cells**2).sum()) if group.dense else len(shared),
                    "log10_permutations": count,
                }
            )
        return rows

    def __str__(self) -> str:
        rows = [("axis group", "size", "type", "dimension", "log10 permutations", "on the axes of")]
        for row in self.table():
            axes = row["parameters"]
            shown = ", ".join(axes[:3]) + (f" and {len(axes) - 3} more" if len(axes) > 3 else "")
            size = (
                f"{row['size']}"
                if row["cells"] in (1, row["size"])
                else f"{row['cells']} x {row['size'] // row['cells']}"
            )
            rows.append(
                (row["group"], size, row["type"], f"{row['dimension']}", f"{row['log10_permutations']:.1f}", shown)
            )
        width = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width[i]) if i in (0, 2) else cell.rjust(width[i]) for i, cell in enumerate(row[:5]))
            + "  "
            + row[5]
            for row in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        summary = (
            f"{len(self.groups)} axis groups, {self.units} units: 10^{self.log10_permutations:.1f} permutations, "
            f"{self.signs} signs, dimension {self.dimension}"
        )
        blocks = [f"blocks that change places as wholes: {len(b)} of {b.shape[1]} units" for b in self.structure.blocks]
        lower = f": it rounds to {self.precision}" if self.precision != torch.float64 else ""
        checked = (
            []
            if math.isnan(self.worst_error)
            else [
                f"checked with {self.elements_tried} random elements: {self.worst_error:.1e} (tolerance "
                f"{self.tolerance:.1e}{lower})"
            ]
        )
        return "\n".join([*lines, summary, *blocks, *checked, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"<Symmetry: {len(self.groups)} axis groups, {self.units} units, dimension {self.dimension}>"

    # Elements.

    def identity(self) -> Element:
        """Return the element that changes nothing."""
        return Element(
            self.fingerprint,
            torch.arange(self.units),
            torch.zeros(self.scales, dtype=torch.float64),
            torch.ones(self.signs, dtype=torch.float64),
            tuple(torch.eye(len(cell), dtype=torch.float64) for cell in self.structure.dense),
            tuple(torch.zeros(size, dtype=torch.float64) for _, size in self.structure.shifts),
        )

    def sample(
        self,
        generator: torch.Generator | None = None,
        *,
        scale: float = 0.5,
        permutations: bool = True,
        signs: bool = True,
        mixing: bool = True,
        shifts: bool = True,
    ) -> Element:
        """Draw a random element.

        Args:
            generator: Where randomness comes from.
            scale: Standard deviation of the magnitudes' logarithms (natural), and of the shifts; also of the
                logarithms of a dense matrix's singular values. 0 leaves all magnitudes alone.
            permutations: Whether units change places; uniform over all permutations of each cell and of the blocks.
            signs: Whether signs are drawn.
            mixing: Whether dense cells get random matrices.
            shifts: Whether biases before batch norms are shifted.

        Raises:
            TypeError: If `generator` is something else.
            ValueError: If `scale` is negative or not finite.
        """
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"scale must be a finite number >= 0, got {scale}")
        structure = self.structure
        inside = np.zeros(self.units, bool)
        for cell in structure.dense:
            inside[cell] = True
        permutation = self._random_permutation(generator) if permutations else np.arange(self.units)
        log_scale = torch.randn(self.scales, dtype=torch.float64, generator=generator) * scale
        sign = torch.ones(self.signs, dtype=torch.float64)
        if signs:
            sign = torch.randint(0, 2, (self.signs,), generator=generator).double() * 2 - 1
        dense = []
        for _index, cell in enumerate(structure.dense):
            size = len(cell)
            matrix = torch.eye(size, dtype=torch.float64)
            if mixing:
                left, right = (random_orthogonal(size, generator) for _ in range(2))
                matrix = (left * (scale * torch.randn(size, dtype=torch.float64, generator=generator)).exp()) @ right
            dense.append(matrix)
        # Inside dense cells, the matrices do it all.
        for table, numbers, neutral in ((structure.scale_table, log_scale, 0.0), (structure.sign_table, sign, 1.0)):
            for units, own in zip(structure.orbits, table, strict=True):
                if inside[units[0]]:
                    numbers[torch.from_numpy(own.ravel())] = neutral
        shift = tuple(
            torch.randn(size, dtype=torch.float64, generator=generator) * (scale if shifts else 0.0)
            for _, size in structure.shifts
        )
        return Element(self.fingerprint, torch.from_numpy(permutation), log_scale, sign, tuple(dense), shift)

    def _random_permutation(self, generator: torch.Generator | None, *, cycles: bool = False) -> Ints:
        """Draw a permutation of all units, uniform; or one that moves all units that can move: a cycle of each cell."""
        structure = self.structure
        permutation = np.arange(self.units)
        dense = {int(cell[0]) for cell in structure.dense}
        for units, cells, movable in zip(structure.orbits, structure.cells, structure.movable, strict=True):
            if not movable or int(units[0]) in dense:
                continue
            draw = torch.rand(len(units), dtype=torch.float64, generator=generator).numpy()
            # Sorting by (cell, random) permutes within cells.
            shuffled = units[np.lexsort((draw, cells))]
            if cycles:
                after = np.r_[1 : len(units), 0]
                begins = np.flatnonzero(np.r_[True, np.diff(np.sort(cells)) != 0])
                after[np.r_[begins[1:] - 1, len(units) - 1]] = begins
                permutation[shuffled] = shuffled[after]
            else:
                permutation[units[np.lexsort((np.arange(len(units)), cells))]] = shuffled
        for blocks in structure.blocks:
            order = torch.randperm(len(blocks), generator=generator).numpy()
            within = permutation.copy()
            if cycles:
                permutation[blocks[order]] = within[blocks[np.roll(order, 1)]]
            else:
                permutation[blocks] = within[blocks[order]]
        return permutation

    def _own(self, *elements: Element) -> None:
        for element in elements:
            if not isinstance(element, Element):
                raise TypeError(f"expected an element of this symmetry, got {type(element).__name__}")
            if (
                element.group != self.fingerprint
                or len(element.permutation) != self.units
                or len(element.log_scale) != self.scales
                or len(element.sign) != self.signs
            ):
                raise ValueError(
                    "the element belongs to the symmetry of another network; expected one made by this symmetry's "
                    "identity() or sample()"
                )

    def _pulled(self, numbers: Tensor, tables: tuple[Ints, ...], permutation: Ints) -> Tensor:
        """Rename generators of the permuted network to those of the network before: what unit p[j] has, j had."""
        result = numbers.clone()
        local = self._local
        for units, table in zip(self.structure.orbits, tables, strict=True):
            if table.shape[1]:
                old = table[local[permutation[units]]]
                result[torch.from_numpy(old)] = numbers[torch.from_numpy(table)]
        return result

    @cached_property
    def _local(self) -> Ints:
        """For each unit, its place in its orbit."""
        local = np.zeros(self.units, np.int64)
        for units in self.structure.orbits:
            local[units] = np.arange(len(units))
        return local

    def compose(self, second: Element, first: Element) -> Element:
        """Return the element that acts as `first` and then `second`.

        Raises:
            ValueError: If one belongs to another network's symmetry.
        """
        self._own(second, first)
        permutation = first.permutation.numpy()
        dense = []
        for index, cell in enumerate(self.structure.dense):
            dense.append(second.dense[self._cell_after(cell, permutation)] @ first.dense[index])
        shift = []
        action = self._action(second)
        source = self._action(first).source
        for index, (places, size) in enumerate(self.structure.shifts):
            slot = self.structure.slots[places[-1]]
            at = slice(slot.offset, slot.offset + size)
            old = torch.from_numpy(source[at] - slot.offset)
            later = torch.zeros(size, dtype=torch.float64)
            later[old] = torch.from_numpy(action.scale[at]) * first.shift[index][old] + second.shift[index]
            shift.append(later)
        return Element(
            self.fingerprint,
            first.permutation[second.permutation],
            first.log_scale + self._pulled(second.log_scale, self.structure.scale_table, permutation),
            first.sign * self._pulled(second.sign, self.structure.sign_table, permutation),
            tuple(dense),
            tuple(shift),
        )

    def _cell_after(self, cell: Ints, permutation: Ints) -> int:
        """Return the dense cell in whose place the given one stands after a permutation."""
        inverse = np.argsort(permutation)
        return self._dense_cells[tuple(inverse[cell].tolist())]

    def inverse(self, element: Element) -> Element:
        """Return the element that undoes another one."""
        self._own(element)
        inverse = torch.argsort(element.permutation)
        back = inverse.numpy()
        dense: list[Tensor] = [torch.empty(0)] * len(element.dense)
        for index, cell in enumerate(self.structure.dense):
            dense[self._cell_after(cell, element.permutation.numpy())] = torch.linalg.inv(element.dense[index])
        action = self._action(element)
        shift = []
        for index, (places, size) in enumerate(self.structure.shifts):
            slot = self.structure.slots[places[-1]]
            at = slice(slot.offset, slot.offset + size)
            old = torch.from_numpy(action.source[at] - slot.offset)
            shift.append((-element.shift[index] / torch.from_numpy(action.scale[at]))[old])
        return Element(
            self.fingerprint,
            inverse,
            -self._pulled(element.log_scale, self.structure.scale_table, back),
            self._pulled(element.sign, self.structure.sign_table, back),
            tuple(dense),
            tuple(shift),
        )

    # Action.

    def _action(self, element: Element) -> _Action:
        structure = self.structure
        total = structure.magnitudes.shape[0]
        scale = np.exp(structure.magnitudes @ element.log_scale.numpy())
        if structure.signs.shape[1]:
            flips = structure.signs @ (element.sign.numpy() < 0).astype(np.float64)
            scale = np.where(np.mod(np.rint(flips), 2) == 1, -scale, scale)
        source = np.arange(total)
        permutation = element.permutation.numpy()
        local = self._local
        for units, columns in zip(structure.orbits, structure.columns, strict=True):
            new = permutation[units]
            if not np.array_equal(new, units):
                source[columns] = columns[local[new]]
        return _Action(source, scale, source != np.arange(total))

    def act(
        self,
        element: Element,
        network: nn.Module,
        *,
        inplace: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        """Change a network's weights and buffers by an element; its function in evaluation mode stays the same.

        Running variances move by v' = s^2 (v + eps) - eps, which keeps evaluation mode exact. In training mode, batch
        norm divides by the batch's own variance, so a scale s in front of it changes the output by O(eps / v); all else
        is exact there, too.

        Args:
            element: From this symmetry.
            network: Any network of the traced architecture. Not changed unless `inplace`.
            inplace: Whether to change the network itself.
            optimizer: The network's optimiser, whose state is carried along in place (momenta move by the inverse
                scale, as gradients do; second moments by its square); needs `inplace`.

        Returns:
            The changed network.

        Raises:
            ValueError: If the element or the network does not belong to this symmetry, or an optimiser is given without
                `inplace` or holds state that cannot be carried along.
        """
        self._own(element)
        self.require(network)
        return self._act(element, network, inplace=inplace, optimizer=optimizer)

    def _act(
        self,
        element: Element,
        network: nn.Module,
        *,
        inplace: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        """Change a network's weights and buffers, whatever its function."""
        if optimizer is not None and not inplace:
            raise ValueError("an optimiser's state can be carried along only with inplace=True")
        action = self._action(element)
        old = state_tensors(network)
        scratch = _Scratch()
        with torch.no_grad():
            added = self._added(old, action)
            if inplace:
                if optimizer is not None:
                    self._carry(optimizer, old, element, action)
                for name in self._slots_of:
                    old[name].copy_(
                        self._moved(old[name], name, element, action, scratch=scratch, added=added.get(name))
                    )
                return network
            # The copy gets its new tensors at once, instead of copies of the old ones.
            made: dict[int, Any] = {}
            for name in self._slots_of:
                tensor = self._moved(old[name], name, element, action, scratch=scratch, added=added.get(name))
                if type(old[name]) is nn.Parameter:
                    tensor = nn.Parameter(tensor, requires_grad=old[name].requires_grad)
                made[id(old[name])] = tensor
        return copied(network, made)

    def act_on(self, element: Element, tensors: Mapping[str, Tensor], *, shifts: bool = True) -> dict[str, Tensor]:
        """Return what becomes of some parameters or buffers, by name; nothing is checked and nothing is changed.

        Args:
            element: From this symmetry.
            tensors: Parameters or buffers, by name. What a bias takes up of signs is added if its weight is among them.
            shifts: Whether to shift biases in front of batch norms, and running means.
        """
        action, scratch = self._action(element), _Scratch()
        added = self._added(tensors, action)
        return {
            name: self._moved(tensor, name, element, action, scratch=scratch, shifted=shifts, added=added.get(name))
            if name in self._slots_of
            else tensor
            for name, tensor in tensors.items()
        }

    def require(self, network: nn.Module) -> None:
        """Check that a network's function differs from the traced one's by its weights only, as far as can be seen.

        Compared are the names and shapes of tensors, the classes of modules and what they say of themselves
        (`extra_repr`), and by value the buffers that evaluation reads and no element moves: integers, masks, and
        buffers that are in no state dict. If other attributes of modules differ (a number of heads, a configuration, a
        tensor that is no buffer), or hooks, or classes of modules that hold others, random elements decide, as in
        `check`. What is nowhere to be seen (a number in a helper that `forward` calls) is not compared:
        `check(network)` tells.

        Raises:
            TypeError: If it is no network.
            ValueError: If something differs.
        """
        self.architecture.require(network)
        other = self.architecture.other_settings(network)
        if not other or not self.examples:
            return
        key = repr(sorted(other.items(), key=lambda item: item[0]))
        if key not in self._proven:
            self._proven[key] = math.inf  # until it is proven
            with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):  # it may not even run
                self._proven[key] = self.check(network, samples=2, perturb=0.3)
        if not self._proven[key] <= self.tolerance:
            name, value = next(iter(other.items()))
            raise ValueError(
                f"{name.lstrip('.')} is {value!r} there; expected {self.architecture.settings.get(name)!r}, as in the "
                f"traced network, whose elements change the function of this one: {ADVICE}"
            )

    def _moved(
        self,
        tensor: Tensor,
        name: str,
        element: Element,
        action: _Action,
        *,
        scratch: "_Scratch",
        power: float = 1.0,
        shifted: bool = True,
        added: Tensor | None = None,
    ) -> Tensor:
        """Return what becomes of one tensor (of weights; of their gradients with power -1, of squares with -2)."""
        slots = [self.structure.slots[index] for index in self._slots_of[name]]
        result = tensor.detach()
        if added is not None:
            result = result + added
        for slot in slots:
            if slot.offset in self._dense_places:
                result = self._mixed(result, slot, element)
        joint = next((slot for slot in slots if len(slot.axes) == 2), None)
        if joint is not None:
            scale = _powered(action.scale[joint.offset : joint.offset + joint.size], power)
            result = self._moved_jointly(result * self._on_axis(torch.from_numpy(scale), joint, result), joint, action)
        else:
            moves = [
                (slot.axes[0], action.source[slot.offset : slot.offset + slot.size] - slot.offset)
                for slot in slots
                if slot.axes and action.moved[slot.offset : slot.offset + slot.size].any()
            ]
            for axis, source in moves[:-1]:
                result = scratch.select(result, axis, source)
            if moves:
                axis, source = moves[-1]
                result = result.index_select(axis, torch.from_numpy(source).to(result.device))
        if result.data_ptr() == tensor.data_ptr():
            result = result.clone()
        for slot in slots:
            if slot is joint:
                continue
            at = slice(slot.offset, slot.offset + slot.size)
            scale = action.scale[action.source[at]]
            if slot.kind == "variance" and shifted:
                square = self._on_axis(torch.from_numpy(scale**2), slot, result)
                result.add_(slot.epsilon).mul_(square).sub_(slot.epsilon)
            elif not np.all(scale == 1):
                result.mul_(self._on_axis(torch.from_numpy(_powered(scale, power)), slot, result))
        if shifted and self.structure.shifts:
            for index in self._shifts_of.get(name, ()):
                places = self.structure.shifts[index][0]
                slot = next(s for s in map(self.structure.slots.__getitem__, places) if s.tensor == name)
                source = action.source[slot.offset : slot.offset + slot.size] - slot.offset
                result.add_(element.shift[index][torch.from_numpy(source)].to(result))
        return result

    def _added(self, tensors: Mapping[str, Tensor], action: _Action) -> dict[str, Tensor]:
        """Return what biases take up of signs: as sigma(-x) = offset - sigma(x), the unit's column times the offset."""
        added: dict[str, Tensor] = {}
        for bias, weight, axis, offset in self.structure.absorbed:
            slot = next((s for s in self.structure.slots if s.tensor == weight and s.axes == (axis,)), None)
            if slot is None or weight not in tensors:
                continue
            flipped = torch.from_numpy(action.scale[slot.offset : slot.offset + slot.size] < 0)
            if flipped.any():
                columns = tensors[weight].detach()
                columns = columns.flatten(2).sum(2) if columns.ndim > 2 else columns
                added[bias] = offset * columns[:, flipped.to(columns.device)].sum(1)
        return added

    @cached_property
    def _shifts_of(self) -> dict[str, list[int]]:
        """By tensor: which shifts are added to it."""
        found: dict[str, list[int]] = {}
        for index, (places, _) in enumerate(self.structure.shifts):
            for slot in places:
                found.setdefault(self.structure.slots[slot].tensor, []).append(index)
        return found

    @staticmethod
    def _on_axis(vector: Tensor, slot: Slot, tensor: Tensor) -> Tensor:
        shape = [1] * tensor.ndim
        for axis, size in zip(slot.axes, slot.shape, strict=True):
            shape[axis] = size
        return vector.reshape(shape).to(tensor)

    def _moved_jointly(self, tensor: Tensor, joint: Slot, action: _Action) -> Tensor:
        """Move the weight of a grouped convolution: which channel the second axis means depends on the first."""
        rows = next(
            self.structure.slots[i] for i in self._slots_of[joint.tensor] if self.structure.slots[i].axes == (0,)
        )
        at = slice(rows.offset, rows.offset + rows.size)
        row = action.source[at] - rows.offset
        unit = joint.unit
        # Channels on which nothing acts (-1) stay in the order in which they are.
        wanted = np.where(unit < 0, -1, self._permutation_of(action)[unit])
        # In row r of the new weight stands row[r] of the old one, in which the wanted units have to be found.
        held = unit[row]
        if held.shape[1] == 1:
            column = np.zeros_like(held)
        else:
            order = np.argsort(held, axis=1, kind="stable")
            rank = np.argsort(np.argsort(wanted, axis=1, kind="stable"), axis=1)
            column = np.take_along_axis(order, rank, axis=1)
        return tensor[torch.from_numpy(row)[:, None].to(tensor.device), torch.from_numpy(column).to(tensor.device)]

    def _permutation_of(self, action: _Action) -> Ints:
        unit_at = np.full(len(action.source), -1)
        for slot in self.structure.slots:
            if len(slot.axes) < 2:
                unit_at[slot.offset : slot.offset + slot.size] = slot.unit.ravel()
        permutation = np.arange(self.units)
        for units, columns in zip(self.structure.orbits, self.structure.columns, strict=True):
            permutation[units] = unit_at[action.source[columns[:, 0]]]
        return permutation

    def _mixed(self, tensor: Tensor, slot: Slot, element: Element) -> Tensor:
        """Let dense matrices act on one axis: A where units are put out, its inverse transposed where they are read."""
        for cells, positions, read in self._dense_places.get(slot.offset, ()):
            matrices = torch.stack([element.dense[cell] for cell in cells])
            matrices = (torch.linalg.inv(matrices).mT if read else matrices).to(tensor)
            moved = tensor.movedim(slot.axes[0], 0).clone(memory_format=torch.contiguous_format)
            for at in positions:  # (cells, size)
                index = torch.from_numpy(at.ravel()).to(tensor.device)
                old = moved.index_select(0, index).reshape(*at.shape, -1)
                moved.index_copy_(0, index, torch.bmm(matrices, old).reshape(len(index), *moved.shape[1:]))
            tensor = moved.movedim(0, slot.axes[0])
        return tensor

    @cached_property
    def _dense_places(self) -> dict[int, list[tuple[list[int], list[Ints], bool]]]:
        """By slot: which dense cells of one size stand there, where, and whether they are read (or put out)."""
        structure = self.structure
        found: dict[tuple[int, bool, int, int], list[tuple[int, Ints]]] = {}
        starts = np.array([slot.offset for slot in structure.slots], np.int64)
        type_of = {int(unit): index for index, units in enumerate(structure.orbits) for unit in units}
        for cell_index, cell in enumerate(structure.dense):
            own_type = type_of[int(cell[0])]
            columns = structure.columns[own_type][self._local[cell]]
            slot_of = np.searchsorted(starts, columns[0], side="right") - 1
            exponent = structure.magnitudes.data[structure.magnitudes.indptr[columns[0]]]
            for slot_index, read in dict.fromkeys(zip(slot_of.tolist(), (exponent < 0).tolist(), strict=True)):
                offset = structure.slots[slot_index].offset
                at = columns[:, (slot_of == slot_index) & ((exponent < 0) == read)] - offset
                found.setdefault((offset, read, own_type, len(cell)), []).append((cell_index, at))
        places: dict[int, list[tuple[list[int], list[Ints], bool]]] = {}
        for (offset, read, _, _), members in found.items():
            positions = np.stack([at for _, at in members])  # (cells, size, columns)
            cells = [cell for cell, _ in members]
            places.setdefault(offset, []).append((cells, list(np.moveaxis(positions, 2, 0)), read))
        return places

    def _carry(
        self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], element: Element, action: _Action
    ) -> None:
        """Move an optimiser's state: gradients by the inverse scale, their squares by its square, steps as weights."""
        names = {tensor: name for name, tensor in tensors.items()}
        mixes = any(not torch.equal(m, torch.eye(len(m), dtype=m.dtype)) for m in element.dense)
        moved: list[tuple[Tensor, Tensor]] = []
        for group in optimizer.param_groups:
            powers = dict(_POWERS)
            if isinstance(optimizer, torch.optim.RMSprop):
                powers["momentum_buffer"] = 0.0  # of gradients over their size
            for parameter in group["params"]:
                name = names.get(parameter)
                state = optimizer.state.get(parameter, {})
                if name not in self._slots_of or not state:
                    continue
                if mixes and any(self.structure.slots[i].offset in self._dense_places for i in self._slots_of[name]):
                    raise ValueError(
                        f"{name} is mixed by a dense matrix, under which second moments have no image; expected an "
                        "element with mixing=False"
                    )
                for key, value in state.items():
                    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.ndim == 0:
                        continue
                    if key not in powers:
                        raise ValueError(
                            f"the optimiser's state {key!r} cannot be carried; expected one of {', '.join(powers)}"
                        )
                    new = self._moved(
                        value, name, element, action, scratch=_Scratch(), power=powers[key], shifted=False
                    )
                    moved.append((value, new))
        for value, new in moved:  # only now, so that an error leaves everything as it was
            value.copy_(new)

    def check(
        self,
        network: nn.Module,
        inputs: Any = None,
        *,
        samples: int = 1,
        scale: float = 0.5,
        generator: torch.Generator | None = None,
        perturb: float = 0.0,
    ) -> float:
        """Let random elements act on a copy of a network, in float64 and evaluation mode, and compare the outputs.

        The changed weights go through a state dict into another copy. This is the way to see whether an element is a
        symmetry of a network whose difference from the traced one cannot be seen from outside (a number written into
        `forward`): the result is then far above `tolerance`.

        Args:
            network: A network of the traced architecture.
            inputs: Its input, or a tuple of its positional arguments, on any device; by default the traced examples and
                inputs with noise around them.
            samples: How many elements are tried.
            scale: Standard deviation of the logarithms of their magnitudes.
            generator: Where randomness comes from; by default the same elements every time.
            perturb: How much noise is added to the copy's weights and statistics before each element, relative to
                their root mean square. The self-test of `trace_symmetry` adds some, so that weights that happen to be
                zero, or statistics that have not been trained, cannot hide a mistake.

        Returns:
            The largest change of an output's element, relative to its own magnitude and the median one of that output.

        Raises:
            TypeError: If it is no network.
            ValueError: If it has other tensors or modules, or puts out no finite number.
        """
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        self.architecture.require_tensors(network)
        exact = double_copy(network)
        if inputs is not None:
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            examples: tuple[tuple[Any, ...], ...] = (given,)
        else:
            examples = self.examples
        examples = on_device_of(exact, double(examples))
        with torch.no_grad(), evaluating(exact):
            batches = list(examples)
            if inputs is None:
                batches = [batch for example in examples for batch in batches_of(exact, example, generator)]
            found, _ = largest_change(
                self, exact, [batches], samples=samples, scale=scale, generator=generator, noise=(perturb,)
            )
            return found
