"""Scales relative to a reference network: restored in proportion, or refined to the least distance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym._linear_algebra import best_scales
from lightning_sym.symmetry.arrays import Bools, Floats, Ints, along
from lightning_sym.symmetry.distances import squared_distance
from lightning_sym.symmetry.group.factor import Factors
from lightning_sym.symmetry.group.norms import NOTHING, Plan, Squares
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.solving.structure import Structure

# A unit is out of proportion if its squared norm exceeds this multiple of the reference unit's plus its own least one.
# The reference's scales do this only to a unit that is much larger, once balanced, than the reference's.
_OUT_OF_PROPORTION = 4.0
_SWEEPS = 30


def in_proportion(plan: Plan, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], handed: Floats) -> Floats:
    """Return the log scales that bring a balanced network to the scales of a reference; see `to_gauge_of`.

    Args:
        plan: The plan of the group.
        theirs: The tensors of the reference, by name.
        own: The tensors of the balanced network, by name.
        handed: Log scales of the reference, regardless of the units' norms. Shape (scales,).
    """
    log_scale, free = handed.copy(), np.ones(len(handed), bool)
    while True:
        _put_in_proportion(plan, theirs, own, free, log_scale)
        raised = _keep_variances(plan.structure, theirs, own, log_scale) & free
        if not raised.any():
            return log_scale
        free &= ~raised  # scales before them have to adapt


def _put_in_proportion(
    plan: Plan, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], free: Bools, log_scale: Floats
) -> None:
    """Change scales of units that are out of proportion, class by class, until none is.

    Args:
        plan: The plan of the group.
        theirs: The tensors of the reference, by name.
        own: The tensors of the balanced network, by name.
        free: Mask of the scales that may change. Shape (generators,).
        log_scale: Log scales of the reference; changed in place. Shape (generators,).
    """
    wanted = _sides(plan, Squares(plan, theirs), np.zeros_like(log_scale))
    squares = Squares(plan, own)
    for _ in range(_SWEEPS):
        pending = np.unique(plan.class_of[free & (_steps(plan, _sides(plan, squares, log_scale), wanted) != 0)])
        if not len(pending):
            return
        for index in pending:
            steps = _steps(plan, _sides(plan, squares, log_scale), wanted)
            log_scale += np.where(free & (plan.class_of == index), steps, 0.0)


def _sides(plan: Plan, squares: Squares, log_scale: Floats) -> tuple[Floats, Floats]:
    """Return each generator's squared norms of the weights it multiplies and divides, under scales."""
    slices = squares.slices(plan.parameter * np.exp(2 * (plan.forms @ log_scale)))
    return plan.up @ slices, plan.down @ slices


def _steps(plan: Plan, sides: tuple[Floats, Floats], wanted: tuple[Floats, Floats]) -> Floats:
    """Return the changes of the logarithms that bring units into proportion; 0 for units that are.

    Args:
        plan: The plan of the group.
        sides: Squared norms of the weights that generators multiply and divide. Each of shape (generators,).
        wanted: The same for the reference.
    """
    (up, down), whole = sides, wanted[0] + wanted[1]
    least = np.sqrt(up) * np.sqrt(down)
    with np.errstate(divide="ignore", invalid="ignore"):
        both = np.log((wanted[0] + least) / (wanted[1] + least) * (down / up)) / 4
        # A unit with one zero side is scaled to the norm of the reference's unit.
        alone = np.where(up > 0, np.log(whole / up), -np.log(whole / down)) / 2
    steps = np.where(least > 0, both, np.where(whole > NOTHING, alone, 0.0))
    out = (plan.class_of >= 0) & (up + down > np.maximum(_OUT_OF_PROPORTION * (whole + 2 * least), NOTHING))
    return np.where(out, steps, 0.0) / plan.largest


