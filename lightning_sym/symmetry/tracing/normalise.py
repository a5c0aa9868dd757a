"""The normal form of a captured network: the same function, spelled in few operations."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.contractions import (
    VIEWS,
    addmm,
    bilinear,
    einsum,
    layout,
    matmul,
    multi_dot,
    narrow_convolution,
    reshaped,
    shown,
    stored,
    summed_product,
    tensordot,
)
from lightning_sym.symmetry.tracing.invisible import PASSES, SOFTMAX, argument, memories_of
from lightning_sym.symmetry.tracing.memory import replaces, written_by
from lightning_sym.symmetry.tracing.regions import recognise
from lightning_sym.symmetry.tracing.rewriting import Rewrite, Rewriter
from lightning_sym.symmetry.tracing.rules import out_of_place

aten = torch.ops.aten
_MOST = 2**22  # elements of a tensor that are numbered
_LOW = -1e3  # the softmax of what is so much lower than all else is zero
_FAR = 6  # operations between a mask and its softmax at most


def normalise(capture: Capture, kept: Collection[str] = ()) -> Capture:
    """Spell a captured network in few operations, in place; what it computes stays the same.

    Only a row of a softmax all of whose entries are masked may be another one, as if none of them was.

    Args:
        capture: The network.
        kept: The operations that stay as they are, and that are put nowhere, as ``aten::linear``.

    Returns:
        The capture.
    """
    _remove_writes(Rewriter(capture, kept))
    rewriter = Rewriter(capture, kept)
    rewriter.erase_unread()
    _spell(rewriter)
    if recognise(rewriter):
        _spell(rewriter)
    return capture


def _spell(rewriter: Rewriter) -> None:
    """Rewrite until nothing is left to rewrite."""
    while rewriter.rewrite(_REWRITES):
        pass


def _remove_writes(r: Rewriter) -> None:
    """Put operations that leave their arguments alone in the place of those whose writes nobody else sees."""
    for node in list(r.graph.nodes):
        target: Any = node.target
        if not r.name(node) or replaces(node) or written_by(node) != list(node.args[:1]):
            continue
        other = out_of_place(target)
        if other is target or other._schema.is_mutable:
            continue
        one, two = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
        if one.shape == two.shape and one.dtype == two.dtype:  # it computes in the type that it writes
            node.target = other


# Other names, and operations that are two others.


def _renamed(target: Any) -> Rewrite:
    """Return a rewrite to another name of the same operation."""

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node:
        return r.insert(target, *node.args, **node.kwargs)

    return rewrite


def _arithmetic(target: Any) -> Rewrite:
    """Return a rewrite to another name of addition, subtraction, product or quotient."""

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node | None:
        if node.kwargs.get("rounding_mode") is not None:
            return None
        return r.insert(target, *node.args, **{k: v for k, v in node.kwargs.items() if k == "alpha"})

    return rewrite


def _stack(r: Rewriter, node: fx.Node) -> fx.Node:
    values: Any = node.args[0]
    axis = argument(node, 1, "dim", 0) % len(r.shape(node))
    return r.insert(aten.cat.default, [r.insert(aten.unsqueeze.default, value, axis) for value in values], axis)


def _with_product(target: Any) -> Rewrite:
    """Return a rewrite of `addcmul` or `addcdiv`."""

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node:
        added, one, two = node.args[:3]
        product, factor = r.insert(target, one, two), argument(node, 3, "value", 1)
        if factor != 1:
            product = r.insert(aten.mul.Tensor, product, factor)
        return r.insert(aten.add.Tensor, added, product)

    return rewrite


def _reversed_difference(r: Rewriter, node: fx.Node) -> fx.Node | None:
    one, two = node.args[:2]
    if not isinstance(two, fx.Node) or argument(node, 2, "alpha", 1) != 1:
        return None
    return r.insert(aten.sub.Tensor, two, one)


def _item(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite one of the two results of `var_mean` and `std_mean`."""
    both, item = node.args
    if r.name(both) not in ("var_mean", "std_mean"):
        return None
    assert isinstance(both, fx.Node)
    overload = both.target._overloadname  # type: ignore[union-attr]
    axes, keep = argument(both, 1, "dim"), argument(both, 3, "keepdim", False)
    if overload == "correction":
        keep = both.kwargs.get("keepdim", False)
    elif overload != "dim":
        axes = None
    axes = axes or list(range(len(r.shape(both.args[0]))))
    if item == 1:
        return r.insert(aten.mean.dim, both.args[0], axes, keep)
    operation = aten.var if r.name(both) == "var_mean" else aten.std
    return r.insert(getattr(operation, overload), *both.args, **both.kwargs)


