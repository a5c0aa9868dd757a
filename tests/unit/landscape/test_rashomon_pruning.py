"""Pruning with a bound on the loss: never above it, dead units for nothing, the published figures reached."""

import copy
import math

import pytest
import torch
from helpers import randomize_statistics, refused
from torch import nn
from torch.nn import functional as F

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.landscape import Pruning, PruningSettings, rashomon_pruning, removable_units
from lightning_sym.landscape.pruning import check_below, mean_loss
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN


@pytest.fixture(scope="module")
def digits():
    """Return training and test images and labels, as tensors."""
    data = DigitsDataModule(val_fraction=0.0)
    data.prepare_data()
    data.setup("fit")
    splits = [data.split_tensors(name) for name in ("train", "test")]
    return [(data.normalize(split.images), split.labels) for split in splits]


@pytest.fixture(scope="module")
def trained(digits):
    """Return a network of 32 hidden units, trained by SGD for 60 epochs."""
    (images, labels), _ = digits
    network = MultiLayerPerceptron([32], image_size=8).fresh(0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        for batch in torch.randperm(len(images), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    return network.eval()


def error(network, split):
    return mean_loss(network, [split], F.cross_entropy)[1]


@pytest.mark.slow
# Published: 13, 12 and 12 units left, 97.2, 96.8 and 95.6 % of 500 test digits, in 7 to 8 s each.
@pytest.mark.parametrize(("epsilon", "units", "accuracy"), [(0.005, 13, 0.955), (0.05, 12, 0.93)])
def test_the_published_widths_are_reached(trained, digits, epsilon, units, accuracy):
    train, test = digits
    assert error(trained, test) < 0.04
    settings = PruningSettings(epsilon)
    result = rashomon_pruning(trained, *train, settings=settings, describe=lambda n: {"error": error(n, test)})
    whole = mean_loss(trained, [train], F.cross_entropy)[0]
    assert result.threshold == whole + epsilon
    assert all(step.loss <= result.threshold for step in result.history)
    assert mean_loss(result.network, [train], F.cross_entropy)[0] == result.history[-1].loss
    assert result.widths == {"linear1": result.network.linear1.out_features}
    assert result.widths["linear1"] <= units
    assert 1 - result.history[-1].numbers["error"] >= accuracy
    assert 32 - sum(len(step.units) for step in result.history) == result.widths["linear1"]
    assert len({unit for step in result.history for unit in step.units}) == 32 - result.widths["linear1"]


def test_units_that_nothing_reads_go_first_and_for_nothing(trained, digits):
    (images, labels), _ = digits
    network = copy.deepcopy(trained)
    with torch.no_grad():
        network.classifier.weight[:, [3, 20]] = 0.0
    settings = PruningSettings(1e-3, steps=1, fraction=0.0, tries=1, penalty_end=1.0)
    result = rashomon_pruning(network, images, labels, settings=settings)
    whole, first = result.history[:2]
    assert first.units == (("linear1", 3), ("linear1", 20))
    assert (first.walked, first.walks) == (False, 0)
    assert first.loss == pytest.approx(whole.loss, rel=1e-6)  # float32 sums of other lengths


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_networks_with_batch_norm_are_below_their_threshold_with_statistics_of_their_own(fraction):
    network = randomize_statistics(MyrtleCNN(3, in_channels=1, image_size=8).fresh(0))
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(40, 1, 8, 8, generator=generator), torch.arange(40) % 10
    settings = PruningSettings(0.05, steps=5, fraction=fraction, tries=1)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    result = rashomon_pruning(network, images, labels, settings=settings)
    assert mean_loss(result.network, [(images, labels)], F.cross_entropy)[0] <= result.threshold
    assert sum(result.widths.values()) < 45
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    again = rashomon_pruning(network, images, labels, settings=settings)
    assert (again.widths, again.history) == (result.widths, result.history)


def test_every_layer_keeps_a_unit():
    """Even where the loss does not care: targets that are constant."""
    network = MultiLayerPerceptron([4, 3], image_size=2)
    result = rashomon_pruning(
        network,
        torch.rand(8, 1, 2, 2),
        torch.zeros(8, dtype=torch.int64),
        settings=PruningSettings(10.0, steps=1, fraction=0.5),
    )
    assert result.widths == {"linear1": 1, "linear2": 1}


def test_a_network_above_its_threshold_is_an_error():
    check_below(0.5, 0.5)
    for loss in (0.51, math.nan):
        with pytest.raises(RuntimeError, match=r"above its threshold 0.5, although it was below"):
            check_below(loss, 0.5)


def test_learning_rates_fall_in_the_last_part_of_a_walk_and_penalties_are_complete_by_then():
    network = MultiLayerPerceptron([6], image_size=2).fresh(0)
    with torch.no_grad():
        network.classifier.weight.mul_(20.0)
    images = torch.rand(64, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    data = [(images, network(images).argmax(1))]  # so that every unit is needed
    units = removable_units(network, data[0][0])
    settings = PruningSettings(1e-9, steps=4, cooldown=0.5, penalty=0.01, penalty_end=1.0, fraction=0.0)
    pruning = Pruning(units, settings, evaluate=lambda n: mean_loss(n, data, F.cross_entropy)[0], batches=lambda: data)
    pruning.start(network)
    weight = network.classifier.weight
    rates, penalties = [], []
    while not pruning.due:
        rates.append(pruning.rate)
        weight.grad = torch.zeros_like(weight)
        pruning.add_gradients(network)
        penalties.append((weight.grad.norm() / (2 * weight[:, weight.grad.any(0)].norm())).item())
    assert rates == [1.0, 1.0, 1.0, 0.5]
    assert penalties == pytest.approx([0.01, 0.1, 1.0, 1.0])
    pruning.decide(network)
    assert not pruning.due
    assert pruning.rate == 1.0  # of the next walk


def nothing():
    return torch.rand(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(PruningSettings, **bad) for bad in ({"epsilon": 0.0}, {"epsilon": math.nan}, {"steps": 0})),
        *(refused(PruningSettings, **bad) for bad in ({"penalty": 0}, {"fraction": 1.0}, {"tries": 0})),
        refused(PruningSettings, penalty=2.0, penalty_end=1.0),
        refused(mean_loss, MultiLayerPerceptron([2]), [], F.cross_entropy, says="There are no samples"),
        refused(rashomon_pruning, MultiLayerPerceptron([2], image_size=2), *nothing(), learning_rate=-1.0),
        refused(
            rashomon_pruning,
            MultiLayerPerceptron([2], image_size=2),
            *(torch.rand(3, 1, 2, 2), torch.zeros(2, dtype=torch.int64)),
            says="loss cannot be computed for outputs of shape [3, 10] and targets of shape [2]",
        ),
        refused(
            rashomon_pruning,
            MultiLayerPerceptron([2], image_size=2),
            *nothing(),
            loss=lambda outputs, targets: outputs.sum() * math.nan,
            says="The loss of the network that is to be pruned is not finite",
        ),
    ],
)
def test_what_cannot_be_pruned_is_refused(refusal):
    refusal()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_half_precision_has_more_than_two_digits(dtype):
    network, inputs, labels = nn.Linear(3, 4).to(dtype), torch.randn(9, 3), torch.arange(9) % 4
    expected = F.cross_entropy(network(inputs.to(dtype)).double(), labels)
    assert mean_loss(network, [(inputs, labels)], F.cross_entropy)[0] == pytest.approx(expected.item(), rel=1e-6)