def _keep_variances(
    structure: Structure, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], log_scale: Floats
) -> Bools:
    """Raise scales that would make running variances negative where the reference's are not.

    Returns:
        A mask of the raised scales; these are changed in place. Shape (generators,).
    """
    before = log_scale.copy()
    for slot in structure.slots:
        if slot.kind != "variance":
            continue
        reference, variance = (
            tensors[slot.tensor].detach().double().cpu().numpy().ravel() + slot.epsilon for tensors in (theirs, own)
        )
        acting = structure.magnitudes[slot.rows]
        with np.errstate(divide="ignore", invalid="ignore"):  # eps may be 0, and so may a variance
            least = np.log(np.minimum(reference, slot.epsilon) / variance) / 2
            missing = np.where(np.isfinite(least), least - acting @ log_scale, 0.0)
        # Differences within rounding are ignored, so that scales without a conflict stay exact.
        for position in np.flatnonzero(missing > 1e-6):
            row = acting[position]
            log_scale[row.indices] += missing[position] / (row.data * row.nnz)
    raised: Bools = log_scale != before
    return raised


_MOST_SWEEPS = 20  # passes over all columns


@dataclass(frozen=True)
class Column:
    """The slices that the generators of one column of a group's table act on.

    Attributes:
        column: Indices of the generators.
        parts: For each slot that they act on: its index, and indicators of exponent +1 and of exponent -1. Each of
            shape (generators, positions), sparse.
        coupled: Whether some generators act on common entries.
    """

    column: Ints
    parts: list[tuple[int, sparse.csr_matrix, sparse.csr_matrix]]
    coupled: bool


class MagnitudeDescent:
    """Cyclic descent on |a - g b|^2 over scales; holds the transformed network.

    As a function of one factor f with exponents +1 and -1, the squared distance is
    -2 P f + Q f^2 - 2 R / f + S / f^2 + constant. Its stationary points solve Q f^4 - P f^3 + R f - S = 0. All
    generators of a table column change at once if this reduces the distance. It may fail only where generators act on
    common entries; then half and a quarter of the step are tried. Columns with other exponents stay unchanged.

    Args:
        factors: The factors of the group.
        target: Parameters of the reference, by name.
        begin: Parameters of the network to transform, by name.

    Attributes:
        current: Parameters of the transformed network.
        log_scale: Total change of the logarithms. Shape (generators,).
        numbers: Indices of the slots that may change, by tensor name.
    """

    def __init__(self, factors: Factors, target: Mapping[str, Tensor], begin: Mapping[str, Tensor]) -> None:
        self.factors, self.target, self.current = factors, target, dict(begin)
        self.log_scale = np.zeros(factors.structure.magnitudes.shape[1])
        self.plans = plans = scale_columns(factors.structure, begin)
        self.numbers: dict[str, list[int]] = {}
        for number in sorted({number for plan in plans for number, _, _ in plan.parts}):
            self.numbers.setdefault(factors.structure.slots[number].tensor, []).append(number)
        self._cross: dict[int, Floats] = {}
        self._own: dict[int, Floats] = {}
        self._measure(self.numbers)

    def run(self) -> Tensor:
        """Sweep over the columns while the distance falls; return the logarithms. Shape (generators,)."""
        whole = self.distance(self.numbers)
        for _ in range(_MOST_SWEEPS):
            won = sum(self.improve(plan) for plan in self.plans)
            whole -= won
            if won <= 1e-4 * whole:
                break
        return torch.from_numpy(self.log_scale)

    def distance(self, names: Iterable[str]) -> float:
        """Return the squared distance of some parameters from the reference's."""
        return squared_distance({name: self.current[name] for name in names}, self.target)

    def _measure(self, names: Iterable[str]) -> None:
        for name in names:
            products, squares = self.target[name] * self.current[name], self.current[name].square()
            for number in self.numbers[name]:
                axes = self.factors.structure.slots[number].axes
                self._cross[number], self._own[number] = (along(t, axes).reshape(-1) for t in (products, squares))

    def improve(self, plan: Column) -> float:
        """Change the generators of one column if this reduces the distance.

        Returns:
            The decrease of the squared distance.
        """
        p, q, r, s = np.zeros((4, len(plan.column)))
        for number, plus, minus in plan.parts:
            p += plus @ self._cross[number]
            q += plus @ self._own[number]
            r += minus @ self._cross[number]
            s += minus @ self._own[number]
        step = best_factors(p, q, r, s)
        names = list(dict.fromkeys(self.factors.structure.slots[number].tensor for number, _, _ in plan.parts))
        for damping in (1.0, 0.5, 0.25) if plan.coupled else (1.0,):
            if not np.any(np.abs(step) > 1e-15):
                break
            f = np.exp(step * damping)
            gain = float(np.sum(-2 * p * (1 - f) + q * (1 - f**2) - 2 * r * (1 - 1 / f) + s * (1 - f**-2.0)))
            if not plan.coupled and gain <= 0:
                break
            move = self.factors.identity("")
            move.log_scale[torch.from_numpy(plan.column)] = torch.from_numpy(step * damping)
            moved = dict(MovedTensors(self.factors, move, {name: self.current[name] for name in names}).items())
            if plan.coupled:
                gain = self.distance(names) - squared_distance(moved, self.target)
            if gain > 0:
                self.current.update(moved)
                self._measure(names)
                self.log_scale[plan.column] += step * damping
                return gain
        return 0.0


