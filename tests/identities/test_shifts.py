"""Translations of weights (docs/theory/translations.md): group laws, dimension, the unchanged function."""

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, assert_refused, of, parameter, sequential
from orbit_laws import assert_a_group_acts, assert_members_have_one_form, assert_values_move, drawn
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.symmetry import Symmetry, local_dimension, trace_symmetry

EXACT = 1e-12
L, N = nn.Linear, nn.LayerNorm
WIDTH, HEADS, INNER, VOCABULARY, LENGTH = 8, 2, 6, 14, 5


def heads(packed: Tensor) -> tuple[Tensor, ...]:
    return tuple(packed.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4))


class Block(nn.Module):
    """A transformer's block: norms before the layers or behind them, the gain of a branch, fused attention or not."""

    def __init__(self, *, first: bool = True, gain: bool = False, fused: bool = True, biased: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = N(WIDTH), N(WIDTH)
        self.qkv, self.out = L(WIDTH, 3 * WIDTH, bias=biased), L(WIDTH, WIDTH)
        self.up, self.down = L(WIDTH, INNER), L(INNER, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if gain else 1.0
        self.first, self.fused = first, fused

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.qkv(x))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
            mixed = F.dropout((q @ k.mT / 2 + mask).softmax(-1), 0.1, self.training) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.gain * self.attend(self.norm1(x))
            return x + self.gain * self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Language(nn.Module):
    """A small language model with learned positions."""

    def __init__(self, *, tied: bool = True, **block: Any) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(**block), Block(**block))
        self.norm, self.head = N(WIDTH), L(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def vision(s: Any, x: Tensor) -> Tensor:
    patches = s.patches(x).flatten(2).mT
    x = torch.cat([patches, s.token.expand(len(x), -1, -1)], 1) + s.positions
    return s.head(s.norm(s.block(x))[:, -1])


def norm_by_hand(s: Any, x: Tensor) -> Tensor:
    x = s.first(x)
    x = s.gain * ((x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5))
    return s.second(x + s.bias)


def tied_head(s: Any, tokens: Tensor) -> Tensor:
    x = s.tokens(tokens) + s.positions
    x = x + s.down(F.gelu(s.up(s.norm1(x))))
    return F.linear(s.norm2(x), s.tokens.weight, getattr(s, "bias", None))


def tied_to(norm: Callable[[], nn.Module], **more: Callable[[], nn.Parameter]) -> nn.Module:
    parts = {"tokens": of(nn.Embedding, VOCABULARY, WIDTH), "positions": parameter(LENGTH, WIDTH), "norm2": norm}
    return Program(tied_head, {**parts, "norm1": norm, "up": of(L, WIDTH, INNER), "down": of(L, INNER, WIDTH), **more})


TOKENS, VECTOR, IMAGE = "tokens", (5,), (3, 4, 4)
VISION = {
    "patches": of(nn.Conv2d, 3, WIDTH, 2, 2), "token": parameter(1, 1, WIDTH), "positions": parameter(1, 5, WIDTH),
    "block": of(Block, gain=True), "norm": of(N, WIDTH), "head": of(L, WIDTH, 10),
}  # fmt: skip
# One layer: biases of K and V, of two norms, rows of four readers, means of two writers and of their biases.
LAYER = 4 * WIDTH + (3 * WIDTH + INNER) + (WIDTH + 1) + (INNER + 1)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "tied": (Language, TOKENS, 2 * LAYER + LENGTH),
    "untied": (of(Language, tied=False), TOKENS, 2 * LAYER + LENGTH + WIDTH + VOCABULARY - 1),
    "attention by hand": (of(Language, fused=False), TOKENS, 2 * LAYER + LENGTH),
    # The stream is read as it is, too: positions and biases of norms against the next bias that is added. The first
    # layer reads no norm, and the last norm's bias is read by a norm.
    "norms behind": (of(Language, first=False), TOKENS, 2 * LAYER - 3 * WIDTH + 1),
    # Patches and token against positions, to their means; the last norm and the head.
    "vision": (lambda: Program(vision, VISION), IMAGE, LAYER + 2 * WIDTH + (12 + 1 + 1 + 5) - 2 + WIDTH + 10),
    "linear": (sequential(of(L, 5, 4), of(L, 4, 6), nn.Tanh, of(L, 6, 2)), VECTOR, 4),
    "instance norm": (sequential(of(nn.Conv2d, 3, 4, 1), of(nn.InstanceNorm2d, 4), nn.ReLU, of(nn.Conv2d, 4, 2, 1)),
        IMAGE, 4),
    "one group": (sequential(of(nn.Conv2d, 3, 4, 1), of(nn.GroupNorm, 1, 4), nn.ReLU, of(nn.Conv2d, 4, 2, 1)),
        IMAGE, 1),
    # Keys and values have no bias to take off what the rows add that read the norm: a softmax and the output's bias do.
    "attention without biases": (of(Language, biased=False, gain=True), TOKENS, 2 * (LAYER - 4 * WIDTH) + LENGTH),
    # Rows of `up`, means of what is written, biases of the norms, and the embedding: all rows by one multiple of the
    # last inverse gain, against positions; without gains each row by itself.
    "tied to gains": (of(tied_to, of(N, WIDTH, bias=False)), TOKENS, INNER + (LENGTH + INNER + 1) + 1),
    "tied to a norm": (of(tied_to, of(N, WIDTH, elementwise_affine=False)), TOKENS,
        INNER + (LENGTH + INNER + 1) + VOCABULARY),
    "tied, with a bias": (of(tied_to, of(N, WIDTH), bias=parameter(VOCABULARY)), TOKENS,
        INNER + (LENGTH + INNER + 1) + 2 * WIDTH + 1),
    "norm by hand": (
        lambda: Program(norm_by_hand, {"first": of(L, 5, 4), "gain": parameter(4), "bias": parameter(4),
                                       "second": of(L, 4, 3)}), VECTOR, (5 + 1) + 4 + 3),
    "groups": (sequential(of(nn.Conv2d, 3, 6, 3), of(nn.GroupNorm, 3, 6), nn.ReLU, of(nn.Conv2d, 6, 4, 1),
        of(nn.GroupNorm, 2, 4)), IMAGE, 3 + 2),
    "two norms in a sum": (lambda: Program(lambda s, x: s.out(torch.relu(s.norm1(s.a(x)) + s.norm2(s.b(x)))),
        {"a": of(L, 5, 4), "b": of(L, 5, 4), "norm1": of(nn.BatchNorm1d, 4), "norm2": of(nn.BatchNorm1d, 4),
        "out": of(L, 4, 2)}), VECTOR, 3 * 4),
}  # fmt: skip


