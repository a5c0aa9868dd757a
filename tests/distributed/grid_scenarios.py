"""Grids on one and two processes; run by test_grid_ddp.py, as it forks.

Usage: ``python grid_scenarios.py FOLDER``; leaves ``FOLDER/<scenario> <processes> <rank>.pt``: losses, the numbers of
points that the rank evaluated, or the text of an error.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.grids import Grid, evaluate_grid
from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.networks import LeNet5, MultiLayerPerceptron

GRID = Grid(2, 9, 1.5)


def problem(name: str) -> tuple[LossSurface, WeightPlane]:
    torch.manual_seed(0)
    if name == "lenet":
        network, inputs = LeNet5(num_classes=1, padding=0), torch.randn(8, 1, 28, 28)
    else:
        network, inputs = MultiLayerPerceptron([6, 5], image_size=3, num_classes=2), torch.randn(200, 9)
    surface = LossSurface(network, inputs, network(inputs), chunk=8, method="loop" if name == "loop" else "auto")
    return surface, WeightPlane.through(torch.randn(3, surface.size) / 5)


def stopping(after: int, rank_to_stop: int, rank: int):
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after and rank == rank_to_stop:
            raise RuntimeError("stopped on one rank")

    return progress


def work(rank: int, processes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = torch.distributed.FileStore(str(folder / "store"), processes)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)

    def leave(name: str, content: object) -> None:
        torch.save(content, folder / f"{name} {processes} {rank}.pt")

    for name in ("mlp", "loop", "lenet"):
        surface, plane = problem(name)
        points = [0]
        values = evaluate_grid(surface, plane, GRID, progress=lambda done, total, points=points: points.append(done))
        below = evaluate_grid(surface, plane, GRID, below=float(values.median()))
        leave(name, {"values": values, "below": below, "points": points[-1], "method": surface.method})
    surface, plane = problem("mlp")
    if processes > 1:  # the second rank stops; what both have is kept
        for name in ("two", "one"):
            try:
                evaluate_grid(
                    surface, plane, GRID, partial=folder / f"{name}.npz", progress=stopping(2, 1, rank)
                )  # fmt: skip
            except RuntimeError as error:
                leave(f"error {name}", str(error))
        points = [0]
        values = evaluate_grid(
            surface, plane, GRID, partial=folder / "two.npz", progress=lambda done, total: points.append(done)
        )
        leave("resumed", {"values": values, "points": points[-1]})
        try:
            evaluate_grid(surface, plane, Grid(2, 9, 1.5 + rank), limit_seconds=1e-9)
        except ValueError as error:
            leave("limit", str(error))
        torch.distributed.destroy_process_group()
    else:
        points = [0]
        values = evaluate_grid(
            surface, plane, GRID, partial=folder / "one.npz", progress=lambda done, total: points.append(done)
        )
        leave("resumed", {"values": values, "points": points[-1]})


def main(folder: Path) -> None:
    for processes in (2, 1):
        mp.start_processes(work, (processes, folder), nprocs=processes, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
