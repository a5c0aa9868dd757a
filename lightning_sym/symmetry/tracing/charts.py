"""Parameters that a network reads as numbers plus the parameter: the sum stands in the graph in their place."""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.nodes import argument, moved
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter
from lightning_sym.symmetry.tracing.sums import summed, terms_of

aten = torch.ops.aten


def factored(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite x + x w as x (1 + w), whatever else is added."""
    terms = terms_of(r, node)
    for at, product in enumerate(terms):
        if r.name(product.node) != "mul" or not product.added or not r.only_for(product.node, product.reader):
            continue
        for place, own in enumerate(terms):
            factors = [given for given in product.node.args[:2] if given is not own.node]
            if place == at or not own.added or len(factors) != 1 or not isinstance(factors[0], fx.Node):
                continue
            if r.shape(own.node) == r.shape(node):
                new = r.insert(aten.mul.Tensor, own.node, r.insert(aten.add.Tensor, factors[0], 1.0))
                return summed(r, new, [term for other, term in enumerate(terms) if other not in (at, place)])
    return None


class _Read(NamedTuple):
    """A node that is ``factor * (w + number)`` of a parameter w; `part` is w as it is cast there."""

    node: fx.Node
    part: fx.Node
    factor: float
    number: float


def read_as_sums(r: Rewriter) -> None:
    """Let a parameter that is read as 1 + w, and in no other way, stand for the sum: what multiplies that scales."""
    for node, name in r.capture.states.items():
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        reads = _reads(r, _Read(node, node, 1.0, 0.0))
        numbers = {read.number for read in reads or ()}
        if reads is None or len(numbers) != 1 or numbers == {0.0} or not all(read.factor for read in reads):
            continue
        for read in reads:
            r.at = read.node
            new = r.insert(aten.neg.default, read.part) if read.factor < 0 else read.part
            new = new if abs(read.factor) == 1 else r.insert(aten.mul.Tensor, new, abs(read.factor))
            r.replace(read.node, new)
        r.capture.charts[name] = numbers.pop()


def _reads(r: Rewriter, here: _Read) -> list[_Read] | None:
    """Return the last of all operations that add numbers to a parameter, or multiply it; None if others read it."""
    found: list[_Read] = []
    seen = False
    for user in here.node.users:
        step = _step(r, here, user)
        if step is None:
            seen = True
        elif (further := _reads(r, step)) is None:
            return None
        else:
            found += further
    if seen and (here.node in r.capture.states or found):
        return None
    return [here] if seen else found


def _step(r: Rewriter, here: _Read, user: fx.Node) -> _Read | None:
    """Return what an operation makes of a multiple of a parameter and a number, if it is one, too."""
    name, (_, part, factor, number) = r.name(user), here
    if any(mark.node is user for mark in r.capture.marks):
        return None
    value, old = user.meta.get("val"), here.node.meta["val"]
    if not name or not isinstance(value, Tensor) or value.shape != old.shape:
        return None
    if name == "neg":
        return _Read(user, part, -factor, number)
    if name in operations(Trait.CAST):
        return _Read(user, user if (factor, number) == (1.0, 0.0) else part, factor, number)
    if name not in ("add", "sub", "rsub", "mul") or value.dtype != old.dtype or argument(user, 2, "alpha", 1) != 1:
        return None
    first = user.args[0] is here.node
    other = _number(r, user.args[1 if first else 0])
    if other is None or not factor:
        return None
    if name == "mul":
        return _Read(user, part, factor * other, number)
    if name == "rsub" or (name == "sub" and not first):
        factor = -factor
    elif name == "sub":
        other = -other
    return _Read(user, part, factor, number + other / factor)


def read_behind_layers(r: Rewriter) -> None:
    """Let the bias of a layer stand for 1 + the bias where parts of what it puts out are read as 1 + v, and only so.

    What multiplies 1 + v then scales these rows of the layer: such are the scales of norms that a condition moves.
    """
    for node in list(r.graph.nodes):
        bias = argument(node, 2, "bias") if r.name(node) == "linear" else None
        name = r.capture.states.get(bias) if isinstance(bias, fx.Node) else None
        if bias is None or name is None or list(bias.users) != [node] or name in r.capture.charts:
            continue
        behind = _Behind(r, r.shape(node)[-1])
        if not behind.is_added_to(node) or not behind.follow(
            node, torch.arange(r.shape(node)[-1]).expand(r.shape(node))
        ):
            continue
        numbers = behind.numbers.nan_to_num().tolist()
        if not any(numbers):
            continue
        # Inside the network nobody may name what is another value now.
        r.capture.marks[:] = [mark for mark in r.capture.marks if mark.node not in behind.passed]
        for reader, value in behind.sums:
            r.at = reader
            negative = behind.is_taken_off(reader, value)
            r.replace(reader, r.insert(aten.neg.default, value) if negative else value)
        r.capture.charts[name] = numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


class _Behind:
    """What is added to the outputs of a layer where they are read.

    Attributes:
        numbers: For each output, the number; not a number where none was seen.
        sums: The operations that add them, and to what.
        passed: The values that hold outputs.
    """

    def __init__(self, r: Rewriter, size: int) -> None:
        self.r, self.numbers = r, torch.full((size,), math.nan, dtype=torch.float64)
        self.sums: list[tuple[fx.Node, fx.Node]] = []
        self.passed: set[fx.Node] = set()

    def is_added_to(self, value: fx.Node) -> bool:
        """Whether any part of a value is read with a number added."""
        left = [value]
        for own in left:
            for user in own.users:
                if user.target is operator.getitem or self._moves(user, own):
                    left.append(user)
                elif self._added(user, own):
                    return True
        return False

    def follow(self, value: fx.Node, places: Any) -> bool:
        """Look at all that reads a value; return False if not every output is read with one number.

        Args:
            value: The value, or a list of values.
            places: Which output each of its elements is.
        """
        self.passed.add(value)
        for user in value.users:
            if isinstance(places, (list, tuple)):
                item: Any = user.args[1] if user.target is operator.getitem else None
                if item is None or not self.follow(user, places[item]):
                    return False
            elif self._moves(user, value):
                if (after := moved(user, places)) is None or not self.follow(user, after):
                    return False
            elif not self._read(user, value, places):
                return False
        return True

    def _moves(self, user: fx.Node, value: fx.Node) -> bool:
        return self.r.name(user) in operations(Trait.MOVE) and user.all_input_nodes == [value] and user.args[0] is value

    def _read(self, user: fx.Node, value: fx.Node, places: Tensor) -> bool:
        number = self._added(user, value)
        if number:
            self.sums.append((user, value))
        at: Tensor = torch.unique(places)  # type: ignore[no-untyped-call]
        known = self.numbers[at]
        self.numbers[at] = number
        return bool((known.isnan() | (known == number)).all())

    def _added(self, user: fx.Node, value: fx.Node) -> float:
        name = self.r.name(user)
        if name not in ("add", "sub", "rsub") or user.kwargs or len(user.args) != 2:
            return 0.0
        others = [given for given in user.args if given is not value]
        number = _number(self.r, others[0]) if len(others) == 1 else None
        one, two = user.meta["val"], value.meta["val"]
        if number is None or one.shape != two.shape or one.dtype != two.dtype:
            return 0.0
        return number if name == "add" else -number

    def is_taken_off(self, user: fx.Node, value: fx.Node) -> bool:
        """Whether an operation takes a value off a number."""
        name = self.r.name(user)
        return name == "rsub" if user.args[0] is value else name == "sub"


def _number(r: Rewriter, item: object) -> float | None:
    """Return the number that is added everywhere."""
    if isinstance(item, fx.Node) and r.name(item) == "full":
        return r.number(item.args[1])
    return r.number(item)


def charts_of(captures: Sequence[Capture]) -> tuple[dict[str, float | tuple[float, ...]], set[str]]:
    """Return what is added to parameters wherever they are read, and those to which not every capture adds the same."""
    charts: dict[str, float | tuple[float, ...]] = {}
    unlike: set[str] = set()
    for name in sorted({name for capture in captures for name in capture.charts}):
        read = {
            capture.charts.get(name, 0.0)
            for capture in captures
            for node, own in capture.states.items()
            if own == name and node.users
        }
        if len(read) == 1:
            charts[name] = read.pop()
        else:
            unlike.add(name)
    return charts, unlike
