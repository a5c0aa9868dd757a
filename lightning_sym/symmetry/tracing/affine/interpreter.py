"""Interpreter of a captured graph: maps each operation to a method of the algebra."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.affine.layers import Layers
from lightning_sym.symmetry.tracing.affine.moves import MOVES, Move, move_of
from lightning_sym.symmetry.tracing.affine.reading import Constants
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.values import Drift, Value, places
from lightning_sym.symmetry.tracing.affine.weights import ByFunction
from lightning_sym.symmetry.tracing.graph.capture import OPAQUE
from lightning_sym.symmetry.tracing.graph.coordinates import thinned
from lightning_sym.symmetry.tracing.graph.nodes import written_by
from lightning_sym.symmetry.tracing.graph.operations import Trait, is_pointwise, name_of, operations


class Interpreter(Layers):
    """Propagates translations and drifts of values through one capture.

    Args:
        system: Receives the equations.
        constants: The network and its constants.
        outputs: Whether a softmax reads the outputs along their last axis.
    """

    def __init__(self, system: System, constants: Constants, *, outputs: bool = False) -> None:
        super().__init__(system)
        self.capture, self.constants = constants.capture, constants
        self.outputs = outputs
        self.values: dict[fx.Node, Any] = {}
        self.hot: dict[Any, Value] = {}
        self.free = {name for names in system.absorbed.values() for name in names}
        self.marked = {mark.node for mark in constants.capture.marks}
        self.readings: dict[fx.Node, list[tuple[str, frozenset[int], Value]]] = {}

    def run(self) -> None:
        """Process all operations in order."""
        for node in self.capture.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "get_attr":
                owner: Any = node.graph.owning_module
                own = getattr(owner, str(node.target))
                self.values[node] = Value(tuple(own.shape), False, node) if isinstance(own, Tensor) else None
            elif node.op == "output":
                for value in self._given(node):
                    if self.outputs and value.rank:
                        self.softmax(value, value.rank - 1, log=True)
                    else:
                        self.fix(value)
            elif node.op == "call_function":
                self.reading = []
                if node in self.system.absorbed or node in self.system.inside:
                    self.values[node] = self._function(node)
                else:
                    self.values[node] = self._total(node) if node in self.system.totals else self._operation(node)
                self.readings[node] = self.reading

    def _placeholder(self, node: fx.Node) -> Value | None:
        own = node.meta.get("val")
        if not isinstance(own, Tensor):
            return None
        name, shape = self.capture.states.get(node), tuple(own.shape)
        if name is None:
            return Value(shape, True)
        learned = name not in self.system.constants and own.is_floating_point()
        value = Value(shape, False, node, learned=learned)
        if not learned:
            return value
        value.origin = name, _coordinates(shape)
        free = name in self.system.movable and name not in self.system.weights | self.system.takers.keys()
        if free and node.users:
            value.translation = self.system.free_numbers(name)
            if partial := self.system.partial.get(name):
                family = self.system.family(name, partial)
                function = places([size if axis in partial else 1 for axis, size in enumerate(shape)])
                value.drifts[self.system.source()] = Drift(function, family.directions[None])
        return value

    def _total(self, node: fx.Node) -> Value:
        """Return a weight plus functions of weights, with the translations of the weight."""
        shape = tuple(node.meta["val"].shape)
        return Value(shape, False, node, origin=(self.system.totals[node], _coordinates(shape)), learned=True)

    def _function(self, node: fx.Node) -> Value:
        """Return a function of weights that another weight absorbs, or a value inside of it, which changes freely."""
        system, shape = self.system, tuple(node.meta["val"].shape)
        for given in node.all_input_nodes:
            own, name = self.values.get(given), self.capture.states.get(given)
            if isinstance(own, Value) and (name not in self.free if name else given not in system.inside):
                self.fix(own)
        value = Value(shape, False, node, learned=True)
        if node not in system.absorbed:
            if some := sorted(self.free & system.made(node).names()) if node in self.marked else []:
                numbers = torch.cat([system.free_numbers(name).reshape(-1) for name in some])
                drift = Drift(places([1] * len(shape)), numbers.reshape(-1, *[1] * len(shape)))
                value.drifts[system.source()] = drift
            return value
        names, key = system.absorbed[node], system.signature(node)
        if any(key in own for own in system.takers.values()):
            return value
        source = torch.cat([system.free_numbers(name).reshape(-1) for name in names])
        evaluate = ByFunction(system.made(node), tuple((name, system.shape(name)) for name in names))
        blocks = places(shape).reshape(1, -1), torch.arange(len(source)).reshape(1, -1)
        made = system.derive(("function", key, ()), shape, source=source, evaluate=evaluate, blocks=blocks)
        return value.with_(translation=made)

    # Operations.

    def _given(self, node: fx.Node) -> list[Value]:
        """Return all values among a node's arguments."""
        found = [self.values.get(given) for given in node.all_input_nodes]
        return [value for each in found for value in (each if isinstance(each, list) else [each]) if value is not None]

    def _operation(self, node: fx.Node) -> Any:
        name = name_of(node)
        if node.target is operator.getitem:
            own = self.values.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(own, list):
                value: Value = own[node.args[1]]  # type: ignore[index]
                return value if value.varies else value.with_(node=node)
            return self._unknown(node)
        val = node.meta.get("val")
        if val is None or not isinstance(val, (Tensor, list, tuple)):
            for value in self._given(node):
                self.fix(value)
            return None
        given = self._given(node)
        if node.target in OPAQUE:
            if (moved := self._moved_by_rule(node)) is not None:
                return moved
            self._see_weights(given, [])
            return self._written(node)
        if written_by(node):
            return self._written(node)
        if self.constants.is_constant(node):
            return self._constant(node)
        self.contracted.clear()
        result = self._by_rule(node, name)
        if result is None:
            result = self._unknown(node)
        self._see_weights(given if name not in operations(Trait.CAST) else given[:1], result)
        if isinstance(result, Value) and not result.varies:
            result.node = node
        held = self._held(node, name) if any(own.varies for own in given) else None
        if isinstance(result, list):
            result = [own and own.with_(held=at) for own, at in zip(result, held or [None] * len(result), strict=True)]
        elif isinstance(result, Value) and (held is not None or result.held is not None):
            result = result.with_(held=held)
        return result

    def _held(self, node: fx.Node, name: str) -> Any:
        """Return the numbers that a result holds for every input, NaN elsewhere; None if there are none."""
        nodes = {given: self.values.get(given) for given in node.all_input_nodes}
        told = any(isinstance(own, Value) and own.held is not None for own in nodes.values())
        if name not in _FILLING and not (told and (name in _KEEPING or is_pointwise(node.target))):
            return None
        numbers = {}
        for given, own in nodes.items():
            val = given.meta.get("val")
            if isinstance(own, list) or not isinstance(val, Tensor) or val.numel() > _MOST:
                return None
            number = self.constants.number(given)
            known = self.constants.known(given) if number is None else torch.full(val.shape, number, dtype=val.dtype)
            if known is None and not val.is_floating_point():
                return None
            unknown = torch.tensor(torch.nan) if own is None or own.held is None else own.held
            numbers[given] = (unknown if known is None else known).expand(val.shape)
        try:
            made = node.target(*fx.map_arg(node.args, numbers.get), **fx.map_arg(node.kwargs, numbers.get))  # type: ignore[operator]
        except RuntimeError:
            return None
        return pytree.tree_map(
            lambda own: thinned(own) if own.is_floating_point() and not own.isnan().all() else None, made
        )

    def _see_weights(self, given: Sequence[Value], result: Any) -> None:
        """Fix weights that an operation reads other than by moves and contractions."""
        kept = {own.origin[0] for own in (result if isinstance(result, list) else [result]) if own and own.origin}
        for value in given:
            if value.origin is not None and value.origin[0] not in kept | self.contracted:
                self._unread(value)

    def _written(self, node: fx.Node) -> Any:
        """Return values without structure for a node that writes into memory which other nodes may read."""
        val = node.meta["val"]
        if name_of(node) not in operations(Trait.LIKE):
            self._unknown(node)
        if isinstance(val, Tensor):
            return Value(tuple(val.shape), True, learned=True)
        return [Value(tuple(own.shape), True, learned=True) if isinstance(own, Tensor) else None for own in val]

    def _by_rule(self, node: fx.Node, name: str) -> Any:
        val = node.meta["val"]
        first = self.values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(val, Tensor) and not val.is_floating_point() and name not in MOVES:
            return None
        if name in operations(Trait.CAST):
            return first if isinstance(first, Value) and not (isinstance(val, Tensor) and val.is_complex()) else None
        if name in MOVES:
            return self._moved(node, name, first)
        rule: Callable[..., Any] | None = _RULES.get(name)
        if rule is None or isinstance(node.target, torch._ops.HigherOrderOperator):
            return None
        varies = any(value.varies for value in self._given(node))
        if not varies and name in _BLIND:
            return self._blind(node, rule)
        if not varies and name not in operations(Trait.LINEAR):
            return None
        return rule(self, node)

    def _blind(self, node: fx.Node, rule: Callable[..., Any]) -> Any:
        """Apply a norm or softmax to weights, which may be translated where the operation is invariant.

        Behind a gain or bias, as of the norm of learned queries, the result counts as one that varies.
        """
        first, *others = (self._value(given) for given in node.all_input_nodes)
        if first is None or node.args[0] is not node.all_input_nodes[0]:
            return None
        if others and name_of(node) == "layer_norm":
            self._unread(first)
            self.values[node.args[0]] = first.with_(varies=True, origin=None)
            made = rule(self, node)
            self.values[node.args[0]] = first
            return made
        for value in (first, *others):
            if value is not None and (value is not first):
                self.fix(value)
            if value is not None:
                self._unread(value)
        self.values[node.args[0]] = first.with_(varies=True, origin=None)  # type: ignore[index]
        made = rule(self, node)
        self.values[node.args[0]] = first  # type: ignore[index]
        return Value(made.shape, False, node, learned=True) if isinstance(made, Value) else None

    def _constant(self, node: fx.Node) -> Any:
        """Return a constant; constants that depend on the input's size count as inputs."""
        val = node.meta["val"]
        if not isinstance(val, Tensor):
            return [Value(tuple(own.shape), True) if isinstance(own, Tensor) else None for own in val]
        shape = tuple(val.shape)
        if self.constants.known(node) is not None:
            uniform = self.constants.number(node) is not None
            if not (uniform and any(size > 1 and size in self.constants.lengths for size in shape)):
                return Value(shape, False, node)
        value = Value(shape, True)
        total = self.constants.sums_to(node)
        if total is not None and shape[-1] > 1:
            value.relation = self._over(shape, [len(shape) - 1], total)
        return value

    def _unknown(self, node: fx.Node) -> Any:
        given = self._given(node)
        val, name = node.meta.get("val"), name_of(node)
        where = self.capture.modules.get(node, "forward")
        for value in given:
            living = self.numbers(value) is not None or bool(self._living(value))
            if "demand" in node.meta:
                self._demanded(node, value, where, living=living)
            elif living and name not in operations(Trait.POINTWISE):
                self.system.note(f"{name} in {where}: its arguments are not translated")
        if isinstance(val, (list, tuple)):
            return [
                self.nonlinear(given, tuple(own.shape), None) if isinstance(own, Tensor) else None for own in val
            ]  # fmt: skip
        return self.nonlinear(given, tuple(val.shape) if isinstance(val, Tensor) else (), node)

    def _moved_by_rule(self, node: fx.Node) -> Value | None:
        """Return a value moved by a user's rule; None if the rule does anything else or adds elements."""
        method, template = node.meta.get("demand", ("", None))
        if method != "move":
            return None
        (value, function), _ = template.filled([self.values.get(given) for given in node.args[0]])  # type: ignore[union-attr,arg-type]
        if value is None or bool((function(torch.ones(value.shape, dtype=torch.int64)) == 0).any()):
            return None  # some elements are new
        moved = self.move(value, Move("other", value.shape, tuple(node.meta["val"].shape), function), node)
        return moved[0]

    def _demanded(self, node: fx.Node, value: Value, where: str, *, living: bool) -> None:
        """Note constraints of a user's rule that a more specific rule could avoid."""
        method, rule = node.meta["demand"][0], f"{node.meta['rule_of']} in {where}: its rule"
        if method == "elementwise" and not value.varies:
            self.system.blind[f"{rule} describes a function of weights only by its group"] = None
        elif living and method not in ("", "elementwise", "fix"):
            self.system.blind[f"{rule} does not describe the effect of translations, so that there are none here"] = (
                None
            )

    def _all_is_taken(self, node: fx.Node, move: Move) -> bool:
        """Whether other cuts take the remaining parts of a value, such as queries, keys and values in one tensor."""
        source: Any = node.args[0]
        taken = torch.zeros(move.before[move.axis], dtype=torch.bool)
        for user in source.users:
            own = move_of(user, name_of(user), move.before, self.constants.known) if name_of(user) in MOVES else None
            if own is not None and own.alone and own.axis == move.axis:
                for begin, end in own.parts:
                    taken[begin:end] = True
        return bool(taken.all())

    def _moved(self, node: fx.Node, name: str, first: Any) -> Any:
        if not isinstance(first, Value):
            return None
        if name == "index" and isinstance(node.args[1], (list, tuple)) and first.varies and not first.moves:
            return None
        move = move_of(node, name, first.shape, self.constants.known)
        if move is None:
            return self._looked_up(node, name, first)
        if move.alone and self._all_is_taken(node, move):
            move = replace(move, alone=False)
        if first.varies and first.moves and move.cut_to(self.system.lengths):
            move = replace(move, grows=self.constants.grows(node.args[0], move.axis))
        results = self.move(first, move, node)
        return results if isinstance(node.meta["val"], (list, tuple)) else results[0]


