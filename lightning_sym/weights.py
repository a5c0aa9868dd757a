"""Weights from other sources: state dicts, Lightning checkpoints and safetensors, matched to a network."""

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

_DEEPEST = 32  # nesting depth of dictionaries; a state dict within a checkpoint needs three


def read_weights(file: str | Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Read all tensors of a file without running code in it.

    Args:
        file: A file of ``torch.save`` or ``safetensors``: a state dict, a Lightning checkpoint, or any nesting of
            dictionaries with tensors.
        mapped: Whether to map the file into memory, if possible, instead of reading it (safetensors files are always
            mapped); do not change the file then.

    Returns:
        The tensors, on the CPU; names of nested dictionaries are joined by dots: ``"state_dict.model.fc.weight"``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, holds no tensors, or holds objects other than plain values and tensors.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file.absolute()}; pass a .pt, .ckpt or .safetensors file.")
    if file.suffix == ".safetensors":
        try:
            return dict(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged, or no safetensors file ({error}).") from None
    try:
        with warnings.catch_warnings():  # about pickles not from torch.save, and sparse tensors: reported below
            warnings.simplefilter("ignore")
            archive = zipfile.is_zipfile(file)
            if program := _program(file) if archive else "":
                raise _ProgramError(program)
            # torch can only map archives.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and archive)
    except OSError:
        raise
    except _ProgramError as program:
        raise ValueError(
            f"{file} holds a program of {program}, and is not opened, because that could run code; save the "
            "state_dict() of the module in a trusted environment, and pass that file."
        ) from None
    except Exception as error:  # any error of the unpickler on foreign bytes
        if isinstance(error, pickle.UnpicklingError) and _is_whole(file):
            raise ValueError(_more_than_tensors(file, str(error))) from None
        raise ValueError(f"{file} is damaged or truncated, or no file of torch.save.") from None
    return flat_weights(content, str(file))


class _ProgramError(Exception):
    """A file is a program, saved by the named library."""


def _program(archive: Path) -> str:
    """Return the library that wrote a program into an archive; empty for files of ``torch.save``."""
    with zipfile.ZipFile(archive) as opened:
        names = {name.partition("/")[2] for name in opened.namelist()}
    if "constants.pkl" in names:
        return "TorchScript (torch.jit.save)"
    return "torch.export" if "archive_format" in names else ""


def _more_than_tensors(file: Path, error: str) -> str:
    """Return the message for a file with objects, from the unpickler's error."""
    found = re.search(r"GLOBAL ([\w.]+)", error)
    if found and found[1].startswith("numpy."):
        return (
            f"{file} holds numbers of numpy ({found[1]}) as well as tensors, and is not opened; save them as float(x) "
            "or torch.as_tensor(x)."
        )
    named = found[1] if found else "a whole module"
    return (
        f"{file} holds more than tensors and plain values, such as {named}, and is not opened, because that could run "
        "code; save network.state_dict() in a trusted environment, and pass that file."
    )


def _is_whole(file: Path) -> bool:
    """Test whether a file is complete: an archive with its directory at the end, or a pickle."""
    if zipfile.is_zipfile(file):
        return True
    content = file.read_bytes()
    return content[:2] in [b"\x80" + bytes([version]) for version in range(2, 6)]


def flat_weights(content: object, source: str = "The state dict") -> dict[str, Tensor]:
    """Flatten nested dictionaries of tensors; names are joined by dots.

    Args:
        content: Content of a file.
        source: Source of the content, for messages.

    Raises:
        ValueError: If it holds no tensors by name, or contains itself.
    """
    tensors = dict(_tensors(content, source=source))
    if not tensors:
        raise ValueError(f"{source} holds no tensors by name; expected a state dict or a checkpoint of Lightning.")
    return tensors


def fit_weights(
    tensors: Mapping[str, Tensor], network: nn.Module, *, prefix: str | None = None, source: str = "The state dict"
) -> dict[str, Tensor]:
    """Match tensors to a network's parameters and buffers, under its own names.

    Args:
        tensors: Tensors by name. Names may have a prefix, such as ``"model."`` of a Lightning module's attribute or
            ``"module."`` of ``DataParallel``; tensors without the prefix are ignored. Batch counts
            (``num_batches_tracked``) may be missing, as may all but one name of tied weights, as in safetensors.
        network: The network; not changed.
        prefix: The prefix. None: the only one that fits.
        source: Source of the tensors, for messages.

    Returns:
        Tensors by the names of ``network.state_dict()``, with the network's shapes.

    Raises:
        ValueError: If the names match under no prefix or under several, if there are surplus tensors, or if shapes or
            tied weights differ.
    """
    module = network.module if isinstance(network, WrappedNetwork) else network
    own = "module." if module is not network else ""
    kind, wanted = type(module).__name__, module.state_dict(keep_vars=True)  # object identity shows ties
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    if not needed:
        raise ValueError(f"{kind} has no parameters and thus no weights to read.")
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
            f"{source} holds {surplus[0]!r}, which {kind} has not; pass the arguments that the network was built with."
        )
    for names in tied.values():
        first, *others = (start + one for one in names if start + one in tensors)
        if other := next((one for one in others if not torch.equal(tensors[one], tensors[first])), None):
            raise ValueError(
                f"{source} holds other values of {other!r} than of {first!r}, which are tied in {kind}; pass the "
                "arguments that the network was built with."
            )
    held = {name: next(one for one in names if start + one in tensors) for name, names in tied.items()}
    tensors = {**tensors, **{start + name: tensors[start + one] for name, one in held.items()}}
    for name in needed:
        if tensors[start + name].shape != wanted[name].shape:
            raise ValueError(
                f"{source} holds {start + name!r} of shape {list(tensors[start + name].shape)}, but {kind} has it of "
                f"shape {list(wanted[name].shape)}; pass the arguments that the network was built with."
            )
        check_numbers_alike(tensors[start + name], wanted[name], start + name, source)
    return {own + name: tensors.get(start + name, value.detach()) for name, value in wanted.items()}


