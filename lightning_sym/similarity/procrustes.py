"""Procrustes similarities: distance of the channels of two networks, minimised over a group."""

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_sym.similarity.features import (
    Features,
    SimilarityMetric,
    check_pair,
    joint_products,
    repeats,
    undefined,
)
from lightning_sym.symmetry import ChannelGroup, IntertwinerGroup, Symmetry, Tap, intertwiner_group

_LEAST = 1e-280  # sums of squares below it lose digits
_DEAD = 1e-7  # largest norm of a dead channel, relative to the largest norm
_DEPENDENT = 1e-12  # largest squared norm of a null direction, relative to the largest
_MIXED = -2  # instead of the index of a scale
_MOST_COMMON_SIGNS = 6

# Number of positions, means of x and y, and sums about the means: squares of x, squares of y, products.
Moments: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class GroupProcrustes(SimilarityMetric):
    r"""Procrustes similarity up to a group that acts on the channels.

    It is 1 if a group element maps the channels of one network to those of the other.

    .. math::
        d^2 = m_x + m_y - 2 \max_{g} \langle \hat x, g\, \hat y \rangle, \qquad
        s = 1 - \frac{d}{2 \sqrt C} \quad\text{or}\quad 1 - \frac{d}{\sqrt{m_x} + \sqrt{m_y}}\ (\text{live}),

    where :math:`\hat x` is normalised by the scales of the group: each channel (or all that share a scale) has norm 1
    per channel, blocks with arbitrary invertible matrices are whitened, and the rest is divided by its joint norm.
    :math:`m` is the squared norm after normalisation: the number of live channels if each has a scale. The maximum
    is exact: linear assignment, with the best element for each pair of blocks; nuclear norms for orthogonal and
    invertible matrices. With permutations and positive scales it is the paper's :math:`G_{ReLU}`-Procrustes.

    The states are moments about the means in float64: one pass, exact for any batches and number of processes.

    Args:
        group: The group: that of a hook point, an intertwiner group, or the name of an activation with group
            :math:`\varphi(G_\sigma)` acting on its output.
        other: The group on the channels of the second network, if their number differs; default the same.
        live: Divide by the live channels only. The paper's definition counts dead channels, which raise the similarity.
        center: Subtract each channel's mean. By default only where the group adds constants to channels (sigmoid).
        axis: The axis of the channels, for a name or an intertwiner group.

    Attributes:
        live_channels: After :meth:`compute`: number of channels of either network that are not zero on all inputs.

    Raises:
        ValueError: If the activation is unknown, or ``update`` gets features that do not match.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, definition 5.2. Other groups, live and centred variants are additions;
        docs/theory/similarity.md, 1.

    Example:
        >>> x = torch.rand(10, 3, 4, 4, dtype=torch.float64)
        >>> metric = GroupProcrustes("relu")
        >>> metric.update(x, x[:, [2, 0, 1]] * torch.tensor([1.0, 5.0, 2.0])[:, None, None])
        >>> round(metric.compute().item(), 6)
        1.0
    """

    n: Tensor
    x_mean: Tensor
    y_mean: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    def __init__(
        self,
        group: ChannelGroup | IntertwinerGroup | str,
        other: ChannelGroup | None = None,
        *,
        live: bool = False,
        center: bool | None = None,
        axis: int = 1,
    ) -> None:
        super().__init__()
        group = intertwiner_group(group) if isinstance(group, str) else group
        shifted = group.shifted if isinstance(group, ChannelGroup) else bool(group.offset)
        self._group, self._other, self._axis = group, other, axis
        self.live, self.center = live, shifted if center is None else center
        self.live_channels: tuple[int, int] | None = None
        self._whitened = group.dense if isinstance(group, IntertwinerGroup) else "invertible" in group.inside
        sizes = (0, 0) if isinstance(group, IntertwinerGroup) else (group.channels, (other or group).channels)
        for name, shape in {"n": (), **self._shapes(*sizes)}.items():
            # Not summed: compute combines moments about the means.
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx=None)

    @classmethod
    def at(cls, symmetry: Symmetry, tap: Tap | str, **settings: Any) -> Self:
        """Return the metric of a hook point in a network, up to the action of the network's symmetry.

        Args:
            symmetry: The symmetry of both networks.
            tap: One of ``symmetry.taps``, or its name.
            settings: ``live`` and ``center``.

        Raises:
            ValueError: If there is no such hook point, or it has no channels.
        """
        return cls(symmetry.channels(tap), **settings)

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the channels of x and of y."""
        if isinstance(self._group, IntertwinerGroup):
            return (self._axis,), (self._axis,)
        one, two = self._groups()
        return one.axes, two.axes

    def _shapes(self, c1: int, c2: int) -> dict[str, tuple[int, ...]]:
        one, two = ((c1, c1), (c2, c2)) if self._whitened else ((c1,), (c2,))
        return {"x_mean": (c1,), "y_mean": (c2,), "xx": one, "yy": two, "xy": (c1, c2)}

    def _groups(self) -> tuple[ChannelGroup, ChannelGroup]:
        """Return the groups on the channels of either network."""
        if isinstance(self._group, ChannelGroup):
            return self._group, self._other or self._group
        one, two = (ChannelGroup.of_activation(self._group, size, self._axis) for size in self.xy.shape[-2:])
        return one, two

    def update(self, x: Tensor | Features, y: Tensor | Features, products: Tensor | None = None) -> None:
        """Add a batch of features of both networks, from the same inputs in the same order.

        Args:
            x: Features of the first network: samples first, channels on the group's axes; floating, finite.
            y: Features of the second network; at another resolution, each pixel of the coarser one is repeated.
            products: Their :func:`~lightning_sym.similarity.features.joint_products`, if known.

        Raises:
            TypeError: If a dtype is not floating.
            ValueError: If shapes do not match, or a value is not finite.
        """
        x, y = (
            features if isinstance(features, Features) else Features(features, axes, name)
            for features, axes, name in zip((x, y), self.axes, "xy", strict=True)
        )
        check_pair(x, y)
        if self.xy.numel() and self.xy.shape != (x.size, y.size):
            raise ValueError(f"x and y must have {list(self.xy.shape)} channels, as before, got {[x.size, y.size]}.")
        times = repeats(x, y)
        if not self.xy.numel():
            for name, shape in self._shapes(x.size, y.size).items():
                setattr(self, name, torch.zeros(shape, dtype=torch.float64, device=x.channels.device))
        count = len(x) * x.positions * math.prod(times[0])
        if not count:
            return
        squares = [features.products() if self._whitened else features.squares() for features in (x, y)]
        cross = joint_products([(x, y)])[0] if products is None else products
        for name, features, each in zip("xy", (x, y), squares, strict=True):
            _check_range(name, features, each.diagonal() if self._whitened else each)
        batch = (
            torch.tensor(float(count), dtype=torch.float64, device=cross.device),
            x.mean().double(),
            y.mean().double(),
            squares[0] * math.prod(times[0]),
            squares[1] * math.prod(times[1]),
            cross,
        )
        self.n, self.x_mean, self.y_mean, self.xx, self.yy, self.xy = _merged(self._moments(), batch)

    def _moments(self) -> Moments:
        return self.n, self.x_mean, self.y_mean, self.xx, self.yy, self.xy

    def compute(self) -> Tensor:
        """Return the similarity, in [0, 1]: a 0-dimensional tensor, float64.

        A squared distance below the rounding of its terms counts as 0. Without data, or with ``live`` and without live
        channels, the value is NaN, with a warning about the reason.
        """
        n, x_mean, y_mean, xx, yy, cross = (
            functools.reduce(_merged, zip(*self._moments(), strict=True)) if self.n.ndim else self._moments()
        )
        if not n:
            return undefined("no features were given; call update first.")
        groups = self._groups()
        squares, means = [xx.cpu(), yy.cpu()], [x_mean.cpu(), y_mean.cpu()]
        n, cross = n.cpu(), cross.cpu()
        if not self.center:
            cross = cross + n * torch.outer(*means)
            squares = [
                s + n * (torch.outer(m, m) if self._whitened else m.square())
                for s, m in zip(squares, means, strict=True)
            ]
        diagonals = [square.diagonal() if self._whitened else square for square in squares]
        floors = [n * (16 * torch.finfo(torch.float64).eps * mean).square() for mean in means]
        alive = [
            norms > torch.maximum(_DEAD**2 * norms.max(), floor) for norms, floor in zip(diagonals, floors, strict=True)
        ]
        self.live_channels = int(alive[0].sum()), int(alive[1].sum())
        zero = [name for name, number in zip("xy", self.live_channels, strict=True) if not number]
        if len(zero) == 2 and self.live:
            return undefined("all channels of both networks are zero on these inputs.")
        if zero:
            names = " and of ".join(zero)
            warnings.warn(
                f"all channels of {names} are zero on these inputs, so that the similarity says nothing.", stacklevel=2
            )
        numbers = [_scale_numbers(group) for group in groups]
        standard_x, mass_x = _standard(groups[0], squares[0], alive[0], numbers[1])
        standard_y, mass_y = _standard(groups[1], squares[1], alive[1], numbers[0])
        cross = standard_x @ cross @ standard_y.T
        both = mass_x + mass_y
        squared = both - 2 * best_overlap(*groups, cross)
        rounding = torch.finfo(torch.float64).eps * max(64.0, math.sqrt(float(n))) * both
        distance = math.sqrt(squared) if squared > rounding else 0.0
        widest = math.sqrt(mass_x) + math.sqrt(mass_y) if self.live else 2 * math.sqrt(max(cross.shape))
        return torch.tensor(1 - distance / widest, dtype=torch.float64)


class OrthogonalProcrustes(GroupProcrustes):
    r"""Procrustes similarity up to orthogonal mixing of channels and one scale.

    :math:`s = 1 - d/2` with :math:`d^2 = 2 - 2 \|X Y^T\|_* / (\|X\|_F \|Y\|_F)`.

    Args:
        center: Subtract each channel's mean, as Ding et al. do; Godfrey et al. do not.
        axis: The axis of the channels.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 5; Ding et al. (2021), arXiv:2108.01661.
    """

    def __init__(self, *, center: bool = False, axis: int = 1) -> None:
        super().__init__(intertwiner_group("identity"), center=center, axis=axis)
        self._whitened = False

    def _groups(self) -> tuple[ChannelGroup, ChannelGroup]:
        one, two = (ChannelGroup.orthogonal(size, self._axis) for size in self.xy.shape[-2:])
        return one, two


def _check_range(name: str, features: Features, squares: Tensor) -> None:
    """Refuse features whose sums of squares overflow or lose digits in double precision.

    Args:
        name: Of the network.
        features: Its features.
        squares: Sums of squares about the means of the channels. Shape ``[C]``.
    """
    sizes = squares.sum() + features.mean().square().sum()
    if not bool(sizes.isfinite() & ((sizes > _LEAST) | (sizes == 0))) or (not sizes and features.channels.any()):
        largest = float(features.channels.abs().max())
        raise ValueError(
            f"{name} has values of up to {largest:.0e}, which are too {'large' if largest > 1 else 'small'} for sums "
            "of squares; divide them by that."
        )


def _merged(one: Moments, two: Moments) -> Moments:
    """Combine the moments of two parts of the data (Chan et al. 1979)."""
    n = one[0] + two[0]
    if not two[0] or not one[0]:
        return one if one[0] else two
    share = one[0] * two[0] / n
    dx, dy = two[1] - one[1], two[2] - one[2]
    whitened = one[3].ndim == 2
    return (
        n,
        one[1] + dx * two[0] / n,
        one[2] + dy * two[0] / n,
        one[3] + two[3] + share * (torch.outer(dx, dx) if whitened else dx.square()),
        one[4] + two[4] + share * (torch.outer(dy, dy) if whitened else dy.square()),
        one[5] + two[5] + share * torch.outer(dx, dy),
    )


def _scale_numbers(group: ChannelGroup) -> Tensor:
    """Return the index of each channel's scale: -1 without a scale, -2 where invertible matrices mix channels."""
    numbers = group.scales.clone()
    for block, kind in zip(group.blocks, group.kinds.tolist(), strict=True):
        if group.inside[kind] == "invertible":
            numbers[block.ravel()] = _MIXED
    return numbers


