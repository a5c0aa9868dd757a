"""Units that only moved are recognised without a search; all else is left to the search."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from test_matching_and_merging_agree import SmallTransformer, parent_of, small_convolutional, small_perceptron
from torch import nn

from lightning_sym.merging import align
from lightning_sym.merging.alignment import aligned_without_search
from lightning_sym.merging.equality import equal_weights, rounding_of
from lightning_sym.networks import VisionTransformer
from lightning_sym.symmetry import parameter_distance, trace_symmetry
from lightning_sym.symmetry.group.assignment import Gain, Tables
from lightning_sym.symmetry.matching.recognition import recognised

CPU = torch.device("cpu")


def small_vision() -> nn.Module:
    return VisionTransformer(1, 8, 10, 4, 16, 1, 2)


MAKERS = [small_perceptron, small_convolutional, SmallTransformer, small_vision]


@functools.cache
def network_of(make, seed=0):
    """Return a network with random biases in float32, and its symmetry without translations."""
    torch.manual_seed(seed)
    network = make().eval()
    with torch.no_grad():
        for own in network.parameters():
            own.add_(0.1 * torch.randn_like(own))
    return network, trace_symmetry(network, torch.rand(2, 1, 8, 8), check=False, shifts=False)


def moved_copy(network, symmetry, *, mixing=False, noise=0.0):
    """Return a copy of a network with units in other places, and the distance that noise gave it before."""
    drawn = symmetry.sample(torch.Generator().manual_seed(3), scale=0.0, mixing=mixing, shifts=False)
    drawn = drawn.replaced(rotation=symmetry.identity().parts["rotation"])  # those of streams need a search
    other, generator = copy.deepcopy(network), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for own in other.parameters():
            own.add_(noise * own.square().mean().sqrt() * torch.randn(own.shape, generator=generator))
    return symmetry.act(drawn, other, check=False), parameter_distance(network, other)


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.few(5)
def test_a_moved_copy_is_recognised_up_to_rounding(make, mixing):
    network, symmetry = network_of(make)
    other, _ = moved_copy(network, symmetry, mixing=mixing)
    points = list(recognised(symmetry, network, other, signs=True, device=CPU, seed=0))
    rotated = mixing and bool(symmetry.structure.dense)
    assert [own.settled for own in points] == ([False, True] if rotated else [True])
    for own in points:
        assert own.objective[0] < own.objective[1]
    if rotated:
        rigid = recognised(symmetry, network, other, signs=True, device=CPU, seed=0, freedom=["permutations", "blocks"])
        assert [own.settled for own in rigid] == [False]
    found = points[-1]
    back = symmetry.act(found.element, other, check=False)
    norm = float(torch.nn.utils.parameters_to_vector(network.parameters()).detach().norm())
    assert parameter_distance(network, back) <= 1e-6 * norm < parameter_distance(network, other)


@pytest.mark.parametrize(
    ("make", "noise"),
    # In small heads, matrices can explain noise.
    [*((make, 0.0) for make in MAKERS), (small_perceptron, 0.02), (small_convolutional, 0.02)],
)
def test_moved_copies_and_moved_fine_tunes_are_aligned_without_a_search(make, noise):
    network, symmetry = network_of(make)
    other, distance = moved_copy(network, symmetry, noise=noise)
    aligned = aligned_without_search(symmetry, [network, other])
    assert aligned is not None
    assert aligned.reasons == ("", "")
    (_, (before, after)) = aligned.distances
    assert before == pytest.approx(parameter_distance(network, other), rel=1e-6)
    assert after == pytest.approx(distance, rel=1e-6, abs=1e-5)
    assert after < 0.1 * before
    assert parameter_distance(network, aligned.networks[1]) == pytest.approx(after, rel=1e-6, abs=1e-9)
    # Scales stay: the element is a permutation with signs.
    assert symmetry.factors["log_scale"].is_identity(aligned.elements[1].parts["log_scale"])


@pytest.mark.parametrize("make", MAKERS)
def test_other_seeds_and_planted_scales_need_a_search(make):
    network, symmetry = network_of(make)
    stranger, _ = network_of(make, 1)
    drawn = symmetry.sample(torch.Generator().manual_seed(3), scale=0.5, mixing=False, shifts=False)
    scaled = symmetry.act(drawn, network, check=False)
    assert not [*recognised(symmetry, network, stranger, signs=True, device=CPU, seed=0)]
    assert aligned_without_search(symmetry, [network, stranger]) is None
    assert aligned_without_search(symmetry, [network, scaled]) is None


def test_signs_that_are_not_free_stay():
    network, symmetry = network_of(SmallTransformer)
    other, _ = moved_copy(network, symmetry)
    found = align(symmetry, [network, other], signs=False)
    assert symmetry.factors["sign"].is_identity(found.elements[1].parts["sign"])


def moved_copies(parent, symmetry, seeds, scale=0.0):
    """Return copies of a network under random elements."""
    draw = functools.partial(symmetry.sample, scale=scale, mixing=False, shifts=False)
    return [symmetry.act(draw(torch.Generator().manual_seed(seed)), parent, check=False) for seed in seeds]


@pytest.mark.parametrize("how", ["auto", "weights"])
def test_several_moved_copies_are_recognised_each_against_the_first(how, monkeypatch):
    parent, symmetry = parent_of(small_perceptron)
    others = moved_copies(parent, symmetry, (1, 2))
    found = aligned_without_search(symmetry, [parent, *others], how=how)
    assert found is not None
    assert found.reasons == ("", "", "")

    def searched(*_, **__):
        raise AssertionError("a search")

    monkeypatch.setattr("lightning_sym.merging.alignment.weight_matching", searched)
    aligned = align(symmetry, [parent, *others], how=how)
    for own in (found, aligned):
        assert all(after < 1e-4 < before for before, after in own.distances[1:])


def test_rounds_follow_a_search_of_one_of_several_networks(monkeypatch):
    parent, symmetry = parent_of(small_perceptron)
    (moved,), (scaled,) = moved_copies(parent, symmetry, [1]), moved_copies(parent, symmetry, [2], scale=0.5)
    assert aligned_without_search(symmetry, [parent, moved, scaled]) is None
    calls = []
    made = "lightning_sym.merging.alignment._Search.make_rounds"
    monkeypatch.setattr(made, lambda self, *_, **__: calls.append(self.moved))
    assert all(after < 1e-4 for _, after in align(symmetry, [parent, moved, scaled]).distances)
    assert calls == [[1, 2]]


@pytest.mark.parametrize("make", MAKERS)
def test_weights_forces_the_search_of_all_but_exact_copies(make):
    network, symmetry = network_of(make)
    exact, _ = moved_copy(network, symmetry)
    tuned, _ = moved_copy(network, symmetry, noise=0.02)
    found = aligned_without_search(symmetry, [network, exact], how="weights")
    assert found is not None
    assert found.reasons == ("", "")
    assert found.distances[1][1] < 1e-5 * found.distances[1][0]
    assert aligned_without_search(symmetry, [network, tuned], how="weights") is None
    same = aligned_without_search(symmetry, [network, copy.deepcopy(network)], how="weights")
    assert same is not None
    assert same.reasons[1] == "has the weights of the reference"


@pytest.mark.parametrize("seed", range(20))
def test_clear_assignments_are_the_optimal_ones(seed):
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 9))
    gain = torch.from_numpy(generator.standard_normal((size, size)))
    gain[torch.arange(size), torch.from_numpy(generator.permutation(size))] += 2.0 * (seed % 3)
    rows = np.arange(size)
    value, _, chosen = Tables(Gain({(): gain}, False)).best(rows, rows)
    best = linear_sum_assignment(gain.numpy(), maximize=True)
    assert sorted(chosen) == list(rows)
    assert value == pytest.approx(float(gain.numpy()[best].sum()), rel=1e-12)


def test_ties_keep_the_order():
    chosen = Tables(Gain({(): torch.tensor([[1.0, 1.0], [1.0, 1.0]])}, False)).best(np.arange(2), np.arange(2))[2]
    assert chosen.tolist() == [0, 1]
    chosen = Tables(Gain({(): torch.tensor([[2.0, 1.0], [3.0, 2.0]])}, False)).best(np.arange(2), np.arange(2))[2]
    assert chosen.tolist() == [0, 1]


@pytest.mark.parametrize("at_once", [2**18, 50])
def test_weights_are_equal_to_their_rounding_and_no_further(at_once, monkeypatch):
    monkeypatch.setattr("lightning_sym.merging.equality._AT_ONCE", at_once)  # rows in one part, or in several
    network, _ = network_of(SmallTransformer)
    rounding = rounding_of(torch.float32)
    rounded, altered = copy.deepcopy(network), copy.deepcopy(network)
    with torch.no_grad():
        for own in rounded.parameters():
            own.mul_(1 + 2 * rounding)
        one = max(altered.parameters(), key=torch.numel)
        one[3] *= 1 + 100 * rounding
    assert equal_weights(network, network, rounding).times == 0
    assert equal_weights(network, rounded, rounding).answer == "equal"
    found = equal_weights(network, altered, rounding)
    assert found.answer == "same function"
    assert found.worst.endswith("at 3 of axis 0")
    assert found.times == pytest.approx(10, rel=0.01)  # 100 times the rounding, of which 10 are allowed
    with torch.no_grad():
        one.copy_(rounded.get_parameter(found.worst.split()[0]))
        one[:, 2] *= 1 + 15 * rounding
    found = equal_weights(network, altered, rounding)
    assert (found.answer, found.inputs) == ("same function", 0)
    assert found.worst.endswith("at 2 of axis 1")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_equal_to_no_others(value):
    one, two = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2))
    two.load_state_dict(one.state_dict())
    two[1].num_batches_tracked += 1
    assert equal_weights(one, two, 1e-6).answer == "equal"
    for place in (one[0].weight.data[1], one[0].bias.data):
        kept = float(place[0])
        place[0] = value
        assert equal_weights(one, two, 1e-6).answer == equal_weights(two, one, 1e-6).answer == "same function"
        place[0] = kept
    for network, shift in ((one, 0.0), (two, 1e-7)):
        network.register_buffer("mask", torch.tensor([-math.inf, 1.0 + shift]))
    assert equal_weights(one, two, 1e-6).answer == "equal"
    one.register_buffer("places", torch.tensor([0, 1]))
    two.register_buffer("places", torch.tensor([1, 0]))
    assert equal_weights(one, two, 1e-6).answer == "same function"
