"""Centred kernel alignment, of two layers or of all pairs of layers."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._text import unknown
from lightning_sym.similarity.features import Axes, Features, SimilarityMetric, check_pair, undefined
from lightning_sym.similarity.kernels import Kernel, centre_, centred_columns, gram, inner, linear_hsic, standardized

Estimator: TypeAlias = Literal["unbiased", "biased", "minibatch"]
Normalize: TypeAlias = Literal["none", "channel"]
Side: TypeAlias = Tensor | list[Tensor]  # centred kernels of all layers, or the centred features of each

# Largest size of features with fourth powers, and sums of many of them, in the range of a dtype.
_REACH = {torch.float32: 1e6, torch.float64: 1e70}
_EMPTY = torch.zeros(0, 1, 1)
_FEWEST = {"unbiased": 4, "biased": 2, "minibatch": 4}  # samples


@dataclass(frozen=True)
class Alignment:
    """Choice of kernels and criterion; the settings are those of :class:`CKA`."""

    kernel: Kernel
    estimator: Estimator
    normalize: Normalize
    bandwidth: float | None

    @property
    def fewest(self) -> int:
        """Smallest number of samples of an estimate."""
        return _FEWEST[self.estimator]

    @property
    def unbiased(self) -> bool:
        """Whether the criterion is the unbiased one."""
        return self.estimator != "biased"

    def small(self, layers: Iterable[Tensor]) -> bool:
        """Test whether a product of features is cheaper than a kernel: few numbers per sample."""
        return self.kernel == "linear" and all(layer[0].numel() <= len(layer) for layer in layers)

    def side(
        self,
        layers: Iterable[Tensor],
        count: int,
        *,
        small: bool,
        statistics: Sequence["ChannelStatistics"] | None = None,
    ) -> tuple[Side, Tensor]:
        """Prepare the layers of one network for comparison, and compute the criterion of each with itself.

        Args:
            layers: Features, each of shape ``[N, C, positions]``; only one is in memory at a time.
            count: Number of layers.
            small: Whether to return centred features, each of shape ``[N, D]``, instead of kernels ``[count, N, N]``;
                float64.
            statistics: Channel statistics of each layer; default computed from its features.
        """
        scale = self.normalize == "channel"
        made: list[Tensor] = []
        floors: list[Tensor] = []  # criteria that may be rounding errors
        kernels = torch.empty(0)
        for place, layer in enumerate(layers):
            layer = _multipliable(layer)
            if scale or self.kernel != "linear":
                given = None if statistics is None else _of_channels(statistics[place])
                layer = standardized(layer, scale=scale, given=given)
            if self.kernel == "linear":
                rows, floor = centred_columns(layer)
                floors.append(floor)
                if small:
                    made.append(rows.double())
                    continue
                layer = rows[:, None]
            kernel = gram(layer, self.kernel, self.bandwidth)
            if self.kernel != "linear":
                eps = 16 * torch.finfo(kernel.dtype).eps
                floors.append((eps * torch.linalg.vector_norm(kernel).double()).square() / kernel.numel())
            if not place:
                kernels = kernel.new_empty((count, *kernel.shape), dtype=torch.float64)
            centre_(kernels[place].copy_(kernel), unbiased=self.unbiased)
        if small:
            own = torch.stack([linear_hsic(one, one, unbiased=self.unbiased) for one in made])
        else:
            own = torch.stack([inner(one[None], one[None], unbiased=self.unbiased)[0, 0] for one in kernels])
        return made if small else kernels, torch.where(own > torch.stack(floors), own, 0.0)

    def between(self, ours: Side, theirs: Side) -> Tensor:
        """Return the criteria of all pairs of layers, prepared by :meth:`side`. Shape ``[A, B]``."""
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return inner(ours, theirs, unbiased=self.unbiased)
        return torch.stack(
            [torch.stack([linear_hsic(one, two, unbiased=self.unbiased) for two in theirs]) for one in ours]
        )

    def criteria(
        self,
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        statistics: tuple[Sequence["ChannelStatistics"], Sequence["ChannelStatistics"]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the criteria of all pairs of layers, and of each layer with itself; float64."""
        small = self.small([*x, *y])
        given = (None, None) if statistics is None else statistics
        (ours, within_x), (theirs, within_y) = (
            self.side(layers, len(layers), small=small, statistics=own)
            for layers, own in zip((x, y), given, strict=True)
        )
        return self.between(ours, theirs), within_x, within_y


