"""Exports of a package, each declared once, as type checkers read it: ``from module import Name as Name``.

Errors that an argument of the wrong type, or without values, causes in an exported function are explained. Types are
compared with the annotations after an error only, thus duck typing works.
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
_OURS = ("lightning_sym", "builtins", "abc")
_CALLED = ("__init__", "update")
_PARTLY = (*_OURS, "torch", "typing")  # modules and metrics, but no callbacks, tasks and data
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
    """Explain the errors of a function, also in its module, where pickle looks for it, or of a class.

    For modules and metrics, explain errors of constructors and updates only: ``forward`` stays as tracing and
    compilation expect it.
    """
    if inspect.isfunction(value):
        value = explained(value)
        setattr(sys.modules[value.__module__], value.__name__, value)
    elif isinstance(value, type) and all(own.__module__.startswith(_OURS) for own in value.__mro__):
        explained(value)
    elif isinstance(value, type) and all(own.__module__.startswith(_PARTLY) for own in value.__mro__):
        for own in value.__mro__:
            if own.__module__.startswith(_OURS[0]):
                _explain_methods(own, lambda name, method: name in _CALLED or isinstance(method, classmethod))
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
        _explain_methods(given, lambda name, _: name[0] != "_" or name in ("__init__", "__call__", "__matmul__"))
        return given
    function = cast(Callable[..., Any], given)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            given = {} if _is_raised(error) else _bound(function, args, kwargs)
            if said := _wrong(function, given):
                raise TypeError(said) from error
            if name := next((name for name, value in given.items() if _is_meta(value)), ""):
                raise ValueError(
                    f"{name} of {_name(function)} has tensors on the meta device, which hold no values; make or load "
                    "these first."
                ) from error
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


def _explain_methods(given: type, chosen: Callable[[str, Any], bool]) -> None:
    """Wrap methods of a class that are not wrapped yet, chosen by names and values."""
    for name, own in list(vars(given).items()):
        method = getattr(own, "__func__", own)  # of a class method
        if inspect.isfunction(method) and method.__globals__ is not globals() and chosen(name, own):
            setattr(given, name, explained(method) if method is own else type(own)(explained(method)))


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _bound(function: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, Any]:
    """Return the arguments by name; none if one is missing, or unknown."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def _is_meta(value: Any) -> bool:
    """Return whether a tensor, one in a container, or one of a network is on the meta device, without an import."""
    if isinstance(value, list | tuple):
        return any(map(_is_meta, value))
    if isinstance(value, dict):
        return any(map(_is_meta, value.values()))
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", ())
    if isinstance(value, module):
        return any(own.is_meta for own in (*value.parameters(), *value.buffers()))
    return getattr(value, "is_meta", False) is True


def _wrong(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Name the first argument of another type than its annotation; empty if there is none."""
    for name, value in given.items():
        own = inspect.signature(function).parameters[name]
        if own.annotation is not own.empty and "VAR" not in own.kind.name and (got := _misfit(value, own.annotation)):
            wanted = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(own.annotation))
            return f"{name} of {_name(function)} must be of type {wanted}, got {got}."
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
