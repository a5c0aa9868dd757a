"""Options of a command line and its files as trees, read without importing torch."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_sym._files import load_yaml
from lightning_sym._text import LARGEST_SEED, initials, nearest
from lightning_sym.cli.catalogue import class_names

Tree = dict[str, Any]

# Keys of a class in YAML that are not its arguments.
_CLASS, _ARGUMENTS = "class_path", ("init_args", "dict_kwargs")
# Options of a command apart from the sections of its classes, and options of the parser itself.
SECTIONS = ("model", "data", "trainer", "checkpoint")
FIGURES = ("figures", "figure_size")
SETTINGS = (
    *("run_dir", "overwrite", "zoo_dir", "log_details", "requires", "seed_everything", "ckpt_path", "config", *FIGURES),
    *("weights_only", "verbose", "return_predictions", "print_config", "help"),
)
_NO_VALUE = "Option '{}' has no value; give one, as in {} VALUE."
_HELP = ("-h", "--help", "--print_config")  # take no value
# Words for options of the commands that have them.
_SYNONYMS = dict.fromkeys(("architecture", "arch", "model", "net", "class"), "network") | {"save": "out", "to": "out"}
# Sizes that follow from the data, and are linked from a datamodule into a task's network.
LINKED = ("in_channels", "image_size", "num_classes")
# Sections with a fixed class, which files do not name.
_FIXED = {"trainer": "pytorch_lightning.Trainer", "checkpoint": "lightning_sym.cli.checkpoints.RunCheckpoint"}


def read_given(args: Sequence[str]) -> list[Tree]:
    """Read the files and options, in order; later ones override earlier ones.

    Options of a class are named as on the command line, without ``init_args``; its name is under ``class_path``.

    Args:
        args: Options after the command; ``--config`` with files or YAML text.

    Raises:
        ValueError: If a text is too long or too deeply nested to be read.
    """
    trees: list[Tree] = []
    for option, value in _pairs(args):
        if option in ("--config", "-c"):
            trees.append(_config(value or ""))
        elif option.startswith("--"):
            tree: Tree = {}
            _place(tree, option.removeprefix("--").split("."), _yaml(value or "", f"What {option} is given"))
            trees.append(tree)
    return trees


def _pairs(args: Sequence[str], flags: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Yield options with their values, None without one; positional words come with an empty option."""
    waiting = ""
    for arg in args:
        if not arg.startswith("-"):
            yield waiting, arg
            waiting = ""
            continue
        if waiting:
            yield waiting, None
        option, given, value = arg.partition("=")
        waiting = "" if given or option in flags else option
        if not waiting:
            yield option, value if given else None
    if waiting:
        yield waiting, None


