"""Loop, vmap and plain autograd are the same computation."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_sym.networks import CIFARResNet, MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.population import LoopPopulation, Population, VmapPopulation, carry_gradients
from lightning_sym.tasks.losses import CrossEntropy

MEMBERS = (0, 3, 4)
SHAPE = (2, 8, 8)
SMOOTHING = 0.1
# Losses and gradients of order 1, sums of a few hundred terms; single precision has an epsilon of 1.2e-7.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

NETWORKS = {
    "perceptron": lambda: MultiLayerPerceptron(widths=(6,), in_channels=2, image_size=8, num_classes=4),
    "myrtle": lambda: MyrtleCNN(width=2, in_channels=2, image_size=8, num_classes=4),
    "myrtle without norm": lambda: MyrtleCNN(width=2, batch_norm=False, in_channels=2, image_size=8, num_classes=4),
    "resnet": lambda: CIFARResNet(depth=20, width=2, in_channels=2, image_size=8, num_classes=4),
}


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    old = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(old)


@pytest.fixture(params=NETWORKS)
def network(request, dtype):
    return NETWORKS[request.param]()


def batches(count: int, dtype: torch.dtype, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(len(MEMBERS), size, *SHAPE, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(4, (len(MEMBERS), size), generator=generator),
        )
        for _ in range(count)
    ]


def train(population: Population, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    # SGD, as Adam's first steps are the signs of gradients, which rounding decides where they are 0.
    optimizer = torch.optim.SGD(population.trainable(), lr=0.05, momentum=0.9, weight_decay=0.01)
    losses = []
    for images, labels in data:
        step = population.step(images, labels, CrossEntropy(SMOOTHING))
        optimizer.zero_grad()
        carry_gradients(step.losses.mean(), step.gradients, population.trainable()).backward()
        optimizer.step()
        losses.append(step.losses)
    return losses


def train_alone(network: Network, number: int, row: int, data: list[tuple[Tensor, Tensor]]):
    member = network.fresh(number)
    optimizer = torch.optim.SGD(member.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    losses = []
    for images, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(member(images[row]), labels[row], label_smoothing=SMOOTHING)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return member, losses


def assert_members_agree(one: Population, other: Population, tolerance: dict[str, float]) -> None:
    for number in MEMBERS:
        a, b = one.member_state(number), other.member_state(number)
        torch.testing.assert_close(a, b, **tolerance)  # names, dtypes, and running statistics too


@pytest.mark.few(5)
def test_loop_is_bitwise_a_plain_loop(network, dtype):
    data = batches(3, dtype)
    population = LoopPopulation(network, MEMBERS)
    losses = train(population, data)
    for row, number in enumerate(MEMBERS):
        member, alone = train_alone(network, number, row, data)
        assert all(torch.equal(step[row], value) for step, value in zip(losses, alone, strict=True))
        state = population.member_state(number)
        assert all(torch.equal(state[name], value) for name, value in member.state_dict().items())


@pytest.mark.few(5)
def test_loop_and_vmap_agree(network, dtype):
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    data = batches(3, dtype)
    populations = [kind(network, MEMBERS) for kind in (LoopPopulation, VmapPopulation)]
    images, labels = data[0]
    loop, stacked = (copy.deepcopy(one).step(images, labels, CrossEntropy(SMOOTHING)) for one in populations)
    assert loop.losses.dtype == stacked.losses.dtype == dtype
    torch.testing.assert_close(loop.losses, stacked.losses, **tolerance)
    torch.testing.assert_close(loop.outputs, stacked.outputs, **tolerance)
    each = len(stacked.gradients)
    for index, gradient in enumerate(stacked.gradients):
        expected = torch.stack([loop.gradients[member * each + index] for member in range(len(MEMBERS))])
        torch.testing.assert_close(gradient, expected, **tolerance)

    losses = [train(population, data) for population in populations]
    torch.testing.assert_close(losses[0], losses[1], **tolerance)
    assert_members_agree(*populations, tolerance)
    # Of the same weights: evaluation would amplify what rounding made of them in training.
    populations[0].load_state_dict(populations[1].state_dict())
    evaluated = [population.eval()(images[0]) for population in populations]
    torch.testing.assert_close(evaluated[0], evaluated[1], **tolerance)
    start, trained = network.fresh(MEMBERS[0]).state_dict(), populations[0].member_state(MEMBERS[0])
    assert not any(torch.equal(value, start[name]) for name, value in trained.items())


def test_channels_last_agrees(dtype):
    network = NETWORKS["myrtle"]()
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    data = batches(3, dtype)
    plain, last = LoopPopulation(network, MEMBERS), LoopPopulation(network, MEMBERS, channels_last=True)
    kernels = [value for value in last.parameters() if value.dim() == 4]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    torch.testing.assert_close(train(plain, data), train(last, data), **tolerance)
    assert_members_agree(plain, last, tolerance)
