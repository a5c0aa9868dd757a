"""Named moves (docs/theory/transformers.md, 6): where they lead, that the function stays, laws, refusals."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, of, refused, sequential
from test_shifts import HEADS, LENGTH, VISION, VOCABULARY, WIDTH, Language, apart, heads, vision
from test_streams import Logits, small, traced
from torch import Tensor, nn

from lightning_sym.symmetry import (
    Moved,
    Symmetry,
    balance_heads,
    center_writers,
    fold_norm_gains,
    hadamard,
    rotate_stream,
    stream_axes,
    trace_symmetry,
    untie,
)
from lightning_sym.symmetry.group.cells import gram_matrices

EXACT = 1e-10
TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
IMAGES = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Rotary(nn.Module):
    """A small language model with RMS norms, norms of queries and keys, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), linear(WIDTH, VOCABULARY)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(3))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))
        self.gate, self.up, self.down = linear(WIDTH, 6), linear(WIDTH, 6), linear(6, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = heads(self.qkv(self.norms[0](x)))
        q, k = self.q_norm(q), self.k_norm(k)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return self.head(self.norms[2](x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))))


def grouped() -> nn.Module:
    return sequential(of(nn.Conv2d, 3, 8, 1), of(nn.GroupNorm, 2, 8), of(nn.Conv2d, 8, 5, 1))()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "untied": (of(Language, tied=False), TOKENS),
    "tied": (Language, TOKENS),
    "vision with LayerScale": (lambda: Program(vision, VISION), IMAGES),
    "norms of queries and keys": (Rotary, TOKENS),
    "groups": (grouped, IMAGES),
}


