"""Check the options of ``fit`` and similar commands before slow imports."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_sym._files import StrictLoader, load_yaml
from lightning_sym._text import nearest, unknown
from lightning_sym.cli.catalogue import shipped_options
from lightning_sym.cli.given import merge, read_given, standing_alone, unknown_option, with_one_dash, without_value
from lightning_sym.cli.named import wrong_class
from lightning_sym.recipes import recipe_names, recipe_path

# Words of options that belong to no class.
WORDS = {"figures": ("png", "pdf", "svg"), "figure_size": ("column", "page")}


def checked_options(args: Sequence[str]) -> list[str]:
    """Replace the names of recipes in the options by their files.

    Args:
        args: Options after the command.

    Raises:
        ValueError: If an option is unknown or has no value, or a file or recipe is missing; one sentence says which.
    """
    resolved = _resolved(args)
    if wrong := _wrong_option(resolved):
        raise ValueError(wrong)
    return resolved


def _wrong_option(args: Sequence[str]) -> str:
    if wrong := with_one_dash(args):
        return wrong
    if alone := standing_alone(args):
        known = os.path.isfile(alone) or alone.removesuffix(".yaml") in recipe_names()
        todo = f"give it as --config {alone}" if known else "options are --NAME VALUE, a recipe is --config RECIPE"
        return f"{alone!r} belongs to no option; {todo}.{'' if known else nearest(alone, recipe_names())}"
    given = merge(read_given(args))
    return unknown_option(given, shipped_options) or without_value(args) or wrong_class(given) or _wrong_word(given)


def _wrong_word(given: Mapping[str, Any]) -> str:
    for name, words in WORDS.items():
        if given.get(name) not in (None, *words):
            return unknown(f"word of --{name}", given[name], words)
    return ""


def _resolved(args: Sequence[str]) -> list[str]:
    """Replace names of recipes after ``--config`` by their files."""
    resolved: list[str] = []
    for before, arg in pairwise(["", *args]):
        if before in ("--config", "-c"):
            arg = _config_file(arg)
        elif arg.startswith("--config="):
            arg = "--config=" + _config_file(arg.removeprefix("--config="))
        resolved.append(arg)
    return resolved


def _config_file(name: str) -> str:
    if os.path.isfile(name):  # False, not an error, for YAML text that is too long for a name
        return _checked_config(name)
    if name.removesuffix(".yaml") in recipe_names():
        return str(recipe_path(name))
    if name.startswith("{") or re.search(r":\s", name) or name.endswith(":"):
        return _checked_config(name, "The value of --config")  # YAML text instead of a file, as jsonargparse allows
    if os.path.isdir(name):
        raise ValueError(f"{name} is a folder; --config takes a file, or the name of a recipe.")
    if name.startswith((".", os.sep)) or name.count("/") > 1:  # no recipe could be meant
        raise ValueError(f"There is no file {os.path.abspath(name)}.")
    hint = nearest(name, recipe_names()) or " lightning-sym recipes lists the recipes."
    raise ValueError(f"There is no recipe or file {name!r}.{hint}")


def _checked_config(name: str, what: str = "") -> str:
    """Check that a file, or text that ``what`` names, is YAML with sections; the parser's own errors name neither."""
    try:
        content = load_yaml(name if what else Path(name).read_text(encoding="utf-8"), what or name, StrictLoader)
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not a text file; --config takes YAML, or the name of a recipe.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{what or name} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{what or name} holds no configuration; expected sections such as model, data and trainer.")
    return name
