"""What the measured nullity says of a group: nothing where it is whole, and where what is missing lives."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, of, parameter
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.landscape.outputs import NetworkOutputs
from lightning_sym.symmetry import Symmetry, completeness, local_dimension, trace_symmetry

pytestmark = pytest.mark.measured

L = nn.Linear


def left_out(symmetry: Symmetry) -> str:
    return "".join(note for note in symmetry.notes if "leaves out" in note)


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(function: Callable[..., Any], **parts: Any) -> nn.Module:
    torch.manual_seed(0)
    return Program(function, parts).double().eval()


def perceptron(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[L(one, two), activation()] for one, two in itertools.pairwise(widths)]
    return nn.Sequential(*[part for own in layers for part in own][:-1])


def attention(s: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(s.q(x) @ s.k(x).mT, -1)
    return s.o(weights @ s.v(x))


# Of a function: the nullity of its Jacobian, and that of the group.
WHOLE: dict[str, tuple[int, tuple[int, ...], Callable[..., Any], dict[str, Any]]] = {
    "attention": (40, (4, 6), attention, {name: of(L, 6, 4) for name in "qkv"} | {"o": of(L, 4, 6)}),
    "written in place": (8, (6,), lambda s, x: s.b(torch.relu_(s.a(x)).mul_(2)), {"a": of(L, 6, 8), "b": of(L, 8, 3)}),
    "linear layers": (42, (9,), lambda s, x: s.b(s.a(x)), {"a": of(L, 9, 6), "b": of(L, 6, 8)}),
    "one number": (8, (6,), lambda s, x: s.t.exp() * s.b(torch.relu(s.a(x))), {
        "a": of(L, 6, 7), "b": of(L, 7, 3), "t": parameter()}),
}  # fmt: skip


def without_gradients(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return s.b(torch.relu(s.a(x)))


class StraightThrough(torch.autograd.Function):
    """A sign with the derivative of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


TWO = {"a": of(L, 7, 5), "b": of(L, 5, 3)}
STOPPED = {
    "detach": lambda s, x: s.b(torch.relu(s.a(x)).detach()),
    "data": lambda s, x: s.b(torch.relu(F.linear(x, s.a.weight.data, s.a.bias))),
    "no_grad": without_gradients,
}
STEPS = {
    "custom": lambda s, x: s.b(StraightThrough.apply(s.a(x))),
    "by hand": lambda s, x: s.b(s.a(x) + (s.a(x).sign() - s.a(x)).detach()),
    "rounded": lambda s, x: s.b(torch.relu(F.linear(x, torch.round(8 * s.a.weight) / 8))),
}


@pytest.mark.parametrize("name", STOPPED)
def test_stopped_gradients_hide_nothing(name: str) -> None:
    made, x = network(STOPPED[name], **TWO), vectors(60, 7)
    symmetry = trace_symmetry(made, x)
    assert (symmetry.dimension, symmetry.nullity, symmetry.notes) == (5, 5, ())
    assert local_dimension(symmetry, made, x).nullity == 5


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("name", STEPS)
def test_derivatives_of_steps_measure_nothing(name: str) -> None:
    symmetry = trace_symmetry(network(STEPS[name], **TWO), vectors(4, 7))
    assert symmetry.nullity is None
    assert "as with rounding or a custom backward" in symmetry.unmeasured
    assert not any("no output depends on" in note or "leaves out" in note for note in symmetry.notes)


@pytest.mark.parametrize("columns", [5, 100])  # 5: weights are searched
def test_entries_that_no_output_depends_on_are_named(columns: int) -> None:
    read = torch.tensor([0.0, 1, 0, 1, 0, 1], dtype=torch.float64)[:, None]
    parts = {"a": of(L, 9, 6), "w": parameter(6, columns)}
    symmetry = trace_symmetry(network(lambda s, x: torch.tanh(s.a(x)) @ (s.w * read), **parts), vectors(2, 9))
    (note,) = (note for note in symmetry.notes if "no output depends on" in note)
    assert f"{3 * columns} of {6 * columns} entries of w" in note
    assert "27 of 54 entries of a.weight" in note


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_group_is_said_to_be_whole(name: str) -> None:
    nullity, shape, function, parts = WHOLE[name]
    symmetry = trace_symmetry(network(function, **parts), vectors(2, *shape))
    assert symmetry.nullity == nullity
    if not left_out(symmetry):
        assert symmetry.dimension == nullity
    assert f"nullity of the Jacobian: {nullity}" in str(symmetry).splitlines()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Tanh, nn.GELU])
