"""Canonical forms: one member for each orbit of a network's symmetry group."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym.symmetry.arrays import Bools, Floats
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.cells import gram_matrices, mismatch, partial_balancing, principal_balancing
from lightning_sym.symmetry.canonical.gauge import ScaleGauge
from lightning_sym.symmetry.canonical.norms import NOTHING, Plan, Squares, joint_sums, plan_of
from lightning_sym.symmetry.canonical.order import Gauged, find_order, find_signs
from lightning_sym.symmetry.canonical.planes import principal_phases
from lightning_sym.symmetry.canonical.streams import folding, positive, principal_turns
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.rotation import rotatable
from lightning_sym.symmetry.group.tilt import Tilts
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.tracing.capture import state_tensors
from lightning_sym.symmetry.translations import nearest
from lightning_sym.symmetry.views import ConvertedTensors, doubled

Scales = Literal["balanced", "unit"] | None

# Scales and cells are balanced in turn until no matrix is further from the identity, and so many times at most.
_MOST_SHIFTS, _STILL = 64, 1e-12  # how often shifts and all else are found in turn, until no entry moves by more
# The form of a moved copy is found for networks with fewer numbers than this: it takes a second or less.
_CHECKED = 2_000_000
# Forms of one orbit differ by rounding, relative to each tensor's largest entry; where they are not unique, by more.
_SAME_FORM = 1e-8
_SETTLED, _MOST_ROUNDS = 1e-13, 500
_PARTLY_SETTLED = 1e-11  # where cells have no balanced member, and matrices with larger condition numbers


@dataclass(frozen=True)
class Balance:
    """Incoming against outgoing norms of the units of one axis group.

    Attributes:
        incoming: Squared norm of what a unit's scale multiplies, times the exponent. Shape (size,), float64.
        outgoing: Squared norm of what the scale divides, times the exponent. Shape (size,), float64.
        difference: ``incoming - outgoing``. Shape (size,), float64.
        dead: Number of units with nothing coming in or nothing going out.
    """

    incoming: Tensor
    outgoing: Tensor
    difference: Tensor
    dead: int


@dataclass(frozen=True)
class CanonicalForm:
    """A network's canonical form, and how it was reached.

    Attributes:
        network: The canonical member of the orbit, in the dtype and on the device of the given network.
        element: The element that maps the given network to it.
        dead: For each axis group that holds dead units (incoming or outgoing weights all zero): which units, by their
            place in the group before sorting. Each of shape (size,), bool.
        sweeps: Passes over all scales that balancing took, Newton steps included.
        residual: Largest relative difference of incoming and outgoing norms that is left, unitless.
        converged: Whether all gauges of scales and shifts were reached.
        notes: What was left as it was, and why; and which axis groups have a form that depends on the orbit's member.
        difference: By how much the form of a randomly moved copy differs, relative to each tensor's largest entry,
            unitless; NaN if none was tried.
    """

    network: nn.Module
    element: Element
    dead: dict[str, Tensor]
    sweeps: int
    residual: float
    converged: bool
    notes: tuple[str, ...]
    difference: float = math.nan


def balance(symmetry: Symmetry, network: nn.Module) -> dict[str, Balance]:
    r"""Measure for every unit the norm of its incoming weights against that of its outgoing weights.

    For a unit with a free scale :math:`\lambda` whose weights move by :math:`w_k \to \lambda^{a_k} w_k`, gradient flow
    conserves :math:`\sum_k a_k w_k^2` (docs/theory/intertwiners.md, 5.1): incoming minus outgoing squared norm, each
    term weighted by its exponent. Weight decay drives it to 0. Where several scales belong to a unit, the one that both
    multiplies and divides weights is taken: with batch norm before the activation the scale of what the unit puts out,
    so that incoming means ``gamma^2 + beta^2``, and outgoing the next layer's columns. (The other scale, in front of
    the batch norm, only multiplies: gradient flow conserves the norm of the rows themselves.) Without a free scale
    (tanh, GELU) incoming means the first module's weights and biases, outgoing all others, and nothing is conserved.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.

    Returns:
        By the names of the axis groups, in their order.

    Raises:
        ValueError: If the network has another structure than the traced one.

    Note:
        One pass over the weights; computed in float64 on the CPU.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> balance(trace_symmetry(network, torch.randn(2, 5)), network)["0"].difference.shape
        torch.Size([8])
    """
    symmetry.require(network)
    plan = plan_of(symmetry)
    squares = Squares(plan, symmetry.tensors(network))
    slices = squares.slices(np.ones(plan.total))
    return dict(_balances(symmetry, plan, slices))


def _balances(symmetry: Symmetry, plan: Plan, slices: Floats) -> Iterator[tuple[str, Balance]]:
    up, down = plan.up @ slices, plan.down @ slices
    has_up = np.diff(plan.up.indptr) > 0
    has_down = np.diff(plan.down.indptr) > 0
    structure = symmetry.structure
    for index, group in enumerate(symmetry.groups):
        table = structure.scale_table[index]
        both = np.flatnonzero(has_up[table[0]] & has_down[table[0]])
        if table.shape[1] and not group.dense:
            chosen = table[:, both[0] if len(both) else 0]
            incoming, outgoing = up[chosen], down[chosen]
            one_sided = not len(both)
        else:
            columns = structure.columns[index]
            incoming = slices[columns[:, plan.first[index]]].sum(1)
            later = ~plan.first[index] & plan.parameter[columns[0]]
            outgoing = slices[columns[:, later]].sum(1) + joint_sums(symmetry, plan, slices)[group.units.numpy()]
            one_sided = not later.any() and not outgoing.any()
        dead = incoming <= NOTHING if one_sided else (incoming <= NOTHING) | (outgoing <= NOTHING)
        one, two = torch.from_numpy(incoming), torch.from_numpy(outgoing)
        yield group.name, Balance(one, two, one - two, int(dead.sum()))


def canonicalize(
    symmetry: Symmetry,
    network: nn.Module,
    *,
    scales: Scales = "balanced",
    signs: bool = True,
    order: bool = True,
    inplace: bool = False,
    check: bool | None = None,
) -> CanonicalForm:
    r"""Return the canonical member of a network's orbit: the same function, the same weights for every member.

    **Scales** (docs/theory/intertwiners.md, 5.2). A scale that only multiplies weights (the one in front of a batch
    norm) has no member of smallest norm; the weights that it multiplies get squared norm 1 (or their number, if it acts
    on the rows of several modules, as does the scale of a residual stream on all its last batch norms). Weights that
    are normalised that way are constant, so that a scale that otherwise only divides such weights is one-sided, too:
    hence :math:`\gamma_c^2 + \beta_c^2 = 1`. The rule follows from the exponents alone. The scales that are left, which
    multiply some weights and divide others, take

    - ``"balanced"``: the values of smallest L2 norm: incoming and outgoing norms are equal. The squared norm is a
      convex function of the logarithms; cyclic sweeps with the factor :math:`(q_- / q_+)^{1/4}`, then Newton's method.
      Gains between which a stream rotates are 1 before that, so that nothing else depends on rotations.
    - ``"unit"``: incoming weights and bias of norm 1, layer by layer; for a residual stream those of the first module
      that writes into it.

    **Shifts** (docs/theory/intertwiners.md, 3.6). Biases that later layers, batch norms or a softmax take off are 0,
    means that norms take off are 0, and what is taken off one another has the least sum of squares. Where a layer norm
    is read without a bias (2.12), its bias equals its gain.

    **Signs.** The gain of a norm layer is positive where what reads it undoes its sign. Otherwise the entry of largest
    magnitude among the incoming weights and bias is positive; if the largest ones tie and disagree, the sum of the
    cubes is, then the plain sum. Entries count whose sign depends on no other sign that is still open (of a unit, or
    inside a dense cell).

    **Order** (docs/theory/intertwiners.md, 5.3). Within its cell, dead units last; then by falling norm of the incoming
    weights; ties by the norm of all other weights, then by each tensor's norm, sums of cubes and sums of entries, and
    sums weighted by the place of the units on the other side. Units that are alike in all of these (copies, dead units)
    keep their order, with a note.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed unless ``inplace``.
        scales: The gauge of the scales. None leaves scales and shifts as they are.
        signs: Whether to fix signs.
        order: Whether to sort units and blocks.
        inplace: Whether to change the network itself.
        check: Whether to find the form of a randomly moved copy, too, and to compare: where they differ by more than
            1e-8 of a tensor's largest entry, a note names the axis groups. By default for networks with at most 2
            million numbers.

    Returns:
        The canonical form. Computed in float64, stored in the network's dtype.

    Raises:
        ValueError: If ``scales`` is unknown, the network has another structure than the traced one, or a weight is not
            finite.

    Note:
        Units whose incoming or outgoing weights are all zero are dead: their scale stays, everything else is found as
        if they were absent, they come last, and `CanonicalForm.dead` reports them. For them alone the form depends on
        the orbit's member.
        Where any invertible matrix acts (`AxisGroup.dense`: the values of an attention head), what is put out and what
        reads it get equal, diagonal Gram matrices, largest entry first; without ``scales`` they stay, with a note. So
        do planes (`AxisGroup.phase`), which are turned to the principal axes of the first weights that hold them.
        Streams are turned to the principal axes of what stands on them (`AxisGroup.rotations`) where all else is fixed,
        too; otherwise they stay, with a note. Sorting is not continuous: near networks may have
        far canonical forms (docs/theory/intertwiners.md, 5.4, 5.5).

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> other = symmetry.act(symmetry.sample(), network)
        >>> one, two = (canonicalize(symmetry, member).network for member in (network, other))
        >>> torch.allclose(one[0].weight, two[0].weight, rtol=0, atol=1e-12)
        True
    """
    if scales not in ("balanced", "unit", None):
        raise ValueError(f"scales must be 'balanced', 'unit' or None, got {scales!r}.")
    symmetry.require(network)
    course = _course(symmetry, symmetry.tensors(network), scales, signs=signs, order=order)
    difference, notes = math.nan, list(course.notes)
    size = sum(tensor.numel() for tensor in state_tensors(network).values())
    if check or (check is None and size <= _CHECKED):
        apart = _apart(course, network, signs=signs, order=order)
        difference = max(apart.values(), default=0.0)
        notes += _not_unique(symmetry, apart)
    return CanonicalForm(
        symmetry.act(course.element, network, inplace=inplace),
        course.element,
        course.dead or {},
        course.sweeps,
        course.residual,
        course.converged and not course.unsettled,
        tuple(dict.fromkeys(notes)),
        difference,
    )


def _apart(course: "_Course", network: nn.Module, *, signs: bool, order: bool) -> dict[str, float]:
    """Return how far the form of a moved copy is from a form, by tensor, relative to the largest entry that it had."""
    symmetry, scales = course.symmetry, course.scales
    exact = ConvertedTensors({name: tensor.detach() for name, tensor in symmetry.tensors(network).items()}, doubled)

    def moved_copy(mixing: bool) -> dict[str, Tensor]:
        """Return a copy that was moved by all that the form is to undo."""
        element = symmetry.sample(
            torch.Generator().manual_seed(0),
            scale=0.5 if scales is not None else 0.0,
            permutations=order,
            signs=signs,
            mixing=mixing,
            shifts=scales is not None,
        )
        return dict(MovedTensors(symmetry.factors, element, exact).items())

    try:
        moved = moved_copy(mixing=scales == "balanced" and signs and order)
    except ValueError:  # a gain of 0 lets no rotation pass
        moved = moved_copy(mixing=False)
    other = _course(symmetry, moved, scales, signs=signs, order=order).tensors
    found = {}
    for name, tensor in course.tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            own = tensor.to("cpu", torch.float64)
            apart = torch.where(own == other[name], 0.0, (own - other[name]).abs()).max()  # masks hold infinities
            # A bias that becomes 0 is so up to rounding of what it was.
            sizes = [t[t.isfinite()].abs().max() for t in (own, exact[name], moved[name]) if bool(t.isfinite().any())]
            found[name] = float(apart / max([*sizes, torch.tensor(1e-300, dtype=torch.float64)]))
    return found


def _not_unique(symmetry: Symmetry, apart: Mapping[str, float]) -> list[str]:
    """Say which axis groups have another form for another member of the orbit."""
    wrong = {name: value for name, value in apart.items() if not value <= _SAME_FORM}
    if not wrong:
        return []
    groups = [group.name for group in symmetry.groups if {place.tensor for place in group.occurrences} <= wrong.keys()]
    groups = groups or [g.name for g in symmetry.groups if not {p.tensor for p in g.occurrences}.isdisjoint(wrong)]
    names = sorted(wrong, key=lambda name: -wrong[name])
    tensors = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = f" (axis groups {', '.join(groups)})" if groups else ""
    worst = max(wrong.values())
    return [f"not unique: the form of another member of the orbit differs by {worst:.1e} of {tensors}{where}"]


def canonical_element(symmetry: Symmetry, network: nn.Module) -> Element:
    """Return the element that brings a network to its canonical form, or nearer to it; see :func:`canonicalize`."""
    return _course(symmetry, symmetry.tensors(network), "balanced", signs=True, order=True, partly=True).element


def balanced_element(symmetry: Symmetry, network: nn.Module, *, signs: bool) -> Element:
    """Return the element that brings a network to the balanced gauge, its units where they are.

    Holds no copy of the network, but for the squares of its weights.

    Args:
        symmetry: The network's.
        network: Not changed.
        signs: Whether gains between which streams rotate may change their signs; they are positive then.
    """
    course = _Course(symmetry, symmetry.tensors(network), "balanced", settling=signs, kept=False, partly=True)
    _up_to_rotations(course, signs=False, order=False)
    if signs and symmetry.structure.rotations:
        course.move(positive(symmetry, course.tensors))
    return course.element


def _course(
    symmetry: Symmetry,
    given: Mapping[str, Tensor],
    scales: Scales,
    *,
    signs: bool,
    order: bool,
    partly: bool = False,
) -> "_Course":
    """Bring a network's weights to their canonical form."""
    course = _Course(symmetry, given, scales, settling=signs, partly=partly)
    if symmetry.structure.rotations and scales == "balanced" and signs and order:
        # Scales, shifts and cells do not depend on rotations, signs and order do.
        _up_to_rotations(course, signs=False, order=False)
        course.move(positive(symmetry, course.tensors))
        turn, notes = principal_turns(symmetry, course.tensors)
        course.move(turn)
        _up_to_rotations(course, signs=True, order=True)
        course.notes += notes
    else:
        _up_to_rotations(course, signs=signs, order=order)
    return course


