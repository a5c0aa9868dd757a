"""Normal form of extrema: `amax` and `amin` over axes, `maximum` and `minimum` of two values, `logsumexp`, ranks."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, reduced
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations, spatial_axes_of
from lightning_sym.symmetry.tracing.graph.rewriting import Rewrite, Rewriter
from lightning_sym.symmetry.tracing.normal_form.branches import pieces
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped

aten = torch.ops.aten
_OVER = {"max": aten.amax.default, "min": aten.amin.default}
_OF_TWO = {"max": aten.maximum.default, "min": aten.minimum.default}


def chosen_value(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the values of `max`, `min` and `aminmax` along an axis, and of `topk` with `k=1`."""
    both: Any
    both, item = node.args
    name = r.name(both)
    if name in operations(Trait.MAX_POOL):
        return pooled(r, node, both) if item == 0 else None
    if name == "aminmax":
        axis, keep = both.kwargs.get("dim"), bool(both.kwargs.get("keepdim", False))
        return _over(r, "max" if item == 1 else "min", both.args[0], [] if axis is None else [axis], keep)
    if name in ("kthvalue", "median"):
        return _of_rank(r, both, item)
    if item != 0:
        return None
    if name == "topk":
        count, axis, largest = both.args[1], argument(both, 2, "dim", -1), argument(both, 3, "largest", True)
        return None if count != 1 else _over(r, "max" if largest else "min", both.args[0], [axis], True)
    return _over(r, name, both.args[0], [argument(both, 1, "dim")], bool(argument(both, 2, "keepdim", False)))


def _of_rank(r: Rewriter, node: fx.Node, item: Any) -> fx.Node:
    """Return the element of some rank along an axis, or its index, taken from all elements in their order."""
    at = 2 if r.name(node) == "kthvalue" else 1
    axis, keep = argument(node, at, "dim", -1), bool(argument(node, at + 1, "keepdim", False))
    rank: Any = (
        argument(node, 1, "k") if at == 2 else (r.shape(node.args[0])[axis] + 1) // 2
    )  # of two middle ones, the lower
    ordered = r.insert(operator.getitem, r.insert(aten.sort.default, node.args[0], axis), item)
    chosen = r.insert(aten.select.int, ordered, axis, rank - 1)
    return r.insert(aten.unsqueeze.default, chosen, axis) if keep else chosen


def _over(r: Rewriter, name: str, value: Any, axes: list[Any], keep: bool) -> fx.Node | None:
    kind = value.meta["val"].dtype
    return r.insert(_OVER[name], value, axes, keep) if kind.is_floating_point else None


def whole_or_two(name: str) -> Rewrite:
    """Return a rewrite of `max` or `min` of all elements, or of two values."""

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node | None:
        if not isinstance(node.meta.get("val"), Tensor):
            return None
        if len(node.args) == 2 and isinstance(node.args[1], fx.Node):
            return r.insert(_OF_TWO[name], *node.args)
        return _over(r, name, node.args[0], [], False) if len(node.args) == 1 and not node.kwargs else None

    return rewrite


def of_parts(name: str) -> Rewrite:
    """Return a rewrite of the extremum of several parts of a value as an extremum along an axis."""
    names = {name, "f" + name[:3]}

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node | None:
        leaves, readers = r.leaves(node, names)
        if all(
            r.name(leaf) == "neg" and r.only_for(leaf, reader) for leaf, reader in zip(leaves, readers, strict=True)
        ):
            total = leaves[0].args[0]
            for leaf in leaves[1:]:
                total = r.insert(_OF_TWO["min" if name[:3] == "max" else "max"], total, leaf.args[0])
            return r.insert(aten.neg.default, total)
        alike = all(isinstance(leaf, fx.Node) and r.shape(leaf) == r.shape(node) for leaf in leaves)
        if alike and r.made_of(node) == "inputs" and (whole := pieces(r, leaves, readers)) is not None:
            return r.insert(_OVER[name[:3]], whole, [0], False)
        return r.insert(_OF_TWO[name[:3]], *node.args) if r.name(node) != name else None

    return rewrite


