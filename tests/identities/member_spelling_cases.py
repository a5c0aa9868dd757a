"""Ensembles that run from stacked weights, derivatives, weights over their norm; see ``spelling_cases.py``."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import parameter
from spelling_cases import Function, Spelled, each
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

L = nn.Linear


def vectors(samples: int) -> tuple[Tensor, ...]:
    """Make random vectors."""
    return (torch.randn(samples, 5, dtype=torch.float64),)


def images(samples: int) -> tuple[Tensor, ...]:
    """Make random images of two channels."""
    return (torch.randn(samples, 2, 4, 4, dtype=torch.float64),)


def of_members(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(make() for _ in range(3))


def stacks(s: Any, join: Callable[..., Tensor] = torch.stack) -> list[Tensor]:
    """Join each parameter and running statistic of the members."""
    states = [{key: own for key, own in m.state_dict(keep_vars=True).items() if own.ndim} for m in s.m]
    return [join([state[name] for state in states]) for name in states[0]]


def loop(s: Any, x: Tensor) -> Tensor:
    return torch.stack([m(x) for m in s.m])


def einsum(s: Any, x: Tensor) -> Tensor:
    v, b, w, c = stacks(s)
    h = s.m[0][1](torch.einsum("bi,moi->mbo", x, v) + b[:, None])
    return torch.einsum("mbi,moi->mbo", h, w) + c[:, None]


def bmm(s: Any, x: Tensor) -> Tensor:
    v, b, w, c = stacks(s)
    h = s.m[0][1](torch.baddbmm(b[:, None], x.expand(3, *x.shape), v.transpose(1, 2)))
    return torch.baddbmm(c[:, None], h, w.transpose(1, 2))


def in_place(s: Any, x: Tensor) -> Tensor:
    v, b, w, c = stacks(s)
    h = x @ v.mT
    h += b.unsqueeze(1)
    return s.m[0][1](h) @ w.mT + c.unsqueeze(1)


def one_by_one(s: Any, x: Tensor) -> Tensor:
    v, b, w, c = stacks(s)
    return torch.stack([F.linear(s.m[0][1](F.linear(x, v[i], b[i])), w[i], c[i]) for i in range(3)])


def one_matrix(s: Any, x: Tensor) -> Tensor:
    v, b, w, c = stacks(s, torch.cat)
    h = s.m[0][1](F.linear(x, v, b)).unflatten(-1, (3, -1))
    return (torch.einsum("bmi,moi->bmo", h, w.unflatten(0, (3, -1))) + c.view(3, -1)).transpose(0, 1)


def diagonal(s: Any, x: Tensor) -> Tensor:
    v, b, _, c = stacks(s, torch.cat)
    h = s.m[0][1](F.linear(x, v, b))
    return F.linear(h, torch.block_diag(*(m[2].weight for m in s.m)), c).unflatten(-1, (3, -1)).transpose(0, 1)


def in_groups(s: Any, x: Tensor) -> Tensor:
    v, b, g, e, mean, variance, w, c = stacks(s, torch.cat)
    h = F.conv2d(x.repeat(1, 3, 1, 1), v, b, padding=1, groups=3)
    h = F.batch_norm(h, mean, variance, g, e, training=False).relu()
    return F.conv2d(h, w, c, groups=3).unflatten(1, (3, -1)).transpose(0, 1)


def side_by_side(s: Any, x: Tensor) -> Tensor:
    return torch.cat([m(x) for m in s.m], -1).view(len(x), 3, -1).transpose(0, 1)


def sample_by_sample(s: Any, x: Tensor) -> Tensor:
    return torch.stack([loop(s, own) for own in x], 1)


def filled(s: Any, x: Tensor) -> Tensor:
    y = x.new_zeros(3, len(x), 2)
    for i, m in enumerate(s.m):
        y[i] = m(x)
    return y


class Gated(nn.Module):
    """A gated layer with a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.n, self.o = L(5, 6), nn.LayerNorm(3), L(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.i(x).chunk(2, -1)
        return self.o(self.n(one * two.tanh()))  # type: ignore[no-any-return]


def gated_layers(s: Any, x: Tensor) -> Tensor:
    v, b, g, e, w, c = stacks(s)
    one, two = (torch.einsum("bi,moi->mbo", x, v) + b[:, None]).chunk(2, -1)
    h = F.layer_norm(one * two.tanh(), (3,)) * g[:, None] + e[:, None]
    return torch.bmm(h, w.mT) + c[:, None]


def mean(run: Spelled) -> Spelled:
    return lambda s, x: run(s, x).mean(0)


def mean_and_variance(run: Spelled) -> Spelled:
    return lambda s, x: torch.cat([run(s, x).mean(0), run(s, x).var(0)], -1)


def mixture(run: Spelled) -> Spelled:
    return lambda s, x: torch.einsum("mbo,bm->bo", run(s, x), s.g(x).softmax(-1))


RUNS: dict[str, Spelled] = {"loop": loop, "einsum": einsum, "bmm": bmm, "in place": in_place, "one by one": one_by_one,
    "one matrix": one_matrix, "diagonal": diagonal, "side by side": side_by_side,
    "sample by sample": sample_by_sample, "filled": filled}  # fmt: skip
ARRAYS = {"v": (3, 4, 5), "b": (3, 4), "w": (3, 2, 4), "c": (3, 2)}
TANH = of_members(lambda: nn.Sequential(L(5, 4), nn.Tanh(), L(4, 2)))
RELU = of_members(lambda: nn.Sequential(L(5, 4), nn.ReLU(), L(4, 2)))
CONVOLUTIONS = of_members(
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1))
)


