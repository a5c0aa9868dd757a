"""Find the axes of values that units index, as determined by linear layers, convolutions and tables."""

import operator
from typing import Any, cast

from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.coordinates import coordinates, varying_axes
from lightning_sym.symmetry.tracing.graph.nodes import equation_of, letters_of, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter

_MOST = 256  # maximal number of visited operations


def unit_axes(r: Rewriter, node: fx.Node) -> set[int]:
    """Return the axes of a value that units of earlier layers index; the others index positions.

    The result is a heuristic choice between spellings of one function; a wrong choice causes no error.
    """
    return _UnitAxes(r).of(node)


def axes_of_one(r: Rewriter, node: fx.Node) -> list[int]:
    """Return the axes of a value that the units of one axis of an earlier value index."""
    way: list[fx.Node] = []
    while len(node.all_input_nodes) == 1 and r.name(node) in operations(Trait.MOVE | Trait.CAST) | {"getitem"}:
        way += [node] if r.name(node) not in operations(Trait.CAST) else []
        node = node.all_input_nodes[0]
    if len(units := unit_axes(r, node)) != 1:
        return []
    place: Any = coordinates(r.shape(node), sorted(units))
    for step in reversed(way):
        item: Any = step.args[-1]
        place = place[item] if r.name(step) == "getitem" else moved(step, place)
        if place is None:
            return []
    return varying_axes(place)


class _UnitAxes:
    def __init__(self, r: Rewriter) -> None:
        self.r, self.known = r, dict[fx.Node, set[int]]()

    def of(self, node: Any) -> set[int]:
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            return set()
        if node not in self.known:
            if len(self.known) == _MOST:
                return set()
            self.known[node] = set()
            self.known[node] = self._of(node)
        return self.known[node]

    def _of(self, node: fx.Node) -> set[int]:
        name, rank = self.r.name(node), len(self.r.shape(node))
        if name in ("linear", "embedding"):
            return {rank - 1}
        if name.startswith("conv"):
            return {1}
        if (equation := equation_of(node) if name in ("matmul", "einsum") else None) is not None:
            *terms, out = letters_of(equation)
            parts: Any = node.args[1] if name == "einsum" else node.args[:2]
            letters = {term[axis] for term, part in zip(terms, parts, strict=True) for axis in self.of(part)}
            made = [self.r.made_of(part) for part in parts]
            if {*made} == {"weights", "inputs"}:  # weights of heads
                at = made.index("weights")
                value = zip(terms[1 - at], self.r.shape(parts[1 - at]), strict=True)
                letters |= {*terms[at]} - {letter for letter, size in value if size > 1}
            return {axis for axis, letter in enumerate(out) if letter in letters}
        if node.target is operator.getitem and self.r.name(node.args[0]) in operations(Trait.CUT):
            whole, part = cast(tuple[Any, Any], node.args)
            own = self.of(whole.args[0])
            parts = moved(whole, coordinates(self.r.shape(whole.args[0]), sorted(own))) if own else None
            return set(varying_axes(parts[part])) if isinstance(parts, (list, tuple)) else set()
        if name in operations(Trait.MOVE) and node.all_input_nodes == [node.args[0]]:
            own = self.of(node.args[0])
            after = moved(node, coordinates(self.r.shape(node.args[0]), sorted(own))) if own else None
            return set(varying_axes(after)) if isinstance(after, Tensor) else set()
        found: set[int] = set()
        for part in node.all_input_nodes:
            sizes = self.r.shape(part) if isinstance(part.meta.get("val"), Tensor) else ()
            wide = {axis - len(sizes) + rank for axis in self.of(part) if sizes[axis] > 1}
            found |= {axis for axis in wide if axis >= 0 and self.r.shape(node)[axis] > 1}
        return found
