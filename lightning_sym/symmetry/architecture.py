"""What two networks must share for one's symmetry to be the other's: tensors, modules, constants."""

import functools
import hashlib
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn

from lightning_sym.symmetry.tracing.capture import constant_names, first_names, state_tensors

# What a module's description says that evaluation does not see.
_TRAINING_ONLY = re.compile(r"(^|, )(inplace(=\w+)?|momentum=[^,]+|drop\w*=[^,]+)")
# What to do where two networks cannot share a symmetry, or may not.
ADVICE = "trace the symmetry of each by itself; symmetry.check(network) tells what an element would change there"
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Architecture:
    """What defines a network's function besides its weights, as far as it can be seen without running it.

    Args:
        network: The network that was traced.
        constants: The tensors that evaluation reads and no element moves, by name: integer buffers, masks, and buffers
            that are in no state dict. They are compared by value where they have one.
    """

    def __init__(self, network: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        states = state_tensors(network)
        self.layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in states.items()}
        self.leaves = _leaf_classes(network)
        self.descriptions = _descriptions(network)
        self.settings = _settings(network)
        self.unsaved = constant_names(network)
        self.names = first_names(network)
        self.constants = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in constants.items() if not tensor.is_meta
        }

    def require_tensors(self, network: nn.Module) -> None:
        """Check that a network has the same tensors, and modules of the same classes.

        Raises:
            TypeError: If it is no network.
            ValueError: If something differs.
        """
        if not isinstance(network, nn.Module):
            raise TypeError(f"expected a network of the traced architecture, got {type(network).__name__}")
        shapes = {name: tuple(tensor.shape) for name, tensor in state_tensors(network).items()}
        for name, (shape, _) in self.layout.items():
            if shapes.get(name) != shape:
                found = f"has shape {list(shapes[name])} there" if name in shapes else "has no such tensor"
                raise ValueError(f"the network {found}: {name}; expected shape {list(shape)}, as in the traced network")
        if extra := next((name for name in shapes if name not in self.layout), None):
            raise ValueError(f"the network holds {extra}, which the traced network does not")
        for name in sorted(self.unsaved ^ constant_names(network)):
            found = "out of" if name in self.layout and name not in self.unsaved else "in"
            raise ValueError(
                f"buffer {name} is kept {found} the state dict there; expected a buffer as in the traced network"
            )
        leaves = _leaf_classes(network)
        for name in (*self.leaves, *leaves):
            if leaves.get(name) != self.leaves.get(name):
                found, expected = leaves.get(name, "missing"), self.leaves.get(name, "no module")
                raise ValueError(f"module {name} is {found} there; expected {expected}, as in the traced network")

    def require(self, network: nn.Module) -> None:
        """Check that a network has the same tensors, modules, descriptions of modules and constants.

        Raises:
            TypeError: If it is no network.
            ValueError: If something differs.
        """
        self.require_tensors(network)
        for name, found in _descriptions(network).items():
            if found != self.descriptions.get(name):
                raise ValueError(
                    f"module {name} is ({found}) there; expected ({self.descriptions.get(name)}), as in the traced "
                    f"network: {ADVICE}"
                )
        states = state_tensors(network)
        for name, constant in self.constants.items():
            if states[name].is_meta:
                continue
            other = states[name].detach().to("cpu", torch.promote_types(constant.dtype, states[name].dtype))
            if not torch.equal(other, constant.to(other.dtype)):
                raise ValueError(
                    f"the constant buffer {name} holds other values there; expected those of the traced network: "
                    f"{ADVICE}"
                )

    def other_settings(self, network: nn.Module) -> dict[str, Any]:
        """Return the classes and attributes of modules, with their values, that are not those of the traced network."""
        own, theirs = self.settings, _settings(network)
        return {
            name: theirs.get(name)
            for name in (*own, *theirs)
            if name not in theirs or name not in own or own[name] != theirs[name]
        }

    @cached_property
    def text(self) -> str:
        """What is compared of shapes and modules, as text."""
        return repr(([(name, shape) for name, (shape, _) in self.layout.items()], self.leaves))


