"""Constant indices that repeat the entries of an axis, or read a range of it."""

from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped

aten = torch.ops.aten


def repeated(r: Rewriter, value: fx.Node, times: int, axis: int) -> fx.Node | None:
    """Repeat a value along an axis."""
    sizes = list(r.shape(value))
    if sizes[axis] == 1:
        return r.insert(aten.expand.default, value, [*sizes[:axis], times, *sizes[axis + 1 :]])
    return r.insert(aten.repeat.default, value, [times if other == axis else 1 for other in range(len(sizes))])


def repeated_at(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite constant indices that repeat each entry of an axis (keys that several queries share) or read a range."""
    value, place = node.args[0], node.args[2 if r.name(node) != "index" else 1]
    axis: Any = node.args[1]
    if r.name(node) == "gather":
        place = _of_one_axis(r, place, axis, r.shape(value))
    elif r.name(node) == "index":
        if not isinstance(axis, (list, tuple)) or sum(own is not None for own in axis) != 1:
            return None
        axis, place = next((at, own) for at, own in enumerate(axis) if own is not None)
    known = r.constant(place) if isinstance(place, fx.Node) else None
    if known is None or known.ndim != 1 or known.dtype not in (torch.int64, torch.int32):
        return None
    count = r.shape(value)[axis]
    times = len(known) // count
    if len(known) != times * count or not isinstance(value, fx.Node) or not times:
        start = int(known[0]) % count if len(known) and r.made_of(value) == "inputs" else count
        is_range = start < count and torch.equal(known % count, torch.arange(start, start + len(known)).to(known))
        return r.insert(aten.slice.Tensor, value, axis, start, start + len(known)) if is_range else None
    if torch.equal(known, torch.arange(count).repeat_interleave(times).to(known)):
        return value if times == 1 else r.insert(aten.repeat_interleave.self_int, value, times, axis)
    if torch.equal(known, torch.arange(count).repeat(times).to(known)):
        return repeated(r, value, times, axis)
    return None


def whole_axes(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite an index by tensors of neighbouring axes, if one reads a whole axis: apart, a diagonal, a gather."""
    args: Any = node.args
    value, places, shape = args[0], args[1], r.shape(args[0])
    used = [at for at, place in enumerate(places) if place is not None]
    masks = any(places[at].meta["val"].dtype == torch.bool for at in used)
    if masks or len(used) < 2 or used != [*range(used[0], used[-1] + 1)]:
        return None
    rank = max(len(r.shape(places[at])) for at in used)
    sizes = {at: [1] * (rank - len(r.shape(places[at]))) + list(r.shape(places[at])) for at in used}
    for own in (used[0], used[-1]):
        (wide, *more), known = [axis for axis in range(rank) if sizes[own][axis] > 1] or [0], r.constant(places[own])
        if known is None or more or not torch.equal(known.reshape(-1), torch.arange(shape[own]).to(known)):
            continue
        if all(sizes[at][wide] == 1 for at in used if at != own):
            left = {at: [size for axis, size in enumerate(sizes[at]) if axis != wide] for at in used if at != own}
            new = [reshaped(r, place, left[at]) if at in left else None for at, place in enumerate(places)]
            at = own if own == used[0] else used[0] + rank - 1
            return r.insert(aten.movedim.int, r.insert(aten.index.Tensor, value, new), at, used[0] + wide)
        same = all(r.constant(places[at]) is known and shape[at] == shape[own] for at in used)
        if len(used) == 2 and rank == 1 and same:
            return r.insert(aten.movedim.int, r.insert(aten.diagonal.default, value, 0, *used), -1, own)
        if [own, own + 1] == used == [*range(len(shape))][-2:] and (rank, wide) == (2, 0):
            place = r.insert(aten.expand.default, places[own + 1], [*shape[:-1], sizes[own + 1][1]])
            return r.insert(aten.gather.default, value, own + 1, place)
    return None


def _of_one_axis(r: Rewriter, place: Any, axis: int, shape: tuple[int, ...]) -> fx.Node | None:
    """Return a one-dimensional index of an axis if all other axes gather at the same entries."""
    known, axis = r.constant(place), axis % len(shape)
    if known is None or known.ndim != len(shape):
        return None
    rest = [other for other in range(len(shape)) if other != axis]
    if any(known.shape[other] != shape[other] for other in rest):
        return None
    for other in rest[::-1]:
        if bool((known != known.narrow(other, 0, 1)).any()):
            return None
    for other in rest[::-1]:
        place = r.insert(aten.select.int, place, other, 0)
    return place  # type: ignore[no-any-return]
