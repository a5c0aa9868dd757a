"""A network without some units is the whole one with zeros; what is measured of units is what plain sums say."""

import copy

import pytest
import torch
from architectures import OURS
from helpers import Program, assert_refused, one_in, randomize_statistics, refused
from torch import nn
from torch.func import functional_call

from lightning_sym.landscape import removable_units
from lightning_sym.networks import CIFARResNet, LeNet5, MultiLayerPerceptron
from lightning_sym.symmetry import trace_symmetry

pytestmark = pytest.mark.long

# Sums of some hundred terms in another order, in float64.
EXACT = {"atol": 1e-10, "rtol": 1e-10}
WITHOUT_UNITS = ("resnet32_identity", "resnet44", "resnet56")  # of width 1: nothing may be removed


@pytest.mark.parametrize("name", one_in(3, [name for name in OURS if name not in WITHOUT_UNITS]))
def test_without_units_is_the_whole_network_with_zeros(name):
    make, shape = OURS[name]
    torch.manual_seed(0)  # of the smallest networks all units may be dead
    network = randomize_statistics(make().double().eval())
    images = torch.rand(3, *shape, dtype=torch.float64)
    units = removable_units(network, images)
    generator = torch.Generator().manual_seed(1)
    removed = {
        group: torch.randperm(size, generator=generator)[: size // 2].tolist() for group, size in units.sizes.items()
    }
    small = units.without(network, removed)
    whole = copy.deepcopy(network)
    units.write_back(whole, small, removed)
    outputs = small(images)
    torch.testing.assert_close(whole(images), outputs, **EXACT)
    assert (network(images) - outputs).abs().max() > 1e-6
    sliced = units.sliced(whole.state_dict(), units.kept(removed))
    assert all(torch.equal(tensor, sliced[key]) for key, tensor in small.state_dict().items())
    assert torch.equal(functional_call(small, sliced, (images,)), outputs)
    before, after = (sum(p.numel() for p in one.parameters()) for one in (network, small))
    assert after < before
    # A unit that nothing reads is gone for nothing, and the symmetry of what is left is that of fewer units.
    again = removable_units(small, images) if all(s - s // 2 > 1 for s in units.sizes.values()) else None
    assert again is None or again.sizes == {g: s - s // 2 for g, s in units.sizes.items()}


@pytest.mark.parametrize("name", ["perceptron", "myrtle", "lenet_28_no_padding", "resnet20_a"])
def test_a_unit_that_nothing_reads_is_removed_at_no_loss(name):
    make, shape = OURS[name]
    network = randomize_statistics(make().double().eval())
    images = torch.rand(3, *shape, dtype=torch.float64)
    units = removable_units(network, images)
    group, size = next((group, size) for group, size in units.sizes.items() if size > 1)
    with torch.no_grad():
        for parameter, axis, positions in units.outgoing(network, [(group, size - 1)]):
            parameter.index_fill_(axis, positions, 0.0)
    torch.testing.assert_close(units.without(network, {group: [size - 1]})(images), network(images), **EXACT)
    assert units.importance(network, [images])[group, size - 1] == 0.0


def test_channels_that_padding_holds_in_place_are_refused():
    """Option A pads zero channels on both sides of a stream: its own channels may go, those of the padding may not."""
    units = removable_units(CIFARResNet(width=4), torch.rand(2, 3, 8, 8))
    assert set(units.refused) == {"blocks.3.conv2", "blocks.6.conv2"}
    assert units.sizes["conv"] == 4
    for call in (lambda: units.restrict(["blocks.3.conv2"]), lambda: units.kept({"blocks.3.conv2": [0]})):
        assert_refused(
            call, says=["The units of blocks.3.conv2 cannot be removed one by one: without one the", "conv,"]
        )
    for name in ("blocks.0.conv2", "blocks.2.conv2"):  # what they add to is the stream that "conv" begins
        assert_refused(units.kept, {name: [0]}, says=f"{name} are tied to those of axis group 'conv'")
        assert_refused(units.restrict, [name], says="name that group")
    assert_refused(units.kept, {"conv": [4]}, says="Units of conv are numbers from 0 to 3, got [4]")
    assert_refused(units.kept, {"conv": [0, 1, 2, 3]}, says="At least one of the 4 units of conv must remain")
    assert_refused(units.kept, {"blocks": [0]}, says="Unknown axis group 'blocks'")
    units.restrict(["conv"])
    assert units.sizes == {"conv": 4}
    free = removable_units(CIFARResNet(width=4, shortcut="B"), torch.rand(2, 3, 8, 8))
    assert not free.refused


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def mean_of_units() -> nn.Module:
    parts = {"first": lambda: nn.Linear(6, 5), "last": lambda: nn.Linear(5, 3)}
    return Program(lambda self, x: self.last((h := self.first(x).relu()) - h.mean(1, keepdim=True)), parts)


@pytest.mark.parametrize(
    "refusal",
    [refused(removable_units, make(), torch.rand(2, *shape),
        says=f"{kind} has no units that can be removed one by") for make, shape, kind in [(normed, (6,), "Sequential"),
        (grouped, (1, 6, 6), "Sequential"), (mean_of_units, (6,), "Program"),
        (lambda: nn.Linear(4, 2), (4,), "Linear")]],
)  # fmt: skip
def test_units_that_others_feel_are_refused(refusal):
    refusal()


@pytest.mark.parametrize("seed", [106, 252, 433, 704])
def test_units_that_no_example_activates_hide_nothing(seed):
    """All units but one at most are 0 on these inputs, so that their mean seems not to change."""
    torch.manual_seed(seed)
    assert_refused(removable_units, mean_of_units(), torch.rand(2, 6), says="no units that can be removed one by one")


def test_importance_is_standard_deviation_times_outgoing_norm():
    network = MultiLayerPerceptron([7], image_size=4).double()
    batches = [torch.rand(n, 1, 4, 4, dtype=torch.float64) for n in (3, 5)]
    hidden = network.activation1(network.linear1(torch.cat(batches).flatten(1)))
    expected = hidden.std(0, correction=0) * network.classifier.weight.norm(dim=0)
    units = removable_units(network, batches[0])
    found = units.importance(network, [(batch, None) for batch in batches])
    torch.testing.assert_close(torch.tensor(list(found.values()), dtype=torch.float64), expected, **EXACT)
    assert list(found) == [("linear1", number) for number in range(7)]
    # Of a smaller network the same, with 0 for what is gone.
    without = units.importance(network, batches, {"linear1": [2]})
    assert without == {unit: 0.0 if unit[1] == 2 else pytest.approx(value) for unit, value in found.items()}


def test_importance_adds_the_pixels_of_a_channel_up():
    network = LeNet5(padding=0).double()
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    pooled = network.pool2(
        network.activation2(network.conv2(network.pool1(network.activation1(network.conv1(images)))))
    )
    weight = network.linear1.weight.view(120, *pooled.shape[1:])
    expected = (pooled.var(0, correction=0) * weight.square().sum(0)).sum((1, 2)).sqrt()
    found = removable_units(network, images).importance(network, [images])
    channels = torch.tensor([found["conv2", n] for n in range(16)], dtype=torch.float64)
    torch.testing.assert_close(channels, expected, **EXACT)


def test_magnitudes_do_not_change_where_a_unit_is_rescaled():
    network = MultiLayerPerceptron([7], image_size=4, bias=False).double()
    images = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    symmetry = trace_symmetry(network, images)
    units = removable_units(network, images, symmetry=symmetry)
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0), permutations=False), network)
    before, after = units.magnitudes(network), units.magnitudes(moved)
    assert after == {unit: pytest.approx(value, rel=1e-10) for unit, value in before.items()}
    norms = network.linear1.weight.norm(dim=1) * network.classifier.weight.norm(dim=0)
    torch.testing.assert_close(torch.tensor(list(before.values()), dtype=torch.float64), norms, **EXACT)
