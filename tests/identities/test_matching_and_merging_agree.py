"""One search serves matching and merging: what an element makes of a network is found by both, and merged into it."""

import copy
import functools

import pytest
import torch
from architectures import OURS
from helpers import one_in, randomize_statistics
from torch import nn

from lightning_sym.connectivity import average
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.merging import merge
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
    ("name", "seed", "dtype"), one_in(9, [(name, seed, dtype) for seed in range(3) for name in CASES for dtype in LEFT])
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
        assert all("order of the reference" in reason for reason in merged.reasons[1:])


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


# ---- networks that were trained further


def small_perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))


def small_convolutional() -> nn.Module:
    first, second = (nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)), (nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8))
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


class SmallTransformer(nn.Module):
    """Rows of an image are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Linear(8, 16), nn.Parameter(0.1 * torch.randn(8, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, dropout=0.0)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, images):
        return self.head(self.norm(self.block(self.embedding(images.squeeze(1)) + self.positions)).mean(1))


@functools.cache
def digits():
    images, labels = zip(*DigitsDataModule().curvature_dataloader(), strict=True)
    return torch.cat(images), torch.cat(labels)


def tuned(network, seed, steps=40, lr=5e-3, decay=0.0, labels=range(10)):
    """Return a network trained further on the digits with these labels."""
    x, y = digits()
    chosen = torch.nonzero(torch.isin(y, torch.tensor(list(labels)))).ravel()
    network, generator = copy.deepcopy(network).train(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=decay)
    for _ in range(steps):
        batch = chosen[torch.randint(len(chosen), (64,), generator=generator)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
    return network.eval()


@functools.cache
def parent_of(make):
    torch.manual_seed(0)
    parent = tuned(make(), 0, steps=60)
    return parent, trace_symmetry(parent, digits()[0][:2])


def pruned(network):
    """Return a network of which the smaller half of every matrix is zero."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter[parameter.abs() < parameter.abs().median()] = 0
    return network


def reordered(symmetry, network):
    drawn = symmetry.sample(torch.Generator().manual_seed(3), mixing=False)
    return symmetry.act(symmetry.identity().replaced(permutation=drawn.permutation), network)


STAY = {  # by name, of the parent: what was made of it
    "other data": lambda p: [tuned(p, 1, labels=range(5)), tuned(p, 2, labels=range(5, 10))],
    "rates": lambda p: [tuned(p, 1, lr=1e-3), tuned(p, 2, lr=2e-2)],
    "decay": lambda p: [tuned(p, 1), tuned(p, 2, steps=80, decay=2.0)],
    "pruned": lambda p: [tuned(p, 1), pruned(tuned(p, 2))],
    "three": lambda p: [tuned(p, 1), tuned(p, 2, labels=range(5, 10)), tuned(p, 3, lr=2e-2)],
    "bfloat16": lambda p: [tuned(p, 1), tuned(p, 2).bfloat16().float()],
    "parent": lambda p: [p, tuned(p, 2, steps=80, lr=1e-2)],
}


@pytest.mark.parametrize("form", STAY)
@pytest.mark.parametrize("make", [small_perceptron, small_convolutional, SmallTransformer])
def test_what_was_trained_further_from_one_parent_stays(make, form):
    parent, symmetry = parent_of(make)
    networks = STAY[form](parent)
    merged = merge(symmetry, networks)
    for tensor, plain in zip(merged.network.parameters(), average(networks).parameters(), strict=True):
        assert torch.equal(tensor, plain)
    assert merged.distances[-1] == merged.distances[0]
    assert not merged.reasons[0]
    assert all(merged.reasons[1:])


@pytest.mark.parametrize("unrelated", [False, True])
@pytest.mark.parametrize("make", [small_perceptron, small_convolutional, SmallTransformer])
def test_what_is_in_another_order_comes_nearer_and_has_the_better_mean(make, unrelated):
    """A child of another order is tuned there; networks of two seeds have nothing in common but their data."""
    parent, symmetry = parent_of(make)
    torch.manual_seed(1)
    networks = [tuned(parent, 1), tuned(make() if unrelated else reordered(symmetry, parent), 2, steps=100)]
    merged, (x, y) = merge(symmetry, networks), digits()
    assert merged.reasons == ("", "")
    assert merged.distances[-1] < merged.distances[0]
    with torch.no_grad():
        plain, aligned = (nn.functional.cross_entropy(own(x), y) for own in (average(networks), merged.network))
    assert aligned < plain
