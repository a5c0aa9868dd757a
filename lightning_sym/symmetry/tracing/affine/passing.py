"""Translations that pass weights or rows of tables: unknowns that weights make of others."""

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.affine.algebra import Algebra
from lightning_sym.symmetry.tracing.affine.letters import Sum, aligned
from lightning_sym.symmetry.tracing.affine.values import ONE, Coefficient, Drift, Value, distinct, places, varying
from lightning_sym.symmetry.tracing.affine.weights import ByProduct, Made

_MOST = 2**20  # maximal entries of a translation that is arranged like a table


class Passing(Algebra):
    """Operations on values, including translations that pass weights or rows of tables."""

    def _derived(
        self, value: Value, numbers: Tensor, weights: Value, by: Sum, *, halfway: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return derived unknowns for a contraction with weights; places with equal unknowns share them.

        Args:
            value: The value that the weights read.
            numbers: The unknowns; thin.
            weights: The weights.
            by: The contraction.
            halfway: The unknowns that are added to the weights, if the weights count with half of these; else None.
        """
        free = [letter for letter in by.out if letter not in by.two]
        given, made = ([letter for letter in letters if letter in by.two] for letters in (by.one, by.out))
        moved = numbers.permute([by.one.index(letter) for letter in free + given])
        rows = moved.reshape(-1, *moved.shape[len(free) :])
        flat = rows.reshape(len(rows), -1).numpy()
        first, like = distinct([flat])
        some = flat[first].any(1)  # zero maps to zero
        source, place = rows[first[some]], np.where(some, np.cumsum(some) - 1, -1)
        front = next(letter for letter in string.ascii_letters if letter not in by.one + by.two)
        by_place = Sum("".join([front, *given]), by.two, "".join([front, *made]))
        sizes = dict(zip(by.two, weights.shape, strict=True))
        whole = (len(source), *(sizes[letter] for letter in given))
        shape = (len(source), *(sizes[letter] for letter in made))
        key = (
            "through" if halfway is None else "halfway",
            self._weight_key(weights),
            by_place.equation,
            shape,
            tuple(source.shape),
            source.numpy().tobytes(),
        )
        equation = f"...{by_place.one},{by_place.two}->...{by_place.out}"
        evaluate = ByProduct(self._node(weights), weights.shape, equation, whole)
        unseen = None if halfway is not None else self._unseen(value, weights, by_place)
        reading = None if unseen is None or not value.varies else self._reading(value, weights, by)
        blocks = places(shape).reshape(len(source), -1), places(source.shape).reshape(len(source), -1)
        found = self.system.derive(
            key, shape, reading, source=source, evaluate=evaluate, blocks=blocks, unseen=unseen, halfway=halfway
        )
        found = torch.cat([found, torch.zeros_like(found[:1])])[place[like]]
        found = found.reshape([*moved.shape[: len(free)], *shape[1:]])
        return found.permute([(free + made).index(letter) for letter in by.out])

    def _moving(self, weights: Value, where: Tensor | None = None) -> list[Tensor]:
        """Return the unknowns that are added to weights, or to some places of them."""
        families = {} if weights.origin is None else self.system.families.get(weights.origin[0], {})
        found = [rows.numbers for family in families.values() for rows in family.rows.values()]
        if (own := self.numbers(weights)) is not None:
            found.append(own if where is None else own.expand(weights.shape)[where.expand(weights.shape)])
        return found

    def _node(self, value: Value) -> Made:
        assert value.node is not None
        return self.system.made(value.node)

    def _weight_key(self, weights: Value) -> Any:
        if weights.origin is not None:
            return weights.origin[0], tuple((own.shape, own.numpy().tobytes()) for own in weights.origin[1])
        assert weights.node is not None
        return self.system.signature(weights.node), weights.shape

    def _include(self, result: Value, numbers: Tensor | None) -> None:
        if numbers is None:
            return
        if result.translation is None:
            result.translation = numbers
        else:
            one = Coefficient()
            result.translation = self.unknowns.combined([(result.translation, one), (numbers, one)])

    def _split(self, weights: Value, by: Sum) -> tuple[frozenset[int], frozenset[int]] | None:
        """Return the summed and the remaining axes of a parameter; None if an axis is summed only in part."""
        assert weights.origin is not None
        gone = {by.two.index(letter) for letter in by.gone}
        summed, kept = set(), set()
        for axis, own in enumerate(weights.origin[1]):
            along = varying(own)
            if along & gone:
                summed.add(axis)
            if along - gone:
                kept.add(axis)
        if summed & kept:
            return None
        # An axis of size 1 counts as remaining, unless it alone is summed.
        return frozenset(summed), frozenset(range(len(weights.origin[1]))) - summed

    def _family(self, weights: Value, by: Sum) -> Any:
        if weights.origin is None or weights.origin[0] not in self.system.weights:
            return None
        split = self._split(weights, by)
        return None if split is None else self.system.family(weights.origin[0], split[0])

    def _reading(self, value: Value, weights: Value, by: Sum, how: Any = None) -> int:
        """Return the source of sums of a value; changes of weights that read it alike may cancel each other."""
        split = None if weights.origin is None else self._split(weights, by)
        if split is None or (order := self._order(weights, by, split[0])) is None:
            return self.system.source()
        gone = [by.one.index(letter) for letter in by.gone] if how is None else []
        kept = [by.one.index(letter) for letter in by.out if letter in by.one] if how is None else range(value.rank)
        return self.system.reading(value, gone, kept, order, how)

    def _unseen(self, value: Value, weights: Value, by: Sum) -> Tensor | None:
        """Return the direction of the output that a change of a weight adds times sums of a value's root; thin."""
        if (family := self._family(weights, by)) is None:
            return None
        return self.unknowns.combined([(self._placed(family.directions, weights, by), Coefficient(value.root[2]))])

    def _order(self, weights: Value, by: Sum, summed: frozenset[int]) -> Tensor | None:
        """Return the index among the summed places for each place on the weight's own axes; None if some are absent."""
        assert weights.origin is not None
        name, coordinates = weights.origin
        shape = self.system.shape(name)
        at = torch.zeros(1, dtype=torch.int64)
        sizes = dict(zip(by.two, weights.shape, strict=True))
        for axis in sorted(summed):
            own = coordinates[axis]
            for place, letter in enumerate(by.two):
                own = own.narrow(place, 0, 1) if letter in by.out else own
            own = aligned(own, by.two, by.gone).expand([sizes[letter] for letter in by.gone])
            at = at * shape[axis] + own
        size = math.prod(shape[axis] for axis in summed)
        order = at.reshape(-1).argsort()
        whole = torch.equal(at.reshape(-1)[order], torch.arange(size))
        return order if whole else None

    def _placed(self, numbers: Tensor, weights: Value, by: Sum, lead: int = 0) -> Tensor:
        """Arrange numbers of a weight's outputs along the axes of the result; thin."""
        assert weights.origin is not None
        kept = "".join(letter for letter in by.two if letter in by.out)
        index = []
        for axis, own in enumerate(weights.origin[1]):
            if numbers.shape[lead + axis] == 1:
                index.append(torch.zeros((1,) * len(kept), dtype=torch.int64))
                continue
            for at, letter in enumerate(by.two):
                own = own.narrow(at, 0, 1) if letter not in by.out else own
            index.append(aligned(own, by.two, kept))
        rest = torch.broadcast_tensors(*index) if index else []  # type: ignore[no-untyped-call]
        placed = numbers[(slice(None),) * lead + tuple(rest)]
        return aligned(placed, kept, by.out, lead)

    def _picks_members(self, weights: Value, by: Sum) -> bool:
        """Whether a sum over all members of a parameter, with input-dependent factors, picks some of them.

        Each member has units of its own, so that a change of all members is no translation.
        """
        if weights.origin is None or weights.origin[0] not in self.system.members:
            return False
        gone = {by.one.index(letter) for letter in by.gone}
        return {axis for axis, own in enumerate(weights.origin[1]) if varying(own) & gone} == {0}

    def _on_table(self, own: Value, other: Value, by: Sum) -> tuple[Tensor, Sum] | None:
        """Arrange the translation of a value that a contraction sums with rows of a table along the table's axes.

        Returns:
            The translation, and its contraction with the table; None if the other factor is no such rows.
        """
        numbers, lookup = self.numbers(own), other.lookup
        gone = [by.two.index(letter) for letter in by.gone]
        if numbers is None or lookup is None or varying(lookup.functions) & {*gone}:
            return None
        letters, sizes = by.out + by.gone, dict(zip(by.two, other.shape, strict=True))
        at, given = aligned(lookup.at, by.two, letters), aligned(numbers, by.one, letters)
        if lookup.table is None:
            return None if self._picks_members(own, by) or len(gone) != 1 else (given, by)
        shape = np.broadcast_shapes(at.shape, given.shape)[: len(by.out)]
        whole = (*shape, *(sizes[letter] for letter in by.gone))
        at, given = (own.expand(whole).reshape(math.prod(shape), -1) for own in (at, given))
        others = [size for axis, size in enumerate(lookup.table.shape) if axis != lookup.axis]
        if bool((at.sort(1)[0].diff(dim=1) == 0).any()) or len(at) * math.prod(others) > _MOST:
            return None
        placed = torch.zeros(len(at), math.prod(others), dtype=torch.int64).scatter(1, at, given)
        free = [letter for letter in string.ascii_letters if letter not in by.out][: lookup.table.rank]
        two, row = "".join(free), free[lookup.axis]
        return placed.reshape(*shape, *others), Sum(by.out + two.replace(row, ""), two, by.out + row)

    def _through_table(self, result: Value, own: Value, other: Value, by: Sum) -> bool:
        """Propagate a translation of one factor through rows of a table: to rows of the translation times the table.

        These are a translation of each row of a table of biases. The rows may change as well: of the product of both
        changes, each side takes half.

        Returns:
            Whether the other factor is such rows.
        """
        found, lookup = self._on_table(own, other, by), other.lookup
        if found is None or lookup is None:
            return False
        numbers, way = found
        self.system.exclusions += [(numbers, drift.numbers) for drift in other.drifts.values()]
        made = numbers
        if lookup.table is not None:
            used = numbers.flatten(0, len(by.out) - 1).any(0).unsqueeze(lookup.axis)
            made = self._derived(own, numbers, lookup.table, way, halfway=self._moving(lookup.table, used))
        scaled = self.unknowns.combined([(made, lookup.by)])
        if scaled is not None:
            first = scaled.narrow(-1, 0, 1)
            self._include(result, self.unknowns.combined([(first[..., 0], lookup.total)]))
            rest = self.unknowns.combined([(scaled, ONE), (first, Coefficient(-1.0))])
            if rest is not None and scaled.shape[-1] > 1:
                function = aligned(lookup.functions, by.two, by.out)
                self.drift(result, lookup.source, Drift(function, rest.movedim(-1, 0)))
        return True
