"""Rules for linear maps, normalisation and attention (docs/theory/intertwiners.md, 2.2 to 2.4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import equation_of, letters_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations, spatial_axes_of
from lightning_sym.symmetry.tracing.labelling.choice_rules import taken_at
from lightning_sym.symmetry.tracing.labelling.constraints import Label
from lightning_sym.symmetry.tracing.labelling.elementwise_rules import summed_over
from lightning_sym.symmetry.tracing.labelling.gained import BatchNorm
from lightning_sym.symmetry.tracing.labelling.rules import register_rule, unknown
from lightning_sym.symmetry.tracing.labelling.values import Value
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace

# Linear maps.


@register_rule("aten::linear", "aten::matmul", "aten::einsum")
def _contracted(trace: Trace, *args: Any, **kwargs: Any) -> Any:
    equation, is_einsum = equation_of(trace.node), trace.operation == "einsum"
    values = args[1] if is_einsum else args[:2]
    *terms, out = letters_of(equation) if equation is not None else ("", "", "")
    summed = [set(term) - set(out) for term in terms]
    if not summed[0] or summed[0] != summed[1]:
        return unknown(trace, *args)
    if len(summed[0]) > 1:
        return _summed_twice(trace, terms, out, values)
    axes = [[out.index(c) if c in out else None for c in term] for term in terms]
    result = trace.contract(values[0], axes[0], values[1], axes[1], trace.output_shape())
    return result if is_einsum else _biased(trace, result, *args[2:], axis=result.ndim - 1)


def _biased(trace: Trace, result: Value, bias: Value | None = None, *, axis: int) -> Value:
    if bias is None:
        return result
    return trace.join(result, bias.on([axis], result.ndim), product=False)


def _summed_twice(trace: Trace, terms: Sequence[str], output: str, values: Sequence[Value]) -> Value:
    """Sum over the last common letter with units, with the others as batch axes (heads, kernels), then over these."""
    summed = [letter for letter in terms[0] if letter not in output]
    units = {axis for label in values[0].labels for axis in label.axes}
    held = [letter for letter in summed if terms[0].index(letter) in units]
    inner = (held or summed)[-1]
    others = [letter for letter in terms[0] if letter not in output and letter != inner]
    whole = output + "".join(others)
    sizes = {
        c: size for term, value in zip(terms, values, strict=True) for c, size in zip(term, value.shape, strict=True)
    }
    axes = [[whole.index(c) if c != inner else None for c in term] for term in terms]
    product = trace.contract(values[0], axes[0], values[1], axes[1], [sizes[c] for c in whole])
    if any(value.state is not None and len(value.labels) > len(summed) for value in values):
        for label in product.labels:  # the weight's other units can take over a scale of all terms
            if label.axes and min(label.axes) >= len(output):
                trace.constraints.fix_scales(label.scale)
    return summed_over(trace, product, range(len(output), len(whole)), squares=False)


@register_rule(Trait.CONVOLVE)
def _convolution(
    trace: Trace,
    value: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *args: Any,
) -> Value:
    # conv: dilation, groups; transposed: output_padding, groups, dilation
    groups = args[1] if len(args) > 1 else 1
    shape, count, transposed = trace.output_shape(), spatial_axes_of(trace.operation), "transpose" in trace.operation
    channel = value.ndim - count - 1
    inside = isinstance(padding, str) or not np.any(padding)
    apart = [inside and weight.shape[at] == 1 and shape[at] == value.shape[at] for at in range(-count, 0)]
    value = trace.tied(value, [at - count for at in range(count) if not apart[at]])  # places that the kernel combines
    weight = trace.free_of(weight, range(2, weight.ndim), "")
    if groups == 1:
        into: list[int | None] = [None] * weight.ndim
        into[1 if transposed else 0] = channel
        kept: list[int | None] = [axis if axis != channel else None for axis in range(value.ndim)]
        # The kernel's axes have no labels and vanish.
        result = trace.contract(value, kept, weight, into, shape)
    else:
        result = _grouped(trace, value, weight, groups, channel, transposed, shape)
    return _biased(trace, result, bias, axis=channel)


def _way_from_parameter(trace: Trace) -> list[torch.fx.Node]:
    """Return the current operation, and the moves of its weight that have no other reader."""
    way, node = [trace.node], trace.node.args[1]
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and len(node.users) == 1:
        way.append(node)
        node = node.args[0]
    return way


def _grouped(
    trace: Trace, value: Value, weight: Value, groups: int, channel: int, transposed: bool, shape: tuple[int, ...]
) -> Value:
    """Keep groups of channels together; inside a group both sides permute freely (docs/theory/intertwiners.md, 2.2)."""
    constraints = trace.constraints
    label = trace.label(value, channel)
    rest = tuple(other for other in value.labels if other.axes and channel not in other.axes)
    (root, _), *others = weight.sources or ((weight, ()),)
    name = root.state if not others and root.shape in (weight.shape, weight.shape[:2]) else None  # or a matrix
    first, second = (trace.label(weight, axis) for axis in (0, 1))
    if weight.concrete is not None and weight.shape[1] == 1 and shape[channel] == value.shape[channel]:
        # One filter per channel, as for blurring: channels with equal filters can be permuted.
        filters = trace.move(weight, lambda t: t.reshape(*[1] * channel, groups, -1))
        return Value(
            shape, (*rest, trace.beside_constant(constraints.resolve(label), filters)) if label is not None else rest
        )
    if label is None:  # an input, for example: its channels are fixed
        label = constraints.fresh((channel,), (value.shape[channel],))
        constraints.fix(label)
        value = value.with_labels(label)
    if name is None or first is None or second is None:
        trace.fix(value, "grouped convolution whose weights are no parameter")
        if name is not None and name in trace.grouped:
            trace.constraints.fix(trace.grouped.pop(name))
        trace.fix(weight)
        return Value(shape)
    way = _way_from_parameter(trace)
    trace.grouped_by.setdefault(name, set()).update(way)
    trace.untold.update(way[1:])  # only the convolution determines the channels of these values
    label = constraints.resolve(label)
    ins, rows = value.shape[channel] // groups, shape[channel] // groups
    if transposed:
        out = joint = constraints.fresh((channel,), (groups * rows,))
        constraints.same_units(label.on(first.axes), first)
        constraints.equate([(first.scale, 1.0), (label.scale, 1.0)])
    else:
        out = constraints.resolve(first.on((channel,)))
        joint = label.scaled_by(constraints.product((label.scale, -1.0)))
    # The channel of each entry on the weight's second axis depends on the group, hence on the first axis. The label of
    # the second axis therefore has both axes.
    constraints.fix(second)
    many, few = (ins, rows) if transposed else (rows, ins)
    joint = joint.take((np.arange(groups * many) // many * few)[:, None] + np.arange(few))
    if name in trace.grouped:  # earlier use: by the same units
        constraints.same_units(trace.grouped[name], joint)
        constraints.equate([(trace.grouped[name].scale, 1.0), (joint.scale, -1.0)])
    trace.grouped[name] = joint
    if ins == 1 and rows == 1:
        scale = out.scale
        out = constraints.same_units(out, label.on((channel,))).scaled_by(scale)
        constraints.restrict(out)
    else:
        parents = constraints.fresh((channel,), (groups,))
        trace.see(parents)
        constraints.block(np.repeat(parents.atom, ins), label.atom)
        constraints.block(np.repeat(parents.atom, rows), out.atom)
        constraints.restrict(label)
        constraints.restrict(out)
    return Value(shape, (*rest, out.on((channel,))))


@register_rule("aten::embedding")
def _embedding(trace: Trace, weight: Value, index: Value, *args: Any) -> Value:
    shape = trace.output_shape()
    if index.chooses is None:
        trace.free_of(weight, [0], "")
    else:
        taken_at(trace, weight, 0, index)
    last = len(shape) - 1
    return Value(
        shape, tuple(trace.constraints.resolve(label).on((last,)) for label in weight.labels if label.axes == (1,))
    )


# Normalisation.


def _affine(trace: Trace, value: Value, weight: Value | None, bias: Value | None, axes: Sequence[int]) -> Value:
    """Multiply by a weight and add a bias along given axes."""
    for part, product in ((weight, True), (bias, False)):
        if part is not None:
            gain = trace.gain_in(part) if product else None
            value = trace.join(value, part.on(axes, value.ndim), product=product, gain=gain)
    return value


def _normalised(trace: Trace, label: Label, epsilon: float, groups: Any = None, *, centred: bool = True) -> Label:
    """Divide units by a deviation: signs pass; magnitudes cancel, exactly if eps is zero.

    Args:
        trace: The trace.
        label: The units.
        epsilon: The number added to the variance.
        groups: For each unit, the index of its group. Units of a group share one deviation: they are rescaled together,
            and flipped together if centred. By default each unit has its own.
        centred: Whether the mean is subtracted.
    """
    constraints = trace.constraints
    label = constraints.resolve(label)
    divided, signs = label.scale, label.scale
    if groups is None:
        constraints.restrict(label)
    else:
        constraints.keep_norm(label)
        divided = constraints.fresh_scales((int(groups.max()) + 1,))[groups]
        constraints.equate([(label.scale, 1.0), (divided, -1.0)], signs=centred)
        if centred:
            constraints.keep_ones(label)
            signs = divided
            constraints.common.append(divided)
        else:
            constraints.fix_scales(divided, magnitudes=False)
    if epsilon != 0:
        constraints.fix_scales(divided, signs=False)
    scale = constraints.scales_like(label.scale)
    constraints.fix_scales(scale, signs=False)
    constraints.equate([(scale, 1.0), (signs, 1.0)], magnitudes=False)
    return label.scaled_by(scale)


def _normalised_over(trace: Trace, value: Value, axes: Sequence[int], epsilon: float, *, centred: bool = True) -> Value:
    """Divide by deviations over some axes; units on these axes share deviations, other units have separate ones."""
    gone, labels = {axis % value.ndim for axis in axes}, []
    for label in value.labels:
        kept = [axis for axis in label.axes if axis not in gone]
        if len(kept) == len(label.axes):
            labels.append(_normalised(trace, label, epsilon, centred=centred))
        elif not kept:
            groups = np.zeros(label.atom.shape, np.int64)
            labels.append(_normalised(trace, label, epsilon, groups, centred=centred))
        else:  # units that are normalised together stay together (heads)
            whole = trace.parts(label, kept, mixtures=True)
            number = Label(whole.axes, np.arange(whole.size).reshape(whole.atom.shape), whole.tag, whole.scale)
            groups = trace.onto(number, label).atom
            labels.append(_normalised(trace, label, epsilon, groups, centred=centred))
    return value.with_labels(*labels)


def _bias_before(node: Any) -> Any:
    """Return the bias of the layer that computes a value; None if there is none."""
    return node.args[2] if name_of(node) in operations(Trait.CONTRACT) and len(node.args) > 2 else None


@register_rule("aten::batch_norm", "aten::cudnn_batch_norm")
def _batch_norm(
    trace: Trace,
    value: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    epsilon: float,
    *args: Any,
) -> Value:
    others = [axis for axis in range(value.ndim) if axis != 1]
    if training or mean is None or variance is None:
        return _affine(trace, _normalised_over(trace, value, others, epsilon), weight, bias, [1])
    value = trace.tied(value, others)
    label = trace.label(value, 1)
    if mean.concrete is not None and variance.concrete is not None:  # frozen statistics are ordinary constants
        by_size = mean.by_size or variance.by_size
        for constant, product in ((-mean.concrete, False), ((variance.concrete + epsilon).rsqrt(), True)):
            constant = constant.reshape(1, -1, *[1] * (value.ndim - 2))
            part = Value(tuple(constant.shape), concrete=constant, by_size=by_size)
            value = trace.join(value, part, product=product)
        return _affine(trace, value, weight, bias, [1])
    for state in (mean, variance):
        name = trace.gain_in(state)
        if label is None or len(state.labels) != 1 or name is None or trace.tensors[name].numel() != label.size:
            trace.fix(state)
            if label is not None:
                trace.fix(value.with_labels(label), "normalises by statistics of which only some are saved")
            continue
        (own,) = state.labels
        trace.constraints.same_units(own, label)
        trace.constraints.equate([(own.scale, 1.0), (label.scale, -1.0)])
    if trace.operation == "batch_norm" and isinstance(shared := trace.node.args[3], fx.Node):
        calls = [node for node in shared.users if node.target is trace.node.target]
        if len({_bias_before(node.args[0]) for node in calls}) > 1:
            trace.note("layers share its running mean, so that their biases stay fixed")
    if (name := trace.gain_in(variance)) is not None:
        known = trace.kinds.setdefault(name, ("variance", epsilon))
        if known != ("variance", epsilon):
            trace.fix(variance, "one running variance is used with different eps")
    if label is not None:
        # The running variance cancels the magnitude: the running mean and variance are rescaled with it.
        with trace.constraints.unrestricted():
            value = value.with_labels(_normalised(trace, label, 0.0))
        trace.constraints.divided.append(label.atom.ravel())
        states = (None if own is None else trace.gain_in(own) for own in (weight, bias, mean, variance))
        trace.batch_norms.add(BatchNorm(*states))
    return _affine(trace, value, weight, bias, [1])


@register_rule("aten::layer_norm")
def _layer_norm(
    trace: Trace,
    value: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    epsilon: float = 1e-5,
    *args: Any,
) -> Value:
    axes = list(range(value.ndim - len(normalized_shape), value.ndim))
    return _affine(trace, _normalised_over(trace, value, axes, epsilon), weight, bias, axes)


@register_rule("aten::rms_norm")
def _rms_norm(
    trace: Trace,
    value: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    epsilon: float | None = None,
) -> Value:
    axes = list(range(value.ndim - len(normalized_shape), value.ndim))
    # A root mean square is even in every unit, so each sign is free.
    value = _normalised_over(trace, value, axes, 1.0 if epsilon is None else epsilon, centred=False)
    return _affine(trace, value, weight, None, axes)
