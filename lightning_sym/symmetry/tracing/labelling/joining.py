"""Constraints of elementwise sums and products on the units of both operands."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from lightning_sym.symmetry.arrays import Ints, rising, rising_pairs
from lightning_sym.symmetry.numbering import flat
from lightning_sym.symmetry.tracing.graph.coordinates import moved_coordinates, numbered_rows, rows_of, varies
from lightning_sym.symmetry.tracing.graph.nodes import shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.labelling.constraints import Label, counted
from lightning_sym.symmetry.tracing.labelling.placing import Placing
from lightning_sym.symmetry.tracing.labelling.values import Value


def _places(label: Label, axes: Sequence[int]) -> Ints:
    """Number the positions of a label by their places on some of its axes."""
    shape = label.atom.shape
    sizes = [size if axis in axes else 1 for axis, size in zip(label.axes, shape, strict=True)]
    return np.broadcast_to(np.arange(int(np.prod(sizes))).reshape(sizes), shape)


def _crossing(first: Sequence[Label], second: Sequence[Label]) -> set[int]:
    """Return the axes that labels of two values share while each has another one: units act alike along these."""
    pairs = ((set(one.axes), set(two.axes)) for one, two in itertools.product(first, second))
    return set().union(*(one & two for one, two in pairs if one - two and two - one))


MET = "meets numbers that do not depend on the inputs: biases could absorb them"


class Joining(Placing):
    """Writes the constraints of values that are combined elementwise."""

    def gain_in(self, value: Value) -> str | None:
        """Return the name of a parameter vector that a value shows, at most moved; else None."""
        names = {root.state for root, _ in value.sources or ((value, ()),)}
        name = names.pop() if len(names) == 1 else None
        vector = name in self.joint or (name and max(self.tensors[name].shape, default=0) == self.tensors[name].numel())
        if name is None or not vector:
            return None
        return name

    def join(
        self,
        one: Value,
        two: Value,
        *,
        product: bool,
        divide: bool = False,
        gain: str | None = None,
    ) -> Value:
        """Combine two values elementwise, with broadcasting: a sum, product or quotient.

        In a sum both operands must have the same units and scales. In a product the units must agree, and scales
        multiply.

        Args:
            one: Any value.
            two: Any value, of a shape that broadcasts with the first.
            product: Whether scales multiply.
            divide: Whether it is a quotient.
            gain: The name of the factor or divisor, if it is a parameter vector of gains.
        """
        shape = tuple(np.broadcast_shapes(one.shape, two.shape))
        one, two = (
            self.members_apart(
                own, other, {own.ndim + at: other.ndim + at for at in range(-min(own.ndim, other.ndim), 0)}
            )
            for own, other in ((one, two), (two, one))
        )
        given = one, two
        one, two = self._on_one_axis(one, two, len(shape)), self._on_one_axis(two, one, len(shape))
        if product and given == (one, two):
            one, two = self._by_entry(one, two), self._by_entry(two, one)
        if product and gain is None and (one, two) != given:  # a matrix with one unit per element
            gain = self.gain_in(given[1]) or (None if divide else self.gain_in(given[0]))
        first, second = self._broadcast(one, shape), self._broadcast(two, shape)
        if across := _crossing(first, second):
            tied = (self.tied(own, [axis - len(shape) for axis in across]) for own in (one, two))
            return self.join(*tied, product=product, divide=divide, gain=gain)
        added = bool(not product and first and second and self._is_number(first) != self._is_number(second))
        if added:
            first, second = self._beside_number(first, second), self._beside_number(second, first)
        result: list[Label] = []
        beside: list[Ints] = []  # the scales of labels beside values that nothing moves
        left = list(second)
        for label in first:
            partner = next(
                (other for other in left if set(other.axes) & set(label.axes) or not (other.axes or label.axes)), None
            )
            if partner is None:
                alone = self._alone(label, two, shape, product, beside, number=added)
                if alone is not None:
                    result.append(alone)
                continue
            left.remove(partner)
            nested = label.axes != partner.axes
            parents = None
            if product and not nested:
                parents, units = self._repeated(label, partner, two, len(shape)), label
                if parents is None and (parents := self._repeated(partner, label, one, len(shape))) is not None:
                    label, units = parents, partner
            if parents is not None:
                nested, joined = True, self.constraints.resolve(units)
                self.constraints.block(parents.atom, joined.atom)
            elif not nested:
                apart = None if product else self._both_blocks(label, partner)
                joined = apart or self.constraints.same_units(label, partner)
            else:
                wide, narrow = (label, partner) if len(label.axes) > len(partner.axes) else (partner, label)
                joined, parents = (self.onto(self.constraints.resolve(part), wide) for part in (wide, narrow))
                spread = product and gain is not None and self.tensors[gain].numel() == narrow.size
                if spread and gain is not None:
                    self.gains[gain] += 1
                self.constraints.block(parents.atom, joined.atom, gains=spread)
                self._see_by_tag(joined, parents)
                joined = self._told_apart(joined, narrow, two if wide is label else one, len(shape))
                label, partner = (joined, parents) if wide is label else (parents, joined)
            scale = label.scale
            if product:
                if gain is not None and not nested and self.tensors[gain].numel() == joined.size:
                    self.gains[gain] += 1
                    self.constraints.gained.append(joined.atom.ravel())
                elif not nested or (divide and label is parents):
                    self.constraints.restrict(joined)  # one factor per block commutes with all mixtures inside
                scale = self.constraints.product((label.scale, 1.0), (partner.scale, -1.0 if divide else 1.0))
            else:
                self.constraints.equate([(label.scale, 1.0), (partner.scale, -1.0)])
            result.append(joined.scaled_by(scale))
        for label in left:
            alone = self._alone(label, one, shape, product, beside, number=added)
            if alone is not None and product and divide:  # reciprocals are not linear
                self.constraints.restrict(alone)
                alone = alone.scaled_by(self.constraints.product((alone.scale, -1.0)))
            if alone is not None:
                result.append(alone)
        alone_only = not (one.labels and two.labels)
        for scales in [beside] if alone_only else [[own] for own in beside]:
            self.constraints.fix_product(scales)
        if alone_only and len(beside) > len(result) > 0:  # some axes lose the labels that make the product 1
            fixed = self.constraints.fresh_scales(())
            self.constraints.fix_scales(fixed)
            result = [own.scaled_by(np.full(own.scale.shape, fixed)) for own in result]
        return self.disjoint(Value(shape, tuple(self.lent(result) if product else result)))

    def _on_one_axis(self, value: Value, other: Value, rank: int) -> Value:
        """Make the elements of a matrix units if another value has one label on both of its axes."""
        own = [{axis + rank - value.ndim for axis in label.axes} for label in value.labels]
        wide = [{axis + rank - other.ndim for axis in label.axes} for label in other.labels]
        if any(sum(bool(axes & label) for axes in own) > 1 for label in wide):
            before = rank - value.ndim
            together = [{axis - before for axis in label if axis >= before} for label in wide]
            return self._jointly(value, lambda tensor: tensor, [axes for axes in together if axes]) or value
        return value

    def _by_entry(self, value: Value, other: Value) -> Value:
        """Make the entries of a matrix that multiplies a value units, if another matrix may undo their scales."""
        if id(other) in self.made_of_states or len(value.labels) < 2 or any(len(own.axes) > 1 for own in value.labels):
            return value
        if not self._is_multiplied_again():
            return value
        axes = [axis for own in value.labels for axis in own.axes]
        found = self._jointly(value, lambda tensor: tensor, [axes])
        if found is not None:
            self.note("each entry of the matrix has a scale; permutations of whole rows or columns may be missing")
        return found or value

    def _is_multiplied_again(self) -> bool:
        """Whether another matrix of parameters multiplies the current result behind elementwise functions.

        It multiplies elements or, for all readers of the result, sums their products.
        """
        passed = operations(Trait.POINTWISE | Trait.MOVE | Trait.CAST | Trait.JOIN)
        left, own = [self.node], {self._parameter_behind(given) for given in self.node.all_input_nodes}
        summed: set[bool] = set()
        for node in left:
            for user in node.users:
                name = name_of(user)
                if name in passed:
                    left.extend([] if user in left else [user])
                    continue
                others = {self._parameter_behind(each) for each in user.all_input_nodes if each is not node}
                again = any(sum(size > 1 for size in shape_of(other) or ()) > 1 for other in others - own - {None})
                if again and name in operations(Trait.PRODUCT) and shape_of(user) == shape_of(node):
                    return True
                summed.add(again and name == "matmul")
        return summed == {True}

    def _parameter_behind(self, node: fx.Node) -> fx.Node | None:
        """Return the parameter of which a node shows the elements, if there is one."""
        while name_of(node) in operations(Trait.MOVE) and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node if node in self.capture.states else None

    def _repeated(self, label: Label, partner: Label, value: Value, rank: int) -> Label | None:
        """Return the original units of a factor that repeats one number for several units; None for other factors.

        Args:
            label: The units.
            partner: The factor's units, on the same axes.
            value: The factor, broadcast to a result of `rank` axes.
            rank: See `value`.
        """
        whole = self.constraints.pending(partner)  # its tags may still be unset
        of = self.constraints.copied_from(whole.atom)
        axes = [axis - rank + value.ndim for axis in whole.axes]
        if (of == whole.atom).all() or len(rising(label.atom)) < label.size or min(axes, default=-1) < 0:
            return None
        if (self.constraints.copied_from(label.atom) != label.atom).any():
            return None
        numbers = self.same(value, axes)
        pairs = np.unique(np.stack([of.ravel(), whole.tag.ravel(), numbers.ravel()]), axis=1)
        if pairs.shape[1] > len(rising(of)):
            return None
        return Label(whole.axes, of, self.constraints.resolve(partner).tag, whole.scale)

    def _told_apart(self, label: Label, parents: Label, value: Value, rank: int) -> Label:
        """Distinguish units along axes that do not index their parents, but along which the parents' value varies.

        Args:
            label: The units.
            parents: Units on some of the label's axes.
            value: The value of the parents, broadcast to a result of `rank` axes.
            rank: See `value`.
        """
        sizes = (1,) * (rank - value.ndim) + value.shape
        index: Ints = np.indices(label.atom.shape, np.int64)
        places = [
            index[number] for number, axis in enumerate(label.axes) if axis not in parents.axes and sizes[axis] > 1
        ]
        if not places:
            return label
        self.constraints.restrict(label)
        label = self.constraints.resolve(label)
        for place in places:
            tag = self.constraints.derive_tags(label.tag, place)
            label = Label(label.axes, label.atom, tag, label.scale)
        self.see(label)
        return label

    def _both_blocks(self, label: Label, partner: Label) -> Label | None:
        """Return new blocks that contain two blocks each, whose units may not be mixed with each other; else None.

        A sum of products of two heads mixes the units of both, unless a nonlinear function of one of them comes first.
        """
        label, partner = self.constraints._agree(label, partner)
        both = np.stack([label.atom.ravel(), partner.atom.ravel()])
        if (both[0] == both[1]).any() or not np.array_equal(label.tag, partner.tag):
            return None
        if not np.isin(both, flat([parents for parents, _ in self.constraints.blocks])).all(1).all():
            return None
        if not np.isin(both, flat(self.constraints.restricted)).any():
            return None
        pairs, again = np.unique(both, axis=1, return_inverse=True)
        atom = self.constraints.fresh((), (pairs.shape[1],)).atom[again.ravel()].reshape(label.atom.shape)
        for part in (label, partner):
            self.constraints.block(atom, part.atom)
            self.see(part)  # tells the two apart
        return Label(label.axes, atom, label.tag, label.scale)

    def _see_by_tag(self, label: Label, parents: Label) -> None:
        """Distinguish units whose parents are one unit at different positions."""
        parents = self.constraints.resolve(parents)
        if len(rising(parents.atom)) < len(rising_pairs(parents.atom.ravel(), parents.tag.ravel())[0]):
            label = self.constraints.resolve(label)
            tag = self.constraints.derive_tags(label.tag, parents.tag)
            self.see(Label(label.axes, label.atom, tag, label.scale))

    def _beside_number(self, labels: list[Label], others: list[Label]) -> list[Label]:
        """Tie the scales of units to that of a number added to them (their mean)."""
        if not self._is_number(labels):
            return labels
        for label in others:
            self.constraints.keep_ones(label)
            self.constraints.equate([(np.full(label.scale.shape, int(labels[0].scale)), 1.0), (label.scale, -1.0)])
        return []

    @staticmethod
    def _is_number(labels: list[Label]) -> bool:
        """Whether the only label is that of a unit that fills the value."""
        return len(labels) == 1 and not labels[0].axes

    def lent(self, labels: list[Label]) -> list[Label]:
        """Multiply the scales of units by those of numbers in the same value (a learned gate, a sum over other units).

        Without units, the scales of several numbers become that of one.
        """
        units, numbers = ([own for own in labels if bool(own.axes) == wide] for wide in (True, False))
        if len(numbers) <= (not units):
            return labels
        wide, *others = units or [numbers.pop(0)]
        wholes = [(np.full(wide.scale.shape, int(own.scale)), 1.0) for own in numbers]
        return [wide.scaled_by(self.constraints.product((wide.scale, 1.0), *wholes)), *others]

    def parts(self, label: Label, axes: Sequence[int], *, mixtures: bool = False) -> Label:
        """Require that units at one position of some axes stay together (heads, groups).

        Args:
            label: The units, also on further axes.
            axes: Some of the label's axes.
            mixtures: Whether mixtures inside such a group are allowed.

        Returns:
            New units with new scales on these axes: the groups.
        """
        label = self.constraints.resolve(label)
        shape = tuple(label.atom.shape[label.axes.index(axis)] for axis in axes)
        wholes = self.constraints.fresh(tuple(axes), shape)
        if not mixtures:
            self.constraints.restrict(label)
        self.constraints.block(self.onto(wholes, label).atom, label.atom)
        self.see(wholes)
        return wholes

    def _broadcast(self, value: Value, shape: tuple[int, ...]) -> list[Label]:
        """Return the labels of a value on the axes of a larger shape."""
        offset = len(shape) - value.ndim
        result = []
        keep_single = int(np.prod(value.shape)) == 1
        for label in value.labels:
            if value.state is not None and label.size == 1 and label.axes:
                # A parameter's axis of size 1 carries no label, unless the parameter is one number.
                if not keep_single:
                    self.constraints.fix(label)
                    continue
                keep_single = False
            # A unit on an expanded axis, as of an expanded number, fills that axis.
            own = zip(label.axes, label.atom.shape or (1,) * len(label.axes), strict=True)
            kept = tuple(axis + offset for axis, size in own if size == shape[axis + offset])
            sizes = [shape[axis] for axis in kept]
            result.append(label.moved(kept, lambda part, sizes=sizes: part.reshape(sizes)))  # type: ignore[misc]
        return result

    def _alone(
        self, label: Label, other: Value, shape: tuple[int, ...], product: bool, beside: list[Ints], *, number: bool
    ) -> Label | None:
        """Combine a label with a value without labels there; None if the group cannot act on the result.

        Args:
            label: The label.
            other: The value.
            shape: The result's shape.
            product: Whether they are multiplied.
            beside: Receives scales that the sum fixes.
            number: Whether the value is computed from units and has the label's scale, see `_beside_number`.
        """
        label = self.constraints.resolve(label)
        if other.is_zero and not product:
            return label
        if other.concrete is not None:
            constant = replace(other, shape=shape, concrete=other.concrete.expand(shape))
            return self.beside_constant(label, constant, added=not product)
        along = [axis for axis in label.axes if self._varies(other, axis - len(shape) + other.ndim)]
        varies = bool(along)
        kind = self._kinds(label, other, shape) if varies else None
        if kind is not None:
            self._told_by(label, kind)
            if not product:
                self.constraints.keep_ones(label)
                self.constraints.fix_scales(label.scale)
            return label
        if product and varies and (heads := self._heads(label, along)) is not None:  # a different factor per head
            wholes = self.constraints.fresh((0,), (int(heads.max()) + 1,))
            self.constraints.block(wholes.atom[heads], label.atom)
            self.constraints.fix_units(wholes.atom)
            return label
        if varies:
            self.constraints.fix_units(label.atom.ravel())
            self.constraints.restrict(label)
        if not product and (varies or not number):
            self.constraints.keep_ones(label)
            beside.append(label.scale)
        return None if varies and not product else label

    def _told_by(self, label: Label, kind: Ints) -> None:
        """Require that units meet the same numbers when they move.

        Args:
            label: The units.
            kind: A number for each position of the label; equal ones mark positions that meet the same numbers.
        """
        self.constraints.restrict(label)
        alone = label.atom[np.bincount(kind.ravel())[kind] == 1]
        self.constraints.fix_units(alone, counted("meets numbers that tell units apart", alone, "place"))
        tag = self.constraints.derive_tags(label.tag, kind)
        self.see(Label(label.axes, label.atom, tag, label.scale))

    @staticmethod
    def _kinds(label: Label, value: Value, shape: tuple[int, ...]) -> Ints | None:
        """Number the positions of a label by a value's elements there, if some recur (as masks of all heads)."""
        if not value.sources or not label.axes or value.labels:
            return None
        paths = [moved_coordinates(root.shape, range(root.ndim), path) for root, path in value.sources]
        rows = [rows_of(moved.expand(shape), label.axes) for moved in paths]
        kind = numbered_rows(np.hstack([np.broadcast_to(row, (label.size, row.shape[1])) for row in rows]))
        units, kinds = len(rising(label.atom.ravel())), len(rising(kind))
        return kind.reshape(label.atom.shape) if kinds * units == label.size and kinds < label.size else None

    @staticmethod
    def _heads(label: Label, axes: Sequence[int]) -> Ints | None:
        """Number the parts of a label such that units at one position of some axes form one part, in every sample.

        Args:
            label: The units, also on further axes.
            axes: Some of the label's axes.

        Returns:
            The part of each unit, of the label's shape; None if units meet others at some positions only.
        """
        if len(axes) == len(label.axes):
            return None
        place, unit = _places(label, axes).ravel(), np.unique(label.atom, return_inverse=True)[1].ravel()
        pairs = rising_pairs(unit, place)
        first = pairs[1][np.searchsorted(pairs[0], np.arange(unit.max() + 1))]  # the first place of each unit
        of_place = first[unit[np.unique(place, return_index=True)[1]]]
        counts = np.bincount(of_place, minlength=len(of_place))
        if (of_place[place] != first[unit]).any() or (np.bincount(pairs[0]) != counts[first]).any():
            return None
        return np.unique(first[unit], return_inverse=True)[1].reshape(label.atom.shape)

    @staticmethod
    def _varies(value: Value, axis: int) -> bool:
        """Whether a value may vary along an axis; a negative axis does not exist."""
        if axis < 0 or value.shape[axis] == 1:
            return False
        paths = (moved_coordinates(root.shape, range(root.ndim), path) for root, path in value.sources)
        return not value.sources or any(varies(moved, axis) for moved in paths)

    def beside_constant(self, label: Label, value: Value, *, added: bool = False) -> Label:
        """Combine a label with a constant: units with equal numbers can be permuted.

        If the numbers may differ for inputs of another size, the units are fixed.

        Args:
            label: A label on some axes of the constant.
            value: The constant: a factor, a filter for each unit, or a summand.
            added: Whether it is a summand; units with nonzero summands then keep their scale.
        """
        constant = value.concrete
        assert constant is not None
        varying = [axis for axis in label.axes if constant.shape[axis] > 1 and constant.stride(axis)]
        rows = rows_of(constant, label.axes)
        nonzero = np.broadcast_to(rows.any(1), label.size).reshape(label.atom.shape)
        kind = np.zeros(label.atom.shape, np.int64)
        if varying and value.by_size:  # equal for every input along the other axes only
            kind = _places(label, varying)
            nonzero = np.ones_like(nonzero)
        elif varying:
            kind = numbered_rows(rows).reshape(label.atom.shape)
        if kind.any():
            self._told_by(label, kind)
        if not added and not value.by_size and 0 < (dead := label.atom[~nonzero]).size < label.size:
            note = f"{self.where}: multiplies {len(np.unique(dead))} units by zero, whose weights the group only scales"
            self.constraints.unread.append((dead, note))
        if added:
            self.constraints.keep_ones(label)
            chosen = name_of(self.node) in operations(Trait.EQUALISE)  # the constant is used at some positions only
            same = nonzero.any() and not chosen and not (rows != rows[:, :1]).any() and not (varying and value.by_size)
            note = f"{self.where}: {counted(MET, label.atom[nonzero], 'scale')}"
            with self.constraints.explain(note) if same else contextlib.nullcontext():
                self.constraints.fix_scales(label.scale[nonzero])
        return label
