"""Small matrix problems: uniform orthogonal matrices, singular values, polar factors, optimal scales."""

import math

import torch
from torch import Tensor

_TINY, _HUGE = 1e-300, 1e150  # range of scales with finite, nonzero squares


def random_orthogonal(
    size: int, generator: torch.Generator | None = None, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw an orthogonal matrix uniformly (Haar measure), of either determinant.

    Args:
        size: Rows and columns ``C``, >= 1.
        generator: Random generator, which determines the device of the matrix; None for the CPU's global one.
        dtype: Dtype of the matrix, floating.

    Returns:
        Shape ``[C, C]``.

    Raises:
        ValueError: If ``size`` is below 1.

    Note:
        ``O(C^3)`` time.

    References:
        Mezzadri (2007), "How to generate random matrices from the classical compact groups", arXiv:math-ph/0609050:
        QR decomposition of a Gaussian matrix, with the signs for which the diagonal of R is positive.

    Example:
        >>> matrix = random_orthogonal(3, torch.Generator().manual_seed(0))
        >>> torch.allclose(matrix @ matrix.T, torch.eye(3, dtype=torch.float64))
        True
    """
    if size < 1:
        raise ValueError(f"size of an orthogonal matrix must be at least 1, got {size}.")
    device = None if generator is None else generator.device
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=dtype, generator=generator, device=device))
    rotated: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(dtype)  # torch.sign would be 0 at 0
    return rotated


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the singular value decomposition U diag(S) V^T of a finite matrix.

    Torch uses divide and conquer, which does not converge for some matrices with entries of very different sizes. The
    slower QR iteration then replaces it.

    Args:
        matrix: Shape (N, M), floating.

    Returns:
        U (N, K), S (K,) in descending order and V^T (K, M), K = min(N, M); dtype and device of `matrix`.
    """
    try:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        import scipy.linalg  # when needed: a package loads in a fraction of the time without

        found = scipy.linalg.svd(matrix.detach().cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
        left, values, right = (torch.from_numpy(own).to(matrix) for own in found)
    return left, values, right


def polar_factor(matrix: Tensor) -> Tensor:
    """Return the orthogonal O that maximises tr(O^T M), for a square M: shape of M, float64, on the CPU."""
    left, _, right = thin_svd(matrix.detach().double().cpu())
    factor: Tensor = left @ right
    return factor


def best_scales(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    r"""Minimise :math:`-2 p a + q a^2 - 2 r / a + s / a^2` over scales a > 0.

    Stationary points solve :math:`q a^4 - p a^3 + r a - s = 0`. With q = 0 or s = 0 the infimum may be 0, approached as
    a tends to infinity or 0.

    Args:
        p: Any shape, float64; 0 where q is 0.
        q: Same shape, >= 0.
        r: Same shape; 0 where s is 0.
        s: Same shape, >= 0.

    Returns:
        The infima and the scales, possibly 0 or infinite. Shape of ``p`` each.
    """
    regular = (q > _TINY) & (s > _TINY)
    q_safe, s_safe = torch.where(regular, q, 1.0), torch.where(regular, s, 1.0)
    # With a = unit * b the first and last coefficients are equal, and b^4 - u b^3 + v b - 1 = 0.
    unit = (s_safe / q_safe) ** 0.25
    companion = torch.zeros(*p.shape, 4, 4, dtype=p.dtype)
    companion[..., 1, 0] = companion[..., 2, 1] = companion[..., 3, 2] = 1.0
    companion[..., 0, 3] = 1.0
    companion[..., 1, 3] = -r * unit / s_safe
    companion[..., 3, 3] = p * unit**3 / s_safe
    # Real parts of complex roots are not stationary, but valid scales: the minimum over all of them is correct.
    scales = torch.linalg.eigvals(companion).real * unit[..., None]
    linear = torch.where(q > _TINY, p / torch.where(q > _TINY, q, 1.0), s / torch.where(r > 0, r, 1.0))
    linear = torch.where((q > _TINY) | (r > 0), linear, -1.0)
    scales = torch.where(regular[..., None], scales, linear[..., None])
    usable = (scales > 1 / _HUGE) & (scales < _HUGE)
    a = torch.where(usable, scales, 1.0)
    values = q[..., None] * a**2 - 2 * p[..., None] * a - 2 * r[..., None] / a + s[..., None] / a**2
    values, best = torch.where(usable, values, math.inf).min(-1)
    chosen = a.gather(-1, best[..., None])[..., 0]
    limit = ~regular & (values > 0)
    chosen = torch.where(limit, torch.where(q > _TINY, 0.0, math.inf), chosen)
    return torch.where(limit, 0.0, values), chosen
