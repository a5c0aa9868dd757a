"""``upper(lower(x)) == network(x)`` to the last bit, for every site of every architecture."""

import copy
import functools

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_sym.networks import (
    CIFARResNet,
    CIFARResNet18,
    LeNet5,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    TorchvisionNetwork,
)

torch.set_num_threads(1)

# Makers and image shapes; the widths and sizes are the smallest that reach every branch.
CASES = {
    "perceptron": (lambda: MultiLayerPerceptron([5, 4, 3], image_size=3), (1, 3, 3)),
    "lenet_28": (lambda: LeNet5(activation="tanh"), (1, 28, 28)),
    "lenet_32": (lambda: LeNet5(in_channels=3, image_size=32), (3, 32, 32)),
    "myrtle": (lambda: MyrtleCNN(width=2, image_size=12), (3, 12, 12)),
    "myrtle_no_bn": (lambda: MyrtleCNN(2, batch_norm=False, image_size=8, activation="sigmoid"), (3, 8, 8)),
    "myrtle_constant": (lambda: MyrtleCNN(3, constant_width=True, image_size=(9, 8)), (3, 9, 8)),
    "resnet20_a": (lambda: CIFARResNet(width=2, activation="leaky_relu(0.1)"), (3, 8, 8)),
    "resnet20_b": (lambda: CIFARResNet(width=2, shortcut="B"), (3, 8, 8)),
    "resnet32_identity": (lambda: CIFARResNet(32, width=1, activation="identity"), (3, 8, 8)),
    "resnet44": (lambda: CIFARResNet(44, width=1, activation="silu"), (3, 8, 8)),
    "resnet56": (lambda: CIFARResNet(56, width=1, activation="gaussian"), (3, 8, 8)),
    "cifar_resnet18": (lambda: CIFARResNet18(width=2), (3, 8, 8)),
    "tv_resnet18": (lambda: Network.wrap(functools.partial(torchvision.models.resnet18, num_classes=10)), (3, 32, 32)),
    "tv_mobilenet_v2": (lambda: TorchvisionNetwork("mobilenet_v2", image_size=32), (3, 32, 32)),
    "tv_squeezenet": (lambda: Network.wrap(torchvision.models.squeezenet1_1), (3, 32, 32)),
}


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_halves_are_the_network(case: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    network = make()
    x = torch.randn(2, *shape)
    start = copy.deepcopy(network.state_dict())

    def run(module: nn.Module) -> Tensor:
        network.load_state_dict(start)
        torch.manual_seed(1)  # dropout
        return module(x)

    expected = {training: run(network.train(training)) for training in (False, True)}
    end = copy.deepcopy(network.state_dict())
    sites = network.sites()
    assert len(sites) == len(set(sites)) > 0
    for site in sites:
        lower, upper = network.split(site)
        for training in (False, True):
            network.train(training)  # the halves have the same submodules
            values = run(lower)
            assert torch.equal(upper(values), expected[training]), site
            if not training:
                assert torch.equal(upper(values), expected[training]), site  # upper left the values alone
        assert identical(network.state_dict(), end), site  # batch norm's running statistics
        names = {name for half in (lower, upper) for name, _ in half.named_parameters()}
        assert names == {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_first_value_is_what_the_site_puts_out(case: str) -> None:
    make, shape = CASES[case]
    network = make().eval()
    x = torch.randn(2, *shape)
    seen: dict[str, Tensor] = {}

    def record(name: str, _: nn.Module, __: object, output: Tensor) -> None:
        key, call = name, 1
        while key in seen:
            call += 1
            key = f"{name}-{call}"
        seen[key] = output

    named = dict(network.named_modules())
    for site in network.sites():
        if site in named:
            named[site].register_forward_hook(functools.partial(record, site))
    network(x)
    recorded = dict(seen)
    assert list(recorded) == network.sites()  # in execution order
    for site in network.sites()[:: max(1, len(recorded) // 6)]:
        values = network.split(site)[0](x)
        assert torch.equal(values[0] if isinstance(values, tuple) else values, recorded[site]), site


def test_torchvision_resnet_has_one_site_per_call() -> None:
    network = CASES["tv_resnet18"][0]()
    sites = network.sites()
    assert len(sites) == 17
    assert sites[:3] == ["module.relu", "module.layer1.0.relu", "module.layer1.0.relu-2"]
    x = torch.randn(1, 3, 32, 32)
    network.eval()
    # Within a block the skip connection crosses the cut too; between blocks nothing else does.
    assert isinstance(network.split("module.layer1.0.relu")[0](x), tuple)
    assert isinstance(network.split("module.layer1.0.relu-2")[0](x), Tensor)


@pytest.mark.parametrize("case", ["myrtle", "resnet20_a", "tv_squeezenet"])
def test_gradients_through_the_halves_are_the_network_s(case: str) -> None:
    make, shape = CASES[case]
    network = make().eval()
    x = torch.randn(2, *shape)
    expected = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    lower, upper = network.split(network.sites()[-2])
    found = torch.autograd.grad(upper(lower(x)).square().sum(), list(network.parameters()))
    for a, b in zip(found, expected, strict=True):
        # Contributions to one tensor may be added in another order: float32 rounding.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
