"""Checks of files, folders and modules that a command names; they need no torch, and come before its import."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_sym._checkpoint_files import check_folder, inside
from lightning_sym._measures import MEASURES
from lightning_sym._runs import whole_lines
from lightning_sym._text import unknown
from lightning_sym.cli.given import Tree, classes, merge, owned, read_given
from lightning_sym.cli.requirements import Requirement, check_requirement
from lightning_sym.recipes import recipe_of

# Options of tasks and datamodules that are the folder of a zoo.
_ZOOS = ("zoo", "other_zoo", "target_zoo", "initial")
_DATA = (".pt", ".safetensors", ".npz")
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
# Packages whose classes need not be trusted by name.
_KNOWN = ("lightning_sym", "torch", "torchvision", "pytorch_lightning")


def find_own_modules(args: Sequence[str]) -> None:
    """Make modules of the current folder importable if the command line names them.

    The folder is searched last, so that a file in it replaces no installed package. Names in files are not read.

    Args:
        args: All arguments of a command.
    """
    here = os.getcwd()
    if {"", here} & set(sys.path):
        return
    for before, arg in pairwise(["", *args]):
        option, equals, value = arg.partition("=")
        value = value if equals and option.startswith("--") else "" if arg.startswith("--") else arg
        trusted = (option if equals else before).endswith(".allow")
        names = re.findall(r"[^\W\d]\w*" if trusted else r"(?<![\w./\\-])[^\W\d]\w*(?=[.:][^\W\d])", value)
        if any(os.path.isfile(f"{name}.py") or list(Path(name).glob("*.py")) for name in names):
            sys.path.append(here)
            return


def named_modules(args: Sequence[str]) -> list[str]:
    """Return the modules of classes and functions that options name, except those in files and those that are known.

    A dotted text may also name a file, such as ``digits.npz``. So a name counts only if the parser has imported a class
    or function of that name.

    Args:
        args: Options after the command, which are parsed already.
    """
    typed: list[str] = []
    waiting = False
    for arg in args:
        config = arg.startswith(("--config", "-c"))
        if not (config or waiting):
            typed.append(arg)
        waiting = config and "=" not in arg
    named = [kind for _, kind, _ in classes(merge(read_given(typed))) if kind.partition(".")[0] not in _KNOWN]
    return list(dict.fromkeys(kind.rpartition(".")[0] for kind in named if _is_imported(kind)))


def _is_imported(path: str) -> bool:
    """Return whether a dotted path leads to a class or function in a module that has been imported."""
    module, *rest = path.split(".")
    while rest and f"{module}.{rest[0]}" in sys.modules:
        module, rest = f"{module}.{rest[0]}", rest[1:]
    found: Any = sys.modules.get(module)
    for name in rest:
        found = getattr(found, name, None)
    return bool(rest) and callable(found)


def check_files(files: Sequence[str]) -> None:
    """Check that files exist.

    Raises:
        FileNotFoundError: If one does not.
        ValueError: If one is a folder, or is there twice.
    """
    for place, file in enumerate(files):
        if os.path.isdir(file):
            raise ValueError(f"{file} is a folder; expected the file of a checkpoint.{inside(file)}")
        if not os.path.isfile(file):
            raise FileNotFoundError(f"There is no file {os.path.abspath(file)}.")
        if file in files[:place]:
            raise ValueError(f"{file} is there twice; leave one of them out.")


def is_first_process() -> bool:
    """Test whether this is no further process of a run."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def is_zoo(folder: str | Path) -> bool:
    """Test whether a folder holds a zoo."""
    return any(Path(folder).glob("member-*.safetensors"))


def earlier_run(run_dir: Path) -> list[Path]:
    """Return the files of earlier commands in a run folder, without the zoo.

    Event files alone are none.
    """
    commands = ("", "_validate", "_test", "_predict")
    names = [f"config{command}.yaml" for command in commands]
    names += [*(f"metrics{command}.csv" for command in commands), "checkpoints", "results"]
    paths = [path for path in (run_dir / name for name in names) if path.exists()]
    logs = [run_dir / "hparams.yaml", *run_dir.glob("events.out.tfevents.*")]
    return [*paths, *logs] if paths else []


def check_run_folder(run_dir: Path, *, overwrite: bool) -> list[Path]:
    """Check that a new run may be in a folder.

    Args:
        run_dir: The folder.
        overwrite: Whether a run that is there may be replaced.

    Returns:
        The files of the run that is replaced: one without a finished epoch is in nobody's way.

    Raises:
        ValueError: If there is another run, or files like those of a run.
    """
    check_folder(run_dir)
    earlier = earlier_run(run_dir)
    if earlier and not earlier[0].name.startswith("config"):
        # Without the file that every run has, a folder called results may be anything.
        raise ValueError(
            f"{run_dir} holds {earlier[0].name}, but no config.yaml as a run does, and is not replaced; choose another "
            "folder (--run_dir FOLDER), or delete its contents."
        )
    if earlier and not overwrite and has_epoch(run_dir):
        resumes = (run_dir / "checkpoints" / "last.ckpt").is_file()
        state, todo = ("", "resume it (--ckpt_path last), ") if resumes else (" without a checkpoint", "")
        raise ValueError(
            f"{run_dir} already holds a run{state}; {todo}put this one elsewhere (--run_dir FOLDER), or replace it "
            "(--overwrite true)."
        )
    return earlier


