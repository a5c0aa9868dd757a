"""Runs the scenario scripts, which fork, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_scenarios() -> Callable[..., None]:
    """Run a script of this folder, and show the end of its errors if it fails."""

    def run(script: str, *arguments: Path | str, timeout: float = 240) -> None:
        result = subprocess.run(
            [sys.executable, Path(__file__).with_name(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]

    return run
