"""Spell weights with an axis of heads as matrices, where other layers of the same heads are matrices.

`einsum("bpd,hde->bphe", x, W)` is a layer whose outputs are numbered by (h, e). Stacks of such weights keep members apart
(docs/theory/intertwiners.md, 2.14), but a stack cannot share its units with a layer whose outputs are numbered by one
axis. So if some layers of a network are written in one way and some in the other, all are written as matrices. Weights
that are multiplied member by member (experts) remain stacks, and so do the weights before them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.contractions import VIEWS, permuted, reshaped
from lightning_sym.symmetry.tracing.nodes import equation_of, letters_of
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter

aten = torch.ops.aten
_CHANGES_AXES = operations(Trait.REGROUP)


def flatten_heads(r: Rewriter) -> int:
    """Rewrite products with weights of heads as linear layers, if the network mixes both spellings.

    Returns:
        The number of changes.
    """
    nodes = [node for node in r.graph.nodes if r.name(node) in ("einsum", "matmul")]
    found = [node for node in nodes if _of_heads(r, node) is not None and not _meets_members(r, node)]
    if not found or not any(_splits(r, node) for node in r.graph.nodes if r.name(node) == "linear"):
        return 0
    for node in found:
        for user in list(node.users):
            r.at = user
            if (made := _as_layer(r, node, user)) is not None:
                r.replace(user, made)
        if not node._erased:
            r.at = node
            r.replace(node, _as_layer(r, node, node))  # type: ignore[arg-type]
    return len(found)


class _Product(NamedTuple):
    """A product of a value and weights with three or more axes, of which each is summed or one of the result.

    Attributes:
        one: The letters of the value's axes.
        two: The letters of the weights' axes.
        out: The letters of the result's axes. Axes of size 1 of one factor, for the sake of the other, have "-" there.
        value: The value.
        weight: The weights.
    """

    one: str
    two: str
    out: str
    value: fx.Node
    weight: fx.Node


def _of_heads(r: Rewriter, node: fx.Node) -> _Product | None:
    """Return a product with weights of heads; None for other operations, and for matrices of separate members."""
    equation = equation_of(node)
    if equation is None:
        return None
    one, two, out = letters_of(equation)
    first, second = node.args[1] if r.name(node) == "einsum" else node.args[:2]  # type: ignore[misc]
    if r.made_of(first) == "weights":
        one, two, first, second = two, one, second, first
    if r.made_of(first) != "inputs" or r.made_of(second) != "weights" or len(two) < 3:
        return None
    own, other = (dict(zip(letters, r.shape(part), strict=True)) for letters, part in ((one, first), (two, second)))
    narrow = {letter for letter in out if other.get(letter) == 1 and letter in own}
    wide = {letter for letter in out if own.get(letter) == 1 and letter in other} - narrow
    one, two = ("".join("-" if letter in some else letter for letter in letters) for letters, some in (
        (one, wide), (two, narrow)))  # fmt: skip
    own, other = (dict(zip(letters, r.shape(part), strict=True)) for letters, part in ((one, first), (two, second)))
    alike = all(own.get(letter, size) == size for letter, size in other.items() if letter != "-")
    apart = all((letter in one) != (letter in out) for letter in two if letter != "-")
    known = all(letter in two + out + "-" for letter in one)
    several = len(two.replace("-", "")) > 2
    return _Product(one, two, out, first, second) if alike and apart and known and several else None


def _meets_members(r: Rewriter, node: fx.Node) -> bool:
    """Whether a value reaches a product with weights that have a matrix for each member."""
    left, met = [node], {node}
    while left:
        for user in left.pop().users:
            if user in met or not isinstance(user.meta.get("val"), Tensor) or user.op != "call_function":
                continue
            met.add(user)
            made = [r.made_of(given) for given in user.all_input_nodes]
            if r.name(user) in ("einsum", "matmul", "linear") and "weights" in made:
                if r.name(user) != "linear" and _of_heads(r, user) is None and _is_batched(r, user):
                    return True
                continue
            left.append(user)
    return False


def _is_batched(r: Rewriter, node: fx.Node) -> bool:
    equation = equation_of(node)
    if equation is None:
        return True
    one, two, out = letters_of(equation)
    return any(letter in one and letter in two for letter in out)


def _splits(r: Rewriter, node: fx.Node) -> bool:
    """Whether a linear layer has weights of heads, or reads or makes an axis that is several axes elsewhere."""
    value, weight = node.args[:2]
    while r.name(weight) in VIEWS | {"clone"} and isinstance(weight, fx.Node):
        weight = weight.args[0]
    if len(r.shape(weight)) > 2 and r.made_of(weight) == "weights":
        return True
    ways = [(value, value.args[0])] if r.name(value) in _CHANGES_AXES else []  # type: ignore[union-attr]
    left = [node]
    while left:
        for user in left.pop().users:
            if r.name(user) in _CHANGES_AXES:
                ways.append((user, user.args[0]))
            elif r.name(user) == "add":
                left.append(user)
    return any(r.shape(one)[-1] != r.shape(two)[-1] for one, two in ways)


def _as_layer(r: Rewriter, node: fx.Node, end: fx.Node) -> fx.Node | None:
    """Return the same product as a linear layer between moves.

    Args:
        r: The rewriter.
        node: The product.
        end: The product, or its only reader, if that adds weights to the units alone; else the result is None.
    """
    one, two, out, value, weight = _of_heads(r, node)  # type: ignore[misc]
    while "-" in one:
        value, one = r.insert(aten.select.int, value, one.index("-"), 0), one.replace("-", "", 1)
    while "-" in two:
        weight, two = r.insert(aten.select.int, weight, two.index("-"), 0), two.replace("-", "", 1)
    sizes: dict[str, int] = dict(zip(two, r.shape(weight), strict=True)) | dict(zip(one, r.shape(value), strict=True))
    rows = "".join(letter for letter in out if letter in two)
    columns = "".join(letter for letter in two if letter in one)
    rest = "".join(letter for letter in out if letter in one)

    def flat(part: fx.Node, letters: str, *groups: str) -> fx.Node:
        part = permuted(r, part, [letters.index(letter) for group in groups for letter in group])
        return reshaped(r, part, [math.prod(sizes[letter] for letter in group) for group in groups])

    bias = None
    if end is not node:
        if r.name(end) != "add" or end.kwargs or not r.only_for(node, end) or r.shape(end) != r.shape(node):
            return None
        bias = end.args[1] if end.args[0] is node else end.args[0]
        if r.made_of(bias) != "weights" or not isinstance(bias, fx.Node):
            return None
        whole = (1,) * (len(out) - len(r.shape(bias))) + r.shape(bias)
        if whole != tuple(sizes[letter] if letter in rows else 1 for letter in out):
            return None
        bias = reshaped(r, bias, [sizes[letter] for letter in out if letter in rows])
        bias = flat(bias, rows, rows)
    made: Any = r.insert(aten.linear.default, flat(value, one, *rest, columns), flat(weight, two, rows, columns))
    made = made if bias is None else r.insert(aten.add.Tensor, made, bias)
    made = reshaped(r, made, [sizes[letter] for letter in rest + rows])
    return permuted(r, made, [(rest + rows).index(letter) for letter in out])
