"""Weights from other sources: state dicts, Lightning checkpoints and safetensors, matched to a network."""

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_sym._checkpoint_files import SAFETENSORS, TORCH, other_format
from lightning_sym.networks import Network, WrappedNetwork
from lightning_sym.symmetry.files import read_index

_DEEPEST = 32  # nesting depth of dictionaries; a state dict within a checkpoint needs three
_LISTED = 10  # names in a message
# Parts of names that torch.compile, FSDP and activation checkpointing add.
_WRAPPER = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Prefixes of averages of weights beside the weights of the last step.
_AVERAGE = re.compile(r"(?<![a-z])(?:ema|swa|shadow|averaged?)(?![a-z])")


def read_weights(file: str | Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Read all tensors of a file without running code in it.

    Args:
        file: A file of ``torch.save`` or ``safetensors``: a state dict, a Lightning checkpoint, or any nesting of
            dictionaries with tensors; or the index of several (``pytorch_model.bin.index.json``).
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
    if file.suffix == ".json":
        parts = [read_weights(file.parent / part, mapped=mapped) for part in sorted(set(read_index(file).values()))]
        return {name: tensor for part in parts for name, tensor in part.items()}
    if file.suffix == ".safetensors":
        try:
            return dict(load_file(file))
        except SafetensorError as error:
            said = other_format(file, SAFETENSORS) or f"{file} is damaged, or no safetensors file ({error})."
            raise ValueError(said) from None
    try:
        with warnings.catch_warnings():  # about pickles not from torch.save, and sparse tensors: reported below
            warnings.simplefilter("ignore")
            archive = zipfile.is_zipfile(file)
            if program := _program(file) if archive else "":
                raise _ProgramError(program)
            with torch.serialization.safe_globals(_SCALARS):  # torch can only map archives
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and archive)
    except OSError:
        raise
    except _ProgramError as program:
        raise ValueError(
            f"{file} is {program}: save module.state_dict() in a trusted environment, and pass that file."
        ) from None
    except Exception as error:  # any error of the unpickler on foreign bytes
        if isinstance(error, pickle.UnpicklingError) and _is_whole(file):
            raise ValueError(_more_than_tensors(file, str(error))) from None
        said = (
            other_format(file, TORCH)
            or f"{file} is damaged or truncated, or no file of torch.save; fetch or write it again."
        )
        raise ValueError(said) from None
    return flat_weights(content, str(file))


class _ProgramError(Exception):
    """A file is a program, saved by the named library."""


def _program(archive: Path) -> str:
    """Return the library that wrote a program into an archive; empty for files of ``torch.save``."""
    with zipfile.ZipFile(archive) as opened:
        names = {name.partition("/")[2] for name in opened.namelist()}
    if "constants.pkl" in names:
        return "TorchScript"
    return "a program of torch.export" if "archive_format" in names else ""


class _Dtype:
    """Stands for ``numpy.dtype`` while a file is read: a name and a byte order, without any code of numpy."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.order = str(state[1])


def _scalar(dtype: _Dtype, data: bytes) -> float | int | bool:
    """Stand for ``numpy.core.multiarray.scalar`` while a file is read: return a number of Python."""
    code = _CODES.get(dtype.name) if isinstance(dtype, _Dtype) else None
    if code is None or not isinstance(data, bytes) or struct.calcsize(code) != len(data):
        raise pickle.UnpicklingError("GLOBAL numpy.core.multiarray.scalar of another type than numbers")
    number: float | int | bool = struct.unpack(f"{'>' if dtype.order == '>' else '<'}{code}", data)[0]
    return number


# Types of numpy, and their codes in struct.
_CODES = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"} | {
    f"{kind}{size}": code.upper() if kind == "u" else code
    for kind in "iu"
    for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
}


class _Setting:
    """Stands for settings that trainings save beside weights, ``argparse.Namespace`` and paths; holds nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


# What a file may name besides tensors and plain values. Numpy's own functions could unpickle arrays of objects.
_SCALARS: list[Any] = [
    (_scalar, "numpy.core.multiarray.scalar"),
    (_scalar, "numpy._core.multiarray.scalar"),
    (_Dtype, "numpy.dtype"),
    *((_Setting, name) for name in ("argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath")),
]


def _more_than_tensors(file: Path, error: str) -> str:
    """Return the message for a file with objects, from the unpickler's error."""
    found = re.search(r"GLOBAL ([\w.]+)", error)
    name = found[1] if found else ""
    if name.startswith("numpy."):
        return (
            f"{file} holds arrays of numpy ({name}) as well as tensors, and is not opened; save them as "
            "torch.as_tensor(x)."
        )
    todo = "and is not opened, because that could run code; save module.state_dict() in a trusted environment, and"
    if found and _holds_module(file):
        return f"{file} holds a whole module ({name}), {todo} pass that file."
    such = f", such as {name}," * bool(found)
    return f"{file} holds more than tensors and plain values{such} {todo} pass that file."


