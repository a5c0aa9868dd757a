"""Orthogonal matrices with entries as small as possible."""

import numpy as np
import scipy  # its parts are imported on first use
import torch
from torch import Tensor

from lightning_sym._checks import check_integers
from lightning_sym.symmetry.arrays import Floats

_TRIES = 1024  # divided by the order
_REGULAR = np.ones((4, 4)) - 2 * np.eye(4)[::-1]  # all rows have the sum 2


def hadamard(n: int, *, fixes_ones: bool = False) -> Tensor:
    r"""Return a Hadamard matrix divided by the root of its order: orthogonal, with all entries ±1/√n.

    It is the Kronecker product of Sylvester's matrix (order a power of two) and one of Paley's. The latter use the
    squares modulo a prime p. Their order is p + 1 for p = 3 modulo 4, and 2 (p + 1) for p = 1 modulo 4. This covers the
    widths of most transformers: 768 = 64 * 12, 896 = 32 * 28, 1280 = 64 * 20, 5120 = 256 * 20.

    Args:
        n: The order.
        fixes_ones: Whether the matrix must fix the vector of ones, as streams before layer norms require. For powers of
            4 all entries are still ±1/√n (rows have equal sums). For other orders this holds approximately, in blocks
            of a power of 4, as no matrix satisfies both.

    Returns:
        Shape (n, n), float64.

    Raises:
        TypeError: If n is not an integer.
        ValueError: If n < 1, or none of these constructions has this order. (Hadamard matrices exist only for 1, 2 and
            multiples of 4.)

    References:
        Paley (1933), "On Orthogonal Matrices", Journal of Mathematics and Physics 12. Rotations of streams by Hadamard
        matrices: Ashkboos et al. (2024), QuaRot, arXiv:2404.00456. The blocks that fix the vector of ones: ours
        (docs/theory/transformers.md, 6.3).

    Example:
        >>> matrix = hadamard(12)
        >>> torch.allclose(matrix @ matrix.T, torch.eye(12, dtype=torch.float64))
        True
        >>> torch.allclose(hadamard(12, fixes_ones=True).sum(1), torch.ones(12, dtype=torch.float64))
        True
    """
    check_integers(n=n)
    powers = [power for power in range(n.bit_length()) if n % 4**power == 0] if fixes_ones else [0]
    for power in reversed(powers):
        rest = n // 4**power
        if rest == 2 < n:
            return torch.from_numpy(_twice_a_square(n))
        core = _core(rest)
        if core is not None:
            whole = _about_ones(core / np.sqrt(rest)) if fixes_ones else core / np.sqrt(rest)
            for _ in range(power):
                whole = np.kron(whole, _REGULAR / 2)
            return torch.from_numpy(whole)
    raise ValueError(
        f"cannot construct a Hadamard matrix of order {n}; expected a power of two times 1, p + 1 or 2 (p + 1) for a "
        "prime p as in Paley's constructions, or another orthogonal matrix"
    )


def _core(n: int) -> Floats | None:
    """Return a Hadamard matrix with entries 1 and -1; None if neither Sylvester's nor Paley's constructions apply."""
    if n & (n - 1) == 0:
        return np.asarray(scipy.linalg.hadamard(n), float)
    if n % 4:
        return None
    if _is_prime(n - 1):
        skew = np.pad(_jacobsthal(n - 1), (1, 0))
        skew[0, 1:], skew[1:, 0] = 1, -1
        return np.eye(n) + skew
    half = n // 2
    if half % 4 == 2 and _is_prime(half - 1):
        conference = np.pad(_jacobsthal(half - 1), (1, 0))
        conference[0, 1:] = conference[1:, 0] = 1
        return np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(half), [[1, -1], [-1, -1]])
    smaller = _core(half)
    return None if smaller is None else np.kron(smaller, scipy.linalg.hadamard(2))


def _twice_a_square(n: int) -> Floats:
    """Return an orthogonal matrix of order 8, 32, 128, ... that fixes the vector of ones, with entries near ±1/√n.

    Sylvester's matrix gets the signs of a quadratic form on all bits but one. It then maps ones to a vector that
    alternates between 0 and one other number. A reflection maps this vector back to ones.
    """
    bits = np.arange(n)[:, None] >> np.arange(1, n.bit_length() - 1) & 1
    signs = (-1.0) ** (bits[:, ::2] * bits[:, 1::2]).sum(1)
    return _reflected(signs[:, None] * scipy.linalg.hadamard(n) * signs / np.sqrt(n))


def _is_prime(n: int) -> bool:
    return n > 2 and n % 2 == 1 and all(n % divisor for divisor in range(3, int(n**0.5) + 1, 2))


def _jacobsthal(prime: int) -> Floats:
    """Return the matrix of quadratic characters of i - j modulo a prime: 1, -1, or 0 on the diagonal."""
    places = np.arange(prime)
    symbol = np.where(np.isin(places, places**2 % prime), 1.0, -1.0)
    symbol[0] = 0.0
    return np.asarray(symbol[(places[:, None] - places) % prime])


def _about_ones(matrix: Floats) -> Floats:
    """Return an orthogonal matrix that fixes the vector of ones, near a given one up to signs of rows and columns.

    The signs maximise the sum of all entries locally, so that the reflection that maps the image of ones back is a
    small change. The result is the local maximum with the smallest largest entry.
    """
    size = len(matrix)
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(max(1, _TRIES // size)):
        columns = (torch.randint(0, 2, (size,), generator=draw) * 2.0 - 1).numpy()
        for _ in range(size):  # alternate until nothing changes
            rows = np.where(matrix @ columns < 0, -1.0, 1.0)
            columns = np.where(rows @ matrix < 0, -1.0, 1.0)
        found.append(_reflected(rows[:, None] * matrix * columns))
    return min(found, key=lambda own: round(float(np.abs(own).max()), 9))


def _reflected(matrix: Floats) -> Floats:
    """Compose a matrix with the reflection that maps the image of the vector of ones back to this vector."""
    ones = np.full(len(matrix), len(matrix) ** -0.5)
    normal = matrix @ ones - ones
    length = normal @ normal
    return matrix if length < 1e-24 else matrix - 2 * np.outer(normal, normal @ matrix) / length
