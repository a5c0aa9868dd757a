"""Write attention over edges as attention of all nodes to all edges, with a mask.

A softmax over the edges that end in a node reads values of both ends, ``q[ends]``, and adds with the same indices:
``zeros.index_add(0, ends, p)``. Along one more axis, for nodes, ``q[ends]`` becomes ``q`` and the sum one over all
edges, with zeros at those that end elsewhere.
"""

from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.branches import lifted_operation
from lightning_sym.symmetry.tracing.contractions import reshaped
from lightning_sym.symmetry.tracing.nodes import argument
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import NoSpellingError, Rewriter

aten = torch.ops.aten
_TINY = 1e-12  # what keeps a sum of exponentials from zero
_MOST = 2**22  # maximal number of pairs of nodes and edges, times heads
_WIDER = operations(Trait.REGROUP | Trait.EXPAND) | {"repeat"}
_ZERO_TOO = operations(Trait.REGROUP | Trait.CAST | Trait.PERMUTE) | {"neg", "sum"}


def spread_edges(r: Rewriter) -> int:
    """Rewrite sums over the edges of a node whose terms hold exponentials of values at that node.

    Returns:
        The number of changes.
    """
    changes, totals = 0, dict[fx.Node, fx.Node]()
    for node in list(r.graph.nodes):
        found = None if node._erased else _added(r, node)
        if found is None:
            continue
        r.at = node
        edges = _Edges(r, found[0], r.shape(node)[0], totals)
        try:
            total = edges.total(found[1])
        except NoSpellingError:
            continue
        if total is not None and r.shape(total)[2:] == r.shape(node)[1:]:
            new = r.insert(aten.squeeze.dim, total, 1)
            totals[new] = total
            r.replace(node, new)
            changes += 1
    return changes


def _along(r: Rewriter, index: Any) -> fx.Node | None:
    """Return the vector of indices that an index repeats along all axes but the first."""
    size = r.shape(index)[:1]
    while r.name(index) in _WIDER and r.shape(index.args[0])[:1] == size:
        index = index.args[0]
    return index if r.shape(index) == size and r.made_of(index) == "inputs" else None


def _added(r: Rewriter, node: fx.Node) -> tuple[fx.Node, Any] | None:
    """Return the indices along the first axis at which values are added to zeros, and the values."""
    name, args = r.name(node), node.args
    if name == "index_put" and len(args) == 4 and args[3] and len(args[1]) == 1:  # type: ignore[arg-type]
        index, values = args[1][0], args[2]  # type: ignore[index]
    elif name in ("index_add", "scatter_add", "scatter_reduce") and len(args) > 3 and not node.kwargs and args[1] == 0:
        index, values = args[2:4]
        if name == "scatter_reduce" and (len(args) != 5 or args[4] != "sum"):
            return None
    else:
        return None
    if r.number(args[0]) != 0 or not isinstance(index, fx.Node):
        return None
    index = _along(r, index)
    return None if index is None or r.shape(values)[:1] != r.shape(index) else (index, values)


def _taken(r: Rewriter, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return a value and the indices along its first axis at which a node takes its elements."""
    name, args = r.name(node), node.args
    index: Any
    if name == "index" and len(args[1]) == 1:  # type: ignore[arg-type]
        index = args[1][0]  # type: ignore[index]
    elif name in ("index_select", "gather") and args[1] == 0:
        index = args[2]
    else:
        return None
    if not isinstance(index, fx.Node) or (index := _along(r, index)) is None:
        return None
    value: Any = args[0]
    return (value, index) if r.shape(node)[1:] == r.shape(value)[1:] else None


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
        """Return the sum over the edges of each node; None if it holds no exponentials of values at the node."""
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
        taken = _taken(r, node)
        if taken is not None and taken[1] is self.ends:
            value = self._plain(taken[0])
            return self.totals.get(value) or r.insert(aten.unsqueeze.default, value, 1)
        if taken is not None or _added(r, node) is not None or not name:
            return None
        given = [self.lift(own) for own in node.args]
        if name == "exp" and given[0] is None:
            given = [r.insert(aten.expand.default, node.args[0], [self.count, *r.shape(node)])]
        if not any(own is not None for own in given):
            return None
        first: Any = given[0]
        if name == "add" and first in self.totals.values() and self._is_tiny(node.args[1]):
            return first  # type: ignore[no-any-return]
        if name in operations(Trait.REGROUP) and r.shape(node)[:1] == (self.size,):
            result: fx.Node | None = reshaped(r, first, [*r.shape(first)[:2], *r.shape(node)[1:]])
        elif 0 in self._axes(node):
            raise NoSpellingError
        else:
            result = lifted_operation(r, node, list(zip(node.args, given, strict=True)))
        if result is None:
            raise NoSpellingError
        zero = [own in self.zero for own in given]
        if name == "exp":
            result = r.insert(aten.masked_fill.Scalar, result, self._elsewhere(len(r.shape(result))), 0)
        if (
            name == "exp"
            or (name in _ZERO_TOO and zero[0])
            or (name == "mul" and any(zero))
            or (name == "div" and zero[0])
        ):
            self.zero.add(result)
        return result

    def _axes(self, node: fx.Node) -> set[int]:
        """Return axes that an operation reduces or exchanges; for others none."""
        name = self.r.name(node)
        if name in operations(Trait.SUM | Trait.SOFTMAX | Trait.REDUCE):
            axes: Any = argument(node, 1, "dim")
            rank = len(self.r.shape(node.args[0]))
            return {axis % rank for axis in ([axes] if isinstance(axes, int) else axes or range(rank))}
        if name == "permute":
            return set() if node.args[1][0] == 0 else {0}  # type: ignore[index]
        return {axis for axis in node.args[1:3] if axis == 0} if name == "transpose" else set()  # type: ignore[misc]

    def _plain(self, value: fx.Node) -> fx.Node:
        """Return a sum of exponentials without what keeps it from zero."""
        if self.r.name(value) == "add" and value.args[0] in self.totals and self._is_tiny(value.args[1]):
            return value.args[0]  # type: ignore[return-value]
        return value

    def _is_tiny(self, number: Any) -> bool:
        return 0 <= (self.r.number(number) if self.r.number(number) is not None else 1) <= _TINY  # type: ignore[operator]

    def _elsewhere(self, rank: int) -> fx.Node:
        """Return whether edges end elsewhere than in each node. Shape (nodes, edges, 1, ...)."""
        nodes = self.r.insert(aten.arange.default, self.count, device=self.ends.meta["val"].device)
        nodes = self.r.insert(aten.unsqueeze.default, nodes, 1)
        here = self.r.insert(aten.ne.Tensor, nodes, self.ends)
        return reshaped(self.r, here, [self.count, self.size, *[1] * (rank - 2)])
