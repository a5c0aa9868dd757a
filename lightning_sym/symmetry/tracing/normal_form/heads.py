"""Spell weights with an axis of heads as matrices, unless weights are multiplied member by member.

The product `einsum("bpd,hde->bphe", x, W)` is a layer with outputs numbered by (h, e). A stack of such weights keeps
its members apart (docs/theory/intertwiners.md, 2.14), but shares no units with a layer whose outputs one axis numbers.
So weights of heads are written as matrices, if the network has layers of both kinds or all of its arrays are weights of
heads. Weights that are multiplied member by member (experts) remain stacks, and so do the weights before them.

In the same way, stacked values become one value with the units of all, if the units of different layers never meet.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.coordinates import coordinates, varying_axes
from lightning_sym.symmetry.tracing.graph.nodes import ancestors, argument, equation_of, letters_of, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import VIEWS, permuted, reshaped
from lightning_sym.symmetry.tracing.normal_form.unit_axes import unit_axes

aten = torch.ops.aten
_MOST = 64  # operations on values of a stack
_PRODUCTS = {"einsum", "matmul"} | operations(Trait.PRODUCT)
_CHANGES_AXES = operations(Trait.REGROUP)


def spell_heads(r: Rewriter) -> int:
    """Rewrite values of heads as values with one axis for the units of all.

    Returns:
        The number of changes.
    """
    return _join_stacks(r) + _flatten_weights(r)


def _flatten_weights(r: Rewriter) -> int:
    """Rewrite products with weights of heads as linear layers, if all can be, or the network mixes both spellings."""
    nodes = [node for node in r.graph.nodes if r.name(node) in _PRODUCTS and _reads_array(r, node)]
    found = [node for node in nodes if _of_heads(r, node) is not None and _is_flat(r, node)]
    mixed = any(_splits(r, node) for node in r.graph.nodes if r.name(node) == "linear")
    if not found or not (mixed or len(found) == len(nodes) or any(_is_no_stack(r, node) for node in found)):
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


def _reads_array(r: Rewriter, node: fx.Node) -> bool:
    """Whether a product reads weights with three or more axes."""
    weights = [own for own in node.all_input_nodes if r.made_of(own) == "weights"]
    return any(sum(size > 1 for size in r.shape(own)) > 2 for own in weights)


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
    given: Any = node.args[1] if r.name(node) == "einsum" else node.args[:2]
    first, second = given
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


def _is_no_stack(r: Rewriter, node: fx.Node) -> bool:
    """Whether the first axis in memory of the weights of heads does not number the heads."""
    one, two, out, _, weight = _of_heads(r, node)  # type: ignore[misc]
    rows = [letter for letter in out if letter in two]
    columns = [letter for letter in one if letter in two and letter not in out]
    steps = zip(two, r.shape(weight), weight.meta["val"].stride(), strict=True)
    first = max((step, letter) for letter, size, step in steps if size > 1)[1]
    return first not in rows[:-1] + columns[:-1]


def _is_flat(r: Rewriter, node: fx.Node) -> bool:
    """Whether the outputs of all heads may be units of one axis."""
    _, two, out, _, _ = _of_heads(r, node)  # type: ignore[misc]
    rows = [axis for axis, letter in enumerate(out) if letter in two]
    apart = all(_stay_apart(r, node, member, rows[-1]) for member in rows[:-1])
    return apart and not _meets_members(r, node)


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


def _join_stacks(r: Rewriter) -> int:
    """Rewrite stacks of values with units of different layers as values with the units of all, if these stay apart."""
    changes = 0
    for node in [own for own in r.graph.nodes if r.name(own) == "cat"]:
        parts: Any = node.args[0]
        rank = len(r.shape(node))
        axis = argument(node, 1, "dim", 0) % rank
        if len(parts) < 2 or any(r.name(part) != "unsqueeze" or part.args[1] % rank != axis for part in parts):
            continue
        values = [part.args[0] for part in parts]
        units = [unit_axes(r, value) for value in values]
        if any(own != units[0] for own in units) or len(units[0]) != 1 or not _have_own_weights(r, values):
            continue
        (unit,) = units[0]
        if _stay_apart(r, node, axis, unit + (unit >= axis)):
            r.at = node
            joined = r.insert(aten.cat.default, values, unit)
            shape = list(r.shape(values[0]))
            shape[unit : unit + 1] = [len(values), shape[unit]]
            order = [own for own in range(rank) if own != unit]
            order.insert(axis, unit)
            r.replace(node, permuted(r, reshaped(r, joined, shape), order))
            changes += 1
    return changes


def _have_own_weights(r: Rewriter, values: Sequence[fx.Node]) -> bool:
    """Whether each value depends on weights on which no other value depends."""
    states = [{node for node in ancestors(value) if node in r.capture.states} for value in values]
    return all(own - set().union(*(other for other in states if other is not own)) for own in states)


def _stay_apart(r: Rewriter, stack: fx.Node, members: int, units: int) -> bool:
    """Whether no operation treats the units of all members equally before a layer reads all of them.

    Args:
        r: The rewriter.
        stack: A stack of values.
        members: The axis of the stack.
        units: The axis that units index.
    """
    left = [(stack, frozenset({members}), units)]
    met = set[tuple[fx.Node, fx.Node]]()
    while left:
        value, axes, units = left.pop()
        for user in [own for given in value.users for own in _results(r, given)]:
            if (user, value) in met:
                continue
            met.add((user, value))
            after = _axes_after(r, user, value, axes, units)
            if after is None or len(met) > _MOST:
                return False
            left += [(user, *after)] if after else []
    return True


def _results(r: Rewriter, node: fx.Node) -> list[fx.Node]:
    """Return the parts of a value that is split, or the operation itself."""
    return [*node.users] if r.name(node) in operations(Trait.PARTS) else [node]


def _axes_after(
    r: Rewriter, user: fx.Node, value: fx.Node, members: frozenset[int], units: int
) -> tuple[()] | tuple[frozenset[int], int] | None:
    """Return the axes of members and units in a result; () where all units are read; None where they meet."""
    name = r.name(user)
    item: Any = user.args[1] if user.target is operator.getitem else None
    move: Any = user if item is None else user.args[0]
    is_move = r.name(move) in operations(Trait.MOVE)
    if is_move and move.all_input_nodes == [value] and isinstance(user.meta["val"], Tensor):
        moves = [moved(move, coordinates(r.shape(value), (axis,))) for axis in (units, *members)]
        if any(own is None for own in moves):
            return None
        moves = moves if item is None else [own[item] for own in moves]
        two, *ones = (varying_axes(own) for own in moves)
        one = frozenset(axis for own in ones for axis in own)
        return () if one == {*two} else (one, two[0]) if len(two) == 1 and one and two[0] not in one else None
    if (equation := equation_of(user) if name in ("matmul", "einsum", "linear") else None) is not None:
        *terms, out = letters_of(equation)
        given: Any = user.args[1] if name == "einsum" else user.args[:2]
        own, other = terms if given[0] is value else terms[::-1]
        several, unit = [own[axis] for axis in members], own[units]
        if unit not in out:
            # Several heads of queries may read the same keys, of other places; of the same, it is a bilinear form, and
            # sums over further axes read kernels.
            read = given[given[0] is value]
            places = {letter for letter, size in zip(other, r.shape(read), strict=True) if size > 1} & {*out}
            shared = r.made_of(read) == "inputs" and not places <= {*own} and {*own} - {*out} == {unit}
            return () if shared or all(member not in out or member in other for member in several) else None
        kept = all(member in out for member in several)
        return (frozenset(out.index(member) for member in several), out.index(unit)) if kept else None
    each = operations(Trait.POINTWISE | Trait.CAST | Trait.JOIN | Trait.PRODUCT) | {"neg"}
    others = [r.made_of(own) for own in user.all_input_nodes if own is not value]
    alone = name in each and "inputs" not in others and r.shape(user) == r.shape(value)
    return (members, units) if alone else None
