"""The vocabulary in which rules speak: tensors seen from outside, and what an operation may demand of them."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from lightning_sym.symmetry.tracing.capture import Capture, Mark
from lightning_sym.symmetry.tracing.constraints import UNSET, Constraints, Label, Sighting
from lightning_sym.symmetry.tracing.shifts import Shifts

Ints = NDArray[np.int64]
Path = tuple[Callable[[Tensor], Tensor], ...]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph, seen from outside: its shape, and who acts on it.

    Attributes:
        shape: Its shape.
        labels: Who acts on it: usually one label, on the channels; none where nothing does. A parameter has one per
            axis. The labels of one value live on different axes.
        concrete: Its value, where it is made of constants only (indices, masks).
        state: The parameter or buffer that this is, untouched so far.
        producer: The bias that was added last, if this value comes right out of a linear operation with one.
        offset: What a unit's change of sign adds to it: sigmoid(-x) = 1 - sigmoid(x). Only a linear operation with a
            bias can take it up (docs/theory/intertwiners.md, 1.4).
        by_size: Whether a constant may be another one for an input of another size: it was made from positions (a
            range, a triangle), or is a part of something that is not one number everywhere.
        sources: The values whose elements were only moved to get here, and how they were moved, step by step.
    """

    shape: tuple[int, ...]
    labels: tuple[Label, ...] = ()
    concrete: Tensor | None = None
    state: str | None = None
    producer: str | None = None
    offset: float = 0.0
    by_size: bool = False
    sources: "tuple[tuple[Value, Path], ...]" = ()

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def is_zero(self) -> bool:
        """Whether this is a constant full of zeros, for inputs of any size."""
        return self.concrete is not None and not self.by_size and not bool(self.concrete.any())

    def with_labels(self, *labels: Label) -> "Value":
        """Return a value of the same shape with other labels."""
        return Value(self.shape, labels)


Rule = Callable[..., Any]
_MANY = 2**22  # numbers of a constant that are compared one by one


