"""Alignment of networks up to symmetry, and averages of aligned networks."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn

from lightning_sym._checks import as_list, check_integers, is_integer
from lightning_sym._distributed import Batches, device_of
from lightning_sym._notebook import Tabular
from lightning_sym._text import unknown
from lightning_sym.connectivity.interpolation import mean_tensors
from lightning_sym.merging.network_files import NetworkFiles
from lightning_sym.merging.sketches import EXPLAINED, WORTH, sketched
from lightning_sym.symmetry import Element, Match, activation_matching, parameter_distance, weight_matching
from lightning_sym.symmetry.arrays import give_back_memory
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.distances import squared_distance
from lightning_sym.symmetry.group.assignment import Tables, within_cells
from lightning_sym.symmetry.group.gathered import Rung
from lightning_sym.symmetry.matching.balanced import balanced, check_architecture, check_networks, comparable
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM, Descent, descend
from lightning_sym.symmetry.matching.recognition import Recognised, recognised
from lightning_sym.symmetry.moving import MovedTensors

How = Literal["auto", "weights", "activations", "none"]
HOW: tuple[How, ...] = ("auto", "weights", "activations", "none")
"""The ways to align."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """Networks aligned to a reference.

    Attributes:
        elements: One per network: the group element that aligned it; the identity if it stays unchanged.
        found: One per network: the element of its match with the reference, used or not.
        networks: The aligned networks. Those unchanged, and the reference, are the given objects.
        reasons: One per network: why it stays unchanged; "" if it was moved, or is the reference.
        distances: One per network: Euclidean distance of its parameters to those of the reference, before and after.
        spreads: Root mean squared distances to the average; see :attr:`Merged.distances`. Empty without a search.
    """

    elements: tuple[Element, ...]
    found: tuple[Element, ...]
    networks: tuple[nn.Module, ...]
    reasons: tuple[str, ...]
    distances: tuple[tuple[float, float], ...]
    spreads: tuple[float, ...] = ()

    @property
    def moved(self) -> bool:
        """Whether any network was moved."""
        return self.reasons.count("") > 1


@dataclass(frozen=True, eq=False)
class Merged(Tabular):
    """The average of aligned networks.

    Attributes:
        network: The average. Its batch norm statistics are averages as well and match no network: recompute them
            with :func:`lightning_sym.networks.recalibrate_batch_norm`.
        elements: One per network: the group element that aligned it.
        found: One per network: the element of its match with the reference, used or not.
        rounds: Number of rounds, including the first match and the last round without a change.
        distances: Root mean squared distance to the average (parameters only), in the gauge of the average: before
            alignment, after the match with the reference, and after every round. Non-increasing.
        reasons: One per network: why it stays unchanged; "" if it was aligned, or is the reference.
    """

    network: nn.Module
    elements: tuple[Element, ...]
    found: tuple[Element, ...]
    rounds: int
    distances: tuple[float, ...]
    reasons: tuple[str, ...]

    def titled_rows(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the number of networks and rounds, and the mean distance to the average before and after."""
        return f"Average of {len(self.elements)} networks, rounds: {self.rounds}", [
            {"distance to the average": name, "root mean square": distance}
            for name, distance in zip(
                ("before alignment", "after the match", *(f"round {n}" for n in range(1, len(self.distances)))),
                self.distances,
                strict=False,
            )
        ]

    def __repr__(self) -> str:
        first, last = self.distances[0], self.distances[-1]
        return (
            f"<Merged: {len(self.elements)} networks, {self.rounds} rounds, distances from {first:.6g} to {last:.6g}>"
        )


