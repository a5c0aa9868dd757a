"""BatchNormRecalibration gives two processes the statistics of one, and gives each its own back."""

import pytest
import torch

pytestmark = pytest.mark.ddp

# Sums over float32 activations in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def found(run_scenarios, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recalibration")
    run_scenarios("batch_norm_recalibration_scenarios.py", folder)

    def load(name: str, devices: int = 2) -> list[dict]:
        return [torch.load(folder / f"{name} {devices} {rank}.pt") for rank in range(devices)]

    return load


def equal(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["mean", "exact", "some exact"])
def test_two_processes_measure_what_one_measures(found, name):
    first, second = found(name)
    (alone,) = found(name, 1)
    assert equal(first["measured"], second["measured"])
    for key, value in first["measured"].items():
        if "exact" not in name or not key.endswith("tracked"):  # with exact the batches may be others
            torch.testing.assert_close(value, alone["measured"][key], **CLOSE)


@pytest.mark.parametrize("name", ["mean", "exact", "uneven", "fit"])
def test_each_process_gets_its_own_back(found, name):
    first, second = found(name)
    assert equal(first["before"], first["after"])
    assert equal(second["before"], second["after"])
    assert not equal(first["before"], second["before"])
    assert not equal(first["measured"], first["after"])
    assert equal(first["measured"], second["measured"])


def test_within_a_fit(found):
    first, second = found("fit")
    assert equal(first["weights"], second["weights"])
    assert equal(first["measured"], second["measured"])
    assert int(first["measured"]["1.num_batches_tracked"]) == 8
    first, second = found("fit kept")
    assert equal(first["after"], second["after"])
    assert equal(first["after"], first["measured"])


def test_batches_that_only_one_process_has(found):
    for one in found("uneven"):
        assert int(one["measured"]["1.num_batches_tracked"]) == 1


def test_an_error_of_one_process_is_one_of_both(found):
    for one in found("uneven"):
        assert "wrong on one rank" in one["error"]
        assert equal(one["before"], one["after error"])
