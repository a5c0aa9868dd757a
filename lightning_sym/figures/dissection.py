"""Figure of units of a dissection: the images to which they respond most, with the active pixels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_sym.figures import _panels as shared

_DARK = 0.3  # brightness of pixels that are not active
_GAP = 0.04  # between images, in widths of an image


@dataclass(frozen=True, eq=False)
class Strip:
    """A panel of :func:`unit_images`: a row of images.

    Attributes:
        title: Above the row.
        images: Values in [0, 1]; with other than three channels their mean is shown. Shape ``[K, C, H, W]``.
        active: Pixels to be outlined; the others are darkened. Shape ``[K, H, W]``, bool.
    """

    title: str
    images: NDArray[np.float32]
    active: NDArray[np.bool_]


@shared.readable
def unit_images(columns: Sequence[Sequence[Strip]], *, title: str = "") -> Figure:
    """Draw rows of images with the active pixels of units.

    Args:
        columns: The rows of images of each column from top to bottom, as many in all columns.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there is nothing to draw, or columns have different lengths.
    """
    shared.check_some(columns=columns)
    rows = len(columns[0])
    if not rows or any(len(column) != rows for column in columns):
        raise ValueError(f"columns must have as many rows of images each, got {list(map(len, columns))}.")
    count = max(len(strip.images) for column in columns for strip in column)
    size = len(columns) * (0.2 + 0.65 * count), 0.5 + 1.25 * rows
    figure, places = shared.panels(*size, len(columns) * rows, len(columns), title=title)
    for place, axes in enumerate(places):
        strip = columns[place % len(columns)][place // len(columns)]
        pixels, active = _beside(strip)
        axes.imshow(pixels, interpolation="nearest")
        if active.any() and not active.all():
            axes.contour(active, [0.5], colors="#ffd400", linewidths=1.0)
        axes.set_title(strip.title, fontsize=8)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


def _beside(strip: Strip) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the images of a strip in one, ``[H, W', 3]``, and their active pixels, ``[H, W']``."""
    images = np.moveaxis(strip.images, 1, -1)
    if images.shape[-1] != 3:
        images = np.repeat(images.mean(-1, keepdims=True), 3, axis=-1)
    dimmed = images * np.where(strip.active, 1.0, _DARK)[..., None]
    gap = max(1, round(_GAP * images.shape[2]))
    spaced = np.pad(dimmed, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=1.0)
    active = np.pad(strip.active, ((0, 0), (0, 0), (0, gap)))
    joined = np.concatenate(list(spaced), 1)[:, :-gap], np.concatenate(list(active), 1)[:, :-gap]
    return joined[0].astype(np.float32), joined[1]
