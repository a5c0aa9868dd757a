"""Scales of a reference, but for units of which the reference says too little: docs/theory/matching.md, 1.5."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats
from lightning_sym.symmetry.group.norms import NOTHING, Plan, Squares
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
