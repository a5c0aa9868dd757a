"""Messages of a failed command line: one line in plain words, with the nearest valid name."""

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jsonargparse._parameter_resolvers import get_signature_parameters
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException  # type: ignore[attr-defined]

from lightning_sym._text import TRACEBACK, nearest
from lightning_sym.cli.given import LINKED, SECTIONS, SETTINGS, class_of, classes, full_path, path_of, unknown_option
from lightning_sym.cli.named import missing_module
from lightning_sym.datamodules import ImageTransform
from lightning_sym.networks import Network, NetworkOrModule

_OTHER_WEIGHTS = r"^Error\(s\) in loading state_dict for (\w+):"  # of torch
_NO_FORWARD = r"^Trying to use forward AD with (?:aten::)?(\w+) that does not support it"


def explain(message: str, given: Mapping[str, Any] | None = None) -> str:
    """Return an error's message on one line, and a parser's in plain words with the nearest valid name.

    Args:
        message: Message of an error, or of the parser.
        given: The options that were given, by :func:`~lightning_sym.cli.given.merge`; they tell the class of
            an option that the parser calls by its name alone.
    """
    line = " ".join(message.split())
    if match := re.search(_NO_FORWARD, line):
        return (
            f"torch has no forward derivative of {match[1]}, which this measurement needs; choose another one, or a "
            "network without this operation."
        )
    if match := re.search(_OTHER_WEIGHTS, line):
        return (
            f"The checkpoint holds other weights than {match[1]}: {_first_difference(line)}; give the checkpoint of a "
            "run with these settings."
        )
    if path := _foreign_class(line):
        return (
            f"{path} is of the package lightning, but lightning_sym needs the classes of pytorch_lightning; use "
            f"{path.replace('lightning.pytorch', 'pytorch_lightning')}, and import from there."
        )
    if match := re.search(
        r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected|"
        r"does not accept (?:option|nested key) '([^']+)'|[Uu]nrecognized arguments: (?:--)?([^\s=]+)",
        line,
    ):
        return _unknown_option(next(filter(None, match.groups())), given or {}, early=bool(match[1]))
    if (match := re.search(r"NestedArg\(key='([^']+)'", line)) and (key := re.search(r'Parser key "([^"]+)"', line)):
        path = full_path(given or {}, f"{key[1]}.{match[1]}")
        return f"There is no option {path!r}: {path.removesuffix('.' + match[1])!r} names no class that could have it."
    if match := re.search(r"arguments are required: (.+)|Key \"([^\"]+)\" is required", line):
        names = [name.split(".", 1)[-1] for name in (match[1] or match[2]).split(", ")]
        for path, kind, options in classes(given or {}):  # the parser does not name the class
            if names[0] not in options and names[0] in (_options_of(kind) or ()):
                return missing_option(path, kind, names[0])
        missing = ", ".join(f"--{name}" for name in names)
        return f"Missing: {missing}; or name a recipe with --config (lightning-sym recipes lists them)."
    if match := re.search(r"Early stopping conditioned on metric `([^`]+)` which is not available(.*)", line):
        names = re.findall("`([^`]+/[^`]+)`", match[2])
        hint = nearest(match[1], names) or f" It logs {', '.join(names)}."
        return f"monitor must be a number that the run logs, got {match[1]!r}.{hint}"
    if match := re.fullmatch(r"`(\w+)` can be (.+), got (\w+)", line):  # of Lightning's callbacks
        allowed = [word.strip("' ") for word in match[2].split(",")]
        return f"{match[1]} must be {' or '.join(allowed)}, got {match[3]!r}."
    if "add_function_arguments() got an unexpected keyword" in line:
        found = [(path, kind) for path, kind, _ in classes(given or {}) if inspect.isfunction(object_at(kind))]
        for path, kind in found:
            package, _, name = kind.rpartition(".")
            instead = f"; for torchvision: --{path} TorchvisionNetwork --{path}.model {name}"
            instead = instead if package.startswith("torchvision.models") else ""
            return (
                f"{path} must name a class, to which sizes of the data are handed, and {kind} is a function{instead}."
            )
    if match := re.search(
        r"Errors: (?:- Expected a <class 'NoneType'> )?- ((?!Expected).+?[.?]) Given value type:", line
    ):
        line = match[1]  # older versions of jsonargparse hand a constructor's error on as text only
    return (
        _broken_module(line, given or {}) or _wrong_class(line, given or {}) or _wrong_value(line, given or {}) or line
    )


