"""Experiments as files: run by name with ``lightning-sym fit --config NAME``.

A recipe's first line is its summary; the rest of its header gives question, source, expected result, time
and hardware.
"""

import re
from pathlib import Path

from lightning_sym._text import nearest

_FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Return the names of all shipped recipes, for example ``"zoo/mnist5k"``, sorted."""
    return sorted(path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.glob("*/*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe.

    Args:
        name: For example ``"zoo/mnist5k"``; a trailing ``.yaml`` is accepted.

    Raises:
        ValueError: If there is no such recipe; the message names the nearest one.
    """
    name = name.removesuffix(".yaml")
    if name not in recipe_names():
        hint = nearest(name, recipe_names()) or " lightning-sym recipes lists them."
        raise ValueError(f"Unknown recipe {name!r}.{hint}")
    return _FOLDER / f"{name}.yaml"


def recipe_of(folder: str | Path) -> str | None:
    """Return the recipe of the zoo in a folder such as ``runs/zoo-mnist5k/zoo``, or None.

    Depends on the folder's name only, not on its content.
    """
    own = {f"runs/{name.replace('/', '-').replace('_', '-')}/zoo": name for name in recipe_names()}
    name = own.get(Path(*Path(folder).parts[-3:]).as_posix(), "")
    return name if name.startswith("zoo/") else None


def recipe_summary(name: str) -> str:
    """Return the first line of a recipe's header."""
    return recipe_path(name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ").strip()


def recipe_header(name: str) -> dict[str, str]:
    """Parse a recipe's header: ``summary``, ``question``, ``source``, ``expected``, ``time``, ``hardware``.

    For a recipe that was never run completely, ``time`` holds options for a first look instead.
    """
    lines = recipe_path(name).read_text(encoding="utf-8").splitlines()
    found = {"summary": lines[0].lstrip("# ").strip()}
    key = "summary"
    for line in lines[1 : next(index for index, line in enumerate(lines) if not line.startswith("#"))]:
        if match := re.match(r"# (\w+): +(\S.*)", line):
            key = match[1]
            found[key] = match[2]
        elif text := line.removeprefix("#").strip():
            found[key] += " " + text
    return found


def never_run(name: str) -> bool:
    """Test whether a recipe was never run completely, according to its header."""
    return recipe_header(name)["time"].startswith("a first look: ")
