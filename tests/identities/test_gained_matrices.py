"""Invertible matrices on units between linear layers, between batch norms and gains (intertwiners.md, 2.18)."""

import functools
import math

import pytest
import torch
from helpers import Program, assert_refused, of, parameter
from orbit_laws import (
    assert_a_group_acts,
    assert_matching_undoes,
    assert_tangents_change_no_output,
    assert_values_move,
    drawn,
)
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry import canonicalize, orbit_distance, orbit_tangents, trace_symmetry, weight_matching

pytestmark = pytest.mark.measured

EXACT = 1e-12
L, C, B, B2 = nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d
FREE = functools.partial(of, L, bias=False)
VECTOR, IMAGE = (7, 8), (3, 8, 5, 5)


def by_hand(s, x):
    n = s.n
    return s.b((s.a(x) - n.running_mean) / (n.running_var + n.eps).sqrt() * n.weight + n.bias)


def stream(s, x):
    y = s.n(s.a(x))
    y = y - s.m(s.c(torch.tanh(s.d(y))))
    return s.b(y + s.g * s.e(torch.relu(s.d(y))))


def inverted(s, x):
    """As in MobileNetV2: a stream of which convolutions of width 1 write and read, and a mean over all places."""
    x = s.n(s.a(x))
    return s.b((x + s.m(s.c(F.relu6(s.d(x))))).mean((2, 3)))


def heads(s, x):
    q, k, v = (layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (s.q, s.k, s.v))
    return s.b((s.g * ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(1))


def normed_heads(s, x):
    """As in LeViT: one batch norm behind queries, keys and values."""
    x = s.n(s.a(x).flatten(0, 1)).unflatten(0, x.shape[:2])
    q, k, v = x.unflatten(-1, (2, 7)).transpose(1, 2).split([2, 2, 3], -1)
    return s.b(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2).mean(1))


PLAIN = {"a": FREE(8, 4), "n": of(B, 4), "b": of(L, 4, 6)}
GAIN = {"a": of(L, 8, 4), "g": parameter(4), "b": of(L, 4, 6)}
# By name: the function, its parts, the shape of inputs, and the sizes of the cells.
FORMS = {
    "batch norm": (lambda s, x: s.b(s.n(s.a(x))), PLAIN, VECTOR, [4]),
    "batch norm, biases": (lambda s, x: s.b(s.n(s.a(x))), PLAIN | {"a": of(L, 8, 4)}, VECTOR, [4]),
    "batch norm, reader without bias": (lambda s, x: s.b(s.n(s.a(x))), PLAIN | {"b": FREE(4, 6)}, VECTOR, [4]),
    "batch norm by hand": (by_hand, PLAIN, VECTOR, [4]),
    "two batch norms": (lambda s, x: s.b(s.m(s.n(s.a(x)))), PLAIN | {"m": of(B, 4)}, VECTOR, [4]),
    "batch norm and gain": (lambda s, x: s.b(s.g * s.n(s.a(x))), PLAIN | {"g": parameter(4)}, VECTOR, [4]),
    "batch norm behind a softmax": (lambda s, x: s.b(s.n(s.a(s.c(x).softmax(-1)))),
        PLAIN | {"c": of(L, 8, 6), "a": FREE(6, 4)}, VECTOR, [4]),
    "stream": (stream, PLAIN | {"c": of(L, 5, 4), "d": of(L, 4, 5), "e": of(L, 5, 4), "g": parameter(4), "m": of(B, 4)},
        VECTOR, [4]),
    "inverted residuals": (inverted, {"a": of(C, 8, 3, 2, bias=False), "n": of(B2, 3), "d": of(C, 3, 5, 1),
        "c": of(C, 5, 3, 1), "m": of(B2, 3), "b": of(L, 3, 5)}, IMAGE, [3]),
    "convolutions": (lambda s, x: s.b(F.avg_pool2d(s.n(s.a(x)), 2)),
        {"a": of(C, 8, 4, 1, bias=False), "n": of(B2, 4), "b": of(C, 4, 6, 1)}, IMAGE, [4]),
    "flattened": (lambda s, x: s.b(s.n(s.a(x)).flatten(1)),
        {"a": of(C, 8, 3, 2, bias=False), "n": of(B2, 3), "b": of(L, 48, 6)}, IMAGE, [3]),
    "gain": (lambda s, x: s.b(s.g * s.a(x)), GAIN, VECTOR, [4]),
    "gain and bias": (lambda s, x: s.b(s.g * s.a(x) + s.h), GAIN | {"h": parameter(4)}, VECTOR, [4]),
    "one and gain": (lambda s, x: s.b((1 + s.g) * s.a(x)), GAIN, VECTOR, [4]),
    "quotient": (lambda s, x: s.b(s.a(x) / s.g), GAIN, VECTOR, [4]),
    "gain of rows": (lambda s, x: s.b(x @ (s.g[:, None] * s.a.weight).T), GAIN | {"a": FREE(8, 4)}, VECTOR, [4]),
    "gain that two share": (lambda s, x: s.b(s.g * s.a(x) + s.g * s.c(torch.tanh(s.d(x)))),
        GAIN | {"c": of(L, 5, 4), "d": of(L, 8, 5)}, VECTOR, [4]),
    "heads": (heads, {name: of(L, 5, 6) for name in "qkv"} | {"g": parameter(6), "b": of(L, 6, 4)}, (4, 3, 5), [3, 3]),
    "heads behind a batch norm": (normed_heads, {"a": FREE(9, 14), "n": of(B, 14), "b": of(L, 6, 4)}, (4, 3, 9),
        [2, 2, 3, 3]),
}  # fmt: skip
# What gains forbid, or the group does not know.
FIXED = {
    "held": (lambda s, x: s.b(s.h * s.a(x) + s.g * s.a(x)), GAIN | {"h": parameter(4)}, VECTOR),
    "of two streams": (lambda s, x: s.b(s.g * s.a(x)) + s.d(torch.tanh(s.g * s.c(x))),
        GAIN | {"c": of(L, 8, 4), "d": of(L, 4, 6)}, VECTOR),
    "read by an activation": (lambda s, x: s.b(torch.tanh(s.n(s.a(x)))), PLAIN, VECTOR),
    "output": (lambda s, x: s.n(s.a(x)), {"a": FREE(8, 4), "n": of(B, 4)}, VECTOR),
    "read by nothing": (lambda s, x: s.c(x) + 0 * s.b(s.g * s.a(x)), GAIN | {"c": of(L, 8, 6)}, VECTOR),
    "no gain in the norm": (lambda s, x: s.b(s.n(s.a(x))), PLAIN | {"n": of(B, 4, affine=False)}, VECTOR),
}  # fmt: skip


