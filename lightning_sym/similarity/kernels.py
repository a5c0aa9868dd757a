"""Kernels between samples, and the Hilbert-Schmidt independence criterion of two kernels."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sym._checks import check_known, check_numbers, is_finite

Kernel = Literal["linear", "max", "laplace"]

_ROWS = 512  # samples per block of distances
_BLOCKS, _LEAST_BLOCK = 8, 64  # row blocks of a product with itself: most blocks, and least rows of one


def standardized(x: Tensor, *, scale: bool) -> Tensor:
    """Subtract each channel's mean from features and optionally divide by its norm.

    Args:
        x: Shape ``[N, C, positions]``; mean and norm are over samples and positions.
        scale: Whether to divide by the norm.

    Returns:
        Shape and dtype of ``x``; a constant channel, up to rounding, becomes 0.
    """
    mean = x.mean((0, 2))
    rest = x - mean[:, None]
    norms = torch.linalg.vector_norm(rest, dim=(0, 2))
    alive = norms > rounding(mean, rest[:, 0].numel())
    factors = torch.where(alive, torch.where(alive, norms, 1.0).reciprocal() if scale else 1.0, 0.0)
    return rest.mul_(factors[:, None]) if scale or not bool(alive.all()) else rest


def centred_columns(x: Tensor, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each sample as a row, with the mean of each column subtracted, and a bound of the rounding error.

    Args:
        x: Shape ``[N, C, positions]``.
        room: Contiguous tensor that is overwritten by the rows, if it is large enough and of the same dtype; memory
            that is new takes longer than the subtraction.

    Returns:
        Rows of shape ``[N, C * positions]``, dtype of ``x``; and the largest criterion of the linear kernel with itself
        that may be a rounding error, 0-dimensional, float64.
    """
    flat = x.flatten(1)
    mean = flat.mean(0)
    if room is None or room.numel() < flat.numel() or (room.dtype, room.device) != (flat.dtype, flat.device):
        room = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = torch.sub(flat, mean, out=room.view(-1)[: flat.numel()].view(flat.shape))
    return rows, torch.linalg.vector_norm(rounding(mean, 1)).double() ** 4


def rounding(mean: Tensor, number: int) -> Tensor:
    """Return the largest norm of ``number`` values, with their mean subtracted, that may be a rounding error."""
    floor: Tensor = mean.abs() * (torch.finfo(mean.dtype).eps * 16 * math.sqrt(number))
    return floor


def gram(x: Tensor, kernel: Kernel, bandwidth: float | None = None) -> Tensor:
    r"""Return the kernel matrix of all samples.

    - ``linear``: :math:`\sum_{c, s} x_{n s c}\, x_{m s c}`;
    - ``max``: :math:`\max_c \sum_s x_{n s c}\, x_{m s c}`, invariant to permutations, scales and signs of standardised
      channels; not positive semi-definite;
    - ``laplace``: :math:`\exp(-d / h)` with :math:`d = \sum_c (\sum_s (x_{n s c} - x_{m s c})^2)^{1/2}`, positive
      definite, with the same invariance.

    Args:
        x: Shape ``[N, C, positions]``.
        kernel: Name of the kernel.
        bandwidth: ``h`` > 0, in units of the distance; default the median of the distances of different samples.

    Returns:
        Shape ``[N, N]``, dtype of ``x``.

    Note:
        One matrix product per channel; memory for a few kernels.

    Raises:
        ValueError: If there are no such axes or kernel, a value is not finite, or the bandwidth is not positive.
    """
    check_known("kernel", kernel, get_args(Kernel))
    if bandwidth is not None:
        check_numbers("> 0", bandwidth=bandwidth)
    if x.ndim != 3 or not x.dtype.is_floating_point or not is_finite(x):
        raise ValueError(f"x must be of shape [N, C, positions], floating and finite, got {x.dtype} {list(x.shape)}.")
    if kernel == "linear":
        return _largest_products(x.flatten(1)[None])
    channels = x.transpose(0, 1).contiguous()  # each [N, positions]
    if kernel == "max":
        return _largest_products(channels)
    distances = x.new_zeros(len(x), len(x))
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        if channels.shape[2] == 1:
            distances[rows] = torch.cdist(x[rows, :, 0], x[..., 0], p=1.0)
            continue
        for channel in channels:
            # No matrix product, which would lose half of the digits where samples are close.
            distances[rows] += torch.cdist(channel[rows], channel, compute_mode="donot_use_mm_for_euclid_dist")
    if bandwidth is None:
        above = distances[torch.ones_like(distances, dtype=torch.bool).triu(1)]
        bandwidth = (float(above.median()) if len(above) else 0.0) or 1.0
    return distances.div_(-bandwidth).exp_()


def _largest_products(channels: Tensor) -> Tensor:
    """Return the maximum of the symmetric products ``x @ x.T`` over channels, computing one half.

    Args:
        channels: Shape ``[C, N, positions]``.

    Returns:
        Shape ``[N, N]``.
    """
    n = channels.shape[1]
    size = max(_LEAST_BLOCK, -(-n // _BLOCKS))
    largest = channels.new_empty(n, n)
    for start in range(0, n, size):
        rows, rest = slice(start, start + size), slice(start + size, n)
        best = channels[0, rows] @ channels[0, start:].T
        product = torch.empty_like(best)
        for channel in channels[1:]:
            torch.maximum(best, torch.matmul(channel[rows], channel[start:].T, out=product), out=best)
        largest[rows, start:] = best
        largest[rest, rows] = best[:, size:].T
    return largest


def linear_hsic(x: Tensor, y: Tensor, *, unbiased: bool) -> Tensor:
    """Return the criterion of linear kernels without forming them: for features with few numbers per sample.

    Args:
        x: Centred: the mean of each column is 0. Shape ``[N, D1]``, float64.
        y: Centred features of the same samples. Shape ``[N, D2]``, float64.
        unbiased: Whether to use the unbiased estimator.

    Returns:
        0-dimensional, float64.
    """
    n = len(x)
    product = (_largest_products(x.T[None]) if x is y else x.T @ y).square().sum()
    if not unbiased:
        return product / (n - 1) ** 2
    a, b = x.square().sum(1), y.square().sum(1)
    # As the rows of centred kernels sum to 0, rows without their diagonals a and b sum to -a and -b.
    corrected = product - torch.dot(a, b) * n / (n - 2) + a.sum() * b.sum() / ((n - 1) * (n - 2))
    return corrected / (n * (n - 3))


def centre_(k: Tensor, *, unbiased: bool) -> Tensor:
    """Centre a kernel in feature space (or U-centre it, for the unbiased estimator), in place.

    Args:
        k: Symmetric. Shape ``[n, n]``, float64.
        unbiased: Whether to U-centre.

    Returns:
        The same tensor.
    """
    n = len(k)
    if unbiased:
        k.fill_diagonal_(0.0)
    means = k.sum(0) / (n - 2 if unbiased else n)
    overall = means.sum() / (n - 1 if unbiased else n)
    k.sub_(means[:, None]).sub_(means - overall)
    return k.fill_diagonal_(0.0) if unbiased else k


def inner(k: Tensor, other: Tensor, *, unbiased: bool) -> Tensor:
    """Return the criteria of all pairs of centred kernels.

    Args:
        k: Shape ``[A, n, n]``, float64.
        other: Shape ``[B, n, n]``, float64.
        unbiased: Whether to use the unbiased estimator.

    Returns:
        Shape ``[A, B]``, float64.
    """
    n = k.shape[-1]
    return k.flatten(1) @ other.flatten(1).T / (n * (n - 3) if unbiased else (n - 1) ** 2)
