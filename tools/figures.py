"""Remake the pictures of docs/images by their commands, and report the changed ones.

    make figures                        # those that take minutes
    make figures ONLY=zoo_digits_mlp    # one of them, or several: ONLY='equivalence_*'
    make figures ALL=1                  # all: hours

``tools/figures.yaml`` lists pictures, commands and files. Shared zoos are made once, in ``build/figures``. Results of
an earlier call there are remade, except zoos that a recipe requires. A picture without visible change is kept; a
changed one is replaced. Check it and the numbers in its guide: guide and picture must come from the same run.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TABLE = ROOT / "tools" / "figures.yaml"
WORK = ROOT / "build" / "figures"
LONGEST = 3.0  # minutes of a run that is not selected by name
# Versions of matplotlib's libraries draw letters slightly differently.
_STEP = 32  # of 255: largest difference of an unchanged pixel
_SHARE = 0.001  # largest share of changed pixels in an unchanged picture
_TINT, _AREA = 8, 0.05  # a larger difference on a larger share of the pixels: an area has lost its tint


@dataclass(frozen=True)
class Run:
    """Commands and the pictures that they make.

    Attributes:
        pictures: File below the folder of the run, by the picture's name.
        commands: Commands such as ``lightning-sym ...`` or ``python examples/...``.
        minutes: Processor time on one thread.
    """

    pictures: dict[str, str]
    commands: tuple[str, ...]
    minutes: float


def table() -> list[Run]:
    """Return all runs of the table."""
    entries = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [Run(one["pictures"], tuple(one["commands"]), float(one["minutes"])) for one in entries]


def chosen(runs: Sequence[Run], only: str | None, everything: bool) -> list[Run]:
    """Select the runs to make.

    Args:
        runs: All of them.
        only: A picture's name, or a pattern for several; None for all that take minutes.
        everything: Whether to include longer ones.

    Raises:
        ValueError: If no picture has such a name.
    """
    if only is None:
        return [run for run in runs if everything or run.minutes <= LONGEST]
    found = [run for run in runs if any(fnmatchcase(name, only.removesuffix(".png")) for name in run.pictures)]
    if not found:
        names = ", ".join(sorted(name for run in runs for name in run.pictures))
        raise ValueError(f"No picture is named {only}; there are {names}.")
    return found


def arguments(command: str) -> list[str]:
    """Return the arguments of a process for a command of the table, with this Python."""
    program, *words = shlex.split(command)
    if program == "python":
        return [sys.executable, str(ROOT / words[0]), *words[1:]]
    return [sys.executable, "-m", "lightning_sym.cli", *words, "--overwrite", "true"]


def change(old: Path, new: Path) -> str | None:
    """Describe the change of a picture; None if there is no visible change."""
    if not old.is_file():
        return "new"
    a, b = (np.asarray(Image.open(path).convert("RGB"), dtype=np.int16) for path in (old, new))
    if a.shape != b.shape:
        return f"changed: {b.shape[1]} x {b.shape[0]} pixels, before {a.shape[1]} x {a.shape[0]}"
    by = np.abs(a - b).max(-1)
    share, tinted = float((by > _STEP).mean()), float((by > _TINT).mean())
    changed = max(share, tinted if tinted > _AREA else 0.0)
    return f"changed: {100 * changed:.1f} % of the pixels" if changed > _SHARE else None


def put(new: Path, old: Path) -> None:
    """Replace a picture by another one, with 256 colors if the difference is invisible: a third of the size."""
    image = Image.open(new).convert("RGB")
    small = image.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)  # keeps the colors of areas
    small.save(old, optimize=True)
    if change(old, new) is not None:
        shutil.copyfile(new, old)


def make(run: Run, images: Path = IMAGES, work: Path = WORK) -> Iterator[tuple[str, str]]:
    """Run the commands, and replace the pictures that have changed.

    Args:
        run: Commands and pictures.
        images: Folder of the pictures.
        work: Working folder of the commands.

    Yields:
        Each picture's name, and whether it has changed.

    Raises:
        RuntimeError: If a command fails, or does not make a picture.
    """
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    for command in run.commands:
        with (work / "log.txt").open("w", encoding="utf-8") as log:
            status = subprocess.run(arguments(command), cwd=work, env=environment, stdout=log, stderr=log).returncode
        if status:
            raise RuntimeError(f"{command} ended with status {status}; {work / 'log.txt'} says why.")
    for name, file in run.pictures.items():
        if not (work / file).is_file():
            raise RuntimeError(f"{' and '.join(run.commands)} made no {work / file}; correct tools/figures.yaml.")
        said = change(images / f"{name}.png", work / file)
        if said is not None:
            put(work / file, images / f"{name}.png")
        yield name, said or "unchanged"


def main(args: Sequence[str] | None = None) -> int:
    """Make the selected pictures; return the exit status."""
    parser = argparse.ArgumentParser(description="Remake the pictures of docs/images.")
    parser.add_argument("--only", help="a picture's name, or a pattern for several")
    parser.add_argument("--all", action="store_true", help=f"also those that take more than {LONGEST:g} minutes")
    asked = parser.parse_args(args)
    runs = table()
    try:
        todo = chosen(runs, asked.only or None, asked.all)
    except ValueError as error:
        parser.error(str(error))
    failed = False
    for run in todo:
        print(f"{' and '.join(run.commands)}  (about {run.minutes:g} minutes)", flush=True)
        try:
            for name, said in make(run):
                print(f"  {name}: {said}", flush=True)
        except RuntimeError as error:
            failed = True
            print(f"  failed: {error}", flush=True)
    left = [name for run in runs if run not in todo for name in run.pictures]
    if left and not asked.only:
        print(f"not made, as they take longer (make figures ALL=1, or ONLY=NAME): {', '.join(left)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
