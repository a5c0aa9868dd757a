"""The command line, ``lightning-sym``.

Each command imports only its own modules: help and the list of recipes do not wait for torch.
"""

import gc
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_sym import __version__
from lightning_sym._text import TRACEBACK, USAGE, unknown

_COMMANDS = {
    "fit": "train, for example: lightning-sym fit --config zoo/mnist5k",
    "validate": "evaluate on the validation split",
    "test": "evaluate the run that a recipe made on the test split: lightning-sym test --config zoo/mnist5k",
    "predict": "predict the test split",
    "import": "make a zoo of your checkpoints: lightning-sym import a.pt b.pt --network my.Net --out runs/mine/zoo",
    "spectrum": "sharpness of checkpoints: lightning-sym spectrum a.pt --network my.Net --data MNIST5kDataModule",
    "learning-coefficient": "estimate local learning coefficients of checkpoints, by SGLD chains",
    "evidence": "marginal likelihood (Laplace) and effective parameters of checkpoints",
    "similarity": "compare the layers of checkpoints: lightning-sym similarity a.pt b.pt --network my.Net --data ...",
    "curve": "train low-loss curves between checkpoints: lightning-sym curve a.pt b.pt --network my.Net --data ...",
    "merge": "align and average checkpoints: lightning-sym merge a.pt b.pt --network my.Net --out m.safetensors",
    "reparametrize": "minimise an objective of weights; the function stays: lightning-sym reparametrize --help",
    "symmetry": "derive the symmetry group of a network: lightning-sym symmetry torchvision:resnet50",
    "compare": "compare the results of runs, with seeds grouped: lightning-sym compare runs/a runs/b",
    "estimate": "predict the cost of a recipe: lightning-sym estimate --config zoo/mnist5k --devices 8",
    "recipes": "list the shipped recipes; with a name, show one",
}


FILE_COMMANDS = ("spectrum", "learning-coefficient", "evidence", "similarity", "curve")
# Commands that Lightning does not have, and the modules that read their options without PyTorch.
_MODULES = {
    **{"merge": "merging", "reparametrize": "reparametrize", "symmetry": "symmetry", "compare": "compare"},
    **{"estimate": "estimate", "import": "importing"},
    **dict.fromkeys(FILE_COMMANDS, "from_files"),
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
        sys.stdout.flush()  # here, where a closed reader is noticed, not when Python ends
    except KeyboardInterrupt:  # before anything was begun
        return _interrupted()
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
    if command.startswith("-"):
        return _misunderstood(f"Expected a command, got {command}; for example lightning-sym fit --config zoo/mnist5k.")
    if command not in _COMMANDS:
        return _misunderstood(unknown("command", command, _COMMANDS))
    if command == "recipes":
        return _recipes(rest)
    from lightning_sym.cli.places import check_places, find_own_modules

    find_own_modules(rest)
    if command in _MODULES:
        module = importlib.import_module(f"lightning_sym.cli.{_MODULES[command]}")
        return _own_command(command, getattr(module, "COMMANDS", {command: module})[command], rest)
    if {"-h", "--help"} & set(rest):
        return _shown(command, rest)
    from lightning_sym.cli.checking import checked_options

    try:
        rest = checked_options(rest)  # before the imports, which take seconds
    except ValueError as error:
        return _misunderstood(str(error))
    try:
        check_places(command, rest)
    except (OSError, ValueError) as error:
        return _failed(str(error))
    return _run([command, *rest])


def _shown(command: str, args: list[str]) -> int:
    """Show the overview of the options of ``fit`` and similar commands, or the part that stands after ``--help``."""
    from lightning_sym.cli.overview import overview

    place = next(place for place, arg in enumerate(args) if arg in ("-h", "--help"))
    try:
        print(overview(command, next(iter(args[place + 1 :]), "")))
    except ValueError as error:
        return _misunderstood(str(error))
    return 0


def _with_negative_numbers(args: list[str]) -> list[str]:
    """Join negative numbers to their options by an equals sign: alone they look like options."""
    joined: list[str] = []
    for before, arg in pairwise(["", *args]):
        if re.match(r"-(\.?\d|inf\b)", arg) and re.fullmatch(r"--[^=]+", before):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def _help() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in _COMMANDS.items())
    return (
        f"lightning-sym {__version__}: experiments on the symmetries of neural networks\n\n"
        f"{USAGE}\n\n"
        f"{commands}\n\n"
        "lightning-sym COMMAND --help shows the options of a command, lightning-sym fit --help ZooTask those of a\n"
        "class. To print the settings of a run: lightning-sym fit --config zoo/mnist5k --print_config=skip_default."
    )


