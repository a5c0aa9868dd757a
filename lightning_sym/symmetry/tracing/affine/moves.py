"""Moves of entries and their effect on thin arrays, without expanding these where possible."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.affine.values import ONE, Relation, Shape, Total, Value, places
from lightning_sym.symmetry.tracing.graph.coordinates import thinned, varies
from lightning_sym.symmetry.tracing.graph.nodes import argument
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

MOVES = operations(Trait.MOVE | Trait.PICK | Trait.PAD)


def groups_of(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Match the axes of a reshape: pairs of axes before and after, in order."""
    result, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        single = i < len(before) and before[i] == 1, j < len(after) and after[j] == 1
        if any(single):
            result.append(([i] * single[0], [j] * single[1]))
            i, j = i + single[0], j + single[1]
            continue
        own, new, one, two = [i], [j], before[i], after[j]
        i, j = i + 1, j + 1
        while one != two:
            if one < two:
                own.append(i)
                one *= before[i]
                i += 1
            else:
                new.append(j)
                two *= after[j]
                j += 1
        result.append((own, new))
    return result


@dataclass
class Move:
    """An operation that moves entries.

    Attributes:
        kind: "groups", "permute", "expand", "cut" or "other".
        before: The shape before.
        after: The shape after, of the first result.
        run: The operation on a whole tensor.
        groups: For a reshape, the matching axes.
        order: For a permutation, the source of each axis.
        axis: For a cut, its axis.
        drops: Whether a cut removes its axis.
        alone: Whether a cut takes some parts only, while other cuts may take the rest.
        parts: The (begin, end) of each part that a cut takes.
        grows: Whether the axis of a cut is longer for longer inputs.
    """

    kind: str
    before: Shape
    after: Shape
    run: Callable[[Tensor], Any]
    groups: Sequence[tuple[list[int], list[int]]] = ()
    order: Sequence[int] = ()
    axis: int = 0
    drops: bool = False
    alone: bool = False
    parts: Sequence[tuple[int, int]] = ()
    grows: bool = False

    def cut_to(self, lengths: Collection[int]) -> bool:
        """Whether a part that a cut takes begins, ends or has a size at the length of an input."""
        if self.kind != "cut" or not self.alone:
            return False
        size = self.before[self.axis]
        inner = [(begin, end) for begin, end in self.parts if end - begin < size]
        return any(
            begin in lengths or (end in lengths and end < size) or (end - begin in lengths and not self.drops)
            for begin, end in inner
        )

    @property
    def taken(self) -> set[int]:
        """The sizes of the parts that a cut takes, if it keeps their axis."""
        sizes = set() if self.drops else {end - begin for begin, end in self.parts}
        return {len(self.parts)} if sizes == {1} else sizes

    def __call__(self, array: Tensor, lead: int = 0) -> Any:
        """Move a thin array, with leading axes before the value's own."""
        if self.kind == "groups":
            return self._regrouped(array, lead)
        if self.kind == "permute":
            return array.permute((*range(lead), *(lead + axis for axis in self.order)))
        if self.kind == "expand":
            extra = len(self.after) - len(self.before)
            return array.reshape([*array.shape[:lead], *[1] * extra, *array.shape[lead:]])
        whole = list(array.shape)
        thin = self.kind == "cut" and array.shape[lead + self.axis] == 1
        for axis, size in enumerate(self.before):
            if self.kind == "other" or axis == self.axis:
                whole[lead + axis] = size
        count, front = math.prod(array.shape[:lead]), array.shape[:lead]
        # With leading axes, all rows are moved at once by index; 0 is the index of padding.
        numbers = array if count == 1 else places(array.shape[lead:]) + 1
        made = self.run(numbers.reshape(array.shape[lead:]).expand(whole[lead:]))
        results = list(made) if isinstance(made, (list, tuple)) else [made]
        if count > 1:
            rows = torch.cat([array.new_zeros(count, 1), array.reshape(count, -1)], 1)
            results = [thinned(own) if self.kind == "other" else own for own in results]
            results = [rows[:, own.reshape(-1)].reshape((*front, *own.shape)) for own in results]
        else:
            results = [own.reshape((*front, *own.shape)) for own in results]
        results = [self._joined(own, lead, thin) for own in results]
        return results if isinstance(made, (list, tuple)) else results[0]

    def _joined(self, result: Tensor, lead: int, thin: bool) -> Tensor:
        if self.kind == "other":
            return thinned(result, lead)
        if self.drops:
            return result
        at = lead + self.axis
        same = (thin and result.shape[at] > 0) or (result.shape[at] > 1 and not varies(result, at))
        return result.narrow(at, 0, 1) if same else result

    def _regrouped(self, array: Tensor, lead: int) -> Tensor:
        whole, result = list(array.shape), [1] * len(self.after)
        for own, new in self.groups:
            if any(array.shape[lead + axis] > 1 for axis in own):
                for axis in own:
                    whole[lead + axis] = self.before[axis]
                for axis in new:
                    result[axis] = self.after[axis]
        made = array.expand(whole).reshape([*array.shape[:lead], *result])
        split = any(len(new) > 1 and any(result[axis] > 1 for axis in new) for _, new in self.groups)
        return thinned(made, lead) if split else made

    def relation(self, relation: Relation | None) -> Relation | None:
        """Return the relation of the moved value."""
        if relation is None or (self.kind == "other" and not self._moves_whole(relation.axes)):
            return None
        if self.kind == "other":
            return relation
        axes = relation.axes
        if self.kind == "cut":
            if self.axis in axes:
                return None
            axes = frozenset(axis - (self.drops and axis > self.axis) for axis in axes)
        elif self.kind == "permute":
            axes = frozenset(new for new, old in enumerate(self.order) if old in axes)
        elif self.kind == "expand":
            extra = len(self.after) - len(self.before)
            axes = frozenset(axis + extra for axis in axes)
            if any(self.after[axis] != self.before[axis - extra] for axis in axes):
                return None
        if self.kind == "groups":
            met = [(own, new) for own, new in self.groups if not relation.axes.isdisjoint(own)]
            axes = frozenset(axis for _, new in met for axis in new)
            relation = spread(relation, {axis for own, _ in met for axis in own}, self.before)
        coefficient = relation.coefficient.mapped(lambda own: _first(self(own)))
        return _narrowed(Relation(axes, _first(self(relation.segments)), coefficient, relation.total), self.after)

    def _moves_whole(self, axes: Collection[int]) -> bool:
        """Whether each slice along some axes moves as a whole, as in a roll along the others."""
        order = sorted(axes)
        if len(self.after) != len(self.before) or any(self.after[axis] != self.before[axis] for axis in order):
            return False
        made = self.run(places(self.before) + 1)  # 0 is padding
        if not isinstance(made, Tensor):
            return False
        along, others = (
            places(self.before)[tuple(slice(None if (axis in axes) == wanted else 1) for axis in range(made.ndim))]
            for wanted in (True, False)
        )
        rows = made.movedim(order, tuple(range(-len(order), 0))).reshape(-1, along.numel())
        return torch.equal(rows, rows[:, :1] + along.reshape(-1)) and bool(torch.isin(rows[:, 0], others + 1).all())