def _standard(group: ChannelGroup, square: Tensor, alive: Tensor, others: Tensor) -> tuple[Tensor, float]:
    """Return the matrix that normalises by the group's scales and matrices, and the squared norm afterwards.

    Args:
        group: The group.
        square: Sums of squares of the channels, or of products of all pairs of channels.
        alive: Whether channels are live.
        others: Indices of the scales of the other network's channels.
    """
    result, mass = torch.zeros(group.channels, group.channels, dtype=torch.float64), 0.0
    numbers = _scale_numbers(group)
    for block, kind in zip(group.blocks, group.kinds.tolist(), strict=True):
        if group.inside[kind] == "invertible":
            block = block.ravel()
            values, vectors = torch.linalg.eigh(square[block[:, None], block])
            kept = values > max(float(values[-1]) * _DEPENDENT, 0.0)
            result[block[:, None], block] = (vectors[:, kept] * values[kept].rsqrt()) @ vectors[:, kept].T
            mass += int(kept.sum())
    norms = square.diagonal() if square.ndim == 2 else square
    # Channels with a common scale, or without scales, are divided by their joint norm.
    ours, theirs = (each[each != _MIXED] + 1 for each in (numbers, others))
    count = int(torch.cat([numbers, others]).max()) + 2
    live = alive[numbers != _MIXED]
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, ours, norms[numbers != _MIXED] * live)
    shares = torch.maximum(ours.bincount(minlength=count), theirs.bincount(minlength=count)) * (sums > 0)
    result.diagonal()[numbers != _MIXED] = (shares / sums.where(sums > 0, 1.0)).sqrt()[ours] * live
    mass += float(shares.sum())
    return result, mass


