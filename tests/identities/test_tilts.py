"""What a layer norm's bias and readers without biases change together (intertwiners.md, 2.12)."""

import functools

import pytest
import torch
from helpers import Program, assert_refused, of, parameter
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import canonicalize, local_dimension, orbit_tangents, trace_symmetry

torch.set_num_threads(1)
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


@functools.cache
def traced(name):
    function, parts, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    network = Program(function, parts).double().eval()
    for parameter_ in network.parameters():
        nn.init.normal_(parameter_)
    return network, trace_symmetry(network, torch.randn(2, *shape, dtype=torch.float64))


@pytest.mark.parametrize("name", NETWORKS)
def test_dimension_is_the_nullity_of_the_jacobian(name):
    network, symmetry = traced(name)
    _, _, shape, readers = NETWORKS[name]
    assert [len(tilt.readers) for tilt in symmetry.structure.tilts] == readers
    assert symmetry.worst_error <= EXACT
    found = local_dimension(symmetry, network, torch.randn(60, *shape, dtype=torch.float64))
    assert found.gap > 1e4
    if name in (
        "bias used twice",
        "twice in a row",
        "along both axes",
    ):  # what is left there is no linear map of what the norm puts out
        assert found.nullity > symmetry.dimension == 0
    else:
        assert found.nullity == symmetry.dimension
    assert ("rank-one maps, 4 of a layer norm's bias" in str(symmetry)) == bool(readers)


@pytest.mark.parametrize("name", TILTED)
def test_tangents_are_as_many_as_the_dimension_and_change_no_output(name):
    network, symmetry = traced(name)
    found = orbit_tangents(symmetry, network)
    assert (found.rank, found.statistics) == (symmetry.dimension, 0)
    x = torch.randn(7, *NETWORKS[name][2], dtype=torch.float64)
    names, own = found.names, dict(network.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)))(own)
    rows = torch.cat([jacobian[key].detach().flatten(start_dim=2).flatten(0, 1) for key in names], 1)
    assert float((rows @ torch.from_numpy(found.vectors.toarray())).abs().max()) < EXACT


@pytest.mark.parametrize("name", TILTED)
def test_one_canonical_form_in_which_the_bias_equals_the_gain(name):
    network, symmetry = traced(name)
    found = canonicalize(symmetry, network)
    assert not found.notes
    (tilt,) = symmetry.structure.tilts
    form = found.network.state_dict()
    name = tilt.moved[0][0]
    gain = form[tilt.gains[name]] if tilt.gains else torch.ones(D, dtype=torch.float64)
    torch.testing.assert_close(form[name], gain, rtol=EXACT, atol=EXACT)
    for seed in range(2):
        member = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network)
        for key, value in canonicalize(symmetry, member).network.state_dict().items():
            torch.testing.assert_close(value, form[key], rtol=1e-9, atol=1e-9)
    fresh = symmetry.act(symmetry.identity(), network)
    nn.init.zeros_(dict(fresh.named_parameters())[tilt.moved[0][0]])
    notes = canonicalize(symmetry, fresh).notes
    assert notes[0].startswith(f"{tilt.moved[0][0]} stays")
    assert all(note.startswith("not unique") for note in notes[1:])


@pytest.mark.parametrize("name", TILTED)
def test_action_on_what_the_norm_puts_out(name):
    network, symmetry = traced(name)
    element = symmetry.sample(torch.Generator().manual_seed(1))
    moved = symmetry.act(element, network)
    (tilt,) = symmetry.structure.tilts
    if not tilt.seen:
        pytest.skip("no module puts it out")
    assert ("norm", len(NETWORKS[name][2])) in tilt.seen
    x = torch.randn(7, *NETWORKS[name][2], dtype=torch.float64)
    before, after = (own.norm(torch.tanh(own.first(x))) for own in (network, moved))
    torch.testing.assert_close(symmetry.on_activations(element, "norm", network).apply(before), after)
    assert_refused(lambda: symmetry.on_activations(element, "norm"), says=["norm.weight", "mixing=False"])
    assert symmetry.channels("norm").shifted


