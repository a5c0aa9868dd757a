"""Norms, softmaxes, reductions and choices: map each operation to a method of the algebra."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.affine.algebra import regroup
from lightning_sym.symmetry.tracing.affine.moves import Move, joined_relation
from lightning_sym.symmetry.tracing.affine.products import Products
from lightning_sym.symmetry.tracing.affine.values import Drift, Shape, Value, places, varying, wide
from lightning_sym.symmetry.tracing.graph.nodes import HIDES_ROWS, argument, by_axis, reduced
from lightning_sym.symmetry.tracing.graph.operations import name_of

_VANISHED = -1e30  # replaces values that a softmax must ignore


class Layers(Products):
    """Operations of a graph that are norms, softmaxes, reductions and choices."""

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
        """Reshape a vector of channels for the second of ``rank`` axes."""
        if value is None:
            return None
        return self.move(value, regroup(value.shape, (*value.shape, *[1] * (rank - 2))), value.node)[0]

    def _affine(self, result: Value, gain: Any, bias: Any, node: fx.Node) -> Value:
        by, offset = (self._of_channels(self._value(own), result.rank) for own in (gain, bias))
        if by is not None:
            result = self.multiply(result, by, None)
        return result if offset is None else self.add(result, offset, node)

    def _batch_norm(self, node: fx.Node) -> Any:
        """Normalise by batch statistics, or by running ones."""
        x = self._value(node.args[0])
        if x is None or not x.varies:
            return None
        gain, bias, mean, variance = (argument(node, at, key) for at, key in (
            (1, "weight"), (2, "bias"), (3, "running_mean"), (4, "running_var")))  # fmt: skip
        if bool(node.args[5]) or mean is None:
            for own in (self._value(mean), self._value(variance)):
                if own is not None:
                    self.fix(own)
            result = self.normalise(x, [0, *range(2, x.rank)], mean=True)
        else:
            self._follow(x, self._of_channels(self._value(mean), x.rank))
            if (own := self._value(variance)) is not None:
                self.fix(own)
            result = Value(x.shape, True, learned=True)
        return self._affine(result, gain, bias, node)

    def _follow(self, x: Value, mean: Value | None) -> None:
        """Require that a running mean has the same translation as the value that it is the mean of."""
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
        if x is None:
            return None
        result = self.softmax(x, axis % max(x.rank, 1), log="log" in name_of(node))
        return result.with_(relation=None) if HIDES_ROWS in node.meta else result

    def _reduced(self, node: fx.Node) -> Any:
        x = self._value(node.args[0])
        if x is None:
            return None
        keep = len(node.meta["val"].shape) == x.rank
        return self.reduce(x, sorted(reduced(node, x.rank)), node, mean=name_of(node) == "mean", keep=keep)

    def _extremum(self, node: fx.Node) -> Any:
        """Reduce to the largest element or log-sum-exp along axes: equal translations of all elements pass."""
        x = self._value(node.args[0])
        if x is None or not x.varies:
            return None
        self.alike(x, axes := sorted(reduced(node, x.rank)))
        keep = len(node.meta["val"].shape) == x.rank
        return self.reduce(x.with_(relation=None), axes, None, mean=True, keep=keep)

    def _ordered(self, node: fx.Node) -> Any:
        """Sort elements along an axis, or select the largest: equal translations of all elements pass."""
        x = self._value(node.args[0])
        if x is None or not x.varies:
            return None
        axis: Any = argument(node, 2 if name_of(node) == "topk" else 1, "dim", -1)
        if not isinstance(axis, int):
            return None
        self.alike(x, [axis % x.rank])
        made = node.meta["val"]
        own = x.with_(shape=tuple((made if isinstance(made, Tensor) else made[0]).shape), relation=None, origin=None)
        return own if isinstance(made, Tensor) else [own, Value(tuple(made[1].shape), True)]

    def _larger(self, node: fx.Node) -> Any:
        """Take the larger or smaller of two values: equal translations of both pass."""
        x, y = (self._value(given) for given in node.args[:2])
        if x is None or y is None:
            return None
        shape = tuple(node.meta["val"].shape)
        x, y = self.broadcast(x, shape), self.broadcast(y, shape)
        for drift in (*x.drifts.values(), *y.drifts.values()):
            self.unknowns.vanish(drift.numbers)
        one, two = self.numbers(x), self.numbers(y)
        result = Value(shape, True, learned=x.learned or y.learned)
        if one is None or two is None:
            self.unknowns.vanish(one)
            self.unknowns.vanish(two)
        else:
            self.unknowns.equate(one, two)
            result.translation = one if one.numel() > two.numel() else two
        return result

    def _spread(self, node: fx.Node) -> Any:
        """Compute variances and standard deviations, which ignore equal translations along their axes."""
        x = self._value(node.args[0])
        if x is None or not x.varies or isinstance(argument(node, 1, "dim"), bool):
            return None
        self.alike(x, sorted(reduced(node, x.rank)))
        return Value(tuple(node.meta["val"].shape), True, learned=x.learned)

    def _pooled(self, node: fx.Node) -> Any:
        """Pool or interpolate; translations must be constant over the pooled places."""
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
        if linear and any(by_axis(padding, count)) and argument(node, 5, "count_include_pad", True):
            linear = False
            self.fix(x)
        result = Value(shape, True, learned=x.learned)
        if x.relation is not None and linear and x.relation.axes.isdisjoint(axes):
            result.relation = x.relation
        self.follow_lengths(x.shape[len(x.shape) - count :], shape[len(shape) - count :])
        if (numbers := self.numbers(x)) is not None:
            result.translation = self._equal(numbers, axes)
        for drift in self._living(x).values():
            if not linear or {axis - 1 for axis in varying(drift.numbers) if axis} & set(axes):
                self.unknowns.vanish(drift.numbers)
                continue
            sizes = [shape[axis] if axis in axes else size for axis, size in enumerate(drift.function.shape)]
            result.drifts[self.system.source()] = Drift(places(sizes), drift.numbers)
        if isinstance(val, (list, tuple)):  # of maxima and their indices
            return [result, *(Value(tuple(own.shape), True, learned=x.learned) for own in val[1:])]
        return result

    # Choices.

    def _filled(self, node: fx.Node) -> Any:
        """Replace values at masked positions."""
        x, mask, number = self._value(node.args[0]), self._value(node.args[1]), node.args[2]
        if x is None or mask is None:
            return None
        shape = tuple(node.meta["val"].shape)
        if isinstance(number, (int, float)) and number < _VANISHED and shape == x.shape:
            return self._hidden(x, node.args[1])
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
                return self._hidden(own, condition)
        return self._by_place(y, x, condition, shape)

    def _hidden(self, value: Value, condition: Any) -> Value:
        """Return a value of which a mask hides elements; a softmax ignores changes of these."""
        varies = value.varies or self.constants.known(condition) is None
        return value.with_(relation=None, origin=None, varies=varies)

    def _by_place(self, x: Value | None, y: Value | None, condition: Any, shape: Shape) -> Value | None:
        """Return x where a condition is false, and y where it is true; None represents a number."""
        mask = self.constants.known(condition)
        if mask is None:
            chosen = self._value(condition)
            if chosen is None or chosen.learned:
                return None
            anywhere = Value(chosen.shape, True)  # 1 where the condition holds, else 0; or the opposite
            if x is not None and y is not None:  # x + m (y - x)
                difference = self.multiply(self.add(y, x, by=(1.0, -1.0)), anywhere)
                return self.broadcast(self.add(x, difference), shape).with_(relation=None)
            one = x if x is not None else y
            product = anywhere if one is None else self.multiply(one, anywhere)
            return self.broadcast(product, shape).with_(relation=None)
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
        axis = axis % rank
        if any(value.rank != rank for value in values):
            return None
        for value in values:
            self._unread(value)
        result = Value(shape, any(value.varies for value in values), learned=any(value.learned for value in values))
        result = result.with_(relation=joined_relation(values, axis))
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
        """Concatenate thin arrays, with 0 for missing ones."""
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
        """Take a step of a sequence."""
        x, axis = self._value(node.args[0]), node.args[1]
        if x is None or not isinstance(axis, int):
            return None
        self.alike(x, [axis % x.rank])
        for drift in self._living(x).values():
            self.unknowns.vanish(drift.numbers)
        left = tuple(size for at, size in enumerate(x.shape) if at != axis % x.rank)
        move = Move("cut", x.shape, left, lambda t: t.select(axis, 0), axis=axis % x.rank, drops=True)
        return self.move(x.with_(drifts={}), move)[0]