class _Course:
    """A network's weights on their way to the canonical form.

    Attributes:
        element: What has brought them to where they are.
        dead: As found where no unit had been moved yet.
        sweeps: Of all passes together.
        residual: Of the last pass, as `converged` and `notes`.
        unsettled: By how much shifts still changed when they were found for the last time.
        settling: Whether factors settle weights first: half turns.
        kept: Whether moved tensors are kept, in double precision, or made anew whenever one is asked for.
        partly: Whether cells without a balanced member are balanced as far as can be, which leaves rotations of them.
        dtype: In which weights are held to sum up their squares; None for that of `tensors`.
        reflected: Dense cells of which signs only are left to find; None while no matrix has acted on any.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        given: Mapping[str, Tensor],
        scales: Scales,
        *,
        settling: bool = True,
        kept: bool = True,
        partly: bool = False,
    ) -> None:
        self.symmetry, self.scales, self.settling, self.kept, self.partly = symmetry, scales, settling, kept, partly
        self.element = self.identity = symmetry.identity()
        self.dead: dict[str, Tensor] | None = None
        self.sweeps, self.residual, self.converged, self.unsettled = 0, 0.0, True, 0.0
        self.notes: list[str] = []
        self.reflected: list[int] | None = None
        self._given = {name: tensor.detach() for name, tensor in given.items()}
        self._here: Mapping[str, Tensor] | None = self._given
        exact = any(tensor.dtype == torch.float64 for tensor in self._given.values())
        self.dtype = None if kept or exact else torch.float32

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The parameters and buffers where they are: as they were given, and in float64 once they have moved."""
        if self._here is None:
            exact = ConvertedTensors(self._given, doubled)
            here = MovedTensors(self.symmetry.factors, self.element, exact)
            self._here = dict(here.items()) if self.kept else here
        return self._here

    def move(self, element: Element) -> None:
        """Let an element act, when somebody looks."""
        if not self.symmetry.factors.is_identity(element):
            self.element, self._here = self.symmetry.compose(element, self.element), None


