"""The vocabulary in which rules speak: tensors seen from outside, and what an operation may demand of them."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from lightning_sym.symmetry.tracing.capture import Capture, Mark, operation_name
from lightning_sym.symmetry.tracing.constraints import UNSET, Constraints, Ints, Label, Sighting, counted
from lightning_sym.symmetry.tracing.coordinates import (
    coordinates,
    core,
    on_axes,
    rank_within,
    rows_of,
    varying_axes,
)
from lightning_sym.symmetry.tracing.mixtures import Mixture

Path = tuple[Callable[[Tensor], Tensor], ...]
_ALONG = "acts along an axis on which units live"
_MOST = 2**16  # elements of a matrix that are units each


@dataclass(frozen=True, eq=False)
class Members:
    """Of which member of a stack (which expert, which head) each element of a value is.

    Attributes:
        number: Elements of one number are of one member; negative ones are of members that the input chose. Of the
            value's shape, int64.
        size: How many members the stack has.
    """

    number: Tensor
    size: int


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph, seen from outside: its shape, and who acts on it.

    Attributes:
        shape: Its shape.
        labels: Who acts on it: usually one label, on the channels; none where nothing does. A parameter has one per
            axis. The labels of one value live on different axes.
        concrete: Its value, where it is made of constants only (indices, masks).
        state: The parameter or buffer that this is, untouched so far.
        offset: What a unit's change of sign adds to it: sigmoid(-x) = 1 - sigmoid(x). Only a linear operation with a
            bias can take it up (docs/theory/intertwiners.md, 1.4).
        by_size: Whether a constant may be another one for an input of another size: it was made from positions (a
            range, a triangle), or is a part of something that is not one number everywhere.
        sources: The values whose elements were only moved to get here, and how they were moved, step by step.
        squared: Whether these are squares of units that orthogonal matrices may mix, so that these do not act on them.
        chooses: The units among which whole numbers choose: each says which of these, in order, it was.
        members: Of which members of a stack its elements are; None if that is not known, or of several.
        mixture: Of which value's elements this is made by constants and movements, if it is.
    """

    shape: tuple[int, ...]
    labels: tuple[Label, ...] = ()
    concrete: Tensor | None = None
    state: str | None = None
    offset: float = 0.0
    by_size: bool = False
    sources: "tuple[tuple[Value, Path], ...]" = ()
    squared: bool = False
    chooses: Label | None = None
    members: Members | None = None
    mixture: Mixture | None = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def known(self) -> Tensor | None:
        """Its values, if nothing acts on it and they are known."""
        return self.concrete

    @property
    def is_zero(self) -> bool:
        """Whether this is a constant full of zeros, for inputs of any size."""
        return self.concrete is not None and not self.by_size and not bool(self.concrete.any())

    def with_labels(self, *labels: Label) -> "Value":
        """Return a value of the same shape with other labels."""
        return Value(self.shape, labels)

    def on(self, axes: Sequence[int | None], rank: int) -> "Value":
        """Return what acts on it on other axes, of a tensor with `rank` axes; on those that go to None nothing acts."""
        sizes = [1] * rank
        for size, target in zip(self.shape, axes, strict=True):
            if target is not None:
                sizes[target] = size
        labels = []
        for label in self.labels:
            targets = [target for axis in label.axes if (target := axes[axis]) is not None]
            if len(targets) == len(label.axes):
                order = sorted(range(len(targets)), key=targets.__getitem__)
                labels.append(label.moved(tuple(sorted(targets)), functools.partial(np.transpose, axes=order)))
        if self.concrete is None or None in axes:
            return Value(tuple(sizes), tuple(labels))
        order = sorted(range(self.ndim), key=lambda axis: axes[axis] or 0)
        return Value(tuple(sizes), concrete=self.concrete.permute(order).reshape(sizes), by_size=self.by_size)


Rule = Callable[..., Any]


def values_in(arguments: Any) -> list[Value]:
    """Return the tensors among an operation's arguments."""
    if isinstance(arguments, Value):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (tuple, list)):
        return []
    return [value for argument in arguments for value in values_in(argument)]


def filled(number: Any, shape: Sequence[int]) -> Value:
    """Return a constant that is one number everywhere."""
    # In double precision, which holds the least number of every type: masks are filled with it.
    return Value(tuple(shape), concrete=torch.full(tuple(shape), number, dtype=torch.float64))


def _share_axes(labels: Sequence[Label]) -> bool:
    """Whether some of the labels live on one axis."""
    axes = [axis for label in labels for axis in label.axes]
    return len(set(axes)) < len(axes)


