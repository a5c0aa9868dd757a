"""Convolution on the torus."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_features, check_integers, check_kernel


def circular_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
    """Return the convolution (cross-correlation) of features on a torus, with the size of the input.

    Args:
        x: Shape ``[N, C, H, W]``.
        weight: Shape ``[C', C / groups, k, k]`` with odd ``k``, which may exceed the grid: the filter then wraps
            around more than once.
        bias: Shape ``[C']``, or None.
        groups: As in :func:`torch.nn.functional.conv2d`.

    Returns:
        Shape ``[N, C', H, W]``.
    """
    padding = weight.shape[-1] // 2
    if padding > min(x.shape[-2:]):  # F.pad wraps around at most once
        for axis in (-2, -1):
            size = x.shape[axis]
            x = x.index_select(axis, torch.arange(-padding, size + padding, device=x.device) % size)
    elif padding:
        for axis in (-1, -2):  # F.pad writes in place, which makes the gradient costly
            size = x.shape[axis]
            x = torch.cat([x.narrow(axis, size - padding, padding), x, x.narrow(axis, 0, padding)], axis)
    return F.conv2d(x, weight, bias, groups=groups)


def he_uniform(weight: Tensor, fan_in: int) -> Tensor:
    """Fill a weight from ``U(-sqrt(6 / fan_in), sqrt(6 / fan_in))`` in place, and return it."""
    bound = math.sqrt(6 / fan_in)
    return nn.init.uniform_(weight, -bound, bound)


class CircularConv(nn.Module):
    r"""Convolution with stride 1 that wraps around the grid, exactly equivariant to circular shifts.

    .. math:: y[n, c', i, j] = b[c'] + \sum_{c, a, b} W[c', c, a, b]\, x[n, c, (i + a - p) \bmod H, (j + b - p) \bmod W]

    with ``p = (k - 1) / 2``, on any grid. It has ``C' C k^2 + C'`` parameters. The weight is He-uniform, from torch's
    global generator, the bias is 0. To halve the grid, add :class:`~lightning_sym.layers.PolyphasePool` after it.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        kernel_size: ``k``, odd.

    Attributes:
        weight: Shape ``[C', C, k, k]``.
        bias: Shape ``[C']``.

    Raises:
        ValueError: If an argument is out of range; in the forward, if the number of channels is wrong.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), section 2; docs/theory/relaxed_layers.md, 1.2.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        check_integers(of=self, in_channels=in_channels, out_channels=out_channels)
        check_kernel(self, kernel_size)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        weight = torch.empty(out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nn.Parameter(he_uniform(weight, in_channels * kernel_size**2))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', H, W]`` for ``[N, C, H, W]``."""
        check_features(self, x, self.in_channels)
        return circular_conv2d(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return channels and kernel size, for ``repr``."""
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
