"""Stitching maps without an intertwiner group: all matrices, sparse, low-rank, orthogonal, the identity."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_numbers
from lightning_sym._linear_algebra import polar_factor
from lightning_sym.stitching.maps import fits
from lightning_sym.stitching.maps.base import FittedMap, Port, StitchingMap
from lightning_sym.stitching.maps.birkhoff import at_least_single, full_precision
from lightning_sym.stitching.maps.moments import FeatureMoments

_LASSO_ZERO = 1e-4  # smaller entries count as zero in hard mode; Godfrey et al. (2022), in their code


class FullMap(StitchingMap):
    """Any matrix, ``C1 C2`` degrees of freedom; initialised like PyTorch's convolutions.

    Args:
        port: Widths and axis; the group is not used.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, appendix D.2.
    """

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.weight = nn.Parameter(_as_convolution(port.out_channels, port.in_channels))

    def matrix(self) -> Tensor:
        """Return the weight. Shape ``[C2, C1]``."""
        return self.weight

    def _fit(self, moments: FeatureMoments) -> None:
        self.weight.copy_(fits.least_squares(moments))


class LassoMap(FullMap):
    """A matrix with an L1 penalty; hard mode zeroes entries below 1e-4.

    Args:
        port: Widths and axis; the group is not used.
        penalty: Weight of the sum of absolute values in the loss, >= 0. Godfrey et al. try 1e-4 to 1e-1.

    Raises:
        ValueError: If ``penalty`` is negative or not finite.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, appendix D.2.
    """

    def __init__(self, port: Port, penalty: float = 0.01) -> None:
        super().__init__(port)
        check_numbers(">= 0", of=self, penalty=penalty)
        self.penalty = penalty

    def matrix(self) -> Tensor:
        """Return the weight, in hard mode with small entries zeroed. Shape ``[C2, C1]``."""
        if self.mode == "soft":
            return self.weight
        return torch.where(self.weight.abs() < _LASSO_ZERO, 0.0, self.weight)

    def regularization(self) -> Tensor:
        """Return ``penalty`` times the sum of absolute values; a scalar."""
        return self.penalty * self.weight.abs().sum()

    def extra_repr(self) -> str:
        """Return widths, axis and penalty, for ``repr``."""
        return f"{super().extra_repr()}, penalty={self.penalty:g}"


class LowRankMap(StitchingMap):
    r"""Matrices :math:`U V` of at most a given rank: :math:`r (C_1 + C_2 - r)` degrees of freedom.

    Applied as two maps with ``r`` channels in between; each is initialised like PyTorch's convolutions.

    Args:
        port: Widths and axis; the group is not used.
        rank: ``r``, at least 1 and at most the smaller width.

    Raises:
        ValueError: If ``rank`` is out of range.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, appendix D.2, which uses ranks 1, 2 and 4.
    """

    def __init__(self, port: Port, rank: int) -> None:
        super().__init__(port)
        narrower = min(port.in_channels, port.out_channels)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= narrower:
            raise ValueError(
                f"rank of LowRankMap must be an integer from 1 to {narrower}, the smaller width of the port, got "
                f"{rank!r}; for more use FullMap."
            )
        self.rank = rank
        self.right = nn.Parameter(_as_convolution(rank, port.in_channels))
        self.left = nn.Parameter(_as_convolution(port.out_channels, rank))

    def matrix(self) -> Tensor:
        """Return the product of both factors. Shape ``[C2, C1]``."""
        with full_precision(self.left):
            return self.left @ self.right

    def forward(self, x: Tensor) -> Tensor:
        """Apply both factors in turn; see :meth:`StitchingMap.forward`."""
        self._check(x)
        return self._apply_matrix(self.left, self._apply_matrix(self.right, x))

    def _fit(self, moments: FeatureMoments) -> None:
        left, right = fits.reduced_rank(moments, self.rank)
        self.left.copy_(left)
        self.right.copy_(right)

    def dimension(self) -> int:
        """Return ``r (C1 + C2 - r)``: the ``r (C1 + C2)`` entries minus the ``r * r`` of GL(r) between the factors."""
        return self.rank * (self.port.in_channels + self.port.out_channels - self.rank)

    def extra_repr(self) -> str:
        """Return widths, axis and rank, for ``repr``."""
        return f"{super().extra_repr()}, rank={self.rank}"


class OrthogonalMap(StitchingMap):
    r"""Orthogonal matrices, :math:`C (C - 1) / 2` degrees of freedom; initialised as the identity.

    :math:`(I + A)^{-1} (I - A)\, Q_0` with a skew-symmetric parameter ``A`` (Cayley) and a fixed orthogonal matrix
    ``Q_0``, which :meth:`init_from_moments` sets. Training preserves the determinant of ``Q_0``. Rotations by 180
    degrees relative to ``Q_0`` are limits rather than members. Each step solves one linear system; the matrix
    exponential, which reaches these rotations, costs several times as much.

    Args:
        port: Equal widths, and the axis; the group is not used.

    References:
        docs/theory/stitching.md, 2.1; for the Cayley transform Helfrich et al. (2018), arXiv:1707.09520.
    """

    needs_equal_widths: ClassVar[bool] = True

    base: Tensor
    _above: Tensor

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        size = port.in_channels
        self.skew = nn.Parameter(torch.zeros(size * (size - 1) // 2))
        self.register_buffer("base", torch.eye(size))
        # Indices of the parameter's entries in the flattened matrix: above its diagonal, row by row.
        rows, columns = torch.triu_indices(size, size, 1)
        self.register_buffer("_above", rows * size + columns, persistent=False)

    def matrix(self) -> Tensor:
        """Return the orthogonal matrix. Shape ``[C, C]``."""
        size = self.port.in_channels
        with full_precision(self.skew):
            skew = at_least_single(self.skew)
            upper = skew.new_zeros(size * size).index_copy(0, self._above, skew).view(size, size)
            generator = upper - upper.T
            identity = torch.eye(size, dtype=skew.dtype, device=skew.device)
            base = self.base.to(skew.dtype)
            rotated: Tensor = torch.linalg.solve(identity + generator, (identity - generator) @ base)
        return rotated.to(self.skew.dtype)

    def _fit(self, moments: FeatureMoments) -> None:
        self.base.copy_(polar_factor(moments.yx))  # either determinant
        self.skew.zero_()


class IdentityMap(StitchingMap):
    """The identity, a baseline without degrees of freedom or parameters.

    Args:
        port: Equal widths, and the axis; the group is not used.
    """

    needs_equal_widths: ClassVar[bool] = True

    def matrix(self) -> Tensor:
        """Return the identity. Shape ``[C, C]``."""
        return torch.eye(self.port.in_channels, dtype=self._zero.dtype, device=self._zero.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after checking its channels."""
        self._check(x)
        return x

    def _fit(self, moments: FeatureMoments) -> None:
        """Do nothing: the family has a single member."""


