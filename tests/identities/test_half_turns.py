"""Half periods of sines and cosines: sin(x + pi) = -sin(x), so that biases take them up."""

import functools
import math

import pytest
import torch
from helpers import Program, assert_refused, of, parameter
from orbit_laws import (
    assert_a_group_acts,
    assert_matching_undoes,
    assert_members_have_one_form,
    assert_values_move,
    drawn,
)
from torch import nn

from lightning_sym.symmetry import canonicalize, orbit_distance, trace_symmetry, weight_matching

L, C = nn.Linear, nn.Conv2d
sin, cos = torch.sin, torch.cos

# By name: the network, the shape of an input, how many half turns there are, and how many of them in even numbers only.
CASES = {
    "siren": (lambda s, x: s.c(sin(30 * s.b(sin(30 * s.a(x))))), (6, 2), 15, 0),
    "multiples behind": (lambda s, x: s.c(sin(-(s.b(sin(s.a(x) * 3 / 7)) * 2))), (6, 2), 15, 0),
    "products": (lambda s, x: s.c(torch.tanh(s.b(sin(30 * (x @ s.a.weight.T - s.a.bias))))), (6, 2), 8, 0),
    "distributed": (lambda s, x: s.c(torch.tanh(s.b(sin(3 * s.a.bias + 30 * (x @ s.a.weight.T) + 1)))), (6, 2), 8, 0),
    "moved": (lambda s, x: s.c(torch.tanh(s.b(sin(s.a(x).view(-1, 2, 4) * 9).flatten(1)))), (6, 2), 8, 0),
    "in parts": (lambda s, x: s.c(torch.tanh(s.b(torch.cat([sin(part * 5) for part in s.a(x).chunk(2, -1)], -1)))),
        (6, 2), 8, 0),
    "random features": (lambda s, x: s.c(torch.tanh(s.b(cos(s.a(x))))), (6, 2), 8, 0),
    "read twice": (lambda s, x: s.c(torch.tanh(s.b(sin(v := s.a(x)) + cos(-v)))), (6, 2), 8, 0),
    "squares": (lambda s, x: s.c(torch.tanh(s.b(sin(s.a(x)) ** 2))), (6, 2), 8, 0),
    "in place": (lambda s, x: s.c(torch.tanh(s.b(s.a(x).sin_()))), (6, 2), 8, 0),
    "one stream": (lambda s, x: s.c(sin(s.b(v := sin(s.a(x)))) + s.d(v)), (6, 2), 15, 0),
    "summed": (lambda s, x: s.c(sin(s.b(v := torch.tanh(s.a(x)))) + sin(s.d(v))), (6, 2), 14, 14),
    "two layers": (lambda s, x: s.c(torch.tanh(s.b(sin(s.a(x) + s.e(x))))), (6, 2), 8, 0),
    "added to itself": (lambda s, x: s.c(s.b(sin((v := s.a(x)) + v.flip(-1)))), (6, 2), 0, 0),
    "two frequencies": (lambda s, x: s.c(s.b(sin(v := s.a(x)) + sin(2 * v))), (6, 2), 0, 0),
    "another reader": (lambda s, x: s.c(s.b(sin(v := s.a(x)) + v)), (6, 2), 0, 0),
    "without a bias": (lambda s, x: s.c(s.b(sin(s.e(x)))), (6, 2), 0, 0),
    "into a norm": (lambda s, x: s.c(s.b(s.norm(sin(s.a(x))))), (6, 2), 8, 8),
    "images": (lambda s, x: s.c(torch.tanh(s.b(sin(s.f(x)).mean((2, 3))))), (3, 2, 5, 5), 8, 0),
    "output": (lambda s, x: sin(-3 * s.b(sin(3 * s.a(x)))), (6, 2), 15, 7),
    "ahead of a relu": (lambda s, x: s.c(torch.tanh(s.b(torch.relu(sin(s.a(x).view(-1, 2, 4) * 9).flatten(1))))),
        (6, 2), 8, 8),
    "positive images": (lambda s, x: s.c(torch.tanh(s.b(torch.relu(sin(s.f(x))).mean((2, 3))))), (3, 2, 5, 5),
        8, 8),
    "gain and bias": (lambda s, x: torch.softmax(sin(3 * (1 + s.g) + s.e(x)), -1), (6, 2), 8, 8),
}  # fmt: skip
PARTS = {
    "a": of(L, 2, 8), "b": of(L, 8, 7), "c": of(L, 7, 3), "d": of(L, 8, 7), "e": of(L, 2, 8, bias=False),
    "f": of(C, 2, 8, 3), "norm": of(nn.LayerNorm, 8), "g": parameter(8),
}  # fmt: skip


