"""Cost of relaxed layers, their curvature and the marginal likelihood, relative to plain alternatives.

Variants take turns, so that drifts in the machine's speed affect all. Uses one thread on a CPU, as a rank would, and
counts processor time there. Run it alone on the machine::

    python benchmarks/curvature.py                    # everything, about half an hour on a CPU core
    python benchmarks/curvature.py --only layers sparse
    python benchmarks/curvature.py --device cuda
    python benchmarks/curvature.py --quick            # everything at tiny sizes, as a test; most of
                                                      # its minute are six short fits of the recipe

Prints tables; without ``--only`` and ``--quick`` it also writes them to ``benchmarks/results/curvature-<device>.json``
and ``.md``.

Plain references:
    layers       the factored layer as linear maps of block-diagonal (one-hot) inputs; torch's circular ``Conv2d``
    steps        the factored layer as two einsums with biases, in a step of SGD with ``backward()``
    sparse       the layers without anchors: ``FactoredFullyConnected`` and ``CircularConv``
    passes       one epoch of training on the same samples, batch 128
    checks       one pass, including the checks at its beginning
    eigenvalues  ``eigvalsh`` of the block-diagonal factor written out as a dense matrix
    recipe       ``equivariance/digits_digit`` without updates of the precisions
"""

import io
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _timing import PARTS, Results, Runs, parser, result, row, run
from _timing import timed as timed_by
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lightning_sym.cli import main as command
from lightning_sym.curvature import Evidence, PrecisionOptimizer, engines, factors, parameter_groups
from lightning_sym.curvature.autograd import AutogradEngine
from lightning_sym.curvature.blocks import symmetric_eigenvalues
from lightning_sym.curvature.passes import pull_back, ready, softmax_root
from lightning_sym.curvature.proof import prove
from lightning_sym.layers import CircularConv, FactoredFullyConnected, SparseConv, SparseFactoredFullyConnected
from lightning_sym.networks import RelaxedNetwork

Layer = Callable[[Tensor], Tensor]
# Other programs may share the CPU.
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiments; the defaults are those of the published numbers."""

    channels: tuple[tuple[int, int], ...] = ((3, 10), (10, 20), (20, 40))
    grids: tuple[int, ...] = (16, 32)
    batch: int = 128
    width: int = 10
    samples: int = 512
    blocks: int = 10
    sides: tuple[int, ...] = (256, 512)  # sides of blocks with a timed dense matrix
    largest: int = 1024
    epochs: int = 20
    every: int = 5
    # Name, samples, width, grid, Monte Carlo columns.
    recipes: tuple[tuple[str, int, int, int, int | None], ...] = (
        ("equivariance/digits_digit", 1438, 4, 16, 1),
        ("equivariance/mnist5k_digit", 4000, 4, 32, 1),
        ("equivariance/digits_digit", 1438, 4, 16, None),
    )


QUICK = Sizes(((2, 3),), (8,), 4, 2, 8, 3, (16, 32), 64, 2, 1, (("equivariance/digits_digit", 8, 2, 8, 1),))


def timed(runs: Runs, rounds: int) -> Results:
    """Time variants in turn, by processor time on the CPU."""
    return timed_by(runs, rounds, clock=CLOCK)


# ---- a: the factored layer, and b: layers with anchors


def one_hot_blocks(x: Tensor) -> Tensor:
    """Reshape inputs ``[N, C, F]`` to ``[N, C, C F]`` with a separate block for each channel, zero elsewhere."""
    count, channels, features = x.shape
    blocks = x.new_zeros(count, channels, channels, features)
    return blocks.diagonal_scatter(x.mT, 0, 1, 2).flatten(2)


def block_diagonal(layer: FactoredFullyConnected, x: Tensor) -> Tensor:
    """Apply a factored layer by two linear maps of block-diagonal inputs (docs/theory/relaxed_layers.md, 1.3)."""
    z = F.linear(one_hot_blocks(x.flatten(2)), layer.theta1.flatten(1), layer.b1)  # [N, C, C']
    y = F.linear(one_hot_blocks(z.mT), layer.theta2.flatten(0, 1).T, layer.b2)  # [N, C', S']
    return y.view(len(x), layer.out_channels, *layer.out_grid)


def forward_backward(layer: Layer, tensors: list[Tensor], gradient: Tensor) -> None:
    """Compute outputs, and gradients of input and parameters."""
    torch.autograd.grad(layer(tensors[0]), tensors, gradient)


def steps(module: nn.Module, x: Tensor, layer: Layer | None = None) -> Callable[[], None]:
    """Return a forward and backward pass of a module, or of another formulation of it."""
    gradient = torch.ones_like(module(x))
    return partial(forward_backward, module if layer is None else layer, [x, *module.parameters()], gradient)


def peak_mib(run: Callable[[], Any], device: str) -> float:
    """Return the growth of the memory of tensors within a run."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak / 2**20


