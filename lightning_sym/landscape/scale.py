"""The scale of J and epsilon: relative to the teacher, the spacing of a grid, and the volume."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_sym._checks import check_integers, check_numbers

# J / V below the first counts as the same function, above the second as another one: the warning about epsilon starts
# at a tenth of V or J0 (docs/theory/equivalence.md, 1.2).
_SAME, _BOUND = 0.01, 0.1
# Fewest samples below the smallest epsilon of a volume exponent; the counting error of one is then a third.
_FEWEST = 10
_MOST_CELLS = 2**16  # with a measured curvature


@dataclass(frozen=True)
class FunctionScale:
    r"""The scores of two trivial functions, against which every J and every epsilon are held.

    A teacher that is constant (:math:`V = 0`) or zero (:math:`J_0 = 0`) on the inputs is a class like any other, so it
    is no error. Nothing is small next to it, though: `relative` is then infinite unless J is 0, and `warning` always
    warns.

    Attributes:
        zero: :math:`J_0`, mean of :math:`\|\phi^*(x)\|^2`: J of the zero function. >= 0, unit of J.
        constant: :math:`V`, mean of :math:`\|\phi^*(x) - \bar\phi^*\|^2`: J of the best constant. >= 0, unit of J.

    Raises:
        ValueError: If one is negative or not finite.

    References:
        Lengyel et al. (2020), "GENNI: Visualising the Geometry of Equivalences for Neural Network Identifiability",
        sets of J < epsilon; the baselines are ours.
    """

    zero: float
    constant: float

    def __post_init__(self) -> None:
        check_numbers(">= 0", J0=self.zero, V=self.constant)

    @classmethod
    def of(cls, outputs: Tensor) -> "FunctionScale":
        """Measure the teacher.

        Args:
            outputs: The teacher's, on N inputs. Shape ``[N, K]``, N >= 1, floating, any device; finite.

        Returns:
            Both scores, from sums in float64. V is 0 where the outputs differ by no more than rounding in their dtype.

        Raises:
            ValueError: If the shape is another one, or an output is not finite.

        Example:
            >>> FunctionScale.of(torch.tensor([[1.0], [3.0]]))
            FunctionScale(zero=5.0, constant=1.0)
        """
        if outputs.ndim != 2 or not outputs.numel():
            raise ValueError(f"outputs must have shape [N, K] with N, K >= 1, got {list(outputs.shape)}.")
        exact = outputs.detach().cpu().double()
        zero = float(exact.square().sum(1).mean())
        constant = float((exact - exact.mean(0)).square().sum(1).mean())
        if not math.isfinite(zero):
            raise ValueError("outputs must be finite; the teacher's are not: look for overflow or a diverged training.")
        rounding = 8 * torch.finfo(outputs.dtype).eps
        return cls(zero, constant if constant > rounding**2 * zero else 0.0)

    def relative(self, loss: float) -> float:
        """Return R = J / V; 0 for J = 0, also if V = 0."""
        return _ratio(loss, self.constant)

    def tolerance(self, epsilon: float) -> float:
        """Return rho = epsilon / J0, infinite if J0 = 0."""
        return _ratio(epsilon, self.zero)

    @property
    def largest_epsilon(self) -> float:
        """The lowest epsilon with a warning: a tenth of the smaller of J0 and V."""
        return _BOUND * min(self.zero, self.constant)

    def warning(self, epsilon: float) -> str | None:
        """Return the sentence that says epsilon is too large, or None where it is below `largest_epsilon`."""
        if epsilon < self.largest_epsilon:
            return None
        if self.largest_epsilon == 0:
            kind = "zero" if self.zero == 0 else "constant"
            return (
                f"The teacher is {kind} on the inputs, so that no epsilon is small next to it; take a teacher whose "
                "outputs vary, or read the set as functions near a constant."
            )
        return (
            f"epsilon = {epsilon:.3g} is {self.tolerance(epsilon):.3g} times J0 = {self.zero:.3g}, the J of the zero "
            f"function, and {epsilon / self.constant:.3g} times V = {self.constant:.3g}, the J of the best constant: "
            f"functions in the set may have little in common with the teacher; take epsilon below "
            f"{self.largest_epsilon:.2g}."
        )

    @staticmethod
    def word(relative: float) -> str:
        """Name the relation of a function to the teacher by its R, best on fresh inputs.

        Returns:
            "equivalent" up to R = 0.01, "nearly equivalent" up to 0.1, "not equivalent" beyond, also for NaN.
        """
        if relative <= _SAME:
            return "equivalent"
        return "nearly equivalent" if relative <= _BOUND else "not equivalent"


@dataclass(frozen=True)
class Resolution:
    r"""Whether a grid is fine enough for a set J < epsilon.

    Attributes:
        spacing: h, between grid points.
        curvature: :math:`\lambda_{\max}`, the largest eigenvalue of a Hessian of J at a cell of the set, by second
            differences; NaN if none could be measured.
        width: Width of the set where it is thinnest, :math:`w = 2 \sqrt{2 \epsilon / \lambda_{\max}}`; infinite if
            J is nowhere curved upwards, NaN if the curvature is.
        enough: Whether h <= w / 2; False if the width is NaN.
        points: Points per axis that are enough for this width, odd; those of the grid if it is fine enough, 0 if the
            width is NaN.
    """

    spacing: float
    curvature: float
    width: float
    enough: bool
    points: int


def resolution(values: NDArray[np.floating], spacing: float, epsilon: float) -> Resolution:
    r"""Compare the spacing of a grid with the width of the thinnest part of the set ``values < epsilon``.

    Near a smooth zero set :math:`J \approx \lambda d^2 / 2` at distance d, so that the set is a tube of width
    :math:`2 \sqrt{2 \epsilon / \lambda}`. At least two cells must fit across. The Hessians come from second differences
    at cells of the set (of 65536 evenly chosen ones at most), or at the cell of smallest J if the set is empty. They
    measure J at the scale of the grid: on a far too coarse grid, ``points`` is a first estimate only.

    Args:
        values: J. Shape ``[n1, ..., nm]``, m >= 1, floating, not NaN. Infinite values, of points that were given up
            early, hide the curvature at their neighbours.
        spacing: Spacing of the grid, the same along all axes, > 0.
        epsilon: > 0, unit of J.

    Raises:
        ValueError: If spacing or epsilon is not a number > 0.

    Example:
        >>> x = np.linspace(-1, 1, 21)
        >>> found = resolution(50 * x**2, 0.1, 0.25)  # J < 0.25 for |x| < 0.0707
        >>> round(found.width, 4), found.enough, found.points
        (0.1414, False, 31)
    """
    check_numbers("> 0", spacing=spacing, epsilon=epsilon)
    curvature = _largest_curvature(values, epsilon) / spacing**2
    points = max(values.shape)
    if math.isnan(curvature):
        return Resolution(spacing, math.nan, math.nan, enough=False, points=0)
    width = 2 * math.sqrt(2 * epsilon / curvature) if curvature > 0 else math.inf
    enough = spacing <= width / 2
    if not enough:
        intervals = math.ceil(spacing * (points - 1) / (width / 2))
        points = intervals + 1 + intervals % 2
    return Resolution(spacing, curvature, width, enough, points)


@dataclass(frozen=True, eq=False)
class VolumeExponent:
    r"""The exponent of the volume of J < epsilon in epsilon: :math:`\text{vol} \sim \epsilon^{\kappa / 2}`.

    Attributes:
        exponent: Slope of log volume over log epsilon: half the codimension :math:`\kappa` of the zero set in the space
            measured, slightly more near singular points, where logarithms of epsilon contribute.
        error: Its standard error from the counts, as if the points were independent. For a regular grid it is a rough
            guide only; that the slope changes with epsilon is not in it.
        epsilons: Where the volume was measured, rising. Shape ``[steps]``, float64.
        fractions: Share of the points below each of them. Shape ``[steps]``, float64, in (0, 1].
    """

    exponent: float
    error: float
    epsilons: NDArray[np.float64]
    fractions: NDArray[np.float64]


def volume_exponent(
    values: ArrayLike, epsilon: float, decades: float = 1.0, *, steps: int = 11, samples: int | None = None
) -> VolumeExponent:
    r"""Measure the exponent of the volume of J < epsilon, by least squares on a log-log scale.

    The volume is counted at ``steps`` epsilons, evenly spaced on the log scale. The counts :math:`C_k` are nested: with
    their increments :math:`n_j` and the weights :math:`w_k` of the regression, the variance of the slope is
    :math:`\sum_j n_j (\sum_{k \geq j} w_k / C_k)^2` to first order.

    Args:
        values: J at points spread evenly, on a grid or drawn at random. Any shape, floating. Values of epsilon or more
            only count as points, and may be infinite.
        epsilon: The largest, > 0, unit of J.
        decades: How far to go below it, > 0.
        steps: Number of epsilons, >= 2.
        samples: Number of points, if those of J >= epsilon were left out of ``values``; by default the number of
            values. Only the fractions depend on it.

    Returns:
        Exponent, error and the counts.

    Raises:
        ValueError: If an argument is out of range, a value is NaN, or fewer than 10 values are below the smallest
            epsilon.

    References:
        Watanabe (2009), "Algebraic Geometry and Statistical Learning Theory": the exponent is the (local) learning
        coefficient, or real log canonical threshold.

    Example:
        >>> x = np.linspace(-1, 1, 100_001)
        >>> round(volume_exponent(x**2, 0.01).exponent, 2)  # a point on a line: codimension 1
        0.5
    """
    check_numbers("> 0", epsilon=epsilon, decades=decades)
    check_integers(2, steps=steps)
    losses = np.asarray(values).ravel()
    total = losses.size if samples is None else samples
    check_integers(losses.size, samples=total)
    if np.isnan(losses).any():
        raise ValueError("values must not be NaN; look for weights that are not finite.")
    logs = math.log(epsilon) + math.log(10) * np.linspace(-decades, 0, steps)
    epsilons = np.exp(logs)
    epsilons[-1] = epsilon
    counts = np.searchsorted(np.sort(losses[losses < epsilon].astype(np.float64)), epsilons)  # strictly below
    if counts[0] < _FEWEST:
        raise ValueError(
            f"The volume exponent needs at least {_FEWEST} of the {total} points below epsilon = {epsilons[0]:.3g}, "
            f"but {counts[0]} are; take more points, a larger epsilon or fewer decades."
        )
    centred = logs - logs.mean()
    weights = centred / (centred @ centred)
    influence = np.cumsum((weights / counts)[::-1])[::-1]
    variance = np.diff(counts, prepend=0) @ influence**2
    return VolumeExponent(float(weights @ np.log(counts)), math.sqrt(variance), epsilons, counts / total)


def _ratio(value: float, scale: float) -> float:
    if scale > 0:
        return value / scale
    return 0.0 if value == 0 else value * math.inf


def _largest_curvature(values: NDArray[np.floating], epsilon: float) -> float:
    """Return the largest eigenvalue of a second-difference Hessian in the set, in units of J; NaN if there is none."""
    m = values.ndim
    inner = values[(slice(1, -1),) * m]
    if not inner.size:
        return math.nan
    found = np.flatnonzero(inner < epsilon)
    if not found.size:
        found = np.array([inner.argmin()])
    found = found[:: -(-found.size // _MOST_CELLS)]
    centre = np.stack(np.unravel_index(found, inner.shape)) + 1  # [m, cells]
    axes = np.eye(m, dtype=np.intp)

    def at(step: NDArray[np.intp]) -> NDArray[np.float64]:
        return np.asarray(values[tuple(centre + step[:, None])], dtype=np.float64)

    hessians = np.empty((found.size, m, m))
    with np.errstate(invalid="ignore"):  # of infinite values; such cells are left out below
        for i, one in enumerate(axes):
            hessians[:, i, i] = at(one) - 2 * at(0 * one) + at(-one)
            for j, two in enumerate(axes[:i]):
                mixed = (at(one + two) - at(one - two) - at(two - one) + at(-one - two)) / 4
                hessians[:, i, j] = hessians[:, j, i] = mixed
    hessians = hessians[np.isfinite(hessians).all((1, 2))]
    return float(np.linalg.eigvalsh(hessians)[:, -1].max()) if len(hessians) else math.nan
