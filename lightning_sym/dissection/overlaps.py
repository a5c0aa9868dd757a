"""Overlap of the active positions of a unit with the pixels of a concept."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchmetrics import Metric

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym.dissection.quantiles import unit_values

_BLOCK = 2**20  # values held at once, 4 MiB; counts below 2^24 are exact in float32


class ConceptOverlap(Metric):
    r"""Intersection over union of thresholded activation maps with the masks of concepts, for all pairs.

    .. math:: \text{IoU}(u, c) = \frac{\sum_n |M_{u,n} \cap L_{c,n}|}{\sum_n |M_{u,n} \cup L_{c,n}|},
        \qquad M_{u,n} = [\,\text{bilinear}(a_{u,n}) > T_u\,],

    over the images annotated for the concept. The inequality is strict, where the paper has "or equal": a unit with
    threshold 0 is not active where its value is 0.

    The states are counts, with exact sums for any batches and number of processes.

    Args:
        thresholds: Threshold of each unit, for instance from :class:`TopQuantile`. Shape ``[units]``.
        concepts: Number of concepts, >= 1.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Bau et al. (2017), "Network Dissection", arXiv:1704.05796, section 2.3; docs/theory/dissection.md, 2.

    Example:
        >>> metric = ConceptOverlap(torch.tensor([0.5]), concepts=2)
        >>> metric.update(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[True, True]], [[True, False]]]]))
        >>> metric.compute()
        tensor([[0.5000, 1.0000]], dtype=torch.float64)
    """

    full_state_update = True
    thresholds: Tensor
    intersections: Tensor
    unit_areas: Tensor
    concept_areas: Tensor

    def __init__(self, thresholds: Tensor, concepts: int) -> None:
        check_integers(concepts=concepts)
        if thresholds.ndim != 1 or not len(thresholds) or not bool(thresholds.isfinite().all()):
            raise ValueError(
                f"thresholds must be one finite number for each unit, shape [units], got {list(thresholds.shape)}."
            )
        super().__init__(compute_with_cache=False)
        units = len(thresholds)
        self.units, self.concepts = units, concepts
        self.register_buffer("thresholds", thresholds.detach().clone(), persistent=False)
        for name, shape in (
            ("intersections", (units, concepts)),
            ("unit_areas", (units, concepts)),
            ("concept_areas", (concepts,)),
        ):
            self.add_state(name, torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, maps: Tensor, masks: Tensor, annotated: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            maps: Activations, resized to the masks bilinearly (corners not aligned). Shape ``[N, units, h, w]``,
                floating, finite.
            masks: Pixels of each concept. Shape ``[N, concepts, H, W]``, bool.
            annotated: Whether an image was annotated for a concept; default all. Shape ``[N, concepts]``, bool.

        Raises:
            ValueError: If shapes or dtypes do not match, or a value is not finite.
        """
        count = len(maps)
        if maps.ndim != 4 or maps.shape[1] != self.units or not maps.dtype.is_floating_point:
            raise ValueError(
                f"maps must be floating of shape [N, {self.units}, h, w], got {maps.dtype} of {list(maps.shape)}."
            )
        if masks.ndim != 4 or tuple(masks.shape[:2]) != (count, self.concepts) or masks.dtype != torch.bool:
            raise ValueError(
                f"masks must be bool of shape [{count}, {self.concepts}, H, W], got {masks.dtype} of "
                f"{list(masks.shape)}."
            )
        if annotated is None:
            annotated = masks.new_ones((count, self.concepts))
        if annotated.dtype != torch.bool or tuple(annotated.shape) != (count, self.concepts):
            raise ValueError(
                f"annotated must be bool of shape [{count}, {self.concepts}], got {annotated.dtype} of "
                f"{list(annotated.shape)}."
            )
        unit_values(maps, self.units)  # raises if some are not finite
        pixels = masks.shape[2] * masks.shape[3]
        images = max(1, _BLOCK // (pixels * max(self.units, self.concepts)))
        for first in range(0, count, images):
            part = slice(first, first + images)
            self._add(maps[part], masks[part], annotated[part])

    def _add(self, maps: Tensor, masks: Tensor, annotated: Tensor) -> None:
        large = interpolate(maps.detach(), size=tuple(masks.shape[2:]), mode="bilinear", align_corners=False)
        active = large > self.thresholds.to(large)[:, None, None]
        marked = masks & annotated[..., None, None]
        present = marked.any(0).flatten(1).any(1).nonzero()[:, 0]  # few of Broden's 1,197 concepts are in an image
        # [units, n * pixels] @ [n * pixels, present], zeros and ones
        products = active.movedim(1, 0).flatten(1).float() @ marked[:, present].movedim(1, 0).flatten(1).float().T
        self.intersections = self.intersections.index_add(1, present, products.round().long())
        areas = active.flatten(2).sum(2)  # [n, units]
        self.unit_areas = self.unit_areas + (areas.double().T @ annotated.double()).round().long()
        self.concept_areas = self.concept_areas + marked.sum((0, 2, 3))

    def compute(self) -> Tensor:
        """Return the overlaps, in [0, 1]; 0 if neither the unit nor the concept occurs.

        Returns:
            Shape ``[units, concepts]``, float64; torchmetrics makes a scalar of a single number.
        """
        unions = self.unit_areas + self.concept_areas - self.intersections
        return self.intersections.double() / unions.clamp(min=1).double()


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
