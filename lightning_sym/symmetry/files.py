"""Elements applied to checkpoints on disk, shard by shard, with one tensor in memory at a time."""

import contextlib
import functools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_sym._checkpoint_files import SAFETENSORS, other_format
from lightning_sym._checks import finite_or_mask
from lightning_sym._files import hold, is_temporary, load_json, not_written, write_atomically
from lightning_sym._text import nearest
from lightning_sym.symmetry.views import NamedTensors, fitting

# Names of dtypes in the format.
_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
# Dtypes of tensors that elements act on; 16-bit tensors are transformed in single precision.
_MOVABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: The file.
        key: Its name there.
        shape: Its shape.
        dtype: Its type.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Shards:
    """A checkpoint in safetensors, in one file or several.

    Args:
        path: The file, or the index of several (``model.safetensors.index.json``).

    Attributes:
        files: The files, in order.
        index: The index; None for one file.
        tensors: All tensors, by name: file by file, in the order of their bytes.
        metadata: The metadata in the header of each file.

    Raises:
        ValueError: If a file is missing, damaged or no safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.index = path if path.name.endswith(".json") else None
        if not path.is_file():
            raise ValueError(f"There is no file {path}; expected a checkpoint in safetensors, or the index of several.")
        placed = {} if self.index is None else read_index(path)
        self.files = [path] if self.index is None else sorted({path.parent / file for file in placed.values()})
        self.tensors: dict[str, Stored] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        for file in self.files:
            self.metadata[file], held = _read_header(file)
            for stored in held:
                if stored.key in self.tensors:
                    raise ValueError(f"{file} holds {stored.key}, as {self.tensors[stored.key].file} does.")
                self.tensors[stored.key] = stored
        for key, name in placed.items():
            if key not in self.tensors or self.tensors[key].file != path.parent / name:
                raise ValueError(f"{path.parent / name} holds no tensor {key}, which {path} says it does.")

    def read(self, stored: Stored) -> Tensor:
        """Read one tensor."""
        with safe_open(stored.file, "pt") as file:  # type: ignore[no-untyped-call]
            tensor: Tensor = file.get_tensor(stored.key)
        return tensor

    def read_all(self) -> dict[str, Tensor]:
        """Return all tensors, by name, as memory maps of the files."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
                for stored in (one for one in self.tensors.values() if one.file == file):
                    found[stored.key] = opened.get_tensor(stored.key)
        return found


def read_index(path: Path) -> dict[str, str]:
    """Read the file name of each tensor from an index.

    Raises:
        ValueError: If it is no index, or a file is missing or outside its folder.
    """
    try:
        content = load_json(path.read_text(encoding="utf-8"))
    except ValueError:  # neither text nor JSON
        content = None
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not (isinstance(placed, dict) and placed and all(isinstance(file, str) for file in placed.values())):
        raise ValueError(f"{path} is no index of a checkpoint; expected JSON with a weight_map from tensors to files.")
    if outside := next((file for file in placed.values() if Path(file).name != file), None):
        raise ValueError(f"{path} names the file {outside!r}; expected files in its folder.")
    missing = sorted({file for file in placed.values() if not (path.parent / file).is_file()})
    if missing:
        raise ValueError(f"{missing[0]} is missing beside {path}, which names {len(set(placed.values()))} files.")
    return dict(placed)


def _read_header(file: Path) -> tuple[dict[str, str], list[Stored]]:
    """Check that a file is complete; return its metadata, and its tensors in the order of their bytes."""
    try:
        with safe_open(file, "pt"):  # type: ignore[no-untyped-call]
            pass  # it checks names, shapes, offsets and the length
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = load_json(opened.read(length))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        entries = sorted(header.items(), key=lambda one: one[1]["data_offsets"])
        return metadata, [Stored(file, key, tuple(one["shape"]), _DTYPES[one["dtype"]]) for key, one in entries]
    except KeyError as error:
        raise ValueError(f"{file} holds tensors of type {error}, which torch does not have.") from None
    except (SafetensorError, ValueError) as error:
        said = f"{file} is damaged or no safetensors ({error}); fetch or write it again."
        raise ValueError(other_format(file, SAFETENSORS) or said) from None


class _Weights(NamedTensors):
    """Tensors of a checkpoint by the network's names, each read on access."""

    def __init__(self, shards: Shards, places: Mapping[str, Stored]) -> None:
        self.shards, self.places, self._names = shards, places, places

    def __getitem__(self, name: str) -> Tensor:
        stored = self.places[name]
        tensor = self.shards.read(stored)
        if tensor.is_floating_point():
            if tensor.dtype not in _MOVABLE:
                raise ValueError(
                    f"{stored.file} holds {stored.key} as {tensor.dtype}; expected numbers of 16 bits or more."
                )
            if not finite_or_mask(tensor):
                raise ValueError(f"{stored.file} holds {stored.key} with values that are not finite.")
            tensor = tensor.float() if tensor.element_size() < 4 else tensor
        return tensor


