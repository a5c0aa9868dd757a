"""Tracing: bad input, users' own rules, what is left alone, batch norm, and optimisers' state."""

import copy
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_sym._checks import UnfitInputsError
from lightning_sym.symmetry import Symmetry, register_rule, trace_symmetry, weight_matching
from lightning_sym.symmetry.described import joined

pytestmark = pytest.mark.measured

L, C = nn.Linear, nn.Conv2d
X = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))


def mlp(width: int = 8, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(L(5, width), activation(), L(width, 3))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def program(function: Any, **parts: Any) -> nn.Module:
    return Program(function, parts)


@functools.lru_cache
def ramp(size: int) -> Tensor:
    return torch.arange(size) / size


def remembered(function: Any) -> Any:
    """As libraries write it: a decorator around a cache."""
    cached = functools.lru_cache(function)
    return functools.wraps(function)(lambda *arguments: cached(*arguments))


class Remembering(nn.Module):
    """Keeps what it computed from the size of its input in caches of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = L(5, 8), L(8, 3)

    @functools.lru_cache  # noqa: B019
    def bias(self, size: int) -> Tensor:
        return torch.ones(size)

    @remembered
    def scale(self, size: int) -> Tensor:
        return 2 * torch.ones(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x + ramp(x.shape[-1]) * self.scale(5) + self.bias(5))))


def test_caches_of_functions_hold_nothing_of_the_trace() -> None:
    network = Remembering()
    symmetry = trace_symmetry(network, X)
    assert symmetry.dimension == 8
    assert type(network(X).detach()) is Tensor
    assert not ramp.cache_info().currsize or type(ramp(5)) is Tensor


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line to be named
            return torch.relu(x)
        return x.relu()


class ScaledReLU(nn.Module):
    """Parameters, and a branch that depends on values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.weight * torch.relu(x)
        return torch.relu(x) * self.weight


def snapshot(network: nn.Module) -> Any:
    """Everything that tracing must leave alone."""
    tensors = {name: (id(t), type(t), t._version) for name, t in network.state_dict(keep_vars=True).items()}
    values = {name: t.detach().clone() for name, t in network.state_dict().items()}
    rest = [
        (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(module.__dict__))
        for name, module in network.named_modules(remove_duplicate=False)
    ]
    return tensors, rest, values


def assert_unchanged(network: nn.Module, before: Any) -> None:
    after = snapshot(network)
    assert after[:2] == before[:2]
    assert all(torch.equal(after[2][name], value) for name, value in before[2].items())


# Bad input.


@functools.cache
def perceptron() -> Symmetry:
    return trace_symmetry(mlp(), X)


def sampled(*args: Any, **kwargs: Any) -> Any:
    return perceptron().sample(*args, **kwargs)


def acted_on(network: Any) -> Any:
    return perceptron().act(perceptron().identity(), network)


def holding(name: str, value: float) -> nn.Module:
    network = nn.Sequential(L(5, 8), nn.BatchNorm1d(8), nn.ReLU(), L(8, 3))
    network.state_dict()[name].view(-1)[0] = value
    return network


def odd(tensor: Tensor) -> nn.Module:
    part = nn.Parameter(tensor, requires_grad=tensor.is_complex())
    return program(lambda s, x: s.net(x), net=mlp(), odd=part)


# Wide enough that two draws never agree.
NOISY = program(lambda s, x: s.b(F.dropout(s.a(x))), a=L(5, 500), b=L(500, 3))


@pytest.mark.parametrize(
    "refusal",
    [
        refused(trace_symmetry, X, mlp(), says="network of trace_symmetry must be of type Module", error=TypeError),
        *[refused(trace_symmetry, mlp(), nothing, says="must be a tensor", error=TypeError) for nothing in ("text",
            None, (), [1.0, 2.0], {"x": 1})],
        refused(trace_symmetry, mlp(), torch.empty(0, 5), says="empty"),
        refused(trace_symmetry, mlp(), torch.empty(2, 5, device="meta"), says="has no values (on meta)"),
        refused(trace_symmetry, mlp(), torch.randn(2, 6), says="does not run on the example input",
            error=UnfitInputsError),
        refused(trace_symmetry, odd(torch.ones(8) + 0j), X, says="odd has dtype torch.complex64", error=TypeError),
        refused(trace_symmetry, odd(torch.arange(8)), X, says="odd has dtype torch.int64", error=TypeError),
        *[refused(trace_symmetry, holding(name, value), X,
            says=f"{name} holds values that are not finite") for name in ("3.weight",
            "1.running_var") for value in (math.nan, math.inf, -math.inf)],
        refused(trace_symmetry, NOISY, X, says="change from run to run"),
        *[refused(lambda made=made: trace_symmetry(made(mlp()), X), says=says) for made, says in (
            (torch.compile, "_orig_mod); expected the module that it was made from"),
            (nn.DataParallel, "a wrapper for several devices (around its module); expected the module"),
            (lambda own: torch.export.export(own, (X,)).module(), "torch.export made; expected the module"))],
        refused(acted_on, mlp(9), says="0.weight; expected shape [8, 5]"),
        refused(acted_on, nn.Sequential(L(5, 8), nn.ReLU()), says="no such tensor: 2.weight"),
        refused(acted_on, nn.Sequential(*mlp(8), L(3, 3)), says="holds 3.weight"),
        refused(acted_on, X, says="must be of type Module, got Tensor", error=TypeError),
        refused(lambda: perceptron().act(mlp(), sampled()), says="must be of type Element", error=TypeError),
        refused(sampled, 0, says="generator of ElementGroup.sample must be", error=TypeError),
        *[refused(sampled, scale=scale) for scale in (-1.0, math.nan, math.inf)],
        *[refused(register_rule, what, says="a rule belongs to", error=TypeError) for what in (torch.relu, "relu",
            nn.ReLU(), 3)],
    ],
)  # fmt: skip
def test_bad_input_is_refused(refusal: Any) -> None:
    refusal()


def test_network_of_another_structure_is_left_alone() -> None:
    network = mlp(9)
    before = snapshot(network)
    assert_refused(perceptron().act, perceptron().identity(), network, inplace=True, says="expected shape")
    assert_unchanged(network, before)


@pytest.mark.parametrize(
    "other", [lambda: mlp(9), lambda: mlp(8, nn.Tanh), lambda: nn.Sequential(*mlp(8), nn.ReLU(), L(3, 3))]
)
def test_element_of_another_symmetry(other: Any) -> None:
    symmetry, element = perceptron(), trace_symmetry(other(), X).sample(generator())
    for use in (
        lambda: symmetry.act(element, mlp(8)),
        lambda: symmetry.inverse(element),
        lambda: symmetry.compose(symmetry.identity(), element),
        lambda: symmetry.compose(element, symmetry.identity()),
    ):
        assert_refused(use, says="another network")


def test_unused_parameters_are_counted_in_a_note_and_left_alone() -> None:
    spare = nn.Sequential(L(2, 2), L(2, 2), L(2, 2))
    network = program(lambda s, x: s.net(x), net=mlp(), spare=spare, extra=nn.Parameter(torch.ones(3)))
    with pytest.warns(UserWarning, match=r"never uses.*extra, spare\.0\.weight, spare\.0\.bias and 4 more"):
        symmetry = trace_symmetry(network, X)
    assert any("spare.0.weight" in note for note in symmetry.notes)
    assert "spare.0.weight" in str(symmetry)
    made = symmetry.act(symmetry.sample(generator()), network)
    assert torch.equal(made.spare[0].weight, network.spare[0].weight)
    assert torch.equal(made.extra, network.extra)
    assert symmetry.dimension == 8


@pytest.mark.parametrize(
    ("line", "network"),
    [
        ("if x.sum() > 0:", lambda: nn.Sequential(L(5, 8), Branching(), L(8, 3)).train()),
        ("x.sum().item()", lambda: program(lambda s, x: s.b(s.a(x) * float(x.sum().item())), a=L(5, 8), b=L(8, 3))),
        (
            "x.argmax()",
            lambda: program(lambda s, x: s.b(s.a(x)[:, int(x.argmax()) % 2 :][:, :4]), a=L(5, 8), b=L(4, 3)),
        ),
        (".nonzero()", lambda: program(lambda s, x: s.b(s.a(x)[(x > 0).any(1).nonzero()[:, 0]]), a=L(5, 8), b=L(8, 3))),
    ],
)
def test_line_that_depends_on_data_is_named(line: str, network: Any) -> None:
    network = network()
    before = snapshot(network)
    assert_refused(trace_symmetry, network, X, says=("cannot be traced", f"{__file__}:", line, "register_rule"))
    assert_unchanged(network, before)


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal, nn.utils.spectral_norm,
        nn.utils.weight_norm],
    ids=["spectral_norm", "weight_norm", "orthogonal", "old_spectral_norm", "old_weight_norm"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_parametrised_weights(wrap: Any) -> None:
    network = mlp()
    network[2] = wrap(network[2])
    assert_refused(trace_symmetry, network, X, says=("2 has", "remove"))


def test_an_empty_part_of_members_does_not_disturb() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        members = torch.einsum("bd,kde->kbe", x, s.members)
        return s.last(torch.relu(members[:4]).sum(0) + members[4:].sum(0).tanh())

    network = Program(forward, {"members": nn.Parameter(torch.randn(4, 5, 6)), "last": nn.Linear(6, 3)})
    assert trace_symmetry(network.double(), torch.randn(2, 5, dtype=torch.float64)).log10_permutations > 0  # of members


def test_the_same_gains_of_members_behind_two_layers() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        first = torch.relu(s.first(x)[..., None, :] * s.gains)
        return s.last(torch.relu(s.second(first) * s.gains)).sum(-2)

    parts = {"first": nn.Linear(9, 5), "gains": nn.Parameter(torch.randn(3, 5)), "second": nn.Linear(5, 5)}
    network = Program(forward, parts | {"last": nn.Linear(5, 4)}).double()
    symmetry = trace_symmetry(network, torch.randn(2, 3, 9, dtype=torch.float64))
    assert symmetry.dimension == symmetry.nullity
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(5) * math.factorial(3)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_removed_parametrisations_do_not_disturb() -> None:
    network = mlp()
    parametrizations.spectral_norm(network[0])
    nn.utils.parametrize.remove_parametrizations(network[0], "weight")
    nn.utils.weight_norm(network[2])
    nn.utils.remove_weight_norm(network[2])
    assert trace_symmetry(network, X).dimension == 8


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(8), lambda: nn.Sequential(nn.LazyBatchNorm1d(), L(5, 8))])
def test_lazy_modules(lazy: Any) -> None:
    network = nn.Sequential(lazy(), nn.ReLU(), L(8, 3))
    assert_refused(trace_symmetry, network, X, says=("lazy module", "run the network once"))
    network(X)
    assert trace_symmetry(network, X).log10_permutations == pytest.approx(math.log10(math.factorial(8)))


