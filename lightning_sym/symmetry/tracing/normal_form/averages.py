"""Spell means with given or counted weights in one way: products with a softmax.

A sum with parameter-free weights, divided by the sum of these weights, preserves a constant that all terms share. So
does a product with a softmax: the softmax of logarithms equals the weights divided by their sum.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import ancestors, argument
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.graph.running import CLOSE, NOT_ON_NUMBERS, Constants, Step, run_steps
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped, stored

aten = torch.ops.aten
_MOVES, _CASTS = operations(Trait.MOVE), operations(Trait.CAST)
_OF_DATA = _MOVES | _CASTS | operations(Trait.ORDER) | {"eq", "ne", "logical_not", "bitwise_not", "mul", "exp", "sub"}
_MOST = 2**24  # elements of a table of indicators


def is_data(r: Rewriter, node: fx.Node) -> bool:
    """Whether a node depends on the network's inputs only."""
    if any(one in r.capture.states or r.made_of(one) == "weights" for one in ancestors(node)):
        return False
    return r.made_of(node) == "inputs"


def average(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a weighted sum divided by the sum of its weights, and weights divided by their sum."""
    total, count = node.args[:2]
    if not isinstance(total, fx.Node) or not isinstance(count, fx.Node) or r.shape(total) != r.shape(node):
        return None
    way: list[fx.Node] = []
    while r.name(total) in _MOVES and isinstance(total, fx.Node):
        way.append(total)
        total = total.args[0]
    logits = _logits(r, total.args[0]) if r.name(total) == "matmul" else None  # type: ignore[union-attr]
    if not _is_sum(r, count) or (logits is None and not is_data(r, count)):
        return None
    if logits is not None:
        weights, values = total.args  # type: ignore[union-attr]
        if not _sums_to_one(r, node, total, weights):  # type: ignore[arg-type]
            return None
        mean = r.insert(aten.matmul.default, r.insert(aten.softmax.int, logits, -1), values)
    elif (found := _scattered_mean(r, node, total, count)) is not None:
        mean = found
    elif r.name(total) == "matmul":
        weights, values = total.args  # type: ignore[union-attr]
        if not is_data(r, weights) or not _sums_to_one(r, node, total, weights):  # type: ignore[arg-type]
            return None
        mean = r.insert(aten.matmul.default, _shares(r, weights, -1), values)  # type: ignore[arg-type]
    elif not way and isinstance(total, fx.Node) and is_data(r, total):
        axes = [
            axis for axis, size in enumerate(r.shape(count)) if size == 1 < r.shape(node)[axis - len(r.shape(count))]
        ]
        whole = len(r.shape(count)) == len(r.shape(node)) and len(axes) == 1
        return _shares(r, total, axes[0]) if whole and _sums_to_one(r, node, None, total, axes[0]) else None
    else:
        return None
    for step in reversed(way):
        mean = r.insert(step.target, mean, *step.args[1:], **step.kwargs)
    return mean


def _logits(r: Rewriter, weights: Any) -> fx.Node | None:
    """Return the logarithms of weights that are exponentials; None if they are not."""
    way: list[fx.Node] = []
    while r.name(weights) in _MOVES and isinstance(weights, fx.Node):
        way.append(weights)
        weights = weights.args[0]
    if r.name(weights) != "exp":
        return None
    logits = weights.args[0]
    for step in reversed(way):
        logits = r.insert(step.target, logits, *step.args[1:], **step.kwargs)
    return logits  # type: ignore[no-any-return]


def _shares(r: Rewriter, weights: fx.Node, axis: int) -> fx.Node:
    """Return weights divided by their sum along an axis."""
    shares = r.insert(aten.softmax.int, r.insert(aten.log.default, weights), axis)
    shares.meta["stands_for"] = (lambda given: given / given.sum(axis, keepdim=True)), 2  # for negative weights
    return shares


def _is_sum(r: Rewriter, node: fx.Node) -> bool:
    while r.name(node) in _MOVES | _CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return r.name(node) == "sum" or _scattered(r, node) is not None


# Given weights.


def _sums_to_one(r: Rewriter, node: fx.Node, product: fx.Node | None, weights: fx.Node, axis: int = -1) -> bool:
    """Whether a quotient maps ones to ones, or consists of weights that sum to one, for any input.

    Args:
        r: The rewriter.
        node: The quotient.
        product: The product of the weights and a value; None if the quotient is of the weights themselves.
        weights: The weights.
        axis: The axis along which they sum to one.
    """
    steps: set[fx.Node] = set()
    given: set[fx.Node] = set()
    left = [node]
    while left:
        one = left.pop()
        if one in steps or one in given or r.made_of(one) == "constants":
            continue
        if one is product:
            steps.add(one)
            left.append(weights)
        elif one is node or r.name(one) in _OF_DATA | {"sum"}:
            steps.add(one)
            left += one.all_input_nodes
        else:
            given.add(one)
    if len(given) != 1 or len(steps) > 32:
        return False
    (source,) = given
    order = [one for one in r.graph.nodes if one in steps]
    numbers = [
        0,
        1,
        *(arg for step in order for arg in step.args if isinstance(arg, int) and not isinstance(arg, bool)),
    ]
    values: dict[fx.Node, Any] = {source: _sampled(source, numbers)}
    if product is not None:
        value = product.args[1]
        values[value] = torch.ones(r.shape(value), dtype=torch.float64)  # type: ignore[index]
    try:
        run_steps(map(Step.of, order), values, Constants())
    except NOT_ON_NUMBERS:
        return False
    result = values[node] if product is not None else values[node].sum(axis)
    result = result[~result.isnan()]  # 0 / 0, without terms
    return bool(len(result)) and bool(((result - 1).abs() <= CLOSE).all())


def _sampled(node: fx.Node, numbers: list[int]) -> Tensor:
    """Return random values for an input of the network."""
    held: Tensor = node.meta["val"]
    generator = torch.Generator().manual_seed(0)
    if held.is_floating_point():
        return torch.rand(held.shape, generator=generator, dtype=torch.float64) + 0.5
    chosen = torch.randint(len(numbers), held.shape, generator=generator)
    values = torch.tensor(numbers)[chosen]
    return values.bool() if held.dtype == torch.bool else values


# Weights that count terms.


class _Scattered(NamedTuple):
    """Values that an operation sums by an index.

    Attributes:
        axis: The axis of the sum.
        places: The destination of each value. Shape (values,), int64.
        size: The number of destinations.
        values: The values; None if all are ones.
    """

    axis: int
    places: fx.Node
    size: int
    values: fx.Node | None


def _scattered(r: Rewriter, node: Any) -> _Scattered | None:
    """Describe an operation that sums values by an index into zeros; None for other operations."""
    name = r.name(node)
    if name in ("index_add", "scatter_add", "scatter_reduce", "index_put") and isinstance(node, fx.Node):
        base, *given = node.args
        if r.number(base) != 0 or argument(node, 4, "alpha", 1) not in (1, "sum"):
            return None
        if name == "index_put":
            places, values, accumulate = given[0], given[1], argument(node, 3, "accumulate", False)
            if not isinstance(places, (list, tuple)) or len(places) != 1 or not accumulate:
                return None
            axis, index = 0, places[0]
        else:
            axis, index, values = given[:3]  # type: ignore[assignment]
            if name == "scatter_reduce" and (given[3] != "sum" or r.shape(values) != r.shape(index)):
                return None
        if not isinstance(index, fx.Node) or not isinstance(values, fx.Node):
            return None
        axis %= len(r.shape(node))
        if len(r.shape(index)) > 1:
            steps = index.meta["val"].stride()
            if any(
                step and size > 1
                for at, (step, size) in enumerate(zip(steps, r.shape(index), strict=True))
                if at != axis
            ):
                return None
            index = stored(r, index, [axis])  # type: ignore[assignment]
        rest = [tuple(size for at, size in enumerate(r.shape(each)) if at != axis) for each in (node, values)]
        if index is None or index.meta["val"].dtype != torch.int64 or rest[0] != rest[1]:
            return None
        return _Scattered(axis, index, r.shape(node)[axis], None if r.number(values) == 1 else values)
    if name == "matmul" and isinstance(node, fx.Node) and len(r.shape(node)) == 2:
        index = _indicated(r, node.args[0])
        return None if index is None else _Scattered(0, index, r.shape(node)[0], node.args[1])  # type: ignore[arg-type]
    return None


def _indicated(r: Rewriter, node: Any) -> fx.Node | None:
    """Return the index with one-hot vectors equal to a matrix's columns; None for other matrices."""
    transposed = False
    while r.name(node) in _CASTS | _MOVES:
        shape = r.shape(node.args[0])
        if r.name(node) in _MOVES:
            if len(shape) != 2 or r.shape(node) != shape[::-1]:
                return None
            transposed = not transposed
        node = node.args[0]
    plain = r.name(node) == "one_hot" and transposed and len(r.shape(node)) == 2
    return node.args[0] if plain else None


def _scattered_mean(r: Rewriter, node: fx.Node, total: Any, count: fx.Node) -> fx.Node | None:
    """Return indexed sums divided by the number of their terms as a product of shares and values."""
    while r.name(count) in _MOVES | _CASTS:
        count = count.args[0]  # type: ignore[assignment]
    summed, counted = _scattered(r, total), _scattered(r, count)
    if summed is None or counted is None or summed.values is None or counted.values is not None:
        return None
    size, terms = summed.size, r.shape(summed.places)[0]
    shape = [1] * len(r.shape(total))
    shape[summed.axis] = size
    # The number of terms is indexed by the axis of the sums and no other.
    alike = (
        counted.places is summed.places
        and len(r.shape(count)) == 1
        and r.shape(node.args[1])[-len(shape) :] == tuple(shape)
    )
    if not alike or summed.axis != 0 or size * terms > _MOST or len(shape) > 2:
        return None
    weights, values = _indicators(r, summed.places, size, summed.values), summed.values
    if (rows := _rows(r, values)) is not None:  # gathered by another index
        source, index = rows
        taken = _indicators(r, index, r.shape(source)[0], values)
        if size * r.shape(source)[0] > _MOST or terms * r.shape(source)[0] > _MOST:
            return None
        weights, values = r.insert(aten.matmul.default, weights, r.insert(aten.permute.default, taken, [1, 0])), source
    return r.insert(aten.matmul.default, _shares(r, weights, -1), values)


def _indicators(r: Rewriter, index: fx.Node, size: int, like: fx.Node) -> fx.Node:
    """Return the one-hot matrix of an index. Shape (places, entries)."""
    kind, device = like.meta["val"].dtype, like.meta["val"].device
    places = reshaped(r, r.insert(aten.arange.default, size, dtype=torch.int64, device=device), [size, 1])
    return r.insert(aten.to.dtype, r.insert(aten.eq.Tensor, places, index), kind)


def _rows(r: Rewriter, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (source, index) if a value consists of rows of a source at an index; else None."""
    if r.name(node) == "index":
        places: Any = node.args[1]
        index = places[0] if len(places) == 1 else None
    else:
        index = node.args[2] if r.name(node) == "index_select" and node.args[1] == 0 else None
    source = node.args[0] if isinstance(index, fx.Node) else None
    if not isinstance(source, fx.Node) or not isinstance(index, fx.Node) or r.made_of(index) != "inputs":
        return None
    return (source, index) if index.meta["val"].dtype == torch.int64 and len(r.shape(index)) == 1 else None
