"""Canonical forms of networks with dead units: the living ones are the same for every member of an orbit.

A unit is dead if its incoming or its outgoing weights are all zero. What is left of it has no scale of its own, so that
it can neither be sorted by its norm nor count in the norms of others.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import Program, one_in
from symmetry_family_cases import difference, evaluate, randomise
from torch import nn

from lightning_sym.symmetry import Symmetry, canonicalize, trace_symmetry

EXACT = 1e-10


def perceptron(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    layers = [part for i, o in itertools.pairwise(widths) for part in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    )  # fmt: skip


def residual(s: Any, x: torch.Tensor) -> torch.Tensor:
    """A stream of 6 units, with 7 units in each of two branches."""
    h = torch.relu(s.a(x))
    for up, down in zip(s.up, s.down, strict=True):
        h = torch.relu(h + down(torch.relu(up(h))))
    return s.b(h)


def branches() -> nn.Module:
    up, down = (nn.ModuleList(nn.Linear(*widths) for _ in range(2)) for widths in ((6, 7), (7, 6)))
    return Program(residual, {"a": nn.Linear(5, 6), "b": nn.Linear(6, 3), "up": up, "down": down})


# Makes the network, its input's shape, and for each hidden axis the tensors whose rows feed its units, and those whose
# columns read them.
Unit = tuple[list[str], list[str]]
LAYERS: list[Unit] = [([f"{i}.weight", f"{i}.bias"], [f"{i + 2}.weight"]) for i in (0, 2, 4)]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[Unit]]] = {
    "one layer": (lambda: perceptron(5, 7, 3), (4, 5), LAYERS[:1]),
    "two layers": (lambda: perceptron(5, 7, 6, 3), (4, 5), LAYERS[:2]),
    "three layers": (lambda: perceptron(5, 7, 6, 5, 3), (4, 5), LAYERS),
    "tanh": (lambda: perceptron(5, 7, 6, 3, activation=nn.Tanh), (4, 5), LAYERS[:2]),
    "batch norms": (convolutions, (4, 3, 7, 7),
        [(["1.weight", "1.bias"], ["3.weight"]), (["4.weight", "4.bias"], ["6.weight"])]),
    "branches": (branches, (4, 5), [(["up.0.weight", "up.0.bias"], ["down.0.weight"]),
        (["up.1.weight", "up.1.bias"], ["down.1.weight"])]),
}  # fmt: skip

BEFORE_NORM = {
    "1.weight": ["0.weight", "0.bias", "1.running_mean", "1.running_var"],
    "4.weight": ["3.weight", "4.running_mean", "4.running_var"],
}

# The dead units of each layer, and from which side they were killed.
SIDES: dict[str, Sequence[str]] = {
    "incoming": ["in"],
    "outgoing": ["out"],
    "both": ["both"],
    "two incoming": ["in", "in"],
    "incoming and outgoing": ["in", "out"],
    "one of each": ["in", "out", "both"],
    "three outgoing": ["out", "out", "out"],
}


@torch.no_grad()
def built(name: str, sides: Sequence[str], seed: int) -> nn.Module:
    """Return a network with random weights, and these dead units in every hidden layer, in places drawn at random."""
    torch.manual_seed(seed)
    make, _, layers = NETWORKS[name]
    network = randomise(make().double())
    state = network.state_dict()
    for feeding, reading in layers:
        places = torch.randperm(len(state[feeding[0]]))[: len(sides)].tolist()
        for place, side in zip(places, sides, strict=True):
            if side != "out":
                for key in feeding:
                    state[key][place] = 0
            if side != "in":
                for key in reading:
                    state[key][:, place] = 0
    return network


def alive(state: dict[str, torch.Tensor], unit: Unit) -> torch.Tensor:
    """Return which units of a hidden axis have weights on both sides."""
    feeding, reading = unit
    fed = sum(state[key].reshape(len(state[key]), -1).abs().sum(1) for key in feeding)
    read = sum(state[key].transpose(0, 1).flatten(1).abs().sum(1) for key in reading)
    return (fed != 0) & (read != 0)


def living(name: str, network: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors with zeros where a dead unit stands, on either side of it."""
    state = {key: value.clone() for key, value in network.state_dict().items()}
    for feeding, reading in NETWORKS[name][2]:
        dead = ~alive(state, (feeding, reading))
        # In front of a batch norm stand what it divides out, and its statistics.
        for key in [*feeding, *(BEFORE_NORM[feeding[0]] if name == "batch norms" else [])]:
            state[key][dead] = 0
        for key in reading:
            state[key][:, dead] = 0
    return state


def assert_alike(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], rtol=EXACT, atol=EXACT, msg=lambda text, key=key: key + text)


def members(symmetry: Symmetry, network: nn.Module) -> list[nn.Module]:
    return [network] + [symmetry.act(symmetry.sample(torch.Generator().manual_seed(n)), network) for n in range(4)]


@pytest.mark.parametrize("scales", ["balanced", "unit"])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", one_in(3, NETWORKS))
@pytest.mark.few(6)
def test_living_units_are_the_same_for_all_members(name: str, sides: str, scales: Any) -> None:
    network = built(name, SIDES[sides], seed=0)
    inputs = torch.randn(NETWORKS[name][1], dtype=torch.float64)
    symmetry = trace_symmetry(network, inputs)
    forms = []
    for member in members(symmetry, network):
        form = canonicalize(symmetry, member, scales=scales).network
        assert difference(evaluate(form, (inputs,)), evaluate(network, (inputs,))) < 1e-9
        forms.append(living(name, form))
    for form in forms[1:]:
        assert_alike(form, forms[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_dead_units_come_last(name: str) -> None:
    network = built(name, ["in", "out", "both"], seed=1)
    symmetry = trace_symmetry(network, torch.randn(NETWORKS[name][1], dtype=torch.float64))
    state = canonicalize(symmetry, network).network.state_dict()
    for unit in NETWORKS[name][2]:
        found = alive(state, unit).tolist()
        assert found == sorted(found, reverse=True)
        assert found.count(False) == 3


@pytest.mark.parametrize("name", ["one layer", "two layers", "three layers"])
def test_units_that_never_fire_are_not_dead(name: str) -> None:
    """Their weights are not zero: the whole form is the same for all members, theirs included."""
    network = built(name, [], seed=2)
    with torch.no_grad():
        network[0].bias[:3] = -100.0
    symmetry = trace_symmetry(network, torch.randn(4, 5, dtype=torch.float64))
    forms = [canonicalize(symmetry, member).network.state_dict() for member in members(symmetry, network)]
    for form in forms[1:]:
        assert_alike(form, forms[0])


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.few(5)
def test_canonical_form_is_its_own(sides: str) -> None:
    network = built("two layers", SIDES[sides], seed=3)
    symmetry = trace_symmetry(network, torch.randn(4, 5, dtype=torch.float64))
    once = canonicalize(symmetry, network).network
    twice = canonicalize(symmetry, copy.deepcopy(once)).network
    assert_alike(living("two layers", twice), living("two layers", once))