CONSTANT = [torch.eye(8) + torch.rand(8, 8)]  # a list, which no copy in float64 looks into
CASTS = {
    "float": lambda h: h.float(),
    "half": lambda h: h.half(),
    "to": lambda h: h.to(torch.bfloat16).to(h.dtype),
    "to a tensor": lambda h: h.to(torch.zeros(1)),
    "to a device and a type": lambda h: h.to("cpu", torch.float32),
    "type": lambda h: h.type(torch.float32),
    "a type's name": lambda h: h.type("torch.FloatTensor"),
    "type of another": lambda h: h.type_as(torch.zeros(1)),
    "complex": lambda h: torch.view_as_real(h.to(torch.complex64)).sum(-1),
    "mean": lambda h: h - h.mean(0, keepdim=True, dtype=torch.float32) * 0,
    "product of two precisions": lambda h: h.float() @ torch.eye(8, dtype=torch.float32),
    "a constant in a list": lambda h: h.float() @ CONSTANT[0] @ CONSTANT[0].inverse(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_networks_that_cast_to_lower_precisions_are_tested_in_double_precision(cast: str) -> None:
    network = program(lambda s, x: s.b(F.relu(CASTS[cast](s.a(x))).to(s.b.weight.dtype)), a=L(5, 8), b=L(8, 3))
    symmetry = trace_symmetry(network, X)
    assert symmetry.precision == torch.float64
    assert symmetry.worst_error < 1e-12
    assert symmetry.nullity is not None


def test_networks_that_cannot_be_tested_to_full_precision() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        hidden = s.a(x).float()
        if hidden.dtype != torch.float32:
            raise TypeError("this kernel takes float32 alone")
        return s.b(F.relu(hidden).to(x.dtype))

    network = program(forward, a=L(5, 8), b=L(8, 3))
    symmetry = trace_symmetry(network, X)
    assert symmetry.dimension == 8
    assert symmetry.precision == torch.float32
    assert 1e-10 < symmetry.worst_error < symmetry.tolerance < 1e-3
    assert "it rounds to torch.float32" in " ".join(str(symmetry).split())
    assert_refused(trace_symmetry, network, X, tolerance=1e-10, says="allows too much", error=RuntimeError)


def test_buffers_that_a_network_makes_when_it_runs_do_not_disturb() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        if not hasattr(s, "ramp"):
            s.register_buffer("ramp", torch.linspace(0, 1, x.shape[1], dtype=x.dtype), persistent=False)
        return s.b(F.relu(s.a(x + s.ramp)))

    network = program(forward, a=L(5, 8), b=L(8, 3))
    symmetry = trace_symmetry(network, X)
    before = network(X)
    torch.testing.assert_close(symmetry.act(symmetry.sample(), network)(X), before)
    symmetry.act(symmetry.sample(), network, inplace=True)
    torch.testing.assert_close(network(X), before)


@pytest.mark.parametrize("least", [-math.inf, -2.0])
def test_infinite_buffers_are_constants(least: float) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        scores = torch.where(torch.ones(3, 3, dtype=torch.bool).tril(), s.q(x) @ s.k(x).mT, s.least)
        return scores.softmax(-1) @ s.v(x)

    network = program(forward, q=L(5, 2), k=L(5, 2), v=L(5, 4))
    network.register_buffer("least", torch.tensor(least))
    symmetry = trace_symmetry(network, torch.randn(2, 3, 5))
    other = copy.deepcopy(network)
    other.least.fill_(-3.0)
    if math.isinf(least):
        assert (symmetry.dimension, symmetry.nullity) == (4 + 2, 4 + 2)
        assert_refused(symmetry.act, symmetry.sample(), other, says="changes an output")
    else:
        assert symmetry.dimension == 4
        symmetry.act(symmetry.sample(), other)


def with_loops(s: Any, x: Tensor, edges: Tensor) -> Tensor:
    """Add up neighbours, each node itself included once, as libraries of graph networks do."""
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, torch.arange(len(x)).expand(2, -1)], 1)
    h = F.relu(s.a(x))
    return s.b(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))


