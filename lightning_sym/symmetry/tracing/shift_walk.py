"""Follows what is added to biases and positions through a network, operation by operation.

See docs/theory/intertwiners.md, 3.6.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.invisible import (
    MOVEMENTS,
    PASSES,
    SOFTMAX,
    TRANSPOSES,
    Backwards,
    argument,
    centred_from,
    followed,
    moved,
    name_of,
    reduced,
    shape_of,
    shared_memory,
)
from lightning_sym.symmetry.tracing.shift_equations import Rows, Shifts, plain
from lightning_sym.symmetry.tracing.shifts import Shift, Shown
from lightning_sym.symmetry.tracing.tilts import Normed

_FACTOR = 1e4  # by which shifts may grow or shrink at once
_PRODUCTS = ("mul", "div")
_MOST = 2**20  # entries of a parameter of several axes that are told apart


def find_shifts(
    captures: Sequence[Capture],
    tensors: Mapping[str, Tensor],
    constants: Collection[str],
    *,
    keep: Collection[str] = (),
    outputs: bool = False,
) -> tuple[list[Shift], dict[str, Shown], dict[tuple[str | None, str], Normed]]:
    """Return what may be added to a network's tensors, what that does to its named values, and what reads layer norms.

    Args:
        captures: The network, captured on one example or several.
        tensors: Its parameters and buffers by name.
        constants: Those that are in no state dict.
        keep: Weights whose rows keep their mean.
        outputs: Whether a softmax reads the outputs along their last axis, which does not see what they have in common.
    """
    shifts = Shifts(tensors, constants, outputs=outputs)
    for capture in captures:
        Walk(shifts, capture).run()
    for name in keep:
        shifts.writers.pop(name, None)
    return *shifts.found(), shifts.alone()


class _Reading(NamedTuple):
    """What a linear layer does: its weight, over which axis it sums, what enters it, and its bias."""

    weight: str
    axis: int
    entering: Any
    bias: Any


class Walk:
    """Follows what is added to biases and positions forwards through one capture."""

    def __init__(self, shifts: Shifts, capture: Capture) -> None:
        self.shifts, self.capture, self.unknowns = shifts, capture, shifts.unknowns
        self.unsafe = shared_memory(capture.graph)
        self.backwards = Backwards(capture, shifts.tensors, outputs=shifts.outputs, unsafe=self.unsafe)
        self.numbers: dict[fx.Node, Any] = {}  # what is added to the value of a node, before it is absorbed
        self.changed: set[fx.Node] = set()  # values that change by something that depends on the input
        self.summing: dict[fx.Node, int] = {}  # axes along which a value sums to one
        self.normed: dict[fx.Node, tuple[str | None, str | None]] = {}  # gain and bias of the norm right before
        self.turned: dict[fx.Node, str] = {}  # transposed matrices

    def run(self) -> None:
        """Go through all operations, in order."""
        shifts, capture = self.shifts, self.capture
        for node, name in capture.states.items():
            if name in shifts.tensors and node.users:
                own = self.backwards(node)
                own = {} if own is None else own
                before = shifts.writers.get(name)
                shifts.writers[name] = own if before is None else {a: g for a, g in own.items() if before.get(a) == g}
        for node in capture.graph.nodes:
            if node.op == "output":
                self._see(node)
            elif node.op == "call_function":
                for given in node.all_input_nodes:
                    writes = bool(self.backwards(given)) and given in capture.states
                    if (
                        (writes or given in self.changed)
                        and self.backwards.passed(node, given)
                        and self.backwards(node)
                    ):
                        self.changed.add(node)
                if node in self.unsafe:
                    self._see(node)
                else:
                    self.numbers[node] = self._operation(node)
        for node, name in capture.states.items():
            if name in shifts.tensors:
                self._read_as_weight(node, name)
        self._norms()
        for mark in capture.marks:
            numbers = self.numbers.get(mark.node)
            if isinstance(numbers, Tensor):
                rank = len(shape_of(mark.node) or ())
                numbers = numbers.reshape(*[1] * (rank - numbers.ndim), *numbers.shape)
            if not isinstance(numbers, list):
                shifts.values.setdefault(mark.name, (numbers, mark.node in self.changed))

    # Values.

    def _at(self, node: Any) -> Tensor | None:
        """Return what is added to a value, as far as something behind it may see it."""
        if not isinstance(node, fx.Node):
            return None
        numbers = self.unknowns.living(self._raw(node))
        if numbers is None or self._absorbed(node, numbers):
            return None
        return numbers

    def _raw(self, node: fx.Node) -> Tensor | None:
        name = self.capture.states.get(node)
        if node in self.turned:
            base: Any = node.args[0]
            numbers = self._raw(base)
            return None if numbers is None else plain(moved(node, numbers.expand(shape_of(base) or ())))
        if name is None:
            found = self.numbers.get(node)
            return found if isinstance(found, Tensor) else None
        if name not in self.shifts.tensors or not node.users:
            return None
        self.shifts.others.add(name)
        return self.shifts.source(name, axes=self._whole_axes(node, name))

    def _whole_axes(self, node: fx.Node, name: str) -> set[int]:
        """Return along which axes of a tensor everything is read; of others, a longer input may read more."""
        shape = tuple(self.shifts.tensors[name].shape)
        size, axes = math.prod(shape), set(range(len(shape)))
        if size > _MOST:
            return (
                axes - {0} if len(shape) > 1 and not any(name_of(user) in MOVEMENTS for user in node.users) else set()
            )
        if name not in self.shifts.reached:
            self.shifts.reached[name] = torch.zeros(size, dtype=torch.bool)
        reached = self.shifts.reached[name]
        self._reach(node, torch.arange(size).reshape(shape), reached)
        whole = reached.reshape(shape)
        return {axis for axis in axes if bool((whole == whole.narrow(axis, 0, 1)).all())}

    def _reach(self, node: fx.Node, elements: Any, reached: Tensor) -> None:
        """Mark the elements of a tensor that an operation reads that does not only move them."""
        for user in node.users:
            if user.target is operator.getitem and isinstance(elements, (list, tuple)):
                self._reach(user, elements[user.args[1]], reached)  # type: ignore[index]
            elif name_of(user) in MOVEMENTS and user not in self.unsafe and isinstance(elements, Tensor):
                if (parts := moved(user, elements)) is not None:
                    self._reach(user, parts, reached)
                else:
                    reached[elements.reshape(-1)] = True
            else:
                for part in elements if isinstance(elements, (list, tuple)) else [elements]:
                    reached[part.reshape(-1)] = True

    def _absorbed(self, node: fx.Node, numbers: Tensor) -> bool:
        invisible, shape = self.backwards(node), shape_of(node) or ()
        if invisible is None:
            return True
        offset = len(shape) - numbers.ndim
        for axes, gains in invisible.items():
            if not gains and all(axis < offset or numbers.shape[axis - offset] == 1 for axis in axes):
                self.changed |= {user for user in node.users if self.backwards(user) and user.op != "output"}
                return True
        return False

    def _see(self, node: fx.Node) -> None:
        """An operation sees all of its arguments as they are: nothing may be added to them."""
        for given in node.all_input_nodes:
            self._fix(given)

    def _fix(self, node: Any) -> None:
        if not isinstance(node, fx.Node):
            return
        name = self.capture.states.get(node, self.turned.get(node))
        if name is not None:
            self.shifts.others.add(name)
            self.shifts.lose(name)
            return
        found = self.numbers.get(node)
        for numbers in found if isinstance(found, list) else [self._at(node)]:
            if numbers is not None:
                self.unknowns.vanish(numbers)

    # Operations.

    def _operation(self, node: fx.Node) -> Any:
        name = name_of(node)
        self._remember(node, name)
        if name == "getitem":
            found = self.numbers.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(found, list):
                return found[node.args[1]]  # type: ignore[index]
            return None
        rule = getattr(self, f"_{_RULES.get(name, '')}", None)
        if name in PASSES and isinstance(node.args[0], fx.Node):
            rule = self._pass
        elif name in MOVEMENTS and isinstance(node.args[0], fx.Node):
            rule = self._move
        if rule is None:
            return self._see(node)
        return rule(node, name)

    def _remember(self, node: fx.Node, name: str) -> None:
        """Note what is known of a value besides what is added to it."""
        first = node.args[0] if node.args else None
        if name in SOFTMAX and "log" not in name:
            axis: Any = node.args[1]
            self.summing[node] = axis % len(shape_of(node) or (1,))
        elif name in PASSES - {"neg"} and isinstance(first, fx.Node):
            floating = node.meta["val"].is_floating_point() if shape_of(node) is not None else False
            if first in self.summing and floating:
                self.summing[node] = self.summing[first]
            if first in self.normed and floating:
                self.normed[node] = self.normed[first]
        elif name in MOVEMENTS and isinstance(first, fx.Node):
            before, after = shape_of(first) or (), shape_of(node) or ()
            if before and after and _keeps_the_last_axis(node, before, after) and first in self.normed:
                self.normed[node] = self.normed[first]
            if first in self.summing and (where := followed(node, before, self.summing[first])) is not None:
                self.summing[node] = where
            if name in TRANSPOSES and self.capture.states.get(first) in self.shifts.tensors and len(before) == 2:
                self.turned[node] = self.capture.states[first]
        elif name == "mean" and first in self.normed:
            rank = len(shape_of(first) or ())
            if rank - 1 not in reduced(node, rank):
                self.normed[node] = self.normed[first]  # type: ignore[index]
        elif name == "matmul" and len(node.args) > 1 and node.args[1] in self.normed:
            # Means with weights: what sums to zero, and a constant, stay what they are.
            if self.summing.get(first) == len(shape_of(first) or ()) - 1:  # type: ignore[arg-type]
                self.normed[node] = self.normed[node.args[1]]  # type: ignore[index]
        elif centred_from(node) is not None:
            rank = len(shape_of(node) or ())
            if reduced(node.args[1], rank) == {rank - 1}:  # type: ignore[arg-type]
                self.normed[node] = None, None
        elif name in _PRODUCTS or name == "add":
            self._remember_gains(node, name)
        elif name == "layer_norm" and len(node.args[1]) == 1:  # type: ignore[arg-type]
            own = [argument(node, 2, "weight"), argument(node, 3, "bias")]
            names = [self.capture.states.get(part) if isinstance(part, fx.Node) else None for part in own]
            if all(part is None or named in self.shifts.tensors for part, named in zip(own, names, strict=True)):
                self.normed[node] = (names[0], names[1])

    def _remember_gains(self, node: fx.Node, name: str) -> None:
        """Note the gain and the bias of a layer norm that is written by hand."""
        given: list[Any] = [*node.args, None, None]
        value, other = given[:2] if given[0] in self.normed else given[1::-1]
        if value not in self.normed or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode"):
            return
        (gain, offset), shape = self.normed[value], shape_of(node) or ()
        if offset is not None or shape != shape_of(value) or other in self.normed:
            return
        own = self.capture.states.get(other) if isinstance(other, fx.Node) else None
        vector = own in self.shifts.tensors and shape_of(other) == shape[-1:]
        if name == "add":
            if vector:
                self.normed[node] = gain, own
        elif isinstance(other, (int, float)) or (isinstance(other, fx.Node) and (shape_of(other) or (1,))[-1] == 1):
            if name == "mul" or value is node.args[0]:
                self.normed[node] = gain, None
        elif vector and gain is None and name == "mul":
            self.normed[node] = own, None

    def _pass(self, node: fx.Node, name: str) -> Any:
        if shape_of(node) is None or not node.meta["val"].is_floating_point():
            return self._see(node)
        numbers = self._at(node.args[0])
        return self._scaled(numbers, -1.0) if name == "neg" else numbers

    def _scaled(self, numbers: Tensor | None, factor: float) -> Tensor | None:
        if numbers is None or factor == 1:
            return numbers
        return self.unknowns.combined((numbers, factor))

    def _move(self, node: fx.Node, name: str) -> Any:
        first = node.args[0]
        count = node.meta["val"] if isinstance(node.meta.get("val"), (list, tuple)) else None
        nothing = None if count is None else [None] * len(count)
        if node in self.turned:
            return nothing
        numbers, shape = self._at(first), shape_of(first)
        if numbers is None or shape is None:
            return nothing
        result = moved(node, numbers.expand(shape))
        if result is None:
            self._see(node)
            return nothing
        return [plain(part) for part in result] if count is not None else plain(result)

    def _sum(self, node: fx.Node, name: str) -> Any:
        alpha: Any = node.kwargs.get("alpha", 1)
        factors = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
        if not isinstance(alpha, (int, float)) or not node.meta["val"].is_floating_point():
            return self._see(node)
        terms = [
            (numbers, float(by))
            for given, by in zip(node.args[:2], factors, strict=True)
            if (numbers := self._at(given)) is not None
        ]
        if not terms:
            return None
        if len(terms) == 1:
            return self._scaled(*terms[0])
        return plain(self.unknowns.combined(*terms))

    def _product(self, node: fx.Node, name: str) -> Any:
        one, two = node.args[:2]
        quotient = name != "mul"
        if node.kwargs.get("rounding_mode") or isinstance(one, fx.Node) == isinstance(two, fx.Node):
            return self._see(node)
        value, factor = (one, two) if isinstance(one, fx.Node) else (two, one)
        if not isinstance(factor, (int, float)) or (quotient and value is two):
            return self._see(node)
        if not 1 / _FACTOR <= abs(factor) <= _FACTOR:  # equations hold up to rounding, in which it would be lost
            return self._see(node)
        return self._scaled(self._at(value), 1 / factor if quotient else float(factor))

    def _weight(self, node: Any) -> tuple[str, bool] | None:
        """Return which matrix a node is, and whether it is transposed."""
        if not isinstance(node, fx.Node):
            return None
        name = self.capture.states.get(node)
        if name in self.shifts.tensors and node not in self.unsafe:
            return name, False
        return (self.turned[node], True) if node in self.turned and node not in self.unsafe else None

    def _layer(self, node: fx.Node, entering: Any, weight: Any, bias: Any, *, channel: int) -> Any:
        """A linear layer: what enters it is taken off by its bias, whose own shift comes out of it.

        Args:
            node: The operation.
            entering: What it takes.
            weight: Its weight.
            bias: Its bias.
            channel: The axis of its channels.
        """
        found = self._weight(weight)
        name = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
        if found is None or (isinstance(bias, fx.Node) and name not in self.shifts.tensors):
            return self._see(node)
        numbers, rank = self._at(entering), len(shape_of(entering) or ())
        if numbers is not None:
            numbers = plain(numbers)
        if numbers is not None:
            at = channel % rank - (rank - numbers.ndim)
            if any(size > 1 and axis != at for axis, size in enumerate(numbers.shape)):
                self.unknowns.vanish(numbers)
                numbers = None
        axis = 1 - int(found[1])
        key = (name, found[0], axis, 1 - axis)
        self.shifts.layers.setdefault(key, []).append(None if numbers is None else numbers.reshape(-1))
        after = len(shape_of(node) or ()) - channel % rank - 1
        if name is None:
            return self._rows(entering, found[0], axis)
        own = self.shifts.source(name)
        assert own is not None
        return self.unknowns.living(own.reshape(-1, *[1] * after))

    def _rows(self, entering: Any, weight: str, axis: int) -> Tensor | None:
        """Return what rows that read a layer norm add to what a layer without bias puts out."""
        gain, offset = self.normed.get(entering, (None, None))
        if offset is None or len(self.shifts.tensors[weight].shape) != 2:
            return None
        if weight not in self.shifts.rows:
            numbers = self.unknowns.fresh((self.shifts.tensors[weight].shape[1 - axis],))
            self.shifts.rows[weight] = Rows(numbers, (gain, offset), axis)
        elif self.shifts.rows[weight][1:] != ((gain, offset), axis):
            self.unknowns.vanish(self.shifts.rows[weight].numbers)
        return self.unknowns.living(self.shifts.rows[weight].numbers)

    def _linear(self, node: fx.Node, name: str) -> Any:
        bias = argument(node, 2, "bias")
        return self._layer(node, node.args[0], node.args[1], bias, channel=-1)

    def _convolution(self, node: fx.Node, name: str) -> Any:
        entering, weight = node.args[:2]
        bias, padding, groups = (
            argument(node, 2, "bias"),
            argument(node, 4, "padding", 0),
            argument(node, 6, "groups", 1),
        )
        sizes = [padding] if isinstance(padding, int) else list(padding) if not isinstance(padding, str) else [1]
        if any(sizes) or groups != 1:
            self._fix(entering)
        if groups != 1:
            if isinstance(weight, fx.Node) and weight not in self.capture.states:  # one that was moved about is a value
                self._fix(weight)
            own = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
            if own not in self.shifts.tensors:
                self._fix(bias)
            else:
                self.shifts.others.add(own)
                source = self.shifts.source(own)
                rank = len(shape_of(node) or ())
                assert source is not None
                return self.unknowns.living(source.reshape(-1, *[1] * (int(name[4]) if rank else 0)))
            return None
        count = int(name[4])
        return self._layer(node, entering, weight, bias, channel=-count - 1)

    def _matmul(self, node: fx.Node, name: str) -> Any:
        one, two = node.args[:2]
        rank = len(shape_of(two) or ())
        if self._weight(two) is not None:
            if (entering := self._at(one)) is not None:
                self.unknowns.vanish(entering)
            found = self._weight(two)
            assert found is not None
            axis = int(found[1])
            self.shifts.layers.setdefault((None, found[0], axis, 1 - axis), []).append(None)
            return self._rows(one, found[0], axis)
        numbers = None if two in self.capture.states else self._at(two)
        if numbers is None:
            self._see(node)
            return None
        last = len(shape_of(one) or ()) - 1
        if self._at(one) is not None or self.summing.get(one) != last or rank < 2:  # type: ignore[arg-type]
            return self._see(node)
        if numbers.ndim >= 2 and numbers.shape[-2] > 1:
            return self._see(node)
        return numbers

    def _attention(self, node: fx.Node, name: str) -> Any:
        query, key, value = node.args[:3]
        for given in (query, key, argument(node, 3, "attn_mask")):
            self._fix(given)
        numbers = self._at(value)
        if numbers is None:
            return None
        if numbers.ndim >= 2 and numbers.shape[-2] > 1:
            self._fix(value)
            return None
        heads, more = (shape_of(value) or ())[-3:-2], (shape_of(query) or ())[-3:-2]
        if heads != more and numbers.ndim >= 3 and numbers.shape[-3] > 1:
            numbers = numbers.repeat_interleave(more[0] // heads[0], -3)
        return numbers

    def _embedding(self, node: fx.Node, name: str) -> Any:
        weight = node.args[0]
        own = self.capture.states.get(weight)  # type: ignore[arg-type]
        if own not in self.shifts.tensors:
            return self._see(node)
        numbers = self.shifts.source(own, axes={1})
        rank = len(shape_of(node) or ())
        assert numbers is not None
        return self.unknowns.living(numbers.reshape(*[1] * (rank - 1), -1))

    def _norm(self, node: fx.Node, name: str) -> Any:
        """Layer norm, group norm, instance norm: their own bias is added to what comes out."""
        if name == "instance_norm" and not node.args[5]:  # by running statistics
            return self._batch_norm(node, name)
        places = {"layer_norm": (2, 3), "group_norm": (2, 3), "instance_norm": (1, 2)}[name]
        gain, bias = argument(node, places[0], "weight"), argument(node, places[1], "bias")
        alike = name == "group_norm" and self._alike_in_groups(node.args[0], int(node.args[1]))  # type: ignore[arg-type]
        for given in node.all_input_nodes:
            if given is not bias and not (alike and given is node.args[0]):
                self._fix(given)
        own = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
        if own not in self.shifts.tensors or bias is gain:
            self._fix(bias)
            return None
        self.shifts.others.add(own)
        numbers = self.shifts.source(own)
        assert numbers is not None
        after = 0 if name == "layer_norm" else len(shape_of(node) or ()) - 2
        return self.unknowns.living(numbers.reshape(*numbers.shape, *[1] * after))

    def _alike_in_groups(self, value: Any, groups: int) -> bool:
        """Demand that what is added to a value is the same in each group of channels, if it depends on these only."""
        numbers = self._at(value)
        numbers = None if numbers is None else plain(numbers)
        if numbers is None:
            return False
        at = 1 - (len(shape_of(value) or ()) - numbers.ndim)
        if any(size > 1 and axis != at for axis, size in enumerate(numbers.shape)):
            return False
        if numbers.numel() > 1:
            parts = numbers.reshape(groups, -1)
            self.unknowns.equate(parts, parts[:, :1])
        return True

    def _batch_norm(self, node: fx.Node, name: str) -> Any:
        value, gain, bias, mean, variance = node.args[:5]
        own, running = (self.capture.states.get(n) if isinstance(n, fx.Node) else None for n in (bias, mean))
        self._fix(gain)
        self._fix(variance)
        numbers = self._at(value)
        rank = len(shape_of(value) or ())
        if node.args[5] or running not in self.shifts.tensors:
            self._fix(value)
            self._fix(mean)
        else:
            source = self.shifts.source(running)
            assert source is not None
            self.shifts.others.add(running)
            if numbers is not None:
                numbers = plain(numbers)
            at = None if numbers is None else 1 - (rank - numbers.ndim)
            if numbers is not None and any(size > 1 and axis != at for axis, size in enumerate(numbers.shape)):
                self.unknowns.vanish(numbers)
                numbers = None
            self.unknowns.equate(self.unknowns.living(source), None if numbers is None else numbers.reshape(-1))
        if own not in self.shifts.tensors:
            self._fix(bias)
            return None
        self.shifts.others.add(own)
        added = self.shifts.source(own)
        assert added is not None
        return self.unknowns.living(added.reshape(-1, *[1] * (rank - 2)))

    def _mean(self, node: fx.Node, name: str) -> Any:
        numbers, rank = self._at(node.args[0]), len(shape_of(node.args[0]) or ())
        if numbers is None:
            return None
        gone, keep = reduced(node, rank), len(shape_of(node) or ()) == rank
        numbers = numbers.reshape(*[1] * (rank - numbers.ndim), *numbers.shape)
        if any(numbers.shape[axis] > 1 for axis in gone):
            return self._see(node)
        if not keep:
            numbers = numbers.reshape([size for axis, size in enumerate(numbers.shape) if axis not in gone])
        return numbers

    def _pool(self, node: fx.Node, name: str) -> Any:
        """Means over what is the same everywhere."""
        count = int(next(c for c in name if c in "123"))
        numbers = self._at(node.args[0])
        if numbers is not None and any(size > 1 for size in numbers.shape[max(numbers.ndim - count, 0) :]):
            return self._see(node)
        return numbers

    def _cat(self, node: fx.Node, name: str) -> Any:
        parts: Any = node.args[0]
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, fx.Node) for part in parts):
            return self._see(node)
        shape = shape_of(node) or ()
        axis, found = argument(node, 1, "dim", 0) % len(shape), [self._at(part) for part in parts]
        if all(numbers is None for numbers in found):
            return None
        whole = []
        for part, numbers in zip(parts, found, strict=True):
            size = shape_of(part) or ()
            if len(size) != len(shape):
                continue
            whole.append((torch.zeros(1, dtype=torch.int64) if numbers is None else numbers).expand(size))
        return plain(torch.cat(whole, axis))

    def _read_as_weight(self, node: fx.Node, name: str) -> None:
        """Put down, for a matrix that linear layers use, what its other uses say."""
        normed, uses = set[Any](), self.shifts.uses.setdefault(name, set())
        for user in self._users(node):
            read = self._reading(user)
            matrix = len(self.shifts.tensors[name].shape) == 2
            uses.add(self._use(user, node, read))
            if matrix and user not in self.unsafe and name_of(user) == "embedding" and user.args[0] is node:
                self.shifts.embedded.setdefault(name, []).append(self.backwards.asked(user, node))
                continue
            if read is None or read.weight != name or user in self.unsafe or not matrix:
                if read is not None and read.weight == name and name in self.shifts.sources:
                    self.shifts.lose(name)
                normed.add(None)
                continue
            source = self.shifts.sources.get(name)
            if source is not None and source.shape[1 - read.axis] != 1:
                self.shifts.lose(name)
            elif source is not None and not self._same_for_all_rows(user):
                self.shifts.read.add(name)
            own = self.capture.states.get(read.bias) if isinstance(read.bias, fx.Node) else None
            gain_and_offset = self.normed.get(read.entering) if isinstance(read.entering, fx.Node) else None
            # A layer norm's bias makes rows add a constant, which the layer's own bias has to take off.
            needs = gain_and_offset is not None and gain_and_offset[1] is not None
            if gain_and_offset is None or (needs and own not in self.shifts.tensors):
                normed.add(None)
                continue
            if (read.bias is not None and own is None) or (needs and self._is_seen_elsewhere(read.bias, name)):
                normed.add(None)
                continue
            normed.add((own if needs else None, *gain_and_offset, read.axis))
        self.shifts.readers[name] = self.shifts.readers.get(name, set()) | normed

    def _use(self, user: fx.Node, node: fx.Node, read: "_Reading | None") -> tuple[str | None, str | None] | None:
        """Return of which layer norm a tensor is the bias, or which one it reads as a weight, if it is nothing else."""
        offset = self.normed.get(user, (None, None))[1]
        if offset is not None and offset == self.capture.states.get(node) and name_of(user) in ("layer_norm", "add"):
            given = (*user.args, *user.kwargs.values())
            return self.normed.get(user) if sum(one is node for one in given) == 1 else None
        if read is None or read.bias is node or not isinstance(read.entering, fx.Node):
            return None
        return self.normed.get(read.entering)

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Return what uses a matrix, transposed or not."""
        users = list(node.users)
        return [user for own in users for user in ([*own.users] if own in self.turned else [own])]

    def _reading(self, user: fx.Node) -> "_Reading | None":
        """Return what a linear layer does, if its weight is a matrix of the network."""
        found = self._weight(user.args[1]) if name_of(user) == "linear" else None
        if found is None:
            return None
        return _Reading(found[0], 1 - int(found[1]), user.args[0], argument(user, 2, "bias"))

    def _norms(self) -> None:
        """Put down what reads the layer norms of each gain and bias."""
        nodes: dict[tuple[str | None, str], list[fx.Node]] = {}
        for node, (gain, offset) in self.normed.items():
            if offset is not None:
                nodes.setdefault((gain, offset), []).append(node)
        for (gain, offset), own in nodes.items():
            readers: dict[tuple[str, int], None] = {}
            users = [
                (user, node)
                for node in own
                for user in node.users
                if self.normed.get(user) != (gain, offset) or name_of(user) == "layer_norm"
            ]
            alone = self.unsafe.isdisjoint(own)
            for user, node in users:
                read = self._reading(user)
                if (
                    read is None
                    or read.entering is not node
                    or user in self.unsafe
                    or len(self.shifts.tensors[read.weight].shape) != 2
                ):
                    alone = False
                else:
                    readers[read.weight, read.axis] = None
            found = Normed(readers, alone, {})
            for mark in self.capture.marks:
                if mark.node in own:
                    found.seen[mark.name, len(shape_of(mark.node) or ()) - 1] = None
            before = self.shifts.norms.get((gain, offset))
            self.shifts.norms[gain, offset] = found if before is None else before.met(found)

    def _same_for_all_rows(self, user: fx.Node) -> bool:
        """Whether nobody sees it if the same is added to all channels that a linear layer puts out."""
        rank = len(shape_of(user) or ())
        invisible = self.backwards(user)
        return invisible is None or invisible.get(frozenset({rank - 1})) == ()

    def _is_seen_elsewhere(self, bias: Any, weight: str) -> bool:
        """Whether a bias is anything but that of linear layers of one weight."""
        for user in bias.users:
            found = self._weight(user.args[1]) if name_of(user) == "linear" else None
            if found is None or found[0] != weight or argument(user, 2, "bias") is not bias:
                return True
        return False