def _positions(value: Value) -> int:
    """Return how many positions the labels of a value have."""
    return sum(label.size for label in value.labels)


def numbered(label: Label) -> Ints:
    """Number the positions that one unit and tag hold, in order."""
    _, inverse = np.unique(np.stack([label.atom.ravel(), label.tag.ravel()]), axis=1, return_inverse=True)
    return rank_within(inverse.ravel()).reshape(label.atom.shape)


def _places(label: Label, axes: Sequence[int]) -> Ints:
    """Number the positions of a label by their places on some of its axes."""
    shape = label.atom.shape
    sizes = [size if axis in axes else 1 for axis, size in zip(label.axes, shape, strict=True)]
    return np.broadcast_to(np.arange(int(np.prod(sizes))).reshape(sizes), shape)


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a buffer holds zeros and one other number: untrained statistics and gains hold one number only."""
    if isinstance(tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return False
    held = tensor[tensor != 0]
    return 0 < held.numel() < tensor.numel() and bool((held == held[0]).all() and held[0].isfinite())


class OnlyUnlabelledError(TypeError):
    """A rule computes a function, but is followed where what acts on values is known."""


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
        self.constraints.where = lambda: self.where
        self.tensors = states
        self.constants = constants
        self.capture: Capture
        self.node: fx.Node
        self.axis_labels: dict[str, tuple[Label, ...]] = {}
        self.kinds: dict[str, tuple[str, float]] = {}
        self.grouped: dict[str, Label] = {}
        self.joint: set[str] = set()
        self.grouped_by: dict[str, set[fx.Node]] = {}
        self.untold: set[fx.Node] = set()
        self.mixed_uses: set[str] = set()
        self.leaf: dict[str, Value] = {}
        self.affine = affine
        self.absorbed: list[tuple[str, str, int, float]] = []
        self.absorbed_before: tuple[tuple[str, str, int, float], ...] = ()
        self.walks = 0
        self.made_of_states: dict[int, Any] = {}
        self.lengths: set[int] = set()
        self.reads: dict[str | int, tuple[Value, list[Path]]] = {}
        self.uses: Counter[str] = Counter()
        self.gains: Counter[str] = Counter()
        self.taps: dict[Mark, Value] = {}
        self.seen: set[int] = set()

    # What something is called, for notes and errors.

    @property
    def operation(self) -> str:
        """The name of the operation at hand."""
        return self.node.meta.get("rule_of") or operation_name(self.node.target)

    @property
    def where(self) -> str:
        """The operation at hand and the module that it is in."""
        module = self.capture.modules.get(self.node)
        return f"{self.operation} in {module}" if module else self.operation

    def note(self, text: str) -> None:
        """Tell the user something about the operation at hand."""
        self.constraints.notes[f"{self.where}: {text}"] = None

    # Values.

    def state_value(self, name: str) -> Value:
        """Return the value of a parameter or buffer."""
        tensor = self.tensors[name]
        if name in self.constants or not tensor.is_floating_point():
            if tensor.is_meta:
                self.constraints.notes[
                    f"{name} is a constant without values (on meta): what it meets is fixed; build the network under "
                    "without_weights(), which keeps buffers"
                ] = None
                return Value(tuple(tensor.shape))
            return Value(tuple(tensor.shape), concrete=tensor.detach().to("cpu", copy=True))
        if name not in self.axis_labels:
            shape = tuple(tensor.shape)
            self.axis_labels[name] = tuple(
                self.constraints.fresh((axis,), (size,), tag=UNSET) for axis, size in enumerate(shape)
            ) or (self.constraints.fresh((), (), tag=UNSET),)
            if _is_mask(tensor):  # it is permuted with the units, and stays one
                for label in self.axis_labels[name]:
                    self.constraints.fix_scales(label.scale)
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

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a function of torch, whose operations are followed as if the network held them.

        Args:
            function: Takes tensors, and returns a tensor or several. The parameters of the module at hand that it reads
                count as those of the network.
            args: Its arguments, tensors as values.
            kwargs: Its keywords.

        Returns:
            What it returns, with values in the place of tensors.

        Raises:
            ValueError: If the function cannot be followed, as its operations depend on values.
            TypeError: If the rule also looks at what acts on values: such a rule cannot compute anything.
        """
        raise self._only_unlabelled("compute")

    def normalise(self, value: Value, axes: Sequence[int], *, mean: bool, eps: float = 0.0) -> Value:
        """Divide by the root mean square over some axes.

        Args:
            value: Any value.
            axes: The axes; negative ones count from the end.
            mean: Whether the mean over these axes is taken off before.
            eps: What is added to the mean square.

        Raises:
            TypeError: If the rule also looks at what acts on values.
        """
        raise self._only_unlabelled("normalise")

    def softmax(self, value: Value, axis: int) -> Value:
        """Apply a softmax along an axis.

        Raises:
            TypeError: If the rule also looks at what acts on values.
        """
        raise self._only_unlabelled("softmax")

    def _only_unlabelled(self, method: str) -> "OnlyUnlabelledError":
        return OnlyUnlabelledError(
            f"the rule for {self.operation} calls trace.{method} and looks at labels or constraints, too; expected a "
            "rule that does one of the two, as what acts on values is not known yet where functions are followed"
        )

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
                return self.constraints.spread(label, axis, value.shape[axis])
        return None

    def output_shape(self, index: int | None = None) -> tuple[int, ...]:
        """Return the shape of the result of the operation at hand (of one of its results)."""
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
            self.note(counted(reason, max((label.atom for label in value.labels), key=np.size)))
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
        """Apply a fixed linear map along some axes (pooling by means, resizing): what acts, acts alike at all places.

        Units on all other axes may even be mixed.

        Args:
            value: Any value.
            axes: The axes that the map mixes; negative ones count from the end.
            shape: The result's shape.
        """
        gone = {axis % value.ndim for axis in axes}
        for label in value.labels:
            # What undoes the map, and does it again behind a scale, is no scale.
            if label.axes and {*label.axes} <= gone and len(value.labels) == 1:
                self.note(f"{_ALONG} ({len(np.unique(label.atom))} units keep but one scale in common here)")
        value = self.tied(value, axes)
        return Value(tuple(shape), tuple(self.constraints.resolve(label) for label in value.labels))

    def tied(self, value: Value, axes: Sequence[int], reason: str = _ALONG) -> Value:
        """Let what acts on a value act alike at all places of some axes: a channel's places become one unit.

        Args:
            value: Any value.
            axes: The axes along which an operation acts, whatever the channel; negative ones count from the end.
            reason: Why nothing may act on units that live on these axes alone.

        Returns:
            The value, of whose labels none is on these axes any more.
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
        """Make one unit of those that stand at one position of some axes of a label, told apart by their places.

        Args:
            label: The units, on further axes as well.
            kept: Some of its axes.

        Returns:
            The units on these axes; None if what they are at one place does not say what they are at the others.
        """
        label = self.constraints.resolve(label)
        order = [label.axes.index(axis) for axis in kept]
        order += [at for at in range(len(label.axes)) if at not in order]
        shape = tuple(label.atom.shape[at] for at in order[: len(kept)])
        atom, tag, scale = (np.transpose(part, order).reshape(int(np.prod(shape)), -1) for part in label.parts)
        _, row, like = np.unique(tag[:, 0], return_index=True, return_inverse=True)
        held = np.unique(np.stack([atom.ravel(), np.repeat(like, atom.shape[1])]), axis=1)
        rows = np.unique(np.stack([atom.ravel(), np.repeat(np.arange(len(atom)), atom.shape[1])]), axis=1)
        if (tag != tag[row][like]).any() or held.shape[1] < rows.shape[1]:
            return None
        # The first place of each of the units tells them apart.
        _, first = np.unique(atom.ravel(), return_index=True)
        place = self.constraints.derive_tags(tag.ravel()[first], first % atom.shape[1])
        self.see(Label((), atom.ravel()[first], place, scale.ravel()[first]))
        pairs = np.unique(np.stack([np.repeat(atom[:, 0], atom.shape[1]), atom.ravel()]), axis=1)
        pairs = pairs[:, pairs[0] != pairs[1]]
        if pairs.size:
            self.constraints.merges.append((pairs[0], pairs[1]))
        factors = np.unique(np.stack([np.repeat(scale[:, 0], scale.shape[1]), scale.ravel()]), axis=1)
        factors = factors[:, factors[0] != factors[1]]
        if factors.size:
            self.constraints.equate([(factors[0], 1.0), (factors[1], -1.0)])
        parts = (part[:, 0].reshape(shape) for part in (atom, tag, scale))
        return self._plainest(Label(tuple(kept), *parts))

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
        """Return where the labels of a value are after its coordinates were moved, for each label those on its axes."""
        labels = (
            self._moved(value, label, part, function, filled_by_zero)
            for label, part in zip(value.labels, moved, strict=False)
        )
        kept = tuple(label for label in labels if label is not None)
        if _share_axes(kept):
            joint = self._jointly(value, function)
            if joint is not None:
                return joint
        result = self.disjoint(Value(tuple(moved[0].shape), kept, state=value.state))
        return replace(result, state=None, chooses=value.chooses)

    def _jointly(self, value: Value, function: Callable[[Tensor], Tensor]) -> Value | None:
        """Let the elements of a matrix that nothing else reads be units each: what its two axes hold met on one axis.

        Args:
            value: A parameter, moved perhaps.
            function: What moves it further.

        Returns:
            The value moved, with one label; None if it is none of a parameter that is read here only, as a whole.
        """
        root, path = value.sources[0] if len(value.sources) == 1 else (value, ())
        axes = tuple(axis for axis, size in enumerate(root.shape) if size > 1)
        name = root.state
        if name is None or name in self.joint or len(axes) != 2 or root.members is not None:
            return None
        if not self._is_read_here_only(name):
            return None

        def moved(tensor: Tensor) -> Tensor:
            for step in path:
                tensor = step(tensor)
            return function(tensor)

        count = int(np.prod(root.shape))
        place = moved(coordinates(root.shape, axes)) if count <= _MOST else torch.zeros(1)
        if len(np.unique(place.numpy())) < count:
            return None
        self.joint.add(name)
        for label in root.labels:
            self.constraints.fix(label)
        label = self.constraints.fresh(axes, tuple(root.shape[axis] for axis in axes), tag=UNSET)
        rest = tuple(own for own in root.labels if own.axes[0] not in axes)
        self.axis_labels[name] = (*rest, label)
        result = self._moved(replace(root, labels=(label,)), label, place, moved, True)
        return Value(tuple(place.shape), () if result is None else (result,))

    def _is_read_here_only(self, name: str) -> bool:
        """Whether the operation at hand is the only one that reads a parameter, other than by moving it."""
        nodes = [node for node, state in self.capture.states.items() if state == name]
        while len(nodes) == 1 and nodes[0] is not self.node:
            nodes = list(nodes[0].users)
        return bool(nodes) and nodes[0] is self.node

    def _on_one_axis(self, value: Value, other: Value, rank: int) -> Value:
        """Let a matrix on whose axes another value has units of one kind have units of that kind, too."""
        own = [{axis + rank - value.ndim for axis in label.axes} for label in value.labels]
        wide = [{axis + rank - other.ndim for axis in label.axes} for label in other.labels]
        if any(sum(bool(axes & label) for axes in own) > 1 for label in wide):
            return self._jointly(value, lambda tensor: tensor) or value
        return value

    def disjoint(self, value: Value) -> Value:
        """Where several labels came to live on the same axes, fix all of them but the one of most units."""
        if not _share_axes(value.labels):
            return value
        kept: list[Label] = []
        gone: list[Label] = []
        for label in sorted(value.labels, key=lambda label: -len(np.unique(label.atom))):
            meets = any(set(label.axes) & set(other.axes) for other in kept)
            (gone if meets else kept).append(label)
        # The axes of a parameter may be none of units, such as those of a filter: not worth a word.
        self.fix(value.with_labels(*gone), None if value.state is not None else "two labelled axes became one")
        return value.with_labels(*kept)

    def _moved(
        self,
        value: Value,
        label: Label,
        part: Tensor,
        function: Callable[[Tensor], Tensor],
        filled_by_zero: bool,
    ) -> Label | None:
        """Return where a label is, from where the coordinates on its axes went."""
        if part.numel() == 0:
            return None
        if value.state is not None and label.size == 1 and value.ndim > 1:
            # An axis of size 1 of a parameter: nothing can be told about where it went.
            self.constraints.fix(label)
            return None
        filled = bool(core(part).min() == 0)
        axes = varying_axes(part)
        if not axes and filled and part.ndim == value.ndim:
            # One unit, padded along its own axis: what was added are other units.
            axes = [axis for axis in label.axes if part.shape[axis] > 1 and value.shape[axis] == 1]
        position = on_axes(part, axes) - 1
        if not axes:
            # One unit fills the whole result; it keeps its axis where that can still be told.
            kept = part.ndim == value.ndim and all(part.shape[axis] == 1 for axis in label.axes)
            shape = (1,) * len(label.axes) if kept else ()
            at = position.reshape(-1)[0]
            return label.moved(label.axes if kept else (), lambda array: np.reshape(array.reshape(-1)[at], shape))
        moved = label.moved(tuple(axes), lambda array: array.reshape(-1)[position])
        filler = position < 0
        met = np.bincount(position[~filler])
        if met.max(initial=0) > 1:
            same = self._same(value, axes, function)
            codes = self._copies(value, label, axes, position, function)
            _, first, again = np.unique(same, return_index=True, return_inverse=True)
            if np.count_nonzero(met) < len(np.unique(same[~filler])):
                code = codes.ravel()[first][again].reshape(codes.shape)  # that of the first of the same elements
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

    @staticmethod
    def _same(value: Value, axes: list[int], function: Callable[[Tensor], Tensor]) -> Ints:
        """Number the positions on some axes of what a value was moved to: those that always hold the same are one."""
        root, path = value.sources[0] if len(value.sources) == 1 else (value, ())
        part = coordinates(root.shape, range(root.ndim))
        for step in (*path, function):
            part = step(part)
        shape = tuple(part.shape[axis] for axis in axes)
        rows = rows_of(part, tuple(axes))
        if len(rows) == 1:
            return np.zeros(shape, np.int64)
        # Rows mostly are the same where their first entries are, which saves sorting all of them.
        _, first, number = np.unique(rows[:, 0], return_index=True, return_inverse=True)
        if len(first) < len(rows) and not np.array_equal(rows, rows[first][number]):
            number = np.unique(rows, axis=0, return_inverse=True)[1]
        return number.reshape(shape)

    @staticmethod
    def _copies(
        value: Value, label: Label, axes: list[int], position: Ints, function: Callable[[Tensor], Tensor]
    ) -> Ints:
        """Tell copies of a position apart by their places on the value's other axes."""
        code = np.zeros_like(position)
        for axis, size in enumerate(value.shape):
            if axis in label.axes or size == 1:
                continue
            place = function(coordinates(value.shape, (axis,)))
            along = set(varying_axes(place))
            if along <= set(axes):
                code = code * (size + 1) + on_axes(place, axes) if along else code
            elif along & set(axes):  # each position shows some of the places (every second one)
                _, shown = np.unique(rows_of(place, tuple(axes)), axis=0, return_inverse=True)
                code = code * (size + 1) + shown.reshape(code.shape)
        code = np.unique(code, return_inverse=True)[1].reshape(code.shape)  # the same for inputs of other sizes
        # What still coincides (a tensor joined to itself) is told apart by its order.
        rank = rank_within((position * (int(code.max()) + 1) + code).ravel())
        return code * (int(rank.max()) + 1) + rank.reshape(position.shape)

    def _plainest(self, label: Label) -> Label:
        """Drop axes along which the same units come again, and tags that tell nothing apart."""
        for place in reversed(range(len(label.axes))):
            if all((part == part.take([0], place)).all() for part in (label.atom, label.scale)):
                axes = (*label.axes[:place], *label.axes[place + 1 :])
                label = label.moved(axes, lambda part, place=place: part.take(0, place))  # type: ignore[misc]
        told = np.unique(label.tag[label.tag > 0])
        if len(told) == 1 and len(np.unique(label.atom)) == label.size:
            label = Label(label.axes, label.atom, np.where(label.tag > 0, 0, label.tag), label.scale)
        return label

    def gain_in(self, value: Value) -> str | None:
        """Return the vector among the parameters whose elements, at most moved, are this value; else None."""
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
        """Combine two values element by element, with broadcasting: a sum, or a product (or quotient).

        In a sum both must carry the same units and the same scales; in a product the same units, and scales multiply.

        Args:
            one: Any value.
            two: Any value, of a shape that broadcasts with the first.
            product: Whether scales multiply.
            divide: Whether it is a quotient.
            gain: The parameter that is one of the factors (or divides), if it is a vector of gains.
        """
        shape = tuple(np.broadcast_shapes(one.shape, two.shape))
        given = one, two
        one, two = self._on_one_axis(one, two, len(shape)), self._on_one_axis(two, one, len(shape))
        if product and gain is None and (one, two) != given:  # a matrix whose elements are units now
            gain = self.gain_in(given[1]) or (None if divide else self.gain_in(given[0]))
        first, second = self._broadcast(one, shape), self._broadcast(two, shape)
        added = bool(not product and first and second and self._is_number(first) != self._is_number(second))
        if added:
            first, second = self._beside_number(first, second), self._beside_number(second, first)
        result: list[Label] = []
        left = list(second)
        for label in first:
            partner = next(
                (other for other in left if set(other.axes) & set(label.axes) or not (other.axes or label.axes)), None
            )
            if partner is None:
                alone = self._alone(label, two, shape, product, number=added)
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
                joined = self.constraints.same_units(label, partner)
            elif set(partner.axes) < set(label.axes) or set(label.axes) < set(partner.axes):
                wide, narrow = (label, partner) if len(label.axes) > len(partner.axes) else (partner, label)
                joined, parents = (self.onto(self.constraints.resolve(part), wide) for part in (wide, narrow))
                spread = product and gain is not None and self.tensors[gain].numel() == narrow.size
                if spread and gain is not None:
                    self.gains[gain] += 1
                self.constraints.block(parents.atom, joined.atom, gains=spread)
                joined = self._told_apart(joined, narrow, two if wide is label else one, len(shape))
                label, partner = (joined, parents) if wide is label else (parents, joined)
            else:
                self.fix(Value(shape, (label, partner)), "labels on axes that overlap only in part meet")
                continue
            scale = label.scale
            if product:
                if gain is not None and not nested and self.tensors[gain].numel() == joined.size:
                    self.gains[gain] += 1
                    self.constraints.gained.append(joined.atom.ravel())
                elif not nested or (divide and label is parents):
                    self.constraints.restrict(joined)  # one factor for a whole block passes all mixtures in it
                scale = self.constraints.product((label.scale, 1.0), (partner.scale, -1.0 if divide else 1.0))
            else:
                self.constraints.equate([(label.scale, 1.0), (partner.scale, -1.0)])
            result.append(joined.scaled_by(scale))
        for label in left:
            alone = self._alone(label, one, shape, product, number=added)
            if alone is not None:
                inverted = product and divide
                result.append(alone.scaled_by(self.constraints.product((alone.scale, -1.0))) if inverted else alone)
        return self.disjoint(Value(shape, tuple(self._lent(result) if product else result)))

    def _repeated(self, label: Label, partner: Label, value: Value, rank: int) -> Label | None:
        """Return the wholes of which a factor shows one number each for several units; None if it shows no such.

        Args:
            label: The units.
            partner: Those of the factor, on the same axes.
            value: The factor, broadcast to a result of `rank` axes.
            rank: See `value`.
        """
        whole = self.constraints.pending(partner)  # whose tags what it meets may still say
        of = self.constraints.copied_from(whole.atom)
        axes = [axis - rank + value.ndim for axis in whole.axes]
        if (of == whole.atom).all() or len(np.unique(label.atom)) < label.size or min(axes, default=-1) < 0:
            return None
        if (self.constraints.copied_from(label.atom) != label.atom).any():
            return None
        numbers = self._same(value, axes, lambda tensor: tensor)
        pairs = np.unique(np.stack([of.ravel(), whole.tag.ravel(), numbers.ravel()]), axis=1)
        if pairs.shape[1] > len(np.unique(of)):
            return None
        return Label(whole.axes, of, self.constraints.resolve(partner).tag, whole.scale)

    def _told_apart(self, label: Label, parents: Label, value: Value, rank: int) -> Label:
        """Tell units apart along axes on which their parents do not live, but are something else at each place.

        Args:
            label: The units.
            parents: On some of their axes.
            value: What carries the parents, broadcast to a result of `rank` axes.
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

    def _beside_number(self, labels: list[Label], others: list[Label]) -> list[Label]:
        """Let a number made of units (their mean), which is added to units, have the scale that they have in common."""
        if not self._is_number(labels):
            return labels
        for label in others:
            self.constraints.keep_ones(label)
            self.constraints.equate([(np.full(label.scale.shape, int(labels[0].scale)), 1.0), (label.scale, -1.0)])
        return []

    @staticmethod
    def _is_number(labels: list[Label]) -> bool:
        """Whether labels are those of a value that one unit fills."""
        return len(labels) == 1 and not labels[0].axes

    def _lent(self, labels: list[Label]) -> list[Label]:
        """Let units that fill a whole factor (a learned gate) scale the units of the product."""
        wide = next((index for index, label in enumerate(labels) if label.axes), None)
        if wide is None or all(label.axes for label in labels):
            return labels
        for label in labels:
            if label.axes:
                continue
            whole = np.full(labels[wide].scale.shape, int(label.scale))
            scale = self.constraints.product((labels[wide].scale, 1.0), (whole, 1.0))
            labels[wide] = labels[wide].scaled_by(scale)
        return [label for label in labels if label.axes]

    def parts(self, label: Label, axes: Sequence[int], *, mixtures: bool = False) -> Label:
        """Demand that units which stand at one place of some axes of a label stay together (heads, groups).

        Args:
            label: The units, on further axes as well.
            axes: Some of the label's axes.
            mixtures: Whether mixtures of those that stay together may pass.

        Returns:
            The wholes whose parts they are, on these axes: new units with scales of their own.
        """
        label = self.constraints.resolve(label)
        shape = tuple(label.atom.shape[label.axes.index(axis)] for axis in axes)
        wholes = self.constraints.fresh(tuple(axes), shape)
        if not mixtures:
            self.constraints.restrict(label)
        self.constraints.block(self.onto(wholes, label).atom, label.atom)
        self.see(wholes)
        return wholes

    @staticmethod
    def onto(label: Label, wide: Label) -> Label:
        """Return a label on all axes of one that has more."""
        shape = wide.atom.shape
        sizes = [size if axis in label.axes else 1 for axis, size in zip(wide.axes, shape, strict=True)]
        return label.moved(wide.axes, lambda part: np.broadcast_to(part.reshape(sizes), shape))

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
            result.append(label.moved(kept, lambda part, sizes=sizes: part.reshape(sizes)))  # type: ignore[misc]
        return result

    def _alone(
        self, label: Label, other: Value, shape: tuple[int, ...], product: bool, *, number: bool = False
    ) -> Label | None:
        """A label meets a value on which nothing acts there; None is left if nothing can act on it any more.

        Args:
            label: The label.
            other: The value.
            shape: The result's shape.
            product: Whether they are multiplied.
            number: Whether the value was made of units, whose scale the label has, see `_beside_number`.
        """
        label = self.constraints.resolve(label)
        if other.is_zero and not product:
            return label
        if other.concrete is not None:
            constant = replace(other, shape=shape, concrete=other.concrete.expand(shape))
            return self.beside_constant(label, constant, added=not product)
        varies = any(self._varies(other, axis - len(shape) + other.ndim) for axis in label.axes)
        if varies:
            self.constraints.fix_units(label.atom.ravel())
            self.constraints.restrict(label)
        if not product and (varies or not number):
            self.constraints.keep_ones(label)
            self.constraints.fix_scales(label.scale)
        return None if varies and not product else label

    @staticmethod
    def _varies(value: Value, axis: int) -> bool:
        """Whether a value may change along an axis, which it does not have if that is negative."""
        if axis < 0 or value.shape[axis] == 1:
            return False
        for root, path in value.sources:
            moved = coordinates(root.shape, range(root.ndim))
            for step in path:
                moved = step(moved)
            if bool((moved != moved.narrow(axis, 0, 1)).any()):
                return True
        return not value.sources

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
        varying = [axis for axis in label.axes if constant.shape[axis] > 1 and constant.stride(axis)]
        rows = rows_of(constant, label.axes)
        nonzero = np.broadcast_to(rows.any(1), label.size).reshape(label.atom.shape)
        kind = np.zeros(label.atom.shape, np.int64)
        if varying and value.by_size:  # only along the other axes it is the same for every input
            kind = _places(label, varying)
            nonzero = np.ones_like(nonzero)
        elif varying:
            kind = np.unique(rows, axis=0, return_inverse=True)[1].reshape(label.atom.shape)
        if kind.any():
            self.constraints.restrict(label)
            alone = label.atom[np.bincount(kind.ravel())[kind] == 1]
            self.constraints.fix_units(alone, counted("meets numbers that tell units apart", alone, "place"))
            tag = self.constraints.derive_tags(label.tag, kind)
            self.see(Label(label.axes, label.atom, tag, label.scale))
        if added:
            self.constraints.keep_ones(label)
            self.constraints.fix_scales(label.scale[nonzero])
        return label

    def contract(
        self,
        one: Value,
        one_axes: Sequence[int | None],
        two: Value,
        two_axes: Sequence[int | None],
        shape: Sequence[int],
    ) -> Value:
        """Multiply two values and sum over one axis of each: what acts on one there is undone by the other.

        Args:
            one: First factor.
            one_axes: Where each of its axes goes; None for those that vanish, the first of which is summed over.
            two: Second factor.
            two_axes: The same for the second. An axis to which both go is a batch axis.
            shape: The result's shape.
        """
        axes, rank = (one_axes, two_axes), len(shape)
        values = [
            self._for_each_block(one, one_axes, two, two_axes),
            self._for_each_block(two, two_axes, one, one_axes),
        ]
        summed = [goes.index(None) for goes in axes]
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
        # What is the same for all units of the other factor (an input for all experts) tells none of them apart.
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
        else:
            for value, label, other in ((values[0], inner[0], two), (values[1], inner[1], one)):
                # Zeros (an initial state) accept anything.
                if label is not None and not other.is_zero:
                    self.fix(value.with_labels(label))
        one_side = not (first.labels and second.labels)  # the map is linear in it
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

    def _for_each_block(
        self, value: Value, goes: Sequence[int | None], other: Value, others: Sequence[int | None]
    ) -> Value:
        """Let the units of a factor that is the same for all blocks of the other one (heads) have a copy for each."""
        for axis, target in enumerate(goes):
            if target is None or target not in others or len(value.labels) != 1 or axis in value.labels[0].axes:
                continue
            across = others.index(target)
            size = other.shape[across]
            # What is summed over is undone by units of each block only if these are others in each.
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

    def _narrowed(self, value: Value, goes: Sequence[int | None], others: Collection[int | None]) -> Value:
        """Return a factor of size 1 along the axes of the other one's units along which it is the same everywhere."""
        own = {axis for label in value.labels for axis in label.axes}
        batch = [
            axis for axis, target in enumerate(goes) if target is not None and target in others and axis not in own
        ]
        along = [axis for axis in batch if value.shape[axis] > 1 and self._repeats(value, axis)]
        return replace(value, shape=tuple(1 if axis in along else size for axis, size in enumerate(value.shape)))

    @staticmethod
    def _repeats(value: Value, axis: int) -> bool:
        """Whether a value is the same at all places of an axis."""
        if value.shape[axis] == 1:
            return True
        if len(value.sources) != 1:
            return False
        root, path = value.sources[0]
        part = coordinates(root.shape, range(root.ndim))
        for step in path:
            part = step(part)
        return torch.equal(part, part.narrow(axis, 0, 1).expand_as(part))

    def _undone(
        self, values: Sequence[Value], labels: Sequence[Label], goes: Sequence[Sequence[int | None]], *, alone: bool
    ) -> Label | None:
        """Let what acts on the summed axis of one factor be undone by the other.

        Args:
            values: The factors.
            labels: Of each, what acts on the summed axis.
            goes: Where the axes of each go.
            alone: Whether nothing acts on the product but what acts on its blocks: then these have scales.

        Returns:
            The blocks of units that stand at one place of the batch axes, on these; None if there are no such axes.
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
            self.fix(values[0].with_labels(labels[0]), "the two sides of a product carry different labels")
            self.fix(values[1].with_labels(labels[1]))
            return None
        axes = tuple(axis for axis in batch if axis is not None)
        squared = one.atom == two.atom
        if squared.any():  # a sum of squares: of all mixtures only orthogonal ones undo themselves
            self.constraints.keep_norm(one.at(squared))
        joined = self.constraints.same_units(one, two, contracted=True)
        if not axes:
            self.constraints.equate([(one.scale, 1.0), (two.scale, 1.0)])
            return None
        # The same members again (in another sample of the batch) are the same block.
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

    def see(self, label: Label, name: str | None = None) -> None:
        """Write down where units are seen: two units may change places only if they are seen at the same places.

        Args:
            label: The units.
            name: Name of the value in which they are seen, if it is to be known.
        """
        label = self.constraints.resolve(label)
        held = hash((label.atom.tobytes(), label.tag.tobytes()))
        if name is None and held in self.seen:  # the same units at the same places say nothing more
            return
        self.seen.add(held)
        self.constraints.occurrences.append(Sighting(label, name))

    # What is read of a value that is only moved about: the rest would be read by a longer input.

    def carry(self, value: Value, result: Value, step: Callable[[Tensor], Tensor] | None = None) -> Value:
        """Say that a result holds elements of a value, moved by a step: reading it reads these alone."""
        steps = () if step is None else (step,)
        sources = tuple((root, (*path, *steps)) for root, path in value.sources or ((value, ()),))
        return replace(result, sources=(*result.sources, *sources))

    def pass_on(self, value: Value, result: Value, step: Callable[[Tensor], Tensor] | None = None) -> Value:
        """Say that a result holds elements of a value and nothing else, moved by a step; as for `carry`."""
        mixture = (value.mixture or Mixture.of(value)).moved(step) if value.labels else None
        if mixture is not None and not mixture.opened and _positions(result) > _positions(value):
            mixture = None  # copies of units (of keys that queries share) have coordinates of their own
        return replace(self.carry(value, result, step), mixture=mixture)

    def cut_by_size(self, value: Value) -> None:
        """Say that a part of a value is taken that depends on the input's size: the rest counts as for weights."""
        self.made_of_states |= {id(root): root for root, _ in value.sources or ((value, ()),)}

    def read(self, value: Value) -> None:
        """Note that all elements of a value are read."""
        for root, path in value.sources or ((value, ()),):
            self.uses[root.state or ""] += 1
            if root.labels:
                # One entry for all walks, where it is a parameter.
                key = root.state if root.state is not None else id(root)
                self.reads.setdefault(key, (root, []))[1].append(path)
