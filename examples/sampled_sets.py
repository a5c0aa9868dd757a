"""Sample the set of low loss in a plane of weights where a grid is too large, and count its connected components.

``docs/equivalence.md`` shows the two functions on a network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from scipy.spatial import KDTree
from torch import Tensor

Evaluate = Callable[[Tensor], Tensor]
_BLOCK = 2**16  # points that are evaluated at once


@dataclass(frozen=True, eq=False)
class SetSample:
    """Points of the set of coefficients where J < epsilon.

    Attributes:
        coefficients: Shape ``[n, m]``, float64.
        values: J there. Shape ``[n]``, float64.
        drawn: How many points were evaluated.
        fraction: How many of these were in the set: the set's share of the box for ``"sobol"``; for ``"walk"`` the
            share of steps that stayed inside, which says nothing about volume.
    """

    coefficients: Tensor
    values: Tensor
    drawn: int
    fraction: float


def sample_set(
    evaluate: Evaluate,
    *,
    dimension: int,
    bound: float,
    epsilon: float,
    samples: int,
    method: Literal["sobol", "walk"] = "sobol",
    start: Tensor | None = None,
    step: float | None = None,
    seed: int = 0,
) -> SetSample:
    r"""Sample the set :math:`\{c \in [-b, b]^m : J(c) < \epsilon\}` of a plane, without a grid of :math:`n^m` points.

    ``"sobol"`` evaluates a scrambled Sobol sequence of the box and returns the points inside. They are evenly spread,
    and their fraction estimates the volume; use it unless the fraction is tiny. ``"walk"`` moves points of the set by
    Gaussian steps and accepts those that stay inside (Metropolis). Its distribution tends to the uniform one on the
    components in which it began, even where the set is a tiny part of the box.

    Args:
        evaluate: Coefficients ``[G, m]``, float64, to J ``[G]``, for example ``partial(surface.on, plane)``.
        dimension: m >= 1, at most 21201 for ``"sobol"``.
        bound: b > 0, in weight space.
        epsilon: Upper end of J, > 0.
        samples: How many points to evaluate, >= 1; for ``"walk"`` as many as there are full rounds of all starts. A
            power of 2 keeps the balance of a Sobol sequence.
        method: ``"sobol"`` or ``"walk"``.
        start: Points inside the set, where walks begin, shape ``[s, m]``; for ``"walk"`` only, by default the origin.
        step: Standard deviation of a walk's steps per axis, > 0; by default ``bound / 20``. Good when about a quarter
            to a half of the steps is taken.
        seed: Seed of scrambling and steps; the caller's generators are not touched.

    Returns:
        The points inside; for ``"walk"`` the position of every walk after every round, repeated after a refused step.

    Raises:
        ValueError: If the method is unknown, or a walk's start is outside of the set.

    References:
        Joe and Kuo (2008), "Constructing Sobol Sequences with Better Two-Dimensional Projections".

    Example:
        >>> ball = sample_set(lambda c: c.square().sum(1), dimension=3, bound=1.0, epsilon=1.0, samples=2**16)
        >>> round(ball.fraction, 2)  # pi / 6
        0.52
    """

    def look(points: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate J at points, and test which of them are in the set."""
        values = evaluate(points).cpu().double()
        return values, (values < epsilon) & (points.abs() <= bound).all(1)

    if method == "walk":
        begin = torch.zeros(1, dimension, dtype=torch.float64) if start is None else start.detach().cpu().double()
        step = bound / 20 if step is None else step
        values, inside = look(begin)
        if not bool(inside.all()):
            raise ValueError(
                f"{int((~inside).sum())} of {len(begin)} starts are outside of the set (J up to "
                f"{float(values.max()):.2e}, epsilon={epsilon}, bound={bound}); start at points inside, or raise "
                "epsilon or bound."
            )
        return _walks(look, begin, values, step, max(1, samples // len(begin)), seed)
    if method != "sobol":
        raise ValueError(f'method must be "sobol" or "walk", got {method!r}.')
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    found = []
    for first in range(0, samples, _BLOCK):
        coefficients = bound * (2 * engine.draw(min(_BLOCK, samples - first), dtype=torch.float64) - 1)
        values, inside = look(coefficients)
        found.append((coefficients[inside], values[inside]))
    places, values = map(torch.cat, zip(*found, strict=True))
    return SetSample(places, values, samples, len(values) / samples)


def _walks(
    look: Callable[[Tensor], tuple[Tensor, Tensor]], places: Tensor, values: Tensor, step: float, rounds: int, seed: int
) -> SetSample:
    """Move all points ``rounds`` times."""
    source = torch.Generator().manual_seed(seed)
    visited, taken = [], 0
    for _ in range(rounds):
        trial = places + step * torch.randn(places.shape, generator=source, dtype=torch.float64)
        found, go = look(trial)
        places, values = torch.where(go[:, None], trial, places), torch.where(go, found, values)
        visited.append((places, values))
        taken += int(go.sum())
    drawn = rounds * len(places)
    everywhere, losses = map(torch.cat, zip(*visited, strict=True))
    return SetSample(everywhere, losses, drawn, taken / drawn)


@dataclass(frozen=True, eq=False)
class NeighbourGraph:
    """Points of a set, joined where the segment between them stays in the set.

    Attributes:
        edges: Numbers of the two points of each edge that was kept, the smaller first. Shape ``[E, 2]``, int64.
        lengths: Lengths of these edges. Shape ``[E]``, float64.
        components: Number of connected components.
        labels: Component of each point, numbered from 0 in order of appearance. Shape ``[n]``, int64.
        tested: Number of pairs checked.
    """

    edges: Tensor
    lengths: Tensor
    components: int
    labels: Tensor
    tested: int


def neighbour_graph(
    evaluate: Evaluate, coefficients: Tensor, epsilon: float, *, neighbours: int = 10, checks: int = 5
) -> NeighbourGraph:
    """Join near points of a set where the straight line between them stays in it (docs/theory/equivalence.md, 9).

    Each point and its nearest neighbours are pairs; a pair is joined if J < epsilon at evenly spaced points of the
    segment between them. Unlike an embedding, the graph invents no connection, up to the spacing of the checked points.
    It may miss some: it has at least as many components as the set has around the points, and their number falls with
    more points and neighbours.

    Args:
        evaluate: Coefficients ``[G, m]``, float64, to J ``[G]``, for example ``partial(surface.on, plane)``.
        coefficients: Points of the set, shape ``[n, m]``, n >= 1.
        epsilon: Upper end of J, > 0.
        neighbours: How many nearest neighbours of each point are tried, >= 1; at most n - 1 are.
        checks: Interior points of each segment, >= 1.

    Returns:
        The graph and its components.

    Raises:
        ValueError: If a point is not in the set.

    Note:
        At most ``n * neighbours * checks`` evaluations.

    Example:
        >>> two = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]], dtype=torch.float64)
        >>> neighbour_graph(lambda c: 1 - c[:, 0].abs(), two, 0.5, neighbours=3).labels.tolist()
        [0, 0, 1, 1]
    """
    points = coefficients.detach().cpu().double()
    count = len(points)
    if bool((outside := ~_inside(evaluate, points, epsilon)).any()):
        raise ValueError(
            f"{int(outside.sum())} of {count} points have J >= epsilon={epsilon}; give points of the set only."
        )
    _, near = KDTree(points.numpy()).query(points.numpy(), k=range(1, min(neighbours + 1, count) + 1))
    pairs = np.stack([np.repeat(np.arange(count), near.shape[1]), near.ravel()], 1)
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    ends = torch.from_numpy(pairs).long().reshape(-1, 2)
    kept = torch.ones(len(ends), dtype=torch.bool)
    # Segments are dropped at the first check that fails.
    for number in range(1, checks + 1):
        share = number / (checks + 1)
        open_ = kept.nonzero().flatten()
        one, two = points[ends[open_, 0]], points[ends[open_, 1]]
        kept[open_] = _inside(evaluate, (1 - share) * one + share * two, epsilon)
    edges = ends[kept]
    graph = sparse.coo_matrix((np.ones(len(edges)), tuple(edges.T.numpy())), shape=(count, count))
    components, labels = csgraph.connected_components(graph, directed=False)
    return NeighbourGraph(
        edges=edges,
        lengths=(points[edges[:, 0]] - points[edges[:, 1]]).norm(dim=1),
        components=int(components),
        labels=torch.from_numpy(labels).long(),
        tested=len(ends),
    )


def _inside(evaluate: Evaluate, points: Tensor, epsilon: float) -> Tensor:
    parts = [evaluate(points[k : k + _BLOCK]).cpu() < epsilon for k in range(0, len(points), _BLOCK)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)
