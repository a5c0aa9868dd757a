"""Recalibration and barriers in one and two processes; run by test_recalibration_ddp.py, as it forks.

Usage: ``python recalibration_scenarios.py FOLDER``; leaves ``one.pt``, ``rank 0.pt`` and ``rank 1.pt``: what every
scenario gave, by name, or the text of the error.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, multiprocessing, nn

from lightning_sym.connectivity import barrier
from lightning_sym.networks import MyrtleCNN, Network, recalibrate_batch_norm

# Which of five batches each of two ranks has, by the name of the sharing.
SHARES = {"even": [[0, 2], [1, 3]], "uneven": [[0, 2, 3, 4], [1]], "all on one": [[], [0, 1, 2, 3, 4]]}


def network(seed: int) -> Network:
    return MyrtleCNN(2, in_channels=1, image_size=8, num_classes=3).fresh(seed).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64) + k,
            torch.randint(3, (6,), generator=generator),
        )
        for k in range(5)
    ]


def statistics(data: list[tuple[Tensor, Tensor]], **settings) -> dict[str, Tensor]:
    found = network(0)
    recalibrate_batch_norm(found, data, **settings)
    return dict(found.named_buffers())


def curves(data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    found = barrier(network(0), network(1), data, points=3)
    return {"loss": found.loss, "accuracy": found.accuracy, "samples": torch.tensor(found.samples)}


def synchronised(count: int, exact: bool) -> dict[str, Tensor]:
    found = nn.SyncBatchNorm.convert_sync_batchnorm(network(0))
    recalibrate_batch_norm(found, batches()[:count], exact=exact)
    return dict(found.named_buffers())


def wrapped(data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    recalibrate_batch_norm(nn.parallel.DistributedDataParallel(network(0)), data)
    return {}


def run(path: Path, rank: int | None) -> None:
    results: dict[str, dict[str, Tensor] | str] = {}

    def keep(name: str, work: Callable[[], dict[str, Tensor]]) -> None:
        try:
            results[name] = work()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"

    for sharing, shares in SHARES.items():
        numbers = sorted(shares[0] + shares[1]) if rank is None else shares[rank]
        data = [batches()[number] for number in numbers]
        keep(f"one pass, {sharing}", lambda data=data: statistics(data))
        keep(f"exact, {sharing}", lambda data=data: statistics(data, exact=True))
        keep(f"barrier, {sharing}", lambda data=data: curves(data))
    if rank is not None:
        # Errors of one rank are raised on both, which then go on together.
        wrong = [(torch.zeros(2, 7, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))]
        infinite = [(batches()[0][0] * torch.inf, batches()[0][1])]
        good = batches()[:1]
        for name, bad in (("wrong", wrong), ("infinite", infinite)):
            for exact in (False, True):
                data = bad if rank == 1 else good
                keep(f"{name}, {exact}", lambda data=data, exact=exact: statistics(data, exact=exact))
            keep(f"{name}, barrier", lambda data=data: curves(data))
        for exact in (False, True):
            keep(f"none, {exact}", lambda exact=exact: statistics([], exact=exact))
        keep("none, barrier", lambda: curves([]))
        keep("synchronised", lambda: synchronised(1 + rank, exact=False))
        keep("synchronised, exact", lambda: synchronised(1 + rank, exact=True))
        keep("wrapped", lambda: wrapped(good))
        keep("afterwards", lambda: statistics(good))
    torch.save(results, path / ("one.pt" if rank is None else f"rank {rank}.pt"))


def worker(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        run(path, rank)
    finally:
        torch.distributed.destroy_process_group()


def main(path: Path) -> None:
    torch.set_num_threads(1)
    multiprocessing.start_processes(worker, (path,), nprocs=2, start_method="fork")
    run(path, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
