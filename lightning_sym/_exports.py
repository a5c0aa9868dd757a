"""Exports of a package, each declared once, as type checkers read it: ``from module import Name as Name``.

Errors that an argument of the wrong type causes in an exported function are explained. Types are compared with the
annotations after an error only, thus duck typing works.
"""

import ast
import dis
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, Union, cast, get_args, get_origin

T = TypeVar("T")
_OURS = ("lightning_sym", "builtins", "abc")  # no modules, metrics, callbacks
_PLAIN: Mapping[Any, Any] = {float: SupportsFloat, int: SupportsIndex}


def exported(package: dict[str, Any]) -> list[str]:
    """Return the names that a package exports, sorted, for its ``__all__``; errors of its functions are explained.

    Args:
        package: ``globals()`` of its ``__init__.py``.
    """
    places = _places(package)
    for name in places.keys() & package.keys():
        package[name] = _explained(package[name])
    return sorted(places)


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
        value = package[name] = _explained(getattr(importlib.import_module(place), name))
        return value

    return find, lambda: sorted({*package, *places})


def _explained(value: Any) -> Any:
    """Explain the errors of a function, also in its module, where pickle looks for it, or of a plain class."""
    if inspect.isfunction(value):
        value = explained(value)
        setattr(sys.modules[value.__module__], value.__name__, value)
    elif isinstance(value, type) and all(own.__module__.startswith(_OURS) for own in value.__mro__):
        explained(value)
    return value


def _places(package: dict[str, Any]) -> dict[str, str]:
    """Return the modules of the exports of a package, by the names."""
    tree = ast.parse(Path(package["__file__"]).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.name == alias.asname}


def explained(given: T) -> T:
    """Wrap a function, or the public methods of a class, to name an argument of the wrong type after an error.

    Errors that this package raises itself are unchanged.
    """
    if isinstance(given, type):
        for name, own in list(vars(given).items()):
            method = getattr(own, "__func__", own)  # of a class method
            ours = name[0] != "_" or name in ("__init__", "__call__", "__matmul__")
            if ours and inspect.isfunction(method) and method.__globals__ is not globals():
                setattr(given, name, explained(method) if method is own else type(own)(explained(method)))
        return given
    function = cast(Callable[..., Any], given)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not _is_raised(error) and (said := _wrong(function, args, kwargs)):
                raise TypeError(said) from error
            raise

    return cast(T, call)


def _is_raised(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of this package, but not of this module, raised an error."""
    trace = cast(types.TracebackType, error.__traceback__)
    while trace.tb_next is not None:
        trace = trace.tb_next
    names = trace.tb_frame.f_globals
    raised = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return raised and names is not globals() and str(names.get("__name__")).startswith(_OURS[0])


def _wrong(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Name the first argument of another type than its annotation; empty if there is none."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # one is missing, or unknown
        return ""
    for name, value in given.items():
        own = signature.parameters[name]
        if own.annotation is not own.empty and "VAR" not in own.kind.name and (got := _misfit(value, own.annotation)):
            wanted = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(own.annotation))
            return f"{name} of {function.__qualname__.removesuffix('.__init__')} must be of type {wanted}, got {got}."
    return ""


def _misfit(value: Any, kind: Any) -> str:
    """Return the type of a value, with that of a wrong entry, if it is not of a kind, else an empty string."""
    kind = getattr(kind, "__bound__", None) or kind
    origin, inner = get_origin(kind) or _PLAIN.get(kind, kind), get_args(kind)
    got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    if origin in (Union, types.UnionType):
        return "" if any(not _misfit(value, own) for own in inner) else got
    try:
        if not isinstance(value, origin):
            return got
    except TypeError:  # such as literals, protocols, and names in quotes
        return ""
    several = isinstance(value, list | str | tuple) and origin is not tuple
    entries = value.values() if isinstance(value, dict) else value if several else ()
    return next((f"{got} of {own}" for one in entries if inner and (own := _misfit(one, inner[-1]))), "")