def test_shapes_that_depend_on_indices() -> None:
    network, edges = program(with_loops, a=L(5, 8), b=L(8, 3)), torch.tensor([[0, 1, 2, 2], [1, 2, 2, 0]])
    symmetry = trace_symmetry(network, (torch.randn(3, 5), edges))
    assert (symmetry.dimension, symmetry.nullity) == (8, 8)
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(8)))
    (note,) = symmetry.notes
    assert "inputs that select as many elements" in note
    other = (torch.randn(3, 5), torch.tensor([[1, 1, 0, 2], [0, 1, 2, 0]]))
    torch.testing.assert_close(symmetry.act(symmetry.sample(), network)(*other), network(*other))


def test_shapes_that_depend_on_tokens_leave_rows_of_tables_alike() -> None:
    network = program(
        lambda s, ids: s.b(F.relu(s.a(s.table(ids[ids > 0])))), table=lambda: nn.Embedding(9, 4), a=L(4, 8), b=L(8, 3)
    )
    symmetry = trace_symmetry(network, torch.tensor([0, 1, 2]))
    other = torch.tensor([7, 0, 5, 8])
    torch.testing.assert_close(symmetry.act(symmetry.sample(), network)(other), network(other))


def test_networks_that_differentiate_run_where_gradients_are_off() -> None:
    """Most such networks expect callers with gradients, and change whether an input requires one."""

    def residual(s: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        u = s.b(torch.tanh(s.a(x)))
        slope = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
        return slope.sum(1) + u[:, 0] - torch.autograd.grad(slope.sum(), x, create_graph=True)[0][:, 0]

    network, x = program(residual, a=L(2, 6), b=L(6, 1)).double(), torch.randn(3, 2, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    assert (symmetry.dimension, symmetry.signs, symmetry.nullity) == (0, 6, 0)
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(6)))
    assert symmetry.notes == ()
    assert not x.requires_grad
    moved = symmetry.act(symmetry.sample(generator()), network)
    torch.testing.assert_close(moved(x), network(x))
    assert weight_matching(symmetry, network, moved).distance_after == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "rest",
    [lambda m: (~m.bool()).double(), lambda m: torch.logical_not(m), lambda m: ~m.int()],
    ids=["cast", "logical", "of integers"],
)
def test_what_is_no_mask_of_zeros_and_ones_has_no_opposite(rest: Callable[[Tensor], Tensor]) -> None:
    """As a Boolean value, 0.3 is true, and its opposite is 0 rather than 0.7."""
    network = program(lambda s, x, m: s.b(s.a(x) * rest(m) + s.c(x) * m), a=L(8, 3), c=L(8, 3), b=L(3, 4)).double()
    inputs = torch.randn(4, 8, dtype=torch.float64), 1.5 * torch.rand(4, 1, dtype=torch.float64)
    symmetry = trace_symmetry(network, inputs)  # its self-test passes
    assert symmetry.dimension == 9


def in_place(h: Tensor) -> Tensor:
    """Scale by degrees of a graph, as graph convolutions do."""
    degree = torch.ones(len(h)).scatter_add_(0, torch.tensor([0, 1, 0]), torch.ones(3)).pow_(-0.5)
    degree.masked_fill_(degree == math.inf, 0)
    return degree.unsqueeze_(1) * h


WRITES: dict[str, tuple[Any, int]] = {
    "results are written again": (in_place, 4 * 4),
    "power": (lambda h: h.relu().pow_(2).mul_(2), 4),
    "zeros": (lambda h: h + h.clone().zero_(), 4 * 4 + 4),
    "ones": (lambda h: h * h.clone().fill_(1.0), 4 * 4 + 4),
    "diagonal": (lambda h: h.relu() * torch.ones(len(h), 4).fill_diagonal_(1.0)[:, :1], 4),
    "shape": (lambda h: h.relu().unsqueeze_(0).squeeze_(0).t_().t_(), 4),
}


@pytest.mark.parametrize("write", WRITES)
def test_operations_in_place(write: str) -> None:
    function, dimension = WRITES[write]
    symmetry = trace_symmetry(program(lambda s, x: s.b(function(s.a(x))), a=L(5, 4), b=L(4, 6)), torch.randn(3, 5))
    assert (symmetry.dimension, symmetry.nullity) == (dimension, dimension)


def test_writes_into_tensors_of_changed_shape() -> None:
    network = program(lambda s, x: s.b(s.a(x).relu().transpose_(0, 1).mul_(2).t()), a=L(5, 4), b=L(4, 6))
    assert_refused(trace_symmetry, network, X, says=("mul_ writes into a tensor whose shape", "without the underscore"))


# Rules.