def _multipliable(layer: Tensor) -> Tensor:
    """Convert features to a dtype in which products of kernels neither overflow nor underflow.

    Raises:
        ValueError: If there is no such dtype.
    """
    channels = layer.abs().amax(0).amax(1)  # one axis after the other, which is 60 times faster
    largest, reach = float(channels.max()), _REACH[layer.dtype]
    # Channels may be divided by their norm, the root of a sum of squares.
    faint = bool(((channels > 0) & (channels < reach**-2.5)).any())
    if not largest or (1 / reach <= largest <= reach and not (faint and layer.dtype != torch.float64)):
        return layer
    if layer.dtype != torch.float64:
        return layer.double()
    raise ValueError(
        f"features of up to {largest:.0e} are too {'large' if largest > 1 else 'small'} for products of their kernels; "
        "divide them by that."
    )


def alignments(between: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the alignments from the criteria of pairs of layers and of each with itself; NaN where one is 0."""
    norms = torch.outer(x, y)
    return torch.where(norms > 0, between / norms.sqrt(), math.nan)


class CKAMatrix(SimilarityMetric):
    r"""Centred kernel alignment of every layer of one network with every layer of another.

    As :class:`CKA`, with each layer's kernel computed once.

    Args:
        first: Number of layers of the first network, >= 1.
        second: Number of layers of the second network, >= 1.
        kernel: As for :class:`CKA`.
        estimator: As for :class:`CKA`.
        normalize: As for :class:`CKA`.
        bandwidth: As for :class:`CKA`.
        statistics: As for :class:`CKA`, for each layer of either network.
        axes: The axes of the channels, for each layer of either network; by default 1 for all.

    Raises:
        ValueError: If an argument is unknown or out of range, or ``update`` gets features that do not match.
    """

    between: Tensor
    within_x: Tensor
    within_y: Tensor
    batches: Tensor

    def __init__(
        self,
        first: int,
        second: int,
        kernel: Kernel = "linear",
        *,
        estimator: Estimator = "unbiased",
        normalize: Normalize | None = None,
        bandwidth: float | None = None,
        statistics: tuple[Sequence["ChannelStatistics"], Sequence["ChannelStatistics"]] | None = None,
        axes: tuple[Sequence[Axes], Sequence[Axes]] | None = None,
    ) -> None:
        super().__init__()
        normalize = normalize or ("none" if kernel == "linear" else "channel")
        for name, value, allowed in (
            ("kernel", kernel, get_args(Kernel)),
            ("estimator", estimator, get_args(Estimator)),
            ("normalize", normalize, get_args(Normalize)),
        ):
            if value not in allowed:
                raise ValueError(unknown(name, value, allowed))
        if bandwidth is not None:
            check_numbers("> 0", bandwidth=bandwidth)
        if estimator == "minibatch" and normalize == "channel" and statistics is None:
            raise ValueError(
                "channels' means and norms within one batch depend on the rest of the batch; pass the statistics of a "
                'pass over the data, or normalize="none".'
            )
        check_integers(first=first, second=second)
        self.kernel, self.estimator, self.normalize, self.bandwidth = kernel, estimator, normalize, bandwidth
        self.alignment = Alignment(kernel, estimator, normalize, bandwidth)
        self._statistics = (statistics,)  # in a tuple, which keeps it out of the metric's state
        self._axes = axes or ([1] * first, [1] * second)
        self._layers = first, second
        self._first_size: int | None = None  # number of samples in the first batch
        self._shapes: list[tuple[int, ...]] | None = None  # shapes of the layers' features, without samples
        if estimator == "minibatch":
            # Pairs of layers first, then the layers of either network with themselves.
            for name, shape in {"between": (first, second), "within_x": (first,), "within_y": (second,)}.items():
                self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state("batches", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        else:
            for name in chain(*self._kept()):
                self.add_state(name, [], dist_reduce_fx="cat")

    def _kept(self) -> tuple[list[str], list[str]]:
        """Return the names of the states that hold the features of each network's layers."""
        return [f"x{i}" for i in range(self._layers[0])], [f"y{j}" for j in range(self._layers[1])]

    def update(self, x: Sequence[Tensor | Features], y: Sequence[Tensor | Features]) -> None:
        """Add a batch of features of both networks, from the same inputs in the same order.

        Args:
            x: Features of the first network by layer, samples first; floating, finite.
            y: Features of the second network.

        Raises:
            TypeError: If a dtype is not floating.
            ValueError: If shapes do not match, or a value is not finite.
        """
        for name, features, expected in zip("xy", (x, y), self._layers, strict=True):
            if len(features) != expected:
                raise ValueError(f"{name} has {len(features)} layers; expected {expected}.")
        ours, theirs = (
            [f if isinstance(f, Features) else Features(f, axis, name) for f, axis in zip(features, axes, strict=True)]
            for name, features, axes in zip("xy", (x, y), self._axes, strict=True)
        )
        samples, layers = len(ours[0]), [*ours, *theirs]
        for layer in layers:
            check_pair(ours[0], layer)
        shapes = [tuple(layer.channels.shape[1:]) for layer in layers]
        if self._shapes not in (None, shapes):
            raise ValueError(
                f"features have the shapes {shapes} (channels, positions); expected {self._shapes}, as before."
            )
        self._shapes = shapes
        if self.estimator != "minibatch":
            for name, layer in zip(chain(*self._kept()), layers, strict=True):
                getattr(self, name).append(layer.channels.clone())
            return
        self._first_size = self._first_size or samples
        used = samples >= max(self.alignment.fewest, self._first_size)
        self.batches += torch.tensor([used, not used], device=self.batches.device)
        if used:
            (statistics,) = self._statistics
            between, within_x, within_y = self.alignment.criteria(
                [layer.channels for layer in ours], [layer.channels for layer in theirs], statistics
            )
            self.between += between
            self.within_x += within_x
            self.within_y += within_y

    def compute(self) -> Tensor:
        """Return the alignments. Shape ``[first, second]`` (none for a single pair: torchmetrics), float64, at most 1.

        The value is NaN, with a warning about the reason, if there are too few samples or features are the same for all
        inputs.
        """
        if self.estimator == "minibatch":
            between, x, y = self.between, self.within_x, self.within_y
            if not int(self.batches[0]):
                return self._undefined(f"none of {int(self.batches[1])} batches had 4 samples or more.")
        else:
            ours, theirs = ([self._whole(name) for name in names] for names in self._kept())
            if len(ours[0]) < self.alignment.fewest:
                needed = self.alignment.fewest
                return self._undefined(f"the {self.estimator} estimator needs {needed} samples, got {len(ours[0])}.")
            between, x, y = self.alignment.criteria(ours, theirs)
        for name, own in (("x", x), ("y", y)):
            constant = (own <= 0).nonzero().flatten().tolist()
            if constant:
                undefined(f"the features of {name} at the layers {constant} are the same for all inputs.")
        return alignments(between, x, y)

    def _whole(self, name: str) -> Tensor:
        """Return the features of a layer in all batches. Shape ``[N, C, positions]``."""
        state = getattr(self, name)  # a tensor after synchronisation of processes
        return state if isinstance(state, Tensor) else torch.cat(state) if state else _EMPTY

    def _undefined(self, reason: str) -> Tensor:
        return undefined(reason).expand(self._layers).clone()

    def reset(self) -> None:
        """Reset the metric."""
        super().reset()
        self._first_size = self._shapes = None


class CKA(CKAMatrix):
    r"""Centred kernel alignment: :math:`HSIC(K, L) / \sqrt{HSIC(K, K)\, HSIC(L, L)}` of kernels between samples.

    1 if both networks arrange the inputs in the same way, about 0 for unrelated features; the unbiased
    estimators may be slightly negative. Grids, tokens and channels need not agree between the networks.

    =========== ==================================================================================================
    kernel      invariant to
    =========== ==================================================================================================
    ``linear``  orthogonal mixing of channels and positions, one scale; with ``normalize="channel"`` instead
                permutations and scales of channels
    ``max``     permutations, scales and signs of channels: all of :math:`G_{ReLU}`; not positive definite
    ``laplace`` the same; positive definite. :math:`\exp(-d / h)`, see `lightning_sym.similarity.gram`
    =========== ==================================================================================================

    ``unbiased`` and ``biased`` store the features of all samples until :meth:`compute`, in their dtype: ``N * D``
    numbers for each network, and then a few matrices of ``N * N`` (for ``linear``, if that is less, of ``D * D``).
    ``minibatch`` stores three numbers, the unbiased criterion summed over batches. It is unbiased as well, but depends
    slightly on the batches. Batches smaller than 4 samples, or than the first batch, are left out.

    Args:
        kernel: ``linear``, ``max`` or ``laplace``.
        estimator: ``unbiased`` (Song et al. 2012), ``biased`` (Kornblith et al. 2019) or ``minibatch`` (Nguyen et al.
            2021).
        normalize: ``channel`` divides each channel by its norm over samples and positions; ``none`` does not. The
            default depends on the kernel: none for ``linear``.
        bandwidth: ``h`` of the Laplace kernel, > 0; default the median distance of different samples.
        statistics: Channel statistics of x and of y from a pass over the data, for ``minibatch`` with ``channel``:
            norms within a batch would depend on the rest of the batch.
        axes: The axes of the channels of x and of y.

    Raises:
        ValueError: If an argument is unknown or out of range, or ``update`` gets features that do not match.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 5 and equation 5.6; Kornblith et al. (2019), arXiv:1905.00414;
        Nguyen et al. (2021), arXiv:2010.15327. docs/theory/similarity.md, 2.

    Example:
        >>> x = torch.rand(20, 3, 4, 4)
        >>> metric = CKA("max")
        >>> metric.update(x, x.flip(1))
        >>> round(metric.compute().item(), 6)
        1.0
    """

    def __init__(
        self,
        kernel: Kernel = "linear",
        *,
        estimator: Estimator = "unbiased",
        normalize: Normalize | None = None,
        bandwidth: float | None = None,
        statistics: tuple["ChannelStatistics", "ChannelStatistics"] | None = None,
        axes: tuple[Axes, Axes] = (1, 1),
    ) -> None:
        super().__init__(
            1,
            1,
            kernel,
            estimator=estimator,
            normalize=normalize,
            bandwidth=bandwidth,
            statistics=statistics and ([statistics[0]], [statistics[1]]),
            axes=([axes[0]], [axes[1]]),
        )

    def of_layers(self, first: int, second: int) -> CKAMatrix:
        """Return the same measure for all pairs of layers; all layers have this metric's axes."""
        (statistics,) = self._statistics
        if statistics is not None:
            raise ValueError("statistics belong to one layer; make a CKAMatrix with those of each layer.")
        (x,), (y,) = self._axes
        return CKAMatrix(
            first,
            second,
            self.kernel,
            estimator=self.estimator,
            normalize=self.normalize,
            bandwidth=self.bandwidth,
            axes=([x] * first, [y] * second),
        )

    def update(self, x: Tensor | Features, y: Tensor | Features) -> None:  # type: ignore[override]
        """Add a batch of features of both networks, from the same inputs in the same order.

        Args:
            x: Features of the first network, samples first; floating, finite.
            y: Features of the second network.

        Raises:
            TypeError: If a dtype is not floating.
            ValueError: If shapes do not match, or a value is not finite.
        """
        super().update([x], [y])

    def compute(self) -> Tensor:
        """Return the alignment, a 0-dimensional tensor, float64, at most 1.

        The value is NaN, with a warning about the reason, if there are too few samples or features are the same for all
        inputs.
        """
        return super().compute()[0, 0]


class ChannelStatistics(SimilarityMetric):
    """Mean and norm of each channel over samples and positions of all batches.

    Args:
        axes: The axes of the channels.
    """

    higher_is_better = None

    n: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, axes: Axes = 1) -> None:
        super().__init__()
        self.axes = axes
        for name, shape in {"n": (), "mean": (0,), "square": (0,)}.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        """Add a batch of features: samples first; floating, finite."""
        features = Features(x, self.axes, "x")
        n = torch.tensor(float(len(features) * features.positions), dtype=torch.float64, device=x.device)
        batch = n, features.mean(), features.squares()
        self.n, self.mean, self.square = _together(self._moments(), batch) if self.n else batch

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.n, self.mean, self.square

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the channel means, and the norms after subtracting them.

        Returns:
            Each of shape ``[C]`` (none for one channel: torchmetrics), float64.
        """
        moments = self._moments()
        if self.n.ndim:
            moments = functools.reduce(_together, zip(*moments, strict=True))
        return moments[1], moments[2].sqrt()


def _of_channels(statistics: ChannelStatistics) -> tuple[Tensor, Tensor]:
    mean, norm = statistics.compute()
    return mean.reshape(-1), norm.reshape(-1)


def _together(one: tuple[Tensor, Tensor, Tensor], two: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Combine number, mean and sum of squares about it of two parts of the data (Chan et al. 1979)."""
    n, step = (one[0] + two[0]).clamp_min(1.0), two[1] - one[1]
    return one[0] + two[0], one[1] + step * two[0] / n, one[2] + two[2] + step.square() * one[0] * two[0] / n
