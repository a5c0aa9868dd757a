"""Weight matching: the point of a network's orbit that is nearest to another network.

It works for any :class:`lightning_sym.symmetry.Symmetry`: tracing finds the units that are permuted, and the parameters
that move with them.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import device_of, wide
from lightning_sym._notebook import Tabular
from lightning_sym._text import unknown
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.form import canonical_element
from lightning_sym.symmetry.distances import squared_distance
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.gathered import Rung, Wanted
from lightning_sym.symmetry.matching.balanced import Comparison, check_networks, comparable, converted, working
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM, Descended, Descent, descend
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

# Distances below this, relative to the norm, suggest networks nearly of one orbit: their gauges agree better.
_NEAR = 1e-3
_ROUNDING = 10.0  # rounding between equal networks, in units of machine epsilon relative to their norm
_MOST_TIMES = 3


@dataclass(frozen=True, eq=False)
class Match(Descended, Tabular):
    """An element that aligns one network to another.

    Attributes:
        element: Maps ``b`` to ``network``.
        network: ``act(element, b)``: the function of ``b``, with permutation, signs and scales aligned to ``a``.
        objective: Inner product of both networks' parameters (balanced, if they were balanced) before the first sweep
            and after every sweep of the best restart. Half the growth of the squared norm is
            subtracted, where biases absorb sign changes (sigmoid, ``affine=True``). Non-decreasing. For activation
            matching, the sum of the matched correlations (or products) at the identity and at the end.
        distance_before: Euclidean distance between the parameters of ``a`` and ``b``, without buffers.
        distance_after: The same for ``a`` and ``network``.
        sweeps: Number of sweeps of the best restart, including the last one without improvement.
        restarts: The final objective of every restart.
        method: "weights" or "activations".
    """

    network: nn.Module
    distance_before: float
    distance_after: float
    method: str

    def titled_rows(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the method, and the distance and the objective before and after."""
        before, after = self.objective[0], self.objective[-1]
        return f"Match by {self.method}, sweeps: {self.sweeps}", [
            {"quantity": "distance", "before": self.distance_before, "after": self.distance_after},
            {"quantity": "objective", "before": before, "after": after},
        ]

    def __repr__(self) -> str:
        return (
            f"<Match by {self.method}: distance {self.distance_before:.6g} before, {self.distance_after:.6g} after, "
            f"{self.sweeps} sweeps, {self.element!r}>"
        )


@dataclass(frozen=True, eq=False)
class Found(Descended):
    """A match without its network.

    Attributes:
        distance_before: See :class:`Match`.
        distance_after: See :class:`Match`.
    """

    distance_before: float
    distance_after: float


