"""Compute values that are equal for all inputs while a network runs on tensors without data."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

_READ, _WRITTEN = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_DATA: Any = torch.Tensor.data
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "empty", "dropout")


class Folding(TorchFunctionMode):
    """Computes integers and masks that are independent of the input; reads ``tensor.data`` as ``tensor.detach()``.

    A known mask in an index is replaced by the indices of its true entries, so that their number is known.

    Args:
        known: Pairs of a tensor without data and its value.
    """

    def __init__(self, known: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()
        for tensor, value in known:
            self._known[tensor] = _copy(value)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if function == _DATA.__get__:
            return args[0].detach()
        if function in (_READ, _WRITTEN):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(place for item in index for place in self._places(item)), *args[2:])
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = getattr(function, "__name__", "")
        if any(self._value(tensor) is None for tensor in tensors) or name.startswith(_RANDOM):
            if name == "__setitem__" or name.rstrip("_") != name or name.startswith("__i") or "out" in kwargs:
                self._forget(args[0] if args else None)
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._run(function, args, kwargs)  # tensors with data are known anyway
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(result)):
            values = pytree.tree_leaves(self._run(function, args, kwargs))
            for leaf, value in zip(pytree.tree_leaves(result), values, strict=True):
                if isinstance(leaf, FakeTensor) and isinstance(value, Tensor) and not value.is_floating_point():
                    self._known[leaf] = value
        return result

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor; None if it is unknown."""
        if tensor not in self._known and not isinstance(tensor, (FakeTensor, torch.nn.Parameter)):
            self._known[tensor] = _copy(tensor) if type(tensor) is Tensor and not tensor.is_meta else None
        found: Tensor | None = self._known.get(tensor)
        return found

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a function on the values."""
        args, kwargs = pytree.tree_map_only(Tensor, self._value, (args, dict(kwargs)))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    def _places(self, item: Any) -> tuple[Any, ...]:
        """Replace a known mask in an index by index tensors, and known bounds of a slice by numbers."""
        if isinstance(item, slice):
            return (slice(*map(self._bound, (item.start, item.stop, item.step))),)
        if not isinstance(item, Tensor) or item.dtype != torch.bool or not item.ndim:
            return (item,)
        value = self._value(item)
        if value is None:
            return (item,)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return value.nonzero(as_tuple=True)

    def _bound(self, given: Any) -> Any:
        """Return the bound of a slice as a number if its value is known."""
        value = self._value(given) if isinstance(given, Tensor) else None
        return given if value is None else int(value)

    def _forget(self, written: Any) -> None:
        """Forget the values of all tensors that share memory with a written tensor."""
        value = self._known.get(written) if isinstance(written, Tensor) else None
        if value is not None:
            memory = value.untyped_storage()._cdata
            for tensor, own in list(self._known.items()):
                if own is not None and own.untyped_storage()._cdata == memory:
                    self._known[tensor] = None


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with data, outside the fake mode."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().clone()
