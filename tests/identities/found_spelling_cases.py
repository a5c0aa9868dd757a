"""Functions in the spellings of popular code bases, whose groups once differed; see ``spelling_cases.py``."""

import math
from collections.abc import Callable
from typing import Any

import torch
from further_spelling_cases import images
from helpers import of, parameter
from spelling_cases import Function, Spelled, each, steps
from torch import Tensor, nn
from torch.nn import functional as F
from tried_spelling_cases import two_inputs

L, C = nn.Linear, nn.Conv2d


# ---- recurrent cells that begin with zeros


def unrolled(gates: Callable[[Any, Tensor, Tensor], Any], width: int, axis: int) -> Spelled:
    """Return an LSTM whose gates are computed in some way from the input and the hidden state."""

    def forward(s: Any, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), width, *x.shape[3:])
        memory, outputs = torch.zeros_like(hidden), []
        for step in range(x.shape[1]):
            i, f, g, o = gates(s, x[:, step], hidden)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * memory.tanh()
            outputs.append(hidden)
        return s.o(torch.stack(outputs, 1) if axis < 0 else hidden)

    return forward


CELLS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "cat": lambda s, x, h: s.w(torch.cat([x, h], -1)).chunk(4, -1),
    "hstack": lambda s, x, h: s.w(torch.hstack([x, h])).split(3, -1),
    "two products": lambda s, x, h: (F.linear(x, s.w.weight[:, :6]) + F.linear(h, s.w.weight[:, 6:], s.w.bias)).chunk(
        4, -1
    ),
    "four layers": lambda s, x, h: [
        F.linear(torch.cat([x, h], -1), *own) for own in zip(s.w.weight.chunk(4), s.w.bias.chunk(4), strict=True)
    ],
    "addmm": lambda s, x, h: torch.addmm(s.w.bias, torch.cat([x, h], 1), s.w.weight.t()).chunk(4, 1),
}
IMAGE_CELLS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "cat": lambda s, x, h: s.w(torch.cat([x, h], 1)).chunk(4, 1),
    "two convolutions": lambda s, x, h: (
        F.conv2d(x, s.w.weight[:, :3], s.w.bias, padding=1) + F.conv2d(h, s.w.weight[:, 3:], padding=1)
    ).chunk(4, 1),
    "four convolutions": lambda s, x, h: [
        F.conv2d(torch.cat([x, h], 1), *own, padding=1)
        for own in zip(s.w.weight.chunk(4), s.w.bias.chunk(4), strict=True)
    ],
}


def films(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 2, 3, 4, 4, dtype=torch.float64),)


def gru_of_parts(s: Any, x: Tensor) -> Tensor:
    h, outputs = x.new_zeros(len(x), 3), []
    for own in s.i(x).unbind(1):  # of which longer inputs have more
        back = s.h(h)
        reset, update = (own[:, :6] + back[:, :6]).sigmoid().chunk(2, -1)
        h = (1 - update) * torch.tanh(own[:, 6:] + reset * back[:, 6:]) + update * h
        outputs.append(h)
    return s.o(torch.stack(outputs, 1))


def gru_by_torch(s: Any, x: Tensor) -> Tensor:
    weights = [s.i.weight, s.h.weight, s.i.bias, s.h.bias]
    return s.o(torch.gru(x, x.new_zeros(1, len(x), 3), weights, True, 1, 0.0, False, False, True)[0])


# ---- experts


def expert(s: Any, x: Tensor, k: int) -> Tensor:
    return F.linear(F.leaky_relu(F.linear(x, s.u[k], s.c[k])), s.v[k], s.d[k])


def accumulated(s: Any, x: Tensor, p: Tensor) -> Tensor:
    y = torch.zeros(len(x), 5, dtype=x.dtype)
    for k in range(3):
        y += p[:, k, None] * expert(s, x, k)
    return y


MIXED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "stack": lambda s, x, p: (torch.stack([expert(s, x, k) for k in range(3)], 1) * p[..., None]).sum(1),
    "accumulated": accumulated,
    "sum": lambda s, x, p: sum(p[:, k : k + 1] * expert(s, x, k) for k in range(3)),
}


# ---- grouped convolutions with computed weights


