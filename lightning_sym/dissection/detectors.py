"""Which units detect a concept, and how many different concepts are detected."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sym._checks import check_numbers


@dataclass(frozen=True, eq=False)
class Detectors:
    """What the units of a layer detect.

    Attributes:
        concept: Number of the concept that each unit overlaps most, the first of equals. Shape ``[units]``, int64.
        overlap: The intersection over union with it. Shape ``[units]``, float64.
        detects: Whether that is enough. Shape ``[units]``, bool.
    """

    concept: Tensor
    overlap: Tensor
    detects: Tensor

    @property
    def units(self) -> int:
        """The number of units that detect a concept: interpretable units."""
        return int(self.detects.sum())

    @property
    def distinct(self) -> int:
        """The number of different concepts that are detected."""
        return len(torch.unique(self.concept[self.detects]))


def detectors(overlaps: Tensor, least: float = 0.04) -> Detectors:
    """Return what each unit detects: the concept that it overlaps most, if that is more than ``least``.

    Args:
        overlaps: Intersections over unions, of :class:`ConceptOverlap`. Shape ``[units, concepts]``.
        least: What the overlap has to exceed, in [0, 1); 0.04 is that of network dissection.

    Raises:
        ValueError: If ``least`` is out of its range or ``overlaps`` is no matrix.

    References:
        Bau et al. (2017), arXiv:1704.05796, section 2.3; docs/theory/dissection.md, 2.

    Example:
        >>> found = detectors(torch.tensor([[0.5, 0.0], [0.3, 0.1], [0.01, 0.02]]))
        >>> found.units, found.distinct
        (2, 1)
    """
    check_numbers("in [0, 1)", least=least)
    if overlaps.ndim != 2 or not overlaps.numel():
        raise ValueError(f"overlaps must have shape [units, concepts], got {list(overlaps.shape)}.")
    overlap, concept = overlaps.max(1)
    return Detectors(concept, overlap, overlap > least)
