"""Spell sums and products of pieces in one way: common factors of terms, and separately added biases."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, memories_of, reduced
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.branches import pieces
from lightning_sym.symmetry.tracing.normal_form.contractions import layout, permuted, reshaped, shown, stored

aten = torch.ops.aten
_MOST = 16  # terms of a sum
_TINY = 1e-6  # a bound that keeps lengths from zero


class Term(NamedTuple):
    """A term of a sum, the operation that combines it, and whether it is added or subtracted."""

    node: fx.Node
    reader: fx.Node
    added: bool


def terms_of(r: Rewriter, node: fx.Node) -> list[Term]:
    """Return the terms of nested sums and differences of one dtype; empty for other nodes."""
    found: list[Term] = []
    waiting = [Term(node, node, True)]
    while waiting and len(found) <= _MOST:
        own, reader, added = waiting.pop()
        if not isinstance(own, fx.Node):
            return []
        inner = own is node or r.only_for(own, reader)
        alike = own.meta["val"].dtype == node.meta["val"].dtype and not own.kwargs
        if inner and alike and r.name(own) in ("add", "sub"):
            one, two = own.args[:2]
            waiting += [Term(one, own, added), Term(two, own, added == (r.name(own) == "add"))]  # type: ignore[arg-type]
        else:
            found.append(Term(own, reader, added))
    return [] if waiting or node.kwargs else found


def gathered(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a sum with a weight vector that belongs to another term: as a layer's bias, or inside its gain."""
    terms = terms_of(r, node)
    made = [r.made_of(term.node) for term in terms]
    if "weights" not in made or "inputs" not in made:
        return None
    for at, weights in enumerate(terms):
        if made[at] != "weights":
            continue
        for place, value in enumerate(terms):
            if made[place] != "inputs" or r.shape(value.node) != r.shape(node) or not value.added:
                continue
            total = _behind_gain(r, value, weights)
            if total is None and weights.added:
                total = _with_bias(r, value, weights.node)
            if total is not None:
                return summed(r, total, [term for own, term in enumerate(terms) if own not in (at, place)])
    return None


def summed(r: Rewriter, value: fx.Node, terms: Sequence[Term]) -> fx.Node:
    """Add terms to a value, the last one first."""
    for term in terms[::-1]:
        value = r.insert(aten.add.Tensor if term.added else aten.sub.Tensor, value, term.node)
    return value


def _behind_gain(r: Rewriter, value: Term, term: Term) -> fx.Node | None:
    """Return g (x + b) or g (x - b) from g x and g b; None for other terms."""
    if r.name(value.node) != "mul" or not r.only_for(value.node, value.reader):
        return None
    weights = moved = term.node
    while r.name(moved) in operations(Trait.MOVE) and moved.all_input_nodes == [moved.args[0]]:
        moved = moved.args[0]  # type: ignore[assignment]
    if r.name(moved) != "mul":
        return None
    for gain, own in _factors(value.node):
        for other, bias in _factors(moved):
            if r.made_of(gain) != "weights" or shown(r, gain)[0] is not shown(r, other)[0]:
                continue
            # Along one axis both are the same vector, so the bias is indexed by the gain's axis.
            sizes = r.shape(bias)
            if moved is not weights or gain is not other:
                if not len(r.shape(other)) == 1 == len(sizes) or r.shape(other) != sizes:
                    continue
                if gain.meta["val"].numel() != sizes[0] or weights.meta["val"].numel() != sizes[0]:
                    continue
                sizes = r.shape(gain)
            return r.insert(aten.mul.Tensor, with_parts(r, own, bias, sizes, added=term.added), gain)
    return None


