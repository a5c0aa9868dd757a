"""Find streams that only layer norms and linear layers read, and their writers.

See docs/theory/transformers.md, 4.
"""

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.affine.interpreter import Interpreter
from lightning_sym.symmetry.tracing.affine.tilts import Leaning
from lightning_sym.symmetry.tracing.graph.coordinates import coordinates
from lightning_sym.symmetry.tracing.graph.nodes import argument, equation_of, letters_of, moved, reduced, shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations, spatial_axes_of

_PASSES = operations(Trait.CAST) | {"neg"}
_PRODUCTS = operations(Trait.CONTRACT) - operations(Trait.CONVOLVE) - {"embedding"}
# Operations on spatial axes only.
_OF_PLACES = operations(Trait.POOL | Trait.RESIZE | Trait.NEAREST)

Role = dict[tuple[str, int], None]
Place = tuple[fx.Node, int, str | None]  # a value, the axis of the stream's units, and the gain after it


class HeldError(Exception):
    """An operation other than a layer norm or linear layer reads a stream, or writes into it in an unsuitable way."""


def leaning_of(interpreters: Sequence[Interpreter]) -> list[Leaning]:
    """Return the streams that layer norms, and linear layers directly, read.

    Args:
        interpreters: One for each capture, after they have run.
    """
    found: list[list[Leaning]] = []
    for interpreter in {id(own.capture): own for own in interpreters}.values():
        own, seen = list[Leaning](), set[fx.Node]()
        for node in interpreter.capture.graph.nodes:
            stream: Any = node.args[0] if name_of(node) == "layer_norm" else None
            if stream is None or stream in seen:
                continue
            walk = _Stream(interpreter, stream)
            try:
                walk.run()
            except HeldError:
                walk.readers.clear()
            seen |= walk.nodes.keys()
            if walk.readers and not walk.readers.keys() & walk.writers.keys():
                own.append(walk.found())
        found.append(own)
    first, *others = found or [[]]
    return [own for own in first if all(any(own.is_like(two) for two in each) for each in others)]


class _Layer(NamedTuple):
    """A linear layer or convolution.

    Attributes:
        weight: Its weight.
        bias: Its bias, if any.
        axis: The axis of its units in values.
        rows: The weight's output axis.
        columns: The weight's input axis.
    """

    weight: Any
    bias: Any
    axis: int
    rows: int = 0
    columns: int = 1


def _layer(node: fx.Node) -> _Layer | None:
    """Return the linear layer or convolution that a node computes; None for other nodes."""
    name, shape = name_of(node), shape_of(node) or ()
    if name == "linear":
        return _Layer(node.args[1], argument(node, 2, "bias"), len(shape) - 1)
    if (
        name not in operations(Trait.CONVOLVE)
        or argument(node, 6, "groups", 1) != 1
        or len(shape) < 2 + spatial_axes_of(name)
    ):
        return None
    return _Layer(node.args[1], argument(node, 2, "bias"), 1, *((1, 0) if "transpose" in name else (0, 1)))


def _moved(node: fx.Node, tensor: Tensor) -> Any:
    """Apply a move to another tensor; integer indices are replaced by zeros."""
    if name_of(node) not in operations(Trait.PICK):
        return moved(node, tensor)
    args = fx.map_arg(node.args[1:], lambda own: torch.zeros(own.meta["val"].shape, dtype=torch.int64))
    return node.target(tensor, *args, **node.kwargs)  # type: ignore[operator]


