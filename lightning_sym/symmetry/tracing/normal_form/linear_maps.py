"""Find linear layers and convolutions in any spelling, and replace each by one operation.

A region is a part of the graph that computes a value from one other value and one weight. Running it on numbers
identifies the layer; see docs/theory/tracing.md, 3.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import equation_of, letters_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.graph.running import NOT_ON_NUMBERS, Constants, Step, is_plain_operation, run_steps
from lightning_sym.symmetry.tracing.labelling.planes import Planes, find_planes
from lightning_sym.symmetry.tracing.normal_form.contractions import permuted, reshaped
from lightning_sym.symmetry.tracing.normal_form.einsums import find_contraction, find_sum
from lightning_sym.symmetry.tracing.normal_form.grouped_layers import find_grouped_layer
from lightning_sym.symmetry.tracing.normal_form.layers import Bilinear, Layer, find_layer
from lightning_sym.symmetry.tracing.normal_form.sums import Term, summed, terms_of

aten = torch.ops.aten
FoundT = TypeVar("FoundT")

_PRODUCTS = (operations(Trait.CONTRACT) - {"embedding", "bilinear"}) | {"mul"}
_WINDOWS = {"unfold", "im2col"}
_CUTS = {"slice", "narrow", "select", "constant_pad_nd", "pad"}
_COMPLEX = {"complex", "real", "imag", "view_as_complex", "view_as_real", "_conj"}
_POOLS = operations(Trait.POOL)
_ADDED = {"add", "cat", "stack"} | _POOLS
_TOGETHER = {"cat", "view_as_real", "einsum", "matmul", "linear"} | operations(Trait.JOIN)
_MOVED = _WINDOWS | _CUTS | operations(Trait.MOVE)
_LINEAR = {"neg", "div", "sum", "mean", "getitem"} | _MOVED | _PRODUCTS | _POOLS | _COMPLEX
_LINEAR |= operations(Trait.CAST | Trait.JOIN | Trait.CAT | Trait.PICK)
_ROUNDING = 1e-12
_MOST_NODES = 400  # of a region
_MOST_FAILURES = 6  # failed regions per starting value
_MOST_ELEMENTS = 2**24  # of a tensor in a region


def parts_together(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a sum such that products of parts of one value with parts of one weight are added to each other first.

    Example: h + W_1 v_1 + g + W_2 v_2, where only the second and the last term are parts of one layer.
    """
    if any(r.name(user) in ("add", "sub") and r.only_for(node, user) for user in node.users):
        return None  # it is a part of another sum
    terms, together = terms_of(r, node), dict[Any, list[Term]]()
    for term in terms:
        together.setdefault(_factors(r, term.node) or term, []).append(term)
    if len(together) in (1, len(terms)) or all(_are_together(r, own) for own in together.values()):
        return None
    sums = [Term(summed(r, own[0].node, [term._replace(added=term.added == own[0].added) for term in own[1:]]),
                 node, own[0].added) for own in together.values()]  # fmt: skip
    first = next((term for term in sums if term.added), None)
    return None if first is None else summed(r, first.node, [term for term in sums if term is not first][::-1])


def _are_together(r: Rewriter, terms: list[Term]) -> bool:
    nodes = {term.node for term in terms}
    return len(terms) == 1 or any({own.node for own in terms_of(r, term.reader)} == nodes for term in terms)


