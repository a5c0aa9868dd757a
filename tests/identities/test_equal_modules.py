"""Elements exchange modules with equal operations: experts, heads, members of ensembles (docs/theory/tracing.md, 4)."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Program, of, parameter
from orbit_laws import assert_a_group_acts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.curvature import canonical_operator
from lightning_sym.landscape import removable_units
from lightning_sym.reports.symmetry import SymmetryMeter
from lightning_sym.symmetry import (
    Symmetry,
    activation_matching,
    canonicalize,
    center_writers,
    fold_norm_gains,
    orbit_distance,
    orbit_tangents,
    trace_symmetry,
    weight_matching,
)

pytestmark = pytest.mark.measured

Forward = Callable[[Any, Tensor], Tensor]


class Experts(nn.Module):
    """Three networks with a hidden layer of 4 units, a gate and a layer of 3 outputs; `forward` combines them."""

    def __init__(self, combine: Forward, activation: type[nn.Module] = nn.Tanh, *, gated: bool = True) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(9, 4), activation(), nn.Linear(4, 6)) for _ in range(3))
        if gated:
            self.gate = nn.Linear(9, 3)
        self.out = nn.Linear(6, 3)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x)


class Head(nn.Module):
    """A head of causal attention, as written in many lectures."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 2, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(5, 5)))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * 2**-0.5
        scores = scores.masked_fill(self.tril[:count, :count] == 0, -math.inf)
        return scores.softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(3))
        self.out = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


class Parts(nn.Module):
    """Three parts with a reader; `forward` combines them."""

    def __init__(self, part: Callable[[], nn.Module], out: nn.Module, combine: Forward) -> None:
        super().__init__()
        self.parts, self.out, self.combine = nn.ModuleList(part() for _ in range(3)), out, combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x)


