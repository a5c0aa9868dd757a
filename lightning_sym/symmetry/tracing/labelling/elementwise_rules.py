"""Rules for elementwise operations, pooling, and moves of elements.

See docs/theory/intertwiners.md, 2.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from lightning_sym.symmetry.arrays import rising
from lightning_sym.symmetry.tracing.graph.coordinates import coordinates, varying_axes
from lightning_sym.symmetry.tracing.graph.nodes import axes_of, reduced
from lightning_sym.symmetry.tracing.graph.operations import (
    Trait,
    moving,
    name_of,
    operations,
    out_of_place,
    spatial_axes_of,
)
from lightning_sym.symmetry.tracing.labelling.choice_rules import picked, without_scale
from lightning_sym.symmetry.tracing.labelling.constraints import Label
from lightning_sym.symmetry.tracing.labelling.joining import MET
from lightning_sym.symmetry.tracing.labelling.overwriting import choose, overwrite
from lightning_sym.symmetry.tracing.labelling.rules import fix_choice, pointwise, register_rule, unknown
from lightning_sym.symmetry.tracing.labelling.values import Value, filled, numbered, values_in
from lightning_sym.symmetry.tracing.labelling.vocabulary import Rule, Trace

# Elementwise operations.


@register_rule(Trait.CAST, "aten::neg")
def _pass(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Value:
    """Pass values through casts and negation; a cast to integers or bools rounds and allows no scale."""
    before, after = trace.node.all_input_nodes[0].meta.get("val"), trace.node.meta["val"]
    if value.chooses is not None and not _holds(after.dtype, value.chooses.size):
        fix_choice(trace, value)
        value = replace(value, chooses=None)
    if isinstance(before, Tensor) and before.is_floating_point() and not after.is_floating_point():
        if value.labels:
            trace.note("rounds, so that small changes of its input have no effect; the group does not contain these")
        return replace(trace.permutations_only(value), chooses=value.chooses)
    passed = Value(
        value.shape,
        value.labels,
        value.concrete,
        by_size=value.by_size,
        squared=value.squared,
        chooses=value.chooses,
    )
    return trace.carry(value, passed)


def _holds(kind: torch.dtype, count: int) -> bool:
    """Return whether a dtype represents all integers below a count exactly."""
    if kind.is_floating_point:
        return count <= 2 / torch.finfo(kind).eps
    return count <= (2 if kind == torch.bool else torch.iinfo(kind).max)


@register_rule("aten::sqrt", "aten::rsqrt", "aten::reciprocal", "aten::pow")
def _power(trace: Trace, value: Any, exponent: Any = None) -> Any:
    """Apply powers that are not finite everywhere; finite ones can be measured."""
    exponent = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1}.get(trace.operation.removesuffix("_"), exponent)
    if not isinstance(value, Value) or not isinstance(exponent, (int, float)):
        assert isinstance(trace.node.target, torch._ops.OpOverload)
        return pointwise(out_of_place(trace.node.target), trace, value, exponent)
    if exponent == 0:
        return trace.fix(value)
    if exponent == 2:
        return _squared(trace, value)
    whole = float(exponent).is_integer()
    return trace.elementwise(value, positive_scales=True, signs=whole, even=exponent % 2 == 0, exponent=float(exponent))


FACTORS = "makes factors of what biases add, which scales could undo"


@register_rule("aten::exp")
def _exponential(trace: Trace, value: Value) -> Value:
    passed = trace.permutations_only(value)
    if value.state is not None:  # a gain that is always positive
        reason = f"makes factors of {value.state}, which could absorb scales by adding their logarithms"
        with trace.constraints.explain(f"{trace.where}: {reason}"):
            return without_scale(trace, passed)
    if not _has_bias(trace.node.all_input_nodes[0]):
        return passed
    with trace.constraints.explain(f"{trace.where}: {FACTORS}"):
        return without_scale(trace, passed)


def _has_bias(node: fx.Node) -> bool:
    """Whether a value is the output of a layer with a bias, perhaps moved and times numbers."""
    while (name_of(node) in operations(Trait.MOVE | Trait.CAST) | {"getitem"} or _adds(node)) and len(
        node.all_input_nodes
    ) == 1:
        node = node.all_input_nodes[0]
    return name_of(node) in operations(Trait.CONTRACT) and len(node.args) > 2 and node.args[2] is not None


def _adds(node: fx.Node) -> bool:
    """Whether a node adds values, or multiplies one by a number."""
    multiple = name_of(node) in operations(Trait.PRODUCT) and isinstance(node.args[1], (int, float))
    return multiple or name_of(node) in operations(Trait.JOIN) | {"neg"}


def _binary(product: bool, divide: bool = False) -> Rule:
    def rule(trace: Trace, one: Any, two: Any, *args: Any, **kwargs: Any) -> Value:
        if kwargs.get("rounding_mode"):
            return trace.permutations_only(rule(trace, one, two))
        if isinstance(one, Value) and isinstance(two, Value):
            if product and not divide and (one.is_zero or two.is_zero):
                return filled(0.0, trace.output_shape())
            if product and not divide and one is two:
                return _squared(trace, one)
            gain = trace.gain_in(two) or (None if divide else trace.gain_in(one)) if product else None
            return trace.join(one, two, product=product, divide=divide, gain=gain)
        value = one if isinstance(one, Value) else two
        if not isinstance(one, Value) and divide:
            return trace.elementwise(value, positive_scales=True, signs=True, exponent=-1.0)
        if product or (isinstance(two, (int, float)) and two == 0):
            return Value(value.shape, tuple(trace.constraints.resolve(label) for label in value.labels))
        plus = trace.plus_number if isinstance(two if value is one else one, (int, float)) else trace.permutations_only
        if not value.labels or not _has_bias(trace.node.all_input_nodes[0]):
            return plus(value)
        with trace.constraints.explain(f"{trace.where}: {MET}"):
            return plus(value)

    return rule


# Norms of units: sums of squares, and deviations.


def _is_square(node: torch.fx.Node) -> bool:
    """Whether a node contains squares, perhaps after casts."""
    name = name_of(node)
    if name in operations(Trait.CAST):
        return _is_square(node.all_input_nodes[0])
    if name == "pow":
        return bool(node.args[1] == 2)
    return name == "square" or (name == "mul" and node.args[0] is node.args[1])


def _summed_axes(node: torch.fx.Node, rank: int) -> set[int]:
    """Return the axes summed by every reader of a node; empty if it has other readers."""
    common = set(range(rank))
    for user in node.users:
        name = name_of(user)
        if name in operations(Trait.CAST) and user.args[0] is node:
            common &= _summed_axes(user, rank)
        elif name in operations(Trait.SUM):
            common &= reduced(user, rank)
        else:
            return set()
    return common


@register_rule("aten::square")
def _squared(trace: Trace, value: Value) -> Value:
    """Square units like any even function, unless readers only use sums over all units, or over parts of them."""
    summed = _summed_axes(trace.node, value.ndim)
    labels = []
    for label in value.labels:
        label = trace.constraints.resolve(label)
        if summed & set(label.axes):
            trace.constraints.keep_norm(label)
        else:
            trace.constraints.restrict(label)
        labels.append(label.scaled_by(trace.constraints.product((label.scale, 2.0))))
    return Value(value.shape, tuple(labels), squared=bool(summed))


@register_rule("aten::var", "aten::std")
def _deviation(trace: Trace, value: Value, axes: Any = None, *args: Any, **kwargs: Any) -> Any:
    axes = None if isinstance(axes, bool) else axes
    power = 1.0 if trace.operation.startswith("std") else 2.0
    return _norm_along(trace, value, axes, power, centred=True)


@register_rule("aten::linalg_vector_norm", "aten::norm")
def _norm(trace: Trace, value: Value, order: Any = 2, axes: Any = None, *args: Any, **kwargs: Any) -> Any:
    if order in (2, None):
        return _norm_along(trace, value, axes, 1.0, centred=False)
    # Absolute values are summed: each sign is free, and a common magnitude passes.
    return summed_over(trace, trace.elementwise(value, positive_scales=order != 0, signs=True, even=True), axes)


def _norm_along(trace: Trace, value: Value, axes: Any, power: float, *, centred: bool) -> Value:
    """Return norms over some axes, perhaps of centred values; rotations of the summed units are allowed.

    Args:
        trace: The trace.
        value: The value.
        axes: The axes of the norm.
        power: 1 for the norm, 2 for its square.
        centred: Whether the mean is subtracted first.
    """
    shape, gone = trace.output_shape(), axes_of(axes, value.ndim)
    keep = len(shape) == value.ndim
    labels = []
    for label in value.labels:
        label = trace.constraints.resolve(label)
        kept = tuple(axis for axis in label.axes if axis not in gone)
        if len(kept) < len(label.axes):
            trace.constraints.keep_norm(label)
            whole = trace.parts(label, kept, mixtures=True) if kept else trace.constraints.fresh((), ())
            if centred:
                trace.constraints.keep_ones(label)
                signs = trace.constraints.fresh_scales(whole.scale.shape)
                signs = trace.onto(whole.scaled_by(signs), label).scale
                trace.constraints.equate([(label.scale, 1.0), (signs, -1.0)], magnitudes=False)
            common = trace.onto(whole, label).scale
            trace.constraints.equate([(common, 1.0), (label.scale, -power)], signs=False)
            trace.constraints.fix_scales(whole.scale, magnitudes=False)
            labels.append(whole.on(tuple(a if keep else a - sum(g < a for g in gone) for a in kept)))
            continue
        one = value.with_labels(label)
        (own,) = trace.elementwise(one, positive_scales=True, signs=True, exponent=power, even=True).labels
        own = _of_parts(trace, own, gone) if gone & set(own.axes) else own
        labels.append(own.on(tuple(a if keep else a - sum(g < a for g in gone) for a in own.axes)))
    return Value(shape, tuple(trace.lent(labels)))


def _of_parts(trace: Trace, label: Label, gone: set[int], *, mixtures: bool = False) -> Label:
    """Return the label of a reduction along some of a label's axes; the reduced units must share one scale."""
    whole = trace.parts(label, [axis for axis in label.axes if axis not in gone], mixtures=mixtures)
    trace.constraints.equate([(label.scale, 1.0), (trace.onto(whole, label).scale, -1.0)])
    return whole


