"""The value of each unit that only a small part of all positions exceeds, exactly and in one pass."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sym._checks import check_integers, check_numbers


class TopQuantile(Metric):
    r"""The threshold :math:`T_u` of each unit that at most a fraction ``top`` of its values exceed, exactly.

    Of M values of a unit it is that of rank :math:`\lfloor \text{top} \cdot M \rfloor`, counted from 0 at the largest.
    Kept are the largest values of each unit, as many as can still be needed; the largest of several batches or
    processes are the largest of all, so that neither changes the result.

    Args:
        units: Number of units, >= 1.
        positions: How many values of each unit there are in all batches of all processes, or more; it sets how much is
            kept: ``units * (top * positions + 1)`` numbers in float64.
        top: Fraction of the values above the threshold, in (0, 1). The 0.005 of network dissection is the default.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Bau et al. (2017), "Network Dissection", arXiv:1704.05796, section 2.3; docs/theory/dissection.md, 2.

    Example:
        >>> metric = TopQuantile(2, positions=10, top=0.2)
        >>> metric.update(torch.arange(20.0).reshape(10, 2))
        >>> metric.compute()
        tensor([14., 15.], dtype=torch.float64)
    """

    full_state_update = True
    largest: Tensor
    seen: Tensor

    def __init__(self, units: int, positions: int, top: float = 0.005) -> None:
        check_integers(units=units, positions=positions)
        check_numbers("in (0, 1)", top=top)
        super().__init__(compute_with_cache=False)
        self.units, self.positions, self.top = units, positions, top
        kept = self._rank(positions) + 1
        self.add_state(
            "largest", torch.full((units, kept), -math.inf, dtype=torch.float64), dist_reduce_fx=_largest_of_all
        )
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def _rank(self, count: int) -> int:
        return math.floor(round(self.top * count, 6))  # 0.07 * 100 is a little more than 7, 0.29 * 100 a little less

    def update(self, maps: Tensor) -> None:
        """Add the activations of a batch.

        Args:
            maps: Units on axis 1; finite. Shape ``[N, units, ...]``.

        Raises:
            ValueError: If there are other units, values that are not finite, or more of them than were announced.
        """
        values = unit_values(maps, self.units)
        self.seen = self.seen + values.shape[1]
        self._check_seen()
        kept = self.largest.shape[1]
        top = values.topk(min(kept, values.shape[1]), dim=1, sorted=False).values
        self.largest = torch.cat([self.largest, top.double()], dim=1).topk(kept, dim=1).values

    def _check_seen(self) -> None:
        if self.seen > self.positions:
            raise ValueError(
                f"{int(self.seen)} values of each unit were given and {self.positions} were announced; set positions "
                "to the number of all images times that of their positions."
            )

    def compute(self) -> Tensor:
        """Return the thresholds. Shape ``[units]``, float64; torchmetrics makes a scalar of a single number.

        Raises:
            ValueError: If no values were given, or all processes together gave more than were announced.
        """
        if not self.seen:
            raise ValueError("there are no values to take a quantile of; call update first.")
        self._check_seen()
        return self.largest[:, self._rank(int(self.seen))].clone()


def _largest_of_all(largest: Tensor) -> Tensor:
    """Return what is kept of all processes: the largest values of ``[processes, units, kept]``."""
    kept = largest.shape[-1]
    found: Tensor = largest.movedim(0, 1).flatten(1).topk(kept, dim=1).values
    return found


def unit_values(maps: Tensor, units: int) -> Tensor:
    """Return all values of each unit, ``[units, M]``, for activations ``[N, units, ...]``.

    Raises:
        ValueError: If there are other units, or values that are not finite.
    """
    if maps.ndim < 2 or maps.shape[1] != units:
        raise ValueError(f"maps must have shape [N, {units}, ...], got {list(maps.shape)}.")
    if not bool(maps.isfinite().all()):
        raise ValueError("maps must be finite, and some values are not; look for members that have diverged.")
    return maps.detach().movedim(1, 0).flatten(1)
