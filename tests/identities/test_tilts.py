"""What a layer norm's bias and readers without biases change together (intertwiners.md, 2.12)."""

import functools

import pytest
import torch
from helpers import Program, assert_refused, of, parameter
from orbit_laws import (
    assert_a_group_acts,
    assert_dimension_is_the_nullity,
    assert_members_have_one_form,
    assert_tangents_change_no_output,
    assert_values_move,
    drawn,
)
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import canonicalize, local_dimension, trace_symmetry

pytestmark = pytest.mark.measured

EXACT = 1e-10
D, V = 4, 6
L, N = nn.Linear, nn.LayerNorm
FREE = functools.partial(of, L, bias=False)


def head(s, x):
    return s.head(s.norm(torch.tanh(s.first(x))))


def two_readers(s, x):
    x = s.norm(torch.tanh(s.first(x)))
    return torch.tanh(s.head(x)) @ s.last + s.other(F.dropout(x, 0.5, s.training))


def without_gain(s, x):
    return s.head(F.layer_norm(torch.tanh(s.first(x)), (D,), None, s.offset))


def pooled(s, x):
    """Means over tokens, plain and weighted by a softmax, by a matrix that is written the other way round."""
    x = s.norm(torch.tanh(s.first(x)))
    weights = s.score(x).softmax(1).mT
    return s.head(x.mean(1)) + torch.tanh(((weights @ x).flatten(1)) @ s.last)


def tied(s, x):
    return F.linear(s.norm(torch.tanh(F.linear(x, s.weight.mT))), s.weight)


def behind_an_activation(s, x):
    return s.head(torch.relu(s.norm(torch.tanh(s.first(x)))))


def bias_used_twice(s, x):
    return s.head(s.norm(torch.tanh(s.first(x)))) + s.norm.bias.sum()


def twice_in_a_row(s, x):
    return s.head(s.norm(s.norm(torch.tanh(s.first(x)))))


def along_both_axes(s, x):
    x = s.norm(torch.tanh(s.first(x)))
    return torch.tanh(F.linear(x, s.square)) @ s.last + torch.tanh(x @ s.square)


FIRST, NORM, HEAD = of(L, 5, D), of(N, D), FREE(D, V)
PLAIN = {"first": FIRST, "norm": NORM, "head": HEAD}
# The network, its parts, the shape of a sample, and how many readers each tilt has.
NETWORKS = {
    "head": (head, PLAIN, (5,), [1]),
    "two readers": (two_readers, {**PLAIN, "other": of(L, D, V), "last": parameter(V, V)}, (5,), [2]),
    "without a gain": (without_gain, {"first": FIRST, "head": HEAD, "offset": parameter(D)}, (5,), [1]),
    "pooled": (pooled, {**PLAIN, "score": of(L, D, 1), "last": parameter(D, V)}, (3, 5), [3]),
    "with a bias": (head, {**PLAIN, "head": of(L, D, V)}, (5,), []),
    "without the norm's bias": (head, {**PLAIN, "norm": of(N, D, bias=False)}, (5,), []),
    "tied": (tied, {"weight": parameter(5, D), "norm": NORM}, (5,), []),
    "behind an activation": (behind_an_activation, PLAIN, (5,), []),
    "bias used twice": (bias_used_twice, PLAIN, (5,), []),
    "along both axes": (
        along_both_axes, {"first": FIRST, "norm": NORM, "square": parameter(D, D), "last": parameter(D, D)}, (5,), []),
    "twice in a row": (twice_in_a_row, PLAIN, (5,), []),
}  # fmt: skip
TILTED = [name for name, (*_, readers) in NETWORKS.items() if readers]


NOT_LINEAR = (
    "bias used twice",
    "twice in a row",
    "along both axes",
)  # of what the norm puts out: nothing of it is left


def generic(function, parts, *shape):
    torch.manual_seed(0)
    network = Program(function, parts).double().eval()
    for weight in network.parameters():
        nn.init.normal_(weight)
    return network, trace_symmetry(network, torch.randn(2, *shape, dtype=torch.float64))


