"""The group where gains hold zeros: what would be divided by these is left out, and all laws hold for the rest.

See docs/theory/intertwiners.md, 2.18. Networks are traced at weights of which any gains may be zero, one by one.
"""

import copy
import functools

import pytest
import torch
from helpers import Program, assert_refused, of, parameter
from hypothesis import example, given, settings
from hypothesis import strategies as st
from orbit_laws import assert_a_group_acts, assert_tangents_change_no_output, drawn
from torch import nn

from lightning_sym.symmetry import canonicalize, orbit_distance, orbit_tangents, trace_symmetry, weight_matching

LAW = settings(max_examples=3, deadline=None, derandomize=True)
UNITS, EXACT, ROUNDED = 4, 1e-9, 2e-3  # the latter for single precision, in which matrices take off what shifts add
L, B = nn.Linear, nn.BatchNorm1d


def stream(s, x):
    """A stream into which a batch norm and two branches write, one behind a batch norm and one behind a LayerScale."""
    y = s.n(s.a(x))
    y = y - s.m(s.c(torch.tanh(s.d(y))))
    return s.b(y + s.g * s.e(torch.relu(s.d(y))))


def block(s, x):
    """A residual stream that rotates: norms in front of branches, LayerScale behind."""
    y = s.a(x)
    y = y + s.g * s.e(torch.relu(s.d(s.norm(y))))
    return s.b(s.last(y))


PARTS = {"a": of(L, 5, UNITS), "b": of(L, UNITS, 6)}
MORE = {"d": of(L, UNITS, 6), "e": of(L, 6, UNITS), "g": parameter(UNITS)}
# By name: the function, its parts, and its gains.
NETWORKS = {
    "batch norm": (lambda s, x: s.b(s.n(s.a(x))), PARTS | {"n": of(B, UNITS)}, ["n.weight"]),
    "no bias in front": (lambda s, x: s.b(s.n(s.a(x))), PARTS | {"a": of(L, 5, UNITS, bias=False), "n": of(B, UNITS)},
        ["n.weight"]),
    "two batch norms": (lambda s, x: s.b(s.m(s.n(s.a(x)))), PARTS | {"n": of(B, UNITS), "m": of(B, UNITS)},
        ["n.weight", "m.weight"]),
    "gain": (lambda s, x: s.b(s.g * s.a(x)), PARTS | {"g": parameter(UNITS)}, ["g"]),
    "gain and bias": (lambda s, x: s.b(s.g * s.a(x) + s.h), PARTS | {"g": parameter(UNITS), "h": parameter(UNITS)},
        ["g"]),
    "batch norm and gain": (lambda s, x: s.b(s.g * s.n(s.a(x))), PARTS | {"g": parameter(UNITS), "n": of(B, UNITS)},
        ["n.weight", "g"]),
    "stream": (stream, PARTS | MORE | {"n": of(B, UNITS), "m": of(B, UNITS), "c": of(L, 6, UNITS)},
        ["n.weight", "m.weight", "g"]),
    "layer norms": (block, PARTS | MORE | {"norm": of(nn.LayerNorm, UNITS), "last": of(nn.LayerNorm, UNITS)},
        ["norm.weight", "g", "last.weight"]),
    "RMS norms": (block, PARTS | MORE | {"norm": of(nn.RMSNorm, UNITS), "last": of(nn.RMSNorm, UNITS)},
        ["norm.weight", "g"]),
    "ReZero": (lambda s, x: s.b(s.a(x) + s.g * s.e(torch.relu(s.d(s.a(x))))), PARTS | MORE | {"g": parameter(1)},
        ["g"]),
}  # fmt: skip
QUICK = [name for name in NETWORKS if name != "ReZero"]  # whose cell is balanced slowly
each = pytest.mark.parametrize("name", NETWORKS)
zeros = st.tuples(*[st.tuples(*[st.booleans()] * UNITS)] * 3)
ONE, ALL = ((False, True, False, False),) * 3, ((True,) * UNITS,) * 3


@functools.cache
def made(name):
    function, parts, _ = NETWORKS[name]
    torch.manual_seed(0)
    network = Program(function, parts).double().eval()
    for own in network.state_dict().values():
        if own.is_floating_point():
            own.copy_(0.5 + torch.rand_like(own)) if bool((own >= 0).all()) else own.copy_(torch.randn_like(own))
    return network, torch.randn(12, 5, dtype=torch.float64)