@functools.cache
def traced(name):
    function, shape, *_ = CASES[name]
    torch.manual_seed(0)
    used = {part for part in PARTS if f"s.{part}" in name or part in function.__code__.co_names}
    network = Program(function, {part: PARTS[part] for part in used}).double()
    x = torch.randn(shape, dtype=torch.float64)
    return network, x, trace_symmetry(network, x)


def apart(one, two):
    with torch.no_grad():
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(4)
def test_half_turns_leave_the_function_alone_and_change_the_weights(name):
    network, x, symmetry = traced(name)
    *_, count, even = CASES[name]
    turns = symmetry.structure.half_turns
    assert (len(turns.place), int((~turns.odd).sum())) == (count, even)
    if not count:
        return
    element = symmetry.identity().replaced(half_turn=torch.where(torch.from_numpy(turns.odd), 3.0, -2.0).double())
    moved = symmetry.act(element, network)
    with torch.no_grad():
        torch.testing.assert_close(moved(x), network(x), rtol=0, atol=1e-10)
    assert apart(moved, network) > 1e-2
    if even:  # an odd number of one unit alone changes the function
        odd = symmetry.identity().half_turn
        odd[int((~turns.odd).argmax())] = 1.0
        with torch.no_grad():
            assert (
                float((symmetry.act(symmetry.identity().replaced(half_turn=odd), network)(x) - network(x)).abs().max())
                > 1e-3
            )


@pytest.mark.parametrize(
    "name", ["siren", "multiples behind", "read twice", "images", "one stream", "products", "distributed", "in parts",
        "output", "ahead of a relu", "positive images", "gain and bias"]
)  # fmt: skip
@pytest.mark.few(6, "read twice", "in parts")
def test_forms_and_matches_find_planted_half_turns(name):
    network, _, symmetry = traced(name)
    element = drawn(symmetry, 1)
    assert bool(element.half_turn.any())
    other = symmetry.act(element, network)
    assert_members_have_one_form(symmetry, network, 1e-12)
    assert_matching_undoes(symmetry, network, other, 1e-11)
    assert apart(weight_matching(symmetry, network, other).network, network) < 1e-11
    assert orbit_distance(symmetry, network, other).upper < 1e-11


@pytest.mark.parametrize(
    ("name", "signs"), [("output", 15), ("ahead of a relu", 15), ("positive images", 15), ("gain and bias", 8)]
)
def test_signs_before_sines_of_fixed_sign_add_half_a_period(name, signs):
    """sin(pi - x) = sin(x): without these, only the other layers have signs."""
    network, x, symmetry = traced(name)
    assert symmetry.signs == signs
    assert_a_group_acts(symmetry, network, 1e-12, x)


def test_canonical_biases_lie_within_a_half_period():
    network, _, symmetry = traced("siren")
    form = canonicalize(symmetry, network).network
    for layer in (form.a, form.b):
        assert float((30 * layer.bias.detach()).abs().max()) <= math.pi / 2