def _holds_module(file: Path) -> bool:
    """Return whether a pickle holds a module, by the name of an attribute; nothing is unpickled."""
    content = b""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                content = archive.read(name) if name.endswith("/data.pkl") else content
    else:
        content = file.read_bytes()
    return b"_backward_hooks" in content


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


@dataclass(frozen=True)
class Fit:
    """A file's tensors as a network holds them.

    Attributes:
        tensors: Tensors by the names of ``network.state_dict()``.
        names: For each tensor of the file that the network holds, its name in ``network.state_dict()``. Tied weights
            may be in the file several times.
        ignored: Names in ``network.state_dict()`` that the patterns match.
        extras: The file's other tensors under the prefix, which are ignored or constants of the architecture; by their
            names in the file, their names in the network.
        outside: Names in the file without the prefix.
        prefix: Prefix of the names in the file.
        notes: Choices that were made.
    """

    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    ignored: tuple[str, ...]
    extras: Mapping[str, str]
    outside: tuple[str, ...]
    prefix: str
    notes: tuple[str, ...]


def fit_weights(
    tensors: Mapping[str, Tensor], network: nn.Module, *, prefix: str | None = None, source: str = "The state dict"
) -> dict[str, Tensor]:
    """Match tensors to a network's parameters and buffers, under its own names, as :func:`match_weights` does.

    The choice of a prefix is a warning.
    """
    fit = match_weights(tensors, network, prefix=prefix, source=source)
    for note in fit.notes:
        warnings.warn(f"{note}.", stacklevel=2)
    return dict(fit.tensors)


def match_weights(
    tensors: Mapping[str, Tensor],
    network: nn.Module,
    *,
    prefix: str | None = None,
    source: str = "The state dict",
    ignore: Sequence[str] | None = None,
    described: str | Path | None = None,
) -> Fit:
    """Match tensors to a network's parameters and buffers.

    Args:
        tensors: Tensors by name. Names may have a prefix, such as ``"model."`` of a Lightning module's attribute or
            ``"module."`` of ``DataParallel``; tensors without the prefix are ignored. They may also lack the prefix of
            a backbone in the network, as in checkpoints of transformers. Wrappers such as ``torch.compile`` may add
            their names anywhere. Batch counts (``num_batches_tracked``) may be missing, as may all but one name of
            tied weights, as in safetensors.
        network: The network; not changed.
        prefix: The prefix. None: the only one that fits, or the only one of these that is not named after an average
            of weights (``model.`` before ``model_ema.``), with a note.
        source: Source of the tensors, for messages.
        ignore: Patterns of names, in the file or the network, of tensors that may be surplus or missing. A missing one
            keeps the network's value. None: no tensor may be, and messages do not propose it.
        described: File that describes the network, such as ``config.json``, for messages. None: the caller has chosen
            its class and arguments.

    Raises:
        ValueError: If the names match under no prefix or under several, if there are surplus tensors, or if shapes or
            tied weights differ.
    """
    module = network.module if isinstance(network, WrappedNetwork) else network
    own = "module." if module is not network else ""
    kind, wanted = type(module).__name__, module.state_dict(keep_vars=True)  # object identity shows ties
    remedy = "pass the arguments that the network was built with"
    if described is not None:
        remedy = f"check that these are the weights of the network that {described} describes"
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    if not needed:
        raise ValueError(f"{kind} has no parameters and thus no weights to read.")
    tied = {name: names for name, names in _tied(wanted).items() if name in needed}
    keys = _without_wrappers(tensors)
    places = {name: place for place, name in _without_wrappers(wanted).items()}
    patterns = tuple(ignore or ())
    found = _candidates(keys, places, tied, patterns, prefix)
    fitting = [one for one in found if one.fits]
    fitting = [one for one in fitting if not one.lead] or fitting
    notes: tuple[str, ...] = ()
    if not fitting:
        # A name such as "weight" without its module is found by accident.
        likely = [one for one in found if not one.lead or 2 * len(one.missing) < len(needed)]
        likely = likely or [_Names("", "", keys, places, tied, patterns)]
        closest = min(likely, key=lambda one: len(one.missing))
        if prefix and not any(key.startswith(closest.start) for key in keys):
            fit = [repr(one.start) for one in _candidates(keys, places, tied, patterns) if one.fits and not one.lead]
            proposal = f"expected {' or '.join(fit[:3])}" if fit else "leave it out to search for one"
            raise ValueError(f"No name in {source} begins with the prefix {prefix!r} (--prefix); {proposal}.")
        raise ValueError(_missing(tensors, needed, closest, kind, source, described, proposing=ignore is not None))
    if len(fitting) > 1:
        starts = ", ".join(repr(one.start) for one in fitting)
        plain = [one for one in fitting if not _AVERAGE.search(one.start)]
        if len(plain) != 1:
            raise ValueError(
                f"{source} holds weights of {kind} under several prefixes ({starts}); choose one as prefix (--prefix)."
            )
        fitting = plain
        notes = (f"{source} holds weights under {starts}: {plain[0].start!r} was read; --prefix chooses another",)
    (names,) = fitting
    surplus = _surplus(tensors, module, names, patterns)
    if surplus:
        proposal = (
            f"leave them out with --ignore {_pattern(surplus, tensors.keys() - {*surplus})}, or "
            if ignore is not None
            else ""
        )
        raise ValueError(f"{source} holds {listed(surplus)}, which {kind} has not; {proposal}{remedy}.")
    for one in tied.values():
        first, *others = [key for name in one if (key := names.key(name)) is not None] or [""]
        if other := next((key for key in others if not torch.equal(tensors[key], tensors[first])), None):
            raise ValueError(
                f"{source} holds other values of {other!r} than of {first!r}, which are tied in {kind}; {remedy}."
            )
    state = {own + name: value.detach() for name, value in wanted.items()}
    for name in wanted:
        key = next((names.key(one) for one in tied.get(name, [name]) if names.key(one) is not None), None)
        if key is None:
            continue
        tensor = tensors[key]
        if tensor.shape != wanted[name].shape:
            if names.leaves_out(name):
                continue
            raise ValueError(
                f"{source} holds {key!r} of shape {list(tensor.shape)}, but {kind} has it of shape "
                f"{list(wanted[name].shape)}; {remedy}."
            )
        check_numbers_alike(tensor, wanted[name], key, source)
        state[own + name] = tensor
    held = {key: own + name for name in wanted if (key := names.key(name)) is not None}
    return Fit(
        tensors=state,
        names=held,
        ignored=tuple(own + name for name in wanted if names.leaves_out(name)),
        extras={
            key: own + names.lead + place.removeprefix(names.start)
            for place, key in names.keys.items()
            if place.startswith(names.start) and key not in held
        },
        outside=tuple(key for place, key in keys.items() if not names.reads(place)),
        prefix=names.start,
        notes=notes,
    )


