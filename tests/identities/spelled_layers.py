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
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T).unflatten(0, x.shape[:2]),
    "columns": lambda x, w, b: (w @ x[..., None])[..., 0] + b,
    "rows": lambda x, w, b: torch.stack([x @ row for row in w], -1) + b,
    "bias as a column": lambda x, w, b: packed(x) @ torch.cat([w, b[:, None]], 1).T,
}  # fmt: skip


# ---- norms of the last axis, with gain and bias


def centred(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def by_var_mean(h: Tensor, g: Tensor, b: Tensor, e: float) -> Tensor:
    variance, mean = torch.var_mean(h, -1, keepdim=True, correction=0)
    return (h - mean) * torch.rsqrt(variance + e) * g + b


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
    "var_mean": by_var_mean,
    "einsums": by_einsum,
    "second moment": by_moments,
    "matrix": by_a_matrix,
}


RMS_NORM: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "mean of squares": lambda h, g, e: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + e) * g,
    "reciprocal": lambda h, g, e: (torch.mul(h,
        (h.var(-1, correction=0) + h.mean(-1) ** 2 + e).sqrt().reciprocal()[..., None]) * g),
}  # fmt: skip


def groups(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, 3))


GROUP_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "gains of a view": lambda h, g, b, e: (scaled(centred(groups(h)), e) * g.view(2, 3) + b.view(2, 3)).flatten(-2),
    "chunks": lambda h, g, b, e: torch.cat([F.layer_norm(*part, e) for part in zip(h.chunk(2, -1), [(3,)] * 2,
        g.chunk(2), b.chunk(2), strict=True)], -1),
    "instance_norm": lambda h, g, b, e: F.instance_norm(groups(h).flatten(0, 1), eps=e).view_as(h) * g + b,
    "image": lambda h, g, b, e: F.group_norm(h.reshape(-1, 6, 1, 1), 2, g, b, e)[..., 0, 0].unflatten(0, h.shape[:2]),
}  # fmt: skip


BATCH_NORM: dict[str, Callable[..., Tensor]] = {
    "instance_norm": lambda h, m, v, g, b: F.instance_norm(h.mT, m, v, g, b, use_input_stats=False).mT,
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


CONVOLUTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unfold": lambda x, w, b: (w.flatten(1) @ F.unfold(x, 3) + b[:, None]).unflatten(-1, (x.shape[2] - 2, -1)),
    "tensordot": lambda x, w, b: (torch.tensordot(windows(x), w, ([1, 4, 5], [1, 2, 3])) + b).permute(0, 3, 1, 2),
    "conv3d": lambda x, w, b: F.conv3d(x[:, :, None], w[:, :, None], b)[:, :, 0],
    "mirrored": lambda x, w, b: F.conv2d(x.flip(-1), w.flip(-1), b).flip(-1),
}  # fmt: skip


# ---- rotary positions: 2 heads of 4 numbers


ANGLES = torch.arange(3, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3], dtype=torch.float64)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


def turned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * COS - b * SIN, a * SIN + b * COS


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


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "stack": lambda x: torch.stack(turned(*x.unflatten(-1, (2, 2)).unbind(-2)), -2).flatten(-2),
    "roll": lambda x: x * twice(COS) + x.roll(2, -1) * torch.cat([-SIN, SIN], -1),
    "index": lambda x: x * twice(COS) + x[..., [2, 3, 0, 1]] * torch.cat([-SIN, SIN], -1),
    "real and imaginary": by_parts,
    "written": written,
}
PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1,
        (2, 2)).contiguous()) * torch.polar(torch.ones_like(ANGLES), ANGLES)).flatten(-2),
    "matrices": lambda x: torch.einsum("tpij,bhtpj->bhtpi",
        torch.stack([torch.stack([COS, -SIN], -1), torch.stack([SIN, COS], -1)], -2),
        x.unflatten(-1, (2, 2))).flatten(-2),
    "written": written_in_steps,
    "narrow": lambda x: torch.cat([part for i in range(2) for part in (x.narrow(-1, 2 * i, 1) * COS[:,
        i : i + 1] - x.narrow(-1, 2 * i + 1, 1) * SIN[:, i : i + 1],
        x.narrow(-1, 2 * i, 1) * SIN[:, i : i + 1] + x.narrow(-1, 2 * i + 1, 1) * COS[:, i : i + 1])], -1),
}  # fmt: skip
