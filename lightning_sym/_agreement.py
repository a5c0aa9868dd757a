"""Check that settings are the same in all processes of a run."""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from torch import Tensor, nn

from lightning_sym._distributed import gathered, ranks

_MOST_FILES = 1000  # files per folder in a digest
_MOST_BYTES = 1 << 16  # bytes per file in a digest
_ABSENT = "absent"


def check_agreement(settings: Mapping[str, object]) -> None:
    """Check that all processes have the same settings; call it on every rank.

    Paths may differ if their content agrees: the same folder under another name, or a copy.

    Args:
        settings: Settings by name, possibly nested; the first difference in this order is reported.

    Raises:
        ValueError: If a setting differs. The message, the same on every rank, names the setting, a rank, and both
            values.
    """
    if ranks() == 1:
        return
    own = dict(flat_settings(settings))
    digests = gathered(hashlib.sha256(json.dumps(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone: list[dict[str, str]] = gathered(own)
    names = list(dict.fromkeys(name for settings in everyone for name in settings))
    differ = [name for name in names if len({settings.get(name) for settings in everyone}) > 1]
    contents = gathered({name: _content_at(own[name]) for name in differ if name in own})
    for name in differ:
        found = {content.get(name) for content in contents}
        if len(found) == 1 and found != {None}:
            continue
        values = [settings.get(name, _ABSENT) for settings in everyone]
        other = next(number for number, value in enumerate(values) if value != values[0])
        raise ValueError(
            f"The processes of this run were started differently: {name} is {_shown(values[other])} on rank {other} "
            f"and {_shown(values[0])} on rank 0; start all {ranks()} with the same."
        )


def flat_settings(node: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by dotted name, as JSON; objects are described by their constructor or content."""
    if hasattr(node, "as_dict"):  # a namespace of jsonargparse
        node = node.as_dict()
    if isinstance(node, Mapping):
        node = {str(key): value for key, value in node.items()}
        inside = {key: value for key, value in node.items() if key not in ("init_args", "dict_kwargs")}
        if kind := inside.pop("class_path", None):
            yield path, json.dumps(str(kind))
        for part in ("init_args", "dict_kwargs"):
            if isinstance(values := node.get(part), Mapping):
                inside |= values
        for name, value in inside.items():
            yield from flat_settings(value, f"{path}.{name}" if path else name)
    elif isinstance(node, list | tuple) and any(map(_nested, node)):
        yield path, json.dumps(f"{len(node)} of them")
        for number, one in enumerate(node):
            yield from flat_settings(one, f"{path}[{number}]")
    else:
        yield path, json.dumps(node, default=_described)


def _nested(node: object) -> bool:
    return isinstance(node, Mapping | list | tuple) or hasattr(node, "as_dict")


def _described(value: object) -> object:
    """Describe an object by plain values that are equal in all processes."""
    if isinstance(value, Mapping):
        return {str(key): one for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {hashlib.sha256(repr(value.tolist()).encode()).hexdigest()[:8]}"
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": list(value.args), **value.keywords}
    if isinstance(value, nn.Module):
        return getattr(value, "architecture", None) or re.sub(r"\s+", " ", str(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"  # type: ignore[union-attr]


def _content_at(text: str) -> str | None:
    """Return a digest of the file or folder at a path; None if the setting is not an existing path."""
    value = json.loads(text)
    return content_of(Path(value)) if isinstance(value, str) and value and len(value) < 4096 else None


def content_of(path: Path) -> str | None:
    """Return a digest of a file, or of the first bytes of the first files in a folder; None if there are none."""
    try:
        if path.is_file():
            with path.open("rb") as whole:
                return hashlib.file_digest(whole, "sha256").hexdigest()
        digest, files = hashlib.sha256(), 0
        for file in islice(_files(path), _MOST_FILES):
            with file.open("rb") as content:
                digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode() + content.read(_MOST_BYTES))
            files += 1
        return digest.hexdigest() if files else None
    except OSError:
        return None


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, sorted by name."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names) if Path(parent, name).is_file())


def _shown(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:77]}..."