def scale_columns(structure: Structure, tensors: Mapping[str, Tensor]) -> list[Column]:
    """Return the columns of generators that act on these tensors with exponents +1 and -1 only."""
    forms = structure.magnitudes.tocsc()
    slot_of = np.repeat(np.arange(len(structure.slots)), [slot.size for slot in structure.slots])
    plans: list[Column] = []
    for units, table in zip(structure.orbits, structure.scale_table, strict=True):
        for column in map(np.unique, table.T if structure.cell_of[units[0]] < 0 else ()):
            acting = forms[:, column].tocsr()
            if not np.all(np.isin(np.rint(acting.data * 1e9) / 1e9, (-1.0, 1.0))):
                continue
            parts = []
            for number in np.unique(slot_of[acting.tocoo().row]).tolist():
                slot = structure.slots[number]
                if slot.tensor in tensors:
                    part = acting[slot.rows].T
                    parts.append((number, *(own.astype(np.float64).tocsr() for own in (part > 0, part < 0))))
            if parts:
                held = [structure.slots[number].tensor for number, _, _ in parts]
                # Two generators of one column on one position would also be coupled; they are rare, and count as such.
                rows_alone = acting.getnnz(axis=1).max(initial=0) <= 1
                plans.append(Column(column, parts, len(set(held)) < len(held) or not rows_alone))
    return plans


def best_factors(p: Floats, q: Floats, r: Floats, s: Floats) -> Floats:
    """Return the log of the f > 0 that minimises -2 p f + q f^2 - 2 r / f + s / f^2; 0 where there is no minimum.

    Args:
        p: Coefficients of f, of any sign. Shape (n,).
        q: Coefficients of f^2, >= 0. Shape (n,).
        r: Coefficients of 1 / f. Shape (n,).
        s: Coefficients of 1 / f^2, >= 0. Shape (n,).

    Returns:
        Shape (n,), within [-20, 20].
    """
    scales = best_scales(*(torch.from_numpy(np.asarray(part, dtype=np.float64)) for part in (p, q, r, s)))[1].numpy()
    moves = np.isfinite(scales) & (scales > 0)
    best = np.where(moves, scales, 1.0)
    # Newton steps in the logarithm: where roots of the companion matrix nearly coincide, half of their digits are lost.
    for _ in range(3):
        slope = -p * best + q * best**2 + r / best - s / best**2
        bend = -p * best + 2 * q * best**2 - r / best + 2 * s / best**2
        step = np.where(bend > 0, -slope / np.where(bend > 0, bend, 1.0), 0.0)
        best *= np.exp(np.clip(step, -0.1, 0.1))
    return np.where(moves, np.clip(np.log(best), -20.0, 20.0), 0.0)