def _up_to_rotations(course: _Course, *, signs: bool, order: bool) -> None:
    """Bring weights to their canonical form, up to rotations of streams."""
    structure = course.symmetry.structure
    if course.scales is None or not (structure.shifts or structure.tilts):
        return _up_to_shifts(course, signs=signs, order=order)
    # Shifts and all else in turn: biases that take up signs, or gains in a stream, say anew what shifts there are.
    untilted: list[str] = []
    changes: list[float] = []
    while len(changes) < _MOST_SHIFTS and not _stalled(changes, 5):
        tilts, untilted = Tilts(course.symmetry.factors).to_gains(course.tensors)
        tilt = course.identity.replaced(tilt=tilts)
        tensors = MovedTensors(course.symmetry.factors, tilt, course.tensors) if tilts else course.tensors
        step = nearest(structure.shifts, tensors, course.symmetry.parameter_names)
        changes.append(max((float(vector.abs().max()) for vector in (step, *tilts) if vector.numel()), default=0.0))
        if len(changes) > 1 and changes[-1] <= _STILL:
            break
        course.move(course.symmetry.compose(course.identity.replaced(shift=step), tilt))
        _up_to_shifts(course, signs=signs, order=order)
    else:
        course.unsettled = changes[-1]
        course.notes.append(f"shifts and all else were found to {course.unsettled:.1e} only")
    course.notes += untilted


