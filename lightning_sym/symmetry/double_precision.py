"""Copies of networks compute in double precision throughout, also where the network casts to lower precisions."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_WIDER = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
_CASTS = {
    getattr(Tensor, name): getattr(Tensor, wider)
    for name, wider in [("float", "double"), ("half", "double"), ("bfloat16", "double"), ("cfloat", "cdouble")]
}
# Casts that take a tensor, or the name of a type of tensors, for its type.
_LIKE = {Tensor.to, Tensor.type, Tensor.type_as}
_LEGACY = {f"torch.{name}Tensor": torch.float64 for name in ("Half", "BFloat16", "Float")}


def in_double_precision(network: nn.Module) -> nn.Module:
    """Let a network in float64 ignore its own casts to lower precisions, if it runs without them.

    Many transformers normalise or take the softmax in single precision. This rounding would hide small changes of the
    outputs, and the rank of the Jacobian.

    Args:
        network: Its method ``forward`` is replaced. Deep copies do the same.

    Returns:
        The network.
    """
    own = vars(network).get("forward", type(network).forward)
    run = getattr(own, "__func__", own)

    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if "_needs_casts" not in vars(self):
            try:
                with _DoublePrecision():
                    return run(self, *args, **keywords)
            except Exception:  # a kernel for one precision; other errors are raised again below
                result = run(self, *args, **keywords)
                vars(self)["_needs_casts"] = True
                return result
        return run(self, *args, **keywords)

    vars(network)["forward"] = MethodType(forward, network)
    return network


class _DoublePrecision(TorchFunctionMode):
    """Replaces lower precisions by float64 and complex128 in functions of tensors in double precision.

    Constants keep theirs, as caches outside of the network may hold them.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        leaves = pytree.tree_leaves(given)
        if not any(isinstance(leaf, Tensor) and leaf.dtype in _WIDER.values() for leaf in leaves):
            try:
                return function(*args, **given[1])
            except RuntimeError:  # the least number of float64, as a mask's value without a type
                if function is not torch.full or given[1].get("dtype") is not None:
                    raise
                return function(*args, **given[1], dtype=torch.float64)
        function = _CASTS.get(function, function)
        if function in _LIKE:
            given = pytree.tree_map(lambda leaf: _LEGACY.get(leaf, leaf) if isinstance(leaf, str) else leaf, given)
            given = given[0][:1] + pytree.tree_map_only(Tensor, _widened, given[0][1:]), given[1]
        # A view reads the same bits as numbers of another type.
        if function is not Tensor.view and any(isinstance(leaf, torch.dtype) for leaf in leaves):
            given = pytree.tree_map_only(torch.dtype, lambda dtype: _WIDER.get(dtype, dtype), given)
        try:
            result = function(*given[0], **given[1])
        except RuntimeError:  # a product of two precisions
            wide = pytree.tree_map_only(Tensor, _widened, given)
            if all(a is b for a, b in zip(pytree.tree_leaves(wide), pytree.tree_leaves(given), strict=True)):
                raise
            result = function(*wide[0], **wide[1])
        if getattr(function, "__name__", "").endswith("_") or given[1].get("out") is not None:
            return result  # changed in place
        return _widened(result) if isinstance(result, Tensor) else pytree.tree_map_only(Tensor, _widened, result)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDER[tensor.dtype]) if tensor.dtype in _WIDER else tensor