def test_what_cannot_be_tilted_is_refused(tmp_path):
    network, symmetry = traced("head")
    element = symmetry.sample(torch.Generator().manual_seed(0))
    broken = symmetry.act(symmetry.identity(), network)
    nn.init.zeros_(broken.norm.weight)
    assert_refused(lambda: symmetry.act(element, broken), says=["norm.weight", "zero", "mixing=False"])
    symmetry.act(symmetry.sample(mixing=False, shifts=False), broken)
    optimizer = torch.optim.Adam(broken.parameters())
    broken(torch.randn(3, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    nn.init.ones_(broken.norm.weight)
    assert_refused(lambda: symmetry.act(element, broken, inplace=True, optimizer=optimizer), says="mixing=False")


def test_acting_on_files_and_in_place_is_acting_on_a_copy(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    network, symmetry = traced("pooled")
    element = symmetry.sample(torch.Generator().manual_seed(0))
    expected = symmetry.act(element, network).state_dict()
    safetensors.save_file(dict(network.state_dict()), tmp_path / "model.safetensors")
    written = safetensors.load_file(symmetry.act_on_files(element, tmp_path / "model.safetensors", tmp_path / "moved"))
    inplace = symmetry.act(element, symmetry.act(symmetry.identity(), network), inplace=True).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(inplace[name], tensor, rtol=0, atol=0)


def test_only_the_linear_group_has_no_tilts():
    network, symmetry = traced("head")
    linear = trace_symmetry(network, torch.randn(2, 5, dtype=torch.float64), shifts=False)
    assert linear.dimension == symmetry.dimension - symmetry.shifts - D


def merged(s, x):
    """Two neighbours of a stream that is rotated, side by side in one norm."""
    return s.head(s.norm(s.first(x).flatten(1)))


def test_a_norm_over_several_parts_of_a_rotated_stream_is_tilted():
    torch.manual_seed(0)
    parts = {"first": of(L, 5, D), "norm": of(N, 2 * D), "head": FREE(2 * D, V)}
    network = Program(merged, parts).double()
    for weight in network.parameters():
        nn.init.normal_(weight)
    symmetry = trace_symmetry(network, torch.randn(2, 2, 5, dtype=torch.float64))
    assert ([r.size for r in symmetry.structure.rotations], [t.size for t in symmetry.structure.tilts]) == (
        [D],
        [2 * D],
    )
    found = local_dimension(symmetry, network, torch.randn(60, 2, 5, dtype=torch.float64))
    assert found.gap > 1e4
    assert found.nullity == symmetry.dimension
    one, two = (symmetry.sample(torch.Generator().manual_seed(seed)) for seed in range(2))
    twice = symmetry.act(two, symmetry.act(one, network)).state_dict()
    for name, tensor in symmetry.act(symmetry.compose(two, one), network).state_dict().items():
        torch.testing.assert_close(tensor, twice[name], rtol=1e-9, atol=1e-9)


# ---- streams that layer norms read, and linear layers as they are


def residual(s, x):
    h = s.first(x)
    return h + s.out(torch.relu(s.into(s.norm(h))))


def transformer(s, x):
    h = s.first(x)
    normed = s.norm(h)
    weights = (s.q(normed) @ s.k(normed).mT).softmax(-1)
    return s.head(h + s.out(weights @ s.into(normed)))


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
    "two readers": (
        lambda s, x: (lambda h: s.head(h) + torch.tanh(s.other(h)) @ s.last)(residual(s, x)),
        {**WHOLE, "other": of(L, D, 3), "last": parameter(3, V)}, (9,), (2, 4)),
    "without biases": (
        lambda s, x: s.head(residual(s, x)),
        {**STREAM, "first": FREE(9, D), "out": FREE(3, D), "head": FREE(D, V)}, (9,), (1, 2)),
    "positions": (positions, {**WHOLE, "table": parameter(3, D)}, (3, 9), (1, 5)),
    "transformer": (
        transformer, {**WHOLE, "into": of(L, D, 2), "out": of(L, 2, D), "q": of(L, D, 2), "k": of(L, D, 2)},
        (3, 9), (1, 4)),
    "scaled": (scaled, {**WHOLE, "scale": parameter()}, (9,), (1, 4)),
    "behind gains": (
        layer_scale,
        {**WHOLE, "gain": parameter(D), "norm2": of(N, D, eps=0.1), "into2": of(L, D, 3), "out2": of(L, 3, D),
         "gain2": parameter(D)}, (9,), (1, 6)),
    "some of its places": (
        lambda s, x: s.head(torch.where(x[..., :1] > 0, residual(s, x), 0.0)[:, [0, 2]]).flatten(1), WHOLE,
        (3, 9), (1, 4)),
    "parts of its places": (
        lambda s, x: (lambda one, two: s.head(torch.cat([two, one], 1)))(*residual(s, x).split([1, 2], 1)), WHOLE,
        (3, 9), (1, 4)),
    "a mean with weights": (
        lambda s, x: s.head(((x @ s.score).softmax(1).mT @ residual(s, x)).flatten(1)),
        {**WHOLE, "score": parameter(9, 1)}, (3, 9), (1, 4)),
    "behind one gain": (shared_gain, {**WHOLE, "gain": parameter(D), "other": of(L, 9, D)}, (9,), (1, 6)),
    "behind a gate of one unit": (gated, {**WHOLE, "gate": of(L, 9, 1, bias=False)}, (9,), (1, 4)),
    "convolutions": (
        channels_first,
        {**WHOLE, "first": of(nn.Conv2d, 2, D, 2, 2), "into": of(nn.Conv2d, D, 3, 1), "out": of(nn.Conv2d, 3, D, 1),
         "gain": parameter(D)}, (2, 4, 4), (1, 4)),
    "transposed convolutions": (
        transposed,
        {"first": of(nn.ConvTranspose1d, 3, D, 2, 2), "norm": of(N, D, eps=0.1), "into": of(nn.Conv1d, D, 3, 1),
         "out": of(nn.Conv1d, 3, D, 3, padding=1), "head": of(nn.ConvTranspose1d, D, V, 2, 2)}, (3, 4), (1, 4)),
    "beside a constant": (beside_a_constant, WHOLE, (9,), None),
    "beside its norm": (beside_its_norm, {"first": of(L, 9, D), "head": of(L, D, V)}, (9,), None),
    "behind an activation": (lambda s, x: s.head(torch.relu(residual(s, x))), WHOLE, (9,), None),
    "written by a depthwise convolution": (
        depthwise,
        {"first": of(nn.Conv1d, 9, D, 1), "norm": of(N, D, eps=0.1),
         "deep": of(nn.Conv1d, D, D, 3, padding=1, groups=D), "head": of(nn.Conv1d, D, V, 1)}, (9, 4), None),
    "final norm": (lambda s, x: s.head(s.last(residual(s, x))), {**WHOLE, "last": of(N, D)}, (9,), None),
}  # fmt: skip


@functools.cache
def leaning(name):
    function, parts, shape, _ = LEANING[name]
    torch.manual_seed(0)
    network = Program(function, parts).double().eval()
    for parameter_ in network.parameters():
        nn.init.normal_(parameter_)
    return network, trace_symmetry(network, torch.randn(2, *shape, dtype=torch.float64))


@pytest.mark.parametrize("name", LEANING)
def test_multiples_of_ones_are_added_to_streams(name):
    network, symmetry = leaning(name)
    _, _, shape, lean = LEANING[name]
    found = [(len(tilt.moved), len(tilt.readers)) for tilt in symmetry.structure.tilts]
    assert found == ([] if lean is None else [lean])
    assert symmetry.worst_error <= EXACT
    assert ("rank-one maps, 4 of a stream's readers" in str(symmetry)) == bool(lean)
    if lean is None:
        assert symmetry.nullity >= symmetry.dimension
        return
    assert symmetry.nullity == symmetry.dimension
    if symmetry.structure.dense:
        return
    rates = orbit_tangents(symmetry, network)
    assert rates.rank == symmetry.dimension
    x = torch.randn(5, *shape, dtype=torch.float64)
    own = dict(network.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)).flatten())(own)
    rows = torch.cat([(own := jacobian[key].detach()).reshape(len(own), -1) for key in rates.names], 1)
    assert float((rows @ torch.from_numpy(rates.vectors.toarray())).abs().max()) < 100 * EXACT


