"""The gauge of heads under GL(d): incoming and outgoing weights have equal Gram matrices."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import together
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Factors
from lightning_sym.symmetry.group.gained_forms import (
    gram_matrices_between,
    held_scales,
    in_order_of_gains,
    orbits_between,
    tensors_between,
    usable,
    wants_matrices,
)
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, stalled
from lightning_sym.symmetry.group.gauge import ScaleGauge, variance_scales
from lightning_sym.symmetry.group.norms import Squares
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.solving.structure import Structure
from lightning_sym.symmetry.views import ConvertedTensors, doubled

# Gram matrices with a smaller ratio of least to largest eigenvalue have no balanced representative.
_SINGULAR = 1e-13
_MEETS = 1e-7  # a singular value of the weights' product is not 0 if its ratio to the largest exceeds this


def cell_slices(
    structure: Structure, tensors: Mapping[str, Tensor], some: Collection[int] | None = None
) -> Iterator[tuple[str, list[int], bool, Tensor]]:
    """Yield the weights into and out of each head.

    Args:
        structure: The group.
        tensors: Parameters, by name; others are left out.
        some: Only weights of these heads, and of others in the same places; None for all.

    Yields:
        The tensor's name; the indices of heads, all of one size; whether the weights are outgoing ones; and the
        weights, shape (heads, size, entries), in the tensor's dtype.
    """
    for slot in structure.slots:
        if slot.tensor not in tensors:
            continue
        for cells, positions, read in structure.dense_places.get(slot.offset, ()):
            if some is not None and not any(cell in some for cell in cells):
                continue
            tensor = together(tensors[slot.tensor], slot.axes)
            parts = [tensor[torch.from_numpy(at).to(tensor.device)].reshape(*at.shape, -1) for at in positions]
            yield slot.tensor, cells, read, torch.cat(parts, -1)


def gram_matrices(structure: Structure, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the Gram matrices of the weights into and out of each head, in float64 on the CPU."""
    grams = [[torch.zeros(len(c), len(c), dtype=torch.float64) for c in structure.dense] for _ in range(2)]
    for _, cells, read, slices in cell_slices(structure, tensors):
        products = (slices.double() @ slices.double().mT).cpu()
        for cell, product in zip(cells, products, strict=True):
            grams[read][cell] += product
    return grams[0], grams[1]