@torch.library.custom_op("lightning_sym_tests::twice_relu", mutates_args=())
def twice_relu(x: Tensor) -> Tensor:
    return 2 * torch.relu(x)


@twice_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lightning_sym_tests::running_powers", mutates_args=())
def running_powers(x: Tensor, axis: int, limit: float = 1e30) -> tuple[Tensor, Tensor]:
    """Return running sums of x |x| along an axis, cut at a limit, and the signs of their last entries."""
    total = (x * x.abs()).cumsum(axis).clamp(-limit, limit)
    return total, total.select(axis, -1).sign()


@running_powers.register_fake
def _(x: Tensor, axis: int, limit: float = 1e30) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x.select(axis, -1))


@torch.library.custom_op("lightning_sym_tests::of_shares", mutates_args=())
def of_shares(x: Tensor) -> Tensor:
    """Square numbers between 0 and 1."""
    assert bool(((x >= 0) & (x <= 1)).all()), "expected shares"
    return x.square()


@of_shares.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lightning_sym_tests::shortened", mutates_args=())
def shortened(x: Tensor) -> Tensor:
    """Round to eight binary digits."""
    return x.bfloat16().to(x.dtype)


@shortened.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def with_operation(operation: Any) -> nn.Module:
    return program(lambda s, x: s.b(operation(s.a(x))), a=L(5, 8), b=L(8, 3))


@pytest.mark.parametrize(("axis", "kept"), [(1, 8), (2, 0)])
def test_unknown_operation_keeps_units_that_it_treats_alike(axis: int, kept: int) -> None:
    """Over steps, each unit has its own sum, of degree 2 in the unit; sums over units keep none of them."""

    def operation(x: Tensor) -> Tensor:
        total, sign = running_powers(x, axis)
        return total + sign[:, None] if axis == 1 else total

    symmetry = trace_symmetry(with_operation(operation), torch.randn(2, 4, 5))
    assert symmetry.signs == kept
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(kept)))
    assert "running_powers: no rule for this operation" in symmetry.notes[0]
    for limit, dimension in ((1e30, kept), (1000.0, 0)):  # random numbers are below the limit, mostly
        cut = with_operation(lambda x, limit=limit: running_powers(x, axis, limit)[0])
        found = trace_symmetry(cut, torch.randn(2, 4, 5))
        assert (found.dimension, found.signs) == (dimension, kept)


def test_unknown_operation_that_refuses_random_numbers_fixes_its_units() -> None:
    symmetry = trace_symmetry(with_operation(lambda x: of_shares(x.sigmoid())), X)
    assert symmetry.dimension == 0
    assert symmetry.notes[0].endswith("of_shares: no rule for this operation (fixes 8 units here)")


def test_operation_that_torch_composes_of_changes_of_shape_in_place_is_measured() -> None:
    network = with_operation(lambda x: torch.nanquantile(x, 0.3, dim=1))
    symmetry = trace_symmetry(network, torch.randn(2, 4, 5))
    assert (symmetry.dimension, symmetry.nullity) == (8, 16)  # the note names the translations
    assert symmetry.notes[0].startswith("nanquantile: no rule")


@pytest.mark.parametrize("operation", [shortened, lambda x: torch.frexp(x).mantissa], ids=["rounding", "two results"])
def test_unknown_operation_that_powers_of_two_pass_keeps_no_scales(operation: Any) -> None:
    symmetry = trace_symmetry(with_operation(operation), X)
    assert (symmetry.dimension, symmetry.signs) == (0, 8)
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(8)))


def test_unknown_operation_fixes_its_axes_and_is_listed() -> None:
    network = program(lambda s, x: s.c(torch.relu(s.b(torch.linalg.qr(s.a(x)).Q))), a=L(5, 4), b=L(2, 6), c=L(6, 3))
    symmetry = trace_symmetry(network, X)
    assert [(g.size, g.kind) for g in symmetry.groups if g.movable] == [(6, "permutation + scale")]
    note, unread, nullity = symmetry.notes
    assert unread.startswith("no output depends on")  # the matrix Q has the first columns' directions only
    assert nullity.endswith("which move a.weight, a.bias")
    assert "linalg_qr" in note
    assert "no rule for this operation" in note
    assert "fixes 4 units" in note
    assert note in " ".join(str(symmetry).split())


def test_unknown_operation_names_its_module() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.lightning_sym_tests.twice_relu(x)

    symmetry = trace_symmetry(nn.Sequential(L(5, 8), nn.Sequential(Inner()), L(8, 3)), X)
    (note,) = symmetry.notes
    assert "twice_relu in 1.0" in note


def packet() -> Any:
    return torch.ops.lightning_sym_tests.twice_relu


@pytest.mark.parametrize(
    "operation", [lambda: "lightning_sym_tests::twice_relu", packet, lambda: packet().default],
    ids=["name", "packet", "overload"],
)  # fmt: skip
def test_rule_for_an_operation(operation: Any) -> None:
    network = with_operation(packet())
    assert "no rule" in trace_symmetry(network, X).notes[0]

    @register_rule(operation())
    def rule(trace: Any, value: Any) -> Any:
        return trace.elementwise(value, positive_scales=True)

    symmetry = trace_symmetry(network, X)
    assert (symmetry.dimension, symmetry.signs) == (8, 0)
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(8)))
    assert not symmetry.notes


def test_units_of_which_a_rule_scales_some_change_places_with_their_like() -> None:
    @register_rule(packet())
    def rule(trace: Any, value: Any) -> Any:
        (label,) = value.labels
        trace.constraints.fix_scales(label.scale[:3], signs=False)
        return trace.elementwise(value, positive_scales=True)

    symmetry = trace_symmetry(with_operation(packet()), X)
    assert sorted(group.size for group in symmetry.groups if group.movable) == [3, 5]
    assert symmetry.dimension == 5


def test_what_cannot_be_copied_is_named() -> None:
    network = nn.Sequential(mlp(), nn.ReLU())
    network[1].kept = threading.Lock()
    assert_refused(trace_symmetry, network, X, says=("cannot be copied", "because of 1.kept"), error=TypeError)


def test_rule_that_allows_too_much() -> None:
    @register_rule(packet())
    def rule(trace: Any, value: Any) -> Any:
        return trace.elementwise(value, positive_scales=True, signs=True)

    network = with_operation(packet()).train()
    before = snapshot(network)
    assert_refused(trace_symmetry, network, X, says=("self-test", "allows too much"), error=RuntimeError)
    assert_unchanged(network, before)
    # Without the self-test, check() tells.
    symmetry = trace_symmetry(network, X, check=False)
    assert math.isnan(symmetry.worst_error)
    assert symmetry.check(network, X) > 1e-3