def made(function, parts, shape, seed=0):
    torch.manual_seed(seed)
    network = Program(function, parts).double().eval()
    for module in network.modules():
        if isinstance(module, (B, B2)):
            for own in (module.weight, module.bias) if module.affine else ():
                nn.init.normal_(own)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return network, torch.randn(shape, dtype=torch.float64)


@functools.cache
def traced(name):
    function, parts, shape, _ = FORMS[name]
    network, x = made(function, parts, shape)
    return network, trace_symmetry(network, x)


each = pytest.mark.parametrize("name", FORMS)


@each
@pytest.mark.few(5, "stream", "inverted residuals")
def test_matrices_keep_the_function_and_are_as_many_as_the_nullity(name):
    network, symmetry = traced(name)
    assert sorted(cell.size for cell in symmetry.structure.gained) == FORMS[name][3]
    assert symmetry.dimension == symmetry.nullity
    assert not any("matrices also mix these" in note or "leaves out" in note for note in symmetry.notes)
    # Of all signs of a unit, those that flip all of its weights but no gain are matrices.
    assert symmetry.log_order < symmetry.log10_permutations * math.log(10) + symmetry.signs * math.log(2)
    row = max(symmetry.table(), key=lambda row: row["dimension"] * ("between gains" in row["type"]))
    assert row["dimension"] >= FORMS[name][3][-1] ** 2
    _, x = made(*FORMS[name][:3], seed=5)
    x = torch.cat([x, x.flip(0) * 2])[:11]
    taps = [own for own in symmetry.taps if own in ("a", "n", "m", "b")]
    for element in (symmetry.identity().replaced(gained=drawn(symmetry, 1).gained), drawn(symmetry, 1)):
        moved = symmetry.act(element, network)
        torch.testing.assert_close(moved(x), network(x), rtol=EXACT, atol=10 * EXACT)
        assert_values_move(symmetry, element, network, x, taps, 1e-11)
    assert_a_group_acts(symmetry, network, 1e-9)