def named_for(
    shards: Shards,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    needed: Sequence[str],
    leave: Sequence[str],
) -> dict[str, str]:
    """Map the names of a checkpoint's tensors to the network's names.

    Args:
        shards: The checkpoint. Its names may have one prefix more or less than the network's.
        shapes: Shapes of the network's tensors, each by its first name.
        names: The first name of each place in the network; tied weights have several places.
        needed: First names that must exist.
        leave: Patterns of names in the checkpoint, for tensors that the network does not have.

    Raises:
        ValueError: If a tensor is missing, unexpected or of another shape.
    """

    def named(longer: str, shorter: str) -> dict[str, str]:
        return {
            key: names[own]
            for key in shards.tensors
            for own in [longer + key if longer else key.removeprefix(shorter)]
            if own in names and key.startswith(shorter)
        }

    starts = [("", "")]
    if needed:
        places = [place for place, first in names.items() if first == needed[0]]
        for key, place in ((key, place) for key in shards.tensors for place in places):
            if place.endswith(f".{key}"):
                starts.append((place.removesuffix(key), ""))
            elif key.endswith(f".{place}"):
                starts.append(("", key.removesuffix(place)))
    found = max((named(*start) for start in dict.fromkeys(starts)), key=lambda one: len(set(one.values()) & {*needed}))
    held = set(found.values())
    source = shards.index or shards.files[0]
    if missing := next((name for name in needed if name not in held), None):
        raise ValueError(
            f"{source} holds no {missing}, which the traced network has; expected a checkpoint of its architecture."
            f"{nearest(missing, shards.tensors)}"
        )
    for key, name in found.items():
        if shards.tensors[key].shape != shapes[name]:
            raise ValueError(
                f"{source} holds {key} of shape {list(shards.tensors[key].shape)}; expected {list(shapes[name])}, as "
                "in the traced network: the element is of another configuration."
            )
    surplus = [key for key in shards.tensors if key not in found and not any(fnmatch(key, own) for own in leave)]
    if surplus:
        raise ValueError(
            f"{source} holds {surplus[0]}, which the traced network does not have; expected a checkpoint of its "
            f"architecture, or leave=[{surplus[0]!r}] (patterns) for tensors to copy unchanged."
        )
    return found


def write_moved(
    shards: Shards,
    named: Mapping[str, str],
    moved: Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]],
    moving: Container[str],
    out: str | Path,
) -> Path:
    """Write a checkpoint with new numbers; names, order, dtypes, shards and metadata stay the same.

    Args:
        shards: The checkpoint.
        named: The network's name of each tensor that the element moves or depends on.
        moved: Yields the transformed tensors, in the given order, or earlier.
        moving: Names of the tensors to transform.
        out: A folder, or, for a single file, the new file.

    Returns:
        The path of the new index, or of the single file.

    Raises:
        ValueError: If a file exists already, or a number is not finite. No file remains.
        OSError: If the folder cannot be written to. No file remains.
    """
    out = Path(out)
    to_file = out.suffix == ".safetensors"
    if to_file and shards.index is not None:
        raise ValueError(f"out is the file {out}, and the checkpoint has several; expected a folder.")
    target = {file: out.name if to_file else file.name for file in shards.files}
    names = [*target.values(), *([] if shards.index is None else [shards.index.name])]  # readers open the index first
    folder = out.parent if to_file else out
    places = {name: shards.tensors[key] for key, name in reversed(list(named.items()))}
    early: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        while name not in early:
            early.update([next(results)])
        return early.pop(name)

    planned: dict[str, dict[str, Planned]] = {file: {} for file in target.values()}
    for key, stored in shards.tensors.items():
        name = named.get(key, "")
        read = functools.partial(take, name) if name in moving else functools.partial(shards.read, stored)
        shared = name if name in moving else None
        planned[target[stored.file]][key] = Planned(stored.shape, stored.dtype, read, shared)
    order = dict.fromkeys(named[key] for tensors in planned.values() for key in _ordered(tensors) if key in named)
    results = moved(_Weights(shards, {name: places[name] for name in order}))
    with new_folder(folder, names) as scratch:
        write_files(scratch, planned, {target[file]: own for file, own in shards.metadata.items()})
        if shards.index is not None:
            shutil.copyfile(shards.index, scratch / shards.index.name)
    return folder / names[-1]