def _coordinates(shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the place of each entry of a parameter along each of its axes; thin."""
    return tuple(
        torch.arange(size).reshape([-1 if at == axis else 1 for at in range(len(shape))])
        for axis, size in enumerate(shape)
    )


_RULES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub", "rsub"), Interpreter._added),
    "mul": Interpreter._mul,
    "div": Interpreter._div,
    "neg": Interpreter._neg,
    **dict.fromkeys(("linear", "matmul", "einsum"), Interpreter._contracted),
    "embedding": Interpreter._embedding,
    **dict.fromkeys(operations(Trait.CONVOLVE), Interpreter._convolution),
    **dict.fromkeys(("layer_norm", "rms_norm"), Interpreter._layer_norm),
    "batch_norm": Interpreter._batch_norm,
    **dict.fromkeys(operations(Trait.SOFTMAX), Interpreter._softmax),
    **dict.fromkeys(operations(Trait.SUM), Interpreter._reduced),
    **dict.fromkeys(("amax", "amin", "logsumexp"), Interpreter._extremum),
    **dict.fromkeys(("sort", "topk", "cummax", "cummin", "logcumsumexp"), Interpreter._ordered),
    **dict.fromkeys(("maximum", "minimum"), Interpreter._larger),
    **dict.fromkeys(("var", "std"), Interpreter._spread),
    **dict.fromkeys(operations(Trait.POOL | Trait.MAX_POOL | Trait.RESIZE | Trait.NEAREST), Interpreter._pooled),
    "masked_fill": Interpreter._filled,
    "where": Interpreter._where,
    "cat": Interpreter._cat,
    "lightning_sym::any_step": Interpreter._step,
    "lightning_sym::rotary": Interpreter._rotary,
}
_MOST = 2**20  # maximal entries of values that hold numbers
# Operations that keep the numbers which a value holds, and those that put constants beside its entries.
_FILLING = operations(Trait.CAT | Trait.PAD) | {"where", "masked_fill"}
_KEEPING = MOVES | _FILLING | operations(Trait.CAST | Trait.JOIN | Trait.PRODUCT)
# Invariant under some translations of weights.
_BLIND = operations(Trait.SOFTMAX) | {"layer_norm"}
