"""Runs scripts of this folder, each in a fork of this process, which has imported what they need and done no more.

Importing torch and Lightning takes several seconds of a processor, and there are a dozen scripts. On each line of
standard input comes a job, ``[script, log, argument, ...]`` in JSON; its exit status goes to standard output.
"""

import json
import os
import runpy
import sys
import traceback

import torch

import lightning_sym.callbacks  # noqa: F401 (brings Lightning and the tasks)


def work(script: str, log: str, arguments: list[str]) -> int:
    """Run a script as if it had been started by itself, with its output in ``log``; return the exit status."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def settle_threads() -> None:
    """Have torch make its pool of threads anew, while the new process has one thread.

    torch does so at the first use after a fork. When that is made by two threads at once, as in a backward pass, one
    of them may find no pool and abort the process: "Invalid thread pool!" in ``ParallelOpenMP.cpp``.
    """
    torch.set_num_threads(torch.get_num_threads())


if __name__ == "__main__":
    os.register_at_fork(after_in_child=settle_threads)
    for line in sys.stdin:
        script, log, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(work(script, log, arguments))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
