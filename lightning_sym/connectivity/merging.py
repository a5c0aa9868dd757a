"""Means of networks that are alike up to symmetry."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import Batches
from lightning_sym.connectivity.interpolation import mean_tensors
from lightning_sym.connectivity.network_files import NetworkFiles
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.matching.activations import activation_matching
from lightning_sym.symmetry.matching.balanced import balanced, check_networks, squared_distance
from lightning_sym.symmetry.matching.proportion import to_scales_of
from lightning_sym.symmetry.matching.weights import Match, parameter_distance, weight_matching


@dataclass(frozen=True, eq=False)
class Merged:
    """The mean of aligned networks.

    Attributes:
        network: The mean. Statistics of its batch norms are means, too, and belong to no network: measure them anew
            by :func:`lightning_sym.networks.recalibrate_batch_norm`.
        elements: One for each network: brings it to where it was averaged.
        rounds: How many rounds were made, the last without a change included.
        distances: Root of the mean squared distance to the mean (parameters only), in the gauge of the alignment,
            before the first round and after every round. Non-increasing.
    """

    network: nn.Module
    elements: tuple[Element, ...]
    rounds: int
    distances: tuple[float, ...]

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
    """Align networks to one another, and return their mean.

    All are balanced, and aligned to the reference (unless that takes them farther apart than they are). Then, in rounds
    and random order, each but the reference is aligned anew to the mean of the others, begun where it is and taken only
    if it comes nearer to them, until a round changes nothing. The mean is taken in the balanced gauge, and brought to
    the scales of the reference.

    Batch norms of the mean need statistics of their own, which need data: call
    :func:`lightning_sym.networks.recalibrate_batch_norm` on the result.

    Args:
        symmetry: The symmetry of the architecture.
        networks: At least one. Not changed.
        method: "weights", or "activations": one alignment to the reference by activations, without rounds, as the mean
            has no meaningful activations before its batch norms are recalibrated.
        batches: Inputs for "activations"; read once for each network but the reference, so an iterator serves for two
            networks only.
        reference: The number of the network whose scales the result has, and to which all are aligned first.
        max_rounds: Most rounds, >= 1.
        scales: Whether magnitudes may change.
        signs: Whether signs may change.
        balance: Whether to balance; ignored without ``scales``.
        seed: Seed of the order of networks and of groups.
        device: As for :func:`weight_matching`.
        files: Keeps the copies of networks that come into being, which are on the CPU then; None for memory.

    Returns:
        The mean, and how it came about.

    Raises:
        ValueError: If a network is not of the traced architecture or not finite, or an argument is out of its range.
        OSError: If there is no space for copies.

    References:
        Ainsworth et al. (2022), "Git Re-Basin", Algorithm 3 (MergeMany), arXiv:2209.04836. The first alignment to a
        reference and the gauge are added.
    """
    networks = list(networks)
    if not networks:
        raise ValueError("networks must have at least one network, got none.")
    if not 0 <= reference < len(networks):
        raise ValueError(f"reference must be the number of one of {len(networks)} networks, got {reference}.")
    if method not in ("weights", "activations"):
        raise ValueError(f"method must be 'weights' or 'activations', got {method!r}.")
    if method == "activations" and batches is None:
        raise ValueError("method='activations' needs batches of inputs; pass batches=...")
    if method == "activations" and isinstance(batches, Iterator) and len(networks) > 2:
        raise ValueError("batches are read once for each network, this iterator only once; pass a list or a loader.")
    check_integers(max_rounds=max_rounds)
    check_networks(symmetry, **{f"network {number}": network for number, network in enumerate(networks)})

    def match(target: nn.Module, start: nn.Module, begin: Element | None, salt: int) -> Match:
        if method == "activations":
            assert batches is not None
            return activation_matching(symmetry, target, start, batches, scales=False, signs=signs)
        return weight_matching(
            symmetry, target, start, scales=False, signs=signs, seed=seed + salt, initial=begin, device=device
        )

    files = files if files is not None else NetworkFiles()

    def form_of(network: nn.Module) -> tuple[nn.Module, Element]:
        form, gauge = balanced(symmetry, network)
        return files.keep(form), gauge

    with torch.no_grad(), unchecked():  # all else are copies
        identity = symmetry.identity()
        forms = [form_of(own) if scales and balance else (own, identity) for own in networks]
        gauges = [gauge for _, gauge in forms]
        rounds = max_rounds if method == "weights" and len(networks) > 2 else 1
        found = _Alignment([start for start, _ in forms], identity, match, files)
        del forms
        distances = found.run(reference, rounds, torch.Generator().manual_seed(seed))
        merged = files.copy(found.networks[0], mean_tensors(found.networks))
        gauge = gauges[reference]
        back = to_scales_of(symmetry, networks[reference], gauge, merged) if scales and balance else identity
        merged = symmetry.act(back, merged, inplace=True)
        totals = [
            symmetry.compose(back, symmetry.compose(element, gauge))
            for element, gauge in zip(found.elements, gauges, strict=True)
        ]
        return Merged(merged, tuple(totals), len(distances) - 1, tuple(distances))


class _Alignment:
    """Networks on their way to one another.

    Args:
        starts: The networks.
        identity: The element that changes nothing.
        match: Matches to a target a network, begun at an element (None: anywhere), with this number for the seed.
        files: Keeps copies of networks.

    Attributes:
        networks: The members of the orbits that they have come to.
        elements: What brings the starts there.
    """

    def __init__(
        self,
        starts: list[nn.Module],
        identity: Element,
        match: Callable[[nn.Module, nn.Module, Element | None, int], Match],
        files: NetworkFiles,
    ) -> None:
        self.starts, self.match, self.files = starts, match, files
        self.networks = list(starts)
        self.elements = [identity for _ in starts]

    def run(self, reference: int, rounds: int, generator: torch.Generator) -> list[float]:
        """Align all to the reference, then in rounds each to the mean of the others.

        Returns:
            The distances before the first round and after every round.
        """
        before = list(self.networks), list(self.elements)
        distances = [self._spread()]
        others = [number for number in range(len(self.starts)) if number != reference]
        for number in others:
            self._align(number, self.starts[reference], None, 0)
        if self._spread() > distances[0]:
            self.networks, self.elements = before  # they were aligned better before
        distances.append(self._spread())
        for salt in range(2, rounds + 1):
            for number in torch.randperm(len(self.starts), generator=generator).tolist():
                if number in others:
                    near = [network for i, network in enumerate(self.networks) if i != number]
                    self._align(number, self.files.copy(near[0], mean_tensors(near)), self.elements[number], salt)
            distances.append(min(self._spread(), distances[-1]))  # greater by rounding only
            if not distances[-1] < distances[-2] * (1 - 1e-9):
                break
        return distances

    def _align(self, number: int, target: nn.Module, begin: Element | None, salt: int) -> None:
        match = self.match(target, self.starts[number], begin, salt)
        distance = parameter_distance(target, self.networks[number])
        if begin is None or match.distance_after < distance * (1 - 1e-12):
            self.elements[number], self.networks[number] = match.element, self.files.keep(match.network)

    def _spread(self) -> float:
        """Return the root of the mean squared distance to the mean."""
        parameters = [dict(own.named_parameters()) for own in self.networks]
        squares = (
            squared_distance({name: mean}, own)
            for name, mean in mean_tensors(self.networks)
            if name in parameters[0]
            for own in parameters
        )
        return math.sqrt(math.fsum(squares) / len(self.networks))
