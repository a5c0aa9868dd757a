"""Layers in many spellings: linear layers, norms, convolutions, turns of rotary positions, as functions of tensors."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# ---- a linear layer: of the last axis of `x`, shape (samples, steps, inputs)


def packed(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, w, b: x @ w.T + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T).unflatten(0, x.shape[:2]),
    "tensordot": lambda x, w, b: torch.tensordot(x, w, ([-1], [1])) + b,
    "einsum": lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b,
    "conv1d": lambda x, w, b: F.conv1d(x.mT, w[..., None], b).mT,
    "columns": lambda x, w, b: (w @ x[..., None])[..., 0] + b,
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w.T.expand(len(x), -1, -1)),
    "sum of products": lambda x, w, b: (x[..., None, :] * w).sum(-1) + b,
    "cat of chunks": lambda x, w, b: torch.cat([F.linear(x, *part) for part in zip(w.chunk(2), b.chunk(2),
        strict=True)], -1),
    "sum of chunks": lambda x, w, b: sum(y @ v.T for y, v in zip(x.chunk(2, -1), w.chunk(2, 1), strict=True)) + b,
    "rows": lambda x, w, b: torch.stack([x @ row for row in w], -1) + b,
    "bias as a column": lambda x, w, b: packed(x) @ torch.cat([w, b[:, None]], 1).T,
}  # fmt: skip


# ---- norms of the last axis, with gain and bias


def centred(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def by_var_mean(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    variance, mean = torch.var_mean(h, -1, keepdim=True, correction=0)
    return (h - mean) * torch.rsqrt(variance + e) * g + b


def by_sums(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    n = h.shape[-1]
    c = h - h.sum(-1, keepdim=True) / n
    return c / torch.sqrt((c * c).sum(-1, keepdim=True) / n + e) * g + b


def by_einsum(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    n = h.shape[-1]
    c = h - torch.einsum("btd,d->bt", h, torch.full((n,), 1 / n, dtype=h.dtype))[..., None]
    return c * torch.rsqrt(torch.einsum("btd,btd->bt", c, c)[..., None] / n + e) * g + b


def by_moments(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    mean = h.mean(-1, keepdim=True)
    return (h - mean) * torch.rsqrt((h * h).mean(-1, keepdim=True) - mean**2 + e) * g + b


def by_a_matrix(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    n = h.shape[-1]
    c = h @ (torch.eye(n, dtype=h.dtype) - 1 / n)
    return c * (c.square().mean(-1, keepdim=True) + e) ** -0.5 * g + b


def scaled(c: Tensor, e: float) -> Tensor:
    return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + e)


LAYER_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "layer_norm": lambda h, g, b, e: F.layer_norm(h, h.shape[-1:], g, b, e),
    "mean of squares": lambda h, g, b, e: scaled(centred(h), e) * g + b,
    "sums": by_sums,
    "var": lambda h, g, b, e: centred(h) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + e) * g + b,
    "var_mean": by_var_mean,
    "addcmul": lambda h, g, b, e: torch.addcmul(b, scaled(centred(h), e), g),
    "einsums": by_einsum,
    "second moment": by_moments,
    "matrix": by_a_matrix,
    "group_norm": lambda h, g, b, e: F.group_norm(h.flatten(0, 1), 1, g, b, e).view_as(h),
    "norm, then gain": lambda h, g, b, e: F.layer_norm(h, h.shape[-1:], eps=e) * g + b,
    "native": lambda h, g, b, e: torch.native_layer_norm(h, h.shape[-1:], g, b, e)[0],
}


RMS_NORM: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "rms_norm": lambda h, g, e: F.rms_norm(h, h.shape[-1:], g, e),
    "mean of squares": lambda h, g, e: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + e) * g,
    "sums": lambda h, g, e: h / torch.sqrt((h * h).sum(-1, keepdim=True) / h.shape[-1] + e) * g,
    "gain first": lambda h, g, e: (g * h) * (h.square().mean(-1, keepdim=True) + e).rsqrt(),
    "vector_norm": lambda h, g, e: g * (h / (torch.linalg.vector_norm(h, dim=-1, keepdim=True) ** 2 / 6 + e).sqrt()),
    "einsum": lambda h, g, e: h * torch.rsqrt(torch.einsum("...d,...d->...", h, h)[..., None] / 6 + e) * g,
    "matmul": lambda h, g, e: h * torch.rsqrt((h[..., None, :] @ h[..., None])[..., 0] / 6 + e) * g,
    "power": lambda h, g, e: torch.einsum("btd,d->btd", h * (h.norm(dim=-1, keepdim=True).pow(2) / 6 + e) ** -0.5, g),
    "reciprocal": lambda h, g, e: (torch.mul(h,
        (h.var(-1, correction=0) + h.mean(-1) ** 2 + e).sqrt().reciprocal()[..., None]) * g),
}  # fmt: skip


def groups(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, 3))


GROUP_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "group_norm": lambda h, g, b, e: F.group_norm(h.flatten(0, 1), 2, g, b, e).view_as(h),
    "native": lambda h, g, b, e: torch.native_group_norm(h.flatten(0, 1), g, b, len(h) * h.shape[1], 6, 1, 2,
        e)[0].view_as(h),
    "layer_norm of a view": lambda h, g, b, e: F.layer_norm(groups(h), (3,), eps=e).flatten(-2) * g + b,
    "mean of squares": lambda h, g, b, e: scaled(centred(groups(h)), e).flatten(-2) * g + b,
    "gains of a view": lambda h, g, b, e: (scaled(centred(groups(h)), e) * g.view(2, 3) + b.view(2, 3)).flatten(-2),
    "chunks": lambda h, g, b, e: torch.cat([F.layer_norm(*part, e) for part in zip(h.chunk(2, -1), [(3,)] * 2,
        g.chunk(2), b.chunk(2), strict=True)], -1),
    "instance_norm": lambda h, g, b, e: F.instance_norm(groups(h).flatten(0, 1), eps=e).view_as(h) * g + b,
    "var_mean": lambda h, g, b, e: by_var_mean(groups(h), g.view(2, 3), b.view(2, 3), e).view_as(h),
    "addcmul": lambda h, g, b, e: torch.addcmul(b, scaled(centred(groups(h)), e).reshape(h.shape), g),
    "image": lambda h, g, b, e: F.group_norm(h.reshape(-1, 6, 1, 1), 2, g, b, e)[..., 0, 0].unflatten(0, h.shape[:2]),
}  # fmt: skip


BATCH_NORM: dict[str, Callable[..., Tensor]] = {
    "batch_norm": lambda h, m, v, g, b: F.batch_norm(h.mT, m, v, g, b).mT,
    "flat": lambda h, m, v, g, b: F.batch_norm(h.flatten(0, 1), m, v, g, b).view_as(h),
    "image": lambda h, m, v, g, b: F.batch_norm(h.mT[..., None], m, v, g, b)[..., 0].mT,
    "norm, then gain": lambda h, m, v, g, b: F.batch_norm(h.mT, m, v).mT * g + b,
    "native": lambda h, m, v, g, b: torch.ops.aten._native_batch_norm_legit_no_training(h.mT, g, b, m, v, 0.1,
        1e-5)[0].mT,
    "by hand": lambda h, m, v, g, b: (h - m) / torch.sqrt(v + 1e-5) * g + b,
    "folded": lambda h, m, v, g, b: h * (g * torch.rsqrt(v + 1e-5)) + (b - m * (g * torch.rsqrt(v + 1e-5))),
    "addcmul": lambda h, m, v, g, b: torch.addcmul(b, (h - m) * (v + 1e-5).rsqrt(), g),
    "channels first": lambda h, m, v, g, b: ((((h.mT - m[:, None]) * (v + 1e-5)[:, None] ** -0.5) * g[:, None] + b[:,
        None]).mT),
    "mean last": lambda h, m, v, g, b: h * (g / (v + 1e-5).sqrt()) - m * (g / (v + 1e-5).sqrt()) + b,
    "negative": lambda h, m, v, g, b: b - (m - h) * g * (v + 1e-5) ** -0.5,
    "instance_norm": lambda h, m, v, g, b: F.instance_norm(h.mT, m, v, g, b, use_input_stats=False).mT,
    "unit by unit": lambda h, *states: torch.stack([(own - m) / (v + 1e-5).sqrt() * g + b for own, m, v, g, b in zip(
        h.unbind(-1), *(state.unbind() for state in states), strict=True)], -1),
    "depthwise": lambda h, m, v, g, b: F.conv1d(((h - m) / (v + 1e-5).sqrt()).mT, g[:, None, None], b, groups=6).mT,
}  # fmt: skip


# ---- convolutions of (samples, 2, 6, 6) by 3 x 3


def windows(x: Tensor) -> Tensor:
    return x.unfold(2, 3, 1).unfold(3, 3, 1)  # samples, channels, rows, columns, 3, 3


def shifted(x: Tensor, w: Tensor) -> Tensor:
    rows, columns = x.shape[2] - 2, x.shape[3] - 2
    parts = [
        torch.einsum("bihw,oi->bohw", x[:, :, i : i + rows, j : j + columns], w[:, :, i, j])
        for i in range(3)
        for j in range(3)
    ]
    return torch.stack(parts).sum(0)


def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    height = x.shape[2] - 2
    return sum(F.conv2d(x[:, :, i : i + height], w[:, :, i : i + 1]) for i in range(3)) + b[:, None, None]


def with_ones(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    ones = torch.ones_like(x[:, :1])
    return F.conv2d(torch.cat([x, ones], 1), torch.cat([w, F.pad(b[:, None, None, None], (1, 1, 1, 1))], 1))


CONVOLUTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "conv2d": F.conv2d,
    "bias added": lambda x, w, b: F.conv2d(x, w) + b[:, None, None],
    "unfold": lambda x, w, b: (w.flatten(1) @ F.unfold(x, 3) + b[:, None]).unflatten(-1, (x.shape[2] - 2, -1)),
    "windows": lambda x, w, b: torch.einsum("bihwkl,oikl->bohw", windows(x), w) + b[:, None, None],
    "tensordot": lambda x, w, b: (torch.tensordot(windows(x), w, ([1, 4, 5], [1, 2, 3])) + b).permute(0, 3, 1, 2),
    "shifted": lambda x, w, b: shifted(x, w) + b[:, None, None],
    "conv3d": lambda x, w, b: F.conv3d(x[:, :, None], w[:, :, None], b)[:, :, 0],
    "transposed": lambda x, w, b: F.conv_transpose2d(x, w.transpose(0, 1).flip(2, 3), b)[..., 2:-2, 2:-2],
    "padded": lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1)), w, b)[..., 1:-1, 1:-1],
    "chunks": lambda x, w, b: torch.cat([F.conv2d(x, *part) for part in zip(w.chunk(2), b.chunk(2), strict=True)], 1),
    "sum over inputs": lambda x, w, b: sum(F.conv2d(y, v) for y,
        v in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)) + b.view(-1, 1, 1),
    "rows": rows,
    "products": lambda x, w, b: (windows(x)[:, None] * w[:, :, None, None]).sum((2, -1, -2)) + b.view(-1, 1, 1),
    "mirrored": lambda x, w, b: F.conv2d(x.flip(-1), w.flip(-1), b).flip(-1),
    "ones as a channel": with_ones,
}  # fmt: skip


# ---- rotary positions: 2 heads of 4 numbers


ANGLES = torch.arange(3, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3], dtype=torch.float64)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


def half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def turned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * COS - b * SIN, a * SIN + b * COS


def by_complex_numbers(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    y = torch.complex(a, b) * torch.polar(torch.ones_like(ANGLES), ANGLES)
    return torch.cat([y.real, y.imag], -1)


def written(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :2] = x[..., :2] * COS - x[..., 2:] * SIN
    y[..., 2:] = x[..., 2:] * COS + x[..., :2] * SIN
    return y


def written_in_steps(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., ::2], y[..., 1::2] = turned(x[..., ::2], x[..., 1::2])
    return y


def by_parts(x: Tensor) -> Tensor:
    y = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * ANGLES)
    return torch.cat([torch.real(y), torch.imag(y)], -1)


def block_matrices() -> Tensor:
    """Return the matrix of each position. Shape (steps, 4, 4)."""
    c, s = COS.diag_embed(), SIN.diag_embed()
    return torch.cat([torch.cat([c, -s], 2), torch.cat([s, c], 2)], 1)


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "half turned": lambda x: x * twice(COS) + half_turned(x) * twice(SIN),
    "chunks": lambda x: torch.cat(turned(*x.chunk(2, -1)), -1),
    "slices": lambda x: torch.cat(turned(x[..., :2], x[..., 2:]), -1),
    "stack": lambda x: torch.stack(turned(*x.unflatten(-1, (2, 2)).unbind(-2)), -2).flatten(-2),
    "roll": lambda x: x * twice(COS) + x.roll(2, -1) * torch.cat([-SIN, SIN], -1),
    "index": lambda x: x * twice(COS) + x[..., [2, 3, 0, 1]] * torch.cat([-SIN, SIN], -1),
    "complex": by_complex_numbers,
    "real and imaginary": by_parts,
    "addcmul": lambda x: torch.addcmul(x * twice(COS), half_turned(x), twice(SIN)),
    "written": written,
    "matrices": lambda x: torch.einsum("tij,bhtj->bhti", block_matrices(), x),
}
PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda x: torch.stack(turned(x[..., ::2], x[..., 1::2]), -1).flatten(-2),
    "unbind": lambda x: torch.stack(turned(*x.unflatten(-1, (2, 2)).unbind(-1)), -1).flatten(-2),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1,
        (2, 2)).contiguous()) * torch.polar(torch.ones_like(ANGLES), ANGLES)).flatten(-2),
    "complex": lambda x: torch.view_as_real(torch.complex(x[..., ::2],
        x[..., 1::2]) * torch.exp(1j * ANGLES)).flatten(-2),
    "repeated": lambda x: x * COS.repeat_interleave(2, -1)
    + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * SIN.repeat_interleave(2, -1),
    "index": lambda x: x * COS.repeat_interleave(2, -1)
    + x[..., [1, 0, 3, 2]] * torch.stack([-SIN, SIN], -1).flatten(-2),
    "flip": lambda x: x * COS.repeat_interleave(2, -1)
    + x.unflatten(-1, (2, 2)).flip(-1).flatten(-2) * torch.stack([-SIN, SIN], -1).flatten(-2),
    "matrices": lambda x: torch.einsum("tpij,bhtpj->bhtpi",
        torch.stack([torch.stack([COS, -SIN], -1), torch.stack([SIN, COS], -1)], -2),
        x.unflatten(-1, (2, 2))).flatten(-2),
    "written": written_in_steps,
    "narrow": lambda x: torch.cat([part for i in range(2) for part in (x.narrow(-1, 2 * i, 1) * COS[:,
        i : i + 1] - x.narrow(-1, 2 * i + 1, 1) * SIN[:, i : i + 1],
        x.narrow(-1, 2 * i, 1) * SIN[:, i : i + 1] + x.narrow(-1, 2 * i + 1, 1) * COS[:, i : i + 1])], -1),
}  # fmt: skip