@dataclass(frozen=True)
class Planned:
    """A tensor to write.

    Attributes:
        shape: Its shape.
        dtype: Its type in the file.
        read: Computes it, in any floating type if the file's is floating.
        shared: A name that tensors with the same numbers have in common: only the first is computed. None for none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    shared: str | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def new_folder(out: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder for files; it becomes ``out`` by one rename, or vanishes after an error.

    Args:
        out: A path without a file or folder, or with an empty folder; with ``names`` also a folder with other files.
            Into a folder with files, or with a file system of its own, they are moved one by one.
        names: Names of the files, in the order in which they are moved then.

    Raises:
        ValueError: If there is a file, or a folder with files.
        OSError: If it cannot be written. No file remains.
    """
    if there := next((out / name for name in names if (out / name).exists()), None):
        raise ValueError(f"{there} is there already; expected a folder without it.")
    if out.exists() and not (out.is_dir() and (names or all(is_temporary(path) for path in out.iterdir()))):
        raise ValueError(f"{out} is there already; expected a new or an empty folder.")
    inside = out.exists() and (bool(names) or out.is_mount() or any(out.iterdir()))
    base = out if inside else out.absolute().parent
    made = [path for path in (base, *base.parents) if not path.exists()]
    scratch = base / f".{out.name}.{secrets.token_hex(8)}.tmp"
    placed: list[Path] = []
    try:
        _remove_abandoned(base, out.name)
        scratch.mkdir(parents=True)
        with _held(scratch):
            yield scratch
            if inside:
                # Readers open the configuration first.
                for name in names or sorted(os.listdir(scratch), key=lambda name: (name == "config.json", name)):
                    (scratch / name).rename(out / name)
                    placed.append(out / name)
                scratch.rmdir()
            else:
                if out.exists():
                    out.rmdir()
                scratch.rename(out)
    except BaseException as error:
        for path in placed:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        _remove(made)
        if isinstance(error, OSError):
            where = None if error.filename is None else Path(error.filename)
            if where is None or scratch in (where, *where.parents) or where in (out, base, *made):
                raise not_written(out / names[-1] if names else out, error) from error
        raise  # of a file that is read


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Yield whether a folder could be locked; the kernel releases the lock with the process."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # on Windows
        yield False
        return
    try:
        yield hold(descriptor) is True
    finally:
        os.close(descriptor)


def _remove_abandoned(base: Path, name: str) -> None:
    """Remove the folders that killed processes left while they wrote one of this name."""
    for path in base.glob(".*.tmp"):
        if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp", path.name) and path.is_dir():
            with _held(path) as abandoned:
                if abandoned and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)


def write_files(
    folder: Path, files: Mapping[str, Mapping[str, Planned]], metadata: Mapping[str, Mapping[str, str]]
) -> None:
    """Write tensors into files of safetensors, each tensor computed once, one after the other.

    Args:
        folder: The folder.
        files: The tensors of each file, by name.
        metadata: Entries of each file's header beside the tensors.

    Raises:
        ValueError: If a number does not fit its dtype, or the format has no such dtype.
        OSError: If they cannot be written.
    """
    places: dict[str, tuple[Path, int, torch.dtype]] = {}
    for file, tensors in files.items():
        with (folder / file).open("xb") as opened:
            _write_file(opened, tensors, metadata.get(file, {}), places)
            opened.flush()
            os.fsync(opened.fileno())


def write_single(out: Path, tensors: Mapping[str, Planned], metadata: Mapping[str, str]) -> None:
    """Write tensors into a new file of safetensors, completely or not at all; as :func:`write_files` does."""
    made = [path for path in out.absolute().parents if not path.exists()]
    try:
        write_atomically(out, lambda file: _write_file(file, tensors, metadata, {}))
    except BaseException:
        _remove(made)
        raise


def _write_file(
    file: BinaryIO,
    tensors: Mapping[str, Planned],
    metadata: Mapping[str, str],
    places: dict[str, tuple[Path, int, torch.dtype]],
) -> None:
    """Write one file; ``places`` holds file, offset and type of the first tensors with shared names, and grows."""
    if name := next((name for name, own in tensors.items() if own.dtype not in _TYPES), None):
        raise ValueError(f"{name} is of type {tensors[name].dtype}, which files of safetensors do not hold.")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order, end = _ordered(tensors), 0
    for name in order:
        begin, end = end, end + tensors[name].size
        header[name] = {
            "dtype": _TYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for name in order:
        own = tensors[name]
        if own.shared in places:
            file.flush()
            twin, begin, dtype = places[own.shared]
            with twin.open("rb") as opened:
                opened.seek(begin)
                content = bytearray(opened.read(math.prod(own.shape) * dtype.itemsize))
            tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        else:
            tensor = own.read().detach().cpu()
            if own.shared is not None:
                places[own.shared] = Path(file.name), 8 + len(head) + header[name]["data_offsets"][0], own.dtype
        if tensor.numel() != math.prod(own.shape):
            raise ValueError(f"{name} has the shape {list(tensor.shape)}; expected {list(own.shape)}.")
        # Unchanged copies may hold any numbers.
        is_copy = own.shared is None and tensor.dtype == own.dtype
        _write(file, tensor if is_copy else fitting(tensor, own.dtype, name))


def _ordered(tensors: Mapping[str, Planned]) -> list[str]:
    """Return the names of tensors in the order of their file, so that each begins at a multiple of its size."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def _remove(folders: Iterable[Path]) -> None:
    """Remove empty folders, inner ones first."""
    for path in folders:
        with contextlib.suppress(OSError):  # other processes may have written there
            path.rmdir()


def _write(file: BinaryIO, tensor: Tensor) -> None:
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    file.write(memoryview(flat))
