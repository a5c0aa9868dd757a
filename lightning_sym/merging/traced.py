"""Symmetries of architectures that this process has traced before: merges of one architecture trace it once."""

import copy
import hashlib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sym.symmetry import Call, Symmetry, trace_symmetry
from lightning_sym.symmetry.architecture import held_by
from lightning_sym.symmetry.tracing.graph.capture import first_names, places_of, unsaved_places
from lightning_sym.symmetry.tracing.labelling.rules import leaf_types, own_operations

_MOST = 4  # architectures
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_traced: OrderedDict[Any, Symmetry] = OrderedDict()


def linear_symmetry(network: nn.Module, example: Call) -> Symmetry:
    """Trace the symmetry of a network without translations and without a self-test, or return that of an earlier trace.

    An earlier one is returned if the networks differ in nothing but their weights: it compares the modules' classes
    with the code of their methods, all attributes of modules, shapes and shared memory of tensors, constants, and the
    example. Networks with custom tracing rules, or with attributes that cannot be compared, are always traced.

    Args:
        network: The network. Not changed.
        example: Its arguments.

    Returns:
        The symmetry, with notes that the caller may replace.

    Raises:
        ValueError: As :func:`trace_symmetry`.
    """
    key = _key(network, example)
    symmetry = _traced.get(key)
    if symmetry is None or not _fits(symmetry, network):
        symmetry = trace_symmetry(network, example, check=False, shifts=False)
        if key is not None and _has_no_zeros(symmetry, network):
            _traced[key] = symmetry
    if key in _traced:
        _traced.move_to_end(key)
        while len(_traced) > _MOST:
            _traced.popitem(last=False)
    return copy.copy(symmetry)


def forget() -> None:
    """Forget all earlier traces."""
    _traced.clear()


def _key(network: nn.Module, example: Call) -> Any:
    """Return a digest of a network without its weights, and of an example; None if parts cannot be compared."""
    own, _ = held_by(network)
    leaves, form = pytree.tree_flatten(tuple(example))
    if not own or leaf_types() or len(own_operations()) > 1:
        return None
    if not all(isinstance(leaf, (*_PLAIN, Tensor)) for leaf in leaves):
        return None
    firsts = first_names(network)
    places = [
        (name, firsts[name], type(tensor).__name__, *_kind_of(tensor)) for name, tensor in places_of(network).items()
    ]
    given = [(*_kind_of(leaf), _digest(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    whole = (own, places, sorted(unsaved_places(network)), given, form, torch.get_default_dtype())
    return hashlib.sha256(repr(whole).encode()).digest()


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _digest(tensor: Tensor) -> bytes:
    numbers: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(numbers).digest()


def _fits(symmetry: Symmetry, network: nn.Module) -> bool:
    """Return whether a network has the constants of a traced one, and none of its gains is zero."""
    try:
        symmetry.architecture.require(network)
    except ValueError:
        return False
    return _has_no_zeros(symmetry, network)


def _has_no_zeros(symmetry: Symmetry, network: nn.Module) -> bool:
    """Return whether no gain of a network is zero: such gains exclude matrices from its symmetry."""
    return not symmetry.factors.closed(symmetry.tensors(network))
