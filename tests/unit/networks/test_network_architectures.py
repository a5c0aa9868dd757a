import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from architectures import OURS
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from lightning_sym.networks import (
    CIFARResNet,
    CIFARResNet18,
    LeNet5,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    ResidualCNN,
    TorchvisionNetwork,
    is_activation,
)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        (LeNet5(image_size=32), 61_706),
        (LeNet5(image_size=28), 61_706),
        (LeNet5(image_size=28, padding=0, num_classes=1), 43_661),
        (LeNet5(image_size=32, padding=2), 61_706 + 120 * 16 * (6 * 6 - 5 * 5)),
        (MyrtleCNN(), 1_557_066),
        (MyrtleCNN(batch_norm=False), 1_556_106),
        (MyrtleCNN(512, constant_width=True), 7_100_938),
        (MyrtleCNN(512, batch_norm=False, constant_width=True), 7_098_890),
        (CIFARResNet(20), 269_722),
        (CIFARResNet(32), 464_154),
        (CIFARResNet(44), 658_586),
        (CIFARResNet(56), 853_018),
        (CIFARResNet18(), 11_173_962),
        (ResidualCNN(), 38_378),
        (MultiLayerPerceptron(), 784 * 512 + 512 + 2 * (512 * 512 + 512) + 5130),
        (MultiLayerPerceptron([2], image_size=1, num_classes=1, bias=False), 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_parameter_counts_are_the_published_ones(network: Network, parameters: int) -> None:
    assert count(network) == parameters


@pytest.mark.parametrize(
    ("network", "positions"),
    [
        (MyrtleCNN(width=2), [3, 6, 10, 14]),
        (MyrtleCNN(width=2, batch_norm=False), [2, 4, 7, 10]),
        (CIFARResNet(width=2), [3, 8, 11, 16, 19, 24, 27, 32, 35, 40, 43, 48, 51, 56, 59, 64, 67, 72, 75]),
        (CIFARResNet18(width=2), [3, 8, 11, 16, 19, 24, 27, 34, 37, 42, 45, 52, 55, 60, 63, 70, 73]),
    ],
    ids=["myrtle", "myrtle_no_bn", "resnet20", "resnet18"],
)
def test_activations_are_where_the_paper_counts_them(network: Network, positions: list[int]) -> None:
    found = [i for i, module in enumerate(network.modules()) if is_activation(module)]
    assert found == positions
    names = [name for name, _ in network.named_modules()]
    assert network.sites() == [names[i] for i in positions]


def test_site_names() -> None:
    assert LeNet5().sites() == [f"activation{i}" for i in range(1, 5)]
    assert CIFARResNet(width=2).sites()[:3] == ["activation", "blocks.0.activation1", "blocks.0.activation2"]


@pytest.mark.parametrize("size", [8, 9, 28, 32, 45, (8, 33)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (MyrtleCNN, {"width": 2}),
        (MyrtleCNN, {"width": 2, "batch_norm": False}),
        (CIFARResNet, {"width": 2}),
        (CIFARResNet, {"width": 3, "shortcut": "B"}),
        (CIFARResNet18, {"width": 1}),
        (MultiLayerPerceptron, {"widths": [3]}),
    ],
)
def test_shapes_for_many_image_sizes(
    cls: Any, arguments: dict[str, Any], channels: int, size: int | tuple[int, int]
) -> None:
    network = cls(in_channels=channels, image_size=size, num_classes=7, **arguments)
    height, width = (size, size) if isinstance(size, int) else size
    with torch.no_grad():
        assert network(torch.zeros(2, channels, height, width)).shape == (2, 7)


def test_myrtle_feature_sizes_are_the_published_ones() -> None:
    network = MyrtleCNN()
    x = torch.zeros(1, 3, 32, 32)
    shapes = [tuple(network.split(site)[0](x).shape[1:]) for site in network.sites()]
    assert shapes == [(64, 32, 32), (128, 32, 32), (256, 16, 16), (512, 8, 8)]
    assert network.final_pool.kernel_size == (4, 4)
    assert MyrtleCNN(width=1, image_size=28).final_pool.kernel_size == (3, 3)


def test_option_a_keeps_even_pixels_between_zero_channels() -> None:
    shortcut = CIFARResNet(width=4).blocks[3].shortcut
    x = torch.randn(2, 4, 5, 6)
    y = shortcut(x)
    assert y.shape == (2, 8, 3, 3)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any()
    assert not y[:, 6:].any()


def test_resnet20_weights_are_kaiming_normal() -> None:
    weight = CIFARResNet().fresh(0).blocks[8].conv2.weight
    # 36,864 draws: their standard deviation is known to 0.4 %; uniform weights would have kurtosis 1.8.
    scaled = weight.double() / (2 / (64 * 9)) ** 0.5
    assert abs(scaled.std().item() - 1) < 0.02
    assert abs(scaled.pow(4).mean().item() - 3) < 0.3


@pytest.mark.parametrize("activation", ["relu", "leaky_relu(0.1)", "tanh", "gaussian", "polynomial(2)"])
def test_the_activation_is_used_everywhere_and_never_shared(activation: str) -> None:
    for network in (
        LeNet5(activation=activation),
        MyrtleCNN(width=1, activation=activation),
        CIFARResNet(width=1, activation=activation),
        CIFARResNet18(width=1, activation=activation),
        MultiLayerPerceptron([2, 2], image_size=2, activation=activation),
    ):
        kinds = {type(network.get_submodule(site)) for site in network.sites()}
        assert len(kinds) == 1
        assert (nn.ReLU in kinds) == (activation == "relu")


@given(
    widths=st.lists(st.integers(1, 6), max_size=4),
    classes=st.integers(1, 4),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_perceptrons_of_any_widths(widths: list[int], classes: int, size: tuple[int, int]) -> None:
    network = MultiLayerPerceptron(widths, image_size=size, num_classes=classes).double()
    sizes = [size[0] * size[1], *widths, classes]
    assert count(network) == sum((a + 1) * b for a, b in pairwise(sizes))
    assert len(network.sites()) == len(widths)
    x = torch.randn(3, 1, *size, dtype=torch.float64)
    assert network(x).shape == (3, classes)
    for site in network.sites():
        lower, upper = network.split(site)
        assert torch.equal(upper(lower(x)), network(x))


@pytest.mark.parametrize("case", OURS)
def test_members_run_stacked_under_vmap_as_they_do_alone(case: str) -> None:
    make, shape = OURS[case]
    network = make()
    torch.manual_seed(0)
    members = [network.fresh(seed).double().eval() for seed in range(2)]
    parameters, buffers = stack_module_state(members)  # type: ignore[arg-type]
    x = torch.randn(2, 3, *shape, dtype=torch.float64)

    def run(p: Any, b: Any, images: torch.Tensor) -> Any:
        return functional_call(network.eval(), (p, b), (images,))

    stacked = vmap(run)(parameters, buffers, x)
    alone = torch.stack([member(images) for member, images in zip(members, x, strict=True)])
    torch.testing.assert_close(stacked, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(LeNet5, **bad) for bad in ({"image_size": 30}, {"image_size": (28, 32)})),
        refused(LeNet5, padding=1, says="padding must be 0 or 2"),
        *(refused(MyrtleCNN, **bad) for bad in ({"image_size": 7}, {"image_size": (32, 4)}, {"image_size": "32"})),
        *(refused(MyrtleCNN, **bad) for bad in ({"width": 0}, {"width": 1.5}, {"in_channels": 0})),
        *(refused(MyrtleCNN, **bad) for bad in ({"num_classes": True}, {"image_size": (32, 32, 3)})),
        *(refused(kind, activation="rel") for kind in (MyrtleCNN, functools.partial(MultiLayerPerceptron, []))),
        *(refused(CIFARResNet, **bad) for bad in ({"depth": 18}, {"shortcut": "C"}, {"image_size": 0})),
        refused(CIFARResNet18, width=-1),
        refused(MultiLayerPerceptron, widths=[8, 0], says="widths[1] must be an integer >= 1, got 0"),
        *(refused(MultiLayerPerceptron, widths=bad, says="widths must be a list of integers") for bad in (8, "88")),
        refused(TorchvisionNetwork, "resnet81", says=["network 'resnet81'", "Did you mean 'resnet"]),
        refused(TorchvisionNetwork, "alexnet", image_size=16, says="alexnet cannot take images of shape"),
        refused(TorchvisionNetwork, "resnet18", num_classes=0),
    ],
)
def test_bad_arguments_fail_in_the_constructor(refusal: Callable[[], None]) -> None:
    refusal()


def test_torchvision_networks_take_other_channels_and_sizes() -> None:
    network = TorchvisionNetwork("squeezenet1_1", in_channels=1, image_size=32, num_classes=4).eval()
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
    assert network.architecture == {
        "class_path": "lightning_sym.networks.TorchvisionNetwork",
        "init_args": {"model": "squeezenet1_1", "in_channels": 1, "image_size": 32, "num_classes": 4},
    }
    assert network.training is False
    assert not any(getattr(module, "inplace", False) for module in network.modules())
