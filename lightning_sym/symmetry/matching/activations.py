"""Activation matching: align units that are active on the same inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym._distributed import Batches, device_of, ranks, run_on, summed, together, wide
from lightning_sym.networks.batch_norm import inputs_of
from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.assignment import (
    Chosen,
    Gain,
    MatchingGroup,
    Tables,
    best_blocks,
    block_systems,
    matched_groups,
    within_cells,
)
from lightning_sym.symmetry.matching.balanced import check_networks, comparable
from lightning_sym.symmetry.matching.coordinate_descent import Descended, Descent
from lightning_sym.symmetry.matching.weights import Match, form_to_form, matched_by, measured, nearer, refined
from lightning_sym.symmetry.watching import watched


class ActivationMoments:
    """Streaming moments of two networks' activations, per axis group, for :func:`activation_matching`.

    Holds sums of x, y, x^2, y^2 (per unit) and of x y^T (per pair of units) in float64. All positions of an image, and
    all tokens, count as samples. Several values may show a group, as a residual stream runs through many blocks. The
    last one is used that is no pooling, flattening, dropout or identity; see `places`. Units that matrices mix between
    gains (streams) are recorded at all such places, divided by the gains.

    Args:
        symmetry: The symmetry of the architecture.
        a: The first network (x). Run in evaluation mode; not changed.
        b: The second network (y).

    Attributes:
        groups: Matching data of the axis groups.
        places: The recorded module, by axis group. Groups that no module's output shows completely are missing.
        mixed: By factor and index of a member that mixes units (a stream), the places where these are recorded.
        samples: Number of samples so far, by axis group.

    Raises:
        ValueError: If a network is not of the traced architecture, or a value is not finite.
    """

    def __init__(self, symmetry: Symmetry, a: nn.Module, b: nn.Module) -> None:
        check_networks(symmetry, a=a, b=b)
        self.symmetry = symmetry
        self._a, self._b = a, b
        modules = dict(a.named_modules())
        self._watched: dict[str, tuple[Tap, int, Tensor]] = {}
        # By group, the columns of its sign table that are visible at its place.
        self.visible_signs: dict[str, tuple[int, ...]] = {}
        self.groups = matched_groups(symmetry.factors, symmetry.groups, symmetry.shapes)
        for group, own in zip(symmetry.groups, self.groups, strict=True):
            if not group.taps or not (group.movable or group.signs):
                continue
            real = [tap for tap in group.taps if not _passes_through(modules[tap.module])]
            tap = (real or group.taps)[-1]
            axis, positions = tap.positions(group.units) or (0, group.units)
            self._watched[group.name] = (tap, axis, positions)
            visible = symmetry.generators_at(tap)[1]
            self.visible_signs[group.name] = tuple(
                k for k, column in enumerate(own.signs.T) if visible.keys() & set(column)
            )
        self._gains: dict[str, tuple[Tensor, Tensor]] = {}
        self.mixed: dict[tuple[str, int], tuple[str, ...]] = {}
        self.mixed_orbits: set[int] = set()
        self._watch_mixed(modules)
        self.places = {name: tap.name for name, (tap, _, _) in self._watched.items()}
        zero = torch.zeros((), dtype=wide(device_of(a)), device=device_of(a))
        self._sums: dict[str, dict[str, Tensor]] = {}
        for name, (_, _, positions) in self._watched.items():
            size = len(positions)
            vectors = {key: zero.new_zeros(size) for key in ("x", "y", "xx", "yy")}
            self._sums[name] = {"n": zero.clone(), **vectors, "xy": zero.new_zeros(size, size)}

    def _watch_mixed(self, modules: Mapping[str, nn.Module]) -> None:
        """Record the units that factors mix."""
        both = [self.symmetry.tensors(network) for network in (self._a, self._b)]
        for factor in self.symmetry.factors:
            for place in factor.seen(self.symmetry.groups, self.symmetry._values, both):
                if not _passes_through(modules[place.tap.module]):
                    self._watched[place.name] = (place.tap, place.axis, place.positions)
                    self._gains[place.name] = place.gain(both[0]), place.gain(both[1])
                    key = factor.name, place.member
                    self.mixed[key] = (*self.mixed.get(key, ()), place.name)
                    self.mixed_orbits.add(place.orbit)

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples so far, by axis group."""
        return {name: int(sums["n"].item()) for name, sums in self._sums.items()}

    def update(self, inputs: Tensor | Sequence[Any]) -> None:
        """Run both networks on a batch and add its moments.

        Args:
            inputs: A batch, moved to each network's device; of a tuple or list the first entry is used.

        Raises:
            ValueError: If there is no tensor, or an activation is not finite.
        """
        (images,) = inputs_of([inputs])
        if len(images) == 0 or not self._watched:
            return
        ours, theirs = (self._watch(network, images, which) for which, network in enumerate((self._a, self._b)))
        for name, sums in self._sums.items():
            x, y = (watched[name].to(sums["xy"]) for watched in (ours, theirs))
            if not bool(x.isfinite().all() and y.isfinite().all()):
                place = self.places[name]
                raise ValueError(f"The activations of {place} are not finite; look for such weights or inputs.")
            sums["n"] += len(x)
            sums["x"] += x.sum(0)
            sums["y"] += y.sum(0)
            sums["xx"] += x.square().sum(0)
            sums["yy"] += y.square().sum(0)
            sums["xy"] += x.T @ y

    def _watch(self, network: nn.Module, images: Tensor, which: int) -> dict[str, Tensor]:
        """Run one of the networks and return the activations of each group. Each of shape (samples, size)."""

        def keep(name: str, values: Tensor) -> Tensor:
            _, axis, positions = self._watched[name]
            values = values.movedim(axis, -1)
            values = values.reshape(-1, values.shape[-1])[:, positions.to(values.device)]
            return values / self._gains[name][which].to(values) if name in self._gains else values

        taps = {name: tap for name, (tap, _, _) in self._watched.items()}
        with torch.no_grad(), evaluating(network):
            return watched(network, taps, lambda: run_on(network, images), keep)

    def reduce(self) -> None:
        """Sum the moments over all ranks (`torch.distributed`); to be called once, on every rank."""
        if ranks() == 1:
            return
        for name in sorted(self._sums):
            self._sums[name] = {key: summed(value) for key, value in sorted(self._sums[name].items())}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as nested dictionaries of tensors."""
        return {
            "sums": {name: {key: value.clone() for key, value in sums.items()} for name, sums in self._sums.items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore sums.

        Raises:
            ValueError: If they belong to other groups.
        """
        if {n: v["xy"].shape for n, v in state["sums"].items()} != {n: v["xy"].shape for n, v in self._sums.items()}:
            raise ValueError("the state holds other axis groups; expected one of the same architecture")
        for name, sums in state["sums"].items():
            self._sums[name] = {key: value.to(self._sums[name][key]).clone() for key, value in sums.items()}

    def product(self, name: str) -> Tensor:
        """Return the mean products of activations. Shape (size, size), float64."""
        return self._sums[name]["xy"] / self._sums[name]["n"]

    def _moments(self, name: str) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the covariances of the units of ``a`` and ``b``, and the mean squares and variances of each."""
        x, y, xx, yy, xy = (self._sums[name][key] / self._sums[name]["n"] for key in ("x", "y", "xx", "yy", "xy"))
        return xy - x[:, None] * y[None, :], (xx, xx - x.square()), (yy, yy - y.square())

    def correlation(self, name: str) -> Tensor:
        """Return the correlations between the units of ``a`` (rows) and ``b``. Shape (size, size), float64.

        The correlation with a unit that is constant up to rounding is 0.
        """
        centred, *units = self._moments(name)
        for axis, (square, variance) in zip((1, 0), units, strict=True):
            scale = torch.where(variance > 1e-12 * square, variance.rsqrt(), 0.0)
            centred = centred * scale.unsqueeze(axis)
        return centred

    def mixed_product(self, factor: str, member: int) -> Tensor:
        """Return the covariance of a member's units in ``a`` (rows) and ``b``. Shape (size, size), float64.

        It is summed over all places, each divided by the size of both activations.
        """
        total = torch.zeros((), dtype=torch.float64)
        for name in self.mixed[factor, member]:
            centred, (_, one), (_, two) = self._moments(name)
            total = total + (centred / (one.sum() * two.sum()).sqrt().clamp_min(1e-300)).double().cpu()
        return total


def _passes_through(module: nn.Module) -> bool:
    name = type(module).__name__
    return any(word in name for word in ("Pool", "Flatten", "Dropout", "Identity"))


def activation_matching(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    data: Batches | ActivationMoments,
    *,
    measure: Literal["correlation", "product"] = "correlation",
    scales: bool = True,
    signs: bool = True,
    balance: bool = True,
    refine: bool = False,
    seed: int = 0,
) -> Match:
    r"""Align a network to another one by activations, within its orbit.

    The permutation of each axis group maximises :math:`\sum_i C_{i p(i)}`, with the correlations (or mean products)
    :math:`C` of activations, exactly and in one pass. Where the activations' sign is free, :math:`|C|` counts. Cells
    and blocks are respected. Given these permutations, weights determine the rest: other signs, scales, copies of units
    inside blocks (query heads of one group), and groups that no module's output shows.

    With `torch.distributed`, each rank passes its own batches, and all get the same match.

    Args:
        symmetry: The symmetry of the architecture.
        a: The reference. Not changed.
        b: The network to align. Not changed.
        data: Batches (of a tuple or list the first entry is used), or moments of ``a`` and ``b``, already reduced.
        measure: "correlation", or "product": uncentred, and dependent on the units' scales.
        scales: Whether positive scales (and translations of biases before batch norms) may change.
        signs: Whether signs may change.
        balance: Whether to bring both networks to the balanced gauge before weights determine signs and other groups;
            ignored without ``scales``.
        refine: See :func:`weight_matching`.
        seed: Seed of the order of groups without activations.

    Returns:
        The match.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite; if there are no data; if the moments
            belong to another architecture; or if `measure` is unknown.

    References:
        Li et al. (2016), "Convergent Learning", arXiv:1511.07543; Ainsworth et al. (2022), section 3.1,
        arXiv:2209.04836, with products.
    """
    if measure not in ("correlation", "product"):
        raise ValueError(f"measure must be 'correlation' or 'product', got {measure!r}.")
    moments = _moments_of(symmetry, a, b, data)
    if measure == "product" and signs and symmetry.structure.absorbed:
        raise ValueError(
            "products do not show which activations were flipped to offset - x (affine=True); pass "
            "measure='correlation' or signs=False."
        )
    where = device_of(a)
    with torch.no_grad():
        groups = moments.groups
        gains = {
            group.index: _gain(moments, group, axis_group.name, measure, signs)
            for group, axis_group in zip(groups, symmetry.groups, strict=True)
            if axis_group.name in moments.places and group.alone
        }
        tables = {index: Tables(gain) for index, gain in gains.items()}
        chosen: dict[int, Chosen] = {}
        copies = [np.zeros((2, 0), np.int64)]  # their places, and the copies that go there
        for system in block_systems(symmetry.structure, groups):
            if system.groups.keys() & tables.keys():  # other groups, such as mixed queries and keys, are moved along
                order, assigned = best_blocks(system, tables, {})
                chosen.update(assigned)
                copies.append(np.stack([system.slots.ravel(), system.slots[order].ravel()]))
        along = {index: chosen[index] for index in chosen.keys() - tables.keys()}
        chosen = {index: chosen.get(index) or within_cells(groups[index], own) for index, own in tables.items()}
        for index in moments.mixed_orbits:
            chosen.pop(index, None)  # the matrices that mix it include permutations
            along.pop(index, None)
        compared = comparable(symmetry, a, b, balance=scales and balance, signs=signs)
        descent = Descent(compared, signs=signs, device=where)
        parts = descent.parts_of({**along, **chosen}, *np.concatenate(copies, 1))
        for factor in symmetry.factors:
            products = {
                index: moments.mixed_product(name, index) for name, index in moments.mixed if name == factor.name
            }
            if products:
                parts[factor.name] = factor.best_seen(products)
        descent.restart(symmetry.identity().replaced(**parts))
        undecided = {}
        for index, own in chosen.items():
            # Units that are inactive in both networks are undecided: weights match them to one another.
            nothing = tables[index].tables[0] == 0
            silent = nothing.all(1) & nothing.all(0)[own.source]
            undecided[index] = tuple(kept for cell in groups[index].cells if len(kept := cell[silent[cell]]))
        undecided |= dict.fromkeys(moments.mixed_orbits, ())
        descent.hold(undecided, {i: {k for pattern in gain.parts for k in pattern} for i, gain in gains.items()})
        descent.improve_alone()
        for _ in descent.sweeps(torch.Generator().manual_seed(seed)):
            pass
        identity = {index: Chosen(np.arange(len(groups[index].units)), {}) for index in chosen}
        before, after = (sum(gains[i].of(own[i]) for i in chosen) for own in (identity, chosen))
        doubtful = scales and balance and descent.suspicious(descent.element)
        element = compared.back(descent.element)
        del descent
        if scales and refine:
            element = refined(symmetry, a, b, element, where)
        match = measured(symmetry, a, b, Descended(element, (before, after), 1, (after,)))
        if doubtful:
            match = nearer(match, measured(symmetry, a, b, replace(match, element=form_to_form(symmetry, a, b))))
        return matched_by(symmetry, b, match, "activations")


def _gain(moments: ActivationMoments, group: MatchingGroup, name: str, measure: str, signs: bool) -> Gain:
    """Return the gains of a group's pairs of units, by their activations."""
    table = moments.correlation(name) if measure == "correlation" else moments.product(name)
    # Any one of several visible signs will do; a unit's own is the more exact choice.
    visible = [k for k in (*group.free, *group.shared) if k in moments.visible_signs[name]]
    return Gain({tuple(visible[:1] if signs else ()): table}, signs, group.shared)


def _moments_of(symmetry: Symmetry, a: nn.Module, b: nn.Module, data: Batches | ActivationMoments) -> ActivationMoments:
    """Return the moments over the batches of all ranks, or the given ones."""
    if isinstance(data, ActivationMoments):
        check_networks(symmetry, a=a, b=b)
        if data.symmetry.fingerprint != symmetry.fingerprint:
            raise ValueError("the moments are those of another architecture; expected moments of a and b")
        moments = data
    else:
        moments = ActivationMoments(symmetry, a, b)

        def run() -> None:
            for images in inputs_of(data):
                moments.update(images)

        together(run)
        moments.reduce()
    if not min(moments.samples.values(), default=0):
        hidden = bool(symmetry.structure.charts.stacks)
        raise ValueError(
            "there are no activations; pass at least one batch, and a network with modules that show its units"
            + " (trace_symmetry(..., exchange=False) shows those of modules that elements exchange)." * hidden
            + "." * (not hidden)
        )
    return moments
