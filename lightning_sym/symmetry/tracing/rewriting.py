"""Rewrites captured networks: puts operations in the place of others, and keeps all that is known of the graph true."""

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

from lightning_sym.symmetry.tracing.capture import DEMAND, Capture, operation_name, without_log
from lightning_sym.symmetry.tracing.nodes import between, memories_of, value_of, written_by
from lightning_sym.symmetry.tracing.recurrent import decompositions

# Returns what stands for an operation, if it is of the spelling that this rewrites; None if it is not.
Rewrite = Callable[["Rewriter", fx.Node], fx.Node | None]
Made = Literal["constants", "weights", "inputs"]
_MOST = 2**16  # elements of a constant that is computed
_ORDER: tuple[Made, ...] = ("constants", "weights", "inputs")


class Rewriter:
    """Puts operations in the place of others in the graph of a capture, which is changed.

    The rewriter leaves alone operations for which a user has a rule, and those that write into memory: `functional.py`
    left only those for which no other operation can stand.

    Args:
        capture: The network.
        kept: The operations, as ``aten::linear``, that are neither replaced nor put anywhere.

    Attributes:
        graph: Its graph.
        at: The operation at hand, before which others are put.
        rule: Which rule puts them, for messages.
    """

    def __init__(self, capture: Capture, kept: Collection[str] = ()) -> None:
        self.capture, self.graph, self.kept = capture, capture.graph, kept
        self.at: fx.Node = next(iter(capture.graph.nodes))
        self.rule = "at hand"
        self._marked = {mark.node for mark in capture.marks}
        self._made: dict[fx.Node, Made] = {}
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

    # What is known of a node.

    def name(self, node: Any) -> str:
        """Return the name of an operation that may be replaced, without the mark of writing in place; else nothing."""
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return ""
        if self.is_kept(node.target) or written_by(node):
            return ""
        return operation_name(node.target).removesuffix("_")

    def is_kept(self, target: Any) -> bool:
        """Whether a user has a rule for an operation."""
        schema = getattr(target, "_schema", None)
        return schema is not None and schema.name.removesuffix("_") in self.kept

    def shape(self, node: Any) -> tuple[int, ...]:
        """Return the shape of the tensor that a node makes; a number has none.

        Raises:
            NoTensorError: If it makes something else.
        """
        if not isinstance(node, fx.Node):
            return ()
        return tuple(_tensor(node).shape)

    def is_marked(self, node: fx.Node) -> bool:
        """Whether a node is by what a value of the network is known."""
        return node in self._marked

    def constant(self, item: Any) -> Tensor | None:
        """Return the value of what is made of numbers alone, in float64 if it is one; None if that is not known."""
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
        """Return the number that a constant is everywhere; None if it is several, or not known."""
        value = self.constant(item)
        if value is None or not value.numel() or value.is_complex():
            return None
        first = value.reshape(-1)[0]
        return float(first) if bool((value == first).all()) else None

    def made_of(self, node: Any) -> Made:
        """Return what a node is made of: of nothing but constants, of weights besides, or of the network's inputs."""
        return self._made[node] if isinstance(node, fx.Node) else "constants"

    def _learn(self, node: fx.Node) -> None:
        """Note what a node is made of, all before it being known."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            floating = isinstance(value, Tensor) and value.is_floating_point()
            known = "constant" in node.meta or not floating
            self._made[node] = "inputs" if node not in self.capture.states else "constants" if known else "weights"
        else:
            parts = [self._made[given] for given in node.all_input_nodes]
            self._made[node] = max(parts, default="constants", key=_ORDER.index)

    def only_for(self, node: Any, user: fx.Node) -> bool:
        """Whether a node is an operation that one other reads, at one place, and nobody can name."""
        if not self.name(node) or node in self._marked or list(node.users) != [user]:
            return False
        return sum(one is node for one in pytree.tree_leaves((user.args, user.kwargs))) == 1

    def leaves(self, node: fx.Node, names: Collection[str]) -> tuple[list[Any], list[fx.Node]]:
        """Return what nested operations combine, two at a time, and what reads each of these values.

        Args:
            node: The last of the operations.
            names: Their names; only the last one is read by others.
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
        """Put an operation before the one at hand, in its module.

        Args:
            target: Such as ``torch.ops.aten.linear.default``.
            args: Its arguments, tensors as nodes.
            kwargs: Its keywords.

        Raises:
            NoSpellingError: If a user has a rule for it, or it does not take these arguments (of mixed precision).
        """
        if self.is_kept(target):
            raise NoSpellingError
        return self._put(target, args, kwargs)

    def demand(self, values: Sequence[fx.Node], shape: Sequence[int]) -> fx.Node:
        """Put a demand on values before the operation at hand; what comes out has a shape."""
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
        """Put the operations of a function of tensors before the one at hand.

        Args:
            function: Takes tensors, and returns a tensor or several.
            args: Its arguments, tensors as nodes.
            kwargs: Its keywords.

        Returns:
            What it returns, with nodes in the place of tensors.

        Raises:
            ValueError: If it cannot be followed, or reads a parameter that is none of its arguments.
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
        """Return the operations of a function, and the form of its results; layers that are alike are followed once.

        Args:
            function: See `write`.
            leaves: All that its arguments hold, tensors as nodes.
            form: How these make its arguments.
        """
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        held = [self._without_data(_held(node)) for node in nodes]
        # A function that holds others may do something else the next time.
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

        with torch.no_grad(), self._mode, without_log():  # the error says what the log would
            try:
                # Of an operation what torch makes of it, of a function the operations that it calls.
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
        """Return a node that holds a constant, before the one at hand."""
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
        """Return what an operation makes, without data."""
        args, kwargs = fx.map_arg((args, kwargs), _held)
        with torch.no_grad(), self._mode:
            given, named = pytree.tree_map_only(Tensor, self._without_data, (args, kwargs))
            return pytree.tree_map_only(Tensor, Tensor.detach, target(*given, **named))

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let a node stand for another one, of the same shape and type, which goes with all that only it read.

        Args:
            old: What goes.
            new: Made by `insert`, or a node before.

        Raises:
            ValueError: If they differ in shape or type.
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
        """Let a view show the memory that its argument has now, and all views of it."""
        before = memories_of(node)
        if node.op != "call_function":
            return
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default  # its argument may lie otherwise now
        node.meta["val"] = self.computed(node.target, node.args, node.kwargs)
        for user in node.users:
            if memories_of(user) & before:
                self._renew(user)

    def erase(self, node: fx.Node) -> None:
        """Take out a node that nobody reads, and what only it read."""
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
        """Whether nobody can tell that a node is there."""
        return self._is_pure(node) and not node.users and not self._is_named(node)

    def _is_named(self, node: fx.Node) -> bool:
        """Whether a node keeps its name: what weights alone make loses it where nothing else reads it."""
        return node in self._marked and self.made_of(node) != "weights"

    @staticmethod
    def _is_pure(node: fx.Node) -> bool:
        """Whether a node does nothing but make its result."""
        operation = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        operation = operation and node.target is not DEMAND
        return node.op == "get_attr" or (node.op == "call_function" and operation and not written_by(node))

    def erase_unread(self) -> None:
        """Take out all operations whose results nobody reads, but not those by which alone a tensor is known."""
        alive: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            read = any(user in alive for user in node.users) or self._is_named(node)
            if read or (node.op == "call_function" and not self._is_pure(node)) or node.op == "output":
                alive.add(node)
        lonely = {node for node in self.capture.states if node not in alive}  # of a head whose output is left out, say
        for node in self.graph.nodes:
            if node not in alive and not lonely.isdisjoint(node.all_input_nodes):
                lonely.add(node)
        for node in reversed(list(self.graph.nodes)):
            lonely |= {given for given in node.all_input_nodes if node in lonely}
        for node in reversed(list(self.graph.nodes)):
            if node not in lonely and not node._erased and self._is_dead(node):
                self.erase(node)

    def share(self) -> None:
        """Let one operation stand for all that do the same with the same tensors."""
        known: dict[Any, fx.Node] = {}
        self._share_constants()
        for node in list(self.graph.nodes):
            target = node.target
            if not self.name(node) or not isinstance(node.meta.get("val"), Tensor):
                continue
            if isinstance(target, torch._ops.OpOverload) and (
                target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
            ):
                continue
            leaves, form = pytree.tree_flatten((node.args, node.kwargs))
            first = known.setdefault((target, form, *((type(leaf), leaf) for leaf in leaves)), node)
            if first is not node:
                self.replace(node, first)

    def _share_constants(self) -> None:
        """Let one constant stand for all that hold the same numbers."""
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
        """Rewrite all operations once, in order, by the name of each, as long as there is something to rewrite in it.

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
                    # What was put in may itself be of another spelling.
                    following = next((one for one in put_in if not one._erased), following)
                    self.replace(node, new)
                    changes += 1
            node = following
        return changes

    def rewrite_from_the_end(self, rule: Callable[[fx.Node], fx.Node | None]) -> int:
        """Go through the graph from its end, so that the largest parts of it are rewritten first.

        Args:
            rule: Puts something in the place of the operation at hand and all that only it reads; returns the node at
                which to go on, None if it rewrites nothing.

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
    """An operation that was to be put in does not take its arguments, or a user has a rule for it."""


class NoTensorError(NoSpellingError, KeyError):
    """A node that makes a list, or no tensor at all, stands where a tensor is needed."""


def _kind(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    tensor = _tensor(node)
    return tensor.shape, tensor.dtype


def _held(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return getattr(node.graph.owning_module, str(node.target)) if value is None and node.op == "get_attr" else value


def _tensor(node: fx.Node) -> Tensor:
    """Return the tensor without data that a node makes.

    Raises:
        NoTensorError: If it makes several, or none.
    """
    value = _held(node)
    if not isinstance(value, Tensor):
        raise NoTensorError(f"{node} makes no tensor")
    return value