def _unknown_option(name: str, given: Mapping[str, Any], early: bool) -> str:
    if wrong := unknown_option(given, _options_of):
        return wrong
    path = full_path(given, name)
    if path != name and (early or not class_of(given.get(path.partition(".")[0]))):  # the parser knows no class yet
        return f"Option {path!r} comes before the class that has it; put --config, or the class, before it."
    return f"Unknown option {name!r}.{nearest(name, (*SECTIONS, *SETTINGS))}"


def missing_option(path: str, kind: str, name: str) -> str:
    """Return the sentence for an option that a class requires and that was not given.

    Args:
        path: Dotted path of the option with the class.
        kind: Name of the class.
        name: Name of the option.
    """
    return f"Missing: --{path}.{name}, which {kind.rpartition('.')[2]} requires."


def first_missing(given: Mapping[str, Any]) -> str:
    """Return the sentence for an option that a class requires; empty if none is missing.

    The parser misses those with a type itself; others it takes to be null.

    Args:
        given: The options that were given, by :func:`~lightning_sym.cli.given.merge`.
    """
    for path, kind, options in classes(given):
        found = _class_named(kind)
        parameters = [] if found is None else get_signature_parameters(found)
        for place, parameter in enumerate(parameters):
            # The task hands its optimizer the parameters, and its scheduler the optimizer; sizes are linked.
            called = place == 0 and re.search(r"(optimizer|scheduler)$", path)
            absent = parameter.default is inspect.Parameter.empty and parameter.annotation is inspect.Parameter.empty
            if absent and not called and parameter.name not in (*LINKED, *options):
                return missing_option(path, kind, parameter.name)
    return ""


def _options_of(kind: str) -> frozenset[str] | None:
    """Return the options of an imported class or function of any package."""
    found = _class_named(kind) or object_at(kind)
    if not callable(found):
        return None
    return frozenset(parameter.name for parameter in get_signature_parameters(found))


def _class_named(kind: str) -> type | None:
    return class_at(kind) or next((known for known in _classes() if known.__name__ == kind), None)


def _wrong_class(line: str, given: Mapping[str, Any]) -> str | None:
    """Return the sentence for a class that was not found or is of the wrong kind; None if that is not the trouble."""
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", line):
        path = f"{match[1]}.{match[2]}"
        names = _class_names() if match[2][0].isupper() else dir(sys.modules.get(match[1]))
        return f"{_where(given, path)}There is no {_kind(match[2])} {path}.{nearest(match[2], names)}"
    if match := re.search(r"No module named '([\w.]+)'", line):
        return _no_module(match[1], given)
    # A class without its path; a plain word may be a wrong value where a class is one of several things accepted.
    basic = re.search(r"Expected an? <class '(?!NoneType)", line)
    if (match := re.search(r"Expected a dot import path string: (\w+)", line)) and (
        basic is None or match[1][0].isupper()
    ):
        hint = nearest(match[1], _class_names())
        if match[1] in _class_names():
            return f"{_where(given, match[1])}{match[1]} is a class of the wrong kind."
        ours = ", or the name of a shipped class" if match[1][0].isupper() else ", as torch.nn.functional.mse_loss"
        return f"{_where(given, match[1])}Unknown {_kind(match[1])} {match[1]!r}; give its full path{ours}.{hint}"
    if match := re.search(
        r"Expected '([\w.]+)' to be (?:a subclass of|a function that returns) <?[^<>]*?(\w+)'?>?\.", line
    ):
        return f"{_where(given, match[1])}{match[1]} is no {_ROLES.get(match[2], match[2])}."
    if match := re.search(r"Expected '([\w.]+)' to be a class that instantiates into callable", line):
        return (
            f"{_where(given, match[1])}{match[1]} is no class of callable objects; expected a function, or a class "
            "as torch.nn.MSELoss."
        )
    if match := re.search(r"(?:Unexpected import object|or a subclass spec, but got) (.+?) - Expected", line):
        key = re.search(r'Parser key "([^"]+)"', line)
        where = path_of(given, key[1] if key else "", match[1])
        return f"{where}: expected the path of a class or a function, got {match[1]!r}."
    if match := re.search(r"does not correspond to a subclass of (\w+)", line):
        key = re.search(r'Parser key "([^"]+)"', line)
        wanted = {NetworkOrModule.__name__: "torch.nn.Module", "Dataset": "torch.utils.data.Dataset"}
        where = f"{full_path(given, key[1])}: " if key else ""
        return f"{where}{' or '.join(_misfits(line))} is not a subclass of {wanted.get(match[1], match[1])}."
    return None


