"""The factored fully connected layer: of rank one in space for each pair of channels."""

import math

import torch
from torch import Tensor, nn

from lightning_sym._checks import Grid, check_features
from lightning_sym.layers.fully_connected import GridLayer


def factored_hidden(x: Tensor, theta1: Tensor, b1: Tensor) -> Tensor:
    """Return the first half of the factored map, one number for each pair of channels.

    Args:
        x: Shape ``[N, C, S]``.
        theta1: Shape ``[C', C, S]``.
        b1: Shape ``[C']``.

    Returns:
        Shape ``[C, C', N]``.
    """
    # One product for each channel c. Copying the (small) weight speeds up the product for its gradient.
    return torch.baddbmm(b1[:, None], theta1.transpose(0, 1).contiguous(), x.permute(1, 2, 0))


def factored_map(x: Tensor, theta1: Tensor, theta2: Tensor, b1: Tensor, b2: Tensor | None) -> Tensor:
    """Return the factored map by two batched matrix products, O(N C C' (S + S')).

    Args:
        x: Shape ``[N, C, S]``.
        theta1: Shape ``[C', C, S]``.
        theta2: Shape ``[C', C, S']``.
        b1: Shape ``[C']``.
        b2: Shape ``[S']``, or None.

    Returns:
        Shape ``[N, C', S']``, a view of a tensor with the channels first.
    """
    hidden = factored_hidden(x, theta1, b1).permute(1, 2, 0)  # [C', N, C]
    y = torch.bmm(hidden, theta2) if b2 is None else torch.baddbmm(b2, hidden, theta2)
    return y.transpose(0, 1)  # A copy into another order would take a tenth of a training step.


class FactoredFullyConnected(GridLayer):
    r"""A fully connected layer with a weight of rank one in space for each pair of channels (F-FC).

    .. math::
        z[n, c, c'] &= b_1[c'] + \sum_x \theta_1[c', c, x]\, x[n, c, x] \\
        y[n, c', y] &= b_2[y] + \sum_c \theta_2[c', c, y]\, z[n, c, c']

    It has ``C' C (S + S') + C' + S'`` parameters instead of the ``C' C S S'`` of
    :class:`~lightning_sym.layers.FullyConnected`, and does not contain convolutions. The layer is
    translation-equivariant if ``theta2`` and ``b2`` are constant over space; ``theta1 = 0`` is not enough, as
    ``b1`` still passes through ``theta2``.

    ``theta1`` is drawn from ``U(-sqrt(3/S), sqrt(3/S))`` and ``theta2`` from ``U(-sqrt(3/C), sqrt(3/C))``, which
    preserves unit variance of inputs; biases are 0. Uses torch's global generator.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        grid: Height and width of the inputs, or the side of a square.
        out_grid: Height and width of the outputs, or the side of a square; default ``grid``.

    Attributes:
        theta1: Shape ``[C', C, S]``.
        theta2: Shape ``[C', C, S']``. Its gradient has this order in memory, so that no step of training copies it.
        b1: Shape ``[C']``, added for every input channel.
        b2: Shape ``[S']``, one map for all output channels.
        grid: ``(H, W)``.
        out_grid: ``(H', W')``.

    Raises:
        ValueError: If an argument is out of range; in the forward, if features have another shape.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), section 4.1, where it has no biases;
        docs/theory/relaxed_layers.md, 1.3.
    """

    def __init__(self, in_channels: int, out_channels: int, grid: Grid, out_grid: Grid | None = None) -> None:
        super().__init__(in_channels, out_channels, grid, out_grid)
        positions, out_positions = math.prod(self.grid), math.prod(self.out_grid)
        bound1, bound2 = math.sqrt(3 / positions), math.sqrt(3 / in_channels)
        theta1 = torch.empty(out_channels, in_channels, positions)
        theta2 = torch.empty(out_positions, out_channels * in_channels)
        self.theta1 = nn.Parameter(nn.init.uniform_(theta1, -bound1, bound1))
        nn.init.uniform_(theta2, -bound2, bound2)  # second, so that seeds give the networks of the published runs
        self.theta2 = nn.Parameter(theta2.mT.reshape(out_channels, in_channels, out_positions).contiguous())
        self.b1 = nn.Parameter(torch.zeros(out_channels))
        self.b2 = nn.Parameter(torch.zeros(out_positions))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', H', W']`` for ``[N, C, H, W]``."""
        check_features(self, x, self.in_channels, self.grid)
        y = factored_map(x.flatten(2), self.theta1, self.theta2, self.b1, self.b2)
        return y.view(len(x), self.out_channels, *self.out_grid)
