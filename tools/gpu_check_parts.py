"""The parts of ``gpu_check.py``, each in a separate process; see there.

``python tools/gpu_check_parts.py PART DEVICE FILE CLAIMS`` appends a line of JSON to ``FILE`` for each check, with
outcome, seconds and the end of a traceback, and for each measured table. ``CLAIMS`` is a folder that the processes of
one part share: a file there means that one of them has taken this check.
"""

import faulthandler
import functools
import importlib
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BROKEN = 3  # exit status: the device refuses everything that comes after an error
LONGEST = 100  # seconds of one check on a GPU
LETTERS = 1500  # of a traceback
Check = Callable[[], str]  # returns a remark


class Report:
    """Appends results to a file of JSON lines; ends the process if a check takes too many seconds."""

    def __init__(self, file: Path, longest: float) -> None:
        self.file, self.longest = file, longest

    def write(self, **line: Any) -> None:
        """Append a line, in one call, so that a killed process leaves whole lines."""
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def run(self, name: str, check: Check) -> None:
        """Run a check and report it; end the process if the device is unusable afterwards."""
        start = time.perf_counter()
        self.write(begun=name)
        faulthandler.dump_traceback_later(self.longest, exit=True)
        try:
            remark, error = check(), ""
        except Exception as problem:
            remark, error = "", explained(problem)
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.perf_counter() - start, 2)
        status = "failed" if error else "passed"
        self.write(check=name, status=status, seconds=seconds, remark=remark, error=error)
        if "CUDA error" in error or "AcceleratorError" in error:
            sys.stdout.flush()
            os._exit(BROKEN)  # teardown would wait for the device


def explained(error: BaseException) -> str:
    """Return the end of a traceback: the message, cut in its middle if it is long, after the innermost frames."""
    text = "".join(traceback.format_exception(error))
    message = "".join(traceback.format_exception_only(error))
    if len(message) > LETTERS // 2:
        message = f"{message[: LETTERS // 4]} [...] {message[-LETTERS // 4 :]}"
    frames = text.removesuffix("".join(traceback.format_exception_only(error)))
    return frames[-(LETTERS - len(message)) :] + message


def claim(folder: Path, name: str) -> bool:
    """Take a check, unless another process has."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def about(device: str) -> dict[str, Any]:
    """Return the machine and the versions that numbers depend on."""
    import platform

    import torch

    from lightning_sym.zoo import versions

    return {
        "device": platform.machine() if device == "cpu" else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda if device == "cuda" else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {**versions(), "torch": torch.__version__},
    }


# ---- numbers: tasks, callbacks and functions, on the device and on the CPU


def prepare(part: str, device: str) -> None:
    """Put tests and benchmarks on the path; make a pretend device, or numbers on a real one reproducible."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests/pretend_device", "benchmarks", "tests")]
    warnings.simplefilter("ignore")
    torch, installation = (importlib.import_module(name) for name in ("torch", "installation"))
    if device == "pretend":
        installation.install()
    elif device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; use --device cpu to try the check")
    if part in CHECKS:
        installation.real()
        torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def numbers(device: str) -> Iterator[tuple[str, Check]]:
    """Yield the scenarios and functions of ``tests/pretend_device``."""
    scenarios: Any = importlib.import_module("scenarios")
    functions: Any = importlib.import_module("functions")
    scenarios.prepare()
    scenarios.AGAINST_CPU = device != "cpu"
    if device == "cpu":
        scenarios.ACCELERATOR, functions.GPU = "cpu", functions.CPU

    def scenario(name: str) -> str:
        scenarios.DIFFERENCES.clear()
        error = scenarios.attempt(name)
        if error is not None:
            raise error
        size, step, tag, cpu, here = max(scenarios.DIFFERENCES, default=(0.0, "", "", 0.0, 0.0))
        return f"{size:.2g} tolerances from the CPU: {tag} {cpu:.6g}, here {here:.6g} (step {step})" if size else ""

    def function(name: str) -> str:
        failed = functions.attempt(name)
        for side, error in failed.items():
            error.add_note(f"{side}; failed for {len(failed)} of 4 places of network and inputs")
            raise error
        size = functions.DIFFERENCES.get(name, 0.0)
        return f"{size:.2g} tolerances from the CPU" if size else ""

    for name in scenarios.SCENARIOS:  # the longer ones first
        yield f"scenario {name}", functools.partial(scenario, name)
    for name in functions.CASES:
        yield f"function {name}", functools.partial(function, name)