def in_arrays(total: Callable[[Tensor], Tensor]) -> Spelled:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(torch.einsum("bi,moi->mbo", x, s.v) + s.b[:, None])
        return total(torch.einsum("mbi,moi->mbo", h, s.w) + s.c[:, None])

    return run


IN_ARRAYS: dict[str, Spelled] = {
    "baddbmm": lambda s, x: torch.baddbmm(s.c[:, None], torch.tanh(torch.baddbmm(s.b[:, None], x.expand(3, -1, -1),
        s.v.mT)), s.w.mT).mean(0),
    "sums of products": lambda s, x: ((torch.tanh((x[:, None, None] * s.v).sum(-1) + s.b)[:, :, None] * s.w).sum(-1)
        + s.c).mean(1),
    "columns": lambda s, x: torch.stack([((s.w @ torch.tanh(s.v @ own + s.b)[..., None]).squeeze(-1) + s.c).mean(0)
        for own in x]),
    "rows": lambda s, x: torch.stack([sum(w @ torch.tanh(v @ own + b) + c for v, b, w, c in zip(s.v, s.b, s.w, s.c,
        strict=True)) / 3 for own in x]),
}  # fmt: skip


# sigma of a spectral norm, from the vectors of a power iteration: any multiple of the matrix gives the same layer.
SIGMAS: dict[str, Callable[[Any], Tensor]] = {
    "vectors": lambda s: s.u @ s.a.weight @ s.v,
    "dot": lambda s: torch.dot(s.u, torch.mv(s.a.weight, s.v)),
    "einsum": lambda s: torch.einsum("i,ij,j->", s.u, s.a.weight, s.v),
    "sum": lambda s: (s.u[:, None] * s.a.weight * s.v).sum(),
    "layer": lambda s: (F.linear(s.v, s.a.weight) * s.u).sum(),
    "transposed": lambda s: s.v @ s.a.weight.T @ s.u,
    "matrices": lambda s: s.u[None] @ s.a.weight @ s.v[:, None],
}
POWERS: dict[str, Any] = {"a": lambda: L(5, 4), "b": lambda: L(4, 3), "u": torch.randn(4), "v": torch.randn(5)}


def divided(sigma: Callable[[Any], Tensor]) -> Spelled:
    return lambda s, x: s.b(torch.tanh(F.linear(x, s.a.weight / sigma(s), s.a.bias)))


# Exponentials over the largest of them.
LARGEST: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda z: (z - z.amax(-1, keepdim=True)).exp(),
    "quotient": lambda z: z.exp() / z.exp().amax(-1, keepdim=True),
    "values": lambda z: z.exp() / z.exp().max(-1, keepdim=True).values,
    "exponential of the largest": lambda z: z.exp() / z.amax(-1, keepdim=True).exp(),
    "product": lambda z: z.exp() * (-z.amax(-1, keepdim=True)).exp(),
}
ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logsumexp": lambda x, y: torch.stack([x, y]).logsumexp(0),
    "logaddexp": torch.logaddexp,
    "log": lambda x, y: (x.exp() + y.exp()).log(),
}


# ---- functions that are differentiated, or vectorised