def align(
    symmetry: Symmetry,
    networks: Sequence[nn.Module],
    *,
    how: How = "auto",
    batches: Batches | None = None,
    reference: int = 0,
    max_rounds: int = 20,
    scales: bool = True,
    signs: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
    copies: NetworkFiles | None = None,
) -> Alignment:
    """Align networks to one of them, where this brings them nearer.

    With ``how="auto"``, each network is handled as follows:

    1. If its units, heads and signs are in the order of the reference, and scales, matrices and rotations cannot bring
       the squared distance below a tenth, it stays unchanged. Sketches decide most cases in one reading of the weights
       (:func:`lightning_sym.merging.sketches.sketched`); in doubt, units are matched without scales.
    2. If units seem to have moved only, they are recognised from a few random directions
       (:func:`lightning_sym.symmetry.matching.recognition.recognised`). No search follows if the remaining
       distance is rounding, or if the moved network passes step 1.
    3. Otherwise it is matched with the whole group (:func:`weight_matching`). If its units are in order, the match is
       used only if it brings the squared distance below a tenth.

    With ``how="weights"``, only step 3 is used, except for networks that are recognised up to rounding.

    In all cases a network stays unchanged if that is nearer. With "weights" or "auto", more than two networks, of
    which some were moved by a search, are then aligned in rounds until a round changes none. In random order, each
    moved network is aligned to the average of the others, in the balanced gauge, starting from its current alignment.
    The rounds are used if they reduce all distances to the average. Networks that were recognised need no rounds: they
    are in the order of the reference.

    Args:
        symmetry: The symmetry of the architecture.
        networks: At least one. Not changed.
        how: "auto"; "weights" or "activations", which match every network with the whole group; "none". By activations,
            there are no rounds, as the mean has no meaningful activations before its batch norms are recalibrated.
        batches: Inputs for "activations"; read once for each network but the reference, so that an iterator suffices
            for two networks only.
        reference: Index of the network that stays, and determines permutation and scales.
        max_rounds: Most rounds, >= 1.
        scales: Whether scales may change.
        signs: Whether signs may change.
        seed: Seed of the order of networks and of groups, and of sketches.
        device: As for :func:`weight_matching`.
        copies: Storage for moved networks, which are on the CPU then; None for memory.

    Returns:
        The alignment.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite, or an argument is out of its range.
        OSError: If there is no space for copies.

    References:
        Ainsworth et al. (2022), "Git Re-Basin", Algorithm 3 (MergeMany), arXiv:2209.04836. The first alignment to a
        reference, the rules for networks that stay, and the gauge are additions.
    """
    networks = as_list("networks", networks)
    _check_arguments(networks, how, batches, reference)
    check_integers(max_rounds=max_rounds)
    for number, network in enumerate(networks):
        check_architecture(symmetry, network, f"network {number}")
    target, copies = networks[reference], copies if copies is not None else NetworkFiles()

    def match(network: nn.Module) -> Match:
        if how == "activations":
            assert batches is not None
            return activation_matching(symmetry, target, network, batches, scales=scales, signs=signs, seed=seed)
        return weight_matching(symmetry, target, network, scales=scales, signs=signs, seed=seed, device=device)

    def match_in_rounds(mean: nn.Module, start: nn.Module, begin: Element, salt: int) -> Match:
        return weight_matching(
            symmetry, mean, start, scales=False, signs=signs, seed=seed + salt, initial=begin, device=device
        )

    with torch.no_grad(), unchecked():  # all others are copies
        found = _Search(symmetry, networks, reference, copies, seed=seed, device=device, scales=scales, signs=signs)
        if how == "auto":
            found.leave_in_order()
        elif how == "none":
            found.leave_all()
        unknown = set(found.open) - found.known.keys()
        if unknown:
            check_networks(symmetry, **{f"network {n}": networks[n] for n in {reference, *unknown}})
        if how == "weights":
            found.recognise_copies()
        searched = set(found.open) - found.known.keys()
        if found.open:
            found.match_all(match, forced=how != "auto")
        if how != "activations" and len(networks) > 2 and max_rounds > 1 and searched & set(found.moved):
            found.make_rounds(match_in_rounds, max_rounds, seed, balance=scales)
    return found.alignment()


def aligned_without_search(
    symmetry: Symmetry,
    networks: Sequence[nn.Module],
    *,
    how: Literal["auto", "weights"] = "auto",
    seed: int = 0,
    copies: NetworkFiles | None = None,
) -> Alignment | None:
    """Return the alignment, if :func:`align` finds it without a search.

    Args:
        symmetry: The symmetry of the architecture, possibly without its translations (``shifts=False``).
        networks: At least one; the first is the reference. Not changed.
        how: As for :func:`align`.
        seed: As for :func:`align`.
        copies: As for :func:`align`.

    Returns:
        The alignment; None if only a search can decide.

    Raises:
        ValueError: If a network is not of the traced architecture.
    """
    for number, network in enumerate(networks):
        check_architecture(symmetry, network, f"network {number}")
    with torch.no_grad(), unchecked():
        found = _Search(symmetry, networks, 0, copies or NetworkFiles(), seed=seed, translated=True)
        found.leave_in_order() if how == "auto" else found.recognise_copies()
        if found.open != list(found.known):
            return None
        if found.open:
            found.match_all(None, forced=how != "auto")
    return found.alignment()