def inputs(kind: Any, samples: int) -> Tensor:
    if kind == TOKENS:
        return torch.randint(0, VOCABULARY, (samples, LENGTH))
    return torch.randn(samples, *kind, dtype=torch.float64)


@functools.cache
def traced(name: str) -> tuple[nn.Module, Symmetry]:
    torch.manual_seed(0)
    make, kind, _ = NETWORKS[name]
    network = make().double().eval()
    for key, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            tensor.add_(0.3 * (torch.rand_like(tensor) if "var" in key else torch.randn_like(tensor)))
    return network, trace_symmetry(network, inputs(kind, 2))


def apart(one: nn.Module, two: nn.Module) -> float:
    """The largest difference of two networks' tensors, relative to the largest entry of each."""
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), 1.0) for a, b in pairs)


@pytest.mark.few(4, "untied", "instance norm")
@pytest.mark.parametrize("name", NETWORKS)
def test_dimension(name: str) -> None:
    _, symmetry = traced(name)
    assert symmetry.shifts == NETWORKS[name][2]
    assert symmetry.worst_error < 1e-10
    assert sum(symmetry.shift_kinds.values()) >= symmetry.shifts
    assert all(f"shifts, {count} {kind}" in str(symmetry) for kind, count in symmetry.shift_kinds.items())


