"""Buffers in state dicts: masks of -inf are constants that everything keeps, and shifted buffers have one form."""

import math

import pytest
import torch
from helpers import assert_refused
from torch import nn
from torch.nn import functional as F

from lightning_sym.connectivity import average, interpolate
from lightning_sym.merging import merge, merge_tensors
from lightning_sym.symmetry import canonicalize, orbit_distance, trace_symmetry, weight_matching


class Attention(nn.Module):
    """Two heads with a saved table that is added to their scores."""

    def __init__(self, table: torch.Tensor, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.k, self.v, self.o = nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(4, 9)
        self.register_buffer("table", table.clone())
        self.double()

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(((q @ k.mT + self.table).softmax(-1) @ v).transpose(1, 2).flatten(2))


pytestmark = pytest.mark.measured
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
DISTANCE = -(torch.arange(6)[:, None] - torch.arange(6)).abs() * torch.tensor([0.5, 0.25])[:, None, None]
X = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SYMMETRY = {"mask": trace_symmetry(Attention(CAUSAL), X, nullity=False)}
KEEP = {
    "element": lambda s, a, b: s.act(s.sample(), a),
    "form": lambda s, a, b: canonicalize(s, a).network,
    "match": lambda s, a, b: weight_matching(s, a, b).network,
    "merge": lambda s, a, b: merge(s, [a, b]).network,
    "middle": lambda s, a, b: interpolate(a, b, 0.5),
    "beyond": lambda s, a, b: interpolate(a, b, 1.5),
    "average": lambda s, a, b: average([a, b], [1.0, 0.0]),
}


@pytest.mark.parametrize("name", KEEP)
def test_a_mask_of_infinities_is_kept(name: str) -> None:
    made = KEEP[name](SYMMETRY["mask"], Attention(CAUSAL), Attention(CAUSAL, 1))
    assert torch.equal(made.table, CAUSAL)
    assert made(X).isfinite().all()


@pytest.mark.parametrize("method", ["linear", "ties", "della", "model_stock"])
def test_merge_methods_keep_a_mask_and_refuse_masks_that_differ(method: str) -> None:
    a, b, base = (Attention(CAUSAL, seed).state_dict() for seed in range(3))
    given = {} if method == "linear" else {"base": base}
    assert torch.equal(merge_tensors(method, [a, b], **given)["table"].double(), CAUSAL)
    b["table"] = CAUSAL.mT
    assert_refused(merge_tensors, method, [a, b], **given, says="table must be finite, or the same where")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_other_numbers_are_refused(value: float) -> None:
    a, b = Attention(CAUSAL).state_dict(), Attention(CAUSAL).state_dict()
    b["q.weight"][0, 0] = value
    assert_refused(merge_tensors, "linear", [a, b], says="q.weight of model 1 holds values that are not finite")


def test_a_shifted_buffer_has_one_form() -> None:
    network = Attention(DISTANCE)
    symmetry = trace_symmetry(network, X)
    assert symmetry.notes == ()
    assert symmetry.buffer_dimension == 12
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), network)
    assert not torch.allclose(moved.table, network.table)
    one, two = (canonicalize(symmetry, own) for own in (network, moved))
    assert one.notes == ()
    assert one.difference < 1e-12
    torch.testing.assert_close(two.network.state_dict(), one.network.state_dict(), rtol=1e-12, atol=1e-12)


class ScaledAdapter(nn.Module):
    """A layer with a low-rank part of two saved, frozen matrices and two trained vectors (VeRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(6, 5), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))
        self.register_buffer("a", torch.randn(3, 6))
        self.register_buffer("b", torch.randn(5, 3))

    def forward(self, x):
        return self.layer(x) + self.up * F.linear(self.down * F.linear(x, self.a), self.b)


def test_no_lower_bound_keeps_points_of_one_orbit_apart() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(ScaledAdapter(), nn.Tanh(), nn.Linear(5, 2)).double()
    symmetry = trace_symmetry(network, X[:, 0, :6])
    assert symmetry.nullity == symmetry.dimension
    found = orbit_distance(symmetry, network, symmetry.act(symmetry.sample(), network))
    assert found.lower == 0
    assert any("no lower bound is known" in note for note in found.notes)


CHOICES = {
    "fill": lambda edges: torch.zeros_like(edges).masked_fill(edges == 0, -math.inf),
    "where": lambda edges: torch.where(edges > 0, 0.0, -math.inf),
}


class Mean(nn.Module):
    """The mean over a node and its neighbours, by a softmax of a mask that edges give."""

    def __init__(self, choice: str) -> None:
        super().__init__()
        self.first, self.last, self.choice = nn.Linear(7, 4), nn.Linear(4, 3), choice

    def forward(self, x, source, target):
        edges = torch.eye(len(x), dtype=x.dtype).index_put((target, source), torch.ones_like(x[:, 0]))
        return self.last(CHOICES[self.choice](edges).softmax(1) @ torch.relu(self.first(x)))


@pytest.mark.parametrize("choice", CHOICES)
def test_masks_may_be_made_of_inputs(choice: str) -> None:
    source, target = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 3, 4, 0])
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    symmetry = trace_symmetry(Mean(choice).double(), (x, source, target))
    assert (symmetry.dimension, symmetry.nullity, symmetry.notes) == (4, 4, ())


class Caching(Attention):
    """Attention that makes its table when it runs, as large as the input is long."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.zeros(1, 1), seed)
        self.register_buffer("table", torch.zeros(1, 1, dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.table = torch.arange(x.shape[1], dtype=x.dtype).expand(x.shape[1], -1)
        return super().forward(x)


def test_a_network_may_replace_a_buffer_when_it_runs() -> None:
    a, b = Caching(), Caching(1)
    symmetry = trace_symmetry(a, X)
    b(X[:, :4])
    assert b.table.shape == (4, 4)
    match = weight_matching(symmetry, a, b)
    assert match.distance_after < match.distance_before
    torch.testing.assert_close(match.network(X), b(X), rtol=1e-10, atol=1e-10)
