"""Registry of rules for operations: the built-in ones, and users' own.

See docs/theory/intertwiners.md, 2.2.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._library.custom_ops import CustomOpDef

from lightning_sym.symmetry.groups import intertwiner_group
from lightning_sym.symmetry.intertwiners import IntertwinerGroup
from lightning_sym.symmetry.tracing.graph.capture import (
    DEMAND,
    OPAQUE,
    Leaf,
    first_names,
    operation_name,
    state_tensors,
)
from lightning_sym.symmetry.tracing.graph.operations import Trait, is_pointwise, name_of, operations, out_of_place
from lightning_sym.symmetry.tracing.labelling.along import measured_along
from lightning_sym.symmetry.tracing.labelling.offsets import offset_behind, subtracts_mean
from lightning_sym.symmetry.tracing.labelling.values import Value, values_in
from lightning_sym.symmetry.tracing.labelling.vocabulary import Rule, Trace

CHOSEN = "units are chosen by their values"
NO_RULE = "no rule for this operation"
RuleT = TypeVar("RuleT", bound=Callable[..., Any])
_RULES: dict[str, Rule] = {}
_MODULE_RULES: dict[type[nn.Module], Rule] = {}


def register_rule(*subjects: Any) -> Callable[[RuleT], RuleT]:
    """Register a rule that describes the effect of a custom operation or module on symmetries.

    The rule is called with a `Trace` and the operation's arguments, tensors replaced by `Value`s. It calls methods of
    the trace (`compute`, `normalise`, `softmax`, `join`, `contract`, `move`, `elementwise`, `permutations_only`,
    `linear_along`, `fix`) and returns the result. For a module class it is called as `rule(trace, module, *inputs)`,
    and parameters are `trace.parameter(module, "weight")`.

    The described operations are inserted into the network's graph as torch operations, so that labels, translations,
    norms and rotations follow them. Arguments that the rule does not use are fixed, with a note. Every traced network
    is tested with random elements, so a rule that allows too much raises an error instead of a wrong answer.

    Args:
        subjects: Operations (`torch.ops.mylib.myop`, or the result of `torch.library.custom_op`), their names
            ("aten::cosh"), or subclasses of `nn.Module`. A `Trait` selects all operations that have it and no other
            rule. The in-place variant follows the same rule.

    Raises:
        TypeError: If a subject is none of these.
        ValueError: If torch has no operation of that name.

    Example:
        >>> class Norm(nn.LayerNorm):
        ...     "A layer norm."
        >>> @register_rule(Norm)
        ... def norm(trace, module, x):
        ...     x = trace.normalise(x, axes=[-1], mean=True, eps=module.eps)
        ...     x = trace.join(x, trace.parameter(module, "weight"), product=True)
        ...     return trace.join(x, trace.parameter(module, "bias"), product=False)
    """
    names = []
    for subject in subjects:
        is_module = isinstance(subject, type) and issubclass(subject, nn.Module)
        if isinstance(subject, str) and subject.startswith("aten::") and not _is_known(subject):
            raise ValueError(f"torch has no operation {subject}; expected one as 'aten::cosh'")
        if is_module or isinstance(subject, Trait) or (isinstance(subject, str) and "::" in subject):
            names.append(subject)
        elif isinstance(subject, CustomOpDef):
            names.append(subject._qualname)
        elif isinstance(subject, torch._ops.OpOverloadPacket):
            names.append(subject._qualified_op_name)
        elif isinstance(subject, torch._ops.OpOverload):
            names.append(subject._schema.name)
        else:
            raise TypeError(
                f"a rule belongs to an operation (torch.ops.aten.cosh), its name ('aten::cosh') or a subclass of "
                f"nn.Module, not to {subject!r}"
            )

    def register(rule: RuleT) -> RuleT:
        for name in names:
            if isinstance(name, Trait):
                for own in operations(name):
                    _RULES.setdefault(f"aten::{own}", rule)
            elif isinstance(name, str):
                _RULES[name.removesuffix("_")] = rule
            else:
                _MODULE_RULES[name] = rule
        return rule

    return register


def _is_known(operation: str) -> bool:
    """Return whether torch has an operation, in place or not."""
    names = {operation, operation.removesuffix("_")}
    return any(torch._C._jit_get_schemas_for_operator(name) for name in names)


def namesakes(network: nn.Module) -> list[str]:
    """Return notes on modules without a rule if another class of the same name has one."""
    by_name = {kind.__name__: kind for kind in _MODULE_RULES}
    classes = dict.fromkeys(type(module) for module in network.modules())
    return [
        f"a rule belongs to another class {kind.__name__} (of {by_name[kind.__name__].__module__}) than that of the "
        f"network (of {kind.__module__}): it was not used; register it for this one"
        for kind in classes
        if kind.__name__ in by_name and not any(base in _MODULE_RULES for base in kind.__mro__)
    ]


def own_operations() -> frozenset[str]:
    """Return the operations that the normal form keeps: those with users' rules, and the rules' own constraints."""
    ours = __name__.rpartition(".")[0]
    where = ((name, getattr(rule, "__module__", None) or "") for name, rule in _RULES.items())  # None: no module
    own = (name for name, module in where if not module.startswith(ours))
    return frozenset((DEMAND._schema.name, *own))


def is_own(target: Any, own: Collection[str]) -> bool:
    """Whether an operation of the graph has a user's rule.

    Args:
        target: The operation.
        own: The operations with users' rules, as returned by :func:`own_operations`.
    """
    if target in OPAQUE:
        return target is not DEMAND
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.name.removesuffix("_") in own


def leaf_types() -> tuple[type[nn.Module], ...]:
    """Return the module classes with users' rules."""
    return tuple(_MODULE_RULES)