@functools.cache
def traced(name):
    function, parts, shape, _ = (NETWORKS | LEANING)[name]
    return *generic(function, parts, *shape), torch.randn(60, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.few(6)
def test_dimension_is_the_nullity_of_the_jacobian(name):
    network, symmetry, x = traced(name)
    readers = NETWORKS[name][3]
    assert [len(tilt.readers) for tilt in symmetry.structure.tilts] == readers
    assert symmetry.worst_error <= EXACT
    if name in NOT_LINEAR:
        assert local_dimension(symmetry, network, x).nullity > symmetry.dimension == 0
    else:
        assert_dimension_is_the_nullity(symmetry, network, x, 1e4)
    assert ("rank-one maps, 4 of a layer norm's bias" in str(symmetry)) == bool(readers)


@pytest.mark.parametrize("name", TILTED)
def test_tangents_are_as_many_as_the_dimension_and_change_no_output(name):
    network, symmetry, x = traced(name)
    found = assert_tangents_change_no_output(symmetry, network, x[:7], EXACT)
    assert (found.rank, found.statistics) == (symmetry.dimension, 0)


@pytest.mark.parametrize("name", TILTED)
def test_one_canonical_form_in_which_the_bias_equals_the_gain(name):
    network, symmetry, _ = traced(name)
    form = assert_members_have_one_form(symmetry, network, 1e-9, range(2)).state_dict()
    assert not canonicalize(symmetry, network).notes
    (tilt,) = symmetry.structure.tilts
    bias = tilt.moved[0][0]
    gain = form[tilt.gains[bias]] if tilt.gains else torch.ones(D, dtype=torch.float64)
    torch.testing.assert_close(form[bias], gain, rtol=EXACT, atol=EXACT)
    fresh = symmetry.act(symmetry.identity(), network)
    nn.init.zeros_(fresh.get_parameter(bias))
    notes = canonicalize(symmetry, fresh).notes
    assert notes[0].startswith(f"{bias} stays")
    assert all(note.startswith("not unique") for note in notes[1:])


@pytest.mark.parametrize("name", [name for name in TILTED if name != "without a gain"])  # there no module puts it out
def test_action_on_what_the_norm_puts_out(name):
    network, symmetry, x = traced(name)
    element = drawn(symmetry, 1)
    (tilt,) = symmetry.structure.tilts
    assert ("norm", x.ndim - 1) in tilt.seen
    assert_values_move(symmetry, element, network, x[:7], ["norm"], 1e-7)
    assert_refused(lambda: symmetry.on_activations(element, "norm"), says=["norm.weight", "mixing=False"])
    assert symmetry.channels("norm").shifted


def test_what_cannot_be_tilted_is_refused():
    network, symmetry, x = traced("head")
    element = drawn(symmetry)
    broken = symmetry.act(symmetry.identity(), network)
    nn.init.zeros_(broken.norm.weight)
    assert_refused(lambda: symmetry.act(element, broken), says=["norm.weight", "zero", "mixing=False"])
    symmetry.act(symmetry.sample(mixing=False, shifts=False), broken)
    optimizer = torch.optim.Adam(broken.parameters())
    broken(x[:3]).sum().backward()
    optimizer.step()
    nn.init.ones_(broken.norm.weight)
    assert_refused(lambda: symmetry.act(element, broken, inplace=True, optimizer=optimizer), says="mixing=False")


def test_only_the_linear_group_has_no_tilts():
    network, symmetry, x = traced("head")
    assert trace_symmetry(network, x[:2], shifts=False).dimension == symmetry.dimension - symmetry.shifts - D


def test_a_norm_over_several_parts_of_a_rotated_stream_is_tilted():
    parts = {"first": of(L, 5, D), "norm": of(N, 2 * D), "head": FREE(2 * D, V)}
    network, symmetry = generic(lambda s, x: s.head(s.norm(s.first(x).flatten(1))), parts, 2, 5)
    assert [r.size for r in symmetry.structure.rotations] == [D]
    assert [t.size for t in symmetry.structure.tilts] == [2 * D]
    assert_dimension_is_the_nullity(symmetry, network, torch.randn(60, 2, 5, dtype=torch.float64), 1e4)
    assert_a_group_acts(symmetry, network, 1e-9)


# ---- streams that layer norms read, and linear layers as they are


def residual(s, x):
    h = s.first(x)
    return h + s.out(torch.relu(s.into(s.norm(h))))


def transformer(s, x):
    h = s.first(x)
    normed = s.norm(h)
    weights = (s.q(normed) @ s.k(normed).mT).softmax(-1)
    return s.head(h + s.out(weights @ s.into(normed)))


def post_norm(s, x):
    """The norm reads the sum; shifts of values are compensated up to multiples of ones, which it does not see."""
    h = s.first(x)
    weights = (s.q(h) @ s.k(h).mT).softmax(-1)
    return s.head(s.norm(s.whole(h + s.out(weights @ s.into(h)))))


def beside_a_constant(s, x):
    return s.head(residual(s, x) + 1)


def beside_its_norm(s, x):
    h = s.first(x)
    return s.head(h + F.layer_norm(h, (D,), eps=0.1))


def positions(s, x):
    h = s.first(x) + s.table
    return s.head(h + s.out(torch.relu(s.into(s.norm(h)))))


def scaled(s, x):
    h = 0.5 * s.first(x)
    return s.head((h + s.scale * s.out(torch.relu(s.into(s.norm(h))))) / 2**0.5)


def layer_scale(s, x):
    h = s.first(x)
    for norm, into, out, gain in ((s.norm, s.into, s.out, s.gain), (s.norm2, s.into2, s.out2, s.gain2)):
        h = h + gain * out(torch.relu(into(norm(h))))
    return s.head(h)


def shared_gain(s, x):
    h = s.first(x)
    return s.head(h + s.gain * (s.out(torch.relu(s.into(s.norm(h)))) + s.other(torch.tanh(x))))


def gated(s, x):
    h, gate = s.first(x), torch.sigmoid(s.gate(x))
    return s.head(h + gate * s.out(torch.relu(s.into(s.norm(h)))))


def channels_first(s, x):
    h = s.first(x)
    inner = torch.relu(s.into(s.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))
    return s.head((h + s.out(inner) * s.gain[:, None, None]).mean((2, 3)))


def transposed(s, x):
    h = s.first(x)
    return s.head(h + s.out(torch.relu(s.into(s.norm(h.mT).mT))))


def depthwise(s, x):
    h = s.first(x)
    return s.head(h + s.deep(s.norm(h.mT).mT))


STREAM = {"first": of(L, 9, D), "norm": of(N, D, eps=0.1), "into": of(L, D, 3), "out": of(L, 3, D)}
WHOLE = {**STREAM, "head": of(L, D, V)}
# What reads and what writes, if the stream leans.
LEANING = {
    "residual": (lambda s, x: s.head(residual(s, x)), WHOLE, (9,), (1, 4)),
    "a stream of two readers": (lambda s, x: (lambda h: s.head(h) + torch.tanh(s.other(h)) @ s.last)(residual(s, x)),
        {**WHOLE, "other": of(L, D, 3), "last": parameter(3, V)}, (9,), (2, 4)),
    "without biases": (lambda s, x: s.head(residual(s, x)),
        {**STREAM, "first": FREE(9, D), "out": FREE(3, D), "head": FREE(D, V)}, (9,), (1, 2)),
    "positions": (positions, {**WHOLE, "table": parameter(3, D)}, (3, 9), (1, 5)),
    "transformer": (transformer, {**WHOLE, "into": of(L, D, 2), "out": of(L, 2, D), "q": of(L, D, 2), "k": of(L, D, 2)},
        (3, 9), (1, 4)),
    "post-norm": (post_norm, {**WHOLE, "into": of(L, D, 2), "out": of(L, 2, D), "q": of(L, D, 2), "k": of(L, D, 2),
        "whole": nn.Identity}, (3, 9), (3, 2)),
    "scaled": (scaled, {**WHOLE, "scale": parameter()}, (9,), (1, 4)),
    "behind gains": (layer_scale, {**WHOLE, "gain": parameter(D), "norm2": of(N, D, eps=0.1), "into2": of(L, D, 3),
        "out2": of(L, 3, D), "gain2": parameter(D)}, (9,), (1, 6)),
    "some of its places": (lambda s, x: s.head(torch.where(x[..., :1] > 0, residual(s, x), 0.0)[:, [0, 2]]).flatten(1),
        WHOLE, (3, 9), (1, 4)),
    "parts of its places": (lambda s, x: (lambda one, two: s.head(torch.cat([two, one], 1)))(*residual(s,
        x).split([1, 2], 1)), WHOLE, (3, 9), (1, 4)),
    "a mean with weights": (lambda s, x: s.head(((x @ s.score).softmax(1).mT @ residual(s, x)).flatten(1)),
        {**WHOLE, "score": parameter(9, 1)}, (3, 9), (1, 4)),
    "behind one gain": (shared_gain, {**WHOLE, "gain": parameter(D), "other": of(L, 9, D)}, (9,), (1, 6)),
    "behind a gate of one unit": (gated, {**WHOLE, "gate": of(L, 9, 1, bias=False)}, (9,), (1, 4)),
    "convolutions": (channels_first, {**WHOLE, "first": of(nn.Conv2d, 2, D, 2, 2), "into": of(nn.Conv2d, D, 3, 1),
        "out": of(nn.Conv2d, 3, D, 1), "gain": parameter(D)}, (2, 4, 4), (1, 4)),
    "transposed convolutions": (transposed, {"first": of(nn.ConvTranspose1d, 3, D, 2, 2), "norm": of(N, D, eps=0.1),
        "into": of(nn.Conv1d, D, 3, 1), "out": of(nn.Conv1d, 3, D, 3, padding=1),
        "head": of(nn.ConvTranspose1d, D, V, 2, 2)}, (3, 4), (1, 4)),
    "beside a constant": (beside_a_constant, WHOLE, (9,), None),
    "beside its norm": (beside_its_norm, {"first": of(L, 9, D), "head": of(L, D, V)}, (9,), None),
    "a stream behind an activation": (lambda s, x: s.head(torch.relu(residual(s, x))), WHOLE, (9,), None),
    "written by a depthwise convolution": (depthwise, {"first": of(nn.Conv1d, 9, D, 1), "norm": of(N, D, eps=0.1),
        "deep": of(nn.Conv1d, D, D, 3, padding=1, groups=D), "head": of(nn.Conv1d, D, V, 1)}, (9, 4), None),
    "final norm": (lambda s, x: s.head(s.last(residual(s, x))), {**WHOLE, "last": of(N, D)}, (9,), None),
}  # fmt: skip


@pytest.mark.parametrize("name", LEANING)
@pytest.mark.few(4, "parts of its places", "a mean with weights", "convolutions")
def test_multiples_of_ones_are_added_to_streams(name):
    network, symmetry, x = traced(name)
    lean = LEANING[name][3]
    found = [(len(tilt.moved), len(tilt.readers)) for tilt in symmetry.structure.tilts]
    assert found == ([] if lean is None else [lean])
    assert symmetry.worst_error <= EXACT
    assert ("rank-one maps, 4 of a stream's readers" in str(symmetry)) == bool(lean)
    assert symmetry.nullity == symmetry.dimension or (lean is None and symmetry.nullity > symmetry.dimension)
    if lean and not symmetry.structure.dense:
        assert assert_tangents_change_no_output(symmetry, network, x[:5], 100 * EXACT).rank == symmetry.dimension


def test_maps_leave_writers_alone_that_only_norms_read():
    network, symmetry, x = traced("post-norm")
    assert_a_group_acts(symmetry, network, 1e-9)
    tilts = symmetry.identity().replaced(tilt=(torch.ones(D, dtype=torch.float64) / D,))
    moved = symmetry.act(tilts, network)
    whole = {}
    for own in (network, moved):
        own.whole.register_forward_hook(lambda _, given, made, own=own: whole.update({own: made}))
        own(x)
    change = whole[moved] - whole[network]
    assert change.std(-1).max() < 1e-12 < change.abs().max()  # multiples of ones, which depend on the input
    with pytest.raises(ValueError, match="multiple of ones to whole that depends on the input"):
        symmetry.on_activations(tilts, "whole")


def test_shifts_of_streams_compose_behind_gains():
    """A bias behind takes off multiples of a gain, in front of which a norm does not see what is added."""
    network, symmetry = generic(
        lambda s, x: s.head(s.gain * (h := s.first(x)) + s.out(torch.relu(s.into(s.norm(h))))),
        {**WHOLE, "gain": parameter(D)}, 9,
    )  # fmt: skip
    assert symmetry.structure.rotations
    assert_a_group_acts(symmetry, network, 1e-8)


@pytest.mark.parametrize("name", [name for name, (*_, lean) in LEANING.items() if lean and name != "post-norm"])
@pytest.mark.few(5, "some of its places", "transposed convolutions")
def test_streams_that_lean_have_one_canonical_form(name):
    network, symmetry, _ = traced(name)
    form = canonicalize(symmetry, network, check=True)
    assert form.difference < 1e-8
    assert not form.notes
    assert_a_group_acts(symmetry, network, 1e-8)
