"""Stitching maps that mix channels within blocks: attention heads, and rotated residual streams."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, get_args

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._linear_algebra import polar_factor
from lightning_sym.stitching.maps import fits
from lightning_sym.stitching.maps.base import PERMUTATIONS, Mode, Port, StitchingMap
from lightning_sym.stitching.maps.birkhoff import Projection, nearest_permutation, projected, sinkhorn
from lightning_sym.stitching.maps.group_maps import GroupMap
from lightning_sym.stitching.maps.linear_maps import OrthogonalMap
from lightning_sym.stitching.maps.moments import FeatureMoments


class HeadMap(StitchingMap):
    r"""Permute blocks of channels, and multiply each by its own matrix: the group of attention heads.

    Block ``(i, j)`` of the matrix is :math:`P_{ij} M_j`, with ``P`` doubly stochastic in soft mode, and the nearest
    permutation in hard mode. With one block it is any matrix.

    Args:
        port: Equal widths and the axis; the group is not used.
        blocks: Number of blocks of consecutive channels, which divides the width.
        projection: Projection of ``P`` to the polytope, see :class:`~lightning_sym.stitching.GroupMap`.
        alpha: Weight of the regularisation, see :class:`~lightning_sym.stitching.GroupMap`; >= 0.

    Attributes:
        weights: ``P``; initialised at random. Shape ``[blocks, blocks]``; None for one block.
        matrices: ``M``, by input block; initialised as identities. Shape ``[blocks, E, E]``.

    References:
        docs/theory/stitching.md, 2.2; the group is that of docs/theory/transformers.md, 1.
    """

    needs_equal_widths: ClassVar[bool] = True

    weights: nn.Parameter | None

    def __init__(self, port: Port, blocks: int, projection: Projection = "sinkhorn", alpha: float = 0.1) -> None:
        super().__init__(port)
        check_numbers(">= 0", of="HeadMap", alpha=alpha)
        check_integers(of="HeadMap", blocks=blocks)
        if port.in_channels % blocks or projection not in get_args(Projection):
            raise ValueError(
                f"HeadMap needs blocks that divide {port.in_channels} channels and a projection of "
                f"{', '.join(get_args(Projection))}, got blocks={blocks} and projection={projection!r}."
            )
        size = port.in_channels // blocks
        self.blocks, self.projection, self.alpha = blocks, projection, alpha
        self.register_parameter(
            "weights", nn.Parameter(sinkhorn(torch.rand(blocks, blocks), 100)) if blocks > 1 else None
        )
        self.matrices = nn.Parameter(torch.eye(size).repeat(blocks, 1, 1))

    def matrix(self) -> Tensor:
        """Return the matrix in the current mode. Shape ``[C, C]``."""
        places = self._places()
        if places is None:
            return self.matrices[0]
        return (places[:, :, None, None] * self.matrices).transpose(1, 2).flatten(2).flatten(0, 1)

    def _places(self) -> Tensor | None:
        if self.weights is None or self.mode == "soft":
            return self.weights
        places = nearest_permutation(self.weights.detach())
        return torch.eye(self.blocks).to(self.weights)[places.to(self.weights.device)]

    @torch.no_grad()
    def project(self) -> None:
        """Project ``P`` to the polytope, in place."""
        if self.weights is not None:
            self.weights.copy_(projected(self.weights, self.projection))

    def regularization(self) -> Tensor:
        """Return ``-alpha`` times the Frobenius norm of ``P``, as for :class:`GroupMap`; a scalar."""
        norm = super().regularization() if self.weights is None else torch.linalg.vector_norm(self.weights)
        return -self.alpha * norm

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Return ``weights``: the projection would undo most of a decay."""
        return [] if self.weights is None else [self.weights]

    def _fit(self, moments: FeatureMoments) -> None:
        """Set the best blocks: the gain of a pair is the reduction of the objective by its least squares matrix."""
        size = self.port.in_channels // self.blocks
        parts = [torch.arange(k * size, (k + 1) * size) for k in range(self.blocks)]
        best = [[fits.least_squares(moments.part(x, y)) for x in parts] for y in parts]
        products = moments.yx.detach().to("cpu", torch.float64)
        gains = [
            [float((best[i][j] * products[y][:, x]).sum()) for j, x in enumerate(parts)] for i, y in enumerate(parts)
        ]
        rows, columns = linear_sum_assignment(torch.tensor(gains).numpy(), maximize=True)
        for row, column in zip(rows, columns, strict=True):
            self.matrices[column] = best[row][column].to(self.matrices)
        if self.weights is not None:
            self.weights.copy_(torch.eye(self.blocks)[torch.from_numpy(columns)])

    def dimension(self) -> int:
        """Return the number of entries of the matrices; permutations are discrete."""
        return self.matrices.numel()

    def extra_repr(self) -> str:
        """Return widths, axis and the number of blocks, for ``repr``."""
        return f"{super().extra_repr()}, blocks={self.blocks}"


