"""Read layers whose outputs are the weights of further layers, as in hypernetworks, as arrays in these weights' shape.

The outputs of such a layer are the entries of a matrix, with units on each axis. Its own weight therefore gets an axis
for each axis of the matrix. The weight of a layer that reads an outer product has one for each axis of the product.
"""

import contextlib
import math
import string
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.charts import Identity, Piece
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.coordinates import thinned
from lightning_sym.symmetry.tracing.graph.nodes import argument, equation_of, letters_of, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.normal_form.bilinear import outer_read_by
from lightning_sym.symmetry.tracing.normal_form.pieces import cut_at

aten = torch.ops.aten
_MOST = 2**22  # entries that are numbered
_MOVES = operations(Trait.MOVE)
_REGROUPS = operations(Trait.REGROUP)
_OF_ONE = operations(Trait.CAST | Trait.POINTWISE)
_PRODUCTS = {"linear", "matmul", "einsum"}
_KERNELS = operations(Trait.CONVOLVE)
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
    layers: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in capture.graph.nodes:
        if (name := r.name(node)) in ("linear", "embedding"):
            read = [node.args[1], argument(node, 2, "bias")] if name == "linear" else [node.args[0]]
            layers.setdefault((name, *(own for own in read if own is not None)), []).append(node)
    for (_, *tensors), nodes in layers.items():
        free = [_is_free(capture, own, nodes, whole) for own in tensors]
        with contextlib.suppress(NoSpellingError):
            changed |= all(free) and _shape_layers(r, nodes, tensors)
        if free[0] and nodes[0].users:
            changed |= _shape_readers(r, nodes, tensors[0])
    return changed


def _shape_readers(r: Rewriter, nodes: Sequence[fx.Node], weight: fx.Node) -> bool:
    """Give the weight of layers that read an outer product an axis for each of its axes; return whether they do."""
    if any(r.name(node) != "linear" for node in nodes):
        return False
    found = [outer for node in nodes if (outer := outer_read_by(r, node)) is not None]
    sizes = {own.sizes for own in found}
    if len(found) < len(nodes) or len(sizes) != 1:
        return False
    rows, columns = r.shape(weight)
    shape = (rows, *sizes.pop())
    known: dict[fx.Node, Piece] = {}
    for node, outer in zip(nodes, found, strict=True):
        r.at = node
        read = r.insert(aten.reshape.default, weight, list(shape))
        known[read] = Piece(f"{r.capture.states[weight]}[:, 0:{columns}]", 0, shape)
        r.replace(node, outer.read_by(r, read, argument(node, 2, "bias")))
    r.erase_unread()
    _chart_pieces(r.capture, weight, known.values())
    cut_at(r.capture, weight, {read: [*read.users] for read in known}, known)
    return True


def _is_free(capture: Capture, tensor: fx.Node, readers: Sequence[fx.Node], whole: Collection[str]) -> bool:
    """Whether only some layers read a tensor, a parameter without pieces."""
    name = capture.states.get(tensor)
    if name is None or {*tensor.users} != {*readers} or not tensor.meta["val"].is_contiguous():
        return False
    return name not in {*whole, *capture.buffers, *capture.pieces} and not isinstance(
        capture.charts.get(name), Identity
    )


def _shape_layers(r: Rewriter, nodes: Sequence[fx.Node], tensors: Sequence[fx.Node]) -> bool:
    """Replace a layer that makes weights by one layer for each part of its outputs; return whether it makes any.

    Args:
        r: The rewriter.
        nodes: All calls of the layer, or readers of a table.
        tensors: The weight and, if any, the bias of the layer, or the table.
    """
    size, makes = r.shape(nodes[0])[-1], False
    for node in nodes:
        shape = r.shape(node)
        if not 0 < math.prod(shape) < _MOST:
            return False
        makes = makes or _makes_weights(r, node, torch.arange(size).expand(shape))
    if not makes:
        return False
    parts: dict[fx.Node, dict[fx.Node, _Part]] = {}
    for node in nodes:
        _views_first(r, node)
        shape = r.shape(node)
        numbers, rows = torch.arange(math.prod(shape)).reshape(shape), math.prod(shape[:-1])
        parts[node] = _parts(r, node, numbers, size, rows) or {}
    alone = sorted({part for own in parts.values() for part in own.values()})
    if [0, *(part.stop for part in alone)] != [*(part.start for part in alone), size]:
        return False
    pieces: dict[fx.Node, dict[fx.Node, Piece]] = {own: {} for own in tensors}
    for node, own in parts.items():
        r.at = node
        made = {part: _made(r, node, part, pieces) for part in dict.fromkeys(own.values())}
        r.unmark(node)  # its entries are no longer units on one axis
        for read, part in own.items():
            r.at = read
            r.replace(read, r.insert(aten.reshape.default, made[part], list(r.shape(read))))
    r.erase_unread()
    for tensor, known in pieces.items():
        _chart_pieces(r.capture, tensor, known.values())
        cut_at(r.capture, tensor, {read: [*read.users] for read in known}, known)
    return True