def _first_difference(line: str) -> str:
    """Return the first difference between weights and a network, from torch's list of all."""
    if match := re.search(r"(Missing|Unexpected) key\(s\) in state_dict: ((?:\"[^\"]+\",? ?)+)", line):
        first, *others = re.findall(r'"([^"]+)"', match[2])
        named = f"{first}{f' and {len(others)} more' if others else ''}"
        return f"it has no {named}" if match[1] == "Missing" else f"it has {named} besides"
    match = re.search(r"size mismatch for ([\w.]+): .*?Size\((\[.*?\])\) from .*?Size\((\[.*?\])\)", line)
    return f"{match[1]} has shape {match[2]} instead of {match[3]}" if match else line.partition(": ")[2].rstrip(". ")


# Names of the options that take a class of such objects.
_ROLES = {
    "Optimizer": "optimizer; expected a class as torch.optim.SGD",
    "LRScheduler": "scheduler; expected a class as torch.optim.lr_scheduler.CosineAnnealingLR",
    "StitchingMap": "stitching map; expected a name as full, or a class as lightning_sym.stitching.LowRankMap",
}


def _kind(name: str) -> str:
    return "class" if name[0].isupper() else "function"


def _where(given: Mapping[str, Any], value: str) -> str:
    """Return the path of the option with this value, to begin a sentence with; empty if that is not known."""
    path = path_of(given, "", value)
    return f"{path}: " if path else ""


def _no_module(missing: str, given: Mapping[str, Any]) -> str:
    """Return the sentence for a module that was not found: one that was named, or one that such a module imports."""
    for path, kind, _ in classes(given):
        module = kind.rpartition(".")[0]
        if f"{module}.".startswith(f"{missing}."):
            return missing_module(path, missing)
        try:
            importlib.import_module(module or "lightning_sym")
        except ImportError as error:
            if error.name == missing:
                return (
                    f"{path}: {module}, which holds {kind.rpartition('.')[2]}, imports {missing!r}, and there is no "
                    "such module; install it, or put its folder on PYTHONPATH."
                )
    return f"There is no module {missing!r}; install it, or put its folder on PYTHONPATH."


def _broken_module(line: str, given: Mapping[str, Any]) -> str | None:
    """Return the sentence for a module that the parser tried to import, and that raised an error; None if none did."""
    for path, kind, _ in classes(given):
        module, _, name = kind.replace(":", ".").rpartition(".")
        if not module or kind not in line or module in sys.modules:  # one that failed is not there
            continue
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue  # another sentence tells
        except Exception as error:
            frames = list(traceback.extract_tb(error.__traceback__))
            own = [one for one in frames if one.filename == _file_of(module)] or frames
            said = " ".join(str(error).split())
            return (
                f"{path}: {module}, which holds {name}, cannot be imported: {type(error).__name__} in line "
                f"{own[-1].lineno}{': ' if said else ''}{said.rstrip('.')}; correct the module."
            )
    return None


def _file_of(module: str) -> str:
    spec = find_spec(module)
    return str(spec.origin) if spec is not None else ""


# Names of types in messages about values of a wrong type.
_KINDS = {
    **dict.fromkeys(("Sequence", "list"), "a list"),
    **dict.fromkeys(("Mapping", "dict"), "a mapping"),
    **{"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"},
}


