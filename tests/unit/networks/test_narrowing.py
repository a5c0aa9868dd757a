"""Networks of which some positions are left: sizes, the record in the architecture, and what is refused."""

import functools
import json

import pytest
import torch
from fits import digits
from helpers import refused, write_zoo
from torch import nn

from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network, build, narrowed
from lightning_sym.zoo import ModelZoo

HIDDEN = {("linear1.weight", 0): [4, 0, 2], ("linear1.bias", 0): [4, 0, 2], ("classifier.weight", 1): [4, 0, 2]}
CHANNELS = {("conv1.weight", 0): [1], ("conv2.weight", 1): [1]} | {
    (f"norm1.{name}", 0): [1] for name in ("weight", "bias", "running_mean", "running_var")
}


def perceptron() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=[6], image_size=4).fresh(3)


def wrapped() -> Network:
    return Network.wrap(functools.partial(MultiLayerPerceptronModule, 6))


class MultiLayerPerceptronModule(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))


CASES = {
    "perceptron": (perceptron, HIDDEN),
    "batch norm": (lambda: MyrtleCNN(2, in_channels=1, image_size=8).fresh(3), CHANNELS),
    "wrapped": (wrapped, {("module.1.weight", 0): [5], ("module.1.bias", 0): [5], ("module.3.weight", 1): [5]}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_narrowed_network_is_built_again_from_its_architecture(case):
    make, kept = case
    whole = make()
    small = narrowed(whole, kept)
    images = torch.rand(5, 1, *((8, 8) if isinstance(whole, MyrtleCNN) else (4, 4)))
    again = build(json.loads(json.dumps(small.architecture)), allow=[__name__])
    again.load_state_dict(small.state_dict())
    assert again.architecture == small.architecture
    assert torch.equal(again.eval()(images), small.eval()(images))
    assert str(again) == str(small)
    assert again.sites() == whole.sites()
    assert "kept" not in whole.architecture


def test_modules_know_their_new_sizes():
    small = narrowed(perceptron(), HIDDEN)
    assert (small.linear1.out_features, small.classifier.in_features) == (3, 3)
    cnn = narrowed(MyrtleCNN(2, in_channels=1, image_size=8), CHANNELS)
    assert (cnn.conv1.out_channels, cnn.norm1.num_features, cnn.conv2.in_channels) == (1, 1, 1)
    depthwise = narrowed(nn.Conv2d(4, 4, 3, groups=4), {("weight", 0): [0, 3], ("bias", 0): [0, 3]})
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (2, 2, 2)


def test_what_is_kept_of_what_was_kept_is_kept_of_the_whole():
    """So that a network can be narrowed again, with positions of the network as it is."""
    twice = narrowed(narrowed(perceptron(), HIDDEN), {axis: [2, 0] for axis in HIDDEN})
    once = narrowed(perceptron(), {axis: [2, 4] for axis in HIDDEN})
    assert twice.architecture == once.architecture
    assert all(map(torch.equal, twice.parameters(), once.parameters()))


def test_a_fresh_one_has_the_initial_weights_of_the_whole_network():
    small = narrowed(perceptron(), HIDDEN).fresh(8)
    assert torch.equal(
        small.linear1.weight,
        MultiLayerPerceptron(widths=[6], image_size=4).fresh(8).linear1.weight[HIDDEN["linear1.bias", 0]],
    )
    assert small.architecture == narrowed(perceptron(), HIDDEN).architecture


def test_a_zoo_holds_narrowed_networks(tmp_path):
    networks = [narrowed(perceptron().fresh(n), HIDDEN) for n in range(2)]
    zoo = ModelZoo.open(write_zoo(tmp_path, networks, digits()))
    for number, network in enumerate(networks):
        assert all(map(torch.equal, zoo.load(number).parameters(), network.parameters()))


def entry(kept: object) -> dict[str, object]:
    return {**perceptron().architecture, "kept": kept}


@pytest.mark.parametrize(
    "refusal",
    [
        refused(narrowed, perceptron(), {("linear9.weight", 0): [0]}, says="no axis 0 of a tensor 'linear9.weight'"),
        refused(narrowed, perceptron(), {("linear1.bias", 1): [0]}, says="no axis 1 of a tensor 'linear1.bias'"),
        *(
            refused(narrowed, perceptron(), {("linear1.bias", 0): places}, says="different numbers from 0 to 5")
            for places in ([], [0, 0], [6], [-1])
        ),
        *(
            refused(build, entry(kept), says=says)
            for kept, says in [
                ({"linear1": [0]}, "need axes and positions"),
                ([{"axes": "linear1.bias[0]", "positions": [0]}], "need axes and positions"),
                ([{"axes": ["linear1.bias[0]"], "positions": ["0"]}], "need axes and positions"),
                ([{"axes": ["linear1.bias"], "positions": [0]}], "'linear1.bias', which is no axis"),
                ([{"axes": ["linear1.bias[0]"], "positions": [7]}], "different numbers from 0 to 5"),
            ]
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(refusal):
    refusal()
