"""From one network to the member of its orbit that is nearest to another network, by weights.

Generic over :class:`lightning_sym.symmetry.Symmetry`: which units may change places, and which parameters move with
them, was found by tracing.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import device_of, wide
from lightning_sym._text import unknown
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.form import canonical_element
from lightning_sym.symmetry.distances import squared_distance
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.gathered import Rung, Wanted
from lightning_sym.symmetry.matching.balanced import check_networks, comparable, converted, working
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM, Descended, Descent, descend
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.tracing.capture import state_tensors

# What is nearer than this, relative to the norm, is nearly of one orbit: from there on, gauges agree better.
_NEAR = 1e-3
_ROUNDING = 10.0  # so many units of rounding may be between equal networks, relative to their norm
_MOST_TIMES = 3


@dataclass(frozen=True, eq=False)
class Match(Descended):
    """An element that brings one network near to another.

    Attributes:
        element: Maps ``b`` to ``network``.
        network: ``act(element, b)``: the function of ``b``, in the order, with the signs and in the scales of ``a``.
        objective: Inner product of the parameters of both networks (in the balanced gauge, if they were balanced)
            before the first sweep and after every sweep of the best restart, less half of what the squares of biases
            have grown that take up changes of sign (sigmoid, ``affine=True``). Non-decreasing. For activation matching
            the sum of the matched correlations (or products) at the identity and at the end.
        distance_before: Euclidean distance of the parameters of ``a`` and ``b``, buffers left out.
        distance_after: The same of ``a`` and ``network``.
        sweeps: Number of sweeps of the best restart, the last without an improvement included.
        restarts: The final objective of every restart.
        method: "weights" or "activations".
    """

    network: nn.Module
    distance_before: float
    distance_after: float
    method: str

    def __repr__(self) -> str:
        return (
            f"<Match by {self.method}: distance {self.distance_before:.6g} before, {self.distance_after:.6g} after, "
            f"{self.sweeps} sweeps, {self.element!r}>"
        )


@dataclass(frozen=True, eq=False)
class Found(Descended):
    """A match without its network.

    Attributes:
        distance_before: As for :class:`Match`.
        distance_after: Likewise.
    """

    distance_before: float
    distance_after: float


def parameter_distance(a: nn.Module, b: nn.Module) -> float:
    """Return the Euclidean distance of the parameters of two networks, each counted once, buffers left out.

    Args:
        a: The first network.
        b: The second network, with parameters of the same names and shapes; it may be on another device.
    """
    with torch.no_grad():
        ours = {name: tensor for name, tensor in state_tensors(a).items() if isinstance(tensor, nn.Parameter)}
        return math.sqrt(squared_distance(ours, dict(b.named_parameters())))


def weight_matching(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    *,
    scales: bool = True,
    signs: bool = True,
    restarts: int = 1,
    seed: int = 0,
    initial: Element | None = None,
    max_sweeps: int = 100,
    balance: bool = True,
    refine: bool = False,
    freedom: Collection[str] = FREEDOM,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Match:
    r"""Find the member of a network's orbit that is near to another network, by weights alone.

    Coordinate descent on :math:`\langle\theta_a, g\,\theta_b\rangle` over the axis groups in random order. With all
    other groups fixed, the best assignment of one group's units is a linear assignment problem with the gain

    .. math:: M_{ij} = \sum_{\text{parameters, axes, tags}} \langle a_{i}, (g_{-} b)_{j} \rangle,

    solved exactly; where signs are free, with the best signs of each pair, e.g. :math:`|M_{ij}|`. Groups whose
    neighbours have not changed since their last assignment are skipped. The first descent begins with a pass in the
    order of the layers, each group assigned by what is known by then. Networks are balanced before (inner products are
    not invariant under scales) unless that hardly changes the proportions of units. Then ``b`` is brought to the scales
    of ``a``; units that are nearly dead in ``a`` do not hand theirs over (docs/theory/matching.md, 1.5). If that takes
    ``b`` farther away than it was, it is matched in its own scales instead: without ``initial`` the match is never
    farther than ``b``.

    - Units change places within their cell; blocks of cells (heads, convolution groups) are permuted as wholes by a
      second move, with the gains of their members' best assignments. A grouped convolution's weight counts for its
      rows, and within a block for its columns; between blocks, columns are compared in the order that they have, so
      that several restarts are worth while.
    - A group on two axes of one parameter makes the problem quadratic: it is linearised, and only improvements are
      taken. The same holds for blocks, and for more than three free signs that meet on one parameter.
    - Cells on which any invertible matrix acts are rotated (orthogonal Procrustes), planes turned by the argument of
      their complex inner product, and streams rotated last; other matrices are not searched. Those between gains, which
      no recalibration of batch norms survives, are found between networks of one function only.
    - If all tensors have nearly the same norms, and are not as near as these allow, canonical forms are compared, too:
      what was planted is found to rounding.
    - Buffers are left out of the gain, and move along.

    Args:
        symmetry: The symmetry of the architecture.
        a: The reference. Not changed.
        b: The network that is moved. Not changed.
        scales: Whether magnitudes (and shifts of biases in front of batch norms) may change.
        signs: Whether signs may change.
        restarts: Number of descents, >= 1; the best is taken. The first begins at ``initial``, or with a pass from
            layer to layer, the others at random permutations (if ``initial`` is given, all there, and only the order of
            the groups differs).
        seed: Seed of the order of groups and of the restarts; no other generator is used or changed.
        initial: Where to begin, an element for ``b``; its scales and shifts are not used.
        max_sweeps: Most sweeps over all groups in a descent, >= 1.
        balance: Whether both networks are brought to the balanced gauge first; ignored without ``scales``.
        refine: Whether, at the end, every scale is adjusted to the least distance to ``a`` (and shifts, exactly), in
            closed form, one after another; ignored without ``scales``. Scales with exponents other than +1 and -1
            stay. For distances, not for interpolation: of networks that are not alike it makes the incoming weights of
            unmatched units small, and the loss between the networks grows.
        freedom: Which parts of the group are searched (docs/theory/matching.md, 1.7): "permutations" of units within
            cells, "blocks" (heads) that change places, "matrices" inside heads and phases of planes, "rotations" of
            streams. By default all. Without "matrices" networks that have such cells are not balanced.
        device: Where gains are computed, in the dtype of ``a`` (half precision in float32); by default, where ``a``
            is. Assignments are solved on the CPU in float64.
        progress: Whether to show a progress bar.

    Returns:
        The match; its network is on ``b``'s device.

    Raises:
        ValueError: If a network is not of the traced architecture, holds a value that is not finite, or an argument is
            out of its range.

    Note:
        ``O(H^3)`` for a group of ``H`` units and sweep. A local optimum, except with a single axis group, where one
        sweep is exact. Deterministic given ``seed``, on one machine and thread number.

    References:
        Ainsworth et al. (2022), "Git Re-Basin: Merging Models modulo Permutation Symmetries", Algorithm 1,
        arXiv:2209.04836. The first pass, scales, signs, blocks, rotations and skipping unchanged groups are added.
    """
    check_integers(restarts=restarts, max_sweeps=max_sweeps)
    check_networks(symmetry, a=a, b=b)
    if initial is not None:
        symmetry._own(initial)
    if unknown_words := sorted(set(freedom) - set(FREEDOM)):
        raise ValueError(unknown("freedom", unknown_words[0], FREEDOM))
    wanted = Wanted("balanced", order=False)
    turning = (own for own in symmetry.factors if own.rung in (Rung.SIZED, Rung.FIRST) and own.concerned(wanted))
    if any(own.freedom not in freedom for own in turning):
        balance = False  # which turns cells to their principal axes
    where = torch.device(device) if device is not None else device_of(a)

    def matched(b: nn.Module, balance: bool) -> Found:
        gauged = comparable(symmetry, a, b, balance=balance, signs=signs)
        compared = comparable(symmetry, a, b, balance=False, signs=signs) if gauged.is_even else gauged
        descent = Descent(compared, signs=signs, device=where, freedom=freedom)
        start = None if initial is None else compared.forth(initial)
        found = descend(descent, restarts=restarts, seed=seed, max_sweeps=max_sweeps, initial=start, progress=progress)
        doubtful = initial is None and balance and descent.suspicious(found.element)
        starts = [found]
        forms = measured(symmetry, a, b, replace(found, element=form_to_form(symmetry, a, b))) if doubtful else None
        if forms is not None:  # units that cells hide as long as these are turned otherwise, forms put in one order
            begin = compared.forth(forms.element)
            starts.append(descend(descent, restarts=1, seed=seed, max_sweeps=max_sweeps, initial=begin, turned=False))
        del descent  # with its copy of the network
        matches = []
        for one in starts:
            elements = [compared.back(one.element)]
            if gauged is not compared:
                elements.append(gauged.back(gauged.forth(one.element)))
            if scales and refine:
                elements = [refined(symmetry, a, b, element, where) for element in elements]
            matches += [measured(symmetry, a, b, replace(one, element=element)) for element in elements]
        match = min(matches, key=lambda own: own.distance_after)
        # Forms agree on one orbit, where descents take many steps, or miss what they have no move for.
        return forms if forms is not None and forms.distance_after < match.distance_after else match

    with torch.no_grad():
        match = matched(b, scales and balance)
        if scales and balance and match.distance_after > match.distance_before:
            match = matched(b, False)  # which begins at b, and comes nearer with every step
        norm = math.sqrt(math.fsum(float(own.square().sum(dtype=wide(own.device))) for own in a.parameters()))
        least = _ROUNDING * max((torch.finfo(own.dtype).eps for own in a.parameters()), default=0.0) * norm
        for _ in range(_MOST_TIMES if scales and balance and initial is None else 0):
            if not least < match.distance_after < _NEAR * norm:
                break
            found = matched(symmetry.act(match.element, b), True)
            if not found.distance_after < match.distance_after / 2:
                break
            whole = symmetry.compose(found.element, match.element)
            match = measured(symmetry, a, b, replace(match, element=whole))
        if initial is None and match.distance_after > match.distance_before:  # by rounding
            match = measured(symmetry, a, b, replace(match, element=symmetry.identity()))
    return matched_by(symmetry, b, match, "weights")


def refined(symmetry: Symmetry, a: nn.Module, b: nn.Module, element: Element, device: torch.device) -> Element:
    """Let factors change norms and biases, as brings a network nearest to a reference: shifts, then scales.

    Args:
        symmetry: Symmetry of both networks.
        a: The reference.
        b: The network that is moved.
        element: Moves `b`.
        device: Where distances are computed, in the dtypes of `a`.

    Returns:
        The element with other magnitudes and shifts.
    """
    target = working(a, symmetry, device)
    given = converted(b, symmetry, device, like=symmetry.tensors(a))
    for factor in symmetry.factors.inwards:
        begin = MovedTensors(symmetry.factors, element, given)
        part = factor.refined(target, begin)
        if part is not None:
            other = symmetry.compose(symmetry.identity().replaced(**{factor.name: part}), element)
            moved = MovedTensors(symmetry.factors, other, given)
            if squared_distance(target, moved) < squared_distance(target, begin):  # not by rounding of low precision
                element = other
    return element


def nearer_by_forms(symmetry: Symmetry, a: nn.Module, b: nn.Module, match: Found) -> Found:
    """Return a match, or that of the canonical forms, which agree on one orbit, if these are nearer.

    Descents take many steps there, or miss what they have no move for: queries of one key that change places, tilts.
    """
    other = measured(symmetry, a, b, replace(match, element=form_to_form(symmetry, a, b)))
    return other if other.distance_after < match.distance_after else match


def form_to_form(symmetry: Symmetry, a: nn.Module, b: nn.Module) -> Element:
    """Return the element that brings the canonical form of ``b`` to that of ``a``."""
    own, theirs = (canonical_element(symmetry, network) for network in (a, b))
    return symmetry.compose(symmetry.inverse(own), theirs)


def measured(symmetry: Symmetry, a: nn.Module, b: nn.Module, found: Descended) -> Found:
    """Say how near to ``a`` what was found brings ``b``."""
    ours = {name: tensor for name, tensor in symmetry.tensors(a).items() if name in symmetry.parameter_names}
    theirs = symmetry.tensors(b)
    moved = MovedTensors(symmetry.factors, found.element, theirs)
    before, after = (math.sqrt(squared_distance(ours, own)) for own in (theirs, moved))
    return Found(found.element, found.objective, found.sweeps, found.restarts, before, after)


def matched_by(symmetry: Symmetry, b: nn.Module, found: Found, method: str) -> Match:
    """Move a network by what was found for it."""
    network = symmetry.act(found.element, b)
    distances = found.distance_before, found.distance_after
    return Match(found.element, found.objective, found.sweeps, found.restarts, network, *distances, method)
