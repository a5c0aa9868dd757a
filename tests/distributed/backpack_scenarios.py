"""Factors of engine backpack in one and two processes; run by test_backpack_ddp.py, as it forks.

Usage: ``python backpack_scenarios.py FOLDER``; leaves ``1 rank 0.pt``, ``2 rank 0.pt`` and ``2 rank 1.pt``.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, multiprocessing, nn

from lightning_sym.curvature import factors
from lightning_sym.layers import CircularConv, FactoredFullyConnected, PolyphasePool, ResidualPathways


def network() -> nn.Module:
    torch.manual_seed(0)
    paths = {"fc": FactoredFullyConnected(1, 4, 8, 4), "conv": nn.Sequential(CircularConv(1, 4), PolyphasePool())}
    return nn.Sequential(ResidualPathways(paths), nn.GELU(), nn.Flatten(), nn.Linear(64, 3))


def share(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Return every ``world``-th of 49 samples, which two processes cannot share equally."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(49, 1, 8, 8, generator=generator), torch.randint(3, (49,), generator=generator)
    return list(zip(x[rank::world].split(8), y[rank::world].split(8), strict=True))


def run(path: Path, rank: int, world: int) -> None:
    found = factors(network().double(), share(rank, world), engine="backpack")
    results = {"samples": torch.tensor(found.samples), "loss": torch.tensor(found.loss_sum, dtype=torch.float64)}
    for name, block in found.blocks.items():
        results[f"{name} B"] = block.out_factor
        if block.in_factor is not None:
            results[f"{name} A"] = block.in_factor
    drawn = factors(network(), share(rank, world), engine="backpack", samples=1)
    results["drawn"] = drawn.blocks["0.fc.theta1"].out_factor
    torch.save(results, path / f"{world} rank {rank}.pt")


def worker(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{path / 'store'}"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        run(path, rank, 2)
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    multiprocessing.start_processes(worker, (folder,), nprocs=2, start_method="fork")
    run(folder, 0, 1)