@pytest.mark.few(3, "untied")
@pytest.mark.parametrize("name", NETWORKS)
def test_group_laws_and_action(name: str) -> None:
    network, symmetry = traced(name)
    a, b, c = (drawn(symmetry, seed) for seed in range(3))
    assert bool(a.shift.any())
    assert_a_group_acts(symmetry, network, EXACT)
    left = symmetry.compose(symmetry.compose(c, b), a).shift
    right = symmetry.compose(c, symmetry.compose(b, a)).shift
    torch.testing.assert_close(left, right, rtol=EXACT, atol=EXACT)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("name", "samples", "common"),
    [("tied", 40, WIDTH), ("attention by hand", 40, WIDTH), ("linear", 100, 7), ("instance norm", 20, 5),
        ("attention without biases", 40, WIDTH), ("tied to gains", 40, WIDTH - 1), ("tied to a norm", 40, WIDTH - 1),
        ("tied, with a bias", 40, WIDTH), ("norm by hand", 40, 4), ("groups", 40, None)],
)  # fmt: skip
@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.few(6, "False-instance norm-20-5", "False-norm by hand-40-4")
def test_all_of_it_is_there(name: str, samples: int, common: int | None, log_softmax: bool) -> None:
    """The nullity of the Jacobian, with the common shift of logits and without."""
    network, symmetry = traced(name)
    torch.manual_seed(1)
    found = local_dimension(symmetry, network, inputs(NETWORKS[name][1], samples), log_softmax=log_softmax)
    assert found.nullity == found.orbit_dimension
    assert found.orbit_dimension - symmetry.dimension == symmetry.common_shift * log_softmax
    assert found.gap > 1e6
    assert name in ("instance norm", "groups") or symmetry.common_shift == common
    copied = pickle.loads(pickle.dumps(symmetry))  # to other processes, too
    assert (copied.common_shift, copied.dimension) == (symmetry.common_shift, symmetry.dimension)
    assert copied.fingerprint == symmetry.fingerprint


@pytest.mark.parametrize("name", ["tied", "vision", "groups"])
def test_shifts_add(name: str) -> None:
    """What nobody sees is projected away: the same for all rows of a weight, times what enters it."""
    network, symmetry = traced(name)
    a, b = (symmetry.identity().replaced(shift=drawn(symmetry, seed).shift) for seed in (0, 1))
    torch.testing.assert_close(symmetry.compose(a, b).shift, a.shift + b.shift, rtol=EXACT, atol=EXACT)
    one, two = (symmetry.act(x, symmetry.act(y, network)) for x, y in ((a, b), (b, a)))
    assert apart(one, two) < EXACT
    assert apart(one, symmetry.act(symmetry.compose(a, b), network)) < EXACT


def test_what_rows_add_shows_inside_the_network() -> None:
    """A constant that depends on the norm's bias and gain, so that the network is needed."""
    network, symmetry = traced("attention without biases")
    element, tokens = drawn(symmetry, 0), inputs(TOKENS, 3)
    assert symmetry.on_activations(element, "blocks.1.qkv", network).shift is not None
    assert_values_move(symmetry, element, network, tokens, ["blocks.1.qkv"], 1e-10)
    assert_refused(symmetry.on_activations, element, "blocks.1.qkv", says=["blocks.1.norm1.bias", "shifts=False"])


def test_left_out_on_request() -> None:
    network, symmetry = traced("tied")
    linear = trace_symmetry(network, inputs(TOKENS, 2), shifts=False)
    assert (linear.shifts, linear.dimension, linear.common_shift) == (0, symmetry.dimension - symmetry.shifts, 0)
    assert linear.shift_kinds == {}


ADDED: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "half": (93, lambda s, h: torch.tanh(s.a(h) + 0.5 * s.f(h))),
    "gains before a norm": (136, lambda s, h: s.n(s.a(h) + s.g * s.f(h))),
    "three": (141, lambda s, h: torch.tanh(s.a(h) + s.g * s.f(2 * h) - h @ s.w)),
}


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("name", ADDED)
def test_layers_that_read_one_translated_value_move_against_each_other(name: str) -> None:
    torch.manual_seed(0)
    dimension, function = ADDED[name]
    parts = {"i": of(L, 9, 7), "m": of(N, 7), "a": of(L, 7, 6), "f": of(L, 7, 6), "w": parameter(7, 6),
        "g": parameter(6), "n": of(N, 6), "o": of(L, 6, 8)}  # fmt: skip
    network = Program(lambda s, x: s.o(function(s, s.m(s.i(x)))), parts).double().eval()
    symmetry = trace_symmetry(network, torch.randn(24, 9, dtype=torch.float64))
    assert symmetry.dimension == dimension  # the nullity of the Jacobian
    assert_a_group_acts(symmetry, network, 1e-11)
    assert_members_have_one_form(symmetry, network, 1e-11)
