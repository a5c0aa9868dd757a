"""What interpreters of several captures share: unknowns, families of changes of weights, derived unknowns, weights."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.affine.values import (
    DIRECTIONS,
    FREE,
    ROWS,
    Atom,
    Coefficient,
    Shape,
    Total,
    Unknowns,
    Value,
)
from lightning_sym.symmetry.tracing.affine.weights import Made, Weights, kept
from lightning_sym.symmetry.tracing.capture import Capture


@dataclass
class Rows:
    """Multiples, for each output, of the coefficients of a relation in the rows of a weight.

    Attributes:
        numbers: Unknowns. Shape (segments, *the weight's), with size 1 along the axes that are summed over.
        coefficient: Along the axes that are summed over, in the weight's order, flattened.
        segments: The segment of each place on these axes.
    """

    numbers: Tensor
    coefficient: Coefficient
    segments: Tensor


@dataclass
class Family:
    """Changes of a weight that sums over some of its axes.

    Attributes:
        directions: Unknowns with size 1 along these axes: a change of the outputs that each place on these axes has a
            multiple of.
        rows: By their coefficients.
    """

    directions: Tensor
    rows: dict[Any, Rows] = field(default_factory=dict)


@dataclass
class Derived:
    """Unknowns that other unknowns and the weights define.

    Attributes:
        numbers: The unknowns; thin.
        source: What defines them; thin.
        evaluate: Makes them of the values of what defines them and of the weights.
        blocks: Their places by block, and those of what defines each block. Shapes (blocks, places), (blocks, places).
        twin: What derived unknowns that the same weights make of other ones have in common.
        unseen: For each of them, thin, the direction of the weight's output, if the weight has directions.
        total: For rows, what the relation sums to.
        alike: Blocks that equations make equal to another one, as what defines them is.
    """

    numbers: Tensor
    source: Tensor
    evaluate: Callable[[Tensor, Weights], Tensor]
    blocks: tuple[Tensor, Tensor]
    twin: Any
    unseen: Tensor | None = None
    total: Total | None = None
    alike: set[int] = field(default_factory=set)


class System:
    """What interpreters of several captures share.

    Args:
        tensors: Parameters and buffers by name, of which shapes count.
        movable: The names of those to which something may be added.
        constants: The names of those that come with the architecture.
    """

    def __init__(self, tensors: Mapping[str, Tensor], movable: Collection[str], constants: Collection[str]) -> None:
        self.tensors, self.movable, self.constants = tensors, set(movable), set(constants)
        self.unknowns = Unknowns()
        self.names: dict[fx.Node, str] = {}
        self.nodes: dict[Any, fx.Node] = {}
        self.free: dict[str, Tensor] = {}
        self.partial: dict[str, frozenset[int]] = {}  # axes of which only a part is read
        self.weights: set[str] = set()  # parameters that are contracted with values
        self.families: dict[str, dict[frozenset[int], Family]] = {}
        self.read: set[str] = set()
        self.late = False  # whether a family was found after a reader that has not seen it
        self.fixed: set[str] = set()  # weights that something else sees
        self.derived: list[Derived] = []
        self.probes: list[Tensor] = []  # one for many unknowns that obey the same equations, if that has to be zero
        self.products: list[tuple[Tensor, Tensor]] = []  # of which one has to vanish
        self.lengths: set[int] = set()  # of the inputs of the capture at hand
        self.walk = 0  # which length they have
        self.counted = False  # whether anything was multiplied by a length
        self.sources = 0
        self.notes: list[str] = []
        self.blind: dict[str, None] = {}  # notes: on users' rules that say too little, and on products of norms
        self._derived: dict[Any, Tensor] = {}
        self._signatures: dict[fx.Node, str] = {}
        self._interned: dict[Any, str] = {}
        self._kept: dict[fx.Node, Made] = {}

    def made(self, node: Any) -> Made:
        """Return the operation behind the key of an atom, behind a node, or behind the copy that was kept of a node."""
        if isinstance(node, Made):
            return node
        return kept(self.nodes[node] if isinstance(node, str) else node, self.names, self._kept)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def source(self) -> int:
        """Return a number for a new source of drift."""
        self.sources += 1
        return self.sources

    def length(self, size: int, power: int = 1) -> Coefficient:
        """Return how many entries an axis has, or 1 over that: a number that another input changes, if it is a length.

        Args:
            size: How many.
            power: 1 or -1.
        """
        if size < 2 or size not in self.lengths:
            return Coefficient(float(size) ** power)
        self.counted = True
        return Coefficient(1.0, ((Atom("length", (size, self.walk)), power, torch.tensor(0)),))

    def again(self) -> "System":
        """Return a system that knows the families of this one from the start."""
        new = System(self.tensors, self.movable, self.constants)
        new.names, new.partial, new.weights = self.names, self.partial, self.weights
        for name, families in self.families.items():
            for axes, family in families.items():
                own = new.family(name, axes)
                for key, rows in family.rows.items():
                    own.rows[key] = new.rows(name, axes, rows.coefficient, rows.segments)
        new.late = False
        return new

    def family(self, name: str, axes: frozenset[int]) -> Family:
        """Return the changes of a weight that sums over some axes."""
        own = self.families.setdefault(name, {})
        if axes not in own:
            self.late |= name in self.read
            shape = self._outer(name, axes)
            own[axes] = Family(self.unknowns.fresh(shape, DIRECTIONS))
        return own[axes]

    def _outer(self, name: str, axes: frozenset[int]) -> list[int]:
        """Return the sizes of a weight, with 1 along axes that are summed over, and along those read in part."""
        once = axes | self.partial.get(name, frozenset())
        return [1 if axis in once else size for axis, size in enumerate(self.shape(name))]

    def rows(self, name: str, axes: frozenset[int], coefficient: Coefficient, segments: Tensor) -> Rows:
        """Return new rows."""
        shape = self._outer(name, axes)
        count = int(segments.max()) + 1
        return Rows(self.unknowns.fresh((count, *shape), ROWS), coefficient, segments)

    def derive(self, key: Any, shape: Iterable[int], **definition: Any) -> Tensor:
        """Return derived unknowns; the same where the same defines them."""
        if key not in self._derived:
            numbers = self.unknowns.fresh(tuple(shape), 0)
            self._derived[key] = numbers
            self.derived.append(Derived(numbers, twin=key[:-1], **definition))
        return self._derived[key]

    def signature(self, node: fx.Node) -> str:
        """Return what tells what nodes make of weights and constants apart, in all captures."""
        if node not in self._signatures:
            if node.op == "placeholder":
                own: Any = self.names[node]
            elif node.op == "get_attr":
                own = (id(node.graph), node.target)
            else:
                given = pytree.tree_map(
                    lambda part: self.signature(part) if isinstance(part, fx.Node) else part, (node.args, node.kwargs)
                )
                own = (str(node.target), repr(given))
            self._signatures[node] = self._interned.setdefault(own, f"#{len(self._interned)}")
        return self._signatures[node]

    def atom(self, value: Value) -> tuple[Atom, Tensor]:
        """Return the atom of a value that depends on the weights alone, and which number of it stands where (thin)."""
        if value.origin is not None:
            name, coordinates = value.origin
            strides = torch.empty(self.shape(name), device="meta").stride()
            at: Tensor = sum(
                (own * stride for own, stride in zip(coordinates, strides, strict=True)),
                start=torch.zeros((1,) * value.rank, dtype=torch.int64),
            )
            return Atom("parameter", name), at
        assert value.node is not None
        key = self.signature(value.node)
        self.nodes.setdefault(key, value.node)
        return Atom("node", key), torch.arange(math.prod(value.shape)).reshape(value.shape)

    def coefficient(self, value: Value) -> Coefficient:
        """Return a value that depends on the weights alone as a coefficient."""
        atom, at = self.atom(value)
        return Coefficient(1.0, ((atom, 1, at),))

    def note(self, text: str) -> None:
        """Note something once."""
        if text not in self.notes:
            self.notes.append(text)

    def free_numbers(self, name: str) -> Tensor:
        """Return what may be added to a tensor, entry by entry; along axes that are read in part the same."""
        if name not in self.free:
            partial = self.partial.get(name, frozenset())
            shape = [1 if axis in partial else size for axis, size in enumerate(self.shape(name))]
            self.free[name] = self.unknowns.fresh(shape, FREE)
        return self.free[name]


def states_of(captures: Iterable[Capture]) -> dict[fx.Node, str]:
    """Return the names of all placeholders that hold a tensor of the network."""
    return {node: name for capture in captures for node, name in capture.states.items()}
