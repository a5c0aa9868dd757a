"""Finds norms and softmaxes, however they are written, and puts one operation in the place of each.

A region is a part of the graph that makes a value of one other value of the same shape, without weights. It is run on
random numbers, and what comes out tells what it is. See docs/theory/intertwiners.md, 2.16.
"""

import functools
import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.measuring import Measured, measured
from lightning_sym.symmetry.tracing.nodes import argument, moved
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter
from lightning_sym.symmetry.tracing.running import (
    NOT_ON_NUMBERS,
    Constants,
    Step,
    is_plain_operation,
    moved_by,
    run_step,
)

aten = torch.ops.aten

_CASTS = operations(Trait.CAST)
_MOVEMENTS = operations(Trait.MOVE) - operations(Trait.BY_SHAPE)
_SUMS = operations(Trait.SUM | Trait.REDUCE | Trait.CONTRACT | Trait.SOFTMAX | Trait.NORM)
_LAST = {"exp", "log", "cat", "addcmul"} | operations(Trait.JOIN | Trait.PRODUCT) | _MOVEMENTS
_MOST_NODES = 48  # of a region
_MOST_FAILURES = 4  # values that are tried in vain as the one of which a region is made
_LOW = -1e3  # the exponential of what is so much lower than all else is zero

_OF_GROUP_NORM = ((2, "weight", None), (3, "bias", None), (4, "eps", 1e-5))


def recognise(rewriter: Rewriter) -> int:
    """Put one operation in the place of each norm and softmax that is written out.

    Args:
        rewriter: Of the captured network, whose graph is changed.

    Returns:
        The number of changes.
    """
    return _Recogniser(rewriter).run()


class _Region(NamedTuple):
    """A product of factors, each to a power 1 or -1, of which those made of weights stand apart; and a summand.

    Attributes:
        node: The last operation.
        factors: The factors that are made of inputs, and numbers.
        gains: The factors that are made of weights.
        bias: What is added then, made of weights.
        shape: The shape of the product.
        moves: What moves its elements then, in order; the last is `node`.
    """

    node: fx.Node
    factors: list[tuple[fx.Node | float, int]]
    gains: list[tuple[fx.Node, int]]
    bias: fx.Node | None
    shape: tuple[int, ...]
    moves: list[Step]


