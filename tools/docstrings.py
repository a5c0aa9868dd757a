"""Convert docstrings for the site: reStructuredText roles to Markdown, formulas to MathML.

An extension of griffe, with which mkdocstrings reads the package.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # mkdocstrings loads this file by its path
from mathematics import mathml

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`~?\.?([^`]+)`")
_INLINE = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(r"^( *)\.\. math::[ ]*(.*(?:\n(?:\1 +.*|[ ]*(?=\n\1 +\S)))*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before mkdocstrings parses it, and finds the exports of packages."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a class, function, attribute or module."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj)

    def on_module_members(self, *, node: Any, mod: griffe.Module, **_: Any) -> None:
        """Record the exports of a package: names imported as themselves."""
        if "__all__" in mod.members and isinstance(node, ast.Module):
            imports = [one for one in ast.walk(node) if isinstance(one, ast.ImportFrom)]
            mod.exports = [alias.name for one in imports for alias in one.names if alias.name == alias.asname]


def markdown(text: str, obj: griffe.Object) -> str:
    """Convert a docstring to Markdown."""
    text = _BLOCK.sub(lambda match: f"\n{match[1]}{mathml(_joined(match[2]), block=True)}\n", text)
    text = _INLINE.sub(lambda match: mathml(_joined(match[1])), text)
    return _ROLE.sub(lambda match: _reference(match[1], obj), text)


def _joined(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _reference(name: str, obj: griffe.Object) -> str:
    """Return a link to an object, or its name if the site lacks it (torch's, private ones)."""
    named = re.fullmatch(r"(.*) <(.+)>", _joined(name))
    name = named[2] if named else _joined(name)
    where = name if name.startswith("lightning_sym.") else _resolved(name, obj)
    shown = named[1] if named else name.rpartition(".")[2]
    return f'<autoref identifier="{where}" optional><code>{shown}</code></autoref>'


def _resolved(name: str, obj: griffe.Object) -> str:
    """Return the full path of a name, resolved in the scope of its docstring."""
    scope = obj if obj.is_class or obj.is_module else obj.parent
    while scope is not None:
        if name.partition(".")[0] in scope.members:
            return f"{scope.path}.{name}"
        scope = scope.parent
    return name