register_rule("aten::add", "aten::sub", "aten::rsub")(_binary(product=False))
register_rule("aten::mul")(_binary(product=True))
register_rule("aten::div")(_binary(product=True, divide=True))


def _chosen(trace: Trace, mask: Value, one: Any, two: Any) -> Value | None:
    """Select between two values by a constant mask; None if the mask does not distinguish units."""
    shape = trace.output_shape()
    if mask.concrete is None:
        return None
    wide = mask.concrete.bool().expand(shape)
    values = [part for part in (one, two) if isinstance(part, Value)]
    units = {len(shape) - value.ndim + axis for value in values for label in value.labels for axis in label.axes}
    spread = [axis for axis in units if shape[axis] > 1 and wide.stride(axis)]
    if not spread:
        return None

    def expand(tensor: Tensor) -> Tensor:
        return tensor.expand(shape)

    parts = []
    for part in (one, two):
        value = trace.carry(part, trace.move(part, expand), expand) if isinstance(part, Value) else filled(part, shape)
        if mask.by_size:  # the mask differs for inputs of another size
            value = replace(trace.free_of(value, spread, "chosen by positions"), sources=value.sources)
        parts.append(value)
    return choose(trace, wide, parts[0], lambda t: t, parts[1])


@register_rule("aten::masked_fill")
def _masked_fill(trace: Trace, value: Value, mask: Value, fill: Any) -> Value:
    chosen = _chosen(trace, mask, fill, value)
    if chosen is not None:
        return chosen
    value = value if fill == 0 else trace.permutations_only(value)
    return trace.join(value, trace.permutations_only(mask), product=True)


