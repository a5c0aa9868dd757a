"""The normal form of a captured network: the same function in a small vocabulary of operations.

Each function has one spelling:

- linear layer: ``linear(x, W, b)``; by hand ``x @ W.T + b``, ``addmm``, ``einsum``, a convolution of width 1, ``(x *
  W).sum(-1)``, sums of chunks.
- bias: argument of the layer; by hand a vector added later.
- norm: ``layer_norm``, ``rms_norm``; then products and sums; by hand means, squares, roots and quotients in any
  order; ``group_norm``.
- batch norm: ``batch_norm`` with saved statistics, gain, bias; by hand ``(x − m) / √(v + ε) γ + β`` in any order, a
  depthwise convolution.
- gain of a layer's rows: ``linear(x, W) γ``; by hand ``linear(x, γ W)``; ``γ x + γ b`` is ``γ (x + b)``.
- softmax: ``softmax``, ``log_softmax``; by hand exponentials over their sum, with or without the maximum subtracted.
- mask: a constant added before the softmax; by hand ``masked_fill``, ``where``, the least number of the type, a
  factor after the exponential.
- extremum: ``amax``, ``amin``, ``maximum``, ``minimum``; ``logsumexp``; by hand ``max``, ``topk`` of one, ``where(a >
  b, a, b)``, global pooling.
- state of zeros: layers without it; by hand ``cat`` of an input and zeros, sums that begin with zeros.
- grouped convolution: ``conv2d(x, W, groups=g)``; by hand windows, patches or chunks, and a product for each group.
- grouped convolution with computed weights: products with windows; by hand kernels of samples, folded norms.
- loop over parts: the same operations along one more axis; by hand heads, groups, steps or experts one by one.
- gain ``1 + w``: ``w`` in a chart (docs/theory/tracing.md, 4); by hand ``x + x w``, ``(w + 1) x``, ``addcmul``.
- gain ``exp(w)``, ``softplus(w)``: ``w`` in a chart, where it is read in no other way, or as exp(c w + n).
- exponential: ``exp``; by hand ``exp2``, a power of a number.
- softmax over the edges of each node: a masked softmax over all edges (`segments.py`); by hand sums by index.
- lookup: ``embedding``; by hand an index, ``index_select``, ``gather``, products with indicators.
- convolution: ``conv2d(x, W, b)``; by hand windows, shifted copies, chunks, crops, another convolution.
- rotary positions: ``rotary(x, cos, sin, partner)``; by hand halves, neighbours, complex numbers, matrices.
- linear attention: attention with products as weights; by hand q (k v) for (q k) v, q Σ k for Σ q k.
- bilinear form: ``matmul`` of two layers' outputs, one scaled; by hand one row of a layer that reads their product;
  einsum.
- layer on an outer product: its weight with an axis for each factor; by hand ``flatten``, ``einsum``, ``bmm``.
- scalar product of two rows of a table: ``matmul``; by hand ``(v * w).sum()``, ``dot``.
- bias before an exponential: a gain ``exp(b)`` behind it, where the group then has more scales.
- weighted mean: a product with a softmax; by hand a masked sum over a count.
- function of one variable: linear, homogeneous, odd, even; by hand chains of elementwise operations (`chains.py`).
- part of an elementwise function: the same on the part; by hand ``tanh(h)[..., :4]``, ``chunk``.
- heads: layers with one axis for the units of all; by hand weights and biases with an axis of heads, a module for each
  head, stacks. Weights multiplied member by member (experts) stay stacks (docs/theory/intertwiners.md, 2.14).
- weights of several layers in an array: a product with each part; by hand one product, of whose result parts are read.
- weights that are sums of bases: ``einsum``; by hand a product with flattened matrices, sums of Kronecker products.
- rows at constant pairs of positions: ``embedding``; by hand an index.
- buffer filled, then read: ``cat`` of the parts; by hand writes into slices.
- attention, gated units: their products, softmaxes, sums (``written_out.py``); by hand one fused operation.
- round-trip movements, repeated operations, unread results: nothing.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.functional import functional
from lightning_sym.symmetry.tracing.graph.nodes import argument, reduced
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewrite, Rewriter
from lightning_sym.symmetry.tracing.normal_form import written_out
from lightning_sym.symmetry.tracing.normal_form.averages import average, is_data
from lightning_sym.symmetry.tracing.normal_form.batch_norms import recognise_batch_norms
from lightning_sym.symmetry.tracing.normal_form.bilinear import (
    bilinear_row,
    mean_product,
    number_of_weights,
    outer_product,
    product_of_vectors,
    summed_members,
    summed_product,
)
from lightning_sym.symmetry.tracing.normal_form.branches import added_branches, together
from lightning_sym.symmetry.tracing.normal_form.chains import shorten_chains
from lightning_sym.symmetry.tracing.normal_form.charts import (
    factored,
    read_as_gains,
    read_as_sums,
    read_behind_layers,
    read_beside_inputs,
)
from lightning_sym.symmetry.tracing.normal_form.complex_pairs import parts_of_turns
from lightning_sym.symmetry.tracing.normal_form.contractions import (
    VIEWS,
    einsum,
    joined,
    layout,
    matmul,
    narrow_convolution,
    permuted,
    reshaped,
    shown,
    split_product,
    stored,
)
from lightning_sym.symmetry.tracing.normal_form.cutting import cut_results
from lightning_sym.symmetry.tracing.normal_form.diagonals import diagonal, of_diagonals
from lightning_sym.symmetry.tracing.normal_form.extrema import CHOICES, REWRITES, chosen_value, of_exponentials
from lightning_sym.symmetry.tracing.normal_form.filling import WRITES, joined_writes, written_part
from lightning_sym.symmetry.tracing.normal_form.heads import spell_heads
from lightning_sym.symmetry.tracing.normal_form.indices import repeated, whole_axes
from lightning_sym.symmetry.tracing.normal_form.kernels import filled, grouped, joined_flat, padded, taken_apart
from lightning_sym.symmetry.tracing.normal_form.linear_maps import respell_layers
from lightning_sym.symmetry.tracing.normal_form.lookups import gathered_rows, rows_at, rows_of_indicators
from lightning_sym.symmetry.tracing.normal_form.masks import chosen, masked_product, spelled_mask, written_mask
from lightning_sym.symmetry.tracing.normal_form.parting import EARLIER
from lightning_sym.symmetry.tracing.normal_form.regions import recognise
from lightning_sym.symmetry.tracing.normal_form.segments import spread_edges
from lightning_sym.symmetry.tracing.normal_form.selections import is_chosen, read_sums, softmax
from lightning_sym.symmetry.tracing.normal_form.sums import (
    gathered,
    modulus,
    normalised,
    of_length,
    scaled_weight,
    squared_distances,
    squares_of_parts,
    sum_of_squares,
    with_parts,
)
from lightning_sym.symmetry.tracing.normal_form.unknown import decompose_unknown

aten = torch.ops.aten


def normalise(capture: Capture, kept: Collection[str] = ()) -> Capture:
    """Rewrite a captured network in the vocabulary of the normal form, in place, without changing its function.

    The only exception is a softmax row with all entries masked: it may change as if none were masked.

    Args:
        capture: The network.
        kept: Operations, such as ``aten::linear``, that are neither replaced nor inserted.

    Returns:
        The capture.
    """
    rewriter = Rewriter(functional(capture), kept)
    rewriter.erase_unread()
    _spell(rewriter)
    if decompose_unknown(rewriter, _REWRITES):
        _spell(rewriter)
    for respell in (spread_edges, respell_layers, _group_parts, recognise_batch_norms, cut_results, spell_heads):
        if respell(rewriter):
            _spell(rewriter)
    for read in (read_beside_inputs, read_as_gains, read_as_sums, read_behind_layers):
        read(rewriter)
    if recognise(rewriter):
        _spell(rewriter)
    while rewriter.rewrite(EARLIER):
        rewriter.share()
    shorten_chains(rewriter)
    return capture


def _spell(rewriter: Rewriter) -> None:
    """Rewrite until no rewrite applies."""
    rewriter.share()
    while rewriter.rewrite(_REWRITES):
        rewriter.share()


def _clamped(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a value clamped at 0 from one side by rectifiers, and one clamped at tensors by extrema."""
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    low, high = (None, low) if r.name(node) == "clamp_max" else (low, high)
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        result: Any = node.args[0] if low is None else r.insert(aten.maximum.default, node.args[0], low)
        return result if high is None else r.insert(aten.minimum.default, result, high)
    if high is None and r.number(low) == 0:
        return r.insert(aten.relu.default, node.args[0])
    if high is None and (length := of_length(r, node)) is not None:
        return length
    if low is not None or r.number(high) != 0:
        return None
    return r.insert(aten.neg.default, r.insert(aten.relu.default, r.insert(aten.neg.default, node.args[0])))


