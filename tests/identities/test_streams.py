"""Residual streams whose norm alone is seen are rotated: which norms allow it, behind which gains, and what forbids it.

See docs/theory/transformers.md, 2.
"""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from architectures import Logits
from helpers import Program, assert_refused, assert_same, of, parameter
from orbit_laws import (
    assert_dimension_is_the_nullity,
    assert_tangents_change_no_output,
    assert_values_move,
    drawn,
)
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import trace_symmetry

N, D, M, V = 6, 5, 4, 9  # width of the input, the stream, the branches and the output
EXACT = 1e-10


def mean_square(x, gain, eps):
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def squares(x, gain, eps):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps) * gain


def centred(x, gain, eps):
    x = x - x.mean(-1, keepdim=True)
    return gain * x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def deviation(x, gain, eps):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) * gain


def variance(x, gain, eps):
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, unbiased=False) + eps).rsqrt() * gain


# By name: the norm, and whether it takes the mean off.
NORMS = {
    "rms_norm": (lambda x, gain, eps: F.rms_norm(x, (D,), gain, eps), False),
    "mean of squares": (mean_square, False),
    "sum of squares": (squares, False),
    "normalize": (lambda x, gain, eps: F.normalize(x, dim=-1, eps=max(eps, 1e-12)) * gain, False),
    "vector_norm": (lambda x, gain, eps: gain * x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + eps), False),
    "layer_norm": (lambda x, gain, eps: F.layer_norm(x, (D,), gain, None, eps), True),
    "group_norm": (lambda x, gain, eps: F.group_norm(x.mT, 1, gain, None, eps).mT, True),
    "centred squares": (centred, True),
    "deviation": (deviation, True),
    "variance": (variance, True),
}


def stream(norm, eps, s, x):
    """A stream of two branches, the second behind a gain of its own (LayerScale)."""
    x = s.write(x)
    x = x + s.down(torch.sigmoid(s.up(norm(x, s.gain, eps))))
    x = x + s.scale * s.other_down(torch.sigmoid(s.other_up(norm(x, s.other_gain, eps))))
    return s.head(norm(x, s.last_gain, eps))


@functools.cache
def traced(name, eps=1e-6):
    torch.manual_seed(0)
    linear = functools.partial(of, nn.Linear, bias=False)
    gains = {f"{kind}gain": parameter(D) for kind in ("", "other_", "last_")}
    parts = {"up": linear(D, M), "down": linear(M, D), "other_up": linear(D, M), "other_down": linear(M, D)}
    parts |= {"write": linear(N, D), "head": linear(D, V), "scale": parameter(D), **gains}
    network = Program(functools.partial(stream, NORMS[name][0], eps), parts).double()
    x = torch.randn(3, 6, N, dtype=torch.float64)
    if name == "group_norm":  # over the positions, too
        x = x[:, :1]
    return network, x, trace_symmetry(network, x)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.few(4)
def test_stream_behind_a_norm_is_rotated_between_its_gains(name):
    _, _, symmetry = traced(name)
    fixes_ones = NORMS[name][1]
    free = D - fixes_ones
    (rotation,) = symmetry.structure.rotations
    assert (rotation.size, rotation.fixes_ones, len(rotation.gains)) == (D, fixes_ones, 4)
    # A length that is only bounded from below has no eps: all that the stream holds has a scale in common.
    exact = name == "normalize"
    assert symmetry.dimension - symmetry.shifts == 4 * D + exact + free * (free - 1) // 2
    assert symmetry.worst_error <= EXACT
    (kind,) = [group.kind for group in symmetry.groups if group.rotations]
    about_ones = "rotation that fixes ones + 4 scales + 5 signs"
    assert kind == (about_ones if fixes_ones else f"rotation + {4 + exact} scales + 4 signs")
    assert not symmetry.notes


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_dimension_and_tangents_of_a_stream(name):
    network, x, symmetry = traced(name)
    inputs = torch.randn(80, N, dtype=torch.float64)
    assert_dimension_is_the_nullity(symmetry, network, inputs, 1e3, tolerance=1e-8)
    # A layer norm does not see multiples of ones that are written, nor rows of 1 / gain that read it.
    assert symmetry.shifts == (N + M + M + (M + M + V) if name == "layer_norm" else 0)
    found = assert_tangents_change_no_output(symmetry, network, x, EXACT)
    assert (found.rank, found.vectors.shape[1], found.statistics) == (symmetry.dimension, symmetry.dimension, 0)


