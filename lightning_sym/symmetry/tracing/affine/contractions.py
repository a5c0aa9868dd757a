"""Contractions of two values: translations and drifts of each factor are propagated through the other."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.affine.letters import Sum, aligned, at_origin, equation_shape, size_of_products
from lightning_sym.symmetry.tracing.affine.moves import told, windows_of
from lightning_sym.symmetry.tracing.affine.passing import Passing
from lightning_sym.symmetry.tracing.affine.system import Rows, System
from lightning_sym.symmetry.tracing.affine.values import (
    ONE,
    ROWS,
    SUMS,
    Coefficient,
    Drift,
    Relation,
    Total,
    Value,
    places,
    varying,
)
from lightning_sym.symmetry.tracing.affine.weights import ByKernel, ByTotal

_MOST = 2**20  # maximal terms of equations with the entries of a constant matrix


class Contractions(Passing):
    """Operations on values, including contractions.

    Args:
        system: Receives the equations.
    """

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self.reading: list[tuple[str, frozenset[int], Value]] = []  # weights, their summed axes, their inputs

    def contract(self, one: Value, two: Value, equation: str, node: Any = None) -> Value:
        """Contract two values by an equation of `torch.einsum` with one letter per axis."""
        first, second = equation.split("->")[0].split(",")
        out = equation.split("->")[1]
        if any(not set(own) <= set(other + out) for own, other in ((first, second), (second, first))):
            return self.nonlinear([one, two], equation_shape(one, two, first, second, out), node)
        by = Sum(first, second, out)
        one, two = told(one, [*map(first.index, by.gone)]), told(two, [*map(second.index, by.turned.gone)])
        sizes = dict(zip(first + second, (*one.shape, *two.shape), strict=True))
        result = Value(tuple(sizes[letter] for letter in out), one.varies or two.varies, learned=True)
        if one.varies and two.varies:
            if self.system.exclusive or any(
                self._on_table(own, other, way) is None for own, other, way in ((one, two, by), (two, one, by.turned))
            ):
                self._both(one, two)
            self._unread(one)
            self._unread(two)
            for own, other, way in ((one, two, by), (two, one, by.turned)):
                self._half(result, own, other, way)
                self._drifts(result, own, other, way)
                result.relation = result.relation or self._passed(own, other, way)
        elif one.varies or two.varies:
            own, other, way = (one, two, by) if one.varies else (two, one, by.turned)
            halfway = not self.system.exclusive and self._on_table(other, own, way.turned) is not None
            if not halfway:
                self._both(own, other)
            self._half(result, other, own, way.turned)
            self._drifts(result, other, own, way.turned)
            self._through(result, own, other, way, halfway=halfway)
            self._drifts(result, own, other, way)
            self._families(result, own, other, way)
            result.relation = self._passed(own, other, way)
        else:
            result.node, result.learned = node, one.learned or two.learned
            halfway = not self.system.exclusive and one.learned and two.learned and one.moves and two.moves
            if not halfway:
                self._both(one, two)
            for own, other, way in ((one, two, by), (two, one, by.turned)):
                for drift in own.drifts.values():
                    self.unknowns.vanish(drift.numbers)
                self._unread(own)
                self._through(result, own, other, way, halfway=halfway)
        return result

    def convolve(
        self, value: Value, weights: Value, shape: tuple[int, ...], *, groups: int, padded: bool, out: int = 0,
        how: Any = None,
    ) -> Value:  # fmt: skip
        """Convolve a value with a kernel.

        Args:
            value: Shape (batch, channels, ...).
            weights: The kernel.
            shape: The result's shape.
            groups: The number of groups of channels.
            padded: Whether only a part of the kernel applies at the border.
            out: The kernel's axis of the outputs.
            how: What else decides which places the kernel reads.
        """
        result = Value(shape, True, learned=True)
        self.follow_lengths(value.shape[2:], shape[2:])
        space = "".join("ijk"[: len(shape) - 2])
        kernel = space.upper()
        by = Sum("ay" + kernel, ("zy" if out == 0 else "yz") + kernel, "az" + space)
        value = told(value, [1])
        reading = self._reading(value, weights, by, (weights.shape, how))
        self.unknowns.vanish(self.numbers(weights))
        for drift in [*value.drifts.values(), *weights.drifts.values()]:
            self.unknowns.vanish(drift.numbers)
        if (numbers := self.numbers(value)) is not None:
            if padded or varying(numbers) - {1}:
                self.unknowns.vanish(numbers)
            else:
                result.translation = self._through_kernel(value, numbers, weights, by, groups, reading)
        if weights.origin is None or weights.origin[0] not in self.system.weights:
            return result
        name, split = weights.origin[0], self._split(weights, by)
        self.contracted.add(name)
        if groups > 1 or split is None:
            self.system.fixed.add(name)
            return result
        self.system.family(name, split[0])
        windows = windows_of(value, weights) if not padded and out == 0 else None
        rows = None if windows is None else self._rows(windows, weights, by, split[0])
        self.system.read.add(name)
        if windows is not None and rows is not None:
            self._multiples_of_rows(result, windows, weights, by, rows, reading)
        for axes, other in self.system.families[name].items():
            for own in other.rows.values():
                if own is not rows:
                    self.unknowns.vanish(own.numbers)
            if axes != split[0]:
                self.unknowns.vanish(other.directions)
        if (directions := self._unseen(value, weights, by)) is not None:
            whole = [1 if letter == "z" else size for letter, size in zip(by.out, shape, strict=True)]
            result.drifts[reading] = Drift(places(whole), directions[None])
        return result

    def _through_kernel(
        self, value: Value, numbers: Tensor, weights: Value, by: Sum, groups: int, reading: int
    ) -> Tensor:
        """Propagate a translation that is constant over places through a kernel."""
        outputs, channels = weights.shape[0], value.shape[1]
        key = ("kernel", self._weight_key(weights), groups, tuple(numbers.shape), numbers.numpy().tobytes())

        evaluate = ByKernel(self._node(weights), weights.shape, groups, channels, numbers.ndim)
        unseen = self._unseen(value, weights, by) if groups == 1 else None
        shape = (1, outputs, *[1] * (numbers.ndim - 2))
        blocks = places(shape).reshape(1, -1), places(numbers.shape).reshape(1, -1)
        return self.system.derive(key, shape, reading, source=numbers, evaluate=evaluate, blocks=blocks, unseen=unseen)

    # Changes of one factor.

    def _through(self, result: Value, value: Value, weights: Value, by: Sum, *, halfway: bool = False) -> None:
        """Propagate a value's translation through weights; see :meth:`_derived` for `halfway`."""
        if self._is_cut(weights, by):  # longer inputs read more of the weights
            self.unknowns.vanish(self.numbers(value))
        numbers = self.numbers(value)
        if numbers is None:
            return
        if not weights.learned and size_of_products(numbers, weights, by) <= _MOST:
            self._include(result, self._linear_form(numbers[None], weights, by))
            return
        added = self._moving(weights) if halfway else None
        self._include(result, self._derived(value, numbers, weights, by, halfway=added))

    def _is_cut(self, weights: Value, by: Sum) -> bool:
        """Whether a contraction sums over an axis of a weight that is read only in part."""
        if weights.origin is None or weights.origin[0] not in self.system.weights:
            return False
        partial = self.system.partial.get(weights.origin[0], frozenset())
        gone = {by.two.index(letter) for letter in by.gone}
        return any(varying(own) & gone for axis, own in enumerate(weights.origin[1]) if axis in partial)

    def _linear_form(self, numbers: Tensor, weights: Value, by: Sum) -> Tensor | None:
        """Return unknowns for a contraction with constants. Shape (1, *thin), or (patterns, *thin) for several."""
        own = self.unknowns.living(numbers)
        if own is None:
            return None
        letters = by.out + by.gone
        patterns = own.shape[0]
        atom, at = self.system.atom(weights)
        given, placed = aligned(own, by.one, letters, 1), aligned(at, by.two, letters)
        sizes = dict(zip(by.two, weights.shape, strict=True))
        shape = np.broadcast_shapes(given.shape, placed.shape)
        whole = (*shape[: 1 + len(by.out)], *(sizes[letter] for letter in by.gone))
        rows = given.expand(whole).reshape(-1, math.prod(whole[1 + len(by.out) :])).numpy()
        coefficients = placed.expand(whole).reshape(rows.shape).numpy()
        new = self.unknowns.fresh((len(rows),), SUMS)
        terms: list[Any] = [(1.0, [])]
        terms += [(-1.0, [(atom, 1, coefficients[:, column])]) for column in range(rows.shape[1])]
        stacked = torch.cat([new[:, None], torch.from_numpy(rows)], 1).numpy()
        self.unknowns.equations.append((stacked, terms))
        result = new.reshape(whole[: 1 + len(by.out)])
        return result[0] if patterns == 1 else result

    def _half(self, result: Value, own: Value, other: Value, by: Sum, *, told: bool = False) -> None:
        """Propagate a translation of one factor through the other, which depends on the input.

        Multiples of a relation's coefficients only add a constant; with ``told``, rows represent them already.
        """
        numbers = self.numbers(own)
        if numbers is None or self._through_table(result, own, other, by):
            return
        relation, axes = other.relation, frozenset(by.two.index(letter) for letter in by.gone)
        relation = None if self._picks_members(own, by) else relation
        gone = [by.one.index(letter) for letter in by.gone]
        if relation is not None and relation.axes == axes and axes:
            alone = relation.total.segments == 1 and not relation.coefficient.items
            if alone and relation.total.known is not None and all(numbers.shape[axis] == 1 for axis in gone):
                factor = relation.total.known / relation.coefficient.factor
                self._include(result, self.unknowns.combined([(aligned(numbers, by.one, by.out), Coefficient(factor))]))
                return
            numbers = self._without_multiples(result, numbers, relation, by, told=told)
            if numbers is None:
                return
        elif relation is not None and axes and self._times_totals(result, numbers, relation, by):
            return
        self._drift(result, numbers, by)

    def _times_totals(self, result: Value, numbers: Tensor, relation: Relation, by: Sum) -> bool:
        """Add a translation times the totals of another factor's sums, which have a segment for each place elsewhere.

        Example: softmax weights of heads, mixed by a matrix; the sums are those of the rows of the matrix.

        Returns:
            Whether this is the whole effect.
        """
        gone = {by.two.index(letter) for letter in by.gone}
        beside, total = sorted(relation.axes - gone), relation.total
        sizes = [relation.segments.shape[axis] for axis in beside]
        apart = len(torch.unique(relation.segments)) == math.prod(sizes) == relation.segments.numel() == total.segments  # type: ignore[no-untyped-call]
        if not gone < relation.axes or not apart or relation.coefficient != ONE or bool(total.open.any()):
            return False
        if any(by.two[axis] not in by.out for axis in beside):
            return False
        if any(numbers.shape[by.one.index(letter)] > 1 for letter in by.gone):
            return False
        given, segments = aligned(numbers, by.one, by.out), aligned(relation.segments, by.two, by.out)
        of = torch.arange(total.segments).reshape(-1, *[1] * given.ndim)
        source = torch.where(of == segments, given, 0)
        self._include(result, self._by_entry(("by place", total.key(), source.numpy().tobytes()), source, total))
        return True

    def _drift(self, result: Value, numbers: Tensor, by: Sum) -> None:
        """Add a translation of one factor as a drift, with a function of the other factor for each place."""
        shape = [size if letter in by.two else 1 for letter, size in zip(by.out, result.shape, strict=True)]
        result.drifts[self.system.source()] = Drift(places(shape), self._patterns(numbers, by))

    @staticmethod
    def _sizes(by: Sum, relation: Relation, numbers: Tensor) -> list[int]:
        """Return the sizes of one factor's axes that a relation of the other determines."""
        thin = [tuple(own.shape) for own in (relation.segments, *(at for *_, at in relation.coefficient.items))]
        sizes = dict(zip(by.two, np.broadcast_shapes(*thin), strict=True))
        return [max(sizes.get(letter, 1), size) for letter, size in zip(by.one, numbers.shape, strict=True)]

    def _patterns(self, numbers: Tensor, by: Sum) -> Tensor:
        """Move the summed axes of a thin array to the front. Shape (patterns, *thin)."""
        gone = [by.one.index(letter) for letter in by.gone]
        kept = [axis for axis in range(numbers.ndim) if axis not in gone]
        moved = numbers.permute((*gone, *kept)).flatten(0, len(gone) - 1) if gone else numbers[None]
        return aligned(moved, "".join(by.one[axis] for axis in kept), by.out, 1)

    def _without_multiples(
        self, result: Value, numbers: Tensor, relation: Relation, by: Sum, *, told: bool
    ) -> Tensor | None:
        """Remove multiples of a relation's coefficients, which only add a constant, from a factor's translation.

        In each segment, the multiple is chosen such that the first place vanishes. With ``told``, all multiples must
        vanish.
        """
        count, gone = relation.total.segments, [by.one.index(letter) for letter in by.gone]
        segments = aligned(relation.segments, by.two, by.one)
        coefficient = relation.coefficient.mapped(lambda t: aligned(t, by.two, by.one))
        whole = [size if axis in gone else 1 for axis, size in enumerate(self._sizes(by, relation, numbers))]
        places_of = segments.expand(whole).reshape(-1).numpy()
        firsts = np.stack(np.unravel_index(np.unique(places_of, return_index=True)[1], whole))

        def at(array: Tensor, first: Any) -> Tensor:
            for axis in gone:
                array = array.narrow(axis, int(first[axis]) if array.shape[axis] > 1 else 0, 1)
            return array

        parts = []
        for first, unknown in zip(firsts.T, relation.total.open, strict=True):
            inverse = coefficient.mapped(lambda t, first=first: at(t, first)).power(-1)
            own = None if bool(unknown) else self.unknowns.combined([(at(numbers, first), inverse)])
            parts.append(torch.zeros([1] * numbers.ndim, dtype=torch.int64) if own is None else own)
        shape = np.broadcast_shapes(*(tuple(own.shape) for own in parts))
        multiples = torch.stack([own.expand(shape) for own in parts])
        assert len(multiples) == count
        grid = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
        place = multiples[(segments.expand(np.broadcast_shapes(segments.shape, shape)), *grid)]
        left = self.unknowns.combined([(numbers, Coefficient()), (place, coefficient.times(Coefficient(-1.0)))])
        if told:
            self.unknowns.vanish(multiples)
            return left
        out = aligned(multiples, by.one, by.out, 1)
        if not self._times_numbers(result, out, relation.total):
            key = ("multiples", relation.total.key(), out.numpy().tobytes())
            self._include(result, self._by_entry(key, out, relation.total))
        return left

    def _times_numbers(self, result: Value, multiples: Tensor, total: Total) -> bool:
        """Add multiples of a relation's totals if these are numbers; return whether they are."""
        numbers = total.numbers
        for part, number in zip(multiples, [] if numbers is None else numbers.tolist(), strict=False):
            if number and not math.isnan(number):
                self._include(result, self.unknowns.combined([(part, Coefficient(number))]))
        return numbers is not None

    def _drifts(self, result: Value, own: Value, other: Value, by: Sum) -> None:
        """Propagate drifts of one factor through the other."""
        gone = [by.one.index(letter) for letter in by.gone]
        for key, drift in self._living(own).items():
            summed = {axis - 1 for axis in varying(drift.numbers) if axis} & set(gone)
            size = drift.numbers.shape[0] * size_of_products(drift.numbers[0], other, by)
            constant = not other.varies and not other.learned and varying(drift.function).isdisjoint(gone)
            if summed and constant and size <= _MOST and other.rank == len(gone):
                numbers = self._linear_form(drift.numbers, other, by)
                if numbers is not None:
                    numbers = numbers if drift.numbers.shape[0] > 1 else numbers[None]
                    result.drifts[key] = Drift(aligned(drift.function, by.one, by.out), numbers)
                continue
            if gone and varying(drift.function).isdisjoint(gone) and (total := self._known_sum(other, by)) is not None:
                # What does not vary along the summed axes is only multiplied by the known sum.
                first = drift.numbers
                for axis in gone:
                    first = first.narrow(1 + axis, 0, 1)
                alike = self.unknowns.combined([(first, Coefficient(total))])
                if alike is not None:
                    function = aligned(drift.function, by.one, by.out)
                    result.drifts[key] = Drift(function, aligned(alike, by.one, by.out, 1))
                rest = self.unknowns.combined([(drift.numbers, Coefficient()), (first, Coefficient(-1.0))])
                if rest is None:
                    continue
                drift = Drift(drift.function, rest)
            # Each summed place has a separate function.
            kept = [axis for axis in range(own.rank) if axis not in gone]
            moved = drift.numbers.permute(0, *(1 + axis for axis in gone), *(1 + axis for axis in kept))
            moved = moved.flatten(0, len(gone))
            shape = [
                size if letter in by.two or (letter in by.one and drift.function.shape[by.one.index(letter)] > 1) else 1
                for letter, size in zip(by.out, result.shape, strict=True)
            ]
            letters = "".join(by.one[axis] for axis in kept)
            result.drifts[self.system.source()] = Drift(places(shape), aligned(moved, letters, by.out, 1))

    @staticmethod
    def _known_sum(value: Value, by: Sum) -> float | None:
        """Return the number that all sums of the second factor over the contracted axes equal; None if not known."""
        relation, gone = value.relation, frozenset(by.two.index(letter) for letter in by.gone)
        if relation is None or relation.axes != gone or relation.total.segments > 1 or relation.coefficient.items:
            return None
        known = relation.total.known
        return None if known is None else known / relation.coefficient.factor

    def _passed(self, own: Value, other: Value, by: Sum) -> Relation | None:
        """Return the relation of a factor along axes that the contraction leaves unchanged; None if there is none."""
        relation = own.relation
        if relation is None or any(by.one[axis] in by.two or by.one[axis] not in by.out for axis in relation.axes):
            return None
        if not relation.total.vanishes and not other.varies:
            return self._weighed(relation, other, by)
        if not relation.total.vanishes:
            means, gone = other.relation, frozenset(by.two.index(letter) for letter in by.gone)
            if means is None or means.axes != gone or means.total.known != 1 or means.total.segments != 1:
                return None
            if means.coefficient.items or means.coefficient.factor != 1:
                return None
        axes = frozenset(by.out.index(by.one[axis]) for axis in relation.axes)
        segments = aligned(relation.segments, by.one, by.out)
        coefficient = relation.coefficient.mapped(lambda t: aligned(t, by.one, by.out))
        return Relation(axes, segments, coefficient, relation.total)

    def _weighed(self, relation: Relation, weights: Value, by: Sum) -> Relation | None:
        """Return the relation of a value whose sums are one number, after a contraction along other axes with weights.

        Its totals are that number times sums of weights, one for each place on the axes of the weights.
        """
        known, coefficient = relation.total.known, relation.coefficient
        whole = weights.origin is not None and not self.system.partial.get(weights.origin[0])
        if not whole or known is None or relation.total.segments > 1 or coefficient.items:
            return None
        kept = "".join(letter for letter in by.two if letter in by.out)
        sizes = dict(zip(by.two, weights.shape, strict=True))
        numbered = places([sizes[letter] for letter in kept])
        factor = self.system.coefficient(weights).times(Coefficient(known / coefficient.factor))
        total = Total(numbered.numel(), terms=[(factor, aligned(numbered, kept, by.two), weights.shape)])
        axes = {by.one[axis] for axis in relation.axes} | {*kept}
        return Relation(frozenset(by.out.index(letter) for letter in axes), aligned(numbered, kept, by.out), ONE, total)

    # Changes of weights.

    def _families(self, result: Value, value: Value, weights: Value, by: Sum) -> None:
        """Propagate changes of a weight to the result."""
        if weights.origin is None or weights.origin[0] not in self.system.weights:
            return
        name = weights.origin[0]
        self.contracted.add(name)
        split = self._split(weights, by)
        if split is None:
            self.system.fixed.add(name)
            self.system.note(f"{name} is summed over a part of an axis, so that nothing is added to it")
            return
        summed, _ = split
        if name not in self.system.takers:  # rank-one maps do not act on sums of weights
            self.reading.append((name, summed, value))
        family = self.system.family(name, summed)
        rows = self._rows(value, weights, by, summed)
        self.system.read.add(name)
        reading = self._reading(value, weights, by)
        if (numbers := self._unseen(value, weights, by)) is not None:
            shape = [size if letter in by.one else 1 for letter, size in zip(by.out, result.shape, strict=True)]
            result.drifts[reading] = Drift(places(shape), numbers[None])
        for own in family.rows.values():
            if own is not rows:
                self.unknowns.vanish(own.numbers)
        if rows is not None:
            self._multiples_of_rows(result, value, weights, by, rows, reading)
        for axes, other in self.system.families[name].items():
            if axes != summed:
                told = rows is not None and sorted(axes) < sorted(summed)
                self._read_across(result, value, weights, by, axes, other, told=told)

    def _rows(self, value: Value, weights: Value, by: Sum, summed: frozenset[int]) -> Rows | None:
        """Return the row changes of a weight that a relation of its input allows; None without such a relation."""
        relation, name = value.relation, weights.origin[0]  # type: ignore[index]
        if relation is None or not by.gone or self._picks_members(weights, by.turned):
            return None
        if relation.axes != {by.one.index(letter) for letter in by.gone}:
            return None
        order = self._order(weights, by, summed)
        if order is None:
            return None
        sizes = dict(zip(by.two, weights.shape, strict=True))
        whole = [sizes[letter] for letter in by.gone]

        def flat(array: Tensor) -> Tensor:
            return aligned(array, by.one, by.gone).expand(whole).reshape(-1)[order]

        coefficient, segments = relation.coefficient.mapped(flat), flat(relation.segments)
        key = coefficient.key((len(order),)), segments.numpy().tobytes(), relation.total.open.numpy().tobytes()
        family = self.system.family(name, summed)
        if key not in family.rows:
            self.system.late |= name in self.system.read
            family.rows[key] = self.system.rows(name, summed, coefficient, segments)
        self.unknowns.vanish(family.rows[key].numbers[relation.total.open[: int(segments.max()) + 1]])
        return family.rows[key]

    def _multiples_of_rows(
        self, result: Value, value: Value, weights: Value, by: Sum, rows: Rows, reading: int
    ) -> None:
        """Add the effect of row changes: multiples of the relation's total."""
        assert value.relation is not None
        total = value.relation.total
        numbers = self.unknowns.living(self._placed(rows.numbers, weights, by, 1))
        if numbers is None or total.vanishes:
            return
        if self._times_numbers(result, numbers, total):
            return
        key = ("rows", total.key(), tuple(numbers.shape), numbers.numpy().tobytes())
        unseen = self._unseen(value, weights, by)
        self._include(result, self._by_entry(key, numbers, total, unseen, reading))

    def _by_entry(
        self, key: Any, source: Tensor, total: Total, unseen: Tensor | None = None, reading: int | None = None
    ) -> Tensor:
        """Return derived unknowns with one source entry per segment each."""
        shape, count = source.shape[1:], len(source)
        blocks = places(shape).reshape(-1, 1), places(source.shape).reshape(count, -1).T
        evaluate = ByTotal(total, source.ndim)
        return self.system.derive(
            key, shape, reading, source=source, evaluate=evaluate, blocks=blocks, total=total, unseen=unseen
        )

    def _read_across(
        self, result: Value, value: Value, weights: Value, by: Sum, axes: frozenset[int], family: Any, *, told: bool
    ) -> None:
        """Propagate changes that another reader of a weight allows, which sums over other axes.

        With ``told``, multiples of a relation's coefficients are already among this reader's rows.
        """
        self.unknowns.vanish(family.directions)
        summed, kept = self._split(weights, by) or (frozenset(), frozenset())
        shape = self.system.shape(weights.origin[0])  # type: ignore[index]
        thin = [size if axis in axes else 1 for axis, size in enumerate(shape)]
        for rows in family.rows.values():
            numbers = self.unknowns.living(rows.numbers)
            if numbers is None:
                continue
            if summed & axes or not axes <= kept or len(numbers) > 1:
                self.unknowns.vanish(rows.numbers)
                continue
            own = numbers[0]
            if rows.coefficient.items:
                by_place = rows.coefficient.mapped(
                    lambda t: t.reshape(thin) if t.numel() > 1 else t.reshape([1] * len(thin))
                )
                outer = [max(pair) for pair in zip(own.shape, thin, strict=True)]
                if math.prod(outer) > _MOST and (alike := [axis for axis in summed if own.shape[axis] > 1]):
                    # Values that differ between these places have one function each, so all places obey equal
                    # equations.
                    first = own
                    for axis in alike:
                        first = first.narrow(axis, 0, 1)
                    self.unknowns.equate(own, first)
                    probe = self.unknowns.fresh(first.shape, ROWS)
                    self.system.probes.append(probe)
                    self._drift(result, at_origin(self._by(probe, by_place, thin), weights), by.turned)
                    own = first
                own = self._by(own, by_place, thin)
            own = at_origin(own, weights)
            self._half(result, Value(weights.shape, False, translation=own), value, by.turned, told=told)

    def _by(self, numbers: Tensor, coefficient: Coefficient, thin: Sequence[int]) -> Tensor:
        """Return multiples of a coefficient."""
        outer = [max(pair) for pair in zip(numbers.shape, thin, strict=True)]
        made = self.unknowns.combined([(numbers.expand(outer), coefficient)])
        assert made is not None
        return made
