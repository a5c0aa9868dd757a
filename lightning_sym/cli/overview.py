"""Help on ``fit`` and similar commands, one screen at a time, read from the source without importing torch."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

from lightning_sym._text import nearest, unknown
from lightning_sym.cli.catalogue import TRAINER, class_names, definition_of, summaries

_SECTIONS = {
    "model": "the experiment: its class, and --model.NAME for its arguments (members, zoo, pairs, optimizer, ...)",
    "network": "--model.network: a network of lightning_sym, or your own class (my_networks.Net)",
    "data": "the data: a class, and --data.NAME for its arguments (batch_size, max_samples, ...)",
    "callbacks": "--trainer.callbacks+=NAME adds one, and --trainer.callbacks.NAME sets an argument of it",
    "trainer": "Lightning's Trainer: max_epochs, devices, accelerator, precision, ...",
    "checkpoint": "Lightning's ModelCheckpoint: every_n_epochs, monitor, save_top_k, ...",
}
_ROOMS = {"model": "tasks", "network": "networks", "data": "datamodules", "callbacks": "callbacks"}
_CLASSES = {"trainer": TRAINER, "checkpoint": "pytorch_lightning.callbacks.ModelCheckpoint"}
_OPTIONS = {
    "--config RECIPE_OR_FILE": "a shipped recipe (lightning-sym recipes) or a YAML file; later ones win",
    "--run_dir FOLDER": "all files of the run: config.yaml, logs, checkpoints/, results/; default runs/default",
    "--overwrite true": "replace the run in that folder",
    "--ckpt_path last": "resume the run in that folder, or from a file",
    "--zoo_dir FOLDER": "where members are exported; default zoo/ in the run folder",
    "--requires null": "do not make inputs, such as a zoo, by the recipes that the recipe names",
    "--seed_everything 0": "seed of everything that has no seed of its own",
    "--log_details true": "curves of single members, pairs and layers in TensorBoard as well",
    "--print_config=skip_default": "print all settings instead of running",
}
_WIDTH = 100


def overview(command: str, part: str = "") -> str:
    """Return the help on a command: an overview, or the classes or options of one part.

    Args:
        command: ``fit`` or a similar command.
        part: A section, the name of one of our classes, the full path of another one, or nothing.

    Raises:
        ValueError: If there is no such section or class.
    """
    if not part or part.startswith("-"):
        return _overview(command)
    if part in _ROOMS:
        listed = dict(summaries(_ROOMS[part]))
        width = max(map(len, listed))
        option = {"network": "model.network", "callbacks": "trainer.callbacks"}.get(part, part)
        lines = [f"  {name:{width}}  {_plain(text)}" for name, text in listed.items()]
        head = (
            f"--{option} NAME, one of these or the full path of a class; lightning-sym {command} --help NAME shows its"
        )
        return "\n".join([f"{head} options.", "", *lines])
    kind = _CLASSES.get(part, part)
    definition = definition_of(kind) or _imported(kind)
    if definition is None:
        said = unknown("section", part, _SECTIONS)
        hint = "" if "Did you mean" in said else nearest(part, class_names())
        raise ValueError(f"{said}{hint} Also the name of a class of lightning_sym, or the full path of another class.")
    rows = list(_arguments(definition))
    return "\n".join([_summary(definition, part), "", *(line for row in rows for line in row)])


def _imported(kind: str) -> ast.ClassDef | None:
    """Return the definition of a class by its full path, which is imported; None if there is none."""
    module, _, name = kind.rpartition(".")
    try:
        text = inspect.getsource(getattr(importlib.import_module(module), name)) if module else ""
    except (ImportError, AttributeError, TypeError, OSError):
        return None
    found = ast.parse(textwrap.dedent(text)).body[:1]
    return found[0] if found and isinstance(found[0], ast.ClassDef) else None


def _overview(command: str) -> str:
    width = max(map(len, _OPTIONS))
    options = [f"  {name:{width}}  {text}" for name, text in _OPTIONS.items()]
    sections = [f"  {name:10}  {text}" for name, text in _SECTIONS.items()]
    return "\n".join(
        [
            f"usage: lightning-sym {command} [--config RECIPE_OR_FILE] [--SECTION.NAME VALUE ...]",
            "",
            f"  lightning-sym {command} --config zoo/mnist5k",
            f"  lightning-sym {command} --config zoo/digits_mlp --model.members 8 --run_dir runs/mine",
            f"  lightning-sym {command} --config mine.yaml --model.network my_networks.Net --model.network.width 8",
            "",
            *options,
            "",
            f"Sections (lightning-sym {command} --help SECTION), and classes (lightning-sym {command} --help ZooTask):",
            "",
            *sections,
        ]
    )


def _summary(definition: ast.ClassDef, part: str) -> str:
    first = _plain((ast.get_docstring(definition) or "").partition("\n\n")[0].replace("\n", " "))
    option = f"--{part}." if part in _CLASSES else "--SECTION."
    return f"{definition.name}{': ' if first else ''}{first}\n\nArguments, as {option}NAME VALUE:"


def _arguments(definition: ast.ClassDef) -> Iterator[list[str]]:
    """Yield the lines on each argument of a constructor: its name, default, type and description."""
    made = next((one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made is None:  # the constructor of a base
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in definition.bases]
        above = [definition_of(base.id) for base in bases if isinstance(base, ast.Name)]
        yield from next(filter(None, (list(_arguments(one)) for one in above if one is not None)), [])
        return
    told = _documented(ast.get_docstring(definition) or "") | _documented(ast.get_docstring(made) or "")
    plain = [*made.args.posonlyargs, *made.args.args]
    defaults = [None] * (len(plain) - len(made.args.defaults)) + list(made.args.defaults)
    pairs = [*zip(plain, defaults, strict=True), *zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)]
    for argument, default in pairs:
        if argument.arg == "self":
            continue
        value = "" if default is None else f" = {ast.unparse(default)}"
        kind = "" if argument.annotation is None else ast.unparse(argument.annotation).strip("'")
        text = told.get(argument.arg, "")
        yield [f"  {argument.arg}{value}  ({kind})" if kind else f"  {argument.arg}{value}", *_wrapped(text)]


def _documented(docstring: str) -> dict[str, str]:
    """Return the descriptions of arguments in a docstring of Google's style, each on one line."""
    block = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if block is None:
        return {}
    found: dict[str, str] = {}
    depth = len(block[1]) - len(block[1].lstrip(" "))
    name = ""
    for line in block[1].splitlines():
        start = re.match(rf" {{{depth}}}(\w+)(?: \([^)]*\))?:(.*)", line)
        if start:
            name = start[1]
            found[name] = start[2].strip()
        elif name and not line.strip().startswith(".."):
            found[name] += f" {line.strip()}" if line.strip() else ""
    return {name: _plain(text).strip() for name, text in found.items()}


def _plain(text: str) -> str:
    """Return text without the marks of reStructuredText."""
    return re.sub(r":\w+:`~?(?:lightning_sym\.\w+\.)?([^`]*)`|``", r"\1", text)


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 7 > _WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [f"      {line}" for line in lines if line]