def rule_for(target: Any) -> Rule:
    """Return the rule of a graph operation."""
    if not isinstance(target, torch._ops.OpOverload):
        return _PYTHON.get(target, unknown)
    name = target._schema.name.removesuffix("_")
    if name in _RULES:
        return _RULES[name]
    target = out_of_place(target)
    return functools.partial(pointwise, target) if is_pointwise(target) or name.startswith("aten::") else unknown


def has_rule(target: Any, node: Any) -> bool:
    """Whether the group of an operation is known: by a rule, or measured as it is elementwise.

    Args:
        target: The operation.
        node: Its node in a graph, with values without data.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return target in _PYTHON
    if target._schema.name.removesuffix("_") in _RULES or is_pointwise(out_of_place(target)):
        return True
    given, result = node.all_input_nodes, node.meta.get("val")
    if len(given) != 1 or not isinstance(result, Tensor) or node.args[:1] != (given[0],) or node.kwargs:
        return False
    if tuple(given[0].meta["val"].shape) != tuple(result.shape):
        return False
    try:
        _measured(target, 0, tuple(node.args[1:]), (), False)
    except (ValueError, RuntimeError, TypeError):
        return False
    return True


def results_of(trace: Trace) -> Any:
    """Return the results of the current operation as values without labels."""
    meta = trace.node.meta.get("val")
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: Value(tuple(t.shape)), meta)


def unknown(trace: Trace, *args: Any, **kwargs: Any) -> Any:
    """Apply an operation without a rule: permute units if it applies one function to each, else fix them."""
    values = values_in((args, kwargs))
    found = _along(trace, values[0], args, kwargs) if len(values) == 1 and values[0] in args else None
    if found is not None:
        return found
    for value in values:
        trace.fix(value, NO_RULE)
        fix_choice(trace, value)
    return results_of(trace)


def _along(trace: Trace, value: Value, args: Any, kwargs: Any) -> Any:
    """Apply an operation on one tensor as its values on random numbers tell; None if they tell nothing."""
    target, position, meta = trace.node.target, args.index(value), trace.node.meta.get("val")
    axes = {axis for label in value.labels for axis in label.axes}
    if not axes or value.chooses is not None or not isinstance(target, torch._ops.OpOverload):
        return None
    results = measured_along(
        lambda x: target(*args[:position], x, *args[position + 1 :], **kwargs), value.shape, frozenset(axes)
    )
    separate = axes.intersection(*(own.places for own in results)) if results else set()
    apart = [label for label in value.labels if label.axes and separate.issuperset(label.axes)]
    if not results or not apart or target._schema.is_mutable:
        return None
    if len(apart) < len(value.labels):
        trace.fix(value.with_labels(*(label for label in value.labels if label not in apart)), NO_RULE)
    trace.note(
        f"{NO_RULE}: units can be permuted, as it applies one function to each; "
        "translations are fixed, which biases could undo"
    )
    found = []
    for own, shape in zip(results, torch.utils._pytree.tree_leaves(meta), strict=True):
        passed = trace.elementwise(
            value.with_labels(*apart),
            positive_scales=own.exponent is not None,
            signs=own.even or own.odd,
            exponent=1.0 if own.exponent is None else own.exponent,
            even=own.even,
        )
        labels = (label.on(tuple(own.places[axis] for axis in label.axes)) for label in passed.labels)
        found.append(Value(tuple(shape.shape), tuple(labels)))
    return found[0] if isinstance(meta, Tensor) else found


def fix_choice(trace: Trace, value: Value) -> None:
    """Fix the units that an integer value refers to, if any."""
    if value.chooses is not None:
        trace.fix(value.with_labels(value.chooses), CHOSEN)


def _measured_group(target: Any, trace: Trace, value: Value, args: Any, kwargs: Any) -> IntertwinerGroup | None:
    """Measure the group of an operation on one tensor; None if it is not elementwise, or not defined everywhere."""
    position = args.index(value)
    rest = (*args[:position], *args[position + 1 :])
    try:
        group: IntertwinerGroup = _measured(target, position, rest, tuple(sorted(kwargs.items())), trace.affine)
    except (ValueError, RuntimeError, TypeError):  # TypeError: the result is not real (a comparison, for example)
        return None
    return group


def _by_group(trace: Trace, value: Value, group: IntertwinerGroup) -> Value:
    if group.dense:
        return value
    if value.labels and not group.signs and _reads_negative(trace.node):
        trace.note("reads units and their negatives; the group has no sign changes that exchange the two")
    return trace.elementwise(
        value,
        positive_scales=group.positive_scales,
        signs=group.signs,
        exponent=group.exponent,
        even=group.even,
        offset=group.offset,
    )


def _reads_negative(node: fx.Node) -> bool:
    """Whether one function reads a value and its negative, perhaps joined or moved, and both results stay apart."""
    moves = operations(Trait.MOVE | Trait.CAT)
    origins = node.all_input_nodes[:1]
    for own in origins:
        origins += [given for given in own.all_input_nodes if name_of(own) in moves and given not in origins]
    for negative in (own for own in origins if name_of(own) == "neg"):
        found = _read_by(negative.all_input_nodes[0], moves)
        alike = [own for own in found if own.target is node.target and own.args[1:] == node.args[1:]]
        if any(own is node or not {*_sums(own)} & {*_sums(node)} for own in alike):
            return True
    return False


def _read_by(node: fx.Node, passed: Collection[str]) -> list[fx.Node]:
    """Return the readers of a node, and of the results of readers with certain names."""
    found = [*node.users]
    for own in found:
        found += [user for user in own.users if name_of(own) in passed and user not in found]
    return found


def _sums(node: fx.Node) -> list[fx.Node]:
    """Return the sums that add a value, perhaps scaled."""
    scaled = operations(Trait.MOVE | Trait.CAST | Trait.PRODUCT) | {"neg"}
    return [own for own in _read_by(node, scaled) if name_of(own) in operations(Trait.JOIN)]


def absorbs_offset(trace: Trace, target: Any, value: Value, arguments: Any) -> bool:
    """Whether an operation absorbs the constant that sign changes add to its input; records the absorbing bias.

    The operation must subtract the mean, or be linear with a bias; a convolution must have no padding, as the padding
    remains zero. See docs/theory/intertwiners.md, 1.4.
    """
    if arguments and arguments[0] is value and (offset_behind(trace.node, 1.0) or subtracts_mean(trace.node)):
        return True
    name = operation_name(target)
    if not name.startswith(("linear", "conv")) or "transpose" in name or len(arguments) < 3:
        return False
    first, weight, bias = arguments[:3]
    rest = list(arguments[3:])
    if first is not value or not isinstance(bias, Value) or bias.state is None or weight.state is None:
        return False
    if rest and (any(np.atleast_1d(rest[1] if len(rest) > 1 else 0)) or (len(rest) > 3 and rest[3] != 1)):
        return False
    absorbed = (bias.state, weight.state, 1, value.offset)
    if absorbed in trace.absorbed_before:  # in the previous walk
        return True
    if any(bias.state == known for known, *_ in trace.absorbed):
        return False
    trace.absorbed.append(absorbed)
    return True


def _ignore(trace: Trace, *args: Any, **kwargs: Any) -> None:
    return None


def _item(trace: Trace, values: Any, index: int) -> Any:
    return values[index]


_PYTHON: dict[Any, Rule] = {torch._C._set_grad_enabled: _ignore, operator.getitem: _item}


@register_rule("lightning_sym::leaf")
def _leaf(trace: Trace, inputs: list[Value], weights: list[Value], key: int) -> list[Value]:
    leaf = trace.capture.leaves[key]
    trace.leaf = by_place(leaf.module, weights)
    result = run_module_rule(trace, leaf, inputs)
    return [part for part in checked_results(result, leaf.module) if isinstance(part, Value)]


def by_place(module: nn.Module, tensors: Sequence[Any]) -> dict[str, Any]:
    """Map all names of a module's tensors to the items that represent them."""
    given = dict(zip(state_tensors(module), tensors, strict=True))
    return {place: given[name] for place, name in first_names(module).items()}


