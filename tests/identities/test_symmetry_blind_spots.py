"""What could hide a wrong rule from the self-test, and what could look like a wrong rule but is none.

Each network holds a module with a rule of the test's own. With a rule that allows too much, tracing has to fail; with
the right rule for the same module and the same example, it has to succeed.
"""

import copy
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, of, parameter, sequential
from symmetry_family_cases import EXACT, L, difference, evaluate
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.symmetry import register_rule, trace_symmetry

SINGLE = (1e-9, 1e-3)
BRAIN = (1e-4, 0.3)
# In single precision; what is wrong is off by a tenth.
SINGLE_LIMIT = 1e-3


class Bend(nn.Module):
    """A parabola through zero: units may change places, and nothing may be scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * x.square()


class Ranked(nn.Module):
    """Every unit has a factor of its own: units may be scaled, and none may move."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(1.0, x.shape[-1] + 1)


class Greatest(nn.Module):
    """The largest value of each neighbourhood: positive scales pass, signs do not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, stride=1, padding=1)


class Positive(nn.Module):
    """The positive part: a sign does not pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


def passed(**allowed: bool) -> Any:
    return lambda trace, module, value: trace.elementwise(value, **allowed)


# By module, a rule that allows too much, and the right one.
RULES: dict[type[nn.Module], tuple[Any, Any]] = {
    Bend: (passed(positive_scales=True), passed()),
    Ranked: (passed(positive_scales=True), lambda trace, module, value: trace.fix(value, "each has its own factor")),
    Greatest: (passed(positive_scales=True, signs=True), passed(positive_scales=True)),
    Positive: (passed(positive_scales=True, signs=True), passed(positive_scales=True)),
}


def register(*, wrong: bool) -> None:
    """Give the modules of this file rules, which either allow too much or are right."""
    for module, (generous, right) in RULES.items():
        register_rule(module)(generous if wrong else right)


