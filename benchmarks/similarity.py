"""Time of similarities, compared with a plain reference in the same run.

Variants take turns, so that drifts in the machine's speed affect all. On the CPU seconds are processor time of
one thread. Run it alone on the machine::

    OMP_NUM_THREADS=1 python benchmarks/similarity.py   # everything, about three minutes

Prints tables and writes them to ``benchmarks/results/similarity-<device>.json`` and ``.md``.

Plain references:
    max     the alignment with the maximum kernel of Godfrey et al., row by row of the kernel, as in the formula
    matrix  the forward passes of both networks that compute the features
"""

import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from _timing import Results, Runs, parser, result, run, timed
from torch import Tensor

from lightning_sym.networks import MyrtleCNN
from lightning_sym.similarity import CKA, GroupProcrustes, OrthogonalProcrustes, SimilarityMatrix, features_of
from lightning_sym.similarity.kernels import centre_, inner


def clock(device: str) -> Any:
    """Return the clock: processor time on the CPU, wall time on a GPU."""
    return time.process_time if device == "cpu" else time.perf_counter


def plain_kernel(x: Tensor) -> Tensor:
    """Return max over c of the inner products of channels, a row of the kernel at a time. Shape (n, n)."""
    x = x - x.mean((0, 2, 3), keepdim=True)
    x = x / torch.linalg.vector_norm(x, dim=(0, 2, 3), keepdim=True)
    kernel = x.new_empty(len(x), len(x))
    for place, row in enumerate(
        x
    ):  # a list of rows would fragment the memory between the large products, until it runs out
        kernel[place] = (x * row).sum((2, 3)).amax(1)
    return kernel


def plain_alignment(x: Tensor, y: Tensor) -> Tensor:
    """Return the alignment of two networks' features."""
    kernels = torch.stack([plain_kernel(x), plain_kernel(y)]).double()
    hsic = inner(*[torch.stack([centre_(kernel.clone(), unbiased=True) for kernel in kernels])] * 2, unbiased=True)
    found: Tensor = hsic[0, 1] / (hsic[0, 0] * hsic[1, 1]).sqrt()
    return found


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Return the same from the metric."""
    metric = CKA("max")
    for start in range(0, len(x), 500):
        metric.update(x[start : start + 500], y[start : start + 500])
    value: Tensor = metric.compute()
    return value


def measure_max(rounds: int, device: str) -> Results:
    """Time the alignment with the maximum kernel."""
    found = []
    for shape in ((2000, 64, 8, 8), (1000, 256, 4, 4)):
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(shape, generator=generator).relu().to(device) for _ in range(2))
        difference = abs(plain_alignment(x, y).item() - alignment(x, y).item())
        runs: Runs = {"plain": lambda x=x, y=y: plain_alignment(x, y), "ours": lambda x=x, y=y: alignment(x, y)}
        title = f"CKA with the maximum kernel, {' x '.join(map(str, shape))}, float32"
        found.append(
            result(
                title,
                timed(runs, rounds, clock=clock(device)),
                note=f"Values differ by {difference:.1e}.",
                target_ratio=1 / 12,
            )
        )
    return found


def measure_matrix(rounds: int, device: str) -> Results:
    """Time all pairs of layers of two networks on 2,000 images."""
    networks = [MyrtleCNN(16, in_channels=1, image_size=28).fresh(seed).to(device).eval() for seed in (0, 1)]
    sites = [f"{kind}{block}" for block in range(1, 5) for kind in ("conv", "activation")]
    every = torch.rand(2000, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images = every.split(100)

    def forward() -> None:
        with torch.no_grad():
            for batch in images:
                for network in networks:
                    network(batch.to(device))

    def watched() -> None:
        for batch in images:
            for network in networks:
                features_of(network, sites, batch)

    def matrix(metric: Any, images: Sequence[Tensor] = images) -> Tensor:
        found = SimilarityMatrix(metric, sites)
        for batch in images:
            found.update(*(features_of(network, sites, batch) for network in networks))
        value: Tensor = found.compute()
        return value

    runs: Runs = {
        "plain": forward,
        "features only": watched,
        "linear CKA, unbiased": lambda: matrix(CKA()),
        "linear CKA, minibatch": lambda: matrix(CKA(estimator="minibatch")),
        "linear CKA, minibatches of 50": lambda: matrix(CKA(estimator="minibatch"), every.split(50)),
        "Procrustes, ReLU group": lambda: matrix(GroupProcrustes("relu")),
        "Procrustes, orthogonal": lambda: matrix(OrthogonalProcrustes()),
    }
    numbers = [value[0].numel() for value in features_of(networks[0], sites, images[0].to(device)).values()]
    note = (
        f"Outputs of convolutions and of activations, {sum(numbers)} numbers for each image and network. The unbiased "
        "estimator needs a product of each image's numbers with those of all images before it."
    )
    title = f"All pairs of {len(sites)} layers of two Myrtle CNNs, width 16, 2,000 images in batches of 100"
    return [result(title, timed(runs, rounds, clock=clock(device)), note=note, target_ratio=2)]


def main() -> None:
    """Run the benchmark and write the results."""
    options = parser(__doc__, 3)
    options.add_argument("--only", nargs="+", choices=["max", "matrix"])
    arguments = options.parse_args()
    rounds, device = arguments.rounds, arguments.device
    warnings.simplefilter("ignore")
    measures = {"max": measure_max, "matrix": measure_matrix}
    parts = {name: partial(measure, rounds, device) for name, measure in measures.items()}
    run("similarity", parts, arguments.only, device, rounds)


if __name__ == "__main__":
    main()
