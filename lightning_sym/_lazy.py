"""Exports of a package, imported at first use."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(package: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package with its imports under ``if TYPE_CHECKING:``.

    Type checkers, editors and the reference read these imports. At run time, the first use of a name imports it, so
    that importing the package or one name does not load all of it.

    Args:
        package: ``globals()`` of its ``__init__.py``.
    """
    tree = ast.parse(Path(package["__file__"]).read_text(encoding="utf-8"))
    guarded = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom))
    places = {alias.name: node.module for node in imports for alias in node.names}

    def find(name: str) -> Any:
        place = places.get(name)
        if place is None:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(importlib.import_module(place), name)
        return value

    return find, lambda: sorted({*package, *places})