def separated(args: Sequence[str], flags: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Separate options with their values from positional words.

    Args:
        args: Arguments after the command.
        flags: Names of options without values. They become ``--name=true``, and the next word is positional.
    """
    options: list[str] = []
    names: list[str] = []
    named = [f"--{name}" for name in flags]
    for option, value in _pairs(args, named):
        if not option:
            names.append(str(value))
        elif value is None:
            options.append(f"{option}=true" if option in named else option)
        else:
            options.append(f"{option}={value}")
    return options, names


def read_own(
    command: str, args: Sequence[str], known: Sequence[str], flags: Sequence[str] = ()
) -> tuple[Tree, list[str]]:
    """Read the options and positional words of a command that Lightning does not have; ``--flag=false`` is left out.

    Args:
        command: Name of the command, for errors.
        args: Arguments after the command.
        known: Names of its options.
        flags: Names of those that take no value.

    Raises:
        ValueError: If an option is unknown, or one that takes no value has one.
    """
    options, names = separated(args, flags)
    if wrong := with_one_dash(args):
        raise ValueError(wrong)
    given = merge(read_given(options))
    for name in given:
        if name not in known:
            raise ValueError(f"{command} has no option '{name}'.{meant(name, known)}")
        if name in flags and not isinstance(given[name], bool):
            raise ValueError(f"--{name} takes no value, got {given[name]!r}.")
        if given[name] is None and (name != "prefix" or "--prefix" in options):  # --prefix= is empty
            raise ValueError(_NO_VALUE.format(name, f"--{name}"))
    return {name: value for name, value in given.items() if name not in flags or value}, names


def meant(name: str, known: Sequence[str]) -> str:
    """Return a question with the option that a word means; empty if there is none."""
    return nearest(name, known) or nearest(_SYNONYMS.get(name, name), known)


def whole(given: Tree, name: str, least: int, default: Any = None) -> Any:
    """Return a whole number that was given, or the default.

    Raises:
        ValueError: If it is none, or too small.
    """
    value = given.get(name, default)
    if name in given and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"--{name} takes a whole number >= {least}, got {value!r}.")
    return value


def prefix_of(given: Tree) -> str | None:
    """Return the prefix that was given, which may be empty; None if none was."""
    if "prefix" not in given:
        return None
    return "" if given["prefix"] is None else str(given["prefix"])


def seed_of(given: Tree, default: Any = None) -> Any:
    """Return the seed that was given, or the default.

    Raises:
        ValueError: If it is no whole number, or out of the range of seeds.
    """
    found = whole(given, "seed", 0, default)
    if found is not None and found > LARGEST_SEED:
        raise ValueError(f"--seed takes a whole number from 0 to {LARGEST_SEED}, got {found}.")
    return found


def listed(given: Tree, name: str) -> tuple[str, ...]:
    """Return words that were given with commas, or as a list; none if none were."""
    value = given.get(name, [])
    return tuple(str(one).strip() for one in (value if isinstance(value, list) else str(value).split(",")))


def shape_of(given: Tree) -> tuple[int, ...] | None:
    """Return the shape of one input, written as 3,224,224 (or as a list, or as one number); None if none was given.

    Raises:
        ValueError: If it is no shape.
    """
    if "input" not in given:
        return None
    value = given["input"]
    sizes = value if isinstance(value, list) else re.split(r"\s*[,x]\s*", str(value).strip())
    if not all(re.fullmatch(r"[1-9]\d*", str(size)) for size in sizes):
        raise ValueError(f"--input takes a shape without the batch, such as 3,224,224, got {value}.")
    return tuple(int(size) for size in sizes)


def with_one_dash(args: Sequence[str]) -> str:
    """Return the sentence for an option with one dash, except ``-c`` and ``-h``; empty if there is none.

    Args:
        args: Options after the command.
    """
    for option, _ in _pairs(args, _HELP):
        if re.match(r"-[^-]", option) and option not in ("-c", "-h"):
            return f"Unknown option '{option}'; options begin with two dashes, as in --{option[1:]}."
    return ""


def standing_alone(args: Sequence[str]) -> str:
    """Return the first positional word; empty if there is none.

    Args:
        args: Options after the command.
    """
    return next((str(value) for option, value in _pairs(args, _HELP) if not option), "")


def without_value(args: Sequence[str]) -> str:
    """Return the sentence for an option that is given no value; empty if all have one.

    Args:
        args: Options after the command.
    """
    for option, value in _pairs(args, _HELP):
        given = value or (option == "--prefix" and value is not None)  # --prefix= is empty
        if option and not given and option not in _HELP and not option.endswith(".help"):
            return _NO_VALUE.format(option.lstrip("-"), option)
    return ""


def merge(trees: Sequence[Tree]) -> Tree:
    """Merge trees into one, without the options of classes that later trees replace.

    Args:
        trees: As :func:`read_given` returns them.
    """
    merged: Tree = {}
    for tree in trees:
        _merge(merged, tree)
    return merged


def class_of(node: Any) -> str:
    """Return the class that a node of a tree names; empty if it names none."""
    name = node.get(_CLASS) if isinstance(node, Mapping) else node
    return name if isinstance(name, str) else ""


def arguments_of(node: Any) -> dict[str, Any]:
    """Return the arguments of the class that a node of a tree names."""
    return {key: value for key, value in node.items() if key != _CLASS} if isinstance(node, Mapping) else {}


def classes(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, Tree]]:
    """Yield every class that is named: its dotted path, its name, and its options; options that are text may be none.

    Args:
        tree: As :func:`merge` returns it.
    """
    for section, node in tree.items():
        yield from _classes(section, node, _FIXED.get(section, ""))


def owned(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield every option of a class: the dotted path of its owner, the owner's class, its name and its value.

    Args:
        tree: As :func:`merge` returns it.
    """
    for path, kind, options in classes(tree):
        yield from ((path, kind, name, value) for name, value in options.items() if name != "help")


def unknown_option(tree: Mapping[str, Any], options_of: Callable[[str], frozenset[str] | None]) -> str:
    """Return the sentence for an option that is not one of its class; empty if there is none.

    Args:
        tree: As :func:`merge` returns it.
        options_of: Returns the options of a class by its name; None if they are not known.
    """
    for name, node in tree.items():
        if name not in (*SECTIONS, *SETTINGS):
            rest = "".join(f".{key}" for key in list(node)[:1]) if isinstance(node, Mapping) else ""
            hint = _of_a_class(tree, name, rest, options_of) or nearest(name, (*SECTIONS, *SETTINGS), after=rest)
            return f"Unknown option '{name}{rest}'.{hint}"
    for path, kind, name, _ in owned(tree):
        options = options_of(kind)
        if options is not None and name not in options:
            short = kind.rpartition(".")[2]
            known = nearest(name, options, before=f"{path}.") or _inside(tree, path, name)
            known = known or f" {_help(tree, path, kind)} lists those it has."
            return f"{short} has no option '{path}.{name}'.{known}"
    return ""


def _of_a_class(
    tree: Mapping[str, Any], name: str, rest: str, options_of: Callable[[str], frozenset[str] | None]
) -> str:
    """Return a question with the paths of classes that have an option of this very name; empty if none has it."""
    given = list(owned(tree))
    kinds = {section: _FIXED.get(section) or class_of(tree.get(section)) for section in SECTIONS}
    kinds |= {path: kind for path, kind, _, _ in given}
    found = [path for path, kind in kinds.items() if name in (options_of(kind) or ())]
    found += [path for path, _, key, _ in given if key == name]
    longer = [(path, f"max_{name}") for path, kind in kinds.items() if f"max_{name}" in (options_of(kind) or ())]
    if not found and longer:
        return f" Did you mean {'.'.join(longer[0])!r}?"
    names = dict.fromkeys(f"{path}.{name}{rest}" for path in found)
    return f" Did you mean {' or '.join(map(repr, list(names)[:2]))}?" if names else ""


def _inside(tree: Mapping[str, Any], path: str, name: str) -> str:
    """Return a question with an option of this name, or of these initials, of a class inside of one."""
    found = [f"{inner}.{key}" for inner, _, key, _ in owned(tree) if inner.startswith(f"{path}.")]
    near = [one for one in found if one.rpartition(".")[2] in (name, initials(name))]
    return f" Did you mean {near[0]!r}?" if near else ""


def full_path(tree: Mapping[str, Any], name: str) -> str:
    """Return the path of an option that ends with this name; the name itself if there is none.

    Args:
        tree: As :func:`merge` returns it.
        name: Name of the option, or the end of its path.
    """
    return next((path for path in _paths(tree) if path.endswith(f".{name}")), name)


def _paths(node: Any, path: str = "") -> Iterator[str]:
    for entry in node if isinstance(node, list) else [node]:
        if isinstance(entry, Mapping):
            for key, value in entry.items():
                own = f"{path}.{key}" if path else str(key)
                yield own
                yield from _paths(value, own)


def path_of(tree: Mapping[str, Any], name: str, value: str) -> str:
    """Return the path of the option with this value, from its section on; the name itself if there is none.

    Args:
        tree: As :func:`merge` returns it.
        name: Name of the option, or the end of its path; empty for any.
        value: Value as text; for a class its name as written.
    """
    places = [(section, node) for section, node in tree.items() if section in SECTIONS]
    places += [(f"{path}.{key}", found) for path, _, key, found in owned(tree)]
    paths = [path for path, found in places if value in _texts(found)]
    return next((path for path in paths if f".{path}".endswith(f".{name}" if name else "")), name)


def _texts(found: Any) -> list[str]:
    """Return the value of an option as text, and the classes of its entries."""
    entries = found if isinstance(found, list) else []
    return [str(found), class_of(found), *map(class_of, entries)]


def missing_options(names: Sequence[str], out: str = "merged.safetensors") -> str:
    """Return the sentence for options that a command on checkpoints needs.

    Args:
        names: Their names: ``network``, ``data`` or ``out``.
        out: Example of a value of ``--out``.
    """
    examples = {"network": "my_networks.Net", "data": "MNIST5kDataModule", "out": out}
    given = " ".join(f"--{name} {examples[name]}" for name in names)
    return f"Missing: {', '.join(f'--{name}' for name in names)}; give for example {given}."


def _help(tree: Mapping[str, Any], path: str, kind: str) -> str:
    """Return the command that lists the options of a class."""
    if path in _FIXED:
        return f"lightning-sym fit --help {path}"
    if kind.startswith("lightning_sym.") or kind in class_names():
        return f"lightning-sym fit --help {kind.rpartition('.')[2]}"
    if "." in kind:
        return f"lightning-sym fit --help {kind}"
    section, nested, _ = path.partition(".")
    owner = class_of(tree[section]).rpartition(".")[2] if nested else ""
    return f"lightning-sym fit {f'--{section} {owner} ' if owner else ''}--{path}.help {kind}"


def _classes(path: str, node: Any, kind: str = "") -> Iterator[tuple[str, str, Tree]]:
    if isinstance(node, list):
        for entry in node:
            yield from _classes(path, entry)
        return
    kind = kind or class_of(node)
    options = {name: value for name, value in node.items() if name != _CLASS} if isinstance(node, Mapping) else {}
    if kind:
        yield path, kind, options
    for name, value in options.items():
        yield from _classes(f"{path}.{name}", value)


def _config(value: str) -> Tree:
    try:
        text, source = Path(value).read_text(encoding="utf-8"), value
    except (OSError, ValueError):  # YAML text instead of a file
        text, source = value, "The value of --config"
    content = _plain(_yaml(text, source))
    return content if isinstance(content, dict) else {}


def _plain(value: Any) -> Any:
    """Move the arguments of each class to the level of its name."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    plain: Tree = {}
    for key, entry in value.items():
        if key in _ARGUMENTS and isinstance(entry, Mapping):
            plain |= _plain(entry)
        else:
            plain[str(key)] = _plain(entry)
    return plain


def _place(tree: Tree, path: Sequence[str], value: Any) -> None:
    """Set the value at the end of a path of names; ``name+`` appends to a list."""
    *parents, last = [name for name in path if name not in _ARGUMENTS]
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = _plain(value)


def _merge(node: Tree, other: Tree) -> None:
    for key, value in other.items():
        name = key.removesuffix("+")
        old = node.get(name)
        if key != name:
            node[name] = [*(old if isinstance(old, list) else []), *(value if isinstance(value, list) else [value])]
        elif isinstance(value, dict):
            node[name] = _joined(old, value)
        elif isinstance(old, dict) and isinstance(value, str) and (not class_of(old) or _same(class_of(old), value)):
            # The class that is there already, or that was not named yet: its options stay. Only one of two names may be
            # the full path.
            node[name] = {**old, _CLASS: value if "." in value else class_of(old) or value}
        else:
            node[name] = value


def _joined(old: Any, value: Tree) -> Any:
    if isinstance(old, list) and old:  # options of the entry that was appended last
        return [*old[:-1], _joined(old[-1], value)]
    if isinstance(old, str):
        old = {_CLASS: old}
    joined: Tree = dict(old) if isinstance(old, dict) else {}
    if _CLASS in value and class_of(joined) and not _same(class_of(joined), class_of(value)):
        joined = {}
    _merge(joined, value)
    return joined


def _same(kind: str, other: str) -> bool:
    return kind.rpartition(".")[2] == other.rpartition(".")[2]


def _yaml(text: str, source: str) -> Any:
    try:
        return load_yaml(text, source)
    except yaml.YAMLError:  # the parser reports the error
        return text
