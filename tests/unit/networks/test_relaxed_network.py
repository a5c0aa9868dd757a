"""RelaxedNetwork: the published parameter counts, shapes on every grid, and how it behaves as a network of ours."""

import pytest
import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.layers import PolyphasePool, ResidualPathways, parameter_paths
from lightning_sym.networks import RelaxedNetwork, build

KINDS = ["fc", "ffc", "sfc", "conv", "sconv", "gconv", "gconv_full", "gconv_separable", "gconv_depthwise_separable"]
COMBINATIONS = [
    *([kind] for kind in KINDS),
    ["ffc", "conv"],
    ["sfc", "sconv"],
    ["ffc", "conv", "gconv"],
    ["c4", "d4", "conv"],
]
COMBINATIONS += [["fc", "ffc"], KINDS]


def count(*args, **kwargs):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RelaxedNetwork(*args, **kwargs).parameters())


@pytest.mark.parametrize(
    ("paths", "arguments", "three_channels", "one_channel", "forty_classes"),
    [
        (["fc"], {}, 133_635_690, 112_664_170, 112_683_400),
        (["conv"], {}, 338_770, 338_590, 357_820),
        (["fc", "conv"], {}, 133_865_010, 112_893_310, 112_912_540),
        (["ffc"], {}, 1_542_625, 1_501_665, 1_520_895),
        (["ffc", "conv"], {}, 1_771_945, 1_730_805, 1_750_035),
        (["sfc"], {}, 831_820, 811_340, 830_570),
        (["sconv"], {"anchors": 7}, 287_910, 287_770, 307_000),
        (["sconv"], {}, 237_050, 236_950, 256_180),
        (["sfc", "sconv"], {"anchors": 4}, 933_990, 913_430, 932_660),
        (["sfc", "sconv"], {}, 959_420, 938_840, 958_070),
        (["gconv"], {}, 338_770, 338_590, 357_820),
        (["gconv_full"], {}, 1_025_380, None, None),
        (["gconv_full"], {"width": 6}, 371_200, None, None),
        (["gconv_separable"], {}, 214_550, None, None),
        (["gconv_separable"], {"width": 13}, 358_463, None, None),
        (["gconv_depthwise_separable"], {}, 139_725, None, None),
        (["gconv_depthwise_separable"], {"width": 16}, 346_215, None, None),
        (["ffc", "conv", "gconv"], {"width": 2}, 1_237_527, 1_105_843, None),
    ],
    ids=str,
)
@pytest.mark.few(4)
def test_parameter_counts_of_relaxed_networks_are_the_published_ones(
    paths, arguments, three_channels, one_channel, forty_classes
):
    assert count(paths, in_channels=3, **arguments) == three_channels
    if one_channel:
        assert count(paths, in_channels=1, **arguments) == one_channel
    if forty_classes:
        assert count(paths, in_channels=1, num_classes=40, **arguments) == forty_classes


def test_what_is_learned_adds_its_parameters():
    plain = count(["sfc", "sconv"], 2, 8)
    # In each of 4 blocks one inverse length scale of the filter, two of the grids; 5 anchors of the filter, and half of
    # the grids' positions, of which there are 64, 64, 16, 4 before and 64, 16, 4, 1 behind.
    assert count(["sfc", "sconv"], 2, 8, learn_lengthscale=True) == plain + 4 * 3
    anchors = 4 * 5 + (32 + 32 + 8 + 2) + (32 + 8 + 2 + 1)
    assert count(["sfc", "sconv"], 2, 8, learn_positions=True) == plain + 2 * anchors