@each
@pytest.mark.few(4)
def test_tangents_of_matrices_move_no_output(name):
    network, symmetry = traced(name)
    function, parts, shape, sizes = FORMS[name]
    _, x = made(function, parts, (40, *shape[1:]))
    (factor,) = (own for own in symmetry.factors if own.name == "gained")
    names = [own for own, _ in network.named_parameters()]
    weights = {own: symmetry.tensors(network)[own].detach() for own in names}
    tangents = factor.tangents({own: t.numpy() for own, t in weights.items()}, symmetry.tensors(network)).toarray()
    assert tangents.shape[1] == sum(size**2 for size in sizes)
    assert torch.linalg.matrix_rank(torch.from_numpy(tangents)) == tangents.shape[1]
    given = dict(network.named_parameters())
    for column in torch.from_numpy(tangents).T:
        steps = dict(zip(names, column.split([own.numel() for own in weights.values()]), strict=True))
        steps = {own: step.reshape(given[own].shape) for own, step in steps.items()}
        _, change = torch.func.jvp(lambda own: torch.func.functional_call(network, own, (x,)), ({**given},), (steps,))
        assert float(change.detach().abs().max()) <= 1e-11 * max(float(own.abs().max()) for own in steps.values())


def test_tangents_span_the_kernel_of_the_jacobian():
    network, symmetry = traced("batch norm")
    found = orbit_tangents(symmetry, network)
    assert (found.rank, found.statistics) == (symmetry.nullity, 0)
    found = orbit_tangents(*reversed(traced("gain and bias")))
    assert found.rank == found.generators == traced("gain and bias")[1].nullity


@each
@pytest.mark.few(6, "stream", "quotient", "heads")
def test_planted_elements_are_undone_and_found(name):
    network, symmetry = traced(name)
    form = canonicalize(symmetry, network)
    assert form.difference <= 1e-11
    assert form.converged
    assert not form.notes
    moved = symmetry.act(drawn(symmetry, 2), network)
    assert_matching_undoes(symmetry, network, moved, 1e-10)
    if name == "stream":
        assert orbit_distance(symmetry, network, moved).upper <= 1e-9


def test_the_form_of_a_bottleneck_has_unit_gains():
    network, symmetry = traced("batch norm")
    form = canonicalize(symmetry, network).network
    torch.testing.assert_close(form.n.weight, torch.ones_like(form.n.weight))
    torch.testing.assert_close(form.n.running_var + form.n.eps, torch.ones_like(form.n.weight))
    one, two = form.a.weight @ form.a.weight.T, form.b.weight.T @ form.b.weight
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(one, torch.diag(one.diagonal().sort(descending=True).values))
    stays = canonicalize(symmetry, network, signs=False)
    assert any("between gains are not mixed" in note for note in stays.notes)


@pytest.mark.parametrize("name", ["batch norm", "stream", "gain"])
def test_other_networks_are_matched_without_matrices(name):
    """Merging measures statistics anew, which these matrices do not survive."""
    network, symmetry = traced(name)
    other, _ = made(*FORMS[name][:3], seed=9)
    match = weight_matching(symmetry, network, other)
    assert all(not len(matrix) for matrix in match.element.gained)
    assert match.distance_after < match.distance_before
    distance = orbit_distance(symmetry, network, other)
    assert distance.lower == 0 < distance.upper
    assert any("between gains" in note for note in distance.notes)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.few(5)
def test_what_holds_gains_has_no_matrices(name):
    network, x = made(*FIXED[name])
    symmetry = trace_symmetry(network, x)
    assert not symmetry.structure.gained
    if name == "no gain in the norm":
        assert any("matrices also mix these, 12 dimensions more" in note for note in symmetry.notes)


def test_tangents_pass_no_gain_of_zero():
    """As where gains begin at zero: entries (1, 0), (1, 2) and (1, 3) have no direction, all others have theirs."""
    network, symmetry = traced("batch norm")
    dead = symmetry.act(symmetry.identity(), network)
    with torch.no_grad():
        dead.n.weight[1] = 0
    _, x = made(*FORMS["batch norm"][:2], (40, *VECTOR[1:]))
    found = assert_tangents_change_no_output(symmetry, dead, x, 1e-11)
    assert found.rank == orbit_tangents(symmetry, network).rank - 3


def test_activations_in_front_of_gains_need_the_network():
    _, symmetry = traced("batch norm")
    element = symmetry.sample(shifts=False)
    assert symmetry.on_activations(element, "n").element.dense is not None
    assert_refused(symmetry.on_activations, element, "a", says=["n.weight, n.running_var", "the network itself"])
