"""Queries on the nodes of a captured graph: shapes, arguments, memory with in-place writes."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the one tensor that a node makes, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def result_shape(node: fx.Node, index: int | None = None) -> tuple[int, ...]:
    """Return the shape of the tensor that a node makes, or of one of several.

    Args:
        node: The node.
        index: Which of several tensors.

    Raises:
        ValueError: If there are several, and no index.
    """
    value = node.meta["val"]
    if index is None and isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"{len(value)} values come out; expected the place of one of them: output_shape(0)")
        index = 0
    return tuple((value if index is None else value[index]).shape)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operation that was passed by position or by keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def moved(node: fx.Node, tensor: Tensor) -> Any:
    """Apply an operation that only moves elements to another tensor; None if it needs further tensors."""
    if any(isinstance(other, fx.Node) for other in pytree.tree_leaves((node.args[1:], node.kwargs))):
        return None
    if name_of(node) in ("view", "_unsafe_view"):
        shape: Any = node.args[1]
        return tensor.reshape(shape) if isinstance(shape, (list, tuple)) else None
    target: Any = node.target
    return target(tensor, *node.args[1:], **node.kwargs)


def shared_memory(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes with memory that is written in place and may be read afterwards through other nodes."""
    nodes = {node: place for place, node in enumerate(graph.nodes)}
    by_memory: dict[int, list[fx.Node]] = {}
    written: set[int] = set()
    for node, place in nodes.items():
        memories = memories_of(node)
        for target in written_by(node):
            for memory in memories_of(target):
                others = [other for other in by_memory.get(memory, ()) if other is not target]
                late = any(nodes[user] > place for other in (target, *others) for user in other.users)
                if late or target.op == "placeholder" or shape_of(target) != shape_of(node):
                    written.add(memory)
        for memory in memories:
            by_memory.setdefault(memory, []).append(node)
    return {node for memory in written for node in by_memory[memory]}


def memories_of(node: fx.Node) -> set[int]:
    """Return the identifiers of the memory of a node's tensors."""
    values = pytree.tree_leaves(node.meta.get("val"))
    dense = (value for value in values if isinstance(value, Tensor) and value.layout == torch.strided)
    return {int(value.untyped_storage()._cdata) for value in dense}


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operation writes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.op != "call_function" or not schema.is_mutable:
        return []
    written = [
        argument(node, at, own.name)
        for at, own in enumerate(schema.arguments)
        if own.alias_info and own.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node)]


def replaces(node: fx.Node) -> bool:
    """Return whether an operation overwrites values of its first argument without reading them."""
    return name_of(node) in operations(Trait.REPLACE) and True not in (*node.args[3:4], node.kwargs.get("accumulate"))


def numbers_of(tensor: Tensor) -> Tensor:
    """Return the position in memory of each element of a tensor."""
    numbers = torch.full((), tensor.storage_offset())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        numbers = numbers[..., None] + torch.arange(size) * step
    return numbers


def ancestors(node: fx.Node) -> dict[fx.Node, None]:
    """Return a node, first, and all nodes that it depends on."""
    found, left = {node: None}, [node]
    while left:
        new = [given for given in left.pop().all_input_nodes if given not in found]
        found |= dict.fromkeys(new)
        left += new
    return found


def between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the nodes of a graph between two nodes."""
    found = []
    while (first := first.next) is not last:
        found.append(first)
    return found


def axes_of(axes: Any, rank: int) -> set[int]:
    """Return the axes of a reduction: the given ones, or all."""
    axes = range(rank) if axes is None else [axes] if isinstance(axes, int) else axes
    return {axis % rank for axis in axes} or set(range(rank))


def reduced(node: fx.Node, rank: int) -> set[int]:
    """Return the axes of a mean or sum."""
    return axes_of(argument(node, 1, "dim"), rank)
