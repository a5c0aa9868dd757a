"""Balances dense cells against scales: docs/theory/intertwiners.md, 5.5."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.group.cells import (
    balancing,
    gram_matrices,
    mismatch,
    partial_balancing,
    principal_balancing,
)
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Factors
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, stalled
from lightning_sym.symmetry.group.gauge import ScaleGauge
from lightning_sym.symmetry.group.norms import Squares
from lightning_sym.symmetry.group.streams import folding
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.views import ConvertedTensors, doubled

# Scales and cells are balanced in turn until no matrix is further from the identity, and so many times at most.
_SETTLED, _MOST_ROUNDS = 1e-13, 500
_MOST_POSITIVE, _STILL = 100, 1e-12  # by positive matrices alone
_PARTLY_SETTLED = 1e-11  # where cells have no balanced member, and matrices with larger condition numbers


def balanced_cells(
    factors: Factors, state: Gathered, *, partly: bool | None = None
) -> tuple[Element, set[int], list[str]]:
    """Return the element that makes both Gram matrices of every head equal and diagonal.

    The two matrices are those of the incoming and of the outgoing weights. Scales and heads are balanced in turn. Each
    step lowers the squared norm, which is convex along geodesics of both together (docs/theory/intertwiners.md, 5.5).
    A matrix that acts on a head changes only the squared norms of tensors that hold the head.

    Args:
        factors: Those of the group.
        state: The weights.
        partly: Whether to balance heads without a balanced representative as far as possible, or leave them unchanged;
            by default as is wanted.

    Returns:
        The element, the indices of heads without a balanced representative, and notes.
    """
    structure, plan, tensors, wanted = factors.structure, state.plan, state.tensors, state.wanted
    counted = {structure.slots[index].tensor for index in np.unique(plan.slot_of[plan.parameter]).tolist()}
    mixed = {
        slot.tensor for slot in structure.slots if slot.offset in structure.dense_places and slot.tensor in tensors
    }
    partly = wanted.partly if partly is None else partly
    total = same = factors.identity("")
    singular: set[int] = set()
    squares = Squares(plan, tensors, state.dtype)
    changes: list[float] = []
    while len(changes) < _MOST_ROUNDS and not stalled(changes, 40):
        here = MovedTensors(factors, total, tensors, shifted=False)
        gauge = ScaleGauge(plan, squares, wanted.scales, folding(structure, here))
        step = same.replaced(log_scale=torch.from_numpy(gauge.log_scale))
        squares.scale(gauge.log_scale)
        total = factors.compose(step, total)
        here = MovedTensors(factors, total, ConvertedTensors(tensors, doubled), mixed & counted, shifted=False)
        grams = list(enumerate(zip(*gram_matrices(structure, here), strict=True)))
        moved = max((mismatch(*own) for cell, own in grams if cell not in singular), default=0.0)
        partial = {cell: partial_balancing(*own) if partly else None for cell, own in grams if cell in singular}
        for cell, diagonals in ((cell, found[1]) for cell, found in partial.items() if found is not None):
            for gram, diagonal in zip(grams[cell][1], diagonals, strict=True):
                apart = float((gram - torch.diag(diagonal)).abs().max() / diagonal.max())
                moved = max(moved, apart if apart > _PARTLY_SETTLED else 0.0)
        changes.append(moved)
        if len(changes) > 1 and moved <= _SETTLED:
            break
        dense = list(same.dense)
        for cell, (out, read) in grams:
            found = None if cell in singular else principal_balancing(out, read)
            if found is None:
                singular.add(cell)
                other = partial[cell] if cell in partial else partial_balancing(out, read) if partly else None
                found = other[0] if other is not None else dense[cell]
            dense[cell] = found
        total = factors.compose(same.replaced(dense=tuple(dense)), total)
        inside = total.replaced(log_scale=same.log_scale)
        squares.renew(MovedTensors(factors, inside, ConvertedTensors(tensors, doubled), mixed, shifted=False))
    if partly and singular and moved > _SETTLED:  # cells that read one another have no balance of this kind, either
        return balanced_cells(factors, state, partly=False)
    notes = [f"cells and scales were balanced to {moved:.1e} only"] if moved > _SETTLED else []
    if singular:
        notes.append(
            f"{len(singular)} cells on which invertible matrices act stay as they are: the weights that write or read "
            "their units are linearly dependent"
        )
    return total, singular, notes


def balanced_by_positive(factors: Factors, tensors: Mapping[str, Tensor]) -> Canonical:
    """Return the positive matrices that make both Gram matrices of every head equal, head by head in turn.

    Args:
        factors: Those of the group.
        tensors: Parameters, by name, float64.
    """
    total = same = factors.identity("")
    singular = set[int]()
    for _ in range(_MOST_POSITIVE):
        dense, largest = list(same.dense), 0.0
        grams = gram_matrices(factors.structure, tensors)
        for cell, (out, read) in enumerate(zip(*grams, strict=True)):
            found = balancing(out, read)
            if found is None:
                singular.add(cell)
                continue
            largest = max(largest, float((found - dense[cell]).abs().max()))
            dense[cell] = found
        if largest <= _STILL:
            break
        step = same.replaced(dense=tuple(dense))
        tensors = dict(MovedTensors(factors, step, tensors, shifted=False).items())
        total = factors.compose(step, total)
    note = f"{len(singular)} heads stay as they are, as what they put out or what reads it has dependent units"
    return Canonical({"dense": total.dense}, [note] * bool(singular))
