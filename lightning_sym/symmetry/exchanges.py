"""Exchanges of equal parts that change no output of a small network, and that its group lacks.

See docs/theory/tracing.md, 8.5.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.jacobians import outputs_at, slopes_of, varied
from lightning_sym.symmetry.matching.distance import orbit_distance
from lightning_sym.symmetry.tangents import OrbitTangents, tangents_at
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import constant_names, copied, state_tensors

# Differences that count as rounding, relative to a number, and the size of the largest number that counts as zero.
_EQUAL, _ZERO = 1e-9, 1e-12
# Slopes smaller than this part of the largest are compared as if they were as large.
_SMALL = 1e-4
# Relative distance of weights from the group's directions and orbits that counts as rounding.
_SLID = 1e-6
# Numbers of random inputs of each length, and of those with integers: one input holds few of them.
_INPUTS, _TOKENS = 1, 4
# Maximum number of refinements in turn.
_ROUNDS = 12
# Maximum numbers of pairs that are tried, and of entries that are told apart for each.
_PAIRS, _STEPS = 4, 100
# Numbers of permutations that are drawn to find the group's orbits, and of weights at which outputs are compared.
_ELEMENTS, _WEIGHTS = 8, 3


def missing_exchange(
    symmetry: Symmetry, network: nn.Module, calls: Sequence[Call], smooth: Callable[[], AbstractContextManager[Any]]
) -> tuple[str, ...]:
    """Search for a permutation of a network's weights and statistics that keeps all outputs, and that its group lacks.

    Entries that such a permutation moves to each other have equal derivatives wherever they are equal. So all entries
    of tensors of one shape start with one value, and get further values where derivatives differ, until none do (colour
    refinement; McKay and Piperno, "Practical graph isomorphism, II", 2014, section 2). Entries that remain equal
    although no element moves one to the other are then marked, one in each of two copies of the weights. Both are
    refined alike until all entries differ, which gives the permutation. It counts if it keeps the outputs of random
    weights, and if the orbit does not hold the permuted weights.

    Args:
        symmetry: The symmetry of the network.
        network: The network in float64 and evaluation mode, with generic weights, which change.
        calls: Inputs of every length.
        smooth: Makes the context in which the network is differentiated.

    Returns:
        The names of the tensors that the first such permutation moves; nothing if none is found, which proves nothing.
    """
    with smooth():
        entries, shapes = _Entries(symmetry, network, calls), dict[torch.Size, int]()
        begin = [torch.full(own.shape, shapes.setdefault(own.shape, len(shapes))) for own in entries.tensors.values()]
        refined = entries.refined(_flat(begin)[None]) if begin else None
    if refined is None:
        return ()
    (labels,), (live,) = refined
    pairs = (pair for pair in _apart(labels, live, _orbits(entries)) if not entries.are_slid(pair))
    for pair in itertools.islice(pairs, _PAIRS):
        with smooth():
            order = entries.permutation(labels, pair)
        if order is not None and not entries.is_known(order):
            return entries.names(order != torch.arange(len(order)))
    return ()


class _Entries:
    """All entries of a network's parameters and statistics, one after the other, and its outputs as their function."""

    def __init__(self, symmetry: Symmetry, network: nn.Module, calls: Sequence[Call]) -> None:
        self.symmetry, self.network = symmetry, network
        constants, held = constant_names(network), symmetry.structure.charts.held_in
        known = symmetry.architecture.layout.keys() - constants  # without buffers that a network makes when it runs
        every = {name: own for name, own in state_tensors(network).items() if name in known}
        self.tensors = {name: own.detach().clone() for name, own in every.items() if own.is_floating_point()}
        variances = {own for slot in symmetry.structure.slots if slot.kind == "variance" for own in held(slot.tensor)}
        self.positive = _flat([torch.full(own.shape, name in variances) for name, own in self.tensors.items()])
        sizes = [
            1 / math.sqrt(own[0].numel() or 1) if own.ndim > 1 and len(own) else 0.7 for own in self.tensors.values()
        ]
        parts = zip(sizes, self.tensors.values(), strict=True)
        self.sizes = _flat([torch.full(own.shape, size, dtype=torch.float64) for size, own in parts])
        self.calls, self.generator = [outputs_at(network, call) for call in calls], torch.Generator().manual_seed(6)
        self.renew()

    @cached_property
    def tangents(self) -> OrbitTangents:
        """The tangents of the orbit at the network's weights."""
        return tangents_at(self.symmetry, self.network)

    def renew(self) -> None:
        """Draw other inputs."""
        self.inputs = list[tuple[int, list[Tensor]]]()
        for number, (_, tensors) in enumerate(self.calls):
            count = _INPUTS if all(own.is_floating_point() for own in tensors) else _TOKENS
            drawn = [varied(own, count, self.generator) for own in tensors]
            self.inputs += [(number, [own[index] for own in drawn]) for index in range(count)]

    def outputs(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return all outputs at all inputs; NaN where the network refuses its weights. Shape (outputs,)."""
        try:
            return torch.cat([self.calls[number][0](weights, given) for number, given in self.inputs])
        except Exception:  # an inverse of equal entries, for example
            return torch.full((1,), math.nan, dtype=torch.float64)

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Cut entries into tensors by name."""
        parts = torch.split(values, [own.numel() for own in self.tensors.values()])
        return {name: part.view(own.shape) for (name, own), part in zip(self.tensors.items(), parts, strict=True)}

    def names(self, chosen: Tensor) -> tuple[str, ...]:
        """Return the names of the tensors with chosen entries. Shape of the mask: (entries,)."""
        return tuple(name for name, own in self.named(chosen).items() if bool(own.any()))

    def drawn(self, labels: Tensor) -> Tensor:
        """Draw a random value for each label. Shape (..., entries), as that of the labels."""
        numbers = torch.randn(int(labels.max()) + 1, dtype=torch.float64, generator=self.generator)
        values = (numbers + 0.2 * numbers.sign())[labels] * self.sizes
        return torch.where(self.positive, values.abs() + 0.3, values)

    def refined(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give entries with equal labels and unequal derivatives other labels, the same in all copies.

        Args:
            labels: Labels from 0 on. Shape (copies, entries), int64.

        Returns:
            The labels, and a mask of the entries with derivatives, each of this shape; None where values are not
            finite, or the copies turn out to differ.
        """
        count = len(self.outputs(self.named(self.drawn(labels[0]))))
        sums = torch.randn(count, generator=self.generator, dtype=torch.float64)
        for _ in range(_ROUNDS):
            weights = self.drawn(labels)
            found = [slopes_of(lambda own, _: self.outputs(own), self.named(own), (), sums) for own in weights]
            slopes = torch.stack([_flat(own.values()) for own in found if own is not None] or [sums[:0]])
            if slopes.shape != labels.shape or not bool(slopes.isfinite().all()):
                return None
            count, labels = int(labels.max()) + 1, _told_apart(labels, slopes)
            counts = torch.stack([own.bincount(minlength=int(labels.max()) + 1) for own in labels])
            if bool((counts != counts[0]).any()):
                return None
            if int(labels.max()) + 1 == count:
                break
        return labels, slopes.abs() > _ZERO * slopes.abs().max()

    def permutation(self, labels: Tensor, pair: tuple[int, int]) -> Tensor | None:
        """Return a permutation that moves the first entry of a pair to the second and keeps all outputs; or None.

        Args:
            labels: See :meth:`refined`. Shape (entries,).
            pair: The entries.
        """
        both, moved = labels.repeat(2, 1), torch.tensor(pair)[:, None]
        for _ in range(_STEPS):
            both = both.scatter(1, moved, int(both.max()) + 1 + torch.arange(moved.shape[1]).expand_as(moved))
            if (refined := self.refined(both)) is None:
                return None
            both, live = refined
            left = torch.nonzero((both[0].bincount()[both[0]] > 1) & live[0]).flatten()
            if not len(left):
                break
            # Entries of one label stay where they are if these are the same in both copies.
            moved = torch.stack([torch.nonzero(own == both[0, left[0]]).flatten() for own in both])
            moved = moved if torch.equal(*moved) else moved[:, :1]
        order = torch.empty_like(labels)
        order[both[1].argsort(stable=True)] = both[0].argsort(stable=True)
        return order if self._keeps_outputs(order) else None

    def _keeps_outputs(self, order: Tensor) -> bool:
        """Test a permutation on random weights, at which a single entry that it moves makes a difference."""
        moved = int(torch.nonzero(order != torch.arange(len(order)))[0])
        for _ in range(_WEIGHTS):
            self.renew()
            weights = self.drawn(torch.arange(len(order)))
            single = weights.clone()
            single[moved] = weights[order[moved]]
            before, after, other = (self.outputs(self.named(own)) for own in (weights, weights[order], single))
            size = _EQUAL * float(before.abs().max())
            if not float((after - before).abs().max()) <= size < float((other - before).abs().max()):
                return False
        return True

    def are_slid(self, pair: tuple[int, int]) -> bool:
        """Test whether the group moves two entries by opposite amounts: then outputs depend on their sum alone."""
        values = torch.zeros_like(self.sizes)
        values[[*pair]] = torch.tensor([1.0, -1.0], dtype=values.dtype)
        own = self.named(values)
        along = [own.get(name, torch.zeros_like(weight)) for name, weight in self.network.named_parameters()]
        return float(torch.linalg.vector_norm(self.tangents.across(_flat(along)))) < _SLID

    def is_known(self, order: Tensor) -> bool:
        """Test whether the orbit of random weights holds the permuted ones, as far as it can be told."""
        weights, other = self.drawn(torch.arange(len(order))), copied(self.network)
        self.network.load_state_dict(self.named(weights), strict=False)
        other.load_state_dict(self.named(weights[order]), strict=False)
        try:
            found = orbit_distance(self.symmetry, self.network, other).upper
        except (RuntimeError, ValueError, np.linalg.LinAlgError):  # these weights have no balanced form
            return True
        return found < _SLID * float(torch.linalg.vector_norm(weights[order] - weights))


def _flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _told_apart(labels: Tensor, slopes: Tensor) -> Tensor:
    """Return labels that differ where labels or slopes do. All tensors: shape (copies, entries)."""
    sorting = np.lexsort((slopes.flatten().numpy(), labels.flatten().numpy()))
    sorted_labels, sorted_slopes = (own.flatten()[sorting] for own in (labels, slopes))
    size = sorted_slopes[1:].abs().clamp(min=_SMALL * float(slopes.abs().max()))
    new = (sorted_labels.diff() != 0) | (sorted_slopes.diff() > _EQUAL * size)
    told = torch.empty(labels.numel(), dtype=torch.int64)
    told[torch.from_numpy(sorting)] = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    return told.view(labels.shape)


def _orbits(entries: "_Entries") -> Tensor:
    """Number the orbits of entries under permutations of the group, and those of units that matrices mix."""
    symmetry, generator = entries.symmetry, torch.Generator().manual_seed(3)
    numbers, places = torch.rand(len(entries.sizes), dtype=torch.float64, generator=generator).add(0.5).sort()
    values = torch.empty_like(numbers).index_copy(0, places, numbers)
    layout = symmetry.architecture.layout
    state = {name: torch.zeros_like(own) for name, own in state_tensors(entries.network).items() if name in layout}
    links = []
    for number in range(_ELEMENTS):
        element = symmetry._exchanging(generator, cycles=number % 2 == 0)  # a random one may leave two blocks in place
        acted = symmetry.act_on(element, state | entries.named(values), shifts=False)
        moved = _flat(acted[name] for name in entries.tensors)
        nearest = torch.searchsorted(numbers, moved - _EQUAL).clamp(max=len(numbers) - 1)
        found = torch.nonzero((numbers[nearest] - moved).abs() <= _EQUAL).flatten()
        links.append(torch.stack([found, places[nearest[found]]]))
    rows, columns = torch.cat(links, 1).numpy()
    graph = sparse.coo_matrix((np.ones(len(rows)), (rows, columns)), (len(values), len(values)))
    return torch.from_numpy(sparse.csgraph.connected_components(graph, directed=False)[1])


def _apart(labels: Tensor, live: Tensor, orbits: Tensor) -> Iterator[tuple[int, int]]:
    """Yield pairs of live entries with one label and of different orbits: for each label the first entry and others."""
    firsts: dict[int, dict[int, int]] = {}
    for entry in torch.nonzero(live).flatten().tolist():
        firsts.setdefault(int(labels[entry]), {}).setdefault(int(orbits[entry]), entry)
    for first, *others in (list(own.values()) for own in firsts.values()):
        yield from ((first, other) for other in others)
