"""Merges of one architecture trace it once; networks that differ in anything but weights are traced again."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_sym.merging import traced
from lightning_sym.symmetry.trace import trace_symmetry
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.labelling.rules import register_rule

pytestmark = pytest.mark.measured

EXAMPLE = Call.of(torch.ones(2, 5))


class Small(nn.Module):
    """Two layers, with a slope, a mask and a gain in between."""

    def __init__(self, slope=0.1, masked=2, tied=False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.slope = slope
        self.register_buffer("mask", (torch.arange(6) >= masked).float(), persistent=False)
        if tied:
            self.second.bias = self.first.bias

    def forward(self, x):
        x = nn.functional.leaky_relu(self.first(x), self.slope) * self.mask
        return self.last(nn.functional.relu(self.second(x)))


class Linear(Small):
    """The same modules in another function."""

    def forward(self, x):
        return self.last(self.second(self.first(x) * self.mask))


@pytest.fixture
def traces(monkeypatch):
    """Count the traces, beginning without earlier ones."""
    calls = []

    def counted(*args, **keywords):
        calls.append(args[0])
        return trace_symmetry(*args, **keywords)

    monkeypatch.setattr(traced, "trace_symmetry", counted)
    traced.forget()
    return calls


def test_networks_of_one_architecture_are_traced_once(traces):
    one, two = Small(), Small()
    first = traced.linear_symmetry(one, EXAMPLE)
    first.notes = (*first.notes, "a note of this merge")
    again = traced.linear_symmetry(two, EXAMPLE)
    assert len(traces) == 1
    own = trace_symmetry(two, *EXAMPLE.positional, check=False, shifts=False)
    assert (again.fingerprint, str(again)) == (own.fingerprint, str(own))
    assert again.notes == own.notes
    assert all(torch.equal(x, y) for x, y in zip(again.examples[0].positional, EXAMPLE.positional, strict=True))


@pytest.mark.parametrize(
    ("network", "example"),
    [
        (Small(slope=0.2), EXAMPLE),
        (Small(masked=3), EXAMPLE),
        (Small(tied=True), EXAMPLE),
        (Small().double(), Call.of(torch.ones(2, 5, dtype=torch.float64))),
        (Linear(), EXAMPLE),
        (Small(), Call.of(torch.ones(3, 5))),
    ],
    ids=["attribute", "constant", "tied", "type", "code", "example"],
)
def test_any_other_difference_than_of_weights_is_traced_anew(network, example, traces):
    traced.linear_symmetry(Small(), EXAMPLE)
    found = traced.linear_symmetry(network, example)
    assert len(traces) == 2
    own = trace_symmetry(network, *example.positional, check=False, shifts=False)
    assert (found.fingerprint, found.notes) == (own.fingerprint, own.notes)


def test_a_changed_method_is_traced_anew(traces, monkeypatch):
    traced.linear_symmetry(Small(), EXAMPLE)
    monkeypatch.setattr(Small, "forward", Linear.forward)
    assert traced.linear_symmetry(Small(), EXAMPLE).dimension > 6
    assert len(traces) == 2


def test_weights_with_zero_gains_are_traced_anew(traces):
    def made(gain):
        layers = nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 3)
        network = nn.Sequential(*layers)
        with torch.no_grad():
            network[1].weight[0] = gain
        return network

    traced.linear_symmetry(made(1.0), EXAMPLE)
    traced.linear_symmetry(made(2.0), EXAMPLE)
    assert len(traces) == 1
    symmetry = traced.linear_symmetry(made(0.0), EXAMPLE)
    assert symmetry.factors.closed(symmetry.tensors(traces[-1]))
    assert len(traces) == 2
    traced.linear_symmetry(made(3.0), EXAMPLE)
    assert len(traces) == 2


def test_networks_with_rules_of_their_own_are_always_traced(traces, monkeypatch):
    class Norm(nn.LayerNorm):
        """A layer norm."""

    monkeypatch.setattr("lightning_sym.symmetry.tracing.labelling.rules._MODULE_RULES", {})

    @register_rule(Norm)
    def norm(trace, module, x):
        return trace.normalise(x, axes=[-1], mean=True, eps=module.eps)

    for _ in range(2):
        traced.linear_symmetry(Small(), EXAMPLE)
    assert len(traces) == 2


def test_weights_of_traced_networks_are_not_kept_and_old_traces_are_forgotten(traces):
    network = Small()
    weights = [weakref.ref(own) for own in network.parameters()]
    traced.linear_symmetry(network, EXAMPLE)
    traces.clear()
    del network
    gc.collect()
    assert not any(own() is not None for own in weights)
    for size in range(3, 8):
        traced.linear_symmetry(Small(), Call.of(torch.ones(size, 5)))
    traced.linear_symmetry(Small(), EXAMPLE)
    assert len(traces) == 6
