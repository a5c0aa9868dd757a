"""MNIST and Fashion-MNIST."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torchvision
from torch import Tensor

from lightning_sym._files import write_atomically
from lightning_sym.datamodules._downloaded import DownloadedDataModule, damaged, downloaded
from lightning_sym.datamodules.base import LabelledImages


class MNISTDataModule(DownloadedDataModule):
    """60,000 + 10,000 handwritten digits, 1x28x28; read from ``root/MNIST/raw`` as torchvision lays it out.

    Files may be packed (``.gz``) or not. The arguments are ``root`` and ``download`` (see
    ``DownloadedDataModule``) and those of :class:`~lightning_sym.datamodules.ImageDataModule`.

    References:
        LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
    """

    title: ClassVar[str] = "MNIST"
    source: ClassVar[type[torchvision.datasets.MNIST]] = torchvision.datasets.MNIST
    """The torchvision class that knows names, sums and addresses of the files."""
    source_shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    source_classes: ClassVar[int] = 10
    source_sizes: ClassVar[tuple[int, int] | None] = (60_000, 10_000)

    @property
    def folder(self) -> Path:
        """Absolute path of the folder that holds the files."""
        return self._root / self.source.__name__ / "raw"

    def missing(self) -> list[str]:
        """Return the names of the files that are there neither packed nor unpacked."""
        names = [name.removesuffix(".gz") for name, _ in self.source.resources]
        return [name for name in names if not self._path(name).is_file()]

    def fetch(self, names: Sequence[str]) -> None:
        """Download and unpack files, each one whole or not at all."""
        for packed, md5 in self.source.resources:
            name = packed.removesuffix(".gz")
            if name in names:
                urls = [f"{mirror}{packed}" for mirror in self.source.mirrors]
                with downloaded(urls, self.folder, md5) as path:
                    write_atomically(self.folder / name, gzip.decompress(path.read_bytes()))

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return the official training and test sets."""
        self.require_files()
        return self._read("train"), self._read("t10k")

    def _path(self, name: str) -> Path:
        packed = self.folder / f"{name}.gz"
        return packed if packed.is_file() and not (self.folder / name).is_file() else self.folder / name

    def _read(self, prefix: str) -> LabelledImages:
        paths = self._path(f"{prefix}-images-idx3-ubyte"), self._path(f"{prefix}-labels-idx1-ubyte")
        images, labels = self._read_idx(paths[0], 3), self._read_idx(paths[1], 1)
        if tuple(images.shape[1:]) != self.source_shape[1:]:
            raise ValueError(damaged(self.title, paths[0], f"images of {list(images.shape[1:])} pixels"))
        if len(images) != len(labels):
            raise ValueError(damaged(self.title, paths[1], f"{len(labels)} labels for {len(images)} images"))
        if len(labels) and int(labels.max()) >= self.source_classes:
            raise ValueError(damaged(self.title, paths[1], f"a label of {int(labels.max())}"))
        return LabelledImages(images[:, None], labels.long())

    def _read_idx(self, path: Path, axes: int) -> Tensor:
        """Read an IDX file: 0, 0, 8 for uint8, the number of axes, big-endian sizes, the values."""
        try:
            data = path.read_bytes()
            if path.suffix == ".gz":
                data = gzip.decompress(data)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(damaged(self.title, path, f"cannot be unpacked: {error}")) from error
        start = 4 + 4 * axes
        if len(data) < start or data[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(damaged(self.title, path, f"no header of uint8 values with {axes} axes"))
        shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
        if len(data) - start != math.prod(shape):
            raise ValueError(
                damaged(self.title, path, f"{len(data) - start} values where its header says {math.prod(shape)}")
            )
        if not math.prod(shape):
            raise ValueError(damaged(self.title, path, "it holds nothing"))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)


class FashionMNISTDataModule(MNISTDataModule):
    """60,000 + 10,000 pictures of clothes, 1x28x28; read from ``root/FashionMNIST/raw``.

    Otherwise as :class:`MNISTDataModule`.

    References:
        Xiao, Rasul and Vollgraf (2017), "Fashion-MNIST", arXiv:1708.07747.
    """

    title: ClassVar[str] = "Fashion-MNIST"
    source: ClassVar[type[torchvision.datasets.MNIST]] = torchvision.datasets.FashionMNIST
    source_names: ClassVar[tuple[str, ...] | None] = tuple(torchvision.datasets.FashionMNIST.classes)
