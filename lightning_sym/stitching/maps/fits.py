"""The best map of each family for given moments, exact up to rounding, in float64 on the CPU.

The objective is always the sum over positions of ``|y - s x|^2 = tr(s xx s') - 2 tr(s yx') + const``.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_sym.stitching.maps.moments import FeatureMoments
from lightning_sym.symmetry.intertwiners import IntertwinerGroup


def least_squares(moments: FeatureMoments) -> Tensor:
    """Return the best matrix, ``yx`` times the inverse of ``xx``. Shape ``[C2, C1]``.

    Channels of ``x`` are scaled to unit norm before and back after, to distinguish weak channels from
    dependent ones. For dependent channels, returns the matrix of least norm in these units; 0 for dead channels.
    """
    xx, yx = _double(moments.xx), _double(moments.yx)
    norms = xx.diagonal().sqrt()
    inverse_norms = torch.where(norms > 0, 1 / norms, 0.0)
    values, vectors = torch.linalg.eigh(inverse_norms[:, None] * xx * inverse_norms)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    vectors = vectors[:, kept]
    solution: Tensor = ((yx * inverse_norms) @ vectors / values[kept]) @ vectors.T * inverse_norms
    return solution


def reduced_rank(moments: FeatureMoments, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors, shapes ``[C2, rank]`` and ``[rank, C1]``, of the best matrix of this rank.

    The residual of the least squares fit is orthogonal to everything linear in ``x``. The optimum is therefore the best
    approximation of the fitted values ``s x`` of lower rank: ``s`` projected on their leading ``rank`` left singular
    vectors (Eckart and Young), which are eigenvectors of ``s xx s'``.
    """
    full = least_squares(moments)
    vectors = torch.linalg.eigh(full @ _double(moments.xx) @ full.T).eigenvectors[:, -rank:]
    return vectors, vectors.T @ full


def assign(moments: FeatureMoments, group: IntertwinerGroup) -> tuple[Tensor, Tensor]:
    """Return ``p`` and ``d`` of the group's best element ``P D``: output ``i`` is ``d[p[i]]`` times input ``p[i]``.

    With independent scales, the pair (i, j) is best at ``d = <y_i, x_j> / |x_j|^2`` and lowers the objective by
    ``<y_i, x_j>^2 / |x_j|^2``; with ``d >= 0`` by 0 if the product is negative. With unit scales it lowers it by
    ``2 <y_i, x_j>``, or its absolute value with signs, up to terms common to all permutations.

    Returns:
        ``p`` (int64) and ``d`` (float64), both of shape ``[C]``. Depending on the group, ``d`` is >= 0, of any sign,
        1 or -1, or all 1; a dead input, for which every scale is optimal, gets 1.
    """
    products, norms = _double(moments.yx), _double(moments.xx).diagonal()
    if group.positive_scales:
        allowed = products if group.signs else products.clamp_min(0)
        gains = torch.where(norms > 0, allowed.square() / norms, 0.0)
    else:
        gains = allowed = products.abs() if group.signs else products
    if group.permutations:
        p = torch.as_tensor(linear_sum_assignment(gains.numpy(), maximize=True)[1], dtype=torch.int64)
    else:
        p = torch.arange(len(norms))
    rows = torch.arange(len(p))
    scale = torch.ones_like(norms)
    if group.positive_scales:
        scale[p] = torch.where(norms[p] > 0, allowed[rows, p] / norms[p], 1.0)
    elif group.signs:
        scale[p] = torch.where(products[rows, p] < 0, -1.0, 1.0).to(scale)
    return p, scale


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
