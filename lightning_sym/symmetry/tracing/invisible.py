"""What is asked of the nodes of a captured graph: names, shapes, arguments, memory that is written into."""

from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import operation_name


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operation, without the mark of writing in place."""
    return operation_name(node.target).removesuffix("_") if node.op == "call_function" else node.op


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the one tensor that a node makes, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operation, wherever it was given."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def moved(node: fx.Node, tensor: Tensor) -> Any:
    """Run an operation that only moves elements on another tensor; None if it needs tensors besides."""
    if any(isinstance(other, fx.Node) for other in torch.utils._pytree.tree_leaves((node.args[1:], node.kwargs))):
        return None
    if name_of(node) in ("view", "_unsafe_view"):
        shape: Any = node.args[1]
        return tensor.reshape(shape) if isinstance(shape, (list, tuple)) else None
    target: Any = node.target
    return target(tensor, *node.args[1:], **node.kwargs)


def shared_memory(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes in whose memory something is written that one of their other readers may see."""
    nodes = {node: place for place, node in enumerate(graph.nodes)}
    by_memory: dict[int, list[fx.Node]] = {}
    written: set[int] = set()
    for node, place in nodes.items():
        memories = memories_of(node)
        for target in _written(node):
            for memory in memories_of(target):
                others = [other for other in by_memory.get(memory, ()) if other is not target]
                late = any(nodes[user] > place for other in (target, *others) for user in other.users)
                if late or target.op == "placeholder" or shape_of(target) != shape_of(node):
                    written.add(memory)
        for memory in memories:
            by_memory.setdefault(memory, []).append(node)
    return {node for memory in written for node in by_memory[memory]}


def memories_of(node: fx.Node) -> set[int]:
    """Return which memory the tensors lie in that a node makes."""
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    dense = (value for value in values if isinstance(value, Tensor) and value.layout == torch.strided)
    return {int(value.untyped_storage()._cdata) for value in dense}


def _written(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found = []
    for index, own in enumerate(node.target._schema.arguments):
        if own.alias_info is not None and own.alias_info.is_write:
            given = argument(node, index, own.name)
            found += [leaf for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
    return found


def reduced(node: fx.Node, rank: int) -> set[int]:
    """Return the axes over which a mean or sum goes."""
    axes = argument(node, 1, "dim")
    axes = range(rank) if axes is None else [axes] if isinstance(axes, int) else axes
    return {axis % rank for axis in axes} or set(range(rank))