@register_rule(Trait.SOFTMAX)
def _softmax(trace: Trace, value: Value, axis: int, *args: Any, **kwargs: Any) -> Value:
    axis %= value.ndim
    for label in value.labels:
        if axis in label.axes and len(label.axes) > 1:  # units of one softmax stay together
            trace.parts(label, [other for other in label.axes if other != axis])
    return trace.permutations_only(value)


@register_rule("aten::atan2")
def _angle(trace: Trace, one: Any, two: Any) -> Any:
    """Return the angles of vectors, which a common length leaves alone."""
    if not (isinstance(one, Value) and isinstance(two, Value)):
        return unknown(trace, one, two)
    both = trace.join(one, two, product=False)
    return without_scale(trace, trace.elementwise(both, positive_scales=True))


@register_rule("aten::cumsum")
def _cumsum(trace: Trace, value: Value, axis: int, *args: Any, **kwargs: Any) -> Value:
    return trace.linear_along(value, [axis], value.shape)


@register_rule("aten::logcumsumexp")
def _logcumsumexp(trace: Trace, value: Value, axis: int) -> Value:
    return trace.linear_along(trace.permutations_only(value), [axis], value.shape)


@register_rule("lightning_sym::any_step")
def _any_step(trace: Trace, value: Value, axis: int) -> Value:
    value = trace.linear_along(value, [axis], value.shape)
    step: Value = trace.move(value, lambda t: t.select(axis, 0))
    return step


