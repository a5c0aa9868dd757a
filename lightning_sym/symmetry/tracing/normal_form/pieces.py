"""Cut parameters that hold the weights of several layers into one tensor for each layer."""

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.charts import Piece
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import ancestors, memories_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

_OF_VECTORS = operations(Trait.JOIN | Trait.PRODUCT | Trait.NORM | Trait.CONVOLVE) | {"linear"}


def cut_parameters(capture: Capture, whole: set[str]) -> None:
    """Cut parameters into pieces that a network reads as the weights of several layers.

    A vector is cut if some part of it is read as a weight with several axes. A matrix is cut if parts of it contract
    values of different origin, as in cross-attention: their incoming units are not the same.

    Args:
        capture: The network. Its graph is changed.
        whole: The names of parameters that are not cut.
    """
    for node, name in list(capture.states.items()):
        value = node.meta.get("val")
        if name in whole or name in capture.buffers or not isinstance(value, Tensor) or value.ndim > 2:
            continue
        readers = _readers(node)
        if value.ndim == 2 and len(readers) < 2:
            continue
        pieces = {read: piece for read in readers if (piece := _piece(name, value, read)) is not None}
        if len(pieces) < len(readers):
            continue
        origins: dict[Piece, set[fx.Node]] = {}
        for read, users in readers.items():
            origins.setdefault(pieces[read], set()).update(_origins(read, users, capture.states))
        if value.ndim == 1:
            several = any(origins.values())
        else:
            several = all(origins.values()) and len({frozenset(own) for own in origins.values()}) > 1
        if several and _are_apart(origins):
            cut_at(capture, node, readers, pieces)


def cut_arrays(capture: Capture, whole: Collection[str]) -> bool:
    """Cut arrays of weights, of which layers read separate parts along the first axes, into one tensor for each layer.

    The biases that go with them are cut at the same places. Matrices that are read row by row become vectors.

    Args:
        capture: The network in normal form, in which loops over members are operations on all members. Its graph is
            changed.
        whole: The names of parameters that are not cut.

    Returns:
        Whether any parameter is cut.
    """
    found: dict[fx.Node, tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, Piece]]] = {}
    arrays: list[fx.Node] = []
    products: set[fx.Node] = set()
    for node, name in capture.states.items():
        value = node.meta.get("val")
        if name in {*whole, *capture.buffers, *capture.charts, *capture.pieces} or not isinstance(value, Tensor):
            continue
        if value.ndim < 2 or not value.is_floating_point() or not value.is_contiguous():
            continue
        readers = _readers(node, cuts=True)
        pieces = {read: part for read in readers if (part := _piece(name, value, read, cuts=True)) is not None}
        rows = {piece.rows for piece in pieces.values()}
        if len({piece.start for piece in pieces.values()}) < 2 or len(pieces) < len(readers) or len(rows) > 1:
            continue
        if not _are_apart(pieces.values()):
            continue
        found[node] = readers, pieces
        last = [user for users in readers.values() for own in users for user in _after_moves(own)]
        in_rows = value.ndim == 2 and all(len(piece.shape) < 2 for piece in pieces.values())
        if in_rows and all(name_of(user) in _OF_VECTORS for user in last):
            arrays.append(node)  # gains and biases of different values
        elif value.ndim == 2 and rows != {1} and len(last) > len(readers) and {*map(name_of, last)} == {"linear"}:
            arrays.append(node)  # columns that several values multiply, as the difference of two others
        elif value.ndim > 2 and any(_origins(read, users, capture.states) for read, users in readers.items()):
            arrays.append(node)
            products |= {*last}
    biases = [
        node
        for node, (readers, _) in found.items()
        if node not in arrays and all(_is_added_to(own, products) for users in readers.values() for own in users)
    ]
    for node in arrays + biases:
        cut_at(capture, node, *found[node])
    return bool(arrays)


def _after_moves(node: fx.Node) -> list[fx.Node]:
    """Return the first operations from a node on that do more than move elements."""
    if name_of(node) in operations(Trait.MOVE | Trait.CAST):
        return [own for user in node.users for own in _after_moves(user)]
    return [node]