def _stalled(changes: Sequence[float], rounds: int) -> bool:
    """Return whether the last rounds did not halve the least change: coupled cells may go to and fro for ever."""
    return len(changes) > rounds and min(changes[-rounds:]) > min(changes[:-rounds]) / 2


def _up_to_shifts(course: _Course, *, signs: bool, order: bool) -> None:
    """Bring weights to their canonical form, up to rotations and shifts."""
    if course.scales is None or not course.symmetry.structure.phases:
        return _up_to_phases(course, signs=signs, order=order)
    # A phase changes no norm of a unit's: scales first, then phases, then signs and all else.
    _up_to_phases(course, signs=False, order=False)
    phase, unclear = principal_phases(course.symmetry.structure, course.tensors)
    course.move(course.identity.replaced(phase=phase))
    _up_to_phases(course, signs=signs, order=order)
    if unclear.any():
        course.notes.append(f"{unclear.sum()} planes are not turned, as none of their axes is longer")


def _up_to_phases(course: _Course, *, signs: bool, order: bool) -> None:
    """Bring weights to their canonical form, up to rotations, shifts and phases."""
    symmetry, scales = course.symmetry, course.scales
    if scales is None or not symmetry.structure.dense:
        return _up_to_cells(course, signs=signs, order=order)
    cells, stay, notes = _balanced_cells(symmetry, course.tensors, scales, course.dtype, partly=course.partly)
    course.move(cells)
    course.reflected = [cell for cell in range(len(symmetry.structure.dense)) if cell not in stay]
    _up_to_cells(course, signs=signs, order=order)
    course.notes += notes


