"""Write attention over edges as attention of all nodes to all edges, with a mask.

A softmax over the edges that end in a node reads values of both ends, ``q[ends]``, and adds with the same indices:
``zeros.index_add(0, ends, p)``. Along one more axis, for nodes, ``q[ends]`` becomes ``q`` and the sum one over all
edges, with zeros at those that end elsewhere.
"""

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.normal_form.branches import lifted_operation
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped

aten = torch.ops.aten
_TINY = 1e-12  # what keeps a sum of exponentials from zero
_MOST = 2**22  # maximal number of elements of all nodes and edges
_WIDER = operations(Trait.REGROUP | Trait.EXPAND) | {"repeat"}
_ALONG_AXES = operations(Trait.SUM | Trait.SOFTMAX | Trait.PERMUTE)
_SAME_ZEROS = operations(Trait.REGROUP | Trait.CAST) | {"neg", "sum", "div"}


def spread_edges(r: Rewriter) -> int:
    """Rewrite sums over the edges of a node whose terms hold exponentials.

    Returns:
        The number of changes.
    """
    changes, totals = 0, dict[fx.Node, fx.Node]()
    for node in list(r.graph.nodes):
        found = None if node._erased else _indexed(r, node)
        if found is None or found[0] != "added":
            continue
        r.at = node
        try:
            total = _Edges(r, found[2], r.shape(node)[0], totals).total(found[1])
        except NoSpellingError:
            continue
        if total is not None and r.shape(total)[2:] == r.shape(node)[1:]:
            new = r.insert(aten.squeeze.dim, total, 1)
            totals[new] = total
            r.replace(node, new)
            changes += 1
    r.erase_unread()  # values of sums that stay as they are
    return changes


def _indexed(r: Rewriter, node: fx.Node) -> tuple[str, fx.Node, fx.Node] | None:
    """Return whether values are "taken" along the first axis or "added" to zeros, the values, and the indices."""
    name, args = r.name(node), list[Any](node.args)
    if name in ("index", "index_put") and len(args[1]) == 1:  # type: ignore[arg-type]
        args[1:2] = 0, args[1][0]  # type: ignore[index]
    if len(args) < 3 or args[1] != 0 or not isinstance(args[0], fx.Node) or node.kwargs:
        return None
    value, _, index, *rest = args
    adds = {"index_put": [True], "scatter_reduce": ["sum"], "index_add": [], "scatter_add": []}
    kind = "taken" if name in ("index", "index_select", "gather") else "added"
    if kind == "added":
        if name not in adds or rest[1:] != adds[name] or r.number(value) != 0:
            return None
        value = rest[0]
    size = r.shape(index)[:1]
    while r.name(index) in _WIDER and r.shape(index.args[0])[:1] == size:  # the same along all axes but the first
        index = index.args[0]
    if r.shape(index) != size or r.made_of(index) != "inputs" or r.shape(node)[1:] != r.shape(value)[1:]:
        return None
    return kind, value, index


class _Edges:
    """Values of edges along one more first axis, which numbers the nodes.

    Args:
        r: The rewriter.
        ends: The node in which each edge ends.
        count: The number of nodes.
        totals: Sums over all edges, kept as an axis of size 1, by the same sums without this axis.
    """

    def __init__(self, r: Rewriter, ends: fx.Node, count: int, totals: dict[fx.Node, fx.Node]) -> None:
        self.r, self.ends, self.count, self.totals = r, ends, count, totals
        self.known: dict[fx.Node, fx.Node | None] = {}
        self.zero: set[fx.Node] = set()  # at edges that end elsewhere
        self.size = r.shape(ends)[0]

    def total(self, value: fx.Node) -> fx.Node | None:
        """Return the sum over the edges of each node; None if it holds no exponentials."""
        wide = self.lift(value)
        if wide is None or wide not in self.zero or wide.meta["val"].numel() > _MOST:
            return None
        wide = self.r.insert(aten.expand.default, wide, [self.count, *self.r.shape(value)])
        return self.r.insert(aten.sum.dim_IntList, wide, [1], True)

    def lift(self, node: Any) -> fx.Node | None:
        """Return a value with the further axis; None if it does not depend on the node.

        Raises:
            NoSpellingError: If an operation on the value is not extended.
        """
        if not isinstance(node, fx.Node) or self.r.shape(node)[:1] != (self.size,):
            return None
        if node not in self.known:
            self.known[node] = None
            self.known[node] = self._lifted(node)
        return self.known[node]

    def _lifted(self, node: fx.Node) -> fx.Node | None:
        r, name = self.r, self.r.name(node)
        if (found := _indexed(r, node)) is not None:
            if found[0] == "added" or found[2] is not self.ends:
                return None
            value = self._exact(found[1])
            return self.totals.get(value) or r.insert(aten.unsqueeze.default, value, 1)
        given = [self.lift(own) for own in node.args]
        if name == "exp" and given[0] is None:
            given = [r.insert(aten.expand.default, node.args[0], [self.count, *r.shape(node)])]
        if not any(given):
            return None
        if (exact := self._exact(node)) is not node:
            return self.lift(exact)
        shape = [*r.shape(given[0])[:2], *r.shape(node)[1:]]
        if name in operations(Trait.REGROUP):
            result: fx.Node | None = reshaped(r, given[0], shape)  # type: ignore[arg-type]
        elif name in _ALONG_AXES and 0 in pytree.tree_leaves(node.args[1:]):
            result = None
        else:
            result = lifted_operation(r, node, list(zip(node.args, given, strict=True)))
        if result is None:
            raise NoSpellingError
        if name == "exp":
            nodes = r.insert(aten.arange.default, self.count, device=self.ends.meta["val"].device)
            elsewhere = r.insert(aten.ne.Tensor, r.insert(aten.unsqueeze.default, nodes, 1), self.ends)
            elsewhere = reshaped(r, elsewhere, [self.count, self.size, *[1] * (len(shape) - 2)])
            result = r.insert(aten.masked_fill.Scalar, result, elsewhere, 0)
        zero = [own in self.zero for own in given]
        if name == "exp" or (name in _SAME_ZEROS and zero[0]) or (name == "mul" and any(zero)):
            self.zero.add(result)
        return result

    def _exact(self, value: fx.Node) -> fx.Node:
        """Return a sum of exponentials, perhaps taken by edges, without what keeps it from zero."""
        number = self.r.number(value.args[1]) if self.r.name(value) == "add" else None
        first: Any = value.args[0] if value.args else None
        total = first in self.totals or (number is not None and self.lift(first) in self.totals.values())
        return first if total and number is not None and 0 <= number <= _TINY else value  # type: ignore[no-any-return]
