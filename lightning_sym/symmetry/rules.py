"""What each operation allows: one rule per operation (spec 2.2), and the registry for users' own."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym.symmetry._capture import state_tensors
from lightning_sym.symmetry._ledger import Label, Shift
from lightning_sym.symmetry._trace import Rule, Trace, Value
from lightning_sym.symmetry.groups import IntertwinerGroup, intertwiner_group

RuleT = TypeVar("RuleT", bound=Callable[..., Any])
_RULES: dict[str, Rule] = {}
_MODULE_RULES: dict[type[nn.Module], Rule] = {}


def register_rule(*operations: Any) -> Callable[[RuleT], RuleT]:
    """Say which symmetries an operation or a module of yours allows.

    The rule is called with a `Trace` and the operation's arguments, tensors replaced by `Value`s; its methods
    (`elementwise`, `permutations_only`, `linear_along`, `move`, `join`, `contract`, `fix`) write down what the
    operation demands and return what comes out. For a module class it is called as `rule(trace, module, *inputs)`; the
    module's parameters are `trace.parameter(module, "weight")`. Every traced network is tested with random elements,
    so a rule that allows too much is an error, not a wrong answer.

    Args:
        operations: Operations (`torch.ops.aten.cosh`, `torch.ops.mylib.myop`), their names ("aten::cosh"), or
            subclasses of `nn.Module`. The in-place variant follows the same rule.

    Raises:
        TypeError: If something else is given.
    """
    names = []
    for operation in operations:
        is_module = isinstance(operation, type) and issubclass(operation, nn.Module)
        if is_module or (isinstance(operation, str) and "::" in operation):
            names.append(operation)
        elif isinstance(operation, torch._ops.OpOverloadPacket):
            names.append(operation._qualified_op_name)
        elif isinstance(operation, torch._ops.OpOverload):
            names.append(operation._schema.name)
        else:
            raise TypeError(
                f"a rule belongs to an operation (torch.ops.aten.cosh), its name ('aten::cosh') or a subclass of "
                f"nn.Module, not to {operation!r}"
            )

    def register(rule: RuleT) -> RuleT:
        for name in names:
            if isinstance(name, str):
                _RULES[name.removesuffix("_")] = rule
            else:
                _MODULE_RULES[name] = rule
        return rule

    return register


def leaf_types() -> tuple[type[nn.Module], ...]:
    """Return the module classes for which users wrote rules."""
    return tuple(_MODULE_RULES)


def find_rule(target: Any) -> Rule:
    """Return the rule of an operation of the graph."""
    if not isinstance(target, torch._ops.OpOverload):
        return _PYTHON.get(target, _unknown)
    name = target._schema.name.removesuffix("_")
    if name in _RULES:
        return _RULES[name]
    target = _out_of_place(target)
    if torch.Tag.pointwise in target.tags:
        return functools.partial(_pointwise, target)
    return functools.partial(_untagged, target)


def _out_of_place(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the variant of an operation that leaves its input alone: only that one is tagged."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__"):
        return target
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) or target


def _values(arguments: Any) -> list[Value]:
    return [v for v in torch.utils._pytree.tree_leaves(arguments) if isinstance(v, Value)]


def _results(trace: Trace) -> Any:
    assert trace.node is not None
    meta = trace.node.meta.get("val")
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: Value(tuple(t.shape)), meta)


def _unknown(trace: Trace, *args: Any, **kwargs: Any) -> Any:
    """An operation without a rule: nothing may act on what goes in."""
    for value in _values((args, kwargs)):
        trace.fix(value, "no rule for this operation")
    return _results(trace)


def _untagged(target: Any, trace: Trace, *args: Any, **kwargs: Any) -> Any:
    """Some elementwise operations are not marked as such; measuring them tells."""
    assert trace.node is not None
    values = _values((args, kwargs))
    shape = getattr(trace.node.meta.get("val"), "shape", None)
    if len(values) != 1 or values[0] not in args or shape is None or tuple(shape) != values[0].shape:
        return _unknown(trace, *args, **kwargs)
    group = _measured_group(target, trace, values[0], args, kwargs)
    return _unknown(trace, *args, **kwargs) if group is None else _by_group(trace, values[0], group)


def _measured_group(target: Any, trace: Trace, value: Value, args: Any, kwargs: Any) -> IntertwinerGroup | None:
    """Measure an operation of one tensor; None if it is not elementwise, or not defined everywhere."""
    position = args.index(value)
    rest = (*args[:position], *args[position + 1 :])
    try:
        group: IntertwinerGroup = _measured(target, position, rest, tuple(sorted(kwargs.items())), trace.affine)
    except (ValueError, RuntimeError):
        return None
    return group


def _by_group(trace: Trace, value: Value, group: IntertwinerGroup) -> Value:
    if group.dense:
        return value
    if group.offset:
        return replace(trace.elementwise(value, signs=True), offset=group.offset)
    return trace.elementwise(
        value, positive_scales=group.positive_scales, signs=group.signs, exponent=group.exponent, even=group.even
    )


_PASS_OFFSETS = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "dropout", "feature_dropout", "contiguous")


def passes_offset(target: Any) -> bool:
    """Whether an operation leaves a constant that was added to its input as it is."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in {f"aten::{n}" for n in _PASS_OFFSETS}


