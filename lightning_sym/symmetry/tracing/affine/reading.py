"""Constants of a capture, and the parts of the network's tensors that operations read."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.affine.growing import growing_axes, of_sizes
from lightning_sym.symmetry.tracing.affine.moves import MOVES, Move, move_of
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.values import places, varying, wide
from lightning_sym.symmetry.tracing.affine.weights import Weights
from lightning_sym.symmetry.tracing.graph.capture import OPAQUE, Capture
from lightning_sym.symmetry.tracing.graph.coordinates import varies
from lightning_sym.symmetry.tracing.graph.nodes import ancestors, equation_of, letters_of, written_by
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations, spatial_axes_of
from lightning_sym.symmetry.tracing.graph.sizes import OF_NO_SIZE, growing_inputs

_MOVING = operations(Trait.MOVE)
_MOVED = MOVES | operations(Trait.CAST) | {"getitem"}
_MOST = 2**20  # maximal entries of a parameter that are numbered


class Constants:
    """The values of a capture that depend on neither inputs nor weights.

    Args:
        system: Knows the constant tensors.
        capture: The network.
        values: Evaluates constants.
    """

    def __init__(self, system: System, capture: Capture, values: Weights) -> None:
        self.system, self.capture, self.values = system, capture, values
        self.inputs = growing_inputs(capture.inputs, _features(capture.inputs))
        self.lengths = {node.meta["val"].shape[axis] for node, axes in self.inputs.items() for axis in axes}
        self._constant: dict[fx.Node, bool] = {}
        self._sized: dict[fx.Node, bool] = {}
        for node in capture.graph.nodes:
            self._constant[node] = self._is_constant(node)
            self._sized[node] = self._constant[node] and self._is_sized(node)

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            name, own = self.capture.states.get(node), node.meta.get("val")
            known = isinstance(own, Tensor) and (name in self.system.constants or not own.is_floating_point())
            return name is not None and known
        if node.op == "get_attr":
            return True
        if node.op != "call_function" or written_by(node) or node.target in OPAQUE:
            return False
        return name_of(node) in operations(Trait.LIKE) or all(self._constant[given] for given in node.all_input_nodes)

    def _is_sized(self, node: fx.Node) -> bool:
        """Whether a constant may differ for inputs of another size, or is random."""
        if node.op != "call_function":
            return False
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        given = [] if name_of(node) in operations(Trait.LIKE) else node.all_input_nodes
        return name_of(node) not in OF_NO_SIZE or any(self._sized[own] or self._is_part(node, own) for own in given)

    def _is_part(self, node: fx.Node, of: fx.Node) -> bool:
        val, whole = node.meta.get("val"), of.meta.get("val")
        if not isinstance(whole, Tensor):
            return False
        sizes = [own.numel() for own in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(own, Tensor)]
        return any(size < whole.numel() for size in sizes) and self.number(of) is None

    @cached_property
    def growing(self) -> dict[fx.Node, list[frozenset[int]]]:
        """The growing axes of each value's results."""
        sized = {
            node: of_sizes(tuple(node.meta["val"].shape), self.lengths)
            for node, own in self._sized.items()
            if own and isinstance(node.meta.get("val"), Tensor)
        }
        return growing_axes(self.capture.graph, {**sized, **self.inputs})

    def grows(self, node: Any, axis: int) -> bool:
        """Whether an axis of a tensor is longer for longer inputs."""
        return axis in self.growing.get(node, [frozenset()])[0]

    def is_constant(self, node: fx.Node) -> bool:
        """Whether a node depends on neither inputs nor weights."""
        return self._constant[node]

    def known(self, node: Any) -> Tensor | None:
        """Return a constant that is equal for inputs of all sizes; None for other nodes."""
        if not isinstance(node, fx.Node) or not self._constant[node] or self._sized[node]:
            return None
        return self._numbers(node)

    def number(self, node: Any) -> float | None:
        """Return the number that all entries of a constant equal; None if they differ, or for other nodes."""
        if isinstance(node, (int, float)):
            return float(node)
        if not isinstance(node, fx.Node) or not self._constant[node]:
            return None
        own = self._numbers(node)
        if own is None or own.is_complex() or not own.numel() or bool((own != own.reshape(-1)[0]).any()):
            return None
        return float(own.reshape(-1)[0])

    def sums_to(self, node: fx.Node) -> float | None:
        """Return 0 or 1 if all sums of a constant over its last axis equal it; else None."""
        own = self._numbers(node)
        if own is None or not own.is_floating_point() or not own.ndim or not own.numel():
            return None
        sums, size = own.sum(-1), own.abs().sum(-1).max()
        return next((total for total in (0.0, 1.0) if bool(((sums - total).abs() <= 1e-6 * size).all())), None)

    def _numbers(self, node: fx.Node) -> Tensor | None:
        try:
            found = self.values.node(node)
        except Exception:  # without numbers, on meta
            return None
        return found if isinstance(found, Tensor) and not found.is_meta else None


