"""``lightning-sym reparametrize``: minimise an objective of weights without changing the network's function.

This module reads the options without importing torch.
"""

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_sym._checkpoint_files import check_described, check_out, element_in, files_of_result, single
from lightning_sym._text import nearest, unknown
from lightning_sym.cli.given import (
    arguments_of,
    class_of,
    listed,
    missing_options,
    prefix_of,
    read_own,
    seed_of,
    shape_of,
    whole,
)
from lightning_sym.cli.named import check_classes

USAGE = (
    "usage: lightning-sym reparametrize CHECKPOINT {--objective OBJECTIVE | --apply ELEMENT} --out OUT "
    "[--network NETWORK] [--data DATAMODULE] [--factors scales,rotations]"
)
NEEDS = "lightning_sym.models"  # imports PyTorch
# The names are repeated here so that misspelt ones do not wait for PyTorch.
OBJECTIVES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "quantization_error": {
        **{"bits": (), "activations": (), "granularity": ("tensor", "channel")},
        "kind": ("output", "range"),
    },
    "sparsity": {"fraction": (), "kind": ("output", "l1")},
    "weight_norm": {"p": ()},
    "path_norm": {"p": ()},
    "gradient_norm": {"loss": ("cross_entropy", "mse"), "p": ()},
    "sharpness": {"loss": ("cross_entropy", "mse"), "kind": ("trace", "top"), "probes": ()},
}
_WITHOUT_DATA = ("range", "l1")  # kinds of objectives, which weight_norm is, too
FACTORS = ("all", "scales", "cells", "gained", "rotations", "phases", "shifts", "tilts")
STARTS = ("balanced", "hadamard")
HELP = f"""{USAGE}

Moves a checkpoint along the orbit of its network's symmetry group until an objective of its weights is least. The
function stays the same, which is verified before anything is written; no list of layers is needed.

  CHECKPOINT           a state dict, Lightning checkpoint, .safetensors, an index of shards, or a folder of transformers
                       (config.json beside weights); no code in it is run
  --out OUT            a new .safetensors, or a new folder for an index or a folder, with its other files. Names, types
                       and shards are those of CHECKPOINT. The folder also gets element.safetensors, history.csv and
                       report.json; for moved.safetensors these are moved.element.safetensors and so on

  --objective NAME     with --objective.OPTION for its options; also a class by its full path:
    quantization_error   --objective.bits 4, .granularity tensor|channel, .activations 8, .kind output|range
    sparsity             --objective.fraction 0.5, .kind output|l1
    weight_norm          --objective.p 2
    path_norm            --objective.p 2
    gradient_norm        --objective.p 2, .loss cross_entropy|mse
    sharpness            --objective.kind trace|top, .loss cross_entropy|mse, .probes 10
  --apply ELEMENT      instead: apply the element.safetensors of another checkpoint of the same architecture, or of the
                       folder that holds it; --inverse applies its inverse

  --data DATAMODULE    inputs of the objective, and losses before and after on the test data; --data.ARGUMENT for its
                       arguments. "random" draws inputs for the network. Only weight_norm and the kinds range and l1
                       need none
  --samples 256        number of training inputs, drawn at random, or of random inputs
  --factors LIST       coordinates to move: {", ".join(FACTORS)},
                       or patterns of axis groups as `lightning-sym symmetry` names them; default: by the objective
  --start WHERE        balanced (least norm by scales and matrices) or hadamard (rotated streams); default: as given
  --budget 3           bound on logarithms of scales and condition numbers; --maximize uses 3 by default
  --max_steps 200      most steps; --lr 0.02 of Adam, which minimises rounded objectives

  --network NETWORK    for files: torchvision:resnet18, timm:NAME, transformers:path/to/config.json, or a class by its
                       full path (lightning_sym's: by its name); --network.ARGUMENT for its arguments
  --prefix PREFIX      prefix of the weights' names, if several fit
  --ignore PATTERN     copy tensors by name, as 'ema.*'; several patterns with commas
  --input 3,224,224    shape of one input, without the batch; default: from the data, the model
                       or the element
  --tokens 1000        the input is integers below 1000
  --seed 0             of random inputs and of the order of batches

Nothing is downloaded. timm and transformers: pip install 'lightning_sym[hf]'."""
_FLAGS = ("inverse", "maximize")
_OPTIONS = (
    *("objective", "apply", "out", "data", "samples", "factors", "start", "budget", "max_steps", "lr", "network"),
    *("prefix", "ignore", "input", "tokens", "seed", *_FLAGS),
)
_OF_ONE_OBJECTIVE = tuple(name for names in OBJECTIVES.values() for name in names)
_OF_OBJECTIVES = ("factors", "start", "budget", "max_steps", "lr", "maximize")


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        checkpoint: The checkpoint.
        out: Where the result goes.
        objective: Name or class of the objective; None to apply an element.
        arguments: Its options.
        element: The file of an element to apply; None for none.
        inverse: Whether to apply its inverse.
        network: The class or the model, with its arguments; None for that of a folder.
        data: The class of the data with its arguments; None for none.
        samples: Number of inputs of the objective.
        settings: Arguments of the descent.
        prefix: Prefix of the names of the weights.
        ignore: Patterns of names of tensors to copy.
        shape: Shape of one input.
        tokens: The input is integers below this number.
        seed: Seed of random inputs and of the order of batches.
    """

    checkpoint: str
    out: Path
    objective: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    element: str | None = None
    inverse: bool = False
    network: Any = None
    data: Any = None
    samples: int = 256
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    ignore: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    tokens: int | None = None
    seed: int = 0


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is not known, missing or has a wrong value, or there is not one checkpoint.
    """
    words = {word.partition("=")[0] for word in args}
    if short := [name for name in _OF_ONE_OBJECTIVE if f"--{name}" in words]:
        raise ValueError(f"reparametrize has no option '{short[0]}'. Did you mean 'objective.{short[0]}'?")
    given, files = read_own("reparametrize", args, _OPTIONS, _FLAGS)
    if len(files) != 1:
        raise ValueError(f"Expected one checkpoint, got {', '.join(files) or 'none'}.")
    if not class_of(given.get("out")):
        raise ValueError(missing_options(["out"], "moved.safetensors"))
    objective = class_of(given.get("objective"))
    if bool(objective) == ("apply" in given):
        raise ValueError(f"Expected one of --objective and --apply, got {'both' if objective else 'neither'}.")
    if objective and "." not in objective and objective not in OBJECTIVES:
        raise ValueError(unknown("objective", objective, OBJECTIVES))
    arguments = {name: _number_or_text(value) for name, value in arguments_of(given.get("objective")).items()}
    if objective in OBJECTIVES:
        _check_arguments(objective, arguments)
    if useless := [name for name in _OF_OBJECTIVES if name in given and not objective]:
        raise ValueError(f"--{useless[0]} needs --objective; leave it out with --apply.")
    if "inverse" in given and objective:
        raise ValueError("--inverse needs --apply; leave it out with --objective.")
    settings: dict[str, Any] = {name: _number(given, name) for name in ("budget", "lr") if name in given}
    if "maximize" in given:
        settings["maximize"] = True
    if "max_steps" in given:
        settings["max_steps"] = whole(given, "max_steps", 0)
    if "start" in given:
        settings["start"] = _word("start", given["start"], STARTS)
    if "factors" in given:
        settings["factors"] = list(listed(given, "factors"))
    return Asked(
        checkpoint=files[0],
        out=Path(str(given["out"])),
        objective=objective or None,
        arguments=arguments,
        element=None if objective else str(given["apply"]),
        inverse="inverse" in given,
        network=given.get("network"),
        data=given.get("data"),
        samples=whole(given, "samples", 1, 256),
        settings=settings,
        prefix=prefix_of(given),
        ignore=listed(given, "ignore"),
        shape=shape_of(given),
        tokens=whole(given, "tokens", 1),
        seed=seed_of(given, 0),
    )


