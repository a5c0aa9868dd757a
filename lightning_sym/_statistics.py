"""Means over models and over pairs of models, with intervals that know that pairs share models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from lightning_sym._checks import check_integers, check_numbers

_LARGEST_BLOCK = 2**22  # weights held at once: 32 MiB


@dataclass(frozen=True, eq=False)
class Interval:
    """A mean over pairs of models and how sure it is.

    Attributes:
        mean: Mean over pairs. Shape ``[]`` or ``[K]``, float64, in units of the values, like the next three.
        std: Standard deviation over pairs, sample form (divided by the number of pairs less one); NaN for one pair.
            It says how much pairs differ, not how well the mean is known.
        low: Lower end of the interval for the mean; NaN if there is none.
        high: Upper end; NaN if there is none.
        pairs: Number of pairs used.
        models: Number of models in them.
        redrawn: How many resamples had no pair and were drawn again.
        note: Why there is no interval; empty if there is one.
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

    Pairs that share a model are not independent, so models are drawn, not pairs: of ``M`` models, ``M`` with
    replacement. With the multiplicities :math:`m`, the mean of a resample is
    :math:`\sum_p m_{i_p} m_{j_p} v_p / \sum_p m_{i_p} m_{j_p}`. The interval is between the quantiles
    ``(1 - level) / 2`` and ``(1 + level) / 2`` of these means.

    A model that is drawn twice would also be paired with itself; such pairs have no value, and are left out. So are
    pairs ``(i, i)`` that are given. Resamples in which no pair is left are drawn again (a third of them if all pairs
    share one model, almost none if every pair is there): the interval is conditional on there being one.

    Args:
        pairs: Numbers of the two models of each pair. ``P`` pairs, in any order, the same one more than once if it
            was drawn more than once.
        values: One or ``K`` values of each pair, finite where the pair is used. Shape ``[P]`` or ``[P, K]``, converted
            to float64. All ``K`` use the same resamples.
        level: Coverage, in (0, 1).
        samples: Number of resamples, >= 1. Unitless.
        seed: Seed of the resampling, >= 0; the caller's generators are not touched.

    Returns:
        Mean, standard deviation and interval. With two models only every resample that has a pair is the sample
        itself, which says nothing about other models: the bounds are then NaN and ``note`` says so. With three or
        four models there are few different resamples, and the interval is too narrow.

    Raises:
        ValueError: If the shapes do not fit, no pair of different models is left, a value is not finite, or an
            argument is out of its range.

    Note:
        ``O(samples * P * K)`` time, in blocks of 32 MiB.

    References:
        Efron (1979), "Bootstrap Methods: Another Look at the Jackknife"; for the resampling of vertices rather than
        edges: Snijders and Borgatti (1999), "Non-Parametric Standard Errors and Tests for Network Statistics". They
        fill self-pairs with random other ones, we leave them out.

    Example:
        >>> pairs = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
        >>> interval = bootstrap_over_models(pairs, [1.0, 2.0, 3.0, 3.0, 4.0, 5.0])
        >>> float(interval.mean), bool(interval.low < interval.mean < interval.high)
        (3.0, True)
    """
    models, ends, table = _check(pairs, values)
    check_numbers("in (0, 1)", level=level)
    check_integers(samples=samples)
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
    r"""Return Student's interval for the mean of independent values, such as one of each seed.

    Args:
        values: At least two finite values, at any scale. Shape ``[N]``, converted to float64.
        level: Coverage, in (0, 1).

    Returns:
        Lower and upper end, :math:`\bar v \mp t_{N-1} s / \sqrt N`.

    Raises:
        ValueError: If there are fewer than two values, one is not finite, or ``level`` is out of its range.

    Note:
        Exact if the values are normal. With few values it is wider than an interval from resampled ones, which is too
        narrow then. Pairs that share a model are not independent: :func:`bootstrap_over_models` is for these.

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
    """Return how many standard errors Student's interval reaches to either side.

    Args:
        level: Coverage, in (0, 1).
        degrees_of_freedom: Of the standard error, > 0, infinity included.
    """
    return float(student.ppf((1 + level) / 2, degrees_of_freedom))


def _check(
    pairs: Sequence[tuple[int, int]] | NDArray[np.integer], values: ArrayLike
) -> tuple[int, NDArray[np.intp], NDArray[np.float64]]:
    """Return the number of models, the pairs ``[P, 2]`` as positions among them, and the values."""
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
    """Return the means of resamples that have a pair, by resample, and the number of those that had none."""
    block = max(1, min(samples, _LARGEST_BLOCK // max(models, len(ends))))
    means: list[NDArray[np.float64]] = []
    found = redrawn = 0
    # Any given pair is in a resample with a probability of about 0.4 or more, so this ends soon.
    while found < samples:
        counts = source.multinomial(models, np.full(models, 1 / models), size=min(block, samples - found))
        weights = (counts[:, ends[:, 0]] * counts[:, ends[:, 1]]).astype(np.float64)
        totals = weights.sum(1)
        present = totals > 0
        means.append(((weights[present] @ table).T / totals[present]).T)
        found += int(present.sum())
        redrawn += int((~present).sum())
    return np.concatenate(means), redrawn