def rank_within(keys: Ints) -> Ints:
    """Return, for each entry, how many equal ones stand before it."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    start = np.r_[0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1]
    rank = np.zeros(len(keys), np.int64)
    rank[order] = np.arange(len(keys)) - np.repeat(start, np.diff(np.r_[start, len(keys)]))
    return rank


class Trace:
    """What a rule may ask for while the tracer walks through the network.

    A rule is called as `rule(trace, *args, **kwargs)` with the operation's own arguments, tensors replaced by `Value`s,
    and returns the `Value` (or list of them) that comes out. Every method here takes values, writes down a demand and
    returns the value that comes out of it, so most rules are one line.

    It may walk through several captures of one network (inputs of several lengths): the demands of all of them hold.

    Attributes:
        node: The operation at hand.
    """

    def __init__(self, states: dict[str, Tensor], *, constants: Container[str] = (), affine: bool = False) -> None:
        self.constraints = Constraints()
        self.tensors = states
        self.constants = constants
        self.capture: Capture
        self.node: fx.Node | None = None
        self.axis_labels: dict[str, tuple[Label, ...]] = {}
        self.kinds: dict[str, tuple[str, float]] = {}
        self.grouped: dict[str, Label] = {}
        self.grouped_by: dict[str, set[fx.Node]] = {}
        self.mixed_uses: set[str] = set()
        self.shifts = Shifts()
        self.leaf: dict[str, Value] = {}
        self.affine = affine
        self.absorbed: list[tuple[str, str, int, float]] = []
        self.absorbed_before: tuple[tuple[str, str, int, float], ...] = ()
        self.walks = 0
        self.made_of_states: dict[int, Any] = {}
        self.lengths: set[int] = set()
        self.reads: dict[str | int, tuple[Value, list[Path]]] = {}
        self.taps: dict[Mark, Value] = {}

    # What something is called, for notes and errors.

    @property
    def where(self) -> str:
        """The operation at hand and the module that it is in."""
        assert self.node is not None
        module = self.capture.modules.get(self.node)
        target = self.node.target
        schema = getattr(target, "_schema", None)
        name = schema.name.removeprefix("aten::") if schema is not None else getattr(target, "__name__", str(target))
        return f"{name} in {module}" if module else name

    def note(self, text: str) -> None:
        """Tell the user something about the operation at hand."""
        self.constraints.notes[f"{self.where}: {text}"] = None

    # Values.

    def state_value(self, name: str) -> Value:
        """Return the value of a parameter or buffer."""
        tensor = self.tensors[name]
        if name in self.constants or not tensor.is_floating_point():
            return Value(tuple(tensor.shape), concrete=tensor.detach().to("cpu", copy=True))
        if name not in self.axis_labels:
            shape = tuple(tensor.shape)
            self.axis_labels[name] = tuple(
                self.constraints.fresh((axis,), (size,), tag=UNSET) for axis, size in enumerate(shape)
            ) or (self.constraints.fresh((), (), tag=UNSET),)
        return Value(tuple(tensor.shape), self.axis_labels[name], state=name)

    def parameter(self, module: nn.Module, name: str) -> Value:
        """Return a parameter or buffer of the module at hand, in a rule for a module class.

        Raises:
            KeyError: If the module has none of that name.
        """
        if name not in self.leaf:
            raise KeyError(
                f"{type(module).__name__} has no parameter or buffer {name!r}; it has {', '.join(self.leaf)}"
            )
        return self.leaf[name]

    def label(self, value: Value, axis: int) -> Label | None:
        """Return the label that lives on one axis alone, or None.

        The label of a single unit, which may fill a whole tensor, counts as being on every axis.
        """
        axis %= value.ndim
        for label in value.labels:
            if label.axes == (axis,):
                return label
        for label in value.labels:
            if not label.axes:
                return self._spread(label, axis, value.shape[axis])
        return None

    def _spread(self, label: Label, axis: int, size: int) -> Label:
        atom, tag, scale = (np.full(size, part) for part in (label.atom, label.tag, label.scale))
        if size > 1:
            tag = self.constraints.derive_tags(
                self.constraints.resolve(Label((axis,), atom, tag, scale)).tag, np.arange(size)
            )
        return Label((axis,), atom, tag, scale)

    def unlabelled(self, shape: Sequence[int]) -> Value:
        """Return a value on which nothing acts."""
        return Value(tuple(shape))

    def output_shape(self, index: int | None = None) -> tuple[int, ...]:
        """Return the shape of the result of the operation at hand (of one of its results)."""
        assert self.node is not None
        value = self.node.meta["val"]
        return tuple((value if index is None else value[index]).shape)

    # Demands.

    def fix(self, value: Value, reason: str | None = None) -> Value:
        """Nothing may act on this value: its units may neither move nor be scaled.

        Args:
            value: Any value.
            reason: Why, for the notes.
        """
        for label in value.labels:
            self.constraints.fix(label)
        if value.labels and reason:
            units = max(label.size for label in value.labels)
            self.note(f"{reason} (fixes {units} unit{'s' * (units != 1)} here)")
        return Value(value.shape)

    def elementwise(
        self,
        value: Value,
        *,
        positive_scales: bool = False,
        signs: bool = False,
        exponent: float = 1.0,
        even: bool = False,
    ) -> Value:
        """Apply one function to every element: units may move; what else may happen is the activation's own group.

        Args:
            value: Any value.
            positive_scales: f(t x) = t ** exponent f(x) for all t > 0.
            signs: f(-x) = -f(x), or f(x) if `even`.
            exponent: See above.
            even: See above.
        """
        labels = []
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
        """Units may move, but neither be scaled nor change sign."""
        return self.elementwise(value)

    def linear_along(self, value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
        """Apply a fixed linear map along some axes (pooling by means, resizing): nothing may act on these axes.

        Units on all other axes may even be mixed.

        Args:
            value: Any value.
            axes: The axes that the map mixes; negative ones count from the end.
            shape: The result's shape.
        """
        value = self.free_of(value, axes, "acts along an axis on which units live")
        return Value(tuple(shape), tuple(self.constraints.resolve(label) for label in value.labels))

    def free_of(self, value: Value, axes: Sequence[int], reason: str) -> Value:
        """Fix the labels that live on some axes, and return the value without them."""
        gone = {axis % value.ndim for axis in axes}
        touched = [label for label in value.labels if gone & set(label.axes)]
        if touched:
            self.fix(value.with_labels(*touched), None if value.state else reason)
        return replace(value, labels=tuple(label for label in value.labels if not gone & set(label.axes)))

    def move(self, value: Value, function: Callable[[Tensor], Any], *, filled_by_zero: bool = True) -> Any:
        """Move elements about (reshape, slice, pad, ...) without changing them.

        No rule has to say what moves where: the function is run on coordinates, and the labels follow.

        Args:
            value: Any value.
            function: What moves the elements of a tensor of the value's shape; may return several tensors.
            filled_by_zero: Whether elements that appear from nowhere are zeros, which accept any scale.
        """
        if value.concrete is not None and filled_by_zero:
            moved = function(value.concrete)
            return torch.utils._pytree.tree_map(
                lambda t: Value(tuple(t.shape), concrete=t, by_size=value.by_size), moved
            )
        labels: list[list[Label]] | None = None
        shapes: list[tuple[int, ...]] = []
        for label in value.labels or (None,):
            outputs = function(self._coordinates(value.shape, label))
            several = isinstance(outputs, (list, tuple))
            parts = list(outputs) if several else [outputs]
            labels = labels if labels is not None else [[] for _ in parts]
            shapes = [tuple(part.shape) for part in parts]
            if label is None:
                continue
            for index, part in enumerate(parts):
                moved = self._moved(value, label, part, function, index if several else None, filled_by_zero)
                if moved is not None:
                    labels[index].append(moved)
        assert labels is not None
        values = [self._disjoint(Value(shape, tuple(own))) for shape, own in zip(shapes, labels, strict=True)]
        return values if several else values[0]

    def _disjoint(self, value: Value) -> Value:
        """Fix labels that came to live on the same axes."""
        seen: dict[int, int] = {}
        for _index, label in enumerate(value.labels):
            for axis in label.axes:
                seen[axis] = seen.get(axis, 0) + 1
        clash = [label for label in value.labels if any(seen[axis] > 1 for axis in label.axes)]
        if clash:
            self.fix(value.with_labels(*clash), "two labelled axes became one")
        return value.with_labels(*(label for label in value.labels if label not in clash)) if clash else value

    @staticmethod
    def _coordinates(shape: tuple[int, ...], label: Label | None, axis: int | None = None) -> Tensor:
        """Return, for every element, 1 + its position on the label's axes (or on one axis), not copied along others."""
        axes = (axis,) if axis is not None else label.axes if label is not None else ()
        sizes = [size if index in axes else 1 for index, size in enumerate(shape)]
        count = int(np.prod([shape[index] for index in axes]))
        return torch.arange(1, count + 1, dtype=torch.float64).reshape(sizes).expand(shape)

    @staticmethod
    def _core(part: Tensor) -> Tensor:
        """Return coordinates once along the axes along which they were not copied."""
        for axis, stride in enumerate(part.stride()):
            if stride == 0:
                part = part.narrow(axis, 0, 1)
        return part

    @classmethod
    def _varies(cls, part: Tensor) -> list[int]:
        """Return the axes along which coordinates change, filler (0) aside."""
        part = cls._core(part)
        axes = []
        filled = part.numel() > 0 and bool(part.min() == 0)
        for axis, size in enumerate(part.shape):
            if size == 1:
                continue
            if filled:
                low = torch.where(part == 0, torch.inf, part).amin(axis)
                changes = bool(((part.amax(axis) != low) & torch.isfinite(low)).any())
            else:
                changes = bool((part != part.narrow(axis, 0, 1)).any())
            if changes:
                axes.append(axis)
        return axes

    @staticmethod
    def _reduced(part: Tensor, axes: Sequence[int]) -> Ints:
        """Return coordinates on some axes only, given that they do not change along the others."""
        part = Trace._core(part)
        others = tuple(axis for axis in range(part.ndim) if axis not in axes)
        if not others:
            return part.long().numpy()
        if part.numel() and bool(part.min() == 0):
            return part.amax(others).long().numpy()
        for axis in reversed(others):
            part = part.select(axis, 0)
        return part.long().numpy()

    def _moved(
        self,
        value: Value,
        label: Label,
        part: Tensor,
        function: Callable[[Tensor], Any],
        index: int | None,
        filled_by_zero: bool,
    ) -> Label | None:
        if part.numel() == 0:
            return None
        axes = self._varies(part)
        if not axes and part.ndim == value.ndim and bool(self._core(part).min() == 0):
            # One unit, padded along its own axis: what was added are other units.
            axes = [axis for axis in label.axes if part.shape[axis] > 1 and value.shape[axis] == 1]
        position = self._reduced(part, axes) - 1
        filler = position < 0
        if value.state is not None and label.size == 1 and len(value.shape) > 1:
            # An axis of size 1 of a parameter: nothing can be told about where it went.
            self.constraints.fix(label)
            return None
        if not axes:
            # One unit fills the whole result; it keeps its axis where that can still be told.
            kept = part.ndim == value.ndim and all(part.shape[axis] == 1 for axis in label.axes)
            at = position.reshape(-1)[0]
            arrays = [np.asarray(a.reshape(-1)[at]) for a in (label.atom, label.tag, label.scale)]
            if kept:
                return Label(label.axes, *(a.reshape((1,) * len(label.axes)) for a in arrays))
            return Label((), *arrays)
        atom, tag, scale = (a.reshape(-1)[position] for a in (label.atom, label.tag, label.scale))
        if len(np.unique(position[~filler])) < int((~filler).sum()):
            resolved = self.constraints.resolve(Label(tuple(axes), atom, tag, scale))
            code = np.zeros_like(position)
            for axis in range(value.ndim):
                if axis in label.axes or value.shape[axis] == 1:
                    continue
                moved = function(self._coordinates(value.shape, None, axis))
                moved = moved if index is None else moved[index]
                along = self._varies(moved)
                if not set(along) & set(axes):
                    continue
                if not set(along) <= set(axes):
                    self.fix(value.with_labels(label), "an axis of units was mixed with another axis")
                    return None
                moved = (
                    moved.amax(tuple(a for a in range(moved.ndim) if a not in axes), keepdim=False)
                    if len(axes) < moved.ndim
                    else moved
                )
                code = code * (value.shape[axis] + 1) + moved.long().numpy()
            # What still coincides (a tensor joined to itself) is told apart by its place.
            rank = rank_within((position * (int(code.max()) + 1) + code).ravel())
            code = code * (int(rank.max()) + 1) + rank.reshape(position.shape)
            tag = self.constraints.derive_tags(resolved.tag, code)
        if filler.any():
            new = self.constraints.fresh((), (int(filler.sum()),))
            atom, tag, scale = atom.copy(), tag.copy(), scale.copy()
            atom[filler], tag[filler], scale[filler] = new.atom, new.tag, new.scale
            self.constraints.restrict(new)
            if not filled_by_zero:
                self.constraints.fix_scales(new.scale)
        if not filled_by_zero and bool(self._core(part).min() == 0):
            self.constraints.fix_scales(label.scale)
        return self._plainest(Label(tuple(axes), atom, tag, scale))

    def _plainest(self, label: Label) -> Label:
        """Drop axes along which the same units come again, and tags that tell nothing apart."""
        for place in reversed(range(len(label.axes))):
            first = [part.take([0], place) for part in (label.atom, label.scale)]
            if (label.atom == first[0]).all() and (label.scale == first[1]).all():
                arrays = [np.asarray(part.take(0, place)) for part in (label.atom, label.tag, label.scale)]
                label = Label((*label.axes[:place], *label.axes[place + 1 :]), *arrays)
        told = np.unique(label.tag[label.tag > 0])
        if len(told) == 1 and len(np.unique(label.atom)) == label.size:
            label = Label(label.axes, label.atom, np.where(label.tag > 0, 0, label.tag), label.scale)
        return label

    def join(self, one: Value, two: Value, *, product: bool, divide: bool = False, linear: bool = False) -> Value:
        """Combine two values element by element, with broadcasting: a sum, or a product (or quotient).

        In a sum both must carry the same units and the same scales; in a product the same units, and scales multiply.

        Args:
            one: Any value.
            two: Any value, of a shape that broadcasts with the first.
            product: Whether scales multiply.
            divide: Whether it is a quotient.
            linear: Whether the factor on the coarser axes multiplies whole blocks of the other one's units, so that
                mixtures inside a block pass.
        """
        shape = tuple(np.broadcast_shapes(one.shape, two.shape))
        first, second = self._broadcast(one, shape), self._broadcast(two, shape)
        result: list[Label] = []
        left = list(second)
        for label in first:
            partner = next(
                (other for other in left if set(other.axes) & set(label.axes) or not (other.axes or label.axes)), None
            )
            if partner is None:
                alone = self._alone(label, two, shape, product)
                if alone is not None:
                    result.append(alone)
                continue
            left.remove(partner)
            nested = label.axes != partner.axes
            if label.axes == partner.axes:
                joined = self.constraints.same_units(label, partner)
            elif set(partner.axes) < set(label.axes) or set(label.axes) < set(partner.axes):
                wide, narrow = (label, partner) if len(label.axes) > len(partner.axes) else (partner, label)
                wide, narrow = self.constraints.resolve(wide), self.constraints.resolve(narrow)
                spread = self._onto(narrow, wide.axes, wide.atom.shape)
                self.constraints.block(spread.atom, wide.atom)
                label, partner = (wide, spread) if wide is label or narrow is partner else (spread, wide)
                label, partner = (
                    self._onto(label, wide.axes, wide.atom.shape),
                    self._onto(partner, wide.axes, wide.atom.shape),
                )
                joined = wide
            else:
                self.fix(Value(shape, (label, partner)), "labels on axes that overlap only in part meet")
                continue
            if product:
                if not nested or not linear:
                    self.constraints.restrict(joined)
                scale = self.constraints.scales_like(label.scale, partner.scale)
                sign = -1.0 if divide else 1.0
                self.constraints.equate([(scale, 1.0), (label.scale, -1.0), (partner.scale, -sign)])
                joined = joined.scaled_by(scale)
            else:
                self.constraints.equate([(label.scale, 1.0), (partner.scale, -1.0)])
                joined = joined.scaled_by(label.scale)
            result.append(joined)
        for label in left:
            alone = self._alone(label, one, shape, product)
            if alone is None:
                continue
            if product and divide:
                scale = self.constraints.scales_like(alone.scale)
                self.constraints.equate([(scale, 1.0), (alone.scale, 1.0)])
                alone = alone.scaled_by(scale)
            result.append(alone)
        if product:
            result = self._lent(result)
        return self._disjoint(Value(shape, tuple(result)))

    def _lent(self, labels: list[Label]) -> list[Label]:
        """Let units that fill a whole factor (a learned gate) scale the units of the product."""
        wide = next((index for index, label in enumerate(labels) if label.axes), None)
        if wide is None or all(label.axes for label in labels):
            return labels
        for label in labels:
            if label.axes:
                continue
            whole = np.full(labels[wide].scale.shape, int(label.scale))
            scale = self.constraints.scales_like(labels[wide].scale, whole)
            self.constraints.equate([(scale, 1.0), (labels[wide].scale, -1.0), (whole, -1.0)])
            labels[wide] = labels[wide].scaled_by(scale)
        return [label for label in labels if label.axes]

    @staticmethod
    def _onto(label: Label, axes: tuple[int, ...], shape: tuple[int, ...]) -> Label:
        sizes = [size if axis in label.axes else 1 for axis, size in zip(axes, shape, strict=True)]
        return Label(axes, *(np.broadcast_to(a.reshape(sizes), shape) for a in (label.atom, label.tag, label.scale)))

    def _broadcast(self, value: Value, shape: tuple[int, ...]) -> list[Label]:
        """Return the labels of a value on the axes of a larger shape."""
        offset = len(shape) - value.ndim
        result = []
        keep_single = int(np.prod(value.shape)) == 1
        for label in value.labels:
            if value.state is not None and label.size == 1 and label.axes:
                # A parameter's axis of size 1 says nothing of its own, unless the parameter is one number.
                if not keep_single:
                    self.constraints.fix(label)
                    continue
                keep_single = False
            # One unit on a longer axis, as of an expanded number, fills that axis.
            own = zip(label.axes, label.atom.shape or (1,) * len(label.axes), strict=True)
            kept = tuple(axis + offset for axis, size in own if size == shape[axis + offset])
            sizes = [shape[axis] for axis in kept]
            result.append(Label(kept, *(a.reshape(sizes) for a in (label.atom, label.tag, label.scale))))
        return result

    def _alone(self, label: Label, other: Value, shape: tuple[int, ...], product: bool) -> Label | None:
        """A label meets a value on which nothing acts there; None is left if nothing can act on it any more."""
        label = self.constraints.resolve(label)
        if other.is_zero and not product:
            return label
        if other.concrete is not None:
            constant = replace(other, shape=shape, concrete=other.concrete.expand(shape))
            return self.beside_constant(label, constant, added=not product)
        offset = len(shape) - other.ndim
        varies = any(axis >= offset and other.shape[axis - offset] > 1 for axis in label.axes)
        if varies:
            self.constraints.fix_units(label.atom.ravel())
            self.constraints.restrict(label)
        if not product:
            self.constraints.restrict(label)
            self.constraints.fix_scales(label.scale)
        return None if varies and not product else label

    def beside_constant(self, label: Label, value: Value, *, added: bool = False) -> Label:
        """A label meets a constant: units that meet the same numbers may change places.

        Units whose numbers may differ for an input of another size stay.

        Args:
            label: On some axes of the constant.
            value: A factor, a filter for each unit, or a summand; constant.
            added: Whether it is a summand: then the units that meet anything but zeros keep their scale.
        """
        constant = value.concrete
        assert constant is not None
        rows = self._rows(constant, label.axes)
        spread = any(constant.shape[axis] > 1 and constant.stride(axis) for axis in label.axes)
        nonzero = np.broadcast_to(rows.any(1), label.size).reshape(label.atom.shape)
        if value.by_size and spread:
            self.constraints.restrict(label)
            self.constraints.fix_units(label.atom.ravel())
            nonzero = np.ones_like(nonzero)
        elif spread:
            _, kind, count = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
            kind = kind.reshape(label.atom.shape)
            if len(count) > 1:
                self.constraints.restrict(label)
                self.constraints.fix_units(label.atom[count[kind] == 1])
                tag = self.constraints.derive_tags(label.tag, kind)
                self.see(Label(label.axes, label.atom, tag, label.scale))
        if added:
            self.constraints.restrict(label)
            self.constraints.fix_scales(label.scale[nonzero])
        return label

    @staticmethod
    def _rows(constant: Tensor, axes: tuple[int, ...]) -> NDArray[Any]:
        """Return what a constant holds at each position of some axes, a row each; one row if it is the same for all."""
        # Along axes of stride 0 a constant repeats itself.
        others = [axis for axis in range(constant.ndim) if axis not in axes]
        for axis in others:
            constant = constant if constant.stride(axis) else constant.narrow(axis, 0, 1)
        if not any(constant.stride(axis) and constant.shape[axis] > 1 for axis in axes):
            for axis in axes:
                constant = constant.narrow(axis, 0, 1)
            return constant.reshape(1, -1).numpy()
        rows = (
            constant.permute(*axes, *others).flatten(0, len(axes) - 1).flatten(1) if others else constant.reshape(-1, 1)
        )
        if rows.numel() <= _MANY:
            return rows.numpy()
        # Rows that are not the same have other sums under random weights.
        weights = torch.rand(rows.shape[1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return (rows.double().nan_to_num() @ weights).numpy()

    def contract(
        self,
        one: Value,
        one_axis: int,
        two: Value,
        two_axis: int,
        one_axes: Sequence[int | None],
        two_axes: Sequence[int | None],
        shape: Sequence[int],
    ) -> Value:
        """Multiply two values and sum over one axis of each: what acts on one there is undone by the other.

        Args:
            one: First factor.
            one_axis: Its axis to sum over.
            two: Second factor.
            two_axis: Its axis to sum over.
            one_axes: Where each axis of the first goes; None for the one summed over.
            two_axes: The same for the second. An axis to which both go is a batch axis.
            shape: The result's shape.
        """
        one_axis, two_axis = one_axis % one.ndim, two_axis % two.ndim
        inner_one = next((label for label in one.labels if one_axis in label.axes), None)
        inner_two = next((label for label in two.labels if two_axis in label.axes), None)
        whole_one = next((label for label in one.labels if not label.axes), None)
        whole_two = next((label for label in two.labels if not label.axes), None)
        if inner_one is None and inner_two is not None and whole_one is not None:
            inner_one = self._spread(whole_one, one_axis, one.shape[one_axis])
            one = replace(one, labels=tuple(label for label in one.labels if label is not whole_one))
        elif inner_two is None and inner_one is not None and whole_two is not None:
            inner_two = self._spread(whole_two, two_axis, two.shape[two_axis])
            two = replace(two, labels=tuple(label for label in two.labels if label is not whole_two))
        coarse: Label | None = None
        if inner_one is not None and inner_two is not None:
            to_one = [one_axes[axis] for axis in inner_one.axes if axis != one_axis]
            to_two = [two_axes[axis] for axis in inner_two.axes if axis != two_axis]
            shared = {axis for axis in one_axes if axis is not None} & {axis for axis in two_axes if axis is not None}
            # The summed axis last, batch axes before, in the order of the result.
            if to_one == to_two and set(to_one) <= shared and inner_one.atom.shape == inner_two.atom.shape:
                last_one, last_two = inner_one.axes.index(one_axis), inner_two.axes.index(two_axis)
                first = Label(
                    (), *(np.moveaxis(a, last_one, -1) for a in (inner_one.atom, inner_one.tag, inner_one.scale))
                )
                second = Label(
                    (), *(np.moveaxis(a, last_two, -1) for a in (inner_two.atom, inner_two.tag, inner_two.scale))
                )
                joined = self.constraints.same_units(first, second)
                self.constraints.equate([(first.scale, 1.0), (second.scale, 1.0)])
                if to_one:
                    axes = tuple(int(axis) for axis in to_one if axis is not None)
                    # The same members again (in another sample of the batch) are the same block.
                    rows = joined.atom.reshape(-1, joined.atom.shape[-1])
                    _, first_row, again = np.unique(rows, axis=0, return_index=True, return_inverse=True)
                    blocks = self.constraints.fresh((0,), (len(first_row),)).take(again.reshape(joined.atom.shape[:-1]))
                    coarse = Label(axes, blocks.atom, self._rank(blocks), blocks.scale)
                    self.constraints.fix_scales(coarse.scale)
                    self.constraints.block(np.broadcast_to(coarse.atom[..., None], joined.atom.shape), joined.atom)
                    self.see(coarse)
            else:
                self.fix(one.with_labels(inner_one), "the two sides of a product carry different labels")
                self.fix(two.with_labels(inner_two))
        else:
            for value, label, other in ((one, inner_one, two), (two, inner_two, one)):
                # Zeros (an initial state) accept anything.
                if label is not None and not other.is_zero:
                    self.fix(value.with_labels(label))
        first_rest = self._renamed(one, one_axes, inner_one)
        second_rest = self._renamed(two, two_axes, inner_two)
        one_value = Value(self._sizes(one, one_axes, len(shape)), first_rest)
        two_value = Value(self._sizes(two, two_axes, len(shape)), second_rest)
        restricted = len(self.constraints.restricted)
        result = self.join(one_value, two_value, product=True, linear=True)
        if not (first_rest and second_rest):
            del self.constraints.restricted[restricted:]  # one side only: the map is linear in it
        if coarse is not None:
            beside = [label for label in result.labels if set(label.axes) & set(coarse.axes)]
            with_coarse = Value(self._sizes_of(coarse, len(shape), shape), (coarse,))
            met: tuple[Label, ...] = (coarse,)
            if beside:
                met = self.join(result.with_labels(*beside), with_coarse, product=True, linear=True).labels
            result = result.with_labels(*(label for label in result.labels if label not in beside), *met)
        return Value(tuple(shape), result.labels)

    @staticmethod
    def _renamed(value: Value, axes: Sequence[int | None], without: Label | None) -> tuple[Label, ...]:
        result = []
        for label in value.labels:
            if label is without:
                continue
            new = [axes[axis] for axis in label.axes]
            if any(axis is None for axis in new):
                continue
            order = np.argsort([axis for axis in new if axis is not None], kind="stable")
            arrays = (np.transpose(a, order) if len(order) else a for a in (label.atom, label.tag, label.scale))
            result.append(Label(tuple(sorted(axis for axis in new if axis is not None)), *arrays))
        return tuple(result)

    @staticmethod
    def _sizes(value: Value, axes: Sequence[int | None], rank: int) -> tuple[int, ...]:
        sizes = [1] * rank
        for axis, target in enumerate(axes):
            if target is not None:
                sizes[target] = value.shape[axis]
        return tuple(sizes)

    @staticmethod
    def _sizes_of(label: Label, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[axis] if axis in label.axes else 1 for axis in range(rank))

    @staticmethod
    def _rank(label: Label) -> Ints:
        """Number the positions that one unit and tag hold, in order."""
        keys = np.stack([label.atom.ravel(), label.tag.ravel()])
        _, inverse = np.unique(keys, axis=1, return_inverse=True)
        return rank_within(inverse.ravel()).reshape(label.atom.shape)

    def see(self, label: Label, name: str | None = None) -> None:
        """Write down where units are seen: two units may change places only if they are seen at the same places.

        Args:
            label: The units.
            name: Name of the value in which they are seen, if it is to be known.
        """
        self.constraints.occurrences.append(Sighting(self.constraints.resolve(label), name))

    # What is read of a value that is only moved about: the rest would be read by a longer input.

    def carry(self, value: Value, result: Value, step: Callable[[Tensor], Tensor] | None = None) -> Value:
        """Say that a result holds elements of a value, moved by a step: reading it reads these alone."""
        steps = () if step is None else (step,)
        sources = tuple((root, (*path, *steps)) for root, path in value.sources or ((value, ()),))
        return replace(result, sources=(*result.sources, *sources))

    def cut_by_size(self, value: Value) -> None:
        """Say that a part of a value is taken that depends on the input's size: the rest counts as for weights."""
        self.made_of_states |= {id(root): root for root, _ in value.sources or ((value, ()),)}

    def read(self, value: Value) -> None:
        """Note that all elements of a value are read."""
        for root, path in value.sources or ((value, ()),):
            if root.labels:
                # One entry for all walks, where it is a parameter.
                key = root.state if root.state is not None else id(root)
                self.reads.setdefault(key, (root, []))[1].append(path)
