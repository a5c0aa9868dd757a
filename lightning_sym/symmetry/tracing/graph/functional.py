"""Remove writes from a captured graph: the result of each write becomes a new value.

Views of the written memory that the graph reads later are recomputed from the new value.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import memories_of, numbers_of, written_by
from lightning_sym.symmetry.tracing.graph.operations import name_of, out_of_place
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter

aten = torch.ops.aten


def functional(capture: Capture) -> Capture:
    """Replace operations that write into tensors by operations that return new values, in place.

    Args:
        capture: The captured network.

    Returns:
        The capture.
    """
    written = {memory for node in capture.graph.nodes for target in written_by(node) for memory in memories_of(target)}
    return _Versions(capture, written).run() if written else capture


class _Versions:
    """Tracks the current values of all tensors in memory that the graph writes into.

    Args:
        capture: The network.
        written: Keys of this memory.
    """

    def __init__(self, capture: Capture, written: set[int]) -> None:
        self.capture, self.written, self.rewriter = capture, written, Rewriter(capture)
        self.memory: dict[fx.Node, int] = {}
        self.base: dict[int, fx.Node] = {}
        self.parent: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = {}  # of a view: its base or another view
        self.held: dict[fx.Node, Any] = {}  # the original tensors, which show a part of the memory
        self.writes: Counter[int] = Counter()
        self.current: dict[fx.Node, tuple[int, fx.Node]] = {}
        self.reshaped: dict[fx.Node, fx.Node] = {}  # by operations that change a tensor's shape in place

    def run(self) -> Capture:
        """Process all operations in order."""
        marks, self.capture.marks = self.capture.marks, []
        gone: list[fx.Node] = []
        for node in list(self.capture.graph.nodes):
            self.rewriter.at = node
            given = [self._last(own) for own in node.all_input_nodes]
            targets = [self._last(own) for own in written_by(node)]
            for own in node.all_input_nodes:
                node.replace_input_with(own, self.now(own))
            other = out_of_place(node.target) if targets else None
            if other is not None and other is not node.target and _is_view(other):
                node.target = other
                self._enter(node, targets[0])
                self.reshaped[targets[0]] = node
            elif targets:
                if self.reshaped and any(self.memory.get(own) == self.memory.get(targets[0]) for own in self.reshaped):
                    raise ValueError(
                        f"the network cannot be traced, because {name_of(node)}_ writes into a tensor whose shape "
                        f"{name_of(next(iter(self.reshaped.values())))}_ has changed in place; expected a new tensor "
                        "of that shape: use the function without the underscore"
                    )
                gone += [node] * self._write(node, targets)
            elif not self.written.isdisjoint(memories := memories_of(node)):
                self._enter(node, next((own for own in given if self.memory.get(own) in memories), None))
            self.rewriter.at = node.next
            for mark in marks:
                if mark.after is node:
                    self.capture.marks.append(replace(mark, node=self.now(mark.node)))
        for node in reversed(gone):
            self.capture.modules.pop(node, None)
            self.capture.graph.erase_node(node)
        return self.capture

    def _enter(self, node: fx.Node, parent: fx.Node | None) -> None:
        """Register a tensor, or a list of parts of one, in memory that the graph writes into."""
        if parent is None and not isinstance(node.meta["val"], Tensor):
            return  # each item has its own memory
        (memory, *_) = memories_of(node)
        self.memory[node], self.held[node] = memory, node.meta["val"]
        self.current[node] = self.writes[memory], node
        if parent is None:
            self.base[memory] = node
        else:
            self.parent[node] = parent, node.all_input_nodes[0]
            node.target = aten.reshape.default if node.target is aten.view.default else node.target
            node.meta["val"] = self.rewriter.computed(node.target, node.args, node.kwargs)

    def now(self, node: fx.Node) -> fx.Node:
        """Return the current value of a tensor at the current operation."""
        return self._value(self._last(node))

    def _last(self, node: fx.Node) -> fx.Node:
        """Return the node that has a tensor's current shape."""
        while node in self.reshaped:
            node = self.reshaped[node]
        return node

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the value with a node's shape at the current operation."""
        if node not in self.memory:
            return node
        version, found = self.current[node]
        if version < self.writes[self.memory[node]]:
            parent, source = self.parent[node]
            found = self._value(parent)
            if source is not None:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda own: found if own is source else own)
                found = self.rewriter.insert(node.target, *args, **kwargs)
            self.current[node] = self.writes[self.memory[node]], found
        return found

    def _write(self, node: fx.Node, targets: list[fx.Node]) -> bool:
        """Replace a write by its new value; return whether the operation itself becomes redundant."""
        target, alone = targets[0], len(targets) == 1
        new = self._result(node, self.held[target]) if alone else None
        if new is None and alone:  # the node represents its own written value, which its rule describes
            node.meta["val"], self.rewriter.at = self.held[target].clone(), node.next
        for own in targets:
            self._set(own, new or (node if alone else self._unknown(node.all_input_nodes, self.held[own])))
        if node.meta.get("val") is not None:
            self.memory[node], self.held[node] = self.memory[target], self.held[target]
            self.parent[node] = target, None
            self.current[node] = self.current[target]
        return new is not None

    def _result(self, node: fx.Node, value: Tensor) -> fx.Node | None:
        """Return the value that an operation writes into a tensor; None if no other operation computes it."""
        insert, target = self.rewriter.insert, node.target
        if not isinstance(target, torch._ops.OpOverload) or "out" in node.kwargs:
            return None
        try:
            if name_of(node) == "copy":
                new: Any = node.args[1]
                new = insert(aten.expand.default, new, list(value.shape)) if _shape(new) != value.shape else new
            elif name_of(node) == "zero":
                new = insert(aten.zeros_like.default, node.args[0])
            elif target is aten.fill_.Scalar:
                new = insert(aten.full_like.default, *node.args)
            elif (other := out_of_place(target)) is not target and not other._schema.is_mutable:
                new = insert(other, *node.args, **node.kwargs)
            else:
                return None
            if new.meta["val"].dtype != value.dtype:
                new = insert(aten.to.dtype, new, value.dtype)
        except NoSpellingError:
            return None
        return new if _shape(new) == value.shape else None

    def _unknown(self, given: list[fx.Node], value: Tensor) -> fx.Node:
        """Return a value without known structure."""
        given = [own for own in given if isinstance(own.meta.get("val"), Tensor)]
        new = self.rewriter.demand(given, list(value.shape))
        new.meta["demand"], new.meta["rule_of"] = ("", None), name_of(given[0])
        return new if new.meta["val"].dtype == value.dtype else self.rewriter.insert(aten.to.dtype, new, value.dtype)

    def _set(self, target: fx.Node, new: fx.Node) -> None:
        """Update the value of a tensor, and of all others in the same memory."""
        memory = self.memory[target]
        base = self.base[memory]
        one, two = self.held[target], self.held[base]
        result = new
        if one.shape != two.shape or one.stride() != two.stride() or one.storage_offset() != two.storage_offset():
            before, shown, whole = self.now(base), numbers_of(one), numbers_of(two)
            place = torch.full((int(max(own.max() for own in (shown, whole) if own.numel())) + 1,), -1)
            place[whole.reshape(-1)] = torch.arange(whole.numel())
            if bool((place[shown] < 0).any()):  # the view is larger than its base
                result = self._unknown([before, new], self.held[base])
            else:
                result = self.rewriter.insert(aten.put.default, before, self.rewriter.hold(place[shown]), new)
        self.writes[memory] += 1
        self.current[base] = self.writes[memory], result
        self.current[target] = self.writes[memory], new


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _is_view(target: torch._ops.OpOverload) -> bool:
    """Return whether the result of an operation shares the memory of an argument that it does not write."""
    return not target._schema.is_mutable and any(own.alias_info for own in target._schema.returns)