@functools.cache
def generic(name):
    return trace_symmetry(*made(name))


@functools.cache
def with_zeros(name, masks):
    """Return a network with some gains of zero, its symmetry, and its input."""
    network, x = copy.deepcopy(made(name)[0]), made(name)[1]
    for own, mask in zip(NETWORKS[name][2], masks, strict=False):
        gain = network.get_parameter(own)
        gain.data[torch.tensor(mask)[: len(gain)]] = 0
    return network, trace_symmetry(network, x, check=False), x


def apart(one, two):
    """Return how far two networks or outputs are from one another, relative to the largest entry of each tensor."""
    if isinstance(one, nn.Module):
        pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
        return max(apart(own, other) for own, other in pairs if own.is_floating_point())
    return float((one - two).detach().abs().max()) / max(float(two.detach().abs().max()), 1.0)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NETWORKS)
@LAW
@given(masks=zeros)
@example(masks=ONE)
@example(masks=ALL)
def test_elements_act_as_a_group_and_keep_the_function(name, masks):
    network, symmetry, x = with_zeros(name, masks)
    one = drawn(symmetry)
    assert_a_group_acts(symmetry, network, EXACT, x)
    assert symmetry.check(network, x) <= symmetry.tolerance
    assert symmetry.fingerprint == generic(name).fingerprint
    assert symmetry.dimension == generic(name).dimension
    single = copy.deepcopy(network).float()
    assert apart(symmetry.act(one, single)(x.float()), single(x.float())) <= ROUNDED


@pytest.mark.few(3, "RMS norms")
@pytest.mark.parametrize("name", QUICK)
@settings(LAW, max_examples=1)  # besides the two stated ones: each takes half a second
@given(masks=zeros, seed=st.integers(0, 1000))
@example(masks=ONE, seed=1)
@example(masks=ALL, seed=2)
def test_forms_and_distances_are_those_of_the_orbit(name, masks, seed):
    """For dead units, which nothing passes, the scale is free: for these alone forms depend on the member."""
    network, symmetry, x = with_zeros(name, masks)
    torch.manual_seed(seed)
    moved = symmetry.act(symmetry.sample(), network)
    form = canonicalize(symmetry, network)
    again = canonicalize(symmetry, form.network, check=False)
    assert apart(form.network(x), network(x)) <= EXACT
    match = weight_matching(symmetry, network, moved)
    assert apart(match.network(x), network(x)) <= EXACT
    distance = orbit_distance(symmetry, network, moved)
    assert distance.lower <= distance.upper + EXACT
    assert apart(again.network, form.network) <= 1e-7
    if not form.dead:
        assert form.difference <= 1e-8
        assert apart(canonicalize(symmetry, moved, check=False).network, form.network) <= 1e-7
        assert distance.upper <= 1e-7


@pytest.mark.few(3, "layer norms", "RMS norms")
@pytest.mark.parametrize("name", QUICK)
@LAW
@given(masks=zeros)
@example(masks=ONE)
@example(masks=ALL)
def test_tangents_move_no_output(name, masks):
    network, symmetry, x = with_zeros(name, masks)
    found = assert_tangents_change_no_output(symmetry, network, x, EXACT)
    assert found.rank <= orbit_tangents(symmetry, made(name)[0]).rank


@each
def test_elements_of_other_weights_are_refused_only_if_they_are_divided_by_zero(name):
    network, symmetry, x = with_zeros(name, ALL)
    torch.manual_seed(0)
    element = generic(name).sample()
    free = generic(name).sample(mixing=False)
    assert apart(symmetry.act(free, network)(x), network(x)) <= EXACT
    if any(len(numbers) for factor, numbers in symmetry._closed.items() if factor != "shift"):
        assert_refused(symmetry.act, element, network, says=["holds a zero", "mixing=False", "traced at these weights"])
    else:
        assert apart(symmetry.act(element, network)(x), network(x)) <= EXACT
    assert any("hold zeros" in note for note in symmetry.notes)
    assert not any("hold zeros" in note for note in generic(name).notes)
