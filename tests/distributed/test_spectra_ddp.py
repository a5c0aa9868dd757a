"""Products, eigenpairs, traces and densities of three processes are those of one, with unequal shares."""

import pytest
import torch
from scenarios import load, outcome
from torch import nn
from torch.nn import functional as F

from lightning_sym.curvature import CurvatureOperator, spectral_density, top_eigenpairs, trace

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# How the batches are shared out, and the kind of product.
CASES = [("in turn", "hessian"), ("three on the second", "hessian"), ("three on the second", "gauss_newton")]
SAMPLES = 25  # not a multiple of 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 4, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def batches(x, y, size=7):
    return list(zip(x.split(size), y.split(size), strict=True)) if len(x) else []


def share(name, rank, world):
    """Return the batches of a rank: in turn, or all but three samples on the first and none on the last."""
    x, y = data()
    if name == "in turn":
        return batches(x[rank::world], y[rank::world])
    cuts = [0, SAMPLES] if world == 1 else [0, SAMPLES - 3, SAMPLES, SAMPLES]
    return batches(x[cuts[rank] : cuts[rank + 1]], y[cuts[rank] : cuts[rank + 1]])


def summary(operator):
    gradient, loss = operator.gradient_and_loss()
    pairs, density = top_eigenpairs(operator, 3, tolerance=1e-9), spectral_density(operator, 8, 2)
    found, sampled = trace(operator, 4), trace(operator, 20, method="per_sample")
    return {
        "product": operator @ torch.linspace(-1, 1, operator.size).double(),
        "matrix": operator.matrix(),
        "gradient": gradient,
        "numbers": torch.tensor([loss, found.value, found.standard_error, operator.samples]).double(),
        "eigenvalues": pairs.values,
        "nodes": density.nodes,
        "weights": density.weights,
        "samples": torch.tensor([sampled.value, sampled.standard_error], dtype=torch.float64),
    }


def work(rank, world, folder):
    results = {
        f"{name}, {kind}": summary(CurvatureOperator(network(), share(name, rank, world), F.cross_entropy, kind=kind))
        for name, kind in CASES
    }
    mine = share("in turn", rank, world)
    broken = network()
    if rank == world - 1:
        nn.init.constant_(broken[3].bias, float("nan"))
    results["nan on the last rank"] = outcome(CurvatureOperator, broken, mine, F.cross_entropy)
    results["no data"] = outcome(CurvatureOperator, network(), [], F.cross_entropy)
    shuffled = Shuffled(mine) if rank == world - 1 else mine
    results["shuffled on the last rank"] = outcome(
        lambda: top_eigenpairs(CurvatureOperator(network(), shuffled, F.cross_entropy))
    )
    return results


class Shuffled(list):
    """Batches in another order each time."""

    def __iter__(self):
        return iter([list(super(Shuffled, self).__iter__())[place] for place in torch.randperm(len(self))])


def scenarios(run):
    for world in (3, 1):
        run.processes(world, work)


@pytest.fixture(scope="module")
def results(runs):
    return {world: load(runs, world) for world in (1, 3)}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_several_processes_are_one(results, name, kind):
    scenario = f"{name}, {kind}"
    (one,), (first, *others) = results[1], results[3]
    for what, value in one[scenario].items():
        if what != "samples":
            torch.testing.assert_close(first[scenario][what], value, rtol=1e-9, atol=1e-10)
        for other in others:
            assert torch.equal(other[scenario][what], first[scenario][what]), what


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_trace_from_single_samples_is_as_far_off_as_it_says(results, name, kind, world):
    """Its draws are those of a process, so that not the estimate is the same, but what it is worth."""
    found = results[world][0][f"{name}, {kind}"]
    (estimate, error), exact = found["samples"].tolist(), float(found["matrix"].trace())
    assert 0 < error < 0.3 * abs(exact)
    assert abs(estimate - exact) < 4 * error


@pytest.mark.parametrize("world", [1, 3])
def test_errors_of_one_process_are_raised_on_all(results, world):
    for result in results[world]:
        assert "NonFiniteError" in result["nan on the last rank"]
        assert "no samples" in result["no data"]
        assert "shuffling" in result["shuffled on the last rank"]