def _check_arguments(objective: str, arguments: Mapping[str, Any]) -> None:
    """Check the options of an objective by name, and that they are numbers or one of its words."""
    for name, value in arguments.items():
        if name not in OBJECTIVES[objective]:
            known = nearest(name, OBJECTIVES[objective], "objective.")
            known = known or f" It takes {', '.join(OBJECTIVES[objective])}."
            raise ValueError(f"{objective} has no option 'objective.{name}'.{known}")
        words = OBJECTIVES[objective][name]
        if words:
            _word(f"objective.{name}", value, words)
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"--objective.{name} takes a number, got {value!r}.")


def look(asked: Asked) -> Asked:
    """Check files, folders and names of classes.

    Raises:
        FileNotFoundError: If there is no such element.
        ValueError: If there is no such file or class, nothing says what the network is, the objective needs data, or
            the result cannot be written to its place.
    """
    found = single(asked.checkpoint)
    if asked.element is not None:
        element_in(asked.element)
    own = asked.objective if "." in str(asked.objective) else None
    check_classes(network=asked.network, data=None if asked.data == "random" else asked.data, objective=own)
    if asked.network is None:
        check_described(found)
    without = asked.objective == "weight_norm" or asked.arguments.get("kind") in _WITHOUT_DATA
    if asked.objective in OBJECTIVES and asked.data is None and not without:
        raise ValueError(
            f"{asked.objective} needs data to run the network on; give --data, or an objective of the weights alone."
        )
    check_out(asked.out, found, list(files_of_result(asked.out).values()))
    return asked