def test_shifts_of_streams_compose_behind_gains():
    """A bias behind takes off multiples of a gain, in front of which a norm does not see what is added."""
    torch.manual_seed(0)
    network = Program(lambda s, x: s.head(s.gain * (h := s.first(x)) + s.out(torch.relu(s.into(s.norm(h))))),
                      {**WHOLE, "gain": parameter(D)}).double().eval()  # fmt: skip
    for weight in network.parameters():
        nn.init.normal_(weight)
    symmetry = trace_symmetry(network, torch.randn(2, 9, dtype=torch.float64))
    assert symmetry.structure.rotations
    one, two = (symmetry.sample(torch.Generator().manual_seed(seed)) for seed in range(2))
    both = symmetry.act(symmetry.compose(two, one), network).state_dict()
    for key, value in symmetry.act(two, symmetry.act(one, network)).state_dict().items():
        torch.testing.assert_close(value, both[key], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [name for name, (*_, lean) in LEANING.items() if lean])
def test_streams_that_lean_have_one_canonical_form(name):
    network, symmetry = leaning(name)
    form = canonicalize(symmetry, network, check=True)
    assert form.difference < 1e-8
    assert not form.notes
    one, two = (symmetry.sample(torch.Generator().manual_seed(seed), scale=0.5) for seed in range(2))
    both = symmetry.act(symmetry.compose(two, one), network).state_dict()
    for key, value in symmetry.act(two, symmetry.act(one, network)).state_dict().items():
        torch.testing.assert_close(value, both[key], rtol=1e-8, atol=1e-8)
    back = symmetry.act(symmetry.inverse(one), symmetry.act(one, network)).state_dict()
    for key, value in network.state_dict().items():
        torch.testing.assert_close(back[key], value, rtol=1e-8, atol=1e-8)