class GraphHead(nn.Module):
    """A head of graph attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2, bias=False)
        self.source, self.target = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        scores = nn.functional.leaky_relu((h @ self.source)[:, :, None] + (h @ self.target)[:, None], 0.2)
        return nn.functional.elu(scores.softmax(-1) @ h)


def deep(norm: type[nn.Module] = nn.Identity, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 3), norm(3), activation(), nn.Linear(3, 5))


def convolutions(norm: type[nn.Module] = nn.Identity, pool: nn.Module | None = None) -> nn.Module:
    second = nn.Conv2d(2, 3, 3, padding=1)
    return nn.Sequential(nn.Conv2d(3, 2, 1), norm(2), nn.ReLU(), pool or nn.Identity(), second, nn.ReLU())


def added(s: Any, x: Tensor) -> Tensor:
    return s.out(sum(part(x) for part in s.parts).relu())  # type: ignore[no-any-return, attr-defined]


def side_by_side(s: Any, x: Tensor) -> Tensor:
    return s.out(torch.cat([part(x).relu() for part in s.parts], 1)).flatten(2).mean(-1)  # type: ignore[no-any-return]


def in_a_row(s: Any, x: Tensor) -> Tensor:
    return s.out(torch.cat([part(x) for part in s.parts], -1).tanh())  # type: ignore[no-any-return]


def mean(s: Any, x: Tensor) -> Tensor:
    return torch.stack([part(x) for part in s.parts]).mean(0)


def mean_and_variance(s: Any, x: Tensor) -> Tensor:
    """Run all parts twice."""
    return torch.cat([mean(s, x), torch.stack([part(x) for part in s.parts]).var(0)], -1)


def least(s: Any, x: Tensor) -> Tensor:
    one, two, three = (part(x) for part in s.parts)
    return torch.min(torch.minimum(one, two), three)


def largest(s: Any, x: Tensor) -> Tensor:
    return s.out(torch.stack([part(x) for part in s.parts], 1).amax(1))  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two convolutional branches, which are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 4, 1)) for _ in range(2)
        )
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.left(x) + self.right(x)).relu().mean((2, 3)))


def top_two(gates: Tensor) -> Tensor:
    values, places = gates.topk(2, -1)
    return torch.zeros_like(gates).scatter(-1, places, values)


def shares(s: Any, x: Tensor) -> Tensor:
    return s.gate(x).softmax(-1)  # type: ignore[no-any-return]


def added_in_place(s: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 6)
    for at, expert in enumerate(s.experts):
        total += shares(s, x)[:, at].unsqueeze(-1) * expert(x)
    return s.out(total.relu())  # type: ignore[no-any-return]


def compared(s: Any, x: Tensor) -> Tensor:
    values, places = s.gate(x).topk(2, -1)
    own = ((values.softmax(-1) * (places == at)).sum(-1, keepdim=True) for at in range(3))
    return s.out(sum(share * e(x) for share, e in zip(own, s.experts, strict=True)).relu())  # type: ignore[no-any-return]


def with_indicators(s: Any, x: Tensor) -> Tensor:
    """As in Mixtral."""
    values, places = shares(s, x).topk(2, -1)
    mask = F.one_hot(places, 3).to(x)
    own = ((values * mask[..., at]).sum(-1, keepdim=True) for at in range(3))
    return s.out(sum(share * e(x) for share, e in zip(own, s.experts, strict=True)).relu())  # type: ignore[no-any-return]


GATED: dict[str, Forward] = {
    "slices": lambda s, x: s.out(sum(shares(s, x)[:, i : i + 1] * e(x) for i, e in enumerate(s.experts)).relu()),
    "unbound": lambda s, x: s.out(
        sum(g[:, None] * e(x) for g, e in zip(shares(s, x).unbind(-1), s.experts, strict=True)).relu()
    ),
    "stacked": lambda s, x: s.out((torch.stack([e(x) for e in s.experts], -1) * shares(s, x)[:, None]).sum(-1).relu()),
    "einsum": lambda s, x: s.out(
        torch.einsum("be,bec->bc", shares(s, x), torch.stack([e(x) for e in s.experts], 1)).relu()
    ),
    "bmm": lambda s, x: s.out(torch.bmm(shares(s, x)[:, None], torch.stack([e(x) for e in s.experts], 1))[:, 0].relu()),
    "in place": added_in_place,
    "index": lambda s, x: s.out(sum(shares(s, x)[:, [i]] * e(x) for i, e in enumerate(s.experts)).relu()),
    "index_select": lambda s, x: s.out(
        sum(shares(s, x).index_select(1, torch.tensor([i])) * e(x) for i, e in enumerate(s.experts)).relu()
    ),
    "compared places": compared,
    "indicators": with_indicators,
    "two largest": lambda s, x: s.out(
        sum(top_two(shares(s, x))[:, i : i + 1] * e(x) for i, e in enumerate(s.experts)).relu()
    ),
}
ADDED: dict[str, Forward] = {
    "sum": lambda s, x: s.out(sum(e(x) for e in s.experts).relu()),
    "mean of a stack": lambda s, x: s.out(torch.stack([e(x) for e in s.experts]).mean(0).relu()),
    "sum of a concatenation": lambda s, x: s.out(torch.cat([e(x)[None] for e in s.experts]).sum(0).relu()),
    "sum of a stack": lambda s, x: s.out(torch.stack([e(x) for e in s.experts], 1).sum(1).relu()),
    "quotient": lambda s, x: s.out(((s.experts[0](x) + s.experts[1](x) + s.experts[2](x)) / 3).relu()),
}


def factorials(*counts: int) -> float:
    return sum(math.log10(math.factorial(count)) for count in counts)


def traced(network: nn.Module, *inputs: Tensor) -> tuple[nn.Module, tuple[Tensor, ...], Symmetry]:
    network, inputs = network.double().eval(), tuple(own.double() for own in inputs)
    return network, inputs, trace_symmetry(network, inputs)


@pytest.mark.parametrize("spelling", GATED)
@pytest.mark.few(4)
def test_experts_with_a_gate(spelling: str) -> None:
    network, _, symmetry = traced(Experts(GATED[spelling]), torch.randn(7, 9))
    # The units of each expert, the experts, and the units that `out` reads.
    assert symmetry.log10_permutations == pytest.approx(factorials(4, 4, 4, 3, 6))
    assert symmetry.dimension == symmetry.nullity
    assert "experts.{0,1,2}.0.weight" in symmetry.tensors(network)


PARTS: dict[str, tuple[Callable[[], nn.Module], Sequence[int], float]] = {
    "batch norms": (lambda: Parts(lambda: deep(nn.BatchNorm1d), nn.Linear(5, 2), added), (9, 7), factorials(9, 3, 5)),
    "layer norms": (lambda: Parts(lambda: deep(nn.LayerNorm), nn.Linear(5, 2), added), (9, 7),
        factorials(3, 3, 3, 3, 3, 5)),
    "side by side": (lambda: Parts(lambda: deep(activation=nn.Tanh), nn.Linear(15, 2), in_a_row), (9, 7),
        factorials(3, 3, 3, 5, 5, 5, 3)),
    "convolutions side by side": (lambda: Parts(convolutions, nn.Conv2d(9, 4, 1), side_by_side), (3, 3, 5, 5),
        factorials(2, 2, 2, 3, 3, 3, 3)),
    "with batch norms": (lambda: Parts(lambda: convolutions(nn.BatchNorm2d), nn.Conv2d(9, 4, 1), side_by_side),
        (3, 3, 5, 5), factorials(2, 2, 2, 3, 3, 3, 3)),
    "with pooling": (lambda: Parts(lambda: convolutions(pool=nn.MaxPool2d(2)), nn.Conv2d(9, 4, 1), side_by_side),
        (3, 3, 6, 6), factorials(2, 2, 2, 3, 3, 3, 3)),
    "with means": (lambda: Parts(lambda: convolutions(pool=nn.AvgPool2d(3, 1, 1)), nn.Conv2d(9, 4, 1), side_by_side),
        (3, 3, 5, 5), factorials(2, 2, 2, 3, 3, 3, 3)),
    "graph attention": (lambda: Parts(GraphHead, nn.Linear(6, 2), in_a_row), (2, 4, 6), factorials(2, 2, 2, 3)),
    "mean of graph attention": (lambda: Parts(GraphHead, nn.Identity(), mean), (2, 4, 6), factorials(3)),
    "mean and variance": (lambda: Parts(lambda: deep(activation=nn.Tanh), nn.Identity(), mean_and_variance), (9, 7),
        factorials(3, 3, 3, 3)),
    "least": (lambda: Parts(lambda: deep(activation=nn.Tanh), nn.Identity(), least), (9, 7), factorials(3, 3, 3, 3)),
    "largest of a stack": (lambda: Parts(lambda: deep(activation=nn.Tanh), nn.Linear(5, 2), largest), (9, 7),
        factorials(3, 3, 3, 3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.few(3)
def test_branches(case: str) -> None:
    make, shape, permutations = PARTS[case]
    network, (inputs,), symmetry = traced(make(), torch.randn(*shape))
    assert symmetry.log10_permutations == pytest.approx(permutations)
    assert symmetry.dimension == symmetry.nullity
    assert symmetry.notes == ()
    one, two = (symmetry.sample(generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    moved = symmetry.act(one, network)
    assert torch.allclose(moved(inputs), network(inputs), atol=1e-10)
    assert apart(symmetry.act(two, moved), symmetry.act(symmetry.compose(two, one), network)) < 1e-8
    assert apart(symmetry.act(weight_matching(symmetry, network, moved).element, moved), network) < 1e-7


@pytest.mark.parametrize("gate", [torch.relu, torch.neg])
def test_gates_take_the_scales_of_experts(gate: Callable[[Tensor], Tensor]) -> None:
    def combine(s: Any, x: Tensor) -> Tensor:
        gates = gate(s.gate(x))
        return s.out(sum(gates[:, at : at + 1] * expert(x) for at, expert in enumerate(s.experts)).relu())  # type: ignore[no-any-return]

    _, _, symmetry = traced(Experts(combine), torch.randn(60, 9))
    assert symmetry.log10_permutations == pytest.approx(factorials(4, 4, 4, 3, 6))
    assert symmetry.dimension == symmetry.nullity
    assert symmetry.notes == ()


@pytest.mark.parametrize("spelling", ADDED)
@pytest.mark.few(4, "mean of a stack")
def test_added_experts_have_common_units(spelling: str) -> None:
    _, _, symmetry = traced(Experts(ADDED[spelling], gated=False), torch.randn(7, 9))
    # All hidden units, the biases of the experts, of which only the sum counts, and the units that `out` reads.
    assert symmetry.log10_permutations == pytest.approx(factorials(12, 3, 6))


LEAST: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "min": lambda own: torch.min(own[0], torch.min(own[1], own[2])),
    "stack": lambda own: torch.stack(own).amin(0),
    "last axis": lambda own: torch.stack(own, -1).min(-1).values,
    "concatenation": lambda own: torch.cat([y[None] for y in own]).amin(0),
}


@pytest.mark.parametrize("spelling", LEAST)
@pytest.mark.few(2)
def test_the_least_of_several_networks(spelling: str) -> None:
    """As the critics of reinforcement learning."""
    network = Experts(lambda s, x: s.out(LEAST[spelling]([e(x) for e in s.experts]).tanh()), gated=False)
    _, _, symmetry = traced(network, torch.randn(7, 9))
    assert symmetry.log10_permutations == pytest.approx(factorials(4, 4, 4, 3, 6))


WEIGHED: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "loop": lambda g, own: sum(g[:, i : i + 1] * y for i, y in enumerate(own)),  # type: ignore[dict-item, misc]
    "stack": lambda g, own: (g[..., None] * torch.stack(own, 1)).sum(1),
}


@pytest.mark.parametrize("spelling", WEIGHED)
def test_experts_of_several_gates(spelling: str) -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        own = [e(x) for e in s.experts]
        parts = ((s.gate, s.out), (s.other, s.last))
        return torch.cat([out(WEIGHED[spelling](gate(x).softmax(-1), own).tanh()) for gate, out in parts], -1)

    gates = {"gate": of(nn.Linear, 9, 3), "other": of(nn.Linear, 9, 3), "last": of(nn.Linear, 6, 2)}
    network = Experts(run, nn.Tanh, gated=False)
    for name, make in gates.items():
        setattr(network, name, make())
    _, _, symmetry = traced(network, torch.randn(7, 9))
    assert symmetry.log10_permutations == pytest.approx(factorials(4, 4, 4, 3, 6))
    assert symmetry.dimension == symmetry.nullity


def test_parallel_layers_exchange_everything() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.one(x) + self.two(x)))  # type: ignore[no-any-return]

    _, _, symmetry = traced(Sum(), torch.randn(7, 5))
    assert symmetry.dimension == symmetry.nullity == 28
    assert symmetry.notes == ()


def test_modules_keep_their_places_on_request() -> None:
    network = Experts(GATED["slices"])
    symmetry = trace_symmetry(network, torch.randn(7, 9), exchange=False)
    assert symmetry.log10_permutations == pytest.approx(factorials(4, 4, 4, 6))
    assert "experts.0.0" in symmetry.taps
    assert set(symmetry.tensors(network)) == set(network.state_dict())


def test_concatenated_outputs_are_told_apart() -> None:
    """Experts whose outputs are all returned cannot be exchanged."""
    network = Experts(lambda s, x: s.out(torch.stack([e(x) for e in s.experts])), gated=False)
    _, _, symmetry = traced(network, torch.randn(7, 9))
    assert symmetry.log10_permutations == pytest.approx(factorials(4, 4, 4))
    assert not symmetry.structure.charts.stacks


def test_weights_with_other_readers_stay() -> None:
    def combine(s: Any, x: Tensor) -> Tensor:
        return s.out(sum(e(x) for e in s.experts).relu()) + s.experts[0][0].bias.sum()  # type: ignore[no-any-return]

    network = Experts(combine, gated=False)
    _, _, symmetry = traced(network, torch.randn(7, 9))
    assert not symmetry.structure.charts.stacks


CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[int], float]] = {
    "gated experts": (lambda: Experts(GATED["slices"]), (7, 9), factorials(4, 4, 4, 3, 6)),
    "heads": (Heads, (2, 4, 8), factorials(3)),
    "convolutions": (Pair, (2, 3, 5, 5), factorials(4, 4, 2)),
}


def apart(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
def test_elements_of_exchanged_modules(case: str, tmp_path: Path) -> None:
    make, shape, permutations = CASES[case]
    network, (inputs,), symmetry = traced(make(), torch.randn(*shape))
    assert symmetry.log10_permutations == pytest.approx(permutations)
    assert symmetry.dimension == symmetry.nullity
    one, two = (symmetry.sample(generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    moved = symmetry.act(one, network)
    assert torch.allclose(moved(inputs), network(inputs), atol=1e-12)
    assert apart(symmetry.act(two, moved), symmetry.act(symmetry.compose(two, one), network)) < 1e-10
    assert apart(symmetry.act(symmetry.inverse(one), moved), network) < 1e-10
    symmetry.save(one, tmp_path / "element.safetensors")
    assert apart(symmetry.act(symmetry.load(tmp_path / "element.safetensors"), network), moved) == 0

    found = weight_matching(symmetry, network, moved)
    assert apart(symmetry.act(found.element, moved), network) < 1e-8
    assert orbit_distance(symmetry, network, moved).upper < 1e-8
    forms = [canonicalize(symmetry, own) for own in (network, moved)]
    assert apart(*(form.network for form in forms)) < 1e-8

    save_file(network.state_dict(), tmp_path / "old.safetensors")
    symmetry.act_on_files(one, tmp_path / "old.safetensors", tmp_path / "new.safetensors")
    written = copy.deepcopy(network)
    written.load_state_dict(load_file(tmp_path / "new.safetensors"))
    assert apart(written, moved) == 0


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_optimisers_follow_exchanged_modules(optimiser: type[Any]) -> None:
    network, (inputs,), symmetry = traced(Experts(GATED["slices"], nn.ReLU), torch.randn(7, 9))
    options = {"momentum": 0.9} if optimiser is torch.optim.SGD else {}
    state = optimiser(network.parameters(), lr=0.0, **options)
    network(inputs).square().sum().backward()
    state.step()
    element = symmetry.sample(generator=torch.Generator().manual_seed(1), shifts=False)
    symmetry.act(element, network, inplace=True, optimizer=state)
    network.zero_grad()
    network(inputs).square().sum().backward()
    key, factor = ("momentum_buffer", 1.0) if options else ("exp_avg", 0.1)
    for own in network.parameters():
        assert own.grad is not None
        assert torch.allclose(state.state[own][key], factor * own.grad, atol=1e-10)


def with_temperatures(s: Any, x: Tensor) -> Tensor:
    heads = zip(s.heads, (s.t, s.u), strict=True)
    return s.out(torch.cat([(t * h.query(x) @ h.key(x).mT).softmax(-1) @ h.value(x) for h, t in heads], -1))  # type: ignore[no-any-return]


# Networks with parameters without axes: temperatures of heads, which elements exchange, and a gain, which they scale.
NUMBERS: dict[str, tuple[Forward, dict[str, Any]]] = {
    "temperatures": (with_temperatures, {"heads": lambda: nn.ModuleList(Head() for _ in range(2)),
        "out": of(nn.Linear, 4, 3), "t": parameter(), "u": parameter()}),
    "gain": (lambda s, x: s.out(s.t * torch.relu(s.a(x))), {"a": of(nn.Linear, 8, 4), "out": of(nn.Linear, 4, 3),
        "t": parameter()}),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_averages_of_single_numbers_follow(name: str) -> None:
    network, (inputs,), symmetry = traced(Program(*NUMBERS[name]), torch.randn(2, 4, 8))
    state = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9)
    network(inputs).square().sum().backward()
    state.step()
    before = network.t.item()  # type: ignore[operator, union-attr]
    generator = torch.Generator().manual_seed(4)
    symmetry.act(symmetry.sample(generator, mixing=False, shifts=False), network, inplace=True, optimizer=state)
    assert before != network.t.item()  # type: ignore[operator, union-attr]
    network.zero_grad()
    network(inputs).square().sum().backward()
    for own in network.parameters():
        assert own.grad is not None
        assert torch.allclose(state.state[own]["momentum_buffer"], own.grad, atol=1e-10)


def test_an_optimiser_of_some_members_is_refused() -> None:
    network, (inputs,), symmetry = traced(Experts(GATED["slices"]), torch.randn(7, 9))
    network.experts[1].requires_grad_(False)  # type: ignore[index, union-attr]
    state = torch.optim.SGD((own for own in network.parameters() if own.requires_grad), lr=0.1, momentum=0.9)
    network(inputs).square().sum().backward()
    state.step()
    with pytest.raises(ValueError, match=r"the optimiser holds no momentum_buffer of experts\.1"):
        symmetry.act(symmetry.sample(), network, inplace=True, optimizer=state)


def test_one_member_of_a_stack_is_not_enough() -> None:
    network, _, symmetry = traced(Experts(GATED["slices"]), torch.randn(7, 9))
    some = {name: own for name, own in network.state_dict().items() if not name.startswith("experts.1")}
    with pytest.raises(ValueError, match=r"elements exchange .*, and experts\.1\.2\.bias is not given; expected all"):
        symmetry.act_on(symmetry.sample(), some)


def test_the_permutation_spec_names_the_network_s_tensors() -> None:
    network, _, symmetry = traced(Heads(), torch.randn(2, 4, 8))
    spec = symmetry.permutation_spec()
    state = network.state_dict()
    assert all(len(axes) == state[name].ndim for name, axes in spec.axes_to_perm.items())
    assert all("exchange=False" in reason for reason in spec.left_out.values())


def test_activations_of_exchanged_modules_have_no_names() -> None:
    network, (inputs,), symmetry = traced(Heads(), torch.randn(2, 4, 8))
    with pytest.raises(ValueError, match="exchange=False"):
        activation_matching(symmetry, network, network, [inputs])


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_heads_with_equal_integer_masks(kind: torch.dtype) -> None:
    network = Heads()
    for head in network.heads:
        head.tril = head.tril.to(kind)
    network, (inputs,), symmetry = traced(network, torch.randn(2, 4, 8))
    assert symmetry.log10_permutations == pytest.approx(factorials(3))
    moved = symmetry.act(symmetry.sample(), network)
    assert torch.allclose(moved(inputs), network(inputs), atol=1e-12)
    for at in range(3):
        other = copy.deepcopy(moved)
        other.get_buffer(f"heads.{at}.tril").fill_(1)
        with pytest.raises(ValueError, match=r"the constant buffer heads\.\d\.tril holds other values"):
            symmetry.act(symmetry.sample(), other)


@pytest.mark.parametrize("persistent", [True, False])
def test_modules_with_other_constants_stay(persistent: bool) -> None:
    class Part(nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 6)
            numbers = torch.arange(5).roll(at) if persistent else torch.arange(5.0) + at
            self.register_buffer("numbers", numbers, persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, self.numbers] if persistent else x * self.numbers
            return self.two(torch.tanh(self.one(x)))  # type: ignore[no-any-return]

    class Sum(nn.Module):
        def __init__(self, shifts: Sequence[int]) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Part(at) for at in shifts)

        def forward(self, x: Tensor) -> Tensor:
            return sum(part(x) for part in self.parts)  # type: ignore[return-value]

    for shifts, permutations in (((1, 1), factorials(8, 2)), ((1, 2), factorials(4, 4))):
        network, (inputs,), symmetry = traced(Sum(shifts), torch.randn(7, 5))
        assert symmetry.log10_permutations == pytest.approx(permutations)
        assert torch.allclose(symmetry.act(symmetry.sample(), network)(inputs), network(inputs), atol=1e-12)


def test_tangents_come_in_the_order_of_the_parameters() -> None:
    network, (inputs,), symmetry = traced(Experts(GATED["slices"], nn.ReLU), torch.randn(20, 9))
    tangents = orbit_tangents(symmetry, network)
    assert tangents.names == tuple(name for name, _ in network.named_parameters())
    network(inputs).square().sum().backward()
    gradient = torch.cat([own.grad.flatten() for own in network.parameters() if own.grad is not None])
    assert float(tangents.along(gradient).abs().max()) < 1e-12 * float(gradient.abs().max())
    data = inputs, torch.zeros(20, 3, dtype=torch.float64)
    operator, across, _ = canonical_operator(symmetry, network, data, nn.functional.mse_loss)
    assert across.dimension == operator.size - symmetry.dimension


def test_norms_of_exchanged_modules_are_not_folded() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 6)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return sum(part(x) for part in self.parts)  # type: ignore[return-value]

    network, inputs, symmetry = traced(Sum(), torch.randn(7, 5))
    assert symmetry.exchanged_norms
    for move in (center_writers, fold_norm_gains):
        with pytest.raises(ValueError, match=r"elements exchange .* parts\.[01]\.1.*exchange=False"):
            move(symmetry, network)
        move(trace_symmetry(network, inputs, exchange=False), network)


def test_units_of_exchanged_modules_can_be_removed() -> None:
    network, (inputs,), symmetry = traced(Experts(GATED["slices"], nn.ReLU), torch.randn(20, 9))
    units = removable_units(network, inputs)
    assert {f"experts.{at}.0" for at in range(3)} <= units.sizes.keys()
    with pytest.raises(ValueError, match="elements exchange their modules"):
        removable_units(network, inputs, symmetry=symmetry)


def test_nothing_is_conserved_if_an_exchanged_module_is_frozen() -> None:
    network = Experts(GATED["slices"], nn.ReLU)
    assert SymmetryMeter(network, torch.randn(7, 9)).kinds["experts.{0,1,2}.0"].conserved
    network.experts[1].requires_grad_(False)
    assert not SymmetryMeter(network, torch.randn(7, 9)).kinds["experts.{0,1,2}.0"].conserved


def test_all_other_sets_are_exchanged_beside_one_that_cannot_be() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gated = [nn.Sequential(nn.Linear(3, 4), nn.GLU(), nn.Linear(2, 3)) for _ in range(2)]
            others = [nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)) for _ in range(10)]
            self.parts = nn.ModuleList([*gated, *others])

        def forward(self, x: Tensor) -> Tensor:
            for at in range(0, 12, 2):
                x = torch.tanh(self.parts[at](x) + self.parts[at + 1](x))
            return x

    network = Sets()
    _, _, symmetry = traced(network, torch.randn(7, 3))
    assert len(symmetry.structure.charts.stacks) == 5 * 4


def test_elements_compose_where_branches_are_added() -> None:
    """The branches share translations that an exchange would not carry along: they keep their places."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b, self.last = nn.Linear(7, 4), nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 9)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(torch.tanh((self.a(h) + self.b(h)) / 2))

    torch.manual_seed(0)
    network, x = Added().double(), torch.randn(40, 7, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert symmetry.dimension == symmetry.nullity == 45
    assert_a_group_acts(symmetry, network, 1e-12, x)


def test_translations_are_left_out_where_they_do_not_compose() -> None:
    """Hyper-connections: matrices mix streams, and biases behind a weight per stream do not follow."""

    class Connected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 4), nn.Linear(4, 5)
            self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(2)) for size in ((4, 3), (3, 4)))
            shapes = {"mix": (2, 2), "into": (2,), "out": (2,)}
            for name, shape in shapes.items():
                self.register_module(name, nn.ParameterList(torch.randn(shape) for _ in range(2)))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.stack([self.first(x)] * 2, -2)
            for mix, into, out, up, down in zip(self.mix, self.into, self.out, self.up, self.down, strict=True):
                y = down(torch.tanh(up((into[:, None] * h).sum(-2))))
                h = mix @ h + out[:, None] * y[..., None, :]
            return self.last(h.sum(-2))

    torch.manual_seed(0)
    network, x = Connected().double(), torch.randn(30, 7, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert symmetry.notes[-1].endswith("are left out: the product of two elements with them is no element")
    assert symmetry.shifts == 2
    assert 0 < symmetry.dimension < symmetry.nullity
    assert_a_group_acts(symmetry, network, 1e-12, x)