# Operations that equal two others.


def _stack(r: Rewriter, node: fx.Node) -> fx.Node | None:
    values: Any = node.args[0]
    axis = argument(node, 1, "dim", 0) % len(r.shape(node))
    if any(_stacked(r, user) is node for user in node.users):
        return None  # it becomes a sum or product
    return r.insert(aten.cat.default, [r.insert(aten.unsqueeze.default, value, axis) for value in values], axis)


def _stacked(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the stack that a reduction combines, or the concatenation of values of size 1."""
    stack: Any = node.args[0] if node.args else None
    if r.name(node) not in _FOLDS or r.name(stack) not in ("stack", "cat") or not r.only_for(stack, node):
        return None
    values, axis = stack.args[0], argument(stack, 1, "dim", 0) % len(r.shape(stack))
    if r.name(stack) == "cat" and any(r.shape(value)[axis] != 1 for value in values):
        return None
    alone = len(node.args) > 1 and not node.kwargs and reduced(node, len(r.shape(stack))) == {axis}
    return stack if alone and stack.meta["val"].dtype == node.meta["val"].dtype else None


def _total(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum, product or extremum of a stack as a chain of operations, and the sum of a product."""
    stack = _stacked(r, node)
    if stack is None:
        if r.name(node) in ("amax", "amin"):
            return of_exponentials(r, node)
        if r.name(node) != "sum":
            return (mean_product(r, node) or summed_members(r, node)) if r.name(node) == "mean" else None
        for rewrite in (number_of_weights, summed_members, _hidden_in_sum, sum_of_squares, summed_product):
            if (new := rewrite(r, node)) is not None:
                return new
        return None
    values: Any = stack.args[0]
    axis, has = argument(stack, 1, "dim", 0) % len(r.shape(stack)), r.name(stack) == "cat"
    if has and all(r.name(value) == "unsqueeze" and value.args[1] % len(r.shape(stack)) == axis for value in values):
        values, has = [value.args[0] for value in values], False
    total: fx.Node = values[0]
    for value in values[1:]:
        total = r.insert(_FOLDS[r.name(node)], total, value)
    if r.name(node) == "mean":
        total = r.insert(aten.div.Tensor, total, len(values))
    wanted = len(r.shape(node)) == len(r.shape(stack))
    if has and not wanted:
        return r.insert(aten.squeeze.dim, total, axis)
    return r.insert(aten.unsqueeze.default, total, axis) if wanted and not has else total


def _hidden_in_sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of a value that is masked to zero, by a mask of fewer axes, as a product with the mask."""
    value: Any = node.args[0]
    if r.name(value) not in ("masked_fill", "where") or not r.only_for(value, node) or node.kwargs:
        return None
    shown, mask, number = value.args[:3]
    if r.name(value) == "where":
        mask, shown = shown, mask
    if r.number(number) != 0 or not isinstance(mask, fx.Node) or not isinstance(shown, fx.Node) or not is_data(r, mask):
        return None
    if r.shape(mask) == r.shape(value) or r.shape(shown) != r.shape(value):
        return None
    mask = r.insert(aten.logical_not.default, mask) if r.name(value) == "masked_fill" else mask
    product = r.insert(aten.mul.Tensor, shown, r.insert(aten.to.dtype, mask, shown.meta["val"].dtype))
    return r.insert(node.target, product, *node.args[1:])


def _item(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite one of several results, such as those of `var_mean`."""
    both: Any
    item: Any
    both, item = node.args
    if r.name(both) == "embedding_bag" and item == 0:
        return _bag(r, both)
    if r.name(both) in written_out.FIRST_RESULTS and item == 0:
        first: fx.Node = r.write(written_out.FIRST_RESULTS[r.name(both)], *both.args, **both.kwargs)
        return first
    if r.name(both) in CHOICES:
        return chosen_value(r, node)
    if r.name(both) == "broadcast_tensors":
        return r.insert(aten.expand.default, both.args[0][item], list(r.shape(node)))
    if r.name(both) not in ("var_mean", "std_mean"):
        return None
    overload = both.target._overloadname
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


def _bag(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite bags of equal size as sums of embeddings."""
    weight, index, offsets = node.args[:3]
    weights, padding = argument(node, 6, "per_sample_weights"), argument(node, 8, "padding_idx")
    if r.name(offsets) != "arange" or weights is not None or argument(node, 7, "include_last_offset", False):
        return None
    given: Any = (*offsets.args, 1)[:3]  # type: ignore[union-attr]
    if padding not in (None, -1) or len(given) != 3 or given[0] != 0 or not all(isinstance(n, int) for n in given):
        return None
    _, count, size = given
    if (count,) != r.shape(index) or count % size:
        return None
    rows = r.insert(aten.embedding.default, weight, reshaped(r, index, [-1, size]))  # type: ignore[arg-type]
    reduce = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)[argument(node, 4, "mode", 0)]
    return r.insert(reduce, rows, [1])


def _power(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite powers of a number as exponentials, and first powers."""
    base = r.number(node.args[0])
    floating = node.meta["val"].is_floating_point() and isinstance(node.args[1], fx.Node)
    if not floating or base is None or base <= 0 or r.made_of(node) == "constants":
        return _neutral(r, node)
    new = r.insert(aten.exp.default, r.insert(aten.mul.Tensor, node.args[1], math.log(base)))
    return new if r.shape(new) == r.shape(node) else r.insert(aten.expand.default, new, list(r.shape(node)))


def _scaled_sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite sums and differences with a factor ``alpha``."""
    alpha = node.kwargs.get("alpha", 1)
    if alpha == 1 or not isinstance(node.args[1], fx.Node):
        return None
    return r.insert(node.target, node.args[0], r.insert(aten.mul.Tensor, node.args[1], alpha))


def _neutral(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite sums with 0, products with 1 and first powers."""
    neutral = 0 if r.name(node) in ("add", "sub") else 1
    for value, other in (node.args[:2], node.args[1::-1] if r.name(node) in ("add", "mul") else (None, None)):
        number = other if isinstance(other, (int, float)) else filled(r, other)
        same = isinstance(value, fx.Node) and number == neutral
        if same and value.meta["val"].dtype == node.meta["val"].dtype:  # type: ignore[union-attr]
            whole = r.shape(value) == r.shape(node)
            return value if whole else r.insert(aten.expand.default, value, list(r.shape(node)))  # type: ignore[return-value]
    return None


def _zeros(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite products with zeros and differences of equal values as zeros, as in an initial state ``0 * x``."""
    if len(node.args) != 2 or node.kwargs or not node.meta["val"].is_floating_point():
        return None
    one, two = node.args
    if r.name(node) == "mul":  # a gate times a state of zeros stays, as it reads the gate's weights
        zero = any(r.number(own) == 0 and not r.shape(own) for own in (one, two))
    else:
        zero = one is two if r.name(node) == "sub" else 0 in (r.number(one), r.number(two))
    if not zero or r.made_of(node) == "constants":
        return None
    kind = node.meta["val"].dtype
    return r.insert(aten.full.default, list(r.shape(node)), 0.0, dtype=kind, device=node.meta["val"].device)


def _difference(r: Rewriter, node: fx.Node) -> fx.Node | None:
    for rewrite in (_zeros, _scaled_sum, _neutral, squared_distances, gathered, masked_product):
        if (new := rewrite(r, node)) is not None:
            return new
    return None


def _product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite products with 1, negated weights or reciprocals, and sums times the reciprocal of their length."""
    if (same := _zeros(r, node) or _neutral(r, node) or of_exponentials(r, node) or _mean(r, node)) is not None:
        return same
    for one, two in (node.args[:2], node.args[1::-1]):
        if isinstance(one, fx.Node) and (divisor := _inverted(r, two, node)) is not None:
            return r.insert(aten.div.Tensor, one, divisor)
        if r.name(one) == "neg" and r.made_of(one) == "weights" and r.made_of(two) in ("inputs", "weights"):
            return r.insert(aten.neg.default, r.insert(aten.mul.Tensor, two, one.args[0]))  # type: ignore[union-attr]
    return None


def _inverted(r: Rewriter, value: Any, user: fx.Node) -> fx.Node | None:
    """Return x with the same moves if a value is a moved reciprocal of x; else None."""
    way: list[fx.Node] = []
    while r.name(value) in operations(Trait.REGROUP) and r.only_for(value, user):
        way.append(value)
        value, user = value.args[0], value
    if r.name(value) != "reciprocal" or not r.only_for(value, user):
        return None
    result: fx.Node = value.args[0]
    for step in reversed(way):
        result = r.insert(step.target, result, *step.args[1:], **step.kwargs)
    return result


def _quotient(r: Rewriter, node: fx.Node) -> fx.Node | None:
    if node.kwargs.get("rounding_mode") is not None:
        return None
    for rewrite in (_neutral, of_exponentials, _mean, normalised, average):
        if (new := rewrite(r, node)) is not None:
            return new
    return None


def _mean(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a sum divided by its number of terms as a mean."""
    for total, factor in (node.args[:2], node.args[1::-1] if r.name(node) == "mul" else (None, None)):
        if r.name(total) != "sum" or not isinstance(total, fx.Node) or total.kwargs.get("dtype") is not None:
            continue
        number = r.number(factor)
        rank = len(r.shape(total.args[0]))
        axes = sorted(reduced(total, rank))
        count = math.prod(r.shape(total.args[0])[axis] for axis in axes)
        wanted = count if r.name(node) == "div" else 1 / count
        alike = number is not None and math.isclose(number, wanted, rel_tol=1e-12)
        if alike and r.shape(node) == r.shape(total) and node.meta["val"].dtype == total.meta["val"].dtype:
            return r.insert(aten.mean.dim, total.args[0], axes, argument(total, 2, "keepdim", False))
    return None


# Constants and tables.


def _made_like(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite constants that copy their shape from another value."""
    number: Any = {"zeros": 0, "ones": 1}.get(r.name(node).removeprefix("new_").removesuffix("_like"))
    if number is None:
        number = node.args[1] if r.name(node) == "full_like" else node.args[2]
    if isinstance(number, fx.Node):
        return None
    kind = node.meta["val"].dtype
    return r.insert(aten.full.default, list(r.shape(node)), number, dtype=kind, device=node.meta["val"].device)


def _of_zeros(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the product with a matrix of zeros as zeros."""
    return _zeros(r, node) if argument(node, 2, "bias") is None and len(node.args) == 2 else None


def _matrix_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    return _zeros(r, node) or number_of_weights(r, node) or read_sums(r, node) or matmul(r, node)


# Biases.


def _sum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    for rewrite in (*_SUMS, masked_product, chosen, added_branches):
        if (new := rewrite(r, node)) is not None:
            return new
    return None


def _layer(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite layers with a computed bias."""
    bias, name = argument(node, 2, "bias"), r.name(node)
    is_plain = name.startswith("conv") and "transpose" not in name
    of_convolutions = (bilinear_row, narrow_convolution, scaled_weight, _grouped, taken_apart) * is_plain
    of_layers = (_of_zeros, rows_of_indicators, outer_product, taken_apart, bilinear_row)
    for rewrite in of_layers if name == "linear" else of_convolutions:
        if (rewritten := rewrite(r, node)) is not None:
            return rewritten
    if isinstance(bias, fx.Node) and bias not in r.capture.states:
        rest = {name: value for name, value in node.kwargs.items() if name != "bias"}
        found = stored(r, bias, [0])
        if found in r.capture.states:
            return r.insert(node.target, *node.args[:2], found, *node.args[3:], **rest)
        layer = r.insert(node.target, *node.args[:2], None, *node.args[3:], **rest)
        count = 0 if name == "linear" else int(name.removesuffix("d")[-1])
        return with_parts(r, layer, bias, [*r.shape(bias), *[1] * count])
    return scaled_weight(r, node) if is_plain or name == "linear" else None


def _grouped(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite grouped convolutions with computed weights; parts of parameters may turn out to be kernels first."""
    weight = node.args[1]
    while r.name(weight) in operations(Trait.MOVE) | {"getitem"}:
        weight = weight.args[0]  # type: ignore[union-attr]
    return None if weight in r.capture.states else grouped(r, node)


def _group_parts(r: Rewriter) -> int:
    """Rewrite grouped convolutions with parts of parameters."""
    return r.rewrite(dict.fromkeys(operations(Trait.CONVOLVE), grouped))


# Moves of elements.


def _windows(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite windows that tile an image without overlap as parts of its axes."""
    arguments: Any = node.args
    value, sizes, dilations, padding, strides = arguments
    shape = r.shape(value)
    if sizes != strides or any(own != 1 for own in dilations) or any(padding) or len(shape) != 4:
        return None
    (height, width), (rows, columns) = shape[2:], sizes
    if height % rows or width % columns:
        return None
    parts = [*shape[:2], height // rows, rows, width // columns, columns]
    moved = permuted(r, reshaped(r, value, parts), [0, 1, 3, 5, 2, 4])
    return reshaped(r, moved, r.shape(node))


def _norm_of_centred(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the norm of a centred value, perhaps with permuted axes, as a layer norm."""
    moves: list[fx.Node] = []
    difference = node.args[0]
    while r.name(difference) in operations(Trait.PERMUTE) and isinstance(difference, fx.Node):
        moves.insert(0, difference)
        difference = difference.args[0]
    if r.name(difference) != "sub" or len(difference.args) != 2 or difference.kwargs:  # type: ignore[union-attr]
        return None
    value, mean = difference.args  # type: ignore[union-attr]
    if r.name(mean) != "mean" or not isinstance(mean, fx.Node) or mean.args[0] is not value:
        return None
    sizes: Any = node.args[1]
    rank = len(r.shape(value))
    order = torch.empty(tuple(range(rank)), device="meta")
    for move in moves:
        target: Any = move.target
        order = target(order, *move.args[1:], **move.kwargs)
    if reduced(mean, rank) != {*order.shape[rank - len(sizes) :]} or len(r.shape(mean)) != rank:
        return None
    for move in moves:
        value = r.insert(move.target, value, *move.args[1:], **move.kwargs)
    if r.name(node) == "layer_norm":
        return r.insert(aten.layer_norm.default, value, *node.args[1:], **node.kwargs)
    eps = argument(node, 3, "eps")
    eps = torch.finfo(node.meta["val"].dtype).eps if eps is None else eps
    return r.insert(aten.layer_norm.default, value, sizes, argument(node, 2, "weight"), None, eps)


def _norm(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the norm of zeros, as of an initial state, as its bias, and norms of centred values as layer norms."""
    if r.number(node.args[0]) != 0 or r.made_of(node) == "constants":
        return _norm_of_centred(r, node)
    shape, like = list(r.shape(node)), node.meta["val"]
    if (bias := argument(node, 3, "bias") if r.name(node) == "layer_norm" else None) is not None:
        return r.insert(aten.expand.default, bias, shape)
    return r.insert(aten.full.default, shape, 0.0, dtype=like.dtype, device=like.device)


def _undone(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite moves that restore an earlier value."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    source: Any = node.args[0]
    if r.name(node) == "unsqueeze" and r.name(source) == "sum" and len(source.args) == 2:
        axis = node.args[1] % value.ndim  # type: ignore[operator]
        if reduced(source, value.ndim) == {axis} and not source.kwargs:
            return r.insert(source.target, source.args[0], [axis], True)
    if (flat := joined_flat(r, node) or split_product(r, node)) is not None:
        return flat
    earlier: fx.Node = node
    while r.name(earlier) in operations(Trait.REGROUP):  # which may copy
        earlier = earlier.args[0]  # type: ignore[assignment]
        if r.shape(earlier) == r.shape(node) and earlier.meta["val"].dtype == value.dtype:
            return earlier
    for before in shown(r, node)[:-1]:
        held = before.meta.get("val")
        if isinstance(held, Tensor) and layout(held) == layout(value):
            return before
        if isinstance(held, Tensor) and before is not node.args[0] and (part := _part_of(held, value)) is not None:
            return r.insert(aten.slice.Tensor, before, *part)
    return written_part(r, node)


def _part_of(whole: Tensor, value: Tensor) -> tuple[int, int, int] | None:
    """Return (axis, start, end) if a value is a slice of another one; else None."""
    differing = [axis for axis in range(value.ndim) if value.shape[axis] != whole.shape[axis : axis + 1].numel()]
    if whole.ndim != value.ndim or len(differing) != 1 or not value.numel():
        return None
    (axis,) = differing
    start, rest = divmod(int(value.storage_offset()) - int(whole.storage_offset()), max(whole.stride(axis), 1))
    end = start + value.shape[axis]
    if rest or start < 0 or end > whole.shape[axis]:
        return None
    return (axis, start, end) if layout(whole.narrow(axis, start, end - start)) == layout(value) else None


def _cat(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite parts that are reassembled in their original order, and equal operations on several parts."""
    parts: Any = node.args[0]
    axis = argument(node, 1, "dim", 0) % len(r.shape(node))
    different = list(dict.fromkeys(parts))
    times, single = len(parts) // len(different), all(r.shape(part)[axis : axis + 1] == (1,) for part in different)
    if len(parts) > 1 == len(different) and (single or r.made_of(parts[0]) == "inputs"):
        return repeated(r, parts[0], len(parts), axis)
    if times > 1 and single and list(parts) == [part for part in different for _ in range(times)]:
        # Keys that several queries share.
        return r.insert(aten.repeat_interleave.self_int, r.insert(aten.cat.default, different, axis), times, axis)
    whole = joined(r, parts, axis)
    folds = any(_stacked(r, user) is node for user in node.users)  # it becomes a chain of sums or the like
    return (together(r, node) or _cat_of_cats(r, node, axis)) if whole is None and not folds else whole


def _cat_of_cats(r: Rewriter, node: fx.Node, axis: int) -> fx.Node | None:
    """Rewrite nested concatenations along one axis as one (loops in loops)."""
    flat: list[fx.Node] = []
    for part in node.args[0]:  # type: ignore[union-attr]
        inner: Any = part
        nested = r.name(inner) == "cat" and r.only_for(inner, node)
        nested = nested and argument(inner, 1, "dim", 0) % len(r.shape(inner)) == axis
        flat += inner.args[0] if nested else [inner]
    return r.insert(aten.cat.default, flat, axis) if len(flat) > len(node.args[0]) else None  # type: ignore[arg-type]


def _repeat(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite values repeated along axes of size 1 as expanded ones."""
    shape, times = r.shape(node.args[0]), r.shape(node)
    fits = all(own in (1, new) for own, new in zip(shape[::-1], times[::-1], strict=False))
    return r.insert(aten.expand.default, node.args[0], list(times)) if fits else None


def _triangle(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the triangle of a value as a product with a constant."""
    value = node.args[0]
    if r.made_of(value) == "constants":
        return None
    sizes, kind = r.shape(value)[-2:], node.meta["val"].dtype
    ones = r.insert(aten.full.default, list(sizes), 1.0, dtype=kind, device=node.meta["val"].device)
    return r.insert(aten.mul.Tensor, value, r.insert(node.target, ones, *node.args[1:]))


def _defined(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the numbers that replace undefined ones, as in fully masked rows."""
    value = node.args[0]
    return value if isinstance(value, fx.Node) and r.made_of(value) == "inputs" else None


def _unexpanded(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite an elementwise operation on expanded inputs of the network: it acts before they are expanded."""
    found = [own for own in node.all_input_nodes if r.name(own) in operations(Trait.EXPAND) and is_data(r, own)]
    if not found:
        return None
    new = r.insert(node.target, *fx.map_arg(node.args, lambda own: own.args[0] if own in found else own), **node.kwargs)
    if new.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return new if r.shape(new) == r.shape(node) else r.insert(aten.expand.default, new, list(r.shape(node)))


def _or_unexpanded(rewrite: Rewrite | None) -> Rewrite:
    return lambda r, node: _unexpanded(r, node) or (None if rewrite is None else rewrite(r, node))


_FOLDS = {
    "sum": aten.add.Tensor,
    "mean": aten.add.Tensor,
    "prod": aten.mul.Tensor,
    "amax": aten.maximum.default,
    "amin": aten.minimum.default,
}
_SUMS = (_scaled_sum, _neutral, squared_distances, squares_of_parts, gathered, factored)
_REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matrix_product),
    **dict.fromkeys({"linear"} | operations(Trait.CONVOLVE), _layer),
    **dict.fromkeys(("dot", "vdot"), product_of_vectors),
    "einsum": lambda r, node: number_of_weights(r, node) or of_diagonals(r, node) or einsum(r, node),
    **dict.fromkeys(_FOLDS, _total),
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    **dict.fromkeys(operations(Trait.LIKE) - {"empty_like", "new_empty"}, _made_like),
    "index": lambda r, node: rows_at(r, node) or whole_axes(r, node),
    "index_select": rows_at,
    "diagonal": diagonal,
    "gather": gathered_rows,
    "im2col": _windows,
    **dict.fromkeys(("rms_norm", "layer_norm"), _norm),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "stack": _stack,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    "getitem": _item,
    **dict.fromkeys(VIEWS, _undone),
    **written_out.REWRITES,
    "cat": _cat,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(WRITES, joined_writes),
    **dict.fromkeys(operations(Trait.PAD), padded),
    **dict.fromkeys(("masked_fill", "where"), spelled_mask),
    "nan_to_num": _defined,
    "index_put": lambda r, node: written_mask(r, node) or joined_writes(r, node),
    "softmax": softmax,
    "eq": is_chosen,
    "abs": modulus,
    **dict.fromkeys(("real", "imag", "view_as_real"), parts_of_turns),
    **REWRITES,
}
_ELEMENTWISE = Trait.JOIN | Trait.PRODUCT | Trait.CAST | Trait.POINTWISE | Trait.ORDER | Trait.EQUALISE
_REWRITES |= {
    name: _or_unexpanded(_REWRITES.get(name))
    for name in operations(_ELEMENTWISE) - WRITES - {"one_hot"} | {"remainder"}
}
