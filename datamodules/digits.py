"""The 8x8 handwritten digits that come with scikit-learn."""

from typing import ClassVar

import torch

from lightning_sym.datamodules._held_out import hold_out
from lightning_sym.datamodules.base import ImageDataModule, LabelledImages


class DigitsDataModule(ImageDataModule):
    """1,797 real handwritten digits of 8x8 pixels, installed with scikit-learn: nothing to download.

    The source's values 0 to 16 become ``round(value * 255 / 16)``. The test set is fixed: 20 % of each class,
    rounded, 359 images in all, whatever ``data_seed`` is; the other 1,438 are the source's training set. The
    arguments are those of :class:`~lightning_sym.datamodules.ImageDataModule`.

    References:
        Alpaydin and Kaynak (1998), "Optical recognition of handwritten digits", UCI Machine Learning
        Repository (its test part, as in scikit-learn).
    """

    source_shape: ClassVar[tuple[int, int, int]] = (1, 8, 8)
    source_classes: ClassVar[int] = 10
    source_sizes: ClassVar[tuple[int, int] | None] = (1438, 359)

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return the fixed training and test parts."""
        from sklearn.datasets import load_digits  # slow to import, so only when the data are read

        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).mul(255 / 16).round().to(torch.uint8).view(-1, *self.source_shape)
        return hold_out(images, torch.from_numpy(labels).long(), "digits", lambda count: round(0.2 * count))
