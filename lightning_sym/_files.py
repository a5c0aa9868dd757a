"""Files that are complete or absent: written under a temporary name, then renamed."""

import errno
import io
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # on Windows, where open files cannot be removed
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_WAYS_OUT = {
    errno.ENOSPC: "free space, or choose another folder",
    errno.EDQUOT: "the quota is used up: remove files, or choose another folder",
    errno.EFBIG: "raise the limit on the size of files, or choose another folder",
    errno.ENOENT: "its folder was removed or renamed: keep the folder, or choose another one",
    errno.ENOTDIR: "a file has the name of its folder: remove that file, or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "get permission to write there, or choose another folder",
    errno.EPERM: "get permission to write there, or choose another folder",
}


def write_atomically(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    The temporary file is in the same folder. It is removed after an error; :func:`remove_abandoned` removes that of a
    killed process.

    Args:
        path: File to write; its folder is created if absent.
        content: Text is encoded as UTF-8; a function is called with the open file and writes to it.

    Raises:
        OSError: If the file cannot be written; no temporary file remains. :func:`not_written` makes the message.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _Raw(temporary)
        while hold(raw.fileno()) is False or not os.fstat(raw.fileno()).st_nlink:  # removed as abandoned
            raw.close()
            raw = _Raw(temporary)
        try:
            with io.BufferedWriter(raw, 1 << 20) as file:
                try:
                    if callable(content):
                        content(file)
                    else:
                        file.write(content.encode() if isinstance(content, str) else content)
                    file.flush()
                except Exception:
                    if raw.error is not None:  # writers in C++, such as torch.save, hide the original error
                        raise raw.error from None
                    raise
                os.fsync(file.fileno())
                temporary.replace(path)
        except BaseException:  # including KeyboardInterrupt
            with suppress(OSError):  # the folder may no longer exist
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert errors of writing a file by :func:`not_written`."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: str | Path, error: OSError) -> OSError:
    """Return an error that names the file, the reason, the state of its old content, and the remedy.

    Args:
        path: The file.
        error: The original error.
    """
    reason = error.strerror or str(error)
    if reason.startswith("Cannot write "):  # already converted
        return error
    good = "its previous content is intact" if os.path.exists(path) else "no file remains"
    todo = _WAYS_OUT.get(error.errno or 0, "check the file system, or choose another folder")
    return OSError(error.errno, f"Cannot write {path}: {reason}; {good}. To go on: {todo}")


class _Raw(io.FileIO):
    """A new file that records the error of a write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self.error: OSError | None = None

    def write(self, data: Any) -> Any:
        """Write, and record an error."""
        try:
            return os.write(self.fileno(), data)
        except OSError as error:
            self.error = error
            raise


def hold(descriptor: int) -> bool | None:
    """Lock an open file until it is closed, unless another process holds it; the kernel releases it with the process.

    Args:
        descriptor: Descriptor of the file.

    Returns:
        Whether this process holds the lock; None if the system has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_temporary(path: Path) -> bool:
    """Return whether a file name is one of the temporary names used here for incomplete checkpoints."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove temporary files of processes that were killed while writing; files of running processes stay.

    Args:
        folder: Folder to search, without its subfolders.

    Returns:
        The files that were removed.
    """
    removed = []
    for path in folder.glob(".*.tmp") if fcntl is not None else ():
        if not _TEMPORARY.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError), path.open("r+b") as file:
            if hold(file.fileno()):
                path.unlink()
                removed.append(path)
    return removed