class _Recogniser:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph = rewriter, rewriter.graph
        self.order: dict[fx.Node, float] = {node: place for place, node in enumerate(self.graph.nodes)}
        self.inserted = 0
        self.constants = Constants()
        self.known: dict[Hashable, Measured | None] = {}

    def run(self) -> int:
        """Replace all regions."""
        return self.rewriter.rewrite_from_the_end(self._rewritten)

    def _insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Put an operation before the one at hand."""
        node = self.rewriter.insert(target, *args, **kwargs)
        self.inserted += 1
        self.order[node] = self.order[self.rewriter.at] - 1 / (1 + self.inserted)
        return node

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """Replace the region that ends in a node, if there is one; return the node at which to go on."""
        if (name := self.rewriter.name(node)) == "group_norm":
            if (new := self._group_norm(node)) is not None:
                self.rewriter.replace(node, new)
            return new
        if name not in _LAST:
            return None
        if name in ("mul", "div") and (new := self._pulled_in(node)) is not None:
            return new
        for region in self._regions(node):
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
            if best is not None and not self._is_plain(region, *best):
                before = node.prev
                new = self._put(region, *best)
                if new is None:
                    continue
                first = before.next
                self.rewriter.replace(node, new)
                return first.prev
        return None

    def _group_norm(self, node: fx.Node) -> fx.Node | None:
        """A group norm of one group, without places, is a layer norm."""
        shape = _size(node) or ()
        if node.args[1] != 1 or math.prod(shape[2:]) != 1 or shape[1] == 1 or len(shape) > 2:
            return None
        weight, bias, eps = (argument(node, at, key, default) for at, key, default in _OF_GROUP_NORM)
        return self._insert(aten.layer_norm.default, node.args[0], [shape[1]], weight, bias, eps)

    def _pulled_in(self, node: fx.Node) -> fx.Node | None:
        """Divide what a linear map takes by its length, where the map's result is divided by this length."""
        region = self._product(node, node, None, node, [])
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
                own = _Region(source, [part], [], None, sizes or (), [])
                for start, steps in self._starts(own):
                    if start is source and (found := self._measured(own, start, steps, wide)) is not None:
                        others = [other for other in parts if other is not part and other is not maps[0]]
                        return self._divided(node, result, place, found, others)
        return None

    def _divided(
        self, node: fx.Node, result: fx.Node, place: int, found: Measured, others: list[tuple[Any, int]]
    ) -> fx.Node:
        """Put the map of a normalised argument, times other factors, in the place of a product."""
        value: Any = result.args[place]
        source, turned = self._turned(value)
        new = self._scaled(_Layout(_size(source) or (), found).put(self._insert, source, None, None), found)
        new = self._insert(value.target, new, *value.args[1:]) if turned else new
        given = [new if at == place else other for at, other in enumerate(result.args[:2])]
        last = self._insert(result.target, *given)
        for other, power in others:
            last = self._insert(aten.mul.Tensor if power == 1 else aten.div.Tensor, last, other)
        self.rewriter.replace(node, last)
        return last

    def _turned(self, value: fx.Node) -> tuple[fx.Node, bool]:
        """Return of what a value is the transposed, and that it is; else itself."""
        shape = _size(value.args[0] if value.args else None) or ()
        if self.rewriter.name(value) in operations(Trait.PERMUTE) and len(shape) > 1:
            numbers = torch.arange(math.prod(shape)).reshape(shape)
            if torch.equal(moved_by(Step.of(value), numbers), numbers.mT):
                return value.args[0], True  # type: ignore[return-value]
        return value, False

    # Where a region may begin and end.

    def _regions(self, node: fx.Node) -> Iterator[_Region]:
        """Yield what a node may be the last step of: with the weights that it multiplies and adds, and without."""
        moves: list[fx.Node] = []
        whole: Any = node
        while self.rewriter.name(whole) in _MOVEMENTS and (whole is node or self._is_inner(whole, moves[0])):
            if whole.all_input_nodes != [whole.args[0]]:
                return
            moves.insert(0, whole)
            whole = whole.args[0]
        inner = not moves or self._is_inner(whole, moves[0])
        if self.rewriter.name(whole) == "add" and len(whole.args) == 2 and not whole.kwargs and inner:
            for value, bias in (whole.args, whole.args[::-1]):
                if (
                    isinstance(bias, fx.Node)
                    and self.rewriter.made_of(bias) == "weights"
                    and self.rewriter.made_of(value) == "inputs"
                    and _size(value) == _size(whole)
                    and self._is_inner(value, whole)
                ):
                    yield self._product(value, whole, bias, whole, moves)
        elif moves and inner and self.rewriter.name(whole) in ("mul", "div"):
            region = self._product(whole, moves[0], None, whole, moves)
            if region.gains:
                yield region
                return
        if self.rewriter.name(node) != "add":
            yield self._product(node, node, None, node, [])

    def _product(self, node: Any, user: fx.Node, bias: fx.Node | None, whole: fx.Node, moves: list[fx.Node]) -> _Region:
        region = _Region(
            moves[-1] if moves else whole, [], [], bias, _size(whole) or (), [Step.of(move) for move in moves]
        )
        own = self.rewriter.made_of(node)
        waiting: list[tuple[Any, int]] = [(node, 1)]
        users: dict[Any, fx.Node] = {}
        while waiting:
            part, power = waiting.pop()
            name = self.rewriter.name(part)
            inner = part is whole or (isinstance(part, fx.Node) and self._is_inner(part, users.get(part, user)))
            if name in ("mul", "div") and inner and len(part.args) == 2 and not part.kwargs:
                one, two = part.args
                users |= dict.fromkeys(part.all_input_nodes, part)
                waiting += [(two, power if name == "mul" else -power), (one, power)]
            elif name in _CASTS and inner and part is not whole and isinstance(part.args[0], fx.Node):
                users[part.args[0]] = part
                waiting.append((part.args[0], power))
            elif isinstance(part, fx.Node) and own == "inputs" and self.rewriter.made_of(part) == "weights":
                region.gains.append((part, power))
            else:
                region.factors.append((part, power))
        return region

    def _is_inner(self, node: Any, user: fx.Node) -> bool:
        """Whether a node is read by one other only, and may go with it."""
        return self.rewriter.only_for(node, user)

    def _starts(self, region: _Region) -> Iterator[tuple[fx.Node, list[Step]]]:
        """Yield the values of which, alone, a region is made: each with the nodes between, in order; the next first."""
        last = region.node
        value = last.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        heap: list[tuple[float, fx.Node]] = []
        steps: list[Step] = []
        seen: set[fx.Node] = set()

        def add(node: Any) -> None:
            if isinstance(node, fx.Node) and node not in seen and self.rewriter.made_of(node) != "constants":
                seen.add(node)
                heapq.heappush(heap, (-self.order[node], node))

        for factor, _ in region.factors:
            add(factor)
        summed = False
        while heap and len(steps) < _MOST_NODES:
            _, node = heapq.heappop(heap)
            own = node.meta.get("val")
            if (
                not heap
                and summed
                and isinstance(own, Tensor)
                and own.shape == value.shape
                and own.dtype == value.dtype
                and not self.rewriter.is_frozen(node)
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
        """Whether a node brings weights into what is made of inputs."""
        made = {self.rewriter.made_of(given) for given in node.all_input_nodes}
        return self.rewriter.made_of(node) == "inputs" and "weights" in made

    # What a region does.

    def _measured(
        self, region: _Region, start: fx.Node, steps: Sequence[Step], wide: Sequence[int] | None = None
    ) -> Measured | None:
        """Return what a region does; or what multiplying by its result does, in another shape."""

        def function(numbers: Tensor) -> Tensor:
            result = self._run(region, start, steps, numbers)
            return result if wide is None else numbers * result.reshape(wide)

        key = self._key(region, start, steps), str(wide)
        if key not in self.known:
            try:
                with torch.no_grad():
                    self.known[key] = measured(function, _size(start) or ())
            except NOT_ON_NUMBERS:
                self.known[key] = None  # what cannot be run on numbers alone is no norm that could be found
        return self.known[key]

    def _key(self, region: _Region, start: fx.Node, steps: Sequence[Step]) -> Hashable:
        """Return what two regions have in common that do the same."""
        number: dict[fx.Node, Any] = {start: -1} | {step.node: place for place, step in enumerate(steps)}

        def told(node: fx.Node) -> Any:
            return ("node", number[node]) if node in number else ("constant", id(node))

        parts = [(step.target, fx.map_arg(step.args, told), fx.map_arg(step.kwargs, told)) for step in steps]
        factors = [(told(f) if isinstance(f, fx.Node) else f, power) for f, power in region.factors]
        moves = [(move.target, move.args[1:], move.kwargs) for move in region.moves]
        return str((_size(start), parts, factors, region.shape, moves))

    def _run(self, region: _Region, start: fx.Node, steps: Sequence[Step], numbers: Tensor) -> Tensor:
        """Run a region in float64, without its gains and bias."""
        values: dict[fx.Node, Any] = {start: numbers.clone()}

        def get(node: fx.Node) -> Any:
            return values[node] if node in values else self.constants(node)

        for step in steps:
            values[step.node] = run_step(step, get)
        result = torch.ones((), dtype=torch.float64)
        for factor, power in region.factors:
            part = get(factor) if isinstance(factor, fx.Node) else factor
            result = result * part if power == 1 else result / part
        result = result.expand(region.shape)
        for move in region.moves:
            result = moved_by(move, result)
        return result

    # What is put in its place.

    def _is_plain(self, region: _Region, found: Measured, start: fx.Node, steps: Sequence[Step]) -> bool:
        """Whether a region is one operation already, so that there is nothing to do."""
        if found.masked:
            return self._masked(region, start, steps, put=False) is None
        if region.gains or region.bias is not None:
            return False
        names = [self.rewriter.name(step.node) for step in steps]
        told = {"layer": ("layer_norm",), "rms": ("rms_norm",)}.get(found.kind, (found.kind, f"_{found.kind}"))
        told = ("group_norm",) if found.split is not None and found.kind == "layer" else told
        known = [name for name in names if name in told]
        others = [name for name in names if name not in known and name not in _CASTS | _MOVEMENTS]
        return len(known) == 1 and not others

    def _put(self, region: _Region, found: Measured, start: fx.Node, steps: Sequence[Step]) -> fx.Node | None:
        insert, shape = self._insert, _size(start) or ()
        gains, bias = list(region.gains), region.bias
        if found.kind in ("softmax", "log_softmax"):
            if region.moves and (gains or bias is not None):
                return None
            target = aten.softmax.int if found.kind == "softmax" else aten.log_softmax.int
            if found.masked:
                start = self._masked(region, start, steps, put=True) or start
            node = insert(target, start, found.axes[0])
        else:
            if found.split is None and len(found.axes) > 1 and found.kind == "layer":
                # Behind a norm of all channels and places, gains of channels make it a group norm of one group.
                first = next((gain for gain, power in gains if power == 1), bias)
                axis = next((a for a in found.axes if self._vector(first, region, shape, a)), None)
                if axis is not None:
                    others = tuple(other for other in found.axes if other != axis)
                    found = replace(found, axes=others, split=(axis, shape[axis]))
            layout = _Layout(shape, found)
            weight = offset = None
            if found.exact and gains and gains[0][1] == 1:
                weight = self._vector(gains[0][0], region, shape, layout.channel)
                gains = gains[weight is not None :]
            if found.exact and found.factor == 1 and not gains and found.kind == "layer":
                offset = self._vector(bias, region, shape, layout.channel)
                bias = None if offset is not None else bias
            if region.moves and (gains or bias is not None):
                return None  # in front of the moves they tell more
            before = self.inserted
            node = layout.put(insert, start, weight, offset)
            if not found.exact:
                run = functools.partial(self._run, region, start, steps)
                node.meta["stands_for"] = run, self.inserted - before
        node = self._scaled(node, found)
        for gain, power in gains:
            node = insert(aten.mul.Tensor if power == 1 else aten.div.Tensor, node, gain)
        if bias is not None:
            node = insert(aten.add.Tensor, node, bias)
        if _dtype(node) != _dtype(region.node):
            node = insert(aten.to.dtype, node, _dtype(region.node))
        return node

    def _scaled(self, node: fx.Node, found: Measured) -> fx.Node:
        return node if found.factor == 1 else self._insert(aten.mul.Tensor, node, found.factor)

    def _masked(self, region: _Region, start: fx.Node, steps: Sequence[Step], *, put: bool) -> fx.Node | None:
        """Return what goes into the softmax of a region that leaves something out: what is left out is very low.

        Args:
            region: The region.
            start: The value of which it is made.
            steps: The operations between.
            put: Whether to put it into the graph where it is not there, and not only find out what it is made of.

        Returns:
            It, or a constant of which it is made; None if there is none.
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
                    low = self._insert(aten.log.default, self._insert(aten.to.dtype, others[0], _dtype(start)))
                    return self._insert(aten.add.Tensor, start, low)
            elif [node for node in step.node.all_input_nodes if node not in others] == [start]:
                value = run_step(step, lambda node: numbers if node is start else self.constants(node))
                hides = isinstance(value, Tensor) and torch.equal(value < _LOW, ~shown)
                if hides and torch.equal(value, numbers.where(shown, value)):
                    return step.node
        return None

    def _vector(
        self, weights: fx.Node | None, region: _Region, shape: tuple[int, ...], axis: int | None
    ) -> fx.Node | None:
        """Return the parameter of one axis that lies, in order, along an axis of the region's result."""
        way: list[fx.Node] = []
        vector = weights
        while isinstance(vector, fx.Node) and self.rewriter.name(vector) in _MOVEMENTS:
            way.append(vector)
            vector = vector.args[0]  # type: ignore[assignment]
        if axis is None or vector not in self.rewriter.capture.states or _size(vector) != (shape[axis],):
            return None
        places: Any = torch.arange(shape[axis])
        for node in way[::-1]:
            places = moved(node, places)
        if region.moves and isinstance(places, Tensor):
            places = places.expand(region.shape)
        for move in region.moves:
            places = moved_by(move, places)
        if not isinstance(places, Tensor):
            return None
        expected = torch.arange(shape[axis]).reshape(-1, *[1] * (len(shape) - axis - 1))
        return vector if bool((places == expected).all()) else None


class _Layout:
    """How a norm over any axes is one of torch's operations, which go over the last axes, or groups of channels."""

    def __init__(self, shape: tuple[int, ...], found: Measured) -> None:
        self.shape, self.found = shape, found
        kept = [axis for axis in range(len(shape)) if axis not in found.axes]
        if found.split is not None:
            kept.remove(found.split[0])
            self.permuted = [*kept, found.split[0], *found.axes]
            self.channel: int | None = found.split[0]
        else:
            self.permuted = [*kept, *found.axes]
            self.channel = found.axes[0] if len(found.axes) == 1 else None
        self.kept = kept

    def put(
        self, insert: Callable[..., fx.Node], start: fx.Node, weight: fx.Node | None, bias: fx.Node | None
    ) -> fx.Node:
        """Insert the operations, with gain and bias along the axis of the channels."""
        node: fx.Node = start
        found = self.found
        moved = self.permuted != list(range(len(self.shape)))
        if moved:
            node = insert(aten.permute.default, node, self.permuted)
        sizes = [self.shape[axis] for axis in self.permuted]
        if found.split is None:
            over = [self.shape[axis] for axis in found.axes]
            if found.kind == "layer":
                node = insert(aten.layer_norm.default, node, over, weight, bias, found.eps)
            else:
                node = insert(aten.rms_norm.default, node, over, weight, found.eps)
        else:
            axis, size = found.split
            groups, rest = self.shape[axis] // size, [self.shape[axis] for axis in found.axes]
            before = [self.shape[axis] for axis in self.kept]
            if found.kind == "layer":
                flat = [math.prod(before), self.shape[axis], *rest]
                if flat != sizes:
                    node = insert(aten.reshape.default, node, flat)
                node = insert(aten.group_norm.default, node, groups, weight, bias, found.eps)
                if flat != sizes:
                    node = insert(aten.reshape.default, node, sizes)
            else:
                node = insert(aten.reshape.default, node, [*before, groups, size, *rest])
                node = insert(aten.rms_norm.default, node, [size, *rest], None, found.eps)
                node = insert(aten.reshape.default, node, sizes)
                if weight is not None:
                    wide = insert(aten.reshape.default, weight, [-1, *[1] * len(rest)])
                    node = insert(aten.mul.Tensor, node, wide)
        if moved:
            node = insert(aten.permute.default, node, [self.permuted.index(axis) for axis in range(len(self.shape))])
        return node


def _beside(kind: str, place: int, own: tuple[int, ...], sizes: tuple[int, ...]) -> list[int] | None:
    """Return in which shape what multiplies the result of a linear map multiplies one of its arguments.

    Args:
        kind: Which map: ``linear`` or ``matmul``.
        place: Which argument, 0 or 1.
        own: Its shape.
        sizes: The shape of what multiplies the result.
    """
    if place == 0:
        return list(sizes) if sizes[-1] == 1 and len(own) == len(sizes) and sizes[:-1] == own[:-1] else None
    turned = kind == "linear"
    if len(own) == 2:
        fits = math.prod(sizes) == sizes[-1] == own[0 if turned else 1] > 1
        return ([sizes[-1], 1] if turned else [1, sizes[-1]]) if fits else None
    fits = len(own) == len(sizes) and sizes == (*own[:-2], 1, own[-1])
    return list(sizes) if fits else None


def _is_larger(new: Measured, old: Measured) -> bool:
    """Whether a region that begins before another one is the same norm, or takes the mean off besides."""
    same = replace(new, kind=old.kind, eps=old.eps) == old
    close = abs(new.eps - old.eps) <= 1e-5 * max(new.eps, old.eps)
    return same and close and (new.kind == old.kind or (new.kind, old.kind) == ("layer", "rms"))


def _size(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