def with_parts(r: Rewriter, value: fx.Node, weights: fx.Node, shape: Sequence[int], *, added: bool = True) -> fx.Node:
    """Add weights to a value in a given shape; terms of a sum are added one by one.

    Args:
        r: The rewriter.
        value: The value.
        weights: Made of weights alone.
        shape: The shape of the weights in the sum.
        added: Whether they are added rather than subtracted.
    """
    name, parts = r.name(weights), weights.args[:2]
    if name in ("add", "sub") and not weights.kwargs and all(r.shape(part) == r.shape(weights) for part in parts):
        value = with_parts(r, value, parts[0], shape, added=added)  # type: ignore[arg-type]
        return with_parts(r, value, parts[1], shape, added=added == (name == "add"))  # type: ignore[arg-type]
    return r.insert(aten.add.Tensor if added else aten.sub.Tensor, value, reshaped(r, weights, shape))


def _factors(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    one, two = node.args[:2]
    if isinstance(one, fx.Node) and isinstance(two, fx.Node):
        yield one, two
        yield two, one


def _with_bias(r: Rewriter, layer: Term, bias: fx.Node) -> fx.Node | None:
    """Return a linear layer or convolution with a weight vector as its bias; None if it does not fit."""
    node, name = layer.node, r.name(layer.node)
    if name != "linear" and not name.startswith("conv"):
        return None
    if not r.only_for(node, layer.reader) or argument(node, 2, "bias") is not None:
        return None
    count = 0 if name == "linear" else int(name.removesuffix("d")[-1])
    sizes, whole = r.shape(bias), r.shape(node)
    at = len(sizes) - 1 - count
    if at < 0 or sizes[at] != whole[-1 - count]:
        return None
    steps = bias.meta["val"].stride()
    if any(size > 1 and step for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)) if axis != at):
        return None
    vector = stored(r, bias, [at])
    if vector not in r.capture.states:
        return None
    rest = {key: value for key, value in node.kwargs.items() if key != "bias"}
    return r.insert(node.target, *node.args[:2], vector, *node.args[3:], **rest)


