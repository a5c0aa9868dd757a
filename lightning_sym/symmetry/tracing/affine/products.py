"""Sums, products and contractions: map each operation to a method of the algebra."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_sym.symmetry.tracing.affine.algebra import regroup
from lightning_sym.symmetry.tracing.affine.contractions import Contractions
from lightning_sym.symmetry.tracing.affine.letters import Sum, aligned
from lightning_sym.symmetry.tracing.affine.moves import Move
from lightning_sym.symmetry.tracing.affine.reading import Constants, index_of, indexed_by
from lightning_sym.symmetry.tracing.affine.values import Coefficient, Lookup, Value, places
from lightning_sym.symmetry.tracing.graph.nodes import argument, by_axis, equation_of, letters_of
from lightning_sym.symmetry.tracing.graph.operations import name_of, spatial_axes_of

_LETTERS = string.ascii_letters


class Products(Contractions):
    """Operations of a graph that are sums, products and contractions.

    Attributes:
        values: The value of each node.
        constants: The constants of the graph.
        hot: One-hot vectors, with their indices.
    """

    values: dict[fx.Node, Any]
    constants: Constants
    hot: dict[Any, Value]

    def _value(self, given: Any) -> Value | None:
        """Return the value of an argument; None for a number."""
        found = self.values.get(given) if isinstance(given, fx.Node) else None
        return found if isinstance(found, Value) else None

    def _looked_up(self, node: fx.Node, name: str, table: Value) -> Value | None:
        """Return rows at an input-dependent index, as a contraction with one-hot vectors."""
        if name == "gather":
            return self._gathered(node, table)
        index, axis = index_of(node, name)
        at = self._value(index)
        if at is None or not isinstance(axis, int) or index.meta["val"].dtype == torch.bool:  # type: ignore[union-attr]
            return None
        return self._rows_at(index, table, node, axis % table.rank)

    def _gathered(self, node: fx.Node, value: Value) -> Value | None:
        """Return entries at an index along one axis; all other axes are those of the index."""
        axis: Any = node.args[1]
        axis, index = axis % value.rank, node.args[2]
        shape, size = tuple(index.meta["val"].shape), value.shape[axis]  # type: ignore[union-attr]
        if self._value(index) is None or (*shape[:axis], size, *shape[axis + 1 :]) != value.shape:
            return None
        hot, letters = Value((*shape, size), True), _LETTERS[: value.rank]
        hot.relation = self._over(hot.shape, [hot.rank - 1], 1.0)
        out = letters.replace(letters[axis], _LETTERS[value.rank])
        return self.contract(hot, value, f"{out}{letters[axis]},{letters}->{out}", node)

    def _rows_at(self, index: fx.Node, table: Value, node: fx.Node, axis: int = 0) -> Value:
        """Return rows of a table at an index, which takes the place of the axis of the rows."""
        root, functions = indexed_by(index, self.constants)
        shape, size = tuple(index.meta["val"].shape), table.shape[axis]
        source = self.source_of("rows", root, functions.numpy().tobytes(), size)
        hot = Value((*shape, size), True)
        hot.relation = self._over(hot.shape, [hot.rank - 1], 1.0)
        rows = Lookup(
            None, axis, source, functions.unsqueeze(-1), torch.arange(size).reshape((*[1] * len(shape), size))
        )
        hot.lookup = rows
        hot = self.hot.setdefault((source, hot.shape), hot)
        letters, own = _LETTERS[: table.rank], _LETTERS[table.rank : table.rank + len(shape)]
        out = letters[:axis] + own + letters[axis + 1 :]
        result = self.contract(hot, table, f"{own}{letters[axis]},{letters}->{out}", node)
        if not table.varies:
            others = [count for at, count in enumerate(table.shape) if at != axis]
            at = aligned(places(others), letters.replace(letters[axis], ""), out)
            result.lookup = replace(rows, table=table, functions=aligned(rows.functions[..., 0], own, out), at=at)
        return result

    # Sums and products.

    def _added(self, node: fx.Node) -> Any:
        alpha: Any = node.kwargs.get("alpha", 1)
        if len(node.args) < 2 or not isinstance(alpha, (int, float)):
            return None
        name = name_of(node)
        by = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
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

    def multiply(self, one: Value, two: Value, node: Any = None, *, divide: bool = False) -> Value:
        """Return the product or quotient of two values; translations pass rows of tables as in contractions."""
        if not divide and one.varies and two.varies and (one.lookup or two.lookup):
            shape = tuple(np.broadcast_shapes(one.shape, two.shape))
            out, sizes = _LETTERS[: len(shape)], dict(zip(_LETTERS, shape, strict=False))
            (x, first), (y, second) = (self._shared(own, out[len(out) - own.rank :], out, sizes) for own in (one, two))
            by = Sum(first, second, out)
            if self._on_table(x, y, by) is not None or self._on_table(y, x, by.turned) is not None:
                return self.contract(x, y, by.equation, node)
        return super().multiply(one, two, node, divide=divide)

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
        if one is None or two is None:
            return None
        result = self.multiply(one, two, node, divide=True)
        total: Any = node.args[1]
        if name_of(total) == "sum" and total.args[0] is node.args[0] and one.varies and two.rank == one.rank:
            axes = [axis for axis, (own, left) in enumerate(zip(one.shape, two.shape, strict=True)) if own > left]
            result.relation = self._over(one.shape, axes, 1.0) if axes else None  # shares
        return result

    def _neg(self, node: fx.Node) -> Any:
        value = self._value(node.args[0])
        return None if value is None else self.scale(value, -1.0, node)

    def _rotary(self, node: fx.Node) -> Any:
        """Sum coordinates times position-dependent numbers, which count as inputs."""
        x, partner = self._value(node.args[0]), torch.tensor(node.args[3])
        if x is None or not x.varies:
            return None
        move = Move("cut", x.shape, x.shape, lambda t: t.index_select(-1, partner.to(t.device)), axis=x.rank - 1)
        (partners,) = self.move(x, move)
        one, two = (
            self.multiply(own, Value(tuple(table.meta["val"].shape), True))  # type: ignore[union-attr]
            for own, table in zip((x, partners), node.args[1:3], strict=True)
        )
        return self.add(one, two, node)

    # Contractions.

    def _contracted(self, node: fx.Node) -> Any:
        given: Any = node.args[1] if name_of(node) == "einsum" else node.args[:2]
        equation, values = equation_of(node), [self._value(own) for own in given]
        if equation is None or None in values:
            return None
        terms, out = letters_of(equation)[:2], letters_of(equation)[2]
        sizes: dict[str, int] = {}
        for term, value in zip(terms, values, strict=True):
            sizes |= {letter: max(size, sizes.get(letter, 1)) for letter, size in zip(term, value.shape, strict=True)}  # type: ignore[union-attr]
        (x, one), (y, two) = (
            self._shared(value, term, out, sizes)  # type: ignore[arg-type]
            for value, term in zip(values, terms, strict=True)
        )
        if self._are_normed(x, y, one, two):
            where = self.constants.capture.modules.get(node, "forward")
            self.system.blind[
                f"{name_of(node)} in {where}: multiplies the outputs of two layer norms: their gains, biases and "
                "inputs may change together, in one dimension, two with biases, that depend on the weights"
            ] = None
        result = self.contract(x, y, f"{one},{two}->{out}", node)
        return self._with_bias(result, argument(node, 2, "bias"), node) if name_of(node) == "linear" else result

    def _shared(self, value: Value, term: str, out: str, sizes: Mapping[str, int]) -> tuple[Value, str]:
        """Return a factor and its letters without those of the result along which it is the same at all places."""
        whole = tuple(sizes[letter] for letter in term)
        alike = {letter for letter, own, size in zip(term, value.shape, whole, strict=True) if own < size}
        kept = "".join(letter for letter in term if letter not in alike or letter not in out)
        if kept == term:
            return self.broadcast(value, whole), term
        own = dict(zip(term, value.shape, strict=True))
        value = self.move(value, regroup(value.shape, tuple(own[letter] for letter in kept)), value.node)[0]
        return self.broadcast(value, tuple(sizes[letter] for letter in kept)), kept

    @staticmethod
    def _are_normed(one: Value, two: Value, first: str, second: str) -> bool:
        """Whether a contraction sums over units that two norms produced, with at least one gain after them."""
        found = []
        for value, own, other in ((one, first, second), (two, second, first)):
            axes = frozenset(own.index(letter) for letter in own if letter in other)
            found.append(value.varies and value.relation is not None and value.relation.axes <= axes)
        gained = any(value.relation is not None and value.relation.coefficient.items for value in (one, two))
        return all(found) and gained

    def _with_bias(self, result: Value, bias: Any, node: fx.Node, after: int = 0) -> Value:
        own = self._value(bias)
        if own is None:
            return result
        if after:
            own = self.move(own, regroup(own.shape, (*own.shape, *[1] * after)), own.node)[0]
        return self.add(result, own, node)

    def _embedding(self, node: fx.Node) -> Any:
        table, index = self._value(node.args[0]), self._value(node.args[1])
        if table is None or index is None:
            return None
        known = self.constants.known(node.args[1])
        if known is not None and not (table.origin and table.origin[0] in self.system.weights):
            after = (*known.shape, table.shape[1])
            move = Move("other", table.shape, after, lambda t: t[known])
            return self.move(table, move, node)[0]
        return self._rows_at(node.args[1], table, node)  # type: ignore[arg-type]

    def _convolution(self, node: fx.Node) -> Any:
        x, w = self._value(node.args[0]), self._value(node.args[1])
        name = name_of(node)
        count = spatial_axes_of(name)
        if x is None or w is None or not x.varies or x.rank != count + 2 or w.varies:
            return None
        transposed = "transpose" in name
        numbers = [argument(node, at, key, default) for at, key, default in (
            (3, "stride", 1), (4, "padding", 0), (5, "output_padding" if transposed else "dilation", 1),
            (6, "groups", 1))]  # fmt: skip
        stride, padding, groups = by_axis(numbers[0], count), numbers[1], numbers[3]
        padded = isinstance(padding, str) or any(by_axis(padding, count))
        if not transposed and groups == 1 and not padded and set(w.shape[2:]) <= {1} and set(stride) <= {1}:
            flat = self.move(w, regroup(w.shape, w.shape[:2]), w.node)[0]
            spatial = _LETTERS[1 : 1 + count]
            result = self.contract(x, flat, f"a{'y'}{spatial},zy->az{spatial}", node)
        else:
            shape = tuple(node.meta["val"].shape)
            result = self.convolve(x, w, shape, groups=int(groups), padded=padded or transposed,
                                   out=1 if transposed else 0, how=(name, str(numbers)))  # type: ignore[call-overload]  # fmt: skip
        return self._with_bias(result, argument(node, 2, "bias"), node, count)