def _scaled_sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite sums and differences with a factor."""
    alpha = node.kwargs.get("alpha", 1)
    if alpha == 1 or not isinstance(node.args[1], fx.Node):
        return None
    assert not isinstance(node.target, str)
    return r.insert(node.target, node.args[0], r.insert(aten.mul.Tensor, node.args[1], alpha))


# Biases.


def _sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    return _scaled_sum(r, node) or _biased(r, node)


def _biased(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Let a vector that is added to what a linear layer or convolution puts out be its bias."""
    for layer, bias in (node.args[:2], node.args[1::-1]):
        name = r.name(layer)
        is_layer = name == "linear" or name.startswith("conv")
        if not is_layer or not isinstance(bias, fx.Node) or not r.only_for(layer, node):
            continue
        assert isinstance(layer, fx.Node)
        if argument(layer, 2, "bias") is not None or r.shape(layer) != r.shape(node):
            continue
        count = 0 if name == "linear" else int(name.removesuffix("d")[-1])
        sizes, whole = r.shape(bias), r.shape(layer)
        at = len(sizes) - 1 - count
        if at < 0 or sizes[at] != whole[-1 - count] or r.made_of(bias) != "weights":
            continue
        steps = bias.meta["val"].stride()
        if any(size > 1 and step for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)) if axis != at):
            continue
        vector = stored(r, bias, [at])
        if vector in r.capture.states:
            rest = {name: value for name, value in layer.kwargs.items() if name != "bias"}
            assert not isinstance(layer.target, str)
            return r.insert(layer.target, *layer.args[:2], vector, *layer.args[3:], **rest)
    return None


