"""Operations on values with translations, drifts and relations: one method for each trait of operations."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.affine.moves import Move, groups_of, spread
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.values import (
    ONE,
    Coefficient,
    Drift,
    Lookup,
    Relation,
    Shape,
    Total,
    Value,
    places,
    varying,
    wide,
)

_MOST = 2**16  # maximal entries of drifts that are told apart by place


def regroup(before: Shape, after: Shape) -> Move:
    """Return the move of a reshape."""
    return Move("groups", before, after, lambda t: t.reshape(after), groups_of(before, after))


class Algebra:
    """Operations on values.

    Args:
        system: Receives the equations.
    """

    def __init__(self, system: System) -> None:
        self.system, self.unknowns = system, system.unknowns
        self.contracted: set[str] = set()  # the weights that the current operation contracts
        self._sources: dict[Any, int] = {}

    def numbers(self, value: Value) -> Tensor | None:
        """Return the unknown translation of a value; thin. None for none."""
        if value.more:
            terms = [(own, ONE) for own in (value.translation, *value.more) if own is not None]
            value.translation, value.more = self.unknowns.combined(terms), ()
        value.translation = self.unknowns.living(value.translation)
        return value.translation

    def source_of(self, *key: Any) -> int:
        """Return the drift source of functions of the input that a key describes."""
        if key not in self._sources:
            self._sources[key] = self.system.source()
        return self._sources[key]

    def drift(self, result: Value, key: int, drift: Drift) -> None:
        """Add a drift to those of a value."""
        same = result.drifts.get(key)
        if same is not None and not self._same(same.function, drift.function, result.shape):
            key, same = self.system.source(), None
        made = drift if same is None else self._sum_of([(same, 1.0), (drift, 1.0)])
        result.drifts.pop(key, None)
        if made is not None:
            result.drifts[key] = made

    # Constraints.

    def fix(self, value: Value) -> None:
        """Require that nothing is added to a value."""
        self.unknowns.vanish(self.numbers(value))
        for drift in value.drifts.values():
            self.unknowns.vanish(drift.numbers)
        if value.origin is not None and value.origin[0] in self.system.weights:
            self.system.fixed.add(value.origin[0])

    def alike(self, value: Value, axes: Collection[int], *, seen: bool = True) -> None:
        """Require that translations and drifts of a value are constant along some axes.

        Args:
            value: The value.
            axes: The axes.
            seen: Whether drifts with functions that vary along these axes must vanish.
        """
        parts = [own for own in (value.translation, *value.more) if own is not None]
        changing = [own for own in parts if varying(own) & set(axes)]
        if changing:
            numbers = self.unknowns.combined([(own, ONE) for own in changing])
            others = [own for own in parts if not varying(own) & set(axes)]
            parts = others if numbers is None else [*others, self._equal(numbers, axes)]
            value.translation, value.more = (parts[0], tuple(parts[1:])) if parts else (None, ())
        for key, drift in self._living(value).items():
            if seen and varying(drift.function) & set(axes):
                self.unknowns.vanish(drift.numbers)
                del value.drifts[key]
            else:
                value.drifts[key] = Drift(drift.function, self._equal(drift.numbers, [axis + 1 for axis in axes]))

    def nonlinear(self, values: Sequence[Value], shape: Shape, node: Any) -> Value:
        """Apply an operation that allows no change of its arguments."""
        for value in values:
            self.fix(value)
        varies = any(value.varies for value in values)
        return Value(shape, varies, None if varies else node, learned=any(value.learned for value in values))

    def _equal(self, numbers: Tensor, axes: Collection[int]) -> Tensor:
        """Require that unknowns are constant along axes; return them with size 1 there."""
        first = numbers
        for axis in axes:
            first = first.narrow(axis, 0, 1)
        if first.shape != numbers.shape:
            self.unknowns.equate(numbers, first)
        return first

    def follow_lengths(self, before: Shape, after: Shape) -> None:
        """Record that result sizes depend on the input's lengths if the source sizes do."""
        self.system.lengths |= {new for old, new in zip(before, after, strict=True) if old in self.system.lengths}

    # Moves.

    def move(self, value: Value, move: Move, node: Any = None) -> list[Value]:
        """Move a value; return one value per result."""

        def moved(array: Tensor, lead: int = 0) -> list[Tensor]:
            result = move(array, lead)
            return result if isinstance(result, list) else [result]

        if move.alone and (move.before[move.axis] in self.system.lengths or move.cut_to(self.system.lengths)):
            self.system.lengths |= move.taken
        if (axis := self._cut_to_length(value, move)) is not None:
            self.alike(value, [axis], seen=False)
        summands = [own for own in (value.translation, *value.more) if own is not None]
        translations = [moved(own) for part in summands if (own := self.unknowns.living(part)) is not None]
        drifts = {key: (moved(own.function), moved(own.numbers, 1)) for key, own in self._living(value).items()}
        origins = None if value.origin is None else [moved(own) for own in value.origin[1]]
        relation = move.relation(value.relation)
        padded = move.kind == "other" and any(a > b for a, b in zip(move.after, move.before, strict=False))
        lookup = None if padded or value.lookup is None else value.lookup
        rows = [] if lookup is None else list(zip(moved(lookup.functions), moved(lookup.at), strict=True))
        probe = moved(torch.zeros((1,) * value.rank, dtype=torch.int64)) if move.kind != "other" else None
        count = len(probe) if probe is not None else len(moved(places(value.shape)))
        shapes = self._shapes(move, value.shape)
        root, moves, factor = value.root
        return [
            Value(
                shapes[index],
                value.varies,
                node if count == 1 else None,
                translations[0][index] if translations else None,
                {key: Drift(functions[index], numbers[index]) for key, (functions, numbers) in drifts.items()},
                relation,
                None if origins is None or value.origin is None or padded
                else (value.origin[0], tuple(own[index] for own in origins)),
                value.learned,
                tuple(own[index] for own in translations[1:]),
                base=(root, (*moves, (move, index)), factor) if value.varies else None,
                lookup=lookup and replace(lookup, functions=rows[index][0], at=rows[index][1]),
            )
            for index in range(count)
        ]  # fmt: skip

    def _cut_to_length(self, value: Value, move: Move) -> int | None:
        """Return the axis of a part as long as an input, which longer inputs extend; None if there is none."""
        if move.kind != "cut" or move.grows or not value.moves:
            return None
        if not value.varies and value.shape[move.axis] in self.system.lengths:
            return None
        if value.origin is not None:  # partial reads of parameters are known in advance
            return None
        return move.axis if move.cut_to(self.system.lengths) else None

    @staticmethod
    def _shapes(move: Move, shape: Shape) -> list[Shape]:
        if move.kind != "cut":
            return [move.after]
        result = move.run(torch.empty(shape, device="meta"))
        return [tuple(own.shape) for own in result] if isinstance(result, (list, tuple)) else [tuple(result.shape)]

    def _living(self, value: Value) -> dict[int, Drift]:
        found = {}
        for key, drift in value.drifts.items():
            if (numbers := self.unknowns.living(drift.numbers)) is not None:
                found[key] = Drift(drift.function, numbers)
        return found

    def broadcast(self, value: Value, shape: Shape) -> Value:
        """Broadcast a value to a shape."""
        if value.shape == shape:
            return value
        move = Move("expand", value.shape, shape, lambda t: t.expand(shape))
        (moved,) = self.move(value, move, value.node)
        if value.node is not None and value.origin is None:
            moved = moved.with_(origin=None)
        return moved

    # Sums.

    def add(self, one: Value, two: Value, node: Any = None, by: Sequence[float] = (1.0, 1.0)) -> Value:
        """Return the sum of multiples of two values."""
        shape = tuple(np.broadcast_shapes(one.shape, two.shape))
        parts = [self.broadcast(value, shape) for value in (one, two)]
        drifts: dict[int, list[tuple[Drift, float]]] = {}
        for part, factor in zip(parts, by, strict=True):
            for key, drift in self._living(part).items():
                same = drifts.get(key)
                if same and not self._same(same[0][0].function, drift.function, shape):
                    key = self.system.source()
                drifts.setdefault(key, []).append((drift, factor))
        varies = one.varies or two.varies
        result = Value(
            shape,
            varies,
            None if varies else node,
            None,
            {key: own for key, found in drifts.items() if (own := self._sum_of(found)) is not None},
            learned=one.learned or two.learned,
        )
        found = self._summands(parts, by)
        result.translation, result.more = (found[0], tuple(found[1:])) if found else (None, ())
        sides = ((one, two, by[0], by[1]), (two, one, by[1], by[0]))
        for first, second, factor, by_other in sides:
            if first.relation is not None and first.shape == shape and not second.varies and factor:
                result.relation = self._offset(first.relation, second, shape, factor, by_other)
        if one.varies and two.varies and one.shape == two.shape == shape and all(by):
            result.relation = _both_sums([part.relation for part in parts], by)
        return result

    def _summands(self, values: Sequence[Value], by: Sequence[float]) -> list[Tensor]:
        """Return the translation of a sum of multiples, with one summand per set of varying axes."""
        terms: dict[Shape, list[tuple[Tensor, Coefficient]]] = {}
        for value, factor in zip(values, by, strict=True):
            for own in (value.translation, *value.more):
                if own is not None:
                    terms.setdefault(tuple(own.shape), []).append((own, Coefficient(factor)))
        return [own for each in terms.values() if (own := self.unknowns.combined(each)) is not None]

    @staticmethod
    def _same(one: Tensor, two: Tensor, shape: Shape) -> bool:
        return one.shape == two.shape and torch.equal(one, two)

    def _sum_of(self, found: list[tuple[Drift, float]]) -> Drift | None:
        patterns = {drift.numbers.shape[0] for drift, _ in found}
        if len(patterns) > 1:
            for drift, _ in found:
                self.unknowns.vanish(drift.numbers)
            return None
        numbers = self.unknowns.combined([(drift.numbers, Coefficient(by)) for drift, by in found], 1)
        return None if numbers is None else Drift(found[0][0].function, numbers)

    def _offset(self, relation: Relation, other: Value, shape: Shape, factor: float, by: float) -> Relation | None:
        """Return the relation of a scaled value plus a multiple of weights."""
        coefficient = relation.coefficient.times(Coefficient(1 / factor))
        own = self.system.coefficient(other).mapped(lambda t: wide(t, len(shape)))
        told = _told(relation, own, shape)
        return self.moved_total(replace(told, coefficient=coefficient), shape, own.times(Coefficient(by)))

    def moved_total(self, relation: Relation, shape: Shape, by: Coefficient) -> Relation | None:
        """Return the relation of a value plus a term that depends only on weights; None if the term counts a length."""
        terms = relation.coefficient.times(by)
        told = set().union(*(varying(places) for *_, places in terms.items))
        if any(shape[axis] in self.system.lengths for axis in relation.axes - told):
            return None  # the term is summed over a length, which varies
        count = relation.total.segments
        total = Total(count, before=(relation.total, torch.arange(count)))
        whole = tuple(size if axis in relation.axes else 1 for axis, size in enumerate(shape))
        total.terms.append((terms, relation.segments, whole))
        return Relation(relation.axes, relation.segments, relation.coefficient, total)

    # Products.

    def scale(self, value: Value, factor: float, node: Any = None) -> Value:
        """Multiply a value by a number."""
        by = self._factor(factor) if value.moves else Coefficient(factor)
        terms = [(own, by) for own in (value.translation, *value.more) if own is not None]
        found = [own for term in terms if (own := self.unknowns.combined([term])) is not None]
        drifts = {}
        for key, drift in self._living(value).items():
            if (numbers := self.unknowns.combined([(drift.numbers, by)], 1)) is not None:
                drifts[key] = Drift(drift.function, numbers)
        relation = value.relation
        if relation is not None and factor:
            coefficient = relation.coefficient.times(Coefficient(1 / factor))
            relation = Relation(relation.axes, relation.segments, coefficient, relation.total)
        lookup = value.lookup and replace(value.lookup, by=value.lookup.by.times(by))
        return Value(
            value.shape, value.varies, None if value.varies else node, found[0] if found else None, drifts,
            relation if factor else None, learned=value.learned, more=tuple(found[1:]), lookup=lookup,
            base=(*value.root[:2], value.root[2] * factor) if value.varies else None,
        )  # fmt: skip

    def _factor(self, factor: float) -> Coefficient:
        """Return a number as a coefficient; after a sum over an input it may represent the length or its inverse."""
        for size in self.system.lengths if self.system.counted else ():
            for power in (1, -1):
                if size > 1 and factor == float(size) ** power:
                    return self.system.length(size, power)
        return Coefficient(factor)

    def multiply(self, one: Value, two: Value, node: Any = None, *, divide: bool = False) -> Value:
        """Return the product or quotient of two values."""
        shape = tuple(np.broadcast_shapes(one.shape, two.shape))
        if divide and two.varies:
            self.fix(two)
            two = Value(two.shape, True)
        if not one.varies and not two.varies:
            return self._product_of_weights(one, two, shape, node, divide=divide)
        if not two.varies:
            return self._times_weights(one, two, shape, power=-1 if divide else 1)
        if not one.varies and not divide:
            return self._times_weights(two, one, shape, power=1)
        result = Value(shape, True, learned=True)
        parts = [self.broadcast(value, shape) for value in (one, two)]
        self._both(*parts)
        self._unread(one)
        self._unread(two)
        for at in (0, 1):
            self._times_function(result, parts[at], (two, one)[at], shape)
        for own, other in ((one, two), (two, one)):
            if own.relation is not None and own.shape == shape and own.relation.total.vanishes:
                axes = varying(wide(torch.empty([2 if size > 1 else 1 for size in other.shape]), len(shape)))
                if axes.isdisjoint(own.relation.axes):
                    result.relation = own.relation
        return result

    def _product_of_weights(self, one: Value, two: Value, shape: Shape, node: Any, *, divide: bool) -> Value:
        if divide:
            self.fix(two)
        terms, drifts = [], {}
        for own, other, power in ((one, two, -1 if divide else 1), (two, one, 1)):
            if not own.moves:
                continue
            by = self.system.coefficient(other).power(power).mapped(lambda t: wide(t, len(shape)))
            if (numbers := self.numbers(own)) is not None:
                terms.append((wide(numbers, len(shape)), by))
            for drift in self._living(own).values():
                seconds = [other.translation, *other.more, *(second.numbers for second in other.drifts.values())]
                for second in seconds:
                    self.system.exclude(drift.numbers, second)
                if (numbers := self.unknowns.combined([(wide(drift.numbers, len(shape), 1), by)], 1)) is not None:
                    drifts[self.system.source()] = Drift(wide(drift.function, len(shape)), numbers)
        self._both(one, two)
        for own in (one, two):
            self._unread(own)
        translation = self.unknowns.combined(terms) if terms else None
        return Value(shape, False, node, translation, drifts, learned=one.learned or two.learned)

    def _times_weights(self, value: Value, weights: Value, shape: Shape, *, power: int) -> Value:
        """Multiply or divide a value that depends on the input by weights."""
        own = self.broadcast(value, shape)
        by = self.system.coefficient(weights).mapped(lambda t: wide(t, len(shape))).power(power)
        result = Value(shape, True, learned=True)
        changes = self.numbers(weights)
        for drift in weights.drifts.values():
            self.unknowns.vanish(drift.numbers)
        functions = {axis for axis, size in enumerate(wide_shape(value.shape, len(shape))) if size > 1}
        everywhere = {axis for axis, size in enumerate(shape) if size > 1} <= functions
        if changes is not None and (everywhere or power < 0 or own.moves or own.relation is not None):
            self.fix(weights)
        elif changes is not None:
            function = wide(places(value.shape), len(shape))
            result.drifts[self.system.source()] = Drift(function, wide(changes, len(shape))[None])
        if changes is None or everywhere or power < 0 or own.moves or own.relation is not None:
            if weights.learned and weights.origin is not None and weights.origin[0] in self.system.weights:
                self.fix(weights)
            if (numbers := self.numbers(own)) is not None:
                result.translation = self.unknowns.combined([(numbers, by)])
            for key, drift in self._living(own).items():
                if (numbers := self.unknowns.combined([(drift.numbers, by)], 1)) is not None:
                    result.drifts[key] = Drift(drift.function, numbers)
            if value.relation is not None and value.shape == shape:
                told, own_by = _told(value.relation, by, shape), value.relation.coefficient.times(by.power(-1))
                result.relation = replace(told, coefficient=own_by)
        return result

    def _both(self, one: Value, two: Value) -> None:
        """Record that changes of two factors exclude each other, as their product would be added."""
        self.system.exclude(self.numbers(one), self.numbers(two))

    def _times_function(self, result: Value, own: Value, other: Value, shape: Shape) -> None:
        """Add the changes of one factor, times the other factor, to a product as drifts."""
        function = wide(places(other.shape), len(shape))
        if (numbers := self.numbers(own)) is not None:
            result.drifts[self.system.source()] = Drift(function, numbers[None])
        for drift in self._living(own).values():
            result.drifts[self.system.source()] = Drift(_joined(drift.function, function), drift.numbers)

    # Reductions.

    def reduce(self, value: Value, axes: Collection[int], node: Any, *, mean: bool, keep: bool) -> Value:
        """Return the sum or mean over some axes."""
        drifts = {}
        if not value.varies:  # rows of a table, which longer inputs extend
            self.alike(value, [axis for axis in axes if value.shape[axis] in self.system.lengths], seen=False)

        def reduced(numbers: Tensor, lead: int) -> Tensor | None:
            summed, by = self.unknowns.summed(numbers, [lead + axis for axis in axes]), ONE
            for axis in axes:
                alike = numbers.shape[lead + axis] == 1
                if alike != mean:
                    by = by.times(self.system.length(value.shape[axis], -1 if mean else 1))
            return None if summed is None else self.unknowns.combined([(summed, by)], lead)

        gone = sorted(axes)
        kept_axes = [axis for axis in range(value.rank) if axis not in gone]
        # Summands that are constant along an axis are counted separately.
        parts = [reduced(own, 0) for own in (value.translation, *value.more) if own is not None]
        found = [own for own in parts if own is not None]
        translation, more = (found[0], found[1:]) if found else (None, [])
        for key, drift in self._living(value).items():
            if varying(drift.function).isdisjoint(axes):
                if (numbers := reduced(drift.numbers, 1)) is not None:
                    drifts[key] = Drift(drift.function, numbers)
            elif not {axis - 1 for axis in varying(drift.numbers) if axis} & set(axes):
                source, function = self._sum_of_functions(key, drift.function, axes, mean=mean)
                drifts[source] = Drift(function, drift.numbers)
            elif drift.numbers.numel() <= _MOST:  # each place has functions of its own
                moved = drift.numbers.permute(0, *(1 + axis for axis in (*gone, *kept_axes))).flatten(0, len(gone))
                shape = [1 if axis in gone else size for axis, size in enumerate(drift.function.shape)]
                ones = [1 if axis in gone else drift.numbers.shape[1 + axis] for axis in range(value.rank)]
                drifts[self.system.source()] = Drift(places(shape), moved.reshape(len(moved), *ones))
            else:
                self.unknowns.vanish(drift.numbers)
        if value.origin is not None:
            self._unread(value)
        relation = value.relation
        if relation is not None and not relation.axes.isdisjoint(axes):
            relation = None
        if (
            relation is not None
            and not mean
            and math.prod(value.shape[axis] for axis in axes) > 1
            and not relation.total.vanishes
        ):
            relation = None
        kept = tuple(1 if axis in axes else own for axis, own in enumerate(value.shape))
        rows = self._sum_of_rows(value, axes, mean=mean)
        result = Value(kept, value.varies, None if value.varies else node, translation, drifts, relation,
                       learned=value.learned, more=tuple(more), lookup=rows)  # fmt: skip
        if keep:
            return result
        after = tuple(own for axis, own in enumerate(value.shape) if axis not in axes)
        return self.move(result, regroup(kept, after), result.node)[0]

    def _sum_of_functions(self, key: int, function: Tensor, axes: Collection[int], *, mean: bool) -> tuple[int, Tensor]:
        """Return the source of the sums of functions over some axes, and the index of the sum at each entry."""
        shape = [1 if axis in axes else size for axis, size in enumerate(function.shape)]
        given = tuple(function.shape), function.numpy().tobytes()
        return self.source_of("sum", key, given, tuple(sorted(axes)), mean), places(shape)

    def _sum_of_rows(self, value: Value, axes: Collection[int], *, mean: bool) -> Lookup | None:
        """Return the sum or mean of rows of a table over some axes; None if it is none."""
        lookup = value.lookup
        if lookup is None or varying(lookup.at) & set(axes) or not varying(lookup.functions) >= set(axes):
            return None
        source, functions = self._sum_of_functions(lookup.source, lookup.functions, axes, mean=mean)
        total = lookup.total
        for axis in () if mean else axes:
            total = total.times(self.system.length(value.shape[axis]))
        return replace(lookup, source=source, functions=functions, total=total)

    def _unread(self, value: Value) -> None:
        """Record that a weight has readers other than contractions."""
        if value.origin is not None and value.origin[0] in self.system.weights:
            self.system.fixed.add(value.origin[0])

    # Norms and softmaxes.

    def normalise(self, value: Value, axes: Collection[int], *, mean: bool) -> Value:
        """Divide a value by its size along some axes, after subtracting the mean if ``mean``."""
        if mean:
            self.alike(value, axes)
        else:
            self.fix(value)
        if value.origin is not None:
            self._unread(value)
        relation = self._over(value.shape, axes, 0.0) if mean else None
        return Value(value.shape, value.varies, relation=relation, learned=value.learned)

    def softmax(self, value: Value, axis: int, *, log: bool) -> Value:
        """Return the softmax or its logarithm."""
        self.alike(value, [axis])
        if value.origin is not None:
            self._unread(value)
        relation = None if log else self._over(value.shape, [axis], 1.0)
        return Value(value.shape, value.varies, relation=relation, learned=value.learned)

    @staticmethod
    def _over(shape: Shape, axes: Collection[int], total: float) -> Relation:
        segments = torch.zeros((1,) * len(shape), dtype=torch.int64)
        long = frozenset(axis for axis in axes if shape[axis] > 1)
        return Relation(long or frozenset(axes), segments, ONE, Total(1, total))


