"""Interprets a captured graph: which method each operation is, and with which arguments."""

import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.affine.algebra import permutation, regroup
from lightning_sym.symmetry.tracing.affine.contractions import Contractions
from lightning_sym.symmetry.tracing.affine.moves import MOVES, Move, move_of
from lightning_sym.symmetry.tracing.affine.reading import Constants
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.values import Coefficient, Drift, Shape, Value, places, varying, wide
from lightning_sym.symmetry.tracing.capture import OPAQUE
from lightning_sym.symmetry.tracing.invisible import argument
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations, places_of

_VANISHED = -1e30  # what is put in the place of values that a softmax shall not see
_LETTERS = string.ascii_letters


class Interpreter(Contractions):
    """Follows what may be added to values through one capture.

    Args:
        system: Where equations go.
        constants: The network, and what of it is constant.
    """

    def __init__(self, system: System, constants: Constants) -> None:
        super().__init__(system)
        self.capture, self.constants, self.unsafe = constants.capture, constants, constants.unsafe
        self.values: dict[fx.Node, Any] = {}

    def run(self) -> None:
        """Go through all operations, in order."""
        for node in self.capture.graph.nodes:
            if node.op == "placeholder":
                value = self._placeholder(node)
                if node in self.unsafe and value is not None:
                    self.fix(value)
                    value = Value(value.shape, True, learned=True)
                self.values[node] = value
            elif node.op == "get_attr":
                owner: Any = node.graph.owning_module
                own = getattr(owner, str(node.target))
                self.values[node] = Value(tuple(own.shape), False, node) if isinstance(own, Tensor) else None
            elif node.op == "output":
                for value in self._given(node):
                    self.fix(value)
            elif node.op == "call_function":
                self.values[node] = self._operation(node)

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
        coordinates = tuple(
            torch.arange(size).reshape([-1 if at == axis else 1 for at in range(len(shape))])
            for axis, size in enumerate(shape)
        )
        value.origin = name, coordinates
        if name in self.system.movable and name not in self.system.weights and node.users:
            value.translation = self.system.free_numbers(name)
            if partial := self.system.partial.get(name):
                family = self.system.family(name, partial)
                function = places([size if axis in partial else 1 for axis, size in enumerate(shape)])
                value.drifts[self.system.source()] = Drift(function, family.directions[None])
        return value

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
            if (result := self._moved_by_rule(node)) is None:
                self._see_weights(given, [])
                result = self._written(node)
            return result
        if node in self.unsafe:
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
        return result

    def _see_weights(self, given: Sequence[Value], result: Any) -> None:
        """Fix weights of which an operation makes something else than a move or a contraction does."""
        kept = {own.origin[0] for own in (result if isinstance(result, list) else [result]) if own and own.origin}
        for value in given:
            if value.origin is not None and value.origin[0] not in kept | self.contracted:
                self._unread(value)

    def _written(self, node: fx.Node) -> Any:
        """Return what is known of a node in whose memory something is written that other nodes may see: nothing."""
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
        """Return what a norm or softmax makes of weights: what it does not see of them may be added."""
        first, *others = (self._value(given) for given in node.all_input_nodes)
        if first is None or node.args[0] is not node.all_input_nodes[0]:
            return None
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
        """Return a constant; one that depends on the input's size is as good as an input."""
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
            elif living and name not in operations(Trait.POINTWISE) | {"prelu"}:
                self.system.note(f"{name} in {where}: nothing is added to what it takes")
        if isinstance(val, (list, tuple)):
            return [
                self.nonlinear(given, tuple(own.shape), None) if isinstance(own, Tensor) else None for own in val
            ]  # fmt: skip
        return self.nonlinear(given, tuple(val.shape) if isinstance(val, Tensor) else (), node)

    def _moved_by_rule(self, node: fx.Node) -> Value | None:
        """Return what a user's rule makes of a value by moving all its elements; None if it does something else."""
        method, template = node.meta.get("demand", ("", None))
        if method != "move":
            return None
        (value, function), _ = template.filled([self.values.get(given) for given in node.args[0]])  # type: ignore[union-attr,arg-type]
        if value is None or bool((function(torch.ones(value.shape, dtype=torch.int64)) == 0).any()):
            return None  # some come from nowhere
        moved = self.move(value, Move("other", value.shape, tuple(node.meta["val"].shape), function), node)
        return moved[0]

    def _demanded(self, node: fx.Node, value: Value, where: str, *, living: bool) -> None:
        """Note what a user's rule leaves open of a value, where another rule could say more."""
        method, rule = node.meta["demand"][0], f"{node.meta['rule_of']} in {where}: its rule"
        if method == "elementwise" and not value.varies:
            self.system.blind[f"{rule} says of a function of weights only which group it has"] = None
        elif living and method not in ("", "elementwise", "fix"):
            self.system.blind[f"{rule} does not say what becomes of what is added, so that nothing is added here"] = (
                None
            )

    def _value(self, given: Any) -> Value | None:
        """Return the value of an argument; None for a number."""
        found = self.values.get(given) if isinstance(given, fx.Node) else None
        return found if isinstance(found, Value) else None

    def _moved(self, node: fx.Node, name: str, first: Any) -> Any:
        if not isinstance(first, Value):
            return None
        if name == "index" and isinstance(node.args[1], (list, tuple)) and first.varies and not first.moves:
            return None
        move = move_of(node, name, first.shape, self.constants.known)
        if move is None:
            return self._looked_up(node, name, first)
        results = self.move(first, move, node)
        return results if isinstance(node.meta["val"], (list, tuple)) else results[0]

    def _looked_up(self, node: fx.Node, name: str, table: Value) -> Value | None:
        """Return what one index, which depends on the input, takes out of weights: a contraction with indicators."""
        axis: Any = node.args[1]
        index = node.args[2] if name == "index_select" else None
        if name == "index" and isinstance(axis, (list, tuple)):
            axes = [at for at, own in enumerate(axis) if own is not None]
            axis, index = (axes[0], axis[axes[0]]) if len(axes) == 1 else (None, None)
        at = self._value(index)
        if table.varies or at is None or index.meta["val"].dtype == torch.bool:  # type: ignore[union-attr]
            return None
        letters = _LETTERS[: table.rank]
        axis %= table.rank
        own = _LETTERS[table.rank : table.rank + at.rank]
        return self._by_indicators(
            at, table, f"{own}{letters[axis]},{letters}->{letters[:axis]}{own}{letters[axis + 1 :]}", node, axis
        )

    def _by_indicators(self, index: Value, table: Value, equation: str, node: fx.Node, axis: int = 0) -> Value:
        hot = Value((*index.shape, table.shape[axis]), True)
        hot.relation = self._over(hot.shape, [hot.rank - 1], 1.0)
        return self.contract(hot, table, equation, node)

    # Sums and products.

    def _added(self, node: fx.Node) -> Any:
        alpha: Any = node.kwargs.get("alpha", 1)
        if len(node.args) < 2 or not isinstance(alpha, (int, float)):
            return None
        name = name_of(node)
        by = {"add": (1.0, alpha), "sub": (1.0, -alpha), "subtract": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
        return self._sum(node, node.args[0], node.args[1], by)

    def _sum(self, node: fx.Node, first: Any, second: Any, by: Sequence[float]) -> Any:
        one, two = self._value(first), self._value(second)
        by = [float(own) for own in by]
        if one is not None and two is not None:
            return self.add(one, two, node, by)
        value, factor, number, by_number = (
            (one, by[0], second, by[1]) if one is not None else (two, by[1], first, by[0])
        )
        if value is None or not isinstance(number, (int, float)):
            return None
        result = value if factor == 1 else self.scale(value, factor, node)
        relation = result.relation
        if relation is not None and number:
            by_it = Coefficient(by_number * float(number))
            result = result.with_(relation=self.moved_total(relation, result.shape, by_it))
        return result.with_(origin=None)

    def _mul(self, node: fx.Node) -> Any:
        shape = tuple(node.meta["val"].shape)
        for own, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
            value, number = self._value(own), self.constants.number(other)
            if value is not None and number is not None and value.shape == shape:
                return self.scale(value, number, node)
        one, two = self._value(node.args[0]), self._value(node.args[1])
        return self.multiply(one, two, node) if one is not None and two is not None else None

    def _div(self, node: fx.Node) -> Any:
        if node.kwargs.get("rounding_mode") is not None:
            return None
        one, two = self._value(node.args[0]), self._value(node.args[1])
        number = self.constants.number(node.args[1])
        if number and one is not None and one.shape == tuple(node.meta["val"].shape):
            return self.scale(one, 1 / number, node)
        return self.multiply(one, two, node, divide=True) if one is not None and two is not None else None

    def _neg(self, node: fx.Node) -> Any:
        value = self._value(node.args[0])
        return None if value is None else self.scale(value, -1.0, node)

    # Contractions.

    def _linear(self, node: fx.Node) -> Any:
        x, w = self._value(node.args[0]), self._value(node.args[1])
        if x is None or w is None or w.rank != 2:
            return None
        lead = _LETTERS[: x.rank - 1]
        result = self.contract(x, w, f"{lead}y,zy->{lead}z", node)
        return self._with_bias(result, argument(node, 2, "bias"), node)

    def _with_bias(self, result: Value, bias: Any, node: fx.Node, after: int = 0) -> Value:
        own = self._value(bias)
        if own is None:
            return result
        if after:
            own = self.move(own, regroup(own.shape, (*own.shape, *[1] * after)), own.node)[0]
        return self.add(result, own, node)

    def _matmul(self, node: fx.Node) -> Any:
        x, y = self._value(node.args[0]), self._value(node.args[1])
        return None if x is None or y is None else self._product(x, y, node)

    def _product(self, x: Value, y: Value, node: fx.Node | None) -> Value:
        if x.rank == 1 or y.rank == 1:
            lead = _LETTERS[: max(x.rank, y.rank) - (1 if x.rank == y.rank == 1 else 2)]
            if x.rank == 1 and y.rank == 1:
                equation = "y,y->"
            elif y.rank == 1:
                equation = f"{_LETTERS[: x.rank - 1]}y,y->{_LETTERS[: x.rank - 1]}"
            else:
                equation = f"y,{lead}yz->{lead}z"
            return self.contract(x, y, equation, node)
        count = max(x.rank, y.rank) - 2
        lead = _LETTERS[:count]
        one, two = lead[count - x.rank + 2 :], lead[count - y.rank + 2 :]
        batch = tuple(np.broadcast_shapes(x.shape[:-2], y.shape[:-2]))
        for own, letters in ((x, one), (y, two)):
            wanted = batch[count - len(letters) :] if letters else ()
            if own.shape[:-2] != wanted and letters and any(letter in (two if own is x else one) for letter in letters):
                shape = (*wanted, *own.shape[-2:])
                if own is x:
                    x = self.broadcast(own, shape)
                else:
                    y = self.broadcast(own, shape)
        return self.contract(x, y, f"{one}wy,{two}yz->{lead}wz", node)

    def _addmm(self, node: fx.Node) -> Any:
        bias, x, y = (self._value(given) for given in node.args[:3])
        if bias is None or x is None or y is None:
            return None
        beta, alpha = (float(node.kwargs.get(key, 1)) for key in ("beta", "alpha"))  # type: ignore[arg-type]
        return self.add(bias, self._product(x, y, None), node, (beta, alpha))

    def _einsum(self, node: fx.Node) -> Any:
        equation, factors = str(node.args[0]).replace(" ", ""), [self._value(own) for own in node.args[1]]  # type: ignore[union-attr]
        if len(factors) != 2 or "->" not in equation or any(own is None for own in factors):
            return None
        one, two = factors
        assert one is not None
        assert two is not None
        given, out = equation.split("->")
        first, second = given.split(",")
        if "..." in equation:
            free = [letter for letter in string.ascii_uppercase if letter not in equation]
            counts = [own.rank - len(letters.replace("...", "")) for own, letters in ((one, first), (two, second))]
            if counts[0] and counts[1]:
                return None
            first, second, out = (
                letters.replace("...", "".join(free[: max(counts)])) for letters in (first, second, out)
            )
        if any(len(set(letters)) < len(letters) for letters in (first, second)):
            return None
        return self.contract(one, two, f"{first},{second}->{out}", node)

    def _tensordot(self, node: fx.Node) -> Any:
        x, y = self._value(node.args[0]), self._value(node.args[1])
        if x is None or y is None:
            return None
        one, two = list(_LETTERS[: x.rank]), list(_LETTERS[x.rank : x.rank + y.rank])
        ours, theirs = node.args[2], node.args[3]
        gone = set()
        for i, j in zip(ours, theirs, strict=True):  # type: ignore[arg-type]
            two[j % y.rank] = one[i % x.rank]
            gone.add(one[i % x.rank])
        out = [letter for letter in one + two if letter not in gone]
        return self.contract(x, y, f"{''.join(one)},{''.join(two)}->{''.join(out)}", node)

    def _embedding(self, node: fx.Node) -> Any:
        table, index = self._value(node.args[0]), self._value(node.args[1])
        if table is None or index is None:
            return None
        known = self.constants.known(node.args[1])
        if known is not None and not (table.origin and table.origin[0] in self.system.weights):
            after = (*known.shape, table.shape[1])
            move = Move("other", table.shape, after, lambda t: t[known])
            return self.move(table, move, node)[0]
        lead = _LETTERS[: index.rank]
        return self._by_indicators(index, table, f"{lead}y,yz->{lead}z", node)

    def _convolution(self, node: fx.Node) -> Any:
        x, w = self._value(node.args[0]), self._value(node.args[1])
        name = name_of(node)
        count = places_of(name)
        if x is None or w is None or not x.varies or x.rank != count + 2 or w.varies:
            return None
        transposed = "transpose" in name
        numbers = [argument(node, at, key, default) for at, key, default in (
            (3, "stride", 1), (4, "padding", 0), (5, "output_padding" if transposed else "dilation", 1),
            (6, "groups", 1))]  # fmt: skip
        stride, padding, groups = _listed(numbers[0], count), numbers[1], numbers[3]
        padded = isinstance(padding, str) or any(_listed(padding, count))
        if not transposed and groups == 1 and not padded and set(w.shape[2:]) <= {1} and set(stride) <= {1}:
            flat = self.move(w, regroup(w.shape, w.shape[:2]), w.node)[0]
            spatial = _LETTERS[1 : 1 + count]
            result = self.contract(x, flat, f"a{'y'}{spatial},zy->az{spatial}", node)
        else:
            shape = tuple(node.meta["val"].shape)
            result = self.convolve(x, w, shape, groups=int(groups), padded=padded or transposed,
                                   out=1 if transposed else 0)  # type: ignore[call-overload]  # fmt: skip
        return self._with_bias(result, argument(node, 2, "bias"), node, count)

    def _attention(self, node: fx.Node) -> Any:
        query, key, value = (self._value(given) for given in node.args[:3])
        mask = self._value(argument(node, 3, "attn_mask"))
        if query is None or key is None or value is None:
            return None
        if query.shape[:-3] != key.shape[:-3]:
            return None
        if query.rank > 2 and query.shape[-3] != key.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (self._repeated(own, times) for own in (key, value))
        size = query.rank
        scores = self._product(query, self.move(key, permutation(key.shape, [*range(size - 2), size - 1, size - 2]))[0],
                               None)  # fmt: skip
        if mask is not None and mask.learned:
            scale = argument(node, 6, "scale") or 1 / math.sqrt(query.shape[-1])
            scores = self.add(scores, mask, None, (scale, 1.0))
        weights = self.softmax(scores, scores.rank - 1, log=False)
        return self._product(weights, value, None)

    def _repeated(self, value: Value, times: int) -> Value:
        after = (*value.shape[:-3], value.shape[-3] * times, *value.shape[-2:])
        return self.move(value, Move("other", value.shape, after, lambda t: t.repeat_interleave(times, -3)))[0]

    # Norms, softmaxes, reductions.

    def _layer_norm(self, node: fx.Node) -> Any:
        x = self._value(node.args[0])
        if x is None or not x.varies:
            return None
        axes = range(x.rank - len(node.args[1]), x.rank)  # type: ignore[arg-type]
        rms = name_of(node) == "rms_norm"
        result = self.normalise(x, axes, mean=not rms)
        gain, bias = self._value(argument(node, 2, "weight")), None if rms else argument(node, 3, "bias")
        if gain is not None:
            result = self.multiply(result, gain, None)
        return self._with_bias(result, bias, node)

    def _of_channels(self, value: Value | None, rank: int) -> Value | None:
        """Return a vector of the channels as it stands on the second of some axes."""
        if value is None:
            return None
        return self.move(value, regroup(value.shape, (*value.shape, *[1] * (rank - 2))), value.node)[0]

    def _affine(self, result: Value, gain: Any, bias: Any, node: fx.Node) -> Value:
        by, offset = (self._of_channels(self._value(own), result.rank) for own in (gain, bias))
        if by is not None:
            result = self.multiply(result, by, None)
        return result if offset is None else self.add(result, offset, node)

    def _group_norm(self, node: fx.Node) -> Any:
        x = self._value(node.args[0])
        if x is None or not x.varies:
            return None
        groups: Any = node.args[1]
        parted = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
        own = self.move(x, regroup(x.shape, parted))[0]
        own = self.normalise(own, range(2, len(parted)), mean=True)
        result = self.move(own, regroup(parted, x.shape))[0]
        return self._affine(result, argument(node, 2, "weight"), argument(node, 3, "bias"), node)

    def _own_norm(self, node: fx.Node) -> Any:
        """Instance norm and batch norm: by their own statistics, or by running ones."""
        x = self._value(node.args[0])
        if x is None or not x.varies:
            return None
        gain, bias, mean, variance = (argument(node, at, key) for at, key in (
            (1, "weight"), (2, "bias"), (3, "running_mean"), (4, "running_var")))  # fmt: skip
        if bool(node.args[5]) or mean is None:
            for own in (self._value(mean), self._value(variance)):
                if own is not None:
                    self.fix(own)
            batch = [0] if name_of(node) == "batch_norm" else []
            result = self.normalise(x, [*batch, *range(2, x.rank)], mean=True)
        else:
            self._follow(x, self._of_channels(self._value(mean), x.rank))
            if (own := self._value(variance)) is not None:
                self.fix(own)
            result = Value(x.shape, True, learned=True)
        return self._affine(result, gain, bias, node)

    def _follow(self, x: Value, mean: Value | None) -> None:
        """Demand that a running mean is moved as what it is the mean of."""
        for drift in x.drifts.values():
            self.unknowns.vanish(drift.numbers)
        numbers = self.numbers(x)
        own = None if mean is None else self.numbers(mean)
        if numbers is None or own is None:
            self.unknowns.vanish(numbers)
            self.unknowns.vanish(own)
        else:
            self.unknowns.equate(numbers, own)

    def _softmax(self, node: fx.Node) -> Any:
        x = self._value(node.args[0])
        axis: Any = node.args[1]
        return None if x is None else self.softmax(x, axis % max(x.rank, 1), log="log" in name_of(node))

    def _reduced(self, node: fx.Node) -> Any:
        x = self._value(node.args[0])
        if x is None:
            return None
        axes: Any = argument(node, 1, "dim")
        axes = range(x.rank) if axes in (None, []) else [axes] if isinstance(axes, int) else axes
        keep = len(node.meta["val"].shape) == x.rank
        return self.reduce(x, [axis % x.rank for axis in axes], node, mean=name_of(node) == "mean", keep=keep)

    def _spread(self, node: fx.Node) -> Any:
        """Variances and standard deviations: blind to what is the same along their axes."""
        x = self._value(node.args[0])
        axes: Any = argument(node, 1, "dim")
        if x is None or not x.varies or isinstance(axes, bool):
            return None
        axes = range(x.rank) if axes in (None, []) else [axes] if isinstance(axes, int) else axes
        axes = [axis % x.rank for axis in axes]
        self.alike(x, axes)
        val = node.meta["val"]
        if not isinstance(val, (list, tuple)):
            return Value(tuple(val.shape), True, learned=x.learned)
        keep = len(val[1].shape) == x.rank
        return [Value(tuple(val[0].shape), True, learned=x.learned), self.reduce(x, axes, None, mean=True, keep=keep)]

    def _pooled(self, node: fx.Node) -> Any:
        """Means, maxima and interpolations over what is the same everywhere."""
        x, name = self._value(node.args[0]), name_of(node)
        if x is None or not x.varies:
            return None
        count = x.rank - 2 if "upsample" in name else int(name[-2]) if name[-2].isdigit() else 0
        axes = range(x.rank - count, x.rank)
        val = node.meta["val"]
        shape = tuple((val[0] if isinstance(val, (list, tuple)) else val).shape)
        if "avg_pool" in name and argument(node, 6, "divisor_override") is not None:
            return None
        linear = "max" not in name
        padding = argument(node, 3, "padding", 0) if "avg_pool" in name and "adaptive" not in name else 0
        if linear and any(_listed(padding, count)):
            linear = False
            self.fix(x)
        if isinstance(val, (list, tuple)):
            return None
        result = Value(shape, True, learned=x.learned)
        if x.relation is not None and linear and x.relation.axes.isdisjoint(axes):
            result.relation = x.relation
        if (numbers := self.numbers(x)) is not None:
            result.translation = self._equal(numbers, axes)
        for drift in self._living(x).values():
            if not linear or {axis - 1 for axis in varying(drift.numbers) if axis} & set(axes):
                self.unknowns.vanish(drift.numbers)
                continue
            sizes = [shape[axis] if axis in axes else size for axis, size in enumerate(drift.function.shape)]
            result.drifts[self.system.source()] = Drift(places(sizes), drift.numbers)
        return result

    # Choices.

    def _filled(self, node: fx.Node) -> Any:
        """Values that are put in the place of others."""
        x, mask, number = self._value(node.args[0]), self._value(node.args[1]), node.args[2]
        if x is None or mask is None:
            return None
        if isinstance(number, fx.Node):
            number = self.constants.number(number)
            if number is None:
                return None
        shape = tuple(node.meta["val"].shape)
        if isinstance(number, (int, float)) and number < _VANISHED and shape == x.shape:
            return x.with_(relation=None, origin=None)  # nothing changes what vanishes in a softmax
        return self._by_place(x, None, node.args[1], shape)

    def _where(self, node: fx.Node) -> Any:
        if len(node.args) < 3:
            return None
        condition, one, two = node.args[:3]
        shape = tuple(node.meta["val"].shape)
        x, y = self._value(one), self._value(two)
        for own, other in ((x, two), (y, one)):
            number = other if isinstance(other, (int, float)) else None
            if isinstance(other, fx.Node):
                number = self.constants.number(other)
            if own is not None and number is not None and number < _VANISHED and own.shape == shape:
                return own.with_(relation=None, origin=None)
        return self._by_place(y, x, condition, shape)

    def _by_place(self, x: Value | None, y: Value | None, condition: Any, shape: Shape) -> Value | None:
        """Return x where a condition is false, and y where it is true; None for numbers."""
        mask = self.constants.known(condition)
        if mask is None:
            chosen = self._value(condition)
            if chosen is None or chosen.learned:
                return None
            anywhere = Value(chosen.shape, True)  # 1 where it holds, and 0 elsewhere; another time the other way round
            parts = [self.broadcast(self.multiply(own, anywhere), shape) for own in (x, y) if own is not None]
            return self.add(*parts).with_(relation=None) if len(parts) == 2 else parts[0].with_(relation=None)
        rank, mask = len(shape), mask.bool()
        mask = wide(mask, rank)
        varies = any(value is not None and value.varies for value in (x, y))
        result = Value(shape, varies, learned=True)
        terms = []
        for value, gone in ((x, mask), (y, ~mask)):
            if value is None:
                continue
            own = self.broadcast(value, shape)
            self._unread(value)
            if (numbers := self.numbers(own)) is not None:
                whole = np.broadcast_shapes(numbers.shape, gone.shape)
                terms.append(numbers.expand(whole).masked_fill(gone.expand(whole), 0))
            for key, drift in self._living(own).items():
                whole = np.broadcast_shapes(drift.numbers.shape, gone.shape)
                key = self.system.source() if key in result.drifts else key
                kept = drift.numbers.expand(whole).masked_fill(gone.expand(whole), 0)
                result.drifts[key] = Drift(drift.function, kept)
        if terms:
            whole = np.broadcast_shapes(*(own.shape for own in terms))
            result.translation = sum((own.expand(whole) for own in terms), start=torch.zeros(whole, dtype=torch.int64))
        return result

    def _cat(self, node: fx.Node) -> Any:
        parts: Any = node.args[0]
        found = [self._value(part) for part in parts] if isinstance(parts, (list, tuple)) else []
        shape = tuple(node.meta["val"].shape)
        values = [value for value in found if value is not None and 0 not in value.shape]
        rank = len(shape)
        axis: Any = argument(node, 1, "dim", 0)
        if name_of(node) == "stack":
            axis = axis % rank
            values = [
                self.move(v, regroup(v.shape, (*v.shape[:axis], 1, *v.shape[axis:])), v.node)[0] for v in values
            ]  # fmt: skip
        axis = axis % rank
        if any(value.rank != rank for value in values):
            return None
        for value in values:
            self._unread(value)
        result = Value(shape, any(value.varies for value in values), learned=any(value.learned for value in values))
        result.translation = self._joined_arrays([self.numbers(value) for value in values], values, axis, 0)
        keys = dict.fromkeys(key for value in values for key in self._living(value))
        for key in keys:
            own = [self._living(value).get(key) for value in values]
            present = [drift for drift in own if drift is not None]
            patterns = present[0].numbers.shape[0]
            if any(drift.numbers.shape[0] != patterns for drift in present):
                for drift in present:
                    self.unknowns.vanish(drift.numbers)
                continue
            numbers = self._joined_arrays([None if d is None else d.numbers for d in own], values, axis, 1)
            functions: Tensor | None = present[0].function
            if any(
                d.function.shape[axis] > 1 or not self._same(d.function, present[0].function, shape) for d in present
            ):
                functions = self._joined_arrays([None if d is None else d.function for d in own], values, axis, 0)
            if numbers is not None and functions is not None:
                result.drifts[key] = Drift(functions, numbers)
        return result

    @staticmethod
    def _joined_arrays(arrays: Sequence[Tensor | None], values: Sequence[Value], axis: int, lead: int) -> Tensor | None:
        """Return thin arrays one behind the other, 0 where there is none."""
        present = [array for array in arrays if array is not None]
        if not present:
            return None
        others = list(np.broadcast_shapes(*(
            tuple(1 if at == lead + axis else size for at, size in enumerate(array.shape)) for array in present
        )))  # fmt: skip
        parts = []
        for array, value in zip(arrays, values, strict=True):
            whole = list(others)
            whole[lead + axis] = value.shape[axis]
            parts.append(torch.zeros(whole, dtype=torch.int64) if array is None else array.expand(whole))
        joined = torch.cat(parts, lead + axis)
        first = joined.narrow(lead + axis, 0, 1)
        return first if bool((joined == first).all()) else joined

    def _step(self, node: fx.Node) -> Any:
        """A step of a sequence."""
        x, axis = self._value(node.args[0]), node.args[1]
        if x is None or not isinstance(axis, int):
            return None
        self.alike(x, [axis % x.rank])
        for drift in self._living(x).values():
            self.unknowns.vanish(drift.numbers)
        move = Move("cut", x.shape, (), lambda t: t.select(axis, 0), axis=axis % x.rank, drops=True)
        return self.move(x.with_(drifts={}), move)[0]


def _listed(given: Any, count: int) -> list[int]:
    return list(given) if isinstance(given, (list, tuple)) else [given] * max(count, 1)


_RULES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(operations(Trait.JOIN), Interpreter._added),
    **dict.fromkeys(("mul", "multiply"), Interpreter._mul),
    **dict.fromkeys(("div", "true_divide", "divide"), Interpreter._div),
    "neg": Interpreter._neg,
    "linear": Interpreter._linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), Interpreter._matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), Interpreter._addmm),
    "einsum": Interpreter._einsum,
    "tensordot": Interpreter._tensordot,
    "embedding": Interpreter._embedding,
    **dict.fromkeys(operations(Trait.CONVOLVE), Interpreter._convolution),
    "scaled_dot_product_attention": Interpreter._attention,
    **dict.fromkeys(("layer_norm", "rms_norm"), Interpreter._layer_norm),
    "group_norm": Interpreter._group_norm,
    **dict.fromkeys(("instance_norm", "batch_norm"), Interpreter._own_norm),
    **dict.fromkeys(operations(Trait.SOFTMAX), Interpreter._softmax),
    **dict.fromkeys(operations(Trait.SUM), Interpreter._reduced),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), Interpreter._spread),
    **dict.fromkeys(operations(Trait.POOL | Trait.MAX_POOL | Trait.RESIZE | Trait.NEAREST), Interpreter._pooled),
    "masked_fill": Interpreter._filled,
    "where": Interpreter._where,
    **dict.fromkeys(operations(Trait.CAT), Interpreter._cat),
    "any_step": Interpreter._step,
    "lightning_sym::any_step": Interpreter._step,
}
# What does not see all of weights.
_BLIND = operations(Trait.SOFTMAX) | {"layer_norm", "group_norm"}
