"""Apply users' rules: replace their operations by the torch operations that the rules describe.

A rule describes values, independently of the group acting on them. It is therefore called once before the normal form,
with an `Expansion` instead of the `Trace`. Sums, products, norms and moves become torch operations, so that all later
steps can follow them. A function without a torch operation, given only by its group, becomes a `demand`. See
docs/theory/tracing.md, 6.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.tracing.graph.capture import (
    DEMAND,
    OPAQUE,
    Capture,
    Template,
    operation_name,
    state_tensors,
)
from lightning_sym.symmetry.tracing.graph.functional import functional
from lightning_sym.symmetry.tracing.graph.nodes import between, result_shape, written_by
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.labelling.rules import (
    by_place,
    check_rule_arguments,
    checked_results,
    is_own,
    own_operations,
    rule_for,
    run_module_rule,
)
from lightning_sym.symmetry.tracing.labelling.values import Goes, Value
from lightning_sym.symmetry.tracing.labelling.walk import Walk

aten = torch.ops.aten

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOVES = operations(Trait.MOVE | Trait.PICK | Trait.PAD | Trait.CAT) | {"getitem", "clone", "contiguous"}


class NotWrittenError(Exception):
    """A rule reads labels of values, so it can only run during the walk, where labels are known."""


@dataclass(frozen=True, eq=False)
class Written(Value):
    """A value of known shape in a rule; its labels are unknown.

    Attributes:
        node: The node that produces it.
        rewriter: The graph's rewriter.
    """

    node: Any = None
    rewriter: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "concrete":
            return self._constant()
        if name in _INSIDE:
            raise NotWrittenError(f"looks at the {name} of a value")
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"Value(shape={self.shape}, made by {self.node})"

    def _constant(self) -> Tensor | None:
        """Return the elements if the value consists of constants, else None.

        Raises:
            NotWrittenError: If the value depends on weights.
        """
        constant: Tensor | None = self.rewriter.constant(self.node)
        if constant is None and self.rewriter.made_of(self.node) != "inputs":
            raise NotWrittenError("asks for the numbers of a value")
        return constant


_INSIDE = {field.name for field in fields(Value)} - {"shape", "concrete"} | {"with_labels", "on"}


def expand(capture: Capture) -> Capture:
    """Replace the operations and modules that have users' rules by the operations of these rules, in place.

    Args:
        capture: The captured network.

    Returns:
        The capture.
    """
    functional(capture)
    own = own_operations()
    if not any(is_own(node.target, own) for node in capture.graph.nodes):
        return capture
    rewriter = Rewriter(capture, own)
    rewriter.erase_unread()
    node = next(iter(capture.graph.nodes))
    while node.op != "root":
        before, following = node.prev, node.next
        if is_own(node.target, own) and _Replacement(rewriter, node).run():
            following = before.next  # the written operations may have rules themselves
        node = following
    return capture


class Expansion:
    """Writes the operations of a rule into the graph; has the methods of a `Trace` that read no labels.

    Args:
        rewriter: The rewriter of the captured network.
        node: The current operation.
    """

    def __init__(self, rewriter: Rewriter, node: fx.Node) -> None:
        self.rewriter, self.node, self.capture = rewriter, node, rewriter.capture
        self._leaf = rewriter.capture.leaves[node.args[2]] if node.target is OPAQUE[1] else None  # type: ignore[index]
        self._demands: list[fx.Node] = []  # sums and products, which constrain their arguments even if unread
        self._nothing: list[fx.Node] = []  # values without labels
        self._target: Any = node.target
        self._parameters: dict[str, fx.Node] = {}
        if self._leaf is not None:
            self._parameters = by_place(self._leaf.module, node.args[1])  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in {*dir(Walk({})), *Walk.__annotations__}:
            raise NotWrittenError(f"uses trace.{name}")
        methods = ", ".join(name for name in vars(Expansion) if not name.startswith("_"))
        raise AttributeError(f"a trace has no {name!r}, which the rule for {self.operation} uses; it has {methods}")

    @property
    def operation(self) -> str:
        """The name of the current operation or module."""
        return operation_name(self.node.target) if self._leaf is None else type(self._leaf.module).__name__

    def output_shape(self, index: int | None = None) -> tuple[int, ...]:
        """Return the shape of the current operation's result (or of the result at an index, if it has several)."""
        return result_shape(self.node, index)

    def note(self, text: str) -> None:
        """Add a note on the current operation for the user."""
        self._demand("note", (), text)

    def parameter(self, module: nn.Module, name: str) -> Value:
        """Return a parameter or buffer of the current module, in a rule for a module class.

        Raises:
            KeyError: If the module has no parameter or buffer of this name.
        """
        if name not in self._parameters:
            raise KeyError(
                f"{type(module).__name__} has no parameter or buffer {name!r}; it has {', '.join(self._parameters)}"
            )
        return self._value(self._parameters[name])

    def tell(self, factor: str, parameter: Value) -> None:
        """Declare that a factor of the group acts on a parameter; see `Factor.told`.

        Raises:
            ValueError: If the value is not a parameter or buffer of the network.
        """
        name = self.capture.states.get(self._node(parameter))
        if name is None:
            raise ValueError(f"the rule for {self.operation} tells {factor} of a value; expected trace.parameter(...)")
        self.capture.told.add((factor, name))

    def fix(self, value: Value, reason: str | None = None) -> Value:
        """Fix this value: the group may not act on it."""
        self._check(value)
        return self._demand("fix", value.shape, value, reason)

    def elementwise(self, value: Value, **allowed: Any) -> Value:
        """Apply one function to every element; only the function's group is known."""
        self._check(value)
        return self._demand("elementwise", value.shape, value, **allowed)

    def permutations_only(self, value: Value) -> Value:
        """Allow permutations of the units, but neither scales nor changes of sign."""
        return self.elementwise(value)

    def linear_along(self, value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
        """Apply an unspecified linear map along known axes."""
        self._check(value)
        axes = self._axes(value, axes)
        return self._demand("linear_along", shape, value, list(axes), list(shape))

    def move(self, value: Value, function: Callable[[Tensor], Any], *, filled_by_zero: bool = True) -> Any:
        """Rearrange elements."""
        self._check(value)
        if filled_by_zero:
            before = self.node.prev
            with contextlib.suppress(ValueError):
                moved = self.compute(function, value)
                if all(map(self._moves, between(before, self.node))):
                    return moved
        probe = function(torch.zeros(value.shape, dtype=torch.int64))
        if isinstance(probe, Tensor):
            return self._demand("move", probe.shape, value, function, filled_by_zero=filled_by_zero)
        return [
            self._demand("move", part.shape, value, lambda t, at=at: function(t)[at], filled_by_zero=filled_by_zero)
            for at, part in enumerate(probe)
        ]

    def join(self, one: Value, two: Value, *, product: bool, divide: bool = False, gain: str | None = None) -> Value:
        """Combine two values elementwise; a gain is detected without its name.

        Raises:
            ValueError: If the shapes do not broadcast.
        """
        self._check(one, two)
        try:
            np.broadcast_shapes(one.shape, two.shape)
        except ValueError:
            raise ValueError(
                f"the rule for {self.operation} joins the shapes {one.shape} and {two.shape}, which do not broadcast; "
                "expected trace.move(value, function) before, as lambda tensor: tensor[:, None]"
            ) from None
        target = (aten.div.Tensor if divide else aten.mul.Tensor) if product else aten.add.Tensor
        try:
            joined = self.rewriter.insert(target, self._node(one), self._node(two))
        except NoSpellingError:
            shape = np.broadcast_shapes(one.shape, two.shape)
            return self._demand("join", shape, one, two, product=product, divide=divide)
        self._demands.append(joined)
        return self._value(joined)

    def contract(self, one: Value, one_axes: Goes, two: Value, two_axes: Goes, shape: Sequence[int]) -> Value:
        """Multiply two values and sum over one axis of each.

        Raises:
            ValueError: If the axes do not fit the values and the result's shape.
        """
        self._check(one, two)
        axes = one_axes, two_axes
        for value, goes in ((one, one_axes), (two, two_axes)):
            if len(goes) != value.ndim or None not in goes or not {*goes} <= {None, *range(len(shape))}:
                raise ValueError(
                    f"the rule for {self.operation} contracts a value of shape {value.shape} with the places "
                    f"{list(goes)}; expected for each of its axes the place in the result of shape {tuple(shape)}, and "
                    "None for the one that is summed over"
                )
        plain = all(list(goes).count(None) == 1 for goes in axes)
        if plain and {*one_axes, *two_axes} == {None, *range(len(shape))}:
            terms = ["".join("z" if axis is None else _LETTERS[axis] for axis in goes) for goes in axes]
            equation = f"{','.join(terms)}->{_LETTERS[: len(shape)]}"
            with contextlib.suppress(NoSpellingError):
                result = self.rewriter.insert(aten.einsum.default, equation, [self._node(one), self._node(two)])
                if self.rewriter.shape(result) == tuple(shape):
                    self._demands.append(result)
                    return self._value(result)
        return self._demand("contract", shape, one, list(one_axes), two, list(two_axes), list(shape))

    def normalise(self, value: Value, axes: Sequence[int], *, mean: bool, eps: float = 0.0) -> Value:
        """Divide by the root mean square over some axes, after subtracting the mean if ``mean``."""
        self._check(value)
        axes = self._axes(value, axes)

        def norm(x: Tensor) -> Tensor:
            centred = x - x.mean(axes, keepdim=True) if mean else x
            return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()

        result: Value = self.compute(norm, value)
        return result

    def softmax(self, value: Value, axis: int) -> Value:
        """Apply a softmax along an axis."""
        self._check(value)
        (axis,) = self._axes(value, axis)
        result: Value = self.compute(torch.softmax, value, axis)
        return result

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a function of torch and trace its operations; it may read the current module's parameters."""
        own = state_tensors(self._leaf.module) if self._leaf is not None else {}
        known = {id(tensor): self._parameters[name] for name, tensor in own.items()}
        args, kwargs = pytree.tree_map_only(Value, self._node, (args, kwargs))
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: known.get(id(tensor), tensor), (args, kwargs))
        places = list(self._parameters)

        def with_parameters(tensors: Sequence[Tensor], *own: Any, **named: Any) -> Any:
            if self._leaf is None:
                return function(*own, **named)
            module = self._leaf.module
            with evaluating(module), _holding(module, dict(zip(places, tensors, strict=True))):
                return function(*own, **named)

        result = self.rewriter.write(with_parameters, [self._parameters[name] for name in places], *args, **kwargs)
        return pytree.tree_map_only(fx.Node, self._value, result)

    # Written operations.

    def _moves(self, node: fx.Node) -> bool:
        """Whether a node only rearranges elements, or is a constant."""
        return name_of(node) in _MOVES or self.rewriter.made_of(node) == "constants"

    def _value(self, node: fx.Node) -> Written:
        return Written(self.rewriter.shape(node), node=node, rewriter=self.rewriter)

    def _node(self, value: Value) -> fx.Node:
        if isinstance(value, Written):
            node: fx.Node = value.node
            return node
        if value.labels or value.concrete is not None:
            raise NotWrittenError("constructs a value")
        made: Written = self._demand("", value.shape)
        node = made.node
        return node

    def _check(self, *values: Any) -> None:
        """Check that a rule passes values to a method of the trace."""
        for value in values:
            if not isinstance(value, Value):
                raise TypeError(
                    f"the rule for {self.operation} gives a {type(value).__name__} to a method of the trace; expected "
                    "a Value: trace.parameter(module, name) for a parameter, trace.compute(function, value) for a "
                    "function of numbers"
                )

    def _axes(self, value: Value, axes: int | Sequence[int]) -> list[int]:
        """Return axes of a value as a list, after checking their range."""
        found = [axes] if isinstance(axes, int) else [*axes]
        if not all(-value.ndim <= axis < value.ndim for axis in found):
            raise ValueError(
                f"the rule for {self.operation} names the axes {found} of a value of shape {value.shape}; expected "
                f"numbers from {-value.ndim} to {value.ndim - 1}"
            )
        return found

    def _demand(self, method: str, shape: Sequence[int], *args: Any, **kwargs: Any) -> Written:
        """Write a call of a method of the trace as a node; without a method, the result has no labels."""
        args, kwargs = pytree.tree_map_only(Value, self._node, (args, kwargs))
        template, inputs = Template.of(fx.Node, args, kwargs)
        given = inputs or ([] if method else [node for node in self.node.all_input_nodes if _is_tensor(node)])
        node = self.rewriter.demand(given, shape)
        node.meta["demand"], node.meta["rule_of"] = (method, template), self.operation
        if not method:
            self._nothing.append(node)
        return self._value(node)


