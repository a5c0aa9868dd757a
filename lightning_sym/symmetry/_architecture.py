"""What two networks must share for one's symmetry to be the other's: tensors, modules, constants."""

import hashlib
import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn

from lightning_sym.symmetry._capture import constant_names, state_tensors

# What a module's description says that evaluation does not see.
_TRAINING_ONLY = re.compile(r"(^|, )(inplace(=\w+)?|momentum=[^,]+|drop\w*=[^,]+)")
# What to do where two networks cannot share a symmetry, or may not.
ADVICE = "trace the symmetry of each by itself; symmetry.check(network) tells what an element would change there"
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Architecture:
    """What defines a network's function besides its weights, as far as it can be seen without running it.

    Args:
        network: The network that was traced.
        constants: The names of the tensors that evaluation reads and no element moves: integer buffers, masks, and
            buffers that are in no state dict. They are compared by value.
    """

    def __init__(self, network: nn.Module, constants: Collection[str]) -> None:
        states = state_tensors(network)
        self.layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in states.items()}
        self.leaves = _leaf_classes(network)
        self.descriptions = _descriptions(network)
        self.settings = _settings(network)
        self.unsaved = constant_names(network)
        self.constants = {name: states[name].detach().to("cpu", copy=True) for name in constants}

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
            other = states[name].detach().to("cpu", torch.promote_types(constant.dtype, states[name].dtype))
            if not torch.equal(other, constant.to(other.dtype)):
                raise ValueError(
                    f"the constant buffer {name} holds other values there; expected those of the traced network: "
                    f"{ADVICE}"
                )

    def other_settings(self, network: nn.Module) -> dict[str, Any]:
        """Return the plain attributes of modules, with their values, that are not those of the traced network."""
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
    """Return the plain public attributes of all modules: numbers, words, and functions by their names."""
    found: dict[str, Any] = {}
    for prefix, module in network.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, _PLAIN):
                found[f"{prefix}.{name}"] = value
            elif isinstance(value, (tuple, list)) and all(isinstance(item, _PLAIN) for item in value):
                found[f"{prefix}.{name}"] = tuple(value)
            elif callable(value) and hasattr(value, "__qualname__"):
                found[f"{prefix}.{name}"] = f"{value.__module__}.{value.__qualname__}"
    return found


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
