"""Start-up time of commands, compared with importing the libraries that every script of the field imports.

Each is a separate process on one thread, in turn; seconds are processor time, including children. Run it::

    python benchmarks/startup.py                  # commands
    python benchmarks/startup.py --part imports   # lightning_sym.symmetry, compared with torch alone

Prints a table and writes it to ``benchmarks/results/startup-cpu.json`` and ``.md``, imports to ``imports-cpu``.

Variants of commands:
    plain     ``import torch, pytorch_lightning``
    fit       a recipe with the data read, one training step, validation, tables and figures
    options   the resolved options of a recipe: ``--print_config``
    symmetry  the symmetry of torchvision's ResNet-18
    recipes   the list of recipes
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _timing import parser, result, run, timed


def seconds_of_children() -> float:
    """Return the processor time of child processes in seconds."""
    times = os.times()
    return times.children_user + times.children_system


def measure(rounds: int, folder: str) -> list[dict[str, object]]:
    """Time the commands in turn."""
    command = [sys.executable, "-m", "lightning_sym.cli"]
    fit = [*command, "fit", "--config", "zoo/digits_mlp"]
    once = ["--trainer.max_steps", "1", "--run_dir", folder, "--overwrite", "true"]
    commands = {
        "plain": [sys.executable, "-c", "import torch, pytorch_lightning"],
        "fit": [*fit, *once],
        "options": [*fit, "--print_config"],
        "symmetry": [*command, "symmetry", "torchvision:resnet18"],
        "recipes": [*command, "recipes"],
    }
    threads = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    call = partial(subprocess.run, env=threads, cwd=Path(folder).parent, check=True, capture_output=True)
    runs: dict[str, Callable[[], object]] = {name: partial(call, words) for name, words in commands.items()}
    return [result("Commands, from their start to their end", timed(runs, rounds, clock=seconds_of_children))]


def measure_imports(rounds: int) -> list[dict[str, object]]:
    """Time imports in turn."""
    imports = {
        "plain": "import torch",
        "the package": "import torch, lightning_sym.symmetry",
        "trace_symmetry": "from lightning_sym.symmetry import trace_symmetry",
        "all names": "from lightning_sym.symmetry import *",
    }
    # Python keeps compiled modules, as it does for users: only the first round compiles.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    call = partial(subprocess.run, env={**kept, "OMP_NUM_THREADS": "1"}, check=True)
    runs: dict[str, Callable[[], object]] = {
        name: partial(call, [sys.executable, "-c", code]) for name, code in imports.items()
    }
    return [result("Imports, whole processes", timed(runs, rounds, clock=seconds_of_children))]


def main() -> None:
    """Run the benchmark and write the results."""
    found = parser(__doc__, 5)
    found.add_argument("--part", choices=["commands", "imports"], default="commands")
    options = found.parse_args()
    if options.part == "imports":
        run("imports", {"imports": partial(measure_imports, options.rounds)}, None, "cpu", options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        run("startup", {"commands": partial(measure, options.rounds, f"{folder}/run")}, None, "cpu", options.rounds)


if __name__ == "__main__":
    main()
