"""The table of operations: the effect of each operation on the elements of its arguments.

All other files look up here which operations move, cast, sum or write elements. Names are those of `torch.ops.aten`,
without the underscore of in-place operations; names that a torch version lacks have no effect.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.capture import operation_name


class Trait(enum.Flag):
    """The effect of an operation; an operation may have several traits."""

    # Returns elements of the first argument at other positions: all or some, once or several times.
    MOVE = enum.auto()
    REGROUP = enum.auto()  # ... in the same order, in another shape
    PERMUTE = enum.auto()  # ... with permuted axes
    CUT = enum.auto()  # ... from a part of an axis, or several parts
    EXPAND = enum.auto()  # ... repeated along axes of size 1
    PARTS = enum.auto()  # ... as a list of values
    # Returns elements of the first argument at positions given by another argument.
    PICK = enum.auto()
    # Returns elements of the first argument and zeros, for floating-point numbers only.
    SPREAD = enum.auto()
    NEAREST = enum.auto()  # ... of the nearest position
    PAD = enum.auto()
    # Returns the first argument, perhaps in another dtype or memory.
    CAST = enum.auto()
    # Applies a nonlinear function to every element of the first argument. Torch tags most of them as well.
    POINTWISE = enum.auto()
    NEVER_NEGATIVE = enum.auto()  # the result is zero or positive
    ORDER = enum.auto()  # compares elements by size
    EQUALISE = enum.auto()  # makes several elements equal
    # Linear in each of its arguments.
    LINEAR = enum.auto()
    JOIN = enum.auto()  # sums and differences, element by element
    PRODUCT = enum.auto()  # products and quotients, element by element
    CAT = enum.auto()  # concatenates values
    CONTRACT = enum.auto()  # sums of products
    CONVOLVE = enum.auto()  # ... of a kernel's elements, second argument, and neighbours
    # Reductions along axes.
    SUM = enum.auto()  # sums and means
    REDUCE = enum.auto()  # other reductions
    POOL = enum.auto()  # means of neighbours
    MAX_POOL = enum.auto()
    RESIZE = enum.auto()  # weighted means of neighbours
    SOFTMAX = enum.auto()
    NORM = enum.auto()
    CHOOSE = enum.auto()  # indices of the largest elements
    # Writes into its first argument, or returns the written value.
    WRITE = enum.auto()
    REPLACE = enum.auto()  # ... without reading the old elements, unless told to accumulate
    # Creates a constant with equal elements.
    CONSTANT = enum.auto()
    LIKE = enum.auto()  # ... in the shape of the first argument, which is not read otherwise


def _in_dimensions(*names: str) -> str:
    """Return the names of operations that exist for one, two and three spatial axes."""
    return " ".join(name.replace("#", f"{count}d") for name in names for count in (1, 2, 3))


_T = Trait
_ROWS = {
    "view reshape _unsafe_view view_as reshape_as flatten unflatten squeeze unsqueeze": _T.MOVE | _T.REGROUP,
    "permute transpose t numpy_T mT mH adjoint movedim moveaxis swapaxes swapdims": _T.MOVE | _T.PERMUTE,
    "slice select narrow": _T.MOVE | _T.CUT,
    "chunk split split_with_sizes tensor_split unbind": _T.MOVE | _T.CUT | _T.PARTS,
    "unsafe_chunk unsafe_split unsafe_split_with_sizes": _T.MOVE | _T.CUT | _T.PARTS,
    "hsplit vsplit dsplit": _T.MOVE | _T.PARTS,
    "expand broadcast_to expand_as": _T.MOVE | _T.EXPAND,
    "repeat tile repeat_interleave roll flip rot90 diagonal unfold": _T.MOVE,
    "pixel_shuffle pixel_unshuffle channel_shuffle": _T.MOVE,
    "index index_select gather take": _T.PICK,
    "im2col": _T.SPREAD,
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d": _T.SPREAD | _T.NEAREST,
    "pad constant_pad_nd": _T.PAD,
    "to _to_copy type_as float double half bfloat16 clone alias detach contiguous positive": _T.CAST,
    "lift_fresh lift_fresh_copy dropout feature_dropout alpha_dropout feature_alpha_dropout": _T.CAST,
    "gelu silu tanh log mish elu leaky_relu selu celu erf sin cos tan atan sinh cosh": _T.POINTWISE,
    "pow sqrt rsqrt reciprocal hardswish log_sigmoid bitwise_not logical_not": _T.POINTWISE,
    "sigmoid exp exp2 softplus abs square": _T.POINTWISE | _T.NEVER_NEGATIVE,
    "relu": _T.POINTWISE | _T.NEVER_NEGATIVE | _T.EQUALISE,
    "relu6 hardtanh hardsigmoid clamp clamp_min clamp_max threshold": _T.POINTWISE | _T.EQUALISE,
    "round floor ceil": _T.POINTWISE | _T.EQUALISE,
    "gt lt ge le greater less greater_equal less_equal": _T.ORDER | _T.EQUALISE,
    "eq ne one_hot": _T.EQUALISE,
    "where masked_fill": _T.LINEAR | _T.EQUALISE,
    "neg": _T.LINEAR,
    "add sub subtract rsub": _T.LINEAR | _T.JOIN,
    "mul multiply div divide true_divide": _T.LINEAR | _T.PRODUCT,
    "cat concat concatenate stack": _T.LINEAR | _T.CAT,
    "linear matmul mm bmm mv einsum tensordot bilinear addmm baddbmm addmv embedding": _T.LINEAR | _T.CONTRACT,
    _in_dimensions("conv#", "conv_transpose#"): _T.LINEAR | _T.CONTRACT | _T.CONVOLVE,
    "sum mean": _T.LINEAR | _T.SUM,
    "var std var_mean std_mean norm linalg_vector_norm amax amin logsumexp dot": _T.REDUCE,
    "cumsum cummax cummin logcumsumexp": _T.REDUCE,
    _in_dimensions("avg_pool#", "adaptive_avg_pool#", "_adaptive_avg_pool#"): _T.POOL,
    _in_dimensions("max_pool#", "max_pool#_with_indices", "adaptive_max_pool#"): _T.MAX_POOL,
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d": _T.RESIZE,
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa": _T.RESIZE,
    "softmax _softmax": _T.SOFTMAX | _T.NEVER_NEGATIVE,
    "log_softmax _log_softmax": _T.SOFTMAX,
    "layer_norm rms_norm group_norm instance_norm batch_norm cudnn_batch_norm": _T.NORM,
    "topk sort argsort argmax argmin": _T.CHOOSE,
    "max min": _T.CHOOSE | _T.REDUCE,
    "scatter": _T.WRITE | _T.REPLACE | _T.EQUALISE,
    "copy fill zero index_put index_copy index_fill put": _T.WRITE | _T.REPLACE,
    "slice_scatter select_scatter diagonal_scatter": _T.WRITE | _T.REPLACE,
    "_index_put_impl index_add scatter_add scatter_reduce": _T.WRITE,
    "zeros ones full empty scalar_tensor": _T.CONSTANT,
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty": _T.CONSTANT | _T.LIKE,
}
_TRAITS = {name: traits for names, traits in _ROWS.items() for name in names.split()}


@functools.cache
def operations(traits: Trait) -> frozenset[str]:
    """Return the names of the operations that have at least one of some traits."""
    return frozenset(name for name, own in _TRAITS.items() if own & traits)


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operation, without the underscore of one that writes in place."""
    return operation_name(node.target).removesuffix("_") if node.op == "call_function" else node.op


