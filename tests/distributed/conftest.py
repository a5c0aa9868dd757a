"""Runs the scenario scripts, which fork, in processes of their own."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def launcher() -> Iterator[subprocess.Popen[str]]:
    """Start a process that imports torch and Lightning once and forks for each script.

    Yields:
        The process; see ``launcher.py``.
    """
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("launcher.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="session")
def run_scenarios(launcher: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Run a script of this folder, and show the end of its output if it fails."""
    assert launcher.stdin
    assert launcher.stdout

    def run(script: str, *arguments: Path | str, timeout: float = 240) -> None:
        log = tmp_path_factory.mktemp("log") / "output.txt"
        job = [str(Path(__file__).with_name(script)), str(log), *map(str, arguments)]
        launcher.stdin.write(json.dumps(job) + "\n")
        launcher.stdin.flush()
        ready, _, _ = select.select([launcher.stdout], [], [], timeout)
        if not ready:
            os.killpg(launcher.pid, signal.SIGKILL)
            pytest.fail(f"{script} took more than {timeout} s")
        status = launcher.stdout.readline().strip()
        assert status == "0", f"{script} ended with {status or 'its launcher'}: {log.read_text()[-3000:]}"

    return run