def absorbs_offset(trace: Trace, target: Any, value: Value, arguments: Any) -> bool:
    """Whether an operation can take up what changes of sign add to its input (spec 1.3); notes in which bias it does.

    It can if it is linear and has a bias; a convolution only without padding, as the padding stays zero.
    """
    if passes_offset(target):
        return True
    name = getattr(getattr(target, "_schema", None), "name", "")
    if not name.startswith(("aten::linear", "aten::conv")) or "transpose" in name or len(arguments) < 3:
        return False
    first, weight, bias = arguments[:3]
    rest = list(arguments[3:])
    if first is not value or not isinstance(bias, Value) or bias.state is None or weight.state is None:
        return False
    if rest and (any(np.atleast_1d(rest[1] if len(rest) > 1 else 0)) or (len(rest) > 3 and rest[3] != 1)):
        return False
    if any(bias.state == known for known, *_ in trace.absorbed):
        return False
    trace.absorbed.append((bias.state, weight.state, 1, value.offset))
    return True


def _ignore(trace: Trace, *args: Any, **kwargs: Any) -> None:
    return None


def _item(trace: Trace, values: Any, index: int) -> Any:
    return values[index]


_PYTHON: dict[Any, Rule] = {torch._C._set_grad_enabled: _ignore, operator.getitem: _item}


@register_rule("lightning_sym::leaf")
def _leaf(trace: Trace, inputs: list[Value], weights: list[Value], key: int) -> list[Value]:
    module = trace.capture.leaves[key]
    trace.leaf = dict(zip(state_tensors(module), weights, strict=True))
    rule = next(rule for kind, rule in reversed(_MODULE_RULES.items()) if isinstance(module, kind))
    result = rule(trace, module, *inputs)
    return [result] if isinstance(result, Value) else list(result)


# Elementwise operations.


@functools.lru_cache(maxsize=512)
def _measured(
    target: Any, position: int, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...], affine: bool
) -> Any:
    def function(x: Tensor) -> Any:
        args = [*arguments[:position], x.clone(), *arguments[position:]]
        return target(*args, **dict(keywords))

    return intertwiner_group(function, affine=affine)


def _pointwise(target: Any, trace: Trace, *args: Any, **kwargs: Any) -> Any:
    """A pointwise operation without a rule of its own: measured if it has one tensor, else units tied, scales fixed."""
    values = _values((args, kwargs))
    if len(values) == 1 and values[0] in args:
        group = _measured_group(target, trace, values[0], args, kwargs)
        return trace.permutations_only(values[0]) if group is None else _by_group(trace, values[0], group)
    result: Value | None = None
    if any(value.labels for value in values):
        trace.note("combines several tensors in a way that is not known; units may change places, scales are fixed")
    for value in values:
        value = trace.permutations_only(value)
        result = value if result is None else trace.join(result, value, product=False)
    return _results(trace) if result is None else result


