"""Read layers whose outputs are the weights of further layers, as in hypernetworks, as arrays in these weights' shape.

The outputs of such a layer are the entries of a matrix, with units on each axis. Its own weight therefore gets an axis
for each axis of the matrix.
"""

import math
import string
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.charts import Piece
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.nodes import argument, equation_of, letters_of, moved
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.pieces import cut_at
from lightning_sym.symmetry.tracing.rewriting import Rewriter

aten = torch.ops.aten
_MOST = 2**22  # entries that are numbered
_MOVES = operations(Trait.MOVE)
_PRODUCTS = {"linear", "matmul", "einsum"}
_ALONG = operations(Trait.CAST | Trait.POINTWISE | Trait.JOIN | Trait.PRODUCT)


class _Part(NamedTuple):
    """A range of a layer's outputs, read in a shape of its own."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The output after the last one."""
        return self.start + math.prod(self.shape)


def shape_layers(capture: Capture, whole: Collection[str]) -> bool:
    """Give the weights of layers that make weights of other layers the shape of these.

    Args:
        capture: The network in normal form. Its graph is changed.
        whole: The names of parameters that keep their shapes.

    Returns:
        Whether any layer is changed.
    """
    r = Rewriter(capture)
    changed = False
    for node in [own for own in capture.graph.nodes if r.name(own) == "linear"]:
        tensors: list[Any] = [node.args[1], argument(node, 2, "bias")]
        if all(own is None or _is_free(capture, own, node, whole) for own in tensors):
            changed |= _shape_layer(r, node, *tensors)
    return changed


def _is_free(capture: Capture, tensor: fx.Node, reader: fx.Node, whole: Collection[str]) -> bool:
    """Whether a tensor is a parameter that only one layer reads and that has neither pieces nor other coordinates."""
    name = capture.states.get(tensor)
    if name is None or list(tensor.users) != [reader] or not tensor.meta["val"].is_contiguous():
        return False
    return name not in {*whole, *capture.buffers, *capture.charts, *capture.pieces}


def _shape_layer(r: Rewriter, node: fx.Node, weight: fx.Node, bias: fx.Node | None) -> bool:
    shape, size = r.shape(node), r.shape(node)[-1]
    if not 0 < math.prod(shape) < _MOST or not _makes_weights(r, node, torch.arange(size).expand(shape)):
        return False
    parts = dict(_parts(r, node, torch.arange(math.prod(shape)).reshape(shape), size))
    alone = sorted(set(parts.values()))
    if [0, *(part.stop for part in alone)] != [*(part.start for part in alone), size]:
        return False
    r.at = node
    pieces: dict[fx.Node, dict[fx.Node, Piece]] = {own: {} for own in (weight, bias) if own is not None}
    made: dict[_Part, fx.Node] = {}
    lead = string.ascii_lowercase[: len(shape) - 1]
    for part in alone:
        for tensor, own in pieces.items():
            whole = (*part.shape, *r.shape(tensor)[1:])
            rows = r.insert(aten.slice.Tensor, tensor, 0, part.start, part.stop)
            name = f"{r.capture.states[tensor]}[{part.start}:{part.stop}]"
            start = part.start * math.prod(r.shape(tensor)[1:])
            own[r.insert(aten.reshape.default, rows, whole)] = Piece(name, start, whole)
        own_weight, *own_bias = ([*own][-1] for own in pieces.values())
        axes = string.ascii_uppercase[: len(part.shape)]
        made[part] = r.insert(aten.einsum.default, f"{lead}z,{axes}z->{lead}{axes}", [node.args[0], own_weight])
        for added in own_bias:
            made[part] = r.insert(aten.add.Tensor, made[part], added)
    r.unmark(node)  # its entries are no longer units on one axis
    for read, part in parts.items():
        r.at = read
        r.replace(read, r.insert(aten.reshape.default, made[part], list(r.shape(read))))
    for tensor, own in pieces.items():
        cut_at(r.capture, tensor, {read: [*read.users] for read in own}, own)
    return True


def _parts(r: Rewriter, node: fx.Node, numbers: Tensor, size: int) -> Iterator[tuple[fx.Node, _Part]]:
    """Yield the last views of a layer's outputs that hold a range of them in order, each with the range.

    Args:
        r: The rewriter.
        node: The layer, or a view of its outputs.
        numbers: The number of each entry of the view among all entries of the outputs.
        size: The number of outputs.
    """
    for view, further in _views(r, node, numbers):
        if further is None or _range(further, size) is None:
            yield node, _range(numbers, size)  # type: ignore[misc]
        else:
            yield from _parts(r, view, further, size)


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


def _makes_weights(r: Rewriter, node: fx.Node, places: Tensor) -> bool:
    """Whether a value multiplies a view of outputs as a matrix of weights: one axis is summed, another one is new.

    Args:
        r: The rewriter.
        node: The view.
        places: The output that each entry of the view holds.
    """
    for view, further in _views(r, node, places):
        if further is None and r.name(view) in _ALONG and r.shape(view) == tuple(places.shape):
            further = places
        if further is not None:
            if _makes_weights(r, view, further):
                return True
        elif r.name(view) in _PRODUCTS and (equation := equation_of(view)) is not None:
            *terms, out = letters_of(equation)
            given: Any = view.args[1] if r.name(view) == "einsum" else view.args[:2]
            for at, own in enumerate(given):
                if own is not node or r.made_of(given[1 - at]) != "inputs":
                    continue
                varying = {
                    letter for axis, letter in enumerate(terms[at]) if bool((places != places.narrow(axis, 0, 1)).any())
                }
                if varying - {*out} and varying & {*out} - {*terms[1 - at]}:
                    return True
    return False
