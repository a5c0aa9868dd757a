"""Comparison of architectures: the tensors, modules and constants that networks of one symmetry share."""

import hashlib
import io
import pickle
import re
import types
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn

from lightning_sym.symmetry.tracing.graph.capture import (
    address_of,
    first_names,
    memory_of,
    places_of,
    state_tensors,
    unsaved_places,
)

# Parts of a module's description that do not matter in evaluation.
_TRAINING_ONLY = re.compile(r"(^|, )(inplace(=\w+)?|momentum=[^,]+|drop\w*=[^,]+)")
# Advice where two networks do not share a symmetry, or may not.
ADVICE = "trace the symmetry of each by itself; symmetry.check(network) tells what an element would change there"
_SHORT = (torch.float16, torch.bfloat16)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Architecture:
    """The definition of a network's function apart from its weights, as far as visible without running it.

    Args:
        network: The traced network.
        constants: Tensors by name that evaluation reads and no element changes: integer buffers, masks, and buffers
            outside the state dict. They are compared by value where they have one.
        moving: Names of the tensors that elements change.
    """

    def __init__(self, network: nn.Module, constants: Mapping[str, torch.Tensor], moving: Collection[str] = ()) -> None:
        states = state_tensors(network)
        self.layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in states.items()}
        self.leaves = _leaf_classes(network)
        self.descriptions = _descriptions(network)
        self.settings = _settings(network)
        self.unsaved = unsaved_places(network)
        self.names = first_names(network)
        self.moving = frozenset(moving)
        self.constants = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in constants.items() if not tensor.is_meta
        }
        self._rounded = _rounded_to(states)

    def require_tensors(self, network: nn.Module) -> None:
        """Check that a network has the same tensors, and modules of the same classes.

        Raises:
            ValueError: If they differ.
        """
        places, unsaved = places_of(network), unsaved_places(network)
        for name, first in self.names.items():
            shape, _ = self.layout[first]
            if name in places and name in self.unsaved and first not in self.constants:
                continue  # not read: a network may replace it when it runs
            if name not in places or tuple(places[name].shape) != shape:
                found = f"has shape {list(places[name].shape)} there" if name in places else "has no such tensor"
                advice = _wrapped(places, self.names) or _made(places, name)
                raise ValueError(
                    f"the network {found}: {name}; expected shape {list(shape)}, as in the traced network{advice}"
                )
        kept = unsaved - self.names.keys()  # buffers that the network made when it ran
        if extra := next((name for name in places if name not in self.names and name not in kept), None):
            raise ValueError(f"the network holds {extra}, which the traced network does not")
        for name in sorted(self.unsaved ^ (unsaved - kept)):
            found = "in" if name in self.unsaved else "out of"
            raise ValueError(
                f"buffer {name} is kept {found} the state dict there; expected a buffer as in the traced network"
            )
        self._require_sharing(network, places)
        leaves = _leaf_classes(network)
        for name in (*self.leaves, *leaves):
            if leaves.get(name) != self.leaves.get(name):
                found, expected = leaves.get(name, "missing"), self.leaves.get(name, "no module")
                raise ValueError(f"module {name} is {found} there; expected {expected}, as in the traced network")

    def first_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the first names of tensors.

        Args:
            tensors: Parameters and buffers, by any of their names in the network.

        Raises:
            ValueError: If the network has no tensor of some name, or names of one tensor hold other numbers.
        """
        if other := next((name for name in tensors if name not in self.names), None):
            expected = f"expected names of its state dict, as {next(iter(self.names), 'none')}"
            raise ValueError(f"the traced network has no tensor {other}; {expected}")
        found = {name: self.names[name] for name in tensors}
        for name, first in found.items():
            if name != first and first in tensors and not _same_numbers(tensors[name], tensors[first]):
                raise ValueError(
                    f"{first} and {name} are one tensor in the traced network and hold other numbers here; expected "
                    f"weights that are shared as in the traced network: {ADVICE}"
                )
        return found

    def _require_sharing(self, network: nn.Module, places: Mapping[str, torch.Tensor]) -> None:
        """Check that tensors share memory as in the traced network, or are equal where only those share it.

        Names of one tensor in the traced network may belong to several tensors here (``network.double()`` splits
        them), as long as these are equal: the function is then the same.
        """
        holders: dict[Any, str] = {}
        for place, first in self.names.items():
            tensor = places[place]
            other = holders.setdefault(memory_of(tensor), first)
            if other != first:
                raise ValueError(
                    f"{other} and {place} are one tensor there and two in the traced network, and elements move these "
                    f"apart; expected weights that are shared as in the traced network: {ADVICE}"
                )
            if place != first and not _same_numbers(tensor, places[first]):
                raise ValueError(
                    f"{first} and {place} are one tensor in the traced network and hold other numbers there; expected "
                    f"weights that are shared as in the traced network: {ADVICE}"
                )

    def require_apart(self, network: nn.Module, held: Collection[tuple[str, torch.Tensor]] = ()) -> None:
        """Check that no tensor that elements change shares a part of its memory with another one.

        Args:
            network: The network.
            held: Tensors that modules hold in addition to parameters and buffers, with names for them.

        Raises:
            ValueError: If one does.
        """
        tensors = state_tensors(network)
        names = {f"{index} of {name}": name for index, (name, _) in enumerate(held)}
        tensors |= dict(zip(names, (tensor for _, tensor in held), strict=True))
        for pair in overlaps(tensors, self.moving):
            one, two = (
                f"a tensor that {names[name] or 'the network'} holds" if name in names else name for name in pair
            )
            which = f"{one} and {two} share" if one != two else f"several entries of {one} share"
            raise ValueError(
                f"{which} memory, so no element can change one without the other; expected separate tensors (clone() "
                "one of them), or a parameter or buffer that is the whole tensor under a second name"
            )

    def require(self, network: nn.Module) -> None:
        """Check that a network has the same tensors, modules, descriptions of modules and constants.

        Raises:
            TypeError: If `network` is not a module.
            ValueError: If they differ.
        """
        self.require_tensors(network)
        for name, found in _descriptions(network).items():
            if found != self.descriptions.get(name):
                raise ValueError(
                    f"module {name} is ({found}) there; expected ({self.descriptions.get(name)}), as in the traced "
                    f"network: {ADVICE}"
                )
        states = state_tensors(network) if self.constants else {}
        for name, constant in self.constants.items():
            if states[name].is_meta:
                continue
            if not self._same_constant(constant, states[name].detach().cpu(), states):
                raise ValueError(
                    f"the constant buffer {name} holds other values there; expected those of the traced network: "
                    f"{ADVICE}"
                )

    def _same_constant(self, own: torch.Tensor, other: torch.Tensor, states: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a network's constant is the traced one, possibly rounded by a cast (``half()``)."""
        if same_but_for_rounding(own, other):
            return True
        if not (own.is_floating_point() and other.is_floating_point()):
            return False
        # half().float() leaves no trace in dtypes, but all numbers are then 16-bit numbers.
        there, here = _rounded_to(states), self._rounded
        return any(_made_of(other, own, kind) for kind in there) or any(_made_of(own, other, kind) for kind in here)

    def other_setting(self, network: nn.Module) -> str:
        """Describe the first difference between modules' settings and those of the traced network; empty if none."""
        theirs = _settings(network)
        for name in dict.fromkeys((*self.settings, *theirs)):
            own, other = (settings.get(name, "missing") for settings in (self.settings, theirs))
            if own != other:
                return f"{name.lstrip('.')} is {other!r} there; expected {own!r}, as in the traced network"
        return ""

    @cached_property
    def text(self) -> str:
        """The compared shapes and modules, as text."""
        return repr(([(name, shape) for name, (shape, _) in self.layout.items()], self.leaves))