def _features(inputs: Sequence[fx.Node]) -> dict[fx.Node, set[int]]:
    """Return the axes of inputs that a layer sums over; their sizes are those of its weight."""
    found: dict[fx.Node, set[int]] = {}
    for node in inputs:
        for user in node.users:
            if user.args and user.args[0] is node and name_of(user) == "linear":
                found.setdefault(node, set()).add(node.meta["val"].ndim - 1)
            elif user.args and user.args[0] is node and name_of(user) in operations(Trait.CONVOLVE):
                found.setdefault(node, set()).add(node.meta["val"].ndim - 1 - spatial_axes_of(name_of(user)))
    return found


class _Read(NamedTuple):
    """The part of a tensor that one operation reads.

    Attributes:
        parts: The indices of the entries, or for each axis the places along it; counted from 1, with 0 for padding.
        cut: Whether the part is as long as an input.
    """

    parts: Sequence[Tensor]
    cut: bool


def indexed_by(node: fx.Node, constants: Constants) -> tuple[fx.Node, Tensor]:
    """Return the value that moves make an index of, and the index of its entry at each place; thin."""
    root, moves = _moves_to(node, constants)
    at = places(tuple(root.meta["val"].shape))
    for move, item in moves:
        made = move(at)
        at = made if item is None else made[item]
    return root, at


def _moves_to(node: fx.Node, constants: Constants) -> tuple[fx.Node, list[tuple[Move, Any]]]:
    """Return the value that moves make an index of, and these, each with the number of one of several results."""
    whole, item = node.args if name_of(node) == "getitem" else (node, None)
    given: Any = whole.args[0] if isinstance(whole, fx.Node) and whole.args else None
    val = given.meta.get("val") if isinstance(given, fx.Node) else None
    if isinstance(val, Tensor) and isinstance(whole, fx.Node):
        if name_of(whole) in operations(Trait.CAST):
            return _moves_to(given, constants)
        move = None
        if name_of(whole) in MOVES - operations(Trait.PAD):
            move = move_of(whole, name_of(whole), tuple(val.shape), constants.known)
        if move is not None:
            root, before = _moves_to(given, constants)
            return root, [*before, (move, item)]
    return node, []


def index_of(node: fx.Node, name: str) -> tuple[Any, Any]:
    """Return the index at which an operation looks up rows of a table, and the axis of the rows; None for others."""
    at: Any = node.args[1] if len(node.args) > 1 else None
    if name == "index_select":
        return node.args[2], at
    if name == "index" and isinstance(at, (list, tuple)):
        axes = [axis for axis, own in enumerate(at) if own is not None]
        return (at[axes[0]], axes[0]) if len(axes) == 1 else (None, None)
    return (at, 0) if name == "embedding" else (None, None)


def _lookups(constants: Constants) -> tuple[set[fx.Node], dict[fx.Node, dict[fx.Node, str]]]:
    """Find lookups in parameters, or in parts of them, at indices that depend on the input.

    Returns:
        The lookups; and by index and table the parameter.
    """
    states, found = constants.capture.states, set[fx.Node]()
    together: dict[fx.Node, dict[fx.Node, str]] = {}
    for node in constants.capture.graph.nodes:
        index, _ = index_of(node, name_of(node))
        if index is not None and constants.known(index) is None:
            table: Any = node.args[0]
            if (root := _moves_to(table, constants)[0]) in states:
                found.add(node)
                together.setdefault(_moves_to(index, constants)[0], {})[table] = states[root]
    return found, together