class _Names:
    """The names of a network's tensors in a file, under one prefix.

    Args:
        start: Prefix of the names in the file.
        lead: Prefix of the network's names that the file lacks.
        keys: Names in the file, by their names without wrappers.
        places: Names without wrappers, by the network's names.
        tied: The network's names of each tensor that is needed.
        patterns: Patterns of ignored names.
    """

    def __init__(
        self,
        start: str,
        lead: str,
        keys: Mapping[str, str],
        places: Mapping[str, str],
        tied: Mapping[str, Sequence[str]],
        patterns: Sequence[str],
    ) -> None:
        self.start, self.lead, self.keys, self.places, self.patterns = start, lead, keys, places, patterns
        self._tied = tied

    @property
    def fits(self) -> bool:
        """Whether the file holds all needed tensors."""
        return next(self._missing(), None) is None

    @cached_property
    def missing(self) -> list[str]:
        """The names in the file of needed tensors that it lacks."""
        return list(self._missing())

    def _missing(self) -> Iterator[str]:
        for name, names in self._tied.items():
            if not any(self.key(one) is not None for one in names) and not self.leaves_out(name):
                yield self.expected(name)

    def expected(self, name: str) -> str:
        """Return the name in the file of one of the network's tensors."""
        return self.start + self.places.get(name, name).removeprefix(self.lead)

    def key(self, name: str) -> str | None:
        """Return the same if the file holds it."""
        return self.keys.get(self.expected(name))

    def reads(self, place: str) -> bool:
        """Return whether a name in the file has the prefix."""
        return place in self.keys and place.startswith(self.start)

    def leaves_out(self, name: str) -> bool:
        """Return whether a tensor of the network is ignored."""
        return any(fnmatch(own, one) for one in self.patterns for own in (name, self.expected(name)))