def _wrapped(places: Collection[str], traced: Collection[str]) -> str:
    """Advise on the network to pass if one of two networks wraps the other, as DataParallel or torch.compile do.

    Args:
        places: Names of tensors of the network.
        traced: Names of tensors of the traced network.
    """
    for outer, inner, whose, advice in (
        (places, traced, "its names have", "pass"),
        (traced, places, "the traced network's names have", "trace"),
    ):
        first = next(iter(inner), "")
        for prefix in [name.removesuffix(first) for name in outer if name.endswith(f".{first}")]:
            if {name.removeprefix(prefix) for name in outer if name.startswith(prefix)} == set(inner):
                path = prefix.removesuffix(".")
                dotted = all(part.isidentifier() for part in path.split("."))
                module = f"network.{path}" if dotted else f"network.get_submodule({path!r})"
                return f": {whose} the prefix {prefix!r}; {advice} {module}, the network inside the wrapper"
    return ""


def _made(places: Collection[str], name: str) -> str:
    """Advise on weights that a network computes from others, by pruning or a parametrisation."""
    prefix, _, own = name.rpartition(".")
    begin = f"{prefix}." if prefix else ""
    parts = (f"{begin}{own}_orig", f"{begin}{own}_v", f"{begin}parametrizations.{own}.")
    computed = any(place.startswith(parts) for place in places)
    return (
        f": it computes {name} of others, make that permanent first (prune.remove, remove_parametrizations)" * computed
    )


