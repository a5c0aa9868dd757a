"""The scripts of a newcomer's first hour run in a clean folder, with the installed command, and make what they say.

``make wheel-test`` runs them with only the wheel installed: ``FIRST_HOUR_BIN`` is the folder of its programs. In CI
they run there only, as each takes seconds.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "first_hour"
MODULES = sorted(FOLDER.glob("my_*.py"))
TRAINING = FOLDER / "train_two_networks.py"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".py", ".sh") and path not in MODULES)
PROGRAMS = os.environ.get("FIRST_HOUR_BIN", str(Path(sys.executable).parent))


def header(path: Path) -> tuple[str, str, str]:
    """Return task, ``Have`` and ``Get`` of a script: its first three lines."""
    found = re.match(r"# (.+[.?])\n# Have: (.+)\n# Get: (.+)\n", path.read_text())
    assert found, f"{path.name} does not begin with a task, '# Have: ...' and '# Get: ...'."
    return found[1], found[2], found[3]


def row(path: Path) -> str:
    """Return the script's row of the folder's page."""
    return f"|[`{path.name}`]({path.name})|{header(path)[0]}|"


# Importing torch and Lightning takes seconds of a processor: one process imports them, and each Python script runs in a
# fork of it, which shares nothing else with other scripts. On each line comes a folder with the script's name.
FORKS = """
import os, runpy, sys, traceback
import lightning_sym.callbacks, lightning_sym.figures
for line in sys.stdin:
    folder, name = os.path.split(line.strip())
    if not (child := os.fork()):
        status = 1
        try:
            os.chdir(folder)
            log = os.open("log.txt", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1), os.dup2(log, 2)
            sys.path[0], sys.argv = folder, [name]
            runpy.run_path(name, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Path, Path], None]]:
    """Give a function that runs a script in a folder as people do, in an environment that knows nothing of the source.

    Yields:
        The function, of the script and the folder.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "LIGHTNING_SYM"))}
    own |= {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [f"{PROGRAMS}/python", "-c", FORKS], cwd="/", env=own, stdin=pipe, stdout=pipe, text=True
    ) as forks:

        def run(path: Path, folder: Path) -> None:
            for file in (path, *MODULES):
                shutil.copy(file, folder)
            if path.suffix == ".py":
                assert forks.stdin is not None
                assert forks.stdout is not None
                print(folder / path.name, file=forks.stdin, flush=True)
                status = int(forks.stdout.readline())
            else:
                with open(folder / "log.txt", "w") as log:
                    line = ["sh", "-e", path.name]
                    status = subprocess.run(line, cwd=folder, env=own, stdout=log, stderr=log).returncode
            said = (folder / "log.txt").read_text()[-3000:]
            assert status == 0, said
            assert said or path == TRAINING, f"{path.name} says nothing"
            for place in re.findall(r"`(\S+)`", header(path)[2]):
                assert (folder / place).exists(), f"{path.name} makes no {place}: {said}"

        yield run
        forks.stdin.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, run: Callable[[Path, Path], None]) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    run(TRAINING, folder)
    return folder


@pytest.mark.long
@pytest.mark.skipif("CI" in os.environ and "FIRST_HOUR_BIN" not in os.environ, reason="run by make wheel-test")
@pytest.mark.parametrize("path", [path for path in SCRIPTS if path != TRAINING], ids=lambda path: path.stem)
def test_a_script_runs_in_a_clean_folder_and_makes_what_it_says(path, tmp_path, request, run):
    text = path.read_text()
    for package, sign in (("mlflow", "MLFlowLogger"), ("optuna", "import optuna"), ("transformers", "transformers")):
        if sign in text and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    for name in re.findall(r"\w+\.pt\b", header(path)[1]):
        shutil.copy(request.getfixturevalue("checkpoints") / name, tmp_path)
    run(path, tmp_path)


def test_the_page_of_the_folder_lists_all_scripts_as_they_describe_themselves():
    rows = re.findall(r"^\|\[`\w+\.(?:py|sh)`\].*$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert rows == [row(path) for path in SCRIPTS], "\n".join(row(path) for path in SCRIPTS)
    assert f"[{len(SCRIPTS)} scripts]" in (ROOT / "docs" / "your-own.md").read_text()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_reads_nothing_of_the_source(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120
    assert not re.search(r"PYTHONPATH|sys\.path|examples/|tests/|\.\./", path.read_text())
