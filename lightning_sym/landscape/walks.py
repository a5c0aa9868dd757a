"""Walks inside an equivalence class: along its tangents, without a plane or a grid."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._linear_algebra import thin_svd
from lightning_sym._text import unknown
from lightning_sym.landscape.outputs import NetworkOutputs

# How often a step is halved before the walk gives up, and the shortest tangent part of a direction that is followed.
_HALVINGS = 20
_CORRECTIONS = 6  # Gauss-Newton steps, at most
_RCOND = 1e-9  # singular values of the Jacobian at most this times the largest count as 0
_SHORTEST = 1e-6


@dataclass(frozen=True, eq=False)
class LevelSetWalk:
    """A walk of T steps inside an equivalence class.

    Attributes:
        vectors: Where the walk was, the beginning first. Shape ``[T + 1, P]``, float64.
        losses: J there. Shape ``[T + 1]``, float64, below the tolerance.
        ranks: Rank of the Jacobian there; P less the rank bounds the local dimension of the class. Shape ``[T + 1]``,
            int64.
        predictor_losses: J after each step along the tangent, before it was corrected. Shape ``[T]``, float64.
        corrector_steps: Gauss-Newton steps that each step took. Shape ``[T]``, int64.
        step_sizes: Length of each step along the tangent, in weight space. Shape ``[T]``, float64.
        tolerance: Below this J counts as 0.
    """

    vectors: Tensor
    losses: Tensor
    ranks: Tensor
    predictor_losses: Tensor
    corrector_steps: Tensor
    step_sizes: Tensor
    tolerance: float


class _Point(NamedTuple):
    """A weight vector with all that is needed there."""

    vector: Tensor
    loss: float
    correction: Tensor  # F^+ r, [P]
    normal: Tensor  # orthonormal columns that span the row space of F, [P, rank]

    @property
    def rank(self) -> int:
        return self.normal.shape[1]


@dataclass(frozen=True)
class _LevelSet:
    """The level set of weights with given outputs, and the projection of near weights onto it."""

    function: NetworkOutputs
    targets: Tensor
    tolerance: float

    def look(self, vector: Tensor) -> _Point:
        with torch.no_grad():
            residual = (self.function(vector) - self.targets).flatten()
        loss = float(residual.square().sum()) / len(self.targets)
        if not math.isfinite(loss):
            return _Point(vector, loss, vector, vector[:, None])
        left, values, right = _decomposed(self.function.jacobian(vector))
        rank = int((values > _RCOND * values[0]).sum())
        correction = right[:, :rank] @ ((left[:, :rank].T @ residual) / values[:rank])
        return _Point(vector, loss, correction, right[:, :rank])

    def corrected(self, vector: Tensor) -> tuple[_Point, float, int]:
        """Take Gauss-Newton steps; return the end point, J before them, and their number."""
        point = self.look(vector)
        before, corrections = point.loss, 0
        while self.tolerance <= point.loss < math.inf and corrections < _CORRECTIONS:
            point, corrections = self.look(point.vector - point.correction), corrections + 1
        return point, before, corrections


def walk_level_set(
    network: nn.Module,
    inputs: Tensor,
    *,
    steps: int,
    step_size: float,
    direction: Tensor | Literal["random"] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LevelSetWalk:
    r"""Walk along the weights that give the same outputs on some inputs as the network does.

    See docs/theory/equivalence.md, 7.

    With the residual :math:`r(\theta) = \phi(C, \theta) - \phi(C, \theta^*)` and its Jacobian F, a step has length h
    along a unit tangent, the projection of a direction onto the kernel of F. Gauss-Newton steps
    :math:`\theta \leftarrow \theta - F^+ r` then return to the set, until
    :math:`J = \frac{1}{N} \sum_x \|\phi(x, \theta) - \phi(x, \theta^*)\|^2` is below the tolerance. If J stays above it
    after the allowed corrections, or the step ends farther than 2 h away, h is halved and the step repeated. After a
    successful step h doubles, up to ``step_size``. :math:`F^+` and the kernel come from a singular value decomposition.

    Args:
        network: Computes :math:`\phi(\cdot, \theta^*)`. Not changed; evaluated in float64 and evaluation mode.
        inputs: C, shape ``[N, ...]``. The class is that of the function on these inputs: with fewer outputs than
            weights (N K < P) there are always directions to walk.
        steps: T >= 1.
        step_size: Largest h, in weight space, > 0.
        direction: None carries a random direction on from step to step, always by its tangent part, so that the walk
            goes far; a tensor of shape ``[P]`` is carried in the same way; ``"random"`` draws a new one for every step,
            so that the walk diffuses, and passes from one stratum of the class to another.
        tolerance: J below which a point is in the class, > 0. By default 1e-24 of the mean squared norm of the outputs
            (of 1 if that is 0).
        seed: Seed of the directions; the caller's generators are not touched.
        progress: Called with (steps done, T) after every step.

    Returns:
        The walk; ``O(T P)`` memory.

    Raises:
        ValueError: If an argument is out of range, or a weight is not finite.
        RuntimeError: If the walk cannot move: the kernel of F is 0, or 20 halvings of h failed.

    Note:
        About three singular value decompositions of an ``N K x P`` matrix per step.

    References:
        Allgower and Georg (1990), "Numerical Continuation Methods": predictor and corrector for level sets.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> walk = walk_level_set(network, torch.randn(50, 2), steps=5, step_size=0.05)
        >>> walk.vectors.shape, bool((walk.losses < walk.tolerance).all())
        (torch.Size([6, 13]), True)
    """
    check_integers(steps=steps)
    check_numbers("> 0", step_size=step_size)
    check_numbers("> 0", optional=True, tolerance=tolerance)
    if isinstance(direction, str) and direction != "random":
        raise ValueError(unknown("direction", direction, ["random"]))
    function = NetworkOutputs(network, inputs)
    with torch.no_grad():
        targets = function(function.own)
    if tolerance is None:
        tolerance = 1e-24 * (float(targets.square().sum()) / len(targets) or 1.0)
    level_set = _LevelSet(function, targets, tolerance)
    source = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(function.own.shape, generator=source, dtype=torch.float64).to(function.own)

    point = level_set.look(function.own)
    if not point.loss < tolerance:
        raise ValueError(f"the walk cannot begin: J is {point.loss} at the network's weights, which must be finite.")
    carried = direction.detach().to(function.own) if isinstance(direction, Tensor) else draw()
    if carried.shape != function.own.shape:
        raise ValueError(f"direction must have shape {list(function.own.shape)}, got {list(carried.shape)}.")
    if isinstance(direction, Tensor) and _tangent(carried, point.normal) is None:
        raise ValueError("direction has no part along the class at the start; give another, or None for a random one.")
    length = float(step_size)
    visited = [(point.vector, point.loss, point.rank, point.loss, 0, length)]
    for step in range(steps):
        if point.rank == len(point.vector):
            raise RuntimeError(
                f"the walk cannot move at step {step}: the Jacobian has full rank {point.rank}, so the class is a "
                "point here; take a network with more weights or fewer inputs."
            )
        for _ in range(_HALVINGS + 1):
            if isinstance(direction, str):
                carried = draw()
            while (ahead := _tangent(carried, point.normal)) is None:
                carried = draw()  # the carried direction has become normal to the class
            trial, before, corrections = level_set.corrected(point.vector + length * ahead)
            if trial.loss < tolerance and float((trial.vector - point.vector).norm()) <= 2 * length:
                break
            length /= 2
        else:
            raise RuntimeError(
                f"the walk cannot move at step {step}: a step of {2 * length:.1e} could not be corrected to J < "
                f"{tolerance:.1e} (reached {trial.loss:.1e}); raise tolerance, or start elsewhere."
            )
        point, carried = trial, ahead
        visited.append((point.vector, point.loss, point.rank, before, corrections, length))
        length = min(2 * length, float(step_size))
        if progress is not None:
            progress(step + 1, steps)
    return _gathered(visited, tolerance)


def _gathered(visited: list[tuple[Tensor, float, int, float, int, float]], tolerance: float) -> LevelSetWalk:
    """Return the walk, without the steps to the first point."""
    vectors, losses, ranks, before, corrections, lengths = zip(*visited, strict=True)
    return LevelSetWalk(
        vectors=torch.stack(vectors),
        losses=torch.tensor(losses, dtype=torch.float64),
        ranks=torch.tensor(ranks),
        predictor_losses=torch.tensor(before[1:], dtype=torch.float64),
        corrector_steps=torch.tensor(corrections[1:]),
        step_sizes=torch.tensor(lengths[1:], dtype=torch.float64),
        tolerance=tolerance,
    )


def _tangent(direction: Tensor, normal: Tensor) -> Tensor | None:
    """Return the unit vector along the part of a direction in the kernel of F; None if there is none."""
    part = direction - normal @ (normal.T @ direction)
    part = part - normal @ (normal.T @ part)
    return part / part.norm() if float(part.norm()) > _SHORTEST * float(direction.norm()) else None


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S, V of ``U diag(S) V^T``; a QR first is faster than the driver's own way for wide matrices."""
    wide = matrix.shape[0] < matrix.shape[1]
    basis, small = torch.linalg.qr(matrix.T if wide else matrix)
    left, values, right = thin_svd(small)
    long, short = basis @ left, right.T
    return (short, values, long) if wide else (long, values, short)
