"""Centred kernel alignment."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_sym._checks import check_numbers
from lightning_sym._text import unknown
from lightning_sym.similarity.features import channel_rows, check_pair, undefined
from lightning_sym.similarity.kernels import Kernel, centred, gram, inner, linear_hsic, standardized

Estimator = Literal["unbiased", "biased", "minibatch"]
Normalize = Literal["none", "channel"]

_FEWEST = {"unbiased": 4, "biased": 2, "minibatch": 4}  # samples


class CKA(Metric):
    r"""Centred kernel alignment: :math:`HSIC(K, L) / \sqrt{HSIC(K, K)\, HSIC(L, L)}` of kernels between samples.

    1 if either network arranges the inputs as the other does, about 0 if they have nothing in common; the unbiased
    estimators may be slightly negative. Grids, tokens and channels need not agree between the networks.

    =========== ==================================================================================================
    kernel      not changed by
    =========== ==================================================================================================
    ``linear``  orthogonal mixing of channels and positions, one scale; with ``normalize="channel"`` instead
                permutations and scales of channels
    ``max``     permutations, scales and signs of channels: all of :math:`G_{ReLU}`. Not positive definite
    ``laplace`` the same; positive definite. :math:`\exp(-d / h)`, see `lightning_sym.similarity.gram`
    =========== ==================================================================================================

    ``unbiased`` and ``biased`` keep the features of all samples until :meth:`compute`, in their own dtype: ``N * D``
    numbers for each network, and then a few tables of ``N * N`` (for ``linear``, if that is less, of ``D * D``).
    ``minibatch`` keeps three numbers, the unbiased criterion summed over batches: unbiased too, but it depends,
    slightly, on how the data are cut. Batches of fewer than 4 samples, or of fewer than the first one, are left out.

    Args:
        kernel: ``linear``, ``max`` or ``laplace``.
        estimator: ``unbiased`` (Song et al. 2012), ``biased`` (Kornblith et al. 2019) or ``minibatch`` (Nguyen et al.
            2021).
        normalize: ``channel`` divides each channel by its norm over samples and positions; ``none`` does not. By
            default as the kernel needs: none for ``linear``.
        statistics: For ``minibatch`` with ``channel``: mean and norm of each channel, of x and of y, from a pass over
            the data (:class:`ChannelStatistics`), as those of a batch would depend on what else is in it.
        bandwidth: ``h`` of the Laplace kernel, > 0; by default the median distance of different samples.
        axes: The axes of the channels of x and of y.

    Raises:
        ValueError: If an argument is not one of these, or ``update`` gets features that do not fit.

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

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    x: list[Tensor] | Tensor
    y: list[Tensor] | Tensor
    sums: Tensor
    batches: Tensor

    def __init__(
        self,
        kernel: Kernel = "linear",
        *,
        estimator: Estimator = "unbiased",
        normalize: Normalize | None = None,
        bandwidth: float | None = None,
        statistics: tuple["ChannelStatistics", "ChannelStatistics"] | None = None,
        axes: tuple[int | Sequence[int], int | Sequence[int]] = (1, 1),
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("kernel", kernel, get_args(Kernel)),
            ("estimator", estimator, get_args(Estimator)),
            ("normalize", normalize or "none", get_args(Normalize)),
        ):
            if value not in allowed:
                raise ValueError(unknown(name, value, allowed))
        if bandwidth is not None:
            check_numbers("> 0", bandwidth=bandwidth)
        self.normalize = normalize or ("none" if kernel == "linear" else "channel")
        if estimator == "minibatch" and self.normalize == "channel" and statistics is None:
            raise ValueError(
                "channels' means and norms within one batch depend on what else is in it; give statistics of a pass "
                'over the data, or normalize="none".'
            )
        self.kernel, self.estimator, self.bandwidth = kernel, estimator, bandwidth
        self._statistics = (statistics,)  # in a tuple: no part of the metric's state
        self._first: int | None = None  # size of the first batch
        self.axes = tuple((axis,) if isinstance(axis, int) else tuple(axis) for axis in axes)
        if estimator == "minibatch":
            self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state("batches", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        else:
            self.add_state("x", [], dist_reduce_fx="cat")
            self.add_state("y", [], dist_reduce_fx="cat")

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add a batch of features of both networks, of the same inputs in the same order.

        Args:
            x: Of the first network: samples first; floating, finite.
            y: Of the second network.

        Raises:
            TypeError: If a dtype is not floating.
            ValueError: If shapes do not fit, or a value is not finite.
        """
        check_pair(x, y)
        x, y = (_rows(name, each, axes) for name, each, axes in zip("xy", (x, y), self.axes, strict=True))
        if self.estimator != "minibatch":
            self.x.append(x)  # type: ignore[union-attr]
            self.y.append(y)  # type: ignore[union-attr]
            return
        self._first = self._first or len(x)
        kept = len(x) >= max(_FEWEST["minibatch"], self._first)
        self.batches += torch.tensor([kept, not kept], device=self.batches.device)
        if kept:
            (statistics,) = self._statistics
            given = (None, None) if statistics is None else tuple(each.compute() for each in statistics)
            x, y = (self._standardized(each, own) for each, own in zip((x, y), given, strict=True))
            self.sums += self._criteria(x, y).to(self.sums)

    def compute(self) -> Tensor:
        """Return the alignment: a 0-dimensional tensor, float64, at most 1.

        Where there is none (too few samples, or features that are the same for all inputs) the value is NaN, with a
        warning that says why.
        """
        if self.estimator == "minibatch":
            used, left_out = self.batches.tolist()
            if not used:
                return undefined(f"no batch had 4 samples or more; {left_out} had fewer.")
            return _alignment(self.sums.cpu())
        x, y = (dim_zero_cat(features) if len(features) else torch.zeros(0, 1, 1) for features in (self.x, self.y))
        if len(x) < _FEWEST[self.estimator]:
            return undefined(f"the {self.estimator} estimator needs {_FEWEST[self.estimator]} samples, got {len(x)}.")
        return _alignment(self._criteria(self._standardized(x), self._standardized(y)))

    def reset(self) -> None:
        """Forget all batches."""
        super().reset()
        self._first = None

    def _standardized(self, x: Tensor, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return standardized(x, scale=self.normalize == "channel", given=given)

    def _criteria(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the criterion of x and y, of x with itself, and of y with itself. Shape ``[3]``, float64, CPU."""
        unbiased = self.estimator != "biased"
        if self.kernel == "linear" and x[0].numel() * y[0].numel() <= len(x) ** 2:
            pairs = (x, y), (x, x), (y, y)
            return torch.stack([linear_hsic(a, b, unbiased=unbiased) for a, b in pairs]).cpu()
        one, two = (centred(gram(each, self.kernel, self.bandwidth), unbiased=unbiased) for each in (x, y))
        return torch.stack([inner(a, b, unbiased=unbiased) for a, b in ((one, two), (one, one), (two, two))]).cpu()


class ChannelStatistics(Metric):
    """Mean and norm of each channel, over samples and positions, of all batches.

    Args:
        axes: The axes of the channels.
    """

    full_state_update = False
    higher_is_better = None
    is_differentiable = False

    count: Tensor
    sums: Tensor
    squares: Tensor

    def __init__(self, axes: int | Sequence[int] = 1) -> None:
        super().__init__()
        self.axes = (axes,) if isinstance(axes, int) else tuple(axes)
        self.add_state("count", torch.zeros(1, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("sums", "squares"):
            self.add_state(name, torch.zeros(0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        """Add a batch of features: samples first; floating, finite."""
        rows = channel_rows("x", x, self.axes).flatten(0, 1).double()
        if not self.sums.numel():
            self.sums, self.squares = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
        self.count += len(rows)
        self.sums += rows.sum(0)
        self.squares += rows.square().sum(0)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return means, and the norms of what is left without them. Each of shape ``[C]``, float64."""
        mean = self.sums / self.count
        return mean, (self.squares - self.sums * mean).clamp_min(0.0).sqrt()


def _rows(name: str, features: Tensor, axes: tuple[int, ...]) -> Tensor:
    rows = channel_rows(name, features, axes)
    return (rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows).clone()


def _alignment(criteria: Tensor) -> Tensor:
    """Return the alignment from the criteria of both with one another, and each with itself."""
    both, one, two = criteria.tolist()
    for name, own in (("x", one), ("y", two)):
        if own <= 0:
            return undefined(f"the features {name} are the same for all inputs.")
    return torch.tensor(both / math.sqrt(one * two), dtype=torch.float64)
