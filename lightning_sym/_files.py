"""Files that are whole or absent: written under a temporary name, then renamed."""

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
except ImportError:  # not on Windows, where nobody can remove a file that is open
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_WAYS_OUT = {
    errno.ENOSPC: "free space, or choose another folder",
    errno.EDQUOT: "the quota is used up: remove files, or choose another folder",
    errno.EFBIG: "raise the limit on the size of files, or choose another folder",
    errno.ENOENT: "its folder was removed or renamed in the meantime: leave it there, or choose another one",
    errno.ENOTDIR: "a file is in the place of its folder: remove that, or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "get the right to write there, or choose another folder",
    errno.EPERM: "get the right to write there, or choose another folder",
}


def write_atomically(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    The temporary file lies in the same folder. It is removed if anything goes wrong; that of a process that was killed
    is removed by :func:`remove_abandoned`.

    Args:
        path: File to write; its folder is created if absent.
        content: Text is encoded as UTF-8; a function is called with the open file, and writes to it.

    Raises:
        OSError: If the file cannot be written; nothing is left behind. The message is :func:`not_written`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _Raw(temporary)
        while hold(raw.fileno()) is False or not os.fstat(raw.fileno()).st_nlink:  # taken for an abandoned one
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
                    if raw.error is not None:  # writers in C++, such as torch.save, raise an error of their own
                        raise raw.error from None
                    raise
                os.fsync(file.fileno())
                temporary.replace(path)
        except BaseException:  # KeyboardInterrupt too
            with suppress(OSError):  # its folder may be gone
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise the errors of writing a file as :func:`not_written`."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: str | Path, error: OSError) -> OSError:
    """Return the error that says which file could not be written, why, what is still good, and what to do.

    Args:
        path: The file.
        error: What went wrong.
    """
    reason = error.strerror or str(error)
    if reason.startswith("Cannot write "):  # it has been said
        return error
    good = "what it held before is still good" if os.path.exists(path) else "nothing was left behind"
    todo = _WAYS_OUT.get(error.errno or 0, "look after the file system, or choose another folder")
    return OSError(error.errno, f"Cannot write {path}: {reason}; {good}. To go on: {todo}")


class _Raw(io.FileIO):
    """A new file that remembers the error of a write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self.error: OSError | None = None

    def write(self, data: Any) -> Any:
        """Write."""
        try:
            return os.write(self.fileno(), data)
        except OSError as error:
            self.error = error
            raise


def hold(descriptor: int) -> bool | None:
    """Lock an open file for as long as it is open, if nobody else holds it; the kernel lets go of it with the process.

    Args:
        descriptor: The file's.

    Returns:
        Whether it is held by this process now; None where the system has no locks.
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


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove temporary files of processes that were killed while they wrote; those of others stay.

    Args:
        folder: Where to look; folders within it are left alone.

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
