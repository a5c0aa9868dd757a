"""Upper and lower bounds for the distance between two networks up to symmetry."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import device_of
from lightning_sym.symmetry.arrays import together
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.assignment import Gain, MatchingGroup, Tables, stacked, within_cells
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.matching.balanced import check_networks, comparable
from lightning_sym.symmetry.matching.coordinate_descent import Descent, descend
from lightning_sym.symmetry.matching.weights import with_forms
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

# Larger networks are not compared with points of their own orbits.
_CHECKED = 2 * 10**6
# Distances, relative to the norm of the weights, that rounding to single precision explains.
_ROUNDING = 1e-3
_APART = "no lower bound is known: the balanced forms of two points of one orbit differ"


@dataclass(frozen=True, eq=False)
class OrbitDistance:
    """Bounds for the distance between two networks up to symmetry, both in the balanced gauge.

    Attributes:
        upper: Distance to a point of the orbit.
        lower: A lower bound for all points of the orbit, up to rounding. 0 if no bound is known.
        notes: Weights that the bounds ignore, with reasons.
    """

    upper: float
    lower: float
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether both bounds agree to a relative 1e-6."""
        return self.upper - self.lower <= 1e-6 * max(self.upper, 1e-300)


def orbit_distance(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    *,
    restarts: int = 1,
    seed: int = 0,
    balance: bool = True,
    signs: bool = True,
    device: torch.device | str | None = None,
) -> OrbitDistance:
    r"""Bound the distance between two networks up to symmetry: :math:`\min_g |\theta_a - g\,\theta_b|`, both balanced.

    The upper bound is that of :func:`weight_matching`. The lower bound is a relaxation. Parameters that one axis group
    indexes, on one axis, are matched exactly for that group alone. All others are compared as sorted lists of numbers
    (of absolute values, where signs are free), a lower bound over all permutations of entries. With one axis group both
    bounds agree. Where matrices mix units (the values of a head), balancing leaves orthogonal ones, which preserve
    singular values: those of all blocks of a kind are compared in sorted order. The same holds for all weights on a
    rotated stream, where means over units that rotations fix are compared apart. The lower bound ignores tensors that
    rank-one maps change, and the gains between. In these cases, and for networks that seem to lie on one orbit, the
    upper bound also considers the canonical forms, which coincide on one orbit.

    Args:
        symmetry: The symmetry of the architecture.
        a: The first network.
        b: The second network.
        restarts: See :func:`weight_matching`.
        seed: See :func:`weight_matching`.
        balance: Whether to balance both networks first; otherwise scales are compared unchanged.
        signs: Whether signs are free.
        device: See :func:`weight_matching`.

    Returns:
        Both bounds.

    Raises:
        ValueError: See :func:`weight_matching`.

    Note:
        The bounds hold for permutations, signs and rotations of the balanced networks. For distances between orbits
        with free scales, see :func:`lightning_sym.landscape.orbit_distances`. A dead unit has no balanced form and
        stays unchanged: a note says so, and the lower bound is 0. It also is 0 if it keeps ``b`` apart from a
        random point of its own orbit, which is tested up to 2 million numbers.
    """
    check_integers(restarts=restarts)
    check_networks(symmetry, a=a, b=b)
    where = torch.device(device) if device is not None else device_of(a)
    with torch.no_grad():
        compared = comparable(symmetry, a, b, balance=balance)
        descent = Descent(compared, signs=signs, device=where)
        found = [descend(descent, restarts=restarts, seed=seed)]
        both = (descent.target, compared.start(where))
        said = [factor.unbounded(both, balance) for factor in symmetry.factors]
        unknown = any(own for _, own in said)
        hidden = any(factor.hides_units for factor in symmetry.factors)
        elements: list[Element] = []
        if hidden or (balance and descent.suspicious(found[0].element)):
            found, aligned = with_forms(descent, found[0], seed)
            elements = [compared.forth(aligned)]
        upper = math.inf
        for element in [*(own.element for own in found), *elements]:
            descent.restart(element)
            # Computed from differences: inner products cancel near 0.
            upper = min(upper, math.sqrt(descent.squared_distance))
        notes = tuple(note for own, _ in said for note in own)
        lower = 0.0 if unknown else min(lower_bound(descent), upper)
        if lower and balance and _keeps_apart(symmetry, b, where, signs=signs, seed=seed):
            lower, notes = 0.0, (*notes, _APART)
        return OrbitDistance(upper, lower, notes)