def fits(size: float, device: str) -> bool:
    """Test whether so many bytes are free."""
    if device == "cuda":
        return size < torch.cuda.mem_get_info()[0]
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return not free or size < free[0]


def features(sizes: Sizes, channels: int, grid: int, device: str) -> Tensor:
    """Return random features."""
    return torch.randn(sizes.batch, channels, grid, grid, device=device, requires_grad=True)


def title_of(what: str, sizes: Sizes, channels: tuple[int, int], grid: int) -> str:
    """Return a title."""
    return f"{what}, {channels[0]} to {channels[1]} channels, grid {grid} x {grid}, batch {sizes.batch}"


def measure_layers(sizes: Sizes, rounds: int, device: str) -> Results:
    """Time the factored layer against its block-diagonal formulation, and against a convolution."""
    found = []
    for grid in sizes.grids:
        for channels in sizes.channels:
            x = features(sizes, channels[0], grid, device)
            layer = FactoredFullyConnected(*channels, grid).to(device)
            ours, blocks = steps(layer, x), steps(layer, x, partial(block_diagonal, layer))
            title = title_of("F-FC, forward and backward", sizes, channels, grid)
            # The block-diagonal inputs of both maps and their gradients.
            needed = 2 * 4 * sizes.batch * (channels[0] ** 2 * grid**2 + channels[1] ** 2 * channels[0])
            runs: Runs = {"plain": ours}
            note = f"Plain: F-FC itself. The block-diagonal formulation needs {needed / 2**30:.1f} GiB: left out."
            if fits(1.5 * needed, device):
                torch.testing.assert_close(block_diagonal(layer, x), layer(x), rtol=1e-3, atol=1e-3)
                runs = {"plain": blocks, "F-FC": ours}
                note = "Plain: block-diagonal."
            rows = timed(runs, 4 * rounds)
            memory = {row["variant"]: peak_mib(runs[row["variant"]], device) for row in rows}
            if len(rows) > 1:
                note += f" F-FC is {1 / rows[1]['ratio_to_plain_median']:.1f} times faster."
            note += " Peak memory of tensors: " + ", ".join(f"{name} {m:.1f} MiB" for name, m in memory.items()) + "."
            target = 0.1 if channels == (20, 40) else None
            found.append(result(title, rows, note=note, peak_mib=memory, target_ratio=target))
            if grid == sizes.grids[0]:
                conv = nn.Conv2d(*channels, 3, padding=1, padding_mode="circular").to(device)
                rows = timed(
                    {"plain": steps(conv, x), "F-FC": ours, "CircularConv": steps_of_conv(conv, x)}, 4 * rounds
                )
                title = title_of("F-FC and convolution", sizes, channels, grid)
                found.append(result(title, rows, note="Plain: torch's circular Conv2d, 3 x 3.", target_ratio=1))
    return found


def steps_of_conv(conv: nn.Conv2d, x: Tensor) -> Callable[[], None]:
    """Return a forward and backward pass of our convolution with torch's weights."""
    ours = CircularConv(conv.in_channels, conv.out_channels).to(x.device)
    with torch.no_grad():
        ours.weight.copy_(conv.weight)
        ours.bias.copy_(conv.bias)
    torch.testing.assert_close(ours(x), conv(x), rtol=1e-3, atol=1e-3)
    return steps(ours, x)


class Contractions(nn.Module):
    """The formula of the factored layer as two einsums with biases."""

    def __init__(self, in_channels: int, out_channels: int, positions: int) -> None:
        super().__init__()
        self.theta1 = nn.Parameter(torch.randn(out_channels, in_channels, positions) / positions)
        self.theta2 = nn.Parameter(torch.randn(out_channels, in_channels, positions) / in_channels)
        self.b1, self.b2 = nn.Parameter(torch.zeros(out_channels)), nn.Parameter(torch.zeros(positions))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', H, W]``."""
        z = torch.einsum("ncx,dcx->ncd", x.flatten(2), self.theta1) + self.b1
        y = torch.einsum("ncd,dcy->ndy", z, self.theta2) + self.b2
        return y.view(len(x), -1, *x.shape[2:])


