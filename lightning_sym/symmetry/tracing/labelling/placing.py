"""Labels after operations that move elements, or that act along an axis."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints, rising, rising_pairs
from lightning_sym.symmetry.tracing.graph.coordinates import (
    coordinates,
    copies_of,
    core,
    equal_positions,
    moved_positions,
    rank_within,
    reduced_to_axes,
    varying_axes,
)
from lightning_sym.symmetry.tracing.graph.nodes import ancestors
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.labelling.constraints import UNSET, Label
from lightning_sym.symmetry.tracing.labelling.stacks import Flattened
from lightning_sym.symmetry.tracing.labelling.trace_state import TraceState
from lightning_sym.symmetry.tracing.labelling.values import Members, Value

ALONG = "acts along an axis on which units live"
_MOST = 2**16  # maximal elements of a matrix with one unit per element


def _share_axes(labels: Sequence[Label]) -> bool:
    """Whether some labels have an axis in common."""
    axes = [axis for label in labels for axis in label.axes]
    return len(set(axes)) < len(axes)


def _flat(label: Label) -> Label:
    """Return the positions of a label in a row."""
    return label.moved((), np.ravel)


class Placing(TraceState):
    """Computes the labels of a value after moves and after operations along axes."""

    def tied(self, value: Value, axes: Sequence[int], reason: str = ALONG) -> Value:
        """Let the group act identically along some axes: all places of a channel become one unit.

        Args:
            value: Any value.
            axes: The axes along which an operation acts, for every channel; negative ones count from the end.
            reason: The note for units on these axes alone, which become fixed.

        Returns:
            The value, without labels on these axes.
        """
        gone, labels = {axis % value.ndim for axis in axes}, []
        for label in value.labels:
            kept = [axis for axis in label.axes if axis not in gone]
            tied: Label | None = label
            if len(kept) < len(label.axes):
                tied = self._at_one_place(label, kept) if kept or len(value.labels) == 1 else None
                if tied is None:
                    self.fix(value.with_labels(label), None if value.state else reason)
            labels.append(tied)
        return replace(value, labels=tuple(label for label in labels if label is not None))

    def _at_one_place(self, label: Label, kept: Sequence[int]) -> Label | None:
        """Merge the units at one position of some axes of a label; their tags record the places.

        Args:
            label: The units, also on further axes.
            kept: Some of its axes.

        Returns:
            The merged units on these axes; None if the units at one place do not determine those at the others.
        """
        label = self.constraints.resolve(label)
        order = [label.axes.index(axis) for axis in kept]
        order += [at for at in range(len(label.axes)) if at not in order]
        shape = tuple(label.atom.shape[at] for at in order[: len(kept)])
        atom, tag, scale = (np.transpose(part, order).reshape(int(np.prod(shape)), -1) for part in label.parts)
        _, row, like = np.unique(tag[:, 0], return_index=True, return_inverse=True)
        held = rising_pairs(atom.ravel(), np.repeat(like, atom.shape[1]))
        rows = rising_pairs(atom.ravel(), np.repeat(np.arange(len(atom)), atom.shape[1]))
        if (tag != tag[row][like]).any() or held.shape[1] < rows.shape[1]:
            return None
        # The first place of each unit distinguishes the units.
        _, first = np.unique(atom.ravel(), return_index=True)
        place = self.constraints.derive_tags(tag.ravel()[first], first % atom.shape[1])
        self.see(Label((), atom.ravel()[first], place, scale.ravel()[first]))
        pairs = rising_pairs(np.repeat(atom[:, 0], atom.shape[1]), atom.ravel())
        pairs = pairs[:, pairs[0] != pairs[1]]
        if pairs.size:
            self.constraints.merges.append((pairs[0], pairs[1]))
        factors = rising_pairs(np.repeat(scale[:, 0], scale.shape[1]), scale.ravel())
        factors = factors[:, factors[0] != factors[1]]
        if factors.size:
            self.constraints.equate([(factors[0], 1.0), (factors[1], -1.0)])
        parts = (part[:, 0].reshape(shape) for part in (atom, tag, scale))
        return self._plainest(Label(tuple(kept), *parts))

    def free_of(self, value: Value, axes: Sequence[int], reason: str) -> Value:
        """Fix the labels on some axes, and return the value without them."""
        gone = {axis % value.ndim for axis in axes}
        touched = [label for label in value.labels if gone & set(label.axes)]
        if touched:
            self.fix(value.with_labels(*touched), None if value.state else reason)
        return replace(value, labels=tuple(label for label in value.labels if not gone & set(label.axes)))

    def move(self, value: Value, function: Callable[[Tensor], Any], *, filled_by_zero: bool = True) -> Any:
        """Rearrange elements (reshape, slice, pad, ...) without changing them.

        Rules need no description of the move: the function runs on coordinates, and the labels follow.

        Args:
            value: Any value.
            function: Moves the elements of a tensor of the value's shape; may return several tensors.
            filled_by_zero: Whether new elements are zeros, which accept any scale.
        """
        if value.concrete is not None and filled_by_zero:
            moved = function(value.concrete)
            return torch.utils._pytree.tree_map(
                lambda t: Value(tuple(t.shape), concrete=t, by_size=value.by_size), moved
            )
        moved = [function(coordinates(value.shape, label.axes if label else ())) for label in value.labels or (None,)]
        if not isinstance(moved[0], (list, tuple)):
            return self._relabelled(value, moved, function, filled_by_zero)
        return [
            self._relabelled(value, parts, lambda t, index=index: function(t)[index], filled_by_zero)  # type: ignore[misc]
            for index, parts in enumerate(zip(*moved, strict=True))
        ]

    def _relabelled(
        self, value: Value, moved: Sequence[Tensor], function: Callable[[Tensor], Tensor], filled_by_zero: bool
    ) -> Value:
        """Return the moved value with its labels, given the moved coordinates on the axes of each label."""

        def labels(*, met: bool) -> tuple[Label, ...]:
            found = (
                self._moved(value, label, part, function, filled_by_zero, met=met)
                for label, part in zip(value.labels, moved, strict=False)
            )
            return tuple(label for label in found if label is not None)

        if (apart := self._members_in_a_row(value, moved, function, filled_by_zero)) is not None:
            return apart
        kept = labels(met=False)
        if _share_axes(kept):
            joint = self._jointly(value, function)
            if joint is not None:
                return joint
            kept = labels(met=True)
        result = self.disjoint(Value(tuple(moved[0].shape), kept, state=value.state))
        return replace(result, state=None, chooses=value.chooses)

    def _jointly(
        self, value: Value, function: Callable[[Tensor], Tensor], together: Sequence[Collection[int]] = ()
    ) -> Value | None:
        """Give each place on axes of a parameter that become one its own unit, if only the current operation reads it.

        Args:
            value: A parameter, perhaps after moves: a matrix, or the weights of heads.
            function: The next move.
            together: Axes of the result that count as one.

        Returns:
            The moved value with these labels; None for other values, for parameters read in part, and for those with
            other readers.
        """
        root, path = value.sources[0] if len(value.sources) == 1 else (value, ())
        axes = tuple(axis for axis, size in enumerate(root.shape) if size > 1)
        name = root.state
        if name is None or name in self.joint or len(axes) < 2 or root.members is not None:
            return None
        if not self._is_read_here_only(name) or (len(axes) > 2 and not together and not self._is_multiplied()):
            return None

        def moved(tensor: Tensor) -> Tensor:
            for step in path:
                tensor = step(tensor)
            return function(tensor)

        along = {}
        for axis in axes:
            shown = varying_axes(moved(coordinates(root.shape, (axis,))))
            along[axis] = {min(next((own for own in together if place in own), [place])) for place in shown}
        groups: list[tuple[int, ...]] = []
        for axis in axes:  # those that meet on an axis of the result
            met = [own for own in groups if any(along[axis] & along[other] for other in own)]
            groups = [own for own in groups if own not in met] + [tuple(sorted({axis}.union(*met)))]
        found, labels = [], []
        for own in groups:
            count = int(np.prod([root.shape[axis] for axis in own]))
            place = moved(coordinates(root.shape, own)) if count <= _MOST else torch.zeros(1)
            if len(rising(place.numpy())) < count:
                return None
            label = next(each for each in root.labels if each.axes == own[:1])
            if len(own) > 1:
                label = self.constraints.fresh(own, tuple(root.shape[axis] for axis in own), tag=UNSET)
            labels.append(label)
            found.append(self._moved(replace(root, labels=(label,)), label, place, moved, True))
        self.joint.add(name)
        single = [own[0] for own in groups if len(own) == 1]
        for label in root.labels:
            if label.axes[0] not in single:  # also of axes of size 1, which would scale all units
                self.constraints.fix(label)
        rest = tuple(own for own in root.labels if own.axes[0] not in axes)
        self.axis_labels[name] = (*rest, *labels)
        return Value(tuple(place.shape), tuple(own for own in found if own is not None))

    def _members_in_a_row(
        self, value: Value, moved: Sequence[Tensor], function: Callable[[Tensor], Tensor], filled_by_zero: bool
    ) -> Value | None:
        """Give the units of all members of a stack one label, if their axis becomes one with that of the members.

        Args:
            value: A value before the move.
            moved: The moved coordinates on the axes of each of its labels.
            function: The move.
            filled_by_zero: As in `move`.

        Returns:
            The moved value; None if the move does not join such axes.
        """
        if value.members is None or value.of_state or not value.labels:
            return None
        parts = list(zip(value.labels, moved, strict=True))
        inner = [each for each in parts if self.stacks.holds(each[0])]
        axes = {axis for _, part in inner for axis in varying_axes(part)}
        outer = [each for each in parts if each not in inner and axes & {*varying_axes(each[1])}]
        if len(inner) != 1 or len(outer) != 1:
            return None
        number = function(value.members.number + 1)
        axes |= {*varying_axes(outer[0][1])}
        shown = [number, outer[0][1], inner[0][1]]
        if {*varying_axes(number)} - axes or any(bool((core(part) < 1).any()) for part in shown):
            return None
        order = sorted(axes)
        shape = tuple(number.shape[axis] for axis in order)
        member, *places = (np.broadcast_to(reduced_to_axes(part, order), shape).ravel() - 1 for part in shown)
        wholes, units = (
            self.constraints.resolve(label).at(np.unravel_index(place, label.atom.shape))
            for (label, _), place in zip((*outer, *inner), places, strict=True)
        )
        if np.unique(np.stack([units.atom, member]), axis=1).shape[1] < len(member):
            return None
        if len(rising(units.tag)) > 1 or len(rising(wholes.tag)) > 1:
            return None
        label = self.constraints.fresh(tuple(order), shape)
        self.constraints.block(wholes.atom, label.atom)
        self.stacks.flattened.append(Flattened(member, units, wholes, _flat(label), self.where))
        rest = (self._moved(value, *each, function, filled_by_zero) for each in parts if each not in (*inner, *outer))
        return self.disjoint(Value(tuple(number.shape), (*(own for own in rest if own is not None), label)))

    def members_apart(self, value: Value, other: Value, across: dict[int, int]) -> Value:
        """Read units on two axes as those of the members of a stack, if another value has such units.

        Args:
            value: The value with the units.
            other: The other one.
            across: The axes that the two values have in common: those of the other one, by those of the value.
        """
        label = next((own for own in value.labels if len(own.axes) == 2 and {*own.axes} <= across.keys()), None)
        if label is None or value.members is not None or other.members is None:
            return value
        axis = {across[own]: own for own in label.axes}
        inner = [axis[own.axes[0]] for own in other.labels if {*own.axes} <= axis.keys() and self.stacks.holds(own)]
        outer = [axis[own] for own in varying_axes(other.members.number + 1) if own in axis]
        label = self.constraints.resolve(label)
        if len(inner) != 1 or len(outer) != 1 or inner == outer or len(rising(label.tag)) > 1:
            return value
        members = reduced_to_axes(other.members.number + 1, [across[outer[0]]]) - 1
        wholes, templates = (self.constraints.fresh((own,), (value.shape[own],)) for own in (outer[0], inner[0]))
        self.constraints.fix_scales(wholes.scale)
        self.constraints.block(self.onto(wholes, label).atom, label.atom)
        own = [self.onto(part, label).at(...) for part in (templates, wholes)]
        number = members.reshape([-1 if at == outer[0] else 1 for at in range(value.ndim)])
        along = np.broadcast_to(number, value.shape)
        kept = number.reshape([-1 if at == outer[0] else 1 for at in label.axes])
        member = np.broadcast_to(kept, label.atom.shape)
        self.stacks.flattened.append(Flattened(member.ravel(), _flat(own[0]), _flat(own[1]), _flat(label), self.where))
        rest = [each for each in value.labels if each.axes != label.axes]
        return replace(
            value,
            labels=(*rest, wholes, templates),
            members=Members(torch.from_numpy(along.copy()), other.members.size),
        )

    @staticmethod
    def onto(label: Label, wide: Label) -> Label:
        """Broadcast a label to all axes of a wider one."""
        shape = wide.atom.shape
        sizes = [size if axis in label.axes else 1 for axis, size in zip(wide.axes, shape, strict=True)]
        return label.moved(wide.axes, lambda part: np.broadcast_to(part.reshape(sizes), shape))

    def _is_read_here_only(self, name: str) -> bool:
        """Whether the current operation is the only reader of a parameter, apart from moves."""
        nodes = [node for node, state in self.capture.states.items() if state == name]
        while len(nodes) == 1 and nodes[0] is not self.node:
            nodes = list(nodes[0].users)
        return bool(nodes) and nodes[0] is self.node

    def _is_multiplied(self) -> bool:
        """Whether a product reads the current operation's result, apart from moves: a layer with weights of heads."""
        nodes = [self.node]
        while len(nodes) == 1 and name_of(nodes[0]) in operations(Trait.MOVE):
            nodes = list(nodes[0].users)
        return bool(nodes) and all(name_of(node) in operations(Trait.CONTRACT) for node in nodes)

    def disjoint(self, value: Value) -> Value:
        """Keep only the label with the most units on each axis; the units of others are fixed, their scales go on."""
        if not _share_axes(value.labels):
            return value
        kept: list[Label] = []
        gone: list[Label] = []
        for label in sorted(value.labels, key=lambda label: -len(rising(label.atom))):
            meets = [other for other in kept if set(label.axes) & set(other.axes)]
            (gone if meets else kept).append(label)
            if meets and value.state is None and set(label.axes) <= set(meets[0].axes):
                scale = self.constraints.product((meets[0].scale, 1.0), (self.onto(label, meets[0]).scale, 1.0))
                kept[kept.index(meets[0])] = meets[0].scaled_by(scale)
                gone[-1] = label.scaled_by(self.constraints.fresh_scales(label.scale.shape))
        # A parameter's axes need not index units (a filter's axes, for example), so this causes no note.
        self.fix(value.with_labels(*gone), None if value.state is not None else "two labelled axes became one")
        return value.with_labels(*kept)

    def _moved(
        self,
        value: Value,
        label: Label,
        part: Tensor,
        function: Callable[[Tensor], Tensor],
        filled_by_zero: bool,
        *,
        met: bool = False,
    ) -> Label | None:
        """Return the moved label, given the moved coordinates on its axes.

        Args:
            value: The moved value.
            label: One of its labels.
            part: The moved coordinates on the label's axes.
            function: The move.
            filled_by_zero: As in `move`.
            met: Whether other labels share the new axes, so that each unit appears at some of its places only.
        """
        if part.numel() == 0:
            return None
        if value.state is not None and label.size == 1 and value.ndim > 1:
            # The move of a parameter's axis of size 1 leaves no trace.
            self.constraints.fix(label)
            return None
        if value.state is not None and min(label.axes, default=0) > 1 and not varying_axes(part):
            # One place of a kernel, as in `w[:, :, 0]`: its scale is that of the rows.
            self.constraints.fix(label)
            return None
        filled, axes, position = self.once(moved_positions, function, value.shape, label.axes, part=part)
        if not axes:
            # A unit that fills the whole result keeps its axis where this is still known.
            kept = part.ndim == value.ndim and all(part.shape[axis] == 1 for axis in label.axes)
            shape = (1,) * len(label.axes) if kept else ()
            if not kept and label.axes and label.size == 1 and value.ndim > 2 and self._is_of_weights():
                self.constraints.fix(label)  # as for a single parameter above: concatenated kernels
                return None
            at = position.reshape(-1)[0]
            return label.moved(label.axes if kept else (), lambda array: np.reshape(array.reshape(-1)[at], shape))
        moved = label.moved(tuple(axes), lambda array: array.reshape(-1)[position])
        filler = position < 0
        times = np.bincount(position[~filler])
        if met and times.max(initial=0) == 1:  # a diagonal: another place for each unit
            code = self.once(copies_of, function, value.shape, label.axes, axes=axes, position=position)
            if len(rising(code)) > 1:
                self.constraints.restrict(label)
                tag = self.constraints.derive_tags(self.constraints.resolve(moved).tag, code)
                moved = Label(moved.axes, moved.atom, tag, moved.scale)
        if times.max(initial=0) > 1:
            same = self.same(value, axes, function)
            codes = self.once(copies_of, function, value.shape, label.axes, axes=axes, position=position)
            _, first, again = np.unique(same, return_index=True, return_inverse=True)
            if np.count_nonzero(times) < len(rising(same[~filler])):
                code = codes.ravel()[first][again].reshape(codes.shape)  # that of the first equal element
                tag = self.constraints.derive_tags(self.constraints.resolve(moved).tag, code)
                moved = Label(moved.axes, moved.atom, tag, moved.scale)
            number = rank_within(again.ravel()).reshape(position.shape)
            if number[~filler].any():
                moved = self.constraints.copied(moved, np.where(filler, 0, number))
        if filler.any():
            new = self.constraints.fresh((), (int(filler.sum()),))
            for array, others in zip(moved.parts, new.parts, strict=True):
                array[filler] = others
            self.constraints.restrict(new)
            if not filled_by_zero:
                self.constraints.fix_scales(new.scale)
        if filled and not filled_by_zero:
            self.constraints.restrict(label)
            self.constraints.fix_scales(label.scale)
        return self._plainest(moved)

    def once(self, compute: Callable[..., Any], *key: Any, **more: Any) -> Any:
        """Return the result of a function, which is computed once for equal arguments; `more` depends on these."""
        if (found := self.known.get((compute, key))) is None:
            found = self.known[compute, key] = compute(*key, **more)
        return found

    def same(self, value: Value, axes: Sequence[int], *moves: Callable[[Tensor], Tensor]) -> Ints:
        """Number the positions on some axes of a moved value; positions with always equal contents share a number."""
        root, path = value.sources[0] if len(value.sources) == 1 else (value, ())
        found: Ints = self.once(equal_positions, (*path, *moves), root.shape, tuple(axes))
        return found

    def _is_of_weights(self) -> bool:
        """Whether the current operation depends on parameters only."""
        sources = {node for node in ancestors(self.node) if node.op == "placeholder"}
        return sources <= {*self.capture.states}

    def _plainest(self, label: Label) -> Label:
        """Remove axes along which the units repeat, and tags that distinguish nothing."""
        for place in reversed(range(len(label.axes))):
            if all((part == part.take([0], place)).all() for part in (label.atom, label.scale)):
                axes = (*label.axes[:place], *label.axes[place + 1 :])
                label = label.moved(axes, lambda part, place=place: part.take(0, place))  # type: ignore[misc]
        told = rising(label.tag[label.tag > 0])
        if len(told) == 1 and len(rising(label.atom)) == label.size:
            label = Label(label.axes, label.atom, np.where(label.tag > 0, 0, label.tag), label.scale)
        return label
