"""What the README and the guides tell people to run, and which folders under runs/ that makes and needs.

A folder is *made* by a command, or by a callback or Trainer in a block of Python; it is *needed* where something is
read from it. People have what the commands of the same page make, and nothing else.
"""

import ast
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_sym.cli.from_files import COMMANDS as FILE_COMMANDS
from lightning_sym.recipes import recipe_names, recipe_path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
_WRITTEN = ("run_dir", "zoo_dir")  # options that say where a run leaves something


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def excerpts(text: str) -> list[str]:
    """Return the excerpts of the files of a folder in ``examples/``, which do not run alone."""
    return [*blocks(text, "py"), *(block for block in blocks(text, "yaml") if block.startswith("run_dir: "))]


def options(text: str) -> list[str]:
    """Return the options with values that a guide names in sentences and tables; of generated pages none."""
    if re.search("`make (?:recipes|results)-page`", text) or first_recipe(text) not in recipe_names():
        return []
    prose = " ".join(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split())
    return re.findall(r"`(--(?:model|data|trainer)\.[\w.]+\+? [^`]+)`", prose)


def first_recipe(text: str) -> str | None:
    """Return the recipe of a guide, the first that it runs; options are its."""
    found = re.search(r"fit --config ([a-z0-9_]+/[a-z0-9_]+)", text)
    return found[1] if found else None


def settings(recipe: str) -> dict[str, Any]:
    """Return what a recipe says."""
    found: dict[str, Any] = yaml.safe_load(recipe_path(recipe).read_text())
    return found


HOMES = {settings(name)["run_dir"]: name for name in recipe_names()}


@dataclass(frozen=True)
class Command:
    """A command line, ``lightning-sym fit --config zoo/mnist5k`` for example.

    Attributes:
        name: ``fit``, ``test``, ...
        recipe: What ``--config`` names.
        options: All others, by name, without dashes.
    """

    name: str
    recipe: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, line: str) -> "Command | None":
        """Read a line; None if no recipe is run by it."""
        _, name, *rest = shlex.split(line.split(" #")[0])
        if name not in ("fit", "validate", "test", "predict"):
            return None
        words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
        pairs = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
        return cls(name, pairs.pop("config"), tuple(pairs.items()))

    def arguments(self) -> list[str]:
        """Return what :func:`lightning_sym.cli.main` takes."""
        return [self.name, "--config", self.recipe, *(f"--{name}={value}" for name, value in self.options)]

    def made(self) -> dict[str, "Command"]:
        """Return the folders that it leaves, each with the command whose result is in it."""
        if self.name != "fit":
            return {}
        given, recipe = dict(self.options), settings(self.recipe)
        run_dir = given.get("run_dir", recipe["run_dir"])
        found = {run_dir: self}
        if recipe["model"]["class_path"].endswith("ZooTask"):
            found[given.get("zoo_dir", f"{run_dir}/zoo")] = self
        if recipe["model"]["class_path"].endswith(".RashomonPruning"):
            own = recipe["model"]["init_args"] | {name.removeprefix("model."): value for name, value in given.items()}
            members, epsilons = (yaml.safe_load(str(own.get(name, 0.01))) for name in ("members", "epsilon"))
            for epsilon in epsilons if isinstance(epsilons, list) else [epsilons]:
                found |= {f"{run_dir}/pruned/member-{member:04d}/epsilon-{epsilon:g}": self for member in members}
        for option, other in recipe.get("requires", {}).items():
            if option not in given:
                found |= self._required(option, other, recipe)
        return found

    @staticmethod
    def _required(option: str, other: str, recipe: dict[str, Any]) -> dict[str, "Command"]:
        """Return what is made for an option by another recipe, elsewhere if with options."""
        name, *options = shlex.split(other)
        if not options:
            return Command("fit", name).made()
        pairs = tuple(tuple(one.removeprefix("--").split("=", 1)) for one in options)
        zoo = functools.reduce(lambda held, name: held[name], option.split(".")[1:], recipe["model"]["init_args"])
        return Command("fit", name, (*pairs, ("run_dir", str(Path(zoo).parent)))).made()

    def needed(self) -> set[str]:
        """Return the folders that have to be there before it runs."""
        read = {value for name, value in self.options if name not in _WRITTEN and value.startswith("runs/")}
        return read if self.name == "fit" else {*read, settings(self.recipe)["run_dir"]}


