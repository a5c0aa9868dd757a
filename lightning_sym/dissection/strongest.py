"""The images with the strongest responses of single units, and the active pixels in them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered
from lightning_sym.similarity import features_of


@dataclass(frozen=True, eq=False)
class StrongestImages:
    """The images to which a unit responds most, the strongest first.

    Attributes:
        responses: Largest activation in each image. Shape ``[K]``, floating.
        images: As the network was given them. Shape ``[K, C, H, W]``.
        active: Pixels with activations above the unit's threshold. Shape ``[K, H, W]``, bool.
    """

    responses: Tensor
    images: Tensor
    active: Tensor


def strongest_images(
    network: nn.Module,
    site: str,
    directions: Tensor,
    thresholds: Tensor,
    batches: Iterable[Tensor],
    *,
    count: int = 4,
) -> list[StrongestImages]:
    """Find the images to which some units respond most, in one pass; call it on every process.

    Args:
        network: The network; run in evaluation mode, on its device.
        site: Name of the module with maps ``[N, C, h, w]``.
        directions: A unit is a linear combination of channels: a row of a basis. Shape ``[U, C]``.
        thresholds: Threshold of each unit, from :func:`lightning_sym.dissection.dissect`. Shape ``[U]``.
        batches: Images of shape ``[N, C, H, W]``, this process's share.
        count: Images of each unit, ``K`` >= 1; fewer if there are fewer images.

    Returns:
        The images of each unit, on the CPU, the same on every process. Of equal responses the earlier image, of the
        lower rank, comes first.

    Raises:
        ValueError: If ``count`` is below 1 or shapes do not match.

    References:
        Bau et al. (2017), arXiv:1704.05796, figure 4; docs/theory/dissection.md, 2.5.
    """
    check_integers(count=count)
    if directions.ndim != 2 or thresholds.shape != directions.shape[:1]:
        raise ValueError(
            f"directions and thresholds must have shapes [U, C] and [U], got {list(directions.shape)} and "
            f"{list(thresholds.shape)}."
        )
    kept: list[StrongestImages | None] = [None] * len(directions)
    for images in batches:
        features = features_of(network, [site], images)[site]
        for unit, direction in enumerate(directions.to(features)):
            own = torch.einsum("c,nchw->nhw", direction, features)
            responses = own.flatten(1).amax(1)
            first = responses.sort(descending=True, stable=True).indices[:count]
            large = interpolate(own[first][:, None], size=images.shape[2:], mode="bilinear", align_corners=False)
            active = large[:, 0] > thresholds[unit].to(large)
            chosen = (responses[first], images[first.to(images.device)], active)
            kept[unit] = _merged([kept[unit], StrongestImages(*(part.cpu() for part in chosen))], count)
    shares = gathered(kept)
    merged = [_merged([share[unit] for share in shares], count) for unit in range(len(directions))]
    if any(one is None for one in merged):
        raise ValueError("there are no images to choose from; give one batch at least.")
    return [one for one in merged if one is not None]


def _merged(parts: Iterable[StrongestImages | None], count: int) -> StrongestImages | None:
    """Return the strongest images of all parts."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    responses, images, active = (
        torch.cat([getattr(part, name) for part in known]) for name in ("responses", "images", "active")
    )
    first = responses.sort(descending=True, stable=True).indices[:count]
    return StrongestImages(responses[first], images[first], active[first])
