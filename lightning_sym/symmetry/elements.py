"""What a symmetry is made of: units that move together, where they stand and can be watched, and an element."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.groups import IntertwinerGroup
from lightning_sym.symmetry.tracing.structure import Slot


@dataclass(frozen=True, eq=False)
class Tap:
    """A value inside the network on which elements act.

    Attributes:
        name: The module whose output it is, with ``-2``, ``-3``, ... for its later calls; ``site/0``, ``site/1``, ...
            for what crosses a cut.
        shape: Its shape for the traced example, batch included.
        group: Which group acts on its channels.
        seen: For each axis (or axes together) on which units live, which unit stands where.
        module: The module whose output it is; empty at a cut.
        call: Which of the module's calls it is, from 0.
        offset: What is added where a unit changes its sign, see :class:`IntertwinerGroup`.
        shift: The number of the element's shift that is added to its channels.
    """

    name: str
    shape: tuple[int, ...]
    group: IntertwinerGroup
    seen: tuple[Slot, ...]
    module: str = ""
    call: int = 0
    offset: float = 0.0
    shift: int | None = None

    @property
    def axis(self) -> int | None:
        """The axis of the channels: the last one on which units live by themselves; None if there is none."""
        return max((slot.axes[0] for slot in self.seen if len(slot.axes) == 1), default=None)

    def positions(self, units: Tensor) -> tuple[int, Tensor] | None:
        """Return where all of some units are seen, once each, on one axis.

        Args:
            units: Their numbers, in ascending order. Shape (size,), int64.

        Returns:
            The axis, and for each unit its position there; None if they are not seen in this way.
        """
        for slot in self.seen:
            at = np.flatnonzero(np.isin(slot.unit, units))
            if len(slot.axes) == 1 and np.array_equal(np.sort(slot.unit[at]), units):
                return slot.axes[0], torch.from_numpy(at[np.argsort(slot.unit[at])])
        return None


@dataclass(frozen=True)
class Occurrence:
    """Where the units of an axis group stand in one tensor.

    Attributes:
        tensor: The name of the parameter or buffer.
        axis: Its axis.
        positions: For each unit, its positions on that axis (several after flattening an image). Shape
            (size, positions per unit), int64.
        exponent: How the unit's own first scale acts here: 1 on what it puts out, -1 on what reads it, 0 where it
            does not act.
        is_parameter: False for buffers.
    """

    tensor: str
    axis: int
    positions: Tensor
    exponent: float
    is_parameter: bool


@dataclass(frozen=True)
class AxisGroup:
    """Units that one group element moves together, and the tensors' axes on which they stand.

    Attributes:
        name: After the first tensor in which the units stand.
        units: The units' numbers. Shape (size,), int64.
        cells: For each unit the number of its cell: units change places freely within a cell only. One cell, unless
            the units belong to heads or groups. Shape (size,), int64.
        movable: Whether units may change places at all.
        dense: Whether any invertible matrix may mix the units of a cell.
        scales: How many magnitudes are free per unit.
        signs: How many signs are free per unit.
        occurrences: Where the units stand.
        taps: Where all of them can be watched on one axis, in the order of the forward pass: outputs of modules without
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

    @property
    def size(self) -> int:
        """The number of units."""
        return len(self.units)

    @property
    def kind(self) -> str:
        """What may be done to the units, in words."""
        if self.dense:
            return "invertible matrices"
        parts = ["permutation"] if self.movable and self.size > int(self.cells.max()) + 1 else []
        parts += ["scale" if self.scales == 1 else f"{self.scales} scales"] * (self.scales > 0)
        parts += ["sign" if self.signs == 1 else f"{self.signs} signs"] * (self.signs > 0)
        return " + ".join(parts) or "moves with its block"


@dataclass(frozen=True)
class Element:
    """One element of a network's symmetry group. Scales come first, permutations second.

    Attributes:
        group: The fingerprint of the symmetry that it belongs to.
        permutation: The new unit i is the old unit permutation[i]. Shape (units,), int64.
        log_scale: Logarithms of the magnitudes. Shape (scales,), float64.
        sign: +1 or -1. Shape (signs,), float64.
        dense: Invertible matrices, one per dense cell. Each of shape (size, size), float64.
        shift: For each free shift, the vector that is added to its biases. Each of shape (channels,), float64.
    """

    group: str
    permutation: Tensor
    log_scale: Tensor
    sign: Tensor
    dense: tuple[Tensor, ...] = ()
    shift: tuple[Tensor, ...] = ()
