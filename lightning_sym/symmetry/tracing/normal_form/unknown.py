"""Decompose operations without a rule as torch does, if all operations that result have rules."""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table

from lightning_sym.symmetry.tracing.graph.capture import operation_name
from lightning_sym.symmetry.tracing.graph.nodes import between
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.labelling.rules import has_rule


def decompose_unknown(r: Rewriter, known: Collection[str]) -> int:
    """Replace operations without a rule by torch's own decomposition, where this helps.

    Args:
        r: The rewriter of the captured network. Changes the graph.
        known: Names of further operations, which the normal form rewrites.

    Returns:
        The number of changes.
    """
    changes = 0
    for node in list(r.graph.nodes):
        if not node._erased and r.name(node) and not _is_known(r, node, known):
            changes += _decompose(r, node, known)
    return changes


def _is_known(r: Rewriter, node: fx.Node, known: Collection[str]) -> bool:
    plain = node.op != "call_function" or node.target is operator.getitem
    return plain or r.made_of(node) == "constants" or r.name(node) in known or has_rule(node.target, node)


def _decompose(r: Rewriter, node: fx.Node, known: Collection[str]) -> bool:
    """Replace an operation; return False if its parts are unknown, too, or torch does not decompose it."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    function = decomposition_table.get(target) or (target if target._can_decompose() else None)
    if function is None:
        return False
    r.at, before = node, node.prev
    node.meta.setdefault("written_for", operation_name(target))  # for notes: the network's own call
    try:
        results = r.write(function, *node.args, **node.kwargs)
    except (ValueError, NoSpellingError):
        results = None
    made = between(before, node)
    alone = isinstance(node.meta.get("val"), Tensor)
    pairs = [(node, results)] if alone else [(user, results[user.args[1]]) for user in node.users] if results else []
    useful = results is not None and all(_is_known(r, own, known) and not _reshapes(own) for own in made)
    if not useful or not all(isinstance(new, fx.Node) and _alike(old, new) for old, new in pairs):
        pairs = []
    for old, new in pairs:
        r.replace(old, new)
    for own in reversed(made):
        if not own._erased and not own.users:
            r.erase(own)
    return bool(pairs)


def _reshapes(node: fx.Node) -> bool:
    """Whether an operation changes the shape of its argument in place, so that earlier nodes have another shape."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags


def _alike(old: fx.Node, new: fx.Node) -> bool:
    one, two = old.meta.get("val"), new.meta.get("val")
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return False
    return one.dtype == two.dtype and one.shape == two.shape
