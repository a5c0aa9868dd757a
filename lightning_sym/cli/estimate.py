"""``lightning-sym estimate``: predict the cost of a recipe from a few of its steps.

This module reads the options without importing torch; :mod:`lightning_sym.cli.trial` runs the steps.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from lightning_sym.cli.checking import checked_options
from lightning_sym.cli.given import merge, read_given, whole

USAGE = (
    "usage: lightning-sym estimate --config RECIPE_OR_FILE [--SECTION.NAME VALUE ...] [--devices N] [--bandwidth GB/S]"
)
NEEDS = "lightning_sym.cli.trial"  # imports PyTorch
HELP = f"""{USAGE}

Runs a few steps, a validation, and all that comes after training of a recipe, in a folder that is removed, and says how
long all of it would take on this machine, and how much memory. Options are those of fit, and

  --devices 8       cost of the run on 8 devices like this one, by strategy
  --bandwidth 25    network bandwidth of a process, in gigabytes per second (25: InfiniBand of 200 Gbit/s)
  --steps 30        steps of an epoch that are run; fewer if they take longer than 20 seconds

Method and limits: docs/scaling-out.md."""
_OWN = ("devices", "bandwidth", "steps")


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        args: Options of fit.
        devices: Over how many devices the run is shared out; 0 for one.
        bandwidth: Bandwidth of the network, in bytes per second.
        steps: Steps that are run.
        began: Value of ``time.perf_counter`` when the command began.
    """

    args: tuple[str, ...]
    devices: int
    bandwidth: float
    steps: int
    began: float = field(default_factory=perf_counter, compare=False)


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is unknown or has a wrong value.
    """
    rest: list[str] = []
    mine: list[str] = []
    waiting = False
    for arg in args:
        name = arg.removeprefix("--").partition("=")[0]
        is_mine = arg.startswith("--") and name in _OWN
        (mine if is_mine or waiting else rest).append(arg)
        waiting = is_mine and "=" not in arg
    given = merge(read_given(mine))
    devices, steps, speed = whole(given, "devices", 1, 0), whole(given, "steps", 4, 30), given.get("bandwidth", 25.0)
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed < float("inf"):
        raise ValueError(f"--bandwidth takes a number of gigabytes per second > 0, got {speed!r}.")
    return Asked(tuple(checked_options(rest)), devices, 1e9 * speed, steps)


def run(asked: Asked) -> None:
    """Run the steps and print the costs."""
    trial: Any = importlib.import_module(NEEDS)
    trial.print_estimate(asked)
