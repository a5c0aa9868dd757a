"""Spell sums over products in one way: of two values, of values and weights, or by one row of weights."""

import functools
import math
import string
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, equation_of, letters_of, moved, reduced
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import (
    VIEWS,
    are_vectors,
    before_sum,
    contract,
    permuted,
    plain_terms,
    reshaped,
    shown,
    without,
)

aten = torch.ops.aten


def number_of_weights(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite products of weights that make one number (``u @ W @ v``) as the sum of a product of all factors."""
    if math.prod(r.shape(node)) > 1 or r.made_of(node) != "weights":
        return None
    unused = iter(string.ascii_letters)
    if r.name(node) == "einsum":
        found = plain_terms(r, node.args[0], list(node.args[1]))  # type: ignore[arg-type]
        factors = None if found is None else [*zip(node.args[1], found[0], strict=True)]  # type: ignore[arg-type]
    elif r.name(node) == "sum":
        value: Any = node.args[0]
        factors = _factors(r, value, "".join(next(unused) for _ in r.shape(value)), node, unused)
    else:
        factors = _factors(r, node, "".join(next(unused) for _ in r.shape(node)), None, unused)
    products = [part for part, _ in factors or () if r.name(part) in _CONTRACTIONS]
    # Matrices mix the units of one scalar product.
    least = 2 if r.name(node) == "sum" else 3
    if not factors or len(factors) < least or products or (r.name(node) == "sum" and not _reads_product(r, node)):
        return None
    letters = "".join(dict.fromkeys("".join(term for _, term in factors)))
    wide = []
    for part, term in factors:
        ordered = permuted(r, part, [term.index(letter) for letter in letters if letter in term])
        sizes = dict(zip(term, r.shape(part), strict=True))
        wide.append(reshaped(r, ordered, [sizes.get(letter, 1) for letter in letters]))
    product = functools.reduce(lambda one, two: r.insert(aten.mul.Tensor, one, two), wide)
    return reshaped(r, r.insert(aten.sum.default, product), r.shape(node))


_CONTRACTIONS = operations(Trait.CONTRACT) - operations(Trait.CONVOLVE) - {"embedding", "bilinear", "einsum"} | {"dot"}


def _reads_product(r: Rewriter, node: fx.Node) -> bool:
    """Whether a sum reads an elementwise product of which a factor sums over further axes."""
    value: Any = node.args[0]
    return r.name(value) == "mul" and any(r.name(part) in _CONTRACTIONS for part in value.args[:2])


def _factors(
    r: Rewriter, value: Any, letters: str, reader: fx.Node | None, unused: Iterator[str]
) -> list[tuple[fx.Node, str]]:
    """Return factors and their letters whose product, summed over further letters, is a value."""
    if reader is None or r.only_for(value, reader):
        if r.name(value) == "mul" and all(r.shape(part) == r.shape(value) for part in value.args[:2]):
            return [own for part in value.args[:2] for own in _factors(r, part, letters, value, unused)]
        if r.name(value) == "dot":
            axis = next(unused)
            return [own for part in value.args[:2] for own in _factors(r, part, axis, value, unused)]
        plain = r.name(value) in _CONTRACTIONS and len(value.args) == 2
        equation = equation_of(value) if plain else None
        if equation is not None:
            *terms, out = letters_of(equation)
            known = dict(zip(out, letters, strict=True))
            every = {letter: known.get(letter) or next(unused) for letter in dict.fromkeys("".join(terms))}
            return [
                own
                for part, term in zip(value.args[:2], terms, strict=True)
                for own in _factors(r, part, "".join(every[letter] for letter in term), value, unused)
            ]
    return [(value, letters)]


def summed_members(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum or mean of products with each matrix of several (heads, experts) as one product with all.

    Weights may be added to the products.
    """
    value: Any = node.args[0]
    axes = reduced(node, len(r.shape(value)))
    if len(r.shape(node)) == len(r.shape(value)) or node.kwargs:
        return None
    total = _sum_of_members(r, value, node, axes)
    if total is None or r.name(node) == "sum":
        return total
    return r.insert(aten.div.Tensor, total, math.prod(r.shape(value)[axis] for axis in axes))


def _sum_of_members(r: Rewriter, value: fx.Node, reader: fx.Node, gone: set[int]) -> fx.Node | None:
    """Return the sum of a value along axes as one product, plus weights; None for values of other kinds."""
    if not r.only_for(value, reader):
        return None
    if r.name(value) == "add" and not value.kwargs:
        return _sum_of_terms(r, value, gone)
    rest = [axis for axis in range(len(r.shape(value))) if axis not in gone]
    if (own := _moved_axes(r, value)) is not None:
        source: Any = value.args[0]
        before = {at for axis in gone if (at := own[axis]) is not None}
        total = _sum_of_members(r, source, value, before) if before else None
        if total is None:
            return None
        left = [axis for axis in range(len(r.shape(source))) if axis not in before]
        order = [left.index(at) for axis in rest if (at := own[axis]) is not None]
        order += [at for at in range(len(left)) if at not in order]  # of size 1
        return reshaped(r, permuted(r, total, order), [r.shape(value)[axis] for axis in rest])
    equation = equation_of(value) if r.name(value) in ("matmul", "einsum") else None
    if equation is None:
        return None
    one, two, out = letters_of(equation)
    factors: Any = value.args[1] if r.name(value) == "einsum" else value.args[:2]
    sizes, others = (
        dict(zip(letters, r.shape(part), strict=True)) for letters, part in zip((one, two), factors, strict=True)
    )
    if {r.made_of(part) for part in factors} != {"inputs", "weights"}:
        return None
    if any(sizes.get(out[axis]) != others.get(out[axis]) for axis in gone):
        return None
    kept_letters = "".join(out[axis] for axis in rest)
    return r.insert(aten.einsum.default, f"{one},{two}->{kept_letters}", list(factors))


def _sum_of_terms(r: Rewriter, value: fx.Node, gone: set[int]) -> fx.Node | None:
    """Return the sum of a product and weights along axes."""
    terms: Any = value.args[:2]
    for product, weights in (terms, terms[::-1]):
        if r.made_of(weights) == "weights" and r.shape(product) == r.shape(value):
            sizes = (1,) * (len(r.shape(value)) - len(r.shape(weights))) + r.shape(weights)
            whole = all(sizes[axis] == r.shape(value)[axis] for axis in gone)
            total = _sum_of_members(r, product, value, gone) if whole else None
            if total is None:
                return None
            added = r.insert(aten.sum.dim_IntList, reshaped(r, weights, sizes), [*gone])
            return r.insert(aten.add.Tensor, total, added)
    return None


def _moved_axes(r: Rewriter, node: fx.Node) -> list[int | None] | None:
    """Return the axis of the source for each axis of a permuted value, None for new ones of size 1; else None."""
    if r.name(node) not in operations(Trait.PERMUTE | Trait.REGROUP) | {"select"}:
        return None
    before, after = r.shape(node.args[0]), r.shape(node)
    if r.name(node) in operations(Trait.PERMUTE):
        numbered = moved(node, torch.empty([2 + axis for axis in range(len(before))], device="meta"))
        return None if numbered is None else [size - 2 for size in numbered.shape]
    wide = [axis for axis, size in enumerate(before) if size > 1]
    if [before[axis] for axis in wide] != [size for size in after if size > 1]:
        return None
    return [wide.pop(0) if size > 1 else None for size in after]


def summed_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of an elementwise product if one factor is constant along some axis."""
    product: Any = node.args[0]
    axes = argument(node, 1, "dim")
    if (apart := _of_moved_factors(r, node)) is not None:
        return apart
    if not r.only_for(product, node) or r.name(product) != "mul" or node.kwargs.get("dtype") is not None:
        return None
    parts: list[Any] = list(product.args[:2])
    if (several := _of_three_factors(r, node, parts)) is not None:
        return several
    if not all(isinstance(part, fx.Node) for part in parts) or "rsqrt" in map(r.name, parts):
        return None  # a norm, perhaps
    made = {r.made_of(part) for part in parts}
    if made == {"constants", "inputs"} and axes:
        return _scaled_sum(r, node, parts)
    if len(r.shape(product)) == 1 and (found := product_of_rows(r, product)) is not None:
        return reshaped(r, found, r.shape(node))
    if not axes:
        return None
    last = len(r.shape(product)) - 1
    for value, total in (parts, parts[::-1]) if made == {"inputs"} and reduced(node, last + 1) == {last} else ():
        if r.name(total) == "sum" and len(r.shape(total)) == last + 1 and last > 1:
            column = permuted(r, total, [*range(last - 1), last, last - 1])
            if (found := before_sum(r, value, column)) is not None:
                return reshaped(r, found, r.shape(node))
    if "constants" in made or len({part.meta["val"].dtype for part in parts}) > 1:
        return None
    whole = r.shape(product)
    letters, axes = string.ascii_lowercase[: len(whole)], [axes] if isinstance(axes, int) else axes
    summed = {letters[axis] for axis in axes}
    terms: list[str] = []
    for at, part in enumerate(parts):
        own = letters[len(letters) - len(r.shape(part)) :]
        value = r.made_of(part) == "inputs"
        described = zip(own, r.shape(part), part.meta["val"].stride(), strict=True)
        gone = [
            letter for letter, size, step in described if (size == 1 if not value else 0) or (not step and size > 1)
        ]
        gone += [
            letter
            for letter, size in zip(own, r.shape(part), strict=True)
            if value and size == 1 < whole[letters.index(letter)]
        ]
        parts[at], own = without(r, part, own, list(dict.fromkeys(gone)))
        terms.append(own)
    if not all(letter in term for letter in summed for term in terms):
        return None
    repeated = set(letters) - set("".join(terms))  # axes along which both factors are repeated
    if repeated and made != {"weights"}:
        return None
    one, two = map(set, terms)
    if made == {"weights"} and (one == two or one & two != summed):  # scalar products of rows, such as their squares
        return None
    # Units may index an axis that two values share: besides the samples' axis, only heads of a matrix product may.
    if made == {"inputs"} and one == two:
        if not any(are_vectors(r, parts[0], parts[1], axis % len(whole)) for axis in axes):
            return None
    elif made == {"inputs"} and len((one & two) - summed) > 1 and (one <= two or two <= one):
        return None
    out = "".join(letter for letter in letters if letter not in summed | repeated)
    result = contract(r, terms[0], terms[1], out, parts[0], parts[1], batched=True)
    if result is None and one != two:
        result = r.insert(aten.einsum.default, f"{terms[0]},{terms[1]}->{out}", parts)
    if result is not None and repeated:
        kept = [(letter, size) for letter, size in zip(letters, whole, strict=True) if letter not in summed]
        thin = reshaped(r, result, [1 if letter in repeated else size for letter, size in kept])
        result = r.insert(aten.expand.default, thin, [size for _, size in kept])
    if result is not None and argument(node, 2, "keepdim", False):
        result = reshaped(r, result, r.shape(node))
    return result


def product_of_vectors(r: Rewriter, node: fx.Node) -> fx.Node:
    """Rewrite the scalar product of two vectors as that of two rows of a table, or otherwise as a sum of products."""
    return product_of_rows(r, node) or r.insert(aten.sum.default, r.insert(aten.mul.Tensor, *node.args[:2]))


def product_of_rows(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the scalar product of two vectors of weights that are also read elsewhere, as the rows of a table are.

    Rotations leave it alone. For vectors without further readers, scales of single elements say the same.
    """
    parts: Any = node.args[:2]
    alike = {len(r.shape(part)) for part in parts} == {1} and parts[0] is not parts[1]
    if not alike or any(r.made_of(part) != "weights" or len(part.users) < 2 for part in parts):
        return None
    return r.insert(aten.matmul.default, *parts)


def _of_moved_factors(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of a reshaped product of two values as that of a product of reshaped values."""
    view: Any = node.args[0]
    product: Any = view.args[0] if r.name(view) in operations(Trait.REGROUP) and r.only_for(view, node) else None
    if r.name(product) != "mul" or not r.only_for(product, view):
        return None
    parts = product.args[:2]
    if any(r.made_of(part) != "inputs" or r.shape(part) != r.shape(product) for part in parts):
        return None
    moved = [r.insert(view.target, part, *view.args[1:], **view.kwargs) for part in parts]
    return r.insert(node.target, r.insert(aten.mul.Tensor, *moved), *node.args[1:], **node.kwargs)


def _of_three_factors(r: Rewriter, node: fx.Node, parts: list[Any]) -> fx.Node | None:
    """Rewrite the sum of a product of two values and a weight with three or more axes as one contraction."""
    nested = [part for part in parts if r.name(part) == "mul" and r.only_for(part, node.args[0])]  # type: ignore[arg-type]
    if len(nested) != 1:
        return None
    factors = [*nested[0].args[:2], *(part for part in parts if part is not nested[0])]
    if sorted(r.made_of(own) for own in factors) != ["inputs", "inputs", "weights"]:
        return None
    letters, terms = string.ascii_lowercase[: len(r.shape(node.args[0]))], []
    for at, own in enumerate(factors):
        term = letters[len(letters) - len(r.shape(own)) :]
        thin = [letter for letter, size in zip(term, r.shape(own), strict=True) if size == 1]
        factors[at], term = without(r, own, term, thin)
        terms.append(term)
    gone = {letters[axis] for axis in reduced(node, len(letters))}
    counts = {letter: sum(letter in term for term in terms) for letter in letters}
    wide = all(len(term) > 2 for own, term in zip(factors, terms, strict=True) if r.made_of(own) == "weights")
    if not wide or len(gone) < 2 or any(counts[letter] < 1 + (letter in gone) for letter in letters):
        return None
    out = "".join(letter for letter in letters if letter not in gone)
    return reshaped(r, r.insert(aten.einsum.default, f"{','.join(terms)}->{out}", factors), r.shape(node))


def mean_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the mean over one axis of an elementwise product of two values as their scaled product."""
    product = node.args[0]
    if r.name(product) != "mul" or not isinstance(product, fx.Node) or not r.only_for(product, node) or node.kwargs:
        return None
    (first, second), gone = product.args[:2], reduced(node, len(r.shape(product)))
    if len(gone) != 1 or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    (axis,) = gone
    if r.shape(first) != r.shape(second) or not are_vectors(r, first, second, axis):
        return None
    total = r.insert(aten.sum.dim_IntList, product, *node.args[1:])
    return r.insert(aten.mul.Tensor, total, 1 / r.shape(product)[axis])


def _scaled_sum(r: Rewriter, node: fx.Node, parts: Sequence[Any]) -> fx.Node | None:
    for value, other in (parts, parts[::-1]):
        number = r.number(other)
        if number is not None and r.shape(value) == r.shape(node.args[0]):
            return r.insert(aten.mul.Tensor, r.insert(node.target, value, *node.args[1:], **node.kwargs), number)
    return None


def bilinear_row(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a layer of one output that reads the product of two layers as a bilinear form, which matrices mix.

    The layer is linear, or a convolution of width 1. The products of several outputs have scales only.
    """
    (read, weight), bias = node.args[:2], argument(node, 2, "bias")
    if not isinstance(read, fx.Node) or not _is_row(r, node):
        return None
    product = read.args[0] if r.name(read) in operations(Trait.PERMUTE) and r.only_for(read, node) else read
    if r.name(product) != "mul" or not isinstance(product, fx.Node):
        return None
    one, two = product.args[:2]
    if not _is_layer(r, one) or not _is_layer(r, two) or len(r.shape(one)) != len(r.shape(two)):
        return None
    if not r.only_for(product, node if read is product else read):
        return None
    if read is not product:
        one, two = (r.insert(read.target, part, *read.args[1:]) for part in (one, two))
    axis = len(r.shape(read)) - (1 if r.name(node) == "linear" else len(r.shape(weight)) - 1)
    if r.shape(one)[axis] != r.shape(two)[axis] or not are_vectors(r, one, two, axis):  # type: ignore[arg-type]
        return None
    scaled = r.insert(aten.mul.Tensor, one, r.insert(aten.select.int, weight, 0, 0))
    total = r.insert(aten.sum.dim_IntList, r.insert(aten.mul.Tensor, scaled, two), [axis], True)
    if bias is None:
        return total
    return r.insert(aten.add.Tensor, total, reshaped(r, bias, [1] * (len(r.shape(read)) - axis)))


def _is_row(r: Rewriter, node: fx.Node) -> bool:
    """Whether an operation contracts its input with one row of weights, at each place alone."""
    weight: Any = node.args[1]
    if r.made_of(weight) != "weights" or len(r.shape(weight)) < 2 or r.shape(weight)[0] != 1:
        return False
    if r.name(node) == "linear":
        return True
    stride, padding, groups = (
        argument(node, at, name, default)
        for at, name, default in ((3, "stride", [1]), (4, "padding", [0]), (6, "groups", 1))
    )
    one_place = set(r.shape(weight)[2:]) == {1} and set(stride) <= {1}
    return one_place and groups == 1 and not isinstance(padding, str) and set(padding) <= {0}


def _is_layer(r: Rewriter, node: Any) -> bool:
    """Whether a value shows the outputs of a layer, at most moved."""
    while r.name(node) in VIEWS or (r.name(node) == "getitem" and r.name(node.args[0]) in operations(Trait.PARTS)):
        node = node.args[0] if r.name(node) in VIEWS else node.args[0].args[0]
    return r.name(node) in {"linear", "embedding"} | operations(Trait.CONVOLVE)


# Layers on outer products.


class Outer(NamedTuple):
    """An outer product that a linear layer reads as a vector.

    Attributes:
        parts: The two factors, with an axis of size 1 for each axis of the other one; or the result of a sum, or of
            elementwise functions.
        lead: The number of leading axes.
        sizes: The sizes of the product's further axes.
    """

    parts: tuple[fx.Node, ...]
    lead: int
    sizes: tuple[int, ...]

    def read_by(self, r: Rewriter, weight: fx.Node, bias: Any) -> fx.Node:
        """Insert the layer, given its weight with an axis for each axis of the product."""
        lead, axes = string.ascii_lowercase[: self.lead], string.ascii_uppercase[: len(self.sizes)]
        told = [without(r, part, lead + axes, _of_size_one(r, part, lead + axes)) for part in self.parts]
        (value, first), *rest = told
        equation = ",".join([first, f"Z{axes}", *(term for _, term in rest)])
        result = r.insert(aten.einsum.default, f"{equation}->{lead}Z", [value, weight, *(part for part, _ in rest)])
        return result if bias is None else r.insert(aten.add.Tensor, result, bias)


def _of_size_one(r: Rewriter, part: fx.Node, letters: str) -> list[str]:
    return [own for own, size in zip(letters, r.shape(part), strict=True) if size == 1 and own.isupper()]


def outer_read_by(r: Rewriter, node: fx.Node) -> Outer | None:
    """Return the outer product (or sum) of two values that a linear layer reads, perhaps behind other functions."""
    flat: Any = node.args[0]
    value: Any = flat.args[0] if r.name(flat) in VIEWS else None
    product: Any = value
    while r.name(product) in operations(Trait.POINTWISE):
        product = product.args[0]
    column = r.name(product) == "matmul" and r.shape(product.args[0])[-1] == 1
    if not column and r.name(product) not in ("mul", "add", "sub"):
        return None
    lead, whole = r.shape(flat)[:-1], r.shape(product)
    sizes, parts = whole[len(lead) :], product.args[:2]
    if whole[: len(lead)] != lead or len(sizes) < 2 or r.shape(flat)[-1] != math.prod(sizes):
        return None
    if any(r.made_of(part) != "inputs" or len(r.shape(part)) != len(whole) for part in parts):
        return None
    one, two = ([size > 1 for size in r.shape(part)[len(lead) :]] for part in parts)
    if any(size > 1 and own == other for size, own, other in zip(sizes, one, two, strict=True)):
        return None
    apart = product is value and r.name(product) in ("mul", "matmul")
    return Outer(tuple(parts) if apart else (value,), len(lead), sizes)


def outer_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a linear layer on an outer product, with a weight that was an array: products of all elements."""
    weight: Any = node.args[1]
    if not weight.meta["val"].is_contiguous() or (outer := outer_read_by(r, node)) is None:
        return None
    shape = (r.shape(weight)[0], *outer.sizes)
    matrices = [one for one in shown(r, weight) if r.shape(one) == shape and one.meta["val"].is_contiguous()]
    return outer.read_by(r, matrices[0], argument(node, 2, "bias")) if matrices else None