def check_numbers_alike(found: Tensor, wanted: Tensor, name: str, source: str) -> None:
    """Check that a tensor holds numbers of the network's kind: real, complex, or whole.

    Args:
        found: The tensor.
        wanted: The network's tensor.
        name: Name of the tensor in its source.
        source: Source of the tensor, for the message.

    Raises:
        ValueError: If not: torch would drop imaginary parts, and use codes of quantized weights as weights.
    """
    check_dense(found, name, source)

    def kind(tensor: Tensor) -> str:
        return "real" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "whole"

    if kind(found) != kind(wanted):
        raise ValueError(
            f"{source} holds {name!r} as {found.dtype}, but the network has it as {wanted.dtype}; pass weights that "
            f"are {kind(wanted)} numbers{', not quantized' * (kind(found) == 'whole')}."
        )


def check_dense(tensor: Tensor, name: str, source: str) -> None:
    """Check that a tensor is dense.

    Args:
        tensor: The tensor.
        name: Name of the tensor in its source.
        source: Source of the tensor, for the message.

    Raises:
        ValueError: If it is sparse, quantized, nested, or without memory (on torch's meta device).
    """
    if tensor.is_meta:
        raise ValueError(f"{source} holds {name!r} without its numbers (on the meta device); save it with them.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        what, way = ("quantized", "dequantize") if tensor.is_quantized else (str(tensor.layout), "to_dense")
        raise ValueError(f"{source} holds {name!r} as a tensor that is {what}; save {name}.{way}() instead.")


def as_network(network: Any) -> Network:
    """Return a network with a recorded architecture.

    Args:
        network: A :class:`~lightning_sym.networks.Network`, or a class, function or ``functools.partial`` that builds
            a module.

    Raises:
        TypeError: If it is a module without a known constructor.
    """
    if isinstance(network, Network):
        return network
    if isinstance(network, nn.Module) or not callable(network):
        raise TypeError(
            f"network must describe how to build the module, got {type(network).__name__}; pass its class, or "
            "functools.partial(YourClass, argument=...)."
        )
    built = network()
    return built if isinstance(built, Network) else WrappedNetwork(built, network)


def _tied(wanted: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of each tensor: its own first, then those of tensors that share its memory."""

    def place(tensor: Tensor) -> tuple[object, ...]:
        known = tensor.numel() and tensor.data_ptr()  # 0 on torch's meta device
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
        f"{'...' if len(tensors) > 3 else ''}; pass the class and the arguments that the network was built with."
    )
