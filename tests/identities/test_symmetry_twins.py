"""Networks with the same names and shapes that compute something else: an element is refused, or right for them.

For each pair it is shown first whether the elements of the one are symmetries of the other, without asking: what an
element makes of the tensors is loaded into the twin. Where they are not, the twin has to be refused.
"""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Fixed, Program, of, one_in
from symmetry_family_cases import L, difference, evaluate, randomise
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim import swa_utils

from lightning_sym.merging import merge
from lightning_sym.symmetry import (
    Symmetry,
    activation_matching,
    architecture,
    balance_heads,
    canonicalize,
    local_dimension,
    orbit_distance,
    orbit_tangents,
    trace_symmetry,
    weight_matching,
)
from lightning_sym.symmetry import base as symmetry_base

KEPT, BROKEN = 1e-9, 1e-6
VECTOR, SEQUENCE, IMAGE = (4, 5), (4, 3, 8), (4, 3, 6, 6)


def between(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of a network with these modules between two linear layers."""
    return lambda: nn.Sequential(L(5, 8), *(layer() for layer in layers), L(8, 2))


def image(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 8, 3), *(layer() for layer in layers), nn.Conv2d(8, 2, 1))


def kept(tensor: Tensor, persistent: bool) -> Any:
    """Return a part of a program that becomes a buffer, saved or not."""
    return tensor if persistent else Fixed(lambda: tensor)


def cut_linear(s: Any, x: Tensor) -> Tensor:
    return torch.relu(F.linear(x, s.linear.weight * s.mask, s.linear.bias))


def masked(mask: Tensor, *, persistent: bool = True) -> nn.Module:
    """Return a linear layer of which some weights are cut."""
    return Program(cut_linear, {"linear": of(L, 8, 8), "mask": kept(mask, persistent)})


def route(s: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:, s.order[:4]].relu(), x[:, s.order[4:]].sigmoid()], 1)


def routed(order: list[int], *, persistent: bool = True) -> nn.Module:
    """Return a module in which half of the units, chosen by a buffer, pass one activation and half another one."""
    return Program(route, {"order": kept(torch.tensor(order), persistent)})


class Power(nn.Module):
    """A power of what is positive; its repr tells which one."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() ** self.power

    def extra_repr(self) -> str:
        return f"power={self.power}"


class Silent(nn.Module):
    """An activation chosen by a plain attribute, of which no repr tells."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch, self.activation)(x) if isinstance(self.activation, str) else self.activation(x)


class Hidden(nn.Module):
    """A function of its input and of something that it keeps where no repr, buffer or public number tells."""

    def __init__(self, function: Callable[..., Tensor], kept: Any) -> None:
        super().__init__()
        self._function = function
        self._kept = kept

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self._kept)


def leaky(x: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(x, slope)


def leaky_of(read: Callable[[Any], float]) -> Callable[[Any], Callable[[], nn.Module]]:
    """Return a maker of leaky units that read their slope off something."""
    return lambda kept: of(Hidden, lambda x, kept: F.leaky_relu(x, read(kept)), kept)


class Tanh(nn.Sequential):
    """Applies tanh behind each module that it holds."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = torch.tanh(module(x))
        return x


class Calls(nn.Module):
    """Applies what it holds under a name that no repr tells."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Named:
    """An activation by its name, one level or more below what a module holds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, x: Tensor) -> Tensor:
        return getattr(torch, self.name)(x)

    __call__ = run


class Slotted:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: Tensor) -> Tensor:
        return getattr(torch, self.name)(x)


@dataclass
class Inner:
    act: Named


@dataclass
class Outer:
    inner: Inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner.act.run(x)


def closure(name: str) -> Callable[[Tensor], Tensor]:
    held = Inner(Named(name))
    return lambda h: held.act.run(h)


def default(name: str) -> Callable[[Tensor], Tensor]:
    return (lambda h, a="relu": getattr(torch, a)(h)) if name == "relu" else (lambda h, a="tanh": getattr(torch, a)(h))


def keyword_default(name: str) -> Callable[[Tensor], Tensor]:
    def run(h: Tensor, *, a: Any = Inner(Named(name))) -> Tensor:  # noqa: B008
        return a.act.run(h)

    return run


