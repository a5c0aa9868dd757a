"""Read layers whose outputs are the weights of further layers, as in hypernetworks, as arrays in these weights' shape.

The outputs of such a layer are the entries of a matrix, with units on each axis. Its own weight therefore gets an axis
for each axis of the matrix.
"""

import contextlib
import math
import string
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.charts import Piece
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.coordinates import varies
from lightning_sym.symmetry.tracing.nodes import argument, equation_of, letters_of, moved
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.pieces import cut_at
from lightning_sym.symmetry.tracing.rewriting import NoSpellingError, Rewriter

aten = torch.ops.aten
_MOST = 2**22  # entries that are numbered
_MOVES = operations(Trait.MOVE)
_REGROUPS = operations(Trait.REGROUP)
_OF_ONE = operations(Trait.CAST | Trait.POINTWISE)
_PRODUCTS = {"linear", "matmul", "einsum"}
_ALONG = operations(Trait.CAST | Trait.POINTWISE | Trait.JOIN | Trait.PRODUCT | Trait.SOFTMAX)


class _Part(NamedTuple):
    """A range of a layer's outputs, read in a shape of its own."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The output after the last one."""
        return self.start + math.prod(self.shape)


def shape_layers(capture: Capture, whole: Collection[str], kept: Collection[str] = ()) -> bool:
    """Give the weights of layers that make weights of other layers the shape of these.

    Args:
        capture: The network in normal form. Its graph is changed.
        whole: The names of parameters that keep their shapes.
        kept: Operations, such as ``aten::linear``, that are neither replaced nor inserted.

    Returns:
        Whether any layer is changed.
    """
    r = Rewriter(capture, kept)
    changed = False
    for node in [own for own in capture.graph.nodes if r.name(own) in ("linear", "embedding")]:
        tensors: list[Any] = [node.args[1], argument(node, 2, "bias")] if r.name(node) == "linear" else [node.args[0]]
        if all(own is None or _is_free(capture, own, node, whole) for own in tensors):
            with contextlib.suppress(NoSpellingError):
                changed |= _shape_layer(r, node, [own for own in tensors if own is not None])
    return changed


def _is_free(capture: Capture, tensor: fx.Node, reader: fx.Node, whole: Collection[str]) -> bool:
    """Whether a tensor is a parameter that only one layer reads and that has neither pieces nor other coordinates."""
    name = capture.states.get(tensor)
    if name is None or list(tensor.users) != [reader] or not tensor.meta["val"].is_contiguous():
        return False
    return name not in {*whole, *capture.buffers, *capture.charts, *capture.pieces}


def _shape_layer(r: Rewriter, node: fx.Node, tensors: Sequence[fx.Node]) -> bool:
    """Replace a layer that makes weights by one layer for each part of its outputs; return whether it makes any.

    Args:
        r: The rewriter.
        node: The layer, or the reader of a table.
        tensors: The weight and, if any, the bias of the layer, or the table.
    """
    shape, size = r.shape(node), r.shape(node)[-1]
    if not 0 < math.prod(shape) < _MOST or not _makes_weights(r, node, torch.arange(size).expand(shape)):
        return False
    _views_first(r, node)
    parts = _parts(r, node, torch.arange(math.prod(shape)).reshape(shape), size) or {}
    alone = sorted(set(parts.values()))
    if [0, *(part.stop for part in alone)] != [*(part.start for part in alone), size]:
        return False
    r.at = node
    pieces: dict[fx.Node, dict[fx.Node, Piece]] = {own: {} for own in tensors}
    made = {part: _made(r, node, part, pieces) for part in alone}
    r.unmark(node)  # its entries are no longer units on one axis
    for read, part in parts.items():
        r.at = read
        r.replace(read, r.insert(aten.reshape.default, made[part], list(r.shape(read))))
    r.erase_unread()
    for tensor, own in pieces.items():
        cut_at(r.capture, tensor, {read: [*read.users] for read in own}, own)
    return True