def _up_to_cells(course: _Course, *, signs: bool, order: bool) -> None:
    """Bring weights to their canonical form, up to all but permutations, scales and signs."""
    flipped = _pass(course, signs=signs, order=order)
    # What biases take up of signs counts for all that comes after them: again, until no more signs change.
    for _ in course.symmetry.structure.absorbed:
        if not flipped:
            break
        flipped = _pass(course, signs=signs, order=order)


def _balanced_cells(
    symmetry: Symmetry, tensors: Mapping[str, Tensor], scales: Scales, dtype: torch.dtype | None, *, partly: bool
) -> tuple[Element, set[int], list[str]]:
    """Return the element that makes both Gram matrices of every head equal and diagonal.

    The two matrices are those of the incoming and of the outgoing weights. Scales and heads are balanced in turn. Each
    step lowers the squared norm, which is convex along geodesics of both together (docs/theory/intertwiners.md, 5.5).
    A matrix that acts on a head changes only the squared norms of tensors that hold the head.

    Args:
        symmetry: The group.
        tensors: Parameters and buffers, by name.
        scales: How scales are chosen.
        dtype: What squares are computed in.
        partly: Whether to balance heads without a balanced representative as far as possible, or leave them unchanged.

    Returns:
        The element, the indices of heads without a balanced representative, and notes.
    """
    structure, plan = symmetry.structure, plan_of(symmetry)
    counted = {structure.slots[index].tensor for index in np.unique(plan.slot_of[plan.parameter]).tolist()}
    mixed = {
        slot.tensor for slot in structure.slots if slot.offset in structure.dense_places and slot.tensor in tensors
    }
    total = symmetry.identity()
    singular: set[int] = set()
    squares = Squares(plan, tensors, dtype)
    changes: list[float] = []
    while len(changes) < _MOST_ROUNDS and not _stalled(changes, 40):
        here = MovedTensors(symmetry.factors, total, tensors, shifted=False)
        gauge = ScaleGauge(symmetry, plan, squares, scales, folding(symmetry, here))
        step = symmetry.identity().replaced(log_scale=torch.from_numpy(gauge.log_scale))
        squares.scale(gauge.log_scale)
        total = symmetry.compose(step, total)
        here = MovedTensors(symmetry.factors, total, ConvertedTensors(tensors, doubled), mixed & counted, shifted=False)
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
        dense = list(symmetry.identity().dense)
        for cell, (out, read) in grams:
            found = None if cell in singular else principal_balancing(out, read)
            if found is None:
                singular.add(cell)
                other = partial[cell] if cell in partial else partial_balancing(out, read) if partly else None
                found = other[0] if other is not None else dense[cell]
            dense[cell] = found
        total = symmetry.compose(symmetry.identity().replaced(dense=tuple(dense)), total)
        inside = total.replaced(log_scale=symmetry.identity().log_scale)
        squares.renew(MovedTensors(symmetry.factors, inside, ConvertedTensors(tensors, doubled), mixed, shifted=False))
    if partly and singular and moved > _SETTLED:  # cells that read one another have no balance of this kind, either
        return _balanced_cells(symmetry, tensors, scales, dtype, partly=False)
    notes = [f"cells and scales were balanced to {moved:.1e} only"] if moved > _SETTLED else []
    if singular:
        notes.append(
            f"{len(singular)} cells on which invertible matrices act stay as they are: the weights that write or read "
            "their units are linearly dependent"
        )
    return total, singular, notes