def norm_of(n: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    gain = n.weight / (n.running_var + n.eps).sqrt()
    return gain, n.bias - n.running_mean * gain


def folded(s: Any, h: Tensor) -> Tensor:
    gain, bias = norm_of(s.n)
    return F.conv2d(h, s.w.weight * gain[:, None, None, None], bias, groups=4)


DEPTHWISE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch norm": lambda s, h: s.n(s.w(h)),
    "folded": folded,
    "native": lambda s, h: torch.native_batch_norm(s.w(h), s.n.weight, s.n.bias, s.n.running_mean, s.n.running_var,
        False, 0.1, s.n.eps)[0],
    "convolution": lambda s, h: s.n(torch.convolution(h, s.w.weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 4)),
}  # fmt: skip


def kernels_of_samples(x: Tensor, w: Tensor) -> Tensor:
    """Convolve each sample with its own kernel, as one group."""
    batch, outputs = w.shape[:2]
    y = F.conv2d(x.reshape(1, -1, *x.shape[2:]), w.flatten(0, 1), groups=batch)
    return y.view(batch, outputs, *y.shape[2:])


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "groups": lambda x, w: kernels_of_samples(x, torch.einsum("bkoihw->boihw", w)),
    "loop": lambda x, w: torch.stack([F.conv2d(one[None], own)[0] for one, own in zip(x, w.sum(1), strict=True)]),
    "windows": lambda x, w: torch.einsum("bchwij,bocij->bohw", x.unfold(2, 3, 1).unfold(3, 3, 1), w.sum(1)),
}


def mixed_kernels(convolve: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        shares = s.g(x.mean((2, 3))).softmax(-1)
        return s.b(torch.relu(convolve(x, shares[:, :, None, None, None, None] * s.w)))

    return forward


def decayed(scan: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    return lambda s, x: s.o(torch.relu(scan(s.i(x), torch.sigmoid(s.a))))


def step_by_step(u: Tensor, a: Tensor) -> Tensor:
    h, outputs = torch.zeros_like(u[:, 0]), []
    for own in u.unbind(1):
        h = a * h + own
        outputs.append(h)
    return torch.stack(outputs, 1)


def by_kernel(u: Tensor, a: Tensor) -> Tensor:
    length = u.shape[1]
    kernel = torch.exp(torch.log(a)[:, None] * torch.arange(length)).flip(-1)
    return F.conv1d(F.pad(u.mT, (length - 1, 0)), kernel[:, None], groups=u.shape[-1]).mT


def by_fourier(u: Tensor, a: Tensor) -> Tensor:
    length = u.shape[1]
    kernel = torch.exp(torch.log(a)[:, None] * torch.arange(length))
    product = torch.fft.rfft(u.mT, 2 * length) * torch.fft.rfft(kernel, 2 * length)
    return torch.fft.irfft(product, 2 * length)[..., :length].mT


# ---- complex numbers


WAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "sin of two": lambda h: torch.stack([torch.cos(h), torch.sin(h)], -1)[..., 1],
    "turned": lambda h: (torch.exp(torch.complex(torch.zeros_like(h), h)) * -1j).real,
    "conjugate": lambda h: (-(1j * h).exp().conj()).imag,
    "exp": lambda h: torch.exp(1j * h).imag,
    "polar": lambda h: torch.polar(torch.ones_like(h), h).imag,
    "as real": lambda h: torch.view_as_real(torch.polar(torch.ones_like(h), h))[..., 1],
}
GABOR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of WIRE (Saragadam et al., 2023)
    "product": lambda h, g: torch.cos(h) * torch.exp(-g.square()),
    "exp": lambda h, g: torch.exp(1j * h - g.square()).real,
    "polar": lambda h, g: torch.polar(torch.exp(-g * g), h).real,
    "complex": lambda h, g: torch.view_as_real(torch.exp(torch.complex(-g.pow(2), h)))[..., 0],
}
MATRICES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "slices": lambda s, h: F.linear(h, s.w[..., 0] + s.w[..., 1]),
    "unbind": lambda s, h: F.linear(h, sum(s.w.unbind(-1))),
    "einsum": lambda s, h: torch.einsum("bi,oi->bo", h, s.w[..., 1] + s.w[:, :, 0]),
}


# ---- parts of several kinds


