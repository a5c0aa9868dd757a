"""Top quantile of each unit's activations, exactly and in one pass."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sym._checks import check_integers, check_numbers


class TopQuantile(Metric):
    r"""The threshold :math:`T_u` of each unit that at most a fraction ``top`` of its values exceed, exactly.

    Among M values it has rank :math:`\lfloor \text{top} \cdot M \rfloor`, counted from 0 at the largest.
    The state holds the largest values of each unit, as many as may still be needed. Merging the largest values of
    batches or processes is exact, so that neither changes the result.

    Args:
        units: Number of units, >= 1.
        positions: Number of values of each unit in all batches of all processes, or an upper bound; it determines the
            size of the state, ``units * (top * positions + 1)`` numbers in float64.
        top: Fraction of the values above the threshold, in (0, 1). The default 0.005 is that of network dissection.

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
        return math.floor(round(self.top * count, 6))  # 0.07 * 100 is slightly above 7, 0.29 * 100 slightly below 29

    def update(self, maps: Tensor) -> None:
        """Add the activations of a batch.

        Args:
            maps: Units on axis 1; finite. Shape ``[N, units, ...]``.

        Raises:
            ValueError: If the number of units differs, a value is not finite, or there are more than ``positions``.
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
                f"{int(self.seen)} values of each unit were given but {self.positions} were announced; set positions "
                "to the number of all images times that of their positions."
            )

    def compute(self) -> Tensor:
        """Return the thresholds. Shape ``[units]``, float64; torchmetrics makes a scalar of a single number.

        Raises:
            ValueError: If there are no values, or more than announced on all processes together.
        """
        if not self.seen:
            raise ValueError("there are no values to take a quantile of; call update first.")
        self._check_seen()
        return self.largest[:, self._rank(int(self.seen))].clone()


def _largest_of_all(largest: Tensor) -> Tensor:
    """Merge the stored values of all processes: the largest of ``[processes, units, kept]``."""
    kept = largest.shape[-1]
    found: Tensor = largest.movedim(0, 1).flatten(1).topk(kept, dim=1).values
    return found


def unit_values(maps: Tensor, units: int) -> Tensor:
    """Return all values of each unit, ``[units, M]``, for activations ``[N, units, ...]``.

    Raises:
        ValueError: If the number of units differs, or a value is not finite.
    """
    if maps.ndim < 2 or maps.shape[1] != units:
        raise ValueError(f"maps must have shape [N, {units}, ...], got {list(maps.shape)}.")
    if not bool(maps.isfinite().all()):
        raise ValueError("maps must be finite, but some values are not; look for members that have diverged.")
    return maps.detach().movedim(1, 0).flatten(1)
