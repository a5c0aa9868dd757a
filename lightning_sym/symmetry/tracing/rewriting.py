"""Rewrites captured networks: puts operations in the place of others, and keeps all that is known of the graph true."""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.capture import Capture, operation_name
from lightning_sym.symmetry.tracing.invisible import memories_of, shared_memory
from lightning_sym.symmetry.tracing.memory import written_by

# Returns what stands for an operation, if it is of the spelling that this rewrites; None if it is not.
Rewrite = Callable[["Rewriter", fx.Node], fx.Node | None]
Made = Literal["constants", "weights", "inputs"]
_ORDER: tuple[Made, ...] = ("constants", "weights", "inputs")


class Rewriter:
    """Puts operations in the place of others in the graph of a capture, which is changed.

    The memory of what is put there counts as that of what it stands for. Tensors in whose memory something is written
    that others see are left alone, as are all operations for which a user has a rule.

    Args:
        capture: The network.
        kept: The operations, as ``aten::linear``, that are neither replaced nor put anywhere.

    Attributes:
        graph: Its graph.
        at: The operation at hand, before which others are put.
    """

    def __init__(self, capture: Capture, kept: Collection[str] = ()) -> None:
        self.capture, self.graph, self.kept = capture, capture.graph, kept
        self.at: fx.Node = next(iter(capture.graph.nodes))
        self._frozen = shared_memory(capture.graph)
        self._written = {memory for node in self.graph.nodes for at in written_by(node) for memory in memories_of(at)}
        self._marked = {mark.node for mark in capture.marks}
        self._made: dict[fx.Node, Made] = {}
        self._mode = next(
            (
                value.fake_mode
                for node in self.graph.nodes
                for value in pytree.tree_leaves(node.meta.get("val"))
                if isinstance(value, FakeTensor)
            ),
            None,
        ) or FakeTensorMode(allow_non_fake_inputs=True)
        for node in self.graph.nodes:
            self._learn(node)

    # What is known of a node.

    def name(self, node: Any) -> str:
        """Return the name of an operation that may be replaced, without the mark of writing in place; else nothing."""
        if not isinstance(node, fx.Node) or node.op != "call_function" or node in self._frozen:
            return ""
        if self._is_kept(node.target) or node.kwargs.get("out") is not None:
            return ""
        return operation_name(node.target).removesuffix("_")

    def _is_kept(self, target: Any) -> bool:
        schema = getattr(target, "_schema", None)
        return schema is not None and schema.name.removesuffix("_") in self.kept

    def shape(self, node: Any) -> tuple[int, ...]:
        """Return the shape of the tensor that a node makes; a number has none.

        Raises:
            KeyError: If it makes something else.
        """
        if not isinstance(node, fx.Node):
            return ()
        return tuple(_tensor(node).shape)

    def is_frozen(self, node: fx.Node) -> bool:
        """Whether something is written into the memory of a node that others see: it stays as it is."""
        return node in self._frozen

    def writes_into(self, node: fx.Node) -> bool:
        """Whether something is written into the memory of a node."""
        return not self._written.isdisjoint(memories_of(node))

    def number(self, item: Any) -> float | None:
        """Return the number in the place of a tensor, or that a node is whatever goes in; None if it is none."""
        if not isinstance(item, fx.Node):
            return float(item) if isinstance(item, (int, float)) else None
        if self.made_of(item) != "constants" or math.prod(self.shape(item)) != 1 or self.is_frozen(item):
            return None
        if item.op == "get_attr":
            held: Any = getattr(item.graph.owning_module, str(item.target))
            return None if held.is_meta else float(held)
        if not isinstance(item.target, torch._ops.OpOverload) or item.target._schema.is_mutable:
            return None
        args, kwargs = pytree.tree_map_only(fx.Node, self.number, (item.args, item.kwargs))
        if None in [one for node, one in zip(item.args, args, strict=True) if isinstance(node, fx.Node)]:
            return None
        for at, node in enumerate(item.args):
            if isinstance(node, fx.Node):
                args = (*args[:at], torch.full(self.shape(node), args[at], dtype=_tensor(node).dtype), *args[at + 1 :])
        return float(item.target(*args, **{**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))

    def made_of(self, node: Any) -> Made:
        """Return what a node is made of: of nothing but constants, of weights besides, or of the network's inputs."""
        return self._made[node] if isinstance(node, fx.Node) else "constants"

    def _learn(self, node: fx.Node) -> None:
        """Note what a node is made of, all before it being known."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            floating = isinstance(value, Tensor) and value.is_floating_point()
            self._made[node] = "inputs" if node not in self.capture.states else "weights" if floating else "constants"
        elif memories_of(node) & self._written:  # it tells nothing of what others write
            self._made[node] = "inputs"
        else:
            parts = [self._made[given] for given in node.all_input_nodes]
            self._made[node] = max(parts, default="constants", key=_ORDER.index)

    def only_for(self, node: Any, user: fx.Node) -> bool:
        """Whether a node is an operation that one other reads, at one place, and nobody can name."""
        if not self.name(node) or node in self._marked or list(node.users) != [user]:
            return False
        return sum(one is node for one in pytree.tree_leaves((user.args, user.kwargs))) == 1

    # Changes.

    def insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Put an operation before the one at hand, in its module.

        Args:
            target: Such as ``torch.ops.aten.linear.default``.
            args: Its arguments, tensors as nodes.
            kwargs: Its keywords.

        Raises:
            KeptError: If a user has a rule for it.
        """
        if self._is_kept(target):
            raise KeptError
        with self.graph.inserting_before(self.at):
            node = self.graph.create_node("call_function", target, args, kwargs)
        inputs = fx.map_arg((args, kwargs), _tensor)
        with torch.no_grad(), self._mode:
            given, named = pytree.tree_map_only(Tensor, self._without_data, inputs)
            node.meta["val"] = pytree.tree_map_only(Tensor, Tensor.detach, target(*given, **named))
        self._learn(node)
        if self.at in self.capture.modules:
            self.capture.modules[node] = self.capture.modules[self.at]
        return node

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let a node stand for another one, of the same shape and type, which goes with all that only it read.

        Args:
            old: What goes.
            new: Made by `insert`, or a node before.

        Raises:
            ValueError: If they differ in shape or type, or memory that is written into would be another one.
        """
        one, two = _tensor(old), _tensor(new)
        if one.shape != two.shape or one.dtype != two.dtype:
            raise ValueError(
                f"{old} of shape {tuple(one.shape)} and {one.dtype} was replaced by {new} of {tuple(two.shape)} and "
                f"{two.dtype}; expected the same shape and type"
            )
        fresh = not new.users and new not in self._marked
        if fresh:
            new.meta["val"] = one  # in the same memory
        elif (memories_of(old) ^ memories_of(new)) & self._written:
            raise ValueError(f"{old} or {new} is written into; expected that they share their memory")
        old.replace_all_uses_with(new)
        for at, mark in enumerate(self.capture.marks):
            if mark.node is old:
                self.capture.marks[at] = replace(mark, node=new)
                self._marked.add(new)
        self._marked.discard(old)
        self._erase(old)

    def _erase(self, node: fx.Node) -> None:
        """Take out a node that nobody reads, and what only it read."""
        before = node.all_input_nodes
        for at, mark in enumerate(self.capture.marks):
            if mark.after is node:
                self.capture.marks[at] = replace(mark, after=node.prev)
        self.capture.modules.pop(node, None)
        self._made.pop(node, None)
        self.graph.erase_node(node)
        for given in before:
            if self._is_dead(given):
                self._erase(given)

    def _is_dead(self, node: fx.Node) -> bool:
        """Whether nobody can tell that a node is there."""
        operation = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        pure = node.op == "get_attr" or (node.op == "call_function" and operation and not written_by(node))
        return pure and not node.users and node not in self._marked

    def erase_unread(self) -> None:
        """Take out all operations whose results nobody reads."""
        for node in reversed(list(self.graph.nodes)):
            if not node._erased and self._is_dead(node):
                self._erase(node)

    def rewrite(self, table: Mapping[str, Rewrite]) -> int:
        """Rewrite all operations once, in order, by the name of each, as long as there is something to rewrite in it.

        Returns:
            The number of changes.
        """
        changes = 0
        node = next(iter(self.graph.nodes))
        while node.op != "root":
            following = node.next
            if (rule := table.get(self.name(node))) is not None:
                self.at, before = node, node.prev
                try:
                    new = rule(self, node)
                except KeptError:
                    new = None
                put_in = self._put_in(before, node)
                for one in reversed(put_in):
                    if one is not new and not one.users and not one._erased:
                        self._erase(one)
                if new is not None:
                    # What was put in may itself be of another spelling.
                    following = next((one for one in put_in if not one._erased), following)
                    self.replace(node, new)
                    changes += 1
            node = following
        return changes

    @staticmethod
    def _put_in(before: fx.Node, node: fx.Node) -> list[fx.Node]:
        """Return what stands between two nodes."""
        found = []
        while (before := before.next) is not node:
            found.append(before)
        return found


class KeptError(Exception):
    """A user has a rule for an operation that was to be put in."""


def _tensor(node: fx.Node) -> Tensor:
    """Return the tensor without data that a node makes."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target))
    if not isinstance(value, Tensor):
        raise KeyError(f"{node} makes no tensor")
    return value
