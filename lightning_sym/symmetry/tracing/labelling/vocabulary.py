"""The methods that rules use to express constraints on tensors."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.tracing.graph.coordinates import moved_coordinates
from lightning_sym.symmetry.tracing.labelling.constraints import Label
from lightning_sym.symmetry.tracing.labelling.joining import Joining
from lightning_sym.symmetry.tracing.labelling.placing import ALONG
from lightning_sym.symmetry.tracing.labelling.values import Goes, Value, numbered

Rule = Callable[..., Any]
FIXED_MATRIX = "sums units times fixed numbers, behind which they keep no scale in common"
_MANY = 2**22  # elements of a value that are numbered
TWICE = "reads units more than once, so that only sums of its weights count"


class OnlyUnlabelledError(TypeError):
    """A rule both computes a torch function and reads labels, which are known only later."""


def _meeting(goes: Goes, others: Goes) -> dict[int, int]:
    """Return the axes that two factors have in common: those of the second, by those of the first."""
    pairs = {axis: others.index(target) for axis, target in enumerate(goes) if target is not None and target in others}
    return pairs | {goes.index(None): others.index(None)}


def _spread(part: Ints, targets: Goes, axes: Sequence[int], shape: Sequence[int]) -> Ints:
    """Broadcast an array, on some of a result's axes and a last one, to all of these axes."""
    order = sorted(range(len(targets)), key=lambda own: targets[own] or 0)
    sizes = [part.shape[targets.index(axis)] if axis in targets else 1 for axis in axes]
    return np.broadcast_to(part.transpose(*order, -1).reshape(*sizes, part.shape[-1]), shape)


