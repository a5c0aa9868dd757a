"""Normal form of softmaxes over the largest values only, and of sums over all steps up to each one."""

import operator
from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.masks import without_common
from lightning_sym.symmetry.tracing.normal_form.sums import terms_of

aten = torch.ops.aten
_LOW = -1e30
# Comparisons of a value with its k-th largest one that hold at lower values.
_LOWER = {"lt": False, "ge": True}


def softmax(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a softmax that is zero except at the k largest values as the softmax of these, scattered into zeros."""
    value, axis = node.args[:2]
    rank = len(r.shape(node))
    found = None if node.kwargs or len(node.args) > 2 else _best(r, value, int(axis) % rank)  # type: ignore[arg-type]
    if found is None:
        return without_common(r, node)
    values, places = found
    zeros = r.insert(
        aten.full.default, list(r.shape(node)), 0.0, dtype=node.meta["val"].dtype, device=node.meta["val"].device
    )
    shares = r.insert(aten.softmax.int, values, int(axis) % rank)  # type: ignore[arg-type]
    return r.insert(aten.scatter.src, zeros, int(axis) % rank, places, shares)  # type: ignore[arg-type]


def _best(r: Rewriter, value: Any, axis: int) -> tuple[fx.Node, fx.Node] | None:
    """Return the k largest values, and their places, if all others are replaced by low numbers."""
    if r.name(value) == "scatter" and len(value.args) == 4 and value.args[1] % len(r.shape(value)) == axis:
        base, _, places, values = value.args
        low = r.number(base)
        chosen = r.name(places) == "getitem" and places.args[1] == 1 and r.name(places.args[0]) == "topk"
        fits = isinstance(values, fx.Node) and r.shape(values) == r.shape(places)
        return (values, places) if low is not None and low <= _LOW and chosen and fits else None
    terms = terms_of(r, value) if isinstance(value, fx.Node) and r.name(value) == "add" else []
    if len(terms) != 2 or not all(term.added for term in terms):
        return None
    for scores, mask in ((terms[0].node, terms[1].node), (terms[1].node, terms[0].node)):
        if r.name(mask) != "masked_fill" or r.number(mask.args[0]) != 0 or (r.number(mask.args[2]) or 0) > _LOW:
            continue
        lower: Any = mask.args[1]
        turned = r.name(lower) in ("logical_not", "bitwise_not")
        lower = lower.args[0] if turned else lower
        if _LOWER.get(r.name(lower)) is turned and lower.args[0] is scores:
            best = _topk(r, lower.args[1], scores, axis)
            if best is not None:
                return r.insert(operator.getitem, best, 0), r.insert(operator.getitem, best, 1)
    return None


def _topk(r: Rewriter, least: Any, scores: fx.Node, axis: int) -> fx.Node | None:
    """Return the operation that found the k largest values if a node holds the least of these."""
    if r.name(least) == "unsqueeze" and r.name(least.args[0]) == "select":
        least = least.args[0]
    if r.name(least) not in ("slice", "select") or len(least.args) < 3 or not isinstance(least.args[0], fx.Node):
        return None
    values, along, first = least.args[:3]
    rank, count = len(r.shape(scores)), r.shape(values)[axis]
    best: Any = values.args[0] if r.name(values) == "getitem" and values.args[1] == 0 else None
    if r.name(best) != "topk" or best.args[0] is not scores or along % rank != axis or first % count != count - 1:
        return None
    options = [*best.args[2:], -1, True][:2]
    return best if options[0] % rank == axis and options[1] else None


def is_chosen(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the comparison of the places of the largest values with a number as an entry of indicators."""
    places, number = node.args[:2]
    best: Any = places.args[0] if r.name(places) == "getitem" and places.args[1] == 1 else None  # type: ignore[union-attr]
    if r.name(best) != "topk" or not isinstance(number, int):
        return None
    size = r.shape(best.args[0])[argument(best, 2, "dim", -1)]
    if not 0 <= number < size:
        return None
    indicators = r.insert(aten.one_hot.default, places, size)
    return r.insert(aten.to.dtype, r.insert(aten.select.int, indicators, -1, number), torch.bool)


def read_sums(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the product of queries and running sums of keys times values as attention to the steps up to each one."""
    args: Any = node.args
    queries, sums = args[:2]
    rank = len(r.shape(node))
    turned = r.name(sums) == "permute" and tuple(sums.args[1]) == _swapped(rank)
    sums = sums.args[0] if turned else sums
    if r.name(sums) != "cumsum" or r.name(sums.args[0]) != "mul" or sums.args[1] % rank != rank - 3:
        return None
    kept, summed = (rank - 2, rank - 1) if turned else (rank - 1, rank - 2)
    for keys, values in (sums.args[0].args, sums.args[0].args[::-1]):
        given = (queries, keys, values)
        if not all(isinstance(own, fx.Node) and r.shape(own)[:-2] == r.shape(sums)[:-2] for own in given):
            continue
        if r.shape(queries)[-2] == r.shape(keys)[kept] == r.shape(values)[summed] == 1:
            axes = (rank - 2, kept, summed)
            q, k, v = (r.insert(aten.select.int, own, axis, 0) for own, axis in zip(given, axes, strict=True))
            scores = r.insert(aten.matmul.default, q, r.insert(aten.permute.default, k, _swapped(rank - 1)))
            read = r.insert(aten.matmul.default, r.insert(aten.tril.default, scores), v)
            return r.insert(aten.unsqueeze.default, read, -2)
    return None


def _swapped(rank: int) -> tuple[int, ...]:
    """Return the permutation that swaps the last two axes."""
    return (*range(rank - 2), rank - 1, rank - 2)
