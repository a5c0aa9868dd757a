"""Networks on one orbit have similarity 1 up to their group: at every value, for every activation of the table."""

import functools

import pytest
import torch
from helpers import assert_refused, measured, one_in
from symmetry_family_cases import randomise
from test_activation_action import SMALL
from torch import Tensor, nn

from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym.networks.activations import make_activation
from lightning_sym.similarity import CKA, GroupProcrustes, OrthogonalProcrustes, features_of
from lightning_sym.symmetry import INTERTWINER_GROUPS, Element, Symmetry, trace_symmetry

pytestmark = pytest.mark.long

EXACT = 1e-10
ONE = 1e-7  # squared distances are rounded to some 1e-14, relative to the squared norms
NEARLY = 1e-4  # behind a layer norm one direction hardly varies, which is divided out where matrices mix
OTHER = 0.03  # by how much networks that have nothing to do with each other are below 1, at least
SAMPLES = 64


class Elementwise(nn.Module):
    """An activation that torch has as a function only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square() if self.name == "relu_squared" else getattr(torch, self.name)(x)


MODULES = {name.lower(): getattr(nn, name) for name in [*nn.modules.activation.__all__, "Dropout", "AlphaDropout"]}
POOLS = {"avg_pool": nn.AvgPool2d(2), "max_pool": nn.MaxPool2d(2), "interpolate": nn.Upsample(scale_factor=2)}
LINEAR = ("identity", "avg_pool", "interpolate")


def activation(name: str) -> nn.Module:
    if name in ("relu_squared", "abs", "cos", "sin", "erf", "atan"):
        return Elementwise(name)
    kind = MODULES.get(name.replace("_", ""))
    return kind() if kind else make_activation(name)


def convolutions(name: str) -> nn.Module:
    """Return a network with batch norm, a grouped convolution, a flattened image and the activation three times."""
    later = "relu" if name in POOLS else name
    size = {"interpolate": 8}.get(name, 2 if name in POOLS else 4)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), POOLS.get(name) or activation(name),
        nn.Conv2d(6, 6, 3, groups=2, padding=1), activation(later),
        nn.Flatten(), nn.Linear(6 * size**2, 7), activation(later), nn.Linear(7, 3),
    )  # fmt: skip


class Transformer(nn.Module):
    """Has queries, keys, values and outputs as layers of their own, and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(5, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(8, 9), nn.Linear(9, 8)
        self.up, self.act, self.down, self.out = nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8), nn.Linear(8, 3)
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o((self.softmax(q @ k.mT / 2) @ v).transpose(1, 2).flatten(2))
        return self.out(x + self.down(self.act(self.up(self.norm2(x)))))


CASES = {
    **{name: (functools.partial(convolutions, name), (2, 6, 6), {}) for name in INTERTWINER_GROUPS},
    **{f"small {name}": case for name, case in SMALL.items()},
    "transformer": (Transformer, (6, 5), {}),
    "sigmoid affine": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 7), nn.Sigmoid(),
        nn.Linear(7, 3)), (5,), {"affine": True}),
    "linear": (lambda: nn.Sequential(*map(nn.Linear, (9, 4, 6, 5), (4, 6, 5, 3))), (9,), {}),
}  # fmt: skip


@functools.cache
def made(case: str) -> tuple[Symmetry, nn.Module, Tensor]:
    make, shape, options = CASES[case]
    torch.manual_seed(0)
    network = randomise(make()).double()
    images = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    return trace_symmetry(network, images[:2], **options), network, images


def seen(symmetry: Symmetry) -> list[str]:
    """Return the taps with channels: the units live on one axis, or on several together."""
    return [name for name, tap in symmetry.taps.items() if len(tap.seen) == 1 and tap.seen[0].axes]


def drawn(symmetry: Symmetry, seed: int) -> Element:
    """Draw an element; without shifts where these add what depends on the input to a tap, which no group takes out."""
    unknown = any(len(tap.shown.unknown) for tap in symmetry.taps.values())
    return symmetry.sample(torch.Generator().manual_seed(seed), shifts=not unknown)


