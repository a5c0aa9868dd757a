"""Dissection of one layer of one network, in several bases at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sym._distributed import device_of, wide_device
from lightning_sym.dissection.bases import in_bases
from lightning_sym.dissection.companions import UnitStatistics, UnitSummary
from lightning_sym.dissection.overlaps import ConceptOverlap, Detectors, detectors
from lightning_sym.dissection.quantiles import TopQuantile
from lightning_sym.similarity import features_of


class ConceptBatch(NamedTuple):
    """Images with the masks of all concepts.

    Attributes:
        images: Normalised images. Shape ``[N, C, H, W]``, float32.
        masks: Pixels of each concept. Shape ``[N, K, H', W']``, bool.
        annotated: Whether an image was annotated for a concept. Shape ``[N, K]``, bool.
        labels: Classes of the images, shape ``[N]``, int64; None if there are none.
    """

    images: Tensor
    masks: Tensor
    annotated: Tensor
    labels: Tensor | None


@dataclass(frozen=True, eq=False)
class BasisDissection:
    """Dissection of a layer in one basis.

    Attributes:
        thresholds: Activation that at most the fraction ``top`` exceeds, for each unit. Shape ``[C]``, float64.
        overlaps: Intersection over union of each unit and concept. Shape ``[C, K]``, float64.
        summary: Kurtosis and further statistics without annotations.
    """

    thresholds: Tensor
    overlaps: Tensor
    summary: UnitSummary

    def detectors(self, least: float = 0.04) -> Detectors:
        """Return the concept detectors, see :func:`lightning_sym.dissection.overlaps`."""
        return detectors(self.overlaps, least)


def shape_of_maps(network: nn.Module, site: str, example: Tensor) -> torch.Size:
    """Return the shape of a site's maps, ``[N, C, h, w]``.

    Raises:
        ValueError: If the output of the site is not a batch of maps.
    """
    shape = features_of(network, [site], example)[site].shape
    if len(shape) != 4:
        raise ValueError(
            f"{site} returns values of shape {list(shape)}; expected activation maps, [N, channels, height, width], "
            "as of a convolution's activation."
        )
    return shape


def dissect(
    network: nn.Module,
    site: str,
    bases: Tensor,
    batches: Iterable[ConceptBatch],
    *,
    images: int,
    example: Tensor,
    concepts: int,
    classes: int = 0,
    top: float = 0.005,
) -> list[BasisDissection]:
    """Dissect a layer in several bases, in two passes over the data; call it on every process.

    Args:
        network: The network; run in evaluation mode, on its device.
        site: Name of the module with the output to dissect: maps ``[N, C, h, w]``.
        bases: Matrices that act on the channels. Shape ``[B, C, C]``.
        batches: Images and masks, this process's share; iterated twice.
        images: Number of images on all processes, or an upper bound.
        example: An input of the network, for the shape of the maps. Shape ``[1, ...]``.
        concepts: Number of concepts ``K``.
        classes: Number of classes of the labels; 0 if there are none.
        top: Fraction of a unit's activations above its threshold, in (0, 1).

    Returns:
        The results in each basis, on the CPU, the same on every process.

    Raises:
        ValueError: If the output of the site is not a batch of maps, or shapes do not match.

    Note:
        Runs the network twice on all images. Further time and memory are proportional to ``B``; stored are
        ``B * C * top * images * h * w`` numbers in float64.
    """
    shape = shape_of_maps(network, site, example)
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
