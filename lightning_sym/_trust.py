"""Resolve classes and functions named in files: only in trusted packages, checked before any import."""

import enum
import importlib
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

#: Packages with networks, all of which a zoo or a checkpoint may name.
NETWORKS = ("lightning_sym", "torchvision.models")
#: Packages with other classes and functions that the settings of a task may name.
SETTINGS = (
    *("lightning_sym.tasks", "lightning_sym.networks", "lightning_sym.layers", "lightning_sym.stitching"),
    *("lightning_sym.datamodules", "torchvision.models", "torch.nn", "torch.optim"),
)
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)+"
# A text that a parser reads as a plain name: no YAML, and no dot that could lead to a module.
_WORD = r"\s*\w*\s*(\([^():#]*\))?\s*"
_PLAIN = (str, bytes, bool, int, float, complex, type(None), enum.Enum, os.PathLike)


def within(path: str, roots: Sequence[str]) -> bool:
    """Test whether a dotted name is one of the packages or inside one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def resolve(path: str, roots: Sequence[str], source: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path of an allowed package.

    The path is compared with the allow-list before any import, is resolved through modules and classes of
    the allowed packages only, and its target must be defined there.

    Args:
        path: The path.
        roots: The allow-list: names of packages and modules.
        source: Source of the name, for messages: ``"The architecture"``, or a file.

    Raises:
        ValueError: If it is outside the allow-list or does not exist.
    """
    refusal = (
        f"{source} names {path}, which is not in the allow-list ({', '.join(roots)}); "
        f"if you trust it, pass the package's name in allow (--model.allow on the command line)."
    )
    if not within(path, roots) or path in roots:
        raise ValueError(refusal)
    parts = path.split(".")
    here: object = None
    for index, part in enumerate(parts):
        name = ".".join(parts[: index + 1])
        if index == 0:
            here = _import(name, path, source)
            continue
        found = getattr(here, part, None)
        if found is None and isinstance(here, ModuleType):
            found = _import(name, path, source)
        # A module that a file merely imports, such as torch in networks/base.py, does not belong to the package.
        if isinstance(found, ModuleType) and found.__name__ != name:
            raise ValueError(refusal)
        if found is None:
            nearest = get_close_matches(part, [option for option in dir(here) if option[0] != "_"], n=1)
            raise ValueError(
                f"{source} names {path}, but there is no {part!r} in {'.'.join(parts[:index])}."
                + (f" Did you mean {nearest[0]!r}?" if nearest else "")
            )
        if not isinstance(found, ModuleType | type) and index < len(parts) - 1:
            raise ValueError(refusal)
        here = found
    if isinstance(here, ModuleType) or not callable(here) or not within(str(getattr(here, "__module__", "")), roots):
        raise ValueError(refusal)
    return here


