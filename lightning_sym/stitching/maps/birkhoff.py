"""The Birkhoff polytope of doubly stochastic matrices: projections onto it, and rounding to permutations.

Functions on square matrices for :class:`~lightning_sym.stitching.GroupMap` and
:class:`~lightning_sym.stitching.SoftSortMap`.
"""

import math
import warnings
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_sym._checks import check_integers, check_numbers

Projection = Literal["sinkhorn", "euclidean"]

_LOOK = 8  # iterations between checks of the residual, which synchronise with the GPU


def sinkhorn(matrix: Tensor, iterations: int = 16) -> Tensor:
    r"""Scale rows and columns of the positive part of a matrix until it is doubly stochastic.

    One iteration divides the rows by their sums, then the columns by theirs. Only the factors are iterated:
    the result is :math:`\mathrm{diag}(r)\, K\, \mathrm{diag}(s)` with :math:`r = 1 / (K s)` and
    :math:`s = 1 / (K^\top r)`, two matrix-vector products per iteration. Columns end exactly stochastic, rows up to
    the convergence of the iterations. Near the polytope their error is 1e-8 or less; it falls slowly, like one over the
    number of iterations, where zeros leave no positive permutation.

    The result is not the Euclidean projection, see :func:`project_to_birkhoff`, but minimises relative entropy.

    Args:
        matrix: Finite entries of any sign; negative ones count as 0. Shape ``[C, C]``, floating; half precision is
            computed in float32.
        iterations: >= 1.

    Returns:
        A new matrix with positive entries. Shape ``[C, C]``, dtype and device of ``matrix``; differentiable.

    Raises:
        TypeError: If the dtype is not floating.
        ValueError: If the matrix is not square or not finite, or ``iterations`` < 1.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, appendix D.2. The floor is an addition: without it zero rows stay zero.

    Example:
        >>> sinkhorn(torch.tensor([[3.0, -1.0], [0.0, 0.5]])).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    _check_square(matrix)
    check_integers(iterations=iterations)
    size = len(matrix)
    with full_precision(matrix):
        kernel = at_least_single(matrix)
        # A row or column of zeros becomes constant; elsewhere the floor is below rounding.
        kernel = kernel.clamp_min(torch.finfo(kernel.dtype).eps / size)
        columns = kernel.new_ones(size)
        for _ in range(iterations):
            rows = (kernel @ columns).reciprocal()
            columns = (rows @ kernel).reciprocal()
        return (rows[:, None] * kernel * columns).to(matrix.dtype)


def project_to_birkhoff(matrix: Tensor, tolerance: float = 1e-8, max_iterations: int = 2000) -> Tensor:
    r"""Project a matrix to the nearest doubly stochastic one in the Frobenius norm.

    Dykstra's alternation of :math:`\max(X, 0)`, with its correction term, and the projection to unit row and column
    sums, :math:`(I - J) X (I - J) + J` with :math:`J = \mathbf{1}\mathbf{1}^\top / C`, in float64.

    Args:
        matrix: Finite. Shape ``[C, C]``, floating.
        tolerance: Largest deviation of row and column sums from 1, and of entries from a fixed point of the
            alternation. Unitless, > 0.
        max_iterations: >= 1. If they do not suffice, a warning is issued.

    Returns:
        A new matrix with entries >= 0. Shape ``[C, C]``, dtype and device of ``matrix``.

    Raises:
        TypeError: If the dtype is not floating.
        ValueError: If the matrix is not square or not finite, or a setting is out of range.

    Note:
        ``O(C^2)`` per iteration, with tens of iterations near the polytope and hundreds far from it; not
        differentiable. :func:`sinkhorn` is faster by one to two orders of magnitude.

    References:
        Boyle and Dykstra (1986), "A Method for Finding Projections onto the Intersection of Convex Sets in Hilbert
        Spaces", doi:10.1007/978-1-4613-9940-7_3; stopping rule: Birgin and Raydan (2005), doi:10.1137/03060062X.

    Example:
        >>> project_to_birkhoff(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 1.]])
    """
    _check_square(matrix)
    check_numbers("> 0", tolerance=tolerance)
    check_integers(max_iterations=max_iterations)
    size = len(matrix)
    device = "cpu" if matrix.device.type == "mps" else matrix.device  # MPS has no float64
    point = matrix.detach().to(device, torch.float64)
    correction = torch.zeros_like(point)
    residual = math.inf
    for iteration in range(1, max_iterations + 1):
        # (I - J) X (I - J) + J; it is affine and needs no correction
        mean = point.mean()
        affine = point - (point.mean(1, keepdim=True) - mean - 1 / size) - point.mean(0, keepdim=True)
        correction += affine
        point = correction.clamp_min(0)
        correction -= point
        if iteration % _LOOK == 0 or iteration == max_iterations:
            # A point that neither projection moves is a fixed point, also of the correction.
            off = torch.stack([(point - affine).abs().max(), *((point.sum(k) - 1).abs().max() for k in (0, 1))])
            residual = float(off.max())
            if residual <= tolerance:
                break
    if residual > tolerance:
        warnings.warn(
            f"project_to_birkhoff stopped after {max_iterations} iterations with a residual of {residual:.1e} instead "
            f"of {tolerance:.1e}; allow more iterations or a larger tolerance.",
            stacklevel=2,
        )
    return point.to(matrix.device, matrix.dtype)


def projected(matrix: Tensor, projection: Projection) -> Tensor:
    """Project a trained matrix to the polytope: by 16 iterations of Sinkhorn, or onto the nearest point."""
    if projection == "sinkhorn":
        return sinkhorn(matrix)
    # Rounding to the matrix's dtype perturbs exact sums.
    return project_to_birkhoff(matrix, max(1e-8, 10 * torch.finfo(matrix.dtype).eps))


def nearest_permutation(matrix: Tensor) -> Tensor:
    r"""Return the permutation nearest to a matrix in the Frobenius norm, by linear assignment.

    Maximises :math:`\mathrm{tr}(\Pi^\top M) = \sum_i M_{i, p(i)}` exactly, in float64 on the CPU.

    Args:
        matrix: Finite. Shape ``[C, C]``, floating.

    Returns:
        The index vector ``p``: row ``i`` of the permutation matrix has its 1 in column ``p[i]``. Shape ``[C]``,
        int64, on the device of ``matrix``. Deterministic; an arbitrary one of several optima.

    Raises:
        TypeError: If the dtype is not floating.
        ValueError: If the matrix is not square or not finite.

    Note:
        ``O(C^3)`` time at worst; not differentiable.

    Example:
        >>> nearest_permutation(torch.tensor([[0.4, 0.6], [0.1, 0.9]]))
        tensor([0, 1])
    """
    _check_square(matrix)
    columns = linear_sum_assignment(matrix.detach().cpu().double().numpy(), maximize=True)[1]
    return torch.as_tensor(columns, dtype=torch.int64, device=matrix.device)


def soft_sort(scores: Tensor, tau: float) -> Tensor:
    r"""Return the SoftSort matrix, a relaxation of the permutation that sorts scores in descending order.

    Row ``i`` is the softmax over ``j`` of :math:`-|\mathrm{sort}(q)_i - q_j| / \tau`. Rows sum to 1, columns
    in general do not. Without ties, the largest entries of the rows are at ``q.argsort(descending=True)``.

    Args:
        scores: ``q``, finite. Shape ``[C]``, floating.
        tau: Temperature, in units of the scores, > 0; the limit 0 is the permutation.

    Returns:
        Shape ``[C, C]``, dtype and device of ``scores``; differentiable where scores differ.

    Raises:
        TypeError: If the dtype is not floating.
        ValueError: If ``scores`` is no vector or not finite, or ``tau`` is not a number > 0.

    References:
        Prillo and Eisenschlos (2020), "SoftSort: A Continuous Relaxation for the argsort Operator",
        arXiv:2006.16038, with d(x, y) = abs(x - y).

    Example:
        >>> soft_sort(torch.tensor([1.0, 2.0]), tau=0.1).round(decimals=3)
        tensor([[0., 1.],
                [1., 0.]])
    """
    if not scores.dtype.is_floating_point:
        raise TypeError(f"scores must be a floating tensor, got {scores.dtype}.")
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"scores must be a vector of shape [C] with C >= 1, got shape {list(scores.shape)}.")
    check_numbers("> 0", tau=tau)
    _check_finite("The vector of scores", scores)
    ordered = scores.sort(descending=True, stable=True).values
    distances = (ordered[:, None] - scores).abs()
    return torch.softmax(-distances / tau, dim=1)


def full_precision(like: Tensor) -> torch.autocast:
    """Disable autocast for matrix products: the matrices are small and need precision."""
    return torch.autocast(like.device.type, enabled=False)


def at_least_single(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; other dtypes are unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _check_square(matrix: Tensor) -> None:
    if not matrix.dtype.is_floating_point:
        raise TypeError(f"The matrix must be floating, got {matrix.dtype}.")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"The matrix must be square, shape [C, C] with C >= 1, got shape {list(matrix.shape)}.")
    _check_finite("The matrix", matrix)


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has entries that are not finite; look for a diverged training or overflow.")
