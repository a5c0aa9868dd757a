"""The classes that recipes name and their options, read from the source: help and misspellings need no PyTorch."""

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = "lightning_sym"
# Two rooms are not inside the package's own folder in a checkout.
_ROOMS = (_PACKAGE, f"{_PACKAGE}.callbacks", f"{_PACKAGE}.datamodules")
TRAINER = "pytorch_lightning.Trainer"
# The classes that all of a room that recipes name are derived from, and those that are only derived from.
_ROOTS = {
    **{"tasks": "LightningModule", "networks": "Network", "datamodules": "LightningDataModule"},
    "callbacks": "Callback",
}
_BASES = (
    *("PopulationTask", "WrappedNetwork", "RunReport", "InputDataModule", "InMemoryDataModule", "ImageDataModule"),
    "DownloadedDataModule",
)
_LIGHTNING = {
    TRAINER: Path("trainer/trainer.py"),
    "pytorch_lightning.callbacks.ModelCheckpoint": Path("callbacks/model_checkpoint.py"),
}


@cache
def shipped_options(kind: str) -> frozenset[str] | None:
    """Return the names of the constructor's arguments of a class of this package, or of Lightning's ``Trainer``.

    Args:
        kind: Its name, or its dotted path.

    Returns:
        The names, with those that it passes on to its bases. None for a class of another package, or with a base of
        one that takes arguments: only an import can tell.
    """
    found = definition_of(kind)
    return None if found is None else _options(found)


@cache
def definition_of(kind: str) -> ast.ClassDef | None:
    """Return the definition of a class of this package, or of Lightning's ``Trainer`` or ``ModelCheckpoint``.

    Args:
        kind: Its name, or its dotted path.

    Returns:
        The definition; None for a class of another package, or if there is not exactly one.
    """
    module, _, name = kind.rpartition(".")
    if kind in _LIGHTNING:
        files = {folder / _LIGHTNING[kind] for folder in folders("pytorch_lightning")}
    elif (module and not module.startswith(_PACKAGE)) or not name.isidentifier():
        return None
    else:
        files = _files_with_classes().get(name, set())
    found = [definition for file in files for definition in _definitions(file, name)]
    return found[0] if len(found) == 1 else None


def summaries(room: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the classes of a room that a recipe can name, with the first lines of their docstrings.

    Args:
        room: ``tasks``, ``networks``, ``datamodules`` or ``callbacks``.
    """
    for folder in folders(f"{_PACKAGE}.{room}"):
        aliases = (alias for node in ast.walk(_parsed(folder / "__init__.py")) for alias in getattr(node, "names", ()))
        for name in sorted(alias.name for alias in aliases if alias.name == alias.asname not in _BASES):
            definition = definition_of(name)
            if definition is not None and _derives(definition, _ROOTS[room]):
                yield name, (ast.get_docstring(definition) or "").partition("\n")[0]


def _derives(definition: ast.ClassDef, root: str) -> bool:
    """Return whether a class is derived from another one, by way of classes of this package."""
    for base in definition.bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # of a generic class
        name = base.id if isinstance(base, ast.Name) else ""
        above = definition_of(name) if name else None
        if name == root or (above is not None and _derives(above, root)):
            return True
    return False


@cache
def folders(package: str) -> list[Path]:
    """Return the folders of a package, which is not imported.

    Args:
        package: Its dotted name; its parents are imported.
    """
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def class_names() -> frozenset[str]:
    """Return the names of all classes of this package."""
    return frozenset(_files_with_classes())


@cache
def _files_with_classes() -> dict[str, set[Path]]:
    """Return the files of this package that define classes, by the names of the classes."""
    found: dict[str, set[Path]] = {}
    rooms = {folder for room in _ROOMS for folder in folders(room)}
    # Path.rglob does not enter folders that are links.
    inner = [Path(inner) for folder in rooms for inner, _, _ in os.walk(folder, followlinks=True)]
    for file in {file for folder in inner for file in folder.glob("*.py")}:
        for name in re.findall(r"^class (\w+)\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, set()).add(file)
    return found


def _definitions(file: Path, name: str) -> list[ast.ClassDef]:
    return [one for one in _parsed(file).body if isinstance(one, ast.ClassDef) and one.name == name]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


def _options(definition: ast.ClassDef) -> frozenset[str] | None:
    if definition.decorator_list:  # a dataclass, for example
        return None
    names: frozenset[str] = frozenset()
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            taken = statement.args
            names = frozenset(one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)) - {"self"}
            if not taken.kwarg:
                return names
    for base in definition.bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # of a generic class
        inherited = shipped_options(base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        names |= inherited
    return names
