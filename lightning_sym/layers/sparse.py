"""Layers with weights interpolated over space between anchors: fewer parameters, smoother filters."""

import math

import torch
from torch import Tensor, nn

from lightning_sym._checks import Grid, check_features, check_integers, check_kernel
from lightning_sym.layers.circular_conv import circular_conv2d, he_uniform
from lightning_sym.layers.factored import factored_map
from lightning_sym.layers.fully_connected import GridLayer

_NOISE = 1e-4  # sigma_z^2, the variance of the anchors' values
_VARIANCE = 1 + 1e-6  # of the Gaussian process: s^2 with its floor


def grid_positions(grid: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """Return the coordinates (row, column) of the points of a grid with unit spacing, centred at 0.

    Args:
        grid: Height and width.
        device: Device of the result; default torch's.

    Returns:
        Row by row. Shape ``[H W, 2]``, float64.
    """
    axes = [torch.arange(side, dtype=torch.float64, device=device) - (side - 1) / 2 for side in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)


def _kernel(a: Tensor, b: Tensor, omega: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the Gaussian kernel of points ``[A, 2]`` and ``[B, 2]``, and their squared distances, both ``[A, B]``."""
    squared_distances = (a[:, None] - b).square().sum(-1)
    return _VARIANCE * torch.exp(-0.5 * omega**2 * squared_distances), squared_distances


def _solved(anchors: Tensor, right: Tensor, omega: Tensor | float) -> Tensor:
    """Return the solution of the system of the anchors' kernel, with noise, for a right side ``[M, S]``."""
    noise = _NOISE * torch.eye(len(anchors), dtype=torch.float64, device=anchors.device)
    return torch.cholesky_solve(right, torch.linalg.cholesky(_kernel(anchors, anchors, omega)[0] + noise))


def interpolation(positions: Tensor, grid: tuple[int, int], omega: Tensor | float = 1.0) -> Tensor:
    """Return the matrix that interpolates from values at anchors to all points of a grid.

    ``Phi = (kern(Z, Z) + sigma_z^2 I)^-1 kern(Z, grid)`` with the Gaussian kernel
    ``kern(a, b) = exp(-omega^2 |a - b|^2 / 2)``, the mean of a Gaussian process. Computed in float64, as the system is
    badly conditioned if anchors are close to one another.

    Args:
        positions: Anchors Z in the coordinates of :func:`grid_positions`. Shape ``[M, 2]``.
        grid: Height and width.
        omega: Inverse length scale; shape ``[1]`` if a tensor. In the limit 0 all entries are ``1 / (M + sigma_z^2)``.

    Returns:
        Shape ``[M, H W]``, dtype and device of ``positions``, contiguous; differentiable.

    References:
        docs/theory/relaxed_layers.md, 1.4.
    """
    anchors = positions.double()
    points = grid_positions(grid, positions.device)
    return _solved(anchors, _kernel(anchors, points, omega)[0], omega).to(positions.dtype).contiguous()


def interpolation_slope(positions: Tensor, grid: tuple[int, int], omega: Tensor | float = 1.0) -> Tensor:
    """Return the derivative of :func:`interpolation` with respect to ``omega``, in closed form; 0 at ``omega = 0``.

    ``(kern(Z, Z) + sigma_z^2 I)^-1 (kern'(Z, grid) - kern'(Z, Z) Phi)`` with ``kern' = -omega |a - b|^2 kern``.

    Args:
        positions: As there.
        grid: As there.
        omega: As there.

    Returns:
        Shape ``[M, H W]``, dtype and device of ``positions``.
    """
    anchors = positions.double()
    (among, near), (apart, far) = (
        _kernel(anchors, points, omega) for points in (anchors, grid_positions(grid, positions.device))
    )
    right = -omega * (far * apart - (near * among) @ _solved(anchors, apart, omega))
    return _solved(anchors, right, omega).to(positions.dtype).contiguous()


def _count_anchors(module: nn.Module, anchors: int | None, points: int, name: str) -> int:
    """Return the number of anchors: half of the points, rounded up, unless given."""
    if anchors is None:
        return (points + 1) // 2
    check_integers(of=module, **{name: anchors})
    if anchors > points:
        raise ValueError(
            f"{type(module).__name__} interpolates between anchors on {points} positions, got {name}={anchors}; "
            f"use {points} at most."
        )
    return anchors


def _draw(grid: tuple[int, int], anchors: int) -> Tensor:
    """Draw anchors uniformly in the rectangle spanned by a grid's points. Shape ``[M, 2]``."""
    return (torch.rand(anchors, 2) - 0.5) * torch.tensor([side - 1.0 for side in grid])


def _reduce(target: Tensor, phi: Tensor) -> Tensor:
    """Return the anchor values with the interpolation nearest to the weights, in the sense of least squares.

    Args:
        target: Shape ``[..., S]``.
        phi: Shape ``[M, S]``.

    Returns:
        Shape ``[..., M]``, dtype and device of ``target``. On the meta device nothing is computed.
    """
    if target.is_meta:
        return target.new_empty(*target.shape[:-1], len(phi))
    rows = target.reshape(-1, target.shape[-1]).to("cpu", torch.float64)
    # This driver handles rank-deficient matrices; only the CPU has it.
    solution: Tensor = torch.linalg.lstsq(phi.to("cpu", torch.float64).mT, rows.mT, driver="gelsy").solution
    return solution.mT.to(target).reshape(*target.shape[:-1], len(phi))


class _Anchored(nn.Module):
    """A layer with anchors; its interpolation is a buffer unless a part of it is learned."""

    def _add_anchors(
        self, suffix: str, grid: tuple[int, int], anchors: int, learn_positions: bool, learn_lengthscale: bool
    ) -> Tensor:
        """Make ``positions``, ``omega`` (if learned) and ``phi`` (if nothing is); return the interpolation."""
        positions = _draw(grid, anchors)
        phi = interpolation(positions, grid)
        if learn_positions:
            self.register_parameter(f"positions{suffix}", nn.Parameter(positions))
        else:
            self.register_buffer(f"positions{suffix}", positions)
        self.register_parameter(f"omega{suffix}", nn.Parameter(torch.ones(1)) if learn_lengthscale else None)
        self.register_buffer(f"phi{suffix}", None if learn_positions or learn_lengthscale else phi)
        return phi

    def _interpolation(self, suffix: str, grid: tuple[int, int]) -> Tensor:
        """Return the current interpolation. Shape ``[M, S]``."""
        phi: Tensor | None = getattr(self, f"phi{suffix}")
        if phi is not None:
            return phi
        omega: Tensor | None = getattr(self, f"omega{suffix}")
        return interpolation(getattr(self, f"positions{suffix}"), grid, 1.0 if omega is None else omega)

    def _slope(self, suffix: str, grid: tuple[int, int]) -> Tensor:
        """Return the derivative of a learned length scale's interpolation with respect to it. Shape ``[M, S]``."""
        positions: Tensor = getattr(self, f"positions{suffix}").detach()
        return interpolation_slope(positions, grid, getattr(self, f"omega{suffix}").detach())


class SparseConv(_Anchored):
    r"""A circular convolution with filters interpolated between a few anchors (S-CONV).

    .. math:: W[c', c, t] = \sum_m u[c', c, m]\, \Phi[m, t]

    where :math:`\Phi` interpolates by a Gaussian process with inverse length scale :math:`\omega`. It has
    ``C' C M + C'`` parameters. As :math:`\omega \to 0` filters become constant over space.

    Anchors are drawn uniformly over the filter's rectangle, and ``u`` is the least-squares fit to a He-uniform filter,
    all from torch's global generator; the bias is 0.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        kernel_size: ``k``, odd.
        anchors: ``M``, at most ``k^2``; default half of that, rounded up.
        learn_positions: Train the anchors' positions (``2 M`` parameters more).
        learn_lengthscale: Train the inverse length scale (one more).

    Attributes:
        u: Values at the anchors. Shape ``[C', C, M]``.
        bias: Shape ``[C']``.
        positions: Anchors in pixels from the filter's centre, (row, column); a buffer unless learned. Shape ``[M, 2]``.
        omega: Inverse length scale in 1/pixel, shape ``[1]``, sign of no effect; None (which means 1) unless learned.
        phi: The interpolation, a buffer, shape ``[M, k^2]``; None if a part of it is learned. The state contains it in
            addition to the positions, so that weights have the same meaning in every precision.

    Raises:
        ValueError: If an argument is out of range; in the forward, if the number of channels is wrong.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), section 4.2 and appendix;
        docs/theory/relaxed_layers.md, 1.4. The published code pads with zeros and rounds the number of anchors
        differently; this layer follows the paper.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        anchors: int | None = None,
        learn_positions: bool = False,
        learn_lengthscale: bool = False,
    ) -> None:
        super().__init__()
        check_integers(of=self, in_channels=in_channels, out_channels=out_channels)
        check_kernel(self, kernel_size)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.anchors = _count_anchors(self, anchors, kernel_size**2, "anchors")
        self._grid = (kernel_size, kernel_size)
        target = he_uniform(torch.empty(out_channels, in_channels, kernel_size**2), in_channels * kernel_size**2)
        phi = self._add_anchors("", self._grid, self.anchors, learn_positions, learn_lengthscale)
        self.u = nn.Parameter(_reduce(target, phi))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def interpolation(self) -> Tensor:
        """Return the current interpolation Phi. Shape ``[M, k^2]``."""
        return self._interpolation("", self._grid)

    def filters(self) -> Tensor:
        """Return the filters W. Shape ``[C', C, k, k]``."""
        weight: Tensor = self.u @ self.interpolation()
        return weight.view(self.out_channels, self.in_channels, *self._grid)

    def filter_slopes(self) -> Tensor:
        """Return the derivative of the filters with respect to a learned ``omega``. Shape ``[C', C, k, k]``."""
        slopes: Tensor = self.u @ self._slope("", self._grid)
        return slopes.view(self.out_channels, self.in_channels, *self._grid)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', H, W]`` for ``[N, C, H, W]``."""
        check_features(self, x, self.in_channels)
        return circular_conv2d(x, self.filters(), self.bias)

    def extra_repr(self) -> str:
        """Return channels, kernel size and anchors, for ``repr``."""
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, anchors={self.anchors}"


class SparseFactoredFullyConnected(GridLayer, _Anchored):
    r"""A factored fully connected layer with factors interpolated between anchors on the grids (S-FC).

    .. math::
        \theta_1[c', c, x] = \sum_m u_1[c', c, m]\, \Phi_1[m, x], \qquad
        \theta_2[c', c, y] = \sum_m u_2[c', c, m]\, \Phi_2[m, y]

    and then as :class:`~lightning_sym.layers.FactoredFullyConnected` without ``b2``. It has ``C' C (M1 + M2) + C'``
    parameters. As both inverse length scales go to 0, the layer sums over the grid and broadcasts: it becomes
    invariant to translations.

    Both sets of anchors are drawn uniformly over their grid, and the values are the least-squares fit to a field that
    interpolates ``U(-sqrt(3/S), sqrt(3/S))`` for ``u1`` and ``U(-sqrt(3/C), sqrt(3/C))`` for ``u2`` at all grid points;
    ``b1`` is 0. Uses torch's global generator.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        grid: Height and width of the inputs, or the side of a square.
        out_grid: Height and width of the outputs, or the side of a square; default ``grid``.
        anchors: ``M1``, at most ``S``; default half of that, rounded up.
        out_anchors: ``M2``, at most ``S'``; default half of that, rounded up.
        learn_positions: Train the positions of both sets of anchors.
        learn_lengthscale: Train both inverse length scales.

    Attributes:
        u1: Values at the anchors of the input grid. Shape ``[C', C, M1]``.
        u2: Values at the anchors of the output grid: ``u2[m, c' C + c]`` is the formula's ``u2[c', c, m]``. Shape
            ``[M2, C' C]``.
        b1: Shape ``[C']``.
        positions1: Anchors in pixels from the grid's centre, (row, column); a buffer unless learned. Shape ``[M1, 2]``.
        positions2: Shape ``[M2, 2]``.
        omega1: Inverse length scale in 1/pixel, shape ``[1]``, sign of no effect; None (which means 1) unless learned.
        omega2: Inverse length scale of the output grid, in the same form.
        phi1: Interpolation, a buffer, shape ``[M1, S]``; None if a part of it is learned.
        phi2: Shape ``[M2, S']``.
        grid: ``(H, W)``.
        out_grid: ``(H', W')``.

    Raises:
        ValueError: If an argument is out of range; in the forward, if features have another shape.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), section 4.2 and appendix; docs/theory/relaxed_layers.md, 1.5.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid: Grid,
        out_grid: Grid | None = None,
        anchors: int | None = None,
        out_anchors: int | None = None,
        learn_positions: bool = False,
        learn_lengthscale: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, grid, out_grid)
        positions, out_positions = math.prod(self.grid), math.prod(self.out_grid)
        self.anchors = _count_anchors(self, anchors, positions, "anchors")
        self.out_anchors = _count_anchors(self, out_anchors, out_positions, "out_anchors")
        learned = (learn_positions, learn_lengthscale)
        values = (out_channels * in_channels,)
        u1 = self._values("1", values, self.grid, self.anchors, math.sqrt(3 / positions), learned)
        u2 = self._values("2", values, self.out_grid, self.out_anchors, math.sqrt(3 / in_channels), learned)
        self.u1 = nn.Parameter(u1.reshape(out_channels, in_channels, self.anchors))
        self.u2 = nn.Parameter(u2.mT.contiguous())
        self.b1 = nn.Parameter(torch.zeros(out_channels))

    def _values(
        self,
        suffix: str,
        shape: tuple[int, ...],
        grid: tuple[int, int],
        anchors: int,
        bound: float,
        learned: tuple[bool, bool],
    ) -> Tensor:
        """Make a set of anchors and return their initial values. Shape ``[*shape, M]``."""
        everywhere = nn.init.uniform_(torch.empty(*shape, math.prod(grid)), -bound, bound)
        target = everywhere @ interpolation(grid_positions(grid).to(everywhere), grid)
        return _reduce(target, self._add_anchors(suffix, grid, anchors, *learned))

    def interpolations(self) -> tuple[Tensor, Tensor]:
        """Return the current interpolations Phi1 ``[M1, S]`` and Phi2 ``[M2, S']``."""
        return self._interpolation("1", self.grid), self._interpolation("2", self.out_grid)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return theta1 ``[C', C, S]`` and theta2 ``[C', C, S']`` of the equivalent factored layer."""
        phi1, phi2 = self.interpolations()
        return self.u1 @ phi1, self._by_pairs(self.u2.mT @ phi2)

    def _by_pairs(self, values: Tensor) -> Tensor:
        """Return values of pairs of channels, ``[C' C, ...]``, as ``[C', C, ...]``."""
        return torch.unflatten(values, 0, (self.out_channels, self.in_channels))

    def factor_slopes(self) -> tuple[Tensor, Tensor]:
        """Return the derivatives of both factors with respect to learned length scales; see :meth:`factors`."""
        slope1, slope2 = self._slope("1", self.grid), self._slope("2", self.out_grid)
        return self.u1 @ slope1, self._by_pairs(self.u2.mT @ slope2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', H', W']`` for ``[N, C, H, W]``."""
        check_features(self, x, self.in_channels, self.grid)
        phi1, phi2 = self.interpolations()
        # Interpolate the smaller one: weights, or samples.
        theta1, x = (self.u1 @ phi1, x.flatten(2)) if self.out_channels <= len(x) else (self.u1, x.flatten(2) @ phi1.mT)
        if self.in_channels <= len(x):
            y = factored_map(x, theta1, self._by_pairs(self.u2.mT @ phi2), self.b1, None)
        else:
            y = factored_map(x, theta1, self._by_pairs(self.u2.mT), self.b1, None) @ phi2
        return y.view(len(x), self.out_channels, *self.out_grid)

    def extra_repr(self) -> str:
        """Return channels, grids and anchors, for ``repr``."""
        return f"{super().extra_repr()}, anchors={self.anchors}, out_anchors={self.out_anchors}"
