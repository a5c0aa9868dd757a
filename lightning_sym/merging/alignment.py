"""Averages of networks aligned up to symmetry."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import Batches
from lightning_sym.connectivity.interpolation import mean_tensors
from lightning_sym.merging.network_files import NetworkFiles
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.distances import squared_distance
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.gathered import Rung
from lightning_sym.symmetry.matching.activations import activation_matching
from lightning_sym.symmetry.matching.balanced import balanced, check_networks
from lightning_sym.symmetry.matching.weights import Match, parameter_distance, weight_matching

# Without a permutation, scales, matrices and rotations must reduce the squared distance below this fraction. Planted
# ones reduce it to 0.06 at most; differences from fine-tuning leave 0.43 at least and are not symmetries.
_WORTH = 0.1


@dataclass(frozen=True, eq=False)
class Merged:
    """The average of aligned networks.

    Attributes:
        network: The average. Its batch norm statistics are averages as well and match no network: recompute them
            with :func:`lightning_sym.networks.recalibrate_batch_norm`.
        elements: One per network: the group element that aligned it.
        found: One per network: the element of its match with the reference, used or not.
        rounds: Number of rounds, including the first match and the last round without a change.
        distances: Root mean squared distance to the average (parameters only), in the gauge of the average: before
            alignment, after the match with the reference, and after every round. Non-increasing.
        reasons: One per network: why it was left unchanged; "" if it was aligned, or is the reference.
    """

    network: nn.Module
    elements: tuple[Element, ...]
    found: tuple[Element, ...]
    rounds: int
    distances: tuple[float, ...]
    reasons: tuple[str, ...]

    def __repr__(self) -> str:
        first, last = self.distances[0], self.distances[-1]
        return (
            f"<Merged: {len(self.elements)} networks, {self.rounds} rounds, distances from {first:.6g} to {last:.6g}>"
        )


def merge(
    symmetry: Symmetry,
    networks: Sequence[nn.Module],
    *,
    method: Literal["weights", "activations"] = "weights",
    batches: Batches | None = None,
    reference: int = 0,
    max_rounds: int = 20,
    scales: bool = True,
    signs: bool = True,
    balance: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
    files: NetworkFiles | None = None,
) -> Merged:
    """Align networks to one another, and return their average.

    Each network is matched with the reference (:func:`weight_matching`), and left unchanged if that is nearer. If no
    unit is permuted, scales, matrices and rotations are used only if they bring the squared distance below a tenth.
    More than two networks are then aligned in rounds, until a round changes none. In random order, each but the
    reference is aligned to the average of the others, in the balanced gauge, starting from its current alignment. The
    rounds are used if they reduce all distances to the average. The average is taken in the scales of the reference. If
    no network changes, it is bitwise the average of the given networks.

    Recompute the batch norm statistics of the result, which needs data, with
    :func:`lightning_sym.networks.recalibrate_batch_norm`.

    Args:
        symmetry: The symmetry of the architecture.
        networks: At least one. Not changed.
        method: "weights", or "activations": one alignment to the reference by activations, without rounds, as the mean
            has no meaningful activations before its batch norms are recalibrated.
        batches: Inputs for "activations"; read once for each network but the reference, so that an iterator suffices
            for two networks only.
        reference: Index of the network that all are aligned to first and that determines the scales of the result.
        max_rounds: Most rounds, >= 1.
        scales: Whether scales may change.
        signs: Whether signs may change.
        balance: Whether to balance networks; ignored without ``scales``.
        seed: Seed of the order of networks and of groups.
        device: As for :func:`weight_matching`.
        files: Storage for copies of networks, which are on the CPU then; None for memory.

    Returns:
        The average, and the alignments.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite, or an argument is out of its range.
        OSError: If there is no space for copies.

    References:
        Ainsworth et al. (2022), "Git Re-Basin", Algorithm 3 (MergeMany), arXiv:2209.04836. The first alignment to a
        reference, the rules for unchanged networks, and the gauge are additions.
    """
    networks = list(networks)
    if not networks:
        raise ValueError("networks must have at least one network, got none.")
    if not 0 <= reference < len(networks):
        raise ValueError(f"reference must be the index of one of {len(networks)} networks, got {reference}.")
    if method not in ("weights", "activations"):
        raise ValueError(f"method must be 'weights' or 'activations', got {method!r}.")
    if method == "activations" and batches is None:
        raise ValueError("method='activations' needs batches of inputs; pass batches=...")
    if method == "activations" and isinstance(batches, Iterator) and len(networks) > 2:
        raise ValueError(
            "batches are read once for each network, but this iterator only once; pass a list or a loader."
        )
    check_integers(max_rounds=max_rounds)
    check_networks(symmetry, **{f"network {number}": network for number, network in enumerate(networks)})
    target, files = networks[reference], files if files is not None else NetworkFiles()

    def match(network: nn.Module) -> Match:
        if method == "activations":
            assert batches is not None
            return activation_matching(
                symmetry, target, network, batches, scales=scales, signs=signs, balance=balance, seed=seed
            )
        return weight_matching(
            symmetry, target, network, scales=scales, signs=signs, balance=balance, seed=seed, device=device
        )

    def match_in_rounds(mean: nn.Module, start: nn.Module, begin: Element, salt: int) -> Match:
        return weight_matching(
            symmetry, mean, start, scales=False, signs=signs, seed=seed + salt, initial=begin, device=device
        )

    with torch.no_grad(), unchecked():  # all others are copies
        found = _Alignment(symmetry, networks, reference, files)
        found.match_all(match, seed)
        if method == "weights" and len(networks) > 2 and max_rounds > 1:
            found.make_rounds(match_in_rounds, max_rounds, seed, balance=scales and balance)
        mean = files.copy(target, mean_tensors(found.networks))
    elements, own, distances = tuple(found.elements), tuple(found.found), tuple(found.distances)
    return Merged(mean, elements, own, len(distances) - 1, distances, tuple(found.reasons))


class _Alignment:
    """Networks during alignment, in the scales of the reference.

    Args:
        symmetry: The symmetry of all.
        networks: The given networks. Not changed.
        reference: Index of the network that stays unchanged.
        files: Storage for copies of networks.

    Attributes:
        networks: The current points of the orbits; unchanged networks are the given ones.
        elements: The elements that map the given networks to these.
        found: The elements of the matches with the reference.
        reasons: Why networks were left unchanged, or "".
        distances: The spread at the beginning and after every round.
    """

    def __init__(self, symmetry: Symmetry, networks: Sequence[nn.Module], reference: int, files: NetworkFiles) -> None:
        self.symmetry, self.given, self.reference, self.files = symmetry, networks, reference, files
        self.networks = list(networks)
        self.elements = [symmetry.identity() for _ in networks]
        self.found, self.reasons = list(self.elements), [""] * len(networks)
        self.distances = [_spread(self.networks)]
        self.others = [number for number in range(len(networks)) if number != reference]

    def match_all(self, match: Callable[[nn.Module], Match], seed: int) -> None:
        """Match each network with the reference, and keep matches that reduce the distance; see :func:`merge`."""
        identities = list(self.elements)
        for number in self.others:
            found = match(self.given[number])
            self.found[number] = found.element
            self.reasons[number] = self._reason(number, found, seed)
            if not self.reasons[number]:
                self.elements[number], self.networks[number] = found.element, self.files.keep(found.network)
        spread = _spread(self.networks)
        if spread > self.distances[0]:  # each is nearer to the reference, and farther from the others
            reason = (
                f"all were nearer to their average before alignment ({self.distances[0]:.4g}; aligned {spread:.4g})"
            )
            self.reasons = [reason if number in self.others else "" for number in range(len(self.given))]
            self.networks, self.elements, spread = list(self.given), identities, self.distances[0]
        self.distances.append(spread)

    def _reason(self, number: int, found: Match, seed: int) -> str:
        """Return why a network should stay unchanged, or ""."""
        before, after = found.distance_before, found.distance_after
        if before == 0:
            return "has the weights of the reference"
        if not after < before:
            return f"was nearer unaligned ({before:.4g}; aligned {after:.4g})"
        if after**2 < _WORTH * before**2:
            return ""
        if self._keeps_order(found.element) or self._is_in_order(number, seed):
            return (
                f"has the same permutation of units, and scales hardly reduce the distance ({before:.4g}; {after:.4g})"
            )
        return ""

    def _is_in_order(self, number: int, seed: int) -> bool:
        """Test whether matching a network, without scales, permutes no unit or head and flips no sign."""
        freedom, (a, b) = ("permutations", "blocks"), (self.given[self.reference], self.given[number])
        found = weight_matching(self.symmetry, a, b, scales=False, seed=seed, freedom=freedom, max_sweeps=1)
        return self._keeps_order(found.element)

    def _keeps_order(self, element: Element) -> bool:
        discrete = (own for own in self.symmetry.factors if own.rung > Rung.SIZES)
        return all(own.is_identity(element.parts[own.name]) for own in discrete)

    def make_rounds(
        self, match: Callable[[nn.Module, nn.Module, Element, int], Match], most: int, seed: int, *, balance: bool
    ) -> None:
        """Align each network but the reference to the average of the others, until a round changes none.

        Args:
            match: Matches a network to a target, starting from an element, with a number for the seed.
            most: Most rounds, including the match with the reference.
            seed: Seed of the order of networks.
            balance: Whether to work in the balanced gauge of the reference.
        """
        symmetry, generator = self.symmetry, torch.Generator().manual_seed(seed)
        able = [number for number in self.others if not self.reasons[number]]
        identity, matched = symmetry.identity(), tuple(self.elements)
        gauge = balanced(symmetry, self.given[self.reference])[1] if balance else identity
        starts = [self.files.keep(symmetry.act(gauge, own)) if balance else own for own in self.networks]
        moving, steps = list(starts), [identity for _ in starts]
        spread = _spread(moving)
        for salt in range(2, most + 1 if able else 0):
            changed = False
            for number in torch.randperm(len(starts), generator=generator).tolist():
                if number not in able:
                    continue
                near = [network for i, network in enumerate(moving) if i != number]
                mean = self.files.copy(near[0], mean_tensors(near))
                found = match(mean, starts[number], steps[number], salt)
                if found.distance_after < parameter_distance(mean, moving[number]) * (1 - 1e-12):
                    steps[number], moving[number], changed = found.element, self.files.keep(found.network), True
            before, spread = spread, _spread(moving)
            if not changed or not spread < before * (1 - 1e-9):
                break
            self._take(gauge, steps, matched)
        self.distances.append(self.distances[-1])

    def _take(self, gauge: Element, steps: Sequence[Element], matched: Sequence[Element]) -> None:
        """Use the alignments of the rounds if they reduce all distances to the average."""
        back = self.symmetry.inverse(gauge)
        elements, networks = list(matched), list(self.networks)
        for number in self.others:
            if not self.reasons[number]:
                step = self.symmetry.compose(back, self.symmetry.compose(steps[number], gauge))
                elements[number] = self.symmetry.compose(step, matched[number])
                networks[number] = self.files.keep(self.symmetry.act(elements[number], self.given[number]))
        spread = _spread(networks)
        if spread < self.distances[-1]:
            self.elements, self.networks = elements, networks
        self.distances.append(min(spread, self.distances[-1]))


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
