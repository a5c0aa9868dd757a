"""Rules for units chosen by their values, such as a router's experts, and for the integers that refer to them.

Operations that choose along an axis are invariant under permutations of its units: the chosen values are unchanged, and
the integers move with the units. Operations that take elements at these integers have the same units on the indexed
axis. See docs/theory/intertwiners.md, 2.13.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.operations import Trait, is_pointwise, name_of, operations
from lightning_sym.symmetry.tracing.labelling.constraints import Label
from lightning_sym.symmetry.tracing.labelling.rules import (
    CHOSEN,
    fix_choice,
    pointwise,
    register_rule,
    results_of,
    unknown,
)
from lightning_sym.symmetry.tracing.labelling.values import Value, values_in
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace

TAKEN = "elements are taken that depend on the input"


def _still(trace: Trace, label: Label) -> Label:
    """Return the same units without a scale."""
    scale = trace.constraints.scales_like(label.scale)
    trace.constraints.fix_scales(scale)
    return label.scaled_by(scale)


def without_scale(trace: Trace, value: Value) -> Value:
    """Return a value that moves with the units but ignores their scales (comparisons, indices)."""
    return value.with_labels(*(_still(trace, label) for label in value.labels))


def _placed(labels: Sequence[Label], axis: int, shape: tuple[int, ...], rank: int) -> Value:
    """Return labels on a result that may lack an axis."""
    gone = len(shape) < rank
    places = (tuple(a - (gone and a > axis) for a in label.axes) for label in labels)
    return Value(shape, tuple(label.on(axes) for label, axes in zip(labels, places, strict=True)))


@register_rule(Trait.CHOOSE)
def _chosen(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Any:
    """Return the largest values and their indices: values are invariant under permutations, indices move along."""
    name, meta = trace.operation, trace.node.meta["val"]
    if values_in((args, kwargs)) or (name in ("max", "min") and isinstance(meta, Tensor)):
        return unknown(trace, value, *args, **kwargs)
    given = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    at = kwargs.get("dim", dict(enumerate(given)).get(1 if name == "topk" else 0))
    if at is None and name in ("argmax", "argmin"):
        trace.fix(value, CHOSEN)
        return results_of(trace)
    if _may_be_equal(trace.node.args[0]):
        trace.fix(value, f"{CHOSEN}, of which several may be equal")
    axis = (-1 if at is None else at) % value.ndim
    across, along = ([label for label in value.labels if (axis in label.axes) == within] for within in (False, True))
    numbers: list[Label] = []
    if len(along) == 1 and along[0].axes == (axis,):  # all share one scale, or have none
        (label,) = along
        trace.constraints.restrict(label)
        numbers = [trace.constraints.number_of(label)]
        trace.constraints.fix_scales(numbers[0].scale, magnitudes=False)
        inside: Sequence[Label] = (_still(trace, label),)
    else:
        inside = trace.permutations_only(value.with_labels(*along)).labels
    # The order along other axes is unchanged if all compared values share one scale.
    outside = trace.elementwise(value.with_labels(*across), positive_scales=True).labels
    chooses: Label | None = None
    for label in inside:
        if label.axes == (axis,):
            chooses = label
        else:  # chosen inside each group: the group's members are combined again later
            trace.fix(value.with_labels(label), CHOSEN)

    def index(shape: tuple[int, ...]) -> Value:
        return replace(without_scale(trace, _placed(outside, axis, shape, value.ndim)), chooses=chooses)

    if isinstance(meta, Tensor):
        return index(trace.output_shape())
    chosen = _placed(outside, axis, trace.output_shape(0), value.ndim)
    return [chosen.with_labels(*trace.lent([*chosen.labels, *numbers])), index(trace.output_shape(1))]


@register_rule("aten::cummax", "aten::cummin")
def _running(trace: Trace, value: Value, axis: int) -> list[Value]:
    value = trace.linear_along(trace.elementwise(value, positive_scales=True), [axis], value.shape)
    return [value, without_scale(trace, value)]


def _may_be_equal(node: Any) -> bool:
    """Whether values may be systematically equal, judged by the elementwise operations that computed them.

    Their order then decides the choice, and the order moves with the units.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    name = name_of(node)
    if name in operations(Trait.EQUALISE):
        return True
    moves = name in _MOVE_CHOICES or name in operations(Trait.SOFTMAX | Trait.PICK)
    read = node.all_input_nodes[:1] if moves else node.all_input_nodes if is_pointwise(node.target) else []
    return any(_may_be_equal(part) for part in read)


def tells_unknown_choice(trace: Trace, node: fx.Node, values: Sequence[Value]) -> None:
    """Fix units that integers refer to, if an operation without rules for choices reads these integers."""
    if name_of(node) not in _TAKE_CHOICES:
        for value in values:
            fix_choice(trace, value)


