"""Move slices before elementwise operations, which then put no constraints on the parts that are cut off."""

from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewrite, Rewriter

aten = torch.ops.aten


def _as_part(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a part of a split value as a slice or a selection, if some of the parts are not read."""
    if r.name(node) == "narrow":
        axis, first, size = (argument(node, place + 1, name) for place, name in enumerate(("dim", "start", "length")))
        return r.insert(aten.slice.Tensor, node.args[0], axis, first, first + size)
    cut: Any = node.args[0]
    item: Any = node.args[1]
    if r.name(cut) not in operations(Trait.PARTS) or not isinstance(item, int):
        return None
    value, alone = cut.args[0], r.name(cut) == "unbind"
    axis = argument(cut, 1 if alone else 2, "dim", 0) % len(r.shape(value))
    sizes = [1 if alone else part.shape[axis] for part in cut.meta["val"]]
    if {user.args[1] for user in cut.users} >= {*range(len(sizes))}:
        return None
    first = sum(sizes[:item])
    if alone:
        return r.insert(aten.select.int, value, axis, first)
    return r.insert(aten.slice.Tensor, value, axis, first, first + sizes[item])


def _part_first(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Move a slice before an elementwise operation, which then puts no constraints on the rest of the value.

    Weights stay whole: a slice of a weight shows that a longer input may read more of it.
    """
    value: Any = node.args[0]
    axis: Any = node.args[1] if len(node.args) > 1 else 0
    if r.name(value) == "cat":
        return _of_joined(r, node, value)
    layer = r.name(value) == "linear" and len(r.shape(value)) > 1
    if r.name(value) not in _ELEMENTWISE and not layer:
        return None
    if r.is_marked(value) or node.kwargs or value.kwargs.keys() - {"alpha"}:
        return None
    if isinstance(axis, (list, tuple)):  # the argument of `index`
        if any(place is not None for place in axis[:-1]) or r.made_of(axis[-1]) != "constants":
            return None
        axis = len(axis) - 1
    if not isinstance(axis, int) or r.shape(node) == r.shape(value):
        return None
    rank = len(r.shape(value))
    axis %= rank
    if layer and (axis == rank - 1 or r.made_of(value.args[0]) != "inputs"):
        return None
    if list(value.users) != [node] and _covered(r, value, axis):
        return None

    def part(item: Any) -> Any:
        own = axis - rank + len(r.shape(item))
        if not isinstance(item, fx.Node) or own < 0:
            return item
        if r.made_of(item) == "weights":
            raise NoSpellingError
        if r.shape(item)[own] == 1:
            return r.insert(aten.select.int, item, own, 0) if r.name(node) == "select" else item
        if r.name(node) == "index":
            return r.insert(node.target, item, [*[None] * own, node.args[1][-1]])  # type: ignore[index]
        return r.insert(node.target, item, own, *node.args[2:])

    if layer:
        return r.insert(value.target, part(value.args[0]), *value.args[1:])
    return r.insert(value.target, *(part(item) for item in value.args), **value.kwargs)


def _of_joined(r: Rewriter, node: fx.Node, joined: fx.Node) -> fx.Node | None:
    """Read a part of a concatenation from the only value that it shows."""
    values: Any = joined.args[0]
    given: Any = node.args
    rank, begin = len(r.shape(joined)), 0
    axis = argument(joined, 1, "dim", 0) % rank
    if r.name(node) not in ("slice", "select") or node.kwargs or len(given) < 3 or given[1] % rank != axis:
        return None
    numbers = torch.arange(r.shape(joined)[axis]).reshape([-1 if at == axis else 1 for at in range(rank)])
    read = moved(node, numbers).flatten()
    for value in values:
        size = r.shape(value)[axis]
        if len(read) and begin <= int(read.min()) and int(read.max()) < begin + size:
            first, last = int(read[0]) - begin, int(read[-1]) - begin + 1
            if r.name(node) == "select":
                return r.insert(aten.select.int, value, axis, first)
            whole: fx.Node = value
            return whole if len(read) == size else r.insert(aten.slice.Tensor, value, axis, first, last, *given[4:])
        begin += size
    return None


def _covered(r: Rewriter, value: fx.Node, axis: int) -> bool:
    """Whether the readers of a value together read all of it along an axis."""
    rank, size = len(r.shape(value)), r.shape(value)[axis]
    numbers = torch.arange(size).reshape([-1 if at == axis else 1 for at in range(rank)])
    read: set[int] = set()
    for user in value.users:
        cut = r.name(user) in ("slice", "select") and not user.kwargs and len(user.args) > 1
        if not cut or user.args[1] % rank != axis:  # type: ignore[operator]
            return True
        read |= {*moved(user, numbers).flatten().tolist()}
    return len(read) == size


_ELEMENTWISE = operations(Trait.POINTWISE | Trait.JOIN | Trait.PRODUCT) | {"neg"}
# These rewrites run last: norms and similar operations are recognised before by their effect on a whole value.
EARLIER: dict[str, Rewrite] = {
    **dict.fromkeys(("slice", "select", "index", "index_select"), _part_first),
    **dict.fromkeys(("narrow", "getitem"), _as_part),
}