def _wrong_value(line: str, given: Mapping[str, Any]) -> str | None:
    """Return the sentence for a value of the wrong type; None if that is not the trouble."""
    value = re.search(r"(?:Got value|Given value): (.*)$", line)
    # Literals are written out, types are not: <class 'int'>.
    kinds = [
        "null" if kind == "NoneType" else kind.rsplit(".")[-1] or f"one of {options}"
        for kind, options in re.findall(r"Expected an? (?:<class '([\w.]+)'>|(?:typing\.)?Literal\[([^\]]*)\])", line)
    ]
    if value is None or not set(kinds) - {"null"}:
        return None
    kinds = [_KINDS.get(kind, kind) for kind in dict.fromkeys(sorted(kinds, key="null".__eq__))]
    if "a number" in kinds:  # includes integers
        finite = "a finite number" if value[1].strip("'\"").lower() in ("nan", "inf", "-inf") else "a number"
        kinds = [finite, *(kind for kind in kinds if kind not in ("a number", "an integer"))]
    key = re.search(r'Parser key "([^"]+)"', line)
    where = f"{path_of(given, key[1], value[1])}: " if key else ""
    return f"{where}expected {' or '.join(kinds)}, got {value[1]!r}."


def _foreign_class(line: str) -> str | None:
    """Return the class of the package ``lightning`` that a message is about, or one derived from it."""
    if match := re.search(r"\b(?<![\w.])(lightning\.(?:pytorch|fabric)(?:\.\w+)*\.[A-Z]\w*)", line):
        return match[1]
    for path in _misfits(line):
        for base in inspect.getmro(class_at(path) or object):
            if base.__module__.startswith(("lightning.pytorch.", "lightning.fabric.")):
                return f"{base.__module__}.{base.__qualname__}"
    return None


def _misfits(line: str) -> list[str]:
    """Return the classes that a message says are not of the kind that is needed."""
    paths = re.findall(r"Import path ([\w.]+) does not correspond", line)
    if not paths and "does not correspond" in line:  # within lists and unions only the value says which
        paths = re.findall(r"\b[a-z_]\w*(?:\.\w+)*\.[A-Z]\w*", line.rpartition("Given value: ")[2])
    return list(dict.fromkeys(paths))


def class_at(path: str) -> type | None:
    """Return the class at a dotted path; None if there is none."""
    found = object_at(path)
    return found if isinstance(found, type) else None


def object_at(path: str) -> Any:
    """Import the object at a dotted path; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def root_cause(error: BaseException) -> BaseException:
    """Return the error that a parser wrapped while it built classes, or the error itself."""
    inner: BaseException | None = error
    while inner is not None:
        frames = traceback.extract_tb(inner.__traceback__)
        if frames and "jsonargparse" not in Path(frames[-1].filename).parts:
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def is_expected(error: BaseException) -> bool:
    """Return whether an error's message is meant for users, so that its type need not be named."""
    if isinstance(error, TypeError):  # of this package; Python's own messages need their type, and have no full stop
        frames = list(traceback.walk_tb(error.__traceback__))
        name = str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""
        return name.startswith("lightning_sym.") and str(error).endswith(".")
    if isinstance(error, RuntimeError):  # the first is that of a mistyped option
        return bool(re.search(rf"^Early stopping conditioned on metric|{_NO_FORWARD}|{_OTHER_WEIGHTS}", str(error)))
    return isinstance(error, ValueError | OSError | MisconfigurationException)


def show_traceback() -> bool:
    """Return whether the user asked for tracebacks."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _classes() -> Iterator[type]:
    """Yield the classes that a recipe may name: ours, torch's, Lightning's, and those of imported modules."""
    kinds = [Callback, ImageTransform, LightningDataModule, LightningModule, Network, torch.optim.Optimizer]
    kinds.append(torch.optim.lr_scheduler.LRScheduler)
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if not kind.__name__.startswith("_"):
            yield kind


def _class_names() -> list[str]:
    return [kind.__name__ for kind in _classes()]
