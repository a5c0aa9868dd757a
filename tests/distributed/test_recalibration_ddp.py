"""Statistics and barriers from two processes are those of one with all the batches."""

import pytest
import torch

pytestmark = pytest.mark.ddp

SHARINGS = ["even", "uneven", "all on one"]
# Rounding in double precision: sums in another order.
ROUNDING = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(scope="module")
def results(run_scenarios, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("recalibration")
    run_scenarios("recalibration_scenarios.py", folder)
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("one", "rank 0", "rank 1")]


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", ["one pass", "exact", "barrier"])
def test_two_processes_are_one(results, kind, sharing):
    one, *others = (result[f"{kind}, {sharing}"] for result in results)
    for other in others:
        assert other.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, **ROUNDING)
    for name, value in others[0].items():
        assert torch.equal(value, others[1][name]), "bitwise the same on both ranks"


def test_statistics_are_new_and_differ_between_the_ways(results):
    passes, exact = results[0]["one pass, uneven"], results[0]["exact, uneven"]
    for name in passes:
        if name.endswith("num_batches_tracked"):
            assert passes[name] == exact[name] == 5
        else:
            assert not torch.equal(passes[name], exact[name])
    assert results[0]["barrier, uneven"]["samples"] == 30
    assert results[0]["barrier, even"]["samples"] == 24


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong, False", r"built for images of shape \[N, 1, 8, 8\] and cannot take \[\d, 7, 8, 8\]"),
        ("wrong, True", r"built for images of shape \[N, 1, 8, 8\] and cannot take \[\d, 7, 8, 8\]"),
        ("wrong, barrier", r"built for images of shape \[N, 1, 8, 8\] and cannot take \[\d, 7, 8, 8\]"),
        ("infinite, False", "ValueError: The recalibrated statistics of the batch norm 'norm1' are not finite"),
        ("infinite, True", "ValueError: The recalibrated statistics of the batch norm 'norm1' are not finite"),
        ("infinite, barrier", "ValueError: At t = 0: The recalibrated statistics of the batch norm 'norm1'"),
        ("none, False", "ValueError: There are no batches"),
        ("none, True", "ValueError: There are no batches"),
        ("none, barrier", "ValueError: At t = 0: There are no batches"),
        ("wrapped", "ValueError: network is wrapped for DDP.*; pass network.module"),
        ("synchronised", r"needs as many batches on every rank, got \[1, 2\]; leave some out or use exact=True"),
    ],
)
def test_errors_of_one_rank_are_raised_on_both(results, name, message):
    for result in results[1:]:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(result[name])


def test_synchronised_batch_norms_need_no_equal_numbers_in_exact_mode(results):
    _, a, b = results
    for name, value in a["synchronised, exact"].items():
        assert torch.equal(value, b["synchronised, exact"][name])
        if name.endswith("num_batches_tracked"):
            assert value == 3


def test_the_ranks_are_still_in_step_after_the_errors(results):
    _, a, b = results
    assert a["afterwards"].keys() == b["afterwards"].keys()
    for name, value in a["afterwards"].items():
        assert torch.equal(value, b["afterwards"][name])
