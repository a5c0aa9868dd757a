"""Small runs of the shipped recipes, for guides that take what a recipe has left."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import QUIET, succeed
from guides import Command

from lightning_sym.recipes import recipe_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, as somebody has it who has run nothing yet."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Command, dict[str, Command]], Path]:
    """Return a function that runs a command once, for one short epoch, and returns the folder from which it was run.

    What the command itself needs is made before, by those that the page names. Nothing else is changed but the number
    of digits: recipe, network and members are those of the command. 40 steps make members that are right in four cases
    of five; commands that change a recipe take two, as nobody looks at what they have learned.
    """
    done: dict[Command, Path] = {}

    def run(command: Command, providers: dict[str, Command]) -> Path:
        if command not in done:
            done[command] = tmp_path_factory.mktemp("small")
            for path in sorted(command.needed()):
                shutil.copytree(run(providers[path], providers) / path, done[command] / path, dirs_exist_ok=True)
            shorter = ["--trainer.max_epochs=1", f"--trainer.limit_train_batches={2 if command.options else 40}"]
            if "T_max" in recipe_path(command.recipe).read_text():  # over as many epochs as there are
                shorter.append("--model.lr_scheduler.T_max=1")
            with contextlib.chdir(done[command]):
                succeed(*command.arguments(), *shorter, *QUIET)
        return done[command]

    return run


@pytest.fixture
def have(
    folder: Path, small_run: Callable[[Command, dict[str, Command]], Path], part_of_mnist: None
) -> Callable[[dict[str, Command], set[str]], None]:
    """Return a function that puts what commands have left into the test's folder."""

    def have(providers: dict[str, Command], needed: set[str]) -> None:
        for path in sorted(needed):
            shutil.copytree(small_run(providers[path], providers) / path, folder / path, dirs_exist_ok=True)

    return have
