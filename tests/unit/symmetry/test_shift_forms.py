"""What free shifts make of others is found along chains of definitions, or in dense columns."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.affine import contractions, forms
from lightning_sym.symmetry.tracing.affine.space import Translations
from lightning_sym.symmetry.tracing.affine.weights import Weights

pytestmark = pytest.mark.measured


class Scaled(nn.Module):
    """A residual network whose summands have gains of their own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(5, 4), nn.Linear(4, 3), nn.LayerNorm(4)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(4) + 0.5) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for norm, layer, gain in zip(self.norms, self.layers, self.gains, strict=True):
            h = h + gain * layer(norm(h).relu())
        return self.last(self.norm(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("longest", [0, 1, forms._LONGEST])
def test_matrices_of_shifts_agree_with_what_single_shifts_make(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    torch.manual_seed(0)
    network = Scaled(3).double()
    symmetry = trace_symmetry(network, torch.randn(2, 5, dtype=torch.float64))
    space = symmetry.structure.shifts
    assert space.parts is not None
    own = space.parts.forms.at(Weights(space, symmetry.tensors(network)))
    count = space.parts.forms.constant.shape[1]
    monkeypatch.setattr(forms, "_LONGEST", longest)
    matrix = own.matrix(np.arange(count)).toarray()
    assert space.parts.forms.size > 0
    assert matrix.any()
    np.testing.assert_allclose(matrix, own(np.eye(count)), rtol=0, atol=1e-12)


class Tied(nn.Module):
    """A table of embeddings that reads the stream, too; the gain may be that of the embeddings."""

    def __init__(self, *, affine: bool, shared: bool = False) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(6, 8))
        self.first, self.last = (nn.LayerNorm(8, elementwise_affine=affine) for _ in range(2))
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.gain = nn.Parameter(1 + torch.rand(8)) if shared else None

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.table(index) if self.gain is None else self.table(index) * self.gain
        hidden = hidden + self.places[: index.shape[1]]
        hidden = self.last(hidden + self.narrow(torch.relu(self.wide(self.first(hidden)))))
        return (hidden if self.gain is None else hidden * self.gain) @ self.table.weight.T


@pytest.mark.parametrize("affine", [True, False])
def test_rows_of_large_tied_tables_are_found_as_those_of_small_ones(monkeypatch, affine):
    network, example = Tied(affine=affine).double(), torch.arange(10).reshape(2, 5)
    small = trace_symmetry(network, example)
    monkeypatch.setattr(contractions, "_MOST", 64)
    large = trace_symmetry(network, example)
    assert (large.dimension, large.notes) == (small.dimension, small.notes)
    assert small.dimension == small.nullity


def test_rows_that_move_one_by_one_are_refused_where_they_are_too_many(monkeypatch):
    network, example = Tied(affine=False, shared=True).double(), torch.arange(10).reshape(2, 5)
    small = trace_symmetry(network, example)
    monkeypatch.setattr(contractions, "_MOST", 64)
    large = trace_symmetry(network, example)
    assert large.dimension < small.dimension
    assert any("too many rows" in note for note in large.notes)


class Factors(nn.Module):
    """Scalar products of the rows of two tables, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(6, 3), nn.Embedding(5, 3)
        self.first, self.second = nn.Embedding(6, 1), nn.Embedding(5, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        i, j = pairs.unbind(1)
        return (self.one(i) * self.two(j)).sum(1, True) + self.first(i) + self.second(j)


def test_shifts_of_both_factors_exclude_each_other_where_they_do_not_add_up(monkeypatch):
    network, pairs = Factors().double(), torch.cartesian_prod(torch.arange(6), torch.arange(5))
    assert trace_symmetry(network, pairs).dimension == 16
    monkeypatch.setattr(Translations, "adds_up", False)
    assert trace_symmetry(network, pairs).dimension == 13