def _keeps_the_last_axis(node: fx.Node, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a movement hands the last axis on as it is, whatever it does to the others."""
    name, last = name_of(node), len(before) - 1
    if before[-1] != after[-1]:
        return False
    if name in ("view", "reshape", "_unsafe_view", "expand", "flatten", "mT"):
        return name != "mT"
    rest: Any = node.args[1:]
    if name == "permute":
        return bool(rest) and rest[0][-1] % len(before) == last
    if name in ("select", "slice", "transpose", "swapaxes", "swapdims", "squeeze"):
        axes = rest[:2] if name in ("transpose", "swapaxes", "swapdims") else rest[:1]
        return bool(axes) and all(isinstance(axis, int) and axis % len(before) != last for axis in axes)
    return name == "unsqueeze" and rest[0] not in (-1, last + 1)


_RULES = {
    **dict.fromkeys(("add", "sub", "rsub"), "sum"),
    **dict.fromkeys(_PRODUCTS, "product"),
    "linear": "linear",
    **{f"conv{count}d": "convolution" for count in (1, 2, 3)},
    "matmul": "matmul",
    "scaled_dot_product_attention": "attention",
    "embedding": "embedding",
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm"), "norm"),
    "batch_norm": "batch_norm",
    "mean": "mean",
    **{f"adaptive_avg_pool{count}d": "pool" for count in (1, 2, 3)},
    **{f"max_pool{count}d": "pool" for count in (1, 2, 3)},
    "cat": "cat",
}
