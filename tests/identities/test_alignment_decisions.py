"""Alignment decides: fine-tunes of one parent stay, other seeds and planted elements are aligned."""

import copy
import functools
import inspect

import pytest
import torch
from architectures import OURS, TORCHVISION
from helpers import one_in, randomize_statistics
from test_matching_and_merging_agree import (
    SmallTransformer,
    parent_of,
    reordered,
    small_convolutional,
    small_perceptron,
    tuned,
)
from torch import nn

from lightning_sym.connectivity import average
from lightning_sym.merging import align, merge
from lightning_sym.merging.alignment import AlignOptions, aligned_without_search
from lightning_sym.merging.equality import equality, rounding_of, weight_difference
from lightning_sym.merging.sketches import sketched
from lightning_sym.networks import VisionTransformer
from lightning_sym.symmetry import parameter_distance, trace_symmetry
from lightning_sym.symmetry.matching.balanced import check_networks
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

NETWORKS = OURS | TORCHVISION
SMALL = [name for name in NETWORKS if name not in ("resnet44", "resnet56", "tv_mobilenet_v2", "tv_squeezenet")]


def small_vision() -> nn.Module:
    return VisionTransformer(1, 8, 10, 4, 16, 1, 2)


class SmallLanguage(nn.Module):
    """Pixels are tokens; a GPT-2 without its head reads them."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        sizes = {"vocab_size": 17, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.25, use_cache=False)
        self.body, self.head = GPT2Model(config), nn.Linear(16, 10)

    def forward(self, images):
        tokens = (16 * images.flatten(1)).round().long().clamp(0, 16)
        return self.head(self.body(input_ids=tokens).last_hidden_state.mean(1))


MAKERS = [small_perceptron, small_convolutional, SmallTransformer, small_vision, SmallLanguage]


@functools.cache
def network_of(name, shifts=True):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = randomize_statistics(make()).eval()
    return network, trace_symmetry(network, torch.randn(2, *shape), check=False, shifts=shifts)


def near(network, size, seed=0, axes=0):
    """Return a copy with noise on all parameters of so many axes, relative to their root mean squares."""
    network, generator = copy.deepcopy(network), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for own in (own for own in network.parameters() if own.ndim >= axes):
            own.add_(size * own.square().mean().sqrt() * torch.randn(own.shape, generator=generator))
    return network


def only(symmetry, name, seed):
    """Return a random element of one factor."""
    drawn = symmetry.sample(torch.Generator().manual_seed(seed))
    return symmetry.identity().replaced(**{name: drawn.parts[name]})


def compared(symmetry, a, b):
    return sketched(symmetry, symmetry.tensors(a), symmetry.tensors(b))


@pytest.mark.parametrize("seed", one_in(3, range(3)))
@pytest.mark.parametrize("factor", ["permutation", "sign"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.few(10, *(f"{name}-permutation-0" for name in ("myrtle_constant", "cct", "cct_sinusoidal", "tv_resnet18")))
def test_a_sketch_never_takes_moved_units_for_units_in_order(name, factor, seed):
    network, symmetry = network_of(name)
    element = only(symmetry, factor, seed)
    if symmetry.factors[factor].is_identity(element.parts[factor]):
        pytest.skip("the network has no such element, or it was not drawn")
    for start in (network, near(network, 0.02)):
        found = compared(symmetry, network, symmetry.act(element, start))
        assert found.doubtful, found


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.few(6, "vit_modern")
def test_exchanging_two_units_of_one_group_is_seen(name):
    """The smallest permutations there are, in every group of units that are permuted freely."""
    network, symmetry = network_of(name)
    for index, group in enumerate(symmetry.groups):
        cell = torch.nonzero(group.cells == group.cells[0]).ravel()[:2]
        if not group.movable or group.kind.startswith("rotation") or len(cell) < 2 or group.dense:
            continue
        permutation = symmetry.identity().permutation.clone()
        one, two = group.units[cell].tolist()
        permutation[[one, two]] = permutation[[two, one]]
        moved = symmetry.act(symmetry.identity().replaced(permutation=permutation), near(network, 0.01, index))
        assert index in compared(symmetry, network, moved).doubtful, group.name


@pytest.mark.parametrize("factor", ["log_scale", "dense", "rotation", "phase", "gained"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.few(7, "vit-log_scale", "vit_modern-dense", "vit_modern-rotation")
def test_planted_continuous_elements_are_never_ruled_out(name, factor):
    network, symmetry = network_of(name)
    element = only(symmetry, factor, 0)
    if symmetry.factors[factor].is_identity(element.parts[factor]):
        pytest.skip("the network has no such element")
    found = compared(symmetry, network, symmetry.act(element, network))
    assert found.doubtful or found.explained > 0.9, found


@pytest.mark.parametrize("size", [1e-4, 0.02])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.few(9)
def test_noise_moves_no_units(name, size):
    network, symmetry = network_of(name)
    found = compared(symmetry, network, near(network, size))
    assert found.in_order
    assert found.distance == pytest.approx(parameter_distance(network, near(network, size)), rel=1e-4)


def test_noise_on_a_wide_network_is_not_explained_by_matrices_and_rotations():
    torch.manual_seed(0)
    network = VisionTransformer(1, 8, 10, 4, 64, 2, 2, mlp_ratio=4).eval()
    symmetry = trace_symmetry(network, torch.randn(2, 1, 8, 8), check=False, shifts=False)
    assert compared(symmetry, network, near(network, 0.02, axes=2)).explained < 0.8
    turned = symmetry.act(only(symmetry, "rotation", 0), network, check=False)
    found = compared(symmetry, network, turned)
    assert found.doubtful
    assert found.explained > 0.9


@pytest.mark.parametrize("name", ["tv_resnet18", "lenet_28"])
def test_noise_on_every_tensor_of_a_convolutional_network_needs_no_search(name):
    """Kernels of 1 x 1 or 3 x 3 pixels are near matrices of rank two, which no translation explains."""
    network, symmetry = network_of(name, shifts=False)
    other = near(network, 0.02)
    found = aligned_without_search(symmetry, [network, other])
    assert found is not None
    assert found.networks[1] is other
    assert "in the order of the reference" in found.reasons[1]
    assert align(symmetry, [network, other]).spreads == ()  # nothing was searched


@pytest.mark.parametrize("name", ["resnet20_b", "tv_resnet18"])
@pytest.mark.few(2)
def test_scales_alone_are_found_in_a_convolutional_network(name):
    network, symmetry = network_of(name)
    scaled = symmetry.act(only(symmetry, "log_scale", 0), near(network, 1e-4))
    assert aligned_without_search(network_of(name, shifts=False)[1], [network, scaled]) is None
    found = align(symmetry, [network, scaled])
    assert found.moved
    assert found.distances[1][1] < 0.01 * found.distances[1][0]


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS)
def test_fine_tunes_of_one_parent_stay_and_the_result_is_the_plain_mean(make):
    parent, symmetry = parent_of(make)
    networks = [tuned(parent, 1, labels=range(5)), tuned(parent, 2, labels=range(5, 10), lr=1e-2), parent]
    found = align(symmetry, networks)
    assert not found.moved
    assert all(own is given for own, given in zip(found.networks, networks, strict=True))
    assert all(symmetry.factors.is_identity(own) for own in found.elements)
    for number, (before, after) in enumerate(found.distances):
        assert before == after == pytest.approx(parameter_distance(networks[0], networks[number]), rel=1e-4)
    assert found.reasons[0] == ""
    assert all("in the order of the reference" in reason for reason in found.reasons[1:])
    merged = merge(symmetry, iter(networks)).network.state_dict()
    for name, plain in average(networks).state_dict().items():
        assert torch.equal(merged[name], plain), name


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS)
def test_another_seed_is_aligned_with_the_whole_group(make):
    parent, symmetry = parent_of(make)
    torch.manual_seed(1)
    found = align(symmetry, [parent, tuned(make(), 2, steps=60)])
    assert found.moved
    before, after = found.distances[1]
    assert after < before
    assert after == pytest.approx(parameter_distance(parent, found.networks[1]), rel=1e-5)
    assert not symmetry.factors.is_identity(found.elements[1])


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS)
def test_planted_elements_are_found_and_equal(make):
    parent, symmetry = parent_of(make)
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), parent)
    found = align(symmetry, [parent, moved])
    assert found.moved
    answers = equality(
        symmetry, parent, moved, (symmetry.identity(), found.elements[1]), rounding_of(torch.float32), seed=0
    )
    assert [own.answer for own in answers] == ["same function", "equal"]


def test_a_small_bias_may_carry_the_rounding_of_a_fitted_matrix():
    """A fitted matrix has errors of its largest entry in all entries: they mix large biases into a small one."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 5), nn.Tanh()).double().eval()
    with torch.no_grad():
        network[2].bias[1] = 1e-7
    symmetry, rounding = trace_symmetry(network, torch.randn(3, 9, dtype=torch.float64)), rounding_of(torch.float32)
    tensors, noise = state_tensors(network), torch.randn(4, 4, dtype=torch.float64)
    times = [
        weight_difference(
            symmetry,
            tensors,
            tensors,
            symmetry.identity().replaced(dense=(torch.eye(4, dtype=torch.float64) + size * noise,)),
            rounding,
        )[0]
        for size in (rounding, 1e3 * rounding)
    ]
    assert times[0] < 1 < times[1]