def of_a_class(name: str) -> Callable[[Tensor], Tensor]:
    class Local:
        kind = Named(name)

        def __call__(self, h: Tensor) -> Tensor:
            return self.kind.run(h)

    return Local()


def in_a_table(name: str) -> Callable[[Tensor], Tensor]:
    table = {"a": [{"b": (Named(name),)}]}
    return lambda h: table["a"][0]["b"][0].run(h)


def as_attribute(name: str) -> Callable[[Tensor], Tensor]:
    def run(h: Tensor) -> Tensor:
        return run.kind.run(h)  # type: ignore[attr-defined, no-any-return]

    run.kind = Named(name)  # type: ignore[attr-defined]
    return run


# What makes of "relu" or "tanh" a function that hides which it is.
HIDDEN: dict[str, Callable[[str], Callable[[Tensor], Tensor]]] = {
    "dataclass in a dataclass": lambda name: Outer(Inner(Named(name))),
    "bound method": lambda name: Named(name).run,
    "object that is called": Named,
    "object with slots": Slotted,
    "default of a lambda": default,
    "default of a keyword": keyword_default,
    "closure over an object": closure,
    "attribute of a class": of_a_class,
    "dictionary in a list in a closure": in_a_table,
    "attribute of a function": as_attribute,
    "partial of a method": lambda name: functools.partial(Named.run, Named(name)),
}


def hooked() -> nn.Module:
    network = between(nn.Identity)()
    network[1].register_forward_hook(lambda module, inputs, output: torch.tanh(output))
    return network


ITEM, FIELD, NESTED = leaky_of(lambda d: d["slope"]), leaky_of(lambda o: o.slope), leaky_of(lambda n: n[0][0])


