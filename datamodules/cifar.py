"""CIFAR-10 and CIFAR-100."""

from pathlib import Path
from typing import ClassVar

import torch
import torchvision

from lightning_sym.datamodules._downloaded import DownloadedDataModule
from lightning_sym.datamodules.base import LabelledImages


class CIFAR10DataModule(DownloadedDataModule):
    """50,000 + 10,000 photographs of 10 kinds of things, 3x32x32; read from ``root/cifar-10-batches-py``.

    The arguments are ``root`` and ``download`` (see ``DownloadedDataModule``) and those of
    :class:`~lightning_sym.datamodules.ImageDataModule`.

    References:
        Krizhevsky (2009), "Learning multiple layers of features from tiny images".
    """

    title: ClassVar[str] = "CIFAR-10"
    source: ClassVar[type[torchvision.datasets.CIFAR10]] = torchvision.datasets.CIFAR10
    source_shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    source_classes: ClassVar[int] = 10
    source_sizes: ClassVar[tuple[int, int] | None] = (50_000, 10_000)
    source_names: ClassVar[tuple[str, ...] | None] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )

    @property
    def folder(self) -> Path:
        """Absolute path of the folder that holds the files."""
        return self._root / str(self.source.base_folder)

    @property
    def names(self) -> list[str]:
        """Names of the batches and of the list of classes."""
        return [*(name for name, _ in [*self.source.train_list, *self.source.test_list]), self.source.meta["filename"]]

    def read(self, train: bool) -> LabelledImages:
        """Return the official training or test set.

        Pickles can run arbitrary code: torchvision verifies the published MD5 sums of all files before it opens one.
        """
        data = self.opened(self.folder, lambda _: self.source(self._root, train=train))
        return LabelledImages(torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets))


class CIFAR100DataModule(CIFAR10DataModule):
    """50,000 + 10,000 photographs of 100 kinds of things, 3x32x32; read from ``root/cifar-100-python``.

    Otherwise identical to :class:`CIFAR10DataModule`. Class names are the class numbers.
    """

    title: ClassVar[str] = "CIFAR-100"
    source: ClassVar[type[torchvision.datasets.CIFAR10]] = torchvision.datasets.CIFAR100
    source_classes: ClassVar[int] = 100
    source_names: ClassVar[tuple[str, ...] | None] = None
