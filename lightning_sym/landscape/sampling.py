"""Random weights of low loss, where a full grid is too large: Langevin chains, and samples of a plane's set."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from scipy.spatial import KDTree
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vjp, vmap

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._text import unknown
from lightning_sym.landscape.outputs import NetworkOutputs

Evaluate = Callable[[Tensor], Tensor]
# Points that are evaluated at once, and iterations for the largest curvature.
_BLOCK = 2**16
_POWER_ITERATIONS = 50


@dataclass(frozen=True, eq=False)
class SGLDSamples:
    r"""Langevin chains at low loss, and the learning coefficient read off them.

    Attributes:
        vectors: Weight vectors of all chains, ``kept`` times, evenly spaced, the last step included. Shape
            ``[kept, chains, P]``.
        losses: J of every chain at every step after the burn-in. Shape ``[steps, chains]``, float64.
        learning_coefficient: Mean of :math:`nb J`; half the codimension of the class, if its points are regular.
        standard_error: Standard error of that mean, from the spread over chains; NaN for one chain.
        inverse_temperature: :math:`nb`, per unit of J.
        step: :math:`\eta`, squared weights.
        localisation: :math:`\gamma`, per squared weight.
        curvature: :math:`\lambda_{max}`, largest eigenvalue of the Hessian of J at the start.
    """

    vectors: Tensor
    losses: Tensor
    learning_coefficient: float
    standard_error: float
    inverse_temperature: float
    step: float
    localisation: float
    curvature: float

    def regular(self, eigenvalues: Tensor) -> float:
        r"""Return what the learning coefficient would be around a regular point with these step and localisation.

        Each direction adds :math:`\frac{1}{2} \frac{nb \lambda}{k} \frac{1}{1 - \eta k / 4}` with
        :math:`k = nb \lambda + \gamma`: half, less the pull of the localisation, more the bias of the finite step.

        Args:
            eigenvalues: Eigenvalues above 0 of the Hessian of J at the start. Any shape.
        """
        rate = self.inverse_temperature * eigenvalues.double() + self.localisation
        share = self.inverse_temperature * eigenvalues.double() / rate
        return float((share / 2 / (1 - self.step * rate / 4)).sum())


def sample_sgld(
    network: nn.Module,
    inputs: Tensor,
    *,
    chains: int,
    steps: int,
    burn_in: int,
    inverse_temperature: float | None = None,
    dimension: int | None = None,
    target_loss: float | None = None,
    step: float | None = None,
    localisation: float | None = None,
    start: Tensor | None = None,
    kept: int = 1,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SGLDSamples:
    r"""Run Langevin chains around weights that compute a network's function, at low temperature.

    See docs/theory/equivalence.md, 8.

    .. math::
        \theta \leftarrow \theta - \tfrac{\eta}{2} \big(nb \nabla J(\theta) + \gamma (\theta - \theta_0)\big)
        + \sqrt{\eta}\, \xi, \qquad J(\theta) = \tfrac{1}{N} \sum_x \|\phi(x, \theta) - \phi(x, \theta^*)\|^2 .

    The chains sample :math:`\exp(-nb J - \frac{\gamma}{2} |\theta - \theta_0|^2)`, for which :math:`E[nb J]` tends to
    the local learning coefficient: half the codimension :math:`\kappa` of the class at a regular point, less where
    classes of codimension differ. The gradient is that of all inputs; chains are run together.

    Args:
        network: Computes :math:`\phi(\cdot, \theta^*)`. Not changed.
        inputs: Shape ``[N, ...]``.
        chains: Number of chains, >= 1.
        steps: Steps after the burn-in, >= 1.
        burn_in: Steps before, >= 0. A direction of curvature :math:`\lambda` forgets its beginning in about
            :math:`2 / (\eta\, nb \lambda)` steps.
        inverse_temperature: :math:`nb > 0`. Either this, or the next two.
        dimension: Codimension :math:`\kappa >= 1` of the class. Then :math:`nb = \kappa / (2 J_{target})`.
        target_loss: :math:`J_{target} > 0`, about which J is to fluctuate.
        step: :math:`\eta > 0`; by default :math:`0.2 / (nb \lambda_{max})`, which makes J too large by 5% in the
            stiffest direction.
        localisation: :math:`\gamma >= 0`, which keeps chains near the start; by default :math:`nb / 100`.
        start: :math:`\theta_0`, where all chains begin, shape ``[P]``; by default the network's weights.
        kept: How many times the weights are kept, in ``1 .. steps``.
        chunk: Most chains whose gradients are computed at once; by default all.
        dtype: Dtype of weights and arithmetic.
        seed: Seed of the noise, which is drawn on the CPU: the same seed is the same chain on every device, up to
            rounding. The caller's generators are not touched.
        progress: Called with (steps done, burn_in + steps) after every step.

    Returns:
        The samples.

    Raises:
        ValueError: If an argument is out of range, or J has no curvature at the start.
        FloatingPointError: If a chain leaves the finite numbers.

    References:
        Welling and Teh (2011), "Bayesian Learning via Stochastic Gradient Langevin Dynamics"; Lau et al. (2023), "The
        Local Learning Coefficient", arXiv:2308.12108, for the estimate and the localisation.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> found = sample_sgld(network, torch.randn(40, 2), chains=4, steps=30, burn_in=10, inverse_temperature=1e4)
        >>> found.vectors.shape, found.losses.shape
        (torch.Size([1, 4, 9]), torch.Size([30, 4]))
    """
    check_integers(chains=chains, steps=steps, kept=kept)
    check_integers(0, burn_in=burn_in)
    if kept > steps:
        raise ValueError(f"kept must be in 1 .. steps={steps}, got {kept}.")
    inverse_temperature = _temperature(inverse_temperature, dimension, target_loss)
    function = NetworkOutputs(network, inputs, dtype)
    beginning = function.start(start)
    with torch.no_grad():
        targets = function(function.own)

    def loss(vector: Tensor) -> Tensor:
        return (function(vector) - targets).square().sum() / len(targets)

    # On the CPU, wherever the network is: each device has its own random numbers, and a seed names one chain.
    source = torch.Generator().manual_seed(seed)
    curvature = _largest_curvature(loss, beginning, source)
    if step is None:
        if not curvature > 0:
            raise ValueError(
                "J has no curvature at the start (a dead network?), so no step fits; give step, or start elsewhere."
            )
        step = 0.2 / (inverse_temperature * curvature)
    if localisation is None:
        localisation = inverse_temperature / 100
    check_numbers("> 0", step=step)
    check_numbers(">= 0", localisation=localisation)

    gradient = vmap(grad_and_value(loss), chunk_size=chunk, randomness="same")
    vectors = beginning.repeat(chains, 1)
    losses = torch.empty(steps, chains, dtype=torch.float64, device=beginning.device)
    keep = {math.ceil((number + 1) * steps / kept) - 1 for number in range(kept)}
    snapshots = []
    for index in range(-burn_in, steps):
        slope, values = gradient(vectors)
        if not bool(torch.isfinite(values).all()):
            raise FloatingPointError(
                f"{int((~torch.isfinite(values)).sum())} of {chains} chains left the finite numbers at step "
                f"{index + burn_in}; take a step smaller than {step:.2e}, or a larger localisation than "
                f"{localisation:.2e}."
            )
        if index >= 0:
            losses[index] = values
        if index in keep:
            snapshots.append(vectors)
        drift = inverse_temperature * slope + localisation * (vectors - beginning)
        noise = torch.randn(vectors.shape, generator=source, dtype=dtype).to(vectors)
        vectors = vectors - step / 2 * drift + math.sqrt(step) * noise
        if progress is not None:
            progress(index + burn_in + 1, burn_in + steps)
    means = inverse_temperature * losses.mean(0)
    return SGLDSamples(
        vectors=torch.stack(snapshots),
        losses=losses,
        learning_coefficient=float(means.mean()),
        standard_error=float(means.std()) / math.sqrt(chains) if chains > 1 else math.nan,
        inverse_temperature=inverse_temperature,
        step=step,
        localisation=localisation,
        curvature=curvature,
    )


def _temperature(inverse: float | None, dimension: int | None, target_loss: float | None) -> float:
    """Return the inverse temperature as given, or that at which J is about a target in so many directions."""
    if (inverse is None) == (dimension is None) or (dimension is None) != (target_loss is None):
        raise ValueError("give either inverse_temperature, or dimension and target_loss together.")
    if dimension is not None and target_loss is not None:
        check_integers(dimension=dimension)
        check_numbers("> 0", target_loss=target_loss)
        inverse = dimension / (2 * target_loss)
    assert inverse is not None
    check_numbers("> 0", inverse_temperature=inverse)
    return inverse


def _largest_curvature(loss: Callable[[Tensor], Tensor], vector: Tensor, source: torch.Generator) -> float:
    """Return the eigenvalue of the Hessian of largest magnitude, by power iteration."""
    products = vjp(grad(loss), vector)[1]
    ahead = torch.randn(vector.shape, generator=source, dtype=vector.dtype).to(vector)
    value = 0.0
    for _ in range(_POWER_ITERATIONS):
        ahead = ahead / ahead.norm()
        (product,) = products(ahead)
        value = float(ahead @ product)
        if float(product.norm()) == 0:
            break
        ahead = product
    return value


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

    ``"sobol"`` evaluates a scrambled Sobol sequence of the box, and returns what is inside: evenly spread, and the
    fraction estimates the volume; the choice as long as the fraction is not tiny. ``"walk"`` begins at points inside,
    and moves each by Gaussian steps, taking those that stay inside (Metropolis): its law tends to the uniform one on
    the pieces in which it began, also where the set fills no visible part of the box.

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
        What is inside; for ``"walk"`` the place of every walk after every round, repeated where a step was refused.

    Raises:
        ValueError: If an argument is out of range, or a walk's start is outside of the set.

    References:
        Joe and Kuo (2008), "Constructing Sobol Sequences with Better Two-Dimensional Projections".

    Example:
        >>> ball = sample_set(lambda c: c.square().sum(1), dimension=3, bound=1.0, epsilon=1.0, samples=2**16)
        >>> round(ball.fraction, 2)  # pi / 6
        0.52
    """
    check_integers(dimension=dimension, samples=samples)
    check_numbers("> 0", bound=bound, epsilon=epsilon)

    def look(points: Tensor) -> tuple[Tensor, Tensor]:
        """Return J at points, and which of them are in the set."""
        values = evaluate(points).cpu().double()
        return values, (values < epsilon) & (points.abs() <= bound).all(1)

    if method == "walk":
        begin = torch.zeros(1, dimension, dtype=torch.float64) if start is None else start.detach().cpu().double()
        if begin.ndim != 2 or begin.shape[1] != dimension or not len(begin):
            raise ValueError(f"start must have shape [s, {dimension}] with s >= 1, got {list(begin.shape)}.")
        step = bound / 20 if step is None else step
        check_numbers("> 0", step=step)
        values, inside = look(begin)
        if not bool(inside.all()):
            raise ValueError(
                f"{int((~inside).sum())} of {len(begin)} starts are outside of the set (J up to "
                f"{float(values.max()):.2e}, epsilon={epsilon}, bound={bound}); start at points inside, or raise "
                "epsilon or bound."
            )
        return _walks(look, begin, values, step, max(1, samples // len(begin)), seed)
    if method != "sobol":
        raise ValueError(unknown("method", method, ["sobol", "walk"]))
    if dimension > torch.quasirandom.SobolEngine.MAXDIM:
        raise ValueError(f"dimension must be at most {torch.quasirandom.SobolEngine.MAXDIM}, got {dimension}.")
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
    """Points of a set, joined where the segment between them was found to stay in the set.

    Attributes:
        edges: Numbers of the two points of each edge that was kept, the smaller first. Shape ``[E, 2]``, int64.
        lengths: Lengths of these edges. Shape ``[E]``, float64.
        components: How many pieces the graph has.
        labels: The piece of each point, numbered from 0 by first appearance. Shape ``[n]``, int64.
        tested: How many pairs were checked.
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
    segment between them. Unlike an embedding the graph does not invent connections, up to what lies between the checked
    points; it may miss some: the pieces are at least as many as those of the set among which the points lie, and become
    fewer with more points and neighbours.

    Args:
        evaluate: Coefficients ``[G, m]``, float64, to J ``[G]``, for example ``partial(surface.on, plane)``.
        coefficients: Points of the set, shape ``[n, m]``, n >= 1.
        epsilon: Upper end of J, > 0.
        neighbours: How many nearest neighbours of each point are tried, >= 1; at most n - 1 are.
        checks: Interior points of each segment, >= 1.

    Returns:
        The graph and its pieces.

    Raises:
        ValueError: If an argument is out of range, or a point is not in the set.

    Note:
        At most ``n * neighbours * checks`` evaluations.

    Example:
        >>> two = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]], dtype=torch.float64)
        >>> neighbour_graph(lambda c: 1 - c[:, 0].abs(), two, 0.5, neighbours=3).labels.tolist()
        [0, 0, 1, 1]
    """
    check_integers(neighbours=neighbours, checks=checks)
    check_numbers("> 0", epsilon=epsilon)
    if coefficients.ndim != 2 or not len(coefficients):
        raise ValueError(f"coefficients must have shape [n, m] with n >= 1, got {list(coefficients.shape)}.")
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