class _Replacement(Expansion):
    """Runs the rule of an operation and replaces the operation by the result."""

    def run(self) -> bool:
        """Replace the operation; if its rule reads labels, keep it and add a note.

        Returns:
            Whether the operation was replaced.

        Raises:
            ValueError: If the rule uses the operation itself.
        """
        node, before, within = self.node, self.node.prev, self.node.meta.get("within", frozenset())
        if node.target in within:
            raise ValueError(
                f"the rule for {self.operation} computes it by {self.operation}; expected other operations of torch"
            )
        self.rewriter.at, self.rewriter.rule = node, f"for {self.operation}"
        self.capture.rules.add(self.operation)
        try:
            results = self._results()
        except NotWrittenError as reason:
            for own in reversed(between(before, node)):
                self.rewriter.erase(own)
            node.target, node.meta["rule_of"] = self._target, self.operation
            self.note(f"its rule {reason}, so that shifts, norms and rotations are not followed through it")
            return False
        for own in between(before, node):
            if is_own(own.target, self.rewriter.kept):
                own.meta["within"] = within | {node.target}
        self._keep_demands(before, results)
        if isinstance(node.meta["val"], Tensor):
            self._put(node, results[0])
            return True
        for user in list(node.users):
            at: Any = user.args[1]
            self._put(user, results[at])
        if not node._erased:  # without readers
            self.rewriter.erase(node)
        return True

    def _results(self) -> list[fx.Node]:
        """Run the rule and return its results."""
        node, leaf = self.node, self._leaf
        owner: Any
        if written_by(node):
            raise NotWrittenError("belongs to an operation that writes into its arguments")
        if leaf is not None:
            inputs = [self._value(given) for given in node.args[0]]  # type: ignore[union-attr,arg-type]
            result, owner = run_module_rule(self, leaf, inputs), leaf.module
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
            check_rule_arguments(rule_for(node.target), self.operation, node.target, (self, *args), kwargs)
            result, owner = rule_for(node.target)(self, *args, **kwargs), node.target
        results = [part for part in checked_results(result, owner) if part is not None]
        wanted = [value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, Tensor)]
        if len(results) != len(wanted):
            raise TypeError(
                f"the rule for {self.operation} returned {len(results)} values; expected {len(wanted)}, one for each "
                "output tensor"
            )
        for value, real in zip(results, wanted, strict=True):
            if tuple(value.shape) != tuple(real.shape):
                raise ValueError(
                    f"the rule for {self.operation} returned a value of shape {tuple(value.shape)}; expected "
                    f"{tuple(real.shape)}, the shape of the output"
                )
        return [self._node(value) for value in results]

    def _argument(self, node: fx.Node) -> Any:
        return self._value(node) if _is_tensor(node) else node.meta.get("val")

    def _keep_demands(self, before: fx.Node, results: Sequence[fx.Node]) -> None:
        """Keep the constraints of a rule on unread values, and fix arguments that the rule ignores."""
        written = [node for node in between(before, self.node) if node not in self._nothing]
        read = {given for node in written for given in node.all_input_nodes} | set(results)
        for node in self._demands:
            if not node.users and node not in results:
                self._demand("read", (), self._value(node))
        names = {node: name for name, node in reversed(self._parameters.items())}
        for node in dict.fromkeys(self.node.all_input_nodes):
            if node not in read and _is_tensor(node):
                what = f"the parameter {names[node]}" if node in names else "one of its arguments"
                self.fix(self._value(node), f"its rule says nothing of {what}")

    def _put(self, old: fx.Node, new: fx.Node) -> None:
        """Replace a result by a new node of the same dtype."""
        kind = old.meta["val"].dtype
        if new.target is DEMAND and not new.users:
            new.meta["val"] = old.meta["val"]
        elif new.meta["val"].dtype != kind:
            new = self.rewriter.insert(aten.to.dtype, new, kind)
        self.rewriter.replace(old, new)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) or node.op == "get_attr"


@contextlib.contextmanager
def _holding(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let a module hold other tensors temporarily, by the names of their places."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for place, tensor in tensors.items():
        owner, _, name = place.rpartition(".")
        own: Any = module.get_submodule(owner)
        held = own._parameters if name in own._parameters else own._buffers
        kept.append((held, name, held[name]))
        held[name] = tensor
    try:
        yield
    finally:
        for held, name, tensor in kept:
            held[name] = tensor
