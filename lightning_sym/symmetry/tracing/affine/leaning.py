"""Which streams only layer norms and linear layers read, and what writes into them.

See docs/theory/intertwiners.md, 2.12.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.affine.interpreter import Interpreter
from lightning_sym.symmetry.tracing.coordinates import coordinates
from lightning_sym.symmetry.tracing.nodes import moved, reduced
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.tilts import Leaning

_PASSES = operations(Trait.CAST) | {"neg"}


class HeldError(Exception):
    """Something sees a stream that is no layer norm and no linear layer, or writes into it in another way."""


def leaning_of(interpreters: Sequence[Interpreter]) -> list[Leaning]:
    """Return the streams that layer norms and linear layers read, the latter as they are.

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
            seen |= walk.nodes
            if walk.readers and not walk.readers.keys() & walk.writers.keys():
                own.append(Leaning(tuple(walk.readers), tuple(walk.writers), tuple(walk.seen())))
        found.append(own)
    first, *others = found or [[]]
    return [own for own in first if all(any(own.is_like(two) for two in each) for each in others)]


class _Stream:
    """The values that one layer norm reads, and all with which they are added up.

    Args:
        interpreter: Of the capture.
        first: What the layer norm reads.
    """

    def __init__(self, interpreter: Interpreter, first: fx.Node) -> None:
        self.interpreter, self.states = interpreter, interpreter.capture.states
        self.size = tuple(first.meta["val"].shape)[-1]
        self.nodes: set[fx.Node] = set()
        self.readers: dict[tuple[str, int], None] = {}
        self.writers: dict[tuple[str, int], None] = {}
        self._roles: dict[fx.Node, set[fx.Node]] = {}  # parameters, and by what they are read here
        self._left = [first]

    def run(self) -> None:
        """Follow the stream.

        Raises:
            HeldError: If it cannot lean.
        """
        while self._left:
            node = self._left.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            self._left += self._before(node)
            for user in node.users:
                self._left += self._behind(node, user)
        for state, users in self._roles.items():
            if {*state.users} != users or list(self.states.values()).count(self.states[state]) > 1:
                raise HeldError

    def seen(self) -> Iterator[tuple[str, int]]:
        """Yield the named values of the stream, with their last axis."""
        for mark in self.interpreter.capture.marks:
            if mark.node in self.nodes:
                yield mark.name, len(mark.node.meta["val"].shape) - 1

    def _before(self, node: fx.Node) -> list[fx.Node]:
        """Return the values of the stream of which a value is made, and note what writes."""
        name = name_of(node) if node.op == "call_function" else ""
        if name == "linear":
            weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
            self._parameter(weight, 0, node, self.writers)
            if bias is not None:
                self._parameter(bias, 0, node, self.writers)
            return []
        if name == "embedding":
            self._parameter(node.args[0], 1, node, self.writers)
            return []
        if node in self.states:
            self._parameter(node, len(node.meta["val"].shape) - 1, None, self.writers)
            return []
        return self._passed(node)

    def _behind(self, node: fx.Node, user: fx.Node) -> list[fx.Node]:
        """Return what is of the stream as well, and note what reads it."""
        name = name_of(user) if user.op == "call_function" else ""
        given = [own for own in user.all_input_nodes if own is node]
        if node in self.states:
            self._roles.setdefault(node, set()).add(user)
        if name == "layer_norm" and user.args[0] is node and len(user.args[1]) == 1:  # type: ignore[arg-type]
            return []
        if name == "linear" and user.args[0] is node and len(given) == 1:
            self._parameter(user.args[1], 1, user, self.readers)
            return []
        if node not in self._passed(user):
            raise HeldError
        return [user]

    def _passed(self, node: fx.Node) -> list[fx.Node]:
        """Return the values whose sum, at most moved along other axes, a node is."""
        name, val = name_of(node) if node.op == "call_function" else "", node.meta.get("val")
        if not isinstance(val, Tensor) or not val.ndim or val.shape[-1] != self.size:
            raise HeldError
        given = node.all_input_nodes
        if name in ("add", "sub") and all(isinstance(own, fx.Node) for own in node.args[:2]):
            if any(own.meta["val"].shape[-1:] != (self.size,) for own in given):
                raise HeldError
            return given
        if name == "cat" and {node.kwargs.get("dim", 0), *node.args[1:2]}.isdisjoint({-1, val.ndim - 1}):
            return given
        if len(given) == 1 and (name in _PASSES or name in operations(Trait.MOVE)):
            before = given[0].meta["val"]
            if before.ndim and before.shape[-1] == self.size:
                after = moved(node, coordinates(before.shape, [before.ndim - 1]))
                whole = coordinates(tuple(val.shape), [val.ndim - 1])
                if name in _PASSES or (
                    isinstance(after, Tensor) and torch.equal(after.expand(val.shape), whole.expand(val.shape))
                ):
                    return given
        if len(given) == 1 and name in operations(Trait.SUM):
            rank = given[0].meta["val"].ndim
            if rank - 1 not in reduced(node, rank):
                return given
        raise HeldError

    def _parameter(self, node: Any, axis: int, user: fx.Node | None, role: dict[tuple[str, int], None]) -> None:
        """Note a parameter that is read as it is."""
        if node not in self.states or node.meta["val"].shape[axis] != self.size:
            raise HeldError
        name = self.states[node]
        if name not in self.interpreter.system.movable:
            raise HeldError
        if user is not None:
            self._roles.setdefault(node, set()).add(user)
        role[name, axis] = None