def training_step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a step of SGD with momentum, with the gradient of the input for the layers before."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        layer(x).square().mean().backward()
        optimizer.step()

    return step


def measure_steps(sizes: Sizes, rounds: int, device: str) -> Results:
    """Time training steps of the factored layer against two einsums."""
    found = []
    for grid in sizes.grids:
        for channels in sizes.channels:
            x = features(sizes, channels[0], grid, device)
            layers = {
                "plain": Contractions(*channels, grid**2).to(device),
                "F-FC": FactoredFullyConnected(*channels, grid).to(device),
            }
            with torch.no_grad():
                for own, other in zip(*(layer.parameters() for layer in layers.values()), strict=True):
                    other.copy_(own)
            torch.testing.assert_close(layers["F-FC"](x), layers["plain"](x), rtol=1e-3, atol=1e-3)
            runs: Runs = {name: training_step(layer, x) for name, layer in layers.items()}
            rows = timed(runs, 4 * rounds)
            memory = {name: peak_mib(step, device) for name, step in runs.items()}
            note = "Plain: two einsums with biases. Peak memory of tensors: "
            note += ", ".join(f"{name} {m:.1f} MiB" for name, m in memory.items()) + "."
            title = title_of("A training step with backward() and SGD", sizes, channels, grid)
            found.append(result(title, rows, note=note, peak_mib=memory, target_ratio=1.05))
    return found


def interpolating(sparse: SparseFactoredFullyConnected) -> Callable[[], None]:
    """Return the matrix products of S-FC alone: they interpolate both weights and pull their gradients back."""
    pairs = [(sparse.u1.detach().flatten(0, 1), sparse.phi1), (sparse.u2.detach().mT.contiguous(), sparse.phi2)]

    def products() -> None:
        for values, phi in pairs:
            (values @ phi) @ phi.mT

    return products


def shape_of(phi: Tensor) -> str:
    """Describe an interpolation matrix: its condition number, and the shares of entries that are not small."""
    values, sizes = torch.linalg.svdvals(phi.double().cpu()), phi.abs() / phi.abs().max()
    shares = " and ".join(f"{(sizes > least).double().mean():.0%} above {least:.0e}" for least in (1e-7, 1e-6))
    condition = float(values[0] / values[-1])
    text = f"matrices of {len(phi)} anchors with condition {condition:.0f}"
    return f"{text}; of their entries are {shares} of the largest"


def measure_sparse(sizes: Sizes, rounds: int, device: str) -> Results:
    """Time layers with anchors against those without."""
    found = []
    for grid in sizes.grids:
        for channels in sizes.channels:
            x = features(sizes, channels[0], grid, device)
            pairs: dict[str, tuple[nn.Module, nn.Module]] = {
                "S-FC": (FactoredFullyConnected(*channels, grid), SparseFactoredFullyConnected(*channels, grid)),
                "S-CONV": (CircularConv(*channels), SparseConv(*channels)),
            }
            for name, (plain, sparse) in pairs.items():
                runs: Runs = {"plain": steps(plain.to(device), x), name: steps(sparse.to(device), x)}
                note = f"Plain: {type(plain).__name__}."
                if isinstance(sparse, SparseFactoredFullyConnected):
                    runs["its interpolation alone"] = interpolating(sparse)
                    note += " Last row: the four products of weights, or their gradients, with the interpolations."
                    note += f" These are {shape_of(sparse.phi1)}."
                rows = timed(runs, 4 * rounds)
                title = title_of(f"{name}, forward and backward", sizes, channels, grid)
                found.append(result(title, rows, note=note, target_ratio=1.25))
    return found


# ---- c: passes


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Train for one epoch."""
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


def backward_passes(network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Pull K - 1 columns back to the outputs of all layers, and compute no factor: exact curvature takes longer."""
    with ready(network) as network:
        engine = AutogradEngine(network, "shared", 1)
        for x, _ in batches:
            outputs = engine.forward(x)
            nodes = [output for _, _, output in engine.recorded.values()]
            for column in softmax_root(outputs.detach().softmax(1)).split(1):
                for _ in pull_back(outputs, nodes, column):
                    pass


