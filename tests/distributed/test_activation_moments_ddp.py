"""Moments and matches from two processes are those of one with all the batches."""

import pytest
import torch

pytestmark = pytest.mark.ddp

SHARINGS = ["even", "uneven", "all on one"]
# Rounding in double precision: sums in another order.
ROUNDING = {"atol": 1e-11, "rtol": 1e-12}


@pytest.fixture(scope="module")
def results(run_scenarios, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("moments")
    run_scenarios("activation_moments_scenarios.py", folder)
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("one", "rank 0", "rank 1")]


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", ["moments", "match"])
def test_two_processes_are_one(results, kind, sharing):
    one, *others = (result[f"{kind}, {sharing}"] for result in results)
    for other in others:
        assert other.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, **ROUNDING)
    for name, value in others[0].items():
        assert torch.equal(value, others[1][name]), "bitwise the same on both ranks"


def test_an_error_of_one_rank_is_raised_on_both(results):
    for result in results[1:]:
        assert "was built for images of shape" in result["wrong"]