def cascade(join: Callable[[list[Tensor]], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        one, two, three = F.leaky_relu(s.a(x)).chunk(3, -1)
        two = F.leaky_relu(s.c(two))
        return s.b(join([one, two, F.leaky_relu(s.d(two + three))]))

    return forward


JOINED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "cat": lambda parts: torch.cat(parts, -1),
    "stack": lambda parts: torch.stack(parts, 1).flatten(1),
    "view": lambda parts: torch.stack(parts, -2).view(-1, 6),
}


# ---- kernels of width 1 as one


def wide(s: Any, x: Tensor) -> Tensor:
    return torch.cat([torch.tanh(x), x], 1)


ADDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda s, x: s.a(torch.tanh(x)) + s.b(x),
    "cat": lambda s, x: F.conv2d(wide(s, x), torch.cat([s.a.weight, s.b.weight], 1), s.a.bias + s.b.bias),
    "linear": lambda s, x: F.linear(wide(s, x).movedim(1, -1), torch.cat([s.a.weight, s.b.weight], 1)[..., 0, 0],
        s.a.bias + s.b.bias).movedim(-1, 1),
}  # fmt: skip
BESIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cat": lambda s, x: torch.cat([s.a(x), s.b(x)], 1),
    "one kernel": lambda s, x: F.conv2d(x, torch.cat([s.a.weight, s.b.weight]), torch.cat([s.a.bias, s.b.bias])),
    "matmul": lambda s, x: (torch.cat([s.a.weight, s.b.weight]).flatten(1) @ x.flatten(2) + torch.cat([s.a.bias,
        s.b.bias])[:, None]).unflatten(-1, x.shape[2:]),
}  # fmt: skip


# ---- graph attention: a layer reads both ends of an edge


def ends(h: Tensor) -> tuple[Tensor, Tensor]:
    count = h.shape[1]
    return h[:, :, None].expand(-1, -1, count, -1), h[:, None].expand(-1, count, -1, -1)


PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two products": lambda h, a: h @ a[:4] + (h @ a[4:]).mT,
    "cat": lambda h, a: (torch.cat(ends(h), -1) @ a)[..., 0],
    "linear": lambda h, a: F.linear(torch.cat(ends(h), -1), a.T).squeeze(-1),
    "einsum": lambda h, a: (
        torch.einsum("bnd,d->bn", h, a[:4, 0])[:, :, None] + torch.einsum("bnd,d->bn", h, a[4:, 0])[:, None]
    ),
}


def graph_attention(score: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = x @ s.w
        return s.b(F.elu(F.leaky_relu(score(h, s.a), 0.2).softmax(-1) @ h))

    return forward


# ---- operations that torch composes from others


FIRST, LAST = torch.arange(4)[None, None], torch.arange(4, 8)[None, None]
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda h: F.silu(h[..., :4]) * h[..., 4:],
    "take_along_dim": lambda h: F.silu(torch.take_along_dim(h, FIRST, -1)) * torch.take_along_dim(h, LAST, -1),
}
GAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda h, g: h * g,
    "diag_embed": lambda h, g: torch.bmm(torch.diag_embed(g), h[..., None]).squeeze(-1),
}
SQUARES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda x, c: (x[:, None] - c).square().sum(-1),
    "mse_loss": lambda x, c: F.mse_loss(*torch.broadcast_tensors(x[:, None], c), reduction="none").sum(-1),
}


# ---- loops over convolutions


def channel_by_channel(join: Callable[[list[Tensor]], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda s, h: join([F.conv2d(h[:, k : k + 1], s.w[k : k + 1], s.c[k : k + 1]) for k in range(4)])


CHANNELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "groups": lambda s, h: F.conv2d(h, s.w, s.c, groups=4),
    "cat": channel_by_channel(lambda parts: torch.cat(parts, 1)),
    "stack": channel_by_channel(lambda parts: torch.stack([part[:, 0] for part in parts], 1)),
    "chunk": lambda s, h: torch.cat(
        [F.conv2d(*own) for own in zip(h.chunk(4, 1), s.w.chunk(4), s.c.chunk(4), strict=True)], 1
    ),
}
KERNELS_OF_MODULES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cat": lambda own, h: torch.cat([k(h[:, at : at + 1]) for at, k in enumerate(own)], 1),
    "groups": lambda own, h: F.conv2d(h, torch.cat([k.weight for k in own]), torch.cat([k.bias for k in own]),
        groups=4),
}  # fmt: skip
# Two layers of three parts, whose results lie side by side: hidden units, and results.
IN_A_ROW: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flatten": lambda s, h: s.o(F.leaky_relu(torch.einsum("beh,eho->beo", h, s.v) + s.d).flatten(1)),
    "bmm": lambda s, h: s.o(
        F.leaky_relu(torch.bmm(h.transpose(0, 1), s.v) + s.d[:, None]).transpose(0, 1).reshape(len(h), -1)),
    "cat": lambda s, h: s.o(torch.cat([F.leaky_relu(h[:, at] @ s.v[at] + s.d[at]) for at in range(3)], -1)),
    "einsum": lambda s, h: torch.einsum("beo,yeo->by", F.leaky_relu(torch.einsum("beh,eho->beo", h, s.v) + s.d),
        s.o.weight.view(2, 3, 3)) + s.o.bias,
}  # fmt: skip
# One kernel for each sample from its shares of three kernels.
SHARES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda p, w: torch.einsum("bk,koihw->boihw", p, w),
    "sum": lambda p, w: (p[:, :, None, None, None, None] * w).sum(1),
    "loop": lambda p, w: sum(p[:, k, None, None, None, None] * w[k] for k in range(3)),
}


