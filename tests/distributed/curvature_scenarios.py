"""Curvature and evidence in one, two and three processes; run by test_curvature_ddp.py, as it forks.

Usage: ``python curvature_scenarios.py FOLDER``; leaves ``1 rank 0.pt``, ``2 rank 0.pt``, ... ``3 rank 2.pt``: what
every scenario gave, by name, or the text of the error.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn

from lightning_sym.curvature import Evidence, Factors, PrecisionOptimizer, autograd_factors, factors, parameter_groups
from lightning_sym.layers import CircularConv, FactoredFullyConnected, PolyphasePool, ResidualPathways

SAMPLES = 50  # not a multiple of 3


def network() -> nn.Module:
    torch.manual_seed(0)
    paths = {"fc": FactoredFullyConnected(1, 4, 8, 4), "conv": nn.Sequential(CircularConv(1, 4), PolyphasePool())}
    return nn.Sequential(ResidualPathways(paths), nn.GELU(), nn.Flatten(), nn.Linear(64, 3))


def data(likelihood: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    if likelihood == "classification":
        return x, torch.randint(3, (SAMPLES,), generator=generator)
    return x, torch.randn(SAMPLES, 3, generator=generator)


def share(likelihood: str, rank: int, world: int, batch: int = 8) -> list[tuple[Tensor, Tensor]]:
    x, y = (tensor[rank::world] for tensor in data(likelihood))
    return list(zip(x.split(batch), y.split(batch), strict=True))


def summary(found: Factors, model: nn.Module) -> dict[str, Any]:
    evidence = Evidence.of(model, found, parameter_groups(model))
    regression = found.likelihood == "regression"
    optimizer = PrecisionOptimizer(evidence.groups.names, learn_noise=regression)
    optimizer.update(evidence, 20)
    noise = float(optimizer.log_noise)
    numbers = evidence.effective_parameters(optimizer.log_precisions, noise)
    return {
        "samples": torch.tensor(found.samples),
        "loss": torch.tensor(found.loss_sum, dtype=torch.float64),
        "evidence": torch.tensor(evidence.log_marginal_likelihood(optimizer.log_precisions, noise)).double(),
        "log_precisions": optimizer.log_precisions,
        "log_noise": optimizer.log_noise,
        "effective": torch.tensor([number.raw for number in numbers.values()], dtype=torch.float64),
        "relative": torch.tensor([number.relative for number in numbers.values()], dtype=torch.float64),
        **{f"{name} B": block.out_factor for name, block in found.blocks.items()},
        **{f"{name} A": block.in_factor for name, block in found.blocks.items() if block.in_factor is not None},
        **{f"{name} eigenvalues": spectrum.out for name, spectrum in found.eigenvalues().items()},
        "adam": optimizer.state_dict()["adam"]["state"][0]["exp_avg_sq"],
    }


def run(path: Path, rank: int, world: int) -> None:
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        model = network().to(dtype)
        for likelihood in ("classification", "regression"):
            found = factors(model, share(likelihood, rank, world), likelihood)
            results[f"{likelihood}, {dtype}"] = summary(found, model)
    # All samples on the last rank; the others have none.
    loader = share("classification", 0, 1) if rank == world - 1 else []
    results["one rank has all"] = summary(factors(network().double(), loader, "classification"), network().double())

    def message(loader: list[tuple[Tensor, Tensor]], model: nn.Module, **settings: Any) -> str:
        try:
            factors(model, loader, "classification", **settings)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    x, y = data("classification")
    results["no data"] = message([], network())
    results["wrong labels of rank 0"] = message([(x[:3], y[:3] + (3 if rank == 0 else 0))], network())
    broken = network()
    if rank == world - 1:
        with torch.no_grad():
            broken[3].bias.fill_(float("nan"))
    results["nan on the last rank"] = message([(x[:3], y[:3])], broken)
    # One rank alone finds what is wrong with the network: the others have no sample.
    mixing = nn.Sequential(nn.BatchNorm2d(1, affine=False, track_running_stats=False), network())
    last = [(x[:3], y[:3])] if rank == world - 1 else []
    for engine in ("autograd", "backpack"):
        results[f"mixed samples of the last rank, {engine}"] = message(last, mixing, engine=engine)
    settings = {"columns": 20, "generator": torch.Generator().manual_seed(rank)}
    exact, drawn = (
        autograd_factors(
            network(), share("classification", rank, world), "classification", samples=samples, **settings
        ).blocks
        for samples in (None, 100)
    )
    results["monte carlo"] = {
        name: (drawn[name].out_factor - block.out_factor).norm() / block.out_factor.norm()
        for name, block in exact.items()
    }
    torch.save(results, path / f"{world} rank {rank}.pt")


def worker(rank: int, path: Path, world: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{path / f'store {world}'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        run(path, rank, world)
    finally:
        torch.distributed.destroy_process_group()


def main(path: Path) -> None:
    torch.set_num_threads(1)
    for world in (2, 3):
        multiprocessing.start_processes(worker, (path, world), nprocs=world, start_method="fork")
    run(path, 0, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