def _tables_of_biases(system: System, captures: Sequence[Constants]) -> set[str]:
    """Return the tables that are translated entry by entry.

    These are only looked up, and at an index at which another table is looked up as well, or in parts: they cancel
    translations times the rows of the other table, or times their other parts.
    """
    found, held = set[str](), set[str]()
    for constants in captures:
        states, (lookups, together) = constants.capture.states, _lookups(constants)
        held |= {name for node, name in states.items() if not _is_only_looked_up(node, lookups)}
        for node in lookups:
            width = node.meta["val"].shape[-1]
            if node.args[0] in states and _is_parted(node, _axes_of([width])[0], constants):
                found.add(states[node.args[0]])  # type: ignore[index]
        found = found.union(*(tables.values() for tables in together.values() if len(tables) > 1))
    return {name for name in found - held if math.prod(system.shape(name)) <= _MOST}


def _is_only_looked_up(node: fx.Node, lookups: Collection[fx.Node]) -> bool:
    """Whether lookups alone read a parameter, or parts of it."""
    return all(
        user in lookups or (name_of(user) in _MOVING and _is_only_looked_up(user, lookups)) for user in node.users
    )


def _is_parted(node: fx.Node, at: Tensor, constants: Constants) -> bool:
    """Whether operations take parts of a value, along axes on which numbers of its places vary (thin)."""
    shape = tuple(node.meta["val"].shape)
    at = wide(at, len(shape))
    for user in node.users:
        move = move_of(user, name_of(user), shape, constants.known) if name_of(user) in _MOVING else None
        if move is not None and move.kind == "cut":
            if move.axis in varying(at):
                return True
        elif move is not None and _is_parted(user, move(at), constants):
            return True
    return False


