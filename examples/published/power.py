"""Predict how many runs decide a claim, from the mean and spread of those that exist."""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import chi2
from scipy.stats import t as student

POWER = 0.8
MOST_RUNS = 1_000_000
_LEVEL = 0.95
_GRID = (np.arange(400) + 0.5) / 400  # quantiles of the spread that are averaged


def chance_to_decide(
    runs: int, mean: float, std: float, low: float = 0.0, high: float = math.inf, *, known: bool = False
) -> float:
    r"""Return the probability that a 95 % interval of a mean is inside a range, or outside.

    Values are normal. With a half width :math:`r` and a mean :math:`\bar x` of the new experiment, it decides if
    :math:`low \le \bar x - r` and :math:`\bar x + r \le high`, or if :math:`\bar x + r < low`, or if
    :math:`\bar x - r > high`. Student's half width varies with the observed spread; the result is
    the average over its distribution.

    Args:
        runs: Number of values, >= 2.
        mean: Mean of the distribution.
        std: Its standard deviation, > 0.
        low: Lower end of the range; ``-inf`` if it has none.
        high: Upper end; ``inf`` if it has none.
        known: Whether the half width does not vary: 1.96 standard errors, as of resampled networks.

    Returns:
        A probability.
    """
    error = std / math.sqrt(runs)
    reach: NDArray[np.float64]
    if known:
        reach = np.array([NormalDist().inv_cdf((1 + _LEVEL) / 2)])
    else:
        spread = np.sqrt(chi2.ppf(_GRID, runs - 1) / (runs - 1))
        reach = student.ppf((1 + _LEVEL) / 2, runs - 1) * spread
    to_low, to_high = (low - mean) / error, (high - mean) / error  # in standard errors
    inside = np.maximum(ndtr(to_high - reach) - ndtr(to_low + reach), 0)
    return float((inside + ndtr(to_low - reach) + ndtr(-to_high - reach)).mean())


def fewest_runs(
    have: int, mean: float, std: float, low: float = 0.0, high: float = math.inf, *, known: bool = False
) -> float:
    """Return the smallest number of runs, more than there are, that decide with 80 % probability.

    Args:
        have: Number of runs that exist, >= 1; they do not decide.
        mean: Their mean, taken for that of the distribution.
        std: Their standard deviation, taken for that of the distribution.
        low: Lower end of the range, as for :func:`chance_to_decide`.
        high: Upper end.
        known: Whether the half width does not vary.

    Returns:
        An integer; ``inf`` if it is above a million; so it is for a mean at an end of the range.
    """

    def enough(runs: int) -> bool:
        return chance_to_decide(runs, mean, std, low, high, known=known) >= POWER

    if std == 0:
        return math.inf  # all values are at an end of the range
    few = max(have, 1)
    many = few + 1
    while not enough(many):
        if many >= MOST_RUNS:
            return math.inf
        few, many = many, min(2 * many, MOST_RUNS)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many