def generic(network: nn.Module, seed: int = 0) -> nn.Module:
    """Change all weights of a network, in place: gains of both signs, biases, everything."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            size = 0.5 if parameter.ndim > 1 else 0.7
            parameter.add_(size * torch.randn(parameter.shape, dtype=parameter.dtype, generator=draw))
    return network.eval()


@functools.cache
def known(name: str) -> tuple[nn.Module, Tensor, Symmetry]:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    network = generic(make().double())
    return network, x, trace_symmetry(network, x)


LEAVE = {"tied": "norm", "norms of queries and keys": "k_norm"}


def fold(name: str, network: nn.Module | None = None) -> Moved:
    own, _, symmetry = known(name)
    return fold_norm_gains(symmetry, network or own, leave=LEAVE.get(name, ()))


def assert_same_function(one: nn.Module, two: nn.Module, x: Tensor, tolerance: float = EXACT) -> None:
    torch.testing.assert_close(two(x), one(x), rtol=tolerance, atol=tolerance)


# ---- gains


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_folded_gains_are_one_and_biases_that_readers_take_up_are_zero(name: str) -> None:
    network, x, symmetry = known(name)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    result = fold(name)
    moved, element = result
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert_same_function(network, moved, x)
    assert result.change <= EXACT
    weights = dict(moved.named_parameters())
    folded = [norm for norm in symmetry.norms if norm.module != LEAVE.get(name)]
    assert len(folded) == len(symmetry.norms) - (name in LEAVE)
    for norm in folded:
        assert bool((weights[norm.gain] == 1).all())
        if norm.bias is not None:  # the head of language models has no bias
            kept = f"the bias {norm.bias} cannot be 0" in " ".join(result.notes)
            assert kept == (name == "untied" and norm.bias == "norm.bias") == bool(weights[norm.bias].any())
    assert apart(symmetry.act(element, network), moved) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_members_that_differ_by_gains_and_their_biases_fold_to_the_same_weights(name: str) -> None:
    """An element that is planted in the gains and in the biases that go with them is undone."""
    network, _, symmetry = known(name)
    _, element = fold(name)
    planted = symmetry.identity().replaced(log_scale=1.3 * element.log_scale, sign=element.sign)
    planted = planted.replaced(shift=0.7 * element.shift)
    other = symmetry.act(planted, network)
    assert apart(network, other) > 1e-2
    assert apart(fold(name).network, fold(name, other).network) < EXACT


def test_norms_that_are_left_keep_their_gains() -> None:
    network, _, symmetry = known("untied")
    moved, _ = fold_norm_gains(symmetry, network, leave=["blocks.0.*", "norm.weight"])
    before, after = network.state_dict(), moved.state_dict()
    for norm in symmetry.norms:
        assert torch.equal(after[norm.gain], before[norm.gain]) == (
            norm.module in ("blocks.0.norm1", "blocks.0.norm2", "norm")
        )


class Shifted(nn.Module):
    """A norm whose gain is 1 + its weight, which may be added, too."""

    def __init__(self, added: bool = False) -> None:
        super().__init__()
        self.weight, self.added = nn.Parameter(torch.randn(WIDTH)), added

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        return x + self.weight if self.added else x


def test_a_gain_of_one_and_a_weight_is_folded_to_a_weight_of_zero() -> None:
    network = generic(sequential(of(nn.Linear, 3, WIDTH), Shifted, of(nn.Linear, WIDTH, 5))().double())
    x = torch.randn(4, 3, dtype=torch.float64)
    moved, _ = fold_norm_gains(trace_symmetry(network, x), network)
    assert torch.equal(moved[1].weight, torch.zeros(WIDTH))
    assert float((moved(x) - network(x)).detach().abs().max()) < 1e-12


def refusing(move: Callable[..., Any], make: Callable[[], nn.Module], *arguments: Any, **options: Any) -> Any:
    """Trace a network, with generic weights, and try a move."""
    network = generic(make().double())
    x = TOKENS if any(isinstance(module, nn.Embedding) for module in network.modules()) else torch.randn(4, 3).double()
    return move(trace_symmetry(network, x, check=False), network, *arguments, **options)


def without_unit(make: Callable[[], nn.Module]) -> Callable[..., Any]:
    def move(symmetry: Symmetry, network: nn.Module, *arguments: Any) -> Any:
        with torch.no_grad():
            network[1].weight[3] = 0.0
        return fold_norm_gains(symmetry, network)

    return lambda: refusing(move, make)


READ = sequential(of(nn.Linear, 3, WIDTH), of(nn.RMSNorm, WIDTH), of(nn.Linear, WIDTH, 5))
LAYER = sequential(of(nn.Linear, 3, WIDTH), of(nn.LayerNorm, WIDTH), of(nn.Linear, WIDTH, 5))
GEMMA = sequential(of(nn.Linear, 3, WIDTH), of(Shifted, added=True), of(nn.Linear, WIDTH, 5))
POST = sequential(of(nn.Linear, 3, WIDTH), of(nn.LayerNorm, WIDTH), nn.Tanh, of(nn.Linear, WIDTH, 5))
PLAIN = sequential(of(nn.Linear, 3, WIDTH), nn.ReLU, of(nn.Linear, WIDTH, 5))
BESIDE = of(Language, first=False, tied=False)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(refusing, fold_norm_gains, Language, says=["the gain norm.weight", "tied", "untie(network)", "leave="]),
        refused(refusing, fold_norm_gains, PLAIN, says="no norm"),
        refused(refusing, fold_norm_gains, GEMMA, says=["the gain 1 + 1.weight", "leave="]),
        refused(refusing, fold_norm_gains, POST, says=["the gain 1.weight", "leave=['*.weight']"]),
        refused(refusing, fold_norm_gains, BESIDE, says=["the gains blocks.0.norm1.weight", "leave=['blocks.*.norm1"]),
        refused(refusing, fold_norm_gains, Rotary, says="the gains q_norm.weight, k_norm.weight"),
        refused(refusing, fold_norm_gains, READ, leave="nrom", says=["leave='nrom'", "1.weight"]),
        refused(without_unit(READ), says=["zeros in the gain 1.weight", "leave="]),
        refused(refusing, center_writers, READ, says="no layer norm"),
        refused(refusing, center_writers, Language, says=["tokens.weight", "tied", "untie(network)"]),
        refused(refusing, center_writers, BESIDE, says="others read the mean of positions.weight, tokens.weight"),
        refused(refusing, rotate_stream, Language, "hadamard", says=["gains (norm.weight)", "tied", "untie(network)"]),
        refused(refusing, rotate_stream, BESIDE, "hadamard", says=["blocks.0.norm1.weight", "added up"]),
        refused(refusing, rotate_stream, PLAIN, "hadamard", says="no stream"),
        refused(refusing, rotate_stream, READ, hadamard(4), says=["0 has 8 units", "[8, 8]", "[4, 4]"]),
        refused(refusing, rotate_stream, READ, torch.ones(8, 8), says=["not orthogonal", "differs by"]),
        refused(refusing, rotate_stream, READ, torch.full((8, 8), math.nan), says="not orthogonal"),
        refused(refusing, rotate_stream, READ, "hadamrd", says="hadamard"),
        refused(refusing, rotate_stream, READ, "random", stream="1", says=["1", "0"]),
        refused(refusing, rotate_stream, LAYER, hadamard(8), says=["vector of ones", "fixes_ones=True"]),
        refused(refusing, stream_axes, LAYER, says=["layer norms", "center_writers"]),
        refused(untie, PLAIN(), says="nothing to untie"),
        refused(untie, "gpt2", error=TypeError, says="got str"),
        refused(hadamard, 18, says="order 18"),
        refused(hadamard, 0, says="n must be"),
    ],
)
@pytest.mark.few(3)
def test_what_theory_forbids_is_refused_in_a_sentence(refusal: Callable[[], None]) -> None:
    refusal()


# ---- writers


class RMS(nn.Module):
    """A layer norm that does not take the mean off."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def with_rms_norms(network: nn.Module) -> nn.Module:
    """Let RMS norms take the place of layer norms, in place."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.LayerNorm):
            prefix, _, own = name.rpartition(".")
            setattr(network.get_submodule(prefix), own, RMS(module))
    return network


@pytest.mark.parametrize("name", ["untied", "vision with LayerScale"])
def test_centred_writers_let_rms_norms_take_the_place_of_layer_norms(name: str) -> None:
    network, x, symmetry = known(name)
    moved, element = center_writers(symmetry, network)
    assert_same_function(network, moved, x)
    means: dict[str, list[Tensor]] = {norm.module: [] for norm in symmetry.norms}
    watched = copy.deepcopy(moved)
    for key, found in means.items():
        hook = functools.partial(lambda found, module, inputs: found.append(inputs[0].detach().mean(-1)), found)
        watched.get_submodule(key).register_forward_pre_hook(hook)
    watched(x)
    assert max(float(mean.abs().max()) for found in means.values() for mean in found) < 1e-13
    again, _ = center_writers(symmetry, moved)
    assert apart(moved, again) < 1e-14
    other = symmetry.act(symmetry.identity().replaced(shift=-2 * element.shift), network)
    assert apart(network, other) > 1e-2
    assert apart(center_writers(symmetry, other).network, moved) < EXACT
    spherical = with_rms_norms(moved)
    assert_same_function(network, spherical, x)
    larger = trace_symmetry(spherical, x, check=False)
    assert [r.fixes_ones for r in larger.structure.rotations] == [False]  # O(d) in place of O(d - 1)
    assert_same_function(network, rotate_stream(larger, spherical, stream_axes(larger, spherical)).network, x)


# ---- streams


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied", "norms of queries and keys", "vision with LayerScale"])
@pytest.mark.parametrize("folded", [False, True])
def test_rotation_of_a_stream_by_any_matrix(name: str, folded: bool) -> None:
    network, x, symmetry = known(name)
    start = fold(name).network if folded else network
    fixes_ones = name != "norms of queries and keys"
    turn = hadamard(WIDTH, fixes_ones=fixes_ones)
    moved, element = rotate_stream(symmetry, start, "hadamard")
    assert_same_function(network, moved, x)
    assert apart(rotate_stream(symmetry, start, turn.float()).network, moved) < 1e-6
    assert apart(rotate_stream(symmetry, start, turn.numpy()).network, moved) == 0
    assert apart(symmetry.act(symmetry.inverse(element), moved), start) < EXACT
    back, second = rotate_stream(symmetry, moved, turn.mT)
    assert apart(back, start) < EXACT
    assert apart(symmetry.act(symmetry.compose(second, element), start), start) < EXACT
    random = [rotate_stream(symmetry, start, "random", generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert apart(random[0].network, random[1].network) == 0
    assert_same_function(network, random[0].network, x)
    writer = "patches" if "vision" in name else "tokens"
    one, two = (dict(each.named_parameters())[f"{writer}.weight"] for each in (start, moved))
    two_again = turn @ one.flatten(1) if "vision" in name else one @ turn.mT
    torch.testing.assert_close(two.reshape(two_again.shape), two_again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norms of queries and keys"])
def test_axes_of_a_stream_are_its_principal_components(name: str) -> None:
    network, x, symmetry = known(name)
    axes = stream_axes(symmetry, network, [x, (x.flip(1),)])
    torch.testing.assert_close(axes @ axes.mT, torch.eye(WIDTH, dtype=torch.float64))
    moved, _ = rotate_stream(symmetry, network, axes)
    assert_same_function(network, moved, x)
    seen: list[Tensor] = []
    for norm in moved.norms:
        norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].reshape(-1, WIDTH)))
    for batch in (x, x.flip(1)):
        moved(batch)
    vectors = nn.functional.normalize(torch.cat(seen), dim=1)
    moments = vectors.mT @ vectors
    torch.testing.assert_close(moments, moments.diag().sort(descending=True).values.diag(), rtol=0, atol=1e-12)
    # From the new network, they are the axes.
    torch.testing.assert_close(
        stream_axes(symmetry, moved, [x, x.flip(1)]).abs(), torch.eye(WIDTH, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", ["rms_norm", "centred squares", "vector_norm"])
def test_norms_that_are_written_out_are_folded_and_rotated_too(name: str) -> None:
    network, x, symmetry = traced(name)
    moved, _ = fold_norm_gains(symmetry, network)
    assert all(bool((moved.get_parameter(key) == 1).all()) for key in ("gain", "other_gain", "last_gain"))
    assert torch.equal(moved.scale, network.scale)  # a LayerScale is no gain of a norm
    assert_same_function(network, rotate_stream(symmetry, moved, "random").network, x)
    assert_refused(lambda: rotate_stream(symmetry, moved, "hadamard"), says="order 5")


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20, 28, 32, 36, 48, 56, 76, 128])
def test_hadamard_matrices_are_orthogonal_with_small_entries(n: int) -> None:
    plain, about_ones = hadamard(n), hadamard(n, fixes_ones=True)
    for matrix in (plain, about_ones):
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(plain.abs(), torch.full((n, n), n**-0.5, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(about_ones.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-13)
    largest = float(about_ones.abs().max()) * math.sqrt(n)
    assert largest < (1 + 1e-12 if math.log(n, 4) % 1 == 0 else 2.3)


# ---- heads


def test_balanced_heads_have_equal_gram_matrices_which_orthogonal_maps_alone_tell_apart() -> None:
    network, x, symmetry = known("untied")
    moved, element = balance_heads(symmetry, network)
    assert_same_function(network, moved, x)
    assert apart(symmetry.act(element, network), moved) == 0
    out, read = gram_matrices(symmetry.structure, dict(moved.named_parameters()))
    for one, two in zip(out, read, strict=True):
        torch.testing.assert_close(one, two, rtol=EXACT, atol=EXACT)
    assert apart(balance_heads(symmetry, moved).network, moved) < EXACT
    mixing = symmetry.sample(torch.Generator().manual_seed(3)).dense
    other = symmetry.act(symmetry.identity().replaced(dense=mixing), network)
    again, _ = gram_matrices(symmetry.structure, dict(balance_heads(symmetry, other).network.named_parameters()))
    for one, two in zip(out, again, strict=True):
        values = (torch.linalg.eigvalsh(gram) for gram in (one, two))
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-8)
    assert_refused(refusing, balance_heads, PLAIN, says="invertible matrices")


# ---- tied parameters, and models of libraries


def test_untied_network_has_the_same_function_and_the_larger_group() -> None:
    network, x, symmetry = known("tied")
    result = untie(network)
    assert torch.equal(result(x), network(x))
    assert network.head.weight is network.tokens.weight
    assert result.head.weight is not result.tokens.weight
    assert set(result.state_dict()) == set(network.state_dict())
    larger = trace_symmetry(result, x, check=False)
    assert larger.dimension - symmetry.dimension == known("untied")[2].dimension - symmetry.dimension > 0
    assert_same_function(network, rotate_stream(larger, fold_norm_gains(larger, result).network, "hadamard").network, x)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the RMS norms of Llama compute in the precision of their inputs, and not in single precision."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", forward)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_language_models_are_folded_and_rotated_by_hadamard_matrices(kind: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    tied = generic(small(kind, tie_word_embeddings=True).double())
    last = "model.norm.weight" if kind == "Llama" else "transformer.ln_f.weight"
    symmetry = trace_symmetry(tied, TOKENS, check=False)
    for move in (fold_norm_gains, functools.partial(rotate_stream, matrix="hadamard")):
        assert_refused(move, symmetry, tied, says=[last, "tied", "untie(network)"])
    network = Logits(untie(tied.model))
    symmetry = trace_symmetry(network, TOKENS, check=False)
    folded, first = fold_norm_gains(symmetry, network)
    moved, second = rotate_stream(symmetry, folded, "hadamard")
    assert_same_function(tied, folded, TOKENS)
    assert_same_function(tied, moved, TOKENS)
    assert apart(symmetry.act(symmetry.compose(second, first), network), moved) < EXACT
    assert all(bool((moved.get_parameter(norm.gain) == 1).all()) for norm in symmetry.norms)
    moved.model.save_pretrained(tmp_path)
    again = type(moved.model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert not again.config.tie_word_embeddings
    assert_same_function(tied, Logits(again), TOKENS)