def parameter_distance(a: nn.Module, b: nn.Module) -> float:
    """Return the Euclidean distance between the parameters of two networks, each counted once, without buffers.

    Args:
        a: The first network.
        b: The second network, with parameters of the same names and shapes; it may be on another device.

    Raises:
        TypeError: If one is no module.
        ValueError: If a parameter of the first is missing in the second, or has another shape there.
    """
    theirs = dict(b.named_parameters())
    with torch.no_grad():
        ours = {name: tensor for name, tensor in state_tensors(a).items() if isinstance(tensor, nn.Parameter)}
        for name, tensor in ours.items():
            if name not in theirs or theirs[name].shape != tensor.shape:
                found = f"shape {list(theirs[name].shape)}" if name in theirs else "no such parameter"
                raise ValueError(f"{name} has shape {list(tensor.shape)} in a, and b has {found}; pass equal shapes.")
        return math.sqrt(squared_distance(ours, theirs))


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
    balance: bool = True,
    refine: bool = False,
    freedom: Collection[str] = FREEDOM,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Match:
    r"""Align a network to another one by weights alone, within its orbit.

    Coordinate descent maximises :math:`\langle\theta_a, g\,\theta_b\rangle` over the axis groups in random order. With
    all other groups fixed, the optimal permutation of one group solves a linear assignment problem with the gain

    .. math:: M_{ij} = \sum_{\text{parameters, axes, tags}} \langle a_{i}, (g_{-} b)_{j} \rangle.

    Free signs are optimised jointly, with gain :math:`|M_{ij}|` in the simplest case. Groups are skipped while no
    neighbour has changed since their last assignment. The first descent begins with a pass in the order of the layers,
    which assigns each group by the axes aligned so far. Unless matrices or rotations act, the search begins without
    scales and signs, and continues with them where they can change an assignment. As inner products are not invariant
    under scales, both networks are then balanced, unless this hardly changes the proportions of units. Afterwards,
    ``b`` gets the scales of ``a``, except at units that are nearly dead in ``a`` (docs/theory/matching.md, 1.5), or
    keeps its own where it is nearer then. Without ``initial``, the match is never farther than ``b``, nor than that
    first search.

    - Units are permuted within their cell. A second move permutes blocks of cells (heads, convolution groups), with the
      gains of their members' optimal assignments. A grouped convolution's weight counts for its rows, and within a
      block for its columns. Columns of different blocks are compared in their current order, so several restarts help.
    - A group on two axes of one parameter makes the problem quadratic: it is linearised, and only improvements are
      accepted. The same holds for blocks, and for more than three free signs on one parameter.
    - GL(d) blocks are rotated (orthogonal Procrustes), rotary pairs by the argument of their complex inner product, and
      streams last. Other matrices are not searched. Matrices between gains do not survive recalibration of batch norms;
      they are found only between networks of one function.
    - If all tensors have nearly equal norms, but a larger distance than these suggest, canonical forms are compared as
      well: planted elements are found up to rounding.
    - Running statistics do not count in the gain, and are transformed along. Other buffers that scales or signs
      multiply, such as gains of frozen batch norms, count as weights.

    Args:
        symmetry: The symmetry of the architecture.
        a: The reference. Not changed.
        b: The network to align. Not changed.
        scales: Whether positive scales (and translations of biases before batch norms) may change.
        signs: Whether signs may change.
        restarts: Number of descents, >= 1; the best is returned. The first begins at ``initial``, or with a pass from
            layer to layer, the others at random permutations. If ``initial`` is given, all begin there, and only the
            order of the groups differs.
        seed: Seed of the order of groups and of the restarts; no other generator is used or changed.
        initial: The starting point, an element for ``b``; its scales and translations are ignored.
        balance: Whether to bring both networks to the balanced gauge first; ignored without ``scales``.
        refine: Whether to minimise the distance to ``a`` over all scales at the end, in closed form and one after
            another, and over translations; ignored without ``scales``. Scales with exponents other than +1 and -1 stay
            unchanged. This serves distances, not interpolation: between dissimilar networks it shrinks the incoming
            weights of unmatched units, and raises the loss in between.
        freedom: The parts of the group to search (docs/theory/matching.md, 1.7): "permutations" of units within cells,
            permutations of "blocks" (heads), "matrices" inside heads and phases of rotary pairs, "rotations" of
            streams. All by default. Without "matrices", networks with GL(d) blocks are not balanced.
        device: Device for the gains, in the dtype of ``a`` (float32 for half precision); by default, that of ``a``.
            Assignments are solved on the CPU in float64.
        progress: Whether to show a progress bar.

    Returns:
        The match; its network is on ``b``'s device.

    Raises:
        ValueError: If a network is not of the traced architecture, a value is not finite, or an argument is out of its
            range.

    Note:
        A sweep takes ``O(H^3)`` for a group of ``H`` units. The result is a local optimum; with a single axis group,
        one sweep is exact. Deterministic given ``seed``, on one machine and number of threads.

    References:
        Ainsworth et al. (2022), "Git Re-Basin: Merging Models modulo Permutation Symmetries", Algorithm 1,
        arXiv:2209.04836. The first pass, scales, signs, blocks, rotations and skipping unchanged groups are added.
    """
    check_integers(restarts=restarts)
    check_networks(symmetry, a=a, b=b)
    if initial is not None:
        symmetry._own(initial)
    if unknown_words := sorted(set(freedom) - set(FREEDOM)):
        raise ValueError(unknown("freedom", unknown_words[0], FREEDOM))
    wanted = Wanted("balanced", order=False)
    turning = [own for own in symmetry.factors if own.rung in (Rung.SIZED, Rung.FIRST) and own.concerned(wanted)]
    if any(own.freedom not in freedom for own in turning):
        balance = False  # balancing would rotate cells to their principal axes
    where = torch.device(device) if device is not None else device_of(a)

    def matched(b: nn.Module, balance: bool, *, again: bool = False) -> Found:
        gauged = comparable(symmetry, a, b, balance=balance, signs=signs)
        compared = comparable(symmetry, a, b, balance=False, signs=signs) if gauged.is_even else gauged
        alone: Descended | None = None
        if initial is None and not again and not turning:
            descent = Descent(Comparison(symmetry, a, b), signs=False, device=where, freedom=freedom)
            alone = found = descend(descent, restarts=restarts, seed=seed, progress=progress)
        if alone is None or not compared.is_plain or (signs and descent.allow_signs()):
            descent = Descent(compared, signs=signs, device=where, freedom=freedom)
            given = initial, None if alone is None else alone.element
            start, known = (None if own is None else compared.forth(own) for own in given)
            found = descend(descent, restarts=restarts, seed=seed, initial=start, known=known, progress=progress)
        doubtful = initial is None and balance and descent.suspicious(found.element)
        starts, aligned = with_forms(descent, found, seed) if doubtful else ([found], None)
        del descent  # with its copy of the network
        ends = [] if alone in (None, found) else [(alone, alone.element)]
        for one in starts:
            ends.append((one, compared.back(one.element)))
            if gauged is not compared:
                ends.append((one, gauged.back(gauged.forth(one.element))))
        if scales and refine:
            ends = [(one, refined(symmetry, a, b, element, where)) for one, element in ends]
        matches = [measured(symmetry, a, b, replace(one, element=element)) for one, element in ends]
        match = min(matches, key=lambda own: own.distance_after)
        return match if aligned is None else nearer(match, measured(symmetry, a, b, replace(found, element=aligned)))

    with torch.no_grad():
        match = matched(b, scales and balance)
        if scales and balance and match.distance_after > match.distance_before:
            match = matched(b, False)  # starts at b, and every step reduces the distance
        norm = math.sqrt(math.fsum(float(own.square().sum(dtype=wide(own.device))) for own in a.parameters()))
        least = _ROUNDING * max((torch.finfo(own.dtype).eps for own in a.parameters()), default=0.0) * norm
        for _ in range(_MOST_TIMES if scales and balance and initial is None else 0):
            if not least < match.distance_after < _NEAR * norm:
                break
            found = matched(symmetry.act(match.element, b), True, again=True)
            if not found.distance_after < match.distance_after / 2:
                break
            whole = symmetry.compose(found.element, match.element)
            match = measured(symmetry, a, b, replace(match, element=whole))
        if initial is None and match.distance_after > match.distance_before:  # due to rounding
            match = measured(symmetry, a, b, replace(match, element=symmetry.identity()))
    return matched_by(symmetry, b, match, "weights")