def demo() -> list[Command]:
    """Return the commands of ``make demo``."""
    makefile = (ROOT / "Makefile").read_text()
    lines = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert lines
    found = [Command.of(line) for line in re.findall(r"(lightning-sym fit .*)$", lines[1], re.MULTILINE)]
    return [Command(c.name, c.recipe, tuple(o for o in c.options if o[0] != "overwrite")) for c in found if c]


def commands(text: str) -> list[Command]:
    """Return what a page tells people to run: lines of shell, ``make demo``, and commands within sentences."""
    shell = [line for block in blocks(text, "bash") for line in block.splitlines() if line.startswith("lightning-sym")]
    lines = [*shell, *re.findall(r"`(lightning-sym fit --config [^`]+)`", text)]
    found = [one for line in lines if (one := Command.of(line))]
    return [*(demo() if "make demo" in text else []), *found]


def option_commands(text: str) -> list[Command]:
    """Return the recipe of a guide with each of the options that it names."""
    recipe = first_recipe(text)
    lines = [f"lightning-sym fit --config {recipe} {cell}" for cell in options(text) if recipe]
    return [one for line in lines if (one := Command.of(line))]


def python_folders(code: str) -> tuple[set[str], set[str]]:
    """Return the folders that a block of Python makes, and those that it needs."""
    tree = ast.parse(code)
    written = [
        value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for value in (
            *(node.args[:1] if ast.unparse(node.func) in ("ZooExport", "ModelZoo.add") else []),
            *(word.value for word in node.keywords if word.arg in ("default_root_dir", "dirpath")),
        )
    ]
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paths = [node for node in named if node.value.startswith("runs/")]
    made = {node.value for node in paths if node in written}
    return made, {node.value for node in paths} - made


def providers(text: str) -> dict[str, Command]:
    """Return all folders that the commands of a page leave, each with the first command that does."""
    made: dict[str, Command] = {}
    for command in commands(text):
        made = command.made() | made
    return made


def faults(text: str) -> list[str]:
    """Say, for a page, which folders under runs/ are not what their users take them for."""
    found, made = [], providers(text)
    for command in (*commands(text), *option_commands(text)):
        for folder, maker in command.made().items():
            home = HOMES.get(folder.removesuffix("/zoo"))
            if home not in (None, maker.recipe):
                found.append(f"{folder} is the folder of {home}, and {maker.recipe} writes there")
    python = [python_folders(code) for code in blocks(text, "python")]
    own = {folder for written, _ in python for folder in written}
    needed = [folder for command in (*commands(text), *option_commands(text)) for folder in sorted(command.needed())]
    needed += [folder for _, read in python for folder in sorted(read)]
    for folder in needed:
        if folder not in made and folder not in own:
            found.append(f"{folder} is needed, and nothing that the page says makes it")
    written = re.findall(r"^run_dir: (\S+)", "".join(excerpts(text)), re.MULTILINE)
    written += re.findall(rf"--(?:{'|'.join(_WRITTEN)}|out)[ =]([\w./-]+)", text)
    written += [f"runs/{name}" for name in FILE_COMMANDS]
    for folder in sorted(set(re.findall(r"\bruns/[a-z0-9_-]+", text))):
        if not any(f"{one}/".startswith(f"{folder}/") for one in (*HOMES, *made, *own, *written)):
            found.append(f"{folder} is named, and no recipe makes it")
    return found


def docstring_folders(file: Path) -> set[str]:
    """Return the folders under runs/ that the examples in a file's docstrings name."""
    examples = re.findall(r"^\s*>>> (.*)$", file.read_text(), re.MULTILINE)
    return {folder for line in examples for folder in re.findall(r"runs/[\w./-]+", line)}


def source_files() -> Sequence[Path]:
    """Return the files of the package."""
    return [path for part in ("lightning_sym", "callbacks", "datamodules") for path in (ROOT / part).rglob("*.py")]