class Trace(Joining):
    """The interface of rules during tracing.

    A rule is called as `rule(trace, *args, **kwargs)` with the operation's own arguments, tensors replaced by `Value`s,
    and returns the resulting `Value` (or a list of them). Every method here takes values, records a constraint and
    returns the resulting value, so most rules are one line.

    A trace may walk through several captures of a network (inputs of several lengths); the constraints of all of them
    hold.

    Attributes:
        node: The current operation.
    """

    def elementwise(
        self,
        value: Value,
        *,
        positive_scales: bool = False,
        signs: bool = False,
        exponent: float = 1.0,
        even: bool = False,
        offset: float = 0.0,
    ) -> Value:
        """Apply one function f to every element: units can be permuted; scales and signs depend on f.

        :func:`~lightning_sym.symmetry.intertwiner_group` measures these properties.

        Args:
            value: Any value.
            positive_scales: Whether f(t x) = t ** exponent f(x) for all t > 0.
            signs: Whether f(-x) is f(x) if `even`, and otherwise offset - f(x).
            exponent: The exponent of scales; used with `positive_scales`.
            even: Whether f(-x) = f(x); used with `signs`.
            offset: The constant in f(-x) = offset - f(x). Unless it is 0, signs count only if a norm subtracts the
                constant, or if the symmetry is traced with `affine=True` and the next bias can absorb it
                (docs/theory/intertwiners.md, 1.4).
        """
        if offset:
            value = self.elementwise(value, signs=signs and self.affine)
            return replace(value, offset=offset) if signs and self.affine else value
        labels = []
        first = next((label for label in value.labels if label.axes), None)
        if len(value.labels) > 1 and first is not None and not any(map(self.stacks.holds, value.labels)):
            value = self._lending(value, first.axes[0])  # only the product of the labels' scales counts
        for label in value.labels:
            self.constraints.restrict(label)
            self.constraints.fix_scales(label.scale, magnitudes=not positive_scales, signs=not signs)
            label = self.constraints.resolve(label)
            if (exponent != 1.0 and positive_scales) or (even and signs):
                scale = self.constraints.scales_like(label.scale)
                self.constraints.equate([(scale, 1.0), (label.scale, -exponent)], signs=False)
                if even or not signs:
                    self.constraints.fix_scales(scale, magnitudes=False)
                else:
                    self.constraints.equate([(scale, 1.0), (label.scale, 1.0)], magnitudes=False)
                label = label.scaled_by(scale)
            labels.append(label)
        return Value(value.shape, tuple(labels))

    def permutations_only(self, value: Value) -> Value:
        """Allow permutations of the units, but neither scales nor changes of sign."""
        return self.elementwise(value)

    def plus_number(self, value: Value) -> Value:
        """Add one number to all units: permutations stay, and rotations that fix the vector of ones."""
        for label in value.labels:
            self.constraints.keep_ones(label)
            self.constraints.fix_scales(label.scale)
        return Value(value.shape, tuple(self.constraints.resolve(label) for label in value.labels))

    def linear_along(self, value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
        """Apply a fixed linear map along some axes (average pooling, resizing); the group acts identically along these.

        Units on all other axes may even be mixed.

        Args:
            value: Any value.
            axes: The axes that the map mixes; negative ones count from the end.
            shape: The result's shape.
        """
        gone = {axis % value.ndim for axis in axes}
        for label in value.labels:
            # A scale conjugated by the map is no scale.
            if label.axes and {*label.axes} <= gone and len(value.labels) == 1:
                self.note(f"{ALONG} ({len(np.unique(label.atom))} units keep but one scale in common here)")
        value = self.tied(value, axes)
        return Value(tuple(shape), tuple(self.constraints.resolve(label) for label in value.labels))

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a torch function and trace its operations as if the network contained them.

        Args:
            function: Takes tensors, and returns one or several tensors. Parameters of the current module that it reads
                count as those of the network.
            args: Its arguments, tensors as values.
            kwargs: Its keyword arguments.

        Returns:
            Its results, tensors as values.

        Raises:
            ValueError: If the function cannot be traced, as its operations depend on values.
            TypeError: If the rule also reads labels of values, as such a rule cannot compute functions.
        """
        raise self._only_unlabelled("compute")

    def normalise(self, value: Value, axes: Sequence[int], *, mean: bool, eps: float = 0.0) -> Value:
        """Divide by the root mean square over some axes.

        Args:
            value: Any value.
            axes: The axes; negative ones count from the end.
            mean: Whether to subtract the mean over these axes first.
            eps: The number added to the mean square.

        Raises:
            TypeError: If the rule also reads labels of values.
        """
        raise self._only_unlabelled("normalise")

    def softmax(self, value: Value, axis: int) -> Value:
        """Apply a softmax along an axis.

        Raises:
            TypeError: If the rule also reads labels of values.
        """
        raise self._only_unlabelled("softmax")

    def _only_unlabelled(self, method: str) -> "OnlyUnlabelledError":
        return OnlyUnlabelledError(
            f"the rule for {self.operation} calls trace.{method} and also reads labels or constraints; expected a rule "
            "that does only one of these, as labels are unknown when functions are traced"
        )

    def contract(self, one: Value, one_axes: Goes, two: Value, two_axes: Goes, shape: Sequence[int]) -> Value:
        """Multiply two values and sum over one axis of each: the group acts on one factor, inversely on the other.

        Args:
            one: First factor.
            one_axes: The result's axis for each of its axes; None for vanishing axes; the first of these is summed.
            two: Second factor.
            two_axes: The same for the second factor. An axis shared by both is a batch axis.
            shape: The result's shape.
        """
        axes, rank = (one_axes, two_axes), len(shape)
        summed = [goes.index(None) for goes in axes]
        one, two = (
            self.members_apart(own, other, _meeting(goes, others))
            for own, goes, other, others in ((one, one_axes, two, two_axes), (two, two_axes, one, one_axes))
        )
        one, two = self._at_all_places(one, one_axes, two, two_axes), self._at_all_places(two, two_axes, one, one_axes)
        one, two = self._by_element(one, one_axes, two, two_axes), self._by_element(two, two_axes, one, one_axes)
        values = [
            self._for_each_block(one, one_axes, two, two_axes),
            self._for_each_block(two, two_axes, one, one_axes),
        ]
        values = [
            self._lending(value, axis) if other.labels else value
            for value, other, axis in zip(values, values[::-1], summed, strict=True)
        ]
        inner = [
            next((label for label in value.labels if axis in label.axes), None)
            for value, axis in zip(values, summed, strict=True)
        ]
        for own, across in ((0, 1), (1, 0)):
            whole = next((label for label in values[own].labels if not label.axes), None)
            if inner[own] is None and inner[across] is not None and whole is not None:
                inner[own] = self.constraints.spread(whole, summed[own], values[own].shape[summed[own]])
                rest = tuple(label for label in values[own].labels if label is not whole)
                values[own] = replace(values[own], labels=rest)
        for own, across in ((0, 1), (1, 0)):
            label, other = inner[own], values[across]
            if label is None or len(label.axes) < 2 or other.labels or other.concrete is not None:
                continue
            # The other factor has no labels (weights made for an input): the summed units are fixed, the rest may move.
            self.constraints.fix_units(self.parts(label, [summed[own]]).atom)
            whole = self.parts(label, [axis for axis in label.axes if axis != summed[own]])
            self.constraints.equate([(label.scale, 1.0), (self.onto(whole, label).scale, -1.0)])
            rest = tuple(each for each in values[own].labels if each is not label)
            values[own], inner[own] = replace(values[own], labels=(*rest, whole)), None
        # A factor that is constant along the units of the other one (an input for all experts) does not distinguish
        # them.
        lived = [
            {goes[axis] for label in value.labels for axis in label.axes}
            for value, goes in zip(values, axes, strict=True)
        ]
        narrow = [self._narrowed(values[0], one_axes, lived[1]), self._narrowed(values[1], two_axes, lived[0])]
        first, second = (value.on(goes, rank) for value, goes in zip(narrow, axes, strict=True))
        one_label, two_label = inner
        blocks: Label | None = None
        if one_label is not None and two_label is not None:
            blocks = self._undone(values, (one_label, two_label), axes, alone=not (first.labels or second.labels))
            for value, other, axis in ((one, two, summed[0]), (two, one, summed[1])):
                if other.state is not None and self._holds_twice(value, axis):
                    self.note(TWICE)
        else:
            for own, other in ((0, two), (1, one)):
                value, label, side = values[own], inner[own], (first, second)[1 - own]
                # Zeros (an initial state) accept any label.
                if label is not None and other.concrete is None and any(each.axes for each in side.labels):
                    taken = self._taken(label, side)
                    first, second = (taken, second) if own else (first, taken)
                elif label is not None and not other.is_zero:
                    fixed = other.concrete is not None and self.constraints.explain(f"{self.where}: {FIXED_MATRIX}")
                    with fixed or contextlib.nullcontext():
                        self.fix(value.with_labels(label))
        one_side = not (first.labels and second.labels)  # the map is linear in the labelled factor
        with self.constraints.unrestricted() if one_side else contextlib.nullcontext():
            result = self.join(first, second, product=True)
        if blocks is None:
            return Value(tuple(shape), result.labels)
        beside = [label for label in result.labels if set(label.axes) & set(blocks.axes)]
        met: tuple[Label, ...] = (blocks,)
        if beside:
            sizes = tuple(size if axis in blocks.axes else 1 for axis, size in enumerate(shape))
            met = self.join(result.with_labels(*beside), Value(sizes, met), product=True).labels
        return Value(tuple(shape), (*(label for label in result.labels if label not in beside), *met))

    def _at_all_places(self, value: Value, goes: Goes, other: Value, others: Goes) -> Value:
        """Let units act alike along axes that the other factor, a parameter, does not have, as it undoes them there."""
        label = next((label for label in value.labels if goes.index(None) in label.axes), None)
        root = other.sources[0][0] if len(other.sources) == 1 else other
        if label is None or root.state is None or all(len(own.axes) > 1 for own in other.labels):
            return value
        beside = [axis for axis in label.axes if goes[axis] is not None and goes[axis] not in others]
        return self.tied(value, beside) if beside else value

    def _by_element(self, value: Value, goes: Goes, other: Value, others: Goes) -> Value:
        """Make the elements of a matrix units if units index both of its axes in the other factor (heads)."""
        met = next((label for label in other.labels if others.index(None) in label.axes), None)
        targets = set() if met is None else {others[axis] for axis in met.axes}
        own = [label for label in value.labels if {goes[axis] for axis in label.axes} & targets]
        if len(own) < 2 or any(len(label.axes) > 1 for label in own):
            return value
        axes = {axis for label in own for axis in label.axes}
        return self._jointly(value, lambda tensor: tensor, [axes]) or value

    def _taken(self, label: Label, other: Value) -> Value:
        """Let the units of one factor share a scale, which units of the other factor, on kept axes, take over."""
        self.constraints.fix_units(label.atom.ravel())
        self.constraints.restrict(label)
        common = self.constraints.fresh_scales(())
        self.constraints.equate([(label.scale, 1.0), (np.full(label.scale.shape, int(common)), -1.0)])
        at = next(at for at, each in enumerate(other.labels) if each.axes)
        own = other.labels[at]
        scale = self.constraints.product((own.scale, 1.0), (np.full(own.scale.shape, int(common)), 1.0))
        return replace(other, labels=(*other.labels[:at], own.scaled_by(scale), *other.labels[at + 1 :]))

    def _lending(self, value: Value, axis: int) -> Value:
        """Let units on an axis take over a scale that all units on another axis share: the value remains the same."""
        own = next((label for label in value.labels if axis in label.axes), None)
        others = [label for label in value.labels if label is not own and label.axes]
        roots = [value, *(root for root, _ in value.sources)]
        if own is None or not others or any(root.state is not None for root in roots):
            return value
        labels = []
        for label in others:
            common = self.constraints.fresh_scales(())
            self.constraints.common.append(common)
            one, two = (np.full(part.scale.shape, int(common)) for part in (own, label))
            own = own.scaled_by(self.constraints.product((own.scale, 1.0), (one, 1.0)))
            labels.append(label.scaled_by(self.constraints.product((label.scale, 1.0), (two, -1.0))))
        filling = (label for label in value.labels if label is not own and not label.axes)
        return replace(value, labels=(own, *labels, *filling))

    def _for_each_block(self, value: Value, goes: Goes, other: Value, others: Goes) -> Value:
        """Copy a factor's units for each block (head) of the other factor, if the first is constant along blocks."""
        for axis, target in enumerate(goes):
            single = len(value.labels) == 1 and value.labels[0].axes  # a number has a scale, but no units
            if target is None or target not in others or not single or axis in value.labels[0].axes:
                continue
            across = others.index(target)
            size = other.shape[across]
            # The other factor can undo the action on summed units only if these differ between blocks.
            met = {across, others.index(None)} if goes.index(None) in value.labels[0].axes else {across}
            if size == 1 or not any(met <= {*label.axes} for label in other.labels) or not self._repeats(value, axis):
                continue
            label = value.labels[0]
            axes = tuple(sorted((axis, *label.axes)))
            place = axes.index(axis)
            lengths = (*label.atom.shape[:place], size, *label.atom.shape[place:])
            number = np.broadcast_to(np.arange(size).reshape(-1, *[1] * (len(axes) - place - 1)), lengths)
            copied = self.constraints.copied(self.onto(label, Label(axes, number, number, number)), number)
            shape = tuple(size if own == axis else length for own, length in enumerate(value.shape))
            value = Value(shape, (copied,), sources=value.sources)
        return value

    def _narrowed(self, value: Value, goes: Goes, others: Collection[int | None]) -> Value:
        """Reduce a factor to size 1 along axes of the other factor's units along which it is constant."""
        own = {axis for label in value.labels for axis in label.axes}
        batch = [
            axis for axis, target in enumerate(goes) if target is not None and target in others and axis not in own
        ]
        along = [axis for axis in batch if value.shape[axis] > 1 and self._repeats(value, axis)]
        return replace(value, shape=tuple(1 if axis in along else size for axis, size in enumerate(value.shape)))

    def _repeats(self, value: Value, axis: int) -> bool:
        """Whether a value is constant along an axis."""
        return value.shape[axis] == 1 or (len(value.sources) == 1 and not self._varies(value, axis))

    @staticmethod
    def _holds_twice(value: Value, axis: int) -> bool:
        """Whether an entry of a value is repeated along an axis."""
        roots = {id(root): math.prod(root.shape) for root, _ in value.sources}
        if not roots or math.prod(value.shape) <= sum(roots.values()) or math.prod(value.shape) > _MANY:
            return False
        number, whole = dict(zip(roots, itertools.accumulate(roots.values(), initial=0), strict=False)), torch.zeros(())
        for root, path in value.sources:
            part = moved_coordinates(root.shape, range(root.ndim), path)
            whole = whole + torch.where(part > 0, part + number[id(root)], part)
        one = whole.expand(value.shape).movedim(axis, -1).reshape(-1, value.shape[axis])[0]
        return len(set(one[one > 0].tolist())) < int((one > 0).sum())

    def _undone(
        self, values: Sequence[Value], labels: Sequence[Label], goes: Sequence[Goes], *, alone: bool
    ) -> Label | None:
        """Let the second factor undo the group's action on the summed axis of the first factor.

        Args:
            values: The factors.
            labels: The label of each on the summed axis.
            goes: The result's axis for each axis of each factor.
            alone: Whether only blocks act on the product, which then have scales.

        Returns:
            The blocks of units at one position of the batch axes, on these axes. Without batch axes, the product as one
            number if no other label acts on it, else None.
        """
        summed = [targets.index(None) for targets in goes]
        # The summed axis last, batch axes before, in the order of the result.
        one, two = (
            label.moved((), functools.partial(np.moveaxis, source=label.axes.index(axis), destination=-1))
            for label, axis in zip(labels, summed, strict=True)
        )
        batch, other = (
            [targets[axis] for axis in label.axes if axis != at]
            for label, targets, at in zip(labels, goes, summed, strict=True)
        )
        if batch != other or None in batch or labels[0].atom.shape != labels[1].atom.shape:
            if (each := self._undone_for_each((one, two), (batch, other))) is not None:
                return each
            self.fix(values[0].with_labels(labels[0]), "the two sides of a product carry different labels")
            self.fix(values[1].with_labels(labels[1]))
            return None
        axes = tuple(axis for axis in batch if axis is not None)
        squared = one.atom == two.atom
        if squared.any():  # a sum of squares: only orthogonal mixtures are their own inverse transpose
            self.constraints.keep_norm(one.at(squared))
        joined = self.constraints.same_units(one, two, contracted=True)
        self.constraints.paired.append(joined.atom.ravel())
        if not axes and not alone:
            self.constraints.equate([(one.scale, 1.0), (two.scale, 1.0)])
            return None
        # Equal members (in another sample of the batch) form the same block.
        rows = joined.atom.reshape(-1, joined.atom.shape[-1])
        _, first_row, again = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        blocks = self.constraints.fresh((0,), (len(first_row),)).take(again.reshape(joined.atom.shape[:-1]))
        blocks = Label(axes, blocks.atom, numbered(blocks), blocks.scale)
        whole = np.broadcast_to(blocks.scale[..., None], one.scale.shape)
        self.constraints.equate([(one.scale, 1.0), (two.scale, 1.0), (whole, -1.0)])
        if not alone:
            self.constraints.fix_scales(blocks.scale)
        self.constraints.block(np.broadcast_to(blocks.atom[..., None], joined.atom.shape), joined.atom)
        self.see(blocks)
        return blocks

    def _undone_for_each(self, labels: Sequence[Label], goes: Sequence[Goes]) -> Label | None:
        """Let factors with units of their own at each place undo each other's action, for each pair of places.

        Args:
            labels: The label of each factor, with the summed axis last.
            goes: The result's axes for the others.

        Returns:
            The products, which have scales only; None if there are too many, or if the sums are of unlike units.
        """
        axes = sorted({axis for targets in goes for axis in targets if axis is not None})
        size: dict[int | None, int] = {}
        for label, targets in zip(labels, goes, strict=True):
            size |= {axis: max(size.get(axis, 1), own) for axis, own in zip(targets, label.atom.shape, strict=False)}
        shape = (*(size[axis] for axis in axes), labels[0].atom.shape[-1])
        if None in size or labels[0].atom.shape[-1] != labels[1].atom.shape[-1] or math.prod(shape) > _MANY:
            return None
        one, two = (
            label.moved((), lambda part, targets=targets: _spread(part, targets, axes, shape))  # type: ignore[misc]
            for label, targets in zip(labels, goes, strict=True)
        )
        squared = one.atom == two.atom
        if squared.any():
            self.constraints.keep_norm(one.at(squared))
        self.constraints.same_units(one, two, contracted=True)
        self.constraints.paired.append(one.atom.ravel())
        whole = self.constraints.fresh(tuple(axes), shape[:-1])
        self.constraints.fix_units(whole.atom)
        self.constraints.common.append(whole.scale)
        self.constraints.equate(
            [(one.scale, 1.0), (two.scale, 1.0), (np.broadcast_to(whole.scale[..., None], shape), -1.0)]
        )
        return whole