def test_rule_for_a_module_with_control_flow() -> None:
    network = nn.Sequential(L(5, 8), Branching(), L(8, 3))

    @register_rule(Branching)
    def rule(trace: Any, module: nn.Module, value: Any) -> Any:
        assert isinstance(module, Branching)
        return trace.elementwise(value, positive_scales=True)

    before = snapshot(network)
    symmetry = trace_symmetry(network, X)
    assert (symmetry.dimension, symmetry.signs) == (8, 0)
    assert symmetry.worst_error <= 1e-10
    assert_unchanged(network, before)


def test_rule_for_a_module_with_parameters() -> None:
    """The rule may ask for the module's parameters, as the documentation of register_rule says."""
    network = nn.Sequential(L(5, 8), ScaledReLU(8), L(8, 3))

    @register_rule(ScaledReLU)
    def rule(trace: Any, module: nn.Module, value: Any) -> Any:
        active = trace.elementwise(value, positive_scales=True)
        return trace.join(active, trace.parameter(module, "weight"), product=True)

    symmetry = trace_symmetry(network, X)
    assert (symmetry.dimension, symmetry.signs) == (16, 8)
    # The example gives shapes only, with rules for modules as without.
    assert trace_symmetry(network.double(), X.float()).dimension == 16
    assert trace_symmetry(nn.Sequential(L(5, 8), nn.ReLU(), L(8, 3)).double(), X.float()).dimension == 8


def test_rule_that_fails_leaves_the_network_alone() -> None:
    network = nn.Sequential(L(5, 8), Branching(), L(8, 3))

    @register_rule(Branching)
    def rule(trace: Any, module: nn.Module, value: Any) -> Any:
        raise NotImplementedError("not today")

    before = snapshot(network)
    assert_refused(trace_symmetry, network, X, says="not today", error=NotImplementedError)
    assert_unchanged(network, before)
    assert network(X).shape == (2, 3)


# What tracing leaves alone, and where it works.


def test_tracing_changes_nothing() -> None:
    network = nn.Sequential(
        C(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), L(144, 3)
    ).train()
    network[1].eval()
    network[0].weight.requires_grad_(False)
    counted = []
    network[5].register_forward_hook(lambda *_: counted.append(1))
    before, x = snapshot(network), torch.randn(2, 3, 8, 8)
    state = torch.get_rng_state()
    symmetry = trace_symmetry(network, x)
    assert_unchanged(network, before)
    assert network.training
    assert not network[1].training
    assert all(p.grad is None for p in network.parameters())
    symmetry.check(network, x, perturb=0.3)
    symmetry.act(symmetry.sample(generator()), network)
    assert_unchanged(network, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shared", ["module", "weight"])
def test_tracing_keeps_shared_weights(shared: str) -> None:
    one, two = L(6, 6), L(6, 6)
    if shared == "weight":
        two.weight = one.weight
    network = nn.Sequential(L(5, 6), nn.ReLU(), one, nn.ReLU(), one if shared == "module" else two, nn.ReLU(), L(6, 2))
    before = snapshot(network)
    symmetry = trace_symmetry(network, X)
    assert_unchanged(network, before)
    assert all(type(p) is nn.Parameter for p in network.parameters())
    # All three hidden values carry one element.
    assert [g.size for g in symmetry.groups] == [6]
    assert symmetry.dimension == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    network = nn.Sequential(C(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), L(144, 3)).to(dtype)
    symmetry = trace_symmetry(network, torch.randn(2, 3, 8, 8, dtype=dtype))
    assert symmetry.worst_error <= 1e-10
    made = symmetry.act(symmetry.sample(generator()), network)
    assert {t.dtype for t in made.state_dict().values()} == {dtype, torch.int64}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_any_gradient_mode(mode: Any) -> None:
    network = nn.Sequential(L(5, 8), nn.BatchNorm1d(8), nn.ReLU(), L(8, 3))
    with mode():
        symmetry = trace_symmetry(network, X.clone())
        made = symmetry.act(symmetry.sample(generator()), network)
        torch.testing.assert_close(made.eval()(X), network.eval()(X), rtol=1e-4, atol=1e-5)
    assert symmetry.dimension == 24
    assert [p.requires_grad for p in made.parameters()] == [True] * 6


@dataclasses.dataclass
class Result:
    first: Tensor
    rest: tuple[Tensor, ...]


@pytest.mark.parametrize(
    "pack",
    [lambda a, b: {"a": a, "b": {"c": b}}, lambda a, b: (a, [b]), lambda a, b: Result(a, (b,)),
        lambda a, b: (a, None, 3, b)],
    ids=["dict", "tuple", "dataclass", "mixed"],
)  # fmt: skip
def test_outputs_of_any_kind(pack: Any) -> None:
    def forward(s: Any, x: Tensor) -> Any:
        h = torch.relu(s.a(x))
        return pack(s.b(h), s.c(h))

    symmetry = trace_symmetry(program(forward, a=L(5, 8), b=L(8, 3), c=L(8, 2)), X)
    assert symmetry.dimension == 8
    # An output on the way fixes what it shows.
    shown = trace_symmetry(program(lambda s, x: pack(s.a(x), s.b(s.a(x))), a=L(5, 8), b=L(8, 3)), X)
    assert (shown.dimension, shown.log10_permutations) == (0, 0)


def test_several_inputs() -> None:
    network = program(lambda s, x, y: s.c(torch.relu(s.a(x)) + torch.relu(s.b(y))), a=L(5, 8), b=L(4, 8), c=L(8, 2))
    symmetry = trace_symmetry(network, (X, torch.randn(2, 4)))
    assert symmetry.dimension == 8
    nested = program(lambda s, d: s.c(torch.relu(s.a(d["x"])) + s.b(d["y"][0])), a=L(5, 8), b=L(4, 8), c=L(8, 2))
    assert trace_symmetry(nested, ({"x": X, "y": [torch.randn(2, 4)]},)).log10_permutations > 4


@pytest.mark.parametrize("network", [nn.ReLU(), nn.Identity(), L(5, 3)], ids=repr)
def test_network_without_units(network: nn.Module) -> None:
    symmetry = trace_symmetry(network, X)
    assert (symmetry.dimension, symmetry.worst_error) == (0, 0)
    assert symmetry.act(symmetry.sample(generator()), network) is not None
    if not list(network.parameters()):
        assert (symmetry.groups, symmetry.units) == ((), 0)
        assert "0 axis groups" in str(symmetry)


# A parameter that is one number acts on no unit in particular, however it is spread.

SPREADS = {"expand": lambda number: number.expand(6), "repeat": lambda number: number.repeat(6)}
USES = {
    "bias of a linear map": lambda net, x, spread: F.linear(x, net.first.weight, spread(net.number)).relu(),
    "bias of a convolution": lambda net, x, spread: F.conv1d(x[..., None], net.first.weight[..., None],
        spread(net.number))[..., 0].relu(),
    "bias of addmm": lambda net, x, spread: torch.addmm(spread(net.number), x, net.first.weight.T).relu(),
    "slopes": lambda net, x, spread: F.prelu(net.first(x), spread(net.number)),
}  # fmt: skip


def one_number(use, spread, shape):
    parts = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3), "number": nn.Parameter(torch.full(shape, 0.7))}
    return Program(lambda s, x: s.last(use(s, x, spread)), parts)


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.few(4)
def test_a_number_that_is_spread_over_units(use, spread, shape):
    torch.manual_seed(0)
    network = one_number(USES[use], SPREADS[spread], shape).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    for seed in range(3):
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network)
        torch.testing.assert_close(moved(x), network(x))
        if use == "slopes":
            torch.testing.assert_close(moved.number, network.number)
    # A bias that is one number is scaled with all units at once.
    assert symmetry.dimension == (6 if use == "slopes" else 1)
    sizes = {group.name: group.size for group in symmetry.groups}
    assert sizes["number"] == 1
    if use == "slopes":
        assert sizes["first"] == 6