def measure_passes(sizes: Sizes, rounds: int, device: str) -> Results:
    """Time curvature passes against epochs of training, and the work after a pass."""
    found = []
    for grid in sizes.grids:
        torch.manual_seed(0)
        network = RelaxedNetwork(["ffc", "conv"], sizes.width, grid, 3, 10).to(device)
        x = torch.randn(sizes.samples, 3, grid, grid, device=device)
        y = torch.arange(sizes.samples, device=device) % 10
        batches = list(zip(x.split(sizes.batch), y.split(sizes.batch), strict=True))
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        groups = parameter_groups(network)
        exact = factors(network, batches)

        def evidence(network: nn.Module = network, groups: Any = groups, exact: Any = exact) -> None:
            PrecisionOptimizer(groups.names).update(Evidence.of(network, exact, groups), 20)

        runs: Runs = {"plain": partial(train, network, optimizer, batches)}
        for kind, samples in (("exact", None), ("Monte Carlo", 1)):
            for engine in ("autograd", "backpack"):
                runs[f"{kind}, {engine}"] = partial(factors, network, batches, engine=engine, samples=samples)
        least = "the backward passes of an exact one alone"
        runs[least] = partial(backward_passes, network, batches)
        last = "eigenvalues and 20 steps of the precisions"
        runs[last] = evidence
        rows = timed(runs, rounds)
        seconds = {row["variant"]: row["seconds_median"] for row in rows}
        shares = {name: seconds[last] / seconds[name] for name in runs if name not in ("plain", least, last)}
        listed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
        large = ", ".join(f"{name} {100 * share * sizes.samples / 50_000:.1f} %" for name, share in shares.items())
        note = (
            f"N = {sizes.samples} samples, K = 10, batches of {sizes.batch}. Plain: an epoch of training. "
            "The time of eigenvalues and steps does not depend on N. In per cent of a pass: "
            f"{listed}. By calculation, of a pass over 50,000 samples: {large}."
        )
        title = f"Curvature of RelaxedNetwork(ffc, conv), width {sizes.width}, grid {grid} x {grid}"
        targets = {
            "exact, autograd": 4,
            "exact, backpack": 5,
            "Monte Carlo": 1.5,
            "eigenvalues and steps of a pass": 0.2,
        }
        found.append(result(title, rows, note=note, target_ratio=targets, share_of_a_pass=shares))
    return found


# ---- d: the checks at the beginning of a pass


def measure_checks(sizes: Sizes, rounds: int, device: str) -> Results:
    """Time the checks of a network and its rules as a part of passes over as many data as in the recipes."""
    found = []
    for name, samples, width, grid, columns in sizes.recipes:
        torch.manual_seed(0)
        network = RelaxedNetwork(["ffc", "conv"], width, grid, 1, 10).to(device)
        x = torch.randn(samples, 1, grid, grid, device=device)
        batches = list(zip(x.split(500), (torch.arange(samples, device=device) % 10).split(500), strict=True))
        for engine in engines.ENGINES:
            seconds: list[float] = []

            def timed_prove(*arguments: Any, seconds: list[float] = seconds) -> None:
                start = CLOCK()
                prove(*arguments)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(CLOCK() - start)

            with patch.object(engines, "prove", timed_prove):
                rows = timed({"plain": partial(factors, network, batches, engine=engine, samples=columns)}, rounds)
            own = statistics.median(seconds[1:])
            share = own / rows[0]["seconds_median"]
            note = f"The checks take {1000 * own:.1f} ms of it, {100 * share:.1f} %."
            title = f"The checks in a pass as in {name}, {'exact' if columns is None else 'Monte Carlo'}, {engine}"
            found.append(
                result(title, rows, note=note, seconds_of_checks=own, share_of_a_pass=share, target_share=0.03)
            )
    return found


# ---- e: eigenvalues


def blocks_of(count: int, side: int, device: str) -> Tensor:
    """Return factors A of random inputs. Shape ``[C, S, S]``."""
    x = torch.randn(count, 2 * side, side, generator=torch.Generator().manual_seed(0)).to(device)
    return x.mT @ x / (2 * side)


def once(run: Callable[[], Any], device: str) -> float:
    """Return the seconds of a single run."""
    start = CLOCK()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return CLOCK() - start


