"""Rows of weight matrices at integers: by index, gather, or a product with indicators. They become embeddings."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.graph.nodes import ancestors, argument, reduced
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import permuted, stored
from lightning_sym.symmetry.tracing.normal_form.indices import repeated_at

aten = torch.ops.aten


def _of_integers(r: Rewriter, node: fx.Node) -> bool:
    """Whether a node depends on integer inputs only, and on no choice of the network."""
    values = (
        leaf for one in ancestors(node) for leaf in pytree.tree_leaves(one.meta.get("val")) if isinstance(leaf, Tensor)
    )
    return not any(value.is_floating_point() for value in values)


def rows_at(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite rows of a weight matrix at integers as an embedding, and consecutive rows as a slice."""
    table, place = node.args[0], node.args[1]
    if r.made_of(table) == "inputs":
        return repeated_at(r, node)
    if r.name(node) == "index":
        if not isinstance(place, (list, tuple)) or len(place) != 1:
            return None
        place = place[0]
    elif node.args[1] != 0 or len(r.shape(node.args[2])) != 1:
        return None
    else:
        place = node.args[2]
    if r.made_of(table) != "weights" or len(r.shape(table)) != 2 or not isinstance(place, fx.Node):
        return None
    if place.meta["val"].dtype not in (torch.int64, torch.int32) or not _of_integers(r, place):
        return None
    if r.made_of(place) == "inputs":
        return r.insert(aten.embedding.default, table, place)
    known = place.meta.get("kept", r.constant(place))
    if known is not None and known.ndim > 1 and known.numel() and int(known.min()) >= 0:
        return r.insert(aten.embedding.default, table, place)  # as relative positions of pairs
    if known is None or "kept" in place.meta or known.ndim != 1 or not len(known):
        return None
    if bool((known.diff() != 1).any()) or int(known[0]) < 0:
        return None
    return r.insert(aten.slice.Tensor, table, 0, int(known[0]), int(known[-1]) + 1)


def _indicated(r: Rewriter, node: Any) -> Any:
    """Return the integers whose indicators a value holds along its last axis; None for other values."""
    if r.name(node) == "one_hot":
        return node.args[0]
    if r.name(node) not in ("index", "eq", "scatter"):
        return None
    table, place, *rest = node.args
    last, count = len(r.shape(node)) - 1, r.shape(node)[-1]
    if r.name(node) == "index":
        known = r.constant(table) if r.shape(table) == (count, count) else None
        return place[0] if len(place) == 1 and known is not None and bool((known == torch.eye(count)).all()) else None
    if r.name(node) == "scatter":
        (place, number), wanted = rest, r.number(table) == 0 and place % (last + 1) == last
        wanted = wanted and r.number(number) == 1
    else:
        table, place = (place, table) if r.shape(table)[-1:] == (1,) else (table, place)
        known = r.constant(table)
        wanted = known is not None and known.shape[-1:] == (count,) and bool((known == torch.arange(count)).all())
    return r.insert(aten.squeeze.dim, place, last) if wanted and r.shape(place)[last:] == (1,) else None


def rows_of_indicators(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the product of one-hot rows, or sums of them, and a weight matrix as an embedding."""
    value, weight = node.args[:2]
    sums: list[fx.Node] = []
    while r.name(value) in operations(Trait.CAST) | {"sum", "mean"}:
        sums += [value] if r.name(value) in ("sum", "mean") else []  # type: ignore[list-item]
        value = value.args[0]  # type: ignore[union-attr]
    place = _indicated(r, value)
    if not isinstance(place, fx.Node) or r.made_of(weight) != "weights" or not _of_integers(r, place):
        return None
    rows = r.insert(aten.embedding.default, permuted(r, weight, [1, 0]), place)  # type: ignore[arg-type]
    for total in reversed(sums):
        rank = len(r.shape(total.args[0]))
        axes = sorted(reduced(total, rank))
        if rank - 1 in axes:
            return None
        operation = aten.sum.dim_IntList if r.name(total) == "sum" else aten.mean.dim
        rows = r.insert(operation, rows, axes, argument(total, 2, "keepdim", False))
    bias = argument(node, 2, "bias")
    return rows if bias is None else r.insert(aten.add.Tensor, rows, bias)


def gathered_rows(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite rows of a weight matrix, gathered at input integers, as an embedding."""
    if (repeated := repeated_at(r, node)) is not None:
        return repeated
    args: Any = node.args
    table, axis, place = args[:3]
    if r.made_of(table) != "weights" or not isinstance(place, fx.Node) or not _of_integers(r, place):
        return None
    steps, of_places, axis = table.meta["val"].stride(), place.meta["val"].stride(), axis % len(r.shape(table))
    wide = [at for at, size in enumerate(r.shape(table)) if at != axis and size > 1 and steps[at]]
    if len(wide) != 1 or of_places[wide[0]] or r.shape(place)[wide[0]] != r.shape(table)[wide[0]]:
        return None
    matrix = stored(r, table, [axis, wide[0]])
    if matrix is None:
        return None
    rows = r.insert(aten.embedding.default, matrix, r.insert(aten.select.int, place, wide[0], 0))
    order = list(range(len(r.shape(place)) - 1))
    order.insert(wide[0], len(order))
    return permuted(r, rows, order)
