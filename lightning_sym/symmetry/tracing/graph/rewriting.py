"""Replace operations of captured networks, and keep all records about the graph consistent."""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.graph.capture import DEMAND, Capture, operation_name, without_log
from lightning_sym.symmetry.tracing.graph.nodes import between, memories_of, value_of, written_by
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.recurrent import decompositions

# Returns the replacement of an operation, or None if this rewrite does not apply.
Rewrite = Callable[["Rewriter", fx.Node], fx.Node | None]
Made = Literal["constants", "weights", "inputs"]
_MOST = 2**16  # elements of a computed constant
_ORDER: tuple[Made, ...] = ("constants", "weights", "inputs")


class Rewriter:
    """Replaces operations in the graph of a capture, in place.

    The rewriter skips operations that have a user's rule, and operations that write into memory. `functional.py` leaves
    only those writes that no other operation can replace.

    Args:
        capture: The network.
        kept: Operations, such as ``aten::linear``, that are neither replaced nor inserted.

    Attributes:
        graph: The network's graph.
        at: The current operation, before which others are inserted.
        rule: The rule that inserts them, for messages.
    """

    def __init__(self, capture: Capture, kept: Collection[str] = ()) -> None:
        self.capture, self.graph, self.kept = capture, capture.graph, kept
        self.at: fx.Node = next(iter(capture.graph.nodes))
        self.rule = "at hand"
        self._marked = {mark.node for mark in capture.marks}
        self._made: dict[fx.Node, Made] = {}
        self._names: dict[Any, tuple[str, bool]] = {}  # by operation, and whether it may write into memory
        self._constants: dict[fx.Node, Tensor | None] = {}
        self._alike: dict[Any, tuple[fx.GraphModule, pytree.TreeSpec]] = {}
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

    # Properties of a node.

    def name(self, node: Any) -> str:
        """Return the name of a replaceable operation without the suffix ``_``; empty for other nodes."""
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return ""
        if (known := self._names.get(node.target)) is None:
            name = "" if self.is_kept(node.target) else operation_name(node.target).removesuffix("_")
            schema = getattr(node.target, "_schema", None)
            known = self._names[node.target] = name, schema is not None and schema.is_mutable
        return "" if known[1] and written_by(node) else known[0]

    def is_kept(self, target: Any) -> bool:
        """Whether a user has a rule for an operation."""
        schema = getattr(target, "_schema", None)
        return schema is not None and schema.name.removesuffix("_") in self.kept

    def shape(self, node: Any) -> tuple[int, ...]:
        """Return the shape of a node's tensor; a number has the shape ().

        Raises:
            NoTensorError: If the node produces no tensor.
        """
        if not isinstance(node, fx.Node):
            return ()
        return tuple(_tensor(node).shape)

    def is_marked(self, node: fx.Node) -> bool:
        """Whether a named value of the network refers to a node."""
        return node in self._marked

    def unmark(self, node: fx.Node) -> None:
        """Remove the names of values that refer to a node."""
        self.capture.marks[:] = [mark for mark in self.capture.marks if mark.node is not node]
        self._marked.discard(node)

    def constant(self, item: Any) -> Tensor | None:
        """Return the value of a constant, a number as float64; None if it is unknown."""
        if not isinstance(item, fx.Node):
            return torch.tensor(item, dtype=torch.float64) if isinstance(item, (int, float)) else None
        if item not in self._constants:
            self._constants[item] = self._constant(item)
        return self._constants[item]

    def _constant(self, item: fx.Node) -> Tensor | None:
        if self.made_of(item) != "constants" or math.prod(self.shape(item)) > _MOST:
            return None
        if item.op == "get_attr" or "constant" in item.meta:
            held: Any = value_of(item)
            return None if held.is_meta else held.detach().to("cpu", copy=True)
        target: Any = item.target
        fixed = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        if (
            not fixed
            or self.is_kept(target)
            or torch.Tag.nondeterministic_seeded in target.tags
            or "empty" in target._schema.name
        ):
            return None
        parts = {node: self.constant(node) for node in item.all_input_nodes}
        if any(part is None for part in parts.values()):
            return None
        args, kwargs = fx.map_arg((item.args, item.kwargs), parts.get)
        result = target(*args, **{**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)
        return result if isinstance(result, Tensor) else None

    def number(self, item: Any) -> float | None:
        """Return the number that all elements of a constant equal; None if they differ or are unknown."""
        value = self.constant(item)
        if value is None or not value.numel() or value.is_complex():
            return None
        first = value.reshape(-1)[0]
        return float(first) if bool((value == first).all()) else None

    def made_of(self, node: Any) -> Made:
        """Return the kind of a node's sources: constants only, weights as well, or the network's inputs."""
        return self._made[node] if isinstance(node, fx.Node) else "constants"

    def _learn(self, node: fx.Node) -> None:
        """Record the sources of a node; those of all earlier nodes are known."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            floating = isinstance(value, Tensor) and value.is_floating_point()
            known = "constant" in node.meta or not floating
            self._made[node] = "inputs" if node not in self.capture.states else "constants" if known else "weights"
        else:
            parts = [self._made[given] for given in node.all_input_nodes]
            self._made[node] = max(parts, default="constants", key=_ORDER.index)

    def only_for(self, node: Any, user: fx.Node) -> bool:
        """Whether an unnamed operation has one reader, which uses it once."""
        if not self.name(node) or node in self._marked or list(node.users) != [user]:
            return False
        return sum(one is node for one in pytree.tree_leaves((user.args, user.kwargs))) == 1

    def leaves(self, node: fx.Node, names: Collection[str]) -> tuple[list[Any], list[fx.Node]]:
        """Return the operands of nested binary operations, and the reader of each operand.

        Args:
            node: The last operation.
            names: The operations' names; only the last operation may have other readers.
        """
        found: list[tuple[Any, fx.Node]] = []
        waiting: list[tuple[Any, fx.Node]] = [(given, node) for given in reversed(node.args[:2])]
        while waiting:
            value, reader = waiting.pop()
            if self.name(value) in names and self.only_for(value, reader) and not value.kwargs:
                waiting += [(given, value) for given in reversed(value.args[:2])]
            else:
                found.append((value, reader))
        return [value for value, _ in found], [reader for _, reader in found]

    # Changes.

    def insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operation before the current one, in the same module.

        Args:
            target: Such as ``torch.ops.aten.linear.default``.
            args: Its arguments, with nodes as tensors.
            kwargs: Its keywords.

        Raises:
            NoSpellingError: If a user has a rule for it, or it rejects these arguments (mixed precision).
        """
        if self.is_kept(target):
            raise NoSpellingError
        return self._put(target, args, kwargs)

    def demand(self, values: Sequence[fx.Node], shape: Sequence[int]) -> fx.Node:
        """Insert a constraint on values before the current operation, with a result of the given shape."""
        return self._put(DEMAND, (list(values), list(shape)), {})

    def _put(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.create_node("call_function", target, args, kwargs)
        try:
            node.meta["val"] = self.computed(target, args, kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            self.graph.erase_node(node)
            raise NoSpellingError from error
        self._learn(node)
        if self.at in self.capture.modules:
            self.capture.modules[node] = self.capture.modules[self.at]
        if "written_for" in self.at.meta:
            node.meta["written_for"] = self.at.meta["written_for"]
        return node

    def write(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Insert the operations of a function of tensors before the current operation.

        Args:
            function: Takes tensors, and returns one or several tensors.
            args: Its arguments, with nodes as tensors.
            kwargs: Its keywords.

        Returns:
            Its results, with nodes as tensors.

        Raises:
            ValueError: If it cannot be traced, or reads a parameter that is not an argument.
        """
        leaves, form = pytree.tree_flatten((args, kwargs))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        written, form_out = self._followed(function, leaves, form)
        made: dict[fx.Node, Any] = {}
        for node in written.graph.nodes:
            if node.op == "placeholder":
                made[node] = nodes[len(made)]
            elif node.op == "get_attr":
                made[node] = self.hold(getattr(written, str(node.target)))
            elif node.op == "output":
                break
            elif node.target is not torch._C._set_grad_enabled:
                made[node] = self._put(node.target, *fx.map_arg((node.args, node.kwargs), made.__getitem__))
        results = fx.map_arg(node.args[0], made.__getitem__)
        return pytree.tree_unflatten(list(results), form_out)

    def _followed(
        self, function: Callable[..., Any], leaves: list[Any], form: pytree.TreeSpec
    ) -> tuple[fx.GraphModule, pytree.TreeSpec]:
        """Return the operations of a function, and the nesting of its results; equal calls are traced once.

        Args:
            function: See `write`.
            leaves: All leaves of its arguments, with nodes as tensors.
            form: The nesting of the arguments.
        """
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        held = [self._without_data(_held(node)) for node in nodes]
        # A closure may compute another function at the next call.
        fixed = getattr(function, "__closure__", ()) is None
        kinds = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, nodes.index(node))
                 for node, t in zip(nodes, held, strict=True)]  # fmt: skip
        rest = [None if isinstance(leaf, fx.Node) else (type(leaf), leaf) for leaf in leaves]
        key = repr((form, kinds, rest)), function
        if fixed and key in self._alike:
            return self._alike[key]
        form_out: list[pytree.TreeSpec] = []

        def run(*tensors: Tensor) -> list[Any]:
            left = iter(tensors)
            own, named = pytree.tree_unflatten(
                [next(left) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], form
            )
            results, spec = pytree.tree_flatten(function(*own, **named))
            form_out.append(spec)
            return results

        with torch.no_grad(), self._mode, without_log():  # the error has the log's message
            try:
                # Decompose an operation as torch does; record the operations that a function calls.
                before = not isinstance(function, torch._ops.OpOverload)
                written = make_fx(run, decompositions(), tracing_mode="real", pre_dispatch=before)(*held)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"a function in the rule {self.rule} cannot be followed ({type(error).__name__}: {reason[:200]}); "
                    "expected operations of torch on its arguments, whose order does not depend on values"
                ) from error
        self._alike[key] = written, form_out[-1]
        return self._alike[key]

    def hold(self, tensor: Tensor) -> fx.Node:
        """Return a node that holds a constant, before the current operation.

        Raises:
            ValueError: If the tensor is a parameter or has no data.
        """
        if isinstance(tensor, (nn.Parameter, FakeTensor)):
            raise ValueError(
                f"a function in the rule {self.rule} reads a parameter that is none of its arguments; expected "
                "trace.parameter(module, name) among them"
            )
        owner: Any = self.graph.owning_module
        number = sum(name.startswith("_rule_constant") for name, _ in owner.named_buffers())
        owner.register_buffer(f"_rule_constant{number}", tensor)
        with self.graph.inserting_before(self.at):
            node = self.graph.get_attr(f"_rule_constant{number}")
        node.meta["val"] = self._without_data(tensor)
        self._learn(node)
        return node

    def computed(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation without data."""
        args, kwargs = fx.map_arg((args, kwargs), _held)
        with torch.no_grad(), self._mode:
            given, named = pytree.tree_map_only(Tensor, self._without_data, (args, kwargs))
            # Without gradients only an argument itself can have one; detaching all takes as long as computing them.
            return pytree.tree_map_only(Tensor, _without_gradient, target(*given, **named))

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace a node by another one of the same shape and dtype; erase it and all nodes that only it read.

        Args:
            old: The node to erase.
            new: An inserted or earlier node.

        Raises:
            ValueError: If they differ in shape or dtype.
        """
        one, two = _tensor(old), _tensor(new)
        if one.shape != two.shape or one.dtype != two.dtype:
            raise ValueError(
                f"{old} of shape {tuple(one.shape)} and {one.dtype} was replaced by {new} of {tuple(two.shape)} and "
                f"{two.dtype}; expected the same shape and type"
            )
        here, there = memories_of(old), memories_of(new)
        users = [user for user in old.users if memories_of(user) & here] if here != there else []
        old.replace_all_uses_with(new)
        for at, mark in enumerate(self.capture.marks if new not in self.capture.states else ()):
            if mark.node is old:
                self.capture.marks[at] = replace(mark, node=new)
                self._marked.add(new)
        self._marked.discard(old)
        self.erase(old)
        for user in users:
            self._renew(user)

    def _renew(self, node: fx.Node) -> None:
        """Recompute the tensor of a view, and of its views, after its argument's memory changed."""
        before = memories_of(node)
        if node.op != "call_function":
            return
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default  # its argument may have another layout now
        node.meta["val"] = self.computed(node.target, node.args, node.kwargs)
        for user in node.users:
            if memories_of(user) & before:
                self._renew(user)

    def erase(self, node: fx.Node) -> None:
        """Erase a node without readers, and all nodes that only it read."""
        before = node.all_input_nodes
        self.capture.marks[:] = [mark for mark in self.capture.marks if mark.node is not node]
        self.capture.modules.pop(node, None)
        self._made.pop(node, None)
        self._constants.pop(node, None)
        self.graph.erase_node(node)
        for given in before:
            if not given._erased and self._is_dead(given):
                self.erase(given)

    def _is_dead(self, node: fx.Node) -> bool:
        """Whether removing a node has no visible effect."""
        return self._is_pure(node) and not node.users and not self._is_named(node)

    def _is_named(self, node: fx.Node) -> bool:
        """Whether a node keeps its name; unread values of weights alone lose it."""
        return node in self._marked and self.made_of(node) != "weights"

    @staticmethod
    def _is_pure(node: fx.Node) -> bool:
        """Whether a node has no effect except its result."""
        operation = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        operation = operation and node.target is not DEMAND
        return node.op == "get_attr" or (node.op == "call_function" and operation and not written_by(node))

    def erase_unread(self) -> None:
        """Erase all operations without readers, except those that alone read a parameter or buffer."""
        alive: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            read = any(user in alive for user in node.users) or self._is_named(node)
            if read or (node.op == "call_function" and not self._is_pure(node)) or node.op == "output":
                alive.add(node)
        lonely = {node for node in self.capture.states if node not in alive}  # of a head without output, for example
        for node in self.graph.nodes:
            if node not in alive and not lonely.isdisjoint(node.all_input_nodes):
                lonely.add(node)
        for node in reversed(list(self.graph.nodes)):
            lonely |= {given for given in node.all_input_nodes if node in lonely}
        for node in reversed(list(self.graph.nodes)):
            if node not in lonely and not node._erased and self._is_dead(node):
                self.erase(node)

    def share(self) -> None:
        """Merge operations that do the same with the same tensors."""
        known: dict[Any, fx.Node] = {}
        self._share_constants()
        for node in list(self.graph.nodes):
            target = node.target
            value, views = node.meta.get("val"), self.name(node) in operations(Trait.MOVE | Trait.PARTS)
            several = isinstance(value, (list, tuple)) and not views
            if not self.name(node) or not (several or isinstance(value, Tensor)):
                continue
            if isinstance(target, torch._ops.OpOverload) and (
                target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
            ):
                continue
            leaves, form = pytree.tree_flatten((node.args, node.kwargs))
            first = known.setdefault((target, form, *((type(leaf), leaf) for leaf in leaves)), node)
            if first is not node and isinstance(value, Tensor):
                self.replace(node, first)
            elif first is not node:
                node.replace_all_uses_with(first)
                self.erase(node)

    def _share_constants(self) -> None:
        """Merge constants with equal elements."""
        known: dict[Any, fx.Node] = {}
        for node in list(self.graph.nodes):
            held = getattr(node.graph.owning_module, str(node.target)) if node.op == "get_attr" else None
            if type(held) is not Tensor or held.is_meta or held.layout != torch.strided or held.numel() > _MOST:
                continue
            key = held.dtype, held.device, tuple(held.shape), tuple(held.reshape(-1).tolist())
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                self.erase(node)

    def rewrite(self, table: Mapping[str, Rewrite]) -> int:
        """Rewrite all operations once, in order, by a table of rewrites by name.

        Returns:
            The number of changes.
        """
        changes = 0
        node = next(iter(self.graph.nodes))
        while node.op != "root":
            following = node.next
            self.at, before = node, node.prev
            if (rule := table.get(self.name(node))) is not None:
                try:
                    new = rule(self, node)
                except NoSpellingError:
                    new = None
                if new is not None and _kind(new) != _kind(node):
                    new = None
                put_in = between(before, node)
                for one in reversed(put_in):
                    if one is not new and not one.users and not one._erased:
                        self.erase(one)
                if new is not None:
                    # An inserted operation may need rewriting itself.
                    following = next((one for one in put_in if not one._erased), following)
                    self.replace(node, new)
                    changes += 1
            node = following
        return changes

    def rewrite_from_the_end(self, rule: Callable[[fx.Node], fx.Node | None]) -> int:
        """Rewrite the graph from its end, so that the largest regions come first.

        Args:
            rule: Replaces the current operation and all nodes that only it reads; returns the next node, or None if it
                does not apply.

        Returns:
            The number of changes.
        """
        changes, node = 0, next(iter(reversed(self.graph.nodes)))
        while node.op != "root":
            following, self.at = node.prev, node
            try:
                new = rule(node) if node.users else None
            except NoSpellingError:
                new = None
            if new is not None:
                changes, following = changes + 1, new
            node = following
        return changes


class NoSpellingError(Exception):
    """An operation to insert rejects its arguments, or a user has a rule for it."""


class NoTensorError(NoSpellingError, KeyError):
    """A node that produces a list, or no tensor, was used as a tensor."""


def _kind(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    tensor = _tensor(node)
    return tensor.shape, tensor.dtype


def _without_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _held(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return getattr(node.graph.owning_module, str(node.target)) if value is None and node.op == "get_attr" else value


def _tensor(node: fx.Node) -> Tensor:
    """Return the tensor without data that a node produces.

    Raises:
        NoTensorError: If it produces several, or none.
    """
    value = _held(node)
    if not isinstance(value, Tensor):
        raise NoTensorError(f"{node} makes no tensor")
    return value