def measure_eigenvalues(sizes: Sizes, rounds: int, device: str, dense: bool) -> Results:
    """Time eigenvalues of a block-diagonal matrix against those of the same matrix written out."""
    found = []
    seconds: dict[int, float] = {}  # of dense matrices, by size
    for side in (*sizes.sides, sizes.largest):
        blocks, size = blocks_of(sizes.blocks, side, device), sizes.blocks * side
        own = timed({"plain": partial(symmetric_eigenvalues, blocks, "A")}, rounds)[0]
        if side in sizes.sides or dense:
            whole = torch.block_diag(*blocks)
            seconds[size] = once(partial(symmetric_eigenvalues, whole, "A"), device)
            how = "timed once"
        else:
            (low, high) = sorted(seconds)[-2:]
            order = math.log(seconds[high] / seconds[low]) / math.log(high / low)
            seconds[size] = seconds[high] * (size / high) ** order
            how = (
                f"NOT TIMED but extrapolated from {low} and {high}: time grows as the size to the "
                f"power {order:.2f} (--dense times it)"
            )
        plain = seconds[size]
        ratios = {f"ratio_to_plain_{part}": own[f"seconds_{part}"] / plain for part in PARTS}
        rows = [row("plain", [plain], [plain]), {**own, "variant": "block-diagonal", **ratios}]
        faster = plain / own["seconds_median"]
        note = f"Plain: a dense matrix of {size} x {size}, {how}. Block-diagonal is {faster:.0f} times faster."
        found.append(result(f"Eigenvalues of a factor, C = {sizes.blocks}, S = {side}", rows, note=note))
    return found


# ---- f: a recipe


def fit(epochs: int, options: list[str]) -> None:
    """Run the recipe, from the command line to its figures."""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(output), redirect_stderr(output):
        options = [f"--run_dir={folder}/run", f"--trainer.max_epochs={epochs}", *options]
        status = command(
            ["fit", "--config", "equivariance/digits_digit", "--trainer.enable_progress_bar=false", *options]
        )
    if status:
        raise RuntimeError(output.getvalue())


def measure_recipe(sizes: Sizes, rounds: int, device: str) -> Results:
    """Time the recipe with and without updates of the precisions."""
    accelerator = f"--trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}"
    callback = "--trainer.callbacks"
    without = [accelerator, f"{callback}.burn_in=null"]
    every = [
        accelerator,
        f"--trainer.callbacks.burn_in={sizes.every}",
        f"--trainer.callbacks.every_n_epochs={sizes.every}",
    ]
    ends = "one epoch without updates"
    rows = timed(
        {
            "plain": partial(fit, sizes.epochs, without),
            f"an update every {sizes.every} epochs": partial(fit, sizes.epochs, every),
            ends: partial(fit, 1, without),
        },
        rounds,
    )
    plain, updates, one = (row["seconds_median"] for row in rows)
    note = (
        f"{sizes.epochs} epochs with start, test and figures. Plain: burn_in=null. Line 3 is almost only start and "
        f"end; without its {one:.1f} s the ratio of line 2 is {(updates - one) / (plain - one):.2f}, the limit "
        "of longer runs."
    )
    return [result("The recipe equivariance/digits_digit with and without the callback's updates", rows, note=note)]


def main() -> None:
    """Run the selected parts."""
    options = parser(__doc__, 5, "times four for layers; after one that is not counted")
    options.add_argument(
        "--only", nargs="+", choices=["layers", "steps", "sparse", "passes", "checks", "eigenvalues", "recipe"]
    )
    options.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    options.add_argument("--dense", action="store_true", help="time the largest dense matrix instead of extrapolating")
    options.add_argument("--quick", action="store_true", help="tiny sizes, one round, nothing is written")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    device = arguments.device
    sizes, rounds = (QUICK, 1) if arguments.quick else (Sizes(), arguments.rounds)
    measurements = {
        "layers": partial(measure_layers, sizes, rounds, device),
        "steps": partial(measure_steps, sizes, rounds, device),
        "sparse": partial(measure_sparse, sizes, rounds, device),
        "passes": partial(measure_passes, sizes, rounds, device),
        "checks": partial(measure_checks, sizes, rounds, device),
        "eigenvalues": partial(measure_eigenvalues, sizes, rounds, device, arguments.dense),
        "recipe": partial(measure_recipe, sizes, rounds, device),
    }
    only = arguments.only or (list(measurements) if arguments.quick else None)
    run("curvature", measurements, only, device, rounds)


if __name__ == "__main__":
    main()
