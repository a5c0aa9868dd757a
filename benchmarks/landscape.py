"""Cost of methods in weight space, compared with plain training.

Run it alone on the machine, on one thread::

    python benchmarks/landscape.py                     # all parts
    python benchmarks/landscape.py --part curve_steps
    python benchmarks/landscape.py --device cuda

Prints tables and writes them to ``benchmarks/results/landscape-<device>.json`` and ``.md``. Seconds are processor time
(wall time with ``--device cuda``). Variants take turns, so that drifts in the machine's speed affect all.

Parts:
    curve_steps  a training step of a curve (random point, gradient, step of the control points) and of the network
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from _timing import Results, parser, result, run, timed
from torch import Tensor

from lightning_sym._random import generator
from lightning_sym.connectivity import CurveNetwork, curve_coefficients
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.population import LoopPopulation, Population, carry_gradients
from lightning_sym.tasks import CrossEntropy

STEPS = 20


# ---- curves


def curve_steps(rounds: int, device: str) -> Results:
    """Time training steps of curves and of the networks."""
    perceptron, convolutional = MultiLayerPerceptron(), MyrtleCNN(16, in_channels=1, image_size=28)
    cases = (
        ("MLP of 3 x 512 units", perceptron, 128),
        ("MLP of 3 x 512 units", perceptron, 512),
        ("Myrtle CNN of width 16 with batch norm", convolutional, 128),
    )
    found = []
    for name, network, size in cases:
        inputs, labels = torch.rand(size, 1, 28, 28, device=device), torch.randint(10, (size,), device=device)
        runs = {"plain": _plain_steps(network, inputs, labels, device)}
        for kind, bends in (("bezier", 1), ("chain", 1), ("bezier", 3)):
            runs[f"{kind}, n = {bends + 2}"] = _curve_steps(network, inputs, labels, device, kind, bends)
        title = f"{STEPS} training steps of {size} images: {name}, {device}"
        clock = time.process_time if device == "cpu" else time.perf_counter
        found.append(result(title, timed(runs, rounds, clock=clock)))
    return found


def _plain_steps(network: Network, inputs: Tensor, labels: Tensor, device: str) -> Callable[[], None]:
    population = LoopPopulation(network, [0]).to(device)
    return _steps(population, inputs, labels, lambda step: None)


def _curve_steps(
    network: Network, inputs: Tensor, labels: Tensor, device: str, kind: Any, bends: int
) -> Callable[[], None]:
    ends = network.fresh(0), network.fresh(1)
    population = LoopPopulation(lambda number: CurveNetwork(*copy.deepcopy(ends), bends, 1e-4), [0]).to(device)

    def draw(step: int) -> None:
        place = torch.rand((), generator=generator("place", 0, step), dtype=torch.float64)
        population.set_buffer("coefficients", curve_coefficients(kind, bends + 2, place)[None])

    return _steps(population, inputs, labels, draw)


def _steps(population: Population, inputs: Tensor, labels: Tensor, before: Callable[[int], None]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(population.trainable(), lr=0.01, momentum=0.9)

    def steps() -> None:
        for number in range(STEPS):
            before(number)
            step = population.step(inputs, labels, CrossEntropy(), shared=True, draw=number)
            optimizer.zero_grad()
            carry_gradients(step.losses.sum(), step.gradients, population.trainable()).backward()
            optimizer.step()

    return steps


def main() -> None:
    """Run the selected parts."""
    options = parser(__doc__, 10)
    options.add_argument("--part", choices=["curve_steps"], action="append")
    given = options.parse_args()
    torch.set_num_threads(1)
    parts = {"curve_steps": lambda: curve_steps(given.rounds, given.device)}
    run("landscape", parts, given.part, given.device, given.rounds)


if __name__ == "__main__":
    main()
