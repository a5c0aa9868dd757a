"""CutNetwork, StitchedNetwork and their ports: modes, shapes, and errors that say what to do."""

import copy
import functools

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.networks import CIFARResNet, MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.stitching import CutNetwork, Port, StitchedNetwork, stitch_ports
from lightning_sym.symmetry import INTERTWINER_GROUPS

torch.set_num_threads(1)


class Dropping(Network):
    """Has dropout and a batch norm after its one site."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.norm1, self.activation = nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU()
        self.drop, self.norm2, self.last = nn.Dropout(0.5), nn.BatchNorm1d(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm2(self.drop(self.activation(self.norm1(self.first(x))))))


class Unsteady(Dropping):
    """Draws random numbers in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand_like(x[:, :1])


def cut(make, shape, sites=None, seed: int = 0, **settings) -> CutNetwork:
    network = make().fresh(seed)
    return CutNetwork(network, sites, example=torch.rand(2, *shape), **settings)


def dropping(seed: int = 0, width: int = 6) -> CutNetwork:
    return cut(lambda: Dropping(width), (4,), seed=seed)


def cnn(seed: int = 0, **settings) -> CutNetwork:
    return cut(lambda: MyrtleCNN(2, image_size=8), (3, 8, 8), seed=seed, **settings)


def resnet(seed: int = 0) -> CutNetwork:
    sites = ["activation", "blocks.0.activation1", "blocks.2.activation2", "blocks.3.activation1"]
    return cut(lambda: CIFARResNet(20, width=2), (3, 8, 8), sites, seed)


# ---- cutting


def test_a_cut_network_is_frozen_and_keeps_its_values():
    network = Dropping().fresh(0)
    before = copy.deepcopy(network.state_dict())
    found = CutNetwork(network, example=torch.rand(2, 4))
    assert found.network is network
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert found.sites == ["activation"]
    values = found.values(torch.rand(5, 4, requires_grad=True))
    assert not values["activation"][0].requires_grad


def test_upper_parts_share_parameters_and_own_statistics():
    source = dropping()
    first, second = source.upper("activation"), source.upper("activation")
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a is b
    assert first.norm2.weight is source.network.norm2.weight
    assert first.norm2.running_mean is not second.norm2.running_mean
    own = source.upper("activation", own_parameters=True)
    assert own.norm2.weight is not source.network.norm2.weight
    assert all(p.requires_grad for p in own.parameters())
    assert not any(p.requires_grad for p in source.network.parameters())


def test_bad_sites_are_said():
    assert_refused(cnn, sites=["relu"], says="activation1, activation2, activation3, activation4")
    assert_refused(cnn, sites=[], says="MyrtleCNN must be cut at one site at least")
    assert_refused(cut, Unsteady, (4,), says="Unsteady cut at 'activation' does not reproduce its output")