def best_overlap(one: ChannelGroup, two: ChannelGroup, cross: Tensor) -> float:
    """Return the largest sum of inner products of channels over the elements of a group.

    Args:
        one: The group on the rows.
        two: The group on the columns, of the same kinds; one of them may have more blocks.
        cross: Inner products of the channels. Shape ``[C1, C2]``, float64, on the CPU.

    Raises:
        ValueError: If the kinds differ.
    """
    if one.inside != two.inside:
        raise ValueError(
            "the channels of x and y have groups of different kinds; expected hook points of one kind, or a group that "
            'both have, such as "sigmoid" for permutations.'
        )
    common = [number for number in sorted(set(one.signs.tolist()) - {-1}) if _several(one, number)]
    if len(common) > _MOST_COMMON_SIGNS:
        raise ValueError(
            f"{len(common)} signs are common to several blocks of channels; expected at most {_MOST_COMMON_SIGNS}, as "
            "all combinations are tried."
        )
    best = -math.inf
    for flips in itertools.product((1.0, -1.0), repeat=len(common)):
        turned = cross.clone()
        for flip, number in zip(flips, common, strict=True):
            turned[one.signs == number] *= flip
        best = max(best, sum(_overlap(one, two, kind, turned, common) for kind in range(len(one.inside))))
    return best


