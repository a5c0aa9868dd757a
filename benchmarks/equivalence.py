"""Cost of J at many weight vectors, and of a search of many candidates at once, compared with plain references.

Variants take turns, so that drifts in the machine's speed affect all. On the CPU seconds are processor time of one
thread. Run it alone on the machine::

    python benchmarks/equivalence.py                  # everything, about ten minutes on a CPU core
    python benchmarks/equivalence.py --only point grid
    python benchmarks/equivalence.py --device cuda

Prints tables and writes them to ``benchmarks/results/equivalence-<device>.json`` and ``.md``.

Plain references:
    point   a hand-written loop: copies the weights into the network and runs it on all 500 inputs at once
    grid    the same loop over some points of a whole grid
    search  candidates one after another, each in a hand-written loop of the same steps; "by autograd" is ours without
            the closed form of two-unit networks
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from _timing import Results, Runs, parser, result, run, timed
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from lightning_sym.landscape import Grid, LossSurface, WeightPlane, betti_numbers, evaluate_grid, weight_vector
from lightning_sym.networks import LeNet5, MultiLayerPerceptron, Network
from lightning_sym.population import Population, VmapPopulation
from lightning_sym.tasks import EquivalenceTask
from lightning_sym.tasks.losses import SquaredDistance

INPUTS = 500
CANDIDATES = 64


def clock(device: str) -> Callable[[], float]:
    """Return the clock: processor time on the CPU, wall time on a GPU."""
    return time.process_time if device == "cpu" else time.perf_counter


def two_unit() -> Network:
    """Return the network of four parameters."""
    return MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)


NETWORKS: dict[str, tuple[Callable[[], Network], tuple[int, ...], int, tuple[str, ...]]] = {
    "two-unit net": (two_unit, (1, 1, 1), 20_000, ("closed_form", "affine", "vmap", "loop")),
    "digits MLP 64-32-10": (
        lambda: MultiLayerPerceptron(widths=[32], image_size=8),
        (1, 8, 8),
        4000,
        ("affine", "vmap", "loop"),
    ),
    "LeNet, 43,661 parameters": (
        lambda: LeNet5(num_classes=1, padding=0),
        (1, 28, 28),
        32,
        ("affine", "loop"),
    ),
}


class Case:
    """A network, inputs, and a plane through random weights."""

    def __init__(self, name: str, device: str, dimension: int = 2) -> None:
        make, shape, self.points, self.methods = NETWORKS[name]
        torch.manual_seed(0)
        self.network = make().to(device)
        self.inputs = torch.randn(INPUTS, *shape, device=device)
        with torch.no_grad():
            self.targets = self.network(self.inputs)
        vectors = torch.stack([weight_vector(make()) for _ in range(dimension + 1)])
        self.plane = WeightPlane.through(vectors.to(device))

    def coefficients(self, count: int) -> Tensor:
        """Return random coefficients."""
        return 2 * torch.rand(count, self.plane.dimension, dtype=torch.float64) - 1

    def plain(self, coefficients: Tensor) -> None:
        """Evaluate J point by point, as in hand-written code."""
        parameters = list(self.network.parameters())
        with torch.no_grad():
            for row in coefficients:
                weights = self.plane.centre + self.plane.basis @ row
                vector_to_parameters(weights.to(self.inputs), parameters)
                (self.network(self.inputs) - self.targets).square().sum(1).mean().item()


def measure_point(rounds: int, device: str) -> Results:
    """Time one grid point."""
    results = []
    for name in NETWORKS:
        case = Case(name, device)
        few = max(8, case.points // 100)  # points for the plain loop and other slow variants
        variants: Runs = {"plain": partial(case.plain, case.coefficients(few))}
        counts = {"plain": few}
        for method in case.methods:
            surface = LossSurface(case.network, case.inputs, case.targets, method=method)  # type: ignore[arg-type]
            counts[method] = few if method == "loop" else case.points
            variants[method] = partial(surface.on, case.plane, case.coefficients(counts[method]))
        rows = timed(variants, rounds, {method: count / few for method, count in counts.items()}, clock=clock(device))
        plain = rows[0]["seconds_median"] / few
        for row in rows:
            row["microseconds_per_point"] = 1e6 * row["seconds_median"] / counts[row["variant"]]
        note = f"Microseconds for a point: {_listed(rows)}. Plain: {1e6 * plain:.0f}. Ratios are for a point."
        results.append(result(f"J at a point of a plane, {name}, {INPUTS} inputs", rows, note=note))
    return results


def _listed(rows: list[dict[str, float]]) -> str:
    return ", ".join(f"{row['variant']} {row['microseconds_per_point']:.3g}" for row in rows)


def measure_grid(rounds: int, device: str) -> Results:
    """Time whole grids of the two-unit net, with the numbers of the set."""
    results = []
    for dimension, points in ((2, 100), (3, 50)):
        case, grid = Case("two-unit net", device, dimension), Grid(dimension, points, 2.0)
        sample = grid.coefficients(0, 200)

        def whole(method: str, case: Case = case, grid: Grid = grid) -> None:
            surface = LossSurface(case.network, case.inputs, case.targets, method=method)  # type: ignore[arg-type]
            betti_numbers(evaluate_grid(surface, case.plane, grid).numpy() < 0.01)

        variants: Runs = {method: partial(whole, method) for method in ("closed_form", "affine")}
        work = dict.fromkeys(variants, grid.size / len(sample))
        rows = timed({"plain": partial(case.plain, sample), **variants}, rounds, work, clock=clock(device))
        note = f"Plain: {len(sample)} of the {grid.size} points; ratios are for all of them. Ours with Betti numbers."
        results.append(result(f"A {' x '.join([str(points)] * dimension)} grid of the two-unit net", rows, note=note))
    return results


def measure_search(rounds: int, device: str) -> Results:
    """Time training candidates together against one after another."""
    results = []
    for name, make, shape, steps in (
        ("two-unit net", two_unit, (1, 1, 1), 100),
        ("digits MLP 64-32-10", lambda: MultiLayerPerceptron(widths=[32], image_size=8), (1, 8, 8), 20),
    ):
        teacher = make().to(device)
        batches = torch.randn(steps, 256, *shape, device=device)
        with torch.no_grad():
            targets = torch.stack([teacher(batch) for batch in batches])

        network = make().to(device)
        one = torch.optim.SGD(network.parameters(), lr=0.015)

        def alone(
            network: nn.Module = network,
            optimizer: torch.optim.Optimizer = one,
            batches: Tensor = batches,
            targets: Tensor = targets,
        ) -> None:
            # One candidate is timed, as all take the same time; the ratio below is for all.
            for batch, target in zip(batches, targets, strict=True):
                optimizer.zero_grad()
                (network(batch) - target).square().sum(1).mean().backward()
                optimizer.step()

        task = EquivalenceTask(make(), members=CANDIDATES, points=1, execution="vmap")
        task.configure_model()
        populations: dict[str, Population] = {f"{CANDIDATES} together": task.population}
        if type(task.population) is not VmapPopulation:  # a closed form
            populations["by autograd"] = VmapPopulation(make(), range(CANDIDATES))

        def together(population: Population, batches: Tensor = batches, targets: Tensor = targets) -> None:
            parameters = population.trainable()
            optimizer = torch.optim.SGD(parameters, lr=0.015)
            for batch, target in zip(batches, targets, strict=True):
                gradients = population.step(batch, target, SquaredDistance(), shared=True).gradients
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()

        all_of_them = {what: partial(together, own.to(device).eval()) for what, own in populations.items()}
        work = dict.fromkeys(all_of_them, CANDIDATES)
        rows = timed({"plain": alone, **all_of_them}, rounds, work, clock=clock(device))
        faster = " and ".join(f"{1 / row['ratio_to_plain_median']:.1f} times ({row['variant']})" for row in rows[1:])
        note = (
            f"Plain: one candidate, {steps} steps; ratios are to {CANDIDATES} of them one after another. "
            f"Faster: {faster}."
        )
        results.append(result(f"Searching with {CANDIDATES} candidates, {name}", rows, note=note))
    return results


MEASUREMENTS = {"point": measure_point, "grid": measure_grid, "search": measure_search}


def main() -> None:
    """Run the selected parts."""
    options = parser(__doc__, 5)
    options.add_argument("--only", nargs="+", choices=MEASUREMENTS)
    arguments = options.parse_args()
    rounds, device = arguments.rounds, arguments.device
    torch.set_num_threads(1)
    parts = {name: partial(measure, rounds, device) for name, measure in MEASUREMENTS.items()}
    run("equivalence", parts, arguments.only, device, rounds)


if __name__ == "__main__":
    main()