def _pass(course: _Course, *, signs: bool, order: bool) -> bool:
    """Apply canonical permutations, scales and signs, and return whether any sign changed.

    The step ignores the constants that changes of sign add to biases.
    """
    if course.settling:
        course.move(course.symmetry.factors.settled(course.symmetry.fingerprint, course.tensors))
    symmetry, scales, tensors, notes = course.symmetry, course.scales, course.tensors, course.notes
    plan = plan_of(symmetry)
    squares = Squares(plan, tensors, course.dtype)
    _check_finite(tensors, squares)
    gauge = ScaleGauge(symmetry, plan, squares, scales, folding(symmetry, tensors))
    notes[:] = gauge.notes
    # A group without a scale of its own does not order the living units that it touches; it counts as absent.
    determined = plan.used @ gauge.dead.astype(np.float64) == 0
    gauged = Gauged(symmetry, plan, tensors, gauge.log_scale, determined)
    slices = squares.slices(gauged.scale**2 * determined)
    dead = _dead_units(symmetry, plan, slices, gauge.dead)
    sign = find_signs(symmetry, plan, gauged, course.reflected) if signs else course.identity.sign.numpy()
    permutation = course.identity.permutation.numpy()
    if order:
        last = [dead.get(group.name, torch.zeros(group.size, dtype=torch.bool)).numpy() for group in symmetry.groups]
        permutation = find_order(symmetry, plan, slices, gauged, last, notes)
    if symmetry.structure.dense and scales is None:
        notes.append(
            f"{len(symmetry.structure.dense)} cells on which invertible matrices act stay as they are: the form is "
            "canonical up to these matrices only"
        )
    if symmetry.structure.phases and scales is None:
        notes.append(f"{symmetry.structure.phases} planes are not turned: the form is canonical up to phases only")
    stiff = len(symmetry.structure.rotations)
    if scales == "balanced" and signs and order:
        stiff -= len(rotatable(symmetry.structure, tensors))
    if stiff:
        notes.append(
            f"{stiff} streams are not rotated (with scales='balanced', signs and order only, and between gains other "
            "than zero): the form is canonical up to these rotations only"
        )
    course.dead = dead if course.dead is None else course.dead
    course.sweeps, course.residual, course.converged = course.sweeps + gauge.sweeps, gauge.residual, gauge.converged
    units, scale, flips = (torch.from_numpy(array) for array in (permutation, gauge.log_scale, sign))
    inside, flips = _reflections(symmetry, flips)
    course.move(course.identity.replaced(dense=inside))
    course.move(course.identity.replaced(permutation=units, log_scale=scale, sign=flips))
    return bool((sign < 0).any())