def unbalanced(structure: Structure, tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the heads with Gram matrices that differ by more than 1e-4 of the first one's norm."""
    pairs = enumerate(zip(*gram_matrices(structure, tensors), strict=True))
    return [cell for cell, (out, read) in pairs if float((out - read).norm()) > 1e-4 * float(out.norm())]


def mismatch(out: Tensor, read: Tensor) -> float:
    """Return the deviation of two Gram matrices from one diagonal matrix, as a relative error of its square root."""
    size = out.diagonal().clamp_min(1e-300).rsqrt()
    same = torch.eye(len(out), dtype=out.dtype)
    return max(float((size[:, None] * gram * size - same).abs().max()) for gram in (out, read)) / 4


def balancing(out: Tensor, read: Tensor) -> Tensor | None:
    """Return the positive matrix that makes two Gram matrices equal; None if one of them is singular.

    Args:
        out: Gram matrix of the incoming weights, which the result multiplies. Shape ``[e, e]``, float64, symmetric.
        read: Gram matrix of the outgoing weights, which its inverse transpose multiplies. The same shape.
    """
    found = principal_balancing(out, read)
    if found is None:
        return None
    values, vectors = torch.linalg.eigh(found.mT @ found)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return root


def principal_balancing(out: Tensor, read: Tensor) -> Tensor | None:
    r"""Return the matrix that makes two Gram matrices equal and diagonal, largest first; None if one is singular.

    :math:`A S A^\top = A^{-\top} R A^{-1}` whenever :math:`A^\top A = P` with :math:`P S P = R`. That is the geometric
    mean :math:`P = S^{-1/2} X^{1/2} S^{-1/2}` with :math:`X = S^{1/2} R S^{1/2} = U \Lambda U^\top`
    (docs/theory/canonical.md, 5); with :math:`A = \Lambda^{1/4} U^\top S^{-1/2}` both become
    :math:`\Lambda^{1/2}`.

    Args:
        out: S, of the incoming weights, which A multiplies. Shape ``[e, e]``, float64, symmetric.
        read: R, of the outgoing weights, which the inverse transpose of A multiplies. The same shape.
    """
    values, vectors = torch.linalg.eigh((out + out.mT) / 2)
    if not _regular(values) or not _regular(torch.linalg.eigvalsh((read + read.mT) / 2)):
        return None
    half, inverse = ((vectors * values**power) @ vectors.mT for power in (0.5, -0.5))
    middle = half @ read @ half
    squares, axes = torch.linalg.eigh((middle + middle.mT) / 2)
    if not _regular(squares):
        return None
    found: Tensor = ((axes * squares**0.25).mT @ inverse).flip(0)
    return found


def partial_balancing(out: Tensor, read: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
    r"""Balance a head without a balanced representative as far as possible.

    Write S = A A^T and R = B^T B with A of full column rank and B of full row rank. Let B A = U s W^T. In directions
    that are both written and read, both Gram matrices become s. In directions that are only written, or only read, the
    one that is not 0 becomes the identity. The columns of the inverse matrix are A W s^{-1/2}, A W', B^+ U' and a basis
    of the rest of the kernel of B. Primes select the columns where s is 0. Rotations remain free, as in the balanced
    gauge.

    Args:
        out: S, of the incoming weights, which the matrix multiplies. Shape ``[e, e]``, float64, symmetric.
        read: R, of the outgoing weights, which its inverse transpose multiplies. The same shape.

    Returns:
        The matrix, and the diagonals of S and R after it, each of shape ``[e]``; None where rounding hides the ranks.
    """
    factors = []
    for gram in (out, read):
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        kept = values > _SINGULAR * values[-1]
        factors.append(vectors[:, kept] * values[kept].sqrt())
    a, b = factors[0], factors[1].mT
    u, s, w = torch.linalg.svd(b @ a)
    rank = int((s > _MEETS * s.max()).sum()) if len(s) else 0
    written, only_written = a @ w[:rank].mT / s[:rank].sqrt(), a @ w[rank:].mT
    only_read = torch.linalg.pinv(b) @ u[:, rank:]
    unread = torch.linalg.svd(torch.cat([b, only_written.mT]))[2][len(b) + only_written.shape[1] :].mT
    columns = torch.cat([written, only_written, only_read, unread], 1)
    if columns.shape[0] != columns.shape[1] or not _regular(torch.linalg.svdvals(columns).flip(0)):
        return None
    ones, zeros = torch.ones_like, torch.zeros_like
    sizes = [s[:rank], only_written[0], only_read[0], unread[0]]
    after = [
        torch.cat([sizes[0], *(f(v) for f, v in zip(fs, sizes[1:], strict=True))])
        for fs in ((ones, zeros, zeros), (zeros, ones, zeros))
    ]
    return torch.linalg.inv(columns), (after[0], after[1])


def _regular(values: Tensor) -> bool:
    """Return whether a Gram matrix with these ascending eigenvalues is regular."""
    return bool(values[0] > _SINGULAR * values[-1])


def singular_values(structure: Structure, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the singular values of the weights into and out of each head.

    They are invariant under orthogonal matrices on the heads, and under permutations and signs of the other axes.

    Returns:
        By name of the tensor, for each kind of heads in it one tensor of shape (heads, values), in float64.
    """
    found: dict[str, list[Tensor]] = {}
    for name, _, _, slices in cell_slices(structure, tensors):
        found.setdefault(name, []).append(torch.linalg.svdvals(slices.double()).cpu())
    return found


# Scales and cells are balanced in turn until every matrix is this near to the identity, for at most so many rounds.
_SETTLED, _MOST_ROUNDS = 1e-13, 500
_MOST_POSITIVE, _STILL = 100, 1e-12  # by positive matrices alone
_PARTLY_SETTLED = 1e-11  # where cells have no balanced representative, and matrices with larger condition numbers


class Balanced(NamedTuple):
    """Result of balancing cells.

    Attributes:
        element: The element that balances the weights.
        singular: Indices of GL(d) blocks without a balanced representative.
        between: Indices of balanced GL(d) blocks between gains.
        notes: Notes on missed tolerances and on blocks without a balanced representative.
    """

    element: Element
    singular: set[int]
    between: list[int]
    notes: list[str]


def balanced_cells(factors: Factors, state: Gathered, *, partly: bool | None = None) -> Balanced:
    """Find the element that makes both Gram matrices of every cell equal and diagonal.

    The two matrices are those of the incoming and of the outgoing weights, divided by the gains. Scales and cells are
    balanced in turn. Each step lowers the squared norm, which is convex along geodesics of both together
    (docs/theory/canonical.md, 5). A matrix that acts on a cell changes only the squared norms of tensors that hold
    the cell.

    Args:
        factors: The factors of the group.
        state: The weights.
        partly: Whether to balance cells without a balanced representative as far as possible, or leave them unchanged.
            None follows ``state.wanted``.
    """
    structure, plan, tensors, wanted = factors.structure, state.plan, state.tensors, state.wanted
    between = usable(structure, tensors) if wants_matrices(wanted) else []
    counted = {structure.slots[index].tensor for index in np.unique(plan.slot_of[plan.parameter]).tolist()}
    mixed = {slot.tensor for slot in structure.slots if slot.offset in structure.dense_places}
    mixed = (mixed | tensors_between(structure)) & tensors.keys()
    partly = wanted.partly if partly is None else partly
    total = same = factors.identity("")
    first = len(structure.dense)  # blocks between gains come after the others
    singular: set[int] = set()
    # Cells on n > 2 axes of one tensor take n-th roots of their best singular values: by convexity, norms decrease.
    axes = [
        [slot for slot in structure.slots_of.get(name, ()) if slot.offset in structure.dense_places] for name in mixed
    ]
    count = max(map(len, axes), default=0)
    squares = Squares(plan, tensors, state.dtype)
    changes: list[float] = []
    while len(changes) < _MOST_ROUNDS and not stalled(changes, 40):
        whole = MovedTensors(factors, total, tensors)
        held = held_scales(structure, whole, wanted)
        gauge = ScaleGauge(plan, squares, wanted.scales, held, variance_scales(structure, whole))
        step = same.replaced(log_scale=torch.from_numpy(gauge.log_scale))
        squares.scale(gauge.log_scale)
        total = factors.compose(step, total)
        here = MovedTensors(factors, total, ConvertedTensors(tensors, doubled), mixed & counted, shifted=False)
        grams = list(enumerate(zip(*gram_matrices(structure, here), strict=True)))
        gains = MovedTensors(factors, total, ConvertedTensors(tensors, doubled))
        grams += [(first + cell, own) for cell, own in gram_matrices_between(structure, here, gains, between)]
        moved = max((mismatch(*own) for cell, own in grams if cell not in singular), default=0.0)
        partial = {cell: partial_balancing(*own) if partly else None for cell, own in grams if cell in singular}
        for cell, own in grams:
            found = partial.get(cell)
            for gram, diagonal in zip(own, found[1], strict=True) if found is not None else ():
                apart = float((gram - torch.diag(diagonal)).abs().max() / diagonal.max())
                moved = max(moved, apart if apart > _PARTLY_SETTLED else 0.0)
        changes.append(moved)
        if len(changes) > 1 and moved <= _SETTLED:
            break
        matrices = [*same.dense, *same.gained]
        for cell, (out, read) in grams:
            best = None if cell in singular else principal_balancing(out, read)
            if best is None:
                singular.add(cell)
                other = partial[cell] if cell in partial else partial_balancing(out, read) if partly else None
                best = other[0] if other is not None else matrices[cell]
            if count > 2:
                left, values, right = torch.linalg.svd(best)
                best = (left * values ** (1 / count)) @ right
            matrices[cell] = best
        parts = {"dense": tuple(matrices[:first]), "gained": tuple(matrices[first:])}
        total = factors.compose(same.replaced(**parts), total)
        inside = total.replaced(log_scale=same.log_scale)
        squares.renew(MovedTensors(factors, inside, ConvertedTensors(tensors, doubled), mixed, shifted=False))
    if partly and singular and moved > _SETTLED:  # cells that read one another have no balance of this kind either
        return balanced_cells(factors, state, partly=False)
    notes = [f"cells and scales were balanced to {moved:.1e} only"] if moved > _SETTLED else []
    if held_back := singular - structure.idle_cells:
        notes.append(
            f"{len(held_back)} cells under invertible matrices stay unchanged: the weights that write or read "
            "their units are linearly dependent"
        )
    regular = [cell for cell in between if first + cell not in singular]
    return Balanced(total, {cell for cell in singular if cell < first}, regular, notes)


def balance_cells(factors: Factors, state: Gathered) -> Canonical:
    """Bring all cells and scales to their canonical form, and sort units between gains by these gains.

    Args:
        factors: The factors of the group.
        state: The weights, which are moved.
    """
    structure = factors.structure
    if wants_matrices(state.wanted):
        order = in_order_of_gains(structure, state.tensors, usable(structure, state.tensors))
        state.move({"permutation": order})
    found = balanced_cells(factors, state)
    if structure.dense:
        state.reflected = [cell for cell in range(len(structure.dense)) if cell not in found.singular]
    state.placed = orbits_between(structure, found.between)
    return Canonical(found.element.parts, found.notes)


def balanced_by_positive(factors: Factors, tensors: Mapping[str, Tensor]) -> Canonical:
    """Return the positive matrices that make both Gram matrices of every head equal, head by head in turn.

    Args:
        factors: The factors of the group.
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
    note = f"{len(singular)} heads stay unchanged: the weights that write or read their units are linearly dependent"
    return Canonical({"dense": total.dense}, [note] * bool(singular))
