"""to_laplace refuses networks whose factors, written out for laplace-torch, would fill the memory."""

import warnings

import pytest
import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.curvature import factors, to_laplace
from lightning_sym.curvature import laplace as module
from lightning_sym.layers import FactoredFullyConnected, GroupConv, GroupLift

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a library that laplace-torch imports uses torch.jit.script
    from lightning_sym.curvature._laplace_torch import _matrices


def factored(channels: int, grid: int) -> nn.Sequential:
    return nn.Sequential(FactoredFullyConnected(channels, 2, grid, 1), nn.Flatten())


def depthwise(channels: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, channels, 3, groups=channels, bias=False)
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(channels, 2).requires_grad_(False))


def data(channels: int, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(2, channels, side, side), torch.arange(2))]


@pytest.mark.parametrize(
    ("network", "loader", "words"),
    [
        # 33 blocks of 1024 x 1024, and one matrix of 9 * 3700 parameters; float32
        (factored(33, 32), data(33, 32), r"matrices of 4\.3 GiB .* '0\.theta1' is 33792 x 33792"),
        (depthwise(3700), data(3700, 3), r"matrices of 4\.1 GiB .* '0\.weight' is 33300 x 33300"),
    ],
    ids=["factored", "depthwise"],
)
def test_too_large(network, loader, words):
    with pytest.raises(ValueError, match=words) as error:
        to_laplace(network, loader)
    assert "; use Evidence" in str(error.value)
    assert str(error.value).count(". ") == 0, "one sentence"


def test_the_limit_is_of_all_matrices_in_their_precision(monkeypatch):
    network = factored(3, 4)  # theta1: 2 and 48; theta2: 1 and 6; biases: 2 and 1
    size = 4 * (2**2 + 48**2 + 1 + 6**2 + 2**2 + 1)
    monkeypatch.setattr(module, "_MOST_BYTES", size)
    to_laplace(network, data(3, 4))
    x, y = data(3, 4)[0]
    assert_refused(lambda: to_laplace(network.double(), [(x.double(), y)]), says="GiB at most")
    monkeypatch.setattr(module, "_MOST_BYTES", size - 1)
    assert_refused(lambda: to_laplace(network.float(), data(3, 4)), says="GiB at most")


@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
def test_the_sides_are_those_of_the_matrices(ffc):
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(4, 2, 3, padding=1, groups=2), FactoredFullyConnected(2, 2, 4), GroupLift()),
        *(GroupConv(2, 2, "depthwise_separable"), nn.Flatten(), nn.Linear(128, 2)),
    )
    blocks = factors(network, data(4, 4), ffc=ffc).blocks
    assert len(blocks) == 14
    for block in blocks.values():
        assert block.dense_sides == [len(matrix) for matrix in _matrices(block)]