def energy(s: Any, x: Tensor) -> Tensor:
    return (s.v * F.relu(s.a(x)).square()).sum(-1)


def force(s: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(energy(s, x).sum(), x, create_graph=True)[0]


def inner_step(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(s.a(x))
    return h @ (s.v - grad(lambda w: (h @ w).square().mean() / 2)(s.v))


def inner_step_by_hand(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(s.a(x))
    return h @ (s.v - (h @ s.v) @ h / len(x))


def weights_differentiated(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(s.a(x))
    with torch.enable_grad():
        found = torch.autograd.grad((h @ s.v).square().mean() / 2, s.v, create_graph=True)[0]
    return h @ (s.v - found)


FORCES: dict[str, Spelled] = {
    "by hand": lambda s, x: (2 * s.v * F.relu(s.a(x))) @ s.a.weight,
    "grad": lambda s, x: grad(lambda y: energy(s, y).sum())(x),
    "grad of each": lambda s, x: vmap(grad(lambda row: energy(s, row)))(x),
    "autograd": force,
}
SCORES: dict[str, Spelled] = {
    "transposed": lambda s, x: (lambda h: F.conv_transpose2d((h > 0) * F.conv_transpose2d(2 * s.b(F.relu(h)),
        s.b.weight), s.a.weight))(s.a(x)),
    "grad": lambda s, x: grad(lambda y: s.b(F.relu(s.a(y))).square().sum())(x),
}  # fmt: skip
STEPS: dict[str, Spelled] = {
    "by hand": inner_step_by_hand,
    "grad": inner_step,
    "autograd": weights_differentiated,
}
THREE: dict[str, Spelled] = {
    "batch": lambda s, x: s.b(torch.tanh(s.m(s.a(x)))),
    "vmap": lambda s, x: vmap(lambda row: s.b(torch.tanh(s.m(s.a(row)))))(x),
}


MEMBERS: dict[str, Function] = {
    "derivative of an energy": Function({"a": lambda: L(5, 4), "v": parameter(4)}, vectors, 4, FORCES, samples=60),
    "derivative of convolutions": Function({"a": lambda: nn.Conv2d(2, 3, 2), "b": lambda: nn.Conv2d(3, 4, 2)}, images,
        9, SCORES),
    "step of an inner loop": Function({"a": lambda: L(5, 4), "v": parameter(4)}, vectors, 0, STEPS, samples=60),
    "samples one by one": Function({"a": lambda: L(5, 3), "m": lambda: L(3, 5), "b": lambda: L(5, 3)}, vectors, 12,
        THREE),
    "matrix over sigma": Function(POWERS, vectors, 1, each(SIGMAS, divided), samples=60),
    "matrix over its norm": Function(POWERS, vectors, 1, each({"norm": lambda s: s.a.weight.norm(),
        "root": lambda s: s.a.weight.square().sum().sqrt()}, divided), samples=60),
    "exponentials over the largest": Function({"a": lambda: L(5, 4), "b": lambda: L(4, 6)}, vectors, 6,
        each(LARGEST, lambda run: lambda s, x: s.b(run(s.a(x)))), samples=60),
    "logarithm of two exponentials": Function({"a": lambda: L(5, 4), "b": lambda: L(5, 4), "o": lambda: L(4, 6)},
        vectors, 4, each(ADDED, lambda run: lambda s, x: s.o(run(s.a(x), s.b(x)))), samples=60),
    "mean of members": Function({"m": TANH}, vectors, 4, each(RUNS, mean), samples=120),
    "mixture of members": Function({"m": RELU, "g": lambda: L(5, 3)}, vectors, 18, each(RUNS, mixture), samples=120),
    "mean and variance of members": Function({"m": of_members(Gated)}, vectors, 24,
        each({"loop": loop, "stacks": gated_layers}, mean_and_variance), samples=120),
    "mean of convolutions": Function({"m": CONVOLUTIONS}, images, 31,
        each({"loop": loop, "groups": in_groups}, mean), samples=40),
    "members in arrays": Function({name: lambda sizes=sizes: nn.Parameter(torch.randn(sizes))
        for name, sizes in ARRAYS.items()}, vectors, 4, each({"sum": lambda y: y.sum(0) / 3,
        "mean": lambda y: y.mean(0), "chain": lambda y: (y[0] + y[1] + y[2]) / 3}, in_arrays) | IN_ARRAYS, samples=120),
}  # fmt: skip
