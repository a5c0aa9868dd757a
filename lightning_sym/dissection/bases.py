"""Rotated bases of a layer's channels, on the shortest path from the network's basis."""

import math
from collections.abc import Iterable

import torch
from scipy.linalg import schur
from torch import Tensor

from lightning_sym._checks import check_integers
from lightning_sym._linear_algebra import random_orthogonal

_ORTHOGONAL = 1e-6  # accepts float32 matrices


class Geodesic:
    r"""The shortest path :math:`Q^\alpha` of rotations, from the identity (0) to a rotation Q (1).

    The real Schur form :math:`Q = Z\, T\, Z^\top` rotates planes by angles in :math:`(-\pi, \pi]`;
    :math:`Q^\alpha` rotates the same planes by :math:`\alpha` times these angles. Eigenvalues -1 are paired to planes
    rotated by :math:`\pi`; only then the shortest path is not unique.

    Args:
        rotation: An orthogonal matrix of determinant 1. Shape ``[C, C]``, floating; a copy is kept in float64, on the
            CPU.

    Attributes:
        angles: Angle of each plane, in radians. Shape ``[C // 2]``, float64; for odd C one direction is fixed.

    Raises:
        ValueError: If the matrix is not square, not finite, not orthogonal, or has determinant -1.

    Note:
        ``O(C^3)`` time for the path, and for each point of it.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 6, after Bau et al. (2017), arXiv:1704.05796, section 3.2;
        docs/theory/dissection.md, 1.

    Example:
        >>> quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> Geodesic(quarter).at(0.5)
        tensor([[ 0.7071, -0.7071],
                [ 0.7071,  0.7071]], dtype=torch.float64)
    """

    def __init__(self, rotation: Tensor) -> None:
        if rotation.ndim != 2 or len(rotation) != rotation.shape[1] or not len(rotation):
            raise ValueError(f"rotation must be a square matrix, got shape {list(rotation.shape)}.")
        self._end = rotation.detach().to("cpu", torch.float64, copy=True)
        size = len(self._end)
        error = (self._end @ self._end.T - torch.eye(size, dtype=torch.float64)).abs().max().item()
        if not error <= _ORTHOGONAL:  # rejects NaN
            raise ValueError(
                f"rotation must be orthogonal, but Q Q^T differs from the identity by {error:.1e}; take the polar "
                "factor, or random_rotation."
            )
        if torch.linalg.det(self._end) < 0:
            raise ValueError(
                "rotation must have determinant 1, got -1: no path of rotations leads from the identity to a "
                "reflection; flip the sign of one column."
            )
        form, basis = schur(self._end.numpy(), output="real")
        self._basis = torch.from_numpy(basis)
        self._planes, self.angles = _planes(torch.from_numpy(form))

    @property
    def length(self) -> float:
        r"""Length of the path: the norm of :math:`\log Q`, that is :math:`\sqrt{2 \sum_i \theta_i^2}`."""
        return math.sqrt(2) * float(self.angles.norm())

    def at(self, alpha: float) -> Tensor:
        """Return a point of the path.

        Args:
            alpha: Position on the path, unitless: 0 is exactly the identity, 1 exactly the rotation; any finite number.

        Returns:
            Shape ``[C, C]``, float64, on the CPU.

        Raises:
            ValueError: If ``alpha`` is not finite.
        """
        if not math.isfinite(alpha):
            raise ValueError(f"alpha must be a finite number, got {alpha}.")
        identity = torch.eye(len(self._end), dtype=torch.float64)
        if alpha in (0, 1):
            return self._end.clone() if alpha else identity
        first, second = self._planes
        rotated = identity
        rotated[first, first] = rotated[second, second] = (alpha * self.angles).cos()
        rotated[second, first] = (alpha * self.angles).sin()
        rotated[first, second] = -rotated[second, first]
        return self._basis @ rotated @ self._basis.T


def _planes(form: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the indices of the two directions of each plane in a real Schur form, and the angles of the planes."""
    size = len(form)
    planes: list[tuple[int, int]] = []
    angles: list[float] = []
    straight: list[int] = []
    flipped: list[int] = []
    place = 0
    while place < size:
        if place + 1 < size and form[place + 1, place] != 0:
            (a, b), (c, d) = form[place : place + 2, place : place + 2].tolist()
            planes.append((place, place + 1))
            angles.append(math.atan2(c - b, a + d))
            place += 2
        else:
            (flipped if form[place, place] < 0 else straight).append(place)
            place += 1
    for left, angle in ((flipped, math.pi), (straight, 0.0)):
        for pair in zip(left[::2], left[1::2], strict=False):
            planes.append(pair)
            angles.append(angle)
    first, second = torch.tensor(planes, dtype=torch.int64).reshape(-1, 2).T
    return (first, second), torch.tensor(angles, dtype=torch.float64)


def three_places(alphas: Iterable[float]) -> tuple[float, ...]:
    """Return beginning and end of the path, and the place nearest to its middle, in order.

    Args:
        alphas: Places on the path, 0 and 1 among them.

    Example:
        >>> three_places([0.0, 0.2, 0.4, 1.0])
        (0.0, 0.4, 1.0)
    """
    middle = min(alphas, key=lambda alpha: (abs(alpha - 0.5), alpha))
    return tuple(sorted({0.0, middle, 1.0}))


def random_rotation(channels: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw a rotation uniformly (Haar measure on SO(C)).

    Args:
        channels: Rows and columns ``C``, >= 1.
        generator: Random generator; None for the global one.

    Returns:
        Orthogonal, of determinant 1. Shape ``[C, C]``, float64.

    Raises:
        ValueError: If ``channels`` is below 1.
    """
    rotation = random_orthogonal(channels, generator)
    if torch.linalg.det(rotation) < 0:
        rotation[:, 0].neg_()
    return rotation


def random_permutation_matrix(channels: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw an even permutation as a matrix: a rotation that preserves units.

    Args:
        channels: Rows and columns ``C``, >= 1.
        generator: Random generator; None for the global one.

    Returns:
        A uniformly drawn even permutation. Shape ``[C, C]``, float64.

    Raises:
        ValueError: If ``channels`` is below 1.
    """
    check_integers(channels=channels)
    order = torch.randperm(channels, generator=generator)
    matrix = torch.eye(channels, dtype=torch.float64)[order]
    if torch.linalg.det(matrix) < 0:
        matrix[[0, 1]] = matrix[[1, 0]]
    return matrix


def in_bases(features: Tensor, bases: Tensor) -> Tensor:
    """Return features in several bases, concatenated along the channels.

    Args:
        features: Channels on axis 1. Shape ``[N, C, ...]``.
        bases: Matrices that act on the channels of every image and position. Shape ``[B, C, C]``.

    Returns:
        Shape ``[N, B * C, ...]``, dtype and device of ``features``.

    Raises:
        ValueError: If the shapes do not match.
    """
    channels = features.shape[1]
    if bases.ndim != 3 or tuple(bases.shape[1:]) != (channels, channels):
        raise ValueError(f"bases must have shape [B, {channels}, {channels}], got {list(bases.shape)}.")
    flat = features.reshape(len(features), channels, -1)
    found = bases.to(flat).reshape(-1, channels) @ flat
    return found.reshape(len(features), -1, *features.shape[2:])