def _number(given: Mapping[str, Any], name: str) -> float:
    """Return a positive number that was given.

    Raises:
        ValueError: If it is none.
    """
    value = given[name]
    try:
        found = 0.0 if isinstance(value, bool) else float(value)  # YAML reads 1e-3 as text
    except (TypeError, ValueError):
        found = 0.0
    if not found > 0:
        raise ValueError(f"--{name} takes a number > 0, got {value!r}.")
    return found


def _word(option: str, value: Any, words: Sequence[str]) -> str:
    if value not in words:
        raise ValueError(unknown(f"word of --{option}", value, words))
    return str(value)


def _number_or_text(value: Any) -> Any:
    """Return a number if text is one: YAML reads 1e-3 as text."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def run(asked: Asked) -> None:
    """Move a checkpoint, write the result and its report, and print how it went.

    Args:
        asked: As :func:`read_options` returns it.

    Raises:
        ValueError: If something does not fit; nothing is written then.
        OSError: If a file is missing or cannot be written.
    """
    import torch

    from lightning_sym.cli.importing import make_data, sizes_named, with_sizes
    from lightning_sym.cli.merging import errors_named
    from lightning_sym.merging.checkpoint import find_checkpoints, model_of
    from lightning_sym.models import build_light, build_model, example_of
    from lightning_sym.orbit.files import calibration_batch, reparametrize_checkpoint, stored_input
    from lightning_sym.orbit.objective import Objective, Watched
    from lightning_sym.orbit.objectives import cross_entropy
    from lightning_sym.tasks import SquaredDistance

    is_random = asked.data == "random"
    data = None
    if asked.data is not None and not is_random:
        data = make_data(asked.data)
    identity = None if data is None else data.identity()  # reads the data, which tell whether targets are numbers
    regression = bool(getattr(data, "regression", False))
    made = None if asked.objective is None else _objective(asked, "mse" if regression else "cross_entropy")
    if asked.network is not None:
        name = class_of(asked.network)
        arguments = with_sizes(name, arguments_of(asked.network), data)
        model = build_light(functools.partial(build_model, name, arguments))
    else:
        model = model_of(find_checkpoints(asked.checkpoint)[0])
    options: dict[str, Any] = {"notes": list(model.notes), **asked.settings}
    about: dict[str, Any] = {"network": model.name, "settings": {**asked.settings, "seed": asked.seed}}
    torch.manual_seed(asked.seed)
    batch: Any = None
    if data is not None:
        batch = calibration_batch(data.curvature_dataloader(), asked.samples, asked.seed)
        about |= {"data": identity, "samples": len(batch[0])}
        options |= {"test": data.test_dataloader(), "loss": SquaredDistance() if regression else cross_entropy}
    elif is_random:
        batch = example_of(model, asked.shape, asked.tokens, asked.samples)
        inputs = [own for own in (*batch.positional, *batch.keywords.values()) if isinstance(own, torch.Tensor)]
        about |= {"data": "random", "samples": len(inputs[0])}  # fewer if a class holds an example
        options["notes"].append("the objective was measured on random inputs, and may differ on real data")
    if data is not None and asked.shape is None:
        options["inputs"] = batch[0][:2]
    else:
        shape, tokens = asked.shape, asked.tokens
        if shape is None and model.shape is None and model.library != "transformers" and asked.element is not None:
            shape, tokens = stored_input(asked.element) or (None, tokens)
        options["inputs"] = example_of(model, shape, tokens)
    if made is not None:
        about |= {"objective": asked.objective, "options": made.options}
        options |= {"data": batch, "seed": asked.seed, "compressed": made.compressed(batch)}
    else:
        about |= {"element": asked.element, "inverse": asked.inverse}
    progress = _Progress(str(asked.objective))
    if made is not None and isinstance(made.objective, Objective):
        made = replace(made, objective=Watched(made.objective, progress))
    own = sizes_named(class_of(asked.network), arguments_of(asked.network), data)
    with errors_named(model.name, data), contextlib.closing(progress), own:
        found = reparametrize_checkpoint(
            asked.checkpoint,
            asked.out,
            None if made is None else made.objective,
            element=asked.element,
            inverse=asked.inverse,
            network=model.network,
            prefix=asked.prefix,
            ignore=asked.ignore,
            about=about,
            **options,
        )
    _print(asked, found)


class _Progress:
    """Writes the value of an objective to the standard error: on a terminal one line, else a line each 30 seconds.

    Args:
        name: The objective's name.
    """

    def __init__(self, name: str) -> None:
        self._name, self._count, self._began = name, 0, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last = self._began

    def __call__(self, value: float) -> None:
        """Take the next value."""
        now, self._count = time.monotonic(), self._count + 1
        if now - self._last >= (0.2 if self._terminal else 30):
            self._last = now
            line = f"{self._name}: {value:.6g} after {self._count} evaluations, {now - self._began:.0f} s"
            sys.stderr.write(f"\r{line:<78}" if self._terminal else f"{line}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._terminal:
            sys.stderr.write(f"\r{'':<78}\r")
            sys.stderr.flush()


@dataclass(frozen=True)
class _Made:
    """An objective.

    Attributes:
        objective: It.
        name: Its name.
        options: Its options, with defaults.
    """

    objective: Any
    name: str
    options: Mapping[str, Any]

    def compressed(self, batch: Any) -> dict[str, Any]:
        """Return the compression that the objective prepares networks for, by name; none for other objectives."""
        from lightning_sym.orbit.rounding import prune_by_magnitude, round_to_nearest

        own = self.options
        if self.name == "quantization_error":
            settings = {key: own[key] for key in ("bits", "granularity", "activations")}
            activations = f", {own['activations']}-bit activations" if own["activations"] else ""
            change: Any = functools.partial(round_to_nearest, **settings, data=batch if activations else None)
            return {f"{own['bits']}-bit weights{activations}": change}
        if self.name == "sparsity":
            return {f"{own['fraction']:.0%} pruned": functools.partial(prune_by_magnitude, fraction=own["fraction"])}
        return {}


def _objective(asked: Asked, loss: str) -> _Made:
    """Make the objective; its loss follows from the data unless it is given."""
    from lightning_sym.models import construct
    from lightning_sym.orbit import objectives

    name, options = str(asked.objective), dict(asked.arguments)
    if "." in name:
        return _Made(construct(name, options, objectives, "objective")(), name, options)
    takes = inspect.signature(objectives.OBJECTIVES[name]).parameters
    if "loss" in takes:
        options = {"loss": loss, **options}
    made = objectives.objective_named(name, **options)
    defaults = {key: own.default for key, own in takes.items() if own.default is not own.empty}
    return _Made(made, name, {**defaults, **options})


def _print(asked: Asked, found: Any) -> None:
    """Print how it went, and where the files are."""
    from rich.console import Console

    from lightning_sym.reports.report import ResultTable

    console = Console(width=80)
    say = functools.partial(console.print, highlight=False, markup=False)
    if asked.objective is None:
        say(f"{asked.checkpoint}: {'the inverse of ' if asked.inverse else ''}{asked.element} applied")
    else:
        steps = len(found.history) - 1
        say(f"{asked.objective}: {found.before:.6g}, then {found.after:.6g} ({steps} steps, {found.seconds:.1f} s)")
    say(f"largest change of an output: {found.change:.1e}; as written {found.change_as_written:.1e}")
    if found.losses is not None:
        rows = [{"weights": name, "loss": loss, "accuracy": own} for name, (loss, own) in found.losses.items()]
        ResultTable("networks", "on the test data", rows).show(console)
    for note in found.notes:
        say(f"  note: {note}")
    say(f"  weights {found.out}", soft_wrap=True)
    name = f"{asked.out.stem}." if asked.out.suffix == ".safetensors" else ""
    folder = asked.out.parent if name else asked.out
    for label, file in (("element", "element.safetensors"), ("report", "report.json")):
        if label == "report" or asked.objective is not None:
            say(f"  {label:7} {folder / (name + file)}", soft_wrap=True)
