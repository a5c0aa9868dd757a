"""The closed form of candidates of one input is the derivative that autograd takes."""

import pytest
import torch
from torch import Tensor

from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.population import VmapPopulation
from lightning_sym.tasks import EquivalenceTask
from lightning_sym.tasks._relu_lines import ReluLinePopulation
from lightning_sym.tasks.losses import SquaredDistance

MEMBERS = (0, 3, 4, 7)


@pytest.fixture(params=[1, 2, 5])
def populations(request) -> tuple[ReluLinePopulation, VmapPopulation]:
    network = MultiLayerPerceptron(widths=[request.param], image_size=1, num_classes=1, bias=False)
    one, other = (kind(network, MEMBERS).double().eval() for kind in (ReluLinePopulation, VmapPopulation))
    for own in (one, other):
        for parameter in own.parameters():
            parameter.data[1].zero_()  # a dead network, at the kink of the ReLU
    return one, other


def batch(count: int = 40) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, count, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:3] = 0.0
    return x.view(count, 1, 1, 1), y


def test_closed_form_is_autograd(populations) -> None:
    x, y = batch()
    closed, plain = (own.step(x, y, SquaredDistance(), shared=True) for own in populations)
    torch.testing.assert_close(closed.losses, plain.losses, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(closed.outputs, plain.outputs, rtol=1e-12, atol=1e-14)
    assert [list(one.shape) for one in closed.gradients] == [list(p.shape) for p in populations[0].trainable()]
    torch.testing.assert_close(closed.gradients, plain.gradients, rtol=1e-11, atol=1e-14)
    assert float(closed.gradients[0].abs().sum()) > 0


def test_other_steps_are_those_of_vmap(populations) -> None:
    x, y = batch()
    for given in (
        {"loss": lambda outputs, targets: (outputs - targets).abs().mean(), "shared": True},
        {"loss": SquaredDistance(), "shared": True, "skip": frozenset({3})},
        {"loss": SquaredDistance(), "shared": False},
    ):
        data = (x, y) if given["shared"] else (x.expand(4, *x.shape), y.expand(4, *y.shape))
        closed, plain = (own.step(*data, **given) for own in populations)
        assert torch.equal(closed.losses, plain.losses)
        assert all(torch.equal(a, b) for a, b in zip(closed.gradients, plain.gradients, strict=True))


def test_searches_use_it_where_it_holds() -> None:
    made = []
    for bias in (False, True):
        network = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=bias)
        task = EquivalenceTask(network, members=3, points=1)
        task.configure_model()
        made.append(type(task.population))
    assert made == [ReluLinePopulation, VmapPopulation]