def test_matches_take_half_turns_where_they_bring_networks_nearer():
    """Biases on the two sides of a boundary: their forms differ by half a period, which the descent takes back."""
    network, _, symmetry = traced("siren")
    network = symmetry.act(symmetry.identity(), network)
    near = symmetry.act(symmetry.identity(), network)
    with torch.no_grad():
        for layer, other in ((network.a, near.a), (network.b, near.b)):
            layer.bias[:2] = (math.pi / 2 - 1e-3) / 30
            other.bias.copy_(layer.bias)
            other.bias[:2] = (math.pi / 2 + 1e-3) / 30
    match = weight_matching(symmetry, network, near)
    least = 2e-3 / 30 * math.sqrt(4)
    assert match.distance_after == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["siren", "multiples behind", "images", "moved", "in parts", "output", "ahead of a relu"]
)
def test_values_in_front_of_a_sine_move_as_the_tap_says(name):
    network, x, symmetry = traced(name)
    names = [name for name, _ in network.named_children()]
    assert_values_move(symmetry, drawn(symmetry, 2), network, x, names, 1e-11)


def test_momenta_turn_with_the_weights():
    network, x, symmetry = traced("siren")
    element = symmetry.identity().replaced(half_turn=torch.ones(15, dtype=torch.float64))
    one, two = (symmetry.act(symmetry.identity(), network) for _ in range(2))
    optimizers = [torch.optim.SGD(net.parameters(), 1e-4, momentum=0.9) for net in (one, two)]
    for step in range(4):
        if step == 2:
            symmetry.act(element, two, inplace=True, optimizer=optimizers[1])
        for net, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(one(x), two(x), rtol=0, atol=1e-7)


def test_elements_that_are_none_are_refused(tmp_path):
    _, _, symmetry = traced("summed")
    element = symmetry.sample()
    path = symmetry.save(element, tmp_path / "element.safetensors")
    assert_refused(lambda: traced("siren")[2].load(path), error=ValueError, says="an element of another symmetry")
    assert_refused(
        lambda: symmetry.save(element, tmp_path / "element.pt"),
        error=ValueError,
        says="expected element.pt.safetensors",
    )
    for name, part, why in (
        ("half_turn", torch.full((14,), 1.0, dtype=torch.float64), "odd ones where only even ones are allowed"),
        ("half_turn", torch.full((14,), 0.5, dtype=torch.float64), "not whole"),
        ("sign", torch.full_like(element.sign, 2.0), "other numbers than 1 and -1"),
        ("permutation", torch.zeros_like(element.permutation), "holds a number twice"),
        ("permutation", element.permutation.flip(0), "out of their axis or cell"),
        ("log_scale", torch.zeros(99, dtype=torch.float64), "expected finite numbers of shape"),
    ):
        symmetry.save(element.replaced(**{name: part}), path)
        assert_refused(lambda: symmetry.load(path), error=ValueError, says=why)
    path.write_bytes(path.read_bytes()[:100])
    assert_refused(lambda: symmetry.load(path), error=ValueError, says="damaged or no safetensors")
    assert_refused(
        lambda: symmetry.load(tmp_path / "none.safetensors"), error=FileNotFoundError, says="there is no file"
    )


def test_half_turns_are_shifts_and_signs():
    network, x, symmetry = traced("random features")
    assert not len(trace_symmetry(network, x, shifts=False).structure.half_turns.place)
    assert not bool(symmetry.sample(shifts=False).half_turn.any())
    assert symmetry.taps["a"].in_front is not None
    assert symmetry.channels("a").shifted


@pytest.mark.parametrize("first", [True, False])
def test_a_bias_that_another_length_reads_otherwise_has_no_half_turns(first):
    def branching(s, x):
        return s.c((sin(s.a(x)) if (x.shape[1] > 4) == first else torch.tanh(s.a(x))).sum(1))

    torch.manual_seed(0)
    network = Program(branching, {"a": of(L, 2, 8), "c": of(L, 8, 3)}).double()
    x, shorter = (torch.randn(3, length, 2, dtype=torch.float64) for length in (6, 2))
    symmetry = trace_symmetry(network, x, more_examples=[shorter])
    assert not len(symmetry.structure.half_turns.place)
    assert symmetry.worst_error < 1e-10