@pytest.mark.parametrize("name", ["mean of squares", "rms_norm", "layer_norm", "centred squares", "variance"])
def test_without_eps_a_stream_has_one_scale_more(name):
    assert traced(name, 0.0)[2].dimension == traced(name)[2].dimension + 1


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_rotations_are_orthogonal_and_leave_ones_alone_where_these_are_seen(name):
    _, _, symmetry = traced(name)
    (matrix,) = drawn(symmetry).rotation
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(D, dtype=torch.float64))
    ones = torch.ones(D, dtype=torch.float64)
    assert torch.allclose(matrix @ ones, ones) == NORMS[name][1]
    assert float((matrix - torch.eye(D)).abs().min()) > 1e-4


# What forbids rotations: each program sees more of the stream than its norm.
WRITE, HEAD, GAIN = of(nn.Linear, 3, D, bias=False), of(nn.Linear, D, V), parameter(D)
FORBIDDEN = {
    "tied embeddings": (lambda s, x: mean_square(s.write(x), s.gain, 1e-6) @ s.write.weight, {"gain": GAIN}),
    "a norm in the stream": (lambda s, x: (lambda h: s.head(mean_square(h + mean_square(h, s.gain, 1e-6), s.other_gain,
        1e-6)))(s.write(x)), {"gain": GAIN, "other_gain": GAIN, "head": HEAD}),
    "an activation": (lambda s, x: s.head(torch.sigmoid(mean_square(s.write(x), 1, 1e-6))), {"head": HEAD}),
    "squares that are read one by one": (lambda s, x: s.head(s.write(x) * (-(s.write(x) ** 2)).exp()), {"head": HEAD}),
    "a norm of a part": (lambda s, x: (lambda h: s.head(h * h[..., :2].norm(dim=-1, keepdim=True)))(s.write(x)),
        {"head": HEAD}),
    "a constant of each unit": (lambda s, x: s.head(mean_square(s.write(x) + torch.arange(D), 1, 0.1)), {"head": HEAD}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_stream_of_which_more_is_seen_is_not_rotated(name):
    torch.manual_seed(0)
    function, parts = FORBIDDEN[name]
    network = Program(function, {"write": WRITE, **parts}).double()
    symmetry = trace_symmetry(network, torch.randn(4, 3, dtype=torch.float64))
    assert D not in [rotation.size for rotation in symmetry.structure.rotations]
    assert symmetry.worst_error <= EXACT
    told = any("gains (gain) cannot be folded into the weights after them" in note for note in symmetry.notes)
    assert told == (name in ("tied embeddings", "a norm in the stream"))


def test_a_number_that_is_added_to_a_norm_leaves_rotations_that_fix_the_vector_of_ones():
    """A gain that is a bias as well multiplies the norm plus 1."""
    torch.manual_seed(0)
    network = Program(lambda s, x: s.head(mean_square(s.write(x), s.gain, 1e-6) + s.gain),
        {"write": WRITE, "gain": GAIN, "head": HEAD}).double()  # fmt: skip
    symmetry = trace_symmetry(network, torch.randn(4, 3, dtype=torch.float64))
    (rotation,) = symmetry.structure.rotations
    assert (rotation.size, rotation.fixes_ones) == (D, True)
    assert symmetry.worst_error <= EXACT


def test_a_gain_that_holds_a_zero_is_refused_and_changes_nothing():
    network, _, symmetry = traced("rms_norm")
    broken = symmetry.act(symmetry.identity(), network)
    broken.other_gain.data[1] = 0
    before = {name: value.clone() for name, value in broken.state_dict().items()}
    element = drawn(symmetry)
    assert_refused(lambda: symmetry.act(element, broken, inplace=True), says=["other_gain", "zero", "mixing=False"])
    assert_same(before, dict(broken.state_dict()))
    symmetry.act(symmetry.sample(mixing=False), broken)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_single_tensors_move_with_their_gains(name):
    network, _, symmetry = traced(name)
    element = drawn(symmetry)
    moved = symmetry.act(element, network)
    own = dict(network.named_parameters())
    for key, tensor in symmetry.act_on(element, {key: own[key] for key in ("up.weight", "gain")}).items():
        torch.testing.assert_close(tensor, moved.get_parameter(key))
    assert_refused(lambda: symmetry.act_on(element, {"up.weight": own["up.weight"]}), says="the gain gain")


class Stream(nn.Module):
    """A stream whose values can be tapped."""

    def __init__(self):
        super().__init__()
        self.write, self.norm = nn.Linear(3, D), nn.RMSNorm(D, eps=1e-6)
        self.square, self.head = nn.Identity(), nn.Linear(D, V)

    def forward(self, x):
        x = self.write(x)
        return self.head(self.norm(x)) * (1 + self.square(x**2).mean(-1, keepdim=True))


def test_activations_behind_a_gain_need_the_network_and_squares_have_no_image():
    torch.manual_seed(0)
    network, x = Stream().double(), torch.randn(7, 3, dtype=torch.float64)
    with torch.no_grad():
        network.norm.weight.normal_()
    symmetry = trace_symmetry(network, x)
    element = drawn(symmetry, 1)
    assert_values_move(symmetry, element, network, x, ["write", "norm"], 1e-7)
    assert_refused(lambda: symmetry.on_activations(element, "norm"), says=["norm.weight", "mixing=False"])
    assert_refused(lambda: symmetry.on_activations(element, "square", network), says=["square holds squares"])


# Models of transformers.


def small(kind, **settings):
    transformers = pytest.importorskip("transformers")
    tokens = {"vocab_size": 14, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    if kind == "GPT2":
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 6, "n_positions": 5}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, **settings))
    else:
        sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens, **settings))
    return Logits(model).eval()


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_stream_of_a_language_model_is_rotated_unless_embeddings_are_tied(kind):
    torch.manual_seed(0)
    tokens = torch.arange(10).reshape(2, 5)
    for tie in (False, True):
        symmetry = trace_symmetry(small(kind, tie_word_embeddings=tie), tokens)
        sizes = [(rotation.size, rotation.fixes_ones) for rotation in symmetry.structure.rotations]
        assert sizes == ([] if tie else [(8, kind == "GPT2")])
        assert any("embeddings are tied" in note for note in symmetry.notes) == tie
        assert not math.isnan(symmetry.worst_error)