def test_a_number_for_all_units_leaves_their_order_free():
    torch.manual_seed(0)
    network = one_number(lambda net, x, spread: (net.first(x) + spread(net.number)).relu(), lambda number: number, (1,))
    symmetry = trace_symmetry(network, torch.randn(5, 4))
    assert {group.name: group.size for group in symmetry.groups} == {"number": 1, "first": 6}


# What is shown.


def test_print_and_table() -> None:
    network = nn.Sequential(L(5, 8), nn.BatchNorm1d(8), nn.ReLU(), L(8, 6), L(6, 4), nn.Tanh(), L(4, 3))
    symmetry = trace_symmetry(network, X)
    rows = symmetry.table()
    assert [(r["group"], r["size"], r["cells"], r["type"], r["dimension"]) for r in rows] == [
        ("0", 8, 1, "permutation + 2 scales + sign", 16),
        ("3", 6, 1, "invertible matrices", 36),
        ("4", 4, 1, "permutation + sign", 0),
    ]
    assert rows[0]["parameters"] == [
        "0.weight[0]", "0.bias[0]", "1.weight[0]", "1.bias[0]", "3.weight[1]", "1.running_mean[0]", "1.running_var[0]",
    ]  # fmt: skip
    assert rows[2]["parameters"] == ["4.weight[0]", "4.bias[0]", "6.weight[1]"]
    assert [r["log10_permutations"] for r in rows] == pytest.approx([4.6055, 0, 1.3802], abs=1e-4)
    assert sum(r["log10_permutations"] for r in rows) == pytest.approx(symmetry.log10_permutations)
    text = " ".join(str(symmetry).split())
    for piece in ("axis group", "invertible matrices", "0.weight[0]", "and 4 more", "checked with 2 random elements"):
        assert piece in text
    summary = "3 axis groups, 18 units: 10^6.0 permutations, 18 signs, dimension 66"
    assert summary in text
    assert "shifts, 8 biases that batch norms absorb: 0.bias" in text
    assert "shifts, 6 biases that linear layers absorb: 3.bias" in text
    assert repr(symmetry) == "<Symmetry: 3 axis groups, 18 units, dimension 66>"
    linear = trace_symmetry(network, X, shifts=False)
    assert (linear.shifts, linear.dimension) == (0, 52)
    assert "checked" not in str(trace_symmetry(network, X, check=False))


def test_repeated_layers_have_one_line_and_no_line_is_wider_than_a_terminal() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True, norm_first=True)
    network = nn.TransformerEncoder(layer, 11, enable_nested_tensor=False).eval()
    lines = str(trace_symmetry(network, torch.randn(2, 4, 8), check=False)).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line for line in lines if line.startswith("layers.0-10.self_attn (2)"))
    assert row.split()[2:] == ["11", "2", "x", "4", "32", "0.0"]
    for legend in ("alike: how many groups", "2 x 4: 2 parts (heads,", "(2): the second group"):
        assert sum(line.startswith(legend) for line in lines) == 1
    assert joined(["norms.0", "norms.2", "head"]) == ["norms.0,2", "head"]
    # As torchvision numbers layers.
    assert joined([f"encoder_layer_{n}.ln_{k}" for n in range(3) for k in (1, 2)]) == ["encoder_layer_0-2.ln_1,2"]
    assert joined([f"block1.layer{n}.conv2" for n in range(1, 12)]) == ["block1.layer1-11.conv2"]
    assert joined(["x_3d.0", "x_4d.0", "conv2d"]) == ["x_3d.0", "x_4d.0", "conv2d"]


def test_occurrences_and_taps() -> None:
    network = nn.Sequential(C(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), L(36, 5), nn.Tanh(), L(5, 2))
    symmetry = trace_symmetry(network, torch.randn(2, 3, 8, 8))
    first, second = symmetry.groups
    weights = {(o.tensor, o.axis): o for o in first.occurrences}
    assert set(weights) == {("0.weight", 0), ("0.bias", 0), ("4.weight", 1)}
    assert (weights["0.weight", 0].exponent, weights["4.weight", 1].exponent) == (1, -1)
    assert weights["4.weight", 1].positions.tolist() == torch.arange(36).reshape(4, 9).tolist()
    assert all(o.is_parameter for o in first.occurrences)
    assert {tap.name for tap in first.taps} >= {"0", "1", "2"}
    assert {tap.name for tap in second.taps} == {"4", "5"}
    for tap in second.taps:
        axis, positions = tap.positions(second.units)
        assert (axis, positions.tolist()) == (1, list(range(5)))


def test_taps_show_the_units_move() -> None:
    network = nn.Sequential(L(5, 8), nn.Tanh(), L(8, 3)).double()
    symmetry = trace_symmetry(network, X.double())
    element = symmetry.sample(generator(), signs=False)
    made = symmetry.act(element, network)
    (group,) = symmetry.groups
    axis, positions = next(tap.positions(group.units) for tap in group.taps if tap.name == "1")
    old, new = (torch.tanh(net[0](X.double())).index_select(axis, positions) for net in (network, made))
    assert torch.allclose(new, old[:, element.permutation[group.units]])