def spatial_axes_of(name: str) -> int:
    """Return the number of spatial axes of an operation called ...1d, ...2d, ...3d."""
    return next(count for count in (1, 2, 3) if f"{count}d" in name)


def moving(node: fx.Node, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[[Tensor], Any]:
    """Return a function that moves the elements of any tensor like an operation moves those of its first argument.

    Args:
        node: The operation.
        arguments: Its arguments after the first, with tensors instead of nodes.
        keywords: Its keyword arguments, with tensors instead of nodes.
    """
    name, target = operation_name(node.target), cast(Callable[..., Any], node.target)
    if name in operations(Trait.REGROUP | Trait.EXPAND):  # the result's shape determines these
        shape = tuple(node.meta["val"].shape)
        return lambda tensor: tensor.expand(shape) if name in operations(Trait.EXPAND) else tensor.reshape(shape)
    return lambda tensor: target(tensor, *arguments, **keywords)


@functools.cache
def out_of_place(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the out-of-place variant of an operation, the only one with tags; itself if there is none."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__"):
        return target
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    types = [own.type for own in target._schema.arguments]
    found = [getattr(packet, own) for own in (packet.overloads() if packet is not None else ())]
    return next((own for own in found if [each.type for each in own._schema.arguments] == types), target)


def is_pointwise(target: Any) -> bool:
    """Return whether an operation with one result acts elementwise on one or several values."""
    if not isinstance(target, torch._ops.OpOverload) or len(target._schema.returns) != 1:
        return False
    tagged = torch.Tag.pointwise in out_of_place(target).tags
    return tagged or operation_name(target).removesuffix("_") in operations(Trait.POINTWISE)