@pytest.mark.parametrize("widths", [(3, 4, 2), (5, 7, 6, 3), (2, 6, 6, 6, 2), (3, 3, 3, 3)])
@pytest.mark.few(4)
def test_dead_and_always_active_units_raise_no_alarm(widths: tuple[int, ...], activation: type[nn.Module]) -> None:
    symmetry = trace_symmetry(perceptron(*widths, activation=activation), torch.randn(2, widths[0]))
    assert symmetry.nullity in (symmetry.dimension, None)  # of some no weights are found at which no unit is special
    assert symmetry.nullity is not None or activation is nn.PReLU
    assert not symmetry.notes


def test_nodes_of_a_graph_are_no_samples() -> None:
    """The first axes of both inputs have one size, and the network takes no two of its places alone."""
    graph = network(lambda s, x, edges: s.b(edges @ torch.relu(s.a(x))), a=of(L, 6, 4), b=of(L, 4, 5))
    symmetry = trace_symmetry(graph, (vectors(5, 6), vectors(5, 5)))
    assert (symmetry.nullity, symmetry.notes) == (symmetry.dimension, ())


def test_integers_of_all_samples_are_among_those_of_the_nullity() -> None:
    """The first samples hold one of six users."""
    tables = network(lambda s, i, j: (s.a(i) * s.b(j)).sum(-1), a=of(nn.Embedding, 6, 3), b=of(nn.Embedding, 6, 3))
    pairs = torch.arange(36)
    symmetry = trace_symmetry(tables, (pairs // 6, pairs % 6))
    assert (symmetry.dimension, symmetry.nullity, symmetry.notes) == (9, 9, ())


def test_a_tiny_constant_beside_a_sum_counts() -> None:
    """As the eps of modulated convolutions, beside which sizes are no scales."""

    def modulated(s: Any, x: Tensor) -> Tensor:
        w = s.w * s.m(x)[:, None]
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-12)
        return s.o(torch.tanh((w @ F.relu(s.a(x))[..., None])[..., 0]))

    parts = {"w": parameter(5, 3), "m": of(L, 4, 3), "a": of(L, 4, 3), "o": of(L, 5, 6)}
    assert trace_symmetry(network(modulated, **parts), vectors(6, 4), nullity=False).scales == 3


def test_the_nullity_is_measured_only_if_asked_for() -> None:
    own = nn.Sequential(L(8, 4), nn.ReLU(), L(4, 3)).double()
    measured, other = trace_symmetry(own, vectors(2, 8)), trace_symmetry(own, vectors(2, 8), nullity=False)
    assert (measured.nullity, other.nullity) == (4, None)
    assert other.dimension == 4
    assert "nullity" not in str(other)


def test_weights_that_are_special_raise_no_alarm() -> None:
    own = perceptron(4, 6, 3)
    with torch.no_grad():
        own[0].bias.fill_(-100)
        own[2].weight.zero_()
    symmetry = trace_symmetry(own, torch.zeros(2, 4))
    assert (symmetry.nullity, symmetry.notes) == (6, ())


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist": lambda z, c: torch.cdist(z, c),
    "other norm": lambda z, c: torch.cdist(z, c, 3.0),
    "differences": lambda z, c: (z[:, None] - c).norm(dim=-1),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_have_the_right_derivative(name: str) -> None:
    """Under ``vmap``, torch's derivative of ``cdist`` is another one."""

    def quantise(s: Any, x: Tensor) -> Tensor:
        return s.o((-DISTANCES[name](s.e(x), s.c).square()).softmax(-1) @ s.c)

    own = network(quantise, e=of(L, 7, 3), c=parameter(5, 3), o=of(L, 3, 2))
    symmetry = trace_symmetry(own, vectors(3, 7))
    whole = 3 if name == "other norm" else 11  # translations; matrices, as the softmax ignores what all codes share
    assert symmetry.nullity == whole
    assert local_dimension(symmetry, own, vectors(100, 7)).nullity == whole
    outputs = NetworkOutputs(own, vectors(40, 7))
    assert int(torch.linalg.matrix_rank(outputs.jacobian(outputs.own))) == len(outputs.own) - whole


def test_indicators_are_computed_in_one_batch() -> None:
    with completeness._Batched(leaky=False):
        found = torch.vmap(lambda own: F.one_hot(own.argmax(-1), num_classes=3))(vectors(4, 2, 3))
    assert torch.equal(found, F.one_hot(vectors(4, 2, 3).argmax(-1), 3))


def test_an_error_of_the_group_is_not_taken_for_a_missing_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise IndexError("of the group")

    monkeypatch.setattr(completeness, "tangents_at", broken)
    with pytest.raises(IndexError, match="of the group"):
        trace_symmetry(perceptron(3, 4, 2), vectors(2, 3))


def test_tokens_that_the_example_lacks_raise_no_alarm() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Embedding(30, 4), L(4, 6), nn.Tanh(), L(6, 9))
    symmetry = trace_symmetry(own, torch.zeros(2, 3, dtype=torch.long))
    assert symmetry.nullity == symmetry.dimension == 16 + 4
    assert not symmetry.notes


