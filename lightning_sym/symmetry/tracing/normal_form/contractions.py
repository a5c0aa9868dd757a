"""Spell products that sum over axes in one way: `linear` of values and weights, `matmul` of two values.

Axes have letters, as in `torch.einsum`.
"""

import itertools
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import (
    argument,
    equation_of,
    letters_of,
    memories_of,
    numbers_of,
    reduced,
)
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.unit_axes import axes_of_one, unit_axes

aten = torch.ops.aten
# Operations that show the memory of their first argument in another shape.
VIEWS = operations(Trait.REGROUP | Trait.PERMUTE | Trait.CUT | Trait.EXPAND) | {"contiguous", "alias", "detach", "to"}
_SWAPS = ("permute", "transpose", "t", "mT")
_MOST = 2**22  # elements of a tensor that are numbered


def permuted(r: Rewriter, node: fx.Node, axes: Sequence[int]) -> fx.Node:
    """Return a value with permuted axes."""
    order = list(axes)
    return node if order == list(range(len(order))) else r.insert(aten.permute.default, node, order)


def reshaped(r: Rewriter, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Return a value in another shape."""
    return node if r.shape(node) == tuple(shape) else r.insert(aten.reshape.default, node, list(shape))


def _ordered(r: Rewriter, node: fx.Node, letters: str, target: str) -> fx.Node:
    return permuted(r, node, [letters.index(letter) for letter in target])


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory layout of a tensor; strides of axes of size 1 are ignored."""
    strides = tuple(step if size > 1 else 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tuple(tensor.shape), strides, tensor.storage_offset(), tensor.dtype


def shown(r: Rewriter, node: fx.Node) -> list[fx.Node]:
    """Return the chain of views from the source of a node's memory to the node itself."""
    found = [node]
    while r.name(found[-1]) in VIEWS and isinstance(before := found[-1].args[0], fx.Node):
        if memories_of(before) != memories_of(node):
            break
        found.append(before)
    return found[::-1]


def stored(r: Rewriter, node: fx.Node, axes: Sequence[int]) -> fx.Node | None:
    """Return the tensor with the memory layout of some axes of a value, or None; a matrix may be transposed."""
    value: Tensor = node.meta["val"]
    whole = value[tuple(slice(None) if axis in axes else 0 for axis in range(value.ndim))]
    order = [sorted(axes).index(axis) for axis in axes]
    wanted = layout(whole.permute(order))
    for turned in (False, True) if len(axes) == 2 else (False,):
        for one in shown(r, node):
            own = one.meta.get("val")
            if isinstance(own, Tensor) and own.ndim == len(axes) and layout(own.mT if turned else own) == wanted:
                return permuted(r, one, [1, 0]) if turned else one
    return None


def _matrix(r: Rewriter, weight: fx.Node, letters: str, rows: str, columns: str) -> fx.Node | None:
    """Return weights as a matrix, after dropping letters along which they are constant.

    Weights with more axes than a matrix (experts, heads) keep their shape, unless they are views of a matrix.
    """
    gone = [letter for letter in letters if letter not in rows + columns]
    if len(rows) == len(columns) == 1:
        found = stored(r, weight, [letters.index(rows), letters.index(columns)])
        source = shown(r, weight)[0]
        if (
            found in (None, weight)
            and len(r.shape(source)) > 2
            and math.prod(r.shape(source)) > math.prod(r.shape(weight))
        ):
            return None  # for instance a part of a kernel
        return found or _ordered(r, *without(r, weight, letters, gone), rows + columns)
    sizes = dict(zip(letters, r.shape(weight), strict=True))
    shape = [math.prod(sizes[letter] for letter in part) for part in (rows, columns)]
    weight, letters = without(r, weight, letters, gone)
    weight = reshaped(r, _ordered(r, weight, letters, rows + columns), shape)
    found = stored(r, weight, [0, 1])
    return found if found is not weight or (not rows and len(columns) == 1) else None


def without(r: Rewriter, node: fx.Node, letters: str, gone: Sequence[str]) -> tuple[fx.Node, str]:
    """Select the first entry of some axes of a value; return it with the remaining letters."""
    for letter in gone:
        node = r.insert(aten.select.int, node, letters.index(letter), 0)
        letters = letters.replace(letter, "")
    return node, letters


def contract(
    r: Rewriter,
    one: str,
    two: str,
    out: str,
    first: fx.Node,
    second: fx.Node,
    bias: fx.Node | None = None,
    *,
    batched: bool = False,
) -> fx.Node | None:
    """Return the product of two values, summed over letters absent from the result; None without a plainer spelling.

    Args:
        r: The rewriter.
        one: The letters of the first factor's axes.
        two: The letters of the second factor's axes.
        out: The letters of the result's axes.
        first: First factor.
        second: Second factor.
        bias: Bias along the one letter that only the weights have.
        batched: Whether weights of each position or head, which no `linear` contracts, become a factor of `matmul`.
    """
    # If the factors' sizes along an axis differ, the factor of size 1 is constant along it.
    own = [dict(zip(letters, r.shape(part), strict=True)) for letters, part in ((one, first), (two, second))]
    gone = [letter for letter in one if letter in two and own[0][letter] != own[1][letter]]
    first, one = without(r, first, one, [letter for letter in gone if own[0][letter] == 1])
    second, two = without(r, second, two, [letter for letter in gone if own[1][letter] == 1])
    sizes = dict(zip(one + two, (*r.shape(first), *r.shape(second)), strict=True))
    if {letter for letter in one + two if (letter in one) != (letter in two)} - set(out) or set(out) - set(one + two):
        return None
    if set(one + two) <= set(out):
        return _product(r, one, two, out, first, second)
    made = r.made_of(first), r.made_of(second)
    if "constants" in made and (mean := _uniform(r, one, two, out, first, second)) is not None:
        return mean
    if "weights" in made and "inputs" in made:
        turned = made[0] == "weights"
        terms = (two, one, out, second, first) if turned else (one, two, out, first, second)
        rewritten = _linear(r, *terms, sizes, bias)
        shared = {letter for letter in one if letter in two}
        if rewritten is not None or not batched or not shared & set(out):
            return rewritten
    return _matmul(r, one, two, out, first, second)


def _linear(
    r: Rewriter,
    one: str,
    two: str,
    out: str,
    value: fx.Node,
    weight: fx.Node,
    sizes: dict[str, int],
    bias: fx.Node | None = None,
) -> fx.Node | None:
    strides = dict(zip(two, weight.meta["val"].stride(), strict=True))
    repeated = {
        letter for letter in two if letter in one and letter in out and (sizes[letter] == 1 or not strides[letter])
    }
    rows = "".join(letter for letter in out if letter in two and letter not in one)
    columns = "".join(letter for letter in two if letter in one and letter not in out)
    if not columns or set(two) - repeated - set(rows + columns):
        return None
    rest = "".join(letter for letter in out if letter not in rows)
    if (matrix := _matrix(r, weight, two, rows, columns)) is None:
        return None
    narrow = ""  # axes of size 1 that the value received only for this product
    for letter in rest:
        others = [axis for axis, other in enumerate(one) if other != letter]
        if sizes[letter] == 1 and (found := stored(r, value, others)) is not None:
            value, one, rest, narrow = found, one.replace(letter, ""), rest.replace(letter, ""), narrow + letter
    value = _ordered(r, value, one, rest + columns)
    kept = [sizes[letter] for letter in rest]
    if len(columns) > 1:
        value = reshaped(r, value, [*kept, math.prod(sizes[letter] for letter in columns)])
    result = r.insert(aten.linear.default, value, matrix, *([] if bias is None else [bias]))
    if not rows:
        result = r.insert(aten.select.int, result, -1, 0)
    elif len(rows) > 1:
        result = reshaped(r, result, [*kept, *(sizes[letter] for letter in rows)])
    result = _ordered(r, result, rest + rows, "".join(letter for letter in out if letter not in narrow))
    for axis, letter in enumerate(out):
        if letter in narrow:
            result = r.insert(aten.unsqueeze.default, result, axis)
    return result


def _product(r: Rewriter, one: str, two: str, out: str, first: fx.Node, second: fx.Node) -> fx.Node:
    parts = []
    for letters, part in ((one, first), (two, second)):
        sizes = dict(zip(letters, r.shape(part), strict=True))
        own = "".join(letter for letter in out if letter in letters)
        shape = [sizes.get(letter, 1) for letter in out]
        parts.append(reshaped(r, _ordered(r, part, letters, own), shape[out.find(own[0]) if own else len(shape) :]))
    return r.insert(aten.mul.Tensor, *parts)


def _uniform(r: Rewriter, one: str, two: str, out: str, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Return the summed product of a value and a uniform constant; None if the constant is not uniform."""
    if r.made_of(first) == "constants":
        one, two, first, second = two, one, second, first
    number = r.number(second)
    if number is None or not set(two) <= set(one):
        return None
    axes = [axis for axis, letter in enumerate(one) if letter not in out]
    rest = "".join(letter for letter in one if letter in out)
    summed = r.insert(aten.sum.dim_IntList, first, axes)
    return _ordered(r, r.insert(aten.mul.Tensor, summed, number), rest, out)


def _matmul(r: Rewriter, one: str, two: str, out: str, first: fx.Node, second: fx.Node) -> fx.Node | None:
    batch = "".join(letter for letter in out if letter in one and letter in two)
    summed = "".join(letter for letter in one if letter in two and letter not in out)
    own, other = (
        "".join(letter for letter in out if letter in letters and letter not in batch) for letters in (one, two)
    )
    if not own and not other:
        first, second = (_ordered(r, part, term, batch + summed) for part, term in ((first, one), (second, two)))
        axes = list(range(len(batch), len(batch + summed)))
        units = next((axis for axis in axes[::-1] if are_vectors(r, first, second, axis)), None)
        if units is not None:
            row, column = (r.insert(aten.movedim.int, part, units, -1) for part in (first, second))
            row, column = r.insert(aten.unsqueeze.default, row, -2), r.insert(aten.unsqueeze.default, column, -1)
            result = r.insert(aten.select.int, r.insert(aten.matmul.default, row, column), -1, 0)
            result = r.insert(aten.select.int, result, -1, 0)
            result = r.insert(aten.sum.dim_IntList, result, axes[:-1]) if axes[1:] else result
        else:
            result = r.insert(aten.sum.dim_IntList, r.insert(aten.mul.Tensor, first, second), axes)
        return _ordered(r, result, batch, out)
    for letters in (own, other, summed):
        if len(letters) > 1 and (joined := _with_units_joined(r, (one, two, out), letters, first, second)) is not None:
            return joined
    several = [part for part in (own, other) if len(part) > 1]
    if len(summed) > 1 or len(several) > 1:
        return None
    if several and "constants" in (r.made_of(first), r.made_of(second)):
        return None
    # If only one factor has several axes, one becomes the rows; the other factor is constant along the rest.
    (own, wide), (other, more) = (
        _rows(r, letters, part, free) for letters, part, free in ((one, first, own), (two, second, other))
    )
    wide += more
    given = [[axis for axis, letter in enumerate(batch + wide) if letter not in letters] for letters in (one, two)]
    first = _ordered(r, first, one, "".join(letter for letter in batch + wide if letter in one) + own + summed)
    second = _ordered(r, second, two, "".join(letter for letter in batch + wide if letter in two) + summed + other)
    for axis in given[0]:
        first = r.insert(aten.unsqueeze.default, first, axis)
    for axis in given[1]:
        second = r.insert(aten.unsqueeze.default, second, axis)
    batch += wide
    if not own:
        first = r.insert(aten.unsqueeze.default, first, -2)
    if not other:
        second = r.insert(aten.unsqueeze.default, second, -1)
    result = r.insert(aten.matmul.default, first, second)
    if not own or not other:
        result = r.insert(aten.squeeze.dim, result, -1 if own else -2)
    return _ordered(r, result, batch + own + other, out)


def _with_units_joined(
    r: Rewriter, terms: tuple[str, str, str], letters: str, first: fx.Node, second: fx.Node
) -> fx.Node | None:
    """Return the same product with all units of a factor on one axis, if they index several that are treated alike.

    Args:
        r: The rewriter.
        terms: The letters of both factors and of the result.
        letters: Letters that occur in the same terms.
        first: First factor.
        second: Second factor.
    """
    one, two, out = terms
    sides = [(term, part) for term, part in ((one, first), (two, second)) if letters[0] in term]
    units = [{term[axis] for axis in axes_of_one(r, part)} for term, part in sides]
    group = "".join(letter for letter in letters if all(letter in own for own in units))
    if len(group) < 2 or any(r.made_of(part) != "inputs" for part in (first, second)):
        return None
    sizes = dict(zip(one + two, (*r.shape(first), *r.shape(second)), strict=True))
    given, narrow = [], []
    for term, part in ((one, first), (two, second)):
        rest = "".join(letter for letter in term if letter not in group)
        part = _ordered(r, part, term, rest + group) if group[0] in term else part
        given.append(reshaped(r, part, [*map(sizes.__getitem__, rest), -1]) if group[0] in term else part)
        narrow.append(rest + group[0] if group[0] in term else term)
    rest = "".join(letter for letter in out if letter not in group)
    end = group if group[0] in out else ""
    result = r.insert(aten.einsum.default, f"{narrow[0]},{narrow[1]}->{rest}{end[:1]}", given)
    return _ordered(r, reshaped(r, result, [sizes[letter] for letter in rest + end]), rest + end, out)


def are_vectors(r: Rewriter, first: fx.Node, second: fx.Node, axis: int) -> bool:
    """Return whether two values of one shape differ, and units index one of their axes, or none."""
    if first is second or any(r.made_of(part) != "inputs" for part in (first, second)):
        return False
    units = [unit_axes(r, part) for part in (first, second)]
    return all(axis in own or not own for own in units)


def _rows(r: Rewriter, letters: str, factor: fx.Node, free: str) -> tuple[str, str]:
    """Split letters into one of rows, the last letter that indexes no units, and the others."""
    if len(free) < 2:
        return free, ""
    units = {letters[axis] for axis in unit_axes(r, factor)}
    row = next((letter for letter in free[::-1] if letter not in units), free[-1])
    return row, free.replace(row, "")


# The spellings.


def matmul(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite `matmul`, `mm`, `bmm` and `mv`."""
    args: Any = node.args
    first, second = args[:2]
    made = {r.made_of(first), r.made_of(second)}
    rewritten = _with_diagonal(r, first, second) or _unexpanded(r, node)
    if rewritten is not None:
        return rewritten
    equation = equation_of(node)
    if made == {"weights", "inputs"} and equation is not None:
        alike = len(r.shape(first)) == len(r.shape(second))
        rewritten = contract(r, *letters_of(equation), first, second, batched=not alike)
    elif (
        made == {"inputs"}
        and (rewritten := _associated(r, node, first, second) or before_sum(r, first, second)) is not None
    ):
        return rewritten
    if rewritten is None and "inputs" in made and r.shape(second)[-1:] == (1,):
        rewritten = _as_row(r, first, second) if 1 < len(r.shape(first)) == len(r.shape(second)) else None
    if rewritten is None and r.name(node) != "matmul":
        return r.insert(aten.matmul.default, first, second)
    return rewritten


def _unexpanded(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the product of an expanded value (an input for all members) as one that is broadcast."""
    factors: list[Any] = list(node.args[:2])
    for at, value in enumerate(factors):
        if r.name(value) not in operations(Trait.EXPAND) or len(r.shape(value.args[0])) < 2:
            continue
        own = [*factors[:at], value.args[0], *factors[at + 1 :]]
        batch = np.broadcast_shapes(*(r.shape(factor)[:-2] for factor in own))
        if r.shape(value)[-2:] == r.shape(value.args[0])[-2:] and batch == r.shape(node)[:-2]:
            return r.insert(aten.matmul.default, *own)
    return None


def split_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a product with flattened matrices, in their shape again, as a sum of the matrices (bases of weights)."""
    product: Any = node.args[0]
    if r.name(product) != "matmul" or r.made_of(node) != "weights" or not r.only_for(product, node):
        return None
    first, matrices = product.args
    while r.name(matrices) in operations(Trait.REGROUP):
        matrices = matrices.args[0]
    (rows, *sizes), letters = r.shape(node), string.ascii_lowercase[: len(r.shape(node)) - 1]
    if r.shape(first) != (rows, r.shape(matrices)[0]) or r.shape(matrices)[1:] != tuple(sizes) or len(sizes) < 2:
        return None
    return r.insert(aten.einsum.default, f"yz,z{letters}->y{letters}", [first, matrices])


def _associated(r: Rewriter, node: fx.Node, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Rewrite q (k v) as (q k) v if q k has no units on rows and columns, but k v has (linear attention)."""
    last = len(r.shape(node)) - 1
    for product, other in ((second, first), (first, second)):
        if not r.only_for(product, node) or len(r.shape(product)) <= last:
            continue
        way = product
        turned = r.name(product) in _SWAPS and r.only_for(product.args[0], product)
        if turned:
            way = product.args[0]  # type: ignore[assignment]
            if layout(way.meta["val"].mT) != layout(product.meta["val"]):
                continue
        if r.name(way) != "matmul" or not {last - 1, last} <= unit_axes(r, product):
            continue
        factors: list[Any] = list(way.args[:2])
        if any(len(r.shape(own)) <= last for own in (*factors, other)):
            continue
        swapped = [*range(last - 1), last, last - 1]
        if turned:
            factors = [permuted(r, own, swapped) for own in factors[::-1]]
        if product is first:  # from the other side
            factors = [permuted(r, own, swapped) for own in factors[::-1]]
            other = permuted(r, other, swapped)
        if r.name(factors[0]) in _SWAPS and layout(factors[0].args[0].meta["val"].mT) == layout(factors[0].meta["val"]):
            factors[0] = permuted(r, factors[0].args[0], swapped)  # in one spelling
        weights = r.insert(aten.matmul.default, other, factors[0])
        result = r.insert(aten.matmul.default, weights, factors[1])
        return permuted(r, result, swapped) if product is first else result
    return None


def before_sum(r: Rewriter, value: fx.Node, column: fx.Node) -> fx.Node | None:
    """Rewrite the product with a sum of rows as the sum of products with each row."""
    total, shape = shown(r, column)[0], r.shape(column)
    if r.name(total) != "sum" or shape[-1:] != (1,) or len(r.shape(value)) != len(shape):
        return None
    rows: Any = total.args[0]
    rank, before = len(r.shape(rows)), r.shape(rows)
    if rank != len(shape) or reduced(total, rank) != {rank - 2} or shape[:-1] != (*before[:-2], before[-1]):
        return None
    if layout(column.meta["val"][..., 0]) != layout(torch.empty(shape[:-1], dtype=column.meta["val"].dtype)):
        return None
    if not {rank - 1} <= unit_axes(r, rows) <= {*range(rank)} - {rank - 2}:
        return None
    products = r.insert(aten.matmul.default, value, permuted(r, rows, [*range(rank - 2), rank - 1, rank - 2]))
    return r.insert(aten.sum.dim_IntList, products, [-1], True)


def _as_row(r: Rewriter, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Rewrite the product of matrices and a column as a product of a row and matrices."""
    if r.shape(first)[-2] == 1:
        return None
    turned = list(range(len(r.shape(first))))
    turned[-2:] = turned[:-3:-1]
    row, matrices = permuted(r, second, turned), permuted(r, first, turned)
    return permuted(r, r.insert(aten.matmul.default, row, matrices), turned)


def _with_diagonal(r: Rewriter, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Return the product with a diagonal matrix as an elementwise product."""
    for diagonal, value in ((first, second), (second, first)):
        if r.name(diagonal) in ("diag", "diag_embed", "diagflat") and len(diagonal.args) == 1 and not diagonal.kwargs:
            vector: Any = diagonal.args[0]
            if len(r.shape(value)) > 1 and (len(r.shape(vector)) == 1 or r.name(diagonal) == "diag_embed"):
                wide = r.insert(aten.unsqueeze.default, vector, -1 if diagonal is first else -2)
                return r.insert(aten.mul.Tensor, value, wide)
    return None


def plain_terms(r: Rewriter, equation: str, values: Sequence[fx.Node]) -> tuple[list[str], str] | None:
    """Return the letters of all axes in an equation, including dots; None if a letter is repeated in a term."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms, unused = inputs.split(","), [letter for letter in string.ascii_letters if letter not in equation]
    counts = [len(r.shape(value)) - len(term.replace("...", "")) for term, value in zip(terms, values, strict=True)]
    if max(counts) > len(unused):
        return None
    dots = "".join(unused[: max(counts)])
    terms = [term.replace("...", dots[len(dots) - count :]) for term, count in zip(terms, counts, strict=True)]
    if not arrow:
        once = sorted(letter for letter in set(inputs) - set(".,") if inputs.count(letter) == 1)
        out = "..." * ("..." in inputs) + "".join(once)
    if any(len(set(term)) != len(term) for term in terms):
        return None
    return terms, out.replace("...", dots)


def einsum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite sums of products of values pair by pair, beginning with the first one that sums over some letter."""
    equation: Any = node.args[0]
    values: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    if (found := plain_terms(r, equation, values)) is None:
        return None
    terms, out = found
    for at, term in enumerate(terms):  # letters of a single term are summed first
        rest = out + "".join(terms[:at] + terms[at + 1 :])
        alone = [axis for axis, letter in enumerate(term) if letter not in rest]
        for axis in [axis for axis in reversed(alone) if r.shape(values[at])[axis] == 1]:
            values[at] = r.insert(aten.select.int, values[at], axis, 0)
            term = terms[at] = term[:axis] + term[axis + 1 :]
        alone = [axis for axis, letter in enumerate(term) if letter not in rest]
        if alone:
            values[at] = r.insert(aten.sum.dim_IntList, values[at], alone)
            terms[at] = "".join(letter for letter in term if letter in rest)
    if len(values) == 1:
        return permuted(r, values[0], [terms[0].index(letter) for letter in out])
    if len(values) > 2:
        pairs = itertools.combinations(range(len(terms)), 2)
        ends = {pair: {*out}.union(*(term for at, term in enumerate(terms) if at not in pair)) for pair in pairs}
        both = next((own for own in ends if ({*terms[own[0]]} & {*terms[own[1]]}) - ends[own]), (0, 1))
        between = "".join(dict.fromkeys(a for at in both for a in terms[at] if a in ends[both]))
        equation, parts = ",".join(terms[at] for at in both), [values[at] for at in both]
        product = r.insert(aten.einsum.default, f"{equation}->{between}", parts)
        left = [at for at in range(len(terms)) if at not in both]
        equation = f"{','.join([between, *(terms[at] for at in left)])}->{out}"
        return r.insert(aten.einsum.default, equation, [product, *(values[at] for at in left)])
    (one, two), (first, second) = terms, values
    rewritten = contract(r, one, two, out, first, second, batched=True)
    plain = f"{one},{two}->{out}"
    if rewritten is None and plain != equation:
        return r.insert(aten.einsum.default, plain, [first, second])
    return rewritten


def narrow_convolution(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite convolutions of width 1 with a matrix that received further axes, and kernels as long as an axis."""
    value, weight, bias, stride, padding, _, groups = (
        argument(node, at, name, default)
        for at, (name, default) in enumerate(
            [
                ("input", None),
                ("weight", None),
                ("bias", None),
                ("stride", [1]),
                ("padding", [0]),
                ("", 1),
                ("groups", 1),
            ]
        )
    )
    count = int(r.name(node)[4])
    channel = len(r.shape(value)) - count - 1
    zero = groups == 1 and not isinstance(padding, str)
    for at in range(count) if zero and r.shape(weight)[1] == 1 else ():
        # A kernel as long as an axis of its only channel: the places on this axis are channels (TextCNN).
        if r.shape(weight)[2 + at] == r.shape(value)[channel + 1 + at] > 1 and padding[at % len(padding)] == 0:
            turned = r.insert(aten.transpose.int, value, channel, channel + 1 + at)
            kernel = r.insert(aten.transpose.int, weight, 1, 2 + at)
            return r.insert(node.target, turned, kernel, *node.args[2:], **node.kwargs)
    plain = zero and set(stride) <= {1} and set(padding) <= {0}
    if not plain or r.made_of(weight) != "weights" or set(r.shape(weight)[2:]) != {1} or weight in r.capture.states:
        return None
    letters = string.ascii_lowercase[: channel + 1 + count]
    out = letters[:channel] + "Z" + letters[channel + 1 :]
    matrix = "Z" + letters[channel] + string.ascii_uppercase[:count]
    weight, matrix = without(r, weight, matrix, matrix[2:])
    if bias is None or r.made_of(value) == "inputs":
        return contract(r, letters, matrix, out, value, weight, bias)
    product = contract(r, letters, matrix, out, value, weight)  # of weights, as of learned queries
    bias = reshaped(r, bias, [*r.shape(bias), *[1] * count])
    return None if product is None else r.insert(aten.add.Tensor, product, bias)


# Parts of values.


def sources_of(r: Rewriter, part: fx.Node) -> list[fx.Node]:
    """Return the values that contain another one as a part of their memory, also through lists; the whole is first."""
    views = shown(r, part)
    while (whole := _taken_apart(r, views[0])) is not None:
        views = [*shown(r, whole), *views]
    held = views[0].meta.get("val")
    return views if isinstance(held, Tensor) and memories_of(views[0]) == memories_of(part) else []


def joined(r: Rewriter, parts: Sequence[Any], axis: int) -> fx.Node | None:
    """Return the value whose parts are joined again, in any regular order of its axes; None if a part is missing.

    Heads, for example, are split from the last axis and stacked along a new one, which is a view with other axes.
    """
    memories = [memories_of(part) for part in parts if isinstance(part, fx.Node)]
    if len(memories) < len(parts) or any(memory != memories[0] for memory in memories):
        return None
    if sum(math.prod(r.shape(part)) for part in parts) > _MOST:
        return None
    numbers = torch.cat([numbers_of(part.meta["val"]) for part in parts], axis)
    sources = [own for own in sources_of(r, parts[0]) if math.prod(r.shape(own)) == numbers.numel() and numbers.numel()]
    if not sources or any(own.meta["val"].dtype != parts[0].meta["val"].dtype for own in sources):
        return None
    for view in (*sources, *shown(r, parts[0])):
        if r.shape(view) == numbers.shape and torch.equal(numbers, numbers_of(view.meta["val"])):
            return view
        if (order := _rearranged(r, view, numbers, axis)) is not None:
            return r.insert(aten.index_select.default, view, axis % numbers.ndim, r.hold(order))
    found = (_in_loops(r, source, numbers) for source in sources)
    return next((own for own in found if own is not None), None)


def _in_loops(r: Rewriter, source: fx.Node, numbers: Tensor) -> fx.Node | None:
    """Return a value in a regular order of its elements, given by their numbers in memory."""
    held: Tensor = source.meta["val"]
    steps: tuple[int, ...] = layout(held)[1]
    in_memory = sorted(range(held.ndim), key=lambda at: -steps[at])
    own, places = numbers_of(held).permute(in_memory).reshape(-1).sort()
    at = torch.searchsorted(own, numbers).clamp(max=len(own) - 1)
    if not torch.equal(own[at], numbers):
        return None
    numbers = places[at]
    lines = [
        numbers[tuple(slice(None) if at == axis else 0 for at in range(numbers.ndim))] for axis in range(numbers.ndim)
    ]
    loops = [_loops((line - line[0]).tolist()) for line in lines]
    inner = sorted(((step, size) for own in loops for size, step in own), reverse=True)
    sizes, order = [size for _, size in inner], [inner.index((step, size)) for own in loops for size, step in own]
    if math.prod(sizes) != held.numel() or max(map(len, loops)) > 2:
        return None  # patches of an image: their places are no heads
    if not torch.equal(torch.arange(held.numel()).reshape(sizes).permute(order).reshape(numbers.shape), numbers):
        return None
    return reshaped(r, permuted(r, reshaped(r, permuted(r, source, in_memory), sizes), order), numbers.shape)


def _rearranged(r: Rewriter, view: fx.Node, numbers: Tensor, axis: int) -> Tensor | None:
    """Return the places on an axis of a value at which a rearrangement of it has its parts; None for other values."""
    if r.shape(view) != numbers.shape:
        return None
    own = numbers_of(view.meta["val"]).movedim(axis, 0)
    order = own.reshape(len(own), -1)[:, 0].argsort()
    wanted = numbers.movedim(axis, 0)
    order = order[wanted.reshape(len(own), -1)[:, 0].argsort().argsort()]
    return order if torch.equal(own[order], wanted) else None


def _loops(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and steps of the nested loops that run through offsets in memory, the outermost one first.

    Those of an irregular sequence run through others.
    """
    if len(offsets) == 1:
        return []
    size = next((at for at, offset in enumerate(offsets) if offset != at * offsets[1]), len(offsets))
    return [*_loops(offsets[::size]), (size, offsets[1])]


def _taken_apart(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the value that a list was split from, given one of its parts; else None."""
    if r.name(node) != "getitem" or r.name(node.args[0]) not in operations(Trait.PARTS):
        return None
    source = node.args[0].args[0]  # type: ignore[union-attr]
    return source if isinstance(source, fx.Node) else None
