"""Replace memory that the network fills part by part, or units that it overwrites, by a concatenation of the parts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import memories_of, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import layout
from lightning_sym.symmetry.tracing.normal_form.kernels import filled
from lightning_sym.symmetry.tracing.normal_form.unit_axes import unit_axes

aten = torch.ops.aten
WRITES = operations(Trait.WRITE) - {"index_fill", "diagonal_scatter", "select_scatter", "_index_put_impl"}
_MOST = 2**22  # elements of the memory
_Write = tuple[fx.Node, Any, Tensor, bool]


class _Part(NamedTuple):
    """A written value, and its indices along an axis."""

    source: fx.Node
    places: Tensor
    is_single: bool


def join_writes(r: Rewriter) -> None:
    """Rewrite memory that modules fill part by part, so that equal modules are found."""
    r.rewrite(dict.fromkeys(WRITES, joined_writes))


def joined_writes(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a value that writes fill completely, each element once, as the concatenation of the written values.

    Elements that nothing writes may hold one number.
    """
    shape = r.shape(node)
    if math.prod(shape) > _MOST or r.made_of(node) == "constants":
        return None
    writes, base = list[_Write](), node
    while (write := _write(r, base)) is not None:
        writes, base = [write, *writes], write[1]
    number, taken = filled(r, base), torch.zeros(math.prod(shape), dtype=torch.bool)
    for *_, where, adds in writes:
        if adds and (number != 0 or bool(taken[where].any())):
            return None
        taken[where] = True
    more = any(r.name(user) in WRITES and user.args[0] is node for user in node.users)
    for first in range(len(writes)):  # earlier writes are overwritten
        sources, _, places, _ = zip(*writes[first:], strict=True)
        count = sum(where.numel() for where in places)
        if count == math.prod(shape) or (number is not None and first == 0 and not more and count == int(taken.sum())):
            found = _along_an_axis(shape, sources, places)
            return None if found is None else _joined(r, node, number, *found)
    return _beside_rest(r, node, writes[-1], node.args[1]) if r.name(node) == "put" and writes else None


def _write(r: Rewriter, node: Any) -> _Write | None:
    """Describe an operation that writes each element of a value to one constant place in another value.

    Returns:
        The written value, the other one, each element's index in the flattened result, and whether it is added.
    """
    name = r.name(node)
    at = {"put": 2, "index_put": 2, "slice_scatter": 1}.get(name, 3)
    if name not in WRITES or len(node.args) <= at or node.kwargs or "mean" in node.args or "prod" in node.args:
        return None
    base, source = node.args[0], node.args[at]
    if name == "put":
        held: Any = node.args[1]
        plain = len(node.args) == 3 and isinstance(held, fx.Node) and held.op == "get_attr"
        return (source, base, getattr(r.graph.owning_module, str(held.target)), False) if plain else None
    if not isinstance(source, fx.Node) or base is source:
        return None
    shape = r.shape(source)
    count = math.prod(shape)
    given = {own: r.constant(own) for own in node.all_input_nodes if own not in (base, source)}
    if any(own is None for own in given.values()):
        return None
    given |= {base: torch.zeros(r.shape(base)).double(), source: 1.0 + torch.arange(count).double().reshape(shape)}
    order, places = node.target(*fx.map_arg(node.args, given.get)).reshape(-1).sort()
    if not torch.equal(order, torch.arange(1 - len(order), 1).add(count).clamp(min=0).double()):
        return None  # some elements are nowhere, or several at one place
    adds = name in ("index_add", "scatter_add", "scatter_reduce") or True in node.args[3:]
    return source, base, places[len(order) - count :].reshape(shape), adds


def written_part(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a slice of memory as the value that was written there, or as a slice of the memory before."""
    whole = node.args[0]
    write = _write(r, whole) if r.name(whole) == "put" and r.name(node) in ("slice", "select") else None
    if write is None or math.prod(r.shape(whole)) > _MOST:
        return None
    source, base, places, adds = write
    read = moved(node, torch.arange(math.prod(r.shape(whole))).reshape(r.shape(whole)))
    if not bool(torch.isin(read, places).any()):
        return r.insert(node.target, base, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
    return source if torch.equal(read, places) and not adds else None


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


def _along_an_axis(
    shape: tuple[int, ...], sources: Sequence[Any], where: Sequence[Tensor]
) -> tuple[int, list[_Part]] | None:
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
    joined.meta |= {"rest": True} if len(values) > len(parts) else {}
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
