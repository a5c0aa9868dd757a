"""Rewrite layers with parts that are zero, and grouped convolutions with computed weights."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.coordinates import coordinates, varying_axes
from lightning_sym.symmetry.tracing.graph.nodes import argument, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations, spatial_axes_of
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped
from lightning_sym.symmetry.tracing.normal_form.sums import Term, summed, terms_of, with_parts
from lightning_sym.symmetry.tracing.normal_form.unit_axes import unit_axes

aten = torch.ops.aten
_MOST = 2**22  # elements of all windows of a convolution
_REPEATS = operations(Trait.REGROUP | Trait.EXPAND) | {"repeat", "repeat_interleave", "index", "index_select"}
_KEEPS = operations(Trait.PERMUTE | Trait.CAST) | {"flatten", "unsqueeze"}  # of any sizes
_MOVES = operations(Trait.REGROUP | Trait.PERMUTE | Trait.CUT | Trait.EXPAND | Trait.CAST)


def filled(r: Rewriter, item: Any) -> float | None:
    """Return the number with which an operation fills a value of any size; None for other values."""
    while r.name(item) in _MOVES:
        item = item.args[0]
    name = r.name(item)
    if name == "full":
        return r.number(item.args[1])
    return {"zeros": 0.0, "ones": 1.0}.get(name)


def taken_apart(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a layer of concatenated values as one layer per value, without those that are zero (initial states).

    It applies if a value is zero, if the weights are concatenated alike, if two values repeat one (the two ends of each
    edge of a graph), whose units the layer reads twice, if a value is the difference of two others, or if units of one
    also lie along other axes (shuffled pixels).
    """
    value, weight = node.args[:2]
    groups = argument(node, 6, "groups", 1) if r.name(node) != "linear" else 1
    way: list[fx.Node] = []
    while r.name(value) in _KEEPS and isinstance(value, fx.Node):
        way, value = [value, *way], value.args[0]
    if r.name(value) != "cat" or not isinstance(value, fx.Node) or groups != 1:
        return None
    channel, parts = cast(int, _summed_axis(r, node)), cast(Any, value.args[0])
    place = coordinates(r.shape(value), [argument(value, 1, "dim", 0) % len(r.shape(value))])
    for step in way:
        place = place if r.name(step) in operations(Trait.CAST) else moved(step, place)
        parts = [r.insert(step.target, part, *step.args[1:], **step.kwargs) for part in parts]
    if varying_axes(place) != [channel]:
        return None
    origins = [_repeated(r, part) for part in parts]
    twice = any(one is not None and one in origins[:at] for at, one in enumerate(origins))
    numbers, sizes = [filled(r, part) for part in parts], [r.shape(part)[channel] for part in parts]
    weights: Any = weight.args[0] if r.name(weight) == "cat" else [weight]  # type: ignore[union-attr]
    alike = (
        r.made_of(weight) == "weights" and [r.shape(own)[1] for own in weights] == sizes
    )  # a column of ones is a bias
    alike = alike and all(
        number == 0 or r.made_of(part) == "inputs" for part, number in zip(parts, numbers, strict=True)
    )
    terms = [[Term(part, part, True)] if alike else _terms(r, part, parts) for part in parts]
    lie = {frozenset(own) for own in (unit_axes(r, part) for part in parts) if channel in own}
    if not twice and not alike and len(lie) < 2 and 0 not in numbers and all(len(own) == 1 for own in terms):
        return None
    total, start = None, 0
    for at, (number, size) in enumerate(zip(numbers, sizes, strict=True)):
        if number != 0:
            own = weights[at] if alike else r.insert(aten.slice.Tensor, weight, 1, start, start + size)
            own.meta |= {"zeros": True} if not alike else {}
            for term in terms[at]:
                bias = [None] * (total is not None) or node.args[2:3]
                layer = r.insert(node.target, term.node, own, *bias, *node.args[3:])
                total = layer if total is None else summed(r, total, [term._replace(node=layer)])
        start += size
    return total


def _terms(r: Rewriter, part: fx.Node, parts: Sequence[fx.Node]) -> list[Term]:
    """Return the terms of a value that is a sum or difference of other ones, the first of them added."""
    found = [term for term in terms_of(r, part) if term.node in parts]
    whole = len(found) == len(terms_of(r, part)) > 1 and r.made_of(part) == "inputs" and found[-1].added
    return found[::-1] if whole else [Term(part, part, True)]


def _repeated(r: Rewriter, part: fx.Node) -> fx.Node | None:
    """Return the computed value of which another one only repeats or regroups elements; None for inputs."""
    value = part
    while r.name(value) in _REPEATS:
        value = value.args[0]  # type: ignore[assignment]
    return value if value.op == "call_function" and r.made_of(value) == "inputs" else None