# Batch norm (docs/theory/intertwiners.md, 2.3).


@functools.cache
def normalised() -> tuple[nn.Sequential, Tensor, Any]:
    torch.manual_seed(3)
    network = nn.Sequential(
        C(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), C(6, 5, 2), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), L(5, 3),
    ).double()  # fmt: skip
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    return network, x, trace_symmetry(network, x)


def change(one: nn.Module, two: nn.Module, x: Tensor, *, training: bool) -> float:
    """The largest change of the output, relative to the largest output."""
    first, second = (copy.deepcopy(net).train(training)(x).detach() for net in (one, two))
    return float((first - second).abs().max() / first.abs().max())


def part_of(symmetry: Any, which: str) -> Any:
    """An element that is random in one of the four parts of docs/theory/intertwiners.md, 2.3: (p, lam, d, c)."""
    drawn, nothing = symmetry.sample(generator(5)), symmetry.identity()
    if which == "p":
        return nothing.replaced(permutation=drawn.permutation)
    if which == "c":
        return nothing.replaced(shift=drawn.shift)
    # The first scale of a unit is that of the convolution's output (d), the second that of gamma and beta (lam).
    log_scale = torch.zeros_like(drawn.log_scale)
    for table in symmetry.structure.scale_table:
        at = torch.from_numpy(table[:, 0 if which == "d" else 1])
        log_scale[at] = drawn.log_scale[at]
    if which == "d":
        return nothing.replaced(log_scale=log_scale, sign=drawn.sign)
    return nothing.replaced(log_scale=log_scale)


@pytest.mark.parametrize("which", ["p", "lam", "d", "c"])
def test_batch_norm_in_both_modes(which: str) -> None:
    network, x, symmetry = normalised()
    assert (symmetry.scales, symmetry.signs, symmetry.shifts, symmetry.dimension) == (22, 11, 11, 33)
    made = symmetry.act(part_of(symmetry, which), network)
    assert any(not torch.equal(a, b) for a, b in zip(made.parameters(), network.parameters(), strict=True))
    assert change(network, made, x, training=False) <= 1e-13
    training = change(network, made, x, training=True)
    if which == "d":
        # Batch norm divides by the root of the batch's own variance plus eps.
        assert 1e-6 < training < 1e-3
    else:
        assert training <= 1e-13


def test_batch_norm_parts_by_hand() -> None:
    """Every formula of docs/theory/intertwiners.md, 2.3, applied to the first layer by hand."""
    network, _, symmetry = normalised()
    e = symmetry.sample(generator(9))
    made = symmetry.act(e, network)
    group = symmetry.groups[0]
    table, signs = symmetry.structure.scale_table[0], symmetry.structure.sign_table[0]
    p = e.permutation[group.units] - group.units[0]
    d = e.log_scale[torch.from_numpy(table[:, 0])].exp() * e.sign[torch.from_numpy(signs[:, 0])]
    lam = e.log_scale[torch.from_numpy(table[:, 1])].exp()
    c = e.shift[symmetry.structure.shifts.kinds[0].entries]
    conv, norm = network[0], network[1]
    old, new = network.state_dict(), made.state_dict()
    expected = {
        "0.weight": (d[:, None, None, None] * conv.weight)[p],
        "0.bias": (d * (conv.bias + c))[p],
        "1.running_mean": (d * (norm.running_mean + c))[p],
        "1.running_var": (d**2 * (norm.running_var + norm.eps) - norm.eps)[p],
        "1.weight": (d.sign() * lam * norm.weight)[p],
        "1.bias": (lam * norm.bias)[p],
    }
    for name, value in expected.items():
        torch.testing.assert_close(new[name], value.detach(), rtol=1e-13, atol=1e-13)
    assert torch.equal(old["1.num_batches_tracked"], new["1.num_batches_tracked"])


def test_running_variance_may_become_negative() -> None:
    network, x, symmetry = normalised()
    element = part_of(symmetry, "d")
    table = torch.from_numpy(symmetry.structure.scale_table[0][:, 0])
    log_scale = element.log_scale.clone()
    log_scale[table] = -8.0
    made = symmetry.act(element.replaced(log_scale=log_scale), network)
    assert bool((made[1].running_var < 0).all())
    assert change(network, made, x, training=False) <= 1e-10


# Optimisers.


def trained(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    network.train()
    for step in steps:
        x = torch.randn(16, 5, generator=generator(step), dtype=torch.float64)
        target = torch.randint(0, 3, (16,), generator=generator(1000 + step))
        optimizer.zero_grad()
        F.cross_entropy(network(x), target).backward()
        optimizer.step()


OPTIMISERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.few(3)
def test_training_commutes_with_permutations_and_signs(name: str) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(
        L(5, 8), nn.BatchNorm1d(8), nn.Tanh(), L(8, 6), nn.LayerNorm(6), nn.ReLU(), L(6, 3)
    ).double()
    symmetry = trace_symmetry(network, X)
    element = symmetry.sample(generator(4), scale=0, shifts=False, mixing=False)
    assert bool((element.sign < 0).any())
    optimizer = OPTIMISERS[name](network.parameters())
    trained(network, optimizer, range(3))
    other = copy.deepcopy(network)
    carried = OPTIMISERS[name](other.parameters())
    carried.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert symmetry.act(element, other, inplace=True, optimizer=carried) is other
    trained(network, optimizer, range(3, 8))
    trained(other, carried, range(3, 8))
    expected = symmetry.act(element, network)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-8, atol=1e-8, msg=key)


@pytest.mark.parametrize("gain", [None, torch.exp, F.softplus])
def test_momenta_move_as_gradients_under_scales(gain: Callable[[Tensor], Tensor] | None) -> None:
    """After act, a momentum is the gradient's at the new weights, and a second moment its square."""
    torch.manual_seed(1)
    network: nn.Module = nn.Sequential(L(5, 8), nn.ReLU(), L(8, 6), nn.Tanh(), L(6, 3)).double()
    if gain is not None:
        parts = {"a": L(5, 8), "w": nn.Parameter(torch.randn(8)), "b": L(8, 3)}
        network = Program(lambda s, x: s.b(torch.relu(s.a(x)) * gain(s.w)), parts).double()
    symmetry = trace_symmetry(network, X)
    element = symmetry.sample(generator(4))
    x, target = torch.randn(16, 5, dtype=torch.float64), torch.randint(0, 3, (16,))

    def gradients(net: nn.Module) -> list[Tensor]:
        net.zero_grad()
        F.cross_entropy(net(x), target).backward()
        return [p.grad.clone() for p in net.parameters()]

    for make, key, power in (
        (lambda p: torch.optim.SGD(p, 1e-30, momentum=0.9), "momentum_buffer", 1),
        (lambda p: torch.optim.Adam(p, 1e-30), "exp_avg", 1),
        (lambda p: torch.optim.Adam(p, 1e-30), "exp_avg_sq", 2),
    ):
        net = copy.deepcopy(network)
        optimizer = make(net.parameters())
        old = gradients(net)
        optimizer.step()
        symmetry.act(element, net, inplace=True, optimizer=optimizer)
        factor = {"momentum_buffer": 1.0, "exp_avg": 0.1, "exp_avg_sq": 1e-3}[key]
        new = gradients(net)
        assert not all(torch.allclose(a, b) for a, b in zip(old, new, strict=True))
        for parameter, gradient in zip(net.parameters(), new, strict=True):
            torch.testing.assert_close(optimizer.state[parameter][key], factor * gradient**power, rtol=1e-9, atol=1e-13)


