"""Two processes evaluate the same grid as one, bit for bit, and go on from what either left."""

import pytest
import torch
from scenarios import load, outcome

from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.grids import Grid, evaluate_grid
from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.networks import LeNet5, MultiLayerPerceptron

pytestmark = pytest.mark.ddp

GRID = Grid(2, 9, 1.5)


def problem(name):
    torch.manual_seed(0)
    if name == "lenet":
        network, inputs = LeNet5(num_classes=1, padding=0), torch.randn(8, 1, 28, 28)
    else:
        network, inputs = MultiLayerPerceptron([6, 5], image_size=3, num_classes=2), torch.randn(200, 9)
    surface = LossSurface(network, inputs, network(inputs), chunk=8, method="loop" if name == "loop" else "auto")
    return surface, WeightPlane.through(torch.randn(3, surface.size) / 5)


def counted(surface, plane, **settings):
    """Evaluate the grid; also return how many points this process has evaluated."""
    points = [0]
    values = evaluate_grid(surface, plane, GRID, progress=lambda done, total: points.append(done), **settings)
    return {"values": values, "points": points[-1]}


def work(rank, world, folder):
    results = {}
    for name in ("mlp", "loop", "lenet"):
        surface, plane = problem(name)
        found = counted(surface, plane)
        below = evaluate_grid(surface, plane, GRID, below=float(found["values"].median()))
        results[name] = {**found, "below": below, "method": surface.method}
    surface, plane = problem("mlp")
    if world == 1:
        return {**results, "resumed": counted(surface, plane, partial=folder / "one.npz")}
    # The second rank stops; what both have is kept.
    for name in ("two", "one"):
        calls = []

        def stop(done, total, calls=calls):
            calls.append(done)
            if len(calls) == 2 and rank == 1:
                raise RuntimeError("stopped on one rank")

        partial = folder / f"{name}.npz"
        results[f"error {name}"] = outcome(evaluate_grid, surface, plane, GRID, partial=partial, progress=stop)
    results["resumed"] = counted(surface, plane, partial=folder / "two.npz")
    results["limit"] = outcome(evaluate_grid, surface, plane, Grid(2, 9, 1.5 + rank), limit_seconds=1e-9)
    return results


def scenarios(run):
    run.processes(2, work)
    run.processes(1, work)


@pytest.fixture(scope="module")
def found(runs):
    return lambda name, processes=2: [results[name] for results in load(runs, processes)]


@pytest.mark.parametrize("name", ["mlp", "loop", "lenet"])
def test_two_processes_find_the_same_bits_as_one(found, name):
    (alone,) = found(name, 1)
    for one in found(name):
        assert torch.equal(one["values"], alone["values"])
        assert torch.equal(one["below"], alone["below"])
        assert one["method"] == alone["method"]
    assert alone["points"] == 81
    assert [one["points"] for one in found(name)] == [41, 40]


def test_an_error_in_a_grid_on_one_process_is_one_of_both(found):
    assert found("error two") == ["RuntimeError: stopped on one rank"] * 2


def test_work_goes_on_with_as_many_processes_or_fewer(found, runs):
    (alone,) = found("mlp", 1)
    # The first rank had its 41 points, the second two blocks of eight.
    for processes, left in ((2, [16, 8]), (1, [24])):
        resumed = found("resumed", processes)
        assert all(torch.equal(one["values"], alone["values"]) for one in resumed)
        assert [one["points"] for one in resumed] == left
    assert not list(runs.glob("*.npz*"))


def test_a_limit_is_an_error_on_all(found):
    first, second = found("limit")
    assert "above limit_seconds" in first
    assert "above limit_seconds" in second
