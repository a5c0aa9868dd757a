"""Choose the tests that `make test` leaves to `make test-long`, by the lines of the product that each test runs.

A costly test becomes long if other quick tests run all its lines. Needs `pip install coverage`, and some 20
minutes of two cores::

    .venv/bin/python tools/quick_tests.py

It writes ``tests/long_tests.txt``, which tests/conftest.py reads.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "long_tests.txt"
FOLDER = "LIGHTNING_SYM_LINES"  # the environment variable that names the folder of the records
AGAIN = 2  # quick tests that must run each line of a test that goes
COSTLY = 0.1  # seconds

Lines = dict[str, tuple[float, frozenset[tuple[str, int]]]]


class Recorder:
    """A plugin of pytest that records the lines and the seconds of each test of a process."""

    def __init__(self, folder: Path) -> None:
        coverage: Any = importlib.import_module("coverage")  # no requirement of the project
        places = [str(ROOT / own) for own in ("lightning_sym", "callbacks", "datamodules", "recipes")]
        self.folder, self.seconds = folder, dict[str, float]()
        file = str(folder / f"{os.getpid()}.coverage")
        self.coverage = coverage.Coverage(data_file=file, source=places, config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count the lines of fixtures, too."""
        self.coverage.switch_context(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure the seconds without fixtures, which tests share."""
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - begun

    def pytest_unconfigure(self) -> None:
        """Write the record of this process."""
        self.coverage.stop()
        data, lines = self.coverage.get_data(), dict[str, list[tuple[str, int]]]()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    lines.setdefault(test, []).append((file, line))
        record = {test: (seconds, lines.get(test, [])) for test, seconds in self.seconds.items()}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(record))


def pytest_configure(config: pytest.Config) -> None:
    """Record the tests of a process that runs some."""
    if FOLDER in os.environ and hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


def chosen(tests: Lines, *, again: int = AGAIN, costly: float = COSTLY) -> list[str]:
    """Return the costly tests that may go, the costliest first.

    Args:
        tests: The seconds and the lines of each test.
        again: How many of the tests that stay must run each line of a test that goes.
        costly: Seconds of the cheapest test that may go.
    """
    count = Counter(line for _, lines in tests.values() for line in lines)
    gone = []
    for test, (seconds, lines) in sorted(tests.items(), key=lambda own: -own[1][0]):
        if seconds >= costly and all(count[line] > again for line in lines):
            count.subtract(lines)
            gone.append(test)
    return gone


def main() -> None:
    """Run all quick tests, those that were long before included, and write the list."""
    with tempfile.TemporaryDirectory() as folder:
        LIST.write_text("")
        options = ["-p", "quick_tests", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-o", "timeout=900"]
        paths = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        own = os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=own, check=True)
        tests: Lines = {}
        for file in Path(folder).glob("*.json"):
            read = json.loads(file.read_text())
            tests |= {name: (own[0], frozenset(map(tuple, own[1]))) for name, own in read.items()}
    gone = chosen(tests)
    LIST.write_text("\n".join(sorted(gone)) + "\n")
    print(f"{len(gone)} of {len(tests)} tests go, with {sum(tests[test][0] for test in gone):.0f} s")


if __name__ == "__main__":
    main()