@register_rule("aten::where")
def _where(trace: Trace, condition: Value, one: Any, two: Any) -> Any:
    values = [part for part in (one, two) if isinstance(part, Value)]
    if not values:
        return unknown(trace, condition)
    chosen = _chosen(trace, condition, one, two)
    if chosen is not None:
        return chosen
    if len(values) == 2:
        value = trace.join(values[0], values[1], product=False)
    else:
        zero = any(not isinstance(part, Value) and part == 0 for part in (one, two))
        value = values[0] if zero else trace.permutations_only(values[0])
    return trace.join(value, trace.permutations_only(condition), product=True)


@register_rule(Trait.ORDER)
def _compare(trace: Trace, one: Value, two: Any) -> Value:
    """Compare values; a comparison with 0, or of two values, allows positive scales, others allow none."""
    if isinstance(two, Value):
        one = trace.join(one, two, product=False)
    elif two != 0:
        return trace.permutations_only(one)
    return without_scale(trace, trace.elementwise(one, positive_scales=True))


@register_rule("aten::maximum", "aten::minimum")
def _maximum(trace: Trace, one: Value, two: Value) -> Value:
    return trace.elementwise(trace.join(one, two, product=False), positive_scales=True)


# Moves of elements: labels follow the coordinates.

_OBLIQUE = {"diagonal", "gather", "index", "take"}  # may read each unit at a position of its own
_APART = "reads units at other positions in other rows"


@register_rule(Trait.MOVE, Trait.PICK, Trait.SPREAD)
def _movement(trace: Trace, value: Any, *args: Any, **kwargs: Any) -> Any:
    types = any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values()))  # bytes of another dtype
    if types or isinstance(value, (list, tuple)):
        return unknown(trace, value, *args, **kwargs)

    def unwrap(item: Any) -> Any:
        return item.concrete if isinstance(item, Value) else item

    if any(v.concrete is None for v in values_in((args, kwargs))):
        return picked(trace, value, *args, **kwargs)
    if "zeros" in trace.node.meta:
        trace.beside_zeros |= {root.state for root, _ in value.sources or ((value, ()),)}
    grows = bool(trace.lengths) and any(index.by_size for index in values_in((args, kwargs)))
    if grows or _is_cut_to_length(trace, value):
        trace.cut_by_size(value)
    args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs))
    move = moving(trace.node, args, kwargs)
    if not any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        # Equal layers share their moves, and what is known of these.
        shape = getattr(trace.node.meta["val"], "shape", None)
        move = trace.known.setdefault((trace.node.target, repr((args, kwargs)), shape), move)
    back = _as_it_was(trace, value, move)
    if back is not None:
        return back
    if name_of(trace.node) in _OBLIQUE and (apart := _axes_read_apart(value, move)):
        if value.state is not None:
            return unknown(trace, value, *args, **kwargs)
        value = trace.free_of(value, apart, _APART)
    moved = trace.move(value, move)
    if isinstance(moved, Value):
        return trace.carry(value, moved, move)
    return [
        trace.carry(value, part, lambda t, index=index: move(t)[index])  # type: ignore[misc]
        for index, part in enumerate(moved)
    ]


def _axes_read_apart(value: Value, move: Callable[[Tensor], Any]) -> list[int]:
    """Return the axes of units that a move reads at other positions for other entries beside these units."""
    units = {axis for label in value.labels for axis in label.axes}
    others = [axis for axis in range(value.ndim) if axis not in units]
    beside = varying_axes(move(coordinates(value.shape, others)))
    found: list[int] = []
    for label in value.labels:
        own = varying_axes(move(coordinates(value.shape, label.axes)))
        found += [] if set(own).isdisjoint(beside) else label.axes
    return found