class Heads(nn.Module):
    """Attention whose number of heads is a plain attribute."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = L(8, 8), L(8, 8), L(8, 8), L(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def multiply(s: Any, x: Tensor) -> Tensor:
    return torch.relu(x) * s.factors


def scaled(factors: list[float], *, persistent: bool) -> nn.Module:
    return Program(multiply, {"factors": kept(torch.tensor(factors), persistent)})


class Counting(nn.Module):
    """Counts the steps of training, in an integer that evaluation does not read."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(steps))
        self.register_buffer("seen", torch.tensor(steps > 0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return torch.relu(x)


def attend_to_itself(s: Any, x: Tensor) -> Tensor:
    return s.attention(x, x, x, need_weights=False)[0]


def attention(heads: int) -> nn.Module:
    return Program(attend_to_itself, {"attention": of(nn.MultiheadAttention, 8, heads, batch_first=True)})


def tied(tie: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        network = nn.Sequential(L(5, 8), nn.ReLU(), L(8, 8), nn.ReLU(), L(8, 8), nn.ReLU(), L(8, 2))
        if tie:
            network[4].weight = network[2].weight
        return network

    return make


def encoder(nhead: int = 2, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(8, nhead, 6, batch_first=True, **options)


def pruned() -> nn.Module:
    network = between(nn.ReLU)()
    prune.random_unstructured(network[0], "weight", 0.5)
    return network


def normed() -> nn.Module:
    network = between(nn.ReLU)()
    parametrizations.weight_norm(network[0])
    return network


def cut() -> Tensor:
    return torch.arange(64).reshape(8, 8) % 3 > 0


FULL = torch.ones(8, 8, dtype=torch.bool)
STRAIGHT, CROSSED = [0, 1, 2, 3, 4, 5, 6, 7], [4, 1, 2, 7, 0, 5, 6, 3]
ALIKE, APART = [2.0] * 8, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
N = nn.BatchNorm1d

# The network, its twin, the shape of the inputs.
Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]
REFUSED: dict[str, Pair] = {
    "pruned": (between(of(masked, FULL), nn.ReLU), between(of(masked, cut()), nn.ReLU), VECTOR),
    "dense, of a pruned one": (between(of(masked, torch.arange(64).reshape(8, 8) % 8 < 4)), between(of(masked, cut())),
        VECTOR),
    "pruned, mask not saved": (between(of(masked, FULL, persistent=False)),
        between(of(masked, cut(), persistent=False)), VECTOR),
    "heads of torch's attention": (of(attention, 1), of(attention, 4), SEQUENCE),
    "heads in a plain attribute": (of(Heads, 1), of(Heads, 4), SEQUENCE),
    "more heads": (of(Heads, 4), of(Heads, 2), SEQUENCE),
    "heads of an encoder": (encoder(nhead=1), encoder(nhead=4), SEQUENCE),
    "norm first": (encoder(), encoder(norm_first=True), SEQUENCE),
    "activation of an encoder": (encoder(), encoder(activation="gelu"), SEQUENCE),
    "slope 1": (between(of(nn.LeakyReLU, 1.0)), between(of(nn.LeakyReLU, 0.1)), VECTOR),
    "slope -1": (between(of(nn.LeakyReLU, -1.0)), between(of(nn.LeakyReLU, 0.1)), VECTOR),
    "groups of a norm": (between(of(nn.GroupNorm, 1, 8)), between(of(nn.GroupNorm, 4, 8)), VECTOR),
    "eps of a group norm": (between(of(nn.GroupNorm, 2, 8, eps=0)), between(of(nn.GroupNorm, 2, 8, eps=0.1)), VECTOR),
    "eps of a layer norm": (between(of(nn.LayerNorm, 8, eps=0)), between(of(nn.LayerNorm, 8, eps=0.1)), VECTOR),
    "eps of a batch norm": (between(of(N, 8)), between(of(N, 8, eps=0.1)), VECTOR),
    "eps of an instance norm": (image(of(nn.InstanceNorm2d, 8, eps=0, affine=True)),
        image(of(nn.InstanceNorm2d, 8, eps=0.1, affine=True)), IMAGE),
    "order of routing": (between(of(routed, STRAIGHT)), between(of(routed, CROSSED)), VECTOR),
    "order of routing, not saved": (between(of(routed, STRAIGHT, persistent=False)),
        between(of(routed, CROSSED, persistent=False)), VECTOR),
    "range of hardtanh": (between(of(nn.Hardtanh, -1, 1)), between(of(nn.Hardtanh, -1, 3)), VECTOR),
    "threshold": (between(of(nn.Threshold, 0.0, 0.0)), between(of(nn.Threshold, 0.5, 0.0)), VECTOR),
    "value of a threshold": (between(of(nn.Threshold, 0.0, 0.0)), between(of(nn.Threshold, 0.0, 1.0)), VECTOR),
    "groups of a shuffle": (image(of(nn.ChannelShuffle, 1), of(nn.GroupNorm, 2, 8)),
        image(of(nn.ChannelShuffle, 4), of(nn.GroupNorm, 2, 8)), IMAGE),
    "padding by a constant": (image(nn.ReLU, of(nn.ConstantPad2d, 1, 0.0)),
        image(nn.ReLU, of(nn.ConstantPad2d, 1, 1.0)), IMAGE),
    "constant in the repr": (between(of(Power, 1.0)), between(of(Power, 2.0)), VECTOR),
    "name of an activation": (between(of(Silent, "relu")), between(of(Silent, "tanh")), VECTOR),
    "activation that is a function": (between(of(Silent, F.relu)), between(of(Silent, F.gelu)), VECTOR),
    "buffer that is not saved": (between(of(scaled, ALIKE, persistent=False)),
        between(of(scaled, APART, persistent=False)), VECTOR),
    "shared weights": (tied(False), tied(True), VECTOR),
    "private attribute": (between(of(Hidden, leaky, 1.0)), between(of(Hidden, leaky, 0.1)), VECTOR),
    "number in a dictionary": (between(ITEM({"slope": 1.0})), between(ITEM({"slope": 0.1})), VECTOR),
    "number in nested lists": (between(NESTED([[1.0]])), between(NESTED([[0.1]])), VECTOR),
    "configuration": (between(FIELD(SimpleNamespace(slope=1.0))), between(FIELD(SimpleNamespace(slope=0.1))), VECTOR),
    "tensor that is no buffer": (between(of(Hidden, torch.mul, torch.ones(8))),
        between(of(Hidden, torch.mul, torch.arange(8.0))), VECTOR),
    "function with one argument held": (between(of(Silent, functools.partial(F.leaky_relu, negative_slope=1.0))),
        between(of(Silent, functools.partial(F.leaky_relu, negative_slope=0.1))), VECTOR),
    "function without a name": (between(of(Silent, lambda x: x.relu())), between(of(Silent, lambda x: x.tanh())),
        VECTOR),
    "class of a module that holds others": (lambda: nn.Sequential(nn.Sequential(L(5, 8)), L(8, 2)),
        lambda: nn.Sequential(Tanh(L(5, 8)), L(8, 2)), VECTOR),
    "hook": (between(nn.Identity), hooked, VECTOR),
}  # fmt: skip

# The state has other names, so that nothing of the one could be loaded into the other.
OTHER_TENSORS: dict[str, Pair] = {
    "no running statistics": (between(of(N, 8)), between(of(N, 8, track_running_stats=False)), VECTOR),
    "no gain": (between(of(N, 8)), between(of(N, 8, affine=False)), VECTOR),
    "wider": (between(nn.ReLU), lambda: nn.Sequential(L(5, 9), nn.ReLU(), L(9, 2)), VECTOR),
    "torch's pruning": (between(nn.ReLU), pruned, VECTOR),
    "weight norm": (between(nn.ReLU), normed, VECTOR),
    "no bias": (between(nn.ReLU), lambda: nn.Sequential(L(5, 8, bias=False), nn.ReLU(), L(8, 2)), VECTOR),
    "buffer that is saved": (between(of(scaled, ALIKE, persistent=False)),
        between(of(scaled, ALIKE, persistent=True)), VECTOR),
}  # fmt: skip

# Refusing is allowed, being wrong is not: other architectures, most of them with the same symmetry.
SIMILAR: dict[str, Pair] = {
    "eps of an RMS norm": (between(of(nn.RMSNorm, 8, eps=0)), between(of(nn.RMSNorm, 8, eps=0.1)), VECTOR),
    "blocks of a softmax": (between(of(nn.Unflatten, 1, (2, 4)), of(nn.Softmax, -1), nn.Flatten),
        between(of(nn.Unflatten, 1, (4, 2)), of(nn.Softmax, -1), nn.Flatten), VECTOR),
    "axis of a softmax": (between(of(nn.Unflatten, 1, (4, 2)), of(nn.Softmax, 1), nn.Flatten),
        between(of(nn.Unflatten, 1, (4, 2)), of(nn.Softmax, 2), nn.Flatten), VECTOR),
    "alpha of ELU": (between(nn.ELU), between(of(nn.ELU, 2.0)), VECTOR),
    "beta of softplus": (between(nn.Softplus), between(of(nn.Softplus, 3.0)), VECTOR),
    "form of GELU": (between(nn.GELU), between(of(nn.GELU, approximate="tanh")), VECTOR),
    "mode of an upsampling": (image(nn.ReLU, of(nn.Upsample, scale_factor=2)),
        image(nn.ReLU, of(nn.Upsample, scale_factor=2, mode="bilinear")), IMAGE),
    "stride": (image(nn.ReLU), lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 2, 1)), IMAGE),
    "padding": (image(nn.ReLU), lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)),
        IMAGE),
    "dilation": (image(nn.ReLU), lambda: nn.Sequential(nn.Conv2d(3, 8, 3, dilation=2), nn.ReLU(), nn.Conv2d(8, 2, 1)),
        IMAGE),
    "weights no longer shared": (tied(True), tied(False), VECTOR),
    "slopes below 1": (between(of(nn.LeakyReLU, 0.2)), between(of(nn.LeakyReLU, 0.1)), VECTOR),
    "size of a pooling": (image(nn.ReLU, of(nn.MaxPool2d, 2)), image(nn.ReLU, of(nn.MaxPool2d, 3)), IMAGE),
}  # fmt: skip

