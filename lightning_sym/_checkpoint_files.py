"""Checkpoints as files and folders: what is where, and whether a result can be written. Needs no torch."""

import codecs
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_sym._files import is_temporary, read_json
from lightning_sym._text import nearest

# Files with the weights of a model, in the search order of from_pretrained.
WEIGHTS = (*("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),)
CONFIGURATION = "config.json"
MANIFEST = "manifest.json"  # of a zoo
# Files of a reparametrized checkpoint beside its weights.
ELEMENT, HISTORY, REPORT = "element.safetensors", "history.csv", "report.json"
TORCH, SAFETENSORS = "a file of torch.save", "a file of safetensors"
# Signatures of other formats, their names, and the remedies.
_FORMATS: dict[bytes, tuple[str, str]] = {
    b"\x93NUMPY": ("an array of numpy", "save tensors by name with torch.save"),
    b"\x89HDF": ("a file of HDF5, as of Keras", "save tensors by name with torch.save"),
    b"GGUF": ("a file of GGUF, for llama.cpp", "pass the safetensors that it was made from"),
    b"version https://git-lfs": ("a pointer of Git LFS", "fetch the file itself with git lfs pull"),
}
_ADAPTER = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class Found:
    """The weights of one input.

    Attributes:
        given: Its name, as it was given; of a zoo the path of a member.
        file: The file with the weights, or the index of several; of an adapter alone, the adapter's.
        folder: The folder with config.json; None without one.
        configuration: Content of that file.
        adapter: Folder of an adapter of low rank, to add to the weights; None for none.
        is_zoo: Whether it is a zoo, with ``file`` as its first member.
    """

    given: str
    file: Path
    folder: Path | None = None
    configuration: Mapping[str, Any] | None = None
    adapter: Path | None = None
    is_zoo: bool = False

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter alone, without its model."""
        return self.file.parent == self.adapter


def other_format(file: Path, expected: str) -> str:
    """Return the sentence about a file of another format than the expected one; empty if it is of none that is known.

    Args:
        file: The file; only its beginning and the names in an archive are read.
        expected: :data:`TORCH` or :data:`SAFETENSORS`.
    """
    kind, remedy = _format(file)
    return f"{file} is {kind}, not {expected}; {remedy}." if kind not in ("", expected) else ""


def _format(file: Path) -> tuple[str, str]:
    """Return the format of a file, and what to do where another one is expected; empty if it is not known."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(4096)
    if size == 0:
        return "empty", "fetch or write it again"
    for sign, found in _FORMATS.items():
        if start.startswith(sign):
            return found
    if int.from_bytes(start[:8], "little") <= size - 8 and start[8:9] == b"{":
        return SAFETENSORS, "give it the ending .safetensors"
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return TORCH, "give it the ending .pt"
        arrays = bool(names) and all(name.endswith(".npy") for name in names)
        return "an archive of numpy's arrays (.npz)" if arrays else "a zip archive of other files", (
            "save tensors by name with torch.save"
        )
    if re.match(rb"\x80[\x02-\x05]", start):
        return TORCH, "give it the ending .pt"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # a character may be cut
    except UnicodeDecodeError:
        return "", ""
    if re.match(rb"\s*<(!doctype|html)", start, re.IGNORECASE):
        return "a web page", "download the file itself"
    return ("", "") if b"\0" in start else ("text", "pass the file of the weights")


def locate(path: str | Path) -> Found:
    """Find the weights that a path names, without reading them.

    Args:
        path: A file; a folder with ``config.json`` and weights; a zoo; a folder with ``adapter_config.json``; or two
            paths of a model and an adapter, ``MODEL+ADAPTER``.

    Raises:
        ValueError: If there are no weights.
    """
    given, place = str(path), Path(path)
    if place.name == CONFIGURATION and place.is_file():
        place = place.parent
    if place.is_file():
        configuration = configuration_in(place.parent)
        return Found(given, place, place.parent if configuration else None, configuration)
    if place.is_dir():
        return _in_folder(given, place)
    signs = (end for end in range(len(given) - 2, 0, -1) if given[end] == "+")  # both halves have a name, perhaps "."
    halves = [(Path(given[:end]), Path(given[end + 1 :])) for end in signs]
    for model, adapter in halves:
        if model.exists() and adapter.is_dir():
            _adapter_weights(adapter)
            found = locate(model)
            if found.is_zoo or found.adapter is not None:
                raise ValueError(f"{given} adds an adapter to {model}; expected one model before the +.")
            return replace(found, given=given, adapter=adapter)
    raise ValueError(
        f"There is no file or folder {given}; expected a checkpoint, the folder of a model, a zoo, or MODEL+ADAPTER. "
        f"Nothing is downloaded.{_missing_half(halves)}"
    )


def _missing_half(halves: Sequence[tuple[Path, Path]]) -> str:
    """Return a sentence about MODEL+ADAPTER of which one half exists; empty if no half does."""
    for model, adapter in halves:
        if model.exists() or adapter.exists():
            there, missing = (model, adapter) if model.exists() else (adapter, model)
            return f" {there} exists, but {'adapter' if missing == adapter else 'model'} {missing} is not a folder" + (
                "." if missing == adapter else " or a file."
            )
    return ""


def _in_folder(given: str, folder: Path) -> Found:
    configuration = configuration_in(folder)
    if configuration and (weights := next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)):
        return Found(given, weights, folder, configuration)
    if members := members_in(folder):
        return Found(given, members[0], is_zoo=True)
    if (folder / _ADAPTER).is_file():
        return Found(given, _adapter_weights(folder), adapter=folder)
    hint = inside(folder)
    if configuration:
        raise ValueError(f"{given} has {CONFIGURATION}, but no weights ({', '.join(WEIGHTS)}); add them.{hint}")
    raise ValueError(
        f"{given} is neither a zoo (a folder with member-0000.safetensors) nor the folder of a model "
        f"({CONFIGURATION} and {', '.join(WEIGHTS)}); expected one of them, or checkpoints.{hint}"
    )


def inside(folder: str | Path) -> str:
    """Return a sentence with what a folder holds that may be meant instead; empty if there is nothing."""
    place = Path(folder)
    # Folders of checkpoints of one training, and caches of transformers, hold others; run folders a zoo.
    folders = (path for path in (*place.iterdir(), *place.glob("snapshots/*")) if path.is_dir())
    found = sorted(str(path.relative_to(place)) for path in folders if configuration_in(path) or members_in(path))
    found += [name for name in WEIGHTS if (place / name).is_file()]
    return f" It holds {', '.join(found[:3])}: give {place / found[0]}." if found else ""


def members_in(folder: Path) -> list[Path]:
    """Return the files of a zoo's members, of which the first may be missing; none if a folder is no zoo."""
    members = sorted(folder.glob("member-*.safetensors"))
    return members or [folder / "member-0000.safetensors"] * (folder / MANIFEST).exists()


def _adapter_weights(folder: Path) -> Path:
    weights = next((folder / name for name in _ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if weights is None or not (folder / _ADAPTER).is_file():
        raise ValueError(f"{folder} is no adapter; expected a folder with {_ADAPTER} and {_ADAPTER_WEIGHTS[0]}.")
    return weights


def single(path: str | Path) -> Found:
    """Find the weights of one whole network.

    Raises:
        ValueError: If a path names no network, several, or an adapter.
    """
    found = locate(path)
    members = members_in(found.file.parent) if found.is_zoo else [found.file]
    if len(members) != 1:
        raise ValueError(f"{path} holds {len(members)} networks; expected one: give one file of them.")
    if found.adapter is not None:
        raise ValueError(
            f"{path} holds an adapter; expected a whole model: lightning-sym merge MODEL+ADAPTER --method "
            "passthrough --out WHOLE writes one."
        )
    return replace(found, given=str(found.file), is_zoo=False) if found.is_zoo else found


def element_in(path: str | Path) -> Path:
    """Return the file of an element, which may be in the folder of a reparametrized checkpoint.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    file = Path(path) / ELEMENT if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}; expected an element that reparametrize wrote.")
    return file


def files_of_result(out: Path) -> dict[str, str]:
    """Return the names of the files beside the weights of a reparametrized checkpoint.

    They begin with the name of the weights unless these are in a folder.
    """
    start = f"{out.stem}." if out.suffix == ".safetensors" else ""
    return {name: f"{start}{name}" for name in (ELEMENT, HISTORY, REPORT)}


def description_of(found: Found) -> Path | None:
    """Return the file that describes the network of an input: its configuration or that of its zoo; None without."""
    if found.folder is not None:
        return found.folder / CONFIGURATION
    manifest = found.file.parent / MANIFEST
    return manifest if manifest.exists() else None


def check_described(found: Found) -> Path:
    """Return the file that describes the network of an input.

    Raises:
        ValueError: If there is none.
    """
    check_whole([found])
    described = description_of(found)
    if described is None:
        raise ValueError(
            f"{found.given} does not say its network; give the folder with its {CONFIGURATION}, or --network."
        )
    if found.configuration is not None:
        check_model_type(found.given, found.configuration)
    return described


def check_whole(found: Sequence[Found]) -> None:
    """Check that inputs are models, and none an adapter alone.

    Raises:
        ValueError: If one is.
    """
    if alone := next((one for one in found if one.is_adapter), None):
        raise ValueError(f"{alone.given} is an adapter without its model; give MODEL+ADAPTER.")


def check_model_type(given: str, configuration: Mapping[str, Any]) -> None:
    """Check that transformers knows the type of a model, without the seconds that its import takes.

    Args:
        given: Name of the model, for the message.
        configuration: Content of its ``config.json``.

    Raises:
        ValueError: If it is unknown.
    """
    name = configuration.get("model_type")
    spec = importlib.util.find_spec("transformers")
    if isinstance(name, str) and spec is not None and (known := _model_types(spec)) and name not in known:
        raise ValueError(unknown_model_type(given, configuration, importlib.metadata.version("transformers"), known))


def _model_types(spec: importlib.machinery.ModuleSpec) -> Collection[str]:
    """Return the types of models that transformers knows, or more: the keys of all tables in its automatic classes."""
    if loaded := sys.modules.get("transformers"):  # and perhaps extended
        return tuple(loaded.CONFIG_MAPPING.keys())
    places = [Path(place) / "models" / "auto" for place in spec.submodule_search_locations or ()]
    texts = [file.read_text(encoding="utf-8") for place in places for file in sorted(place.glob("*.py"))]
    return {word for text in texts for word in re.findall(r"^\s*\(?\"([\w.-]+)\"[,:]", text, re.MULTILINE)}


def unknown_model_type(given: str, configuration: Mapping[str, Any], version: str, known: Iterable[str]) -> str:
    """Return the message for a model whose type transformers does not know.

    Args:
        given: Name of the model.
        configuration: Content of its ``config.json``.
        version: Version of transformers.
        known: The types that it knows.
    """
    name = configuration["model_type"]
    own = " has code of its own (auto_map), which is never run:" if "auto_map" in configuration else " is of"
    return f"{given}{own} model_type {name!r}; expected one that transformers {version} knows.{nearest(name, known)}"


def check_out(out: Path, written: Found, beside: Sequence[str] = ()) -> None:
    """Check, before any computation, that a result in the form of a checkpoint can be written.

    Args:
        out: Its place.
        written: The checkpoint.
        beside: Names of further files in the same folder.

    Raises:
        ValueError: If the place does not suit that form, or something is there.
    """
    several, folder = written.file.suffix == ".json", out.suffix != ".safetensors"
    if (several and not folder) or (folder and not several and written.folder is None):
        expected = f"a folder for the shards of {written.file.name}" if several else "a file that ends in .safetensors"
        raise ValueError(f"out is {out}; expected {expected}.")
    check_above(out)
    # A killed run leaves only hidden files, which do not interfere.
    if out.exists() and not (folder and out.is_dir() and all(is_temporary(path) for path in out.iterdir())):
        raise ValueError(f"{out} exists already; remove it, or choose another place for the result.")
    if not folder and (there := next((own for name in beside if (own := out.with_name(name)).exists()), None)):
        raise ValueError(f"{there} exists already, from an earlier result; remove it, or choose another place.")


def check_above(out: str | Path) -> None:
    """Check that a file or folder can be made at a place, as far as the folders above it tell.

    Raises:
        ValueError: If one of them is a file.
    """
    above = next(path for path in Path(out).absolute().parents if path.exists())
    if not above.is_dir():
        raise ValueError(f"{out} cannot be made, as {above} is a file; expected a place in a folder.")


def check_folder(out: str | Path) -> None:
    """Check that a folder is there, or can be made, as far as names tell.

    Raises:
        ValueError: If it is a file, or below one.
    """
    check_above(out)
    if Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"{out} is a file; expected a folder.")


def check_model_folder(folder: str | Path) -> None:
    """Check that a folder describes a network.

    Raises:
        ValueError: If it has no ``config.json`` and is no zoo, or transformers does not know the type of its model.
    """
    place = Path(folder)
    if not ((place / CONFIGURATION).is_file() or (place / MANIFEST).exists()):
        raise ValueError(f"{folder} names no network; expected the folder of a model (with config.json), or a zoo.")
    check_model_type(str(folder), configuration_in(place) or {})


def configuration_in(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of the model in a folder; None if there is none."""
    content: dict[str, Any] = read_json(folder / CONFIGURATION) or {}
    return content if "model_type" in content or "architecture" in content else None  # transformers, timm