def rule_for_module(module: nn.Module) -> Rule:
    """Return the rule of a module's class, or of the nearest base class."""
    return next(_MODULE_RULES[kind] for kind in type(module).__mro__ if kind in _MODULE_RULES)


def run_module_rule(trace: Any, leaf: Leaf, inputs: Sequence[Any]) -> Any:
    """Call a module's rule, with the arguments of the module's call or with its tensors one by one.

    Args:
        trace: The trace for the rule.
        leaf: The call.
        inputs: The values that represent its tensors.
    """
    rule, module = rule_for_module(leaf.module), leaf.module
    args, kwargs = leaf.call.filled(inputs)
    signature = inspect.signature(rule)

    def takes(*own: Any, **named: Any) -> bool:
        try:
            signature.bind(trace, module, *own, **named)
        except TypeError:
            return False
        return True

    as_called, one_by_one = takes(*args, **kwargs), takes(*inputs)
    if as_called and one_by_one and not kwargs:  # parameter names decide
        names = [
            list(inspect.signature(each).parameters)[skipped:] for each, skipped in ((rule, 2), (module.forward, 0))
        ]
        as_called = names[0][: len(args)] == names[1][: len(args)]
    collects = any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
    if as_called and not (collects and one_by_one):
        return rule(trace, module, *args, **kwargs)
    check_rule_arguments(rule, type(module).__name__, module.forward, (trace, module, *inputs), {})
    return rule(trace, module, *inputs)