def refined(symmetry: Symmetry, a: nn.Module, b: nn.Module, element: Element, device: torch.device) -> Element:
    """Minimise the distance to a reference over translations, then over scales.

    Args:
        symmetry: Symmetry of both networks.
        a: The reference.
        b: The network to transform.
        element: An element for `b`.
        device: Device for distances, in the dtypes of `a`.

    Returns:
        The element with new scales and translations.
    """
    target = working(a, symmetry, device)
    given = converted(b, symmetry, device, like=symmetry.tensors(a))
    for factor in symmetry.factors.inwards:
        begin = MovedTensors(symmetry.factors, element, given)
        part = factor.refined(target, begin)
        if part is not None:
            other = symmetry.compose(symmetry.identity().replaced(**{factor.name: part}), element)
            moved = MovedTensors(symmetry.factors, other, given)
            if squared_distance(target, moved) < squared_distance(target, begin):  # rounding may prevent it
                element = other
    return element


def with_forms(descent: Descent, found: Descended, seed: int) -> tuple[list[Descended], Element]:
    """Descend again from aligned canonical forms, as heads hide units until they are aligned.

    Args:
        descent: The search.
        found: Its result.
        seed: Seed of the search.

    Returns:
        Both results, and the element that aligns the forms.
    """
    compared = descent.compared
    aligned = form_to_form(descent.symmetry, compared.a, compared.b)
    begin = compared.forth(aligned)
    return [found, descend(descent, restarts=1, seed=seed, initial=begin, turned=False)], aligned


def nearer(match: Found, forms: Found) -> Found:
    """Return a match, or the alignment of canonical forms if this is nearer.

    Canonical forms coincide on one orbit. Descents take many steps there, or have no move: for permutations of queries
    of one key, or rank-one maps.
    """
    return forms if forms.distance_after < match.distance_after else match


def form_to_form(symmetry: Symmetry, a: nn.Module, b: nn.Module) -> Element:
    """Return the element that maps ``b`` to ``a`` if their canonical forms are equal."""
    own, theirs = (canonical_element(symmetry, network) for network in (a, b))
    return symmetry.compose(symmetry.inverse(own), theirs)


def measured(symmetry: Symmetry, a: nn.Module, b: nn.Module, found: Descended) -> Found:
    """Measure the distance to ``a`` before and after an element acts on ``b``."""
    ours = {name: tensor for name, tensor in symmetry.tensors(a).items() if name in symmetry.weight_names}
    theirs = symmetry.tensors(b)
    moved = MovedTensors(symmetry.factors, found.element, theirs)
    before, after = (math.sqrt(squared_distance(ours, own)) for own in (theirs, moved))
    return Found(found.element, found.objective, found.sweeps, found.restarts, before, after)


def matched_by(symmetry: Symmetry, b: nn.Module, found: Found, method: str) -> Match:
    """Apply the element of a match to a network."""
    network = symmetry.act(found.element, b)
    distances = found.distance_before, found.distance_after
    return Match(found.element, found.objective, found.sweeps, found.restarts, network, *distances, method)
