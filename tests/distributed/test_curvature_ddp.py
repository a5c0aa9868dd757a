"""Factors, evidence and precisions of two and three processes are those of one, and bitwise the same on all ranks."""

import pytest
import torch

pytestmark = pytest.mark.ddp

RANKS = {1: ["1 rank 0"], 2: ["2 rank 0", "2 rank 1"], 3: ["3 rank 0", "3 rank 1", "3 rank 2"]}
SCENARIOS = [
    f"{likelihood}, torch.{dtype}"
    for likelihood in ("classification", "regression")
    for dtype in ("float32", "float64")
]
RESULTS = ["loss", "evidence", "log_precisions", "log_noise", "effective", "relative"]


@pytest.fixture(scope="module")
def results(run_scenarios, tmp_path_factory) -> dict[int, list[dict]]:
    folder = tmp_path_factory.mktemp("curvature")
    run_scenarios("curvature_scenarios.py", folder)
    return {
        world: [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]
        for world, names in RANKS.items()
    }


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_several_processes_are_one(results, scenario, world):
    (one,), others = (results[w] for w in (1, world))
    single = scenario.endswith("32")
    for other in others:
        assert other[scenario].keys() == one[scenario].keys()
        assert other[scenario]["samples"] == one[scenario]["samples"] == 50
        for name in RESULTS:
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if single else {"rtol": 1e-10, "atol": 1e-10}
            torch.testing.assert_close(other[scenario][name], one[scenario][name], **tolerance)
        for name, value in one[scenario].items():
            if name.endswith((" A", " B")):
                tolerance = 1e-6 if single else 1e-13
                assert (other[scenario][name] - value).norm() < tolerance * value.norm(), name


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", [*SCENARIOS, "one rank has all"])
def test_ranks_agree_to_the_last_bit(results, scenario, world):
    first, *others = (result[scenario] for result in results[world])
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_may_have_no_data(results, world):
    for result in results[world]:
        for name, value in results[1][0]["one rank has all"].items():
            torch.testing.assert_close(result["one rank has all"][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("no data", "EmptyLoaderError: The loader gave no sample"),
        ("wrong labels of rank 0", "ValueError: Labels must be in 0 to 2"),
        ("nan on the last rank", "NonFiniteError: '3.bias' of the network"),
        ("mixed samples of the last rank, autograd", "ValueError: The input of module '1.0.fc'"),
        ("mixed samples of the last rank, backpack", "ValueError: The input of module '1.0.fc'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(results, scenario, words):
    for world, found in results.items():
        for result in found:
            assert result[scenario].startswith(words), (world, result[scenario])


def test_monte_carlo_is_near_the_exact_factors_of_all_ranks(results):
    for world in (2, 3):
        for name, error in results[world][0]["monte carlo"].items():
            assert 0 < error < 0.3, name
