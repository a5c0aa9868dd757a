"""Rules for operations that write into tensors: each returns the tensor after the write."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.labelling.choice_rules import TAKEN, marked
from lightning_sym.symmetry.tracing.labelling.overwriting import overwrite
from lightning_sym.symmetry.tracing.labelling.rules import fix_choice, register_rule, unknown
from lightning_sym.symmetry.tracing.labelling.values import Value, filled
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace


def _elements(value: Value) -> Tensor:
    return torch.arange(math.prod(value.shape)).reshape(value.shape)


def _put(trace: Trace, base: Value, where: Tensor, new: Any, *, add: bool = False) -> Value:
    """Write a number or a broadcast value to given positions."""
    if not where.numel():
        return base
    if int(torch.bincount(where.reshape(-1)).max()) > 1:
        if isinstance(new, Value):
            trace.fix(new, "writes more than once into one place")
        return trace.fix(base, "writes more than once into one place")
    if isinstance(new, Value):
        shape = tuple(where.shape)
        if new.shape != shape:
            new = trace.move(new, lambda t: t.expand(shape))
    else:
        new = filled(new, where.shape)
    if add:
        new = trace.join(trace.move(base, lambda t: t.reshape(-1)[where]), new, product=False)
    return overwrite(trace, base, where, new)


# Reductions that preserve common scales of units; whether each is linear.
_REDUCTIONS = {"sum": True, "add": True, "mean": True, "amax": False, "amin": False}


def _at_chosen_places(trace: Trace, base: Value, axes: Sequence[int], new: Any) -> Value:
    """Write or add at positions that depend on the input; the group then acts identically at all positions."""
    base = trace.tied(base, axes, TAKEN)
    added = trace.tied(new, axes, TAKEN).labels if isinstance(new, Value) else filled(new, base.shape)
    written = added if isinstance(added, Value) else Value(base.shape, added)
    return trace.join(base, written, product=False)


def _at_chosen_indices(trace: Trace, base: Value, indices: Sequence[Value | None], values: Value) -> Value:
    """Write at indices that depend on the input."""
    chosen = [axis for axis, index in enumerate(indices) if index is not None]
    kept = [axis for axis in range(base.ndim) if axis not in chosen]
    rank = max(len(index.shape) for index in indices if index is not None)
    first = chosen[0] if chosen == [*range(chosen[0], chosen[-1] + 1)] else 0
    # As in torch, the axes of all indices replace the first indexed axis, or come first.
    into = [*kept[:first], *[None] * rank, *kept[first:]]
    into = into[len(into) - values.ndim :]
    values = trace.tied(values, [at for at, axis in enumerate(into) if axis is None], TAKEN)
    for index in indices:
        if index is not None:
            trace.fix(index)
    return _at_chosen_places(trace, base, chosen, values.on(into, base.ndim))


@register_rule("aten::copy", "aten::fill", "aten::zero")
def _whole(trace: Trace, target: Value, new: Any = 0.0, *args: Any) -> Value:
    return _put(trace, target, _elements(target), new)


@register_rule("aten::put")
def _at_places(trace: Trace, base: Value, where: Value, new: Value, accumulate: bool = False) -> Value:
    if where.concrete is None:
        fixed: Value = unknown(trace, base, where, new)
        return fixed
    return _put(trace, base, where.concrete, new, add=accumulate)


@register_rule("aten::index_put", "aten::_index_put_impl")
def _at_indices(
    trace: Trace, base: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False, *args: Any
) -> Any:
    if any(index is not None and index.concrete is None for index in indices):
        return _at_chosen_indices(trace, base, indices, values)
    where = _elements(base)[tuple(slice(None) if i is None else i.concrete for i in indices)]
    return _put(trace, base, where, values, add=accumulate)


@register_rule("aten::index_copy", "aten::index_add", "aten::index_fill")
def _along_an_axis(trace: Trace, base: Value, axis: int, index: Value, new: Any, alpha: float = 1) -> Any:
    if index.concrete is None:
        return _at_chosen_places(trace, base, [axis], new)
    where = _elements(base).index_select(axis, index.concrete)
    lived = {a % base.ndim for value in (base, new) if isinstance(value, Value) for la in value.labels for a in la.axes}
    if "index_add" in trace.operation and isinstance(new, Value) and axis % base.ndim not in lived:
        return trace.join(base, Value(base.shape, new.labels), product=False)  # sums along an axis without units
    return _put(trace, base, where, new, add="index_add" in trace.operation)


@register_rule("aten::scatter", "aten::scatter_add", "aten::scatter_reduce")
def _scatter(trace: Trace, base: Value, axis: int, index: Value, new: Any, reduce: str = "sum", **kwargs: Any) -> Any:
    plain = "reduce" not in trace.operation and "reduce" not in trace.node.kwargs
    if index.concrete is None and plain:
        result = marked(trace, base, axis, index, new)
        if result is not None:
            return result
    if index.concrete is None or not plain:
        fix_choice(trace, index)
        if index.chooses is not None or reduce not in _REDUCTIONS:
            return unknown(trace, base, index, new)
        # An expanded index is equal for all units along its expanded axes.
        node: Any = trace.node.args[2]
        held: Tensor = node.meta["val"]
        others = [a for a in range(held.ndim) if held.stride(a) and held.shape[a] > 1 and a != axis % base.ndim]
        base, new = (trace.free_of(v, others, TAKEN) if isinstance(v, Value) else v for v in (base, new))
        result = _at_chosen_places(trace, base, [axis], new)
        return result if _REDUCTIONS[reduce] else trace.elementwise(result, positive_scales=True)
    where = _elements(base).gather(axis, index.concrete)
    if isinstance(new, Value) and new.shape != tuple(where.shape):
        cut = tuple(slice(size) for size in where.shape)
        new = trace.move(new, lambda t: t[cut])
    return _put(trace, base, where, new, add="scatter_add" in trace.operation)


@register_rule("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter")
def _view_scatter(trace: Trace, base: Value, new: Value, *args: Any, **kwargs: Any) -> Value:
    """Out-of-place variants of writes into a slice, a row or a diagonal."""
    view = getattr(torch.ops.aten, trace.operation.removesuffix("_scatter"))
    return _put(trace, base, view(_elements(base), *args, **kwargs), new)


@register_rule("aten::max_unpool2d", "aten::max_unpool3d")
def _max_unpool(trace: Trace, value: Value, indices: Value, *args: Any) -> Value:
    """Return pooled units to their original positions; all other positions are zero."""
    count = 2 if "2d" in trace.operation else 3
    value, indices = (trace.tied(v, range(-count, 0)) for v in (value, indices))
    return Value(trace.output_shape(), trace.join(value, indices, product=True).labels)