def settings_of(device: str, folder: Path) -> dict[str, Any]:
    """Return the settings of trainers."""
    from lightning_sym.cli.loggers import MetricsCSV

    logger = MetricsCSV(folder)
    return {"folder": folder, "accelerator": "cpu" if device == "cpu" else "gpu", "devices": 1, "logger": logger}


def trained(device: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the weights of a zoo that was trained for two epochs."""
    import torch

    fits = importlib.import_module("fits")
    from lightning_sym.networks import MyrtleCNN
    from lightning_sym.tasks import ZooTask

    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=0.05)
    task = ZooTask(MyrtleCNN(2, in_channels=1, image_size=8), members=2, optimizer=optimizer, keep="last")
    fits.fit(task, fits.digits(), **settings_of(device, folder), max_epochs=2, **changes)
    return {name: value.cpu() for name, value in task.state_dict().items()}


def distributed(device: str) -> Iterator[tuple[str, Check]]:
    """Yield a fit without process group, and fits in a group of one process, NCCL's on a GPU."""
    import torch
    from pytorch_lightning.strategies import DDPStrategy

    from lightning_sym.tasks import MemberParallelStrategy

    backend = "nccl" if device == "cuda" else "gloo"
    expected: dict[str, Any] = {}

    def alone() -> str:
        with tempfile.TemporaryDirectory() as folder:
            expected.update(trained(device, Path(folder)))
        return f"{len(expected)} tensors"

    def group(strategy: Callable[..., Any]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            found = trained(device, Path(folder), strategy=strategy(process_group_backend=backend))
        used = torch.distributed.get_backend()
        if used != backend:
            raise AssertionError(f"the process group is one of {used}, not of {backend}")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return f"{used}; the weights of a fit without process group"

    yield "without a process group", alone
    yield f"data parallel, {backend}", functools.partial(group, DDPStrategy)
    yield f"members parallel, {backend}", functools.partial(group, MemberParallelStrategy)


def half(device: str) -> Iterator[tuple[str, Check]]:
    """Yield fits in mixed precision: all losses are finite, and the last is below the first."""
    import torch

    fits, scenarios = (importlib.import_module(name) for name in ("fits", "scenarios"))
    from lightning_sym.networks import MultiLayerPerceptron
    from lightning_sym.tasks import StitchingTask, ZooTask

    adam = functools.partial(torch.optim.Adam, lr=0.01)

    def falls(make: Callable[[Path], Any]) -> str:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings = settings_of(device, folder)
            task = make(folder)
            fits.fit(task, fits.digits(), **settings, max_epochs=4, precision="bf16-mixed")
            logged = scenarios.logged(folder / "metrics.csv")
        losses = [value for (_, tag), value in logged.items() if tag == "train/loss"]
        if len(losses) < 2 or not all(map(math.isfinite, losses)) or not losses[-1] < losses[0]:
            raise AssertionError(f"train/loss should be finite and fall, and was {losses}")
        return f"train/loss from {losses[0]:.4f} to {losses[-1]:.4f}"

    def zoo(folder: Path, execution: str) -> Any:
        network = MultiLayerPerceptron(widths=(16,), image_size=8, in_channels=1)
        return ZooTask(network, members=2, execution=execution, optimizer=adam)  # type: ignore[arg-type]

    def stitching(folder: Path) -> Any:
        path = scenarios.zoo_at(folder / "zoo")
        return StitchingTask(path, pairs=[[0, 1]], sites=["activation2"], maps=["full", "group"], optimizer=adam)

    yield "bf16-mixed, zoo, loop", lambda: falls(functools.partial(zoo, execution="loop"))
    yield "bf16-mixed, zoo, vmap", lambda: falls(functools.partial(zoo, execution="vmap"))
    yield "bf16-mixed, stitching", lambda: falls(stitching)


# ---- times, and those of plain code on the same device, in alternating rounds

Table = dict[str, Any]


def on(device: str) -> str:
    """Return the name of the device in torch."""
    return "cpu" if device == "cpu" else "cuda"


def epochs(device: str) -> Iterator[Table]:
    """Yield the times of a zoo's epoch and of a hand-written loop."""
    from lightning_sym.networks import CIFARResNet, MultiLayerPerceptron, MyrtleCNN

    zoo = importlib.import_module("zoo")
    cnn = MyrtleCNN(width=16, in_channels=1, image_size=28)
    mlp = MultiLayerPerceptron(widths=(64, 64), in_channels=1, image_size=8)
    most, members = (40, 8) if device == "cuda" else (4, 2)
    for title, network, data, count, steps in (
        ("MLP 64-64, digits", mlp, zoo.DigitsDataModule(), 4 * members, most),
        ("Myrtle CNN, width 16, MNIST5k", cnn, zoo.MNIST5kDataModule(), members, most),
        ("ResNet-20, 3x32x32", CIFARResNet(depth=20), zoo.RandomImagesDataModule(), members // 2, 20),
    ):
        if network is not mlp and device != "cuda":
            continue  # minutes
        data.setup("fit")
        runs: dict[str, Callable[[], tuple[float, Any]]] = {
            "plain": functools.partial(
                zoo.run_plain, network, data, count, steps, on(device), loader=False, channels_last=False
            )
        }
        for execution in ("loop", "vmap"):
            runs[execution] = functools.partial(
                zoo.run_task, network, data, count, steps, on(device), execution=execution
            )
        rounds = 2 if network is not mlp else 3
        yield alternating(f"An epoch of {title}, {count} members, {steps} steps", runs, rounds)


def alternating(title: str, runs: dict[str, Callable[[], tuple[float, Any]]], rounds: int) -> Table:
    """Time runs that return their own seconds: in turn, in alternating order, after a round that is not counted."""
    import torch

    timing = importlib.import_module("_timing")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, float] = {}
    for number in range(-1, rounds):
        for name in list(runs) if number % 2 else reversed(runs):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            own, _ = runs[name]()
            if torch.cuda.is_available():
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if number >= 0:
                seconds[name].append(own)
    rows = [timing.row(name, own, seconds["plain"]) for name, own in seconds.items()]
    return {"title": title, "rows": [{**row, "peak_mib": peaks.get(row["variant"])} for row in rows]}


def compiled(device: str) -> Iterator[Table]:
    """Yield the times of single training steps of a zoo, with and without ``torch.compile``."""
    import torch
    from torch.nn import functional as F

    from lightning_sym.networks import MultiLayerPerceptron
    from lightning_sym.population import LoopPopulation, VmapPopulation, carry_gradients
    from lightning_sym.tasks.losses import CrossEntropy

    timing = importlib.import_module("_timing")
    network = MultiLayerPerceptron(widths=(64, 64), in_channels=1, image_size=8)
    members = 4
    images = torch.randn(members, 32, 1, 8, 8, device=on(device))
    labels = torch.randint(10, (members, 32), device=on(device))

    def plain(compile: bool) -> Callable[[], None]:
        networks = [network.fresh(number).to(on(device)) for number in range(members)]
        optimizers = [torch.optim.Adam(member.parameters()) for member in networks]
        for member in networks if compile else ():
            member.compile()

        def run() -> None:
            for index, (member, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
                optimizer.zero_grad()
                F.cross_entropy(member(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

        return run

    def ours(kind: Any, compile: bool) -> Callable[[], None]:
        population = kind(network, range(members)).to(on(device))
        optimizer = torch.optim.Adam(population.trainable())
        if compile and kind is LoopPopulation:
            for number in range(members):
                population.network(number).compile()
        elif compile:
            population._call = torch.compile(population._call)

        def run() -> None:
            optimizer.zero_grad()
            step = population.step(images, labels, CrossEntropy())
            carry_gradients(step.losses.mean(), step.gradients, population.trainable()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return run

    kinds: dict[str, Callable[[bool], Callable[[], None]]] = {
        "plain": plain,
        "loop": functools.partial(ours, LoopPopulation),
        "vmap": functools.partial(ours, VmapPopulation),
    }
    runs: dict[str, Callable[[], Any]] = {}
    notes = []
    for compile in (False, True):
        for name, make in kinds.items():
            run = make(compile)
            start = time.perf_counter()
            try:
                run(), run()
            except Exception as error:
                if not compile:
                    raise
                notes.append(f"{name}, compiled: {explained(error)}")
                continue
            runs[f"{name}, compiled" if compile else name] = run
            if compile:
                notes.append(f"{name}: compiled in {time.perf_counter() - start:.0f} s.")
    rounds = 100 if device == "cuda" else 5
    title = f"A training step of MLP 64-64, {members} members, without Lightning"
    yield {"title": title, "rows": timing.timed(runs, rounds), "note": " ".join(notes)}


def stitching(device: str) -> Iterator[Table]:
    """Yield the times of a step of a stitched network."""
    bench: Any = importlib.import_module("stitching")
    if device != "cuda":
        bench.SITES = bench.SITES[:1]  # seconds instead of minutes
    yield from bench.measure_steps(1, on(device))


def curvature(device: str) -> Iterator[Table]:
    """Yield the times of the factored layer and of two contractions, and of passes of KFAC and training."""
    import torch
    from torch import nn

    from lightning_sym.layers import FactoredFullyConnected

    bench, timing = (importlib.import_module(name) for name in ("curvature", "_timing"))
    batch, (before, after) = (128, (10, 20)) if device == "cuda" else (4, (2, 3))

    class Contractions(nn.Module):
        """The layer's formula as two einsums with biases."""

        def __init__(self, positions: int) -> None:
            super().__init__()
            self.theta1 = nn.Parameter(torch.randn(after, before, positions) / positions)
            self.theta2 = nn.Parameter(torch.randn(after, before, positions) / before)
            self.b1, self.b2 = nn.Parameter(torch.zeros(after)), nn.Parameter(torch.zeros(positions))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.einsum("ncx,dcx->ncd", x.flatten(2), self.theta1) + self.b1
            y = torch.einsum("ncd,dcy->ndy", z, self.theta2) + self.b2
            return y.view(len(x), after, *x.shape[2:])

    def training(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4, momentum=0.9)

        def run() -> None:
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()

        return run

    for grid in (16, 32) if device == "cuda" else (8,):
        x = torch.randn(batch, before, grid, grid, device=on(device))
        layers = {"plain": Contractions(grid**2), "F-FC": FactoredFullyConnected(before, after, grid)}
        runs = {name: training(layer.to(on(device)), x) for name, layer in layers.items()}
        title = f"A training step of F-FC, {before} to {after} channels, {grid} x {grid}, batch {batch}"
        yield {"title": title, "rows": timing.timed(runs, 50 if device == "cuda" else 3), "note": "Plain: two einsums."}
    sizes = bench.Sizes(grids=(16,)) if device == "cuda" else bench.QUICK
    yield from bench.measure_passes(sizes, 2 if device == "cuda" else 1, on(device))


def matching(device: str) -> Iterator[Table]:
    """Yield the times of weight matching and of the usual coordinate descent in NumPy."""
    import torch

    from lightning_sym.networks import CIFARResNet18, MultiLayerPerceptron
    from lightning_sym.symmetry import trace_symmetry, weight_matching

    bench, timing = (importlib.import_module(name) for name in ("symmetry", "_timing"))
    width = 512 if device == "cuda" else 16
    mlp = functools.partial(MultiLayerPerceptron, widths=(width,) * 3, in_channels=1, image_size=28)
    for title, make, shape, plain in (
        (f"MLP of three layers of {width} units", mlp, (1, 28, 28), True),
        ("CIFAR ResNet-18", CIFARResNet18, (3, 32, 32), False),
    ):
        if not plain and device != "cuda":
            continue  # minutes
        a, b = bench.two_networks(make)
        group = trace_symmetry(a, torch.randn(2, *shape), check=False)
        ours = functools.partial(weight_matching, group, a, b, scales=False, signs=False)
        runs: dict[str, Callable[[], Any]] = {"ours, CPU": functools.partial(ours, device="cpu")}
        if device != "cpu":
            runs["ours, GPU"] = functools.partial(ours, device="cuda")
        numpy = {"plain": functools.partial(bench.plain_matching, group, a, b)}
        runs = numpy | runs if plain else {"plain": runs.pop("ours, CPU"), **runs}
        distances = {name: found if plain and name == "plain" else found.distance_after
                     for name, found in ((name, run()) for name, run in runs.items())}  # fmt: skip
        note = "Plain: " + ("NumPy on the CPU" if plain else "ours on the CPU") + ". Distance after: "
        note += ", ".join(f"{name} {distance:.4g}" for name, distance in distances.items()) + "."
        yield {"title": f"Match two {title} by weights", "rows": timing.timed(runs, 2 if plain else 1), "note": note}


def tracing(device: str) -> Iterator[Table]:
    """Yield the times of the tracer and of ``torch.export`` for the same networks."""
    import torch
    import torchvision

    from lightning_sym.networks import CIFARResNet
    from lightning_sym.symmetry import trace_symmetry

    timing = importlib.import_module("_timing")
    networks = [("ResNet-20", CIFARResNet(20), 32), ("resnet50", torchvision.models.resnet50(weights=None), 224)]
    for name, network, size in networks if device == "cuda" else networks[:1]:
        network = network.eval().to(on(device))
        x = torch.randn(2, 3, size, size, device=on(device))
        runs = {
            "plain": lambda network=network, x=x: torch.export.export(network, (x,), strict=False),
            "ours, without the self-test": functools.partial(trace_symmetry, network, x, check=False),
            "ours": functools.partial(trace_symmetry, network, x),
        }
        yield {"title": f"Trace {name}", "rows": timing.timed(runs, 2), "note": "Plain: torch.export."}


CHECKS = {"numbers": numbers, "distributed": distributed, "half": half}
TIMES = {
    "zoo": epochs,
    "curvature": curvature,
    "stitching": stitching,
    "matching": matching,
    "tracing": tracing,
    "compiled": compiled,
}


def main(part: str, device: str, file: str, claims: str, only: str = "") -> None:
    """Run a part; of its checks only those with a name that the expression ``only`` matches in full."""
    report = Report(Path(file), LONGEST if device == "cuda" else 10 * LONGEST)
    prepare(part, device)
    report.write(about=about(device))
    if part in CHECKS:
        found = [(name, check) for name, check in CHECKS[part](device) if not only or re.fullmatch(only, name)]
        report.write(count=len(found))
        for name, check in found:
            if claim(Path(claims), name):
                report.run(name, check)
        return
    start = time.perf_counter()
    try:
        for table in TIMES[part](device):
            report.write(table=table)
        error = ""
    except Exception as problem:
        error = explained(problem)
    seconds, status = round(time.perf_counter() - start, 2), "failed" if error else "passed"
    report.write(check="measured", status=status, seconds=seconds, remark="", error=error)


if __name__ == "__main__":
    main(*sys.argv[1:])