def test_optimisers_that_cannot_be_carried() -> None:
    network = mlp().double()
    symmetry = trace_symmetry(network, X)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    assert_refused(lambda: symmetry.act(symmetry.identity(), network, optimizer=optimizer), says="inplace=True")
    optimizers = (
        (torch.optim.Rprop(network.parameters()), "step_size"),
        (torch.optim.LBFGS([network[-1].bias, *network[:-1].parameters()]), "d"),  # held by one that does not move
        (torch.optim.Adafactor([network[-1].weight]), "row_var"),
    )
    for optimizer, key in optimizers:
        network(X.double()).sum().backward()
        optimizer.step(lambda: network(X.double()).sum())
        before = snapshot(network)
        with pytest.raises(ValueError, match=f"'{key}' cannot be carried"):
            symmetry.act(symmetry.sample(generator()), network, inplace=True, optimizer=optimizer)
        assert_unchanged(network, before)
    linear = nn.Sequential(L(5, 4), L(4, 3)).double()
    symmetry = trace_symmetry(linear, X)
    adam = torch.optim.Adam(linear.parameters())
    linear(X.double()).sum().backward()
    adam.step()
    with pytest.raises(ValueError, match=r"a dense matrix mixes 0\.weight"):
        symmetry.act(symmetry.sample(generator()), linear, inplace=True, optimizer=adam)
    # The error says what would be accepted.
    symmetry.act(symmetry.sample(generator(), mixing=False), linear, inplace=True, optimizer=adam)


PARTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "diagonal": (lambda s, x: s.o(s.a(x).tanh().diagonal(0, 1, 2)), 0),
    "places by index": (lambda s, x: s.o(s.a(x).tanh()[:, [2, 0, 1], torch.arange(3)]), 0),
    "one input": (lambda s, x: (s.a(x) + s.b(x[..., :1])).tanh(), 3),
    "padded channels": (lambda s, x: (s.a(x) + F.pad(s.c(x), (0, 2))).tanh(), 1),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_channels_are_not_taken_for_all(name: str) -> None:
    function, dimension = PARTS[name]
    parts: dict[str, Any] = {"a": L(4, 3), "b": L(1, 3), "c": L(4, 1), "o": L(3, 3)}
    used = {own: parts[own] for own in function.__code__.co_names if own in parts}
    network = program(function, **{own: lambda made=made: made for own, made in used.items()}).double()
    symmetry = trace_symmetry(network, torch.randn(5, 3, 4, dtype=torch.float64))
    assert dimension == symmetry.dimension <= (symmetry.nullity or 0)


def test_grouped_convolutions_may_have_no_units() -> None:
    network = program(lambda s, x: s.d(torch.cat([s.c(x).softmax(1), x], 1)), c=lambda: nn.Conv1d(3, 3, 1),
        d=lambda: nn.Conv1d(6, 6, 3, groups=6))  # fmt: skip
    assert trace_symmetry(network.double(), torch.randn(5, 3, 6, dtype=torch.float64)).nullity == 4


def test_what_a_module_caches_in_a_dictionary_is_as_it_was_before() -> None:
    """LeViT keeps its biases by resolution: what the tracer runs on holds no numbers, and must not stay there."""

    def run(s: Any, x: Tensor) -> Tensor:
        if "bias" not in s.cache:
            s.cache["bias"] = s.table * 2
        return s.b(torch.relu(s.a(x) + s.cache["bias"]))

    network = Program(run, {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "table": nn.Parameter(torch.randn(4))})
    network.cache = {}
    # A scale of each unit; and of two biases that are added, what one gains the other may lose.
    assert trace_symmetry(network, torch.randn(2, 3), check=False).dimension == 4 + 4
    assert network.cache == {}


def test_an_example_to_which_noise_cannot_be_added_is_tested_alone() -> None:
    """The rows of an adjacency matrix are counted, and the numbers are places in a table."""
    network = program(lambda s, x, a: s.b(torch.relu(s.a(x.view(6, 4)) + s.t(a.sum(1).long()))), a=lambda: L(4, 3),
        t=lambda: nn.Embedding(6, 3), b=lambda: L(3, 2)).double()  # fmt: skip
    inputs = torch.randn(6, 4, dtype=torch.float64), 5.9 * torch.eye(6, dtype=torch.float64)
    assert trace_symmetry(network, inputs, nullity=False).scales == 3


@pytest.mark.parametrize("spelling", ["number", "tensor", "ones"])
def test_reciprocals_are_not_linear(spelling: str) -> None:
    one: dict[str, Callable[[Tensor], Any]] = {
        "number": lambda _: 1.0,
        "tensor": lambda h: torch.tensor(1.0, dtype=h.dtype),
        "ones": torch.ones_like,
    }
    network = program(lambda s, x: s.b(one[spelling](h := s.a(x)) / h), a=lambda: L(6, 4), b=lambda: L(4, 3)).double()
    symmetry = trace_symmetry(network, torch.randn(5, 6, dtype=torch.float64), nullity=False)
    assert (symmetry.dimension, symmetry.scales, symmetry.signs) == (4, 4, 4)


def test_statistics_that_are_rows_of_a_table_are_fixed() -> None:
    network = program(lambda s, x: s.b(F.batch_norm(s.a(x), s.t[0], s.t[1].exp())), a=lambda: L(6, 4),
        t=lambda: nn.Parameter(torch.randn(2, 4)), b=lambda: L(4, 3)).double()  # fmt: skip
    assert trace_symmetry(network, torch.randn(5, 6, dtype=torch.float64), nullity=False).dimension == 4
