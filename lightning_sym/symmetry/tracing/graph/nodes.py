"""Queries on the nodes of a captured graph: shapes, arguments, memory with in-place writes."""

import string
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

HIDES_ROWS = "may_hide_rows"  # mark of softmaxes whose masks may hide whole rows


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor; None if the node produces no single tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def value_of(node: fx.Node) -> Any:
    """Return the tensor of a node without operation: a constant of the graph, or a buffer in no state dict."""
    return node.meta["constant"] if node.op == "placeholder" else getattr(node.graph.owning_module, str(node.target))


def result_shape(node: fx.Node, index: int | None = None) -> tuple[int, ...]:
    """Return the shape of a node's tensor, or of one of several.

    Args:
        node: The node.
        index: The index of one of several tensors.

    Raises:
        ValueError: If there are several tensors, and no index.
    """
    value = node.meta["val"]
    if index is None and isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"the operation has {len(value)} results; expected the index of one: output_shape(0)")
        index = 0
    return tuple((value if index is None else value[index]).shape)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operation that was passed by position or by keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def by_axis(given: Any, count: int) -> list[int]:
    """Return one number per axis of an argument that may be a single number."""
    return list(given) if isinstance(given, (list, tuple)) else [given] * max(count, 1)


def equation_of(node: fx.Node) -> str | None:
    """Return the `torch.einsum` equation of a product of two values; None if there is no plain one.

    In a plain equation every axis has a letter, and no letter is repeated in a term.
    """
    name = name_of(node)
    if name == "einsum":
        equation = str(node.args[0]).replace(" ", "")
        terms = equation.partition("->")[0].split(",")
        plain = "->" in equation and "." not in equation and all(len(set(term)) == len(term) for term in terms)
        return equation if plain and len(terms) == 2 else None
    one, two = (len(shape_of(given) or ()) for given in node.args[:2])
    if name == "linear":
        lead = string.ascii_letters[: one - 1]
        return f"{lead}y,zy->{lead}z" if two == 2 else None
    batch, row, column = string.ascii_letters[: max(one, two, 2) - 2], "x" * (one > 1), "z" * (two > 1)
    first, second = (batch[len(batch) - max(rank - 2, 0) :] for rank in (one, two))
    return f"{first}{row}y,{second}y{column}->{batch}{row}{column}" if name in ("matmul", "mm", "bmm", "mv") else None


def letters_of(equation: str) -> tuple[str, str, str]:
    """Return the letters of the two factors of an equation and those of the result."""
    given, out = equation.split("->")
    first, second = given.split(",")
    return first, second, out


def moved(node: fx.Node, tensor: Tensor) -> Any:
    """Apply an operation that only moves elements to another tensor; None if it needs further tensors."""
    if any(isinstance(other, fx.Node) for other in pytree.tree_leaves((node.args[1:], node.kwargs))):
        return None
    if name_of(node) in ("view", "_unsafe_view"):
        shape: Any = node.args[1]
        return tensor.reshape(shape) if isinstance(shape, (list, tuple)) else None
    target: Any = node.target
    return target(tensor, *node.args[1:], **node.kwargs)


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
