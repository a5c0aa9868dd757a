"""Pruning never returns a network above its threshold, whatever the network is; units under a norm over units stay."""

import copy

import pytest
import torch
from helpers import randomize_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_sym.landscape import PruningSettings, rashomon_pruning, removable_units
from lightning_sym.landscape.pruning import mean_loss
from lightning_sym.networks import CIFARResNet, recalibrate_batch_norm

NORMS = {  # of channels and of units; whether single units can go under it
    "none": (lambda size: nn.Identity(), lambda size: nn.Identity(), True),
    "batch": (nn.BatchNorm2d, nn.BatchNorm1d, True),
    "group": (lambda size: nn.GroupNorm(1, size), lambda size: nn.GroupNorm(1, size), False),
    "layer": (lambda size: nn.GroupNorm(1, size), nn.LayerNorm, False),
}


def convolutional(channels: int, units: int, first: str, second: str) -> nn.Module:
    """Return a convolution and two linear layers, with a norm each behind the first two."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3), NORMS[first][0](channels), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * channels, units), NORMS[second][1](units), nn.ReLU(), nn.Linear(units, 4), nn.ReLU(),
        nn.Linear(4, 3),
    )  # fmt: skip


def residual(channels: int, units: int, first: str, second: str) -> nn.Module:
    return CIFARResNet(width=channels, in_channels=1, image_size=4, num_classes=3, shortcut="AB"[units % 2])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    make=st.sampled_from([convolutional, convolutional, residual]),
    sizes=st.tuples(st.integers(2, 4), st.integers(2, 5)),
    norms=st.tuples(st.sampled_from(list(NORMS)), st.sampled_from(list(NORMS))),
    epsilon=st.floats(1e-3, 2.0),
    fraction=st.sampled_from([0.0, 0.5]),
    cooldown=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
@pytest.mark.long
def test_no_network_comes_out_above_its_threshold(make, sizes, norms, epsilon, fraction, cooldown, seed):
    torch.manual_seed(seed)
    network = randomize_statistics(make(*sizes, *norms), seed)
    images, labels = torch.rand(12, 1, 4, 4), torch.randint(3, (12,))
    whole = copy.deepcopy(network)
    recalibrate_batch_norm(whole, [images])
    before = mean_loss(whole, [(images, labels)], F.cross_entropy)[0]
    choices = PruningSettings(epsilon, steps=2, fraction=fraction, tries=1, cooldown=cooldown)
    result = rashomon_pruning(network, images, labels, settings=choices, learning_rate=0.05)
    assert result.threshold == before + epsilon
    assert mean_loss(result.network, [(images, labels)], F.cross_entropy)[0] == result.loss <= result.threshold
    assert all(step.loss <= result.threshold for step in result.history)
    gone = [unit for step in result.history for unit in step.units]
    sizes_before = removable_units(network, images[:2]).sizes
    assert len(set(gone)) == len(gone) == sum(sizes_before.values()) - sum(result.widths.values())
    assert min(result.widths.values()) >= 1
    if make is convolutional:  # units that a norm over units ties together are all there
        free = {"0": NORMS[norms[0]][2], "4": NORMS[norms[1]][2], "7": True}
        assert set(result.widths) == {name for name, may_go in free.items() if may_go}
