"""Replace memory that the network fills part by part, or units that it overwrites, by a concatenation of the parts."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.contractions import layout
from lightning_sym.symmetry.tracing.nodes import memories_of
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter
from lightning_sym.symmetry.tracing.unit_axes import unit_axes

aten = torch.ops.aten
_MOST = 2**22  # elements of the memory


class _Part(NamedTuple):
    """A written value, and its indices along an axis."""

    source: fx.Node
    places: Tensor
    is_single: bool


def joined_writes(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a value that writes fill completely, each element once, as the concatenation of the written values."""
    shape, writes = r.shape(node), [node]
    while r.name(before := writes[0].args[0]) == "put" and isinstance(before, fx.Node):
        writes.insert(0, before)
    if math.prod(shape) > _MOST or r.made_of(node) == "constants" or any(len(write.args) > 3 for write in writes):
        return None
    owner: Any = r.graph.owning_module
    held = [(write.args[2], write.args[1]) for write in writes]
    if any(not isinstance(where, fx.Node) or where.op != "get_attr" for _, where in held):
        return None
    where = [getattr(owner, str(place.target)) for _, place in held]  # type: ignore[union-attr]
    for first in range(len(writes)):  # earlier writes are overwritten
        if sum(own.numel() for own in where[first:]) == math.prod(shape):
            found = _along_an_axis(shape, [source for source, _ in held[first:]], where[first:])
            return None if found is None else _joined(r, shape, *found)
    return _beside_rest(r, node, *held[-1], where[-1])


def _beside_rest(r: Rewriter, node: fx.Node, source: Any, held: Any, shown: Tensor) -> fx.Node | None:
    """Rewrite units that are overwritten as a concatenation with the others: slices that are added to in place."""
    shape, base = r.shape(node), node.args[0]
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
        if len(parts) == len(where) and len(taken) == size == len(torch.unique(taken)):
            return axis, parts
    return None


def _joined(r: Rewriter, shape: tuple[int, ...], axis: int, parts: list[_Part]) -> fx.Node:
    values = [r.insert(aten.unsqueeze.default, source, axis) if is_single else source for source, _, is_single in parts]
    joined = r.insert(aten.cat.default, values, axis)
    order = torch.cat([part.places for part in parts])
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