def scaled_weight(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a layer with a weight scaled by a vector: the vector scales its outputs or inputs instead."""
    weight: Any = node.args[1]
    name = r.name(node)
    if r.name(weight) != "mul" or not r.only_for(weight, node) or "transpose" in name:
        return None
    for matrix, gain in _factors(weight):
        own, sizes = r.shape(matrix), r.shape(gain)
        if shown(r, matrix)[0] not in r.capture.states or own != r.shape(weight) or r.made_of(gain) != "weights":
            continue
        sizes = (1,) * (len(own) - len(sizes)) + sizes
        axis = next((axis for axis in (0, 1) if max(sizes) == sizes[axis] == own[axis] > 1), None)
        if axis is None or (axis == 1 and argument(node, 6, "groups", 1) != 1) or gain.meta["val"].numel() != own[axis]:
            continue
        vector = reshaped(r, gain, [own[axis]])
        wide = reshaped(r, vector, [own[axis], *[1] * (len(own) - 2)])
        rest, bias = {key: value for key, value in node.kwargs.items() if key != "bias"}, argument(node, 2, "bias")
        if axis == 1:
            value = r.insert(aten.mul.Tensor, node.args[0], wide)
            return r.insert(node.target, value, matrix, bias, *node.args[3:], **rest)
        result = r.insert(node.target, node.args[0], matrix, None, *node.args[3:], **rest)
        result = r.insert(aten.mul.Tensor, result, wide)
        if bias is None:
            return result
        return with_parts(r, result, bias, [own[0], *[1] * (len(own) - 2)])
    return None


# Distances.


def squared_distances(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite sums of squares of two values minus twice their product, or its negative, as squares of differences."""
    terms = terms_of(r, node)
    if len(terms) != 3:
        return None
    squares = [_squared(r, term.node) for term in terms]
    for at, place in itertools.permutations(range(3), 2):
        term = terms[3 - at - place]
        added = terms[at].added
        if (one := squares[at]) is None or (two := squares[place]) is None or terms[place].added != added:
            continue
        factor, *factors = _scalar_product(r, term.node)
        sizes = [r.shape(terms[own].node) for own in (at, place)]
        counts = [math.prod(r.shape(own)) // r.shape(own)[axis] for own, axis in (one, two)]
        beside = sizes[0][-1:] == (1,) and {*sizes[1][-2:-1]} <= {1} and [*map(math.prod, sizes)] == counts
        if beside and factor == (-2 if term.added == added else 2) and [_held(*one), _held(*two)] == factors:
            ends = [r.insert(aten.transpose.int, own, axis, -1) for own, axis in (one, two)]
            wide, long = (r.insert(aten.unsqueeze.default, own, axis) for own, axis in zip(ends, (-2, -3), strict=True))
            square = r.insert(aten.pow.Tensor_Scalar, r.insert(aten.sub.Tensor, wide, long), 2)
            total = r.insert(aten.sum.dim_IntList, square, [-1])
            return total if added else r.insert(aten.neg.default, total)
    return None


def squares_of_parts(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of the squares of all parts of a value as one sum over an axis that counts the parts."""
    if node.kwargs or any(r.name(user) == "add" and r.only_for(node, user) for user in node.users):
        return None
    leaves, _ = r.leaves(node, {"add"})
    terms = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    values = {_root(r, term) if r.shape(term) == r.shape(node) else None for term in terms}
    if None in values or len(values) < max(len(terms), 2) or any(r.made_of(value) != "inputs" for value in values):
        return None
    whole = pieces(r, [_root(r, term) for term in terms])
    if whole is None:
        return None
    total = r.insert(aten.sum.dim_IntList, r.insert(aten.square.default, whole), [0])
    return (
        total
        if len(terms) == len(leaves)
        else r.insert(aten.add.Tensor, total, sum(own for own in leaves if not isinstance(own, fx.Node)))
    )


def of_length(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return a vector's length without the tiny lower bound that keeps a division of this vector from zero."""
    length: Any = node.args[0]
    low, absolute = r.number(argument(node, 1, "min")), r.name(length) in ("norm", "linalg_vector_norm")
    if low is None or not 0 < low <= _TINY or argument(node, 2, "max") is not None:
        return None
    inner: Any = length.args[0] if absolute or r.name(length) == "sum" else None
    vector = inner if absolute or inner is None else inner.args[0] if r.name(inner) == "abs" else None
    readers = [*node.users]
    for own in readers:
        readers += own.users if r.name(own) in operations(Trait.EXPAND) else ()
    found = [own for own in readers if r.name(own) not in operations(Trait.EXPAND)]
    divides = all(r.name(own) == "div" and own.args[0] is vector and own.args[1] is not vector for own in found)
    return length if vector is not None and divides else None


def modulus(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the absolute value of complex numbers as the norm of real and imaginary parts."""
    value: Any = node.args[0]
    if r.name(value) == "view_as_complex":
        return r.insert(aten.linalg_vector_norm.default, value.args[0], 2, [-1])
    if r.name(value) != "complex":
        return None
    total = r.insert(aten.add.Tensor, *(r.insert(aten.square.default, part) for part in value.args))
    return r.insert(aten.sqrt.default, total)


def _root(r: Rewriter, node: Any) -> Any:
    """Return the value whose squares a node holds; None if it holds no squares."""
    name = r.name(node)
    twice = (name == "mul" and node.args[0] is node.args[1]) or (name == "pow" and node.args[1] == 2)
    return node.args[0] if twice or name == "square" else None


def _held(node: fx.Node, axis: int) -> tuple[Any, ...]:
    """Return the memory layout of a value with one axis moved to the end."""
    return memories_of(node), layout(node.meta["val"].transpose(axis, -1))


def _squared(r: Rewriter, node: Any) -> tuple[fx.Node, int] | None:
    """Return (value, axis) if a node sums the value's squares along the axis, up to reshapes; else None."""
    while r.name(node) in operations(Trait.REGROUP | Trait.PERMUTE):
        long, before = ([size for size in r.shape(own) if size > 1] for own in (node, node.args[0]))
        if long != before:
            return None
        node = node.args[0]
    value: Any = _root(r, node.args[0]) if r.name(node) == "sum" else None
    axes = reduced(node, len(r.shape(value))) if value is not None else ()
    return (value, axes.pop()) if len(axes) == 1 else None


def sum_of_squares(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a sum of sums or differences of squares such that each square is summed at once.

    Rotations of units then leave every term alone, as in factorisation machines: `((sum v)^2 - sum v^2).sum(-1)`.
    """
    inner: Any = node.args[0]
    if not r.only_for(inner, node) or node.kwargs or not _holds_squares(r, inner):
        return None
    rank, keep = len(r.shape(inner)), argument(node, 2, "keepdim", False)
    gone = reduced(node, rank)
    if r.name(inner) == "sum" and not inner.kwargs:
        before = len(r.shape(inner.args[0]))
        own = reduced(inner, before)
        left = [axis for axis in range(before) if axis not in own] if rank < before else [*range(before)]
        total = r.insert(aten.sum.dim_IntList, inner.args[0], sorted(own | {left[axis] for axis in gone}))
        return reshaped(r, total, r.shape(node))
    if r.name(inner) == "linear":
        found = _squared_weights(r, inner)
        if gone != {rank - 1} or found is None:
            return None
        squares = r.insert(aten.square.default, permuted(r, *found))
        row = r.insert(aten.sum.dim_IntList, squares, [0], True)
        return reshaped(r, r.insert(aten.linear.default, inner.args[0], row), r.shape(node))
    parts = [part for part in inner.args if isinstance(part, fx.Node)]
    if r.name(inner) not in ("add", "sub", "neg", "mul") or inner.kwargs:
        return None
    if any(r.shape(part) != r.shape(inner) for part in parts) or (r.name(inner) == "mul" and len(parts) > 1):
        return None
    new = {part: r.insert(aten.sum.dim_IntList, part, sorted(gone), keep) for part in parts}
    scale = [part for part in inner.args if not isinstance(part, fx.Node)]
    if len(scale) > (r.name(inner) == "mul"):  # a number that is added
        return None
    return r.insert(inner.target, *(new.get(part, part) for part in inner.args))


def _holds_squares(r: Rewriter, node: Any) -> bool:
    """Whether a value is a linear combination of squares, perhaps summed over some axes."""
    if not isinstance(node, fx.Node):
        return False
    name, second = r.name(node), argument(node, 1, "other")
    if name == "square" or (name == "pow" and second == 2) or (name == "mul" and second is node.args[0]):
        return r.made_of(node) == "inputs"
    if name == "linear":
        return _squared_weights(r, node) is not None
    if name not in ("sum", "add", "sub", "neg") and (name != "mul" or r.number(second) is None):
        return False
    return any(_holds_squares(r, part) for part in node.all_input_nodes)


def _squared_weights(r: Rewriter, layer: fx.Node) -> tuple[fx.Node, tuple[int, int]] | None:
    """Return the matrix whose squared elements are the weight of a layer without bias, and the order of its axes."""
    weight: Any = layer.args[1]
    turned = r.name(weight) in operations(Trait.PERMUTE)
    root = _root(r, weight.args[0] if turned else weight)
    if root is None or r.made_of(weight) != "weights" or argument(layer, 2, "bias") is not None:
        return None
    return root, (1, 0) if turned else (0, 1)


def _scalar_product(r: Rewriter, node: Any) -> tuple[float, Any, Any]:
    """Return the factor and the memory layouts of two values if a node computes their scalar products.

    The summed axis is last in both layouts.
    """
    factor, node = multiple_of(r, node)
    if r.name(node) not in ("linear", "matmul") or argument(node, 2, "bias") is not None:
        return 0.0, None, None
    (one_by, one), (two_by, two) = (multiple_of(r, own) for own in node.args[:2])
    if len(r.shape(two)) < 2:
        return 0.0, None, None
    return factor * one_by * two_by, _held(one, -1), _held(two, -1 if r.name(node) == "linear" else -2)


def multiple_of(r: Rewriter, node: Any) -> tuple[float, Any]:
    """Return a number and a value with the node as their product."""
    factor = 1.0
    while (number := number_of(r, node)) or (r.name(node) == "mul" and r.number(node.args[0])):
        factor, node = factor * (number or r.number(node.args[0])), node.args[0 if number else 1]  # type: ignore[operator]
    return factor, node


def number_of(r: Rewriter, node: Any) -> float | None:
    """Return the number by which an operation multiplies its first argument; None for other operations."""
    if r.name(node) == "neg":
        return -1.0
    number = r.number(node.args[1]) if r.name(node) in ("mul", "div") else None
    return None if not number else number if r.name(node) == "mul" else 1 / number


# Softmaxes.


def normalised(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite exponentials or softmax weights, times factors, over their sum as a softmax with added logarithms."""
    value, total = node.args[:2]
    if r.name(total) != "sum" or not isinstance(value, fx.Node) or not isinstance(total, fx.Node):
        return None
    axes, rank = argument(total, 1, "dim"), len(r.shape(value))
    axes = [axes] if isinstance(axes, int) else axes
    if not axes or len(axes) != 1 or not argument(total, 2, "keepdim", False):
        return None
    axis = axes[0] % len(r.shape(total))
    if r.name(value) == "matmul" and total.args[0] is value.args[0] and axis == rank - 1:  # from the sum of products
        weights = r.insert(aten.div.Tensor, total.args[0], total)
        return r.insert(aten.matmul.default, weights, value.args[1])
    factors = _all_factors(r, value) if total.args[0] is value else []
    whole = [part for part in factors if r.shape(part) == r.shape(value) and _is_exponential(r, part, axis)]
    if len(factors) < 2 or not whole:
        return None
    logits = whole[0].args[0]
    for part in factors:
        if part is whole[0]:
            continue
        if (added := _logarithm(r, part, logits)) is None:
            return None
        logits = r.insert(aten.add.Tensor, logits, added)
    return r.insert(aten.softmax.int, logits, axis)


def _all_factors(r: Rewriter, node: fx.Node) -> list[Any]:
    """Return the factors of nested products; a masked value counts as a product with the mask."""
    factors: list[Any] = []
    waiting: list[Any] = [node]
    while waiting and len(factors) < _MOST:
        part = waiting.pop()
        name = r.name(part)
        if name == "mul":
            waiting += part.args[:2]
        elif name == "where" and 0 in (r.number(part.args[1]), r.number(part.args[2])):
            mask, one, two = part.args
            shown = r.number(two) == 0
            factors.append(mask if shown else r.insert(aten.logical_not.default, mask))
            waiting.append(one if shown else two)
        elif name == "masked_fill" and r.number(part.args[2]) == 0:
            factors.append(r.insert(aten.logical_not.default, part.args[1]))
            waiting.append(part.args[0])
        else:
            factors.append(part)
    return [] if waiting else factors


def _is_exponential(r: Rewriter, node: Any, axis: int) -> bool:
    name = r.name(node)
    over = name in ("softmax", "_softmax") and argument(node, 1, "dim") % len(r.shape(node)) == axis
    return (over or name == "exp") and r.made_of(node) == "inputs"


def _logarithm(r: Rewriter, node: Any, like: fx.Node) -> fx.Node | None:
    """Return the logarithm of a nonnegative factor; None if its sign is unknown."""
    if not isinstance(node, fx.Node):
        return None
    if r.name(node) == "exp":
        return node.args[0]  # type: ignore[return-value]
    kind, source = like.meta["val"].dtype, node
    while r.name(source) in operations(Trait.CAST) and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    while r.name(source) in operations(Trait.MOVE) and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    if source.meta["val"].dtype != torch.bool and r.name(source) not in operations(Trait.NEVER_NEGATIVE):
        number = r.constant(node)
        if number is None or bool((number < 0).any()):
            return None
    if node.meta["val"].dtype != kind:
        node = r.insert(aten.to.dtype, node, kind)
    return r.insert(aten.log.default, node)