def larger(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the choice of the larger or smaller of two values."""
    args: Any = node.args
    condition, *values = args[:3]
    name = r.name(condition)
    if name not in ("gt", "ge", "lt", "le") or len(values) < 2 or not all(isinstance(own, fx.Node) for own in values):
        return None
    given, kinds = list(condition.args), {own.meta["val"].dtype for own in values}
    if r.number(given[1]) == 0 and r.name(given[0]) == "sub" and not given[0].kwargs:
        given = list(given[0].args)  # the sign of their difference
    if given not in (values, values[::-1]) or values[0] is values[1] or len(kinds) > 1:
        return None
    return r.insert(_OF_TWO["max" if (given == values) == (name in ("gt", "ge")) else "min"], *values)


def pooled(r: Rewriter, node: fx.Node, pool: fx.Node | None = None) -> fx.Node | None:
    """Rewrite max-pooling over a whole image, or over adjacent windows of the last axis.

    Args:
        r: The rewriter.
        node: The node of the largest elements.
        pool: The pooling operation, if it is another node because it also returns indices.
    """
    pool = pool or node
    name, value = r.name(pool), pool.args[0]
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    count = spatial_axes_of(name)
    before, after = r.shape(value)[-count:], r.shape(node)[-count:]
    whole = set(after) == {1}
    sizes = [one // other for one, other in zip(before, after, strict=True)]
    if 0 in sizes or any(size * other != one for size, other, one in zip(sizes, after, before, strict=True)):
        return None
    if "adaptive" not in name:
        kernel, stride, padding, dilation = (_each(argument(pool, 1 + at, key, default), count) for at, (key, default)
            in enumerate((("kernel_size", 1), ("stride", []), ("padding", 0), ("dilation", 1))))  # fmt: skip
        if kernel != sizes or any(padding) or set(dilation) != {1} or not (whole or (stride or kernel) == sizes):
            return None
    if whole:
        return reshaped(r, r.insert(aten.amax.default, value, list(range(-count, 0))), r.shape(node))
    if count > 1:  # the positions of an image stay axes, as for convolutions
        return None
    parts = reshaped(r, value, [*r.shape(value)[:-1], after[0], sizes[0]])  # type: ignore[arg-type]
    return r.insert(aten.amax.default, parts, [-1])


def _each(given: Any, count: int) -> list[int]:
    return [given] * count if isinstance(given, int) else list(given) * (count // max(len(given), 1))


_OVER_AXES = ("amax", "amin")


def of_exponentials(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the largest exponential, or the quotient or product of two, as one exponential."""
    name, parts = r.name(node), node.args[: 1 if r.name(node) in _OVER_AXES else 2]
    inner = [part.args[0] for part in parts if isinstance(part, fx.Node) and r.name(part) == "exp"]
    if len(inner) < len(parts) or node.kwargs or any(r.made_of(own) != "inputs" for own in inner):
        return None
    if name in _OVER_AXES:
        return r.insert(aten.exp.default, r.insert(node.target, *inner, *node.args[1:]))
    return r.insert(aten.exp.default, r.insert(aten.sub.Tensor if name == "div" else aten.add.Tensor, *inner))


def log_of_sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the logarithm of a sum, mean or cumulative sum of exponentials."""
    total: Any = node.args[0]
    name = r.name(total)
    if name not in ("sum", "mean", "cumsum") or not r.only_for(total, node):
        return None
    inner = total.args[0]
    if r.name(inner) != "exp" or not r.only_for(inner, total) or total.kwargs.get("dtype") is not None:
        return None
    if name == "cumsum":
        return r.insert(aten.logcumsumexp.default, inner.args[0], total.args[1])
    axes = sorted(reduced(total, len(r.shape(inner))))
    result = r.insert(aten.logsumexp.default, inner.args[0], axes, bool(argument(total, 2, "keepdim", False)))
    if name == "sum":
        return result
    count = math.prod(r.shape(inner)[axis] for axis in axes)
    return r.insert(aten.sub.Tensor, result, math.log(count))


REWRITES: dict[str, Callable[[Rewriter, fx.Node], fx.Node | None]] = {
    "max": whole_or_two("max"),
    "min": whole_or_two("min"),
    **dict.fromkeys(("maximum", "fmax"), of_parts("maximum")),
    **dict.fromkeys(("minimum", "fmin"), of_parts("minimum")),
    **dict.fromkeys(operations(Trait.MAX_POOL), pooled),
    "log": log_of_sum,
}
CHOICES = {"max", "min", "aminmax", "topk", "kthvalue", "median"} | operations(Trait.MAX_POOL)