def has_epoch(run_dir: Path) -> bool:
    """Test whether a run has left anything of an epoch: a checkpoint, results, or a row of metrics."""
    inside = [path for name in ("checkpoints", "results") for path in (run_dir / name).glob("[!.]*")]
    tables = list(run_dir.glob("metrics*.csv"))
    other = list(run_dir.glob("config_*.yaml"))  # of a test, for example
    return bool(inside or other) or any(len([*whole_lines(table)]) > 1 for table in tables)


def check_places(command: str, args: Sequence[str], *, zoos: bool = True) -> None:
    """Check what the options of ``fit`` and similar commands name: the run folder, checkpoints, zoos, measures.

    Args:
        command: The command.
        args: Its options, with the files of recipes.
        zoos: Whether to check the folders of zoos.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: If the run folder is taken, or there is no such measure.
    """
    trees = read_given(args)
    given = merge(trees)
    if any(arg.partition("=")[0] in ("-h", "--help", "--print_config") or ".help" in arg for arg in args):
        return
    for path, kind, name, value in owned(given):
        if name == "measures" and kind.rpartition(".")[2].startswith("Similarity"):
            _check_measures(f"{path}.{name}", value)
        if (
            kind.rpartition(".")[2] == "TensorDataModule"
            and name in ("train", "val", "test")
            and isinstance(value, str)
        ):
            _check_data_file(f"{path}.{name}", value)
    if command == "fit" and zoos:
        _check_zoos(given, trees)
    if not is_first_process():
        return  # the first one has begun the run
    trainer = given.get("trainer")
    trial = isinstance(trainer, Mapping) and trainer.get("fast_dev_run")
    run_dir, checkpoint = Path(str(given.get("run_dir", "runs/default"))), given.get("ckpt_path")
    if command != "fit" or checkpoint is not None:
        check_checkpoint(command, run_dir, checkpoint)
    elif not trial:
        check_run_folder(run_dir, overwrite=given.get("overwrite") is True)


def check_checkpoint(command: str, run_dir: Path, checkpoint: object) -> Path:
    """Return the checkpoint of a command.

    Args:
        command: The command.
        run_dir: The run folder.
        checkpoint: Value of ``ckpt_path``: a file, ``last``, or None.

    Raises:
        FileNotFoundError: If it does not exist.
    """
    last = run_dir / "checkpoints" / "last.ckpt"
    if checkpoint is None and not last.is_file():
        raise FileNotFoundError(
            f"Nothing to {command}: {last.absolute()} does not exist; run lightning-sym fit with these options first, "
            "or give another --run_dir or a file as --ckpt_path."
        )
    if checkpoint == "last" and not last.is_file():
        raise FileNotFoundError(
            f"Nothing to resume: {last.absolute()} does not exist (the first checkpoint is written after the first "
            "epoch); start with lightning-sym fit without --ckpt_path, or give another --run_dir or a file as "
            "--ckpt_path."
        )
    file = last if checkpoint in (None, "last") else Path(str(checkpoint))
    if not file.is_file():
        raise FileNotFoundError(f"No checkpoint at {file.absolute()}; give a file, or last.")
    return file


def _check_measures(option: str, value: object) -> None:
    names = list(value) if isinstance(value, list | Mapping) else []
    for name in names:
        settings = value[name] if isinstance(value, Mapping) else None
        kind = settings.get("measure", name) if isinstance(settings, Mapping) else name
        if kind not in MEASURES:
            raise ValueError(f"{option}: {unknown('measure', kind, MEASURES)}")


def _check_data_file(option: str, value: str) -> None:
    file = Path(value).expanduser()
    if file.suffix not in _DATA or not file.is_file():
        wrong = f"There is no file {file.absolute()}" if file.suffix in _DATA else f"{value} is of another type"
        raise ValueError(f"{option}: {wrong}; expected a .pt, .safetensors or .npz file with x and y.")


def _check_zoos(given: Mapping[str, Any], trees: Sequence[Tree]) -> None:
    requires = next((tree["requires"] for tree in reversed(trees) if "requires" in tree), None)  # it replaces others
    made = requires if isinstance(requires, Mapping) else {}
    for path, kind, name, value in owned(given):
        option = f"{path}.{name}"
        if name not in _ZOOS or not isinstance(value, str):
            continue
        if option in made:
            check_requirement(Requirement(option, str(made[option]), Path(value)), trees)
        elif not made and kind.rpartition(".")[0] in ("", "lightning_sym.tasks", "lightning_sym.datamodules"):
            _check_zoo(option, value)


def _check_zoo(option: str, folder: str) -> None:
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{option}: No zoo at {os.path.abspath(folder)}: the folder does not exist. Train one first, for "
            f"example lightning-sym fit --config {recipe_of(folder) or 'zoo/mnist5k'}."
        )
    if not is_zoo(folder):
        raise FileNotFoundError(
            f"{option}: {folder} is no zoo, as it holds no member-0000.safetensors; give another.{inside(folder)}"
        )
