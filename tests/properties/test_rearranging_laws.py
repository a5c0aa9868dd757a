"""Adding, reordering and multiplying piece by piece is doing so axis by axis."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sym.symmetry import rearranging, trace_symmetry
from lightning_sym.symmetry.group import action
from lightning_sym.symmetry.rearranging import Summand, rearranged
from lightning_sym.symmetry.tracing.affine import weights

LAW = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rearranging, "_AT_ONCE", 7)


@LAW
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    turned=st.booleans(),
)
def test_it_is_the_plain_formula(shape: list[int], dtype: torch.dtype, seed: int, turned: bool) -> None:
    generator, draws = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    tensor = tensor.mT.contiguous().mT if turned and tensor.ndim > 1 else tensor  # not contiguous
    sources = {axis: draws.permutation(size) for axis, size in enumerate(shape) if draws.random() < 0.5}
    scales = {axis: draws.standard_normal(size) for axis, size in enumerate(shape) if draws.random() < 0.5}
    added = []
    for _ in range(int(draws.integers(0, 3))):
        factors = [torch.randn([size if draws.random() < 0.5 else 1 for size in shape]).to(dtype) for _ in range(2)]
        added.append(Summand(*factors[: int(draws.integers(1, 3))]))
    before = tensor.clone()
    found = rearranged(tensor, sources, scales, added)

    expected = tensor.double()
    for values, times in added:
        expected = expected + values.double() * (1 if times is None else times.double())
    for axis, source in sources.items():
        expected = expected.index_select(axis, torch.from_numpy(source))
    for axis, scale in scales.items():
        expected = expected * torch.from_numpy(scale).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    assert torch.equal(tensor, before)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert found.is_contiguous()
    assert found.data_ptr() != tensor.data_ptr()
    error = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=error, atol=error * 10)


def test_large_weights_move_as_small_ones(monkeypatch):
    """Matrices act on the factors of summands, and contractions are summed in pieces, only where weights are large."""
    torch.manual_seed(0)
    network = nn.Module()
    network.norm, network.attention = nn.LayerNorm(12), nn.MultiheadAttention(12, 3, batch_first=True)
    network.matrix, network.bias = nn.Parameter(torch.randn(12, 20)), nn.Parameter(torch.randn(20))
    network.head = nn.Linear(20, 2)

    def forward(x):
        y = network.norm(x)
        x = x + network.attention(y, y, y, need_weights=False)[0]
        return network.head(torch.tanh(network.norm(x) @ network.matrix + network.bias))

    network.forward = forward
    network.double()
    symmetry = trace_symmetry(network, torch.randn(2, 3, 12).double(), check=False)
    element = symmetry.sample(torch.Generator().manual_seed(1))
    found = []
    for most in (2**30, 4):
        for module in (action, weights):
            monkeypatch.setattr(module, "_SMALL", most)
        found.append(dict(symmetry.act(element, network).named_parameters()))
    small, large = found
    assert not torch.equal(small["attention.in_proj_bias"], network.attention.in_proj_bias)
    for name, own in small.items():
        torch.testing.assert_close(large[name], own, rtol=1e-11, atol=1e-11)