def padded(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite padding of one axis by a number as a concatenation; by zeros only if layers read it as inputs."""
    value, sizes, *more = cast(Any, node.args)
    number = more[-1] if more else 0
    shape, kind = list(r.shape(value)), node.meta["val"]
    if not isinstance(sizes, (list, tuple)) or not isinstance(number, (int, float)) or min(sizes, default=-1) < 0:
        return None
    axes = {len(shape) - 1 - at // 2 for at, size in enumerate(sizes) if size}
    layers = all(user.args[0] is node and _summed_axis(r, user) in axes for user in node.users)
    if len(axes) != 1 or (number == 0 and not layers):
        return None
    at = 2 * (len(shape) - 1 - (axis := min(axes)))
    full = [[*shape[:axis], size, *shape[axis + 1 :]] for size in sizes[at : at + 2]]
    before, behind = (r.insert(aten.full.default, own, number, dtype=kind.dtype, device=kind.device) for own in full)
    return r.insert(aten.cat.default, [before, value, behind][not sizes[at] : 2 + (sizes[at + 1] > 0)], axis)


def _summed_axis(r: Rewriter, layer: fx.Node) -> int | None:
    """Return the axis of its first argument that a layer sums over; None for other operations."""
    name = r.name(layer)
    plain = "transpose" not in name and name.startswith(("linear", "conv"))
    return len(r.shape(layer.args[0])) - 1 - (0 if name == "linear" else spatial_axes_of(name)) if plain else None


def joined_flat(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite stacked values whose new axis is merged with the next one as a concatenation along this axis."""
    stack = node.args[0]
    if r.name(node) not in operations(Trait.REGROUP) or r.name(stack) != "cat" or not r.only_for(stack, node):
        return None
    assert isinstance(stack, fx.Node)
    parts: Any = stack.args[0]
    shape = r.shape(stack)
    axis = argument(stack, 1, "dim", 0) % len(shape)
    wanted = (*shape[:axis], math.prod(shape[axis : axis + 2]), *shape[axis + 2 :])
    if r.shape(node) != wanted or len(wanted) == len(shape):
        return None
    sizes = [[*r.shape(part)[:axis], math.prod(r.shape(part)[axis : axis + 2]), *shape[axis + 2 :]] for part in parts]
    flat = [r.insert(aten.reshape.default, part, own) for part, own in zip(parts, sizes, strict=True)]
    return r.insert(aten.cat.default, flat, axis)


def grouped(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a grouped convolution with computed weights as a product with the windows of its input, in groups."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    value, weight, bias, stride, padding, dilation, groups = (
        argument(node, at, name, default)
        for at, (name, default) in enumerate(zip(names, (None, None, None, 1, 0, 1, 1), strict=True))
    )
    shape, kernel, out = r.shape(value), r.shape(weight), r.shape(node)
    count = spatial_axes_of(r.name(node))
    own = weight.args[0] if weight not in r.capture.states and r.name(weight) in operations(Trait.REGROUP) else weight
    matrix = own in r.capture.states and r.shape(own) == kernel[:2]  # of a layer in groups
    if groups == 1 or own is weight in r.capture.states or matrix or r.made_of(weight) == "constants":
        return None
    if len(shape) != count + 2:
        return None
    if isinstance(padding, str) or math.prod(out[2:]) * math.prod(kernel[2:]) * math.prod(shape[:2]) > _MOST:
        return None
    if set(kernel[1:]) == {1} and out == shape:  # a gain
        result = r.insert(aten.mul.Tensor, value, r.insert(aten.reshape.default, weight, [groups, *[1] * count]))
        return result if bias is None else with_parts(r, result, bias, [groups, *[1] * count])
    stride, padding, dilation = ([*own] * (count // len(own)) for own in map(_listed, (stride, padding, dilation)))
    alone = shape[0] == 1  # the groups are the samples
    parts = [groups, shape[1] // groups, *shape[2:]]
    value = r.insert(aten.reshape.default, value, parts if alone else [shape[0], *parts])
    if any(padding):
        value = r.insert(aten.constant_pad_nd.default, value, [own for own in padding[::-1] for _ in range(2)])
    first, windows = 2 if alone else 3, math.prod(kernel[2:]) > 1 or any(own > 1 for own in stride)
    for at in range(count if windows else 0):
        width = dilation[at] * (kernel[2 + at] - 1) + 1
        value = r.insert(aten.unfold.default, value, first + at, width, stride[at])
        if dilation[at] > 1:
            value = r.insert(aten.slice.Tensor, value, first + count + at, 0, width, dilation[at])
    while r.name(weight) in operations(Trait.REGROUP):
        weight = weight.args[0]
    weight = reshaped(r, weight, [groups, kernel[0] // groups, *kernel[1 : None if windows else 2]])
    places, taps = "xyz"[:count], "ijk"[: count * windows]
    lead = "" if alone else "n"
    equation = f"{lead}gc{places}{taps},goc{taps}->{lead}go{places}"
    result = r.insert(aten.einsum.default, equation, [value, weight])
    result = r.insert(aten.reshape.default, result, list(out))
    return result if bias is None else with_parts(r, result, bias, [out[1], *[1] * count])


def _listed(own: Any) -> list[int]:
    return [own] if isinstance(own, int) else list(own)
