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


# Importing torch and Lightning takes seconds of a processor: one process imports them, and each Python script and each
# installed program that a shell script calls runs in a fork of it, which shares nothing else with others.
FORKS = """
import json, os, runpy, socket, sys, traceback
import lightning_sym.callbacks, lightning_sym.cli.lightning, lightning_sym.figures
programs, place = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as door:
    door.bind(place)
    door.listen()
    print("ready", flush=True)
    while True:
        caller, _ = door.accept()
        message, files, _, _ = socket.recv_fds(caller, 1 << 20, 3)
        if not (child := os.fork()):
            status = 1
            try:
                folder, environment, (name, *sys.argv) = json.loads(message)
                os.chdir(folder)
                os.environ.update(environment)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                sys.path[0] = folder
                if (program := os.path.basename(name)) != "script":
                    sys.path[0], sys.argv = programs, [name, *sys.argv]
                runpy.run_path(sys.argv[0] if program == "script" else f"{programs}/{program}", run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        for file in files:
            os.close(file)
        caller.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        caller.close()
"""
CALL = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as caller:
    caller.connect(PLACE)
    socket.send_fds(caller, [json.dumps([os.getcwd(), dict(os.environ), sys.argv]).encode()], [0, 1, 2])
    sys.exit(int(caller.recv(9) or 1))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, Path], None]]:
    """Give a function that runs a script in a folder as people do, in an environment that knows nothing of the source.

    A script that kills what it has started gets the program itself.

    Yields:
        The function, of the script and the folder.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "LIGHTNING_SYM"))}
    own |= {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    calls = tmp_path_factory.mktemp("calls")
    for name in ("lightning-sym", "script"):
        (calls / name).write_text(f"#!{sys.executable} -SE{CALL.replace('PLACE', repr(str(calls / 'door')))}")
        (calls / name).chmod(0o755)
    line = [f"{PROGRAMS}/python", "-c", FORKS, PROGRAMS, str(calls / "door")]
    with subprocess.Popen(line, cwd="/", env=own, stdout=subprocess.PIPE, text=True) as forks:
        assert forks.stdout is not None
        assert forks.stdout.readline() == "ready\n"

        def run(path: Path, folder: Path) -> None:
            for file in (path, *MODULES):
                shutil.copy(file, folder)
            line = [str(calls / "script")] if path.suffix == ".py" else ["sh", "-e"]
            forked = "kill" not in path.read_text()
            there = own | {"PATH": f"{calls}{os.pathsep}{own['PATH']}"} if forked else own
            with open(folder / "log.txt", "w") as log:
                done = subprocess.run([*line, path.name], cwd=folder, env=there, stdout=log, stderr=log)
            said = (folder / "log.txt").read_text()[-3000:]
            assert done.returncode == 0, said
            assert said or path == TRAINING, f"{path.name} says nothing"
            for place in re.findall(r"`(\S+)`", header(path)[2]):
                assert (folder / place).exists(), f"{path.name} makes no {place}: {said}"

        yield run
        forks.kill()


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
