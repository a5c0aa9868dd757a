"""Find norms and softmaxes in any spelling, and replace each by one operation.

A region is a part of the graph that computes a value from one other value of the same shape, without weights. Running
it on random numbers identifies its function. See docs/theory/tracing.md, 3.
"""

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.graph.running import (
    NOT_ON_NUMBERS,
    Constants,
    Step,
    is_plain_operation,
    moved_by,
    run_step,
    run_steps,
)
from lightning_sym.symmetry.tracing.normal_form.contractions import permuted, reshaped
from lightning_sym.symmetry.tracing.normal_form.measuring import Measured, measured

aten = torch.ops.aten

_CASTS = operations(Trait.CAST)
_MOVEMENTS = operations(Trait.MOVE)
_SUMS = operations(Trait.SUM | Trait.REDUCE | Trait.CONTRACT | Trait.SOFTMAX | Trait.NORM)
_LAST = {"exp", "log", "cat", "addcmul"} | operations(Trait.JOIN | Trait.PRODUCT) | _MOVEMENTS
_MOST_NODES = 48  # of a region
_MOST_FAILURES = 4  # failed starting values per region
_LOW = -1e3  # masked logits; their exponentials are negligible


def recognise(rewriter: Rewriter) -> int:
    """Replace each written-out norm and softmax by one operation.

    Args:
        rewriter: The rewriter of the captured network. Changes the graph.

    Returns:
        The number of changes.
    """
    return _Recogniser(rewriter).run()


class _Region(NamedTuple):
    """A product of factors with exponents 1 or -1; factors made of weights are kept apart.

    Attributes:
        node: The last operation.
        factors: The factors made of inputs, and numbers.
        gains: The factors made of weights.
        shape: The shape of the product.
    """

    node: fx.Node
    factors: list[tuple[fx.Node | float, int]]
    gains: list[tuple[fx.Node, int]]
    shape: tuple[int, ...]