def test_gains_between_two_layer_norms_can_follow_the_roots_of_a_polynomial() -> None:
    """Left out: a direction whose points are no group, as roots cease to be real; the nullity counts it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(N, D), nn.LayerNorm(D)).double()
    first, norm = network
    gain = torch.linspace(-1, 2, D, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(gain)
        norm.bias.normal_()
    moved = copy.deepcopy(network)
    other = torch.from_numpy(np.sort(np.roots(np.poly(gain.numpy()) + np.eye(D + 1)[D] / 10)))
    across = torch.linalg.svd(torch.ones(1, D, dtype=torch.float64)).Vh[1:]
    values, frames = zip(*(torch.linalg.eigh(across @ own.diag() @ across.mT) for own in (gain, other)), strict=True)
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-9)  # the critical points of both polynomials
    turn = across.mT @ frames[1] @ frames[0].mT @ across + 1 / D
    with torch.no_grad():
        moved[0].weight.copy_(turn @ first.weight)
        moved[0].bias.copy_(turn @ first.bias)
        moved[1].weight.copy_(other)
        moved[1].bias.copy_(turn @ norm.bias)
    x = torch.randn(7, N, dtype=torch.float64)
    one, two = (F.layer_norm(own(x), (D,)) for own in (network, moved))
    torch.testing.assert_close(two, one @ turn.mT, rtol=EXACT, atol=EXACT)
