"""Files that are complete or absent: written under a temporary name, then renamed; and safe reading of documents."""

import errno
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

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
_LONGEST = 10_000_000  # characters
_LONGEST_JSON = 100_000_000  # bytes; limit of the header of safetensors files
_DEEPEST = 50  # levels
_MOST = 50_000  # values, counted once per alias


def write_atomically(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    The temporary file is in the same folder. It is removed after an error; :func:`remove_abandoned` removes that of a
    killed process.

    Args:
        path: File to write; its folder is created if absent.
        content: Text is encoded as UTF-8; a function is called with the open file and writes to it.

    Raises:
        ValueError: If the path names no file.
        OSError: If the file cannot be written; no temporary file remains. :func:`not_written` makes the message.
    """
    path = Path(path)
    if not path.name:
        raise ValueError(f"the path of the file is empty or a folder, got {str(path)!r}; pass that of a file.")
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


class TooLargeError(ValueError):
    """A document exceeds the limits of recipes, manifests and tables."""


class LimitedLoader(yaml.SafeLoader):
    """Reads YAML of plain values, and counts the values before making them."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._count = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next value, as nodes.

        Raises:
            TooLargeError: If there are too many, or they are nested too deeply.
        """
        self._count, self._depth = self._count + 1, self._depth + 1
        if self._depth > _DEEPEST:
            raise TooLargeError(f"it is nested more than {_DEEPEST} levels deep")
        if self._count > _MOST:
            raise TooLargeError(f"it holds more than {_MOST} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class StrictLoader(LimitedLoader):
    """Read YAML and refuse duplicate keys, which would silently lose a value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping.

        Raises:
            ConstructorError: If a key is duplicate.
        """
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in found:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
                found.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str, source: str, loader: type[LimitedLoader] = LimitedLoader) -> Any:
    """Parse YAML within limits.

    Args:
        text: The YAML.
        source: Origin of the text, for messages.
        loader: Class of the loader.

    Raises:
        YAMLError: If it is not valid YAML.
        TooLargeError: If it is too long, nested too deeply, holds itself or too many values.
    """
    try:
        if len(text) > _LONGEST:
            raise TooLargeError(f"it is longer than {_LONGEST} characters")
        opened = loader(text)
        try:
            node = opened.get_single_node()
            _expanded(node, {})
            return None if node is None else opened.construct_document(node)
        finally:
            opened.dispose()
    except TooLargeError as error:
        raise TooLargeError(f"{source} is not read: {error}.") from None
    except ValueError as error:  # an invalid number or date
        raise yaml.YAMLError(str(error)) from None


def _expanded(node: yaml.Node | None, sizes: dict[int, int]) -> int:
    """Return the number of values of a node with expanded aliases; enclosing nodes still have size 0."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise TooLargeError("it contains itself, by an alias within its own anchor")
        return sizes[id(node)]
    sizes[id(node)] = 0
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    entries = [entry for pair in inner for entry in pair] if isinstance(node, yaml.MappingNode) else inner
    size = 1 + sum(_expanded(entry, sizes) for entry in entries)
    if size > _MOST:
        raise TooLargeError(f"it holds more than {_MOST} values with expanded aliases")
    sizes[id(node)] = size
    return size


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a file of JSON; None if it cannot be read, is damaged, or holds no value of this kind."""
    try:
        content = load_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the second: neither text nor JSON
        return None
    return content if isinstance(content, kind) else None


def load_json(text: str | bytes) -> Any:
    """Parse JSON within limits.

    Raises:
        ValueError: If it is not valid JSON, too long or nested too deeply.
    """
    if len(text) > _LONGEST_JSON:
        raise TooLargeError(f"it is longer than {_LONGEST_JSON} bytes")
    try:
        content = json.loads(text)
    except RecursionError:
        raise TooLargeError(f"it is nested more than {_DEEPEST} levels deep") from None
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(_DEEPEST):
        inner = (entry for one in level for entry in (one.values() if isinstance(one, dict) else one))
        level = [entry for entry in inner if isinstance(entry, dict | list)]
        if not level:
            return content
    raise TooLargeError(f"it is nested more than {_DEEPEST} levels deep")
