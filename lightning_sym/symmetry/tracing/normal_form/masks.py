"""Normal form of masks: a constant that is added before a softmax."""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.coordinates import thinned
from lightning_sym.symmetry.tracing.graph.nodes import HIDES_ROWS
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.averages import is_data
from lightning_sym.symmetry.tracing.normal_form.contractions import shown
from lightning_sym.symmetry.tracing.normal_form.extrema import larger
from lightning_sym.symmetry.tracing.normal_form.sums import Term, summed, terms_of

aten = torch.ops.aten
_LOW = -1e3  # the softmax is zero at entries that are lower than all others by this much
_LOWEST = -1e30  # other terms are lost in rounding when added to this
_FAR = 6  # maximal number of operations between a mask and its softmax


def spelled_mask(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a mask before a softmax as a sum with a constant: zero, or a number so low that the softmax vanishes."""
    if len(node.args) < 3:
        return None
    if (same := _hidden_already(r, node)) is not None or (same := _of_defined(r, node)) is not None:
        return same
    if r.name(node) == "masked_fill":
        value, mask, number = node.args[:3]
        if isinstance(number, fx.Node):
            return r.insert(aten.where.self, mask, number, value)
        if r.made_of(mask) == "inputs" and (base := r.number(value)) is not None and r.shape(mask) != r.shape(node):
            kind, sizes = node.meta["val"].dtype, r.shape(mask)
            filled = r.insert(aten.full.default, list(sizes), base, dtype=kind, device=node.meta["val"].device)
            filled = r.insert(node.target, filled, mask, number)
            return r.insert(aten.expand.default, filled, list(r.shape(node)))
        inverted = False
    else:
        if (extremum := larger(r, node)) is not None:
            return extremum
        mask, value, number = node.args[:3]
        inverted = r.number(number) is None
        if inverted:
            value, number = number, value
    low = r.number(number)
    if not isinstance(value, fx.Node) or not isinstance(mask, fx.Node) or low is None or not low <= _LOW:
        return None
    if r.shape(value) != r.shape(node) or value.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if r.made_of(value) != "inputs" or not _leads_to_softmax(r, node, low):
        return None
    kind = value.meta["val"].dtype
    zeros = r.insert(aten.full.default, list(r.shape(mask)), 0.0, dtype=kind)
    if r.name(node) == "where" and not inverted:
        mask = r.insert(aten.logical_not.default, mask)
    added = r.insert(aten.masked_fill.Scalar, zeros, mask, low)
    return r.insert(aten.add.Tensor, value, added)


def chosen(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite x (1 - m) + y m as x + m (y - x), for numbers m that depend on inputs only."""
    products: list[Any] = [term.node for term in terms_of(r, node) if term.added and r.name(term.node) == "mul"]
    for one, two in itertools.permutations(products) if len(products) == 2 == len(terms_of(r, node)) else ():
        for (x, rest), (y, mask) in itertools.product(*((own.args[:2], own.args[1::-1]) for own in (one, two))):
            if isinstance(mask, fx.Node) and isinstance(y, fx.Node) and is_data(r, mask) and _is_rest(r, rest, mask):
                return r.insert(aten.add.Tensor, x, r.insert(aten.mul.Tensor, r.insert(aten.sub.Tensor, y, x), mask))
    return None


def _is_rest(r: Rewriter, rest: Any, mask: Any) -> bool:
    """Whether a value is 1 minus another, or the opposite of a mask."""
    if r.name(rest) in ("sub", "rsub") and len(rest.args) == 2:
        one, own = rest.args if r.name(rest) == "sub" else rest.args[::-1]
        return own is mask and r.number(one) == 1
    (one, turned), (two, again) = _positive(r, rest), _positive(r, mask)
    return one is two and turned != again and one.meta["val"].dtype == torch.bool


def _leads_to_softmax(r: Rewriter, node: fx.Node, low: float) -> bool:
    """Whether only a softmax reads a value, possibly after sums and further masks.

    A log-softmax shows low numbers, but no terms that were added to the lowest ones.
    """
    for _ in range(_FAR):
        if len(node.users) != 1:
            return False
        (user,) = node.users
        if r.name(user) in operations(Trait.SOFTMAX):
            return "log" not in r.name(user) or low < _LOWEST
        if r.name(user) not in operations(Trait.CAST) | {"add", "masked_fill", "where"}:
            return False
        if r.shape(user) != r.shape(node):
            return False
        node = user
    return False


def mark_masked_softmaxes(captures: Sequence[Capture]) -> list[str]:
    """Mark the softmaxes with masks that depend on the inputs. Such a mask may hide a whole row.

    Returns:
        The modules of the marked operations; nothing if all were marked before.
    """
    found = []
    for captured in captures:
        for node in captured.graph.nodes:
            if name_of(node) in operations(Trait.SOFTMAX) and HIDES_ROWS not in node.meta and _is_masked(node.args[0]):
                node.meta[HIDES_ROWS] = True
                found.append(captured.modules.get(node, "forward"))
    return sorted({*found})


def _is_masked(node: Any) -> bool:
    """Whether a value is a sum in which low numbers replace some elements."""
    name = name_of(node) if isinstance(node, fx.Node) else ""
    if name in operations(Trait.JOIN | Trait.CAST | Trait.REGROUP | Trait.EXPAND):
        return any(map(_is_masked, node.all_input_nodes))
    return name in ("masked_fill", "where")


def _hidden_already(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Remove a mask after a softmax that the same mask before the softmax makes redundant."""
    given: Any = node.args
    value, mask, number = given[:3] if r.name(node) == "masked_fill" else (given[1], given[0], given[2])
    shown = r.name(node) == "where"  # the value is kept at true entries of the mask
    if r.name(value) not in operations(Trait.SOFTMAX) or "log" in r.name(value) or r.number(number) != 0:
        return None
    if not isinstance(mask, fx.Node) or r.shape(value) != r.shape(node) or r.name(value.args[0]) != "add":
        return None
    known = r.constant(mask)
    for added in value.args[0].args[:2]:
        low = r.constant(added) if isinstance(added, fx.Node) else None
        if known is not None and low is not None:
            hidden = (known.bool() != shown).expand(r.shape(node))
            if bool((low.expand(r.shape(node))[hidden] <= _LOWEST).all()):
                return value  # type: ignore[no-any-return]
        if r.name(added) == "masked_fill" and (r.number(added.args[2]) or 0) <= _LOWEST:
            (one, turned), (two, again) = _positive(r, mask), _positive(r, added.args[1])
            if one is two and (turned != shown) == again:
                return value  # type: ignore[no-any-return]
    return None


def _positive(r: Rewriter, mask: Any) -> tuple[Any, bool]:
    """Strip the negations and casts of a mask; return the mask and whether it was negated.

    Only what was Boolean before can be negated, and only casts to floating numbers keep all values.
    """
    turned = False
    while (name := r.name(mask)) in operations(Trait.CAST) | {"logical_not", "bitwise_not"}:
        cast, before = name in operations(Trait.CAST), mask.args[0].meta["val"].dtype
        if before != torch.bool and not (cast and mask.meta["val"].is_floating_point()):
            break
        mask, turned = mask.args[0], turned != (not cast)
    return mask, turned


def without_common(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Remove maxima that all numbers of a softmax share."""
    value, axis = node.args[:2]
    terms = terms_of(r, value) if isinstance(value, fx.Node) and r.only_for(value, node) else []
    rank = len(r.shape(node))

    def is_shared(term: Term) -> bool:
        sizes = (1,) * (rank - len(r.shape(term.node))) + r.shape(term.node)
        whole = shown(r, term.node)[0]
        return sizes[axis] == 1 and r.name(whole) in operations(Trait.REDUCE | Trait.WRITE)  # type: ignore[index]

    kept = [term for term in terms if not is_shared(term)]
    if len(kept) in (0, len(terms)) or r.shape(node)[axis] == 1:  # type: ignore[index]
        return None
    first = next((term for term in kept if term.added and r.shape(term.node) == r.shape(node)), None)
    if first is None:
        return None
    logits = summed(r, first.node, [term for term in kept if term is not first])
    return r.insert(node.target, logits, *node.args[1:], **node.kwargs)


def of_softmax(r: Rewriter, node: fx.Node, at: int = 0) -> fx.Node | None:
    """Remove the numbers that replace the softmax of fully masked rows."""
    value = node.args[at]
    return value if r.name(value) in operations(Trait.SOFTMAX) and "log" not in r.name(value) else None  # type: ignore[return-value]


def _of_defined(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Remove the numbers that replace the softmax of fully masked rows where it is not a number."""
    at = 0 if r.name(node) == "masked_fill" else 2
    mask: Any = node.args[1 - at // 2]
    if r.name(mask) != "isnan" or mask.args[0] is not node.args[at]:
        return None
    return of_softmax(r, node, at)


def written_mask(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a low number that is written to constant places before a softmax as a mask."""
    base, at, number, *adds = cast(Any, node.args)
    low, places = r.number(number), [r.constant(own) if isinstance(own, fx.Node) else None for own in at]
    if low is None or not low <= _LOW or any(adds) or places.count(None) != list(at).count(None):
        return None
    if r.made_of(base) != "inputs" or not _leads_to_softmax(r, node, low):
        return None
    mask = aten.index_put.default(torch.zeros(r.shape(node), dtype=torch.bool), places, torch.tensor(True))
    return r.insert(aten.masked_fill.Scalar, base, r.hold(thinned(mask)), low)


def masked_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a product with a binary mask, plus low numbers at the zeros of the mask, as a sum with these numbers."""
    args: Any = node.args
    for product, added in (args[:2], args[1::-1])[: 1 + (r.name(node) == "add")]:
        low = r.constant(added) if isinstance(added, fx.Node) else None
        low = low if low is None or r.name(node) == "add" else -low
        if low is None or r.name(product) != "mul" or not r.only_for(product, node) or not bool((low <= _LOW).any()):
            continue
        for value, mask in (product.args[:2], product.args[1::-1]):
            known = r.constant(mask) if isinstance(mask, fx.Node) else None
            if known is None or not isinstance(value, fx.Node) or r.shape(value) != r.shape(node):
                continue
            hidden = (known == 0).expand(shape := np.broadcast_shapes(known.shape, low.shape))
            least = low.to(known.dtype).expand(shape)
            if not bool(hidden.any()) or not bool(((known == 1) | hidden).all()):
                continue
            most = float(least[hidden].max())
            if most <= _LOW and _leads_to_softmax(r, node, most):
                return r.insert(node.target, value, added)
    return None
