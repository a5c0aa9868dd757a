"""Time of chains for a learning coefficient, compared with sequential chains in plain PyTorch, in the same run.

Variants take turns, so that drifts in the machine's speed affect all. On the CPU seconds are processor time of
one thread. Run it alone on the machine::

    OMP_NUM_THREADS=1 python benchmarks/learning_coefficient.py   # everything, about two minutes

Prints tables and writes them to ``benchmarks/results/learning_coefficient-<device>.json`` and ``.md``.

Plain reference:
    8 sequential chains of SGLD: a module, ``backward``, and an update of each parameter; the loss on all data
    every 10 steps

``loop`` is our own code with sequential chains.
"""

import copy
import math
import time
import warnings
from functools import partial
from typing import Any

import torch
from _timing import Results, Runs, parser, result, run, timed
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.landscape import learning_coefficient
from lightning_sym.networks import MultiLayerPerceptron

CHAINS, STEPS, STEP, LOCALISATION = 8, 500, 1e-5, 2.0


def plain(network: nn.Module, x: Tensor, y: Tensor, batch_size: int, steps: int) -> list[list[float]]:
    """Return the losses on all data along sequential chains."""
    temperature = len(x) / math.log(len(x))
    found = []
    for chain in range(CHAINS):
        source = torch.Generator(x.device).manual_seed(chain)
        own = copy.deepcopy(network)
        start = [parameter.detach().clone() for parameter in own.parameters()]
        losses = []
        for step in range(steps):
            if step % 10 == 0:
                with torch.no_grad():
                    losses.append(float(F.cross_entropy(own(x), y)))
            rows = torch.randperm(len(x), generator=source, device=x.device)[:batch_size]
            own.zero_grad()
            F.cross_entropy(own(x[rows]), y[rows]).backward()
            with torch.no_grad():
                for parameter, beginning in zip(own.parameters(), start, strict=True):
                    assert parameter.grad is not None
                    drift = temperature * parameter.grad + LOCALISATION * (parameter - beginning)
                    noise = torch.randn(parameter.shape, generator=source, device=x.device)
                    parameter += math.sqrt(STEP) * noise - STEP / 2 * drift
        found.append(losses)
    return found


def measure(rounds: int, device: str) -> Results:
    """Time 8 chains of the digits network, short ones and long ones."""
    clock: Any = time.process_time if device == "cpu" else time.perf_counter
    batches = list(DigitsDataModule().curvature_dataloader())
    x, y = (torch.cat(parts).to(device) for parts in zip(*batches, strict=True))
    network = MultiLayerPerceptron(widths=[32], image_size=8).fresh(0).to(device)
    found = []
    for batch_size, steps in ((32, 150), (32, STEPS), (128, STEPS)):
        settings = {"chains": CHAINS, "steps": steps, "step": STEP, "localisation": LOCALISATION, "method": "sgld"}
        ours = partial(learning_coefficient, network, [(x, y)], batch_size=batch_size, **settings)
        runs: Runs = {
            "plain": partial(plain, network, x, y, batch_size, steps),
            "loop": partial(ours, execution="loop"),
            "vmap": ours,
        }
        ends = torch.tensor(plain(network, x, y, batch_size, steps))[:, -1].mean(), ours().losses[-1].mean()
        rows = timed(runs, rounds, clock=clock)
        own = rows[2]["seconds_median"] / rows[1]["seconds_median"]
        note = (
            f"Mean losses at the end {float(ends[0]):.3f} and {float(ends[1]):.3f}. Ours also finds the curvature. "
            f"Together they take {own:.2f} of our own time one after another."
        )
        title = f"{CHAINS} chains of {steps} steps, 2,410 weights, batches of {batch_size} of {len(x)} digits"
        found.append(result(title, rows, note=note, target_ratio=1 / 3))
    return found


def main() -> None:
    """Run the benchmark and write the results."""
    options = parser(__doc__, 3)
    options.add_argument("--only", nargs="+", choices=["chains"])
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    parts = {"chains": partial(measure, arguments.rounds, arguments.device)}
    run("learning_coefficient", parts, arguments.only, arguments.device, arguments.rounds)


if __name__ == "__main__":
    main()