def _keeps_apart(symmetry: Symmetry, network: nn.Module, where: torch.device, *, signs: bool, seed: int) -> bool:
    """Whether the lower bound between a network and a random point of its own orbit is not 0."""
    states = state_tensors(network).values()
    if sum(tensor.numel() for tensor in states) > _CHECKED:
        return False
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed), scale=0.5, signs=signs), network)
    compared = comparable(symmetry, network, moved, balance=True)
    size = math.sqrt(math.fsum(float(own.double().square().sum()) for own in compared.target(where).values()))
    return lower_bound(Descent(compared, signs=signs, device=where)) > _ROUNDING * size


def lower_bound(descent: Descent) -> float:
    """Return a lower bound for the distance between A's parameters and B's under all permutations and signs.

    Parameters that one axis group indexes, on one axis, are matched exactly for that group alone. For all others,
    sorted entries are compared, or invariants under matrices. Weights that factors exclude from bounds (rotary pairs)
    are ignored.
    """
    structure, beginning = descent.symmetry.structure, descent.compared.start(descent.device)
    owners: dict[str, list[MatchingGroup]] = {}
    for group in descent.groups:
        for name in group.tensors:
            owners.setdefault(name, []).append(group)
    factors = list(descent.symmetry.factors)
    veils = [factor.veiled(descent.signs) for factor in factors]
    anywhere, signed = (set().union(*own) for own in zip(*veils, strict=True))
    joint = {slot.tensor for slot in structure.slots if len(slot.axes) == 2}
    target = {name: tensor.double().cpu() for name, tensor in descent.target.items()}
    start = {name: tensor.double().cpu() for name, tensor in beginning.items()}
    total = 0.0
    alone: dict[int, list[str]] = {}
    spectra: list[dict[str, list[Tensor]]] = [
        {name: lists for factor in factors for name, lists in factor.invariants(tensors).items()}
        for tensors in (target, start)
    ]
    for name, tensor in target.items():
        if name in spectra[0]:
            total += sum(_in_order(one, two, False) for one, two in zip(*(own[name] for own in spectra), strict=True))
            continue
        own = owners.get(name, [])
        moving = [group for group in own if group.movable or (descent.signs and group.free)]
        if name in anywhere:
            continue
        if not moving and name not in signed:
            total += float((tensor - start[name]).square().sum())
        elif len(own) == len(moving) == 1 and not own[0].quadratic and name not in joint:
            alone.setdefault(own[0].index, []).append(name)
        else:
            total += _in_order(tensor, start[name], name in signed)
    for index, names in alone.items():
        mine, theirs = ({name: tensors[name] for name in names} for tensors in (target, start))
        total += _of_group(descent, descent.groups[index], mine, theirs)
    return math.sqrt(total)


def _in_order(one: Tensor, two: Tensor, signed: bool) -> float:
    """Return the least squared distance over all permutations (and signs) of entries."""
    lists = [(t.abs() if signed else t).flatten().sort().values for t in (one, two)]
    return float((lists[0] - lists[1]).square().sum())


def _of_group(
    descent: Descent, group: MatchingGroup, target: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> float:
    """Return the least squared distance over one group, for parameters that it alone indexes, on one axis."""
    slices = {
        pattern: kept
        for pattern, parts in group.slices.items()
        if (kept := tuple(part for part in parts if part.tensor in target))
    }
    size = len(group.units)
    rows = {pattern: (stacked(kept, target, size), stacked(kept, start, size)) for pattern, kept in slices.items()}
    gain = Gain({pattern: one @ two.T for pattern, (one, two) in rows.items()}, descent.signs)
    if not gain.exact or (descent.signs and len(group.free) < group.signs.shape[1]):
        # Shared signs, or too many: fall back to absolute values.
        return sum(_in_order(target[name], start[name], True) for name in target)
    # Blocks may be permuted: relaxed to all permutations.
    whole = replace(group, cells=(np.arange(size),)) if descent.systems else group
    chosen = within_cells(whole, Tables(gain))
    total = 0.0
    for pattern, (one, two) in rows.items():
        moved = two[torch.from_numpy(chosen.source)] * torch.from_numpy(chosen.sign(pattern))[:, None]
        total += float((one - moved).square().sum())
    # Entries of these parameters outside the group's positions are fixed.
    for name, tensor in target.items():
        parts = [part for part in itertools.chain(*slices.values()) if part.tensor == name]
        change = tensor - start[name]
        change = together(change, parts[0].axes) if tensor.ndim else change[None]
        stands = torch.zeros(len(change), dtype=torch.bool)
        for part in parts:
            stands[slice(None) if part.positions is None else part.positions] = True
        if not bool(stands.all()):
            rest = (~stands).nonzero().flatten()
            total += float(change.index_select(0, rest).square().sum())
    return total