def check_rule_arguments(rule: Rule, called: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check that a rule can be called.

    Args:
        rule: The rule.
        called: The name of its operation or module.
        function: The operation, or the module's forward.
        args: The rule's arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: If the rule does not accept these.
    """
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError as error:
        schema = getattr(function, "_schema", None)
        own = inspect.signature(function).parameters if schema is None else [each.name for each in schema.arguments]
        first = "trace, module" if schema is None else "trace"
        raise TypeError(
            f"the rule for {called} does not take its arguments ({error}); expected rule({', '.join((first, *own))})"
        ) from error


def checked_results(result: Any, owner: Any) -> list[Any]:
    """Return the values that a rule returned, in order.

    Args:
        result: The rule's return value.
        owner: Its module or operation.

    Raises:
        TypeError: If the result contains no value, or other objects.
    """
    parts = torch.utils._pytree.tree_leaves(result)
    if not parts or not all(isinstance(part, Value) or part is None for part in parts):
        called = type(owner).__name__ if isinstance(owner, nn.Module) else operation_name(owner)
        raise TypeError(
            f"the rule for {called} returned {type(result).__name__}; expected the resulting Value, or a list of Values"
        )
    return parts


@register_rule("lightning_sym::demand")
def _demand(trace: Trace, inputs: list[Value], shape: Sequence[int]) -> Value:
    """Apply a rule's constraint that `expansion.py` wrote."""
    method, template = trace.node.meta["demand"]
    if not method:
        return Value(tuple(shape))
    args, kwargs = template.filled(inputs)
    result = getattr(trace, method)(*args, **kwargs)
    return result if isinstance(result, Value) else Value(tuple(shape))


@functools.lru_cache(maxsize=512)
def _measured(
    target: Any, position: int, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...], affine: bool
) -> Any:
    def function(x: Tensor) -> Any:
        args = [*arguments[:position], x.clone(), *arguments[position:]]
        return target(*args, **dict(keywords))

    return intertwiner_group(function, affine=affine)


def pointwise(target: Any, trace: Trace, *args: Any, **kwargs: Any) -> Any:
    """Apply a pointwise operation without a rule: measure it if it has one tensor, else tie units and fix scales.

    Some elementwise operations lack the tag; measuring detects them.
    """
    values, meta = values_in((args, kwargs)), trace.node.meta.get("val")
    alone = len(values) == 1 and values[0] in args
    if alone and isinstance(meta, Tensor) and tuple(meta.shape) == values[0].shape:
        group = _measured_group(target, trace, values[0], args, kwargs)
        if group is not None:
            return _by_group(trace, values[0], group)
    if not is_pointwise(target):
        return unknown(trace, *args, **kwargs)
    result: Value | None = None
    if not alone and any(value.labels for value in values):
        trace.note("combines several tensors by an unknown function; units can be permuted, scales are fixed")
    for value in values:
        value = trace.permutations_only(value)
        result = value if result is None else trace.join(result, value, product=False)
    return results_of(trace) if result is None else result
