"""Cut parameters that hold the weights of several layers into one tensor for each layer."""

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.charts import Piece
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.nodes import ancestors, memories_of
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations


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
        pieces = {read: _piece(name, value, read) for read in readers}
        origins: dict[Piece, set[fx.Node]] = {}
        for read, users in readers.items():
            origins.setdefault(pieces[read], set()).update(_origins(read, users, capture.states))
        if value.ndim == 1:
            several = any(origins.values())
        else:
            several = all(origins.values()) and len({frozenset(own) for own in origins.values()}) > 1
        if several and _are_apart(origins):
            _cut(capture, node, dict(sorted(readers.items(), key=lambda own: pieces[own[0]].start)), pieces)
            found = {piece.start: piece for piece in pieces.values() if piece.stop > piece.start}
            capture.pieces[name] = _filled(name, value.numel(), [found[start] for start in sorted(found)])


def _readers(state: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """Return the readers of each part of a parameter, other than views."""
    found: dict[fx.Node, list[fx.Node]] = {}
    left = [state]
    while left:
        node = left.pop()
        for user in node.users:
            if _shows(user, state):
                left.append(user)
            elif not isinstance(node.meta["val"], (list, tuple)):
                found.setdefault(node, []).append(user)
    return found


def _shows(node: fx.Node, state: fx.Node) -> bool:
    """Whether a node is one or more contiguous views of a parameter's memory."""
    held = node.meta.get("val")
    parts = held if isinstance(held, (list, tuple)) else [held]
    in_order = all(isinstance(part, Tensor) and part.is_contiguous() for part in parts)
    views = node.target is operator.getitem or name_of(node) in operations(Trait.MOVE | Trait.CAST)
    return in_order and views and memories_of(node) == memories_of(state)


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


def _piece(name: str, whole: Tensor, read: fx.Node) -> Piece:
    value: Tensor = read.meta["val"]
    return _named(name, int(value.storage_offset() - whole.storage_offset()), tuple(value.shape))


def _named(name: str, start: int, shape: tuple[int, ...]) -> Piece:
    piece = Piece(name, start, shape)
    return piece._replace(name=f"{name}[{start}:{piece.stop}]")


def _are_apart(pieces: Iterable[Piece]) -> bool:
    """Whether any two pieces are either disjoint or identical, including their shape."""
    alone = sorted({(piece.start, piece.stop, piece.shape) for piece in pieces if piece.stop > piece.start})
    return all(one[1] <= two[0] for one, two in itertools.pairwise(alone))


def _filled(name: str, size: int, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces, and further ones for the gaps that nothing reads."""
    starts, stops = [0, *(piece.stop for piece in pieces)], [*(piece.start for piece in pieces), size]
    rest = [_named(name, start, (stop - start,)) for start, stop in zip(starts, stops, strict=True) if start < stop]
    return tuple(sorted([*pieces, *rest], key=lambda piece: piece.start))


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
        for user in users:
            _renew(user, memories_of(state), made[piece].meta["val"], value.storage_offset())
            user.replace_input_with(read, made[piece])
    shown = [node for node in capture.graph.nodes if memories_of(node) == memories_of(state)]
    capture.marks[:] = [mark for mark in capture.marks if mark.node not in shown]
    for node in reversed(shown):
        capture.modules.pop(node, None)
        capture.graph.erase_node(node)
    new = {node: piece.name for piece, node in made.items()}
    items = list(capture.states.items())
    at = [node for node, _ in items].index(state)
    capture.states = dict([*items[:at], *new.items(), *items[at + 1 :]])


def _renew(node: fx.Node, old: set[int], piece: Tensor, start: int) -> None:
    """Move a view of a piece, and all views of that view, to the piece's own memory."""
    if memories_of(node) != old:
        return
    with piece.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.utils._pytree.tree_map_only(
            Tensor,
            lambda part: piece.as_strided(part.shape, part.stride(), part.storage_offset() - start),
            node.meta["val"],
        )
    for user in node.users:
        _renew(user, old, piece, start)


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
