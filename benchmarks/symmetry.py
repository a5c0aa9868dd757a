"""Time of tracing, acting, matching and canonicalising, compared with plain references in the same run.

Variants take turns, so that drifts in the machine's speed affect all. Run it alone on the machine::

    python benchmarks/symmetry.py                     # everything, about six minutes on two cores
    python benchmarks/symmetry.py --only trace act    # parts of it
    python benchmarks/symmetry.py --device cuda       # gains of the matching on the GPU

Large networks are matched once, in separate processes that show their peak memory; in processor time.

Prints tables and writes them to ``benchmarks/results/symmetry-<device>.json`` and ``.md``.

Plain references:
    trace   ``torch.export.export(network, (x,), strict=False)``: the first step of other tools
    transformers  one forward of GPT-2; building the Llama on the meta device
    act     ``copy.deepcopy(network)``
    match   the usual coordinate descent (all gains of a group from freshly permuted float64 weights, group after group
            until a fixed point), on the same axis groups; for large networks one assignment of
            as many units as the largest group has
    canonicalize  one hand-written sweep for this architecture that gives every convolution's rows norm 1
"""

import copy
import importlib.util
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision
from _timing import Results, Runs, parser, result, row, run, timed
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lightning_sym.networks import CIFARResNet, CIFARResNet18, MultiLayerPerceptron
from lightning_sym.symmetry import Symmetry, canonicalize, trace_symmetry, weight_matching


def torchvision_model(name: str) -> nn.Module:
    """Return a model with random weights."""
    torch.manual_seed(0)
    return torchvision.models.get_model(name, weights=None).eval()


def measure_tracing(rounds: int) -> Results:
    """Time the tracer."""
    torch.manual_seed(0)
    cases = [("ResNet-20", CIFARResNet(20).eval(), 32, 0.3)]
    cases += [(name, torchvision_model(name), 224, limit) for name, limit in (("resnet50", 1.2), ("densenet121", 3))]
    cases += [("vit_b_16", torchvision_model("vit_b_16"), 224, 4)]
    found = []
    for name, network, size, limit in cases:
        x = torch.randn(2, 3, size, size)
        runs: Runs = {
            "plain": lambda network=network, x=x: torch.export.export(network, (x,), strict=False),
            "ours, without the self-test": lambda network=network, x=x: trace_symmetry(network, x, check=False),
            "ours": lambda network=network, x=x: trace_symmetry(network, x),
        }
        found.append(result(f"Trace {name}, 2 x 3 x {size} x {size}", timed(runs, rounds), target_seconds=limit))
    return found


