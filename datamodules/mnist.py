"""MNIST and Fashion-MNIST."""

from pathlib import Path
from typing import ClassVar

import torchvision
from torchvision.datasets.mnist import read_image_file, read_label_file

from lightning_sym.datamodules._downloaded import DownloadedDataModule
from lightning_sym.datamodules.base import LabelledImages


class MNISTDataModule(DownloadedDataModule):
    """60,000 + 10,000 handwritten digits, 1x28x28; read from ``root/MNIST/raw`` as torchvision lays it out.

    ``prepare_data`` unpacks packed files (``.gz``) that are present. The arguments are ``root`` and
    ``download`` (see ``DownloadedDataModule``) and those of :class:`~lightning_sym.datamodules.ImageDataModule`.

    References:
        LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
    """

    title: ClassVar[str] = "MNIST"
    source: ClassVar[type[torchvision.datasets.MNIST]] = torchvision.datasets.MNIST
    source_shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    source_classes: ClassVar[int] = 10
    source_sizes: ClassVar[tuple[int, int] | None] = (60_000, 10_000)

    @property
    def folder(self) -> Path:
        """Absolute path of the folder that holds the files."""
        return self._root / self.source.__name__ / "raw"

    @property
    def names(self) -> list[str]:
        """Names of the four files, unpacked."""
        return [name.removesuffix(".gz") for name, _ in self.source.resources]

    def read(self, train: bool) -> LabelledImages:
        """Return the official training or test set."""
        prefix = self.folder / ("train" if train else "t10k")
        images = self.opened(prefix.with_name(f"{prefix.name}-images-idx3-ubyte"), read_image_file)
        labels = self.opened(prefix.with_name(f"{prefix.name}-labels-idx1-ubyte"), read_label_file)
        return LabelledImages(images[:, None], labels)


class FashionMNISTDataModule(MNISTDataModule):
    """60,000 + 10,000 pictures of clothes, 1x28x28; read from ``root/FashionMNIST/raw``.

    Otherwise identical to :class:`MNISTDataModule`.

    References:
        Xiao, Rasul and Vollgraf (2017), "Fashion-MNIST", arXiv:1708.07747.
    """

    title: ClassVar[str] = "Fashion-MNIST"
    source: ClassVar[type[torchvision.datasets.MNIST]] = torchvision.datasets.FashionMNIST
    source_names: ClassVar[tuple[str, ...] | None] = tuple(torchvision.datasets.FashionMNIST.classes)
