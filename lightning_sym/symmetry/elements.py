"""Axis groups, their occurrences in tensors, and the hook points that show them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.intertwiners import IntertwinerGroup
from lightning_sym.symmetry.solving.rotations import Rotation
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.affine.parts import Shown
from lightning_sym.symmetry.tracing.graph.capture import Mark
from lightning_sym.symmetry.tracing.labelling.gained import GainedCell
from lightning_sym.symmetry.tracing.labelling.values import InFront, Value


@dataclass(frozen=True, eq=False)
class Tap:
    """A hook point: a value inside the network that elements act on.

    Attributes:
        name: Name of the module that returns it, with ``-2``, ``-3``, ... for its later calls. Values that cross a cut
            have the names ``site/0``, ``site/1``, ...
        shape: Its shape for the traced example, batch included.
        group: The group that acts on its channels.
        seen: For each axis, or several axes together, that indexes units: the units at its positions.
        module: Name of the module that returns it; empty at a cut.
        call: Index of the module's call, from 0.
        offset: The constant added where a unit changes sign, see :class:`IntertwinerGroup`.
        shown: The effect of translations on it.
        squared: Whether it holds squares; rotations of the units do not act on these.
        in_front: The effect on it of half turns of a bias before a sine; None if there is none.
    """

    name: str
    shape: tuple[int, ...]
    group: IntertwinerGroup
    seen: tuple[Slot, ...]
    module: str = ""
    call: int = 0
    offset: float = 0.0
    shown: Shown = field(default_factory=Shown)
    squared: bool = False
    in_front: InFront | None = None

    @property
    def axis(self) -> int | None:
        """The axis of the channels: the last one that indexes units by itself; None if there is none."""
        return max((slot.axes[0] for slot in self.seen if len(slot.axes) == 1), default=None)

    def positions(self, units: Tensor) -> tuple[int, Tensor] | None:
        """Return the positions of units on one axis that shows each of them exactly once.

        Args:
            units: Indices of the units, ascending. Shape (size,), int64.

        Returns:
            The axis and the position of each unit there; None if no axis shows them in this way.
        """
        for slot in self.seen:
            at = np.flatnonzero(np.isin(slot.unit, units))
            if len(slot.axes) == 1 and np.array_equal(np.sort(slot.unit[at]), units):
                return slot.axes[0], torch.from_numpy(at[np.argsort(slot.unit[at])])
        return None


@dataclass(frozen=True)
class Occurrence:
    """Positions of the units of an axis group in one tensor.

    Attributes:
        tensor: The name of the parameter or buffer.
        axis: Its axis.
        positions: The positions of each unit on that axis (several after flattening an image). Shape
            (size, positions per unit), int64.
        exponent: Exponent of the unit's first scale here: 1 on incoming weights, -1 on outgoing weights, 0 where it
            does not act.
        is_parameter: False for buffers.
        further: A second axis, where the units of a stack's members (experts) index two. Positions are then those of
            both axes together, in row-major order.
    """

    tensor: str
    axis: int
    positions: Tensor
    exponent: float
    is_parameter: bool
    further: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes."""
        return (self.axis, *self.further)


@dataclass(frozen=True)
class AxisGroup:
    """Units that one group element moves together, and the tensor axes that they index.

    Attributes:
        name: Name of the first module or tensor that holds the units.
        units: Indices of the units. Shape (size,), int64.
        cells: Index of each unit's cell; units are permuted freely within cells only. There is one cell, unless the
            units belong to heads or groups. Shape (size,), int64.
        movable: Whether units may be permuted at all.
        dense: Whether GL(d) acts on the units of a cell.
        scales: Number of independent positive scales per unit.
        signs: Number of independent signs per unit.
        occurrences: Positions of the units in tensors.
        taps: Outputs of modules without children that show all units on one axis, in the order of the forward pass.
        rotations: The cells that the orthogonal group acts on, before permutations, scales and signs.
        phase: Whether the units are rotary pairs, which rotate by any angle.
        gained: The cells that GL(d) acts on between gains, before permutations, scales and signs.
            children.
    """

    name: str
    units: Tensor
    cells: Tensor
    movable: bool
    dense: bool
    scales: int
    signs: int
    occurrences: tuple[Occurrence, ...]
    taps: tuple[Tap, ...]
    rotations: tuple[Rotation, ...] = ()
    phase: bool = False
    gained: tuple[GainedCell, ...] = ()

    @property
    def size(self) -> int:
        """The number of units."""
        return len(self.units)

    @property
    def kind(self) -> str:
        """The group on the units, in words."""
        if self.dense:
            return "invertible matrices"
        parts = ["permutation"] if self.movable and self.size > int(self.cells.max()) + 1 else []
        signs = self.signs
        if self.rotations:
            fixes_ones = self.rotations[0].fixes_ones
            parts = ["rotation that fixes ones" if fixes_ones else "rotation"]  # permutations are among them
            signs -= bool(self.rotations[0].plain_sign.any())
        parts += ["scale" if self.scales == 1 else f"{self.scales} scales"] * (self.scales > 0)
        if self.phase:  # half a turn is a sign
            parts, signs = [*parts, "phase"], signs - 1
        signs -= bool(self.gained)  # flipping all weights of a unit and no gain is a matrix
        parts += ["sign" if signs == 1 else f"{signs} signs"] * (signs > 0)
        parts += ["invertible matrices between gains"] * bool(self.gained)
        return " + ".join(parts) or "moves with its block"