def _first(result: Any) -> Tensor:
    first: Tensor = result[0] if isinstance(result, list) else result
    return first


def spread(relation: Relation, axes: Collection[int], shape: Shape) -> Relation:
    """Return a relation with separate segments for each place on further axes."""
    segments, total = relation.segments, relation.total
    for axis in set(axes) - relation.axes:
        if (size := shape[axis]) > 1:
            segments = segments * size + torch.arange(size).reshape(
                [-1 if at == axis else 1 for at in range(len(shape))]
            )
            total = Total(total.segments * size, before=(total, torch.arange(total.segments * size) // size))
    return Relation(relation.axes | set(axes), segments, relation.coefficient, total)


def joined_relation(values: Sequence[Value], axis: int) -> Relation | None:
    """Return the relation of concatenated values.

    It is the common one or, of values that are joined along its axes, one with separate segments for each of them. A
    value without a relation is a segment with an unknown total.
    """
    found = [value.relation for value in values if value.relation is not None]
    first = found[0] if found else None
    if first is None or len({(own.axes, own.total.key(), own.coefficient.factor) for own in found}) > 1:
        return None
    if len({tuple((atom, power) for atom, power, _ in own.coefficient.items) for own in found}) > 1:
        return None
    arrays = [[own.segments, *(part for *_, part in own.coefficient.items)] for own in found]
    if axis not in first.axes:
        alike = all(torch.equal(one, two) for own in arrays for one, two in zip(own, arrays[0], strict=True))
        return first if alike and len(found) == len(values) else None
    count, rank = first.total.segments, values[0].rank
    within = [range(count if value.relation is not None else 1) for value in values]  # the segments of each value
    starts = list(accumulate((len(own) for own in within), initial=0))
    own = iter(arrays)
    nothing = [torch.zeros([1] * rank).long()] * len(arrays[0])  # any coefficients, as the total is unknown
    arrays = [nothing if value.relation is None else next(own) for value in values]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        whole = np.broadcast_shapes(*(tuple(part.narrow(axis, 0, 1).shape) for part in parts))
        sizes = [[*whole[:axis], value.shape[axis], *whole[axis + 1 :]] for value in values]
        return torch.cat([part.expand(size) for part, size in zip(parts, sizes, strict=True)], axis)

    segments = joined([parts[0] + start for parts, start in zip(arrays, starts[:-1], strict=True)])
    places = iter([joined(parts) for parts in zip(*(parts[1:] for parts in arrays), strict=True)])
    total = Total(starts[-1], before=(first.total, torch.tensor([at for own in within for at in own])))
    if len(found) < len(values):
        total.constant = tuple(
            math.nan if value.relation is None else 0.0 for value, own in zip(values, within, strict=True) for _ in own
        )
    return Relation(first.axes, segments, first.coefficient.mapped(lambda _: next(places)), total)


def told(value: Value, axes: Sequence[int]) -> Value:
    """Return a value with the relation of the numbers that it holds, if it has no other along some axes.

    Each entry that no input changes is a segment, whose total is its number.
    """
    others = [axis for axis in range(value.rank) if axis not in axes]
    if value.held is None or not axes or not others or (value.relation and value.relation.axes == set(axes)):
        return value
    held = value.held.amin(others, True)
    known = (held == value.held.amax(others, True)) & (held != 0)
    if not bool(known.any()) or bool(known.all()):
        return value
    segments = known.reshape(-1).long().cumsum(0).reshape(known.shape) * known
    total = Total(1 + int(known.sum()), (math.nan, *held[known].tolist()))
    return value.with_(relation=Relation(frozenset(axes), segments, ONE, total), base=value.root)


def windows_of(value: Value, weights: Value) -> Value | None:
    """Return the windows that a kernel reads, if a relation of the channels holds at each place; else None."""
    relation, kernel = value.relation, weights.shape[2:]
    if relation is None or relation.axes != {1}:
        return None
    count = math.prod(kernel)
    total = Total(relation.total.segments * count)
    total.before = relation.total, torch.arange(total.segments) // count
    segments = relation.segments * count + torch.arange(count).reshape(1, 1, *kernel)
    told = Relation(frozenset(range(1, 2 + len(kernel))), segments, relation.coefficient, total)
    return Value((*value.shape[:2], *kernel), True, relation=told)


def _narrowed(relation: Relation, shape: Shape) -> Relation:
    """Drop axes that only separate segments, if the totals do not differ along them."""
    total, at = _source(relation.total)
    axes, segments = relation.axes, relation.segments
    for axis in sorted(axes):
        size = segments.shape[axis]
        if size != shape[axis] or size == 1 or any(own.shape[axis] > 1 for *_, own in relation.coefficient.items):
            continue
        first = segments.narrow(axis, 0, 1)
        offset = (segments - first).movedim(axis, 0).reshape(size, -1)
        apart = len(torch.unique(segments)) == size * len(torch.unique(first))
        if apart and bool((offset == offset[:, :1]).all()) and bool((at[segments] == at[first]).all()):
            axes, segments = axes - {axis}, first
    if axes == relation.axes:
        return relation
    kept, segments = torch.unique(segments, return_inverse=True)
    if not torch.equal(at[kept], torch.arange(total.segments)):
        total = Total(len(kept), before=(total, at[kept]))
    return Relation(axes, segments, relation.coefficient, total)


def _source(total: Total) -> tuple[Total, Tensor]:
    """Return the total from which segments were separated, and for each segment its index there."""
    if total.known is not None:
        return Total(1, total.known), torch.zeros(total.segments, dtype=torch.long)
    at = torch.arange(total.segments)
    while total.before is not None and not total.terms and total.constant == 0:
        total, own = total.before
        at = own[at]
    return total, at


def move_of(node: fx.Node, name: str, before: Shape, constants: Callable[[fx.Node], Tensor | None]) -> Move | None:
    """Return the move of a node; None if it needs further tensors that depend on the input or the weights."""
    first: Any = node.meta["val"]
    after = tuple(first[0].shape) if isinstance(first, (list, tuple)) else tuple(first.shape)
    if name in operations(Trait.REGROUP):
        return Move("groups", before, after, lambda t: t.reshape(after), groups_of(before, after))
    if name in operations(Trait.EXPAND):
        return Move("expand", before, after, lambda t: t.expand(after))
    others = pytree.tree_leaves((node.args[1:], node.kwargs))
    nodes = {other: constants(other) for other in others if isinstance(other, fx.Node)}
    if any(value is None for value in nodes.values()):
        return None
    rest = pytree.tree_map(lambda own: nodes[own] if isinstance(own, fx.Node) else own, (node.args[1:], node.kwargs))
    target: Any = node.target

    def run(tensor: Tensor) -> Any:
        return target(tensor, *rest[0], **rest[1])

    if name in operations(Trait.PERMUTE):
        lengths = [2 + axis for axis in range(len(before))]
        order = [size - 2 for size in run(torch.empty(lengths, device="meta")).shape]
        return Move("permute", before, after, run, order=order)
    if name in operations(Trait.CUT):
        place = 2 if name in operations(Trait.PARTS) - {"unbind"} else 1
        axis = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
        assert isinstance(axis, int)
        axis %= len(before)
        parts = _parts(node, name, before[axis], axis)
        drops = name in ("select", "unbind")
        used = {user.args[1] for user in node.users if name_of(user) == "getitem" and user.users}
        several = name in operations(Trait.PARTS)
        if several:
            parts = [part for index, part in enumerate(parts) if index in used]
        alone = not several or len(used) < len(first)
        return Move("cut", before, after, run, axis=axis, drops=drops, alone=alone, parts=parts)
    if name in operations(Trait.PAD):
        sizes: Any = node.args[1]
        if name == "pad" and len(node.args) > 2 and node.args[2] != "constant":
            return None
        return Move("other", before, after, lambda t: torch.nn.functional.pad(t, list(sizes)))
    return Move("other", before, after, run)


def _parts(node: fx.Node, name: str, size: int, axis: int) -> list[tuple[int, int]]:
    """Return the (begin, end) of each part of a cut."""
    val: Any = node.meta["val"]
    if name in operations(Trait.PARTS):
        sizes = [1 if name == "unbind" else int(part.shape[axis]) for part in val]
        return [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]
    first = node.args[2] if len(node.args) > 2 else None
    if not isinstance(first, int) or not size:
        return []
    begin, step = first % size if -size <= first < size else size, argument(node, 4, "step", 1)
    count = 1 if name == "select" else int(val.shape[axis])
    if step == 1:
        return [(begin, begin + count)]
    return [(at, at + 1) for at in range(begin, begin + count * int(step), int(step))]
