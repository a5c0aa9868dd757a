"""Units that detect concepts, and the number of different detected concepts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sym._checks import check_numbers


@dataclass(frozen=True, eq=False)
class Detectors:
    """Concepts detected by the units of a layer.

    Attributes:
        concept: Index of the concept with the largest overlap, the first of ties. Shape ``[units]``, int64.
        overlap: Intersection over union with that concept. Shape ``[units]``, float64.
        detects: Whether the overlap suffices. Shape ``[units]``, bool.
    """

    concept: Tensor
    overlap: Tensor
    detects: Tensor

    @property
    def units(self) -> int:
        """Number of interpretable units: those that detect a concept."""
        return int(self.detects.sum())

    @property
    def distinct(self) -> int:
        """Number of different detected concepts."""
        return len(torch.unique(self.concept[self.detects]))


def detectors(overlaps: Tensor, least: float = 0.04) -> Detectors:
    """Assign to each unit the concept with the largest overlap; it is detected if that exceeds ``least``.

    Args:
        overlaps: Intersections over unions from :class:`ConceptOverlap`. Shape ``[units, concepts]``.
        least: Threshold of the overlap, in [0, 1); 0.04 is that of network dissection.

    Raises:
        ValueError: If ``least`` is out of its range or ``overlaps`` is no matrix of numbers in [0, 1].

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
    if not bool(((overlaps >= 0) & (overlaps <= 1)).all()):
        raise ValueError("overlaps must be in [0, 1], but some are not; give intersections over unions.")
    overlap, concept = overlaps.max(1)
    return Detectors(concept, overlap, overlap > least)
