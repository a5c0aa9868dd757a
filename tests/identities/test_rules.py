"""Rules that users write give all that the operations of torch would: labels, shifts, norms, rotations.

Each case is a network in which one module stands for operations that nothing can follow, as they look at their values.
With a rule it has the group of its twin, which is written in operations of torch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lightning_sym.symmetry import Symmetry, Value, canonicalize, local_dimension, register_rule, trace_symmetry

# Singular values of the Jacobian, relative to the largest: those that are zero are about 1e-15, others above 1e-8.
ZERO = 1e-11
EXACT = 1e-10  # rounding of float64


class Plain(nn.Module):
    """A function with parameters."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Own(Plain):
    """The same, but nothing can be followed: its control flow depends on values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return super().forward(*args, **kwargs) if bool((given == given).all()) else None


Kind = type[Plain]


@dataclass(frozen=True)
class Case:
    """A network."""

    build: Callable[[Kind], nn.Module]  # makes it, with a class of modules in which the operations are
    rule: Callable[..., Any]  # the rule of this class
    inputs: Callable[[int, int], Tensor]  # makes inputs, of a number of samples and a length
    is_nullity: bool = True  # whether its dimension is the nullity of the Jacobian


CASES: dict[str, Case] = {}
Build = Callable[[Kind], nn.Module]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def vectors(samples: int, length: int) -> Tensor:
    return numbers(samples, length, 9)


def images(samples: int, length: int) -> Tensor:
    return numbers(samples, 3, length + 5, length + 5)


def indices(samples: int, length: int) -> Tensor:
    return torch.arange(samples * length).reshape(samples, length) % 40


def case(name: str, build: Build, inputs: Callable[[int, int], Tensor] = vectors, *, is_nullity: bool = True) -> Any:
    def register(rule: Any) -> Any:
        CASES[name] = Case(build, rule, inputs, is_nullity)
        return rule

    return register


def linear(one: int, two: int) -> nn.Module:
    return nn.Linear(one, two).double()


def between(function: Callable[..., Any], *behind: Callable[[], nn.Module], **parts: Any) -> Build:
    """Return what builds a network with a function of 7 units, and perhaps more, between two linear layers."""

    def build(own: Kind) -> nn.Module:
        made = {name: numbers(*part) if isinstance(part, tuple) else part() for name, part in parts.items()}
        return nn.Sequential(linear(9, 7), own(function, **made), *(each() for each in behind), linear(7, 6))

    return build


# Norms.


@case("layer norm", between(lambda s, x: F.layer_norm(x, (7,), s.weight, s.bias, 1e-3), weight=(7,), bias=(7,)))
def layer_norm(trace: Any, module: Any, x: Value) -> Value:
    x = trace.normalise(x, axes=[-1], mean=True, eps=1e-3)
    x = trace.join(x, trace.parameter(module, "weight"), product=True)
    return trace.join(x, trace.parameter(module, "bias"), product=False)


@case("inner norm", between(lambda s, x: s.norm(x), norm=lambda: nn.LayerNorm(7).double()))
def inner_norm(trace: Any, module: Any, x: Value) -> Value:
    x = trace.join(trace.normalise(x, [-1], mean=True, eps=1e-5), trace.parameter(module, "norm.weight"), product=True)
    return trace.join(trace.parameter(module, "norm.bias"), x, product=False)


@case("inner batch norm", between(lambda s, x: s.norm(x.mT).mT, nn.ReLU, norm=lambda: nn.BatchNorm1d(7).double()))
def inner_batch_norm(trace: Any, module: Any, x: Value) -> Value:
    assert module.norm.training  # as the user left it; what is followed is the evaluation
    return trace.compute(lambda x: module.norm(x.mT).mT, x)


@case("RMS norm", between(lambda s, x: F.rms_norm(x, (7,), s.weight, 1e-6), weight=(7,)))
def rms_norm(trace: Any, module: Any, x: Value) -> Value:
    return trace.join(trace.normalise(x, [-1], mean=False, eps=1e-6), trace.parameter(module, "weight"), product=True)


@case("gain 1 + w", between(lambda s, x: F.rms_norm(x, (7,), None, 1e-6) * (1 + s.weight), weight=(7,)))
def gain_near_one(trace: Any, module: Any, x: Value) -> Value:
    return trace.compute(lambda x: F.rms_norm(x, (7,), None, 1e-6) * (1 + module.weight), x)


@case("no eps", between(lambda s, x: x * x.square().mean(-1, keepdim=True).rsqrt() * s.weight, weight=(7,)))
def norm_without_eps(trace: Any, module: Any, x: Value) -> Value:
    return trace.join(trace.normalise(x, [-1], mean=False), trace.parameter(module, "weight"), product=True)


# Attention.


class Attention(nn.Module):
    """Two heads of four units.

    Args:
        norm: Makes what normalises queries, and what normalises keys.
        attend: Makes what weighs values by queries and keys.
    """

    def __init__(self, norm: Callable[[], nn.Module], attend: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = linear(9, 8), linear(9, 8), linear(9, 8), linear(8, 6)
        self.norm_q, self.norm_k, self.attend = norm(), norm(), attend()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        result: Tensor = self.o(self.attend(self.norm_q(q), self.norm_k(k), v).transpose(1, 2).flatten(2))
        return result


def attend(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 2, -1) @ v


@case("gain per head", lambda own: Attention(
    lambda: own(lambda s, x: F.rms_norm(x, (4,), None, 1e-6) * s.weight[:, None, None], weight=numbers(2)),
    lambda: Plain(attend),
))  # fmt: skip
def gain_per_head(trace: Any, module: Any, x: Value) -> Value:
    gain = trace.move(trace.parameter(module, "weight"), lambda weight: weight[:, None, None])
    return trace.join(trace.normalise(x, [-1], mean=False, eps=1e-6), gain, product=True)


@case("gains per unit and head", lambda own: Attention(
    lambda: own(lambda s, x: F.rms_norm(x, (4,), None, 1e-6) * s.weight[:, None], weight=numbers(2, 4)),
    lambda: Plain(attend),
))  # fmt: skip
def gains_per_head(trace: Any, module: Any, x: Value) -> Value:
    gain = trace.move(trace.parameter(module, "weight"), lambda weight: weight[:, None])
    return trace.join(trace.normalise(x, [-1], mean=False, eps=1e-6), gain, product=True)


@case("attention", lambda own: Attention(nn.Identity, lambda: own(attend)))
def attention(trace: Any, module: Any, q: Value, k: Value, v: Value) -> Value:
    batch, heads, queries, size = q.shape
    scores = trace.contract(q, [0, 1, 2, None], k, [0, 1, 3, None], [batch, heads, queries, k.shape[2]])
    return trace.contract(trace.softmax(scores, -1), [0, 1, 2, None], v, [0, 1, None, 3], [batch, heads, queries, size])


@case("temperature", between(lambda s, x: (x / s.t).softmax(-1), t=(1,)))
def temperature(trace: Any, module: Any, x: Value) -> Value:
    return trace.softmax(trace.join(x, trace.parameter(module, "t"), product=True, divide=True), -1)


# Layers.


def projected(s: Any, x: Tensor) -> Tensor:
    return F.linear(x, s.weight, s.bias)


@case("linear layer", lambda own: nn.Sequential(
    own(projected, weight=numbers(7, 9), bias=numbers(7)),
    nn.LayerNorm(7).double(),
    own(projected, weight=numbers(6, 7), bias=numbers(6)),
))  # fmt: skip
def linear_layer(trace: Any, module: Any, x: Value) -> Value:
    weight = trace.parameter(module, "weight")
    x = trace.contract(x, [0, 1, None], weight, [2, None], [*x.shape[:-1], weight.shape[0]])
    return trace.join(x, trace.parameter(module, "bias"), product=False)


@case("convolution", lambda own: nn.Sequential(
    own(lambda s, x: F.conv2d(x, s.weight, s.bias, padding=1), weight=numbers(6, 3, 3, 3), bias=numbers(6)),
    nn.GroupNorm(2, 6).double(), nn.ReLU(), nn.Conv2d(6, 4, 3).double(),
), images)  # fmt: skip
def convolution(trace: Any, module: Any, x: Value) -> Value:
    return trace.compute(F.conv2d, x, trace.parameter(module, "weight"), module.bias, padding=1)


@case("embedding", lambda own: nn.Sequential(
    own(lambda s, x: F.embedding(x, s.weight), weight=numbers(40, 4)), linear(4, 6)
), indices)  # fmt: skip
def embedding(trace: Any, module: Any, index: Value) -> Value:
    return trace.compute(F.embedding, index, trace.parameter(module, "weight"))


@case("gated unit", lambda own: nn.Sequential(
    linear(9, 14), own(lambda s, x: F.silu(x[..., :7]) * x[..., 7:]), linear(7, 6)
))  # fmt: skip
def gated(trace: Any, module: Any, x: Value) -> Value:
    gate, value = trace.move(x, lambda x: (x[..., :7], x[..., 7:]))
    return trace.join(trace.elementwise(gate), value, product=True)


# Functions.


@case("homogeneous", between(lambda s, x: F.leaky_relu(x, 0.1)))
def homogeneous(trace: Any, module: Any, x: Value) -> Value:
    return trace.elementwise(x, positive_scales=True)


@case("odd", between(lambda s, x: torch.tanh(x)))
def odd(trace: Any, module: Any, x: Value) -> Value:
    return trace.elementwise(x, signs=True)


@case("even", between(lambda s, x: x**2))
def even(trace: Any, module: Any, x: Value) -> Value:
    return trace.elementwise(x, positive_scales=True, signs=True, even=True, exponent=2)


@case("neither", between(lambda s, x: F.gelu(x)))
def neither(trace: Any, module: Any, x: Value) -> Value:
    return trace.permutations_only(x)


@case("measured", between(lambda s, x: F.leaky_relu(x, 0.2)))
def measured(trace: Any, module: Any, x: Value) -> Value:
    return trace.compute(F.leaky_relu, x, 0.2)


# Places, and moves.


@case("pooling", lambda own: nn.Sequential(
    nn.Conv2d(3, 4, 3).double(), own(lambda s, x: F.avg_pool2d(x, 2)), nn.Conv2d(4, 5, 1).double()
), images)  # fmt: skip
def pooling(trace: Any, module: Any, x: Value) -> Value:
    return trace.compute(F.avg_pool2d, x, 2)


@case("resizing", lambda own: nn.Sequential(
    nn.Conv2d(3, 4, 3).double(), nn.ReLU(), own(lambda s, x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    nn.Conv2d(4, 5, 1).double(),
), images)  # fmt: skip
def resizing(trace: Any, module: Any, x: Value) -> Value:
    return trace.linear_along(x, [-1, -2], trace.output_shape(0))


@case("moves", between(lambda s, x: x[..., [0, 2, 4, 6, 1, 3, 5]], lambda: nn.LayerNorm(7).double()))
def moves(trace: Any, module: Any, x: Value) -> Value:
    return trace.move(x, lambda x: x[..., [0, 2, 4, 6, 1, 3, 5]])


@case("moves of numpy", between(lambda s, x: x.flip(-1), nn.ReLU))
def moves_of_numpy(trace: Any, module: Any, x: Value) -> Value:
    return trace.move(x, lambda x: torch.from_numpy(x.numpy()[..., ::-1].copy()))


@case("nothing, written into", between(lambda s, x: x.clone(), lambda: nn.ReLU(inplace=True)))
def nothing(trace: Any, module: Any, x: Value) -> Value:
    return x


def built(name: str, kind: Kind) -> nn.Module:
    torch.manual_seed(1)
    network = CASES[name].build(kind)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def described(symmetry: Symmetry) -> dict[str, Any]:
    structure = symmetry.structure
    return {
        "dimension": symmetry.dimension,
        "permutations": round(symmetry.log10_permutations, 6),
        "kinds": sorted(group.kind for group in symmetry.groups),
        "scales": symmetry.scales,
        "signs": symmetry.signs,
        "rotations": sorted(rotation.dimension for rotation in structure.rotations),
        "matrices": sorted(len(cell) for cell in structure.dense),
        "shifts": symmetry.shift_kinds,
        "notes": symmetry.notes,
    }


def with_rule(build: Build, rule: Any) -> Callable[[], nn.Module]:
    """Return what makes a network whose module has a rule; the same weights each time."""
    kind = type("Mine", (Own,), {})
    register_rule(kind)(rule)

    def make() -> nn.Module:
        torch.manual_seed(1)
        return build(kind)

    return make


def plain(build: Build) -> nn.Module:
    torch.manual_seed(1)
    return build(Plain)


@pytest.mark.few(3, "gains per unit and head", "neither", "moves", "moves of numpy", "nothing, written into")
@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_group_of_operations_of_torch_and_its_nullity(name: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(2)
    torch.manual_seed(0)
    inputs, other = case.inputs(2, 3), case.inputs(3, 5)
    make = with_rule(case.build, case.rule)
    symmetry, network = trace_symmetry(make(), inputs), make()
    assert described(symmetry) == described(trace_symmetry(plain(case.build), inputs, check=False))
    moved = make()
    moved.load_state_dict(symmetry.act(symmetry.sample(generator), network).state_dict())
    with torch.no_grad():
        before, after = network.eval()(other), moved.eval()(other)
    assert float((after - before).abs().max()) <= EXACT * float(before.abs().max())
    form, again = (canonicalize(symmetry, one).network.state_dict() for one in (network, moved))
    assert set(form) == set(again)
    if case.is_nullity:
        inputs = case.inputs(*((4, 4) if case.inputs is images else (12, 8)))
        assert local_dimension(symmetry, make().eval(), inputs, tolerance=ZERO).nullity == symmetry.dimension


# How modules are called.


class Calls(nn.Module):
    """Calls a module in one way."""

    def __init__(self, own: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.own, self.call = own, call
        self.a, self.b, self.c, self.d = linear(9, 7), linear(9, 7), linear(7, 6), linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.call(self.own, self.a(x), self.b(x))
        result: Tensor = self.c(one) + self.d(two)
        return result


class Named(Own):
    """A module whose arguments have names."""

    def forward(self, pair: list[Tensor], slope: float = 0.0, *, factor: Tensor | None = None) -> Any:
        return super().forward(pair, slope, factor=factor)


def bent(s: Any, pair: list[Tensor], slope: float = 0.0, *, factor: Tensor | None = None) -> Any:
    one, two = pair
    one = torch.sigmoid(one) if slope < 0 else F.leaky_relu(one, slope)
    return one * (1.0 if factor is None else factor), None, {"two": torch.tanh(two)}


def called_as_the_module(trace: Any, module: Any, pair: Any, slope: float = 0.0, factor: Any = None) -> Any:
    one = trace.elementwise(pair[0], positive_scales=slope >= 0)
    one = one if factor is None else trace.join(one, factor, product=True)
    return one, None, {"two": trace.elementwise(pair[1], signs=True)}


def called_with_its_tensors(trace: Any, module: Any, one: Value, two: Value) -> Any:
    return [trace.elementwise(one, positive_scales=True), trace.elementwise(two, signs=True)]


def called_with_all(trace: Any, module: Any, *values: Value) -> Any:
    assert len(values) == 2
    return called_with_its_tensors(trace, module, *values)


def take(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
    one, nothing, rest = own(*args, **kwargs)
    assert nothing is None
    return one, rest["two"]


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        (called_as_the_module, lambda own, a, b: take(own, [a, b])),
        (called_as_the_module, lambda own, a, b: take(own, [a, b], 0.1)),
        (called_as_the_module, lambda own, a, b: take(own, pair=[a, b], slope=-0.1)),
        (called_as_the_module, lambda own, a, b: take(own, [a, a], 0.1, factor=b)),
        (called_with_its_tensors, lambda own, a, b: take(own, [a, b])),
        (called_with_its_tensors, lambda own, a, b: take(own, [a, b], 0.1)),
        (called_with_all, lambda own, a, b: take(own, [a, b], 0.1)),
    ],
)
def test_a_rule_is_called_as_its_module_or_with_its_tensors(rule: Any, call: Any) -> None:
    kind, inputs = type("Mine", (Named,), {}), vectors(2, 3)
    register_rule(kind)(rule)
    made = []
    for module in (Plain(bent), kind(bent)):
        torch.manual_seed(1)
        made.append(described(trace_symmetry(Calls(module, call), inputs)))
    assert made[0] == made[1]


def test_a_module_is_called_twice_with_other_shapes() -> None:
    class Twice(nn.Module):
        def __init__(self, kind: Kind) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(9, 7), linear(7, 5), linear(5, 6)
            self.norm = kind(lambda s, x: F.rms_norm(x, x.shape[-1:], None, 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.c(self.norm(self.b(self.norm(self.a(x)))).relu_())
            return result

    make = with_rule(Twice, lambda trace, module, x: trace.normalise(x, [-1], mean=False, eps=1e-6))
    inputs = vectors(2, 3)
    assert described(trace_symmetry(make(), inputs)) == described(trace_symmetry(plain(Twice), inputs))


def test_a_rule_of_a_class_holds_for_its_subclasses_unless_they_have_their_own() -> None:
    class One(Own):
        pass

    class Two(One):
        pass

    register_rule(Two)(lambda trace, module, x: trace.elementwise(x, positive_scales=True))
    register_rule(One)(lambda trace, module, x: trace.elementwise(x, signs=True))
    build = between(lambda s, x: torch.relu(x))
    assert trace_symmetry(build(Two), vectors(2, 3)).dimension == 7
    build = between(lambda s, x: torch.tanh(x))
    assert trace_symmetry(build(One), vectors(2, 3)).signs == 7


# Operations of packages.


@torch.library.custom_op("lightning_sym_tests::fused_norm", mutates_args=())
def fused_norm(x: Tensor, gain: Tensor, eps: float = 1e-6, *, scale: float = 1.0) -> Tensor:
    return scale * torch.from_numpy(F.rms_norm(x, x.shape[-1:], gain, eps).numpy().copy())


@fused_norm.register_fake
def _(x: Tensor, gain: Tensor, eps: float = 1e-6, *, scale: float = 1.0) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lightning_sym_tests::act_and_peak", mutates_args=())
def act_and_peak(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), x.amax(-1)


@act_and_peak.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@torch.library.custom_op("lightning_sym_tests::without_shape", mutates_args=())
def without_shape(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


@torch.library.custom_op("lightning_sym_tests::double_relu_", mutates_args=("x",))
def double_relu_(x: Tensor) -> None:
    x.relu_().mul_(2)


def fused(s: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.lightning_sym_tests.fused_norm(x, s.gain, 1e-3, scale=2.0)
    return result


def test_a_rule_for_an_operation_gives_all_that_torch_would() -> None:
    build, inputs = between(fused, gain=(7,)), vectors(2, 3)
    wanted = described(
        trace_symmetry(between(lambda s, x: 2 * F.rms_norm(x, (7,), s.gain, 1e-3), gain=(7,))(Plain), inputs)
    )
    assert trace_symmetry(build(Plain), inputs).dimension == 0

    @register_rule(fused_norm)
    def parts(trace: Any, x: Value, gain: Value, eps: float = 1e-6, *, scale: float = 1.0) -> Value:
        assert (eps, scale) == (1e-3, 2.0)
        return trace.join(trace.normalise(x, [-1], mean=False, eps=eps), gain, product=True)

    assert described(trace_symmetry(build(Plain), inputs)) == wanted

    @register_rule(torch.ops.lightning_sym_tests.fused_norm)
    def whole(trace: Any, x: Value, gain: Value, eps: float = 1e-6, *, scale: float = 1.0) -> Any:
        return trace.compute(lambda x, gain: scale * F.rms_norm(x, x.shape[-1:], gain, eps), x, gain)

    assert described(trace_symmetry(build(Plain), inputs)) == wanted

    @register_rule("lightning_sym_tests::act_and_peak")
    def of_others(trace: Any, x: Value) -> Any:
        return trace.compute(lambda x: (torch.relu(x), torch.relu(fused_norm(x, x.new_ones(7))).amax(-1)), x)

    def normed_peak(s: Any, x: Tensor) -> Tensor:
        one, two = act_and_peak(x)
        return one * two[..., None]

    assert trace_symmetry(between(normed_peak)(Plain), inputs, check=False).log10_permutations > 3


# Operations of torch that are others in a row: the operation, and these.
WRITTEN_OUT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "glu": (lambda s, a, b: s.c(nn.functional.glu(torch.cat([a, b], -1))), lambda s, a, b: s.c(a * b.sigmoid())),
    "lerp": (lambda s, a, b: s.c(torch.lerp(a, b, s.w)), lambda s, a, b: s.c(a + s.w * (b - a))),
    "lerp in place": (lambda s, a, b: s.c((a * 1).lerp_(b, 0.3)), lambda s, a, b: s.c(a + 0.3 * (b - a))),
    "lerp in place, read again": (lambda s, a, b: s.c(a.lerp_(b, 0.3) + a), lambda s, a, b: s.c(2 * a + 0.6 * (b - a))),
    "lerp into a part": (lambda s, a, b: (a[:, :1].lerp_(b[:, :1], 0.3), s.c(a))[1],
        lambda s, a, b: (a[:, :1].add_(0.3 * (b - a)[:, :1]), s.c(a))[1]),
    "outer": (lambda s, a, b: s.c(a.relu() + torch.outer(s.v, s.w)),
        lambda s, a, b: s.c(a.relu() + s.v[:, None] * s.w)),
    "hypot": (lambda s, a, b: s.c(torch.hypot(a, b)), lambda s, a, b: s.c((a * a + b * b).sqrt())),
    "vecdot": (lambda s, a, b: torch.linalg.vecdot(a, b), lambda s, a, b: (a * b).sum(-1)),
    "diff": (lambda s, a, b: s.c(torch.diff(a, 1, 1)), lambda s, a, b: s.c(a[:, 1:] - a[:, :-1])),
    "diff, twice": (lambda s, a, b: s.c(torch.diff(a, 2, 1, append=b)),
        lambda s, a, b: s.c(torch.cat([a, b], 1).diff(dim=1).diff(dim=1))),
    "distance": (lambda s, a, b: F.pairwise_distance(a, b), lambda s, a, b: (a - b + 1e-6).norm(dim=-1)),
    "hstack": (lambda s, a, b: s.c(torch.hstack([a, b])), lambda s, a, b: s.c(torch.cat([a, b], 1))),
    "vstack": (lambda s, a, b: s.c(torch.vstack([a, b])), lambda s, a, b: s.c(torch.cat([a, b]))),
    "columns": (lambda s, a, b: s.c(a * torch.column_stack([s.w, s.w]).sum(1)),
        lambda s, a, b: s.c(a * torch.stack([s.w, s.w], 1).sum(1))),
    "kron": (lambda s, a, b: s.c(a.relu() + torch.kron(s.v[:, None], s.w)),
        lambda s, a, b: s.c(a.relu() + s.v[:, None] * s.w)),
    "products in a row": (lambda s, a, b: torch.linalg.multi_dot([a[0], s.c.weight.T, s.c.weight]),
        lambda s, a, b: a[0] @ s.c.weight.T @ s.c.weight),
    "norm": (lambda s, a, b: torch.linalg.norm(a - b, dim=-1), lambda s, a, b: (a - b).norm(dim=-1)),
    "difference and quotient": (lambda s, a, b: s.c(torch.divide(torch.subtract(a, b), s.w.view_as(s.w).expand_as(a))),
        lambda s, a, b: s.c((a - b) / s.w)),
    "distances": (lambda s, a, b: torch.cdist(a, b),
        lambda s, a, b: (a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)),
}  # fmt: skip


class Joined(nn.Module):
    """Joins two values of 7 units."""

    def __init__(self, join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.join, self.a, self.b, self.c = join, linear(9, 7), linear(9, 7), linear(7, 6)
        self.w, self.v = nn.Parameter(numbers(7)), nn.Parameter(numbers(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, self.a(x), self.b(x))


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses:UserWarning")
@pytest.mark.few(2, "lerp", "columns")
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_operations_that_are_written_out(name: str) -> None:
    inputs, made = vectors(2, 3), []
    for function in WRITTEN_OUT[name]:
        torch.manual_seed(1)
        network = Joined(function)
        symmetry = trace_symmetry(network, inputs)
        # What shifts of one space are called depends on the operations in front, as do the names in notes.
        notes = tuple(re.sub(r"^\w+: ", "", note) for note in symmetry.notes)
        made.append(({**described(symmetry), "shifts": symmetry.shifts, "notes": notes}, network(inputs)))
    assert made[0][0] == made[1][0]
    assert torch.allclose(made[0][1], made[1][1], rtol=0, atol=1e-12)


def test_a_rule_of_no_module_is_a_rule() -> None:
    def rule(trace: Any, x: Value, gain: Value, eps: float, *, scale: float) -> Any:
        return trace.compute(lambda x, gain: scale * F.rms_norm(x, (7,), gain, eps), x, gain)

    rule.__module__ = None  # type: ignore[assignment]  # of a script that is run by exec
    register_rule(fused_norm)(rule)
    assert trace_symmetry(between(fused, gain=(7,))(Plain), vectors(2, 3)).dimension > 0


def test_several_results_of_an_operation() -> None:
    def used(act: Any) -> Build:
        def function(s: Any, x: Tensor) -> Tensor:
            one, two = act(x)
            return one * two[..., None]

        return between(function)

    register_rule(act_and_peak)(lambda trace, x: trace.compute(lambda x: (x.relu(), x.amax(-1)), x))
    inputs = vectors(2, 3)
    twin = trace_symmetry(used(lambda x: (x.relu(), x.amax(-1)))(Plain), inputs)
    assert described(trace_symmetry(used(act_and_peak)(Plain), inputs)) == described(twin)
    assert twin.log10_permutations > 3


# What a rule leaves open.


def notes(rule: Any, function: Any = lambda s, x: torch.relu(x), **parts: Any) -> tuple[int, tuple[str, ...]]:
    symmetry = trace_symmetry(with_rule(between(function, **parts), rule)(), vectors(2, 3))
    return symmetry.dimension, tuple(note for note in symmetry.notes if "nullity" not in note)  # rules that say less


def test_what_a_rule_does_not_mention_is_fixed_with_a_note() -> None:
    dimension, said = notes(
        lambda trace, module, x: trace.elementwise(x, positive_scales=True),
        lambda s, x: torch.relu(x) * (1 + 0 * s.weight),
        weight=(7,),
    )
    assert (dimension, *said) == (
        7, "Mine in 1: its rule says nothing of the parameter weight (fixes 7 units here)"
    )  # fmt: skip
    dimension, said = notes(lambda trace, module, x: Value(x.shape))
    assert (dimension, *said) == (0, "Mine in 1: its rule says nothing of one of its arguments (fixes 7 units here)")
    dimension, said = notes(lambda trace, module, x: trace.fix(x, "each has its own number"))
    assert (dimension, *said) == (0, "Mine in 1: each has its own number (fixes 7 units here)")


def test_a_demand_holds_though_nobody_reads_what_comes_out() -> None:
    def rule(trace: Any, module: Any, x: Value) -> Value:
        trace.elementwise(x)
        return trace.elementwise(x, positive_scales=True)

    assert notes(rule) == (0, ())

    def with_product(trace: Any, module: Any, x: Value) -> Value:
        trace.join(x, trace.parameter(module, "weight"), product=False)
        return trace.elementwise(x, positive_scales=True)

    dimension, _ = notes(with_product, lambda s, x: torch.relu(x) + 0 * s.weight, weight=(7,))
    assert dimension == 7  # units and weights have one scale


def test_a_rule_that_looks_at_labels_holds_for_these_alone() -> None:
    def rule(trace: Any, module: Any, x: Value) -> Value:
        (label,) = x.labels
        trace.constraints.fix_scales(label.scale[:3], signs=False)
        result: Value = trace.elementwise(x, positive_scales=True)
        return result

    dimension, (note,) = notes(rule)
    assert dimension == 4
    assert "its rule looks at the labels of a value" in note
    assert "not followed" in note


def test_a_linear_map_of_which_only_the_axes_are_known_says_so() -> None:
    build = lambda own: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 3).double(), own(lambda s, x: F.avg_pool2d(x, 2)), nn.Conv2d(4, 5, 1).double()
    )
    symmetry = trace_symmetry(
        with_rule(build, lambda trace, module, x: trace.linear_along(x, [-1, -2], trace.output_shape()))(), images(2, 3)
    )
    assert symmetry.dimension == 16
    assert "does not describe the effect of translations" in symmetry.notes[0]
    _, said = notes(
        lambda trace, module, x: trace.join(
            trace.normalise(x, [-1], mean=True), trace.elementwise(trace.parameter(module, "weight")), product=True
        ),
        lambda s, x: F.layer_norm(x, (7,), eps=0.0) * F.softplus(s.weight),
        weight=(7,),
    )
    assert "a function of weights only by its group" in said[0]


def trace_normalised(trace: Any, module: Any, x: Value) -> Any:
    return trace.normalise(x, axes=[3], mean=False)


def trace_softmax(trace: Any, module: Any, x: Value) -> Any:
    return trace.softmax(x, 3)


def trace_linear(trace: Any, module: Any, x: Value) -> Any:
    return trace.linear_along(x, [3], x.shape)


def test_rules_that_are_wrong_say_how(capfd: pytest.CaptureFixture[str]) -> None:
    def refused(rule: Any, says: Any, error: type[Exception], operation: Any = None) -> None:
        if operation is None:
            make = with_rule(between(lambda s, x: torch.relu(x)), rule)
        else:
            register_rule(operation)(rule)
            make = lambda: between(fused, gain=(7,))(Plain)  # noqa: E731
        assert_refused(trace_symmetry, make(), vectors(2, 3), says=says, error=error)

    refused(lambda trace, module, x: trace.normalize(x), ("no 'normalize'", "it has", "normalise"), AttributeError)
    refused(lambda trace, module: None, ("the rule for Mine", "expected rule(trace, module"), TypeError)
    refused(lambda trace, module, x: [x, x], "returned 2 values; expected 1", TypeError)
    refused(lambda trace, module, x: 3, "returned int; expected the resulting Value", TypeError)
    refused(lambda trace, module, x: trace.parameter(module, "gain"), "no parameter or buffer 'gain'", KeyError)
    refused(
        lambda trace, module, x: trace.compute(lambda x: x * float(x.sum()), x),
        "in the rule for Mine cannot be followed", ValueError,
    )  # fmt: skip
    no_operator = "operators and indices take no Value"
    refused(lambda trace, module, x: x * x, (no_operator, "trace.join"), TypeError)
    refused(lambda trace, module, x: x[..., :3], (no_operator, "trace.move"), TypeError)
    refused(lambda trace, module, x: torch.relu(x), ("torch's relu takes no Value", "trace.compute"), TypeError)
    refused(lambda trace, module, x: torch.ones(7) * x, (no_operator, "trace.join"), TypeError)
    refused(lambda trace, module, x: x.relu(), ("a Value has no 'relu'", "trace.compute"), AttributeError)
    for given in (numbers(7), 2.0):
        says = ("the rule for Mine gives a", type(given).__name__, "trace.parameter")
        refused(lambda trace, module, x, given=given: trace.join(x, given, product=True), says, TypeError)
    refused(lambda trace, module, x: trace.elementwise(numbers(7)), "the rule for Mine gives a Tensor", TypeError)
    refused(
        lambda trace, module, x: trace.join(x, trace.move(x, lambda tensor: tensor[..., :3]), product=True),
        ("the rule for Mine joins the shapes (2, 3, 7) and (2, 3, 3)", "trace.move"), ValueError,
    )  # fmt: skip
    for method in (trace_normalised, trace_softmax, trace_linear):
        refused(method, ("the rule for Mine names the axes [3]", "from -3 to 2"), ValueError)
    refused(
        lambda trace, module, x: trace.contract(x, [0, 1, 2], x, [0, 1, None], (2, 3, 7)),
        ("contracts a value of shape (2, 3, 7) with the places [0, 1, 2]", "None for the one"), ValueError,
    )  # fmt: skip
    refused(
        lambda trace, module, x: trace.move(x, lambda tensor: tensor[..., :1]),
        "the rule for Mine returned a value of shape (2, 3, 1); expected (2, 3, 7)", ValueError,
    )  # fmt: skip
    several = lambda trace, x: trace.linear_along(x, [-1], trace.output_shape())  # noqa: E731
    register_rule(act_and_peak)(several)
    network = between(lambda s, x: act_and_peak(x)[0])(Plain)
    assert_refused(trace_symmetry, network, vectors(2, 3), says=("has 2 results", "output_shape(0)"))
    refused(lambda trace, module, x: x, ("self-test", "check your rule for Mine"), RuntimeError)
    weight = nn.Parameter(numbers(7))
    refused(lambda trace, module, x: trace.compute(lambda x: x * weight, x), "none of its arguments", ValueError)
    refused(
        lambda trace, module, x: trace.compute(torch.relu, trace.move(x.with_labels(*x.labels), lambda t: t)),
        "also reads labels or constraints", TypeError,
    )  # fmt: skip
    refused(lambda trace, x: x, "expected rule(trace, x, gain, eps, scale)", TypeError, fused_norm)
    refused(
        lambda trace, x, gain, eps, scale: trace.compute(fused_norm, x, gain, eps), "computes it by", ValueError,
        fused_norm,
    )  # fmt: skip
    assert not any(capfd.readouterr())  # torch logs what does not run without data


def test_functions_that_are_odd_up_to_a_constant_have_signs_where_a_bias_takes_it_up() -> None:
    def traced(offset: float, bias: bool = True, affine: bool = True) -> Symmetry:
        kind = type("Mine", (Own,), {})
        register_rule(kind)(lambda trace, module, x: trace.elementwise(x, signs=True, offset=offset))
        own = kind(lambda s, x: 3 * torch.sigmoid(x) - 1)
        network = nn.Sequential(linear(9, 7), own, nn.Linear(7, 6, bias=bias).double())
        return trace_symmetry(network, vectors(2, 3), affine=affine)

    symmetry = traced(1.0)
    assert (symmetry.signs, symmetry.dimension) == (7, 0)
    assert symmetry.structure.absorbed == (("2.bias", "2.weight", 1, 1.0),)
    assert traced(1.0, bias=False).signs == traced(1.0, affine=False).signs == 0
    assert_refused(traced, 0.9, says=("self-test", "check your rule for Mine"), error=RuntimeError)


def test_an_operation_that_only_writes_may_have_a_rule() -> None:
    def function(s: Any, x: Tensor) -> Tensor:
        x = x * 1
        double_relu_(x)
        return x

    inputs = vectors(2, 3)
    assert trace_symmetry(between(function)(Plain), inputs).dimension == 0
    register_rule(double_relu_)(lambda trace, x: trace.elementwise(x, positive_scales=True))
    assert trace_symmetry(between(function)(Plain), inputs).dimension == 7


def test_an_operation_that_does_not_say_its_shape_is_named() -> None:
    network = between(lambda s, x: without_shape(x))(Plain)
    assert_refused(trace_symmetry, network, vectors(2, 3), says=("no fake impl", "torch.library.register_fake"))


def test_rules_work_without_weights() -> None:
    kind, case = type("Mine", (Plain,), {}), CASES["layer norm"]
    register_rule(kind)(case.rule)
    assert trace_symmetry(case.build(kind).to("meta"), vectors(2, 3)).dimension == 45


def test_values_of_modules_with_a_rule_have_names() -> None:
    case = CASES["layer norm"]
    symmetry = trace_symmetry(with_rule(case.build, case.rule)(), vectors(2, 3))
    twin = trace_symmetry(plain(case.build), vectors(2, 3))
    assert [*symmetry.taps] == [*twin.taps]


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses:UserWarning")
@pytest.mark.parametrize(
    "mean",
    [lambda w, v: (w.mT @ v) / w.sum(1)[..., None],
        lambda w, v: torch.einsum("bkq,bkd->bqd", w, v) / w.sum(1)[..., None]],
)  # fmt: skip
def test_means_by_exponentials_whose_axes_are_moved(mean: Callable[[Tensor, Tensor], Tensor]) -> None:
    """They pass what is added to the values, as softmaxes do."""
    symmetry = trace_symmetry(Joined(lambda s, a, b: s.c(mean((a @ a.mT).exp(), b))), vectors(2, 3))
    assert symmetry.shifts > 0


class RotatedByMatrices(nn.Module):
    """Attention with one head of 4 coordinates, rotated by matrices that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = linear(9, 4), linear(9, 4)
        angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.3])
        rows = [torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())]
        matrices = torch.cat([torch.cat([rows[0], -rows[1]], 2), torch.cat([rows[1], rows[0]], 2)], 1)
        self.register_buffer("matrices", matrices, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (torch.einsum("tij,btj->bti", self.matrices[: x.shape[1]].to(x), layer(x)) for layer in (self.q, self.k))
        return q @ k.mT


def test_matrices_that_no_state_dict_holds_rotate_planes() -> None:
    assert trace_symmetry(RotatedByMatrices(), vectors(2, 3)).structure.phases == 2
