"""Exports of a package, each declared once, as type checkers read it: ``from module import Name as Name``."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exported(package: dict[str, Any]) -> list[str]:
    """Return the names that a package exports, sorted, for its ``__all__``.

    Args:
        package: ``globals()`` of its ``__init__.py``.
    """
    return sorted(_places(package))


def lazy(package: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package with its exports under ``if TYPE_CHECKING:``.

    Type checkers, editors and the reference read these imports. At run time, the first use of a name imports it, so
    that importing the package or one name does not load all of it.

    Args:
        package: ``globals()`` of its ``__init__.py``.
    """
    places = _places(package)

    def find(name: str) -> Any:
        place = places.get(name)
        if place is None:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(importlib.import_module(place), name)
        return value

    return find, lambda: sorted({*package, *places})


def _places(package: dict[str, Any]) -> dict[str, str]:
    """Return the modules of the exports of a package, by the names."""
    tree = ast.parse(Path(package["__file__"]).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.name == alias.asname}
