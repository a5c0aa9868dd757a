"""Similarities from three processes are those of one with all the batches, whoever has which."""

import pytest
import torch
from scenarios import load, outcome

from lightning_sym.similarity import CKA, GroupProcrustes, OrthogonalProcrustes, SimilarityMatrix

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# Which of five batches each rank has, by the name of the sharing.
SHARES = {
    "even": [[0, 3], [1, 4], [2]],
    "first without": [[], [0, 1, 2], [3, 4]],
    "last without": [[4, 3, 2, 1, 0], [], []],
    "nothing": [[], [], []],
}
METRICS = {
    "relu": lambda: GroupProcrustes("relu"),
    "relu live centred": lambda: GroupProcrustes("relu", live=True, center=True),
    "tanh": lambda: GroupProcrustes("tanh"),
    "identity": lambda: GroupProcrustes("identity", center=True),
    "orthogonal": OrthogonalProcrustes,
    "linear": CKA,
    "linear channel biased": lambda: CKA(normalize="channel", estimator="biased"),
    "max": lambda: CKA("max"),
    "laplace": lambda: CKA("laplace"),
    "minibatch": lambda: CKA(estimator="minibatch"),
}
# Of these also matrices over layers: at least one for each kind of sums that are kept.
MATRICES = ("relu live centred", "orthogonal", "linear", "laplace", "minibatch")
ROUNDING = {"atol": 1e-12, "rtol": 1e-12}  # sums in another order


def batches():
    source = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(6, c, side, side, generator=source, dtype=torch.float64).relu()
            for c, side in ((3, 4), (4, 4), (5, 2))
        ]
        for _ in range(5)
    ]


def pair(make, numbers, *, later):
    metric = make()
    for x, y, _ in (batches()[number] for number in numbers):
        metric.update(x, y)
    values = {"value": metric.compute()}
    if (
        later
    ):  # goes on after a value was asked for; where a rank has nothing new, torchmetrics would not ask the others
        for x, y, _ in (batches()[number] for number in numbers):
            metric.update(x, 2 * y)
        values["later"] = metric.compute()
    return values


def matrix(make, numbers):
    metric = SimilarityMatrix(make(), ["a", "b", "c"], ["b", "c"])
    for number in numbers:
        layers = dict(zip("abc", batches()[number], strict=True))
        metric.update(layers, layers)
    return {"value": metric.compute()}


def work(rank, world, folder):
    results = {}
    for sharing, shares in SHARES.items():
        numbers = shares[rank] if world > 1 else [] if sharing == "nothing" else range(5)
        for name, make in METRICS.items():
            results[f"{name}, {sharing}"] = outcome(pair, make, numbers, later=sharing == "even")
            if name in MATRICES:
                results[f"matrix of {name}, {sharing}"] = outcome(matrix, make, numbers)
    return results


def scenarios(run):
    for world in (3, 1):
        run.processes(world, work)


@pytest.fixture(scope="module")
def results(runs):
    return {world: load(runs, world) for world in (1, 3)}


@pytest.mark.parametrize("sharing", SHARES)
@pytest.mark.parametrize("kind", [*METRICS, *(f"matrix of {name}" for name in MATRICES)])
def test_several_processes_are_one(results, kind, sharing):
    (one,) = (result[f"{kind}, {sharing}"] for result in results[1])
    ranks = [result[f"{kind}, {sharing}"] for result in results[3]]
    for rank in ranks:
        assert isinstance(rank, dict), rank
        for name, value in one.items():
            if sharing == "nothing":
                assert value.isnan().all()
                assert rank[name].isnan().all()
            else:
                assert value.isfinite().all()
                torch.testing.assert_close(rank[name], value, **ROUNDING)
                assert torch.equal(rank[name], ranks[0][name]), "bitwise the same on all ranks"