def _rows_of_products(constants: Constants) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield parameters that only a product reads, with another parameter or its rows, and the axes of their own rows.

    All rows are translated equally: other parameters cancel this times the first factor.
    """
    states = constants.capture.states
    lookups, together = _lookups(constants)
    names = [*states.values()]
    for node, name in states.items():
        own, along = node, _axes_of(node.meta["val"].shape)
        while len(own.users) == 1 and isinstance(own.meta["val"], Tensor):  # not a list, as of one row
            (user,) = own.users
            shape = tuple(own.meta["val"].shape)
            move = move_of(user, name_of(user), shape, constants.known) if name_of(user) in _MOVING else None
            if move is None:
                break
            own, along = user, [move(part) for part in along]
        user = next(iter(own.users), own)
        equation = equation_of(user) if name_of(user) in operations(Trait.CONTRACT) - {"embedding"} else None
        if equation is None or len(own.users) > 1 or names.count(name) > 1:
            continue
        factors: Any = user.args[1] if name_of(user) == "einsum" else user.args[:2]
        first = _moves_to(factors[0], constants)[0]
        index = index_of(first, name_of(first))[0] if first in lookups else None
        biased = index is not None and len(together[_moves_to(index, constants)[0]]) > 1
        if factors[0] is not factors[1] is own and (first in states or biased):
            term, out = letters_of(equation)[1:]
            axes = (axis for axis, part in enumerate(along) if all(term[at] in out for at in varying(part)))
            yield name, frozenset(axes)


def read_ahead(system: System, captures: Sequence[Constants], scaled: Callable[[str, int], bool]) -> None:
    """Record the parameters that are contracted with values, and those that are read in part.

    Longer inputs may read more along axes that are read in part, so translations must be constant along these.

    Args:
        system: What is known.
        captures: The captures.
        scaled: Whether scales or signs act differently on the positions along an axis of a tensor.
    """
    for constants in captures:
        for node, name in constants.capture.states.items():
            if (
                name in system.movable
                and len(system.shape(name)) > 1
                and _is_contracted(node, constants.capture.states)
            ):
                system.weights.add(name)
    if len(captures) == 1:
        for name, rows in _rows_of_products(captures[0]):
            # Rows with scales of their own are not translated equally.
            if name in system.weights and not any(scaled(name, axis) for axis in rows):
                system.common[name] = rows
    system.weights -= _tables_of_biases(system, captures) | system.common.keys()
    reached: dict[str, list[Tensor]] = {}
    for constants in captures:
        found: dict[str, list[_Read]] = {}
        for node, name in constants.capture.states.items():
            if name in system.movable and node.users:
                found.setdefault(name, []).extend(_readers(node, _entries(system, name), constants))
        for name, reads in found.items():
            cut = [own for own in reads if own.cut]
            for read in [own for own in reads if not _is_whole(system, name, own)] if cut else reads:
                _mark(system, name, reached, read)
    for name, own in reached.items():
        if axes := _partial(system, name, own):
            system.partial[name] = frozenset(axes)


def _is_contracted(node: fx.Node, states: Mapping[fx.Node, str]) -> bool:
    """Whether a parameter, perhaps after moves, is contracted with another value, and never added to one."""
    readers = [node]
    for own in readers:
        readers += [user for user in own.users if name_of(own) in _MOVED or own is node]
    names = {name_of(own) for own in readers[1:]}
    contracted = any(_contracts(user, own, states) for own in readers for user in own.users if user in readers)
    return contracted and not names & operations(Trait.JOIN)


def _contracts(node: fx.Node, given: fx.Node, states: Mapping[fx.Node, str]) -> bool:
    """Whether an operation contracts a parameter with another value."""
    name = name_of(node)
    if name in {"linear"} | operations(Trait.CONVOLVE):
        return given is node.args[1]
    if name == "embedding":
        return given is node.args[0]
    if name not in operations(Trait.CONTRACT):
        return False
    first, *others = node.all_input_nodes
    # Of two factors made of parameters the second is the weight, as in a linear layer.
    return first is not given or not all(_is_made_of(own, states) for own in others)


def _is_made_of(node: fx.Node, states: Mapping[fx.Node, str]) -> bool:
    """Whether a value depends on parameters only."""
    return all(own in states for own in ancestors(node) if own.op == "placeholder")


def _by_axis(system: System, name: str) -> bool:
    return name in system.weights or math.prod(system.shape(name)) > _MOST


def _axes_of(shape: Sequence[int]) -> list[Tensor]:
    """Number the places along each axis from 1; thin."""
    return [
        1 + torch.arange(size).reshape([-1 if at == axis else 1 for at in range(len(shape))])
        for axis, size in enumerate(shape)
    ]


def _entries(system: System, name: str) -> list[Tensor]:
    """Number all entries of a tensor, or the places along each axis (thin), from 1."""
    shape = system.shape(name)
    if not _by_axis(system, name):
        return [1 + torch.arange(math.prod(shape)).reshape(shape)]
    return _axes_of(shape)


def _readers(node: fx.Node, parts: Any, constants: Constants, cut: bool = False) -> Iterator[_Read]:
    """Yield the part of a parameter that each operation other than a move reads."""
    several = isinstance(node.meta.get("val"), (list, tuple))
    shape = () if several else tuple(node.meta["val"].shape)
    for user in node.users:
        name = name_of(user)
        if several:
            for at in [user.args[1]] if name == "getitem" else range(len(parts[0])):
                own = [part[at] for part in parts]
                yield from _readers(user, own, constants, cut) if name == "getitem" else [_Read(own, cut)]
            continue
        if user.args and user.args[0] is node:
            move = move_of(user, name, shape, constants.known) if name in MOVES else None
            if "zeros" in user.meta:
                yield _Read(parts, cut)
            elif move is not None:
                long = move.cut_to(constants.lengths)
                yield from _readers(user, [move(part) for part in parts], constants, cut or long)
                continue
            if name in operations(Trait.CAST):
                yield from _readers(user, parts, constants, cut)
                continue
        if name not in operations(Trait.LIKE):
            yield _Read(parts, cut)


def _is_whole(system: System, name: str, read: _Read) -> bool:
    counts = system.shape(name) if _by_axis(system, name) else [math.prod(system.shape(name))]
    return all(len(torch.unique(part[part > 0])) == count for part, count in zip(read.parts, counts, strict=True))


def _mark(system: System, name: str, reached: dict[str, list[Tensor]], read: _Read) -> None:
    counts = system.shape(name) if _by_axis(system, name) else [math.prod(system.shape(name))]
    own = reached.setdefault(name, [torch.zeros(1 + count, dtype=torch.bool) for count in counts])
    for marks, part in zip(own, read.parts, strict=False):
        marks[part.reshape(-1)] = True


def _partial(system: System, name: str, reached: Sequence[Tensor]) -> set[int]:
    """Return the axes of a tensor that are read only in part."""
    shape = system.shape(name)
    if _by_axis(system, name):
        found = {axis for axis, own in enumerate(reached) if not bool(own[1:].all())}
        return found if name in system.weights else found | set(range(len(shape) - 1))
    whole = reached[0][1:].reshape(shape)
    if bool(whole.all()):
        return set()
    found = {axis for axis in range(whole.ndim) if varies(whole, axis)}
    return found or set(range(whole.ndim))
