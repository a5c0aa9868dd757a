"""Classes that a command names, looked for in the source: misspelt names do not wait for PyTorch."""

import ast
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sym._text import nearest
from lightning_sym.cli.catalogue import class_names, folders, summaries
from lightning_sym.cli.given import class_of, classes

# Options that take a class, and the room of those with a short name; empty where others have short names, too.
_ROOMS = {
    **{"model": "tasks", "data": "datamodules", "network": "networks", "model.network": "networks"},
    **{"trainer.callbacks": "callbacks", "model.optimizer": "", "model.lr_scheduler": "", "model.loss": ""},
    **{"trainer.logger": "", "data.dataset": "", "objective": ""},
}
_OURS = "lightning_sym"
_LIBRARIES = (_OURS, "torch", "torchvision", "pytorch_lightning")
_MODELS = ("torchvision", "timm", "transformers")  # before a colon


def check_classes(**options: Any) -> None:
    """Check the classes of a command's own options, as far as that needs no import.

    Args:
        options: The classes with their arguments, by the names of the options; None for none.

    Raises:
        ValueError: If there is no such module or class.
    """
    given = {name: node for name, node in options.items() if node is not None}
    network = class_of(given.get("network"))
    if os.path.isfile(network) and not network.endswith((".py", ".json")):
        raise ValueError(
            f"network: {network} is a file; expected a class, as my_networks.Net, or torchvision:resnet18."
        )
    if os.path.isdir(network) or network.partition(":")[0] in _MODELS:
        del given["network"]
    if wrong := wrong_class(given):
        raise ValueError(wrong)


def wrong_class(tree: Mapping[str, Any]) -> str:
    """Return the sentence for a class or a module that does not exist; empty if none is missing for sure.

    Args:
        tree: As :func:`lightning_sym.cli.given.merge` returns it.

    Raises:
        ValueError: If the module of a class is in the current folder, and is no valid Python.
    """
    found = [(path, kind.replace(":", ".", 1)) for path, kind, _ in classes(tree) if path in _ROOMS]
    for path, kind in found:
        if (file := Path(kind if kind.endswith(".py") else f"{kind}.py")).is_file():
            defined = re.findall(r"^class ([A-Z]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            bound = (defined or [name for name in sorted(_bound(file) or ()) if name[0].isupper()])[:3]
            names = ", ".join(f"{file.stem}.{name}" for name in bound) or f"{file.stem}.NAME"
            return f"{path}: {kind} is a module; name a class in it, as {names}."
    # Others are files of settings.
    found = [(path, kind) for path, kind in found if not Path(kind).is_file()]
    found = [(path, kind) for path, kind in found if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", kind)]
    # A module that is imported may define classes that are found by their short names, too.
    modules = [kind.rpartition(".")[0] for _, kind in found if "." in kind]
    files = [_file_of(module) for module in modules if module.partition(".")[0] not in _LIBRARIES]
    own: frozenset[str] = frozenset().union(*(_bound(file) or () for file in files if file is not None))
    for path, kind in found:
        module, _, name = kind.rpartition(".")
        room = _ROOMS[path]
        if not module and room and name not in class_names() | own | (lightning := _of_lightning(room)):
            return unknown_class(path, name, [*(known for known, _ in summaries(room)), *lightning])
        if module and (wrong := _wrong_path(path, module, name)):
            return wrong
    return ""


def unknown_class(path: str, name: str, known: list[str]) -> str:
    """Return the sentence for a short name that no class has.

    Args:
        path: Dotted path of the option.
        name: The name.
        known: Names that are close, perhaps.
    """
    return f"{path}: Unknown class {name!r}; give its full path, or the name of a shipped class.{nearest(name, known)}"


def missing_class(path: str, name: str, known: list[str]) -> str:
    """Return the sentence for a dotted path without a class or function.

    Args:
        path: Dotted path of the option.
        name: The dotted path.
        known: Names in its module.
    """
    last = name.rpartition(".")[2]
    return f"{path}: There is no {'class' if last[:1].isupper() else 'function'} {name}.{nearest(last, known)}"


def missing_module(path: str, name: str) -> str:
    """Return the sentence for a module that does not exist.

    Args:
        path: Dotted path of the option.
        name: Name of the module.
    """
    if (Path.cwd() / f"{name.partition('.')[0]}.py").is_file():  # files do not import it
        return (
            f"{path}: The module {name!r} of this folder is named in a file only, which is not trusted to import it; "
            f"add --model.allow '[{name.partition('.')[0]}]'."
        )
    return (
        f"{path}: There is no module {name!r}.{nearest(name, (*_LIBRARIES, *_MODELS))} "
        "If it is yours, run this in its folder, or put that on PYTHONPATH."
    )


def _of_lightning(room: str) -> frozenset[str]:
    """Return the names of Lightning's classes in a room that has some."""
    files = [file for folder in folders("pytorch_lightning") for file in (folder / room).glob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files if room == "callbacks"]
    return frozenset(name for text in texts for name in re.findall(r"^class ([A-Z]\w*)\b", text, re.MULTILINE))


def _wrong_path(path: str, module: str, name: str) -> str:
    """Return the sentence for a class by its full path; empty if it exists, or only an import can tell."""
    package = module.partition(".")[0]
    if package == _OURS:
        close = sorted(class_names())
        missing = name[:1].isupper() and name not in close  # functions are not listed
        return missing_class(path, f"{module}.{name}", close) if missing else ""
    if not package_exists(package):
        return missing_module(path, package)
    file = _file_of(module)
    if file is None or not file.is_relative_to(Path.cwd()) or "site-packages" in file.parts:
        return ""  # of a library: names are made in many ways
    bound = _bound(file)
    return "" if bound is None or name in bound else missing_class(path, f"{module}.{name}", sorted(bound))


def package_exists(name: str) -> bool:
    """Return whether a module at the top level exists; it is not imported."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return True  # its import tells


def _file_of(module: str) -> Path | None:
    """Return the file of a module, which is not imported; None if it has none, or is not found."""
    package, *inner = module.split(".")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    file = Path(spec.origin) if spec and spec.origin else None
    for part in inner:
        places = [] if file is None else [file.with_name(f"{part}.py"), file.with_name(part) / "__init__.py"]
        file = next((place for place in places if place.is_file()), None)
    return file if file is not None and file.suffix == ".py" else None


def _bound(file: Path) -> frozenset[str] | None:
    """Return the names that a module may define; None if only an import can tell."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:
        if file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts:
            where = f"{file.relative_to(Path.cwd())}, line {error.lineno}"
            raise ValueError(f"{where}: {error.msg}; Python cannot read this module.") from None
        return None
    except (OSError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return None if names & {"*", "__getattr__", "globals", "setattr", "exec"} else frozenset(names)