@pytest.mark.long
def test_only_what_moved_is_aligned_and_scales_alone_are_found():
    parent, symmetry = parent_of(small_perceptron)
    scaled = symmetry.act(only(symmetry, "log_scale", 0), parent)
    networks = [parent, tuned(parent, 1), reordered(symmetry, tuned(parent, 2)), scaled]
    found = align(symmetry, networks)
    assert [bool(reason) for reason in found.reasons] == [False, True, False, False]
    assert found.networks[1] is networks[1]
    assert parameter_distance(found.networks[3], parent) < 1e-3


@pytest.mark.parametrize("how", ["auto", "weights"])
def test_the_identity_competes(how, monkeypatch):
    network, symmetry = network_of("perceptron")
    torch.manual_seed(1)  # the moved network must be farther than the given one
    other = NETWORKS["perceptron"][0]().eval()
    moved = symmetry.sample(torch.Generator().manual_seed(0))
    from lightning_sym.merging import alignment
    from lightning_sym.symmetry.matching.weights import weight_matching

    def farther(symmetry, a, b, **options):
        found = weight_matching(symmetry, a, b)
        away = symmetry.act(moved, b)
        return type(found)(
            *(moved, found.objective, found.sweeps, found.restarts, away),
            *(found.distance_before, parameter_distance(a, away), "weights"),
        )

    monkeypatch.setattr(alignment, "weight_matching", farther)
    found = align(symmetry, [network, other], how=how)
    before, after = found.distances[1]
    assert before == after == pytest.approx(parameter_distance(network, other), rel=1e-6)
    assert found.reasons[1].startswith(f"was nearer as it was ({before:.4g}; aligned ")
    assert found.networks[1] is other


def test_none_leaves_all_and_nothing_is_read_twice_for_one_network():
    network, symmetry = network_of("lenet_28")
    found = align(symmetry, [network, near(network, 1.0)], how="none")
    assert not found.moved
    assert found.reasons == ("", "was not aligned")
    assert align(symmetry, [network]).distances == ((0.0, 0.0),)


def test_merge_takes_every_option_of_align():
    takes = inspect.signature(align).parameters
    options = {name: own.annotation for name, own in takes.items() if own.kind is own.KEYWORD_ONLY and name != "how"}
    assert options == AlignOptions.__annotations__


def test_values_that_are_not_finite_are_named():
    network, symmetry = network_of("lenet_28")
    for value in (float("nan"), float("inf"), 1e20):
        spoilt = copy.deepcopy(network)
        name, own = next(iter(spoilt.named_parameters()))
        with torch.no_grad():
            own.view(-1)[3] = value
        with pytest.raises(ValueError, match=f"{name} of network 1 holds values"):
            align(symmetry, [network, spoilt])
        with pytest.raises(ValueError, match=name):
            check_networks(symmetry, b=spoilt)
