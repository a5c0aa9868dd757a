"""Annotations of constructors: a form that jsonargparse supports, and the sizes of the data that they declare."""

import dataclasses
import inspect
import sys
from argparse import ArgumentError
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse._parameter_resolvers import get_signature_parameters

from lightning_sym.cli.given import LINKED


def unsubscripted(annotation: Any) -> Any:
    """Remove the parameters of generic classes from an annotation: ``Dataset[Any]`` becomes ``Dataset``.

    jsonargparse (4.53) accepts a subclass where it finds ``Dataset[Any]``, but then reads the arguments of ``Dataset``
    itself, and builds that, without a word. Protocols and data classes it follows.

    Args:
        annotation: Annotation of a constructor's argument; text is not changed.
    """
    if isinstance(annotation, list):  # the arguments of a Callable
        return [unsubscripted(one) for one in annotation]
    origin, given = get_origin(annotation), get_args(annotation)
    if isinstance(origin, type) and _is_base(origin):  # of a generic class
        return origin
    plain = tuple(map(unsubscripted, given))
    if plain == given:
        return annotation
    if origin in (Union, UnionType):
        return reduce(or_, plain)
    return origin[plain] if origin is not None else annotation


def _is_base(kind: type) -> bool:
    """Return whether a class is one that others are derived from, to be chosen by their names."""
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names or dataclasses.is_dataclass(kind):
        return False
    return not getattr(kind, "_is_protocol", False)


def fitting_size(kind: Any, name: str, size: Any) -> Any:
    """Convert a size of the data to the form that a network's constructor takes.

    Args:
        kind: The network's class, or a function that makes it.
        name: Name of the argument.
        size: An integer, or of images the pair (height, width).

    Returns:
        The size, where the annotation takes it; of a pair otherwise a list, or the side of square images. Without an
        annotation the default says which.

    Raises:
        ValueError: If the annotation takes none of these.
    """
    parameter = next((one for one in get_signature_parameters(kind) if one.name == name), None)
    if parameter is None:  # the data do not set it
        return size
    forms = [size]
    if isinstance(size, tuple):
        forms += [list(size), *([size[0]] if len(set(size)) == 1 else [])]
    if parameter.annotation is inspect.Parameter.empty:
        return next((form for form in forms if type(form) is type(parameter.default)), size)
    for form in forms:
        with suppress(ArgumentError):
            return _parsed(parameter.annotation, form)
    plain = isinstance(parameter.annotation, type) and not get_args(parameter.annotation)
    wanted = parameter.annotation.__name__ if plain else str(parameter.annotation).replace("typing.", "")
    shown = f"the pair {size}" if isinstance(size, tuple) else size
    hint = f"{name}: int | tuple[int, int]" if isinstance(size, tuple) else f"{name}: int"
    raise ValueError(
        f"{name} of {kind.__name__} takes {wanted}, and that of the data is {shown}; declare it in the constructor as "
        f"{hint}{', or choose square images' if wanted == 'int' else ''}."
    )


def _parsed(annotation: Any, value: Any) -> Any:
    """Return a value as the parser hands it to an argument of a type.

    Raises:
        ArgumentError: If the type does not take it.
    """
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--size", type=unsubscripted(annotation))
    except ValueError:  # a type that the parser does not know: it takes anything
        return value
    parsed = parser.parse_object({"size": value}).size
    if isinstance(parsed, set | frozenset):  # it would lose the order of height and width
        raise ArgumentError(None, "a set has no order")
    return parsed


def unsaid_pair(kind: Any, arguments: Mapping[str, Any]) -> str:
    """Name the argument without annotation that was given a pair, as ``image_size=(8, 8)``; empty if there is none.

    Args:
        kind: The network's class.
        arguments: Arguments of its constructor, by name.
    """
    for parameter in get_signature_parameters(kind):
        value = arguments.get(parameter.name)
        if parameter.name in LINKED and isinstance(value, tuple) and parameter.annotation is inspect.Parameter.empty:
            return f"{parameter.name}={value}"
    return ""


def takes_anything(kind: Any) -> bool:
    """Return whether a constructor takes arguments of any name."""
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
