"""Files that are whole or absent: written under a temporary name, then renamed."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    The temporary file lies in the same folder and is removed if anything goes wrong.

    Args:
        path: File to write; its folder is created if absent.
        content: Text is encoded as UTF-8; a function is called with the open file, and writes to it.

    Raises:
        OSError: If the folder cannot be written to or the disk is full; nothing is left behind. The message
            names the path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # KeyboardInterrupt too
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"Cannot write {path}: {reason}; nothing was left behind. Free space or choose another folder",
        ) from error
