"""Requirements of a recipe on other recipes, for example a zoo; a missing one is made first."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from jsonargparse import Namespace

from lightning_sym.cli.given import Tree
from lightning_sym.recipes import recipe_of

# A trial of the other recipe: a few steps without logs and checkpoints.
_TRIAL = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--data.max_samples=500",
]
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Requirement:
    """A required folder, and the recipe that makes it.

    Attributes:
        option: Option of the run that names the folder, for example ``"model.zoo"``.
        recipe: Name of the recipe, or a YAML file, with options if necessary.
        folder: The folder.
    """

    option: str
    recipe: str
    folder: Path

    @property
    def met(self) -> bool:
        """Whether the folder is there and holds something."""
        return self.folder.is_dir() and any(not path.name.startswith(".") for path in self.folder.iterdir())


def find_requirements(
    requires: Mapping[str, str] | None, settings: Namespace, given: Sequence[Tree] = ()
) -> list[Requirement]:
    """Return the requirements of a run.

    Args:
        requires: By option, the recipe that makes the folder which the option names, with options if it needs any.
            None for nothing.
        settings: Settings of the run. Options of a class are named as on the command line, without ``init_args``.
        given: Options of each file and of the command line, by :func:`~lightning_sym.cli.given.read_given`.

    Raises:
        ValueError: If an option is not one of the run's, or names no folder; or if it names one that is not there and
            that is not the one to be made: because it was given elsewhere than the recipe that makes it, so that it may
            be a slip of the pen, or because another recipe makes it.

    An option that its own recipe gives, and that later options removed, as ``--model.zoos`` with fewer entries does,
    needs no folder.
    """
    found = []
    for option, recipe in (requires or {}).items():
        try:
            key, entry = _key(settings, option)
        except ValueError:
            if _own_folder(option, given) is None:
                raise
            continue
        folder = settings[key][entry] if entry else settings[key]
        if not isinstance(folder, str | os.PathLike):
            raise ValueError(f"requires names the option {option}, which must be a folder, and is {folder!r}.")
        found.append(Requirement(option, recipe, Path(folder)))
        check_requirement(found[-1], given)
    return found


def check_requirement(requirement: Requirement, given: Sequence[Tree]) -> None:
    """Check that the folder of a requirement is there, or is the one to be made.

    Args:
        requirement: The requirement.
        given: Options of each file and of the command line.

    Raises:
        ValueError: As :func:`find_requirements` does.
    """
    if requirement.met:
        return
    option, recipe, folder = requirement.option, requirement.recipe, requirement.folder
    owner = recipe_of(folder)
    own = _own_folder(option, given)
    if own is not None and Path(own) != folder:
        first = f"run lightning-sym fit --config {owner} first, or " if owner else ""
        wrong = "empty; {}give a folder that is not" if folder.is_dir() else "not there; {}give a folder that is"
        raise ValueError(
            f"{folder}, which --{option} names, is {wrong.format(first)}, or leave the option out: {own} is then made, "
            f"by {recipe}."
        )
    if owner not in (None, recipe):
        raise ValueError(
            f"{folder}, which {option} names, is not there, and this run would make it by {recipe}, though it is the "
            f"folder of {owner}; run lightning-sym fit --config {owner} first, or give another folder as --{option}."
        )


def _own_folder(option: str, given: Sequence[Tree]) -> str | None:
    """Return the folder that is named where the recipe that makes it is; None if that place names none."""
    for tree in reversed(given):
        if option in (tree.get("requires") or {}):
            folder: Any = tree
            for name in option.split("."):
                folder = folder.get(name) if isinstance(folder, Mapping) else None
            return folder if isinstance(folder, str) else None
    return None


def redirect(settings: Namespace, option: str, folder: Path) -> None:
    """Let an option name another folder.

    Args:
        settings: Settings of the run; changed in place.
        option: As for :func:`find_requirements`.
        folder: The new value.
    """
    key, entry = _key(settings, option)
    settings[key] = {**settings[key], entry: str(folder)} if entry else str(folder)


def _key(settings: Namespace, option: str) -> tuple[str, str]:
    """Return the key of an option among the settings, and its name if it is an entry of a dictionary there.

    That is ``model.init_args.zoo`` for ``model.zoo``, ``model.init_args.zoos`` and ``relu`` for ``model.zoos.relu``.
    """
    key = ""
    *others, last = option.split(".")
    for part in (*others, last):
        candidates = [f"{key}.{part}", f"{key}.init_args.{part}"] if key else [part]
        found = next((name for name in candidates if name in settings), "")
        if not found and key and part == last and isinstance(values := settings[key], dict) and last in values:
            return key, last
        key = found
        if not key:
            raise ValueError(f"requires names the option {option!r}, which this run does not have.")
    return key, ""


def make(requirement: Requirement, trainer: Namespace, trial: Path | None = None) -> None:
    """Run the recipe that makes a folder in a separate process, and wait for it.

    The process has the same interpreter, working folder and environment; its progress and messages are seen. Several
    runs that need the same folder wait for the first of them. An interrupted recipe resumes.

    Args:
        requirement: Requirement without its folder.
        trainer: The trainer's settings of this run; the accelerator, and whether there is a progress bar, go on to
            the recipe.
        trial: For a trial of this run: where the recipe is tried too, with two steps. None: it is run in full.

    Raises:
        ValueError: If this process is one of several, or the recipe failed.
        SystemExit: If it was interrupted.
    """
    command = f"lightning-sym fit --config {requirement.recipe}"
    what = f"{requirement.folder}, which {requirement.option} names,"
    launched = [name for name in _LAUNCHED if name in os.environ]
    if launched:
        raise ValueError(
            f"{what} is not there, and is not made by one of several processes ({launched[0]} is set); make it first, "
            f"in a single process: {command} --run_dir {shlex.quote(str(_run_dir(requirement)))}"
        )
    options = [
        f"--trainer.{name}={str(trainer.get(name)).lower()}"
        for name in ("accelerator", "enable_progress_bar", "enable_model_summary")
        if trainer.get(name) not in (None, "auto")
    ]
    if trial is not None:
        _run(
            requirement,
            [*_TRIAL, *options, f"--run_dir={trial}/run-{requirement.folder.name}", f"--zoo_dir={requirement.folder}"],
        )
        return
    run_dir = _run_dir(requirement)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(run_dir.with_name(f".{run_dir.name}.lock")):
        if requirement.met:  # by another run
            return
        print(
            f"{what} is not there: it is made first, by {command}\n"
            f"  (to use another one: --{requirement.option} FOLDER)",
            flush=True,
        )
        options.append(f"--run_dir={run_dir}")
        if requirement.folder != run_dir / "zoo":
            options.append(f"--zoo_dir={requirement.folder}")
        if (run_dir / "checkpoints" / "last.ckpt").is_file():
            options.append("--ckpt_path=last")
        elif (run_dir / "config.yaml").is_file():  # it was interrupted in its first epoch
            options.append("--overwrite=true")
        _run(requirement, options)
    if not requirement.met:
        raise ValueError(
            f"{command} ran, but left nothing in {requirement.folder}; look at its recipe, or give another folder as "
            f"--{requirement.option}."
        )


def _run_dir(requirement: Requirement) -> Path:
    """Return the run folder of the recipe: the parent of the folder that it makes, or a sibling."""
    folder = requirement.folder
    around = folder.parent
    if folder.name == "zoo" and around.name and (not around.exists() or (around / "config.yaml").is_file()):
        return around
    return folder.with_name(f"{folder.name}-run")


def _run(requirement: Requirement, options: Sequence[str]) -> None:
    # Without the current folder at the front of the module path, unless this process has it there.
    safe = [] if {"", os.getcwd()} & set(sys.path[:1]) else ["-P"]
    args = ["fit", "--config", *shlex.split(requirement.recipe), *options]
    sys.stdout.flush()
    with subprocess.Popen([sys.executable, *safe, "-m", "lightning_sym.cli", *args]) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the process also gets the signal, and saves its state
            status = process.wait()
            status = status or 130
    if status == 130:
        print("lightning-sym: interrupted; the same command resumes", file=sys.stderr)
        raise SystemExit(130)
    if status != 0:
        raise ValueError(
            f"{requirement.folder}, which {requirement.option} names, could not be made: lightning-sym fit --config "
            f"{requirement.recipe} ended with status {status}, its message is above; run it by itself, or give another "
            f"folder as --{requirement.option}."
        )
