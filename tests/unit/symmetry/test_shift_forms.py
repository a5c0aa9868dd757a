"""What free shifts make of others is found along chains of definitions, or in dense columns."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.affine import forms
from lightning_sym.symmetry.tracing.affine.weights import Weights


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