def _is_added_to(node: fx.Node, values: Collection[fx.Node]) -> bool:
    """Whether a node, perhaps after moves, only adds weights to some values."""
    readers = _after_moves(node)
    return all(name_of(own) == "add" and any(given in values for given in own.all_input_nodes) for own in readers)


def _readers(state: fx.Node, *, cuts: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """Return the readers of each part of a parameter, other than views.

    Args:
        state: The parameter.
        cuts: Whether parts with gaps between their elements count, as long as these are in order.
    """
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    left: list[tuple[fx.Node, fx.Node, fx.Node | None]] = [(state, state, None)]
    while left:  # a view, the last one in order that leads to it, and the next one on the way
        node, part, way = left.pop()
        for user in node.users:
            if not _shows(user, state) or not (cuts or _is_contiguous(user)):
                if not isinstance(part.meta["val"], (list, tuple)):
                    found.setdefault(part, {})[way or user] = None
            elif not cuts or _is_in_order(user):
                left.append((user, user, None))
            else:
                left.append((user, part, way or user))
    return {part: [*users] for part, users in found.items()}


def _shows(node: fx.Node, state: fx.Node) -> bool:
    """Whether a node is one or more views of a parameter's memory."""
    views = node.target is operator.getitem or name_of(node) in operations(Trait.MOVE | Trait.CAST)
    return views and memories_of(node) == memories_of(state)


def _is_contiguous(node: fx.Node) -> bool:
    held = node.meta.get("val")
    parts = held if isinstance(held, (list, tuple)) else [held]
    return all(isinstance(part, Tensor) and part.is_contiguous() for part in parts)


def _is_in_order(node: fx.Node) -> bool:
    """Whether the elements of a view have the order of their memory, each once."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return False
    axes = [(size, step) for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
    return all(one[1] >= two[0] * two[1] for one, two in itertools.pairwise([*axes, (1, 1)]))


def _origins(read: fx.Node, users: Sequence[fx.Node], states: Collection[fx.Node]) -> set[fx.Node]:
    """Return the sources of all values that a part of a parameter multiplies as the weight of a layer.

    Args:
        read: The part.
        users: Its readers.
        states: The parameters and buffers.

    Returns:
        Parameters and inputs of the network, or the contraction itself for those of parameters only. Nothing for
        a vector.
    """
    found, left = set[fx.Node](), list(users) if sum(size > 1 for size in read.meta["val"].shape) > 1 else []
    for user in left:
        if name_of(user) in operations(Trait.MOVE | Trait.CAST):
            left += user.users
        elif name_of(user) in operations(Trait.CONTRACT):
            origins = [{own for own in ancestors(given) if not own.args} for given in user.all_input_nodes]
            found |= set().union(*(own for own in origins if not own <= {*states})) or {user}
    return found


def _piece(name: str, whole: Tensor, read: fx.Node, *, cuts: bool = False) -> Piece | None:
    """Return a part of a parameter as a piece; with ``cuts``, without leading axes of size 1. None if it is none."""
    value: Tensor = read.meta["val"]
    axes = [(size, step) for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
    shape, count, rows = tuple(value.shape), 1, 1
    while cuts and shape[:1] == (1,):
        shape = shape[1:]
    while axes and axes[-1][1] == count:
        count *= axes.pop()[0]
    width = axes[-1][1] if axes else whole.numel()
    for size, step in reversed(axes):
        if step != rows * width:
            return None
        rows *= size
    start = int(value.storage_offset() - whole.storage_offset())
    return _named(name, start, shape, rows) if rows * width == whole.numel() else None


def _named(name: str, start: int, shape: tuple[int, ...], rows: int = 1) -> Piece:
    piece = Piece(name, start, shape, rows)
    return piece._replace(name=f"{name}[{':, ' * (rows > 1)}{start}:{piece.stop}]")


def _are_apart(pieces: Iterable[Piece]) -> bool:
    """Whether any two pieces are either disjoint or identical, including their shape."""
    alone = sorted({(piece.start, piece.stop, piece.shape) for piece in pieces if piece.stop > piece.start})
    return all(one[1] <= two[0] for one, two in itertools.pairwise(alone))


def _filled(name: str, size: int, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces, and further ones for the gaps that nothing reads."""
    starts, stops = [0, *(piece.stop for piece in pieces)], [*(piece.start for piece in pieces), size]
    rows = pieces[0].rows
    gaps = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
    rest = [_named(name, start, (rows, stop - start)[rows == 1 :], rows) for start, stop in gaps]
    return tuple(sorted([*pieces, *rest], key=lambda piece: piece.start))


def cut_at(
    capture: Capture, state: fx.Node, readers: dict[fx.Node, list[fx.Node]], pieces: dict[fx.Node, Piece]
) -> None:
    """Replace a parameter by its pieces."""
    name, size = capture.states[state], state.meta["val"].numel()
    _cut(capture, state, dict(sorted(readers.items(), key=lambda own: pieces[own[0]].start)), pieces)
    found = {piece.start: piece for piece in pieces.values() if piece.stop > piece.start}
    rows = next(iter(pieces.values())).rows
    capture.pieces[name] = _filled(name, size // rows, [found[start] for start in sorted(found)])


def _cut(capture: Capture, state: fx.Node, readers: dict[fx.Node, list[fx.Node]], pieces: dict[fx.Node, Piece]) -> None:
    """Replace each part of a parameter by a placeholder."""
    made: dict[Piece, fx.Node] = {}
    for read, users in readers.items():
        piece, value = pieces[read], read.meta["val"]
        if piece not in made:
            with capture.graph.inserting_before(state):
                made[piece] = capture.graph.placeholder(f"{state.name}_{piece.start}")
            with value.fake_mode:
                made[piece].meta["val"] = torch.empty(piece.shape, dtype=value.dtype, device=value.device)
        part = made[piece]
        if tuple(value.shape) != piece.shape:
            with capture.graph.inserting_before(users[0]):
                part = capture.graph.call_function(torch.ops.aten.view.default, (made[piece], list(value.shape)))
            with value.fake_mode:
                part.meta["val"] = made[piece].meta["val"].view(value.shape)
        for user in users:
            user.replace_input_with(read, part)
            renew(user, memories_of(state))
    shown = [node for node in capture.graph.nodes if memories_of(node) == memories_of(state)]
    capture.marks[:] = [mark for mark in capture.marks if mark.node not in shown]
    for node in reversed(shown):
        capture.modules.pop(node, None)
        capture.graph.erase_node(node)
    new = {node: piece.name for piece, node in made.items()}
    items = list(capture.states.items())
    at = [node for node, _ in items].index(state)
    capture.states = dict([*items[:at], *new.items(), *items[at + 1 :]])


def renew(node: fx.Node, old: set[int]) -> None:
    """Move a view of a parameter, and all views of that view, from an old memory to that of its new value."""
    if memories_of(node) != old:
        return
    given, named = fx.map_arg((node.args, node.kwargs), lambda own: own.meta["val"])
    target: Any = node.target
    with next(own for own in pytree.tree_leaves((given, named)) if isinstance(own, FakeTensor)).fake_mode:
        node.meta["val"] = target(*given, **named)
    for user in node.users:
        renew(user, old)


def unlike_pieces(captures: Sequence[Capture]) -> set[str]:
    """Return the names of parameters that captures cut into different pieces."""
    return {
        name
        for name in {name for capture in captures for name in capture.pieces}
        if len({capture.pieces.get(name) for capture in captures if _reads(capture, name)}) > 1
    }


def _reads(capture: Capture, name: str) -> bool:
    return name in capture.pieces or any(own == name and node.users for node, own in capture.states.items())


def pieces_of(captures: Sequence[Capture]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of all parameters that are read in pieces."""
    return {name: pieces for capture in captures for name, pieces in capture.pieces.items()}