class OnesFixingMap(StitchingMap):
    r"""Orthogonal matrices that fix the vector of ones: the group of streams read by layer norms.

    :math:`\mathbf 1 \mathbf 1^\top / C + B Q B^\top`, where the columns of ``B`` are an orthonormal basis of the
    complement of ones, and ``Q`` is an :class:`~lightning_sym.stitching.OrthogonalMap` of ``C - 1`` channels.
    Initialised as the identity.

    Args:
        port: Equal widths >= 2 and the axis; the group is not used.
    """

    needs_equal_widths: ClassVar[bool] = True

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.inner = OrthogonalMap(Port(port.in_channels - 1, port.in_channels - 1))

    def matrix(self) -> Tensor:
        """Return the matrix. Shape ``[C, C]``."""
        basis = self._basis(self.inner.skew)
        return basis @ self.inner.matrix() @ basis.T + 1 / len(basis)

    def _basis(self, like: Tensor) -> Tensor:
        """Return ``B``: the other unit vectors, reflected by the map from the first unit vector to ones."""
        size = self.port.in_channels
        normal = like.new_full((size,), -(size**-0.5))
        normal[0] += 1
        other = torch.eye(size, dtype=like.dtype, device=like.device)[:, 1:]
        return other - 2 / (normal @ normal) * torch.outer(normal, normal[1:])

    def _fit(self, moments: FeatureMoments) -> None:
        basis = self._basis(torch.empty((), dtype=torch.float64))
        self.inner.base.copy_(polar_factor(basis.T @ moments.yx.double().cpu() @ basis))
        self.inner.skew.zero_()


class BlockMap(StitchingMap):
    """The group of a port with blocks of channels, composed of one map for each kind of blocks.

    Blocks with arbitrary invertible matrices have a :class:`HeadMap`, rotated blocks an
    :class:`~lightning_sym.stitching.OrthogonalMap` (:class:`OnesFixingMap` before layer norms), and channels that
    are permuted one by one a :class:`~lightning_sym.stitching.GroupMap`.

    Args:
        port: Equal widths, the axis, and ``blocks``: the group on the channels.
        projection: Projection of the permutations, see :class:`~lightning_sym.stitching.GroupMap`.
        alpha: Weight of their regularisation, see there; >= 0.

    Attributes:
        parts: The maps.

    Raises:
        ValueError: If widths differ, or the port has no blocks.
    """

    needs_equal_widths: ClassVar[bool] = True

    def __init__(self, port: Port, projection: Projection = "sinkhorn", alpha: float = 0.1) -> None:
        super().__init__(port)
        if port.blocks is None:
            raise ValueError("BlockMap needs a port with blocks of channels; use GroupMap.")
        made: list[StitchingMap] = []
        self._at: list[Tensor] = []
        for kind, inside in enumerate(port.blocks.inside):
            own = [block for block, k in zip(port.blocks.blocks, port.blocks.kinds.tolist(), strict=True) if k == kind]
            channels = torch.stack(own).flatten()
            width = Port(len(channels), len(channels), group=PERMUTATIONS)
            if own[0].shape[1] == 1 and inside == "invertible":
                made.append(HeadMap(width, len(own), projection, alpha))
            elif own[0].shape[1] == 1 and inside == "orthogonal" and len(own) == 1:
                made.append(OnesFixingMap(width) if port.blocks.fixes_ones else OrthogonalMap(width))
            elif own[0].numel() == 1 and len(own) > 1:
                made.append(GroupMap(width, alpha, projection))
            else:  # identity
                continue
            self._at.append(channels)
        self.parts = nn.ModuleList(made)

    @property
    def _maps(self) -> Iterator[tuple[StitchingMap, Tensor]]:
        for part, channels in zip(self.parts, self._at, strict=True):
            assert isinstance(part, StitchingMap)
            yield part, channels

    @property
    def mode(self) -> Mode:
        """Mode of this map and of its parts."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        StitchingMap.mode.__set__(self, mode)  # type: ignore[attr-defined]
        for part, _ in self._maps:
            part.mode = mode

    def matrix(self) -> Tensor:
        """Return the matrix in the current mode. Shape ``[C, C]``."""
        matrix = torch.eye(self.port.in_channels, dtype=self._zero.dtype, device=self._zero.device)
        for part, channels in self._maps:
            at = channels.to(matrix.device)
            matrix = matrix.index_put((at[:, None], at), part.matrix().to(matrix.dtype))
        return matrix

    def project(self) -> None:
        """Project all parts."""
        for part, _ in self._maps:
            part.project()

    def regularization(self) -> Tensor:
        """Return the sum of the parts' regularisers, a scalar."""
        return sum((part.regularization() for part, _ in self._maps), super().regularization())

    def _fit(self, moments: FeatureMoments) -> None:
        for part, channels in self._maps:
            part.init_from_moments(moments.part(channels, channels))

    def held_parameters(self) -> list[nn.Parameter]:
        """Return the held parameters of the parts."""
        return _joined(part.held_parameters() for part, _ in self._maps)

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Return the undecayed parameters of the parts."""
        return _joined(part.undecayed_parameters() for part, _ in self._maps)

    def dimension(self) -> int:
        """Return the sum of the parts' degrees of freedom."""
        return sum(part.dimension() for part, _ in self._maps)


def _joined(lists: Iterable[list[nn.Parameter]]) -> list[nn.Parameter]:
    return [parameter for own in lists for parameter in own]


def group_map(port: Port, projection: Projection = "sinkhorn", alpha: float = 0.1) -> StitchingMap:
    """Make the map of a port's group: a :class:`BlockMap` if the group mixes channels within blocks.

    Otherwise it is a :class:`~lightning_sym.stitching.GroupMap`.

    Args:
        port: Widths, axis and group.
        projection: Projection of the permutations.
        alpha: Weight of their regularisation, >= 0.
    """
    return GroupMap(port, alpha, projection) if port.blocks is None else BlockMap(port, projection, alpha)