def _candidates(
    keys: Mapping[str, str],
    places: Mapping[str, str],
    tied: Mapping[str, Sequence[str]],
    patterns: Sequence[str],
    prefix: str | None = None,
) -> list[_Names]:
    """Return the names under each prefix that may fit, or under the given one.

    A given prefix excludes other copies, such as one under ``model.`` beside an empty prefix.
    """
    found = [_Names(start, lead, keys, places, tied, patterns) for start, lead in _starts(keys, places, tied, prefix)]
    if prefix is None:
        return found
    (given,) = found
    others = [one.start for one in _candidates(keys, places, tied, patterns) if one.fits and not one.lead]
    own = {given.expected(name) for name in places}  # perhaps under a longer prefix too: the network may have a `model`
    longer = tuple(start for start in others if start != given.start and start.startswith(given.start))
    left = {place: key for place, key in keys.items() if place in own or not place.startswith(longer)}
    return [_Names(given.start, given.lead, left, places, tied, patterns)]


def _without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Return names by the same without those of wrappers; by themselves if that is ambiguous."""
    names = list(names)
    found = {_WRAPPER.sub("", name): name for name in names}
    return found if len(found) == len(names) else {name: name for name in names}


def _starts(
    keys: Mapping[str, str], places: Mapping[str, str], tied: Mapping[str, Sequence[str]], prefix: str | None
) -> list[tuple[str, str]]:
    """Return candidates of a prefix in the file, and of one in the network that the file lacks."""
    if prefix is not None:
        return [(_WRAPPER.sub("", f"{prefix.rstrip('.')}.") if prefix else "", "")]
    for names in tied.values():  # the first tensor may be missing
        found: dict[tuple[str, str], None] = {}
        for place in (places[name] for name in names):
            parts = place.split(".")
            for depth in range(min(len(parts), 3)):
                lead = "".join(f"{part}." for part in parts[:depth])
                end = place.removeprefix(lead)
                shorter = {own.removeprefix(lead) for own in places.values()} if lead else places
                if len(shorter) == len(places):  # else two tensors would have one name
                    starts = [key.removesuffix(end) for key in keys if key.endswith(end)]
                    found |= {(start, lead): None for start in starts if not start or start.endswith(".")}
        if found:
            return list(found)
    return []


def _surplus(tensors: Mapping[str, Tensor], module: nn.Module, names: _Names, patterns: Sequence[str]) -> list[str]:
    """Return the tensors of a file that the network lacks, without ignored ones and constants of the architecture."""
    held = {names.expected(name) for name in names.places}
    constants = {names.expected(name): value for name, value in module.named_buffers(remove_duplicate=False)}
    # Of transformers: regular expressions for names in checkpoints of older versions.
    known = [str(one) for one in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def is_constant(place: str, key: str) -> bool:
        own, found = constants.get(place), tensors[key]
        if own is None or own.shape != found.shape:
            return any(re.search(one, place) for one in known)
        # Rounding to 16 bits may have changed it.
        return own.is_meta or torch.allclose(own.double(), found.double(), rtol=1e-2, atol=1e-6)

    return [
        key
        for place, key in names.keys.items()
        if place.startswith(names.start) and place not in held
        if not any(fnmatch(key, one) or fnmatch(place.removeprefix(names.start), one) for one in patterns)
        if not is_constant(place, key)
    ]


def listed(names: Sequence[object]) -> str:
    """Return the first ten names in quotes, or numbers, and how many there are besides.

    Args:
        names: At least one.
    """
    more = len(names) - _LISTED
    return ", ".join(map(repr, names[:_LISTED])) + (f" and {more} other{'s' * (more > 1)}" if more > 0 else "")


def _pattern(names: Sequence[str], others: Iterable[str]) -> str:
    """Return patterns for names that match no others, as an option takes them."""
    parts = [name.split(".") for name in others]
    starts = {".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)}
    found: dict[str, None] = {}
    for name in names:
        part = name.split(".")
        depth = next((one for one in range(1, len(part)) if ".".join(part[:one]) not in starts), len(part))
        found[".".join(part[:depth]) + ".*" * (depth < len(part))] = None
    return f"'{','.join(list(found)[:_LISTED])}'"


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


def _missing(
    tensors: Mapping[str, Tensor],
    needed: list[str],
    closest: _Names,
    kind: str,
    source: str,
    described: str | Path | None,
    *,
    proposing: bool,
) -> str:
    missing = closest.missing
    remedy = "pass the class and the arguments that the network was built with"
    if described is not None:
        remedy = f"check that all its shards are there, and that {described} describes the network of these weights"
    proposal = ""
    if proposing and 2 * len(missing) < len(needed):
        others = {closest.expected(name) for name in needed} - {*missing}
        proposal = f", or leave them out with --ignore {_pattern(missing, others)}"
    return (
        f"{source} does not hold {listed(missing)} of {kind}; it holds {', '.join(map(repr, list(tensors)[:3]))}"
        f"{'...' if len(tensors) > 3 else ''}; {remedy}{proposal}."
    )