def _made(r: Rewriter, node: fx.Node, part: _Part, pieces: dict[fx.Node, dict[fx.Node, Piece]]) -> fx.Node:
    """Insert the layer that makes one part, in its shape, and record the pieces of parameters that it reads."""
    table, read = r.name(node) == "embedding", []
    for tensor, known in pieces.items():
        axis = int(table)
        sizes = list(r.shape(tensor))
        whole = (*sizes[:axis], *part.shape, *sizes[axis + 1 :])
        cut = r.insert(aten.slice.Tensor, tensor, axis, part.start, part.stop)
        read.append(r.insert(aten.reshape.default, cut, whole))
        name = f"{r.capture.states[tensor]}[{':, ' * axis}{part.start}:{part.stop}]"
        start = part.start * math.prod(sizes[axis + 1 :])
        known[read[-1]] = Piece(name, start, whole, sizes[0] if table else 1)
    if table:
        return r.insert(aten.index.Tensor, read[0], [node.args[1]])
    lead = string.ascii_lowercase[: len(r.shape(node)) - 1]
    axes = string.ascii_uppercase[: len(part.shape)]
    made = r.insert(aten.einsum.default, f"{lead}z,{axes}z->{lead}{axes}", [node.args[0], read[0]])
    return r.insert(aten.add.Tensor, made, read[1]) if len(read) > 1 else made


def _views_first(r: Rewriter, node: fx.Node) -> None:
    """Move views of a layer's outputs before functions of single entries, such as tanh."""
    for function in list(node.users):
        if r.name(function) not in _OF_ONE or function.all_input_nodes != [node]:
            continue
        _views_first(r, function)
        for view in list(function.users):
            if r.name(view) in _REGROUPS and view.args[0] is function:
                r.at = view
                own = r.insert(view.target, node, *view.args[1:], **view.kwargs)
                r.replace(view, r.insert(function.target, own, *function.args[1:], **function.kwargs))


def _parts(r: Rewriter, node: fx.Node, numbers: Tensor, size: int) -> dict[fx.Node, _Part] | None:
    """Return the last views of a layer's outputs that hold a range of them in order, each with the range.

    Args:
        r: The rewriter.
        node: The layer, or a view of its outputs.
        numbers: The number of each entry of the view among all entries of the outputs.
        size: The number of outputs.

    Returns:
        The views; None if a reader of this view has no other view, and this one holds no range.
    """
    found: dict[fx.Node, _Part] = {}
    for view, further in _views(r, node, numbers):
        below = None if further is None else _parts(r, view, further, size)
        if below is None:
            own = _range(numbers, size)
            if own is None:
                return None
            below = {node: own}
        found |= below
    return found


def _views(r: Rewriter, node: fx.Node, numbers: Tensor) -> Iterator[tuple[fx.Node, Tensor | None]]:
    """Yield the readers of a value, with their numbers if they only move its entries."""
    for user in node.users:
        further = moved(user, numbers) if r.name(user) in _MOVES and user.args[0] is node else None
        if isinstance(further, (list, tuple)):
            for item in user.users:
                yield item, further[item.args[1]]  # type: ignore[index]
        else:
            yield user, further


def _range(numbers: Tensor, size: int) -> _Part | None:
    """Return the range that a view holds of every row of outputs; None if it moves or omits rows."""
    shape = tuple(numbers.shape)
    rows = int(numbers.reshape(-1)[-1]) // size + 1 if numbers.numel() else 0
    at = next((at for at in reversed(range(len(shape))) if math.prod(shape[:at]) == rows), None)
    if at is None:
        return None
    part = _Part(int(numbers.reshape(-1)[0]), shape[at:])
    wanted = torch.arange(rows)[:, None] * size + torch.arange(part.start, part.stop)
    return part if part.stop <= size and torch.equal(numbers.reshape(rows, -1), wanted) else None


def _makes_weights(r: Rewriter, node: fx.Node, places: Tensor, seen: set[fx.Node] | None = None) -> bool:
    """Whether a value multiplies a view of outputs as a matrix of weights: one axis is summed, another one is new.

    Args:
        r: The rewriter.
        node: The view.
        places: The output that each entry of the view holds.
        seen: Views that were looked at before; grows.
    """
    seen = set() if seen is None else seen
    for view, further in _views(r, node, places):
        if view in seen:
            continue
        if further is None and r.name(view) in _ALONG and r.shape(view) == tuple(places.shape):
            further = places
        if further is not None:
            seen.add(view)
            if _makes_weights(r, view, further, seen):
                return True
        elif r.name(view) in _PRODUCTS and (equation := equation_of(view)) is not None:
            *terms, out = letters_of(equation)
            given: Any = view.args[1] if r.name(view) == "einsum" else view.args[:2]
            for at, own in enumerate(given):
                if own is not node or r.made_of(given[1 - at]) != "inputs":
                    continue
                varying = {letter for axis, letter in enumerate(terms[at]) if varies(places, axis)}
                if varying - {*out} and varying & {*out} - {*terms[1 - at]}:
                    return True
    return False