def _as_it_was(trace: Trace, value: Value, move: Callable[[Tensor], Any]) -> Value | None:
    """Return a parameter after moves that restore its original layout; None for other values."""
    roots = value.sources
    if len(roots) != 1 or roots[0][0].state is None or not isinstance(trace.node.meta["val"], Tensor):
        return None
    root, path = roots[0]
    if root.shape != trace.output_shape():
        return None
    place = start = coordinates(root.shape, range(root.ndim))
    for step in (*path, move):
        place = step(place)
    return root if torch.equal(place, start) else None


def _is_cut_to_length(trace: Trace, value: Value) -> bool:
    """Whether a slice has the length of an input, so that longer inputs may read more elements."""
    meta = trace.node.meta["val"]
    if not isinstance(meta, Tensor) or meta.ndim != value.ndim:
        return False
    sizes = enumerate(zip(meta.shape, value.shape, strict=True))
    cut = {axis for axis, (new, old) in sizes if new < old and new in trace.lengths}
    return bool(cut) and not cut <= trace.growing(trace.node.args[0])


@register_rule("aten::pad", "aten::constant_pad_nd")
def _pad(trace: Trace, value: Value, sizes: Sequence[int], *args: Any) -> Any:
    target: Any = trace.node.target
    mode = args[0] if args and isinstance(args[0], str) else "constant"
    fill = next((a for a in args if isinstance(a, (int, float))), 0) or 0

    def pad(t: Tensor) -> Tensor:
        return nn.functional.pad(t, list(sizes)) if mode == "constant" else target(t.contiguous(), sizes, *args)

    return trace.carry(value, trace.move(value, pad, filled_by_zero=mode != "constant" or fill == 0), pad)


@register_rule("aten::cat")
def _cat(trace: Trace, values: Sequence[Value], axis: int = 0) -> Value:
    shape = trace.output_shape()
    axis %= len(shape)
    values = [v for v in values if not (v.ndim == 1 and v.shape[0] == 0)]
    values = [_spread(trace, _without_kernel(trace, value, axis), axis) for value in values]
    wide = {label.axes for value in values for label in value.labels if len(label.axes) > 1 and axis not in label.axes}
    for at, value in enumerate(values):  # learned keys beside those of heads
        apart = [axes for axes in wide if sum(set(own.axes) <= set(axes) for own in value.labels) > 1]
        values[at] = (trace._jointly(value, lambda tensor: tensor, apart) if apart else None) or value
    along = [next((label for label in v.labels if axis in label.axes), None) for v in values]
    kinds = {label.axes for label in along if label is not None}
    if len(kinds) > 1:
        return _side_by_side(trace, values, axis, shape)
    if not kinds and len({value.is_zero for value in values}) > 1:  # a state of zeros times a gate
        kinds = {(axis,)}
    others = {label.axes for value in values for label in value.labels if axis not in label.axes}
    result: list[Label] = []
    for axes in others:
        met = [v for v in values if not v.is_zero]  # zeros accept any label
        parts = [next((label for label in v.labels if label.axes == axes), None) for v in met]
        if any(part is None for part in parts):
            for value, part in zip(met, parts, strict=True):
                if part is not None:
                    trace.fix(value.with_labels(part), "joined with a tensor on which nothing acts")
            continue
        joined, *rest = (part for part in parts if part is not None)
        for part in rest:
            scale = joined.scale
            joined = trace.constraints.same_units(joined, part)
            trace.constraints.equate([(scale, 1.0), (part.scale, -1.0)])
        result.append(joined)
    if kinds:
        (axes,) = kinds
        place = axes.index(axis)
        whole: list[Label] = []
        for value, label in zip(values, along, strict=True):
            if label is None:
                label = trace.constraints.fresh(axes, tuple(value.shape[a] for a in axes))
                if value.concrete is not None and not value.is_zero:  # zeros (an absent bias) accept any label
                    label = trace.beside_constant(label, value, added=True)
                elif not value.is_zero:
                    trace.constraints.fix(label)
                elif "rest" in trace.node.meta:  # memory that nothing writes
                    trace.constraints.restrict(label)
            whole.append(trace.constraints.resolve(label))
        arrays = (np.concatenate(several, place) for several in zip(*(label.parts for label in whole), strict=True))
        joined = Label(axes, *arrays)
        first = trace.constraints.first(joined.atom)
        if len(rising(first)) < joined.size:  # a unit at several places
            tag = trace.constraints.derive_tags(joined.tag, numbered(replace(joined, atom=first)))
            joined = Label(axes, joined.atom, tag, joined.scale)
        result.append(joined)
    return trace.disjoint(Value(shape, tuple(result)))