def _check_arguments(networks: Sequence[nn.Module], how: str, batches: Batches | None, reference: int) -> None:
    if not is_integer(reference, 0) or reference >= len(networks):
        raise ValueError(f"reference must be the index of one of {len(networks)} networks, got {reference}.")
    if how not in HOW:
        raise ValueError(unknown("way to align", how, HOW))
    if how == "activations" and batches is None:
        raise ValueError("aligning by activations needs batches of inputs; pass batches=...")
    if how == "activations" and isinstance(batches, Iterator) and len(networks) > 2:
        raise ValueError(
            "batches are read once for each network, but this iterator only once; pass a list or a loader."
        )


class AlignOptions(TypedDict, total=False):
    """Optional arguments of :func:`align`, which describes them, but for ``how``."""

    batches: Batches | None
    reference: int
    max_rounds: int
    scales: bool
    signs: bool
    seed: int
    device: torch.device | str | None
    copies: NetworkFiles | None


def merge(
    symmetry: Symmetry, networks: Sequence[nn.Module], *, align: How = "auto", **options: Unpack[AlignOptions]
) -> Merged:
    """Align networks to one another, and return their average.

    The average has the permutation and the scales of the reference. If no network is moved, it is bitwise
    the average of the given networks.

    Recompute the batch norm statistics of the result, which needs data, with
    :func:`lightning_sym.networks.recalibrate_batch_norm`.

    Args:
        symmetry: The symmetry of the architecture.
        networks: At least one. Not changed.
        align: As ``how`` of :func:`align`, which describes the alignment.
        **options: Further arguments of :func:`align`. ``copies`` also stores the average.

    Returns:
        The average, and the alignments.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite, or an argument is out of its range.
        OSError: If there is no space for copies.
    """
    networks = as_list("networks", networks)
    found = _align(symmetry, networks, how=align, **options)
    with torch.no_grad():
        spreads = found.spreads or (_spread(networks),) * 2
        copies, reference = options.get("copies") or NetworkFiles(), networks[options.get("reference", 0)]
        mean = copies.copy(reference, mean_tensors(found.networks))
    return Merged(mean, found.elements, found.found, len(spreads) - 1, spreads, found.reasons)


_align = align  # an argument of `merge` has the same name


