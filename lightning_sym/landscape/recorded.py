"""Functions of tensors that are called often, as the plain operations that they come to."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

# Calls before a function is recorded: recording takes as long as about a hundred calls.
_OFTEN = 50
_VIEWS = {torch.ops.aten.detach.default, torch.ops.aten.expand.default, torch.ops.aten.view.default}


class Recorded:
    """A function of tensors that is recorded once it has been called often, and played back from then on.

    Vectorising and differentiating a small network takes longer than the operations that come of it, which are the same
    in every call. They are recorded for each set of shapes, and give the same numbers, without gradients. The call
    after that compares both. Where they differ, or nothing can be recorded, because the function looks at values or
    depends on more than its arguments, it is still called, only not as fast.

    Args:
        function: From nested tensors to nested tensors; draws nothing, and depends on its arguments and constants only.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls: Counter[Any] = Counter()
        self._played: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's value."""
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tree_leaves(arguments))
        if self._calls[key] > _OFTEN:
            with torch.no_grad():
                return self._played[key](*arguments)
        self._calls[key] += 1
        if self._calls[key] == _OFTEN:
            self._played[key] = self._record(arguments)
        value = self._function(*arguments)
        if self._calls[key] > _OFTEN:
            with torch.no_grad():
                if not _alike(self._played[key](*arguments), value):
                    self._played[key] = self._function
        return value

    def _record(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            return _without_idle(make_fx(self._function)(*arguments))
        except RuntimeError:  # it looks at values
            return self._function


def _alike(values: Any, others: Any) -> bool:
    """Return whether two nests of tensors are the same up to rounding."""
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().nan_to_num(posinf=0.0).max()), equal_nan=True)
        for a, b in zip(tree_leaves(values), tree_leaves(others), strict=True)
        if b.numel()
    )


def _without_idle(graph: GraphModule) -> GraphModule:
    """Remove views of the same shape, and unused nodes."""
    for node in graph.graph.nodes:
        given = node.args[0].meta.get("tensor_meta") if node.target in _VIEWS else None
        if given is not None and given.shape == node.meta["tensor_meta"].shape:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
