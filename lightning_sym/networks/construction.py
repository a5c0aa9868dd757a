"""Build networks from recorded architectures, which may come from untrusted files."""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_sym._trust import NETWORKS, resolve, untrained, within
from lightning_sym.networks.base import Network, WrappedNetwork, snapshot
from lightning_sym.networks.narrowing import Axis, kept_from_json, narrowed


def build(architecture: Mapping[str, Any], allow: Sequence[str] = ()) -> Network:
    """Build the network of an architecture: the inverse of ``network.architecture``.

    An architecture may come with a downloaded zoo, so that only trusted code runs. The path is compared with the
    allow-list before any import, is resolved through modules and classes of the allowed package only, and its target
    must be defined there. In ``lightning_sym`` only subclasses of ``Network`` are built, in ``torchvision.models`` also
    modules and functions declared to return one; packages in ``allow`` are trusted.

    Args:
        architecture: ``{"class_path": ..., "init_args": {...}}``; ``init_args`` is optional. A third entry,
            ``kept``, describes :func:`narrowed <lightning_sym.networks.narrowed>` networks.
        allow: Names of further packages or modules, for example ``["my_package"]``.

    Returns:
        The network, initialised from the caller's generator. Arguments of torchvision, timm and transformers that
        request trained weights are dropped, as they would cause downloads. A module other than a ``Network`` is
        wrapped; see :class:`lightning_sym.networks.WrappedNetwork`.

    Raises:
        ValueError: If the architecture is malformed, its path is outside the allow-list or does not exist, or
            the arguments do not fit.

    Example:
        >>> build({"class_path": "lightning_sym.networks.LeNet5", "init_args": {"image_size": 28}}).sites()
        ['activation1', 'activation2', 'activation3', 'activation4']
    """
    if isinstance(allow, str):
        raise ValueError(f"allow must be a list of package names, got the string {allow!r}.")
    path, arguments, kept = _read(architecture)
    target = resolve(path, (*NETWORKS, *allow), "The architecture")
    _check_builds_module(target, path, allow)
    arguments = untrained(target, arguments)
    try:
        module = target(**snapshot(arguments))
    except TypeError as error:
        raise ValueError(f"The architecture's arguments do not fit {path}: {error}.") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"The architecture names {path}, which built a {type(module).__name__}, not a module.")
    network = module if isinstance(module, Network) else WrappedNetwork(module, functools.partial(target, **arguments))
    return narrowed(network, kept) if kept else network


def _read(architecture: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[Axis, list[int]]]:
    """Return class path, arguments and kept positions of a well-formed architecture."""
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


def _check_builds_module(target: Callable[..., Any], path: str, allow: Sequence[str]) -> None:
    """Check before the call that a class or function of a trusted package makes a network.

    Functions of packages that the caller allowed need no annotations. Those of lightning_sym and torchvision do: a file
    could otherwise call any of their functions with arbitrary arguments.
    """
    if isinstance(target, type):
        wanted: type = Network if target.__module__.startswith("lightning_sym.") else nn.Module
        suitable = issubclass(target, wanted) and not inspect.isabstract(target)
    elif within(target.__module__, allow):
        suitable = inspect.isfunction(target)
    else:
        result = typing.get_type_hints(target).get("return") if inspect.isfunction(target) else None
        suitable = (
            within(target.__module__, ["torchvision.models"])
            and isinstance(result, type)
            and issubclass(result, nn.Module)
        )
    if not suitable:
        raise ValueError(f"The architecture names {path}, which does not build a network.")
