"""Find the axes of a graph's values that grow with the input.

The size alone is ambiguous: an image of 16 by 16 pixels with sixteen patches has as many patches as rows.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.affine.moves import MOVES, move_of
from lightning_sym.symmetry.tracing.affine.values import Shape
from lightning_sym.symmetry.tracing.graph.capture import OPAQUE
from lightning_sym.symmetry.tracing.graph.operations import name_of

Axes = frozenset[int]
_NONE: Axes = frozenset()


def growing_axes(graph: fx.Graph, inputs: dict[fx.Node, Axes]) -> dict[fx.Node, list[Axes]]:
    """Find the growing axes of each value: a list with one set for each of an operation's results.

    Operations other than reshapes are run on meta tensors with growing axes of twice the size.

    Args:
        graph: The graph.
        inputs: The growing axes of inputs, and of constants that are made at an input's size.
    """
    found: dict[fx.Node, list[Axes]] = {}
    sizes: set[int] = set()
    for node in graph.nodes:
        if node in inputs:
            found[node] = [inputs[node]]
        elif node.op == "call_function" and any(any(found.get(own, ())) for own in node.all_input_nodes):
            found[node] = _results(node, found, sizes)
        for shape, axes in zip(_shapes(node), found.get(node, ()), strict=False):
            sizes |= {shape[axis] for axis in axes}
    return found


def _shapes(node: fx.Node) -> list[Shape]:
    val: Any = node.meta.get("val")
    parts = val if isinstance(val, (list, tuple)) else [val]
    return [tuple(own.shape) if isinstance(own, Tensor) else () for own in parts]


def _results(node: fx.Node, found: dict[fx.Node, list[Axes]], sizes: Collection[int]) -> list[Axes]:
    source, name = node.args[0] if node.args else None, name_of(node)
    if name == "getitem":
        at: Any = node.args[1]
        return [found[source][at]]  # type: ignore[index]
    shapes = _shapes(node)
    if isinstance(source, fx.Node) and name in MOVES:
        before = _shapes(source)[0]
        move = move_of(node, name, before, lambda _: None)
        if move is not None and move.kind in ("groups", "expand"):
            own = found.get(source, [_NONE])[0]
            if move.kind == "groups":
                return [_reshaped(move.groups, own, move.after, sizes)]
            return [frozenset(axis + len(move.after) - len(before) for axis in own)]
    if node.target in OPAQUE:
        return [_NONE] * len(shapes)
    try:
        made = _longer(node, found)
    except Exception:  # the operation is specific to a size
        return [_beside(node, shape, found) for shape in shapes]
    return [
        frozenset(axis for axis, (size, new) in enumerate(zip(shape, after, strict=True)) if size != new)
        for shape, after in zip(shapes, made, strict=False)  # a longer axis has more parts
    ]


def _longer(node: fx.Node, found: dict[fx.Node, list[Axes]]) -> list[Shape]:
    """Return the shapes of an operation's results for longer arguments."""

    def given(own: fx.Node) -> Any:
        val = own.meta["val"]
        if not isinstance(val, Tensor):
            raise TypeError
        axes = found.get(own, [_NONE])[0]
        sizes = [2 * size if axis in axes else size for axis, size in enumerate(val.shape)]
        return torch.empty(sizes, dtype=val.dtype, device="meta")

    arguments, keywords = pytree.tree_map_only(fx.Node, given, (node.args, node.kwargs))
    made = node.target(*arguments, **keywords)  # type: ignore[operator]
    return [tuple(own.shape) for own in (made if isinstance(made, (list, tuple)) else [made])]


def _beside(node: fx.Node, shape: Shape, found: dict[fx.Node, list[Axes]]) -> Axes:
    """Return the axes along which an argument of the same size grows; axes are aligned as in broadcasting."""
    axes: set[int] = set()
    for own in node.all_input_nodes:
        for sizes, growing in zip(_shapes(own), found.get(own, ()), strict=False):
            behind = len(shape) - len(sizes)
            axes |= {axis + behind for axis in growing if axis + behind >= 0 and shape[axis + behind] == sizes[axis]}
    return frozenset(axes)


def _reshaped(groups: Any, own: Axes, after: Shape, sizes: Collection[int]) -> Axes:
    """Return the growing axes after a reshape: of several new axes, those with the size of an earlier growing axis."""
    axes: set[int] = set()
    for old, new in groups:
        if not own.isdisjoint(old):
            long = [axis for axis in new if after[axis] > 1]
            axes |= set(long if len(long) < 2 else [axis for axis in long if after[axis] in sizes])
    return frozenset(axes)


def of_sizes(shape: Shape, sizes: Collection[int]) -> Axes:
    """Return the axes with one of the given sizes."""
    return frozenset(axis for axis, size in enumerate(shape) if size in sizes)