def tap_of(mark: Mark, value: Value, values: Structure, shown: Shown) -> Tap:
    """Return the tap of a named value.

    Args:
        mark: Its name.
        value: Its traced labels.
        values: The group on named values.
        shown: The effect of translations on it.
    """
    seen = tuple(values.slots_of.get(mark.name, ()))
    units = _units_in(seen)
    group = IntertwinerGroup(
        mark.name,
        permutations=bool(values.moves[units].any()),
        positive_scales=any(_acts(values.magnitudes, slot) for slot in seen),
        signs=any(_acts(values.flips, slot) for slot in seen),
        dense=bool((values.cell_of[units] >= 0).any()),
    )
    place = (mark.name, value.shape, group, seen, mark.module, mark.call)
    return Tap(*place, value.offset, shown, value.squared, value.half_turned)


def _acts(forms: sparse.csr_matrix, slot: Slot) -> bool:
    """Whether any generator acts on a slot."""
    return bool(np.diff(forms.indptr[[slot.rows.start, slot.rows.stop]]).item())


def _units_in(slots: Iterable[Slot]) -> Ints:
    units = np.concatenate([np.zeros(0, np.int64), *(slot.unit.ravel() for slot in slots)])
    return units[units >= 0]


def axis_groups(structure: Structure, parameters: Collection[str], taps: Iterable[Tap]) -> Iterator[AxisGroup]:
    """Yield the axis groups of a network, in the order of the forward pass.

    Args:
        structure: The group on parameters and buffers.
        parameters: The names of the parameters.
        taps: Candidates for the taps of the groups.
    """
    starts = np.array([slot.offset for slot in structure.slots], np.int64)
    names: set[str] = set()
    firsts = np.array([units[0] for units in structure.orbits], np.int64)
    tapped: defaultdict[int, list[Tap]] = defaultdict(list)  # by the first unit of an orbit
    for tap in taps:
        for unit in firsts[np.isin(firsts, _units_in(tap.seen))].tolist():
            tapped[unit].append(tap)
    for index, units in enumerate(structure.orbits):
        columns, table = structure.columns[index], structure.scale_table[index]
        slot_of = np.searchsorted(starts, columns[0], side="right") - 1 if columns.shape[1] else np.zeros(0, int)
        first = np.zeros(columns.shape[1])
        if table.shape[1] and columns.shape[1]:
            first = np.asarray(structure.magnitudes[columns[0], table[0, 0]].todense()).ravel()
        occurrences = []
        for slot_index, exponent in dict.fromkeys(zip(slot_of.tolist(), first.tolist(), strict=True)):
            slot = structure.slots[slot_index]
            at = np.ascontiguousarray(columns[:, (slot_of == slot_index) & (first == exponent)] - slot.offset)
            axis = slot.axes[0] if slot.axes else 0
            is_parameter = slot.tensor in parameters
            occurrences.append(
                Occurrence(slot.tensor, axis, torch.from_numpy(at), exponent, is_parameter, slot.axes[1:])
            )
        # Buffers and biases are named after the same module as the weight, which comes first.
        base = occurrences[0].tensor.rpartition(".")[0] or occurrences[0].tensor
        name, number = base, 2
        while name in names:
            name, number = f"{base} ({number})", number + 1
        names.add(name)
        numbers = torch.from_numpy(units)
        yield AxisGroup(
            name=name,
            units=numbers,
            cells=torch.from_numpy(structure.cells[index]),
            movable=structure.movable[index],
            dense=bool(structure.cell_of[units[0]] >= 0),
            scales=table.shape[1],
            signs=structure.sign_table[index].shape[1],
            occurrences=tuple(occurrences),
            taps=tuple(tap for tap in tapped[int(units[0])] if tap.positions(numbers) is not None),
            rotations=tuple(rotation for rotation in structure.rotations if rotation.orbit == index),
            phase=bool(structure.phase_of[units[0]] >= 0),
            gained=tuple(cell for cell in structure.gained if cell.orbit == index),
        )