def gpt2() -> nn.Module:
    """Return GPT-2 with 124 million random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    network: nn.Module = GPT2LMHeadModel(GPT2Config()).eval()
    return network


def measure_transformers(rounds: int) -> Results:
    """Time the tracer on GPT-2, and on the shapes of a Llama of 8 billion parameters, in a separate process."""
    if not importlib.util.find_spec("transformers"):
        return []
    network, tokens = gpt2(), torch.randint(50257, (2, 16))
    runs: Runs = {
        "plain": lambda: network(tokens),
        "ours, without the self-test": lambda: trace_symmetry(network, input_ids=tokens, check=False),
        "ours": lambda: trace_symmetry(network, input_ids=tokens),
    }
    title, note = "Trace GPT-2, 124 million parameters, 2 x 16 tokens", "Target without the self-test: 4 s."
    found = [result(title, timed(runs, rounds), target_seconds=12, note=note)]
    code = (
        "import time, torch, transformers; from lightning_sym.symmetry import trace_symmetry\n"
        "sizes = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,"
        " num_attention_heads=32, num_key_value_heads=8)\n"
        "start = time.perf_counter()\n"
        "with torch.device('meta'): network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()\n"
    )
    tracing = (
        "start = time.perf_counter(); print(trace_symmetry(network, input_ids=torch.arange(16)[None]).dimension)\n"
    )
    # Count from the start of the program: ru_maxrss includes the memory of this process.
    ending = (
        "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]\n"
        "print(time.perf_counter() - start, int(peak) / 2**20)"
    )

    def llama(what: str) -> list[float]:
        """Return the output of a separate process; its imports are not timed."""
        command = [sys.executable, "-c", code + what + ending]
        return [
            float(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        ]

    building, before = llama("")[-2:]
    dimension, seconds, memory = llama(tracing)[-3:]
    rows = [row("plain", [building], [building]), row("ours", [seconds], [building])]
    note = (
        f"Dimension {int(dimension):,}. Plain: the model is built. Peak memory of a process that imports and builds it "
        f"{before:.2f} GiB, that also traces it {memory:.2f} GiB (target: at most 2)."
    )
    found.append(result("Trace the shapes of a Llama of 8 billion parameters", rows, target_seconds=60, note=note))
    return found


def measure_acting(rounds: int) -> Results:
    """Time one action on resnet50, vit_b_16 and GPT-2."""
    found = []
    for name, size, count, limit in (("resnet50", 64, 10 * rounds, 2), ("vit_b_16", 224, rounds, None)):
        network = torchvision_model(name)
        symmetry = trace_symmetry(network, torch.randn(2, 3, size, size), check=False)
        found.append(_acting(f"One action on {name}", network, symmetry, count, limit))
    if importlib.util.find_spec("transformers"):
        network = gpt2()
        symmetry = trace_symmetry(network, input_ids=torch.randint(50257, (2, 16)), check=False)
        found.append(_acting("One action on GPT-2", network, symmetry, rounds, 3))
    return found


def _acting(title: str, network: nn.Module, symmetry: Symmetry, rounds: int, ratio: float | None) -> dict[str, Any]:
    element = symmetry.sample(torch.Generator().manual_seed(0))
    permutation = symmetry.sample(torch.Generator().manual_seed(0), scale=0, signs=False, mixing=False, shifts=False)
    unmixed = symmetry.sample(torch.Generator().manual_seed(0), mixing=False)
    other = copy.deepcopy(network)
    runs: Runs = {
        "plain": lambda: copy.deepcopy(network),
        "act, a new network": lambda: symmetry.act(element, network),
        "act, in place": lambda: symmetry.act(element, other, inplace=True),
        "act, without matrices": lambda: symmetry.act(unmixed, network),
        "act, permutations only": lambda: symmetry.act(permutation, network),
        "sample": lambda: symmetry.sample(torch.Generator().manual_seed(0)),
    }
    return result(title, timed(runs, rounds), target_ratio=ratio)


def plain_matching(symmetry: Symmetry, a: nn.Module, b: nn.Module, seed: int = 0) -> float:
    """Match weights in the usual way: permute everything, compute all gains of one group, assign, repeat.

    Returns:
        The final distance of the parameters.
    """
    first = {name: p.detach().double().numpy() for name, p in a.named_parameters()}
    second = {name: p.detach().double().numpy() for name, p in b.named_parameters()}
    assignment = {group.name: np.arange(group.size) for group in symmetry.groups}
    places: dict[str, list[tuple[str, int, np.ndarray]]] = {name: [] for name in first}
    for group in symmetry.groups:
        for occurrence in group.occurrences:
            if occurrence.is_parameter:
                places[occurrence.tensor].append((group.name, occurrence.axis, occurrence.positions.numpy()))

    def permuted(name: str, without: str) -> np.ndarray:
        tensor = second[name]
        for group, axis, positions in places[name]:
            if group != without:
                source = np.arange(tensor.shape[axis])
                source[positions] = positions[assignment[group]]
                tensor = np.take(tensor, source, axis)
        return tensor

    generator = np.random.default_rng(seed)
    improved = True
    while improved:
        improved = False
        for index in generator.permutation(len(symmetry.groups)):
            group = symmetry.groups[index]
            gain = np.zeros((group.size, group.size))
            for occurrence in group.occurrences:
                if not occurrence.is_parameter:
                    continue
                positions = occurrence.positions.numpy()
                moved = [
                    np.moveaxis(t, occurrence.axis, 0)[positions].reshape(group.size, -1)
                    for t in (first[occurrence.tensor], permuted(occurrence.tensor, group.name))
                ]
                gain += moved[0] @ moved[1].T
            before = gain[np.arange(group.size), assignment[group.name]].sum()
            _, best = linear_sum_assignment(gain, maximize=True)
            if gain[np.arange(group.size), best].sum() > before + 1e-12:
                assignment[group.name], improved = best, True
    return math.sqrt(sum(float(((first[name] - permuted(name, "")) ** 2).sum()) for name in first))


def two_networks(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return two networks of one architecture from two seeds."""
    networks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks.append(make().eval())
    return networks[0], networks[1]


def measure_matching(rounds: int, device: str) -> Results:
    """Time weight matching."""
    found = []
    for title, make, shape, limit in (
        ("MLP 784-512-512-512-10", lambda: MultiLayerPerceptron(in_channels=1, image_size=28), (1, 28, 28), 2),
        ("CIFAR ResNet-18", lambda: CIFARResNet18(), (3, 32, 32), None),
    ):
        a, b = two_networks(make)
        symmetry = trace_symmetry(a, torch.randn(2, *shape), check=False)
        runs: Runs = {
            "plain": lambda s=symmetry, a=a, b=b: plain_matching(s, a, b),
            "ours, permutations only": lambda s=symmetry, a=a, b=b: weight_matching(
                s, a, b, scales=False, signs=False, device=device
            ),
            "ours": lambda s=symmetry, a=a, b=b: weight_matching(s, a, b, device=device),
        }
        match = weight_matching(symmetry, a, b, device=device)
        permuted = weight_matching(symmetry, a, b, scales=False, signs=False, device=device)
        note = (
            "Two random initialisations, the hardest case: nothing matches well. "
            f"Ours took {match.sweeps} sweeps. Distance before {match.distance_before:.2f}; after: plain "
            f"{plain_matching(symmetry, a, b):.2f}, ours, permutations only {permuted.distance_after:.2f}, "
            f"ours {match.distance_after:.2f}."
        )
        count = rounds if limit else 1
        found.append(result(f"Match {title}", timed(runs, count), target_seconds=limit, note=note))
    return found


