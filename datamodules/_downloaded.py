"""Base of the datamodules of torchvision's downloaded data sets: file locations and error messages."""

import shutil
import socket
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lightning_sym.datamodules.base import ImageDataModule, LabelledImages
from lightning_sym.datamodules.transforms import ImageTransform

# Without a timeout, a network that drops packets would block the run for ever.
_TIMEOUT_S = 30.0
# Exceptions that torchvision raises for a failed download, and for an invalid file.
_FAILED = (OSError, RuntimeError, EOFError, HTTPException)  # URLError is an OSError
_DAMAGED = (RuntimeError, AssertionError, ValueError, TypeError, KeyError)
Content = TypeVar("Content")


class DownloadedDataModule(ImageDataModule):
    """Base of the datamodules with files that torchvision downloads and reads.

    Args:
        root: Folder of the files, in torchvision's layout; created if missing.
        download: Download missing files. False: missing files are an error.
        batch_size: See :class:`~lightning_sym.datamodules.ImageDataModule`.
        eval_batch_size: See there.
        train_fraction: See there.
        val_fraction: See there.
        max_samples: See there.
        data_seed: See there.
        shift: See there.
        shift_fill: See there.
        flip: See there.
        mean: See there.
        std: See there.
        transforms: See there.

    Raises:
        ValueError: If an argument is out of its range.
    """

    title: ClassVar[str]
    """Name of the data in messages."""
    source: ClassVar[type[Any]]
    """The torchvision class that defines names, checksums and addresses of the files."""
    location_arguments: ClassVar[tuple[str, ...]] = ("root", "download")

    def __init__(
        self,
        root: str = "data",
        download: bool = True,
        batch_size: int = 32,
        eval_batch_size: int = 500,
        train_fraction: float = 1.0,
        val_fraction: float = 0.1,
        max_samples: int | None = None,
        data_seed: int = 0,
        shift: int = 0,
        shift_fill: float | Literal["mean"] = "mean",
        flip: bool = False,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        transforms: list[ImageTransform] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            train_fraction=train_fraction,
            val_fraction=val_fraction,
            max_samples=max_samples,
            data_seed=data_seed,
            shift=shift,
            shift_fill=shift_fill,
            flip=flip,
            mean=mean,
            std=std,
            transforms=transforms,
        )
        self._root = Path(root).expanduser().absolute()
        self._download = download

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Absolute path of the folder that holds the files."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of all files in :attr:`folder` that are needed."""

    @abstractmethod
    def read(self, train: bool) -> LabelledImages:
        """Return the official training or test set, opening files with :meth:`opened`."""

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return the official training and test sets.

        Raises:
            FileNotFoundError: If a file is missing; the message names the files and the remedy.
            ValueError: If a file is damaged; the message names the file and the remedy.
        """
        if missing := self._missing():
            raise FileNotFoundError(self._absent(missing, "nothing was downloaded yet"))
        return self.read(train=True), self.read(train=False)

    def prepare_data(self) -> None:
        """Download and unpack missing files, each completely or not at all. Called on one process per node.

        Raises:
            FileNotFoundError: If files are missing and cannot be downloaded; the message names them and the remedy.
        """
        missing = self._missing()
        if not missing:
            return
        if not self._download:
            raise FileNotFoundError(self._absent(missing, "download is false"))
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_TIMEOUT_S)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            # On the same disk as the destination, so that verified files can be moved there atomically.
            with tempfile.TemporaryDirectory(dir=self._root, prefix=".download-") as temporary:
                complete = Path(temporary) / self.folder.relative_to(self._root)
                if self.folder.is_dir():  # packed files that are present need not be downloaded
                    shutil.copytree(self.folder, complete)
                self.source(temporary, download=True)
                self.folder.mkdir(parents=True, exist_ok=True)
                for name in missing:
                    (complete / name).replace(self.folder / name)
        except _FAILED as error:
            reason = " ".join(str(getattr(error, "reason", None) or error or type(error).__name__).split())
            raise FileNotFoundError(self._absent(missing, f"the download failed: {reason.rstrip('.')}")) from error
        finally:
            socket.setdefaulttimeout(timeout)

    def opened(self, path: Path, reader: Callable[[Path], Content]) -> Content:
        """Read a file or folder with one of torchvision's functions.

        Raises:
            ValueError: If it cannot be read; the message names it and the remedy.
        """
        try:
            return reader(path)
        except _DAMAGED as error:
            raise ValueError(
                f"{self.title}: {path} is damaged ({str(error).rstrip('.') or 'it has a wrong header'}); delete it and "
                "run again to download it."
            ) from error

    def _missing(self) -> list[str]:
        return [name for name in self.names if not (self.folder / name).is_file()]

    def _absent(self, missing: Sequence[str], reason: str) -> str:
        ways = "copy them there, or set root to a folder that has them (now {!r})".format(self.hparams.get("root"))
        if not self._download:
            ways += ", or set download to true"
        elif reason.startswith("nothing"):
            ways += ", or call prepare_data() first, which downloads them"
        return f"{self.title} is not in {self.folder} (missing: {', '.join(missing)}; {reason}); {ways}."