def _import(name: str, path: str, source: str) -> ModuleType | None:
    """Import a module on the way to a path; None if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name and "." in name:
            return None
        raise ValueError(f"{source} names {path}, but {name} cannot be imported: {error}.") from error


def check_settings(
    settings: object, kind: Callable[..., Any], allow: Iterable[str], source: str, *, nested: bool = False
) -> dict[str, Any]:
    """Return a class's settings from a file, after checking every class and function that they name.

    Networks of libraries are built without trained weights, so that a file cannot cause downloads.

    Args:
        settings: Settings by the names of the constructor's arguments; others are for reading only.
        kind: The trusted class, or a trusted function that builds an object.
        allow: Further trusted packages and modules.
        source: Source of the settings, for messages.
        nested: Whether arguments of unknown type may name code: a parser resolves them to other functions.

    Raises:
        ValueError: If they name an untrusted class or function, or are malformed.
    """
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise ValueError(
            f"{source} holds a {type(settings).__name__} instead of settings by name; pass a file that lightning-sym "
            "wrote."
        )
    roots, annotations = (*SETTINGS, *allow), _annotations(kind)
    try:
        for name, value in settings.items():
            _check(value, roots, source, code=_is_code(annotations.get(name, Any), nested))
    except RecursionError:
        raise ValueError(f"{source} holds settings that are nested without end; pass another file.") from None
    return {name: _all_untrained(value, roots, source) for name, value in settings.items()}


def _check(value: object, roots: Sequence[str], source: str, *, code: bool) -> None:
    """Check the nested values of a setting.

    Args:
        value: The setting.
        roots: The allow-list.
        source: As for :func:`check_settings`.
        code: Whether a text at this position is the name of a class or a function.
    """
    if isinstance(value, str):
        named = re.fullmatch(_DOTTED, value.strip())
        if code and named:
            resolve(value.strip(), roots, source)
        elif "class_path" in value or (code and not re.fullmatch(_WORD, value)) or (code and os.path.exists(value)):
            raise ValueError(f"{source} holds {value[:80]!r}, where the name of a class or a function was expected.")
    elif isinstance(value, Mapping):
        kind: Callable[..., Any] | None = None
        if "class_path" in value:
            path = value["class_path"]
            if not isinstance(path, str) or not re.fullmatch(rf"\w+|{_DOTTED}", path):
                raise ValueError(f"{source} holds the class_path {str(path)[:80]!r}, which is no dotted name.")
            kind = resolve(path, roots, source) if "." in path else None
        for key, entry in value.items():
            if key == "class_path":
                continue
            if "class_path" in str(key):  # a parser would split the key at its dots
                raise ValueError(f"{source} holds the key {str(key)[:80]!r}; expected class_path by itself.")
            if kind is not None and key in ("init_args", "dict_kwargs"):
                check_settings({} if entry is None else entry, kind, roots, source, nested=True)
            else:
                _check(entry, roots, source, code=code)
    elif isinstance(value, list | tuple | set):
        for entry in value:
            _check(entry, roots, source, code=code)


def _annotations(kind: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's argument types by name; for a constructor also those that it passes to its bases."""
    owners = [kind]
    if isinstance(kind, type):
        owners = [vars(owner)["__init__"] for owner in reversed(inspect.getmro(kind)) if "__init__" in vars(owner)]
    found: dict[str, Any] = {}
    for owner in owners:
        try:
            found |= typing.get_type_hints(owner)
        except (NameError, TypeError, AttributeError):  # a name imported for type checkers only
            found |= getattr(owner, "__annotations__", {})
    return found


def _is_code(annotation: Any, unknown: bool) -> bool:
    """Test whether an argument of this type may be a class, a function, or an object of a named class.

    Args:
        annotation: The type.
        unknown: Result for arbitrary objects.
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return False
    if annotation in (Any, object):
        return unknown
    if Callable in (annotation, origin) or type in (annotation, origin) or isinstance(annotation, str):
        return True
    if inner:
        return any(_is_code(one, unknown) for one in inner)
    built_in = getattr(annotation, "__module__", "") in ("builtins", "collections.abc", "typing")
    return isinstance(annotation, type) and not issubclass(annotation, _PLAIN) and not built_in


# Libraries that download trained weights, and the arguments that request them.
_LIBRARIES = ("torchvision", "timm", "transformers")
_TRAINED = ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "checkpoint_path")


def untrained(target: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model library's function without those that request trained weights."""
    if not within(str(target.__module__), _LIBRARIES):
        return arguments

    def random(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: random(entry) for key, entry in value.items() if key not in _TRAINED}
        return [random(entry) for entry in value] if isinstance(value, list) else value

    takes = dict(inspect.signature(target).parameters)
    if target.__module__ == "torchvision.models._api" and "name" in arguments:  # get_model, which passes arguments on
        from torchvision.models import get_model_builder

        takes |= inspect.signature(get_model_builder(arguments["name"])).parameters
    # Some request trained weights of a backbone by default.
    wanted = [name for name in _TRAINED if name in takes and takes[name].default not in (None, False, "")]
    return {**random(arguments), **dict.fromkeys(wanted)}


def _all_untrained(value: Any, roots: Sequence[str], source: str) -> Any:
    """Return a checked setting without arguments that request trained weights; the same object if there are none."""
    if isinstance(value, list):
        entries = [_all_untrained(entry, roots, source) for entry in value]
        return value if all(a is b for a, b in zip(value, entries, strict=True)) else entries
    if not isinstance(value, Mapping):
        return value
    found = {key: _all_untrained(entry, roots, source) for key, entry in value.items()}
    path = found.get("class_path")
    if isinstance(path, str) and within(path, _LIBRARIES):
        given = dict(found.get("init_args") or {})
        arguments = untrained(resolve(path, roots, source), given)
        if arguments != given:
            found["init_args"] = arguments
    return value if all(found[key] is value.get(key) for key in found) else found