LARGE: dict[str, tuple[str, tuple[int, int, int], int]] = {
    "ViT-B/16": ("torchvision.models.vit_b_16(weights=None)", (3, 224, 224), 3072),
    "CCT-7/3x1": ("CompactTransformer()", (3, 32, 32), 512),
    "ResNet-50": ("torchvision.models.resnet50(weights=None)", (3, 64, 64), 2048),
    "MLP of four layers of 2,000 units": (
        "nn.Sequential(nn.Flatten(), nn.Linear(784, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), "
        "nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 10))",
        (1, 28, 28),
        2000,
    ),
}
_MATCHING = """
import gc, time, torch, torchvision
from pathlib import Path
from scipy.optimize import linear_sum_assignment
from torch import nn
from lightning_sym.networks import CompactTransformer
from lightning_sym.symmetry import trace_symmetry, weight_matching

def status(word):
    return int(Path("/proc/self/status").read_text().split(word + ":")[1].split()[0]) * 1024

networks = []
for seed in (0, 1):
    torch.manual_seed(seed)
    networks.append({make}.eval())
a, b = networks
symmetry = trace_symmetry(a, torch.randn(2, *{shape}), check=False)
size = sum(tensor.numel() * tensor.element_size() for tensor in a.state_dict().values())
gains = torch.randn({units}, {units}, dtype=torch.float64).numpy()
start = time.process_time()
linear_sum_assignment(gains)
plain = time.process_time() - start
del gains
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
before, start = status("VmRSS"), time.process_time()
match = weight_matching(symmetry, a, b)
seconds = time.process_time() - start
print(plain, seconds, (status("VmHWM") - before) / size, match.sweeps, match.distance_before, match.distance_after)
"""


def measure_large_matching() -> Results:
    """Time weight matching of large networks, and measure its memory, each in a separate process (on Linux)."""
    found = []
    for title, (make, shape, units) in LARGE.items():
        code = _MATCHING.format(make=make, shape=shape, units=units)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        plain, seconds, memory, sweeps, before, after = (float(word) for word in done.stdout.split())
        note = (
            f"Two random initialisations; processor time. Peak memory beyond the two networks: {memory:.1f} times "
            f"one of them, including the transformed network. {sweeps:.0f} sweeps, from a distance of {before:.4g} to "
            f"{after:.4g}. Plain: one assignment of {units} units."
        )
        rows = [row("plain", [plain], [plain]), row("ours", [seconds], [plain])]
        found.append(result(f"Match two {title} by weights", rows, note=note))
    return found


@torch.no_grad()
def plain_gauge(network: nn.Module) -> nn.Module:
    """Give the rows of every convolution of a ResNet norm 1, and adapt its batch norm: one gauge, hand-written."""
    network = copy.deepcopy(network)
    modules = dict(network.named_modules())
    for name, conv in modules.items():
        if not isinstance(conv, nn.Conv2d):
            continue
        norm = modules[
            name.replace("conv", "bn") if "downsample" not in name else name.replace("downsample.0", "downsample.1")
        ]
        scale: Tensor = 1 / conv.weight.flatten(1).norm(dim=1)
        conv.weight.mul_(scale[:, None, None, None])
        norm.running_mean.mul_(scale)
        norm.running_var.copy_(scale**2 * (norm.running_var + norm.eps) - norm.eps)
    return network


def measure_canonical_forms(rounds: int) -> Results:
    """Time the canonical form of resnet50."""
    network = torchvision_model("resnet50")
    symmetry = trace_symmetry(network, torch.randn(2, 3, 64, 64), check=False)
    runs: Runs = {
        "plain": lambda: plain_gauge(network),
        "scales only": lambda: canonicalize(symmetry, network, signs=False, order=False),
        "ours": lambda: canonicalize(symmetry, network),
    }
    return [result("Canonical form of resnet50", timed(runs, 2 * rounds), target_seconds=1)]


def main() -> None:
    """Run the benchmark and write the results."""
    options = parser(__doc__, 3)
    options.add_argument(
        "--only", nargs="+", choices=["trace", "transformers", "act", "match", "large", "canonicalize"]
    )
    arguments = options.parse_args()
    rounds, device = arguments.rounds, arguments.device
    warnings.simplefilter("ignore")
    parts = {
        "trace": partial(measure_tracing, rounds),
        "transformers": partial(measure_transformers, rounds),
        "act": partial(measure_acting, rounds),
        "match": partial(measure_matching, rounds, device),
        "large": measure_large_matching,
        "canonicalize": partial(measure_canonical_forms, rounds),
    }
    run("symmetry", parts, arguments.only, device, rounds)


if __name__ == "__main__":
    main()