class _Stream:
    """The values that a layer norm reads, and all values added to them.

    Args:
        interpreter: The interpreter of the capture.
        first: The input of the layer norm.

    Attributes:
        nodes: Its values, with the axis of the units and the gain.
        readers: The weights of linear layers that read it, with their axes.
        gains: By tensor or named value, the gain after it, or None.
    """

    def __init__(self, interpreter: Interpreter, first: fx.Node) -> None:
        self.interpreter, self.states = interpreter, interpreter.capture.states
        shape = first.meta["val"].shape
        self.size = shape[-1]
        self.nodes: dict[fx.Node, Place] = {}
        self.readers: Role = {}
        self.gains: dict[str, str | None] = {}
        self._read: dict[fx.Node, None] = {}  # the values that linear layers read
        self._sums: dict[fx.Node, list[Place]] = {}  # by value, those that it sums
        self._writers: dict[fx.Node, Role] = {}  # by value, the tensors that write it
        self._roles: dict[fx.Node, set[fx.Node]] = {}  # parameters, and their readers in this stream
        self._left: list[Place] = [(first, len(shape) - 1, None)]

    def run(self) -> None:
        """Follow the stream through the graph.

        Raises:
            HeldError: If the stream has an unsuitable reader or writer.
        """
        while self._left:
            place = self._left.pop()
            if self.nodes.setdefault(place[0], place) is not place:
                if self.nodes[place[0]] != place:
                    raise HeldError
                continue
            self._sums[place[0]] = self._before(*place)
            self._left += self._sums[place[0]]
            for user in place[0].users:
                self._left += self._after(*place, user)
        names = list(self.states.values())
        for node, users in self._roles.items():
            if {*node.users} != users or (node in self.states and names.count(self.states[node]) > 1):
                raise HeldError
        for mark in self.interpreter.capture.marks:
            if mark.node in self.nodes:
                self.gains[mark.name] = self.nodes[mark.node][2]

    @cached_property
    def behind(self) -> set[fx.Node]:
        """The values that linear layers read, and their summands: all others are seen up to multiples of ones."""
        found, left = set[fx.Node](), [*self._read]
        while left:
            if (node := left.pop()) not in found:
                found.add(node)
                left += [own for own, *_ in self._sums[node]]
        return found

    @property
    def writers(self) -> Role:
        """The tensors that write into values that linear layers read, with their axes."""
        return {place: None for node, own in self._writers.items() if node in self.behind for place in own}

    def found(self) -> Leaning:
        """Return the stream.

        A map moves the writers of all values that linear layers read. Other writers stay: norms do not see it if the
        map acts on one summand alone, and translations of their weights' means do not commute with it.
        """
        summed = set(self.behind)
        for node in self.interpreter.capture.graph.nodes:
            if any(own in summed for own, *_ in self._sums.get(node, ())):
                summed.add(node)
        marks = [mark for mark in self.interpreter.capture.marks if mark.node in summed]
        seen = {mark.name: self.nodes[mark.node][1] for mark in marks if mark.node in self.behind}
        known = {*seen, *(name for name, _ in self.writers)}
        gains = {name: gain for name, gain in self.gains.items() if gain is not None and name in known}
        mixed = tuple(mark.name for mark in marks if mark.node not in self.behind)
        return Leaning(tuple(self.readers), tuple(self.writers), tuple(seen.items()), gains, mixed)

    def _before(self, node: fx.Node, axis: int, gain: str | None) -> list[Place]:
        """Return the stream's values that form a value; record writers."""
        layer, writers = _layer(node), self._writers.setdefault(node, {})
        if node in self.states:
            self._parameter(node, axis, None, writers, gain)
        elif name_of(node) == "embedding" and axis == len(shape_of(node) or ()) - 1:
            self._parameter(node.args[0], 1, node, writers, gain)
        elif layer is not None and layer.axis == axis:
            self._parameter(layer.weight, layer.rows, node, writers, gain)
            if layer.bias is not None:
                self._parameter(layer.bias, 0, node, writers, gain)
        elif gain is None and (behind := self._after_gain(node, axis)) is not None:
            return [behind]
        else:
            return [(own, at, gain) for own, at in self._summands(node, axis).items()]
        return []

    def _after(self, node: fx.Node, axis: int, gain: str | None, user: fx.Node) -> list[Place]:
        """Return further values of the stream; record readers."""
        if node in self.states:
            self._roles.setdefault(node, set()).add(user)
        if gain is None and user.args[:1] == (node,) and user.all_input_nodes.count(node) == 1:
            layer, last = _layer(user), axis == len(shape_of(node) or ()) - 1
            if name_of(user) == "layer_norm" and last and len(user.args[1]) == 1:  # type: ignore[arg-type]
                return []
            if name_of(user) in ("var", "std") and reduced(user, len(shape_of(node) or ())) == {axis}:
                return []
            if layer is not None and layer.axis == axis:
                self._parameter(layer.weight, layer.columns, user, self.readers, None)
                self._read[node] = None
                return []
        made = list(user.users) if isinstance(user.meta.get("val"), (list, tuple)) else [user]
        found = [place for each in made for place in self._further(node, axis, gain, each)]
        if len(found) < len(made):
            raise HeldError
        return found

    def _further(self, node: fx.Node, axis: int, gain: str | None, user: fx.Node) -> Iterator[Place]:
        """Yield the axes of the units in an operation's result, if it belongs to the stream."""
        for at in self._axes(user):
            with contextlib.suppress(HeldError):
                if gain is not None and self._after_gain(user, at) == (node, axis, gain):
                    yield user, at, None
                elif self._summands(user, at).get(node) == axis:
                    yield user, at, gain

    def _axes(self, node: fx.Node) -> list[int]:
        """Return the axes with the stream's width."""
        return [axis for axis, size in enumerate(shape_of(node) or ()) if size == self.size]

    def _wide(self, node: fx.Node, axis: int) -> dict[fx.Node, int]:
        """Return the arguments that have the units of an axis, with their own axes."""
        rank = len(shape_of(node) or ())
        aligned = ((own, axis - rank + len(shape_of(own) or ())) for own in node.all_input_nodes)
        return {own: at for own, at in aligned if at in self._axes(own)}

    def _after_gain(self, node: fx.Node, axis: int) -> Place | None:
        """Return the value that a node multiplies by a gain with one number per unit; None for other nodes."""
        wide = self._wide(node, axis)
        if name_of(node) != "mul" or len(wide) != 2:
            return None
        for (value, at), (gain, _) in itertools.permutations(wide.items()):
            if gain.meta["val"].numel() == self.size and value.meta["val"].numel() > self.size:
                held: Role = {}
                self._parameter(gain, self._axes(gain)[0], node, held, None)
                return value, at, next(iter(held))[0]
        return None

    def _summands(self, node: fx.Node, axis: int) -> dict[fx.Node, int]:
        """Return the values that a node sums, perhaps after moves along other axes or a common factor of all units.

        Raises:
            HeldError: If the node computes anything else.
        """
        name, given, wide = name_of(node), node.all_input_nodes, self._wide(node, axis)
        if axis not in self._axes(node) or node.op != "call_function":
            raise HeldError
        if name in ("add", "sub") and all(isinstance(own, fx.Node) for own in node.args[:2]):
            if len(wide) == len(given):
                return wide
        elif name in ("mul", "div"):
            if len(wide) == 1 and node.args.count(*wide) == 1 and (name == "mul" or node.args[0] in wide):
                return wide
        elif name == "cat":
            if argument(node, 1, "dim", 0) % len(node.meta["val"].shape) != axis:
                return wide
        elif name in ("where", "masked_fill"):
            mask, *parts = node.args if name == "where" else (node.args[1], node.args[0], node.args[2])
            kept: list[Any] = [part for part in parts if not self._is_zero(part)]
            if mask not in wide and kept and all(part in wide for part in kept):
                return {part: wide[part] for part in kept}
        elif name in _PRODUCTS and (equation := equation_of(node)) is not None:
            *terms, out = letters_of(equation)
            values: Any = node.args[1] if name == "einsum" else node.args[:2]
            for own, other, value in ((0, 1, values[0]), (1, 0, values[1])):
                alone = out[axis] in terms[own] and out[axis] not in terms[other] and len(given) == 2
                if alone and (name != "linear" or own == 0):
                    return {value: terms[own].index(out[axis])}
        else:
            whole, *_ = node.args if node.target is operator.getitem else (node,)
            for at in self._axes(source := whole.args[0]):  # type: ignore[union-attr,arg-type]
                if self._moved_to(node, whole, source, at) == axis:  # type: ignore[arg-type]
                    return {source: at}  # type: ignore[dict-item]
        raise HeldError

    def _is_zero(self, part: Any) -> bool:
        """Whether an argument is zero everywhere."""
        number = self.interpreter.constants.number(part) if isinstance(part, fx.Node) else part
        return isinstance(number, (int, float)) and number == 0

    def _moved_to(self, node: fx.Node, whole: fx.Node, given: fx.Node, at: int) -> int | None:
        """Return the new index of an axis after an operation on one value that treats its places equally; else None.

        Args:
            node: The result.
            whole: The operation; ``node`` may be one of several results.
            given: The value.
            at: The axis.
        """
        name, before, after = name_of(whole), tuple(given.meta["val"].shape), tuple(node.meta["val"].shape)
        if name in _PASSES or (name in _OF_PLACES and at == 1 and len(before) == len(after) > 2):
            return at
        if name in operations(Trait.SUM) and at not in (summed := reduced(whole, len(before))):
            return at if len(before) == len(after) else at - sum(axis < at for axis in summed)
        if name == "cumsum" and argument(whole, 1, "dim") % len(before) != at:
            return at
        if name in operations(Trait.MOVE | Trait.PICK):
            result = _moved(whole, coordinates(before, [at]))
            result = result if node is whole else result[node.args[1]]
            for axis in self._axes(node) if isinstance(result, Tensor) and tuple(result.shape) == after else ():
                if torch.equal(result, coordinates(after, [axis])):
                    return axis
        return None

    def _parameter(self, node: Any, axis: int, user: fx.Node | None, role: Role, gain: str | None) -> None:
        """Record a parameter that the network reads directly, or in another shape.

        Raises:
            HeldError: If it is read in another way.
        """
        while isinstance(node, fx.Node) and node not in self.states:
            self._roles.setdefault(node, set()).add(user)  # type: ignore[arg-type]
            (user, node), whole = (node, node.args[0]), node.meta["val"].numel()
            if name_of(user) not in operations(Trait.MOVE) or node.meta["val"].numel() != whole:
                raise HeldError
            axis = next((at for at in self._axes(node) if self._moved_to(user, user, node, at) == axis), -1)
        if node not in self.states or axis not in self._axes(node):
            raise HeldError
        name = self.states[node]
        if name not in self.interpreter.system.movable or self.gains.setdefault(name, gain) != gain:
            raise HeldError
        if user is not None:
            self._roles.setdefault(node, set()).add(user)
        role[name, axis] = None