def _leaf_classes(network: nn.Module) -> dict[str, str]:
    """Return the class of every module without children."""
    return {name: type(module).__name__ for name, module in network.named_modules() if not any(module.children())}


def _descriptions(network: nn.Module) -> dict[str, str]:
    """Return what each module says of itself (sizes, slopes, groups, eps), but for what only training sees."""
    return {
        name: _TRAINING_ONLY.sub("", module.extra_repr())
        for name, module in network.named_modules()
        if not isinstance(module, nn.modules.dropout._DropoutNd)
    }


def _settings(network: nn.Module) -> dict[str, Any]:
    """Return what modules hold besides tensors of the state and other modules, and their classes and hooks.

    Containers and plain objects (a configuration) are seen through; functions are known by their names, constant
    tensors and arrays by their values.
    """
    describe = _Description(network)
    found: dict[str, Any] = {}
    for prefix, module in network.named_modules():
        if any(module.children()):
            found[f"{prefix}.__class__"] = _name_of(type(module))
        found[f"{prefix}.forward"] = _code_of(type(module).forward)
        for name, value in vars(module).items():
            if name not in _MODULE and not (isinstance(module, nn.modules.dropout._DropoutNd) and name == "p"):
                found[f"{prefix}.{name}"] = describe(value)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if hooks := getattr(module, name):
                found[f"{prefix}.{name}"] = describe(list(hooks.values()))
    return found


def _name_of(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


# What every module has, and what says nothing of its function.
_MODULE = {*vars(nn.Module()), "training", "inplace"}


class _Description:
    """Turns attributes into numbers, words and tuples of them, so that two networks' can be compared."""

    def __init__(self, network: nn.Module) -> None:
        self._weights = {id(tensor) for tensor in state_tensors(network).values()}

    def __call__(self, value: Any, *, inside: bool = False) -> Any:
        """Describe an attribute, or what stands inside an object, of which objects are only named."""
        inner = functools.partial(self, inside=inside)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Enum):
            return str(value)
        if isinstance(value, Mapping):
            return tuple((str(key), inner(item)) for key, item in value.items())
        if isinstance(value, (tuple, list)):
            return tuple(inner(item) for item in value)
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(repr(inner(item)) for item in value))
        if isinstance(value, torch.Tensor):
            if id(value) in self._weights or isinstance(value, nn.Parameter):
                return "a weight"
            if value.is_meta:
                return "a tensor without values"
            return f"a tensor of {digest(value.detach().to('cpu', torch.float64).numpy())}"
        if isinstance(value, np.ndarray):
            return f"an array of {digest(value)}"
        if isinstance(value, functools.partial):
            return (inner(value.func), inner(value.args), inner(value.keywords))
        if isinstance(value, nn.Module):
            return type(value).__name__
        if hasattr(value, "__qualname__"):
            return (_name_of(value), *_code_of(value))
        if inside or not hasattr(value, "__dict__"):
            return type(value).__name__
        return (type(value).__name__, *self(vars(value), inside=True))


def _code_of(function: Any) -> tuple[Any, ...]:
    """Return what a function written in Python calls, and the constants in it and around it: a lambda has no name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    around = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    constants = [value for value in (*code.co_consts, *around) if isinstance(value, _PLAIN)]
    return (digest(code.co_code, code.co_names, constants),)


def digest(*parts: Any) -> str:
    """Return a short hash of texts, arrays, sparse matrices and dataclasses of them."""
    state = hashlib.sha256()

    def add(part: Any) -> None:
        if is_dataclass(part) and not isinstance(part, type):
            add([getattr(part, own.name) for own in fields(part)])
        elif sparse.issparse(part):
            add([part.shape, part.indptr.astype(np.int64), part.indices.astype(np.int64), part.data])
        elif isinstance(part, np.ndarray):
            state.update(repr(part.shape).encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, (list, tuple)):
            state.update(b"(")
            for item in part:
                add(item)
            state.update(b")")
        else:
            state.update(repr(part).encode() + b";")

    add(parts)
    return state.hexdigest()[:16]