def _several(group: ChannelGroup, number: int) -> bool:
    return sum(bool((group.signs[block] == number).any()) for block in group.blocks) > 1


def _overlap(one: ChannelGroup, two: ChannelGroup, kind: int, cross: Tensor, common: Sequence[int]) -> float:
    """Return the best sum for the blocks of one kind, given signs common to several blocks."""
    rows, columns = (
        torch.stack([block for block, own in zip(group.blocks, group.kinds.tolist(), strict=True) if own == kind])
        for group in (one, two)
    )
    inside = one.inside[kind]
    signs = one.signs[rows[0].ravel()]
    free = int(signs[0]) >= 0 and int(signs[0]) not in common
    together = free and bool((signs == signs[0]).all())
    if inside == "permuted":
        products = cross[rows[:, None, :, None], columns[None, :, None, :]]  # (blocks, blocks, members, members, each)
        inner = products.sum(-1).abs() if free else products.sum(-1)
        gains = torch.tensor([[_assigned(pair) for pair in row] for row in inner], dtype=torch.float64)
    elif inside == "fixed":
        products = cross[rows.flatten(1)[:, None], columns.flatten(1)[None]]  # (blocks, blocks, channels)
        gains = products.sum(-1).abs() if together else (products.abs() if free else products).sum(-1)
    else:
        ours, theirs = rows.flatten(1), columns.flatten(1)
        gains = torch.linalg.svdvals(cross[ours[:, None, :, None], theirs[None, :, None, :]]).sum(-1)
    return _assigned(gains)


def _assigned(gains: Tensor) -> float:
    """Return the largest sum of entries, at most one from each row and column."""
    table = gains.numpy()
    return float(table[linear_sum_assignment(table, maximize=True)].sum())
