"""Weights from elsewhere: state dicts, checkpoints of Lightning and safetensors, fitted to a network."""

import pickle
import re
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

_DEEPEST = 32  # dictionaries in each other; a state dict within a checkpoint needs three


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
        with warnings.catch_warnings():  # of pickles that torch.save did not write, of sparse tensors: said below
            warnings.simplefilter("ignore")
            archive = zipfile.is_zipfile(file)
            if program := _program(file) if archive else "":
                raise _ProgramError(program)
            # Of an archive alone torch makes a map.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and archive)
    except OSError:
        raise
    except _ProgramError as program:
        raise ValueError(
            f"{file} holds a program of {program}, and is not opened, because that could run code; save the "
            "state_dict() of the module where you trust it, and give that file."
        ) from None
    except Exception as error:  # whatever the bytes of another file make of the unpickler
        if isinstance(error, pickle.UnpicklingError) and _is_whole(file):
            raise ValueError(_more_than_tensors(file, str(error))) from None
        raise ValueError(f"{file} is damaged or cut off, or no file that torch.save wrote.") from None
    return flat_weights(content, str(file))


class _ProgramError(Exception):
    """A file is a program, of the library that is named."""


def _program(archive: Path) -> str:
    """Return what wrote a program into an archive; empty if it holds none, as those of ``torch.save``."""
    with zipfile.ZipFile(archive) as opened:
        names = {name.partition("/")[2] for name in opened.namelist()}
    if "constants.pkl" in names:
        return "TorchScript (torch.jit.save)"
    return "torch.export" if "archive_format" in names else ""


def _more_than_tensors(file: Path, error: str) -> str:
    """Return the sentence for a file that holds objects, one of which the unpickler's error names."""
    found = re.search(r"GLOBAL ([\w.]+)", error)
    if found and found[1].startswith("numpy."):
        return (
            f"{file} holds numbers of numpy ({found[1]}) beside tensors, which are not opened; save them as float(x) "
            "or torch.as_tensor(x)."
        )
    named = found[1] if found else "a whole module"
    return (
        f"{file} holds more than tensors and plain values, such as {named}, and is not opened, because that could run "
        "code; save network.state_dict() where you trust it, and give that file."
    )


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
        ValueError: If it holds no tensors by name, or itself.
    """
    tensors = dict(_tensors(content, source=source))
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
        check_numbers_alike(tensors[start + name], wanted[name], start + name, source)
    return {own + name: tensors.get(start + name, value.detach()) for name, value in wanted.items()}


def check_numbers_alike(found: Tensor, wanted: Tensor, name: str, source: str) -> None:
    """Check that a tensor holds numbers of the kind that a network has there: real, complex, or whole.

    Args:
        found: The tensor.
        wanted: That of the network.
        name: What it is called where it comes from.
        source: Where it comes from, for the message.

    Raises:
        ValueError: If not: torch would drop imaginary parts, and take codes of quantized weights for weights.
    """
    check_dense(found, name, source)

    def kind(tensor: Tensor) -> str:
        return "real" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "whole"

    if kind(found) != kind(wanted):
        raise ValueError(
            f"{source} holds {name!r} as {found.dtype}, and the network has it as {wanted.dtype}; give weights that "
            f"are {kind(wanted)} numbers{', not quantized' * (kind(found) == 'whole')}."
        )


def check_dense(tensor: Tensor, name: str, source: str) -> None:
    """Check that a tensor holds all of its numbers, one by one.

    Args:
        tensor: The tensor.
        name: What it is called where it comes from.
        source: Where it comes from, for the message.

    Raises:
        ValueError: If it is sparse, quantized, nested, or without memory (on torch's meta device).
    """
    if tensor.is_meta:
        raise ValueError(f"{source} holds {name!r} without its numbers (on the meta device); save it with them.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        what, way = ("quantized", "dequantize") if tensor.is_quantized else (str(tensor.layout), "to_dense")
        raise ValueError(f"{source} holds {name!r} as a tensor that is {what}; save {name}.{way}() in its place.")


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


def _tensors(content: object, path: str = "", depth: int = 0, *, source: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor) and path:
        yield path, content
    elif isinstance(content, Mapping):
        if depth > _DEEPEST:
            raise ValueError(
                f"{source} holds dictionaries in dictionaries, {_DEEPEST} deep or without end; expected a state dict "
                "or a checkpoint of Lightning."
            )
        for name, value in content.items():
            if isinstance(name, str):
                yield from _tensors(value, f"{path}.{name}" if path else name, depth + 1, source=source)


def _missing(tensors: Mapping[str, Tensor], needed: list[str], start: str, kind: str, source: str) -> str:
    name = next(name for name in needed if start + name not in tensors)
    return (
        f"{source} does not hold {start + name!r} of {kind}; it holds {', '.join(map(repr, list(tensors)[:3]))}"
        f"{'...' if len(tensors) > 3 else ''}; give the class and the arguments that the network was built with."
    )
