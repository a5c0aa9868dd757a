"""The 8x8 handwritten digits that come with scikit-learn."""

import functools
import importlib.util
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_sym.datamodules._held_out import hold_out
from lightning_sym.datamodules.base import ImageDataModule, LabelledImages


class DigitsDataModule(ImageDataModule):
    """1,797 real handwritten digits of 8x8 pixels, installed with scikit-learn: nothing to download.

    The source's values 0 to 16 become ``round(value * 255 / 16)``. The test set is fixed and independent of
    ``data_seed``: 20 % of each class, rounded, 359 images in all. The other 1,438 are the source's training set. The
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
        table = _table()
        images = table[:, :-1].mul(255 / 16).round().to(torch.uint8).view(-1, *self.source_shape)
        return hold_out(images, table[:, -1].long(), "digits", lambda count: round(0.2 * count))


@functools.cache
def _table() -> Tensor:
    """Return scikit-learn's rows, 64 pixels from 0 to 16 and the label, of shape ``[1797, 65]``, float64.

    The file is that of ``load_digits``, read once per process: importing scikit-learn takes a second, reading 30 ms.
    """
    package = importlib.util.find_spec("sklearn")  # imports nothing
    folders = (package and package.submodule_search_locations) or ()
    files = [file for folder in folders if (file := Path(folder, "datasets", "data", "digits.csv.gz")).is_file()]
    if not files:
        raise FileNotFoundError(
            "scikit-learn's digits (sklearn/datasets/data/digits.csv.gz) are not installed; pip install scikit-learn."
        )
    return torch.from_numpy(np.loadtxt(files[0], delimiter=","))