# What no rule finds: weights that are used in more than one way.
MISSING: dict[str, tuple[int, int, str, Callable[..., Any], dict[str, Any]]] = {
    "two weights read one value": (21, 21, "b.weight, c.weight", lambda s, x: nn.functional.linear(
        torch.tanh(s.a(x)), s.b.weight.sinh(), s.b.bias) + nn.functional.linear(torch.tanh(s.a(x)), s.c.weight.sinh()),
        {"a": of(L, 6, 7), "b": of(L, 7, 3), "c": of(L, 7, 3, bias=False)}),
    "an orthogonal matrix of weights": (10, 10, "a.weight", lambda s, x: s.b(torch.tanh(
        x @ torch.linalg.qr(s.a.weight.T).Q)), {"a": of(L, 6, 4, bias=False), "b": of(L, 4, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 6), (3, 6)])
@pytest.mark.parametrize("name", MISSING)
def test_a_note_counts_what_is_missing_and_names_the_parameters(name: str, shape: tuple[int, ...]) -> None:
    nullity, missing, names, function, parts = MISSING[name]
    symmetry = trace_symmetry(network(function, **parts), vectors(*shape))
    assert symmetry.nullity == nullity
    text = (
        f"leaves out {missing} of {nullity} dimensions of the Jacobian's nullity (at these sizes), which move {names}"
    )
    assert left_out(symmetry).endswith(text)


def test_what_is_not_measured_is_none() -> None:
    inputs = vectors(2, 5)
    own = perceptron(5, 6, 3).double()
    assert trace_symmetry(own, inputs).nullity == 6
    assert trace_symmetry(own, inputs, check=False).nullity is None
    assert trace_symmetry(own, inputs, shifts=False).nullity is None
    assert trace_symmetry(perceptron(5, 60, 60, 3), inputs.float()).nullity is None
    single = network(lambda s, x: s.b(rounded(torch.relu(s.a(x)))), a=of(L, 5, 6), b=of(L, 6, 3))
    assert trace_symmetry(single, inputs).nullity is None
    written = network(lambda s, x: s.b(s.h(torch.tanh(s.a(x)))), a=of(L, 5, 6), b=of(L, 6, 3), h=Written)
    assert trace_symmetry(written, inputs).nullity is None


def test_units_that_are_dead_at_the_tested_weights_are_read() -> None:
    """Gates of channels and places: at the weights that explain everything, a unit of the first gate is dead."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = torch.relu(s.a(x))
        gate = [s.g(torch.relu(s.f(pooled))) for pooled in (x.mean((2, 3)), x.amax((2, 3)))]
        x = x * torch.sigmoid(sum(gate))[:, :, None, None]
        places = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return s.o((x * torch.sigmoid(s.p(places))).mean((2, 3)))

    torch.manual_seed(0)
    parts = {"a": of(nn.Conv2d, 3, 6, 3, padding=1), "f": of(L, 6, 3), "g": of(L, 3, 6),
        "p": of(nn.Conv2d, 2, 1, 3, padding=1), "o": of(L, 6, 3)}  # fmt: skip
    symmetry = trace_symmetry(network(forward, **parts), vectors(2, 3, 8, 8))
    assert (symmetry.nullity, symmetry.notes) == (4, ())


def test_mask_values_of_the_precision_at_hand_may_lack_a_type() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        scores = s.q(x) @ s.k(x).mT
        ahead = torch.ones(4, 4, dtype=torch.bool).triu(1)
        scores = torch.where(ahead, torch.full((), torch.finfo(scores.dtype).min), scores)
        return s.o(scores.softmax(-1) @ x)

    own = network(forward, q=of(L, 6, 4), k=of(L, 6, 4), o=of(L, 6, 3)).float()
    symmetry = trace_symmetry(own, vectors(2, 4, 6).float())
    assert symmetry.nullity == symmetry.dimension == 16 + 4


def rounded(x: Tensor) -> Tensor:
    """Round in a kernel that takes single precision alone."""
    single = x.float()
    if single.dtype != torch.float32:
        raise TypeError("expected single precision")
    return single.double()


class Written(nn.Module):
    """Writes over a value that its derivative needs."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1] = x[:, 0]
        return x


class Clipped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(0, 6)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.ReLU6, Clipped])
def test_networks_of_more_than_500_parameters_are_measured(activation: type[nn.Module]) -> None:
    own = perceptron(12, 24, 24, 4, activation=activation)
    symmetry = trace_symmetry(own, torch.randn(2, 12))
    assert sum(weight.numel() for weight in own.parameters()) == 1012
    assert not symmetry.notes
    unknown = "not measured (no derivative, or another at all tested weights)"
    found = {nn.ReLU: "48", nn.Tanh: "0", nn.ReLU6: "0", Clipped: unknown}
    assert " ".join(str(symmetry).split()).endswith(f"nullity of the Jacobian: {found[activation]}")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("activation", [nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardshrink, lambda: nn.Threshold(
    0.1, 20.0)])  # fmt: skip
