"""What the datamodules share whose files are downloaded: where files lie, and how they get there whole."""

import socket
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar, Literal

from torchvision.datasets.utils import download_url

from lightning_sym.datamodules.base import ImageDataModule
from lightning_sym.datamodules.transforms import ImageTransform

# Without a limit, a network that swallows packets would hold the run up for ever.
_TIMEOUT_S = 30.0


class DownloadedDataModule(ImageDataModule):
    """Base of the datamodules whose files torchvision knows where to get.

    Args:
        root: Folder that holds, or will hold, the files, laid out as torchvision does.
        download: Get missing files from the network. False: missing files are an error.
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
    """What messages call the data."""
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

    @abstractmethod
    def missing(self) -> list[str]:
        """Return the names of the files that are not in :attr:`folder`."""

    @abstractmethod
    def fetch(self, names: Sequence[str]) -> None:
        """Download files and put them into :attr:`folder`, each one whole or not at all."""

    def prepare_data(self) -> None:
        """Download what is missing; called on one process (of each node).

        Raises:
            FileNotFoundError: If files are missing and cannot be downloaded; says which, where and what to
                do.
        """
        missing = self.missing()
        if not missing:
            return
        if not self._download:
            raise FileNotFoundError(self._absent(missing, "download is false"))
        try:
            with _network_timeout():
                self.fetch(missing)
        except (OSError, RuntimeError, EOFError, HTTPException) as error:  # URLError is an OSError
            reason = " ".join(str(getattr(error, "reason", None) or error or type(error).__name__).split())
            raise FileNotFoundError(self._absent(missing, f"the download failed: {reason.rstrip('.')}")) from error

    def require_files(self) -> None:
        """Check that every file is there.

        Raises:
            FileNotFoundError: If one is not; says which, where and what to do.
        """
        if missing := self.missing():
            raise FileNotFoundError(self._absent(missing, "nothing was downloaded yet"))

    def _absent(self, missing: Sequence[str], reason: str) -> str:
        ways = "copy them there, or set root to a folder that has them (now {!r})".format(self.hparams.get("root"))
        if not self._download:
            ways += ", or set download to true"
        elif reason.startswith("nothing"):
            ways += ", or call prepare_data() first, which downloads them"
        return f"{self.title} is not in {self.folder} (missing: {', '.join(missing)}; {reason}); {ways}."


def damaged(title: str, path: Path, problem: str) -> str:
    """Return the sentence about a file that is not what it should be."""
    return f"{title}: the file {path} is damaged ({problem}); delete it and run again to download it anew."


@contextmanager
def downloaded(urls: Sequence[str], folder: Path, md5: str) -> Iterator[Path]:
    """Download a file into a temporary folder inside ``folder``, which is removed at the end, and check it.

    Args:
        urls: Where to get it; the next one is tried if one fails.
        folder: Created if absent. On the same disk as the final place, so that files can be moved atomically.
        md5: The sum that the file must have.

    Yields:
        Path of the complete file.

    Raises:
        OSError: If no address gives the file.
        RuntimeError: If what they give has another sum.
        HTTPException: If a server's answer makes no sense.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        for url in urls:
            try:
                download_url(url, temporary, md5=md5)
            except (OSError, RuntimeError, HTTPException):
                if url == urls[-1]:
                    raise
            else:
                yield Path(temporary) / url.rpartition("/")[2]
                return


@contextmanager
def _network_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