@pytest.mark.parametrize("case", one_in(4, CASES))
def test_two_networks_on_one_orbit_have_similarity_1_at_every_tap(case):
    symmetry, network, images = made(case)
    taps = seen(symmetry)
    assert taps
    for name in symmetry.taps.keys() - taps:
        assert_refused(GroupProcrustes.at, symmetry, name)
    before = features_of(network, taps, images)
    for seed in range(2):
        element = drawn(symmetry, seed)
        after = features_of(symmetry.act(element, network), taps, images)
        for name in taps:
            for live in (False, True):
                metric = GroupProcrustes.at(symmetry, name, live=live)
                value = float(measured(metric, before[name], after[name], [9]))
                mixed = "invertible" in symmetry.channels(name).inside and bool(symmetry.structure.rotations)
                assert abs(value - 1) < (NEARLY if mixed else ONE), (name, live)
        moved = [name for name in taps if not torch.allclose(before[name], after[name], rtol=0.1)]
        assert moved, "the elements do something"


# Dropout is the identity in evaluation, which is what is traced; its row is about training.
@pytest.mark.parametrize("case", [name for name in INTERTWINER_GROUPS if "dropout" not in name])
def test_the_table_s_group_is_enough_behind_an_activation_and_independent_networks_are_below(case):
    symmetry, network, images = made(case)
    # The table's groups are of matrices alone.
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(2), shifts=False), network)
    torch.manual_seed(1)
    other = randomise(CASES[case][0]()).double()
    sites = ["2"] if case in POOLS else ["2", "4", "7"]
    before, after, else_ = (features_of(each, sites, images) for each in (network, moved, other))
    for site in sites:
        assert float(measured(GroupProcrustes(case), before[site], after[site])) > 1 - ONE, site
        if case not in LINEAR:  # whose first layer has all of the input
            for metric in (GroupProcrustes(case), GroupProcrustes.at(symmetry, site)):
                assert float(measured(metric, before[site], else_[site])) < 1 - OTHER, site


def test_the_relu_group_and_its_kernels_notice_a_rotation_and_orthogonal_ones_do_not():
    symmetry, network, images = made("relu")
    sites, source = ["2", "4", "7"], torch.Generator().manual_seed(3)
    before = features_of(network, sites, images)
    after = features_of(symmetry.act(symmetry.sample(source), network), sites, images)
    for site in sites:
        x, y = before[site], after[site]
        rotated = torch.einsum("ij,nj...->ni...", random_orthogonal(x.shape[1], source), x)
        for metric in (GroupProcrustes.at(symmetry, site), CKA("max"), CKA("laplace")):
            assert float(measured(metric, x, y)) == pytest.approx(1, abs=ONE), (site, metric)
            assert float(measured(metric, x, rotated)) < 1 - OTHER, (site, metric)
        for metric in (OrthogonalProcrustes(), CKA(), GroupProcrustes("identity")):
            assert float(measured(metric, x, rotated)) == pytest.approx(1, abs=ONE), (site, metric)
        assert float(measured(OrthogonalProcrustes(), x, y)) < 1 - OTHER  # it does not know of scales


@pytest.mark.parametrize("case", ["transformer", "small torch's attention"])
def test_independent_transformers_and_rotations_across_heads_are_below_1(case):
    symmetry, network, images = made(case)
    torch.manual_seed(1)
    other = randomise(CASES[case][0]()).double()
    taps = [name for name in seen(symmetry) if name != "embed"]  # all of whose input is in it
    before, after = (features_of(each, taps, images) for each in (network, other))
    for name in taps:
        assert float(measured(GroupProcrustes.at(symmetry, name), before[name], after[name])) < 1 - OTHER, name
    if case == "transformer":
        source = torch.Generator().manual_seed(4)
        for name in ("q", "k", "v"):
            x, metric = before[name], GroupProcrustes.at(symmetry, name)
            heads = x.unflatten(-1, (3, -1))
            within = torch.einsum("hij,nthj->nthi", torch.stack([random_orthogonal(heads.shape[3], source)] * 3), heads)
            assert float(measured(metric, x, within.roll(1, 2).flatten(2))) > 1 - ONE, name
            across = x @ random_orthogonal(x.shape[-1], source)
            assert float(measured(metric, x, across)) < 1 - OTHER / 10, name
