"""Cost of a whole figure of stitching penalties in one fit, and of one step, compared with plain references.

Variants take turns, so that drifts in the machine's speed affect all. Run it alone on the machine::

    python benchmarks/stitching.py                  # everything, about half an hour on two cores
    python benchmarks/stitching.py --only step projection
    python benchmarks/stitching.py --device cuda

Prints tables and writes them to ``benchmarks/results/stitching-<device>.json`` and ``.md``.

Plain references:
    figure      the same task and settings, one fit per site and map (4 sites x 5 maps, 1 pair, MNIST5k), in one
                process each, and all in one process
    step        a hand-written step: frozen layers, one trained 1x1 convolution, frozen layers with batch statistics
    transformer the same with a trained linear layer after a block of a compact transformer; processor time
    projection  the step that contains it
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _timing import Results, Runs, parser, result, row, run, timed
from pytorch_lightning import Trainer, seed_everything
from torch import nn
from torch.nn import functional as F

from lightning_sym.callbacks import BatchNormRecalibration, StitchingReport
from lightning_sym.datamodules import MNIST5kDataModule
from lightning_sym.networks import CompactTransformer, MyrtleCNN
from lightning_sym.stitching import CutNetwork, GroupMap, Port, StitchedNetwork
from lightning_sym.symmetry import INTERTWINER_GROUPS
from lightning_sym.tasks import StitchingTask
from lightning_sym.zoo import rebuild_manifest, write_member

SITES = [f"activation{layer}" for layer in range(1, 5)]
MAPS = ["full", "rank(4)", "rank(2)", "rank(1)", "group"]


def make_zoo(folder: Path) -> Path:
    """Write a zoo of two networks of the demo's architecture; untrained ones take as long."""
    data = MNIST5kDataModule()
    network = MyrtleCNN(width=16, in_channels=1, image_size=28)
    for seed in (0, 1):
        state = network.fresh(seed).state_dict()
        write_member(folder, seed, state, architecture=network.architecture, data=data.identity())
    rebuild_manifest(folder)
    return folder


def fit(zoo: Path, sites: list[str], maps: list[str], epochs: int, device: str, folder: str) -> float:
    """Run one fit with validation, recalibration and report; return its seconds."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    start = time.perf_counter()
    task = StitchingTask(str(zoo), pairs=[[0, 1]], sites=sites, maps=maps)
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[BatchNormRecalibration(images=1000, batch_size=500), StitchingReport(f"{folder}/results")],
    )
    trainer.fit(task, MNIST5kDataModule(batch_size=32))
    return time.perf_counter() - start


def in_process(zoo: Path, sites: list[str], maps: list[str], epochs: int, device: str) -> dict[str, float]:
    """Run one fit in a separate process; return seconds of the fit and of the process, and its peak memory in MiB."""
    start = time.perf_counter()
    arguments = json.dumps([str(zoo), sites, maps, epochs, device])
    output = subprocess.run(
        [sys.executable, __file__, "--fit", arguments], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return {**found, "process": time.perf_counter() - start}


def run_fit(arguments: str) -> None:
    """Run in the process of :func:`in_process`."""
    zoo, sites, maps, epochs, device = json.loads(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seconds = fit(Path(zoo), sites, maps, epochs, device, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    print("\n" + json.dumps({"fit": seconds, "peak_MiB": peak}))


def measure_figure(epochs: int, device: str) -> Results:
    """Time the whole figure in one fit and in one fit per site and map, once each."""
    with tempfile.TemporaryDirectory() as folder:
        zoo = make_zoo(Path(folder) / "zoo")
        together = in_process(zoo, SITES, MAPS, epochs, device)
        apart = [in_process(zoo, [site], [family], epochs, device) for site in SITES for family in MAPS]
    fits, processes = (sum(one[name] for one in apart) for name in ("fit", "process"))
    rows = [
        row("plain, 20 fits", [fits], [fits]),
        row("ours, one fit", [together["fit"]], [fits]),
        row("plain, 20 processes from start to end", [processes], [processes]),
        row("ours, one process from start to end", [together["process"]], [processes]),
    ]
    note = (
        f"{epochs} epoch(s) of MNIST5k, batch 32, with validation, recalibration and report. Peak memory: one fit "
        f"{together['peak_MiB']:.0f} MiB, the largest of the others {max(one['peak_MiB'] for one in apart):.0f} MiB. "
        "Ratios of lines 1 and 2, and 3 and 4, belong together."
    )
    title = "The whole figure: 4 sites x 5 maps, 1 pair of Myrtle CNNs, width 16"
    return [result(title, rows, target_ratio=0.35, note=note)]


class PlainStep:
    """A hand-written step for one architecture: no cutting, no ports, no projection."""

    def __init__(self, lower: nn.Module, trained: nn.Module, upper: nn.Module, device: str) -> None:
        self.lower, self.map, self.upper = lower.to(device).eval(), trained.to(device), upper.to(device)
        for module in (self.lower, self.upper):
            module.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.map.parameters(), lr=1e-3, weight_decay=1e-4)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Take a step."""
        with torch.no_grad():
            values = self.lower(images)
        self.optimizer.zero_grad()
        F.cross_entropy(self.upper(self.map(values)), labels).backward()
        self.optimizer.step()


