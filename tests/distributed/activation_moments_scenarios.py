"""Activation moments in one and two processes; run by test_activation_moments_ddp.py, as it forks.

Usage: ``python activation_moments_scenarios.py FOLDER``; leaves ``one.pt``, ``rank 0.pt`` and ``rank 1.pt``: what every
scenario gave, by name, or the text of the error.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, multiprocessing, nn

from lightning_sym.networks import MyrtleCNN
from lightning_sym.symmetry import ActivationMoments, Symmetry, activation_matching, trace_symmetry

# Which of five batches each of two ranks has, by the name of the sharing.
SHARES = {"even": [[0, 2], [1, 3]], "uneven": [[0, 2, 3, 4], [1]], "all on one": [[], [0, 1, 2, 3, 4]]}


def network(seed: int) -> nn.Module:
    return MyrtleCNN(2, in_channels=1, image_size=8, num_classes=3, activation="tanh").fresh(seed).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Of unequal sizes, as the last of a rank may be.
    return [torch.randn(3 + k, 1, 8, 8, generator=generator, dtype=torch.float64) + k for k in range(5)]


def run(path: Path, rank: int | None, symmetry: Symmetry) -> None:
    results: dict[str, dict[str, Tensor] | str] = {}
    a, b = network(0), network(1)
    for sharing, shares in SHARES.items():
        numbers = sorted(shares[0] + shares[1]) if rank is None else shares[rank]
        data = [batches()[number] for number in numbers]
        moments = ActivationMoments(symmetry, a, b)
        for images in data:
            moments.update(images)
        moments.reduce()
        results[f"moments, {sharing}"] = {
            f"{name} {key}": value for name, sums in moments.state_dict()["sums"].items() for key, value in sums.items()
        }
        match = activation_matching(symmetry, a, b, data)
        results[f"match, {sharing}"] = {
            "permutation": match.element.permutation, "sign": match.element.sign, "log_scale": match.element.log_scale,
        }  # fmt: skip
    if rank is not None:
        bad = [torch.zeros(2, 7, 8, 8, dtype=torch.float64)] if rank == 1 else batches()[:1]
        try:
            activation_matching(symmetry, a, b, bad)
        except Exception as error:
            results["wrong"] = f"{type(error).__name__}: {error}"
    torch.save(results, path / ("one.pt" if rank is None else f"rank {rank}.pt"))


def worker(rank: int, path: Path, symmetry: Symmetry) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        run(path, rank, symmetry)
    finally:
        torch.distributed.destroy_process_group()


def main(path: Path) -> None:
    torch.set_num_threads(1)
    symmetry = trace_symmetry(network(0), batches()[0])
    multiprocessing.start_processes(worker, (path, symmetry), nprocs=2, start_method="fork")
    run(path, None, symmetry)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
