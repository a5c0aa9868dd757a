"""Runs of several processes, each started by a fork of a process that has imported what they need and done no more.

A test module has a function ``scenarios(run, ...)``; the fixture ``runs`` calls it in such a process, with a
:class:`Scenarios` and, for other arguments, fixtures of these names (paths), and gives the folder of the results.

Run as a script this file is the process that forks: importing torch and Lightning takes several seconds of a
processor, and there are a dozen modules. On each line of standard input comes a job in JSON, ``[module, log, folder,
arguments]``; its exit status goes to standard output.
"""

import gc
import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard  # noqa: F401
from fits import digits, fit, saving
from helpers import as_pixel, replace_traces
from pytorch_lightning import Callback, LightningModule

import lightning_sym.callbacks  # noqa: F401 (brings the tasks and whatever else scenarios need)
import lightning_sym.cli.lightning  # noqa: F401
from lightning_sym.callbacks import publishing
from lightning_sym.symmetry import completeness, trace_symmetry


class Scenarios:
    """Runs scenarios one after the other and collects what went other than it should.

    Args:
        folder: Where results go; each scenario has a subfolder of its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.surprises: list[str] = []

    def __call__(self, name: str, action: Callable[..., Any], fails: str | None = None, **settings: Any) -> None:
        """Call ``action(folder / name, **settings)``.

        Args:
            name: The scenario's name.
            action: What it does.
            fails: Text in the last line of the error that it must end with; without it there must be none.
            **settings: Passed on.
        """
        try:
            action(self.folder / name, **settings)
        except Exception as error:
            if fails is None or fails not in str(error).strip().splitlines()[-1]:
                self.surprises.append(f"Scenario {name!r} should end with {fails}:\n{traceback.format_exc()}")
        else:
            if fails is not None:
                self.surprises.append(f"Scenario {name!r} should end with {fails}, and it ended well.")

    def fit(
        self,
        name: str,
        task: LightningModule,
        data: Any,
        *callbacks: Callback,
        processes: int = 1,
        strategy: str = "ddp_fork",
        fails: str | None = None,
        **settings: Any,
    ) -> None:
        """Fit a task in one or several processes that fork, and write ``last.ckpt``.

        One process comes last: a process that has taken gradients cannot fork. See :func:`fits.fit` for the settings.
        """
        parallel = {"devices": processes, "strategy": strategy if processes > 1 else "auto"}

        def action(path: Path) -> None:
            fit(task, data, *callbacks, saving(path), folder=path, **parallel, **settings)

        self(name, action, fails)

    def processes(self, world: int, work: Callable[[int, int, Path], Mapping[str, Any]]) -> None:
        """Call ``work(rank, world, folder)`` in ``world`` forked processes; each leaves ``<world> <rank>.pt``."""
        store = f"file://{self.folder / f'store {world}'}"
        arguments = (world, work, self.folder, store)
        torch.multiprocessing.start_processes(_work, arguments, nprocs=world, start_method="fork")

    def finish(self) -> None:
        """End the process with an error if a scenario did not end as it should."""
        if self.surprises:
            sys.exit("\n".join(self.surprises))


def _work(rank: int, world: int, work: Callable[..., Mapping[str, Any]], folder: Path, store: str) -> None:
    if world > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
    torch.save(dict(work(rank, world, folder)), folder / f"{world} {rank}.pt")
    if world > 1:
        torch.distributed.destroy_process_group()


def outcome(work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Return what a call returns, or its error as ``"Type: sentence"``; for :meth:`Scenarios.processes`."""
    try:
        return work(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def load(folder: Path, world: int) -> list[dict[str, Any]]:
    """Return what the ranks of :meth:`Scenarios.processes` left."""
    return [torch.load(folder / f"{world} {rank}.pt", weights_only=True) for rank in range(world)]


# ---- the process that forks


def settle_threads() -> None:
    """Have torch make its pool of threads anew, while the new process has one thread.

    torch does so at the first use after a fork. When that is made by two threads at once, as in a backward pass, one
    of them may find no pool and abort the process: "Invalid thread pool!" in ``ParallelOpenMP.cpp``.
    """
    torch.set_num_threads(torch.get_num_threads())


def work(module: str, log: str, folder: str, arguments: dict[str, str]) -> int:
    """Run the scenarios of a test module with their output in ``log``, and return the exit status."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        specification = importlib.util.spec_from_file_location(Path(module).stem, module)
        tests = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = tests
        specification.loader.exec_module(tests)
        run = Scenarios(Path(folder))
        tests.scenarios(run, **{name: Path(path) for name, path in arguments.items()})
        run.finish()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    # Each process would learn anew how letters are drawn.
    publishing.publish_figure = as_pixel(publishing.publish_figure)
    # As in other tests about other things than symmetries: see conftest.py.
    completeness.MOST_PARAMETERS = 0
    replace_traces(lambda *arguments, **options: trace_symmetry(*arguments, **{**options, "check": False}))
    digits().load()  # kept for all
    os.register_at_fork(after_in_child=settle_threads)
    gc.freeze()  # or the collector of each process would look through all that was imported, and so copy its pages
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(work(*job))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
