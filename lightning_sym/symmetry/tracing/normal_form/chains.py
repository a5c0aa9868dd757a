"""Replace chains of elementwise operations by one operation with the same values or the same group.

A *chain* is a part of the graph that computes each element of a value from one element of another value, with numbers
as the only constants: ``2 sigmoid(2 x) - 1``. Its values on a grid show whether it is linear, homogeneous, odd, even,
a sine or a cosine, however it is written. See docs/theory/tracing.md, 3.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.groups import intertwiner_group
from lightning_sym.symmetry.tracing.graph.operations import Trait, is_pointwise, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.graph.running import NOT_ON_NUMBERS, Constants, Step, run_steps

aten = torch.ops.aten

_MOST_NODES = 24  # of a chain
# What a coarse grid shows, a fine one must confirm: near 0, numbers of equal distance; elsewhere, of equal ratio.
_COARSE, _FINE = (101, 145), (4001, 10001)
# Larger rounding errors are allowed beyond the bound, where cancellations grow.
_EXACT, _ROUGH, _BOUND = 1e-11, 1e-3, 100.0
_TIMES = (2.0, 1 / math.pi)
_STEP = 0.1  # of the second difference that determines a frequency
_CASTS = operations(Trait.CAST) | {"positive"}
_ELEMENTWISE = operations(Trait.JOIN | Trait.PRODUCT | Trait.ORDER | Trait.POINTWISE) | _CASTS
_ELEMENTWISE |= {"neg", "where", "masked_fill", "eq", "ne", "maximum", "minimum"}
_SUMS = operations(Trait.JOIN)
_FACTORS = operations(Trait.PRODUCT)
_TURNS = {"sin", "cos"}


class Homogeneous(NamedTuple):
    """A function that is ``above * x ** exponent`` for x > 0 and ``below * |x| ** exponent`` for x < 0."""

    above: float
    below: float
    exponent: float


class Wave(NamedTuple):
    """The function ``size * sin(frequency * x)``, or the same with a cosine."""

    kind: Literal["sin", "cos"]
    size: float
    frequency: float


Symmetric = Literal["odd", "even", "flipped"]  # f(-x) is -f(x), f(x) or c - f(x)
Found = Homogeneous | Wave | tuple[Symmetric, float]


def shorten_chains(rewriter: Rewriter) -> int:
    """Replace each chain whose symmetry its single operations do not show.

    Args:
        rewriter: The rewriter of the captured network in its normal form. Changes the graph.

    Returns:
        The number of changes.
    """
    return rewriter.rewrite_from_the_end(_Shortener(rewriter).rewritten)


# The function of a chain.


@functools.cache
def _grid(counts: tuple[int, int]) -> Tensor:
    """Return both signs of numbers from 1e-3 to 1e6, and 0, in an order that the opposite signs reverse.

    Args:
        counts: Of the numbers up to 10, and of all sizes.
    """
    near = torch.linspace(0.0123, 10.0, counts[0], dtype=torch.float64)
    wide = torch.logspace(-3, 6, counts[1], dtype=torch.float64)
    half = torch.cat([torch.zeros(1, dtype=torch.float64), near, wide])
    return torch.cat([-half.flip(0), half])


def measured_chain(function: Callable[[Tensor], Tensor], *, waves: bool = False) -> Found | None:
    """Measure a function of one variable.

    Args:
        function: Maps a vector of float64 numbers to one of the same shape, elementwise.
        waves: Whether it may be a sine or cosine.

    Returns:
        The first that holds: homogeneous, a sine or cosine, odd or even, with f(-x) = c - f(x) (and c); else None.
        Homogeneous functions of degree 1 with opposite slopes are linear.
    """
    if _measured_at(_grid(_COARSE), function, waves=waves) is None:
        return None
    return _measured_at(_grid(_FINE), function, waves=waves)


def _measured_at(x: Tensor, function: Callable[[Tensor], Tensor], *, waves: bool) -> Found | None:
    y = function(x)
    usual = x.abs() <= 2
    if y.shape != x.shape or y.dtype != torch.float64 or not bool(y[usual].isfinite().all()):
        return None
    size = float(y[usual].abs().max())
    if float(y[usual].max() - y[usual].min()) <= _EXACT * size:
        return None  # constant
    here = x.abs() <= _BOUND

    def equal(one: Tensor, two: Tensor) -> bool:
        """Whether two results are equal, where both are finite."""
        known = one.isfinite() & two.isfinite()
        scale = torch.maximum(one.abs(), two.abs()).clamp(min=size)
        bound = scale * torch.where(here, _EXACT, _ROUGH)
        return bool(((one - two).abs() <= bound)[known].all())

    turned = y.flip(0)
    if (power := _homogeneous(function, x, y, equal)) is not None:
        return power
    odd, even = equal(turned, -y), equal(turned, y)
    if waves and (odd or even) and (wave := _wave(function, x, y, "sin" if odd else "cos")) is not None:
        return wave
    if odd or even:
        return ("odd" if odd else "even"), 0.0
    center = 2 * float(y[x == 0][0])
    return ("flipped", center) if equal(turned, center - y) and bool((y[y.isfinite()] >= 0).all()) else None


def _homogeneous(
    function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, equal: Callable[[Tensor, Tensor], bool]
) -> Homogeneous | None:
    above, below = (float(function(torch.tensor([one], dtype=torch.float64))) for one in (1.0, -1.0))
    doubled = float(function(torch.tensor([2.0 if abs(above) > abs(below) else -2.0], dtype=torch.float64)))
    largest = above if abs(above) > abs(below) else below
    if not largest or not 0 < doubled / largest < math.inf:
        return None
    exponent = math.log2(doubled / largest)
    exponent = round(exponent) if abs(exponent - round(exponent)) < _EXACT else exponent
    if exponent <= 0:
        return None
    above, below = (0.0 if abs(own) < _EXACT * abs(largest) else _plain(own) for own in (above, below))
    factor = torch.full_like(x, below).masked_fill(x > 0, above)
    wanted = factor * x.abs() ** exponent
    small = x.abs() * _TIMES[1]  # as finely near 0: the shape there may be another
    close = factor * small**exponent
    found = function(torch.where(x > 0, small, -small))
    alike = bool(((found - close).abs() <= _EXACT * close.abs().clamp(min=abs(largest)))[x.abs() <= _BOUND].all())
    return Homogeneous(above, below, float(exponent)) if equal(wanted, y) and alike else None


def _wave(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, kind: Literal["sin", "cos"]) -> Wave | None:
    """Return the sine or cosine that a function equals on the grid; None if there is none."""
    inner = x[x.abs() <= 10]
    here = function(inner)

    def cosine(step: float) -> float | None:
        """Return cos(frequency * step), by f(x + step) + f(x - step) = 2 cos(frequency * step) f(x)."""
        sides = function(inner + step) + function(inner - step)
        factor = float((sides * here).sum() / here.square().sum())
        fits = bool(((sides - factor * here).abs() <= 1e-9 * float(here.abs().max())).all())
        return factor / 2 if fits and abs(factor) < 2 else None

    rough = cosine(_STEP)
    if rough is None:
        return None
    frequency = math.acos(rough) / _STEP
    for step in (1.0, 10.0, 100.0):  # longer steps determine the last digits
        own = cosine(step)
        if own is None or abs(own) > 0.99:
            continue
        turns = frequency * step / (2 * math.pi)
        angle = math.acos(own) / (2 * math.pi)
        frequency = min((math.floor(turns) + n + s * angle for n in (0, 1) for s in (1, -1)),
                        key=lambda each: abs(each - turns)) * 2 * math.pi / step  # fmt: skip
    frequency = _plain(frequency)
    wave = getattr(torch, kind)(frequency * inner)
    size = _plain(float((wave * here).sum() / wave.square().sum()))
    exact = bool(((size * wave - here).abs() <= _EXACT * abs(size)).all())
    return Wave(kind, size, frequency) if exact else None


def _plain(number: float) -> float:
    """Return a nearby number of few digits, if rounding may have changed it."""
    short = float(f"{number:.9g}")
    return short if abs(short - number) <= _EXACT * abs(number) else number


# Chains in a graph.


class _Shortener:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self.known: dict[Hashable, Found | None] = {}

    def rewritten(self, node: fx.Node) -> fx.Node | None:
        """Replace the shortest chain that ends in a node and has a symmetry which its operations do not show."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point() or not self._is_elementwise(node):
            return None
        for start, steps in self._starts(node, value):
            alone = len(steps) == 1 and len(steps[0].node.all_input_nodes) == 1  # its rule measures it
            if alone or not any(self._hides(step) for step in steps):
                continue
            if (found := self._measured(start, steps)) is None:
                continue
            before = node.prev
            if (new := self._put(start, steps, found)) is None or new is node:
                continue
            first = before.next
            self.rewriter.replace(node, new)
            for step in steps[-2::-1]:  # what only a name kept, as of a module, would have the rules of one operation
                if not step.node._erased and not step.node.users:
                    self.rewriter.erase(step.node)
            return first.prev
        return None

    def _is_elementwise(self, node: fx.Node) -> bool:
        name = self.rewriter.name(node)
        return bool(name) and (name in _ELEMENTWISE or is_pointwise(node.target))

    def _starts(self, end: fx.Node, value: Tensor) -> Iterator[tuple[fx.Node, list[Step]]]:
        """Yield each value that alone determines a chain, nearest first, with the operations between in order."""
        waiting: list[fx.Node] = [end]
        steps: list[Step] = []
        seen: set[fx.Node] = {end}
        while waiting and len(steps) < _MOST_NODES:
            waiting.remove(node := max(waiting))
            own = node.meta.get("val")
            if not isinstance(own, Tensor) or own.shape != value.shape:
                return
            if not waiting and steps and own.dtype == value.dtype and self.rewriter.made_of(node) == "inputs":
                yield node, steps[::-1]
            if not self._is_elementwise(node):
                return
            steps.append(Step.of(node))
            for given in node.all_input_nodes:
                if self.rewriter.made_of(given) == "constants":
                    if self.rewriter.number(given) is None:
                        return
                elif given not in seen:
                    seen.add(given)
                    waiting.append(given)

    def _varying(self, step: Step) -> list[fx.Node]:
        return [given for given in step.node.all_input_nodes if self.rewriter.made_of(given) != "constants"]

    def _hides(self, step: Step) -> bool:
        """Whether the rule of an operation may allow less than the function of the chain."""
        name, several = self.rewriter.name(step.node), len(self._varying(step)) > 1
        if name in _CASTS | _FACTORS | {"neg"}:
            return False
        if name in _SUMS or several or len(step.node.all_input_nodes) > 1:
            return True
        numbers = step.args[1:], tuple(sorted(step.kwargs.items()))
        try:
            return not _shows(step.target, *numbers)
        except TypeError:  # lists of numbers
            return True

    def _measured(self, start: fx.Node, steps: Sequence[Step]) -> Found | None:
        number: dict[fx.Node, Any] = {start: "start"} | {step.node: place for place, step in enumerate(steps)}

        def told(node: fx.Node) -> Any:
            return ("node", number[node]) if node in number else ("number", self.rewriter.number(node))

        key = str([(step.target, fx.map_arg(step.args, told), fx.map_arg(step.kwargs, told)) for step in steps])
        if key not in self.known:
            waves = any(self.rewriter.name(step.node) in _TURNS for step in steps)
            try:
                with torch.no_grad():
                    self.known[key] = measured_chain(functools.partial(self._run, start, steps), waves=waves)
            except NOT_ON_NUMBERS:
                self.known[key] = None  # a chain that cannot run on numbers keeps its rules
        return self.known[key]

    def _run(self, start: fx.Node, steps: Sequence[Step], numbers: Tensor) -> Tensor:
        """Run a chain on any numbers, in float64."""
        values: dict[fx.Node, Any] = {start: numbers.to(torch.float64, copy=True)}
        inner = {step.node for step in steps} | {start}
        for given in {given for step in steps for given in step.node.all_input_nodes} - inner:
            held: Any = self.rewriter.constant(given)
            one = held.reshape(-1)[0]
            values[given] = one.double() if one.is_floating_point() else one
        run_steps(steps, values, Constants())
        result: Tensor = values[steps[-1].node]
        return result

    def _times(self, node: fx.Node, factor: float) -> fx.Node:
        return node if factor == 1 else self.rewriter.insert(aten.mul.Tensor, node, factor)

    def _put(self, start: fx.Node, steps: Sequence[Step], found: Found) -> fx.Node | None:
        """Insert the operation that replaces a chain; None if there is none."""
        insert = self.rewriter.insert

        if isinstance(found, Homogeneous):
            return self._power(start, found)
        if isinstance(found, Wave):
            target = aten.sin.default if found.kind == "sin" else aten.cos.default
            return self._times(insert(target, self._times(start, found.frequency)), found.size)
        kind, center = found
        run, count = functools.partial(self._run, start, steps), 1
        node = start
        if any(self.rewriter.name(step.node) in operations(Trait.EQUALISE) for step in steps) and kind != "flipped":
            node = insert(aten.hardtanh.default, node)  # different numbers may have equal images
            count += kind == "even"
        if kind == "flipped":
            node = insert(aten.sigmoid.default, node)
            if center != 1:
                node, count = insert(aten.mul.Tensor, node, center), 2
        elif kind == "even":
            node = insert(aten.cosh.default, node)
        elif node is start:
            node = insert(aten.tanh.default, node)
        node.meta["stands_for"] = run, count
        return node

    def _power(self, start: fx.Node, found: Homogeneous) -> fx.Node | None:
        above, below, exponent = found
        insert = self.rewriter.insert

        if exponent == 1 and above == -below:
            return self._times(start, above)
        if exponent == 1 and above == below:
            return self._times(insert(aten.abs.default, start), above)
        if exponent == 1:
            if not above:
                return self._times(insert(aten.relu.default, insert(aten.neg.default, start)), below)
            if not below:
                return self._times(insert(aten.relu.default, start), above)
            return self._times(insert(aten.leaky_relu.default, start, -below / above), above)
        parity = 1 if above == below else -1 if above == -below else 0
        if exponent == round(exponent) and parity == (-1) ** round(exponent):
            return self._times(insert(aten.pow.Tensor_Scalar, start, int(exponent)), above)
        if parity == 1:
            return self._times(insert(aten.pow.Tensor_Scalar, insert(aten.abs.default, start), exponent), above)
        if parity == -1:
            size = insert(aten.pow.Tensor_Scalar, insert(aten.abs.default, start), exponent - 1)
            return self._times(insert(aten.mul.Tensor, start, size), above)
        if above and below:
            return None
        side = start if above else insert(aten.neg.default, start)
        return self._times(insert(aten.pow.Tensor_Scalar, insert(aten.relu.default, side), exponent), above or below)


@functools.lru_cache(maxsize=512)
def _shows(target: Any, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> bool:
    """Whether an operation on one value and numbers has scales or signs of its own."""
    try:
        group = intertwiner_group(lambda x: target(x.clone(), *arguments, **dict(keywords)), affine=True)
    except (ValueError, RuntimeError, TypeError):
        return False
    return bool(group.positive_scales or group.signs)
