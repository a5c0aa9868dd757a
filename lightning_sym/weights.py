"""Weights from elsewhere: state dicts, checkpoints of Lightning and safetensors, fitted to a network."""

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_sym.networks import Network, WrappedNetwork


def read_weights(file: str | Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Read all tensors of a file; nothing in it can run code.

    Args:
        file: What ``torch.save`` or ``safetensors`` wrote: a state dict, a Lightning checkpoint, or any nesting of
            dictionaries with tensors in them.
        mapped: Whether to leave the numbers in the file until somebody looks, where it can be mapped into memory (as
            files of safetensors always are); it has to stay as it is then.

    Returns:
        The tensors, on the CPU; names of nested dictionaries are joined by dots: ``"state_dict.model.fc.weight"``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or holds no tensors, or other objects than plain values and tensors.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file.absolute()}; give a .pt, .ckpt or .safetensors file.")
    if file.suffix == ".safetensors":
        try:
            return dict(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged, or no safetensors file ({error}).") from None
    try:
        with warnings.catch_warnings():  # of a pickle that torch.save did not write; whether it is read is said below
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            archive = mapped and zipfile.is_zipfile(file)  # of which alone torch makes a map
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=archive)
    except OSError:
        raise
    except Exception as error:  # whatever the bytes of another file make of the unpickler
        if isinstance(error, pickle.UnpicklingError) and _is_whole(file):
            raise ValueError(
                f"{file} holds more than tensors and plain values, such as a whole module, and is not opened, because "
                "that could run code; save network.state_dict() where you trust it, and give that file."
            ) from None
        raise ValueError(f"{file} is damaged or cut off, or no file that torch.save wrote.") from None
    return flat_weights(content, str(file))


def _is_whole(file: Path) -> bool:
    """Return whether a file is what ``torch.save`` writes: an archive, whose contents stand at its end, or a pickle."""
    if zipfile.is_zipfile(file):
        return True
    content = file.read_bytes()
    return content[:2] in [b"\x80" + bytes([version]) for version in range(2, 6)]


def flat_weights(content: object, source: str = "The state dict") -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries; their names are joined by dots.

    Args:
        content: What was read.
        source: Where it comes from, for messages.

    Raises:
        ValueError: If it holds no tensors by name.
    """
    tensors = dict(_tensors(content))
    if not tensors:
        raise ValueError(f"{source} holds no tensors by name; expected a state dict or a checkpoint of Lightning.")
    return tensors


def fit_weights(
    tensors: Mapping[str, Tensor], network: nn.Module, *, prefix: str | None = None, source: str = "The state dict"
) -> dict[str, Tensor]:
    """Return the tensors that are a network's parameters and buffers, under its own names.

    Args:
        tensors: Names may have a prefix, such as ``"model."`` of a Lightning module's attribute or ``"module."`` of
            ``DataParallel``; what is not under it is left out. Batch counts (``num_batches_tracked``) may be missing,
            and all but one name of tied weights, as safetensors leaves them.
        network: Whose weights they are; not changed.
        prefix: The prefix. None: the only one that fits.
        source: Where they come from, for messages.

    Returns:
        By the names of ``network.state_dict()``, each of the shape that it has there.

    Raises:
        ValueError: If the names fit under no prefix or under several, if there are more under it than the network has,
            if shapes differ, or tied weights.
    """
    module = network.module if isinstance(network, WrappedNetwork) else network
    own = "module." if module is not network else ""
    kind, wanted = type(module).__name__, module.state_dict(keep_vars=True)  # whose identity tells what is tied
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    if not needed:
        raise ValueError(f"{kind} has no parameters, so that it has no weights to be read.")
    tied = {name: names for name, names in _tied(wanted).items() if name in needed}
    if prefix is None:
        found = [name[: len(name) - len(end)] for end in tied[needed[0]] for name in tensors if name.endswith(end)]
        candidates = [start for start in dict.fromkeys(found) if not start or start.endswith(".")]
    else:
        candidates = [f"{prefix.rstrip('.')}." if prefix else ""]
    fitting = [
        start for start in candidates if all(any(start + one in tensors for one in names) for names in tied.values())
    ]
    if not fitting:
        raise ValueError(_missing(tensors, needed, candidates[0] if candidates else "", kind, source))
    if len(fitting) > 1:
        raise ValueError(
            f"{source} holds weights of {kind} under several prefixes ({', '.join(map(repr, fitting))}); choose one as "
            "prefix (--prefix)."
        )
    (start,) = fitting
    surplus = [name for name in tensors if name.startswith(start) and name.removeprefix(start) not in wanted]
    if surplus:
        raise ValueError(
            f"{source} holds {surplus[0]!r}, which {kind} has not; give the arguments that the network was built with."
        )
    for names in tied.values():
        first, *others = (start + one for one in names if start + one in tensors)
        if other := next((one for one in others if not torch.equal(tensors[one], tensors[first])), None):
            raise ValueError(
                f"{source} holds other values of {other!r} than of {first!r}, which are tied in {kind}; give the "
                "arguments that the network was built with."
            )
    held = {name: next(one for one in names if start + one in tensors) for name, names in tied.items()}
    tensors = {**tensors, **{start + name: tensors[start + one] for name, one in held.items()}}
    for name in needed:
        if tensors[start + name].shape != wanted[name].shape:
            raise ValueError(
                f"{source} holds {start + name!r} of shape {list(tensors[start + name].shape)}, and {kind} has it of "
                f"shape {list(wanted[name].shape)}; give the arguments that the network was built with."
            )
    return {own + name: tensors.get(start + name, value.detach()) for name, value in wanted.items()}


def as_network(network: Any) -> Network:
    """Return a network with a recorded architecture.

    Args:
        network: A :class:`~lightning_sym.networks.Network`, or a class, function or ``functools.partial`` that builds
            a module.

    Raises:
        TypeError: If it is a module that nothing says how to build.
    """
    if isinstance(network, Network):
        return network
    if isinstance(network, nn.Module) or not callable(network):
        raise TypeError(
            f"network must say how to build the module, got {type(network).__name__}; pass its class, or "
            "functools.partial(YourClass, argument=...)."
        )
    built = network()
    return built if isinstance(built, Network) else WrappedNetwork(built, network)


def _tied(wanted: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of each tensor: its own first, then those of tensors that are the same in memory."""

    def place(tensor: Tensor) -> tuple[object, ...]:
        known = tensor.numel() and tensor.data_ptr()  # not on torch's meta device
        return (tensor.data_ptr(), tensor.shape, tensor.stride()) if known else (id(tensor),)

    places = {name: place(tensor) for name, tensor in wanted.items()}
    sharing: dict[tuple[object, ...], list[str]] = {}
    for name, where in places.items():
        sharing.setdefault(where, []).append(name)
    return {name: [name, *(one for one in sharing[where] if one != name)] for name, where in places.items()}


def _tensors(content: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor) and path:
        yield path, content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            if isinstance(name, str):
                yield from _tensors(value, f"{path}.{name}" if path else name)


def _missing(tensors: Mapping[str, Tensor], needed: list[str], start: str, kind: str, source: str) -> str:
    name = next(name for name in needed if start + name not in tensors)
    return (
        f"{source} does not hold {start + name!r} of {kind}; it holds {', '.join(map(repr, list(tensors)[:3]))}"
        f"{'...' if len(tensors) > 3 else ''}; give the class and the arguments that the network was built with."
    )