def _layer(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite layers with a bias that is none of the network's tensors as it is."""
    bias, name = argument(node, 2, "bias"), r.name(node)
    if isinstance(bias, fx.Node) and bias not in r.capture.states:
        rest = {name: value for name, value in node.kwargs.items() if name != "bias"}
        assert not isinstance(node.target, str)
        found = stored(r, bias, [0])
        if found in r.capture.states:
            return r.insert(node.target, *node.args[:2], found, *node.args[3:], **rest)
        layer = r.insert(node.target, *node.args[:2], None, *node.args[3:], **rest)
        count = 0 if name == "linear" else int(name.removesuffix("d")[-1])
        return r.insert(aten.add.Tensor, layer, reshaped(r, bias, [*r.shape(bias), *[1] * count]))
    return narrow_convolution(r, node) if name.startswith("conv") and "transpose" not in name else None


# Movements.


def _same_shape(target: Any) -> Rewrite:
    """Return a rewrite of an operation that takes a shape from another value."""

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node:
        return _undone(r, node) or r.insert(target, node.args[0], list(r.shape(node)))

    return rewrite


def _undone(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite movements that show, in the end, what was there before."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    for before in shown(r, node)[:-1]:
        held = before.meta.get("val")
        if isinstance(held, Tensor) and layout(held) == layout(value):
            return before
    return None


def _numbers(tensor: Tensor) -> Tensor:
    """Return which element of its memory each element of a tensor is."""
    numbers = torch.full((), tensor.storage_offset())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        numbers = numbers[..., None] + torch.arange(size) * step
    return numbers


def _joined(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite parts of a value that are put together again as they were."""
    parts, whole = node.args[0], r.shape(node)
    if not isinstance(parts, (list, tuple)) or math.prod(whole) > _MOST or r.writes_into(node):
        return None
    memories = [memories_of(part) for part in parts if isinstance(part, fx.Node)]
    if not memories or any(memory != memories[0] for memory in memories) or any(map(r.is_frozen, node.all_input_nodes)):
        return None
    first, *_ = shown(r, parts[0])  # type: ignore[arg-type]
    while first.op == "call_function" and (source := _taken_apart(r, first)) is not None:
        first, *_ = shown(r, source)
    candidates = [first]
    for candidate in candidates:
        held = candidate.meta.get("val")
        if not isinstance(held, Tensor) or tuple(held.shape) != whole or memories_of(candidate) != memories[0]:
            continue
        if held.dtype != node.meta["val"].dtype or r.writes_into(candidate):
            continue
        numbers = torch.cat([_numbers(part.meta["val"]) for part in parts], argument(node, 1, "dim", 0))  # type: ignore[union-attr]
        if torch.equal(numbers, _numbers(held)):
            return candidate
    return None


_LISTS = {"chunk", "split", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk", "unbind"}


def _taken_apart(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the value of which a node is one of the parts in a list."""
    if r.name(node) != "getitem" or r.name(node.args[0]) not in _LISTS:
        return None
    source = node.args[0].args[0]  # type: ignore[union-attr]
    return source if isinstance(source, fx.Node) else None


# Masks.


def _mask(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a mask before a softmax: it adds a number so low that nothing is left, or nothing."""
    if r.name(node) == "masked_fill":
        value, mask, number = node.args[:3]
        inverted = False
    else:
        mask, value, number = node.args[:3]
        inverted = r.number(number) is None
        if inverted:
            value, number = number, value
    low = r.number(number)
    if not isinstance(value, fx.Node) or not isinstance(mask, fx.Node) or low is None or not low <= _LOW:
        return None
    if r.shape(value) != r.shape(node) or value.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if r.made_of(value) != "inputs" or (r.name(node) == "where" and inverted and not isinstance(value, fx.Node)):
        return None
    if not _leads_to_softmax(r, node):
        return None
    kind = value.meta["val"].dtype
    zeros = r.insert(aten.full.default, list(r.shape(mask)), 0.0, dtype=kind)
    if r.name(node) == "where" and not inverted:
        mask = r.insert(aten.logical_not.default, mask)
    added = r.insert(aten.masked_fill.Scalar, zeros, mask, low)
    return r.insert(aten.add.Tensor, value, added)


def _leads_to_softmax(r: Rewriter, node: fx.Node) -> bool:
    """Whether nothing but a softmax reads a value, to which others may be added before."""
    for _ in range(_FAR):
        if len(node.users) != 1:
            return False
        (user,) = node.users
        if r.name(user) in SOFTMAX:
            return True
        if (
            r.name(user) not in PASSES | {"add", "masked_fill", "where"}
            or r.shape(user) != r.shape(node)
            or r.name(user) == "neg"
        ):
            return False
        node = user
    return False


_REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), addmm),
    **dict.fromkeys(("tensordot", "inner"), tensordot),
    **dict.fromkeys(("linalg_multi_dot", "chain_matmul"), multi_dot),
    "linear": _layer,
    **{f"conv{kind}{count}d": _layer for kind in ("", "_transpose") for count in (1, 2, 3)},
    "einsum": einsum,
    "bilinear": bilinear,
    "sum": summed_product,
    "add": _sum,
    "sub": _scaled_sum,
    "rsub": _reversed_difference,
    "addcmul": _with_product(aten.mul.Tensor),
    "addcdiv": _with_product(aten.div.Tensor),
    "multiply": _arithmetic(aten.mul.Tensor),
    **dict.fromkeys(("true_divide", "divide"), _arithmetic(aten.div.Tensor)),
    "subtract": _arithmetic(aten.sub.Tensor),
    **dict.fromkeys(("concat", "concatenate"), _renamed(aten.cat.default)),
    "stack": _stack,
    "getitem": _item,
    **dict.fromkeys(VIEWS, _undone),
    **dict.fromkeys(("view_as", "reshape_as"), _same_shape(aten.reshape.default)),
    "expand_as": _same_shape(aten.expand.default),
    "cat": _joined,
    **dict.fromkeys(("masked_fill", "where"), _mask),
}