class _Search:
    """Networks during alignment, in the scales of the reference.

    Args:
        symmetry: The symmetry of all.
        networks: The given networks. Not changed.
        reference: Index of the network that stays unchanged.
        copies: Storage for moved networks.
        seed: Seed of the order of groups, and of sketches.
        device: As for :func:`weight_matching`.
        scales: Whether scales, matrices and rotations may change.
        signs: Whether signs may change.
        translated: Whether there may be translations that the symmetry does not include.

    Attributes:
        networks: The current points of the orbits; unchanged networks are the given ones.
        elements: The elements that map the given networks to these.
        found: The elements of the matches with the reference.
        reasons: Why networks were left unchanged, or "".
        distances: The distance of each to the reference, at first and now.
        spreads: The spread at the beginning and after every round; empty without a search.
        open: Indices of the networks without a decision.
        ordered: Those of them with units in the order of the reference.
        known: Matches of networks with units that only moved, by index.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        networks: Sequence[nn.Module],
        reference: int,
        copies: NetworkFiles,
        *,
        seed: int,
        device: torch.device | str | None = None,
        scales: bool = True,
        signs: bool = True,
        translated: bool = False,
    ) -> None:
        self.symmetry, self.given, self.reference, self.copies = symmetry, networks, reference, copies
        self.target, self.seed, self.scales, self.signs = networks[reference], seed, scales, signs
        self.device = torch.device(device) if device is not None else device_of(self.target)
        self._sketched = functools.partial(
            sketched, symmetry, symmetry.tensors(self.target), seed=seed, translated=translated
        )
        self.networks = list(networks)
        self.elements = [symmetry.identity() for _ in networks]
        self.found, self.reasons = list(self.elements), [""] * len(networks)
        self.distances = [(0.0, 0.0)] * len(networks)
        self.spreads: list[float] = []
        self.others = [number for number in range(len(networks)) if number != reference]
        self.open, self.ordered = list(self.others), set[int]()
        self.known: dict[int, Match] = {}

    @property
    def moved(self) -> list[int]:
        """The indices of the networks that have moved."""
        return [number for number in self.others if not self.reasons[number]]

    def alignment(self) -> Alignment:
        """Return the result."""
        parts = (self.elements, self.found, self.networks, self.reasons, self.distances, self.spreads)
        return Alignment(*(tuple(own) for own in parts))  # type: ignore[arg-type]

    def _leave(self, number: int, distance: float, reason: str) -> None:
        self.reasons[number], self.distances[number] = reason, (distance, distance)
        self.elements[number], self.networks[number] = self.symmetry.identity(), self.given[number]
        self.open = [other for other in self.open if other != number]

    def leave_all(self) -> None:
        """Leave all networks unchanged."""
        for number in self.others:
            distance = parameter_distance(self.target, self.given[number])
            self._leave(number, distance, "was not aligned")

    def leave_in_order(self) -> None:
        """Leave networks in the order of the reference that scales, matrices and rotations hardly bring nearer."""
        for number in self.others:
            found = self._sketched(self.symmetry.tensors(self.given[number]))
            before = found.distance
            if before == 0:
                self._leave(number, 0.0, "has the weights of the reference")
            elif found.doubtful and self._recognise(number, before, self._suffices):
                continue
            elif math.isfinite(before) and (found.in_order or self._is_in_order(number, found.doubtful)):
                self.ordered.add(number)
                if not self.scales or found.explained < EXPLAINED:
                    reason = f"has its units in the order of the reference (distance {before:.4g})"
                    self._leave(number, before, reason)

    def recognise_copies(self) -> None:
        """Match networks that equal the reference, up to rounding, but for the places of their units."""
        for number in self.others:
            before = parameter_distance(self.target, self.given[number])
            if before == 0:
                self._leave(number, 0.0, "has the weights of the reference")
            elif math.isfinite(before):
                self._recognise(number, before, lambda given, found: found.settled)

    def _suffices(self, given: nn.Module, found: Recognised) -> bool:
        """Return whether a recognised network is in order and hardly brought nearer by scales, matrices, rotations."""
        if found.settled or self._keeps_order(found.element):
            return found.settled
        left = self._sketched(MovedTensors(self.symmetry.factors, found.element, self.symmetry.tensors(given)))
        return left.in_order and (not self.scales or left.explained < EXPLAINED)

    def _recognise(self, number: int, before: float, suffices: Callable[[nn.Module, Recognised], bool]) -> bool:
        """Match a network with units that only moved, if it is one.

        Args:
            number: Index of the network.
            before: Its distance to the reference.
            suffices: Whether the network, moved so, needs no search.
        """
        symmetry, given = self.symmetry, self.given[number]
        freedom = FREEDOM if self.scales else ("permutations", "blocks")
        candidates = recognised(
            symmetry, self.target, given, signs=self.signs, device=self.device, seed=self.seed, freedom=freedom
        )
        found = next((own for own in candidates if suffices(given, own)), None)
        candidates.close()  # it holds a copy of the network
        give_back_memory()
        if found is None:
            return False
        network = self.copies.copy(given, symmetry.moved_tensors(found.element, given))
        after = parameter_distance(self.target, network)
        if not after < before:
            return False
        objective = found.objective
        self.known[number] = Match(found.element, objective, 1, objective[-1:], network, before, after, "weights")
        return True

    def _is_in_order(self, number: int, doubtful: frozenset[int]) -> bool:
        """Test whether matching a network, without scales, permutes no unit or head and flips no sign.

        Args:
            number: Index of the network.
            doubtful: Indices of the groups that may move; the others keep their order.
        """
        compared = comparable(self.symmetry, self.target, self.given[number], balance=False)
        descent = Descent(compared, signs=True, device=self.device, freedom=("permutations", "blocks"))
        for group in descent.groups:
            gain = descent.gain(group) if group.index in doubtful and group.assigned else None
            if gain is not None and gain.parts and within_cells(group, Tables(gain)).moves:
                return False  # most units of another seed do
        for system in descent.systems:  # which move as a whole
            if doubtful & system.groups.keys():
                doubtful = doubtful | system.groups.keys()
        descent.hold({group.index: () for group in descent.groups if group.index not in doubtful}, {})
        found = descend(descent, restarts=1, seed=self.seed, max_sweeps=1)
        return self._keeps_order(compared.back(found.element))

    def _keeps_order(self, element: Element) -> bool:
        discrete = (own for own in self.symmetry.factors if own.rung > Rung.SIZES)
        return all(own.is_identity(element.parts[own.name]) for own in discrete)

    def match_all(self, match: Callable[[nn.Module], Match] | None, *, forced: bool) -> None:
        """Match each undecided network with the reference, and keep matches that reduce the distance.

        Args:
            match: Matches a network with the reference; None if all matches are known.
            forced: Whether matches are kept also where units are in order and the distance is hardly reduced.
        """
        pair = len(self.given) == 2  # both are at half their distance from the average
        self.spreads.append(0.0 if pair else _spread(self.given))
        tried = list(self.open)
        for number in tried:
            known = self.known.pop(number, None)
            if known is None:
                assert match is not None
                found = match(self.given[number])
            else:
                found = known
            self.found[number] = found.element
            self.distances[number] = found.distance_before, found.distance_after
            if reason := self._reason(number, found, forced=forced):
                self._leave(number, found.distance_before, reason)
            else:
                self.elements[number] = found.element
                self.networks[number] = found.network if known else self.copies.keep(found.network)
        if pair:
            self.spreads[0], spread = (own / 2 for own in self.distances[self.others[0]])
        else:
            spread = _spread(self.networks) if self.moved else self.spreads[0]
        if spread > self.spreads[0]:  # each is nearer to the reference, and farther from the others
            spread, aligned = self.spreads[0], spread
            reason = f"was nearer to the average of all as it was ({spread:.4g}; aligned {aligned:.4g})"
            for number in self.moved:
                self._leave(number, self.distances[number][0], reason)
        self.spreads.append(spread)

    def _reason(self, number: int, found: Match, *, forced: bool) -> str:
        """Return why a network should stay unchanged, or ""."""
        before, after = found.distance_before, found.distance_after
        if before == 0:
            return "has the weights of the reference"
        if after == before and self._keeps_order(found.element):
            return f"has its units in the order of the reference (distance {before:.4g})"
        if not after < before:
            return f"was nearer as it was ({before:.4g}; aligned {after:.4g})"
        if forced or after**2 < WORTH * before**2:
            return ""
        if number in self.ordered or self._keeps_order(found.element):
            return (
                "has its units in the order of the reference, and scales hardly reduce the distance "
                f"({before:.4g}; {after:.4g})"
            )
        return ""

    def make_rounds(
        self, match: Callable[[nn.Module, nn.Module, Element, int], Match], most: int, seed: int, *, balance: bool
    ) -> None:
        """Align each network but the reference to the average of the others, until a round changes none.

        The order is drawn among networks ranked by their distances, so that it does not depend on the given one.

        Args:
            match: Matches a network to a target, starting from an element, with a number for the seed.
            most: Most rounds, including the match with the reference.
            seed: Seed of the order of networks.
            balance: Whether to work in the balanced gauge of the reference.
        """
        symmetry, generator = self.symmetry, torch.Generator().manual_seed(seed)
        able, ranked = self.moved, sorted(range(len(self.given)), key=lambda own: self.distances[own][::-1])
        identity, matched = symmetry.identity(), tuple(self.elements)
        gauge = balanced(symmetry, self.target)[1] if balance else identity
        starts = [self.copies.keep(symmetry.act(gauge, own)) if balance else own for own in self.networks]
        moving, steps = list(starts), [identity for _ in starts]
        spread = _spread(moving)
        for salt in range(2, most + 1):
            changed = False
            for rank in torch.randperm(len(starts), generator=generator).tolist():
                if (number := ranked[rank]) not in able:
                    continue
                near = [moving[other] for other in ranked if other != number]
                mean = self.copies.copy(near[0], mean_tensors(near))
                found = match(mean, starts[number], steps[number], salt)
                if found.distance_after < parameter_distance(mean, moving[number]) * (1 - 1e-12):
                    steps[number], moving[number], changed = found.element, self.copies.keep(found.network), True
            before, spread = spread, _spread(moving)
            if not changed or not spread < before * (1 - 1e-9):
                break
            self._take(gauge, steps, matched)
        self.spreads.append(self.spreads[-1])

    def _take(self, gauge: Element, steps: Sequence[Element], matched: Sequence[Element]) -> None:
        """Use the alignments of the rounds if they reduce all distances to the average."""
        back = self.symmetry.inverse(gauge)
        elements, networks = list(matched), list(self.networks)
        for number in self.others:
            if not self.reasons[number]:
                step = self.symmetry.compose(back, self.symmetry.compose(steps[number], gauge))
                elements[number] = self.symmetry.compose(step, matched[number])
                networks[number] = self.copies.keep(self.symmetry.act(elements[number], self.given[number]))
        spread = _spread(networks)
        if spread < self.spreads[-1]:
            self.elements, self.networks = elements, networks
            for number in self.moved:
                after = parameter_distance(self.target, networks[number])
                self.distances[number] = self.distances[number][0], after
        self.spreads.append(min(spread, self.spreads[-1]))


def _spread(networks: Sequence[nn.Module]) -> float:
    """Return the root mean squared distance to the average."""
    parameters = [dict(own.named_parameters()) for own in networks]
    squares = (
        squared_distance({name: mean}, own)
        for name, mean in mean_tensors(networks)
        if name in parameters[0]
        for own in parameters
    )
    return math.sqrt(math.fsum(squares) / len(networks))
