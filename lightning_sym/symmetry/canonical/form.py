"""Canonical forms: one member for each orbit of a network's symmetry group."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym.symmetry.arrays import Bools
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element, Part
from lightning_sym.symmetry.group.factor import Draw, Factor, members
from lightning_sym.symmetry.group.gathered import Gathered, Rung, Scales, Wanted, stalled
from lightning_sym.symmetry.group.norms import Squares, sides_of_units
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.symmetry.views import ConvertedTensors, doubled

_MOST_TURNS, _STILL = 64, 1e-12  # how often shifts and all else are found in turn, until no entry moves by more
# The form of a moved copy is found for networks with fewer numbers than this: it takes a second or less.
_CHECKED = 2_000_000
# Forms of one orbit differ by rounding, relative to each tensor's largest entry; where they are not unique, by more.
_SAME_FORM = 1e-8


@dataclass(frozen=True)
class Balance:
    """Incoming against outgoing norms of the units of one axis group.

    Attributes:
        incoming: Squared norm of the weights that a unit's scale multiplies, times the exponent. Shape (size,),
            float64.
        outgoing: Squared norm of the weights that it divides, times the exponent. Shape (size,), float64.
        difference: ``incoming - outgoing``. Shape (size,), float64.
        dead: Number of units with all-zero incoming or outgoing weights.
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
        residual: Largest remaining relative difference of incoming and outgoing norms, unitless.
        converged: Whether all gauges of scales and shifts were reached.
        notes: Parts that were not changed, with reasons, and axis groups with a form that depends on the point of the
            orbit.
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

    For a unit with an independent scale :math:`\lambda` acting by :math:`w_k \to \lambda^{a_k} w_k`, gradient flow
    conserves :math:`\sum_k a_k w_k^2` (docs/theory/canonical.md, 1): incoming minus outgoing squared norm, each
    term weighted by its exponent. Weight decay drives it to 0. Where several scales belong to a unit, the one that both
    multiplies and divides weights is taken. With batch norm before the activation this is the scale of the unit's
    output, so that incoming means ``gamma^2 + beta^2``, and outgoing the next layer's columns. (The other scale, before
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
    plan = symmetry.factors.plan
    slices = Squares(plan, symmetry.tensors(network)).slices(np.ones(plan.total))
    found = {}
    for group, sides in zip(symmetry.groups, sides_of_units(plan, slices), strict=True):
        one, two = torch.from_numpy(sides.incoming), torch.from_numpy(sides.outgoing)
        found[group.name] = Balance(one, two, one - two, int(sides.dead.sum()))
    return found


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
    r"""Return the canonical form of a network: the same function, the same weights for every point of the orbit.

    **Scales** (docs/theory/canonical.md, 2). A scale that only multiplies weights (the one before a batch norm) has no
    value of smallest norm. Its weights get squared norm 1 (or their number, if it acts on the rows of several modules,
    as does the scale of a residual stream on all its last batch norms). Weights that are normalised this way are
    constant, so that a scale that otherwise only divides such weights is one-sided as well: hence
    :math:`\gamma_c^2 + \beta_c^2 = 1`. The rule follows from the exponents alone. The other scales, which
    multiply some weights and divide others, take

    - ``"balanced"``: the values of smallest L2 norm with all else fixed: incoming and outgoing norms are equal. The
      squared norm is a convex function of the logarithms; cyclic sweeps with the factor :math:`(q_- / q_+)^{1/4}`,
      then Newton's method. Gains with a rotated stream between them are set to 1 before; then no other step depends
      on rotations. These gains, and the shifts below, cost norm: the form is the point of smallest norm of the orbit
      only where there are neither. :func:`lightning_sym.orbit.least_norm` descends to that point in any network.
    - ``"unit"``: incoming weights and bias of norm 1, layer by layer; for a residual stream those of the first module
      that writes into it.

    **Shifts** (docs/theory/translations.md). Biases that later layers, batch norms or a softmax cancel are 0. Means
    that norms subtract are 0, and biases that cancel one another have the least sum of squares. Where a layer norm
    is read without a bias, its bias equals its gain (docs/theory/transformers.md, 4).

    **Signs.** The gain of a norm layer is positive if its readers can undo its sign. Otherwise the entry of largest
    magnitude among the incoming weights and bias is positive; if the largest ones tie and disagree, the sum of the
    cubes is, then the plain sum. Only entries with a sign that depends on no other open sign count (of a unit, or
    inside a GL(d) block), and those last that matrices or rank-one maps change. If every entry depends on an even
    number of open signs, the one that flips the largest entries stays: flipping all changes nothing.

    **Order** (docs/theory/canonical.md, 3). Within its cell, dead units last; then by falling norm of the incoming
    weights; ties by the norm of all other weights, then by each tensor's norm, sums of cubes and sums of entries, and
    sums weighted by the place of the units on the other side. Units that agree in all of these (copies, dead units)
    keep their order, with a note.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed unless ``inplace``.
        scales: The gauge of the scales. None leaves scales and shifts unchanged.
        signs: Whether to fix signs.
        order: Whether to sort units and blocks.
        inplace: Whether to change the network itself.
        check: Whether to compute the form of a randomly moved copy and to compare: where they differ by more than
            1e-8 of a tensor's largest entry, a note names the axis groups. By default for networks with at most 2
            million numbers.

    Returns:
        The canonical form. Computed in float64, stored in the network's dtype.

    Raises:
        ValueError: If ``scales`` is unknown, the network has another structure than the traced one, or a weight is not
            finite.

    Note:
        Units with all-zero incoming or outgoing weights are dead: their scale is kept, everything else is computed as
        if they were absent, they come last, and `CanonicalForm.dead` reports them. For them alone the form depends on
        the orbit's member.
        Where any invertible matrix acts (`AxisGroup.dense`: the values of an attention head), incoming and outgoing
        weights get equal, diagonal Gram matrices, largest entry first; without ``scales`` they are kept, with a note.
        Where matrices act between gains (`AxisGroup.gained`), gains become 1 before; they are kept unless all is fixed.
        The same holds for rotary pairs (`AxisGroup.phase`): they are rotated to the principal axes of the first weights
        that hold them. Streams are rotated to the principal axes of their readers and writers (`AxisGroup.rotations`)
        if all else is fixed; otherwise they are kept, with a note. Sorting is not continuous: near networks may have
        far canonical forms (docs/theory/canonical.md, 4, 5).

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
    course = _Course(symmetry, symmetry.tensors(network), Wanted(scales, signs, order)).run()
    difference, notes = math.nan, list(course.notes)
    size = sum(tensor.numel() for tensor in state_tensors(network).values())
    if check or (check is None and size <= _CHECKED):
        apart = _apart(course, network)
        difference = max(apart.values(), default=0.0)
        notes += _not_unique(symmetry, apart)
    return CanonicalForm(
        symmetry.act(course.element, network, inplace=inplace),
        course.element,
        {symmetry.groups[index].name: torch.from_numpy(units) for index, units in (course.lifeless or {}).items()},
        course.sweeps,
        course.residual,
        course.converged and not course.unsettled,
        tuple(dict.fromkeys(notes)),
        difference,
    )


def _apart(course: "_Course", network: nn.Module) -> dict[str, float]:
    """Return the distance between the forms of a copy and of the network, by tensor, relative to its largest entry."""
    symmetry, wanted = course.symmetry, course.wanted
    exact = ConvertedTensors({name: tensor.detach() for name, tensor in symmetry.tensors(network).items()}, doubled)

    draw = Draw(
        torch.Generator().manual_seed(0),
        scale=0.5 if wanted.scales is not None else 0.0,
        permutations=wanted.order,
        signs=wanted.signs,
        mixing=wanted == Wanted("balanced"),
        shifts=wanted.scales is not None,
        closed=symmetry.factors.closed(exact),
    )
    # By all that the form is to undo.
    moved = dict(MovedTensors(symmetry.factors, symmetry.drawn(draw), exact).items())
    other = _Course(symmetry, moved, wanted).run().tensors
    found = {}
    for name, tensor in course.tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            own = tensor.to("cpu", torch.float64)
            apart = torch.where(own == other[name], 0.0, (own - other[name]).abs()).max()  # masks hold infinities
            # A bias that becomes 0 is exact up to rounding of its former value.
            sizes = [t[t.isfinite()].abs().max() for t in (own, exact[name], moved[name]) if bool(t.isfinite().any())]
            found[name] = float(apart / max([*sizes, torch.tensor(1e-300, dtype=torch.float64)]))
    return found


def _not_unique(symmetry: Symmetry, apart: Mapping[str, float]) -> list[str]:
    """List the axis groups with a form that depends on the point of the orbit."""
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
    return _Course(symmetry, symmetry.tensors(network), Wanted("balanced", partly=True)).run().element


def settled_element(symmetry: Symmetry, network: nn.Module) -> Element | None:
    """Return the element of the steps that need no sums of squares; None if there is nothing to do."""
    course = _Course(symmetry, symmetry.tensors(network), Wanted(None), kept=False).settle()
    return None if course.element is course.identity else course.element


def balanced_element(symmetry: Symmetry, network: nn.Module, *, signs: bool) -> Element:
    """Return the element that brings a network to the balanced gauge, its units where they are.

    Holds no copy of the network, but for the squares of its weights.

    Args:
        symmetry: The network's.
        network: Not changed.
        signs: Whether gains around rotated streams may change their signs; they become positive then.
    """
    wanted = Wanted("balanced", signs=signs, order=False, partly=True)
    return _Course(symmetry, symmetry.tensors(network), wanted, kept=False).run(whole=False).element


def least_element(symmetry: Symmetry, tensors: Mapping[str, Tensor], *, cells: bool) -> Element:
    """Return the element of least sum of squares over scales, and GL(d) blocks if wanted; all else stays.

    Args:
        symmetry: The network's.
        tensors: Parameters as :meth:`Symmetry.tensors` gives them, or others that move alike.
        cells: Whether GL(d) blocks move.
    """
    wanted = Wanted("balanced", signs=False, order=False, partly=True)
    only = ("log_scale", "dense") if cells else ("log_scale",)
    return _Course(symmetry, tensors, wanted, kept=False, only=only).run(whole=False).element


class _Course(Gathered):
    """A network's weights on their way to the canonical form: factors are asked, rung by rung.

    Args:
        symmetry: The network's.
        given: Its tensors.
        wanted: The form.
        kept: Whether moved tensors are kept, or computed again on request.
        only: The names of the factors that are asked; None for all.

    Attributes:
        element: The product of all elements so far.
        lifeless: The dead units, as found where no unit had been moved yet.
        sweeps: Number of passes together.
        residual: Residual of the last pass, like `converged` and `notes`.
        unsettled: Last change of the quantities that are computed in turn.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        given: Mapping[str, Tensor],
        wanted: Wanted,
        *,
        kept: bool = True,
        only: Collection[str] | None = None,
    ) -> None:
        self._given = {name: tensor.detach() for name, tensor in given.items()}
        exact = any(tensor.dtype == torch.float64 for tensor in self._given.values())
        names = [group.name for group in symmetry.groups]
        dtype = None if kept or exact else torch.float32
        super().__init__(symmetry.factors.plan, wanted, names, symmetry.weight_names, dtype)
        self.symmetry, self._kept = symmetry, kept
        asked = (own for own in symmetry.factors if only is None or own.name in only)
        self._asked = [own for own in asked if own.concerned(wanted)]
        self.element = self.identity = symmetry.identity()
        self.lifeless: dict[int, Bools] | None = None
        self.sweeps, self.residual, self.converged, self.unsettled = 0, 0.0, True, 0.0
        self.notes: list[str] = []
        self._here: Mapping[str, Tensor] | None = self._given

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The current parameters and buffers: the given ones, and in float64 once they have moved."""
        if self._here is None:
            exact = ConvertedTensors(self._given, doubled)
            here = MovedTensors(self.symmetry.factors, self.element, exact)
            self._here = dict(here.items()) if self._kept else here
        return self._here

    def move(self, parts: Mapping[str, Part]) -> None:
        """Let parts of factors act, when somebody looks."""
        element = self.identity.replaced(**parts)
        if not self.symmetry.factors.is_identity(element):
            self.element, self._here = self.symmetry.compose(element, self.element), None

    def run(self, whole: bool = True) -> "_Course":
        """Bring the weights to their form; only up to signs and order unless `whole`."""
        self._find(Rung.LAST, whole)
        return self

    def settle(self) -> "_Course":
        """Let factors act that are asked before anything is gathered."""
        parts: dict[str, Part] = {}
        for factor in self._on(Rung.EACH):
            parts |= factor.canonical(self).parts
        self.move(parts)
        return self

    def _on(self, rung: Rung) -> list[Factor[Any]]:
        return [own for own in self._asked if own.rung == rung]

    def _find(self, rung: Rung, whole: bool) -> None:
        """Let the factors of a rung, and of all after it, bring weights to their form."""
        if rung == Rung.EACH:
            return self._pass_until_signs_stay(whole)
        factors, behind = self._on(rung), Rung(rung + 1)
        if rung == Rung.IN_TURN and factors:
            return self._find_in_turn(factors, whole)
        if rung in (Rung.LAST, Rung.SIZED) and factors:
            self._find(behind, False)
        notes = self._ask(factors)
        if whole or not factors or rung != Rung.LAST:
            self._find(behind, whole)
        if rung == Rung.LAST and factors and whole and any(own.by_signs for own in self._asked):
            notes = self._ask(factors)
            self._find(behind, whole)
        self.notes += notes

    def _ask(self, factors: Sequence[Factor[Any]]) -> list[str]:
        """Let factors act by themselves, one after the other, and return their notes."""
        notes: list[str] = []
        for factor in factors:
            found = factor.canonical(self)
            self.move(found.parts)
            notes += found.notes
        return notes

    def _find_in_turn(self, factors: Sequence[Factor[Any]], whole: bool) -> None:
        """Alternate between some factors and all others until nothing changes, as each moves the others' weights."""
        changes: list[float] = []
        while len(changes) < _MOST_TURNS and not stalled(changes, 5):
            step, here, notes = self.identity, self.tensors, list[str]()
            change = 0.0
            for factor in factors:
                trial = copy.copy(self)
                trial._here = here
                found = factor.canonical(trial)
                notes += found.notes
                own = self.identity.replaced(**found.parts)
                sizes = [
                    float(each.abs().max()) for name in found.parts for each in members(own.parts[name]) if each.numel()
                ]
                change = max([change, *sizes])
                step = self.symmetry.compose(own, step)
                here = MovedTensors(self.symmetry.factors, own, here)
            changes.append(change)
            if len(changes) > 1 and change <= _STILL:
                break
            self.move(step.parts)
            self._find(Rung.SIZED, whole)
        else:
            self.unsettled = changes[-1]
            self.notes.append(f"shifts and all else were found to {self.unsettled:.1e} only")
        self.notes += notes

    def _pass_until_signs_stay(self, whole: bool) -> None:
        """Run a pass, and again while signs change that biases absorb, for all factors after them."""
        flipped = self._pass(whole)
        for _ in self.symmetry.structure.absorbed:
            if not flipped:
                break
            flipped = self._pass(whole)

    def _pass(self, whole: bool) -> bool:
        """Gather statistics, ask the factors, move the weights; return whether any sign changed.

        The pass ignores the constants that changes of sign add to biases.
        """
        self.settle()
        parts: dict[str, Part] = {}
        self.notes, flipped = [], False
        for rung in (Rung.SIZES, Rung.SIGNS, Rung.ORDER) if whole else (Rung.SIZES,):
            for factor in self._on(rung):
                found = factor.canonical(self)
                parts |= found.parts
                self.notes += found.notes
                if rung == Rung.SIGNS:
                    flipped |= not self.symmetry.factors.is_identity(self.identity.replaced(**found.parts))
        for factor in self.symmetry.factors:
            self.notes += factor.left(self.wanted, self.tensors)
        self.lifeless = self.dead if self.lifeless is None else self.lifeless
        self.sweeps += self.gauge.sweeps
        self.residual, self.converged = self.gauge.residual, self.gauge.converged
        self.move(parts)
        return flipped