def _recipes(args: list[str]) -> int:
    from lightning_sym.recipes import recipe_names, recipe_path, recipe_summary

    usage = "usage: lightning-sym recipes [NAME]"
    if args in (["-h"], ["--help"]):
        print(usage)
        return 0
    if len(args) > 1 or any(arg.startswith("-") for arg in args):
        return _misunderstood(f"recipes takes one name or none, got {' '.join(args)}.", usage)
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


def _misunderstood(message: str, usage: str = USAGE) -> int:
    print(f"lightning-sym: error: {message}\n{usage}", file=sys.stderr)
    return 2


def _own_command(command: str, module: Any, args: list[str]) -> int:
    """Run a command that reads its own options: the module has HELP, USAGE, NEEDS, ``read_options`` and ``run``."""
    if not args or args[0] in ("-h", "--help"):
        print(module.HELP)
        return 0
    try:
        asked = module.read_options(args)
    except ValueError as error:
        return _misunderstood(str(error), f"usage: lightning-sym {command} --help shows the options")
    try:
        found = module.look(asked) if hasattr(module, "look") else asked
    except (OSError, ValueError) as error:  # of folders and files, also before the imports
        return _failed(str(error))

    def start() -> None:
        _load(module.NEEDS)
        module.run(found)

    return _guarded(start, kept="run" if command in FILE_COMMANDS else "")


def _run(args: list[str]) -> int:
    from lightning_sym.cli.watch import Watch

    with Watch() as watch:
        start = partial(watch.call, lambda: _load("lightning_sym.cli.lightning").RecipeCLI(args=args))
        return _guarded(start, kept="checkpoint" if args[0] == "fit" else "")


def _load(module: str) -> Any:
    """Import a module that needs PyTorch."""
    with _no_collection():
        return importlib.import_module(module)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Import without garbage collection, which would take seconds: an import makes a million permanent objects.

    Later collections skip them as well. A process that has imported PyTorch before, such as a test, is unaffected.
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


def _guarded(start: Callable[[], None], *, kept: str = "") -> int:
    """Call a function, and report an error as one sentence and an exit status.

    Args:
        start: The function.
        kept: Word for the remains of an interrupted call: a checkpoint (later calls resume from it), a run; or empty.
    """
    try:
        start()
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning has cleaned up after the interrupted fit
            return _interrupted(kept)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return _interrupted(kept)
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


def _interrupted(kept: str = "") -> int:
    from lightning_sym.cli.places import has_epoch

    todo = ""
    if kept and (module := sys.modules.get("lightning_sym.cli.lightning")):
        run_dir = module.RecipeParser.given.get("run_dir", "runs/default")
        if kept == "checkpoint" and os.path.isfile(os.path.join(run_dir, "checkpoints", "last.ckpt")):
            todo = "; resume with --ckpt_path last"
        elif os.path.isfile(os.path.join(run_dir, "config.yaml")):
            again = "restart with --overwrite true" + f" --out {shlex.quote(str(run_dir))}" * (kept == "run")
            again = again if has_epoch(Path(run_dir)) else "the same command starts it again"
            todo = f"{' before its first checkpoint' * (kept == 'checkpoint')}; {again}"
    print(f"lightning-sym: interrupted{todo}", file=sys.stderr)
    return 130