ACCEPTED: dict[str, Pair] = {
    "equal mask": (between(of(masked, cut())), between(of(masked, cut())), VECTOR),
    "mask that is a state": (between(of(masked, FULL.float())), between(of(masked, torch.rand(8, 8))), VECTOR),
    "equal order": (between(of(routed, CROSSED)), between(of(routed, CROSSED)), VECTOR),
    "equal factors": (between(of(scaled, APART, persistent=False)), between(of(scaled, APART, persistent=False)),
        VECTOR),
    "factors that are a state": (between(of(scaled, APART, persistent=True)),
        between(of(scaled, ALIKE, persistent=True)), VECTOR),
    "rate of dropout": (between(nn.ReLU, of(nn.Dropout, 0.1)), between(nn.ReLU, of(nn.Dropout, 0.7)), VECTOR),
    "momentum of a batch norm": (between(of(N, 8)), between(of(N, 8, momentum=None)), VECTOR),
    "integers that evaluation does not read": (between(of(Counting, 0)), between(of(Counting, 1000)), VECTOR),
    "slope that is a weight": (between(nn.PReLU), between(of(nn.PReLU, init=0.7)), VECTOR),
}  # fmt: skip


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a network with random weights and statistics, in evaluation mode."""
    torch.manual_seed(seed)
    return randomise(make().double())


def worst_change(network: nn.Module, twin: nn.Module, inputs: Tensor) -> float:
    """Return how far elements of the one change the function of the other, if they are put in by force."""
    symmetry = trace_symmetry(network, inputs)
    tensors = {key: value for key, value in twin.state_dict().items() if value.is_floating_point()}
    worst = 0.0
    for seed in range(4):
        element = symmetry.sample(torch.Generator().manual_seed(seed))
        other = copy.deepcopy(twin)
        other.load_state_dict(symmetry.act_on(element, tensors), strict=False)
        worst = max(worst, difference(evaluate(other, (inputs,)), evaluate(twin, (inputs,))))
    return worst


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and 20 < len(message) < 600


@pytest.mark.parametrize("name", one_in(2, REFUSED))
@pytest.mark.long
def test_twin_of_another_function_is_refused(name: str) -> None:
    make, other, shape = REFUSED[name]
    network, twin = made(make, 0), made(other, 1)
    inputs = torch.randn(shape, dtype=torch.float64)
    assert worst_change(network, twin, inputs) > BROKEN
    symmetry = trace_symmetry(network, inputs)
    for refused in (lambda: symmetry.require(twin), lambda: symmetry.act(symmetry.sample(), twin)):
        with pytest.raises(ValueError, match=None if name == "shared weights" else "check") as error:
            refused()
        assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_twin_with_other_tensors_is_refused(name: str) -> None:
    make, other, shape = OTHER_TENSORS[name]
    symmetry = trace_symmetry(made(make, 0), torch.randn(shape, dtype=torch.float64))
    for refused in (symmetry.require, lambda twin: symmetry.act(symmetry.sample(), twin)):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            refused(made(other, 1))
        assert is_one_sentence(str(error.value))


def refusal(act: Callable[[], Any]) -> str | None:
    """Return what a ValueError says, or None."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_architecture_is_refused_or_its_function_kept(name: str) -> None:
    make, other, shape = SIMILAR[name]
    network, twin = made(make, 0), made(other, 1)
    inputs = torch.randn(shape, dtype=torch.float64)
    symmetry = trace_symmetry(network, inputs)
    message = refusal(lambda: symmetry.require(twin))
    if message is not None:
        assert is_one_sentence(message)
        return
    for seed in range(3):
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), twin)
        assert difference(evaluate(moved, (inputs,)), evaluate(twin, (inputs,))) < KEPT


