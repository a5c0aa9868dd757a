"""Scales beside those of a reference: handed over in proportion, or adjusted to the least distance."""

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
from lightning_sym.symmetry.tracing.structure import Structure

# A unit is out of proportion whose squared norm is this many times that of the reference's unit and its own least one
# together. Handed-over scales make such a unit only of one that is much larger, balanced, than the reference's.
_OUT_OF_PROPORTION = 4.0
_SWEEPS = 30


def in_proportion(plan: Plan, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], handed: Floats) -> Floats:
    """Return the logarithms of scales that bring a balanced network to those of a reference; see `to_gauge_of`.

    Args:
        plan: The group's.
        theirs: The tensors of the reference, by name.
        own: Those of the balanced network.
        handed: What brings units to the scales of the reference, whatever their norms. Shape (scales,).
    """
    log_scale, free = handed.copy(), np.ones(len(handed), bool)
    while True:
        _put_in_proportion(plan, theirs, own, free, log_scale)
        raised = _keep_variances(plan.structure, theirs, own, log_scale) & free
        if not raised.any():
            return log_scale
        free &= ~raised  # what is in front of them has to make room


def _put_in_proportion(
    plan: Plan, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], free: Bools, log_scale: Floats
) -> None:
    """Change scales of units that are out of proportion, class by class, until none is.

    Args:
        plan: The group's.
        theirs: The tensors of the reference.
        own: Those of the balanced network.
        free: Which scales may change. Shape (generators,).
        log_scale: What brings these to the scales of the reference; changed in place. Shape (generators,).
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
    """Return for each generator the squared norms of what it multiplies and of what it divides, under scales."""
    slices = squares.slices(plan.parameter * np.exp(2 * (plan.forms @ log_scale)))
    return plan.up @ slices, plan.down @ slices


def _steps(plan: Plan, sides: tuple[Floats, Floats], wanted: tuple[Floats, Floats]) -> Floats:
    """Return the changes of the logarithms that bring units into proportion, 0 for those that are.

    Args:
        plan: The group's.
        sides: The squared norms of what the generators multiply and of what they divide. Each of shape (generators,).
        wanted: The same of the reference.
    """
    (up, down), whole = sides, wanted[0] + wanted[1]
    least = np.sqrt(up) * np.sqrt(down)
    with np.errstate(divide="ignore", invalid="ignore"):
        both = np.log((wanted[0] + least) / (wanted[1] + least) * (down / up)) / 4
        # With nothing on one side the other is made as large as the reference's unit.
        alone = np.where(up > 0, np.log(whole / up), -np.log(whole / down)) / 2
    steps = np.where(least > 0, both, np.where(whole > NOTHING, alone, 0.0))
    out = (plan.class_of >= 0) & (up + down > np.maximum(_OUT_OF_PROPORTION * (whole + 2 * least), NOTHING))
    return np.where(out, steps, 0.0) / plan.largest


def _keep_variances(
    structure: Structure, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], log_scale: Floats
) -> Bools:
    """Raise scales that would make running variances negative where the reference's are not.

    Returns:
        Which ones; they are changed in place. Shape (generators,).
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
        # Differences of rounding stay: what is handed over exactly, exactly.
        for position in np.flatnonzero(missing > 1e-6):
            row = acting[position]
            log_scale[row.indices] += missing[position] / (row.data * row.nnz)
    raised: Bools = log_scale != before
    return raised


_MOST_SWEEPS = 20  # passes over all columns


@dataclass(frozen=True)
class Column:
    """What happens when the generators of one column of a group's table change.

    Attributes:
        column: The generators.
        parts: The number of each slot where they act, and for the exponents +1 and -1 which generator acts at which
            position: sparse (generators, positions).
        coupled: Whether some act on common entries.
    """

    column: Ints
    parts: list[tuple[int, sparse.csr_matrix, sparse.csr_matrix]]
    coupled: bool


class MagnitudeDescent:
    """Cyclic descent on |a - g b|^2 over the generators of scales: holds the moved network while they change.

    As a function of one factor f, with exponents +1 and -1 only, the square is
    -2 P f + Q f^2 - 2 R / f + S / f^2 + constant, whose stationary points solve Q f^4 - P f^3 + R f - S = 0.
    All generators of a column of a group's table are changed at once, if that is an improvement (it is, unless they
    act on common entries: then with half and a quarter of the steps' logarithms, or not at all). Columns with other
    exponents stay.

    Args:
        factors: Those of the group.
        target: The reference's parameters, by name.
        begin: Those of the moved network.

    Attributes:
        current: The moved network's parameters by now.
        log_scale: What has changed. Shape (generators,).
        numbers: The numbers of the slots where something may change, by the tensors' names.
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
        """Change columns while that helps, and return the logarithms. Shape (generators,)."""
        whole = self.distance(self.numbers)
        for _ in range(_MOST_SWEEPS):
            won = sum(self.improve(plan) for plan in self.plans)
            whole -= won
            if won <= 1e-4 * whole:
                break
        return torch.from_numpy(self.log_scale)

    def distance(self, names: Iterable[str]) -> float:
        """Return the squared distance of some parameters to the reference's."""
        return squared_distance({name: self.current[name] for name in names}, self.target)

    def _measure(self, names: Iterable[str]) -> None:
        for name in names:
            products, squares = self.target[name] * self.current[name], self.current[name].square()
            for number in self.numbers[name]:
                axes = self.factors.structure.slots[number].axes
                self._cross[number], self._own[number] = (along(t, axes).reshape(-1) for t in (products, squares))

    def improve(self, plan: Column) -> float:
        """Change the generators of a plan, if that is an improvement.

        Returns:
            By how much the squared distance has fallen.
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
    """Return a plan for each column of generators that acts on these tensors, with exponents +1 and -1 only."""
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
                # Two generators of one column on one position would also be common; they are rare, and count as such.
                rows_alone = acting.getnnz(axis=1).max(initial=0) <= 1
                plans.append(Column(column, parts, len(set(held)) < len(held) or not rows_alone))
    return plans


def best_factors(p: Floats, q: Floats, r: Floats, s: Floats) -> Floats:
    """Return the logarithms of the factors f > 0 that minimise -2 p f + q f^2 - 2 r / f + s / f^2; 0 where none does.

    Args:
        p: The coefficients of f, any sign. Shape (n,).
        q: Those of f^2, >= 0. Shape (n,).
        r: Those of 1 / f. Shape (n,).
        s: Those of 1 / f^2, >= 0. Shape (n,).

    Returns:
        Shape (n,), within [-20, 20].
    """
    scales = best_scales(*(torch.from_numpy(np.asarray(part, dtype=np.float64)) for part in (p, q, r, s)))[1].numpy()
    moves = np.isfinite(scales) & (scales > 0)
    best = np.where(moves, scales, 1.0)
    # Newton in the logarithm: roots of a companion matrix have half the digits where they nearly meet.
    for _ in range(3):
        slope = -p * best + q * best**2 + r / best - s / best**2
        bend = -p * best + 2 * q * best**2 - r / best + 2 * s / best**2
        step = np.where(bend > 0, -slope / np.where(bend > 0, bend, 1.0), 0.0)
        best *= np.exp(np.clip(step, -0.1, 0.1))
    return np.where(moves, np.clip(np.log(best), -20.0, 20.0), 0.0)
