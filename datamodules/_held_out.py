"""A fixed test set for data that have none."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sym._random import generator
from lightning_sym.datamodules.base import LabelledImages


def hold_out(
    images: Tensor, labels: Tensor, key: str, count: Callable[[int], int]
) -> tuple[LabelledImages, LabelledImages]:
    """Split images into training and test sets, stratified by class and always in the same way.

    Args:
        images: Shape ``[N, C, H, W]``, uint8.
        labels: Shape ``[N]``, int64.
        key: Name of the source, which seeds the split.
        count: Maps the number of images of a class to its number of test images.

    Returns:
        Training images in the order of the source, and test images in random order, so that the first few cover all
        classes.
    """
    chosen = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator("hold_out", key, label))
        chosen.append(members[order[: count(len(members))]])
    test = torch.cat(chosen)
    test = test[torch.randperm(len(test), generator=generator("hold_out", key, "order"))]
    rest = torch.ones(len(labels), dtype=torch.bool).index_fill_(0, test, False)
    return LabelledImages(images[rest], labels[rest]), LabelledImages(images[test], labels[test])
