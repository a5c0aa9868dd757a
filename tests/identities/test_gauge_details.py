"""Details counted by hand: signs behind norms, norms of one side, and signs that biases take up."""

import pytest
import torch
from helpers import one_in
from orbit_cases import difference
from torch import Tensor, nn

from lightning_sym.symmetry import balance, canonicalize, trace_symmetry

IMAGES = torch.randn(3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
EXACT = {"rtol": 0, "atol": 1e-10}


# Four channels between two convolutions. A sign in front of the norm and one behind its gain, for each unit of its
# own statistics; a magnitude in front of it where running statistics follow, or nothing is added to what is divided by.
@pytest.mark.parametrize(
    ("norm", "scales_without_eps", "scales", "signs"),
    [
        (lambda eps: nn.GroupNorm(4, 4, eps=eps), 4, 0, 4 + 4),
        (lambda eps: nn.GroupNorm(2, 4, eps=eps), 2, 0, 2 + 4),
        (lambda eps: nn.GroupNorm(1, 4, eps=eps), 1, 0, 1 + 4),
        (lambda eps: nn.GroupNorm(4, 4, eps=eps, affine=False), 4, 0, 4),
        (lambda eps: nn.InstanceNorm2d(4, eps=eps, affine=True), 4, 0, 4 + 4),
        (lambda eps: nn.LayerNorm([4, 6, 6], eps=eps), 1, 0, 1 + 4),
        (lambda eps: nn.BatchNorm2d(4, eps=eps or 1e-9), 4, 4, 4 + 4),  # torch 2.11 refuses an eps of 0
    ],
)
@pytest.mark.few(5)
def test_signs_and_scales_around_norms(norm, scales_without_eps, scales, signs):
    for eps, expected in ((0.0, scales_without_eps), (1e-5, scales), (0.5, scales)):
        network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(eps), nn.Tanh(), nn.Conv2d(4, 3, 3))
        symmetry = trace_symmetry(network.double(), IMAGES)
        assert (symmetry.scales, symmetry.signs) == (expected, signs)


class _Sum(nn.Module):
    """Units of which only the sum is read: nothing goes out of them that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x).tanh().sum(1)


def _hidden_of(network: nn.Module) -> nn.Linear:
    return network.hidden if isinstance(network, _Sum) else network[0]


@pytest.mark.parametrize(
    "make",
    [_Sum, lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5, affine=False), nn.Tanh(), _Sum5())],
    ids=["no scale", "a scale that only multiplies"],
)
def test_one_sided_norms_are_those_that_come_in(make):
    network = make().double().eval()
    hidden = _hidden_of(network)
    with torch.no_grad():
        hidden.weight[[1, 3]] = 0
        if hidden.bias is not None:
            hidden.bias[[1]] = 0
    expected = hidden.weight.square().sum(1) + (0 if hidden.bias is None else hidden.bias.square())
    (found,) = balance(trace_symmetry(network, VECTORS), network).values()
    torch.testing.assert_close(found.incoming, expected.detach(), **EXACT)
    assert not found.outgoing.any()
    assert found.dead == int((expected == 0).sum())


class _Sum5(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


def _sigmoids(depth: int, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (3, *[4] * (depth - 1)):
        layers += [nn.Linear(width, 4), nn.Sigmoid()]
    layers += [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sigmoid()] if norm else []
    return nn.Sequential(*layers, nn.Linear(4, 2)).double().eval()


@pytest.mark.parametrize(("depth", "norm"), [(1, False), (2, False), (4, False), (2, True)])
@pytest.mark.parametrize("seed", one_in(4, range(4)))
@pytest.mark.few(4, "0-2-False")
def test_signs_that_later_biases_take_up_end_in_one_form(depth, norm, seed):
    """Flips of sigmoids change the biases, and the signs further on (docs/theory/intertwiners.md, 1.4)."""
    torch.manual_seed(seed)
    network = _sigmoids(depth, norm)
    symmetry = trace_symmetry(network, VECTORS, affine=True)
    assert len(symmetry.structure.absorbed) == depth + norm
    assert symmetry.signs == 4 * (depth + (2 if norm else 0))
    expected = canonicalize(symmetry, network).network
    for member in (network, *(symmetry.act(symmetry.sample(), network) for _ in range(3))):
        form = canonicalize(symmetry, member)
        assert difference(form.network, expected) <= EXACT["atol"]
        torch.testing.assert_close(form.network(VECTORS), network(VECTORS), **EXACT)
        # The element that was found is the one that leads from the network to its form, in one step.
        assert difference(symmetry.act(form.element, member), form.network) == 0
        assert canonicalize(symmetry, member, inplace=True).network is member
        assert difference(member, form.network) == 0


def test_signs_stay_where_they_are_not_asked_for():
    network = _sigmoids(2)
    symmetry = trace_symmetry(network, VECTORS, affine=True)
    form = canonicalize(symmetry, network, signs=False)
    assert bool((form.element.sign == 1).all())
    torch.testing.assert_close(form.network[0].weight.sort(0).values, network[0].weight.sort(0).values, **EXACT)


@pytest.mark.parametrize(
    ("layer", "signs"),
    [
        (nn.Conv2d(4, 4, 3), 4),
        (nn.Conv2d(4, 4, 3, bias=False), 0),  # nothing there that could take up a constant
        (nn.Conv2d(4, 4, 3, groups=2), 0),  # each bias belongs to some of the channels only
        (nn.Conv2d(4, 4, 3, padding=1), 0),  # a constant is none where zeros are put around it
        (nn.Conv2d(4, 4, 3, stride=2, dilation=2), 4),
        (nn.Conv2d(4, 4, 1, padding=0), 4),
    ],
    ids=["plain", "no bias", "grouped", "padded", "strided", "pointwise"],
)
def test_what_takes_up_the_constant_of_a_sign(layer, signs):
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Sigmoid(), layer, nn.ReLU()).double()
    assert trace_symmetry(network, IMAGES, affine=True).signs == signs