def program(function: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Program(function, parts)


def edited(make: Callable[[], nn.Module], edit: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        network = make()
        with torch.no_grad():
            edit(network)
        return network

    return build


A, B = of(L, 5, 8), of(L, 8, 3)
PLAIN = sequential(A, nn.ReLU, Bend, B)
WITHOUT_BIAS = sequential(of(L, 5, 8, bias=False), nn.ReLU, Bend, of(L, 8, 3, bias=False))
PARTS = {"a": A, "bend": Bend, "b": B}
BOTH = {**PARTS, "c": A, "d": B}


def bent(s: Any, x: Tensor) -> Tensor:
    return s.b(s.bend(torch.relu(s.a(x))))


def straight(s: Any, x: Tensor) -> Tensor:
    return s.d(torch.relu(s.c(x)))


def masked(fill: float | None) -> Callable[[], nn.Module]:
    """Return a network whose last output is replaced by a constant, by default the smallest number there is."""

    def function(s: Any, x: Tensor) -> Any:
        y = bent(s, x)
        value = torch.finfo(y.dtype).min if fill is None else fill
        return y.masked_fill(torch.arange(3) == 2, value)

    return program(function, **PARTS)


def cast(dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return a network that computes in another precision inside."""

    def function(s: Any, x: Tensor) -> Any:
        h = s.bend(torch.relu(s.a(x)))
        return F.linear(h.to(dtype), s.b.weight.to(dtype), s.b.bias.to(dtype)).to(x.dtype)

    return program(function, **PARTS)


def standardised(s: Any, x: Tensor) -> Any:
    """Divide by the deviation over the batch, which a single sample does not have."""
    return bent(s, (x - x.mean(0)) / x.std(0))


X = of(torch.randn, 2, 5)
ONES = of(torch.ones, 2, 3, 8, 8)
TOKENS = of(torch.randint, 1, 10, (2, 4))

# The network, and an example that used to hide something.
HIDDEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "nothing is hidden": (PLAIN, X),
    "units dead at the example": (edited(PLAIN, lambda n: n[0].bias.fill_(-0.4)), of(torch.zeros, 2, 5)),
    "zeros": (WITHOUT_BIAS, of(torch.zeros, 2, 5)),
    "one zero": (WITHOUT_BIAS, of(torch.zeros, 1, 5)),
    "first sample is padding": (WITHOUT_BIAS, lambda: torch.cat([torch.zeros(1, 5), torch.randn(2, 5)])),
    "last sample is padding": (WITHOUT_BIAS, lambda: torch.cat([torch.randn(2, 5), torch.zeros(2, 5)])),
    "first steps are padding": (program(lambda s, x: bent(s, x)[:, 0], **{**PARTS, "a": of(L, 5, 8, bias=False)}),
        lambda: torch.cat([torch.zeros(2, 3, 5), torch.randn(2, 1, 5)], 1)),
    "image of ones before a maximum": (sequential(of(nn.Conv2d, 3, 8, 3), Greatest, of(nn.Conv2d, 8, 2, 1)), ONES),
    "image of zeros before a maximum": (sequential(of(nn.Conv2d, 3, 8, 3), Greatest, of(nn.Conv2d, 8, 2, 1)),
        of(torch.zeros, 1, 3, 8, 8)),
    "outputs masked by the smallest number": (masked(None), X),
    "outputs masked by minus infinity": (masked(-float("inf")), X),
    "outputs masked by NaN": (masked(float("nan")), X),
    "huge output beside": (program(lambda s, x: (1e12 * straight(s, x), bent(s, x)), **BOTH), X),
    "huge column beside": (program(lambda s, x: torch.cat([bent(s, x), 1e12 * straight(s, x)[:, :1]], 1), **BOTH), X),
    "huge step beside": (program(lambda s, x: torch.stack([bent(s, x), bent(s, x), 1e12 * straight(s, x)], 1), **BOTH),
        X),
    "tiny output beside": (program(lambda s, x: (straight(s, x), 1e-12 * bent(s, x)), **BOTH), X),
    "nested output": (program(lambda s, x: {"a": straight(s, x), "b": [None, (bent(s, x),)]}, **BOTH), X),
    "last layer starts at zero": (edited(PLAIN, lambda n: n[3].weight.zero_()), X),
    "all weights start at zero": (edited(PLAIN, lambda n: [w.zero_() for w in n.parameters()]), X),
    "gain starts at zero": (program(lambda s, x: s.b(torch.relu(s.c(x)) + s.gate * s.bend(torch.relu(s.a(x)))), **PARTS,
        c=A, gate=lambda: nn.Parameter(torch.zeros(8))), X),
    "tokens": (program(lambda s, i: s.b(s.bend(torch.relu(s.e(i)))), b=B, bend=Bend, e=of(nn.Embedding, 10, 8)),
        TOKENS),
    "padding tokens": (program(lambda s, i: s.b(s.bend(torch.relu(s.e(i)))), b=B, bend=Bend,
        e=of(nn.Embedding, 10, 8, padding_idx=0)), of(torch.zeros, 1, 4, dtype=torch.long)),
    "single precision inside": (cast(torch.float32), X),
    "half precision inside": (cast(torch.bfloat16), X),
    "one sample": (PLAIN, of(torch.randn, 1, 5)),
    "deviation over two samples": (program(standardised, **PARTS), X),
    "deviation over one sample": (program(standardised, **PARTS), of(torch.randn, 1, 5)),
    "inputs that have to be positive": (program(lambda s, x: bent(s, x.log()), **PARTS), of(torch.rand, 2, 5)),
    "inputs that have to be below one": (program(lambda s, x: bent(s, torch.logit(x)), **PARTS),
        lambda: 0.9 + 0.09 * torch.rand(2, 5)),
    "categories as floating point numbers": (program(lambda s, x: s.b(s.bend(torch.relu(s.a(x) + s.e(x[:, 0].long())))),
        **PARTS, e=of(nn.Embedding, 3, 8)), lambda: torch.cat([torch.tensor([[0.0], [2.0]]), torch.randn(2, 4)], 1)),
    "batch size that is written down": (program(lambda s, x: bent(s, x.reshape(2, 5)), **PARTS), X),
    **{f"two units, {layers} layers before": (sequential(of(L, 5, 2), *[nn.ReLU, of(L, 2, 2)] * layers, Ranked,
        of(L, 2, 3)), X) for layers in (0, 2, 5)},
    **{f"sign of one unit, {layers} layers before": (sequential(of(L, 5, 4), *[nn.Tanh, of(L, 4, 4)] * layers,
        of(L, 4, 1), Positive, of(L, 1, 3)), X) for layers in (0, 2, 5)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:std:UserWarning")
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.few(
    3, "units dead at the example", "outputs masked by NaN", "nested output", "categories as floating point numbers"
)
def test_rule_that_allows_too_much_is_found_and_the_right_one_raises_no_alarm(name: str) -> None:
    register(wrong=True)
    torch.manual_seed(0)
    make, example = HIDDEN[name]
    assert_refused(lambda: trace_symmetry(make(), example()), says="self-test", error=RuntimeError)
    register(wrong=False)
    torch.manual_seed(0)
    symmetry = trace_symmetry(make(), example())
    assert symmetry.worst_error <= symmetry.tolerance


def branching(s: Any, x: Tensor) -> Any:
    """Bend what is longer than three steps."""
    h = torch.relu(s.a(x))
    return s.b(s.bend(h) if x.shape[1] > 3 else h)


@pytest.mark.parametrize("order", [(2, 5), (5, 2), (3, 4)])
def test_self_test_runs_on_every_example(order: tuple[int, int]) -> None:
    torch.manual_seed(0)
    network = Program(branching, PARTS)
    one, two = (torch.randn(2, length, 5) for length in order)
    register(wrong=True)
    assert_refused(trace_symmetry, network, one, more_examples=[two], says="self-test", error=RuntimeError)
    register(wrong=False)
    symmetry = trace_symmetry(network, one, more_examples=[two])
    assert (symmetry.dimension, symmetry.groups[0].size) == (0, 8)


E1 = {"a": A, "b": B}
VALID: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "logarithm of zeros": (program(lambda s, x: s.b(torch.relu(s.a(x))).relu().log(), **E1), X, 8),
    # 9 more: what a softmax does not see of the last layer.
    "first sample is masked": (program(lambda s, x: s.b(torch.relu(s.a(x))).masked_fill(torch.arange(len(x))[:,
        None] == 0, -torch.inf).softmax(1), **E1), X, 17),
    "output that is zero": (program(lambda s, x: (s.b(torch.relu(s.a(x))), 0 * s.b(torch.relu(s.a(x)))), **E1), X, 8),
    "tiny outputs": (program(lambda s, x: 1e-30 * s.b(torch.relu(s.a(x))), **E1), X, 8),
    "huge outputs": (program(lambda s, x: 1e30 * s.b(torch.relu(s.a(x))), **E1), X, 8),
    # What is left of a difference of equal numbers is rounding.
    "output that is rounding": (program(lambda s, x: (lambda y: (y,
        (y - y.mean(1, keepdim=True)).mean(1)))(s.b(torch.relu(s.a(x)))), **E1), X, 8),
    "output that is a difference": (
        program(lambda s, x: (lambda y: (y, (3 * y - y) / 2 - y))(s.b(torch.relu(s.a(x)))), **E1), X, 8),
    "integers beside": (program(lambda s, x: (s.b(torch.relu(s.a(x))), s.b(torch.relu(s.a(x))).argmax(1)), **E1), X, 8),
    "truth values beside": (program(lambda s, x: (lambda y: (y, (y > 0).any(1)))(s.b(torch.relu(s.a(x)))), **E1), X, 8),
    "large offset": (program(lambda s, x: s.b(torch.relu(s.a(x))) + 1e4, **E1), X, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
@pytest.mark.few(6, "integers beside", "truth values beside")
def test_valid_network_raises_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    make, example, dimension = VALID[name]
    symmetry = trace_symmetry(make(), example())
    assert symmetry.dimension == dimension
    assert symmetry.worst_error <= symmetry.tolerance


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [(torch.float64, (1e-12, 1e-9)), (torch.float32, SINGLE), (torch.bfloat16, BRAIN), (torch.float16, (1e-6, 0.1))],
)
def test_tolerance_follows_the_lowest_precision_and_is_printed(dtype: torch.dtype, limits: tuple[float, float]) -> None:
    def function(s: Any, x: Tensor) -> Any:
        h = torch.relu(s.a(x)).to(dtype)
        if h.dtype != dtype:
            raise TypeError("this kernel takes one precision, so that its casts cannot be ignored")
        return F.linear(h, s.b.weight.to(dtype), s.b.bias.to(dtype)).to(x.dtype)

    torch.manual_seed(0)
    symmetry = trace_symmetry(program(function, **E1)(), torch.randn(2, 5))
    assert limits[0] <= symmetry.tolerance <= limits[1]
    assert symmetry.worst_error <= symmetry.tolerance
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", str(symmetry))]
    assert any(number == pytest.approx(symmetry.tolerance, rel=0.06) for number in numbers)


def test_network_without_a_finite_output_is_refused_as_nothing_can_be_tested() -> None:
    network = program(
        lambda s, x: s.b(torch.relu(s.a(x))).masked_fill(torch.ones(3).bool(), -torch.inf).softmax(1), **E1
    )()
    assert_refused(trace_symmetry, network, torch.randn(2, 5), says="no output of the network is finite")


# Things that a tracer meets and cannot know: it is right about them, or says in one sentence why not.


def cached(s: Any, x: Tensor) -> Any:
    if not hasattr(s, "kept"):
        s.kept = s.a.weight.t().clone()
    return s.b(torch.relu(x @ s.kept + s.a.bias))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def gradient(s: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(s.b(torch.tanh(s.a(x))).sum(), x)[0]


def cond(s: Any, x: Tensor) -> Any:
    h = s.a(x)
    return s.b(torch.cond(h.sum() > 0, lambda h: h.relu(), lambda h: h.tanh(), (h,)))


def causal(s: Any, x: Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return s.o((s.q(x) @ s.k(x).mT + mask).softmax(-1) @ s.v(x))


def ensemble(s: Any, x: Tensor) -> Any:
    return torch.vmap(lambda w, c: torch.relu(F.linear(x, w, c)))(s.w, s.v).mean(0) @ s.o


STRANGE: dict[str, Callable[[], nn.Module]] = {
    "torch.cond": program(cond, **E1),
    "cache of a weight": program(cached, **E1),
    "copy of a weight": edited(program(lambda s, x: s.b(torch.relu(F.linear(x, s.kept.to(x.dtype), s.a.bias))), **E1),
        lambda network: setattr(network, "kept", network.a.weight.clone())),
    "list of weights": edited(program(lambda s, x: s.b(torch.relu(F.linear(x, s.kept[0], s.a.bias))), **E1),
        lambda network: setattr(network, "kept", [network.a.weight])),
    "lock, which cannot be copied": edited(program(lambda s, x: s.b(torch.relu(s.a(x))), **E1),
        lambda network: setattr(network, "kept", threading.Lock())),
    "vmap over samples": program(lambda s, x: torch.vmap(lambda row: s.b(torch.relu(s.a(row))))(x), **E1),
    "vmap over members": program(ensemble, w=lambda: nn.Parameter(torch.randn(3, 8, 5)),
        v=lambda: nn.Parameter(torch.randn(3, 8)), o=lambda: nn.Parameter(torch.randn(8, 2))),
    "jacobian inside": program(lambda s, x: torch.func.vmap(torch.func.jacrev(s.a))(x).flatten(1), **E1),
    "gradient inside": program(gradient, **E1),
    "scripted network": lambda: torch.jit.script(nn.Sequential(L(5, 8), nn.ReLU(), L(8, 3))),
    "scripted part": lambda: nn.Sequential(L(5, 8), torch.jit.script(nn.Sequential(nn.ReLU(), L(8, 8))), L(8, 3)),
    "traced network": lambda: torch.jit.trace(nn.Sequential(L(5, 8), nn.ReLU(), L(8, 3)), torch.randn(2, 5)),
    "autograd function": program(lambda s, x: s.b(Doubled.apply(s.a(x))), **E1),
    "checkpoint": program(lambda s, x: s.b(torch.utils.checkpoint.checkpoint(lambda y: torch.relu(s.a(y)), x,
        use_reentrant=False)), **E1),
    "inference mode": program(lambda s, x: torch.inference_mode()(lambda: s.b(torch.relu(s.a(x))))(), **E1),
    "branch on a value": program(lambda s, x: s.b(s.a(x).relu() if x.sum() > 0 else s.a(x).tanh()), **E1),
    "item": program(lambda s, x: s.b(torch.relu(s.a(x)) * x.abs().max().item()), **E1),
    "list of values": program(lambda s, x: s.b(torch.relu(s.a(x)) * x.abs().sum(1).tolist()[0]), **E1),
    "numpy": program(lambda s, x: s.b(torch.relu(s.a(torch.from_numpy(x.numpy() * 2)))), **E1),
    "chosen samples": program(lambda s, x: s.b(torch.relu(s.a(x[x[:, 0] > -9]))), **E1),
    "nonzero": program(lambda s, x: s.b(torch.relu(s.a(x)))[x[:, 0].abs().nonzero()[:, 0]], **E1),
    "unique": program(lambda s, x: s.b(torch.relu(s.a(torch.unique(x, dim=0)))), **E1),
    "largest first": program(lambda s, x: s.b(torch.relu(s.a(x)).sort(1).values), **E1),
    "largest two": program(lambda s, x: s.c(torch.relu(s.a(x)).topk(2, 1).values), a=A, c=of(L, 2, 3)),
    "noise": program(lambda s, x: s.b(torch.relu(s.a(x)) + torch.randn(8)), **E1),
    "dropout that stays on": program(lambda s, x: s.b(F.dropout(torch.relu(s.a(x)), 0.5, training=True)), **E1),
    "spectrum": program(lambda s, x: s.b(torch.fft.fft(torch.relu(s.a(x))).abs()), **E1),
    "spectrum of the samples": program(lambda s, x: s.b(torch.fft.rfft(torch.relu(s.a(x)), dim=0).real), **E1),
    "sparse": program(lambda s, x: s.b(torch.relu(torch.sparse.mm(x.to_sparse(), s.a.weight.t()) + s.a.bias)), **E1),
    "constant kept as an attribute": edited(program(lambda s, x: s.b(torch.relu(s.a(x)) * s.kept), **E1),
        lambda network: setattr(network, "kept", torch.arange(1.0, 9))),
}  # fmt: skip


def assert_right(
    make: Callable[[], nn.Module], network: nn.Module, symmetry: Any, inputs: list[Any], limit: float
) -> None:
    """Check elements in memory, and in a fresh network after a round trip."""
    for seed in range(2):
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network)
        fresh = make().to(inputs[0].dtype).eval()
        fresh.load_state_dict(copy.deepcopy(moved.state_dict()))
        for other in (moved, fresh):
            for x in inputs:
                assert difference(evaluate(other, (x,)), evaluate(network, (x,))) < limit


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated", "ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.few(3)
def test_strange_network_is_right_or_refused_in_one_sentence(name: str) -> None:
    if name == "torch.cond" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        pytest.skip("without gradients torch.cond itself fails in older versions")
    torch.manual_seed(0)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return STRANGE[name]()

    network = make().eval()
    problem = None
    try:
        symmetry = trace_symmetry(network, torch.randn(4, 5))
        symmetry.act(symmetry.sample(), network)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
    if problem is None:
        assert_right(make, network, symmetry, [torch.randn(n, 5) for n in (4, 7)], SINGLE_LIMIT)
    else:
        message = str(problem)
        assert isinstance(problem, ValueError | TypeError) or "self-test" in message
        assert "\n" not in message
        assert 20 < len(message) < 500
        assert re.search(r"expected|instead|register_rule|remove|check|use ", message)
        assert not re.search(r"Traceback|FakeTensor|torch\._|functorch|<locals>|0x[0-9a-f]{6}|internal assert", message)
    # Whatever was found, the network computes what it did before.
    if name not in ("noise", "dropout that stays on"):
        inputs = (torch.randn(4, 5),)
        assert difference(evaluate(network, inputs), evaluate(make().eval(), inputs)) < SINGLE_LIMIT


def test_subsequent_mask_is_no_data() -> None:
    """The mask is made from the length alone, so that the network is traced, and right at other lengths."""
    torch.manual_seed(0)
    make = program(causal, q=of(L, 5, 4), k=of(L, 5, 4), v=of(L, 5, 4), o=of(L, 4, 2))
    network = make().double().eval()
    symmetry = trace_symmetry(network, torch.randn(2, 5, 5, dtype=torch.float64))
    # Matrices of queries and keys, and of values; the keys' bias, which the softmax does not see, and the values',
    # which the last one takes up.
    assert symmetry.dimension == 2 * 4**2 + 4 + 4
    assert_right(make, network, symmetry, [torch.randn(3, t, 5, dtype=torch.float64) for t in (1, 5, 8)], EXACT)


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_causal_mask_of_a_transformer_of_torch_is_no_data(is_causal: bool | None) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        parts = {"e": lambda: nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "i": A, "o": B}

        def function(s: Any, x: Tensor) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return s.o(s.e(s.i(x), mask=mask, is_causal=is_causal))

        return Program(function, parts)

    torch.manual_seed(0)
    network = make().double().eval()
    symmetry = trace_symmetry(network, torch.randn(2, 5, 5, dtype=torch.float64))
    # Matrices of queries and keys, and of values, in 2 heads of width 4; scales of hidden units and of the last gain.
    # The stream that queries and keys read tilts, as the layer norm behind it does not see multiples of ones.
    linear = 2 * 2 * 4**2 + 16 + 8 + 8
    # Biases: of the keys, which the softmax does not see, and those that later ones take up: of the values, of both
    # layer norms, and of the first layer. Multiples of ones, which layer norms do not see: of columns and biases before
    # the two, and of rows behind them.
    shifts = (8 + 8 + 2 * 8 + 8) + (8 + 1) + (16 + 1) + (16 + 3)
    assert symmetry.dimension == linear + shifts
    if is_causal is not False:
        assert_right(make, network, symmetry, [torch.randn(3, t, 5, dtype=torch.float64) for t in (1, 5, 8)], EXACT)


@pytest.mark.parametrize("pooled", [False, True])
def test_class_token_beside_the_mean_of_rows_behind_registers(pooled: bool) -> None:
    """A row of a sequence has units of two kinds: its place, and its channels, on which it is joined with others."""

    def function(s: Any, x: Tensor) -> Any:
        h = torch.cat([s.cls.expand(len(x), 1, 6), s.registers.expand(len(x), 2, 6), s.e(x)], 1)
        h = ((s.q(h) @ s.k(h).mT).softmax(-1) @ s.v(h)).tanh()
        return s.b(torch.cat([h[:, :3].mean(1) if pooled else h[:, 0], h[:, 3:].mean(1)], 1))

    parts = {"e": of(L, 8, 6), **{name: of(L, 6, 6) for name in "qkv"}, "b": of(L, 12, 13)}
    make = program(function, cls=parameter(1, 1, 6), registers=parameter(1, 2, 6), **parts)
    torch.manual_seed(0)
    network = make().double().eval()
    symmetry = trace_symmetry(network, torch.randn(2, 4, 8, dtype=torch.float64))
    # Matrices of the stream, and of queries and keys; the keys' bias, which the softmax does not see, and the first
    # layer's with both parameters, which the other biases take off.
    assert symmetry.dimension == 2 * 6**2 + 6 + 6
    # Units of the hyperbolic tangent and the registers are permuted: behind these stand as many rows as the input has.
    assert math.isclose(symmetry.log10_permutations, math.log10(math.factorial(6) * 2))
    assert_right(make, network, symmetry, [torch.randn(3, t, 8, dtype=torch.float64) for t in (1, 4, 7)], EXACT)
