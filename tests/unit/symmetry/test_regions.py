"""Norms and softmaxes are found however they are written, and nothing else is."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from helpers import outputs_of_graph
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import Capture, capture, operation_name
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form import linear_maps
from lightning_sym.symmetry.tracing.normal_form.measuring import measured
from lightning_sym.symmetry.tracing.normal_form.regions import recognise

D, EPS = 6, 1e-5


class Program(nn.Module):
    """A linear layer, a function with a gain and a bias, and another linear layer."""

    def __init__(self, function: Callable[..., Tensor], width: int = D) -> None:
        super().__init__()
        self.before, self.behind, self.function = nn.Linear(9, width), nn.Linear(width, 7), function
        self.gain, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.function(self.before(x), self.gain, self.bias))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def variance(x: Tensor) -> Tensor:
    return centred(x).square().mean(-1, keepdim=True)


def transposed(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    x = x.mT
    spread = torch.sqrt(x.var(-2, keepdim=True, correction=0) + EPS)
    return (g[:, None] * ((x - x.mean(-2, keepdim=True)) / spread) + b[:, None]).mT


def moments(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    mean = x.sum(-1, keepdim=True) / D
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean**2 + EPS) * g + b


def averaged_by_product(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    average = torch.full((D, D), 1 / D, dtype=x.dtype)
    x = x - x @ average
    return x / torch.sqrt((x * x) @ average + EPS) * g + b


def var_mean(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    spread, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return torch.addcmul(b, (x - mean) / (spread + EPS).sqrt(), g)


def deviation(x: Tensor) -> Tensor:
    return (x - x.mean(-2, keepdim=True)) / (x.std(-2, keepdim=True) + EPS)


LAYER = {
    "mean": lambda x, g, b: centred(x) * torch.rsqrt(variance(x) + EPS) * g + b,
    "gain first": lambda x, g, b: (g * centred(x)) / torch.sqrt(variance(x) + EPS) + b,
    "from the other side": lambda x, g, b: b + g * -(x.mean(-1, keepdim=True) - x) / (variance(x) + EPS) ** 0.5,
    "moments": moments,
    "product": averaged_by_product,
    "variance and mean": var_mean,
    "without gain": lambda x, g, b: F.layer_norm(x, (D,)) * g + b,
    "in double precision": lambda x, g, b: F.layer_norm(x.double(), (D,)).to(x.dtype) * g + b,
    "channels first": transposed,
    "deviation": lambda x, g, b: g * centred(x) / (x.std(-1, keepdim=True) + EPS) + b,
    "deviation of channels first": lambda x, g, b: deviation(x.mT).mT * g + b,
}
SQUARE = functools.partial(torch.mean, dim=-1, keepdim=True)
RMS = {
    "mean of squares": lambda x, g, b: g * (x * torch.rsqrt(SQUARE(x.pow(2)) + EPS)) + b,
    "in double precision": lambda x, g, b: (
        g * (x.double() * torch.rsqrt(SQUARE(x.double() ** 2) + EPS)).to(x.dtype) + b
    ),
    "gain first": lambda x, g, b: g * x / torch.sqrt((x * x).sum(-1, keepdim=True) / D + EPS) + b,
    "sum by einsum": lambda x, g, b: x / torch.sqrt(torch.einsum("...i,...i->...", x, x)[..., None] / D + EPS) * g + b,
    "matrix product": lambda x, g, b: x / torch.sqrt((x[..., None, :] @ x[..., None])[..., 0] / D + EPS) * g + b,
    "reciprocal": lambda x, g, b: g * x * (SQUARE(x.square()) + EPS).sqrt().reciprocal() + b,
    "length": lambda x, g, b: x / (x.norm(dim=-1, keepdim=True) + EPS) * g + b,
}
LENGTH = {
    "normalize": lambda x, g, b: F.normalize(x, dim=-1) * g + b,
    "length": lambda x, g, b: g * x / x.norm(dim=-1, keepdim=True) + b,
    "of the deviation": lambda x, g, b: F.normalize(x, dim=-1, eps=1e-9) * (g * math.sqrt(D)) + b,
}


def groups(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, 4))


GROUPS = {
    "layer norm": lambda x, g, b: F.layer_norm(groups(x), (4,)).flatten(-2) * g + b,
    "gains in groups": lambda x, g, b: (F.layer_norm(groups(x), (4,)) * groups(g) + groups(b)).flatten(-2),
    "written out": lambda x, g, b: (centred(groups(x)) / (variance(groups(x)) + EPS).sqrt()).flatten(-2) * g + b,
    "one after the other": lambda x, g, b: torch.cat([F.layer_norm(own, (4,)) for own in x.split(4, -1)], -1) * g + b,
    "all rows at once": lambda x, g, b: F.layer_norm(x.reshape(-1, 4), (4,)).view_as(x) * g + b,
    "instance norm": lambda x, g, b: F.instance_norm(groups(x).flatten(0, 1)).view_as(x) * g + b,
}


def groups_of_channels(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x.flatten(0, 1), 3, g, b).view_as(x)


FUSED = {
    "layer_norm": (lambda x, g, b: F.layer_norm(x, (D,), g, b), LAYER, D),
    "rms_norm": (lambda x, g, b: F.rms_norm(x, (D,), g, EPS) + b, RMS, D),
    "rms_norm by length": (lambda x, g, b: F.rms_norm(x, (D,), g, 0.0) + b, LENGTH, D),
    "group_norm": (groups_of_channels, GROUPS, 12),
}
# Those that are norms of torch already, between movements, casts, gains and biases.
PLAIN = {
    *(("layer_norm", name) for name in ("without gain", "in double precision")),
    *(("group_norm", name) for name in ("layer norm", "gains in groups")),
}
SPELLINGS = [(kind, name) for kind, (_, spellings, _) in FUSED.items() for name in spellings]


@functools.cache
def numbers_of(kind: str, name: str | None) -> list[object]:
    torch.manual_seed(0)
    fused, spellings, width = FUSED[kind]
    network = Program(fused if name is None else spellings[name], width).double()
    symmetry = trace_symmetry(network, torch.randn(2, 3, 9))
    own, structure = symmetry.norms, symmetry.structure
    return [
        symmetry.dimension,
        symmetry.shifts,
        symmetry.signs,
        symmetry.log10_permutations,
        [rotation.dimension for rotation in structure.rotations],
        [(norm.gain, norm.bias, norm.plain, norm.layer, norm.writers) for norm in own],
    ]


@pytest.mark.parametrize(("kind", "name"), SPELLINGS)
@pytest.mark.few(4)
def test_norms_have_one_group_however_they_are_written(kind: str, name: str) -> None:
    assert numbers_of(kind, name) == numbers_of(kind, None)


def attention(softmax: Callable[[Tensor], Tensor], x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return softmax(x @ (x * g).mT) @ x + b


EXPONENTIALS = {
    "exp": lambda z: z.exp() / z.exp().sum(-1, keepdim=True),
    "stable": lambda z: (z - z.amax(-1, keepdim=True)).exp() / (z - z.amax(-1, keepdim=True)).exp().sum(-1, True),
    "log_softmax": lambda z: z.log_softmax(-1).exp(),
    "logsumexp": lambda z: (z - z.logsumexp(-1, keepdim=True)).exp(),
    "normalize": lambda z: F.normalize(z.exp(), p=1, dim=-1),
    "factor": lambda z: z.exp() * z.exp().sum(-1, keepdim=True).reciprocal(),
    "product": lambda z: z.exp() / (z.exp() @ torch.ones(z.shape[-1], 1, dtype=z.dtype)),
}


def names_of(found: Capture) -> list[str]:
    return [operation_name(node.target) for node in found.graph.nodes if node.op == "call_function"]


def stable(z: Tensor, hidden: Tensor) -> Tensor:
    shifted = z.masked_fill(hidden, -math.inf) - z.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
    return shifted.exp() / shifted.exp().sum(-1, keepdim=True)


MASKED = {
    "factor": lambda z, hidden: F.normalize(z.exp() * ~hidden, p=1, dim=-1),
    "masks of its own": stable,
    "where": lambda z, hidden: F.normalize(torch.where(hidden, -1e9, z).exp(), p=1, dim=-1),
}


@pytest.mark.parametrize("name", MASKED)
def test_softmax_behind_a_mask_has_the_group_of_torchs(name: str) -> None:
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    masked = functools.partial(MASKED[name], hidden=hidden)
    numbers = []
    for softmax in (masked, lambda z: z.masked_fill(hidden, -math.inf).softmax(-1)):
        network = Program(functools.partial(attention, softmax)).double()
        numbers.append(trace_symmetry(network, torch.randn(2, 3, 9)).dimension)
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_softmaxes_are_found_however_they_are_written(name: str) -> None:
    found = capture(Program(functools.partial(attention, EXPONENTIALS[name])).double(), Call.of(torch.randn(2, 3, 9)))
    assert recognise(Rewriter(found)) == 1
    assert {"softmax", "exp", "sum", "div"} & set(names_of(found)) == {"softmax"}


@pytest.mark.parametrize(("kind", "name"), [*SPELLINGS, *(("softmax", name) for name in EXPONENTIALS)])
def test_what_is_put_in_computes_the_same(kind: str, name: str) -> None:
    function = FUSED[kind][1][name] if kind in FUSED else functools.partial(attention, EXPONENTIALS[name])
    network = Program(function, FUSED[kind][2] if kind in FUSED else D).double()
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    found = capture(network, Call.of(x))
    assert recognise(Rewriter(found)) == ((kind, name) not in PLAIN)
    (result,) = outputs_of_graph(found, network, [x])
    torch.testing.assert_close(result, network(x).detach(), rtol=1e-10, atol=1e-10)


KEPT = torch.ones(3, D).tril()
NEITHER = {
    "identity": lambda x: x,
    "mean only": centred,
    "sum of absolute values": lambda x: x / x.abs().sum(-1, keepdim=True),
    "maximum": lambda x: x / x.abs().amax(-1, keepdim=True),
    "fourth powers": lambda x: x / x.norm(p=4, dim=-1, keepdim=True),
    "deviation without mean": lambda x: x / x.std(-1, keepdim=True),
    "mean without deviation": lambda x: centred(x) / SQUARE(x * x).sqrt(),
    "median": lambda x: (x - x.median(-1, keepdim=True).values) / x.std(-1, keepdim=True),
    "length times itself": lambda x: x * x.norm(dim=-1, keepdim=True),
    "softmax with a sink": lambda x: x.exp() / (1 + x.exp().sum(-1, keepdim=True)),
    "masked softmax with a sink": lambda x: x.exp() * KEPT / (1 + (x.exp() * KEPT).sum(-1, keepdim=True)),
    "warm softmax": lambda x: (x / 2).softmax(-1),
    "weighted mean": lambda x: F.layer_norm(x * torch.arange(1.0, D + 1), (D,)),
    "norm of a row by another": lambda x: x / x.roll(1, 0).norm(dim=-1, keepdim=True),
    "sums over all before": lambda x: x / x.square().cumsum(-1).sqrt(),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_no_norm_and_no_softmax_is_none(name: str) -> None:
    assert measured(NEITHER[name], (2, 3, D)) is None


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5, 1e-3, 0.5])
def test_eps_and_factor_are_measured(eps: float) -> None:
    found = measured(lambda x: 3 * centred(x) / (x.var(-1, keepdim=True) + eps).sqrt(), (4, D))
    assert found is not None
    assert (found.kind, found.exact) == ("layer", True)
    assert found.eps == pytest.approx(eps * (D - 1) / D, rel=1e-4)
    assert found.factor == pytest.approx(3 * math.sqrt((D - 1) / D), rel=1e-12)


class Watched(nn.Module):
    """A norm whose size is named, and read by something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind, self.size, self.norm = (
            nn.Linear(9, D),
            nn.Linear(D + 1, 7),
            nn.Identity(),
            nn.Identity(),
        )
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        size = self.size(SQUARE(x * x) + EPS) if self.size is not None else SQUARE(x * x) + EPS
        return self.behind(torch.cat([self.norm(x * torch.rsqrt(size)) * self.gain, size], -1))


