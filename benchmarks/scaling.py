"""Projected cost of large experiments, from constants measured here and public hardware data (docs/scaling-out.md).

    python benchmarks/scaling.py    # measures, in about a minute of one thread, and prints the table of the page

Every line is a product that the code below spells out. Times on a GPU are lower bounds: arithmetic at the peak of the
data sheet times ``SHARE``. Small networks take the time of Python to start the operations of a step, measured here on
negligibly small inputs.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torchvision.models import resnet50

from lightning_sym.networks import CIFARResNet

FLOAT32 = 67e12  # operations per second: NVIDIA H100 data sheet (SXM)
SHARE = 0.35  # achieved share of the peak; 0.46 is published for a tuned language model (arXiv 2204.02311)
NETWORK = 25e9  # bytes per second: NVIDIA ConnectX-6, 200 Gbit/s
DISK = 3e9  # bytes per second: NVMe over PCIe 3.0 x 4 with 3.9e9 on its lanes
COPIES = 5.3  # memory of a merge, in checkpoints of float32 (docs/merging.md)
TOGETHER = 0.34  # cost of a stitching figure in one fit, relative to a fit per site and map (docs/performance.md)


def seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Return the median processor time."""
    work()
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return float(np.median(taken))


def step(network: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """Return a training step."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    labels = torch.zeros(len(inputs), dtype=torch.long)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()

    return run


def products(network: nn.Module, inputs: torch.Tensor) -> float:
    """Return the multiplications of a forward pass for one input, in convolutions and linear layers."""
    found = 0.0

    def count(module: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal found
        weight = module.weight
        found += out[0].numel() * weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        network(inputs[:1])
    for hook in hooks:
        hook.remove()
    return found


def products_of_factors(network: nn.Module) -> float:
    """Return the operations of the outer products for one image of 224 x 224: both factors at each position."""
    found = 0.0

    def count(module: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal found
        weight = module.weight
        found += 2 * out[0].numel() / weight.shape[0] * (weight[0].numel() ** 2 + weight.shape[0] ** 2)

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        network(torch.randn(1, 3, 224, 224))
    for hook in hooks:
        hook.remove()
    return found


def activations(network: nn.Module, inputs: torch.Tensor) -> float:
    """Return the bytes of all modules' outputs, which a training step keeps."""
    found = 0.0

    def count(module: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal found
        found += out.numel() * out.element_size()

    hooks = [m.register_forward_hook(count) for m in network.modules() if not list(m.children())]
    with torch.no_grad():
        network(inputs)
    for hook in hooks:
        hook.remove()
    return found


def factor_sizes(network: nn.Module) -> list[int]:
    """Return the sides of all Kronecker factors."""
    sides = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight
            sides += [weight.shape[0], weight[0].numel() + (module.bias is not None)]
    return sides


def clock(value: float) -> str:
    """Format seconds in a suitable unit, with two digits."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if value >= 2 * length or length == 1:
            return f"{float(f'{value / length:.2g}'):,.10g} {unit}"
    raise AssertionError


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = CIFARResNet(20, in_channels=3, image_size=32, num_classes=10, shortcut="A")
    images = torch.randn(32, 3, 32, 32)
    whole, tiny = seconds(step(small, images)), seconds(step(small, images[:2, :, :8, :8]))
    count, weights = products(small, images), sum(p.numel() for p in small.parameters())
    kept = activations(small, images) / 1e9
    big = resnet50(weights=None)
    large = products(big, torch.randn(1, 3, 224, 224))
    costs = np.random.default_rng(0).standard_normal((2000, 2000))
    assignment = seconds(lambda: linear_sum_assignment(costs), 3)

    matrix = torch.randn(2048, 2048)
    core = 2 * 2048**3 / seconds(lambda: matrix @ matrix)
    print("measured here, one thread, seconds of the processor:")
    print(f"  a step of ResNet-20, 32 images: {whole:.3f}; on 2 images of 8 x 8: {tiny:.4f}")
    print(f"  assignment of 2,000 units: {assignment:.2f}; products of matrices: {core:.1e} operations a second")
    print(f"  products of a forward pass: ResNet-20 {count / 1e6:.0f} million, ResNet-50 {large / 1e9:.2f} billion\n")

    steps = 50 * 45_000 // 32
    arithmetic = 6 * count * 32 / (SHARE * FLOAT32)
    gpu = max(tiny, arithmetic)
    zoo = 1000 * steps * gpu
    print("| experiment | one core | one GPU | 8 GPUs | memory | bytes |")
    print("|---|---|---|---|---|---|")
    print(
        f"| zoo of 1,000 ResNet-20, 50 epochs | {clock(1000 * steps * whole)} | {clock(zoo)} | {clock(zoo / 8)} | "
        f"{kept:.2f} GB of activations a member | {1000 * weights * 4 / 1e9:.1f} GB on disk; network: none "
        "(`ddp_members`) |"
    )
    # Both networks are run, but only the map is trained: about a step of one of them.
    fits = 500 * 19 * 7
    stitch = TOGETHER * fits * 20 * (45_000 // 32)
    print(
        f"| stitching, 500 pairs, 19 sites, 7 maps, 20 epochs | {clock(stitch * whole)} | {clock(stitch * gpu)} | "
        f"{clock(stitch * gpu / 8)} | {2 * kept:.2f} GB of activations a map at most | "
        f"{fits * 64 * 64 * 4 / 1e9:.1f} GB of maps at most; network: "
        "none (job arrays) |"
    )
    # A forward and a backward pass for one random sign; then products of inputs and outputs of layers with themselves.
    images_of = 1_281_167
    curvature = images_of * (6 * large + products_of_factors(big))
    sides = factor_sizes(big)
    held = sum(side**2 for side in sides) * 4
    eigen = 9 * sum(float(side) ** 3 for side in sides)
    fast = SHARE * FLOAT32
    print(
        f"| evidence of ResNet-50, ImageNet, one Monte Carlo pass | {clock((curvature + eigen) / core)} | "
        f"{clock(curvature / fast + eigen / (0.1 * fast))} | {clock(curvature / fast / 8 + eigen / (0.1 * fast))} | "
        f"{held / 1e9:.1f} GB of factors | {2 * 7 / 8 * held / 1e9:.1f} GB a process: "
        f"{clock(2 * 7 / 8 * held / NETWORK)} |"
    )
    # Llama-2 70B (arXiv 2307.09288): 80 layers of width 8,192 with 28,672 units. All rows of their three matrices are
    # compared, with one assignment per layer; its time grows with the third power of the units.
    layers, width, units, parameters = 80, 8192, 28_672, 69e9
    gram = layers * 3 * 2 * units**2 * width
    solved = layers * assignment * (units / 2000) ** 3
    moved = 3 * 2 * parameters
    print(
        f"| merging two checkpoints of 70 billion, one sweep | {clock(gram / core + solved)} | "
        f"{clock(gram / fast + solved)} | {clock(gram / fast / 8 + solved / 8)} | "
        f"{COPIES * 4 * parameters / 1e12:.2f} TB in float32 | "
        f"{moved / 1e12:.2f} TB of files: {clock(moved / DISK)} |"
    )


if __name__ == "__main__":
    main()
