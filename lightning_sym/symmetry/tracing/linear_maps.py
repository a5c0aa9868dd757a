"""Finds linear layers and convolutions, however they are written, and puts one operation in the place of each.

A part of the graph that makes a value of one other value and one weight is run on numbers, which tells what it is; see
docs/theory/tracing.md, 3.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.invisible import MOVEMENTS
from lightning_sym.symmetry.tracing.layers import Layer, find_layer
from lightning_sym.symmetry.tracing.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.running import Constants, Step, UnknownError, is_plain_operation, run_step

_CONVOLUTIONS = {f"conv{kind}{count}d" for kind in ("", "_transpose") for count in (1, 2, 3)}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "mv", "einsum", "mul", *_CONVOLUTIONS}
_WINDOWS = {"unfold", "im2col"}
_CUTS = {"slice", "narrow", "select", "constant_pad_nd", "pad"}
_MOVED = MOVEMENTS | _WINDOWS | _CUTS
_LINEAR = _PRODUCTS | _MOVED | {"add", "sub", "neg", "sum", "cat", "stack", "getitem"}
_LINEAR |= {"to", "_to_copy", "clone", "contiguous", "dropout"}
_MOST_NODES = 400  # of a region
_MOST_FAILURES = 6  # regions that begin at one value and are tried in vain
_MOST_ELEMENTS = 2**24  # of a tensor on which a region is run


def respell_layers(rewriter: Rewriter) -> int:
    """Put one operation in the place of each linear layer or convolution that is written out.

    Args:
        rewriter: Of the captured network, whose graph is changed.

    Returns:
        The number of changes.
    """
    return _Respeller(rewriter).run()


@dataclass
class _Region:
    """What makes a value of others.

    Attributes:
        end: The value.
        starts: The values of which it is made.
        steps: The operations between that inputs go through, the last one first.
        weights: The parameters of which it is made.
        of_weights: The operations on these.
    """

    end: fx.Node
    starts: list[fx.Node] = field(default_factory=list)
    steps: list[fx.Node] = field(default_factory=list)
    weights: dict[fx.Node, None] = field(default_factory=dict)
    of_weights: dict[fx.Node, None] = field(default_factory=dict)


class _Respeller:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph = rewriter, rewriter.graph
        self.constants = Constants()
        self.failures: dict[fx.Node, int] = {}
        self._number()

    def _number(self) -> None:
        self.order = {node: place for place, node in enumerate(self.graph.nodes)}

    def run(self) -> int:
        """Go through the graph from its end, so that the largest regions are found first."""
        changes, node = 0, next(iter(reversed(self.graph.nodes)))
        while node.op != "root":
            before, self.rewriter.at = node.prev, node
            if node.users and (first := self._rewritten(node)) is not None:
                changes += 1
                before = first.prev
                self._number()
            node = before
        return changes

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """Replace the region that ends in a node, if there is one; return the first operation in its place."""
        if self.rewriter.name(node) not in _LINEAR or not _is_real(node):
            return None
        most = 0
        best: tuple[fx.Node, Layer, fx.Node, fx.Node | None] | None = None
        for region in self._regions(node):
            start = region.starts[0]
            if best is not None and self.rewriter.name(best[0]) not in _MOVED:
                break
            if not self._is_written_out(region) or self.failures.get(start, 0) >= _MOST_FAILURES:
                continue
            cuts = sum(self.rewriter.name(step) in _CUTS | _WINDOWS for step in region.steps)
            if best is not None and cuts == most:
                continue
            if (found := self._layer(region)) is not None:
                best, most = (start, *found), cuts
            elif best is None:
                self.failures[start] = self.failures.get(start, 0) + 1
        if best is None:
            return None
        start, layer, weight, bias = best
        before = node.prev
        try:
            new = layer.put(self.rewriter.insert, start, weight, bias)
            if new.meta["val"].dtype == node.meta["val"].dtype and before.next is not node:
                first = before.next
                self.rewriter.replace(node, new)
                return first
        except NoSpellingError:
            pass
        while node.prev is not before:
            self.graph.erase_node(node.prev)
        return None

    def _regions(self, end: fx.Node) -> Iterator[_Region]:
        """Yield what makes a value of one other value and weights, the smallest region first."""
        region = _Region(end)
        heap: list[tuple[int, fx.Node]] = []
        seen: set[fx.Node] = set()

        def add(node: fx.Node) -> bool:
            made = self.rewriter.made_of(node)
            if made == "inputs" and node not in seen:
                seen.add(node)
                heapq.heappush(heap, (-self.order[node], node))
            return made != "weights" or self._add_weights(region, node)

        add(end)
        while heap and len(region.steps) < _MOST_NODES:
            _, node = heapq.heappop(heap)
            if not heap and region.steps:
                region.starts = [node]
                if region.weights and _is_real(node):
                    yield region
            name = self.rewriter.name(node)
            inner = node is end or (set(node.users) <= seen and not self.rewriter.is_marked(node))
            if name not in _LINEAR or not inner or not is_plain_operation(node):
                return
            region.steps.append(node)
            moved = True
            for given in node.all_input_nodes:
                moved = add(given) and moved
            if not moved:
                return

    def _add_weights(self, region: _Region, node: fx.Node) -> bool:
        """Follow weights to the parameters of which they are parts; whether they are only moved."""
        left = [node]
        while left:
            node = left.pop()
            if node in self.rewriter.capture.states:
                region.weights[node] = None
            elif self.rewriter.made_of(node) == "weights" and node not in region.of_weights:
                if self.rewriter.name(node) not in _LINEAR or not is_plain_operation(node):
                    return False
                region.of_weights[node] = None
                left += node.all_input_nodes
        return True

    def _is_written_out(self, region: _Region) -> bool:
        """Whether a region is something else than one layer between movements that stay anyway."""
        names = [self.rewriter.name(step) for step in region.steps]
        products = [
            at
            for at, (name, step) in enumerate(zip(names, region.steps, strict=True))
            if name in _PRODUCTS
            and {self.rewriter.made_of(given) for given in step.all_input_nodes} >= {"inputs", "weights"}
        ]
        if not products or sum(len(self.rewriter.shape(weight)) > 1 for weight in region.weights) != 1:
            return False
        convolved = [at for at in products if names[at] in _CONVOLUTIONS]
        cut = any(name in _CUTS for at in convolved for name in names[:at]) or bool(convolved and region.of_weights)
        packed = any(self.rewriter.name(step) == "cat" for step in region.of_weights)
        return len(products) > 1 or cut or packed or not _WINDOWS.isdisjoint(names)

    def _layer(self, region: _Region) -> tuple[Layer, fx.Node, fx.Node | None] | None:
        """Return the layer that a region is, its weight and its bias; None if it is none."""
        (weight,) = (one for one in region.weights if len(self.rewriter.shape(one)) > 1)
        biases = [one for one in region.weights if one is not weight]
        start, shapes = region.starts[0], [self.rewriter.shape(one) for one in (*region.starts, weight, region.end)]
        if len(biases) > 1 or max(map(math.prod, shapes)) > _MOST_ELEMENTS:
            return None
        steps = sorted([*region.steps, *region.of_weights], key=self.order.__getitem__)
        ran = [Step.of(step) for step in steps]

        def made(numbers: dict[fx.Node, Tensor]) -> Tensor:
            values: dict[fx.Node, Any] = dict(numbers)

            def get(node: fx.Node) -> Any:
                return values[node] if node in values else self.constants(node)

            for step in ran:
                values[step.node] = run_step(step, get)
            result: Tensor = values[region.end]
            return result

        rest = {bias: torch.zeros(self.rewriter.shape(bias), dtype=torch.float64) for bias in biases}
        try:
            layer = find_layer(lambda x, w: made({start: x, weight: w, **rest}), *shapes)
            if layer is None or not biases:
                return None if layer is None else (layer, weight, None)
            numbers = torch.arange(1, len(rest[biases[0]]) + 1, dtype=torch.float64)
            ones = torch.ones(shapes[1], dtype=torch.float64)
            added = made({start: torch.zeros(shapes[0], dtype=torch.float64), weight: ones, biases[0]: numbers})
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, UnknownError):
            return None  # what cannot be run on numbers alone
        return (layer, weight, biases[0]) if layer.adds(added, numbers) else None


def _is_real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
