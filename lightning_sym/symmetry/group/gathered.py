"""What canonical forms gather of a network's weights, which they ask factors by: docs/theory/canonical.md."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats
from lightning_sym.symmetry.group.element import Part
from lightning_sym.symmetry.group.gauge import ScaleGauge
from lightning_sym.symmetry.group.norms import NOTHING, Plan, Squares, sides_of_units
from lightning_sym.symmetry.group.order import Gauged

Scales = Literal["balanced", "unit"] | None


class Rung(IntEnum):
    """When canonical forms ask a factor for its part. Each rung holds all that come after it."""

    LAST = 0  # when all after it is found but signs and order; then all after it is found again
    IN_TURN = 1  # in turn with all after it, until nothing moves
    SIZED = 2  # when sizes are found; then all after it is found again
    FIRST = 3  # once, before all after it
    EACH = 4  # in each pass, before squares are gathered
    SIZES = 5  # in each pass, by sums of squares
    SIGNS = 6  # by entries under the sizes that were found
    ORDER = 7  # by all that was found


@dataclass(frozen=True)
class Wanted:
    """Which form is wanted.

    Attributes:
        scales: The gauge of the scales; None for those that there are.
        signs: Whether signs may change.
        order: Whether units may change places.
        partly: Whether cells without a balanced member are balanced as far as can be, which leaves rotations of them.
    """

    scales: Scales
    signs: bool = True
    order: bool = True
    partly: bool = False


class Canonical(NamedTuple):
    """What a factor answers.

    Attributes:
        parts: What brings the weights to their form, by the names of factors; seldom of others than its own.
        notes: What was left as it was, and why.
    """

    parts: Mapping[str, Part]
    notes: Sequence[str] = ()


class Gathered(ABC):
    """The weights on their way to the canonical form, and what is gathered of them.

    Args:
        plan: The group's.
        wanted: Which form is wanted.
        names: What each orbit is called.
        parameters: The names of the parameters.
        dtype: In which weights are held to sum up their squares; None for their own.

    Attributes:
        gauge: In a pass, the sizes that were found.
        gauged: The weights under these.
        slices: The sums of squares under these. Shape (positions of all slots,).
        dead: By orbit, which units are dead, where any are. Each of shape (units,), bool.
        reflected: Dense cells of which signs only are left to find; None while no matrix has acted on any.
        placed: Orbits whose units have their order from other factors.
    """

    gauge: ScaleGauge
    gauged: Gauged
    slices: Floats
    dead: dict[int, Bools]

    def __init__(
        self, plan: Plan, wanted: Wanted, names: Sequence[str], parameters: Collection[str], dtype: torch.dtype | None
    ) -> None:
        self.plan, self.wanted, self.names, self.parameters, self.dtype = plan, wanted, names, parameters, dtype
        self.reflected: list[int] | None = None
        self.placed: set[int] = set()

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """The parameters and buffers where they are, by name."""

    @abstractmethod
    def move(self, parts: Mapping[str, Part]) -> None:
        """Let parts of factors act."""

    def weigh(self, held: Floats) -> None:
        """Find sizes, and gather what depends on them.

        Args:
            held: Logarithms of scales that are known beforehand; nan for all others. Shape (scales,).
        """
        plan, tensors = self.plan, self.tensors
        squares = Squares(plan, tensors, self.dtype)
        squares.require_finite(tensors)
        self.gauge = ScaleGauge(plan, squares, self.wanted.scales, held)
        # A group without a scale of its own does not order the living units that it touches; it counts as absent.
        determined = plan.used @ self.gauge.dead.astype(np.float64) == 0
        self.gauged = Gauged(plan, tensors, self.gauge.log_scale, determined)
        self.slices, self.dead = squares.slices(self.gauged.scale**2 * determined), {}
        for orbit, sides in enumerate(sides_of_units(plan, self.slices)):
            table = plan.structure.scale_table[orbit]
            units: Bools = np.asarray(self.gauge.dead[table].any(1))
            if sides.dead.any() and not table.shape[1]:
                units = (sides.incoming <= NOTHING) | (sides.outgoing <= NOTHING)
            if units.any():
                self.dead[orbit] = units


def stalled(changes: Sequence[float], rounds: int) -> bool:
    """Return whether the last rounds did not halve the least change: coupled cells may go to and fro for ever."""
    return len(changes) > rounds and min(changes[-rounds:]) > min(changes[:-rounds]) / 2
