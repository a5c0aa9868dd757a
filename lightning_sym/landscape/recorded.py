"""Functions of tensors that are called often, as the plain operations that they come to."""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# Calls before a function is recorded, which takes as long as a few calls.
_OFTEN = 5
_SAME = {f.default for f in (torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.expand, torch.ops.aten.view)}
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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
        given = tree_leaves(arguments)
        try:
            with _Tape(given) as tape:
                values, form = tree_flatten(self._function(*arguments))
        except _LooksAtValuesError:
            return self._function
        play = tape.played(values)
        return lambda *arguments: tree_unflatten(play(*tree_leaves(arguments)), form)


class _LooksAtValuesError(RuntimeError):
    """The operations of a function depend on the values of its tensors."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations on tensors as they come, below the layers that vectorise and differentiate, as a graph.

    ``torch.fx`` records the same with ``make_fx``, in twenty times the time.

    Args:
        given: The arguments; other tensors that no operation makes are constants.
    """

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = Graph(), dict[str, Tensor]()
        self._kept: list[Tensor] = []  # a tensor's identity is its own only as long as it lives
        self._nodes: dict[int, Node] = {}
        for number, tensor in enumerate(given):
            self._add(tensor, self.graph.placeholder(f"given_{number}"))

    def _add(self, tensor: Tensor, node: Node) -> None:
        self._kept.append(tensor)
        self._nodes[id(tensor)] = node

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            self._add(tensor, self.graph.get_attr(name))
        return self._nodes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _UNKNOWN.intersection(func.tags):
            raise _LooksAtValuesError
        kwargs = kwargs or {}
        node = self.graph.call_function(func, *tree_map_only(Tensor, self._node, (args, kwargs)))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self._add(found, node)
            same = func in _SAME or (func is torch.ops.aten.mul.Scalar and args[1] == 1)
            if same and found.shape == args[0].shape and found.dtype == args[0].dtype:
                node.meta["same"] = self._node(args[0])
        else:
            for number, part in enumerate(found):
                if isinstance(part, Tensor):
                    self._add(part, self.graph.call_function(operator.getitem, (node, number)))
        return found

    def played(self, values: list[Tensor]) -> Callable[..., list[Tensor]]:
        """Return the recorded function, from its arguments to some of its tensors."""
        self.graph.output([self._node(value) for value in values])
        schemas = [getattr(node.target, "_schema", None) for node in self.graph.nodes]
        if not any(schema is not None and schema.is_mutable for schema in schemas):
            for node in self.graph.nodes:
                if "same" in node.meta:
                    node.replace_all_uses_with(node.meta["same"])
        self.graph.eliminate_dead_code()
        play: Callable[..., list[Tensor]] = GraphModule(self.constants, self.graph).forward
        return play


def _alike(values: Any, others: Any) -> bool:
    """Return whether two nests of tensors are the same up to rounding."""
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().nan_to_num(posinf=0.0).max()), equal_nan=True)
        for a, b in zip(tree_leaves(values), tree_leaves(others), strict=True)
        if b.numel()
    )