def shared(mix: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.leaky_relu(s.a(x))
        return s.b(F.leaky_relu(kernels_of_samples(h, mix(torch.sigmoid(s.g(h.mean((2, 3)))), s.w))))

    return forward


def styled(convolve: Callable[[Tensor, Tensor], Tensor]) -> Spelled:
    def forward(s: Any, x: Tensor, z: Tensor) -> Tensor:
        w = s.w * s.m(z)[:, None, :, None, None]
        w = w * (w.square().sum((2, 3, 4), keepdim=True) + 0.1).rsqrt()
        return s.b(F.leaky_relu(convolve(F.leaky_relu(s.a(x)), w)))

    return forward


STYLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "groups": kernels_of_samples,
    "loop": lambda x, w: torch.cat([F.conv2d(x[i : i + 1], w[i]) for i in range(len(w))]),
    "windows": lambda x, w: torch.einsum("bchwij,bocij->bohw", x.unfold(2, 2, 1).unfold(3, 2, 1), w),
}


def image_and_vector(samples: int) -> tuple[Tensor, ...]:
    return torch.randn(samples, 2, 4, 4, dtype=torch.float64), torch.randn(samples, 5, dtype=torch.float64)


# ---- initial states of zeros


def simple(start: Callable[[Any, Tensor], Tensor]) -> Spelled:
    """Return a recurrent network with a start of some kind."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h, outputs = start(s, x), []
        for own in x.unbind(1):
            h = torch.tanh(s.i(own) + s.h(h))
            outputs.append(h)
        return s.o(torch.stack(outputs, 1))

    return forward


STARTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "zeros": lambda s, x: x.new_zeros(len(x), 3),
    "product": lambda s, x: x[:, 0, :3] * 0,
    "product of units": lambda s, x: 0 * s.i(x[:, 0]),
    "difference": lambda s, x: x[:, 0, :3] - x[:, 0, :3],
    "matrix": lambda s, x: x[:, 0] @ x.new_zeros(6, 3),
}


# ---- functions of one variable


CURVES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "tanh": {
        "tanh": torch.tanh,
        "exponentials": lambda h: (h.exp() - (-h).exp()) / (h.exp() + (-h).exp()),
        "sigmoid": lambda h: 2 * torch.sigmoid(2 * h) - 1,
        "one exponential": lambda h: 1 - 2 / (torch.exp(2 * h) + 1),
        "expm1": lambda h: torch.expm1(2 * h) / (torch.expm1(2 * h) + 2),
    },
    "inverse of sinh": {
        "asinh": torch.asinh,
        "log": lambda h: torch.log(h + (h * h + 1).sqrt()),
    },
    "saturating line": {
        "hardtanh": F.hardtanh,
        "minimum": lambda h: torch.minimum(torch.maximum(h, torch.full_like(h, -1.0)), torch.ones_like(h)),
        "where": lambda h: torch.where(h > 1, 1.0, torch.where(h < -1, -1.0, h)),
        "rectifiers": lambda h: F.relu(h + 1) - F.relu(h - 1) - 1,
        "sizes": lambda h: ((h + 1).abs() - (h - 1).abs()) / 2,
    },
    "angle": {
        "atan": torch.atan,
        "atan2": lambda h: torch.atan2(h, torch.ones_like(h)),
        "asin": lambda h: torch.asin(h / torch.sqrt(1 + h * h)),
    },
    "size": {
        "abs": torch.abs,
        "rectifiers": lambda h: F.relu(h) + F.relu(-h),
        "maximum": lambda h: torch.maximum(h, -h),
    },
    "signed square": {
        "product": lambda h: h * h.abs(),
        "rectifiers": lambda h: F.relu(h) ** 2 - F.relu(-h) ** 2,
    },
    "rectifier": {
        "relu": F.relu,
        "heaviside": lambda h: h * torch.heaviside(h, torch.zeros((), dtype=h.dtype)),
        "maximum": lambda h: torch.maximum(h, torch.zeros_like(h)),
    },
    "wave": {
        "cos": lambda h: torch.cos(3 * h),
        "sin": lambda h: torch.sin(3 * h + math.pi / 2),
        "half angle": lambda h: 1 - 2 * torch.sin(1.5 * h) ** 2,
    },
    "even": {
        "silu": lambda h: F.silu(h) + F.silu(-h),
        "tanh": lambda h: h * torch.tanh(h / 2),
        "exponential": lambda h: h * (1 - torch.exp(-h)) / (1 + torch.exp(-h)),
    },
}
CURVED = {"size": 4, "signed square": 4, "rectifier": 4}
# What two functions of a value and its negative add up to: the value.
LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "value": lambda h: h,
    "relu": lambda h: F.relu(h) - F.relu(-h),
    "gelu": lambda h: F.gelu(h) - F.gelu(-h),
    "silu": lambda h: F.silu(h) - F.silu(-h),
}


FOUND: dict[str, Function] = {
    **{f"{name}, by hand": Function({"a": of(L, 6, 4), "b": of(L, 4, 3)}, two_inputs(6), CURVED.get(name, 0),
        each(curves, lambda curve: lambda s, x: s.b(curve(s.a(x)))), samples=800) for name, curves in CURVES.items()},
    "channel by channel": Function({"a": of(C, 2, 4, 2), "w": parameter(4, 1, 2, 2), "c": parameter(4),
        "b": of(C, 4, 3, 1)}, images(2, 5), 8,
        each(CHANNELS, lambda own: lambda s, x: s.b(F.relu(own(s, F.relu(s.a(x)))))), samples=60),
    "shares of kernels": Function({"a": of(C, 2, 3, 2), "g": of(L, 3, 3), "w": parameter(3, 4, 3, 2, 2),
        "b": of(C, 4, 3, 1)}, images(2, 4), 7, each(SHARES, shared), samples=200),
    "kernels by style": Function({"a": of(C, 2, 3, 2), "m": of(L, 5, 3), "w": parameter(4, 3, 2, 2),
        "b": of(C, 4, 3, 1)}, image_and_vector, 4, each(STYLES, styled), samples=150),
    "start of zeros": Function({"i": of(L, 6, 3), "h": of(L, 3, 3), "o": of(L, 3, 5)}, steps(6), 3,
        each(STARTS, simple), samples=80),
    "kernels side by side": Function({"a": of(C, 2, 4, 2), **{f"k{at}": of(C, 1, 1, 2) for at in range(4)},
        "b": of(C, 4, 3, 1)}, images(2, 5), 8, each(KERNELS_OF_MODULES,
        lambda own: lambda s, x: s.b(F.relu(own([s.k0, s.k1, s.k2, s.k3], F.relu(s.a(x)))))), samples=60),
    "parts in a row": Function({"u": parameter(3, 7, 4), "c": parameter(3, 4), "v": parameter(3, 4, 3),
        "d": parameter(3, 3), "o": of(L, 9, 2)}, two_inputs(7), 21, each(IN_A_ROW,
        lambda own: lambda s, x: own(s, F.leaky_relu(torch.einsum("bi,eih->beh", x, s.u) + s.c))), samples=160),
    "line, by hand": Function({"a": of(L, 6, 4), "b": of(L, 4, 5)}, two_inputs(6), 20,
        each(LINES, lambda line: lambda s, x: s.b(line(s.a(x))))),
    "LSTM by hand": Function({"w": of(L, 9, 12), "o": of(L, 3, 5)}, steps(6), 0,
        each(CELLS, lambda gates: unrolled(gates, 3, -1)), samples=80),
    "LSTM of images by hand": Function({"w": of(C, 5, 8, 3, padding=1), "o": of(C, 2, 3, 2)}, films, 0,
        each(IMAGE_CELLS, lambda gates: unrolled(gates, 2, 1)), samples=80),
    "GRU by hand": Function({"i": of(L, 6, 9), "h": of(L, 3, 9), "o": of(L, 3, 5)}, steps(6), 6,
        {"torch": gru_by_torch, "unbind": gru_of_parts}, samples=80),
    "experts in turn": Function({"g": of(L, 6, 3), "u": parameter(3, 4, 6), "c": parameter(3, 4),
        "v": parameter(3, 5, 4), "d": parameter(3, 5)}, two_inputs(6), 19,
        each(MIXED, lambda mixed: lambda s, x: mixed(s, x, s.g(x).softmax(-1))), samples=80),
    "depthwise convolution and batch norm": Function({"a": of(C, 2, 4, 2), "w": of(C, 4, 4, 2, groups=4, bias=False),
        "n": of(nn.BatchNorm2d, 4), "b": of(C, 4, 3, 1)}, images(2, 5), 8,
        each(DEPTHWISE, lambda own: lambda s, x: s.b(torch.tanh(own(s, F.leaky_relu(s.a(x))))))),
    "kernels of samples": Function({"g": of(L, 2, 3), "w": parameter(3, 4, 2, 3, 3), "b": of(C, 4, 3, 2)}, images(2, 5),
        7, each(KERNELS, mixed_kernels), samples=120),
    "decaying sums": Function({"i": of(L, 6, 4), "a": parameter(4), "o": of(L, 4, 5)}, steps(6), 4,
        each({"steps": step_by_step, "kernel": by_kernel, "Fourier": by_fourier}, decayed), samples=60),
    "sines, complex": Function({"a": of(L, 6, 4), "b": of(L, 4, 3)}, two_inputs(6), 0,
        each(WAVES, lambda wave: lambda s, x: s.b(wave(3 * s.a(x))))),
    "Gabor wavelets, complex": Function({"a": of(L, 6, 4), "c": of(L, 6, 4), "b": of(L, 4, 3)}, two_inputs(6), 0,
        each(GABOR, lambda wave: lambda s, x: s.b(wave(3 * s.a(x), 2 * s.c(x))))),
    "two matrices of one tensor": Function({"a": of(L, 6, 4), "w": parameter(3, 4, 2)}, two_inputs(6), 16,
        each(MATRICES, lambda layer: lambda s, x: layer(s, F.leaky_relu(s.a(x))))),
    "cascade of parts": Function({"a": of(L, 7, 6, bias=False), "c": of(L, 2, 2, bias=False),
        "d": of(L, 2, 2, bias=False), "b": of(L, 6, 5)},
        two_inputs(7), 8, each(JOINED, cascade), samples=40),
    "kernels of width 1, added": Function({"a": of(C, 3, 4, 1), "b": of(C, 3, 4, 1), "o": of(C, 4, 3, 1)}, images(3, 4),
        8, each(ADDED, lambda own: lambda s, x: s.o(torch.relu(own(s, x))))),
    "kernels of width 1, side by side": Function({"a": of(C, 3, 2, 1), "b": of(C, 3, 4, 1), "o": of(C, 6, 3, 1)},
        images(3, 4), 6, each(BESIDE, lambda own: lambda s, x: s.o(torch.relu(own(s, x))))),
    "graph attention": Function({"w": parameter(6, 4), "a": parameter(8, 1), "b": of(L, 4, 3)}, steps(6, 4), 0,
        each(PAIRS, graph_attention), samples=60),
    "gated, taken apart": Function({"u": of(L, 6, 8), "d": of(L, 4, 5)}, steps(6), 4,
        each(GATES, lambda gate: lambda s, x: s.d(gate(s.u(x)))), samples=60),
    "gains that a layer makes": Function({"a": of(L, 6, 4), "g": of(L, 5, 4), "b": of(L, 4, 3)}, two_inputs(6, 5), 8,
        each(GAINS, lambda gain: lambda s, x, c: s.b(gain(torch.relu(s.a(x)), s.g(c))))),
    "radial functions": Function({"c": parameter(5, 4), "o": of(L, 5, 3)}, two_inputs(4), 0,
        each(SQUARES, lambda far: lambda s, x: s.o(torch.exp(-far(x, s.c) / math.sqrt(4))))),
}  # fmt: skip
