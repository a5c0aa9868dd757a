"""Cut arrays of weights whose members play different roles, as queries, keys and values, into one tensor for each role.

The product of a value with an array has an axis for the members. If all readers cut this axis at constant places, the
cuts move to the array and the biases: each result has its own weights. Then `pieces.py` cuts the parameters.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, equation_of, letters_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter

aten = torch.ops.aten
_SUMS = ("add", "sub")


class _Cut(NamedTuple):
    """A constant part of an axis: one place, which loses the axis (``stop`` is None), or several."""

    start: int
    stop: int | None


def cut_results(r: Rewriter) -> int:
    """Rewrite products with arrays of weights, of whose results only parts are read, as products with parts.

    Returns:
        The number of changes.
    """
    changes = 0
    for node in [own for own in r.graph.nodes if r.name(own) in ("einsum", "matmul")]:
        for axis in _axes_of_members(r, node):
            cuts = _cuts(r, node, axis)
            if not cuts:
                continue
            for user, (way, cut) in cuts.items():
                r.at = user
                try:
                    new = _part(r, way, axis, cut)
                except NoSpellingError:
                    break
                r.replace(user, new)
                changes += 1
            break
    if changes:
        r.erase_unread()
    return changes


def _axes_of_members(r: Rewriter, node: fx.Node) -> list[int]:
    """Return the axes of a product that only its weights have, other than the last one that the weights have."""
    if (equation := equation_of(node)) is None:
        return []
    one, two, out = letters_of(equation)
    first, second = _factors(r, node)
    if r.made_of(first) == "weights":
        one, two, first, second = two, one, second, first
    if r.made_of(first) != "inputs" or r.made_of(second) != "weights" or len(two) < 3:
        return []
    sizes = dict(zip(one, r.shape(first), strict=True))
    return [out.index(letter) for letter in two[:-2] if letter in out and sizes.get(letter, 1) == 1]


def _factors(r: Rewriter, node: fx.Node) -> tuple[Any, Any]:
    given: Any = node.args[1] if r.name(node) == "einsum" else node.args[:2]
    return given[0], given[1]


def _cuts(r: Rewriter, node: fx.Node, axis: int) -> dict[fx.Node, tuple[list[fx.Node], _Cut]]:
    """Return the readers that cut an axis, each with the operations before it; nothing if others read the value."""
    found: dict[fx.Node, tuple[list[fx.Node], _Cut]] = {}
    left = [([node], axis)]
    while left:
        way, at = left.pop()
        value = way[-1]
        if r.is_marked(value):
            return {}
        for user in value.users:
            name = r.name(user)
            if name in operations(Trait.PARTS):
                if _axis(user, name) % len(r.shape(value)) != at:
                    return {}
                for item in user.users:
                    if item.target is not operator.getitem:
                        return {}
                    found[item] = way, _part_of_list(user, name, item.args[1], at)
            elif (cut := _cut_by(r, user, value, at)) is not None:
                found[user] = way, cut
            elif (after := _axis_after(r, user, value, at)) is not None:
                left.append(([*way, user], after))
            else:
                return {}
    return found


def _axis(node: fx.Node, name: str) -> int:
    axis: int = argument(node, 1 if name == "unbind" else 2, "dim", 0)
    return axis


def _part_of_list(node: fx.Node, name: str, item: Any, axis: int) -> _Cut:
    parts: Any = node.meta["val"]
    item %= len(parts)
    if name == "unbind":
        return _Cut(item, None)
    start = sum(part.shape[axis] for part in parts[:item])
    return _Cut(start, start + parts[item].shape[axis])


def _cut_by(r: Rewriter, user: fx.Node, value: fx.Node, axis: int) -> _Cut | None:
    """Return the part of an axis that an operation selects; None for others."""
    name, rank, size = r.name(user), len(r.shape(value)), r.shape(value)[axis]
    if name not in ("select", "slice", "narrow") or user.args[0] is not value:
        return None
    if argument(user, 1, "dim", 0) % rank != axis:
        return None
    if name == "select":
        return _Cut(argument(user, 2, "index") % size, None)
    if argument(user, 4, "step", 1) != 1:
        return None
    places = range(size)
    if name == "narrow":
        start, length = argument(user, 2, "start"), argument(user, 3, "length")
        own = places[start : start + length]
    else:
        own = places[slice(argument(user, 2, "start"), argument(user, 3, "end"))]
    return _Cut(own.start, own.stop) if len(own) < size else None


def _axis_after(r: Rewriter, user: fx.Node, value: fx.Node, axis: int) -> int | None:
    """Return the axis of the members in the result of an operation; None if it treats members differently."""
    name, rank = r.name(user), len(r.shape(value))
    if name in _SUMS and not user.kwargs and len(user.args) == 2:
        others = [given for given in user.args if given is not value]
        alike = len(others) == 1 and r.made_of(others[0]) == "weights" and r.shape(user) == r.shape(value)
        return axis if alike else None
    if name == "permute":
        order: Any = user.args[1]
        return [place % rank for place in order].index(axis)
    if name == "unsqueeze":
        place: Any = user.args[1]
        return axis + int(place % (rank + 1) <= axis)
    return None


def _part(r: Rewriter, way: list[fx.Node], axis: int, cut: _Cut) -> fx.Node:
    """Insert the operations of a way on one part of the weights."""
    product, *rest = way
    equation = equation_of(product)
    assert equation is not None
    one, two, out = letters_of(equation)
    letter, alone = out[axis], cut.stop is None

    def of(item: Any, own: int) -> Any:
        """Return the part of a value with the members on one of its axes; members of size 1 are common to all."""
        single = r.shape(item)[own] == 1
        if alone:
            return r.insert(aten.select.int, item, own, 0 if single else cut.start)
        return item if single else r.insert(aten.slice.Tensor, item, own, cut.start, cut.stop)

    factors = [
        of(given, term.index(letter)) if letter in term else given
        for term, given in zip((one, two), _factors(r, product), strict=True)
    ]
    one, two, out = (term.replace(letter, "") if alone else term for term in (one, two, out))
    made = r.insert(aten.einsum.default, f"{one},{two}->{out}", factors)
    before = product
    for node in rest:
        rank, after = len(r.shape(before)), _axis_after(r, node, before, axis)
        assert after is not None
        given: Any = node.args
        if r.name(node) == "permute":
            order = [place % rank for place in given[1]]
            order = [place - (place > axis) for place in order if place != axis] if alone else order
            made = r.insert(aten.permute.default, made, order)
        elif r.name(node) == "unsqueeze":
            new = given[1] % (rank + 1)
            made = r.insert(aten.unsqueeze.default, made, new - (alone and new > axis))
        else:
            first = given[0] is before
            other = given[1 if first else 0]
            own = axis - rank + len(r.shape(other))
            other = of(other, own) if own >= 0 else other
            made = r.insert(node.target, *((made, other) if first else (other, made)))
        before, axis = node, after
    return made
