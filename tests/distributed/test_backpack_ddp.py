"""Two processes have the factors of one, with engine backpack."""

import pytest
import torch

pytestmark = pytest.mark.ddp


def test_two_processes_are_one(run_scenarios, tmp_path):
    run_scenarios("backpack_scenarios.py", tmp_path)
    one, first, second = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1 rank 0", "2 rank 0", "2 rank 1")
    )
    assert one["samples"] == first["samples"] == 49
    for name, value in first.items():
        assert torch.equal(second[name], value), name
        if name != "drawn":
            torch.testing.assert_close(value, one[name], rtol=1e-12, atol=1e-12)
