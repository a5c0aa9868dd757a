"""The options of the classes that recipes name, read from their source: a misspelling need not wait for PyTorch."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

_PACKAGE = "lightning_sym"
# Two rooms are not inside the package's own folder in a checkout.
_ROOMS = (_PACKAGE, f"{_PACKAGE}.callbacks", f"{_PACKAGE}.datamodules")
_TRAINER = "pytorch_lightning.Trainer"


@cache
def shipped_options(kind: str) -> frozenset[str] | None:
    """Return the names of the constructor's arguments of a class of this package, or of Lightning's ``Trainer``.

    Args:
        kind: Its name, or its dotted path.

    Returns:
        The names, with those that it passes on to its bases. None for a class of another package, or with a base of
        one that takes arguments: only an import can tell.
    """
    module, _, name = kind.rpartition(".")
    if kind == _TRAINER:
        files = {folder / "trainer" / "trainer.py" for folder in _folders("pytorch_lightning")}
    elif (module and not module.startswith(_PACKAGE)) or not name.isidentifier():
        return None
    else:
        files = {file for room in _ROOMS for folder in _folders(room) for file in folder.rglob("*.py")}
    found = [definition for file in files for definition in _definitions(file, name)]
    return _options(found[0]) if len(found) == 1 else None


@cache
def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)  # of the package, which it does not import
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _definitions(file: Path, name: str) -> list[ast.ClassDef]:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not re.search(rf"^class {name}\b", text, re.MULTILINE):
        return []
    return [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name]


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
