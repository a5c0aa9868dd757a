"""Means over models and over pairs of models, with intervals that account for pairs that share models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from lightning_sym._checks import check_integers, check_numbers, check_seeds

_LARGEST_BLOCK = 2**22  # weights in memory at once: 32 MiB


@dataclass(frozen=True, eq=False)
class Interval:
    """A mean over pairs of models, with its uncertainty.

    Attributes:
        mean: Mean over pairs. Shape ``[]`` or ``[K]``, float64, in units of the values, like the next three.
        std: Standard deviation over pairs, sample form (divided by the number of pairs less one); NaN for one pair.
            It measures the variation between pairs, not the uncertainty of the mean.
        low: Lower end of the interval for the mean; NaN if there is none.
        high: Upper end; NaN if there is none.
        pairs: Number of pairs used.
        models: Number of models in them.
        redrawn: Number of resamples that had no pair and were drawn again.
        note: Reason for a missing interval; empty if there is one.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    pairs: int
    models: int
    redrawn: int
    note: str = ""


def bootstrap_over_models(
    pairs: Sequence[tuple[int, int]] | NDArray[np.integer],
    values: ArrayLike,
    *,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    r"""Estimate the mean over pairs of models, with a percentile interval from resampled models.

    Pairs that share a model are not independent. The bootstrap therefore draws models: of ``M`` models, ``M`` with
    replacement. With the multiplicities :math:`m`, the mean of a resample is
    :math:`\sum_p m_{i_p} m_{j_p} v_p / \sum_p m_{i_p} m_{j_p}`. The interval is between the quantiles
    ``(1 - level) / 2`` and ``(1 + level) / 2`` of these means.

    Pairs of a model drawn twice with itself have no value and are left out, as are given pairs ``(i, i)``. Resamples
    without a pair are drawn again (a third of them if all pairs share one model, almost none if all pairs are given),
    so that the interval is conditional on there being a pair.

    Args:
        pairs: Indices of the two models of each pair. ``P`` pairs, in any order, possibly repeated.
        values: One or ``K`` values of each pair, finite where the pair is used. Shape ``[P]`` or ``[P, K]``, converted
            to float64. All ``K`` use the same resamples.
        level: Coverage, in (0, 1).
        samples: Number of resamples, >= 1.
        seed: Seed of the resampling, >= 0; the caller's generators are not used.

    Returns:
        Mean, standard deviation and interval. With only two models, every resample with a pair is the sample
        itself, and there is no information about other models: bounds are then NaN, with the reason in ``note``. With
        three or four models there are few different resamples, and the interval is too narrow.

    Raises:
        ValueError: If the shapes do not match, no pair of different models is given, a value is not finite, or an
            argument is out of its range.

    Note:
        ``O(samples * P * K)`` time, in blocks of 32 MiB.

    References:
        Efron (1979), "Bootstrap Methods: Another Look at the Jackknife"; for the resampling of vertices rather than
        edges: Snijders and Borgatti (1999), "Non-Parametric Standard Errors and Tests for Network Statistics". They
        replace self-pairs by random others; here they are left out.

    Example:
        >>> pairs = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
        >>> interval = bootstrap_over_models(pairs, [1.0, 2.0, 3.0, 3.0, 4.0, 5.0])
        >>> float(interval.mean), bool(interval.low < interval.mean < interval.high)
        (3.0, True)
    """
    models, ends, table = _check(pairs, values)
    check_numbers("in (0, 1)", level=level)
    check_integers(samples=samples)
    check_seeds(seed=seed)
    mean = table.mean(0)
    nowhere = np.full_like(mean, np.nan)
    std = table.std(0, ddof=1) if len(table) > 1 else nowhere
    if models == 2:
        note = "no interval: all pairs are of the same two models, nothing to resample"
        return Interval(mean, std, nowhere, nowhere, len(table), models, 0, note)
    means, redrawn = _resampled_means(models, ends, table, samples, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(mean, std, low, high, len(table), models, redrawn)


def student_interval(values: ArrayLike, *, level: float = 0.95) -> tuple[float, float]:
    r"""Return Student's interval for the mean of independent values, such as one per seed.

    Args:
        values: At least two finite values, at any scale. Shape ``[N]``, converted to float64.
        level: Coverage, in (0, 1).

    Returns:
        Lower and upper end, :math:`\bar v \mp t_{N-1} s / \sqrt N`.

    Raises:
        ValueError: If there are fewer than two values, one is not finite, or ``level`` is out of its range.

    Note:
        Exact for normal values. With few values it is wider than an interval from resampled ones, which is then too
        narrow. For pairs that share a model, which are not independent, use :func:`bootstrap_over_models`.

    Example:
        >>> low, high = student_interval([1.0, 2.0, 3.0])
        >>> round(low, 2), round(high, 2)
        (-0.48, 4.48)
    """
    table = np.asarray(values, dtype=np.float64)
    check_numbers("in (0, 1)", level=level)
    if table.ndim != 1 or len(table) < 2 or not np.isfinite(table).all():
        raise ValueError(f"values must be at least two finite numbers, got {np.array2string(table, threshold=8)}.")
    mean, error = float(table.mean()), float(table.std(ddof=1)) / math.sqrt(len(table))
    reach = student_quantile(level, len(table) - 1) * error
    return mean - reach, mean + reach


def student_quantile(level: float, degrees_of_freedom: float) -> float:
    """Return the half-width of Student's interval in standard errors.

    Args:
        level: Coverage, in (0, 1).
        degrees_of_freedom: Degrees of freedom of the standard error, > 0, possibly infinite.
    """
    return float(student.ppf((1 + level) / 2, degrees_of_freedom))


def _check(
    pairs: Sequence[tuple[int, int]] | NDArray[np.integer], values: ArrayLike
) -> tuple[int, NDArray[np.intp], NDArray[np.float64]]:
    """Return the number of models, the pairs ``[P, 2]`` as indices of models, and the values."""
    numbers = np.asarray(pairs)
    table = np.asarray(values, dtype=np.float64)
    if numbers.size == 0:
        raise ValueError("pairs must have at least one pair, got none.")
    if numbers.ndim != 2 or numbers.shape[1] != 2 or not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(
            f"pairs must be pairs of integers, shape [P, 2]; got shape {list(numbers.shape)}, {numbers.dtype}."
        )
    if table.ndim not in (1, 2) or len(table) != len(numbers):
        raise ValueError(
            f"values must have shape [P] or [P, K] with P = {len(numbers)} pairs; got {list(table.shape)}."
        )
    different = numbers[:, 0] != numbers[:, 1]
    if not different.any():
        raise ValueError("pairs must have a pair of two different models; all given are of a model with itself.")
    numbers, table = numbers[different], table[different]
    if not (finite := np.isfinite(table).reshape(len(table), -1).all(1)).all():
        raise ValueError(f"values must be finite; that of pair {tuple(numbers[~finite][0].tolist())} is not.")
    known, positions = np.unique(numbers, return_inverse=True)
    return len(known), positions.reshape(-1, 2), table


def _resampled_means(
    models: int, ends: NDArray[np.intp], table: NDArray[np.float64], samples: int, source: np.random.Generator
) -> tuple[NDArray[np.float64], int]:
    """Return the means of resamples with a pair, by resample, and the number of resamples without."""
    block = max(1, min(samples, _LARGEST_BLOCK // max(models, len(ends))))
    means: list[NDArray[np.float64]] = []
    found = redrawn = 0
    # A given pair is in a resample with a probability of about 0.4 or more, so that this ends soon.
    while found < samples:
        counts = source.multinomial(models, np.full(models, 1 / models), size=min(block, samples - found))
        weights = (counts[:, ends[:, 0]] * counts[:, ends[:, 1]]).astype(np.float64)
        totals = weights.sum(1)
        present = totals > 0
        means.append(((weights[present] @ table).T / totals[present]).T)
        found += int(present.sum())
        redrawn += int((~present).sum())
    return np.concatenate(means), redrawn
