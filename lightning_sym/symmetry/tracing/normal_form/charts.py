"""Charts: replace a parameter that the network reads as w + n, with a number n, by the sum; exp(w) by a gain."""

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.charts import POSITIVE, Chart, Identity, Onto
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import argument, by_axis, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped
from lightning_sym.symmetry.tracing.normal_form.sums import Term, multiple_of, number_of, summed, terms_of

aten = torch.ops.aten


def factored(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite x + x w, with further terms, as x (1 + w)."""
    terms = terms_of(r, node)
    for at, product in enumerate(terms):
        if r.name(product.node) != "mul" or not product.added or not r.only_for(product.node, product.reader):
            continue
        for place, own in enumerate(terms):
            factors = [given for given in product.node.args[:2] if given is not own.node]
            if place == at or not own.added or len(factors) != 1 or not isinstance(factors[0], fx.Node):
                continue
            if r.shape(product.node) == r.shape(node):
                new = r.insert(aten.mul.Tensor, own.node, r.insert(aten.add.Tensor, factors[0], 1.0))
                return summed(r, new, [term for other, term in enumerate(terms) if other not in (at, place)])
    return None


def read_beside_inputs(r: Rewriter) -> None:
    """Let the weight W of a layer whose input is added to its output, ``x + W x``, represent the identity plus W.

    In a recurrence, which reads W again, input and output have the same units, so that the group would not change.
    """
    for weight, name in r.capture.states.items():
        shown = [own for own in weight.users if r.name(own) in operations(Trait.PERMUTE) and len(r.shape(own)) == 2]
        readers = [(user, own) for own in (weight, *shown) for user in own.users if user not in shown]
        found = _beside_input(r, *readers[0]) if len(readers) == 1 and name not in r.capture.charts else None
        if found is not None:
            r.capture.charts[name], r.at, (layer, *rest) = found
            new = layer.node if layer.added else r.insert(aten.neg.default, layer.node)
            r.replace(r.at, summed(r, new, rest))


def _beside_input(r: Rewriter, layer: fx.Node, weight: fx.Node) -> tuple[Identity, fx.Node, list[Term]] | None:
    """Find a sum of a layer's output and input.

    Returns:
        The multiple of the identity that the layer's weight then represents, the sum, and its terms without the input,
        that of the layer first; None if there is none.
    """
    name, own, sizes = r.name(layer), layer, r.shape(weight)
    if not name.startswith(("linear", "conv")) or layer.args[1] is not weight or "transpose" in name or len(sizes) < 2:
        return None
    # The kernel's middle reads the same place, as input and output have one size.
    steps, middle = argument(layer, 3, "stride", 1), all(size % 2 for size in sizes[2:])
    if sizes[1] not in (1, sizes[0]) or not middle or (sizes[2:] and {*by_axis(steps, 1)} != {1}):
        return None
    factor, value = multiple_of(r, layer.args[0])
    while len(own.users) == 1 and (number := number_of(r, user := next(iter(own.users)))) is not None:
        own, factor = user, factor * number
    total = own
    while len(total.users) == 1 and r.name(user := next(iter(total.users))) in ("add", "sub"):
        total = user
    rest = terms_of(r, total)
    beside = [(term, number) for term in rest for number, node in [multiple_of(r, term.node)] if node is value]
    mine = [term for term in rest if term.node is own]
    if len(mine) != 1 or r.shape(value) != r.shape(layer) or r.made_of(value) != "inputs":
        return None
    number = sum(number if term.added == mine[0].added else -number for term, number in beside) / factor
    rest = [term for term in rest if term is not mine[0] and term not in [own for own, _ in beside]]
    return (Identity(number, len(sizes) - 2), total, [mine[0], *rest]) if number else None


class _Read(NamedTuple):
    """A node that computes ``factor * (w + number)`` from a parameter w; ``part`` is w after casts."""

    node: fx.Node
    part: fx.Node
    factor: float = 1.0
    number: Any = 0.0  # or an Identity


def read_as_sums(r: Rewriter) -> None:
    """Let a parameter that is read only as 1 + w represent the sum, which then has scales like a gain."""
    for node, name in r.capture.states.items():
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        reads = _reads(r, _Read(node, node))
        numbers = {read.number for read in reads or ()}
        if reads is None or len(numbers) != 1 or numbers == {0.0} or not all(read.factor for read in reads):
            continue
        for read in reads:
            r.at = read.node
            new = r.insert(aten.neg.default, read.part) if read.factor < 0 else read.part
            new = new if abs(read.factor) == 1 else r.insert(aten.mul.Tensor, new, abs(read.factor))
            r.replace(read.node, new)
        r.capture.charts[name] = numbers.pop()


def read_as_gains(r: Rewriter) -> None:
    """Let a parameter that is read only as exp(w), or another function onto the positive numbers, represent that.

    The network may read several exponentials: exp(c (w + n)) is the c-th power of exp(w), times a number.
    """
    for node, name in r.capture.states.items():
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point() or name in r.capture.charts:
            continue
        reads = [(own, Onto(r.name(own.node), own.factor, own.number)) for own in _positive(r, _Read(node, node)) or []]
        charts = {Onto("exp") if chart.name == "exp" else chart for _, chart in reads}
        if len(charts) != 1:
            continue
        for read, chart in reads:
            r.at, new, power, number = read.node, read.part, chart.factor, chart.number
            if chart.name == "exp":
                new = r.insert(aten.reciprocal.default, new) if power < 0 else new
                new = new if abs(power) == 1 else r.insert(aten.pow.Tensor_Scalar, new, abs(power))
                new = r.insert(aten.mul.Tensor, new, math.exp(power * number)) if number else new
            r.replace(read.node, new)
        r.capture.charts[name] = charts.pop()
    r.erase_unread()


def split_exponentials(r: Rewriter) -> bool:
    """Rewrite exp(n (z + b)) as exp(n z) exp(b)^n, for numbers n and the biases b of layers without other readers.

    The factors exp(b) have scales, but a bias that is read only so absorbs no constants any more.

    Returns:
        Whether there are any.
    """
    changed = False
    for node in [own for own in r.graph.nodes if r.name(own) == "exp"]:
        steps, layer, power = [node], node.args[0], 1.0
        while isinstance(layer, fx.Node) and (factor := number_of(r, layer)) is not None:
            steps, layer, power = [layer, *steps], layer.args[0], power * factor
        bias = argument(layer, 2, "bias") if r.name(layer) in {"linear"} | operations(Trait.CONVOLVE) else None
        way = [layer, *steps]
        alone = isinstance(layer, fx.Node) and all([*own.users] == [to] for own, to in itertools.pairwise(way))
        if not alone or bias not in r.capture.states or len(bias.users) > 1:
            continue
        r.unmark(layer)  # its values without the bias have no name
        r.at, count = node, 0 if r.name(layer) == "linear" else len(r.shape(layer)) - 2
        rest = {name: own for name, own in layer.kwargs.items() if name != "bias"}
        value = r.insert(layer.target, *layer.args[:2], None, *layer.args[3:], **rest)
        for step in steps:
            value = r.insert(step.target, value, *step.args[1:])
        gain = r.insert(node.target, reshaped(r, bias, [*r.shape(bias), *[1] * count]))
        gain = gain if power == 1 else r.insert(aten.pow.Tensor_Scalar, gain, power)
        r.replace(node, r.insert(aten.mul.Tensor, value, gain))
        changed = True
    r.erase_unread()
    return changed


def _positive(r: Rewriter, here: _Read) -> list[_Read] | None:
    """Return the functions onto the positive numbers that alone read a parameter, with their arguments' form."""
    found: list[_Read] = []
    for user in list(here.node.users):
        name = r.name(user)
        if name in POSITIVE and len(user.args) == 1 and not user.kwargs:
            found.append(here._replace(node=user))
            continue
        if name in operations(Trait.REGROUP | Trait.PERMUTE | Trait.EXPAND) and user.all_input_nodes == [here.node]:
            r.at = user
            part = user if here.part is here.node else r.insert(user.target, here.part, *user.args[1:], **user.kwargs)
            step: _Read | None = here._replace(node=user, part=part)
        else:
            step = _step(r, here, user)
        further = None if step is None or not step.factor or isinstance(step.number, Identity) else _positive(r, step)
        if further is None:
            return None
        found += further
    return found


def _reads(r: Rewriter, here: _Read) -> list[_Read] | None:
    """Return the last operations that scale a parameter or add numbers to it; None if it has other readers."""
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
    """Return an operation's result as ``factor * (w + number)``; None if it has another form."""
    name, (_, part, factor, number) = r.name(user), here
    if any(mark.node is user for mark in r.capture.marks):
        return None
    value, old = user.meta.get("val"), here.node.meta["val"]
    if not name or not isinstance(value, Tensor) or value.shape != old.shape:
        return None
    if name in operations(Trait.CAST):
        return _Read(user, user if (factor, number) == (1.0, 0.0) else part, factor, number)
    first = user.args[0] is here.node
    if value.dtype != old.dtype or argument(user, 2, "alpha", 1) != 1:
        return None
    if first and (by := number_of(r, user)) is not None:
        return _Read(user, part, factor * by, number)
    given = user.args[1 if first else 0] if len(user.args) > 1 else None
    other = _number(r, given)
    whole = _multiple(r, given) if other is None and number == 0.0 else None
    if name == "mul" and other is not None:
        return _Read(user, part, factor * other, number)
    if name not in ("add", "sub", "rsub") or not factor or other is whole is None or isinstance(number, Identity):
        return None
    factor = -factor if name == "rsub" or (name == "sub" and not first) else factor
    added = (-1 if name == "sub" and first else 1) * (other if whole is None else whole) / factor  # type: ignore[operator]
    return _Read(user, part, factor, number + added if whole is None else Identity(added))


def _multiple(r: Rewriter, item: object) -> float | None:
    """Return the number n if a constant is n times an identity matrix; else None."""
    value = r.constant(item)
    if value is None or value.ndim != 2 or len(value) != value.shape[1] or not len(value):
        return None
    number = float(value[0, 0])
    return number if number and torch.equal(value, number * torch.eye(len(value), dtype=value.dtype)) else None


def read_behind_layers(r: Rewriter) -> None:
    """Let a layer's bias b represent n + b for outputs v that are read only as n + v, or as multiples c (n + v).

    Factors of n + v then scale these rows of the layer. Example: conditional scales of norms.
    """
    for node in list(r.graph.nodes):
        layer = r.name(node) in {"linear"} | operations(Trait.CONVOLVE)
        bias = argument(node, 2, "bias") if layer else None
        if r.name(node) == "add":  # a bias that is added by hand
            bias = next((own for own in node.args[1::-1] if own in r.capture.states and len(r.shape(own)) == 1), None)
        name = r.capture.states.get(bias) if isinstance(bias, fx.Node) else None
        if bias is None or name is None or list(bias.users) != [node] or name in r.capture.charts:
            continue
        (size,), behind = r.shape(bias), len(r.shape(node.args[1])) - 2 if layer else 0
        places, offsets = torch.arange(size).reshape(size, *[1] * behind).expand(r.shape(node)), _Offsets(r, size)
        if not offsets.is_added_to(node) or not offsets.follow(node, places):
            continue
        numbers = offsets.numbers.nan_to_num().tolist()
        if not any(numbers):
            continue
        # Named values inside the network have changed, so they lose their names.
        r.capture.marks[:] = [mark for mark in r.capture.marks if mark.node not in offsets.passed]
        for reader, value in offsets.sums:
            r.at = reader
            negative = offsets.is_subtracted(reader, value)
            r.replace(reader, r.insert(aten.neg.default, value) if negative else value)
        r.capture.charts[name] = numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


class _Offsets:
    """The numbers, or constants, that readers add to the outputs of a layer.

    Attributes:
        numbers: The number for each output; NaN if unread.
        sums: Pairs of the adding operation and its argument.
        passed: The values that contain outputs.
    """

    def __init__(self, r: Rewriter, size: int) -> None:
        self.r, self.numbers = r, torch.full((size,), math.nan, dtype=torch.float64)
        self.sums: list[tuple[fx.Node, fx.Node]] = []
        self.passed: set[fx.Node] = set()

    def is_added_to(self, value: fx.Node) -> bool:
        """Whether some part of a value is read with a number added."""
        left = [value]
        for own in left:
            for user in own.users:
                if user.target is operator.getitem or self._moves(user, own) or number_of(self.r, user):
                    left.append(user)
                elif bool((self._added(user, own) != 0).any()):
                    return True
        return False

    def follow(self, value: fx.Node, places: Any, factor: float = 1.0) -> bool:
        """Collect the numbers that readers of a value add; return False if an output is read with several numbers.

        Args:
            value: The value, or a list of values.
            places: The output index of each of its elements.
            factor: The number that multiplies outputs in the value.
        """
        self.passed.add(value)
        for user in value.users:
            if isinstance(places, (list, tuple)):
                item: Any = user.args[1] if user.target is operator.getitem else None
                if item is None or not self.follow(user, places[item], factor):
                    return False
            elif self._moves(user, value):
                if (after := moved(user, places)) is None or not self.follow(user, after, factor):
                    return False
            elif by := number_of(self.r, user):
                if not self.follow(user, places, factor * by):
                    return False
            elif not self._read(user, value, places, factor):
                return False
        return True

    def _moves(self, user: fx.Node, value: fx.Node) -> bool:
        return self.r.name(user) in operations(Trait.MOVE) and user.all_input_nodes == [value] and user.args[0] is value

    def _read(self, user: fx.Node, value: fx.Node, places: Tensor, factor: float) -> bool:
        number = self._added(user, value).expand(places.shape) / factor
        if bool((number != 0).any()):
            self.sums.append((user, value))
        known = self.numbers[places]
        self.numbers[places] = number
        return bool((known.isnan() | (known == number)).all()) and torch.equal(self.numbers[places], number)

    def _added(self, user: fx.Node, value: fx.Node) -> Tensor:
        name, nothing = self.r.name(user), torch.zeros((), dtype=torch.float64)
        if name not in ("add", "sub", "rsub") or user.kwargs or len(user.args) != 2:
            return nothing
        others = [given for given in user.args if given is not value]
        number = _number(self.r, others[0]) if len(others) == 1 else None
        added = self.r.constant(others[0] if number is None else number) if len(others) == 1 else None
        one, two = user.meta["val"], value.meta["val"]
        if added is None or one.shape != two.shape or one.dtype != two.dtype or not added.is_floating_point():
            return nothing
        return added.double() if name == "add" else -added.double()

    def is_subtracted(self, user: fx.Node, value: fx.Node) -> bool:
        """Whether an operation subtracts a value from a number."""
        name = self.r.name(user)
        return name == "rsub" if user.args[0] is value else name == "sub"


def _number(r: Rewriter, item: object) -> float | None:
    """Return the number that all elements of a constant equal; None if there is none."""
    if isinstance(item, fx.Node) and r.name(item) == "full":
        return r.number(item.args[1])
    return r.number(item)


def charts_of(captures: Sequence[Capture]) -> tuple[dict[str, Chart], set[str]]:
    """Return the charts common to all captures, and the names of parameters with differing charts."""
    charts: dict[str, Chart] = {}
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