class FixedMap(StitchingMap):
    """A fixed matrix, stored in checkpoints. The map has no parameters.

    Args:
        port: Widths and axis; the group is not used.
        matrix: Maps input to output channels. Shape ``[C2, C1]``, floating, finite; copied.

    Raises:
        ValueError: If the matrix has another shape, or an entry is not finite.

    Example:
        >>> FixedMap(Port(2, 2), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))(torch.tensor([[3.0, 5.0]]))
        tensor([[5., 6.]])
    """

    fixed: Tensor

    def __init__(self, port: Port, matrix: Tensor) -> None:
        super().__init__(port)
        shape = (port.out_channels, port.in_channels)
        if tuple(matrix.shape) != shape or not matrix.is_floating_point() or not bool(torch.isfinite(matrix).all()):
            raise ValueError(
                f"matrix of FixedMap must have finite floating numbers and the port's shape {list(shape)}, got "
                f"shape {list(matrix.shape)}, {matrix.dtype}."
            )
        self.register_buffer("fixed", matrix.detach().clone())

    def matrix(self) -> Tensor:
        """Return the given matrix. Shape ``[C2, C1]``."""
        return self.fixed


class _FittedMatrix(FittedMap):
    """A fitted map stored as a matrix."""

    weight: Tensor

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.register_buffer("weight", torch.zeros(port.out_channels, port.in_channels))

    def matrix(self) -> Tensor:
        """Return the fitted matrix. Shape ``[C2, C1]``.

        Raises:
            RuntimeError: If it is not fitted.
        """
        self._check_fitted()
        return self.weight


class LeastSquaresMap(_FittedMatrix):
    r"""The untrained matrix that minimises :math:`\sum_m \|y_m - s x_m\|^2`.

    For dependent channels of ``x``, returns the solution of least norm in units with unit norm of each channel; dead
    channels get 0.

    Args:
        port: Widths and axis; the group is not used.

    References:
        docs/theory/stitching.md, 2.5.
    """

    def _fit(self, moments: FeatureMoments) -> None:
        self.weight.copy_(fits.least_squares(moments))

    def dimension(self) -> int:
        """Return ``C1 C2``, all of them fitted."""
        return self.port.in_channels * self.port.out_channels


class ProcrustesMap(_FittedMatrix):
    r"""The untrained orthogonal matrix that minimises :math:`\sum_m \|y_m - s x_m\|^2`, with either determinant.

    Args:
        port: Equal widths, and the axis; the group is not used.

    References:
        Schönemann (1966), "A generalized solution of the orthogonal Procrustes problem", doi:10.1007/BF02289451.
    """

    needs_equal_widths: ClassVar[bool] = True

    def _fit(self, moments: FeatureMoments) -> None:
        self.weight.copy_(polar_factor(moments.yx))

    def dimension(self) -> int:
        """Return ``C (C - 1) / 2``, all of them fitted."""
        return self.port.in_channels * (self.port.in_channels - 1) // 2


def _as_convolution(rows: int, columns: int) -> Tensor:
    """Return a random matrix with the initial distribution of an ``nn.Conv2d`` with kernel size 1."""
    weight = torch.empty(rows, columns)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # the slope of PyTorch's layers: +- 1 / sqrt(columns)
    return weight
