"""The command line, ``lightning-sym``.

Only what a command needs is imported: help and the list of recipes do not wait for torch.
"""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from lightning_sym import __version__
from lightning_sym._text import TRACEBACK, USAGE, nearest, unknown

_COMMANDS = {
    "fit": "train, for example: lightning-sym fit --config zoo/mnist5k",
    "validate": "evaluate on the validation split",
    "test": "evaluate the run that a recipe made on the test split: lightning-sym test --config zoo/mnist5k",
    "predict": "predict the test split",
    "import": "make a zoo of checkpoints of yours: lightning-sym import --network my.Net --out runs/mine/zoo a.pt b.pt",
    "merge": "the mean of checkpoints in one order: lightning-sym merge a.pt b.pt --network my.Net --out m.safetensors",
    "symmetry": "what leaves a network's function alone: lightning-sym symmetry torchvision:resnet50",
    "compare": "numbers of several runs side by side, seeds grouped: lightning-sym compare runs/a runs/b",
    "estimate": "what a recipe would cost, before it is run: lightning-sym estimate --config zoo/mnist5k --devices 8",
    "recipes": "list the shipped recipes; with a name, show one",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: The arguments after the program's name; default those of the process.

    Returns:
        The exit status: 0 done, 1 the command failed (one line on standard error says why; the environment
        variable ``LIGHTNING_SYM_TRACEBACK=1`` shows the traceback), 2 it was not understood.
    """
    try:
        status = _command(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()  # here, where a reader that has gone is noticed, not when Python ends
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(f"lightning-sym {__version__}")
        return 0
    command, *rest = _with_negative_numbers(args)
    if command not in _COMMANDS:
        return _misunderstood(unknown("command", command, _COMMANDS))
    if command == "recipes":
        return _recipes(rest)
    if command == "import":
        return _import(rest)
    if command == "merge":
        return _merge(rest)
    if command == "symmetry":
        return _symmetry(rest)
    if command == "compare":
        return _compare(rest)
    if command == "estimate":
        return _estimate(rest)
    try:
        rest = _resolve_configs(rest)
        wrong = _wrong_option(rest)  # before the imports, which take seconds
    except ValueError as error:
        wrong = str(error)
    return _misunderstood(wrong) if wrong else _run([command, *rest])


def _with_negative_numbers(args: list[str]) -> list[str]:
    """Write negative numbers behind the options that they belong to: by themselves they look like options."""
    joined: list[str] = []
    for before, arg in pairwise(["", *args]):
        if re.match(r"-(\.?\d|inf\b)", arg) and re.fullmatch(r"--[^=]+", before):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def _wrong_option(args: list[str]) -> str:
    from lightning_sym.cli.catalogue import shipped_options
    from lightning_sym.cli.given import merge, read_given, standing_alone, unknown_option, without_value

    if alone := standing_alone(args):
        from lightning_sym.recipes import recipe_names

        known = os.path.isfile(alone) or alone.removesuffix(".yaml") in recipe_names()
        todo = f"give it as --config {alone}" if known else "options are --NAME VALUE, a recipe is --config RECIPE"
        return f"{alone!r} belongs to no option; {todo}.{'' if known else nearest(alone, recipe_names())}"
    return unknown_option(merge(read_given(args)), shipped_options) or without_value(args)


def _help() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in _COMMANDS.items())
    return (
        f"lightning-sym {__version__}: experiments on the symmetries of neural networks\n\n"
        f"{USAGE}\n\n"
        f"{commands}\n\n"
        "Options after --config win over it. All of them: lightning-sym fit --help; of one class:\n"
        "lightning-sym fit --model.help lightning_sym.tasks.ZooTask. What would run:\n"
        "lightning-sym fit --config zoo/mnist5k --print_config=skip_default."
    )


def _recipes(args: list[str]) -> int:
    from lightning_sym.recipes import recipe_names, recipe_path, recipe_summary

    if len(args) > 1 or any(arg.startswith("-") for arg in args):
        wanted = args in (["-h"], ["--help"])
        print("usage: lightning-sym recipes [NAME]", file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    try:
        if args:
            print(recipe_path(args[0]).read_text(encoding="utf-8"), end="")
        else:
            width = max(map(len, recipe_names()))
            for name in recipe_names():
                print(f"{name:{width}}  {recipe_summary(name)}")
    except ValueError as error:
        return _misunderstood(str(error))
    return 0


def _resolve_configs(args: list[str]) -> list[str]:
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
    from lightning_sym.recipes import recipe_names, recipe_path

    if os.path.isfile(name):  # False, not an error, for YAML text that is too long for a name
        return _checked_config(name)
    if name.removesuffix(".yaml") in recipe_names():
        return str(recipe_path(name))
    if name.startswith("{") or re.search(r":\s", name) or name.endswith(":"):
        return _checked_config(name, "What --config is given")  # YAML text in place of a file, as jsonargparse allows
    if os.path.isdir(name):
        raise ValueError(f"{name} is a folder; --config takes a file, or the name of a recipe.")
    if name.startswith((".", os.sep)) or name.count("/") > 1:  # no recipe could be meant
        raise ValueError(f"There is no file {os.path.abspath(name)}.")
    hint = nearest(name, recipe_names()) or " lightning-sym recipes lists the recipes."
    raise ValueError(f"There is no recipe or file {name!r}.{hint}")


def _checked_config(name: str, what: str = "") -> str:
    """Check that a file, or text that ``what`` names, is YAML with sections; the parser's own errors name neither."""
    import yaml

    from lightning_sym._documents import load_yaml
    from lightning_sym.cli.given import StrictLoader

    try:
        content = load_yaml(name if what else Path(name).read_text(encoding="utf-8"), what or name, StrictLoader)
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not a text file; --config takes YAML, or the name of a recipe.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{what or name} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{what or name} holds no configuration; expected sections such as model, data and trainer.")
    return name


def _misunderstood(message: str, usage: str = USAGE) -> int:
    print(f"lightning-sym: error: {message}\n{usage}", file=sys.stderr)
    return 2


def _import(args: list[str]) -> int:
    def start() -> None:
        with _no_collection():
            from lightning_sym.cli.importing import import_members

        import_members(args)

    return _guarded(start)


def _merge(args: list[str]) -> int:
    from lightning_sym.cli import merging

    if not args or args[0] in ("-h", "--help"):
        print(merging.HELP)
        return 0
    try:
        asked = merging.read_merge_options(args)
    except ValueError as error:
        return _misunderstood(str(error), merging.USAGE)

    def start() -> None:
        with _no_collection():
            import lightning_sym.cli.models  # noqa: F401 (what merging needs of PyTorch)

        merging.merge_files(asked)

    return _guarded(start)


def _symmetry(args: list[str]) -> int:
    from lightning_sym.cli import symmetry

    if not args or args[0] in ("-h", "--help"):
        print(symmetry.HELP)
        return 0
    try:
        asked = symmetry.read_symmetry_options(args)
    except ValueError as error:
        return _misunderstood(str(error), symmetry.USAGE)

    def start() -> None:
        with _no_collection():
            import lightning_sym.cli.models  # noqa: F401 (what tracing needs of PyTorch)

        symmetry.print_symmetry(asked)

    return _guarded(start)


def _compare(args: list[str]) -> int:
    from lightning_sym.cli import compare

    if not args or args[0] in ("-h", "--help"):
        print(compare.HELP)
        return 0
    try:
        asked = compare.read_compare_options(args)
    except ValueError as error:
        return _misunderstood(str(error), compare.USAGE)
    try:
        runs, left_out = compare.read_runs(asked)
    except ValueError as error:  # what is wrong with a folder is said before the imports, which take seconds
        return _failed(str(error))

    def start() -> None:
        with _no_collection():
            import lightning_sym.reports  # noqa: F401 (what comparing needs, PyTorch too)

        compare.print_comparison(asked, runs, left_out)

    return _guarded(start)


def _estimate(args: list[str]) -> int:
    from lightning_sym.cli import estimate

    began = time.perf_counter()
    if not args or args[0] in ("-h", "--help"):
        print(estimate.HELP)
        return 0
    try:
        asked = estimate.read_estimate_options(args)
        asked = replace(asked, args=tuple(_resolve_configs(list(asked.args))))
        wrong = _wrong_option(list(asked.args))
    except ValueError as error:
        wrong = str(error)
    if wrong:
        return _misunderstood(wrong, estimate.USAGE)

    def start() -> None:
        with _no_collection():
            from lightning_sym.cli.trial import print_estimate

        print_estimate(asked, began)

    return _guarded(start)


def _run(args: list[str]) -> int:
    from lightning_sym.cli.watch import Watch

    def start() -> None:
        with _no_collection():
            from lightning_sym.cli.lightning import RecipeCLI

        RecipeCLI(args=args)

    with Watch() as watch:
        return _guarded(lambda: watch.call(start), resumes=args[0] == "fit")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Import without looking for garbage: a million objects are made, all of them stay, and the search takes seconds.

    Later searches pass them over as well. A process that has imported PyTorch before, such as a test, is left alone.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _guarded(start: Callable[[], None], *, resumes: bool = False) -> int:
    """Call a function; what goes wrong is one sentence and an exit status.

    Args:
        start: The function.
        resumes: Whether it writes checkpoints, from which it can go on.
    """
    try:
        start()
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning has cleaned up after the interrupted fit
            return _interrupted(resumes)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return _interrupted(resumes)
    except BrokenPipeError:
        raise
    except Exception as error:
        from lightning_sym.cli.lightning import RecipeParser
        from lightning_sym.cli.messages import explain, is_expected, root_cause, show_traceback
        from lightning_sym.cli.refusals import name_option

        if show_traceback():
            raise
        cause = root_cause(error)
        said = explain(_sentence(cause))
        said = name_option(said, cause, RecipeParser.given) if is_expected(cause) else f"{type(cause).__name__}: {said}"
        return _failed(said)
    return 0


def _failed(said: str) -> int:
    print(f"lightning-sym: error: {said}", file=sys.stderr)
    print(f"({TRACEBACK}=1 shows the traceback)", file=sys.stderr)
    return 1


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:  # str() would begin with the number
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or repr(error)


def _interrupted(resumes: bool) -> int:
    todo = ""
    if resumes and (module := sys.modules.get("lightning_sym.cli.lightning")):
        run_dir = module.RecipeParser.given.get("run_dir", "runs/default")
        if os.path.isfile(os.path.join(run_dir, "checkpoints", "last.ckpt")):
            todo = "; go on with --ckpt_path last"
        elif os.path.isfile(os.path.join(run_dir, "config.yaml")):
            todo = " before its first checkpoint; start anew with --overwrite true"
    print(f"lightning-sym: interrupted{todo}", file=sys.stderr)
    return 130