# Operations that handle choices: those that move them, and the rules of this file.
_MOVE_CHOICES = operations(Trait.MOVE | Trait.CAST) | {"getitem"}
_TAKE_CHOICES = operations(Trait.PICK) | _MOVE_CHOICES | {"embedding", "one_hot", "scatter", "scatter_add", "eq", "ne"}


def taken_at(trace: Trace, value: Value, axis: int, index: Value) -> Value:
    """Take elements along an axis at indices that depend on the input.

    Returns:
        The value without labels on that axis, as it now indexes the choices.
    """
    axis %= value.ndim
    label = trace.label(value, axis)
    if index.chooses is None or label is None or label.size != index.chooses.size:
        fix_choice(trace, index)
        return trace.tied(value, [axis], TAKEN)
    trace.constraints.same_units(label, index.chooses)
    trace.constraints.fix_scales(label.scale)
    trace.constraints.restrict(label)
    return replace(value, labels=tuple(other for other in value.labels if other.axes not in ((axis,), ())))


def picked(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Any:
    """Take elements at indices that depend on the input; on these axes only the chosen units act."""
    target: Any = trace.node.target
    indices = values_in((args, kwargs))
    shape, name = trace.output_shape(), trace.operation
    if name not in ("index", "index_select", "gather") or any(index.labels for index in indices):
        for index in indices:
            fix_choice(trace, index)
        return unknown(trace, value, *args, **kwargs)
    if name == "index":
        places = {axis: index for axis, index in enumerate(args[0]) if index is not None}
    else:
        places = {args[0] % value.ndim: args[1]}
    for axis, index in places.items():
        value = taken_at(trace, value, axis, index)
    if name == "gather":  # positions along unexpanded axes of the index read other elements
        meta = torch.utils._pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], trace.node.args[2])
        taken = [axis for axis in range(meta.ndim) if meta.stride(axis) and meta.shape[axis] > 1]
        value = trace.free_of(value, taken, TAKEN)

    def anywhere(item: Any) -> Any:
        return torch.zeros(item.shape, dtype=torch.long) if isinstance(item, Value) else item

    args, kwargs = torch.utils._pytree.tree_map(anywhere, (args, kwargs))
    moved = trace.move(value, lambda t: target(t, *args, **kwargs))
    return Value(shape, moved.labels, chooses=value.chooses)


@register_rule("aten::one_hot")
def _one_hot(trace: Trace, index: Value, classes: int = -1) -> Value:
    shape = trace.output_shape()
    if index.chooses is None or index.chooses.size != shape[-1] or index.labels:
        fix_choice(trace, index)
        trace.fix(index)
        return Value(shape)
    return Value(shape, (_still(trace, index.chooses).on((len(shape) - 1,)),))


@register_rule("aten::eq", "aten::ne")
def _equal(trace: Trace, one: Any, two: Any) -> Any:
    """Compare chosen indices with all units in order: the result is one-hot in the units."""
    index, other = (one, two) if isinstance(one, Value) and one.chooses is not None else (two, one)
    if not isinstance(index, Value) or index.chooses is None:
        target: Any = trace.node.target
        return pointwise(target, trace, one, two)
    shape, label = trace.output_shape(), index.chooses
    if isinstance(other, Value) and other.concrete is not None and not index.labels:
        numbers = other.concrete.expand(shape)
        for axis in range(len(shape)):
            own = axis - len(shape) + index.ndim
            line = torch.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
            along = own < 0 or index.shape[own] == 1
            if along and label.size == shape[axis] and bool((numbers == line).all()):
                return Value(shape, (_still(trace, label).on((axis,)),))
    fix_choice(trace, index)
    return pointwise(trace.node.target, trace, one, two)


def marked(trace: Trace, base: Value, axis: int, index: Value, new: Any) -> Value | None:
    """Write at the positions of chosen units; None if the choice is unknown.

    Args:
        trace: The trace.
        base: The value that is written into.
        axis: The indexed axis.
        index: The indices, which depend on the input.
        new: The written number, or a value without labels.
    """
    label, axis = index.chooses, axis % base.ndim
    if label is None or label.size != base.shape[axis] or index.labels:
        return None
    own = trace.label(base, axis)
    if own is None and base.concrete is not None:
        flat = base.concrete.movedim(axis, 0)
        if not bool((flat == flat[:1]).all()):
            return None
    elif own is None or own.axes != (axis,):
        return None
    else:
        trace.constraints.same_units(own, label)
        trace.constraints.fix_scales(own.scale)
        trace.constraints.restrict(own)
    for value in (base, new):
        if isinstance(value, Value):
            trace.fix(value.with_labels(*(other for other in value.labels if other is not own)))
    return Value(base.shape, (_still(trace, label).on((axis,)),))
