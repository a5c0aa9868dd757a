"""The options of the classes that recipes name, read from their source: torch is not imported for a misspelling."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = "lightning_sym"
# Folders that are not inside the package's own in a checkout.
_ROOMS = ("callbacks", "datamodules")
_TRAINER = "pytorch_lightning.Trainer"


@cache
def shipped_options(kind: str) -> frozenset[str] | None:
    """Return the names of the constructor's arguments of a class of this package, or of Lightning's ``Trainer``.

    Args:
        kind: Its name, or its dotted path.

    Returns:
        Also those that it hands on to its bases. None if the class is another package's, or if its bases are and take
        arguments: then only an import can tell.
    """
    if kind == _TRAINER:
        return _trainer_options()
    module, _, name = kind.rpartition(".")
    if (module and not module.startswith(_PACKAGE)) or not name.isidentifier():
        return None
    found = list(_definitions(name))
    return _options(found[0]) if len(found) == 1 else None


def _trainer_options() -> frozenset[str] | None:
    spec = importlib.util.find_spec("pytorch_lightning")  # finds, and does not import
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "trainer" / "trainer.py"
        if file.is_file():
            for definition in _classes(file, "Trainer"):
                return _options(definition)
    return None


def _definitions(name: str) -> Iterator[ast.ClassDef]:
    for folder in _folders():
        for file in folder.rglob("*.py"):
            yield from _classes(file, name)


@cache
def _folders() -> tuple[Path, ...]:
    names = (_PACKAGE, *(f"{_PACKAGE}.{room}" for room in _ROOMS))
    specs = [importlib.util.find_spec(name) for name in names]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    package = folders[0]
    return (package, *(folder for folder in folders[1:] if not folder.is_relative_to(package)))  # in a wheel they are


def _classes(file: Path, name: str) -> Iterator[ast.ClassDef]:
    text = file.read_text(encoding="utf-8")
    if re.search(rf"^class {name}\b", text, re.MULTILINE):
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                yield statement


def _options(definition: ast.ClassDef) -> frozenset[str] | None:
    if definition.decorator_list:  # a dataclass, for example
        return None
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            names = frozenset(
                argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ) - {"self"}
            inherited = _inherited(definition) if arguments.kwarg else frozenset()
            return None if inherited is None else names | inherited
    return _inherited(definition)


def _inherited(definition: ast.ClassDef) -> frozenset[str] | None:
    names: frozenset[str] = frozenset()
    for base in definition.bases:
        if isinstance(base, ast.Subscript):  # of a generic class
            base = base.value
        inherited = shipped_options(base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        names |= inherited
    return names
