"""The input of factors to canonical forms (docs/theory/canonical.md)."""

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
from lightning_sym.symmetry.group.gauge import ScaleGauge, variance_scales
from lightning_sym.symmetry.group.norms import NOTHING, Plan, Squares, sides_of_units
from lightning_sym.symmetry.group.order import Gauged

Scales = Literal["balanced", "unit"] | None


class Rung(IntEnum):
    """Stage of a factor in the computation of canonical forms. Each rung includes all later ones."""

    LAST = 0  # after all later rungs but signs and order; then the later rungs are repeated
    IN_TURN = 1  # in turn with all later rungs, until nothing moves
    SIZED = 2  # after the sizes; then all later rungs are repeated
    FIRST = 3  # once, before all later rungs
    EACH = 4  # in each pass, before squared norms are computed
    SIZES = 5  # in each pass, from squared norms
    SIGNS = 6  # from entries, under the sizes found
    ORDER = 7  # from everything found


@dataclass(frozen=True)
class Wanted:
    """Options of a canonical form.

    Attributes:
        scales: The gauge of the scales; None keeps them.
        signs: Whether signs may change.
        order: Whether units may be permuted.
        partly: Whether to balance cells without a balanced representative as far as possible, up to rotations.
    """

    scales: Scales
    signs: bool = True
    order: bool = True
    partly: bool = False


class Canonical(NamedTuple):
    """A factor's contribution to a canonical form.

    Attributes:
        parts: Parts that bring the weights to their form, by factor name; mostly the factor's own.
        notes: Reasons why something was left unchanged.
    """

    parts: Mapping[str, Part]
    notes: Sequence[str] = ()


class Gathered(ABC):
    """Weights on their way to the canonical form, with derived quantities.

    Args:
        plan: The plan of the group.
        wanted: Options of the form.
        names: Names of the orbits.
        parameters: Names of the parameters.
        dtype: Dtype of the weights while their squares are summed; None keeps theirs.

    Attributes:
        gauge: Scales found in the current pass.
        gauged: The weights under these scales.
        slices: Squared norms under these scales. Shape (positions of all slots,).
        dead: Masks of dead units by orbit, for orbits with dead units. Each of shape (units,), bool.
        reflected: GL(d) blocks with only signs undetermined; None while no matrix has acted on any.
        placed: Orbits sorted by other factors.
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
        """The current parameters and buffers, by name."""

    @abstractmethod
    def move(self, parts: Mapping[str, Part]) -> None:
        """Apply parts, given by factor name."""

    def weigh(self, held: Floats) -> None:
        """Find scales, and compute the quantities that depend on them.

        Args:
            held: Logarithms of scales known beforehand; nan elsewhere. Shape (scales,).
        """
        plan, tensors = self.plan, self.tensors
        squares = Squares(plan, tensors, self.dtype)
        squares.require_finite(tensors, self.parameters)
        self.gauge = ScaleGauge(plan, squares, self.wanted.scales, held, variance_scales(plan.structure, tensors))
        # Generators without a determined scale do not help to order living units; their positions count as absent.
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
    """Return whether the last rounds failed to halve the least change: coupled cells may oscillate for ever."""
    return len(changes) > rounds and min(changes[-rounds:]) > min(changes[:-rounds]) / 2
