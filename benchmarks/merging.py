"""Time of merging, compared with a plain average of the same files by safetensors in the same run.

Seconds are processor time on one thread, beyond imports. Variants take turns. Run it alone on the machine::

    python benchmarks/merging.py                     # everything
    python benchmarks/merging.py --only resnet50     # a part of it

Each network has random weights; a fine-tune adds noise of 2 percent. Prints tables and writes them to
``benchmarks/results/merging-cpu.json`` and ``.md``.

Variants:
    plain   every tensor of both files is read, averaged in the type of the files, and written to a new file
    trace   the group of the architecture, without translations and without a self-test
    align   the decision that a fine-tune is in order: one reading of both files
    equal   the decision that both compute other functions
    first   the command's function, from files to a new file; traces, as the first merge of an architecture in a process
    ours    the same with the architecture traced before
    moved   as ours, for a copy moved by a random permutation
    mixed   as ours, for a copy moved by random permutations, signs, and matrices in heads
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from _timing import Results, Runs, parser, result, run, timed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_sym.merging import align, merge_checkpoints, traced
from lightning_sym.merging.checkpoint import Checkpoint
from lightning_sym.merging.equality import equality, rounding_of
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.graph.calls import Call

_NOISE = 0.02


def resnet50() -> tuple[nn.Module, Call]:
    """Return a ResNet-50 and an example."""
    from torchvision.models import resnet50

    return resnet50().eval(), Call.of(torch.randn(1, 3, 64, 64))


def gpt2() -> tuple[nn.Module, Call]:
    """Return a GPT-2 with 124 million weights and an example."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()).train(False), Call.of(None, {"input_ids": torch.arange(8)[None]})


def plain_average(files: list[Path], out: Path) -> None:
    """Average the tensors of files."""
    opened = [safe_open(file, "pt") for file in files]  # type: ignore[no-untyped-call]
    means: dict[str, Tensor] = {}
    for name in opened[0].keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (not a dict)
        first, *others = [own.get_tensor(name) for own in opened]  # type: ignore[no-untyped-call]
        means[name] = sum(others, first) / len(opened)
    save_file(means, out)


@torch.no_grad()
def tuned(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the network's parameters with noise."""
    state, generator = dict(network.state_dict()), torch.Generator().manual_seed(1)
    for name, own in network.named_parameters():
        size = _NOISE * float(own.square().mean().sqrt())
        state[name] = own + size * torch.randn(own.shape, generator=generator)
    return state


def measure(name: str, make: Callable[[], tuple[nn.Module, Call]], rounds: int) -> Results:
    """Time the variants for one architecture."""
    torch.manual_seed(0)
    network, call = make()
    symmetry = trace_symmetry(network, *call.positional, check=False, **call.keywords)
    has_heads = bool(symmetry.structure.dense)
    draw = partial(symmetry.sample, scale=0.0, shifts=False)
    drawn = [
        draw(torch.Generator().manual_seed(0), mixing=mixing, signs=mixing)
        for mixing in ((False, True) if has_heads else (False,))
    ]
    moved = [symmetry.act(own, network, check=False).state_dict() for own in drawn]
    with tempfile.TemporaryDirectory() as folder:
        states = [network.state_dict(), tuned(network), *moved]
        files = [Path(folder) / f"{which}.safetensors" for which in range(len(states))]
        unique = {id(own): key for key, own in reversed(network.state_dict(keep_vars=True).items())}
        for file, state in zip(files, states, strict=True):
            save_file({key: state[key].contiguous() for key in unique.values()}, file)
        out = Path(folder) / "merged.safetensors"

        def plain() -> None:
            plain_average(files[:2], out)
            out.unlink()

        def merged(other: Path) -> Any:
            found = merge_checkpoints([files[0], other], out, network=network, inputs=call)
            out.unlink()
            return found

        def first() -> Any:
            traced.forget()
            return merged(files[1])

        one, two = (Checkpoint.read(file, network).network for file in files[:2])
        trace = partial(trace_symmetry, network, *call.positional, check=False, shifts=False, **call.keywords)
        group = trace()
        same = (group.identity(),)
        runs: Runs = {
            "plain": plain,
            "trace": trace,
            "align": lambda: align(group, [one, two]),
            "equal": lambda: equality(group, one, two, same, rounding_of(torch.float32)),
            "first": first,
            "ours": partial(merged, files[1]),
            **dict(zip(("moved", "mixed"), (partial(merged, own) for own in files[2:]), strict=False)),
        }
        note = f"Fine-tune in order: {not align(group, [one, two]).moved}."
        return [result(f"Merge two {name}", timed(runs, rounds, clock=process_time), note=note)]


def main() -> None:
    """Run the benchmark and write the results."""
    makers = {"resnet50": resnet50, "gpt2": gpt2}
    options = parser(__doc__, 3)
    options.add_argument("--only", nargs="+", choices=list(makers))
    given = options.parse_args()
    torch.set_num_threads(1)
    parts = {name: partial(measure, name, make, given.rounds) for name, make in makers.items()}
    run("merging", parts, given.only, "cpu", given.rounds)


if __name__ == "__main__":
    main()