def test_clipped_units_of_small_networks_raise_no_alarm(activation: Callable[[], nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    own = nn.Sequential(L(4, 4), activation(), L(4, 4), activation(), L(4, 2))
    symmetry = trace_symmetry(own, torch.randn(2, 4))
    assert (symmetry.dimension, symmetry.nullity, symmetry.notes) == (0, 0, ())


def test_what_a_clipped_network_lacks_has_a_note() -> None:
    """As in `MISSING`: one value is read by two weights, which are functions of parameters."""
    clip, linear = nn.functional.hardtanh, nn.functional.linear
    own = network(lambda s, x: linear(clip(s.a(x)), s.b.weight.sinh(), s.b.bias)
        + linear(clip(s.a(x)), s.c.weight.sinh()),
        a=of(L, 5, 4), b=of(L, 4, 3), c=of(L, 4, 3, bias=False))  # fmt: skip
    assert "12 of 12 dimensions" in left_out(trace_symmetry(own, vectors(2, 5)))


@pytest.mark.parametrize("rectified", [torch.relu, torch.relu_, nn.functional.relu, Tensor.relu, nn.ReLU(inplace=True)])
def test_dead_units_of_large_networks_raise_no_alarm(rectified: Callable[[Tensor], Tensor]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        for layer in (s.a, s.b, s.c, s.d, s.e):
            x = rectified(layer(x))
        return s.f(x)

    parts = {name: of(L, 10, 10) for name in "abcde"} | {"f": of(L, 10, 3)}
    symmetry = trace_symmetry(network(forward, **parts), vectors(2, 10))
    assert (symmetry.nullity, symmetry.notes) == (50, ())


def test_what_a_large_network_lacks_has_a_note() -> None:
    """As in `MISSING`, with more units."""
    own = network(
        lambda s, x: nn.functional.linear(torch.tanh(s.a(x)), s.b.weight.sinh(), s.b.bias)
        + nn.functional.linear(torch.tanh(s.a(x)), s.c.weight.sinh()),
        a=of(L, 20, 22), b=of(L, 22, 3), c=of(L, 22, 3, bias=False),
    )  # fmt: skip
    symmetry = trace_symmetry(own, vectors(2, 20))
    assert symmetry.nullity == 66
    assert left_out(symmetry).endswith("66 of 66 dimensions of the Jacobian's nullity (at these sizes), which move "
        "b.weight, c.weight")  # fmt: skip


def test_the_table_says_why_nothing_was_measured() -> None:
    inputs = vectors(2, 5)
    large = trace_symmetry(perceptron(5, 60, 60, 3), inputs.float())
    assert "nullity of the Jacobian: not measured (more than 2000 parameters: see\n  local_dimension)" in str(large)
    single = trace_symmetry(
        network(lambda s, x: s.b(rounded(torch.relu(s.a(x)))), a=of(L, 5, 6), b=of(L, 6, 3)), inputs
    )
    assert "not measured (the network rounds to torch.float32)" in str(single)
    assert "not measured" not in str(trace_symmetry(perceptron(5, 60, 60, 3), inputs.float(), check=False))


def test_the_output_that_counts_is_measured() -> None:
    own = network(
        lambda s, x: (s.b(torch.relu(s.a(x))), s.c(torch.tanh(s.a(x)))), a=of(L, 5, 6), b=of(L, 6, 3), c=of(L, 6, 2)
    )
    whole = trace_symmetry(own, vectors(2, 5))
    assert (whole.nullity, whole.dimension) == (0, 0)
    one = trace_symmetry(own, vectors(2, 5), output=0)
    assert (one.nullity, one.dimension) == (6 + 14, 14)  # the other output still holds the scales
    assert left_out(one).endswith(
        "6 of 20 dimensions of the Jacobian's nullity (at these sizes), which move a.weight, a.bias, b.weight"
    )


def test_where_searches_disagree_a_note_says_what_is_left_out_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    _, missing, names, function, parts = MISSING["two weights read one value"]
    own, measured, more = network(function, **parts), completeness._measured, itertools.count()

    def growing(*args: Any, **options: Any) -> Any:
        found = measured(*args, **options)
        return None if found is None else found._replace(whole=found.whole + next(more))

    monkeypatch.setattr(completeness, "_measured", growing)
    symmetry = trace_symmetry(own, vectors(2, 6))
    assert symmetry.nullity is None
    assert f"at most {missing} of at most" in left_out(symmetry)
    assert left_out(symmetry).endswith(names)


def test_units_that_are_cut_off_at_some_weights_hide_nothing() -> None:
    """A token behind a ReLU: as a bias takes it up, most of it is free, but where no unit is active none is read."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return s.b(torch.cat([torch.relu(s.token).expand(len(x), 1, 8), h], 1).mean(1))

    own = network(forward, a=of(L, 5, 8), b=of(L, 8, 2), token=parameter(8))
    symmetry = trace_symmetry(own, vectors(2, 3, 5))
    assert symmetry.nullity == 6
    assert left_out(symmetry).endswith("which move token")


def test_norms_that_nearly_undo_scales_raise_no_alarm() -> None:
    own = network(lambda s, x: s.b(s.n(s.a(x))), a=of(L, 7, 4), n=of(nn.RMSNorm, 4), b=of(L, 4, 5))
    symmetry = trace_symmetry(own, vectors(2, 7))
    assert symmetry.nullity == symmetry.dimension == 4 + 6
    assert not symmetry.notes


def test_measuring_leaves_network_and_random_numbers_alone() -> None:
    own = perceptron(5, 6, 3)
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    trace_symmetry(own, torch.zeros(2, 5))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())
    assert all(weight.grad is None for weight in own.parameters())


def test_convolutions_with_batch_norms_are_whole() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), L(3, 2),
    )  # fmt: skip
    symmetry = trace_symmetry(own, torch.randn(2, 2, 7, 7))
    assert symmetry.nullity == symmetry.dimension
    assert not symmetry.notes


def test_biases_behind_a_norm_that_keep_units_on_hide_nothing() -> None:
    network = nn.Sequential(nn.Conv1d(7, 6, 1), nn.GroupNorm(6, 6), nn.ReLU(), nn.Conv1d(6, 4, 1)).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in network[1].parameters():
            weight.normal_()
    symmetry = trace_symmetry(network, torch.randn(3, 7, 5, dtype=torch.float64))
    assert symmetry.nullity == symmetry.dimension == 12
    assert not symmetry.notes


def test_a_saved_mask_of_a_longer_context_causes_no_note() -> None:
    def attend(s: Any, x: Tensor) -> Tensor:
        scores = (s.q(x) @ s.k(x).mT).masked_fill(s.mask[: x.shape[1], : x.shape[1]] == 0, -torch.inf)
        weighted: Tensor = scores.softmax(-1) @ x
        return weighted

    network = Program(attend, {"q": of(nn.Linear, 5, 2), "k": of(nn.Linear, 5, 2)}).double()
    network.register_buffer("mask", torch.ones(8, 8).tril())
    symmetry = trace_symmetry(network, torch.randn(3, 4, 5, dtype=torch.float64))
    assert symmetry.nullity == symmetry.dimension == 6
    assert not symmetry.notes