def _without_kernel(trace: Trace, value: Value, axis: int) -> Value:
    """Fix the single entries of a parameter's axes behind the first two (kernels of width 1): later moves drop them."""
    single = [own for own in value.labels if own.size == 1 and min(own.axes, default=0) > 1 and axis not in own.axes]
    if value.state is None or not single:
        return value
    trace.fix(value.with_labels(*single))
    return value.with_labels(*(own for own in value.labels if own not in single))


def _spread(trace: Trace, value: Value, axis: int) -> Value:
    """Spread a unit that fills a whole tensor along the concatenated axis, if no other label is there."""
    if any(axis in label.axes for label in value.labels):
        return value
    spread = trace.constraints.spread
    return replace(
        value, labels=tuple(own if own.axes else spread(own, axis, value.shape[axis]) for own in value.labels)
    )


def _side_by_side(trace: Trace, values: Sequence[Value], axis: int, shape: tuple[int, ...]) -> Value:
    """Concatenate values with units on different axes (keys shared by all heads) by writing each into the result."""
    every = torch.arange(math.prod(shape)).reshape(shape)
    places = torch.split(every, [value.shape[axis] for value in values], axis)  # type: ignore[no-untyped-call]
    result = filled(0.0, shape)
    for value, where in zip(values, places, strict=True):
        result = overwrite(trace, result, where, value)
    return result


@register_rule(Trait.POOL, Trait.RESIZE)
def _spatial_mean(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Value:
    return trace.linear_along(value, range(-spatial_axes_of(trace.operation), 0), trace.output_shape())


@register_rule("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d")
def _interpolated(trace: Trace, value: Value, grid: Value, *args: Any) -> Value:
    trace.fix(grid, "computes places, which keep their order and size")
    value = trace.free_of(value, [0], "each has a grid of its own")
    return trace.linear_along(value, range(2, value.ndim), trace.output_shape())


@register_rule(Trait.MAX_POOL)
def _max_pool(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Any:
    count = spatial_axes_of(trace.operation)
    single = isinstance(trace.node.meta["val"], Tensor)
    value = trace.tied(value, range(-count, 0))
    value = trace.elementwise(Value(trace.output_shape(None if single else 0), value.labels), positive_scales=True)
    return value if single else [value, without_scale(trace, value)]


@register_rule(Trait.SUM)
def _mean(trace: Trace, value: Value, axes: Any = None, keepdim: bool = False, **kwargs: Any) -> Value:
    return summed_over(trace, value, axes)


@register_rule("aten::logsumexp")
def _logsumexp(trace: Trace, value: Value, axes: Any, keepdim: bool = False) -> Value:
    return summed_over(trace, trace.permutations_only(value), axes, squares=False)


@register_rule("aten::amax", "aten::amin")
def _extremum(trace: Trace, value: Value, axes: Any = None, keepdim: bool = False, **kwargs: Any) -> Value:
    return summed_over(trace, trace.elementwise(value, positive_scales=True), axes or None)


def summed_over(trace: Trace, value: Value, axes: Any, *, squares: bool | None = None) -> Value:
    """Return the sum or mean of a value over some axes.

    Args:
        trace: The trace.
        value: Any value.
        axes: The summed axes; None for all.
        squares: Whether the value contains squares; by default inferred from the current operation.
    """
    squares = _is_square(trace.node.all_input_nodes[0]) if squares is None else squares
    shape = trace.output_shape()
    keep = len(shape) == value.ndim
    gone = axes_of(axes, value.ndim)
    labels: list[Label] = []
    for label in value.labels:
        label = trace.constraints.resolve(label)
        if not gone & set(label.axes):
            place = {axis: axis if keep else axis - sum(g < axis for g in gone) for axis in label.axes}
            labels.append(label.on(tuple(place[axis] for axis in label.axes)))
        elif set(label.axes) <= gone:
            # A sum over all units is invariant under permutations; a sum of squares also under rotations.
            if not squares:
                trace.constraints.keep_ones(label)
            labels.append(trace.constraints.number_of(label))
        else:
            whole = _of_parts(trace, label, gone, mixtures=squares)
            labels.append(whole.on(tuple(axis if keep else axis - sum(g < axis for g in gone) for axis in whole.axes)))
    return Value(shape, tuple(trace.lent(labels)))