@pytest.mark.parametrize(
    ("grid", "shapes"),
    [
        (8, [(3, 8, 8), (6, 4, 4), (6, 2, 2), (12, 1, 1)]),
        (16, [(3, 16, 16), (6, 8, 8), (6, 8, 8), (12, 4, 4), (12, 2, 2), (24, 1, 1)]),
        (32, [(3, 32, 32), (6, 16, 16), (6, 16, 16), (12, 8, 8), (12, 8, 8), (24, 4, 4), (24, 2, 2), (48, 1, 1)]),
        ((8, 16), [(3, 8, 16), (6, 4, 8), (6, 2, 4), (12, 1, 2)]),
        ((32, 8), [(3, 32, 8), (6, 16, 4), (6, 8, 2), (12, 4, 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("paths", [["conv"], ["ffc", "conv"]], ids="-".join)
def test_channels_and_grids_of_the_blocks(paths, grid, shapes):
    network = RelaxedNetwork(paths, 3, grid, in_channels=1)
    images = torch.zeros(2, 1, *((grid, grid) if isinstance(grid, int) else grid))
    blocks = [network.split(site)[0] for site in network.sites()[:-1]]
    assert [tuple(block(images).shape[1:]) for block in blocks] == shapes
    assert isinstance(getattr(network, "mean", None), nn.AvgPool2d) == (images.shape[2] != images.shape[3])
    last = shapes[-1][0]
    assert (network.hidden.in_features, network.hidden.out_features) == (last, 4 * last)


@pytest.mark.parametrize("paths", [[kind] for kind in KINDS], ids="-".join)
@pytest.mark.few(3)
def test_new_networks_are_not_dead(paths):
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    zeros = []
    for seed in range(10):
        network = RelaxedNetwork(paths, 8, 8, 1).fresh(seed)
        top = network.split("activation3")[0](x)
        zeros.append((top == 0).float().mean().item())
    assert 0.3 < sum(zeros) / 10 < 0.7
    assert max(zeros) < 0.9


@pytest.mark.parametrize("paths", COMBINATIONS, ids="-".join)
@pytest.mark.few(3)
def test_sites_cuts_gradients_and_construction(paths):
    network = RelaxedNetwork(paths, 1, 8, 1, 3)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))  # for which no narrow network is dead
    assert network.sites() == [f"activation{layer}" for layer in range(5)]
    for site in network.sites():
        lower, upper = network.split(site)
        assert torch.equal(upper(lower(x)), network(x))
    again = build(network.architecture)
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(x), network(x))
    nn.functional.cross_entropy(network(x), torch.arange(2)).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    first, second, other = (network.fresh(seed)(x) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_names_by_family_and_one_pool_for_all_convolutional_paths():
    network = RelaxedNetwork(["ffc", "conv", "gconv_full"], 2, 8, 1)
    assert list(network.block0.paths) == ["fc", "conv", "gconv"]
    assert list(network.block1.paths) == ["fc", "pooled"]
    assert list(network.block1.paths["pooled"][0].paths) == ["conv", "gconv"]
    assert (network.block1.scale, network.block1.paths["pooled"][0].scale) == (1 / 3, 1)
    assert sum(isinstance(module, PolyphasePool) for module in network.modules()) == 3
    paths = parameter_paths(network)
    assert set(paths.values()) == {(f"block{k}", path) for k in range(4) for path in ("fc", "conv", "gconv")}
    assert {name for name, _ in network.named_parameters()} - set(paths) == {
        f"{name}.{tensor}" for name in ("hidden", "classifier") for tensor in ("weight", "bias")
    }
    assert list(RelaxedNetwork(["fc", "ffc", "conv"], 2, 8, 1).block1.paths) == ["fc", "ffc", "conv"]
    assert "block1.conv.0.weight" in dict(RelaxedNetwork(["ffc", "conv"], 2, 8).named_parameters())


def test_each_block_may_have_paths_of_its_own():
    kinds = [["ffc", "conv"], ["conv", "gconv"], ["conv"], ["ffc"]]
    network = RelaxedNetwork(kinds, 2, 8, 1, relaxed_gain=0.5)
    paths = [list(getattr(network, f"block{index}").paths) for index in range(4)]
    assert paths == [["fc", "conv"], ["pooled"], ["conv"], ["fc"]]
    assert [getattr(network, f"block{index}").scale for index in range(4)] == [1 / 2, 1 / 2, 1, 1]
    x = torch.randn(2, 1, 8, 8)
    assert network(x).shape == (2, 10)
    again = build(network.architecture)
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(x), network(x))
    torch.manual_seed(0)
    same = RelaxedNetwork([["ffc", "conv"]] * 4, 2, 8, 1)
    torch.manual_seed(0)
    assert torch.equal(same(x), RelaxedNetwork(["ffc", "conv"], 2, 8, 1)(x))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_block_is_the_mean_of_its_paths_unless_said_otherwise(scale):
    torch.manual_seed(0)
    network = RelaxedNetwork(["ffc", "conv", "gconv"], 2, 8, 1, scale=scale).double()
    x = torch.randn(3, 8, 8, 8, dtype=torch.float64)
    block = network.block1
    fc, conv, gconv = (
        part(x) for part in (block.paths["fc"], *(block.paths["pooled"][0].paths[name] for name in ("conv", "gconv")))
    )
    expected = (fc + PolyphasePool()(conv + gconv)) * (scale or 1 / 3)
    torch.testing.assert_close(block(x), expected)


def test_linear_layers_start_without_bias():
    network = RelaxedNetwork(["conv"], 2, 8)
    assert not network.hidden.bias.any()
    assert not network.classifier.bias.any()
    assert network.hidden.weight.abs().max() <= network.hidden.in_features**-0.5


def test_options_reach_the_layers():
    network = RelaxedNetwork(
        ["sconv", "sfc"], 2, 8, 1, activation="tanh", kernel_size=5, anchors=6, learn_positions=True, pool_norm="l2"
    )
    assert isinstance(network.activation2, nn.Tanh)
    layer, pool = network.block1.paths["conv"]
    assert (layer.kernel_size, layer.anchors, pool.norm) == (5, 6, "l2")
    assert network.block1.paths["fc"].positions1.requires_grad
    assert all(not isinstance(m, ResidualPathways) or m.scale == 0.5 for m in network.modules())


def test_the_grid_follows_from_the_data_under_its_other_name():
    assert RelaxedNetwork(["conv"], 1, image_size=16).sites() == RelaxedNetwork(["conv"], 1, 16).sites()
    assert len(RelaxedNetwork(["conv"], 1).sites()) == 9
    assert len(RelaxedNetwork(["conv"], 1, 16, image_size=(16, 16)).sites()) == 7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"paths": []}, "paths of RelaxedNetwork must be a list of one or more of fc, ffc, sfc, conv"),
        ({"paths": "conv"}, "paths of RelaxedNetwork must be a list of one or more of"),
        ({"paths": ["convolution"]}, "Unknown path of RelaxedNetwork 'convolution'"),
        ({"paths": ["conv", "conv"]}, "paths of RelaxedNetwork must differ from one another, got ['conv', 'conv']"),
        ({"paths": [["conv"]] * 4}, "one for each of its 8 blocks on this grid, got [['conv'], "),
        ({"paths": [["conv"], "conv"], "grid": 8}, "one list for all blocks, or one for each of its 4 blocks"),
        ({"grid": 12}, "takes images with sides that are powers of two, 8 at least, got 12x12; pad or resize them."),
        ({"grid": 4}, "8 at least, got 4x4"),
        ({"grid": (8, 24)}, "8 at least, got 8x24"),
        ({"image_size": 28}, "8 at least, got 28x28"),
        ({"grid": 8, "image_size": 16}, "grid of RelaxedNetwork is 8, but images are 16"),
        ({"width": 0}, "width must be an integer >= 1, got 0."),
        ({"paths": ["sconv"], "anchors": 10}, "got anchors=10; use 9 at most"),
        ({"pool_norm": "l1"}, "Unknown norm of PolyphasePool 'l1'"),
        ({"activation": "rellu"}, "relu"),
    ],
)
def test_relaxed_network_names_bad_arguments(arguments, text):
    assert_refused(lambda: RelaxedNetwork(**{"width": 1, **arguments}), says=text)