def _same_numbers(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors are equal in values and dtype; NaN equals NaN."""
    if one is two or memory_of(one) == memory_of(two) or one.is_meta or two.is_meta:
        return True
    return one.dtype == two.dtype and bool(((one == two) | (one != one) & (two != two)).all())


def same_but_for_rounding(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of a cast between their dtypes.

    Each entry may differ by half a unit in the last place of the dtype that is less precise there.
    """
    if not (one.is_floating_point() and two.is_floating_point()):
        kind = torch.promote_types(one.dtype, two.dtype)
        return torch.equal(one.to(kind), two.to(kind))
    a, b = one.double(), two.double()  # torch compares no floats of 8 bits
    if one.dtype == two.dtype or one.shape != two.shape:
        return torch.equal(a, b)
    for made, of in ((one, two), (two, one)):
        if made.itemsize <= 2 and any(_made_of(made, of, kind) for kind in _SHORT):  # two successive casts
            return True
    near = (a - b).abs() <= torch.maximum(_unit(one), _unit(two)) / 2
    # Numbers outside the range of one dtype are infinite in it.
    return bool((near | (one.to(two.dtype).double() == b) | (two.to(one.dtype).double() == a)).all())


def _made_of(made: torch.Tensor, of: torch.Tensor, kind: torch.dtype) -> bool:
    """Return whether a tensor equals another one after a cast to some dtype, and from there to its own."""
    return torch.equal(made.double(), of.to(kind).to(made.dtype).double())


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unit in the last place of each entry, in float64; for NaN and infinite entries, that of 0."""
    limits = torch.finfo(tensor.dtype)
    sizes = tensor.double().nan_to_num(0, 0, 0).abs().clamp_min(limits.tiny)
    return limits.eps * 2.0 ** (torch.frexp(sizes)[1] - 1).double()


def _rounded_to(states: Mapping[str, torch.Tensor]) -> list[torch.dtype]:
    """Return the 16-bit dtypes that hold a network's wider numbers exactly, judged by the start of each tensor."""
    wide = [t.detach() for t in states.values() if t.is_floating_point() and t.itemsize > 2 and t.numel()]
    if any(tensor.is_meta or tensor.layout != torch.strided for tensor in wide):
        return []
    rows = [tensor[(0,) * (tensor.ndim - 1)].reshape(-1)[:1000] for tensor in wide]
    return [kind for kind in _SHORT if all(_made_of(row, row, kind) for row in rows)]


def overlaps(tensors: Mapping[str, torch.Tensor], moving: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors that share a part of their memory, where elements change at least one of them.

    A tensor with overlapping entries yields its name twice.

    Args:
        tensors: Distinct tensors by name.
        moving: Names of the tensors that elements change.
    """
    groups: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        try:
            memory, begin = address_of(tensor)
        except (RuntimeError, NotImplementedError, ValueError):  # as in `memory_of`
            continue
        reach = int(sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
        if name in moving and reach + 1 < tensor.numel():
            yield name, name
        groups[memory].append((begin, begin + (reach + 1) * tensor.itemsize, name))
    for group in groups.values():
        group.sort()
        for index, (begin, end, name) in enumerate(group):
            for later, last, other in group[index + 1 :]:
                if later >= end:
                    break
                if (name in moving or other in moving) and _meet(tensors[name], tensors[other], begin, max(end, last)):
                    yield name, other


def _meet(one: torch.Tensor, two: torch.Tensor, begin: int, end: int) -> bool:
    """Return whether two tensors of one storage have a byte in common, within a range of addresses."""
    taken = torch.zeros(end - begin, dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.itemsize
        steps = (*(step * size for step in tensor.stride()), 1)
        return taken.as_strided((*tensor.shape, size), steps, address_of(tensor)[1] - begin)

    bytes_of(one).fill_(True)
    return bool(bytes_of(two).any())


def _leaf_classes(network: nn.Module) -> dict[str, str]:
    """Return the class of every module without children."""
    return {name: type(module).__name__ for name, module in network.named_modules() if not any(module.children())}


def _descriptions(network: nn.Module) -> dict[str, str]:
    """Return each module's own description (sizes, slopes, groups, eps), without details of training."""
    return {
        name: _TRAINING_ONLY.sub("", module.extra_repr())
        for name, module in network.named_modules()
        if not isinstance(module, nn.modules.dropout._DropoutNd)
    }


# Attributes that every module has, without influence on its function.
_MODULE = {*vars(nn.Module()), "training", "inplace"}


def _settings(network: nn.Module) -> dict[str, Any]:
    """Return comparable attributes of modules: classes, numbers, strings, functions, and those inside objects.

    A run decides whether two networks compute the same; this helps to locate the cause of a difference.
    """
    found: dict[str, Any] = {}

    def add(name: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, _PLAIN):
            found[name] = value
        elif isinstance(value, (Enum, type)) or hasattr(value, "__qualname__"):
            found[name] = getattr(value, "__qualname__", str(value))
        elif isinstance(value, (torch.Tensor, nn.Module)) or depth > 3:
            found[name] = type(value).__name__
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                add(f"{name}[{index}]", item, depth + 1)
        else:
            held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            found[name] = type(value).__name__
            for key, item in held.items():
                add(f"{name}.{key}", item, depth + 1)

    for prefix, module in network.named_modules():
        add(f"{prefix}.__class__", type(module))
        for name, value in vars(module).items():
            if name not in _MODULE and not (isinstance(module, nn.modules.dropout._DropoutNd) and name == "p"):
                add(f"{prefix}.{name}", value)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            add(f"{prefix}.{name}", list(getattr(module, name).values()))
    return found


def held_by(network: nn.Module) -> tuple[bytes, list[tuple[str, torch.Tensor]]]:
    """Return a digest of the modules' contents without weights and statistics, and the tensors among them.

    The digest changes with anything reachable from a module: attributes of nested objects, closures and defaults of
    functions, and attributes of the modules' classes. Opaque objects (a lock) are represented by their type.

    Returns:
        The digest, and the tensors, each with the name of the module that holds it.
    """
    walk = _Walk(network)
    try:
        for name, module in network.named_modules():
            walk.module = name
            walk.dump((name, type(module), _state_of(module)))
    except Exception:  # an object cannot be pickled: it may change at any time
        return b"", walk.tensors
    return hashlib.sha256(walk.out.getbuffer()).digest(), walk.tensors


def _state_of(module: nn.Module) -> Any:
    state = module.__getstate__()  # type: ignore[no-untyped-call]
    if not isinstance(state, Mapping):
        return state
    # Lightning's modules omit their trainer; modules and tensors of the network are represented by their names.
    seen = ("training", "_modules", "_parameters", "_buffers")
    return {name: value for name, value in state.items() if name not in seen and (name not in _MODULE or value)}


class _Walk(pickle.Pickler):
    """Serialises all objects reachable from an object; the output is only compared, never read.

    Args:
        network: Its modules and tensors are represented by their names.
    """

    def __init__(self, network: nn.Module) -> None:
        self.out = io.BytesIO()
        super().__init__(self.out, protocol=5)
        self._known: dict[int, str] = {id(tensor): name for name, tensor in places_of(network).items()}
        self._known |= {id(module): f"module {name}" for name, module in network.named_modules()}
        self.module = ""
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def _name_of(self, thing: torch.Tensor | nn.Module) -> str | None:
        """Return the name of one of the network's modules and tensors, and the digest of any other tensor."""
        if id(thing) in self._known:
            return f"the network's {self._known[id(thing)]}"
        if isinstance(thing, nn.Module):
            return None
        self.tensors.append((self.module, thing))
        if thing.is_meta or thing.layout != torch.strided or thing.is_quantized:
            return f"a tensor {tuple(thing.shape)}"
        numbers: Any = thing.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"a tensor {tuple(thing.shape)} {thing.dtype} {hashlib.sha256(numbers).hexdigest()}"

    def reducer_override(self, thing: Any) -> Any:
        """Decompose objects that pickle refuses: classes, and functions by their code and the values they read.

        Tensors and modules are named here, as `persistent_id` would be called for every number and text as well.
        """
        if isinstance(thing, (torch.Tensor, nn.Module)) and (own := self._name_of(thing)) is not None:
            return str, (own,)
        if thing is str:
            return NotImplemented
        name = getattr(thing, "__qualname__", type(thing).__qualname__)
        held: Any = None  # as a state, which may contain the object itself
        if isinstance(thing, type):
            name = f"{thing.__module__}.{name}"
            if thing.__flags__ & _IN_PYTHON and not name.startswith(("torch.", "pytorch_lightning.")):
                held = thing.__bases__, {key: value for key, value in vars(thing).items() if key not in _OF_CLASSES}
        elif isinstance(thing, types.FunctionType):
            code = thing.__code__
            cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
            read = {key: thing.__globals__.get(key) for key in code.co_names}
            plain = {key: value for key, value in read.items() if isinstance(value, _PLAIN)}
            held = code, thing.__defaults__, thing.__kwdefaults__, cells, vars(thing), plain
        elif isinstance(thing, types.CodeType):
            held = thing.co_code, thing.co_consts, thing.co_names
        elif isinstance(thing, types.MethodType):
            held = thing.__func__, thing.__self__
        elif isinstance(thing, (property, staticmethod, classmethod)):
            held = getattr(thing, "fget", None) or getattr(thing, "__func__", None)
        elif not isinstance(thing, (types.BuiltinFunctionType, types.ModuleType)):
            try:
                reduced = thing.__reduce_ex__(4)
            except Exception:
                reduced, held = name, getattr(thing, "__dict__", None)
            if not isinstance(reduced, str):
                return reduced
        return str, (name,), held


# Flag of classes defined in Python.
_IN_PYTHON = 1 << 9
# Attributes that every class has, without influence on its function.
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "_abc_impl"}


def digest(*parts: Any) -> str:
    """Return a short hash of texts, arrays, sparse matrices and dataclasses of them."""
    state = hashlib.sha256()

    def add(part: Any) -> None:
        if is_dataclass(part) and not isinstance(part, type):
            add([getattr(part, own.name) for own in fields(part)])
        elif sparse.issparse(part):
            add([part.shape, part.indptr.astype(np.int64), part.indices.astype(np.int64), part.data])
        elif isinstance(part, np.ndarray):
            state.update(repr(part.shape).encode())
            state.update(np.ascontiguousarray(part).data)
        elif isinstance(part, (list, tuple)):
            state.update(b"(")
            for item in part:
                add(item)
            state.update(b")")
        else:
            state.update(repr(part).encode() + b";")

    add(parts)
    return state.hexdigest()[:16]