def assert_kept(network: nn.Module, twin: nn.Module, inputs: Tensor, limit: float = KEPT) -> None:
    symmetry = trace_symmetry(network, inputs.double())
    symmetry.require(twin)
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(2)), twin)
    before, after = (evaluate(copy.deepcopy(net).eval(), (inputs,)) for net in (twin, moved))
    assert difference(after, before) < limit
    assert symmetry.dimension == 0 or any(
        not torch.equal(new, old)
        for new, old in zip(moved.state_dict().values(), twin.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("name", ACCEPTED)
def test_twin_of_the_same_architecture_is_accepted(name: str) -> None:
    make, other, shape = ACCEPTED[name]
    assert_kept(made(make, 0), made(other, 1), torch.randn(shape, dtype=torch.float64))


# Of each pair one network, in turn the first and the second: most differ in a number only.
@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "which"), [(name, index % 2) for index, name in enumerate(REFUSED)])
def test_the_same_architecture_with_other_weights_is_accepted(name: str, which: int) -> None:
    make = REFUSED[name][which]
    assert_kept(made(make, 0), made(make, 1), torch.randn(REFUSED[name][2], dtype=torch.float64))


def test_trained_twin_is_accepted() -> None:
    """Training changes weights, running statistics and the count of batches, and leaves gradients behind."""
    network = made(between(of(N, 8), nn.ReLU, nn.Dropout), 0)
    twin = made(between(of(N, 8), nn.ReLU, nn.Dropout), 1).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        twin(torch.randn(6, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    assert int(twin[1].num_batches_tracked) == 3
    assert_kept(network, twin, torch.randn(VECTOR, dtype=torch.float64))


def test_frozen_float32_twin_is_accepted() -> None:
    network, twin = made(between(of(N, 8), nn.ReLU), 0), made(between(of(N, 8), nn.ReLU), 1).float()
    twin.requires_grad_(False)
    assert_kept(network, twin, torch.randn(VECTOR), limit=1e-4)


def test_what_a_fingerprint_cannot_see_is_found_by_check() -> None:
    """A constant inside a function is no attribute of a module: `check` on the twin tells."""
    parts = {"a": of(L, 5, 8), "b": of(L, 8, 2)}
    one = made(lambda: Program(lambda s, x: s.b(F.leaky_relu(s.a(x), 1.0)), parts), 0)
    inputs = torch.randn(VECTOR, dtype=torch.float64)
    symmetry = trace_symmetry(one, inputs)
    assert symmetry.check(one, inputs, samples=3) < 1e-10

    def other(s: Any, x: Tensor) -> Any:
        return s.b(F.leaky_relu(s.a(x), 0.1))

    twin = made(lambda: Program(other, parts), 1)
    if refusal(lambda: symmetry.require(twin)) is None:
        assert symmetry.check(twin, inputs, samples=3) > 1e-3


def hiding(kind: str, name: str, seed: int) -> Any:
    return made(between(of(Calls, HIDDEN[kind](name))), seed)


ENTRIES: dict[str, Callable[[Symmetry, nn.Module, nn.Module, Tensor], Any]] = {
    "act": lambda s, net, twin, x: s.act(s.sample(), twin),
    "act in place": lambda s, net, twin, x: s.act(s.sample(), twin, inplace=True),
    "on_activations": lambda s, net, twin, x: s.on_activations(s.sample(), "1", twin),
    "canonicalize": lambda s, net, twin, x: canonicalize(s, twin),
    "weight_matching": lambda s, net, twin, x: weight_matching(s, net, twin),
    "weight_matching, reference": lambda s, net, twin, x: weight_matching(s, twin, net),
    "activation_matching": lambda s, net, twin, x: activation_matching(s, net, twin, [(x,)]),
    "orbit_distance": lambda s, net, twin, x: orbit_distance(s, net, twin),
    "merge": lambda s, net, twin, x: merge(s, [net, twin]),
    "local_dimension": lambda s, net, twin, x: local_dimension(s, twin, x),
    "orbit_tangents": lambda s, net, twin, x: orbit_tangents(s, twin),
    "a move": lambda s, net, twin, x: balance_heads(s, twin),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_twin_of_a_hidden_function_is_refused_and_the_same_function_is_not(kind: str) -> None:
    network, twin, x = hiding(kind, "relu", 0), hiding(kind, "tanh", 1), torch.randn(VECTOR, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    before = copy.deepcopy(twin.state_dict())
    with pytest.raises(ValueError, match="another function") as error:
        symmetry.act(symmetry.sample(), twin, inplace=True)
    assert is_one_sentence(str(error.value))
    assert all(torch.equal(now, before[name]) for name, now in twin.state_dict().items())
    same, other_input = hiding(kind, "relu", 2), torch.randn(9, 5, dtype=torch.float64)
    fresh = hiding(kind, "relu", 3)
    fresh.load_state_dict(symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), same).state_dict())
    assert difference(evaluate(fresh, (other_input,)), evaluate(same, (other_input,))) < KEPT


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_refuses_a_hidden_twin(entry: str) -> None:
    kind, x = "closure over an object", torch.randn(VECTOR, dtype=torch.float64)
    network, twin = hiding(kind, "relu", 0), hiding(kind, "tanh", 1)
    symmetry = trace_symmetry(network, x)
    with pytest.raises(ValueError, match="another function"):
        ENTRIES[entry](symmetry, network, twin, x)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every time that networks that are met are run."""
    found: list[int] = []
    run = symmetry_base.largest_change

    def counted(*arguments: Any, **keywords: Any) -> Any:
        found.append(1)
        return run(*arguments, **keywords)

    monkeypatch.setattr(symmetry_base, "largest_change", counted)
    return found


def test_a_network_is_run_once_and_again_when_what_it_holds_changes(runs: list[int]) -> None:
    kind, x = "dataclass in a dataclass", torch.randn(VECTOR, dtype=torch.float64)
    network, other = hiding(kind, "relu", 0), hiding(kind, "relu", 1)
    symmetry = trace_symmetry(network, x)
    symmetry.act(symmetry.sample(), network)
    assert len(runs) == 0  # the self-test has run it
    for _ in range(3):
        symmetry.act(symmetry.sample(), symmetry.act(symmetry.sample(), other))
    canonicalize(symmetry, other)
    weight_matching(symmetry, network, other)
    other.load_state_dict(network.state_dict())
    other.train()
    symmetry.act(symmetry.sample(), other, inplace=True)
    assert len(runs) == 1
    for held in (network, other):  # the one that was traced, too
        held[1].function.inner.act.name = "tanh"
        with pytest.raises(ValueError, match="another function"):
            symmetry.act(symmetry.sample(), held)
        held[1].function.inner.act.name = "relu"
        symmetry.act(symmetry.sample(), held)


def test_a_method_of_its_class_that_changes_is_seen() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    x = torch.randn(VECTOR, dtype=torch.float64)
    network = made(between(Late), 0)
    symmetry = trace_symmetry(network, x)
    Late.forward = lambda self, x: x.tanh()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="another function"):
        symmetry.act(symmetry.sample(), network)


def test_check_false_runs_nothing(runs: list[int]) -> None:
    x = torch.randn(VECTOR, dtype=torch.float64)
    network, twin = made(between(nn.ReLU), 0), made(between(nn.ReLU), 1)
    symmetry = trace_symmetry(network, x)
    symmetry.act(symmetry.sample(), twin, check=False)
    assert not symmetry._met.get(twin)
    symmetry.require(twin, check=False)
    symmetry.act(symmetry.sample(), twin)
    unchecked = trace_symmetry(network, x, check=False)
    unchecked.act(unchecked.sample(), made(between(nn.ReLU), 2))
    assert runs == []
    with torch.device("meta"):
        weightless = between(nn.ReLU)()
    symmetry.act(symmetry.sample(), weightless)
    assert runs == []
    assert sum("not checked" in note for note in symmetry.notes) == 1
    weightless.to_empty(device="cpu")
    symmetry.act(symmetry.sample(), weightless)
    assert runs == [1]


def unusual(edit: str, dtype: torch.dtype) -> nn.Module:
    """Return a network with weights on which a self-test is blind, or overflows."""
    network = made(between(of(N, 8), nn.ReLU), 1)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if edit == "NaN" and tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif edit == "one NaN" and name == "0.weight":
                tensor[0, 0] = torch.nan
            elif edit == "infinite" and "running" not in name and tensor.is_floating_point():
                tensor.fill_(torch.inf)
            elif edit == "zeros" and tensor.is_floating_point():
                tensor.zero_()
            elif edit in ("1e38", "1e-30") and tensor.is_floating_point():
                tensor.mul_(float(edit)).clamp_(-3e38, 3e38)
    return network.to(dtype)


@pytest.mark.parametrize("edit", ["NaN", "one NaN", "infinite", "zeros", "1e38", "1e-30", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.few(4)
def test_a_network_of_any_weights_is_accepted(edit: str, dtype: torch.dtype) -> None:
    symmetry = trace_symmetry(made(between(of(N, 8), nn.ReLU), 0), torch.randn(VECTOR, dtype=torch.float64))
    symmetry.act(symmetry.sample(scale=0.1), unusual(edit, dtype))


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e30])
def test_weights_at_which_twins_are_alike_do_not_hide_one(size: float) -> None:
    kind, x = "bound method", torch.randn(VECTOR, dtype=torch.float64)
    symmetry = trace_symmetry(hiding(kind, "relu", 0), x)
    twin = hiding(kind, "tanh", 1)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(size)
    with pytest.raises(ValueError, match="another function"):
        symmetry.act(symmetry.sample(), twin)


def test_a_symmetry_that_was_copied_meets_networks_anew(runs: list[int]) -> None:
    network = made(between(nn.ReLU), 0)
    symmetry = copy.deepcopy(trace_symmetry(network, torch.randn(VECTOR, dtype=torch.float64)))
    symmetry.act(symmetry.sample(), network)
    assert runs == [1]


def with_buffer(edit: Callable[[Tensor], Any] = lambda gain: gain, *, persistent: bool = True) -> nn.Module:
    torch.manual_seed(0)
    gain = edit(torch.rand(8) * 0.9 + 0.1)
    parts = {"a": nn.Linear(5, 8), "b": nn.Linear(8, 2), "gain": kept(gain, persistent)}
    return Program(lambda s, x: s.b(torch.relu(s.a(x)) * s.gain), parts).eval()


CASTS = {
    "half": lambda network: network.half(),
    "bfloat16": lambda network: network.bfloat16(),
    "half and back": lambda network: network.half().float(),
    "bfloat16 and back": lambda network: network.bfloat16().float(),
    "half, then bfloat16": lambda network: network.half().bfloat16(),
    "double": lambda network: network.double(),
    "bfloat16, then double": lambda network: network.bfloat16().double(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_constant_may_be_rounded_by_a_cast_and_nothing_else(cast: str) -> None:
    x, edits = torch.randn(VECTOR), (lambda gain: gain * 1.01, lambda gain: gain + F.one_hot(torch.tensor(3), 8) * 0.01)
    symmetry = trace_symmetry(with_buffer(persistent=False), x)
    symmetry.act(symmetry.sample(), CASTS[cast](with_buffer(persistent=False)))
    cast_first = trace_symmetry(CASTS[cast](with_buffer(persistent=False)), x)
    cast_first.act(cast_first.sample(), with_buffer(persistent=False))
    for edit in edits:
        with pytest.raises(ValueError, match="the constant buffer gain holds other values"):
            symmetry.act(symmetry.sample(), CASTS[cast](with_buffer(edit, persistent=False)))
        with pytest.raises(ValueError, match="the constant buffer gain holds other values"):
            cast_first.act(cast_first.sample(), with_buffer(edit, persistent=False))


def test_numbers_beyond_the_range_of_half_precision_are_rounded_too() -> None:
    numbers = torch.tensor([-torch.finfo(torch.float32).max, -1e9, 1e-9, 3e-6, 0.0, 65000.0])
    for one in (numbers, numbers.double(), numbers.bfloat16(), numbers.half()):
        for two in (numbers, numbers.double(), numbers.bfloat16(), numbers.half()):
            assert architecture.same_but_for_rounding(one, two)
            assert not architecture.same_but_for_rounding(one, two * 1.05 + 0.1)


def test_llama_in_half_precision_has_the_symmetry_of_its_float32_twin() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=14, **sizes)).eval()
    symmetry = trace_symmetry(network, torch.randint(14, (2, 5)))
    for dtype in (torch.float16, torch.bfloat16):
        cast = copy.deepcopy(network).to(dtype)
        moved = symmetry.act(symmetry.sample(), cast)
        assert moved.lm_head.weight.dtype == dtype
        cast.model.rotary_emb.inv_freq.mul_(1.01)
        with pytest.raises(ValueError, match="inv_freq holds other values"):
            symmetry.act(symmetry.sample(), cast)


def held(network: nn.Module) -> nn.Module:
    return Program(lambda s, x: s.inner(x), {"inner": network})


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "module.": (nn.DataParallel, "network.module"),
    "_orig_mod.": (functools.partial(torch.compile, backend="eager"), "network._orig_mod"),
    "inner.": (held, "network.inner"),
    "inner.module.": (lambda network: held(swa_utils.AveragedModel(network)), "network.inner.module"),
    "1.": (lambda network: nn.Sequential(nn.Identity(), network), "network.get_submodule('1')"),
}


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_a_wrapper_is_refused_with_what_to_pass_instead(prefix: str) -> None:
    (wrap, inside), x = WRAPPERS[prefix], torch.randn(VECTOR, dtype=torch.float64)
    network, wrapper = made(between(nn.ReLU), 0), wrap(made(between(nn.ReLU), 1))
    symmetry = trace_symmetry(network, x)
    with pytest.raises(ValueError, match=re.escape(f"its names have the prefix {prefix!r}; pass {inside}, the")):
        symmetry.act(symmetry.sample(), wrapper)
    if prefix in ("inner.", "1."):
        outer = trace_symmetry(wrapper, x)
        with pytest.raises(ValueError, match=re.escape(f"have the prefix {prefix!r}; trace {inside}, the")):
            outer.act(outer.sample(), network)