@pytest.mark.parametrize(("kind", "written"), [("fc", "weight"), ("ffc", "theta2"), ("sfc", "u2")])
def test_relaxed_gain_starts_near_an_equivariant_network(kind, written):
    networks = []
    for gain in (1.0, 0.1):
        torch.manual_seed(0)
        networks.append(RelaxedNetwork([kind, "conv"], 2, 8, 1, relaxed_gain=gain))
    for (name, one), (_, other) in zip(*(network.named_parameters() for network in networks), strict=True):
        factor = 0.1 if ".fc." in name and name.endswith(written) else 1
        torch.testing.assert_close(other, factor * one)
    x = torch.randn(8, 1, 8, 8)
    errors = [(net.block0(x.roll(3, 3)) - net.block0(x).roll(3, 3)).abs().max().item() for net in networks]
    assert errors[1] == pytest.approx(0.1 * errors[0], rel=1e-4)


def test_relaxed_gain_is_for_paths_beside_others():
    torch.manual_seed(0)
    alone = RelaxedNetwork(["fc"], 1, 8, 1)
    torch.manual_seed(0)
    assert torch.equal(
        RelaxedNetwork(["fc"], 1, 8, 1, relaxed_gain=0.1).block0.paths["fc"].weight, alone.block0.paths["fc"].weight
    )
    assert_refused(RelaxedNetwork, ["ffc", "conv"], 1, 8, 1, relaxed_gain=0)
