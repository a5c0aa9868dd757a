"""CIFAR-10 and CIFAR-100."""

import hashlib
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torchvision

from lightning_sym._files import write_atomically
from lightning_sym.datamodules._downloaded import DownloadedDataModule, damaged, downloaded
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
    """The torchvision class that knows names, sums and addresses of the files."""
    label_key: ClassVar[str] = "labels"
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

    def missing(self) -> list[str]:
        """Return the names of the files that are not there."""
        names = [name for name, _ in [*self.source.train_list, *self.source.test_list]]
        return [name for name in names if not (self.folder / name).is_file()]

    def fetch(self, names: Sequence[str]) -> None:
        """Download the archive and unpack the files that are asked for, each one whole or not at all."""
        with downloaded([self.source.url], self._root, self.source.tgz_md5) as path:
            try:
                with tarfile.open(path) as archive:
                    for name in names:
                        content = archive.extractfile(f"{self.source.base_folder}/{name}")
                        if content is None:
                            raise RuntimeError(f"{name} is not a file in {self.source.url}")
                        write_atomically(self.folder / name, content.read())
            except (tarfile.TarError, zlib.error, KeyError) as error:
                raise RuntimeError(f"{self.source.url} cannot be unpacked: {error}") from error

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return the official training and test sets."""
        self.require_files()
        return self._read(self.source.train_list), self._read(self.source.test_list)

    def _read(self, files: Sequence[Sequence[str]]) -> LabelledImages:
        images, labels = [], []
        for name, md5 in files:
            path = self.folder / name
            data = path.read_bytes()
            # A pickle can run any code. These bytes are unpickled only if they are the published ones, by the
            # sum that torchvision ships; the bytes that were checked are the bytes that are used.
            found = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if found != md5:
                raise ValueError(damaged(self.title, path, f"its MD5 sum is {found}, not {md5}, so it was not opened"))
            entry = pickle.loads(data, encoding="latin1")
            images.append(torch.from_numpy(np.ascontiguousarray(entry["data"])).view(-1, *self.source_shape))
            labels.append(torch.tensor(entry[self.label_key], dtype=torch.int64))
        return LabelledImages(torch.cat(images), torch.cat(labels))


class CIFAR100DataModule(CIFAR10DataModule):
    """50,000 + 10,000 photographs of 100 kinds of things, 3x32x32; read from ``root/cifar-100-python``.

    Otherwise as :class:`CIFAR10DataModule`. Classes are named by their numbers.
    """

    title: ClassVar[str] = "CIFAR-100"
    source: ClassVar[type[torchvision.datasets.CIFAR10]] = torchvision.datasets.CIFAR100
    label_key: ClassVar[str] = "fine_labels"
    source_classes: ClassVar[int] = 100
    source_names: ClassVar[tuple[str, ...] | None] = None