class _Recogniser:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph = rewriter, rewriter.graph
        self.constants = Constants()
        self.known: dict[Hashable, Measured | None] = {}

    def run(self) -> int:
        """Replace all regions."""
        return self.rewriter.rewrite_from_the_end(self._rewritten)

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """Replace the region that ends in a node, if there is one; return the next node."""
        if (name := self.rewriter.name(node)) not in _LAST:
            return None
        if name in ("mul", "div") and (new := self._pulled_in(node)) is not None:
            return new
        region = self._product(node)
        best: tuple[Measured, fx.Node, list[Step]] | None = None
        failures = 0
        for start, steps in self._starts(region):
            found = self._measured(region, start, steps)
            if found is None:
                failures += 1
                if best is not None or failures == _MOST_FAILURES:
                    break
            elif best is None or _is_larger(found, best[0]):
                best = found, start, steps
        if best is None or self._is_plain(region, *best):
            return None
        before = node.prev
        new = self._put(region, *best)
        first = before.next
        self.rewriter.replace(node, new)
        return first.prev

    def _pulled_in(self, node: fx.Node) -> fx.Node | None:
        """Normalise the argument of a linear map, if the result is divided by the argument's length."""
        region = self._product(node)
        parts: list[tuple[Any, int]] = [*region.factors, *region.gains]
        maps = [part for part in parts if self.rewriter.name(part[0]) in ("linear", "matmul") and part[1] == 1]
        if len(parts) < 2 or len(maps) != 1 or any(given is not None for given in maps[0][0].args[2:]):
            return None
        result = maps[0][0]
        for part in parts:
            sizes = _size(part[0])
            for place, value in enumerate(result.args[:2]) if sizes and part is not maps[0] else ():
                wide = _beside(self.rewriter.name(result), place, _size(value) or (), sizes or ())
                if wide is None:
                    continue
                source, turned = self._turned(value)
                wide = [*wide[:-2], wide[-1], wide[-2]] if turned else wide
                own = _Region(source, [part], [], sizes or ())
                for start, steps in self._starts(own):
                    if start is source and (found := self._measured(own, start, steps, wide)) is not None:
                        others = [other for other in parts if other is not part and other is not maps[0]]
                        return self._divided(node, result, place, found, others)
        return None

    def _divided(
        self, node: fx.Node, result: fx.Node, place: int, found: Measured, others: list[tuple[Any, int]]
    ) -> fx.Node:
        """Replace a product by the map of a normalised argument, times the other factors."""
        value: Any = result.args[place]
        source, turned = self._turned(value)
        new = self._scaled(self._normed(source, found), found)
        new = self.rewriter.insert(value.target, new, *value.args[1:]) if turned else new
        given = [new if at == place else other for at, other in enumerate(result.args[:2])]
        last = self.rewriter.insert(result.target, *given)
        for other, power in others:
            last = self.rewriter.insert(aten.mul.Tensor if power == 1 else aten.div.Tensor, last, other)
        self.rewriter.replace(node, last)
        return last

    def _turned(self, value: fx.Node) -> tuple[fx.Node, bool]:
        """Return the source of a transposed value and True; otherwise the value itself and False."""
        shape = _size(value.args[0] if value.args else None) or ()
        if self.rewriter.name(value) in operations(Trait.PERMUTE) and len(shape) > 1:
            numbers = torch.arange(math.prod(shape)).reshape(shape)
            if torch.equal(moved_by(Step.of(value), numbers), numbers.mT):
                return value.args[0], True  # type: ignore[return-value]
        return value, False

    # Possible starts and ends of a region.

    def _product(self, node: fx.Node) -> _Region:
        """Return the product that ends in a node; the only factor may be the node itself."""
        region = _Region(node, [], [], _size(node) or ())
        own = self.rewriter.made_of(node)
        waiting: list[tuple[Any, int]] = [(node, 1)]
        users: dict[Any, fx.Node] = {}
        while waiting:
            part, power = waiting.pop()
            name = self.rewriter.name(part)
            inner = part is node or (part in users and self.rewriter.only_for(part, users[part]))
            if name in ("mul", "div") and inner and len(part.args) == 2 and not part.kwargs:
                one, two = part.args
                users |= dict.fromkeys(part.all_input_nodes, part)
                waiting += [(two, power if name == "mul" else -power), (one, power)]
            elif name in _CASTS and inner and part is not node and isinstance(part.args[0], fx.Node):
                users[part.args[0]] = part
                waiting.append((part.args[0], power))
            elif isinstance(part, fx.Node) and own == "inputs" and self.rewriter.made_of(part) == "weights":
                region.gains.append((part, power))
            else:
                region.factors.append((part, power))
        return region

    def _starts(self, region: _Region) -> Iterator[tuple[fx.Node, list[Step]]]:
        """Yield each value that alone determines a region, nearest first, with the operations between in order."""
        last = region.node
        value = last.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        waiting: list[fx.Node] = []
        steps: list[Step] = []
        seen: set[fx.Node] = set()

        def add(node: Any) -> None:
            if isinstance(node, fx.Node) and node not in seen and self.rewriter.made_of(node) != "constants":
                seen.add(node)
                waiting.append(node)

        for factor, _ in region.factors:
            add(factor)
        summed = False
        while waiting and len(steps) < _MOST_NODES:
            waiting.remove(node := max(waiting))
            own = node.meta.get("val")
            if (
                not waiting
                and summed
                and isinstance(own, Tensor)
                and own.shape == value.shape
                and own.dtype == value.dtype
            ):
                yield node, steps[::-1]
            name = self.rewriter.name(node)
            if not name or not is_plain_operation(node) or self._has_weights(node, region):
                return
            summed = summed or name in _SUMS
            steps.append(Step.of(node))
            for given in node.all_input_nodes:
                add(given)

    def _has_weights(self, node: fx.Node, region: _Region) -> bool:
        """Whether a node combines weights with a value made of inputs."""
        made = {self.rewriter.made_of(given) for given in node.all_input_nodes}
        return self.rewriter.made_of(node) == "inputs" and "weights" in made

    # The function of a region.

    def _measured(
        self, region: _Region, start: fx.Node, steps: Sequence[Step], wide: Sequence[int] | None = None
    ) -> Measured | None:
        """Return a region's function; with ``wide``, that of multiplication by its reshaped result."""

        def function(numbers: Tensor) -> Tensor:
            result = self._run(region, start, steps, numbers)
            return result if wide is None else numbers * result.reshape(wide)

        key = self._key(region, start, steps), str(wide)
        if key not in self.known:
            try:
                with torch.no_grad():
                    self.known[key] = measured(function, _size(start) or ())
            except NOT_ON_NUMBERS:
                self.known[key] = None  # a function that cannot run on numbers is no norm
        return self.known[key]

    def _key(self, region: _Region, start: fx.Node, steps: Sequence[Step]) -> Hashable:
        """Return a key shared by regions with the same computation."""
        number: dict[fx.Node, Any] = {start: -1} | {step.node: place for place, step in enumerate(steps)}

        def told(node: fx.Node) -> Any:
            return ("node", number[node]) if node in number else ("constant", id(node))

        parts = [(step.target, fx.map_arg(step.args, told), fx.map_arg(step.kwargs, told)) for step in steps]
        factors = [(told(f) if isinstance(f, fx.Node) else f, power) for f, power in region.factors]
        return str((_size(start), parts, factors, region.shape))

    def _run(self, region: _Region, start: fx.Node, steps: Sequence[Step], numbers: Tensor) -> Tensor:
        """Run a region in float64, without its gains."""
        values: dict[fx.Node, Any] = {start: numbers.clone()}
        run_steps(steps, values, self.constants)
        result = torch.ones((), dtype=torch.float64)
        for factor, power in region.factors:
            part: Any = factor
            if isinstance(factor, fx.Node):
                part = values[factor] if factor in values else self.constants(factor)
            result = result * part if power == 1 else result / part
        return result.expand(region.shape)

    # The replacement.

    def _is_plain(self, region: _Region, found: Measured, start: fx.Node, steps: Sequence[Step]) -> bool:
        """Whether a region already is a single operation."""
        if found.masked:
            return self._masked(region, start, steps, put=False) is None
        names = [self.rewriter.name(step.node) for step in steps]
        told = {"layer": ("layer_norm",), "rms": ("rms_norm",)}.get(found.kind, (found.kind, f"_{found.kind}"))
        known = [step.args[0] for step, name in zip(steps, names, strict=True) if name in told]
        others = [name for name in names if name not in told and name not in _CASTS | _MOVEMENTS]
        laid_out = found.split is None or [_size(node) for node in known] == [_laid_out(_size(start) or (), found)[1]]
        return len(known) == 1 and not others and laid_out

    def _put(self, region: _Region, found: Measured, start: fx.Node, steps: Sequence[Step]) -> fx.Node:
        insert = self.rewriter.insert
        if found.kind in ("softmax", "log_softmax"):
            target = aten.softmax.int if found.kind == "softmax" else aten.log_softmax.int
            if found.masked:
                start = self._masked(region, start, steps, put=True) or start
            node = insert(target, start, found.axes[0])
        else:
            node = self._normed(start, found)
            if not found.exact:
                run = functools.partial(self._run, region, start, steps)
                node.meta["stands_for"] = run, _steps_between(start, node)
        node = self._scaled(node, found)
        for gain, power in region.gains:
            node = insert(aten.mul.Tensor if power == 1 else aten.div.Tensor, node, gain)
        if _dtype(node) != _dtype(region.node):
            node = insert(aten.to.dtype, node, _dtype(region.node))
        return node

    def _normed(self, start: fx.Node, found: Measured) -> fx.Node:
        """Insert a norm over any axes."""
        shape, insert = _size(start) or (), self.rewriter.insert
        order, parts = _laid_out(shape, found)
        node = permuted(self.rewriter, start, order)
        sizes = self.rewriter.shape(node)
        node = reshaped(self.rewriter, node, parts)
        over = list(parts[len(parts) - len(found.axes) - (found.split is not None) :])
        if found.kind == "layer":
            node = insert(aten.layer_norm.default, node, over, None, None, found.eps)
        else:
            node = insert(aten.rms_norm.default, node, over, None, found.eps)
        node = reshaped(self.rewriter, node, sizes)
        return permuted(self.rewriter, node, [order.index(axis) for axis in range(len(shape))])

    def _scaled(self, node: fx.Node, found: Measured) -> fx.Node:
        return node if found.factor == 1 else self.rewriter.insert(aten.mul.Tensor, node, found.factor)

    def _masked(self, region: _Region, start: fx.Node, steps: Sequence[Step], *, put: bool) -> fx.Node | None:
        """Return the logits of a masked softmax, with very low numbers at masked entries.

        Args:
            region: The region.
            start: The region's input value.
            steps: The operations between.
            put: Whether to insert missing logits, rather than only return their source.

        Returns:
            The logits, or a constant that determines them; None if neither exists.
        """
        numbers = torch.zeros(_size(start) or (), dtype=torch.float64)
        shown = self._run(region, start, steps, numbers) != 0
        for step in steps:
            others = [node for node in step.node.all_input_nodes if self.rewriter.made_of(node) == "constants"]
            if self.rewriter.name(step.node) == "mul" and len(others) == 1:
                value = self.constants(others[0]).double().broadcast_to(shown.shape)
                if torch.equal(value, shown.double()):
                    if not put:
                        return others[0]
                    low = self.rewriter.insert(
                        aten.log.default, self.rewriter.insert(aten.to.dtype, others[0], _dtype(start))
                    )
                    return self.rewriter.insert(aten.add.Tensor, start, low)
            elif [node for node in step.node.all_input_nodes if node not in others] == [start]:
                value = run_step(step, lambda node: numbers if node is start else self.constants(node))
                hides = isinstance(value, Tensor) and torch.equal(value < _LOW, ~shown)
                if hides and torch.equal(value, numbers.where(shown, value)):
                    return step.node
        return None


