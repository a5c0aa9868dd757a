"""The dense linear map between features on two grids."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import Grid, check_features, check_integers, height_width


class GridLayer(nn.Module):
    """A layer from features on one grid to features on another.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        grid: Height and width of the inputs, or the side of a square.
        out_grid: Height and width of the outputs, or the side of a square; default ``grid``.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, in_channels: int, out_channels: int, grid: Grid, out_grid: Grid | None) -> None:
        super().__init__()
        check_integers(of=self, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.grid = height_width(grid, of=self)
        self.out_grid = self.grid if out_grid is None else height_width(out_grid, "out_grid", of=self)

    def extra_repr(self) -> str:
        """Return channels and grids, for ``repr``."""
        return f"{self.in_channels}, {self.out_channels}, grid={self.grid}, out_grid={self.out_grid}"


class FullyConnected(GridLayer):
    r"""Any affine map from features on one grid to features on another: the most general layer.

    .. math:: y[n, c', y] = b[c', y] + \sum_{c, x} W[c', y, c, x]\, x[n, c, x]

    Positions are numbered row by row. It has ``C' C S S' + C' S'`` parameters, with ``S = H W`` and ``S' = H' W'``.
    The weight is drawn from ``U(-1/sqrt(C S), 1/sqrt(C S))`` by torch's global generator, the bias is 0.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        grid: Height and width of the inputs, or the side of a square.
        out_grid: Height and width of the outputs, or the side of a square; default ``grid``.

    Attributes:
        weight: Shape ``[C', S', C, S]``.
        bias: Shape ``[C', S']``; it varies over space, so that this layer is translation-equivariant only if
            weight and bias are constant along the grid.
        grid: ``(H, W)``.
        out_grid: ``(H', W')``.

    Raises:
        ValueError: If an argument is out of range; in the forward, if features have another shape.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), "Learning Layer-wise Equivariances Automatically using
        Gradients", section 2; docs/theory/relaxed_layers.md, 1.1.
    """

    def __init__(self, in_channels: int, out_channels: int, grid: Grid, out_grid: Grid | None = None) -> None:
        super().__init__(in_channels, out_channels, grid, out_grid)
        positions, out_positions = math.prod(self.grid), math.prod(self.out_grid)
        bound = (in_channels * positions) ** -0.5
        weight = torch.empty(out_channels, out_positions, in_channels, positions)
        self.weight = nn.Parameter(nn.init.uniform_(weight, -bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_channels, out_positions))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', H', W']`` for ``[N, C, H, W]``."""
        check_features(self, x, self.in_channels, self.grid)
        y = F.linear(x.flatten(1), self.weight.flatten(2).flatten(0, 1), self.bias.flatten())
        return y.view(len(x), self.out_channels, *self.out_grid)
