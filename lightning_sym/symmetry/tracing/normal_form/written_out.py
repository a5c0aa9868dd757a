"""Decompositions of torch operations: functions of the operations that replace the original one.

An entry here makes an unknown operation known to all rules (docs/theory/tracing.md, 6).
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.capture import operation_name
from lightning_sym.symmetry.tracing.graph.nodes import between
from lightning_sym.symmetry.tracing.graph.rewriting import Rewrite, Rewriter

Written = Callable[..., Tensor]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ value


def _cross(x: Tensor, y: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:  # the first axis of size 3, perhaps the samples
        raise ValueError(dim)
    return x.roll(-1, dim) * y.roll(1, dim) - x.roll(1, dim) * y.roll(-1, dim)


def _distances(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)
    return result


def _cosine(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    one, two = (each / torch.linalg.vector_norm(each, 2, dim, keepdim=True).clamp_min(eps) for each in (x, y))
    product: Tensor = (one * two).sum(dim)
    return product


def _gated(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Tensor:
    parts = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    x, wide = torch.layer_norm(parts, parts.shape[2:], None, None, eps).reshape(x.shape), [-1, *[1] * (x.ndim - 2)]
    x = x if weight is None else x * weight.reshape(wide)
    return x if bias is None else x + bias.reshape(wide)


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    own_statistics: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Tensor:
    if own_statistics:
        return _group_norm(x, x.shape[1], weight, bias, eps)
    return torch.batch_norm(x, weight, bias, mean, variance, False, momentum, eps, cudnn)


def _leaking(x: Tensor, slope: Tensor) -> Tensor:
    wide = slope.reshape(-1, *[1] * (x.ndim - 2)) if slope.numel() > 1 and x.ndim > 1 else slope
    return x.relu() - wide * (-x).relu()


def _matrix_product(added: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _times(x @ y, alpha) + _times(added, beta)


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = torch.einsum("...x,zxy,...y->...z", x, weight, y)
    return result if bias is None else result + bias


def _over(x: Tensor, y: Tensor, ours: Sequence[int], theirs: Sequence[int]) -> Tensor:
    """Contract axes of one tensor with axes of another."""
    one, two = list(string.ascii_lowercase[: x.ndim]), list(string.ascii_uppercase[: y.ndim])
    for at, to in zip(ours, theirs, strict=True):
        two[to] = one[at]
    out = (letter for letter in [*one, *two] if (letter in one) != (letter in two))
    return torch.einsum(f"{''.join(one)},{''.join(two)}->{''.join(out)}", x, y)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / _norm_except(v, 2, dim))


def _norm_except(v: Tensor, pow: float = 2, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.ndim) if axis != dim] if dim != -1 else None
    result: Tensor = torch.linalg.vector_norm(v, pow, axes, dim != -1)
    return result


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    count = weight.ndim - 2
    if transposed:
        transpose = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[count - 1]
        result: Tensor = transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
        return result
    plain = (torch.conv1d, torch.conv2d, torch.conv3d)[count - 1]
    result = plain(x, weight, bias, stride, padding, dilation, groups)
    return result


def _diagonal(x: Tensor, diagonal: int = 0) -> Tensor:
    (_, _) = x.shape
    return x.diagonal(diagonal)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if beta == 1:
        raise ValueError(beta)
    return torch.nn.functional.softplus(x * beta, 1, threshold) / beta


def _quantile(x: Tensor, q: float, dim: int, keepdim: bool = False, *, interpolation: str = "linear") -> Tensor:
    last = x.shape[dim] - 1
    if interpolation != "linear" or last == 0:
        raise ValueError(interpolation)
    low = min(int(q * last), last - 1)
    one, two = (x.sort(dim)[0].narrow(dim, low + step, 1) for step in (0, 1))
    found = one + (q * last - low) * (two - one)
    return found if keepdim else found.squeeze(dim)


# The first results of operations with several, of which decomposed networks are made.
FIRST_RESULTS: Mapping[str, Written] = {
    "native_layer_norm": torch.layer_norm,
    "native_group_norm": lambda x, w, b, size, channels, space, groups, eps: _group_norm(x, groups, w, b, eps),
    "_native_batch_norm_legit_no_training": lambda x, w, b, mean, variance, momentum, eps: torch.batch_norm(
        x, w, b, mean, variance, False, momentum, eps, False
    ),
    "_scaled_dot_product_attention_math": lambda q, k, v, mask=None, *flags, **more: _attention(
        q, k, v, None if mask is None else mask.to(q.dtype), *flags, **more
    ),
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *flags, attn_mask=None, **more: _attention(
        q, k, v, attn_mask, *flags, **more
    ),
}
FUNCTIONS: Mapping[str, Written] = {
    "logaddexp": lambda x, y: torch.stack(torch.broadcast_tensors(x, y)).logsumexp(0),  # type: ignore[no-untyped-call]
    "_weight_norm": _weight_norm,
    "norm_except_dim": _norm_except,
    "addcdiv": lambda x, one, two, *, value=1: x + _times(one / two, value),
    "addcmul": lambda x, one, two, *, value=1: x + _times(one * two, value),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _matrix_product),
    "bilinear": _bilinear,
    **dict.fromkeys(("exp2", "special_exp2"), lambda x: (x * math.log(2)).exp()),
    "ldexp": lambda x, y: x * y.exp2(),
    "cdist": _distances,
    "convolution": _convolution,
    "cosine_similarity": _cosine,
    "cross": _cross,
    "linalg_cross": lambda x, y, *, dim=-1: _cross(x, y, dim),
    "diag": _diagonal,
    "glu": _gated,
    "group_norm": _group_norm,
    "hypot": lambda x, y: (x.square() + y.square()).sqrt(),
    "instance_norm": _instance_norm,
    "lerp": lambda start, end, weight: start + weight * (end - start),
    "inner": lambda x, y: _over(x, y, [-1], [-1]),
    "rsub": lambda x, y, alpha=1: y.sub(x, alpha=alpha),
    "tensordot": _over,
    "prelu": _leaking,
    "quantile": _quantile,
    "scaled_dot_product_attention": _attention,
    "softplus": _softplus,
}


# Operations that torch itself composes from simpler ones.
_COMPOSED = (
    "hstack vstack row_stack dstack column_stack kron linalg_multi_dot chain_matmul concat concatenate diff divide "
)
_COMPOSED += "true_divide multiply subtract expand_as reshape_as view_as outer ger linalg_vecdot linalg_norm "
_COMPOSED += "pairwise_distance"


def _rewrite(function: Written | None) -> Rewrite:
    """Return a rewrite by a function; by default by torch's own composition."""

    def rewrite(r: Rewriter, node: fx.Node) -> fx.Node | None:
        first = node.prev
        node.meta.setdefault("written_for", operation_name(node.target))  # for notes: the network's own call
        try:
            composed: Any = function or node.target
            result: fx.Node = r.write(composed, *node.args, **node.kwargs)
        except ValueError:
            return None
        return None if any(r.is_kept(own.target) for own in between(first, node)) else result

    return rewrite


REWRITES: Mapping[str, Rewrite] = {
    name: _rewrite(function) for name, function in (dict.fromkeys(_COMPOSED.split()) | dict(FUNCTIONS)).items()
}
