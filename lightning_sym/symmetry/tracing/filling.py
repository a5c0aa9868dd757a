"""Puts a concatenation in the place of memory that is filled part by part, and only read when all of it is there."""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.contractions import VIEWS, layout
from lightning_sym.symmetry.tracing.nodes import memories_of, numbers_of
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import NoSpellingError, Rewriter

aten = torch.ops.aten
_FRESH = {
    f"{kind}{name}{end}"
    for name in ("empty", "zeros", "ones", "full")
    for kind, end in (("", ""), ("new_", ""), ("", "_like"))
}
_FRESH |= {"empty_strided", "empty_permuted"}
_MOST = 2**22  # elements of the memory


class _Part(NamedTuple):
    """What is written, and at which places of an axis."""

    source: fx.Node
    places: Tensor
    is_single: bool


def join_parts(capture: Capture, kept: Collection[str] = ()) -> None:
    """Let values that are written into parts of fresh memory be joined, where they fill it along one axis.

    Args:
        capture: The network, whose graph is changed.
        kept: The operations that stay as they are, as ``aten::copy_``.
    """
    rewriter = Rewriter(capture, kept)
    for node in list(capture.graph.nodes):
        if not node._erased and rewriter.writes_into(node) and rewriter.plain_name(node) in _FRESH:
            _join(rewriter, node)


def _join(r: Rewriter, base: fx.Node) -> None:
    held: Tensor = base.meta["val"]
    own = memories_of(base)
    there = [node for node in r.graph.nodes if not own.isdisjoint(memories_of(node))]
    writes = [node for node in there if r.plain_name(node) == "copy" and not own.isdisjoint(memories_of(node.args[0]))]  # type: ignore[arg-type]
    if not writes or held.numel() > _MOST or there[0] is not base:
        return
    order = {node: place for place, node in enumerate(r.graph.nodes)}
    last = writes[-1]
    views = [node for node in there if order[node] < order[last] and node not in writes]
    readers = {user for node in [*views, *writes] for user in node.users} - {*views, *writes}
    plain = all(node is base or r.plain_name(node) in VIEWS for node in views) and all(
        write.target is aten.copy_.default for write in writes
    )
    # What is written comes from elsewhere, and nothing reads a part before all is there, or through such a part later.
    late = all(order[user] > order[last] and not set(user.all_input_nodes) & {*views[1:], *writes} for user in readers)
    if not plain or not late or any(given in there for write in writes for given in write.args[1:]):
        return
    found = _along_an_axis(base, writes)
    if found is None:
        return
    axis, parts = found
    r.at = last.next
    try:
        new = _joined(r, held, axis, parts)
    except NoSpellingError:
        return
    r.fill(base, new, [*views[1:], *writes])


def _along_an_axis(base: fx.Node, writes: list[fx.Node]) -> tuple[int, list[_Part]] | None:
    """Return the axis along which writes fill memory, each part of it once; None if there is none."""
    held: Tensor = base.meta["val"]
    where = numbers_of(held)
    if not torch.equal(where.ravel().sort().values, torch.arange(held.numel())):
        return None
    place = where.ravel().argsort()
    for axis, size in enumerate(held.shape):
        wanted = torch.arange(held.numel()).reshape(held.shape)
        parts = []
        for write in writes:
            target: Any = write.args[0]
            shown = place[numbers_of(target.meta["val"])]
            is_single = shown.ndim == held.ndim - 1
            shown = shown.unsqueeze(axis) if is_single else shown
            if shown.ndim != held.ndim or not shown.numel():
                break
            stride = math.prod(held.shape[axis + 1 :])
            places = shown.movedim(axis, 0).reshape(shown.shape[axis], -1)[:, 0] // stride % size
            if shown.shape != wanted.index_select(axis, places).shape or not torch.equal(
                shown, wanted.index_select(axis, places)
            ):
                break
            parts.append(_Part(write.args[1], places, is_single))  # type: ignore[arg-type]
        taken = torch.cat([part.places for part in parts]) if parts else torch.zeros(0)
        if len(parts) == len(writes) and len(taken) == size == len(torch.unique(taken)):
            return axis, parts
    return None


def _joined(r: Rewriter, held: Tensor, axis: int, parts: list[_Part]) -> fx.Node:
    values = []
    for source, places, is_single in parts:
        shape = [*held.shape[:axis], *([] if is_single else [len(places)]), *held.shape[axis + 1 :]]
        value = source
        if r.shape(value) != tuple(shape):
            value = r.insert(aten.expand.default, value, shape)
        if value.meta["val"].dtype != held.dtype:
            value = r.insert(aten.to.dtype, value, held.dtype)
        values.append(r.insert(aten.unsqueeze.default, value, axis) if is_single else value)
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
    # Only what is made of the same values (turned coordinates) is stacked: units of two kinds would become one.
    if in_turn and set.intersection(*(_made_from(r, part.source) for part in parts)):
        stacked = r.insert(aten.stack.default, values, axis + 1)  # every other one
        return r.insert(aten.reshape.default, stacked, list(held.shape))
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
