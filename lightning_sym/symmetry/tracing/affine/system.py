"""State that the interpreters of several captures share: unknowns, weights and their families of changes."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    places,
)
from lightning_sym.symmetry.tracing.affine.weights import Made, Weights, kept
from lightning_sym.symmetry.tracing.graph.capture import Capture

_MOST = 2**20  # maximal entries of a value that are told apart


@dataclass
class Rows:
    """Multiples of a relation's coefficients that are added to the rows of a weight, one per output and segment.

    Attributes:
        numbers: Unknowns. Shape (segments, *the weight's), with size 1 along the summed axes.
        coefficient: The coefficients along the summed axes, in the weight's order, flattened.
        segments: The segment of each place on these axes.
    """

    numbers: Tensor
    coefficient: Coefficient
    segments: Tensor


@dataclass
class Family:
    """Changes of a weight that a contraction sums over some of its axes.

    Attributes:
        directions: Unknowns with size 1 along these axes: a direction of the outputs. Each place on the axes has its
            own multiple of it.
        rows: Row changes, by their coefficients.
    """

    directions: Tensor
    rows: dict[Any, Rows] = field(default_factory=dict)


@dataclass
class Derived:
    """Unknowns defined by other unknowns and the weights.

    Attributes:
        numbers: The unknowns; thin.
        source: The unknowns that define them; thin.
        evaluate: Computes them from the values of ``source`` and the weights.
        blocks: Their places by block, and those of each block's source. Shapes (blocks, places), (blocks, places).
        twin: A key shared by derived unknowns with the same weights and other sources.
        unseen: The direction of the weight's output for each of them, thin, if the weight has directions.
        total: For rows, the total of the relation.
        alike: Blocks that equations identify with another block, as their sources are equal.
        readings: The sources of the sums that changes of the weight add beside them; see :meth:`System.reading`.
        halfway: The unknowns that are added to the weights, if these count with half of it; else None.
    """

    numbers: Tensor
    source: Tensor
    evaluate: Callable[[Tensor, Weights], Tensor]
    blocks: tuple[Tensor, Tensor]
    twin: Any
    unseen: Tensor | None = None
    total: Total | None = None
    alike: set[int] = field(default_factory=set)
    readings: set[int | None] = field(default_factory=set)
    halfway: Sequence[Tensor] | None = None


class System:
    """State that the interpreters of several captures share.

    Args:
        tensors: Parameters and buffers by name; only shapes matter.
        movable: The names of tensors that may be translated.
        constants: The names of tensors that belong to the architecture.
    """

    def __init__(self, tensors: Mapping[str, Tensor], movable: Collection[str], constants: Collection[str]) -> None:
        self.tensors, self.movable, self.constants = tensors, set(movable), set(constants)
        self.unknowns = Unknowns()
        self.names: dict[fx.Node, str] = {}
        self.nodes: dict[Any, fx.Node] = {}
        self.free: dict[str, Tensor] = {}
        self.partial: dict[str, frozenset[int]] = {}  # axes that are read only in part
        self.common: dict[str, frozenset[int]] = {}  # axes along which parameters are translated equally
        self.weights: set[str] = set()  # parameters contracted with values
        self.members: set[str] = set()  # parameters with separate units for each member along the first axis
        self.families: dict[str, dict[frozenset[int], Family]] = {}
        self.read: set[str] = set()
        self.late = False  # whether a family was found after a reader that ignored it
        self.fixed: set[str] = set()  # weights with other readers
        self.derived: list[Derived] = []
        self.probes: list[Tensor] = []  # each represents many unknowns with equal equations; must be zero
        self.exclusions: list[tuple[Tensor, Tensor]] = []  # pairs of unknowns; the first vanish if the others do not
        self.absorbed: dict[fx.Node, tuple[str, ...]] = {}  # functions of weights, with those that may change freely
        self.takers: dict[str, dict[str, tuple[Any, float]]] = {}  # weights that absorb all changes of functions
        self.totals: dict[fx.Node, str] = {}  # sums with such functions that layers read, and their weights
        self.inside: set[fx.Node] = set()  # operations that only these functions read
        self.idle: set[str] = set()  # tensors that only these functions read
        self.lengths: set[int] = set()  # of the inputs of the current capture
        self.walk = 0  # index of their choice of length
        self.counted = False  # whether anything was multiplied by a length
        self.exclusive = False  # whether the translations of two factors that are rows of tables exclude each other
        self.sources = 0
        self.notes: list[str] = []
        self.blind: dict[str, None] = {}  # notes: on users' rules that say too little, and on products of norms
        self._readings: dict[int, tuple[Value, list[tuple[Any, Tensor, Any, int]]]] = {}
        self._derived: dict[Any, Derived] = {}
        self._signatures: dict[fx.Node, str] = {}
        self._interned: dict[Any, str] = {}
        self._kept: dict[fx.Node, Made] = {}

    def made(self, node: Any) -> Made:
        """Return the operation of an atom's key, of a node, or of the retained copy of a node."""
        if isinstance(node, Made):
            return node
        return kept(self.nodes[node] if isinstance(node, str) else node, self.names, self._kept)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def exclude(self, one: Tensor | None, two: Tensor | None) -> None:
        """Require that of two unknowns one vanishes: the array with fewer entries."""
        if one is not None and two is not None:
            self.exclusions.append((one, two) if one.numel() <= two.numel() else (two, one))

    def source(self) -> int:
        """Return an index for a new source of drift."""
        self.sources += 1
        return self.sources

    def reading(self, value: Value, gone: Sequence[int], kept: Sequence[int], order: Tensor, how: Any) -> int:
        """Return the source of the sums of a value times any numbers; equal sums share it.

        Args:
            value: The value.
            gone: The axes that are summed.
            kept: The others, in the order of the result.
            order: Where each number belongs on the summed axes.
            how: What else decides which sums these are.
        """
        root, moves, _ = value.root

        def arranged(moves: Sequence[tuple[Any, int]], shape: Shape, axes: Sequence[int]) -> Tensor:
            """Return which entry of the root each entry of a value is."""
            moved = places(root.shape) + 1  # 0 is padding
            for move, index in moves:
                made = move(moved)
                moved = made[index] if isinstance(made, list) else made
            return moved.expand(shape).permute(*axes).reshape(-1)

        own = moves, value.shape, (*gone, *kept)
        known = self._readings.setdefault(id(root), (root, []))[1]  # the root is kept, so that no other gets its id
        for reading, at_order, way, source in known:
            same = way == how and torch.equal(at_order, order)
            told = same and math.prod(root.shape) <= _MOST
            if same and (reading == own or (told and torch.equal(arranged(*reading), arranged(*own)))):
                return source
        known.append((own, order, how, self.source()))
        return self.sources

    def length(self, size: int, power: int = 1) -> Coefficient:
        """Return an axis's length, or its inverse, as a coefficient; lengths of inputs remain symbolic.

        Args:
            size: The length.
            power: 1 or -1.
        """
        if size < 2 or size not in self.lengths:
            return Coefficient(float(size) ** power)
        self.counted = True
        return Coefficient(1.0, ((Atom("length", (size, self.walk)), power, torch.tensor(0)),))

    def again(self) -> "System":
        """Return a new system that knows this one's families from the start."""
        new = System(self.tensors, self.movable, self.constants)
        new.names, new.partial, new.weights, new.members = self.names, self.partial, self.weights, self.members
        new.exclusive, new.common = self.exclusive, self.common
        new.absorbed, new.takers, new.inside, new.idle = self.absorbed, self.takers, self.inside, self.idle
        new.totals = self.totals
        for name, families in self.families.items():
            for axes, family in families.items():
                own = new.family(name, axes)
                for key, rows in family.rows.items():
                    own.rows[key] = new.rows(name, axes, rows.coefficient, rows.segments)
        new.late = False
        return new

    def family(self, name: str, axes: frozenset[int]) -> Family:
        """Return the changes of a weight that a contraction sums over some axes."""
        own = self.families.setdefault(name, {})
        if axes not in own:
            self.late |= name in self.read
            shape = self._outer(name, axes)
            own[axes] = Family(self.unknowns.fresh(shape, DIRECTIONS))
        return own[axes]

    def _outer(self, name: str, axes: frozenset[int]) -> list[int]:
        """Return the sizes of a weight, with 1 along summed axes and along axes that are read in part."""
        once = axes | self.partial.get(name, frozenset())
        return [1 if axis in once else size for axis, size in enumerate(self.shape(name))]

    def rows(self, name: str, axes: frozenset[int], coefficient: Coefficient, segments: Tensor) -> Rows:
        """Return new row changes."""
        shape = self._outer(name, axes)
        count = int(segments.max()) + 1
        return Rows(self.unknowns.fresh((count, *shape), ROWS), coefficient, segments)

    def derive(self, key: Any, shape: Iterable[int], reading: int | None = None, **definition: Any) -> Tensor:
        """Return derived unknowns; equal definitions share them."""
        if key not in self._derived:
            self._derived[key] = Derived(self.unknowns.fresh(tuple(shape), 0), twin=key[:-1], **definition)
            self.derived.append(self._derived[key])
        self._derived[key].readings.add(reading)
        return self._derived[key].numbers

    def signature(self, node: fx.Node) -> str:
        """Return a key of a node's computation from weights and constants, common to all captures."""
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
        """Return the atom of a value that depends only on weights, and the index in the atom for each entry; thin."""
        if value.origin is not None and value.origin[0] not in self.takers:
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
        """Return a value that depends only on weights as a coefficient."""
        atom, at = self.atom(value)
        return Coefficient(1.0, ((atom, 1, at),))

    def added_to(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of some tensors that something may be added to."""
        return frozenset(name for name in names if name in self.free or name in self.families)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def free_numbers(self, name: str) -> Tensor:
        """Return the unknown translation of a tensor, entry by entry; constant along axes that are read in part."""
        if name not in self.free:
            partial = self.partial.get(name, frozenset()) | self.common.get(name, frozenset())
            shape = [1 if axis in partial else size for axis, size in enumerate(self.shape(name))]
            self.free[name] = self.unknowns.fresh(shape, FREE)
        return self.free[name]


def states_of(captures: Iterable[Capture]) -> dict[fx.Node, str]:
    """Return the names of all placeholders that hold a tensor of the network."""
    return {node: name for capture in captures for node, name in capture.states.items()}
