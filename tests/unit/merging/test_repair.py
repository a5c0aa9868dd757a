"""REPAIR: units of a merged network get the statistics of its parents."""

import copy

import pytest
import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.merging.repair import repair

X = torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5)
    found = nn.Sequential(*layers, nn.ReLU(), nn.Linear(5, 3)).double().eval()
    with torch.no_grad():
        for own in found.parameters():
            own.mul_(1 + seed)
    return found


def units_of(own: nn.Module, name: str) -> torch.Tensor:
    seen = []
    handle = own.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        own(X)
    handle.remove()
    return seen[0].movedim(1, 0).flatten(1)


def mean_of(a: nn.Module, b: nn.Module) -> nn.Module:
    found = copy.deepcopy(a)
    with torch.no_grad():
        for own, one, two in zip(found.parameters(), a.parameters(), b.parameters(), strict=True):
            own.copy_((one + two) / 2)
    return found


def test_units_have_the_mean_and_the_deviation_of_the_parents() -> None:
    a, b = network(0), network(1)
    merged = mean_of(a, b)
    head = merged[7].weight.clone()
    assert repair(merged, [a, b], [[X]], lambda _: (0.25, 0.75)) == ["0", "3", "5"]
    for name in ("0", "3", "5"):
        ours, one, two = (units_of(own, name) for own in (merged, a, b))
        for statistic in (lambda units: units.mean(1), lambda units: units.std(1, correction=0)):
            expected = 0.25 * statistic(one) + 0.75 * statistic(two)
            torch.testing.assert_close(statistic(ours), expected, rtol=0, atol=1e-10)
    assert torch.equal(merged[7].weight, head)


def test_copies_of_one_network_stay_unchanged() -> None:
    a = network(0)
    merged = copy.deepcopy(a)
    repair(merged, [a, a], [[X[:32]], [X[32:]]], lambda _: (0.5, 0.5))
    for own, other in zip(merged.parameters(), a.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_constant_units_and_layers_without_a_bias_keep_what_cannot_change() -> None:
    a = nn.Sequential(nn.Flatten(), nn.Linear(36, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    merged = copy.deepcopy(a)
    with torch.no_grad():
        merged[1].weight.mul_(0.5)
        merged[1].weight[2] = 0
    repair(merged, [a], [[X]], lambda _: (1.0,))
    assert bool(merged[1].weight.isfinite().all())
    assert not merged[1].weight[2].any()
    ours, theirs = units_of(merged, "1").std(1), units_of(a, "1").std(1)
    torch.testing.assert_close(ours[[0, 1, 3]], theirs[[0, 1, 3]], rtol=1e-10, atol=0)


def test_layers_called_twice_or_tied_are_left_out() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own, self.tied = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 36)
            self.head = nn.Linear(36, 36)
            self.head.weight = self.tied.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.inner(torch.relu(self.inner(x.flatten(1)))))
            return self.head(torch.relu(self.tied(torch.relu(self.own(x)))))

    torch.manual_seed(0)
    a = Twice().double().eval()
    assert repair(copy.deepcopy(a), [a], [[X]], lambda _: (1.0,)) == ["own"]


@pytest.mark.parametrize(
    ("own", "batches", "says"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 2)).double(), [[X]], "hidden linear layers or convolutions"),
        (network(0), [], "there are no batches"),
    ],
)
def test_networks_and_data_that_do_not_fit_are_refused(own: nn.Module, batches: list, says: str) -> None:
    assert_refused(repair, own, [own], batches, lambda _: (1.0,), says=says)
