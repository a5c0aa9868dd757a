"""One search serves matching and merging: what an element makes of a network is found by both, and merged into it."""

import functools

import pytest
import torch
from architectures import OURS
from helpers import one_in, randomize_statistics
from torch import nn

from lightning_sym.connectivity import average, merge
from lightning_sym.symmetry import orbit_distance, parameter_distance, trace_symmetry, weight_matching

pytestmark = pytest.mark.long


def encoder(width: int, heads: int, hidden: int) -> nn.Module:
    block = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, norm_first=True, dropout=0.0)
    return nn.Sequential(nn.Linear(6, width), block, nn.LayerNorm(width), nn.Linear(width, 4))


def linear(*widths: int, middle: type[nn.Module] = nn.Identity) -> nn.Module:
    """Return layers of which one is read as it is put out: any invertible matrix acts there."""
    first, second, third, last = widths
    return nn.Sequential(
        nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third), middle(), nn.Linear(third, last)
    )


CASES = {
    "encoder": (functools.partial(encoder, 8, 2, 16), (5, 6)),
    "encoder_wide": (functools.partial(encoder, 32, 4, 64), (5, 6)),
    "bottleneck": (functools.partial(linear, 8, 16, 6, 12), (8,)),
    "more_than_is_read": (functools.partial(linear, 20, 64, 64, 10), (20,)),
    "more_than_is_put_out": (functools.partial(linear, 8, 12, 20, 30), (8,)),
    "more_than_both": (lambda: nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 5)), (8,)),
    **{name: OURS[name] for name in OURS if name not in ("resnet44", "resnet56")},
}
# By precision: what is left, relative to the norm. Single precision holds fewer digits of matrices and tilts.
LEFT = {torch.float32: 1e-4, torch.float64: 1e-10}


@functools.cache
def network_of(name, seed, dtype):
    torch.manual_seed(seed)
    make, shape = CASES[name]
    network = randomize_statistics(make()).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if (
                parameter.ndim == 1
            ):  # biases of norms that are zero leave tilts without a form (theory/matching.md, 1.8)
                parameter.add_(0.3 * torch.randn_like(parameter))
    network, x = network.to(dtype), torch.randn(2, *shape, dtype=dtype)
    return network, trace_symmetry(network, x)


@pytest.mark.parametrize("mixing", [True, False])
@pytest.mark.parametrize(
    ("name", "seed", "dtype"),
    one_in(4, [(name, seed, dtype) for seed in range(3) for name in CASES for dtype in LEFT]),
)
def test_planted_elements_of_every_kind_are_found_by_matching_and_merging(name, seed, dtype, mixing):
    a, symmetry = network_of(name, seed, dtype)
    b = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed), mixing=mixing), a)
    least = LEFT[dtype] * float(sum(p.detach().double().square().sum() for p in a.parameters())) ** 0.5
    match, merged = weight_matching(symmetry, a, b), merge(symmetry, [a, b])
    assert match.distance_after <= least < match.distance_before
    assert parameter_distance(symmetry.act(merged.elements[1], b), a) <= match.distance_after
    assert parameter_distance(merged.network, a) <= least
    assert merged.reasons == ("", "")


@pytest.mark.parametrize("name", ["encoder", "bottleneck", "vit", "resnet20_a"])
def test_merging_ends_no_farther_than_matching_and_the_start(name):
    (a, symmetry), (b, _) = (network_of(name, seed, torch.float64) for seed in range(2))
    match, merged = weight_matching(symmetry, a, b), merge(symmetry, [a, b])
    moved = symmetry.act(merged.elements[1], b)
    assert parameter_distance(moved, a) <= match.distance_after <= match.distance_before
    assert merged.distances[-1] == pytest.approx(parameter_distance(moved, a) / 2)
    assert orbit_distance(symmetry, a, a).upper <= 1e-10


def test_what_comes_from_one_parent_stays_as_it_is():
    """Scales of fine-tuned networks are no gauge: the mean is the plain one, bit for bit."""
    for name in ("perceptron", "encoder", "vit"):
        parent, symmetry = network_of(name, 0, torch.float32)
        tuned = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            tuned.append(average([parent]))
            with torch.no_grad():
                for parameter in tuned[-1].parameters():
                    size = float(parameter.square().mean().sqrt())
                    parameter.add_(0.05 * size * torch.randn(parameter.shape, generator=generator))
        merged = merge(symmetry, tuned)
        for tensor, plain in zip(merged.network.parameters(), average(tuned).parameters(), strict=True):
            assert torch.equal(tensor, plain)
        assert all("as it was" in reason or "same order" in reason for reason in merged.reasons[1:])


def test_one_of_three_that_was_moved_is_brought_back_and_the_others_stay():
    parent, symmetry = network_of("perceptron", 0, torch.float64)
    near = average([parent])
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    far = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), near)
    merged = merge(symmetry, [parent, near, far])
    assert merged.reasons[1]
    assert not merged.reasons[2]
    for tensor, expected in zip(merged.network.parameters(), average([parent, near, near]).parameters(), strict=True):
        assert torch.allclose(tensor, expected, atol=0.01)
