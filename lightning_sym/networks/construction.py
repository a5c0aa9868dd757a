"""Networks from their recorded architecture, which may come from a stranger's file."""

import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from torch import nn

from lightning_sym.networks.base import Network, WrappedNetwork, snapshot
from lightning_sym.networks.narrowing import Axis, kept_from_json, narrowed

_TRUSTED = ("lightning_sym", "torchvision.models")


def build(architecture: Mapping[str, Any], allow: Sequence[str] = ()) -> Network:
    """Return the network that an architecture describes: the inverse of ``network.architecture``.

    An architecture may come with somebody's zoo, so that only trusted code runs: the path is compared with
    the allow-list before anything is imported, is resolved through modules and classes of the allowed package
    only, and what it leads to must be defined there too. In ``lightning_sym`` only subclasses of ``Network``
    are built, in ``torchvision.models`` also modules and functions declared to return one; packages in
    ``allow`` are trusted.

    Args:
        architecture: ``{"class_path": ..., "init_args": {...}}``; ``init_args`` may be left out. A third entry,
            ``kept``, is there for networks that were :func:`narrowed <lightning_sym.networks.narrowed>`.
        allow: Names of further packages or modules, for example ``["my_package"]``.

    Returns:
        The network, freshly initialised from the caller's generator. A module that is not a ``Network`` is
        wrapped; see :class:`lightning_sym.networks.WrappedNetwork`.

    Raises:
        ValueError: If the architecture is malformed, its path is outside the allow-list or leads nowhere, or
            the arguments do not fit.

    Example:
        >>> build({"class_path": "lightning_sym.networks.LeNet5", "init_args": {"image_size": 28}}).sites()
        ['activation1', 'activation2', 'activation3', 'activation4']
    """
    if isinstance(allow, str):
        raise ValueError(f"allow must be a list of package names, got the string {allow!r}.")
    path, arguments, kept = _read(architecture)
    roots = (*_TRUSTED, *allow)
    target = _resolve(path, roots)
    _check_builds_module(target, path, allow)
    try:
        module = target(**snapshot(arguments))
    except TypeError as error:
        raise ValueError(f"The architecture's arguments do not fit {path}: {error}.") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"The architecture names {path}, which built a {type(module).__name__}, not a module.")
    network = module if isinstance(module, Network) else WrappedNetwork(module, functools.partial(target, **arguments))
    return narrowed(network, kept) if kept else network


def _read(architecture: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[Axis, list[int]]]:
    """Return class path and arguments of a well-formed architecture, and what is kept of its tensors."""
    expected = 'expected {"class_path": "package.Class", "init_args": {...}}'
    if not isinstance(architecture, Mapping):
        raise ValueError(f"An architecture must be a dictionary, got {architecture!r}; {expected}.")
    surplus = set(architecture) - {"class_path", "init_args", "kept"}
    if surplus:
        raise ValueError(f"An architecture has no entry {sorted(map(str, surplus))[0]!r}; {expected}.")
    path, arguments = architecture.get("class_path"), architecture.get("init_args", {})
    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        raise ValueError(f"The class_path of an architecture is no dotted name: {path!r}; {expected}.")
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(f"The init_args of an architecture must be a dictionary, got {arguments!r}; {expected}.")
    return path, dict(arguments), kept_from_json(architecture.get("kept", []))


def _within(path: str, roots: Sequence[str]) -> bool:
    """Return whether a dotted name is one of the packages or inside one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _resolve(path: str, roots: Sequence[str]) -> Callable[..., Any]:
    """Return the class or function at a dotted path of an allowed package."""
    refusal = (
        f"The architecture names {path}, which is not in the allow-list ({', '.join(roots)}); "
        f"if you trust it, pass the package's name in allow (--model.allow on the command line)."
    )
    if not _within(path, roots) or path in roots:
        raise ValueError(refusal)
    parts = path.split(".")
    here: object = None
    for index, part in enumerate(parts):
        name = ".".join(parts[: index + 1])
        if index == 0:
            here = _import(name, path)
            continue
        found = getattr(here, part, None)
        if found is None and isinstance(here, ModuleType):
            found = _import(name, path)
        # A module that a file merely imported, such as torch in networks/base.py, is no part of the package.
        if isinstance(found, ModuleType) and found.__name__ != name:
            raise ValueError(refusal)
        if found is None:
            nearest = get_close_matches(part, [option for option in dir(here) if option[0] != "_"], n=1)
            raise ValueError(
                f"The architecture names {path}, but there is no {part!r} in {'.'.join(parts[:index])}."
                + (f" Did you mean {nearest[0]!r}?" if nearest else "")
            )
        if not isinstance(found, ModuleType | type) and index < len(parts) - 1:
            raise ValueError(refusal)
        here = found
    if isinstance(here, ModuleType) or not callable(here) or not _within(str(getattr(here, "__module__", "")), roots):
        raise ValueError(refusal)
    return here


def _import(name: str, path: str) -> ModuleType | None:
    """Import a module on the way to a path; None if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name and "." in name:
            return None
        raise ValueError(f"The architecture names {path}, but {name} cannot be imported: {error}.") from error


def _check_builds_module(target: Callable[..., Any], path: str, allow: Sequence[str]) -> None:
    """Check before calling it that a class or function of a trusted package makes a network.

    Packages that the caller allowed are believed, as their functions need not be annotated; ours and
    torchvision's are not, since a file could otherwise call any function of theirs with arguments of its
    choice.
    """
    if isinstance(target, type):
        wanted: type = Network if target.__module__.startswith("lightning_sym.") else nn.Module
        suitable = issubclass(target, wanted) and not inspect.isabstract(target)
    elif _within(target.__module__, allow):
        suitable = inspect.isfunction(target)
    else:
        result = typing.get_type_hints(target).get("return") if inspect.isfunction(target) else None
        suitable = (
            _within(target.__module__, ["torchvision.models"])
            and isinstance(result, type)
            and issubclass(result, nn.Module)
        )
    if not suitable:
        raise ValueError(f"The architecture names {path}, which does not build a network.")