def test_what_is_named_or_read_by_others_stays() -> None:
    network = Watched().double()
    symmetry = trace_symmetry(network, torch.randn(2, 3, 9))
    assert {"size", "norm"} <= set(symmetry.taps)
    found = capture(network, Call.of(torch.randn(2, 3, 9)))
    assert recognise(Rewriter(found)) == 1
    nodes = set(found.graph.nodes)
    assert all(mark.node in nodes for mark in found.marks)
    assert {"rms_norm", "mean", "mul"} <= set(names_of(found))


def test_rule_of_a_user_for_an_operation_inside_wins() -> None:
    found = capture(Program(LAYER["mean"]).double(), Call.of(torch.randn(2, 3, 9)))
    assert recognise(Rewriter(found, kept={"aten::rsqrt"})) == 0
    found = capture(Program(LAYER["mean"]).double(), Call.of(torch.randn(2, 3, 9)))
    assert recognise(Rewriter(found, kept={"aten::layer_norm"})) == 0


class Cosines(nn.Module):
    """A classifier by cosines."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.weight, self.function = nn.Linear(9, D), nn.Parameter(torch.randn(7, D)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before(x), self.weight)


COSINES = {
    "normalize": lambda h, w: F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).T,
    "cosine_similarity": lambda h, w: F.cosine_similarity(h[..., None, :], w, dim=-1),
    "divided later": lambda h, w: h @ w.T / h.norm(dim=-1, keepdim=True) / w.norm(dim=-1),
    "outer norms": lambda h, w: F.linear(h, w) / (h.square().sum(-1).sqrt()[..., None] * w.norm(dim=1)),
    "rms_norm": lambda h, w: F.rms_norm(h, (D,), eps=0.0) @ (F.rms_norm(w, (D,), eps=0.0) / D).T,
}


@pytest.mark.parametrize("name", COSINES)
def test_cosines_scale_each_class_and_rotate_what_is_compared(name: str) -> None:
    symmetry = trace_symmetry(Cosines(COSINES[name]).double(), torch.randn(2, 3, 9))
    assert symmetry.scales == 7 + 1
    assert [rotation.dimension for rotation in symmetry.structure.rotations] == [D * (D - 1) // 2]
    assert symmetry.dimension == 8 + D * (D - 1) // 2


def test_group_norm_of_single_channels_is_an_instance_norm() -> None:
    found = []
    for norm in (nn.GroupNorm(4, 4), nn.InstanceNorm2d(4, affine=True)):
        network = nn.Sequential(nn.Conv2d(5, 4, 1), norm, nn.Conv2d(4, 3, 1)).double()
        symmetry = trace_symmetry(network, torch.randn(2, 5, 4, 5, dtype=torch.float64))
        found.append((symmetry.dimension, symmetry.signs, symmetry.log10_permutations))
    assert found[0] == found[1]


class Turned(nn.Module):
    """Layers whose queries and keys are turned by rotary positions.

    Args:
        bases: Of the angles, layer by layer.
    """

    def __init__(self, *bases: float) -> None:
        super().__init__()
        self.bases = bases
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in bases)

    def forward(self, x: Tensor) -> Tensor:
        for base, layer in zip(self.bases, self.layers, strict=True):
            angle = torch.arange(x.shape[1])[:, None] * base ** -torch.arange(4.0)
            cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
            q, k, v = layer(x).chunk(3, -1)
            q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (q, k))
            x = x + (q @ k.mT).softmax(-1) @ v
        return x


@pytest.mark.parametrize(("bases", "times"), [((3.0, 3.0, 3.0), 1), ((3.0, 5.0, 3.0), 2)])
def test_planes_are_looked_for_once_for_layers_that_turn_alike(
    bases: tuple[float, ...], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys of all layers by the same angles are one search; what is found is that of each layer."""
    seen, search = [], linear_maps.find_planes
    monkeypatch.setattr(linear_maps, "find_planes", lambda *args: seen.append(args) or search(*args))
    symmetry = trace_symmetry(Turned(*bases), torch.randn(2, 5, 8))
    assert len(seen) == times
    assert symmetry.worst_error < 1e-10
    assert sum(group.phase for group in symmetry.groups) == len(bases)