def _factors(r: Rewriter, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the value and the matrix of which a term multiplies parts; None for other terms."""
    moved = _MOVED | {"neg", "sum", "getitem"} | operations(Trait.CAST)
    product = _source(r, node, moved)
    factors = {r.made_of(given): given for given in product.all_input_nodes if len(r.shape(given)) > 1}
    if r.name(product) not in _PRODUCTS or factors.keys() != {"inputs", "weights"}:
        return None
    value, weight = (_source(r, factors[own], moved) for own in ("inputs", "weights"))
    return (value, weight) if weight in r.capture.states else None


def _source(r: Rewriter, node: fx.Node, moved: set[str]) -> fx.Node:
    while r.name(node) in moved and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def respell_layers(rewriter: Rewriter) -> int:
    """Replace each written-out linear layer, convolution, mean, contraction or rotary embedding by one operation.

    Args:
        rewriter: The rewriter of the captured network. Changes the graph.

    Returns:
        The number of changes.
    """
    return rewriter.rewrite(dict.fromkeys(("add", "sub"), parts_together)) + _Respeller(rewriter).run()


@dataclass
class _Region:
    """A part of the graph that computes a value from others.

    Attributes:
        end: The computed value.
        starts: The input values of the region.
        steps: The operations on inputs inside, the last one first.
        weights: The parameters that the region reads.
        of_weights: The operations on these parameters.
        named: Whether a value inside has a name.
        names: The names of the operations on inputs, in the order of `steps`.
    """

    end: fx.Node
    starts: list[fx.Node] = field(default_factory=list)
    steps: list[fx.Node] = field(default_factory=list)
    weights: dict[fx.Node, None] = field(default_factory=dict)
    of_weights: dict[fx.Node, None] = field(default_factory=dict)
    named: bool = False
    names: list[str] = field(default_factory=list)


class _Respeller:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph = rewriter, rewriter.graph
        self.constants = Constants()
        self.failures: dict[fx.Node, int] = {}
        self.planes: dict[Any, Planes | None] = {}  # of regions, by their computation
        self.sums: dict[Any, tuple[list[int], float]] = {}
        self.named = False

    def run(self) -> int:
        """Replace all regions; those with named inner values come last."""
        changes = self.rewriter.rewrite_from_the_end(self._rewritten)
        self.named = True
        return changes + self.rewriter.rewrite_from_the_end(self._rewritten)

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """Replace the region that ends in a node, if there is one; return the next node."""
        if self.rewriter.name(node) not in _LINEAR or not _is_real(node):
            return None
        most = 0
        best: tuple[fx.Node, Layer, fx.Node, fx.Node | None] | None = None
        for region in self._regions(node):
            start = region.starts[0]
            if not region.weights:
                find = self._rotary
                if len(region.starts) > 1 or self._is_sum(region):
                    find = self._contracted if len(region.starts) > 1 else self._summed
                if region.named != self.named or (region.named and find != self._rotary):
                    continue
                put = self._on_numbers(find, region)
                if put is not None and (first := self._put(node, put)) is not None:
                    return first
                continue
            if best is not None and self.rewriter.name(best[0]) not in _MOVED:
                break
            if self.named or not self._is_written_out(region) or self.failures.get(start, 0) >= _MOST_FAILURES:
                continue
            cuts = sum(name in _CUTS | _WINDOWS for name in region.names)
            if best is not None and cuts == most and best[1].groups == 1:
                continue
            if (found := self._on_numbers(self._layer, region)) is not None:
                best, most = (start, *found), cuts
            elif best is None:
                self.failures[start] = self.failures.get(start, 0) + 1
        if best is None:
            return None
        start, layer, weight, bias = best
        return self._put(node, lambda: layer.put(self.rewriter.insert, start, weight, bias))

    def _put(self, node: fx.Node, make: Callable[[], fx.Node]) -> fx.Node | None:
        """Replace a node by the result of ``make``; return the node before, or None if it cannot be inserted."""
        before = node.prev
        try:
            new = make()
            if new.meta["val"].dtype == node.meta["val"].dtype and before.next is not node:
                first = before.next
                self.rewriter.replace(node, new)
                return first.prev
        except NoSpellingError:
            pass
        while node.prev is not before:
            self.graph.erase_node(node.prev)
        return None

    def _regions(self, end: fx.Node) -> Iterator[_Region]:
        """Yield the regions that compute a value from one or two other values, the smallest first."""
        region = _Region(end)
        waiting: list[fx.Node] = []
        seen: set[fx.Node] = set()
        shared: set[fx.Node] = set()  # parts with other readers, and what these are parts of

        def add(node: fx.Node) -> bool:
            made = self.rewriter.made_of(node)
            if made == "inputs" and node not in seen:
                seen.add(node)
                waiting.append(node)
            return made != "weights" or self._add_weights(region, node)

        add(end)
        while waiting and len(region.steps) < _MOST_NODES:
            if region.steps and len(waiting) <= 2 - bool(region.weights) and all(map(_is_real, waiting)):
                region.starts = sorted(waiting, reverse=True)
                yield region
            waiting.remove(node := max(waiting))
            name = self.rewriter.name(node)
            marked = node is not end and self.rewriter.is_marked(node)
            inner = node is end or (set(node.users) <= seen and (self.named or not marked))
            if node in shared or (not inner and not marked and name in _CUTS):
                shared.update(node.all_input_nodes)
                inner = name in _CUTS | operations(Trait.MOVE) and not marked
            region.named |= marked
            if name not in _LINEAR or not inner or not is_plain_operation(node):
                return
            region.steps.append(node)
            region.names.append(name)
            moved = True
            for given in node.all_input_nodes:
                moved = add(given) and moved
            if not moved:
                return

    def _add_weights(self, region: _Region, node: fx.Node) -> bool:
        """Trace weights back to their parameters; return whether all operations between are linear."""
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
        """Whether a region is more than one layer between moves that remain anyway."""
        names = region.names
        products = [
            at
            for at, (name, step) in enumerate(zip(names, region.steps, strict=True))
            if name in _PRODUCTS
            and {self.rewriter.made_of(given) for given in step.all_input_nodes} >= {"inputs", "weights"}
        ]
        if not products or sum(len(self.rewriter.shape(weight)) > 1 for weight in region.weights) != 1:
            return False
        convolved = [at for at in products if names[at] in operations(Trait.CONVOLVE)]
        cut = any(name in _CUTS for at in convolved for name in names[:at]) or bool(convolved and region.of_weights)
        packed = any(self.rewriter.name(step) == "cat" for step in region.of_weights)
        in_groups = any(_has_groups(self.rewriter, region.steps[at]) for at in products) and bool(region.of_weights)
        before = names[names.index("add") + 1 : products[0]] if "add" in names and len(region.weights) > 1 else []
        behind = not operations(Trait.MOVE).isdisjoint(before)  # a bias is added to the moved result
        return len(products) > 1 or cut or packed or in_groups or behind or not _WINDOWS.isdisjoint(names)

    def _on_numbers(self, find: Callable[[_Region], FoundT | None], region: _Region) -> FoundT | None:
        """Return the result of a search that runs a region on numbers; None if it cannot run, or adds a constant."""
        try:
            with torch.no_grad():
                if (found := find(region)) is None:
                    return None
                # A tiny constant, as the eps of a norm, hides among the rounding errors of other numbers.
                given = (*region.starts, *region.weights)
                nothing = {node: torch.zeros(self.rewriter.shape(node), dtype=torch.float64) for node in given}
                return None if bool(self._function(region)(nothing).any()) else found
        except NOT_ON_NUMBERS:
            return None

    def _layer(self, region: _Region) -> tuple[Layer, fx.Node, fx.Node | None] | None:
        """Return the layer that a region computes, its weight and its bias; None if it computes no layer."""
        (weight,) = (one for one in region.weights if len(self.rewriter.shape(one)) > 1)
        biases = [one for one in region.weights if one is not weight]
        start, shapes = region.starts[0], [self.rewriter.shape(one) for one in (*region.starts, weight, region.end)]
        if len(biases) > 1 or max(map(math.prod, shapes)) > _MOST_ELEMENTS:
            return None
        made = self._function(region)
        rest = {bias: torch.zeros(self.rewriter.shape(bias), dtype=torch.float64) for bias in biases}
        layer = _any_layer(lambda x, w: made({start: x, weight: w, **rest}), *shapes)
        if not biases:
            return layer, weight, None
        numbers = torch.arange(1, len(rest[biases[0]]) + 1, dtype=torch.float64)
        ones = torch.ones(shapes[1], dtype=torch.float64)
        added = made({start: torch.zeros(shapes[0], dtype=torch.float64), weight: ones, biases[0]: numbers})
        return (layer, weight, biases[0]) if layer.adds(added, numbers) else None

    def _function(self, region: _Region) -> Callable[[dict[fx.Node, Tensor]], Tensor]:
        """Return a function that computes a region's end from the values of its starts and weights."""
        steps = [Step.of(step) for step in sorted([*region.steps, *region.of_weights])]

        def made(numbers: dict[fx.Node, Tensor]) -> Tensor:
            values: dict[fx.Node, Any] = dict(numbers)
            run_steps(steps, values, self.constants)
            result: Tensor = values[region.end]
            return result

        return made

    def _spelling(self, region: _Region) -> Any:
        """Return a key of a region's computation: its operations and the elements of its constants."""
        steps = sorted(region.steps)
        names = {node: f"%{at}" for at, node in enumerate((*region.starts, *steps))}
        for node in {given for step in steps for given in step.all_input_nodes} - names.keys():
            if isinstance(value := self.constants(node), Tensor):
                numbers = sha256(value.resolve_conj().numpy().tobytes()).hexdigest()
                names[node] = f"{tuple(value.shape)} {value.dtype} {numbers}"
        arguments = (fx.map_arg((step.args, step.kwargs), lambda node: names.get(node, node)) for step in steps)
        return tuple((step.target, repr(own)) for step, own in zip(steps, arguments, strict=True))

    def _is_sum(self, region: _Region) -> bool:
        """Whether a region adds parts of a value to a smaller result."""
        names = region.names
        moved = bool(names[:-1]) and names[-1] in operations(Trait.MOVE) and "mean" in names
        smaller = math.prod(self.rewriter.shape(region.end)) < math.prod(self.rewriter.shape(region.starts[0]))
        return smaller and (moved or not _ADDED.isdisjoint(names))

    def _summed(self, region: _Region) -> Callable[[], fx.Node] | None:
        """Return a function that replaces a region that sums over whole axes by a mean."""
        (start,), shape = region.starts, self.rewriter.shape(region.end)
        made, own = self._function(region), self.rewriter.shape(start)
        if math.prod(own) > _MOST_ELEMENTS:
            return None
        if (key := (own, shape, self._spelling(region))) not in self.sums:  # equal in all layers
            self.sums[key] = find_sum(lambda x: made({start: x}), own, shape)
        axes, factor = self.sums[key]
        factor *= math.prod(own[axis] for axis in axes)

        def put() -> fx.Node:
            mean = reshaped(self.rewriter, self.rewriter.insert(aten.mean.dim, start, axes), shape)
            return mean if abs(factor - 1) < _ROUNDING else self.rewriter.insert(aten.mul.Tensor, mean, factor)

        return put

    def _contracted(self, region: _Region) -> Callable[[], fx.Node] | None:
        """Return a function that replaces a region that sums products of parts of two values by a contraction."""
        one, two = region.starts
        products = [step for step, name in zip(region.steps, region.names, strict=True) if name in _PRODUCTS]
        shapes = [self.rewriter.shape(node) for node in (one, two, region.end)]
        of_values = [
            step
            for step in products
            if [self.rewriter.made_of(given) for given in step.all_input_nodes] == ["inputs"] * 2
        ]
        if len(of_values) < 2 or max(map(math.prod, shapes)) > _MOST_ELEMENTS:
            return None
        made = self._function(region)
        equation, factor = find_contraction(lambda x, y: made({one: x, two: y}), *shapes)

        def put() -> fx.Node:
            total = self.rewriter.insert(aten.einsum.default, equation, [one, two])
            total = reshaped(self.rewriter, total, shapes[2])
            return total if factor == 1 else self.rewriter.insert(aten.mul.Tensor, total, factor)

        return put

    def _rotary(self, region: _Region) -> Callable[[], fx.Node] | None:
        """Return a function that replaces a region that rotates planes of coordinates by `rotary`."""
        (start,), shape = region.starts, self.rewriter.shape(region.end)
        names = {*region.names}
        if shape != self.rewriter.shape(start) or math.prod(shape) > _MOST_ELEMENTS or names.isdisjoint(_PRODUCTS):
            return None
        if names.isdisjoint(_TOGETHER):
            return None
        made, key = self._function(region), (shape, self._spelling(region))
        if key not in self.planes:  # equal in all layers
            self.planes[key] = find_planes(lambda x: made({start: x}), shape)
        if (found := self.planes[key]) is None:
            return None

        def put() -> fx.Node:
            order = [*(axis for axis in range(len(shape)) if axis != found.axis), found.axis]
            insert, hold = self.rewriter.insert, self.rewriter.hold
            value, last = permuted(self.rewriter, start, order), len(shape) - 1
            for step in region.steps:
                step.meta["watched"] = True  # if it remains for its name only
            rest, planes = found.alone, found
            if len(rest):
                planes = found.without_rest()
                kept = insert(aten.index_select.default, value, last, hold(rest))
                value = insert(aten.index_select.default, value, last, hold(found.rotated))
            tables = [hold(part.permute(order).contiguous()) for part in (planes.own, planes.other)]
            places = planes.partner.tolist(), planes.source.tolist()
            value = insert(torch.ops.lightning_sym.rotary.default, value, *tables, *places)
            value.meta["written_for"] = "rotary positions"  # for notes
            if len(rest):
                value = insert(aten.cat.default, [value, kept], last)
                back = torch.cat([found.rotated, rest]).argsort()
                value = insert(aten.index_select.default, value, last, hold(back))
            return permuted(self.rewriter, value, [order.index(axis) for axis in range(len(shape))])

        return put


def _has_groups(r: Rewriter, product: fx.Node) -> bool:
    """Whether both factors of a product, and the result, have an axis in common."""
    equation = equation_of(product) if product.args else None
    if equation is None:
        return False
    one, two, out = letters_of(equation)
    factors: Any = product.args[1] if r.name(product) == "einsum" else product.args[:2]
    wide = [
        {letter for letter, size in zip(letters, r.shape(part), strict=True) if size > 1}
        for letters, part in zip((one, two), factors, strict=True)
    ]
    return not wide[0].isdisjoint(wide[1] & {*out})


def _any_layer(function: Bilinear, *shapes: tuple[int, ...]) -> Layer:
    """Return the layer that a function computes, perhaps in groups."""
    try:
        return find_layer(function, *shapes)
    except NOT_ON_NUMBERS:
        return find_grouped_layer(function, *shapes)


def _is_real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