def plain_cnn(a: MyrtleCNN, b: MyrtleCNN, site: str, channels: int, device: str) -> PlainStep:
    """Return the step at a site of a CNN."""
    at = [name for name, _ in a.named_children()].index(site) + 1
    lower, upper = nn.Sequential(*list(a.children())[:at]), nn.Sequential(*list(b.children())[at:])
    return PlainStep(lower, nn.Conv2d(channels, channels, 1, bias=False), upper, device)


def plain_transformer(a: CompactTransformer, b: CompactTransformer, block: int, width: int, device: str) -> PlainStep:
    """Return the step after a block of a transformer."""
    lower = nn.Sequential(a.embedding, a.dropout, *a.blocks[: block + 1])
    upper = nn.Sequential(*b.blocks[block + 1 :], b.norm, b.pool, b.classifier)
    return PlainStep(lower, nn.Linear(width, width, bias=False), upper, device)


class OurStep:
    """A step of a :class:`StitchedNetwork`, projection included."""

    def __init__(self, a: CutNetwork, b: CutNetwork, site: str, family: str) -> None:
        self.a, self.site = a, site
        self.stitched = StitchedNetwork(a, b, site, family=family).to(next(a.network.parameters()).device)
        self.optimizer = torch.optim.SGD(self.stitched.maps.parameters(), lr=1e-3, weight_decay=1e-4)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Take a step."""
        values = self.a.values(images)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.stitched.stitched(values[self.site]), labels) + self.stitched.regularization()
        loss.backward()
        self.optimizer.step()
        self.stitched.project()


def measure_steps(rounds: int, device: str) -> Results:
    """Time one step at each site of a Myrtle CNN of width 16."""
    found = []
    images, labels = torch.rand(32, 1, 28, 28, device=device), torch.randint(10, (32,), device=device)
    make = MyrtleCNN(width=16, in_channels=1, image_size=28)
    for layer, site in enumerate(SITES):
        # Each variant has separate networks: plain top layers are in train mode, ours are a copy.
        plain = plain_cnn(make.fresh(0), make.fresh(1), site, 16 * 2**layer, device)
        cuts = [CutNetwork(make.fresh(seed).to(device), [site], example=images) for seed in (0, 1)]
        steps: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
            "plain": plain,
            "ours, full": OurStep(cuts[0], cuts[1], site, "full"),
            "ours, group": OurStep(cuts[0], cuts[1], site, "group"),
            "ours, group, Euclidean projection": OurStep(cuts[0], cuts[1], site, "group(euclidean)"),
        }
        runs: Runs = {name: lambda step=step: step(images, labels) for name, step in steps.items()}
        title = f"One step at {site}, {16 * 2**layer} channels, 32 digits"
        found.append(result(title, timed(runs, 20 * rounds), target_ratio={"full": 1.15, "group": 1.3}))
    return found


def measure_transformers(rounds: int, device: str) -> Results:
    """Time one step after a block of compact transformers: those of the recipe for MNIST5k, and a published size."""
    found = []
    off = {"attention_dropout": 0.0, "stochastic_depth": 0.0}
    small = CompactTransformer(1, 28, variant="2/3x2", width=64, heads=4, mlp_ratio=2, **off)
    for name, make, block, batch, times in (
        ("width 64, 2 blocks, 60 digits", small, 0, 60, 10),
        ("CCT-7/3x1, 16 images of 32 x 32", CompactTransformer(**off), 3, 16, 2),
    ):
        shape, site = (1, 28, 28) if make is small else (3, 32, 32), f"blocks.{block}"
        images, labels = torch.rand(batch, *shape, device=device), torch.randint(10, (batch,), device=device)
        width = make.classifier.in_features
        steps: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
            "plain": plain_transformer(make.fresh(0), make.fresh(1), block, width, device)
        }
        for family in ("full", "group"):
            cuts = [CutNetwork(make.fresh(seed).to(device), [site], example=images) for seed in (0, 1)]
            steps[f"ours, {family}"] = OurStep(cuts[0], cuts[1], site, family)
        runs: Runs = {own: partial(step, images, labels) for own, step in steps.items()}
        clock = time.perf_counter if device == "cuda" else time.process_time
        rows = timed(runs, times * rounds, clock=clock)
        found.append(result(f"One step at {site} of compact transformers, {name}", rows, target_ratio={"full": 1.15}))
    return found


def measure_projections(rounds: int, device: str) -> Results:
    """Time the projection and the step that contains it, on CIFAR-sized images."""
    found = []
    images, labels = torch.rand(32, 3, 32, 32, device=device), torch.randint(10, (32,), device=device)
    for layer, channels in ((1, 64), (3, 256), (4, 512)):
        site = f"activation{layer}"
        networks = [MyrtleCNN().fresh(seed).to(device) for seed in (0, 1)]
        cuts = [CutNetwork(network, [site], example=images) for network in networks]
        step = OurStep(cuts[0], cuts[1], site, "group")
        port = Port(channels, channels, group=INTERTWINER_GROUPS["relu"])
        maps = {how: GroupMap(port, projection=how).to(device) for how in ("sinkhorn", "euclidean")}  # type: ignore[arg-type]
        runs: Runs = {"plain": lambda step=step: step(images, labels)}
        for how, module in maps.items():
            runs[f"project, {how}"] = lambda module=module: module.project()
        note = "Plain: the whole step of a group map at this site of the Myrtle CNN of width 64, 32 images of 32 x 32."
        title = f"Projection of {channels} channels"
        found.append(result(title, timed(runs, 5 * rounds), target_ratio=0.05, note=note))
    return found


def main() -> None:
    """Run the benchmark and write the results."""
    options = parser(__doc__, 3, "times a few, after a first round that is not counted")
    options.add_argument("--epochs", type=int, default=1, help="epochs of each fit of the whole figure")
    options.add_argument("--only", nargs="+", choices=["projection", "step", "transformer", "figure"])
    options.add_argument("--fit", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    rounds, device = arguments.rounds, arguments.device
    warnings.simplefilter("ignore")
    if arguments.fit:
        run_fit(arguments.fit)
        return
    parts = {
        "projection": partial(measure_projections, rounds, device),
        "step": partial(measure_steps, rounds, device),
        "transformer": partial(measure_transformers, rounds, device),
        "figure": partial(measure_figure, arguments.epochs, device),
    }
    run("stitching", parts, arguments.only, device, rounds)


if __name__ == "__main__":
    main()