def _both_sums(relations: Sequence[Relation | None], by: Sequence[float]) -> Relation | None:
    """Return the relation of a sum of multiples of two values, if both totals are single numbers; else None."""
    one, two = relations
    if one is None or two is None or one.axes != two.axes or one.total.segments != 1 or two.total.segments != 1:
        return None
    total, constant = Total(1), 0.0
    for own, factor in ((one, by[0]), (two, by[1])):
        if own.total.known is None or any(at.numel() > 1 for *_, at in own.coefficient.items):
            return None
        number = own.coefficient.power(-1).times(Coefficient(factor * own.total.known))
        if number.items:
            total.terms.append((number, own.segments, (1,) * own.segments.ndim))
        else:
            constant += number.factor
    total.constant = constant
    return Relation(one.axes, one.segments, ONE, total)


def _told(relation: Relation, by: Coefficient, shape: Shape) -> Relation:
    """Return a relation with separate segments where a coefficient varies."""
    return spread(relation, set().union(*(varying(places) for *_, places in by.items)), shape)


def wide_shape(shape: Shape, rank: int) -> Shape:
    """Prepend ones to a shape, up to a rank."""
    return (1,) * (rank - len(shape)) + tuple(shape)


def _joined(one: Tensor, two: Tensor) -> Tensor:
    """Number pairs of functions at each entry."""
    return one * (int(two.max()) + 1) + two