def _reflections(symmetry: Symmetry, sign: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Part signs of units in dense cells, where matrices do it all, from all others."""
    structure = symmetry.structure
    dense, others = list(symmetry.identity().dense), sign.clone()
    for units, table in zip(structure.orbits, structure.sign_table, strict=True):
        own = structure.cell_of[units]
        for cell in np.unique(own[own >= 0]).tolist():
            generators = torch.from_numpy(table[own == cell])
            dense[cell] = torch.diag(sign[generators].prod(1))
            others[generators] = 1.0
    return tuple(dense), others


def _check_finite(tensors: Mapping[str, Tensor], squares: Squares) -> None:
    for name in tensors:
        # Summing the squares is cheaper for large tensors than looking at every entry again.
        finite = math.isfinite(squares.total(name)) if name in squares else bool(torch.isfinite(tensors[name]).all())
        if not finite:
            raise ValueError(
                f"{name} holds values that are not finite; expected a network whose weights are all finite."
            )


def _dead_units(symmetry: Symmetry, plan: Plan, slices: Floats, dead_scales: Bools) -> dict[str, Tensor]:
    """Return for each axis group which units are dead, where any are."""
    result = {}
    for (name, found), table in zip(_balances(symmetry, plan, slices), symmetry.structure.scale_table, strict=True):
        units = dead_scales[table].any(1)
        if found.dead and not table.shape[1]:
            units = ((found.incoming <= NOTHING) | (found.outgoing <= NOTHING)).numpy()
        if units.any():
            result[name] = torch.from_numpy(units)
    return result
