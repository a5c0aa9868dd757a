"""Statistics of single units without annotations and thresholds: kurtosis, participation and selectivity."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sym._checks import check_integers
from lightning_sym.dissection.quantiles import unit_values

_CONSTANT = 1e-12  # largest variance of a constant unit, relative to the mean square

Moments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class UnitSummary(NamedTuple):
    """Statistics of single units. Each of shape ``[units]``, float64; NaN for units that are not ``live``.

    Attributes:
        kurtosis: Fourth central moment over squared variance, over all images and positions; 3 for a Gaussian.
        participation: Participation ratio over images and positions, (sum a^2)^2 / (M sum a^4), in (0, 1].
        selectivity: (largest - rest) / (|largest| + |rest|) of the mean responses to classes, in [0, 1]; NaN without
            classes.
        class_variance: Fraction of the variance of an image's mean response explained by its class, in [0, 1]; NaN
            without classes.
        live: Whether the unit is not constant. Bool.
    """

    kurtosis: Tensor
    participation: Tensor
    selectivity: Tensor
    class_variance: Tensor
    live: Tensor


class UnitStatistics(Metric):
    """Kurtosis, participation ratio and class selectivity of each unit, in one pass.

    Moments are about the means, in float64, so that batches and processes have no effect up to rounding.

    Args:
        units: Number of units, >= 1.
        classes: Number of classes, >= 2; 0 for none.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Morcos et al. (2018), "On the importance of single directions for generalization", arXiv:1803.06959: class
        selectivity, there of non-negative responses; docs/theory/dissection.md, 3. Moments are combined
        as in Pebay (2008), Sandia report SAND2008-6212.

    Example:
        >>> metric = UnitStatistics(2)
        >>> metric.update(torch.tensor([[1.0, 4.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 4.0]]))
        >>> metric.compute().kurtosis
        tensor([1., 1.], dtype=torch.float64)
    """

    full_state_update = True
    squares: Tensor
    fourths: Tensor
    class_counts: Tensor
    class_sums: Tensor
    response_squares: Tensor

    def __init__(self, units: int, classes: int = 0) -> None:
        check_integers(units=units)
        if classes != 0:
            check_integers(2, classes=classes)
        super().__init__(compute_with_cache=False)
        self.units, self.classes = units, classes
        for name in _MOMENTS:
            # Not summed: compute combines moments about the means.
            self.add_state(name, torch.zeros(units, dtype=torch.float64), dist_reduce_fx=None)
        for name, shape in (
            ("squares", (units,)),
            ("fourths", (units,)),
            ("class_counts", (classes,)),
            ("class_sums", (classes, units)),
            ("response_squares", (units,)),
        ):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, maps: Tensor, labels: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            maps: Activations, units on axis 1; finite. Shape ``[N, units, ...]``.
            labels: Classes of the images; needed if there are classes. Shape ``[N]``, int64.

        Raises:
            ValueError: If the number of units differs, a value is not finite, or labels do not match.
        """
        values = unit_values(maps, self.units).double()
        if self.classes and (
            labels is None
            or labels.shape != maps.shape[:1]
            or not bool(((labels >= 0) & (labels < self.classes)).all())
        ):
            raise ValueError(
                f"labels must be one class in [0, {self.classes}) for each of the {len(maps)} images; without classes "
                "leave out classes."
            )
        if not values.numel():
            return
        mean = values.mean(1)
        centred = values - mean[:, None]
        two = centred.square()
        batch = (
            torch.full_like(mean, values.shape[1]),
            mean,
            two.sum(1),
            (two * centred).sum(1),
            two.square().sum(1),
        )
        for name, value in zip(_MOMENTS, _merged(self._moments(), batch), strict=True):
            setattr(self, name, value)
        self.squares = self.squares + values.square().sum(1)
        self.fourths = self.fourths + values.square().square().sum(1)
        if self.classes and labels is not None:
            responses = maps.detach().double().reshape(len(maps), self.units, -1).mean(2)
            self.class_counts = self.class_counts + torch.bincount(labels, minlength=self.classes)
            self.class_sums = self.class_sums.index_add(0, labels, responses)
            self.response_squares = self.response_squares + responses.square().sum(0)

    def _moments(self) -> Moments:
        count, mean, second, third, fourth = (getattr(self, name) for name in _MOMENTS)
        return count, mean, second, third, fourth

    def compute(self) -> UnitSummary:
        """Return the statistics of the units.

        Raises:
            ValueError: If there are no values.
        """
        moments = self._moments()
        if moments[0].ndim > 1:  # gathered from several processes
            moments = functools.reduce(_merged, zip(*moments, strict=True))
        count, _, second, _, fourth = moments
        if not bool(count.all()):
            raise ValueError("there are no values to describe; call update first.")
        live = second > _CONSTANT * self.squares
        kurtosis = count * fourth / second.square()
        participation = self.squares.square() / (count * self.fourths)
        selectivity, class_variance = self._of_classes()
        measures = (kurtosis, participation, selectivity, class_variance)
        kurtosis, participation, selectivity, class_variance = (value.where(live, torch.nan) for value in measures)
        return UnitSummary(kurtosis, participation, selectivity, class_variance, live)

    def _of_classes(self) -> tuple[Tensor, Tensor]:
        """Return class selectivity and the explained variance; NaN if fewer than two classes occurred."""
        seen = self.class_counts > 0
        if int(seen.sum()) < 2:
            return (torch.full_like(self.squares, torch.nan),) * 2
        counts, sums = self.class_counts[seen, None], self.class_sums[seen]
        means = sums / counts
        largest = means.max(0).values
        rest = (means.sum(0) - largest) / (len(means) - 1)
        size = largest.abs() + rest.abs()
        selectivity = torch.where(size > 0, (largest - rest) / size, 0.0)
        squared_sum = sums.sum(0).square() / counts.sum()
        total = self.response_squares - squared_sum
        between = (sums.square() / counts).sum(0) - squared_sum
        varies = total > _CONSTANT * self.response_squares
        return selectivity, torch.where(varies, (between / total).clamp(0, 1), 0.0)


_MOMENTS = ("count", "mean", "second", "third", "fourth")


def _merged(one: Moments, two: Moments) -> Moments:
    """Combine count, mean and sums of powers about the mean of two parts."""
    n1, mean1, s1, t1, f1 = one
    n2, mean2, s2, t2, f2 = two
    n = n1 + n2
    whole = n.clamp(min=1)
    d = mean2 - mean1
    step = d / whole
    second = s1 + s2 + n1 * n2 * d * step
    third = t1 + t2 + n1 * n2 * (n1 - n2) * d * step**2 + 3 * step * (n1 * s2 - n2 * s1)
    fourth = (
        f1
        + f2
        + n1 * n2 * (n1**2 - n1 * n2 + n2**2) * d * step**3
        + 6 * step**2 * (n1**2 * s2 + n2**2 * s1)
        + 4 * step * (n1 * t2 - n2 * t1)
    )
    return n, mean1 + n2 * step, second, third, fourth
