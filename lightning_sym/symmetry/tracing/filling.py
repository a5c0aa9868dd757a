"""Replace memory that the network fills part by part, or units that it overwrites, by a concatenation of the parts."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.contractions import layout
from lightning_sym.symmetry.tracing.kernels import filled
from lightning_sym.symmetry.tracing.nodes import memories_of
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter
from lightning_sym.symmetry.tracing.unit_axes import unit_axes

aten = torch.ops.aten
WRITES = {"put", "index_put", "index_copy", "scatter", "slice_scatter", "select_scatter"}
WRITES |= {"index_add", "scatter_add", "scatter_reduce"}
_MOST = 2**22  # elements of the memory


class _Part(NamedTuple):
    """A written value, and its indices along an axis."""

    source: fx.Node
    places: Tensor
    is_single: bool


class _Write(NamedTuple):
    """A written value, the value before, and each element's index in the flattened result."""

    source: fx.Node
    base: Any
    where: Tensor
    adds: bool


def joined_writes(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a value that writes fill completely, each element once, as the concatenation of the written values.

    Elements that nothing writes may hold one number.
    """
    shape = r.shape(node)
    if math.prod(shape) > _MOST or r.made_of(node) == "constants":
        return None
    writes: list[_Write] = []
    base: Any = node
    while (write := _write(r, base)) is not None:
        writes.insert(0, write)
        base = write.base
    number, taken = filled(r, base), torch.zeros(math.prod(shape), dtype=torch.bool)
    for write in writes:
        if write.adds and (number != 0 or bool(taken[write.where].any())):
            return None
        taken[write.where] = True
    for first in range(len(writes)):  # earlier writes are overwritten
        own = writes[first:]
        count = sum(write.where.numel() for write in own)
        beside = number is not None and first == 0 and not any(_goes_on(r, node, user) for user in node.users)
        if count == math.prod(shape) or (beside and count == int(taken.sum())):
            found = _along_an_axis(shape, [write.source for write in own], [write.where for write in own])
            return None if found is None else _joined(r, node, number, *found)
    return _beside_rest(r, node, writes[-1], node.args[1]) if r.name(node) == "put" and writes else None


def _goes_on(r: Rewriter, node: fx.Node, user: fx.Node) -> bool:
    """Whether an operation writes more into a value."""
    return r.name(user) in WRITES and user.args[0] is node


def _write(r: Rewriter, node: Any) -> _Write | None:
    """Describe an operation that writes each element of a value to one constant place in another value."""
    name = r.name(node)
    if name not in WRITES or len(node.args) < 3 or (node.kwargs and name != "scatter_reduce"):
        return None
    at = {"put": 2, "index_put": 2, "slice_scatter": 1, "select_scatter": 1}.get(name, 3)
    source, base = node.args[at] if len(node.args) > at else None, node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(base, fx.Node):
        return None
    if name == "put":
        held: Any = node.args[1]
        plain = len(node.args) == 3 and isinstance(held, fx.Node) and held.op == "get_attr"
        return _Write(source, base, getattr(r.graph.owning_module, str(held.target)), adds=False) if plain else None
    if name == "scatter_reduce" and (node.args[4] != "sum" or node.kwargs):
        return None
    shape = r.shape(source)
    numbers = 1.0 + torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    given = {base: torch.zeros(r.shape(base), dtype=torch.float64), source: numbers}
    given |= {own: r.constant(own) for own in node.all_input_nodes if own not in given}
    if base is source or any(own is None for own in given.values()):
        return None
    shown = node.target(*fx.map_arg(node.args, given.get), **node.kwargs).reshape(-1)
    order, places = shown.sort()
    count = numbers.numel()
    if not torch.equal(order[len(order) - count :], numbers.reshape(-1)) or int((shown != 0).sum()) != count:
        return None
    adds = name in ("index_add", "scatter_add", "scatter_reduce") or (name == "index_put" and True in node.args[3:])
    return _Write(source, base, places[len(order) - count :].reshape(shape), adds=adds)


def padded_sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of values that are padded with zeros along one axis, side by side, as their concatenation."""
    parts, shape = {}, r.shape(node)
    for own in node.args[:2]:
        sizes: Any = own.args[1] if r.name(own) in operations(Trait.PAD) else ()  # type: ignore[union-attr]
        padded = [at for at, size in enumerate(sizes) if size]
        if len(padded) != 1 or any(more not in ("constant", 0, None) for more in own.args[2:]):  # type: ignore[union-attr]
            return None
        axis = len(shape) - 1 - padded[0] // 2
        size = shape[axis] - sizes[padded[0]]
        whole = [*shape[:axis], size, *shape[axis + 1 :]]
        parts[axis, 1 - padded[0] % 2] = size, r.insert(aten.expand.default, own.args[0], whole)  # type: ignore[union-attr]
    (axis, _), (other, _) = parts if len(parts) == 2 else ((0, 0), (1, 0))
    if axis != other or sum(size for size, _ in parts.values()) != shape[axis]:
        return None
    return r.insert(aten.cat.default, [parts[axis, behind][1] for behind in (0, 1)], axis)


def _beside_rest(r: Rewriter, node: fx.Node, last: _Write, held: Any) -> fx.Node | None:
    """Rewrite units that are overwritten as a concatenation with the others: slices that are added to in place."""
    shape, source, base, shown = r.shape(node), *last[:3]
    while r.name(base) == "put" and isinstance(base, fx.Node) and base.args[1] is held:  # overwritten
        base = base.args[0]
    if not isinstance(base, fx.Node) or r.made_of(base) != "inputs" or shown.ndim != len(shape):
        return None
    # Only what is added to; sums of two products turn planes, as rotary positions do.
    turned = isinstance(source, fx.Node) and all(r.name(own) == "mul" for own in source.all_input_nodes)
    if r.name(source) not in operations(Trait.JOIN) or turned:
        return None
    wanted = torch.arange(math.prod(shape)).reshape(shape)
    for axis in sorted(unit_axes(r, base)):
        start = int(shown.reshape(-1)[0]) // math.prod(shape[axis + 1 :]) % shape[axis] if shown.numel() else 0
        stop = start + shown.shape[axis]
        if shown.numel() and stop <= shape[axis] and torch.equal(shown, wanted.narrow(axis, start, stop - start)):
            rest = [(r.insert(aten.slice.Tensor, base, axis, *part) if part[0] < part[1] else None)
                    for part in ((0, start), (stop, shape[axis]))]  # fmt: skip
            values = [value for value in (rest[0], source, rest[1]) if value is not None]
            return r.insert(aten.cat.default, values, axis)
    return None


def _along_an_axis(shape: tuple[int, ...], sources: list[Any], where: list[Tensor]) -> tuple[int, list[_Part]] | None:
    """Return the axis along which writes fill memory without overlap, and the parts; None if there is none."""
    wanted = torch.arange(math.prod(shape)).reshape(shape)
    for axis, size in enumerate(shape):
        parts = []
        for source, shown in zip(sources, where, strict=True):
            is_single = shown.ndim == len(shape) - 1
            shown = shown.unsqueeze(axis) if is_single else shown
            if shown.ndim != len(shape) or not shown.numel():
                break
            stride = math.prod(shape[axis + 1 :])
            places = shown.movedim(axis, 0).reshape(shown.shape[axis], -1)[:, 0] // stride % size
            if not torch.equal(shown, wanted.index_select(axis, places)):
                break
            parts.append(_Part(source, places, is_single))
        taken = torch.cat([part.places for part in parts]) if parts else torch.zeros(0)
        if len(parts) == len(where) and len(taken) == len(torch.unique(taken)):
            return axis, parts
    return None


def _joined(r: Rewriter, node: fx.Node, number: float | None, axis: int, parts: list[_Part]) -> fx.Node:
    shape = r.shape(node)
    values = [r.insert(aten.unsqueeze.default, source, axis) if is_single else source for source, _, is_single in parts]
    order = torch.cat([part.places for part in parts])
    if len(order) < shape[axis]:
        rest = torch.ones(shape[axis], dtype=torch.bool)
        rest[order] = False
        order = torch.cat([order, rest.nonzero()[:, 0]])
        like, whole = node.meta["val"], [*shape[:axis], int(rest.sum()), *shape[axis + 1 :]]
        values.append(r.insert(aten.full.default, whole, number, dtype=like.dtype, device=like.device))
    joined = r.insert(aten.cat.default, values, axis)
    if torch.equal(order, torch.arange(len(order))):
        return joined
    sizes, steps = (
        {len(part.places) for part in parts},
        {step for part in parts for step in part.places.diff().tolist()},
    )
    in_turn = (
        len(sizes) == 1 and steps == {len(parts)} and order[:: len(parts[0].places)].tolist() == [*range(len(parts))]
    )
    # Stack only parts with common sources (rotated coordinates); otherwise two kinds of units would be merged.
    if in_turn and set.intersection(*(_made_from(r, part.source) for part in parts)):
        stacked = r.insert(aten.stack.default, values, axis + 1)  # alternating entries
        return r.insert(aten.reshape.default, stacked, list(shape))
    return r.insert(aten.index_select.default, joined, axis, r.hold(order.argsort()))


def _made_from(r: Rewriter, node: fx.Node) -> set[tuple[Any, ...]]:
    """Return the memory and layout of all inputs of the elementwise sums and products that compute a value."""
    found, left, seen = set(), [node], {node}
    while left:
        own = left.pop()
        if r.name(own) in operations(Trait.JOIN) | operations(Trait.PRODUCT) | operations(Trait.CAST) | {"neg"}:
            left += [given for given in own.all_input_nodes if given not in seen]
            seen.update(own.all_input_nodes)
        elif r.made_of(own) == "inputs":
            found.add((frozenset(memories_of(own)), layout(own.meta["val"])))
    return found