def _laid_out(shape: tuple[int, ...], found: Measured) -> tuple[list[int], tuple[int, ...]]:
    """Return the axis order and shape for a norm over the last axes; blocks of an axis become a new axis."""
    order = [axis for axis in range(len(shape)) if axis not in found.axes]
    parts = [shape[axis] for axis in order]
    if found.split is not None:
        axis, size = found.split
        place = order.index(axis)
        order = [*order[:place], *order[place + 1 :], axis]
        parts = [*parts[:place], *parts[place + 1 :], shape[axis] // size, size]
    return [*order, *found.axes], (*parts, *(shape[axis] for axis in found.axes))


def _beside(kind: str, place: int, own: tuple[int, ...], sizes: tuple[int, ...]) -> list[int] | None:
    """Reshape a factor of a linear map's result into a factor of an argument; None if impossible.

    Args:
        kind: The map: ``linear`` or ``matmul``.
        place: Index of the argument, 0 or 1.
        own: The argument's shape.
        sizes: The factor's shape.
    """
    if place == 0:
        return list(sizes) if sizes[-1] == 1 and len(own) == len(sizes) and sizes[:-1] == own[:-1] else None
    turned = kind == "linear"
    if len(own) == 2:
        fits = math.prod(sizes) == sizes[-1] == own[0 if turned else 1] > 1
        return ([sizes[-1], 1] if turned else [1, sizes[-1]]) if fits else None
    fits = len(own) == len(sizes) and sizes == (*own[:-2], 1, own[-1])
    return list(sizes) if fits else None


def _steps_between(start: fx.Node, node: fx.Node) -> int:
    """Return the number of operations from one node to a later one."""
    return 0 if node is start else 1 + _steps_between(start, node.args[0])  # type: ignore[arg-type]


def _is_larger(new: Measured, old: Measured) -> bool:
    """Whether an earlier start gives the same norm, or a layer norm instead of an RMS norm."""
    same = replace(new, kind=old.kind, eps=old.eps) == old
    close = abs(new.eps - old.eps) <= 1e-5 * max(new.eps, old.eps)
    return same and close and (new.kind == old.kind or (new.kind, old.kind) == ("layer", "rms"))


def _size(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
