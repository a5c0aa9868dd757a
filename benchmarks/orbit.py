"""Time of one step of a descent over an orbit, compared with the forward and backward pass in it.

A step acts on the weights, runs the network forward and backward, pulls the derivative back to the group, and composes
elements. Variants take turns, so that drifts in the machine's speed affect all; processor time is measured::

    OMP_NUM_THREADS=1 python benchmarks/orbit.py   # small vision transformers, about a minute

Prints tables and writes them to ``benchmarks/results/orbit-<device>.json`` and ``.md``.

Plain reference: the objective and its derivative by all weights that move, at the same weights and batch.
"""

import time
from typing import Any

import torch
from _timing import Results, Runs, parser, result, run, timed
from torch import Tensor, nn

from lightning_sym.networks import VisionTransformer
from lightning_sym.orbit import Objective, OrbitDirections, quantization_error, sparsity
from lightning_sym.orbit.problem import OrbitProblem
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.symmetry.proof import double, double_copy


def steps_of(symmetry: Symmetry, network: nn.Module, batch: Any, objective: Objective, at_once: int) -> Runs:
    """Return the variants: the plain reference and whole steps along all coordinates, each repeated.

    Args:
        symmetry: That of the network.
        network: The network.
        batch: The data of one step.
        objective: The objective.
        at_once: How many steps one run makes.
    """
    exact, batch = double_copy(network).requires_grad_(False), double(batch)
    problem = OrbitProblem(symmetry, exact, OrbitDirections(symmetry), objective, [batch])
    problem.condition = 9.2
    generator = torch.Generator().manual_seed(0)
    shapes = problem.directions.shapes
    coordinates = {n: 1e-3 * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    start = problem.after(coordinates, symmetry.identity())

    def plain() -> None:
        for _ in range(at_once):
            moving = [own for own in {**view.parameters, **view.buffers}.values() if own.requires_grad]
            for value in problem._values(view, None):
                torch.autograd.grad(value, moving, allow_unused=True)

    def step() -> None:
        element = start
        for _ in range(at_once):
            _, slopes = problem.gradient(element)
            element = problem.after({name: -1e-6 * own for name, own in slopes.items()}, element)

    view = problem.view(start)
    return {"plain": plain, "step": step}


def vision_transformer(**options: Any) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network of the recipe `zoo/digits_vit`, and a batch of 64 images."""
    torch.manual_seed(0)
    network = VisionTransformer(1, 8, 10, patch_size=2, width=32, depth=2, heads=4, mlp_ratio=2, **options)
    with torch.no_grad():
        for own in network.parameters():
            own.add_(0.05 * torch.randn_like(own))
    return network.eval(), (torch.randn(64, 1, 8, 8), torch.randint(10, (64,)))


def measure_vision(rounds: int) -> Results:
    """Time steps on small vision transformers, on all of their coordinates."""
    found = []
    for title, options in (
        ("RMS norms and rotary positions", {"norm": "rms", "positions": "rotary"}),
        ("layer norms and learned positions", {}),
    ):
        network, batch = vision_transformer(**options)
        symmetry = trace_symmetry(network, batch[0][:2])
        for name, objective in (
            ("rounded to 4 bits", quantization_error(4, "tensor")),
            ("without 70 % of the weights", sparsity(0.7)),
        ):
            runs = steps_of(symmetry, network, batch, objective, 5)
            text = f"Vision transformer with {title}, {name}: 5 steps of 64 images"
            found.append(result(text, timed(runs, rounds, clock=time.process_time)))
    return found


def main() -> None:
    """Run the benchmarks."""
    options = parser(__doc__, 15)
    options.add_argument("--only", nargs="*", choices=["vision"])
    chosen = options.parse_args()
    run("orbit", {"vision": lambda: measure_vision(chosen.rounds)}, chosen.only, "cpu", chosen.rounds)


if __name__ == "__main__":
    main()