class Pair(Dropping):
    """Returns its hidden layer, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


def test_networks_with_several_outputs_are_refused_and_maps_have_the_networks_precision():
    assert_refused(lambda: cut(Pair, (4,)), says="Pair returns a tuple; expected one tensor")
    network = Dropping().fresh(0).double()
    stitch = CutNetwork(network, example=torch.rand(2, 4).double())
    x = torch.rand(5, 4).double()
    found = StitchedNetwork(stitch, stitch, "activation", family="identity").eval()(x)
    torch.testing.assert_close(found, network(x), rtol=0, atol=1e-14)
    assert StitchedNetwork(stitch, stitch, "activation", family="full")(x).dtype == torch.float64


def test_crossings_say_what_crosses():
    source = resnet()
    (single,), pair = source.crossings("activation"), source.crossings("blocks.3.activation1")
    assert (single.name, single.channels, single.positions, single.axis) == ("activation", 2, (8, 8), 1)
    # The skip connection has another width and resolution: it comes from in front of a block that halves.
    assert [c.shape for c in pair] == [(4, 4, 4), (2, 8, 8)]
    assert [c.name for c in pair] == ["blocks.3.activation1", "blocks.2.activation2"]
    assert all(c.mapped and c.group == INTERTWINER_GROUPS["relu"] for c in pair)
    assert source.shapes("blocks.3.activation1") == tuple((c.name, c.shape) for c in pair)


def test_like_takes_the_symmetry_over():
    first = cnn()
    second = cnn(1, like=first)
    assert second.symmetry is first.symmetry
    assert second.crossings("activation2") == first.crossings("activation2")


# ---- ports


def test_ports_of_equal_sites():
    ports = stitch_ports(resnet(), resnet(1), "blocks.3.activation1", "blocks.3.activation1")
    assert [(p.in_channels, p.out_channels, p.axis) for p in ports] == [(4, 4, 1), (2, 2, 1)]
    branch = stitch_ports(resnet(), resnet(1), "blocks.0.activation1", "blocks.0.activation1", ports="branch")
    assert branch[0] == Port(2, 2, group=INTERTWINER_GROUPS["relu"])
    assert branch[1] is None


def test_bad_ports_are_said():
    a, b = resnet(), resnet(1)
    assert_refused(stitch_ports, a, b, "activation", "activation", ports="skip")
    assert_refused(stitch_ports, a, b, "blocks.1.activation1", "activation", says="The network is not cut at")
    assert_refused(stitch_ports, a, b, "activation", "norm", says="The network is not cut at 'norm'")
    assert_refused(a.crossings, "norm", says="The network is not cut at 'norm'")
    says = "source of stitch_ports must be of type CutNetwork"
    assert_refused(stitch_ports, a.network, b, "activation", "activation", says=says, error=TypeError)
    assert_refused(CutNetwork, a.network, example=None, says="must be of type Tensor, got None", error=TypeError)
    values = "2 values cross the top network's cut (blocks.0.activation1, activation), but only 1 the bottom network's"
    assert_refused(stitch_ports, a, b, "activation", "blocks.0.activation1", says=values)
    site = "blocks.3.activation1"
    wide = cut(lambda: CIFARResNet(20, width=4), (3, 8, 8), [site, "activation"])
    says = ("blocks.2.activation2 would pass without a map, but has shape [4, 8, 8] below and [2,", 'use ports="all"')
    assert_refused(lambda: stitch_ports(wide, a, site, site, ports="branch"), says=says)
    flat = cut(functools.partial(MultiLayerPerceptron, [5, 4], image_size=8, in_channels=3), (3, 8, 8))
    assert_refused(stitch_ports, flat, a, "activation1", "activation", says="a value of shape [5] (without batch)")


def test_positions_have_to_fit():
    a, b = cnn(), cnn(1)  # 8x8, 8x8, 4x4, 2x2
    assert_refused(stitch_ports, a, b, "activation2", "activation3", says="activation2 has 8x8 positions and")
    assert_refused(stitch_ports, a, b, "activation3", "activation2", resize=True, says="has 4x4 positions and")
    (port,) = stitch_ports(a, b, "activation2", "activation3", resize=True)
    assert (port.in_channels, port.out_channels) == (4, 8)


def test_resizing_is_averaging():
    a, b = cnn(), cnn(1)
    stitched = StitchedNetwork(a, b, "activation2", "activation4", family="full", batch_norm="frozen", resize=True)
    images = torch.rand(3, 3, 8, 8)
    (value,) = a.values(images)["activation2"]
    pooled = value.view(3, 4, 2, 4, 2, 4).mean((3, 5))
    weight = stitched.stitching_maps[0].matrix()
    expected = stitched.upper((torch.einsum("oc,nchw->nohw", weight, pooled),))
    torch.testing.assert_close(stitched(images), expected)
    assert stitched._sizes == [(2, 2)]


def test_any_site_of_any_architecture():
    a, b = resnet(), cnn(1)
    images = torch.rand(3, 3, 8, 8)
    for family in ("full", "rank(2)", "lasso"):
        stitched = StitchedNetwork(a, b, "blocks.0.activation1", "activation2", family=family)
        assert stitched(images).shape == (3, 10)  # of the values that cross, the activation only
        assert len(stitched.maps) == 1
    for family in ("group", "identity", "orthogonal", "assignment"):
        says = "needs equal widths, got 2 channels in and 4 out"
        assert_refused(StitchedNetwork, a, b, "blocks.0.activation1", "activation2", family=family, says=says)
    assert_refused(StitchedNetwork, a, b, "activation", "activation1", batch_norm="train")
    assert_refused(StitchedNetwork, a, b, "activation", "activation1", family="ful", says="Unknown stitching map 'ful'")
    own = functools.partial(StitchedNetwork, a, b, "activation", "activation1", family=lambda port: nn.Identity())
    assert_refused(own, says="A family must make a StitchingMap from a Port, got Identity", error=TypeError)


# ---- modes


def test_modes_of_a_frozen_upper_part():
    a, b = dropping(), dropping(1)
    for batch_norm, expected in (("batch", True), ("frozen", False)):
        stitched = StitchedNetwork(a, b, "activation", family="full", batch_norm=batch_norm)
        assert stitched.training
        assert stitched.maps.training
        assert stitched.upper.norm2.training is expected
        assert not stitched.upper.drop.training
        assert not any(module.training for module in a.network.modules())
        assert not any(module.training for module in a.lower.modules())
        stitched.eval()
        assert not any(module.training for module in stitched.modules())
        stitched.train()
        assert stitched.upper.norm2.training is expected
        assert not a.network.training


@pytest.mark.parametrize("batch_norm", ["batch", "frozen"])
def test_modes_of_a_trained_upper_part(batch_norm):
    a, b = dropping(), dropping(1)
    stitched = StitchedNetwork(a, b, "activation", family="full", batch_norm=batch_norm, train_upper=True)
    assert stitched.upper.drop.training
    assert stitched.upper.norm2.training is (batch_norm == "batch")
    assert not b.network.norm2.training
    assert not any(module.training for module in a.network.modules())
    assert stitched.trained is stitched
    assert {name for name, p in stitched.named_parameters() if p.requires_grad} == {
        "maps.0.weight",
        *(f"upper.{part}" for part in ("norm2.weight", "norm2.bias", "last.weight", "last.bias")),
    }


def test_only_maps_have_gradients():
    a, b = dropping(), dropping(1)
    stitched = StitchedNetwork(a, b, "activation", family="full")
    assert stitched.trained is stitched.maps
    assert {name.split(".")[0] for name in stitched.state_dict()} == {"maps", "upper"}  # not the lower part
    stitched(torch.rand(8, 4)).sum().backward()
    for network in (a.network, b.network, stitched.upper):
        assert all(p.grad is None and not p.requires_grad for p in network.parameters())
    assert stitched.maps[0].weight.grad is not None


def test_each_stitched_network_has_its_own_statistics():
    a, b = dropping(), dropping(1)
    before = copy.deepcopy(b.network.state_dict())
    first, second = (StitchedNetwork(a, b, "activation", family="full") for _ in range(2))
    assert list(first.batch_norms()) == ["upper.norm2"]
    start = second.batch_norms()["upper.norm2"].running_mean.clone()
    first(torch.rand(8, 4))
    assert not torch.equal(first.batch_norms()["upper.norm2"].running_mean, start)
    assert torch.equal(second.batch_norms()["upper.norm2"].running_mean, start)
    assert all(torch.equal(v, before[k]) for k, v in b.network.state_dict().items())
    frozen = StitchedNetwork(a, b, "activation", family="full", batch_norm="frozen")
    frozen(torch.rand(8, 4))
    assert torch.equal(frozen.batch_norms()["upper.norm2"].running_mean, start)


def test_regularisers_and_projections_are_those_of_all_maps():
    a, b = resnet(), resnet(1)
    stitched = StitchedNetwork(a, b, "blocks.0.activation1", family="group")
    one, two = stitched.stitching_maps
    torch.testing.assert_close(stitched.regularization(), one.regularization() + two.regularization())
    with torch.no_grad():
        for module in (one, two):
            module.weights.add_(1.0)
            module.scale.fill_(-1.0)
    stitched.project()
    for module in (one, two):
        torch.testing.assert_close(module.weights.sum(0), torch.ones(2))
        assert (module.scale == 0).all()
    assert StitchedNetwork(a, b, "activation", family="identity").regularization() == 0
