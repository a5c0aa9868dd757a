"""Dissection of one layer of one network, in several bases at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from lightning_sym._distributed import device_of, wide_device
from lightning_sym.dissection.bases import in_bases
from lightning_sym.dissection.companions import UnitStatistics, UnitSummary
from lightning_sym.dissection.detectors import Detectors, detectors
from lightning_sym.dissection.overlaps import ConceptOverlap
from lightning_sym.dissection.quantiles import TopQuantile
from lightning_sym.similarity import features_of


class Annotated(Protocol):
    """A batch of images with masks of concepts; ``lightning_sym.datamodules.ConceptBatch`` is one."""

    @property
    def images(self) -> Tensor:
        """As the network gets them. Shape ``[N, ...]``."""

    @property
    def masks(self) -> Tensor:
        """Where each concept is. Shape ``[N, K, H, W]``, bool."""

    @property
    def annotated(self) -> Tensor:
        """Whether an image was annotated for a concept. Shape ``[N, K]``, bool."""

    @property
    def labels(self) -> Tensor | None:
        """Classes of the images, shape ``[N]``; None if there are none."""


@dataclass(frozen=True, eq=False)
class BasisDissection:
    """What the units of a layer are in one basis.

    Attributes:
        thresholds: What at most the top part of a unit's activations exceeds. Shape ``[C]``, float64.
        overlaps: Intersection over union of each unit and concept. Shape ``[C, K]``, float64.
        summary: Kurtosis and other companions, without annotations.
    """

    thresholds: Tensor
    overlaps: Tensor
    summary: UnitSummary

    def detectors(self, least: float = 0.04) -> Detectors:
        """Return which units detect a concept, see :func:`lightning_sym.dissection.detectors`."""
        return detectors(self.overlaps, least)


def dissect(
    network: nn.Module,
    site: str,
    bases: Tensor,
    batches: Iterable[Annotated],
    *,
    images: int,
    example: Tensor,
    concepts: int,
    classes: int = 0,
    top: float = 0.005,
) -> list[BasisDissection]:
    """Dissect a layer in several bases, in two passes over the data; to be called on every process.

    Args:
        network: The network; run in evaluation mode, on its own device.
        site: Name of the module whose output is dissected: maps ``[N, C, h, w]``.
        bases: Matrices that are applied to the channels. Shape ``[B, C, C]``.
        batches: Images and masks, this process's share; gone through twice.
        images: How many images there are, of all processes, or more.
        example: An input of the network, for the shape of the maps. Shape ``[1, ...]``.
        concepts: Number of concepts ``K``.
        classes: Number of classes of the labels; 0 if there are none.
        top: Fraction of a unit's activations above its threshold, in (0, 1).

    Returns:
        What was found in each basis, on the CPU, the same on every process.

    Raises:
        ValueError: If the site puts out no maps, or shapes do not fit.

    Note:
        Two runs of the network on all images; besides, time and memory are proportional to ``B``: kept are
        ``B * C * top * images * h * w`` numbers in float64.
    """
    shape = features_of(network, [site], example)[site].shape
    if len(shape) != 4:
        raise ValueError(
            f"{site} puts out values of shape {list(shape)}; expected activation maps, [N, channels, height, width], "
            "as of a convolution's activation."
        )
    device, units = wide_device(device_of(network)), len(bases) * shape[1]
    quantile = TopQuantile(units, images * shape[2] * shape[3], top).to(device)
    statistics = UnitStatistics(units, classes).to(device)
    for batch in batches:
        maps = in_bases(features_of(network, [site], batch.images)[site].to(device), bases)
        quantile.update(maps)
        statistics.update(maps, batch.labels.to(device) if classes and batch.labels is not None else None)
    thresholds, summary = quantile.compute(), statistics.compute()
    overlap = ConceptOverlap(thresholds, concepts).to(device)
    for batch in batches:
        maps = in_bases(features_of(network, [site], batch.images)[site].to(device), bases)
        overlap.update(maps, batch.masks.to(device), batch.annotated.to(device))
    overlaps = overlap.compute()
    parts = [value.cpu().split(shape[1]) for value in (thresholds, overlaps, *summary)]  # type: ignore[no-untyped-call]
    return [BasisDissection(own[0], own[1], UnitSummary(*own[2:])) for own in zip(*parts, strict=True)]