@register_rule(
    "aten::relu", "aten::relu6", "aten::leaky_relu", "aten::gelu", "aten::silu", "aten::elu", "aten::hardtanh"
)
def _activation(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Value:
    assert trace.node is not None
    assert isinstance(trace.node.target, torch._ops.OpOverload)
    result = _pointwise(_out_of_place(trace.node.target), trace, value, *args, **kwargs)
    assert isinstance(result, Value)
    return result


@register_rule("aten::prelu", "aten::_prelu_kernel")
def _prelu(trace: Trace, value: Value, slope: Value) -> Value:
    # The slopes go with their channels; they are not scaled.
    axis = 1 if value.ndim > 1 else 0
    for label in slope.labels:
        trace.ledger.fix_scales(label.scale)
    if math.prod(slope.shape) > 1:
        shape = tuple(slope.shape[0] if a == axis else 1 for a in range(value.ndim))
        if slope.ndim == 1:
            slope = Value(shape, tuple(label.on((axis,)) for label in slope.labels))
        value = trace.join(value, slope, product=True)
    else:
        for label in slope.labels:
            trace.ledger.fix_units(label.atom.ravel())
    return trace.elementwise(value, positive_scales=True)


@register_rule("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::contiguous", "aten::clone")
@register_rule("aten::alias", "aten::detach", "aten::to", "aten::_to_copy", "aten::positive", "aten::neg")
@register_rule("aten::lift_fresh", "aten::lift_fresh_copy", "aten::type_as", "aten::float", "aten::double")
def _pass(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Value:
    return Value(value.shape, value.labels, value.concrete)


def _binary(product: bool, divide: bool = False) -> Rule:
    def rule(trace: Trace, one: Any, two: Any, *args: Any, **kwargs: Any) -> Value:
        if isinstance(one, Value) and isinstance(two, Value):
            return trace.join(one, two, product=product, divide=divide)
        value = one if isinstance(one, Value) else two
        if not isinstance(one, Value) and divide:
            return trace.elementwise(value, positive_scales=True, signs=True, exponent=-1.0)
        if product or (isinstance(two, (int, float)) and two == 0):
            return Value(value.shape, tuple(trace.ledger.resolve(label) for label in value.labels))
        return trace.permutations_only(value)

    return rule


for _name in ("aten::add", "aten::sub", "aten::rsub"):
    register_rule(_name)(_binary(product=False))
register_rule("aten::mul", "aten::multiply")(_binary(product=True))
register_rule("aten::div", "aten::true_divide", "aten::divide")(_binary(product=True, divide=True))


@register_rule("aten::masked_fill")
def _masked_fill(trace: Trace, value: Value, mask: Value, fill: Any) -> Value:
    value = trace.permutations_only(value)
    mask = trace.permutations_only(mask)
    return trace.join(value, mask, product=True)


@register_rule("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", "aten::softmin")
def _softmax(trace: Trace, value: Value, axis: int, *args: Any, **kwargs: Any) -> Value:
    along = [label for label in value.labels if axis % value.ndim in label.axes and len(label.axes) > 1]
    if along:
        value = trace.free_of(value, [axis], "acts along an axis on which units live")
    return trace.permutations_only(value)


@register_rule("aten::cumsum")
def _cumsum(trace: Trace, value: Value, axis: int, *args: Any, **kwargs: Any) -> Value:
    return trace.linear_along(value, [axis], value.shape)


@register_rule("aten::log_sigmoid", "aten::log_sigmoid_forward")
def _log_sigmoid(trace: Trace, value: Value) -> Any:
    assert trace.node is not None
    result = trace.permutations_only(value)
    return result if isinstance(trace.node.meta["val"], Tensor) else [result, Value(value.shape)]


@register_rule("aten::addcmul")
def _addcmul(trace: Trace, added: Value, one: Value, two: Value, **kwargs: Any) -> Value:
    return trace.join(added, trace.join(one, two, product=True), product=False)


@register_rule("aten::where")
def _where(trace: Trace, condition: Value, one: Any, two: Any) -> Any:
    values = [part for part in (one, two) if isinstance(part, Value)]
    if not values:
        return _unknown(trace, condition)
    if len(values) == 2:
        value = trace.join(values[0], values[1], product=False)
    else:
        zero = any(not isinstance(part, Value) and part == 0 for part in (one, two))
        zero = zero or any(v.concrete is not None and not bool(v.concrete.any()) for v in values)
        value = values[0] if zero else trace.permutations_only(values[0])
    return trace.join(value, trace.permutations_only(condition), product=True)


@register_rule("aten::gt", "aten::lt", "aten::ge", "aten::le", "aten::greater", "aten::less")
def _compare(trace: Trace, one: Value, two: Any) -> Value:
    """Comparing with 0 does not see positive scales; comparing anything else does."""
    if isinstance(two, Value):
        return trace.permutations_only(trace.join(one, two, product=False))
    if two != 0:
        return trace.permutations_only(one)
    one = trace.elementwise(one, positive_scales=True)
    zero = [trace.ledger.scales_like(label.scale) for label in one.labels]
    for scale in zero:
        trace.ledger.fix_scales(scale)
    return one.with_labels(*(label.scaled_by(scale) for label, scale in zip(one.labels, zero, strict=True)))


@register_rule("aten::maximum", "aten::minimum")
def _maximum(trace: Trace, one: Value, two: Value) -> Value:
    return trace.elementwise(trace.join(one, two, product=False), positive_scales=True)


@register_rule("aten::glu")
def _glu(trace: Trace, value: Value, axis: int = -1) -> Value:
    first, second = trace.move(value, lambda t: torch.chunk(t, 2, axis))
    for half in (first, second):
        for label in half.labels:
            trace.see(label)
    return trace.join(first, trace.permutations_only(second), product=True)


# Data movement: labels follow the coordinates.

_MOVEMENTS = (
    *("view", "reshape", "_unsafe_view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("permute", "transpose", "t", "numpy_T", "mT", "adjoint", "movedim", "swapaxes", "swapdims"),
    *("slice", "select", "narrow", "index", "index_select", "diagonal", "unfold", "im2col"),
    *("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk", "unbind"),
    *("hsplit", "vsplit", "dsplit", "expand", "expand_as", "repeat", "tile", "repeat_interleave"),
    *("roll", "flip", "rot90", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
)


def _movement(trace: Trace, value: Any, *args: Any, **kwargs: Any) -> Any:
    assert trace.node is not None
    target: Any = trace.node.target
    if isinstance(value, (list, tuple)):
        return _unknown(trace, value, *args, **kwargs)

    def unwrap(item: Any) -> Any:
        return item.concrete if isinstance(item, Value) else item

    if any(v.concrete is None for v in _values((args, kwargs))):
        return _unknown(trace, value, *args, **kwargs)
    args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs))
    if target._schema.name in ("aten::view", "aten::_unsafe_view"):
        if not isinstance(args[0], (list, tuple)):
            return _unknown(trace, value, *args)
        return trace.move(value, lambda t: t.reshape(args[0]))
    return trace.move(value, lambda t: target(t, *args, **kwargs))


register_rule(*(f"aten::{name}" for name in _MOVEMENTS))(_movement)


@register_rule("aten::pad", "aten::constant_pad_nd")
def _pad(trace: Trace, value: Value, sizes: Sequence[int], *args: Any) -> Any:
    assert trace.node is not None
    target: Any = trace.node.target
    mode = args[0] if args and isinstance(args[0], str) else "constant"
    fill = next((a for a in args if isinstance(a, (int, float))), 0) or 0
    if mode == "constant":
        return trace.move(value, lambda t: nn.functional.pad(t, list(sizes)), filled_by_zero=fill == 0)
    return trace.move(value, lambda t: target(t.contiguous(), sizes, *args))


@register_rule("aten::cat", "aten::concat", "aten::concatenate")
def _cat(trace: Trace, values: Sequence[Value], axis: int = 0) -> Value:
    shape = trace.output_shape()
    axis %= len(shape)
    values = [v for v in values if not (v.ndim == 1 and v.shape[0] == 0)]
    values = [v.with_labels(*(_whole(trace, v, label, axis) for label in v.labels)) for v in values]
    others = {label.axes for value in values for label in value.labels if axis not in label.axes}
    result: list[Label] = []
    for axes in others:
        parts = [next((label for label in v.labels if label.axes == axes), None) for v in values]
        if any(part is None for part in parts):
            for value, part in zip(values, parts, strict=True):
                if part is not None:
                    trace.fix(value.with_labels(part), "joined with a tensor on which nothing acts")
            continue
        joined = parts[0]
        assert joined is not None
        for part in parts[1:]:
            assert part is not None
            scale = joined.scale
            joined = trace.ledger.same_units(joined, part)
            trace.ledger.equate([(scale, 1.0), (part.scale, -1.0)])
        result.append(joined)
    along = [next((label for label in v.labels if axis in label.axes), None) for v in values]
    kinds = {label.axes for label in along if label is not None}
    if len(kinds) == 1:
        (axes,) = kinds
        place = axes.index(axis)
        parts = []
        for value, label in zip(values, along, strict=True):
            if label is None:
                label = trace.ledger.fresh(axes, tuple(value.shape[a] for a in axes))
                trace.ledger.fix(label)
            parts.append(trace.ledger.resolve(label))
        arrays = (np.concatenate([getattr(p, name) for p in parts], place) for name in ("atom", "tag", "scale"))
        joined = Label(axes, *arrays)
        if len(np.unique(joined.atom)) < joined.size:
            tag = trace.ledger.derive_tags(joined.tag, trace._rank(joined))
            joined = Label(axes, joined.atom, tag, joined.scale)
        result.append(joined)
    elif kinds:
        for value, label in zip(values, along, strict=True):
            if label is not None:
                trace.fix(value.with_labels(label), "joined tensors carry labels on different axes")
    return trace._disjoint(Value(shape, tuple(result)))


def _whole(trace: Trace, value: Value, label: Label, axis: int) -> Label:
    """A unit that fills a whole tensor lives on the axis of joining as well as anywhere."""
    return trace._spread(label, axis, value.shape[axis]) if not label.axes else label


@register_rule("aten::stack")
def _stack(trace: Trace, values: Sequence[Value], axis: int = 0) -> Value:
    axis %= values[0].ndim + 1
    moved = [trace.move(value, lambda t: t.unsqueeze(axis)) for value in values]
    return _cat(trace, moved, axis)


@register_rule("aten::upsample_bilinear2d", "aten::upsample_linear1d", "aten::upsample_trilinear3d")
@register_rule("aten::upsample_bicubic2d", "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa")
@register_rule("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d")
@register_rule("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d")
@register_rule("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
def _spatial_mean(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Value:
    return trace.linear_along(value, range(-_spatial(trace), 0), trace.output_shape())


def _spatial(trace: Trace) -> int:
    """Return how many axes an operation called ...1d, ...2d, ...3d acts on."""
    assert trace.node is not None
    name = trace.node.target._schema.name  # type: ignore[union-attr]
    return next(count for count in (1, 2, 3) if f"{count}d" in name)


@register_rule("aten::max_pool1d", "aten::max_pool2d", "aten::max_pool3d", "aten::max_pool2d_with_indices")
@register_rule("aten::adaptive_max_pool1d", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def _max_pool(trace: Trace, value: Value, *args: Any, **kwargs: Any) -> Any:
    count = _spatial(trace)
    meta = trace.node.meta["val"]  # type: ignore[union-attr]
    shape = tuple((meta if isinstance(meta, Tensor) else meta[0]).shape)
    value = trace.free_of(value, range(-count, 0), "acts along an axis on which units live")
    value = trace.elementwise(Value(shape, value.labels), positive_scales=True)
    return value if isinstance(meta, Tensor) else [value, Value(shape)]


@register_rule("aten::mean", "aten::sum")
def _mean(trace: Trace, value: Value, axes: Any = None, keepdim: bool = False, **kwargs: Any) -> Value:
    return _reduce(trace, value, axes)


@register_rule("aten::amax", "aten::amin")
def _extremum(trace: Trace, value: Value, axes: Any = None, keepdim: bool = False, **kwargs: Any) -> Value:
    return _reduce(trace, trace.elementwise(value, positive_scales=True), axes or None)


def _reduce(trace: Trace, value: Value, axes: Any) -> Value:
    shape = trace.output_shape()
    keep = len(shape) == value.ndim
    axes = range(value.ndim) if axes is None else [axes] if isinstance(axes, int) else axes
    gone = {axis % value.ndim for axis in axes}
    if not gone:
        gone = set(range(value.ndim))
    labels = []
    for label in value.labels:
        label = trace.ledger.resolve(label)
        if not gone & set(label.axes):
            place = {axis: axis if keep else axis - sum(g < axis for g in gone) for axis in label.axes}
            labels.append(label.on(tuple(place[axis] for axis in label.axes)))
        elif set(label.axes) <= gone:
            # A sum over all units does not mind their order.
            trace.ledger.restrict(label)
            trace.ledger.fix_scales(label.scale)
        else:
            trace.fix(value.with_labels(label), "sums over a part of the units")
    return Value(shape, tuple(labels))


# Linear maps.


@register_rule("aten::linear")
def _linear(trace: Trace, value: Value, weight: Value, bias: Value | None = None) -> Any:
    last = value.ndim - 1
    if weight.ndim != 2:
        return _unknown(trace, value, weight, bias)
    result = trace.contract(value, last, weight, 1, [*range(last), None], [last, None], trace.output_shape())
    return _biased(trace, result, bias, last)


def _biased(trace: Trace, result: Value, bias: Value | None, axis: int) -> Value:
    if bias is None:
        return result
    shape = tuple(bias.shape[0] if a == axis else 1 for a in range(result.ndim))
    on_axis = Value(shape, tuple(label.on((axis,)) for label in bias.labels))
    restricted = len(trace.ledger.restricted)
    result = trace.join(result, on_axis, product=False)
    if trace.label(result, axis) is not None:
        del trace.ledger.restricted[restricted:]  # a bias is mixed along with its units
    return Value(result.shape, result.labels, producer=bias.state)


@register_rule("aten::matmul", "aten::bmm", "aten::mm", "aten::mv")
def _matmul(trace: Trace, one: Value, two: Value) -> Any:
    shape = trace.output_shape()
    rank = len(shape)
    if one.ndim == 1 or two.ndim == 1:
        if one.ndim == 1 and two.ndim == 1:
            return trace.contract(one, 0, two, 0, [None], [None], shape)
        if two.ndim == 1:
            return trace.contract(one, -1, two, 0, [*range(one.ndim - 1), None], [None], shape)
        axes = [*range(two.ndim - 2), None, two.ndim - 2]
        return trace.contract(one, 0, two, -2, [None], axes, shape)
    first = [*range(rank - one.ndim, rank - 1), None]
    second = [*range(rank - two.ndim, rank - 2), None, rank - 1]
    return trace.contract(one, -1, two, -2, first, second, shape)


@register_rule("aten::addmm", "aten::baddbmm")
def _addmm(trace: Trace, added: Value, one: Value, two: Value, **kwargs: Any) -> Any:
    result = _matmul(trace, one, two)
    if added.ndim == 1:
        return _biased(trace, result, added, result.ndim - 1)
    return trace.join(added, result, product=False)


@register_rule("aten::einsum")
def _einsum(trace: Trace, equation: str, values: Sequence[Value], **kwargs: Any) -> Any:
    shape = trace.output_shape()
    equation = equation.replace(" ", "")
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    if "->" not in equation or "." in equation or any(len(set(t)) < len(t) for t in terms):
        return _unknown(trace, values)
    if len(values) == 1:
        (value,), (term,) = values, terms
        if sorted(term) == sorted(output):
            return trace.move(value, lambda t: torch.einsum(equation, t))
        return _unknown(trace, values)
    if len(values) != 2:
        return _unknown(trace, values)
    summed = [letter for letter in terms[0] if letter not in output]
    if len(summed) != 1 or summed[0] not in terms[1] or any(c not in output and c != summed[0] for c in terms[1]):
        return _unknown(trace, values)
    axes = [[output.index(c) if c in output else None for c in term] for term in terms]
    return trace.contract(
        values[0], terms[0].index(summed[0]), values[1], terms[1].index(summed[0]), axes[0], axes[1], shape
    )


def _convolution(count: int, transposed: bool) -> Rule:
    def rule(
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
        shape = trace.output_shape()
        channel = value.ndim - count - 1
        value = trace.free_of(value, range(-count, 0), "acts along an axis on which units live")
        weight = trace.free_of(weight, range(2, weight.ndim), "")
        if groups == 1:
            inner, outer = (0, 1) if transposed else (1, 0)
            into: list[int | None] = [None] * weight.ndim
            into[outer] = channel
            kept: list[int | None] = [axis if axis != channel else None for axis in range(value.ndim)]
            # The kernel's axes carry no labels any more, and go nowhere.
            result = trace.contract(value, channel, weight, inner, kept, into, shape)
        else:
            result = _grouped(trace, value, weight, groups, channel, transposed, shape)
        return _biased(trace, result, bias, channel)

    return rule


def _grouped(
    trace: Trace, value: Value, weight: Value, groups: int, channel: int, transposed: bool, shape: tuple[int, ...]
) -> Value:
    """Groups of channels stay together; inside a group both sides permute freely (spec 2.2)."""
    ledger = trace.ledger
    label = trace.label(value, channel)
    rest = tuple(other for other in value.labels if other.axes and channel not in other.axes)
    name = weight.state
    outer, inner = (trace.label(weight, axis) for axis in ((1, 0) if transposed else (0, 1)))
    if label is None or name is None or name in trace.grouped or outer is None or inner is None:
        trace.fix(value, "grouped convolution of what nothing acts on, or with a weight used twice")
        trace.fix(weight)
        return Value(shape)
    label = ledger.resolve(label)
    ins, rows = value.shape[channel] // groups, shape[channel] // groups
    # Which input (output) channel each entry of the weight's second axis stands for depends on the group, hence on the
    # first axis. The label of the second axis therefore lives on both.
    if transposed:
        out = ledger.fresh((channel,), (groups * rows,))
        ledger.same_units(label.on(inner.axes), inner)
        ledger.equate([(inner.scale, 1.0), (label.scale, 1.0)])
        ledger.fix(outer)
        index = (np.arange(groups * ins) // ins * rows)[:, None] + np.arange(rows)
        joint = out.take(index)
        trace.grouped[name] = joint
    else:
        out = ledger.resolve(Label((channel,), outer.atom, outer.tag, outer.scale))
        ledger.fix(inner)
        index = (np.arange(groups * rows) // rows * ins)[:, None] + np.arange(ins)
        inverse = ledger.fresh_scales(label.scale.shape)
        ledger.equate([(inverse, 1.0), (label.scale, 1.0)])
        trace.grouped[name] = label.scaled_by(inverse).take(index)
    if ins == 1 and rows == 1:
        scale = out.scale
        out = ledger.same_units(out, Label((channel,), label.atom, label.tag, label.scale)).scaled_by(scale)
        ledger.restrict(out)
    else:
        parents = ledger.fresh((channel,), (groups,))
        trace.see(parents)
        ledger.block(np.repeat(parents.atom, ins), label.atom)
        ledger.block(np.repeat(parents.atom, rows), out.atom)
        ledger.restrict(label)
        ledger.restrict(out)
    return Value(shape, (*rest, out.on((channel,))))


for _count in (1, 2, 3):
    register_rule(f"aten::conv{_count}d")(_convolution(_count, transposed=False))
    register_rule(f"aten::conv_transpose{_count}d")(_convolution(_count, transposed=True))


@register_rule("aten::embedding")
def _embedding(trace: Trace, weight: Value, index: Value, *args: Any) -> Value:
    shape = trace.output_shape()
    trace.free_of(weight, [0], "")
    last = len(shape) - 1
    return Value(shape, tuple(trace.ledger.resolve(label).on((last,)) for label in weight.labels if label.axes == (1,)))


# Normalisation.


def _affine(trace: Trace, value: Value, weight: Value | None, bias: Value | None, axes: Sequence[int]) -> Value:
    """Multiply by a weight and add a bias that live on some axes."""
    for part, product in ((weight, True), (bias, False)):
        if part is not None:
            shape = tuple(value.shape[a] if a in axes else 1 for a in range(value.ndim))
            place = dict(enumerate(axes))
            labels = tuple(label.on(tuple(place[a] for a in label.axes)) for label in part.labels)
            value = trace.join(value, Value(shape, labels), product=product)
    return value


def _signs_only(trace: Trace, value: Value, epsilon: float) -> Value:
    """Normalise each unit by itself: its sign passes; its magnitude is divided out, exactly if no eps is added."""
    labels = []
    for label in value.labels:
        label = trace.ledger.resolve(label)
        trace.ledger.restrict(label)
        scale = trace.ledger.scales_like(label.scale)
        trace.ledger.fix_scales(scale, signs=False)
        trace.ledger.equate([(scale, 1.0), (label.scale, 1.0)], magnitudes=False)
        if epsilon != 0:
            trace.ledger.fix_scales(label.scale, signs=False)
        labels.append(label.scaled_by(scale))
    return value.with_labels(*labels)


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
    producer = value.producer
    node = trace.node
    value = trace.free_of(value, others, "acts along an axis on which units live")
    label = trace.label(value, 1)
    if training or mean is None or variance is None:
        value = _signs_only(trace, value, epsilon)
        return _affine(trace, value, weight, bias, [1])
    for state in (mean, variance):
        if label is None:
            trace.fix(state)
            continue
        (own,) = state.labels
        trace.ledger.same_units(own, label)
        trace.ledger.equate([(own.scale, 1.0), (label.scale, -1.0)])
        if state.state is None:
            trace.fix(state)
    if variance.state is not None:
        known = trace.kinds.setdefault(variance.state, ("variance", epsilon))
        if known != ("variance", epsilon):
            trace.fix(variance, "one running variance is used with different eps")
    if label is not None and producer is not None and mean.state is not None:
        source = node.args[0]  # type: ignore[union-attr]
        if len(source.users) == 1 and mean.state not in trace.shifted and producer not in trace.shifted:  # type: ignore[union-attr]
            trace.shifted |= {mean.state, producer}
            trace.ledger.shifts.append(Shift(producer, mean.state, label))
    if label is None:
        normal = value
    else:
        # What is divided out by the running variance is the magnitude: the running mean and variance follow it.
        label = trace.ledger.resolve(label)
        trace.ledger.restrict(label)
        scale = trace.ledger.scales_like(label.scale)
        trace.ledger.fix_scales(scale, signs=False)
        trace.ledger.equate([(scale, 1.0), (label.scale, 1.0)], magnitudes=False)
        normal = value.with_labels(label.scaled_by(scale).on((1,)))
    return _affine(trace, normal, weight, bias, [1])


@register_rule("aten::instance_norm")
def _instance_norm(
    trace: Trace,
    value: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    use_input: bool,
    momentum: float,
    epsilon: float,
    *args: Any,
) -> Value:
    if not use_input:
        return _batch_norm(trace, value, weight, bias, mean, variance, False, momentum, epsilon)
    value = trace.free_of(value, range(2, value.ndim), "acts along an axis on which units live")
    for state in (mean, variance):
        if state is not None:
            trace.fix(state)
    return _affine(trace, _signs_only(trace, value, epsilon), weight, bias, [1])


def _normalised_together(trace: Trace, value: Value, label: Label, parents: Any, epsilon: float, kind: str) -> Label:
    """Units normalised by common statistics change sign together, and scale together if nothing is added."""
    ledger = trace.ledger
    ledger.restrict(label)
    groups = int(parents.max()) + 1
    common = ledger.fresh_scales((groups,))
    ledger.equate([(label.scale, 1.0), (common[parents], -1.0)])
    if epsilon != 0:
        ledger.fix_scales(common, signs=False)
    scale = ledger.scales_like(label.scale)
    ledger.fix_scales(scale, signs=False)
    ledger.equate([(scale, 1.0), (common[parents], 1.0)], magnitudes=False)
    return label.scaled_by(scale)


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
    labels = []
    for label in value.labels:
        if not set(label.axes) & set(axes):
            labels.append(_signs_only(trace, value.with_labels(label), epsilon).labels[0])
        elif set(label.axes) <= set(axes) or not label.axes:
            label = trace.ledger.resolve(label)
            parents = np.zeros(label.atom.shape, np.int64)
            labels.append(_normalised_together(trace, value, label, parents, epsilon, "layer_norm"))
        else:
            trace.fix(value.with_labels(label), "normalises a part of the units")
    return _affine(trace, value.with_labels(*labels), weight, bias, axes)


@register_rule("aten::rms_norm")
def _rms_norm(
    trace: Trace,
    value: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    epsilon: float | None = None,
) -> Value:
    axes = list(range(value.ndim - len(normalized_shape), value.ndim))
    labels = []
    for label in value.labels:
        label = trace.ledger.resolve(label)
        # The root mean square is even in every unit: signs pass one by one.
        trace.ledger.restrict(label)
        trace.ledger.fix_scales(label.scale, signs=False)
        labels.append(label)
    return _affine(trace, value.with_labels(*labels), weight, None, axes)


@register_rule("aten::group_norm")
def _group_norm(
    trace: Trace,
    value: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    epsilon: float = 1e-5,
    *args: Any,
) -> Value:
    value = trace.free_of(value, range(2, value.ndim), "acts along an axis on which units live")
    label = trace.label(value, 1)
    if label is not None:
        label = trace.ledger.resolve(label)
        size = value.shape[1] // groups
        parents = np.arange(value.shape[1]) // size
        if groups > 1:
            coarse = trace.ledger.fresh((1,), (groups,))
            trace.see(coarse)
            if size > 1:
                trace.ledger.block(coarse.atom[parents], label.atom)
        value = value.with_labels(_normalised_together(trace, value, label, parents, epsilon, "group_norm"))
    return _affine(trace, value, weight, bias, [1])


# Attention.


@register_rule("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    trace: Trace,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Softmax(Q K^T) V per head (spec 2.5): queries against keys cancel, values pass, heads move as blocks."""
    rank = query.ndim
    if kwargs.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        return _unknown(trace, query, key, value, mask)
    batch = list(range(rank - 2))
    scores = (*query.shape[:-1], key.shape[-2])
    logits = trace.contract(query, -1, key, -1, [*batch, rank - 2, None], [*batch, rank - 1, None], scores)
    if mask is not None and mask.labels:
        logits = trace.join(logits, mask, product=False)
    weights = trace.permutations_only(logits)
    for label in weights.labels:
        trace.see(label)
    return trace.contract(
        weights, -1, value, -2, [*batch, rank - 2, None], [*batch, None, rank - 1], trace.output_shape()
    )