def _chart_pieces(capture: Capture, tensor: fx.Node, pieces: Iterable[Piece]) -> None:
    """Give the pieces of a tensor its coordinates, as 1 + w."""
    chart = capture.charts.pop(capture.states[tensor], 0.0)
    for piece in pieces:
        part = chart[piece.start : piece.stop] if isinstance(chart, tuple) else chart
        if part != 0.0:
            capture.charts[piece.name] = part


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


def _parts(r: Rewriter, node: fx.Node, numbers: Tensor, size: int, rows: int) -> dict[fx.Node, _Part] | None:
    """Return the last views of a layer's outputs that hold a range of them in order, each with the range.

    Args:
        r: The rewriter.
        node: The layer, or a view of its outputs.
        numbers: The number of each entry of the view among all entries of the outputs.
        size: The number of outputs.
        rows: The number of rows of outputs.

    Returns:
        The views; None if a reader of this view has no other view, and this one holds no range.
    """
    found: dict[fx.Node, _Part] = {}
    for view, further in _views(r, node, numbers):
        below = None if further is None else _parts(r, view, further, size, rows)
        if below is None:
            own = _range(numbers, size, rows)
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


def _range(numbers: Tensor, size: int, rows: int) -> _Part | None:
    """Return the range that a view holds of every row of outputs; None if it moves or omits rows."""
    shape = tuple(numbers.shape)
    at = next((at for at in reversed(range(len(shape))) if math.prod(shape[:at]) == rows), None)
    if at is None or not numbers.numel():
        return None
    part = _Part(int(numbers.reshape(-1)[0]), shape[at:])
    wanted = torch.arange(rows)[:, None] * size + torch.arange(part.start, part.stop)
    return part if part.stop <= size and torch.equal(numbers.reshape(rows, -1), wanted) else None


def _makes_weights(
    r: Rewriter, node: fx.Node, places: Tensor, seen: set[fx.Node] | None = None, *, inner: bool = False
) -> bool:
    """Whether a value multiplies a view of outputs as a matrix of weights: one axis is summed, another one is new.

    Args:
        r: The rewriter.
        node: The view.
        places: The output that each entry of the view holds.
        seen: Views that were looked at before; grows.
        inner: Whether another layer makes one of these axes.
    """
    seen = set() if seen is None else seen
    for view, further in _views(r, node, places):
        if view in seen:
            continue
        if further is None and r.name(view) in _ALONG and r.shape(view) == tuple(places.shape):
            further = places
        if further is not None:
            seen.add(view)
            if _makes_weights(r, view, further, seen, inner=inner):
                return True
        elif r.name(view) in _KERNELS and view.args[1] is node and r.made_of(view.args[0]) == "inputs":
            if (any if inner else all)(size > 1 for size in thinned(places).shape[:2]):
                return True
        elif r.name(view) in _PRODUCTS and (equation := equation_of(view)) is not None:
            *terms, out = letters_of(equation)
            given: Any = view.args[1] if r.name(view) == "einsum" else view.args[:2]
            varying = thinned(places).shape
            for at, own in enumerate(given):
                if own is not node:
                    continue
                told = {letter for letter, size in zip(terms[at], varying, strict=True) if size > 1}
                gone, kept = told - {*out}, told & {*out}
                if r.made_of(given[1 - at]) == "inputs":
                    if (any if inner else all)((gone, kept - {*terms[1 - at]})):
                        return True
                elif gone and kept:
                    further = _kept(places, terms[at], out, r.shape(view))
                    if _makes_weights(r, view, further, seen, inner=True):
                        return True
    return False


def _kept(places: Tensor, term: str, out: str, shape: Sequence[int]) -> Tensor:
    """Return the places of outputs along the axes that a contraction keeps, in its result's shape."""
    for axis in reversed([axis for axis, letter in enumerate(term) if letter not in out]):
        places = places.select(axis, 0)
    left = [letter for letter in term if letter in out]
    places = places.permute([left.index(letter) for letter in out if letter in left])
    return places[tuple(slice(None) if letter in left else None for letter in out)].expand(shape)
