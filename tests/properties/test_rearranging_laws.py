"""Adding, reordering and multiplying piece by piece is doing so axis by axis."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.symmetry import rearranging
from lightning_sym.symmetry.rearranging import Summand, rearranged

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
